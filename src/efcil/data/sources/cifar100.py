"""CIFAR-100: Parquet shards with the Hub's columns, or the original Python archive."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from efcil.data.cache import Allocate, Built, Request, load_or_build
from efcil.data.checksum import checksum_contents
from efcil.data.images import Dataset
from efcil.data.sources import Source, SourceOptions
from efcil.data.sources.pickles import read_pickle
from efcil.data.sources.shards import Layout, check_labels, class_names, decode_shards, find_shards
from efcil.errors import DataError, shortened

HUB_REPOSITORY = "uoft-cs/cifar100"
ARCHIVE = "cifar-100-python.tar.gz"
FOLDER = "cifar-100-python"
PARTS = ("train", "test", "meta")
#: Limits of CIFAR-100: bytes of one file and of all files of an archive, number of files.
MOST_BYTES, MOST_UNPACKED, MOST_MEMBERS = 256 * 2**20, 512 * 2**20, 1000
_LAYOUT = Layout("CIFAR-100", "img", "fine_label", size=32, classes=100, images=60_000)

# Kept as text because a list of 100 quoted words, one per line, would hide the rest of the file.
_NAMES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel "
    "can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur "
    "dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion "
    "lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree "
    "pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea "
    "seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank "
    "telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)
CLASS_NAMES = tuple(_NAMES.split())


class Cifar100(Source):
    """100 classes, 50,000 training and 10,000 test images of 32 x 32 pixels."""

    name = "cifar100"
    title = "CIFAR-100"
    description = "100 classes, 50,000 training and 10,000 test images of 32 x 32 pixels"
    expected = (
        "Expected: a folder with train*.parquet and test*.parquet (columns img and fine_label), as in the dataset "
        f"{HUB_REPOSITORY} of the Hugging Face Hub; or the original archive {ARCHIVE} from "
        f"https://www.cs.toronto.edu/~kriz/cifar.html; or its extracted folder {FOLDER}/ with the files train, test "
        "and meta. Without a path the shards are downloaded from the Hub, which needs a network and the package "
        "huggingface_hub."
    )
    needs_path = False
    fixed_size = 32

    def load(self, path: Path | None, options: SourceOptions) -> Dataset:
        """Return CIFAR-100 from `path`, or from the Hub if there is no path."""
        downloaded = path is None
        location = self._download() if path is None else path
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
        return Dataset(
            name=self.name,
            train=decoded.train,
            test=decoded.test,
            class_names=decoded.class_names,
            image_size=32,
            mean=(0.5071, 0.4867, 0.4408),
            std=(0.2675, 0.2565, 0.2761),
        )

    def _layout(self, path: Path, options: SourceOptions) -> tuple[str, list[Path], Callable[[Allocate], Built]]:
        """Return which of the layouts `path` has, the files that make it up, and how to decode them."""
        if path.is_file():
            if not path.name.endswith((".tar.gz", ".tgz", ".tar")):
                raise DataError(f"{path} is neither a folder nor the archive {ARCHIVE}. {self.expected}")
            return "archive", [path], partial(_build_from_archive, path)
        if shards := find_shards(path):
            files = [*shards["train"], *shards["test"]]
            return "parquet", files, partial(_build_from_shards, shards, options.workers)
        for folder in (path, path / FOLDER):
            if (folder / "train").is_file():
                files = [folder / part for part in PARTS]
                for file in files:
                    if not file.is_file():
                        raise DataError(f"{file} is missing. {self.expected}")
                return "pickles", files, partial(_build_from_folder, files)
        if (path / ARCHIVE).is_file():
            return self._layout(path / ARCHIVE, options)
        raise DataError(f"{path} holds no CIFAR-100 files. {self.expected}")

    def _download(self) -> Path:
        try:
            from huggingface_hub import snapshot_download
        except ImportError as error:
            raise DataError(
                f"{self.title} has no path, and downloading it needs the package huggingface_hub: install it, or give "
                f"a path. {self.expected}"
            ) from error
        try:
            return Path(snapshot_download(HUB_REPOSITORY, repo_type="dataset", allow_patterns=["*.parquet"]))
        except Exception as error:  # every network library below has its own family of errors
            reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
            raise DataError(
                f"{self.title} has no path and could not be downloaded from the Hub ({reason}). Check the network, or "
                f"give a path. {self.expected}"
            ) from error


def _build_from_shards(shards: dict[str, list[Path]], workers: int | None, allocate: Allocate) -> Built:
    labels = decode_shards(_LAYOUT, shards, workers, allocate)
    names = class_names(shards["train"][0], _LAYOUT.label)
    return Built(labels, names if names is not None and len(names) == 100 else CLASS_NAMES)


def _build_from_folder(files: list[Path], allocate: Allocate) -> Built:
    return _build_from_pickles(_read_folder(files), allocate)


def _build_from_archive(archive: Path, allocate: Allocate) -> Built:
    return _build_from_pickles(_read_archive(archive), allocate)


def _build_from_pickles(contents: dict[str, tuple[bytes, str]], allocate: Allocate) -> Built:
    labels = {}
    for split in ("train", "test"):
        content, where = contents[split]
        batch = read_pickle(content, where)
        pixels, fine = batch.get("data"), batch.get("fine_labels")
        if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != 3072:
            raise DataError(f"{where} holds no array 'data' of 3072 bytes per image. Download the archive again.")
        if not isinstance(fine, list) or len(fine) != len(pixels) or not all(type(label) is int for label in fine):
            raise DataError(f"{where} holds no list 'fine_labels' with one label per image. Is it CIFAR-10?")
        if any(label.bit_length() > 63 for label in fine):
            raise DataError(f"{where} holds labels far beyond 0 .. 99. Download the archive again.")
        labels[split] = np.array(fine, np.int64)
        check_labels(labels[split], _LAYOUT, where, 0)
        # In the file an image is its red, green and blue plane, one after the other.
        allocate(split, len(pixels), 32)[:] = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    content, where = contents["meta"]
    names = read_pickle(content, where).get("fine_label_names")
    if not isinstance(names, list) or len(names) != 100:
        raise DataError(f"{where} holds no list 'fine_label_names' of 100 names. Download the archive again.")
    if not all(isinstance(name, str | bytes) for name in names):
        raise DataError(f"{where} has class names that are not text. Download the archive again.")
    return Built(labels, tuple(name.decode(errors="replace") if isinstance(name, bytes) else name for name in names))


def _read_folder(files: list[Path]) -> dict[str, tuple[bytes, str]]:
    try:
        for file in files:
            _refuse_large(file.stat().st_size, str(file))
        return {file.name: (file.read_bytes(), str(file)) for file in files}
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}).") from error


class _Bounded(io.RawIOBase):
    """The unpacked bytes of an archive, up to a limit: a few bytes can unpack to very many, also between the files."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, all that are wanted or up to the end."""
        end = self._stream.tell() + size
        if size < 0 or end > MOST_UNPACKED:
            raise DataError(f"It unpacks to more than {MOST_UNPACKED / 2**20:.0f} MiB. Get {ARCHIVE}.")
        return self._stream.read(size)

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        """Go to an offset, counted from the beginning."""
        if whence != io.SEEK_SET or position > MOST_UNPACKED:
            raise DataError(f"It unpacks to more than {MOST_UNPACKED / 2**20:.0f} MiB. Get {ARCHIVE}.")
        return self._stream.seek(position)

    def tell(self) -> int:
        """Return the offset that is read next."""
        return self._stream.tell()


def _refuse_large(size: int, where: str) -> None:
    if size > MOST_BYTES:
        raise DataError(
            f"{where} holds {size / 2**20:,.0f} MiB, but no file of CIFAR-100 has more than 150. Get {ARCHIVE}."
        )


def _read_archive(archive: Path) -> dict[str, tuple[bytes, str]]:
    contents: dict[str, tuple[bytes, str]] = {}
    try:
        with open(archive, "rb") as packed:
            compressed = packed.read(2) == b"\x1f\x8b"
            packed.seek(0)
            unpacked: Any = gzip.GzipFile(fileobj=packed) if compressed else packed
            bounded = _Bounded(unpacked)
            with tarfile.open(fileobj=bounded, mode="r:") as opened:
                for count, member in enumerate(opened):
                    where = f"{member.name} in {archive}"
                    _refuse_large(member.size, where)
                    if count == MOST_MEMBERS:
                        raise DataError(f"{archive} holds more than {MOST_MEMBERS} files. Get {ARCHIVE}.")
                    name = member.name.rsplit("/", 1)[-1]
                    if name in PARTS and (member.issym() or member.islnk()):
                        raise DataError(f"{where} is a link, not the data. Get {ARCHIVE}.")
                    if name in PARTS and (stream := opened.extractfile(member)) is not None:
                        contents[name] = (stream.read(), where)
            while compressed and bounded.read(1 << 20):
                pass  # the checksum is at the very end, after the files
    except DataError:
        raise
    except Exception as error:  # for damaged headers the library may raise almost anything
        reason = shortened(str(error), 200) or type(error).__name__
        raise DataError(f"{archive} is damaged or truncated ({reason}). Download it again.") from error
    for part in PARTS:
        if part not in contents:
            raise DataError(
                f"{archive} holds no file {part!r}. It may be truncated, or another archive: get {ARCHIVE}."
            )
    return contents
