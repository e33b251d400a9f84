"""One run in several processes: the same results as in one, stopped, killed and resumed with any number of them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Launch, assert_same, launcher, torchrun

from efcil import ranks
from efcil.cli import main
from efcil.environment import command
from efcil.experiment.shared_tasks import SharedTaskStore
from efcil.files import locked
from efcil.runfolder import RunFolder

pytestmark = pytest.mark.skipif(
    not (hasattr(os, "fork") and torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="needs processes that can be forked, and gloo",
)
METHODS = ("efc", "lwf", "fetril", "efc++", "cedar", "apr")
SMALL = ("--dataset", "digits", "--tasks", 2, "--epochs", 1, "--quiet")


def arguments(output: Path, *others: object) -> list[str]:
    return [str(each) for each in ("run", *SMALL, "--output", output, *others)]


def grid(output: Path) -> list[str]:
    settings = ("rebalance_epochs=3", "tolerance=1e-9")
    return arguments(output, "--method", *METHODS, "--set", *settings)


def folder(output: Path, method: str) -> RunFolder:
    (found,) = output.glob(f"digits/*/{method}+[a-z]*/seed0/settings.yaml")
    return RunFolder(found.parent)


def assert_equal(first: Path, second: Path, method: str, tolerance: float = 1e-7) -> None:
    assert_same(folder(first, method), folder(second, method), tolerance)


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Return a function that runs a command line, or a unit, in so many processes."""
    yield from launcher(tmp_path_factory.mktemp("ranks") / "output")


@pytest.fixture(scope="module")
def alone(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where a single process has trained all methods."""
    output = tmp_path_factory.mktemp("alone")
    codes, said = launch(1, *grid(output))
    assert codes == [0], said
    return output


UNITS = ("messages", "failure_of_the_first", "loss_of_another", "settling", "steps", "gradients_of_one_s_own")


@pytest.mark.parametrize("unit", UNITS)
def test_units(launch: Launch, unit: str) -> None:
    codes, said = launch(3, unit=unit)
    assert codes == [0, 0, 0], said


@pytest.fixture(scope="module")
def together(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return where two processes have trained all methods, and what they printed."""
    output = tmp_path_factory.mktemp("together")
    codes, said = launch(2, *grid(output))
    assert codes == [0, 0], said
    return output, said


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_give_the_results_of_one(alone: Path, together: tuple[Path, str], method: str) -> None:
    # The machines of FeTrIL are solved to a tolerance of their own.
    assert_equal(alone, together[0], method, 1e-4 if method == "fetril" else 1e-7)


def test_only_the_first_process_prints_and_writes(together: tuple[Path, str]) -> None:
    output, said = together
    assert said.count("A_step") == 1
    assert len(list((output / "first-tasks").glob("*/network.json"))) == 1
    for method in METHODS:
        run = folder(output, method)
        tasks = [line["task"] for line in run.read_metrics() if line["kind"] == "task"]
        assert tasks == [1, 2]
        assert not (run.path / ".lock").exists()


def test_the_summary_says_how_batches_were_shared(alone: Path, together: tuple[Path, str]) -> None:
    summary = folder(together[0], "efc").read_summary()
    batch = {"global": 32, "per_rank": 16}
    assert summary["execution"]["ranks"] == 2
    assert summary["execution"]["batch"] == {"first_task": batch, "later": batch}
    assert [way["ranks"] for ways in summary["made_with"] for way in ways] == [2, 2]
    single = folder(alone, "efc").read_summary()
    assert "ranks" not in single["execution"]
    assert single["label"] == summary["label"]
    assert single["identity"] == summary["identity"]


def test_a_finished_run_is_skipped_by_all(launch: Launch, together: tuple[Path, str]) -> None:
    codes, said = launch(3, *(each for each in grid(together[0]) if each != "--quiet"))
    assert codes == [0, 0, 0], said
    assert said.count("finished before, skipped") == len(METHODS)


def test_four_processes_on_the_fused_path(launch: Launch, tmp_path: Path) -> None:
    # The first task trains BatchNorm, the second one folds it; EWC's loss reads weights as well. Contrast compares
    # images of all processes, behind layers that all of them train.
    outputs = tmp_path / "one", tmp_path / "four"
    contrast = ("--set", "first_task.contrast=0.5", "later.contrast=0.5")
    for count, output in zip((1, 4), outputs, strict=True):
        codes, said = launch(count, *arguments(output, "--method", "efc", "ewc", "--path", "fused", *contrast))
        assert codes == [0] * count, said
    assert_equal(*outputs, "efc")
    assert_equal(*outputs, "ewc")


def test_batches_that_are_too_small_are_refused(launch: Launch, tmp_path: Path) -> None:
    codes, said = launch(3, *arguments(tmp_path, "--method", "efc", "--batch-size", 5))
    assert codes[0] == 2
    assert 0 not in codes
    assert said.count("efcil: A batch of 5 images is too small for 3 processes, which need two each.") == 1
    assert "Start at most 2 of them" in said


def test_a_mistake_is_said_once(launch: Launch, tmp_path: Path) -> None:
    codes, said = launch(2, *arguments(tmp_path, "--method", "efd"))
    assert codes == [2, 2]
    assert said.count("Unknown method 'efd'") == 1


def test_a_run_in_use_is_refused_by_all(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "digits" / "custom-2" / "finetune+epochs=1" / "seed0"
    with locked(path / ".lock"):
        codes, said = launch(2, *arguments(tmp_path, "--method", "finetune"))
    assert codes == [2, 1]
    assert said.count("is in use by another process") == 1
    assert "rank 1" not in said


def test_all_wait_for_a_first_task_that_others_train(
    launch: Launch, together: tuple[Path, str], tmp_path: Path
) -> None:
    (key,) = (each.parent.name for each in together[0].glob("first-tasks/*/network.json"))
    log = tmp_path / "digits" / "custom-2" / "finetune+epochs=1" / "seed0" / "log.txt"
    with ThreadPoolExecutor(1) as pool:
        with locked(SharedTaskStore(tmp_path).lock(key)):
            running = pool.submit(launch, 2, *arguments(tmp_path, "--method", "finetune"))
            while not running.done() and "waiting for the first task" not in (log.read_text() if log.exists() else ""):
                time.sleep(0.05)
            assert not running.done()
        codes, said = running.result()
    assert codes == [0, 0], said


# -- torchrun itself -------------------------------------------------------------------------------------------------


def lines(run: RunFolder) -> list[tuple[Any, ...]]:
    return [(line["kind"], line["task"], line.get("epoch")) for line in run.read_metrics()]


def test_a_killed_process_ends_the_run_which_resumes_with_fewer(launch: Launch, alone: Path, tmp_path: Path) -> None:
    given = arguments(tmp_path, "--method", "efc", "--checkpoint-steps", 4)
    ended = torchrun(2, given, SIGNAL_AT=f"1 10 {int(signal.SIGKILL)}")
    assert ended.returncode != 0
    assert "Another process of this run has ended" in ended.stderr
    run = folder(tmp_path, "efc")
    facts = json.loads((run.partial / "state.json").read_text())["facts"]
    assert (facts["task"], facts["position"]["step"]) == (0, 8)
    assert "Failed: Another process" in run.log_file.read_text()
    codes, said = launch(1, *given)
    assert codes == [0], said
    assert "resuming task 1 in epoch 1, after step 8" in run.log_file.read_text()
    assert_equal(alone, tmp_path, "efc")
    ways = run.read_summary()["made_with"]
    assert [[way.get("ranks") for way in each] for each in ways] == [[2, None], [None]]
    # A network that two ways of computing have trained is not shared.
    assert not list((tmp_path / "first-tasks").glob("*/network.json"))


def test_a_request_to_one_process_stops_all_and_more_resume(launch: Launch, alone: Path, tmp_path: Path) -> None:
    given = arguments(tmp_path, "--method", "efc")
    ended = torchrun(2, given, SIGNAL_AT=f"1 30 {int(signal.SIGTERM)}")
    assert ended.stderr.count("exitcode  : 130") == 2, ended.stderr
    assert ended.stderr.count("To resume: torchrun --nproc-per-node 2") == 1
    run = folder(tmp_path, "efc")
    facts = json.loads((run.partial / "state.json").read_text())["facts"]
    # An epoch of a task has 23 steps, and the processes ask each other after every eighth.
    assert (facts["task"], facts["position"]["step"]) == (1, 8)
    codes, said = launch(3, *given)
    assert codes == [0, 0, 0], said
    assert_equal(alone, tmp_path, "efc")
    assert lines(run) == lines(folder(alone, "efc"))


def test_a_request_after_the_last_step_stops_all_before_the_statistics(
    launch: Launch, alone: Path, tmp_path: Path
) -> None:
    given = arguments(tmp_path, "--method", "efc")
    ended = torchrun(2, given, SIGNAL_AT=f"1 46 {int(signal.SIGTERM)}")
    assert ended.stderr.count("exitcode  : 130") == 2, ended.stderr
    assert ended.stderr.count("Stopped in task 2, after epoch 1; that state is saved in") == 1
    codes, said = launch(3, *given)
    assert codes == [0, 0, 0], said
    assert_equal(alone, tmp_path, "efc")
    assert lines(folder(tmp_path, "efc")) == lines(folder(alone, "efc"))


def test_a_mistake_is_said_even_if_the_first_process_is_the_last_to_notice(tmp_path: Path) -> None:
    ended = torchrun(2, arguments(tmp_path, "--method", "efd"), SECONDS_LATER="2")
    assert ended.stderr.count("efcil: Unknown method 'efd'") == 1, ended.stderr


# -- without any other process ---------------------------------------------------------------------------------------


def test_other_commands_refuse_several_processes(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["methods"]) == 2
    assert "`efcil methods` works in one process. Start it without torchrun." in capsys.readouterr().err


def test_the_command_has_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/efcil/__main__.py", "run", "--seed", "1"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert command() == "torchrun --nproc-per-node 8 -m efcil run --seed 1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert command() == "torchrun --nnodes 2 --nproc-per-node 4 -m efcil run --seed 1"
    monkeypatch.setattr(sys, "argv", [sys.argv[0], "run", "--log", "tensorboard"])
    assert command() == "torchrun --nnodes 2 --nproc-per-node 4 -m -- efcil run --log tensorboard"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert command() == "efcil run --log tensorboard"


def test_torchrun_reads_the_command_with_trackers() -> None:
    """It takes --log for a short form of two of its own flags, unless two dashes stand before the program."""
    from torch.distributed.run import parse_args

    read = parse_args(["--nproc-per-node", "2", "-m", "--", "efcil", "run", "--log", "tensorboard"])
    assert (read.training_script, read.training_script_args) == ("efcil", ["run", "--log", "tensorboard"])


def test_a_single_process_asks_nobody() -> None:
    tensors = [torch.ones(2)]
    ranks.average(tensors)
    assert tensors[0].tolist() == [1.0, 1.0]
    assert ranks.anyone(True)
    assert not ranks.anyone(False)
    assert ranks.first_does(lambda: "done") == ranks.in_turn(lambda: "done") == ranks.from_first("done")
    assert ranks.first()
    assert not ranks.settle({"weight": torch.ones(1)}, "a state")
