"""MLflow: the server or store that MLFLOW_TRACKING_URI names, otherwise files below the output folder."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from efcil.engine.trackers import Opened, Record, TrackedRun

FOLDER = "mlruns"
#: What MLflow takes in one call, and of one value.
MOST_METRICS, MOST_PARAMETERS, LONGEST = 1000, 100, 500
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflow:
    """Logs one run through the client, which unlike the functions of the package keeps no state of the process."""

    def __init__(self) -> None:
        # MLflow refuses its file store unless this is set; it is used only where no other store is named.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        # A server that does not answer is left out after a quarter of a minute, not after four.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        self._mlflow: Any = importlib.import_module("mlflow")
        self._client: Any = None
        self._id = ""

    def open(self, run: TrackedRun, earlier: Opened | None) -> Opened:
        """Create the run in the experiment of its grid, or continue it."""
        named = os.environ.get("MLFLOW_TRACKING_URI")
        store = named or (run.output / FOLDER).resolve().as_uri()
        self._client = self._mlflow.MlflowClient(tracking_uri=store)
        where = named or f"mlflow ui --backend-store-uri {run.output / FOLDER}"
        if earlier is not None:
            with suppress(self._mlflow.exceptions.MlflowException):  # it was deleted, or is in another store
                found = self._client.get_run(earlier.id)
                self._client.update_run(earlier.id, status="RUNNING")
                self._id = earlier.id
                known = found.data.metrics
                return Opened(earlier.id, int(known.get("epoch", 0)) + int(known.get("tasks", 0)), where)
        created = self._client.create_run(self._experiment(run), run_name=run.name)
        self._id = created.info.run_id
        parameters = [self._mlflow.entities.Param(name, str(value)[:LONGEST]) for name, value in run.parameters.items()]
        for start in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[start : start + MOST_PARAMETERS])
        return Opened(self._id, 0, where)

    def _experiment(self, run: TrackedRun) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.group
        if (found := self._client.get_experiment_by_name(name)) is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except self._mlflow.exceptions.MlflowException:
            # Another process of the same grid was faster.
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)

    def scalars(self, records: Sequence[Record]) -> None:
        """Log the values: of epochs by epoch, of tasks by task."""
        metrics = []
        for record in records:
            position = {"epoch": record.epoch, "tasks": record.number - record.epoch}
            for name, value in {**record.values, **position}.items():
                step = record.number if name in position else record.step
                metrics.append(self._mlflow.entities.Metric(name, float(value), int(record.time * 1000), step))
        for start in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + MOST_METRICS])

    def close(self, state: str) -> None:
        """End the run."""
        self._client.set_terminated(self._id, _STATUS[state])


def make() -> MLflow:
    """Return the tracker."""
    return MLflow()
