"""`efcil watch`: the state of runs, read from their files alone."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from efcil.cli import main
from efcil.commands import watch
from efcil.files import locked, this_computer
from efcil.watching import FAILED, FINISHED, INTERRUPTED, RUNNING, WAITING, Seen, Watched, Watcher, planned
from efcil.watching.planned import PREFIX, SUFFIX
from efcil.watching.reading import SILENT_SECONDS
from efcil.watching.showing import sparkline, summary

BEGUN = "2026-01-01 10:00:00 +0000  efcil 0.3.0  efcil run\n"
NOW = 2_000_000_000.0


def line(kind: str, task: int, **values: Any) -> str:
    return json.dumps({"kind": kind, "task": task, **values}) + "\n"


def epoch(task: int, number: int, loss: float = 1.0, seconds: float = 2.0) -> str:
    return line("epoch", task, epoch=number, losses={"a": loss, "b": 0.5}, learning_rate=0.1, seconds=seconds)


def end(task: int, accuracy: float | None) -> str:
    return line("task", task, A_step=accuracy, accuracy=[accuracy], seconds={})


def make(path: Path, metrics: str = "", log: str = "", lock: str | None = None, written: float = NOW - 5) -> Path:
    path.mkdir(parents=True)
    (path / "settings.yaml").write_text("resolved:\n  first_task: {epochs: 4}\n  later: {epochs: 2}\n")
    (path / "metrics.jsonl").write_text(metrics)
    (path / "log.txt").write_text(log)
    if lock is not None:
        (path / ".lock").write_text(lock)
    for file in path.iterdir():
        os.utime(file, (written, written))
    return path


def look(path: Path) -> Seen:
    return Watched(path, lambda: NOW).look()


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


MINE = f"{os.getpid()} {this_computer()}\n"
ELSEWHERE = "12 another-computer\n"


class TestStates:
    def test_a_running_run(self, tmp_path: Path) -> None:
        log = BEGUN + "runs/x: 3 tasks on cpu\ntask 2/3  epoch 1/2  a 1.0  1 min 40 s left\n"
        path = make(tmp_path / "run", epoch(1, 4) + end(1, 80.0) + epoch(2, 1, loss=0.25), log, MINE)
        seen = look(path)
        assert seen.state == RUNNING
        assert (seen.task, seen.tasks, seen.epoch, seen.epochs) == (1, 3, 1, 2)
        assert seen.loss == 0.75
        assert seen.steps == (80.0,)
        assert seen.seconds_per_epoch == 2.0
        assert seen.seconds_left == 95.0  # the line is five seconds old

    def test_a_finished_run(self, tmp_path: Path) -> None:
        path = make(tmp_path / "run", end(1, 80.0) + end(2, 60.0), BEGUN + "runs/x: 2 tasks on cpu\n")
        (path / "summary.json").write_text(json.dumps({"seconds": {"total": 75.0}}))
        seen = look(path)
        assert (seen.state, seen.task, seen.tasks, seen.steps, seen.seconds) == (FINISHED, 2, 2, (80.0, 60.0), 75.0)

    @pytest.mark.parametrize(
        ("last", "state", "note"),
        [
            ("Failed: The loss is not finite.\nTraceback\n  File x\n", FAILED, "The loss is not finite."),
            ("Stopped in task 1, epoch 2. To resume: efcil run\n", INTERRUPTED, ""),
            ("task 1/3  epoch 1/4\n", INTERRUPTED, "ended without a word"),
        ],
    )
    def test_a_run_that_ended_early(self, tmp_path: Path, last: str, state: str, note: str) -> None:
        # What an earlier attempt said does not count.
        log = BEGUN + "Failed: long ago\n" + BEGUN + last
        seen = look(make(tmp_path / "run", epoch(1, 1), log, f"{ended_process()} {this_computer()}\n"))
        assert (seen.state, seen.note, seen.seconds_left) == (state, note, None)

    def test_a_run_of_another_computer_is_known_by_its_lines(self, tmp_path: Path) -> None:
        assert look(make(tmp_path / "a", log=BEGUN, lock=ELSEWHERE)).state == RUNNING
        silent = look(make(tmp_path / "b", log=BEGUN, lock=ELSEWHERE, written=NOW - SILENT_SECONDS - 60))
        assert (silent.state, silent.note) == (INTERRUPTED, "no line for 6 min")

    def test_a_run_that_waits_for_a_first_task(self, tmp_path: Path) -> None:
        log = BEGUN + "waiting for the first task, which another process (number 3) is training\n"
        assert look(make(tmp_path / "run", log=log, lock=MINE)).state == WAITING

    def test_a_lock_that_is_held_is_seen_and_left_alone(self, tmp_path: Path) -> None:
        path = make(tmp_path / "run", log=BEGUN)
        with locked(path / ".lock"):
            assert look(path).state == RUNNING
            assert (path / ".lock").read_text() == f"{os.getpid()} {this_computer()}\n"
        assert look(path).state == INTERRUPTED

    def test_whatever_lies_there_is_no_error(self, tmp_path: Path) -> None:
        path = make(tmp_path / "run", "nonsense\n{}\n[1]\n" + line("epoch", 1) + epoch(1, 2) + '{"kind": "ep', "\xff")
        (path / "settings.yaml").write_text("resolved: [")
        seen = look(path)
        assert (seen.task, seen.epoch, seen.epochs) == (0, 2, None)
        (path / "metrics.jsonl").unlink()
        os.mkfifo(path / "metrics.jsonl")  # would block a reader that waits for it
        assert look(path).epoch == 0


def test_a_file_that_grows_is_read_where_it_ended_and_one_that_was_cut_again(tmp_path: Path) -> None:
    path = make(tmp_path / "run", epoch(1, 1), BEGUN, MINE)
    watched = Watched(path, lambda: NOW)
    assert watched.look().epoch == 1
    with open(path / "metrics.jsonl", "a") as file:
        file.write(epoch(1, 2) + epoch(1, 3)[:10])
    assert watched.look().epoch == 2
    with open(path / "metrics.jsonl", "a") as file:
        file.write(epoch(1, 3)[10:] + end(1, 50.0))
    assert watched.look().steps == (50.0,)
    (path / "metrics.jsonl").write_text(epoch(1, 1))  # resumed: later lines were removed
    seen = watched.look()
    assert (seen.epoch, seen.steps) == (1, ())


class TestPlans:
    def test_runs_that_have_not_begun_wait(self, tmp_path: Path) -> None:
        watcher = Watcher([tmp_path])
        first = make(tmp_path / "d" / "cs5" / "efc" / "seed0", log=BEGUN, lock=MINE)
        with planned(tmp_path, [first, tmp_path / "d" / "cs5" / "efc" / "seed10", tmp_path / "d/cs5/efc/seed2"]):
            seen = watcher.look()
            assert [(watcher.name(each.path), each.state) for each in seen] == [
                ("d/cs5/efc/seed0", RUNNING),
                ("d/cs5/efc/seed2", WAITING),
                ("d/cs5/efc/seed10", WAITING),
            ]
            # A part of the output folder has its part of the plan.
            assert len(Watcher([tmp_path / "d" / "cs5"]).look()) == 3
        assert len(watcher.look()) == 1
        assert not list(tmp_path.glob(f"{PREFIX}*"))

    def test_relative_folders_are_found_in_a_plan_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "runs").mkdir()
        with planned(Path("runs"), [Path("runs/a/seed0")]):
            assert [each.path for each in Watcher([Path("runs")]).look()] == [Path("runs/a/seed0")]

    def test_a_plan_of_a_killed_command_does_not_count_and_is_removed(self, tmp_path: Path) -> None:
        note = tmp_path / f"{PREFIX}x{SUFFIX}"
        content = {"process": ended_process(), "host": this_computer(), "runs": ["a"]}
        note.write_text(json.dumps(content))
        (tmp_path / f"{PREFIX}y{SUFFIX}").write_text("nonsense")
        half, others = (
            tmp_path / f".{PREFIX}{this_computer()}-{process}{SUFFIX}.abcdefgh.tmp"
            for process in (content["process"], os.getpid())
        )
        for each in (half, others):
            each.write_text("{")
        assert Watcher([tmp_path]).look() == []
        with planned(tmp_path, []):
            assert not note.exists()
            assert not half.exists()
            assert others.exists()

    def test_an_earlier_failure_that_will_be_tried_again_waits(self, tmp_path: Path) -> None:
        path = make(tmp_path / "run", log=BEGUN + "Failed: before\n", written=1000.0)
        assert Watcher([tmp_path]).look()[0].state == FAILED
        with planned(tmp_path, [path]):
            assert Watcher([tmp_path]).look()[0].state == WAITING
            os.utime(path / "log.txt")  # now it has failed in this command
            os.utime(path / "log.txt", (NOW, NOW))
            assert Watcher([tmp_path]).look()[0].state == FAILED

    def test_a_folder_that_cannot_be_written_hinders_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with planned(tmp_path / "file", []):
            pass


class TestCommand:
    def test_once(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        log = BEGUN + "x: 3 tasks on cpu\n"
        make(tmp_path / "d" / "cs5" / "efc" / "seed0", epoch(1, 4) + end(1, 80.0) + epoch(2, 1), log, MINE)
        make(tmp_path / "d" / "cs5" / "efc" / "seed1", log=BEGUN + "Failed: \x1b[2J no\n")
        assert main(["watch", str(tmp_path), "--once"]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert shown[0].split() == ["run", "state", "task", "epoch", "loss", "A_step", "per", "task", "s/epoch", "time"]
        assert shown[1].split() == ["d/cs5/efc/seed0", "running", "2/3", "1/2", "1.5000", "80.00", "▇", "2.00"]
        assert shown[2].split() == ["d/cs5/efc/seed1", "failed"]
        assert shown[3].strip() == "\\x1b[2J no"
        assert shown[4] == "2 runs: 1 running, 1 failed"

    def test_a_file_gets_tables_until_all_have_ended(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = make(tmp_path / "run", epoch(1, 1), BEGUN, MINE)

        def finish(seconds: float) -> None:
            (path / "summary.json").write_text("{}")

        monkeypatch.setattr(watch.time, "sleep", finish)
        assert main(["watch", str(tmp_path)]) == 0
        shown = capsys.readouterr().out
        assert "1 run: 1 running" in shown
        assert shown.endswith("1 run: 1 finished\n")

    @pytest.mark.parametrize("keep", [False, True])
    def test_the_table_is_refreshed_on_a_terminal(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, keep: bool
    ) -> None:
        path = make(tmp_path / "run", epoch(1, 1), BEGUN, MINE)
        naps = 0

        def sleep(seconds: float) -> None:
            nonlocal naps
            naps += 1
            (path / "summary.json").write_text("{}")
            if naps == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr(watch.time, "sleep", sleep)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        assert main(["watch", str(tmp_path), *(["--keep"] if keep else [])]) == 0
        assert naps == (3 if keep else 1)
        assert "1 finished" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ("missing", "missing is not a folder"),
            (".", "There is no run below ."),
            (". --every 0", "--every must be a number of seconds"),
        ],
    )
    def test_mistakes(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        arguments: str,
        message: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(["watch", *arguments.split()]) == 2
        assert message in capsys.readouterr().err

    def test_torch_is_not_needed(self, tmp_path: Path) -> None:
        make(tmp_path / "run", epoch(1, 1), BEGUN)
        code = (
            "import sys; from efcil.cli import main; "
            f"main(['watch', {str(tmp_path)!r}, '--once']); print([m for m in ('torch', 'numpy') if m in sys.modules])"
        )
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert ran.stdout.splitlines()[-1] == "[]"


def test_sparklines_go_from_nothing_to_all() -> None:
    assert sparkline([0.0, 50.0, 100.0, float("nan"), 120.0]) == "▁▅█ █"


def test_the_summary_counts_and_names_the_longest() -> None:
    run = Seen(Path("a"), RUNNING, seconds_left=61.0)
    others = [Seen(Path("b"), FINISHED), dataclasses.replace(run, seconds_left=5.0)]
    assert summary([run, *others]) == "3 runs: 2 running, 1 finished; 1 min 01 s left of those that run"
