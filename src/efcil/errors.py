"""Errors that are sentences for the user, and did-you-mean suggestions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path


class EfcilError(Exception):
    """Something the user can fix. The message says what is wrong and what to do; no traceback is shown."""


class DataError(EfcilError):
    """Images or data files that are missing, truncated or unreadable. The file is named in the message."""


class SettingsError(EfcilError):
    """A setting that does not exist, has the wrong type or cannot be combined with another."""


class RunFolderError(EfcilError):
    """A folder of results that is damaged, belongs to another run, is in use, or cannot be written."""


class TrainingError(EfcilError):
    """Training stopped because it could not continue correctly, for example after a loss that is not finite."""


class GridError(TrainingError):
    """Some runs of a grid failed; the others are done. `paths` are the folders of all runs, in order."""

    def __init__(self, message: str, paths: Sequence[Path]) -> None:
        super().__init__(message)
        self.paths = list(paths)


def printable(value: object) -> str:
    """Return text on one line, control characters escaped: names may contain them, and terminals obey them."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))


def shortened(text: str, most: int = 80) -> str:
    """Return text to quote in a sentence; the middle of a long text is left out."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 4) :]}"


def some(names: Sequence[object], most: int = 5) -> str:
    """Return names as a list in words; if there are many, the last ones as a count."""
    shown = ", ".join(str(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} others"


def closest(name: str, valid: Iterable[str]) -> str:
    """Return a phrase that names the closest valid spellings of `name` (if any) and lists all valid ones."""
    options = sorted(valid)
    near = difflib.get_close_matches(name[:200].lower(), options, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    return f"{hint} Valid: {', '.join(options) or '(none)'}."


def unknown(kind: str, name: str, valid: Iterable[str], error: type[EfcilError] = SettingsError) -> EfcilError:
    """Build the error for an unknown `kind` (method, dataset, scenario, setting) called `name`."""
    return error(f"Unknown {kind} {shortened(name)!r}.{closest(name, valid)}")
