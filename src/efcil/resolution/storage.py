"""Writes the table of docs/storage.md from formulas: `python -m efcil.resolution.storage docs/storage.md`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from efcil.resolution.documentation import with_part

#: What the table is computed for; `P` is added, the parameters of the backbone.
EXAMPLE = {"C": 100, "n": 512, "T": 10, "r": 32, "b": 64}
NETWORK = "resnet18-small"
_FLOAT_BYTES, _WIDE_BYTES = 4, 8


@dataclass(frozen=True)
class Formula:
    """What a method keeps besides its network: numbers of 32 bits and of 64, as sums of products of symbols."""

    method: str
    floats: str
    wide: str = "0"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The method, with the settings that are not its defaults."""
        return " ".join([self.method, *(f"{name}={value}" for name, value in self.settings.items())])

    def numbers(self, values: Mapping[str, int]) -> int:
        """How many numbers there are."""
        return evaluate(self.floats, values) + evaluate(self.wide, values)

    def bytes(self, values: Mapping[str, int]) -> int:
        """How many bytes they take."""
        return _FLOAT_BYTES * evaluate(self.floats, values) + _WIDE_BYTES * evaluate(self.wide, values)


#: Every method, and the forms of covariances of EFC.
FORMULAS = (
    Formula("adagauss", "C b² + C b + n b + b"),
    Formula("adc", "C n"),
    Formula("apr", "C n² + C n"),
    Formula("bicyc", "C b² + C b + n b + b"),
    Formula("cedar", "C n² + C n + n²", "2 C"),
    Formula("dpcr", "C n² + 2 C n", "C"),
    Formula("ds-al", "16 n²", "512 n² + 64 C n"),
    Formula("ds-al", "16 n²", "256 n² + 32 C n", {"compensation": 0}),
    Formula("efc", "C n² + C n + n²", "C"),
    Formula("efc", "C n r + C n + n²", "C", {"covariance": "low-rank"}),
    Formula("efc", "2 C n + n²", "C", {"covariance": "diagonal"}),
    Formula("efc", "T n² + C n + n²", "C", {"covariance": "task"}),
    Formula("efc", "2 n² + C n", "C", {"covariance": "last-task"}),
    Formula("efc++", "C n² + C n + n²", "2 C"),
    Formula("ewc", "P"),
    Formula("fd", "C n² + C n + n²", "C"),
    Formula("fecam", "C n² + C n", "C"),
    Formula("fecam", "n² + C n", "C", {"covariance": "common"}),
    Formula("fetril", "C n + C"),
    Formula("finetune", "0"),
    Formula("fusion", "4 C n + 1"),
    Formula("il2a", "C n² + C n"),
    Formula("joint", "0"),
    Formula("lda", "n² + C n", "2 C + 1"),
    Formula("ldc", "C n"),
    Formula("lwf", "0"),
    Formula("pass", "4 C n + 1"),
    Formula("sdc", "C n"),
    Formula("ssre", "C n"),
)


def evaluate(text: str, values: Mapping[str, int]) -> int:
    """Return the value of a sum of products, such as `2 C n + n²`."""

    def factor(piece: str) -> int:
        base = piece.removesuffix("²")
        value = int(base) if base.isdecimal() else values[base]
        return value**2 if piece.endswith("²") else value

    return sum(math.prod(map(factor, term.split())) for term in text.split(" + "))


def network_size() -> tuple[int, int, int]:
    """Return numbers and bytes of the network with heads for all classes, and the parameters of its backbone."""
    import torch

    from efcil.network.backbones import make_backbone
    from efcil.network.incremental import IncrementalNetwork

    network = IncrementalNetwork(make_backbone(NETWORK, 0))
    network.add_head(EXAMPLE["C"], torch.Generator())
    tensors = network.state_dict().values()
    numbers = sum(tensor.numel() for tensor in tensors)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return numbers, size, sum(parameter.numel() for parameter in network.backbone.parameters())


def table() -> str:
    """Return the table for the example: formulas, numbers and megabytes of every method."""
    numbers, size, parameters = network_size()
    values = EXAMPLE | {"P": parameters}
    given = ", ".join(f"{name} = {value:,}" for name, value in values.items())
    rows = [
        ("kept", "32-bit numbers", "64-bit numbers", "numbers", "MB", "MB with the network"),
        ("---", "---", "---", "---:", "---:", "---:"),
        ("network (ResNet-18, all heads)", "", "", f"{numbers:,}", _megabytes(size), _megabytes(size)),
    ]
    for each in FORMULAS:
        own = each.bytes(values)
        rows.append(
            (each.name, each.floats, each.wide, f"{each.numbers(values):,}", _megabytes(own), _megabytes(own + size))
        )
    return f"{given}:\n\n" + "".join("| " + " | ".join(row) + " |\n" for row in rows)


def with_table(page: str) -> str:
    """Return the text of the page with the table as it is now."""
    return with_part(page, "the generated table", table())


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f}"


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.write_text(with_table(place.read_text(encoding="utf-8")), encoding="utf-8")
