"""`efcil predict`: the most probable classes of images."""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from efcil.commands.parser import Parser, add_format, add_option, let_threads_sleep, positive
from efcil.errors import SettingsError, printable, shortened
from efcil.output import csv_line, lines, to_json
from efcil.settings import TrainingSettings, options

HELP = "name the classes of images"
DESCRIPTION = (
    "Print the most probable classes of images, in the order in which they are given. An image that cannot be read "
    "is reported and skipped, and the exit code is 1. Probabilities are calibrated on images that were held out when "
    "the model learned. With --unknown, an image that looks like none of the model's classes is answered with "
    "`unknown`. In CSV, names that a spreadsheet would read as a formula start with an apostrophe."
)
FORMATS = ("text", "json", "csv")
UNKNOWN = "unknown"
DEFAULT_SHARE = 0.05


def add_arguments(parser: Parser) -> None:
    """Add the arguments and flags."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the model")
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE", help="image, folder of images, pattern, or - for a list on standard input"
    )
    parser.add_argument("--top", type=positive("--top"), default=1, metavar="N", help="classes per image (default: 1)")
    parser.add_argument(
        "--unknown",
        type=share,
        nargs="?",
        const=DEFAULT_SHARE,
        metavar="SHARE",
        help="answer unknown for images that look like none of the classes; SHARE is the expected share of images of "
        f"known classes that get this answer wrongly (default: {DEFAULT_SHARE})",
    )
    add_format(parser, FORMATS)
    add_option(parser, options(TrainingSettings)["device"])


def share(text: str) -> float:
    """Return a share of images, more than 0 and less than 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < 1.0:
        raise SettingsError(
            f"--unknown takes a share of images between 0 and 1, but it got {shortened(text)!r}. In front of a name, "
            f"write it with its share: --unknown {DEFAULT_SHARE}."
        )
    return value


def execute(arguments: argparse.Namespace) -> int:
    """Predict the images and print a line for each."""
    let_threads_sleep()
    collecting = gc.isenabled()
    gc.disable()  # torch makes so many objects that looking for garbage among them takes a fifth of a second
    try:
        from efcil.model.images import ignored_line
        from efcil.model.in_memory import Model
        from efcil.model.prediction import image_files, predict_files
    finally:
        if collecting:
            gc.enable()

    model, unknown = Model.load(arguments.model, getattr(arguments, "device", "auto")), arguments.unknown
    if unknown is not None:
        model.refuse_without_typicality()
        print(
            f"efcil: about {100 * unknown:g}% of images of known classes are answered {UNKNOWN} as well; "
            "--unknown SHARE changes that.",
            file=sys.stderr,
        )
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # as Python reads file names elsewhere: they may be any bytes
    ignored: set[Path] = set()
    files = image_files(arguments.images, sys.stdin, ignored)
    broken = 0

    def intact() -> Iterator[Any]:
        nonlocal broken
        # Not if the results go to the same terminal.
        with counter(sys.stderr.isatty() and not sys.stdout.isatty()) as count:
            for prediction in predict_files(model, files, arguments.top, unknown):
                if prediction.error is None:
                    yield prediction
                else:
                    broken += 1
                    print(f"efcil: {printable(prediction.error)} Skipped.", file=sys.stderr)
                count(1)

    {"text": _text, "json": _json, "csv": _typical_csv if unknown else _csv}[arguments.format](intact())
    if ignored:
        print(f"efcil: {printable(ignored_line(list(ignored)))}", file=sys.stderr)
    if broken:
        print(f"efcil: {broken} image{'s' if broken > 1 else ''} could not be read.", file=sys.stderr)
        return 1
    return 0


@contextmanager
def counter(shown: bool) -> Iterator[Callable[[int], None]]:
    """Return a function that counts images; while the context lasts, a terminal shows how many, if `shown`."""
    if not shown:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.completed:.0f} images"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("images", total=None)
        yield lambda count: bar.advance(task, count)


def _text(predictions: Iterable[Any]) -> None:
    for each in predictions:
        pairs = zip(each.labels, each.probabilities, strict=True)
        classes = "  ".join(f"{printable(label)} {probability:.3f}" for label, probability in pairs)
        print(f"{printable(each.path)}  {UNKNOWN if each.unknown else classes}")


def _json(predictions: Iterable[Any]) -> None:
    """Print one JSON list, an image per line, as the predictions arrive; Ctrl-C ends the list, too."""
    from efcil.model.card import encode_label

    separator = "[\n"
    try:
        for each in predictions:
            pairs = zip(each.labels, each.probabilities, strict=True)
            classes = [{"class": encode_label(label), "probability": round(value, 6)} for label, value in pairs]
            facts = {"image": each.path, "predictions": classes}
            if each.typicality is not None:
                facts |= {"unknown": each.unknown, "typicality": round(each.typicality, 6)}
            print(separator + to_json(facts), end="")
            separator = ",\n"
    finally:  # what was predicted before an interruption can be read
        print("[]" if separator == "[\n" else "\n]")


def _csv(predictions: Iterable[Any], typicality: bool = False) -> None:
    """Print a table; names that a spreadsheet would read as formulas start with an apostrophe."""
    print("image,rank,class,probability" + (",typicality" if typicality else ""))
    for each in predictions:
        last = (f"{each.typicality:.6f}",) if typicality else ()
        pairs = zip(each.labels, map("{:.6f}".format, each.probabilities), strict=True)
        for rank, (label, value) in enumerate([(UNKNOWN, "")] if each.unknown else pairs, 1):
            line = csv_line((each.path, rank, label, value, *last))
            print(lines(line) if sys.stdout.isatty() else line, end="")


def _typical_csv(predictions: Iterable[Any]) -> None:
    _csv(predictions, typicality=True)
