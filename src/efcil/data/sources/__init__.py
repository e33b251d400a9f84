"""Datasets: one small file each, found automatically.

To add one, put a module into this package with one subclass of `Source`; nothing else has to be edited.
"""

from __future__ import annotations

import abc
import importlib
import inspect
import pkgutil
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from efcil.data.domains import MERGING, need_domains
from efcil.data.images import Dataset, ImageSet
from efcil.errors import DataError, SettingsError, shortened, unknown
from efcil.settings.benchmark import MERGED


@dataclass(frozen=True)
class SourceOptions:
    """Options of a source, besides the place of its files."""

    cache: Path | None = None  # folder for decoded images; None: as described in efcil.data.cache
    held_out: float | None = None  # share of each class's training images that becomes the test set
    image_size: int | None = None  # side of the square images, if the files do not determine it
    seed: int = 0  # of the choice of held-out images
    workers: int | None = None  # threads that decode; None: one per processor core
    images_per_class: str = "all"  # of the training images: all, mean (of the classes), or a number
    class_list: str | None = None  # which classes: a name that the source knows, or a file with one per line
    stored_side: int | None = None  # shorter side to which larger whole images are shrunk
    columns: str | None = None  # "image,label": columns of Parquet files
    splits: str | None = None  # "train,test": splits of a dataset of the Hub
    answers: str | None = None  # merged or separate: classes are answers in domains; None: they have no domains


@dataclass(frozen=True)
class Known:
    """What a published dataset has; None where that is not known. Pairs are the fewest and most images of a class."""

    classes: int | None = None
    train: int | None = None
    test: int | None = None
    train_of_class: tuple[int, int] | None = None
    test_of_class: tuple[int, int] | None = None
    in_both: int | None = None  # test images that are also training images, pixel by pixel


class Source(abc.ABC):
    """A dataset that can be loaded. Subclasses set the attributes and implement `load`."""

    name: ClassVar[str]
    title: ClassVar[str]
    description: ClassVar[str]  # one line
    expected: ClassVar[str]  # which files are expected where, and how to get them
    needs_path: ClassVar[bool]
    splits_itself: ClassVar[bool] = True  # it has its own test set, which held-out images may replace
    fixed_size: ClassVar[int | None] = None  # the side of its images, if that cannot be chosen
    known: ClassVar[Known | None] = None  # what `efcil data verify` compares its files with
    uses: ClassVar[tuple[str, ...]] = ()  # options that only some sources have a use for
    class_lists: ClassVar[tuple[str, ...]] = ()  # names of lists of classes, besides files

    @abc.abstractmethod
    def load(self, path: Path | None, options: SourceOptions) -> Dataset:
        """Return the dataset read from `path`; errors say which file is missing or broken."""

    def check(self, path: Path | None, options: SourceOptions) -> None:
        """Refuse a missing path and options that this source does not support."""
        if path is None and self.needs_path:
            raise DataError(f"{self.title} needs a path to its files. {self.expected}")
        if path is not None and not path.exists():
            raise DataError(f"{path} does not exist. {self.expected}")
        if options.held_out is not None and not 0 < options.held_out < 1:
            raise SettingsError(f"held_out is a share between 0 and 1, for example 0.2; {options.held_out} is not.")
        if self.fixed_size is not None and options.image_size not in (None, self.fixed_size):
            raise SettingsError(
                f"{self.title} images are {self.fixed_size} x {self.fixed_size} pixels, so image_size cannot be "
                f"{options.image_size}. Leave it out."
            )
        if options.image_size is not None and options.image_size < 1:
            raise SettingsError(f"image_size must be at least 1, not {options.image_size}.")
        if options.workers is not None and options.workers < 1:
            raise SettingsError(f"workers must be at least 1, not {options.workers}.")
        most_images(options.images_per_class, 1, 1)
        for name in ("class_list", "stored_side", "columns", "splits"):
            if getattr(options, name) is not None and name not in self.uses:
                raise SettingsError(f"{self.title} has no use for {name}. Leave it out.")
        listed = options.class_list
        if listed is not None and listed not in self.class_lists and not Path(listed).expanduser().is_file():
            raise SettingsError(f"{unknown('list of classes', listed, self.class_lists)} It is not a file either.")

    def recognise(self, path: Path) -> None:  # noqa: B027 - not every source can tell
        """Refuse a place that holds other files than expected, as far as names and columns tell; nothing is decoded."""

    def named(self, name: str) -> Source:
        """Return the source for the dataset called `name`, of sources that read many: hub:OWNER/NAME."""
        raise SettingsError(f"{self.title} is one dataset; leave out {':' + name!r}.")


def sources() -> dict[str, Source]:
    """Return every source of this package by name."""
    found: dict[str, Source] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for _, kind in inspect.getmembers(module, inspect.isclass):
            # Only classes defined in that module: an imported one is listed by its own module.
            if issubclass(kind, Source) and kind.__module__ == module.__name__ and not inspect.isabstract(kind):
                found[kind.name] = kind()
    return dict(sorted(found.items()))


def load_dataset(name: str, path: Path | None = None, options: SourceOptions | None = None) -> Dataset:
    """Load the dataset called `name` from `path` (None if it needs none)."""
    source, options = find_source(name), options or SourceOptions()
    path = None if path is None else path.expanduser()
    source.check(path, options)
    given = options.held_out is None or not source.splits_itself
    dataset = source.load(path, options if given else replace(options, held_out=None))
    if options.answers == MERGED:
        need_domains(dataset.class_names, dataset.name, MERGING)
    dataset = limited(dataset, options.images_per_class)
    if options.held_out is None or given:
        return dataset
    return held_out_of(dataset, options.held_out, options.seed)


def find_source(name: str) -> Source:
    """Return the source of the dataset called `name`; hub:OWNER/NAME is one of the source `hub`."""
    available = sources()
    family, colon, rest = name.partition(":")
    if colon and family in available:
        return available[family].named(rest)
    if name not in available:
        raise unknown("dataset", name, available)
    return available[name]


def most_images(images_per_class: str, images: int, classes: int) -> int | None:
    """Return how many training images a class may have, of `images` of `classes`; None if there is no limit."""
    if images_per_class == "all":
        return None
    if images_per_class == "mean":
        return images // classes
    if not images_per_class.isdecimal() or len(images_per_class) > 9 or int(images_per_class) < 1:
        raise SettingsError(
            f"images_per_class is all, mean or a number of at least 1, but it is {shortened(images_per_class)!r}."
        )
    return int(images_per_class)


def limited(dataset: Dataset, images_per_class: str) -> Dataset:
    """Return the dataset with at most so many training images of a class: the first ones, in their order."""
    labels = dataset.train.labels
    most = most_images(images_per_class, len(labels), dataset.number_of_classes)
    if most is None or len(labels) == 0 or dataset.train.class_counts(dataset.number_of_classes).max() <= most:
        return dataset
    kept = np.sort(np.concatenate([np.flatnonzero(labels == label)[:most] for label in np.unique(labels)]))
    return replace(dataset, train=ImageSet(dataset.train.images[kept], labels[kept]))


def held_out_of(dataset: Dataset, share: float, seed: int) -> Dataset:
    """Return the dataset with a share of each class's training images in place of its test images."""
    labels = dataset.train.labels
    rows = []
    for label, name in enumerate(dataset.class_names):
        members = np.flatnonzero(labels == label)
        if len(members) == 1:
            raise DataError(f"Class {name!r} has only one training image, which cannot be held out as well.")
        rows.append(members[held_out_choice(len(members), share, seed, name)])
    chosen = np.sort(np.concatenate(rows))
    kept = np.setdiff1d(np.arange(len(labels)), chosen)
    train, test = (ImageSet(dataset.train.images[each], labels[each]) for each in (kept, chosen))
    return replace(dataset, train=train, test=test)


def held_out_choice(count: int, share: float, seed: int, name: str) -> list[int]:
    """Return which of the `count` images of a class are held out, in order: at least one, and never all."""
    held_out = min(max(1, round(count * share)), count - 1)
    # Also seeded with the class's name: adding a class does not change the choice in the others.
    return sorted(random.Random(f"{seed}/{name}").sample(range(count), max(held_out, 0)))
