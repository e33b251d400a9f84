"""Presets: what a dataset is trained with, as data. One YAML file per dataset, found automatically."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from efcil import safe_yaml
from efcil.errors import SettingsError, unknown
from efcil.settings.benchmark import SAME_DATASET
from efcil.settings.options import build, show
from efcil.settings.recipe import Recipe

FIRST_TASK = "first_task"
#: The preset whose recipes are for networks with pre-trained weights.
PRETRAINED = "pretrained"
_KEYS = (
    *("network", "augmentation", "by_image_size", "named_by_data", "class_order", "images_per_class", "answers"),
    *("first_task", "later", "modern", "methods", "own"),
)
_CHANGES_KEYS = ("augmentation", "first_task", "later", "families")


@dataclass(frozen=True)
class SizeChoice:
    """Network and augmentation for images up to a size; `up_to` None is for every larger image."""

    network: str
    augmentation: str
    up_to: int | None = None


@dataclass(frozen=True)
class RecipeChanges:
    """What another recipe changes in those of the papers: one for all methods, or that of a single method.

    A family of methods may need a value of its own, such as a larger batch.
    """

    augmentation: str
    first_task: Mapping[str, Any]
    later: Mapping[str, Any]
    families: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def of_first_task(self, paper: Recipe) -> Recipe:
        """Return the recipe of the first task."""
        return replace(paper, **self.first_task)

    def of_later(self, paper: Recipe, family: str) -> Recipe:
        """Return the recipe of later tasks for a family of methods."""
        return replace(paper, **{**self.later, **self.families.get(family, {})})


@dataclass(frozen=True, eq=False)
class Preset:
    """Network, augmentation and recipes of one dataset, and settings of methods that differ in its benchmark."""

    dataset: str
    choices: tuple[SizeChoice, ...]
    first_task: Recipe
    families: Mapping[str, Recipe]
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    named_by_data: bool = False  # the folder, not the dataset's name, says which images these are
    class_order: str = "efc"
    images_per_class: str = "all"
    answers: str | None = None  # what counts as right: merged or separate; None where classes have no domains
    modern: RecipeChanges | None = None
    #: Recipes of single methods that were published with another first task or augmentation, by method.
    own: Mapping[str, RecipeChanges] = field(default_factory=dict)

    @property
    def pretrained(self) -> bool:
        """Whether its recipes are for networks with pre-trained weights."""
        return self.dataset == PRETRAINED

    def later(self, family: str) -> Recipe:
        """Return the recipe of tasks after the first for a family of methods; `first_task` repeats the first one's."""
        if family == FIRST_TASK:
            return self.first_task
        if family not in self.families:
            raise unknown(f"recipe in the preset of {self.dataset}:", family, [*self.families, FIRST_TASK])
        return self.families[family]

    def network(self, image_size: int | None = None) -> str | None:
        """Return the backbone's name; None if it depends on an image size that is not known yet."""
        choice = self._choose(image_size)
        return None if choice is None else choice.network

    def augmentation(self, image_size: int | None = None) -> str | None:
        """Return the augmentation's name; None if it depends on an image size that is not known yet."""
        choice = self._choose(image_size)
        return None if choice is None else choice.augmentation

    def _choose(self, image_size: int | None) -> SizeChoice | None:
        if len(self.choices) == 1:
            return self.choices[0]
        if image_size is None:
            return None
        return next(c for c in self.choices if c.up_to is None or image_size <= c.up_to)


def presets() -> tuple[str, ...]:
    """Return the names of the datasets that have a preset."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml")))


@cache
def load_preset(dataset: str) -> Preset:
    """Return the preset of a dataset; hub:OWNER/NAME has the preset `hub`."""
    family = dataset.partition(":")[0]
    dataset = SAME_DATASET.get(dataset, family if family in presets() else dataset)
    if dataset not in presets():
        raise unknown("preset", dataset, presets())
    name = f"presets/{dataset}.yaml"
    text = (resources.files(__name__) / f"{dataset}.yaml").read_text(encoding="utf-8")
    return parse_preset(text, dataset, name)


def method_values(method: str) -> dict[tuple[str, ...], list[str]]:
    """Return what presets set of a method's settings (`name=value`), and the datasets whose presets do."""
    found: dict[tuple[str, ...], list[str]] = {}
    for dataset in presets():
        if values := load_preset(dataset).methods.get(method):
            found.setdefault(tuple(f"{name}={show(value)}" for name, value in values.items()), []).append(dataset)
    return found


def parse_preset(text: str, dataset: str, source: str) -> Preset:
    """Read a preset from YAML text; `source` names it in errors."""
    try:
        content = safe_yaml.parse(text)
        if not isinstance(content, dict):
            raise SettingsError("it must consist of 'name: value' lines.")
        for key in content:
            if key not in _KEYS:
                raise unknown("part", str(key), _KEYS)
        for key in ("first_task", "later"):
            if not isinstance(content.get(key), dict):
                raise SettingsError(f"{key!r} is missing or is not a group of settings.")
        return Preset(
            dataset=dataset,
            choices=_read_choices(content),
            first_task=_read_recipe(content["first_task"], "first_task"),
            families={str(name): _read_recipe(values, f"later: {name}") for name, values in content["later"].items()},
            methods=_read_methods(content.get("methods", {})),
            named_by_data=bool(content.get("named_by_data", False)),
            class_order=str(content.get("class_order", "efc")),
            images_per_class=str(content.get("images_per_class", "all")),
            answers=content.get("answers"),
            modern=_read_recipe_changes(content["modern"]) if "modern" in content else None,
            own={name: _read_recipe_changes(values, f"own: {name}") for name, values in content.get("own", {}).items()},
        )
    except safe_yaml.YamlError as error:
        raise SettingsError(f"The preset {source} is not valid YAML: {error}.") from None
    except SettingsError as error:
        raise SettingsError(f"The preset {source} cannot be used: {error}") from None


def _read_recipe(values: Any, place: str) -> Recipe:
    if not isinstance(values, dict):
        raise SettingsError(f"{place} is not a group of settings.")
    try:
        return build(Recipe, values, "setting")
    except SettingsError as error:
        raise SettingsError(f"in {place}: {error}") from None


def _read_recipe_changes(values: Any, place: str = "modern") -> RecipeChanges:
    if not isinstance(values, dict) or not isinstance(values.get("augmentation"), str):
        raise SettingsError(f"{place} must be a group of settings that names an augmentation.")
    for key in values:
        if key not in _CHANGES_KEYS:
            raise unknown(f"part of {place}", str(key), _CHANGES_KEYS)
    families = _read_methods(values.get("families", {}))
    return RecipeChanges(
        augmentation=values["augmentation"],
        first_task=_read_changes(values.get("first_task"), f"{place}: first_task"),
        later=_read_changes(values.get("later"), f"{place}: later"),
        families={name: _read_changes(each, f"{place}: {name}") for name, each in families.items()},
    )


def _read_changes(values: Any, place: str) -> dict[str, Any]:
    """Return those values of a recipe that are stated, in their types."""
    whole = _read_recipe(values, place)
    return {str(name): getattr(whole, str(name)) for name in values}


def _read_methods(groups: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(groups, dict) or not all(isinstance(values, dict) for values in groups.values()):
        raise SettingsError("methods must hold a group of settings for each method it names.")
    return {str(name): dict(values) for name, values in groups.items()}


def _read_choices(content: Mapping[str, Any]) -> tuple[SizeChoice, ...]:
    rows = content.get("by_image_size")
    if rows is None:
        rows = [{"network": content.get("network"), "augmentation": content.get("augmentation")}]
    choices = []
    for row in rows:
        if not isinstance(row, dict) or not row.get("network") or not row.get("augmentation"):
            raise SettingsError("network and augmentation must both be named.")
        choices.append(SizeChoice(str(row["network"]), str(row["augmentation"]), row.get("up_to")))
    limits = [choice.up_to for choice in choices]
    bounded = [limit for limit in limits[:-1] if isinstance(limit, int)]
    if len(bounded) != len(limits) - 1 or limits[-1] is not None or bounded != sorted(set(bounded)):
        raise SettingsError("by_image_size needs growing 'up_to' sizes, and a last entry without one.")
    return tuple(choices)
