"""Noise in the feature space of a finished run: how much its predictions depend on which directions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from efcil import seeds
from efcil.core import perturbation
from efcil.data.domains import numbered
from efcil.data.images import Dataset
from efcil.engine import hardware
from efcil.engine.evaluate import TestImages
from efcil.errors import DataError, RunFolderError, SettingsError
from efcil.evaluation.probes import Perturbation
from efcil.experiment import shared_tasks
from efcil.model.in_memory import Model
from efcil.resolution import load_images
from efcil.runfolder import RunFolder
from efcil.settings import Settings

#: Standard deviations of the noise, in the unit of the features.
SIGMAS = (0.1, 0.25, 0.5, 1.0, 2.0)


def perturb(
    run: RunFolder | Path | str,
    dataset: Dataset | None = None,
    *,
    sigmas: Sequence[float] = SIGMAS,
    cut_off: float = perturbation.CUT_OFF,
    device: str = "auto",
    write: bool = True,
) -> list[Perturbation]:
    """Perturb the features of all test images of a finished run along principal and non-principal directions.

    The directions are those of the feature matrix that the method keeps (efc and its family); principal are those with
    an eigenvalue above `cut_off` times the largest. The probabilities are those of the heads. Without `dataset`, it is
    loaded as the run's settings say. The result is returned and, with `write`, written to perturbation.csv in the run
    folder. The noise depends on the run's seed alone.
    """
    folder = run if isinstance(run, RunFolder) else RunFolder(run)
    if not sigmas or not all(math.isfinite(sigma) and sigma >= 0 for sigma in sigmas):
        raise SettingsError("The standard deviations of the noise must be numbers of at least 0; give one or more.")
    summary, settings = folder.verified_summary(), folder.read_settings()
    dataset = load_images(settings) if dataset is None else dataset
    if summary["data"] != shared_tasks.data_digest(dataset):
        raise DataError(f"The run in {folder.path} was trained on other images than these. Give the dataset it used.")
    model = Model.load(folder.model, device)
    matrix = model.ready.importance_matrix()
    if matrix is None:
        raise RunFolderError(
            f"The method of the run in {folder.path} ({summary['method']}) keeps no feature matrix, so it has no "
            "principal directions. Use a run of efc, efc++, fd or cedar."
        )
    if model.ready.network.cosine_scale is not None:
        raise RunFolderError(
            f"The run in {folder.path} has cosine heads, whose scores are not linear in the features. Use a run with "
            "linear heads (first_task.head=linear)."
        )
    features, labels = _features(model, settings, dataset, summary["class_order"])
    heads = model.ready.network.head_weight() / model.ready.head_temperature
    tasks = len(summary["task_sizes"])
    noise = seeds.generator("cpu", summary["seed"], "perturbation", tasks)
    found = [
        Perturbation(tasks, each.sigma, each.directions, each.change, each.accuracy, each.unperturbed)
        for each in perturbation.perturb(features, labels, heads, matrix, sigmas, noise, cut_off, _answers(summary))
    ]
    if write:
        folder.write_perturbation(found)
    return found


def _answers(summary: Mapping[str, Any]) -> Tensor | None:
    """Return the number of the answer of every class; None if each is an answer of its own."""
    if (names := summary.get("answers")) is None:
        return None
    return torch.tensor(numbered(names)[1])


@torch.no_grad()
def _features(model: Model, settings: Settings, dataset: Dataset, class_order: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the features of all test images, and their classes as positions in the order."""
    position = np.argsort(np.asarray(class_order))
    with hardware.switches(model.execution, settings.deterministic), model.execution.stream():
        images = TestImages(
            dataset.test.images,
            position[dataset.test.labels],
            normalisation=model.card.normalisation,
            device=model.execution.device,
            dtype=model.execution.dtype,
        )
        count, step = len(images.labels), images.chunk_size()
        pieces = [
            model.ready.network.features(images.chunk(start, min(start + step, count)))[: count - start].cpu()
            for start in range(0, count, step)
        ]
        return torch.cat(pieces), images.labels.cpu()
