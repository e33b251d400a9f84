"""What changes while a run trains: saved after every task as a model folder, and resumed from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from efcil import ranks
from efcil.engine import checkpoint, hardware
from efcil.engine.background import Background
from efcil.engine.checkpoint import Checkpoint, CheckpointError
from efcil.environment import code
from efcil.evaluation.probes import Probes
from efcil.experiment.plan import Plan
from efcil.files import refuse_full
from efcil.methods.base import Method, Task
from efcil.model import folder as model_folder
from efcil.model.card import Card, LearnedClass, Visit, changed_computing, now, training_settings
from efcil.model.in_memory import pretrained_facts
from efcil.resolution.identity import differences
from efcil.settings.options import show

#: File stem of the state of a run before it became a model folder.
_EARLIER_STEM = "state"


@dataclass
class RunState:
    """The state of a run between two tasks."""

    card: Card
    agnostic: np.ndarray
    aware: np.ndarray
    method: Method | None = None
    completed: int = 0
    first_task: str | None = None
    #: The code versions that contributed to the state so far, in order.
    commits: list[str] = field(default_factory=list)
    #: How every task was computed, one list of ways per task; empty where a task is not measured.
    made_with: list[list[dict[str, Any]]] = field(default_factory=list)
    #: What was measured besides the accuracies; recorded in metrics.jsonl.
    probes: Probes = field(default_factory=Probes)
    #: Of how many tasks metrics.jsonl may have lost lines, or have others than were written.
    metrics_lost: int = 0
    #: SHA-256 of metrics.jsonl when the state was saved that the run was resumed from, None if that was not known.
    metrics: str | None = None

    @classmethod
    def start(cls, plan: Plan) -> RunState:
        """Return the state of a run that has learned nothing yet."""
        card = Card(
            settings=training_settings(replace(plan.settings, input_size=plan.backbone.input_size)),
            resolved=plan.resolved,
            image_size=plan.dataset.image_size,
            normalisation=plan.normalisation,
            pretrained=pretrained_facts(plan.backbone),
        )
        matrix = np.full((plan.tasks, plan.tasks), np.nan)
        state = cls(card, matrix, matrix.copy(), made_with=[[] for _ in range(plan.tasks)])
        state.had_a_part([code()])
        return state

    def had_a_part(self, commits: Iterable[str | None]) -> None:
        """Record the code version that trained something this run builds on."""
        self.commits = list(dict.fromkeys([*(each for each in commits if each is not None), *self.commits]))

    def learned(self, plan: Plan, task: Task, made_with: list[dict[str, Any]]) -> None:
        """Add the classes of a task to the card, or replace them all if training started from scratch."""
        self.made_with[self.completed - 1] = made_with
        counts = np.bincount(plan.labels, minlength=plan.scenario.number_of_classes)
        places = range(task.first_class, task.seen)
        names, date = plan.dataset.class_names, now()
        classes = [LearnedClass(names[plan.scenario.order[i]], task.index, int(counts[i]), date) for i in places]
        images = int(counts[places.start : places.stop].sum())
        visit = Visit("task", task.classes, images, date, tuple(made_with))
        before = (self.card.classes, self.card.visits) if task.index else ((), ())
        self.card = replace(self.card, classes=(*before[0], *classes), visits=(*before[1], visit))


def save(plan: Plan, state: RunState, clock: hardware.Clock, saving: Background) -> None:
    """Save the end of the last completed task as the point from which the run resumes.

    The state is copied now and written while the next task trains. Until it is written, the run would resume from the
    previous state, so the time of writing does not matter. Anything saved later waits for `saving` first.
    """
    saving.wait()
    assert state.method is not None
    if not ranks.first():
        return
    _refuse_full(plan, state)
    tensors = checkpoint.taken(state.method.state_dict())
    card = replace(state.card, continues=plan.folder.model_digest(), experiment=_facts(plan, state, clock))
    agnostic, aware, probes = state.agnostic.copy(), state.aware.copy(), copy.deepcopy(state.probes)

    def write() -> None:
        model_folder.write(plan.folder.model, card, tensors)
        plan.folder.write_accuracy(agnostic, aware, plan.scenario.task_sizes)
        plan.folder.write_probes(probes, plan.class_names)
        checkpoint.remove(plan.folder.partial)

    saving.start(write)


def _facts(plan: Plan, state: RunState, clock: hardware.Clock) -> dict[str, Any]:
    """Return what an experiment needs to resume, in addition to the card that any model has."""
    return {
        "identity": plan.identity,
        "data": plan.data,
        "own_method": plan.own_method,
        "completed": state.completed,
        "agnostic": state.agnostic.tolist(),
        "aware": state.aware.tolist(),
        "task_sizes": list(plan.scenario.task_sizes),
        "class_order": list(plan.scenario.order),
        "first_task": state.first_task,
        "seconds": clock.report(),
        "commits": state.commits,
        "made_with": state.made_with,
        "metrics": None if state.metrics_lost else plan.folder.metrics_digest(),
    }


def restore(plan: Plan, clock: hardware.Clock, say: Callable[[str], None]) -> RunState:
    """Return the state after the last finished task, and remove what was written about the next one."""
    state = RunState.start(plan)
    tensors = _read(plan, state, clock, say) if ranks.first() else None
    found = checkpoint.from_first(None if tensors is None else Checkpoint(tensors, {"completed": state.completed}))
    if found is not None:
        state.completed = found.facts["completed"]
        state.method = plan.blueprint.load(found.tensors)
        if ranks.first():
            _tidy(plan, state, say)
    return state


def _read(plan: Plan, state: RunState, clock: hardware.Clock, say: Callable[[str], None]) -> dict[str, Tensor] | None:
    """Read what is known after the last finished task into `state`; return the tensors, None if there is none."""
    folder = plan.folder
    if checkpoint.exists(folder.model, _EARLIER_STEM):
        raise CheckpointError(
            f"The state in {folder.model} was written by an earlier version of efcil. Finish the run with that "
            f"version, or remove {folder.path} to start over."
        )
    if not model_folder.exists(folder.model):
        if folder.accuracy_file.exists():  # written after the state of a task
            say(
                f"{folder.model} has lost {model_folder.STEM}.json, the state after the last task; the run starts over."
            )
        folder.truncate_metrics(lambda line: line["task"] <= 0)
        return None
    card, tensors = model_folder.read_raw(folder.model)
    facts = card.experiment
    if facts is None:
        raise CheckpointError(_foreign(plan, "it is not the state of a run"))
    _refuse_other(plan, facts)
    checkpoint.tidy(folder.model, model_folder.STEM)  # a killed process may have left the tensors of the state before
    state.card = replace(card, experiment=None, continues=None)
    state.completed = facts["completed"]
    state.agnostic = np.array(facts["agnostic"], dtype=float)
    state.aware = np.array(facts["aware"], dtype=float)
    state.first_task = facts["first_task"]
    state.made_with = [list(ways) for ways in facts["made_with"]]
    state.had_a_part(facts["commits"])
    clock.load(facts["seconds"])
    state.metrics = facts["metrics"]
    for sentence in _changes(plan, facts):
        say(sentence)
    return tensors


def _tidy(plan: Plan, state: RunState, say: Callable[[str], None]) -> None:
    """Make the files of a run say what its state says."""
    folder = plan.folder
    folder.write_accuracy(state.agnostic, state.aware, plan.scenario.task_sizes)
    folder.truncate_metrics(lambda line: line["task"] <= state.completed)
    if folder.metrics_digest() != state.metrics:
        state.metrics_lost = state.completed
        say(f"{folder.metrics_file} has lost or changed lines of the first {state.completed} tasks since they ended.")
    # Of tasks whose lines may not be what was measured, nothing is said.
    state.probes = Probes.of_lines(line for line in folder.read_metrics() if line["task"] > state.metrics_lost)
    folder.write_probes(state.probes, plan.class_names)


def _refuse_other(plan: Plan, facts: Any) -> None:
    """Raise an error if the state is of another run; it says what differs."""
    if listed := named_differences(facts["identity"], plan.identity):
        raise CheckpointError(_foreign(plan, listed))
    if facts["class_order"] != list(plan.scenario.order):
        raise CheckpointError(_foreign(plan, "its classes are in another order"))
    if facts["data"] != plan.data:
        raise CheckpointError(
            f"The images have changed since the run in {plan.folder.path} started. Restore the old ones to resume "
            "it, or remove that folder to start over."
        )


def _foreign(plan: Plan, reason: str) -> str:
    return (
        f"The state in {plan.folder.model} belongs to another run: {reason}. Restore the right one, or remove "
        f"{plan.folder.path} to start over."
    )


def _changes(plan: Plan, facts: Any) -> Iterable[str]:
    """Yield changes since the tasks so far were learned that may change the bits of the result."""
    if facts["own_method"] != plan.own_method:
        yield f"The first {facts['completed']} tasks were learned with another version of {plan.settings.method}."
    last: dict[str, Any] = next((ways[-1] for ways in reversed(facts["made_with"]) if ways), {})
    before = {name: value for name, value in last.items() if name != "method"}  # of which it was said above
    if listed := changed_computing(before, plan.made_with):
        yield f"The first {facts['completed']} tasks were computed differently: {listed}."


def named_differences(there: Any, here: Any) -> str:
    """Return how the identities of two runs differ, as text; empty if they do not."""
    changed = differences(there, here).items()
    return "; ".join(f"{name} is {show(old)} there and {show(new)} here" for name, (old, new) in changed)


def _refuse_full(plan: Plan, state: RunState) -> None:
    """Check, after the first task, that what the method stores per class will fit on the disk for all classes."""
    if state.completed > 1:
        return
    assert state.method is not None
    size = _bytes(state.method.state_dict())
    growing = _bytes(state.method.stored()) * (plan.scenario.number_of_classes / plan.scenario.task_sizes[0] - 1)
    memory = getattr(state.method, "memory", None)
    if memory is not None and memory.too_large(plan.scenario.number_of_classes):
        growing = min(growing, memory.limit)  # from there on, less is kept of every class
    # Twice, because the old state stays until the new one has replaced it.
    refuse_full(plan.folder.path, int(2 * (size + growing)))


def _bytes(tensors: dict[str, Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
