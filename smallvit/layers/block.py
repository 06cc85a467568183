"""The transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, reduce

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from smallvit.layers.basic import Dense, Factory, LayerNorm
from smallvit.ops import align, recompute
from smallvit.ops.remat import is_recomputing, recompute_later


class MLP(nn.Module):
    """Dense, exact GELU, Dense, each followed by dropout."""

    hidden: int
    dropout: float = 0.0
    dense: Factory = Dense

    @nn.compact
    def __call__(self, x: Float[Array, "*lead d"], *, train: bool = False) -> Float[Array, "*lead d"]:
        drop = partial(nn.Dropout, self.dropout, deterministic=not train)
        dim = x.shape[-1]
        x = self.dense(self.hidden, gelu=True, name="in")(x)
        x = self.dense(dim, name="out")(drop(name="dropout_in")(x))
        return drop(name="dropout_out")(x)


_first_tokens = jax.make_user_context(None)


@contextmanager
def first_tokens(number: int | None) -> Iterator[None]:
    """Within this context, the last block of a traced model outputs only its first `number` tokens.

    They still attend to all tokens, so their values do not change.
    """
    with _first_tokens(number):
        yield


class LayerScale(nn.Module):
    """A learned factor per channel, small at initialisation (https://arxiv.org/abs/2103.17239)."""

    start: float

    @nn.compact
    def __call__(self, x: Float[Array, "*lead d"]) -> Float[Array, "*lead d"]:
        scale = self.param("scale", nn.initializers.constant(self.start), x.shape[-1:])
        return x * align(scale, x).astype(x.dtype)


class DropPath(nn.Module):
    """Stochastic depth: skips a residual branch for some images, and rescales the others by 1 / keep."""

    rate: float

    @nn.compact
    def __call__(self, x: Float[Array, "b *rest"], *, train: bool = False) -> Float[Array, "b *rest"]:
        whole_image = tuple(range(1, x.ndim))
        return nn.Dropout(self.rate, broadcast_dims=whole_image, deterministic=not train, name="dropout")(x)


def ramp(rate: float, depth: int) -> list[float]:
    """Rates of stochastic depth that grow linearly from 0 in the first block to `rate` in the last."""
    return [rate * i / max(depth - 1, 1) for i in range(depth)]


class Block(nn.Module):
    """A pre-norm residual block of attention and MLP; with `branches`, that many of each in parallel, summed.

    Tokens may be a sequence `b n d` or a grid `b h w d`. With a `context`, the tokens attend to themselves and the
    context, as a class token does to [cls; patches].
    """

    attention: Factory
    mlp: Factory | None  # None: only attention
    norm: Factory | None = LayerNorm  # None for papers whose branches normalise themselves
    branches: int = 1
    layer_scale: float | None = None
    drop_path: float = 0.0
    last: bool = False  # last block of a model on a sequence: skips tokens that are not used after it (`first_tokens`)

    @nn.compact
    def __call__(
        self, x: Float[Array, "b *rest d"], context: Float[Array, "b m d"] | None = None, *, train: bool = False
    ) -> Float[Array, "b *some d"]:
        first = _first_tokens.value if self.last else None
        if train and is_recomputing() and not self.is_initializing() and set(self.variables) == {"params"}:
            key = self.make_rng("dropout") if self.has_rng("dropout") else None
            run = partial(_run_block, self.clone(parent=None, name=None), first)
            return recompute_later(run, self.variables["params"], x, context, key)
        added = self._branches(x, "attention", self.attention, context, first, train)
        x = (x if first is None else x[:, :first]) + added
        return x if self.mlp is None else x + self._branches(x, "mlp", self.mlp, None, None, train)

    def _branches(
        self, x: Array, part: str, make: Factory, context: Array | None, first: int | None, train: bool
    ) -> Array:
        names = [part] if self.branches == 1 else [f"{part}_{i}" for i in range(self.branches)]
        return reduce(jnp.add, [self._branch(name, make, x, context, first, train) for name in names])

    def _branch(
        self, name: str, make: Factory, x: Array, context: Array | None, first: int | None, train: bool
    ) -> Array:
        norm = self.norm(name=f"{name}_norm") if self.norm is not None else lambda x: x
        if context is None:
            few = {} if first is None else {"first": first}
            x = make(name=name)(norm(x), **few, train=train)
        else:
            read = norm(jnp.concatenate([x, context], axis=1))
            x = make(name=name)(read[:, : x.shape[1]], read, train=train)
        if self.layer_scale is not None:
            x = LayerScale(self.layer_scale, name=f"{name}_scale")(x)
        return DropPath(self.drop_path, name=f"{name}_drop")(x, train=train)


def _run_block(
    block: Block, first: int | None, params: PyTree, x: Array, context: Array | None, key: PRNGKeyArray | None
) -> Array:
    with recompute(False), first_tokens(first):
        rngs = {} if key is None else {"dropout": key}
        return jnp.asarray(block.apply({"params": params}, x, context, train=True, rngs=rngs))


class Stage(nn.Module):
    """A sequence of blocks on one grid."""

    blocks: tuple[Factory, ...]
    peg: Factory | None = None  # for papers with a PEG after the first block

    @nn.compact
    def __call__(self, x: Float[Array, "b *rest d"], *, train: bool = False) -> Float[Array, "b *some d"]:
        for i, block in enumerate(self.blocks):
            x = block(name=f"block_{i}")(x, train=train)
            if i == 0 and self.peg is not None:
                x = self.peg(name="peg")(x)
        return x
