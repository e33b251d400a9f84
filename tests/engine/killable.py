"""Runs `efcil` in forks and sends each one a signal at a chosen moment; used by test_resume.py, see warm.py.

Moments are counted in events, not in seconds, so that they are the same every time: the end of a training step, and
the two sides of every flush to disk, of every rename and of every removal of old files. The answer to a job is the exit
code (negative: the signal that ended it); the events are written beside the output.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import warm
from efcil.engine import checkpoint
from efcil.engine.trainer import Trainer


class Events:
    """Counts events, and sends this process a signal when one of the chosen moments has come."""

    def __init__(self, moments: list[int], number: int) -> None:
        self.seen: list[str] = []
        self.moments = moments
        self.number = number
        self._lock = threading.Lock()  # states are written in a thread: no moment may be missed

    def tick(self, kind: str) -> None:
        with self._lock:
            self.seen.append(kind)
            come = len(self.seen) in self.moments
        if come:
            os.kill(os.getpid(), self.number)

    def around(self, before: str | None, function: Callable[..., Any], after: str | None) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if before is not None:
                self.tick(before)
            result = function(*arguments, **keywords)
            if after is not None:
                self.tick(after)
            return result

        return call


def run(job: dict[str, Any]) -> int:
    """Run the command with its events counted, and return its exit code."""
    events = Events(job["moments"], job["signal"])
    Trainer._compute = events.around(None, Trainer._compute, "step")  # type: ignore[method-assign]
    os.fsync = events.around("before fsync", os.fsync, "after fsync")
    os.replace = events.around("before rename", os.replace, "after rename")
    checkpoint._tidy = events.around("before removal", checkpoint._tidy, "after removal")
    code = warm.efcil(job["arguments"])
    with open(job["output"] + ".events", "w") as file:
        json.dump(events.seen, file)
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warm.serve(lambda job: warm.exit_code(warm.fork(partial(run, job), job["output"])))
