"""The processes of runs that share a GPU."""

import os
import sys
from pathlib import Path

import pytest
import torch

from efcil.engine.hardware import VISIBLE, visible_gpus
from efcil.experiment import grid, workers
from efcil.experiment.workers import MPS_SHARE, mps, share_of_card
from efcil.files import this_computer
from efcil.settings import Settings


@pytest.mark.parametrize(("slots", "share"), [(1, 100), (2, 100), (3, 67), (4, 50), (5, 40), (8, 25)])
def test_runs_together_may_use_the_card_twice(slots, share):
    assert share_of_card(slots) == share


def job(number: int, tmp_path: Path) -> workers.Job:
    """A run that shares nothing with others."""
    return workers.Job(number, Settings(), tmp_path / str(number), (str(number), tmp_path / f"first{number}"))


@pytest.fixture
def control(tmp_path, monkeypatch):
    """Stand in for NVIDIA's program: it notes how it was called."""
    program, notes = tmp_path / workers.MPS_CONTROL, tmp_path / "notes"
    script = f'#!/bin/sh\necho "$@" "$(cat)" "$CUDA_MPS_PIPE_DIRECTORY" >> {notes}\n[ -d "$CUDA_MPS_LOG_DIRECTORY" ]\n'
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(MPS_SHARE, raising=False)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return notes


def test_a_server_of_our_own_is_started_and_ended(control):
    said: list[str] = []
    with mps(said.append, 4) as environment:
        pipe = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert environment[MPS_SHARE] == "50"
        assert Path(pipe).is_dir()
        assert MPS_SHARE not in os.environ
    assert control.read_text().splitlines() == [f"-d  {pipe}", f"quit {pipe}"]
    assert not Path(pipe).exists()
    assert said == []


def test_what_stops_the_group_of_a_grid_does_not_stop_the_server(control):
    """Runs that save their state need it: `timeout` sends its signal to all processes of the group."""
    script = Path(control.parent / workers.MPS_CONTROL)
    asked = f"$({sys.executable} -c 'import os; print(os.getpgrp())')"
    script.write_text(script.read_text().replace("$CUDA_MPS_PIPE_DIRECTORY", asked))
    with mps(print, 4):
        group = int(control.read_text().split()[1])
    assert group != os.getpgrp()


def test_the_server_sees_all_gpus_and_the_runs_those_that_were_chosen(control, monkeypatch):
    script = Path(control.parent / workers.MPS_CONTROL)
    script.write_text(script.read_text().replace('"$CUDA_MPS_PIPE_DIRECTORY"', '"<$CUDA_VISIBLE_DEVICES>"'))
    monkeypatch.setenv(VISIBLE, "3")
    with mps(print, 4) as environment:
        assert environment[VISIBLE] == "3"
    assert control.read_text().split() == ["-d", "<>", "quit", "<>"]


def test_a_server_that_is_named_is_used(control, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "theirs"))
    with mps(print, 4) as environment:
        assert environment["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "theirs")
        assert environment[MPS_SHARE] == "50"
    assert not control.exists()


def test_a_share_that_was_chosen_by_hand_is_kept(control, monkeypatch):
    monkeypatch.setenv(MPS_SHARE, "30")
    with mps(print, 4) as environment:
        assert environment[MPS_SHARE] == "30"


def test_without_the_program_runs_take_turns(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(MPS_SHARE, raising=False)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    said: list[str] = []
    with mps(said.append, 4) as environment:
        assert environment == dict(os.environ)
    assert "not installed" in said[0]


def test_few_runs_get_larger_shares(control, monkeypatch, tmp_path):
    shares = []
    monkeypatch.setattr(workers, "worker_command", lambda *_: ["true"])
    monkeypatch.setattr(workers, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(
        workers,
        "share_of_card",
        lambda slots: shares.append(slots) or share_of_card(slots),  # type: ignore[func-returns-value]
    )
    jobs = [job(number, tmp_path) for number in range(2)]
    assert workers.run_jobs(jobs, tmp_path, 5, None, lambda text: None) == {}
    assert shares == [2]


def test_runs_are_spread_over_all_gpus(control, monkeypatch, tmp_path):
    """No GPU has more runs at a time than asked for, and none is idle while runs wait."""
    monkeypatch.setattr(workers, "POLL_SECONDS", 0.01)
    places, note = tmp_path / "places", tmp_path / "counts"
    places.mkdir()
    # Every run marks its GPU, counts the marks on it, and stays until all four of the first round have come.
    script = (
        f"touch {places}/$CUDA_VISIBLE_DEVICES-$$; ls {places} | grep -c ^$CUDA_VISIBLE_DEVICES- >> {note}; "
        f"for i in $(seq 60000); do [ $(wc -l < {note}) -ge 4 ] && break; sleep 0.01; done; "
        f"rm {places}/$CUDA_VISIBLE_DEVICES-$$; echo $CUDA_VISIBLE_DEVICES >> {tmp_path}/used"
    )
    monkeypatch.setattr(workers, "worker_command", lambda *_: ["sh", "-c", script])
    jobs = [job(number, tmp_path) for number in range(6)]
    said: list[str] = []
    assert workers.run_jobs(jobs, tmp_path, 2, None, said.append, ["3", "GPU-ab"]) == {}
    assert max(map(int, note.read_text().split())) <= 2
    used = (tmp_path / "used").read_text().split()
    assert len(used) == 6
    assert {used.count("3"), used.count("GPU-ab")} <= {2, 3, 4}
    assert sum(line.endswith("started on GPU 3.") for line in said) == used.count("3")


def test_a_run_that_has_a_gpu_for_itself_needs_no_server(control, monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(workers, "worker_command", lambda *_: ["sh", "-c", f"test -z ${MPS_SHARE}"])
    jobs = [job(number, tmp_path) for number in range(2)]
    assert workers.run_jobs(jobs, tmp_path, 1, None, lambda text: None, ["0", "1"]) == {}
    assert workers.run_jobs(jobs, tmp_path, 5, None, lambda text: None, ["0", "1"]) == {}
    assert not control.exists()


@pytest.mark.parametrize(("variable", "expected"), [(None, ["0", "1"]), ("5, GPU-ab,7", ["5", "GPU-ab"])])
def test_gpus_are_named_as_the_surroundings_do(monkeypatch, variable, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if variable is None:
        monkeypatch.delenv(VISIBLE, raising=False)
    else:
        monkeypatch.setenv(VISIBLE, variable)
    assert visible_gpus() == expected


@pytest.mark.parametrize(
    ("devices", "gpus", "chosen"),
    [(["auto", "cuda"], ["0", "1"], ["0", "1"]), (["auto", "cuda:1"], ["0", "1"], []), (["auto"], ["0"], [])],
)
def test_a_gpu_that_was_chosen_is_kept(monkeypatch, devices, gpus, chosen):
    monkeypatch.setattr(grid, "visible_gpus", lambda: gpus)
    assert grid._choice([Settings(device=device) for device in devices]) == chosen


def test_a_grid_says_by_the_clock_how_far_its_runs_are(tmp_path):
    """The runs' own lines are in their logs; the output of the command has one for all of them."""
    said, now = [], 100.0
    jobs = [job(number, tmp_path) for number in range(3)]
    scheduler = workers._Scheduler(jobs, tmp_path, 1, None, said.append, tmp_path, {}, (), False)
    scheduler.clock = lambda: now
    scheduler._line = now - workers.EVERY_SECONDS + workers.FIRST_SECONDS
    scheduler.waiting.remove(jobs[0])
    scheduler.running.append(workers._Worker(jobs[0], None, 0.0, 0, seen=1))
    scheduler.say_if_due()
    now += 8.0
    scheduler.say_if_due()
    folder = jobs[0].folder
    folder.mkdir()
    (folder / ".lock").write_text(f"{os.getpid()} {this_computer()}\n")
    (folder / "log.txt").write_text("x: 5 tasks on cuda\ntask 1/5  epoch 3/9  step 2/3  2 h 00 min left\n")
    os.utime(folder / "log.txt", (4e9, 4e9))  # just now: no time has passed since
    now += 24.0
    scheduler.say_if_due()
    now += 1.0
    scheduler.say_if_due()
    assert said == [
        "1 of 3 runs train, 2 wait; time left not known yet",
        "1 of 3 runs train (task 1/5), 2 wait; 2 h 00 min left of those that run",
    ]
