"""What is specific to the ViT family: its errors, its sizes, and that it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from smallvit import PatchMerger, SimpleViT, SLViT, ViT, create_model, resample_positions

SIZES = dict(image_size=16, patch_size=4, num_classes=5, dim=16, depth=2, heads=2, dim_head=8, mlp_dim=24)
KEY = jax.random.key(0)


def ones(*shape: int) -> jax.Array:
    return jnp.ones((1, *shape))


@pytest.mark.parametrize(
    "fields, image, message",
    [
        (dict(image_size=18), ones(18, 18, 3), r"18 x 18 is not divisible by patch size 4 x 4: resize to 16 x 16"),
        (dict(image_size=2), ones(2, 2, 3), r"2 x 2 is not divisible by patch size 4 x 4"),
        ({}, ones(20, 20, 3), r"\(1, 20, 20, 3\), but the model was made for 16 x 16"),
        ({}, ones(16, 16), r"\(1, 16, 16\), expected \(batch, height, width, channels\)"),
        ({}, ones(3, 16, 16), r"\(1, 3, 16, 16\), but the model was made for 16 x 16"),
        ({}, jnp.ones((1, 16, 16, 3), jnp.uint8), "dtype uint8, expected floats: normalise"),
        (dict(pool="max"), ones(16, 16, 3), "unknown pool 'max': choose 'cls'"),
        (dict(lsa="both"), ones(16, 16, 3), "unknown lsa 'both'"),
        (dict(spt="round"), ones(16, 16, 3), "unknown shift directions 'round'"),
        (dict(heads=0), ones(16, 16, 3), "heads=0"),
        (dict(heads=3, dim_head=None), ones(16, 16, 3), "dim=16 is not divisible by heads=3"),
        (dict(patch_merge_layer=3), ones(16, 16, 3), "patch_merge_layer=3 must be from 1 to depth=2"),
        (dict(num_classes=-1), ones(16, 16, 3), "num_classes=-1"),
        (dict(patch_size=0), ones(16, 16, 3), "size 0 must be positive"),
    ],
)
@pytest.mark.usefixtures("as_a_user")
def test_mistakes_are_named(fields, image, message):
    with pytest.raises(ValueError, match=message):
        ViT(**{**SIZES, **fields}).init(KEY, image)


@pytest.mark.usefixtures("as_a_user")
def test_mistakes_of_the_others():
    with pytest.raises(ValueError, match="dim=18 must be a multiple of 4"):
        SimpleViT(**{**SIZES, "dim": 18}).init(KEY, ones(16, 16, 3))
    with pytest.raises(ValueError, match="SimpleViT has no class token: leave it at 'mean'"):
        SimpleViT(**SIZES, pool="cls").init(KEY, ones(16, 16, 3))
    with pytest.raises(ValueError, match="dimension 8, the merger dim=16"):
        PatchMerger(16, 2).init(KEY, ones(4, 8))


def test_simple_vit_takes_channels_first_too():
    image = jax.random.normal(KEY, (2, 16, 16, 3))
    model = SimpleViT(**SIZES)
    variables = model.init(KEY, image)
    out = model.apply(variables, image)
    np.testing.assert_array_equal(model.apply(variables, jnp.moveaxis(image, -1, 1)), out)


def test_numpy_images_are_taken():
    model = ViT(**SIZES)
    image = np.random.default_rng(0).standard_normal((1, 16, 16, 3))
    assert model.apply(model.init(KEY, image), image).shape == (1, 5)


def test_slvit_is_the_vit_with_both_add_ons():
    image = jax.random.normal(KEY, (2, 16, 16, 3))
    variables = SLViT(**SIZES).init(KEY, image)
    same = ViT(**SIZES, spt=True, lsa=True).apply(variables, image)
    np.testing.assert_array_equal(SLViT(**SIZES).apply(variables, image), same)


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_parameters_serve_at_another_image_size(pool):
    small = ViT(**SIZES, pool=pool)
    large = small.clone(image_size=(32, 24))
    images = jax.random.normal(KEY, (2, 32, 24, 3))
    variables = small.init(KEY, images[:, :16, :16])
    fitted = resample_positions(variables, large, images)
    assert fitted["params"]["positions"]["grid"].shape == (8, 6, 16)
    assert large.apply(fitted, images).shape == (2, 5)
    for path in ("block_0", "patches", "head"):
        assert fitted["params"][path] is not None
        jax.tree.map(np.testing.assert_array_equal, fitted["params"][path], variables["params"][path])

    # A plane of positions stays a plane: away from the border, bicubic interpolation is exact on it.
    rows, columns = jnp.mgrid[:4, :4]
    variables["params"]["positions"]["grid"] = jnp.repeat((rows + 10 * columns)[..., None], 16, -1).astype(jnp.float32)
    grid = resample_positions(variables, small.clone(image_size=32), jnp.zeros((1, 32, 32, 3)))["params"]["positions"][
        "grid"
    ]
    want = (jnp.arange(8)[:, None] / 2 - 0.25) + 10 * (jnp.arange(8)[None] / 2 - 0.25)
    np.testing.assert_allclose(grid[3:5, 3:5, 0], want[3:5, 3:5], atol=1e-4)


def test_only_positions_are_resampled():
    model = ViT(**SIZES)
    variables = model.init(KEY, ones(16, 16, 3))
    assert resample_positions(variables, model, ones(16, 16, 3)).keys() == variables.keys()
    with pytest.raises(ValueError, match=r"patches/dense/kernel is \(48, 16\), the model needs \(192, 16\)"):
        resample_positions(variables, model.clone(patch_size=8), ones(16, 16, 3))
    with pytest.raises(ValueError, match="the variables are from another model"):
        resample_positions(variables, model.clone(lsa=True), ones(16, 16, 3))


def test_merging_leaves_the_class_token_and_a_few():
    model = ViT(**SIZES, patch_merge_layer=1, patch_merge_num_tokens=3)
    image = ones(16, 16, 3)
    assert model.apply(model.init(KEY, image), image, method="features").shape == (1, 4, 16)
    model = model.clone(pool="mean")
    assert model.apply(model.init(KEY, image), image, method="features").shape == (1, 3, 16)


def test_stochastic_depth_leaves_whole_images_out_and_rescales():
    from smallvit.layers import DropPath

    x = jnp.ones((400, 3, 2))
    out = DropPath(0.25).apply({}, x, train=True, rngs={"dropout": KEY})
    per_image = out.reshape(400, -1)
    assert (per_image == per_image[:, :1]).all()
    np.testing.assert_allclose(jnp.unique(per_image), [0, 1 / 0.75], atol=1e-6)
    assert 0.15 < (per_image[:, 0] == 0).mean() < 0.35
    np.testing.assert_array_equal(DropPath(0.25).apply({}, x), x)


def test_a_shrunken_small_data_model_learns_32_images_by_heart():
    model = create_model("sl_vit_small_data", num_classes=4, image_size=8, dim=32, depth=2, heads=2, mlp_dim=64)
    images = jax.random.normal(jax.random.key(1), (32, 8, 8, 3))
    labels = jax.random.randint(jax.random.key(2), (32,), 0, 4)
    params = jax.jit(model.init)(KEY, images)
    optimizer = optax.adam(2e-3)

    @jax.jit
    def fit(params):
        def step(carry, key):
            params, state = carry

            def loss(params):
                logits = model.apply(params, images, train=True, rngs={"dropout": key})
                return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

            updates, state = optimizer.update(jax.grad(loss)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), jax.random.split(KEY, 100))[0][0]

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax mixes freely
        params = fit(params)
    predicted = model.apply(params, images).argmax(-1)
    assert (predicted == labels).mean() == 1.0
