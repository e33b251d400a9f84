"""One run from settings to run folder, and the grid of runs."""

from __future__ import annotations

from efcil.experiment.grid import GridError, run_grid
from efcil.experiment.run import run_one

__all__ = ["GridError", "run_grid", "run_one"]
