"""What the server takes on at once, so that no request can exhaust the machine."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    upload: int = 32 * 2**20  # bytes of one request
    memory: int = 256 * 2**20  # bytes of all requests that are being read or answered
    images: int = 64  # in one request
    explained: int = 8  # images in one request for maps, which take far longer than classes
    pixels: int = 50_000_000  # of one image, decoded; a phone's largest photograph has 48 million
    queue: int = 512  # images that wait for their classes
    explain_queue: int = 32  # and for their maps
    seconds: int | float = 30  # for a request to arrive, and again for its answer
    decoders: int = 2  # processes
    decode_seconds: int | float = 10  # for one image, after which its process is killed
    large: int = 128 * 2**20  # bytes from which an image is decoded in a process for such, so that others need not wait
    large_queue: int = 64  # such images that wait for that, so that they do not fill the queue either
    connections: int = 512  # the one that has waited longest without a request is closed for another
    header_seconds: int | float = 10  # until a connection has sent the header of a request

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
    """A request that is not answered: the status, and one line that says why and what helps."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
