"""The number at the end of a visit: how many images get the right class from a model that has not learned from them.

Where a visit trains the network, a share of its images is held out and never learned from. Where it trains nothing,
every image is left out once: the images are cut into a few parts, and each part is measured with what the other parts
and the stored classes give. More images of known classes are measured before they are learned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from efcil import methods, seeds
from efcil.activity import doing
from efcil.core import calibration, typicality
from efcil.engine.evaluate import scorer
from efcil.engine.lifecycle import Blueprint, end
from efcil.engine.progress import Progress
from efcil.errors import SettingsError, printable, some
from efcil.methods.base import Method, Task
from efcil.model.card import Card, Visit
from efcil.model.in_memory import Model, probabilities
from efcil.model.measured import BEFORE, FOLDS, HELD_OUT, Measured, temperature
from efcil.network.memo import FeatureMemo, forget_features, remembered_features

#: Share of a class's images that is held out, the fewest images of a class that some are held out of, and the number
#: of parts that images are cut into where every image is left out once.
SHARE, SMALLEST_CLASS, PARTS = 0.1, 5, 5
#: So many images of a class must be taken for one other class before that is said.
FEWEST_ALIKE = 3
#: Accuracies of classes are shown one by one if they differ by at least this much.
DIFFER_MUCH = 0.2
#: Images are named of which it is less likely than this that they are of their own class; so many at most.
UNLIKELY, MOST_NAMED = 0.01, 10


@dataclass(frozen=True)
class Plan:
    """Which rows of a visit's images are learned from, and which parts of them are measured.

    `way` is None where no image can be measured, or none was to be.
    """

    way: str | None
    learned: np.ndarray
    parts: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class Answered:
    """The images that were measured, by their `rows`: their classes, what they were taken for, and how likely it was
    that they are of their own class. Nothing of this is kept.
    """

    rows: np.ndarray
    true: np.ndarray
    given: np.ndarray
    own: np.ndarray


@dataclass(frozen=True)
class Outcome:
    """A measurement, and for each class of the visit how many images were measured and how many were right."""

    measured: Measured | None
    images: np.ndarray
    right: np.ndarray
    answered: Answered


def trains_network(card: Card, index: int) -> bool:
    """Say whether a task trains the network, so that images that it learned from cannot measure it."""
    if index == 0:
        return card.resolved.first_task.epochs > 0
    traits = methods.get(card.settings.method).traits(card.resolved.method)
    return traits.trains_later and card.resolved.later.epochs > 0


def plan(card: Card, names: Sequence[Hashable], places: np.ndarray, held_out: float | None) -> Plan:
    """Choose the images to measure with; `places` (N) says which of the new classes `names` an image has.

    `held_out` is the share of every class that is not learned from, 0 to measure nothing, None to choose. The choice
    depends on the seed, the task and the names of the classes alone, so that a resumed task chooses the same images.
    """
    refuse_share(held_out)
    index, everything = len(card.task_sizes), np.arange(len(places))
    if held_out == 0.0:
        return Plan(None, everything)
    shuffled = [_shuffled(card.settings.seed, index, name, places == place) for place, name in enumerate(names)]
    if held_out is None and not trains_network(card, index):
        cut = [_every(rows, place) for place, rows in enumerate(shuffled) if len(rows) > 1]
        parts = [np.sort(np.concatenate(rows)) for rows in zip(*cut, strict=True)]
        parts = [part for part in parts if len(part)]
        return Plan(FOLDS if parts else None, everything, tuple(parts))
    share = SHARE if held_out is None else held_out
    chosen = [rows[: _held_out(len(rows), share)] for rows in shuffled]
    rows = np.sort(np.concatenate(chosen))
    if not len(rows):
        return Plan(None, everything)
    return Plan(HELD_OUT, np.setdiff1d(everything, rows), (rows,))


def refuse_share(held_out: float | None) -> None:
    """Refuse a share of images to hold out that leaves nothing to learn from."""
    if held_out is not None and not 0.0 <= held_out <= 0.5:
        raise SettingsError(f"The share of images to hold out must be between 0 and 0.5, but it is {held_out:g}.")


def _shuffled(seed: int, index: int, name: Hashable, members: np.ndarray) -> np.ndarray:
    rows = np.flatnonzero(members)
    return np.random.default_rng(seeds.derive(seed, "measure", index, str(name))).permutation(rows)


def _every(rows: np.ndarray, offset: int) -> list[np.ndarray]:
    """Cut the rows of a class into PARTS; classes begin at different parts, so that small ones do not share one."""
    part = (np.arange(len(rows)) + offset) % PARTS
    return [rows[part == each] for each in range(PARTS)]


def _held_out(count: int, share: float) -> int:
    return max(1, round(share * count)) if count >= SMALLEST_CLASS else 0


# -- measuring -------------------------------------------------------------------------------------------------------


class Measuring:
    """The measurement of one task: builds the method that learns it, and measures when it has."""

    def __init__(self, model: Model, chosen: Plan, task: Task, repeats: np.ndarray | None = None) -> None:
        self.model, self.chosen, self.task, self.repeats = model, chosen, task, repeats
        # A method that is built again for every part must not compute all features again.
        self.blueprint = _Remembering.of(model.blueprint) if chosen.way == FOLDS else model.blueprint

    def beginner(self) -> Method | None:
        """Return the method that learns the task next; None for the first task."""
        return None if self.task.index == 0 else self.model.twin(self.blueprint)

    def outcome(self, pixels: np.ndarray, numbers: np.ndarray, learner: Method) -> Outcome:
        """Measure, after `learner` has learned the task; `numbers` (N) are the classes of the images."""
        nothing = np.zeros(self.task.classes, np.int64)
        if self.chosen.way is None:
            return Outcome(None, nothing, nothing, Answered(*[nothing[:0]] * 4))
        answers = []
        with doing("measuring", len(self.chosen.parts)) as work:
            for part in self.chosen.parts:
                answers.append(self._answers(part, pixels, numbers, learner))
                work.done += 1
        rows = np.concatenate(self.chosen.parts)
        true = numbers[rows]
        scores = np.concatenate([each for each, _ in answers])
        close = [each for _, each in answers if each is not None]
        measured = _summarised(self.model, self.chosen.way, scores, true, np.concatenate(close) if close else None)
        answered = _answered(self.model.card, measured, rows, true, scores)
        new = true - self.task.first_class
        images, right = (
            np.bincount(each, minlength=self.task.classes) for each in (new, new[answered.given == answered.true])
        )
        forget_features(learner.network)
        return Outcome(measured, images, right, answered)

    def _answers(
        self, part: np.ndarray, pixels: np.ndarray, numbers: np.ndarray, learner: Method
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the answers for one part, from a method that has learned from the others."""
        if self.chosen.way == HELD_OUT:
            return _answers(self.model, learner, pixels, part)
        method = self.beginner()
        if method is None:
            method = self.blueprint.around(learner.network.state_dict())
        else:
            method.begin_task(self.task)
        others = np.setdiff1d(self.chosen.learned, part)
        data = self.model.task_images(pixels, numbers, f"task{self.task.index}", others, self.repeats)
        end(method, self.task, data)
        return _answers(self.model, method, pixels, part)


def measure_before(model: Model, pixels: np.ndarray, numbers: np.ndarray) -> tuple[Measured, Answered]:
    """Measure images of known classes with the model as it is, before it learns from them; return the answers too."""
    scores, close = _answers(model, model.ready, pixels)
    measured = _summarised(model, BEFORE, scores, numbers, close)
    return measured, _answered(model.card, measured, np.arange(len(numbers)), numbers, scores)


def _answered(card: Card, found: Measured, rows: np.ndarray, true: np.ndarray, scores: np.ndarray) -> Answered:
    """Return the answers that scores (N, classes) give, with the temperature that the model has after this visit."""
    parts = [*(visit.measured for visit in card.visits), found]
    chances = probabilities(scores, temperature(parts, found.classifier, found.among))
    return Answered(rows, true, scores.argmax(axis=1), chances[np.arange(len(true)), true])


def _summarised(model: Model, way: str, scores: np.ndarray, numbers: np.ndarray, close: np.ndarray | None) -> Measured:
    """Return what is kept of scores (N, classes) and closeness (N) of images of the classes `numbers` (N)."""
    return Measured(
        way=way,
        right=int((scores.argmax(axis=1) == numbers).sum()),
        images=len(numbers),
        among=scores.shape[1],
        classifier=model.card.settings.classifier,
        likelihood=calibration.likelihood(scores, numbers),
        closeness=None if close is None else typicality.spread_of(close),
    )


@torch.no_grad()
def _answers(
    model: Model, method: Method, pixels: np.ndarray, rows: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return scores (N, classes) and, if the method keeps class means, closeness (N) of all images or some `rows`."""
    with remembered_features(method.network):  # scores and closeness need the same
        scores = model.by_pieces(pixels, scorer(method, model.card.settings.classifier), rows)
        statistics = method.statistics()
        if statistics is None:
            return scores, None
        close = typicality.closeness(statistics.means)
        return scores, model.by_pieces(pixels, lambda images: close(method.embed(images)), rows)


# -- in words --------------------------------------------------------------------------------------------------------


def say_in_doubt(
    progress: Progress | None, names: Sequence[Hashable], answered: Answered, name_of: Callable[[int], str]
) -> None:
    """Say which classes had most of their measured images taken for one other class, and which single images look so
    unlike their class that they may be in the wrong folder; `name_of` gives the name of the image in a row.
    """
    if progress is None:
        return
    true, given = answered.true, answered.given
    doubtful = (true != given) & (answered.own < UNLIKELY)
    for number in np.unique(true):
        of_class, name = true == number, names[int(number)]
        counts = np.bincount(given[of_class])
        answer, images = int(counts.argmax()), int(counts.max())
        if answer != number and images >= FEWEST_ALIKE and 2 * images > of_class.sum():
            doubtful &= ~(of_class & (given == answer))  # said here, all at once
            progress.say(
                f"{images} of {of_class.sum()} images of {name} were taken for {names[answer]} by a model that had not "
                f"learned from them. Are they in the right folder? If {name} and {names[answer]} are the same thing, "
                "`efcil merge` makes them one class"
            )
    if doubtful.any():
        places = np.flatnonzero(doubtful)
        places = places[np.argsort(answered.own[places], kind="stable")]
        single = [f"{name_of(int(answered.rows[place]))} ({names[int(given[place])]})" for place in places]
        are, they = ("1 image looks", "it") if len(single) == 1 else (f"{len(single)} images look", "them")
        progress.say(
            printable(
                f"{are} like another class to a model that had not learned from {they}: {some(single, MOST_NAMED)}. "
                f"{'Is it' if len(single) == 1 else 'Are they'} in the right folder?"
            )
        )


def in_words(card: Card, visit: Visit) -> list[str]:
    """Return what one of the last visits has measured, for people; per class where classes differ much."""
    found = visit.measured
    if found is None:
        return ["accuracy was not measured: no image was held out"]
    if found.among == 1:
        return ["accuracy was not measured: with one class, every answer is right"]
    before = "these images before they were learned from"
    images = before if found.way == BEFORE else "held-out images of these classes"
    number = rate(found.right, found.images)
    lines = [f"accuracy on {images}, among all {found.among} classes the model knows: {number}"]
    classes = [each for each in card.classes if visit.kind == "task" and each.task == len(card.task_sizes) - 1]
    known = [each for each in classes if each.measured]
    rates = [each.right / each.measured for each in known]
    if rates and max(rates) - min(rates) >= DIFFER_MUCH:
        worst = sorted(known, key=lambda each: each.right / each.measured)
        lines.append("  by class: " + some([f"{each.label} {rate(each.right, each.measured)}" for each in worst], 20))
    lines += _how(found, visit.images, [each.label for each in classes if not each.measured])
    if len(card.classes) > len(classes) and visit.kind == "task":
        lines.append(
            "  Images of earlier classes are gone, so their accuracy cannot be measured here; `efcil evaluate` can, "
            "with other images of them."
        )
    return lines


def rate(right: int, images: int) -> str:
    """Return a share of images as people read it: 86% (24 of 28)."""
    return f"{100.0 * right / images:.0f}% ({right} of {images})"


def _how(found: Measured, learned: int, without: Sequence[Hashable]) -> list[str]:
    """Say which images were measured, and whether they were learned from in the end."""
    if found.way == FOLDS:
        lines = ["  Each image was left out once, to be measured; in the end all are learned from."]
        why = "they have one image each"
    elif found.way == HELD_OUT:
        share = f"{100.0 * found.images / (found.images + learned):.0f}%"
        lines = [f"  {share} of the images were held out and are not learned from; --held-out changes the share."]
        why = f"they have fewer than {SMALLEST_CLASS} images each"
    else:
        return []
    return [*lines, f"  Not measured, because {why}: {some(without)}."] if without else lines


# -- building a method again for every part --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Remembering(Blueprint):
    """A blueprint whose methods share the features that any of them has computed."""

    memo: FeatureMemo = dataclasses.field(default_factory=FeatureMemo)

    @classmethod
    def of(cls, blueprint: Blueprint) -> _Remembering:
        return cls(**{each.name: getattr(blueprint, each.name) for each in dataclasses.fields(blueprint)})

    def place(self, method: Method) -> Method:
        placed = super().place(method)
        self.memo.attach(placed.network)
        return placed
