"""A process that decodes images for a server: it reads their bytes from stdin and writes the results to stdout.

It imports neither jax nor a model, uses little memory and can be killed at any time. An image that makes a decoder
hang, crash or exhaust memory ends only this process; see `smallvit.serving.decoders`.
"""

import json
import math
import os
import signal
import struct
import sys
from contextlib import suppress
from typing import Any, BinaryIO

from PIL import Image

from smallvit.data.decoding import Bounded, count_frames, decode_opened, with_image

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None

ASK = struct.Struct("<Q")  # number of bytes that follow
ANSWER = struct.Struct("<BQ")  # type of the answer, number of bytes that follow: pixels or a message
PIXELS, BROKEN, LARGE, MEMORY, READY = range(5)

BYTES = 16  # peak memory per pixel during decoding: four bytes of colour and opacity, in copies
JPEG_BYTES = 8  # JPEGs are shrunk while decoding, but progressive ones keep all their coefficients


def main() -> None:
    options = json.loads(sys.argv[1])
    asked, answered = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library's prints must not mix with the answers
    _lower_priority(options.get("nice", 0))
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
    def within_limits(image: Image.Image) -> tuple[int, bytes]:
        number = image.height * image.width * count_frames(image)
        if number > options["pixels"]:
            return BROKEN, f"it has {number:,} pixels, more than {options['pixels']:,}".encode()
        if number * (JPEG_BYTES if content.startswith(b"\xff\xd8") else BYTES) > options["large"]:
            return LARGE, b""
        size, depth = tuple(options["size"]), options.get("depth", 8)
        return PIXELS, decode_opened(image, size, options["channels"], options["fit"], depth).tobytes()

    return with_image(Bounded(content), within_limits, options["kinds"])


def _lower_priority(nice: int) -> None:
    if nice and hasattr(os, "nice"):  # not on Windows
        os.nice(nice)
        # Linux may schedule each session as a group, and then only compares the priorities of groups.
        with suppress(OSError), open("/proc/self/autogroup", "w") as group:
            group.write(str(nice))


def _limit(memory: int) -> None:
    """Limits the memory to `memory` bytes beyond the current use, and forbids writing files."""
    sys.dont_write_bytecode = True
    if resource is None:
        return
    with suppress(OSError, ValueError):  # without /proc, only the time is limited
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + memory, taken + memory))
    for kind in ("RLIMIT_FSIZE", "RLIMIT_CORE"):
        with suppress(OSError, ValueError, AttributeError):
            resource.setrlimit(getattr(resource, kind), (0, 0))


def _begin(seconds: float) -> None:
    """Makes the kernel end the process if it takes longer, in CPU time or wall time, even if its parent is gone."""
    if resource is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        with suppress(OSError, ValueError):
            limit = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 1)


def _end() -> None:
    if resource is not None:
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
