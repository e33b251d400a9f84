"""`efcil audit`: whether a model stores images, and what its numbers betray of those it was trained on."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from efcil import output
from efcil.commands.parser import add_debug, add_format
from efcil.errors import printable, some

FORMATS = ("text", "json")
#: Seconds between two lines that say how far an audit has come.
TELL_SECONDS = 10.0
SHOWN_MATCHES, SHOWN_EXTRAS = 5, 20

DESCRIPTION = """\
Check a model against the images it was trained on: that everything in its folder is explained, that no tensor is an
image, a resized image or a patch, and how well its numbers tell training images from others. The exit code is 1 if
something is unexplained or must be taken for an image. Only the images that are given are looked for.
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "audit",
        help="check that a model stores no image",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    add_debug(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Audit the model and print what was found."""
    from efcil.model.audit import audit

    held_out = None if arguments.held_out is None else arguments.held_out.expanduser()
    found = audit(arguments.model.expanduser(), arguments.data.expanduser(), held_out, _teller())
    if arguments.format == "json":
        print(output.to_json(found.to_json(), indent=1))
    else:
        print(output.lines(describe(found)))
    return 1 if found.failed else 0


def _teller() -> Callable[[float], None]:
    """Return what tells every so often, beside the result, how far the comparison has come."""
    last = time.monotonic()

    def tell(share: float) -> None:
        nonlocal last
        if time.monotonic() - last >= TELL_SECONDS:
            last = time.monotonic()
            print(f"{share:.0%} of the comparisons with images done", file=sys.stderr, flush=True)

    return tell


def describe(found: Any) -> str:
    """Return the findings as text."""
    lines = ["1. What is stored"]
    for row in found.stored:
        lines.append(f"   {row.title:<26} {row.tensors:>4} tensors {row.numbers:>12,} numbers  {row.use}")
    lines += [f"   UNEXPLAINED: {printable(what)}" for what in (*found.unaccounted, *found.misfits)]
    lines += [f"   {printable(line)}" for line in beside(found.extras)]
    lines.append(f"2. Images among it: {found.images} training images compared with every row that could be one")
    lines.append(f"   {_covered(found.coverage)}")
    if found.lookalikes:
        lines.append(f"   {found.lookalikes} held-out images left out here: they look like training images")
    lines += [f"   IS AN IMAGE OR ARCHIVE: {printable(what)}" for what in found.encoded]
    for match in found.matches[:SHOWN_MATCHES]:
        verdict = f"IS IMAGE {printable(match.file)}" if match.found else "no image"
        lines.append(
            f"   {printable(match.tensor)}, "
            f"row {match.row}: correlation {match.correlation:.3f} with {match.compared_with}, "
            f"{match.unrelated:.3f} with {found.unrelated}: {verdict}"
        )
    if not found.matches:
        lines.append("   no stored row has the length of an image or patch")
    lines.append("3. Telling training images from others (AUC, 0.5: impossible, 1: always)")
    for one in found.membership:
        lines.append(
            f"   by {one.attack}: {one.auc:.3f} (95 % interval {one.low:.3f} to {one.high:.3f}; "
            f"{one.members} training, {one.others} held-out images)"
        )
    if found.no_membership is not None:
        lines.append(f"   not measured: {found.no_membership}")
    lines.append(found.verdict)
    return "\n".join(lines)


def beside(extras: Any) -> list[str]:
    """Say what a model folder holds that is no part of the model."""
    lines = [f"NO PART OF THE MODEL: {name}" for name in (*extras.files[:SHOWN_EXTRAS], *extras.parts[:SHOWN_EXTRAS])]
    more = sum(max(0, len(names) - SHOWN_EXTRAS) for names in (extras.files, extras.parts))
    lines += [f"NO PART OF THE MODEL: {more:,} more files or fields"] if more else []
    return lines + (["UNFINISHED TASK: partial/"] if extras.unfinished else [])


def _covered(coverage: Any) -> str:
    """Say how much of what the model has learned was compared."""
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
