"""Milliseconds of each native kernel and of the pure JAX that it stands for.

    python -m smallvit.kernels.build
    python -m benchmarks.kernels [--only attention]

The two sides alternate within one process, call by call, and each keeps its best call, because the clock of a shared
machine wanders; the ratio is what counts. CPU milliseconds are the mean of all calls, summed over the threads: they
hold on a busy machine too. Both are jitted functions of arrays that are already there; "with backward" is a
forward and all gradients.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

from smallvit.common.env import restart_fast

restart_fast()

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import smallvit
from smallvit import kernels
from smallvit.layers import LayerNorm
from smallvit.ops import attend, batch_norm, convolve, max_pool, multiply
from smallvit.ops.attention import Mix, attend_mixed
from smallvit.training.optimiser import optimiser
from smallvit.training.recipe import RECIPES

SECONDS = 2.0  # of each comparison


def compare(name: str, what: str, **sides: Callable[[], object]) -> None:
    """Prints a row: each side's best call, and what a call costs on all cores together."""
    for side in sides.values():
        jax.block_until_ready(side())
    wall, cpu, calls = dict.fromkeys(sides, float("inf")), dict.fromkeys(sides, 0.0), 0
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        calls += 1
        for key, side in sides.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(side())
            wall[key] = min(wall[key], (time.perf_counter() - start) * 1000)
            cpu[key] += (time.process_time() - start_cpu) * 1000
    kernel, pure = sides
    print(
        f"| {name} | {what} | {wall[kernel]:.2f} | {wall[pure]:.2f} | {wall[pure] / wall[kernel]:.1f} "
        f"| {cpu[kernel] / calls:.2f} | {cpu[pure] / calls:.2f} | {cpu[pure] / cpu[kernel]:.1f} |",
        flush=True,
    )


def row(name: str, ours: Callable, pure: Callable, args: tuple, differentiate: int) -> None:
    """Prints forward, and forward with the gradients of the first arguments."""

    def with_backward(f: Callable) -> Callable:
        def run(*args):
            out, back = jax.vjp(lambda *first: f(*first, *args[differentiate:]), *args[:differentiate])
            return out, back(out)

        return jax.jit(run)

    for what, change in (("forward", jax.jit), ("with backward", with_backward)):
        kernel, plain = change(ours), change(pure)
        compare(name, what, kernel=lambda f=kernel: f(*args), pure=lambda f=plain: f(*args))


def attention(
    name: str,
    dtype: DTypeLike,
    *,
    batch: int,
    windows: int = 1,
    tokens: int,
    heads: int,
    width: int,
    lsa: bool = False,
    window: bool = False,
) -> None:
    draw = np.random.default_rng(0)
    lead = (batch, windows) if window else (batch,)
    qkv = jnp.asarray(draw.normal(size=(*lead, tokens, 3 * heads * width)), dtype)
    scale = jnp.full(heads, width**-0.5, jnp.float32)
    allowed = (draw.random((windows, 1, tokens, tokens)) < 0.5) | np.eye(tokens, dtype=bool) if window else None
    bias = (jnp.asarray(draw.normal(size=(heads, tokens, tokens)), jnp.float32),) if window else ()

    def packed(qkv, scale, *bias):
        return attend(qkv, None, None, scale, *(bias or (None,)), allowed, heads=heads, mask_diagonal=lsa)

    def separate(qkv, scale, *bias):
        parts = jnp.split(qkv, 3, axis=-1)
        return attend(*parts, scale, *(bias or (None,)), allowed, heads=heads, mask_diagonal=lsa)

    def pure(qkv, scale, *bias):
        with kernels.disabled():
            return packed(qkv, scale, *bias)

    args = (qkv, scale, *bias)
    row(f"attention, packed, {name}", packed, pure, args, len(args))
    row(f"attention, separate, {name}", separate, pure, args, len(args))


def mixed(name: str, dtype: DTypeLike, *, batch: int, tokens: int, heads: int, width: int) -> None:
    draw = np.random.default_rng(0)
    qkv = jnp.asarray(draw.normal(size=(batch, tokens, 3 * heads * width)), dtype)
    scale = jnp.full(heads, width**-0.5, jnp.float32)
    pre, post = (jnp.asarray(draw.normal(size=(heads, heads)), jnp.float32) for _ in range(2))

    def talking(qkv, scale, pre, post):
        return attend_mixed(qkv, None, None, scale, Mix(pre), Mix(post), heads=heads)

    def pure(*args):
        with kernels.disabled():
            return talking(*args)

    row(f"attention, heads talk, {name}", talking, pure, (qkv, scale, pre, post), 4)


def rows(name: str, dtype: DTypeLike, *, tokens: int, dim: int, hidden: int) -> None:
    draw = np.random.default_rng(0)
    x, h = (jnp.asarray(draw.normal(size=(tokens, size)), dtype) for size in (dim, hidden))
    scale, bias, wide = (jnp.asarray(draw.normal(size=size), jnp.float32) for size in (dim, dim, hidden))

    def plain_norm(x, scale, bias):
        with kernels.disabled():
            return LayerNorm(dtype=dtype).apply({"params": {"scale": scale, "bias": bias}}, x)

    row(
        f"LayerNorm, {name}",
        kernels.layer_norm,
        plain_norm,
        (x, scale, bias),
        3,
    )
    row(
        f"bias + GELU, {name}",
        kernels.bias_gelu,
        lambda x, bias: jax.nn.gelu((x.astype(jnp.float32) + bias).astype(dtype), approximate=False),
        (h, wide),
        2,
    )
    gradient = jnp.asarray(draw.normal(size=(tokens, dim)), dtype)

    def product(x, y):
        return jnp.dot(x, y, preferred_element_type=jnp.float32)

    kernel = jax.jit(lambda h, g: product(kernels.transpose(h), g))
    pure = jax.jit(lambda h, g: product(h.T, g))
    compare(
        f"weight gradient, transposed, {name}",
        "forward",
        kernel=lambda: kernel(h, gradient),
        pure=lambda: pure(h, gradient),
    )


def products(name: str, dtype: DTypeLike, *, rows: int, depth: int, columns: int) -> None:
    draw = np.random.default_rng(0)
    x, weights = (jnp.asarray(draw.normal(size=size), dtype) for size in ((rows, depth), (depth, columns)))
    bias = jnp.asarray(draw.normal(size=columns), jnp.float32)
    for gelu in (False, True):
        dense = partial(multiply, gelu=gelu)

        def pure(x, weights, bias, dense=dense):
            with kernels.disabled():
                return dense(x, weights, bias)

        what = "product + bias + GELU" if gelu else "product + bias"
        row(f"{what}, {name}", dense, pure, (x, weights, bias), 3)


def grids(name: str, dtype: DTypeLike, *, images: int, side: int, channels: int) -> None:
    """Max pooling by 2, alone and after BatchNorm, and HybridViT's first convolution, whose gradient has few rows."""
    draw = np.random.default_rng(0)
    shapes = (images, side, side, channels), (images, side, side, 3), (3, 3, 3, channels)
    x, image, weights = (jnp.asarray(draw.normal(size=shape), dtype) for shape in shapes)

    def pool(x):
        return max_pool(x, (2, 2))

    def norm(x, scale, bias):
        return batch_norm(x, scale, bias, None, 1e-5, dtype, relu=True, pool=(2, 2))[0]

    def conv(weights, image):
        return convolve(image, weights, (1, 1), (1, 1))

    def pure(f: Callable) -> Callable:
        def run(*args):
            with kernels.disabled():
                return f(*args)

        return run

    row(f"max pooling, {name}", pool, pure(pool), (x,), 1)
    affine = jnp.ones(channels, jnp.float32), jnp.zeros(channels, jnp.float32)
    row(f"BatchNorm, ReLU, max pooling, {name}", norm, pure(norm), (x, *affine), 3)
    row(f"first convolution, {name}", conv, pure(conv), (weights, image), 1)


def update(name: str) -> None:
    """Clipping, Muon and Adam of the recipe `default`, for all weights of a model."""
    model = smallvit.create_model(name, num_classes=10, image_size=32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))["params"]
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(draw.normal(size=leaf.shape), jnp.float32), shapes)
    transformation = optimiser(RECIPES["default"])
    state = transformation.init(params)

    def pure(params, state):
        with kernels.disabled():
            return transformation.update(params, state)

    kernel, plain = jax.jit(transformation.update), jax.jit(pure)
    compare(f"optimiser, {name}", "update", kernel=lambda: kernel(params, state), pure=lambda: plain(params, state))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows of this name")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="one of the two")
    options = parser.parse_args()
    print(kernels.status())
    print("| | | kernel, ms | pure JAX, ms | ratio | kernel, CPU ms | pure, CPU ms | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for dtype in [options.dtype] if options.dtype else ["float32", "bfloat16"]:
        if options.only in "attention":
            attention(f"SL-ViT, {dtype}", dtype, batch=128, tokens=65, heads=12, width=16, lsa=True)
            attention(f"ViT-Ti/16, {dtype}", dtype, batch=16, tokens=197, heads=3, width=64)
            attention(f"Swin, {dtype}", dtype, batch=8, windows=64, tokens=49, heads=3, width=32, window=True)
            mixed(f"CaiT-XXS, {dtype}", dtype, batch=8, tokens=196, heads=4, width=48)
        if options.only in "rows":
            rows(f"SL-ViT, {dtype}", dtype, tokens=128 * 65, dim=192, hidden=384)
        if options.only in "grids":
            grids(f"HybridViT, {dtype}", dtype, images=64, side=32, channels=32)
        if options.only in "products":
            products(f"SL-ViT, {dtype}", dtype, rows=128 * 65, depth=192, columns=384)
            products(f"Swin, last stage, {dtype}", dtype, rows=8 * 49, depth=768, columns=3072)
    if options.only in "optimiser" and options.dtype != "bfloat16":
        for name in ("hybrid_vit_small", "hybrid_vit_base"):
            update(name)


if __name__ == "__main__":
    main()
