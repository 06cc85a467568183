// Handlers of the update of the weights.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "threads.h"

namespace smallvit {
namespace {

// Lists of float32 arrays among the arguments and results, one list after the other. Array i has the same size in all.
struct Lists {
  int64_t length = 0;
  std::vector<float*> given, returned;
  std::vector<int64_t> sizes, outputs;  // outputs: of the last axis
  float* from(int64_t list, int64_t i) const { return given[list * length + i]; }
  float* to(int64_t list, int64_t i) const { return returned[list * length + i]; }
};

Lists read_lists(const ffi::RemainingArgs& args, int64_t given, const ffi::RemainingRets& rets, int64_t returned) {
  Lists lists;
  lists.length = args.size() / given;
  need(static_cast<int64_t>(args.size()) == given * lists.length &&
           static_cast<int64_t>(rets.size()) == returned * lists.length,
       "the lists must be equally long");
  const auto add = [&](std::vector<float*>& to, const ffi::AnyBuffer& x) {
    const int64_t i = to.size() % lists.length, size = x.element_count();
    if (static_cast<int64_t>(lists.sizes.size()) < lists.length) {
      const Shape shape = x.dimensions();
      lists.sizes.push_back(size);
      lists.outputs.push_back(shape.size() < 2 ? 0 : shape.back());
    }
    need(is_float32(x) && size == lists.sizes[i], "arrays must be float32, and the lists of the same sizes");
    to.push_back(static_cast<float*>(x.untyped_data()));
  };
  for (size_t i = 0; i < args.size(); i++) add(lists.given, *args.get<ffi::AnyBuffer>(i));
  for (size_t i = 0; i < rets.size(); i++) add(lists.returned, **rets.get<ffi::AnyBuffer>(i));
  return lists;
}

struct Slice {
  int64_t array, from, to;
};

// All arrays in slices that do not depend on the number of threads.
std::vector<Slice> slices(const Lists& lists) {
  std::vector<Slice> all;
  for (int64_t i = 0; i < lists.length; i++)
    for (int64_t from = 0; from < lists.sizes[i]; from += PART)
      all.push_back({i, from, std::min(lists.sizes[i], from + PART)});
  return all;
}

template <class Body>
void over_slices(ffi::ThreadPool& pool, const std::vector<Slice>& all, const Body& body) {
  share_out(pool, all.size(), [&](int64_t i, int64_t) { body(all[i].array, all[i].from, all[i].to); });
}

float number(const ffi::AnyBuffer& x) {
  need(x.element_count() == 1, "a factor must be one number");
  return *floats(x);
}

// Scales all arrays such that their norm together is at most `most`.
ffi::Error clip(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, double most) {
  return guarded([&] {
    const Lists lists = read_lists(args, 1, rets, 1);
    const Kernels& kernels = chosen.load()->float32;
    const std::vector<Slice> all = slices(lists);
    std::vector<float> sums(all.size());
    share_out(pool, all.size(), [&](int64_t i, int64_t) {
      sums[i] = kernels.sum_of_squares(lists.from(0, all[i].array), all[i].from, all[i].to);
    });
    float total = 0, limit = static_cast<float>(most);
    for (const float sum : sums) total += sum;
    const float norm = std::sqrt(total), factor = norm < limit ? 1.0f : limit / norm;  // NaN if the norm is
    over_slices(pool, all, [&](int64_t i, int64_t from, int64_t to) {
      kernels.weighted_sum({lists.from(0, i), nullptr, lists.to(0, i), factor, 0}, from, to);
    });
  });
}

ffi::Error weighted_sums(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::RemainingArgs args,
                         ffi::RemainingRets rets) {
  return guarded([&] {
    const Lists lists = read_lists(args, 2, rets, 1);
    const float x_factor = number(a), y_factor = number(b);
    const Kernels& kernels = chosen.load()->float32;
    over_slices(pool, slices(lists), [&](int64_t i, int64_t from, int64_t to) {
      kernels.weighted_sum({lists.from(0, i), lists.from(1, i), lists.to(0, i), x_factor, y_factor}, from, to);
    });
  });
}

ffi::Error adam(ffi::ThreadPool pool, ffi::AnyBuffer mean_correction, ffi::AnyBuffer square_correction,
                ffi::RemainingArgs args, ffi::RemainingRets rets, double mean_decay, double square_decay,
                double epsilon, double rate) {
  return guarded([&] {
    const Lists lists = read_lists(args, 3, rets, 3);
    Adam common;
    common.mean_kept = mean_decay, common.mean_added = 1 - mean_decay;
    common.square_kept = square_decay, common.square_added = 1 - square_decay;
    common.mean_correction = number(mean_correction), common.square_correction = number(square_correction);
    common.epsilon = epsilon, common.rate = -rate;
    const Kernels& kernels = chosen.load()->float32;
    over_slices(pool, slices(lists), [&](int64_t i, int64_t from, int64_t to) {
      Adam task = common;
      task.gradient = lists.from(0, i), task.mean = lists.from(1, i), task.square = lists.from(2, i);
      task.update = lists.to(0, i), task.new_mean = lists.to(1, i), task.new_square = lists.to(2, i);
      kernels.adam(task, from, to);
    });
  });
}

// The update of a matrix with more outputs than inputs is scaled up, so that its output changes as much.
ffi::Error muon(ffi::ThreadPool pool, ffi::AnyBuffer gradient_correction, ffi::AnyBuffer momentum_correction,
                ffi::RemainingArgs args, ffi::RemainingRets rets, double decay, double epsilon, double rate,
                int64_t steps, ffi::Span<const double> coefficients) {
  return guarded([&] {
    const Lists lists = read_lists(args, 2, rets, 2);
    need(coefficients.size() == 3 && steps >= 1, "there must be three coefficients, and a step");
    const Kernels& kernels = chosen.load()->float32;
    std::vector<Muon> tasks(lists.length);
    int64_t size = 0;
    for (int64_t i = 0; i < lists.length; i++) {
      Muon& task = tasks[i];
      need(lists.sizes[i] && lists.outputs[i], "a matrix must have two axes, and not be empty");
      task.outputs = lists.outputs[i], task.inputs = lists.sizes[i] / task.outputs, task.steps = steps;
      task.gradient = lists.from(0, i), task.momentum = lists.from(1, i);
      task.update = lists.to(0, i), task.new_momentum = lists.to(1, i);
      task.kept = decay, task.added = 1 - decay;
      task.momentum_weight = decay / number(momentum_correction);
      task.gradient_weight = (1 - decay) / number(gradient_correction);
      task.first = coefficients[0], task.second = coefficients[1], task.third = coefficients[2];
      task.epsilon = epsilon;
      task.rate = -rate * std::sqrt(std::max(1.0, static_cast<double>(task.outputs) / task.inputs));
      size = std::max(size, Floats::aligned(kernels.muon_scratch(task)));
    }
    // The largest first: threads end at about the same time.
    const auto work = [steps](const Muon& task) {
      const int64_t side = std::min(task.inputs, task.outputs);
      return side * (2 * task.inputs * task.outputs + 4 * steps * side * side);
    };
    std::stable_sort(tasks.begin(), tasks.end(), [&](const Muon& a, const Muon& b) { return work(a) > work(b); });
    const Floats scratch(size * workers(pool, lists.length));
    share_out(pool, lists.length,
              [&](int64_t i, int64_t worker) { kernels.muon(tasks[i], scratch.data() + worker * size); });
  });
}

}  // namespace
}  // namespace smallvit
