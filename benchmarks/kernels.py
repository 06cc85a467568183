"""Milliseconds of each native kernel and of the pure JAX that it stands for.

    python -m smallvit.kernels.build
    python -m benchmarks.kernels [--only attention]

The two sides alternate within one process, and each keeps its best round, because the clock of a shared machine
wanders; the ratio is what counts. Both are jitted functions of arrays that are already there; "with backward" is a
forward and all gradients.
"""

import argparse
import time
from collections.abc import Callable

from smallvit.env import restart_fast

restart_fast()

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from smallvit import kernels
from smallvit.layers.attention import attend, readable, split_heads
from smallvit.layers.dense import LayerNorm

ROUNDS, SECONDS = 7, 0.15  # of each side


def best(sides: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The milliseconds of each side's best round."""
    calls, times = {}, {name: [] for name in sides}
    for name, side in sides.items():
        jax.block_until_ready(side())
        start = time.perf_counter()
        jax.block_until_ready(side())
        calls[name] = max(1, int(SECONDS / (time.perf_counter() - start)))
    for _ in range(ROUNDS):
        for name, side in sides.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                jax.block_until_ready(side())
            times[name].append((time.perf_counter() - start) / calls[name] * 1000)
    return {name: min(measured) for name, measured in times.items()}


def row(name: str, ours: Callable, pure: Callable, args: tuple, differentiate: int) -> None:
    """Prints forward, and forward with the gradients of the first arguments."""

    def with_backward(f: Callable) -> Callable:
        def run(*args):
            out, back = jax.vjp(lambda *first: f(*first, *args[differentiate:]), *args[:differentiate])
            return out, back(out)

        return jax.jit(run)

    for what, change in (("forward", jax.jit), ("with backward", with_backward)):
        sides = {"kernel": change(ours), "pure": change(pure)}
        ms = best({name: lambda f=f: f(*args) for name, f in sides.items()})
        print(
            f"| {name} | {what} | {ms['kernel']:.2f} | {ms['pure']:.2f} | {ms['pure'] / ms['kernel']:.1f} |", flush=True
        )


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
    keep = readable(tokens, tokens, allowed, mask_diagonal=lsa)
    keep = None if keep is None else keep.reshape((1,) * (len(lead) + 3 - keep.ndim) + keep.shape)
    bias = (jnp.asarray(draw.normal(size=(heads, tokens, tokens)), jnp.float32),) if window else ()

    def packed(qkv, scale, *bias):
        return kernels.attend_packed(qkv, scale, *(bias or (None,)), allowed, heads=heads, mask_diagonal=lsa)

    def separate(qkv, scale, *bias):
        q, k, v = split_heads(qkv, heads, 3)
        out = kernels.attend(q, k, v, scale, *(bias or (None,)), allowed, mask_diagonal=lsa)
        return jnp.moveaxis(out, -3, -2).reshape(*lead, tokens, heads * width)

    def pure(qkv, scale, *bias):
        q, k, v = split_heads(qkv, heads, 3)
        q = q * scale[:, None, None].astype(dtype)
        out = attend(q, k, v, bias[0].reshape((1,) * len(lead) + bias[0].shape) if bias else None, keep)
        return jnp.moveaxis(out, -3, -2).reshape(*lead, tokens, heads * width)

    args = (qkv, scale, *bias)
    row(f"attention, packed, {name}", packed, pure, args, len(args))
    row(f"attention, separate, {name}", separate, pure, args, len(args))


def rows(name: str, dtype: DTypeLike, *, tokens: int, dim: int, hidden: int) -> None:
    draw = np.random.default_rng(0)
    x, h = (jnp.asarray(draw.normal(size=(tokens, size)), dtype) for size in (dim, hidden))
    scale, bias, wide = (jnp.asarray(draw.normal(size=size), jnp.float32) for size in (dim, dim, hidden))
    norm = LayerNorm(dtype=dtype)
    row(
        f"LayerNorm, {name}",
        kernels.layer_norm,
        lambda x, scale, bias: norm.apply({"params": {"scale": scale, "bias": bias}}, x),
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

    sides = {
        "kernel": jax.jit(lambda h, g: product(kernels.transpose(h), g)),
        "pure": jax.jit(lambda h, g: product(h.T, g)),
    }
    ms = best({name: lambda f=f: f(h, gradient) for name, f in sides.items()})
    ratio = ms["pure"] / ms["kernel"]
    print(f"| weight gradient, transposed, {name} | forward | {ms['kernel']:.2f} | {ms['pure']:.2f} | {ratio:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows of this name")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="one of the two")
    options = parser.parse_args()
    print(kernels.status())
    print("| kernel | | kernel, ms | pure JAX, ms | ratio |\n|---|---|---|---|---|")
    for dtype in [options.dtype] if options.dtype else ["float32", "bfloat16"]:
        if options.only in "attention":
            attention(f"SL-ViT, {dtype}", dtype, batch=128, tokens=65, heads=12, width=16, lsa=True)
            attention(f"ViT-Ti/16, {dtype}", dtype, batch=16, tokens=197, heads=3, width=64)
            attention(f"Swin, {dtype}", dtype, batch=8, windows=64, tokens=49, heads=3, width=32, window=True)
        if options.only in "rows":
            rows(f"SL-ViT, {dtype}", dtype, tokens=128 * 65, dim=192, hidden=384)


if __name__ == "__main__":
    main()
