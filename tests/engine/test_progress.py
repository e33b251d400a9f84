from __future__ import annotations

import functools
import io
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from efcil.activity import Activity, doing
from efcil.engine.progress import Progress, Pulse, Waiting, duration
from efcil.engine.trainer import TRAINING, EpochReport


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report(epoch: int, epochs: int) -> EpochReport:
    return EpochReport(epoch, epochs, {"current": 0.5, "drift": 0.25}, 1e-3, 2.0)


def tell(progress: Progress, epochs: int) -> None:
    with progress:
        progress.say("a run")
        progress.begin_task(1, epochs, later_epochs=epochs)
        for epoch in range(epochs):
            progress.epoch(report(epoch, epochs))
        progress.end_task("task 2 done")


def test_plain_output_is_a_few_lines_and_the_log_has_them_too(tmp_path: Path) -> None:
    stream = io.StringIO()
    tell(Progress(3, tmp_path / "log.txt", stream=stream), epochs=100)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1 + 10 + 1
    assert lines[0] == "a run"
    # Two seconds for each of the 90 epochs left in this task, and for the 100 after it.
    assert lines[1] == "task 2/3  epoch 10/100  current 0.5000  drift 0.2500  6 min 20 s left"
    assert lines[-1] == "task 2 done"
    assert (tmp_path / "log.txt").read_text().splitlines() == lines


def test_a_short_task_has_a_line_per_epoch() -> None:
    stream = io.StringIO()
    tell(Progress(3, stream=stream), epochs=3)
    assert len(stream.getvalue().splitlines()) == 1 + 3 + 1


def test_quiet_leaves_the_log(tmp_path: Path) -> None:
    stream = io.StringIO()
    tell(Progress(3, tmp_path / "log.txt", quiet=True, stream=stream), epochs=3)
    assert stream.getvalue() == ""
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 5


def test_a_log_is_continued(tmp_path: Path) -> None:
    for _ in range(2):
        tell(Progress(3, tmp_path / "log.txt", quiet=True), epochs=1)
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 6


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full to stand for a full disk")
def test_a_log_that_cannot_be_written_is_told_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = functools.partial(open, "/dev/full", "a")
    monkeypatch.setattr("efcil.engine.progress.open_regular", lambda *_, **__: full())
    stream = io.StringIO()
    tell(Progress(3, tmp_path / "log.txt", stream=stream), epochs=3)
    assert len(stream.getvalue().splitlines()) == 5
    assert capsys.readouterr().err == f"{tmp_path / 'log.txt'} cannot be written (No space left on device).\n"


def _fail_after_a_line(progress: Progress) -> None:
    progress.log("a line")
    raise ZeroDivisionError


def test_the_error_of_a_run_is_not_hidden_by_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), Progress(3, tmp_path, quiet=True) as progress:  # a folder is no file
        _fail_after_a_line(progress)
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path} is a folder, but efcil writes a file there.")
    assert said.count("\n") == 1


def test_a_log_holds_whatever_names_there_are(tmp_path: Path) -> None:
    with Progress(3, tmp_path / "log.txt", quiet=True) as progress:
        progress.log("odd \udcff name")
    assert (tmp_path / "log.txt").read_text() == "odd \\udcff name\n"


def test_a_reader_that_has_gone_stops_nothing(tmp_path: Path) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    tell(Progress(3, tmp_path / "log.txt", stream=Gone()), epochs=20)
    assert (tmp_path / "log.txt").read_text().splitlines()[-1] == "task 2 done"


def test_bars_on_a_terminal(tmp_path: Path) -> None:
    stream = Terminal()
    tell(Progress(3, tmp_path / "log.txt", stream=stream), epochs=4)
    shown = stream.getvalue()
    for part in ("a run", "tasks", "epochs", "4/4", "task 2 done"):
        assert part in shown
    assert "epoch 4/4" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3599, "59 min 59 s"), (7500, "2 h 05 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class FakeClock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def beating(clock: FakeClock, progress: Progress, seconds: float, step: float = 1.0) -> None:
    """Let time pass, and the thread's part be done once a second."""
    for _ in range(int(seconds / step)):
        clock.now += step
        progress.beat()


def test_a_long_epoch_says_how_far_it_is_within_ten_seconds_and_twice_a_minute(clock: FakeClock) -> None:
    stream = io.StringIO()
    with Progress(2, stream=stream, clock=clock, tick=None) as progress:
        progress.begin_task(0, epochs=2, later_epochs=1.0, later_tasks=1)
        with doing(TRAINING, total=200) as work:
            for _ in range(60):
                work.done += 1
                beating(clock, progress, 1.0)
    said = stream.getvalue().splitlines()
    # One step a second: at the first line 195 of this task are left, and an epoch of 100 after it.
    assert said[0] == "task 1/2  epoch 1/2  step 5/100  4 min 55 s left"
    assert said[1] == "task 1/2  epoch 1/2  step 30/100  4 min 30 s left"
    assert len(said) == 3


def test_a_step_that_takes_long_is_said_too(clock: FakeClock) -> None:
    stream = io.StringIO()
    with Progress(1, stream=stream, clock=clock, tick=None) as progress:
        progress.begin_task(0, epochs=1)
        with doing(TRAINING, total=50):
            beating(clock, progress, 10.0)
    assert stream.getvalue() == "task 1/1  epoch 1/1  step 0/50  time left not known yet\n"


def test_a_resumed_task_measures_its_own_steps_only(clock: FakeClock) -> None:
    stream = io.StringIO()
    with Progress(1, stream=stream, clock=clock, tick=None) as progress:
        progress.begin_task(0, epochs=4, done=2)
        with doing(TRAINING, total=400, done=250) as work:
            clock.now += 9.0
            work.done += 9
            progress.beat()
    assert stream.getvalue() == "task 1/1  epoch 3/4  step 59/100  2 min 21 s left\n"


def test_phases_without_epochs_are_said_with_what_later_tasks_need(clock: FakeClock, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with Progress(3, log, quiet=True, clock=clock, tick=None) as progress:
        progress.begin_task(0, epochs=1, later_epochs=2.0, later_tasks=2)
        progress.epoch(report(0, 1))  # two seconds
        with doing("statistics"), doing("images", 400) as work:
            clock.now += 40.0
            work.done = 100
            progress.beat()
        progress.end_task("task 1 done")
        progress.enter_task(1)
        with doing("preparing the images of the task"):
            beating(clock, progress, 26.0)
    said = log.read_text().splitlines()
    # Three times as many images are left, then two tasks of an epoch each, with as many images at their ends.
    assert said[1] == "task 1/3  statistics: images 100/400  (40 s so far)  7 min 24 s left"
    assert said[2] == "task 1 done"
    # The end of the first task took 40 seconds.
    assert said[3].startswith("task 2/3  preparing the images of the task  (25 s so far)")


def test_an_end_that_takes_longer_than_the_one_before_is_expected_of_later_tasks(clock: FakeClock) -> None:
    stream = io.StringIO()
    with Progress(3, stream=stream, clock=clock, tick=None) as progress:
        progress.begin_task(0, epochs=1, later_epochs=2.0, later_tasks=2)
        progress.epoch(report(0, 1))  # two seconds
        clock.now += 1.0
        progress.end_task("task 1 done")
        for task, later in ((1, 1), (2, 0)):
            progress.begin_task(task, epochs=1, later_epochs=float(later), later_tasks=later)
            progress.epoch(report(0, 1))
            with doing("statistics"):
                clock.now += 100.0 * task
                progress.beat()
            progress.end_task(f"task {task + 1} done")
    said = [line for line in stream.getvalue().splitlines() if "so far" in line]
    assert said == [
        "task 2/3  statistics  (1 min 40 s so far)  1 min 42 s left",
        "task 3/3  statistics  (3 min 20 s so far)  time left not known yet",
    ]


def test_before_the_first_task_there_is_a_line_too(clock: FakeClock) -> None:
    stream = io.StringIO()
    with Progress(3, stream=stream, clock=clock, tick=None) as progress, doing("decoding images", 1000) as work:
        work.done = 250
        beating(clock, progress, 10.0)
    assert stream.getvalue() == "decoding images 250/1,000  (5 s so far)  15 s left\n"


def test_the_time_expected_before_the_start_is_used_until_something_is_measured(clock: FakeClock) -> None:
    stream = io.StringIO()
    with Progress(1, stream=stream, clock=clock, tick=None) as progress:
        progress.expect(100.0)
        with doing("statistics"):
            beating(clock, progress, 9.0)
            beating(clock, progress, 120.0)
    said = stream.getvalue().splitlines()
    assert said[0] == "statistics  (5 s so far)  1 min 35 s left"
    assert said[-1].endswith("time left not known yet")


def test_lines_of_epochs_count_as_lines(clock: FakeClock) -> None:
    stream = io.StringIO()
    with Progress(1, stream=stream, clock=clock, tick=None) as progress:
        progress.begin_task(0, epochs=10)
        with doing(TRAINING, total=100) as work:
            for epoch in range(10):
                work.done += 10
                beating(clock, progress, 4.0)
                progress.epoch(report(epoch, 10))
    assert [line.count("step") for line in stream.getvalue().splitlines()] == [0] * 10


def test_bars_say_what_is_being_done(clock: FakeClock) -> None:
    stream = Terminal()
    with Progress(3, stream=stream, clock=clock, tick=None) as progress:
        progress.begin_task(0, epochs=0)  # a task that trains nothing has no bar for epochs
        with doing("statistics"):
            beating(clock, progress, 2.0)
    assert "statistics" in stream.getvalue()
    assert "epochs" not in stream.getvalue()


def test_the_thread_beats_and_ends() -> None:
    beaten = threading.Event()
    with Pulse(beaten.set, tick=0.001) as pulse:
        assert beaten.wait(60)
        thread = pulse._thread
    assert thread is not None
    assert not thread.is_alive()


def test_what_is_done_before_a_run_is_said(clock: FakeClock) -> None:
    said: list[str] = []
    with Waiting(said.append, clock, tick=None) as waiting:
        waiting.beat()
        with doing("loading the images of digits"), doing("decoding images", 100) as work:
            for _ in range(40):
                clock.now += 1.0
                work.done += 1
                waiting.beat()
    assert said == [
        "loading the images of digits: decoding images 5/100  (5 s so far)  1 min 35 s left",
        "loading the images of digits: decoding images 30/100  (30 s so far)  1 min 10 s left",
    ]


def test_work_that_nobody_follows_is_not_kept(clock: FakeClock) -> None:
    activity = Activity(clock)
    with doing("something") as work:
        work.done += 1
    assert activity.stack == ()


def test_work_left_half_way_takes_nothing_else_with_it(clock: FakeClock) -> None:
    activity = Activity(clock)

    def pieces() -> Iterator[int]:
        with activity.doing("pieces", 2):
            yield 1
            yield 2

    half = pieces()
    next(half)
    with activity.doing(TRAINING):
        half.close()
        assert [work.what for work in activity.stack] == [TRAINING]
    assert activity.stack == ()
