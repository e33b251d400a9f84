"""Where decoded images are kept: in the memory of the device, else in that of the host, else in a file that is mapped.

The first of the three that has room is used; results do not depend on it. The file has no name from the moment it
exists: the system removes it when the map is closed, and also when the process is killed.

Processes of one run on one machine have one copy in host memory, or one file: memory is then a file without a name,
too, which all of them map (`ranks.one_file`).
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
_UNKNOWN = 2**63 - 1
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
        way to it are on the host. Every process has its own.
        """
        free, processes = self.room.of(self.tier), ranks.place().local_size
        beside = "" if free is None else f" ({gibibytes(free)} free)"
        where = "memory" if self.device.type == "cpu" and self.tier != DISK else _WORDS[self.tier]
        if processes > 1:
            where += f", once for {processes} processes" if common(self) else f", for each of {processes} processes"
        text = f"{self.count:,} images, {gibibytes(self.bytes)}, are kept in {where}{beside}. Expected peak: "
        end = "for images and prepared steps; the network comes on top."
        if self.device.type == "cpu":
            memory = processes * prepared + (0 if self.tier == DISK else copies() * self.bytes)
            return f"{text}{gibibytes(memory)} {end}"
        on_device = prepared + (self.bytes if self.tier == DEVICE else 0)
        on_host = processes * staged + (copies() * self.bytes if self.tier == HOST else 0)
        device = "the device" if processes == 1 else "each device"
        return f"{text}{gibibytes(on_device)} on {device} and {gibibytes(on_host)} on the host {end}"


@dataclass(frozen=True)
class Keeping:
    """Which tier images are kept in: `auto`, or one of them; in which folder the file is; the share that stays free."""

    choice: str = AUTO
    folder: Path | None = None
    spare: float = SPARE

    def measure(self, device: torch.device, held: int = 0) -> Room:
        """Return what is free now; copies of the images on this machine, if there are several, divide host and disk.

        `held` bytes of the host count as free: the images that are to be kept are there already.
        """
        here = copies()
        free = _shared(_free_host(), here)
        host = None if free is None else free + held

        @cache
        def disk() -> int | None:
            return _shared(_free_disk(self.place), here)

        if device.type == "cuda":
            return Room(free_bytes(device), host, disk)
        # A CPU computes in host memory; how much other devices have cannot be asked.
        return Room(host if device.type == "cpu" else None, host, disk)

    def agreed(self, device: torch.device, held: int = 0) -> Room:
        """Return the least that is free for any process of the run, so that all of them choose alike."""
        if not ranks.several():
            return self.measure(device, held)
        # Once all have said what they hold, all have freed what they do not need any more.
        all_held = ranks.gather(torch.tensor(held))
        room = self.measure(device, int(all_held[list(ranks.mates())].sum()))
        own = [_UNKNOWN if free is None else free for free in (room.device, room.host, room.disk())]
        least = [None if free == _UNKNOWN else free for free in ranks.gather(torch.tensor(own)).amin(0).tolist()]
        return Room(least[0], least[1], lambda: least[2])

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
        """Return where `count` images of `needed` bytes are kept; a DataError says why they fit nowhere.

        Processes of one run, which have `agreed` on the room, call this together.
        """
        for tier in TIERS:
            if self.has(tier, needed, room):
                return Kept(count, needed, tier, room, device)
        refused = self.refusal(count, needed, room)
        ranks.fail_together(refused)
        raise refused

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


def copies() -> int:
    """Return how many copies of the images are on this machine: one, if its processes share it."""
    return ranks.place().local_size // len(ranks.mates())


def common(kept: Kept) -> bool:
    """Return whether several processes of this machine have one copy of the images."""
    return len(ranks.mates()) > 1 and (kept.tier != DEVICE or kept.device.type == "cpu")


def collected(kept: Kept) -> Kept:
    """Return where decoded images are put first: for GPUs, where all processes that decode them can reach them."""
    if len(ranks.mates()) == 1 or common(kept):
        return kept
    return replace(kept, tier=HOST if kept.room.has(HOST, kept.bytes, SPARE) else DISK)


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
    """Return an uninitialised uint8 tensor in the tier that was chosen, which all processes of the machine have."""
    if kept.tier != DISK and not common(kept):
        return torch.empty(tuple(shape), dtype=torch.uint8, device=kept.device if kept.tier == DEVICE else "cpu")
    size = int(np.prod(shape, dtype=np.int64))
    with ranks.one_file(partial(_reserved, keeping, kept.tier, size)) as file:
        return _mapped(file, size).view(*shape)


def table(rows: int, columns: int) -> np.ndarray:
    """Return numbers (int64) that all processes of the machine have."""
    if len(ranks.mates()) == 1:
        return np.zeros((rows, columns), np.int64)
    with ranks.one_file(ranks.in_memory) as file:
        return np.memmap(file, np.int64, "r+", shape=(rows, columns))


def _reserved(keeping: Keeping, tier: str, size: int) -> IO[bytes]:
    """Return a new file of `size` bytes, in memory or on disk."""
    if tier != DISK:
        file = ranks.in_memory()
        file.truncate(size)
        return file
    file = _unnamed_file(keeping)
    try:
        # Writing through a map to a full disk would kill the process; reserved first, it is an error.
        if hasattr(os, "posix_fallocate") and size:
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
    except OSError as error:
        raise _no_file(keeping, error) from error
    return file


def _unnamed_file(keeping: Keeping) -> IO[bytes]:
    try:
        keeping.place.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(buffering=0, dir=keeping.place)
    except OSError as error:
        raise _no_file(keeping, error) from error


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
    host memory before they are added. Processes of one machine fill one spool, in rounds: one piece of each.
    """

    keeping: Keeping
    device: torch.device
    count: int
    held: int = 0
    room: Room = field(init=False)
    size: int = field(default=0, init=False)
    #: Images and bytes that all processes of the run have decoded.
    _decoded: list[int] = field(default_factory=lambda: [0, 0], init=False)
    #: What this process has put in, in memory that is its own.
    _pieces: list[np.ndarray] = field(default_factory=list, init=False)
    #: Or the file that it has put it in, in memory or on disk, and which bytes of that these are.
    _file: IO[bytes] | None = field(default=None, init=False)
    _spans: list[tuple[int, int]] = field(default_factory=list, init=False)
    _on_disk: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.room = self.keeping.agreed(self.device, self.held)
        if self.keeping.choice == DISK:
            self._move()
        elif len(ranks.mates()) > 1:
            self._file = ranks.one_file(ranks.in_memory)

    def reserve(self, images: Sequence[int], sizes: Sequence[int]) -> int:
        """Return the first byte of the piece of this process; every process has one, of so many images and bytes.

        Raise as soon as it is clear that all images will fit nowhere. All processes of a run call this together.
        """
        near, here = ranks.mates(), ranks.place().rank
        start = self.size + sum(sizes[near[0] : here])
        self.size += sum(sizes[near[0] : near[-1] + 1])
        self._decoded = [self._decoded[0] + sum(images), self._decoded[1] + sum(sizes)]
        expected = self._decoded[1] * self.count // self._decoded[0]
        self.keeping.choose(self.count, expected, self.device, self.room)
        # Whichever tier they end in, all of them are here before they are copied there.
        spare = self.keeping.spare if self.keeping.choice == AUTO else 0.0
        if not self._on_disk and not self.room.has(HOST, expected, spare):
            self._move()
        return start

    def put(self, piece: np.ndarray, start: int) -> None:
        """Put a piece where there is a place for it."""
        if self._file is None:
            self._pieces.append(piece)
            return
        self._spans.append((start, len(piece)))
        try:
            self._file.seek(start)
            while len(piece):
                piece = piece[self._file.write(piece.data) :]  # the system may write less than it is given
        except OSError as error:
            raise _no_file(self.keeping, error) from error

    def _move(self) -> None:
        """Write what is there to the file, and everything else that comes."""
        self.room.disk()  # asked now, as what is written is no longer free
        memory, spans, self._spans = self._file, self._spans, []
        self._file, self._on_disk = ranks.one_file(partial(_unnamed_file, self.keeping)), True
        error = None
        try:
            start = 0
            while self._pieces:
                piece = self._pieces.pop(0)
                self.put(piece, start)
                start += len(piece)
            if memory is not None:
                with memory:
                    for start, length in spans:
                        self.put(np.memmap(memory, np.uint8, "r", start, (length,)), start)
        except DataError as failure:
            error = failure
        ranks.fail_together(error)

    def finish(self) -> tuple[Tensor, Kept]:
        """Return all bytes in the tier that their number allows."""
        kept = self.keeping.choose(self.count, self.size, self.device, self.room)
        if self._file is not None:
            with self._file:
                mapped = _mapped(self._file, self.size)
            if kept.tier == DEVICE and self.device.type != "cpu":
                return mapped.to(self.device), kept
            # Also if it turned out smaller than expected.
            return mapped, replace(kept, tier=DISK) if self._on_disk else kept
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
