"""The executor of each engine that is a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from efcil.errors import SettingsError
from efcil.experiment.executors import CommandOf, Executor
from efcil.settings.engine import Engine


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
