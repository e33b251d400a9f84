"""`efcil learn`: teach a model the classes of a folder, as its first or its next task."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

from efcil.commands.parser import add_checkpoint_steps, add_debug, add_option
from efcil.errors import printable, some
from efcil.settings import Settings, options

DESCRIPTION = """\
Teach a model the classes of a folder that has one sub-folder of images per class. MODEL is a folder; it is made if it
does not exist, and otherwise learns the classes as its next task, without any image of the earlier ones.

An interrupted command goes on where it was when it is given again; settings need not be repeated.
"""
#: The settings a model can be begun with. Those after the first line may change from visit to visit.
SETTINGS = (
    "method", "seed", "image_size", "network", "augmentation",
    "epochs", "first_task_epochs", "batch_size", "classifier", "device", "precision", "overrides",
)  # fmt: skip
#: More images are blended in at once or not at all: there is no middle to save.
_STOPPING_MORE = "Stopping; the model stays as it was"
_STOPPED_MORE = "Interrupted. The model is as it was, without these images."


def add_parser(subparsers: Any) -> None:
    """Add the command, its flags made from the fields of Settings."""
    parser = subparsers.add_parser(
        "learn",
        help="teach a model the classes of a folder",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the model")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="one sub-folder of images per class")
    parser.add_argument(
        "--more",
        action="store_true",
        help="these are more images of classes the model knows: blend them into what it keeps of these classes",
    )
    parser.add_argument("--discard", action="store_true", help="throw away a task that was interrupted")
    parser.add_argument("--preset", metavar="DATASET", help="dataset whose recipes are followed (default: folder)")
    known = options(Settings)
    for name in SETTINGS:
        # One model is learned here, not a grid.
        single = known[name] if name == "overrides" else dataclasses.replace(known[name], nargs=None)
        if name == "classifier":
            single = dataclasses.replace(single, default="auto")  # in the help: `run` has another
        add_option(parser, single)
    add_checkpoint_steps(parser)
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    add_debug(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Learn the folder, and save the model."""
    from efcil.engine import checkpoint
    from efcil.engine.interrupt import StopRequest
    from efcil.engine.progress import Progress
    from efcil.files import locked, refuse_full
    from efcil.model import ModelError, format
    from efcil.model.images import gather_labelled
    from efcil.model.learning import (
        Keep,
        discard,
        learn,
        needed_bytes,
        refuse_lookalikes,
        refuse_lost,
        unfinished_task,
    )
    from efcil.model.model import Model

    folder: Path = arguments.model.expanduser()
    pictures, labels = gather_labelled(arguments.data)
    if format.is_run(folder):
        raise ModelError(f"{folder} is the model of an experiment, which stays as it is. Learn in a folder of its own.")
    words = (_STOPPING_MORE, _STOPPED_MORE) if arguments.more else ()
    with _made_for_use(folder), locked(folder / ".lock"), StopRequest(*words) as stop:
        refuse_lost(folder)
        begun = None if arguments.discard else unfinished_task(folder)
        if format.exists(folder):
            model = Model.load(folder, getattr(arguments, "device", "auto"))
            checkpoint.tidy(folder, format.STEM)
            finished = begun is not None and begun.visits == model.card.visits[:-1]
            if finished or (begun is None and not arguments.discard):
                discard(folder)  # a process that finished its task was killed before it could do this, or all of it
            if begun is None or begun.visits != model.card.visits:
                begun = model.card
            model.change(_wanted(arguments, begun.settings))
            refuse_lookalikes(model, labels)
        else:
            start = Settings(dataset="folder", classifier="auto") if begun is None else begun.settings
            settings = _wanted(arguments, start)
            natural = pictures.natural_size() if begun is None else begun.image_size
            model = Model.create(settings, settings.image_size or natural)
        refuse_full(folder, needed_bytes(model))
        tasks = len(model.card.task_sizes) + 1
        with Progress(tasks, quiet=arguments.quiet) as progress:
            keep = Keep(folder / format.PARTIAL, stop, arguments.checkpoint_steps, progress.say, arguments.discard)
            for line in _contents(arguments.data.expanduser(), labels):
                progress.say(line)
            if not model.card.visits and (others := _others(folder)):
                progress.say(
                    f"{folder} also holds {some(others)}. `efcil audit` fails on what is no part of a model; a model "
                    "is better off in a folder of its own."
                )
            size, device = model.card.image_size, model.execution.device
            progress.say(f"{size} x {size} pixels, {model.card.resolved.network}, on {device}")
            pixels = pictures.pixels(size)
            learn(model, pixels, labels, more=arguments.more, progress=progress, keep=keep)
            format.write(folder, model.card, model.tensors())
            discard(folder)
            names = list(dict.fromkeys(map(str, labels)))
            what = ("more of " if arguments.more else "") + ", ".join(names)
            images, classes = _number(len(labels), "image"), _number(len(model.card.classes), "class")
            progress.say(f"{folder}: learned {what} from {images}; it knows {classes} now.")
    return 0


@contextlib.contextmanager
def _made_for_use(folder: Path) -> Iterator[None]:
    """Make the folder of a model, and remove it again where nothing has been put into it."""
    from efcil.files import refuse_unwritable

    new = not folder.exists()
    refuse_unwritable(folder, 0)
    try:
        yield
    finally:
        if new:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _contents(folder: Path, labels: Sequence[Hashable]) -> Iterator[str]:
    """Say what is learned from, and what is not."""
    from efcil.model.images import ignored_files, ignored_line, left_out_folders

    root, names = left_out_folders(folder)
    if root != folder:
        yield printable(f"class folders are taken from {root}" + (f"; left out: {some(names)}" if names else ""))
    yield printable("classes: " + some([f"{name} ({count})" for name, count in Counter(labels).items()], 20))
    others, beside = ignored_files(folder)
    if others:
        yield printable(ignored_line(others))
    if beside:
        yield f"{_number(beside, 'image')} beside the class folders ignored; put images into the folder of their class"


def _number(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "es" if what.endswith("s") else "s")


def _wanted(arguments: argparse.Namespace, start: Settings) -> Settings:
    """Return the settings to begin with, changed as the command says; the device is this machine's affair."""
    given = {name: getattr(arguments, name) for name in SETTINGS if hasattr(arguments, name)}
    given["overrides"] = {**start.overrides, **dict(given.get("overrides", {}))}
    if arguments.preset is not None:
        given["dataset"] = arguments.preset
    return dataclasses.replace(start, **{"device": "auto", **given})


def _others(folder: Path) -> list[str]:
    """Return what lies in the folder of a new model beside it."""
    from efcil.engine import checkpoint
    from efcil.model.format import PARTIAL, STEM

    own = {".lock", PARTIAL, *(file.name for file in checkpoint.orphans(folder, STEM))}
    return sorted(path.name for path in folder.iterdir() if path.name not in own)
