"""Metrics of the server in the Prometheus text format."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Histogram:
    def __init__(self, bounds: tuple[int | float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: int | float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: str = "") -> Iterable[str]:
        total, before = 0, f"{labels}," if labels else ""
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{{before}le="{bound}"}} {total}'
        inside = f"{{{labels}}}" if labels else ""
        yield f"{name}_sum{inside} {self.sum:.6f}"
        yield f"{name}_count{inside} {total}"


class Metrics:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.seconds: dict[str, Histogram] = {}

    def answered(self, path: str, status: int, seconds: float) -> None:
        self.requests[path, status] += 1
        self.seconds.setdefault(path, Histogram(SECONDS)).add(seconds)

    def text(self, batches: Histogram, **others: int | float) -> str:
        """Returns all metrics; `others` are counters if their names end in _total, otherwise gauges."""
        lines = ["# TYPE smallvit_requests_total counter"]
        lines += [
            f'smallvit_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self.requests.items())
        ]
        lines.append("# TYPE smallvit_refusals_total counter")
        refused: Counter[int] = Counter()
        for (_, status), count in self.requests.items():
            if status >= 400:
                refused[status] += count
        lines += [f'smallvit_refusals_total{{status="{status}"}} {count}' for status, count in sorted(refused.items())]
        lines.append("# TYPE smallvit_request_seconds histogram")
        for path, histogram in sorted(self.seconds.items()):
            lines += histogram.lines("smallvit_request_seconds", f'path="{path}"')
        lines.append("# TYPE smallvit_batch_images histogram")
        lines += batches.lines("smallvit_batch_images")
        for name, value in others.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# TYPE smallvit_{name} {kind}", f"smallvit_{name} {value:g}"]
        return "\n".join(lines) + "\n"
