"""The model folder: a card as JSON and tensors as safetensors, checked before they are used.

    <folder>/
      model.json                  the card (see card.py), a checksum, and name, size and SHA-256 of the tensor file
      model-<digest>.safetensors  the method's state: network and statistics
      partial/                    only while a task is unfinished: its checkpoint (see engine/checkpoint.py)

docs/model-folder.md describes every field. Nothing in it is ever executed, and nothing is half-loaded: reading gives
the model that was saved, or a ModelError that says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from efcil import methods
from efcil.engine import checkpoint
from efcil.engine.checkpoint import CheckpointError, Damaged
from efcil.engine.lifecycle import Blueprint
from efcil.engine.trainer import Execution, Position
from efcil.errors import EfcilError, some
from efcil.files import is_lock
from efcil.methods.base import Method
from efcil.methods.memory import renamed
from efcil.model.card import Card, ModelError, read_card
from efcil.network.backbones import Backbone

Found = TypeVar("Found")

STEM = "model"
PARTIAL = "partial"
_ON_CPU = Execution(torch.device("cpu"), half=False, fused=False, captured=False)
_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.bool: "BOOL", torch.bfloat16: "BF16"}


def exists(folder: Path) -> bool:
    """Return whether a folder holds a model, damaged or not."""
    return checkpoint.exists(folder, STEM)


def described(folder: Path) -> Card | None:
    """Return the card of the model in a folder, without its tensors; None where there is no model."""
    return _describe(folder)[1] if exists(folder) else None


def refuse_run(folder: Path) -> None:
    """Refuse to write to the folder of an experiment, or to its model where it lies: it can be taught as a copy."""
    place = folder.resolve()
    if _is_run(place):
        raise ModelError(f"{folder} is the folder of an experiment, which must not change. Choose another folder.")
    if place.name == "model" and _is_run(place.parent):
        raise ModelError(
            f"{folder} is the model of an experiment, which must not change. Copy it elsewhere, and teach the copy."
        )


def _is_run(folder: Path) -> bool:
    beside = ("metrics.jsonl", "log.txt", "summary.json")
    return (folder / "settings.yaml").exists() and any((folder / name).exists() for name in beside)


def tensor_file(folder: Path) -> Path:
    """Return the file that holds a model's tensors."""
    return checkpoint.describe(folder, STEM).file


def write(folder: Path, card: Card, tensors: Mapping[str, Tensor]) -> None:
    """Save a model, replacing an earlier one; a crash leaves the old one or the new one."""
    checkpoint.write(folder, tensors, card.to_json(), STEM)


def read(folder: Path) -> tuple[Card, Method]:
    """Return card and method of a model folder, on the CPU."""
    return _undisturbed(folder, _read)


def read_raw(folder: Path) -> tuple[Card, dict[str, Tensor]]:
    """Return card and tensors of a model folder, whatever the names of the tensors."""
    return _undisturbed(folder, _read_raw)


def misfits(card: Card, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return tensors that do not fit the card's method, and why: name -> a sentence without full stop."""
    found = {
        name: (_DTYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    return dict(_compared(found, card, skeleton(card)))


def _undisturbed(folder: Path, function: Callable[[Path], Found]) -> Found:
    """Read a folder; read it again if another process has replaced the model meanwhile and removed the old tensors."""
    while True:
        before = _stamps(folder)
        try:
            return function(folder)
        except ModelError:
            if _stamps(folder) == before:
                raise


def _stamps(folder: Path) -> list[tuple[int, int]]:
    file = folder / f"{STEM}.json"
    if not file.is_file():
        return []
    status = file.stat()
    return [(status.st_ino, status.st_mtime_ns)]


def _read(folder: Path) -> tuple[Card, Method]:
    described, card = _describe(folder)
    method = skeleton(card)
    try:
        _check_header(described.file, card, method)
        tensors = checkpoint.read_described(described).tensors
        restore(card, method, tensors)
    except (EfcilError, OSError) as error:
        raise _refused(folder, error) from None
    return card, method


def _read_raw(folder: Path) -> tuple[Card, dict[str, Tensor]]:
    described, card = _describe(folder)
    try:
        tensors = checkpoint.read_described(described).tensors
    except EfcilError as error:
        raise _refused(folder, error) from None
    return card, renamed(tensors, skeleton(card).state_dict())


def blueprint(card: Card, execution: Execution = _ON_CPU) -> Blueprint:
    """Return the blueprint of a card's method."""
    assert card.resolved.network is not None
    method = methods.get(card.settings.method)
    return Blueprint(method, card.resolved.method, backbone(card), card.settings.seed, execution)


def backbone(card: Card) -> Backbone:
    """Return the backbone of a card, whose weights are those of the model."""
    name = card.resolved.network
    assert name is not None
    architecture = name if card.pretrained is None else card.pretrained.architecture
    return Backbone(name, architecture, None, card.settings.input_size)


def skeleton(card: Card) -> Method:
    """Return the untrained method that the card describes, with heads for all its classes."""
    method = blueprint(card).bare(card.task_sizes)
    if card.resolved.first_task.head == "cosine":
        method.network.use_cosine_heads(card.resolved.first_task.head_scale)
    return method


def restore(card: Card, method: Method, tensors: Mapping[str, Tensor]) -> None:
    """Load tensors into a skeleton and try it: the right names and shapes do not guarantee a working classifier."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"the tensor {name!r} holds values that are not finite")
    try:
        method.load_tensors(dict(tensors))
        method.eval()
        scores = method.scores(torch.zeros(1, 3, card.image_size, card.image_size))
        statistics = method.statistics()
    except Exception as error:  # with tensors from anywhere, a method can raise any error
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"its tensors do not fit its method ({type(error).__name__}: {reason})") from None
    if scores.shape != (1, len(card.classes)):
        raise ModelError(f"it knows {len(card.classes)} classes but scores {scores.shape[-1]}")
    if statistics is not None and len(statistics.means) != len(card.classes):
        raise ModelError(f"it knows {len(card.classes)} classes but keeps the means of {len(statistics.means)}")


def _describe(folder: Path) -> tuple[checkpoint.Description, Card]:
    if not exists(folder):
        if checkpoint.exists(folder / PARTIAL):
            raise ModelError(
                f"{folder} has not finished its first task{_begun(folder)}, so it cannot be used yet. To resume it, "
                "repeat the `efcil learn` command that started it."
            )
        if exists(folder / "model"):
            raise ModelError(f"{folder} is the folder of a run. Its model is {folder / 'model'}.")
        if checkpoint.exists(folder):
            raise ModelError(f"{folder} was written by an experiment of an earlier version of efcil; use that version.")
        if is_lock(folder / ".lock"):
            raise ModelError(
                f"{folder} has not finished its first task, and has no checkpoint of it: it is learning just now, or "
                "was stopped before the first one. Wait, or repeat the `efcil learn` command that started it."
            )
        raise ModelError(f"{folder} is not a model folder: it has no {STEM}.json. `efcil learn` creates one.")
    try:
        described = checkpoint.describe(folder, STEM)
        return described, read_card(described.facts)
    except EfcilError as error:
        raise _refused(folder, error) from None


def _begun(folder: Path) -> str:
    """Return, in words, which classes an unfinished first task learns, and how far it is."""
    try:
        facts = checkpoint.facts_of(folder / PARTIAL)
        names, now = [str(name) for name in facts["task"]["classes"]], facts["position"]
        place = Position(int(now["epoch"]), int(now["step"])).place
    except (EfcilError, KeyError, TypeError, ValueError):
        return ""  # resuming says what is wrong with it
    return f" ({some(names)}; stopped {place})"


def _check_header(file: Path, card: Card, method: Method) -> None:
    """Compare names, types and shapes of the stored tensors with the method's, before any of them is read."""
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
            found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except Exception as error:  # the library's own error, OSError, and any other that a bad header can cause
        raise Damaged(file, f"its header cannot be read: {error}") from None
    for _, reason in _compared(found, card, method):
        raise ModelError(reason)


def _compared(
    found: Mapping[str, tuple[str, tuple[int, ...]]], card: Card, method: Method
) -> Iterator[tuple[str, str]]:
    """Yield the tensors that are missing, unknown, or of a wrong type or shape, and what is wrong."""
    expected = method.state_dict()
    found = renamed(found, expected)
    for name in expected:
        if name not in found:
            yield name, f"the tensor {name!r} is missing"
    for name, (dtype, shape) in found.items():
        wanted = expected.get(name)
        if wanted is None and not _belongs_to_a_list(method, name):
            yield name, f"it has a tensor {name!r} that {card.settings.method} does not have"
        if wanted is not None and (_DTYPES.get(wanted.dtype) != dtype or not _fits(shape, tuple(wanted.shape))):
            yield name, f"the tensor {name!r} is {dtype} of shape {shape}, but {_words(wanted)} is expected"


def _fits(shape: tuple[int, ...], template: tuple[int, ...]) -> bool:
    """Return whether a shape fits the template; where the template has a zero, the method grows and any size fits."""
    same_rank = len(shape) == len(template)
    return same_rank and all(want in (0, have) for have, want in zip(shape, template, strict=True))


def _belongs_to_a_list(method: Method, name: str) -> bool:
    """Return whether `name` is an entry of one of the method's own lists of parameters, which grow with its tasks."""
    owner, _, last = name.rpartition(".")
    own = isinstance(getattr(method, owner, None), nn.ParameterList) if owner.isidentifier() else False
    return own and last.isdecimal() and len(last) < 7


def _words(tensor: Tensor) -> str:
    return f"{_DTYPES.get(tensor.dtype, tensor.dtype)} of shape {tuple(tensor.shape)}"


def _refused(folder: Path, error: Any) -> ModelError:
    if isinstance(error, Damaged):
        return ModelError(
            f"The model in {folder} is damaged: {error.file.name}: {error.reason}. Restore the folder from a copy."
        )
    if isinstance(error, CheckpointError):
        return ModelError(str(error))
    return ModelError(f"The model in {folder} cannot be used: {str(error).rstrip('.')}.")
