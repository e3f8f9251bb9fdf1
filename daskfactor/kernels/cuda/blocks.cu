// Blocks of one part of the data, all at once: what they add to both factors' sums.
// Block b meets the rows row_start[b] to row_start[b] + row_count[b] of W, and likewise of H.
// Dense blocks lie in a stack (B, m, n), padded; sparse ones together, by rows and by columns.

#define BANDS const Size *row_start, const Size *row_count, const Size *col_start, const Size *col_count
#define LAW double floor, const double *numbers, Size stride
#define LAW_AT(j) law_of(floor, numbers, stride, (Size)(j))

// Rows of bands to a stack (B, n, K), zeros behind a band's last.
extern "C" __global__ void stack_rows(Size B, Size n, Size K, const Size *start, const Size *count,
                                      const REAL *rows, REAL *out) {
  for (Size p = THREAD; p < B * n * K; p += THREADS) {
    const Size b = p / (n * K), i = p / K % n, k = p % K;
    out[p] = i < count[b] ? rows[(start[b] + i) * K + k] : (REAL)0;
  }
}

// And back: rows of a stack that begin at row `first` of their bands, added to bands.
extern "C" __global__ void spread_rows(Size B, Size n, Size K, const Size *start, const Size *count,
                                       Size first, const REAL *stack, REAL *rows) {
  for (Size p = THREAD; p < B * n * K; p += THREADS) {
    const Size b = p / (n * K), i = first + p / K % n, k = p % K;
    if (i >= count[b]) continue;
    const Size to = (start[b] + i) * K + k;
    rows[to] += stack[p];
  }
}

// rows of band b += factor totals[b].
extern "C" __global__ void add_totals(Size B, Size n, Size K, const Size *start, const Size *count,
                                      double factor, const double *totals, REAL *rows) {
  for (Size p = THREAD; p < B * n * K; p += THREADS) {
    const Size b = p / (n * K), i = p / K % n, k = p % K;
    if (i < count[b]) rows[(start[b] + i) * K + k] += (REAL)(factor * totals[b * K + k]);
  }
}

// Sums of columns over each CHUNK rows of a band: out (B, chunks, K).
extern "C" __global__ void sum_rows(Size B, Size chunks, Size K, const Size *start,
                                    const Size *count, const REAL *rows, double *out) {
  for (Size p = THREAD; p < B * chunks * K; p += THREADS) {
    const Size b = p / (chunks * K), first = p / K % chunks * CHUNK, k = p % K;
    double total = 0;
    for (Size i = first; i < first + CHUNK && i < count[b]; ++i)
      total += (double)rows[(start[b] + i) * K + k];
    out[p] = total;
  }
}

// fits -= by times the products of rows with the totals of their block (B, K), or with the rows of
// a stack (B, n, K) if there is one: a warp goes along a row.
extern "C" __global__ void take_products(Size B, Size n, Size K, const Size *start,
                                         const Size *count, double by, const REAL *rows,
                                         const double *totals, const REAL *stack, double *fits) {
  for (Size p = WARP; p < B * n; p += WARPS) {
    const Size b = p / n, i = p % n;
    if (i >= count[b]) continue;
    const Size own = start[b] + i;
    double total = 0;
    for (Size k = LANE; k < K; k += LANES)
      total += (double)rows[own * K + k] * (stack ? (double)stack[p * K + k] : totals[b * K + k]);
    total = warp_sum(total);
    if (LANE == 0) fits[own] -= by * total;
  }
}

// The share of a component in the means of each block, as `mean_share` finds it, times the
// evenness of each of its bands: for the rows of W, and for those of H.
extern "C" __global__ void mean_shares(Size B, Size K, BANDS, const REAL *W, const REAL *H,
                                       const double *row_even, const double *col_even,
                                       REAL *of_rows, REAL *of_cols) {
  for (Size b = WARP; b < B; b += WARPS) {
    double squares = 0, total = 0;
    for (Size number = 0; number < SEEN; ++number) {
      const Size i = row_start[b] + number * row_count[b] / SEEN;
      const Size j = col_start[b] + ((number * 2654435769ll % 4294967296ll) * col_count[b] >> 32);
      double mu = 0, square = 0;
      for (Size k = LANE; k < K; k += LANES) {
        const double part = (double)W[i * K + k] * (double)H[j * K + k];
        mu += part;
        square += part * part;
      }
      mu = warp_sum(mu);
      square = warp_sum(square);
      if (mu > 0.0 || mu != mu) {
        total += mu;
        squares += square / mu;
      }
    }
    const double share = total != 0.0 ? squares / total : 1.0;
    for (Size i = LANE; i < row_count[b]; i += LANES)
      of_rows[row_start[b] + i] = (REAL)(share * row_even[b]);
    for (Size j = LANE; j < col_count[b]; j += LANES)
      of_cols[col_start[b] + j] = (REAL)(share * col_even[b]);
  }
}

// Monitored cells: running mean and sum of squares of their means over `count` draws.
extern "C" __global__ void watch_cells(Size cells, Size K, const Size *rows, const Size *cols,
                                       const REAL *W, const REAL *H, double count, REAL *mean,
                                       REAL *m2) {
  for (Size p = THREAD; p < cells; p += THREADS) {
    REAL value = 0;
    for (Size k = 0; k < K; ++k) value += W[rows[p] * K + k] * H[cols[p] * K + k];
    const REAL delta = value - mean[p];
    mean[p] = (REAL)(mean[p] + delta / count);
    m2[p] += delta * (value - mean[p]);
  }
}

#ifdef RULES
// Entries of a law: `kind` 0 its residual, scaled, and curvature, 1 the ratio of a multiplicative
// update and curvature.
template <class L>
DEVICE auto terms_of(int kind, REAL v, REAL mu, L law, REAL scale, REAL own) {
  return kind == 0 ? step_rule(v, mu, law, scale, own) : ratio_rule(v, mu, law, own);
}
#endif

#ifdef DENSE
// A warp goes along a line of a tile (B, t, n), whose first row is row `first` of its blocks. A
// line is all there is to divide by: divisions of each cell would take longer than products.
#define EACH_LINE                                                                                 \
  for (Size line = WARP; line < B * t; line += WARPS) {                                           \
    const Size b = line / t, i = first + line % t, width = i < row_count[b] ? col_count[b] : 0;   \
    const Size cells = (b * m + i) * n, column = col_start[b];
#define EACH_CELL for (Size j = LANE; j < n; j += LANES)

// A tile of means becomes the terms of their cells; `second`, if there is one, the curvatures.
// Nothing is outside of a block or where v is missing.
extern "C" __global__ void dense_terms(Size B, Size m, Size n, Size t, Size first, BANDS,
                                       const VALUE *V, const REAL *weights, LAW, int kind,
                                       REAL scale, REAL *tile, REAL *second) {
  EACH_LINE
    EACH_CELL {
      REAL a = 0, c = 0;
      if (j < width) {
        const REAL v = (REAL)V[cells + j];
        if (!missing(v)) {
          auto found = terms_of(kind, v, tile[line * n + j], LAW_AT(column + j), scale,
                                weights ? weights[cells + j] : (REAL)1);
          a = at<0>(found);
          c = at<1>(found);
        }
      }
      tile[line * n + j] = a;
      if (second) second[line * n + j] = c;
    }
  }
}

// fits -= by times the deviances of lines of a tile of means: a warp goes along a line.
extern "C" __global__ void dense_row_fits(Size B, Size m, Size n, Size t, Size first, BANDS,
                                          const VALUE *V, const REAL *weights, LAW, double by,
                                          const REAL *tile, double *fits) {
  EACH_LINE
    double total = 0;
    EACH_CELL {
      if (j >= width) break;
      const REAL v = (REAL)V[cells + j];
      if (missing(v)) continue;
      total += at<0>(fit_rule(v, tile[line * n + j], LAW_AT(column + j),
                              weights ? weights[cells + j] : (REAL)1));
    }
    total = warp_sum(total);
    if (LANE == 0 && width) fits[row_start[b] + i] -= by * total;
  }
}

// And of its columns: a thread goes down a column, tile after tile, so that sums have one order.
extern "C" __global__ void dense_col_fits(Size B, Size m, Size n, Size t, Size first, BANDS,
                                          const VALUE *V, const REAL *weights, LAW, double by,
                                          const REAL *tile, double *fits) {
  for (Size p = THREAD; p < B * n; p += THREADS) {
    const Size b = p / n, j = p % n, own = col_start[b] + j;
    if (j >= col_count[b]) continue;
    auto law = LAW_AT(own);
    double total = 0;
    for (Size line = 0; line < t && first + line < row_count[b]; ++line) {
      const Size cell = (b * m + first + line) * n + j;
      const REAL v = (REAL)V[cell];
      if (missing(v)) continue;
      total += at<0>(fit_rule(v, tile[(b * t + line) * n + j], law,
                              weights ? weights[cell] : (REAL)1));
    }
    fits[own] -= by * total;
  }
}

// Sums of deviances and Pearson terms of a tile of means, by warp: partial (warps, 2).
extern "C" __global__ void dense_fit(Size B, Size m, Size n, Size t, Size first, BANDS,
                                     const VALUE *V, const REAL *weights, LAW, const REAL *tile,
                                     double *partial) {
  double deviance = 0, pearson = 0;
  EACH_LINE
    EACH_CELL {
      if (j >= width) break;
      const REAL v = (REAL)V[cells + j];
      if (missing(v)) continue;
      auto found = fit_rule(v, tile[line * n + j], LAW_AT(column + j),
                            weights ? weights[cells + j] : (REAL)1);
      deviance += at<0>(found);
      pearson += at<1>(found);
    }
  }
  deviance = warp_sum(deviance);
  pearson = warp_sum(pearson);
  if (LANE == 0) {
    partial[2 * WARP] += deviance;
    partial[2 * WARP + 1] += pearson;
  }
}
#endif

#ifdef SPARSE
#define EACH ((COMPONENTS + LANES - 1) / LANES)
#define OWN(e) (LANE + (e) * LANES)
// Entries whose rows a warp asks for before it uses the first: a row takes long to come. Their
// sums are taken one after the other all the same.
#define AHEAD (EACH <= 4 ? 4 : 1)

// A lane's share of a row of components.
DEVICE void load_row(const REAL *__restrict__ rows, Size i, REAL *out) {
#pragma unroll
  for (int e = 0; e < EACH; ++e)
    out[e] = OWN(e) < COMPONENTS ? rows[i * COMPONENTS + OWN(e)] : (REAL)0;
}

DEVICE REAL dot(const REAL *w, const REAL *h) {
  REAL mu = 0;
#pragma unroll
  for (int e = 0; e < EACH; ++e) mu += w[e] * h[e];
  return warp_sum(mu);
}

DEVICE void add_to_row(const REAL *sums, Size i, REAL *out) {
#pragma unroll
  for (int e = 0; e < EACH; ++e)
    if (OWN(e) < COMPONENTS) out[i * COMPONENTS + OWN(e)] += sums[e];
}

// A warp goes along a row. What entries are multiplied with goes to `first` and, if there is one,
// to `second`, and their products with H are added to rows of `out` and `out2`, if there are any.
extern "C" __global__ void sparse_rows(Size rows, const Size *__restrict__ indptr,
                                       const int *__restrict__ cols,
                                       const REAL *__restrict__ values,
                                       const REAL *__restrict__ weights,
                                       const REAL *__restrict__ W, const REAL *__restrict__ H, LAW,
                                       int kind, REAL scale, REAL *__restrict__ first,
                                       REAL *__restrict__ second, REAL *__restrict__ out,
                                       REAL *__restrict__ out2) {
  for (Size i = WARP; i < rows; i += WARPS) {
    REAL w[EACH], g[EACH] = {}, c[EACH] = {};
    load_row(W, i, w);
    const Size end = indptr[i + 1];
    for (Size begin = indptr[i]; begin < end; begin += AHEAD) {
      REAL h[AHEAD][EACH], mu[AHEAD];
#pragma unroll
      for (int u = 0; u < AHEAD; ++u) load_row(H, cols[begin + u < end ? begin + u : end - 1], h[u]);
#pragma unroll
      for (int u = 0; u < AHEAD; ++u) mu[u] = dot(w, h[u]);
#pragma unroll
      for (int u = 0; u < AHEAD; ++u) {
        const Size p = begin + u;
        if (p >= end) break;
        auto found = terms_of(kind, values[p], mu[u], LAW_AT(cols[p]), scale,
                              weights ? weights[p] : (REAL)1);
        if (LANE == 0) {
          first[p] = at<0>(found);
          if (second) second[p] = at<1>(found);
        }
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          g[e] += at<0>(found) * h[u][e];
          c[e] += at<1>(found) * h[u][e];
        }
      }
    }
    if (out) add_to_row(g, i, out);
    if (out2) add_to_row(c, i, out2);
  }
}

// A warp goes along a column, whose entries are at `places` and in `rows`: no two threads add to
// the same number, and sums have one order.
extern "C" __global__ void sparse_cols(Size columns, const Size *__restrict__ indptr,
                                       const int *__restrict__ rows,
                                       const Size *__restrict__ places,
                                       const REAL *__restrict__ first,
                                       const REAL *__restrict__ second,
                                       const REAL *__restrict__ W, REAL *__restrict__ out,
                                       REAL *__restrict__ out2) {
  for (Size j = WARP; j < columns; j += WARPS) {
    REAL g[EACH] = {}, c[EACH] = {};
    const Size end = indptr[j + 1];
    for (Size begin = indptr[j]; begin < end; begin += AHEAD) {
      REAL w[AHEAD][EACH], a[AHEAD], b[AHEAD];
#pragma unroll
      for (int u = 0; u < AHEAD; ++u) {
        const Size q = begin + u < end ? begin + u : end - 1, p = places[q];
        load_row(W, rows[q], w[u]);
        a[u] = first[p];
        b[u] = out2 ? second[p] : (REAL)0;
      }
#pragma unroll
      for (int u = 0; u < AHEAD; ++u) {
        if (begin + u >= end) break;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          g[e] += a[u] * w[u][e];
          c[e] += b[u] * w[u][e];
        }
      }
    }
    add_to_row(g, j, out);
    if (out2) add_to_row(c, j, out2);
  }
}

// fits -= by times the deviances of rows, if there are fits; those of entries go to `each`, if
// there is one. A warp goes along a row.
extern "C" __global__ void sparse_row_fits(Size rows, const Size *indptr, const int *cols,
                                           const REAL *values, const REAL *weights, const REAL *W,
                                           const REAL *H, LAW, double by, double *each,
                                           double *fits) {
  for (Size i = WARP; i < rows; i += WARPS) {
    REAL w[EACH];
    load_row(W, i, w);
    double total = 0;
    for (Size p = indptr[i]; p < indptr[i + 1]; ++p) {
      REAL h[EACH];
      load_row(H, cols[p], h);
      const double found = at<0>(
          fit_rule(values[p], dot(w, h), LAW_AT(cols[p]), weights ? weights[p] : (REAL)1));
      if (each && LANE == 0) each[p] = found;
      total += found;
    }
    if (fits && LANE == 0) fits[i] -= by * total;
  }
}

// fits -= by times the deviances of columns, whose entries are at `places`: a warp goes along one.
extern "C" __global__ void sparse_col_fits(Size columns, const Size *indptr, const Size *places,
                                           const double *each, double by, double *fits) {
  for (Size j = WARP; j < columns; j += WARPS) {
    double total = 0;
    for (Size q = indptr[j] + LANE; q < indptr[j + 1]; q += LANES) total += each[places[q]];
    total = warp_sum(total);
    if (LANE == 0) fits[j] -= by * total;
  }
}

// Sums of deviances and Pearson terms of stored entries, by warp: partial (warps, 2).
extern "C" __global__ void sparse_fit(Size rows, const Size *__restrict__ indptr,
                                      const int *__restrict__ cols,
                                      const REAL *__restrict__ values,
                                      const REAL *__restrict__ weights,
                                      const REAL *__restrict__ W, const REAL *__restrict__ H, LAW,
                                      double *__restrict__ partial) {
  double deviance = 0, pearson = 0;
  for (Size i = WARP; i < rows; i += WARPS) {
    REAL w[EACH];
    load_row(W, i, w);
    for (Size p = indptr[i]; p < indptr[i + 1]; ++p) {
      REAL h[EACH];
      load_row(H, cols[p], h);
      auto found =
          fit_rule(values[p], dot(w, h), LAW_AT(cols[p]), weights ? weights[p] : (REAL)1);
      deviance += at<0>(found);
      pearson += at<1>(found);
    }
  }
  if (LANE == 0) {
    partial[2 * WARP] += deviance;
    partial[2 * WARP + 1] += pearson;
  }
}
#endif
