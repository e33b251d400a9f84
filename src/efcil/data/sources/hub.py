"""Any image-classification dataset of the Hugging Face Hub: its Parquet files, downloaded or in a folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from efcil.data.cache import Allocate, Built, Request, load_or_build
from efcil.data.checksum import checksum_contents, relative_name
from efcil.data.decode import SAMPLED_SIDES, Fit, decode_into, sides, usual_side
from efcil.data.images import IMAGENET_MEAN, IMAGENET_STD, Dataset
from efcil.data.sources import Source, SourceOptions, held_out_choice
from efcil.data.sources.classlist import listed_classes
from efcil.data.sources.declared import declared_splits
from efcil.data.sources.download import download
from efcil.data.sources.listing import files_below, is_image
from efcil.data.sources.shards import (
    TEST_SPLITS,
    TRAIN_SPLITS,
    VALIDATION_SPLITS,
    ShardSupply,
    features,
    read_labels,
    read_words,
    refuse_gaps,
    schema_of,
    shared_names,
    split_of,
)
from efcil.errors import DataError, SettingsError, shortened, some

#: How columns of labels are called that have no declared names.
LABEL_COLUMNS = ("label", "labels", "class", "category")
MOST_CLASSES = 1_000_000
#: With more images than these, a column with another value for most of them numbers images, not classes.
FEW_IMAGES = 100
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
        "Expected: Parquet files with a column of images and a column of labels: whole numbers, or words. Without "
        "a path they are downloaded from the Hub, which needs a network and the package huggingface_hub; with one they "
        "are the files below it, with the split in the name of a file or of its folder: train-00000-of-00001.parquet, "
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
                "files": {
                    split: [relative_name(file, folder) for file in each.files] for split, each in splits.items()
                },
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
        declared, labels = _labels(found, (train, *tests), image, label)
        if options.splits is None:  # a split without labels is of no use
            tests = [name for name in tests if (labels[name] >= 0).all()] or tests
        for name in (train, *tests[:1]):
            if (labels[name] < 0).any():
                raise DataError(
                    f"Images of the split {name} in {folder} have no label (-1). Choose splits with labels."
                )
        names = _names_of(declared, labels, (train, *tests[:1]), label)
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
            raise DataError(f"{folder} holds no Parquet file.{_other_form(folder)} {self.expected}")
        splits = declared_splits(folder, files, self.configuration) or self._splits_by_name(folder, files)
        for shards in splits.values():
            refuse_gaps(shards)
        return splits

    def _splits_by_name(self, folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
        """Return the files of every split of one configuration, by the names of files and folders."""
        by_configuration: dict[str, dict[str, list[Path]]] = {}
        for file in files:
            split, above = split_of(file)
            configuration = above.relative_to(folder).as_posix() if above.is_relative_to(folder) else ""
            by_configuration.setdefault(configuration, {}).setdefault(split, []).append(file)
        if self.configuration is not None:
            by_configuration = {
                name: splits for name, splits in by_configuration.items() if self.configuration in name.split("/")
            }
        if len(by_configuration) != 1:
            names = some(sorted(by_configuration) or sorted({split_of(file)[1].name for file in files}))
            raise DataError(
                f"{folder} holds several configurations, or not the one that is named: {names}. Name one of them: "
                f"hub:{self.repository}/CONFIGURATION."
            )
        (splits,) = by_configuration.values()
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
        tests = [name for name in (*TEST_SPLITS, *VALIDATION_SPLITS) if name in found]
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

    def is_text(kind: Any) -> bool:
        return bool(pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind))

    types = {name: schema.field(name).type for name in schema.names}
    said = features(shard)
    images = (
        [name for name in types if said.get(name) == "Image"]
        or [name for name, kind in types.items() if has_bytes(kind)]
        or [name for name, kind in types.items() if is_bytes(kind)]
    )
    integers = [name for name, kind in types.items() if pyarrow.types.is_integer(kind)]
    words = [name for name, kind in types.items() if is_text(kind)]
    declared = [name for name in types if said.get(name) == "ClassLabel"]
    # Several are declared where images have a breed and a kind, or a class and a domain.
    possible = declared or [*integers, *words]
    labels = next(([name] for name in LABEL_COLUMNS if name in possible), declared or integers)
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


def _other_form(folder: Path) -> str:
    """Say what a folder without Parquet files is, if it has images, Arrow files or archives."""
    files = files_below(folder)
    if any(file.suffix == ".arrow" for file in files):
        return " It holds Arrow files of the package datasets: write each split with to_parquet('train.parquet')."
    if any(is_image(file) for file in files):
        return " It holds images: folders of images, one for each class, are the dataset `folder`."
    if archives := [file.name for file in files if file.name.endswith((".zip", ".tar", ".tar.gz", ".tgz"))]:
        return f" It holds archives ({some(archives)}): extract them; folders of images are the dataset `folder`."
    return ""


def _labels(
    found: Mapping[str, list[Path]], splits: Sequence[str], image: str, label: str
) -> tuple[tuple[str, ...] | None, dict[str, np.ndarray]]:
    """Return the declared names of the classes, if there are any, and the labels of the splits."""
    kind = str(schema_of(found[splits[0]][0]).field(label).type)
    if kind not in ("string", "large_string"):
        names = shared_names([found[split][0] for split in splits], label)
        return names, {
            split: np.concatenate([read_labels(file, image, label) for file in found[split]]) for split in splits
        }
    words = {split: [word for file in found[split] for word in read_words(file, label)] for split in splits}
    names = tuple(sorted(set(words[splits[0]])))
    number_of = {name: number for number, name in enumerate(names)}
    for split, each in words.items():
        if unknown := sorted(set(each) - set(names)):
            raise DataError(f"The split {split} has labels that {splits[0]} does not have: {some(unknown)}.")
    return names, {split: np.array([number_of[word] for word in each], np.int64) for split, each in words.items()}


def _names_of(
    declared: tuple[str, ...] | None, labels: Mapping[str, np.ndarray], splits: Sequence[str], column: str
) -> tuple[str, ...]:
    """Return the names of the classes: the declared ones, or numbers where names are missing or repeated."""
    last = max(int(labels[split].max()) for split in splits if len(labels[split]))
    if declared is not None and last >= len(declared):
        raise DataError(f"Column {column!r} has the label {last}, but names of only {len(declared)} classes.")
    if declared is not None and len(set(declared)) == len(declared):
        return declared
    found = labels[splits[0]]
    numbers = len(found) > FEW_IMAGES and 2 * len(np.unique(found)) > len(found)
    if last >= MOST_CLASSES or numbers:
        raise DataError(
            f"Column {column!r} has {len(np.unique(found)):,} values up to {last:,} for {len(found):,} images; these "
            "are no classes. Choose columns."
        )
    return tuple(str(number) for number in range(last + 1))


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
