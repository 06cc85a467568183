"""T2T-ViT, which has no installable reference: its soft split, positions and token transformer by definition."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallvit import T2TViT
from smallvit.layers import Attend
from smallvit.models.t2t_vit import TokenTransformer, sinusoid, soft_split


@pytest.mark.parametrize("size, kernel, stride", [((8, 8), 3, 2), ((16, 12), 7, 4), ((5, 7), 3, 2), ((4, 6), 2, 1)])
def test_soft_split_is_a_literal_unfold(size: tuple[int, int], kernel: int, stride: int):
    image = jax.random.normal(jax.random.key(0), (2, *size, 3))
    pad = stride // 2
    padded = np.zeros((2, size[0] + 2 * pad, size[1] + 2 * pad, 3), np.float32)
    padded[:, pad : pad + size[0], pad : pad + size[1]] = image
    tops = range(0, padded.shape[1] - kernel + 1, stride)
    lefts = range(0, padded.shape[2] - kernel + 1, stride)
    wanted = [[padded[:, i : i + kernel, j : j + kernel].reshape(2, -1) for j in lefts] for i in tops]
    wanted = np.moveaxis(np.asarray(wanted), 2, 0)
    np.testing.assert_array_equal(soft_split(image, kernel, stride), wanted)


def test_soft_split_gives_each_pixel_the_gradient_of_all_its_windows():
    gradient = jax.grad(lambda x: soft_split(x, 3, 2).sum())(jnp.zeros((1, 4, 4, 1)))
    # At padding 1, windows start at -1 and 1: pixels 0 and 2 are in one window each way, 1 in two, 3 in one.
    np.testing.assert_array_equal(gradient[0, :, :, 0], np.outer([1, 2, 1, 1], [1, 2, 1, 1]))


def test_the_published_grid():
    x = jnp.zeros((1, 224, 224, 3))
    sizes = []
    for kernel, stride in ((7, 4), (3, 2), (3, 2)):
        x = jax.eval_shape(lambda x, k=kernel, s=stride: soft_split(x, k, s)[..., :3], x)
        sizes.append(x.shape[1:3])
    assert sizes == [(56, 56), (28, 28), (14, 14)]


def test_positions_by_hand():
    table = sinusoid(5, 6)
    for position in range(5):
        for pair in range(3):
            angle = position / 10_000 ** (2 * pair / 6)
            np.testing.assert_allclose(table[position, 2 * pair], math.sin(angle), atol=1e-6)
            np.testing.assert_allclose(table[position, 2 * pair + 1], math.cos(angle), atol=1e-6)


@pytest.mark.parametrize("lsa", [False, True])
def test_token_transformer_by_hand(lsa: bool):
    x = jax.random.normal(jax.random.key(0), (1, 2, 3, 5))
    model = TokenTransformer(4, attend=partial(Attend, lsa=lsa))
    variables = model.init(jax.random.key(1), x)
    p = jax.tree.map(np.asarray, variables["params"])

    def norm(y):
        y = y - y.mean(-1, keepdims=True)
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5)

    tokens = norm(np.asarray(x).reshape(6, 5))
    q, k, v = np.split(tokens @ p["qkv"]["kernel"], 3, axis=-1)
    logits = q @ k.T * 5**-0.5
    if lsa:
        np.testing.assert_allclose(p["attend"]["temperature"], [5**-0.5])
        np.fill_diagonal(logits, -np.inf)
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    y = v + weights @ v @ p["out"]["kernel"]
    hidden = jax.nn.gelu(norm(y) @ p["mlp"]["in"]["kernel"], approximate=False)
    y = y + np.asarray(hidden) @ p["mlp"]["out"]["kernel"]
    np.testing.assert_allclose(model.apply(variables, x).reshape(6, 4), y, atol=1e-5)


def test_spt_puts_shifted_copies_before_the_first_split_only():
    sizes = dict(image_size=16, num_classes=5, dim=8, depth=1, heads=2, mlp_dim=8, t2t_layers=((3, 2), (3, 2)))
    image = jax.ShapeDtypeStruct((1, 16, 16, 3), jnp.float32)
    shapes = jax.eval_shape(T2TViT(**sizes, spt=True).init, jax.random.key(0), image)["params"]
    assert shapes["token_1"]["qkv"]["kernel"].shape == (15 * 9, 3 * 64)
    assert shapes["dense"]["kernel"].shape == (64 * 9, 8)


def test_a_kernel_that_does_not_fit():
    model = T2TViT(image_size=4, num_classes=5, dim=8, depth=1, heads=2, mlp_dim=8, t2t_layers=((9, 2),))
    with pytest.raises(ValueError, match="kernel 9 does not fit 4 x 4"):
        model.init(jax.random.key(0), jnp.zeros((1, 4, 4, 3)))
