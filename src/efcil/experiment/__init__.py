"""One run from settings to run folder, and the grid of runs."""

from __future__ import annotations

from efcil.experiment.grid import run_grid
from efcil.experiment.run import run_one

__all__ = ["run_grid", "run_one"]
