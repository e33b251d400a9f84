"""Whether more can be read out of the same frozen network: other layers, pooling, powers, views, priors.

    python benchmarks/own_images_variants.py --folder photographs/train --tiny-imagenet tiny-imagenet

Every row changes one thing of what `lda` does by default, and is compared with it on the same draws. Of Tiny-ImageNet,
ten classes are learned and tested on other training images: the first ten, ten at random, ten neighbours in the order
of the classes (which are alike), and classes of unequal size, drawn from ten with more images. The folder is
cross-validated. Test images of either are never read; no draw has the training images that `--leave-out` names.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from efcil.core import discriminant, gaussians
from efcil.network import backbones
from efcil.network.efficientnet import EfficientNetLite
from efcil.network.weights import View
from own_images import Split, balanced, folds, photographs

FIRST, NEIGHBOURS, OTHERS, LARGE = 10, (20, 100, 150), 14, 10
LEARNED, MANY, TESTED, TESTED_FIRST = 100, 300, 40, 70
VIEWS = ("plain", "mirror", "crop0", "crop1", "crop2", "256 pixels")
TOGETHER, SEED = 8, 2026
Features = dict[str, Tensor]


@dataclass(frozen=True)
class Variant:
    """How features are made from pooled layers, which views are learned and tested, and the prior."""

    layers: tuple[tuple[str, float], ...] = (("average", 1.0),)
    power: float = 0.5
    learned: tuple[str, ...] = ("plain",)
    tested: tuple[str, ...] = ("plain",)
    #: Whether the views of an image are averaged, or are samples of their own.
    averaged: bool = True
    prior: float = 1.0

    def embed(self, features: Features) -> Tensor:
        """Return every layer after the power, of unit length and weighted, side by side."""
        parts = [
            functional.normalize(features[name].sign() * features[name].abs() ** self.power, dim=1) * weight
            for name, weight in self.layers
        ]
        return functional.normalize(torch.cat(parts, dim=1), dim=1)


DEFAULT = Variant()
_MIRRORED, _CROPPED = ("plain", "mirror"), ("plain", "mirror", "crop0", "crop1", "crop2")
VARIANTS: dict[str, Variant] = {
    "the default": DEFAULT,
    "`prior=2`": replace(DEFAULT, prior=2.0),
    "`prior=3`": replace(DEFAULT, prior=3.0),
    "`power=0.3`": replace(DEFAULT, power=0.3),
    "`power=0.7`": replace(DEFAULT, power=0.7),
    "before the last ReLU": replace(DEFAULT, layers=(("before", 1.0),)),
    "generalised mean (3) instead of average": replace(DEFAULT, layers=(("cubic", 1.0),)),
    "maximum instead of average": replace(DEFAULT, layers=(("maximum", 1.0),)),
    "average and maximum": replace(DEFAULT, layers=(("average", 1.0), ("maximum", 0.5))),
    "with the last stage": replace(DEFAULT, layers=(("average", 1.0), ("stage 7", 0.5))),
    "with the last two stages": replace(DEFAULT, layers=(("average", 1.0), ("stage 7", 0.5), ("stage 6", 0.5))),
    "with ImageNet's 1000 logits": replace(DEFAULT, layers=(("average", 1.0), ("logits", 0.5))),
    "learned with mirrors, averaged": replace(DEFAULT, learned=_MIRRORED),
    "learned with mirrors, as samples": replace(DEFAULT, learned=_MIRRORED, averaged=False),
    "learned with mirrors and 3 crops, averaged": replace(DEFAULT, learned=_CROPPED),
    "learned with mirrors and 3 crops, as samples": replace(DEFAULT, learned=_CROPPED, averaged=False),
    "mirrors learned and tested": replace(DEFAULT, learned=_MIRRORED, tested=_MIRRORED),
    "224 and 256 pixels, averaged": replace(DEFAULT, learned=("plain", "256 pixels"), tested=("plain", "256 pixels")),
}


# -- images and features ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    """Images with their class, and how many before them are of the same class."""

    images: list[Image.Image]
    labels: np.ndarray

    @property
    def rank(self) -> np.ndarray:
        """The position of every image within its class."""
        return np.array([int((self.labels[:row] == label).sum()) for row, label in enumerate(self.labels)])


def chosen_classes(generator: np.random.Generator) -> tuple[list[int], list[int]]:
    """Return all classes that are used, and those of them with more images."""
    near = [start + number for start in NEIGHBOURS for number in range(10)]
    rest = [label for label in range(FIRST, 200) if label not in near]
    others = sorted(int(each) for each in generator.permutation(rest)[:OTHERS])
    return [*range(FIRST), *near, *others], others[:LARGE]


def tiny_imagenet(folder: Path, left_out: Path | None) -> Images:
    """Return training images of the chosen classes, class after class, without those that are left out."""
    unwanted = set()
    if left_out is not None:
        unwanted = {np.asarray(Image.open(path).convert("RGB")).tobytes() for path in left_out.rglob("*.JPEG")}
    table = pyarrow.concat_tables(pyarrow.parquet.read_table(file) for file in sorted(folder.glob("train-*.parquet")))
    all_labels, column = table["label"].to_numpy(), table["image"].combine_chunks().field("bytes")
    generator = np.random.default_rng(SEED)
    classes, large = chosen_classes(generator)
    images, labels = [], []
    for label in classes:
        wanted = MANY + TESTED if label in large else LEARNED + (TESTED_FIRST if label < FIRST else TESTED)
        found = 0
        for row in generator.permutation(np.flatnonzero(all_labels == label)):
            image = Image.open(io.BytesIO(column[int(row)].as_py())).convert("RGB")
            if found < wanted and np.asarray(image).tobytes() not in unwanted:
                images.append(image)
                labels.append(label)
                found += 1
    return Images(images, np.array(labels))


def seen(image: Image.Image, row: int, view: str, size: int) -> np.ndarray:
    """Return a view of an image: its centred square, mirrored, or a random part of it."""
    width, height = image.size
    side = min(width, height)
    left, top, wide, high = (width - side) / 2, (height - side) / 2, 1.0, 1.0
    flipped = view == "mirror"
    if view.startswith("crop"):
        generator = np.random.default_rng([int(view[4:]), row])
        area, ratio = generator.uniform(0.5, 1.0), np.exp(generator.uniform(np.log(3 / 4), np.log(4 / 3)))
        wide, high = min(1.0, np.sqrt(area * ratio)), min(1.0, np.sqrt(area / ratio))
        left, top = left + generator.uniform(0, 1 - wide) * side, top + generator.uniform(0, 1 - high) * side
        flipped = generator.random() < 0.5
    box = (left, top, left + wide * side, top + high * side)
    pixels = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))
    return pixels[:, ::-1] if flipped else pixels


class Tapped:
    """An EfficientNet-lite0 that gives several layers, each pooled over the image."""

    def __init__(self) -> None:
        backbone = backbones.locate("efficientnet-lite0")
        assert backbone.weights is not None
        network = backbone.build(0).eval()
        assert isinstance(network, EfficientNetLite)
        self.network, self.view = network, backbone.weights.view
        assert backbone.weights.file is not None
        stored = torch.load(backbone.weights.file, weights_only=True, map_location="cpu")
        self.classifier = stored["_fc.weight"], stored["_fc.bias"]

    @torch.inference_mode()
    def __call__(self, inputs: Tensor) -> Features:
        """Return layers by name: the last two stages, and the last layer pooled in several ways."""
        network, layers = self.network, {}
        hidden = functional.relu6(network.stem_norm(network.stem_conv(inputs)))
        for number, block in enumerate(network.blocks, start=1):
            hidden = block(hidden)
            if number == len(network.blocks) - 1:
                layers["stage 6"] = hidden.mean(dim=(2, 3))
        layers["stage 7"] = hidden.mean(dim=(2, 3))
        before = network.head_norm(network.head_conv(hidden))
        last = before.clamp(0, 6)
        layers["before"], layers["average"] = before.mean(dim=(2, 3)), last.mean(dim=(2, 3))
        layers["cubic"], layers["maximum"] = (last**3).mean(dim=(2, 3)) ** (1 / 3), last.amax(dim=(2, 3))
        weight, bias = self.classifier
        # The logits are not raised to a power: that of `Variant.embed` is undone here.
        logits = layers["average"] @ weight.T + bias
        layers["logits"] = logits.sign() * logits**2
        return layers


def normalised(pixels: Sequence[np.ndarray], view: View) -> Tensor:
    """Return the network's input."""
    mean, std = (torch.tensor(each)[:, None, None] for each in (view.mean, view.std))
    return (torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 255 - mean) / std


def features_of(source: Images, name: str, view: str, keep: Path | None) -> Features:
    """Return the features of all images in a view, or those that an earlier call has kept."""
    file = None if keep is None else keep / f"{name}-{view.replace(' ', '-')}.npz"
    if file is not None and file.exists():
        return {layer: torch.from_numpy(rows).float() for layer, rows in np.load(file).items()}
    network = Tapped()
    size = 256 if view == "256 pixels" else network.view.size
    pieces = []
    for start in range(0, len(source.images), TOGETHER):
        rows = range(start, min(start + TOGETHER, len(source.images)))
        pieces.append(network(normalised([seen(source.images[row], row, view, size) for row in rows], network.view)))
    features = {layer: torch.cat([piece[layer] for piece in pieces]) for layer in pieces[0]}
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, **{layer: rows.numpy() for layer, rows in features.items()})
    return features


# -- draws -----------------------------------------------------------------------------------------------------------


def drawn(labels: np.ndarray, classes: Sequence[int], counts: Sequence[int], seed: int, many: bool = False) -> Split:
    """Return a split with so many images of these classes; what is tested is never learned by any split."""
    generator, last = np.random.default_rng([seed, 5]), MANY if many else LEARNED
    learned, tested = [], []
    for label, count in zip(classes, counts, strict=True):
        rows = np.flatnonzero(labels == label)
        learned.append(rows[generator.permutation(last)[:count]])
        tested.append(rows[last : last + (TESTED_FIRST if label < FIRST else TESTED)])
    answers = np.repeat(np.arange(len(classes)), [len(rows) for rows in tested])
    return Split(np.concatenate(learned), np.repeat(np.arange(len(classes)), counts), np.concatenate(tested), answers)


def draws(labels: np.ndarray) -> dict[str, list[Split]]:
    """Return the draws of Tiny-ImageNet by title."""
    classes, large = chosen_classes(np.random.default_rng(SEED))

    def shuffled(among: Sequence[int], seed: int, number: int) -> list[int]:
        return [int(each) for each in np.random.default_rng([seed, 9]).permutation(among)[:number]]

    def equal(count: int, number: int, kind: str) -> list[Split]:
        near = [list(range(start, start + 10)) for start in NEIGHBOURS]
        chosen = {
            "first": lambda seed: list(range(FIRST)),
            "random": lambda seed: shuffled(classes[FIRST:], seed, 10),
            "near": lambda seed: near[seed % len(near)],
        }[kind]
        return [drawn(labels, chosen(seed), [count] * 10, seed) for seed in range(number)]

    def unequal(counts: Sequence[int], number: int) -> list[Split]:
        return [drawn(labels, shuffled(large, seed, len(counts)), counts, seed, many=True) for seed in range(number)]

    result = {f"first, {count}": equal(count, number, "first") for count, number in ((5, 20), (20, 20), (100, 1))}
    result |= {f"random, {count}": equal(count, number, "random") for count, number in ((5, 20), (20, 20), (100, 5))}
    result |= {f"near, {count}": equal(count, number, "near") for count, number in ((5, 18), (20, 18))}
    return result | {"5 x 5, 5 x 300": unequal([5, 300] * 5, 3), "5, 300": unequal([5, 300], 8)}


# -- what comes out --------------------------------------------------------------------------------------------------


def fitted(variant: Variant, views: Sequence[Tensor], labels: np.ndarray) -> Callable[[Tensor], Tensor]:
    """Return the classifier; views that are samples of their own count as one image together."""
    number, classes = len(views), int(labels.max()) + 1
    if variant.averaged:
        views, number = [torch.stack(list(views)).mean(dim=0)], 1
    rows, answers = torch.cat(list(views)), torch.from_numpy(np.tile(labels, number))
    # All that is learned lies in the span of the rows, and the rule gives the same order of classes there: quicker.
    basis = torch.linalg.qr(rows.T).Q
    rows = rows @ basis
    within = gaussians.within_classes(rows, answers, range(classes))
    freedom = len(labels) - classes
    covariance = within.scatter / number / max(freedom, 1)
    known = discriminant.SharedGaussians(within.means, covariance, freedom, within.counts // number)
    score = discriminant.cosine(known, variant.prior)
    return lambda points: score(points @ basis)


def answered(variant: Variant, embedded: dict[str, Tensor], splits: Sequence[Split]) -> Iterator[np.ndarray]:
    """Yield for every split which tested images are answered correctly."""
    for split in splits:
        score = fitted(variant, [embedded[view][split.learned].double() for view in variant.learned], split.labels)
        tested = torch.stack([embedded[view][split.tested] for view in variant.tested]).mean(dim=0)
        yield score(tested.double()).argmax(dim=1).numpy() == split.answers


def of_draws(variant: Variant, views: dict[str, Features], splits: Sequence[Split]) -> list[float]:
    """Return the balanced accuracy of every draw; classes have equally many tested images."""
    embedded = {view: variant.embed(views[view]) for view in {*variant.learned, *variant.tested}}
    results = zip(answered(variant, embedded, splits), splits, strict=True)
    return [100 * balanced(right, split.answers) for right, split in results]


def of_folds(variant: Variant, views: dict[str, Features], labels: np.ndarray, repeats: int) -> list[list[float]]:
    """Return accuracy and balanced accuracy of every repetition of the cross-validation."""
    embedded = {view: variant.embed(views[view]) for view in {*variant.learned, *variant.tested}}
    both: list[list[float]] = [[], []]
    for seed in range(repeats):
        splits, right = list(folds(labels, seed)), np.zeros(len(labels), bool)
        for split, correct in zip(splits, answered(variant, embedded, splits), strict=True):
            right[split.tested] = correct
        both[0].append(100 * float(right.mean()))
        both[1].append(100 * balanced(right, labels))
    return both


def of_folder(folder: Path, tiny: Images, average: Tensor) -> str:
    """Return what is reached on the first classes after learning them, by default, from the images of a folder."""
    source = Images(*first_classes(folder))
    learned = DEFAULT.embed(features_of(source, "left-out", "plain", None)).double()
    rows = np.flatnonzero(tiny.labels < FIRST)
    tested = DEFAULT.embed({"average": average[rows]}).double()
    right = fitted(DEFAULT, [learned], source.labels)(tested).argmax(dim=1).numpy() == tiny.labels[rows]
    return f"learned from {len(learned)} images of {folder}: {100 * right.mean():.1f}% of {len(rows)} others"


def first_classes(folder: Path) -> tuple[list[Image.Image], np.ndarray]:
    """Return the images of Tiny-ImageNet's first classes, one sub-folder each."""
    places = sorted(each for each in folder.iterdir() if each.is_dir())
    assert len(places) == FIRST, f"{folder} should have the first {FIRST} classes"
    files = [(path, number) for number, place in enumerate(places) for path in sorted(place.rglob("*.JPEG"))]
    return [Image.open(path).convert("RGB") for path, _ in files], np.array([number for _, number in files])


def print_rows(titles: Sequence[str], measure: Callable[[Variant], list[list[float]]], names: Sequence[str]) -> None:
    """Print the mean of every column, and its difference from the default with the standard error of the pairs."""
    print("| variant | " + " | ".join(titles) + " |\n|---|" + "---|" * len(titles), flush=True)
    usual: list[list[float]] = []
    for name in dict.fromkeys(["the default", *names]):
        columns = measure(VARIANTS[name])
        usual = usual or columns
        cells = []
        for values, reference in zip(columns, usual, strict=True):
            change = np.array(values) - np.array(reference)
            error = change.std() / np.sqrt(max(len(change) - 1, 1))
            more = f" ± {np.std(values):.1f}" if values is reference else f" ({change.mean():+.1f} ± {error:.1f})"
            cells.append(f"{np.mean(values):.1f}{more}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Print one table for the folder, and one for Tiny-ImageNet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="training images, one sub-folder per class")
    parser.add_argument("--tiny-imagenet", type=Path, help="Tiny-ImageNet's Parquet files")
    parser.add_argument(
        "--leave-out",
        type=Path,
        help="folder with training images of Tiny-ImageNet's first ten classes: no draw has them; what is learned from "
        "them alone is tested on the others",
    )
    parser.add_argument("--keep", type=Path, help="folder for features, which are read from there if they are there")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--repeats", type=int, default=4, help="of the cross-validation")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    needed = {
        view
        for name in ("the default", *options.variants)
        for view in (*VARIANTS[name].learned, *VARIANTS[name].tested)
    }
    if options.folder is not None:
        source = Images(*photographs(options.folder))
        clothes = {view: features_of(source, "folder", view, options.keep) for view in VIEWS if view in needed}
        print_rows(
            ["accuracy", "balanced"],
            lambda variant: of_folds(variant, clothes, source.labels, options.repeats),
            options.variants,
        )
    if options.tiny_imagenet is not None:
        tiny = tiny_imagenet(options.tiny_imagenet, options.leave_out)
        views = {view: features_of(tiny, "tiny-imagenet", view, options.keep) for view in VIEWS if view in needed}
        if options.leave_out is not None:
            print(of_folder(options.leave_out, tiny, views["plain"]["average"]), flush=True)
        columns = draws(tiny.labels)
        print_rows(
            list(columns),
            lambda variant: [of_draws(variant, views, splits) for splits in columns.values()],
            options.variants,
        )


if __name__ == "__main__":
    main()
