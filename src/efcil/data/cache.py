"""Decode once: decoded images stored as memory-mapped arrays next to the data, or in a cache folder.

An entry is a folder:

    <source>-<key>/
      manifest.json               format, source, settings, checksum of the inputs, class names, of every array file
                                  its shape, size in bytes, SHA-256 and SHA-256 of sampled blocks, and the SHA-256 of
                                  all this
      train/images.npy, labels.npy
      test/images.npy, labels.npy

Where entries are: only in the folder asked for (`cache`, else $EFCIL_CACHE); if none is asked for, in `.efcil-cache`
next to the data if that is writable, else in ~/.cache/efcil.

What is checked before an entry is used: every byte of the manifest, the checksum of the inputs (changed inputs are
decoded again and replace the entry), the size of every file, and the SHA-256 of every file up to 256 MiB. Of larger
files the first, the last and 62 evenly spaced blocks of 64 KiB are checked; damage between them is found only by
`verify`, which `efcil data verify` calls.

Entries appear by one rename of a complete, flushed folder. Processes that need the same entry wait for each other if
the file system has locks. Otherwise both do the work, which does no harm.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from efcil.data.checksum import digest, relative_name, sampled_digest
from efcil.data.images import ImageSet
from efcil.errors import DataError
from efcil.files import ForeignFile, open_regular, read_regular
from efcil.safe_json import MOST_BYTES, parse

try:
    import fcntl
except ImportError:  # not a POSIX system: entries are still installed by rename, but processes do not wait
    fcntl = None  # type: ignore[assignment]

#: Increase it whenever the layout, the decoding, or what is checked of labels and class names changes: entries of
#: another format are not used. 3: files that number the classes in another order than the published one are refused.
FORMAT = 3
SPLITS = ("train", "test")
FULL_CHECK_BYTES = 256 * 2**20
BESIDE = ".efcil-cache"

Allocate = Callable[[str, int, int], np.ndarray]


@dataclass(frozen=True)
class Request:
    """What identifies decoded images: source, data, checksum of the inputs, and the settings of the decoding."""

    source: str
    data: Path
    inputs: str
    settings: Mapping[str, Any]
    beside: Path | None  # the folder of the data, or None if nothing may be written there


@dataclass(frozen=True)
class Built:
    """What a build returns after filling the arrays it allocated: the labels of both splits and the class names."""

    labels: Mapping[str, np.ndarray]
    class_names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Decoded:
    """Both splits, decoded, and the class names."""

    train: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]


class _CannotWrite(Exception):
    """This cache folder cannot be written; another one, or memory, may be used instead."""


class _Damaged(DataError):
    """An entry exists for this request but differs from what was written."""


def load_or_build(request: Request, cache: Path | None, build: Callable[[Allocate], Built]) -> Decoded:
    """Return the images of `request` from the cache, or build and store them there.

    `build` gets `allocate(split, count, image_size)` and must fill the uint8 arrays that this returns, one for "train"
    and one for "test". It is called again if a cache folder turns out to be unwritable.
    """
    roots = cache_folders(request, cache)
    for root in roots:
        if (found := _read_or_warn(root / _entry_name(request, root), request)) is not None:
            return found
    reasons = []
    for root in roots:
        try:
            return _build_in(root, request, build)
        except _CannotWrite as error:
            reasons.append(f"{root}: {error}")
    warnings.warn(
        f"The decoded images of {request.data} are kept in memory only and will be decoded again next time, because no "
        f"cache folder can be written ({'; '.join(reasons)}). Set EFCIL_CACHE to a folder that can.",
        stacklevel=2,
    )
    arrays: dict[str, np.ndarray] = {}

    def allocate(split: str, count: int, size: int) -> np.ndarray:
        arrays[split] = np.empty((count, size, size, 3), np.uint8)
        return arrays[split]

    built = build(allocate)
    for array in arrays.values():
        array.flags.writeable = False
    train, test = (ImageSet(arrays[split], built.labels[split]) for split in SPLITS)
    return Decoded(train, test, built.class_names)


def cache_folders(request: Request, cache: Path | None) -> list[Path]:
    """Return the folders that may hold the entry, in the order in which they are tried."""
    asked = cache or (Path(os.environ["EFCIL_CACHE"]) if os.environ.get("EFCIL_CACHE") else None)
    if asked is not None:
        return [asked.expanduser()]
    folders = [request.beside / BESIDE] if request.beside is not None else []
    with contextlib.suppress(RuntimeError):  # a user without a home folder
        folders.append(Path.home() / ".cache" / "efcil")
    return folders


def entry_of(images: Any) -> Path | None:
    """Return the cache entry that an array is mapped from, None for one in memory."""
    while images is not None:
        if getattr(images, "filename", None):
            # <entry>/<split>/images.npy
            return Path(images.filename).parent.parent
        images = getattr(images, "base", None)
    return None


def verify(entry: Path) -> None:
    """Check every byte of a cache entry against its manifest; a DataError names the file that differs."""
    try:
        _check_files(entry, _manifest(entry), full=True)
    except _Damaged as error:
        raise DataError(f"{error} Delete {entry}; it is created again when it is needed.") from error


def _entry_name(request: Request, root: Path) -> str:
    # Next to the data, the key must survive moving the whole folder; in a shared cache, folders need different keys.
    moves_along = request.beside is not None and root == request.beside / BESIDE
    where = relative_name(request.data, root.parent) if moves_along else str(request.data.resolve())
    key = json.dumps([FORMAT, where, dict(request.settings)], sort_keys=True)
    return f"{request.source}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _read_or_warn(entry: Path, request: Request) -> Decoded | None:
    try:
        return _read(entry, request)
    except _Damaged as error:
        warnings.warn(f"{error} The images are decoded again.", stacklevel=3)
        return None


def _read(entry: Path, request: Request) -> Decoded | None:
    """Return the entry's images, or None if there is no entry or its inputs have changed since."""
    if not entry.is_dir():
        return None
    manifest = _manifest(entry)
    wanted = {"format": FORMAT, "source": request.source, "inputs": request.inputs, "settings": dict(request.settings)}
    if any(manifest.get(name) != value for name, value in wanted.items()):
        return None
    _check_files(entry, manifest, full=False)
    return _open_arrays(entry, manifest)


def _open_arrays(entry: Path, manifest: Mapping[str, Any]) -> Decoded:
    splits = []
    for split in SPLITS:
        try:
            images = np.load(entry / split / "images.npy", mmap_mode="r", allow_pickle=False)
            labels = np.load(entry / split / "labels.npy", allow_pickle=False)
            splits.append(ImageSet(images, labels))
        except Exception as error:  # NumPy's reader may raise almost anything for a bad header
            raise _Damaged(f"The cached images in {entry / split} are damaged ({error}).") from error
    class_names = manifest.get("class_names")
    if not isinstance(class_names, list) or not all(isinstance(name, str) for name in class_names):
        raise _Damaged(f"The cache manifest in {entry} names no classes.")
    return Decoded(splits[0], splits[1], tuple(class_names))


def _manifest(entry: Path) -> dict[str, Any]:
    file = entry / "manifest.json"
    try:
        text = read_regular(file, MOST_BYTES).decode()
        manifest = parse(text)
    except (OSError, ValueError, ForeignFile) as error:
        raise _Damaged(f"The cache manifest {file} cannot be read ({error}).") from error
    if not isinstance(manifest, dict):
        raise _Damaged(f"The cache manifest {file} is not a JSON object.")
    # As text, so that every byte is checked, including spaces and the checksum's own bytes.
    manifest.pop("checksum", None)
    if text != _manifest_text(manifest):
        raise _Damaged(f"The cache manifest {file} is not what was written: its checksum differs.")
    return manifest


def _manifest_text(manifest: Mapping[str, Any]) -> str:
    """Return a manifest as it is written, with the checksum of its content."""
    checksum = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "checksum": checksum}, indent=2) + "\n"


def _check_files(entry: Path, manifest: Mapping[str, Any], *, full: bool) -> None:
    for name in (f"{split}/{part}.npy" for split in SPLITS for part in ("images", "labels")):
        file = entry / name
        try:
            expected = manifest["files"][name]
            size = file.stat().st_size
            if size != expected["bytes"]:
                raise _Damaged(f"The cached array {file} holds {size} bytes instead of {expected['bytes']}.")
            if full or size <= FULL_CHECK_BYTES:
                intact = digest(file) == expected["sha256"]
            else:
                intact = sampled_digest(file) == expected["sampled"]
        except (OSError, KeyError, TypeError) as error:
            raise _Damaged(f"The cached array {file} cannot be checked ({error!r}).") from error
        if not intact:
            raise _Damaged(f"The cached array {file} is not what was written: its checksum differs.")


def _build_in(root: Path, request: Request, build: Callable[[Allocate], Built]) -> Decoded:
    entry = root / _entry_name(request, root)
    with _locked(root, entry.name) as alone:
        with contextlib.suppress(_Damaged):  # a warning has been given already
            if (found := _read(entry, request)) is not None:  # built by another process while this one waited
                return found
        if alone:  # half-built entries are left over from a killed process
            for leftover in root.glob(f".{entry.name}.*.building*"):
                shutil.rmtree(leftover, ignore_errors=True)
        with _writing():
            staging = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", suffix=".building", dir=root))
            os.chmod(staging, 0o755)  # mkdtemp makes it private, but a cache next to shared data is for all its readers
        try:
            return _build_entry(staging, entry, request, build)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _build_entry(staging: Path, entry: Path, request: Request, build: Callable[[Allocate], Built]) -> Decoded:
    arrays: dict[str, np.memmap] = {}

    def allocate(split: str, count: int, size: int) -> np.ndarray:
        with _writing():
            (staging / split).mkdir()
            arrays[split] = _create_array(staging / split / "images.npy", (count, size, size, 3))
        return arrays[split]

    built = build(allocate)
    with _writing():
        for split in SPLITS:
            arrays[split].flush()
            with open(staging / split / "labels.npy", "wb") as stream:
                np.save(stream, built.labels[split], allow_pickle=False)
        files = {file.relative_to(staging).as_posix(): _describe(file) for file in sorted(staging.glob("*/*.npy"))}
        manifest = {
            "format": FORMAT,
            "source": request.source,
            "inputs": request.inputs,
            "settings": dict(request.settings),
            "class_names": list(built.class_names),
            "files": files,
        }
        (staging / "manifest.json").write_bytes(_manifest_text(manifest).encode())
        for path in [*staging.rglob("*"), staging]:
            _flush_to_disk(path)
        # Opened before the rename: the maps stay valid even if another process replaces the entry afterwards.
        decoded = _open_arrays(staging, manifest)
        _install(staging, entry, request)
    return decoded


def _create_array(file: Path, shape: tuple[int, ...]) -> np.memmap:
    # np.lib.format.open_memmap would create a sparse file, and if the disk fills up while holes are written through a
    # map, the process is killed. Reserving the space first gives an error that can be handled.
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    with open(file, "w+b") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        offset, size = stream.tell(), int(np.prod(shape, dtype=np.int64))
        if hasattr(os, "posix_fallocate") and size:
            stream.flush()
            os.posix_fallocate(stream.fileno(), offset, size)
    return np.memmap(file, np.uint8, "r+", offset, shape)


def _describe(file: Path) -> dict[str, Any]:
    shape = np.load(file, mmap_mode="r", allow_pickle=False).shape
    size = file.stat().st_size
    return {"shape": list(shape), "bytes": size, "sha256": digest(file), "sampled": sampled_digest(file)}


def _install(staging: Path, entry: Path, request: Request) -> None:
    """Move the finished folder to its place, unless another process has already put an equal one there."""
    for _ in range(10):
        try:
            os.rename(staging, entry)
        except OSError:
            if not entry.exists():
                raise
            with contextlib.suppress(_Damaged):
                if _read(entry, request) is not None:
                    return
            aside = staging.with_name(f"{staging.name}.old")  # stale or damaged: moved away, then removed
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                os.rename(entry, aside)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            _flush_to_disk(entry.parent)
            return
    raise OSError(f"{entry} keeps being replaced by other processes")


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Turn errors of the file system into _CannotWrite, so that they differ from errors in the data."""
    try:
        yield
    except OSError as error:
        raise _CannotWrite(error.strerror or str(error)) from error


@contextlib.contextmanager
def _locked(root: Path, name: str) -> Iterator[bool]:
    """Hold the lock of an entry, waiting for other processes; yields False if the file system has no locks."""
    with _writing():
        _refuse_read_only(root)
        root.mkdir(parents=True, exist_ok=True)
        stream = open_regular(root / f".{name}.lock", "ab")  # closed below, which also releases the lock
    with stream:
        alone = False
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(stream, fcntl.LOCK_EX)
                alone = True
        yield alone


def _refuse_read_only(root: Path) -> None:
    # A folder without any write permission was made read-only on purpose, although the superuser could write there.
    folder = next((path for path in (root, *root.absolute().parents) if path.exists()), root)
    if not folder.stat().st_mode & 0o222 or not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(13, "the folder is read-only")
