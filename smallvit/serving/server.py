"""The server process: one socket, one model."""

import socket
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import uvicorn

from smallvit.runs.prediction import Predictor
from smallvit.serving.app import make_app
from smallvit.serving.examples import from_embedded, from_folder
from smallvit.serving.limits import Limits


def serve(
    run: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    examples: Path | None = None,
    limits: Limits | None = None,
) -> None:
    """Serves the model of a run or model folder until it is interrupted."""
    predictor = Predictor(run)
    shown = from_folder(examples, predictor) if examples is not None else from_embedded(predictor)
    app = make_app(predictor, limits, shown)
    with closing(_bound(host, port)) as bound:
        _check(predictor, run)
        config = uvicorn.Config(
            app,
            access_log=False,
            log_level="warning",
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=5,
        )
        with suppress(KeyboardInterrupt):  # the usual end of a server
            _Server(config).run(sockets=[bound])


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        print("compiling the model ...", flush=True)
        await super().startup(sockets)
        if self.started:
            host, port = sockets[0].getsockname()[:2]
            print(f"http://{f'[{host}]' if ':' in host else host}:{port} is ready; Ctrl-C ends it", flush=True)


def _check(predictor: Predictor, run: str | Path) -> None:
    preprocess = predictor.saved.preprocess
    if not np.isfinite(predictor(np.zeros((1, *preprocess.size, preprocess.channels), np.uint8))).all():
        raise ValueError(f"the model of {run} answers with numbers that are not finite: its weights are broken")


def _bound(host: str, port: int) -> socket.socket:
    """Before the model is compiled: a port that is taken is known at once."""
    if not 0 <= port < 2**16:
        raise ValueError(f"port {port} must be from 0 to 65535; 0 takes any that is free")
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"host {host!r} is not known here: {error.strerror}") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(1)  # binding alone lets a second server bind the same port
    except OSError as error:
        bound.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
    return bound
