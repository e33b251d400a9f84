"""What datasets of large photographs share: whole images that are decoded task by task, with ImageNet's constants."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from efcil.data.deferred import STORED_SIDE, DeferredImages, FileSupply, Shapes
from efcil.data.images import IMAGENET_MEAN, IMAGENET_STD, Dataset, ImageSet
from efcil.data.sources import SourceOptions
from efcil.data.sources.listing import Files
from efcil.errors import DataError, some

SIZE = 224


def shapes_of(options: SourceOptions) -> Shapes:
    """Return the shapes that the options ask for."""
    return Shapes(options.image_size or SIZE, options.stored_side or STORED_SIDE)


def photographs(
    name: str, train: Files, test: Files, class_names: Sequence[str], options: SourceOptions, enlarge: bool = False
) -> Dataset:
    """Return a dataset of image files; with `enlarge`, smaller ones get the shorter side to which others are shrunk."""
    _refuse_missing([*train.paths, *test.paths])
    shapes = replace(shapes_of(options), enlarge=enlarge)
    sets = [
        ImageSet(DeferredImages.of(FileSupply(files.paths), shapes, options.workers), np.array(files.labels, np.int64))
        for files in (train, test)
    ]
    return Dataset(name, sets[0], sets[1], tuple(class_names), shapes.size, IMAGENET_MEAN, IMAGENET_STD)


def _refuse_missing(files: Sequence[Path]) -> None:
    """Refuse lists of images that are not there, before a task needs them: archives are often extracted in part."""
    there: dict[Path, set[str]] = {}
    for folder in {file.parent for file in files}:
        try:
            there[folder] = set(os.listdir(folder))
        except OSError:
            there[folder] = set()
    missing = [file for file in files if file.name not in there[file.parent]]
    if missing:
        raise DataError(
            f"{len(missing):,} of {len(files):,} images that the lists name are missing: {some(missing, 3)}. Extract "
            "all archives of the dataset."
        )


def read_table(file: Path, expected: str) -> list[list[str]]:
    """Return the two parts of every line of a list: the last word, and what is before it."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error}). {expected}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        words = line.rsplit(maxsplit=1)
        if len(words) != 2:
            raise DataError(f"Line {number} of {file} does not have 2 parts: {line[:60]!r}. Restore the file.")
        found.append(words)
    return found


def inside(folder: Path, name: str, where: Path) -> Path:
    """Return a file that a list names, which must lie in `folder`."""
    if name.startswith("/") or ".." in Path(name).parts or re.search(r"[\0\\]", name):
        raise DataError(f"{where} names {name[:60]!r}, which is not in {folder}. Restore the file.")
    return folder / name


def whole_number(text: str, low: int, high: int, where: Path) -> int:
    """Return a number of a list within limits."""
    if not text.isdecimal() or len(text) > 9 or not low <= int(text) <= high:
        raise DataError(f"{where} has {text[:40]!r} where a number from {low} to {high} is expected. Restore the file.")
    return int(text)
