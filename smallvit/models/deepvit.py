"""DeepViT (https://arxiv.org/abs/2103.11886): maps of deep layers become alike, so heads remix them ("re-attention").

After the softmax, each head's map becomes a learned mix of all heads' maps, normalised over the heads.
"""

from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from smallvit.layers import Attend, Factory, HeadMix, LayerNorm
from smallvit.models.vit import ViT
from smallvit.ops import patch_of
from smallvit.registry import register


class DeepViT(ViT, kw_only=True):
    def _attend(self) -> Factory:
        return partial(Attend, lsa=self.lsa, post=ReAttention)


class ReAttention(nn.Module):
    """Norm(mix(maps)). The paper does not specify the norm; a LayerNorm over the heads keeps images independent."""

    @nn.compact
    def __call__(self, maps: Float[Array, "*lead h n m"]) -> Float[Array, "*lead h n m"]:
        maps = HeadMix(use_bias=False, name="mix")(maps)
        norm = LayerNorm(epsilon=1e-5, dtype=maps.dtype, name="norm")
        return jnp.moveaxis(norm(jnp.moveaxis(maps, -3, -1)), -1, -3)


register(
    DeepViT,
    # The paper's 16 blocks of 384 channels, 24.5 M parameters, with re-attention in each, but without the convolutional
    # stem of its ImageNet models.
    deepvit_s=dict(image_size=224, patch_size=16, dim=384, depth=16, heads=12, mlp_dim=1152, dim_head=None),
    # Trains in minutes on a CPU.
    deepvit_tiny_data=dict(
        image_size=32, patch_size=patch_of(8), dim=128, depth=4, heads=4, mlp_dim=256, dim_head=None
    ),
)
