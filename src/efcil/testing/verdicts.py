"""Checks and what they find: a check is a function that returns, raises AssertionError, or says why it is left out."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

Subject = TypeVar("Subject")


class LeftOut(Exception):
    """A check does not apply; the message says why."""


@dataclass(frozen=True)
class Check(Generic[Subject]):
    """A function that raises AssertionError with a sentence where its subject fails, and LeftOut where it says nothing.

    `unless` returns why a subject is left out, before anything is computed. If a `basis` fails, the checks after it
    that are no basis are left out: they would say the same again.
    """

    function: Callable[[Subject], None]
    unless: Callable[[Subject], str | None] = lambda subject: None
    basis: bool = False

    @property
    def name(self) -> str:
        """The name of the function, without `check_`."""
        return self.function.__name__.removeprefix("check_")

    @property
    def asserts(self) -> str:
        """What is asserted, in a sentence: the first line of the function's documentation."""
        return (self.function.__doc__ or self.name).splitlines()[0]

    def __call__(self, subject: Subject) -> None:
        """Check the subject."""
        reason = self.unless(subject)
        if reason is not None:
            raise LeftOut(reason)
        self.function(subject)


@dataclass(frozen=True)
class Verdict:
    """What a check found. `reason` says why it failed or was left out; `trace` is where it failed."""

    check: Check[Any]
    outcome: Literal["passed", "failed", "left out"]
    reason: str = ""
    trace: str = ""


def verdicts(checks: Iterable[Check[Subject]], subject: Subject) -> Iterator[Verdict]:
    """Run checks on a subject, one after the other, and yield what each found."""
    broken = ""
    for check in checks:
        if broken and not check.basis:
            yield Verdict(check, "left out", f"It cannot be checked before this holds: {broken}")
            continue
        try:
            check(subject)
        except LeftOut as reason:
            yield Verdict(check, "left out", str(reason))
        except Exception as error:  # whatever foreign code raises
            said = str(error) if type(error) is AssertionError else f"{type(error).__name__}: {error}"
            broken = check.asserts if check.basis else broken
            yield Verdict(check, "failed", said, traceback.format_exc())
        else:
            yield Verdict(check, "passed")
