"""Runs `efcil` in forks of one warm process and sends each fork a signal at a chosen moment; used by test_resume.py.

Moments are counted in events, not in seconds, so that they are the same every time: the end of a training step, and
the two sides of every flush to disk, of every rename and of every removal of old files. One job per line comes in as
JSON, one answer per line goes out: the exit code (negative: the signal that ended it) and the events so far.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch

import efcil.experiment
from efcil.cli import main
from efcil.data.sources import SourceOptions, load_dataset
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


def run(job: dict[str, Any]) -> None:
    """Be the child: run the command with its events counted, and never come back."""
    code = 70
    try:
        output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        events = Events(job["moments"], job["signal"])
        Trainer._compute = events.around(None, Trainer._compute, "step")  # type: ignore[method-assign]
        os.fsync = events.around("before fsync", os.fsync, "after fsync")
        os.replace = events.around("before rename", os.replace, "after rename")
        checkpoint._tidy = events.around("before removal", checkpoint._tidy, "after removal")
        sys.argv = ["efcil", *job["arguments"]]
        code = main(job["arguments"])
        with open(job["output"] + ".events", "w") as file:
            json.dump(events.seen, file)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    torch.set_num_threads(1)
    # What is slow and without consequences is done once, here: imports (PyTorch does some of its own when the first
    # optimiser is made) and the data set. Nothing is trained: autograd does not survive a fork.
    assert efcil.experiment.run_grid
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], fused=True)
    load_dataset("digits", None, SourceOptions())
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            run(job)
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serve()
