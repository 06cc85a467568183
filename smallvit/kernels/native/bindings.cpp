// The kernels as XLA custom calls. The handlers check shapes and distribute the work over XLA's own threads.

#include <cstring>

#include "handlers/attention.h"
#include "handlers/convolutions.h"
#include "handlers/grid.h"
#include "handlers/linear.h"
#include "handlers/mixing.h"
#include "handlers/pooling.h"
#include "handlers/rows.h"
#include "handlers/update.h"

#define HANDLER(name, function, ...)                                                        \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, smallvit::function, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>() __VA_ARGS__)
#define ARG .Arg<ffi::AnyBuffer>()
#define RET .Ret<ffi::AnyBuffer>()
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
HANDLER(smallvit_max_pool, max_pool, ARG RET PAIR("stride"));
HANDLER(smallvit_max_pool_gradient, max_pool_gradient, ARG ARG RET PAIR("stride"));
HANDLER(smallvit_batch_pool_forward, batch_pool_forward,
        ARG ARG ARG ARG ARG RET PAIR("stride").Attr<float>("epsilon").Attr<bool>("relu"));
HANDLER(smallvit_batch_pool_sums, batch_pool_sums,
        ARG ARG ARG ARG ARG ARG RET RET PAIR("stride").Attr<float>("epsilon").Attr<bool>("relu"));
HANDLER(smallvit_batch_pool_backward, batch_pool_backward,
        ARG ARG ARG ARG ARG ARG ARG ARG RET PAIR("stride").Attr<float>("epsilon").Attr<bool>("relu")
            .Attr<int64_t>("rows"));
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
