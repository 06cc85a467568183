// Handlers of the windows of images.

#pragma once

#include "threads.h"

namespace smallvit {
namespace {

using Pair = ffi::Span<const int64_t>;

// `x` are the images, `y` the results of their windows, or the derivatives of both.
Unfold window_task(const ffi::AnyBuffer& x, const ffi::AnyBuffer& y, Pair size, Pair stride, Pair padding) {
  const Shape image = x.dimensions(), grid = y.dimensions();
  need(image.size() == 4 && grid.size() == 4, "x must be (batch, height, width, channels), y (batch, rows, columns, d)");
  need(size.size() == 2 && stride.size() == 2 && padding.size() == 2, "size, stride and padding must be pairs");
  Unfold task;
  task.batch = image[0], task.height = image[1], task.width = image[2], task.channels = image[3];
  task.rows = grid[1], task.columns = grid[2];
  task.tall = size[0], task.down = stride[0], task.above = padding[0];
  task.wide = size[1], task.across = stride[1], task.before = padding[1];
  need(task.tall > 0 && task.wide > 0 && task.down > 0 && task.across > 0 && task.above >= 0 && task.before >= 0,
       "size and stride must be positive, padding not negative");
  need(grid[0] == task.batch, "y must have x's images");
  need((task.rows - 1) * task.down + task.tall <= task.height + 2 * task.above &&
           (task.columns - 1) * task.across + task.wide <= task.width + 2 * task.before,
       "there are more windows than x has room for");
  return task;
}

// `y` are the windows themselves.
Unfold unfold_task(const ffi::AnyBuffer& x, const ffi::AnyBuffer& y, Pair size, Pair stride, Pair padding) {
  const Unfold task = window_task(x, y, size, stride, padding);
  need(y.dimensions()[3] == task.tall * task.wide * task.channels && y.element_type() == x.element_type(),
       "y must have x's type, and the pixels of a window");
  return task;
}

ffi::Error unfold(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, Pair size, Pair stride,
                  Pair padding) {
  return guarded([&] {
    Unfold task = unfold_task(x, *y, size, stride, padding);
    task.from = x.untyped_data();
    task.to = y->untyped_data();
    const Kernels& kernels = kernels_for(x);
    over_rows(pool, task.batch * task.rows, task.columns * y->dimensions()[3],
              [&](int64_t from, int64_t to) { kernels.unfold(task, from, to); });
  });
}

ffi::Error fold(ffi::ThreadPool pool, ffi::AnyBuffer dy, ffi::Result<ffi::AnyBuffer> dx, Pair size, Pair stride,
                Pair padding) {
  return guarded([&] {
    Unfold task = unfold_task(*dx, dy, size, stride, padding);
    task.from = dy.untyped_data();
    task.to = dx->untyped_data();
    const Kernels& kernels = kernels_for(dy);
    const int64_t rows = task.batch * task.height, step = rows_per_part(rows, task.width * task.channels);
    const int64_t size = Floats::aligned(kernels.fold_scratch(task));
    const Floats scratch(size * workers(pool, count(rows, step)));
    share_out(pool, count(rows, step), [&](int64_t part, int64_t worker) {
      kernels.fold(task, part * step, std::min(rows, (part + 1) * step), scratch.data() + worker * size);
    });
  });
}

}  // namespace
}  // namespace smallvit
