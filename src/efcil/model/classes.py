"""Classes of a model renamed, forgotten or merged: in memory, and in a model folder.

A model in memory changes only when everything has succeeded. In a folder the change is made as `teach` makes its own:
locked, refused while a task is unfinished, and saved in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from efcil.core import classifiers
from efcil.data.sources.listing import is_text
from efcil.engine import checkpoint, hardware
from efcil.errors import SettingsError, printable, shortened, some, unknown
from efcil.files import locked, refuse_full, refuse_unwritable
from efcil.methods.base import Method
from efcil.methods.memory import POOLED, SHARED, ClassMemory
from efcil.model import contents, readme
from efcil.model import folder as model_folder
from efcil.model.blending import refit_heads
from efcil.model.card import LearnedClass, ModelError, Visit, check_consistency, encode_label, made_with, now
from efcil.model.images import folder_label, plain_name
from efcil.model.in_memory import Model
from efcil.model.learning import unfinished_task

Result = TypeVar("Result")
#: What a class has learned into the weights of a network cannot be separated from the rest.
NETWORK = "network weights"


@dataclass(frozen=True)
class Forgotten:
    """What was removed with some classes, as numbers by title, and what is left of them in what all classes share."""

    labels: tuple[Hashable, ...]
    images: int
    removed: Mapping[str, int]
    shared: tuple[str, ...]


@dataclass(frozen=True)
class Merged:
    """The class that several have become, and how.

    `combined` is what is now as if measured on all of their images together. Heads were fitted again to the Gaussians
    of all classes (`refitted`), or the rows of these classes `averaged`; neither matters to a method without heads.
    """

    label: Hashable
    labels: tuple[Hashable, ...]
    images: int
    combined: tuple[str, ...]
    refitted: bool
    averaged: bool


# -- in memory -------------------------------------------------------------------------------------------------------


def find(model: Model, names: Sequence[str]) -> list[Hashable]:
    """Return the labels that these names mean: the label itself, or the one that is written like it (3 for "3")."""
    by_name: dict[str, list[Hashable]] = {}
    for label in model.card.labels:
        by_name.setdefault(folder_label(str(label)), []).append(label)
    found: list[Hashable] = []
    for name in names:
        same = [label for label in model.card.labels if label == name] or by_name.get(folder_label(name), [])
        if len(same) != 1:
            if same:
                raise ModelError(f"Several classes are written {name!r}. Change this model from Python.")
            raise unknown("class", name, by_name, ModelError)
        found += same
    return found


def rename(model: Model, old: Hashable, new: Hashable) -> None:
    """Give a class another label. Nothing else changes."""
    (place,) = _places(model, [old])
    if new == old:
        raise ModelError(f"The class {str(old)!r} has this name already.")
    _refuse_name(model, new, [old])
    card = model.card
    classes = list(card.classes)
    classes[place] = replace(classes[place], label=new)
    visit = Visit("rename", 1, classes[place].images, now())
    # The tensors stay the same, so the visit ends with those it began with.
    continues = checkpoint.digest(model.tensors())
    model.card = replace(
        card, classes=tuple(classes), visits=(*card.visits, visit), continues=continues, experiment=None
    )


def forget(model: Model, labels: Sequence[Hashable]) -> Forgotten:
    """Remove all that is stored about these classes alone; what all classes share stays as it is."""
    gone = set(_places(model, labels))
    card = model.card
    if len(gone) == len(card.classes):
        raise ModelError("A model keeps at least one class; delete the folder instead.")
    before = {row.title: row.numbers for row in contents.inventory(card, model.tensors())}
    kept = tuple(each for place, each in enumerate(card.classes) if place not in gone)
    images = sum(card.classes[place].images for place in gone)
    method = _changed(model, lambda method: method.forget_classes(gone))
    _adopt(model, method, kept, "forget", len(gone), images)
    after = {row.title: row.numbers for row in contents.inventory(model.card, model.tensors())}
    removed = {title: count - after.get(title, 0) for title, count in before.items() if count > after.get(title, 0)}
    return Forgotten(tuple(labels), images, removed, shared(model))


def merge(model: Model, labels: Sequence[Hashable], into: Hashable) -> Merged:
    """Make several classes one called `into`, which may be the name of one of them; it takes the place of the first.

    Means and covariances become those of all images together. Heads are fitted to the Gaussians of all classes where
    the method classifies with its heads and keeps what that needs; else the rows of these classes are averaged.
    """
    places = sorted(_places(model, labels))
    if len(places) < 2:
        raise ModelError("Merging needs at least two classes.")
    _refuse_name(model, into, labels)
    card, first = model.card, places[0]
    counts = [each.images for each in card.classes]
    images = sum(counts[place] for place in places)
    one = replace(card.classes[first], label=into, images=images, measured=0, right=0)
    kept = tuple(one if n == first else each for n, each in enumerate(card.classes) if n not in places[1:])
    about = model.ready.about
    refitted = about.decides_by_heads and classifiers.automatic(about.keeps) == "rebalanced"

    def change(method: Method) -> None:
        method.merge_classes(places, counts)
        if refitted:
            refit_heads(model, method)

    _adopt(model, _changed(model, change), kept, "merge", len(places), images)
    own = [each for name, each in model.ready.purposes().items() if not name.startswith("memory.")]
    trained = classifiers.HEADS in about.keeps or any(each.per_class for each in own)
    memory: ClassMemory | None = getattr(model.ready, "memory", None)
    average = memory is not None and memory.form in SHARED and memory.form != POOLED
    combined = () if memory is None else ("means",) if average else memory.keeps
    return Merged(into, tuple(labels), images, combined, refitted, trained and not refitted)


def shared(model: Model) -> tuple[str, ...]:
    """Return the titles of what all classes share, in which traces of a class that is gone may be left.

    A pre-trained network that no image of the user has changed is not among them.
    """
    return (*([] if model.card.as_pretrained else [NETWORK]), *model.ready.belongs_to_all())


def _changed(model: Model, change: Callable[[Method], None]) -> Method:
    """Return a copy of the model's method, changed as asked."""
    model.settle()
    with hardware.switches(model.execution, deterministic=False), model.execution.stream():
        method = model.twin()
        change(method)
        model.settle()
    return method


def _adopt(model: Model, method: Method, kept: tuple[LearnedClass, ...], kind: str, classes: int, images: int) -> None:
    """Let the model be what a change has made of it, once a model with these tensors was found to work."""
    way = made_with(model.execution, deterministic=False)
    card = replace(
        model.card,
        classes=kept,
        visits=(*model.card.visits, Visit(kind, classes, images, now(), (way,))),
        continues=checkpoint.digest(model.tensors()),
        experiment=None,
    )
    check_consistency(card)
    tensors = {name: value.detach().cpu().clone() for name, value in method.state_dict().items()}
    model_folder.restore(card, model_folder.skeleton(card), tensors)
    loaded = model.blueprint.load(tensors)  # as a process that reads the folder has it
    model.card = card
    model.adopt(loaded)


def _places(model: Model, labels: Sequence[Hashable]) -> list[int]:
    """Return the places of classes that the model must know."""
    place = {label: number for number, label in enumerate(model.card.labels)}
    for label in labels:
        if label not in place:
            raise unknown("class", str(label), map(str, place), ModelError)
    if len(set(labels)) < len(labels):
        raise ModelError(f"A class is named twice: {some(list(labels))}. Name each once.")
    if not labels:
        raise ModelError("No class is named.")
    return [place[label] for label in labels]


def _refuse_name(model: Model, name: Hashable, instead_of: Sequence[Hashable]) -> None:
    """Refuse a name that another class has, or one like it, or that no folder of images could have."""
    encode_label(name)
    others = [label for label in model.card.labels if label not in instead_of]
    if name in others or (isinstance(name, str) and folder_label(name) in map(folder_label, map(str, others))):
        raise ModelError(f"There is a class called {str(name)!r} already. To make two classes one, use `efcil merge`.")
    if not isinstance(name, str):
        return
    twin = next((label for label in others if plain_name(label) == plain_name(name)), None)
    if twin is not None:
        raise ModelError(
            f"{name!r} differs from {str(twin)!r}, which the model knows, only in upper and lower case or in outer "
            "spaces. Choose a clearly different name."
        )
    if not name.strip() or name.startswith(".") or set(name) & set("/\0") or len(name) > contents.LONGEST:
        raise SettingsError(
            f"A class cannot be called {shortened(name)!r}: no folder of images can have that name. Give a name of 1 "
            f"to {contents.LONGEST} characters, without /, that does not begin with a dot."
        )
    if not is_text(name):
        raise SettingsError(
            f"A name that is not valid UTF-8 ({printable(shortened(name))}) cannot name a class. Give another name."
        )


# -- in a folder -----------------------------------------------------------------------------------------------------


def in_folder(folder: Path, change: Callable[[Model], Result], device: str = "auto") -> tuple[Model, Result]:
    """Change the model of a folder: return it, and what `change`, one of the functions above, returns.

    The folder is locked meanwhile. The old model is replaced in one step, and only if everything has succeeded.
    """
    model_folder.refuse_run(folder)
    if not model_folder.exists(folder):
        model_folder.read(folder)  # says what there is instead of a model
    refuse_unwritable(folder, 0)
    with locked(folder / ".lock"):
        model = Model.load(folder, device)
        _refuse_unfinished(folder, model)
        checkpoint.tidy(folder, model_folder.STEM)
        before = model.card
        result = change(model)
        tensors = model.tensors()
        refuse_full(folder, sum(value.numel() * value.element_size() for value in tensors.values()) + (1 << 20))
        model_folder.write(folder, model.card, tensors)
        readme.renew(folder, before, model.card)
    return model, result


def _refuse_unfinished(folder: Path, model: Model) -> None:
    """Refuse a model with an unfinished task, which begins from the model as it is and could not be resumed."""
    begun, partial = unfinished_task(folder), folder / model_folder.PARTIAL
    if begun is not None and begun.led_to(model.card):
        checkpoint.remove(partial)  # a process that finished its task was killed before it could
    elif begun is not None:
        raise ModelError(
            f"{folder} has an unfinished task, which learns {some(begun.classes)}. Finish it first: repeat the `efcil "
            f"learn` command that started it. To discard it instead, remove {partial}."
        )
