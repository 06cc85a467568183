"""Limits of the server, so that no request can exhaust the machine."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    upload: int = 32 * 2**20  # bytes per request
    memory: int = 256 * 2**20  # bytes of all requests that are being read or answered
    images: int = 64  # per request
    explained: int = 8  # images per request for maps, which take much longer than classes
    pixels: int = 50_000_000  # per decoded image; the largest photos of phones have 48 million
    queue: int = 512  # images waiting for their classes
    explain_queue: int = 32  # images waiting for their maps
    seconds: int | float = 30  # timeout of an upload, and of its answer
    decoders: int = 2  # processes
    decode_seconds: int | float = 10  # per image; then its process is killed
    large: int = 128 * 2**20  # decoded bytes; larger images are decoded in a separate process and do not block others
    large_queue: int = 64  # images waiting for that process, so that they do not fill the queue
    connections: int = 512  # above this, the one that has waited longest for its client is closed
    header_seconds: int | float = 10  # timeout for the header of a request

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{field.name}={value} must be a number above 0")
        if self.queue < self.images or self.explain_queue < self.explained:
            raise ValueError(
                f"a queue of {self.queue} images has no room for a request of {self.images}: choose a longer one"
                if self.queue < self.images
                else f"a queue of {self.explain_queue} has no room for {self.explained} images: choose a longer one"
            )


class Refused(Exception):
    """A refused request: the status, and one line that says why and what to do."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
