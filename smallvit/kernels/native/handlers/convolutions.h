// Handlers of convolutions.

#pragma once

#include "grid.h"
#include "linear.h"

namespace smallvit {
namespace {

// `y` is the result, (batch, rows, columns, features), or its derivative.
Conv conv_task(const ffi::AnyBuffer& x, const ffi::AnyBuffer& y, Pair size, Pair stride, Pair padding) {
  Conv task;
  task.windows = window_task(x, y, size, stride, padding);
  task.windows.from = x.untyped_data();
  task.features = y.dimensions()[3];
  need(y.element_type() == x.element_type(), "y must be of x's type");
  need(x.element_count() && y.element_count(), "x and y must not be empty");
  return task;
}

int64_t window_size(const Unfold& windows) { return windows.tall * windows.wide * windows.channels; }

// `weights` is (numbers of a window, features).
ffi::Error conv(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weights, ffi::Result<ffi::AnyBuffer> y,
                Pair size, Pair stride, Pair padding) {
  return guarded([&] {
    Conv task = conv_task(x, *y, size, stride, padding);
    need(is(weights, {window_size(task.windows), task.features}) && weights.element_type() == x.element_type(),
         "the weights must be (numbers of a window, features) and of x's type");
    task.kernel = weights.untyped_data();
    task.y = y->untyped_data();
    const Kernels& kernels = kernels_for(x);
    const bool tiled = kernels.tiled(task);
    const int64_t rows = tiled ? kernels.tiles(task) : task.windows.batch * task.windows.rows;
    const int64_t threads = workers(pool, rows);
    const Floats packed(kernels.conv_packed(task));
    task.packed = packed.data();
    const int64_t channels = task.windows.channels, size = window_size(task.windows) * task.features;
    const int64_t slices = tiled ? std::min(threads, count(size, PART)) : 1;
    share_out(pool, slices, [&](int64_t slice, int64_t) {
      kernels.conv_pack(task, channels * slice / slices, channels * (slice + 1) / slices, packed.data());
    });
    constexpr int64_t SMALL = 64;  // rows or tiles of a thread
    const int64_t parts = threads == 1 || rows <= SMALL * threads ? threads : 4 * threads;  // which balance the load
    const int64_t scratch_size = Floats::aligned(tiled ? kernels.tiled_scratch(task) : kernels.conv_scratch(task));
    const Floats scratch(scratch_size * threads);
    const auto run = tiled ? kernels.tiled_conv : kernels.conv;
    share_out(pool, parts, [&](int64_t part, int64_t worker) {
      run(task, rows * part / parts, rows * (part + 1) / parts, scratch.data() + worker * scratch_size);
    });
  });
}

// The sum of run(from, to, sum, scratch) over parts of all rows or tiles. The number of parts does not depend on the
// threads; it is small enough that summing the parts takes little time, and even, for two threads or four.
template <class Run>
void sum_gradients(ffi::ThreadPool& pool, const Conv& task, int64_t all, int64_t scratch_size, const Run& run) {
  const int64_t size = window_size(task.windows) * task.features;
  const int64_t parts = std::min(all, std::clamp<int64_t>(4 * count(1 << 13, size), 4, 32));
  const Floats scratch(scratch_size * workers(pool, parts));
  sum_parts(pool, parts, size, task.dkernel, [&](int64_t part, int64_t worker, float* sum) {
    run(all * part / parts, all * (part + 1) / parts, sum, scratch.data() + worker * scratch_size);
  });
}

ffi::Error conv_gradient(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer dy,
                         ffi::Result<ffi::AnyBuffer> dweights, Pair size, Pair stride, Pair padding) {
  return guarded([&] {
    Conv task = conv_task(x, dy, size, stride, padding);
    task.dy = dy.untyped_data();
    const int64_t all = task.windows.batch * task.windows.rows, rows = window_size(task.windows);
    task.dkernel = sized(dweights, {task.windows.tall, task.windows.wide, task.windows.channels, task.features});
    const Kernels& kernels = kernels_for(x);
    if (kernels.tiled(task))
      return sum_gradients(pool, task, kernels.tiles(task), Floats::aligned(kernels.tiled_scratch(task)),
                           [&](int64_t from, int64_t to, float* sum, float* scratch) {
                             kernels.tiled_gradient(task, from, to, sum, scratch);
                           });
    const int64_t scratch_size = Floats::aligned(kernels.conv_gradient_scratch(task));
    constexpr int64_t UNIT = 48;  // rows of dkernel: whole blocks of every kind
    if (rows < 4 * UNIT)  // too few to be shared out
      return sum_gradients(pool, task, all, scratch_size, [&](int64_t from, int64_t to, float* sum, float* scratch) {
        kernels.conv_gradient(task, from, to, 0, rows, sum, scratch);
      });
    const int64_t step = even_step(rows, UNIT, rows, pool.num_threads());
    const Floats scratch(scratch_size * workers(pool, count(rows, step)));
    share_out(pool, count(rows, step), [&](int64_t part, int64_t worker) {
      kernels.conv_gradient(task, 0, all, part * step, std::min(rows, (part + 1) * step), task.dkernel,
                            scratch.data() + worker * scratch_size);
    });
  });
}

Depthwise depthwise_task(const ffi::AnyBuffer& x, const ffi::AnyBuffer& y, Pair size, Pair stride, Pair padding) {
  const Unfold windows = window_task(x, y, size, stride, padding);
  Depthwise task;
  task.batch = windows.batch, task.height = windows.height, task.width = windows.width;
  task.channels = windows.channels, task.rows = windows.rows, task.columns = windows.columns;
  task.tall = windows.tall, task.down = windows.down, task.above = windows.above;
  task.wide = windows.wide, task.across = windows.across, task.before = windows.before;
  need(y.dimensions()[3] == task.channels && y.element_type() == x.element_type(), "y must have x's channels and type");
  need(task.tall * task.wide <= 64, "the kernel must have at most 64 places");
  task.x = x.untyped_data();
  return task;
}

ffi::Error depthwise(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer kernel, ffi::Result<ffi::AnyBuffer> y,
                     Pair size, Pair stride, Pair padding) {
  return guarded([&] {
    Depthwise task = depthwise_task(x, *y, size, stride, padding);
    need(is(kernel, {task.tall, task.wide, task.channels}), "the kernel must be (height, width, channels)");
    task.kernel = floats(kernel);
    task.y = y->untyped_data();
    const Kernels& kernels = kernels_for(x);
    over_rows(pool, task.batch * task.rows, task.columns * task.channels,
              [&](int64_t from, int64_t to) { kernels.depthwise(task, from, to); });
  });
}

ffi::Error depthwise_gradient(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer dy,
                              ffi::Result<ffi::AnyBuffer> dkernel, Pair size, Pair stride, Pair padding) {
  return guarded([&] {
    Depthwise task = depthwise_task(x, dy, size, stride, padding);
    task.dy = dy.untyped_data();
    float* result = sized(dkernel, {task.tall, task.wide, task.channels});
    const Kernels& kernels = kernels_for(x);
    sum_over_rows(pool, task.batch, task.tall * task.wide * task.channels, {result},
                  [&](int64_t from, int64_t to, float* sums) { kernels.depthwise_gradient(task, from, to, sums); });
  });
}

}  // namespace
}  // namespace smallvit
