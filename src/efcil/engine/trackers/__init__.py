"""Logging a run to TensorBoard, Weights & Biases and MLflow, behind one small interface.

Everything that is logged comes from the lines of metrics.jsonl, in their order, so that a resumed run continues where
its logged run ended. A thread of its own does the logging: a slow server never makes training wait, and a tracker that
fails is reported once and left out. What is logged where changes no result and is no part of a run's settings.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from efcil import safe_json
from efcil.engine.trackers.records import Record, Records
from efcil.errors import RunFolderError, SettingsError, unknown
from efcil.files import read_regular, write_own

__all__ = ["TRACKERS", "Opened", "Record", "Records", "TrackedRun", "Tracker", "Tracking", "checked"]

#: By name: the module that must be there. The extra of efcil that brings it has the same name as the tracker.
TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
#: The note in a run folder on which logged runs belong to it.
NOTE = "tracking.json"
MOST_BYTES = 1 << 16
#: Seconds between two deliveries, and seconds that the last one, or a first connection, may take at the end of a run.
DELIVERY_SECONDS, CLOSE_SECONDS, OPEN_SECONDS = 1.0, 60.0, 20.0


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is given about a run. Files that it needs go below `output` or into `folder`."""

    name: str
    group: str
    folder: Path
    output: Path
    parameters: Mapping[str, Any]
    #: How many records earlier attempts made that are not given again.
    before: int = 0


@dataclass(frozen=True)
class Opened:
    """A logged run: its name with the tracker, and how many records it has already."""

    id: str = ""
    records: int = 0
    #: Where to look at it, in words.
    where: str = ""


class Tracker(Protocol):
    """One service. All calls come from one thread; any exception ends the logging, never the run."""

    def open(self, run: TrackedRun, earlier: Opened | None) -> Opened:
        """Begin a logged run, or continue the `earlier` one of the same run."""
        ...

    def scalars(self, records: Sequence[Record]) -> None:
        """Log records, in order."""
        ...

    def close(self, state: str) -> None:
        """End the logged run: `finished`, `interrupted` or `failed`."""
        ...


def checked(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of trackers, each once; an unknown one, or one whose package is missing, raises."""
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
        if importlib.util.find_spec(TRACKERS[name]) is None:
            raise SettingsError(f"--log {name} needs a package that is not installed: pip install 'efcil[{name}]'.")
    return tuple(dict.fromkeys(names))


def make_tracker(name: str) -> Tracker:
    """Return a tracker; its package is imported now."""
    tracker: Tracker = importlib.import_module(f"efcil.engine.trackers.{name}").make()
    return tracker


class Tracking:
    """Delivers the lines of a run to its trackers, each in a thread of its own. Without trackers it does nothing."""

    def __init__(
        self,
        names: Sequence[str],
        run: TrackedRun,
        say: Callable[[str], None],
        make: Callable[[str], Tracker] = make_tracker,
    ) -> None:
        self.names = tuple(names)
        self.run = run
        self._say = say
        self._make = make
        self._channels: list[_Channel] = []

    def begin(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        """Start logging; `lines` are those that the run has written before."""
        before, note = list(lines), _Note(self.run.folder / NOTE)
        for name in self.names:
            # Made here, not in the thread: importing a package would slow down the first steps of training.
            try:
                tracker = self._make(name)
            except Exception as error:
                self._say(_stopped(name, error))
                continue
            self._channels.append(_Channel(name, tracker, self.run, note, self._say, before))

    def line(self, line: Mapping[str, Any]) -> None:
        """Log a line of metrics.jsonl. Never waits."""
        for channel in self._channels:
            channel.lines.put(line)

    def end(self, state: str) -> None:
        """Deliver what is left; give up after a minute, or soon if no connection was made during the whole run."""
        for channel in self._channels:
            channel.lines.put(state)
            channel.hurry.set()
        for channel in self._channels:
            channel.thread.join(CLOSE_SECONDS if channel.opened is not None else OPEN_SECONDS)
        if late := [channel for channel in self._channels if channel.thread.is_alive()]:
            for channel in late:
                channel.say = lambda text: None  # it is said here; the command may have ended by then
            names = ", ".join(channel.name for channel in late)
            self._say(f"{names}: not everything could be logged in time; the run is not affected")
        self._channels.clear()


class _Channel:
    """The way to one tracker: a queue of lines, and the thread that delivers them."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run: TrackedRun,
        note: _Note,
        say: Callable[[str], None],
        lines: Iterable[Mapping[str, Any]],
    ) -> None:
        self.name = name
        self.opened: Opened | None = None
        self.lines: queue.SimpleQueue[Mapping[str, Any] | str] = queue.SimpleQueue()
        self.hurry = threading.Event()
        self._tracker, self._run, self._note, self.say = tracker, run, note, say
        for line in lines:
            self.lines.put(line)
        self.thread = threading.Thread(target=self._work, name=f"efcil-{name}", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            self._deliver_all()
        except Exception as error:
            self.say(_stopped(self.name, error))

    def _deliver_all(self) -> None:
        opened = self._tracker.open(self._run, self._note.earlier.get(self.name))
        self.opened = opened
        if opened.where:
            self.say(f"{self.name}: {opened.where}")
        records, state = Records(self._run.before, self._run.before), None
        self._note.write(self.name, opened.id, max(records.number, opened.records))
        while state is None:
            batch, state = self._next()
            made = [record for line in batch if (record := records.add(line)) is not None]
            # The logged run of an earlier attempt may have more than the checkpoint that the run resumes from.
            new = [record for record in made if record.number > opened.records]
            if new:
                self._tracker.scalars(new)
            if any(record.kind == "task" for record in new):
                self._note.write(self.name, opened.id, max(records.number, opened.records))
            self.hurry.wait(DELIVERY_SECONDS)
        self._tracker.close(state)
        self._note.write(self.name, opened.id, max(records.number, opened.records))

    def _next(self) -> tuple[list[Mapping[str, Any]], str | None]:
        """Wait for a line; return all that have come, and how the run ended if that has come too."""
        batch: list[Mapping[str, Any]] = []
        item = self.lines.get()
        while not isinstance(item, str):
            batch.append(item)
            try:
                item = self.lines.get_nowait()
            except queue.Empty:
                return batch, None
        return batch, item


def _stopped(name: str, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300]
    return f"{name}: logging has stopped ({type(error).__name__}: {reason}); training continues"


class _Note:
    """Which logged runs belong to a run, in a file of its folder."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self.earlier = _read_note(file)
        self._known = dict(self.earlier)

    def write(self, name: str, number: str, records: int) -> None:
        """Note a logged run, and how many records it has. A folder that cannot be written to stops nothing."""
        if not number or self._known.get(name) == Opened(number, records):
            return
        with self._lock, suppress(OSError, RunFolderError):
            self._known[name] = Opened(number, records)
            content = {key: {"id": each.id, "records": each.records} for key, each in self._known.items()}
            write_own(self._file, json.dumps(content) + "\n")


def _read_note(file: Path) -> dict[str, Opened]:
    try:
        content = safe_json.parse(read_regular(file, MOST_BYTES).decode())
        return {str(name): Opened(str(each["id"]), int(each["records"])) for name, each in content.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RunFolderError):
        return {}
