"""The contents of summary.json, written when a run has finished."""

from __future__ import annotations

import datetime
import hashlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efcil import methods, ranks
from efcil.engine import hardware
from efcil.environment import code, environment
from efcil.evaluation.metrics import results
from efcil.methods.storage import account
from efcil.resolution import label
from efcil.runfolder import RunFolder
from efcil.settings import Settings

if TYPE_CHECKING:
    from efcil.experiment.plan import Plan
    from efcil.experiment.state import RunState


@cache
def source_digest(method: str) -> str | None:
    """Return the SHA-256 of the file that defines a method, None if there is no such file.

    It is read once: an edit while runs are training must not be recorded as the code that trained them.
    """
    try:
        return hashlib.sha256(_source(method).read_bytes()).hexdigest()
    except OSError:
        return None


def _source(method: str) -> Path:
    return Path(sys.modules[methods.get(method).__module__].__file__ or "")


def finished_before(folder: RunFolder, changed: Sequence[str]) -> str:
    """Return the message for a run that has finished before; `changed` says what has changed since."""
    return " ".join([f"{folder.path}: finished before, skipped.", *changed])


def changed_since(folder: RunFolder, settings: Settings, data: Callable[[], str | None] | None = None) -> list[str]:
    """Return a sentence for everything that has changed since a run finished.

    That may be a user's own method; the methods of efcil change with its version. It may also be a user's own images:
    `data` gives the digest of the present ones, None if that fails.
    """
    found = []
    summary = folder.read_summary()
    again = f"delete {folder.path} to train it again."
    trained_on = summary.get("data")
    if data is not None and trained_on is not None and data() not in (None, trained_on):
        found.append(f"The images have changed since; {again}")
    made_with, now = summary.get("method_source"), source_digest(settings.method)
    if settings.method not in methods.bundled() and None not in (made_with, now) and made_with != now:
        found.append(f"It was trained with another version of {_source(settings.method)}; {again}")
    return found


def summarise_run(plan: Plan, state: RunState, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return the results of a run and the code and environment that gave them.

    The seconds of a shared first task count fully for every run that uses it, so that runs can be compared.
    """
    settings, scenario = plan.settings, plan.scenario
    assert state.method is not None
    return {
        "method": settings.method,
        "method_source": source_digest(settings.method),
        "label": label(settings),
        "dataset": plan.dataset.name,
        "data": plan.data,
        "scenario": scenario.name,
        "seed": settings.seed,
        "identity": plan.identity,
        **results(state.agnostic, scenario.task_sizes, state.aware),
        **_classifiers(plan, state.metrics_lost),
        **({} if settings.test_views == 1 else {"test_views": settings.test_views}),
        "class_seed": settings.effective_class_seed,
        "task_sizes": scenario.task_sizes,
        "class_order": scenario.order,
        "class_names": plan.class_names,
        **({} if plan.answers is None else {"answers": plan.answers}),
        "seconds": seconds,
        "first_task": state.first_task,
        "network": plan.resolved.network,
        "pretrained": None if plan.backbone.weights is None else plan.backbone.weights.facts(),
        "parameters": sum(parameter.numel() for parameter in state.method.network.parameters()),
        "stored": account(state.method),
        "execution": {
            **hardware.describe(plan.execution, settings.deterministic),
            **hardware.threads(plan.execution),
            **_batches(plan),
        },
        "made_with": state.made_with,
        "metrics_lost": state.metrics_lost > 0,
        "finished": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        **environment(),
        "earlier_commits": [commit for commit in state.commits if commit != code()],
    }


def _batches(plan: Plan) -> dict[str, Any]:
    """Return how many processes shared the batches, and how many images of one each had at most, if several did."""
    if not ranks.several():
        return {}
    sizes = {"first_task": plan.recipe(0).batch_size, "later": plan.recipe(plan.tasks - 1).batch_size}
    each = {name: {"global": size, "per_rank": -(-size // ranks.count())} for name, size in sizes.items()}
    return {**hardware.sharing(), "batch": each}


def _classifiers(plan: Plan, lost: int) -> dict[str, Any]:
    """Return the results of the classifiers that were measured in addition to the method's own, if any were.

    They are in metrics.jsonl alone: what it says of the first `lost` tasks may not be what was measured.
    """
    metrics = plan.folder.read_metrics()
    rows = {line["task"]: line["classifiers"] for line in metrics if "classifiers" in line and line["task"] > lost}
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(name for row in rows.values() for name in row):
        # As for the method's own: a result that depends on a task that was not measured (null) is null too.
        steps = [rows.get(task + 1, {}).get(name) for task in range(plan.tasks)]
        values = [math.nan if step is None else step for step in steps]
        found[name] = {"A_step": values[-1], "A_inc": sum(values) / len(values)}
    return {"classifiers": found} if found else {}
