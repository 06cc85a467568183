"""Export of a trained model: uint8 (or uint16) images in, float32 logits out, checked before it is written.

Normalisation is included and the batch size is free, so users only resize their images. Everything is computed in
float32, whatever dtype the model was trained in.
"""

import json
import logging
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt
from safetensors import numpy as safetensors

from smallvit import kernels
from smallvit.common.extras import EXTRAS, first_line, need
from smallvit.common.files import write_bytes, write_json
from smallvit.common.paths import by_path, nested
from smallvit.data import held_out
from smallvit.exporting.compression import measure, to_half, to_int8
from smallvit.ops import plain_convolutions
from smallvit.runs.prediction import make_predict
from smallvit.runs.saved import Saved, describe, from_pretrained
from smallvit.runs.scores import WHICH
from smallvit.runs.source import own_data

Format = Literal["safetensors", "stablehlo", "onnx"]
Call = Callable[[UInt[np.ndarray, "b H W c"]], Float32[np.ndarray, "b k"]]

PLATFORMS = ("cpu", "cuda", "tpu")
TOLERANCE = 1e-4
OLDEST_OPSET = 18  # oldest tested version


def export(
    run: str | Path,
    format: Format,
    out: str | Path | None = None,
    *,
    opset: int | None = None,
    quantize: Literal["int8"] | None = None,
    half: bool = False,
) -> Path:
    """Exports a trained model to a file, with its inputs and outputs described in `out`.json.

    The file is read back and compared with the model before anything is written. With `quantize` or `half`, accuracy
    and speed are also measured on the run's test images, next to float32; `out`.json has them as `measured`.

    Args:
        run: A run folder or its model/.
        format: "safetensors" (weights only), "stablehlo" (a program for JAX) or "onnx" (a program for ONNX runtimes).
        out: File to write. Defaults to export/model.FORMAT in the run folder, or model-int8.onnx or model-half.onnx.
        opset: Version of the ONNX operators. Defaults to that of jax2onnx.
        quantize: "int8" exports an ONNX program that computes in 8-bit integers, calibrated on the run's validation
            images.
        half: Export an ONNX program that computes in 16-bit floats.

    Returns:
        The path of the file.
    """
    if format not in get_args(Format):
        raise ValueError(f"unknown format {format!r}: choose {', '.join(get_args(Format))}")
    if format != "onnx" and (opset is not None or quantize is not None or half):
        raise ValueError(
            f"opset, quantize and half are for onnx: leave them out, or export to onnx instead of {format}"
        )
    if opset is not None and opset < OLDEST_OPSET:
        raise ValueError(
            f"opset={opset} must be at least {OLDEST_OPSET}: older versions lack operators that models need"
        )
    if quantize not in (None, "int8"):
        raise ValueError(f"unknown quantization {quantize!r}: choose int8")
    if quantize and half:
        raise ValueError("quantize and half exclude each other: choose one")
    kind = quantize or ("half" if half else None)
    name = f"model-{kind}.{format}" if kind else f"model.{format}"
    path = Path(run) / "export" / name if out is None else Path(out)
    if path.suffix != f".{format}":
        raise ValueError(f"{path} must end in .{format}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the name of a file")
    saved = from_pretrained(run)
    try:
        data = own_data(run, saved) if kind else None
    except ValueError as error:
        raise ValueError(f"{kind} is measured on the run's data, which is missing: leave it out ({error})") from None
    content, described = convert(saved, format, opset), facts(saved, format)
    if data is not None:
        images, whole = held_out(data, saved.classes, saved.preprocess), content
        try:
            content = to_half(whole) if half else to_int8(whole, data.val.images)
        except Exception as error:  # as in `convert`
            raise ValueError(f"{saved.spec.name} cannot be exported as {kind} ({first_line(error)})") from error
        measured = {"float32": measure(whole, images.split), "compressed": measure(content, images.split)}
        counted = {"part": WHICH[images.part], "images": len(images.split)}
        described |= {"compression": kind, "measured": counted | measured}
    write_bytes(path, content)
    write_json(path.with_name(f"{path.name}.json"), described)
    return path


def facts(saved: Saved, format: Format) -> dict[str, Any]:
    """Model, class names, preprocessing, and the inputs and outputs of a program."""
    config = describe(saved.spec, saved.classes, saved.preprocess, saved.calibration)
    if format == "safetensors":
        return config
    height, width = saved.preprocess.size
    dtype, shape = str(np.dtype(saved.preprocess.dtype)), ["batch", height, width, saved.preprocess.channels]
    images = {"name": "images", "type": dtype, "shape": shape}
    logits = {"name": "logits", "type": "float32", "shape": ["batch", len(saved.classes)]}
    return {**config, "input": images, "output": logits}


def convert(saved: Saved, format: Format, opset: int | None = None) -> bytes:
    """The content of the export file, compared with the model."""
    make, read = {
        "safetensors": (_safetensors, _read_safetensors),
        "stablehlo": (_stablehlo, _read_stablehlo),
        "onnx": (partial(_onnx, opset=opset), _read_onnx),
    }[format]
    for package in EXTRAS.get(format, ()):
        need(package, f"export to {format}")
    predict = make_predict(saved.model.clone(dtype=jnp.float32), saved.preprocess)
    variables, normalisation = jax.tree.map(jnp.asarray, saved.variables), saved.preprocess.normalisation
    shape = (3, *saved.preprocess.size, saved.preprocess.channels)
    images = np.random.default_rng(0).integers(0, saved.preprocess.top + 1, shape).astype(saved.preprocess.dtype)
    expected = np.asarray(jax.jit(predict)(variables, images, normalisation))
    try:
        with kernels.disabled(), plain_convolutions():  # the file is for other machines
            content = make(saved, lambda images: predict(variables, images, normalisation))
        call = read(saved, content)
        results = [call(images[:number]) for number in (1, 3)]
    except Exception as error:  # converters and runtimes raise any kind of exception
        raise ValueError(f"{saved.spec.name} cannot be exported to {format} ({first_line(error)})") from error
    if not all(np.allclose(logits, expected[: len(logits)], TOLERANCE, TOLERANCE) for logits in results):
        off = max(np.abs(logits - expected[: len(logits)]).max() for logits in results)
        raise ValueError(
            f"the {format} export differs from the model by {off:.2g}, more than {TOLERANCE:g}: nothing was written"
        )
    return content


def _safetensors(saved: Saved, predict: Callable[[Array], Array]) -> bytes:
    arrays = {path: np.asarray(array) for path, array in by_path(saved.variables).items()}
    return safetensors.save(arrays, {"config": json.dumps(facts(saved, "safetensors"))})


def _read_safetensors(saved: Saved, content: bytes) -> Call:
    variables = nested(safetensors.load(content))
    predict = jax.jit(make_predict(saved.model.clone(dtype=jnp.float32), saved.preprocess))
    return lambda images: np.asarray(predict(variables, images, saved.preprocess.normalisation))


def _stablehlo(saved: Saved, predict: Callable[[Array], Array]) -> bytes:
    shape = (*jax.export.symbolic_shape("batch"), *saved.preprocess.size, saved.preprocess.channels)
    program = jax.export.export(jax.jit(predict), platforms=PLATFORMS)(
        jax.ShapeDtypeStruct(shape, saved.preprocess.dtype)
    )
    return bytes(program.serialize())


def _read_stablehlo(saved: Saved, content: bytes) -> Call:
    program = jax.export.deserialize(bytearray(content))
    return lambda images: np.asarray(program.call(images))


def _onnx(saved: Saved, predict: Callable[[Array], Array], opset: int | None) -> bytes:
    jax2onnx, onnx = import_module("jax2onnx"), import_module("onnx")
    # They log a line for every inner value without a type, and for packages that are not needed.
    for name in ("onnx_ir", "jax2onnx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    chosen = {} if opset is None else {"opset": opset}
    shape = (*jax.export.symbolic_shape("batch"), *saved.preprocess.size, saved.preprocess.channels)
    with jax.numpy_rank_promotion("allow"):  # jax2onnx's convolution adds the bias by broadcasting
        program = jax2onnx.to_onnx(
            predict,
            [jax.ShapeDtypeStruct(shape, saved.preprocess.dtype)],
            model_name=saved.spec.name,
            input_names=["images"],
            output_names=["logits"],
            **chosen,
        )
    values = facts(saved, "onnx")
    onnx.helper.set_model_props(program, {name: json.dumps(values[name]) for name in values})
    return program.SerializeToString()


def _read_onnx(saved: Saved, content: bytes) -> Call:
    session = import_module("onnxruntime").InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda images: session.run(["logits"], {"images": images})[0]
