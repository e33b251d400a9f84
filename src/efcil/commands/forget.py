"""`efcil forget`: remove what a model stores about classes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from efcil.commands.parser import Parser
from efcil.errors import printable, some
from efcil.output import counted

HELP = "remove classes from a model"
DESCRIPTION = """\
Remove classes from a model: their rows in the heads, their means and covariances, and all else that is stored about
them alone. What all classes share, such as the weights of the network, stays as it is; the command says what that is.
A forgotten class cannot be brought back, except by learning it again. `efcil audit` confirms that nothing is left.
"""


def add_arguments(parser: Parser) -> None:
    """Add the arguments and flags."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the model")
    parser.add_argument("classes", nargs="+", metavar="CLASS", help="name of a class")


def execute(arguments: argparse.Namespace) -> int:
    """Forget the classes, and print what was removed and what was not."""
    from efcil.model import classes
    from efcil.model.in_memory import Model

    folder = arguments.model.expanduser()

    def change(model: Model) -> classes.Forgotten:
        labels = classes.find(model, arguments.classes)
        known = {each.label: each for each in model.card.classes}
        going = [f"{label} ({counted(known[label].images, 'image')})" for label in labels]
        forgotten = classes.forget(model, labels)
        print(printable(f"Forgetting {some(going, 20)}: all that is stored about {_it(labels)} alone is removed."))
        return forgotten

    model, gone = classes.in_folder(folder, change)
    removed = ", ".join(f"{title} ({counted(count, 'number')})" for title, count in gone.removed.items())
    print(f"Removed: {removed}.")
    if not gone.shared:
        print("Nothing else depends on it: the network was not trained on your images.")
    else:
        print(
            f"Not removed, because all classes share it: {', '.join(gone.shared)}. Traces of {_it(gone.labels)} may be "
            "left there; only a new model without those images has none."
        )
    left = counted(len(model.card.classes), "class")
    print(printable(f"{folder}: forgot {some(list(gone.labels), 20)}; it knows {left} now."))
    return 0


def _it(labels: Any) -> str:
    return "it" if len(labels) == 1 else "them"
