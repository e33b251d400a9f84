"""Step times of the package, which expected times are made from: seconds of epochs, taken from the results files.

    python benchmarks/step_times.py        # writes src/efcil/studies/step-times.csv

An epoch of the first task and the speed-up of several runs at a time come from speed-h200.csv, epochs of later tasks
from epochs-h200.csv, both with images in the shape of CIFAR-100's. Those of EFC on Tiny-ImageNet are in
speed-64-h200.csv. Other methods and datasets come from timing.csv, as soon as runs of them are in it; runs that shared
the card count as if they had been alone.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator
from pathlib import Path

from efcil.settings import Settings
from efcil.studies.estimate import FIRST, LATER, TOGETHER, facts, speed_up, task_sizes

RESULTS = Path(__file__).parent / "results"
TARGET = Path(__file__).parent.parent / "src" / "efcil" / "studies" / "step-times.csv"
COLUMNS = ("what", "dataset", "method", "seconds", "images", "hardware", "commit", "source")
#: Images of a batch, and of the task that epochs.py trains.
BATCH, IMAGES = 64, 5000


def read(name: str, folder: Path = RESULTS) -> list[dict[str, str]]:
    """Return the rows of a results file, none where there is no file."""
    if not (folder / name).exists():
        return []
    with open(folder / name, newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def rows(folder: Path = RESULTS) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the package's file."""
    speed = {(row["what"], row["variant"]): row for row in read("speed-h200.csv", folder)}
    first = speed["first-task step", "whole epochs, per step"]
    yield _row(FIRST, "cifar100", "*", float(first["value"]) / 1000, BATCH, first, "speed-h200.csv")
    for row in sorted(read("epochs-h200.csv", folder), key=lambda row: (row["what"], row["variant"])):
        images = IMAGES if row["what"] == LATER else ""
        yield _row(row["what"], "cifar100", row["variant"], float(row["value"]), images, row, "epochs-h200.csv")
    alone = float(speed["incremental step", "ours"]["value"])
    for count in (4, 5):
        several = speed["incremental step, several runs", f"{count} runs, per step and run"]
        yield _row(TOGETHER, "", str(count), alone / float(several["value"]), "", several, "speed-h200.csv")
    yield from _of_tiny_imagenet(folder)
    yield from _of_other_datasets(folder)


def _of_tiny_imagenet(folder: Path) -> Iterator[tuple[str, ...]]:
    source = "speed-64-h200.csv"
    speed = {(row["what"], row["variant"]): row for row in read(source, folder)}
    for what, method, name in ((FIRST, "*", "first-task step"), (LATER, "efc", "incremental step")):
        if (row := speed.get((name, "whole epochs, per step"))) is not None:
            yield _row(what, "tiny-imagenet", method, float(row["value"]) / 1000, BATCH, row, source)


def _of_other_datasets(folder: Path) -> Iterator[tuple[str, ...]]:
    found: dict[tuple[str, str, str], list[tuple[float, dict[str, str]]]] = {}
    for row in read("timing.csv", folder):
        known = row["dataset"] in facts() and row["dataset"] != "cifar100"
        if not known or "+" in row["method"].replace("++", ""):
            continue
        sizes = task_sizes(Settings(dataset=row["dataset"], scenario=row["scenario"]))
        alone = speed_up(int(row["at_a_time"])) / int(row["at_a_time"])
        for what, method, column, classes in (
            (FIRST, "*", "first_epoch", sizes[0]),
            (LATER, row["method"], "later_epoch", statistics.mean(sizes[1:])),
        ):
            if row[column]:
                images = classes * facts()[row["dataset"]].images_per_class
                found.setdefault((what, row["dataset"], method), []).append((float(row[column]) * alone / images, row))
    steps = {row[:3] for row in _of_tiny_imagenet(folder)}
    for (what, dataset, method), values in sorted(found.items()):
        if (what, dataset, method) in steps:
            continue
        seconds = statistics.median(value for value, _ in values) * IMAGES
        yield _row(what, dataset, method, seconds, IMAGES, values[0][1], "timing.csv")


def _row(
    what: str, dataset: str, method: str, seconds: float, images: object, measured: dict[str, str], source: str
) -> tuple[str, ...]:
    return (
        what, dataset, method, f"{seconds:.6g}", str(images), measured["hardware"], measured["commit"][:8], source,
    )  # fmt: skip


def text(folder: Path = RESULTS) -> str:
    """Return the package's file."""
    return "".join(",".join(row) + "\n" for row in (COLUMNS, *rows(folder)))


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
