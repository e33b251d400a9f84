"""Stopping on request: the first SIGINT or SIGTERM lets the step end and the state be saved, a second one does not."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from time import monotonic
from types import FrameType
from typing import Any

from efcil import ranks

#: Seconds within which another SIGTERM is the same request: `timeout` sends it to the process, and to its group.
SAME_REQUEST = 1.0


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, and has saved its state. The message says how to resume."""


class StopRequest:
    """Records requests to stop. As a context it listens to SIGINT and SIGTERM.

    `first` and `second` are the messages after one and after two requests.
    """

    def __init__(
        self,
        first: str = "Stopping as soon as the state can be saved",
        second: str = "Interrupted. Run the same command again to resume from the last checkpoint.",
    ) -> None:
        self.first = first
        self.second = second
        self.requested = False
        self._asked = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        # Python delivers signals to the main thread only; in other threads the calling program must handle them.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # Whoever set another handler meanwhile wants to keep it.
            if signal.getsignal(number) == self._receive:
                signal.signal(number, handler)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if ranks.several():
            # torchrun may send more than one, and ends processes that take too long by itself.
            self._say("" if self.requested or not ranks.first() else f"\n{self.first}.\n")
            self.requested = True
            return
        if self.requested:
            if number == signal.SIGTERM and monotonic() - self._asked < SAME_REQUEST:
                return
            raise KeyboardInterrupt(self.second)
        self.requested, self._asked = True, monotonic()
        # The end of a task can take long on a CPU.
        self._say(f"\n{self.first}; a second request stops immediately.\n")

    @staticmethod
    def _say(text: str) -> None:
        # Not `print`: the signal may have interrupted one.
        with suppress(OSError, ValueError, AttributeError):
            os.write(sys.stderr.fileno(), text.encode())

    def agreed(self) -> bool:
        """Return whether any process of the run was asked to stop; all of them must call this together."""
        return ranks.anyone(self.requested)
