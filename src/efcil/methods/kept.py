"""What a method stores besides its network, and why: declared with `keep`, shown by `efcil inspect` and audits."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from torch import Tensor, nn

UNEXAMINED = (
    "Not examined: its purpose is as declared by the method's author. `efcil audit` compares rows that could be an "
    "image with the training images."
)


@dataclass(frozen=True)
class Purpose:
    """A kind of tensor: the names it has, what it is for, and what could be recovered from it."""

    pattern: str
    title: str
    use: str
    recovery: str


class Keeping(nn.Module):
    """A module that gives a reason for everything it stores. An audit fails if a reason is missing."""

    def __init__(self) -> None:
        super().__init__()
        self._purposes: dict[str, Purpose] = {}

    def keep(
        self, name: str, value: Tensor | nn.Module, *, why: str, title: str | None = None, recovery: str = UNEXAMINED
    ) -> None:
        """Register `value` as the buffer or submodule called `name`, which is saved and loaded with the rest.

        `why` is its purpose, in a few words; `recovery` says what it reveals about the training images.
        """
        pattern = re.escape(name)
        if isinstance(value, nn.Module):
            self.add_module(name, value)
            pattern += r"\..+"
        else:
            self.register_buffer(name, value)
        self._purposes[name] = Purpose(pattern, title or name.replace("_", " "), why, recovery)

    def purposes(self) -> dict[str, Purpose]:
        """Return why each thing is stored, by name, including those of submodules."""
        found = {}
        for place, module in self.named_modules():
            prefix = f"{place}." if place else ""
            if isinstance(module, Keeping):
                for name, purpose in module._purposes.items():
                    found[prefix + name] = replace(purpose, pattern=re.escape(prefix) + purpose.pattern)
        return found
