"""The life of a task: build the learner, begin, train (from a checkpoint if there is one), end.

Experiments, users' own models, the checks of methods and the benchmarks all call this; nothing else builds a method or
a trainer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from efcil import methods, ranks, seeds
from efcil.activity import between_pieces, doing
from efcil.data.store import TaskImages
from efcil.engine import checkpoint
from efcil.engine.checkpoint import Checkpoint, CheckpointError, Damaged, Forbidden, TaskKeeper
from efcil.engine.first_task import FirstTask
from efcil.engine.hardware import Clock
from efcil.engine.interrupt import Interrupted, StopRequest
from efcil.engine.trainer import EpochReport, Execution, Position, Trainer
from efcil.errors import TrainingError, some
from efcil.methods.base import Method, Task
from efcil.network.backbones import Backbone
from efcil.network.incremental import IncrementalNetwork, fresh_network, trained_network
from efcil.settings import Recipe

State = dict[str, Tensor]


@dataclass(frozen=True)
class Blueprint:
    """What a method is built from: its class and settings, the backbone, the seed, and how it computes.

    A backbone given by its name alone is one of ours, untrained.
    """

    method: type[Method]
    settings: Any
    network: Backbone | str
    seed: int
    execution: Execution

    def empty_network(self) -> IncrementalNetwork:
        """Return the network before the first task, without heads, on the device: untrained, or pre-trained."""
        return fresh_network(self.network, self.seed, self.execution.device)

    def bare(self, head_sizes: Sequence[int] = ()) -> Method:
        """Return the untrained method on the CPU, with heads of these sizes: saved states are compared with it."""
        network = fresh_network(self.network, self.seed, torch.device("cpu"), load=False)
        network.grow_to(list(head_sizes))
        return self._make(network)

    def around(self, network: Mapping[str, Tensor]) -> Method:
        """Return the method with the network that the first task has trained."""
        trained = trained_network(self.network, self.seed, self.execution.device, network)
        return self.place(self._make(trained))

    def _make(self, network: IncrementalNetwork) -> Method:
        with seeds.seeded(seeds.derive(self.seed, "method")):
            return self.method(network, self.settings)

    def load(self, state: Mapping[str, Tensor]) -> Method:
        """Return the method with a saved state."""
        # Moved first: what is derived from the state is computed on the device where it is used.
        method = self.bare().to(self.execution.device)
        method.load_tensors(dict(state))
        return self.place(method)

    def place(self, method: Method) -> Method:
        """Move a method to the device, choose how its network computes, and make it ready for use."""
        elsewhere = next(method.parameters()).device != self.execution.device
        method = method.to(self.execution.device)
        if elsewhere:
            method.restored()  # what is derived from the state does not move with it
        self.execution.equip(method)
        return method.eval()


@dataclass(frozen=True)
class Journal:
    """The checkpoint within a task: when it is written, what it says, and whether it is of this task.

    `facts` are saved with the tensors and the position. `accepts` returns whether the facts of a saved checkpoint
    belong to this very task; it may print why not, or raise. `resumed` gets the facts of the checkpoint that is used.
    """

    folder: Path
    stop: StopRequest
    facts: Callable[[], Mapping[str, Any]]
    accepts: Callable[[Mapping[str, Any]], bool]
    resumed: Callable[[Mapping[str, Any]], None]
    #: What is raised when a request to stop was obeyed; it gets the position that is saved, None if nothing had to be.
    stopped: Callable[[Position | None], Interrupted]
    say: Callable[[str], None]
    #: Number of the task as people count: joint training learns all of them as one.
    task: int
    steps: int | None = None
    resumable: bool = True

    @cached_property
    def keeper(self) -> TaskKeeper:
        """What saves checkpoints while the task trains, and keeps its state after the last step until the task ends."""

        def facts(position: Position) -> dict[str, Any]:
            return {**self.facts(), "position": dataclasses.asdict(position)}

        return TaskKeeper(self.folder, facts, self.stop, self.stopped, self.steps)

    def ending(self) -> AbstractContextManager[None]:
        """Let a request to stop end what is done after training, which a resumed task does again."""
        return between_pieces(self.keeper.stop_at_end)

    def resume(self, trainer: Trainer) -> Position | None:
        """Restore the trainer from a checkpoint of this task and return its position; None if there is none."""
        if not self.resumable:
            return None
        saved = checkpoint.from_first(self._found() if ranks.first() else None)
        if saved is None:
            return None
        try:
            position = Position(**saved.facts["position"])
            checkpoint.restore_training(trainer, saved.tensors)
            self.resumed(saved.facts)
        except Forbidden:
            raise
        except (CheckpointError, KeyError, TypeError) as error:
            self._start_over(error)
            return None
        self.say(f"resuming task {self.task} {position.place}")
        return position

    def _found(self) -> Checkpoint | None:
        """Return the checkpoint of this task, None if there is none."""
        if not checkpoint.exists(self.folder):
            return None
        try:
            saved = checkpoint.read_and_tidy(self.folder)
            return saved if self.accepts(saved.facts) else None
        except Forbidden:
            raise
        except (CheckpointError, KeyError, TypeError) as error:
            self._start_over(error)
            return None

    def _start_over(self, error: Exception) -> None:
        self.say(f"The checkpoint in {self.folder} cannot be resumed ({reason(error)}); the task starts over.")


def reason(error: Exception) -> str:
    """Return what is wrong with a checkpoint, without the advice of the message, which does not apply here."""
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]!r}, so another version of efcil wrote it"
    return f"{error.file.name}: {error.reason}" if isinstance(error, Damaged) else str(error).rstrip(".")


@dataclass(frozen=True)
class Watch:
    """Callbacks: when training begins (epochs, and how many are done), and after every epoch.

    A task that trains nothing has no epochs, whatever its recipe says.
    """

    begin: Callable[[int, int], None] = lambda epochs, done: None
    epoch: Callable[[EpochReport], None] | None = None


# -- the parts -------------------------------------------------------------------------------------------------------


def begin_first(blueprint: Blueprint, task: Task, data: TaskImages, recipe: Recipe) -> Trainer:
    """Return the trainer of a first task from scratch, the same for every method."""
    network = blueprint.empty_network()
    if recipe.head == "cosine":
        network.use_cosine_heads(recipe.head_scale)
    learner = FirstTask(network, task, recipe.rotations, recipe.rotation_weight)
    blueprint.execution.equip(learner)
    return Trainer(learner, data, task, recipe, blueprint.execution)


def begin_later(method: Method, task: Task, data: TaskImages, recipe: Recipe, execution: Execution) -> Trainer:
    """Return the trainer of the next task of a method that has learned the earlier tasks."""
    begin(method, task, execution)
    return Trainer(method, data, task, recipe, execution)


def begin(method: Method, task: Task, execution: Execution) -> None:
    """Let the method begin a later task. Layers that it makes follow from the seed, and are moved to the device."""
    with seeds.seeded(seeds.derive(task.seed, "begin", task.index)):
        method.begin_task(task)
    classes = sum(method.network.head_sizes)
    if classes != task.seen:
        raise TrainingError(
            f"After begin_task of {method.name!r} the network has heads for {classes} classes, not for the {task.seen} "
            "that are seen with this task: begin_task calls super().begin_task(task) once, which adds a head."
        )
    method.to(execution.device)


def end(method: Method, task: Task, data: TaskImages) -> None:
    """Let the method compute what it needs after the images of the task are gone."""
    method.eval()
    with doing("statistics"), torch.no_grad():
        method.end_task(task, data)
    if ranks.settle(method.state_dict(), f"the state after task {task.index + 1}"):
        method.load_tensors(dict(method.state_dict()))  # what is derived from it is made again


# -- the whole -------------------------------------------------------------------------------------------------------


def learn_task(
    blueprint: Blueprint,
    method: Method | None,
    task: Task,
    data: TaskImages,
    recipe: Recipe,
    *,
    journal: Journal | None = None,
    watch: Watch | None = None,
    clock: Clock | None = None,
    share: Callable[[Callable[[], State]], Mapping[str, Tensor]] | None = None,
) -> Method:
    """Learn one task and return the method after it; without a method, the network is trained from scratch.

    `share` gets the function that trains the first task, and returns the trained network; it may already have one.
    """
    watch = watch or Watch()

    def phase(name: str) -> Any:
        return nullcontext() if clock is None else clock.phase(name)

    def train(trainer: Trainer) -> None:
        position = journal.resume(trainer) if journal is not None else None
        watch.begin(recipe.epochs if trainer.trains else 0, 0 if position is None else position.epoch)
        # For backbones with dropout, which draw while they train: where nothing is interrupted, runs repeat.
        with seeds.seeded(seeds.derive(task.seed, "train", task.index)):
            trainer.run(position, watch.epoch, None if journal is None else journal.keeper)

    def train_first() -> State:
        with phase("train"):
            trainer = begin_first(blueprint, task, data, recipe)
            train(trainer)
        return {name: value.detach().clone() for name, value in trainer.learner.network.state_dict().items()}

    if method is None:
        method = blueprint.around(train_first() if share is None else share(train_first))
    else:
        with phase("train"):
            train(begin_later(method, task, data, recipe, blueprint.execution))
    with phase("statistics"), nullcontext() if journal is None else journal.ending():
        end(method, task, data)
    # What begin_task makes is there from the second task on.
    if task.index <= 1 and blueprint.method not in methods.bundled().values():
        refuse_unloadable(blueprint, method)
    return method


def refuse_unloadable(blueprint: Blueprint, method: Method) -> None:
    """Load the state of a user's own method into a new one, before hours of training give a state that cannot load."""
    state = {name: value.detach().cpu() for name, value in method.state_dict().items()}
    again = blueprint.bare()
    try:
        again.load_tensors(state)
    except Exception as error:  # any error of the user's code
        missing = sorted(name for name in state if name not in again.state_dict())
        why = f"a new one does not have {some(missing)}" if missing else f"{error}"
        raise TrainingError(
            f"The state of method {method.name!r} could not be loaded again: {why}. Register every parameter, buffer "
            "and submodule in __init__; a buffer that grows starts with no rows. What begin_task makes for one task is "
            "set to None in end_task."
        ) from error
