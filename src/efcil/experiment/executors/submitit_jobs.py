"""Runs as Slurm jobs through submitit: saved and requeued when their time ends.

submitit's local executor, which needs no Slurm, serves tests.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from efcil.errors import SettingsError
from efcil.experiment.executors import remote
from efcil.experiment.executors.base import Job, Refused
from efcil.experiment.executors.cluster import ClusterHandle, Orders, stop_all

#: How many minutes a job may take, unless set otherwise. A run that needs longer is requeued and resumes.
MINUTES = 60
#: How often a job is requeued because its time ended.
REQUEUES = 1000
#: Options that are ours; all others are submitit's.
OWN = ("at_once", "retries")
_OF_GPUS = ("gpus_per_node", "gpus_per_task", "gres", "num_gpus")
_LOCAL_NAMES = {"time": "timeout_min"}
_LOCAL = ("time", "timeout_min", "gpus_per_node", "signal_delay_s", "stderr_to_stdout")


def read_option(text: str) -> Any:
    """Return an option of submitit as a number or a truth value where it is one."""
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


class SubmititExecutor:
    """Submits a Slurm job for each run; with `local`, a process of submitit's local executor."""

    def __init__(self, orders: Orders, options: Mapping[str, str], local: bool, say: Callable[[str], None]) -> None:
        try:
            import cloudpickle
            import submitit
        except ImportError:
            raise SettingsError(
                f"The engine {'submitit-local' if local else 'slurm'} needs the package submitit. Install it: "
                "pip install 'efcil[slurm]'."
            ) from None
        cloudpickle.register_pickle_by_value(remote)
        logging.getLogger("submitit").setLevel(logging.ERROR)  # it warns at every look if Slurm keeps no accounts
        self._orders = orders
        self._local = local
        self._options = {name: read_option(value) for name, value in options.items() if name not in OWN}
        self._retries = int(options.get("retries", orders.retries))
        self._handles: list[SubmititHandle] = []
        kind = submitit.LocalExecutor if local else submitit.SlurmExecutor
        try:
            self._executor = kind(folder=orders.scratch / "jobs", max_num_timeout=REQUEUES)
        except RuntimeError as error:
            raise SettingsError(
                f"Slurm was not found here ({error}). Start this command on a machine that has `sbatch` and `srun`."
            ) from None
        say("Runs are submitted through submitit" + (", as processes of this machine." if local else " to Slurm."))

    def submit(self, job: Job) -> SubmititHandle:
        """Submit a job."""
        self._choose(job)
        handle = SubmititHandle(job, self._orders.write(job), self._retries, self._executor)
        handle.submit()
        self._handles.append(handle)
        return handle

    def close(self) -> None:
        """Stop what still runs."""
        stop_all(self._handles)

    def _choose(self, job: Job) -> None:
        """Set the parameters of the next job."""
        if self._local:
            self._executor.update_parameters(**self._local_parameters())
            return
        device, chosen = job.settings.device, dict(self._options)
        if ":" in device:
            raise SettingsError(f"Slurm chooses the GPU of a run, so --device {device} cannot be used. Use cuda.")
        if device == "cpu":
            chosen.setdefault("cpus_per_task", self._orders.threads)
        elif not any(name in chosen for name in _OF_GPUS):
            chosen["gpus_per_node"] = 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # advice of submitit about combinations of options
                self._executor.update_parameters(**{"time": MINUTES, "job_name": "efcil", **chosen})
        except (ValueError, TypeError, NameError) as error:
            raise SettingsError(f"submitit refuses these engine options. {_one_line(error)}") from None

    def _local_parameters(self) -> dict[str, Any]:
        unknown = [name for name in self._options if name not in _LOCAL]
        if unknown:
            raise SettingsError(
                f"submitit's local executor has no option {unknown[0]!r}. Valid: {', '.join((*OWN, *_LOCAL))}."
            )
        named = {_LOCAL_NAMES.get(name, name): value for name, value in self._options.items()}
        return {"timeout_min": MINUTES, **named}


class SubmititHandle(ClusterHandle):
    """A job that submitit has submitted."""

    def __init__(self, job: Job, run: remote.RemoteRun, retries: int, executor: Any) -> None:
        super().__init__(job, run, retries)
        self._executor = executor
        self._submitted: Any = None

    def submit(self) -> None:
        """Submit the job."""
        try:
            self._submitted = self._executor.submit(self.run)
        except Exception as error:  # whatever sbatch and submitit raise
            raise Refused(f"Slurm refused the job of {self.job.folder}. {_one_line(error)}") from None

    def returned(self) -> str | None:
        """Return "" once the job has ended: what it returned is read from a file, and nothing is unpickled."""
        return "" if self._submitted.done() else None

    def withdraw(self) -> None:
        """Cancel the job."""
        self._submitted.cancel(check=False)

    def lost(self) -> str:
        """Return where a job that left nothing may have written why."""
        return (
            f"The job {self._submitted.job_id} ended ({self._submitted.state}) and left nothing. The output folder "
            f"must be on storage that all machines share; the log of the job is {self._submitted.paths.stderr}."
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
