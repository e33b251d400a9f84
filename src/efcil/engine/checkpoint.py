"""Checkpoints: tensors as safetensors and facts as JSON, without pickle, replaced in one atomic move.

    <folder>/
      state.json                  the facts, a checksum over them, and name, size and SHA-256 of the tensor file
      state-<digest>.safetensors  the tensors

The tensor file is named after its content, so a new one never overwrites the old one. Replacing state.json is the
moment from which the new checkpoint counts; the old tensor file is removed after that. A process killed at any point
leaves one complete checkpoint. Reading checks every byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as serialise_tensors
from torch import Tensor

from efcil import ranks
from efcil.engine.interrupt import StopRequest
from efcil.engine.trainer import Position, Trainer
from efcil.errors import TrainingError, some
from efcil.files import is_regular, read_regular, refuse_foreign_file, refuse_foreign_folder, write_own

FORMAT = 1
#: Seconds after which a checkpoint within a task is saved, however many steps there were.
INTERVAL = 300.0
#: A description of more bytes is not read.
LARGEST_DESCRIPTION = 1 << 28
#: Checkpoints of this name are in a folder that the user names, which may be a link. All other folders are our own.
NAMED_BY_USERS = "model"
LEARNER, OPTIMISER, AVERAGE = "learner.", "optimiser.", "average."
#: Steps after which the processes of a run ask each other whether one of them wants to save or to stop.
STEPS_BETWEEN_QUESTIONS = 8
#: What safetensors calls the types of numbers. A file has them in the reverse order.
_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
_TYPES = tuple(_NAMES)


class CheckpointError(TrainingError):
    """A checkpoint that is damaged, does not fit, or cannot be written."""


class Damaged(CheckpointError):
    """A checkpoint that differs from what was written: which file, and how."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"The checkpoint {file} is damaged ({reason}). Remove {file.parent} to train again.")
        self.file = file
        self.reason = reason


class Forbidden(CheckpointError):
    """A checkpoint that may be intact, but that we have no permission to read."""

    def __init__(self, file: Path) -> None:
        super().__init__(f"{file} cannot be read (permission denied). Change its permissions, or ask its owner to.")


@dataclass(frozen=True)
class Description:
    """The description of a checkpoint: its facts, and name, size and SHA-256 of its tensor file."""

    facts: dict[str, Any]
    file: Path
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """What was saved: tensors by name, and facts as plain JSON values."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def write(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], stem: str = "state") -> None:
    """Save a checkpoint in `folder`, replacing an earlier one."""
    sha256, size = _digest_and_size(tensors)
    name = f"{stem}-{sha256[:16]}.safetensors"
    described = {
        "format": FORMAT,
        "facts": _without_nan(facts),
        "tensors": {"file": name, "bytes": size, "sha256": sha256},
    }
    described["checksum"] = _checksum(described)
    _refuse_foreign(folder, stem)
    try:
        write_own(folder / name, tensor_file(tensors))
        write_own(folder / f"{stem}.json", (json.dumps(described, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint in {folder} cannot be written ({error.strerror or error}). The one before it is "
            "intact; fix the cause and run the same command again."
        ) from error
    _tidy(folder, stem, name)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 that the tensor file of a checkpoint with these tensors has."""
    return _digest_and_size(tensors)[0]


def _digest_and_size(tensors: Mapping[str, Tensor]) -> tuple[str, int]:
    found, size = hashlib.sha256(), 0
    for piece in tensor_file(tensors):
        found.update(piece)
        size += len(piece)
    return found.hexdigest(), size


def tensor_file(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the content of a tensor file, byte for byte what safetensors makes, in pieces.

    safetensors holds three copies of all tensors while it makes the file. Here one tensor is copied at a time, and only
    from a device: thousands of class covariances take gigabytes.
    """
    order = sorted(tensors, key=lambda name: (-_TYPES.index(tensors[name].dtype), name))
    header, end = {}, 0
    for name in order:
        start, end = end, end + tensors[name].numel() * tensors[name].element_size()
        named = _NAMES[tensors[name].dtype]
        header[name] = {"dtype": named, "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def taken(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors to write later; each has its own memory, so later changes do not reach it."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def exists(folder: Path, stem: str = "state") -> bool:
    """Return whether `folder` holds a checkpoint, damaged or not."""
    try:
        (folder / f"{stem}.json").lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def owns(name: str, stem: str = "state") -> bool:
    """Return whether `name` is that of a file of a checkpoint."""
    return name == f"{stem}.json" or _is_tensor_file(name, stem)


def orphans(folder: Path, stem: str = "state") -> list[Path]:
    """Return tensor files of a checkpoint whose description is missing."""
    if exists(folder, stem):
        return []
    return sorted(file for file in folder.glob(f"{stem}-*.safetensors") if _is_tensor_file(file.name, stem))


def facts_of(folder: Path, stem: str = "state") -> dict[str, Any]:
    """Read the facts of a checkpoint, even if its tensors are damaged or missing."""
    _refuse_foreign(folder, stem)
    return _read_description(folder, stem).facts


def describe(folder: Path, stem: str = "state") -> Description:
    """Read the description of a checkpoint, without its tensors; one that differs from what was written raises."""
    found = _read_description(folder, stem)
    # Checked before it is opened: anything but a file of that size could fill the memory, or never end.
    try:
        refuse_foreign_file(found.file)
        intact = found.file.stat().st_size == found.bytes
    except OSError:
        intact = False
    if not intact:
        raise Damaged(found.file, "it is missing, or its size differs")
    if not os.access(found.file, os.R_OK):
        raise Forbidden(found.file)
    return found


def described_file(folder: Path, stem: str = "state") -> Path:
    """Return where the tensors of a checkpoint belong, whether they are there or not."""
    return _read_description(folder, stem).file


def _read_description(folder: Path, stem: str) -> Description:
    file = folder / f"{stem}.json"
    try:
        described = json.loads(read_regular(file, LARGEST_DESCRIPTION).decode())
    except PermissionError:
        raise Forbidden(file) from None
    except OSError as error:
        raise Damaged(file, error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise Damaged(file, str(error)) from None
    if not isinstance(described, dict) or not isinstance(described.get("format"), int):
        raise Damaged(file, "it is not a description of a checkpoint")
    if described["format"] != FORMAT:
        raise CheckpointError(
            f"{file} has format {described['format']}, but this version of efcil reads format {FORMAT}. "
            "Use the version that wrote it."
        )
    try:
        intact = described.pop("checksum", None) == _checksum(described)
    except ValueError:  # NaN and infinity, which Python's parser accepts and no checkpoint contains
        intact = False
    if not intact:
        raise Damaged(file, "its checksum differs")
    entry, facts = described.get("tensors"), described.get("facts")
    if not isinstance(entry, dict) or not isinstance(facts, dict):
        raise Damaged(file, "it is not a description of a checkpoint")
    # The name comes from a file: it must not point outside the folder.
    if not _is_tensor_file(str(entry.get("file")), stem):
        raise Damaged(file, "it names a file that no checkpoint has")
    return Description(facts, folder / entry["file"], entry.get("bytes", -1), entry.get("sha256", ""))


def read(folder: Path, stem: str = "state") -> Checkpoint:
    """Load a checkpoint; one that differs from what was written raises."""
    _refuse_foreign(folder, stem)
    return read_described(describe(folder, stem))


def read_described(described: Description) -> Checkpoint:
    """Load the tensors of a checkpoint whose description has been read."""
    file = described.file
    try:
        content = read_regular(file)
    except OSError as error:
        raise Damaged(file, error.strerror or str(error)) from None
    if len(content) != described.bytes or hashlib.sha256(content).hexdigest() != described.sha256:
        raise Damaged(file, "its checksum differs")
    try:
        return Checkpoint(parse_tensors(content), described.facts)
    except Exception as error:  # a file with the right checksum may still come from anywhere
        raise Damaged(file, f"it holds no tensors: {error}") from None


def read_and_tidy(folder: Path, stem: str = "state") -> Checkpoint:
    """Load a checkpoint that no other process is writing, and remove what a killed process left next to it."""
    found = read(folder, stem)
    tidy(folder, stem)
    return found


def from_first(found: Checkpoint | None) -> Checkpoint | None:
    """Return what the first process of a run has found; only that one reads files."""
    if not ranks.several():
        return found
    facts = ranks.from_first(None if found is None else found.facts)
    if facts is None:
        return None
    content = ranks.bytes_from_first(b"" if found is None else serialise_tensors(taken(found.tensors)))
    return Checkpoint(parse_tensors(content), facts)


def tidy(folder: Path, stem: str = "state") -> None:
    """Remove what a killed process left next to a checkpoint that no other process is writing."""
    _tidy(folder, stem, describe(folder, stem).file.name)


def remove(folder: Path, stem: str = "state") -> None:
    """Remove a checkpoint and its folder; if the folder has other files, which may be the user's, keep these and it.

    The description is removed first, so that half a checkpoint is never read as a whole one.
    """
    _refuse_foreign(folder, stem)
    (folder / f"{stem}.json").unlink(missing_ok=True)
    _tidy(folder, stem)
    with contextlib.suppress(OSError):
        folder.rmdir()


# -- checkpoints within a task ---------------------------------------------------------------------------------------


def training_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Return everything that changes while a task trains: the state of learner, optimiser and averaged weights."""
    learner = {LEARNER + name: value for name, value in trainer.learner.state_dict().items()}
    average = {} if trainer.average is None else trainer.average.state()
    learner |= {AVERAGE + name: value for name, value in average.items()}
    return learner | {OPTIMISER + name: value for name, value in trainer.optimiser.state().items()}


@torch.no_grad()
def restore_training(trainer: Trainer, tensors: Mapping[str, Tensor]) -> None:
    """Load what `training_tensors` returned into a new trainer for the same task.

    Values are copied into the existing tensors: parameters may be views of flat buffers of the optimiser.
    """
    present = trainer.learner.state_dict()
    saved = {name.removeprefix(LEARNER): value for name, value in tensors.items() if name.startswith(LEARNER)}
    shapes = {name: tuple(value.shape) for name, value in present.items()}
    if shapes != {name: tuple(value.shape) for name, value in saved.items()}:
        names = some(sorted(shapes.keys() ^ saved.keys())) or "their shapes"
        raise CheckpointError(
            f"The checkpoint does not fit the method that should resume from it ({names} differ). "
            "Remove the folder 'partial' of the run to start that task over."
        )
    for name, value in present.items():
        value.copy_(saved[name])
    optimiser = {name.removeprefix(OPTIMISER): v for name, v in tensors.items() if name.startswith(OPTIMISER)}
    trainer.optimiser.load_state(optimiser)
    if trainer.average is not None:
        trainer.average.load_state({n.removeprefix(AVERAGE): v for n, v in tensors.items() if n.startswith(AVERAGE)})


class TaskKeeper:
    """Saves a checkpoint after so many steps or seconds, and when a stop is requested, which ends the run.

    `stopped` gets the position that is saved, None if nothing had to be.
    """

    def __init__(
        self,
        folder: Path,
        facts: Callable[[Position], Mapping[str, Any]],
        stop: StopRequest,
        stopped: Callable[[Position | None], BaseException],
        steps: int | None = None,
    ) -> None:
        refuse_foreign_folder(folder)
        self.folder = folder
        self.facts = facts
        self.stop = stop
        self.stopped = stopped
        self.steps = steps
        self._held: tuple[dict[str, Tensor], Position] | None = None
        self._start_over()

    def due(self) -> bool:
        """Count a step; return whether enough steps or time have passed, or a stop was requested."""
        self._taken += 1
        enough = self.steps is not None and self._taken >= self.steps
        if ranks.several():
            # All decide alike: what is counted they know, and the rest they ask each other, not after every step.
            asked = not enough and self._taken % STEPS_BETWEEN_QUESTIONS == 0
            return enough or (asked and ranks.anyone(self.stop.requested or time.monotonic() >= self._next))
        return enough or self.stop.requested or time.monotonic() >= self._next

    def asked(self) -> bool:
        """Return whether a stop was requested."""
        return self.stop.agreed()

    def save(self, trainer: Trainer, position: Position) -> None:
        """Write the checkpoint (the first process does), and raise if a stop was requested."""
        if ranks.first():
            write(self.folder, training_tensors(trainer), self.facts(position))
        self._start_over()
        if self.stop.agreed():
            raise self.stopped(position)

    def hold(self, trainer: Trainer, position: Position) -> None:
        """Take the state after the last step; in memory, as hardly a run is stopped between there and its next task."""
        self._held = taken(training_tensors(trainer)) if ranks.first() else {}, position

    def stop_at_end(self) -> None:
        """If a stop was requested, write the state after the last step, if any was taken, and raise."""
        if not self.stop.agreed():
            return
        if self._held is None:
            raise self.stopped(None)
        tensors, position = self._held
        if ranks.first():
            write(self.folder, tensors, self.facts(position))
        raise self.stopped(position)

    def _start_over(self) -> None:
        self._taken = 0
        self._next = time.monotonic() + INTERVAL


# -- files -----------------------------------------------------------------------------------------------------------


def _tidy(folder: Path, stem: str, keep: str = "") -> None:
    """Remove the tensor files of other checkpoints, but not files with similar names, such as shards."""
    old = [file for file in folder.glob(f"{stem}-*.safetensors") if _is_tensor_file(file.name, stem)]
    for leftover in [*old, *folder.glob(f".{stem}*.tmp")]:
        if leftover.name != keep and is_regular(leftover):
            leftover.unlink(missing_ok=True)


def _refuse_foreign(folder: Path, stem: str) -> None:
    """Refuse a folder of our own that is a link: its target may belong to someone else."""
    if stem != NAMED_BY_USERS:
        refuse_foreign_folder(folder)


def _is_tensor_file(name: str, stem: str) -> bool:
    return re.fullmatch(rf"{stem}-[0-9a-f]{{16}}\.safetensors", name) is not None


def _checksum(described: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _without_nan(value: Any) -> Any:
    """Return plain JSON values; NaN, which JSON does not have, becomes None."""
    if isinstance(value, Mapping):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
