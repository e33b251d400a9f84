"""What a model is, beside its numbers: classes, visits, network, method and recipes, as plain JSON and back.

Reading trusts nothing: every name, type and size is checked, because a model folder may come from anywhere.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import efcil
from efcil import methods
from efcil.core import classifiers
from efcil.data.augment import AUGMENTATIONS, Normalisation
from efcil.errors import EfcilError, SettingsError, unknown
from efcil.network.resnet import NETWORKS
from efcil.settings import Recipe, Resolved, Settings, completed, method_settings
from efcil.settings.options import build
from efcil.settings.resolution import recipe_as_implied

#: Version of what a card says. Raised when a reader of the version before would misunderstand it.
FORMAT = 1
LARGEST_IMAGE = 4096
MOST_CLASSES = 1_000_000
#: The settings that belong to a model. Device and implementation belong to the machine that uses it.
KEPT_SETTINGS = (
    "method", "dataset", "seed", "image_size", "network", "augmentation", "epochs", "first_task_epochs", "batch_size",
    "precision", "classifier", "overrides",
)  # fmt: skip


class ModelError(EfcilError):
    """A model folder that is missing, damaged or of another version, or a request that the model cannot follow."""


@dataclass(frozen=True)
class LearnedClass:
    """One class: its label, the task it came with (from 0), how many images it was learned from, and when."""

    label: Hashable
    task: int
    images: int
    learned: str


@dataclass(frozen=True)
class Visit:
    """One call to learn: a task of new classes, or more images of known ones."""

    kind: str  # "task" or "more"
    classes: int
    images: int
    date: str


@dataclass(frozen=True)
class Card:
    """Everything about a model that is not a tensor."""

    settings: Settings
    resolved: Resolved
    image_size: int
    normalisation: Normalisation
    classes: tuple[LearnedClass, ...] = ()
    visits: tuple[Visit, ...] = ()

    @property
    def labels(self) -> list[Hashable]:
        """The labels in the order of the scores."""
        return [each.label for each in self.classes]

    @property
    def task_sizes(self) -> list[int]:
        """How many classes every task brought."""
        return [visit.classes for visit in self.visits if visit.kind == "task"]

    def to_json(self) -> dict[str, Any]:
        """Return the card as plain values."""
        return {
            "kind": "efcil model",
            "format": FORMAT,
            "efcil": efcil.__version__,
            "settings": {name: getattr(self.settings, name) for name in KEPT_SETTINGS},
            "resolved": dataclasses.asdict(self.resolved),
            "image_size": self.image_size,
            "normalisation": dataclasses.asdict(self.normalisation),
            "classes": [dataclasses.asdict(c) | {"label": encode_label(c.label)} for c in self.classes],
            "visits": [dataclasses.asdict(visit) for visit in self.visits],
        }


def now() -> str:
    """Return the present moment, to the second, as it is written into cards."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


# -- labels ----------------------------------------------------------------------------------------------------------


def encode_label(label: Hashable) -> Any:
    """Return a label as JSON: text, numbers, true, false and null as they are, tuples and bytes wrapped."""
    if label is None or isinstance(label, str | bool | int) or (isinstance(label, float) and math.isfinite(label)):
        return label
    if isinstance(label, tuple):
        return {"tuple": [encode_label(part) for part in label]}
    if isinstance(label, bytes):
        return {"bytes": label.hex()}
    raise ModelError(
        f"The label {label!r} cannot be saved: a {type(label).__name__} has no form in a model folder. Use text, "
        "numbers, true, false, None, bytes, or tuples of these as labels."
    )


def decode_label(value: Any) -> Hashable:
    """Return the label that `encode_label` wrote."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict) and len(value) == 1:
        if isinstance(value.get("tuple"), list):
            return tuple(decode_label(part) for part in value["tuple"])
        if isinstance(value.get("bytes"), str):
            return bytes.fromhex(value["bytes"])
    raise ModelError(f"{value!r} is no label")


# -- reading ---------------------------------------------------------------------------------------------------------


def read_card(facts: Any) -> Card:
    """Return the card that `Card.to_json` wrote; anything else raises a ModelError that says what is wrong."""
    if not isinstance(facts, Mapping) or facts.get("kind") != "efcil model":
        raise ModelError("it does not describe a model")
    version = facts.get("format")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ModelError("it does not say which format it has")
    if version > FORMAT:
        raise ModelError(
            f"its format is {version}, and efcil {efcil.__version__} reads formats up to {FORMAT}: it was written by a "
            f"later version ({str(facts.get('efcil'))[:40]}), which is needed to use it"
        )
    try:
        card = _read_known(facts)
    except EfcilError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(f"it is incomplete or contradicts itself ({type(error).__name__}: {error})") from None
    check_consistency(card)
    return card


def _read_known(facts: Mapping[str, Any]) -> Card:
    wanted = build(Settings, _mapping(facts["settings"]))
    resolved = _mapping(facts["resolved"])
    cls = methods.get(wanted.method)
    own = completed(cls, _mapping(resolved["method"]))
    implied = recipe_as_implied(wanted.method, wanted.dataset, own)
    for kind, name, valid in (
        ("network", resolved["network"], NETWORKS),
        ("augmentation", resolved["augmentation"], AUGMENTATIONS),
    ):
        if name not in valid:
            raise unknown(kind, str(name), valid, ModelError)
    normalisation = _mapping(facts["normalisation"])
    return Card(
        settings=wanted,
        resolved=Resolved(
            network=resolved["network"],
            augmentation=resolved["augmentation"],
            first_task=build(Recipe, _mapping(resolved["first_task"])),
            later=build(Recipe, {**implied, **_mapping(resolved["later"])}),
            method=method_settings(cls, own),
        ),
        image_size=whole(facts["image_size"], 1, LARGEST_IMAGE),
        normalisation=Normalisation(_triple(normalisation["mean"]), _triple(normalisation["std"])),
        classes=tuple(_read_class(_mapping(value)) for value in _list(facts["classes"])),
        visits=tuple(_read_visit(_mapping(value)) for value in _list(facts["visits"])),
    )


def _read_class(value: Mapping[str, Any]) -> LearnedClass:
    return LearnedClass(
        label=decode_label(value["label"]),
        task=whole(value["task"], 0, MOST_CLASSES),
        images=whole(value["images"], 1, 1 << 62),
        learned=_date(value["learned"]),
    )


def _read_visit(value: Mapping[str, Any]) -> Visit:
    if value["kind"] not in ("task", "more"):
        raise ValueError(f"a visit is a task or more images, not {value['kind']!r}")
    return Visit(
        kind=value["kind"],
        classes=whole(value["classes"], 1, MOST_CLASSES),
        images=whole(value["images"], 1, 1 << 62),
        date=_date(value["date"]),
    )


def check_consistency(card: Card) -> None:
    """Raise a ModelError where parts of a card contradict each other."""
    fits = sum(card.task_sizes) == len(card.classes)
    if not fits or [each.task for each in card.classes] != [t for t, n in enumerate(card.task_sizes) for _ in range(n)]:
        raise ModelError("its classes and its tasks do not fit together")
    if len(set(card.labels)) != len(card.labels):
        raise ModelError("it names a class twice")
    method = methods.get(card.settings.method)
    try:
        classifiers.check(card.settings.classifier, method.name, method.traits(card.resolved.method).keeps)
    except SettingsError as error:
        raise ModelError(str(error)) from None
    if any(not math.isfinite(value) for value in (*card.normalisation.mean, *card.normalisation.std)):
        raise ModelError("its normalisation is not finite")
    if min(card.normalisation.std) <= 0:
        raise ModelError("its normalisation divides by zero or less")


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError("a group of values is expected")
    return value


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) > MOST_CLASSES:
        raise TypeError("a list is expected")
    return value


def whole(value: Any, least: int, most: int) -> int:
    """Return a value that must be a whole number in a range; anything else is a ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"a whole number from {least} to {most} is expected, not {value!r}")
    return value


def _triple(value: Any) -> tuple[float, float, float]:
    first, second, third = (float(part) for part in _list(value))
    return first, second, third


def _date(value: Any) -> str:
    datetime.datetime.fromisoformat(value)
    return str(value)
