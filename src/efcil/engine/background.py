"""Work in the background of training, such as writing a checkpoint to a slow disk."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread


class Background:
    """Does one piece of work at a time in a thread. An error is raised again where the work is waited for."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Wait for the previous piece, then start `work`."""
        self.wait()
        self._thread = Thread(target=self._do, args=(work,), name="efcil-background")
        self._thread.start()

    def check(self) -> None:
        """Raise the error of the last piece, if it has raised one; do not wait."""
        if self._error is not None:
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is running; raise the error of the last piece, once."""
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
