"""Weights & Biases: online where the user is logged in, otherwise offline, for `wandb sync` later. Never asks."""

from __future__ import annotations

import importlib
import netrc
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from efcil.engine.trackers import Opened, Record, TrackedRun

PROJECT = "efcil"
#: How long a server that does not answer is tried; the thread and, at its end, the process wait for it.
CONNECT_SECONDS = 20.0
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class WeightsAndBiases:
    """Logs one run; its axis is the number of the line, with charts by epoch and by task."""

    def __init__(self) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._run: Any = None

    def open(self, run: TrackedRun, earlier: Opened | None) -> Opened:
        """Begin the run, or continue it under the same id."""
        number = earlier.id if earlier is not None else secrets.token_hex(8)
        mode = os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")
        folder = os.environ.get("WANDB_DIR") or str(run.output)
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=run.name,
            group=os.environ.get("WANDB_RUN_GROUP") or run.group,
            id=number,
            resume="allow",
            config=dict(run.parameters),
            mode=mode,
            dir=folder,
            # What a run prints is in its log, and nothing is to be printed in between.
            settings=self._wandb.Settings(console="off", silent=True, init_timeout=CONNECT_SECONDS),
        )
        for pattern, axis in (("*", "epoch"), *((f"{name}*", "task") for name in _BY_TASK)):
            self._run.define_metric(pattern, step_metric=axis)
        if mode == "offline":
            where = f"offline; to upload: wandb sync {Path(folder) / 'wandb'}/offline-run-*-{number}*"
            return Opened(number, 0 if earlier is None else earlier.records, where)
        return Opened(number, max(int(self._run.step) - 1, 0), str(self._run.url or ""))

    def scalars(self, records: Sequence[Record]) -> None:
        """Log the values, each line as one step."""
        for record in records:
            self._run.log({**record.values, "epoch": record.epoch, "task": record.task}, step=record.number)

    def close(self, state: str) -> None:
        """End the run; an interrupted or failed one has an exit code and can be continued."""
        self._run.finish(exit_code=0 if state == "finished" else 1)


#: What is measured at the end of a task.
_BY_TASK = ("A_", "accuracy/", "task_aware/", "forgetting/", "classifier/", "seconds/train", "seconds/statistics",
            "seconds/evaluation")  # fmt: skip


def logged_in() -> bool:
    """Return whether there is a key, without a question and without the network."""
    if any(os.environ.get(name) for name in _KEYS):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    named = os.environ.get("NETRC")
    for place in [Path(named)] if named else [Path("~/.netrc"), Path("~/_netrc")]:
        with suppress(OSError, netrc.NetrcParseError, RuntimeError):
            if netrc.netrc(str(place.expanduser())).authenticators(host):
                return True
    return False


def make() -> WeightsAndBiases:
    """Return the tracker."""
    return WeightsAndBiases()
