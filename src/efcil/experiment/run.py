"""One run: from settings to a run folder, resumed from where an earlier attempt stopped."""

from __future__ import annotations

import datetime
import os
import shlex
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

import efcil
from efcil import ranks
from efcil.activity import between_pieces, doing
from efcil.core import classifiers
from efcil.core.feature_matrix import spectrum
from efcil.data import domains
from efcil.data.ahead import Ahead, sentence
from efcil.data.images import Dataset
from efcil.data.store import TaskImages
from efcil.engine import checkpoint, hardware
from efcil.engine.background import Background
from efcil.engine.checkpoint import CheckpointError
from efcil.engine.evaluate import Answers, TestImages, evaluate
from efcil.engine.feed import prepared_bytes, staged_bytes
from efcil.engine.interrupt import Interrupted, StopRequest
from efcil.engine.lifecycle import Journal, State, Watch, learn_task
from efcil.engine.progress import Progress
from efcil.engine.trackers import TrackedRun, Tracking
from efcil.engine.trainer import EpochReport, Position
from efcil.environment import LAUNCHER, command
from efcil.errors import DataError, EfcilError, SettingsError
from efcil.evaluation import probes
from efcil.evaluation.metrics import step_accuracy
from efcil.experiment import shared_tasks, state
from efcil.experiment.plan import Plan
from efcil.experiment.shared_tasks import SharedTask
from efcil.experiment.state import RunState
from efcil.experiment.summary import changed_since, finished_before, summarise_run
from efcil.files import locked, refuse_unwritable
from efcil.model.card import changed_computing
from efcil.network.backbones import is_of_hub
from efcil.output import lines
from efcil.report import matrix_text
from efcil.resolution import label, scenario_name
from efcil.resolution.identity import flatten
from efcil.runfolder import RunFolder, locate
from efcil.settings import Settings

#: What the first process says when it holds the lock that all of them need.
_GO = "go"


def run_one(
    settings: Settings,
    output: Path,
    dataset: Dataset,
    *,
    quiet: bool = False,
    stop: StopRequest | None = None,
    checkpoint_steps: int | None = None,
    fingerprint: str | None = None,
    log: Sequence[str] = (),
) -> Path:
    """Train or resume one run and return its folder; a finished run is not changed, and one on other images refused.

    On SIGINT or SIGTERM the current step or piece of images ends, a checkpoint is saved, and `Interrupted` is raised.
    Checkpoints are also saved at the end of every task, every five minutes, and every `checkpoint_steps` steps if that
    is given; saving does not change the result. `fingerprint` is that of the dataset, if the caller already knows it.
    `log` names trackers (tensorboard, wandb, mlflow) that the run is logged to.
    """
    output = Path(output)
    folder = locate(output, settings)
    if (finished := ranks.first_does(lambda: _finished_before(folder, settings, dataset, fingerprint))) is not None:
        if not quiet and ranks.first():
            print(lines(finished))
        return folder.path
    plan = Plan.make(settings, output, dataset, fingerprint)
    refuse_thin_batches(plan)
    with ExitStack() as held:

        def begin() -> None:
            refuse_unwritable(folder.path, plan.needed_bytes())
            held.enter_context(locked(folder.path / ".lock"))
            folder.remove_leftovers()
            folder.write_settings(settings)

        ranks.first_does(begin)
        written = folder.log_file if ranks.first() else None
        with (
            stop if stop is not None else StopRequest() as stop_request,
            Progress(plan.tasks, written, quiet=quiet or not ranks.first()) as progress,
            hardware.switches(plan.execution, settings.deterministic),
            plan.execution.stream(),
        ):
            _attempt(Run(plan, progress, stop_request, checkpoint_steps, log if ranks.first() else ()))
    return folder.path


def _finished_before(folder: RunFolder, settings: Settings, dataset: Dataset, fingerprint: str | None) -> str | None:
    """Return the message for a run that has finished before, None if it has not; refuse one on other images."""
    if not folder.is_finished(settings):
        return None
    known = folder.read_summary().get("data")
    if known is not None and known != shared_tasks.data_digest(dataset, fingerprint):
        raise DataError(
            f"The run in {folder.path} was trained on other images than these. Choose another output folder, or "
            "delete it."
        )
    return finished_before(folder, changed_since(folder, settings))


def refuse_thin_batches(plan: Plan) -> None:
    """Raise if a batch has too few images for every process to have two of them."""
    for index in range(plan.tasks):
        images = plan.recipe(index).batch_size
        if ranks.several() and images < 2 * ranks.count():
            raise SettingsError(
                f"A batch of {images} images is too small for {ranks.count()} processes, which need two each. Start at "
                f"most {max(images // 2, 1)} of them, or use a larger --batch-size."
            )


def _attempt(run: Run) -> None:
    """Run to the end, and write every failure to the log."""
    log = run.progress.log
    log(f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}  efcil {efcil.__version__}  {command()}")
    ended = "failed"
    try:
        run.execute()
        ended = "finished"
    except Interrupted as interruption:
        ended = "interrupted"
        log(str(interruption))
        raise
    except EfcilError as error:
        log(f"Failed: {error}")
        raise
    except OSError as error:
        message = (
            f"The run in {run.plan.folder.path} was stopped by a file error ({error}). Its last checkpoint is "
            "intact; fix the cause and run the same command again."
        )
        log(f"Failed: {message}\n{traceback.format_exc().rstrip()}")
        raise CheckpointError(message) from error
    except Exception as error:
        log(f"Failed: {type(error).__name__}: {error}\n{traceback.format_exc().rstrip()}")
        raise
    finally:
        if run.ahead is not None:
            run.ahead.cancel()
        # However the run ended: the previous task is finished, and its state must be written completely.
        try:
            run.saving.wait()
        except Exception as error:
            log(f"Failed: the state after task {run.state.completed} was not saved: {error}")
        with doing("logging what is left"):
            run.tracking.end(ended)


def tracked(plan: Plan) -> TrackedRun:
    """Return what trackers are given about a run; runs that go to one output folder are a group."""
    settings = plan.settings
    name = f"{label(settings)}/{scenario_name(settings)}/seed{settings.seed}"
    group = plan.output.absolute().name or "efcil"
    parameters = flatten(plan.identity) | {"device": str(plan.execution.device), "label": label(settings)}
    return TrackedRun(name, group, plan.folder.path, plan.output, parameters)


class Run:
    """A plan, its state, and what is needed to execute it."""

    def __init__(
        self,
        plan: Plan,
        progress: Progress,
        stop: StopRequest,
        checkpoint_steps: int | None,
        log: Sequence[str] = (),
    ) -> None:
        self.plan = plan
        self.state = RunState.start(plan)
        self.progress = progress
        self.stop = stop
        self.checkpoint_steps = checkpoint_steps
        self.clock = hardware.Clock(plan.execution.device)
        self.saving = Background()
        self.tracking = Tracking(log, tracked(plan), progress.say)
        self.ahead: Ahead | None = None
        self._tier: str | None = None
        self._most_ahead = 0

    def execute(self) -> None:
        """Train the remaining tasks, then write the summary."""
        plan = self.plan
        with self.clock.phase("start_up"):
            if plan.execution.device.type == "cuda" and hardware.MPS_SHARE in os.environ:
                hardware.refuse_broken_products(plan.execution)
            with doing("loading what an earlier attempt has saved"):
                self.state = state.restore(plan, self.clock, self.progress.say)
            with doing(f"copying the test images to {plan.execution.device}"), between_pieces(self.stop_if_asked):
                test = plan.test_images()
        with doing("starting the trackers"):
            self.tracking.begin(plan.folder.read_metrics())
        done = self.state.completed
        at = f", resuming after task {done}" if done else ""
        where = (
            f"{plan.execution.device.type} in {ranks.count()} processes" if ranks.several() else plan.execution.device
        )
        counted = "" if plan.answers is None else f", {domains.counted(plan.answers)}"
        self.progress.say(f"{plan.folder.path}: {plan.tasks} tasks on {where}{counted}{at}")
        if plan.settings.input_size is None and plan.backbone.input_size is not None:
            scratch = "" if is_of_hub(plan.backbone.name) else "; --weights none trains it from scratch"
            self.progress.say(
                f"images of {plan.dataset.image_size} pixels are enlarged to {plan.backbone.input_size} for "
                f"{plan.backbone.name}, which is taken to be pre-trained. That takes longer; --input-size chooses "
                f"another size{scratch}"
            )
        if (outlook := plan.memory_outlook()) is not None:
            self.progress.say(outlook)
        if plan.faster_in_bf16():
            self.progress.say(
                f"this processor multiplies bf16, in which {plan.backbone.name} trains faster: --precision bf16. "
                "The default stays fp32, so that results do not depend on the processor"
            )
        resumable = True  # later, a checkpoint found there is of a task that this process has finished
        for index in range(done, plan.tasks):
            if plan.is_measured(index):
                self.stop_if_asked()
                with between_pieces(self.stop_if_asked):
                    self._run_task(index, test, resumable)
                resumable = False
        with doing("saving the last task"):
            self.saving.wait()
        if ranks.first():
            checkpoint.remove(plan.folder.partial)
            plan.folder.write_summary(summarise_run(plan, self.state, self.clock.report()))
        self.progress.say(matrix_text(self.state.agnostic, plan.scenario.task_sizes))

    def _run_task(self, index: int, test: TestImages, resumable: bool) -> None:
        """Learn a task, test it, and save the state of the run."""
        plan, before = self.plan, self.clock.report()
        self.progress.enter_task(index)
        with self.clock.phase("start_up"), doing("preparing the images of the task"):
            task = plan.task(index)
            data = plan.images(task, self.ahead)
        self._say_where(index, data)
        self._prefetch(index, data)
        learning = _TaskUnderWay(self, index)
        journal = learning.journal(resumable)
        self.state.method = learn_task(
            plan.blueprint,
            None if plan.from_scratch(index) else self.state.method,
            task,
            data,
            plan.recipe(index),
            journal=journal,
            watch=learning.watch(),
            clock=self.clock,
            share=learning.share if plan.from_scratch(index) else None,
        )
        del data
        with self.clock.phase("evaluation"), journal.ending():
            classifier, views = plan.settings.classifier, plan.settings.test_views
            answers = evaluate(self.state.method, test, plan.scenario, index, classifier, views)
            others = self._other_classifiers(index, test)
        del journal  # with the state after training
        self.state.agnostic[index, : index + 1] = answers.agnostic
        self.state.aware[index, : index + 1] = answers.aware
        after = self.clock.report()
        seconds = {name: after[name] - before[name] for name in ("train", "statistics", "evaluation")}
        step = float(step_accuracy(self.state.agnostic, plan.scenario.task_sizes)[index])
        accuracies = {"accuracy": answers.agnostic, "task_aware": answers.aware, "A_step": step}
        line = {"kind": "task", "task": index + 1, **accuracies, **others, "seconds": seconds}
        line |= self._probes(index, answers)
        self.write(line)
        self.state.probes.add(line)
        self.state.completed = index + 1
        self.state.learned(plan, task, learning.made_with)
        state.save(plan, self.state, self.clock, self.saving)
        spent = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        self.progress.end_task(f"task {index + 1}/{plan.tasks} done: A_step {step:.2f} %  ({spent})")

    def _say_where(self, index: int, data: TaskImages) -> None:
        """Say where the images of the task are kept and what that takes: once, and whenever the place changes."""
        if data.kept.tier != self._tier:
            self._tier = data.kept.tier
            images = self.plan.recipe(index).batch_size
            said = data.kept.sentence(prepared_bytes(data, images), staged_bytes(data, images))
            self.progress.say(f"task {index + 1}: {said}")

    def _prefetch(self, index: int, data: TaskImages) -> None:
        """Begin to decode the images of the next task, if there is room for them; say what that takes at most."""
        self.ahead = self.plan.ahead(index, data.kept)
        if self.ahead is None:
            return
        if self.ahead.most > self._most_ahead:
            self._most_ahead = self.ahead.most
            self.progress.say(f"task {index + 1}: {sentence(self.ahead.most)}")
        self.ahead.start()

    def _probes(self, index: int, answers: Answers) -> dict[str, Any]:
        """Return what is recorded about classes and about the directions of feature space that matter."""
        assert self.state.method is not None
        matrix = self.state.method.importance_matrix()
        values = None if matrix is None else spectrum(matrix)
        listed = None if values is None else values.tolist()
        last = index == self.plan.tasks - 1
        return probes.line_of(answers.confusion, answers.images, answers.right, listed, last)

    def _other_classifiers(self, index: int, test: TestImages) -> dict[str, dict[str, float]]:
        """Return the accuracy over all seen classes of every possible classifier, if the settings ask for it."""
        plan, method = self.plan, self.state.method
        assert method is not None
        if plan.settings.classifier != classifiers.ALL:
            return {}
        sizes = plan.scenario.task_sizes[: index + 1]
        names = [name for name in classifiers.possible(plan.traits.keeps) if name != classifiers.OWN]
        views = plan.settings.test_views
        rows = {name: evaluate(method, test, plan.scenario, index, name, views).agnostic for name in names}
        return {"classifiers": {name: float(np.average(row, weights=sizes)) for name, row in rows.items()}}

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl, and give it to the trackers."""
        self.plan.folder.append_metrics(line)
        self.tracking.line(line)

    def stop_if_asked(self) -> None:
        """Raise `Interrupted` if a stop was asked for, once the last task is saved."""
        if self.stop.agreed():
            self.saving.wait()
            done = self.state.completed
            raise self.interrupted(f"Stopped after task {done}." if done else "Stopped before the end of task 1.")

    def interrupted(self, what: str) -> Interrupted:
        """Return the error to raise: it says what was stopped, and the exact command to resume with."""
        again = command()
        if shlex.split(again)[0] not in ("efcil", LAUNCHER):  # called from Python: there is no such command
            config, output = str(self.plan.folder.settings_file), str(self.plan.output)
            again = shlex.join(["efcil", "run", "--config", config, "--output", output])
        return Interrupted(f"{what} To resume: {again}")


class _TaskUnderWay:
    """What a run does while one of its tasks is learned: lines of metrics, checkpoints, the shared first task."""

    def __init__(self, run: Run, index: int) -> None:
        self.run = run
        self.index = index
        #: The metrics lines of the epochs so far, and every execution (device and numerics) that computed them.
        self.epochs: list[dict[str, Any]] = []
        self.made_with = [run.plan.provenance]
        self.waiting = False
        self.queue = ExitStack()

    # -- epochs --------------------------------------------------------------------------------------------------

    def watch(self) -> Watch:
        """Return the callbacks for epochs."""
        run, index = self.run, self.index

        def begin(epochs: int, done: int) -> None:
            plan = run.plan
            run.progress.begin_task(index, epochs, done, plan.later_epochs(index), len(plan.later_tasks(index)))

        return Watch(begin, self._epoch)

    def _epoch(self, report: EpochReport) -> None:
        self.run.saving.check()
        line = {
            "kind": "epoch",
            "task": self.index + 1,
            "epoch": report.epoch + 1,
            "losses": report.terms,
            "learning_rate": report.learning_rate,
            "seconds": report.seconds,
        }
        self.epochs.append(line)
        self.run.write(line)
        self.run.progress.epoch(report)

    # -- checkpoints within the task -----------------------------------------------------------------------------

    def journal(self, resumable: bool) -> Journal:
        """Return where checkpoints within the task are saved, and how the task resumes from them."""
        run, plan = self.run, self.run.plan

        def stopped(now: Position | None) -> Interrupted:
            if now is None:
                return run.interrupted(
                    f"Stopped at the end of task {self.index + 1}, of which nothing had to be saved."
                )
            place = f"in task {self.index + 1}, {now.place.removeprefix('in ')}"
            return run.interrupted(f"Stopped {place}; that state is saved in {plan.folder.partial}.")

        return Journal(
            plan.folder.partial,
            run.stop,
            facts=self._facts,
            accepts=self._accepts,
            resumed=self._resumed,
            stopped=stopped,
            say=run.progress.say,
            task=self.index + 1,
            steps=run.checkpoint_steps,
            resumable=resumable,
        )

    def _facts(self) -> dict[str, Any]:
        run, plan = self.run, self.run.plan
        run.saving.wait()  # its last step removes the checkpoint that is saved next
        return {
            "task": self.index,
            "identity": plan.identity,
            "data": plan.data,
            "continues": plan.folder.model_digest(),
            "made_with": plan.made_with,
            "ways": self.made_with,
            "own_method": plan.own_method,
            "epochs": self.epochs,
            "seconds": run.clock.report(),
            "commits": run.state.commits,
        }

    def _accepts(self, facts: Mapping[str, Any]) -> bool:
        """Return whether a saved checkpoint is of this task of this run, with this device and numerics."""
        plan, say = self.run.plan, self.run.progress.say
        ours = facts["identity"] == plan.identity and facts["data"] == plan.data
        if ours and facts["task"] < self.index:
            return False  # that task was finished, but the process was killed before it could remove the checkpoint
        again = f"task {self.index + 1} starts over."
        if not ours or facts["task"] != self.index or facts["continues"] != plan.folder.model_digest():
            say(f"The checkpoint in {plan.folder.partial} is of {self._origin(facts)}; {again}")
            return False
        if changed := changed_computing(*_without_ranks(facts["made_with"], plan.made_with)):
            say(f"Task {self.index + 1} was started with {changed}; {again}")
            return False
        if facts["own_method"] != plan.own_method:
            say(f"Task {self.index + 1} was started with another version of {plan.settings.method}; {again}")
            return False
        return True

    def _origin(self, facts: Mapping[str, Any]) -> str:
        """Name what a checkpoint that is not of this run belongs to."""
        plan = self.run.plan
        if listed := state.named_differences(facts["identity"], plan.identity):
            return f"another run ({listed})"
        if facts["data"] != plan.data:
            return "a run on other images"
        return f"task {facts['task'] + 1} of a run that had learned other tasks before"

    def _resumed(self, facts: Mapping[str, Any]) -> None:
        # The lines of these epochs were removed with everything after the last finished task.
        self.epochs[:] = facts["epochs"]
        for line in self.epochs:
            self.run.write(line)
        self.run.clock.load(facts["seconds"])
        self.run.state.had_a_part(facts["commits"])
        # Another number of processes may have begun the task.
        earlier = [dict(way) for way in facts.get("ways", []) if way != self.run.plan.provenance]
        self.made_with[:0] = earlier

    # -- the first task, which other runs may have trained --------------------------------------------------------

    def share(self, train: Callable[[], State]) -> Mapping[str, Tensor]:
        """Return the network of the first task: trained by another run, or by `train`."""
        run, plan = self.run, self.run.plan
        description = plan.scratch_description(self.index)
        key = shared_tasks.digest(description)
        if self.index == 0:
            run.state.first_task = key
        asked = time.perf_counter()
        with self._locked(plan.store.lock(key)):
            # A task that another process has trained in the meantime counts as this run's own below.
            run.clock.waited(time.perf_counter() - asked)
            self.queue.close()
            record = shared_tasks.from_first(plan.store.load(key, description) if ranks.first() else None)
            if record is None:
                start = run.clock.report()["train"]
                tensors = train()
                seconds = run.clock.report()["train"] - start
                if ranks.first() and len(self.made_with) == 1:  # else it is not what the key says
                    plan.store.save(key, SharedTask(tensors, self.epochs, seconds, run.state.commits), description)
                return tensors
        run.progress.say(f"task {self.index + 1}: trained before, taken from {plan.store.place(key)}")
        for line in record.epochs:
            run.write(line | {"task": self.index + 1})
        self.watch().begin(len(record.epochs), len(record.epochs))
        run.progress.trained_before([float(line["seconds"]) for line in record.epochs])
        run.clock.credit(record.seconds)
        run.state.had_a_part(record.commits)
        return record.tensors

    @contextmanager
    def _locked(self, lock: Path) -> Iterator[None]:
        """Hold the lock of a first task; of the processes of one run the first does, and the others hear from it."""
        if ranks.first():
            with locked(lock, self._wait):
                ranks.from_first(_GO)
                yield
            return
        while ranks.from_first(None) != _GO:
            self.run.stop_if_asked()
        yield

    def _wait(self, owner: str) -> None:
        if not self.waiting:
            self.waiting = True
            self.run.progress.say(f"waiting for the first task, which another process ({owner}) is training")
            self.queue.enter_context(doing("waiting for the first task, which another process is training"))
        ranks.from_first("wait")
        self.run.stop_if_asked()


def _without_ranks(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two ways of computing without the number of processes, which may change at any step.

    Where it has, the number of threads may too: bits differ anyway.
    """
    ignored = {"ranks"} if before.get("ranks") == now.get("ranks") else {"ranks", "threads"}
    kept = [{name: value for name, value in way.items() if name not in ignored} for way in (before, now)]
    return kept[0], kept[1]
