"""DeepViT (https://arxiv.org/abs/2103.11886): maps of deep layers become alike, so heads remix them ("re-attention").

After the softmax, each head's map becomes a learned mix of all heads' maps, normalised over the heads.
"""

from functools import partial

import flax.linen as nn

from smallvit.layers import Attend, Factory, HeadMix
from smallvit.models.vit import ViT
from smallvit.ops import patch_of
from smallvit.ops.attention import HeadNorm, Mix
from smallvit.registry import register


class DeepViT(ViT, kw_only=True):
    def _attend(self) -> Factory:
        return partial(Attend, lsa=self.lsa, post=ReAttention)


class ReAttention(HeadMix):
    """Norm(mix(maps)). The paper does not specify the norm; a LayerNorm over the heads keeps images independent."""

    @nn.compact
    def weights(self, heads: int) -> Mix:
        mix = HeadMix(use_bias=False, name="mix").weights(heads)
        return mix._replace(norm=NormOverHeads(name="norm")(heads))


class NormOverHeads(nn.Module):
    @nn.compact
    def __call__(self, heads: int) -> HeadNorm:
        scale = self.param("scale", nn.initializers.ones, (heads,))
        return HeadNorm(scale, self.param("bias", nn.initializers.zeros, (heads,)), epsilon=1e-5)


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
