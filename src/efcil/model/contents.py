"""Compare a model folder with what efcil writes there: every file, field and tensor; report everything else.

An image can be hidden without a tensor of its own: any extra file, text or number could contain it. So files are known
by name, fields of the card by name and length, tensors by name, purpose, type, shape and possible values.
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
from efcil.core.covariance import whole
from efcil.engine import checkpoint
from efcil.files import is_lock
from efcil.methods.base import Method
from efcil.methods.memory import ClassMemory
from efcil.model import folder as model_folder
from efcil.model import purposes, readme
from efcil.model.card import Card, ModelError
from efcil.settings import STAGES, Recipe, options

#: Most characters of a name, version, date or setting. No folder's name is longer.
LONGEST = 255
#: Fields that may consist of parts; their length is that of all parts together.
_MADE_OF_PARTS = re.compile(r"\.(label|overrides\..*)")
#: Least numbers in a row that may hold an image, the share of them that must be pixels, and how many different ones.
_FEWEST_PIXELS, _SHARE_OF_PIXELS, _FEWEST_VALUES = 64, 0.25, 8
#: How far a covariance may be from symmetric without negative eigenvalues, relative to its largest number.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Extras:
    """What a model folder contains besides the model: files by their path in it, parts of its files as text."""

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


@dataclass(frozen=True)
class ClassRows:
    """Everything of one purpose that has rows for every class: how many rows there are, and how many classes need."""

    title: str
    rows: int
    needed: int


# -- files and fields ------------------------------------------------------------------------------------------------


def extras(folder: Path, card: Card) -> Extras:
    """Return what a model folder contains that is not part of the model, tensors excepted."""
    stem, tensors = model_folder.STEM, model_folder.tensor_file(folder)
    own, partial = {f"{stem}.json", tensors.name}, folder / model_folder.PARTIAL
    if readme.is_readme(folder / readme.NAME, card):  # made from the card, byte for byte: it holds nothing else
        own.add(readme.NAME)
    unfinished = checkpoint.exists(partial)
    if unfinished:
        own |= {f"{model_folder.PARTIAL}/{file.name}" for file in partial.iterdir() if checkpoint.owns(file.name)}
    parts = [*_of_description(folder / f"{stem}.json", card), *_of_tensor_file(tensors)]
    return Extras(sorted(_other_files(folder, own)), parts, unfinished)


def _other_files(folder: Path, own: set[str]) -> Iterator[str]:
    """Yield all files and links below a folder except a model's own and its lock."""

    def refuse(error: OSError) -> None:
        raise ModelError(f"{error.filename} cannot be read ({error.strerror}), so its contents are unknown.")

    for place, folders, names in os.walk(folder, onerror=refuse):
        links = [name for name in folders if (Path(place) / name).is_symlink()]  # not walked into
        for path in (Path(place) / name for name in (*names, *links)):
            relative = path.relative_to(folder).as_posix()
            if relative not in own and not (relative == ".lock" and is_lock(path)):
                yield relative


def _of_description(file: Path, card: Card) -> Iterator[str]:
    """Yield what a description contains that is not part of a card, or is too long for its field."""
    text = file.read_text(encoding="utf-8")
    described = json.loads(text)
    known = {name: described.get(name) for name in ("format", "checksum")} | {
        "facts": _as_written(card, described["facts"]),
        "tensors": {name: described["tensors"].get(name) for name in ("file", "bytes", "sha256")},
    }
    yield from (f"{file.name}: {place[: 2 * LONGEST]}" for place in _strange(described, known, ""))
    if text != json.dumps(described, indent=1) + "\n":
        yield f"{file.name}: more text than its fields need"


def _as_written(card: Card, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a card as it would be written by the version that wrote it, without settings that do not exist."""
    known: dict[str, Any] = json.loads(json.dumps(card.to_json())) | {"efcil": str(facts.get("efcil"))}
    names = {f"{stage}.{name}" for stage in STAGES for name in options(Recipe)}
    names |= set(options(methods.get(card.settings.method).Settings))
    asked = known["settings"]["overrides"]
    known["settings"]["overrides"] = {name: value for name, value in asked.items() if name in names}
    if facts["format"] == 1:
        known["settings"]["dataset"] = known["settings"].pop("preset")
    return known | {"format": facts["format"]}


def _strange(found: Any, known: Any, place: str) -> Iterator[str]:
    """Yield unknown fields, values that change when they are read and written again, and text too long for a name."""
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
    """Yield what the header of a safetensors file has besides names, types, shapes and offsets of tensors."""
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    yield from (f"{file.name}: metadata {name[:LONGEST]!r}" for name in header.get("__metadata__") or ())
    # Written without spaces and padded to a multiple of eight bytes.
    if length - len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()) >= 8:
        yield f"{file.name}: more text in its header than its fields need"


# -- tensors ---------------------------------------------------------------------------------------------------------


def inventory(card: Card, tensors: Mapping[str, Tensor]) -> list[Stored]:
    """Return what is stored, by purpose, in the order of the list of purposes; unexplained tensors come last."""
    known = purposes_of(card)
    network = {f"network.{name}" for name in model_folder.skeleton(card).network.state_dict()}
    groups: dict[purposes.Purpose | None, list[str]] = {}
    for name in tensors:
        groups.setdefault(purposes.purpose_of(name, known), []).append(name)
    unknown = purposes.Purpose("", "unexplained", "unknown", "Unknown: the purpose of these tensors is not declared.")
    rows = []
    for purpose in (*known, None):
        if purpose in groups:
            named, names = purpose or unknown, groups[purpose]
            numbers = sum(tensors[name].numel() for name in names)
            size = sum(tensors[name].numel() * tensors[name].element_size() for name in names)
            per_class = None if network.issuperset(names) else numbers / max(1, len(card.classes))
            recovery = purposes.recovery(named, as_pretrained=card.as_pretrained)
            rows.append(Stored(named.title, named.use, recovery, len(names), numbers, size, per_class))
    return rows


def class_rows(card: Card, tensors: Mapping[str, Tensor]) -> list[ClassRows]:
    """Return how many rows everything has that has rows for every class; what has none yet is left out."""
    found = []
    for purpose in purposes_of(card):
        own = [tensor for name, tensor in tensors.items() if re.fullmatch(purpose.pattern, name) and tensor.dim()]
        rows = sum(len(tensor) for tensor in own)
        if purpose.per_class > 0 and rows:
            found.append(ClassRows(purpose.title, rows, purpose.per_class * len(card.classes)))
    return found


def false_rows(card: Card, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return what has more or fewer rows than the classes need, as sentences without full stop."""
    count = len(card.classes)
    return [
        f"{each.title}: there are {each.rows} rows, but {count} {'class needs' if count == 1 else 'classes need'} "
        f"{each.needed}"
        for each in class_rows(card, tensors)
        if each.rows != each.needed
    ]


def spare_covariances(method: Method) -> list[str]:
    """Return whether a loaded method has covariances that no class uses, likewise."""
    spare = sum(module.unused() for module in method.modules() if isinstance(module, ClassMemory))
    return [f"class covariances: no class uses {spare} of them"] if spare else []


def purposes_of(card: Card) -> tuple[purposes.Purpose, ...]:
    """Return the purposes that a tensor of this model may have."""
    method = model_folder.skeleton(card)
    return purposes.including(method.purposes(), method.network.backbone)


def misfits(card: Card, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return tensors that cannot be what their names say, and why: name -> a sentence without full stop."""
    return dict([*_pixels(tensors), *_too_large(card, tensors), *model_folder.misfits(card, tensors).items()])


def false_covariances(method: Method) -> list[str]:
    """Return which class covariances of a loaded method are invalid; an image stored as one would not be symmetric."""
    statistics = method.statistics()
    if statistics is None or statistics.covariances is None:
        return []
    found = []
    for number, stored in enumerate(statistics.covariances):
        matrix = whole(stored.double())
        tolerance = _ROUNDING * float(matrix.abs().max())
        skewed = float((matrix - matrix.T).abs().max()) > tolerance
        raised = matrix + tolerance * torch.eye(len(matrix), dtype=matrix.dtype)
        if tolerance > 0 and (skewed or int(torch.linalg.cholesky_ex(raised).info) != 0):
            found.append(f"class covariance {number} is invalid: it is not symmetric, or has negative variances")
    return found


def _too_large(card: Card, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield tensors larger than the classes need: one row per class if the method starts with none.

    A list that is empty at first has at most one entry per task: rows for its classes in up to four rotations, or a
    matrix between features.
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
            yield name, f"the tensor {name!r} has shape {shape}, but {classes} classes need at most {tuple(limits)}"


def _pixels(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield tensors with a row of numbers typical of pixels: whole from 2 to 255, or 255ths. Trained values differ."""
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
                    yield name, f"row {row} of the tensor {name!r} has {len(pixels)} numbers that look like pixels"
