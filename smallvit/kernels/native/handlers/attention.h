// Handlers of attention.

#pragma once

#include "threads.h"

namespace smallvit {
namespace {

constexpr int64_t WIDEST = 128;

void read_rest(Attention& task, const ffi::AnyBuffer& scale, const ffi::AnyBuffer& mask, bool mask_diagonal) {
  need(task.n >= 1 && task.m >= 1, "attention needs a query and a key");
  need(task.d >= 1 && task.d <= WIDEST && task.e >= 1 && task.e <= WIDEST, "a head must be 1 to 128 wide");
  need(is(scale, {task.heads}), "scale must be (heads)");
  task.scale = floats(scale);
  task.mask_diagonal = mask_diagonal;
  if (mask.element_count()) {
    const ffi::DataType type = mask.element_type();
    need(type == ffi::DataType::PRED || type == ffi::DataType::U8, "the mask must be bool or uint8");
    need(mask.dimensions().size() == 3, "the mask must be (groups, n, m)");
    task.groups = mask.dimensions()[0];
    need(is(mask, {task.groups, task.n, task.m}), "the mask must be (groups, n, m)");
    task.mask = static_cast<const uint8_t*>(mask.untyped_data());
  }
}

void read_rest(Attention& task, const ffi::AnyBuffer& scale, const ffi::AnyBuffer& bias, const ffi::AnyBuffer& mask,
               bool mask_diagonal) {
  read_rest(task, scale, mask, mask_diagonal);
  if (!bias.element_count()) return;
  need(is(bias, {1, task.n, task.m}) || is(bias, {task.heads, task.n, task.m}), "bias must be (heads or 1, n, m)");
  task.bias = floats(bias);
  task.bias_heads = bias.dimensions()[0];
}

size_t element(const ffi::AnyBuffer& x) { return is_float32(x) ? 4 : 2; }

// `out` is the result, or its derivative. An empty array is part of the one before: in each head, its numbers follow
// those of that array.
Attention read_separate(const ffi::AnyBuffer& q, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v,
                        const ffi::AnyBuffer& out, int64_t heads) {
  need(q.dimensions().size() == 3 && k.dimensions().size() == 3 && v.dimensions().size() == 3 &&
           out.dimensions().size() == 3,
       "q, k and v must be (batch, tokens, heads * width)");
  need(q.element_type() == k.element_type() && q.element_type() == v.element_type(), "q, k and v must be of one type");
  const bool no_k = !k.element_count(), no_v = !v.element_count();
  need(no_v || !no_k, "v without k");
  const int64_t all = q.dimensions()[2], values = out.dimensions()[2], keys = no_k ? (all - values) / 2 : all;
  need(heads >= 1 && keys % heads == 0 && values % heads == 0, "the heads must share q and v out evenly");
  need(!no_k || 2 * keys + values == all, "q must have as many queries as keys");
  Attention task;
  task.batch = q.dimensions()[0];
  task.heads = heads;
  task.n = q.dimensions()[1];
  task.d = keys / heads;
  task.m = (no_k ? q : k).dimensions()[1];
  task.e = values / heads;
  need(no_k || is(k, {task.batch, task.m, no_v ? keys + values : keys}), "k must be (batch, m, heads * d)");
  need(no_v || is(v, {task.batch, task.m, values}), "v must be (batch, m, heads * e)");
  return task;
}

// Views of q, k and v, or their derivatives, for the arrays of read_separate.
struct Views {
  View q, k, v;
};

Views separate_views(const Attention& task, void* q, void* k, void* v, size_t element, bool no_k, bool no_v) {
  const auto view = [&](void* data, int64_t tokens, int64_t head, int64_t offset) {
    return View{static_cast<char*>(data) + offset * element, tokens * task.heads * head, head, task.heads * head};
  };
  const int64_t d = task.d, e = task.e;
  if (no_k) return {view(q, task.n, 2 * d + e, 0), view(q, task.n, 2 * d + e, d), view(q, task.n, 2 * d + e, 2 * d)};
  if (no_v) return {view(q, task.n, d, 0), view(k, task.m, d + e, 0), view(k, task.m, d + e, d)};
  return {view(q, task.n, d, 0), view(k, task.m, d, 0), view(v, task.m, e, 0)};
}

View separate(const Attention& task, void* data, int64_t tokens, int64_t width) {
  return {data, tokens * task.heads * width, width, task.heads * width};
}

Attention read_packed(const ffi::AnyBuffer& qkv, int64_t heads) {
  need(qkv.dimensions().size() == 3 && heads >= 1 && qkv.dimensions()[2] % (3 * heads) == 0,
       "qkv must be (batch, tokens, 3 * heads * width)");
  Attention task;
  task.batch = qkv.dimensions()[0];
  task.heads = heads;
  task.n = task.m = qkv.dimensions()[1];
  task.d = task.e = qkv.dimensions()[2] / (3 * heads);
  return task;
}

// Part 0, 1 or 2 of qkv.
View packed(const Attention& task, void* data, size_t element, int64_t part, int64_t parts) {
  const int64_t inner = task.heads * task.d;
  return {static_cast<char*>(data) + part * inner * element, task.n * parts * inner, task.d, parts * inner};
}

void run_forward(ffi::ThreadPool& pool, const Attention& task, const Kernels& kernels) {
  // All heads of an image in one task, since heads share cache lines, unless threads would be idle.
  const int64_t all = task.batch * task.heads, grain = task.batch >= 4 * pool.num_threads() ? task.heads : 1;
  const int64_t tasks = all / grain, size = Floats::aligned(kernels.forward_scratch(task));
  const Floats scratch(size * workers(pool, tasks));
  share_out(pool, tasks, [&](int64_t index, int64_t worker) {
    for (int64_t i = index * grain; i < (index + 1) * grain; i++)
      kernels.attention_forward(task, i / task.heads, i % task.heads, scratch.data() + worker * size);
  });
}

// The gradient of the bias is summed over the batch in a fixed number of parts, then over the parts. The order only
// depends on the shapes, so results are bit-identical for any number of threads.
void run_backward(ffi::ThreadPool& pool, const Attention& task, const Kernels& kernels, float* dbias) {
  const int64_t size = Floats::aligned(kernels.backward_scratch(task));
  if (!task.bias) {
    const int64_t all = task.batch * task.heads, grain = task.batch >= 4 * pool.num_threads() ? task.heads : 1;
    const int64_t tasks = all / grain;
    const Floats scratch(size * workers(pool, tasks));
    share_out(pool, tasks, [&](int64_t index, int64_t worker) {
      for (int64_t i = index * grain; i < (index + 1) * grain; i++)
        kernels.attention_backward(task, i / task.heads, i % task.heads, nullptr, scratch.data() + worker * size);
    });
    return;
  }
  constexpr int64_t MOST = 16, BUDGET = 1 << 24;  // parts, floats
  const int64_t width = kernels.padded(task.m), map = task.n * width, bias = task.bias_heads * map;
  const int64_t parts = std::max<int64_t>(1, std::min({MOST, task.batch, BUDGET / bias}));
  const int64_t shared = task.heads / task.bias_heads;  // heads per bias map
  const int64_t tasks = parts * task.bias_heads;
  const Floats scratch(size * workers(pool, tasks)), sums(parts * bias, true);
  share_out(pool, tasks, [&](int64_t index, int64_t worker) {
    const int64_t part = index / task.bias_heads, first_head = index % task.bias_heads * shared;
    for (int64_t b = task.batch * part / parts; b < task.batch * (part + 1) / parts; b++)
      for (int64_t h = first_head; h < first_head + shared; h++)
        kernels.attention_backward(task, b, h, sums.data() + index * map, scratch.data() + worker * size);
  });
  share_out(pool, task.bias_heads, [&](int64_t head, int64_t) {
    for (int64_t row = head * task.n; row < (head + 1) * task.n; row++)
      for (int64_t j = 0; j < task.m; j++) {
        float total = 0;
        for (int64_t part = 0; part < parts; part++) total += sums.data()[part * bias + row * width + j];
        dbias[row * task.m + j] = total;
      }
  });
}

float* bias_result(ffi::Result<ffi::AnyBuffer>& dbias, const Attention& task) {
  return task.bias ? sized(dbias, {task.bias_heads, task.n, task.m}) : nullptr;
}

ffi::Error attention_forward(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                             ffi::AnyBuffer scale, ffi::AnyBuffer bias, ffi::AnyBuffer mask,
                             ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse, bool mask_diagonal) {
  return guarded([&] {
    Attention task = read_separate(q, k, v, *out, scale.element_count());
    read_rest(task, scale, bias, mask, mask_diagonal);
    need(is(*out, {task.batch, task.n, task.heads * task.e}) && out->element_type() == q.element_type(),
         "out must be (batch, n, heads * e)");
    task.lse = sized(lse, {task.batch, task.heads, task.n});
    const bool no_k = !k.element_count(), no_v = !v.element_count();
    const Views given =
        separate_views(task, q.untyped_data(), k.untyped_data(), v.untyped_data(), element(q), no_k, no_v);
    task.q = given.q, task.k = given.k, task.v = given.v;
    task.out = separate(task, out->untyped_data(), task.n, task.e);
    run_forward(pool, task, kernels_for(q));
  });
}

ffi::Error attention_backward(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                              ffi::AnyBuffer scale, ffi::AnyBuffer bias, ffi::AnyBuffer mask, ffi::AnyBuffer lse,
                              ffi::AnyBuffer dout, ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk,
                              ffi::Result<ffi::AnyBuffer> dv, ffi::Result<ffi::AnyBuffer> dscale,
                              ffi::Result<ffi::AnyBuffer> dbias, bool mask_diagonal) {
  return guarded([&] {
    Attention task = read_separate(q, k, v, dout, scale.element_count());
    read_rest(task, scale, bias, mask, mask_diagonal);
    need(is(dout, {task.batch, task.n, task.heads * task.e}) && dout.element_type() == q.element_type(),
         "dout must be (batch, n, heads * e)");
    need(is(lse, {task.batch, task.heads, task.n}), "lse must be (batch, heads, n)");
    task.lse = const_cast<float*>(floats(lse));
    task.dscale = sized(dscale, {task.batch, task.heads});
    const bool no_k = !k.element_count(), no_v = !v.element_count();
    const Views given =
        separate_views(task, q.untyped_data(), k.untyped_data(), v.untyped_data(), element(q), no_k, no_v);
    const Views back = separate_views(task, same(dq, q), same(dk, k), same(dv, v), element(q), no_k, no_v);
    task.q = given.q, task.k = given.k, task.v = given.v;
    task.dq = back.q, task.dk = back.k, task.dv = back.v;
    task.dout = separate(task, dout.untyped_data(), task.n, task.e);
    run_backward(pool, task, kernels_for(q), bias_result(dbias, task));
  });
}

ffi::Error packed_forward(ffi::ThreadPool pool, ffi::AnyBuffer qkv, ffi::AnyBuffer scale, ffi::AnyBuffer bias,
                          ffi::AnyBuffer mask, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                          bool mask_diagonal) {
  return guarded([&] {
    Attention task = read_packed(qkv, scale.element_count());
    read_rest(task, scale, bias, mask, mask_diagonal);
    need(is(*out, {task.batch, task.n, task.heads * task.d}) && out->element_type() == qkv.element_type(),
         "out must be (batch, n, heads * d)");
    task.lse = sized(lse, {task.batch, task.heads, task.n});
    const size_t bytes = element(qkv);
    task.q = packed(task, qkv.untyped_data(), bytes, 0, 3);
    task.k = packed(task, qkv.untyped_data(), bytes, 1, 3);
    task.v = packed(task, qkv.untyped_data(), bytes, 2, 3);
    task.out = packed(task, out->untyped_data(), bytes, 0, 1);
    run_forward(pool, task, kernels_for(qkv));
  });
}

ffi::Error packed_backward(ffi::ThreadPool pool, ffi::AnyBuffer qkv, ffi::AnyBuffer scale, ffi::AnyBuffer bias,
                           ffi::AnyBuffer mask, ffi::AnyBuffer lse, ffi::AnyBuffer dout,
                           ffi::Result<ffi::AnyBuffer> dqkv, ffi::Result<ffi::AnyBuffer> dscale,
                           ffi::Result<ffi::AnyBuffer> dbias, bool mask_diagonal) {
  return guarded([&] {
    Attention task = read_packed(qkv, scale.element_count());
    read_rest(task, scale, bias, mask, mask_diagonal);
    need(is(dout, {task.batch, task.n, task.heads * task.d}) && dout.element_type() == qkv.element_type(),
         "dout must be (batch, n, heads * d)");
    need(is(lse, {task.batch, task.heads, task.n}), "lse must be (batch, heads, n)");
    task.lse = const_cast<float*>(floats(lse));
    task.dscale = sized(dscale, {task.batch, task.heads});
    const size_t bytes = element(qkv);
    void* gradient = same(dqkv, qkv);
    task.q = packed(task, qkv.untyped_data(), bytes, 0, 3);
    task.k = packed(task, qkv.untyped_data(), bytes, 1, 3);
    task.v = packed(task, qkv.untyped_data(), bytes, 2, 3);
    task.dout = packed(task, dout.untyped_data(), bytes, 0, 1);
    task.dq = packed(task, gradient, bytes, 0, 3);
    task.dk = packed(task, gradient, bytes, 1, 3);
    task.dv = packed(task, gradient, bytes, 2, 3);
    run_backward(pool, task, kernels_for(qkv), bias_result(dbias, task));
  });
}

}  // namespace
}  // namespace smallvit
