"""How far the class Gaussians that a method transports are from the true ones after every task, and what that costs.

    python benchmarks/transport.py --output benchmarks/results/transport-h200.csv -- --method cedar \
        --dataset cifar100 --data DIR --scenario cs10 --class-order icarl --held-out 0.1

After `--` come the options of `efcil run` for one run of efc++ or cedar. The script trains all tasks and, unlike any
method, looks at the training images of earlier tasks again, to see what the method cannot:

- means: distance between the kept and the true mean of an old class over the standard deviation of a feature, root mean
  square over classes: as the mean was kept before the task, and as the method has moved it.
- covariances: Frobenius norm of the error over that of the true covariance, mean over classes: likewise.
- accuracy over all seen classes of the re-balanced heads, and of heads re-balanced on the true Gaussians. Their
  difference is what better transport could gain; the rest is up to the network.
- pseudo-old images: what share of the way to their targets they went in the old feature space, and for how many the
  old heads answer the class that they answer for the target.

Only held-out training images are tested on: a run without `--held-out` is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from efcil import seeds
from efcil.commands.run import planned
from efcil.core import gaussians
from efcil.core.prototypes import class_statistics
from efcil.data.sources import load_dataset
from efcil.data.store import TaskImages
from efcil.engine.evaluate import TestImages, evaluate
from efcil.engine.hardware import switches
from efcil.engine.lifecycle import learn_task
from efcil.experiment.plan import Plan
from efcil.methods.base import Method, Task
from efcil.methods.cedar import Cedar
from efcil.methods.efc_plus_plus import ElasticFeatureConsolidationPlusPlus as Balanced
from efcil.resolution import source_options
from efcil.settings import Settings
from speed import Table


class Watched:
    """Measures, at the end of every later task of a run, what its method has kept of old classes."""

    def __init__(self, plan: Plan, table: Table) -> None:
        self.plan, self.table, self.test = plan, table, plan.test_images()

    def method(self) -> type[Method]:
        """Return the method of the plan, with a look at it after old classes have followed the drift."""
        measure, base = self.measure, self.plan.blueprint.method
        assert issubclass(base, Balanced)

        class Observed(base):  # type: ignore[valid-type, misc]
            def _follow_drift(self, data: TaskImages) -> None:
                before = self.memory.means.clone(), self.memory.statistics().spread()[0].clone()
                super()._follow_drift(data)
                measure(self, data, *before)

        return Observed

    def measure(self, method: Balanced, data: TaskImages, means: Tensor, covariances: Tensor) -> None:
        """Add the rows of one task, given what was kept before it."""
        index = len(method.network.head_sizes) - 1
        task, name = self.plan.task(index), f"task {index + 1}"
        true = self._truth(method, task)
        moved = method.memory.means, method.memory.statistics().spread()[0]
        for what, kept in (("as before", (means, covariances)), ("transported", moved)):
            self.table.add(f"{name}, error of means", what, mean_error(kept[0], *true), "deviations")
            self.table.add(f"{name}, error of covariances", what, covariance_error(kept[1], true[1]), "of the norm")
        memory, heads = method.memory, method.network.head_weight().detach().clone()
        for what in ("transported", "true"):
            if what == "true":
                memory.means, memory.covariances = true
            method._rebalance(task, data)
            accuracy = seen_accuracy(method, self.test, self.plan, index)
            self.table.add(f"{name}, accuracy, heads re-balanced on", what, accuracy, "%")
            method.replace_heads(heads)
        memory.means, memory.covariances = moved
        if isinstance(method, Cedar) and method.settings.pseudo_old:
            way, same = quality(method, data, task)
            self.table.add(f"{name}, pseudo-old images", "share of the way to the target", way, "")
            self.table.add(f"{name}, pseudo-old images", "answered as their target", same, "%")

    def _truth(self, method: Method, task: Task) -> tuple[Tensor, Tensor]:
        """Return the true means and covariances of all old classes, of augmented views as methods measure them."""
        found: list[tuple[Tensor, Tensor]] = []
        for earlier in map(self.plan.task, range(task.index)):
            data = self.plan.images(earlier)
            rows, labels = gaussians.collect(method.network.features, data.augmented("prototypes", task.index))
            found.append(class_statistics(rows, labels, range(earlier.first_class, earlier.seen)))
        means, covariances = (torch.cat(side) for side in zip(*found, strict=True))
        return means, covariances


def mean_error(means: Tensor, true: Tensor, covariances: Tensor) -> float:
    """Distance of means (C, n) to the true ones over the standard deviation of a feature, root mean square."""
    variance = covariances.diagonal(dim1=1, dim2=2).mean(dim=1)
    return float(((means - true).square().mean(dim=1) / variance).mean().sqrt())


def covariance_error(covariances: Tensor, true: Tensor) -> float:
    """Frobenius norm of the error of covariances (C, n, n) over that of the true ones, mean over classes."""
    return float(((covariances - true).flatten(1).norm(dim=1) / true.flatten(1).norm(dim=1)).mean())


def seen_accuracy(method: Method, test: TestImages, plan: Plan, index: int) -> float:
    """Percentage of right answers of the heads over all classes seen."""
    row = evaluate(method, test, plan.scenario, index).agnostic
    return float(np.average(row, weights=plan.scenario.task_sizes[: index + 1]))


def quality(method: Cedar, data: TaskImages, task: Task) -> tuple[float, float]:
    """Return how far pseudo-old images get to their targets, and percent for which the old heads answer the same."""
    images, _ = next(iter(data.augmented("drift", 0)))
    old = method.old_network
    features = old.features(images)
    choice = method._choose(features, seeds.generator(data.device, task.seed, "quality", task.index))
    _, reached = method._make(images[choice.sources], choice.targets)
    rest, way = ((each - choice.targets).norm(dim=1) for each in (reached, features[choice.sources]))
    answers = [old.logits(each).argmax(dim=1) for each in (reached, choice.targets.to(reached.dtype))]
    return float((1 - rest / way).mean()), 100 * float((answers[0] == answers[1]).float().mean())


def measure(settings: Settings, table: Table | None) -> Method:
    """Train all tasks of a run, measuring after each but the first if there is a table; return the method."""
    place = None if settings.data is None else Path(settings.data)
    plan = Plan.make(settings, Path("unwritten"), load_dataset(settings.dataset, place, source_options(settings)))
    with switches(plan.execution, deterministic=settings.deterministic), plan.execution.stream():
        blueprint = plan.blueprint
        if table is not None:
            blueprint = replace(blueprint, method=Watched(plan, table).method())
        method: Method | None = None
        for index in range(plan.tasks):
            task = plan.task(index)
            method = learn_task(blueprint, method, task, plan.images(task), plan.recipe(index))
    assert method is not None
    return method


def chosen(words: Sequence[str]) -> Settings:
    """Return the one run that the options of `efcil run` ask for."""
    runs = planned(list(words))
    if len(runs) != 1:
        raise SystemExit(f"Give the options of one run; these are {len(runs)}.")
    if runs[0].method not in ("efc++", "cedar"):
        raise SystemExit(f"This looks at efc++ and cedar, not at {runs[0].method}.")
    if runs[0].held_out is None:
        raise SystemExit("Give --held-out: this is for choosing settings, which test images must not do.")
    return runs[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("run", nargs="+", metavar="OPTION", help="options of `efcil run`, after --")
    arguments = parser.parse_args()
    table = Table()
    measure(chosen(arguments.run), table)
    if arguments.output is not None:
        table.write(arguments.output)


if __name__ == "__main__":
    main()
