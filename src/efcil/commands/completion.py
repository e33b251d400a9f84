"""`efcil completion`: a script that lets a shell complete commands, flags, names and paths."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from efcil.commands.parser import Parser
from efcil.errors import SettingsError, unknown

SHELLS = ("bash", "zsh", "tcsh")
HELP = "print a script for shell completion"
DESCRIPTION = """\
Print a script that completes `efcil` in a shell: commands, flags, files and folders, and the names of methods,
datasets and networks. Write it once to where your shell looks for it:

  bash  efcil completion bash > ~/.local/share/bash-completion/completions/efcil
  zsh   efcil completion zsh > DIR/_efcil, where DIR is in $fpath
  tcsh  efcil completion tcsh > ~/.efcil.tcsh, and `source` that from ~/.tcshrc

It needs the extra: pip install "efcil[completion]"
"""
_FOLDERS = ("MODEL", "FOLDER", "DIR", "DATA")
_FILES = ("FILE", "IMAGE")


def add_arguments(parser: Parser) -> None:
    """Add the arguments and flags."""
    parser.add_argument("shell", metavar="SHELL", help="bash, zsh or tcsh")


def execute(arguments: argparse.Namespace) -> int:
    """Print the script."""
    if arguments.shell not in SHELLS:
        raise unknown("shell", arguments.shell, SHELLS)
    print(script(arguments.shell))
    return 0


def script(shell: str) -> str:
    """Return the completion script for a shell."""
    try:
        import shtab
    except ImportError:
        raise SettingsError('Shell completion needs another package: pip install "efcil[completion]".') from None
    from efcil.commands.build import build_parser

    # This parser only describes: it never parses, so choices may be added that the real one checks by itself.
    parser, commands = build_parser()
    named = _names()
    for command in commands.values():
        for action in command._actions:
            _describe(action, named, shtab.FILE, shtab.DIRECTORY)
    written: str = shtab.complete(parser, shell)
    return written


def _describe(action: Any, named: Mapping[str, Callable[[], Iterable[str]]], file: Any, folder: Any) -> None:
    """Tell the shell what the values of a flag or an argument are: names, files or folders."""
    word = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if word.startswith("{"):
        action.choices = word.strip("{}").split(",")
    elif word in named:
        action.choices = list(named[word]())
    elif word in ("FORMAT", "KIND", "SHELL"):
        action.choices = _listed(action.help)
    elif word in _FOLDERS:
        action.complete = folder
    elif word in _FILES or (action.type is not None and getattr(action.type, "__name__", "") == "Path"):
        action.complete = file


def _listed(text: str) -> list[str]:
    """Return the names in a help text like `text, json or csv (default: text)`."""
    return [word for word in re.findall(r"\w+", re.split(r"[:(]", text)[0]) if word != "or"]


def _names() -> dict[str, Callable[[], Iterable[str]]]:
    """Return where the names come from, by the word that stands for them in the help."""
    from efcil import methods
    from efcil.core import classifiers
    from efcil.data.augment import AUGMENTATIONS
    from efcil.data.sources import sources
    from efcil.network.backbones import NETWORKS

    return {
        "METHOD": lambda: sorted(methods.available()),
        "DATASET": lambda: sorted(sources()),
        "NETWORK": lambda: sorted(NETWORKS),
        "AUGMENTATION": lambda: sorted(AUGMENTATIONS),
        "CLASSIFIER": lambda: classifiers.NAMES,
        "DEVICE": lambda: ["auto", "cpu", "cuda"],
    }
