"""Images are decoded in processes of their own: one that hangs, crashes or takes all memory costs its image alone."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
from jaxtyping import UInt8

from smallvit.data import Preprocess
from smallvit.data.worker import ANSWER, ASK, BROKEN, BYTES, LARGE, MEMORY
from smallvit.serving.limits import Limits, Refused

KINDS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # the usual ones: each further parser is one more to trust
# One thread, since numpy reserves memory for each; and what Pillow frees goes back to the system at once.
_SMALL = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)}


class Decoders:
    """`limits.decoders` processes, and one more for large images, so that none keeps smaller ones waiting."""

    def __init__(self, limits: Limits, preprocess: Preprocess) -> None:
        self.limits, self.large = limits, 0  # images that wait for the process for large ones, or are in it
        most, around = limits.pixels * BYTES, 2 * limits.upload + 2**25
        options = {**preprocess.to_json(), "kinds": KINDS, "pixels": limits.pixels, "seconds": limits.decode_seconds}
        usual = {**options, "large": min(limits.large, most), "memory": min(limits.large, most) + around}
        self._shape = (*preprocess.size, preprocess.channels)
        self._usual = _Pool([_Worker(usual) for _ in range(limits.decoders)])
        self._for_large = _Pool([_Worker({**options, "large": most, "memory": most + around})])

    @property
    def replaced(self) -> int:
        return sum(worker.replaced for pool in (self._usual, self._for_large) for worker in pool.workers)

    @property
    def processes(self) -> list[int]:
        """Those for usual images first; the one for large images from the first of these on."""
        workers = [*self._usual.workers, *self._for_large.workers]
        return [worker.process.pid for worker in workers if worker.process is not None]

    def start(self) -> None:
        """They come up while others do something else."""
        for worker in self._usual.workers:
            worker.start()

    def close(self) -> None:
        for pool in (self._usual, self._for_large):
            pool.close()

    async def __call__(self, name: str, content: bytes) -> UInt8[np.ndarray, "H W c"]:
        kind, body = await self._ask(self._usual, name, content)
        if kind == LARGE:
            if self.large >= self.limits.large_queue:
                line = f"{self.large} large images wait to be decoded: send smaller ones, or try again later"
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
            raise Refused(422, f"{name} cannot be read: it takes more memory than an image of its size should")
        return np.frombuffer(body, np.uint8).reshape(self._shape)

    async def _ask(self, pool: "_Pool", name: str, content: bytes) -> tuple[int, bytes]:
        try:
            return await pool.ask(content, self.limits.decode_seconds)
        except TimeoutError:
            line = f"{name} takes longer than {self.limits.decode_seconds:g} seconds to decode: send a smaller one"
            raise Refused(504, line) from None
        except ChildProcessError as error:
            raise Refused(422, f"{name} cannot be read: {error}") from None


class _Pool:
    """Processes that take turns; each is talked to by a thread, which waits for its answer."""

    def __init__(self, workers: Sequence["_Worker"]) -> None:
        self.workers = workers
        self._threads = ThreadPoolExecutor(len(workers), thread_name_prefix="decode")
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in workers:
            self._idle.put_nowait(worker)

    async def ask(self, content: bytes, seconds: float) -> tuple[int, bytes]:
        """A TimeoutError after so many seconds of decoding, and a ChildProcessError if the process died of it."""
        loop = asyncio.get_running_loop()
        worker = await self._idle.get()
        deadline = loop.call_later(seconds, worker.give_up)

        def done(answer: asyncio.Future[Any]) -> None:
            deadline.cancel()
            if not answer.cancelled():
                answer.exception()  # which nobody may be left to ask for
            self._idle.put_nowait(worker)

        # A request that is given up does not end what it began: that has its own deadline.
        answer = loop.run_in_executor(self._threads, worker.ask, content)
        answer.add_done_callback(done)
        return await asyncio.shield(answer)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self._threads.shutdown(wait=True, cancel_futures=True)


class _Worker:
    def __init__(self, options: dict[str, Any]) -> None:
        self._command = [sys.executable, "-m", "smallvit.data.worker", json.dumps(options)]
        # It imports from where this process does.
        self._env = {**os.environ, **_SMALL, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        self._env.pop("GLIBC_TUNABLES", None)
        self._lock, self._given_up, self._closed = threading.Lock(), False, False
        self.process: subprocess.Popen[bytes] | None = None
        self.replaced = 0

    def start(self) -> None:
        with self._lock:
            if self._closed or (self.process is not None and self.process.poll() is None):
                return
            if self.process is not None:
                self._reap(self.process)
                self.replaced += 1
            # In a session of its own: a Ctrl-C is for the server, which tells it to end by closing the pipe.
            self.process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )

    def ask(self, content: bytes) -> tuple[int, bytes]:
        self.start()
        process = self.process
        if process is None:
            raise ChildProcessError("the server is ending")
        self._given_up = False
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(ASK.pack(len(content)))
            process.stdin.write(content)
            process.stdin.flush()
            kind, length = ANSWER.unpack(_exactly(process.stdout, ANSWER.size))
            return kind, _exactly(process.stdout, length)
        except (OSError, EOFError, ValueError):  # ValueError: it was closed
            process.kill()
            code = process.wait()
            if self._given_up:
                raise TimeoutError from None
            died = f"by signal {-code}" if code < 0 else f"with code {code}"
            raise ChildProcessError(f"the process that decoded it ended {died}") from None
        finally:
            if process.poll() is not None:
                self.start()

    def give_up(self) -> None:
        self._given_up = True
        self._kill()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._kill()
        if self.process is not None:
            self._reap(self.process)

    def _kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _exactly(pipe: Any, length: int) -> bytes:
    content = pipe.read(length)
    if len(content) < length:
        raise EOFError
    return content
