// Handlers of attention with mixed heads.

#pragma once

#include "attention.h"

namespace smallvit {
namespace {

// Views of q, k and v, or their derivatives; if packed, q holds all three.
Views mixed_views(const Attention& task, void* q, void* k, void* v, size_t bytes, bool is_packed) {
  if (!is_packed) return separate_views(task, q, k, v, bytes, false, false);
  return {packed(task, q, bytes, 0, 3), packed(task, q, bytes, 1, 3), packed(task, q, bytes, 2, 3)};
}

// q is packed if k and v are empty.
Mixed read_mixed(const ffi::AnyBuffer& q, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v, const ffi::AnyBuffer& scale,
                 const ffi::AnyBuffer& mask, const ffi::AnyBuffer& pre, const ffi::AnyBuffer& post,
                 const ffi::AnyBuffer& post_bias, const ffi::AnyBuffer& norm_scale, const ffi::AnyBuffer& norm_bias,
                 const ffi::AnyBuffer& out, bool mask_diagonal, float epsilon) {
  const int64_t heads = scale.element_count();
  const bool is_packed = !k.element_count();
  need(is_packed || v.element_count(), "k without v");
  Mixed task{is_packed ? read_packed(q, heads) : read_separate(q, k, v, out, heads)};
  read_rest(task, scale, mask, mask_diagonal);
  need((is(pre, {0, 0}) || is(pre, {heads, heads})) && is(post, {heads, heads}), "a mix must be (heads, heads)");
  need(is(post_bias, {heads}), "a mix's bias must be (heads)");
  task.pre = pre.element_count() ? floats(pre) : nullptr;
  task.post = floats(post), task.post_bias = floats(post_bias);
  if (norm_scale.element_count()) {
    need(is(norm_scale, {heads}) && is(norm_bias, {heads}), "a norm over the heads has (heads) of each");
    task.norm_scale = floats(norm_scale), task.norm_bias = floats(norm_bias), task.epsilon = epsilon;
  }
  const Views given = mixed_views(task, q.untyped_data(), k.untyped_data(), v.untyped_data(), element(q), is_packed);
  task.q = given.q, task.k = given.k, task.v = given.v;
  return task;
}

ffi::Error mixed_forward(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                         ffi::AnyBuffer scale, ffi::AnyBuffer mask, ffi::AnyBuffer pre, ffi::AnyBuffer post,
                         ffi::AnyBuffer post_bias, ffi::AnyBuffer norm_scale, ffi::AnyBuffer norm_bias,
                         ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse, bool mask_diagonal,
                         float epsilon) {
  return guarded([&] {
    Mixed task = read_mixed(q, k, v, scale, mask, pre, post, post_bias, norm_scale, norm_bias, *out, mask_diagonal,
                            epsilon);
    need(is(*out, {task.batch, task.n, task.heads * task.e}) && out->element_type() == q.element_type(),
         "out must be (batch, n, heads * e)");
    task.lse = sized(lse, {task.batch, task.heads, task.n});
    task.out = separate(task, out->untyped_data(), task.n, task.e);
    const Kernels& kernels = kernels_for(q);
    // Queries are only split if there are fewer images than threads, since each part packs all keys and values.
    const int64_t parts = std::min(task.n, count(pool.num_threads(), std::max<int64_t>(1, task.batch)));
    const int64_t tasks = task.batch * parts, size = Floats::aligned(kernels.mixed_forward_scratch(task));
    const Floats scratch(size * workers(pool, tasks));
    share_out(pool, tasks, [&](int64_t index, int64_t worker) {
      const int64_t part = index % parts;
      kernels.mixed_forward(task, index / parts, task.n * part / parts, task.n * (part + 1) / parts,
                            scratch.data() + worker * size);
    });
  });
}

ffi::Error mixed_backward(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                          ffi::AnyBuffer scale, ffi::AnyBuffer mask, ffi::AnyBuffer pre, ffi::AnyBuffer post,
                          ffi::AnyBuffer post_bias, ffi::AnyBuffer norm_scale, ffi::AnyBuffer norm_bias,
                          ffi::AnyBuffer lse, ffi::AnyBuffer dout,
                          ffi::Result<ffi::AnyBuffer> dq, ffi::Result<ffi::AnyBuffer> dk,
                          ffi::Result<ffi::AnyBuffer> dv, ffi::Result<ffi::AnyBuffer> dscale,
                          ffi::Result<ffi::AnyBuffer> dpre, ffi::Result<ffi::AnyBuffer> dpost,
                          ffi::Result<ffi::AnyBuffer> dpost_bias, ffi::Result<ffi::AnyBuffer> dnorm_scale,
                          ffi::Result<ffi::AnyBuffer> dnorm_bias, bool mask_diagonal, float epsilon) {
  return guarded([&] {
    Mixed task = read_mixed(q, k, v, scale, mask, pre, post, post_bias, norm_scale, norm_bias, dout, mask_diagonal,
                            epsilon);
    need(is(dout, {task.batch, task.n, task.heads * task.e}) && dout.element_type() == q.element_type(),
         "dout must be (batch, n, heads * e)");
    need(is(lse, {task.batch, task.heads, task.n}), "lse must be (batch, heads, n)");
    task.lse = const_cast<float*>(floats(lse));
    task.dscale = sized(dscale, {task.batch, task.heads});
    const int64_t mixed = task.pre ? task.heads : 0, normed = task.norm_scale ? task.heads : 0;
    task.dpre = sized(dpre, {task.batch, mixed, mixed});
    task.dpost = sized(dpost, {task.batch, task.heads, task.heads});
    task.dpost_bias = sized(dpost_bias, {task.batch, task.heads});
    task.dnorm_scale = sized(dnorm_scale, {task.batch, normed});
    task.dnorm_bias = sized(dnorm_bias, {task.batch, normed});
    task.dout = separate(task, dout.untyped_data(), task.n, task.e);
    void *gradient = same(dq, q), *of_k = same(dk, k), *of_v = same(dv, v);
    const Views back = mixed_views(task, gradient, of_k, of_v, element(q), !k.element_count());
    task.dq = back.q, task.dk = back.k, task.dv = back.v;
    const Kernels& kernels = kernels_for(q);
    const int64_t size = Floats::aligned(kernels.mixed_backward_scratch(task));
    const Floats scratch(size * workers(pool, task.batch));
    share_out(pool, task.batch, [&](int64_t b, int64_t worker) {
      kernels.mixed_backward(task, b, scratch.data() + worker * size);
    });
  });
}

}  // namespace
}  // namespace smallvit
