"""How good the answers of a model are on images and classes that it has not learned from.

    python benchmarks/answers.py FOLDER [--known 7] [--unseen 3] [--learned 0.67] [--per-visit 2] [--repeats 5]

FOLDER has one sub-folder of images per class. In every repeat, classes are drawn at random: the known ones are learned
in visits with the settings of `efcil learn`, from a share (or a number) of their images; the rest of their images and
those of the unseen classes test the result. Printed, with the standard deviation over repeats: accuracy, beside the
number that `efcil learn` prints; the expected calibration error with and without temperature; how well known and unseen
classes are told apart (AUROC) by typicality and by other measures; and how many images `--unknown 0.05` rejects.

The network must not train: its features of an image are computed once for all repeats.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from efcil.core import calibration
from efcil.core.classifiers import ClassStatistics, bayes, nearest_mean
from efcil.evaluation import classification
from efcil.model import Model, defaults
from efcil.model.images import gather_labelled
from efcil.model.learning import learn
from efcil.model.measuring import trains_network
from efcil.network.incremental import IncrementalNetwork
from efcil.network.memo import FeatureMemo
from efcil.settings import TrainingSettings

SHARE = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--known", type=int, default=7)
    parser.add_argument("--unseen", type=int, default=3)
    parser.add_argument("--learned", type=float, default=0.67, help="share of a class's images, or their number")
    parser.add_argument("--per-visit", type=int, default=2, help="classes per visit")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--most", type=int, default=60, help="images of a class that are used at all")
    parser.add_argument("--method", default=defaults.METHOD)
    arguments = parser.parse_args()
    compute_features_once()
    pictures, labels = gather_labelled(arguments.folder)
    settings = TrainingSettings(method=arguments.method, network=defaults.NETWORK, classifier="auto", device="cpu")
    size = Model.create(settings, 224).card.image_size
    names = np.array(labels)
    first = np.array([np.sum(names[:row] == name) < arguments.most for row, name in enumerate(names)])
    pictures.items = [item for item, wanted in zip(pictures.items, first, strict=True) if wanted]
    pixels, names = pictures.pixels(size), names[first]
    found = [measure(arguments, settings, pixels, names, repeat) for repeat in range(arguments.repeats)]
    for name in found[0]:
        values = [row[name] for row in found]
        print(f"{name:<55} {np.mean(values):.3f} +- {np.std(values):.3f}", flush=True)


def compute_features_once() -> None:
    """Let all networks share the features of images: their weights are the same."""
    memo, compute = FeatureMemo(), IncrementalNetwork.features

    def features(network: IncrementalNetwork, images: Tensor) -> Tensor:
        with torch.no_grad():
            return memo.look_up(images, lambda missing: compute(network, missing))

    IncrementalNetwork.features = features  # type: ignore[method-assign]


def measure(
    arguments: argparse.Namespace, settings: TrainingSettings, pixels: np.ndarray, names: np.ndarray, repeat: int
) -> dict[str, float]:
    """Learn some classes, and test."""
    draw = np.random.default_rng(repeat)
    classes = draw.permutation(np.unique(names))
    known = classes[: arguments.known]
    unseen = np.isin(names, classes[arguments.known : arguments.known + arguments.unseen])
    learned = np.zeros(len(names), bool)
    for name in known:
        rows = draw.permutation(np.flatnonzero(names == name))
        share = arguments.learned
        learned[rows[: round(share * len(rows)) if share < 1 else int(share)]] = True
    model = Model.create(settings, pixels.shape[1])
    if trains_network(model.card, 0):
        raise SystemExit("This method trains the network.")
    for start in range(0, len(known), arguments.per_visit):
        rows = np.flatnonzero(learned & np.isin(names, known[start : start + arguments.per_visit]))
        learn(model, pixels[rows], names[rows].tolist())
    tested = np.isin(names, known) & ~learned
    place = {label: number for number, label in enumerate(model.card.labels)}
    return results(model, pixels[tested], np.array([place[name] for name in names[tested]]), pixels[unseen])


def results(model: Model, tested: np.ndarray, numbers: np.ndarray, unseen: np.ndarray) -> dict[str, float]:
    """Return everything that is printed."""
    scores, visits = model.scores(tested), [visit.measured for visit in model.card.visits if visit.measured]
    plain, calibrated = calibration.softmax(scores), model.probabilities(tested)
    likeliest = calibration.likelihood(scores, numbers)
    assert likeliest is not None
    best = calibration.softmax(scores, calibration.temperature([likeliest]))
    typical, other = model.typicality(tested), model.typicality(unseen)
    assert typical is not None
    assert other is not None
    table = {
        "accuracy": float((scores.argmax(axis=1) == numbers).mean()),
        "accuracy that the last visit printed (its classes)": visits[-1].right / visits[-1].images,
        "calibration error, temperature 1": calibration_error(plain, numbers),
        "calibration error, temperature of the model": calibration_error(calibrated, numbers),
        "calibration error, best temperature for these images": calibration_error(best, numbers),
        "temperature": model.temperature,
        f"known images answered unknown, --unknown {SHARE}": float((typical < SHARE).mean()),
        f"unseen classes answered unknown, --unknown {SHARE}": float((other < SHARE).mean()),
        "AUROC, typicality": auroc(typical, other),
    }
    for name, function in others(model).items():
        table[f"AUROC, {name}"] = auroc(function(tested), function(unseen))
    return table


def others(model: Model) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Return other measures of how well an image fits the known classes."""
    method, statistics = model.ready, model.ready.statistics()
    assert statistics is not None
    covariances, group_of = statistics.spread()
    share = torch.bincount(group_of, minlength=len(covariances)).to(covariances.dtype) / len(group_of)
    within = torch.einsum("g,gij->ij", share, covariances)[None]
    centred = statistics.means - statistics.means.mean(dim=0)
    total = within + (centred.T @ centred / len(centred))[None]
    classes = bayes(ClassStatistics(statistics.means, within, torch.zeros_like(group_of)), 0.5)
    everything = bayes(ClassStatistics(statistics.means.mean(dim=0)[None], total, group_of[:1] * 0), 0.5)
    directions = functional.normalize(statistics.means, dim=1)

    def of(function: Callable[[Tensor], Tensor]) -> Callable[[np.ndarray], np.ndarray]:
        return lambda pixels: model.by_pieces(pixels, lambda images: function(method.embed(images)))

    def energy(pixels: np.ndarray) -> np.ndarray:
        scaled = model.scores(pixels).astype(np.float64) / model.temperature
        top = scaled.max(axis=1)
        return top + np.log(np.exp(scaled - top[:, None]).sum(axis=1))

    return {
        "largest probability": lambda pixels: model.probabilities(pixels).max(axis=1),
        "largest score": lambda pixels: model.scores(pixels).max(axis=1),
        "energy of the scores": energy,
        "cosine to the nearest mean": of(lambda x: (functional.normalize(x, dim=1) @ directions.T).amax(1)),
        "distance to the nearest mean": of(lambda x: nearest_mean(statistics)(x).amax(1)),
        "Mahalanobis distance": of(lambda x: classes(x).amax(1)),
        "relative Mahalanobis distance": of(lambda x: classes(x).amax(1) - everything(x)[:, 0]),
    }


def calibration_error(chances: np.ndarray, numbers: np.ndarray) -> float:
    """Return the expected calibration error of probabilities (N, classes)."""
    found = classification.calibration(chances.max(axis=1), chances.argmax(axis=1) == numbers)
    assert found is not None
    return found.expected_error


def auroc(known: np.ndarray, unseen: np.ndarray) -> float:
    """Return how often a known image has a larger value than one of an unseen class."""
    found = classification.auroc(known, unseen)
    assert found is not None
    return found


if __name__ == "__main__":
    with torch.no_grad():
        main()
