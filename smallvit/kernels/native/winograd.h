// 3 x 3 convolutions with stride 1 by Winograd's algorithm (https://arxiv.org/abs/1509.09308): a tile of 4 x 4 results
// takes 36 products, one per point, instead of 144. The points of a tile of x are B' x B, those of a kernel G k G', and
// a tile of the result is A' p A of the products p. The derivative uses the transposed matrices. Tiles are counted over
// all images; at borders they may extend beyond the image.
//
// The matrices are those of the zeros of x (x^2 - 1/2) (x^2 - 2). Rounding errors are smaller than with the usual zeros
// 0, 1, -1, 2 and -2, since their powers are closer to 1.

#pragma once

#include "convolutions.h"

namespace smallvit {
namespace SMALLVIT_ISA {
namespace {

constexpr int SIDE = 4;                   // of a tile of the result
constexpr int REACH = SIDE + 2;           // of a tile of x, and of the square of its points
constexpr int64_t POINTS = REACH * REACH;
constexpr int64_t FEWEST = 4;             // tiles: with fewer, transforming the kernel does not pay off

constexpr float S1 = 0.707106781f, S2 = 0.5f, S3 = 0.353553391f;  // powers of the smaller zero
constexpr float L1 = 1.414213562f, L2 = 2.0f, L3 = 2.828427125f;  // of the larger one

// Calls f(0), ..., f(N - 1), unrolled: the tiles then stay in registers.
template <int N, class F>
INLINE void repeat(F f) {
#pragma GCC unroll 6
  for (int i = 0; i < N; i++) f(i);
}

// B' x
INLINE void input_transform(const V* x, V* to) {
  const V even_s = x[4] - L2 * x[2], odd_s = x[3] - L2 * x[1];
  const V even_l = x[4] - S2 * x[2], odd_l = x[3] - S2 * x[1];
  to[0] = (x[0] + x[4]) - (S2 + L2) * x[2];
  to[1] = even_s + S1 * odd_s;
  to[2] = even_s - S1 * odd_s;
  to[3] = even_l + L1 * odd_l;
  to[4] = even_l - L1 * odd_l;
  to[5] = (x[1] + x[5]) - (S2 + L2) * x[3];
}

// A' p
INLINE void output_transform(const V* p, V* to) {
  const V even_s = p[1] + p[2], odd_s = p[1] - p[2], even_l = p[3] + p[4], odd_l = p[3] - p[4];
  to[0] = p[0] + (even_s + even_l);
  to[1] = S1 * odd_s + L1 * odd_l;
  to[2] = S2 * even_s + L2 * even_l;
  to[3] = S3 * odd_s + (L3 * odd_l + p[5]);
}

// A y
INLINE void gradient_transform(const V* y, V* to) {
  const V even_s = y[0] + S2 * y[2], odd_s = S1 * y[1] + S3 * y[3];
  const V even_l = y[0] + L2 * y[2], odd_l = L1 * y[1] + L3 * y[3];
  to[0] = y[0];
  to[1] = even_s + odd_s;
  to[2] = even_s - odd_s;
  to[3] = even_l + odd_l;
  to[4] = even_l - odd_l;
  to[5] = y[3];
}

constexpr float NS = 1 / (2 * S2 * (S2 - L2)), NL = 1 / (2 * L2 * (L2 - S2));  // in the rows of G

// G k
INLINE void kernel_transform(const V* k, V* to) {
  const V even_s = NS * (k[0] + S2 * k[2]), odd_s = (NS * S1) * k[1];
  const V even_l = NL * (k[0] + L2 * k[2]), odd_l = (NL * L1) * k[1];
  to[0] = k[0];
  to[1] = even_s + odd_s;
  to[2] = even_s - odd_s;
  to[3] = even_l + odd_l;
  to[4] = even_l - odd_l;
  to[5] = k[2];
}

// G' p
INLINE void kernel_gradient_transform(const V* p, V* to) {
  const V even_s = NS * (p[1] + p[2]), odd_s = p[1] - p[2], even_l = NL * (p[3] + p[4]), odd_l = p[3] - p[4];
  to[0] = p[0] + (even_s + even_l);
  to[1] = (NS * S1) * odd_s + (NL * L1) * odd_l;
  to[2] = S2 * even_s + (L2 * even_l + p[5]);
}

INLINE int64_t tiles_down(const Conv& task) { return (task.windows.rows + SIDE - 1) / SIDE; }
INLINE int64_t tiles_across(const Conv& task) { return (task.windows.columns + SIDE - 1) / SIDE; }
int64_t all_tiles(const Conv& task) { return task.windows.batch * tiles_down(task) * tiles_across(task); }

template <class T>
bool tiled(const Conv& task) {
  const Unfold& windows = task.windows;
  return is_float<T> && windows.tall == 3 && windows.wide == 3 && windows.down == 1 && windows.across == 1 &&
         windows.channels % LANES == 0 && task.features % LANES == 0 && all_tiles(task) >= FEWEST;
}

// The distance between the points of one tile and of the next: those of a tile are contiguous, (POINTS, width).
INLINE int64_t tile_stride(int64_t width) { return POINTS * width + LINE; }

// The distance between points of a kernel: not whole pages, which would compete for few cache sets.
INLINE int64_t point_stride(const Conv& task) { return task.windows.channels * task.features + LINE; }

// Tiles per pass: whole blocks of rows of a product, whose points stay in the L2 cache.
INLINE int64_t tiles_at_once(const Conv& task) { return task.windows.channels + task.features <= 64 ? 48 : 24; }

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
  each_tile_row(task, from, to, [&](int64_t image, int64_t row, int64_t first, int64_t last, int64_t place) {
    const int64_t top = SIDE * row - windows.above;
    const float* x = static_cast<const float*>(windows.from) + (image * windows.height + top) * line;
    const int64_t begin = top < 0 ? -top : 0, end = windows.height - top < REACH ? windows.height - top : REACH;
    const bool inner = begin == 0 && end == REACH;
    float* y = out + place * tile_stride(channels);
    for (int64_t tile = first; tile < last; tile++, y += tile_stride(channels)) {
      const int64_t left = SIDE * tile - windows.before;
      for (int64_t c = 0; c < channels; c += LANES) {
        V columns[REACH][REACH];
        repeat<REACH>([&](int i) INLINE_LAMBDA {
          V pixel[REACH];
          const int64_t j = left + i;
          const float* at = x + j * channels + c;
          if (j < 0 || j >= windows.width)
            repeat<REACH>([&](int r) INLINE_LAMBDA { pixel[r] = V{}; });
          else if (inner)
            repeat<REACH>([&](int r) INLINE_LAMBDA { pixel[r] = load(at + r * line); });
          else
            repeat<REACH>([&](int r) INLINE_LAMBDA { pixel[r] = r >= begin && r < end ? load(at + r * line) : V{}; });
          input_transform(pixel, columns[i]);
        });
        repeat<REACH>([&](int r) INLINE_LAMBDA {
          V across[REACH], point[REACH];
          repeat<REACH>([&](int i) INLINE_LAMBDA { across[i] = columns[i][r]; });
          input_transform(across, point);
          repeat<REACH>([&](int i) INLINE_LAMBDA { store(y + (REACH * r + i) * channels + c, point[i]); });
        });
      }
    }
  });
}

INLINE int64_t within_tile(int64_t left) { return left < SIDE ? left : SIDE; }

// The tiles [from, to) of the result, from their points.
void output_tiles(const Conv& task, int64_t from, int64_t to, const float* points) {
  const Unfold& windows = task.windows;
  const int64_t features = task.features, line = windows.columns * features;
  each_tile_row(task, from, to, [&](int64_t image, int64_t row, int64_t first, int64_t last, int64_t place) {
    const int64_t tall = within_tile(windows.rows - SIDE * row);
    float* y = static_cast<float*>(task.y) + (image * windows.rows + SIDE * row) * line + SIDE * first * features;
    const float* p = points + place * tile_stride(features);
    for (int64_t tile = first; tile < last; tile++, y += SIDE * features, p += tile_stride(features)) {
      const int64_t wide = within_tile(windows.columns - SIDE * tile);
      for (int64_t k = 0; k < features; k += LANES) {
        V rows[SIDE][REACH];
        repeat<REACH>([&](int r) INLINE_LAMBDA {
          V point[REACH], pixel[SIDE];
          repeat<REACH>([&](int i) INLINE_LAMBDA { point[i] = load(p + (REACH * r + i) * features + k); });
          output_transform(point, pixel);
          repeat<SIDE>([&](int i) INLINE_LAMBDA { rows[i][r] = pixel[i]; });
        });
        repeat<SIDE>([&](int i) INLINE_LAMBDA {
          if (i >= wide) return;
          V pixel[SIDE];
          output_transform(rows[i], pixel);
          float* at = y + i * features + k;
          repeat<SIDE>([&](int r) INLINE_LAMBDA {
            if (r < tall) store(at + r * line, pixel[r]);
          });
        });
      }
    }
  });
}

// The points of the tiles [from, to) of dy.
void gradient_points(const Conv& task, int64_t from, int64_t to, float* out) {
  const Unfold& windows = task.windows;
  const int64_t features = task.features, line = windows.columns * features;
  each_tile_row(task, from, to, [&](int64_t image, int64_t row, int64_t first, int64_t last, int64_t place) {
    const int64_t tall = within_tile(windows.rows - SIDE * row);
    const float* dy =
        static_cast<const float*>(task.dy) + (image * windows.rows + SIDE * row) * line + SIDE * first * features;
    float* p = out + place * tile_stride(features);
    for (int64_t tile = first; tile < last; tile++, dy += SIDE * features, p += tile_stride(features)) {
      const int64_t wide = within_tile(windows.columns - SIDE * tile);
      for (int64_t k = 0; k < features; k += LANES) {
        V columns[SIDE][REACH];
        repeat<SIDE>([&](int i) INLINE_LAMBDA {
          V pixel[SIDE];
          const float* at = dy + i * features + k;
          repeat<SIDE>([&](int r) INLINE_LAMBDA { pixel[r] = i < wide && r < tall ? load(at + r * line) : V{}; });
          gradient_transform(pixel, columns[i]);
        });
        repeat<REACH>([&](int r) INLINE_LAMBDA {
          V across[SIDE], point[REACH];
          repeat<SIDE>([&](int i) INLINE_LAMBDA { across[i] = columns[i][r]; });
          gradient_transform(across, point);
          repeat<REACH>([&](int i) INLINE_LAMBDA { store(p + (REACH * r + i) * features + k, point[i]); });
        });
      }
    }
  });
}

// The points of the channels [from, to) of the kernel, each point packed as the columns of a product.
void kernel_points(const Conv& task, int64_t from, int64_t to, float* out) {
  const int64_t channels = task.windows.channels, features = task.features, size = channels * features;
  const int64_t stride = point_stride(task);
  const float* kernel = static_cast<const float*>(task.kernel);
  each_panel(features, [&](int64_t j, int64_t vectors) {
    for (int64_t c = from; c < to; c++)
      for (int64_t v = 0; v < vectors; v++) {
        const float* at = kernel + c * features + j + v * LANES;
        float* to = out + j * channels + (c * vectors + v) * LANES;
        V columns[3][REACH];
        repeat<3>([&](int q) INLINE_LAMBDA {
          V tap[3];
          repeat<3>([&](int r) INLINE_LAMBDA { tap[r] = load(at + (3 * r + q) * size); });
          kernel_transform(tap, columns[q]);
        });
        repeat<REACH>([&](int r) INLINE_LAMBDA {
          const V across[3] = {columns[0][r], columns[1][r], columns[2][r]};
          V point[REACH];
          kernel_transform(across, point);
          repeat<REACH>([&](int i) INLINE_LAMBDA { store(to + (REACH * r + i) * stride, point[i]); });
        });
      }
  });
}

int64_t tiled_scratch(const Conv& task) {
  const int64_t channels = task.windows.channels, features = task.features;
  return tiles_at_once(task) * (tile_stride(channels) + tile_stride(features)) + POINTS * point_stride(task);
}

template <class T>
int64_t conv_packed(const Conv& task) {
  const Unfold& windows = task.windows;
  if (tiled<T>(task)) return POINTS * point_stride(task);
  return windows.tall * windows.wide * windows.channels * padded(task.features);
}

// These channels of the kernel; all of them, unless the convolution is tiled.
template <class T>
void conv_pack(const Conv& task, int64_t from, int64_t to, float* out) {
  const Unfold& windows = task.windows;
  if (tiled<T>(task)) return kernel_points(task, from, to, out);
  pack_columns(static_cast<const T*>(task.kernel), task.features, windows.tall * windows.wide * windows.channels,
               task.features, out);
}

void tiled_conv(const Conv& task, int64_t from, int64_t to, float* scratch) {
  const int64_t channels = task.windows.channels, features = task.features;
  const float* kernel = task.packed;
  float* x = scratch;
  float* y = x + tiles_at_once(task) * tile_stride(channels);
  in_parts(to - from, tiles_at_once(task), [&](int64_t first, int64_t tiles) {
    input_points(task, from + first, from + first + tiles, x);
    for (int64_t point = 0; point < POINTS; point++)
      each_panel(features, [&](int64_t j, int64_t vectors) {
        panel_of<COLUMNS, false>(vectors, tiles, channels, x + point * channels, tile_stride(channels),
                                 kernel + point * point_stride(task) + j * channels, vectors * LANES,
                                 y + point * features + j, tile_stride(features), {});
      });
    output_tiles(task, from + first, from + first + tiles, y);
  });
}

// The gradient of the kernel from its points.
void kernel_gradient(const Conv& task, const float* points, float* dkernel) {
  const int64_t size = task.windows.channels * task.features;
  for (int64_t i = 0; i < size; i += LANES) {
    V rows[3][REACH];
    repeat<REACH>([&](int r) INLINE_LAMBDA {
      V point[REACH], tap[3];
      repeat<REACH>([&](int q) INLINE_LAMBDA { point[q] = load(points + (REACH * r + q) * point_stride(task) + i); });
      kernel_gradient_transform(point, tap);
      repeat<3>([&](int q) INLINE_LAMBDA { rows[q][r] = tap[q]; });
    });
    repeat<3>([&](int q) INLINE_LAMBDA {
      V tap[3];
      kernel_gradient_transform(rows[q], tap);
      repeat<3>([&](int r) INLINE_LAMBDA { store(dkernel + (3 * r + q) * size + i, tap[r]); });
    });
  }
}

// The contribution of the tiles [from, to) to the gradient of the kernel.
void tiled_gradient(const Conv& task, int64_t from, int64_t to, float* dkernel, float* scratch) {
  const int64_t channels = task.windows.channels, features = task.features;
  float* points = scratch;
  float* x = points + POINTS * point_stride(task);
  float* dy = x + tiles_at_once(task) * tile_stride(channels);
  in_parts(to - from, tiles_at_once(task), [&](int64_t first, int64_t tiles) {
    input_points(task, from + first, from + first + tiles, x);
    gradient_points(task, from + first, from + first + tiles, dy);
    const auto add = first ? product<true, true> : product<false, true>;
    for (int64_t point = 0; point < POINTS; point++)
      add(channels, features, tiles, x + point * channels, tile_stride(channels), dy + point * features,
          tile_stride(features), points + point * point_stride(task), features);
  });
  kernel_gradient(task, points, dkernel);
}

}  // namespace
}  // namespace SMALLVIT_ISA
}  // namespace smallvit
