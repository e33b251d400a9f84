"""Where decoded images are kept: in the memory of the device, else in that of the host, else in a file that is mapped.

The first of the three that has room is used; results do not depend on it. The file has no name from the moment it
exists: the system removes it when the map is closed, and also when the process is killed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from efcil import ranks
from efcil.errors import DataError

AUTO, DEVICE, HOST, DISK = "auto", "device", "host", "disk"
TIERS = (DEVICE, HOST, DISK)
#: The share of what is free that images leave to everything else, where nobody has chosen a tier.
SPARE = 0.25
_WORDS = {DEVICE: "device memory", HOST: "host memory", DISK: "a file that is mapped into memory"}
_GIB = 2**30
#: Threads that copy images out of host memory or a mapped file: from a file, each waits for its own pages.
COPIERS = 8


@dataclass(frozen=True)
class Room:
    """Bytes that are free for this process in every tier; None where that is not known, and never an obstacle.

    The disk is asked once, and only if its answer is needed: file systems of a network may be slow to answer.
    """

    device: int | None
    host: int | None
    disk: Callable[[], int | None]

    def of(self, tier: str) -> int | None:
        """Return the free bytes of a tier."""
        return self.disk() if tier == DISK else self.device if tier == DEVICE else self.host

    def has(self, tier: str, needed: int, spare: float) -> bool:
        """Return whether a tier takes `needed` bytes and keeps the share `spare` of what is free."""
        free = self.of(tier)
        return free is None or needed <= (1 - spare) * free


@dataclass(frozen=True)
class Kept:
    """Where images are: how many, their bytes, the tier, and what was free before."""

    count: int
    bytes: int
    tier: str
    room: Room
    device: torch.device

    def sentence(self, prepared: int, staged: int = 0) -> str:
        """Return one line for the user.

        `prepared` bytes of prepared steps are on the device, whatever the tier, and `staged` bytes of images on their
        way to it are on the host.
        """
        free = self.room.of(self.tier)
        beside = "" if free is None else f" ({gibibytes(free)} free)"
        where = "memory" if self.device.type == "cpu" and self.tier != DISK else _WORDS[self.tier]
        text = f"{self.count:,} images, {gibibytes(self.bytes)}, are kept in {where}{beside}. Expected peak: "
        if self.device.type == "cpu":
            memory = prepared + (0 if self.tier == DISK else self.bytes)
            return f"{text}{gibibytes(memory)} for images and prepared steps; the network comes on top."
        on_device = prepared + (self.bytes if self.tier == DEVICE else 0)
        on_host = staged + (self.bytes if self.tier == HOST else 0)
        return (
            f"{text}{gibibytes(on_device)} on the device and {gibibytes(on_host)} on the host for images and prepared "
            "steps; the network comes on top."
        )


@dataclass(frozen=True)
class Keeping:
    """Which tier images are kept in: `auto`, or one of them; in which folder the file is; the share that stays free."""

    choice: str = AUTO
    folder: Path | None = None
    spare: float = SPARE

    def measure(self, device: torch.device, held: int = 0) -> Room:
        """Return what is free now; processes of the run on this computer share host and disk.

        `held` bytes of the host count as free: the images that are to be kept are there already.
        """
        here = ranks.place().local_size
        free = _shared(_free_host(), here)
        host = None if free is None else free + held

        @cache
        def disk() -> int | None:
            return _shared(_free_disk(self.place), here)

        if device.type == "cuda":
            return Room(free_bytes(device), host, disk)
        # A CPU computes in host memory; how much other devices have cannot be asked.
        return Room(host if device.type == "cpu" else None, host, disk)

    @property
    def place(self) -> Path:
        """The folder of the file: the one given, else $EFCIL_CACHE, else ~/.cache/efcil."""
        if self.folder is not None:
            return self.folder
        asked = os.environ.get("EFCIL_CACHE")
        return Path(asked).expanduser() if asked else Path("~/.cache/efcil").expanduser()

    def has(self, tier: str, needed: int, room: Room) -> bool:
        """Return whether `needed` bytes may be kept in a tier; one that was asked for may be filled entirely."""
        if self.choice not in (AUTO, tier):
            return False
        return room.has(tier, needed, self.spare if self.choice == AUTO else 0.0)

    def choose(self, count: int, needed: int, device: torch.device, room: Room) -> Kept:
        """Return where `count` images of `needed` bytes are kept; a DataError says why they fit nowhere."""
        for tier in TIERS:
            if self.has(tier, needed, room):
                return Kept(count, needed, tier, room, device)
        raise self.refusal(count, needed, room)

    def refusal(self, count: int, needed: int, room: Room) -> DataError:
        """Return the error for images that fit nowhere, or not where they were asked to be."""
        tiers = TIERS if self.choice == AUTO else (self.choice,)
        free = ", ".join(f"{tier} {gibibytes(room.of(tier) or 0)}" for tier in tiers)
        stays = f", of which {self.spare:.0%} must stay free" if self.choice == AUTO else ""
        other = "" if self.choice == AUTO else "leave out --keep-images, "
        return DataError(
            f"{count:,} images need {gibibytes(needed)} together, but free are: {free}{stays}. Make the images "
            f"(stored_side) or the tasks smaller, free some memory, {other}or set EFCIL_CACHE to a folder on a disk "
            f"that has the space (now: {self.place})."
        )


def gibibytes(count: float) -> str:
    """Return a number of bytes for reading."""
    return f"{count / _GIB:.1f} GiB" if count >= 0.05 * _GIB else f"{count / 2**20:.1f} MiB"


# -- what is free ----------------------------------------------------------------------------------------------------


def free_bytes(device: torch.device) -> int:
    """Return how many bytes of a GPU are free, including those that PyTorch holds and does not use."""
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + reusable


def _shared(free: int | None, processes: int) -> int | None:
    return None if free is None else free // processes


def _free_host(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the memory that the host can give to this process; None where the system does not say."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    return min([free, *_left_in_groups(proc, groups)])


def _left_in_groups(proc: Path, groups: Path) -> list[int]:
    """Return what the memory limits of this process leave: containers and jobs of clusters have such limits."""
    try:
        named = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, controllers, name in (parts for parts in named if len(parts) == 3):
        if controllers == "":
            root, limit, used = groups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, used = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / name.lstrip("/")
        # In a container the name may be that of the host; the limit is then the one of the topmost folder.
        for place in (folder, *folder.parents):
            left = _left_in(place, limit, used)
            found += [] if left is None else [left]
            if place == root:
                break
    return found


def _left_in(group: Path, limit: str, used: str) -> int | None:
    try:
        most, now = int((group / limit).read_text()), int((group / used).read_text())
        # Pages of files that were read count as used, but are given up when memory is needed.
        numbers = dict(line.split()[:2] for line in (group / "memory.stat").read_text().splitlines())
        pages = int(numbers.get("total_inactive_file", numbers.get("inactive_file", 0)))
    except (OSError, ValueError):  # there is no such group, or no limit ("max")
        return None
    return max(most - now + pages, 0)


def _free_disk(folder: Path) -> int | None:
    """Return the free bytes of the disk that a folder is, or would be, on."""
    try:
        return shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free
    except (OSError, StopIteration):
        return None


# -- keeping ---------------------------------------------------------------------------------------------------------


def allocate(shape: Sequence[int], kept: Kept, keeping: Keeping) -> Tensor:
    """Return an uninitialised uint8 tensor in the tier that was chosen."""
    if kept.tier != DISK:
        return torch.empty(tuple(shape), dtype=torch.uint8, device=kept.device if kept.tier == DEVICE else "cpu")
    size = int(np.prod(shape, dtype=np.int64))
    try:
        with _unnamed_file(keeping.place) as file:
            # Writing through a map to a full disk would kill the process; reserved first, it is an error.
            if hasattr(os, "posix_fallocate") and size:
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            return _mapped(file, size).view(*shape)
    except OSError as error:
        raise _no_file(keeping, error) from error


def _unnamed_file(folder: Path) -> IO[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryFile(dir=folder)


def _mapped(file: IO[bytes], size: int) -> Tensor:
    """Return the bytes of a file as a tensor; the file lives as long as that."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.memmap(file, np.uint8, "r+", shape=(size,)))


def _no_file(keeping: Keeping, error: OSError) -> DataError:
    return DataError(
        f"The images of the task do not fit in memory, and no file for them can be written in {keeping.place} "
        f"({error.strerror or error}). Set EFCIL_CACHE to a folder on a disk that has the space."
    )


@dataclass(eq=False)
class Spool:
    """Bytes of images whose number is known only when all are decoded, one piece after the other.

    They are in host memory as long as what is expected fits there, otherwise in the file. `held` bytes of them are in
    host memory before they are added.
    """

    keeping: Keeping
    device: torch.device
    count: int
    held: int = 0
    room: Room = field(init=False)
    size: int = field(default=0, init=False)
    _pieces: list[np.ndarray] = field(default_factory=list, init=False)
    _file: IO[bytes] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.room = self.keeping.measure(self.device, self.held)
        if self.keeping.choice == DISK:
            self._move()

    def add(self, piece: np.ndarray, decoded: int) -> None:
        """Add a piece; `decoded` images are there now. Raise as soon as it is clear that they will fit nowhere."""
        self.size += len(piece)
        expected = self.size * self.count // decoded
        self.keeping.choose(self.count, expected, self.device, self.room)
        # Whichever tier they end in, all of them are here before they are copied there.
        spare = self.keeping.spare if self.keeping.choice == AUTO else 0.0
        if self._file is None and not self.room.has(HOST, expected, spare):
            self._move()
        self._put(piece)

    def _put(self, piece: np.ndarray) -> None:
        if self._file is None:
            self._pieces.append(piece)
            return
        try:
            self._file.write(piece.data)
        except OSError as error:
            raise _no_file(self.keeping, error) from error

    def _move(self) -> None:
        """Write what is there to the file, and everything else that comes."""
        self.room.disk()  # asked now, as what is written is no longer free
        try:
            self._file = _unnamed_file(self.keeping.place)
        except OSError as error:
            raise _no_file(self.keeping, error) from error
        while self._pieces:
            self._put(self._pieces.pop(0))

    def finish(self) -> tuple[Tensor, Kept]:
        """Return all bytes in the tier that their number allows."""
        kept = self.keeping.choose(self.count, self.size, self.device, self.room)
        if self._file is not None:
            with self._file:
                self._file.flush()
                mapped = _mapped(self._file, self.size)
            if kept.tier == DEVICE and self.device.type != "cpu":
                return mapped.to(self.device), kept
            return mapped, replace(kept, tier=DISK)  # also if it turned out smaller than expected
        flat = allocate((self.size,), kept, self.keeping)
        end = 0
        while self._pieces:
            piece = self._pieces.pop(0)  # freed as it is copied
            flat[end : end + len(piece)] = torch.from_numpy(piece).to(flat.device)
            end += len(piece)
        return flat, kept


# -- reading ---------------------------------------------------------------------------------------------------------


def apart(pixels: Tensor, device: torch.device) -> bool:
    """Return whether images are elsewhere than the device that computes: rows must be sent to it."""
    return pixels.device.type != device.type


@dataclass(frozen=True, eq=False)
class Gathering:
    """Images that threads copy out of host memory or a mapped file, to one place from which they are sent."""

    staged: Tensor
    work: Sequence[Future[Any]]

    def sent(self, device: torch.device) -> Tensor:
        """Wait for the threads and return the images on the device; on CUDA the copy is queued, not waited for."""
        for each in self.work:
            each.result()
        return self.staged.to(device, non_blocking=True)


def gather(images: Tensor, rows: Tensor, device: torch.device) -> Gathering:
    """Begin to copy rows (on the host) of images (n, ...) that are kept on the host."""
    staged = _staging((len(rows), *images.shape[1:]), device)
    pieces = zip(rows.chunk(COPIERS), staged.chunk(COPIERS), strict=True)
    copy = partial(torch.index_select, images, 0)
    return Gathering(staged, [_copiers(os.getpid()).submit(copy, piece, out=target) for piece, target in pieces])


def gather_spans(pixels: Tensor, starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> Gathering:
    """Begin to copy spans of a flat tensor that is kept on the host; they will lie one after the other."""
    ends = np.cumsum(lengths)
    staged = _staging((int(ends[-1]),), device)
    source, target = pixels.numpy(), staged.numpy()

    def copy(some: np.ndarray) -> None:
        for start, length, end in zip(starts[some].tolist(), lengths[some].tolist(), ends[some].tolist(), strict=True):
            target[end - length : end] = source[start : start + length]

    pieces = np.array_split(np.arange(len(starts)), min(COPIERS, len(starts)))
    return Gathering(staged, [_copiers(os.getpid()).submit(copy, piece) for piece in pieces])


def _staging(shape: Sequence[int], device: torch.device) -> Tensor:
    # For a GPU it is pinned, so that sending does not wait for the device. PyTorch hands pinned memory out again only
    # once the copy that was started from it has ended.
    return torch.empty(tuple(shape), dtype=torch.uint8, pin_memory=device.type == "cuda")


@cache
def _copiers(process: int) -> ThreadPoolExecutor:
    # One for each process: threads do not survive a fork.
    return ThreadPoolExecutor(COPIERS, thread_name_prefix="efcil-images")
