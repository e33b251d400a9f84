"""What CIFAR-10 and CIFAR-100 share: Parquet shards with the Hub's columns, or the original Python archive."""

from __future__ import annotations

import abc
import gzip
import io
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np

from efcil.data.cache import Allocate, Built, Request, load_or_build
from efcil.data.checksum import checksum_contents
from efcil.data.images import Dataset
from efcil.data.sources import Source, SourceOptions
from efcil.data.sources.download import download
from efcil.data.sources.pickles import read_pickle
from efcil.data.sources.shards import (
    Layout,
    check_columns,
    check_labels,
    decode_shards,
    find_shards,
    published_names,
    shared_names,
)
from efcil.errors import DataError, shortened

#: Limits of both: bytes of one file and of all files of an archive, number of files.
MOST_BYTES, MOST_UNPACKED, MOST_MEMBERS = 256 * 2**20, 512 * 2**20, 1000

Contents = dict[str, tuple[bytes, str]]


@dataclass(frozen=True)
class Original:
    """The original archive: its files, and the names of labels and class names in them."""

    archive: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    labels: str
    names: str
    mistaken_for: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all files."""
        return *self.train, *self.test, self.meta


class Cifar(Source):
    """Images of 32 x 32 pixels, with as many of each class."""

    layout: ClassVar[Layout]
    original: ClassVar[Original]
    repository: ClassVar[str]
    usual_names: ClassVar[tuple[str, ...]]

    needs_path = False
    fixed_size = 32

    @property
    @abc.abstractmethod
    def statistics(self) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        """Mean and standard deviation of the training pixels."""

    def load(self, path: Path | None, options: SourceOptions) -> Dataset:
        """Return the dataset from `path`, or from the Hub if there is no path."""
        downloaded = path is None
        location = download(self.repository, self.title, self.expected) if path is None else path
        layout, inputs, build = self._layout(location, options)
        folder = location if location.is_dir() else location.parent
        request = Request(
            source=self.name,
            data=location,
            inputs=checksum_contents(inputs, folder),
            settings={"layout": layout},
            # The Hub's download folder is managed by its own package: nothing is written there.
            beside=None if downloaded else folder,
        )
        decoded = load_or_build(request, options.cache, build)
        mean, deviation = self.statistics
        return Dataset(
            name=self.name,
            train=decoded.train,
            test=decoded.test,
            class_names=decoded.class_names,
            image_size=32,
            mean=mean,
            std=deviation,
        )

    def recognise(self, path: Path) -> None:
        """Refuse a place without any of the layouts, and shards of other columns."""
        layout, files, _ = self._layout(path, SourceOptions())
        if layout == "parquet":
            check_columns(files[0], self.layout)

    def _layout(self, path: Path, options: SourceOptions) -> tuple[str, list[Path], Callable[[Allocate], Built]]:
        """Return which of the layouts `path` has, the files that make it up, and how to decode them."""
        original = self.original
        if path.is_file():
            if not path.name.endswith((".tar.gz", ".tgz", ".tar")):
                raise DataError(f"{path} is neither a folder nor the archive {original.archive}. {self.expected}")
            return "archive", [path], partial(self._build_from_archive, path)
        if shards := find_shards(path):
            files = [*shards["train"], *shards["test"]]
            return "parquet", files, partial(self._build_from_shards, shards, options.workers)
        for folder in (path, path / original.folder):
            if (folder / original.train[0]).is_file():
                files = [folder / part for part in original.parts]
                for file in files:
                    if not file.is_file():
                        raise DataError(f"{file} is missing. {self.expected}")
                return "pickles", files, partial(self._build_from_folder, files)
        if (path / original.archive).is_file():
            return self._layout(path / original.archive, options)
        raise DataError(f"{path} holds no {self.title} files. {self.expected}")

    def _build_from_shards(self, shards: dict[str, list[Path]], workers: int | None, allocate: Allocate) -> Built:
        found = shared_names([shards["train"][0], shards["test"][0]], self.layout.label)
        names = published_names(found, self.usual_names, self.title, shards["train"][0])
        return Built(decode_shards(self.layout, shards, workers, allocate), names)

    def _build_from_folder(self, files: list[Path], allocate: Allocate) -> Built:
        return self._build_from_pickles(_read_folder(files, self.title, self.original.archive), allocate)

    def _build_from_archive(self, archive: Path, allocate: Allocate) -> Built:
        return self._build_from_pickles(_read_archive(archive, self.title, self.original), allocate)

    def _build_from_pickles(self, contents: Contents, allocate: Allocate) -> Built:
        labels = {}
        for split, parts in (("train", self.original.train), ("test", self.original.test)):
            batches = [self._read_batch(*contents[part]) for part in parts]
            labels[split] = np.concatenate([each for _, each in batches])
            target = allocate(split, len(labels[split]), 32)
            end = 0
            for pixels, _ in batches:
                # In the file an image is its red, green and blue plane, one after the other.
                target[end : end + len(pixels)] = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
                end += len(pixels)
        content, where = contents[self.original.meta]
        key, count = self.original.names, self.layout.classes
        names = read_pickle(content, where, self.title).get(key)
        if not isinstance(names, list) or len(names) != count:
            raise DataError(f"{where} holds no list {key!r} of {count} names. Download the archive again.")
        if not all(isinstance(name, str | bytes) for name in names):
            raise DataError(f"{where} has class names that are not text. Download the archive again.")
        text = (name.decode(errors="replace") if isinstance(name, bytes) else name for name in names)
        return Built(labels, tuple(text))

    def _read_batch(self, content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the pixels and labels of one file."""
        batch = read_pickle(content, where, self.title)
        key = self.original.labels
        pixels, found = batch.get("data"), batch.get(key)
        if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != 3072:
            raise DataError(f"{where} holds no array 'data' of 3072 bytes per image. Download the archive again.")
        if not isinstance(found, list) or len(found) != len(pixels) or not all(type(label) is int for label in found):
            mistaken = self.original.mistaken_for
            raise DataError(f"{where} holds no list {key!r} with one label per image. Is it {mistaken}?")
        if any(label.bit_length() > 63 for label in found):
            last = self.layout.classes - 1
            raise DataError(f"{where} holds labels far beyond 0 .. {last}. Download the archive again.")
        labels = np.array(found, np.int64)
        check_labels(labels, self.layout, where, 0)
        return pixels, labels


def _read_folder(files: list[Path], title: str, archive: str) -> Contents:
    try:
        for file in files:
            _refuse_large(file.stat().st_size, str(file), title, archive)
        return {file.name: (file.read_bytes(), str(file)) for file in files}
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}).") from error


class _Bounded(io.RawIOBase):
    """The unpacked bytes of an archive, up to a limit: a few bytes can unpack to very many, also between the files."""

    def __init__(self, stream: IO[bytes], archive: str) -> None:
        self._stream = stream
        self._archive = archive

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, all that are wanted or up to the end."""
        end = self._stream.tell() + size
        if size < 0 or end > MOST_UNPACKED:
            raise DataError(f"It unpacks to more than {MOST_UNPACKED / 2**20:.0f} MiB. Get {self._archive}.")
        return self._stream.read(size)

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        """Go to an offset, counted from the beginning."""
        if whence != io.SEEK_SET or position > MOST_UNPACKED:
            raise DataError(f"It unpacks to more than {MOST_UNPACKED / 2**20:.0f} MiB. Get {self._archive}.")
        return self._stream.seek(position)

    def tell(self) -> int:
        """Return the offset that is read next."""
        return self._stream.tell()


def _refuse_large(size: int, where: str, title: str, archive: str) -> None:
    if size > MOST_BYTES:
        raise DataError(
            f"{where} holds {size / 2**20:,.0f} MiB, but no file of {title} has more than 150. Get {archive}."
        )


def _read_archive(archive: Path, title: str, original: Original) -> Contents:
    contents: Contents = {}
    wanted = original.archive
    try:
        with open(archive, "rb") as packed:
            compressed = packed.read(2) == b"\x1f\x8b"
            packed.seek(0)
            unpacked: Any = gzip.GzipFile(fileobj=packed) if compressed else packed
            bounded = _Bounded(unpacked, wanted)
            with tarfile.open(fileobj=bounded, mode="r:") as opened:
                for count, member in enumerate(opened):
                    where = f"{member.name} in {archive}"
                    _refuse_large(member.size, where, title, wanted)
                    if count == MOST_MEMBERS:
                        raise DataError(f"{archive} holds more than {MOST_MEMBERS} files. Get {wanted}.")
                    name = member.name.rsplit("/", 1)[-1]
                    if name in original.parts and (member.issym() or member.islnk()):
                        raise DataError(f"{where} is a link, not the data. Get {wanted}.")
                    if name in original.parts and (stream := opened.extractfile(member)) is not None:
                        contents[name] = (stream.read(), where)
            while compressed and bounded.read(1 << 20):
                pass  # the checksum is at the very end, after the files
    except DataError:
        raise
    except Exception as error:  # for damaged headers the library may raise almost anything
        reason = shortened(str(error), 200) or type(error).__name__
        raise DataError(f"{archive} is damaged or truncated ({reason}). Download it again.") from error
    for part in original.parts:
        if part not in contents:
            raise DataError(f"{archive} holds no file {part!r}. It may be truncated, or another archive: get {wanted}.")
    return contents
