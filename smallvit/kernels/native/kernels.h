// Arguments of the vectorised kernels, as plain structs, and the function table of an instruction set.
#pragma once

#include <cstdint>

namespace smallvit {

// An array (batch, head, row, column) whose columns are contiguous; strides in elements.
struct View {
  void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;
};

// logits = scale[h] q k' + bias[h] where the mask allows; out = softmax(logits) v.
struct Attention {
  int64_t batch = 0, heads = 0, n = 0, m = 0, d = 0, e = 0;
  View q, k, v, out, dout, dq, dk, dv;
  const float* scale = nullptr;      // (heads)
  const float* bias = nullptr;       // (bias_heads, n, m), or null
  const uint8_t* mask = nullptr;     // (groups, n, m), or null
  int64_t bias_heads = 0, groups = 0;
  bool mask_diagonal = false;        // query i does not attend to key i, unless it is the only key
  float* lse = nullptr;              // (batch, heads, n): log of the sum of each softmax, for the backward pass
  float* dscale = nullptr;           // (batch, heads)
};

// Attention with mixed heads: map g of the logits becomes the sum over h of pre[h][g] times map h; after the softmax
// likewise with `post`, plus post_bias[g]. The mask applies to the mixed logits. There is no other bias. With a norm,
// each position of the maps is then normalised over the heads, times norm_scale[g], plus norm_bias[g].
struct Mixed : Attention {
  const float *pre = nullptr, *post = nullptr;  // (heads, heads); `pre` may be null
  const float* post_bias = nullptr;             // (heads)
  const float *norm_scale = nullptr, *norm_bias = nullptr;  // (heads), or null
  float epsilon = 0;                                        // of the norm
  float *dpre = nullptr, *dpost = nullptr;                  // (batch, heads, heads)
  float* dpost_bias = nullptr;                              // (batch, heads)
  float *dnorm_scale = nullptr, *dnorm_bias = nullptr;      // (batch, heads), or null
};

struct LayerNorm {
  int64_t rows = 0, d = 0;
  float epsilon = 0;
  const void *x = nullptr, *dy = nullptr;
  const float *scale = nullptr, *bias = nullptr;
  void *y = nullptr, *dx = nullptr;
};

// Normalises each column of x over all rows, times scale, plus bias; with `relu`, followed by a ReLU.
struct BatchNorm {
  int64_t rows = 0, d = 0;
  bool relu = false;
  const void *x = nullptr, *dy = nullptr;
  const void* more = nullptr;  // added before the ReLU, such as the shortcut of a residual pair; or null
  const void* out = nullptr;   // the result, for the backward pass of the ReLU; null without it
  const float *mean = nullptr, *scale = nullptr, *bias = nullptr;
  const float *inverse = nullptr;  // 1 / the standard deviation
  const float *g_mean = nullptr, *gy_mean = nullptr;  // of the gradient, and of the gradient times the normalised x
  void *y = nullptr, *dx = nullptr;
  void* dmore = nullptr;  // or null
};

// The maximum of each rectangle of `down` x `across` pixels of x (batch, height, width, channels); the last ones may be
// smaller. `rows` and `columns` are those of the result.
struct Pool {
  int64_t batch = 0, height = 0, width = 0, channels = 0;
  int64_t rows = 0, columns = 0, down = 0, across = 0;
  const void *x = nullptr, *dy = nullptr;
  void *y = nullptr, *dx = nullptr;
};

// BatchNorm, followed by max pooling; of `pool`, only the sizes.
struct PooledNorm : BatchNorm {
  Pool pool;
};

struct Gelu {
  int64_t rows = 0, d = 0;
  const void *x = nullptr, *dy = nullptr;
  const float* bias = nullptr;
  void *y = nullptr, *dx = nullptr;
};

struct Transpose {
  int64_t rows = 0, columns = 0;
  const void* x = nullptr;
  void* y = nullptr;
};

// The unfolded windows of a convolution: `tall` x `wide` pixels of x (batch, height, width, channels) at every step
// down and across, one after the other; zeros outside x.
struct Unfold {
  int64_t batch = 0, height = 0, width = 0, channels = 0;
  int64_t rows = 0, columns = 0;  // of windows
  int64_t tall = 0, wide = 0, down = 0, across = 0, above = 0, before = 0;
  const void* from = nullptr;
  void* to = nullptr;
};

// Depthwise convolution of x (batch, height, width, channels) with kernels (tall, wide, channels) and zero padding.
// `rows` and `columns` are those of the result.
struct Depthwise {
  int64_t batch = 0, height = 0, width = 0, channels = 0;
  int64_t rows = 0, columns = 0;
  int64_t tall = 0, wide = 0, down = 0, across = 0, above = 0, before = 0;
  const void *x = nullptr, *dy = nullptr;
  const float* kernel = nullptr;
  void* y = nullptr;
};

// A convolution: maps each window of x to `features` numbers.
struct Conv {
  Unfold windows;  // of x, given as `from`
  int64_t features = 0;
  const void* kernel = nullptr;  // (tall * wide * channels, features)
  const float* packed = nullptr;  // the kernel as `conv` and `tiled_conv` need it
  void* y = nullptr;              // (batch, rows, columns, features)
  const void* dy = nullptr;
  float* dkernel = nullptr;
};

// Maximum depth of a panel of float32 weights: a few rows of this length stay in the L1 cache.
constexpr int64_t DEEPEST = 768;

// c = a b + bias, with `gelu` followed by GELU; a (rows, depth), b (depth, columns).
struct Dense {
  int64_t rows = 0, depth = 0, columns = 0;
  const void *a = nullptr, *b = nullptr;
  const float* bias = nullptr;  // (columns), or null
  void* c = nullptr;
  void* plain = nullptr;        // a b + bias, or null if not needed
  bool turned = false;          // b is (columns, depth)
  bool gelu = false;
};

// c = a' b, and the column sums of b; a (depth, rows), b (depth, columns).
struct DenseGradient {
  int64_t rows = 0, depth = 0, columns = 0;
  const void *a = nullptr, *b = nullptr;
  float *c = nullptr, *sums = nullptr;
};

// z = a x + b y; without y, z = a x. z may be x or y.
struct WeightedSum {
  const float *x = nullptr, *y = nullptr;
  float* z = nullptr;
  float a = 0, b = 0;
};

// Adam (https://arxiv.org/abs/1412.6980): the running means of the gradient and of its square, and the update. The
// results may be the arguments.
struct Adam {
  const float *gradient = nullptr, *mean = nullptr, *square = nullptr;
  float *update = nullptr, *new_mean = nullptr, *new_square = nullptr;
  float mean_kept = 0, mean_added = 0, square_kept = 0, square_added = 0;
  float mean_correction = 0, square_correction = 0;
  float epsilon = 0, rate = 0;  // the rate is negative
};

// Muon (https://kellerjordan.github.io/posts/muon) for a matrix (inputs, outputs): the momentum, and the update, made
// orthogonal by Newton-Schulz steps with the polynomial first + second x + third x^2. The results may be the arguments.
struct Muon {
  int64_t inputs = 0, outputs = 0, steps = 0;
  const float *gradient = nullptr, *momentum = nullptr;
  float *update = nullptr, *new_momentum = nullptr;
  float kept = 0, added = 0;                        // of the momentum
  float momentum_weight = 0, gradient_weight = 0;  // of Nesterov's momentum
  float first = 0, second = 0, third = 0;
  float epsilon = 0, rate = 0;  // the rate is negative
};

// The functions for one element type. Each computes a part of the whole, so that threads can share the work: attention
// one batch element and head; mixed attention one batch element and, in the forward pass, its queries [from, to); a
// dense layer a tile of the result; Muon a matrix; the others rows [from, to) or, in the update of the weights, which is
// in float32 for every type, elements. Sums over rows are added to the existing values; the gradient of a dense layer
// overwrites them.
struct Kernels {
  int64_t (*padded)(int64_t size);  // rounds up to whole vectors; the row length of dbias (n, m)
  int64_t height, width;            // of the block that a dense layer computes at a time
  // In floats; the scratch must be aligned to 64 bytes.
  int64_t (*forward_scratch)(const Attention&);
  int64_t (*backward_scratch)(const Attention&);
  void (*attention_forward)(const Attention&, int64_t b, int64_t h, float* scratch);
  void (*attention_backward)(const Attention&, int64_t b, int64_t h, float* dbias, float* scratch);
  int64_t (*mixed_forward_scratch)(const Mixed&);
  int64_t (*mixed_backward_scratch)(const Mixed&);
  void (*mixed_forward)(const Mixed&, int64_t b, int64_t from, int64_t to, float* scratch);
  void (*mixed_backward)(const Mixed&, int64_t b, float* scratch);
  void (*norm_forward)(const LayerNorm&, int64_t from, int64_t to);
  void (*norm_backward)(const LayerNorm&, int64_t from, int64_t to, float* dscale, float* dbias);
  void (*column_moments)(const BatchNorm&, int64_t from, int64_t to, float* mean, float* squares);
  void (*batch_forward)(const BatchNorm&, int64_t from, int64_t to);
  void (*batch_sums)(const BatchNorm&, int64_t from, int64_t to, float* g, float* gy);
  void (*batch_backward)(const BatchNorm&, int64_t from, int64_t to);
  void (*gelu_forward)(const Gelu&, int64_t from, int64_t to);
  void (*gelu_backward)(const Gelu&, int64_t from, int64_t to, float* dbias);
  void (*transpose)(const Transpose&, int64_t from, int64_t to);
  void (*unfold)(const Unfold&, int64_t from, int64_t to);
  int64_t (*fold_scratch)(const Unfold&);
  void (*fold)(const Unfold&, int64_t from, int64_t to, float* scratch);
  void (*max_pool)(const Pool&, int64_t from, int64_t to);  // rows of y, counted over all images
  void (*max_pool_gradient)(const Pool&, int64_t from, int64_t to);
  void (*batch_pool_forward)(const PooledNorm&, int64_t from, int64_t to);
  void (*batch_pool_sums)(const PooledNorm&, int64_t from, int64_t to, float* g, float* gy);
  void (*batch_pool_backward)(const PooledNorm&, int64_t from, int64_t to);
  int64_t (*dense_scratch)(const Dense&, int64_t columns);
  int64_t (*dense_gradient_scratch)(const DenseGradient&, int64_t rows, int64_t columns);
  void (*dense)(const Dense&, int64_t top, int64_t bottom, int64_t left, int64_t right, float* scratch);
  void (*dense_gradient)(const DenseGradient&, int64_t top, int64_t bottom, int64_t left, int64_t right,
                         float* scratch);
  int64_t (*conv_packed)(const Conv&);  // in floats
  void (*conv_pack)(const Conv&, int64_t from, int64_t to, float* out);  // channels
  int64_t (*conv_scratch)(const Conv&);
  int64_t (*conv_gradient_scratch)(const Conv&);
  void (*conv)(const Conv&, int64_t from, int64_t to, float* scratch);  // rows of y, counted over all images
  // The contribution of rows [from, to) of y to rows [top, bottom) of dkernel.
  void (*conv_gradient)(const Conv&, int64_t from, int64_t to, int64_t top, int64_t bottom, float* dkernel,
                        float* scratch);
  // Winograd's algorithm, if it supports the convolution: tiles of y, counted over all images. The gradient is the sum
  // of the contributions of all tiles, each (3, 3, channels, features).
  bool (*tiled)(const Conv&);
  int64_t (*tiles)(const Conv&);
  int64_t (*tiled_scratch)(const Conv&);
  void (*tiled_conv)(const Conv&, int64_t from, int64_t to, float* scratch);
  void (*tiled_gradient)(const Conv&, int64_t from, int64_t to, float* dkernel, float* scratch);
  void (*depthwise)(const Depthwise&, int64_t from, int64_t to);
  void (*depthwise_gradient)(const Depthwise&, int64_t from, int64_t to, float* dkernel);  // of images [from, to)
  float (*sum_of_squares)(const float* x, int64_t from, int64_t to);
  void (*weighted_sum)(const WeightedSum&, int64_t from, int64_t to);
  void (*adam)(const Adam&, int64_t from, int64_t to);
  int64_t (*muon_scratch)(const Muon&);
  void (*muon)(const Muon&, float* scratch);
};

struct InstructionSet {
  const char* name;
  Kernels float32, bfloat16;
};

}  // namespace smallvit
