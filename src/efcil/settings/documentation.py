"""Writes docs/settings.md from the definitions: `python -m efcil.settings.documentation docs/settings.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from efcil.settings.grid import GRID_FIELDS
from efcil.settings.model import Recipe, Settings
from efcil.settings.options import Option, options, show

_INTRODUCTION = """\
# Settings

This page is made from the definitions in the code; change those and run `python -m efcil.settings.documentation
docs/settings.md`.

A run is described by the settings below, on the command line (`efcil run --seed 0 1 2`) or in a YAML file
(`efcil run --config FILE`, with the names of the first column as keys). Flags override the file. A run's own
`settings.yaml` is such a file. {grid}
take several values, and every combination becomes a run.
"""

_RECIPES = """\
## Recipes

How a task is optimised. The preset of the dataset has one recipe for the first task and one per family of methods for
later tasks. `--epochs` and `--batch-size` change both; single values are changed with
`--set first_task.learning_rate=0.01` or `--set later.milestones=30,60`. Changing the epochs moves the milestones in
proportion unless they are set too.
"""

_METHODS = """\
## Methods

Settings of a method are changed with `--set efm_weight=5` or, in a file, under `overrides`. In a grid of several
methods each one takes the settings that it has.
"""


def documentation() -> str:
    """Return the text of docs/settings.md."""
    from efcil import methods

    known = options(Settings)
    names = [f"`{name}`" for name in known if name in GRID_FIELDS]
    parts = [_INTRODUCTION.format(grid=", ".join(names[:-1]) + " and " + names[-1])]
    for group in dict.fromkeys(option.group for option in known.values()):
        members = [option for option in known.values() if option.group == group]
        parts.append(f"## {group.capitalize()}\n\n" + _table(members, flags=True))
    parts.append(_RECIPES + "\n" + _table(options(Recipe).values()))
    parts.append(_METHODS)
    for name, cls in methods.available().items():
        members = list(options(cls.Settings).values())
        body = _table(members) if members else "No settings of its own.\n"
        parts.append(f"### {name}\n\n{_sentence(cls.summary)}\n\n{body}")
    return "\n".join(parts)


def _table(members: Iterable[Option], flags: bool = False) -> str:
    heading = ["setting", *(["flag"] if flags else []), "default", "value", "meaning"]
    lines = [heading, ["---"] * len(heading)]
    for option in members:
        flag = [f"`{option.flags}`"] if flags else []
        default = "" if option.default in (None, {}, ()) else f"`{show(option.default)}`"
        lines.append([f"`{option.name}`", *flag, default, option.expected, option.help.replace("|", "\\|")])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(documentation(), encoding="utf-8")
