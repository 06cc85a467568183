"""The server under load: requests are computed together, the queue is bounded, and what takes too long is given up."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from smallvit.runs.prediction import Predictor
from smallvit.serving import Limits, make_app
from smallvit.serving.batching import GATHER_SECONDS, Batcher
from smallvit.serving.limits import Refused
from tests.served import IMAGE, photo, save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder)
    return folder


class Counting(Predictor):
    """Counts its calls; the first waits until it may go on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, largest=16)
        self.sizes: list[int] = []
        self.begun, self.go = threading.Event(), threading.Event()
        self.fails = False

    def warm_up(self) -> None:
        pass

    def __call__(self, images: np.ndarray) -> np.ndarray:
        self.sizes.append(len(images))
        self.begun.set()
        assert self.go.wait(20)
        if self.fails:
            raise RuntimeError("broken")
        return super().__call__(images)


def test_requests_are_computed_together_and_the_queue_is_bounded(folder: Path):
    predictor = Counting(folder)
    limits = Limits(images=1, queue=9, seconds=20)
    with TestClient(make_app(predictor, limits)) as client, ThreadPoolExecutor(9) as pool:

        def post(seed: int) -> int:
            return client.post("/predict", content=photo(seed), headers=IMAGE).status_code

        first = pool.submit(post, 0)
        assert predictor.begun.wait(20)
        others = [pool.submit(post, seed) for seed in range(1, 9)]
        while client.get("/health").json()["waiting"] < 9:
            time.sleep(0.01)
        refused = client.post("/predict", content=photo(), headers=IMAGE)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        time.sleep(0.2)  # for the decoders
        predictor.go.set()
        assert [first.result(), *(other.result() for other in others)] == [200] * 9
        health = client.get("/health").json()
    assert predictor.sizes[0] == 1
    assert sum(predictor.sizes) == 9
    assert len(predictor.sizes) < 5
    assert (health["images"], health["batches"], health["waiting"]) == (9, len(predictor.sizes), 0)


def test_an_answer_that_takes_too_long_is_given_up(folder: Path):
    predictor = Counting(folder)
    with TestClient(make_app(predictor, Limits(seconds=0.3))) as client:
        late = client.post("/predict", content=photo(), headers=IMAGE)
        assert (late.status_code, "0.3 seconds" in late.json()["error"]) == (504, True)
        predictor.go.set()
        assert client.get("/health").json()["waiting"] == 0
        while client.post("/predict", content=photo(), headers=IMAGE).status_code == 504:
            pass  # the first batch is still being computed


def test_an_upload_that_takes_too_long_is_given_up(folder: Path):
    with TestClient(make_app(Counting(folder), Limits(seconds=0.2))) as client:

        async def receive() -> dict:
            await asyncio.sleep(30)
            raise AssertionError

        sent: list[dict] = []

        async def send(message: dict) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "headers": []}
        asyncio.run(client.app(scope, receive, send))  # type: ignore[arg-type]
        assert sent[0]["status"] == 408


def test_a_model_that_fails_does_not_end_the_server(folder: Path):
    predictor = Counting(folder)
    predictor.go.set()
    with TestClient(make_app(predictor, Limits()), raise_server_exceptions=False) as client:
        predictor.fails = True
        failed = client.post("/predict", content=photo(), headers=IMAGE)
        assert (failed.status_code, list(failed.json())) == (500, ["error"])
        predictor.fails = False
        assert client.post("/predict", content=photo(), headers=IMAGE).status_code == 200


def test_too_many_bytes_of_all_requests(folder: Path):
    with TestClient(make_app(Counting(folder), Limits(memory=100))) as client:
        full = client.post("/predict", content=photo(), headers=IMAGE)
        assert (full.status_code, full.headers["retry-after"]) == (503, "1")


def test_a_batcher_leaves_out_what_was_given_up():
    async def run() -> list[int]:
        sizes = []
        with ThreadPoolExecutor(1) as pool:
            batcher = Batcher(lambda images: sizes.append(len(images)) or images, pool, largest=8, room=8)
            image = np.zeros((2, 2, 3), np.uint8)
            given_up, kept = (asyncio.ensure_future(batcher(image)) for _ in range(2))
            await asyncio.sleep(0)
            given_up.cancel()
            worker = asyncio.create_task(batcher.work())
            np.testing.assert_array_equal(await kept, image)
            worker.cancel()
            with pytest.raises(Refused), batcher.admit(8), batcher.admit(1):
                pass
            assert batcher.taken == 0
        return sizes

    assert asyncio.run(run()) == [1]


@pytest.mark.parametrize("others", [0, 1])
def test_a_batcher_waits_only_if_others_are_coming(others: int, monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def answered() -> None:
        monkeypatch.setattr("smallvit.serving.batching.asyncio.sleep", sleep)
        with ThreadPoolExecutor(1) as pool:
            batcher = Batcher(lambda images: images, pool, largest=8, room=8)
            worker = asyncio.create_task(batcher.work())
            with batcher.admit(1 + others):
                await batcher(np.zeros((2, 2, 3), np.uint8))
            worker.cancel()

    asyncio.run(answered())
    assert waits == [GATHER_SECONDS] * others
