"""Progress of a run: bars on a terminal, a few plain lines elsewhere, and always the log.

Everything here happens at most once per epoch or task, so that it never slows down training.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from efcil.engine.trainer import EpochReport
from efcil.files import ForeignFile, open_regular
from efcil.output import lines

LINES_PER_TASK = 10
REFRESH_SECONDS = 0.1


class Progress:
    """Shows the progress of a run. Bars need a terminal; `quiet` leaves only the log."""

    def __init__(
        self, tasks: int, log: Path | None = None, *, quiet: bool = False, stream: IO[str] | None = None
    ) -> None:
        self.tasks = tasks
        self.quiet = quiet
        self.stream = stream if stream is not None else sys.stdout
        self._log = log
        self._log_is_lost = False
        self._bars: Bars | None = None
        self._task_bar: TaskID | None = None
        self._epoch_bar: TaskID | None = None
        self._task = 0
        self._later_epochs = 0
        self._shown = 0.0
        self._seconds: list[float] = []

    def __enter__(self) -> Progress:
        if not self.quiet and self.stream.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[note]}"),
            )
            # Refreshed after epochs only: a refreshing thread would compete with the one that feeds the GPU.
            self._bars = Bars(*columns, console=Console(file=self.stream), auto_refresh=False, transient=True)
            self._task_bar = self._bars.add_task("tasks ", total=self.tasks, note="")
            self._epoch_bar = self._bars.add_task("epochs", total=1, note="", visible=False)
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def say(self, text: str) -> None:
        """Print and log some lines, with control characters escaped: names of classes may contain them."""
        text = lines(text)
        self.log(text)
        if self.quiet:
            return
        try:
            if self._bars is not None:
                self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, file=self.stream, flush=True)
        except BrokenPipeError:  # the reader of the output has closed it; the log has the line, and training continues
            self.quiet = True

    def log(self, text: str) -> None:
        """Log some lines without printing them.

        Never raises, so that it cannot hide the error that ended the run: a failure to write the log is reported once.
        """
        if self._log is None:
            return
        try:
            with open_regular(self._log, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text + "\n")
        except ForeignFile as error:
            self._lose_log(str(error))
        except OSError as error:
            self._lose_log(f"{self._log} cannot be written ({error.strerror or error}).")

    def _lose_log(self, sentence: str) -> None:
        if not self._log_is_lost:
            self._log_is_lost = True
            with suppress(OSError):
                print(sentence, file=sys.stderr, flush=True)

    def begin_task(self, task: int, epochs: int, done: int = 0, later_epochs: int = 0) -> None:
        """Announce task `task` (from 0): `done` of its `epochs` are done, and `later_epochs` follow in later tasks."""
        self._task, self._later_epochs, self._seconds = task, later_epochs, []
        if self._bars is not None and self._task_bar is not None and self._epoch_bar is not None:
            self._bars.update(self._task_bar, completed=task)
            self._bars.update(self._epoch_bar, total=epochs, completed=done, note="", visible=True)
            self._bars.refresh()

    def epoch(self, report: EpochReport) -> None:
        """Report a finished epoch: always in the bars; in the log and plain output only every tenth of the task."""
        self._seconds.append(report.seconds)
        done, epochs = report.epoch + 1, report.epochs
        terms = "  ".join(f"{name} {value:.4f}" for name, value in report.terms.items())
        note = f"{terms}  {_duration(self._left(epochs - done))} left"
        if self._bars is not None and self._epoch_bar is not None:
            self._bars.update(self._epoch_bar, completed=done, note=note)
            now = time.monotonic()
            if now - self._shown >= REFRESH_SECONDS or done == epochs:
                self._shown = now
                self._bars.refresh()
        if done * LINES_PER_TASK // epochs > (done - 1) * LINES_PER_TASK // epochs:
            line = f"task {self._task + 1}/{self.tasks}  epoch {done}/{epochs}  {note}"
            if self._bars is not None:
                self.log(line)
            else:
                self.say(line)

    def end_task(self, text: str) -> None:
        """Report how a task ended."""
        self.say(text)
        if self._bars is not None and self._task_bar is not None and self._epoch_bar is not None:
            self._bars.update(self._task_bar, completed=self._task + 1)
            self._bars.update(self._epoch_bar, visible=False)
            self._bars.refresh()

    def _left(self, epochs: int) -> float:
        """Estimate the seconds that the rest of the run takes, from the last few epochs of this task."""
        recent = self._seconds[-5:]
        return (epochs + self._later_epochs) * sum(recent) / len(recent)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
