"""Lines of metrics.jsonl as numbers to log."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Record:
    """The numbers of one epoch or task. `number` is the place of its line in metrics.jsonl, from 1."""

    number: int
    kind: str
    epoch: int  # epochs so far, over all tasks
    task: int  # from 1
    values: dict[str, float]
    time: float

    @property
    def step(self) -> int:
        """Where it lies on its axis: epochs are counted over all tasks, ends of tasks are the numbers of the tasks."""
        return self.epoch if self.kind == "epoch" else self.task


@dataclass
class Records:
    """Turns lines into records, one after the other."""

    number: int = 0
    epochs: int = 0
    _best: dict[int, float] = field(default_factory=dict)
    _steps: list[float] = field(default_factory=list)

    def add(self, line: Mapping[str, Any]) -> Record | None:
        """Return the record of the next line; None for a line of a kind that is not known here."""
        kind = line.get("kind")
        if kind not in ("epoch", "task"):
            return None
        self.number += 1
        if kind == "epoch":
            self.epochs += 1
            values = _epoch_values(line)
        else:
            values = self._task_values(line)
        finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        return Record(self.number, kind, self.epochs, int(line["task"]), finite, time.time())

    def _task_values(self, line: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {"A_step": line.get("A_step")}
        if values["A_step"] is not None:
            self._steps.append(values["A_step"])
            values["A_inc"] = sum(self._steps) / len(self._steps)
        lost = []
        for number, accuracy in enumerate(line.get("accuracy") or (), start=1):
            values[f"accuracy/task_{number:02}"] = accuracy
            if accuracy is None:
                continue
            if number in self._best:
                lost.append(self._best[number] - accuracy)
                values[f"forgetting/task_{number:02}"] = lost[-1]
            self._best[number] = max(accuracy, self._best.get(number, -math.inf))
        if lost:
            values["forgetting/mean"] = sum(lost) / len(lost)
        for number, accuracy in enumerate(line.get("task_aware") or (), start=1):
            values[f"task_aware/task_{number:02}"] = accuracy
        for name, each in (line.get("classifiers") or {}).items():
            values[f"classifier/{name}"] = each
        for name, seconds in (line.get("seconds") or {}).items():
            values[f"seconds/{name}"] = seconds
        return values


def _epoch_values(line: Mapping[str, Any]) -> dict[str, Any]:
    losses = line.get("losses") or {}
    terms = {f"loss/{name}": value for name, value in losses.items()}
    known = [value for value in losses.values() if value is not None]
    return {
        **terms,
        "loss/total": sum(known) if known else None,
        "learning_rate": line.get("learning_rate"),
        "seconds/epoch": line.get("seconds"),
    }
