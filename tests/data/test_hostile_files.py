"""Data files made to hang, to fill the memory or to be believed: each must end in a sentence, soon."""

from __future__ import annotations

import dataclasses
import gzip
import inspect
import io
import itertools
import os
import pickle
import sys
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from efcil.data import cache
from efcil.data.cache import Allocate, Built, Request, load_or_build
from efcil.data.decode import Encoded, Fit, decode_image
from efcil.data.scenario import class_order
from efcil.data.sources import SourceOptions, cifar, cifar100, load_dataset, pickles, shards
from efcil.data.sources.listing import files_below
from efcil.data.sources.pickles import read_pickle
from efcil.errors import DataError, SettingsError

DOUBLED = b")" + 40 * b"2\x86"  # a tuple of the tuple before it, twice, and so 40 times
START = b"\x80\x04"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"}" + DOUBLED + b"K\x01s.", "a key that is not text"),
        (b"}(" + DOUBLED + b"K\x01u.", "a key that is not text"),
        (b"(" + DOUBLED + b"K\x01d.", "a key that is not text"),
        (b"})" + 200_000 * b"\x85" + b"K\x01s.", "a key that is not text"),
        (b"}K\x01K\x01s.", "a key that is not text"),
        (b"c_codecs\nencode\n(X\x01\x00\x00\x00a" + DOUBLED + b"tR.", "in a way that is not allowed"),
        (b"\x8f.", "a step that image data does not need"),
        (b"c_codecs\nencode\n}X\x08\x00\x00\x00__name__K\x01sb.", "changes something that is not an array"),
        (b"}r\xff\xff\xff\x7f0.", "is refused"),
        (b"I" + 5000 * b"9" + b"\n.", "is refused"),
        (b"\x96" + (1 << 40).to_bytes(8, "little") + b"x.", "is refused"),
        (b"\x8e" + (1 << 40).to_bytes(8, "little") + b"x.", "is refused"),
        (b"c" + 5000 * b"m" + b"\nn\n.", "is refused"),
    ],
)
def test_pickles_that_would_take_years_or_all_memory(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        read_pickle(START + content, "train")
    assert len(str(raised.value)) < 500


def test_pickles_of_very_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "MOST_STEPS", 1000, raising=False)
    with pytest.raises(DataError, match="more than 1,000 steps"):
        read_pickle(START + b"](" + 2000 * b"]" + b"e.", "train")


def test_types_and_names_of_pickles_are_not_written_out(tmp_path: Path) -> None:
    kind = b"cnumpy\ndtype\n(" + DOUBLED + b"tR"
    array = b"cnumpy.core.numeric\n_frombuffer\n(C\x01x" + kind + b"K\x01\x85X\x01\x00\x00\x00CtR"
    with pytest.raises(DataError, match="not one of unsigned bytes"):
        read_pickle(START + b"}X\x04\x00\x00\x00data" + array + b"s.", "train")
    write_pickles(tmp_path)
    names = b"}X\x10\x00\x00\x00fine_label_names](" + DOUBLED + b"q\x00" + 99 * b"h\x00" + b"es."
    (tmp_path / "meta").write_bytes(START + names)
    with pytest.raises(DataError, match="class names that are not text"):
        load(tmp_path)


def test_labels_that_no_array_can_hold(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    write_pickles(folder)
    (folder / "train").write_bytes(pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "fine_labels": [1 << 200]}))
    with pytest.raises(DataError, match="train holds labels far beyond"):
        load(folder)


def write_pickles(folder: Path) -> None:
    pixels = np.zeros((2, 3072), np.uint8)
    for split in ("train", "test"):
        (folder / split).write_bytes(pickle.dumps({"data": pixels, "fine_labels": [0, 99]}))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": list(cifar100.CLASS_NAMES)}))


def load(path: Path) -> Any:
    return load_dataset("cifar100", path, SourceOptions(cache=path.parent / "cache"))


# -- archives --------------------------------------------------------------------------------------------------------


def archive_of(tmp_path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    file = tmp_path / "cifar-100-python.tar.gz"
    with tarfile.open(file, "w:gz", format=tarfile.GNU_FORMAT) as opened:
        for member, content in members:
            opened.addfile(member, io.BytesIO(content))
    return file


def member(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size, made.type, made.linkname = size, kind, link
    return made


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
@pytest.mark.parametrize("target", ["train", "test", "nowhere", "/etc/passwd"])
def test_links_and_loops_in_an_archive(tmp_path: Path, kind: bytes, target: str) -> None:
    other = "train" if target == "test" else target
    archive = archive_of(
        tmp_path, (member("c/train", kind=kind, link=target), b""), (member("c/test", kind=kind, link=other), b"")
    )
    with pytest.raises(DataError, match=r"c/train in .*tar\.gz is a link"):
        load(archive)


def test_archives_that_unpack_to_very_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(cifar, "MOST_UNPACKED", 2 << 20)
    large = bytes((1 << 20) + 1)
    with pytest.raises(DataError, match=r"c/unused in .* but no file of CIFAR-100 has more"):
        load(archive_of(tmp_path, (member("c/unused", len(large)), large)))
    halves = [(member(f"c/{number}", 1 << 20), bytes(1 << 20)) for number in range(3)]
    with pytest.raises(DataError, match="unpacks to more than 2 MiB"):
        load(archive_of(tmp_path, *halves))


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_SPARSE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_headers_that_claim_8_gigabytes(tmp_path: Path, kind: bytes) -> None:
    header = bytearray(member("c/train", 8 << 30, kind).tobuf(tarfile.GNU_FORMAT))
    if kind == tarfile.GNUTYPE_SPARSE:  # almost all of it a hole
        header[483:495] = b"77777777777\0"
        header[148:156] = b"%06o\0 " % (256 + sum(header[:148]) + sum(header[156:512]))
    file = tmp_path / "cifar-100-python.tar.gz"
    file.write_bytes(gzip.compress(bytes(header) + bytes(10240)))
    with pytest.raises(DataError, match=r"but no file of CIFAR-100 has more|unpacks to more than"):
        load(file)


def test_archives_of_very_many_files_and_long_chains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "MOST_MEMBERS", 10)
    with pytest.raises(DataError, match="holds more than 10 files"):
        load(archive_of(tmp_path, *((member(f"c/{number}"), b"") for number in range(20))))
    chain = member("x", 5, tarfile.GNUTYPE_LONGNAME).tobuf(tarfile.GNU_FORMAT) + bytes(512)
    file = tmp_path / "cifar-100-python.tar.gz"
    file.write_bytes(gzip.compress(2000 * chain))
    with pytest.raises(DataError, match="is damaged or truncated"):
        load(file)


def test_the_checksum_of_an_archive_is_read(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    write_pickles(tmp_path / "p")
    names = ("train", "test", "meta")
    contents = [(name, (tmp_path / "p" / name).read_bytes()) for name in names]
    archive = archive_of(tmp_path, *((member(f"c/{name}", len(content)), content) for name, content in contents))
    content = bytearray(archive.read_bytes())
    assert load(archive).number_of_classes == 100
    content[-8] ^= 1
    archive.write_bytes(content)
    with pytest.raises(DataError, match="is damaged or truncated"):
        load(archive)


def test_files_of_a_folder_have_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    write_pickles(folder)
    monkeypatch.setattr(cifar, "MOST_BYTES", 100)
    with pytest.raises(DataError, match="but no file of CIFAR-100 has more"):
        load(folder)


# -- Parquet ---------------------------------------------------------------------------------------------------------


def write_shard(file: Path, contents: list[bytes], names: str | None = None, **options: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = pa.array([{"bytes": content, "path": "x" * 1000} for content in contents], kind)
    table = pa.table({"img": images, "fine_label": pa.array([0] * len(contents), pa.int64())})
    if names is not None:
        table = table.replace_schema_metadata({"huggingface": names})
    pq.write_table(table, file, compression="zstd", **options)


def test_equal_images_of_a_shard_take_the_room_of_one(tmp_path: Path) -> None:
    file = tmp_path / "train-0.parquet"
    write_shard(file, [bytes(10_000)] * 300)
    (rows,) = shards.read_rows(file, "img", "fine_label")
    assert len(rows.images) == 300
    assert len({id(image.content) for image in rows.images}) == 1


def test_row_groups_that_unpack_to_very_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "train-0.parquet"
    write_shard(file, [bytes([number]) * 100_000 for number in range(20)], use_dictionary=False)
    assert file.stat().st_size < 20_000
    monkeypatch.setattr(shards, "MOST_GROUP_BYTES", 1 << 20, raising=False)
    with pytest.raises(DataError, match=r"train-0\.parquet has a row group of 2 MiB"):
        list(shards.read_rows(file, "img", "fine_label"))


def test_more_rows_than_the_dataset_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "test"):
        write_shard(tmp_path / "s" / f"{split}-0.parquet", [b"x"] * 20)
    monkeypatch.setattr(cifar100.Cifar100, "layout", dataclasses.replace(cifar100.Cifar100.layout, images=10))
    with pytest.raises(DataError, match="holds 20 train images"):
        load(tmp_path / "s")


def test_names_of_shards_that_ask_for_very_many(tmp_path: Path) -> None:
    write_shard(tmp_path / "s" / "train-00000-of-99999999999.parquet", [b"x"])
    write_shard(tmp_path / "s" / "test-0.parquet", [b"x"])
    with pytest.raises(DataError, match=r"lacks train-00001-of-99999999999.* and perhaps more") as raised:
        load(tmp_path / "s")
    assert len(str(raised.value)) < 2000


def test_deep_names_in_a_shard_are_no_names(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-0.parquet", [b"x"], names=100_000 * "[" + 100_000 * "]")
    assert shards.class_names(tmp_path / "train-0.parquet", "fine_label") is None


def test_a_pipe_in_the_place_of_a_shard_is_not_waited_for(tmp_path: Path) -> None:
    write_shard(tmp_path / "s" / "test-0.parquet", [b"x"])
    os.mkfifo(tmp_path / "s" / "train-0.parquet")
    with pytest.raises(DataError, match=r"train-0\.parquet is not a regular file"):
        load(tmp_path / "s")


# -- images and folders ----------------------------------------------------------------------------------------------


def png_header(width: int, height: int) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (1, 1)).save(stream, "PNG")
    content = bytearray(stream.getvalue())
    content[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    return bytes(content)


def test_images_of_another_size_are_not_decoded(tmp_path: Path) -> None:
    encoded = Encoded(png_header(9000, 9000), "The image x.png")
    with pytest.raises(DataError, match=r"x\.png is 9000 x 9000 pixels, but 32 x 32 is expected"):
        decode_image(encoded, Fit(32))


def test_decompression_bombs_are_named(tmp_path: Path) -> None:
    file = tmp_path / "bomb.png"
    file.write_bytes(png_header(60_000, 60_000))
    with pytest.raises(DataError, match=r"bomb\.png is refused: .*decompression bomb"):
        decode_image(Encoded(file, str(file)), Fit(32, resize=True))


def test_folders_nested_deeper_than_the_stack(tmp_path: Path) -> None:
    deepest = tmp_path / ("a/" * 200)
    deepest.mkdir(parents=True)
    (deepest / "x.png").touch()
    usual = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(len(inspect.stack(0)) + 100)
        found = files_below(tmp_path)
    finally:
        sys.setrecursionlimit(usual)
    assert [file.name for file in found] == ["x.png"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ("[" * 80 + "]" * 80, "nested too deeply"),
        ("[" + "9" * 5000 + "]", "too long"),
        ("9" * 5000, "Line 1 of .* is not a class"),
        ("9" * 4000, "Line 1 of .* is not a class"),
        ("[[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25]]", "neither"),
    ],
)
def test_class_orders_that_are_too_deep_or_too_long(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "order").write_text(text)
    with pytest.raises(SettingsError, match=message) as raised:
        class_order(str(tmp_path / "order"), 3, 0, ("a", "b", "c"))
    assert len(str(raised.value)) < 600


# -- the cache -------------------------------------------------------------------------------------------------------


def test_no_byte_of_a_manifest_is_believed_once_it_is_another(tmp_path: Path) -> None:
    request = Request("thing", tmp_path, "inputs", {"size": 4}, tmp_path)

    def build(allocate: Allocate) -> Built:
        for split in ("train", "test"):
            allocate(split, 2, 1)[:] = 0
        return Built({split: np.arange(2) for split in ("train", "test")}, ("caf\u00e9", "cat"))

    load_or_build(request, tmp_path / "cache", build)
    (manifest,) = (tmp_path / "cache").glob("thing-*/manifest.json")
    content = manifest.read_bytes()
    changes = [
        content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
        for place, bit in zip(range(len(content)), itertools.cycle((1, 2, 4, 7, 32)), strict=False)
    ]
    changes += [content[:-1], content + b" ", content + b"\n", b"", content.replace(b"\n", b"\r\n"), b"[" * 100_000]
    for changed in changes:
        manifest.write_bytes(changed)
        with pytest.raises(cache._Damaged):
            cache._read(manifest.parent, request)
    assert len(changes) > 500
    with pytest.warns(UserWarning, match="decoded again"):
        assert load_or_build(request, tmp_path / "cache", build).class_names == ("caf\u00e9", "cat")
    assert cache._read_or_warn(manifest.parent, request) is not None
