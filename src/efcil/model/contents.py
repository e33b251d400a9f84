"""What lies in a model folder and is no part of a model: other files, fields that no card has, text beside the tensors.

An image needs no tensor to be kept. So everything in the folder is held against what efcil writes there, and the rest
is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efcil import methods
from efcil.engine import checkpoint
from efcil.files import is_lock
from efcil.model import format, from_run
from efcil.model.card import Card, ModelError
from efcil.settings import Recipe
from efcil.settings.model import STAGES
from efcil.settings.options import options

#: Characters beyond which a text is no name, version or date any more. No folder's name is longer.
LONGEST_TEXT = 255
_VERSION = re.compile(r"[0-9A-Za-z.+!_-]{1,40}")


@dataclass(frozen=True)
class Extras:
    """What a model folder holds beside the model: files by their path in it, parts of its files in words."""

    files: list[str]
    parts: list[str]
    unfinished: bool

    def __bool__(self) -> bool:
        return bool(self.files or self.parts or self.unfinished)


def extras(folder: Path, card: Card) -> Extras:
    """Return what a model folder holds that is no part of the model."""
    stem = format.stem_of(folder)
    tensors = format.tensor_file(folder)
    parts = [*_of_description(folder / f"{stem}.json", card), *_of_tensor_file(tensors)]
    unfinished = checkpoint.exists(folder / format.PARTIAL)
    return Extras(_files(folder, {f"{stem}.json", tensors.name}), parts, unfinished)


def _files(folder: Path, own: set[str]) -> list[str]:
    """Return all files below a folder but the model's own, those of an unfinished task, and a lock."""

    def refuse(error: OSError) -> None:
        raise ModelError(f"{error.filename} cannot be read ({error.strerror}), so nobody knows what is in it.")

    own = own | set(_of_unfinished(folder))
    found = []
    for place, folders, names in os.walk(folder, onerror=refuse):
        links = [name for name in folders if (Path(place) / name).is_symlink()]  # not walked into
        for name in (*names, *links):
            path = Path(place) / name
            relative = path.relative_to(folder).as_posix()
            if relative not in own and not (relative == ".lock" and is_lock(path)):
                found.append(relative)
    return sorted(found)


def _of_unfinished(folder: Path) -> Iterator[str]:
    """Yield the files of an unfinished task."""
    partial = folder / format.PARTIAL
    if checkpoint.exists(partial):
        yield f"{format.PARTIAL}/state.json"
        with contextlib.suppress(checkpoint.CheckpointError):
            yield f"{format.PARTIAL}/{checkpoint.describe(partial).file.name}"


# -- the description -------------------------------------------------------------------------------------------------


def _of_description(file: Path, card: Card) -> list[str]:
    """Return what a description says that is no part of a card."""
    text = file.read_text(encoding="utf-8")
    described = json.loads(text)
    facts = described["facts"]
    found = [name for name in described if name not in ("format", "facts", "tensors", "checksum")]
    found += [f"tensors.{name}" for name in described["tensors"] if name not in ("file", "bytes", "sha256")]
    if file.stem == from_run.STEM:
        found += [f"facts.{name}" for name in facts if name not in from_run.FACTS]
    else:
        found += _unknown(facts, _as_written(card, facts), "facts")
        found += _overrides(card)
    found += _long(facts, "facts")
    if text != json.dumps(described, indent=1) + "\n":
        found.append("more text than its fields make")
    return [f"{file.name}: {each}" for each in dict.fromkeys(found)]


def _as_written(card: Card, facts: Mapping[str, Any]) -> Any:
    """Return a card as it would be written now, but for the version, which is that of whoever wrote it."""
    known = json.loads(json.dumps(card.to_json()))
    version = facts.get("efcil")
    return known | ({"efcil": version} if isinstance(version, str) and _VERSION.fullmatch(version) else {})


def _unknown(found: Any, known: Any, place: str) -> Iterator[str]:
    """Yield the places of fields that are not known, and of values of which the reader makes others."""
    if isinstance(found, dict) and isinstance(known, dict):
        for name, value in found.items():
            if name in known:
                yield from _unknown(value, known[name], f"{place}.{name}")
            else:
                yield f"{place}.{name[:LONGEST_TEXT]}"
    elif isinstance(found, list) and isinstance(known, list) and len(found) == len(known):
        for number, (value, other) in enumerate(zip(found, known, strict=True)):
            yield from _unknown(value, other, f"{place}[{number}]")
    elif found != known:
        yield place


def _overrides(card: Card) -> Iterator[str]:
    """Yield the settings that were asked for and do not exist."""
    own = options(methods.get(card.settings.method).Settings)
    known = {*own, *(f"{stage}.{name}" for stage in STAGES for name in options(Recipe))}
    for name in card.settings.overrides:
        if name not in known:
            yield f"facts.settings.overrides.{name[:LONGEST_TEXT]}"


def _long(value: Any, place: str) -> Iterator[str]:
    """Yield the places of texts, and of labels and settings made of parts, that are longer than a name can be."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _long(part, f"{place}.{name[:LONGEST_TEXT]}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _long(part, f"{place}[{number}]")
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT:
            yield f"{place}, a text of {len(value):,} characters"
    elif re.search(r"\.(label|overrides\..*)$", place) and len(json.dumps(value)) > 2 * LONGEST_TEXT:
        yield f"{place}, longer than a name"


# -- the tensor file -------------------------------------------------------------------------------------------------


def _of_tensor_file(file: Path) -> list[str]:
    """Return what the header of a safetensors file has beside names, types, shapes and places of tensors."""
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    found = [f"metadata {name[:LONGEST_TEXT]!r}" for name in header.get("__metadata__") or ()]
    # Written without spaces and filled up to a multiple of eight bytes.
    if length - len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()) >= 8:
        found.append("more text in its header than its fields make")
    return [f"{file.name}: {each}" for each in found]
