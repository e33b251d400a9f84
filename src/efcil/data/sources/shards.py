"""Parquet shards of images in the layout of the Hugging Face Hub: finding them and reading them in parts."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from efcil.data.decode import Encoded, Fit, decode_into
from efcil.data.deferred import PIECE_IMAGES
from efcil.errors import DataError, shortened, some
from efcil.safe_json import parse

#: Limits of a row group, checked before it is decoded; usual files have row groups of a few MB.
MOST_GROUP_BYTES = 512 * 2**20
#: Compressed images that are decoded together.
_PIECE_BYTES = 256 * 2**20
_NAMED_MISSING = 20
#: Older datasets of the Hub have a checksum at the end: train-00000-of-00001-1359597a978bc4fa.parquet.
_NUMBERED = re.compile(r"-(\d+)-of-(\d+)(?:-[0-9a-f]{8,})?\.parquet$")
#: How the Hub calls splits; each of the names in one line means the same.
TRAIN_SPLITS = ("train", "training")
VALIDATION_SPLITS = ("validation", "valid", "val", "dev")
TEST_SPLITS = ("test", "testing", "eval", "evaluation")
_SPLITS = (*TRAIN_SPLITS, *VALIDATION_SPLITS, *TEST_SPLITS)


@dataclass(frozen=True)
class Rows:
    """The images and labels of one row group, and the number of its first row in the shard."""

    start: int
    images: list[Encoded]
    labels: np.ndarray


def split_of(file: Path) -> tuple[str, Path]:
    """Return the split that a file belongs to, and the folder of its configuration.

    As on the Hub, the split is in the name of the file (train-00000-of-00001, flowers_test) or is that of its folder.
    """
    if file.parent.name.startswith("partial-"):
        raise DataError(
            f"{file.parent} holds only the first gigabytes of a split: the Hub converts no more to Parquet. Get the "
            "files of the dataset itself."
        )
    words = re.findall("[A-Za-z]+", file.stem)
    if numbered := _NUMBERED.search(file.name):
        name = file.name[: numbered.start()].rpartition("-")[2]
    elif known := [word for word in words if word.lower() in _SPLITS]:
        name = known[-1]
    elif not words or file.parent.name.lower() in _SPLITS:
        name = ""
    else:
        name = re.split(r"[-.]", file.name)[0]
    split, folder = (name, file.parent) if name else (file.parent.name, file.parent.parent)
    return split_name(split), folder


def split_name(name: str) -> str:
    """Return the name of a split; those that are known in lower case."""
    return name.lower() if name.lower() in _SPLITS else name


def find_shards(folder: Path, test: Sequence[str] = TEST_SPLITS) -> dict[str, list[Path]] | None:
    """Return the Parquet files of both splits in or below `folder`, or None if there is none at all.

    The test images are in the split that has one of the names in `test`; they are returned as `test` in any case.
    """
    by_split: dict[str, list[Path]] = {}
    for place, folders, names in os.walk(folder):
        # Folders of ImageNet's classes hold a million files, but no shard.
        folders[:] = [name for name in folders if not name.startswith(".") and not re.fullmatch(r"n\d{8}", name)]
        for name in names:
            if name.endswith(".parquet") and not name.startswith("."):
                by_split.setdefault(split_of(Path(place, name))[0], []).append(Path(place, name))
    found = {
        split: sorted(file for name in names for file in by_split.get(name, []))
        for split, names in (("train", TRAIN_SPLITS), ("test", test))
    }
    if not any(found.values()):
        return None
    for split, shards in found.items():
        if not shards:
            raise DataError(
                f"{folder} holds no {'train' if split == 'train' else test[0]}*.parquet file. Both {TRAIN_SPLITS[0]} "
                f"and {test[0]} shards are needed; there are {some(sorted(by_split))}."
            )
        folders = sorted({str(shard.parent) for shard in shards})
        if len(folders) > 1:
            raise DataError(
                f"{folder} holds {split} shards in several folders ({', '.join(folders)}), which may be copies of each "
                "other. Give the path of the one to read."
            )
        for shard in shards:
            if not shard.is_file():  # a pipe might never end
                raise DataError(f"{shard} is not a regular file. Give a folder with the files of the dataset.")
        refuse_gaps(shards)
    return found


def count_rows(shard: Path) -> int:
    """Return the number of rows a shard holds, from its footer."""
    rows = int(_open(shard).metadata.num_rows)
    if rows < 0:
        raise DataError(f"{shard} names {rows} rows, so it is damaged. Download it again.")
    return rows


def class_names(shard: Path, label_column: str) -> tuple[str, ...] | None:
    """Return the class names that the Hub keeps in a shard's schema, or None if there are none."""
    metadata = _open(shard).schema_arrow.metadata or {}
    try:
        names = parse(metadata[b"huggingface"].decode())["info"]["features"][label_column]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else None


def shared_names(shards: Iterable[Path], label_column: str) -> tuple[str, ...] | None:
    """Return the class names that shards of all splits agree on; None if none has names."""
    named = [(shard, names) for shard in shards if (names := class_names(shard, label_column)) is not None]
    for shard, names in named:
        if names != named[0][1]:
            raise DataError(
                f"{named[0][0]} and {shard} number the classes differently: {_difference(named[0][1], names)}. "
                "Download both again."
            )
    return named[0][1] if named else None


def published_names(found: Sequence[str] | None, published: Sequence[str], title: str, shard: Path) -> tuple[str, ...]:
    """Return the names of the classes of a published dataset; refuse shards that number them in another order.

    A name that is spelt otherwise is no other order: on the Hub, `crab` of CIFAR-100 is called `cra`.
    """
    if found is None or len(found) != len(published):
        return tuple(published)
    place = {name: number for number, name in enumerate(published)}
    same = [name.lower().replace(" ", "_") for name in found]
    moved = [number for number, name in enumerate(same) if place.get(name, number) != number]
    if moved:
        raise DataError(
            f"{shard} numbers the classes in another order than {title}: {_difference(published, found, moved[0])}. "
            "Results would not be comparable; use files with the published order."
        )
    return tuple(published) if any(name in place for name in same) else tuple(found)


def _difference(first: Sequence[str], second: Sequence[str], place: int | None = None) -> str:
    """Say of one class how two lists call it."""
    if place is None:
        differing = (number for number, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
        place = next(differing, min(len(first), len(second)))
    names = [each[place] if place < len(each) else "missing" for each in (first, second)]
    return f"class {place} is {shortened(names[0])!r} and {shortened(names[1])!r}"


def schema_of(shard: Path) -> Any:
    """Return the names and types of a shard's columns."""
    return _open(shard).schema_arrow


def features(shard: Path) -> dict[str, str]:
    """Return what the Hub says of columns, such as Image or ClassLabel; nothing if it says nothing."""
    metadata = _open(shard).schema_arrow.metadata or {}
    try:
        found = parse(metadata[b"huggingface"].decode())["info"]["features"]
        return {str(name): str(facts["_type"]) for name, facts in found.items() if "_type" in facts}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def read_rows(shard: Path, image_column: str, label_column: str) -> Iterator[Rows]:
    """Yield the rows of a shard, one row group at a time; errors name the shard and, if known, the row."""
    opened = _open(shard)
    _check_columns(opened, shard, image_column, label_column)
    start = 0
    for table in _tables(opened, shard, image_column, label_column, range(opened.metadata.num_row_groups)):
        contents = _image_bytes(table.column(image_column))
        labels = _labels(table.column(label_column), shard, start)
        images = []
        for offset, content in enumerate(contents):
            where = f"The image in row {start + offset} of {shard}"
            if content is None:
                raise DataError(f"{where} is missing. Download the file again.")
            images.append(Encoded(content, where))
        start += len(images)
        if start > opened.metadata.num_rows:
            break
        yield Rows(start - len(images), images, labels)
    if start != opened.metadata.num_rows:
        named = opened.metadata.num_rows
        raise DataError(f"{shard} holds {start} rows or more, but names {named}. Download it again.")


def read_labels(shard: Path, image_column: str, label_column: str) -> np.ndarray:
    """Return the labels of a shard without reading its images."""
    opened = _open(shard)
    _check_columns(opened, shard, image_column, label_column)
    labels = _labels(_read_column(opened, shard, label_column), shard, 0)
    if len(labels) != opened.metadata.num_rows:
        raise DataError(f"{shard} holds {len(labels)} labels, but names {opened.metadata.num_rows}. Download it again.")
    return labels


def read_words(shard: Path, column: str) -> list[str]:
    """Return a column of text; a DataError names a row without any."""
    words = _read_column(_open(shard), shard, column).to_pylist()
    if None in words:
        raise DataError(f"The label in row {words.index(None)} of {shard} is missing. Download the file again.")
    return [str(word) for word in words]


def read_paths(shard: Path, image_column: str) -> list[str | None]:
    """Return the names that the images of a shard had as files, None where it does not say."""
    opened = _open(shard)
    kind = opened.schema_arrow.field(image_column).type
    if not (_is_struct(opened, image_column) and kind.get_field_index("path") >= 0):
        return [None] * count_rows(shard)
    paths = _read_column(opened, shard, f"{image_column}.path").combine_chunks()
    return [str(path) if path is not None else None for path in paths.field("path").to_pylist()]


def _read_column(opened: Any, shard: Path, column: str) -> Any:
    import pyarrow

    try:
        return opened.read(columns=[column]).column(0)
    except (pyarrow.ArrowException, OSError) as error:
        raise _broken(shard, error) from error


@dataclass(frozen=True, eq=False)
class ShardSupply:
    """Images in the row groups of shards, read group by group; `ends` are the numbers of images up to each group."""

    image_column: str
    groups: tuple[tuple[Path, int], ...]
    ends: np.ndarray

    @classmethod
    def of(cls, shards: list[Path], image_column: str) -> ShardSupply:
        """Return the images of shards; only their footers are read."""
        groups, counts = [], []
        for shard in shards:
            facts = _open(shard).metadata
            groups += [(shard, group) for group in range(facts.num_row_groups)]
            counts += [facts.row_group(group).num_rows for group in range(facts.num_row_groups)]
        return cls(image_column, tuple(groups), np.cumsum([0, *counts]))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, list[Encoded]]]:
        """Yield the images called `rows`; groups without any of them are not read.

        Row groups of the Hub have 100 images, of which a task needs a few: several groups are decoded together.
        """
        groups = np.searchsorted(self.ends, rows, side="right") - 1
        order = np.argsort(groups, kind="stable")
        needed, starts = np.unique(groups[order], return_index=True)
        places_of = dict(zip(needed.tolist(), np.split(order, starts[1:]), strict=True))
        places: list[np.ndarray] = []
        found: list[Encoded] = []
        for shard, members in itertools.groupby(needed.tolist(), key=lambda group: self.groups[group][0]):
            for group, contents in self._contents(shard, list(members)):
                places.append(places_of[group])
                found += [contents[row - self.ends[group]] for row in rows[places[-1]]]
                if len(found) >= PIECE_IMAGES or _size(found) >= _PIECE_BYTES:
                    yield np.concatenate(places), found
                    places, found = [], []
        if found:
            yield np.concatenate(places), found

    def _contents(self, shard: Path, groups: list[int]) -> Iterator[tuple[int, list[Encoded]]]:
        """Yield the images of some row groups of a shard."""
        begin = self.ends[next(group for group, (file, _) in enumerate(self.groups) if file == shard)]
        tables = _tables(_open(shard), shard, self.image_column, None, [self.groups[group][1] for group in groups])
        for group, table in zip(groups, tables, strict=True):
            contents = list(_image_bytes(table.column(self.image_column)))
            if len(contents) != self.ends[group + 1] - self.ends[group]:
                raise DataError(f"{shard} does not hold the rows that it names. Download it again.")
            found = []
            for row, content in enumerate(contents, start=int(self.ends[group] - begin)):
                where = f"The image in row {row} of {shard}"
                if content is None:
                    raise DataError(f"{where} is missing. Download the file again.")
                found.append(Encoded(content, where))
            yield group, found


def _size(images: Iterable[Encoded]) -> int:
    return sum(len(each.content) for each in images if isinstance(each.content, bytes))


@dataclass(frozen=True)
class Layout:
    """Which columns hold images and labels, the side of the images, how many classes and images there are in all."""

    title: str
    image: str
    label: str
    size: int
    classes: int
    images: int


def check_columns(shard: Path, layout: Layout) -> None:
    """Refuse a shard without the columns of a layout."""
    _check_columns(_open(shard), shard, layout.image, layout.label)


def decode_shards(
    layout: Layout, shards: dict[str, list[Path]], workers: int | None, allocate: Callable[[str, int, int], np.ndarray]
) -> dict[str, np.ndarray]:
    """Decode all images of the shards into the arrays that `allocate` gives; return the labels of every split."""
    labels = {}
    for split, files in shards.items():
        counts = [count_rows(file) for file in files]
        if sum(counts) > layout.images:
            raise DataError(
                f"{files[0].parent} holds {sum(counts):,} {split} images, but {layout.title} has {layout.images:,} in "
                "total. Check the files."
            )
        images = allocate(split, sum(counts), layout.size)
        parts = []
        begin = 0
        for file, count in zip(files, counts, strict=True):
            for rows in read_rows(file, layout.image, layout.label):
                check_labels(rows.labels, layout, f"the rows of {file}", rows.start)
                first = begin + rows.start
                decode_into(images[first : first + len(rows.images)], rows.images, Fit(layout.size), workers)
                parts.append(rows.labels)
            begin += count
        labels[split] = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return labels


def check_labels(labels: np.ndarray, layout: Layout, where: str, start: int) -> None:
    """Raise if a label is not one of the dataset's."""
    wrong = np.flatnonzero((labels < 0) | (labels >= layout.classes))
    if len(wrong):
        raise DataError(
            f"Label {labels[wrong[0]]} of image {start + wrong[0]} in {where} is not in 0 .. {layout.classes - 1}. "
            f"Check that the file belongs to {layout.title}."
        )


def _check_columns(opened: Any, shard: Path, image_column: str, label_column: str) -> None:
    available = opened.schema_arrow.names
    for column in (image_column, label_column):
        if column not in available:
            raise DataError(
                f"{shard} has no column {column!r} (it has {', '.join(available)}). "
                "Check that the file belongs to this dataset."
            )
    _check_types(opened.schema_arrow, shard, image_column, label_column)


def _tables(
    opened: Any, shard: Path, image_column: str, label_column: str | None, groups: Iterable[int]
) -> Iterator[Any]:
    """Yield the columns, some rows at a time; groups that would fill the memory are refused before they are read.

    Equal images are stored once in a file, and once in memory: a small file can refer to a large image many times.
    """
    import pyarrow
    from pyarrow import parquet

    leaf = f"{image_column}.bytes" if _is_struct(opened, image_column) else image_column
    columns = (leaf,) if label_column is None else (leaf, label_column)
    try:
        reader = parquet.ParquetFile(shard, read_dictionary=[leaf])
        for group in groups:
            _refuse_large(opened.metadata.row_group(group), columns, shard)
            yield reader.read_row_group(group, columns=list(columns), use_threads=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise _broken(shard, error) from error


def _refuse_large(group: Any, columns: tuple[str, ...], shard: Path) -> None:
    chunks = [group.column(index) for index in range(group.num_columns)]
    size = sum(abs(chunk.total_uncompressed_size) for chunk in chunks if chunk.path_in_schema in columns)
    if size > MOST_GROUP_BYTES:
        raise DataError(
            f"{shard} has a row group of {size / 2**20:,.0f} MiB, but at most {MOST_GROUP_BYTES / 2**20:.0f} are read "
            "together. Write it again with smaller row groups."
        )


def _is_struct(opened: Any, column: str) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_struct(opened.schema_arrow.field(column).type))


def refuse_gaps(shards: list[Path]) -> None:
    """Refuse numbered shards of which some are missing, or that are of several copies."""
    numbered = [(int(match[1]), int(match[2])) for shard in shards if (match := _NUMBERED.search(shard.name))]
    # Also one file with everything beside its parts.
    if len({total for _, total in numbered}) > 1 or len(set(numbered)) < (len(shards) if numbered else 0):
        names = some([shard.name for shard in shards])
        raise DataError(
            f"{shards[0].parent} holds parts of several copies of a split: {names}. Keep those of one copy."
        )
    for total in {total for _, total in numbered}:
        found = {number for number, of in numbered if of == total}
        # A name can claim any number of shards, so the search ends after as many as the message names.
        missing = list(itertools.islice((number for number in range(total) if number not in found), _NAMED_MISSING))
        if missing:
            split = shards[0].name.split("-")[0]
            names = ", ".join(f"{split}-{number:05d}-of-{total:05d}.parquet" for number in missing)
            names += " and perhaps more" if len(missing) == _NAMED_MISSING else ""
            raise DataError(f"{shards[0].parent} lacks {names}. Download the missing part of the dataset.")


def _open(shard: Path) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(shard)
    except (pyarrow.ArrowException, OSError) as error:
        raise _broken(shard, error) from error


def _broken(shard: Path, error: Exception) -> DataError:
    if shard.is_file():
        with open(shard, "rb") as stream:
            if stream.read(23) == b"version https://git-lfs":
                return DataError(f"{shard} is a Git LFS pointer, not the data. Fetch the file itself (git lfs pull).")
    reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    return DataError(f"{shard} is not a readable Parquet file; it may be truncated ({reason}). Download it again.")


def _check_types(schema: Any, shard: Path, image_column: str, label_column: str) -> None:
    import pyarrow

    kind, label_kind = schema.field(image_column).type, schema.field(label_column).type
    if pyarrow.types.is_struct(kind):
        fields = [kind.field(index).name for index in range(kind.num_fields)]
        if "bytes" not in fields:
            raise DataError(f"Column {image_column!r} of {shard} has no field 'bytes' (it has {', '.join(fields)}).")
        kind = kind.field("bytes").type
    if not (pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)):
        raise DataError(f"Column {image_column!r} of {shard} has {kind}, but encoded images (binary) are expected.")
    if not pyarrow.types.is_integer(label_kind):
        raise DataError(f"Column {label_column!r} of {shard} has {label_kind}, but integer labels are expected.")


def _image_bytes(column: Any) -> Iterator[bytes | None]:
    import pyarrow

    for chunk in column.chunks:
        # Without the values of a struct that is itself missing.
        encoded = chunk.flatten()[0] if pyarrow.types.is_struct(chunk.type) else chunk
        if not pyarrow.types.is_dictionary(encoded.type):
            yield from encoded.to_pylist()
            continue
        contents = encoded.dictionary.to_pylist()
        yield from (None if place is None else contents[place] for place in encoded.indices.to_pylist())


def _labels(column: Any, shard: Path, start: int) -> np.ndarray:
    if column.null_count:
        row = start + column.to_pylist().index(None)
        raise DataError(f"The label in row {row} of {shard} is missing. Download the file again.")
    return column.to_numpy().astype(np.int64)
