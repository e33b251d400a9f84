"""`efcil merge`: make several classes of a model one."""

from __future__ import annotations

import argparse
from pathlib import Path

from efcil.commands.parser import Parser
from efcil.errors import printable, some
from efcil.output import counted

HELP = "make several classes one"
DESCRIPTION = """\
Make several classes of a model one. Their means and covariances become those of all of their images together. Their
heads are fitted again to what is stored about all classes, if the method keeps enough for that; else they are averaged.
"""


def add_arguments(parser: Parser) -> None:
    """Add the arguments and flags."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the model")
    parser.add_argument("classes", nargs="+", metavar="CLASS", help="name of a class; at least two")
    parser.add_argument(
        "--into", required=True, metavar="NAME", help="name of the class they become; may be that of one of them"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Merge the classes, and say how."""
    from efcil.model import classes
    from efcil.model.images import folder_label
    from efcil.model.in_memory import Model

    folder = arguments.model.expanduser()

    def change(model: Model) -> classes.Merged:
        labels = classes.find(model, arguments.classes)
        name = folder_label(arguments.into)
        same = [label for label in labels if folder_label(str(label)) == name]
        return classes.merge(model, labels, same[0] if same else name)

    model, merged = classes.in_folder(folder, change)
    if merged.combined:
        print(f"Now as if measured on the images of all of them together: {', '.join(merged.combined)}.")
    if merged.refitted:
        print("Heads: fitted to the means and covariances of all classes.")
    elif merged.averaged:
        print("Heads: the rows of these classes were averaged, weighted by their numbers of images.")
    images, left = counted(merged.images, "image"), counted(len(model.card.classes), "class")
    names = some(list(merged.labels), 20)
    print(printable(f"{folder}: merged {names} into {merged.label} ({images}); it knows {left} now."))
    return 0
