"""Trained models on the Hugging Face hub: the model folder, with a model card."""

import json
import re
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

from smallvit.common.extras import first_line, need
from smallvit.common.files import read_json, write_bytes, write_safely
from smallvit.common.words import did_you_mean
from smallvit.runs.folder import RESULT, run_folder
from smallvit.runs.saved import CONFIG, WEIGHTS, Saved, from_pretrained, load_ensemble, model_folder
from smallvit.runs.scores import with_interval

CARD = "README.md"


def push(run: str | Path, repo: str, *, private: bool = False) -> str:
    """Uploads the model of a run or model folder to `repo`, such as "owner/name"; returns its URL."""
    hub = need("huggingface_hub", f"pushing to {repo}")
    with TemporaryDirectory() as folder:
        write_hub_folder(run, folder, repo)
        try:
            api = hub.HfApi()
            made = api.create_repo(repo, private=private, exist_ok=True)
            api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Upload a smallvit model")
        except Exception as error:  # the hub's many error types all mean that nothing was uploaded
            raise ValueError(
                f"cannot push to {repo} ({first_line(error)}): check the name, the network and `hf auth login`"
            ) from None
    return str(made)


def load(source: str | Path, *, revision: str | None = None) -> Saved:
    """Loads a trained model from a run folder, a model folder, or a Hugging Face repository such as "owner/name".

    The folder of a cross-validation is loaded as the ensemble of its models.

    Args:
        source: A local folder takes precedence over a repository of the same name.
        revision: Branch, tag or commit of the repository.
    """
    names = str(source).split("/")
    on_hub = len(names) == 2 and all(re.fullmatch(r"[\w][\w.-]*", name) for name in names)
    if Path(source).exists() or not on_hub or isinstance(source, Path):
        return load_ensemble(source)
    if Path(names[0]).is_dir():  # mistyped, such as runs/pets
        siblings = [path.name for path in Path(names[0]).iterdir()]
        raise ValueError(f"{source}: there is no such folder{did_you_mean(names[1], siblings)}")
    return pull(str(source), revision=revision)


def pull(repo: str, folder: str | Path | None = None, *, revision: str | None = None) -> Saved:
    """Loads a model that was pushed to `repo`, from the hub or from the hub's local cache.

    Args:
        repo: Such as "owner/name".
        folder: Also copy the model to this folder, which then works as a model folder in every command.
        revision: Branch, tag or commit of the repository.
    """
    if folder is not None and Path(folder).exists() and any(Path(folder).iterdir()):
        raise ValueError(f"{folder} exists and is not empty: choose another folder")
    downloaded, saved = _pull(repo, revision)
    if folder is not None:
        for name in (CONFIG, WEIGHTS):
            write_safely(Path(folder) / name, lambda path, name=name: copyfile(downloaded / name, path))
    return saved


def _pull(repo: str, revision: str | None) -> tuple[Path, Saved]:
    hub = need("huggingface_hub", f"pulling {repo}")
    try:
        folder = Path(hub.snapshot_download(repo, revision=revision, allow_patterns=[CONFIG, WEIGHTS]))
    except Exception as error:  # as above
        raise ValueError(f"cannot pull {repo} ({first_line(error)}): check the name and the network") from None
    try:
        return folder, from_pretrained(folder)
    except ValueError as error:
        raise ValueError(f"{repo} on the hub is not a smallvit model: {error}") from None


def write_hub_folder(run: str | Path, folder: str | Path, repo: str = "OWNER/NAME") -> None:
    """Writes the folder that `push` uploads: weights, configuration and a model card."""
    saved = from_pretrained(run)
    source, folder = model_folder(run), Path(folder)
    for name in (CONFIG, WEIGHTS):
        write_safely(folder / name, lambda path, name=name: copyfile(source / name, path))
    result = run_folder(source) / RESULT
    scores = read_json(result) if result.exists() else {}
    write_bytes(folder / CARD, model_card(saved, repo, scores).encode())


def model_card(saved: Saved, repo: str, scores: dict[str, Any]) -> str:
    preprocess = saved.preprocess
    height, width = preprocess.size
    colour = {1: "grey", 3: "RGB"}.get(preprocess.channels, f"{preprocess.channels} channels")
    fit = "cropped to the centre" if preprocess.fit == "crop" else "padded with its mean colour"
    rows = ""
    for name, part in (("test", "test"), ("validation", "val")):
        if (top1 := scores.get(f"{part}_top1")) is not None:
            interval = scores.get(f"{part}_interval")  # older versions did not save it
            text = f"{top1:.2f} %" if interval is None else with_interval(top1, interval)
            rows += f"| {name} | {text} |\n"
    accuracy = f"\n## Accuracy\n\n| images | top-1 |\n|---|---:|\n{rows}" if rows else ""
    return f"""---
library_name: smallvit
pipeline_tag: image-classification
tags: [vision-transformer, jax, flax]
---
# {saved.spec.name}, {len(saved.classes)} classes

A vision transformer for images of {height} x {width} pixels, trained with smallvit.

## Use

```python
import smallvit

model = smallvit.load({json.dumps(repo)})
for prediction in model.predict("photo.jpg"):  # any image file, or a folder of them
    print(prediction.classes[0], prediction.probabilities[0])
```
{accuracy}
## Classes

```json
{json.dumps(saved.classes, ensure_ascii=False)}
```

## Preprocessing

`model.predict` does it: {colour}, {fit} and resized to {height} x {width} (height x width), as
{preprocess.depth}-bit values from 0 to {preprocess.top}. The
network itself takes `(pixels / {preprocess.top} - mean) / std` with
mean {_numbers(preprocess.mean)} and std {_numbers(preprocess.std)}.
"""


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.4f}" if value >= 0.01 else f"{value:.3g}" for value in values)
