"""`efcil learn`: teach a model the classes of a folder, as its first or its next task."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from efcil.commands.parser import (
    Parser,
    add_checkpoint_steps,
    add_log,
    add_option,
    let_threads_sleep,
    trackers,
)
from efcil.errors import SettingsError, printable, some
from efcil.output import counted
from efcil.settings import TrainingSettings, options

HELP = "teach a model the classes of a folder"
DESCRIPTION = """\
Teach a model the classes of a folder that has one sub-folder of images per class. MODEL is a folder; it is created
if it does not exist. An existing model learns the classes as its next task, without images of the earlier ones.

With the extra `pretrained` no other option is needed; docs/own-images.md says which ones help when. Network, method
and image size are chosen when the model is created. To resume an interrupted command, run it again; its settings
may be left out.
"""
#: The settings a new model can have. Those after the first line may change with every call.
SETTINGS = (
    "method", "seed", "image_size", "network", "weights", "augmentation",
    "epochs", "first_task_epochs", "batch_size", "classifier", "device", "precision", "overrides",
)  # fmt: skip
#: Defaults as the help text says them; those of `efcil run` are others.
_DEFAULTS = {
    "classifier": "auto",
    "method": "lda on a pre-trained network, else efc",
    "network": "efficientnet-lite0 if the extra `pretrained` is installed, else the preset's",
    "image_size": "the size that a pre-trained network knows; else that of the images, at most 224",
}
#: What the help text says of a setting where that of `efcil run` says too much.
_HELP = {
    "seed": "Seed of everything random in training.",
    "image_size": "Side in pixels of the square images that the network sees.",
}


def add_arguments(parser: Parser) -> None:
    """Add the arguments and flags, most made from the fields of TrainingSettings."""
    parser.add_argument("model", type=_folder, metavar="MODEL", help="folder of the model")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="one sub-folder of images per class")
    parser.add_argument(
        "--more",
        action="store_true",
        help="there are more images of classes the model knows: blend them into what it stores about these classes; "
        "new classes beside them are learned as usual",
    )
    parser.add_argument("--skip-broken", action="store_true", help="leave out images that cannot be read")
    parser.add_argument("--discard", action="store_true", help="discard an interrupted task")
    parser.add_argument("--preset", metavar="DATASET", help="use the recipes of this dataset (default: folder)")
    parser.add_argument(
        "--held-out",
        type=float,
        metavar="SHARE",
        help="share of every class's images that is not learned from but measures the result, 0 for none (default: 0.1 "
        "where the network is trained; otherwise every image measures and is learned from)",
    )
    known = options(TrainingSettings)
    for name in SETTINGS:
        # One model is learned here, not a grid.
        single = known[name] if name == "overrides" else dataclasses.replace(known[name], nargs=None)
        said = {"default": _DEFAULTS.get(name, single.default), "help": _HELP.get(name, single.help)}
        add_option(parser, dataclasses.replace(single, **said))
    add_checkpoint_steps(parser)
    add_log(parser)
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")


def _folder(text: str) -> Path:
    """Return the model's folder, which may be made; an empty name is that of a shell variable without a value."""
    if not text:
        raise SettingsError("The name of the model's folder is empty. Name a folder; . is the current one.")
    return Path(text)


def execute(arguments: argparse.Namespace) -> int:
    """Learn the folder, and save the model."""
    let_threads_sleep()
    from efcil.data.decode import BrokenImages
    from efcil.model.folder import described
    from efcil.model.images import gather_labelled

    folder: Path = arguments.model.expanduser()
    pictures, labels = gather_labelled(arguments.data)
    before = described(folder)
    try:
        model = _taught(arguments, folder, pictures, labels)
    except BrokenImages as error:
        raise BrokenImages(f"{error} To learn from the others, add --skip-broken.") from error
    if not arguments.quiet:
        known = set() if before is None else set(before.labels)
        print("\n".join(map(printable, _outcome(folder, model.card, known, labels))))
    return 0


def _outcome(folder: Path, card: Any, known: Set[Hashable], labels: Sequence[Hashable]) -> Iterator[str]:
    """Yield what a model has learned, and how well; `known` are the classes it knew before."""
    from efcil.model.measuring import in_words

    given = list(dict.fromkeys(labels))
    new, old = ([str(label) for label in given if (label in known) is there] for there in (False, True))
    what = [some(new, 20)] * bool(new) + [f"more of {some(old, 20)}"] * bool(old)
    visits = card.visits[-len(what) :]
    images, classes = counted(sum(each.images for each in visits), "image"), counted(len(card.classes), "class")
    yield f"{folder}: learned {' and '.join(what)} from {images}; it knows {classes} now."
    for visit in visits:
        yield from in_words(card, visit)


def _taught(arguments: argparse.Namespace, folder: Path, pictures: Any, labels: Sequence[Hashable]) -> Any:
    """Teach the model in the folder as the flags say, and return it."""
    from efcil.model.teaching import teach

    return teach(
        folder,
        pictures,
        labels,
        lambda start: _wanted(arguments, start),
        lambda settings: _completed(arguments, settings),
        device=getattr(arguments, "device", "auto"),
        more=arguments.more,
        discard=arguments.discard,
        held_out=arguments.held_out,
        checkpoint_steps=arguments.checkpoint_steps,
        quiet=arguments.quiet,
        remarks=[*_contents(arguments.data.expanduser(), labels), *_advice(folder, labels, arguments.more)],
        skip_broken=arguments.skip_broken,
        log=trackers(arguments),
    )


def _contents(folder: Path, labels: Sequence[Hashable]) -> Iterator[str]:
    """Yield lines that say which images are used, and which are not."""
    from efcil.model.images import ignored_files, ignored_line, left_out_folders

    root, names = left_out_folders(folder)
    if root != folder:
        yield printable(f"class folders are taken from {root}" + (f"; left out: {some(names)}" if names else ""))
    yield printable("classes: " + some([f"{name} ({count})" for name, count in Counter(labels).items()], 20))
    others, beside = ignored_files(folder)
    if others:
        yield printable(ignored_line(others))
    if beside:
        yield f"{counted(beside, 'image')} outside the class folders ignored; put images into the folder of their class"


def _advice(folder: Path, labels: Sequence[Hashable], more: bool) -> Iterator[str]:
    """Yield what to know before these classes are learned."""
    from efcil.model.folder import exists
    from efcil.model.images import advice

    if not more:
        yield from map(printable, advice(labels, first=not exists(folder)))


def _wanted(arguments: argparse.Namespace, start: TrainingSettings) -> TrainingSettings:
    """Return the settings `start`, changed by the flags. The device is not inherited: it depends on the machine."""
    given = {name: getattr(arguments, name) for name in SETTINGS if hasattr(arguments, name)}
    given["overrides"] = {**start.overrides, **dict(given.get("overrides", {}))}
    if arguments.preset is not None:
        given["preset"] = arguments.preset
    return dataclasses.replace(start, **{"device": "auto", **given})


def _completed(arguments: argparse.Namespace, settings: TrainingSettings) -> TrainingSettings:
    """Return the settings of a new model, with network and method chosen where no flag names them."""
    from efcil.model.defaults import completed

    return completed(settings, method_named=hasattr(arguments, "method"))
