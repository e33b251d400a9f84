"""`efcil rename`: give a class of a model another name."""

from __future__ import annotations

import argparse
from pathlib import Path

from efcil.commands.parser import Parser
from efcil.errors import printable

HELP = "give a class another name"
DESCRIPTION = (
    "Give a class of a model another name. Only the name changes. More images of the class are then learned from a "
    "folder of the new name."
)


def add_arguments(parser: Parser) -> None:
    """Add the arguments and flags."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the model")
    parser.add_argument("old", metavar="OLD", help="name of the class")
    parser.add_argument("new", metavar="NEW", help="its new name")


def execute(arguments: argparse.Namespace) -> int:
    """Rename the class."""
    from efcil.model import classes
    from efcil.model.images import folder_label
    from efcil.model.in_memory import Model

    folder, new = arguments.model.expanduser(), folder_label(arguments.new)

    def change(model: Model) -> str:
        (old,) = classes.find(model, [arguments.old])
        classes.rename(model, old, new)
        return str(old)

    _, old = classes.in_folder(folder, change)
    print(printable(f"{folder}: {old} is called {new} now."))
    return 0
