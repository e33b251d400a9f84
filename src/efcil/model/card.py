"""What a model is, besides its tensors: classes, visits, network, method and recipes, to and from plain JSON.

Reading trusts nothing: every name, type and size is checked, because a model folder may come from anywhere.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import efcil
from efcil import methods
from efcil.core import classifiers
from efcil.data.augment import AUGMENTATIONS, Normalisation
from efcil.engine import hardware
from efcil.engine.evaluate import used_classifier
from efcil.engine.trainer import Execution
from efcil.errors import EfcilError, SettingsError, unknown
from efcil.model.measured import HELD_OUT, Measured, group, read_measured, whole
from efcil.network import backbones
from efcil.network.weights import LONGEST_FACT, UNSTATED
from efcil.resolution import Resolved
from efcil.resolution.identity import recipe_as_implied
from efcil.settings import Recipe, TrainingSettings, completed, method_settings
from efcil.settings.options import build

#: Version of the card format. Increased when a reader of the previous version would misunderstand it.
FORMAT = 3
#: Facts of an experiment that are stored in its model, so that an interrupted run can resume from it.
EXPERIMENT = (
    "identity", "data", "own_method", "completed", "agnostic", "aware", "task_sizes", "class_order", "first_task",
    "seconds", "commits", "made_with", "metrics",
)  # fmt: skip
#: What determines the bits of a result, as a visit records it.
MADE_WITH = ("efcil", "torch", "device", "precision", "path", "deterministic", "threads", "ranks", "method")
#: What a visit may be. The last three change classes that are known, and learn from no image.
KINDS = ("task", "more", "rename", "forget", "merge")
LARGEST_IMAGE = 4096
LONGEST_NAME = 80
MOST_CLASSES = 1_000_000
#: The settings that belong to a model. Device and implementation belong to the machine that uses it.
KEPT_SETTINGS = (
    "method", "preset", "seed", "image_size", "network", "weights", "input_size", "augmentation", "epochs",
    "first_task_epochs", "batch_size", "precision", "classifier", "overrides",
)  # fmt: skip


def training_settings(settings: TrainingSettings) -> TrainingSettings:
    """Return those of the settings that belong to a model."""
    return TrainingSettings(**{name: getattr(settings, name) for name in KEPT_SETTINGS})


class ModelError(EfcilError):
    """A model folder that is missing, damaged or of another version, or a request that the model cannot fulfil."""


@dataclass(frozen=True)
class LearnedClass:
    """One class: its label, its task (from 0), how many images it was learned from, and when."""

    label: Hashable
    task: int
    images: int
    learned: str
    #: How many images that were not learned from were tried when it was learned, and how many of them were right.
    measured: int = 0
    right: int = 0


@dataclass(frozen=True)
class Visit:
    """One change of a model: a task of new classes, more images of known ones, or classes renamed, forgotten or merged.

    `classes` and `images` are those that it was about. The names of classes that are gone are not kept.
    """

    kind: str  # one of KINDS
    classes: int
    images: int
    date: str
    #: Versions, device, precision, threads it was computed with; more than one entry if it was resumed with others.
    made_with: tuple[Mapping[str, Any], ...] = ()
    #: What images that were not learned from have shown; None where there were none.
    measured: Measured | None = None


@dataclass(frozen=True)
class Pretrained:
    """The weights that a network started with: the network they are of, their source, licence, checksum and data."""

    architecture: str
    source: str
    licence: str
    sha256: str
    trained_on: str

    @property
    def sentence(self) -> str:
        """The same for a reader."""
        data = "" if self.trained_on == UNSTATED else f" on {self.trained_on}"
        return f"pre-trained{data} ({self.source}, licence {self.licence}, SHA-256 {self.sha256[:16]})"


@dataclass(frozen=True)
class Card:
    """Everything about a model that is not a tensor.

    `continues` is the SHA-256 of the tensors that the last visit started from. `experiment` is what an experiment needs
    to resume; a user's own model has none. `pretrained` describes the weights that the network started with, None where
    it was trained from scratch.
    """

    settings: TrainingSettings
    resolved: Resolved
    image_size: int
    normalisation: Normalisation
    classes: tuple[LearnedClass, ...] = ()
    visits: tuple[Visit, ...] = ()
    continues: str | None = None
    experiment: Mapping[str, Any] | None = None
    pretrained: Pretrained | None = None

    @property
    def labels(self) -> list[Hashable]:
        """The labels in the order of the scores."""
        return [each.label for each in self.classes]

    @property
    def last_made_with(self) -> Mapping[str, Any]:
        """What the last visit was computed with, nothing where that is not known."""
        # Renaming computes nothing.
        return next((visit.made_with[-1] for visit in reversed(self.visits) if visit.made_with), {})

    @property
    def classified_by(self) -> str:
        """The classifier that gives the answers, in words; where the settings say `auto`, the one that was chosen."""
        name = used_classifier(methods.get(self.settings.method).traits(self.resolved.method), self.settings.classifier)
        # A run that measures all classifiers has none of its own to answer with.
        return f"the method's own rule ({self.settings.method})" if name in (classifiers.OWN, classifiers.ALL) else name

    @property
    def task_sizes(self) -> list[int]:
        """How many classes of every task the model still knows; 0 if all of its classes were forgotten."""
        known = Counter(each.task for each in self.classes)
        return [known[task] for task in range(sum(visit.kind == "task" for visit in self.visits))]

    @property
    def forgotten(self) -> int:
        """How many classes were forgotten, or are part of another one now."""
        gone = {"forget": 0, "merge": 1}  # merging leaves one
        return sum(visit.classes - gone[visit.kind] for visit in self.visits if visit.kind in gone)

    @property
    def as_pretrained(self) -> bool:
        """Whether the network is the pre-trained one that the model started with: no visit has trained it."""
        traits = methods.get(self.settings.method).traits(self.resolved.method)
        return self.pretrained is not None and self.resolved.first_task.epochs == 0 and not traits.trains_later

    @property
    def since_trained(self) -> tuple[Visit, ...]:
        """The last visit that trained the network, and those after it; all visits if none did.

        What earlier visits measured in feature space is about a network that is no more.
        """
        later = methods.get(self.settings.method).traits(self.resolved.method).trains_later
        tasks = [place for place, visit in enumerate(self.visits) if visit.kind == "task"]
        return self.visits[tasks[-1] if later and tasks else 0 :]

    def held_out(self, learned: LearnedClass) -> int:
        """Return how many images of a class the model has seen in its task without learning from them."""
        task = [visit for visit in self.visits if visit.kind == "task"][learned.task]
        return learned.measured if task.measured is not None and task.measured.way == HELD_OUT else 0

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
            "continues": self.continues,
            "experiment": self.experiment,
            "pretrained": None if self.pretrained is None else dataclasses.asdict(self.pretrained),
        }


def made_with(execution: Execution, deterministic: bool) -> dict[str, Any]:
    """Return what determines the bits of what is learned now, as a visit records it."""
    return versions() | hardware.describe(execution, deterministic) | hardware.threads(execution)


def changed_computing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return in words how two ways of computing differ; nothing where they do not, or where none is known."""
    names = [name for name in {**before, **now} if before and before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name, 'none')} (now {now.get(name, 'none')})" for name in names)


def versions() -> dict[str, str]:
    """Return the versions of efcil and PyTorch."""
    return {"efcil": efcil.__version__, "torch": torch.__version__.partition("+")[0]}


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
        f"The label {label!r} cannot be saved: a model folder cannot store a {type(label).__name__}. Use text, "
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
    raise ModelError(f"{value!r} is not a label")


# -- reading ---------------------------------------------------------------------------------------------------------


def read_card(facts: Any) -> Card:
    """Return the card that `Card.to_json` wrote; anything else raises a ModelError that says what is wrong."""
    if not isinstance(facts, Mapping) or facts.get("kind") != "efcil model":
        raise ModelError("it does not describe a model")
    version = facts.get("format")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ModelError("it does not name its format")
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
    named = {"dataset": "preset"}  # as format 1 has it
    wanted = build(TrainingSettings, {named.get(name, name): v for name, v in group(facts["settings"]).items()})
    resolved = group(facts["resolved"])
    cls = methods.get(wanted.method)
    own = completed(cls, group(resolved["method"]))
    implied = recipe_as_implied(wanted.method, wanted.preset, own)
    _check_network(resolved["network"])
    if backbones.is_of_hub(resolved["network"]) and facts.get("pretrained") is None:
        raise ValueError("a network of the Hub has pre-trained weights, and it describes none")
    if resolved["augmentation"] not in AUGMENTATIONS:
        raise unknown("augmentation", str(resolved["augmentation"]), AUGMENTATIONS, ModelError)
    normalisation = group(facts["normalisation"])
    visits = _with_version([_read_visit(group(value)) for value in _list(facts["visits"])], facts)
    if wanted.input_size is not None:
        whole(wanted.input_size, 1, LARGEST_IMAGE)
    return Card(
        settings=wanted,
        resolved=Resolved(
            network=resolved["network"],
            augmentation=resolved["augmentation"],
            first_task=build(Recipe, group(resolved["first_task"])),
            later=build(Recipe, {**implied, **group(resolved["later"])}),
            method=method_settings(cls, own),
        ),
        image_size=whole(facts["image_size"], 1, LARGEST_IMAGE),
        normalisation=Normalisation(_triple(normalisation["mean"]), _triple(normalisation["std"])),
        classes=tuple(_read_class(group(value)) for value in _list(facts["classes"])),
        visits=visits,
        continues=_digest(facts.get("continues")),
        experiment=_read_experiment(facts.get("experiment"), visits),
        pretrained=_read_pretrained(facts.get("pretrained")),
    )


def _check_network(name: Any) -> None:
    try:
        backbones.check_name(str(name))
    except SettingsError as error:
        raise ModelError(str(error)) from None


def _read_pretrained(value: Any) -> Pretrained | None:
    if value is None:
        return None
    texts = {field.name: group(value)[field.name] for field in dataclasses.fields(Pretrained)}
    for name, text in texts.items():
        if not isinstance(text, str) or not text or len(text) > LONGEST_FACT or not text.isprintable():
            raise ValueError(f"the {name} of its pre-trained weights is not a short text")
    _check_network(texts["architecture"])
    if backbones.is_of_hub(texts["architecture"]):
        raise ValueError("its pre-trained weights do not name their architecture")
    _digest(texts["sha256"])
    return Pretrained(**texts)


def _read_class(value: Mapping[str, Any]) -> LearnedClass:
    return LearnedClass(
        label=decode_label(value["label"]),
        task=whole(value["task"], 0, MOST_CLASSES),
        images=whole(value["images"], 1, 1 << 62),
        learned=_date(value["learned"]),
        measured=(measured := whole(value.get("measured", 0), 0, 1 << 62)),
        right=whole(value.get("right", 0), 0, measured),
    )


def _read_visit(value: Mapping[str, Any]) -> Visit:
    if value["kind"] not in KINDS:
        raise ValueError(f"a visit is one of {', '.join(KINDS)}, not {value['kind']!r}")
    return Visit(
        kind=value["kind"],
        classes=whole(value["classes"], 1, MOST_CLASSES),
        images=whole(value["images"], 1, 1 << 62),
        date=_date(value["date"]),
        made_with=tuple(_read_made_with(group(each)) for each in _list(value.get("made_with", []))),
        measured=read_measured(value.get("measured")),
    )


def _with_version(visits: list[Visit], facts: Mapping[str, Any]) -> tuple[Visit, ...]:
    """Return visits, the last one of format 1 with the version of efcil, which is all that its cards say of it."""
    if visits and facts["format"] == 1 and isinstance(facts.get("efcil"), str):
        way = _read_made_with({"efcil": facts["efcil"]})
        visits[-1] = dataclasses.replace(visits[-1], made_with=(way,))
    return tuple(visits)


def _read_made_with(value: Mapping[str, Any]) -> dict[str, Any]:
    for name, part in value.items():
        if name not in MADE_WITH or not isinstance(part, str | bool | int) or len(str(part)) > LONGEST_NAME:
            raise ValueError(f"a visit was made with {name!r}, which is not a version, device or precision")
    return dict(value)


def _read_experiment(value: Any, visits: Sequence[Visit]) -> Mapping[str, Any] | None:
    if value is None:
        return None
    if "made_with" not in group(value):  # efcil 0.2.0 says it in the visits alone
        ways = [[dict(way) for way in visit.made_with] for visit in visits]
        value = {**value, "made_with": ways + [[] for _ in range(len(ways), len(_list(value["task_sizes"])))]}
    if set(group(value)) != set(EXPERIMENT):
        raise ValueError("its facts of an experiment have unknown or missing names")
    sizes = [whole(size, 1, MOST_CLASSES) for size in _list(value["task_sizes"])]
    order = [whole(original, 0, MOST_CLASSES) for original in _list(value["class_order"])]
    if sorted(order) != list(range(sum(sizes))):
        raise ValueError("its class order does not fit its tasks")
    for name in ("agnostic", "aware"):
        rows = [_list(row) for row in _list(value[name])]
        measured = [cell for row in rows for cell in row if cell is not None]
        if [len(row) for row in rows] != [len(sizes)] * len(sizes) or not all(0 <= cell <= 100 for cell in measured):
            raise ValueError("its accuracies are not percentages for its tasks")
    whole(value["completed"], 1, len(sizes))
    if len(_list(value["made_with"])) != len(sizes):
        raise ValueError("it does not say how its tasks were computed")
    for way in (way for ways in value["made_with"] for way in _list(ways)):
        _read_made_with(group(way))
    for name in ("identity", "seconds"):
        group(value[name])
    if not all(isinstance(commit, str) for commit in _list(value["commits"])):
        raise ValueError("its commits are no names")
    return group(value)


def _digest(value: Any) -> str | None:
    if value is not None and not re.fullmatch("[0-9a-f]{64}", str(value)):
        raise ValueError("it does not continue from a state")
    return value


def check_consistency(card: Card) -> None:
    """Raise a ModelError if parts of a card contradict each other."""
    added, left = [visit.classes for visit in card.visits if visit.kind == "task"], card.task_sizes
    fits = sum(added) - card.forgotten == sum(left) == len(card.classes) and all(map(int.__le__, left, added))
    if not fits or [each.task for each in card.classes] != [task for task, n in enumerate(left) for _ in range(n)]:
        raise ModelError("its classes and its tasks do not fit together")
    if card.visits and not card.classes:
        raise ModelError("it knows no class")
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


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) > MOST_CLASSES:
        raise TypeError("a list is expected")
    return value


def _triple(value: Any) -> tuple[float, float, float]:
    first, second, third = (float(part) for part in _list(value))
    return first, second, third


def _date(value: Any) -> str:
    datetime.datetime.fromisoformat(value)
    return str(value)
