"""Decoding in separate processes: an image that hangs, crashes or exhausts memory does not affect others."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import Any

import numpy as np
from jaxtyping import UInt

from smallvit.data import Preprocess
from smallvit.data.worker import ANSWER, ASK, BROKEN, BYTES, LARGE, MEMORY, READY
from smallvit.serving.limits import Limits, Refused

KINDS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # only the usual ones: every parser is attack surface
NICE = 10  # of the process for large images: it only gets what others leave of a busy CPU
START_SECONDS = 60  # for the imports of a process on a busy machine
# One thread, since numpy reserves memory per thread; and memory that Pillow frees is returned to the system at once.
_SMALL = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)}


class Decoders:
    """`limits.decoders` processes, and one more for large images, of low priority, so that they do not delay others."""

    def __init__(self, limits: Limits, preprocess: Preprocess) -> None:
        self.limits, self.large = limits, 0  # large images that are waiting or being decoded
        most, around = limits.pixels * BYTES, 2 * limits.upload + 2**25
        options = {**preprocess.to_json(), "kinds": KINDS, "pixels": limits.pixels, "seconds": limits.decode_seconds}
        usual = {**options, "large": min(limits.large, most), "memory": min(limits.large, most) + around}
        self._shape, self._dtype = (*preprocess.size, preprocess.channels), preprocess.dtype
        self._usual = _Pool(usual, limits.decoders)
        self._for_large = _Pool({**options, "large": most, "memory": most + around, "nice": NICE}, 1)

    @property
    def workers(self) -> list["_Worker"]:
        return [*self._usual.workers, *self._for_large.workers]

    @property
    def replaced(self) -> int:
        return sum(max(worker.started - 1, 0) for worker in self.workers)

    @property
    def processes(self) -> list[int]:
        """Process ids, usual images first; the process for large images starts with the first of them."""
        return [worker.process.pid for worker in self.workers if worker.process is not None]

    async def start(self) -> None:
        await asyncio.gather(*(worker.start() for worker in self._usual.workers))

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self.workers))

    async def __call__(self, name: str, content: bytes) -> UInt[np.ndarray, "H W c"]:
        kind, body = await self._ask(self._usual, name, content)
        if kind == LARGE:
            if self.large >= self.limits.large_queue:
                line = f"{self.large} large images are waiting to be decoded: send smaller ones, or try again later"
                raise Refused(503, line)
            self.large += 1
            try:
                kind, body = await self._ask(self._for_large, name, content)
            finally:
                self.large -= 1
        if kind == BROKEN:
            reason = body.decode(errors="replace").removeprefix("cannot read the image: ")
            raise Refused(422, f"{name} cannot be read: {reason}")
        if kind == MEMORY:
            raise Refused(422, f"{name} cannot be read: it needs more memory than an image of its size should")
        return np.frombuffer(body, self._dtype).reshape(self._shape)

    async def _ask(self, pool: "_Pool", name: str, content: bytes) -> tuple[int, bytes]:
        try:
            return await pool.ask(content, self.limits.decode_seconds)
        except TimeoutError:
            line = f"{name} takes longer than {self.limits.decode_seconds:g} seconds to decode: send a smaller one"
            raise Refused(504, line) from None
        except ChildProcessError as error:
            raise Refused(422, f"{name} cannot be read: {error}") from None


class _Pool:
    """Distributes images to idle processes."""

    def __init__(self, options: dict[str, Any], number: int) -> None:
        self.workers = [_Worker(options) for _ in range(number)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in self.workers:
            self._idle.put_nowait(worker)
        self._asking: set[asyncio.Task[Any]] = set()

    async def ask(self, content: bytes, seconds: float) -> tuple[int, bytes]:
        """Decodes an image; raises a TimeoutError after `seconds`, or a ChildProcessError if the process died."""
        worker = await self._idle.get()

        # A cancelled request does not cancel decoding, which would cost a process; decoding has its own timeout.
        task = asyncio.create_task(worker.ask(content, seconds))
        self._asking.add(task)

        def done(task: asyncio.Task[Any]) -> None:
            self._asking.discard(task)
            self._idle.put_nowait(worker)
            if not task.cancelled():
                task.exception()  # marks it as retrieved: the request may be gone

        task.add_done_callback(done)
        return await asyncio.shield(task)


class _Worker:
    def __init__(self, options: dict[str, Any]) -> None:
        self._command = [sys.executable, "-m", "smallvit.data.worker", json.dumps(options)]
        # It imports from the same paths as this process.
        self._env = {**os.environ, **_SMALL, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        self._env.pop("GLIBC_TUNABLES", None)
        self._closed = False
        self.process: Process | None = None
        self.started = 0

    async def start(self) -> Process:
        """Returns a ready process, and starts one if there is none alive."""
        if self._closed:
            raise ChildProcessError("the server is shutting down")
        if self.process is not None and self.process.returncode is None:
            return self.process
        self.started += 1
        # In its own session: Ctrl-C is for the server only. The pipe closes when the server ends, however it ends.
        self.process = process = await asyncio.create_subprocess_exec(
            *self._command, env=self._env, stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        with suppress(TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(START_SECONDS):
                if (await _answer(process))[0] == READY:
                    return process
        await _end(process)
        raise ChildProcessError(f"the decoding process did not start ({process.returncode})")

    async def ask(self, content: bytes, seconds: float) -> tuple[int, bytes]:
        process = await self.start()
        assert process.stdin is not None
        try:
            async with asyncio.timeout(seconds):
                process.stdin.writelines((ASK.pack(len(content)), content))
                await process.stdin.drain()
                return await _answer(process)
        except TimeoutError:
            await _end(process)
            raise
        except (OSError, asyncio.IncompleteReadError):
            with suppress(TimeoutError):  # it is exiting by itself
                async with asyncio.timeout(1):
                    await process.wait()
            await _end(process)
            code = process.returncode or 0
            died = f"by signal {-code}" if code < 0 else f"with code {code}"
            raise ChildProcessError(f"the decoding process ended {died}") from None

    async def close(self) -> None:
        self._closed = True
        if self.process is not None:
            await _end(self.process)


async def _answer(process: Process) -> tuple[int, bytes]:
    assert process.stdout is not None
    kind, length = ANSWER.unpack(await process.stdout.readexactly(ANSWER.size))
    return kind, await process.stdout.readexactly(length)


async def _end(process: Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
    await process.wait()
