// Attention whose heads are mixed before and after the softmax.

#pragma once

#include "attention.h"

namespace smallvit {
namespace SMALLVIT_ISA {
namespace {

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

}  // namespace
}  // namespace SMALLVIT_ISA
}  // namespace smallvit
