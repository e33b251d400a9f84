"""Evaluating a model: its answers to labelled images, piece by piece, and what they come to.

Of every image only a few numbers are kept, so that folders of any size need little memory.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from efcil.data.decode import Encoded, decode_image
from efcil.errors import DataError, some
from efcil.evaluation import classification
from efcil.evaluation.classification import Confusion
from efcil.evaluation.result import (
    TOP,
    ClassResult,
    Evaluation,
    Mistake,
    Rejection,
    TaskResult,
    UnknownClass,
    Unreadable,
)
from efcil.model.card import Card, LearnedClass, ModelError, encode_label
from efcil.model.images import (
    InputError,
    Pictures,
    class_folders,
    folder_label,
    gather_labelled,
    left_out_folders,
    model_fit,
    plain_name,
)
from efcil.model.in_memory import Model
from efcil.network.memo import remembered_features

__all__ = ["Evaluation", "better_than_expected", "evaluate", "evaluate_folder"]


@dataclass(frozen=True, eq=False)
class _Answers:
    """What is kept of the answers: one entry per image that could be read."""

    places: np.ndarray  # which of the given images
    truths: np.ndarray  # the number of its class, -1 where the model does not know it
    answers: np.ndarray
    confidences: np.ndarray  # the probabilities of the answers
    of_truths: np.ndarray  # the probabilities of the true classes
    ranks: np.ndarray  # the places of the true classes among the answers, the best 0
    typicalities: np.ndarray | None

    def among(self, chosen: np.ndarray) -> _Answers:
        """Return the chosen images alone."""
        kept: dict[str, Any] = {name: None if each is None else each[chosen] for name, each in vars(self).items()}
        return _Answers(**kept)


def evaluate_folder(
    model: Model,
    folder: Path,
    *,
    unknown: float | None = None,
    model_name: str = "",
    progress: Callable[[int], None] = lambda _: None,
) -> Evaluation:
    """Evaluate a model on a folder with one sub-folder per class; beside train/, those of test/ or val/ are taken."""
    paths, labels = class_folders(folder, held_out=True)
    if paths:
        root = folder / paths[0].relative_to(folder).parts[0]
    else:
        (paths, labels), (root, _) = class_folders(folder), left_out_folders(folder)
    return evaluate(
        model, Pictures(paths), labels, unknown=unknown, model_name=model_name, data=str(root), progress=progress
    )


def evaluate(
    model: Model,
    pictures: Any,
    labels: Sequence[Hashable] | None = None,
    *,
    unknown: float | None = None,
    names: Sequence[str] | None = None,
    model_name: str = "",
    data: str = "",
    progress: Callable[[int], None] = lambda _: None,
) -> Evaluation:
    """Compare the model's answers with the labels of pictures: `Pictures`, or whatever a classifier learns from.

    With `unknown`, an image whose typicality is below that share is answered as unknown. `names` are the images'
    names in the result, if they have no files; `model_name` and `data` name the model and the images there. `progress`
    is called after every piece with its number of images.
    Images that cannot be read are listed in the result and count nowhere.
    """
    if not isinstance(pictures, Pictures):
        pictures, labels = gather_labelled(pictures, labels)
    if labels is None or len(labels) != len(pictures):
        raise InputError(f"There are {len(pictures)} images. Give one label for each.")
    numbers = _numbers(model, labels)
    _refuse_strangers(model, labels, numbers, unknown)
    if unknown is not None:
        model.refuse_without_typicality()  # before anything is decoded
    unreadable: list[tuple[int, str]] = []
    answers = _answers(model, pictures, numbers, unknown is not None, unreadable, progress)

    def name(place: int) -> str:
        item = pictures.items[place]
        return names[place] if names is not None else str(item) if isinstance(item, Path) else f"image {place}"

    broken = tuple(Unreadable(name(place), reason) for place, reason in unreadable)
    if len(answers.places) == 0:
        raise InputError(f"None of the {len(broken)} images could be read. The first: {broken[0].reason}")
    found = _result(model, labels, answers, name, unknown)
    return replace(found, model=model_name, data=data, unreadable=broken)


def better_than_expected(card: Card, found: Evaluation) -> str | None:
    """Return a sentence if the images are answered far better than held-out ones were: they may be learned ones."""
    both = [pair for pair in zip(card.classes, found.classes, strict=True) if pair[0].measured and pair[1].images]
    tried, images = sum(seen.measured for seen, _ in both), sum(now.images for _, now in both)
    expected = sum(now.images * seen.right / seen.measured for seen, now in both) / max(images, 1)
    before = classification.wilson(round(expected * tried), tried)
    now = classification.wilson(sum(now.correct for _, now in both), images)
    if before is None or now is None or now[0] <= before[1]:
        return None
    return (
        f"That is far better than held-out images were when these classes were learned ({100 * expected:.0f}%). If the "
        "model has learned from these images, all numbers here are too good: evaluate with others."
    )


# -- the model's answers ---------------------------------------------------------------------------------------------


def _ask(model: Model, pixels: np.ndarray, typical: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Return calibrated probabilities (N, classes), and with `typical` typicalities (N)."""
    with remembered_features(model.ready.network):  # both questions need them
        return model.probabilities(pixels), model.typicality(pixels) if typical else None


def _answers(
    model: Model,
    pictures: Pictures,
    numbers: np.ndarray,
    typical: bool,
    unreadable: list[tuple[int, str]],
    progress: Callable[[int], None],
) -> _Answers:
    """Ask the model about all pictures; those that cannot be read are added to `unreadable`."""
    columns: dict[str, list[np.ndarray]] = {field.name: [] for field in fields(_Answers)}
    for places, pixels in _pieces(model, pictures, unreadable):
        if places:
            found, typicalities = _ask(model, pixels, typical)
            rows = np.arange(len(places))
            truths, answers = numbers[places], found.argmax(axis=1)
            # Where the class is unknown, the answer stands in for it; nothing reads these.
            stands = np.where(truths < 0, answers, truths)
            columns["places"].append(np.array(places))
            columns["truths"].append(truths)
            columns["answers"].append(answers)
            columns["confidences"].append(found[rows, answers])
            columns["of_truths"].append(found[rows, stands])
            columns["ranks"].append(classification.ranks(found, stands))
            columns["typicalities"] += [] if typicalities is None else [typicalities]
        progress(len(places))
    whole: dict[str, Any] = {name: np.concatenate(parts) if parts else np.zeros(0) for name, parts in columns.items()}
    return _Answers(**{**whole, "typicalities": whole["typicalities"] if typical else None})


def _pieces(
    model: Model, pictures: Pictures, unreadable: list[tuple[int, str]]
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield places and pixels, batch by batch. While one batch is used, the next one is decoded in threads."""
    size, remaining = model.card.image_size, iter(range(len(pictures)))
    fit = model_fit(size)

    def pixels(place: int) -> np.ndarray:
        item = pictures.items[place]
        if isinstance(item, Path):
            return decode_image(Encoded(item, str(item)), fit)
        return pictures.pixels(size, place, place + 1)[0]

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:

        def next_piece() -> list[tuple[int, Future[np.ndarray]]]:
            return [(place, pool.submit(pixels, place)) for place in itertools.islice(remaining, model.piece)]

        piece = next_piece()
        while piece:
            decoded: list[tuple[int, np.ndarray]] = []
            for place, future in piece:
                try:
                    decoded.append((place, future.result()))
                except DataError as error:
                    unreadable.append((place, str(error)))
            piece = next_piece()
            shown = np.stack([each for _, each in decoded]) if decoded else np.empty((0, size, size, 3), np.uint8)
            yield [place for place, _ in decoded], shown


def _numbers(model: Model, labels: Sequence[Hashable]) -> np.ndarray:
    """Return the number of every label's class, -1 for one that the model does not know.

    Names of folders are text, labels need not be: `7` is found in the folder "7", where no class is called that.
    """
    exact: dict[Hashable, int] = {label: number for number, label in enumerate(model.card.labels)}
    by_text = {folder_label(str(label)): number for number, label in enumerate(model.card.labels)}
    found = {label: exact.get(label, by_text.get(str(label), -1)) for label in dict.fromkeys(labels)}
    return np.array([found[label] for label in labels], np.int64)


def _refuse_strangers(model: Model, labels: Sequence[Hashable], numbers: np.ndarray, unknown: float | None) -> None:
    """Refuse images of unknown classes alone, unless it is asked for how many of them are recognised."""
    if unknown is None and not (numbers >= 0).any():
        raise InputError(
            f"The model knows none of these classes: {some(list(dict.fromkeys(labels)))}. It knows "
            f"{some(model.card.labels)}. Give images of these, each class in a folder of its name, or add --unknown to "
            "see how many images are recognised as unknown."
        )


# -- what they come to -----------------------------------------------------------------------------------------------


def _result(
    model: Model,
    labels: Sequence[Hashable],
    answers: _Answers,
    name: Callable[[int], str],
    unknown: float | None,
) -> Evaluation:
    learned = model.card.classes
    known, strange = answers.among(answers.truths >= 0), answers.among(answers.truths < 0)
    right = known.answers == known.truths
    confusion = Confusion.of(known.truths, known.answers, len(learned))
    recall, correct, images = classification.recall(confusion), int(right.sum()), len(right)
    return Evaluation(
        model="",
        data="",
        images=images,
        correct=correct,
        accuracy=classification.accuracy(confusion),
        interval=classification.wilson(correct, images),
        balanced_accuracy=classification.mean_over_present(recall, confusion),
        macro_f1=classification.mean_over_present(classification.f1(confusion), confusion),
        top=tuple((k, float((known.ranks < k).mean())) for k in TOP if k < len(learned) and images),
        calibration=classification.calibration(known.confidences, right),
        classes=_classes(learned, confusion),
        tasks=_tasks(learned, confusion),
        pairs=confusion,
        mistakes=_mistakes(known, name),
        unknown_classes=_unknown_classes(model, labels, strange, unknown),
        confidence_auroc=classification.auroc(known.confidences, strange.confidences),
        rejection=None if unknown is None else _rejection(known, strange, unknown),
        unreadable=(),
    )


def _classes(learned: Sequence[LearnedClass], confusion: Confusion) -> tuple[ClassResult, ...]:
    precision, recall, f1 = (
        function(confusion) for function in (classification.precision, classification.recall, classification.f1)
    )
    images, answered, correct = confusion.images, confusion.answered, confusion.right
    return tuple(
        ClassResult(
            name=str(each.label),
            label=_as_json(each.label),
            task=each.task + 1,
            images=int(images[place]),
            answered=int(answered[place]),
            correct=int(correct[place]),
            precision=classification.number(precision[place]),
            recall=classification.number(recall[place]),
            f1=classification.number(f1[place]),
            interval=classification.wilson(int(correct[place]), int(images[place])),
        )
        for place, each in enumerate(learned)
    )


def _tasks(learned: Sequence[LearnedClass], confusion: Confusion) -> tuple[TaskResult, ...]:
    of = np.array([each.task for each in learned])
    images, correct = confusion.images, confusion.right
    found = []
    for task in sorted(set(of.tolist())):
        own = of == task
        total = int(images[own].sum())
        found.append(TaskResult(task + 1, int(own.sum()), total, int(correct[own].sum()) / total if total else None))
    return tuple(found)


def _mistakes(known: _Answers, name: Callable[[int], str]) -> tuple[Mistake, ...]:
    wrong = known.among(known.answers != known.truths)
    return tuple(
        Mistake(
            name(int(wrong.places[row])),
            int(wrong.truths[row]),
            int(wrong.answers[row]),
            float(wrong.confidences[row]),
            float(wrong.of_truths[row]),
        )
        for row in np.argsort(-wrong.confidences, kind="stable")
    )


def _unknown_classes(
    model: Model, labels: Sequence[Hashable], strange: _Answers, unknown: float | None
) -> tuple[UnknownClass, ...]:
    rows: dict[Hashable, list[int]] = {}
    for row, place in enumerate(strange.places):
        rows.setdefault(labels[int(place)], []).append(row)
    plain = {plain_name(label): str(label) for label in model.card.labels}
    found = []
    for label, own in rows.items():
        part = strange.among(np.array(own))
        rejected = np.zeros(len(own), bool) if unknown is None else _rejected(part, unknown)
        counted = tuple(Counter(part.answers[~rejected].tolist()).most_common())
        recognised = None if unknown is None else int(rejected.sum())
        found.append(
            UnknownClass(
                str(label),
                _as_json(label),
                len(own),
                counted,
                float(part.confidences.mean()),
                recognised,
                plain.get(plain_name(label)),
            )
        )
    return tuple(found)


def _as_json(label: Hashable) -> Any:
    try:
        return encode_label(label)
    except ModelError:  # a label that no folder could store; the model is in memory alone
        return str(label)


def _rejected(answers: _Answers, share: float) -> np.ndarray:
    assert answers.typicalities is not None
    return answers.typicalities < share


def _rejection(known: _Answers, strange: _Answers, share: float) -> Rejection:
    rejected = _rejected(known, share)
    accepted = known.among(~rejected)
    return Rejection(
        share=share,
        known_images=len(known.places),
        known_rejected=int(rejected.sum()),
        accepted_accuracy=float((accepted.answers == accepted.truths).mean()) if len(accepted.places) else None,
        unknown_images=len(strange.places),
        unknown_recognised=int(_rejected(strange, share).sum()),
        auroc=classification.auroc(known.typicalities, strange.typicalities),
    )
