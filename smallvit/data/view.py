"""Images of any depth and number of channels, converted for display."""

import numpy as np
from jaxtyping import UInt, UInt8


def as_picture(image: UInt[np.ndarray, "H W c"]) -> UInt8[np.ndarray, "H W _"]:
    """Converts to 8-bit grey or RGB: the first three channels, or the first of two; 16 bits are contrast-stretched."""
    channels = image.shape[-1]
    if channels not in (1, 3):
        image = image[..., :3] if channels > 3 else image[..., :1]
    if image.dtype == np.uint8:
        return image
    low, high = float(image.min()), float(image.max())
    return np.round((image.astype(np.float32) - low) / max(high - low, 1) * 255).astype(np.uint8)
