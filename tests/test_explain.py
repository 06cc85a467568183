"""Maps of what a model looks at: by hand where possible, and for every architecture of the table."""

import jax
import numpy as np
import pytest

import smallvit
from smallvit import explanation
from smallvit.registry import PRESETS
from tests.cases import CASES

ROWS = [name for name, case in CASES.items() if case.both] + ["vit_parallel", "vit_merger", "vit_wide"]


def example(name: str, **changes):
    case = CASES[name]
    model = case.make(**changes)
    images = np.random.default_rng(1).standard_normal((2, *case.size, case.channels), np.float32)
    return model, some_variables(model, images), images


def some_variables(model, images):
    """Random parameters, and ones for running averages; compiling `init` would take longer than the tests."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    params = jax.tree.map(lambda leaf: rng.uniform(-0.5, 0.5, leaf.shape).astype(leaf.dtype), shapes.pop("params"))
    return {"params": params, **jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)}


def test_every_class_has_a_row():
    assert {preset.cls for preset in PRESETS.values()} <= {CASES[name].cls for name in ROWS}


@pytest.mark.parametrize("name", ROWS)
def test_saliency_of_every_architecture(name):
    model, variables, images = example(name)
    heat = explanation.saliency(model, variables, images)
    assert heat.shape == images.shape[:3]
    assert np.isfinite(heat).all()
    np.testing.assert_allclose(heat.min(axis=(1, 2)), 0)
    np.testing.assert_allclose(heat.max(axis=(1, 2)), 1)
    assert np.abs(heat[0] - heat[1]).max() > 0.01  # each image has its own


def test_rollout_by_hand():
    # With the identity and normalised: [[3/4, 1/4], [1/4, 3/4]], then [[1/2, 1/2], [0, 1]] on top of it.
    first = np.array([[0.5, 0.5], [0.5, 0.5]], np.float32)[None, None]
    second = np.stack([[[0, 1], [0, 1]], [[0, 1], [0, 1]]]).astype(np.float32)[None]  # two heads
    # Their product is [[1/2, 1/2], [1/4, 3/4]].
    np.testing.assert_allclose(explanation.rollout([first, second], prefix=1), [[0.5]])
    np.testing.assert_allclose(explanation.rollout([first, second], prefix=0), [[0.375, 0.625]])
    np.testing.assert_allclose(explanation.rollout([second, first], prefix=0), [[0.25, 0.75]])


def test_saliency_is_the_rollout_where_all_read_all():
    model, variables, images = example("vit")
    maps = explanation.attention_maps(model, variables, images)
    grid = explanation.rollout(list(maps.values()), prefix=1).reshape(-1, 4, 4)
    heat = explanation.saliency(model, variables, images)
    expected = explanation.unit_range(np.asarray(jax.image.resize(grid, (2, 16, 16), "nearest")))
    np.testing.assert_allclose(heat, expected, atol=1e-5)


def test_class_attention_rolls_out_from_its_class_token():
    model, variables, images = example("cait", cls_depth=1)
    maps = explanation.attention_maps(model, variables, images)
    *patches, last = (p.mean(axis=1) for p in maps.values())
    total = np.eye(16)[None]
    for p in patches:
        total = (p + np.eye(16)) / 2 @ total
    # Half of the class token is itself, which is no patch; the rest is what it reads of the patches.
    grid = (last[:, :, 1:] @ total)[:, 0].reshape(2, 4, 4).astype(np.float32)
    expected = explanation.unit_range(np.asarray(jax.image.resize(grid, (2, 16, 16), "nearest")))
    np.testing.assert_allclose(explanation.saliency(model, variables, images), expected, atol=1e-4)


@pytest.mark.parametrize("target", [None, 3, np.array([0, 6])])
def test_grad_cam_of_a_mean_is_each_tokens_own_score(target):
    model, variables, images = example("swin")
    tokens, scores = jax.jit(lambda v, x: (model.apply(v, x, method="features"), model.apply(v, x)))(variables, images)
    chosen = np.broadcast_to(np.argmax(scores, axis=-1) if target is None else target, 2)
    kernel = np.asarray(variables["params"]["head"]["kernel"])
    own = np.einsum("bnd,db->bn", tokens, kernel[:, chosen]).reshape(2, 4, 4)
    # What speaks for the class; where nothing does, as of class 3 in the first image, how little speaks against it.
    own = np.where(own.max(axis=(1, 2), keepdims=True) > 0, np.maximum(own, 0), own)
    expected = explanation.unit_range(np.asarray(jax.image.resize(own, (2, 16, 16), "nearest")))
    np.testing.assert_allclose(explanation.saliency(model, variables, images, target), expected, atol=1e-4)


def test_a_model_without_attention_has_a_map():
    model, variables, images = example("hybrid_vit", depth=0)
    heat = explanation.saliency(model, variables, images)
    assert np.isfinite(heat).all()
    assert np.ptp(heat) == 1


def test_a_map_has_the_grid_of_the_last_attention():
    """Not the coarser one of the convolutions after it."""
    model, variables, images = example("hybrid_vit", max_pool=True, last_width=24)
    heat = explanation.saliency(model, variables, images)  # 4 x 4 tokens for 16 x 16 pixels, then 2 x 2
    blocks = heat.reshape(len(heat), 4, 4, 4, 4)
    np.testing.assert_array_equal(blocks, np.broadcast_to(blocks[:, :, :1, :, :1], blocks.shape))
    assert len(np.unique(heat[0])) > 4


def test_a_wrong_target_is_named():
    model, variables, images = example("swin")
    with pytest.raises(ValueError, match="target 7 must be a class, from 0 to 6"):
        explanation.saliency(model, variables, images, 7)


def test_grad_cam_needs_a_head():
    model, variables, images = example("swin", num_classes=0)
    with pytest.raises(ValueError, match="num_classes=0"):
        explanation.saliency(model, variables, images)


def test_maps_come_in_the_order_of_the_computation():
    model, variables, images = example("vit", depth=11, lsa=False)
    maps = explanation.attention_maps(model, variables, images)
    assert list(maps) == [f"block_{i}/attention/attend" for i in range(11)]
    for weights in maps.values():
        assert weights.shape == (2, 2, 17, 17)
        np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-5)


def test_temperatures_are_multiples_of_the_usual_scale():
    model, variables, images = example("vit", lsa=True)
    path = "block_1/attention/attend"
    variables["params"]["block_1"]["attention"]["attend"]["temperature"] = np.array([2, 0.5]) * 8**-0.5
    found = explanation.temperatures(model, variables, images)
    assert list(found) == ["block_0/attention/attend", path]
    np.testing.assert_allclose(found[path], [2, 0.5], rtol=1e-6)


def test_no_temperatures_without_lsa():
    assert explanation.temperatures(*example("vit", lsa=False)) == {}


def test_entropy_by_hand():
    one, even = [1.0, 0, 0, 0], [0.25] * 4
    maps = np.array([[[one, one], [even, even]]], np.float32)  # an image, two heads, two tokens that read four
    entropy = explanation.attention_entropy({"plain": maps, "windows": maps[:, None]})
    np.testing.assert_allclose(entropy["plain"], [0, np.log(4)], atol=1e-6)
    np.testing.assert_allclose(entropy["windows"], [0, np.log(4)], atol=1e-6)


def test_distance_by_hand():
    # On 1 x 3 tokens the ends read the other end, 2 away, and the middle itself. All read the class token half.
    grid = np.array([[0, 0, 1], [0, 1, 0], [1, 0, 0]], np.float32)
    with_class = np.pad(grid / 2, ((1, 0), (1, 0)), constant_values=0.5)
    for maps in (grid, with_class):
        distance = explanation.attention_distance({"a": maps[None, None]}, (1, 3))
        np.testing.assert_allclose(distance["a"], [4 / 3], rtol=1e-6)
    with pytest.raises(ValueError, match="a has maps of 3 x 3, which do not match the tokens of a grid of 2 x 3"):
        explanation.attention_distance({"a": grid[None, None]}, (2, 3))


@pytest.mark.parametrize(
    "tokens, shape, found",
    [
        (16, (32, 32), (0, (4, 4))),
        (17, (32, 32), (1, (4, 4))),
        (50, (28, 28), (1, (7, 7))),
        (7, (8, 12), (1, (2, 3))),
        (28, (100, 60), (0, (7, 4))),
        (13, (3, 4), (1, (3, 4))),
        (1, (1, 1), (0, (1, 1))),  # of an image as small as a token
        (2, (1, 1), (1, (1, 1))),
    ],
)
def test_token_grid(tokens, shape, found):
    assert explanation.token_grid(tokens, shape) == found


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_no_token_grid(tokens):
    with pytest.raises(ValueError, match=f"{tokens} tokens do not fill a grid shaped like 32 x 32"):
        explanation.token_grid(tokens, (32, 32))


def test_tokens_of_oblong_patches_find_their_place():
    # 9 x 20 pixels in patches of 3 x 5 are 3 x 4 tokens, though 2 x 6 is more like the image.
    image_size, patch_size = (9, 20), (3, 5)
    model = smallvit.ViT(
        num_classes=3, image_size=image_size, patch_size=patch_size, dim=8, depth=1, heads=1, mlp_dim=8, pool="mean"
    )
    images = np.random.default_rng(0).standard_normal((1, *image_size, 1), np.float32)
    variables = some_variables(model, images)
    heat = explanation.saliency(model, variables, images)
    (weights,) = explanation.attention_maps(model, variables, images).values()
    tokens = explanation.rollout([weights], prefix=0)
    expected = explanation.unit_range(np.asarray(jax.image.resize(tokens.reshape(1, 3, 4), (1, 9, 20), "nearest")))
    np.testing.assert_allclose(heat, expected, atol=1e-5)


def test_class_attention_is_the_class_tokens_row():
    model, variables, images = example("vit")
    maps = explanation.attention_maps(model, variables, images)
    found = explanation.class_attention(model, variables, images)
    assert list(found) == list(maps)
    for path, read in found.items():
        np.testing.assert_array_equal(read, maps[path][:, :, 0, 1:].reshape(*maps[path].shape[:2], 4, 4))


def test_without_a_class_token_all_tokens_read():
    model, variables, images = example("vit", pool="mean")
    maps = explanation.attention_maps(model, variables, images)
    for path, read in explanation.class_attention(model, variables, images).items():
        np.testing.assert_allclose(read.reshape(*read.shape[:2], -1), maps[path].mean(axis=2))


def test_class_attention_leaves_windows_out():
    assert explanation.class_attention(*example("swin")) == {}


@pytest.mark.parametrize("name", ROWS)
def test_receptive_field_of_every_architecture(name):
    field = explanation.receptive_field(*example(name))
    assert field.heat.shape == CASES[name].size
    assert field.heat.max() == pytest.approx(1)
    assert min(field.measured) >= 1
    if field.theory is not None:
        assert all(m <= t for m, t in zip(field.measured, field.theory, strict=True))  # less at a border


@pytest.mark.parametrize("spt, shift, sees", [(False, None, 4), (True, None, 8), ("cardinal", 1, 6), (True, 0, 4)])
def test_a_token_sees_its_patch_and_with_spt_around_it(spt, shift, sees):
    model = smallvit.create_model(
        "vit_tiny_data", image_size=16, num_classes=2, patch_size=4, dim=8, depth=1, spt=spt, spt_shift=shift
    )
    images = np.random.default_rng(1).standard_normal((2, 16, 16, 3), np.float32)
    field = explanation.receptive_field(model, some_variables(model, images), images, token=(1, 2))
    assert field.theory == field.measured == (sees, sees)
    around = (sees - 4) // 2
    seen = np.zeros((16, 16), bool)
    seen[4 - around : 8 + around, 8 - around : 12 + around] = True
    if spt != "cardinal":  # whose copies leave out the corners
        np.testing.assert_array_equal(field.heat > 0, seen)
    assert not field.heat[~seen].any()


def test_receptive_field_of_no_token():
    with pytest.raises(ValueError, match="token 4, 0 is not in the grid of 4 x 4"):
        explanation.receptive_field(*example("vit"), token=(4, 0))


def test_attention_by_layer():
    model, variables, images = example("vit", lsa=True)
    rows = explanation.attention_by_layer(model, variables, images)
    maps = explanation.attention_maps(model, variables, images)
    assert [row.path for row in rows] == list(maps)
    row, p = rows[0], maps[rows[0].path]
    learned = variables["params"]["block_0"]["attention"]["attend"]["temperature"]
    np.testing.assert_allclose(row.temperature, 1 / learned, rtol=1e-5)
    assert row.even == pytest.approx(np.log(17))
    assert (row.entropy < row.even).all()
    np.testing.assert_allclose(row.distance, explanation.attention_distance({"": p}, (4, 4))[""])
    assert explanation.attention_by_layer(*example("vit"))[0].temperature is None
    assert explanation.attention_by_layer(*example("swin"))[0].distance is None
