"""Any image-classification dataset of the Hugging Face Hub: its Parquet files, downloaded or in a folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from efcil.data.cache import Allocate, Built, Request, load_or_build
from efcil.data.checksum import checksum_contents
from efcil.data.decode import SAMPLED_SIDES, Fit, decode_into, sides, usual_side
from efcil.data.images import IMAGENET_MEAN, IMAGENET_STD, Dataset
from efcil.data.sources import Source, SourceOptions, held_out_choice
from efcil.data.sources.classlist import listed_classes
from efcil.data.sources.download import download
from efcil.data.sources.listing import files_below
from efcil.data.sources.shards import ShardSupply, class_names, features, read_labels, refuse_gaps, schema_of
from efcil.errors import DataError, SettingsError, shortened, some

TRAIN_SPLITS = ("train", "training")
TEST_SPLITS = ("test", "testing", "validation", "valid", "val", "dev")
MOST_CLASSES = 1_000_000
#: Where the Hub keeps Parquet files of datasets that were uploaded in another form.
CONVERTED = "refs/convert/parquet"


@dataclass(frozen=True)
class Chosen:
    """The files of a split, and which of their rows are used, with their labels."""

    files: list[Path]
    rows: np.ndarray
    labels: np.ndarray


class Hub(Source):
    """A dataset OWNER/NAME of the Hub; images are resized to squares of one size, as those of a folder."""

    name = "hub"
    title = "A dataset of the Hub"
    description = "hub:OWNER/NAME, any image-classification dataset of the Hugging Face Hub"
    expected = (
        "Expected: Parquet files with a column of images and a column of whole numbers as labels. Without a path they "
        "are downloaded from the Hub, which needs a network and the package huggingface_hub; with one they are the "
        "files below it, with the split in the name of a file or of its folder: train-00000-of-00001.parquet, "
        "validation/0000.parquet."
    )
    needs_path = False
    splits_itself = False
    uses = ("class_list", "columns", "splits")

    def __init__(self, repository: str | None = None, configuration: str | None = None) -> None:
        self.repository = repository
        self.configuration = configuration

    def named(self, name: str) -> Source:
        """Return the source of OWNER/NAME, or of one of its configurations: OWNER/NAME/CONFIGURATION."""
        parts = name.split("/")
        if len(parts) > 3 or not all(re.fullmatch(r"[\w-][\w.-]*", part) for part in parts):
            raise SettingsError(
                f"A dataset of the Hub is hub:OWNER/NAME or hub:OWNER/NAME/CONFIGURATION, not {'hub:' + name!r:.80}."
            )
        return Hub("/".join(parts[:2]), parts[2] if len(parts) == 3 else None)

    def check(self, path: Path | None, options: SourceOptions) -> None:
        """Refuse what every source refuses, and a dataset without a name."""
        if self.repository is None:
            raise SettingsError("Name the dataset of the Hub, too: hub:OWNER/NAME.")
        super().check(path, options)
        for name in ("columns", "splits"):
            value = getattr(options, name)
            if value is not None and len(_pair(value)) != 2:
                raise SettingsError(f"{name} are two names with a comma between them, not {shortened(value)!r}.")

    def load(self, path: Path | None, options: SourceOptions) -> Dataset:
        """Return the dataset from the files below `path`, or from the Hub."""
        self.check(path, options)
        folder = self._download() if path is None else path
        names, image_column, splits = self.chosen(folder, options)
        settings = {
            name: getattr(options, name) for name in ("image_size", "held_out", "columns", "splits", "class_list")
        }
        files = sorted({file for each in splits.values() for file in each.files})
        request = Request(
            source=self.name,
            data=folder,
            inputs=checksum_contents(files, folder),
            settings={
                **settings,
                "configuration": self.configuration,
                "seed": None if options.held_out is None else options.seed,
                "classes": list(names),
            },
            # The Hub's download folder is managed by its own package: nothing is written there.
            beside=None if path is None else folder,
        )

        def build(allocate: Allocate) -> Built:
            fit = Fit(options.image_size or _usual_size(splits["train"], image_column), resize=True, orient=True)
            for split, chosen in splits.items():
                target = allocate(split, len(chosen.rows), fit.size)
                for places, encoded in ShardSupply.of(chosen.files, image_column).read(chosen.rows):
                    piece = np.empty((len(places), *target.shape[1:]), np.uint8)
                    decode_into(piece, encoded, fit, options.workers)
                    target[places] = piece
            return Built({split: chosen.labels for split, chosen in splits.items()}, names)

        decoded = load_or_build(request, options.cache, build)
        size = int(decoded.train.images.shape[1])
        called = f"hub:{self.repository}" + (f"/{self.configuration}" if self.configuration else "")
        return Dataset(called, decoded.train, decoded.test, decoded.class_names, size, IMAGENET_MEAN, IMAGENET_STD)

    def chosen(self, folder: Path, options: SourceOptions) -> tuple[tuple[str, ...], str, dict[str, Chosen]]:
        """Return the class names, the column of images, and which rows of which files are for training and testing."""
        found = self._splits(folder)
        train, tests = self._names_of_splits(found, options)
        image, label = find_columns(found[train][0], options.columns)
        labels = {name: _labels_of(found[name], image, label) for name in (train, *tests)}
        if options.splits is None:  # a split without labels is of no use
            tests = [name for name in tests if (labels[name] >= 0).all()] or tests
        for name in (train, *tests[:1]):
            if (labels[name] < 0).any():
                raise DataError(
                    f"Images of the split {name} in {folder} have no label (-1). Choose splits with labels."
                )
        names = class_names(found[train][0], label)
        last = max(int(labels[name].max()) for name in (train, *tests[:1]) if len(labels[name]))
        if names is None or len(set(names)) < len(names) or last >= len(names):
            if last >= MOST_CLASSES:
                raise DataError(f"Column {label!r} has labels up to {last}; these are no classes. Choose columns.")
            names = tuple(str(number) for number in range(last + 1))
        chosen = {"train": _all_rows(found[train], labels[train])}
        if options.held_out is None:
            chosen["test"] = _all_rows(found[tests[0]], labels[tests[0]])
        if options.class_list is not None:
            used = listed_classes(Path(options.class_list), names)
            chosen = {split: _of_classes(each, used) for split, each in chosen.items()}
            names = tuple(names[number] for number in used)
        if options.held_out is not None:
            chosen = _held_out(chosen["train"], names, options.held_out, options.seed)
        return names, image, chosen

    def _download(self) -> Path:
        title = f"hub:{self.repository}"
        folder = download(self.repository or "", title, self.expected)
        if _parquet_below(folder):
            return folder
        return download(self.repository or "", title, self.expected, CONVERTED)

    def _splits(self, folder: Path) -> dict[str, list[Path]]:
        """Return the files of every split of one configuration."""
        files = _parquet_below(folder)
        if not files:
            raise DataError(f"{folder} holds no Parquet file. {self.expected}")
        by_configuration: dict[str, dict[str, list[Path]]] = {}
        for file in files:
            split, above = _split_of(file)
            configuration = above.relative_to(folder).as_posix() if above.is_relative_to(folder) else ""
            by_configuration.setdefault(configuration, {}).setdefault(split, []).append(file)
        if self.configuration is not None:
            by_configuration = {
                name: splits for name, splits in by_configuration.items() if self.configuration in name.split("/")
            }
        if len(by_configuration) != 1:
            names = some(sorted(by_configuration) or sorted({_split_of(file)[1].name for file in files}))
            raise DataError(
                f"{folder} holds several configurations, or not the one that is named: {names}. Name one of them: "
                f"hub:{self.repository}/CONFIGURATION."
            )
        (splits,) = by_configuration.values()
        for shards in splits.values():
            refuse_gaps(shards)
        return splits

    def _names_of_splits(self, found: Mapping[str, list[Path]], options: SourceOptions) -> tuple[str, list[str]]:
        """Return the name of the training split, and those that may be for testing, the best first."""
        if options.splits is not None:
            train, test = _pair(options.splits)
            for name in (train, test):
                if name not in found:
                    raise SettingsError(f"There is no split {shortened(name)!r}; there are {some(sorted(found))}.")
            if train == test:
                raise SettingsError(f"The split {train} cannot be both for training and for testing. Set held_out.")
            return train, [test]
        train = next((name for name in TRAIN_SPLITS if name in found), "")
        tests = [name for name in TEST_SPLITS if name in found]
        if not train and len(found) == 1 and options.held_out is not None:
            train = next(iter(found))
        if not train or (not tests and options.held_out is None):
            missing = "split for training" if not train else "split for testing"
            raise DataError(
                f"There is no {missing}; there are {some(sorted(found))}. Choose with splits (train,test), or set "
                "held_out to test with a share of the training images."
            )
        return train, [] if options.held_out is not None else tests


def find_columns(shard: Path, wanted: str | None) -> tuple[str, str]:
    """Return the columns of images and labels: those that are wanted, or the only ones of their kinds."""
    import pyarrow

    schema = schema_of(shard)
    if wanted is not None:
        image, label = _pair(wanted)
        for column in (image, label):
            if column not in schema.names:
                raise SettingsError(f"There is no column {shortened(column)!r}; there are {some(schema.names)}.")
        return image, label

    def is_bytes(kind: Any) -> bool:
        return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))

    def has_bytes(kind: Any) -> bool:
        return bool(pyarrow.types.is_struct(kind)) and any(
            kind.field(place).name == "bytes" and is_bytes(kind.field(place).type) for place in range(kind.num_fields)
        )

    types = {name: schema.field(name).type for name in schema.names}
    said = features(shard)
    images = (
        [name for name in types if said.get(name) == "Image"]
        or [name for name, kind in types.items() if has_bytes(kind)]
        or [name for name, kind in types.items() if is_bytes(kind)]
    )
    integers = [name for name, kind in types.items() if pyarrow.types.is_integer(kind)]
    labels = [name for name in types if said.get(name) == "ClassLabel"] or (
        ["label"] if "label" in integers else integers
    )
    for kind, found in (("images", images), ("labels (whole numbers)", labels)):
        if len(found) != 1:
            what = f"several columns of {kind}: {some(found)}" if found else f"no column of {kind}"
            raise DataError(
                f"{shard} has {what}. Its columns are {some(schema.names, 20)}. Choose two with columns: image,label."
            )
    return images[0], labels[0]


def _pair(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _parquet_below(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder. Give the folder of the Parquet files.")
    return [file for file in files_below(folder) if file.name.endswith(".parquet") and file.is_file()]


def _split_of(file: Path) -> tuple[str, Path]:
    """Return the split that a file belongs to, and the folder of its configuration."""
    word = re.split(r"[-.]", file.name)[0]
    if re.search(r"[A-Za-z]", word):
        return word, file.parent
    return file.parent.name, file.parent.parent


def _labels_of(files: Sequence[Path], image: str, label: str) -> np.ndarray:
    return np.concatenate([read_labels(file, image, label) for file in files])


def _all_rows(files: list[Path], labels: np.ndarray) -> Chosen:
    return Chosen(files, np.arange(len(labels)), labels)


def _of_classes(chosen: Chosen, used: Sequence[int]) -> Chosen:
    position = np.full(max(*used, int(chosen.labels.max(initial=0))) + 1, -1)
    position[list(used)] = np.arange(len(used))
    labels = position[chosen.labels]
    kept = np.flatnonzero(labels >= 0)
    return Chosen(chosen.files, chosen.rows[kept], labels[kept].astype(np.int64))


def _held_out(chosen: Chosen, names: Sequence[str], share: float, seed: int) -> dict[str, Chosen]:
    held_out = np.zeros(len(chosen.rows), bool)
    for label, name in enumerate(names):
        members = np.flatnonzero(chosen.labels == label)
        if len(members) == 1:
            raise DataError(f"Class {name!r} has only one training image, which cannot be held out as well.")
        held_out[members[held_out_choice(len(members), share, seed, name)]] = True
    return {
        split: Chosen(chosen.files, chosen.rows[rows], chosen.labels[rows])
        for split, rows in (("train", ~held_out), ("test", held_out))
    }


def _usual_size(chosen: Chosen, image_column: str) -> int:
    """Return the side of the images if they are equal squares, else the usual one; from the first ones."""
    rows = chosen.rows[:SAMPLED_SIDES]
    found = [sides(each) for _, piece in ShardSupply.of(chosen.files, image_column).read(rows) for each in piece]
    width, height = found[0]
    if set(found) == {(width, width)} and width == height and width <= 224:
        return width
    return usual_side([min(each) for each in found])
