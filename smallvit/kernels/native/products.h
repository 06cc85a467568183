// Products of float32 matrices in the cache, and the copies that they read.

#pragma once

#include "vectors.h"

namespace smallvit {
namespace SMALLVIT_ISA {
namespace {

// What a product is added to: the rows at `from`, a single row for a step of 0, or zero for null.
struct Onto {
  const float* from = nullptr;
  int64_t row = 0;
};

// The depth of a product, in several parts: `step` apart in `a`, as the rows of a window are, and contiguous in b.
struct Parts {
  int64_t count = 1, step = 0;
};

// c (rows x columns) = onto + a b. Rows of b and c are whole vectors; `a` is read element by element, at
// a[row * a_row + part * step + k * a_k]. All in float32. FAR: neither c nor the next rows of `a` are in the L1 cache
// yet.
template <int R, int C, bool FAR = false>
INLINE void block(int64_t depth, const float* a, int64_t a_row, int64_t a_k, const float* b, int64_t b_row, float* c,
                  int64_t c_row, Onto onto, Parts parts = {}) {
  V total[R][C] = {};
  if (FAR || onto.from == c)
    for (int i = 0; i < R; i++) __builtin_prefetch(c + i * c_row, 1);
  for (int64_t part = 0; part < parts.count; part++) {
    const float* from = a + part * parts.step;
    for (int64_t k = 0; k < depth; k++) {
      if (FAR && k % LINE == 0)
        for (int i = 0; i < R; i++) __builtin_prefetch(from + (R + i) * a_row);
      V row[C];
      for (int j = 0; j < C; j++) row[j] = load(b + j * LANES);
      for (int i = 0; i < R; i++) {
        float x = from[i * a_row];
        for (int j = 0; j < C; j++) total[i][j] += x * row[j];
      }
      from += a_k;
      b += b_row;
    }
  }
  if (onto.from)
    for (int i = 0; i < R; i++)
      for (int j = 0; j < C; j++) total[i][j] += load(onto.from + i * onto.row + j * LANES);
  for (int i = 0; i < R; i++)
    for (int j = 0; j < C; j++) store(c + i * c_row + j * LANES, total[i][j]);
}

template <int R, int C, bool ACROSS, bool FAR>
void rows(int64_t count, int64_t depth, const float* a, int64_t a_stride, const float* b, int64_t b_row, float* c,
          int64_t c_row, Onto onto, Parts parts) {
  const int64_t a_row = ACROSS ? 1 : a_stride, a_k = ACROSS ? a_stride : 1;
  for (; count; count--, a += R * a_row, c += R * c_row) {
    block<R, C, FAR>(depth, a, a_row, a_k, b, b_row, c, c_row, onto, parts);
    if (onto.from) onto.from += R * onto.row;
  }
}

// Rows are split evenly: 65 rows are ten blocks of 6 and one of 5, not ten of 6, one of 4 and one of 1.
template <int R, int C, bool ACROSS, bool FAR>
void share(int64_t size, int64_t count, int64_t depth, const float* a, int64_t a_stride, const float* b, int64_t b_row,
           float* c, int64_t c_row, Onto onto, Parts parts) {
  if (size == R) return rows<R, C, ACROSS, FAR>(count, depth, a, a_stride, b, b_row, c, c_row, onto, parts);
  if constexpr (R > 1) share<R - 1, C, ACROSS, FAR>(size, count, depth, a, a_stride, b, b_row, c, c_row, onto, parts);
}

template <int C, bool ACROSS, bool FAR = false>
void panel(int64_t height, int64_t depth, const float* a, int64_t a_stride, const float* b, int64_t b_row, float* c,
           int64_t c_row, Onto onto, Parts parts) {
  constexpr int R = tallest(C);
  const int64_t blocks = (height + R - 1) / R, size = height / blocks, larger = height % blocks;
  const int64_t a_row = ACROSS ? 1 : a_stride;
  if (larger) share<R, C, ACROSS, FAR>(size + 1, larger, depth, a, a_stride, b, b_row, c, c_row, onto, parts);
  const int64_t done = larger * (size + 1);
  if (onto.from) onto.from += done * onto.row;
  share<R, C, ACROSS, FAR>(size, blocks - larger, depth, a + done * a_row, a_stride, b, b_row, c + done * c_row, c_row,
                           onto, parts);
}

// A panel of `vectors` vectors, at most C.
template <int C, bool ACROSS, bool FAR = false>
void panel_of(int64_t vectors, int64_t height, int64_t depth, const float* a, int64_t a_stride, const float* b,
              int64_t b_row, float* c, int64_t c_row, Onto onto, Parts parts = {}) {
  if (vectors == C) return panel<C, ACROSS, FAR>(height, depth, a, a_stride, b, b_row, c, c_row, onto, parts);
  if constexpr (C > 1)
    panel_of<C - 1, ACROSS, FAR>(vectors, height, depth, a, a_stride, b, b_row, c, c_row, onto, parts);
}

// Calls f(first column, vectors) for each panel of at most COLUMNS vectors; columns are split evenly, as rows are.
template <class F>
INLINE void each_panel(int64_t columns, F f) {
  const int64_t vectors = (columns + LANES - 1) / LANES, count = (vectors + COLUMNS - 1) / COLUMNS;
  const int64_t size = vectors / count, larger = vectors % count;
  for (int64_t p = 0, j = 0; p < count; p++) {
    const int64_t own = size + (p < larger);
    f(j, own);
    j += own * LANES;
  }
}

// c = a b or, with ADD, c += a b. ACROSS: `a` is transposed, so that its stride is from one k to the next.
template <bool ADD, bool ACROSS>
void product(int64_t height, int64_t width, int64_t depth, const float* a, int64_t a_stride, const float* b,
             int64_t b_row, float* c, int64_t c_row) {
  if (!height) return;
  each_panel(width, [&](int64_t j, int64_t vectors) {
    panel_of<COLUMNS, ACROSS>(vectors, height, depth, a, a_stride, b + j, b_row, c + j, c_row,
                              {ADD ? c + j : nullptr, c_row});
  });
}

// Rows as float32, zero-padded to whole vectors.
template <class T>
void pack(const T* x, int64_t stride, int64_t rows, int64_t columns, float factor, float* to) {
  const int64_t width = padded(columns);
  for (int64_t i = 0; i < rows; i++, x += stride, to += width)
    each(columns, [&](int64_t j, auto count) INLINE_LAMBDA { store(to + j, load(x + j, count) * factor); });
}

// The transpose of packed rows, with its rows zero-padded to whole vectors.
void turn(const float* x, int64_t rows, int64_t columns, float* to) {
  const int64_t width = padded(rows), stride = padded(columns);
  for (int64_t i = 0; i < rows; i += LANES)
    for (int64_t j = 0; j < columns; j += LANES) {
      V square[LANES];
      for (int64_t r = 0; r < LANES; r++) square[r] = i + r < rows ? load(x + (i + r) * stride + j) : V{};
      turn(square);
      for (int64_t c = 0; c < LANES && j + c < columns; c++) store(to + (j + c) * width + i, square[c]);
    }
}

template <class T>
void unpack(const float* x, int64_t rows, int64_t columns, float factor, T* to, int64_t stride) {
  const int64_t width = padded(columns);
  for (int64_t i = 0; i < rows; i++, x += width, to += stride)
    each(columns, [&](int64_t j, auto count) INLINE_LAMBDA { store(to + j, load(x + j) * factor, count); });
}

}  // namespace
}  // namespace SMALLVIT_ISA
}  // namespace smallvit
