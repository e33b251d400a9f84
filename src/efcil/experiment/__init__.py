"""One run from settings to run folder, the grid of runs, and noise in the feature space of a run."""

from __future__ import annotations

from efcil.experiment.grid import run_grid
from efcil.experiment.perturbation import perturb
from efcil.experiment.run import run_one

__all__ = ["perturb", "run_grid", "run_one"]
