"""Parquet shards of images as the Hub has them, for the tests of the sources that read them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def png(pixels: np.ndarray) -> bytes:
    """Return an image as a PNG file."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def plain(value: int, width: int, height: int) -> bytes:
    """Return an image of one grey value as a PNG file."""
    return png(np.full((height, width, 3), value, np.uint8))


def write_shard(
    file: Path,
    contents: list[Any],
    labels: list[Any],
    *,
    image: str = "image",
    label: str = "label",
    struct: bool = True,
    names: list[str] | None = None,
    paths: list[str] | None = None,
    more: dict[str, Any] | None = None,
) -> None:
    """Write files of images and their labels in row groups of two; `names` are those of the classes."""
    files = paths or [None] * len(contents)
    images = [{"bytes": each, "path": file} for each, file in zip(contents, files, strict=True)] if struct else contents
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())]) if struct else pa.binary()
    table = pa.table({image: pa.array(images, kind), label: pa.array(labels), **(more or {})})
    if names is not None:
        features = {image: {"_type": "Image"}, label: {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file, row_group_size=2)
