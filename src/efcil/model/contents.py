"""What a model folder holds, held against what efcil writes there: every file, field and tensor; the rest is named.

An image needs no tensor of its own to be kept: any file, text or number too many could hold it. So files are known by
name, fields of the card by name and length, tensors by name, purpose, type, shape and what their numbers can be.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from efcil import methods
from efcil.engine import checkpoint
from efcil.files import is_lock
from efcil.methods.base import Method
from efcil.model import folder as model_folder
from efcil.model import purposes
from efcil.model.card import FORMAT, Card, ModelError
from efcil.settings import STAGES, Recipe, options

#: Characters beyond which a text or number is no name, version, date or setting. No folder's name is longer.
LONGEST = 255
#: Fields that may be made of parts, whose length is that of all parts together.
_MADE_OF_PARTS = re.compile(r"\.(label|overrides\..*)")
#: Numbers from which on a row may hold an image, the share of them that must be pixels, and how many different ones.
_FEWEST_PIXELS, _SHARE_OF_PIXELS, _FEWEST_VALUES = 64, 0.25, 8
#: How far a covariance may be from a symmetric matrix without negative eigenvalues, in parts of its largest number.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Extras:
    """What a model folder holds beside the model: files by their path in it, parts of its files in words."""

    files: list[str]
    parts: list[str]
    unfinished: bool


@dataclass(frozen=True)
class Stored:
    """All tensors of one purpose. `per_class` is None for the network, which belongs to all classes together."""

    title: str
    use: str
    recovery: str
    tensors: int
    numbers: int
    bytes: int
    per_class: float | None


# -- files and fields ------------------------------------------------------------------------------------------------


def extras(folder: Path, card: Card) -> Extras:
    """Return what a model folder holds that is no part of the model, but for its tensors."""
    stem, tensors = model_folder.STEM, model_folder.tensor_file(folder)
    own, partial = {f"{stem}.json", tensors.name}, folder / model_folder.PARTIAL
    unfinished = checkpoint.exists(partial)
    if unfinished:
        own |= {f"{model_folder.PARTIAL}/{file.name}" for file in partial.iterdir() if checkpoint.owns(file.name)}
    parts = [*_of_description(folder / f"{stem}.json", card), *_of_tensor_file(tensors)]
    return Extras(sorted(_other_files(folder, own)), parts, unfinished)


def _other_files(folder: Path, own: set[str]) -> Iterator[str]:
    """Yield all files and links below a folder but a model's own and its lock."""

    def refuse(error: OSError) -> None:
        raise ModelError(f"{error.filename} cannot be read ({error.strerror}), so nobody knows what is in it.")

    for place, folders, names in os.walk(folder, onerror=refuse):
        links = [name for name in folders if (Path(place) / name).is_symlink()]  # not walked into
        for path in (Path(place) / name for name in (*names, *links)):
            relative = path.relative_to(folder).as_posix()
            if relative not in own and not (relative == ".lock" and is_lock(path)):
                yield relative


def _of_description(file: Path, card: Card) -> Iterator[str]:
    """Yield what a description says that is no part of a card, or longer than that part can be."""
    text = file.read_text(encoding="utf-8")
    described = json.loads(text)
    if described["facts"]["format"] < FORMAT:
        yield f"{file.name}: a card of an earlier version"
        return
    known = {name: described.get(name) for name in ("format", "checksum")} | {
        "facts": _as_written(card, described["facts"]),
        "tensors": {name: described["tensors"].get(name) for name in ("file", "bytes", "sha256")},
    }
    yield from (f"{file.name}: {place[: 2 * LONGEST]}" for place in _strange(described, known, ""))
    if text != json.dumps(described, indent=1) + "\n":
        yield f"{file.name}: more text than its fields make"


def _as_written(card: Card, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a card as it would be written by the version that wrote it, without settings that do not exist."""
    known: dict[str, Any] = json.loads(json.dumps(card.to_json())) | {"efcil": str(facts.get("efcil"))}
    names = {f"{stage}.{name}" for stage in STAGES for name in options(Recipe)}
    names |= set(options(methods.get(card.settings.method).Settings))
    asked = known["settings"]["overrides"]
    known["settings"]["overrides"] = {name: value for name, value in asked.items() if name in names}
    return known


def _strange(found: Any, known: Any, place: str) -> Iterator[str]:
    """Yield fields that are not known, values of which the reader makes others, and what is too long for a name."""
    whole = _MADE_OF_PARTS.search(place)
    if isinstance(found, dict) and isinstance(known, dict) and not whole:
        for name, value in found.items():
            inner = f"{place}.{name}" if place else name
            yield from _strange(value, known[name], inner) if name in known else [inner]
    elif isinstance(found, list) and isinstance(known, list) and len(found) == len(known) and not whole:
        for number, (value, other) in enumerate(zip(found, known, strict=True)):
            yield from _strange(value, other, f"{place}[{number}]")
    elif found != known or len(json.dumps(found, ensure_ascii=False)) > LONGEST + 2:
        yield place


def _of_tensor_file(file: Path) -> Iterator[str]:
    """Yield what the header of a safetensors file has beside names, types, shapes and places of tensors."""
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    yield from (f"{file.name}: metadata {name[:LONGEST]!r}" for name in header.get("__metadata__") or ())
    # Written without spaces and filled up to a multiple of eight bytes.
    if length - len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()) >= 8:
        yield f"{file.name}: more text in its header than its fields make"


# -- tensors ---------------------------------------------------------------------------------------------------------


def inventory(card: Card, tensors: Mapping[str, Tensor]) -> list[Stored]:
    """Return what is stored, by purpose, in the order of the list of purposes; unexplained tensors come last."""
    known = purposes_of(card)
    network = {f"network.{name}" for name in model_folder.skeleton(card).network.state_dict()}
    groups: dict[purposes.Purpose | None, list[str]] = {}
    for name in tensors:
        groups.setdefault(purposes.purpose_of(name, known), []).append(name)
    unknown = purposes.Purpose("", "unexplained", "unknown", "Unknown: nobody has said what these tensors are.")
    rows = []
    for purpose in (*known, None):
        if purpose in groups:
            named, names = purpose or unknown, groups[purpose]
            numbers = sum(tensors[name].numel() for name in names)
            size = sum(tensors[name].numel() * tensors[name].element_size() for name in names)
            per_class = None if network.issuperset(names) else numbers / max(1, len(card.classes))
            rows.append(Stored(named.title, named.use, named.recovery, len(names), numbers, size, per_class))
    return rows


def purposes_of(card: Card) -> tuple[purposes.Purpose, ...]:
    """Return the purposes that a tensor of this model may have."""
    return purposes.including(model_folder.skeleton(card).purposes())


def misfits(card: Card, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return tensors that cannot be what their names say, and why: name -> a sentence without its full stop."""
    return dict([*_pixels(tensors), *_too_large(card, tensors), *model_folder.misfits(card, tensors).items()])


def false_covariances(method: Method) -> list[str]:
    """Say which class covariances of a loaded method are none; an image in the place of one would not be symmetric."""
    statistics = method.statistics()
    if statistics is None or statistics.covariances is None:
        return []
    found = []
    for number, stored in enumerate(statistics.covariances):
        matrix = stored.double()
        tolerance = _ROUNDING * float(matrix.abs().max())
        skewed = float((matrix - matrix.T).abs().max()) > tolerance
        raised = matrix + tolerance * torch.eye(len(matrix), dtype=matrix.dtype)
        if tolerance > 0 and (skewed or int(torch.linalg.cholesky_ex(raised).info) != 0):
            found.append(f"class covariance {number} is none: it is not symmetric, or has negative variances")
    return found


def _too_large(card: Card, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield tensors that have grown beyond what the classes need: one row per class where the method begins with none.

    A list that the method begins with none in has an entry per task at most: rows for its classes in up to four
    rotations, or a matrix between features.
    """
    method, classes = model_folder.skeleton(card), len(card.classes)
    expected, widest = method.state_dict(), max(4 * classes, method.network.feature_size)
    for name, tensor in tensors.items():
        shape, limits, number = tuple(tensor.shape), [widest, widest], name.rpartition(".")[2]
        fits = tensor.dtype == torch.float32 and number.isdecimal() and int(number) < len(card.task_sizes)
        if name in expected:
            template, fits = expected[name].shape, True
            limits = [want or (max(template) if place else classes) for place, want in enumerate(template)]
        if not fits or len(shape) > len(limits) or any(map(int.__gt__, shape, limits)):
            yield name, f"the tensor {name!r} has shape {shape} where {classes} classes need at most {tuple(limits)}"


def _pixels(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield tensors with a row of numbers that pixels have: whole from 2 to 255, or 255ths. Training gives others."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.numel() < _FEWEST_PIXELS:
            continue
        length = tensor[0].numel() if tensor[0].numel() >= _FEWEST_PIXELS else tensor.numel()
        for scale in (1.0, 255.0):
            values = tensor.float().reshape(-1, length) * scale
            whole = ((values - values.round()).abs() < 1e-4) & (values > 1.5) & (values < 255.5)
            enough = whole.sum(dim=1) >= max(_FEWEST_PIXELS, _SHARE_OF_PIXELS * length)
            for row in enough.nonzero().flatten().tolist():
                pixels = values[row][whole[row]].round()
                if len(pixels.unique()) >= _FEWEST_VALUES:
                    yield name, f"row {row} of the tensor {name!r} holds {len(pixels)} numbers that only pixels are"
