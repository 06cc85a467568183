"""Image sources (folders, arrays, known data sets), the data sets they become, and the order of the batches."""

from typing import TYPE_CHECKING

from smallvit.common.lazy import lazy

if TYPE_CHECKING:
    from smallvit.data.batches import batch_indices, eval_batches, order
    from smallvit.data.dataset import Dataset, Fit, Normalisation, Preprocess, Scanned, Split
    from smallvit.data.decoding import decode
    from smallvit.data.find import find_images
    from smallvit.data.labelled import HeldOut, held_out, load_held_out
    from smallvit.data.load import load_data, scan_data

__all__ = [
    "Dataset",
    "Fit",
    "HeldOut",
    "Normalisation",
    "Preprocess",
    "Scanned",
    "Split",
    "batch_indices",
    "decode",
    "eval_batches",
    "find_images",
    "held_out",
    "load_data",
    "load_held_out",
    "order",
    "scan_data",
]
__getattr__, __dir__ = lazy(__name__, __file__)
