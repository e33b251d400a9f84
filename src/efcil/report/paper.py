"""The numbers of the EFC paper's tables (paper.csv): mean and standard deviation over five seeds, in percent."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True)
class PaperValue:
    """A published number; `std` is None if none was published, `table` is the paper's."""

    mean: float
    std: float | None
    table: str


def agrees(ours: float, value: PaperValue) -> bool:
    """Say whether a mean is within one standard deviation of the paper's, or one point where that is more."""
    # Both are published with two digits.
    return abs(round(ours, 2) - value.mean) <= max(value.std or 0.0, 1.0) + 1e-9


def paper_value(dataset: str, scenario: str, label: str, metric: str) -> PaperValue | None:
    """Return the published value for a run of this dataset, scenario and label, None if there is none.

    Labels name only what differs from the paper's recipe, so a run with other epochs or another class order has a
    label of its own and is never compared with a number it does not reproduce. `--classifier all` measures further
    classifiers, but does not change the run, so it does not count.
    """
    return published().get((dataset, scenario, label.replace("+classifier=all", ""), metric))


@cache
def published() -> dict[tuple[str, str, str, str], PaperValue]:
    """Return every number by (dataset, scenario, label, metric)."""
    with (resources.files("efcil.report") / "paper.csv").open(encoding="utf-8") as file:
        return {
            (row["dataset"], row["scenario"], row["label"], row["metric"]): PaperValue(
                float(row["mean"]), float(row["std"]) if row["std"] else None, row["table"]
            )
            for row in csv.DictReader(file)
        }
