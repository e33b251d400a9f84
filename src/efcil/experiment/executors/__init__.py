"""Where several runs train at a time: an executor takes a job, whose settings travel as a file, and returns a handle.

`local` has the runs of this machine, `ray_cluster` and `submitit_jobs` those of clusters. `remote` is what runs there.
"""

from __future__ import annotations

from efcil.experiment.executors.base import CommandOf, Executor, Handle, Job, Refused, State

__all__ = ["CommandOf", "Executor", "Handle", "Job", "Refused", "State"]
