"""Fixed position embeddings of a token grid."""

import numpy as np
from jaxtyping import Float


def sincos_2d(grid: tuple[int, int], dim: int, temperature: float = 10_000.0) -> Float[np.ndarray, "n d"]:
    """Sine and cosine of x, then of y, at dim / 4 frequencies (https://arxiv.org/abs/2104.02057)."""
    if dim % 4 or dim < 8:
        raise ValueError(
            f"dim={dim} must be a multiple of 4, at least 8: each of sin x, cos x, sin y, cos y takes a quarter"
        )
    y, x = np.mgrid[: grid[0], : grid[1]].reshape(2, -1, 1)
    omega = temperature ** -np.linspace(0, 1, dim // 4)[None]
    waves = np.sin(x * omega), np.cos(x * omega), np.sin(y * omega), np.cos(y * omega)
    return np.concatenate(waves, axis=1).astype(np.float32)
