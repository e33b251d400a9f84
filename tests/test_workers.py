"""The processes of runs that share a GPU."""

import os
from pathlib import Path

import pytest

from efcil.experiment import workers
from efcil.experiment.workers import MPS_SHARE, mps, share_of_card
from efcil.settings import Settings


@pytest.mark.parametrize(("slots", "share"), [(1, 100), (2, 100), (3, 67), (4, 50), (5, 40), (8, 25)])
def test_runs_together_may_use_the_card_twice(slots, share):
    assert share_of_card(slots) == share


@pytest.fixture
def control(tmp_path, monkeypatch):
    """Stand in for NVIDIA's program: it notes how it was called."""
    program, notes = tmp_path / workers.MPS_CONTROL, tmp_path / "notes"
    script = f'#!/bin/sh\necho "$@" "$(cat)" "$CUDA_MPS_PIPE_DIRECTORY" >> {notes}\n[ -d "$CUDA_MPS_LOG_DIRECTORY" ]\n'
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(MPS_SHARE, raising=False)
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


def test_a_share_that_was_chosen_by_hand_is_kept(control, monkeypatch):
    monkeypatch.setenv(MPS_SHARE, "30")
    with mps(print, 4) as environment:
        assert environment[MPS_SHARE] == "30"


def test_without_the_program_runs_take_turns(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(MPS_SHARE, raising=False)
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
    jobs = [workers.Job(number, Settings(), tmp_path / str(number), None) for number in range(2)]
    assert workers.run_jobs(jobs, tmp_path, 5, None, lambda text: None) == {}
    assert shares == [2]
