"""Images are decoded in processes that may be killed: what hangs, dies or takes too much costs its image alone."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx2
import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from benchmarks.serve_load import family
from smallvit.data.worker import ANSWER, ASK, BROKEN, BYTES, LARGE, MEMORY, PIXELS, READY
from smallvit.runs.prediction import Predictor
from smallvit.serving import Limits, make_app
from smallvit.serving.decoders import NICE, Decoders
from tests.served import IMAGE, photo, save_tiny, started, tiny_predictor


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return tiny_predictor(tmp_path_factory.mktemp("model"))


@pytest.fixture
def client(predictor: Predictor) -> Iterator[TestClient]:
    with TestClient(make_app(predictor, Limits(decode_seconds=1.5, large=16 * 30 * 30, large_queue=3))) as client:
        yield client


def decoders(client: TestClient) -> Decoders:
    return client.app.state.service.decoders  # type: ignore[attr-defined]


def send(client: TestClient, side: int = 12) -> tuple[int, str]:
    answer = client.post("/predict", content=photo(size=(side, side)), headers=IMAGE)
    return answer.status_code, answer.json().get("error", "")


def lives(process: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def gone(processes: list[int]) -> bool:
    end = time.monotonic() + 10
    while any(map(lives, processes)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(lives, processes))


def test_what_hangs_is_killed_and_others_are_served(client: TestClient):
    stopped, other = decoders(client).processes
    os.kill(stopped, signal.SIGSTOP)
    with ThreadPoolExecutor(6) as pool:
        answers = sorted(pool.map(lambda _: send(client), range(6)))
    assert [status for status, _ in answers] == [200] * 5 + [504]
    assert "takes longer than 1.5 seconds to decode" in answers[-1][1]
    assert not lives(stopped)
    assert lives(other)
    assert [send(client)[0] for _ in range(3)] == [200] * 3
    assert decoders(client).replaced == 1
    counter = "# TYPE smallvit_decoders_replaced_total counter\nsmallvit_decoders_replaced_total 1"
    assert counter in client.get("/metrics").text


def test_what_dies_costs_its_own_image(client: TestClient):
    before = decoders(client).processes
    for process in before:
        os.kill(process, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(send, client) for _ in range(2)]
        time.sleep(0.3)
        os.kill(before[0], signal.SIGSEGV)  # a stopped process takes only SIGKILL before it goes on
        for process in before:
            os.kill(process, signal.SIGCONT)
        found = sorted(answer.result() for answer in answers)
    assert [status for status, _ in found] == [200, 422]
    assert "the decoding process ended by signal 11" in found[1][1]
    assert [send(client)[0] for _ in range(3)] == [200] * 3
    assert len(set(decoders(client).processes) - set(before)) == 1


def test_one_that_died_while_idle_costs_nothing(client: TestClient):
    for process in decoders(client).processes:
        os.kill(process, signal.SIGKILL)
        assert gone([process])
    assert [send(client)[0] for _ in range(4)] == [200] * 4


def test_large_images_do_not_keep_small_ones_waiting(client: TestClient):
    """With the process for large images held, small ones are answered, and few large ones wait."""
    assert send(client, 60)[0] == 200
    usual, *_, large = decoders(client).processes
    priority = partial(os.getpriority, os.PRIO_PROCESS)
    assert priority(large) == min(priority(usual) + NICE, 19)
    if (group := Path(f"/proc/{large}/autogroup")).exists():
        assert group.read_text().endswith(f" nice {NICE}\n")
    os.kill(large, signal.SIGSTOP)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(send, client, 60) for _ in range(8)]
        while sum(answer.done() for answer in answers) < 5:
            time.sleep(0.01)
        assert send(client)[0] == 200
        os.kill(large, signal.SIGCONT)
        assert sorted(answer.result()[0] for answer in answers) == [200] * 3 + [503] * 5
    assert decoders(client).large == 0


def test_nothing_is_left_at_the_end(predictor: Predictor):
    with TestClient(make_app(predictor, Limits(decoders=3, large=16 * 30 * 30, decode_seconds=30))) as client:
        assert send(client, 60)[0] == 200
        processes = decoders(client).processes
        assert len(processes) == 4
        os.kill(processes[0], signal.SIGSTOP)  # busy for ever
        late = [threading.Thread(target=lambda: suppress_all(send, client)) for _ in range(3)]
        for thread in late:
            thread.start()
        time.sleep(0.3)
    assert gone(processes)
    for thread in late:
        thread.join(10)


def suppress_all(call, *args: object) -> None:
    with suppress(Exception):
        call(*args)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_no_orphans(tmp_path: Path, env: dict[str, str], end: signal.Signals):
    save_tiny(tmp_path)
    with started(tmp_path, "--decoders", 2, env=env) as (address, server):
        assert httpx2.post(f"{address}/predict", content=photo(), headers=IMAGE).status_code == 200
        assert len(family(server.pid)) == 3
        processes = family(server.pid)
        server.send_signal(end)
        assert server.wait(20) == -end
    assert gone(processes)


def ask(content: bytes, **changes: object) -> tuple[int, bytes, int | None]:
    """A process of its own with these options: what it answers, and how it ended if it did not."""
    options = dict(size=[8, 8], channels=3, fit="crop", kinds=["PNG"], pixels=10**8, seconds=30, large=2**31)
    options |= {"memory": 2**31, **changes}
    command = [sys.executable, "-m", "smallvit.data.worker", json.dumps(options)]
    run = subprocess.run(command, input=ASK.pack(len(content)) + content, capture_output=True, timeout=60)
    assert run.stdout.startswith(ANSWER.pack(READY, 0))
    answer = run.stdout[ANSWER.size :]
    if not answer:
        return -1, b"", run.returncode
    kind, length = ANSWER.unpack(answer[: ANSWER.size])
    body = answer[ANSWER.size :]
    assert len(body) == length
    return kind, body, None


@pytest.fixture(scope="module")
def huge() -> bytes:
    """A picture of 49 million pixels in few bytes."""
    file = io.BytesIO()
    Image.fromarray(np.zeros((7000, 7000), np.uint16)).save(file, "png")
    return file.getvalue()


def test_a_process_has_limits(huge: bytes, predictor: Predictor):
    small = photo(size=(20, 30))
    kind, body, _ = ask(small, size=[12, 12])
    assert kind == PIXELS
    np.testing.assert_array_equal(np.frombuffer(body, np.uint8).reshape(12, 12, 3), predictor.decode(io.BytesIO(small)))
    assert ask(b"no image")[0] == BROKEN
    assert ask(small, pixels=500)[1] == b"it has 600 pixels, more than 500"
    assert ask(huge, large=10**6)[0] == LARGE
    assert ask(huge, memory=50 * 2**20)[0] == MEMORY
    assert ask(huge, seconds=-0.4)[2] == -signal.SIGALRM  # by the clock, after 2 x seconds + 1


def test_a_transparent_picture_takes_no_more_memory_than_others():
    file = io.BytesIO()
    Image.new("RGBA", (4000, 4000)).save(file, "png")
    assert ask(file.getvalue(), memory=4000 * 4000 * BYTES + 2**25)[0] == PIXELS


def test_a_process_does_not_import_jax():
    code = "import smallvit.data.worker, sys; sys.exit('jax' in sys.modules or 'flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
