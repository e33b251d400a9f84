"""`efcil evaluate`: how good a model's answers to labelled images are."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from efcil.commands.parser import Parser, add_option, file_or_screen, let_threads_sleep, one_of
from efcil.commands.predict import DEFAULT_SHARE, counter, share
from efcil.errors import SettingsError, printable
from efcil.settings import TrainingSettings, options

FORMATS = ("text", "json", "csv", "html")

HELP = "measure a model on labelled images"
DESCRIPTION = """\
Compare a model's answers with the folders that images lie in, one per class. Use images that it has not learned from;
beside a folder train/, those of test/ or val/ are used. Classes that the model does not know are reported apart. An
image that cannot be read is reported and skipped, and the exit code is 1. docs/evaluate.md explains the numbers.
"""


def add_arguments(parser: Parser) -> None:
    """Add the arguments and flags."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the model")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="images, one folder per class")
    parser.add_argument(
        "--format",
        type=one_of("format", FORMATS),
        metavar="FORMAT",
        help="text, json, csv (a line per class) or html (default: that of the suffix of --output, else text)",
    )
    parser.add_argument(
        "--output",
        type=file_or_screen,
        metavar="FILE",
        help="write to a file instead of the screen (-); the html page holds small copies of wrongly answered images",
    )
    parser.add_argument(
        "--unknown",
        nargs="?",
        type=share,
        const=DEFAULT_SHARE,
        metavar="SHARE",
        help="answer unknown where an image is less typical than this share of the images of known classes, which is "
        f"then the share wrongly answered so (default: {DEFAULT_SHARE})",
    )
    parser.add_argument(
        "--skip-broken", action="store_true", help="exit with 0 even if images could not be read; they are listed"
    )
    add_option(parser, options(TrainingSettings)["device"])


def execute(arguments: argparse.Namespace) -> int:
    """Evaluate the model; print the result, or write it and print its first line."""
    let_threads_sleep()
    form = _form(arguments)
    from efcil.model.evaluation import better_than_expected, evaluate_folder
    from efcil.model.images import ignored_files, ignored_line
    from efcil.model.in_memory import Model

    folder = arguments.data.expanduser()
    others, _ = ignored_files(folder)
    model = Model.load(arguments.model, getattr(arguments, "device", "auto"))
    with counter(sys.stderr.isatty()) as progress:
        found = evaluate_folder(
            model, folder, unknown=arguments.unknown, model_name=str(arguments.model), progress=progress
        )
    _write(found, form, arguments.output)
    if (remark := better_than_expected(model.card, found)) is not None:
        print(f"efcil: {remark}", file=sys.stderr)
    for each in found.unreadable:
        print(f"efcil: {printable(each.reason)} Skipped.", file=sys.stderr)
    if others:
        print(f"efcil: {printable(ignored_line(others))}", file=sys.stderr)
    if found.unreadable:
        count = len(found.unreadable)
        print(f"efcil: {count} image{'s' if count > 1 else ''} could not be read.", file=sys.stderr)
    return 1 if found.unreadable and not arguments.skip_broken else 0


def _write(found: Any, form: str, place: Path | None) -> None:
    from efcil.files import write_atomically
    from efcil.output import lines
    from efcil.report.evaluation import headline, render

    text = render(found, form)
    if place is None:
        # A terminal obeys control characters; programs that read CSV get names as they are.
        print(lines(text) if form == "csv" and sys.stdout.isatty() else text, end="")
        return
    try:
        # A name of a folder may hold bytes that are not text; CSV keeps them.
        write_atomically(place.expanduser(), text.encode("utf-8", "surrogateescape"))
    except OSError as error:
        reason = error.strerror or error
        raise SettingsError(f"{place} cannot be written ({reason}). Choose another --output.") from None
    print(f"{headline(found)}\nwritten to {printable(place)}")


def _form(arguments: argparse.Namespace) -> str:
    """Return the format: the one asked for, that of the file's suffix, or text."""
    suffix = "" if arguments.output is None else arguments.output.suffix.lower().removeprefix(".")
    form: str = arguments.format or (suffix if suffix in FORMATS else "html" if suffix == "htm" else "text")
    if form == "html" and arguments.output is None:
        raise SettingsError(
            "The page holds small copies of images, so it is only written where you say: add --output FILE."
        )
    return form
