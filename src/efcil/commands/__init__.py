"""The sub-commands. Each module has `add_parser(subparsers)`, which sets `execute` to the function that does the work.

Adding a command is one module and its name in COMMANDS. Modules import torch and data libraries only inside
`execute`, so that help and error messages appear fast.
"""

from __future__ import annotations

from typing import Any

from efcil import __version__
from efcil.commands import audit, check, completion, data, export, inspect, learn, methods, predict, report, run
from efcil.commands.parser import Parser, add_debug

COMMANDS = (run, report, learn, predict, inspect, export, audit, methods, check, data, completion)


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the command, and those of the sub-commands by name."""
    parser = Parser(prog="efcil", description="Exemplar-free class-incremental learning.")
    parser.add_argument("--version", action="version", version=f"efcil {__version__}")
    add_debug(parser)
    subparsers: Any = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser, dict(subparsers.choices)
