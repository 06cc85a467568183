"""Dynamic batching: images from many requests are computed together."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxtyping import UInt

from smallvit.serving.limits import Refused
from smallvit.serving.metrics import SIZES, Histogram

GATHER_SECONDS = 0.002  # how long the first image of a batch waits for others, if there are any


class Batcher:
    """Calls `compute` in the executor with up to `largest` waiting images; it returns one result per image."""

    def __init__(
        self,
        compute: Callable[[UInt[np.ndarray, "n H W c"]], Sequence[Any] | np.ndarray],
        executor: Executor,
        *,
        largest: int,
        room: int,
    ) -> None:
        self.batches = self.images = 0
        self.sizes = Histogram(SIZES)
        self.taken = 0  # admitted images, `room` at most
        self._compute, self._executor, self._largest, self._room = compute, executor, largest, room
        self._queue: asyncio.Queue[tuple[UInt[np.ndarray, "H W c"], asyncio.Future[Any]]] = asyncio.Queue()

    @contextmanager
    def admit(self, number: int) -> Iterator[None]:
        """Reserves room for this many images, from before they are decoded until they are answered."""
        if self.taken + number > self._room:
            raise Refused(503, f"{self.taken} of at most {self._room} images are waiting: try again in a moment")
        self.taken += number
        try:
            yield
        finally:
            self.taken -= number

    async def __call__(self, image: UInt[np.ndarray, "H W c"]) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((image, answer))
        return await answer

    async def work(self) -> None:
        """Computes batches until it is cancelled. While one is computed, the next fills up."""
        loop = asyncio.get_running_loop()
        while True:
            jobs = [await self._queue.get()]
            ready = self._queue.qsize() + 1
            if ready < min(self._largest, self.taken):  # others are being decoded
                await asyncio.sleep(GATHER_SECONDS)
            while len(jobs) < self._largest and not self._queue.empty():
                jobs.append(self._queue.get_nowait())
            jobs = [(image, answer) for image, answer in jobs if not answer.done()]  # done: the request was cancelled
            if not jobs:
                continue
            try:
                images = np.stack([image for image, _ in jobs])
                results = await loop.run_in_executor(self._executor, self._compute, images)
            except Exception as error:
                for _, answer in jobs:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            self.batches += 1
            self.sizes.add(len(jobs))
            self.images += len(jobs)
            for (_, answer), result in zip(jobs, results, strict=True):
                if not answer.done():
                    answer.set_result(result)
