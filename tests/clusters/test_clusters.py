"""Grids on a real Ray cluster and through submitit, against the same grid in one process.

These tests need packages that the others do not, and minutes: `make test-clusters` installs and runs them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from efcil.engine import checkpoint
from efcil.model.folder import STEM as MODEL
from efcil.runfolder import RunFolder

pytestmark = pytest.mark.skipif(
    "EFCIL_TEST_CLUSTERS" not in os.environ, reason="slow, and needs ray and submitit: run `make test-clusters`"
)

GRID = ["--method", "efc", "finetune", "--seed", "0", "1", "2", "--tasks", "3", "--first-task-epochs", "6"]
GRID += ["--epochs", "6", "--batch-size", "32", "--device", "cpu"]
TIMES = ("seconds", "finished")
#: What says how and when a run was computed, and not what came out. `checksum` is over these too, and so are the
#: digests of files that have seconds in them.
OF_THE_MACHINE = {"seconds", "hardware", "command", "checksum", "finished", "started", "files"}
OF_THE_MACHINE |= {"commit", "uncommitted_changes", "earlier_commits"}
SECONDS = 600


class Command:
    """An `efcil run` in a process of its own, whose lines can be waited for."""

    def __init__(self, *words: str | Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "efcil", "run", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait(self) -> int:
        try:
            return self.process.wait(SECONDS)
        finally:
            self.process.kill()
            self._reader.join(10)


def until(condition: Callable[[], bool], what: str, command: Command | None = None) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen"
        assert command is None or command.process.poll() is None, command.text  # type: ignore[union-attr]
        time.sleep(0.1)


def runs(output: Path) -> dict[str, RunFolder]:
    return {str(file.parent.relative_to(output)): RunFolder(file.parent) for file in output.rglob("settings.yaml")}


def facts(run: RunFolder) -> dict[str, Any]:
    """Everything that a run left behind, without seconds and facts of the machine."""
    summary = {name: value for name, value in run.verified_summary().items() if name not in OF_THE_MACHINE}
    lines = [{name: value for name, value in line.items() if name not in TIMES} for line in run.read_metrics()]
    tables = {file.name: file.read_bytes() for file in run.path.glob("*.csv")}
    names = sorted(file.name for file in run.path.iterdir())
    return {"summary": summary, "lines": lines, "tables": tables, "names": names, "text": run.settings_file.read_text()}


def assert_same(output: Path, expected: Path) -> None:
    left, right = runs(output), runs(expected)
    assert left.keys() == right.keys()
    assert len(left) == 6
    for name, run in left.items():
        assert facts(run) == facts(right[name]), name
        ours, theirs = (checkpoint.read(each.model, MODEL).tensors for each in (run, right[name]))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name
    assert not (output / ".cluster").exists()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The grid, run after run in one process."""
    output = tmp_path_factory.mktemp("here")
    command = Command(*GRID, "--output", output, "--quiet")
    assert command.wait() == 0, command.text
    return output


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A Ray cluster of two nodes with one CPU each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.second = made.add_node(num_cpus=1)
    yield made
    made.shutdown()


def measured(output: Path) -> int:
    """How many runs have ended an epoch."""
    files = output.rglob("metrics.jsonl")
    return sum(file.stat().st_size > 0 and not (file.parent / "summary.json").exists() for file in files)


def test_a_grid_on_ray_survives_the_loss_of_a_node(cluster: Any, expected: Path, tmp_path: Path) -> None:
    start = time.monotonic()
    command = Command(
        *GRID, "--output", tmp_path, "--engine", "ray", "--address", cluster.address, "--checkpoint-steps", "5"
    )
    until(lambda: measured(tmp_path) == 2, "two runs at a time", command)
    cluster.remove_node(cluster.second, allow_graceful=False)
    assert command.wait() == 0, command.text
    print(command.text, f"{time.monotonic() - start:.0f} s")
    assert len(re.findall(r": started again on ", command.text)) == 1
    assert len(re.findall(r": done after ", command.text)) == 6
    assert_same(tmp_path, expected)


def test_a_grid_on_ray_is_stopped_and_resumed(cluster: Any, expected: Path, tmp_path: Path) -> None:
    words = [*GRID, "--output", tmp_path, "--engine", "ray", "--address", cluster.address]
    command = Command(*words)
    until(lambda: measured(tmp_path) == 2, "two runs at a time", command)
    command.process.send_signal(signal.SIGINT)
    assert command.wait() == 130, command.text
    assert "Run the same command again" in command.text
    # Both runs had time to save in the middle of a task, or at its end.
    unfinished = [run for run in runs(tmp_path).values() if not run.summary_file.exists()]
    assert unfinished
    assert all((run.path / "partial").is_dir() or run.model.is_dir() for run in unfinished)
    again = Command(*words)
    assert again.wait() == 0, again.text
    assert_same(tmp_path, expected)


def test_what_a_ray_cluster_lacks_is_said(cluster: Any, tmp_path: Path) -> None:
    words = ["--method", "efc", "--device", "cpu", "--output", tmp_path, "--engine", "ray", "--address"]
    command = Command(*words, cluster.address, "--engine-option", "num_cpus=5")
    assert command.wait() == 2
    assert "No machine of the Ray cluster has what a run asks for: 5 CPU. Its machines have: 1 CPU; 1 CPU." in (
        command.text
    )
    missing = Command(*words, "127.0.0.1:1")
    assert missing.wait() == 2
    assert "There is no Ray cluster at 127.0.0.1:1" in missing.text


def test_a_grid_through_submitit(expected: Path, tmp_path: Path) -> None:
    start = time.monotonic()
    command = Command(*GRID, "--output", tmp_path, "--engine", "submitit-local", "--engine-option", "at_once=2")
    assert command.wait() == 0, command.text
    print(command.text, f"{time.monotonic() - start:.0f} s")
    assert_same(tmp_path, expected)


def test_a_job_whose_time_ends_is_requeued_and_resumes(tmp_path: Path, expected: Path) -> None:
    """submitit's local executor signals its jobs as Slurm does, and starts them again."""
    words = ["--method", "efc", *GRID[7:], "--seed", "0", "--output", tmp_path, "--engine", "submitit-local"]
    # A run must get further in each attempt than starting takes, however slow the machine is; so the signal is sent
    # here, once the run trains, and the time of the job itself is long.
    command = Command(*words)
    until(lambda: measured(tmp_path) == 1, "an epoch", command)
    (started,) = tmp_path.rglob("*.started")
    os.kill(job_process(tmp_path), signal.SIGUSR2)
    assert command.wait() == 0, command.text
    assert not started.exists()
    assert "started again" in command.text
    (name,) = runs(tmp_path)
    (run,) = runs(tmp_path).values()
    assert facts(run) == facts(runs(expected)[name])
    assert json.dumps(run.read_summary()["A_step"]) == json.dumps(runs(expected)[name].read_summary()["A_step"])


def job_process(output: Path) -> int:
    """Return the process in which submitit executes the job of a run."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            words = (entry / "cmdline").read_text().split("\0")
            if "submitit.core._submit" in words and any(word.startswith(str(output)) for word in words):
                return int(entry.name)
    raise AssertionError("submitit executes no job")
