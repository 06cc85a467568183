"""The web application: routes, limits and errors. Nothing of a request is written to disk."""

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from hashlib import sha256
from importlib.resources import files
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smallvit.common.text import shown
from smallvit.runs.answers import answer, check_threshold
from smallvit.runs.prediction import Predictor
from smallvit.serving.batching import Batcher
from smallvit.serving.decoders import Decoders
from smallvit.serving.examples import Example, png
from smallvit.serving.guard import Guard
from smallvit.serving.limits import Limits, Refused
from smallvit.serving.maps import Maps, explain
from smallvit.serving.metrics import Metrics
from smallvit.serving.openapi import describe

Pixels = UInt[np.ndarray, "H W c"]  # made once: annotations of inner functions are evaluated in every request
PAGE = (files("smallvit.serving") / "page.html").read_text(encoding="utf-8")


def make_app(
    predictor: Predictor,
    limits: Limits | None = None,
    examples: Sequence[Example] = (),
    *,
    threshold: float | None = None,
    hosts: Collection[str] | None = None,
    token: str | None = None,
) -> Starlette:
    """Returns an ASGI application, which compiles the model at startup, before the first request.

    `hosts` are the names allowed in the Host header; None allows any. With a `token`, requests must send it. With a
    `threshold`, answers have a decision, which is "unsure" below it.
    """
    check_threshold(threshold)
    service = _Service(predictor, limits or Limits(), list(examples), threshold)
    routes = [
        Route("/", service.page),
        Route("/predict", service.predict, methods=["POST"]),
        Route("/explain", service.explain, methods=["POST"]),
        Route("/model", service.model),
        Route("/health", service.health),
        Route("/live", service.live),
        Route("/ready", service.health),
        Route("/metrics", service.show_metrics),
        Route("/examples", service.list_examples),
        Route("/examples/{number}", service.example),
        Route("/openapi.json", service.openapi),
    ]
    app = Starlette(
        routes=routes,
        lifespan=service.lifespan,
        exception_handlers={Refused: _refused, HTTPException: _http_error, ClientDisconnect: _gone, 500: _failed},
    )
    app.add_middleware(
        Guard,
        metrics=service.metrics,
        paths=[route.path for route in routes if "{" not in route.path],
        draining=lambda: service.draining,
        hosts=hosts,
        token=token,
    )
    app.add_middleware(_SecurityHeaders)
    app.state.service = service
    return app


class _Upload(NamedTuple):
    name: str
    content: bytes


class _Service:
    def __init__(self, predictor: Predictor, limits: Limits, examples: list[Example], threshold: float | None) -> None:
        self.predictor, self.limits, self.examples, self.threshold = predictor, limits, examples, threshold
        self.names = [shown(name) for name in predictor.saved.classes]
        self.metrics, self.draining = Metrics(), False
        self.held = 0  # bytes of all uploads
        # One thread: two would only share the same cores.
        self.computing = ThreadPoolExecutor(1, thread_name_prefix="compute")

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        self.classes = Batcher(self.predictor, self.computing, largest=self.predictor.largest, room=self.limits.queue)
        self.maps = Batcher(self._explain_each, self.computing, largest=1, room=self.limits.explain_queue)
        self.decoders = Decoders(self.limits, self.predictor.saved.preprocess)
        try:
            starting = asyncio.create_task(self.decoders.start())
            await loop.run_in_executor(self.computing, self._warm_up)
            await starting
            workers = [asyncio.create_task(batcher.work()) for batcher in (self.classes, self.maps)]
            yield
        finally:
            await self.decoders.close()
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        self.computing.shutdown(wait=False, cancel_futures=True)

    def _warm_up(self) -> None:
        self.predictor.warm_up()
        preprocess = self.predictor.saved.preprocess
        black = np.zeros((1, *preprocess.size, preprocess.channels), preprocess.dtype)
        self._explain_each(black)

    def _explain_each(self, images: UInt[np.ndarray, "n H W c"]) -> list[Maps]:
        return [explain(self.predictor.saved, image) for image in images]

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE)

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(describe(self.limits))

    async def live(self, request: Request) -> Response:
        """Liveness, not readiness: answers as long as the process runs."""
        return JSONResponse({"status": "ok"})

    async def show_metrics(self, request: Request) -> Response:
        gauges = dict(waiting_images=self.classes.taken, waiting_maps=self.maps.taken, upload_bytes=self.held)
        text = self.metrics.text(self.classes.sizes, **gauges, decoders_replaced_total=self.decoders.replaced)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def health(self, request: Request) -> Response:
        full = self.classes.taken >= self.limits.queue
        return JSONResponse(
            status_code=503 if self.draining or full else 200,
            content={
                "status": "ending" if self.draining else "full" if full else "ok",
                "waiting": self.classes.taken + self.maps.taken,
                "images": self.classes.images,
                "batches": self.classes.batches,
            },
        )

    async def model(self, request: Request) -> Response:
        saved = self.predictor.saved
        return JSONResponse(
            {
                "name": saved.spec.name,
                "classes": self.names,
                "preprocess": saved.preprocess.to_json(),
                "threshold": self.threshold,
                "limits": vars(self.limits),
            }
        )

    async def list_examples(self, request: Request) -> Response:
        return JSONResponse({"examples": [example.name for example in self.examples]})

    async def example(self, request: Request) -> Response:
        number = request.path_params["number"]
        if not (number.isascii() and number.isdecimal() and len(number) < 10 and int(number) < len(self.examples)):
            raise Refused(404, f"example {number[:40]} does not exist: GET /examples lists them")
        _, kind, content = self.examples[int(number)]
        return Response(content, media_type=f"image/{kind}")

    async def predict(self, request: Request) -> Response:
        top = self._top(request)

        def described(image: Pixels, probabilities: np.ndarray) -> dict[str, Any]:
            found = answer("", probabilities, self.names, top, self.threshold)
            pairs = zip(found.classes, found.probabilities, strict=True)
            return {
                **({} if found.decision is None else {"decision": found.decision}),
                "classes": [{"class": name, "probability": p} for name, p in pairs],
            }

        return await self._answer(request, self.classes, self.limits.images, described)

    async def explain(self, request: Request) -> Response:
        def described(image: Pixels, maps: Maps) -> dict[str, Any]:
            return {
                "seen": f"data:image/png;base64,{base64.b64encode(png(image)).decode()}",
                "saliency": None if maps.saliency is None else _rounded(maps.saliency),
                "layers": [{"name": path, "heads": _rounded(heads)} for path, heads in maps.layers.items()],
            }

        return await self._answer(request, self.maps, self.limits.explained, described)

    async def _answer(
        self,
        request: Request,
        batcher: Batcher,
        most: int,
        described: Callable[[Pixels, Any], dict[str, Any]],
    ) -> Response:
        held = 0

        async def chunks() -> AsyncGenerator[bytes, None]:
            nonlocal held
            async for chunk in request.stream():
                held += len(chunk)
                self.held += len(chunk)
                if held > self.limits.upload:
                    raise self._too_large()
                if self.held > self.limits.memory:
                    raise Refused(503, "too many uploads at once: try again in a moment")
                yield chunk

        async def one(upload: _Upload) -> dict[str, Any]:
            start = perf_counter()
            image = await self.decoders(upload.name, upload.content)
            result = described(image, await batcher(image))
            return {"name": upload.name, **result, "milliseconds": round((perf_counter() - start) * 1000, 2)}

        try:
            uploads = await self._in_time(self._uploads(request, chunks(), most), 408, "the upload took longer")
            with batcher.admit(len(uploads)):
                results = await self._in_time(_all(map(one, uploads)), 504, "the answer would take longer")
        finally:
            self.held -= held
        return JSONResponse({"images": results})

    async def _uploads(self, request: Request, chunks: AsyncGenerator[bytes, None], most: int) -> list[_Upload]:
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.limits.upload:
            raise self._too_large()
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind == "multipart/form-data":
            uploads = await self._form(request, chunks, most)
        elif kind in ("", "application/octet-stream") or kind.startswith("image/"):
            content = b"".join([chunk async for chunk in chunks])
            uploads = [_Upload("image", content)]
        else:
            raise Refused(415, f"{kind[:80]!r} is not an image: send one as image/*, or several as multipart/form-data")
        for upload in uploads:
            if not upload.content:
                raise Refused(422, f"{upload.name} is empty: send the bytes of an image")
        return uploads

    async def _form(self, request: Request, chunks: AsyncGenerator[bytes, None], most: int) -> list[_Upload]:
        parser = MultiPartParser(request.headers, chunks, max_files=most, max_fields=most)
        parser.spool_max_size = self.limits.upload + 1  # keeps all files in memory
        try:
            form = await parser.parse()
        except MultiPartException as error:
            if error.message.startswith("Too many files"):
                raise Refused(413, f"a request may have at most {most} images: send several requests") from None
            raise Refused(400, f"the form cannot be read: {error.message}") from None
        try:
            uploads = [
                _Upload(shown(value.filename or "image")[:200], await value.read())
                for _, value in form.multi_items()
                if isinstance(value, UploadFile)
            ]
        finally:
            await form.close()
        if not uploads:
            raise Refused(422, "the form has no file: send one, as curl -F image=@photo.jpg does")
        return uploads

    def _too_large(self) -> Refused:
        return Refused(413, f"a request may have at most {self.limits.upload:,} bytes: send fewer or smaller images")

    def _top(self, request: Request) -> int:
        number = len(self.predictor.saved.classes)
        given = request.query_params.get("top", str(number))
        if not (given.isascii() and given.isdecimal() and len(given) < 10 and int(given) > 0):
            raise Refused(400, f"top={given[:40]!r} must be a number of classes, at least 1")
        return int(given)

    async def _in_time(self, work: Awaitable[Any], status: int, what: str) -> Any:
        try:
            async with asyncio.timeout(self.limits.seconds):
                return await work
        except TimeoutError:
            raise Refused(status, f"{what} than {self.limits.seconds:g} seconds: try again with less") from None


async def _all(works: Any) -> list[Any]:
    """Returns the results in order; the first failure cancels the others."""
    works = list(works)
    if len(works) == 1:  # most requests: no task is needed
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _rounded(values: np.ndarray) -> list[Any]:
    return (np.round(values.astype(np.float64), 3) + 0.0).tolist()


def _error(status: int, reason: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": reason}, status, headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return _error(error.status, error.reason, {"Retry-After": "1"} if error.status == 503 else None)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _error(404, "there is no such page: GET /openapi.json describes the API")
    return _error(error.status_code, error.detail, dict(error.headers or {}))


async def _gone(request: Request, error: Exception) -> Response:
    return _error(400, "the upload was interrupted")  # the client has disconnected


async def _failed(request: Request, error: Exception) -> Response:
    return _error(500, "internal error: see the log of the server")


def _digest(tag: str) -> str:
    """The CSP hash of the page's style or script: the browser runs no others."""
    text = PAGE.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"


_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_digest('script')}; style-src {_digest('style')}; "
        "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class _SecurityHeaders:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self.app(scope, receive, with_headers if scope["type"] == "http" else send)
