"""Images of every format become the right 8-bit pixels, and no bytes do harm."""

import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image, ImageOps

from smallvit.data import decode
from smallvit.data.decoding import header

RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (20, 30, 3), np.uint8)
GREY = COLOUR[:, :, 0]


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, kind, **options)
    file.seek(0)
    return file


def as_is(file: io.BytesIO, channels: int = 3, size: tuple[int, int] = (20, 30)) -> np.ndarray:
    return decode(file, size, channels, "crop")


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "TGA", "PPM", "GIF"])
def test_right_size_is_untouched(kind: str):
    image = Image.fromarray(GREY if kind == "GIF" else COLOUR)
    wanted = np.asarray(image.convert("RGB"))
    for fit in ("crop", "pad"):
        np.testing.assert_array_equal(decode(encoded(image, kind), (20, 30), 3, fit), wanted)


def test_jpeg_and_webp_are_what_pillow_makes_of_them():
    for kind in ("JPEG", "WEBP"):
        file = encoded(Image.fromarray(COLOUR), kind)
        np.testing.assert_array_equal(as_is(file), np.asarray(Image.open(io.BytesIO(file.getvalue())).convert("RGB")))


def test_grey_and_colour():
    np.testing.assert_array_equal(as_is(encoded(Image.fromarray(GREY)), 1)[:, :, 0], GREY)
    np.testing.assert_array_equal(as_is(encoded(Image.fromarray(GREY))), np.stack([GREY] * 3, axis=-1))
    wanted = np.asarray(Image.fromarray(COLOUR).convert("L"))
    np.testing.assert_array_equal(as_is(encoded(Image.fromarray(COLOUR)), 1)[:, :, 0], wanted)
    with pytest.raises(ValueError, match="it has 1 channels, not 2"):
        as_is(encoded(Image.fromarray(GREY)), 2)


def test_one_bit():
    bits = GREY > 127
    np.testing.assert_array_equal(as_is(encoded(Image.fromarray(bits)), 1)[:, :, 0], bits * np.uint8(255))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_exif_orientation(orientation: int, kind: str):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = encoded(Image.fromarray(COLOUR), kind, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file.getvalue())))
    assert header(io.BytesIO(file.getvalue()))[:2] == (upright.height, upright.width)
    np.testing.assert_array_equal(as_is(file, size=(upright.height, upright.width)), np.asarray(upright))
    assert upright.size == ((20, 30) if orientation > 4 else (30, 20))


def test_broken_exif_does_not_matter():
    file = encoded(Image.fromarray(COLOUR), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert as_is(file).shape == (20, 30, 3)


def test_palette_and_its_transparency():
    palette = Image.fromarray(COLOUR).quantize(16)
    np.testing.assert_array_equal(as_is(encoded(palette)), np.asarray(palette.convert("RGB")))
    np.testing.assert_array_equal(as_is(encoded(palette, "GIF")), np.asarray(palette.convert("RGB")))
    seen = as_is(encoded(palette, transparency=3))
    wanted = np.asarray(palette.convert("RGB")).copy()
    wanted[np.asarray(palette) == 3] = 255
    np.testing.assert_array_equal(seen, wanted)
    many = as_is(encoded(palette, transparency=bytes([0] * 8 + [255] * 8)))
    assert (many[np.asarray(palette) < 8] == 255).all()


def test_alpha_stands_on_white():
    alpha = np.zeros((20, 30), np.uint8)
    alpha[:10], alpha[10:15] = 255, 128
    for mode, pixels in (("RGBA", COLOUR), ("LA", GREY[:, :, None])):
        seen = as_is(encoded(Image.fromarray(np.concatenate([pixels, alpha[:, :, None]], axis=-1), mode)))
        np.testing.assert_array_equal(seen[:10], np.broadcast_to(pixels[:10], (10, 30, 3)))
        np.testing.assert_allclose(seen[10:15], np.broadcast_to(pixels[10:15] / 255 * 128 + 127, (5, 30, 3)), atol=1)
        assert (seen[15:] == 255).all()


def test_a_large_transparent_image_has_no_seams():
    pixels = np.random.default_rng(0).integers(0, 256, (1200, 1300, 4)).astype(np.uint8)
    image = Image.fromarray(pixels)
    wanted = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    np.testing.assert_array_equal(decode(encoded(image), (1200, 1300), 3, "crop"), np.asarray(wanted))


def test_transparent_colour_of_an_rgb_file():
    pixels = COLOUR.copy()
    pixels[0, 0] = 1, 2, 3
    seen = as_is(encoded(Image.fromarray(pixels), transparency=(1, 2, 3)))
    assert (seen[0, 0] == 255).all()
    np.testing.assert_array_equal(seen[1:], pixels[1:])


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_are_scaled_by_their_type(kind: str):
    values = np.linspace(0, 20_000, 600).reshape(20, 30).astype(np.uint16)  # a dark one: it must stay dark
    seen = as_is(encoded(Image.fromarray(values), kind), 1)[:, :, 0]
    np.testing.assert_allclose(seen, values / 65535 * 255, atol=0.51)


def test_big_endian_sixteen_bits():
    values = np.linspace(0, 65_535, 600).reshape(20, 30).astype(">u2")
    file = io.BytesIO(b"P5 30 20 65535\n" + values.tobytes())
    np.testing.assert_allclose(as_is(file, 1)[:, :, 0], values / 65535 * 255, atol=0.51)


@pytest.mark.parametrize(
    "values, wanted",
    [
        (np.linspace(0, 1, 600, dtype=np.float32), np.linspace(0, 255, 600)),
        (np.linspace(0, 255, 600, dtype=np.float32), np.linspace(0, 255, 600)),
        (np.linspace(-3, 500, 600, dtype=np.float32), np.linspace(0, 255, 600)),
        (np.linspace(0, 65_535, 600).astype(np.int32), np.linspace(0, 255, 600)),
        (np.linspace(0, 1e9, 600).astype(np.int32), np.linspace(0, 255, 600)),
        (np.full(600, -7, np.int32), np.zeros(600)),
    ],
)
def test_float_and_wide_integers(values: np.ndarray, wanted: np.ndarray):
    file = encoded(Image.fromarray(values.reshape(20, 30)), "TIFF")
    np.testing.assert_allclose(as_is(file, 1)[:, :, 0], wanted.reshape(20, 30), atol=0.51)


def test_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        as_is(encoded(Image.fromarray(np.full((20, 30), np.nan, np.float32)), "TIFF"))


def test_cmyk():
    cmyk = Image.fromarray(COLOUR).convert("CMYK")
    for kind in ("TIFF", "JPEG"):
        file = encoded(cmyk, kind)
        np.testing.assert_array_equal(as_is(file), np.asarray(Image.open(io.BytesIO(file.getvalue())).convert("RGB")))
    np.testing.assert_array_equal(as_is(encoded(cmyk, "TIFF")), COLOUR)
    assert as_is(encoded(cmyk, "TIFF"), 1).shape == (20, 30, 1)


def test_first_frame_of_an_animation():
    frames = [Image.fromarray(np.full((20, 30), value, np.uint8)) for value in (50, 200)]
    for kind in ("GIF", "PNG", "WEBP"):
        file = encoded(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
        assert (as_is(file) == 50).all()


@pytest.mark.parametrize("shape", [(200, 100), (100, 200), (8, 32), (64, 64)])
def test_crop_takes_the_middle_and_pad_takes_all(shape: tuple[int, int]):
    """The image has two ramps, left to right and top to bottom; its centre stays the centre."""
    height, width = shape
    ramps = np.stack(np.broadcast_arrays(np.linspace(0, 255, width), np.linspace(0, 255, height)[:, None]), axis=-1)
    image = Image.fromarray(np.concatenate([ramps, np.zeros((*shape, 1))], axis=-1).astype(np.uint8))
    crop, pad = (decode(encoded(image), (32, 32), 3, fit).astype(float) for fit in ("crop", "pad"))
    for result in (crop, pad):
        assert result.shape == (32, 32, 3)
        np.testing.assert_allclose(result[15:17, 15:17, :2].mean((0, 1)), 127.5, atol=4)
    shown = min(shape) / np.array([width, height])  # how much of each side the crop has
    np.testing.assert_allclose(np.ptp(crop[:, :, :2], axis=(0, 1)), 255 * shown, atol=14)
    side = 32 * np.array(shape) / max(shape)  # of the picture within the padding
    top, left = ((32 - side) // 2).astype(int)
    assert top == left == 0 or len(np.unique(pad[:top].reshape(-1, 3), axis=0)) <= 1
    inner = pad[top : 32 - top, left : 32 - left, :2]
    assert (np.ptp(inner, axis=(0, 1)) > 255 * 0.7).all()
    if top > 1:
        np.testing.assert_allclose(pad[0, 0], [*inner.mean((0, 1)), 0], atol=12)


def test_resampling_is_antialiased_also_for_a_large_jpeg():
    stripes = np.zeros((900, 1200, 3), np.uint8)
    stripes[:, ::2] = 255
    for kind in ("PNG", "JPEG"):
        small = as_is(encoded(Image.fromarray(stripes), kind), size=(32, 32))
        np.testing.assert_allclose(small, 127.5, atol=3)
    photo = Image.fromarray(COLOUR[:6, :8]).resize((1200, 900), Image.Resampling.BICUBIC)
    file = encoded(photo, "JPEG", quality=95)
    exact = np.asarray(ImageOps.fit(photo, (32, 32), Image.Resampling.BICUBIC)).astype(float)
    assert np.abs(as_is(file, size=(32, 32)) - exact).mean() < 2


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of_size(side: int) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


PHOTO = encoded(Image.fromarray(RNG.integers(0, 256, (64, 64, 3), np.uint8)), "JPEG").getvalue()


BAD = {
    "empty": (b"", "it is not an image"),
    "text": (b"hello, I am no image", "it is not an image"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "it is not an image"),
    "torn": (PHOTO[: len(PHOTO) // 2], "truncated"),
    "header only": (PHOTO[:20], ""),
    "bomb": (png_of_size(10_000), "it has more than 89,478,485 pixels"),  # of which Pillow only warns
    "large bomb": (png_of_size(30_000), "it has more than 89,478,485 pixels"),
    "short of data": (png_of_size(100), ""),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_bytes_are_one_line(tmp_path: Path, case: str):
    content, reason = BAD[case]
    path = tmp_path / "bad.jpg"
    path.write_bytes(content)
    for source in (path, io.BytesIO(content)):
        with pytest.raises(ValueError) as caught:
            decode(source, (32, 32), 3, "crop")
        message = str(caught.value)
        assert message.startswith(f"cannot read {path}: " if source is path else "cannot read the image: ")
        assert reason in message
        assert "\n" not in message
        assert "0x" not in message


def test_missing_file(tmp_path: Path):
    with pytest.raises(ValueError, match=r"none\.jpg: there is no such file"):
        decode(tmp_path / "none.jpg", (32, 32), 3, "crop")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP"])
def test_damaged_bytes_give_an_image_or_a_value_error(kind: str):
    good = encoded(Image.fromarray(COLOUR), kind).getvalue()
    rng = np.random.default_rng(0)

    def decoded(content: bytearray) -> bool:
        try:
            pixels = decode(io.BytesIO(bytes(content)), (16, 16), 3, "pad")
        except ValueError:
            return False
        assert (pixels.shape, pixels.dtype) == ((16, 16, 3), np.uint8)
        return True

    def changed(content: bytes, number: int) -> bytearray:
        bad = bytearray(content)
        for place in rng.integers(0, len(bad), number):
            bad[place] = rng.integers(256)
        return bad

    assert decoded(bytearray(good))
    survivors = sum(decoded(changed(good, 1)) for _ in range(30))
    assert survivors == 0 if kind == "PNG" else survivors > 15  # only PNG has checksums
    cut = [good[: rng.integers(1, 3 * len(good) // 4)] for _ in range(30)]
    assert not any(decoded(bytearray(content)) for content in cut)
    for content in cut:
        decoded(changed(content, 3))  # either is right, but no other error


@pytest.mark.parametrize("size", [(1, 3000), (3000, 1), (1, 1)])
@pytest.mark.parametrize("fit", ["crop", "pad"])
def test_a_line_of_pixels(size: tuple[int, int], fit: Literal["crop", "pad"]):
    pixels = decode(encoded(Image.new("RGB", size, (10, 200, 30))), (32, 32), 3, fit)
    np.testing.assert_array_equal(pixels, np.broadcast_to(np.array([10, 200, 30], np.uint8), (32, 32, 3)))


def test_a_lack_of_memory_is_no_verdict_on_an_image(monkeypatch: pytest.MonkeyPatch):
    def none(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image.Image, "load", none)
    with pytest.raises(MemoryError):
        decode(encoded(Image.new("RGB", (4, 4))), (4, 4), 3, "crop")
