"""`efcil card`: a model card, as the README.md of a model folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from efcil.commands.parser import Parser, file_or_screen
from efcil.errors import printable

HELP = "print a model card in Markdown"
DESCRIPTION = (
    "Print a README.md for a model: its classes with counts and dates, its method and network, what is stored and "
    "how to use it. `--output MODEL/README.md` puts it into the model's folder, where `efcil audit` accepts it as "
    "long as it fits the model."
)


def add_arguments(parser: Parser) -> None:
    """Add the arguments and flags."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the model")
    parser.add_argument(
        "--output", type=file_or_screen, metavar="FILE", help="file to write (default, and -: print it)"
    )
    parser.add_argument("--license", metavar="NAME", help="short name of the licence you give it, such as cc-by-4.0")


def execute(arguments: argparse.Namespace) -> int:
    """Print or write the card."""
    from efcil.commands.export import refuse_own
    from efcil.files import write_own
    from efcil.model.folder import read_raw
    from efcil.model.readme import readme

    folder: Path = arguments.model.expanduser()
    text = readme(read_raw(folder)[0], arguments.license)
    if arguments.output is None:
        print(text, end="")
        return 0
    file: Path = arguments.output.expanduser()
    refuse_own(folder, file)
    write_own(file, text)
    print(f"{printable(file)}: a model card in Markdown.")
    return 0
