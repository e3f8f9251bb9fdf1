// Steps of one factor: noise by address, an entry's move, its mirror and its moments.
// A thread takes a quad of components of a row, whose four normal numbers one block of Philox
// gives. To be compiled without fused multiply-adds: bits are those of processors.

struct Noise { Word iteration, factor, row0; unsigned int key[2]; };

DEVICE void normals(REAL *z, Word quad, Word row, Word iteration, const Noise &noise) {
  const REAL one = 1;
  auto words = philox_rounds(pack(quad, row, iteration, noise.factor), (Word)noise.key[0],
                             (Word)noise.key[1]);
  REAL r = radius((unsigned int)at<0>(words), one), s = radius((unsigned int)at<2>(words), one);
  auto first = direction((unsigned int)at<1>(words), one);
  auto second = direction((unsigned int)at<3>(words), one);
  z[0] = r * at<0>(first);
  z[1] = r * at<1>(first);
  z[2] = s * at<0>(second);
  z[3] = s * at<1>(second);
}

// Noise of a step; the coarse chain's sums up the two fine chains' numbers.
DEVICE void noise_of(REAL *z, Word quad, Size row, const Noise &noise, int coarse) {
  const Word place = noise.row0 + row;
  if (!coarse) return normals(z, quad, place, noise.iteration, noise);
  REAL other[4];
  normals(z, quad, place, 2 * noise.iteration, noise);
  normals(other, quad, place, 2 * noise.iteration + 1, noise);
  for (int c = 0; c < 4; ++c) z[c] = (z[c] + other[c]) * (REAL)ROOT_HALF;
}

#define NOISE_ARGUMENTS unsigned int key0, unsigned int key1, Word iteration, Word factor, Word row0
#define NOISE Noise noise = {iteration, factor, row0, {key0, key1}}
#define EACH_QUAD                                                                                 \
  const Size quads = (K + 3) / 4;                                                                 \
  for (Size p = THREAD; p < rows * quads; p += THREADS)
#define EACH_ENTRY for (Size p = THREAD; p < rows * K; p += THREADS)

extern "C" __global__ void fill_normals(Size rows, Size K, REAL *out, NOISE_ARGUMENTS) {
  NOISE;
  EACH_QUAD {
    const Size row = p / quads, quad = p % quads;
    REAL z[4];
    normals(z, quad, noise.row0 + row, iteration, noise);
    for (Size c = 4 * quad; c < 4 * quad + 4 && c < K; ++c) out[row * K + c] = z[c - 4 * quad];
  }
}

// A Langevin step in one of its forms: kernels of their own, since one with gamma numbers in it
// would take registers from all of them. `step` is the step, or 1 - exp(-step) where moments are
// matched; `shares` has a share for each row, or is null, and `share` is that of all.
enum Form { PLAIN, METRIC, MOMENTS, SPIKED };

#define LANGEVIN_ARGUMENTS                                                                        \
  Size rows, Size K, REAL *theta, const REAL *grad, const REAL *metric, REAL step, REAL rate,     \
      REAL shape, REAL stays, REAL share, const REAL *shares, REAL most, int coarse, NOISE_ARGUMENTS

template <int FORM> DEVICE void langevin(LANGEVIN_ARGUMENTS) {
  NOISE;
  EACH_QUAD {
    const Size row = p / quads, quad = p % quads;
    REAL z[4];
    noise_of(z, quad, row, noise, coarse);
    auto numbers = pack(stays, rate, shape, shares ? shares[row] : share, most);
    for (Size k = 4 * quad; k < 4 * quad + 4 && k < K; ++k) {
      const Size place = row * K + k;
      const REAL x = theta[place], push = grad[place], own = z[k - 4 * quad];
      if constexpr (FORM == PLAIN) {
        theta[place] = plain_entry(x, push, step, rate, shape, own);
      } else if constexpr (FORM == METRIC) {
        theta[place] = metric_entry(x, push, metric[place], step, rate, shape, own);
      } else if constexpr (FORM == MOMENTS) {
        theta[place] = moment_entry(x, push, metric[place], step, numbers, own);
      } else {
        Word stream[STREAM];
        auto address = pack((unsigned int *)noise.key, iteration, factor, row0 + row, (Word)k);
        theta[place] =
            spiked_entry(x, push, metric[place], step, numbers, own, (Word *)stream, address);
      }
    }
  }
}

#define LANGEVIN(name, form)                                                                      \
  extern "C" __global__ void name(LANGEVIN_ARGUMENTS) {                                           \
    langevin<form>(rows, K, theta, grad, metric, step, rate, shape, stays, share, shares, most,   \
                   coarse, key0, key1, iteration, factor, row0);                                  \
  }
LANGEVIN(plain_step, PLAIN)
LANGEVIN(metric_step, METRIC)
LANGEVIN(moment_step, MOMENTS)
LANGEVIN(spiked_step, SPIKED)

extern "C" __global__ void accumulate_moments(Size rows, Size K, const REAL *theta, REAL weight,
                                              REAL *mean, REAL *m2) {
  EACH_ENTRY {
    auto found = welford(theta[p], mean[p], m2[p], weight);
    mean[p] = at<0>(found);
    m2[p] = at<1>(found);
  }
}

// `columns` are (4, K); without `grad` it is a drift alone.
extern "C" __global__ void kick_drift(Size rows, Size K, REAL *x, REAL *momentum, const REAL *grad,
                                      const REAL *weights, const REAL *columns, REAL size,
                                      REAL part) {
  EACH_ENTRY {
    const Size k = p % K;
    auto column = pack(columns[k], columns[K + k], columns[2 * K + k], columns[3 * K + k]);
    const REAL weight = weights[p / K];
    if (grad) {
      auto found = kicked(x[p], momentum[p], grad[p], weight, column, size, part);
      x[p] = at<0>(found);
      momentum[p] = at<1>(found);
    } else {
      x[p] = x[p] + part * mobility(weight, column, size) * momentum[p];
    }
  }
}

extern "C" __global__ void leapfrog_kick(Size rows, Size K, const REAL *theta, REAL *momentum,
                                         const REAL *grad, const REAL *spread, REAL size,
                                         REAL precision, REAL rate, REAL shape) {
  EACH_ENTRY
    momentum[p] = leapfrog_kicked(theta[p], momentum[p], grad[p], spread[p], size, precision, rate,
                                  shape);
}

extern "C" __global__ void leapfrog_drift(Size rows, Size K, REAL *theta, REAL *momentum,
                                          const REAL *spread, REAL size) {
  EACH_ENTRY {
    auto found = leapfrog_moved(theta[p], momentum[p], spread[p], size);
    theta[p] = at<0>(found);
    momentum[p] = at<1>(found);
  }
}

// A place at which theta has no number is as likely as others below it: times Phi(z).
extern "C" __global__ void level_places(Size rows, Size K, REAL *place, const REAL *theta,
                                        REAL smallest, const REAL *z) {
  EACH_ENTRY if (theta[p] <= smallest)
    place[p] = (REAL)((double)place[p] * (0.5 * erfc(-ROOT_HALF * (double)z[p])));
}

// Rows of which `back` is not zero become those of another array.
extern "C" __global__ void take_rows(Size rows, Size K, REAL *theta, const REAL *other,
                                     const bool *back) {
  EACH_ENTRY if (back[p / K]) theta[p] = other[p];
}

extern "C" __global__ void refresh(Size rows, Size K, REAL *momentum, REAL kept, REAL spread,
                                   NOISE_ARGUMENTS) {
  NOISE;
  EACH_QUAD {
    const Size row = p / quads, quad = p % quads;
    REAL z[4];
    normals(z, quad, noise.row0 + row, iteration, noise);
    for (Size k = 4 * quad; k < 4 * quad + 4 && k < K; ++k)
      momentum[row * K + k] = kept * momentum[row * K + k] + spread * z[k - 4 * quad];
  }
}

// Without `grad` it is a drift alone.
extern "C" __global__ void kick_flight(Size rows, Size K, REAL *theta, REAL *along, REAL *across,
                                       const REAL *grad, const REAL *metric, REAL rate, REAL size,
                                       REAL part) {
  EACH_ENTRY {
    auto found = grad ? kick_entry(theta[p], along[p], across[p], grad[p], metric[p], rate, size, part)
                      : flight_entry(theta[p], along[p], across[p], metric[p], part);
    theta[p] = at<0>(found);
    along[p] = at<1>(found);
    across[p] = at<2>(found);
  }
}

extern "C" __global__ void refresh_length(Size rows, Size K, REAL *across, double keep,
                                          double shape, NOISE_ARGUMENTS) {
  NOISE;
  EACH_ENTRY {
    Word stream[STREAM];
    start_entry((Word *)stream, (unsigned int *)noise.key, iteration, factor, row0 + p / K,
                (Word)(p % K));
    across[p] = length_entry(across[p], keep, shape, (Word *)stream);
  }
}

// theta <- theta (num / (den + penalty))^power, 0 / 0 counts as 0; `penalties` has a number for
// each component, each row, or is null.
extern "C" __global__ void take_share(Size rows, Size K, REAL *theta, const REAL *num,
                                      const REAL *den, double penalty, const double *penalties,
                                      int by_row, double power) {
  EACH_ENTRY {
    const REAL more = penalties ? penalties[by_row ? p / K : p % K] : penalty;
    const REAL total = den[p] + more;
    REAL ratio = total > 0 ? num[p] / total : (REAL)0;
    ratio = ratio < 0 ? (REAL)0 : ratio;
    theta[p] *= power == 1.0 ? ratio : (REAL)pow((double)ratio, power);
  }
}
