"""Settings files and grids: one YAML file or one command line describes many runs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from efcil import safe_yaml
from efcil.errors import Mistakes, SettingsError, SeveralMistakes, unknown
from efcil.resolution.identity import pin
from efcil.settings.benchmark import Settings
from efcil.settings.options import options
from efcil.settings.recipe import STAGES, Recipe
from efcil.settings.training import flat_overrides

# The order of the product: methods change fastest, so that runs that share a first task follow each other.
GRID_FIELDS = ("dataset", "scenario", "class_order", "class_seed", "seed", "method")

# Settings of methods and recipes with several values each; in a file next to `overrides`, which have one.
VARY_KEY = "vary"

# Written by a run below its settings: the presets and defaults at the time.
RESOLVED_KEY = "resolved"


def read_config(path: Path | str) -> dict[str, Any]:
    """Read a settings file. Values of grid fields may be lists; `expand` makes the runs.

    The settings.yaml of an earlier run also records its preset and its method's defaults. If those have changed since,
    the old values are put into the settings, so that the file describes the run that wrote it.
    """
    path = Path(path)
    values = _parse(path)
    resolved = values.pop(RESOLVED_KEY, None)
    try:
        checked = check_values(values)
    except SettingsError as error:
        found = Mistakes()
        for each in error.errors if isinstance(error, SeveralMistakes) else [error]:
            found.add(SettingsError(f"{path}: {each}"))
        found.refuse()
        raise
    if resolved is None:
        return checked
    several = VARY_KEY in checked or any(isinstance(value, list) for value in checked.values())
    if several or not isinstance(resolved, Mapping):
        raise SettingsError(f"{path}: 'resolved' belongs to the record of one run; remove it to write a settings file.")
    pinned = pin(Settings(**checked), resolved, path)
    return {name: getattr(pinned, name) for name in options(Settings)}


def is_record(path: Path | str) -> bool:
    """Return whether a settings file was written by a run, and not by a user."""
    return RESOLVED_KEY in _parse(Path(path))


def load_config(path: Path | str) -> list[Settings]:
    """Read a settings file and return its runs."""
    return expand(read_config(path))


def check_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check names and types of settings, some of which may be lists; one-element lists become plain values."""
    found, checked = Mistakes(), {}
    for name, value in values.items():
        with found.caught():
            checked[name] = _check_varied(value) if name == VARY_KEY else _check_value(name, value)
    found.refuse()
    return checked


def _check_value(name: str, value: Any) -> Any:
    known = options(Settings)
    if name not in known:
        raise _misplaced(str(name)) or unknown("setting", str(name), (*known, VARY_KEY))
    if name == "overrides":
        value = flat_overrides(value)
    if not isinstance(value, list | tuple):
        return known[name].check(value)
    if name not in GRID_FIELDS:
        several = ", ".join(sorted(GRID_FIELDS))
        raise SettingsError(f"Setting {name!r} takes one value, but it is a list. Lists are for {several}.")
    if not value:
        raise SettingsError(f"Setting {name!r} is an empty list. Give at least one value, or leave it out.")
    found, right = Mistakes(), []
    for item in value:
        with found.caught():
            right.append(known[name].check(item))
    found.refuse()
    # Repeated values would train the same run twice into one folder.
    distinct = list(dict.fromkeys(right))
    return distinct if len(distinct) > 1 else distinct[0]


def _check_varied(values: Any) -> dict[str, list[Any]]:
    """Check that every name has a list of values; the values themselves are checked run by run."""
    if not isinstance(values, Mapping):
        raise SettingsError(f"{VARY_KEY!r} must be names with lists of values, such as {{efm_weight: [1, 10]}}.")
    varied = flat_overrides(values)
    for name, value in varied.items():
        if not isinstance(value, list) or not value:
            raise SettingsError(
                f"{VARY_KEY!r} needs a list of values for {name!r}, but it is {value!r}. "
                "One value belongs under 'overrides'."
            )
    return dict(varied)


def _misplaced(name: str) -> SettingsError | None:
    """Return the error for a name that belongs under `overrides`."""
    from efcil import methods

    if name.partition(".")[0] in STAGES:
        return SettingsError(f"{name!r} belongs under 'overrides'. Write overrides: {{{name}: ...}}.")
    if name in options(Recipe):
        return SettingsError(
            f"{name!r} is part of a recipe and belongs under 'overrides'. Write overrides: {{first_task.{name}: ...}} "
            f"or {{later.{name}: ...}}."
        )
    if owners := [key for key, cls in methods.available().items() if name in options(cls.Settings)]:
        return SettingsError(
            f"{name!r} is a setting of {', '.join(owners)} and belongs under 'overrides'. Write overrides: "
            f"{{{name}: ...}}."
        )
    return None


def expand(grid: Mapping[str, Any]) -> list[Settings]:
    """Return one Settings for every combination of the list-valued fields, and of the values under `vary`."""
    checked = check_values(grid)
    varied = checked.pop(VARY_KEY, {})
    overrides = checked.pop("overrides", {})
    if both := [name for name in varied if name in overrides]:
        raise SettingsError(f"Setting {both[0]!r} has one value and is also varied. Leave out one of the two.")
    axes = [name for name in GRID_FIELDS if isinstance(checked.get(name), list)]
    return [
        Settings(**{**checked, **dict(zip(axes, combination, strict=True)), "overrides": {**overrides, **chosen}})
        for combination in itertools.product(*(checked[name] for name in axes))
        for chosen in _choices(varied)
    ]


def _choices(varied: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values())]


def to_yaml(settings: Settings, resolved: Mapping[str, Any] | None = None) -> str:
    """Write settings as YAML that `read_config` reads back exactly; `resolved` is added below them."""
    values = {name: getattr(settings, name) for name in options(Settings)}
    text = _dump(values)
    if resolved is not None:
        text += "\n# With the preset and the method's defaults filled in.\n" + _dump({RESOLVED_KEY: dict(resolved)})
    return text


def _parse(path: Path) -> dict[str, Any]:
    try:
        content = safe_yaml.read(path)
    except FileNotFoundError:
        raise SettingsError(f"There is no settings file {path}. Check the path given to --config.") from None
    except OSError as error:
        raise SettingsError(f"The settings file {path} cannot be read: {error}.") from None
    except safe_yaml.YamlError as error:
        raise SettingsError(f"The settings file {path} is not valid YAML: {error}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"The settings file {path} must consist of 'name: value' lines, but it does not.")
    return content


def _dump(values: Mapping[str, Any]) -> str:
    def written(as_it_is: bool) -> str:
        return yaml.safe_dump(_plain(values), sort_keys=False, allow_unicode=as_it_is, width=120)

    # Invisible characters, and those a file cannot store, are not all read back unless they are written as escapes.
    text = written(as_it_is=True)
    return text if all(c.isprintable() or c == "\n" for c in text) else written(as_it_is=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
