"""`efcil predict`: the most probable classes of images."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from efcil.commands.parser import add_debug, add_format, add_option, positive
from efcil.errors import printable
from efcil.output import csv_line, lines, to_json
from efcil.settings import TrainingSettings, options

FORMATS = ("text", "json", "csv")


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "predict",
        help="name the classes of images",
        description="Print the most probable classes of images, in the order in which they are given. An image that "
        "cannot be read is reported and skipped, and the exit code is 1. Probabilities are the softmax of the scores. "
        "In CSV, names that a spreadsheet would read as a formula start with an apostrophe.",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the model")
    parser.add_argument(
        "images", nargs="+", metavar="IMAGE", help="image, folder of images, pattern, or - for a list on standard input"
    )
    parser.add_argument("--top", type=positive("--top"), default=1, metavar="N", help="classes per image (default: 1)")
    add_format(parser, FORMATS)
    add_option(parser, options(TrainingSettings)["device"])
    add_debug(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Predict the images and print a line for each."""
    # Read when torch is loaded. Threads that spin while they wait for work would take the cores of those that decode.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from efcil.model.images import ignored_line
    from efcil.model.in_memory import Model
    from efcil.model.prediction import image_files, predict_files

    model = Model.load(arguments.model, getattr(arguments, "device", "auto"))
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # as Python reads file names elsewhere: they may be any bytes
    ignored: set[Path] = set()
    files = image_files(arguments.images, sys.stdin, ignored)
    broken = 0

    def intact() -> Iterator[Any]:
        nonlocal broken
        for prediction in _shown(predict_files(model, files, arguments.top)):
            if prediction.error is None:
                yield prediction
            else:
                broken += 1
                print(f"efcil: {printable(prediction.error)} Skipped.", file=sys.stderr)

    {"text": _text, "json": _json, "csv": _csv}[arguments.format](intact())
    if ignored:
        print(f"efcil: {printable(ignored_line(list(ignored)))}", file=sys.stderr)
    if broken:
        print(f"efcil: {broken} image{'s' if broken > 1 else ''} could not be read.", file=sys.stderr)
        return 1
    return 0


def _shown(predictions: Iterable[Any]) -> Iterator[Any]:
    """Show the number of predicted images on a terminal, unless the results go to the same terminal."""
    if not sys.stderr.isatty() or sys.stdout.isatty():
        yield from predictions
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.completed:.0f} images"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("predict", total=None)
        for prediction in predictions:
            yield prediction
            bar.advance(task)


def _text(predictions: Iterable[Any]) -> None:
    for each in predictions:
        pairs = zip(each.labels, each.probabilities, strict=True)
        classes = "  ".join(f"{printable(label)} {probability:.3f}" for label, probability in pairs)
        print(f"{printable(each.path)}  {classes}")


def _json(predictions: Iterable[Any]) -> None:
    """Print one JSON list, an image per line, as the predictions arrive."""
    from efcil.model.card import encode_label

    separator = "[\n"
    for each in predictions:
        pairs = zip(each.labels, each.probabilities, strict=True)
        classes = [{"class": encode_label(label), "probability": round(value, 6)} for label, value in pairs]
        print(separator + to_json({"image": each.path, "predictions": classes}), end="")
        separator = ",\n"
    print("[]" if separator == "[\n" else "\n]")


def _csv(predictions: Iterable[Any]) -> None:
    """Print a table; names that a spreadsheet would read as formulas start with an apostrophe."""
    print("image,rank,class,probability")
    for each in predictions:
        for rank, (label, value) in enumerate(zip(each.labels, each.probabilities, strict=True), 1):
            line = csv_line((each.path, rank, label, f"{value:.6f}"))
            print(lines(line) if sys.stdout.isatty() else line, end="")
