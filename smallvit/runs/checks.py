"""Validation of a model folder's config.json before it is used: the folder may come from an untrusted source."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from smallvit.registry import preset

MOST_CLASSES, LONGEST_SIDE, LONGEST_LIST = 100_000, 4096, 64
LARGEST_KERNEL = 64  # each kernel position is a separate operation
# Fields that set how often a part with its own parameters is repeated.
_REPEATS = ("depth", "repeats", "stages", "hierarchies", "branches")


def check_config(config: Any) -> None:
    """Checks the types, limits and consistency of all fields; raises a ValueError."""
    model = _part(config, "model", ("name", "num_classes", "image_size", "fields"))
    if not isinstance(model["name"], str):
        raise ValueError(f"the model's name is {_shown(model['name'])}, but must be text")
    classes = config.get("classes")
    if not isinstance(classes, list) or not all(isinstance(name, str) and name for name in classes):
        raise ValueError("classes must be a list of names")
    if not 1 <= len(classes) <= MOST_CLASSES:
        raise ValueError(f"it has {len(classes):,} classes, but must have 1 to {MOST_CLASSES:,}")
    if len(set(classes)) < len(classes):
        raise ValueError(f"it has {len(set(classes)):,} different names for {len(classes):,} classes")
    if not _is_int(model["num_classes"]) or model["num_classes"] != len(classes):
        raise ValueError(f"the model has num_classes={_shown(model['num_classes'])}, but {len(classes):,} are named")
    size, preprocess = model["image_size"], config.get("preprocess")
    if not (isinstance(size, list) and len(size) == 2 and all(_is_int(n) and 1 <= n <= LONGEST_SIDE for n in size)):
        raise ValueError(f"image_size={_shown(size)} must be height and width, from 1 to {LONGEST_SIDE}")
    if not isinstance(preprocess, dict):
        raise ValueError("preprocess is missing or has no fields")
    if preprocess.get("size") != size:
        raise ValueError(f"the model takes images of {_shown(size)}, preprocess makes {_shown(preprocess.get('size'))}")
    if not isinstance(model["fields"], dict):
        raise ValueError("the model's fields must have names")
    check_fields(model["name"], model["fields"])


def check_fields(model: str, fields: Mapping[str, Any]) -> None:
    """Checks the names, types and signs of a model's fields, as they are in JSON."""
    annotations = {field.name: field.type for field in dataclass_fields(preset(model).cls)}
    for name, value in fields.items():
        if name not in ("num_classes", "image_size", "name", "parent") and name in annotations:
            if not _fits(value, annotations[name]):
                raise ValueError(f"{name}={_shown(value)} is of the wrong type")
            if any(number < 0 for number in _numbers(value)):
                raise ValueError(f"{name}={_shown(value)} is negative")
        else:
            raise ValueError(f"{model} has no field {_shown(name)}")


def check_weights(fields: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> None:
    """Checks that fields are plausible for arrays of these shapes, before a huge model is traced."""
    most = max(_count(shapes), LONGEST_SIDE)
    for name, value in fields.items():
        numbers = list(_numbers(value))
        if any(abs(number) > most for number in numbers):
            raise ValueError(f"{name}={_shown(value)} is more than the number of weights")
        if "kernel" in name and any(number > LARGEST_KERNEL for number in numbers):
            raise ValueError(f"{name}={_shown(value)} must be at most {LARGEST_KERNEL}")
        if any(word in name for word in _REPEATS) and sum(numbers) > len(shapes):
            raise ValueError(f"{name}={_shown(value)} is more than the number of weight arrays, {len(shapes)}")


def check_count(wanted: Sequence[Sequence[int]], given: Sequence[Sequence[int]]) -> None:
    if (needed := _count(wanted)) != (there := _count(given)):
        raise ValueError(f"it describes a model with {needed:,} weights, but there are {there:,}")


def _part(config: Any, name: str, names: Sequence[str]) -> dict[str, Any]:
    part = config.get(name) if isinstance(config, dict) else None
    if not isinstance(part, dict) or sorted(part) != sorted(names):
        raise ValueError(f"{name} must have the fields {', '.join(names)}")
    return part


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value fits an annotated type; lists stand for tuples."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in (int, float, bool):
        finite = isinstance(value, int | float) and abs(value) < float("inf")
        return finite and (kind is not int or value == int(value))
    if kind in (str, NoneType):
        return isinstance(value, kind)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in inner)
    if origin in (Union, UnionType):
        return any(_fits(value, kind) for kind in inner)
    if origin is tuple:
        if not isinstance(value, list) or len(value) > LONGEST_LIST:
            return False
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return len(value) == len(kinds) and all(map(_fits, value, kinds))
    return False


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield value


def _count(shapes: Sequence[Sequence[int]]) -> int:
    total = 0
    for shape in shapes:
        size = 1
        for side in shape:
            size *= side
        total += size
    return total


def _shown(value: Any) -> str:
    text = repr(value) if not _is_int(value) or abs(value) < 10**20 else "a number of more than 20 digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
