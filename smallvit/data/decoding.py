"""Decoding of one image file of any format to pixels of a given size and depth. Safe for untrusted bytes."""

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float32, UInt, UInt8, UInt16
from PIL import Image, ImageOps, UnidentifiedImageError

MAX_FRAMES = 64  # of a stack, to be used as channels
MAX_PIXELS = 89_478_485  # where Pillow's warnings of decompression bombs start

Image.init()
# Pillow passes EPS to Ghostscript, which runs the file as a program; the others are formats without a decoder.
_NOT_READ = ("EPS", "WMF", "BUFR", "GRIB", "HDF5", "MPEG")
FORMATS = sorted(set(Image.OPEN) - set(_NOT_READ), key=lambda kind: (kind not in ("JPEG", "PNG"), kind))  # usual first
SUFFIXES = {suffix for suffix, kind in Image.registered_extensions().items() if kind in FORMATS}
_ORIENTATION = 0x0112

Fit = Literal["crop", "pad"]
Source = Path | io.BytesIO | io.BufferedReader
_T = TypeVar("_T")

# Pillow warns of large images, which are refused below. The filter is set once, since filters are global to the process
# and a lock around each `Image.open` would make all threads wait for the slowest.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class Bounded(io.BytesIO):
    """Bytes with a limited number of reads: some files make a parser read millions of empty parts."""

    MOST = 50_000

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self._left = self.MOST

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise ValueError("it has too many parts")
        return super().read(size)


class Header(NamedTuple):
    height: int
    width: int
    grey: bool
    deep: bool  # more than 8 bits
    frames: int  # of a TIFF stack of grey images, else 1


def decode(
    source: Source, size: tuple[int, int], channels: int, fit: Fit, formats: Sequence[str] = FORMATS, depth: int = 8
) -> UInt[np.ndarray, "H W c"]:
    """Decodes the (first) image of a file, upright, on white where it is transparent, keeping the aspect ratio.

    "crop" takes the largest central part of the right shape. "pad" keeps everything and fills the rest with the image's
    mean colour, which, unlike black, adds no edges stronger than the image's own. An image of the right size is not
    changed. For a depth of 8, 16-bit images are scaled from the full range of their type. The frames of a TIFF stack of
    grey images are its channels if there are `channels` of them.

    Raises a ValueError that names the file if it cannot be read.
    """
    return with_image(source, lambda image: decode_opened(image, size, channels, fit, depth), formats)


def decode_opened(
    image: Image.Image, size: tuple[int, int], channels: int, fit: Fit, depth: int = 8
) -> UInt[np.ndarray, "H W c"]:
    """As `decode`, for an image that is open already."""
    frames = count_frames(image)
    if frames == channels > 1:
        _refuse_bomb(image, frames)
        return fit_pixels(np.stack([*_stack(image, frames, depth)], axis=-1), size, fit)
    if channels not in (1, 3):
        raise ValueError(f"it has {frames if frames > 1 else len(image.getbands())} channels, not {channels}")
    enough = 2 * max(size)  # a JPEG may be shrunk to this while decoding; leaves a margin for good resampling
    if min(image.size) > enough:
        image.draft(None, tuple(side * enough // min(image.size) for side in image.size))  # type: ignore[arg-type]
    image.load()
    _refuse_bomb(image)
    with suppress(Exception):  # broken EXIF data is no reason to refuse a valid image
        image = ImageOps.exif_transpose(image)
    if depth == 8:
        return fit_image(_eight_bits(image, channels), size, fit)
    return fit_pixels(_sixteen_bits(image, channels), size, fit)


def header(source: Source, formats: Sequence[str] = FORMATS) -> Header:
    """Reads what is known without decoding: the size of the upright image, whether it is grey, and so on."""

    def read(image: Image.Image) -> Header:
        width, height = image.size
        # Without EXIF data, Pillow would decode the image to look for it; a TIFF's size is already that of the upright
        # image.
        if "exif" in image.info and image.format != "TIFF":
            with suppress(Exception):
                if image.getexif().get(_ORIENTATION) in (5, 6, 7, 8):
                    width, height = height, width
        return Header(height, width, _is_grey(image), _is_deep(image), count_frames(image))

    return with_image(source, read, formats)


def fit_image(
    image: Image.Image, size: tuple[int, int], fit: Fit
) -> UInt8[np.ndarray, "H W c"] | Float32[np.ndarray, "H W c"]:
    height, width = size
    if image.size == (width, height):
        fitted = image
    elif fit == "crop":
        fitted = ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
    elif fit == "pad":
        # Like ImageOps.contain, but keeps at least one pixel: 3000 x 1 would become 32 x 0.
        scale = min(width / image.width, height / image.height)
        inside = (max(round(image.width * scale), 1), max(round(image.height * scale), 1))
        inner = image.resize(inside, Image.Resampling.BICUBIC)
        mean = np.atleast_1d(np.asarray(inner).mean(axis=(0, 1)).round().astype(int)).tolist()
        fitted = ImageOps.pad(inner, (width, height), color=mean[0] if len(mean) == 1 else tuple(mean))
    else:
        raise ValueError(f'fit={fit!r} must be "crop" or "pad"')
    return np.array(fitted).reshape(height, width, -1)


def fit_pixels(pixels: UInt[np.ndarray, "H W c"], size: tuple[int, int], fit: Fit) -> UInt[np.ndarray, "h w c"]:
    """Does the same, channel by channel, for pixels that Pillow has no mode for: more bits or other channels."""
    if pixels.dtype == np.uint8 and pixels.shape[2] in (1, 3):
        return fit_image(Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels), size, fit)
    if pixels.shape[:2] == size:
        return pixels
    channels = [fit_image(Image.fromarray(plane.astype(np.float32)), size, fit) for plane in np.moveaxis(pixels, 2, 0)]
    top = np.iinfo(pixels.dtype).max
    return np.concatenate(channels, axis=2).round().clip(0, top).astype(pixels.dtype)


def with_image(source: Source, use: Callable[[Image.Image], _T], formats: Sequence[str] = FORMATS) -> _T:
    """Opens an image and returns what `use` makes of it; raises a ValueError that names the file if that fails."""
    name = str(source) if isinstance(source, Path) else getattr(source, "name", "the image")
    try:
        with Image.open(source, formats=tuple(formats)) as image:
            _refuse_bomb(image)
            return use(image)
    except UnidentifiedImageError:
        reason = "it is not an image of a kind that Pillow reads"
    except MemoryError:  # not the image's fault
        raise
    except FileNotFoundError:
        reason = "there is no such file"
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        reason = f"it has more than {MAX_PIXELS:,} pixels"
    except Exception as error:  # Pillow's readers raise almost any exception on broken bytes
        reason = " ".join(str(error).split()) or type(error).__name__
    raise ValueError(f"cannot read {name}: {reason}")


def _refuse_bomb(image: Image.Image, frames: int = 1) -> None:
    if image.width * image.height * frames > MAX_PIXELS:
        raise Image.DecompressionBombError


def _is_grey(image: Image.Image) -> bool:
    if image.mode in ("P", "PA"):
        palette = np.reshape(image.getpalette("RGB") or [0, 0, 0], (-1, 3))
        return bool((palette == palette[:, :1]).all())
    return image.mode in ("1", "L", "LA", "La") or _is_deep(image)


def _is_deep(image: Image.Image) -> bool:
    return image.mode in ("I", "F") or image.mode.startswith("I;16")


def count_frames(image: Image.Image) -> int:
    """The number of frames to use as channels: those of a TIFF, if all are grey and of one size; else 1."""
    if image.format != "TIFF" or not (image.mode == "L" or _is_deep(image)):
        return 1
    kind, number = (image.mode, image.size), 1
    try:
        while number <= MAX_FRAMES:
            image.seek(number)
            if (image.mode, image.size) != kind:
                return 1
            number += 1
    except EOFError:
        return number
    except Exception:  # a broken later frame is no reason to refuse the first
        return 1
    finally:
        image.seek(0)
    return 1  # too many


def _stack(image: Image.Image, frames: int, depth: int) -> Iterator[UInt[np.ndarray, "H W"]]:
    for frame in range(frames):
        image.seek(frame)
        image.load()
        yield (np.asarray(_eight_bits(image, 1)) if depth == 8 else _sixteen_bits(image, 1)[..., 0])


def _sixteen_bits(image: Image.Image, channels: int) -> UInt16[np.ndarray, "H W c"]:
    if _is_deep(image):
        return np.repeat(_scaled(np.asarray(image), 65535)[..., None], channels, axis=2)
    pixels = np.asarray(_eight_bits(image, channels)).astype(np.uint16) * 257
    return pixels.reshape(image.height, image.width, channels)


def _eight_bits(image: Image.Image, channels: int) -> Image.Image:
    if _is_deep(image):
        image = Image.fromarray(_scaled(np.asarray(image), 255))
    if image.has_transparency_data:
        image = _on_white(image)
    # Convert to RGB first: some modes, such as CMYK, have no direct conversion to grey.
    if image.mode not in ("1", "L", "RGB"):
        image = image.convert("RGB")
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)


def _on_white(image: Image.Image) -> Image.Image:
    """In strips: whole copies of a large image would take several times its memory."""
    whole = Image.new("RGB", image.size)
    rows = max(2**20 // image.width, 1)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height))).convert("RGBA")
        whole.paste(Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip).convert("RGB"), (0, top))
    return whole


def _scaled(values: np.ndarray, highest: int) -> UInt8[np.ndarray, "H W"] | UInt16[np.ndarray, "H W"]:
    """Scales to 8 or 16 bits from the 16-bit range, or from [0, 1] or [0, 255] for floats.

    Values outside of these ranges are scaled from their own minimum and maximum. The range of the type does not work:
    Pillow opens some 16-bit formats as 32 bits, which would become black.
    """
    low, high = float(values.min()), float(values.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ValueError("it has pixels that are not finite")
    tops = (1.0, 255.0) if values.dtype.kind == "f" else (65535.0,)
    top = next((top for top in tops if low >= 0 and high <= top), None)
    start = 0.0
    if top is None:
        start, top = low, max(high - low, 1.0)
    scaled = np.empty(values.shape, np.uint8 if highest == 255 else np.uint16)
    rows = max(2**16 // max(values.shape[1], 1), 1)
    for first in range(0, len(values), rows):  # in strips: the whole image in 64 bits would take far more memory
        part = values[first : first + rows].astype(np.float64)
        scaled[first : first + rows] = np.round((part - start) / top * highest)
    return scaled
