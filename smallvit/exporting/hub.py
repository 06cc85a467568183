"""Trained models to and from the Hugging Face hub: the model folder, with a model card."""

import json
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

from smallvit.common.extras import first_line, need
from smallvit.common.files import read_json, write_bytes, write_safely
from smallvit.runs.folder import RESULT, run_folder
from smallvit.runs.saved import CONFIG, WEIGHTS, Saved, from_pretrained, model_folder

CARD = "README.md"


def push(run: str | Path, repo: str, *, private: bool = False) -> str:
    """Uploads the model of a run folder or a model folder to `repo`, such as "owner/name"; returns its address."""
    hub = need("huggingface_hub", f"pushing to {repo}")
    with TemporaryDirectory() as folder:
        write_hub_folder(run, folder, repo)
        try:
            api = hub.HfApi()
            made = api.create_repo(repo, private=private, exist_ok=True)
            api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Upload a smallvit model")
        except Exception as error:  # the hub's many errors all mean that nothing was uploaded
            raise ValueError(
                f"cannot push to {repo} ({first_line(error)}): check name, network and `hf auth login`"
            ) from None
    return str(made)


def pull(repo: str, *, revision: str | None = None) -> Saved:
    """The model that was pushed to `repo`, from the hub or, once fetched, from the hub's cache on this machine."""
    hub = need("huggingface_hub", f"pulling {repo}")
    try:
        folder = hub.snapshot_download(repo, revision=revision, allow_patterns=[CONFIG, WEIGHTS])
    except Exception as error:  # as above
        raise ValueError(f"cannot pull {repo} ({first_line(error)}): check name and network") from None
    try:
        return from_pretrained(folder)
    except ValueError as error:
        raise ValueError(f"{repo} on the hub is no model of ours: {error}") from None


def write_hub_folder(run: str | Path, folder: str | Path, repo: str = "OWNER/NAME") -> None:
    """Makes the folder that `push` uploads: weights, configuration and a model card."""
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
    colour = "grey" if preprocess.channels == 1 else "RGB"
    fit = "cut to its middle" if preprocess.fit == "crop" else "filled up with its mean colour"
    rows = {"test": scores.get("test_top1"), "validation": scores.get("val_top1")}
    accuracy = "".join(f"| {name} | {top1:.2f} % |\n" for name, top1 in rows.items() if top1 is not None)
    accuracy = f"\n## Accuracy\n\n| images | top-1 |\n|---|---:|\n{accuracy}" if accuracy else ""
    return f"""---
library_name: smallvit
pipeline_tag: image-classification
tags: [vision-transformer, jax, flax]
---
# {saved.spec.name}, {len(saved.classes)} classes

A vision transformer for images of {height} x {width} pixels, trained from scratch with smallvit.

## Use

```python
from pathlib import Path

import smallvit
from smallvit.runs.prediction import Predictor

saved = smallvit.pull({json.dumps(repo)})
predict = Predictor(saved)
image = predict.decode(Path("photo.jpg"))  # any image file
probabilities = predict(image[None])[0]
print(saved.classes[probabilities.argmax()], probabilities.max())
```
{accuracy}
## Classes

```json
{json.dumps(saved.classes, ensure_ascii=False)}
```

## Preprocessing

`decode` does it: {colour}, {fit} and resized to {height} x {width} (height x width), as bytes from 0 to 255. The model
wants `(pixels / 255 - mean) / std` with mean {_numbers(preprocess.mean)} and std {_numbers(preprocess.std)}, which
`Predictor` applies.
"""


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)
