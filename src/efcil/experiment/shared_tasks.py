"""First tasks, trained once and shared by every run that starts with the same one.

<output>/first-tasks/<key>/ is a checkpoint of the network (network.json and its tensors). The key is a digest of
everything that determines the network, so the folder of a key is never outdated.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from efcil import ranks
from efcil.data.deferred import DeferredImages
from efcil.data.images import Dataset, ImageSet
from efcil.engine import checkpoint
from efcil.settings import Recipe

FOLDER = "first-tasks"
STEM = "network"
SAMPLED_IMAGES = 1024


def fingerprint(dataset: Dataset) -> str:
    """Return a digest of the training data: all labels, classes and normalisation, and up to 1,024 of the images."""
    facts = [dataset.name, dataset.train.images.shape, dataset.class_names, dataset.mean, dataset.std]
    if isinstance(dataset.train.images, DeferredImages):
        facts.append(dataset.train.images.description)
    return _digest(facts, dataset.train)


def data_digest(dataset: Dataset, training: str | None = None) -> str:
    """Return a digest of a whole dataset, including test images. `training` is its fingerprint, if that is known."""
    return _digest([training or fingerprint(dataset), dataset.test.images.shape], dataset.test)[:16]


def _digest(facts: Sequence[Any], images: ImageSet) -> str:
    total = hashlib.sha256(json.dumps(facts).encode())
    total.update(np.ascontiguousarray(images.labels).tobytes())
    rows = np.unique(np.linspace(0, len(images) - 1, SAMPLED_IMAGES).astype(int))
    # Images that are decoded now are decoded together, on all cores.
    sampled = np.asarray(images.images[rows]) if isinstance(images.images, DeferredImages) else images.images
    for row in range(len(rows)) if isinstance(images.images, DeferredImages) else rows:
        total.update(np.ascontiguousarray(sampled[row]).tobytes())
    return total.hexdigest()


#: Values of recipes that came later: where they are off, first tasks keep the keys that they had.
_OFF_BEFORE = {
    "label_smoothing": 0.0, "ema": None, "head": "linear", "head_scale": None, "rotation_weight": 1.0,
    "mixing": 0, "mixing_weight": 1.0, "contrast": 0.0, "contrast_temperature": 0.1,
}  # fmt: skip


def describe(
    data: str,
    classes: Sequence[int],
    network: str,
    augmentation: str,
    recipe: Recipe,
    seed: int,
    made_with: Mapping[str, Any],
) -> dict[str, Any]:
    """Return everything that determines a first task. `data` is the fingerprint; classes are in their order."""
    description = {
        "data": data,
        "classes": [int(c) for c in classes],
        "network": network,
        "augmentation": augmentation,
        "recipe": {
            name: value
            for name, value in dataclasses.asdict(recipe).items()
            if name not in _OFF_BEFORE or value != _OFF_BEFORE[name]
        },
        "seed": seed,
        "made_with": dict(made_with),
    }
    return json.loads(json.dumps(description))  # as it will be read back


def digest(description: Mapping[str, Any]) -> str:
    """Return the key of a first task: sixteen hexadecimal digits."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SharedTask:
    """A trained first task: the network's tensors, the metrics of its epochs, their seconds, and the code used."""

    tensors: dict[str, Tensor]
    epochs: list[dict[str, Any]]
    seconds: float
    commits: list[str]


def from_first(record: SharedTask | None) -> SharedTask | None:
    """Return what the first process of a run has loaded; only that one reads files."""
    if not ranks.several():
        return record
    facts = {} if record is None else {"epochs": record.epochs, "seconds": record.seconds, "commits": record.commits}
    found = checkpoint.from_first(None if record is None else checkpoint.Checkpoint(record.tensors, facts))
    return None if found is None else SharedTask(found.tensors, **found.facts)


class SharedTaskStore:
    """The shared first tasks below an output folder."""

    def __init__(self, output: Path) -> None:
        self.folder = output / FOLDER

    def place(self, key: str) -> Path:
        """Return the folder of a first task."""
        return self.folder / key

    def lock(self, key: str) -> Path:
        """Return the lock file to hold while a first task is trained."""
        return self.folder / f".{key}.lock"

    def has(self, key: str) -> bool:
        """Return whether a first task has been trained; it may still turn out to be damaged."""
        return checkpoint.exists(self.place(key), STEM)

    def load(self, key: str, description: Mapping[str, Any]) -> SharedTask | None:
        """Return a first task, or None if there is none; a damaged or different one counts as none.

        It must match `description`: a folder may have been copied from elsewhere.
        """
        if not self.has(key):
            return None
        try:
            stored = checkpoint.read(self.place(key), STEM)
            facts = stored.facts
            if other := _differences(facts["description"], description):
                raise checkpoint.Damaged(self.place(key) / f"{STEM}.json", f"it is another first task: {other}")
            return SharedTask(stored.tensors, facts["epochs"], facts["seconds"], facts["commits"])
        except (checkpoint.CheckpointError, KeyError, TypeError) as error:
            warnings.warn(f"{error} It is trained again now.", stacklevel=2)
            return None

    def save(self, key: str, record: SharedTask, description: Mapping[str, Any]) -> None:
        """Store a first task for later runs."""
        facts = {
            "key": key,
            "seconds": record.seconds,
            "commits": record.commits,
            "description": dict(description),
            "epochs": record.epochs,
        }
        checkpoint.write(self.place(key), record.tensors, facts, STEM)


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return how a stored description differs from the wanted one."""
    return "; ".join(
        f"{name} is {found.get(name)!r:.60} there and {value!r:.60} here"
        for name, value in wanted.items()
        if found.get(name) != value
    )
