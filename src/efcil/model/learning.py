"""Teaching a model: a task of new classes, resumed if it was interrupted, or more images of known classes."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from efcil import methods
from efcil.activity import doing
from efcil.engine import checkpoint, hardware
from efcil.engine.checkpoint import Forbidden
from efcil.engine.interrupt import Interrupted, StopRequest
from efcil.engine.lifecycle import Journal, Watch, learn_task, reason
from efcil.engine.progress import Progress
from efcil.engine.trainer import EpochReport, Position
from efcil.errors import EfcilError, some
from efcil.methods.base import Task
from efcil.model import folder as model_folder
from efcil.model.blending import learn_more, refuse_blending
from efcil.model.card import (
    Card,
    LearnedClass,
    ModelError,
    Visit,
    changed_computing,
    encode_label,
    made_with,
    now,
    read_card,
    versions,
)
from efcil.model.copies import named
from efcil.model.folder import PARTIAL, STEM
from efcil.model.images import InputError, plain_name, sorted_classes
from efcil.model.in_memory import Model
from efcil.model.measuring import Measuring, plan, refuse_share, say_in_doubt, trains_network
from efcil.model.visit_log import VisitLog
from efcil.settings import TrainingSettings


@dataclass(frozen=True)
class Keep:
    """Where checkpoints of a task are saved: after every so many steps, every five minutes, and when asked to stop."""

    folder: Path
    stop: StopRequest
    steps: int | None = None
    say: Callable[[str], None] = print
    discard: bool = False  # discard the unfinished task, once the request has been accepted


def learn(
    model: Model,
    pixels: np.ndarray,
    labels: Sequence[Hashable],
    *,
    more: bool = False,
    held_out: float | None = None,
    progress: Progress | None = None,
    keep: Keep | None = None,
    repeats: np.ndarray | None = None,
    log: VisitLog | None = None,
    items: Sequence[Any] | None = None,
) -> None:
    """Teach the model new classes as its next task and, with `more`, improve those of these that it knows.

    The model changes only when everything has succeeded. With `keep`, an interrupted task is resumed when the same
    images are given again. `held_out` is the share of images that measure the result and are not learned from; see
    measuring.py. `repeats` is how many times each image counts (weights.py); the default is once. `log`
    gets the epochs. `items` are the images as they were given, to name single ones.
    """
    refuse_share(held_out)
    refuse_classes(model, labels, more=more, keep=keep)
    _warn_of_unsaveable(sorted_classes(labels))
    model.settle()
    fresh, card, method = of_new_classes(model, labels), model.card, model.method

    def names(wanted: np.ndarray) -> Callable[[int], str]:
        places = np.flatnonzero(wanted)
        return lambda row: named(items, int(places[row]))

    with hardware.switches(model.execution, deterministic=False), model.execution.stream():
        if fresh.any():
            _learn_task(model, *_chosen(fresh, pixels, labels, repeats), held_out, progress, keep, log, names(fresh))
        if not fresh.all():
            assert method is not None
            begun_from = model.card.continues
            try:
                with doing("blending the images in"):
                    known = _chosen(~fresh, pixels, labels, repeats)
                    learn_more(model, *known, held_out != 0.0, names(~fresh), progress)
            except BaseException:
                model.card = card
                model.adopt(method)
                raise
            if fresh.any():  # the state in between is stored nowhere
                model.card = replace(model.card, continues=begun_from)
        model.settle()


def of_new_classes(model: Model, labels: Sequence[Hashable]) -> np.ndarray:
    """Return which images are of classes that the model does not know."""
    present = set(model.card.labels)
    return np.array([label not in present for label in labels], bool)


def _chosen(
    wanted: np.ndarray, pixels: np.ndarray, labels: Sequence[Hashable], repeats: np.ndarray | None
) -> tuple[np.ndarray, Sequence[Hashable], np.ndarray | None]:
    """Return those of the images that are wanted, without a copy if all are."""
    if wanted.all():
        return pixels, labels, repeats
    some_labels = [label for label, want in zip(labels, wanted, strict=True) if want]
    return pixels[wanted], some_labels, None if repeats is None else repeats[wanted]


def refuse_classes(model: Model, labels: Sequence[Hashable], *, more: bool, keep: Keep | None) -> None:
    """Refuse classes that the model cannot learn now; their images need not be read for that."""
    if methods.get(model.card.settings.method).traits(model.card.resolved.method).images == "all":
        raise ModelError(f"Method {model.card.settings.method} does not learn task by task. Start another model.")
    fresh = of_new_classes(model, labels)
    given, present = sorted_classes(labels), set(model.card.labels)
    known, new = [label for label in given if label in present], [label for label in given if label not in present]
    resumable = keep is not None and not keep.discard and checkpoint.exists(keep.folder)
    if more and not new and resumable:
        raise ModelError(
            "The model has an unfinished task of new classes. Repeat the interrupted command to "
            "resume it, or add --discard to discard it."
        )
    if known and new and not more:
        raise ModelError(
            f"The model knows {some(known)} already, but does not know {some(new)}. If these are more images of known "
            "classes beside new classes, say so: more=True in Python, --more on the command line."
        )
    if more and not known:
        raise ModelError(
            f"The model does not know {some(new)}, so it cannot learn more images of it. Learn new classes first, "
            "without more=True (--more)."
        )
    if known and not more:
        raise ModelError(
            f"The model knows {some(known)} already. New classes must have new names; if these are more images of "
            "known classes, say so: more=True in Python, --more on the command line."
        )
    if known:
        refuse_blending(model)
    if new and int(fresh.sum()) < 2:
        raise InputError("A task of 1 image (n_samples = 1) cannot be learned. Give at least two.")


def refuse_lookalikes(model: Model, labels: Sequence[Hashable]) -> None:
    """Refuse names of folders that differ from a known class only in case or outer spaces."""
    present, known = set(model.card.labels), {plain_name(label): label for label in model.card.labels}
    for label in dict.fromkeys(labels):
        twin = known.get(plain_name(label))
        if twin is None or label in present:
            continue
        if not isinstance(twin, str):
            raise ModelError(
                f"The model's label {twin!r} is not text but of type {type(twin).__name__}, and names of folders are "
                "text. Teach such a model from Python, where labels can have any type: "
                "IncrementalClassifier.load, then partial_fit."
            )
        raise ModelError(
            f"The class {str(label)!r} is new, but differs from {str(twin)!r}, which the model "
            "knows, only in upper and lower case or in outer spaces. If it is the same class, rename its folder "
            "and add --more; if it is another one, give it a clearly different name."
        )


def needed_bytes(model: Model) -> int:
    """Return about how many bytes the next task needs: the model and, if it trains, checkpoints, old and new ones."""
    kept = (
        0 if model.method is None else sum(value.numel() * value.element_size() for value in model.tensors().values())
    )
    size = max(kept, model_folder.backbone(model.card).bytes())
    # A checkpoint also has the optimiser's two moments.
    trains = trains_network(model.card, len(model.card.task_sizes))
    return 2 * (size + 3 * size * trains) + (4 << 20)


@dataclass(frozen=True)
class Unfinished:
    """A task that was interrupted: the card it began with, its classes, and the tensors it continues from."""

    card: Card
    classes: list[Any]
    continues: str | None
    held_out: float | None

    def led_to(self, card: Card) -> bool:
        """Say whether a model is what has come of this task: its process was killed before it could tidy up."""
        last = [encode_label(each.label) for each in card.classes if each.task == len(card.task_sizes) - 1]
        begun = card.visits[: len(self.card.visits)]  # more images of known classes may have come with the task
        return (self.card.visits, self.classes, self.continues) == (begun, last, card.continues)


def unfinished_task(folder: Path) -> Unfinished | None:
    """Return the unfinished task of a model folder, None where there is none."""
    partial = folder / PARTIAL
    if not checkpoint.exists(partial):
        return None
    try:
        task = checkpoint.facts_of(partial)["task"]
        held_out = (_ALL_LEARNED | task)["held_out"]
        refuse_share(held_out)
        return Unfinished(read_card(task["card"]), task["classes"], task.get("continues"), held_out)
    except Forbidden:
        raise
    except (EfcilError, KeyError, TypeError) as error:
        raise ModelError(
            f"The unfinished task in {partial} cannot be resumed ({reason(error)}), and the settings that it "
            "started with are lost. Give them again with --discard to start it over."
        ) from None


def refuse_lost(folder: Path) -> None:
    """Refuse a folder that has parts of a model but not its model.json: a new model would replace them."""
    if checkpoint.exists(folder, STEM):
        return
    try:
        begun = unfinished_task(folder)
    except EfcilError:
        begun = None
    later = begun is not None and begun.card.visits
    # A process killed while it saves its first task leaves tensors, too; resuming writes them again.
    parts = [file.name for file in checkpoint.orphans(folder, STEM) if begun is None or later] + [PARTIAL] * bool(later)
    if parts:
        raise ModelError(
            f"{folder} has parts of a model ({', '.join(parts)}), but no {STEM}.json that describes them. Restore "
            f"{STEM}.json from a copy, or choose another folder; if these parts are not needed, remove them."
        )


def stopped_unchanged(again: str = "the same command again") -> Interrupted:
    """Return what is raised when a visit was stopped and nothing of it had to be saved."""
    return Interrupted(f"Stopped. The model is unchanged, without these images. To learn them, run {again}.")


# -- a task of new classes -------------------------------------------------------------------------------------------


def _learn_task(
    model: Model,
    pixels: np.ndarray,
    labels: Sequence[Hashable],
    repeats: np.ndarray | None,
    held_out: float | None,
    progress: Progress | None,
    keep: Keep | None,
    log: VisitLog | None,
    name_of: Callable[[int], str],
) -> None:
    new = sorted_classes(labels)
    card, resolved = model.card, model.card.resolved
    index, first_class = len(card.task_sizes), len(card.classes)
    place = {label: first_class + number for number, label in enumerate(new)}
    numbers = np.array([place[label] for label in labels], np.int64)
    recipe = resolved.first_task if index == 0 else resolved.later
    chosen = plan(card, new, numbers - first_class, held_out)
    origin = _Origin(model, new, pixels, labels, held_out, keep, repeats)
    task = Task(index, first_class, len(new), card.settings.seed, recipe.batch_size)
    measuring = Measuring(model, chosen, task, repeats)
    beginner = measuring.beginner()
    data = model.task_images(pixels, numbers, f"task{index}", chosen.learned, repeats)
    journal = None if keep is None else origin.journal(keep)  # last: it may discard an unfinished task
    watch = _watch(card, progress, log)
    learner = learn_task(measuring.blueprint, beginner, task, data, recipe, journal=journal, watch=watch)
    del data, beginner
    with nullcontext() if journal is None else journal.ending():
        outcome = measuring.outcome(pixels, numbers, learner)
    say_in_doubt(progress, [*card.labels, *new], outcome.answered, name_of)
    date = now()
    counts = np.bincount(numbers[chosen.learned] - first_class, minlength=len(new))
    learned = tuple(
        LearnedClass(name, index, int(n), date, int(tried), int(right))
        for name, n, tried, right in zip(new, counts, outcome.images, outcome.right, strict=True)
    )
    visit = Visit("task", len(new), len(chosen.learned), date, tuple(origin.made_with), outcome.measured)
    continues = origin.continues
    model.adopt(learner)
    model.card = replace(
        card,
        settings=_without_path(card.settings),
        classes=card.classes + learned,
        visits=(*card.visits, visit),
        continues=continues,
        experiment=None,
    )


def _watch(card: Card, progress: Progress | None, log: VisitLog | None) -> Watch:
    """Return who hears of the epochs of a visit."""

    def begin(epochs: int, done: int) -> None:
        if progress is not None:
            progress.begin_task(len(card.task_sizes), epochs, done)
        if log is not None:
            log.begin(card, done)

    def epoch(report: EpochReport) -> None:
        if progress is not None:
            progress.epoch(report)
        if log is not None:
            log.epoch(report)

    return Watch(begin, epoch)


#: What a checkpoint of a version says that held out no images.
_ALL_LEARNED: dict[str, Any] = {"held_out": 0.0}


def _without_path(settings: TrainingSettings) -> TrainingSettings:
    """Return settings that name a file of weights without its folder: the model has the weights, and may be shared."""
    return settings if settings.weights is None else replace(settings, weights=Path(settings.weights).name)


class _Origin:
    """What identifies a task: the model it started from, its classes and images, and how it is computed."""

    def __init__(
        self,
        model: Model,
        new: list[Hashable],
        pixels: np.ndarray,
        labels: Sequence[Hashable],
        held_out: float | None,
        keep: Keep | None,
        repeats: np.ndarray | None = None,
    ) -> None:
        self.made_with = [made_with(model.execution, deterministic=False)]
        self.number = len(model.card.task_sizes) + 1
        self.continues = None if model.method is None else checkpoint.digest(model.tensors())
        self.say = print if keep is None else keep.say
        self.task: dict[str, Any] = {}
        if keep is None:
            return
        order = {label: number for number, label in enumerate(new)}
        digest = hashlib.sha256(np.array([order[label] for label in labels], np.int64).tobytes())
        digest.update(np.ascontiguousarray(pixels).data)
        if repeats is not None:
            digest.update(np.ascontiguousarray(repeats).data)
        task = {
            "card": model.card.to_json(),
            "classes": [encode_label(label) for label in new],
            "images": digest.hexdigest(),
            "continues": self.continues,
            "held_out": held_out,
        }
        self.task = json.loads(json.dumps(task))  # as it will be read back: tuples are lists by then

    def journal(self, keep: Keep) -> Journal:
        """Return where checkpoints within the task are saved, and how the task resumes from them."""
        same = "the same command again, without --discard" if keep.discard else "the same command again"
        if keep.discard:
            checkpoint.remove(keep.folder)

        def stopped(position: Position | None) -> Interrupted:
            if position is None:
                return stopped_unchanged(same)
            return Interrupted(
                f"Stopped {position.place}; that state is saved in {keep.folder}. To resume, run {same}."
            )

        return Journal(
            keep.folder,
            keep.stop,
            facts=lambda: {"task": self.task, "made_with": self.made_with},
            accepts=self._accepts,
            resumed=self._resumed,
            stopped=stopped,
            say=keep.say,
            task=self.number,
            steps=keep.steps,
        )

    def _accepts(self, facts: Mapping[str, Any]) -> bool:
        """Say whether a saved checkpoint is of this very task; one of another task is not thrown away."""
        task = _ALL_LEARNED | facts["task"] | {"card": _as_written_now(facts["task"]["card"])}
        if task["card"]["visits"] != self.task["card"]["visits"]:
            return False  # that task was finished, but the process was killed before it could remove the checkpoint
        before, now = facts["made_with"][-1], self.made_with[-1]
        if any(before.get(name) != now[name] for name in versions()):
            # It starts over anyway, and another version may decode the same images to other pixels.
            task = {**task, "images": self.task["images"]}
        if task != self.task:
            raise ModelError(self._other(task))
        # Another number of threads changes only the last bits; no work is lost.
        changed = changed_computing(*({**each, "threads": None} for each in (before, now)))
        if changed:
            self.say(f"The task was started with {changed}; it starts over.")
        return not changed

    def _resumed(self, facts: Mapping[str, Any]) -> None:
        earlier = [each for each in facts["made_with"] if each != self.made_with[-1]]
        if earlier:
            threads = (earlier[-1].get("threads"), self.made_with[-1].get("threads"))
            self.say(f"The task was started with {threads[0]} threads and is resumed with {threads[1]}.")
        self.made_with = [*earlier, *self.made_with]

    def _other(self, task: dict[str, Any]) -> str:
        names = some(task["classes"])
        if task["classes"] != self.task["classes"]:
            different = "other classes"
        elif task["continues"] != self.task["continues"]:
            different = "another model to start from"
        elif task["held_out"] != self.task["held_out"]:
            different = "another share of held-out images (--held-out)"
        elif task["card"] == self.task["card"]:
            different = "other images"
        else:  # with another size, all images differ
            different = "other settings" + _differences(task["card"], self.task["card"])
        return (
            f"The model has an unfinished task that learns {names}, but this command has {different}. Repeat the "
            "interrupted command to resume the task, or add --discard to discard it."
        )


def _differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Name the settings in which two cards differ, with both values."""
    old, new = _plain_settings(before), _plain_settings(now)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    shown = [f"{name} is {_value(new.get(name))}, was {_value(old.get(name))}" for name in names]
    return f" ({some(shown)})" if shown else ""


def _plain_settings(card: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a written card, with the values chosen for those that were left open."""
    settings = {name: value for name, value in card["settings"].items() if name != "overrides"}
    settled = {name: card["resolved"][name] for name in ("network", "augmentation")}
    return settings | settled | {"image_size": card["image_size"]} | card["settings"]["overrides"]


def _value(value: Any) -> str:
    return "not set" if value is None else str(value)


def _as_written_now(card: dict[str, Any]) -> dict[str, Any]:
    """Return a saved card as this version would write it: settings may have been added since."""
    return json.loads(json.dumps(read_card(card).to_json()))


def _warn_of_unsaveable(labels: list[Hashable]) -> None:
    """Warn, before learning, about labels that cannot be saved."""
    try:
        for label in labels:
            encode_label(label)
    except ModelError as error:
        warnings.warn(f"{error} The model works in memory, but cannot be saved.", stacklevel=4)
