"""`efcil audit`: whether a model stores images, and what its numbers reveal about its training images."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from efcil import output
from efcil.commands.parser import Parser, add_format, let_threads_sleep
from efcil.errors import printable, some
from efcil.output import counted

FORMATS = ("text", "json")
SHOWN_MATCHES, SHOWN_EXTRAS = 5, 20

HELP = "check that a model stores no image"
DESCRIPTION = """\
Check a model against the images it was trained on: that everything in its folder is explained, that no stored row of
numbers is one of these images or nearly one, and how well its numbers separate training images from others. The exit
code is 1 if something is unexplained or matches an image. docs/audit.md says what this proves.
"""


def add_arguments(parser: Parser) -> None:
    """Add the arguments and flags."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the model")
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FOLDER", help="the images it was trained on, one folder per class"
    )
    parser.add_argument(
        "--held-out",
        type=Path,
        metavar="FOLDER",
        help="images it was not trained on, one folder per class (default: test/ or val/ beside train/, if there)",
    )
    add_format(parser, FORMATS)


def execute(arguments: argparse.Namespace) -> int:
    """Audit the model and print what was found."""
    let_threads_sleep()
    from efcil.activity import doing
    from efcil.engine.progress import Waiting
    from efcil.model.audit import audit

    held_out = None if arguments.held_out is None else arguments.held_out.expanduser()
    with Waiting(lambda line: print(line, file=sys.stderr, flush=True)), doing("auditing"):
        found = audit(arguments.model.expanduser(), arguments.data.expanduser(), held_out)
    if arguments.format == "json":
        print(output.to_json(found.to_json(), indent=1))
    else:
        print(output.lines(describe(found)))
    return 1 if found.failed else 0


def describe(found: Any) -> str:
    """Return the findings as text."""
    lines = ["1. What is stored"]
    for row in found.stored:
        each = "" if row.per_class is None else f" ({row.per_class:,.0f} per class)"
        lines.append(f"   {row.title:<26} {row.tensors:>4} tensors {row.numbers:>12,} numbers{each}  {row.use}")
    lines.append(f"   for comparison: an image as the model sees it has {found.numbers_of_an_image:,} numbers")
    lines += [f"   {_forgotten(found)}"] if found.forgotten else []
    lines += [f"   UNEXPLAINED: {printable(what)}" for what in (*found.unaccounted, *found.misfits)]
    lines += [f"   {printable(line)}" for line in beside(found.extras)]
    lines.append(f"2. Stored images: {found.images} training images compared with every stored row that could be one")
    lines.append(f"   {_covered(found.coverage)}")
    for match in found.matches[:SHOWN_MATCHES]:
        verdict = f"IS IMAGE {printable(match.file)}" if match.found else "no image"
        lines.append(
            f"   {printable(match.tensor)}, row {match.row}, as {match.side} x {match.side} pixels: correlation "
            f"{match.correlation:.3f} with an image, {match.upside_down:.3f} with images upside down: {verdict}"
        )
    if not found.matches:
        lines.append("   no stored row has enough numbers")
    lines.append("3. Separating training images from others (AUC: 0.5 is chance, 1 is perfect)")
    for one in found.membership:
        lines.append(
            f"   by {one.attack}: {one.auc:.3f} (95 % interval {one.low:.3f} to {one.high:.3f}; "
            f"{one.members} training, {one.others} held-out images)"
        )
    if found.no_membership is not None:
        lines.append(f"   not measured: {found.no_membership}")
    lines.append(printable(found.verdict))
    return "\n".join(lines)


def _forgotten(found: Any) -> str:
    """Return whether rows of forgotten classes are left."""
    count, left = found.forgotten, found.coverage.of_classes
    text = f"{counted(count, 'class')} forgotten or merged into others: "
    wrong = [f"{row.title} ({row.rows} rows, {row.needed} needed)" for row in found.rows if row.rows != row.needed]
    if wrong:
        return text + f"ROWS ARE LEFT in {', '.join(wrong)}"
    return text + (
        f"no row of {'it' if count == 1 else 'them'} is left; {', '.join(row.title for row in found.rows)} have rows "
        f"for the {counted(left, 'class')} that the model knows, and no more"
    )


def beside(extras: Any) -> list[str]:
    """Return lines about what is in a model folder but not part of the model."""
    lines = [f"NOT PART OF THE MODEL: {name}" for name in (*extras.files[:SHOWN_EXTRAS], *extras.parts[:SHOWN_EXTRAS])]
    more = sum(max(0, len(names) - SHOWN_EXTRAS) for names in (extras.files, extras.parts))
    lines += [f"NOT PART OF THE MODEL: {more:,} more files or fields"] if more else []
    return lines + (["UNFINISHED TASK: partial/"] if extras.unfinished else [])


def _covered(coverage: Any) -> str:
    """Return how much of what the model has learned was compared."""
    text = f"compared with images of {coverage.classes} of {coverage.of_classes} classes"
    if coverage.of_images is not None:
        text += f", {coverage.images} of {coverage.of_images} images"
    for title, names in (
        ("not checked", coverage.not_checked),
        ("only in part", coverage.partly_checked),
        ("not of this model", coverage.not_known),
    ):
        text += f"; {title}: {printable(some(names, 20))}" if names else ""
    return text
