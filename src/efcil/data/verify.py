"""Is a dataset what it is known to be? Counts, sizes, broken files and images in both splits, said in words."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from efcil.data import cache
from efcil.data.checksum import digest
from efcil.data.decode import Encoded, decode_intact, sides
from efcil.data.deferred import DeferredImages
from efcil.data.domains import MERGING, need_domains
from efcil.data.images import Dataset, ImageSet
from efcil.data.sources import Known, Source, SourceOptions
from efcil.errors import DataError, some
from efcil.output import counted
from efcil.settings.benchmark import MERGED

#: Images with a shorter side below this are no photographs.
TINY_SIDE = 8
#: Share of test images that may be among the training images of a dataset of which that is not known.
FEW_IN_BOTH = 0.005
NAMED_BROKEN = 20
_WORDS = {"train": "training", "test": "test"}


@dataclass(frozen=True)
class Findings:
    """What was found: lines that describe the dataset, and what is wrong with it."""

    lines: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Checked:
    """The checksums of the images of a split (None for a broken one), their shorter sides, and what is broken."""

    checksums: list[str | None]
    short_sides: list[int]
    broken: list[str]


def verify_dataset(source: Source, path: Path | None, options: SourceOptions) -> Findings:
    """Read every image of a dataset and compare it with what the dataset is known to have."""
    found = Findings()
    # All images: a limit would hide what is missing.
    options = replace(options, images_per_class="all", held_out=None if source.splits_itself else options.held_out)
    source.check(path, options)
    try:
        dataset = source.load(path, options)
    except DataError as error:
        found.wrong.append(str(error))
        return found
    _check_cache(found, dataset)
    known = source.known
    if known is not None and (options.class_list is not None and options.class_list not in source.class_lists):
        known = replace(known, classes=None, train=None, test=None)  # the user's own choice of classes
    checked = {}
    swapped = known is not None and _swapped(dataset, known)
    if swapped:
        found.wrong.append("The splits are swapped: the training images are the published test images.")
    for split, images in (("train", dataset.train), ("test", dataset.test)):
        _check_counts(found, dataset, split, images, None if swapped else known)
        try:
            checked[split] = _check_images(images)
        except DataError as error:  # a file that holds many images cannot be read on
            found.wrong.append(str(error))
            return found
        _check_sides(found, split, checked[split], dataset)
    _check_classes(found, dataset, known)
    if options.answers == MERGED:
        _check_answers(found, dataset)
    _check_duplicates(found, dataset, checked, known)
    return found


def _check_cache(found: Findings, dataset: Dataset) -> None:
    """Check every byte of decoded images that are kept: when they are loaded, only samples of large files are."""
    entry = cache.entry_of(dataset.train.images)
    if entry is not None and entry.exists():  # not if they were decoded just now
        try:
            cache.verify(entry)
        except DataError as error:
            found.wrong.append(str(error))


def _check_classes(found: Findings, dataset: Dataset, known: Known | None) -> None:
    if known is not None and known.classes not in (None, dataset.number_of_classes):
        found.wrong.append(f"It has {dataset.number_of_classes:,} classes instead of {known.classes:,}.")
    twice = [name for name, count in Counter(dataset.class_names).items() if count > 1]
    if twice:
        found.wrong.append(f"Several classes have the same name: {some(twice)}.")


def _check_answers(found: Findings, dataset: Dataset) -> None:
    try:
        domains = need_domains(dataset.class_names, dataset.name, MERGING)
    except DataError as error:
        found.wrong.append(str(error))
        return
    found.lines.append(f"{'domains':<9} {', '.join(domains.names)}: {domains.counted}")
    if missing := domains.incomplete():
        found.lines.append(f"{'':<9} {counted(len(missing), 'answer')} not in all domains: {some(missing)}")


def _swapped(dataset: Dataset, known: Known) -> bool:
    """Say whether each split has as many images of every class as the other one should have, and not its own number."""

    def fits(images: ImageSet, limits: tuple[int, int] | None) -> bool:
        counts = images.class_counts(dataset.number_of_classes)
        return limits is not None and bool(((counts >= limits[0]) & (counts <= limits[1])).all())

    own = fits(dataset.train, known.train_of_class) and fits(dataset.test, known.test_of_class)
    return not own and fits(dataset.train, known.test_of_class) and fits(dataset.test, known.train_of_class)


def _check_counts(found: Findings, dataset: Dataset, split: str, images: ImageSet, known: Known | None) -> None:
    counts, word = images.class_counts(dataset.number_of_classes), _WORDS[split]
    spread = f"{counts.min():,}" if counts.min() == counts.max() else f"{counts.min():,} to {counts.max():,}"
    found.lines.append(f"{word:<9} {len(images):>9,} images, {spread} of a class")
    empty = np.flatnonzero(counts == 0)
    if len(empty):
        found.wrong.append(f"{counted(len(empty), 'class')} without {word} images: {_named(dataset, empty)}.")
    if known is None:
        return
    total = known.train if split == "train" else known.test
    if total is not None and len(images) != total:
        more = "more" if len(images) > total else "fewer"
        found.wrong.append(
            f"There are {len(images):,} {word} images instead of {total:,}: {abs(len(images) - total):,} {more}."
        )
    limits = known.train_of_class if split == "train" else known.test_of_class
    if limits is None:
        return
    low, high = limits
    odd = np.flatnonzero((counts > 0) & ((counts < low) | (counts > high)))
    if len(odd):
        expected = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        names = _named(dataset, odd, counts)
        found.wrong.append(
            f"{counted(len(odd), 'class')} with another number of {word} images than {expected}: {names}."
        )


def _check_sides(found: Findings, split: str, checked: _Checked, dataset: Dataset) -> None:
    word = _WORDS[split]
    if checked.broken:
        more = len(checked.broken) - NAMED_BROKEN
        reasons = " ".join(checked.broken[:NAMED_BROKEN]) + (f" And {more:,} more." if more > 0 else "")
        found.wrong.append(f"{counted(len(checked.broken), f'{word} image')} cannot be used. {reasons}")
    short = checked.short_sides
    if not short:
        return
    middle = int(np.median(short))
    found.lines.append(
        f"{'':<9} shorter side {min(short):,} to {max(short):,} pixels, half of them at least {middle:,}"
    )
    tiny = sum(side < TINY_SIDE for side in short)
    if tiny:
        found.wrong.append(f"{counted(tiny, f'{word} image')} with a shorter side of less than {TINY_SIDE} pixels.")
    if middle < dataset.image_size / 2:
        found.wrong.append(
            f"Half of the {word} images have a shorter side of at most {middle} pixels, but the network sees "
            f"{dataset.image_size}: this may be a smaller copy of the dataset."
        )


def _check_duplicates(found: Findings, dataset: Dataset, checked: dict[str, _Checked], known: Known | None) -> None:
    train: dict[str, int] = {}
    contradictory = repeated = 0
    for row, checksum in enumerate(checked["train"].checksums):
        if checksum is None:
            continue
        if checksum in train:
            repeated += 1
            contradictory += int(dataset.train.labels[row] != dataset.train.labels[train[checksum]])
        train.setdefault(checksum, row)
    if repeated:
        other = f", {contradictory:,} of them in another class" if contradictory else ""
        found.lines.append(f"{'repeated':<9} {repeated:>9,} training images are copies of others{other}")
    in_both = [row for row, each in enumerate(checked["test"].checksums) if each is not None and each in train]
    count = f"{'in both':<9} {len(in_both):>9,} test images are among the training images"
    published = 0 if known is None else known.in_both
    if not in_both:
        found.lines.append(count)
    elif published is None and len(in_both) <= FEW_IN_BOTH * len(dataset.test):
        found.lines.append(f"{count}; so few may be in the published dataset, too")
    elif published is not None and len(in_both) <= published:
        found.lines.append(f"{count}, as in the published dataset")
    else:
        names = _named(dataset, np.unique(dataset.test.labels[in_both]))
        usual = f", {published:,} in the published dataset" if published else ""
        found.wrong.append(
            f"{counted(len(in_both), 'test image')} among the training images{usual}: accuracy would be too high. "
            f"Classes: {names}."
        )


def _check_images(images: ImageSet) -> _Checked:
    if isinstance(images.images, DeferredImages):
        return _check_files(images.images)
    checksums: list[str | None] = [hashlib.sha256(np.asarray(each).tobytes()).hexdigest() for each in images.images]
    return _Checked(checksums, [], [])


def _check_files(images: DeferredImages) -> _Checked:
    """Decode every image and read its header and checksum."""
    checksums: list[str | None] = [None] * len(images)
    short_sides: list[int] = []
    broken: list[tuple[int, str]] = []
    for places, encoded in images.supply.read(images.rows):
        views = np.empty((len(places), *images.shape[1:]), np.uint8)
        failed = {each.index: str(each.error) for each in decode_intact(views, encoded, images.shapes.view)}
        intact = [place for place in range(len(places)) if place not in failed]
        with ThreadPoolExecutor() as pool:
            sums = pool.map(_checksum, [encoded[place] for place in intact])
            shapes = pool.map(sides, [encoded[place] for place in intact])
            for place, checksum, shape in zip(intact, sums, shapes, strict=True):
                checksums[places[place]] = checksum
                short_sides.append(min(shape))
        broken += [(int(places[place]), text) for place, text in failed.items()]
    return _Checked(checksums, short_sides, [text for _, text in sorted(broken)])


def _checksum(encoded: Encoded) -> str:
    return digest(encoded.content) if isinstance(encoded.content, Path) else hashlib.sha256(encoded.content).hexdigest()


def _named(dataset: Dataset, labels: Sequence[int] | np.ndarray, counts: np.ndarray | None = None) -> str:
    names = [
        dataset.class_names[label] if counts is None else f"{dataset.class_names[label]} ({counts[label]:,})"
        for label in labels
    ]
    return some(names)
