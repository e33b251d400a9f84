"""ImageNet: all 1,000 classes of ILSVRC 2012 or 100 of them, as folders of JPEG files or as Parquet shards.

Images are decoded task by task (data/deferred.py); nothing is written beside them.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from efcil.data.deferred import DeferredImages, FileSupply, Shapes, Supply
from efcil.data.images import IMAGENET_MEAN, IMAGENET_STD, Dataset, ImageSet
from efcil.data.sources import Known, Source, SourceOptions
from efcil.data.sources.classlist import listed_classes
from efcil.data.sources.imagenet_labels import (
    DEVKIT,
    IDENTIFIER,
    LISTS,
    SUBSET_CLASSES,
    first_file,
    labelled_by_a_list,
    read_lines,
    refuse_wrong_folders,
)
from efcil.data.sources.listing import Files, images_of_class, labelled, visible_folders
from efcil.data.sources.photographs import shapes_of
from efcil.data.sources.shards import (
    VALIDATION_SPLITS,
    ShardSupply,
    find_shards,
    read_labels,
    read_paths,
    shared_names,
)
from efcil.errors import DataError, SettingsError, some

CLASSES = 1000
#: Folders that archives and other programs put around train/ and val/.
_AROUND = ("", "imagenet", "imagenet_subset", "ILSVRC2012", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC")
_TRAIN = ("train", "ILSVRC2012_img_train")
_VALIDATION = ("val", "validation", "ILSVRC2012_img_val")
_NAMES = ("LOC_synset_mapping.txt", "synset_words.txt", "words.txt")
_LAYOUTS = (
    "Expected: a folder with train/<id>/*.JPEG and either val/<id>/*.JPEG or val/*.JPEG with a list of their labels "
    f"beside them or above ({', '.join(LISTS)}; a line has a file's name and its id, or the number of its class "
    f"in the sorted list), or with {DEVKIT} of image-net.org. Or a folder with train*.parquet and validation*.parquet "
    "(columns image and label), as in the dataset ILSVRC/imagenet-1k of the Hugging Face Hub. Both need an account: "
    "https://image-net.org/download."
)


@dataclass(frozen=True)
class _Split:
    """The images of a split, and the numbers of their classes among all that are there."""

    supply: Supply
    labels: np.ndarray


class _Imagenet(Source):
    needs_path = True
    expected = _LAYOUTS
    uses = ("class_list", "stored_side")

    @abc.abstractmethod
    def chosen(self, identifiers: Sequence[str], class_list: str | None, names: Sequence[str] = ()) -> list[int]:
        """Return which of the sorted identifiers are used, in that order; a list may have their names, too."""

    def load(self, path: Path | None, options: SourceOptions) -> Dataset:
        """Return the images below `path`, to be decoded when they are needed."""
        self.check(path, options)
        assert path is not None
        if not path.is_dir():
            raise DataError(f"{path} is not a folder. {self.expected}")
        identifiers, names, splits = self.listed(path, options)
        used = self.chosen(identifiers, options.class_list, names)
        shapes = shapes_of(options)
        position = np.full(len(identifiers), -1)
        position[used] = np.arange(len(used))
        train, test = (_images(split, position, shapes, options.workers) for split in splits)
        for label, number in enumerate(used):
            if not (train.labels == label).any() or not (test.labels == label).any():
                raise DataError(f"Class {identifiers[number]} has no training or no validation image in {path}.")
        return Dataset(
            name=self.name,
            train=train,
            test=test,
            class_names=tuple(names[number] for number in used),
            image_size=shapes.size,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
        )

    def recognise(self, path: Path) -> None:
        """Refuse a place that has neither shards nor a folder of training images."""
        if not find_shards(path, VALIDATION_SPLITS):
            self._root(path)

    def listed(self, path: Path, options: SourceOptions) -> tuple[list[str], list[str], tuple[_Split, _Split]]:
        """Return the sorted identifiers of all classes that are there, their names, and both splits."""
        if shards := find_shards(path, VALIDATION_SPLITS):
            return _from_shards(shards)
        return self._from_folders(path, options)

    def _from_folders(self, path: Path, options: SourceOptions) -> tuple[list[str], list[str], tuple[_Split, _Split]]:
        root = self._root(path)
        train_folder, test_folder = _folder(root, _TRAIN), _folder(root, _VALIDATION)
        if train_folder is None or test_folder is None:
            raise DataError(f"{root / 'val'} is missing, and with it the test images.{_archives(root)} {self.expected}")
        identifiers = [folder.name for folder in visible_folders(train_folder)]
        if len(identifiers) < 2:
            raise DataError(
                f"{train_folder} holds {len(identifiers)} class folders.{_archives(train_folder)} {self.expected}"
            )
        if len(identifiers) == CLASSES and not all(map(IDENTIFIER.fullmatch, identifiers)):
            raise DataError(
                f"The folders in {train_folder} are not called by WordNet ids, but {identifiers[0]!r} and so on. The "
                "classes of ImageNet have the order of the ids: give the folders their published names."
            )
        names = _names(path, root, identifiers)
        used = self.chosen(identifiers, options.class_list, names)  # other classes are not listed: that takes long

        def below(folder: Path) -> Files:
            wanted = set(used)
            return labelled(
                [images_of_class(folder / name) if number in wanted else [] for number, name in enumerate(identifiers)]
            )

        places = (test_folder, root, *_between(path, root))
        splits = (below(train_folder), self._validation(places, identifiers, used, below))
        train, test = (_Split(FileSupply(files.paths), np.array(files.labels, np.int64)) for files in splits)
        return identifiers, names, (train, test)

    def _root(self, path: Path) -> Path:
        for name in _AROUND:
            if _folder(path / name, _TRAIN) is not None:
                return path / name
        raise DataError(f"{path} holds no ImageNet: there is no folder train in it.{_archives(path)} {self.expected}")

    def _validation(
        self, places: Sequence[Path], identifiers: list[str], used: list[int], below: Callable[[Path], Files]
    ) -> Files:
        """Return the validation images in the first of `places`, by their folders or by a list in one of them."""
        folder = places[0]
        if visible_folders(folder):
            for number in used:
                if not (folder / identifiers[number]).is_dir():
                    raise DataError(
                        f"{folder / identifiers[number]} is missing: its class has no validation images. "
                        f"{self.expected}"
                    )
            files = below(folder)
            refuse_wrong_folders(files, identifiers, folder)
            return files
        listed = labelled_by_a_list(folder, places, identifiers, set(used))
        if listed is None:
            raise DataError(
                f"The images in {folder} are not sorted into class folders, and there is no list of their labels "
                f"({', '.join(LISTS)}). {self.expected}"
            )
        return listed


class ImagenetSubset(_Imagenet):
    """100 classes of ImageNet: by default those with the first 100 identifiers, as in the EFC paper."""

    name = "imagenet-subset"
    title = "ImageNet-Subset"
    description = "100 classes of ImageNet, about 129,000 training and 5,000 validation images, 224 x 224 pixels"
    class_lists = ("first", "lucir")
    known = Known(SUBSET_CLASSES, None, 5_000, (732, 1300), (50, 50))

    def chosen(self, identifiers: Sequence[str], class_list: str | None, names: Sequence[str] = ()) -> list[int]:
        """Return the first 100 identifiers, LUCIR's, or those of a file."""
        if class_list in (None, "first"):
            return list(range(len(identifiers)))[:SUBSET_CLASSES]
        if class_list == "lucir":
            return lucir_classes(identifiers)
        return listed_classes(Path(class_list or ""), identifiers, names)


class Imagenet1k(_Imagenet):
    """All classes of ILSVRC 2012."""

    name = "imagenet-1k"
    title = "ImageNet-1K"
    description = "1,000 classes, 1,281,167 training and 50,000 validation images, 224 x 224 pixels"
    known = Known(CLASSES, 1_281_167, 50_000, (732, 1300), (50, 50))

    def chosen(self, identifiers: Sequence[str], class_list: str | None, names: Sequence[str] = ()) -> list[int]:
        """Return all classes, or those of a file."""
        if class_list is None:
            return list(range(len(identifiers)))
        return listed_classes(Path(class_list), identifiers, names)


def lucir_classes(identifiers: Sequence[str]) -> list[int]:
    """Return the 100 classes of LUCIR, which are drawn from the 1,000 sorted identifiers with NumPy's seed 1993."""
    if len(identifiers) != CLASSES:
        raise SettingsError(
            f"The list lucir is drawn from all {CLASSES} classes of ImageNet, but {len(identifiers)} are there. Give "
            "the folder of all classes, or a file of identifiers as class_list."
        )
    return sorted(int(number) for number in np.random.RandomState(1993).permutation(CLASSES)[:SUBSET_CLASSES])


def _images(split: _Split, position: np.ndarray, shapes: Shapes, workers: int | None) -> ImageSet:
    labels = position[split.labels]
    rows = np.flatnonzero(labels >= 0)
    return ImageSet(DeferredImages(split.supply, shapes, rows, workers), labels[rows].astype(np.int64))


def _from_shards(shards: dict[str, list[Path]]) -> tuple[list[str], list[str], tuple[_Split, _Split]]:
    names = shared_names([shards["train"][0], shards["test"][0]], "label")
    labels = {
        split: np.concatenate([read_labels(file, "image", "label") for file in files])
        for split, files in shards.items()
    }
    classes = max((int(each.max()) + 1 for each in labels.values() if len(each)), default=0)
    if min((int(each.min()) for each in labels.values() if len(each)), default=0) < 0:
        raise DataError(f"{shards['test'][0].parent} has images without a label (-1). Give the validation split.")
    if names is not None and len(set(names)) < max(classes, len(names)):
        names = None
    identifiers = _identifiers(shards["train"], classes if names is None else len(names))
    identifiers = identifiers or names or tuple(f"class {number}" for number in range(classes))
    names = names or identifiers
    order = np.arange(len(names))
    if all(map(IDENTIFIER.fullmatch, identifiers)):  # else the order is taken to be that of the ids
        order = np.argsort(np.array(identifiers))
    number_of = np.argsort(order)
    train, test = (
        _Split(ShardSupply.of(shards[split], "image"), number_of[labels[split]]) for split in ("train", "test")
    )
    return [identifiers[each] for each in order], [names[each] for each in order], (train, test)


def _identifiers(shards: Sequence[Path], classes: int) -> tuple[str, ...] | None:
    """Return the id of every class, from the names of images such as n01440764_18_n01440764.JPEG; None if none tells.

    The Hub's shards are shuffled, so that the first few have images of all classes.
    """
    found: dict[int, str] = {}
    for shard in shards:
        for label, name in zip(read_labels(shard, "image", "label").tolist(), read_paths(shard, "image"), strict=True):
            match = IDENTIFIER.match(Path(name or "").name)
            if match is None or found.setdefault(label, match[0]) != match[0]:
                return None
        if len(found) == classes:
            return tuple(found[label] for label in range(classes))
    return None


def _folder(root: Path, names: Sequence[str]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


def _between(path: Path, root: Path) -> list[Path]:
    """Return the folders above `root`, up to the one that was given, and the one with the lists of Kaggle's archive."""
    whole = root.absolute()
    found = [whole.parents[2]] if whole.parts[-3:] == ("ILSVRC", "Data", "CLS-LOC") else []
    while root != path:
        root = root.parent
        found.append(root)
    return found


def _archives(folder: Path) -> str:
    """Say that archives were not extracted, if there are any."""
    found = sorted(file.name for file in folder.glob("*.tar*"))
    if not found:
        return ""
    return (
        f" It holds archives that are not extracted: {some(found)}. Extract ILSVRC2012_img_val.tar into val/, and each "
        "archive in ILSVRC2012_img_train.tar into the folder train/<id>/ that has its name."
    )


def _names(path: Path, root: Path, identifiers: list[str]) -> list[str]:
    """Return the first synonym of every identifier, where a list beside the images has it."""
    file = first_file(_NAMES, (root, *_between(path, root)))
    known = {}
    for line in [] if file is None else read_lines(file):
        identifier, _, synonyms = line.replace("\t", " ").partition(" ")
        known[identifier] = synonyms.split(",")[0].strip()
    plain = [known.get(identifier) or identifier for identifier in identifiers]
    twice = {name for name in plain if plain.count(name) > 1} if len(set(plain)) < len(plain) else set()
    return [f"{name} ({each})" if name in twice else name for name, each in zip(plain, identifiers, strict=True)]
