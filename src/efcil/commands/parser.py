"""Argument parsing whose mistakes become sentences with the closest names."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from efcil.errors import Mistakes, SettingsError, closest, shortened, unknown
from efcil.settings import Option
from efcil.settings.options import show

#: What --output names by a hyphen.
STANDARD_OUTPUT = Path("-")
_SEEDS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_MOST_SEEDS = 1000


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
        """Raise the error for unknown arguments."""
        flags = [argument.split("=")[0] for argument in unknown if argument.startswith("-")]
        if flags:
            valid = [flag for flag in self.flags if flag.startswith("--")]
            raise SettingsError(f"`{self.prog}` has no option {flags[0]!r}.{closest(flags[0], valid)}")
        raise SettingsError(f"`{self.prog}` does not know what to do with {unknown[0]!r}. See `{self.prog} --help`.")


@dataclass(frozen=True)
class Wrong:
    """A value that could not be read, with the reason. It is raised later, together with other mistakes."""

    error: SettingsError


def later(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a conversion that returns what is wrong with a value instead of raising it."""

    def converted(text: str) -> Any:
        try:
            return convert(text)
        except SettingsError as error:
            return Wrong(error)

    return converted


def take_wrong(values: dict[str, Any], found: Mistakes) -> dict[str, Any]:
    """Return the values of flags without those that could not be read, which are added to the mistakes."""
    kept = {}
    for name, value in values.items():
        several = list(_flat(value)) if isinstance(value, list) else [value]
        for each in several:
            if isinstance(each, Wrong):
                found.add(each.error)
        right = [each for each in several if not isinstance(each, Wrong)]
        if right or not several:
            kept[name] = right if isinstance(value, list) else value
    return kept


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values one by one, those of ranges too."""
    for each in values:
        yield from each if isinstance(each, list) else [each]


def refuse_wrong(arguments: argparse.Namespace) -> None:
    """Raise for all values that could not be read."""
    found = Mistakes()
    take_wrong(vars(arguments), found)
    found.refuse()


def add_option(container: argparse._ActionsContainer, option: Option) -> None:
    """Add the flag of a setting. A flag that is not given leaves no attribute, so that a settings file can set it."""
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
        container.add_argument(option.flags, type=later(option.check), metavar=metavar, **common)
        return
    convert: Callable[[str], Any] = pair if option.name == "overrides" else option.check
    if option.name.endswith("seed"):
        convert = partial(_seed_or_range, option)
    names = ("--seed", "--seeds") if option.flags == "--seed" else (option.flags,)  # as `efcil paper` has it
    container.add_argument(*names, type=later(convert), nargs=option.nargs, action="extend", metavar=metavar, **common)


def _seed_or_range(option: Option, text: str) -> Any:
    """Return a seed, or a list of those of a range such as 0-4."""
    return read_seeds([text], option.flags) if "-" in text[1:] else option.check(text)


def read_seeds(words: Sequence[str], flag: str = "--seeds") -> list[int]:
    """Read seeds: numbers, and ranges such as 0-4."""
    found: dict[int, None] = {}
    for word in (part for each in words for part in each.split(",") if part):
        match = _SEEDS.fullmatch(word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last - first >= _MOST_SEEDS:
            raise SettingsError(f"{flag} takes numbers and ranges, such as 0-4 or 0 1 2, but it got {word!r}.")
        found.update(dict.fromkeys(range(first, last + 1)))
    if not found:
        raise SettingsError(f"{flag} names no seed. Give some, such as 0-4, or leave it out.")
    return list(found)


def add_debug(parser: argparse.ArgumentParser) -> None:
    """Add the flag that every command has."""
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def file_or_screen(text: str) -> Path | None:
    """Return the file that --output names; None, which means the screen, for a hyphen."""
    return None if Path(text) == STANDARD_OUTPUT else Path(text)


def add_checkpoint_steps(parser: argparse._ActionsContainer) -> None:
    """Add the flag of commands that train."""
    parser.add_argument(
        "--checkpoint-steps",
        metavar="N",
        type=positive("--checkpoint-steps"),
        help="save a checkpoint every N steps, besides every five minutes and at the end of every task",
    )


def add_jobs_per_gpu(parser: argparse._ActionsContainer) -> None:
    """Add the flag of commands that train several runs."""
    parser.add_argument(
        "--jobs-per-gpu",
        metavar="N",
        type=positive("--jobs-per-gpu"),
        help="train this many runs at a time on every GPU (default: one run after the other, on one GPU)",
    )


def add_log(parser: argparse._ActionsContainer) -> None:
    """Add the flag of commands whose training can be logged elsewhere."""
    parser.add_argument(
        "--log",
        nargs="+",
        action="extend",
        default=[],
        metavar="TRACKER",
        help="also log to tensorboard, wandb or mlflow; several may be named. Results do not depend on it",
    )


def trackers(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the trackers that --log names; a missing package is said now, before anything is trained."""
    if not arguments.log:
        return ()
    from efcil.engine.trackers import checked

    return checked(arguments.log)


def add_format(parser: argparse.ArgumentParser, formats: Sequence[str]) -> None:
    """Add the flag of commands that print in several formats; the first is the default."""
    listed = f"{', '.join(formats[:-1])} or {formats[-1]}"
    parser.add_argument(
        "--format",
        default=formats[0],
        type=one_of("format", formats),
        metavar="FORMAT",
        help=f"{listed} (default: {formats[0]})",
    )


def one_of(kind: str, names: Collection[str]) -> Callable[[str], str]:
    """Return the conversion of a flag that names one of these."""

    def check(text: str) -> str:
        if text not in names:
            raise unknown(kind, text, names)
        return text

    return check


def positive(flag: str) -> Callable[[str], int]:
    """Return the conversion of a flag whose value is a whole number of at least 1."""

    def check(text: str) -> int:
        # Nothing that is counted here needs more digits.
        if not text.isdecimal() or len(text) > 18 or int(text) < 1:
            raise SettingsError(f"{flag} must be a whole number, at least 1, but it is {shortened(text)!r}.")
        return int(text)

    return check


def pair(text: str, flag: str = "--set", example: str = "later.learning_rate=0.001") -> tuple[str, str]:
    """Split `name=value`."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise SettingsError(f"{flag} takes name=value, such as {flag} {example}, but it got {text!r}.")
    return name.strip().replace("-", "_"), value.strip()


def varied(words: Sequence[str]) -> dict[str, list[str]]:
    """Read `name=value value name=value value`: several values for each name."""
    found: dict[str, list[str]] = {}
    for word in words:
        if "=" in word:
            name, value = pair(word, "--vary", "efm_weight=1 10")
            if name in found:
                raise SettingsError(f"--vary names {name!r} twice. Give all of its values together.")
            found[name] = [value]
        elif found:
            found[next(reversed(found))].append(word)
        else:
            raise SettingsError(f"--vary takes name=value value, such as --vary efm_weight=1 10, but it got {word!r}.")
    return found


def _metavar(option: Option) -> str:
    if option.name == "overrides":
        return "NAME=VALUE"
    return "N" if "number" in option.expected else option.name.upper()


def let_threads_sleep() -> None:
    """Let torch's threads sleep while they wait for work; they read this when torch is loaded, so call it before.

    Threads that spin take the cores of those that decode images, and of other programs.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
