"""Progress of a run: bars on a terminal, plain lines elsewhere, and always the log.

What the run reports itself comes at most once per epoch or task. In between, a thread that sleeps most of the time says
by the clock what the run is doing and how long it will take: an epoch, the statistics of a task or the decoding of
images can take many minutes on a CPU. It reads counters that the work keeps anyway, so training does not wait for it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from efcil.activity import Activity, Work, followed
from efcil.engine.trainer import TRAINING, EpochReport
from efcil.files import ForeignFile, open_regular
from efcil.output import duration, lines

LINES_PER_TASK = 10
REFRESH_SECONDS = 0.1
#: A line comes so many seconds after the start (before which PyTorch was loaded), and after the line before.
FIRST_SECONDS, EVERY_SECONDS = 5.0, 25.0
#: How often the clock is looked at.
TICK_SECONDS = 1.0


class Pulse:
    """Calls `beat` every second in a thread of its own while it is entered."""

    def __init__(self, beat: Callable[[], None], tick: float = TICK_SECONDS) -> None:
        self._beat = beat
        self._tick = tick
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Pulse:
        self._over.clear()
        self._thread = threading.Thread(target=self._run, name="efcil-progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        with suppress(OSError, ValueError):  # nobody reads the output any more; that ends no run
            while not self._over.wait(self._tick):
                self._beat()


class Waiting:
    """Says what is being done before a run begins, such as loading images: after five seconds, then every 25."""

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic, tick: float | None = TICK_SECONDS
    ) -> None:
        self._say = say
        self._clock = clock
        self._tick = tick
        self.activity = Activity(clock)
        self._last = clock() - EVERY_SECONDS + FIRST_SECONDS
        self._stack = ExitStack()

    def __enter__(self) -> Waiting:
        self._stack.enter_context(followed(self.activity))
        if self._tick is not None:
            self._stack.enter_context(Pulse(self.beat, self._tick))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def beat(self) -> None:
        """Say what is going on, if it is time to."""
        now, stack = self._clock(), self.activity.stack
        # Between two runs there are many pieces of work that take a moment; these are not worth a line.
        if stack and now - self._last >= EVERY_SECONDS and now - stack[0].began >= FIRST_SECONDS:
            self._last = now
            self._say(activity_line(stack, now))


class Progress:
    """Shows the progress of a run. Bars need a terminal; `quiet` leaves only the log.

    `tick` is how often the clock is looked at; None leaves that to the caller, who calls `beat`.
    """

    def __init__(
        self,
        tasks: int,
        log: Path | None = None,
        *,
        quiet: bool = False,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        tick: float | None = TICK_SECONDS,
    ) -> None:
        self.tasks = tasks
        self.quiet = quiet
        self.stream = stream if stream is not None else sys.stdout
        self.activity = Activity(clock)
        self._clock = clock
        self._tick = tick
        self._stack = ExitStack()
        self._lock = threading.RLock()
        self._log = log
        self._log_is_lost = False
        self._bars: Bars | None = None
        self._task_bar: TaskID | None = None
        self._epoch_bar: TaskID | None = None
        self._task: int | None = None
        self._epochs = 0
        self._later_epochs = 0.0
        self._later_tasks = 0
        self._shown = 0.0
        self._last_line = clock() - EVERY_SECONDS + FIRST_SECONDS
        self._seconds: list[float] = []
        #: When training in this task ended, and what the end of the task before took: statistics and tests.
        self._trained: float | None = None
        self._ending = 0.0
        self._end: float | None = None

    def __enter__(self) -> Progress:
        if not self.quiet and self.stream.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[note]}"),
            )
            # Refreshed after epochs and every second, not more: another thread feeds the GPU.
            self._bars = Bars(*columns, console=Console(file=self.stream), auto_refresh=False, transient=True)
            self._task_bar = self._bars.add_task("tasks ", total=self.tasks, note="")
            self._epoch_bar = self._bars.add_task("epochs", total=1, note="", visible=False)
            self._bars.start()
        self._stack.enter_context(followed(self.activity))
        if self._tick is not None:
            self._stack.enter_context(Pulse(self.beat, self._tick))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def say(self, text: str) -> None:
        """Print and log some lines, with control characters escaped: names of classes may contain them."""
        text = lines(text)
        with self._lock:
            self.log(text)
            if self.quiet:
                return
            try:
                if self._bars is not None:
                    self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
                else:
                    print(text, file=self.stream, flush=True)
            except BrokenPipeError:  # the reader of the output has closed it; the log has the line, training continues
                self.quiet = True

    def log(self, text: str) -> None:
        """Log some lines without printing them.

        Never raises, so that it cannot hide the error that ended the run: a failure to write the log is reported once.
        """
        if self._log is None:
            return
        try:
            with self._lock, open_regular(self._log, "a", encoding="utf-8", errors="backslashreplace") as file:
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

    # -- what the run reports ------------------------------------------------------------------------------------

    def expect(self, seconds: float) -> None:
        """Note how long all that follows is expected to take, until something better is measured."""
        self._end = self._clock() + seconds

    def enter_task(self, task: int) -> None:
        """Say which task (from 0) is next, before anything of it is trained."""
        with self._lock:
            self._task, self._epochs, self._trained, self._seconds = task, 0, None, []

    def trained_before(self, seconds: Sequence[float]) -> None:
        """Note the seconds of epochs that another run has trained for this task."""
        with self._lock:
            self._seconds, self._trained = list(seconds), self._clock()

    def begin_task(
        self, task: int, epochs: int, done: int = 0, later_epochs: float = 0.0, later_tasks: int = 0
    ) -> None:
        """Announce task `task` (from 0): `done` of its `epochs` are done; a task that trains nothing has none.

        `later_tasks` follow, with as much to train as `later_epochs` epochs of this task.
        """
        with self._lock:
            self._task, self._epochs, self._trained, self._seconds = task, epochs, None, []
            self._later_epochs, self._later_tasks = later_epochs, later_tasks
            if done >= epochs:
                self._trained = self._clock()
            if self._bars is not None and self._task_bar is not None and self._epoch_bar is not None:
                self._bars.update(self._task_bar, completed=task, total=self.tasks, note="")
                self._bars.update(self._epoch_bar, total=max(epochs, 1), completed=done, note="", visible=epochs > 0)
                self._bars.refresh()

    def epoch(self, report: EpochReport) -> None:
        """Report a finished epoch: always in the bars; in the log and plain output only every tenth of the task."""
        with self._lock:
            self._seconds.append(report.seconds)
            done, epochs = report.epoch + 1, report.epochs
            if done == epochs:
                self._trained = self._clock()
            terms = "  ".join(f"{name} {value:.4f}" for name, value in report.terms.items())
            note = f"{terms}  {duration(self._left(epochs - done))} left"
            if self._bars is not None and self._epoch_bar is not None:
                self._bars.update(self._epoch_bar, completed=done, note=note)
                now = time.monotonic()
                if now - self._shown >= REFRESH_SECONDS or done == epochs:
                    self._shown = now
                    self._bars.refresh()
            if done * LINES_PER_TASK // epochs > (done - 1) * LINES_PER_TASK // epochs:
                self._tell(f"{self._place()}  epoch {done}/{epochs}  {note}")

    def end_task(self, text: str) -> None:
        """Report how a task ended."""
        with self._lock:
            self.say(text)
            self._last_line = self._clock()
            if self._trained is not None:
                self._ending = self._clock() - self._trained
            if self._bars is not None and self._task_bar is not None and self._epoch_bar is not None:
                self._bars.update(self._task_bar, completed=(self._task or 0) + 1, note="")
                self._bars.update(self._epoch_bar, visible=False)
                self._bars.refresh()

    # -- what is said by the clock -------------------------------------------------------------------------------

    def beat(self) -> None:
        """Say what is being done and how long the rest takes, if nothing has been said for a while."""
        with self._lock:
            now, stack = self._clock(), self.activity.stack
            if not stack:
                return
            line = self._line(stack, now)
            if self._bars is not None and self._task_bar is not None:
                self._bars.update(self._task_bar, note="" if stack[-1].what == TRAINING else activity_line(stack, now))
                self._bars.refresh()
            if now - self._last_line >= EVERY_SECONDS:
                self._tell(line)

    def seconds_left(self) -> float | None:
        """Return the seconds that the rest is expected to take, from what was measured so far; None if unknown."""
        now, stack = self._clock(), self.activity.stack
        left = self._measured_left(stack, now) if stack else None
        if left is None and self._end is not None and self._end > now:
            return self._end - now
        return left

    def _measured_left(self, stack: tuple[Work, ...], now: float) -> float | None:
        left, work = _left_of(stack, now), stack[-1]
        ends = self._ending * self._later_tasks
        if self._steps(work):
            if left is None:
                return None
            each = (now - work.began) / (work.done - work.before)
            return left + self._later_epochs * self._steps(work) * each + ends + self._ending
        if self._task is None or not (self._seconds or self._ending):
            return left
        spent = 0.0 if self._trained is None else now - self._trained
        # If this end takes longer than the one before, later ones will too; without a counter its own rest is unknown.
        ends = max(self._ending, spent + (left or 0.0)) * self._later_tasks
        rest = max(self._ending - spent, left or 0.0) + self._later_epochs * self._seconds_of_epoch() + ends
        return rest or None

    def _steps(self, work: Work) -> int:
        """Return the steps of an epoch while the task trains, 0 otherwise."""
        return work.total // self._epochs if work.what == TRAINING and work.total and self._epochs else 0

    def _line(self, stack: tuple[Work, ...], now: float) -> str:
        words = _left_in_words(self.seconds_left())
        if self._task is None:
            return f"{_in_words(stack, now)}  {words}"
        work = stack[-1]
        if not (steps := self._steps(work)):
            return f"{self._place()}  {_in_words(stack, now)}  {words}"
        epoch = min(work.done // steps, self._epochs - 1)
        step = f"step {work.done - epoch * steps:,}/{steps:,}"
        return f"{self._place()}  epoch {epoch + 1}/{self._epochs}  {step}  {words}"

    def _place(self) -> str:
        return f"task {(self._task or 0) + 1}/{self.tasks}"

    def _tell(self, line: str) -> None:
        """Log a line, and print it where there are no bars."""
        self._last_line = self._clock()
        if self._bars is not None:
            self.log(line)
        else:
            self.say(line)

    def _left(self, epochs: int) -> float:
        """Estimate the seconds that the rest of the run takes, from the last few epochs of this task."""
        ends = self._ending * (1 + self._later_tasks)
        return (epochs + self._later_epochs) * self._seconds_of_epoch() + ends

    def _seconds_of_epoch(self) -> float:
        recent = self._seconds[-5:]
        return sum(recent) / len(recent) if recent else 0.0


def activity_line(stack: tuple[Work, ...], now: float) -> str:
    """Return what is being done, for how long, and how much longer it will take if that is known."""
    return f"{_in_words(stack, now)}  {_left_in_words(_left_of(stack, now))}"


def _left_of(stack: tuple[Work, ...], now: float) -> float | None:
    """Return the seconds left of the outermost work whose speed is known."""
    return next((seconds for work in stack if (seconds := work.seconds_left(now)) is not None), None)


def _in_words(stack: tuple[Work, ...], now: float) -> str:
    return f"{': '.join(map(str, stack))}  ({duration(now - stack[0].began)} so far)"


def _left_in_words(seconds: float | None) -> str:
    return "time left not known yet" if seconds is None else f"{duration(seconds)} left"
