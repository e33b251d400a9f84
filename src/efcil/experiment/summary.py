"""What summary.json says of a finished run."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from efcil.environment import environment
from efcil.evaluation.metrics import summarise
from efcil.methods.base import Method
from efcil.settings import label

if TYPE_CHECKING:
    from efcil.experiment.run import Run


def summarise_run(run: Run, method: Method) -> dict[str, Any]:
    """Return the results of a run and what they were made with.

    The seconds of a shared first task count fully for every run that uses it, so that runs can be compared.
    """
    settings, scenario = run.settings, run.scenario
    metrics = summarise(run.agnostic, scenario.task_sizes, run.aware)
    return {
        "method": settings.method,
        "label": label(settings),
        "dataset": run.dataset.name,
        "scenario": scenario.name,
        "seed": settings.seed,
        "A_step": metrics.last_step_accuracy,
        "A_inc": metrics.average_incremental_accuracy,
        "A_step_per_task": metrics.step_accuracy,
        "task_mean": metrics.task_mean[-1],
        "task_mean_per_task": metrics.task_mean,
        "forgetting": metrics.average_forgetting,
        "forgetting_per_task": metrics.forgetting,
        "task_aware_A_step": metrics.aware_last_step_accuracy,
        "task_aware_A_inc": metrics.aware_average_incremental_accuracy,
        "task_aware_A_step_per_task": metrics.aware_step_accuracy,
        **_classifiers(run),
        "class_seed": settings.effective_class_seed,
        "task_sizes": scenario.task_sizes,
        "class_order": scenario.order,
        "class_names": [run.dataset.class_names[original] for original in scenario.order],
        "seconds": run.clock.report(),
        "first_task": run.first_task_key,
        "network": run.resolved.network,
        "parameters": sum(parameter.numel() for parameter in method.network.parameters()),
        "stored": _stored(method),
        "execution": run.executed,
        "finished": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        **environment(),
    }


def _classifiers(run: Run) -> dict[str, Any]:
    """Return the results of the classifiers that were measured beside the method's own, if any were."""
    rows = [line["classifiers"] for line in run.folder.read_metrics() if "classifiers" in line]
    if not rows:
        return {}
    steps = {name: [row[name] for row in rows] for name in rows[-1]}
    found = {name: {"A_step": values[-1], "A_inc": sum(values) / len(values)} for name, values in steps.items()}
    return {"classifiers": found}


def _stored(method: Method) -> dict[str, Any]:
    """Return how many numbers and bytes the method keeps beside the network: in all, and by name."""
    by_name = {
        name: {"numbers": tensor.numel(), "bytes": tensor.numel() * tensor.element_size()}
        for name, tensor in method.stored().items()
    }
    total = {unit: sum(entry[unit] for entry in by_name.values()) for unit in ("numbers", "bytes")}
    return {**total, "by_name": by_name}
