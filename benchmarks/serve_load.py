"""Many clients at once against `smallvit serve`, on this machine: that nothing fails, and how long answers take.

python -m benchmarks.serve_load RUN --clients 200 --requests 4000
python -m benchmarks.serve_load RUN --clients 200 --requests 20000 --attack

With --attack the same good requests are sent alone, during an attack, and alone again. The attackers have their own
process. They send images that are small as files and huge as pixels, files of empty parts, headers and uploads byte by
byte, half of an upload, and nothing at all.
"""

import argparse
import asyncio
import io
import multiprocessing
import os
import struct
import time
import zlib
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import httpx2
import numpy as np
from PIL import Image

from tests.served import BROKEN, photo, serving

# Of a hundred requests; what each should be answered with.
MIX = {"predict": (80, 200), "form of 4": (5, 200), "explain": (3, 200), "broken": (9, 422), "empty": (2, 422)}
MIX["too large"] = (1, 413)
IMAGE = {"Content-Type": "image/png"}


class Answer(NamedTuple):
    kind: str
    status: int
    seconds: float


async def load(address: str, *, clients: int, requests: int, seed: int = 0, only: str | None = None) -> list[Answer]:
    """`requests` in all, each client sending its next one when the last is answered; stops by itself."""
    draw = np.random.default_rng(seed)
    shares = np.array([share if only in (None, kind) else 0 for kind, (share, _) in MIX.items()])
    todo = iter([(str(kind), i) for i, kind in enumerate(draw.choice(list(MIX), requests, p=shares / shares.sum()))])
    photos = [photo(seed, kind, (64, 64)) for seed in range(16) for kind in ("png", "jpeg")]
    broken = list(BROKEN.values())
    too_large = bytes(httpx2.get(f"{address}/model").json()["limits"]["upload"] + 1)
    files = [("image", (f"{i}.png", photos[i], "image/png")) for i in range(4)]
    encoded = httpx2.Request("POST", address, files=files)  # once: else the clients are busy with it
    form, form_headers = encoded.read(), {"Content-Type": encoded.headers["Content-Type"]}
    answers = []

    async def one(http: httpx2.AsyncClient, kind: str, i: int) -> int:
        image = photos[i % len(photos)]
        if kind == "form of 4":
            return (await http.post("/predict", content=form, headers=form_headers)).status_code
        content = {"broken": broken[i % len(broken)], "empty": b"", "too large": too_large}.get(kind, image)
        path = "/explain" if kind == "explain" else "/predict"
        return (await http.post(path, content=content, headers=IMAGE)).status_code

    async def client(http: httpx2.AsyncClient) -> None:
        for kind, i in todo:
            start = perf_counter()
            status = await one(http, kind, i)
            answers.append(Answer(kind, status, perf_counter() - start))

    connections = httpx2.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx2.AsyncClient(base_url=address, timeout=60, trust_env=False, limits=connections) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))
    return answers


def failures(answers: list[Answer]) -> Counter[tuple[str, int]]:
    """What was answered otherwise than it should be, by kind and status."""
    return Counter((answer.kind, answer.status) for answer in answers if answer.status != MIX[answer.kind][1])


def family(process: int) -> list[int]:
    """The server and the processes that decode for it."""
    threads = Path(f"/proc/{process}/task").glob("*/children")  # each lists those that it started
    return [process, *(int(child) for thread in threads for child in thread.read_text().split())]


def memory(process: int, name: str = "Pss") -> float:
    """In megabytes, as Linux counts it, of all of them; what they share is counted once."""
    total = 0.0
    for each in family(process):
        with suppress(OSError):  # one may have been replaced by now
            lines = Path(f"/proc/{each}/smaps_rollup" if name == "Pss" else f"/proc/{each}/status").read_text()
            total += next(int(line.split()[1]) / 1024 for line in lines.splitlines() if line.startswith(f"{name}:"))
    return total


def cpu_seconds(process: int) -> float:
    total = 0.0
    for each in family(process):
        fields = Path(f"/proc/{each}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def bombs() -> list[bytes]:
    """A 16-bit image of 49 million pixels in 97 kB, and a file of 2.5 million empty parts."""
    file = io.BytesIO()
    Image.fromarray(np.zeros((7000, 7000), np.uint16)).save(file, "png")
    empty = struct.pack(">I", 0) + b"abCd" + struct.pack(">I", zlib.crc32(b"abCd"))
    begin = photo(0)[:33]  # signature and header
    return [file.getvalue(), begin + empty * 2_500_000]


def attack(address: str, started: Any, stop: Any, counts: Any) -> None:
    """Until the event is set; how often each was done."""
    host, port = address.removeprefix("http://").split(":")
    contents = bombs()
    done: Counter[str] = Counter()

    async def upload(http: httpx2.AsyncClient, content: bytes, name: str) -> None:
        while not stop.is_set():
            with suppress(httpx2.HTTPError):
                answer = await http.post("/predict", content=content, headers=IMAGE)
                done[f"{name}, {answer.status_code}"] += 1

    def post(length: int) -> bytes:
        return f"POST /predict HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {length}\r\n\r\n".encode()

    async def connect(name: str, first: bytes, slowly: bytes = b"", pause: float = 0.1) -> None:
        """Sends the `first` bytes at once, others one by one, and closes the connection; again and again."""
        while not stop.is_set():
            with suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port))
                done[name] += 1
                writer.write(first)
                for byte in slowly:
                    await writer.drain()
                    await asyncio.sleep(pause)
                    if stop.is_set():
                        break
                    writer.write(bytes([byte]))
                else:
                    await asyncio.sleep(pause if slowly or first else 30)
                writer.close()

    started.set()

    async def everything() -> None:
        async with httpx2.AsyncClient(base_url=address, timeout=60, trust_env=False) as http:
            await asyncio.gather(
                *(upload(http, contents[0], "pixels") for _ in range(8)),
                *(upload(http, contents[1], "parts") for _ in range(2)),
                *(connect("silent", b"") for _ in range(240)),
                *(connect("slow header", b"", b"GET / HTTP/1.1\r\n" + b"X: " * 100) for _ in range(40)),
                *(connect("slow upload", post(20_000), bytes(20_000)) for _ in range(40)),
                *(connect("half an upload", post(20_000) + bytes(10_000)) for _ in range(8)),
            )

    asyncio.run(everything())
    counts.update(done)


def compare_attacked(run: Path, clients: int, requests: int) -> None:
    with serving(run) as (address, process), multiprocessing.Manager() as manager:
        asyncio.run(load(address, clients=clients, requests=clients, seed=1, only="predict"))
        print(f"{'milliseconds':12} {'requests':>9} {'median':>8} {'90 %':>8} {'99 %':>8} {'most':>8} {'MB':>6}")
        tails = []
        for name in ("alone", "attacked", "alone again"):
            started, stop, counts = manager.Event(), manager.Event(), manager.dict()
            given = (address, started, stop, counts)
            attacker = multiprocessing.get_context("spawn").Process(target=attack, args=given)
            if name == "attacked":
                attacker.start()
                started.wait()
                time.sleep(5)
            answers = asyncio.run(load(address, clients=clients, requests=requests, seed=len(tails), only="predict"))
            if name == "attacked":
                stop.set()
                attacker.join()
                assert counts, "the attackers did nothing"
            row = np.percentile([1000 * answer.seconds for answer in answers], [50, 90, 99, 100])
            tails.append(row[2])
            numbers = " ".join(f"{value:8.0f}" for value in row)
            print(f"{name:12} {len(answers):9} {numbers} {memory(process):6.0f}", flush=True)
            assert not failures(answers), failures(answers)
            if counts:
                print("attacks:", ", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
        print(f"99 % under attack: {tails[1] / tails[0]:.1f} x alone; {memory(process, 'VmHWM'):.0f} MB at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--attack", action="store_true")
    options = parser.parse_args()
    if options.attack:
        compare_attacked(options.run, options.clients, options.requests)
        return
    with serving(options.run) as (address, process):
        asyncio.run(load(address, clients=options.clients, requests=options.clients, seed=1))  # every path once
        used, answers, seconds = [memory(process)], [], 0.0
        server, clients = cpu_seconds(process), process_time()
        for half in (options.requests // 2, options.requests - options.requests // 2):
            start = perf_counter()
            answers += asyncio.run(load(address, clients=options.clients, requests=half, seed=len(answers)))
            seconds += perf_counter() - start
            used.append(memory(process))
        server, clients = cpu_seconds(process) - server, process_time() - clients
        health = httpx2.get(f"{address}/health").json()
        most = memory(process, "VmHWM")
    rate = len(answers) / seconds
    print(f"{len(answers)} requests of {options.clients} clients in {seconds:.1f} s, {rate:.0f} a second")
    print(f"processor time: {server:.1f} s of the server, {clients:.1f} s of the clients")
    print(f"{health['images']} images in {health['batches']} batches")
    times = defaultdict(list)
    for answer in answers:
        times[answer.kind].append(1000 * answer.seconds)
    print(f"{'milliseconds':12} {'requests':>9} {'median':>8} {'90 %':>8} {'99 %':>8} {'most':>8}")
    for kind in MIX:
        if times[kind]:
            row = np.percentile(times[kind], [50, 90, 99, 100])
            print(f"{kind:12} {len(times[kind]):9} " + " ".join(f"{value:8.0f}" for value in row))
    before, half, after = used
    print(f"the server's memory: {before:.0f} MB before, {half:.0f} at half, {after:.0f} after, {most:.0f} at most")
    assert len(answers) == options.requests
    assert not failures(answers), failures(answers)
    assert health["waiting"] == 0, health
    print("no failure")


if __name__ == "__main__":
    main()
