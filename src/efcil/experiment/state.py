"""The state of a run between its tasks: what <run>/model holds, and how a run takes it up again."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

import efcil
from efcil.engine import checkpoint
from efcil.engine.checkpoint import CheckpointError
from efcil.files import refuse_full
from efcil.methods.base import Method
from efcil.network.incremental import fresh_network

if TYPE_CHECKING:
    from efcil.experiment.run import Run


def save(run: Run, method: Method) -> None:
    """Make the end of the last completed task the place where the run goes on.

    The state is taken now and written while the next task trains. Until it is there, the run goes on from where it
    would have before, so nothing depends on when that is; `run.saving` is waited for before anything else is saved.
    """
    run.saving.wait()
    _refuse_full(run, method)
    tensors = checkpoint.taken(method.state_dict())
    facts, agnostic, aware = _facts(run, method), run.agnostic.copy(), run.aware.copy()

    def write() -> None:
        checkpoint.write(run.folder.model, tensors, facts)
        run.folder.write_accuracy(agnostic, aware, run.scenario.task_sizes)
        checkpoint.remove(run.partial)

    run.saving.start(write)


def restore(run: Run) -> None:
    """Take up the run after its last finished task, and forget what was written about the one after that."""
    if checkpoint.exists(run.folder.model):
        saved = checkpoint.read_and_tidy(run.folder.model)
        facts = saved.facts
        if facts["class_order"] != list(run.scenario.order) or facts["method"] != run.settings.method:
            raise CheckpointError(
                f"The state in {run.folder.model} belongs to another run. Remove {run.folder.path} to start again."
            )
        if facts.get("data", run.data) != run.data:
            raise CheckpointError(
                f"The images have changed since the run in {run.folder.path} was begun. Bring the old ones back to go "
                "on with it, or remove that folder to start again."
            )
        if facts.get("own_method", run.own_method) != run.own_method:
            run.progress.say(
                f"The first {facts['completed']} tasks were learned with another version of {run.settings.method}."
            )
        run.completed = facts["completed"]
        run.agnostic = np.array(facts["agnostic"], dtype=float)
        run.aware = np.array(facts["aware"], dtype=float)
        run.first_task_key = facts["first_task"]
        run.clock.load(facts["seconds"])
        run.had_a_part(facts.get("commits", []))
        network = fresh_network(facts["network"], run.settings.seed, run.execution.device)
        run.method = run.method_class(network, run.resolved.method).to(run.execution.device)
        run.method.load_tensors(saved.tensors)
        run.execution.equip(run.method)
        run.method.eval()
        run.folder.write_accuracy(run.agnostic, run.aware, run.scenario.task_sizes)
    run.folder.truncate_metrics(lambda line: line["task"] <= run.completed)


def _facts(run: Run, method: Method) -> dict[str, Any]:
    """Return everything beside the tensors that is needed to go on, or to use the model elsewhere."""
    names = run.dataset.class_names
    return {
        "completed": run.completed,
        "agnostic": run.agnostic.tolist(),
        "aware": run.aware.tolist(),
        "task_sizes": list(run.scenario.task_sizes),
        "class_order": list(run.scenario.order),
        "class_names": [names[original] for original in run.scenario.order],
        "dataset": run.dataset.name,
        "data": run.data,
        "own_method": run.own_method,
        "image_size": run.dataset.image_size,
        "normalisation": dataclasses.asdict(run.normalisation),
        "network": run.resolved.network,
        "head_sizes": method.network.head_sizes,
        "method": run.settings.method,
        "classifier": run.settings.classifier,
        "method_settings": dataclasses.asdict(run.resolved.method),
        "first_task": run.first_task_key,
        "seconds": run.clock.report(),
        "commits": run.commits,
        "efcil": efcil.__version__,
    }


def _refuse_full(run: Run, method: Method) -> None:
    """After the first task it is known what the method stores per class; see that all of it will fit."""
    if run.completed > 1:
        return
    size = _bytes(method.state_dict())
    growing = _bytes(method.stored()) * (run.scenario.number_of_classes / run.scenario.task_sizes[0] - 1)
    # Twice, because the old state stays until the new one is in place.
    refuse_full(run.folder.path, int(2 * (size + growing)))


def _bytes(tensors: dict[str, Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
