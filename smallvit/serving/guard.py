"""Access control: checks the host name, the origin and the token; refuses all requests during shutdown."""

import asyncio
from collections.abc import Callable, Collection
from hmac import compare_digest
from http.cookies import CookieError, SimpleCookie
from time import perf_counter
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smallvit.serving.metrics import Metrics

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
PROBES = frozenset({"/live", "/ready", "/health"})  # an orchestrator sends neither token nor host name
COOKIE = "smallvit_token"


class Guard:
    """ASGI middleware. `hosts` are the names allowed in the Host header; None allows any."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        paths: Collection[str],
        draining: Callable[[], bool],
        hosts: Collection[str] | None = None,
        token: str | None = None,
    ) -> None:
        self.app, self.metrics, self.paths, self.draining = app, metrics, frozenset(paths), draining
        self.hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status = perf_counter(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            refusal = self._refusal(scope)
            await (refusal or self.app)(scope, receive, watched)
        except asyncio.CancelledError:
            if status or not self.draining():
                raise
            await _ending()(scope, receive, watched)
        finally:
            self.metrics.answered(self._path(scope["path"]), status or 500, perf_counter() - begun)

    def _path(self, path: str) -> str:
        """Maps a path to one of few names, since each is a time series of its own."""
        first = "/" + path.split("/")[1] if path.startswith("/") else path
        return first if first in self.paths else "other"

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["path"] in PROBES:
            return None
        if self.hosts is not None and (host := _host(f"//{headers.get('host', '')}")) not in self.hosts:
            line = f"host {host[:80]!r} is not allowed: use the server's own address, or start it with --allow-host"
            return _refused(421, line)
        if self._is_foreign(scope, headers):
            return _refused(403, "requests from pages of other sites are refused")
        if self.draining():
            return _ending()
        if self.token is not None:
            return self._without_token(scope, headers)
        return None

    def _is_foreign(self, scope: Scope, headers: Headers) -> bool:
        """Whether a page of another site made the request, in the browser of a user with access."""
        follows_link = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate" and scope["path"] == "/"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not follows_link:
            return True
        origin = headers.get("origin")
        if origin is None:
            return False
        try:
            return urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
        except ValueError:  # no address at all
            return True

    def _without_token(self, scope: Scope, headers: Headers) -> Response | None:
        kind, _, given = headers.get("authorization", "").partition(" ")
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        if (kind.lower() == "bearer" and self._is_right(given.strip())) or (cookie and self._is_right(cookie.value)):
            return None
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and self._is_right(asked):  # from the printed address; kept as a cookie
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, asked, httponly=True, samesite="strict")
            return answer
        line = "a token is needed: open the address that the server printed, or send Authorization: Bearer TOKEN"
        return _refused(401, line, {"WWW-Authenticate": "Bearer"})

    def _is_right(self, given: str) -> bool:
        assert self.token is not None
        return compare_digest(given.encode(errors="replace"), self.token.encode())


def _host(address: str) -> str:
    try:
        return (urlsplit(address).hostname or "").lower()
    except ValueError:
        return ""


def _refused(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": reason}, status, headers)


def _ending() -> Response:
    return _refused(503, "the server is shutting down: use another one, or try again later", {"Retry-After": "5"})
