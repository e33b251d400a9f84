"""One run: from settings to a run folder, from wherever an earlier attempt has got to."""

from __future__ import annotations

import datetime
import math
import os
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import efcil
from efcil import methods
from efcil.core import classifiers
from efcil.data.augment import Normalisation, make_augmentation
from efcil.data.images import Dataset
from efcil.data.scenario import Scenario, class_order, make_scenario
from efcil.data.store import TaskImages
from efcil.engine import checkpoint, hardware
from efcil.engine.aside import Aside
from efcil.engine.checkpoint import CheckpointError
from efcil.engine.evaluate import TestImages, evaluate
from efcil.engine.first_task import FirstTask
from efcil.engine.interrupt import Interrupted, StopRequest
from efcil.engine.progress import Progress
from efcil.engine.rebuild import refuse_unloadable
from efcil.engine.trainer import Trainer
from efcil.environment import code, command
from efcil.errors import DataError, EfcilError
from efcil.evaluation.metrics import step_accuracy
from efcil.experiment import first_tasks, state
from efcil.experiment.first_tasks import FirstTaskRecord, FirstTaskStore
from efcil.experiment.summary import source_digest, summarise_run, told_if_finished
from efcil.experiment.training import interrupted, train
from efcil.files import locked, refuse_unwritable
from efcil.methods.base import Method, Task, Traits
from efcil.network.incremental import IncrementalNetwork, fresh_network, trained_network
from efcil.network.resnet import backbone_bytes
from efcil.report import matrix_text
from efcil.runfolder import locate
from efcil.settings import Recipe, Settings, resolve

_MEGABYTE = 1 << 20


def make_run_scenario(settings: Settings, dataset: Dataset) -> Scenario:
    """Return the class order and the tasks that the settings ask for."""
    classes = dataset.number_of_classes
    order = class_order(settings.class_order, classes, settings.effective_class_seed, dataset.class_names)
    return make_scenario(
        settings.scenario,
        classes,
        order=order,
        tasks=settings.tasks,
        first_task_classes=settings.first_task_classes,
        dataset=dataset.name,
    )


def run_one(
    settings: Settings,
    output: Path,
    dataset: Dataset,
    *,
    quiet: bool = False,
    stop: StopRequest | None = None,
    checkpoint_steps: int | None = None,
    fingerprint: str | None = None,
) -> Path:
    """Train one run, or what is left of it, and return its folder; a finished run is left as it is.

    SIGINT and SIGTERM end the step under way, save, and raise `Interrupted`. Besides the end of every task, its middle
    is saved every five minutes, and after every `checkpoint_steps` steps where that is given; it changes no result.
    `fingerprint` is that of the dataset where the caller knows it already.
    """
    folder = locate(output, settings)
    if (finished := told_if_finished(folder, settings)) is not None:
        if not quiet:
            print(finished)
        return folder.path
    run = Run(settings, output, dataset, fingerprint or first_tasks.fingerprint(dataset))
    run.checkpoint_steps = checkpoint_steps
    refuse_unwritable(folder.path, run.needed_bytes())
    with locked(folder.path / ".lock"):
        folder.remove_leftovers()
        folder.write_settings(settings)
        with (
            stop if stop is not None else StopRequest() as stop_request,
            Progress(run.scenario.number_of_tasks, folder.log_file, quiet=quiet) as progress,
            hardware.switches(run.execution, settings.deterministic),
            run.execution.stream(),
        ):
            _attempt(run, progress, stop_request)
    return folder.path


def _attempt(run: Run, progress: Progress, stop: StopRequest) -> None:
    """Run to the end, with every way of failing told in the log."""
    progress.log(f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}  efcil {efcil.__version__}  {command()}")
    try:
        run.execute(progress, stop)
    except Interrupted as interruption:
        progress.log(str(interruption))
        raise
    except EfcilError as error:
        progress.log(f"Failed: {error}")
        raise
    except OSError as error:
        message = (
            f"The run in {run.folder.path} was stopped by a file error ({error}). Its last checkpoint is untouched; "
            "put that right and give the same command again."
        )
        progress.log(f"Failed: {message}\n{traceback.format_exc().rstrip()}")
        raise CheckpointError(message) from error
    except Exception as error:
        progress.log(f"Failed: {type(error).__name__}: {error}\n{traceback.format_exc().rstrip()}")
        raise
    finally:
        # Whatever ended the run: the task before is finished, and what is being written of it is to be whole.
        try:
            run.saving.wait()
        except Exception as error:
            progress.log(f"Failed: the state after task {run.completed} was not saved: {error}")


class Run:
    """The state of one run while it is under way."""

    def __init__(self, settings: Settings, output: Path, dataset: Dataset, fingerprint: str) -> None:
        self.settings = settings
        self.output = output
        self.dataset = dataset
        self.fingerprint = fingerprint
        self.data = first_tasks.data_digest(dataset, fingerprint)
        #: What the file of a method that is the user's own has in it; those of efcil change with its version.
        self.own_method = None if settings.method in methods.bundled() else source_digest(settings.method)
        self.folder = locate(output, settings)
        self.partial = self.folder.path / "partial"
        self.store = FirstTaskStore(output)
        self.resolved = resolve(settings, dataset.image_size)
        self.method_class = methods.get(settings.method)
        self.scenario = make_run_scenario(settings, dataset)
        self.execution = hardware.choose_execution(settings)
        self.executed = hardware.describe(self.execution, settings.deterministic) | hardware.threads(self.execution)
        self.normalisation = Normalisation(dataset.mean, dataset.std)
        self.labels = self.scenario.relabel(dataset.train.labels)
        self.clock = hardware.Clock(self.execution.device)
        self.checkpoint_steps: int | None = None
        self.saving = Aside()
        self.under_way = False
        tasks = self.scenario.number_of_tasks
        self.agnostic = np.full((tasks, tasks), math.nan)
        self.aware = np.full((tasks, tasks), math.nan)
        self.completed = 0
        self.method: Method | None = None
        self.first_task_key: str | None = None
        self.history: list[dict[str, Any]] = []
        #: The code that had a part in what is there so far, in the order in which it had.
        self.commits: list[str] = []
        self.had_a_part([code()])
        self._waiting = False
        self.progress: Progress
        self.stop: StopRequest

    # -- the whole run -----------------------------------------------------------------------------------------

    def execute(self, progress: Progress, stop: StopRequest) -> None:
        """Train the tasks that are left, then write the summary."""
        self.progress, self.stop = progress, stop
        with self.clock.phase("start_up"):
            if self.execution.device.type == "cuda" and hardware.MPS_SHARE in os.environ:
                hardware.refuse_broken_products(self.execution)
            state.restore(self)
            dtype, device = self.execution.dtype, self.execution.device
            test = self.dataset.test
            self.test = TestImages(
                test.images,
                self.scenario.relabel(test.labels),
                normalisation=self.normalisation,
                device=device,
                dtype=dtype,
            )
        at = f", going on after task {self.completed}" if self.completed else ""
        progress.say(f"{self.folder.path}: {self.scenario.number_of_tasks} tasks on {device}{at}")
        for index in range(self.completed, self.scenario.number_of_tasks):
            if self._is_measured(index):
                self._refuse_to_go_on()
                self._run_task(index)
        assert self.method is not None
        self.saving.wait()
        checkpoint.remove(self.partial)
        self.folder.write_summary(summarise_run(self, self.method))
        progress.say(matrix_text(self.agnostic, self.scenario.task_sizes))

    def had_a_part(self, commits: Iterable[str | None]) -> None:
        """Remember the code that something was trained with which this run builds on."""
        self.commits = list(dict.fromkeys([*(each for each in commits if each is not None), *self.commits]))

    def needed_bytes(self) -> int:
        """Return about how much the checkpoints of the first task need, old and new ones side by side."""
        assert self.resolved.network is not None
        network = backbone_bytes(self.resolved.network)
        # The network in the model and among the first tasks, and with two moments in the middle of a task.
        return 2 * (network + network + 3 * network) + 4 * _MEGABYTE

    @property
    def traits(self) -> Traits:
        """What is to be known of the method with its settings."""
        return self.method_class.traits(self.resolved.method)

    @property
    def joint(self) -> bool:
        """Whether every training begins anew with the images of all classes seen."""
        return self.traits.images == "all"

    def recipe(self, index: int) -> Recipe:
        """Return how task `index` is optimised."""
        if self.joint:
            return self.method_class.recipe(self.resolved.method, self.resolved.first_task)
        return self.resolved.first_task if index == 0 else self.resolved.later

    def _is_measured(self, index: int) -> bool:
        return self.traits.trained_after == "every" or index == self.scenario.number_of_tasks - 1

    def later_epochs(self, index: int) -> int:
        """Return how many epochs the tasks after task `index` have together."""
        later = range(index + 1, self.scenario.number_of_tasks)
        return sum(self.recipe(task).epochs for task in later if self._is_measured(task))

    # -- one task ----------------------------------------------------------------------------------------------

    def _run_task(self, index: int) -> None:
        self.history = []
        before = self.clock.report()
        if index == 0 or self.joint:
            task, data = self._from_the_start(index)
        else:
            task, data = self._later_task(index)
        assert self.method is not None
        self.method.eval()
        with self.clock.phase("statistics"), torch.no_grad():
            self.method.end_task(task, data)
        del data
        if index == 0 and self.own_method is not None:
            assert self.resolved.network is not None
            refuse_unloadable(self.method, self.resolved.network, self.settings.seed)
        with self.clock.phase("evaluation"):
            agnostic, aware = evaluate(self.method, self.test, self.scenario, index, self.settings.classifier)
            others = self._other_classifiers(index)
        self.agnostic[index, : index + 1] = agnostic
        self.aware[index, : index + 1] = aware
        after = self.clock.report()
        seconds = {name: after[name] - before[name] for name in ("train", "statistics", "evaluation")}
        step = float(step_accuracy(self.agnostic, self.scenario.task_sizes)[index])
        line = {"kind": "task", "task": index + 1, "accuracy": agnostic, "task_aware": aware, "A_step": step}
        self.folder.append_metrics(line | others | {"seconds": seconds})
        self.completed = index + 1
        state.save(self, self.method)
        spent = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        tasks = self.scenario.number_of_tasks
        self.progress.end_task(f"task {index + 1}/{tasks} done: A_step {step:.2f} %  ({spent})")

    def _other_classifiers(self, index: int) -> dict[str, dict[str, float]]:
        """Return the accuracy over all seen classes of every classifier that is possible, where that is asked for."""
        assert self.method is not None
        if self.settings.classifier != classifiers.ALL:
            return {}
        sizes = self.scenario.task_sizes[: index + 1]
        names = [name for name in classifiers.possible(self.traits.keeps) if name != classifiers.OWN]
        rows = {name: evaluate(self.method, self.test, self.scenario, index, name)[0] for name in names}
        return {"classifiers": {name: float(np.average(row, weights=sizes)) for name, row in rows.items()}}

    def _from_the_start(self, index: int) -> tuple[Task, TaskImages]:
        """Train a network from scratch on the first task, or jointly on all classes up to task `index`."""
        with self.clock.phase("start_up"):
            recipe = self.recipe(index)
            classes = sum(self.scenario.task_sizes[: index + 1])
            task = Task(0, 0, classes, self.settings.seed, recipe.batch_size)
            data = self._images(task)
        network = self._first_task(index, task, data, recipe)
        self.method = self.method_class(network, self.resolved.method).to(self.execution.device)
        self.execution.equip(self.method)
        return task, data

    def _first_task(self, index: int, task: Task, data: TaskImages, recipe: Recipe) -> IncrementalNetwork:
        assert self.resolved.network is not None
        description = self.first_task_description(task.classes, recipe)
        key = first_tasks.digest(description)
        if index == 0:
            self.first_task_key = key
        asked = time.perf_counter()
        with locked(self.store.lock(key), self._wait_for_first_task):
            # What another process has trained meanwhile is counted as this one's own below.
            self.clock.waited(time.perf_counter() - asked)
            record = self.store.load(key)
            if record is not None:
                self.progress.say(f"task {index + 1}: trained before, taken from {self.store.place(key)}")
                for line in record.epochs:
                    self.folder.append_metrics(line | {"task": index + 1})
                self.clock.credit("train", record.seconds)
                self.had_a_part(record.commits)
            else:
                record = self._train_first_task(index, task, data, recipe, key, description)
        return trained_network(self.resolved.network, self.settings.seed, self.execution.device, record.tensors)

    def _train_first_task(
        self, index: int, task: Task, data: TaskImages, recipe: Recipe, key: str, description: Mapping[str, Any]
    ) -> FirstTaskRecord:
        assert self.resolved.network is not None
        start = self.clock.report()["train"]
        with self.clock.phase("train"):
            network = fresh_network(self.resolved.network, self.settings.seed, self.execution.device)
            learner = FirstTask(network, task, recipe.rotations)
            self.execution.equip(learner)
            train(self, index, Trainer(learner, data, task, recipe, self.execution), key)
        learner.eval()
        tensors = {name: value.detach().clone() for name, value in network.state_dict().items()}
        record = FirstTaskRecord(tensors, self.history, self.clock.report()["train"] - start, self.commits)
        rows, _ = evaluate(learner, self.test, self.scenario, index)
        sizes = self.scenario.task_sizes[: index + 1]
        self.store.save(key, record, description, float(np.average(rows, weights=sizes)))
        return record

    def first_training(self) -> str:
        """Return the key of what is trained before anything else: the first task, or all classes at once."""
        index = next(index for index in range(self.scenario.number_of_tasks) if self._is_measured(index))
        classes = sum(self.scenario.task_sizes[: index + 1])
        return first_tasks.digest(self.first_task_description(classes, self.recipe(index)))

    def first_task_description(self, classes: int, recipe: Recipe) -> dict[str, Any]:
        """Return what decides a network trained on the first `classes` classes."""
        assert self.resolved.network is not None
        assert self.resolved.augmentation is not None
        return first_tasks.describe(
            self.fingerprint,
            self.scenario.order[:classes],
            self.resolved.network,
            self.resolved.augmentation,
            recipe,
            self.settings.seed,
            self.executed,
        )

    def _later_task(self, index: int) -> tuple[Task, TaskImages]:
        assert self.method is not None
        recipe = self.recipe(index)
        positions = self.scenario.tasks[index]
        task = Task(index, positions[0], len(positions), self.settings.seed, recipe.batch_size)
        with self.clock.phase("start_up"):
            data = self._images(task)
        with self.clock.phase("train"):
            self.method.begin_task(task)
            train(self, index, Trainer(self.method, data, task, recipe, self.execution), None)
        return task, data

    def _images(self, task: Task) -> TaskImages:
        chosen = np.flatnonzero((self.labels >= task.first_class) & (self.labels < task.seen))
        if len(chosen) == 0:
            raise DataError(f"Task {task.index + 1} of {self.dataset.name} has no training image. Check its classes.")
        assert self.resolved.augmentation is not None
        return TaskImages(
            self.dataset.train.images,
            self.labels,
            augmentation=make_augmentation(self.resolved.augmentation),
            normalisation=self.normalisation,
            device=self.execution.device,
            seed=task.seed,
            name=f"task{task.index}",
            dtype=self.execution.dtype,
            rows=chosen,
        )

    # -- stopping ----------------------------------------------------------------------------------------------

    def _wait_for_first_task(self, owner: str) -> None:
        if not self._waiting:
            self._waiting = True
            self.progress.say(f"waiting for the first task, which another process ({owner}) is training")
        self._refuse_to_go_on()

    def _refuse_to_go_on(self) -> None:
        if self.stop.requested:
            self.saving.wait()
            raise interrupted(self, f"Stopped after task {self.completed}.")
