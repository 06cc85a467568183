// Products of large matrices with bias and GELU, and the gradient of their weights.

#pragma once

#include "products.h"

namespace smallvit {
namespace SMALLVIT_ISA {
namespace {

// Calls f(k, count) for parts of `depth`: equally large, at most `most` deep, and as few as possible.
template <class F>
INLINE void in_parts(int64_t depth, int64_t most, F f) {
  const int64_t parts = (depth + most - 1) / most, size = (depth + parts - 1) / parts;
  for (int64_t k = 0; k < depth; k += size) f(k, depth - k < size ? depth - k : size);
}

constexpr int64_t FEW = 16;  // rows packed into all panels at a time, so that both sides stay in the cache

// Columns of b as float32, panel after panel, with zeros after the last column.
template <class T>
void pack_columns(const T* b, int64_t stride, int64_t depth, int64_t columns, float* to) {
  for (int64_t start = 0; start < depth; start += FEW) {
    const int64_t end = depth - start < FEW ? depth : start + FEW;
    each_panel(columns, [&](int64_t j, int64_t vectors) {
      for (int64_t k = start; k < end; k++)
        for (int64_t v = 0; v < vectors; v++) {
          const T* from = b + k * stride + j + v * LANES;
          const int64_t count = columns - j - v * LANES;
          store(to + j * depth + (k * vectors + v) * LANES, count >= LANES ? load(from) : load(from, count));
        }
    });
  }
}

// The same for rows of b, as columns.
template <class T>
void pack_rows(const T* b, int64_t stride, int64_t depth, int64_t rows, float* to) {
  each_panel(rows, [&](int64_t first, int64_t vectors) {
    for (int64_t v = 0; v < vectors; v++)
      for (int64_t k = 0; k < depth; k += LANES) {
        const int64_t deep = depth - k, j = first + v * LANES;
        V square[LANES];
        for (int64_t r = 0; r < LANES; r++) {
          const T* row = b + (j + r) * stride + k;
          square[r] = j + r >= rows ? V{} : deep >= LANES ? load(row) : load(row, deep);
        }
        turn(square);
        float* panel = to + first * depth + v * LANES;
        for (int64_t r = 0; r < LANES && r < deep; r++) store(panel + (k + r) * vectors * LANES, square[r]);
      }
  });
}

template <class T>
constexpr bool is_float = sizeof(T) == sizeof(float);

// bfloat16 needs the whole depth at once: partial sums would be rounded.
template <class T>
INLINE int64_t deepest(int64_t depth) {
  return is_float<T> && depth > DEEPEST ? DEEPEST : depth;
}

// Rows that are multiplied with all panels before the next rows: few enough for the L2 cache.
INLINE int64_t tall(int64_t depth) {
  const int64_t fit = 49152 / (depth > DEEPEST ? DEEPEST : depth);
  return fit > 192 ? 192 : fit < 4 * ROWS ? 4 * ROWS : fit / ROWS * ROWS;
}

// Whether rows of `a` are copied before they are multiplied: to float32, or because they are whole pages apart and
// would compete for the same few sets of the L1 cache.
template <class T>
INLINE bool copied(const Dense& task) {
  return !is_float<T> || task.depth % 1024 == 0;
}

// The distance between copied rows.
INLINE int64_t copied_row(int64_t deep) { return padded(deep) + LINE; }

template <class T>
int64_t dense_scratch(const Dense& task, int64_t columns) {
  const int64_t deep = deepest<T>(task.depth);
  return (columns + WIDE) * (deep + 1) + tall(task.depth) * (WIDE + (copied<T>(task) ? copied_row(deep) : 0));
}

// Writes a panel of products, or partial sums, at x to the result unless it is computed in place; `more` adds to the
// values there. GELU follows the `last` part.
template <class T>
void finish_panel(const Dense& task, const float* x, int64_t stride, int64_t top, int64_t bottom, int64_t left,
                  int64_t width, bool in_place, bool more, bool last) {
  const bool gelu = last && task.gelu, keep = !in_place && (task.plain || !gelu);
  for (int64_t i = top; i < bottom; i++, x += stride) {
    T* c = static_cast<T*>(task.c) + i * task.columns + left;
    T* sum = task.plain ? static_cast<T*>(task.plain) + i * task.columns + left : c;
    each(width, [&](int64_t j, auto count) INLINE_LAMBDA {
      V y = load(x + j, count);
      if (more) y += load(sum + j, count);
      if (keep) store(sum + j, y, count);
      if (gelu) store(c + j, y * below(y), count);
    });
  }
}

// The columns of b are packed; a few rows at a time are multiplied with one panel after the other.
template <class T>
void dense(const Dense& task, int64_t top, int64_t bottom, int64_t left, int64_t right, float* scratch) {
  const int64_t depth = task.depth, columns = task.columns, step = tall(depth), whole = right - left + WIDE;
  const T* given = static_cast<const T*>(task.b);
  float* bias = scratch;
  if (task.bias) pack(task.bias + left, 0, 1, right - left, 1.0f, bias);
  in_parts(depth, deepest<T>(depth), [&](int64_t k, int64_t deep) {
    float* b = bias + whole;
    float* tile = b + whole * deep;
    float* copies = tile + step * WIDE;
    if (task.turned)
      pack_rows(given + left * depth + k, depth, deep, right - left, b);
    else
      pack_columns(given + k * columns + left, columns, deep, right - left, b);
    const bool last = k + deep == depth;
    for (int64_t i = top; i < bottom; i += step) {
      const int64_t rows = bottom - i < step ? bottom - i : step;
      const float* a;
      int64_t a_row;
      const T* x = static_cast<const T*>(task.a) + i * depth + k;
      if (copied<T>(task)) {
        a = copies, a_row = copied_row(deep);
        for (int64_t r = 0; r < rows; r++) pack(x + r * depth, 0, 1, deep, 1.0f, copies + r * a_row);
      } else {
        a = reinterpret_cast<const float*>(x), a_row = depth;
      }
      each_panel(right - left, [&](int64_t first, int64_t vectors) {
        const int64_t j = left + first, wide = vectors * LANES, width = right - j < wide ? right - j : wide;
        const bool in_place = is_float<T> && width == wide;  // in the result itself
        float* c = in_place ? static_cast<float*>(task.plain ? task.plain : task.c) + i * columns + j : tile;
        const int64_t c_row = in_place ? columns : wide;
        Onto onto;
        if (!k && task.bias) onto.from = bias + first;
        if (k && in_place) onto = {c, c_row};
        panel_of<COLUMNS, false, true>(vectors, rows, deep, a, a_row, b + first * deep, wide, c, c_row, onto);
        if (!in_place || (last && task.gelu))
          finish_panel<T>(task, c, c_row, i, i + rows, j, width, in_place, k && !in_place, last);
      });
    }
  });
}

constexpr int64_t DEEP = 128;  // rows of both arrays that a gradient packs at a time

// ROWS more, since a whole vector may be stored after the last few numbers.
int64_t dense_gradient_scratch(const DenseGradient&, int64_t rows, int64_t columns) {
  return DEEP * (rows + 2 * ROWS + columns + WIDE) + ROWS * WIDE;
}

// `down` panels of ROWS columns, of `deep` rows of a; nothing is read from `a_end` on.
template <class T>
void pack_panels(const T* given, int64_t a_row, const T* a_end, int64_t deep, int64_t down, float* a) {
  for (int64_t start = 0; start < deep; start += FEW)
    for (int64_t i = 0; i < down; i++) {
      const int64_t end = deep - start < FEW ? deep : start + FEW;
      const T* from = given + start * a_row + i * ROWS;
      float* to = a + (i * deep + start) * ROWS;
      // A vector that is too wide is overwritten by the next row of the panel, except after the last row.
      if (end < deep && from + (end - start) * a_row + 2 * LANES <= a_end) {
        for (int64_t x = start; x < end; x++, from += a_row, to += ROWS)
          for (int64_t r = 0; r < ROWS; r += LANES) store(to + r, load(from + r));
      } else {
        for (int64_t x = start; x < end; x++, from += a_row, to += ROWS)
          for (int64_t r = 0; r < ROWS; r++) store(to + r, load(from + r, from + r < a_end ? 1 : 0), 1);
      }
    }
}

// A block of ROWS rows and `vectors` vectors, at most C.
template <int C>
INLINE void block_of(int64_t vectors, int64_t depth, const float* a, const float* b, float* c, int64_t c_row,
                     Onto onto) {
  if (vectors == C) return block<ROWS, C>(depth, a, 1, ROWS, b, C * LANES, c, c_row, onto);
  if constexpr (C > 1) block_of<C - 1>(vectors, depth, a, b, c, c_row, onto);
}

// Both arrays are packed part by part, `a` as panels of ROWS columns. Excess columns of a panel are computed and
// ignored. Meanwhile, the next part is prefetched to the L2 cache.
template <class T>
void dense_gradient(const DenseGradient& task, int64_t top, int64_t bottom, int64_t left, int64_t right,
                    float* scratch) {
  const int64_t a_row = task.rows, columns = task.columns, height = bottom - top, width = right - left;
  const int64_t down = (height + ROWS - 1) / ROWS;
  float* a = scratch;
  float* b = a + DEEP * (down + 1) * ROWS;
  float* tile = b + DEEP * padded(width);
  const T* a_given = static_cast<const T*>(task.a) + top;
  const T* b_given = static_cast<const T*>(task.b) + left;
  const T* a_end = static_cast<const T*>(task.a) + task.depth * a_row;
  in_parts(task.depth, DEEP, [&](int64_t k, int64_t deep) {
    pack_columns(b_given + k * columns, columns, deep, width, b);
    pack_panels(a_given + k * a_row, a_row, a_end, deep, down, a);
    if (!top)
      each_panel(width, [&](int64_t first, int64_t vectors) {
        for (int64_t v = 0; v < vectors; v++) {
          const int64_t j = first + v * LANES;
          V total = {};
          for (int64_t x = 0; x < deep; x++) total += load(b + first * deep + (x * vectors + v) * LANES);
          for (int64_t r = 0; r < LANES && j + r < width; r++)
            task.sums[left + j + r] = (k ? task.sums[left + j + r] : 0) + total[r];
        }
      });
    int64_t fetched = k + deep;
    each_panel(width, [&](int64_t j, int64_t vectors) {
      for (int64_t i = 0; i < down; i++) {
        const int64_t due = k + deep + (j * down + vectors * LANES * (i + 1)) * deep / (padded(width) * down);
        for (; fetched < due && fetched < task.depth; fetched++) {
          for (int64_t x = 0; x < height; x += LINE) __builtin_prefetch(a_given + fetched * a_row + x, 0, 2);
          for (int64_t x = 0; x < width; x += LINE) __builtin_prefetch(b_given + fetched * columns + x, 0, 2);
        }
        const float *a_panel = a + i * deep * ROWS, *b_panel = b + j * deep;
        const int64_t tall = height - i * ROWS, own = vectors * LANES, wide = width - j;
        float* c = task.c + (top + i * ROWS) * columns + left + j;
        if (tall >= ROWS && wide >= own) {
          block_of<COLUMNS>(vectors, deep, a_panel, b_panel, c, columns, {k ? c : nullptr, columns});
          continue;
        }
        block_of<COLUMNS>(vectors, deep, a_panel, b_panel, tile, own, {});
        for (int64_t r = 0; r < ROWS && r < tall; r++)
          for (int64_t x = 0; x < own && x < wide; x++)
            c[r * columns + x] = (k ? c[r * columns + x] : 0) + tile[r * own + x];
      }
    });
  });
}

}  // namespace
}  // namespace SMALLVIT_ISA
}  // namespace smallvit
