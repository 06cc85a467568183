"""The data set in the package, 12,000 images of Fashion-MNIST: works without a download."""

from importlib.resources import files

import numpy as np
from PIL import Image

from smallvit.data.arrays import Labelled, from_arrays
from smallvit.data.dataset import Dataset, Fit
from smallvit.data.splits import Fold

NAME = "fashion-mnist-10k"
FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def load_embedded(
    *, image_size: tuple[int, int] | None = None, fit: Fit = "crop", seed: int = 0, fold: Fold | None = None
) -> Dataset:
    """Loads the sheet written by tools/make_embedded.py: 100 images per row, sorted by class, train then test."""
    with (files("smallvit.data") / "fashion_mnist_10k.png").open("rb") as file, Image.open(file) as sheet:
        images = np.asarray(sheet).reshape(120, 28, 100, 28).transpose(0, 2, 1, 3).reshape(12_000, 28, 28, 1)
    labels = np.arange(10, dtype=np.int32)
    given = {
        "train": Labelled(images[:10_000], np.repeat(labels, 1000)),
        "test": Labelled(images[10_000:], np.repeat(labels, 200)),
    }
    return from_arrays(NAME, FASHION_CLASSES, given, image_size=image_size, fit=fit, seed=seed, fold=fold)
