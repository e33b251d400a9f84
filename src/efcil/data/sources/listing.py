"""Images that are single files in folders: listing them, and decoding them split by split."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from efcil.data.cache import Allocate, Built
from efcil.data.decode import SUFFIXES, Encoded, Fit, decode_into
from efcil.errors import DataError, some


@dataclass(frozen=True)
class Files:
    """The image files of one split and their labels."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]


def visible_folders(folder: Path) -> list[Path]:
    """Return the sub-folders of `folder` that are not hidden, sorted by name."""
    try:
        return sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} cannot be listed ({error.strerror or error}).") from error


def images_below(folder: Path) -> list[Path]:
    """Return the image files in and below `folder`, sorted; hidden files and unknown suffixes are ignored."""
    return [file for file in files_below(folder) if is_image(file)]


def is_image(file: Path) -> bool:
    """Return whether a file has the suffix of an image that can be read."""
    return file.name.lower().endswith(SUFFIXES)


def files_below(folder: Path) -> list[Path]:
    """Return the files in and below `folder`, sorted; hidden ones are ignored."""
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    above = _ancestors(folder)

    # A list instead of recursion: folders may be nested deeper than Python's stack.
    waiting = [(str(folder), False)]
    try:
        while waiting:
            current, link = waiting.pop()
            identity = _identity(current)
            # Links may form cycles, or lead to folders with images of other classes.
            if identity in seen or (link and identity in above):
                continue
            seen.add(identity)
            with os.scandir(current) as children:
                visible = [child for child in children if not child.name.startswith(".")]
            found += [Path(child.path) for child in visible if not _is_folder(child)]
            waiting += [(child.path, child.is_symlink()) for child in reversed(visible) if _is_folder(child)]
    except OSError as error:
        raise DataError(f"{error.filename or folder} cannot be listed ({error.strerror or error}).") from error
    return sorted(found)


def _ancestors(folder: Path) -> set[tuple[int, int]]:
    """Return the folders that contain `folder`: by its name, and by its real place on the disk."""
    found = set()
    for path in (Path(os.path.abspath(folder)), folder.resolve()):
        with contextlib.suppress(OSError):
            if path.samefile(folder):  # behind a link, `..` is not the folder that the name suggests
                found |= {_identity(parent) for parent in path.parents}
    return found


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder; a link that leads to itself is none, as one that leads nowhere."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


def _identity(folder: Path | str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def images_of_class(folder: Path) -> list[Path]:
    """Return the images of a class folder; a DataError names the folder if it has none."""
    return images_of_classes([folder])[folder]


def images_of_classes(folders: Sequence[Path]) -> dict[Path, list[Path]]:
    """Return the images of every class folder; a DataError names folders that have none, or whose names are no text."""
    unreadable = [folder for folder in folders if not is_text(folder.name)]
    if unreadable:
        raise DataError(
            f"{some(unreadable)}: a name that is not valid {sys.getfilesystemencoding().upper()} cannot name a class. "
            "Some programs write such names when they unpack an archive of another system. Rename the folder."
        )
    found = {folder: images_below(folder) for folder in folders}
    empty = [folder for folder, images in found.items() if not images]
    if empty:
        hold, them = ("folder {} holds", "it") if len(empty) == 1 else ("folders {} hold", "them")
        raise DataError(
            f"The class {hold.format(some(empty))} no image (recognised: {', '.join(SUFFIXES)}). "
            f"Add images to {them}, or remove {them}."
        )
    return found


def is_text(name: str) -> bool:
    """Return whether a name could be decoded; Python keeps bytes that could not as lone surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def wrong_level(root: Path, per_class: Mapping[Path, Sequence[Path]]) -> str | None:
    """Say what is wrong if most images of a folder of class folders are one level too high or too deep; else None.

    `per_class` has the images of every class folder.
    """
    inside = sum(map(len, per_class.values()))
    beside = sum(is_image(child) and child.is_file() and child.name[0] != "." for child in root.iterdir())
    example = f"{root / 'cat' / '1.jpg'}, {root / 'dog' / '2.jpg'}"
    if beside > inside:
        found = f"{inside} are in sub-folders" if inside else "it has no sub-folder with images"
        name = root.absolute().name
        one = "" if inside else f" If {name} is itself a class, give a folder that has {name} in it."
        return (
            f"{beside} images are directly in {root}, and {found}. Put the images of each class into a sub-folder that "
            f"has the name of the class: {example}.{one}"
        )
    groups = {folder: _only_folders(folder, images) for folder, images in per_class.items()}
    deep = [folder for folder, names in groups.items() if len(names) > 1]
    if 2 * sum(len(per_class[folder]) for folder in deep) <= inside + beside:
        return None
    first, names = deep[0], groups[deep[0]]
    each = f" {len(deep)} folders are like that; give them one after the other." if len(deep) > 1 else ""
    return (
        f"The images of {root} are one level too deep. Expected: {example}. Found: {first} has no image of its own, "
        f"but folders with images: {some(names)}. If these are classes, give {first} instead of {root}.{each} If "
        f"{first.name} is one class, put its images directly into it."
    )


def _only_folders(folder: Path, images: Sequence[Path]) -> list[str]:
    """Return the names of the folders in `folder` that have images; none if it also has images of its own."""
    names: dict[str, None] = {}
    for image in images:
        name, *rest = image.relative_to(folder).parts
        if not rest:
            return []
        names[name] = None
    return list(names)


def labelled(per_class: Sequence[Sequence[Path]]) -> Files:
    """Return the images class after class; the label of a class is its index in `per_class`."""
    return Files(
        tuple(image for images in per_class for image in images),
        tuple(label for label, images in enumerate(per_class) for _ in images),
    )


def build_from_files(
    splits: Mapping[str, Files], class_names: tuple[str, ...], fit: Fit, allocate: Allocate, workers: int | None
) -> Built:
    """Decode the files of every split; the build step of sources whose images are single files."""
    for split, files in splits.items():
        target = allocate(split, len(files.paths), fit.size)
        decode_into(target, [Encoded(path, str(path)) for path in files.paths], fit, workers)
    return Built({split: np.array(files.labels, np.int64) for split, files in splits.items()}, class_names)
