"""The parser of the whole command line."""

from __future__ import annotations

import argparse
from typing import Any

from efcil import __version__
from efcil.commands import COMMANDS
from efcil.commands.parser import Parser, add_debug

_AsWritten = argparse.RawDescriptionHelpFormatter
_DESCRIPTION = "Image classifiers that learn new classes task after task and keep no image of the old ones."
_EPILOG = """\
images of your own                              experiments
  efcil learn things --data visits/january        efcil run
  efcil predict things photos                     efcil report runs

`efcil COMMAND --help` describes a command.
"""


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the command, and those of the sub-commands by name."""
    parser = Parser(prog="efcil", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=_AsWritten)
    parser.add_argument("--version", action="version", version=f"efcil {__version__}")
    add_debug(parser)
    subparsers: Any = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        name, text = command.__name__.rpartition(".")[2], command.DESCRIPTION
        # A text with lines of its own is printed as it is.
        form = _AsWritten if "\n" in text else argparse.HelpFormatter
        own = subparsers.add_parser(name, help=command.HELP, description=text, formatter_class=form)
        command.add_arguments(own)
        add_debug(own)
        own.set_defaults(execute=command.execute)
    return parser, dict(subparsers.choices)
