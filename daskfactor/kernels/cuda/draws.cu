// Entries drawn with replacement inside each block of a part, by address, and put in order: as
// they lie then, sums over them have one writer and one order, as those of sparse blocks have.

#define BANDS const Size *row_start, const Size *row_count, const Size *col_start, const Size *col_count

// The first of `count` ascending numbers that is not below a limit, or beyond it.
template <class T> DEVICE Size first_from(const T *numbers, Size count, Size limit) {
  Size low = 0, high = count;
  while (low < high) {
    const Size middle = (low + high) / 2;
    if ((Size)numbers[middle] < limit) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Where a candidate of a block is: its row and column there, and its place among all cells or
// entries, -1 if it is not stored.
struct Found { Size i, j, place; };

#ifdef DENSE
#define CELLS const VALUE *values, Size m, Size n
DEVICE Found look_up(Size b, Size at, Size width, const Size *row_start, CELLS) {
  const Size i = at / width, j = at - i * width;
  return {i, j, (b * m + i) * n + j};
}
#define LOOK_UP look_up(b, at, col_count[b], row_start, values, m, n)
#define CANDIDATES (row_count[b] * col_count[b])
#else
#define CELLS const REAL *values, const Size *indptr, const int *cols
#if ZEROS
DEVICE Found look_up(Size at, Size width, Size row0, Size col0, const Size *indptr, const int *cols) {
  const Size i = at / width, j = at - i * width, low = indptr[row0 + i];
  const Size count = indptr[row0 + i + 1] - low;
  const Size p = low + first_from(cols + low, count, col0 + j);
  return {i, j, p < low + count && cols[p] == col0 + j ? p : -1};
}
#define CANDIDATES (row_count[b] * col_count[b])
#else
DEVICE Found look_up(Size at, Size rows, Size row0, Size col0, const Size *indptr, const int *cols) {
  const Size p = indptr[row0] + at, i = first_from(indptr + row0, rows + 1, p + 1) - 1;
  return {i, cols[p] - col0, p};
}
#define CANDIDATES (indptr[row_start[b] + row_count[b]] - indptr[row_start[b]])
#endif
#define LOOK_UP                                                                                   \
  look_up(at, ZEROS ? col_count[b] : row_count[b], row_start[b], col_start[b], indptr, cols)
#endif

// Draw p is the one of block b that is p - ends[b - 1] there; `streams` are those of blocks. Keys
// are ascending by row, draws of a row in the order in which they are drawn.
extern "C" __global__ void draw_entries(Size draws, Size B, const Size *ends, const Size *streams,
                                        Word iteration, unsigned int key0, unsigned int key1, BANDS,
                                        CELLS, const REAL *weights, Size *keys, int *drawn_cols,
                                        REAL *drawn_values, REAL *drawn_weights) {
  for (Size p = THREAD; p < draws; p += THREADS) {
    Size b = 0;
    while (p >= ends[b]) ++b;
    const Size draw = p - (b ? ends[b - 1] : 0), count = CANDIDATES;
    for (Word attempt = 0;; ++attempt) {
      auto words = philox_rounds(pack(attempt, (Word)(draw >> 1), iteration, (Word)streams[b]),
                                 (Word)key0, (Word)key1);
      const Size at = place_among(count, draw, words);
      const Found found = LOOK_UP;
      const REAL v = found.place < 0 ? (REAL)0 : (REAL)values[found.place];
      if (missing(v)) continue;
      keys[p] = (row_start[b] + found.i) * draws + p;
      drawn_cols[p] = (int)(col_start[b] + found.j);
      drawn_values[p] = v;
      if (weights) drawn_weights[p] = found.place < 0 ? (REAL)1 : weights[found.place];
      break;
    }
  }
}

// Draws in the order of sorted keys, with keys by which they are sorted by column.
extern "C" __global__ void order_draws(Size draws, const Size *keys, const int *drawn_cols,
                                       const REAL *drawn_values, const REAL *drawn_weights,
                                       int *cols, REAL *values, REAL *weights, Size *column_keys) {
  for (Size q = THREAD; q < draws; q += THREADS) {
    const Size p = keys[q] % draws;
    cols[q] = drawn_cols[p];
    values[q] = drawn_values[p];
    if (weights) weights[q] = drawn_weights[p];
    column_keys[q] = drawn_cols[p] * draws + q;
  }
}

// Places and rows of draws in the order of columns.
extern "C" __global__ void place_draws(Size draws, const Size *keys, const Size *column_keys,
                                       Size *places, int *rows) {
  for (Size q = THREAD; q < draws; q += THREADS) {
    const Size p = column_keys[q] % draws;
    places[q] = p;
    rows[q] = (int)(keys[p] / draws);
  }
}

// Where the draws of each line begin, (lines + 1,).
extern "C" __global__ void draw_starts(Size lines, Size draws, const Size *keys, Size *starts) {
  for (Size i = THREAD; i <= lines; i += THREADS) starts[i] = first_from(keys, draws, i * draws);
}
