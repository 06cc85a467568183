// Handlers of max pooling, alone and after BatchNorm.

#pragma once

#include "grid.h"
#include "rows.h"

namespace smallvit {
namespace {

// `x` are the images, `y` the results, or the derivatives of both.
Pool pool_task(const ffi::AnyBuffer& x, const ffi::AnyBuffer& y, Pair stride) {
  const Shape image = x.dimensions(), grid = y.dimensions();
  need(image.size() == 4 && stride.size() == 2 && stride[0] > 0 && stride[1] > 0,
       "x must be (batch, height, width, channels), and the stride a positive pair");
  need(stride[0] * stride[1] <= 64, "a rectangle must have at most 64 pixels");
  Pool task;
  task.batch = image[0], task.height = image[1], task.width = image[2], task.channels = image[3];
  task.down = stride[0], task.across = stride[1];
  task.rows = count(task.height, task.down), task.columns = count(task.width, task.across);
  need(is(y, {task.batch, task.rows, task.columns, task.channels}) && y.element_type() == x.element_type(),
       "y must have x's images, channels and type, and a pixel for each rectangle");
  task.x = x.untyped_data();
  return task;
}

template <class Body>
void over_rectangles(ffi::ThreadPool& pool, const Pool& task, const Body& body) {
  over_rows(pool, task.batch * task.rows, task.down * task.width * task.channels, body);
}

ffi::Error max_pool(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, Pair stride) {
  return guarded([&] {
    Pool task = pool_task(x, *y, stride);
    task.y = y->untyped_data();
    over_rectangles(pool, task, [&](int64_t from, int64_t to) { kernels_for(x).max_pool(task, from, to); });
  });
}

ffi::Error max_pool_gradient(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer dy, ffi::Result<ffi::AnyBuffer> dx,
                             Pair stride) {
  return guarded([&] {
    Pool task = pool_task(x, dy, stride);
    task.dy = dy.untyped_data();
    task.dx = same(dx, x);
    over_rectangles(pool, task, [&](int64_t from, int64_t to) { kernels_for(x).max_pool_gradient(task, from, to); });
  });
}

// `inverse` has room for a number per channel. `y` is the result, or its derivative.
PooledNorm pooled_task(const ffi::AnyBuffer& x, const ffi::AnyBuffer& scale, const ffi::AnyBuffer& bias,
                       const ffi::AnyBuffer& mean, const ffi::AnyBuffer& var, const ffi::AnyBuffer& y, Pair stride,
                       float epsilon, bool relu, const Floats& inverse) {
  PooledNorm task;
  task.pool = pool_task(x, y, stride);
  need(x.element_count(), "x must not be empty");
  task.d = task.pool.channels, task.rows = x.element_count() / task.d;
  task.x = x.untyped_data();
  task.relu = relu;
  task.scale = per_column(scale, task), task.bias = per_column(bias, task), task.mean = per_column(mean, task);
  invert(per_column(var, task), task.d, epsilon, inverse.data());
  task.inverse = inverse.data();
  return task;
}

ffi::Error batch_pool_forward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer bias,
                              ffi::AnyBuffer mean, ffi::AnyBuffer var, ffi::Result<ffi::AnyBuffer> y, Pair stride,
                              float epsilon, bool relu) {
  return guarded([&] {
    const Floats inverse(scale.element_count());
    PooledNorm task = pooled_task(x, scale, bias, mean, var, *y, stride, epsilon, relu, inverse);
    task.y = y->untyped_data();
    over_rectangles(pool, task.pool,
                    [&](int64_t from, int64_t to) { kernels_for(x).batch_pool_forward(task, from, to); });
  });
}

// The gradients of scale and bias, from these images.
ffi::Error batch_pool_sums(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer bias,
                           ffi::AnyBuffer mean, ffi::AnyBuffer var, ffi::AnyBuffer dy,
                           ffi::Result<ffi::AnyBuffer> dscale, ffi::Result<ffi::AnyBuffer> dbias, Pair stride,
                           float epsilon, bool relu) {
  return guarded([&] {
    const Floats inverse(scale.element_count());
    PooledNorm task = pooled_task(x, scale, bias, mean, var, dy, stride, epsilon, relu, inverse);
    task.dy = dy.untyped_data();
    const int64_t d = task.d, rows = task.pool.batch * task.pool.rows, parts = std::min(rows, sums_over(task.rows, d));
    float *gy = sized(dscale, {d}), *g = sized(dbias, {d});
    const Floats total(2 * d);
    sum_parts(pool, parts, 2 * d, total.data(), [&](int64_t part, int64_t, float* sums) {
      std::fill_n(sums, 2 * d, 0.0f);
      kernels_for(x).batch_pool_sums(task, rows * part / parts, rows * (part + 1) / parts, sums, sums + d);
    });
    std::copy_n(total.data(), d, g);
    std::copy_n(total.data() + d, d, gy);
  });
}

// The gradient of x; those of scale and bias are sums over the same `rows` pixels as the means.
ffi::Error batch_pool_backward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer bias,
                               ffi::AnyBuffer mean, ffi::AnyBuffer var, ffi::AnyBuffer dy, ffi::AnyBuffer dscale,
                               ffi::AnyBuffer dbias, ffi::Result<ffi::AnyBuffer> dx, Pair stride, float epsilon,
                               bool relu, int64_t rows) {
  return guarded([&] {
    const Floats inverse(scale.element_count()), means(2 * scale.element_count());
    PooledNorm task = pooled_task(x, scale, bias, mean, var, dy, stride, epsilon, relu, inverse);
    task.dy = dy.untyped_data();
    task.dx = same(dx, x);
    set_means(dbias, dscale, rows, task, means);
    over_rectangles(pool, task.pool,
                    [&](int64_t from, int64_t to) { kernels_for(x).batch_pool_backward(task, from, to); });
  });
}

}  // namespace
}  // namespace smallvit
