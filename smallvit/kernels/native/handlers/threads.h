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

// Blocks of scratch memory, by size: powers of two. What a call gives back is kept for the next calls, since malloc
// takes long to find such a block among XLA's buffers, which are returned and requested in every step.
class Blocks {
 public:
  static Blocks& all() {
    static Blocks* const blocks = new Blocks;  // never destroyed: threads may outlive static objects
    return *blocks;
  }

  void* take(size_t bytes) {
    const int kind = kind_of(bytes);
    if (kind < KINDS) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (Kept& kept = kept_[kind]; kept.number) return kept.blocks[--kept.number];
    }
    return ::operator new(kind < KINDS ? size_t{1} << kind : bytes, ALIGN);
  }

  void give(void* block, size_t bytes) {
    const int kind = kind_of(bytes);
    if (kind < KINDS) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (Kept& kept = kept_[kind]; kept.number < MOST) {
        kept.blocks[kept.number++] = block;
        return;
      }
    }
    ::operator delete(block, ALIGN);
  }

 private:
  static constexpr std::align_val_t ALIGN{64};
#if defined(__SANITIZE_ADDRESS__)
  static constexpr int KINDS = 0;  // the sanitizer finds accesses behind a block only if it is of the requested size
#else
  static constexpr int KINDS = 26;  // up to 32 MB
#endif
  static constexpr int MOST = 8;
  struct Kept {
    int number = 0;
    void* blocks[MOST];
  };

  static int kind_of(size_t bytes) {
    int kind = 8;
    while (kind < KINDS && size_t{1} << kind < bytes) kind++;
    return kind;
  }

  std::mutex mutex_;
  Kept kept_[KINDS + 1];
};

// Floats, zeroed on request, aligned to cache lines.
class Floats {
 public:
  explicit Floats(int64_t size, bool zero = false)
      : bytes_(static_cast<size_t>(size) * sizeof(float)), data_(static_cast<float*>(Blocks::all().take(bytes_))) {
    if (zero) std::memset(data_, 0, bytes_);
  }
  ~Floats() { Blocks::all().give(data_, bytes_); }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;
  float* data() const { return data_; }
  static int64_t aligned(int64_t size) { return (size + 15) / 16 * 16; }

 private:
  size_t bytes_;
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

// The number of parts of a sum over rows, which only depends on the shapes.
int64_t sums_over(int64_t rows, int64_t width) {
  constexpr int64_t MOST = 32;
  return std::clamp<int64_t>(rows * width / PART, 1, MOST);
}

// Calls body(from, to, sums), where `sums` holds rows of `width` floats that are summed over all rows: in a number of
// parts that only depends on the shapes, then over the parts.
template <class Body>
void sum_over_rows(ffi::ThreadPool& pool, int64_t rows, int64_t width, std::initializer_list<float*> results,
                   const Body& body) {
  const int64_t parts = sums_over(rows, width);
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

// The sum of the arrays that body(part, worker, array) fills, one per part.
template <class Body>
void sum_parts(ffi::ThreadPool& pool, int64_t parts, int64_t size, float* result, const Body& body) {
  const Floats sums(parts * size);
  share_out(pool, parts,
            [&](int64_t part, int64_t worker) { body(part, worker, parts > 1 ? sums.data() + part * size : result); });
  if (parts == 1) return;
  const int64_t slices = std::min(pool.num_threads(), count(size, PART));
  share_out(pool, slices, [&](int64_t slice, int64_t) {
    const int64_t from = size * slice / slices, to = size * (slice + 1) / slices;
    std::copy(sums.data() + from, sums.data() + to, result + from);
    for (int64_t part = 1; part < parts; part++)
      for (int64_t i = from; i < to; i++) result[i] += sums.data()[part * size + i];
  });
}

}  // namespace
}  // namespace smallvit
