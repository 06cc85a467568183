// The update of the weights: weighted sums, Adam, and Muon for one matrix.

#pragma once

#include "linear.h"

namespace smallvit {
namespace SMALLVIT_ISA {
namespace {

float sum_of_squares(const float* x, int64_t from, int64_t to) {
  return sum(add_up(to - from, [&](int64_t i, auto count) INLINE_LAMBDA {
    const V value = load(x + from + i, count);
    return value * value;
  }));
}

void weighted_sum(const WeightedSum& task, int64_t from, int64_t to) {
  each(to - from, [&](int64_t i, auto count) INLINE_LAMBDA {
    i += from;
    V z = load(task.x + i, count) * task.a;
    if (task.y) z += load(task.y + i, count) * task.b;
    store(task.z + i, z, count);
  });
}

INLINE V square_root(V x) {
  for (int i = 0; i < LANES; i++) x[i] = __builtin_sqrtf(x[i]);
  return x;
}

void adam(const Adam& task, int64_t from, int64_t to) {
  each(to - from, [&](int64_t i, auto count) INLINE_LAMBDA {
    i += from;
    const V gradient = load(task.gradient + i, count);
    const V mean = load(task.mean + i, count) * task.mean_kept + gradient * task.mean_added;
    const V square = load(task.square + i, count) * task.square_kept + gradient * gradient * task.square_added;
    store(task.new_mean + i, mean, count);
    store(task.new_square + i, square, count);
    const V size = square_root(square / task.square_correction) + task.epsilon;
    store(task.update + i, mean / task.mean_correction / size * task.rate, count);
  });
}

constexpr int64_t TILE = 192;  // maximum columns, and rows of a gradient, that are computed at a time

// As many columns as fit into the L2 cache.
INLINE int64_t tile_width(int64_t depth) {
  const int64_t fit = (1 << 16) / (depth < DEEPEST ? depth : DEEPEST) / WIDE * WIDE;
  return fit < WIDE ? WIDE : fit > TILE ? TILE : fit;
}

// c = a b, or a b' if `turned`.
Dense product_task(int64_t rows, int64_t depth, int64_t columns, const float* a, const float* b, float* c,
                   bool turned = false) {
  Dense task;
  task.rows = rows, task.depth = depth, task.columns = columns;
  task.a = a, task.b = b, task.c = c;
  task.turned = turned;
  return task;
}

void multiply(const Dense& task, float* scratch) {
  const int64_t step = tile_width(task.depth);
  for (int64_t left = 0; left < task.columns; left += step)
    dense<float>(task, 0, task.rows, left, task.columns - left < step ? task.columns : left + step, scratch);
}

int64_t line(int64_t size) { return (size + LINE - 1) / LINE * LINE; }

// c = a' a.
void inner_products(int64_t depth, int64_t columns, const float* a, float* c, float* scratch) {
  DenseGradient task;
  task.rows = task.columns = columns, task.depth = depth;
  task.a = task.b = a;
  task.c = c, task.sums = scratch;
  for (int64_t top = 0; top < columns; top += TILE)
    for (int64_t left = 0; left < columns; left += TILE)
      dense_gradient<float>(task, top, columns - top < TILE ? columns : top + TILE, left,
                            columns - left < TILE ? columns : left + TILE, scratch + line(columns));
}

// Two matrices, three squares, and scratch for the products.
int64_t muon_scratch(const Muon& task) {
  const int64_t rows = task.inputs, columns = task.outputs, side = rows < columns ? rows : columns;
  const auto needs = [](int64_t depth) {
    return dense_scratch<float>(product_task(0, depth, 0, nullptr, nullptr, nullptr), tile_width(depth));
  };
  int64_t most = needs(side);
  if (rows <= columns && needs(columns) > most) most = needs(columns);
  const int64_t inner = line(side) + dense_gradient_scratch({}, TILE, TILE);
  if (rows > columns && inner > most) most = inner;
  return 2 * line(rows * columns) + 3 * line(side * side) + most;
}

// A Newton-Schulz step multiplies x by a polynomial of its Gram matrix, x x' or, of a tall x, x' x. The polynomials
// commute, so all steps only need the first Gram matrix, and x is multiplied by the product of the polynomials once.
// That takes fewer operations unless x is nearly square; then x itself changes in each step, which is also more exact.
void muon(const Muon& task, float* scratch) {
  const int64_t rows = task.inputs, columns = task.outputs, size = rows * columns;
  const bool wide = rows <= columns;
  const int64_t side = wide ? rows : columns, squared = side * side;
  const bool one_by_one = 2 * size < 3 * squared;
  float* x = scratch;
  float* product = x + line(size);  // of the polynomials, or the next x
  float* gram = product + line(size);
  float* last = gram + line(squared);
  float* spare = last + line(squared);
  float* const rest = spare + line(squared);
  const auto multiply_squares = [&](const float* a, const float* b, float* c) {
    multiply(product_task(side, side, side, a, b, c), rest);
  };
  const auto apply = [&](const float* square, float* to) {
    multiply(wide ? product_task(rows, rows, columns, square, x, to)
                  : product_task(rows, columns, columns, x, square, to),
             rest);
  };
  const auto swap = [](float*& a, float*& b) {
    float* const c = a;
    a = b, b = c;
  };

  weighted_sum({task.momentum, task.gradient, task.new_momentum, task.kept, task.added}, 0, size);
  weighted_sum({task.new_momentum, task.gradient, x, task.momentum_weight, task.gradient_weight}, 0, size);
  const float norm = __builtin_sqrtf(sum_of_squares(x, 0, size)) + task.epsilon;
  weighted_sum({x, nullptr, x, 1 / norm, 0}, 0, size);
  for (int64_t step = 0; step < task.steps; step++) {
    if (step && !one_by_one) {
      multiply_squares(last, gram, spare);
      multiply_squares(spare, last, gram);
    } else if (wide) {
      multiply(product_task(rows, columns, rows, x, x, gram, true), rest);
    } else {
      inner_products(rows, columns, x, gram, rest);
    }
    multiply_squares(gram, gram, spare);
    weighted_sum({gram, spare, last, task.second, task.third}, 0, squared);
    for (int64_t i = 0; i < side; i++) last[i * side + i] += task.first;
    if (one_by_one) {
      apply(last, product);
      swap(x, product);
    } else if (step) {
      multiply_squares(last, product, spare);
      memcpy(product, spare, squared * sizeof(float));
    } else {
      memcpy(product, last, squared * sizeof(float));
    }
  }
  if (one_by_one) return weighted_sum({x, nullptr, task.update, task.rate, 0}, 0, size);
  weighted_sum({product, nullptr, product, task.rate, 0}, 0, squared);
  apply(product, task.update);
}

}  // namespace
}  // namespace SMALLVIT_ISA
}  // namespace smallvit
