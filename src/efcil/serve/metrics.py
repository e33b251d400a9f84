"""Counters and histograms in the text format of Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
IMAGES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class Counter:
    """A number that only grows, for every combination of labels."""

    kind = "counter"

    def __init__(self) -> None:
        self._values: dict[tuple[tuple[str, str], ...], float] = {}
        self._lock = threading.Lock()

    def add(self, amount: float = 1, **labels: str) -> None:
        """Let it grow."""
        key = tuple(sorted(labels.items()))
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount

    def value(self, **labels: str) -> float:
        """Return the number for these labels."""
        return self._values.get(tuple(sorted(labels.items())), 0)

    def lines(self, name: str) -> Iterator[str]:
        """Yield its lines."""
        with self._lock:
            found = sorted(self._values.items()) or [((), 0)]
        for key, value in found:
            yield f"{name}{_labels(dict(key))} {value:g}"


class Histogram:
    """How many values were at most as large as each bound."""

    kind = "histogram"

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def add(self, value: float) -> None:
        """Count a value."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        """Yield its lines."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        below = 0
        for bound, count in zip((*(f"{each:g}" for each in self._bounds), "+Inf"), counts, strict=True):
            below += count
            yield f"{name}_bucket{_labels({'le': bound})} {below}"
        yield f"{name}_sum {total:g}"
        yield f"{name}_count {below}"


class Gauge:
    """A number that is asked for when it is wanted."""

    kind = "gauge"

    def __init__(self, ask: Callable[[], float]) -> None:
        self._ask = ask

    def lines(self, name: str) -> Iterator[str]:
        """Yield its line."""
        yield f"{name} {float(self._ask()):g}"


class Metrics:
    """All numbers of a server."""

    def __init__(self) -> None:
        self.requests = Counter()
        self.images = Counter()
        self.teachings = Counter()
        self.swaps = Counter()
        self.latency = Histogram(SECONDS)
        self.prediction = Histogram(SECONDS)
        self.batch = Histogram(IMAGES)
        self._all: dict[str, tuple[str, Counter | Histogram | Gauge]] = {
            "efcil_requests_total": ("requests by route, method and status", self.requests),
            "efcil_images_total": ("images scored", self.images),
            "efcil_teachings_total": ("teachings by how they ended", self.teachings),
            "efcil_model_swaps_total": ("times that a new model took over", self.swaps),
            "efcil_request_seconds": ("seconds from a request to its answer", self.latency),
            "efcil_batch_seconds": ("seconds to score a batch", self.prediction),
            "efcil_batch_images": ("images scored together", self.batch),
        }

    def ask(self, name: str, meaning: str, question: Callable[[], float]) -> None:
        """Add a number that is asked for at every look."""
        self._all[name] = (meaning, Gauge(question))

    def text(self) -> str:
        """Return everything in the text format."""
        lines = []
        for name, (meaning, metric) in self._all.items():
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {metric.kind}", *metric.lines(name)]
        return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    escaped = {name: v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, v in labels.items()}
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
