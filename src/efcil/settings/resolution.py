"""What settings come to once the preset and the method's defaults are filled in, and what follows from that.

A run's folder name (`label`) and the check that a folder holds the same run (`identity`) both compare what settings
come to, not how they were written: `--epochs 100` where the preset says 100 is the plain run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from efcil.errors import SettingsError, unknown
from efcil.settings.model import NAMED_CLASS_ORDERS, STAGES, Recipe, Settings
from efcil.settings.options import completed, method_settings, options, show

LONGEST_LABEL = 80
_FROM_PRESET = ("network", "augmentation", "epochs", "first_task_epochs", "batch_size")


@dataclass(frozen=True)
class Resolved:
    """Settings with nothing left open, except where a preset chooses by the size of images not yet loaded."""

    network: str | None
    augmentation: str | None
    first_task: Recipe
    later: Recipe
    method: Any


def resolve(settings: Settings, image_size: int | None = None) -> Resolved:
    """Fill in preset and method defaults.

    `image_size` is the size the loaded images have. Without it, a preset that chooses by size leaves network and
    augmentation at None unless the settings name them or the size.
    """
    from efcil import methods
    from efcil.presets import load_preset

    cls = methods.get(settings.method)
    preset = load_preset(settings.dataset)
    own, stages = split_overrides(settings)
    _refuse_misplaced(own, cls)
    method = method_settings(cls, {**preset.methods.get(settings.method, {}), **own})
    later = cls.recipe(method, preset.later(cls.traits(method).family))
    first_epochs = settings.epochs if settings.first_task_epochs is None else settings.first_task_epochs
    recipes = {
        "first_task": _adjust(preset.first_task, first_epochs, settings.batch_size, stages["first_task"], "first_task"),
        "later": _adjust(later, settings.epochs, settings.batch_size, stages["later"], "later"),
    }
    size = settings.image_size if image_size is None else image_size
    return Resolved(
        network=settings.network or preset.network(size),
        augmentation=settings.augmentation or preset.augmentation(size),
        method=method,
        **recipes,
    )


def _refuse_misplaced(overrides: Mapping[str, Any], cls: type) -> None:
    """Raise where something of a recipe or of the run is given as if it were the method's."""
    known = options(Settings)
    for name in overrides:
        if name in options(getattr(cls, "Settings", Recipe)):
            continue
        if name in STAGES:
            raise SettingsError(f"{name!r} is a recipe, of which one value at a time is set, such as {name}.epochs.")
        if name in known and name not in options(Recipe):
            raise SettingsError(
                f"{name!r} is no setting of a method. Give it as {known[name].flags}, or by its name in a file."
            )
        if name in options(Recipe):
            both = f", or {known[name].flags} for both" if name in known else ""
            raise SettingsError(
                f"{name!r} is part of a recipe: first_task.{name} is for the first task, later.{name} for the others"
                f"{both}."
            )


def split_overrides(settings: Settings) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Separate the method's own settings from those of the recipes (`first_task.` and `later.`)."""
    own: dict[str, Any] = {}
    stages: dict[str, dict[str, Any]] = {stage: {} for stage in STAGES}
    for name, value in settings.overrides.items():
        stage, dot, field = name.partition(".")
        if not dot:
            own[name] = value
        elif stage in stages:
            stages[stage][field] = value
        else:
            raise unknown("group of settings", stage, STAGES)
    return own, stages


def _adjust(
    recipe: Recipe, epochs: int | None, batch_size: int | None, overrides: Mapping[str, Any], stage: str
) -> Recipe:
    known = options(Recipe)
    checked: dict[str, Any] = {}
    for name, value in overrides.items():
        if name not in known:
            raise unknown(f"setting of {stage}", name, known)
        checked[name] = known[name].check(value)
    epochs = checked.pop("epochs", epochs)
    if epochs is not None:
        recipe = recipe.with_epochs(epochs)
    if batch_size is not None:
        recipe = replace(recipe, batch_size=batch_size)
    return replace(recipe, **checked)


def scenario_name(settings: Settings) -> str:
    """Return the scenario's name in folders and tables, such as `cs10` or `custom-7-first-20`."""
    if settings.tasks is None:
        return settings.scenario
    first = "" if settings.first_task_classes is None else f"-first-{settings.first_task_classes}"
    return f"{settings.scenario}-{settings.tasks}{first}"


def label(settings: Settings, *, whole: bool = False) -> str:
    """Return the method's name in folders and tables: the plain name, plus whatever differs from the preset.

    Dataset, scenario and seed have places of their own and do not appear; neither does what only says where or how
    safely a run is computed. (A device decides the precision that `auto` stands for: the report notes such seeds.)
    A long name ends in a digest instead, for the sake of folders, unless the `whole` of it is asked for.
    """
    from efcil.presets import load_preset

    settings = _simplify(settings)
    default = Settings()
    parts = [f"{name}={show(value)}" for name, value in sorted(settings.overrides.items())]
    if load_preset(settings.dataset).named_by_data and settings.data is not None:
        parts.append(f"data={Path(settings.data).name}")
    for name in ("class_order", "class_seed", "held_out", "image_size", "classifier", *_FROM_PRESET):
        value = getattr(settings, name)
        if value != getattr(default, name):
            is_file = name == "class_order" and value not in NAMED_CLASS_ORDERS
            parts.append(f"{name}={Path(value).stem if is_file else show(value)}")
    for name in ("precision", "path", "deterministic"):
        if getattr(settings, name) != getattr(default, name):
            parts.append(f"{name}={show(getattr(settings, name))}")
    text = "+".join([settings.method, *map(_for_folders, parts)])
    if whole or len(text) <= LONGEST_LABEL:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return text[: LONGEST_LABEL - 9].rstrip("+=,.-") + "-" + digest


def _for_folders(part: str) -> str:
    """Return part of a label in characters that any folder's name may have; what is lost by that, a digest stands for.

    Spaces may become hyphens without one, and the exponents of large numbers lose their plus: 1e+06 is 1e06.
    """
    part = re.sub(r"(?<=\de)\+(?=\d)", "", re.sub(r"\s+", "-", part))
    plain = re.sub(r"[^\w.=,-]+", "-", part, flags=re.ASCII)
    return plain if plain == part else f"{plain}-{hashlib.sha256(part.encode(errors='surrogatepass')).hexdigest()[:8]}"


def _simplify(settings: Settings) -> Settings:
    """Drop, one after the other, the settings that say what would be so anyway."""
    target = resolve(settings)
    typed = _typed_overrides(settings, target)
    settings = replace(settings, overrides=typed)
    for name in typed:
        without = replace(settings, overrides={k: v for k, v in settings.overrides.items() if k != name})
        if resolve(without) == target:
            settings = without
    for name in _FROM_PRESET:
        open_again: dict[str, Any] = {name: None}
        without = replace(settings, **open_again)
        if resolve(without) == target:
            settings = without
    return settings


def _typed_overrides(settings: Settings, resolved: Resolved) -> dict[str, Any]:
    def value(name: str) -> Any:
        stage, dot, field = name.partition(".")
        return getattr(getattr(resolved, stage), field) if dot else getattr(resolved.method, name)

    return {name: value(name) for name in settings.overrides}


def identity(settings: Settings) -> dict[str, Any]:
    """Return everything that decides the result of a run, as plain values: equal identities are the same run."""
    from efcil.presets import load_preset

    resolved = resolve(settings)
    by_name = {
        "method": settings.method,
        "dataset": settings.dataset,
        "scenario": scenario_name(settings),
        "seed": settings.seed,
        "class_seed": settings.effective_class_seed,
        "class_order": class_order_identity(settings.class_order),
        "held_out": settings.held_out,
        "image_size": settings.image_size,
        "network": resolved.network,
        "augmentation": resolved.augmentation,
        "precision": settings.precision,
        "path": settings.path,
        "deterministic": settings.deterministic,
    }
    if settings.classifier != Settings().classifier:
        by_name["classifier"] = settings.classifier
    if load_preset(settings.dataset).named_by_data and settings.data is not None:
        by_name["data"] = str(Path(settings.data).expanduser().absolute())
    for stage in STAGES:
        by_name[stage] = _as_plain(getattr(resolved, stage))
    by_name["method_settings"] = _as_plain(resolved.method)
    return by_name


def _as_plain(instance: Any) -> dict[str, Any]:
    values = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def class_order_identity(class_order: str) -> str:
    """Return what tells a class order from others: its name, or a digest of what its file says."""
    if class_order in NAMED_CLASS_ORDERS:
        return class_order
    path = Path(class_order).expanduser()
    if not path.is_file():
        return class_order
    # The order is what the file says, wherever it lies.
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two identities: dotted name -> (stored, wanted)."""
    old, new = _flatten(_completed(stored)), _flatten(_completed(wanted))
    return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


def _completed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity with the settings that did not exist when it was written."""
    from efcil import methods

    known: dict[str, type] = dict.fromkeys(STAGES, Recipe)
    with contextlib.suppress(SettingsError):  # a method that is not there any more: what is stored is all there is
        known["method_settings"] = methods.get(str(stored.get("method")))
    parts = {name: completed(cls, stored[name]) for name, cls in known.items() if isinstance(stored.get(name), Mapping)}
    if "later" in parts and "method_settings" in parts:
        with contextlib.suppress(SettingsError):
            implied = recipe_as_implied(str(stored["method"]), str(stored["dataset"]), parts["method_settings"])
            parts["later"] |= {name: value for name, value in implied.items() if name not in stored["later"]}
    return {**stored, **parts}


def recipe_as_implied(method: str, dataset: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what records from before these fields existed mean by leaving them out of the recipe of later tasks.

    Methods decided then, as they and the families of presets do now. `values` are the method's settings.
    """
    from efcil import methods
    from efcil.presets import load_preset

    cls = methods.get(method)
    own = method_settings(cls, values)
    recipe = cls.recipe(own, load_preset(dataset).later(cls.traits(own).family))
    return {"gradient_clip": recipe.gradient_clip, "normalisation": recipe.normalisation}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def pin(settings: Settings, stored: Mapping[str, Any], source: Path) -> Settings:
    """Return settings that come to the identity `stored`, whatever presets and defaults have become since."""
    fields: dict[str, Any] = {}
    overrides = dict(settings.overrides)
    for name, (old, _) in differences(stored, identity(settings)).items():
        group, _, field = name.partition(".")
        if group in STAGES:
            overrides[name] = old
        elif group == "method_settings":
            overrides[field] = old
        elif name in ("network", "augmentation"):
            fields[name] = old
        elif name != "data":
            raise SettingsError(
                f"{source}: {name} was {show(old)} when this was written, and its settings no longer lead there. "
                "Restore the class order file it names, or remove the part called 'resolved'."
            )
    return replace(settings, **fields, overrides=overrides)


def validate(settings: Settings) -> Settings:
    """Check every name in the settings before anything is trained; return them with the overrides' types settled."""
    from efcil import methods
    from efcil.core import classifiers
    from efcil.data.augment import AUGMENTATIONS
    from efcil.data.scenario import SCENARIOS
    from efcil.data.sources import SourceOptions, sources
    from efcil.network.resnet import NETWORKS

    for kind, name, valid in (
        ("dataset", settings.dataset, sources()),
        ("scenario", settings.scenario, SCENARIOS),
        ("network", settings.network, NETWORKS),
        ("augmentation", settings.augmentation, AUGMENTATIONS),
    ):
        if name is not None and name not in valid:
            raise unknown(kind, name, valid)
    data = None if settings.data is None else Path(settings.data).expanduser()
    sources()[settings.dataset].check(data, SourceOptions(held_out=settings.held_out, image_size=settings.image_size))
    if settings.class_order not in NAMED_CLASS_ORDERS and not Path(settings.class_order).expanduser().is_file():
        problem = unknown("class order", settings.class_order, NAMED_CLASS_ORDERS)
        raise SettingsError(f"{problem} It is not a file either.")
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", settings.device):
        raise unknown("device", settings.device, ("auto", "cpu", "cuda", "cuda:0"))
    resolved = resolve(settings)
    keeps = methods.get(settings.method).traits(resolved.method).keeps
    classifiers.check(settings.classifier, settings.method, keeps)
    return replace(settings, overrides=_typed_overrides(settings, resolved))
