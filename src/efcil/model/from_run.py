"""The model of a finished experiment (`runs/.../model`), read as a model of one's own. It cannot learn more classes."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from efcil import methods
from efcil.core.classifiers import OWN
from efcil.data.augment import Normalisation
from efcil.errors import EfcilError
from efcil.model.card import LARGEST_IMAGE, Card, LearnedClass, ModelError, Visit, check_consistency, whole
from efcil.presets import presets
from efcil.resolution import resolve
from efcil.settings import TrainingSettings, completed, method_settings

#: What engine/checkpoint.py calls the state of a run.
STEM = "state"
#: All that experiment/state.py writes beside the tensors.
FACTS = (
    "completed", "agnostic", "aware", "task_sizes", "class_order", "class_names", "dataset", "data", "own_method",
    "image_size", "normalisation", "network", "head_sizes", "method", "classifier", "method_settings", "first_task",
    "seconds", "commits", "efcil",
)  # fmt: skip


def card_of_run(facts: Mapping[str, Any], written: float) -> Card:
    """Return the card of a run's state, last written at the time `written`; see experiment/state.py for its facts."""
    try:
        card = _card(facts, datetime.datetime.fromtimestamp(written).astimezone().isoformat(timespec="seconds"))
    except EfcilError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"it is not the state of a run ({type(error).__name__}: {error})") from None
    check_consistency(card)
    return card


def _card(facts: Mapping[str, Any], date: str) -> Card:
    cls = methods.get(str(facts["method"]))
    preset = facts["dataset"] if facts["dataset"] in presets() else "folder"
    size, names = whole(facts["image_size"], 1, LARGEST_IMAGE), [str(name) for name in facts["class_names"]]
    sizes = [whole(size, 1, len(names)) for size in facts["head_sizes"]]
    if sum(sizes) > len(names):
        raise ValueError("it has more heads than classes")
    classifier = str(facts.get("classifier", OWN))  # older runs do not say
    settings = TrainingSettings(
        method=cls.name, preset=preset, image_size=size, network=facts["network"], classifier=classifier
    )
    tasks = [task for task, count in enumerate(sizes) for _ in range(count)]
    return Card(
        settings=settings,
        resolved=replace(
            resolve(settings, size), method=method_settings(cls, completed(cls, facts["method_settings"]))
        ),
        image_size=size,
        normalisation=Normalisation(tuple(facts["normalisation"]["mean"]), tuple(facts["normalisation"]["std"])),
        # A run does not keep how many images a class had.
        classes=tuple(LearnedClass(name, task, 0, date) for name, task in zip(names, tasks, strict=False)),
        visits=tuple(Visit("task", count, 0, date) for count in sizes),
    )
