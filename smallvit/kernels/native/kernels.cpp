// The kernels, written with the compiler's vector extensions and compiled once per instruction set.
//
// The C++ library is not used: the linker could keep an inline function compiled here for AVX-512 as the only copy for
// the whole program.

#include "attention.h"
#include "convolutions.h"
#include "grid.h"
#include "linear.h"
#include "mixing.h"
#include "pooling.h"
#include "rows.h"
#include "update.h"
#include "winograd.h"

namespace smallvit {
namespace SMALLVIT_ISA {
namespace {

template <class T, class Vector>
constexpr Kernels kernels = {
    padded,
    ROWS,
    WIDE,
    forward_scratch,
    backward_scratch,
    attention_forward<T>,
    attention_backward<T>,
    mixed_forward_scratch,
    mixed_backward_scratch,
    mixed_forward<T>,
    mixed_backward<T>,
    norm_forward<T>,
    norm_backward<T>,
    column_moments<T>,
    batch_forward<T>,
    batch_sums<T>,
    batch_backward<T>,
    gelu_forward<T>,
    gelu_backward<T>,
    transpose<T, Vector>,
    unfold<T>,
    fold_scratch,
    fold<T>,
    max_pool<T>,
    max_pool_gradient<T>,
    batch_pool_forward<T>,
    batch_pool_sums<T>,
    batch_pool_backward<T>,
    dense_scratch<T>,
    dense_gradient_scratch,
    dense<T>,
    dense_gradient<T>,
    conv_packed<T>,
    conv_pack<T>,
    conv_scratch,
    conv_gradient_scratch,
    conv<T>,
    conv_gradient<T>,
    tiled<T>,
    all_tiles,
    tiled_scratch,
    tiled_conv,
    tiled_gradient,
    depthwise<T>,
    depthwise_gradient<T>,
    sum_of_squares,
    weighted_sum,
    adam,
    muon_scratch,
    muon,
};

}  // namespace

extern const InstructionSet set;
const InstructionSet set = {SMALLVIT_NAME, kernels<float, V>, kernels<Bf16, H>};

}  // namespace SMALLVIT_ISA
}  // namespace smallvit
