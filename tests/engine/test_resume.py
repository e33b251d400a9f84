"""A run that was killed, or asked to stop, at any moment and started again ends bit for bit as an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from efcil import methods
from efcil.data.images import Dataset
from efcil.data.sources import SourceOptions, load_dataset
from efcil.engine import checkpoint, lifecycle
from efcil.engine.feed import Feed
from efcil.engine.first_task import FirstTask
from efcil.engine.interrupt import Interrupted, StopRequest
from efcil.engine.trainer import Trainer
from efcil.errors import EfcilError
from efcil.experiment import run as run_module
from efcil.experiment import run_one
from efcil.experiment.shared_tasks import FOLDER
from efcil.methods.base import Method
from efcil.model.folder import STEM
from efcil.runfolder import RunFolder, find_runs
from efcil.settings import Settings, options
from warm import Server

HERE = Path(__file__).resolve().parent
SHORT: dict[str, Any] = {
    "scenario": "custom",
    "tasks": 3,
    "first_task_epochs": 1,
    "epochs": 2,
    "batch_size": 64,
    "device": "cpu",
}
COMMAND = [
    *("run", "--method", "efc", "--tasks", "3", "--first-task-epochs", "1", "--epochs", "2", "--batch-size", "64"),
    *("--device", "cpu", "--checkpoint-steps", "3"),
]
# What may differ between two runs that are the same: when and how they were made.
VOLATILE = (
    "seconds", "finished", "command", "uncommitted_changes", "commit", "earlier_commits", "commits", "learned", "date",
    "metrics", "files",
)  # fmt: skip

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks processes")


def without_times(values: Any) -> Any:
    if isinstance(values, list):
        return [without_times(value) for value in values]
    if isinstance(values, dict):
        return {name: without_times(value) for name, value in values.items() if name not in VOLATILE}
    return values


@dataclass
class Outcome:
    """Everything a finished run has left behind, but for the times."""

    files: set[str]
    facts: dict[str, Any]
    metrics: list[dict[str, Any]]
    tables: dict[str, bytes]
    summary: dict[str, Any]
    settings: str
    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, output: Path) -> Outcome:
        (run,) = find_runs([output])
        model = checkpoint.read(run.model, STEM)
        return cls(
            files={str(file.relative_to(output)) for file in output.rglob("*") if file.is_file()},
            facts=without_times(model.facts),
            metrics=[without_times(line) for line in run.read_metrics()],
            tables={file.name: file.read_bytes() for file in run.path.glob("*.csv")},
            summary=without_times(run.read_summary()),
            settings=run.settings_file.read_text(),
            tensors=model.tensors,
        )

    def check(self, other: Outcome) -> None:
        for name, tensor in self.tensors.items():
            assert torch.equal(tensor, other.tensors[name]), name
        assert self.metrics == other.metrics
        # The names of tensor files are digests of their content, those of first tasks and models alike.
        assert self.files == other.files
        for part in ("facts", "tables", "summary", "settings"):
            assert getattr(self, part) == getattr(other, part), part


# -- real processes --------------------------------------------------------------------------------------------------


class Driver(Server):
    """Has commands run, and disturbed, in forks of a process that has imported everything."""

    def __init__(self, scratch: Path) -> None:
        super().__init__(HERE / "killable.py", scratch / "output.txt", os.environ | {"CUDA_VISIBLE_DEVICES": ""})

    def run(
        self, output: Path, *moments: int, number: int = signal.SIGKILL, command: list[str] | None = None
    ) -> tuple[int, str]:
        """Run the command with signals at some moments; return its exit code and what it printed."""
        return self.do(arguments=[*(command or COMMAND), "--output", str(output)], moments=moments, signal=number)

    def finish(self, output: Path) -> Outcome:
        """Give the command once more, undisturbed."""
        code, printed = self.run(output)
        assert code == 0, printed
        return Outcome.of(output)

    def events(self) -> list[str]:
        """The events of the last command, if it ended in peace."""
        return list(json.loads(Path(f"{self.output}.events").read_text()))


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    driver = Driver(tmp_path_factory.mktemp("driver"))
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def undisturbed(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, list[str]]:
    """The run that nothing happens to, and its events."""
    outcome = driver.finish(tmp_path_factory.mktemp("undisturbed"))
    return outcome, driver.events()


# How many of the twenty moments fall on each kind of event.
KINDS = {
    "step": 6,  # tests/crash has every call that reaches the disk
    "before fsync": 1,
    "after fsync": 1,
    "before rename": 1,
    "after rename": 1,
    "before removal": 1,
    "after removal": 1,
}


@pytest.mark.parametrize("number", range(sum(KINDS.values())))
def test_killed_at_any_moment(
    driver: Driver, undisturbed: tuple[Outcome, list[str]], tmp_path: Path, number: int
) -> None:
    expected, events = undisturbed
    chosen = random.Random(number)
    kind = [kind for kind, count in KINDS.items() for _ in range(count)][number]
    moment = 1 + chosen.choice([place for place, event in enumerate(events) if event == kind])
    code, printed = driver.run(tmp_path, moment)
    assert code == -signal.SIGKILL, printed
    driver.finish(tmp_path).check(expected)


def test_killed_again_and_again(driver: Driver, undisturbed: tuple[Outcome, list[str]], tmp_path: Path) -> None:
    expected, events = undisturbed
    attempts, code = 0, -int(signal.SIGKILL)
    while code == -signal.SIGKILL:
        attempts += 1
        assert attempts < 20, "the run makes no progress"
        code, printed = driver.run(tmp_path, len(events) // 6)
    assert code == 0, printed
    assert attempts > 5
    Outcome.of(tmp_path).check(expected)


# The first task has 9 steps, each epoch of a later one 7; the last place is the very end of an epoch.
STOPS = [
    (4, "task 1, epoch 1, after step 4;"),
    (13, "task 2, epoch 1, after step 4;"),
    (16, "task 2, epoch 1, after step 7;"),
]
END_OF_SECOND_TASK = 9 + 2 * 7


def moment_of_step(events: list[str], step: int) -> int:
    """The moment at which step `step` of the run has just been taken."""
    return 1 + [place for place, event in enumerate(events) if event == "step"][step - 1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(("step", "place"), STOPS)
def test_a_request_to_stop_ends_the_step_and_saves(
    driver: Driver,
    undisturbed: tuple[Outcome, list[str]],
    tmp_path: Path,
    number: signal.Signals,
    step: int,
    place: str,
) -> None:
    expected, events = undisturbed
    code, printed = driver.run(tmp_path, moment_of_step(events, step), number=number)
    assert code == 130
    assert "Traceback" not in printed
    (run,) = find_runs([tmp_path])
    message = printed.splitlines()[-1]
    assert printed.count("Stopping as soon as the state can be saved; a second request stops immediately.") == 1
    assert message.startswith(f"efcil: Stopped in {place}")
    assert str(run.path / "partial") in message
    assert message.endswith(f"To resume: efcil {' '.join(COMMAND)} --output {tmp_path}")
    assert printed.count("To resume") == 1
    assert message.removeprefix("efcil: ") in run.log_file.read_text()
    position = checkpoint.read(run.path / "partial").facts["position"]
    assert f"after step {position['step']};" in place
    outcome = driver.finish(tmp_path)
    assert driver.events().count("step") == events.count("step") - step, "no step is taken twice"
    outcome.check(expected)


def test_one_request_may_come_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from `timeout`, which sends SIGTERM to the process and to its group."""
    now = 100.0
    monkeypatch.setattr("efcil.engine.interrupt.monotonic", lambda: now)
    with StopRequest() as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        now += 2.0
        with pytest.raises(KeyboardInterrupt, match="Run the same command again to resume"):
            os.kill(os.getpid(), signal.SIGTERM)


# The line of the last epoch is written before the statistics, that of the task after the tests.
@pytest.mark.parametrize(
    ("events_later", "place"),
    [(1, "in task 2, after epoch 2; that state is saved"), (3, "after task 2. To resume: efcil")],
)
def test_a_request_after_the_last_step_stops_before_the_next_task(
    driver: Driver, undisturbed: tuple[Outcome, list[str]], tmp_path: Path, events_later: int, place: str
) -> None:
    expected, events = undisturbed
    moment = moment_of_step(events, END_OF_SECOND_TASK) + events_later
    code, printed = driver.run(tmp_path, moment, number=signal.SIGTERM)
    assert code == 130
    assert f"efcil: Stopped {place}" in printed
    outcome = driver.finish(tmp_path)
    assert driver.events().count("step") == events.count("step") - END_OF_SECOND_TASK
    outcome.check(expected)


def test_a_second_request_ends_the_run_at_once(
    driver: Driver, undisturbed: tuple[Outcome, list[str]], tmp_path: Path
) -> None:
    expected, events = undisturbed
    moment = moment_of_step(events, END_OF_SECOND_TASK - 1)
    # The second one comes while the state is being saved.
    code, printed = driver.run(tmp_path, moment, moment + 1, number=signal.SIGINT)
    assert code == 130
    assert "efcil: Interrupted. Run the same command again" in printed
    assert "Traceback" not in printed
    driver.finish(tmp_path).check(expected)


def test_a_request_in_the_last_moments_of_a_run_holds_for_the_grid(driver: Driver, tmp_path: Path) -> None:
    command = [*COMMAND, "--seed", "0", "1", "--set", "later.epochs=1", "first_task.rotations=false"]
    assert driver.run(tmp_path / "whole", command=command)[0] == 0
    events = driver.events()
    start_of_second_run = moment_of_step(events, 1 + events.count("step") // 2)
    # The last thing that is removed is the middle of the last task; the summary is written right after that.
    removal = max(place for place in range(start_of_second_run) if events[place] == "after removal")
    code, printed = driver.run(tmp_path / "grid", removal + 2, number=signal.SIGINT, command=command)
    assert code == 130
    assert "efcil: Stopped before " in printed
    (run,) = find_runs([tmp_path / "grid"])
    assert run.is_finished()


# -- every method, in this process -----------------------------------------------------------------------------------


class Crash(BaseException):
    """Stands for a process that dies: nothing may catch it, nothing more is saved."""


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset("digits", None, SourceOptions())


@pytest.fixture(scope="module")
def first_tasks(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained first tasks, of the plain and of the fused path."""
    output = tmp_path_factory.mktemp("first-tasks")
    with pytest.MonkeyPatch.context() as patch:
        for path in ("plain", "fused"):
            crash_at(patch, 1, lambda trainer: trainer.task.index > 0)
            with pytest.raises(Crash):
                run_one(Settings(method="finetune", path=path, **SHORT), output, digits, quiet=True)
            patch.undo()
    return output / FOLDER


def crash_at(
    patch: pytest.MonkeyPatch, moment: int | None, counts: Callable[[Trainer], bool] = lambda trainer: True
) -> list[str]:
    """Die at the `moment`-th step or evaluation, if ever; the list that is returned grows with each of them."""
    seen: list[str] = []
    compute, evaluate = Trainer._compute, run_module.evaluate

    def tick(what: str) -> None:
        seen.append(what)
        if len(seen) == moment:
            raise Crash

    def step(self: Trainer, place: int, length: int) -> None:
        compute(self, place, length)
        if counts(self):
            tick("step")

    def evaluation(method: Method, *arguments: Any) -> Any:
        if not isinstance(method, FirstTask):  # that is looked at only where a first task is not shared
            tick("evaluation")
        return evaluate(method, *arguments)

    patch.setattr(Trainer, "_compute", step)
    patch.setattr(run_module, "evaluate", evaluation)
    return seen


def attempt(settings: Settings, output: Path, digits: Dataset, first_tasks: Path, **options: Any) -> None:
    if not (output / FOLDER).exists():
        shutil.copytree(first_tasks, output / FOLDER)
    run_one(settings, output, digits, quiet=True, **options)


def cheap(name: str) -> dict[str, Any]:
    """Settings that make the end of a task short where a method learns something then."""
    return {setting: 2 for setting in options(methods.get(name).Settings) if setting.endswith("_epochs")}


VARIANTS = [
    *((name, "plain", cheap(name)) for name in methods.available()),
    ("efc", "fused", {}),
    ("finetune", "fused", {}),
    ("ewc", "fused", {}),
    ("finetune", "plain", {"later.optimiser": "sgd", "later.momentum": 0.9}),
    ("joint", "plain", {"when": "every"}),
]


@pytest.mark.parametrize(("name", "path", "overrides"), VARIANTS, ids=lambda value: str(value) if value else "")
def test_every_method_goes_on_where_it_died(
    name: str,
    path: str,
    overrides: dict[str, Any],
    digits: Dataset,
    first_tasks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings(method=name, path=path, overrides=overrides, **SHORT | {"epochs": 1})
    seen = crash_at(monkeypatch, None)
    attempt(settings, tmp_path / "whole", digits, first_tasks)
    monkeypatch.undo()
    expected = Outcome.of(tmp_path / "whole")
    total = len(seen)
    # In the middle of the second task; when it has ended but is not saved yet; in the first step of the third one.
    for number, moment in enumerate((max(total // 4, 1), total // 2 + 1, total // 2 + 2)):
        output = tmp_path / str(number)
        crash_at(monkeypatch, moment)
        with pytest.raises(Crash):
            attempt(settings, output, digits, first_tasks, checkpoint_steps=2)
        monkeypatch.undo()
        again = crash_at(monkeypatch, None)
        attempt(settings, output, digits, first_tasks, checkpoint_steps=2)
        monkeypatch.undo()
        assert len(again) <= total - moment + 2, "what was saved is not done again"
        Outcome.of(output).check(expected)


@pytest.mark.parametrize("steps", [1, 7])
def test_a_checkpoint_at_the_end_of_an_epoch(
    steps: int, digits: Dataset, first_tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(method="efc", **SHORT)
    attempt(settings, tmp_path / "whole", digits, first_tasks)
    expected = Outcome.of(tmp_path / "whole")
    # The last step of an epoch and of a task are saved; the run dies one event later.
    for number, moment in enumerate((1 + 7 + 1, 1 + 14 + 1)):
        output = tmp_path / str(number)
        crash_at(monkeypatch, moment)
        with pytest.raises(Crash):
            attempt(settings, output, digits, first_tasks, checkpoint_steps=steps)
        monkeypatch.undo()
        seen = crash_at(monkeypatch, None)
        attempt(settings, output, digits, first_tasks)
        monkeypatch.undo()
        assert len(seen) == 1 + 14 + 1 + 14 + 1 - (moment - 1)
        Outcome.of(output).check(expected)


@pytest.mark.parametrize("name", ["efc", "cedar"])
@pytest.mark.parametrize(("blocks", "place"), [(1, "before the first step"), (2, "after epoch 1")])
def test_a_request_while_steps_are_prepared_is_obeyed_before_them(
    name: str,
    blocks: int,
    place: str,
    digits: Dataset,
    first_tasks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings(method=name, **SHORT, overrides={"rebalance_epochs": 1} if name == "cedar" else {})
    attempt(settings, tmp_path / "whole", digits, first_tasks)
    stop, prepare, prepared = StopRequest(), Feed._prepare, 0

    def requested(feed: Feed, epoch: int, first_step: int) -> None:
        nonlocal prepared
        prepared += 1
        stop.requested = prepared == blocks
        prepare(feed, epoch, first_step)

    monkeypatch.setattr(Feed, "_prepare", requested)
    with pytest.raises(Interrupted, match=f"Stopped in task 2, {place}; that state is saved in"):
        attempt(settings, tmp_path / "cut", digits, first_tasks, stop=stop)
    monkeypatch.undo()
    again = crash_at(monkeypatch, None)
    attempt(settings, tmp_path / "cut", digits, first_tasks)
    assert again.count("step") == 2 * 14 - 7 * (blocks - 1)
    Outcome.of(tmp_path / "cut").check(Outcome.of(tmp_path / "whole"))


#: Methods that learn something at the end of a task, change their network there, or train nothing before.
ENDS = [
    ("efc", {}),
    ("efc++", {"rebalance_epochs": 2}),
    ("adagauss", {"adapter_epochs": 2}),
    ("ssre", {}),
    ("ewc", {"later.ema": 0.5, "later.rotations": True}),
    ("fecam", {}),
]


@pytest.mark.parametrize("where", ["statistics", "tests"])
@pytest.mark.parametrize(("name", "overrides"), ENDS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_request_at_the_end_of_a_task_is_obeyed_there(
    name: str,
    overrides: dict[str, Any],
    where: str,
    digits: Dataset,
    first_tasks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings(method=name, overrides=overrides, **SHORT)
    whole = crash_at(monkeypatch, None)
    attempt(settings, tmp_path / "whole", digits, first_tasks)
    monkeypatch.undo()
    stop, trains, ends = StopRequest(), "step" in whole, 0
    module, function = {"statistics": (lifecycle, "end"), "tests": (run_module, "evaluate")}[where]
    original = getattr(module, function)

    def requested(*arguments: Any) -> Any:
        nonlocal ends
        ends += 1
        stop.requested = ends == 2
        return original(*arguments)

    monkeypatch.setattr(module, function, requested)
    with pytest.raises(Interrupted) as told:
        attempt(settings, tmp_path / "cut", digits, first_tasks, stop=stop)
    monkeypatch.undo()
    (run,) = find_runs([tmp_path / "cut"])
    saved = f"in task 2, after epoch 2; that state is saved in {run.partial}."
    assert str(told.value).startswith(f"Stopped {saved if trains else 'at the end of task 2, of which nothing had'}")
    assert [line["task"] for line in run.read_metrics() if line["kind"] == "task"] == [1]
    again = crash_at(monkeypatch, None)
    attempt(settings, tmp_path / "cut", digits, first_tasks)
    assert again.count("step") == whole.count("step") // 2, "the second task is not trained again"
    assert ("resuming task 2 after epoch 2" in run.log_file.read_text()) == trains
    Outcome.of(tmp_path / "cut").check(Outcome.of(tmp_path / "whole"))


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_checkpoints_come_when_they_are_due_and_only_the_last_one_stays(
    digits: Dataset, first_tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, Any]] = []
    write = checkpoint.write

    def watched(folder: Path, tensors: Any, facts: Any, stem: str = "state") -> None:
        write(folder, tensors, facts, stem)
        assert len(list(folder.iterdir())) == 2
        assert len(list(RunFolder(folder.parent).path.rglob("*.safetensors"))) <= 2
        written.append((folder.name, facts.get("position")))

    monkeypatch.setattr(checkpoint, "write", watched)
    attempt(Settings(method="finetune", **SHORT), tmp_path, digits, first_tasks, checkpoint_steps=5)
    task = [("partial", (0, 5)), ("partial", (1, 3)), ("model", None)]
    places = [(name, position and (position["epoch"], position["step"])) for name, position in written]
    assert places == [("model", None), *task, *task]
    assert not list(tmp_path.rglob("partial"))


def test_time_alone_makes_a_checkpoint_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now)
    keeper = checkpoint.TaskKeeper(tmp_path, lambda _: {}, StopRequest(), lambda _: Crash())
    assert not keeper.due()
    now = checkpoint.INTERVAL
    assert keeper.due()


def test_a_damaged_middle_of_a_task_costs_that_task_only(
    digits: Dataset, first_tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(method="finetune", **SHORT)
    attempt(settings, tmp_path / "whole", digits, first_tasks)
    crash_at(monkeypatch, 22)
    with pytest.raises(Crash):
        attempt(settings, tmp_path / "cut", digits, first_tasks, checkpoint_steps=3)
    monkeypatch.undo()
    (run,) = find_runs([tmp_path / "cut"])
    (tensors,) = (run.path / "partial").glob("*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-1])
    again = crash_at(monkeypatch, None)
    attempt(settings, tmp_path / "cut", digits, first_tasks)
    assert again.count("step") == 14, "the third task was trained from its beginning"
    assert "cannot be resumed" in run.log_file.read_text()
    Outcome.of(tmp_path / "cut").check(Outcome.of(tmp_path / "whole"))


def test_a_damaged_state_is_an_error(
    digits: Dataset, first_tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(method="finetune", **SHORT)
    crash_at(monkeypatch, 22)
    with pytest.raises(Crash):
        attempt(settings, tmp_path, digits, first_tasks)
    monkeypatch.undo()
    (run,) = find_runs([tmp_path])
    (run.model / "model.json").write_text("{}")
    with pytest.raises(EfcilError, match="is damaged") as error:
        attempt(settings, tmp_path, digits, first_tasks)
    assert str(run.model) in str(error.value)
