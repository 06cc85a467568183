// Convolutions with their gradients, as products over bands of rows; and depthwise convolutions.

#pragma once

#include "linear.h"

namespace smallvit {
namespace SMALLVIT_ISA {
namespace {

// A convolution does not unfold its windows: the rows of x for a band of result rows are copied once, with zero
// padding. In this copy, the rows of a window are parts of a product's depth, and the next window starts a few pixels
// later.
INLINE int64_t copied_width(const Unfold& windows) {
  return (windows.width + 2 * windows.before) * windows.channels;
}

// Rows of the result per band: their copies fit into the L2 cache.
INLINE int64_t band(const Unfold& windows) {
  const int64_t fit = (1 << 15) / copied_width(windows) - windows.tall;
  const int64_t rows = fit > 0 ? fit / windows.down + 1 : 1;
  return rows < windows.rows ? rows : windows.rows;
}

// A block of a gradient may read some numbers after the last window.
INLINE int64_t band_size(const Unfold& windows) {
  return padded(((band(windows) - 1) * windows.down + windows.tall) * copied_width(windows) + tallest(1));
}

template <class T>
void copy_band(const Unfold& windows, int64_t from, int64_t to, float* out) {
  const int64_t inner = windows.width * windows.channels, around = windows.before * windows.channels;
  const T* image = static_cast<const T*>(windows.from) + from / windows.rows * windows.height * inner;
  const int64_t top = from % windows.rows * windows.down - windows.above;
  for (int64_t y = top; y < top + (to - from - 1) * windows.down + windows.tall; y++, out += inner + 2 * around) {
    const bool within = y >= 0 && y < windows.height;
    memset(out, 0, sizeof(float) * (within ? around : inner + 2 * around));
    if (!within) continue;
    each(inner, [&](int64_t x, auto count) INLINE_LAMBDA {
      store(out + around + x, load(image + y * inner + x, count), count);
    });
    memset(out + around + inner, 0, sizeof(float) * around);
  }
}

// Calls f(from, to) for each band of the result rows [from, to), counted over all images; a band is in one image.
template <class F>
INLINE void each_band(const Unfold& windows, int64_t from, int64_t to, F f) {
  for (int64_t next; from < to; from = next) {
    const int64_t left = windows.rows - from % windows.rows, most = left < band(windows) ? left : band(windows);
    next = to - from < most ? to : from + most;
    f(from, next);
  }
}

int64_t conv_scratch(const Conv& task) {
  return band_size(task.windows) + task.windows.columns * WIDE;
}

template <class T>
void conv(const Conv& task, int64_t from, int64_t to, float* scratch) {
  const Unfold& windows = task.windows;
  const int64_t part = windows.wide * windows.channels, depth = windows.tall * part, features = task.features;
  const int64_t width = copied_width(windows);
  const float* b = task.packed;
  float* x = scratch;
  float* tile = x + band_size(windows);
  each_band(windows, from, to, [&](int64_t top, int64_t bottom) {
    copy_band<T>(windows, top, bottom, x);
    each_panel(features, [&](int64_t j, int64_t vectors) {
      const int64_t own = vectors * LANES, used = features - j < own ? features - j : own;
      const bool in_place = is_float<T> && used == own;  // in the result itself
      for (int64_t i = top; i < bottom; i++) {
        T* y = static_cast<T*>(task.y) + i * windows.columns * features + j;
        float* c = in_place ? reinterpret_cast<float*>(y) : tile;
        panel_of<COLUMNS, false>(vectors, windows.columns, part, x + (i - top) * windows.down * width,
                                 windows.across * windows.channels, b + j * depth, own, c, in_place ? features : own,
                                 {}, {windows.tall, width});
        if (in_place) continue;
        for (int64_t pixel = 0; pixel < windows.columns; pixel++)
          each(used, [&](int64_t k, auto count) INLINE_LAMBDA {
            store(y + pixel * features + k, load(tile + pixel * own + k, count), count);
          });
      }
    });
  });
}

int64_t conv_gradient_scratch(const Conv& task) {
  const Unfold& windows = task.windows;
  return band_size(windows) + band(windows) * windows.columns * padded(task.features) + tallest(1) * WIDE;
}

// Rows [from, to) of the gradient, which are in one row of the windows, and a panel of its columns at `c`: for each
// pixel of a band, the numbers of its window at `a` times the gradient of the pixel at b.
template <int C>
void gradient_panel(const Conv& task, int64_t vectors, int64_t used, int64_t bands, int64_t from, int64_t to,
                    const float* a, const float* b, int64_t b_row, float* c, bool more, float* tile) {
  if constexpr (C > 1)
    if (vectors < C) return gradient_panel<C - 1>(task, vectors, used, bands, from, to, a, b, b_row, c, more, tile);
  constexpr int R = tallest(C);
  const Unfold& windows = task.windows;
  const Parts parts = {bands, windows.down * copied_width(windows)};
  const int64_t a_k = windows.across * windows.channels, columns = task.features;
  for (; from < to; from += R, a += R, c += R * columns) {
    if (to - from >= R && used == C * LANES) {
      block<R, C>(windows.columns, a, 1, a_k, b, b_row, c, columns, {more ? c : nullptr, columns}, parts);
      continue;
    }
    block<R, C>(windows.columns, a, 1, a_k, b, b_row, tile, C * LANES, {}, parts);
    for (int64_t r = 0; r < R && r < to - from; r++)
      for (int64_t x = 0; x < used; x++)
        c[r * columns + x] = (more ? c[r * columns + x] : 0) + tile[r * C * LANES + x];
  }
}

template <class T>
void conv_gradient(const Conv& task, int64_t begin, int64_t end, int64_t top, int64_t bottom, float* dkernel,
                   float* scratch) {
  const Unfold& windows = task.windows;
  const int64_t part = windows.wide * windows.channels, features = task.features, width = copied_width(windows);
  const bool direct = is_float<T> && features % LANES == 0;  // pixels of dy are whole vectors
  float* x = scratch;
  float* packed = x + band_size(windows);
  float* tile = packed + band(windows) * windows.columns * padded(features);
  each_band(windows, begin, end, [&](int64_t from, int64_t to) {
    copy_band<T>(windows, from, to, x);
    const T* dy = static_cast<const T*>(task.dy) + from * windows.columns * features;
    if (!direct) pack(dy, features, (to - from) * windows.columns, features, 1.0f, packed);
    const float* b = direct ? reinterpret_cast<const float*>(dy) : packed;
    each_panel(features, [&](int64_t j, int64_t vectors) {
      const int64_t own = vectors * LANES, used = features - j < own ? features - j : own;
      for (int64_t p = top / part; p * part < bottom; p++) {
        const int64_t first = top > p * part ? top : p * part, last = bottom < (p + 1) * part ? bottom : (p + 1) * part;
        gradient_panel<COLUMNS>(task, vectors, used, to - from, first, last, x + p * width + first - p * part, b + j,
                                padded(features), dkernel + first * features + j, from > begin, tile);
      }
    });
  });
}

// The places that pixel (i, j) of a depthwise result reads, as offsets into x and into the kernel; rows are counted
// over all images. Returns their number, at most PLACES.
constexpr int64_t PLACES = 64;
struct Place {
  int64_t x, kernel;
};

INLINE int64_t places(const Depthwise& task, int64_t i, int64_t j, Place* to) {
  const int64_t top = i % task.rows * task.down - task.above, left = j * task.across - task.before;
  int64_t count = 0;
  for (int64_t p = top < 0 ? -top : 0; p < task.tall && top + p < task.height; p++)
    for (int64_t q = left < 0 ? -left : 0; q < task.wide && left + q < task.width; q++)
      to[count++] = {((i / task.rows * task.height + top + p) * task.width + left + q) * task.channels,
                     (p * task.wide + q) * task.channels};
  return count;
}

// Rows [from, to) of the result, counted over all images. Channels are innermost, so pixels are contiguous.
template <class T>
void depthwise(const Depthwise& task, int64_t from, int64_t to) {
  const T* x = static_cast<const T*>(task.x);
  T* y = static_cast<T*>(task.y) + from * task.columns * task.channels;
  Place at[PLACES];
  for (int64_t i = from; i < to; i++)
    for (int64_t j = 0; j < task.columns; j++, y += task.channels) {
      const int64_t count = places(task, i, j, at);
      each(task.channels, [&](int64_t c, auto lanes) INLINE_LAMBDA {
        V sum = {};
        const auto add = [&](int64_t n) INLINE_LAMBDA {
          sum += load(x + at[n].x + c, lanes) * load(task.kernel + at[n].kernel + c, lanes);
        };
        if (count == 9)
          for (int n = 0; n < 9; n++) add(n);
        else
          for (int64_t n = 0; n < count; n++) add(n);
        store(y + c, sum, lanes);
      });
    }
}

// Adds the contribution of images [from, to) to the gradient of the kernel.
template <class T>
void depthwise_gradient(const Depthwise& task, int64_t from, int64_t to, float* dkernel) {
  const T* x = static_cast<const T*>(task.x);
  const T* dy = static_cast<const T*>(task.dy) + from * task.rows * task.columns * task.channels;
  Place at[PLACES];
  for (int64_t i = from * task.rows; i < to * task.rows; i++)
    for (int64_t j = 0; j < task.columns; j++, dy += task.channels) {
      const int64_t count = places(task, i, j, at);
      each(task.channels, [&](int64_t c, auto lanes) INLINE_LAMBDA {
        const V d = load(dy + c, lanes);
        const auto add = [&](int64_t n) INLINE_LAMBDA {
          float* sum = dkernel + at[n].kernel + c;
          store(sum, load(sum, lanes) + load(x + at[n].x + c, lanes) * d, lanes);
        };
        if (count == 9)
          for (int n = 0; n < 9; n++) add(n);
        else
          for (int64_t n = 0; n < count; n++) add(n);
      });
    }
}

}  // namespace
}  // namespace SMALLVIT_ISA
}  // namespace smallvit
