"""`smallvit export`, and `push` and `pull` for the hub."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from smallvit.common.arguments import File, Int, Run, Text, argument
from smallvit.common.text import shown

Repo = Annotated[str, tyro.conf.Positional, argument("REPO")]
ModelFolder = Annotated[Path, tyro.conf.Positional, argument("FOLDER")]


def export(
    run: Run,
    /,
    format: Literal["safetensors", "stablehlo", "onnx"],
    out: File = None,
    opset: Int = None,
    quantize: Annotated[Literal["int8"] | None, tyro.conf.arg(metavar="int8", help_behavior_hint="")] = None,
    half: bool = False,
) -> None:
    """Export a trained model for other programs, checked against the original.

    Args:
        run: A run folder or its model/.
        format: Weights only, a program for JAX, or a program for ONNX runtimes.
        out: File to write; by default RUN/export/model.FORMAT, or model-int8.onnx or model-half.onnx.
        opset: Version of the ONNX operators.
        quantize: ONNX in 8-bit integers, calibrated on the run's validation images and scored on its test images.
        half: ONNX in 16-bit floats, scored on the run's test images.
    """
    from smallvit.common.files import read_json
    from smallvit.exporting.compression import describe
    from smallvit.exporting.formats import TOLERANCE, export

    path = export(run, format, out, opset=opset, quantize=quantize, half=half)
    if quantize or half:
        print(shown(f"{path}; {path.name}.json describes its use"))
        print("\n".join(describe(read_json(path.with_name(f"{path.name}.json"))["measured"])))
        return
    size = path.stat().st_size / 2**20
    wrote = f"{path} ({size:.1f} MiB) matches the model's logits to {TOLERANCE:g}; {path.name}.json describes its use"
    print(shown(wrote))


def push(run: Run, repo: Repo, /, private: bool = False) -> None:
    """Upload a trained model to the Hugging Face hub, with a model card.

    Args:
        run: A run folder or its model/.
        repo: Repository on the hub, such as owner/name; created if it does not exist.
        private: Create it as a private repository.
    """
    from smallvit.exporting.hub import push

    print(shown(f"The model is at {push(run, repo, private=private)}"))


def pull(repo: Repo, folder: ModelFolder, /, revision: Text = None) -> None:
    """Download a model that was pushed to the Hugging Face hub.

    Args:
        repo: Repository on the hub, such as owner/name.
        folder: New folder for the model; every command that takes a run takes it.
        revision: Branch, tag or commit of the repository.
    """
    from smallvit.exporting.hub import pull

    saved = pull(repo, folder, revision=revision)
    print(shown(f"Wrote {saved.spec.name} for {len(saved.classes)} classes to {folder}"))
