"""Writes docs/settings.md and the tables of settings in docs/methods from the definitions.

python -m efcil.resolution.documentation docs/settings.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from efcil.errors import EfcilError
from efcil.resolution.config import GRID_FIELDS
from efcil.settings.benchmark import Settings
from efcil.settings.options import Option, options, show
from efcil.settings.recipe import Recipe

_INTRODUCTION = """\
# Settings

Every setting of a run: its flag of `efcil run`, its name in a settings file, its default and its meaning. `efcil learn`
has some of them too (`efcil learn --help`).

{grid}
take several values, and every combination becomes a run. So do settings of methods and recipes given with `--vary`:
`efcil run --method efc --vary efm_weight=1 5 10 later.epochs=50 100` is six runs. Without a method, `efcil run` trains
efc and finetune.

## Settings files

`efcil run --config FILE` reads a YAML file with the names of the first column as keys; flags override what it says.

```yaml
method: [efc, lwf]  # a list makes a grid
scenario: cs5
seed: [0, 1, 2]
overrides:  # what --set takes
  later.learning_rate: 0.0005
  efm_weight: 5  # goes to efc, which has it, and not to lwf
vary:  # what --vary takes
  prototype_update: [efm, none]
```

Under `overrides`, the values of a recipe may also be grouped: `later: {{learning_rate: 0.0005, epochs: 20}}`.
The `settings.yaml` in the folder of a run is such a file too, and repeats that very run: its part `resolved`, which
your own files do not have, records the presets and defaults at the time.

`class_order: FILE` names a text file with one class per line, each by its name or its number in the dataset (from 0),
every class once. A JSON list of the same is accepted too. In the scenario `domains` it names the
[domains](datasets.md#domains).
"""

_RECIPES = """\
## Recipes

How a task is optimised. The preset of the dataset has one recipe for the first task and one per family of methods for
later tasks. `--epochs` and `--batch-size` change both; single values are changed with
`--set first_task.learning_rate=0.01` or `--set later.schedule=cosine`. Changing the epochs moves the milestones in
proportion unless they are set too.

A value without effect is refused: milestones or their decay under another schedule than `steps`, milestones beyond
the last epoch, momentum of Adam, `later.rotations` for methods that cannot have it, and all of `later` for methods that
are trained in the first task only (ds-al, fecam, fetril, joint, lda). In a grid it is enough that one run uses it.

A network with pre-trained weights follows the recipes of the preset `pretrained`, whatever the dataset: it is adapted
gently. A method that is trained in the first task only leaves such a network as it is.
"""

_METHODS = """\
## Methods

Settings of a method are changed with `--set efm_weight=5` or, in a file, under `overrides`. In a grid of several
methods each one takes the settings that it has. A setting that has no effect with the others, such as `drift_sigma`
with `prototype_update=none`, is refused; in a grid it is left out of the runs that do not use it. The preset of a
dataset may also change settings, if its benchmark uses a method differently from the method's authors; `--set`
overrides the preset.

The page of a method says what each of its settings means, where its default comes from, and what presets change.
`efcil methods NAME` prints the same, with the values that each may have.
"""

_GENERATED = """
This page is made from the code by `python -m efcil.resolution.documentation docs/settings.md`, as are the tables of
settings in the pages of the methods.
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
    lines = ["| method | settings |", "| --- | --- |"]
    for name, cls in methods.bundled().items():
        settings = ", ".join(f"`{each}`" for each in options(cls.Settings)) or "none of its own"
        lines.append(f"| [{name}](methods/{page_of(name)}#settings) | {settings} |")
    parts.append("\n".join(lines) + "\n" + _GENERATED)
    return "\n".join(parts)


def page_of(method: str) -> str:
    """Return the file in docs/methods that describes a method of this package."""
    return f"{method.replace('++', '-plus-plus')}.md"


def with_settings(page: str, method: str) -> str:
    """Return the page of a method with the table of its settings as it is now."""
    return with_part(page, "settings", settings_of(method))


def with_part(page: str, name: str, text: str) -> str:
    """Return a page with `text` as its part of this name: what stands between two comments, which stay."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise EfcilError(f"The page has no part {name!r}: the lines {begin} and {end}.")
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"


def settings_of(method: str) -> str:
    """Return the settings of a method as a table, with a link to those of a base, and what presets change."""
    from efcil import methods
    from efcil.presets import method_values

    members = options(methods.bundled()[method].Settings).values()
    if not members:
        return "None of its own.\n"
    same: dict[str, list[str]] = {}
    rows = []
    for option in members:
        base, described = _described(method, option)
        default = _short(option.default)
        link = f"[{base}]({page_of(base)}#settings)"
        if base == method:
            rows.append(f"| `{option.name}` | {default} | {_cell(_meaning(option))} |")
        elif described.default == option.default:
            same.setdefault(link, []).append(f"`{option.name}` {default}")
        else:
            rows.append(f"| `{option.name}` | {default} | As in {link}, where it is {_short(described.default)}. |")
    parts = [f"As in {link}: {', '.join(settings)}.\n" for link, settings in same.items()]
    if rows:
        parts.append("\n".join(["| setting | default | meaning and source |", "| --- | --- | --- |", *rows]) + "\n")
    parts += [
        f"Preset of {', '.join(datasets)}: {', '.join(f'`{each}`' for each in values)}.\n"
        for values, datasets in method_values(method).items()
    ]
    return "\n".join(parts)


def _described(method: str, option: Option) -> tuple[str, Option]:
    """Return the method whose page says what a setting means, the first one that this one is built on, and its own."""
    from efcil import methods

    bundled = methods.bundled()
    names = {cls: name for name, cls in bundled.items()}
    for base in reversed(bundled[method].__mro__):
        described = options(base.Settings).get(option.name) if base in names else None
        if described is not None and described.help == option.help:
            return names[base], described
    return method, option


def _meaning(option: Option) -> str:
    choices = [re.escape(show(choice)) for choice in option.choices or ()]
    if all(re.search(rf"\b{choice}\b", option.help) for choice in choices):
        return option.help
    return f"{option.help} {option.expected[:1].upper()}{option.expected[1:]}."


def _short(default: Any) -> str:
    text = show(default)
    return f"{default:.4g}" if isinstance(default, float) and len(text) > 10 else text


def _table(members: Iterable[Option], flags: bool = False) -> str:
    heading = ["setting", *(["flag"] if flags else []), "default", "value", "meaning"]
    lines = [heading, ["---"] * len(heading)]
    for option in members:
        flag = [f"`{option.flags}`"] if flags else []
        default = "" if option.default in (None, {}, ()) else f"`{show(option.default)}`"
        lines.append([f"`{option.name}`", *flag, default, option.expected, _cell(option.help)])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _write(target: Path) -> None:
    from efcil import methods

    target.write_text(documentation(), encoding="utf-8")
    for name in methods.bundled():
        page = target.parent / "methods" / page_of(name)
        page.write_text(with_settings(page.read_text(encoding="utf-8"), name), encoding="utf-8")


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
