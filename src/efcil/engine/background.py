"""Work that goes on beside the training, such as writing a checkpoint to a slow disk."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread


class Background:
    """Does one piece of work at a time in a thread. What it raised is raised where it is waited for."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Wait for the piece before, then begin with `work`."""
        self.wait()
        self._thread = Thread(target=self._do, args=(work,), name="efcil-background")
        self._thread.start()

    def check(self) -> None:
        """Raise what the last piece raised, if it has; wait for nothing."""
        if self._error is not None:
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is under way; raise what the last piece raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
