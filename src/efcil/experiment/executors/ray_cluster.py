"""Runs on a Ray cluster: a task for each, which starts the command of the run on the machine that Ray chooses."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from efcil.errors import SettingsError, closest
from efcil.experiment.executors import remote
from efcil.experiment.executors.base import Job
from efcil.experiment.executors.cluster import ClusterHandle, Orders, facts, stop_all

#: Options of the engine, besides `resources.NAME`, and how their values are read.
OPTIONS: Mapping[str, Callable[[str], float]] = {
    "num_cpus": float,
    "num_gpus": float,
    "memory": float,
    "retries": int,
    "at_once": int,
}
_RESOURCE = "resources."
CONNECT_SECONDS = 20.0


def read_options(options: Mapping[str, str]) -> dict[str, float]:
    """Return the options of the engine as numbers."""
    found: dict[str, float] = {}
    for name, text in options.items():
        convert = float if name.startswith(_RESOURCE) else OPTIONS.get(name)
        if convert is None:
            raise SettingsError(
                f"The engine ray has no option {name!r}.{closest(name, [*OPTIONS, _RESOURCE + 'NAME'])}"
            )
        try:
            value = convert(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise SettingsError(f"Engine option {name!r} must be a number of at least 0, but it is {text!r}.")
        found[name] = value
    return found


def share(jobs_per_gpu: int) -> float:
    """Return the part of a GPU that each of `jobs_per_gpu` runs asks for; Ray counts in ten-thousandths."""
    return math.floor(10_000 / jobs_per_gpu) / 10_000


class RayExecutor:
    """Gives jobs to a Ray cluster: the one at `address`, else one that runs here, else one that is started."""

    def __init__(
        self,
        orders: Orders,
        options: Mapping[str, str],
        address: str | None,
        jobs_per_gpu: int | None,
        say: Callable[[str], None],
    ) -> None:
        self._orders = orders
        self._options = read_options(options)
        self._jobs_per_gpu = jobs_per_gpu
        self._handles: list[RayHandle] = []
        self._ray = _connected(address, say)
        self._nodes = [node for node in self._ray.nodes() if node["Alive"]]
        self._ray.cloudpickle.register_pickle_by_value(remote)

    def submit(self, job: Job) -> RayHandle:
        """Queue a job."""
        needs = self._needs(job)
        self._refuse_impossible(needs)
        retries = int(self._options.get("retries", self._orders.retries))
        extra = {name.removeprefix(_RESOURCE): amount for name, amount in needs.items() if name.startswith(_RESOURCE)}
        task = self._ray.remote(remote.train).options(
            num_cpus=needs["CPU"],
            num_gpus=needs["GPU"],
            max_retries=retries,  # of tasks whose worker or node was lost
            resources=extra,
            name=f"efcil {job.folder.name}",
            **({"memory": needs["memory"]} if "memory" in needs else {}),
        )
        handle = RayHandle(job, self._orders.write(job), retries, self._ray, task)
        handle.submit()
        self._handles.append(handle)
        return handle

    def close(self) -> None:
        """Stop what still runs, and leave the cluster."""
        try:
            stop_all(self._handles)
        finally:
            self._ray.shutdown()

    def _needs(self, job: Job) -> dict[str, float]:
        """Return what a run asks for, by the names of Ray's resources."""
        device = job.settings.device
        if ":" in device:
            raise SettingsError(
                f"Ray chooses the GPU of a run, so --device {device} cannot be used. Use --device cuda."
            )
        has_gpus = any(node["Resources"].get("GPU", 0) > 0 for node in self._nodes)
        on_gpu = device == "cuda" or (device == "auto" and has_gpus)
        part = 1.0 if self._jobs_per_gpu is None else share(self._jobs_per_gpu)
        gpus = self._options.get("num_gpus", part if on_gpu else 0.0)
        cpus = self._options.get("num_cpus", 1.0 if gpus > 0 else float(self._orders.threads))
        others = {name: value for name, value in self._options.items() if name == "memory" or "." in name}
        return {"CPU": cpus, "GPU": gpus, **others}

    def _refuse_impossible(self, needs: Mapping[str, float]) -> None:
        asked = {name.removeprefix(_RESOURCE): amount for name, amount in needs.items() if amount > 0}
        if any(all(node["Resources"].get(name, 0) >= amount for name, amount in asked.items()) for node in self._nodes):
            return
        wanted = ", ".join(f"{amount:g} {name}" for name, amount in asked.items())
        nodes = "; ".join(
            ", ".join(f"{node['Resources'].get(name, 0):g} {name}" for name in asked) for node in self._nodes
        )
        raise SettingsError(
            f"No machine of the Ray cluster has what a run asks for: {wanted}. Its machines have: {nodes or 'none'}. "
            "Ask for less (--engine-option num_cpus=... num_gpus=..., --device cpu), or add machines."
        )


class RayHandle(ClusterHandle):
    """A job on a Ray cluster."""

    def __init__(self, job: Job, run: remote.RemoteRun, retries: int, ray: Any, task: Any) -> None:
        super().__init__(job, run, retries)
        self._ray = ray
        self._task = task
        self._reference: Any = None
        self._problem = ""

    def submit(self) -> None:
        """Queue the task."""
        self._reference = self._task.remote(facts(self.run))

    def returned(self) -> str | None:
        """Return what the task returned, "" if it ended otherwise."""
        ready, _ = self._ray.wait([self._reference], timeout=0)
        if not ready:
            return None
        try:
            return str(self._ray.get(self._reference))
        except self._ray.exceptions.RayError as error:
            self._problem = _first_line(error)
            return ""

    def withdraw(self) -> None:
        """Take the task from the queue, or interrupt it."""
        self._ray.cancel(self._reference)

    def lost(self) -> str:
        """Return what Ray says about a task that did not end as it should."""
        return f"Ray could not finish the run ({self._problem}). Run the same command again to resume it."


def _connected(address: str | None, say: Callable[[str], None]) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise SettingsError("The engine ray needs the package ray. Install it: pip install 'efcil[ray]'.") from None
    try:
        if address is not None:
            say(f"Connecting to the Ray cluster at {address}.")
            _knock(address)
        context = ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, ValueError, RuntimeError, OverflowError) as error:
        raise SettingsError(
            f"There is no Ray cluster at {address or 'this machine'} ({_first_line(error)}). Check --address, and that "
            "`ray status` works there."
        ) from None
    _silence()
    found = getattr(context, "address_info", {}).get("gcs_address") or address  # clients (ray://) know only that
    machines = sum(bool(node["Alive"]) for node in ray.nodes())
    say(f"Ray cluster at {found}: {machines} {'machine' if machines == 1 else 'machines'}.")
    return ray


def _knock(address: str) -> None:
    """Raise if nobody listens at an address; Ray itself would try for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():  # `auto` and `local` are addresses too
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()


def _silence() -> None:
    """Keep Ray from printing dozens of lines when a machine is lost; a line of ours says that the run started again."""
    with suppress(Exception):  # not a public part of Ray, and not needed either
        from ray._private.ray_logging import global_worker_stdstream_dispatcher

        global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
