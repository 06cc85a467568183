"""Random resized crops that read from images larger than the result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallvit.augment import Augment
from smallvit.augment.ops import resample
from tests.test_augment import HEIGHT, KEY, WIDTH, augment, photograph


def coordinates(scale: int = 1) -> np.ndarray:
    """Images whose pixels are their own place, in pixels of HEIGHT x WIDTH."""
    y, x = (np.mgrid[: HEIGHT * scale, : WIDTH * scale] + 0.5) / scale
    return np.broadcast_to(np.stack([x, y, 0 * x], axis=-1).astype(np.float32), (256, *x.shape, 3))


def test_from_a_larger_image_the_view_is_the_same():
    spec = Augment(flip=True, vertical_flip=True, resized_crop=(0.3, 0.8), rotation=0.05, zoom=0.1)
    whole = augment(KEY, coordinates(), spec)
    larger = augment(KEY, coordinates(2), spec, (HEIGHT, WIDTH))
    assert larger.shape == whole.shape
    difference = np.abs(larger - whole).max(-1)
    assert np.median(difference) < 1e-4
    # The mirrored border is half a pixel wide, and a quarter in the larger image.
    assert np.quantile(difference, 0.99) < 0.51


@pytest.mark.parametrize("padding", [4, 0.125])
def test_padding_is_as_wide_in_a_larger_image(padding: float):
    spec = Augment(crop_padding=padding, resized_crop=(0.3, 0.8))
    whole = np.asarray(augment(KEY, coordinates(), spec))
    larger = np.asarray(augment(KEY, coordinates(2), spec, (HEIGHT, WIDTH)))
    centre = (larger - whole)[:, HEIGHT // 2, WIDTH // 2, :2]
    assert 0.3 < np.abs(centre).max() < 1.01  # shifts are of whole pixels, here of half the width


def test_a_crop_of_a_larger_image_keeps_its_detail():
    """Stripes of one pixel, which are an even grey at half the size, in crops of a quarter of the area."""
    stripes = np.zeros((64, HEIGHT * 2, WIDTH * 2, 3), np.uint8)
    stripes[:, :, ::2] = 255
    small = stripes.reshape(64, HEIGHT, 2, WIDTH, 2, 3).mean((2, 4)).astype(np.uint8)
    crop = Augment(resized_crop=(0.25, 0.25))
    sharp, blurred = augment(KEY, stripes, crop, (HEIGHT, WIDTH)), augment(KEY, small, crop)
    assert sharp.dtype == jnp.uint8
    assert sharp.shape == blurred.shape == (64, HEIGHT, WIDTH, 3)
    assert np.ptp(np.asarray(blurred)) == 0
    assert np.asarray(sharp, np.float32).std((1, 2, 3)).min() > 40


def test_half_the_size_is_the_mean_of_four_pixels():
    image = photograph().astype(np.float32)
    half = np.array([[2, 0, 0], [0, 2, 0]], np.float32)
    wanted = image.reshape(HEIGHT // 2, 2, WIDTH // 2, 2, 3).mean((1, 3))
    np.testing.assert_allclose(
        jax.jit(resample, static_argnums=2)(image, half, (HEIGHT // 2, WIDTH // 2)), wanted, atol=1e-3
    )


def test_nearly_whole_crops_are_the_resized_image():
    large = np.repeat(np.repeat(photograph()[None], 2, axis=1), 2, axis=2)
    batch = np.broadcast_to(large, (256, *large.shape[1:]))
    spec = Augment(resized_crop=(1.0, 1.0), policy="randaugment", magnitude=0, num_ops=1)
    plain = np.asarray(augment(KEY, batch, Augment(resized_crop=(1.0, 1.0)), (HEIGHT, WIDTH)), np.float32)
    nearest = np.abs(plain - photograph()).mean((1, 2, 3)).min()
    assert nearest < 3  # the aspect ratio is 1 within 1 %
    assert augment(KEY, batch, spec, (HEIGHT, WIDTH)).shape == plain.shape


def test_reserve():
    crops = (None, (1.0, 1.0), (0.5, 1.0), (0.25, 0.5), (0.08, 1.0))
    assert [Augment(resized_crop=crop).reserve for crop in crops] == pytest.approx([1, 1, 2**0.5, 2, 2])
