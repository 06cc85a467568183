"""The common interface of all architectures: from an image to tokens, a pooled vector and logits."""

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from smallvit.layers.basic import Dense, normal_or_xavier
from smallvit.layers.block import first_tokens
from smallvit.layers.pool import Pool, check_pool, pool_tokens
from smallvit.ops.size import Images


class Classifier(nn.Module, kw_only=True):
    """Base class; an architecture implements `features`. With `num_classes=0` it returns the pooled features."""

    num_classes: int
    pool: Pool = "mean"
    head_std: float | None = 0.02  # at initialisation: small, so that all classes start equally likely; None is Xavier
    dtype: DTypeLike = jnp.float32  # of the computation; parameters are float32

    def setup(self) -> None:
        check_pool(self.pool)
        if self.pool == "cls" and type(self).pool != "cls":
            raise ValueError(f"pool='cls', but {type(self).__name__} has no class token: leave it at 'mean'")
        if self.num_classes < 0:
            raise ValueError(f"num_classes={self.num_classes} must be positive, or 0 for features without a head")
        self.head = self.make_head() if self.num_classes else None

    def make_head(self) -> nn.Module:
        return Dense(self.num_classes, dtype=self.dtype, kernel_init=normal_or_xavier(self.head_std))

    def __call__(self, image: Images, *, train: bool = False) -> Float[Array, "b k"]:
        class_alone = self.pool == "cls" and not self.is_mutable_collection("intermediates")
        with first_tokens(1 if class_alone else None):
            tokens = self.features(image, train=train)
        x = self.pooled(tokens, train=train)
        return x if self.head is None else self.head(x)

    def features(self, image: Images, *, train: bool = False) -> Float[Array, "b n d"]:
        """The normalised tokens before the head, with the class token first if there is one."""
        raise NotImplementedError

    def pooled(self, tokens: Float[Array, "b n d"], *, train: bool = False) -> Float[Array, "b k"]:
        """One vector per image, the input of the head."""
        return pool_tokens(tokens, self.pool)
