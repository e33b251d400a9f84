"""A method on trial: one short run that many checks look at, and the same method made anew from what it saved."""

from __future__ import annotations

import contextlib
import gc
import weakref
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as serialise_tensors
from torch import Tensor

from efcil.engine import lifecycle
from efcil.engine.checkpoint import restore_training, training_tensors
from efcil.engine.execution import Execution
from efcil.engine.trainer import Position, Trainer
from efcil.methods.base import Method
from efcil.settings import Recipe
from efcil.testing.compare import State, clone, normalisation_state
from efcil.testing.stream import PLAIN, SHORT, SIZES, Stream, blueprint, fitting, short_stream

#: The last task of the short stream.
LAST = len(SIZES) - 1
#: Settings that shorten what a method does when a task has ended; nothing that the checks look at depends on them.
QUICK: dict[str, dict[str, Any]] = {
    "apr": {"map_epochs": 3, "drift_steps": 3},
    "adagauss": {"adapter": "mlp", "adapter_epochs": 3, "adapter_samples": 200, "width": 64},
    "bicyc": {"adapter_epochs": 3, "adapter_samples": 200, "width": 64},
    "cedar": {"rebalance_epochs": 5},
    "efc++": {"rebalance_epochs": 5},
    "ldc": {"map_epochs": 3},
}


@dataclass(frozen=True)
class Trial:
    """A method and the settings that it is checked with."""

    method: type[Method]
    settings: Any

    def make(self, stream: Stream) -> Method:
        """Return the method before the end of the first task."""
        return blueprint(self.method, self.settings).around(stream.network_state)

    def reload(self, state: State, execution: Execution = PLAIN) -> Method:
        """Return a fresh method with a saved state, written and read as checkpoints are."""
        file = serialise_tensors({key: value.contiguous() for key, value in state.items()})
        return blueprint(self.method, self.settings, execution).load(parse_tensors(file))

    def begun(self) -> Method:
        """Return the method at the beginning of the last task, reached through a saved state."""
        method = self.reload(history(self)[1][LAST - 1].state)
        lifecycle.begin(method, short_stream().tasks[LAST], PLAIN)
        method.training_mode(fitting(method, SHORT))
        with torch.no_grad():
            method.prepare(short_stream().tasks[LAST], short_stream().data[LAST])
        return method


def on_trial(method: type[Method], settings: Any = None) -> Trial:
    """Return the method with these settings, or with its defaults, shortened where that is known to change nothing."""
    return Trial(method, replace(method.Settings(), **QUICK.get(method.name, {})) if settings is None else settings)


@dataclass
class TaskRecord:
    """What a method was like around one task: BatchNorm when it began, and the rest when it had ended."""

    normalisation_before: State
    normalisation_after: State
    terms: list[dict[str, float]]
    state: State
    scores: Tensor
    images_gone: bool


@cache
def history(trial: Trial) -> tuple[Method, list[TaskRecord]]:
    """Return one run of a method through the short stream; made once for all checks, which must not change it."""
    stream = short_stream()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return run(stream, trial.make(stream), 0)


def run(stream: Stream, method: Method, first: int, recipe: Recipe = SHORT) -> tuple[Method, list[TaskRecord]]:
    """Go through the tasks from `first`, as the engine does, and write down what happens."""
    records = []
    for index in range(first, len(stream.tasks)):
        task, data = stream.tasks[index], stream.images(index)
        terms: list[dict[str, float]] = []
        before = normalisation_state(method)
        if index > 0:
            trainer = lifecycle.begin_later(method, task, data, fitting(method, recipe), PLAIN)
            before = normalisation_state(method)
            trainer.run(on_epoch=lambda report, to=terms: to.append(report.terms))  # type: ignore[misc]
            del trainer
        lifecycle.end(method, task, data)
        lifecycle.refuse_unloadable(blueprint(type(method), method.settings), method)
        watch = weakref.ref(data)
        del data
        if watch() is not None:  # perhaps only a cycle that has not been collected yet
            gc.collect()
        state, scores = clone(method.state_dict()), stream.scores(method, task.seen)
        records.append(TaskRecord(before, normalisation_state(method), terms, state, scores, watch() is None))
    return method, records


class _Stop(Exception):
    pass


class _Keeper:
    """Keeps the state of training after some steps, and ends it there."""

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.tensors: State = {}
        self.position: Position | None = None

    def due(self) -> bool:
        self.left -= 1
        return self.left == 0

    def asked(self) -> bool:
        return False

    def save(self, trainer: Trainer, position: Position) -> None:
        self.tensors, self.position = clone(training_tensors(trainer)), position
        raise _Stop

    def hold(self, trainer: Trainer, position: Position) -> None:
        pass


def resumed(stream: Stream, method: Method, twin: Method, index: int, steps: int, recipe: Recipe = SHORT) -> Method:
    """Train task `index` with `method` for some steps, resume with `twin`, and return that after the task's end."""
    task, data, keeper = stream.tasks[index], stream.images(index), _Keeper(steps)
    with contextlib.suppress(_Stop):
        lifecycle.begin_later(method, task, data, fitting(method, recipe), PLAIN).run(keeper=keeper)
    trainer = lifecycle.begin_later(twin, task, data, fitting(twin, recipe), PLAIN)
    restore_training(trainer, keeper.tensors)
    trainer.run(keeper.position)
    lifecycle.end(twin, task, data)
    return twin
