"""The server process: one socket, one model."""

import re
import socket
from collections.abc import Collection
from contextlib import closing, suppress
from ipaddress import ip_address
from pathlib import Path
from secrets import token_urlsafe
from types import FrameType
from typing import cast

import jax
import numpy as np
import uvicorn
from starlette.applications import Starlette

from smallvit.runs.answers import check_threshold
from smallvit.runs.prediction import Predictor
from smallvit.serving.app import make_app
from smallvit.serving.connections import limited
from smallvit.serving.examples import from_embedded, from_folder
from smallvit.serving.guard import LOOPBACK
from smallvit.serving.limits import Limits


def serve(
    run: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    threshold: float | None = None,
    precision: float | None = None,
    examples: Path | None = None,
    limits: Limits | None = None,
    token: str | None = None,
    hosts: Collection[str] = (),
) -> None:
    """Serves the model of a run or model folder until it is interrupted.

    On a loopback address it accepts the usual names of this machine and `hosts`, such as those of a reverse proxy. On
    other addresses it accepts any name but requires the token, which is generated if not given.

    With a `threshold`, or a `precision` to choose it by, every answer has a decision: the most probable class, or
    "unsure" if its probability is below the threshold.
    """
    check_threshold(threshold, precision)
    if token is not None and not re.fullmatch("[!-~]+", token):
        raise ValueError(
            "the token is empty or has spaces or characters beyond ASCII, which headers cannot hold: choose another"
        )
    limits = limits or Limits()
    local = _is_loopback(host)
    if token is None and not local:
        token = token_urlsafe(24)
    # The thread that asks for an answer waits for it anyway. Has no effect once jax has computed something.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    predictor = Predictor(run)
    choice = None if precision is None else predictor.saved.choose_threshold(precision)
    threshold = threshold if choice is None else choice.threshold
    shown = from_folder(examples, predictor) if examples is not None else from_embedded(predictor)
    names = {*LOOPBACK, host, *hosts} if local else None
    app = make_app(predictor, limits, shown, threshold=threshold, hosts=names, token=token)
    with closing(_bound(host, port)) as bound:
        _check(predictor, run)
        if choice is not None:
            print(choice.describe(), flush=True)
        config = uvicorn.Config(
            app,
            access_log=False,
            log_level="warning",
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=5,
            http=limited(limits),
            ws="none",
            loop="asyncio",  # uvloop starts processes with fork, which jax warns about
        )
        with suppress(KeyboardInterrupt):  # the usual way to stop a server
            _Server(config, token).run(sockets=[bound])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, token: str | None) -> None:
        super().__init__(config)
        self.token = token

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        cast(Starlette, self.config.app).state.service.draining = True
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        print("compiling the model ...", flush=True)
        await super().startup(sockets)
        if self.started:
            host, port = sockets[0].getsockname()[:2]
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            address += f"/?token={self.token}" if self.token else ""
            print(f"{address} is ready; stop it with Ctrl-C", flush=True)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _check(predictor: Predictor, run: str | Path) -> None:
    preprocess = predictor.saved.preprocess
    if not np.isfinite(predictor(np.zeros((1, *preprocess.size, preprocess.channels), preprocess.dtype))).all():
        raise ValueError(f"the model of {run} outputs NaN or infinite values: its weights are broken")


def _bound(host: str, port: int) -> socket.socket:
    """Binds the socket; called before the model is compiled, so that a port in use is reported at once."""
    if not 0 <= port < 2**16:
        raise ValueError(f"port {port} must be from 0 to 65535; 0 takes any free port")
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"unknown host {host!r}: {error.strerror}") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(1)  # bind alone lets a second server bind the same port
    except OSError as error:
        bound.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
    return bound
