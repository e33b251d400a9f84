"""What a new model with default settings reaches with ten classes of Tiny-ImageNet, 20 images of each, in five visits.

    python benchmarks/ten_classes.py --data tiny-imagenet --draws 10
    python benchmarks/ten_classes.py --data tiny-imagenet --network efficientnet-lite0+efficientnet-lite1

Classes and training images are drawn at random, the draws differ in both. Tested are all 500 validation images of the
classes drawn. Nothing is chosen by these numbers.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np

from efcil import IncrementalClassifier
from efcil.data.images import Dataset
from efcil.data.sources import SourceOptions, load_dataset
from efcil.environment import environment

CLASSES, A_VISIT = 10, 2


def accuracy(dataset: Dataset, seed: int, images: int, network: str | None = None) -> float:
    """Return the share of the validation images, in percent, that a model gets right after its last visit."""
    generator = np.random.default_rng(seed)
    classes = generator.permutation(len(dataset.class_names))[:CLASSES]
    model = IncrementalClassifier(network=network)
    for first in range(0, CLASSES, A_VISIT):
        rows = [
            generator.permutation(np.flatnonzero(dataset.train.labels == label))[:images]
            for label in classes[first : first + A_VISIT]
        ]
        chosen = np.concatenate(rows)
        model.partial_fit(dataset.train.images[chosen], dataset.train.labels[chosen])
    tested = np.flatnonzero(np.isin(dataset.test.labels, classes))
    answers = model.predict(dataset.test.images[tested])
    return 100 * float(np.mean(np.asarray(answers) == dataset.test.labels[tested]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Tiny-ImageNet")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--images", type=int, default=20, help="images of each class")
    parser.add_argument("--network", help="another network than the default")
    options = parser.parse_args()
    dataset = load_dataset("tiny-imagenet", options.data, SourceOptions())
    found = []
    for seed in range(options.draws):
        found.append(accuracy(dataset, seed, options.images, options.network))
        print(f"draw {seed}: {found[-1]:.1f} %", flush=True)
    spread = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
    facts = environment()
    print(f"mean {statistics.fmean(found):.1f}{spread} %; {facts['hardware']['cpu']}, commit {facts['commit']}")


if __name__ == "__main__":
    main()
