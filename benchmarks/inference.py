"""Predicting and serving with a trained `hybrid_vit_small` next to torch and onnxruntime, with the same weights.

    .venv-peers/bin/python -m benchmarks.inference [--images 3000] [--rounds 5]

The run is made here, in one epoch on random images of 32 pixels; all sides must give the same answers. The ONNX models
are the file of `smallvit export` and torch's own export of the torch model.

- model: decoded images to probabilities, in batches of 64 and of 1.
- predict: a folder of JPEGs of 64 pixels to probabilities. Ours is `predict_files`, the loop of `smallvit predict`,
  without the start of the command. The others decode with Pillow in a pool of threads, the next batch of 64 while the
  model works on the last one.
- serve: JPEGs of 64 pixels over HTTP, by 64 clients at once and by a single one. The first rows are `smallvit serve`
  with the model of each side in it. The last one is a plain server without batches, limits or separate processes for
  decoding: Starlette, a thread per request and torch's ONNX model. The clients share the cores with the server, so its
  CPU time per image is given, too.

Sides take turns within one process (each server has its own), and the fastest round of each counts.
"""

from smallvit.common.env import restart_fast

restart_fast()

import argparse
import asyncio
import io
import os
import socket
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import torch
import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import smallvit
from benchmarks.reading import fastest, make_folder, photograph
from benchmarks.serve_load import cpu_seconds
from benchmarks.torch_hybrid_vit import HybridViT
from smallvit.runs.prediction import Predictor, predict_files
from smallvit.runs.saved import Saved, from_pretrained
from smallvit.runs.scores import softmax
from smallvit.serving import server
from tests.served import serving

Model = Callable[[np.ndarray], np.ndarray]  # decoded images to probabilities
OURS, TORCH, EXPORT, BEST, PLAIN = "smallvit", "torch", "ONNX of ours", "ONNX of torch", "plain server, ONNX of torch"
PEERS, MODULE = (TORCH, EXPORT, BEST, PLAIN), "benchmarks.inference"
SIZE, PIXELS, CLASSES, BATCH, CLIENTS = 32, 64, 10, 64, 64
CORES = len(os.sched_getaffinity(0))


class Torch(torch.nn.Module):
    """Takes decoded images, as our exports do."""

    def __init__(self, saved: Saved) -> None:
        super().__init__()
        model = HybridViT(SIZE, CLASSES).load(saved.variables["params"], saved.variables["batch_stats"])
        self.model = model.eval().to(memory_format=torch.channels_last)
        self.mean, self.std = map(torch.tensor, saved.preprocess.normalisation)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(((images.float() / 255 - self.mean) / self.std).permute(0, 3, 1, 2))


def make_run(folder: Path) -> Path:
    """Trains for an epoch, and writes both ONNX models into the run."""
    images = np.random.default_rng(0).integers(0, 256, (640, SIZE, SIZE, 3), np.uint8)
    np.savez(folder / "images.npz", images=images, labels=np.arange(len(images)) % CLASSES)
    smallvit.train(folder / "images.npz", model="hybrid_vit_small", epochs=1, runs=folder, name="run")
    smallvit.export(folder / "run", "onnx", folder / "run" / f"{EXPORT}.onnx")
    with warnings.catch_warnings(action="ignore"):  # of the tracer, about shapes that are constants here
        example, axes = (torch.zeros(1, SIZE, SIZE, 3, dtype=torch.uint8),), {"images": {0: "batch"}}
        names = dict(input_names=["images"], output_names=["logits"], dynamic_axes=axes, dynamo=False)
        torch.onnx.export(Torch(from_pretrained(folder / "run")), example, folder / "run" / f"{BEST}.onnx", **names)
    return folder / "run"


def model_of(side: str, run: Path) -> Model:
    saved = from_pretrained(run)
    temperature = np.float32(saved.temperature)
    if side == OURS:
        return Predictor(saved)
    if side == TORCH:
        torch.set_num_threads(CORES)
        model = Torch(saved)
        return torch.inference_mode()(lambda images: softmax(model(torch.tensor(images)).numpy() / temperature))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = CORES
    session = onnxruntime.InferenceSession(run / f"{side}.onnx", options, providers=["CPUExecutionProvider"])
    return lambda images: softmax(session.run(["logits"], {"images": images})[0] / temperature)


def decode(source: Path | io.BytesIO) -> np.ndarray:
    with Image.open(source) as image:
        return np.asarray(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC))


def predict(model: Model, files: Sequence[Path]) -> np.ndarray:
    """The loop of the other sides."""
    found, decoding = [], deque()
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(files) + BATCH, BATCH):
            decoding.append([pool.submit(decode, file) for file in files[start : start + BATCH]])
            if len(decoding) > 1:
                found.append(model(np.stack([each.result() for each in decoding.popleft()])))
    return np.concatenate(found)


class Served(Predictor):
    """A predictor for `smallvit serve` with the model of another side."""

    def __init__(self, run: str | Path, side: str) -> None:
        super().__init__(run)
        self.model = model_of(side, Path(run))

    def __call__(self, images: np.ndarray) -> np.ndarray:
        return self.model(images)


def plain_app(run: Path) -> Starlette:
    model, classes = model_of(BEST, run), from_pretrained(run).classes

    def answer(content: bytes) -> dict[str, float]:
        return dict(zip(classes, model(decode(io.BytesIO(content))[None])[0].tolist(), strict=True))

    async def respond(request: Request) -> JSONResponse:
        return JSONResponse(await run_in_threadpool(answer, await request.body()))

    return Starlette(routes=[Route("/predict", respond, methods=["POST"])])


def serve(run: Path, side: str) -> None:
    """Serves a side in this process until it is interrupted."""
    if side != PLAIN:
        server.Predictor = lambda run: Served(run, side)
        server.serve(run, port=0)
        return
    with closing(socket.create_server(("127.0.0.1", 0))) as bound:
        print(f"\nhttp://127.0.0.1:{bound.getsockname()[1]} is ready; stop it with Ctrl-C", flush=True)
        with suppress(KeyboardInterrupt):
            uvicorn.Server(uvicorn.Config(plain_app(run), log_level="warning", access_log=False)).run([bound])


async def ask(address: str, clients: int, requests: int) -> list[float]:
    """Returns the seconds of each request. Plain sockets: an HTTP client would use as much CPU as the server."""
    host, port = address.removeprefix("http://").split(":")
    contents = [io.BytesIO() for _ in range(16)]
    for seed, content in enumerate(contents):
        photograph(seed, PIXELS, PIXELS).save(content, "jpeg", quality=90)
    head = f"POST /predict HTTP/1.1\r\nHost: {host}\r\nContent-Type: image/jpeg\r\nContent-Length: "
    asked = [head.encode() + f"{len(c.getvalue())}\r\n\r\n".encode() + c.getvalue() for c in contents]
    todo, seconds = iter(range(requests)), []

    async def client() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for i in todo:
            begun = time.perf_counter()
            writer.write(asked[i % len(asked)])
            answered = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(answered.split(b"content-length: ")[1].split(b"\r\n")[0]))
            seconds.append(time.perf_counter() - begun)
            if not answered.startswith(b"http/1.1 200"):
                raise ValueError(f"the server refuses: {answered.decode()}")
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return seconds


def show(job: str, unit: str, found: dict[str, float], *, lower: bool = False) -> None:
    """Prints one row; the ratios say how many times as fast ours is."""
    ours = found[OURS]
    ratios = [f"{(found[side] / ours if lower else ours / found[side]):.2f}" if side in found else "" for side in PEERS]
    values = [f"{found[side]:,.{2 if lower else 0}f}" if side in found else "" for side in (OURS, *PEERS)]
    print(f"| {job} | {unit} | {' | '.join(values)} | {' | '.join(ratios)} |", flush=True)


def measure_models(models: dict[str, Model], rounds: int) -> None:
    for batch, calls in ((BATCH, 5), (1, 200)):
        images = np.random.default_rng(1).integers(0, 256, (batch, SIZE, SIZE, 3), np.uint8)
        expected = models[OURS](images)
        for side, model in models.items():
            np.testing.assert_allclose(model(images), expected, atol=1e-4, err_msg=side)
        best = fastest({side: partial(model, images) for side, model in models.items()}, rounds, calls)
        show(f"model, batches of {batch}", "images/s", {side: batch / seconds for side, seconds in best.items()})


def measure_predict(models: dict[str, Model], files: list[Path], rounds: int) -> None:
    ways: dict[str, Callable[[], object]] = {OURS: lambda: list(predict_files(models[OURS], files))}
    ways |= {side: partial(predict, model, files) for side, model in models.items() if side != OURS}
    best = fastest(ways, rounds)
    show("predict", "images/s", {side: len(files) / seconds for side, seconds in best.items()})


def measure_serve(run: Path, requests: int, rounds: int) -> None:
    rate, cpu, middle, tail = ({} for _ in range(4))
    with ExitStack() as stack:
        servers = {side: stack.enter_context(serving(run, "--side", side, module=MODULE)) for side in (OURS, *PEERS)}
        for _ in range(rounds):
            for side, (address, process) in servers.items():
                used, begun = cpu_seconds(process), time.perf_counter()
                asyncio.run(ask(address, CLIENTS, requests))
                took, used = time.perf_counter() - begun, cpu_seconds(process) - used
                alone = 1000 * np.percentile(asyncio.run(ask(address, 1, requests // 8)), [50, 99])
                rate[side] = max(rate.get(side, 0), requests / took)
                cpu[side] = min(cpu.get(side, 1e9), 1000 * used / requests)
                middle[side], tail[side] = min(middle.get(side, 1e9), alone[0]), min(tail.get(side, 1e9), alone[1])
    show(f"serve, {CLIENTS} clients", "images/s", rate)
    show(f"serve, {CLIENTS} clients", "CPU ms per image", cpu, lower=True)
    show("serve, 1 client, median", "ms", middle, lower=True)
    show("serve, 1 client, 99 %", "ms", tail, lower=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=3000, help="in the folder, and requests of the clients")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("internal", nargs="*", help=argparse.SUPPRESS)  # serve RUN, see `measure_serve`
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        serve(Path(given.internal[1]), given.side)
        return
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder))
        files = make_folder(Path(folder, "photographs"), given.images, PIXELS, PIXELS)
        print(f"\n{CORES} core(s), best of {given.rounds} rounds; ratios say how many times as fast smallvit is\n")
        print(f"| job | unit | {' | '.join((OURS, *PEERS))} | {' | '.join(f'to {side}' for side in PEERS)} |")
        print("|---" * (3 + 2 * len(PEERS)) + "|")
        models = {side: model_of(side, run) for side in (OURS, *PEERS) if side != PLAIN}
        measure_models(models, given.rounds)
        measure_predict(models, files, given.rounds)
        measure_serve(run, given.images, given.rounds)


if __name__ == "__main__":
    main()
