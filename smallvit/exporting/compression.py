"""Smaller ONNX programs, with 8-bit integers or 16-bit floats."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt

from smallvit.data import Split

Compression = Literal["int8", "half"]

SEEN = 128  # images for the calibration of activation ranges
BATCH = 16
COSTLY = 1.0  # percentage points of accuracy


def to_int8(program: bytes, images: UInt[np.ndarray, "n H W c"]) -> bytes:
    """Quantizes convolutions and matrix products to 8-bit integers, calibrated on at most 128 of these images."""
    quantization = import_module("onnxruntime.quantization")
    images = images[
        np.unique(np.linspace(0, len(images) - 1, SEEN).astype(int))
    ]  # evenly spaced, since images are sorted by class
    batches = iter([{"images": np.asarray(images[start : start + BATCH])} for start in range(0, len(images), BATCH)])

    class Reader(quantization.CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(batches, None)

    with TemporaryDirectory() as folder, _quiet():
        quantization.quantize_static(
            _folded(program, Path(folder)),
            Path(folder) / "int8.onnx",
            Reader(),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=["Conv", "MatMul", "Gemm"],
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        )
        return (Path(folder) / "int8.onnx").read_bytes()


def to_half(program: bytes) -> bytes:
    """Converts everything but the logits to 16-bit floats."""
    float16, onnx = import_module("onnxruntime.transformers.float16"), import_module("onnx")
    with TemporaryDirectory() as folder, _quiet():
        model = onnx.load(_folded(program, Path(folder)))
        return float16.convert_float_to_float16(model, keep_io_types=True).SerializeToString()


def measure(program: bytes, split: Split) -> dict[str, Any]:
    """Measures accuracy and speed on labelled images, and the size of the program."""
    runtime = import_module("onnxruntime")
    session = runtime.InferenceSession(program, providers=["CPUExecutionProvider"])
    session.run(["logits"], {"images": np.asarray(split.images[:BATCH])})
    right, times = 0, []
    for start in range(0, len(split), BATCH):
        images = np.asarray(split.images[start : start + BATCH])
        start_time = time.monotonic()
        (logits,) = session.run(["logits"], {"images": images})
        times.append((time.monotonic() - start_time) / len(images))
        if not np.isfinite(logits).all():
            raise ValueError(
                "the compressed program returns NaN or infinity: nothing was written, export it in float32"
            )
        right += int((logits.argmax(axis=1) == split.labels[start : start + BATCH]).sum())
    return {
        "top1": round(100 * right / len(split), 3),
        "images_per_second": round(1 / float(np.median(times)), 1),
        "bytes": len(program),
    }


def describe(measured: dict[str, Any]) -> list[str]:
    """Formats the `measured` entry of the program's JSON file for the user."""
    before, after = measured["float32"], measured["compressed"]
    rows = [
        f"accuracy {before['top1']:.2f} -> {after['top1']:.2f} % on {measured['images']:,} {measured['part']} images",
        f"speed {before['images_per_second']:,.0f} -> {after['images_per_second']:,.0f} images/s, batch size {BATCH}",
        f"size {before['bytes'] / 2**20:.2f} -> {after['bytes'] / 2**20:.2f} MiB",
    ]
    if (cost := before["top1"] - after["top1"]) > COSTLY:
        lost = round(cost * measured["images"] / 100)
        what = f"{cost:.1f} points of accuracy, {lost:,} of {measured['images']:,} images"
        rows.append(f"warning: this costs {what}; export in float32 to keep them")
    if after["images_per_second"] < before["images_per_second"]:
        rows.append("not faster on this machine, but smaller; it may be faster on others")
    return rows


def _folded(program: bytes, folder: Path) -> str:
    """Writes the program with constants folded: weights that are transposed at run time cannot be quantized."""
    runtime, onnx = import_module("onnxruntime"), import_module("onnx")
    path = str(folder / "folded.onnx")
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC  # standard operators only
    options.optimized_model_filepath = path
    runtime.InferenceSession(program, options, providers=["CPUExecutionProvider"])
    model = onnx.load(path)
    used = {node.domain for node in model.graph.node}
    for unused in [opset for opset in model.opset_import if opset.domain not in used | {""}]:
        model.opset_import.remove(unused)
    onnx.save(model, path)
    return path


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the converters' warnings, which are meant for their callers."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
