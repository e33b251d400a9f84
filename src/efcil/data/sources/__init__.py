"""Datasets: one small file each, found by existing.

To add one, put a module into this package with one subclass of `Source`; nothing else has to be edited.
"""

from __future__ import annotations

import abc
import importlib
import inspect
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from efcil.data.images import Dataset
from efcil.errors import DataError, SettingsError, unknown


@dataclass(frozen=True)
class SourceOptions:
    """What can be asked of a source beyond where its files are."""

    cache: Path | None = None  # folder for decoded images; None: as described in efcil.data.cache
    held_out: float | None = None  # share of each class that becomes the test set, where the files do not say
    image_size: int | None = None  # side of the square images, where the files do not say
    seed: int = 0  # of the choice of held-out images
    workers: int | None = None  # threads that decode; None: one per processor core


class Source(abc.ABC):
    """A dataset that can be loaded. Subclasses set the attributes and implement `load`."""

    name: ClassVar[str]
    title: ClassVar[str]
    description: ClassVar[str]  # one line
    expected: ClassVar[str]  # which files are expected where, and how to get them
    needs_path: ClassVar[bool]
    splits_itself: ClassVar[bool] = True  # it comes with its own test set, so `held_out` has no meaning
    fixed_size: ClassVar[int | None] = None  # the side of its images, where that cannot be chosen

    @abc.abstractmethod
    def load(self, path: Path | None, options: SourceOptions) -> Dataset:
        """Return the dataset read from `path`; errors say which file is missing or broken."""

    def check(self, path: Path | None, options: SourceOptions) -> None:
        """Refuse a missing path and options that this source cannot follow."""
        if path is None and self.needs_path:
            raise DataError(f"{self.title} needs a path to its files. {self.expected}")
        if path is not None and not path.exists():
            raise DataError(f"{path} does not exist. {self.expected}")
        if options.held_out is not None and self.splits_itself:
            raise SettingsError(f"{self.title} comes with its own test set, so held_out cannot be set. Leave it out.")
        if self.fixed_size is not None and options.image_size not in (None, self.fixed_size):
            raise SettingsError(
                f"{self.title} images are {self.fixed_size} x {self.fixed_size} pixels, so image_size cannot be "
                f"{options.image_size}. Leave it out."
            )
        if options.image_size is not None and options.image_size < 1:
            raise SettingsError(f"image_size must be at least 1, not {options.image_size}.")
        if options.workers is not None and options.workers < 1:
            raise SettingsError(f"workers must be at least 1, not {options.workers}.")


def sources() -> dict[str, Source]:
    """Return every source of this package by name."""
    found: dict[str, Source] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for _, kind in inspect.getmembers(module, inspect.isclass):
            # Only classes written in that very module: an imported one is listed by its own.
            if issubclass(kind, Source) and kind.__module__ == module.__name__ and not inspect.isabstract(kind):
                found[kind.name] = kind()
    return dict(sorted(found.items()))


def load_dataset(name: str, path: Path | None = None, options: SourceOptions | None = None) -> Dataset:
    """Load the dataset called `name` from `path` (None where it needs none)."""
    available = sources()
    if name not in available:
        raise unknown("dataset", name, available)
    source, options = available[name], options or SourceOptions()
    path = None if path is None else path.expanduser()
    source.check(path, options)
    return source.load(path, options)
