"""The engines by name: what `--engine` chooses, and the executor of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from efcil.errors import SettingsError, unknown
from efcil.experiment.executors import CommandOf, Executor

LOCAL = "local"
ENGINES = (LOCAL, "ray", "slurm", "submitit-local")


@dataclass(frozen=True)
class Engine:
    """What trains the runs of a grid. `address` is that of a Ray cluster; `options` are passed on to the engine."""

    name: str = LOCAL
    address: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise unknown("engine", self.name, ENGINES)
        if self.address is not None and self.name != "ray":
            raise SettingsError(f"--address is that of a Ray cluster, and the engine is {self.name}. Use --engine ray.")
        if self.options and self.name == LOCAL:
            raise SettingsError("--engine-option is for clusters, and the engine is local. Give --engine too.")
        at_once = self.options.get("at_once", "1")
        if not at_once.isdecimal() or not 0 < int(at_once) < 10**9:
            raise SettingsError(f"Engine option 'at_once' must be a whole number, at least 1, but it is {at_once!r}.")

    @property
    def at_once(self) -> int | None:
        """The most runs that are submitted at a time; None for all."""
        return int(self.options["at_once"]) if "at_once" in self.options else None


def open_executor(
    engine: Engine, command: CommandOf, scratch: Path, jobs_per_gpu: int | None, say: Callable[[str], None]
) -> Executor:
    """Return the executor of a cluster. `scratch` is a folder that all of its machines see."""
    import torch

    from efcil.experiment.executors.cluster import Orders

    orders = Orders(command, scratch, torch.get_num_threads())
    if engine.name == "ray":
        from efcil.experiment.executors.ray_cluster import RayExecutor

        return RayExecutor(orders, engine.options, engine.address, jobs_per_gpu, say)
    if jobs_per_gpu is not None:
        raise SettingsError(
            f"--jobs-per-gpu does not work with the engine {engine.name}: Slurm gives each run GPUs of its own. Leave "
            "it out, or ask for a part of a GPU where your cluster has such parts (--engine-option gres=shard:1)."
        )
    from efcil.experiment.executors.submitit_jobs import SubmititExecutor

    return SubmititExecutor(orders, engine.options, engine.name == "submitit-local", say)
