"""A note that a teaching has begun, so that the next start can say what became of it, even after a power cut.

It holds the names of the classes and the number of pictures, no picture, in a folder of the user's own outside the
model folder, in which nothing but the model may lie.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from efcil import safe_json

LARGEST = 1 << 20


@dataclass(frozen=True)
class Begun:
    """A teaching that has begun: classes with their numbers of pictures, when, and from which state of the model."""

    classes: dict[str, int]
    more: bool
    started: str
    version: str | None


def place(folder: Path) -> Path:
    """Return the file of the note about a model folder."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    name = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return Path(base) / "efcil" / f"teaching-{name}.json"


def write(folder: Path, begun: Begun) -> None:
    """Leave a note. A place that cannot be written to must not hinder teaching."""
    file = place(folder)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        with open(temporary, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as stream:
            json.dump(asdict(begun), stream)
        os.replace(temporary, file)


def remove(folder: Path) -> None:
    """Remove the note."""
    with suppress(OSError):
        place(folder).unlink(missing_ok=True)


def read(folder: Path) -> Begun | None:
    """Return the note about a model folder, None where there is none or it cannot be read."""
    try:
        facts = safe_json.read(place(folder), LARGEST)
        classes = {str(name): int(count) for name, count in facts["classes"].items()}
        version = facts["version"]
        return Begun(classes, bool(facts["more"]), str(facts["started"]), None if version is None else str(version))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
