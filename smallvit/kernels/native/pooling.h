// Max pooling, and BatchNorm with ReLU and max pooling in one pass.

#pragma once

#include "rows.h"

namespace smallvit {
namespace SMALLVIT_ISA {
namespace {

// The pixels of a rectangle, as places in x: N of them, or `number` if N is 0.
template <int N>
struct Pixels {
  static constexpr int MOST = N ? N : 64;
  const int64_t* at;
  int64_t number;

  template <class F>
  INLINE void each(F f) const {
    if constexpr (N > 0) {
#pragma GCC unroll 4
      for (int k = 0; k < N; k++) f(k, at[k]);
    } else {
      for (int64_t k = 0; k < number; k++) f(k, at[k]);
    }
  }
};

// Calls f(place, pixels) for each rectangle in the rows [from, to) of y, counted over all images; `place` is its place
// in y.
template <class F>
INLINE void each_rectangle(const Pool& task, int64_t from, int64_t to, F f) {
  int64_t at[Pixels<0>::MOST];
  for (int64_t i = from; i < to; i++)
    for (int64_t j = 0; j < task.columns; j++) {
      const int64_t image = i / task.rows * task.height, top = i % task.rows * task.down, left = j * task.across;
      int64_t number = 0;
      for (int64_t row = top; row < top + task.down && row < task.height; row++)
        for (int64_t column = left; column < left + task.across && column < task.width; column++)
          at[number++] = ((image + row) * task.width + column) * task.channels;
      const int64_t place = (i * task.columns + j) * task.channels;
      if (number == 4)
        f(place, Pixels<4>{at, number});
      else
        f(place, Pixels<0>{at, number});
    }
}

INLINE V most(V a, V b) { return (b > a) | (b != b) ? b : a; }  // keeps NaN

template <class T>
void max_pool(const Pool& task, int64_t from, int64_t to) {
  each_rectangle(task, from, to, [&](int64_t place, auto pixels) INLINE_LAMBDA {
    each(task.channels, [&](int64_t c, auto count) INLINE_LAMBDA {
      V found = splat(-INFINITY);
      pixels.each([&](int64_t, int64_t at) INLINE_LAMBDA {
        found = most(found, load(static_cast<const T*>(task.x) + at + c, count));
      });
      store(static_cast<T*>(task.y) + place + c, found, count);
    });
  });
}

// Calls back(k, at, share) for each pixel: equally large numbers y[k] share the derivative dy, others get 0. If there
// is a NaN, all get NaN.
template <class Pixels, class F>
INLINE void share_gradient(Pixels pixels, const V* y, V dy, F back) {
  const V one = splat(1), zero = {};
  V found = splat(-INFINITY), number = zero;
  pixels.each([&](int64_t k, int64_t) INLINE_LAMBDA { found = most(found, y[k]); });
  pixels.each([&](int64_t k, int64_t) INLINE_LAMBDA { number += y[k] == found ? one : zero; });
  const V share = dy / number;
  pixels.each([&](int64_t k, int64_t at) INLINE_LAMBDA { back(k, at, share * (y[k] == found ? one : zero)); });
}

template <class T>
void max_pool_gradient(const Pool& task, int64_t from, int64_t to) {
  each_rectangle(task, from, to, [&](int64_t place, auto pixels) INLINE_LAMBDA {
    each(task.channels, [&](int64_t c, auto count) INLINE_LAMBDA {
      V x[decltype(pixels)::MOST];
      pixels.each([&](int64_t k, int64_t at) INLINE_LAMBDA {
        x[k] = load(static_cast<const T*>(task.x) + at + c, count);
      });
      share_gradient(pixels, x, load(static_cast<const T*>(task.dy) + place + c, count),
                     [&](int64_t, int64_t at, V share) INLINE_LAMBDA {
                       store(static_cast<T*>(task.dx) + at + c, share, count);
                     });
    });
  });
}

// The result of BatchNorm and ReLU at channel c.
template <class Count>
INLINE V normed(const PooledNorm& task, V x, int64_t c, Count count) {
  const V factor = load(task.inverse + c, count) * load(task.scale + c, count);
  const V y = (x - load(task.mean + c, count)) * factor + load(task.bias + c, count);
  return task.relu ? (y < 0.0f ? V{} : y) : y;
}

template <class T>
void batch_pool_forward(const PooledNorm& task, int64_t from, int64_t to) {
  each_rectangle(task.pool, from, to, [&](int64_t place, auto pixels) INLINE_LAMBDA {
    each(task.d, [&](int64_t c, auto count) INLINE_LAMBDA {
      V found = splat(-INFINITY);
      pixels.each([&](int64_t, int64_t at) INLINE_LAMBDA {
        found = most(found, normed(task, load(static_cast<const T*>(task.x) + at + c, count), c, count));
      });
      store(static_cast<T*>(task.y) + place + c, found, count);
    });
  });
}

// Calls back(at, x, g) for each pixel of a rectangle, where g is the derivative of the result of BatchNorm.
template <class T, class Pixels, class Count, class F>
INLINE void pooled_gradient(const PooledNorm& task, int64_t place, Pixels pixels, int64_t c, Count count, F back) {
  V x[Pixels::MOST], y[Pixels::MOST];
  pixels.each([&](int64_t k, int64_t at) INLINE_LAMBDA {
    x[k] = load(static_cast<const T*>(task.x) + at + c, count);
    y[k] = normed(task, x[k], c, count);
  });
  share_gradient(pixels, y, load(static_cast<const T*>(task.dy) + place + c, count),
                 [&](int64_t k, int64_t at, V share) INLINE_LAMBDA {
                   back(at, x[k], task.relu ? (y[k] > 0.0f ? share : V{}) : share);
                 });
}

// Adds the contribution of these rows of y to the sums of the gradient, and of the gradient times the normalised x.
template <class T>
void batch_pool_sums(const PooledNorm& task, int64_t from, int64_t to, float* g, float* gy) {
  each_rectangle(task.pool, from, to, [&](int64_t place, auto pixels) INLINE_LAMBDA {
    each(task.d, [&](int64_t c, auto count) INLINE_LAMBDA {
      const V mean = load(task.mean + c, count);
      V total = {}, product = {};
      pooled_gradient<T>(task, place, pixels, c, count, [&](int64_t, V x, V back) INLINE_LAMBDA {
        total += back;
        product += back * (x - mean);
      });
      store(g + c, load(g + c, count) + total, count);
      store(gy + c, load(gy + c, count) + product * load(task.inverse + c, count), count);
    });
  });
}

template <class T>
void batch_pool_backward(const PooledNorm& task, int64_t from, int64_t to) {
  each_rectangle(task.pool, from, to, [&](int64_t place, auto pixels) INLINE_LAMBDA {
    each(task.d, [&](int64_t c, auto count) INLINE_LAMBDA {
      const V inverse = load(task.inverse + c, count), factor = inverse * load(task.scale + c, count);
      const V mean = load(task.mean + c, count), slope = inverse * load(task.gy_mean + c, count);
      const V g_mean = load(task.g_mean + c, count);
      pooled_gradient<T>(task, place, pixels, c, count, [&](int64_t at, V x, V back) INLINE_LAMBDA {
        store(static_cast<T*>(task.dx) + at + c, (back - g_mean - (x - mean) * slope) * factor, count);
      });
    });
  });
}

}  // namespace
}  // namespace SMALLVIT_ISA
}  // namespace smallvit
