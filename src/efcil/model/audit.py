"""The audit of a model: is all in its folder explained, does it store an image, what do its numbers reveal?

docs/audit.md says what this proves and what it does not prove.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from efcil.errors import some
from efcil.model import contents, matching, purposes, readme
from efcil.model import folder as model_folder
from efcil.model.card import Card, ModelError
from efcil.model.images import InputError, Pictures, class_folders, folder_label
from efcil.model.in_memory import Model
from efcil.model.membership import Membership, membership


@dataclass(frozen=True)
class Coverage:
    """How much of what the model has learned is covered by an audit's images; counts of images are None if unknown."""

    classes: int
    of_classes: int
    images: int | None
    of_images: int | None
    not_checked: list[str]
    partly_checked: list[str]
    not_known: list[str]


@dataclass(frozen=True)
class Audit:
    """What an audit found. It fails if something stored is unexplained or matches an image.

    `forgotten` is how many classes were forgotten or became part of another one; with `rows`, which says for everything
    that has rows per class how many there are, it shows that none of theirs is left.
    """

    stored: list[contents.Stored]
    rows: list[contents.ClassRows]
    forgotten: int
    numbers_of_an_image: int
    unaccounted: list[str]
    misfits: list[str]
    extras: contents.Extras
    matches: list[matching.Match]
    images: int
    coverage: Coverage
    membership: list[Membership]
    no_membership: str | None

    @property
    def failed(self) -> bool:
        """Whether the model stores an image, or something unexplained."""
        return bool(self.reasons)

    @property
    def verdict(self) -> str:
        """The outcome in one or more sentences."""
        if self.failed:
            return "FAILED: " + " And ".join(self.reasons)
        if self.coverage.not_checked or self.coverage.partly_checked:
            return "Passed for these images: none of them is stored. The other training images were not given."
        return "Passed: no image is stored."

    @property
    def reasons(self) -> list[str]:
        """Why it fails, each reason with what to do."""
        images, extras = [match.file for match in self.matches if match.found], self.extras
        unexplained, misfits = some(self.unaccounted, 20), "; ".join(self.misfits[:5])
        found = (
            (images, f"the model stores what matches an image: {some(images)}."),
            (unexplained, f"{unexplained} has no known purpose. The method must declare one with `keep`."),
            (misfits, f"{misfits}. Restore the model from a copy, or train it again."),
            (extras.files, f"files in the folder are not part of a model: {some(extras.files)}. {self._elsewhere}"),
            (
                extras.parts,
                f"its files contain what efcil does not write: {some(extras.parts)}. Load the model and save it again "
                "in Python (IncrementalClassifier.load, save): that writes only the model's own parts.",
            ),
            (
                extras.unfinished,
                "a task is unfinished; its checkpoint in partial/ was not checked. Finish it with the `efcil learn` "
                "command that started it, or delete partial/, and audit again.",
            ),
        )
        return [sentence for there, sentence in found if there]

    @property
    def _elsewhere(self) -> str:
        """What to do with files that are not part of a model."""
        if readme.NAME not in self.extras.files:
            return "Move them elsewhere."
        # One that another version has written cannot be told from one that somebody has changed.
        return f"Move them elsewhere; `efcil card MODEL --output MODEL/{readme.NAME}` writes that file anew."

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {"passed": not self.failed, "verdict": self.verdict} | dataclasses.asdict(self)


def audit(folder: Path, data: Path, held_out: Path | None = None) -> Audit:
    """Audit a model folder with the images it was trained on and, if there are any, with held-out images."""
    card, tensors = model_folder.read_raw(folder)
    extras = contents.extras(folder, card)  # first: another process may replace the model meanwhile
    paths, labels = class_folders(data)
    covered = _coverage(card, labels)
    if covered.classes == 0:
        raise InputError(
            f"{data} has images of {some(covered.not_known)}, which the model does not know; it knows "
            f"{some(covered.not_checked)}. Give its training images, in folders named after its classes."
        )
    training = Pictures(paths).pixels(card.image_size)
    other_paths, other_labels = class_folders(held_out or data, held_out=held_out is None)
    others = Pictures(other_paths).pixels(card.image_size)
    _refuse_copies(training, paths, others, other_paths)
    missing = purposes.unaccounted(tensors, contents.purposes_of(card))
    misfits = [reason for name, reason in contents.misfits(card, tensors).items() if name not in missing]
    misfits = misfits or contents.false_rows(card, tensors)
    members: list[Membership] = []
    reason: str | None = "there are no held-out images of its classes; give some with --held-out"
    try:
        if not misfits:
            method = model_folder.skeleton(card)
            model_folder.restore(card, method, tensors)
            misfits = [*contents.spare_covariances(method), *contents.false_covariances(method)]
        if misfits:
            raise ModelError(misfits[0])
        members = membership(Model(card, method, device="cpu"), (training, labels), (others, other_labels))
    except ModelError as error:
        reason = f"the model cannot be used: {error}"
        misfits = misfits or [str(error)] * (not missing)
    return Audit(
        stored=contents.inventory(card, tensors),
        rows=contents.class_rows(card, tensors),
        forgotten=card.forgotten,
        numbers_of_an_image=3 * card.image_size**2,
        unaccounted=missing,
        misfits=misfits,
        extras=extras,
        matches=matching.match(tensors, training, paths),
        images=len(paths),
        coverage=covered,
        membership=members,
        no_membership=None if members else reason,
    )


def _coverage(card: Card, labels: Sequence[str]) -> Coverage:
    """Return how much of what the model has learned is covered by images of these classes."""
    given = Counter(labels)
    learned = {folder_label(str(each.label)): each.images + card.held_out(each) for each in card.classes}
    found = {name: count for name, count in learned.items() if name in given}
    counted = all(learned.values())
    return Coverage(
        classes=len(found),
        of_classes=len(learned),
        images=sum(min(given[name], count) for name, count in found.items()) if counted else None,
        of_images=sum(learned.values()) if counted else None,
        not_checked=[name for name in learned if name not in given],
        partly_checked=[name for name, count in found.items() if given[name] < count],
        not_known=sorted(name for name in given if name not in learned),
    )


def _refuse_copies(training: np.ndarray, paths: Sequence[Path], others: np.ndarray, held_out: Sequence[Path]) -> None:
    """Refuse held-out images that are also training images: no attack could separate these."""
    seen = {hashlib.sha256(image.tobytes()).digest(): path for image, path in zip(training, paths, strict=True)}
    for image, path in zip(others, held_out, strict=True):
        twin = seen.get(hashlib.sha256(image.tobytes()).digest())
        if twin is not None and image.min() < image.max():  # blank images are all the same
            raise InputError(
                f"{path} is both a training and a held-out image: it shows the same as {twin}. Give "
                "held-out images (--held-out) that are not training images."
            )
