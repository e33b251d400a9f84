"""The one training loop: epochs, blocks, steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from efcil import ranks
from efcil.activity import Work, between_pieces, doing
from efcil.data.store import TaskImages
from efcil.engine import contrast, mixed, rotated
from efcil.engine.average import WeightAverage
from efcil.engine.capture import step_runner
from efcil.engine.execution import Execution
from efcil.engine.feed import Feed
from efcil.engine.optimiser import FlatOptimiser, Optimiser, TorchOptimiser, rate_factor
from efcil.errors import TrainingError
from efcil.methods.base import Batch, Method, ParameterGroup, Task, Terms
from efcil.network import split
from efcil.settings import Recipe

__all__ = ["EpochReport", "Execution", "Keeper", "Position", "Trainer"]

STEPS_AHEAD = 16
MOST_TERMS = 8
#: What progress lines call the loop, whose work is counted in steps.
TRAINING = "training"


@dataclass
class Position:
    """The position in a task's training, and the sums of the loss terms in the current epoch.

    `epoch` epochs are complete, and `step` steps of the next one; none of them once all are complete.
    """

    epoch: int = 0
    step: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Where this is, in words."""
        if self.step:
            return f"in epoch {self.epoch + 1}, after step {self.step}"
        return f"after epoch {self.epoch}" if self.epoch else "before the first step"


@dataclass(frozen=True)
class EpochReport:
    """The report on a finished epoch."""

    epoch: int
    epochs: int
    terms: dict[str, float]
    learning_rate: float
    seconds: float


class Keeper(Protocol):
    """Decides when a checkpoint is due within a task, and writes it."""

    def due(self) -> bool:
        """Return whether a checkpoint should be written now; called after every step."""
        ...

    def asked(self) -> bool:
        """Return whether a stop was requested: `save` raises then; called while steps are prepared."""
        ...

    def save(self, trainer: Trainer, position: Position) -> None:
        """Write the checkpoint. May raise to stop the run."""
        ...

    def hold(self, trainer: Trainer, position: Position) -> None:
        """Take the state after the last step, which changes when the task ends, to be saved if that is interrupted."""
        ...


class Trainer:
    """Trains one task: `learner.loss` on the task's images, by its recipe, from any position."""

    def __init__(self, learner: Method, data: TaskImages, task: Task, recipe: Recipe, execution: Execution) -> None:
        self.learner = learner
        self.data = data
        self.task = task
        self.recipe = recipe
        self.execution = execution
        learner.training_mode(recipe)
        self.feed = Feed(learner, data, task, recipe.batch_size, recipe.label_smoothing)
        groups = _checked_groups(learner, recipe)
        _train_own_layers(learner, groups)
        self.optimiser: Optimiser
        self.trains = bool(groups) and recipe.epochs > 0
        self.rotated = rotated.attach(learner, task, recipe) if self.trains else None
        self.mixed = mixed.attach(learner, task, recipe) if self.trains else None
        self.contrast = contrast.attach(learner, task, recipe) if self.trains else None
        for added in (self.rotated, self.mixed, self.contrast):
            if added is not None:
                groups.append({"params": list(added.parameters()), "learning_rate": recipe.learning_rate})
        if not self.trains:
            self.optimiser = Optimiser()  # never used: this task is learned only in end_task
        elif learner.network.fast is not None:
            fast = learner.network.fast
            self.optimiser = FlatOptimiser(groups, recipe, fast, self.feed.block_steps, recipe.gradient_clip)
        else:
            self.optimiser = TorchOptimiser(groups, recipe, execution.captured, recipe.gradient_clip)
        averages = self.trains and recipe.ema is not None
        self.average = WeightAverage(learner, recipe.ema or 0.0) if averages else None
        self.names: list[str] = []
        self.losses = torch.zeros(self.feed.block_steps, MOST_TERMS, device=execution.device)
        self.steps = step_runner(execution, recipe.batch_size)

    def run(
        self,
        position: Position | None = None,
        on_epoch: Callable[[EpochReport], None] | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        """Train from `position` to the end of the task; `on_epoch` gets a report of every finished epoch."""
        if not self.trains:
            return
        position = position or Position()
        each = self.feed.steps_per_epoch
        done = position.epoch * each + position.step
        # Only between two steps.
        with between_pieces(None), doing(TRAINING, self.recipe.epochs * each, done) as work:
            self._run(position, on_epoch, keeper, work)

    def _run(
        self, position: Position, on_epoch: Callable[[EpochReport], None] | None, keeper: Keeper | None, work: Work
    ) -> None:
        reader = _LossReader(self, on_epoch)
        for epoch in range(position.epoch, self.recipe.epochs):
            factor = rate_factor(self.recipe, epoch)
            done = position.step if epoch == position.epoch else 0
            reader.begin_epoch(epoch, position.sums if done else {})
            for start in self.feed.blocks():
                if start + self.feed.block_steps <= done:
                    continue
                with between_pieces(self._stopping(Position(epoch, max(done, start)), reader, keeper)):
                    steps = self.feed.load(epoch, start)  # takes long where a CPU asks frozen networks
                self.optimiser.begin_block(epoch * self.feed.steps_per_epoch + start, steps, factor)
                begin = max(done - start, 0)
                self.optimiser.skip(begin)
                self.steps.start_at(begin)
                following = self.feed.next_block(epoch, start)
                unread = following[0] < self.recipe.epochs
                # The messages of several processes stay on one stream: all of them must send in one order.
                ahead = self.execution.captured and unread and not ranks.several()
                for index in range(begin, steps):
                    self.step(index, self.feed.batch_length(start + index))
                    work.done += 1
                    if unread:  # after a first step, so that the device has work meanwhile
                        self.feed.fetch(*following)
                        unread = False
                    if ahead and index >= min(begin + STEPS_AHEAD, steps // 4, steps - 1):
                        # The device works on these steps while the host prepares the next block.
                        self.feed.stage(*following)
                        ahead = False
                    if keeper is not None and keeper.due():
                        reader.collect(start, begin, index + 1)
                        begin = index + 1
                        now = Position(epoch, start + begin, reader.partial_sums())
                        self._refuse_broken(now)
                        keeper.save(self, now)
                reader.collect(start, begin, steps)
            reader.end_epoch(self.recipe.learning_rate * factor)
        reader.finish()
        if keeper is not None:
            keeper.hold(self, Position(self.recipe.epochs))
        if self.average is not None:
            self.average.replace()
        self._refuse_broken(Position(self.recipe.epochs - 1, self.feed.steps_per_epoch))
        for part in (rotated, mixed, contrast):  # they exist while the task trains
            self.learner._modules.pop(part.NAME, None)

    def _stopping(self, now: Position, reader: _LossReader, keeper: Keeper | None) -> Callable[[], None] | None:
        """Return what obeys a request to stop while the steps from `now` on are prepared.

        A GPU prepares them in a moment, and on a second stream, which must not read what is trained.
        """
        if keeper is None or self.execution.device.type == "cuda":
            return None

        def stop() -> None:
            if keeper.asked():
                self._refuse_broken(now)
                keeper.save(self, replace(now, sums=reader.partial_sums()))

        return stop

    @torch.no_grad()
    def _refuse_broken(self, now: Position) -> None:
        """Raise if a weight is infinite or NaN after the last step, whose loss was still finite."""
        largest = [parameter.abs().amax() for parameter in self.learner.parameters() if parameter.numel()]
        if not bool(torch.isfinite(torch.stack(largest)).all()):
            raise self.not_finite("A weight", now.epoch, now.step)

    def not_finite(self, what: str, epoch: int, step: int, detail: str = "") -> TrainingError:
        """Return the error for numbers that are not finite after `step` (from 1) of `epoch` (from 0)."""
        stage = "first_task" if self.task.index == 0 else "later"
        return TrainingError(
            f"{what} is not finite in task {self.task.index + 1}, epoch {epoch + 1}, step {step}{detail}. Training has "
            f"stopped; the last checkpoint is intact. A lower learning rate (--set {stage}.learning_rate=...) "
            "usually helps."
        )

    # -- one step ----------------------------------------------------------------------------------------------

    def step(self, index: int, length: int) -> None:
        """Run step `index` of the block, of `length` images."""
        self.steps.run(self._compute, index, length)

    def _compute(self, place: int | Tensor, length: int) -> None:
        """Forward, backward, update, for the batch at `place` of the block."""
        self.optimiser.begin_step(None if isinstance(place, int) else place)
        with split.averaged():
            batch = self.feed.batch(place, length)
            terms = _checked_terms(self.learner, batch)
            if self.contrast is not None:
                self.contrast.look(self.learner, batch)
            if self.rotated is not None:
                terms["rotation"] = self.recipe.rotation_weight * self.rotated.loss(self.learner, batch)
            if self.mixed is not None:
                terms["mixing"] = self.recipe.mixing_weight * self.mixed.loss(self.learner, batch)
            if self.contrast is not None:
                terms["contrast"] = self.recipe.contrast * self.contrast.loss(batch)
        self.names = list(terms)
        if len(terms) > MOST_TERMS:
            raise TrainingError(f"A loss has {MOST_TERMS} terms at most, not {len(terms)}: {', '.join(terms)}.")
        values = torch.stack(list(terms.values()))
        self.optimiser.backward(values.sum())
        self.optimiser.step()
        if self.average is not None:
            self.average.update()
        with torch.no_grad():
            values = values.detach().float()
            if isinstance(place, int):
                self.losses[place, : len(values)] = values
            else:
                self.losses[:, : len(values)].index_copy_(0, place, values[None])
                place.add_(1)


def _checked_groups(learner: Method, recipe: Recipe) -> list[ParameterGroup]:
    """Return the method's groups of parameters, each in a list. What the optimiser would not read is refused."""
    groups = []
    for group in learner.parameter_groups(recipe):
        if not isinstance(group, Mapping) or set(group) != {"params", "learning_rate"}:
            found = f"keys {', '.join(map(str, group))}" if isinstance(group, Mapping) else f"a {_kind(group)}"
            raise TrainingError(
                f"`parameter_groups` of {learner.name!r} returned a group that is not "
                f'{{"params": [...], "learning_rate": ...}}: {found}. All else, such as momentum and weight decay, is '
                "the recipe's."
            )
        groups.append({**group, "params": list(group["params"])})
    return groups


def _train_own_layers(learner: Method, groups: Sequence[ParameterGroup]) -> None:
    """Set what the method trains besides its network to training mode, as layers are that it has just made."""
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    for layers in learner.children():
        if layers is not learner.network and any(id(parameter) in trained for parameter in layers.parameters()):
            layers.train()


def _checked_terms(learner: Method, batch: Batch) -> Terms:
    """Return the terms of the method's loss; refuse what is not one number for each name."""
    terms = learner.loss(batch)
    if not isinstance(terms, dict) or not terms:
        found = "nothing" if terms is None or isinstance(terms, dict) else f"a {_kind(terms)}"
        raise TrainingError(
            f"`loss` of {learner.name!r} returned {found}. Return terms by name, such as "
            '{"loss": value}: progress and logs show each of them.'
        )
    for name, value in terms.items():
        if not isinstance(value, Tensor) or value.dim():
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {_kind(value)}"
            raise TrainingError(
                f"The term {name!r} that `loss` of {learner.name!r} returned is {found}. Each term is a tensor with a "
                "single number, such as the mean over the batch."
            )
    return terms


def _kind(value: object) -> str:
    return type(value).__name__.lower()


class _LossReader:
    """Copies loss terms to the host one epoch late, so that reading them never makes the device wait."""

    def __init__(self, trainer: Trainer, on_epoch: Callable[[EpochReport], None] | None) -> None:
        self.trainer = trainer
        self.on_epoch = on_epoch
        self.pending: list[tuple[int, int, Tensor, torch.cuda.Event | None]] = []
        self.reports: list[EpochReport] = []
        self.epoch = 0
        self.sums: dict[int, dict[str, float]] = {}
        self.last_time = time.perf_counter()

    def begin_epoch(self, epoch: int, sums: dict[str, float]) -> None:
        self.epoch = epoch
        self.sums[epoch] = dict(sums)

    def collect(self, start: int, begin: int, end: int) -> None:
        """Start copying the losses of steps begin..end of the block that starts at `start`."""
        part = self.trainer.losses[begin:end]
        if part.is_cuda:
            host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
            host.copy_(part, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # waiting for it leaves the CPU to other runs
            event.record()
        else:
            host, event = part.clone(), None
        self.pending.append((self.epoch, start + begin, host, event))

    def partial_sums(self) -> dict[str, float]:
        """Read everything collected so far and return the sums of the current epoch."""
        self._read(self.epoch)
        return dict(self.sums[self.epoch])

    def end_epoch(self, learning_rate: float) -> None:
        self.reports.append(EpochReport(self.epoch, self.trainer.recipe.epochs, {}, learning_rate, 0.0))
        lag = 1 if self.trainer.execution.captured else 0
        self._read(self.epoch - lag)

    def finish(self) -> None:
        self._read(self.trainer.recipe.epochs)

    def _read(self, until: int) -> None:
        while self.pending and self.pending[0][0] <= until:
            epoch, first, host, event = self.pending.pop(0)
            if event is not None:
                event.synchronize()
            self._add(epoch, first, host.tolist())
        while (
            self.reports
            and self.reports[0].epoch <= until
            and not any(p[0] <= self.reports[0].epoch for p in self.pending)
        ):
            report = self.reports.pop(0)
            sums = self.sums.pop(report.epoch)
            steps = self.trainer.feed.steps_per_epoch
            now = time.perf_counter()
            if self.on_epoch is not None:
                terms = {name: value / steps for name, value in sums.items()}
                self.on_epoch(replace(report, terms=terms, seconds=now - self.last_time))
            self.last_time = now

    def _add(self, epoch: int, first: int, rows: list[list[float]]) -> None:
        names, sums = self.trainer.names, self.sums[epoch]
        for offset, row in enumerate(rows):
            if not all(math.isfinite(value) for value in row[: len(names)]):
                shown = ", ".join(f"{name} {value:g}" for name, value in zip(names, row, strict=False))
                raise self.trainer.not_finite("The loss", epoch, first + offset + 1, f" ({shown})")
            for name, value in zip(names, row, strict=False):
                sums[name] = sums.get(name, 0.0) + value
