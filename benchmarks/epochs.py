"""Wall clock of an epoch, and of the end of a task, for every method in one process.

    python benchmarks/epochs.py --output benchmarks/results/epochs-h200.csv
    python benchmarks/epochs.py --small                                # a slim network, for a look on a laptop

Every method trains the second of two tasks of ten classes with 500 images each, as CIFAR-100 in ten tasks has them, by
its own recipe, after the same first task. Images are random: the time does not depend on what they show. Seconds are
medians over epochs, the first ones left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np

from efcil import methods
from efcil.data.images import Dataset, ImageSet
from efcil.experiment.run import run_one
from efcil.settings import Settings
from speed import Table  # beside this script

EPOCHS = 8
LEFT_OUT = 3


def random_images(classes: int, per_class: int, pixels: int) -> Dataset:
    """Return a dataset of noise in the shape of CIFAR-100's first classes."""
    generator = np.random.default_rng(0)

    def draw(count: int) -> ImageSet:
        images = generator.integers(0, 256, (count * classes, pixels, pixels, 3), dtype=np.uint8)
        return ImageSet(images, np.repeat(np.arange(classes), count))

    names = tuple(f"class {number}" for number in range(classes))
    return Dataset("cifar100", draw(per_class), draw(10), names, pixels, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def measure(method: str, dataset: Dataset, output: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Return seconds of an epoch of the second task, and of what the method does at its end."""
    settings = Settings(
        method=method,
        dataset="cifar100",
        scenario="custom",
        tasks=2,
        first_task_epochs=1,
        overrides={"later.epochs": EPOCHS},
        device=options.device,
        precision=options.precision,
        path=options.path,
        **({"network": "slim", "augmentation": "shift"} if options.small else {}),
    )
    folder = run_one(settings, output, dataset, quiet=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    epochs = [line["seconds"] for line in lines if line["kind"] == "epoch" and line["task"] == 2]
    ends = [line["seconds"]["statistics"] for line in lines if line["kind"] == "task" and line["task"] == 2]
    return statistics.median(epochs[LEFT_OUT:]) if epochs else 0.0, ends[0]


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--precision", default="auto", help="auto, fp32, tf32 or bf16")
    parser.add_argument("--path", default="auto", help="auto, plain or fused")
    parser.add_argument("--small", action="store_true", help="slim network, small images, few of them")
    parser.add_argument("--methods", nargs="+", help="only these methods")
    parser.add_argument("--output", type=Path, help="CSV file to write")
    options = parser.parse_args()
    dataset = random_images(20, 20, 16) if options.small else random_images(20, 500, 32)
    table = Table()
    rows: list[tuple[float, str, float]] = []
    with tempfile.TemporaryDirectory(prefix="efcil-") as folder:
        for name in options.methods or methods.incremental():
            epoch, end = measure(name, dataset, Path(folder), options)
            rows.append((epoch, name, end))
    for epoch, name, end in sorted(rows):
        table.add("epoch of a later task", name, epoch, "s")
        table.add("end of a later task", name, end, "s")
    if options.output:
        table.write(options.output)


if __name__ == "__main__":
    main()
