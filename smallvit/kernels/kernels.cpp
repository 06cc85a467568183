// The kernels, written with the compiler's vector extensions and compiled once per instruction set.
//
// The C++ library is not used: the linker could keep an inline function compiled here for AVX-512 as the only copy for
// the whole program.

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
#define INLINE_LAMBDA __attribute__((always_inline))

typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint16_t H __attribute__((vector_size(2 * LANES)));
typedef uint8_t B __attribute__((vector_size(LANES)));

// A product keeps ROWS x COLUMNS vectors in registers, of which there are 32 with AVX-512 and 16 without. With fewer
// columns it uses more rows: tallest(columns).
#if LANES == 16
constexpr int64_t ROWS = 8, COLUMNS = 3;
constexpr int tallest(int columns) { return columns == 3 ? 8 : columns == 2 ? 12 : 16; }
#else
constexpr int64_t ROWS = 6, COLUMNS = 2;
constexpr int tallest(int columns) { return columns == 2 ? 6 : 12; }
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
  U rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;  // to nearest, ties to even
  rounded = x == x ? rounded : ((u >> 16) | 0x40);   // keeps NaN
  H h = __builtin_convertvector(rounded, H);
  memcpy(p, &h, sizeof h);
}

// A whole vector, or its first elements. Nothing past them is read or written; the rest is filled with zeros.
struct Whole {};

template <class T>
INLINE V load(const T* p, Whole) {
  return load(p);
}

template <class T>
INLINE V load(const T* p, int64_t count) {
  T part[LANES] = {};
  for (int64_t i = 0; i < count; i++) part[i] = p[i];
  return load(part);
}

template <class T>
INLINE void store(T* p, V x, Whole) {
  store(p, x);
}

template <class T>
INLINE void store(T* p, V x, int64_t count) {
  T part[LANES];
  store(part, x);
  for (int64_t i = 0; i < count; i++) p[i] = part[i];
}

// The first elements, followed by `rest`.
INLINE V first(V x, Whole, float) { return x; }
INLINE V first(V x, int64_t count, float rest) {
  int32_t lanes[LANES];
  for (int32_t i = 0; i < LANES; i++) lanes[i] = i;
  return load_as<I>(lanes) < static_cast<int32_t>(count) ? x : splat(rest);
}

// Calls f(j, count) for each vector of a row.
template <class F>
INLINE void each(int64_t width, F f) {
  int64_t j = 0;
  for (; j + LANES <= width; j += LANES) f(j, Whole{});
  if (j < width) f(j, width - j);
}

// The sum of f(j, count) over a row; in four independent sums, since an addition takes four cycles.
template <class F>
INLINE V add_up(int64_t width, F f) {
  V a = {}, b = {}, c = {}, d = {};
  int64_t j = 0;
  for (; j + 4 * LANES <= width; j += 4 * LANES) {
    a += f(j, Whole{});
    b += f(j + LANES, Whole{});
    c += f(j + 2 * LANES, Whole{});
    d += f(j + 3 * LANES, Whole{});
  }
  for (; j + LANES <= width; j += LANES) a += f(j, Whole{});
  if (j < width) b += f(j, width - j);
  return (a + b) + (c + d);
}

INLINE V larger(V a, V b) { return a > b ? a : b; }

// LOW and HIGH interleave the halves of two vectors; SWAP_k exchanges the elements i and i ^ k.
#define SHUFFLE __builtin_shufflevector
#if LANES == 4
#define LOW(a, b) SHUFFLE(a, b, 0, 4, 1, 5)
#define HIGH(a, b) SHUFFLE(a, b, 2, 6, 3, 7)
#define SWAPS(x, STEP) STEP(x, 2, 3, 0, 1) STEP(x, 1, 0, 3, 2)
#elif LANES == 8
#define LOW(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH(a, b) SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define SWAPS(x, STEP) STEP(x, 4, 5, 6, 7, 0, 1, 2, 3) STEP(x, 2, 3, 0, 1, 6, 7, 4, 5) STEP(x, 1, 0, 3, 2, 5, 4, 7, 6)
#else
#define LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define SWAPS(x, STEP)                                               \
  STEP(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)      \
  STEP(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)      \
  STEP(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)      \
  STEP(x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#endif

INLINE float sum(V x) {
#define STEP(x, ...) x += SHUFFLE(x, x, __VA_ARGS__);
  SWAPS(x, STEP)
#undef STEP
  return x[0];
}

INLINE float largest(V x) {
#define STEP(x, ...) x = larger(x, SHUFFLE(x, x, __VA_ARGS__));
  SWAPS(x, STEP)
#undef STEP
  return x[0];
}

// Transposes a square of vectors: interleaving the upper half with the lower one rotates the bits of each element's
// address by one; after all rotations, rows have become columns.
template <class Vector>
INLINE void turn(Vector (&x)[LANES]) {
  for (int step = 1; step < LANES; step *= 2) {
    Vector y[LANES];
    for (int i = 0; i < LANES / 2; i++) {
      y[2 * i] = LOW(x[i], x[i + LANES / 2]);
      y[2 * i + 1] = HIGH(x[i], x[i + LANES / 2]);
    }
    for (int i = 0; i < LANES; i++) x[i] = y[i];
  }
}

// exp for x <= 88, relative error 1e-7; 0 below 2^-126. exp(r) = 1 + r + r^2 g(r) for |r| <= log(2) / 2, g a minimax
// fit. NaN is kept, since comparisons with it are false.
INLINE V exp(V x) {
  x = x < -88.0f ? splat(-88.0f) : x;
  V shifted = x * 1.442695041f + 12583039.0f;  // adding 1.5 * 2^23 + 127 rounds n + 127 to an integer in the low bits
  V n = shifted - 12583039.0f;
  V r = x - n * 0.693359375f + n * 2.12194440e-4f;
  V g = splat(1.381446674e-3f);
  g = g * r + 8.368780429e-3f;
  g = g * r + 4.166839422e-2f;
  g = g * r + 1.666652011e-1f;
  g = g * r + 4.999999341e-1f;
  V y = g * (r * r) + (r + 1.0f);
  return y * bits<V>(bits<I>(shifted) << 23);  // 2^n, or 0 for n = -127
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

// Only the first of the two, absolute error 1e-7: 1/2 + x p(x^2) / q(x^2), a minimax fit; 0 or 1 outside its range.
INLINE V below(V x) {
  constexpr float END = 5.5f;
  V y = x > -END ? x : splat(-END);
  y = y < END ? y : splat(END);
  V u = y * y;
  V p = splat(1.109311466e-10f);
  p = p * u - 2.240358272e-8f;
  p = p * u + 3.401463836e-6f;
  p = p * u + 1.832885536e-4f;
  p = p * u + 4.589235266e-3f;
  p = p * u + 3.712094945e-2f;
  p = p * u + 3.989420717e-1f;
  V q = splat(6.681459582e-5f);
  q = q * u + 1.903829900e-3f;
  q = q * u + 2.979458564e-2f;
  q = q * u + 2.597118509e-1f;
  q = q * u + 1.0f;
  return x < -END ? V{} : y * p / q + 0.5f;
}

constexpr int64_t LINE = 16;  // floats per cache line

constexpr int64_t WIDE = COLUMNS * LANES;  // maximum columns of a panel

constexpr int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

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

template <class T>
INLINE T* at(const View& view, int64_t b, int64_t h, int64_t row) {
  return static_cast<T*>(view.data) + b * view.batch + h * view.head + row * view.row;
}

// Queries are processed in tiles, so that the logits of a tile stay in the L2 cache.
INLINE int64_t tile_rows(const Attention& task) {
  const int64_t fit = 16384 / padded(task.m);
  const int64_t rows = fit < 2 * ROWS ? 2 * ROWS : fit / ROWS * ROWS;
  return task.n < rows ? task.n : rows;
}

// Sets the masked logits of a tile of queries to -inf.
void hide(const Attention& task, int64_t b, int64_t start, int64_t rows, float* to) {
  const int64_t n = task.n, m = task.m, width = padded(m);
  if (task.mask) {
    const uint8_t* mask = task.mask + (b % task.groups * n + start) * m;
    const uint8_t* end = task.mask + task.groups * n * m;
    for (int64_t i = 0; i < rows; i++, mask += m)
      for (int64_t j = 0; j < m; j += LANES) {
        uint8_t part[LANES] = {};
        const uint8_t* from = mask + j;
        if (from + LANES > end) {
          for (int64_t c = 0; c < m - j; c++) part[c] = from[c];
          from = part;
        }
        I allowed = __builtin_convertvector(load_as<B>(from), I);
        float* p = to + i * width + j;
        store(p, allowed != 0 ? load(p) : splat(-INFINITY));
      }
  }
  for (int64_t i = 0; i < rows; i++) {
    float* last = to + (i + 1) * width - LANES;
    if (m < width) store(last, first(load(last), LANES - (width - m), -INFINITY));
    if (task.mask_diagonal && m > 1 && start + i < m) to[i * width + start + i] = -INFINITY;
  }
}

// The masked logits of a tile of queries.
void logits(const Attention& task, int64_t b, int64_t h, int64_t start, int64_t rows, const float* q,
            const float* k_turned, float* to) {
  const int64_t n = task.n, m = task.m, width = padded(m), depth = padded(task.d);
  product<false, false>(rows, width, task.d, q, depth, k_turned, width, to, width);
  // Past the end of a row, a vector reads the next row, or nothing after the last one; `hide` sets these to -inf.
  if (task.bias) {
    const float* bias = task.bias + ((task.bias_heads == 1 ? 0 : h) * n + start) * m;
    const float* end = task.bias + task.bias_heads * n * m;
    for (int64_t i = 0; i < rows; i++, bias += m)
      for (int64_t j = 0; j < m; j += LANES) {
        float* p = to + i * width + j;
        store(p, load(p) + (bias + j + LANES <= end ? load(bias + j) : load(bias + j, m - j)));
      }
  }
  hide(task, b, start, rows, to);
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
  for (int64_t start = 0; start < n; start += tile) {
    const int64_t rows = n - start < tile ? n - start : tile;
    pack(at<const T>(task.q, b, h, start), task.q.row, rows, d, task.scale[h], q);
    logits(task, b, h, start, rows, q, k_turned, p);
    float* lse = task.lse + (b * task.heads + h) * n + start;
    float* top = q;  // the queries are no longer needed
    for (int64_t i = 0; i < rows; i++) {
      V highest = load(p + i * m_width);
      for (int64_t j = LANES; j < m_width; j += LANES) highest = larger(highest, load(p + i * m_width + j));
      top[i] = largest(highest);
    }
    for (int64_t i = 0; i < rows; i++) {
      float* row = p + i * m_width;
      V total = {};
      for (int64_t j = 0; j < m_width; j += LANES) {
        V x = exp(load(row + j) - top[i]);
        store(row + j, x);
        total += x;
      }
      lse[i] = sum(total);
    }
    product<false, false>(rows, e_width, m, p, m_width, v, e_width, out, e_width);
    T* to = at<T>(task.out, b, h, start);
    for (int64_t i = 0; i < rows; i++, to += task.out.row) {
      unpack(out + i * e_width, 1, e, 1.0f / lse[i], to, 0);
      lse[i] = top[i] + logf(lse[i]);
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
  for (int64_t start = 0; start < n; start += tile) {
    const int64_t rows = n - start < tile ? n - start : tile;
    pack(at<const T>(task.q, b, h, start), task.q.row, rows, d, scale, q);
    pack(at<const T>(task.dout, b, h, start), task.dout.row, rows, e, 1.0f, dout);
    logits(task, b, h, start, rows, q, k_turned, p);
    product<false, false>(rows, m_width, e, dout, e_width, v_turned, m_width, dp, m_width);
    const float* lse = task.lse + (b * task.heads + h) * n + start;
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
    unpack(dq, rows, d, scale, at<T>(task.dq, b, h, start), task.dq.row);
    pack(at<const T>(task.q, b, h, start), task.q.row, rows, d, 1.0f, q);
    for (int64_t i = 0; i < rows * d_width; i += LANES) dscale += load(q + i) * load(dq + i);
    if (dbias) {
      float* to = dbias + start * m_width;
      for (int64_t i = 0; i < rows * m_width; i += LANES) store(to + i, load(to + i) + load(dp + i));
    }
  }
  unpack(dk, m, d, 1.0f, at<T>(task.dk, b, h, 0), task.dk.row);
  unpack(dv, m, e, 1.0f, at<T>(task.dv, b, h, 0), task.dv.row);
  task.dscale[b * task.heads + h] = sum(dscale);
}

// Mixed heads: there is one map per head, `stride` numbers apart.
//
// Rows of a tile: its maps, four per head in the backward pass, stay in the L2 cache.
INLINE int64_t mixed_rows(const Attention& task) {
  const int64_t most = (1 << 15) / (task.heads * padded(task.m)), fit = most < 2 * ROWS ? 2 * ROWS : most;
  const int64_t tiles = (task.n + fit - 1) / fit, rows = (task.n + tiles - 1) / tiles;
  const int64_t whole = (rows + ROWS - 1) / ROWS * ROWS;
  return task.n < whole ? task.n : whole;
}

template <int R>
void mix_some(int64_t heads, int64_t size, int64_t stride, const float* weights, int64_t to, int64_t from,
              const float* bias, const float* x, float* y) {
  const Onto onto = {bias, WIDE};
  int64_t j = 0;
  for (; j + WIDE <= size; j += WIDE)
    block<R, COLUMNS>(heads, weights, to, from, x + j, stride, y + j, stride, onto);
  for (; j < size; j += LANES) block<R, 1>(heads, weights, to, from, x + j, stride, y + j, stride, onto);
}

// Map g of y = the sum over h of weights[g * to + h * from] times map h of x, plus row g of `bias` unless it is null.
void mix(int64_t heads, int64_t size, int64_t stride, const float* weights, int64_t to, int64_t from, const float* bias,
         const float* x, float* y) {
  int64_t g = 0;
  const auto some = [&](auto mixer, int64_t count) {
    mixer(heads, size, stride, weights + g * to, to, from, bias ? bias + g * WIDE : nullptr, x, y + g * stride);
    g += count;
  };
  while (heads - g >= 4) some(mix_some<4>, 4);
  if (heads - g == 3) some(mix_some<3>, 3);
  if (heads - g == 2) some(mix_some<2>, 2);
  if (heads - g == 1) some(mix_some<1>, 1);
}

// to[a * to_row + b] += the dot product of map a of x and map b of y.
template <int A, int B>
void dots(int64_t down, int64_t across, int64_t size, int64_t stride, const float* x, const float* y, float* to,
          int64_t to_row) {
  if constexpr (A > 1)
    if (down < A) return dots<A - 1, B>(down, across, size, stride, x, y, to, to_row);
  if constexpr (B > 1)
    if (across < B) return dots<A, B - 1>(down, across, size, stride, x, y, to, to_row);
  V total[A][B] = {};
  for (int64_t j = 0; j < size; j += LANES) {
    V row[B];
    for (int b = 0; b < B; b++) row[b] = load(y + b * stride + j);
    for (int a = 0; a < A; a++) {
      const V column = load(x + a * stride + j);
      for (int b = 0; b < B; b++) total[a][b] += column * row[b];
    }
  }
  for (int a = 0; a < A; a++)
    for (int b = 0; b < B; b++) to[a * to_row + b] += sum(total[a][b]);
}

// Adds the contribution of a tile to the gradient of the mix weights; x is the input of the mix.
void mix_gradient(int64_t heads, int64_t size, int64_t stride, const float* x, const float* dy, float* dweights) {
  constexpr int DOWN = 4, ACROSS = LANES == 16 ? 4 : 2;
  for (int64_t h = 0; h < heads; h += DOWN)
    for (int64_t g = 0; g < heads; g += ACROSS)
      dots<DOWN, ACROSS>(heads - h, heads - g, size, stride, x + h * stride, dy + g * stride, dweights + h * heads + g,
                         heads);
}

// Repeats the number of each head WIDE times.
void spread(const float* bias, int64_t heads, float* to) {
  for (int64_t i = 0; i < heads * WIDE; i++) to[i] = bias[i / WIDE];
}

// Moments over the heads, for one vector of positions.
struct OverHeads {
  V mean, inverse;  // 1 / the standard deviation
};

INLINE OverHeads over_heads(int64_t heads, int64_t stride, const float* x, float epsilon) {
  V total = {}, squares = {};
  for (int64_t h = 0; h < heads; h++) total += load(x + h * stride);
  const V mean = total * (1.0f / heads);
  for (int64_t h = 0; h < heads; h++) {
    const V y = load(x + h * stride) - mean;
    squares += y * y;
  }
  V deviation = squares * (1.0f / heads) + epsilon;
  for (int i = 0; i < LANES; i++) deviation[i] = sqrtf(deviation[i]);
  return {mean, 1.0f / deviation};
}

void norm_heads(const Mixed& task, int64_t size, int64_t stride, const float* x, float* y) {
  for (int64_t j = 0; j < size; j += LANES) {
    const OverHeads at = over_heads(task.heads, stride, x + j, task.epsilon);
    for (int64_t i = j, h = 0; h < task.heads; h++, i += stride)
      store(y + i, (load(x + i) - at.mean) * at.inverse * task.norm_scale[h] + task.norm_bias[h]);
  }
}

// As in norm_backward; dy becomes dx. `sums` has room for two vectors per head.
void norm_heads_backward(const Mixed& task, int64_t size, int64_t stride, const float* x, float* dy, float* sums,
                         float* dscale, float* dbias) {
  const int64_t heads = task.heads;
  memset(sums, 0, sizeof(float) * 2 * heads * LANES);
  for (int64_t j = 0; j < size; j += LANES) {
    const OverHeads at = over_heads(heads, stride, x + j, task.epsilon);
    V g_mean = {}, gy_mean = {};
    for (int64_t i = j, h = 0; h < heads; h++, i += stride) {
      const V y = (load(x + i) - at.mean) * at.inverse, dout = load(dy + i), g = dout * task.norm_scale[h];
      float* own = sums + 2 * h * LANES;
      store(own, load(own) + dout * y);
      store(own + LANES, load(own + LANES) + dout);
      g_mean += g;
      gy_mean += g * y;
    }
    g_mean *= 1.0f / heads;
    gy_mean *= 1.0f / heads;
    for (int64_t i = j, h = 0; h < heads; h++, i += stride) {
      const V y = (load(x + i) - at.mean) * at.inverse, g = load(dy + i) * task.norm_scale[h];
      store(dy + i, (g - g_mean - y * gy_mean) * at.inverse);
    }
  }
  for (int64_t h = 0; h < heads; h++) {
    dscale[h] += sum(load(sums + 2 * h * LANES));
    dbias[h] += sum(load(sums + (2 * h + 1) * LANES));
  }
}

int64_t mixed_forward_scratch(const Mixed& task) {
  const int64_t m = padded(task.m), d = padded(task.d), e = padded(task.e), tile = mixed_rows(task);
  return task.m * d + task.heads * (task.m * e + task.d * m + 2 * tile * m + WIDE) + tile * (d + e);
}

// Queries [from, to).
template <class T>
void mixed_forward(const Mixed& task, int64_t b, int64_t from, int64_t to, float* scratch) {
  const int64_t heads = task.heads, n = task.n, m = task.m, d = task.d, e = task.e;
  const int64_t m_width = padded(m), d_width = padded(d), e_width = padded(e), tile = mixed_rows(task);
  const int64_t stride = tile * m_width;
  float* k = scratch;
  float* v = k + m * d_width;
  float* k_turned = v + heads * m * e_width;
  float* x = k_turned + heads * d * m_width;
  float* p = x + heads * stride;
  float* post_bias = p + heads * stride;
  float* q = post_bias + heads * WIDE;
  float* out = q + tile * d_width;
  float* logits = task.pre ? x : p;

  spread(task.post_bias, heads, post_bias);
  for (int64_t h = 0; h < heads; h++) {
    pack(at<const T>(task.k, b, h, 0), task.k.row, m, d, 1.0f, k);
    turn(k, m, d, k_turned + h * d * m_width);
    pack(at<const T>(task.v, b, h, 0), task.v.row, m, e, 1.0f, v + h * m * e_width);
  }
  for (int64_t start = from; start < to; start += tile) {
    const int64_t rows = to - start < tile ? to - start : tile, size = rows * m_width;
    for (int64_t h = 0; h < heads; h++) {
      pack(at<const T>(task.q, b, h, start), task.q.row, rows, d, task.scale[h], q);
      product<false, false>(rows, m_width, d, q, d_width, k_turned + h * d * m_width, m_width, logits + h * stride,
                            m_width);
    }
    if (task.pre) mix(heads, size, stride, task.pre, 1, heads, nullptr, x, p);
    for (int64_t h = 0; h < heads; h++) {
      hide(task, b, start, rows, p + h * stride);
      float* lse = task.lse + (b * heads + h) * n + start;
      for (int64_t i = 0; i < rows; i++) {
        float* row = p + h * stride + i * m_width;
        V highest = load(row), total = {};
        for (int64_t j = LANES; j < m_width; j += LANES) highest = larger(highest, load(row + j));
        const float top = largest(highest);
        for (int64_t j = 0; j < m_width; j += LANES) {
          V y = exp(load(row + j) - top);
          store(row + j, y);
          total += y;
        }
        const float all = sum(total);
        for (int64_t j = 0; j < m_width; j += LANES) store(row + j, load(row + j) * (1.0f / all));
        lse[i] = top + logf(all);
      }
    }
    mix(heads, size, stride, task.post, 1, heads, post_bias, p, x);
    if (task.norm_scale) norm_heads(task, size, stride, x, x);
    for (int64_t h = 0; h < heads; h++) {
      product<false, false>(rows, e_width, m, x + h * stride, m_width, v + h * m * e_width, e_width, out, e_width);
      unpack(out, rows, e, 1.0f, at<T>(task.out, b, h, start), task.out.row);
    }
  }
}

int64_t mixed_backward_scratch(const Mixed& task) {
  const int64_t m = padded(task.m), d = padded(task.d), e = padded(task.e), tile = mixed_rows(task);
  const int64_t head = task.m * 2 * (d + e) + (task.d + task.e) * m + tile * (d + e + 5 * m) + WIDE + 2 * LANES;
  return task.heads * head + tile * d;
}

// With x the logits, y = pre(x), p = softmax(y), w = post(p) and out = w v: dv = w' dout, dw = dout v', dp = dw through
// post's transpose (and through the norm before, if there is one), dy = p * (dp - sum(p * dp)), dx = dy through pre's
// transpose; the rest is the same as without a mix.
template <class T>
void mixed_backward(const Mixed& task, int64_t b, float* scratch) {
  const int64_t heads = task.heads, n = task.n, m = task.m, d = task.d, e = task.e;
  const int64_t m_width = padded(m), d_width = padded(d), e_width = padded(e), tile = mixed_rows(task);
  const int64_t stride = tile * m_width, k_size = m * d_width, v_size = m * e_width;
  float* k = scratch;
  float* v = k + heads * k_size;
  float* dk = v + heads * v_size;
  float* dv = dk + heads * k_size;
  float* k_turned = dv + heads * v_size;
  float* v_turned = k_turned + heads * d * m_width;
  float* q = v_turned + heads * e * m_width;
  float* dout = q + heads * tile * d_width;
  float* x = dout + heads * tile * e_width;
  float* p = x + heads * stride;
  float* w = p + heads * stride;  // w, then dp, then dy
  float* dw = w + heads * stride;  // dw, then dx
  float* normed = dw + heads * stride;
  float* post_bias = normed + heads * stride;
  float* sums = post_bias + heads * WIDE;
  float* dq = sums + heads * 2 * LANES;
  float* logits = task.pre ? x : p;

  float *dpre = task.dpre + b * heads * heads, *dpost = task.dpost + b * heads * heads;
  float *dpost_bias = task.dpost_bias + b * heads, *dscale = task.dscale + b * heads;
  float *dnorm_scale = task.dnorm_scale + b * heads, *dnorm_bias = task.dnorm_bias + b * heads;  // only with a norm
  for (int64_t i = 0; i < heads * heads; i++) dpost[i] = 0;
  for (int64_t i = 0; task.pre && i < heads * heads; i++) dpre[i] = 0;
  for (int64_t h = 0; h < heads; h++) dpost_bias[h] = dscale[h] = 0;
  for (int64_t h = 0; task.norm_scale && h < heads; h++) dnorm_scale[h] = dnorm_bias[h] = 0;
  memset(dk, 0, sizeof(float) * heads * (k_size + v_size));
  spread(task.post_bias, heads, post_bias);
  for (int64_t h = 0; h < heads; h++) {
    pack(at<const T>(task.k, b, h, 0), task.k.row, m, d, 1.0f, k + h * k_size);
    pack(at<const T>(task.v, b, h, 0), task.v.row, m, e, 1.0f, v + h * v_size);
    turn(k + h * k_size, m, d, k_turned + h * d * m_width);
    turn(v + h * v_size, m, e, v_turned + h * e * m_width);
  }
  for (int64_t start = 0; start < n; start += tile) {
    const int64_t rows = n - start < tile ? n - start : tile, size = rows * m_width;
    for (int64_t h = 0; h < heads; h++) {
      float *own_q = q + h * tile * d_width, *own_dout = dout + h * tile * e_width;
      pack(at<const T>(task.q, b, h, start), task.q.row, rows, d, task.scale[h], own_q);
      pack(at<const T>(task.dout, b, h, start), task.dout.row, rows, e, 1.0f, own_dout);
      product<false, false>(rows, m_width, d, own_q, d_width, k_turned + h * d * m_width, m_width, logits + h * stride,
                            m_width);
      product<false, false>(rows, m_width, e, own_dout, e_width, v_turned + h * e * m_width, m_width, dw + h * stride,
                            m_width);
    }
    if (task.pre) mix(heads, size, stride, task.pre, 1, heads, nullptr, x, p);
    for (int64_t h = 0; h < heads; h++) {
      hide(task, b, start, rows, p + h * stride);
      const float* lse = task.lse + (b * heads + h) * n + start;
      for (int64_t i = 0; i < rows; i++) {
        float* row = p + h * stride + i * m_width;
        for (int64_t j = 0; j < m_width; j += LANES) store(row + j, exp(load(row + j) - lse[i]));
      }
    }
    mix(heads, size, stride, task.post, 1, heads, post_bias, p, w);
    if (task.norm_scale) norm_heads(task, size, stride, w, normed);
    const float* read = task.norm_scale ? normed : w;
    for (int64_t h = 0; h < heads; h++)
      product<true, true>(m, e_width, rows, read + h * stride, m_width, dout + h * tile * e_width, e_width,
                          dv + h * v_size, e_width);
    if (task.norm_scale) norm_heads_backward(task, size, stride, w, dw, sums, dnorm_scale, dnorm_bias);
    mix_gradient(heads, size, stride, p, dw, dpost);
    for (int64_t h = 0; h < heads; h++)
      dpost_bias[h] += sum(add_up(size, [&](int64_t j, auto) INLINE_LAMBDA { return load(dw + h * stride + j); }));
    mix(heads, size, stride, task.post, heads, 1, nullptr, dw, w);
    for (int64_t h = 0; h < heads; h++)
      for (int64_t i = 0; i < rows; i++) {
        const float* row = p + h * stride + i * m_width;
        float* drow = w + h * stride + i * m_width;
        const float mean =
            sum(add_up(m_width, [&](int64_t j, auto) INLINE_LAMBDA { return load(row + j) * load(drow + j); }));
        for (int64_t j = 0; j < m_width; j += LANES) store(drow + j, load(row + j) * (load(drow + j) - mean));
      }
    if (task.pre) {
      mix_gradient(heads, size, stride, x, w, dpre);
      mix(heads, size, stride, task.pre, heads, 1, nullptr, w, dw);
    }
    for (int64_t h = 0; h < heads; h++) {
      float* own_q = q + h * tile * d_width;
      const float* dx = (task.pre ? dw : w) + h * stride;
      product<true, true>(m, d_width, rows, dx, m_width, own_q, d_width, dk + h * k_size, d_width);
      product<false, false>(rows, d_width, m, dx, m_width, k + h * k_size, d_width, dq, d_width);
      unpack(dq, rows, d, task.scale[h], at<T>(task.dq, b, h, start), task.dq.row);
      pack(at<const T>(task.q, b, h, start), task.q.row, rows, d, 1.0f, own_q);
      dscale[h] += sum(
          add_up(rows * d_width, [&](int64_t i, auto) INLINE_LAMBDA { return load(own_q + i) * load(dq + i); }));
    }
  }
  for (int64_t h = 0; h < heads; h++) {
    unpack(dk + h * k_size, m, d, 1.0f, at<T>(task.dk, b, h, 0), task.dk.row);
    unpack(dv + h * v_size, m, e, 1.0f, at<T>(task.dv, b, h, 0), task.dv.row);
  }
}

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

// Sums f(place, column, count) over the rows, per column.
template <class F>
INLINE void add_columns(int64_t d, int64_t from, int64_t to, float* sums, F f) {
  each(d, [&](int64_t j, auto count) INLINE_LAMBDA {
    V a = {}, b = {}, c = {}, e = {};  // independent, since an addition takes four cycles
    int64_t i = from;
    for (; i + 4 <= to; i += 4) {
      a += f(i * d + j, j, count);
      b += f((i + 1) * d + j, j, count);
      c += f((i + 2) * d + j, j, count);
      e += f((i + 3) * d + j, j, count);
    }
    for (; i < to; i++) a += f(i * d + j, j, count);
    store(sums + j, load(sums + j, count) + ((a + b) + (c + e)), count);
  });
}

template <class T>
void column_sums(const BatchNorm& task, int64_t from, int64_t to, float* sums) {
  const T* x = static_cast<const T*>(task.x);
  add_columns(task.d, from, to, sums, [&](int64_t at, int64_t, auto count) INLINE_LAMBDA { return load(x + at, count); });
}

template <class T>
void column_squares(const BatchNorm& task, int64_t from, int64_t to, float* sums) {
  const T* x = static_cast<const T*>(task.x);
  add_columns(task.d, from, to, sums, [&](int64_t at, int64_t j, auto count) INLINE_LAMBDA {
    V y = load(x + at, count) - load(task.mean + j, count);
    return y * y;
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
  const T* x = static_cast<const T*>(task.x);
  add_columns(task.d, from, to, g,
              [&](int64_t at, int64_t, auto count) INLINE_LAMBDA { return through<T>(task, at, count); });
  add_columns(task.d, from, to, gy, [&](int64_t at, int64_t j, auto count) INLINE_LAMBDA {
    V normed = (load(x + at, count) - load(task.mean + j, count)) * load(task.inverse + j, count);
    return through<T>(task, at, count) * normed;
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

template <class T>
INLINE void copy(const T* from, int64_t count, T* to) {
  constexpr int64_t STEP = sizeof(V) / sizeof(T);
  if (count < STEP) {
    for (int64_t i = 0; i < count; i++) to[i] = from[i];
    return;
  }
  for (int64_t i = 0; i < count; i += STEP) {
    const int64_t at = i + STEP <= count ? i : count - STEP;  // the last vector may copy some numbers twice
    memcpy(to + at, from + at, sizeof(V));
  }
}

// Rows [from, to) of windows, counted over all images.
template <class T>
void unfold(const Unfold& task, int64_t from, int64_t to) {
  const int64_t part = task.wide * task.channels;  // one row of pixels in a window
  T* y = static_cast<T*>(task.to) + from * task.columns * task.tall * part;
  for (int64_t i = from; i < to; i++) {
    const T* image = static_cast<const T*>(task.from) + i / task.rows * task.height * task.width * task.channels;
    for (int64_t j = 0; j < task.columns; j++)
      for (int64_t p = 0; p < task.tall; p++, y += part) {
        const int64_t row = i % task.rows * task.down + p - task.above, column = j * task.across - task.before;
        const bool within = row >= 0 && row < task.height && column < task.width && column + task.wide > 0;
        const int64_t left = column < 0 ? -column : 0;
        const int64_t right = column + task.wide > task.width ? task.width - column : task.wide;
        if (!within || right - left < task.wide) memset(y, 0, sizeof(T) * part);
        if (within)
          copy(image + (row * task.width + column + left) * task.channels, (right - left) * task.channels,
               y + left * task.channels);
      }
  }
}

int64_t fold_scratch(const Unfold& task) { return (task.width + 2 * task.before) * task.channels; }

// Rows [from, to) of x, counted over all images: each is the sum of the window rows that read it.
template <class T>
void fold(const Unfold& task, int64_t from, int64_t to, float* scratch) {
  const int64_t part = task.wide * task.channels, width = task.width * task.channels;
  for (int64_t i = from; i < to; i++) {
    memset(scratch, 0, sizeof(float) * fold_scratch(task));
    for (int64_t p = 0; p < task.tall; p++) {
      const int64_t behind = i % task.height + task.above - p;
      if (behind < 0 || behind % task.down || behind / task.down >= task.rows) continue;
      const int64_t row = i / task.height * task.rows + behind / task.down;
      for (int64_t j = 0; j < task.columns; j++) {
        const T* dy = static_cast<const T*>(task.from) + ((row * task.columns + j) * task.tall + p) * part;
        float* sum = scratch + j * task.across * task.channels;
        each(part, [&](int64_t x, auto count) INLINE_LAMBDA {
          store(sum + x, load(sum + x, count) + load(dy + x, count), count);
        });
      }
    }
    T* dx = static_cast<T*>(task.to) + i * width;
    const float* sums = scratch + task.before * task.channels;
    each(width, [&](int64_t x, auto count) INLINE_LAMBDA { store(dx + x, load(sums + x, count), count); });
  }
}

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
  const Unfold& windows = task.windows;
  const int64_t depth = windows.tall * windows.wide * windows.channels;
  return padded(task.features) * depth + band_size(windows) + windows.columns * WIDE;
}

template <class T>
void conv(const Conv& task, int64_t from, int64_t to, float* scratch) {
  const Unfold& windows = task.windows;
  const int64_t part = windows.wide * windows.channels, depth = windows.tall * part, features = task.features;
  const int64_t width = copied_width(windows);
  float* b = scratch;
  float* x = b + padded(features) * depth;
  float* tile = x + band_size(windows);
  pack_columns(static_cast<const T*>(task.kernel), features, depth, features, b);
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
void conv_gradient(const Conv& task, int64_t top, int64_t bottom, float* scratch) {
  const Unfold& windows = task.windows;
  const int64_t part = windows.wide * windows.channels, features = task.features, width = copied_width(windows);
  const bool direct = is_float<T> && features % LANES == 0;  // pixels of dy are whole vectors
  float* x = scratch;
  float* packed = x + band_size(windows);
  float* tile = packed + band(windows) * windows.columns * padded(features);
  each_band(windows, 0, windows.batch * windows.rows, [&](int64_t from, int64_t to) {
    copy_band<T>(windows, from, to, x);
    const T* dy = static_cast<const T*>(task.dy) + from * windows.columns * features;
    if (!direct) pack(dy, features, (to - from) * windows.columns, features, 1.0f, packed);
    const float* b = direct ? reinterpret_cast<const float*>(dy) : packed;
    each_panel(features, [&](int64_t j, int64_t vectors) {
      const int64_t own = vectors * LANES, used = features - j < own ? features - j : own;
      for (int64_t p = top / part; p * part < bottom; p++) {
        const int64_t first = top > p * part ? top : p * part, last = bottom < (p + 1) * part ? bottom : (p + 1) * part;
        gradient_panel<COLUMNS>(task, vectors, used, to - from, first, last, x + p * width + first - p * part, b + j,
                                padded(features), task.dkernel + first * features + j, from > 0, tile);
      }
    });
  });
}

// 3 x 3 convolutions with stride 1 by Winograd's algorithm (https://arxiv.org/abs/1509.09308): a tile of 2 x 2 results
// takes 16 products, one per point, instead of 36. The points of a tile of x are B' x B, those of a kernel G k G', and
// a tile of the result is A' p A of the products p. The derivative uses the transposed matrices. Tiles are counted over
// all images; at odd borders they extend beyond the image.

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

template <class T, class Vector>
constexpr Kernels kernels = {
    padded,
    ROWS,
    WIDE,
    forward_scratch,
    backward_scratch,
    attention_forward<T>,
    attention_backward<T>,
    mixed_forward_scratch,
    mixed_backward_scratch,
    mixed_forward<T>,
    mixed_backward<T>,
    norm_forward<T>,
    norm_backward<T>,
    column_sums<T>,
    column_squares<T>,
    batch_forward<T>,
    batch_sums<T>,
    batch_backward<T>,
    gelu_forward<T>,
    gelu_backward<T>,
    transpose<T, Vector>,
    unfold<T>,
    fold_scratch,
    fold<T>,
    dense_scratch<T>,
    dense_gradient_scratch,
    dense<T>,
    dense_gradient<T>,
    conv_scratch,
    conv_gradient_scratch,
    conv<T>,
    conv_gradient<T>,
    tiled<T>,
    all_tiles,
    tiled_scratch,
    tiled_conv,
    tiled_gradient,
    kernel_gradient,
    depthwise<T>,
    depthwise_gradient<T>,
};

}  // namespace

extern const InstructionSet set;
const InstructionSet set = {SMALLVIT_NAME, kernels<float, V>, kernels<Bf16, H>};

}  // namespace SMALLVIT_ISA
}  // namespace smallvit
