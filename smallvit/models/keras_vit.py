"""The ViT of the Keras example for small data sets (https://keras.io/examples/vision/vit_small_ds/).

Its quirks are kept, since trained weights depend on them: GELU after both layers of the MLP, one temperature per layer,
no class token, and a large MLP over all flattened tokens before the head.
"""

from functools import partial

import flax.linen as nn
from jaxtyping import Array, Float

from smallvit.layers import (
    Attend,
    Attention,
    Block,
    Classifier,
    Dense,
    Factory,
    LayerNorm,
    LSAOption,
    PositionEmbed,
    patch_embed,
)
from smallvit.ops import (
    Images,
    Size,
    SPTOption,
    check_image,
    exact_gelu,
    grid_size,
)
from smallvit.registry import register


class KerasViT(Classifier, kw_only=True):
    image_size: Size
    patch_size: Size
    dim: int
    depth: int
    heads: int
    dim_head: int
    mlp_dim: int
    head_dims: tuple[int, ...] = (2048, 1024)
    dropout: float = 0.0
    head_dropout: float = 0.0
    drop_path: float = 0.0  # the same rate in every block
    spt: SPTOption = False
    spt_shift: Size | None = None
    lsa: LSAOption = False

    def setup(self) -> None:
        super().setup()
        self.head_drop = nn.Dropout(self.head_dropout)
        self.head_mlp = GeluStack(self.head_dims, self.head_dropout, partial(Dense, dtype=self.dtype))

    @nn.compact
    def features(self, image: Images, *, train: bool = False) -> Float[Array, "b n d"]:
        image = check_image(image, self.image_size, self.dtype)
        norm = partial(LayerNorm, epsilon=1e-6, dtype=self.dtype)
        dense = partial(Dense, dtype=self.dtype)
        attention = partial(
            Attention,
            heads=self.heads,
            dim_head=self.dim_head,
            qkv_bias=True,
            dropout=self.dropout,
            out_dropout=0.0,
            dense=dense,
            attend=partial(Attend, lsa=self.lsa, shared_temperature=True),
        )
        mlp = partial(GeluStack, (self.mlp_dim, self.dim), self.dropout, dense)

        x = patch_embed(self.dim, self.patch_size, spt=self.spt, shift=self.spt_shift, dense=dense, norm=norm)(image)
        x = PositionEmbed(grid_size(self.image_size, self.patch_size), name="positions")(x)
        for i in range(self.depth):
            x = Block(attention, mlp, norm, drop_path=self.drop_path, name=f"block_{i}")(x, train=train)
        return norm(name="norm")(x)

    def pooled(self, tokens: Float[Array, "b n d"], *, train: bool = False) -> Float[Array, "b k"]:
        x = self.head_drop(tokens.reshape(tokens.shape[0], -1), deterministic=not train)
        return self.head_mlp(x, train=train)


class GeluStack(nn.Module):
    """Dense layers, each followed by exact GELU and dropout, including the last."""

    widths: tuple[int, ...]
    dropout: float = 0.0
    dense: Factory = Dense

    @nn.compact
    def __call__(self, x: Float[Array, "*lead d"], *, train: bool = False) -> Float[Array, "*lead k"]:
        for i, width in enumerate(self.widths):
            x = exact_gelu(self.dense(width, name=f"dense_{i}")(x))
            x = nn.Dropout(self.dropout, deterministic=not train, name=f"dropout_{i}")(x)
        return x


register(
    KerasViT,
    keras_vit_small_ds=dict(
        image_size=72,
        patch_size=6,
        dim=64,
        depth=8,
        heads=4,
        dim_head=64,
        mlp_dim=128,
        dropout=0.1,
        head_dropout=0.5,
    ),
)
