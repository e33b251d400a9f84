"""Logging what a visit trains to TensorBoard, Weights & Biases or MLflow.

The files go into a folder beside the model, which itself holds nothing but the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from efcil.engine.trackers import TrackedRun, Tracking
from efcil.engine.trainer import EpochReport
from efcil.model.card import Card

BESIDE = "-log"


class VisitLog:
    """A visit as a logged run: its epochs and, at the end, the measured accuracy."""

    def __init__(self, names: Sequence[str], folder: Path, say: Callable[[str], None]) -> None:
        self._names = tuple(names)
        self._model = Path(folder.absolute())
        self._say = say
        self._tracking: Tracking | None = None
        self._task = 0

    def begin(self, card: Card, done: int) -> None:
        """Begin, when the number of epochs that an interrupted visit has done is known."""
        if not self._names:
            return
        self._task = len(card.task_sizes) + 1
        output = self._model.with_name(self._model.name + BESIDE)
        folder = output / f"visit{self._task}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._say(f"Nothing is logged: {folder} cannot be created ({error.strerror or error}).")
            return
        name = f"{self._model.name}/visit{self._task}"
        run = TrackedRun(name, self._model.name, folder, output, _parameters(card), before=done)
        self._tracking = Tracking(self._names, run, self._say)
        self._tracking.begin()

    def epoch(self, report: EpochReport) -> None:
        """Log an epoch."""
        if self._tracking is not None:
            self._tracking.line(
                {
                    "kind": "epoch",
                    "task": self._task,
                    "epoch": report.epoch + 1,
                    "losses": report.terms,
                    "learning_rate": report.learning_rate,
                    "seconds": report.seconds,
                }
            )

    def end(self, card: Card | None) -> None:
        """Log the accuracy that the card of the model has, None if the visit did not end; and close."""
        if self._tracking is None:
            return
        # More images of known classes may have come with the task: they are a visit of their own.
        task = None if card is None else next(each for each in reversed(card.visits) if each.kind == "task")
        if task is not None and (measured := task.measured) is not None:
            accuracy = 100.0 * measured.right / measured.images
            earlier: list[float | None] = [None] * (self._task - 1)
            self._tracking.line({"kind": "task", "task": self._task, "accuracy": [*earlier, accuracy]})
        self._tracking.end("interrupted" if card is None else "finished")


def _parameters(card: Card) -> dict[str, Any]:
    settings = card.to_json()["settings"]
    overrides = settings.pop("overrides", {})
    return {**settings, **overrides, "network": card.resolved.network, "image_size": card.image_size}
