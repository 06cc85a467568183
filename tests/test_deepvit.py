"""Re-attention by hand, and the parameters of the snippet's sizes."""

import jax
import numpy as np

from smallvit import DeepViT
from smallvit.models.deepvit import ReAttention
from tests.test_counts import count


def test_re_attention_by_hand():
    maps = jax.nn.softmax(jax.random.normal(jax.random.key(0), (2, 3, 4, 4)))
    variables = ReAttention().init(jax.random.key(1), maps)
    kernel = np.asarray(variables["params"]["mix"]["kernel"])
    assert np.abs(kernel).min() > 0
    mixed = np.stack([sum(kernel[h, g] * np.asarray(maps[:, h]) for h in range(3)) for g in range(3)], axis=1)
    centred = mixed - mixed.mean(1, keepdims=True)
    wanted = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(ReAttention().apply(variables, maps), wanted, atol=1e-5)


def test_snippet_sizes():
    sizes = dict(image_size=256, patch_size=32, num_classes=1000, dim=1024, depth=6, heads=16, mlp_dim=2048)
    assert count(DeepViT(**sizes, qkv_bias=False, patch_norm=True), 256) == 54_632_104  # vit-pytorch
