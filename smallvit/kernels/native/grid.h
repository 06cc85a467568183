// The windows of a grid, and the sum of windows, which is their derivative.

#pragma once

#include "vectors.h"

namespace smallvit {
namespace SMALLVIT_ISA {
namespace {

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

}  // namespace
}  // namespace SMALLVIT_ISA
}  // namespace smallvit
