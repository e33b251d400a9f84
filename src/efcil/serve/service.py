"""What a server does, without HTTP: predicts, teaches, describes its model."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from efcil.engine import checkpoint
from efcil.errors import DataError, EfcilError, some
from efcil.files import locked
from efcil.model import classes
from efcil.model import folder as model_folder
from efcil.model.card import Visit, decode_label, encode_label
from efcil.model.in_memory import Model
from efcil.model.learning import unfinished_task
from efcil.serve import note
from efcil.serve.batching import Answered, Batcher, Outdated
from efcil.serve.jobs import Job, Jobs
from efcil.serve.keeper import Keeper, Loaded
from efcil.serve.metrics import Metrics
from efcil.serve.names import class_name, refuse_twin, shown_file, shown_label
from efcil.serve.options import ServeOptions
from efcil.serve.refusal import Refused
from efcil.serve.uploads import Budget, Part, decoded

#: Images of a teaching that are decoded at the same time.
_AT_A_TIME = 8
#: What is said of a measurement; the rest is for calibration.
MEASURED = ("way", "right", "images", "among")


@dataclass(frozen=True)
class Upload:
    """An image as it was sent, and the words that name it in a sentence."""

    content: bytes
    where: str


class Service:
    """A model in use, the worker that asks it, and the teachings that change it."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.metrics = Metrics()
        self.keeper = Keeper(options.folder, options.device, self.metrics.swaps.add)
        self.keeper.start()
        self.batcher = Batcher(lambda: self.keeper.current, options.limits.queue, self.metrics)
        self.jobs = Jobs(options, self.keeper, self.metrics)
        self.closing = asyncio.Event()
        self.budget = Budget(options.limits.held_bytes)
        self._receiving = False
        self._decoders = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="efcil-decode")
        self.metrics.ask("efcil_queue_images", "images that wait to be scored", lambda: self.batcher.waiting)
        self.metrics.ask("efcil_teaching", "1 while the model learns", lambda: self.jobs.running is not None)
        self.metrics.ask("efcil_classes", "classes that the model knows", lambda: len(self.labels))
        self.metrics.ask("efcil_ready", "1 if the model can be asked", lambda: self.keeper.current is not None)

    def close(self) -> None:
        """Save what is being learned, answer what waits, and end."""
        self.jobs.close()
        self.keeper.close()
        self.batcher.close()
        self._decoders.shutdown(cancel_futures=True)

    @property
    def labels(self) -> list[Hashable]:
        """The labels of the model in use."""
        return [] if self.keeper.current is None else self.keeper.current.model.card.labels

    def loaded(self) -> Loaded:
        """Return the model in use; refuse where there is none."""
        if self.keeper.current is None:
            raise Refused(409, "The model has not learned any class yet. Teach it its first classes.")
        return self.keeper.current

    # -- asking ------------------------------------------------------------------------------------------------------

    async def predict(self, uploads: Sequence[Upload], top: int, share: float) -> dict[str, Any]:
        """Return the likeliest classes of every image; a broken one gets a sentence instead."""
        while True:
            size = self.loaded().model.card.image_size
            found = await asyncio.gather(*(self._decode(each, size) for each in uploads), return_exceptions=True)
            intact = [pixels for pixels in found if isinstance(pixels, np.ndarray)]
            for failure in found:
                if isinstance(failure, BaseException) and not isinstance(failure, DataError):
                    raise failure
            if not intact:
                raise Refused(422, " ".join(str(failure) for failure in found[:3]))
            try:
                answered = await asyncio.wrap_future(self.batcher.submit(np.stack(intact)))
            except Outdated:
                continue  # another model has taken over meanwhile, for images of another size
            rows = iter(_rows(answered, top, share))
            return {
                "version": answered.loaded.version,
                "predictions": [next(rows) if isinstance(each, np.ndarray) else {"error": str(each)} for each in found],
            }

    async def _decode(self, upload: Upload, size: int | None) -> np.ndarray:
        task = self._decoders.submit(decoded, upload.content, upload.where, size, self.options.limits)
        return await asyncio.wrap_future(task)

    # -- teaching ----------------------------------------------------------------------------------------------------

    async def teach(self, parts: AsyncIterator[Part]) -> Job:
        """Begin a teaching from a form: a field `class` names the class of the images after it."""
        self.jobs.refuse_second()
        self._refuse_foreign()
        if self.keeper.problem is not None:  # where the model is gone, another one would take the place of that in use
            raise Refused(409, self.keeper.problem)
        if self._receiving:
            raise Refused(409, "Pictures of another teaching are arriving. Wait until that has ended.")
        self._receiving = True
        try:
            return self._begin(*await self._received(parts))
        finally:
            self._receiving = False

    async def _received(self, parts: AsyncIterator[Part]) -> tuple[list[tuple[str, np.ndarray]], bool]:
        """Return the images of a form with their classes, and whether an unfinished task is to be discarded.

        Images are decoded while the next ones arrive; no more of them is kept than the network will see.
        """
        size = None if self.keeper.current is None else self.keeper.current.model.card.image_size
        running: set[asyncio.Task[None]] = set()
        gathered: list[tuple[str, np.ndarray]] = []
        broken: list[str] = []
        name, discard, number = None, False, 0

        async def prepare(label: str, upload: Upload) -> None:
            try:
                gathered.append((label, await self._decode(upload, size)))
            except DataError as error:
                broken.append(str(error))

        try:
            async for part in parts:
                if part.is_file:
                    number += 1
                    if name is None:
                        raise Refused(
                            400, "A picture comes before the name of its class. Send the field `class` first."
                        )
                    running.add(asyncio.create_task(prepare(name, Upload(part.content, shown_file(part.file, number)))))
                    if len(running) >= _AT_A_TIME:
                        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                        for task in done:
                            task.result()
                elif part.field == "class":
                    name = class_name(part.text)
                elif part.field == "discard":
                    discard = part.text.strip().lower() in ("true", "1", "yes", "on")
                else:
                    raise Refused(
                        400, f"The form has an unknown field {part.field[:40]!r}. Send class, image, discard."
                    )
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
        if broken:
            raise Refused(422, f"{some(broken, 3)} Nothing has been learned; leave these pictures out.")
        return gathered, discard

    def _begin(self, gathered: list[tuple[str, np.ndarray]], discard: bool) -> Job:
        if not gathered:
            raise Refused(400, "There is no picture to learn from. Send at least two of every class.")
        # In an order of their own, so that the same pictures resume a task in whatever order they are sent again.
        gathered.sort(key=lambda pair: (pair[0], hashlib.sha256(pair[1].tobytes()).digest()))
        names, known = list(dict.fromkeys(name for name, _ in gathered)), set(self.labels)
        for name in names:
            refuse_twin(name, known)
        new, old = ([name for name in names if (name in known) is there] for there in (False, True))
        current = self.keeper.current
        if old and current is not None and not _learns_more(current):
            raise Refused(
                409,
                f"The model knows {some(old)} already, and its method ({current.model.card.settings.method}) cannot "
                "learn more pictures of a known class.",
            )
        if not known and len(names) < 2:
            raise Refused(409, "The first teaching needs at least two classes: one alone cannot be told from anything.")
        labels = [name for name, _ in gathered]
        if new and sum(map(labels.count, new)) < 2:
            raise Refused(400, "One picture is too few to learn a class from. Send at least two.")
        if not discard:
            self._refuse_unfinished(new or names)
        kind = "both" if new and old else "task" if new else "more"
        return self.jobs.start(labels, [pixels for _, pixels in gathered], kind=kind, discard=discard)

    def _refuse_foreign(self) -> None:
        try:
            model_folder.refuse_run(self.options.folder)
        except EfcilError as error:
            raise Refused(409, str(error)) from None

    def _refuse_unfinished(self, names: list[str]) -> None:
        begun = self.unfinished()
        if begun is not None and begun["saved"] and begun["classes"] != sorted(names):
            raise Refused(
                409,
                f"A task that learns {some(begun['classes'])} is unfinished. Send its pictures again to resume it, or "
                "discard it first.",
            )

    def unfinished(self) -> dict[str, Any] | None:
        """Return the teaching that was interrupted, None where there is none.

        `saved` says whether a checkpoint is there to resume from; else it starts over.
        """
        if self.jobs.running is not None:
            return None
        folder, current = self.options.folder, self.keeper.current
        try:
            task = unfinished_task(folder)
        except EfcilError as error:
            return {"classes": [], "saved": True, "problem": str(error)}
        if task is not None and (current is None or not task.led_to(current.model.card)):
            names = sorted(shown_label(decode_label(each)) for each in task.classes)
            return {"classes": names, "saved": True, "problem": None}
        begun = note.read(folder)
        if begun is None:
            return None
        if begun.version != (None if current is None else current.version):
            note.remove(folder)  # it was finished, or the model has been taught elsewhere since
            return None
        return {"classes": sorted(begun.classes), "saved": False, "problem": None}

    def discard(self) -> None:
        """Discard the unfinished teaching."""
        self.jobs.refuse_second()
        with locked(self.options.folder / ".lock"):
            checkpoint.remove(self.options.folder / model_folder.PARTIAL)
        note.remove(self.options.folder)

    # -- changing classes --------------------------------------------------------------------------------------------

    def rename(self, name: str, to: str) -> None:
        """Give a class another name."""
        to = class_name(to)
        self._change(lambda model: classes.rename(model, classes.find(model, [name])[0], to))

    def forget(self, names: Sequence[str]) -> None:
        """Remove all that is stored about these classes alone."""
        self._change(lambda model: classes.forget(model, classes.find(model, names)))

    def merge(self, names: Sequence[str], into: str) -> None:
        """Make several classes one."""
        into = class_name(into)

        def change(model: Model) -> None:
            labels = classes.find(model, names)
            same = [label for label in labels if str(label) == into]
            classes.merge(model, labels, same[0] if same else into)

        self._change(change)

    def _change(self, change: Callable[[Model], object]) -> None:
        """Change the model in its folder, and use what has come of it."""
        self.loaded()
        self.jobs.refuse_second()
        classes.in_folder(self.options.folder, change, self.options.device)
        self.keeper.refresh()

    # -- describing --------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return what there is to know of the model and of this server."""
        current, running, limits = self.keeper.current, self.jobs.running, self.options.limits
        facts: dict[str, Any] = {
            "name": self.options.folder.resolve().name,
            "ready": current is not None,
            "keeps_images": False,
            "problem": self.keeper.problem,
            "unfinished": self.unfinished(),
            "teaching": None if running is None else running.id,
            "unknown_below": self.options.unknown,
            "limits": {
                "upload_bytes": limits.upload_bytes,
                "pixels": limits.pixels,
                "images": limits.images,
                "request_bytes": limits.request_bytes,
                "teaching_images": limits.teaching_images,
            },
        }
        return facts | (_nothing() if current is None else _of(current))

    def classes(self) -> dict[str, Any]:
        """Return what the model knows."""
        current = self.keeper.current
        if current is None:
            return {"version": None, "classes": []}
        return {
            "version": current.version,
            "classes": [
                {
                    "name": shown_label(each.label),
                    "label": encode_label(each.label),
                    "task": each.task + 1,
                    "images": each.images,
                    "learned": each.learned,
                    "measured": each.measured,
                    "right": each.right,
                }
                for each in current.model.card.classes
            ],
        }


def _rows(answered: Answered, top: int, share: float) -> list[dict[str, Any]]:
    labels = [shown_label(label) for label in answered.loaded.model.card.labels]
    typicality = answered.scored.typicality
    rows = []
    for number, row in enumerate(answered.scored.probabilities):
        order = np.argsort(-row, kind="stable")[:top]
        typical = None if typicality is None else float(typicality[number])
        rows.append(
            {
                "classes": [{"name": labels[place], "probability": float(row[place])} for place in order],
                "typicality": typical,
                "unknown": None if typical is None else typical < share,
            }
        )
    return rows


def _nothing() -> dict[str, Any]:
    empty: dict[str, Any] = dict.fromkeys(("version", "method", "network", "device", "image_size", "learns_more"))
    return empty | {"classes": 0, "visits": [], "stored": [], "bytes": 0}


def _learns_more(loaded: Loaded) -> bool:
    """Say whether the model can learn more images of classes that it knows."""
    method = loaded.model.ready
    return bool(method.about.learns_more and method.memory.blends)


def _of(loaded: Loaded) -> dict[str, Any]:
    card = loaded.model.card
    return {
        "version": loaded.version,
        "method": card.settings.method,
        "network": card.resolved.network,
        "device": str(loaded.model.execution.device),
        "image_size": card.image_size,
        "learns_more": _learns_more(loaded),
        "classes": len(card.classes),
        "visits": [_visit(each) for each in card.visits],
        "stored": [dataclasses.asdict(each) for each in loaded.stored],
        "bytes": sum(each.bytes for each in loaded.stored),
    }


def _visit(visit: Visit) -> dict[str, Any]:
    """Return a visit, and in `measured` how many of the images that it did not learn from were right."""
    measured = visit.measured
    return {
        **{name: getattr(visit, name) for name in ("kind", "classes", "images", "date")},
        "measured": None if measured is None else {name: getattr(measured, name) for name in MEASURED},
    }
