"""Tiny-ImageNet in its original folders or as Parquet shards; its validation split is the test set.

The official test set has no labels.
"""

from __future__ import annotations

import re
from pathlib import Path

from efcil.data.cache import Allocate, Built, Decoded, Request, load_or_build
from efcil.data.checksum import checksum_contents, checksum_listing
from efcil.data.decode import Fit
from efcil.data.images import IMAGENET_MEAN, IMAGENET_STD, Dataset
from efcil.data.sources import Known, Source, SourceOptions
from efcil.data.sources.listing import Files, build_from_files, images_below, images_of_class, labelled, visible_folders
from efcil.data.sources.shards import (
    VALIDATION_SPLITS,
    Layout,
    check_columns,
    decode_shards,
    find_shards,
    published_names,
    shared_names,
)
from efcil.errors import DataError

FOLDER = "tiny-imagenet-200"
_LAYOUT = Layout("Tiny-ImageNet", "image", "label", size=64, classes=200, images=110_000)


class TinyImagenet(Source):
    """200 classes, 100,000 training and 10,000 validation images; a label is the rank of the sorted WordNet id."""

    name = "tiny-imagenet"
    title = "Tiny-ImageNet"
    description = "200 classes, 100,000 training and 10,000 validation images of 64 x 64 pixels"
    expected = (
        f"Expected: the folder {FOLDER} (or the one that holds it) with train/<id>/images/*.JPEG, words.txt, and "
        "either val/images/*.JPEG with val/val_annotations.txt or val/<id>/*.JPEG; get it as "
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip and unzip it. Or a folder with train*.parquet and "
        "valid*.parquet (columns image and label), as in the dataset zh-plus/tiny-imagenet of the Hugging Face Hub."
    )
    needs_path = True
    fixed_size = 64
    known = Known(200, 100_000, 10_000, (500, 500), (50, 50), in_both=7)

    def load(self, path: Path | None, options: SourceOptions) -> Dataset:
        """Return Tiny-ImageNet from `path`, with the classes that are there."""
        self.check(path, options)
        assert path is not None
        if path.is_dir() and (shards := find_shards(path, VALIDATION_SPLITS)):
            return _dataset(self.name, self._from_shards(path, shards, options))
        return _dataset(self.name, self._from_folders(path, options))

    def recognise(self, path: Path) -> None:
        """Refuse a place without either layout, and shards of other columns."""
        if path.is_dir() and (shards := find_shards(path, VALIDATION_SPLITS)):
            check_columns(shards["train"][0], _LAYOUT)
        else:
            self._root(path)

    def _from_shards(self, path: Path, shards: dict[str, list[Path]], options: SourceOptions) -> Decoded:
        texts = [path / name for name in ("wnids.txt", "words.txt") if (path / name).is_file()]
        request = Request(
            source=self.name,
            data=path,
            inputs=checksum_contents([*shards["train"], *shards["test"], *texts], path),
            settings={"layout": "parquet"},
            beside=path,
        )

        def build(allocate: Allocate) -> Built:
            names = _class_names(path / "words.txt", _identifiers(path, shards))
            return Built(decode_shards(_LAYOUT, shards, options.workers, allocate), names)

        return load_or_build(request, options.cache, build)

    def _from_folders(self, path: Path, options: SourceOptions) -> Decoded:
        root = self._root(path)
        identifiers = [folder.name for folder in visible_folders(root / "train")]
        if not identifiers:
            raise DataError(f"{root / 'train'} holds no class folder. {self.expected}")
        training = labelled([images_of_class(root / "train" / identifier) for identifier in identifiers])
        splits = {"train": training, "test": self._validation_files(root, identifiers)}
        words = root / "words.txt"
        inputs = [*splits["train"].paths, *splits["test"].paths, *([words] if words.is_file() else [])]
        annotations = root / "val" / "val_annotations.txt"
        request = Request(
            source=self.name,
            data=root,
            inputs=checksum_listing([*inputs, *([annotations] if annotations.is_file() else [])], root),
            settings={},
            beside=root,
        )
        return load_or_build(
            request,
            options.cache,
            lambda allocate: build_from_files(
                splits, _class_names(words, identifiers), Fit(64), allocate, options.workers
            ),
        )

    def _root(self, path: Path) -> Path:
        for root in (path, path / FOLDER):
            if (root / "train").is_dir():
                if not (root / "val").is_dir():
                    raise DataError(f"{root / 'val'} is missing, and with it the test images. {self.expected}")
                return root
        raise DataError(f"{path} holds no Tiny-ImageNet: there is no folder train in it. {self.expected}")

    def _validation_files(self, root: Path, identifiers: list[str]) -> Files:
        # Scripts that sort the validation images into class folders often leave an empty val/images.
        validation = root / "val"
        if (validation / "images").is_dir() and (images := images_below(validation / "images")):
            by_name = {image.name: image for image in images}
            return self._annotated_files(validation / "val_annotations.txt", by_name, identifiers)
        for identifier in identifiers:
            if not (validation / identifier).is_dir():
                raise DataError(
                    f"{validation / identifier} is missing: its class has no validation images. {self.expected}"
                )
        return labelled([images_of_class(validation / identifier) for identifier in identifiers])

    def _annotated_files(self, annotations: Path, flat: dict[str, Path], identifiers: list[str]) -> Files:
        label_of = {identifier: label for label, identifier in enumerate(identifiers)}
        try:
            lines = annotations.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{annotations} cannot be read ({error}); without it the validation images have no labels. "
                f"{self.expected}"
            ) from error
        chosen: list[tuple[Path, int]] = []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            name, identifier = [*line.split("\t"), ""][:2]
            if identifier not in label_of:
                raise DataError(
                    f"Line {number} of {annotations} names class {identifier!r}, which has no folder in "
                    f"{annotations.parents[1] / 'train'}. Restore that folder, or remove the line."
                )
            if name not in flat:
                raise DataError(f"Line {number} of {annotations} names {name}, which is not in val/images. Restore it.")
            chosen.append((flat[name], label_of[identifier]))
        missing = sorted(set(label_of.values()) - {label for _, label in chosen})
        if missing:
            raise DataError(f"{annotations} names no validation image of class {identifiers[missing[0]]}. Restore it.")
        return Files(tuple(path for path, _ in chosen), tuple(label for _, label in chosen))


def _dataset(name: str, decoded: Decoded) -> Dataset:
    return Dataset(
        name=name,
        train=decoded.train,
        test=decoded.test,
        class_names=decoded.class_names,
        image_size=64,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def _identifiers(folder: Path, shards: dict[str, list[Path]]) -> list[str]:
    """Return the WordNet ids that labels number: those of the shards, or of wnids.txt, sorted; else the numbers."""
    found = shared_names([shards["train"][0], shards["test"][0]], _LAYOUT.label)
    if found is not None and len(set(found)) == _LAYOUT.classes:
        if all(re.fullmatch(r"n\d{8}", name) for name in found):
            published_names(found, sorted(found), "Tiny-ImageNet (sorted WordNet ids)", shards["train"][0])
        return list(found)
    listed = folder / "wnids.txt"
    names = listed.read_text(encoding="utf-8").split() if listed.is_file() else []
    if len(set(names)) != _LAYOUT.classes:
        return [f"class {number}" for number in range(_LAYOUT.classes)]
    return sorted(names)


def _class_names(words: Path, identifiers: list[str]) -> tuple[str, ...]:
    """Return the first synonym that words.txt gives for each identifier, or the identifier itself.

    Two classes may share their first synonym (a crane is a bird and a machine); then both get the identifier added.
    """
    names = {}
    if words.is_file():
        for line in words.read_text(encoding="utf-8", errors="replace").splitlines():
            identifier, _, synonyms = line.partition("\t")
            names[identifier] = synonyms.split(",")[0].strip()
    plain = [names.get(identifier) or identifier for identifier in identifiers]
    return tuple(
        f"{name} ({identifier})" if plain.count(name) > 1 else name
        for name, identifier in zip(plain, identifiers, strict=True)
    )
