// Row-wise operations: LayerNorm, GELU with bias, BatchNorm, and a transpose.

#pragma once

#include "vectors.h"

namespace smallvit {
namespace SMALLVIT_ISA {
namespace {

// (mean, 1 / standard deviation) of a row. The mean of the differences corrects the rounding error of the mean, which
// matters if a row is nearly constant.
struct Moments {
  float mean, inverse;
};

template <class T>
INLINE Moments moments(const T* x, int64_t d, float epsilon) {
  const float rough = sum(add_up(d, [&](int64_t j, auto count) INLINE_LAMBDA { return load(x + j, count); })) / d;
  auto centred = [&](float mean, int64_t j, auto count)
                     INLINE_LAMBDA { return first(load(x + j, count) - mean, count, 0.0f); };
  const float mean =
      rough + sum(add_up(d, [&](int64_t j, auto count) INLINE_LAMBDA { return centred(rough, j, count); })) / d;
  V squares = add_up(d, [&](int64_t j, auto count) INLINE_LAMBDA {
    V y = centred(mean, j, count);
    return y * y;
  });
  return {mean, 1.0f / sqrtf(sum(squares) / d + epsilon)};
}

template <class T>
void norm_forward(const LayerNorm& task, int64_t from, int64_t to) {
  const int64_t d = task.d;
  for (int64_t i = from; i < to; i++) {
    const T* x = static_cast<const T*>(task.x) + i * d;
    T* y = static_cast<T*>(task.y) + i * d;
    const Moments row = moments(x, d, task.epsilon);
    each(d, [&](int64_t j, auto count) INLINE_LAMBDA {
      V normed = (load(x + j, count) - row.mean) * row.inverse;
      store(y + j, normed * load(task.scale + j, count) + load(task.bias + j, count), count);
    });
  }
}

// dx = (g - mean(g) - y mean(g y)) / deviation, with y the normalised row and g = dy scale.
template <class T>
void norm_backward(const LayerNorm& task, int64_t from, int64_t to, float* dscale, float* dbias) {
  const int64_t d = task.d;
  for (int64_t i = from; i < to; i++) {
    const T* x = static_cast<const T*>(task.x) + i * d;
    const T* dy = static_cast<const T*>(task.dy) + i * d;
    T* dx = static_cast<T*>(task.dx) + i * d;
    const Moments row = moments(x, d, task.epsilon);
    V g_total = {}, gy_total = {};
    each(d, [&](int64_t j, auto count) INLINE_LAMBDA {
      V normed = (load(x + j, count) - row.mean) * row.inverse, dout = load(dy + j, count);
      V g = dout * load(task.scale + j, count);
      g_total += g;
      gy_total += g * normed;
      store(dscale + j, load(dscale + j, count) + dout * normed, count);
      store(dbias + j, load(dbias + j, count) + dout, count);
    });
    const float g_mean = sum(g_total) / d, gy_mean = sum(gy_total) / d;
    each(d, [&](int64_t j, auto count) INLINE_LAMBDA {
      V normed = (load(x + j, count) - row.mean) * row.inverse;
      V g = load(dy + j, count) * load(task.scale + j, count);
      store(dx + j, (g - g_mean - normed * gy_mean) * row.inverse, count);
    });
  }
}

template <class T>
void gelu_forward(const Gelu& task, int64_t from, int64_t to) {
  const int64_t d = task.d;
  for (int64_t i = from; i < to; i++) {
    const T* x = static_cast<const T*>(task.x) + i * d;
    T* y = static_cast<T*>(task.y) + i * d;
    each(d, [&](int64_t j, auto count) INLINE_LAMBDA {
      V u = load(x + j, count) + load(task.bias + j, count);
      store(y + j, u * below(u), count);
    });
  }
}

template <class T>
void gelu_backward(const Gelu& task, int64_t from, int64_t to, float* dbias) {
  const int64_t d = task.d;
  for (int64_t i = from; i < to; i++) {
    const T* x = static_cast<const T*>(task.x) + i * d;
    const T* dy = static_cast<const T*>(task.dy) + i * d;
    T* dx = static_cast<T*>(task.dx) + i * d;
    each(d, [&](int64_t j, auto count) INLINE_LAMBDA {
      V u = load(x + j, count) + load(task.bias + j, count);
      Normal at = normal(u);
      V du = load(dy + j, count) * (at.below + u * at.density);
      store(dx + j, du, count);
      store(dbias + j, load(dbias + j, count) + du, count);
    });
  }
}

// Calls f(i, end) for blocks of the rows [from, to), so small that one column after the other can be read from the L1
// cache.
template <class F>
INLINE void each_block(int64_t d, int64_t from, int64_t to, F f) {
  const int64_t fit = (1 << 12) / d, rows = fit < 4 ? 4 : fit;
  for (int64_t i = from; i < to; i += rows) f(i, to - i < rows ? to : i + rows);
}

// The sum of f(i) over the rows [from, to): in four independent sums, since an addition takes four cycles.
template <class F>
INLINE V add_rows(int64_t from, int64_t to, F f) {
  V a = {}, b = {}, c = {}, d = {};
  int64_t i = from;
  for (; i + 4 <= to; i += 4) {
    a += f(i);
    b += f(i + 1);
    c += f(i + 2);
    d += f(i + 3);
  }
  for (; i < to; i++) a += f(i);
  return (a + b) + (c + d);
}

// The mean of each column over the rows [from, to), and the sum of the squares around it.
template <class T>
void column_moments(const BatchNorm& task, int64_t from, int64_t to, float* mean, float* squares) {
  const int64_t d = task.d;
  const float number = static_cast<float>(to - from);
  const T* x = static_cast<const T*>(task.x);
  memset(mean, 0, sizeof(float) * d);
  memset(squares, 0, sizeof(float) * d);
  each_block(d, from, to, [&](int64_t begin, int64_t end) INLINE_LAMBDA {
    each(d, [&](int64_t j, auto count) INLINE_LAMBDA {
      const V sum = add_rows(begin, end, [&](int64_t i) INLINE_LAMBDA { return load(x + i * d + j, count); });
      store(mean + j, load(mean + j, count) + sum, count);
    });
  });
  each(d, [&](int64_t j, auto count) INLINE_LAMBDA { store(mean + j, load(mean + j, count) / number, count); });
  each_block(d, from, to, [&](int64_t begin, int64_t end) INLINE_LAMBDA {
    each(d, [&](int64_t j, auto count) INLINE_LAMBDA {
      const V middle = load(mean + j, count);
      const V sum = add_rows(begin, end, [&](int64_t i) INLINE_LAMBDA {
        const V y = load(x + i * d + j, count) - middle;
        return y * y;
      });
      store(squares + j, load(squares + j, count) + sum, count);
    });
  });
}

template <class T>
void batch_forward(const BatchNorm& task, int64_t from, int64_t to) {
  const T *x = static_cast<const T*>(task.x), *more = static_cast<const T*>(task.more);
  T* result = static_cast<T*>(task.y);
  for (int64_t i = from; i < to; i++)
    each(task.d, [&](int64_t j, auto count) INLINE_LAMBDA {
      const int64_t at = i * task.d + j;
      V factor = load(task.inverse + j, count) * load(task.scale + j, count);
      V y = (load(x + at, count) - load(task.mean + j, count)) * factor + load(task.bias + j, count);
      if (more) y += load(more + at, count);
      if (task.relu) y = y < 0.0f ? V{} : y;  // keeps NaN
      store(result + at, y, count);
    });
}

// The gradient before the ReLU, if there is one.
template <class T, class Count>
INLINE V through(const BatchNorm& task, int64_t at, Count count) {
  V g = load(static_cast<const T*>(task.dy) + at, count);
  return task.relu ? (load(static_cast<const T*>(task.out) + at, count) > 0.0f ? g : V{}) : g;
}

template <class T>
void batch_sums(const BatchNorm& task, int64_t from, int64_t to, float* g, float* gy) {
  const int64_t d = task.d;
  const T* x = static_cast<const T*>(task.x);
  each_block(d, from, to, [&](int64_t begin, int64_t end) INLINE_LAMBDA {
    each(d, [&](int64_t j, auto count) INLINE_LAMBDA {
      const V mean = load(task.mean + j, count), inverse = load(task.inverse + j, count);
      V total = {};
      const V product = add_rows(begin, end, [&](int64_t i) INLINE_LAMBDA {
        const V back = through<T>(task, i * d + j, count);
        total += back;
        return back * (load(x + i * d + j, count) - mean);
      });
      store(g + j, load(g + j, count) + total, count);
      store(gy + j, load(gy + j, count) + product * inverse, count);
    });
  });
}

template <class T>
void batch_backward(const BatchNorm& task, int64_t from, int64_t to) {
  const T* x = static_cast<const T*>(task.x);
  T *dx = static_cast<T*>(task.dx), *dmore = static_cast<T*>(task.dmore);
  for (int64_t i = from; i < to; i++)
    each(task.d, [&](int64_t j, auto count) INLINE_LAMBDA {
      const int64_t at = i * task.d + j;
      V inverse = load(task.inverse + j, count), g = through<T>(task, at, count);
      V normed = (load(x + at, count) - load(task.mean + j, count)) * inverse;
      V back = g - load(task.g_mean + j, count) - normed * load(task.gy_mean + j, count);
      store(dx + at, back * inverse * load(task.scale + j, count), count);
      if (dmore) store(dmore + at, g, count);
    });
}

// Rows [from, to) of the result. The order of the squares is such that whole cache lines of the result are written one
// after the other, even if its rows map to the same cache sets.
template <class T, class Vector>
void transpose(const Transpose& task, int64_t from, int64_t to) {
  constexpr int64_t TALL = 32;
  const int64_t rows = task.rows, columns = task.columns;
  const T* x = static_cast<const T*>(task.x);
  T* y = static_cast<T*>(task.y);
  const int64_t i_end = rows / LANES * LANES, j_end = from + (to - from) / LANES * LANES;
  for (int64_t top = 0; top < i_end; top += TALL)
    for (int64_t j = from; j < j_end; j += LANES)
      for (int64_t i = top; i < top + TALL && i < i_end; i += LANES) {
        Vector square[LANES];
        for (int64_t r = 0; r < LANES; r++) square[r] = load_as<Vector>(x + (i + r) * columns + j);
        turn(square);
        for (int64_t c = 0; c < LANES; c++) memcpy(y + (j + c) * rows + i, &square[c], sizeof(Vector));
      }
  for (int64_t j = from; j < to; j++)
    for (int64_t i = j < j_end ? i_end : 0; i < rows; i++) y[j * rows + i] = x[i * columns + j];
}

}  // namespace
}  // namespace SMALLVIT_ISA
}  // namespace smallvit
