"""Teachings: one at a time, each in a process of its own, followed by what it reports."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np

from efcil.model.card import now
from efcil.serve import note, teacher
from efcil.serve.keeper import Keeper
from efcil.serve.metrics import Metrics
from efcil.serve.options import ServeOptions
from efcil.serve.refusal import Refused

#: How many ended teachings are remembered, and how many lines of each.
REMEMBERED, MOST_LINES = 50, 100
#: Seconds that a teaching has to save its state when the server ends.
STOP_SECONDS = 60.0
RUNNING = ("starting", "learning", "stopping", "loading")
#: What is started for every teaching.
COMMAND = (sys.executable, "-m", teacher.__name__)


@dataclass
class Job:
    """A teaching and how far it is. `revision` changes with every change."""

    id: str
    classes: dict[str, int]
    kind: str  # new classes (task), more of known ones, or both
    started: str
    state: str = "starting"
    epoch: int = 0
    epochs: int | None = None
    seconds_left: float | None = None
    messages: list[str] = field(default_factory=list)
    error: str | None = None
    ended: str | None = None
    version: str | None = None
    revision: int = 0
    #: The state of the model when it began.
    before: str | None = None

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.state in RUNNING

    def change(self, **values: Any) -> None:
        """Set fields."""
        for name, value in values.items():
            setattr(self, name, value)
        self.revision += 1

    def to_json(self) -> dict[str, Any]:
        """Return what the interface says about it."""
        share = None
        if self.state == "done":
            share = 1.0
        elif self.epochs and self.epoch:
            # A method that trains nothing has no epochs to count, and the end of a task, when statistics are gathered,
            # is none of them: the bar leaves some room for it.
            share = 0.95 * min(1.0, self.epoch / self.epochs)
        return {
            "id": self.id,
            "state": self.state,
            "kind": self.kind,
            "classes": [{"name": name, "images": count} for name, count in self.classes.items()],
            "progress": share,
            "epoch": self.epoch,
            "epochs": self.epochs,
            "seconds_left": self.seconds_left,
            "messages": list(self.messages),
            "error": self.error,
            "started": self.started,
            "ended": self.ended,
            "version": self.version,
        }


class Jobs:
    """All teachings of a server."""

    def __init__(self, options: ServeOptions, keeper: Keeper, metrics: Metrics) -> None:
        self._options = options
        self._keeper = keeper
        self._metrics = metrics
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def running(self) -> Job | None:
        """The teaching that has not ended, if any."""
        return next((job for job in reversed(self._jobs.values()) if job.running), None)

    @property
    def last(self) -> Job | None:
        """The teaching that began last, if any."""
        return next(reversed(self._jobs.values()), None)

    def get(self, number: str) -> Job:
        """Return a teaching."""
        job = self._jobs.get(number)
        if job is None:
            raise Refused(404, "There is no such teaching. The server may have been started again since.")
        return job

    def start(
        self,
        labels: Sequence[str],
        pictures: list[np.ndarray],
        *,
        kind: str,
        discard: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> Job:
        """Begin a teaching; a second one at the same time is refused."""
        classes = {name: list(labels).count(name) for name in dict.fromkeys(labels)}
        current = self._keeper.current
        more = kind != "task"
        job = Job(secrets.token_hex(8), classes, kind, now(), before=None if current is None else current.version)
        order = {
            "folder": str(self._options.folder),
            "labels": list(labels),
            "more": more,
            "discard": discard,
            "device": self._options.device,
            "checkpoint_steps": self._options.checkpoint_steps,
            "settings": dict(settings or {}),
        }
        with self._lock:
            if self._closed:
                raise Refused(503, "The server is stopping.")
            self.refuse_second()
            self._jobs[job.id] = job
            while len(self._jobs) > REMEMBERED:
                self._jobs.popitem(last=False)
        note.write(self._options.folder, note.Begun(classes, more, job.started, job.before))
        self._thread = threading.Thread(target=self._run, args=(job, order, pictures), name="efcil-teaching")
        self._thread.start()
        return job

    def refuse_second(self) -> None:
        """Raise while a teaching runs."""
        if self.running is not None:
            names = ", ".join(self.running.classes)
            raise Refused(409, f"The model is learning {names}. Wait until that has ended, or stop it.")

    def stop(self, job: Job) -> None:
        """Ask a teaching to save its state and stop; asked a second time, it stops at once."""
        if job.running and job.state != "loading":
            job.change(state="stopping")
            process = self._process
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Stop what runs, and wait until its state is saved."""
        with self._lock:
            self._closed = True
        if (job := self.running) is not None:
            self.stop(job)
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
            if self._thread.is_alive() and self._process is not None:
                self._process.kill()  # the folder keeps the model it has
                self._thread.join()

    # -- in a thread of its own --------------------------------------------------------------------------------------

    def _run(self, job: Job, order: dict[str, Any], pictures: list[np.ndarray]) -> None:
        process = None
        try:
            # A session of its own: Ctrl-C in the terminal reaches the server, which stops the teaching in order.
            process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
            self._process = process
            self._follow(job, process, order, pictures)
        except Exception as error:  # the job must end in any case
            self._end(job, "failed", f"The teaching could not be started ({type(error).__name__}: {error}).")
        finally:
            if self._process is process:  # once this job has ended, another one may have begun
                self._process = None

    def _follow(
        self, job: Job, process: subprocess.Popen[bytes], order: dict[str, Any], pictures: list[np.ndarray]
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        if job.state == "stopping":
            process.send_signal(signal.SIGTERM)
        with suppress(BrokenPipeError):  # it may have ended already; what it reported says why
            teacher.send(process.stdin, order, pictures)
        pictures.clear()
        outcome = _reported(job, process.stdout)
        process.wait()
        with suppress(BrokenPipeError):
            process.stdin.close()
        self._conclude(job, outcome, process.returncode)

    def _conclude(self, job: Job, outcome: str | None, code: int) -> None:
        """Let the new model take over, and say how the teaching ended."""
        stopping = job.state == "stopping"
        if outcome == "learned":
            job.change(state="loading")
        self._keeper.refresh()
        after = self._keeper.current
        if outcome == "learned":
            if self._keeper.problem is not None:
                self._end(job, "failed", self._keeper.problem)
                return
            job.change(version=None if after is None else after.version, seconds_left=0.0)
            note.remove(self._options.folder)
            self._end(job, "done")
        elif outcome == "failed":
            note.remove(self._options.folder)
            self._end(job, "failed", job.error)
        elif after is not None and after.version != job.before:
            note.remove(self._options.folder)
            self._end(job, "done")  # stopped or killed between the last write and the report of it
        elif stopping or outcome == "stopped":
            self._end(job, "stopped")
        else:
            self._end(
                job, "failed", f"The teaching ended unexpectedly (exit code {code}). The model is as it was before."
            )

    def _end(self, job: Job, state: str, error: str | None = None) -> None:
        self._metrics.teachings.add(outcome=state)  # first: who sees that it has ended may ask for the metrics
        job.change(state=state, error=error, ended=now())


def _reported(job: Job, events: IO[bytes]) -> str | None:
    """Follow the events of a teaching to their end; return how it ended, nothing where it did not say so."""
    outcome = None
    for line in events:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        state = event.get("state")
        if state in ("learned", "stopped", "failed"):
            outcome = state
        elif state is not None and job.state != "stopping":
            job.change(state=state)
        if "say" in event:
            job.change(messages=[*job.messages, *event["say"].split("\n")][-MOST_LINES:])
        known = {name: event[name] for name in ("epoch", "epochs", "seconds_left", "error") if name in event}
        job.change(**known)
    return outcome
