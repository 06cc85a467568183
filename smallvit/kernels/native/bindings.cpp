// The kernels as XLA custom calls: checks shapes and distributes the work over XLA's own threads.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace smallvit {

#if defined(__x86_64__)
namespace avx512 { extern const InstructionSet set; }
namespace avx2 { extern const InstructionSet set; }
#endif
namespace portable { extern const InstructionSet set; }

namespace {

// The instruction sets of this CPU, best first.
std::vector<const InstructionSet*> available() {
  std::vector<const InstructionSet*> sets;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    sets.push_back(&avx512::set);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sets.push_back(&avx2::set);
#endif
  sets.push_back(&portable::set);
  return sets;
}

std::atomic<const InstructionSet*> chosen{available().front()};

using Shape = ffi::Span<const int64_t>;

struct Wrong : std::exception {
  std::string message;
  explicit Wrong(std::string message) : message(std::move(message)) {}
};

void need(bool condition, const char* message) {
  if (!condition) throw Wrong(message);
}

bool is(const ffi::AnyBuffer& x, std::initializer_list<int64_t> shape) {
  const Shape dimensions = x.dimensions();
  return dimensions.size() == shape.size() && std::equal(shape.begin(), shape.end(), dimensions.begin());
}

bool is_float32(const ffi::AnyBuffer& x) { return x.element_type() == ffi::DataType::F32; }

const Kernels& kernels_for(const ffi::AnyBuffer& x) {
  const InstructionSet& set = *chosen.load();
  if (is_float32(x)) return set.float32;
  need(x.element_type() == ffi::DataType::BF16, "arrays must be float32 or bfloat16");
  return set.bfloat16;
}

const float* floats(const ffi::AnyBuffer& x) {
  need(is_float32(x), "parameters must be float32");
  return static_cast<const float*>(x.untyped_data());
}

// Turns exceptions into errors: an exception must not unwind through XLA.
template <class F>
ffi::Error guarded(F&& run) {
  try {
    run();
    return ffi::Error::Success();
  } catch (const Wrong& wrong) {
    return ffi::Error::InvalidArgument("smallvit: " + wrong.message);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "smallvit: no memory for scratch space");
  } catch (const std::exception& other) {
    return ffi::Error::Internal(std::string("smallvit: ") + other.what());
  }
}

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

float* sized(ffi::Result<ffi::AnyBuffer>& x, std::initializer_list<int64_t> shape) {
  need(is(*x, shape) && is_float32(*x), "a float32 result has the wrong shape");
  return static_cast<float*>(x->untyped_data());
}

// A result with the shape and type of `like`.
void* same(ffi::Result<ffi::AnyBuffer>& x, const ffi::AnyBuffer& like) {
  const Shape a = x->dimensions(), b = like.dimensions();
  need(a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin()) && x->element_type() == like.element_type(),
       "a result differs in shape or type from its array");
  return x->untyped_data();
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

// Rows and width of a 2-D array.
void read_rows(const ffi::AnyBuffer& x, int64_t& rows, int64_t& width) {
  need(x.dimensions().size() == 2, "x must be (rows, columns)");
  rows = x.dimensions()[0];
  width = x.dimensions()[1];
}

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

// The mean of each column, and its variance.
ffi::Error column_moments(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> result) {
  return guarded([&] {
    BatchNorm task = read_batch_norm(x);
    const Kernels& kernels = kernels_for(x);
    float *const mean = sized(result, {2, task.d}), *const var = mean + task.d;
    const auto average = [&](auto add, float* out) {
      sum_over_rows(pool, task.rows, task.d, {out},
                    [&](int64_t from, int64_t to, float* sums) { add(task, from, to, sums); });
      divide(out, task.d, task.rows);
    };
    average(kernels.column_sums, mean);
    task.mean = mean;
    average(kernels.column_squares, var);
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
    std::copy_n(per_column(dbias, task), task.d, means.data());
    std::copy_n(per_column(dscale, task), task.d, means.data() + task.d);
    divide(means.data(), 2 * task.d, rows);
    task.g_mean = means.data(), task.gy_mean = means.data() + task.d;
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

// The size of one part of `size`: whole units, at most about `most`, chosen so that threads share all parts evenly.
// There are `others` times as many parts in total, since the other axis is split, too.
int64_t even_step(int64_t size, int64_t unit, int64_t most, int64_t threads, int64_t others = 1) {
  const int64_t fewest = std::max<int64_t>(1, count(size, most)), last = std::max(fewest, size / (2 * unit));
  int64_t best = 0, least = INT64_MAX;
  for (int64_t parts = fewest; parts <= std::min(last, 2 * fewest + threads); parts++) {
    const int64_t step = count(count(size, parts), unit) * unit;
    const int64_t longest = count(count(size, step) * others, threads) * step;  // work of one thread
    if (longest < least) best = step, least = longest;
  }
  return best;
}

// Distributes a task whose shapes and arrays are set.
void run_dense(ffi::ThreadPool& pool, const Dense& task, const Kernels& kernels, bool is_float32) {
  constexpr int64_t FITS = 1 << 16, WIDEST = 192, TALLEST = 1024;  // number of weights, columns, rows
  const int64_t threads = pool.num_threads(), parts = is_float32 ? count(task.depth, DEEPEST) : 1;
  const int64_t deep = count(task.depth, parts);  // the depth is split, except for bfloat16
  const int64_t most = std::clamp(FITS / deep, kernels.width, WIDEST);
  const int64_t width = even_step(task.columns, kernels.width, most, 1), across = count(task.columns, width);
  const int64_t height = even_step(task.rows, kernels.height, TALLEST, threads, across);
  const int64_t tasks = count(task.rows, height) * across;
  const int64_t size = Floats::aligned(kernels.dense_scratch(task, width));
  const Floats scratch(size * workers(pool, tasks));
  share_out(pool, tasks, [&](int64_t part, int64_t worker) {
    const int64_t top = part / across * height, left = part % across * width;
    kernels.dense(task, top, std::min(task.rows, top + height), left, std::min(task.columns, left + width),
                  scratch.data() + worker * size);
  });
}

void run_dense_gradient(ffi::ThreadPool& pool, const DenseGradient& task, const Kernels& kernels) {
  // Tiles of the result. Each sums over all rows, in the same order for any choice of tiles.
  constexpr int64_t TALLEST = 192, WIDEST = 288;
  const int64_t threads = pool.num_threads();
  int64_t height = std::min(task.rows, TALLEST);
  const int64_t width = even_step(task.columns, kernels.width, WIDEST, threads, count(task.rows, height));
  if (count(task.rows, height) * count(task.columns, width) < threads)
    height = even_step(task.rows, kernels.height, TALLEST, threads, count(task.columns, width));
  const int64_t down = count(task.rows, height), across = count(task.columns, width);
  const int64_t size = Floats::aligned(kernels.dense_gradient_scratch(task, height, width));
  const Floats scratch(size * workers(pool, down * across));
  share_out(pool, down * across, [&](int64_t part, int64_t worker) {
    const int64_t top = part / across * height, left = part % across * width;
    kernels.dense_gradient(task, top, std::min(task.rows, top + height), left, std::min(task.columns, left + width),
                           scratch.data() + worker * size);
  });
}

// `plain`: where to store the input of the GELU, or null.
void multiply(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const ffi::AnyBuffer& weights,
              const ffi::AnyBuffer& bias, ffi::AnyBuffer& y, void* plain, bool turned, bool gelu) {
  Dense task;
  read_rows(x, task.rows, task.depth);
  need(weights.dimensions().size() == 2 && weights.dimensions()[turned] == task.depth &&
           weights.element_type() == x.element_type(),
       "the weights must be (width of x, columns) and of its type");
  task.columns = weights.dimensions()[!turned];
  need(is(y, {task.rows, task.columns}) && y.element_type() == x.element_type(), "y must be (rows, columns)");
  need(x.element_count() && weights.element_count(), "x and the weights must not be empty");
  if (bias.element_count()) {
    need(is(bias, {task.columns}), "bias must have a number for each column");
    task.bias = floats(bias);
  }
  task.a = x.untyped_data();
  task.b = weights.untyped_data();
  task.c = y.untyped_data();
  task.plain = plain;
  task.turned = turned;
  task.gelu = gelu;
  run_dense(pool, task, kernels_for(x), is_float32(x));
}

ffi::Error dense(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weights, ffi::AnyBuffer bias,
                 ffi::Result<ffi::AnyBuffer> y, bool turned, bool gelu) {
  return guarded([&] { multiply(pool, x, weights, bias, *y, nullptr, turned, gelu); });
}

ffi::Error dense_gelu(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weights, ffi::AnyBuffer bias,
                      ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> plain) {
  return guarded([&] { multiply(pool, x, weights, bias, *y, same(plain, *y), false, true); });
}

ffi::Error dense_gradient(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer dy,
                          ffi::Result<ffi::AnyBuffer> dweights, ffi::Result<ffi::AnyBuffer> dbias) {
  return guarded([&] {
    DenseGradient task;
    int64_t depth;
    read_rows(x, task.depth, task.rows);
    read_rows(dy, depth, task.columns);
    need(depth == task.depth && dy.element_type() == x.element_type(), "dy must have x's rows and type");
    need(x.element_count() && dy.element_count(), "x and dy must not be empty");
    task.a = x.untyped_data();
    task.b = dy.untyped_data();
    task.c = sized(dweights, {task.rows, task.columns});
    task.sums = sized(dbias, {task.columns});
    run_dense_gradient(pool, task, kernels_for(x));
  });
}

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
    const auto run = tiled ? kernels.tiled_conv : kernels.conv;
    // Few parts, since each packs the weights: two per thread, which balance the load, or one for a small task.
    constexpr int64_t SMALL = 64;  // rows or tiles of a thread
    const int64_t rows = tiled ? kernels.tiles(task) : task.windows.batch * task.windows.rows;
    const int64_t threads = workers(pool, rows), parts = threads == 1 || rows <= SMALL * threads ? threads : 2 * threads;
    const int64_t scratch_size = Floats::aligned(tiled ? kernels.tiled_scratch(task) : kernels.conv_scratch(task));
    const Floats scratch(scratch_size * threads);
    share_out(pool, parts, [&](int64_t part, int64_t worker) {
      run(task, rows * part / parts, rows * (part + 1) / parts, scratch.data() + worker * scratch_size);
    });
  });
}

// The number of parts does not depend on the threads; it is small enough that summing the parts takes little time.
void run_tiled_gradient(ffi::ThreadPool& pool, const Conv& task, const Kernels& kernels) {
  const int64_t size = POINTS * task.windows.channels * task.features, tiles = kernels.tiles(task);
  const int64_t parts = std::min(tiles, std::clamp<int64_t>((1 << 17) / size, 4, 32));
  const int64_t scratch_size = Floats::aligned(kernels.tiled_scratch(task));
  const Floats sums(parts * size), scratch(scratch_size * workers(pool, parts));
  share_out(pool, parts, [&](int64_t part, int64_t worker) {
    float* const points = sums.data() + part * size;
    std::fill_n(points, size, 0.0f);
    kernels.tiled_gradient(task, tiles * part / parts, tiles * (part + 1) / parts, points,
                           scratch.data() + worker * scratch_size);
  });
  const int64_t slices = pool.num_threads();
  share_out(pool, slices, [&](int64_t slice, int64_t) {
    for (int64_t part = 1; part < parts; part++)
      for (int64_t i = size * slice / slices; i < size * (slice + 1) / slices; i++)
        sums.data()[i] += sums.data()[part * size + i];
  });
  kernels.kernel_gradient(task, sums.data());
}

ffi::Error conv_gradient(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer dy,
                         ffi::Result<ffi::AnyBuffer> dweights, Pair size, Pair stride, Pair padding) {
  return guarded([&] {
    Conv task = conv_task(x, dy, size, stride, padding);
    task.dy = dy.untyped_data();
    const int64_t rows = window_size(task.windows);
    task.dkernel = sized(dweights, {task.windows.tall, task.windows.wide, task.windows.channels, task.features});
    const Kernels& kernels = kernels_for(x);
    if (kernels.tiled(task)) return run_tiled_gradient(pool, task, kernels);
    constexpr int64_t UNIT = 48;  // rows: whole blocks of every kind
    const int64_t step = even_step(rows, UNIT, rows, pool.num_threads());
    const int64_t scratch_size = Floats::aligned(kernels.conv_gradient_scratch(task));
    const Floats scratch(scratch_size * workers(pool, count(rows, step)));
    share_out(pool, count(rows, step), [&](int64_t part, int64_t worker) {
      kernels.conv_gradient(task, part * step, std::min(rows, (part + 1) * step),
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

using Any = ffi::AnyBuffer;
using Pool = ffi::ThreadPool;

}  // namespace
}  // namespace smallvit

#define HANDLER(name, function, ...)                                                        \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, smallvit::function, ffi::Ffi::Bind().Ctx<smallvit::Pool>() __VA_ARGS__)
#define ARG .Arg<smallvit::Any>()
#define RET .Ret<smallvit::Any>()
#define LISTS .RemainingArgs().RemainingRets()
#define PAIR(name) .Attr<smallvit::Pair>(name)

HANDLER(smallvit_attention_forward, attention_forward, ARG ARG ARG ARG ARG ARG RET RET.Attr<bool>("mask_diagonal"));
HANDLER(smallvit_attention_backward, attention_backward,
        ARG ARG ARG ARG ARG ARG ARG ARG RET RET RET RET RET.Attr<bool>("mask_diagonal"));
HANDLER(smallvit_packed_forward, packed_forward, ARG ARG ARG ARG RET RET.Attr<bool>("mask_diagonal"));
HANDLER(smallvit_packed_backward, packed_backward, ARG ARG ARG ARG ARG ARG RET RET RET.Attr<bool>("mask_diagonal"));
HANDLER(smallvit_mixed_forward, mixed_forward,
        ARG ARG ARG ARG ARG ARG ARG ARG ARG ARG RET RET.Attr<bool>("mask_diagonal").Attr<float>("epsilon"));
HANDLER(smallvit_mixed_backward, mixed_backward,
        ARG ARG ARG ARG ARG ARG ARG ARG ARG ARG ARG ARG RET RET RET RET RET RET RET RET RET
            .Attr<bool>("mask_diagonal").Attr<float>("epsilon"));
HANDLER(smallvit_norm_forward, norm_forward, ARG ARG ARG RET.Attr<float>("epsilon"));
HANDLER(smallvit_norm_backward, norm_backward, ARG ARG ARG RET RET RET.Attr<float>("epsilon"));
HANDLER(smallvit_column_moments, column_moments, ARG RET);
HANDLER(smallvit_batch_forward, batch_forward,
        ARG ARG ARG ARG ARG ARG RET.Attr<float>("epsilon").Attr<bool>("relu"));
HANDLER(smallvit_batch_sums, batch_sums, ARG ARG ARG ARG ARG RET RET.Attr<float>("epsilon").Attr<bool>("relu"));
HANDLER(smallvit_batch_backward, batch_backward,
        ARG ARG ARG ARG ARG ARG ARG ARG RET RET.Attr<float>("epsilon").Attr<bool>("relu").Attr<int64_t>("rows"));
HANDLER(smallvit_gelu_forward, gelu_forward, ARG ARG RET);
HANDLER(smallvit_gelu_backward, gelu_backward, ARG ARG ARG RET RET);
HANDLER(smallvit_transpose, transpose, ARG RET);
HANDLER(smallvit_unfold, unfold, ARG RET PAIR("size") PAIR("stride") PAIR("padding"));
HANDLER(smallvit_fold, fold, ARG RET PAIR("size") PAIR("stride") PAIR("padding"));
HANDLER(smallvit_dense, dense, ARG ARG ARG RET.Attr<bool>("turned").Attr<bool>("gelu"));
HANDLER(smallvit_dense_gelu, dense_gelu, ARG ARG ARG RET RET);
HANDLER(smallvit_dense_gradient, dense_gradient, ARG ARG RET RET);
HANDLER(smallvit_conv, conv, ARG ARG RET PAIR("size") PAIR("stride") PAIR("padding"));
HANDLER(smallvit_conv_gradient, conv_gradient, ARG ARG RET PAIR("size") PAIR("stride") PAIR("padding"));
HANDLER(smallvit_depthwise, depthwise, ARG ARG RET PAIR("size") PAIR("stride") PAIR("padding"));
HANDLER(smallvit_depthwise_gradient, depthwise_gradient, ARG ARG RET PAIR("size") PAIR("stride") PAIR("padding"));
HANDLER(smallvit_clip, clip, LISTS.Attr<double>("most"));
HANDLER(smallvit_weighted_sums, weighted_sums, ARG ARG LISTS);
HANDLER(smallvit_adam, adam,
        ARG ARG LISTS.Attr<double>("mean_decay").Attr<double>("square_decay").Attr<double>("epsilon")
            .Attr<double>("rate"));
HANDLER(smallvit_muon, muon,
        ARG ARG LISTS.Attr<double>("decay").Attr<double>("epsilon").Attr<double>("rate").Attr<int64_t>("steps")
            .Attr<ffi::Span<const double>>("coefficients"));

// Whether the CPU has bfloat16 instructions.
extern "C" bool smallvit_has_bfloat16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// Selects the named instruction set, or the best one for an empty name; returns its name, or null if the CPU does not
// have it.
extern "C" const char* smallvit_choose(const char* name) {
  for (const smallvit::InstructionSet* set : smallvit::available())
    if (!*name || !std::strcmp(name, set->name)) {
      smallvit::chosen = set;
      return set->name;
    }
  return nullptr;
}
