"""Labels of ImageNet's validation images, which are not sorted into folders when they are downloaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from efcil.data.sources.listing import Files, images_below
from efcil.errors import DataError

#: Lists of the labels: Caffe's, OpenMMLab's, Kaggle's, and one in the manner of Tiny-ImageNet; that of EFC has the
#: first 100 classes.
SUBSET_LIST, SUBSET_CLASSES = "val_100.txt", 100
LISTS = ("val_1000.txt", "val.txt", "meta/val.txt", "LOC_val_solution.csv", "val_annotations.txt", SUBSET_LIST)
#: What image-net.org gives instead: numbers of its own for the classes, which meta.mat translates.
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
DEVKIT = "ILSVRC2012_devkit_t12/data"
IDENTIFIER = re.compile(r"n\d{8}")
#: The class of some validation images: wrong labels and another order of the classes show on them.
_KNOWN_IMAGES = {
    "ILSVRC2012_val_00000236": "n01443537",
    "ILSVRC2012_val_00000293": "n01440764",
    "ILSVRC2012_val_00000329": "n01514668",
    "ILSVRC2012_val_00000921": "n01496331",
    "ILSVRC2012_val_00001676": "n01494475",
    "ILSVRC2012_val_00001935": "n01498041",
    "ILSVRC2012_val_00002338": "n01484850",
    "ILSVRC2012_val_00002922": "n01491361",
}

#: A line of a list: its place, the name of a file, and the number of its class among those that are there.
Line = tuple[str, str, int | None]


def labelled_by_a_list(
    folder: Path, places: Sequence[Path], identifiers: Sequence[str], used: set[int]
) -> Files | None:
    """Return the images in `folder` of the classes that are used, by a list in one of `places`; None without a list."""
    few = len(identifiers) <= SUBSET_CLASSES
    file = first_file((SUBSET_LIST, *LISTS) if few else LISTS, places)
    if file is not None:
        lines = _listed_labels(file, identifiers)
    elif file := first_file((GROUND_TRUTH, f"{DEVKIT}/{GROUND_TRUTH}"), places):
        lines = _official_labels(file, identifiers)
    else:
        return None
    checked = _without_wrong_labels(lines, identifiers, file)
    return _annotated(checked, {image.name: image for image in images_below(folder)}, used)


def first_file(names: Sequence[str], folders: Sequence[Path]) -> Path | None:
    """Return the first of the folders' files that has one of the names, None if there is none."""
    return next((folder / name for folder in folders for name in names if (folder / name).is_file()), None)


def read_lines(file: Path) -> list[str]:
    """Return the lines of a text file."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error}). Restore it.") from error


def _listed_labels(file: Path, identifiers: Sequence[str]) -> Iterator[Line]:
    """Yield of every line of a list: its place, the name of a file, and the number of its class if that is there."""
    number_of = {identifier: number for number, identifier in enumerate(identifiers)}
    for line_number, line in enumerate(read_lines(file), start=1):
        words = re.split(r"[\s,]+", line.strip())
        if words == [""] or (line_number == 1 and words[0] == "ImageId"):
            continue
        where = f"Line {line_number} of {file}"
        if len(words) < 2:
            raise DataError(f"{where} does not name a file and its class: {line[:60]!r}.")
        *folders, name = words[0].split("/")
        # In val/<id>/<file> <number>, the id counts: the number may be one in another list of classes.
        inside = folders[-1] if folders and IDENTIFIER.fullmatch(folders[-1]) else words[1]
        number = number_of.get(inside)
        if number is None and inside.isdecimal() and int(inside) < len(identifiers):
            number = int(inside)
        if number is None and not re.fullmatch(r"n\d+", inside):  # else a class that is not there, of a longer list
            last = len(identifiers) - 1
            raise DataError(f"{where} names class {inside[:60]!r}, but classes are ids, or numbers from 0 to {last}.")
        yield where, name, number


def _official_labels(file: Path, identifiers: Sequence[str]) -> Iterator[Line]:
    """Yield the same of the list of image-net.org: a number for each image, which meta.mat beside it translates."""
    number_of = {identifier: number for number, identifier in enumerate(identifiers)}
    identifier_of = _official_numbers(file.parent / "meta.mat")
    for line_number, line in enumerate(read_lines(file), start=1):
        where = f"Line {line_number} of {file}"
        if (identifier := identifier_of.get(line.strip())) is None:
            raise DataError(f"{where} has {line[:40]!r}, which is no number of a class. Restore the file.")
        yield where, f"ILSVRC2012_val_{line_number:08d}.JPEG", number_of.get(identifier)


def _official_numbers(file: Path) -> dict[str, str]:
    """Return the ids of the classes by image-net.org's numbers, which are not in the order of the ids."""
    from scipy.io import loadmat  # type: ignore[import-untyped]

    try:
        table = loadmat(file, squeeze_me=True, variable_names=["synsets"])["synsets"]
        pairs = [(int(number), str(name)) for number, name in zip(table["ILSVRC2012_ID"], table["WNID"], strict=True)]
    except Exception as error:  # for a file that is damaged or something else the reader may raise almost anything
        raise DataError(
            f"{file} cannot be read ({error}), but it says which numbers of {GROUND_TRUTH} mean which class. Extract "
            "ILSVRC2012_devkit_t12.tar.gz again, or sort the validation images into folders by class."
        ) from error
    return {str(number): name for number, name in pairs}


def _annotated(lines: Iterator[Line], images: dict[str, Path], used: set[int]) -> Files:
    """Return the validation images of the classes that are used, with the labels that a list gives them."""
    chosen: list[tuple[int, str, Path]] = []
    for where, name, number in lines:
        if number not in used:
            continue
        image = images.get(name) or images.get(f"{name}.JPEG")
        if image is None:
            raise DataError(f"{where} names {name[:60]}, which is not in the folder of validation images. Restore it.")
        chosen.append((number, name, image))
    chosen.sort()
    return Files(tuple(image for *_, image in chosen), tuple(number for number, *_ in chosen))


def _without_wrong_labels(lines: Iterator[Line], identifiers: Sequence[str], file: Path) -> Iterator[Line]:
    """Yield the lines; refuse a list that contradicts what is known, also of a class that is not used."""
    for where, name, number in lines:
        if number is not None:
            _refuse_wrong_label(name, identifiers[number], file)
        yield where, name, number


def refuse_wrong_folders(files: Files, identifiers: Sequence[str], folder: Path) -> None:
    """Refuse validation images in class folders that contradict what is known of some of them."""
    for path, label in zip(files.paths, files.labels, strict=True):
        _refuse_wrong_label(path.name, identifiers[label], folder)


def _refuse_wrong_label(name: str, identifier: str, where: Path) -> None:
    known = _KNOWN_IMAGES.get(name.removesuffix(".JPEG"))
    if known not in (None, identifier):
        raise DataError(
            f"By {where}, {name} is of class {identifier}, but it is of class {known}. Its labels are wrong, or number "
            "the classes in another order than their sorted ids."
        )
