"""One training of a run: taken up where it was interrupted, saved every so often, told of after every epoch."""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING, Any

import efcil
from efcil.engine import checkpoint
from efcil.engine.checkpoint import CheckpointError, TaskKeeper
from efcil.engine.interrupt import Interrupted
from efcil.engine.trainer import EpochReport, Position, Trainer
from efcil.environment import command

if TYPE_CHECKING:
    from efcil.experiment.run import Run


def train(run: Run, index: int, trainer: Trainer, key: str | None) -> None:
    """Train task `index` to its end. `key` is that of the shared first task, None for later tasks."""
    position = _resume(run, index, trainer, key)
    run.under_way = True
    done = position.epoch if position is not None else 0
    run.progress.begin_task(index, trainer.recipe.epochs, done, run.later_epochs(index))

    def facts(now: Position) -> dict[str, Any]:
        run.saving.wait()  # it ends with the removal of what is saved next
        return {
            "task": index,
            "key": key,
            "execution": run.executed,
            "own_method": run.own_method,
            "efcil": efcil.__version__,
            "position": dataclasses.asdict(now),
            "epochs": run.history,
            "seconds": run.clock.report(),
            "commits": run.commits,
        }

    def stopped(now: Position) -> Interrupted:
        place = f"in task {index + 1}, epoch {now.epoch + 1}, after step {now.step}"
        return interrupted(run, f"Stopped {place}; that state is saved in {run.partial}.")

    def record(report: EpochReport) -> None:
        run.saving.check()
        line = {
            "kind": "epoch",
            "task": index + 1,
            "epoch": report.epoch + 1,
            "losses": report.terms,
            "learning_rate": report.learning_rate,
            "seconds": report.seconds,
        }
        run.history.append(line)
        run.folder.append_metrics(line)
        run.progress.epoch(report)

    keeper = TaskKeeper(run.partial, facts, run.stop, stopped, run.checkpoint_steps)
    trainer.run(position, record, keeper)


def _resume(run: Run, index: int, trainer: Trainer, key: str | None) -> Position | None:
    """Put the middle of a task back where there is one that belongs to this task and this way of computing."""
    if run.under_way or not checkpoint.exists(run.partial):
        return None  # what is there now is of a task that this process has finished
    try:
        saved = checkpoint.read(run.partial)
    except CheckpointError as error:
        run.progress.say(f"{error} Task {index + 1} begins anew.")
        return None
    facts = saved.facts
    if facts["task"] != index or facts["key"] != key:
        return None
    if facts["execution"] != run.executed or facts["efcil"] != efcil.__version__:
        run.progress.say(
            f"Task {index + 1} was under way with other hardware, precision, threads or efcil; it begins anew."
        )
        return None
    if facts.get("own_method", run.own_method) != run.own_method:
        run.progress.say(
            f"Task {index + 1} was under way with another version of {run.settings.method}; it begins anew."
        )
        return None
    checkpoint.restore_training(trainer, saved.tensors)
    position = Position(**facts["position"])
    # The lines of these epochs were removed with everything after the last finished task.
    run.history = list(facts["epochs"])
    for line in run.history:
        run.folder.append_metrics(line)
    run.clock.load(facts["seconds"])
    run.had_a_part(facts.get("commits", []))
    run.progress.say(f"going on in task {index + 1}, epoch {position.epoch + 1}, after step {position.step}")
    return position


def interrupted(run: Run, what: str) -> Interrupted:
    """Return what is to be raised: it says what was stopped, and the exact command to go on with."""
    again = command()
    if shlex.split(again)[0] != "efcil":  # called from Python: there is no such command
        config, output = str(run.folder.settings_file), str(run.output)
        again = shlex.join(["efcil", "run", "--config", config, "--output", output])
    return Interrupted(f"{what} To go on: {again}")
