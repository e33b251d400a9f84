"""Rows that belong into one table, and what tells them apart.

A run's label names everything that differs from the preset. In a table that is too much and too little: what all rows
share says nothing, and a row with the default of a setting that others vary does not show it. So what all rows share
is said once, and every other setting is a column, with the default's value in the rows that keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from efcil.errors import EfcilError
from efcil.settings.benchmark import MERGED, SEPARATE
from efcil.settings.options import show

if TYPE_CHECKING:
    from efcil.report.table import Row

#: Sees all images at once: a bound for the others, which does not compete with them.
UPPER_BOUNDS = ("joint",)
#: Metrics of which the best rows are marked, and whether more is better. Seconds depend on the machine.
RANKED = {"A_step": True, "A_inc": True, "task_mean": True, "forgetting": False, "task_aware_A_step": True}

#: So many settings are named in full in the name of a row.
FEW_SETTINGS = 2
#: More rows than so many are "all others" in a note.
MOST_LISTED = 3

#: Settings that choose how the first task is trained.
_OF_FIRST_TASKS = ("recipe", "augmentation", "network", "weights", "epochs", "first_task_epochs", "batch_size")
#: Settings that choose images: rows that differ in one of these differ in their images, too.
_OF_IMAGES = ("data", "image_size", "images_per_class", "class_list", "stored_side", "columns", "splits")


@dataclass(frozen=True)
class Group:
    """Rows of one dataset and scenario that were tested on the same kind of images.

    `settings` are the settings that differ, a column each; `shared` is what all rows have changed alike; `held_out` is
    the share of training images that they were tested on, None for the dataset's test images.
    """

    dataset: str
    scenario: str
    held_out: str | None
    rows: tuple[Row, ...]
    settings: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Dataset and scenario, and what the rows were tested on unless it is the test images."""
        return f"{self.dataset} {self.scenario}" + ("" if self.held_out is None else f", {self.tested_on}")

    @property
    def tested_on(self) -> str:
        """The images that the rows were tested on, in words."""
        if self.held_out is None:
            return "test images"
        return f"held-out training images ({_percent(self.held_out)} of each class), no test images"

    def name(self, row: Row) -> str:
        """Return the name of a row in charts: its method, and what tells it from rows of the same method."""
        alike = [other for other in self.rows if other.method == row.method]
        told_by = [name for name in self.settings if len({value_of(other, name) for other in alike}) > 1]
        return _named(row, told_by, alike)

    def whole_name(self, row: Row) -> str:
        """Return the name of a row where there are no columns for settings: its method, and them."""
        return _named(row, self.settings, self.rows)

    @property
    def unpaired(self) -> str | None:
        """Return which rows are means over which seeds where these differ: small differences mean little there."""
        found = self._by(lambda row: " ".join(map(str, row.seeds)))
        return f"rows are means over different seeds: {_listed(found)}" if len(found) > 1 else None

    @property
    def unlike(self) -> str | None:
        """Return which rows were made with which images where these differ, though their settings do not."""
        found = self._by(lambda row: " ".join(row.images))
        chosen = {tuple(value_of(row, name) for name in _OF_IMAGES) for row in self.rows}
        found.pop("", None)  # of earlier versions: not recorded
        return f"rows of different images: {_listed(found)}" if len(found) > 1 and len(chosen) == 1 else None

    @property
    def begun_apart(self) -> str | None:
        """Return which rows began with which first task where these differ, though no column says so."""
        found = self._by(_beginning)
        found.pop("", None)  # of earlier versions: not recorded
        said = any(name in _OF_FIRST_TASKS or name.startswith("first_task.") for name in self.settings)
        return f"rows begin with different first tasks: {_listed(found)}" if len(found) > 1 and not said else None

    def _by(self, key: Callable[[Row], str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for row in self.rows:
            found.setdefault(key(row), []).append(self.name(row))
        return found

    def values(self, row: Row) -> list[str]:
        """Return the row's values of the settings that are columns; empty where its method has no such setting."""
        return [value_of(row, name) for name in self.settings]


def _named(row: Row, settings: Sequence[str], beside: Sequence[Row]) -> str:
    """Return the method of a row and its values of settings.

    Where they are many, values of the preset are left out, if that still tells it from all rows `beside` it.
    """

    def short(each: Row) -> str:
        return _with_values(each, [name for name in settings if name in each.changes])

    if len(settings) > FEW_SETTINGS and [short(each) for each in beside].count(short(row)) == 1:
        return short(row)
    return _with_values(row, settings)


def _with_values(row: Row, settings: Sequence[str]) -> str:
    values = ((name, value_of(row, name)) for name in settings)
    return ", ".join([row.method or row.label, *(f"{name}={value}" for name, value in values if value)])


def groups(rows: Sequence[Row]) -> list[Group]:
    """Gather rows into tables, test images before held-out ones."""
    found: dict[tuple[str, str, str | None], list[Row]] = {}
    for row in rows:
        found.setdefault((row.dataset, row.scenario, row.changes.get("held_out")), []).append(row)
    order = sorted(found, key=lambda key: key[2] is not None)
    return [_group(key, found[key]) for key in order]


def differing(chosen: Sequence[Group]) -> list[str]:
    """Return the settings that differ between rows of these groups, a column each where they are one table."""
    shared = [dict(item.split("=", 1) for item in group.shared) for group in chosen]
    apart = [name for each in shared for name in each if any(other.get(name) != each[name] for other in shared)]
    return list(dict.fromkeys([*(name for group in chosen for name in group.settings), *apart]))


def _group(key: tuple[str, str, str | None], rows: Sequence[Row]) -> Group:
    changes = [{name: value for name, value in row.changes.items() if name != "held_out"} for row in rows]
    shared = [item for item in changes[0].items() if all(item in each.items() for each in changes)]
    names = dict.fromkeys(name for each in changes for name in each if name not in dict(shared))
    ordered = sorted(rows, key=lambda row: (row.method, *(_order(value_of(row, name)) for name in names), row.label))
    return Group(*key, tuple(ordered), tuple(names), tuple(f"{name}={value}" for name, value in shared))


def changes_of(method: str, label: str) -> dict[str, str]:
    """Return what a label says that differs from the preset: `efc+epochs=2` is {"epochs": "2"}."""
    parts = label.removeprefix(method).split("+") if label.startswith(method) else []
    return dict(part.split("=", 1) for part in parts if "=" in part)


def value_of(row: Row, name: str) -> str:
    """Return the value of a setting that the row was trained with; empty where its method has no such setting."""
    if name in row.changes:
        return row.changes[name]
    settings = row.settings
    own = settings.get("method_settings")
    if isinstance(own, Mapping) and name in own:
        return _said(own[name])
    group, dot, field = name.partition(".")
    if dot:
        return _said(_part(settings, group).get(field))
    first, later = _part(settings, "first_task"), _part(settings, "later")
    if name in ("epochs", "batch_size") and name in later:
        value = _said(later[name])
        return value if first.get(name) == later[name] else f"{value} (first task {_said(first.get(name))})"
    if name == "first_task_epochs":
        return _said(first.get("epochs"))
    if name == "class_seed":  # that of the first run is not that of the other seeds
        return "the seed" if settings.get("class_order") == "efc" else ""
    if name == "classifier" and settings:
        return _said(settings.get(name, "own"))
    if name == "test_views" and settings:
        return _said(settings.get(name, 1))
    if name == "images_per_class" and settings:
        return _said(settings.get(name, "all"))
    if name == "recipe":
        return _usual_recipe(row.method)
    if name == "answers" and settings:
        return _said(settings.get(name, SEPARATE))
    return _said(settings.get(name))


def _beginning(row: Row) -> str:
    """Return how the first task of a row was trained, in short; methods may have a recipe of their own."""
    recipe = _part(row.settings, "first_task")
    if not recipe:
        return ""
    epochs, optimiser, rate = (_said(recipe.get(name)) for name in ("epochs", "optimiser", "learning_rate"))
    return f"{epochs} epochs, {optimiser} {rate}, {_said(row.settings.get('augmentation'))}"


def _usual_recipe(method: str) -> str:
    """Return the recipe that a method has unless another is asked for; empty for a method that is not known here."""
    from efcil import methods

    with suppress(EfcilError):
        return methods.get(method).usual_recipe
    return ""


def comparable(rows: Sequence[Row]) -> bool:
    """Return whether all rows count the same as right: answers, or classes."""
    return len({value_of(row, "answers") == MERGED for row in rows}) < 2


def best_and_second(rows: Sequence[Row], metric: str) -> dict[str, str]:
    """Return `best` or `second` by the label of a row; rows that show the same number share a place.

    Rows that count different things as right are not compared.
    """
    if metric not in RANKED or not comparable(rows):
        return {}
    shown = {
        row.label: round(row.ours[metric].mean, 2)
        for row in rows
        if metric in row.ours and row.method not in UPPER_BOUNDS
    }
    places = sorted(set(shown.values()), reverse=RANKED[metric])
    if len(shown) < 2 or len(places) < 2:
        return {}
    names = dict(zip(places, ("best", "second"), strict=False))
    return {label: names[value] for label, value in shown.items() if value in names}


def number_of(value: str) -> float | None:
    """Return the value of a setting as a number, None if it is a word."""
    try:
        return float(value)
    except ValueError:
        return None


def _listed(found: Mapping[str, Sequence[str]]) -> str:
    """Return which rows there are by what is different; many that are alike come last, as all others."""
    *fewer, (value, most) = sorted(found.items(), key=lambda item: len(item[1]))
    listed = [*fewer, (value, ["all others"])] if len(most) > MOST_LISTED else found.items()
    return ", ".join(f"{'; '.join(names)} ({value})" for value, names in listed)


def _part(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = settings.get(name)
    return value if isinstance(value, Mapping) else {}


def _said(value: Any) -> str:
    return "" if value is None else show(tuple(value) if isinstance(value, list) else value)


def _order(value: str) -> tuple[int, float, str]:
    number = number_of(value)
    return (1, 0.0, value) if number is None else (0, number, value)


def _percent(share: str) -> str:
    number = number_of(share)
    return share if number is None else f"{100 * number:g} %"
