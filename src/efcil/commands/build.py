"""The parser of the whole command line."""

from __future__ import annotations

from typing import Any

from efcil import __version__
from efcil.commands import COMMANDS
from efcil.commands.parser import Parser, add_debug


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the command, and those of the sub-commands by name."""
    parser = Parser(prog="efcil", description="Exemplar-free class-incremental learning.")
    parser.add_argument("--version", action="version", version=f"efcil {__version__}")
    add_debug(parser)
    subparsers: Any = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser, dict(subparsers.choices)
