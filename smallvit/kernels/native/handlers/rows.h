// Handlers of LayerNorm, BatchNorm, bias with GELU, and a transpose.

#pragma once

#include <cmath>

#include "threads.h"

namespace smallvit {
namespace {

LayerNorm read_norm(const ffi::AnyBuffer& x, const ffi::AnyBuffer& scale, float epsilon) {
  LayerNorm task;
  read_rows(x, task.rows, task.d);
  need(is(scale, {task.d}), "scale must have a number for each column of x");
  task.scale = floats(scale);
  task.x = x.untyped_data();
  task.epsilon = epsilon;
  return task;
}

ffi::Error norm_forward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer bias,
                        ffi::Result<ffi::AnyBuffer> y, float epsilon) {
  return guarded([&] {
    LayerNorm task = read_norm(x, scale, epsilon);
    need(is(bias, {task.d}), "bias must have a number for each column of x");
    task.bias = floats(bias);
    task.y = same(y, x);
    const Kernels& kernels = kernels_for(x);
    over_rows(pool, task.rows, task.d, [&](int64_t from, int64_t to) { kernels.norm_forward(task, from, to); });
  });
}

ffi::Error norm_backward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer dy,
                         ffi::Result<ffi::AnyBuffer> dx, ffi::Result<ffi::AnyBuffer> dscale,
                         ffi::Result<ffi::AnyBuffer> dbias, float epsilon) {
  return guarded([&] {
    LayerNorm task = read_norm(x, scale, epsilon);
    task.dx = same(dx, x);
    need(is(dy, {task.rows, task.d}) && dy.element_type() == x.element_type(), "dy must be like x");
    task.dy = dy.untyped_data();
    const Kernels& kernels = kernels_for(x);
    float *scale_sum = sized(dscale, {task.d}), *bias_sum = sized(dbias, {task.d});
    sum_over_rows(pool, task.rows, task.d, {scale_sum, bias_sum}, [&](int64_t from, int64_t to, float* sums) {
      kernels.norm_backward(task, from, to, sums, sums + task.d);
    });
  });
}

BatchNorm read_batch_norm(const ffi::AnyBuffer& x, bool relu = false) {
  BatchNorm task;
  read_rows(x, task.rows, task.d);
  need(task.rows >= 1, "x must have a row");
  task.x = x.untyped_data();
  task.relu = relu;
  return task;
}

const float* per_column(const ffi::AnyBuffer& values, const BatchNorm& task) {
  need(is(values, {task.d}), "there must be a number for each column of x");
  return floats(values);
}

void read_gradient(const ffi::AnyBuffer& x, const ffi::AnyBuffer& out, const ffi::AnyBuffer& dy, BatchNorm& task) {
  need(is(dy, {task.rows, task.d}) && dy.element_type() == x.element_type(), "dy must be like x");
  need(!task.relu || (is(out, {task.rows, task.d}) && out.element_type() == x.element_type()), "out must be like x");
  task.dy = dy.untyped_data();
  task.out = out.untyped_data();
}

void divide(float* x, int64_t size, int64_t by) {
  for (int64_t i = 0; i < size; i++) x[i] /= static_cast<float>(by);
}

// 1 / the standard deviation of each column.
void invert(const float* var, int64_t size, float epsilon, float* inverse) {
  for (int64_t i = 0; i < size; i++) inverse[i] = 1.0f / std::sqrt(var[i] + epsilon);
}

// The mean of each column, and its variance: from those of parts, whose number only depends on the shapes.
ffi::Error column_moments(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> result) {
  return guarded([&] {
    const BatchNorm task = read_batch_norm(x);
    const Kernels& kernels = kernels_for(x);
    float *const mean = sized(result, {2, task.d}), *const var = mean + task.d;
    const int64_t parts = std::min(task.rows, sums_over(task.rows, task.d));
    const auto rows = [&](int64_t part) { return task.rows * part / parts; };
    const Floats found(2 * task.d * parts);
    share_out(pool, parts, [&](int64_t part, int64_t) {
      float* const means = found.data() + 2 * task.d * part;
      kernels.column_moments(task, rows(part), rows(part + 1), means, means + task.d);
    });
    for (int64_t j = 0; j < task.d; j++) {
      const auto average = [&](auto value) {
        float total = 0;
        for (int64_t part = 0; part < parts; part++)
          total += value(found.data() + 2 * task.d * part + j, static_cast<float>(rows(part + 1) - rows(part)));
        return total / static_cast<float>(task.rows);
      };
      mean[j] = average([&](const float* part, float number) { return number * part[0]; });
      var[j] = average([&](const float* part, float number) {
        const float away = part[0] - mean[j];
        return part[task.d] + number * away * away;
      });
    }
  });
}

ffi::Error batch_forward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer bias,
                         ffi::AnyBuffer mean, ffi::AnyBuffer var, ffi::AnyBuffer more, ffi::Result<ffi::AnyBuffer> y,
                         float epsilon, bool relu) {
  return guarded([&] {
    BatchNorm task = read_batch_norm(x, relu);
    task.scale = per_column(scale, task), task.bias = per_column(bias, task), task.mean = per_column(mean, task);
    if (more.element_count()) {
      need(is(more, {task.rows, task.d}) && more.element_type() == x.element_type(), "more must be like x");
      task.more = more.untyped_data();
    }
    task.y = same(y, x);
    const Floats inverse(task.d);
    invert(per_column(var, task), task.d, epsilon, inverse.data());
    task.inverse = inverse.data();
    const Kernels& kernels = kernels_for(x);
    over_rows(pool, task.rows, task.d, [&](int64_t from, int64_t to) { kernels.batch_forward(task, from, to); });
  });
}

// The gradients of scale and bias, from these rows.
ffi::Error batch_sums(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer mean, ffi::AnyBuffer var,
                      ffi::AnyBuffer out, ffi::AnyBuffer dy, ffi::Result<ffi::AnyBuffer> dscale,
                      ffi::Result<ffi::AnyBuffer> dbias, float epsilon, bool relu) {
  return guarded([&] {
    BatchNorm task = read_batch_norm(x, relu);
    read_gradient(x, out, dy, task);
    task.mean = per_column(mean, task);
    const Floats inverse(task.d);
    invert(per_column(var, task), task.d, epsilon, inverse.data());
    task.inverse = inverse.data();
    float *g = sized(dbias, {task.d}), *gy = sized(dscale, {task.d});
    const Kernels& kernels = kernels_for(x);
    sum_over_rows(pool, task.rows, task.d, {g, gy}, [&](int64_t from, int64_t to, float* sums) {
      kernels.batch_sums(task, from, to, sums, sums + task.d);
    });
  });
}

// The means of the gradient from its sums, stored in `means`.
void set_means(const ffi::AnyBuffer& dbias, const ffi::AnyBuffer& dscale, int64_t rows, BatchNorm& task,
               const Floats& means) {
  std::copy_n(per_column(dbias, task), task.d, means.data());
  std::copy_n(per_column(dscale, task), task.d, means.data() + task.d);
  divide(means.data(), 2 * task.d, rows);
  task.g_mean = means.data(), task.gy_mean = means.data() + task.d;
}

// The gradients of x and `more`; those of scale and bias are sums over the same `rows` rows as the means.
ffi::Error batch_backward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer mean,
                          ffi::AnyBuffer var, ffi::AnyBuffer out, ffi::AnyBuffer dy, ffi::AnyBuffer dscale,
                          ffi::AnyBuffer dbias, ffi::Result<ffi::AnyBuffer> dx, ffi::Result<ffi::AnyBuffer> dmore,
                          float epsilon, bool relu, int64_t rows) {
  return guarded([&] {
    BatchNorm task = read_batch_norm(x, relu);
    read_gradient(x, out, dy, task);
    task.scale = per_column(scale, task), task.mean = per_column(mean, task);
    task.dx = same(dx, x);
    if (dmore->element_count()) task.dmore = same(dmore, x);
    const Floats inverse(task.d), means(2 * task.d);
    invert(per_column(var, task), task.d, epsilon, inverse.data());
    task.inverse = inverse.data();
    set_means(dbias, dscale, rows, task, means);
    const Kernels& kernels = kernels_for(x);
    over_rows(pool, task.rows, task.d, [&](int64_t from, int64_t to) { kernels.batch_backward(task, from, to); });
  });
}

Gelu read_gelu(const ffi::AnyBuffer& x, const ffi::AnyBuffer& bias) {
  Gelu task;
  read_rows(x, task.rows, task.d);
  need(is(bias, {task.d}), "bias must have a number for each column of x");
  task.bias = floats(bias);
  task.x = x.untyped_data();
  return task;
}

ffi::Error gelu_forward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> y) {
  return guarded([&] {
    Gelu task = read_gelu(x, bias);
    task.y = same(y, x);
    const Kernels& kernels = kernels_for(x);
    over_rows(pool, task.rows, task.d, [&](int64_t from, int64_t to) { kernels.gelu_forward(task, from, to); });
  });
}

ffi::Error gelu_backward(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer bias, ffi::AnyBuffer dy,
                         ffi::Result<ffi::AnyBuffer> dx, ffi::Result<ffi::AnyBuffer> dbias) {
  return guarded([&] {
    Gelu task = read_gelu(x, bias);
    task.dx = same(dx, x);
    need(is(dy, {task.rows, task.d}) && dy.element_type() == x.element_type(), "dy must be like x");
    task.dy = dy.untyped_data();
    const Kernels& kernels = kernels_for(x);
    sum_over_rows(pool, task.rows, task.d, {sized(dbias, {task.d})}, [&](int64_t from, int64_t to, float* sums) {
      kernels.gelu_backward(task, from, to, sums);
    });
  });
}

ffi::Error transpose(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y) {
  return guarded([&] {
    Transpose task;
    read_rows(x, task.rows, task.columns);
    need(is(*y, {task.columns, task.rows}) && y->element_type() == x.element_type(), "y must be (columns, rows)");
    task.x = x.untyped_data();
    task.y = y->untyped_data();
    const Kernels& kernels = kernels_for(x);
    constexpr int64_t LINE = 32;  // columns: bfloat16 numbers per cache line
    share_out(pool, count(task.columns, LINE), [&](int64_t part, int64_t) {
      kernels.transpose(task, part * LINE, std::min(task.columns, (part + 1) * LINE));
    });
  });
}

}  // namespace
}  // namespace smallvit
