from __future__ import annotations

import functools
import io
from pathlib import Path

import pytest

from efcil.engine.progress import Progress, _duration
from efcil.engine.trainer import EpochReport


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
    assert _duration(seconds) == text
