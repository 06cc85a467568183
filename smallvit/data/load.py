"""Any source by its name or path."""

from pathlib import Path

from smallvit.data import embedded
from smallvit.data.dataset import Dataset, Fit


def load_data(
    source: str | Path | None = None,
    *,
    image_size: int | tuple[int, int] | None = None,
    fit: Fit = "crop",
    seed: int = 0,
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
) -> Dataset:
    """The data set in the package (None)."""
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    return embedded.load_embedded(image_size=size, fit=fit, seed=seed)
