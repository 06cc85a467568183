"""Models by name: one dictionary, filled by the files of `models/`."""

from dataclasses import fields as dataclass_fields
from fnmatch import fnmatch
from importlib import import_module
from typing import Any, NamedTuple

from smallvit.common.words import did_you_mean
from smallvit.layers import Classifier
from smallvit.ops import Size


class Preset(NamedTuple):
    cls: type[Classifier]
    fields: dict[str, Any]


PRESETS: dict[str, Preset] = {}


def register(cls: type[Classifier], **presets: dict[str, Any]) -> None:
    """Registers named configurations of a class; each has the `image_size` that `create_model` defaults to.

    A field may be a function of the image size, such as a patch size of an eighth of the image.
    """
    for name, fields in presets.items():
        if name in PRESETS or name.startswith("sl_"):
            raise ValueError(f"model name {name!r} is taken, or starts with sl_, which stands for SPT and LSA")
        PRESETS[name] = Preset(cls, fields)


def list_models(pattern: str = "*") -> list[str]:
    """All model names that match a pattern, as in `list_models("vit*")`."""
    import_module("smallvit.models")  # registers the presets
    return sorted(name for base in PRESETS for name in (base, f"sl_{base}") if fnmatch(name, pattern))


def create_model(name: str, *, num_classes: int = 1000, image_size: Size | None = None, **fields: Any) -> Classifier:
    """Creates a model by name; further fields of its class override the preset's.

    The prefix `sl_` adds Shifted Patch Tokenization and Locality Self-Attention to any model.
    """
    cls, defaults = preset(name)
    known = [f.name for f in dataclass_fields(cls) if f.name not in ("parent", "name")]
    for field in fields:
        if field not in known:
            raise ValueError(
                f"{name} has no field {field!r}{did_you_mean(field, known) or '.'} Its fields: {', '.join(known)}"
            )

    add_ons = {"spt": True, "lsa": True} if name.startswith("sl_") else {}
    size = defaults["image_size"] if image_size is None else image_size
    # Only the preset's functions are called: a user's field may be callable itself, as jnp.bfloat16 is.
    values = {
        field: value(size) if callable(value) else value for field, value in defaults.items() if field not in fields
    }
    return cls(**{**values, **add_ons, **fields, "num_classes": num_classes, "image_size": size})


def preset(name: str) -> Preset:
    """The class and fields of a model name."""
    if name not in list_models():
        raise ValueError(
            f"unknown model {name!r}{did_you_mean(name, list_models()) or ':'} `smallvit models` lists all"
        )
    return PRESETS[name.removeprefix("sl_")]
