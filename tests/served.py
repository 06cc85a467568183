"""A tiny model whose answers are known, and images for it; for the tests of `smallvit serve`."""

import io
import os
import signal
import struct
import subprocess
import sys
import zlib
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from smallvit.data import Preprocess
from smallvit.runs.prediction import Predictor
from smallvit.runs.saved import Spec, save_model

CLASSES = ("blue", "green", "red")
IMAGE = {"Content-Type": "image/png"}


def save_tiny(folder: Path) -> None:
    spec = Spec("sl_vit_tiny_data", 3, (12, 12), dict(dim=16, depth=2, heads=2, mlp_dim=16, patch_size=4))
    variables = jax.jit(spec.create().init)(jax.random.key(0), jnp.zeros((1, 12, 12, 3)))
    save_model(folder, spec, variables, CLASSES, Preprocess((12, 12), 3, "crop", (0.5,) * 3, (0.25,) * 3))


def tiny_predictor(folder: Path) -> Predictor:
    save_tiny(folder)
    return Predictor(folder, largest=4)


def photo(seed: int = 0, kind: str = "png", size: tuple[int, int] = (12, 12)) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def bomb(side: int = 60_000) -> bytes:
    """A PNG of a few bytes that says it is huge."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    start = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + start + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


BROKEN = {
    "truncated": photo(size=(40, 40))[:900],
    "text": b"this is not an image" * 10,
    "bomb": bomb(),
    "zeros": bytes(2000),
    "html": b"<!DOCTYPE html><script>alert(1)</script>",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(/etc/passwd) run\n",
}


@contextmanager
def started(
    run: Path, *args: object, env: Mapping[str, str] = os.environ, module: str = "smallvit"
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command itself, on a free port: its address and its process."""
    command = [sys.executable, "-m", module, "serve", str(run), "--port", "0", *map(str, args)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(2)]
            assert lines[1].endswith(" is ready; stop it with Ctrl-C\n"), lines
            yield lines[1].split()[0], process
        finally:
            process.kill()


@contextmanager
def serving(
    run: Path, *args: object, env: Mapping[str, str] = os.environ, module: str = "smallvit"
) -> Iterator[tuple[str, int]]:
    """As `started`, ended by Ctrl-C."""
    with started(run, *args, env=env, module=module) as (address, process):
        yield address, process.pid
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def drop(page: Any, content: bytes, event: str = "drop") -> None:
    """An image onto the page, as a hand would drop it, or paste it."""
    page.evaluate(
        """([content, event]) => {
            const bytes = Uint8Array.from(atob(content), (c) => c.charCodeAt(0));
            const data = new DataTransfer();
            data.items.add(new File([bytes], "dropped.png", { type: "image/png" }));
            const options = { bubbles: true, cancelable: true };
            document.getElementById("drop").dispatchEvent(event === "drop"
                ? new DragEvent("drop", { ...options, dataTransfer: data })
                : new ClipboardEvent("paste", { ...options, clipboardData: data }));
        }""",
        [b64encode(content).decode(), event],
    )
