// The instruction sets, and what handlers check of their arguments and results.

#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <initializer_list>
#include <new>
#include <string>
#include <vector>

#include "../kernels.h"
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

// Rows and width of a 2-D array.
void read_rows(const ffi::AnyBuffer& x, int64_t& rows, int64_t& width) {
  need(x.dimensions().size() == 2, "x must be (rows, columns)");
  rows = x.dimensions()[0];
  width = x.dimensions()[1];
}

}  // namespace
}  // namespace smallvit
