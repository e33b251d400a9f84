"""The state of runs as their files tell it: summary, metrics, log and lock. Nothing is written or locked.

A run writes a line to its log at least every half minute, so a run of another computer that is silent for minutes has
ended without a word.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from efcil import safe_json, safe_yaml
from efcil.errors import RunFolderError
from efcil.files import lock_is_held, open_regular, read_regular
from efcil.watching.planned import FRESH_SECONDS, Plan, plans

RUNNING, WAITING, FINISHED, FAILED, INTERRUPTED = "running", "waiting", "finished", "failed", "interrupted"
#: Seconds without a line after which a run of another computer counts as ended.
SILENT_SECONDS = 300.0
LOG_TAIL_BYTES = 1 << 16
RECENT_EPOCHS = 5
#: Folders that hold no runs.
_NO_RUNS = ("model", "partial", "first-tasks", "wandb", "mlruns")
_BEGINNING = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+  efcil ")
_TASKS = re.compile(r": (\d+) tasks on |^task \d+/(\d+) ", re.M)
_LEFT = re.compile(r"(?:(\d+) h )?(?:(\d+) min ?)?(?:(\d+) s )?left$")


@dataclass(frozen=True)
class Seen:
    """What can be seen of a run. `task` and `epoch` count what is done; None where nothing is known."""

    path: Path
    state: str
    note: str = ""
    task: int = 0
    tasks: int | None = None
    epoch: int = 0
    epochs: int | None = None
    loss: float | None = None
    steps: tuple[float, ...] = ()  # A_step after every task
    seconds_per_epoch: float | None = None
    seconds_left: float | None = None
    seconds: float | None = None  # in all, of a finished run


@dataclass
class _Metrics:
    """What the lines of metrics.jsonl come to, read as the file grows."""

    offset: int = 0
    file: int = 0
    task: int = 0
    epoch: int = 0
    loss: float | None = None
    steps: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, line: str) -> None:
        try:
            values = safe_json.parse(line)
            task = int(values["task"])
            if values["kind"] == "epoch":
                if task != self.task + 1 or int(values["epoch"]) < self.epoch:
                    self.seconds.clear()
                self.task, self.epoch = task - 1, int(values["epoch"])
                self.loss = _number(sum(values["losses"].values()))
                self.seconds = [*self.seconds[1 - RECENT_EPOCHS :], float(values["seconds"])]
            elif values["kind"] == "task":
                self.task, self.epoch, self.loss = task, 0, None
                self.steps.append(math.nan if values["A_step"] is None else float(values["A_step"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            pass  # a line of another version, or a damaged one: `efcil report` says so


class Watched:
    """One run folder. What was read is remembered: only what is new is read again."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self.path = path
        self._now = now
        self._metrics = _Metrics()
        self._done: Seen | None = None
        self._epochs: tuple[int | None, int | None] | None = None

    def look(self, plan: Plan | None = None) -> Seen:
        """Return what can be seen now; `plan` is that of a command which will train this run, if there is one."""
        finished = (self.path / "summary.json").is_file()
        if finished and self._done is not None:
            return self._done
        self._read_metrics()
        log, written = _tail(self.path / "log.txt")
        seen = self._position(log)
        if finished:
            self._done = replace(
                seen, state=FINISHED, task=seen.tasks or seen.task, loss=None, seconds=self._total_seconds()
            )
            return self._done
        self._done = None
        state, note = self._state(log, written, plan)
        if state == RUNNING:
            left = _seconds_left(log)
            left = None if left is None else max(0.0, left - max(0.0, self._now() - written))
            return replace(seen, state=state, note=note, seconds_left=left)
        return replace(seen, state=state, note=note)

    def _state(self, log: str, written: float, plan: Plan | None) -> tuple[str, str]:
        held = lock_is_held(self.path / ".lock")
        silent = self._now() - max(written, _changed(self.path / "metrics.jsonl"), _changed(self.path / ".lock"))
        if held or (held is None and silent < SILENT_SECONDS):
            last = log.splitlines()[-1] if log else ""
            waiting = "waiting for the first task" in last
            return (WAITING, "for the first task, which another run is training") if waiting else (RUNNING, "")
        if plan is not None and written < plan.began:
            return WAITING, ""
        if held is None:
            return INTERRUPTED, f"no line for {silent / 60:.0f} min"
        attempt = _last_attempt(log)
        for line in reversed(attempt):
            if line.startswith("Failed: "):
                return FAILED, line.removeprefix("Failed: ")
            if line.startswith("Stopped "):
                return INTERRUPTED, ""
        return (INTERRUPTED, "ended without a word") if attempt else (WAITING, "")

    def _position(self, log: str) -> Seen:
        metrics = self._metrics
        found = [int(first or second) for first, second in _TASKS.findall(log)]
        tasks = found[-1] if found else None
        first, later = self._recipes()
        done = tasks is not None and metrics.task >= tasks
        return Seen(
            self.path,
            RUNNING,
            task=metrics.task,
            tasks=tasks,
            epoch=metrics.epoch,
            epochs=None if done else first if metrics.task == 0 else later,
            loss=metrics.loss,
            steps=tuple(metrics.steps),
            seconds_per_epoch=sum(metrics.seconds) / len(metrics.seconds) if metrics.seconds else None,
        )

    def _recipes(self) -> tuple[int | None, int | None]:
        """Return the epochs of the first task and of later ones, as settings.yaml records them."""
        if self._epochs is None:
            found: list[int | None] = [None, None]
            with suppress(OSError, ValueError, safe_yaml.YamlError, KeyError, TypeError, RunFolderError):
                resolved = safe_yaml.parse(read_regular(self.path / "settings.yaml", safe_yaml.MOST_BYTES).decode())[
                    "resolved"
                ]
                found = [int(resolved[stage]["epochs"]) for stage in ("first_task", "later")]
            self._epochs = (found[0], found[1])
        return self._epochs

    def _total_seconds(self) -> float | None:
        with suppress(OSError, ValueError, KeyError, TypeError, RunFolderError):
            content = read_regular(self.path / "summary.json", safe_json.MOST_BYTES).decode()
            return _number(safe_json.parse(content)["seconds"]["total"])
        return None

    def _read_metrics(self) -> None:
        """Read the lines that were added since the last look; a file that was cut or replaced is read again."""
        with suppress(OSError, RunFolderError), open_regular(self.path / "metrics.jsonl", "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._metrics.file or status.st_size < self._metrics.offset:
                self._metrics = _Metrics(file=status.st_ino)
            file.seek(self._metrics.offset)
            *lines, rest = file.read().split(b"\n")
            self._metrics.offset = file.tell() - len(rest)
            for line in lines:
                self._metrics.add(line.decode(errors="replace"))


class Watcher:
    """All runs at or below some folders."""

    def __init__(self, roots: Sequence[Path]) -> None:
        for root in roots:
            if not root.is_dir():
                raise RunFolderError(f"{root} is not a folder. Give one that `efcil run --output` writes to.")
        self.roots = [Path(os.path.normpath(root)) for root in roots]
        self._known: dict[Path, Watched] = {}

    def look(self) -> list[Seen]:
        """Return what can be seen of every run now, those of a plan that have not begun last."""
        found = list(dict.fromkeys(path for root in self.roots for path in _run_folders(root)))
        live = {path: plan for plan in self._plans() for path in plan.runs if self._below(path)}
        for path in found:
            self._known.setdefault(path, Watched(path))
        seen = [self._known[path].look(live.get(path)) for path in found]
        active = {each.path for each in seen if each.state in (RUNNING, WAITING)}
        there = {each.path for each in seen}
        waiting = [path for path, plan in live.items() if path not in there and self._counts(plan, active)]
        return [*seen, *(Seen(path, WAITING) for path in sorted(waiting, key=_natural))]

    def name(self, path: Path) -> str:
        """Return a run's name: its path below the folder that is watched."""
        for root in self.roots:
            if path.is_relative_to(root) and path != root:
                return path.relative_to(root).as_posix()
        return "/".join(path.absolute().parts[-2:])

    def _plans(self) -> list[Plan]:
        # A note lies in the output folder, which may be above the folder that is watched.
        places = dict.fromkeys(place for root in self.roots for place in (root, *list(root.absolute().parents)[:4]))
        return [plan for place in places for plan in _relative(plans(place), self.roots)]

    def _below(self, path: Path) -> bool:
        return any(path == root or path.is_relative_to(root) for root in self.roots)

    def _counts(self, plan: Plan, active: set[Path]) -> bool:
        return bool(plan.alive) or time.time() - plan.began < FRESH_SECONDS or bool(active & plan.runs)


def _relative(found: Iterable[Plan], roots: Sequence[Path]) -> Iterator[Plan]:
    """Yield plans with their runs named as the watched folders are: relative where those are."""
    for plan in found:
        runs: set[Path] = set()
        for run in plan.runs:
            whole = Path(os.path.normpath(run.absolute()))
            for root in roots:
                if whole.is_relative_to(root.absolute()):
                    runs.add(Path(os.path.normpath(root / whole.relative_to(root.absolute()))))
        yield replace(plan, runs=frozenset(runs))


def _run_folders(root: Path) -> list[Path]:
    found = []
    for folder, names, files in os.walk(root):
        if "settings.yaml" in files or "summary.json" in files:
            found.append(Path(folder))
            names.clear()
        names[:] = [name for name in names if name not in _NO_RUNS and not name.startswith(".")]
    return sorted(found, key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", str(path))]


def _tail(file: Path) -> tuple[str, float]:
    """Return the end of a log, and when it was written."""
    with suppress(OSError, RunFolderError), open_regular(file, "rb") as stream:
        status = os.fstat(stream.fileno())
        stream.seek(max(0, status.st_size - LOG_TAIL_BYTES))
        return stream.read().decode(errors="replace"), status.st_mtime
    return "", 0.0


def _last_attempt(log: str) -> list[str]:
    lines = log.splitlines()
    begun = [number for number, line in enumerate(lines) if _BEGINNING.match(line)]
    return lines[begun[-1] :] if begun else lines


def _seconds_left(log: str) -> float | None:
    """Return the time left that the last such line of the present attempt names."""
    for line in reversed(_last_attempt(log)):
        if (match := _LEFT.search(line)) is not None and any(match.groups()):
            hours, minutes, seconds = (int(each or 0) for each in match.groups())
            return 3600.0 * hours + 60.0 * minutes + seconds
    return None


def _changed(file: Path) -> float:
    with suppress(OSError):
        return file.lstat().st_mtime
    return 0.0


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
