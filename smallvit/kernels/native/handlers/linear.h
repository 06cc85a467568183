// Handlers of matrix products.

#pragma once

#include "threads.h"

namespace smallvit {
namespace {

// The size of one part of `size`: whole units, at most about `most`, chosen so that threads share all parts evenly.
// There are `others` times as many parts in total, since the other axis is split, too.
int64_t even_step(int64_t size, int64_t unit, int64_t most, int64_t threads, int64_t others = 1) {
  const int64_t fewest = std::max<int64_t>(1, count(size, most)), last = std::max(fewest, size / (2 * unit));
  int64_t best = 0, least = INT64_MAX;
  for (int64_t parts = fewest; parts <= std::min(last, 2 * fewest + threads); parts++) {
    const int64_t step = count(count(size, parts), unit) * unit;
    const int64_t longest = count(count(size, step) * others, threads) * step;  // work of one thread
    if (longest < least) best = step, least = longest;
  }
  return best;
}

// Distributes a task whose shapes and arrays are set.
void run_dense(ffi::ThreadPool& pool, const Dense& task, const Kernels& kernels, bool is_float32) {
  constexpr int64_t FITS = 1 << 16, WIDEST = 192, TALLEST = 1024;  // number of weights, columns, rows
  const int64_t threads = pool.num_threads(), parts = is_float32 ? count(task.depth, DEEPEST) : 1;
  const int64_t deep = count(task.depth, parts);  // the depth is split, except for bfloat16
  const int64_t most = std::clamp(FITS / deep, kernels.width, WIDEST);
  const int64_t width = even_step(task.columns, kernels.width, most, 1), across = count(task.columns, width);
  const int64_t height = even_step(task.rows, kernels.height, TALLEST, threads, across);
  const int64_t tasks = count(task.rows, height) * across;
  const int64_t size = Floats::aligned(kernels.dense_scratch(task, width));
  const Floats scratch(size * workers(pool, tasks));
  share_out(pool, tasks, [&](int64_t part, int64_t worker) {
    const int64_t top = part / across * height, left = part % across * width;
    kernels.dense(task, top, std::min(task.rows, top + height), left, std::min(task.columns, left + width),
                  scratch.data() + worker * size);
  });
}

void run_dense_gradient(ffi::ThreadPool& pool, const DenseGradient& task, const Kernels& kernels) {
  // Tiles of the result. Each sums over all rows, in the same order for any choice of tiles.
  constexpr int64_t TALLEST = 192, WIDEST = 288;
  const int64_t threads = pool.num_threads();
  int64_t height = std::min(task.rows, TALLEST);
  const int64_t width = even_step(task.columns, kernels.width, WIDEST, threads, count(task.rows, height));
  if (count(task.rows, height) * count(task.columns, width) < threads)
    height = even_step(task.rows, kernels.height, TALLEST, threads, count(task.columns, width));
  const int64_t down = count(task.rows, height), across = count(task.columns, width);
  const int64_t size = Floats::aligned(kernels.dense_gradient_scratch(task, height, width));
  const Floats scratch(size * workers(pool, down * across));
  share_out(pool, down * across, [&](int64_t part, int64_t worker) {
    const int64_t top = part / across * height, left = part % across * width;
    kernels.dense_gradient(task, top, std::min(task.rows, top + height), left, std::min(task.columns, left + width),
                           scratch.data() + worker * size);
  });
}

// `plain`: where to store the input of the GELU, or null.
void multiply(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const ffi::AnyBuffer& weights,
              const ffi::AnyBuffer& bias, ffi::AnyBuffer& y, void* plain, bool turned, bool gelu) {
  Dense task;
  read_rows(x, task.rows, task.depth);
  need(weights.dimensions().size() == 2 && weights.dimensions()[turned] == task.depth &&
           weights.element_type() == x.element_type(),
       "the weights must be (width of x, columns) and of its type");
  task.columns = weights.dimensions()[!turned];
  need(is(y, {task.rows, task.columns}) && y.element_type() == x.element_type(), "y must be (rows, columns)");
  need(x.element_count() && weights.element_count(), "x and the weights must not be empty");
  if (bias.element_count()) {
    need(is(bias, {task.columns}), "bias must have a number for each column");
    task.bias = floats(bias);
  }
  task.a = x.untyped_data();
  task.b = weights.untyped_data();
  task.c = y.untyped_data();
  task.plain = plain;
  task.turned = turned;
  task.gelu = gelu;
  run_dense(pool, task, kernels_for(x), is_float32(x));
}

ffi::Error dense(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weights, ffi::AnyBuffer bias,
                 ffi::Result<ffi::AnyBuffer> y, bool turned, bool gelu) {
  return guarded([&] { multiply(pool, x, weights, bias, *y, nullptr, turned, gelu); });
}

ffi::Error dense_gelu(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weights, ffi::AnyBuffer bias,
                      ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> plain) {
  return guarded([&] { multiply(pool, x, weights, bias, *y, same(plain, *y), false, true); });
}

ffi::Error dense_gradient(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer dy,
                          ffi::Result<ffi::AnyBuffer> dweights, ffi::Result<ffi::AnyBuffer> dbias) {
  return guarded([&] {
    DenseGradient task;
    int64_t depth;
    read_rows(x, task.depth, task.rows);
    read_rows(dy, depth, task.columns);
    need(depth == task.depth && dy.element_type() == x.element_type(), "dy must have x's rows and type");
    need(x.element_count() && dy.element_count(), "x and dy must not be empty");
    task.a = x.untyped_data();
    task.b = dy.untyped_data();
    task.c = sized(dweights, {task.rows, task.columns});
    task.sums = sized(dbias, {task.columns});
    run_dense_gradient(pool, task, kernels_for(x));
  });
}

}  // namespace
}  // namespace smallvit
