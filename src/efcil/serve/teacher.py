"""The process that teaches: `python -m efcil.serve.teacher`, started by the server for every teaching.

A process of its own leaves the server free to answer, and can be stopped at any moment: the model folder is locked,
checkpointed and replaced in one step by `efcil.model.teaching`. The pictures come through standard input, already
decoded, and are never written anywhere. What happens is reported as lines of JSON on standard output. When standard
input ends, because the server has ended, however it did, the teaching saves its state and stops.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from efcil.engine.trainer import EpochReport

#: Below predictions in the queue for the processor.
NICENESS = 5
REPORT_SECONDS = 0.1
BEAT_SECONDS = 2.0


def send(stream: IO[bytes], order: dict[str, Any], pictures: list[np.ndarray]) -> None:
    """Write an order and its pictures, as `receive` reads them."""
    header = json.dumps(order | {"shapes": [each.shape for each in pictures]})
    stream.write(header.encode() + b"\n")
    for each in pictures:
        stream.write(np.ascontiguousarray(each, np.uint8).data)
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Read what `send` wrote."""
    order = json.loads(stream.readline())
    pictures = []
    for shape in order.pop("shapes"):
        content = stream.read(int(np.prod(shape)))
        pictures.append(np.frombuffer(content, np.uint8).reshape(shape))
    return order, pictures


def main() -> int:
    """Carry out one order."""
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not be read as an event

    def report(**event: Any) -> None:
        with suppress(OSError, ValueError):  # the server may have ended
            events.write(json.dumps(event) + "\n")
            events.flush()

    with suppress(OSError, AttributeError):
        os.nice(NICENESS)
    with os.fdopen(os.dup(0), "rb") as stream:
        try:
            order, pictures = receive(stream)
        except (ValueError, KeyError, TypeError):
            return 1  # the server ended before it had sent everything
    threading.Thread(target=_follow, daemon=True).start()
    return _carried_out(order, pictures, report)


def _follow() -> None:
    """Ask this process to stop when standard input ends."""
    with suppress(OSError):
        while os.read(0, 1024):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def _carried_out(order: dict[str, Any], pictures: list[np.ndarray], report: Callable[..., None]) -> int:
    report(state="starting")
    from efcil.errors import EfcilError

    try:
        _teach(order, pictures, report)
    except KeyboardInterrupt:
        report(state="stopped")
        return 130
    except EfcilError as error:
        report(state="failed", error=str(error))
        return 2
    except Exception as error:
        traceback.print_exc()
        report(state="failed", error=f"Unexpected {type(error).__name__}: {error}. The model is unchanged.")
        return 1
    report(state="learned")
    return 0


def _teach(order: dict[str, Any], pictures: list[np.ndarray], report: Callable[..., None]) -> None:
    from efcil.model.defaults import completed
    from efcil.model.images import Pictures
    from efcil.model.teaching import teach

    same = len({each.shape for each in pictures}) == 1
    teach(
        Path(order["folder"]),
        Pictures(np.stack(pictures) if same else pictures),
        order["labels"],
        lambda start: dataclasses.replace(start, device=order["device"], **order.get("settings", {})),
        lambda settings: completed(settings, method_named="method" in order.get("settings", {})),
        device=order["device"],
        more=order["more"],
        discard=order["discard"],
        checkpoint_steps=order["checkpoint_steps"],
        reporter=_progress(report),
    )


def _progress(report: Callable[..., None]) -> Any:
    """Return a kind of progress that reports instead of printing."""
    from efcil.engine.progress import Progress

    class Reported(Progress):
        """Progress as events."""

        _last = 0.0

        def beat(self) -> None:
            """Report the time left while no epoch ends."""
            left, now = self.seconds_left(), time.monotonic()
            if left is not None and now - self._last > BEAT_SECONDS:
                self._last = now
                report(seconds_left=round(left, 1))

        def say(self, text: str) -> None:
            """Report some lines."""
            report(say=text)

        def begin_task(
            self, task: int, epochs: int, done: int = 0, later_epochs: float = 0.0, later_tasks: int = 0
        ) -> None:
            """Report how much there is to do; a task that trains nothing has no epochs to count."""
            super().begin_task(task, epochs, done, later_epochs, later_tasks)
            report(state="learning", epoch=done, epochs=epochs or None)

        def epoch(self, finished: EpochReport) -> None:
            """Report a finished epoch."""
            self._seconds.append(finished.seconds)
            done, now = finished.epoch + 1, time.monotonic()
            if done == finished.epochs or now - self._last > REPORT_SECONDS:
                self._last = now
                report(epoch=done, epochs=finished.epochs, seconds_left=round(self._left(finished.epochs - done), 1))

    return Reported


if __name__ == "__main__":
    sys.exit(main())
