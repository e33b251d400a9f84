"""Which classifier a frozen, pre-trained network should have: the tables of docs/own-images-study.md.

    python benchmarks/own_images.py --folder photographs/train
    python benchmarks/own_images.py --tiny-imagenet tiny-imagenet
    python benchmarks/own_images.py --folder photographs/train --crop squash --rules lda
    python benchmarks/own_images.py --tiny-imagenet tiny-imagenet --many --size 128

A folder with one sub-folder per class is cross-validated: five folds, several times. Of Tiny-ImageNet, classes and
images are drawn at random, and tested on other training images; `--many` draws up to 200 classes. Test images of either
are never read.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional

from efcil.core import classifiers, discriminant, gaussians, prototypes
from efcil.core.classifiers import Classifier, ClassStatistics
from efcil.core.discriminant import SharedGaussians
from efcil.data.sources import SourceOptions
from efcil.data.sources.tiny_imagenet import TinyImagenet
from efcil.network import backbones
from efcil.network.weights import IMAGENET_MEAN, IMAGENET_STD, View

Measured = tuple[Tensor, np.ndarray]
Rule = Callable[[Tensor, Tensor], Classifier]
FOLDS, TESTED, TOGETHER = 5, 40, 4
PROJECTED = 2000


@dataclass(frozen=True)
class Split:
    """What is learned and what is tested: rows of the features, with labels from 0."""

    learned: np.ndarray
    labels: np.ndarray
    tested: np.ndarray
    answers: np.ndarray


# -- rules -----------------------------------------------------------------------------------------------------------


def shared(features: Tensor, labels: Tensor) -> SharedGaussians:
    """Return the statistics that the method lda keeps."""
    classes = int(labels.max()) + 1
    within = gaussians.within_classes(features, labels, range(classes))
    return SharedGaussians(within.means, within.covariance, len(labels) - classes, within.counts)


def means_only(features: Tensor, labels: Tensor) -> Classifier:
    """Return the nearest class mean."""
    return classifiers.nearest_mean(ClassStatistics(shared(features, labels).means))


def fecam(features: Tensor, labels: Tensor, common: bool) -> Classifier:
    """Return FeCAM with its authors' settings."""
    number = int(labels.max()) + 1
    means, covariances = prototypes.class_statistics(features.float(), labels, range(number))
    which = torch.zeros(number, dtype=torch.int64) if common else None
    covariances = covariances.mean(dim=0, keepdim=True) if common else covariances
    score = classifiers.mahalanobis(ClassStatistics(means, covariances, which), 3.0, 3.0)
    return lambda points: score(points.float())


def fixed_shrinkage(features: Tensor, labels: Tensor, amount: float | None) -> Classifier:
    """Return LDA with equal priors; without an amount, the oracle approximating one (OAS) of the pooled covariance."""
    known = shared(features, labels)
    if amount is None:
        size, first = len(known.covariance), float(known.covariance.trace())
        second = float(known.covariance.square().sum())
        above, below = (1 - 2 / size) * second + first**2, (known.freedom + 1 - 2 / size) * (second - first**2 / size)
        amount = min(1.0, above / below) if below > 0 else 1.0
    which = torch.zeros(len(known.means), dtype=torch.int64)
    return classifiers.bayes(ClassStatistics(known.means, known.covariance[None], which), amount)


def ridge(features: Tensor, labels: Tensor, strength: float = 3.0) -> Classifier:
    """Return ridge regression onto one-hot targets in which every class has the same weight."""
    known = shared(features, labels)
    targets = functional.one_hot(labels).double()
    weight = 1 / known.counts[labels].double()[:, None]
    centre = known.means.mean(dim=0)
    rows = features - centre
    gram = rows.T @ (weight * rows)
    penalty = strength * gram.diagonal().mean() * torch.eye(len(gram)).double()
    solved = torch.linalg.solve(gram + penalty, rows.T @ (weight * (targets - 1 / len(known.means))))
    return lambda points: (points - centre) @ solved


def projected(features: Tensor, labels: Tensor) -> Classifier:
    """Return the same after a random projection and a ReLU."""
    matrix = torch.randn(features.shape[1], PROJECTED, generator=torch.Generator().manual_seed(0)).double()
    fitted = ridge((features @ matrix).relu(), labels)
    return lambda points: fitted((points @ matrix).relu())


def logistic(features: Tensor, labels: Tensor) -> Classifier:
    """Return a logistic regression on all features at once, which is not incremental."""
    from sklearn.linear_model import LogisticRegression

    fitted = LogisticRegression(max_iter=300, C=1.0).fit(features.numpy(), labels.numpy())
    coefficients, offset = torch.from_numpy(fitted.coef_), torch.from_numpy(fitted.intercept_)
    if len(coefficients) == 1:  # of two classes only the second has a row
        coefficients, offset = torch.cat([-coefficients, coefficients]), torch.cat([-offset, offset])
    return lambda points: points @ coefficients.T + offset


#: Name -> (how features are transformed: power, unit length; the rule).
RULES: dict[str, tuple[float, bool, Rule]] = {
    "nearest mean": (1.0, False, means_only),
    "nearest mean, root": (0.5, True, means_only),
    "fecam, one covariance": (0.5, False, lambda x, y: fecam(x, y, common=True)),
    "fecam": (0.5, False, lambda x, y: fecam(x, y, common=False)),
    "LDA, shrinkage 0.1": (0.5, True, lambda x, y: fixed_shrinkage(x, y, 0.1)),
    "LDA, shrinkage by OAS": (0.5, True, lambda x, y: fixed_shrinkage(x, y, None)),
    "LDA, shrinkage 0.9": (0.5, True, lambda x, y: fixed_shrinkage(x, y, 0.9)),
    "ridge": (0.5, True, ridge),
    "random ReLU, ridge": (0.5, True, projected),
    "lda, rule=bayes": (0.5, True, lambda x, y: discriminant.bayes(shared(x, y))),
    "lda, prior=0.5": (0.5, True, lambda x, y: discriminant.cosine(shared(x, y), 0.5)),
    "lda, prior=2": (0.5, True, lambda x, y: discriminant.cosine(shared(x, y), 2.0)),
    "lda, power=1": (1.0, True, lambda x, y: discriminant.cosine(shared(x, y))),
    "lda, normalise=false": (0.5, False, lambda x, y: discriminant.cosine(shared(x, y))),
    "lda": (0.5, True, lambda x, y: discriminant.cosine(shared(x, y))),
    "logistic regression": (1.0, False, logistic),
}


# -- images ----------------------------------------------------------------------------------------------------------


def fitted(image: Image.Image, size: int, crop: str) -> np.ndarray:
    """Return an image as a square: its centred square (as efcil does), most of that, all of it squashed or padded."""
    width, height = image.size
    if crop == "squash":
        box = (0.0, 0.0, float(width), float(height))
    elif crop == "pad":
        image = ImageOps.pad(image, (max(width, height),) * 2, color=(127, 127, 127))
        box = (0.0, 0.0, float(image.width), float(image.height))
    else:
        side = min(width, height) * (0.875 if crop == "inner" else 1.0)
        box = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))


def photographs(folder: Path) -> tuple[list[Image.Image], np.ndarray]:
    """Return all images of a folder with one sub-folder per class."""
    images, labels = [], []
    for number, place in enumerate(sorted(each for each in folder.iterdir() if each.is_dir())):
        for path in sorted(place.iterdir()):
            images.append(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))
            labels.append(number)
    return images, np.array(labels)


def tiny_imagenet(folder: Path, cache: Path | None, sample: Sample) -> tuple[list[Image.Image], np.ndarray]:
    """Return training images of random classes, class after class."""
    dataset = TinyImagenet().load(folder, SourceOptions(cache=cache))
    generator = np.random.default_rng(7)
    images = []
    for label in generator.permutation(len(dataset.class_names))[: sample.classes]:
        rows = generator.permutation(np.flatnonzero(dataset.train.labels == label))[: sample.per_class]
        images += [Image.fromarray(dataset.train.images[row]) for row in rows]
    return images, np.repeat(np.arange(sample.classes), sample.per_class)


def kept(options: argparse.Namespace, name: str, compute: Callable[[], Measured]) -> Measured:
    """Return features and labels: those that an earlier call has kept, or computed now."""
    file = None if options.keep is None else options.keep / f"{name}.npz"
    if file is not None and file.exists():
        found = np.load(file)
        return torch.from_numpy(found["features"]), found["labels"]
    features, labels = compute()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, features=features.numpy(), labels=labels)
    return features, labels


@torch.inference_mode()
def features_of(images: Sequence[Image.Image], options: argparse.Namespace) -> Tensor:
    """Return the features of all images by the network."""
    backbone = backbones.locate(options.network)
    assert backbone.weights is not None, "a network with pre-trained weights is needed"
    network, view = backbone.build(0).eval(), backbone.weights.view
    if options.imagenet_normalisation:
        view = View(view.size, IMAGENET_MEAN, IMAGENET_STD)
    size = options.size or view.size
    mean, std = (torch.tensor(each)[:, None, None] for each in (view.mean, view.std))
    rows, begun = [], time.process_time()
    for start in range(0, len(images), TOGETHER):
        pixels = np.stack([fitted(each, size, options.crop) for each in images[start : start + TOGETHER]])
        inputs = (torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - mean) / std
        views = [inputs, inputs.flip(3)] if options.mirror else [inputs]
        rows.append(sum(network(view.contiguous(memory_format=torch.channels_last)) for view in views) / len(views))
    seconds = (time.process_time() - begun) / len(images)
    print(f"{len(images)} images, {options.network}, {size} pixels: {1000 * seconds:.0f} ms of CPU each", flush=True)
    return torch.cat(rows)


# -- splits ----------------------------------------------------------------------------------------------------------


def folds(labels: np.ndarray, seed: int) -> Iterator[Split]:
    """Yield five splits in which every image is tested once, stratified by class."""
    generator = np.random.default_rng(seed)
    fold = np.zeros(len(labels), int)
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        fold[rows] = (np.arange(len(rows)) + generator.integers(FOLDS)) % FOLDS
    for number in range(FOLDS):
        learned, tested = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
        yield Split(learned, labels[learned], tested, labels[tested])


def draw(sample: Sample, counts: Sequence[int], seed: int) -> Split:
    """Return a split with so many images of random classes of Tiny-ImageNet."""
    generator = np.random.default_rng(seed)
    learned, tested = [], []
    for label, count in zip(generator.permutation(sample.classes), counts, strict=False):
        rows = label * sample.per_class + generator.permutation(sample.per_class)
        tested.append(rows[:TESTED])
        learned.append(rows[TESTED : TESTED + count])
    classes = np.arange(len(counts))
    return Split(
        np.concatenate(learned), np.repeat(classes, counts), np.concatenate(tested), np.repeat(classes, TESTED)
    )


@dataclass(frozen=True)
class Sample:
    """Classes of Tiny-ImageNet, images of each, and what is drawn of them: title -> (images of every class, draws)."""

    name: str
    classes: int
    per_class: int
    draws: dict[str, tuple[list[int], int]]


FEW = Sample(
    "tiny-imagenet",
    classes=24,
    per_class=340,
    draws={
        "10 x 1": ([1] * 10, 10),
        "10 x 5": ([5] * 10, 10),
        "20 x 5": ([5] * 20, 10),
        "10 x 20": ([20] * 10, 10),
        "20 x 20": ([20] * 20, 5),
        "10 x 300": ([300] * 10, 3),
        "1, 5, 20 mixed": ([1, 5, 20] * 3 + [5], 10),
        "5 x 5, 5 x 300": ([5, 300] * 5, 3),
        "5, 9 x 300": ([5] + [300] * 9, 3),
        "5, 300": ([5, 300], 10),
    },
)
MANY = Sample(
    "tiny-imagenet-many",
    classes=200,
    per_class=140,
    draws={
        "50 x 2": ([2] * 50, 6),
        "50 x 5": ([5] * 50, 6),
        "200 x 2": ([2] * 200, 2),
        "200 x 5": ([5] * 200, 2),
        "200 x 20": ([20] * 200, 2),
        "200 x 100": ([100] * 200, 2),
        "20, of 2, 5, 20, 100": ([2, 5, 20, 100] * 5, 6),
        "48, of 2, 5, 20, 100": ([2, 5, 20, 100] * 12, 6),
        "200, of 2, 5, 20, 100": ([2, 5, 20, 100] * 50, 2),
    },
)


def answered(features: Tensor, split: Split, rule: tuple[float, bool, Rule]) -> np.ndarray:
    """Return which tested images are answered correctly."""
    power, unit, fit = rule
    learned, tested = (features[rows].clamp(min=0).double() ** power for rows in (split.learned, split.tested))
    if unit:
        learned, tested = (functional.normalize(rows, dim=1) for rows in (learned, tested))
    scores = fit(learned, torch.from_numpy(split.labels))(tested)
    return scores.argmax(dim=1).numpy() == split.answers


def balanced(right: np.ndarray, answers: np.ndarray) -> float:
    """Return the mean over the classes of the share that is right."""
    return float(np.mean([right[answers == label].mean() for label in np.unique(answers)]))


def cross_validate(features: Tensor, labels: np.ndarray, names: Sequence[str], repeats: int) -> None:
    """Print accuracy and balanced accuracy of every rule, and how much they vary between repetitions."""
    print("| rule | accuracy | balanced | spread |\n|---|---|---|---|")
    for name in names:
        values = []
        for seed in range(repeats):
            right = np.zeros(len(labels), bool)
            for split in folds(labels, seed):
                right[split.tested] = answered(features, split, RULES[name])
            values.append((right.mean(), balanced(right, labels)))
        accuracy, mean = 100 * np.mean(values, axis=0)
        print(f"| {name} | {accuracy:.1f} | {mean:.1f} | {100 * np.std(values, axis=0)[0]:.1f} |", flush=True)


def compare_draws(features: Tensor, sample: Sample, names: Sequence[str], most: int) -> None:
    """Print the accuracy of every rule in every kind of draw; in brackets that of classes with at most 5 images."""
    print("| rule | " + " | ".join(sample.draws) + " |\n|---|" + "---|" * len(sample.draws))
    for name in names:
        cells = []
        for counts, number in sample.draws.values():
            values, few = [], []
            for seed in range(min(number, most)):
                split = draw(sample, counts, seed)
                right = answered(features, split, RULES[name])
                values.append(right.mean())
                few.append(right[np.array(counts)[split.answers] <= 5].mean() if len(set(counts)) > 1 else 0.0)
            cells.append(f"{100 * np.mean(values):.1f}" + (f" ({100 * np.mean(few):.0f})" if any(few) else ""))
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="training images, one sub-folder per class")
    parser.add_argument("--tiny-imagenet", type=Path, help="Tiny-ImageNet, as `efcil run` reads it")
    parser.add_argument("--many", action="store_true", help="many classes of Tiny-ImageNet in place of ten or twenty")
    parser.add_argument("--cache", type=Path, help="folder for decoded images of Tiny-ImageNet")
    parser.add_argument("--keep", type=Path, help="folder for features, which are read from there if they are there")
    parser.add_argument("--network", default="efficientnet-lite0")
    parser.add_argument("--size", type=int, help="pixels; the default is the network's")
    parser.add_argument("--crop", choices=("centre", "inner", "squash", "pad"), default="centre")
    parser.add_argument("--mirror", action="store_true", help="average the features with those of the mirrored image")
    parser.add_argument("--imagenet-normalisation", action="store_true", help="instead of the network's own")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument(
        "--repeats", type=int, default=4, help="of the cross-validation; at most three times so many draws"
    )
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    def features(load: Callable[[], tuple[list[Image.Image], np.ndarray]]) -> Measured:
        images, labels = load()
        return features_of(images, options), labels

    if options.folder is not None:
        rows, labels = kept(options, "folder", lambda: features(partial(photographs, options.folder)))
        cross_validate(rows, labels, options.rules, options.repeats)
    if options.tiny_imagenet is not None:
        sample = MANY if options.many else FEW
        load = partial(tiny_imagenet, options.tiny_imagenet, options.cache, sample)
        rows, _ = kept(options, sample.name, lambda: features(load))
        compare_draws(rows, sample, options.rules, 3 * options.repeats)


if __name__ == "__main__":
    main()
