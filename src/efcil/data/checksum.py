"""Checksums of input files and of cached arrays."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from efcil.errors import DataError

SAMPLED_BLOCKS = 64
BLOCK_BYTES = 64 * 2**10


def checksum_contents(files: Iterable[Path], base: Path) -> str:
    """Return the SHA-256 over names and complete contents: for a few large files."""
    total = hashlib.sha256()
    for file in sorted(files):
        try:
            total.update(f"{relative_name(file, base)}\0{digest(file)}\n".encode(errors="surrogateescape"))
        except OSError as error:
            raise DataError(f"{file} cannot be read ({error.strerror or error}). Check that it is complete.") from error
    return total.hexdigest()


def checksum_listing(files: Iterable[Path], base: Path) -> str:
    """Return the SHA-256 over names, sizes and modification times: for folders of many small files.

    A file rewritten with the same size and a restored modification time is not noticed; that would need reading all
    files, which can take as long as decoding them.
    """
    total = hashlib.sha256()
    for name, file in sorted((relative_name(file, base), file) for file in files):
        try:
            status = file.stat()
        except OSError as error:
            raise DataError(f"{file} cannot be read ({error.strerror or error}). Check that it exists.") from error
        total.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return total.hexdigest()


def relative_name(file: Path, base: Path) -> str:
    """Return the name of `file` as seen from `base`, with forward slashes on every system."""
    prefix = f"{base.as_posix()}/"
    name = file.as_posix()
    # The fast path first: for a million files, os.path.relpath alone would take many seconds.
    return name[len(prefix) :] if name.startswith(prefix) else Path(os.path.relpath(file, base)).as_posix()


def digest(file: Path) -> str:
    """Return the SHA-256 of a whole file."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sampled_digest(file: Path) -> str:
    """Return the SHA-256 of the first, the last and evenly spaced blocks in between: quick for files of any size."""
    total = hashlib.sha256()
    with open(file, "rb") as stream:
        last = max(0, stream.seek(0, os.SEEK_END) - BLOCK_BYTES)
        for block in range(SAMPLED_BLOCKS):
            stream.seek(last * block // (SAMPLED_BLOCKS - 1))
            total.update(stream.read(BLOCK_BYTES))
    return total.hexdigest()
