"""Argument parsing whose mistakes become sentences with the closest names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from efcil.errors import SettingsError, closest
from efcil.settings import Option
from efcil.settings.options import show


class Parser(argparse.ArgumentParser):
    """An argument parser that raises SettingsError instead of ending the program, and never guesses abbreviations."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        keywords.setdefault("allow_abbrev", False)
        super().__init__(*arguments, **keywords)

    def error(self, message: str) -> NoReturn:
        """Raise the message as a sentence."""
        raise SettingsError(f"{message[:1].upper()}{message[1:].rstrip('.')}. See `{self.prog} --help`.")

    @property
    def flags(self) -> list[str]:
        """Every option string, such as `--seed`."""
        return sorted(self._option_string_actions)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Raise the error for arguments that nothing understands."""
        flags = [argument.split("=")[0] for argument in unknown if argument.startswith("-")]
        if flags:
            valid = [flag for flag in self.flags if flag.startswith("--")]
            raise SettingsError(f"`{self.prog}` has no option {flags[0]!r}.{closest(flags[0], valid)}")
        raise SettingsError(f"`{self.prog}` does not know what to do with {unknown[0]!r}. See `{self.prog} --help`.")


def add_option(container: argparse._ActionsContainer, option: Option) -> None:
    """Add the flag of a setting. Absent flags leave no attribute, so that a settings file can speak for them."""
    default = "" if option.default in ({}, None) else f" (default: {show(option.default)})"
    common: dict[str, Any] = {
        "dest": option.name,
        "default": argparse.SUPPRESS,
        "help": (option.help + default).replace("%", "%%"),
    }
    if option.annotation is bool:
        container.add_argument(option.flags, action=argparse.BooleanOptionalAction, **common)
        return
    metavar = "{" + ",".join(map(show, option.choices)) + "}" if option.choices else _metavar(option)
    if option.nargs is None:
        container.add_argument(option.flags, type=option.check, metavar=metavar, **common)
        return
    convert = pair if option.name == "overrides" else option.check
    container.add_argument(option.flags, type=convert, nargs=option.nargs, action="extend", metavar=metavar, **common)


def add_debug(parser: argparse.ArgumentParser) -> None:
    """Add the flag that every command has."""
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def pair(text: str) -> tuple[str, str]:
    """Split `name=value`."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise SettingsError(f"--set takes name=value, such as --set later.learning_rate=0.001, but it got {text!r}.")
    return name.strip().replace("-", "_"), value.strip()


def _metavar(option: Option) -> str:
    if option.name == "overrides":
        return "NAME=VALUE"
    return "N" if "number" in option.expected else option.name.upper()
