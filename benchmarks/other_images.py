"""Images unlike photographs, and visits unlike each other: a frozen network beside one that is adapted, in two visits.

    python benchmarks/other_images.py                                    # scanned digits, five of them in each visit
    python benchmarks/other_images.py --folder photographs/train         # digits and photographs, in either order
    python benchmarks/other_images.py --draws 1 --ways scratch

Four fifths of the training images of every class are learned, and the others tested after both visits; the draws differ
in which. Test images are never read. A folder has a sub-folder for each class.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from efcil import IncrementalClassifier
from efcil.data.sources import SourceOptions, load_dataset
from efcil.environment import environment

SHARE = 5
WAYS: dict[str, dict[str, Any]] = {
    "frozen": {},
    "three": {"network": "efficientnet-lite0+efficientnet-lite1+efficientnet-lite2"},
    "first": {"method": "lda", "first_task_epochs": 3},
    "every": {"method": "efc++", "epochs": 3},
    "scratch": {"weights": "none"},
}


@dataclass(frozen=True)
class Images:
    """Images, arrays or files, with their labels."""

    images: Sequence[Any]
    labels: Sequence[str]

    def part(self, rows: Sequence[int]) -> Images:
        """Return some of the images."""
        return Images([self.images[row] for row in rows], [self.labels[row] for row in rows])

    def of(self, classes: Sequence[str]) -> Images:
        """Return the images of some classes."""
        return self.part([row for row, label in enumerate(self.labels) if label in classes])

    def split(self, seed: int) -> tuple[Images, Images]:
        """Return images to learn and to test, drawn from every class."""
        generator, tested = np.random.default_rng(seed), []
        for label in sorted(set(self.labels)):
            rows = generator.permutation([row for row, each in enumerate(self.labels) if each == label])
            tested += rows[: len(rows) // SHARE].tolist()
        learned = sorted(set(range(len(self.labels))) - set(tested))
        return self.part(learned), self.part(tested)


def digits() -> Images:
    """Return the training images of the bundled digits."""
    found = load_dataset("digits", None, SourceOptions()).train
    return Images(list(np.asarray(found.images)), [f"digit-{label}" for label in found.labels])


def photographs(folder: Path) -> Images:
    """Return the files of a folder, called by their sub-folders."""
    files = sorted(file for file in folder.glob("*/*") if file.is_file())
    return Images(files, [file.parent.name for file in files])


def cases(folder: Path | None) -> Iterator[tuple[str, Images, Images]]:
    """Yield what is learned in the first and in the second visit."""
    written = digits()
    names = sorted(set(written.labels))
    if folder is None:
        yield "digits, digits", written.of(names[:5]), written.of(names[5:])
    else:
        shown = photographs(folder)
        yield "digits, photographs", written, shown
        yield "photographs, digits", shown, written


def measure(visits: Sequence[Images], seed: int, way: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the accuracy on the classes of each visit after the last one, in percent, and the seconds of learning."""
    parts = [visit.split(seed) for visit in visits]
    model, began = IncrementalClassifier(**way), time.perf_counter()
    for learned, _ in parts:
        model.partial_fit(learned.images, learned.labels)
    seconds = time.perf_counter() - began
    right = [np.asarray(model.predict(tested.images)) == np.asarray(tested.labels) for _, tested in parts]
    return (*(100 * float(each.mean()) for each in right), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="training photographs, a sub-folder for each class")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=list(WAYS)[:-1], choices=list(WAYS))
    options, facts = parser.parse_args(), environment()  # now: the files may be edited later
    for name, *visits in cases(options.folder):
        for way in options.ways:
            found = [measure(visits, seed, WAYS[way]) for seed in range(options.draws)]
            first, second, seconds = ([each[place] for each in found] for place in range(3))
            shown = [f"{statistics.fmean(each):5.1f} ({min(each):.1f} to {max(each):.1f})" for each in (first, second)]
            taken = f"{statistics.fmean(seconds):.0f} s"
            print(f"{name:20} {way:8} first visit {shown[0]}  second {shown[1]}  {taken}", flush=True)
    print(f"{facts['hardware']['cpu']}, commit {facts['commit']}")


if __name__ == "__main__":
    main()
