"""Errors that are sentences for the user, and did-you-mean suggestions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class EfcilError(Exception):
    """Something the user can fix. The message says what is wrong and what to do; no traceback is shown."""


class DataError(EfcilError):
    """Images or data files that are missing, truncated or unreadable. The file is named in the message."""


class SettingsError(EfcilError):
    """A setting that does not exist, has the wrong type or cannot be combined with another."""


class SeveralMistakes(SettingsError):
    """Several mistakes in one command or file, each named once."""

    def __init__(self, errors: Sequence[EfcilError], remark: str = "") -> None:
        super().__init__(f"There are {len(errors)} mistakes{remark}:\n" + "\n".join(f"- {error}" for error in errors))
        self.errors = list(errors)


#: What other programs call settings, too short to resemble the names here.
ABBREVIATIONS = {"lr": "learning_rate", "wd": "weight_decay"}


class Mistakes:
    """Collects mistakes, each once, so that all of them can be named at the end."""

    def __init__(self) -> None:
        self._found: dict[str, EfcilError] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    @property
    def errors(self) -> list[EfcilError]:
        """The mistakes so far."""
        return list(self._found.values())

    def add(self, error: EfcilError) -> None:
        """Add a mistake, or all of several; one with the same words as another is the same."""
        for each in error.errors if isinstance(error, SeveralMistakes) else [error]:
            self._found.setdefault(str(each), each)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Add what is raised inside, and continue."""
        try:
            yield
        except EfcilError as error:
            self.add(error)

    def refuse(self, remark: str = "") -> None:
        """Raise what was found, if anything: one mistake as it is, several together."""
        errors = self.errors
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise SeveralMistakes(errors, remark)


class RunFolderError(EfcilError):
    """A folder of results that is damaged, belongs to another run, is in use, or cannot be written."""


class TrainingError(EfcilError):
    """Training stopped because it could not continue correctly, for example after a loss that is not finite."""


class GridError(TrainingError):
    """Some runs of a grid failed; the others are done. `paths` are the folders of all runs, in order.

    `mistake` says that all of them failed for reasons in the settings or the data, not in training.
    """

    def __init__(self, message: str, paths: Sequence[Path], mistake: bool = False) -> None:
        super().__init__(message)
        self.paths = list(paths)
        self.mistake = mistake


def printable(value: object) -> str:
    """Return text on one line, control characters escaped: names may contain them, and terminals obey them."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))


def shortened(text: str, most: int = 80) -> str:
    """Return text to quote in a sentence; the middle of a long text is left out."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 4) :]}"


def some(names: Sequence[object], most: int = 5) -> str:
    """Return names as a list in words; if there are many, the last ones as a count."""
    shown = ", ".join(str(name) for name in names[:most])
    more = len(names) - most
    return shown if more <= 0 else f"{shown} and {more} other{'s' if more > 1 else ''}"


def suggestion(name: str, valid: Iterable[str]) -> str:
    """Return a phrase that names the closest valid spellings of `name`, if any."""
    valid = list(valid)
    whole = ABBREVIATIONS.get(name.lower())
    near = [whole] if whole in valid else difflib.get_close_matches(name[:200].lower(), valid, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def closest(name: str, valid: Iterable[str]) -> str:
    """Return a phrase that names the closest valid spellings of `name` (if any) and lists all valid ones."""
    options = sorted(valid)
    between = "; " if any("," in option for option in options) else ", "  # rows are called by their settings, too
    return f"{suggestion(name, options)} Valid: {between.join(options) or '(none)'}."


def unknown(kind: str, name: str, valid: Iterable[str], error: type[EfcilError] = SettingsError) -> EfcilError:
    """Build the error for an unknown `kind` (method, dataset, scenario, setting) called `name`."""
    return error(f"Unknown {kind} {shortened(name)!r}.{closest(name, valid)}")
