// 3 x 3 convolutions with stride 1 by Winograd's algorithm (https://arxiv.org/abs/1509.09308): a tile of 2 x 2 results
// takes 16 products, one per point, instead of 36. The points of a tile of x are B' x B, those of a kernel G k G', and
// a tile of the result is A' p A of the products p. The derivative uses the transposed matrices. Tiles are counted over
// all images; at odd borders they extend beyond the image.

#pragma once

#include "convolutions.h"

namespace smallvit {
namespace SMALLVIT_ISA {
namespace {

constexpr int64_t FEWEST = 16;  // tiles: with fewer, transforming the kernel does not pay off

INLINE int64_t tiles_down(const Conv& task) { return (task.windows.rows + 1) / 2; }
INLINE int64_t tiles_across(const Conv& task) { return (task.windows.columns + 1) / 2; }
int64_t all_tiles(const Conv& task) { return task.windows.batch * tiles_down(task) * tiles_across(task); }

template <class T>
bool tiled(const Conv& task) {
  const Unfold& windows = task.windows;
  return is_float<T> && windows.tall == 3 && windows.wide == 3 && windows.down == 1 && windows.across == 1 &&
         windows.channels % LANES == 0 && task.features % LANES == 0 && all_tiles(task) >= FEWEST;
}

// The distance between points of `numbers` numbers: not whole pages, which would compete for few cache sets.
INLINE int64_t point_stride(int64_t numbers) { return numbers + LINE; }

// Tiles per pass: whole blocks of rows of a product, whose points stay in the L2 cache.
INLINE int64_t tiles_at_once(const Conv& task) { return task.windows.channels + task.features <= 256 ? 48 : 24; }

// Calls f(image, row, first, last, place) for each row of tiles, or part of one, in the tiles [from, to); `place` is
// the index of the first tile.
template <class F>
INLINE void each_tile_row(const Conv& task, int64_t from, int64_t to, F f) {
  const int64_t across = tiles_across(task), down = tiles_down(task);
  for (int64_t tile = from, next; tile < to; tile = next) {
    const int64_t row = tile / across, first = tile % across;
    next = (row + 1) * across < to ? (row + 1) * across : to;
    f(row / down, row % down, first, first + next - tile, tile - from);
  }
}

// The points of the tiles [from, to) of x.
void input_points(const Conv& task, int64_t from, int64_t to, float* out) {
  const Unfold& windows = task.windows;
  const int64_t channels = windows.channels, line = windows.width * channels;
  const int64_t stride = point_stride((to - from) * channels);
  each_tile_row(task, from, to, [&](int64_t image, int64_t row, int64_t first, int64_t last, int64_t place) {
    const int64_t top = 2 * row - windows.above;
    const float* x = static_cast<const float*>(windows.from) + (image * windows.height + top) * line;
    bool within[4];
    for (int64_t r = 0; r < 4; r++) within[r] = top + r >= 0 && top + r < windows.height;
    const bool inner = within[0] && within[3];
    for (int64_t c = 0; c < channels; c += LANES) {
      // A column of four pixels, times B'.
      const auto column = [&](int64_t j, V* to) INLINE_LAMBDA {
        V pixel[4] = {};
        if (j >= 0 && j < windows.width) {
          const float* at = x + j * channels + c;
          if (inner)
            for (int r = 0; r < 4; r++) pixel[r] = load(at + r * line);
          else
            for (int r = 0; r < 4; r++) pixel[r] = within[r] ? load(at + r * line) : V{};
        }
        to[0] = pixel[0] - pixel[2];
        to[1] = pixel[1] + pixel[2];
        to[2] = pixel[2] - pixel[1];
        to[3] = pixel[1] - pixel[3];
      };
      V a[4], b[4];
      int64_t j = 2 * first - windows.before;
      column(j, a);
      column(j + 1, b);
      float* y = out + place * channels + c;
      for (int64_t tile = first; tile < last; tile++, j += 2, y += channels) {
        V d[4], e[4];
        column(j + 2, d);
        column(j + 3, e);
        for (int r = 0; r < 4; r++) {
          store(y + (4 * r + 0) * stride, a[r] - d[r]);
          store(y + (4 * r + 1) * stride, b[r] + d[r]);
          store(y + (4 * r + 2) * stride, d[r] - b[r]);
          store(y + (4 * r + 3) * stride, b[r] - e[r]);
          a[r] = d[r];
          b[r] = e[r];
        }
      }
    }
  });
}

// The tiles [from, to) of the result, from their points.
void output_tiles(const Conv& task, int64_t from, int64_t to, const float* points) {
  const Unfold& windows = task.windows;
  const int64_t features = task.features, line = windows.columns * features;
  const int64_t stride = point_stride((to - from) * features);
  each_tile_row(task, from, to, [&](int64_t image, int64_t row, int64_t first, int64_t last, int64_t place) {
    const bool below = 2 * row + 1 < windows.rows;
    float* y = static_cast<float*>(task.y) + (image * windows.rows + 2 * row) * line + 2 * first * features;
    const float* p = points + place * features;
    for (int64_t tile = first; tile < last; tile++, y += 2 * features, p += features) {
      const bool beside = 2 * tile + 1 < windows.columns;
      for (int64_t k = 0; k < features; k += LANES) {
        V left[4], right[4];
        for (int r = 0; r < 4; r++) {
          const float* at = p + 4 * r * stride + k;
          const V one = load(at + stride), two = load(at + 2 * stride);
          left[r] = load(at) + (one + two);
          right[r] = (one - two) - load(at + 3 * stride);
        }
        store(y + k, left[0] + (left[1] + left[2]));
        if (beside) store(y + features + k, right[0] + (right[1] + right[2]));
        if (!below) continue;
        store(y + line + k, (left[1] - left[2]) - left[3]);
        if (beside) store(y + line + features + k, (right[1] - right[2]) - right[3]);
      }
    }
  });
}

// The points of the tiles [from, to) of dy.
void gradient_points(const Conv& task, int64_t from, int64_t to, float* out) {
  const Unfold& windows = task.windows;
  const int64_t features = task.features, line = windows.columns * features;
  const int64_t stride = point_stride((to - from) * features);
  each_tile_row(task, from, to, [&](int64_t image, int64_t row, int64_t first, int64_t last, int64_t place) {
    const bool below = 2 * row + 1 < windows.rows;
    const float* dy = static_cast<const float*>(task.dy) + (image * windows.rows + 2 * row) * line + 2 * first * features;
    float* p = out + place * features;
    for (int64_t tile = first; tile < last; tile++, dy += 2 * features, p += features) {
      const bool beside = 2 * tile + 1 < windows.columns;
      for (int64_t k = 0; k < features; k += LANES) {
        const V a = load(dy + k), b = beside ? load(dy + features + k) : V{};
        const V c = below ? load(dy + line + k) : V{}, d = below && beside ? load(dy + line + features + k) : V{};
        const V left[4] = {a, a + c, a - c, -c}, right[4] = {b, b + d, b - d, -d};
        for (int r = 0; r < 4; r++) {
          float* at = p + 4 * r * stride + k;
          store(at, left[r]);
          store(at + stride, left[r] + right[r]);
          store(at + 2 * stride, left[r] - right[r]);
          store(at + 3 * stride, -right[r]);
        }
      }
    }
  });
}

// The points of the kernel, each packed as the columns of a product.
void kernel_points(const Conv& task, float* out) {
  const int64_t channels = task.windows.channels, features = task.features, size = channels * features;
  const float* kernel = static_cast<const float*>(task.kernel);
  each_panel(features, [&](int64_t j, int64_t vectors) {
    for (int64_t c = 0; c < channels; c++)
      for (int64_t v = 0; v < vectors; v++) {
        const float* at = kernel + c * features + j + v * LANES;
        float* to = out + j * channels + (c * vectors + v) * LANES;
        V half[4][3];  // G k
        for (int q = 0; q < 3; q++) {
          const V top = load(at + q * size), middle = load(at + (3 + q) * size), bottom = load(at + (6 + q) * size);
          half[0][q] = top;
          half[1][q] = 0.5f * (top + bottom + middle);
          half[2][q] = 0.5f * (top + bottom - middle);
          half[3][q] = bottom;
        }
        for (int r = 0; r < 4; r++) {
          const V ends = half[r][0] + half[r][2];
          store(to + (4 * r + 0) * size, half[r][0]);
          store(to + (4 * r + 1) * size, 0.5f * (ends + half[r][1]));
          store(to + (4 * r + 2) * size, 0.5f * (ends - half[r][1]));
          store(to + (4 * r + 3) * size, half[r][2]);
        }
      }
  });
}

int64_t tiled_scratch(const Conv& task) {
  const int64_t tiles = tiles_at_once(task), channels = task.windows.channels, features = task.features;
  return POINTS * (point_stride(tiles * channels) + point_stride(tiles * features) + channels * features);
}

void tiled_conv(const Conv& task, int64_t from, int64_t to, float* scratch) {
  const int64_t channels = task.windows.channels, features = task.features, size = channels * features;
  float* kernel = scratch;
  float* x = kernel + POINTS * size;
  float* y = x + POINTS * point_stride(tiles_at_once(task) * channels);
  kernel_points(task, kernel);
  in_parts(to - from, tiles_at_once(task), [&](int64_t first, int64_t tiles) {
    input_points(task, from + first, from + first + tiles, x);
    for (int64_t point = 0; point < POINTS; point++) {
      const float* a = x + point * point_stride(tiles * channels);
      float* c = y + point * point_stride(tiles * features);
      each_panel(features, [&](int64_t j, int64_t vectors) {
        panel_of<COLUMNS, false>(vectors, tiles, channels, a, channels, kernel + point * size + j * channels,
                                 vectors * LANES, c + j, features, {});
      });
    }
    output_tiles(task, from + first, from + first + tiles, y);
  });
}

// Adds the contribution of the tiles [from, to) to the points of the kernel's gradient, (POINTS, channels, features).
void tiled_gradient(const Conv& task, int64_t from, int64_t to, float* points, float* scratch) {
  const int64_t channels = task.windows.channels, features = task.features;
  float* x = scratch;
  float* dy = x + POINTS * point_stride(tiles_at_once(task) * channels);
  in_parts(to - from, tiles_at_once(task), [&](int64_t first, int64_t tiles) {
    input_points(task, from + first, from + first + tiles, x);
    gradient_points(task, from + first, from + first + tiles, dy);
    for (int64_t point = 0; point < POINTS; point++)
      product<true, true>(channels, features, tiles, x + point * point_stride(tiles * channels), channels,
                          dy + point * point_stride(tiles * features), features, points + point * channels * features,
                          features);
  });
}

// The gradient of the kernel from its points.
void kernel_gradient(const Conv& task, const float* points) {
  const int64_t size = task.windows.channels * task.features;
  for (int64_t i = 0; i < size; i += LANES) {
    V half[3][4];  // G' points
    for (int q = 0; q < 4; q++) {
      const V a = load(points + q * size + i), b = load(points + (4 + q) * size + i);
      const V c = load(points + (8 + q) * size + i), d = load(points + (12 + q) * size + i);
      half[0][q] = a + 0.5f * (b + c);
      half[1][q] = 0.5f * (b - c);
      half[2][q] = 0.5f * (b + c) + d;
    }
    for (int r = 0; r < 3; r++) {
      const V sum = 0.5f * (half[r][1] + half[r][2]), difference = 0.5f * (half[r][1] - half[r][2]);
      store(task.dkernel + (3 * r + 0) * size + i, half[r][0] + sum);
      store(task.dkernel + (3 * r + 1) * size + i, difference);
      store(task.dkernel + (3 * r + 2) * size + i, sum + half[r][3]);
    }
  }
}

}  // namespace
}  // namespace SMALLVIT_ISA
}  // namespace smallvit
