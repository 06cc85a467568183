"""Protection from slow clients: a timeout for headers, and a maximum number of connections."""

import asyncio
from time import monotonic
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from smallvit.serving.limits import Limits


def limited(limits: Limits) -> type[H11Protocol]:
    """Returns the protocol class for uvicorn with these limits."""

    class Limited(H11Protocol):
        since = 0.0  # when the client was last expected to send a header, or the rest of an upload
        deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()
            if len(self.connections) > limits.connections:
                waiting = [
                    other for other in self.connections if isinstance(other, Limited) and other.waits_for_client()
                ]
                # Never empty: this connection has sent nothing yet.
                min(waiting, key=lambda other: other.since).drop()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def waits_for_client(self) -> bool:
            return self.is_idle() or self.cycle.more_body

        def drop(self) -> None:
            if not self.transport.is_closing():
                self.transport.abort()
            self.connections.discard(self)

        def _watch(self) -> None:
            """Starts the timeout when a connection is idle; further bytes of a slow header do not extend it."""
            if not self.is_idle():
                if self.deadline is not None:
                    self.since = monotonic()
                self._forget()
            elif self.deadline is None:
                self.since = monotonic()
                self.deadline = self.loop.call_later(limits.header_seconds, self.drop)

        def _forget(self) -> None:
            if self.deadline is not None:
                self.deadline.cancel()
                self.deadline = None

    return Limited
