"""The audit of a model: is all in its folder accounted for, does it store an image, what do its numbers betray?"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from efcil.errors import some
from efcil.model import contents, format, matching, purposes
from efcil.model.card import Card, ModelError
from efcil.model.contents import Extras
from efcil.model.encoded import encoded_files
from efcil.model.images import InputError, Pictures, class_folders, folder_label
from efcil.model.matching import Images, Match
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
class Coverage:
    """How much of what the model has learned the images of an audit are; counts of images are None if unknown."""

    classes: int
    of_classes: int
    images: int | None
    of_images: int | None
    not_checked: list[str]
    partly_checked: list[str]
    not_known: list[str]

    @property
    def complete(self) -> bool:
        """Whether there are as many images of every class as it was learned from."""
        return not self.not_checked and not self.partly_checked


@dataclass(frozen=True)
class Audit:
    """What an audit found. It has failed when something stored is unexplained or must be taken for an image."""

    stored: list[Stored]
    unaccounted: list[str]
    misfits: list[str]
    extras: Extras
    encoded: list[str]
    matches: list[Match]
    images: int
    coverage: Coverage
    unrelated: str
    lookalikes: int
    membership: list[Membership]
    no_membership: str | None

    @property
    def failed(self) -> bool:
        """Whether the model stores an image, or something that nobody has explained."""
        return self.holds_images or bool(self.reasons)

    @property
    def holds_images(self) -> bool:
        """Whether something stored must be taken for an image."""
        return bool(self.encoded) or any(match.found for match in self.matches)

    @property
    def verdict(self) -> str:
        """The outcome in one sentence."""
        if self.holds_images:
            return "FAILED: the model stores what must be taken for an image."
        if self.reasons:
            return "FAILED: no image was found, but " + " And ".join(self.reasons)
        if not self.coverage.complete:
            return "Passed for these images: none of them is stored. Others that the model learned from were not given."
        return "Passed: no image is stored."

    @property
    def reasons(self) -> list[str]:
        """Why it cannot pass though no image was found, each with what to do."""
        found = []
        if self.unaccounted:
            names = ", ".join(self.unaccounted)
            found.append(f"nobody has said what {names} is for. The method's author can, where it is stored (`keep`).")
        if self.misfits:
            found.append(f"{'; '.join(self.misfits)}. Restore the model from a copy, or train it again.")
        if self.extras.files:
            names = some(self.extras.files)
            found.append(f"files lie in the folder that are no part of a model: {names}. Put them elsewhere.")
        if self.extras.parts:
            found.append(f"its files hold what efcil does not write: {some(self.extras.parts)}. Remove it.")
        if self.extras.unfinished:
            found.append(
                "a task is unfinished, whose state in partial/ was not looked at. Finish it with the `efcil learn` "
                "command that began it, or delete partial/, and audit again."
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        values = dataclasses.asdict(self)
        for value, match in zip(values["matches"], self.matches, strict=True):
            value["found"] = match.found
        values["coverage"]["complete"] = self.coverage.complete
        return {"passed": not self.failed, "verdict": self.verdict} | values


def audit(
    folder: Path, data: Path, held_out: Path | None = None, progress: Callable[[float], None] = lambda share: None
) -> Audit:
    """Audit a model folder with the images it was trained on and, where there are some, with images it was not.

    `progress` is told the share of the comparisons with images that is done, which is what takes time.
    """
    card, tensors = format.read_raw(folder)
    # At once: comparing takes long, and somebody may put a new model in place meanwhile.
    extras = contents.extras(folder, card)
    encoded = encoded_files(format.tensor_file(folder), tensors)
    paths, labels = class_folders(data)
    covered = coverage(card, labels)
    if covered.classes == 0:
        raise InputError(
            f"{data} has images of {some(covered.not_known)}, which the model does not know; it knows "
            f"{some(covered.not_checked)}. Give the images that it learned from, in folders named after its classes."
        )
    training = _read(paths, labels, card.image_size)
    held_out_paths, others = _others(data, held_out, card.image_size)
    images = Images(training[0], Pictures(paths).pixels)
    if others is not None:
        _refuse_copies(training[0], paths, others[0], held_out_paths)
    unrelated, compared, lookalikes = _unrelated(images, None if others is None else others[0], held_out_paths)
    factor, summand = card.normalisation.constants(torch.device("cpu"))
    matches = [
        dataclasses.replace(one, file=str(paths[one.image]))
        for one in matching.match(tensors, images, compared, (factor.tolist(), summand.tolist()), progress)
    ]
    missing = purposes.unaccounted(tensors, _known(card))
    misfits = [reason for name, reason in format.misfits(card, tensors).items() if name not in missing]
    members: list[Membership] = []
    reason = None
    try:
        model = _model(card, tensors, misfits)
        if others is None:
            reason = "there are no held-out images; give some with --held-out"
        else:
            members = membership(model, training, others)
            reason = None if members else "the images are of classes that the model does not know"
    except ModelError as error:
        reason = f"the model cannot be used: {error}"
        if not misfits and not missing:
            misfits = [str(error)]
    return Audit(
        stored=inventory(card, tensors),
        unaccounted=missing,
        misfits=misfits,
        extras=extras,
        encoded=encoded,
        matches=matches,
        images=len(paths),
        coverage=covered,
        unrelated=unrelated,
        lookalikes=lookalikes,
        membership=members,
        no_membership=reason,
    )


def _model(card: Card, tensors: Mapping[str, Tensor], misfits: Sequence[str]) -> Model:
    """Return the model that these tensors make; a ModelError says why they make none."""
    if misfits:
        raise ModelError(misfits[0])
    method = format.skeleton(card)
    format.restore(card, method, tensors)
    return Model(card, method, device="cpu")


def coverage(card: Card, labels: Sequence[str]) -> Coverage:
    """Return how much of what the model has learned images of these classes are."""
    given = Counter(labels)
    learned = {folder_label(str(each.label)): each.images for each in card.classes}
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
    return purposes.including(format.skeleton(card).purposes())


def _read(paths: list[Path], labels: list[str], size: int) -> tuple[np.ndarray, list[Any]]:
    return Pictures(paths).pixels(size), list(labels)


def _others(data: Path, held_out: Path | None, size: int) -> tuple[list[Path], tuple[np.ndarray, list[Any]] | None]:
    """Return held-out images: those asked for, else those that lie beside the training images, else none."""
    paths, labels = class_folders(held_out) if held_out is not None else class_folders(data, held_out=True)
    return paths, _read(paths, labels, size) if paths else None


def _unrelated(training: Images, others: np.ndarray | None, held_out: Sequence[Path]) -> tuple[str, Images, int]:
    """Return what chance is judged by, in words and as images, and how many held-out images are not fit for that."""
    alike = np.zeros(0, bool) if others is None else matching.lookalikes(training.pixels, others)
    finer = training.finer
    if others is None or alike.all():
        scrambled = Images(
            matching.scrambled(training.pixels),
            finer and (lambda side, start, stop: matching.scrambled(finer(side, start, stop), seed=start)),
        )
        return "the training images with random phases", scrambled, int(alike.sum())
    # What looks like a training image says nothing about chance.
    chosen = Pictures([path for path, left_out in zip(held_out, alike, strict=True) if not left_out])
    return "held-out images", Images(others[~alike], chosen.pixels), int(alike.sum())


def _refuse_copies(training: np.ndarray, paths: Sequence[Path], others: np.ndarray, held_out: Sequence[Path]) -> None:
    """Refuse held-out images that show what a training image shows, turned and mirrored or not.

    A stored image is told by resembling a training image more than any held-out one, which it cannot resemble more
    than its copy.
    """
    seen = {_digest(image): path for image, path in zip(training, paths, strict=True)}
    for image, path in zip(others, held_out, strict=True):
        if image.min() == image.max():
            continue  # blank ones are all the same, and resemble nothing
        for turns in range(4):
            turned = np.rot90(image, turns)
            twin = seen.get(_digest(turned)) or seen.get(_digest(turned[:, ::-1]))
            if twin is not None:
                raise InputError(
                    f"{path} is both among the training and the held-out images: it shows the same as {twin}. Give "
                    "held-out images (--held-out) that are no training images."
                )


def _digest(image: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(image).data).digest()
