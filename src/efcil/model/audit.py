"""The audit of a model: is all it stores accounted for, does it store an image, and what do its numbers betray?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from efcil import methods
from efcil.model import format, matching, purposes
from efcil.model.card import Card, ModelError
from efcil.model.images import InputError, Pictures, class_folders
from efcil.model.matching import Match
from efcil.model.membership import Membership, membership
from efcil.model.model import Model


@dataclass(frozen=True)
class Stored:
    """All tensors of one purpose."""

    title: str
    use: str
    recovery: str
    tensors: int
    numbers: int
    bytes: int


@dataclass(frozen=True)
class Audit:
    """What an audit found. It has failed when a tensor is unexplained or must be taken for an image."""

    stored: list[Stored]
    unaccounted: list[str]
    matches: list[Match]
    images: int
    unrelated: str
    membership: list[Membership]
    no_membership: str | None

    @property
    def failed(self) -> bool:
        """Whether the model stores an image, or something that nobody has explained."""
        return bool(self.unaccounted) or self.holds_images

    @property
    def holds_images(self) -> bool:
        """Whether something stored must be taken for an image."""
        return any(match.found for match in self.matches)

    @property
    def verdict(self) -> str:
        """The outcome in one sentence."""
        if self.holds_images:
            return "FAILED: the model stores what must be taken for an image."
        if self.unaccounted:
            names = ", ".join(self.unaccounted)
            return (
                f"FAILED: no image was found, but nobody has said what {names} is for. The method's author can, in its "
                "attribute `purposes`."
            )
        return "Passed: no image is stored."

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        values = dataclasses.asdict(self)
        for value, match in zip(values["matches"], self.matches, strict=True):
            value["found"] = match.found
        return {"passed": not self.failed} | values


def audit(folder: Path, data: Path, held_out: Path | None = None) -> Audit:
    """Audit a model folder with the images it was trained on and, where there are some, with images it was not."""
    card, tensors = format.read_raw(folder)
    training = _read(*class_folders(data), card.image_size)
    others = _others(data, held_out, card.image_size)
    if others is None:
        unrelated = "the training images with random phases"
        pixels = matching.scrambled(training[0])
    else:
        unrelated, pixels = "held-out images", others[0]
    factor, summand = card.normalisation.constants(torch.device("cpu"))
    matches = matching.match(tensors, training[0], pixels, (factor.tolist(), summand.tolist()))
    members: list[Membership] = []
    reason = None
    if others is None:
        reason = "there are no held-out images; give some with --held-out"
    else:
        try:
            members = membership(Model.load(folder, device="cpu"), training, others)
            reason = None if members else "the images are of classes that the model does not know"
        except ModelError as error:
            reason = str(error)
    missing = purposes.unaccounted(tensors, _known(card))
    return Audit(inventory(card, tensors), missing, matches, len(training[0]), unrelated, members, reason)


def inventory(card: Card, tensors: Mapping[str, Tensor]) -> list[Stored]:
    """Return what is stored, by purpose, in the order of the list of purposes; unexplained tensors come last."""
    known = _known(card)
    groups: dict[purposes.Purpose | None, list[Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(purposes.purpose_of(name, known), []).append(tensor)
    unknown = purposes.Purpose("", "unexplained", "unknown", "Unknown: nobody has said what these tensors are.")
    rows = []
    for purpose in (*known, None):
        if purpose in groups:
            named, members = purpose or unknown, groups[purpose]
            numbers = sum(tensor.numel() for tensor in members)
            size = sum(tensor.numel() * tensor.element_size() for tensor in members)
            rows.append(Stored(named.title, named.use, named.recovery, len(members), numbers, size))
    return rows


def _known(card: Card) -> tuple[purposes.Purpose, ...]:
    return purposes.including(methods.get(card.settings.method).purposes)


def _read(paths: list[Path], labels: list[str], size: int) -> tuple[np.ndarray, list[Any]]:
    return Pictures(paths).pixels(size), list(labels)


def _others(data: Path, held_out: Path | None, size: int) -> tuple[np.ndarray, list[Any]] | None:
    """Return held-out images: those asked for, else those that lie beside the training images, else none."""
    paths, labels = class_folders(held_out) if held_out is not None else class_folders(data, held_out=True)
    if held_out is not None:
        inside = {path.resolve() for path in class_folders(data)[0]}
        shared = [path for path in paths if path.resolve() in inside]
        if shared:
            raise InputError(f"{shared[0]} is both among the training and the held-out images. Give others.")
    return _read(paths, labels, size) if paths else None
