"""What a process is doing right now, for progress lines.

Whoever works says what it does and how far it is: `with doing("decoding images", total) as work: work.done += 1`. That
costs an attribute, so it may be done for every step. Whoever shows progress reads it by the clock. Where nobody
follows, as in a server that answers many requests at a time, nothing is kept.

Long work is done in pieces, and says before each of them that it could end here (`next_piece`). Whoever can end it
without a loss says how to find out whether it should (`between_pieces`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Work:
    """A piece of work: what it is, and how much of it is done. `before` was done when it began."""

    what: str
    total: int | None = None
    done: int = 0
    before: int = 0
    began: float = 0.0

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds that the rest takes at the speed so far, None if that is not known yet."""
        fresh = self.done - self.before
        if self.total is None or fresh <= 0:
            return None
        return (now - self.began) * (self.total - self.done) / fresh

    def __str__(self) -> str:
        return self.what if self.total is None else f"{self.what} {self.done:,}/{self.total:,}"


@dataclass
class Activity:
    """The work under way, the whole before its parts."""

    clock: Callable[[], float] = time.monotonic
    stack: tuple[Work, ...] = field(default=())  # replaced, never changed: another thread reads it

    @contextmanager
    def doing(self, what: str, total: int | None = None, done: int = 0) -> Iterator[Work]:
        """Count what happens inside as work called `what`."""
        work = Work(what, total, done, done, self.clock())
        self.stack = (*self.stack, work)
        try:
            yield work
        finally:
            # By identity: a generator that is left half-way ends its work later than what began after it.
            self.stack = tuple(each for each in self.stack if each is not work)


_followed: ContextVar[Activity | None] = ContextVar("efcil_activity", default=None)


@contextmanager
def followed(activity: Activity) -> Iterator[None]:
    """Let `activity` hear what is done inside, in this thread."""
    token = _followed.set(activity)
    try:
        yield
    finally:
        _followed.reset(token)


_between: ContextVar[Callable[[], None] | None] = ContextVar("efcil_between_pieces", default=None)


@contextmanager
def between_pieces(check: Callable[[], None] | None) -> Iterator[None]:
    """Call `check` before every piece of the work inside, in this thread; it raises to end that. None: it goes on."""
    token = _between.set(check)
    try:
        yield
    finally:
        _between.reset(token)


def next_piece() -> None:
    """Say that a piece of work begins, and that the whole may end before it."""
    if (check := _between.get()) is not None:
        with between_pieces(None):  # saving what is there may take pieces, too
            check()


@contextmanager
def doing(what: str, total: int | None = None, done: int = 0) -> Iterator[Work]:
    """Say what is done inside; `total` and `done` are counted in whatever unit `what` names."""
    activity = _followed.get()
    if activity is None:
        yield Work(what, total, done, done)
        return
    with activity.doing(what, total, done) as work:
        yield work


def doing_in_pieces(what: str, total: int, piece: int) -> AbstractContextManager[Work]:
    """Say what is done inside, `piece` of it at a time; what is done all at once has nothing to count."""
    return doing(f"{total:,} {what}") if total <= piece else doing(what, total)
