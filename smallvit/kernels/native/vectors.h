// Vectors of one instruction set: loading and storing, sums, transposes, exp and the normal distribution.

#pragma once

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

#include "kernels.h"

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

}  // namespace
}  // namespace SMALLVIT_ISA
}  // namespace smallvit
