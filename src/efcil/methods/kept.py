"""What a method stores besides its network, and why: declared with `keep`, shown by `efcil inspect` and audits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from efcil.errors import SettingsError

UNEXAMINED = (
    "Not examined: its purpose is as declared by the method's author. `efcil audit` compares rows that could be an "
    "image with the training images."
)


#: A list that is empty at first, and of which the method does not say whether it has rows for every class.
_UNSAID = -1


@dataclass(frozen=True)
class Purpose:
    """A kind of tensor: the names it has, what it is for, and what could be recovered from it.

    `per_class` is how many rows each class has in it, 0 if it belongs to all classes together.
    """

    pattern: str
    title: str
    use: str
    recovery: str
    per_class: int = 0


class Keeping(nn.Module):
    """A module that gives a reason for everything it stores. An audit fails if a reason is missing."""

    def __init__(self) -> None:
        super().__init__()
        self._purposes: dict[str, Purpose] = {}

    def keep(
        self,
        name: str,
        value: Tensor | nn.Module,
        *,
        why: str,
        title: str | None = None,
        recovery: str = UNEXAMINED,
        per_class: int | None = None,
    ) -> None:
        """Register `value` as the buffer or submodule called `name`, which is saved and loaded with the rest.

        `why` is its purpose, in a few words; `recovery` says what it reveals about the training images. `per_class` is
        how many rows each class has, in the order of the classes; in a list of parameters, its entries one after the
        other. They are removed when the class is forgotten. A buffer that begins with no rows has one for each class
        unless `per_class` says otherwise.
        """
        pattern = re.escape(name)
        if isinstance(value, nn.Module):
            self.add_module(name, value)
            pattern += r"\..+"
            usual = _UNSAID if isinstance(value, nn.ParameterList) else 0
        else:
            self.register_buffer(name, value)
            usual = 1 if value.shape[:1] == (0,) else 0
        rows = usual if per_class is None else per_class
        self._purposes[name] = Purpose(pattern, title or name.replace("_", " "), why, recovery, rows)

    def purposes(self) -> dict[str, Purpose]:
        """Return why each thing is stored, by name, including those of submodules."""
        found = {}
        for place, module in self.named_modules():
            prefix = f"{place}." if place else ""
            if isinstance(module, Keeping):
                for name, purpose in module._purposes.items():
                    found[prefix + name] = replace(purpose, pattern=re.escape(prefix) + purpose.pattern)
        return found

    # -- rows of classes ---------------------------------------------------------------------------------------

    def keep_rows(self, kept: Sequence[int], seen: int) -> None:
        """Keep only the rows of the classes `kept`, of `seen` classes, in whatever has rows for every class."""
        for name, purpose in self._purposes.items():
            pieces = self._pieces(name, purpose, seen)
            start, left = 0, []
            for piece in pieces:
                own = range(start, start + len(piece) // purpose.per_class)
                left.append(rows_of(piece, [each - own.start for each in kept if each in own], purpose.per_class))
                start = own.stop
            if pieces:
                self._replace(name, left)

    def average_rows(self, classes: Sequence[int], weights: Tensor, seen: int) -> None:
        """Give the first of `classes` the weighted average of the rows of all of them, likewise."""
        for name, purpose in self._purposes.items():
            pieces = self._pieces(name, purpose, seen)
            if pieces:
                whole = torch.cat(pieces).unflatten(0, (seen, purpose.per_class)).clone()
                whole[classes[0]] = weighted(whole[list(classes)], weights)
                self._replace(name, list(whole.flatten(0, 1).split([len(piece) for piece in pieces])))

    def _pieces(self, name: str, purpose: Purpose, seen: int) -> list[Tensor]:
        """Return what has rows for every class as a list of tensors; nothing if it has none, or none yet."""
        value = getattr(self, name)
        pieces = [value] if isinstance(value, Tensor) else [each.detach() for each in value.parameters()]
        rows = sum(len(piece) for piece in pieces if piece.dim())
        if purpose.per_class == 0 or rows == 0:
            return []
        if rows != purpose.per_class * seen:
            raise SettingsError(
                f"What is stored as {name!r} has {rows} rows for {seen} classes, so nobody can say which of them "
                "belong to which class. The method must say how many each class has: self.keep(..., per_class=...), "
                "0 if it belongs to all classes together."
            )
        return pieces

    def _replace(self, name: str, pieces: list[Tensor]) -> None:
        if isinstance(getattr(self, name), Tensor):
            setattr(self, name, pieces[0])
        else:
            setattr(self, name, nn.ParameterList(nn.Parameter(piece) for piece in pieces if len(piece)))


def rows_of(tensor: Tensor, classes: Sequence[int], per_class: int = 1) -> Tensor:
    """Return a copy of the rows of these classes, each of which has `per_class` rows."""
    rows = torch.tensor([per_class * each + place for each in classes for place in range(per_class)], dtype=torch.int64)
    return tensor.detach()[rows.to(tensor.device)].clone()


def weighted(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the average over the first dimension, with weights that sum to one, computed in float64."""
    return torch.tensordot(weights.to(rows.device, torch.float64), rows.double(), dims=1).to(rows.dtype)
