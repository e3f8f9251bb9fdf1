// Steps of one factor: noise by address, for the kernels of moves, and steps that are no moves.
// A thread takes a quad of components of a row, whose four normal numbers one block of Philox
// gives. To be compiled without fused multiply-adds: bits are those of processors.

struct Noise { Word iteration, factor, row0; unsigned int key[2]; };

DEVICE void normals(REAL *z, Word quad, Word row, Word iteration, const Noise &noise) {
  const REAL one = 1;
  auto words = rounds(pack(quad, row, iteration, noise.factor), (Word)noise.key[0],
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
#define EACH_ENTRY for (Size p = THREAD; p < rows * K; p += THREADS)

// A place at which theta has no number is as likely as others below it: times Phi(z).
extern "C" __global__ void level_places(Size rows, Size K, REAL *place, const REAL *theta,
                                        REAL smallest, const REAL *z) {
  EACH_ENTRY if (theta[p] <= smallest)
    place[p] = (REAL)((double)place[p] * (0.5 * erfc(-ROOT_HALF * (double)z[p])));
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
