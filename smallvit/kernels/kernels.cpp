// The kernels, written once with the compiler's vector extensions and compiled once for each instruction set.
//
// Nothing of the C++ library is used: an inline function of it, compiled here for AVX-512, could be the copy that the
// linker keeps for everybody.

#include "kernels.h"

#include <cmath>
#include <cstring>

#if defined(LANES)
#elif defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

namespace smallvit {
namespace SMALLVIT_ISA {
namespace {

#define INLINE inline __attribute__((always_inline))

typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint16_t H __attribute__((vector_size(2 * LANES)));
typedef uint8_t B __attribute__((vector_size(LANES)));

// A product keeps ROWS x COLUMNS vectors in registers, of which there are 32 with AVX-512 and 16 without.
#if LANES == 16
constexpr int64_t ROWS = 8, COLUMNS = 3;
#else
constexpr int64_t ROWS = 6, COLUMNS = 2;
#endif

struct Bf16 {
  uint16_t bits;
};

template <class To, class From>
INLINE To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

template <class Vector, class T>
INLINE Vector load_as(const T* p) {
  Vector x;
  memcpy(&x, p, sizeof x);
  return x;
}

INLINE V splat(float x) { return x - V{}; }

INLINE V load(const float* p) { return load_as<V>(p); }
INLINE V load(const Bf16* p) { return bits<V>(__builtin_convertvector(load_as<H>(p), U) << 16); }

INLINE void store(float* p, V x) { memcpy(p, &x, sizeof x); }
INLINE void store(Bf16* p, V x) {
  U u = bits<U>(x);
  U rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;  // to the nearest, ties to even
  rounded = x == x ? rounded : ((u >> 16) | 0x40);   // a NaN stays one
  H h = __builtin_convertvector(rounded, H);
  memcpy(p, &h, sizeof h);
}

// The first `count` elements, zeros behind them; nothing past them is read or written.
template <class T>
INLINE V load(const T* p, int64_t count) {
  if (count >= LANES) return load(p);
  T part[LANES] = {};
  memcpy(part, p, count * sizeof(T));
  return load(part);
}

template <class T>
INLINE void store(T* p, V x, int64_t count) {
  if (count >= LANES) return store(p, x);
  T part[LANES];
  store(part, x);
  memcpy(p, part, count * sizeof(T));
}

INLINE V larger(V a, V b) { return a > b ? a : b; }

INLINE float sum(V x) {
  float part[LANES];
  store(part, x);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) part[i] += part[i + width];
  return part[0];
}

INLINE float largest(V x) {
  float part[LANES];
  store(part, x);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) part[i] = part[i] > part[i + width] ? part[i] : part[i + width];
  return part[0];
}

// exp for x <= 88, relative error 1e-7; 0 where the result would be denormal. exp(r) = 1 + r + r^2 g(r) for
// |r| <= log(2) / 2, g a minimax fit.
INLINE V exp(V x) {
  V clamped = x < -87.0f ? splat(-87.0f) : x;  // keeps a NaN
  V shifted = clamped * 1.442695041f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer in the low bits
  V n = shifted - 12582912.0f;
  V r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  V g = splat(1.381446674e-3f);
  g = g * r + 8.368780429e-3f;
  g = g * r + 4.166839422e-2f;
  g = g * r + 1.666652011e-1f;
  g = g * r + 4.999999341e-1f;
  V y = g * (r * r) + r + 1.0f;
  y = bits<V>(bits<I>(y) + (bits<I>(shifted) << 23));
  y = x < -87.0f ? V{} : y;
  return x == x ? y : x;
}

// The normal distribution: (probability of a value <= x, density at x), absolute error 1e-7.
// erfc(z) = t f(t) exp(-z^2) with t = 1 / (1 + 0.45 z), f a minimax fit.
struct Normal {
  V below, density;
};

INLINE Normal normal(V x) {
  V z = bits<V>(bits<U>(x) & 0x7fffffffu) * 0.707106781f;
  V e = exp(-z * z);
  V t = 1.0f / (z * 0.45f + 1.0f);
  V f = splat(8.727494475e-2f);
  f = f * t - 4.685392504e-1f;
  f = f * t + 8.060788650e-1f;
  f = f * t - 3.217315132e-1f;
  f = f * t + 4.282136573e-1f;
  f = f * t + 2.110064642e-1f;
  f = f * t + 2.576968257e-1f;
  V tail = 0.5f * t * f * e;
  return {x < 0.0f ? tail : 1.0f - tail, e * 0.398942280f};
}

INLINE int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

// c (rows x columns) = a b, or c += a b. Rows of b and c are whole vectors; `a` is read element by element, at
// a[row * a_row + k * a_k]. All in float32.
template <int R, int C, bool ADD>
INLINE void block(int64_t depth, const float* a, int64_t a_row, int64_t a_k, const float* b, int64_t b_row, float* c,
                  int64_t c_row) {
  V total[R][C];
  for (int i = 0; i < R; i++)
    for (int j = 0; j < C; j++) total[i][j] = ADD ? load(c + i * c_row + j * LANES) : V{};
  for (int64_t k = 0; k < depth; k++) {
    V row[C];
    for (int j = 0; j < C; j++) row[j] = load(b + j * LANES);
    for (int i = 0; i < R; i++) {
      float x = a[i * a_row];
      for (int j = 0; j < C; j++) total[i][j] += x * row[j];
    }
    a += a_k;
    b += b_row;
  }
  for (int i = 0; i < R; i++)
    for (int j = 0; j < C; j++) store(c + i * c_row + j * LANES, total[i][j]);
}

template <int R, int C, bool ADD, bool ACROSS>
void rows(int64_t count, int64_t depth, const float* a, int64_t a_stride, const float* b, int64_t b_row, float* c,
          int64_t c_row) {
  const int64_t a_row = ACROSS ? 1 : a_stride, a_k = ACROSS ? a_stride : 1;
  for (; count; count--, a += R * a_row, c += R * c_row) block<R, C, ADD>(depth, a, a_row, a_k, b, b_row, c, c_row);
}

// Rows are shared out evenly: 65 of them are ten blocks of 6 and one of 5, not ten of 6, one of 4 and one of 1.
template <int R, int C, bool ADD, bool ACROSS>
void share(int64_t size, int64_t count, int64_t depth, const float* a, int64_t a_stride, const float* b, int64_t b_row,
           float* c, int64_t c_row) {
  if (size == R) return rows<R, C, ADD, ACROSS>(count, depth, a, a_stride, b, b_row, c, c_row);
  if constexpr (R > 1) share<R - 1, C, ADD, ACROSS>(size, count, depth, a, a_stride, b, b_row, c, c_row);
}

template <int C, bool ADD, bool ACROSS>
void panel(int64_t height, int64_t depth, const float* a, int64_t a_stride, const float* b, int64_t b_row, float* c,
           int64_t c_row) {
  const int64_t blocks = (height + ROWS - 1) / ROWS, size = height / blocks, larger = height % blocks;
  const int64_t a_row = ACROSS ? 1 : a_stride;
  if (larger) share<ROWS, C, ADD, ACROSS>(size + 1, larger, depth, a, a_stride, b, b_row, c, c_row);
  const int64_t done = larger * (size + 1);
  share<ROWS, C, ADD, ACROSS>(size, blocks - larger, depth, a + done * a_row, a_stride, b, b_row, c + done * c_row, c_row);
}

template <int C, bool ADD, bool ACROSS>
void remainder(int64_t vectors, int64_t height, int64_t depth, const float* a, int64_t a_stride, const float* b,
               int64_t b_row, float* c, int64_t c_row) {
  if (vectors == C) return panel<C, ADD, ACROSS>(height, depth, a, a_stride, b, b_row, c, c_row);
  if constexpr (C > 1) remainder<C - 1, ADD, ACROSS>(vectors, height, depth, a, a_stride, b, b_row, c, c_row);
}

// ACROSS: `a` is given transposed, so that its stride is from one k to the next.
template <bool ADD, bool ACROSS>
void product(int64_t height, int64_t width, int64_t depth, const float* a, int64_t a_stride, const float* b,
             int64_t b_row, float* c, int64_t c_row) {
  if (!height) return;
  int64_t vectors = width / LANES;
  for (; vectors >= COLUMNS; vectors -= COLUMNS, b += COLUMNS * LANES, c += COLUMNS * LANES)
    panel<COLUMNS, ADD, ACROSS>(height, depth, a, a_stride, b, b_row, c, c_row);
  if (vectors) remainder<COLUMNS, ADD, ACROSS>(vectors, height, depth, a, a_stride, b, b_row, c, c_row);
}

// Rows as float32, filled up with zeros to whole vectors.
template <class T>
void pack(const T* x, int64_t stride, int64_t rows, int64_t columns, float factor, float* to) {
  const int64_t width = padded(columns);
  for (int64_t i = 0; i < rows; i++, x += stride, to += width)
    for (int64_t j = 0; j < columns; j += LANES) store(to + j, load(x + j, columns - j) * factor);
}

// The transpose of packed rows, its rows filled up with zeros to whole vectors.
void turn(const float* x, int64_t rows, int64_t columns, float* to) {
  const int64_t width = padded(rows), stride = padded(columns);
  for (int64_t i = 0; i < width; i += LANES)
    for (int64_t j = 0; j < columns; j++) {
      float part[LANES];
      for (int64_t r = 0; r < LANES; r++) part[r] = i + r < rows ? x[(i + r) * stride + j] : 0.0f;
      memcpy(to + j * width + i, part, sizeof part);
    }
}

template <class T>
void unpack(const float* x, int64_t rows, int64_t columns, float factor, T* to, int64_t stride) {
  const int64_t width = padded(columns);
  for (int64_t i = 0; i < rows; i++, x += width, to += stride)
    for (int64_t j = 0; j < columns; j += LANES) store(to + j, load(x + j) * factor, columns - j);
}

template <class T>
INLINE T* at(const View& view, int64_t b, int64_t h, int64_t row) {
  return static_cast<T*>(view.data) + b * view.batch + h * view.head + row * view.row;
}

// Queries are worked on in tiles, so that a tile's logits stay in the second-level cache.
INLINE int64_t tile_rows(const Attention& task) {
  const int64_t fit = 16384 / padded(task.m);
  const int64_t rows = fit < 2 * ROWS ? 2 * ROWS : fit / ROWS * ROWS;
  return task.n < rows ? task.n : rows;
}

// The logits of a tile of queries, what may not be read at -inf.
void logits(const Attention& task, int64_t b, int64_t h, int64_t first, int64_t rows, const float* q,
            const float* k_turned, float* to) {
  const int64_t m = task.m, width = padded(m), depth = padded(task.d);
  product<false, false>(rows, width, task.d, q, depth, k_turned, width, to, width);
  if (task.bias) {
    const float* bias = task.bias + ((task.bias_heads == 1 ? 0 : h) * task.n + first) * m;
    for (int64_t i = 0; i < rows; i++, bias += m)
      for (int64_t j = 0; j < m; j += LANES) {
        float* p = to + i * width + j;
        store(p, load(p) + load(bias + j, m - j));
      }
  }
  if (task.mask) {
    const uint8_t* mask = task.mask + (b % task.groups * task.n + first) * m;
    for (int64_t i = 0; i < rows; i++, mask += m)
      for (int64_t j = 0; j < m; j += LANES) {
        uint8_t part[LANES] = {};
        memcpy(part, mask + j, m - j < LANES ? m - j : LANES);
        I allowed = __builtin_convertvector(load_as<B>(part), I);
        float* p = to + i * width + j;
        store(p, allowed != 0 ? load(p) : splat(-INFINITY));
      }
  }
  for (int64_t i = 0; i < rows; i++) {
    if (task.mask_diagonal && m > 1 && first + i < m) to[i * width + first + i] = -INFINITY;
    for (int64_t j = m; j < width; j++) to[i * width + j] = -INFINITY;
  }
}

int64_t forward_scratch(const Attention& task) {
  const int64_t m = padded(task.m), d = padded(task.d), e = padded(task.e), tile = tile_rows(task);
  return task.m * (d + e) + task.d * m + tile * (d + m + e);
}

template <class T>
void attention_forward(const Attention& task, int64_t b, int64_t h, float* scratch) {
  const int64_t n = task.n, m = task.m, d = task.d, e = task.e;
  const int64_t m_width = padded(m), d_width = padded(d), e_width = padded(e), tile = tile_rows(task);
  float* k = scratch;
  float* v = k + m * d_width;
  float* k_turned = v + m * e_width;
  float* q = k_turned + d * m_width;
  float* p = q + tile * d_width;
  float* out = p + tile * m_width;

  pack(at<const T>(task.k, b, h, 0), task.k.row, m, d, 1.0f, k);
  pack(at<const T>(task.v, b, h, 0), task.v.row, m, e, 1.0f, v);
  turn(k, m, d, k_turned);
  for (int64_t first = 0; first < n; first += tile) {
    const int64_t rows = n - first < tile ? n - first : tile;
    pack(at<const T>(task.q, b, h, first), task.q.row, rows, d, task.scale[h], q);
    logits(task, b, h, first, rows, q, k_turned, p);
    float* lse = task.lse + (b * task.heads + h) * n + first;
    for (int64_t i = 0; i < rows; i++) {
      float* row = p + i * m_width;
      V top = load(row);
      for (int64_t j = LANES; j < m_width; j += LANES) top = larger(top, load(row + j));
      const float highest = largest(top);
      V total = {};
      for (int64_t j = 0; j < m_width; j += LANES) {
        V x = exp(load(row + j) - highest);
        store(row + j, x);
        total += x;
      }
      lse[i] = sum(total);
      q[i] = highest;  // the queries have done their part
    }
    product<false, false>(rows, e_width, m, p, m_width, v, e_width, out, e_width);
    T* to = at<T>(task.out, b, h, first);
    for (int64_t i = 0; i < rows; i++, to += task.out.row) {
      unpack(out + i * e_width, 1, e, 1.0f / lse[i], to, 0);
      lse[i] = q[i] + logf(lse[i]);
    }
  }
}

int64_t backward_scratch(const Attention& task) {
  const int64_t m = padded(task.m), d = padded(task.d), e = padded(task.e), tile = tile_rows(task);
  return task.m * 2 * (d + e) + (task.d + task.e) * m + tile * (2 * d + 2 * m + e);
}

// With p = softmax(logits): dv = p' dout, dlogits = p * (dout v' - sum(p * dout v')), dq = scale dlogits k,
// dk = scale dlogits' q, and dscale = sum(q * dlogits k), which is the sum of dlogits over q k'.
template <class T>
void attention_backward(const Attention& task, int64_t b, int64_t h, float* dbias, float* scratch) {
  const int64_t n = task.n, m = task.m, d = task.d, e = task.e;
  const int64_t m_width = padded(m), d_width = padded(d), e_width = padded(e), tile = tile_rows(task);
  float* k = scratch;
  float* v = k + m * d_width;
  float* dk = v + m * e_width;
  float* dv = dk + m * d_width;
  float* k_turned = dv + m * e_width;
  float* v_turned = k_turned + d * m_width;
  float* q = v_turned + e * m_width;
  float* dq = q + tile * d_width;
  float* dout = dq + tile * d_width;
  float* p = dout + tile * e_width;
  float* dp = p + tile * m_width;

  const float scale = task.scale[h];
  pack(at<const T>(task.k, b, h, 0), task.k.row, m, d, 1.0f, k);
  pack(at<const T>(task.v, b, h, 0), task.v.row, m, e, 1.0f, v);
  turn(k, m, d, k_turned);
  turn(v, m, e, v_turned);
  memset(dk, 0, sizeof(float) * m * (d_width + e_width));
  V dscale = {};
  for (int64_t first = 0; first < n; first += tile) {
    const int64_t rows = n - first < tile ? n - first : tile;
    pack(at<const T>(task.q, b, h, first), task.q.row, rows, d, scale, q);
    pack(at<const T>(task.dout, b, h, first), task.dout.row, rows, e, 1.0f, dout);
    logits(task, b, h, first, rows, q, k_turned, p);
    product<false, false>(rows, m_width, e, dout, e_width, v_turned, m_width, dp, m_width);
    const float* lse = task.lse + (b * task.heads + h) * n + first;
    for (int64_t i = 0; i < rows; i++) {
      float *row = p + i * m_width, *drow = dp + i * m_width;
      V total = {};
      for (int64_t j = 0; j < m_width; j += LANES) {
        V x = exp(load(row + j) - lse[i]);
        store(row + j, x);
        total += x * load(drow + j);
      }
      const float mean = sum(total);
      for (int64_t j = 0; j < m_width; j += LANES) store(drow + j, load(row + j) * (load(drow + j) - mean));
    }
    product<true, true>(m, e_width, rows, p, m_width, dout, e_width, dv, e_width);
    product<true, true>(m, d_width, rows, dp, m_width, q, d_width, dk, d_width);
    product<false, false>(rows, d_width, m, dp, m_width, k, d_width, dq, d_width);
    unpack(dq, rows, d, scale, at<T>(task.dq, b, h, first), task.dq.row);
    pack(at<const T>(task.q, b, h, first), task.q.row, rows, d, 1.0f, q);
    for (int64_t i = 0; i < rows * d_width; i += LANES) dscale += load(q + i) * load(dq + i);
    if (dbias) {
      float* to = dbias + first * m;
      for (int64_t i = 0; i < rows; i++, to += m)
        for (int64_t j = 0; j < m; j += LANES) store(to + j, load(to + j, m - j) + load(dp + i * m_width + j), m - j);
    }
  }
  unpack(dk, m, d, 1.0f, at<T>(task.dk, b, h, 0), task.dk.row);
  unpack(dv, m, e, 1.0f, at<T>(task.dv, b, h, 0), task.dv.row);
  task.dscale[b * task.heads + h] = sum(dscale);
}

// (mean, 1 / standard deviation) of a row, in two passes.
struct Moments {
  float mean, inverse;
};

template <class T>
INLINE Moments moments(const T* x, int64_t d, float epsilon) {
  V total = {};
  for (int64_t j = 0; j < d; j += LANES) total += load(x + j, d - j);
  const float mean = sum(total) / d;
  V squares = {};
  int64_t j = 0;
  for (; j + LANES <= d; j += LANES) {
    V y = load(x + j) - mean;
    squares += y * y;
  }
  float square = sum(squares);
  if (j < d) {
    float part[LANES];
    store(part, load(x + j, d - j) - mean);
    for (int64_t i = 0; i < d - j; i++) square += part[i] * part[i];
  }
  return {mean, 1.0f / sqrtf(square / d + epsilon)};
}

template <class T>
void norm_forward(const LayerNorm& task, int64_t from, int64_t to) {
  const int64_t d = task.d;
  for (int64_t i = from; i < to; i++) {
    const T* x = static_cast<const T*>(task.x) + i * d;
    T* y = static_cast<T*>(task.y) + i * d;
    const Moments row = moments(x, d, task.epsilon);
    for (int64_t j = 0; j < d; j += LANES) {
      const int64_t left = d - j;
      V normed = (load(x + j, left) - row.mean) * row.inverse;
      store(y + j, normed * load(task.scale + j, left) + load(task.bias + j, left), left);
    }
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
    for (int64_t j = 0; j < d; j += LANES) {
      const int64_t left = d - j;
      V normed = (load(x + j, left) - row.mean) * row.inverse, dout = load(dy + j, left);
      V g = dout * load(task.scale + j, left);
      g_total += g;
      gy_total += g * normed;
      store(dscale + j, load(dscale + j, left) + dout * normed, left);
      store(dbias + j, load(dbias + j, left) + dout, left);
    }
    const float g_mean = sum(g_total) / d, gy_mean = sum(gy_total) / d;
    for (int64_t j = 0; j < d; j += LANES) {
      const int64_t left = d - j;
      V normed = (load(x + j, left) - row.mean) * row.inverse;
      V g = load(dy + j, left) * load(task.scale + j, left);
      store(dx + j, (g - g_mean - normed * gy_mean) * row.inverse, left);
    }
  }
}

template <class T>
void gelu_forward(const Gelu& task, int64_t from, int64_t to) {
  const int64_t d = task.d;
  for (int64_t i = from; i < to; i++) {
    const T* x = static_cast<const T*>(task.x) + i * d;
    T* y = static_cast<T*>(task.y) + i * d;
    for (int64_t j = 0; j < d; j += LANES) {
      V u = load(x + j, d - j) + load(task.bias + j, d - j);
      store(y + j, u * normal(u).below, d - j);
    }
  }
}

template <class T>
void gelu_backward(const Gelu& task, int64_t from, int64_t to, float* dbias) {
  const int64_t d = task.d;
  for (int64_t i = from; i < to; i++) {
    const T* x = static_cast<const T*>(task.x) + i * d;
    const T* dy = static_cast<const T*>(task.dy) + i * d;
    T* dx = static_cast<T*>(task.dx) + i * d;
    for (int64_t j = 0; j < d; j += LANES) {
      const int64_t left = d - j;
      V u = load(x + j, left) + load(task.bias + j, left);
      Normal at = normal(u);
      V du = load(dy + j, left) * (at.below + u * at.density);
      store(dx + j, du, left);
      store(dbias + j, load(dbias + j, left) + du, left);
    }
  }
}

// Rows [from, to) of the result, in squares that fit the first-level cache.
template <class T>
void transpose(const Transpose& task, int64_t from, int64_t to) {
  constexpr int64_t SIDE = 32;
  const T* x = static_cast<const T*>(task.x);
  T* y = static_cast<T*>(task.y);
  for (int64_t i = 0; i < task.rows; i += SIDE) {
    const int64_t i_end = i + SIDE < task.rows ? i + SIDE : task.rows;
    for (int64_t j = from; j < to; j += SIDE) {
      const int64_t j_end = j + SIDE < to ? j + SIDE : to;
      for (int64_t c = j; c < j_end; c++)
        for (int64_t r = i; r < i_end; r++) y[c * task.rows + r] = x[r * task.columns + c];
    }
  }
}

template <class T>
constexpr Kernels kernels = {forward_scratch, backward_scratch, attention_forward<T>, attention_backward<T>,
                             norm_forward<T>, norm_backward<T>,  gelu_forward<T>,      gelu_backward<T>,
                             transpose<T>};

}  // namespace

extern const InstructionSet set;
const InstructionSet set = {SMALLVIT_NAME, kernels<float>, kernels<Bf16>};

}  // namespace SMALLVIT_ISA
}  // namespace smallvit
