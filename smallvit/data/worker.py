"""A process that decodes images for another: it takes their bytes on standard input and answers on standard output.

It imports neither jax nor a model, takes little memory, and can be killed at any moment. Images that make a decoder
hang, crash or ask for all memory end this process alone; see `smallvit.serving.decoders`.
"""

import json
import math
import os
import signal
import struct
import sys
from contextlib import suppress
from typing import Any, BinaryIO

from smallvit.data.decoding import Bounded, decode, header

try:
    import resource
except ImportError:  # on Windows, where a process has no limits of this kind
    resource = None

ASK = struct.Struct("<Q")  # bytes that follow
ANSWER = struct.Struct("<BQ")  # what it is, bytes that follow: pixels or words
PIXELS, BROKEN, LARGE, MEMORY, READY = range(5)

BYTES = 16  # of memory that a pixel takes while it is decoded, at most: four of colour and opacity, in copies
JPEG_BYTES = 8  # they are shrunk on the way, but progressive ones hold all their coefficients


def main() -> None:
    options = json.loads(sys.argv[1])
    asked, answered = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    _limit(options["memory"])
    _write(answered, READY, b"")
    while len(start := asked.read(ASK.size)) == ASK.size:
        (length,) = ASK.unpack(start)
        _answer(asked.read(length), answered, options)


def _answer(content: bytes, answered: BinaryIO, options: dict[str, Any]) -> None:
    _begin(options["seconds"])
    try:
        kind, body = _decode(content, options)
    except ValueError as error:
        kind, body = BROKEN, str(error).encode(errors="replace")
    except MemoryError:
        kind, body = MEMORY, b""
    _end()
    _write(answered, kind, body)


def _write(answered: BinaryIO, kind: int, body: bytes) -> None:
    answered.write(ANSWER.pack(kind, len(body)) + body)
    answered.flush()


def _decode(content: bytes, options: dict[str, Any]) -> tuple[int, bytes]:
    found = header(Bounded(content), options["kinds"])
    pixels = found.height * found.width * found.frames
    if pixels > options["pixels"]:
        raise ValueError(f"it has {pixels:,} pixels, more than {options['pixels']:,}")
    if pixels * (JPEG_BYTES if content.startswith(b"\xff\xd8") else BYTES) > options["large"]:
        return LARGE, b""
    size, depth = tuple(options["size"]), options.get("depth", 8)
    image = decode(Bounded(content), size, options["channels"], options["fit"], options["kinds"], depth)
    return PIXELS, image.tobytes()


def _limit(memory: int) -> None:
    """To so many bytes beyond those of the start, and to no byte of any file."""
    sys.dont_write_bytecode = True
    if resource is None:
        return
    with suppress(OSError, ValueError):  # where there is no /proc the process is limited in time alone
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + memory, taken + memory))
    for kind in ("RLIMIT_FSIZE", "RLIMIT_CORE"):
        with suppress(OSError, ValueError, AttributeError):
            resource.setrlimit(getattr(resource, kind), (0, 0))


def _begin(seconds: float) -> None:
    """The kernel ends the process that takes longer, whoever is left to notice: in processor time, or by the clock."""
    if resource is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        with suppress(OSError, ValueError):
            most = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 1)


def _end() -> None:
    if resource is not None:
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
