"""Teaching the model of a folder: locked while it learns, resumed if it was interrupted, saved at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from efcil import methods
from efcil.activity import between_pieces, doing
from efcil.engine import checkpoint
from efcil.engine.interrupt import StopRequest
from efcil.engine.progress import Progress
from efcil.errors import printable, some
from efcil.files import locked, refuse_full, refuse_unwritable
from efcil.model import broken, copies, defaults, readme
from efcil.model import folder as model_folder
from efcil.model.card import Card, ModelError, Visit, changed_computing, encode_label, made_with, versions
from efcil.model.classes import shared
from efcil.model.estimate import estimate, memory_needed
from efcil.model.images import Pictures
from efcil.model.in_memory import Model
from efcil.model.learning import (
    Keep,
    Unfinished,
    learn,
    needed_bytes,
    of_new_classes,
    refuse_classes,
    refuse_lookalikes,
    refuse_lost,
    stopped_unchanged,
    unfinished_task,
)
from efcil.model.measured import HELD_OUT
from efcil.model.visit_log import VisitLog
from efcil.network.backbones import refuse_unnamed
from efcil.settings import TrainingSettings

#: More images are blended in completely or not at all: there is no checkpoint in between.
_STOPPING_MORE = "Stopping; the model stays unchanged"
_STOPPED_MORE = "Interrupted. The model is unchanged, without these images."


def teach(
    folder: Path,
    pictures: Pictures,
    labels: Sequence[Hashable],
    wanted: Callable[[TrainingSettings], TrainingSettings],
    completed: Callable[[TrainingSettings], TrainingSettings] = lambda settings: settings,
    *,
    model: Model | None = None,
    device: str = "auto",
    more: bool = False,
    discard: bool = False,
    held_out: float | None = None,
    checkpoint_steps: int | None = None,
    quiet: bool = True,
    remarks: Iterable[str] = (),
    repeats: np.ndarray | None = None,
    skip_broken: bool = False,
    reporter: type[Progress] = Progress,
    log: Sequence[str] = (),
) -> Model:
    """Teach the model in `folder` new classes as its next task and, with `more`, more of known ones; return it.

    A folder without a model gets `model`, or a new one. `wanted` receives the settings of the model, or those that an
    interrupted task started with, and returns those to learn with; `completed` then chooses network and method of a new
    model where none is named. An interrupted task is resumed when the same images are given again; `discard` discards
    it. `held_out` is the share of images that are not learned from but measure the result; None chooses. `skip_broken`
    leaves out images that cannot be read. `log` names trackers that the epochs are logged to.
    """
    model_folder.refuse_run(folder)
    words = (_STOPPING_MORE, _STOPPED_MORE) if more else ()
    with _made_for_use(folder), locked(folder / ".lock"), StopRequest(*words) as stop, _stoppable(stop):
        refuse_lost(folder)
        with reporter(1, quiet=quiet) as progress:
            with doing("opening the model"):
                model = _opened(folder, pictures, labels, wanted, completed, model, device, discard)
                before = model_folder.described(folder)
            progress.tasks = len(model.card.task_sizes) + 1
            if held_out is None and not discard and (begun := unfinished_task(folder)) is not None:
                held_out = begun.held_out
            refuse_full(folder, needed_bytes(model))
            said = (*_beside(folder, model), *_computed_otherwise(model), *_made_of(model), *_outlook(model, labels))
            for line in (*remarks, *said):
                progress.say(line)
            keep = Keep(folder / model_folder.PARTIAL, stop, checkpoint_steps, progress.say, discard)
            refuse_classes(model, labels, more=more, keep=keep)  # before many images are decoded
            again = _perhaps_again(model.card, labels) if more else ()
            for line in (*again, *_traces(model, labels), *memory_needed(model.card, len(pictures))):
                progress.say(line)
            if skip_broken:
                found = broken.intact(pictures, labels, model.card.image_size)
                broken.report(found, progress.say)
                pixels, labels, pictures = found.pixels, found.labels, pictures.chosen(found.places)
                repeats = None if repeats is None else repeats[found.places]
            else:
                pixels = pictures.pixels(model.card.image_size)
            for line in copies.remarks(pixels, labels, pictures.items):
                progress.say(printable(line))
            _say_how_long(model, pixels, int(of_new_classes(model, labels).sum()), progress)
            with _logged(VisitLog(log, folder, progress.say), model) as visit:
                options: dict[str, Any] = {"progress": progress, "keep": keep, "repeats": repeats, "log": visit}
                options["items"] = pictures.items
                learn(model, pixels, labels, more=more, held_out=held_out, **options)
            with doing("saving the model"):
                model_folder.write(folder, model.card, model.tensors())
            checkpoint.remove(folder / model_folder.PARTIAL)
            readme.renew(folder, before, model.card)
    return model


def _stoppable(stop: StopRequest) -> contextlib.AbstractContextManager[None]:
    """Let a request to stop end what leaves the model as it is: all but training."""

    def check() -> None:
        if stop.requested:
            raise stopped_unchanged()

    return between_pieces(check)


def _say_how_long(model: Model, pixels: np.ndarray, fresh: int, progress: Progress) -> None:
    with doing("estimating the time"):
        seconds, line = estimate(model, pixels, fresh)
    progress.say(line)
    progress.expect(seconds)


def _outlook(model: Model, labels: Sequence[Hashable]) -> Iterator[str]:
    """Yield what will be kept of all classes, if that is much."""
    card = model.card
    size = model_folder.backbone(card).feature_size
    memory = methods.get(card.settings.method).remembers(card.resolved.method, size)
    if memory is not None and (line := memory.outlook(len(set(card.labels) | set(labels)))) is not None:
        yield line


@contextlib.contextmanager
def _logged(visit: VisitLog, model: Model) -> Iterator[VisitLog]:
    """Close the log of a visit, however it ends."""
    ended = False
    try:
        yield visit
        ended = True
    finally:
        with doing("logging what is left"):
            visit.end(model.card if ended else None)


def _opened(
    folder: Path,
    pictures: Pictures,
    labels: Sequence[Hashable],
    wanted: Callable[[TrainingSettings], TrainingSettings],
    completed: Callable[[TrainingSettings], TrainingSettings],
    model: Model | None,
    device: str,
    discard: bool,
) -> Model:
    """Return the model to teach: that of the folder, the given one, or a new one, with the wanted settings."""
    begun = None if discard else unfinished_task(folder)
    if model_folder.exists(folder):
        found = Model.load(folder, device)
        if model is not None and not _same(model, found):
            raise ModelError(f"{folder} holds another model, or another state of this one. Choose another folder.")
        model = found
        checkpoint.tidy(folder, model_folder.STEM)
        finished = begun is not None and begun.led_to(model.card)
        if (begun is None or finished) and not discard:
            # A process that finished its task may have been killed before it could remove this.
            checkpoint.remove(folder / model_folder.PARTIAL)
        if begun is not None and finished:
            _refuse_again(begun, model, labels)
            begun = None
    elif model is None:
        if begun is not None:
            refuse_unnamed(begun.card.settings.network, wanted(TrainingSettings()).network)
            return Model.create(wanted(begun.card.settings), begun.card.image_size)
        return Model.create(completed(wanted(TrainingSettings(classifier="auto"))), pictures.natural_size())
    if begun is not None and begun.card.visits != model.card.visits:
        raise ModelError(
            f"The unfinished task in {folder / model_folder.PARTIAL} ({some(begun.classes)}) was started from another "
            "model, or from another state of this one. Put that one back to finish it, or discard the unfinished task: "
            "with --discard, or by removing that folder."
        )
    if not model_folder.exists(folder):
        # A task that is interrupted can be resumed only if what it begins from is there.
        model_folder.write(folder, model.card, model.tensors())
    model.change(wanted(model.card.settings if begun is None else begun.card.settings))
    refuse_lookalikes(model, labels)
    return model


def _refuse_again(finished: Unfinished, model: Model, labels: Sequence[Hashable]) -> None:
    """Refuse images that came with a task that is finished: those of known classes would count twice."""
    given = [encode_label(label) for label in dict.fromkeys(labels)]
    if model.card.visits[-1].kind == "more" and any(each in finished.classes for each in given):
        raise ModelError(
            f"The command that was interrupted had learned all of its images already: the model knows "
            f"{some(finished.classes)} now. There is nothing left to do."
        )


def _same(first: Model, second: Model) -> bool:
    """Say whether two models are in the same state: equal visits may have been made to different models."""
    visits, labels = ([getattr(each.card, name) for each in (first, second)] for name in ("visits", "labels"))
    digests = [checkpoint.digest(each.tensors()) for each in (first, second)]
    return all(one == other for one, other in (visits, labels, digests))


@contextlib.contextmanager
def _made_for_use(folder: Path) -> Iterator[None]:
    """Create the folder of a model, and remove it again if it stays empty."""
    new = not folder.exists()
    refuse_unwritable(folder, 0)
    try:
        yield
    finally:
        if new:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _computed_otherwise(model: Model) -> Iterator[str]:
    """Say in what the last visit was computed in another way; other versions were said when the model was loaded."""
    before, now = model.card.last_made_with, made_with(model.execution, deterministic=False)
    known = {name: value for name, value in now.items() if name in before and name not in versions()}
    if changed := changed_computing({name: before[name] for name in known}, known):
        yield f"The model was last trained differently: {changed}."


def _perhaps_again(card: Card, labels: Sequence[Hashable]) -> Iterator[str]:
    """Say that the last visit may have had the same images: no trace of a single one is kept that would tell."""
    if not set(labels) <= set(card.labels):
        return
    # One command with new and known classes makes two visits.
    last = card.visits[-2:] if [each.kind for each in card.visits[-2:]] == ["task", "more"] else card.visits[-1:]
    given = (len(set(labels)), len(labels))
    for visits in (last, last[-1:]):
        seen = sum(each.classes for each in visits), sum(_seen(each) for each in visits)
        if visits[0].kind in ("task", "more") and seen == given:
            yield (
                f"The last visit, {visits[-1].date[:10]} {visits[-1].date[11:16]}, had as many images and classes. If "
                "they are the same images, stop now: learned twice, they count twice"
            )
            return


def _traces(model: Model, labels: Sequence[Hashable]) -> Iterator[str]:
    """Say that new classes may have been known before: no name of a forgotten one is kept that would tell."""
    forgotten = any(visit.kind == "forget" for visit in model.card.visits)
    if forgotten and of_new_classes(model, labels).any() and (left := shared(model)):
        yield (
            f"Classes were forgotten, and what all classes share ({', '.join(left)}) may have traces of their images. "
            "If these are the same images, the accuracy on held-out images is too good"
        )


def _seen(visit: Visit) -> int:
    """Return how many images a visit was given, those that were held out among them."""
    found = visit.measured
    return visit.images + (found.images if found is not None and found.way == HELD_OUT else 0)


def _made_of(model: Model) -> Iterator[str]:
    """Say what network the model has, and, of a new one, where its weights come from or could come from."""
    card, size = model.card, model.card.image_size
    yield f"{size} x {size} pixels, {card.resolved.network}, method {card.settings.method}, on {model.execution.device}"
    if card.visits:
        return
    if card.pretrained is not None:
        yield f"the network is {card.pretrained.sentence}"
    elif (advice := defaults.remark(card.settings)) is not None:
        yield advice


def _beside(folder: Path, model: Model) -> Iterator[str]:
    """Say what is in the folder of a new model but not part of it."""
    own = {".lock", model_folder.PARTIAL, *(file.name for file in checkpoint.orphans(folder, model_folder.STEM))}
    others = sorted(path.name for path in folder.iterdir() if path.name not in own)
    if others and not model.card.visits:
        yield (
            f"{folder} also holds {some(others)}. `efcil audit` fails if there are files that are not part of the "
            "model; give the model its own folder."
        )
