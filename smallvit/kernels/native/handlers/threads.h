// Scratch memory, and work that is shared out among XLA's threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "buffers.h"

namespace smallvit {
namespace {

// Floats, zeroed on request, aligned to cache lines.
class Floats {
 public:
  explicit Floats(int64_t size, bool zero = false) : data_(static_cast<float*>(::operator new(bytes(size), ALIGN))) {
    if (zero) std::memset(data_, 0, bytes(size));
  }
  ~Floats() { ::operator delete(data_, ALIGN); }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;
  float* data() const { return data_; }
  static int64_t aligned(int64_t size) { return (size + 15) / 16 * 16; }

 private:
  static constexpr std::align_val_t ALIGN{64};
  static size_t bytes(int64_t size) { return static_cast<size_t>(size) * sizeof(float); }
  float* data_;
};

int64_t count(int64_t size, int64_t step) { return (size + step - 1) / step; }

int64_t workers(const ffi::ThreadPool& pool, int64_t tasks) {
  return std::max<int64_t>(1, std::min(pool.num_threads(), tasks));
}

// Runs body(task, worker) for every task, on as many threads as the pool has, including this one. It only waits for
// tasks that have started: a helper that a busy pool starts late finds nothing to do, so that calls which fill the
// pool cannot deadlock.
template <class Body>
void share_out(ffi::ThreadPool& pool, int64_t tasks, const Body& body) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
    int64_t tasks;
    const Body* body;
    std::mutex mutex;
    std::condition_variable finished;

    void work(int64_t worker) {
      int64_t mine = 0;
      for (int64_t task; (task = next.fetch_add(1)) < tasks; mine++) (*body)(task, worker);
      if (mine && done.fetch_add(mine) + mine == tasks) {
        std::lock_guard<std::mutex> lock(mutex);
        finished.notify_one();
      }
    }
  };
  const int64_t threads = workers(pool, tasks);
  if (threads == 1) {
    for (int64_t task = 0; task < tasks; task++) body(task, 0);
    return;
  }
  auto state = std::make_shared<State>();
  state->tasks = tasks;
  state->body = &body;
  try {
    for (int64_t helper = 1; helper < threads; helper++) pool.Schedule([state, helper] { state->work(helper); });
  } catch (const std::bad_alloc&) {
    // Continue with fewer helpers.
  }
  state->work(0);
  for (int spin = 0; spin < 2000 && state->done.load() < tasks; spin++) std::this_thread::yield();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->finished.wait(lock, [&] { return state->done.load() == tasks; });
}

constexpr int64_t PART = 1 << 15;  // elements per task

int64_t rows_per_part(int64_t rows, int64_t width) {
  return std::max<int64_t>(1, std::min(rows, PART / std::max<int64_t>(1, width)));
}

// Calls body(from, to) on parts of all rows.
template <class Body>
void over_rows(ffi::ThreadPool& pool, int64_t rows, int64_t width, const Body& body) {
  const int64_t step = rows_per_part(rows, width);
  share_out(pool, count(rows, step), [&](int64_t part, int64_t) {
    body(part * step, std::min(rows, (part + 1) * step));
  });
}

// Calls body(from, to, sums), where `sums` holds rows of `width` floats that are summed over all rows: in a number of
// parts that only depends on the shapes, then over the parts.
template <class Body>
void sum_over_rows(ffi::ThreadPool& pool, int64_t rows, int64_t width, std::initializer_list<float*> results,
                   const Body& body) {
  constexpr int64_t MOST = 32;
  const int64_t parts = std::max<int64_t>(1, std::min(MOST, rows * width / PART));
  const int64_t size = static_cast<int64_t>(results.size()) * width;
  const Floats sums(std::max<int64_t>(1, parts * size), true);
  share_out(pool, parts, [&](int64_t part, int64_t) {
    body(rows * part / parts, rows * (part + 1) / parts, sums.data() + part * size);
  });
  int64_t at = 0;
  for (float* result : results)
    for (int64_t i = 0; i < width; i++, at++) {
      float total = 0;
      for (int64_t part = 0; part < parts; part++) total += sums.data()[part * size + at];
      result[i] = total;
    }
}

}  // namespace
}  // namespace smallvit
