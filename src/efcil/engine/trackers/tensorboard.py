"""TensorBoard: an event file in the run folder, so that `tensorboard --logdir runs` shows runs by their folders."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from efcil.engine.trackers import Opened, Record, TrackedRun
from efcil.files import is_regular

EVENTS = "events.out.tfevents.*"


class TensorBoard:
    """Writes an event file. A resumed run writes it anew from all its lines, so that no step is there twice."""

    def __init__(self) -> None:
        self._board: Any = importlib.import_module("torch.utils.tensorboard")
        self._writer: Any = None

    def open(self, run: TrackedRun, earlier: Opened | None) -> Opened:
        """Replace the event file of an earlier attempt, or, where its lines are not given again, continue it."""
        for file in () if run.before else run.folder.glob(EVENTS):
            if is_regular(file):
                file.unlink(missing_ok=True)
        purged = run.before + 1 if run.before else None
        self._writer = self._board.SummaryWriter(log_dir=str(run.folder), flush_secs=10, purge_step=purged)
        rows = "\n".join(f"| {name} | {value} |" for name, value in run.parameters.items())
        self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", 0)
        self._add_parameters(run)
        return Opened(where=f"tensorboard --logdir {run.output}")

    def _add_parameters(self, run: TrackedRun) -> None:
        """Fill the page of hyper-parameters, within the same event file."""
        summary_of: Any = importlib.import_module("torch.utils.tensorboard.summary")
        plain = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in {"run": run.name, "group": run.group, **run.parameters}.items()
        }
        for summary in summary_of.hparams(plain, {"A_step": 0.0, "A_inc": 0.0}):
            self._writer.file_writer.add_summary(summary)

    def scalars(self, records: Sequence[Record]) -> None:
        """Add the values: of epochs by epoch, of tasks by task."""
        for record in records:
            for name, value in record.values.items():
                self._writer.add_scalar(name, value, record.step, walltime=record.time)
        self._writer.flush()

    def close(self, state: str) -> None:
        """Close the file."""
        self._writer.close()


def make() -> TensorBoard:
    """Return the tracker."""
    return TensorBoard()
