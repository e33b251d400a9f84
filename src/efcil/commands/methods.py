"""`efcil methods`: what can be trained, and the settings each method has."""

from __future__ import annotations

import argparse
import inspect
import textwrap

from efcil.commands.parser import Parser
from efcil.errors import unknown
from efcil.settings import options
from efcil.settings.options import show

HELP = "list the methods and their settings"
DESCRIPTION = (
    "List the methods, or describe those that are named. Their settings are changed with `efcil run --set name=value`."
)


def add_arguments(parser: Parser) -> None:
    """Add the arguments and flags."""
    parser.add_argument("names", nargs="*", metavar="METHOD", help="methods to describe in full")


def execute(arguments: argparse.Namespace) -> int:
    """Print the list, or the descriptions."""
    from efcil import methods

    available: dict[str, type] = methods.available()
    for name in arguments.names:
        if name not in available:
            raise unknown("method", name, available)
    if arguments.names:
        print("\n\n".join(describe(name, available[name]) for name in arguments.names))
        return 0
    width = max(map(len, available), default=0)
    for name in sorted(available):
        print(f"{name:<{width}}  {summary(available[name])}")
        settings = ", ".join(f"{o.name}={show(o.default)}" for o in options(_definition(available[name])).values())
        if settings:
            print(textwrap.fill(settings, 80, initial_indent=" " * (width + 2), subsequent_indent=" " * (width + 2)))
    return 0


def summary(cls: type) -> str:
    """Return a method's one-line summary: its `summary`, or the first line of its documentation."""
    stated = getattr(cls, "summary", None)
    return stated if isinstance(stated, str) else (inspect.getdoc(cls) or "").split("\n")[0]


def describe(name: str, cls: type) -> str:
    """Return a method's documentation and settings."""
    from efcil.presets import method_values

    lines = [name, "", textwrap.indent(inspect.getdoc(cls) or summary(cls), "  "), "", "  Settings (--set name=value):"]
    for option in options(_definition(cls)).values():
        lines.append(f"    {option.name} = {show(option.default)}  ({option.expected})")
        lines.append(textwrap.fill(option.help, 80, initial_indent=" " * 8, subsequent_indent=" " * 8))
    if len(lines) == 5:
        lines.append("    none")
    for values, datasets in method_values(name).items():
        lines.append(f"  With the preset of {', '.join(datasets)}: {', '.join(values)}")
    return "\n".join(lines)


def _definition(cls: type) -> type:
    definition: type = cls.Settings  # type: ignore[attr-defined]
    return definition
