// Attention of one head.

#pragma once

#include "products.h"

namespace smallvit {
namespace SMALLVIT_ISA {
namespace {

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

}  // namespace
}  // namespace SMALLVIT_ISA
}  // namespace smallvit
