"""Parquet shards of images as the Hugging Face Hub lays them out: finding them and reading them piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from efcil.data.decode import Encoded
from efcil.errors import DataError

_NUMBERED = re.compile(r"-(\d+)-of-(\d+)\.parquet$")


@dataclass(frozen=True)
class Rows:
    """The images and labels of one row group, and where they begin in their shard."""

    start: int
    images: list[Encoded]
    labels: np.ndarray


def find_shards(folder: Path) -> dict[str, list[Path]] | None:
    """Return the train*.parquet and test*.parquet files in or below `folder`, or None when there is none at all."""
    files = [
        file
        for file in sorted(folder.rglob("*.parquet"))
        if not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]
    found = {split: [file for file in files if file.name.startswith(split)] for split in ("train", "test")}
    if not any(found.values()):
        return None
    for split, shards in found.items():
        if not shards:
            raise DataError(f"{folder} holds no {split}*.parquet file. Both train and test shards are needed.")
        folders = sorted({str(shard.parent) for shard in shards})
        if len(folders) > 1:
            raise DataError(
                f"{folder} holds {split} shards in several folders ({', '.join(folders)}), which may be copies of each "
                "other. Give the path of the one to read."
            )
        _refuse_gaps(shards)
    return found


def count_rows(shard: Path) -> int:
    """Return the number of rows a shard holds, from its footer."""
    return int(_open(shard).metadata.num_rows)


def class_names(shard: Path, label_column: str) -> tuple[str, ...] | None:
    """Return the class names that the Hub keeps in a shard's schema, or None when there are none."""
    metadata = _open(shard).schema_arrow.metadata or {}
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label_column]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return tuple(str(name) for name in names) if isinstance(names, list) else None


def read_rows(shard: Path, image_column: str, label_column: str) -> Iterator[Rows]:
    """Yield the rows of a shard, one row group at a time; errors name the shard and, where it is known, the row."""
    import pyarrow

    opened = _open(shard)
    available = opened.schema_arrow.names
    for column in (image_column, label_column):
        if column not in available:
            raise DataError(
                f"{shard} has no column {column!r} (it has {', '.join(available)}). "
                "Check that the file belongs to this dataset."
            )
    start = 0
    for group in range(opened.metadata.num_row_groups):
        try:
            table = opened.read_row_group(group, columns=[image_column, label_column], use_threads=True)
        except (pyarrow.ArrowException, OSError) as error:
            raise _broken(shard, error) from error
        contents = _image_bytes(table.column(image_column), shard, image_column)
        labels = _labels(table.column(label_column), shard, label_column, start)
        images = []
        for offset, content in enumerate(contents):
            where = f"The image in row {start + offset} of {shard}"
            if content is None:
                raise DataError(f"{where} is missing. Download the file again.")
            images.append(Encoded(content, where))
        yield Rows(start, images, labels)
        start += len(images)


def _refuse_gaps(shards: list[Path]) -> None:
    numbered = [(int(match[1]), int(match[2])) for shard in shards if (match := _NUMBERED.search(shard.name))]
    for total in {total for _, total in numbered}:
        missing = sorted(set(range(total)) - {number for number, of in numbered if of == total})
        if missing:
            split = shards[0].name.split("-")[0]
            names = ", ".join(f"{split}-{number:05d}-of-{total:05d}.parquet" for number in missing)
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


def _image_bytes(column: Any, shard: Path, name: str) -> list[bytes | None]:
    import pyarrow
    from pyarrow import compute

    if pyarrow.types.is_struct(column.type):
        fields = [column.type.field(index).name for index in range(column.type.num_fields)]
        if "bytes" not in fields:
            raise DataError(f"Column {name!r} of {shard} has no field 'bytes' (it has {', '.join(fields)}).")
        column = compute.struct_field(column, "bytes")
    if not (pyarrow.types.is_binary(column.type) or pyarrow.types.is_large_binary(column.type)):
        raise DataError(f"Column {name!r} of {shard} holds {column.type} where encoded images (binary) are expected.")
    contents: list[bytes | None] = column.to_pylist()
    return contents


def _labels(column: Any, shard: Path, name: str, start: int) -> np.ndarray:
    import pyarrow

    if not pyarrow.types.is_integer(column.type):
        raise DataError(f"Column {name!r} of {shard} holds {column.type} where integer labels are expected.")
    if column.null_count:
        row = start + column.to_pylist().index(None)
        raise DataError(f"The label in row {row} of {shard} is missing. Download the file again.")
    return column.to_numpy().astype(np.int64)
