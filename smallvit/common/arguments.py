"""Command-line arguments: their types, and parsing with tyro, with one-line errors."""

import io
import re
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

BORDER = re.compile(r"^│ ?|\s*│$")
RULE = re.compile(r"^[─-]+$")


def argument(metavar: str, default: str = "") -> Any:
    """How --help shows an argument; `default` describes what happens without it."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "")


Int = Annotated[int | None, argument("INT")]
Float = Annotated[float | None, argument("FLOAT")]
Text = Annotated[str | None, argument("TEXT")]
Folder = Annotated[Path | None, argument("PATH")]
Sides = Annotated[int | tuple[int, int] | None, argument("INT [INT]")]
Fields = Annotated[tuple[str, ...], argument("NAME=VALUE ...")]
Data = Annotated[str | None, tyro.conf.Positional, argument("DATA")]
Switch = tyro.conf.DisallowNone[bool | None]  # --flip, --no-flip, or neither
Device = Annotated[Literal["cpu", "gpu", "tpu"] | None, argument("cpu|gpu|tpu", "the fastest that jax finds")]
File = Annotated[str | None, argument("FILE")]
Run = Annotated[Path, tyro.conf.Positional, argument("RUN")]
Paths = Annotated[tuple[str, ...], tyro.conf.Positional, argument("PATH ...")]


def parse(command: Callable[..., Any], prog: str, args: list[str]) -> Callable[[], Any]:
    """Parses `args` and returns the call of `command` to make; wrong arguments raise a one-line ValueError."""

    @wraps(command)
    def later(*values: Any, **options: Any) -> Callable[[], Any]:
        return lambda: command(*values, **options)

    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            return tyro.cli(later, prog=prog, args=args, config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as end:
        if not end.code:  # --help
            raise
        what = one_line(errors.getvalue())
        raise ValueError(f"{what}{'' if what.endswith('?') else ':'} `{prog} --help` lists the options") from None


def one_line(box: str) -> str:
    """Extracts the message from tyro's error box, without the frame and the help of single options."""
    framed = [line for line in box.splitlines() if line.startswith("│")]
    lines = [BORDER.sub("", line) for line in framed] or [line[2:].rstrip() for line in box.splitlines()[2:]]  # ASCII
    rule = next((row for row, line in enumerate(lines) if RULE.match(line)), len(lines))
    text, rest = " ".join(line.strip() for line in lines[:rule]), lines[rule:]
    if wrong := re.match(r"Error parsing (\S+): no type matching (.+?) could be instantiated from \[(.*?)\]", text):
        option, kinds, given = wrong.groups()
        kinds = " or ".join(kind.strip("{}") for kind in kinds.split("|") if kind != "{None}")
        return f"{option} takes {kinds}, not {given.replace(',', '')}"
    if wrong := re.match(r"Error parsing (\S+): (.*)", text):
        return f"{wrong.group(1)}: {wrong.group(2)}"
    if wrong := re.match(r"Missing from .*?: (\S+)", text):
        return f"{wrong.group(1)} is missing"
    if wrong := re.match(r"[Ii]nvalid choice (.+) for argument '(.+)'\. Expected one of \((.*?),?\)", text):
        choices = sorted({*re.findall(r"'[^']*'", wrong.group(3))} - {"'None'"})
        return f"{wrong.group(2)} takes {'one of ' * (len(choices) > 1)}{', '.join(choices)}, not {wrong.group(1)}"
    if wrong := re.match(r"Missing value for argument '(.+)'", text):
        return f"{wrong.group(1)} needs a value"
    if wrong := re.match(r"Unrecognized options: (.*)", text):
        close = [line.strip().split(" ")[0].rstrip(",") for line in rest if re.match(r" +--", line)]
        return f"unknown {wrong.group(1)}" + (f", did you mean {' or '.join(close)}?" if close else "")
    return text[:1].lower() + text[1:].rstrip(".")
