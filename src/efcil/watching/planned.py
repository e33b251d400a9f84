"""A note of the runs that a command will train, so that `efcil watch` also knows those that have not begun.

It is a hidden file in the output folder, there while the command runs. A note of a command that was killed is ignored,
and removed by the next command.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from efcil import safe_json
from efcil.errors import RunFolderError
from efcil.files import is_alive, is_regular, read_regular, this_computer, write_own

PREFIX, SUFFIX = ".grid-", ".json"
#: What a command leaves that is killed while it writes its note: computer, process.
_HALF = re.compile(rf"\.{re.escape(PREFIX)}(.+)-(\d{{1,20}}){re.escape(SUFFIX)}\.\w+\.tmp")
MOST_BYTES = 1 << 22
#: Seconds after which a note of another computer counts only while one of its runs shows signs of life.
FRESH_SECONDS = 600.0


@dataclass(frozen=True)
class Plan:
    """The runs that a command trains, and when it began; `alive` is None if that cannot be known from here."""

    runs: frozenset[Path]
    began: float
    alive: bool | None


@contextmanager
def planned(output: Path, runs: Sequence[Path]) -> Iterator[None]:
    """Leave the note while the context lasts. A folder that cannot be written to must not hinder training."""
    file = output / f"{PREFIX}{this_computer()}-{os.getpid()}{SUFFIX}"
    names = [os.path.relpath(run, output) for run in runs]
    _remove_ended(output)
    with suppress(OSError, RunFolderError):
        write_own(file, json.dumps({"process": os.getpid(), "host": this_computer(), "runs": names}) + "\n")
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def plans(output: Path) -> list[Plan]:
    """Return the plans of the commands that may be running in this folder."""
    found = [_read(note) for note in _notes(output)]
    return [plan for plan in found if plan is not None and plan.alive is not False]


def _remove_ended(output: Path) -> None:
    """Remove what commands of this computer have left that were killed."""
    with suppress(OSError):
        for note in _notes(output):
            if (plan := _read(note)) is not None and plan.alive is False:
                note.unlink(missing_ok=True)
        for path in output.iterdir():
            named = _HALF.fullmatch(path.name)
            if named is not None and is_alive(int(named[2]), named[1]) is False and is_regular(path):
                path.unlink(missing_ok=True)


def _notes(output: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(path for path in output.iterdir() if path.name.startswith(PREFIX) and path.suffix == SUFFIX)
    return []


def _read(note: Path) -> Plan | None:
    try:
        content = safe_json.parse(read_regular(note, MOST_BYTES).decode())
        runs = frozenset(Path(os.path.normpath(note.parent / str(name))) for name in content["runs"])
        return Plan(runs, note.stat().st_mtime, is_alive(int(content["process"]), str(content["host"])))
    except (OSError, ValueError, KeyError, TypeError, RunFolderError):
        return None
