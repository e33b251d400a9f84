"""Your own images: one sub-folder per class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from efcil.data.cache import Allocate, Built, Request, load_or_build
from efcil.data.checksum import checksum_listing
from efcil.data.decode import SAMPLED_SIDES, SUFFIXES, Encoded, Fit, short_side, usual_side
from efcil.data.domains import SEPARATOR
from efcil.data.images import IMAGENET_MEAN, IMAGENET_STD, Dataset
from efcil.data.sources import Source, SourceOptions, held_out_choice
from efcil.data.sources.listing import (
    Files,
    build_from_files,
    images_of_classes,
    labelled,
    visible_folders,
    wrong_level,
)
from efcil.errors import DataError, SettingsError

_TEST_FOLDERS = ("test", "val", "validation", "valid")


class Folder(Source):
    """Images of any sizes in class folders, resized to squares; labels follow the sorted folder names."""

    name = "folder"
    title = "A folder of images"
    description = "Your own images: one sub-folder per class, with train/ and test/, or a held-out share"
    expected = (
        "Expected: either train/<class>/ and test/<class>/ (or val/<class>/) with images in them, or just <class>/ "
        "folders and a held-out share (held_out, for example 0.2). With domains (answers), <domain>/<class>/ in place "
        f"of <class>/. Recognised: {', '.join(SUFFIXES)}."
    )
    needs_path = True
    splits_itself = False

    def load(self, path: Path | None, options: SourceOptions) -> Dataset:
        """Return the images below `path`, resized to one square size."""
        self.check(path, options)
        assert path is not None
        class_names, splits = self._splits(path, options)
        settings: dict[str, Any] = {"image_size": options.image_size, "held_out": options.held_out}
        if options.held_out is not None:  # the seed has no effect if the test set is given
            settings["seed"] = options.seed
        if options.answers is not None:
            settings["classes"] = "domain/class"
        request = Request(
            source=self.name,
            data=path,
            inputs=checksum_listing([file for files in splits.values() for file in files.paths], path),
            settings=settings,
            beside=path,
        )

        def build(allocate: Allocate) -> Built:
            size = options.image_size or _default_size(splits["train"])
            fit = Fit(size, resize=True, orient=True)
            return build_from_files(splits, class_names, fit, allocate, options.workers)

        decoded = load_or_build(request, options.cache, build)
        return Dataset(
            name=self.name,
            train=decoded.train,
            test=decoded.test,
            class_names=decoded.class_names,
            image_size=int(decoded.train.images.shape[1]),
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
        )

    def _splits(self, path: Path, options: SourceOptions) -> tuple[tuple[str, ...], dict[str, Files]]:
        if not path.is_dir():
            raise DataError(f"{path} is not a folder. {self.expected}")
        test = _test_folder(path)
        if (path / "train").is_dir() and test is not None:
            if options.held_out is not None:
                raise SettingsError(
                    f"{path} has its own test images in {test.name}/, so held_out cannot be set. Leave it out, or give "
                    f"{path / 'train'} as the path."
                )
            return self._given_splits(path / "train", test, options.answers is not None)
        if options.held_out is None:
            raise DataError(
                f"{path} does not say which images are for testing: there is no train/ with a test/ or val/ in it, and "
                f"no held-out share was given. {self.expected}"
            )
        # A lone train/ is a wrapper around the class folders, not a class.
        only_train = [folder.name for folder in visible_folders(path)] == ["train"]
        root = path / "train" if only_train else path
        return self._held_out_splits(root, options.held_out, options.seed, options.answers is not None)

    def _given_splits(self, train: Path, test: Path, domains: bool) -> tuple[tuple[str, ...], dict[str, Files]]:
        names = self._class_folders(train, domains)
        for name in _folder_names(test, domains):
            if name not in names:
                raise DataError(f"{test / name} is a class without training images: {train / name} does not exist.")
        for name in names:
            if not (test / name).is_dir():
                raise DataError(f"{test / name} is missing: class {name!r} has training images but no test images.")
        splits = {}
        for split, root in (("train", train), ("test", test)):
            splits[split] = labelled(self._images_of(root, names))
        return tuple(names), splits

    def _held_out_splits(
        self, root: Path, share: float, seed: int, domains: bool
    ) -> tuple[tuple[str, ...], dict[str, Files]]:
        names = self._class_folders(root, domains)
        kept, held_out = [], []
        for name, images in zip(names, self._images_of(root, names), strict=True):
            if len(images) < 2:
                raise DataError(
                    f"The class folder {root / name} holds a single image, which cannot be both for training and for "
                    "testing. Add images to it, or remove the folder."
                )
            chosen = set(held_out_choice(len(images), share, seed, name))
            kept.append([image for index, image in enumerate(images) if index not in chosen])
            held_out.append([image for index, image in enumerate(images) if index in chosen])
        return tuple(names), {"train": labelled(kept), "test": labelled(held_out)}

    def _images_of(self, root: Path, names: list[str]) -> list[list[Path]]:
        """Return the images of every class; refuse a folder whose images are mostly at another level."""
        found = images_of_classes([root / name for name in names])
        if wrong := wrong_level(root, found):
            domains = all(visible_folders(folder) for folder in found)
            hint = " If they are domains that have the same classes, add --answers merged." if domains else ""
            raise DataError(wrong + hint)
        return list(found.values())

    def _class_folders(self, root: Path, domains: bool) -> list[str]:
        names = _folder_names(root, domains)
        if len(names) < 2:
            found = f"only {names[0]!r}" if names else "none"
            raise DataError(f"{root} must have a folder for each of at least two classes; it has {found}.")
        return names


def _test_folder(path: Path) -> Path | None:
    """Return the folder of the test images: the first one that has a class of train/, else the first one."""
    found = [path / name for name in _TEST_FOLDERS if (path / name).is_dir()]
    names = {folder.name for folder in visible_folders(path / "train")} if (path / "train").is_dir() else set()
    # Test images without labels are often beside validation images with labels.
    sorted_ones = [folder for folder in found if names & {each.name for each in visible_folders(folder)}]
    return next(iter([*sorted_ones, *found]), None)


def _folder_names(root: Path, domains: bool) -> list[str]:
    """Return the names of the class folders, sorted: those in `root`, or domain/class if it has domains."""
    folders = visible_folders(root)
    if not domains:
        return [folder.name for folder in folders]
    for folder in folders:
        if not visible_folders(folder):
            raise DataError(
                f"{folder} is a domain without class folders. With answers, images are in <domain>/<class>/; leave "
                "answers out if there are no domains."
            )
    return [f"{folder.name}{SEPARATOR}{each.name}" for folder in folders for each in visible_folders(folder)]


def _default_size(files: Files) -> int:
    """Return the usual side of the training images, from about 1,000 evenly spaced ones."""
    step = max(1, len(files.paths) // SAMPLED_SIDES)
    return usual_side([short_side(Encoded(path, str(path))) for path in files.paths[::step]])
