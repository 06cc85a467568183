"""The `smallvit` command: parse, call, print."""

import errno
import os
import sys
from math import isfinite
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from smallvit.compare import CompareConfig
from smallvit.env import keep_compiled, restart_fast
from smallvit.train import Stopped, TrainConfig


def models(
    pattern: Annotated[str, tyro.conf.Positional] = "*",
    /,
    image_size: int | None = None,
    num_classes: int = 1000,
) -> None:
    """List the models: name, paper, parameters, multiply-adds, and whether SPT and LSA apply.

    Args:
        pattern: Which names, as in "vit*".
        image_size: Count at this size instead of each model's own.
        num_classes: Classes of the head that is counted.
    """
    from smallvit.count import describe  # here, so that --help need not wait for jax
    from smallvit.registry import list_models

    names = [name for name in list_models(pattern) if pattern.startswith("sl_") or not name.startswith("sl_")]
    if not names:
        raise ValueError(f"no model matches {pattern!r}: `smallvit models` lists them all")
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("paper", no_wrap=True)
    for title in ("image", "parameters", "multiply-adds"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("SPT")
    table.add_column("LSA")
    console = Console() if sys.stdout.isatty() else Console(width=160)
    with console.status("counting") as status:
        for name in names:
            status.update(f"counting {name}")
            row = describe(name, image_size=image_size, num_classes=num_classes)
            table.add_row(
                name,
                f"[link={row.paper}]{row.paper.removeprefix('https://').replace('arxiv.org/abs/', 'arXiv ')}[/link]",
                "x".join(map(str, row.image_size)),
                f"{row.parameters:,}",
                f"{row.multiply_adds / 1e6:,.0f} M",
                "yes" if row.spt else "no",
                "yes" if row.lsa else "no",
            )
    console.print(table)
    if not pattern.startswith("sl_"):
        console.print("Put sl_ before any name to have it with SPT and LSA on.", style="dim")


def train(config: Annotated[TrainConfig, tyro.conf.arg(name="")]) -> None:
    """Train a model on a folder of images, from scratch."""
    from smallvit.train import train

    train(config)


def compare(config: Annotated[CompareConfig, tyro.conf.arg(name="")]) -> None:
    """Train several models with several seeds: the table of a paper."""
    from smallvit.compare import compare, markdown

    table = compare(config)
    print(f"\n{markdown(table)}\n{config.out}/table.md, .csv and .png have it, {config.out}/runs the runs")


def export(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    /,
    format: Literal["safetensors", "stablehlo", "onnx"],
    out: Path | None = None,
) -> None:
    """Write a trained model for other programs, checked against the original.

    Args:
        run: A run folder or a model folder.
        format: Weights alone, a program for JAX, or a program for ONNX runtimes.
        out: The file to write; export/model.FORMAT in the folder if not given.
    """
    from smallvit.export import TOLERANCE, export_model

    path = export_model(run, format, out)
    size = path.stat().st_size / 2**20
    print(f"{path} ({size:.1f} MiB) gives the model's logits to {TOLERANCE:g}; {path.name}.json says how to use it")


def serve(
    run: Annotated[Path, tyro.conf.Positional],
    /,
    host: str = "127.0.0.1",
    port: int = 8000,
    examples: Path | None = None,
    upload_mb: float = 32,
    images: int = 64,
    queue: int = 512,
    seconds: float = 30,
) -> None:
    """Serve a trained model: a page to try it in a browser, and JSON for programs.

    Args:
        run: A run folder, or its model/.
        host: The address to listen on; 0.0.0.0 lets other machines in.
        port: The port to listen on; 0 takes any that is free.
        examples: A folder with images that the page offers to try.
        upload_mb: The most megabytes of one request.
        images: The most images of one request.
        queue: The most images that may wait for an answer.
        seconds: The longest that an upload, and that an answer, may take.
    """
    try:
        from smallvit.serve import Limits
        from smallvit.serve import serve as serve_model
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "python_multipart"):
            raise
        raise ValueError(f"{error.name} is needed to serve a model: pip install 'smallvit[serve]'") from None
    keep_compiled()
    upload = int(upload_mb * 2**20) if isfinite(upload_mb) else 0
    limits = Limits(upload=upload, memory=max(8 * upload, 1), images=images, queue=queue, seconds=seconds)
    serve_model(run, host=host, port=port, examples=examples, limits=limits)


def main() -> None:
    restart_fast()
    commands = {"train": train, "compare": compare, "models": models, "export": export, "serve": serve}
    try:
        tyro.extras.subcommand_cli_from_dict(
            commands,
            prog="smallvit",
            description="Vision transformers that learn from small image data sets.",
            config=(tyro.conf.OmitArgPrefixes,),
        )
    except ValueError as error:
        _end(str(error), 2)
    except Stopped as error:
        _end(str(error), 1)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES):
            raise
        _end(f"{error.filename or 'a file'} cannot be written: {error.strerror}", 1)


def _end(line: str, code: int) -> None:
    print(f"smallvit: {line}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
