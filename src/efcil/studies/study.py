"""Studies: which runs a table or a figure needs, and how they are read. A study is a YAML file, without code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from efcil import safe_yaml
from efcil.errors import SettingsError, unknown
from efcil.report.paper import PaperValue, published
from efcil.resolution import label
from efcil.settings import Settings, options
from efcil.settings.training import flat_overrides
from efcil.studies.measures import METRICS

#: Epochs of `--fast`, unless the study has its own.
FAST_EPOCHS = 5
_KEYS = (
    "title", "about", "makes", "table", "datasets", "scenarios", "seeds", "settings", "runs", "read", "fast_epochs",
    "published", "notes", "reference",
)  # fmt: skip
_NEEDED = ("title", "about", "datasets", "scenarios", "runs", "read")
_RUN_KEYS = ("name", "method", "overrides", "classifier", "scenarios", "datasets")
_PUBLISHED_KEYS = ("dataset", "scenario", "run", "metric", "mean", "std")
#: Settings that the study's own lists say.
_OWN = ("method", "dataset", "scenario", "seed", "data", "overrides", "epochs")


@dataclass(frozen=True)
class Variant:
    """A row of a study: a method with settings. Without `scenarios` or `datasets` it is in all of the study's.

    Its accuracies are those of `classifier`, or of the method's own without one: rows may read the same run.
    """

    name: str
    method: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    classifier: str | None = None
    scenarios: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reading:
    """A reader, by name, and what it is given."""

    reader: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """Runs, and how they become tables and figures. `reference` is the row that the others are compared with."""

    name: str
    title: str
    about: str
    makes: str
    table: str
    datasets: tuple[str, ...]
    scenarios: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: Mapping[str, Any]
    runs: tuple[Variant, ...]
    read: tuple[Reading, ...]
    fast_epochs: int = FAST_EPOCHS
    published: Mapping[tuple[str, str, str, str], PaperValue] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reference: str | None = None

    def beside(self, reference: str) -> Study:
        """Return the study with its rows compared with another one of them."""
        _refuse_others("run", [reference], [variant.name for variant in self.runs], self.name)
        return replace(self, reference=reference)

    @property
    def whole_title(self) -> str:
        """The title, which says so where held-out training images take the place of test images."""
        share = self.settings.get("held_out")
        return f"{self.title} (held-out training images, no test images)" if share else self.title

    @property
    def fast_schedule(self) -> str:
        """The short schedule, in words."""
        return f"{self.fast_epochs} epoch{'s' if self.fast_epochs > 1 else ''} a task"

    @property
    def choices(self) -> dict[str, tuple[str, ...]]:
        """What may be chosen of the study; a row by its own name or by that of its method."""
        rows = dict.fromkeys(name for variant in self.runs for name in (variant.method, variant.name))
        return {"dataset": self.datasets, "scenario": self.scenarios, "method": tuple(rows)}

    def cells(
        self,
        datasets: Sequence[str] | None = None,
        scenarios: Sequence[str] | None = None,
        methods: Sequence[str] | None = None,
        fast: bool = False,
        data: str | None = None,
    ) -> list[Cell]:
        """Return what the study compares, in its order; a selection that is not part of the study raises."""
        for (kind, known), names in zip(self.choices.items(), (datasets, scenarios, methods), strict=True):
            _refuse_others(kind, names, known, self.name)
        found = []
        for dataset in datasets or self.datasets:
            for scenario in scenarios or self.scenarios:
                for variant in self.runs:
                    here = dataset in (variant.datasets or self.datasets)
                    here = here and scenario in (variant.scenarios or self.scenarios)
                    if here and (methods is None or {variant.method, variant.name} & set(methods)):
                        found.append(self._cell(dataset, scenario, variant, fast, data))
        return found

    def _cell(self, dataset: str, scenario: str, variant: Variant, fast: bool, data: str | None) -> Cell:
        chosen: dict[str, Any] = {"method": variant.method, "dataset": dataset, "scenario": scenario}
        chosen |= {**self.settings, "overrides": dict(variant.overrides)}
        settings = Settings(**{**chosen, **(self._short(variant) if fast else {})}, data=data)
        # Published numbers are listed by what differs from the paper's recipe. A study with another one (other epochs,
        # held-out images) has other labels, and is compared with its own `published` alone.
        plain = Settings(**chosen)
        return Cell(self, dataset, scenario, variant, settings, label(settings, whole=True), label(plain, whole=True))

    def _short(self, variant: Variant) -> dict[str, Any]:
        """Return the settings of a short schedule: no number of epochs that is named elsewhere may exceed it."""
        most = self.fast_epochs
        longer = {
            name
            for name, value in variant.overrides.items()
            if name.endswith(".epochs") and isinstance(value, int | float) and value >= most
        }
        first = self.settings.get("first_task_epochs")
        return {
            "epochs": most,
            "first_task_epochs": None if first is None or first >= most else first,
            "overrides": {name: value for name, value in variant.overrides.items() if name not in longer},
        }


@dataclass(frozen=True)
class Cell:
    """One row of runs, over all seeds. `label` is the name of its runs, `plain` that of the published number."""

    study: Study
    dataset: str
    scenario: str
    variant: Variant
    settings: Settings
    label: str
    plain: str

    def published(self, metric: str) -> PaperValue | None:
        """Return the number of the paper, None if it has none."""
        own = self.study.published.get((self.dataset, self.scenario, self.variant.name, metric))
        return own or published().get((self.dataset, self.scenario, self.plain, metric))


def names() -> tuple[str, ...]:
    """Return the names of the paper's studies, in the order of the paper."""
    order = safe_yaml.parse((resources.files(__package__) / "order.yaml").read_text(encoding="utf-8"))
    return tuple(str(name) for name in order)


def load(name: str) -> Study:
    """Return a study of the paper by name, or one of the user's own by the path of its YAML file."""
    if name in names():
        return _bundled(name)
    path = Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        problem = unknown("study", name, names())
        raise SettingsError(f"{problem} A study of your own is given by its file, which ends in .yaml.")
    try:
        content = safe_yaml.read(path)
    except FileNotFoundError:
        raise SettingsError(f"There is no study {path}. Give the path of its YAML file, or a name.") from None
    except OSError as error:
        raise SettingsError(f"The study {path} cannot be read: {error}.") from None
    except safe_yaml.YamlError as error:
        raise SettingsError(f"The study {path} is not valid YAML: {error}.") from None
    return parse(content, path.stem, str(path))


@cache
def _bundled(name: str) -> Study:
    content = safe_yaml.parse((resources.files(__package__) / f"{name}.yaml").read_text(encoding="utf-8"))
    return parse(content, name, f"studies/{name}.yaml")


def parse(content: Any, name: str, source: str) -> Study:
    """Read a study from the content of its file; `source` names it in errors."""
    try:
        if not isinstance(content, dict):
            raise SettingsError("it must consist of 'name: value' lines.")
        _refuse_unknown("part", content, _KEYS)
        if missing := [key for key in _NEEDED if not content.get(key)]:
            raise SettingsError(f"{missing[0]!r} is missing.")
        study = Study(
            name=name,
            title=str(content["title"]),
            about=str(content["about"]),
            makes=str(content.get("makes", "a table")),
            table=str(content.get("table", "")),
            datasets=_words(content["datasets"], "datasets"),
            scenarios=_words(content["scenarios"], "scenarios"),
            seeds=_seeds(content.get("seeds", [0])),
            settings=_settings(content.get("settings", {})),
            runs=_runs(content["runs"]),
            read=_readings(content["read"]),
            fast_epochs=_whole(content.get("fast_epochs", _fast_epochs(content)), "fast_epochs"),
            published=_published(content.get("published", [])),
            notes=_words(content.get("notes", []), "notes"),
            reference=None if content.get("reference") is None else str(content["reference"]),
        )
        _refuse_strangers(study)
    except SettingsError as error:
        raise SettingsError(f"The study {source} cannot be used: {error}") from None
    return study


def _refuse_strangers(study: Study) -> None:
    """Refuse names that are not the study's: what they stand for would be left out, and nobody told."""
    rows = [variant.name for variant in study.runs]
    _refuse_others("run", None if study.reference is None else [study.reference], rows, study.name)
    for variant in study.runs:
        if variant.classifier is not None and study.settings.get("classifier") != "all":
            raise SettingsError(
                f"the run {variant.name!r} reads the classifier {variant.classifier!r}, which its runs do not record. "
                "Add 'classifier: all' to 'settings'."
            )
        _refuse_others("dataset", variant.datasets, study.datasets, study.name)
        _refuse_others("scenario", variant.scenarios, study.scenarios, study.name)
    for reading in study.read:
        _refuse_others("run", reading.options.get("reconstructed"), rows, study.name)
        for metric in reading.options.get("metrics", ()):
            if METRICS[metric] == "tasks" and any(variant.classifier for variant in study.runs):
                raise SettingsError(f"{metric} is recorded for a method's own classifier alone: leave it out.")
    for dataset, scenario, run, metric in study.published:
        _refuse_others("dataset", [dataset], study.datasets, study.name)
        _refuse_others("scenario", [scenario], study.scenarios, study.name)
        _refuse_others("run", [run], rows, study.name)
        if metric not in METRICS:
            raise unknown("metric", metric, METRICS)


def _words(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise SettingsError(f"{key!r} must be a list of names.")
    return tuple(value)


def _whole(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"{key!r} must be a whole number of at least 1.")
    return value


def _fast_epochs(content: Mapping[str, Any]) -> int:
    """Return the epochs of a short schedule: never more than the study's own."""
    own = _settings(content.get("settings", {})).get("epochs")
    return FAST_EPOCHS if own is None else min(FAST_EPOCHS, own)


def _seeds(value: Any) -> tuple[int, ...]:
    wrong = not isinstance(value, list) or not value
    if wrong or any(isinstance(seed, bool) or not isinstance(seed, int) or seed < 0 for seed in value):
        raise SettingsError("'seeds' must be a list of whole numbers, such as [0, 1, 2].")
    return tuple(dict.fromkeys(value))


def _settings(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SettingsError("'settings' must be a group of settings that all of its runs share.")
    known = options(Settings)
    for name in value:
        if name in _OWN and name != "epochs":
            raise SettingsError(f"'settings' must not name {name!r}, which the study says elsewhere.")
        if name not in known:
            raise unknown("setting", str(name), known)
    return {str(name): known[name].check(each) for name, each in value.items()}


def _runs(value: Any) -> tuple[Variant, ...]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise SettingsError("'runs' must be a list of groups, such as {name: EFC, method: efc}.")
    found = []
    for each in value:
        _refuse_unknown("part of a run", each, _RUN_KEYS)
        if not isinstance(each.get("method"), str):
            raise SettingsError("a run must name its method.")
        found.append(
            Variant(
                name=str(each.get("name", each["method"])),
                method=each["method"],
                overrides=flat_overrides(each.get("overrides", {})),
                classifier=_classifier(each.get("classifier")),
                scenarios=_words(each.get("scenarios", []), "scenarios"),
                datasets=_words(each.get("datasets", []), "datasets"),
            )
        )
    labels = [variant.name for variant in found]
    if twice := [name for name in labels if labels.count(name) > 1]:
        raise SettingsError(f"two runs are called {twice[0]!r}.")
    return tuple(found)


def _classifier(value: Any) -> str | None:
    from efcil.core import classifiers

    recorded = [name for name in classifiers.NAMES if name not in (classifiers.AUTO, classifiers.ALL)]
    if value is not None and value not in recorded:
        raise unknown("classifier", str(value), recorded)
    return None if value in (None, classifiers.OWN) else str(value)


def _readings(value: Any) -> tuple[Reading, ...]:
    from efcil.studies.readers import READERS

    if not isinstance(value, list) or not all(isinstance(each, dict) and "reader" in each for each in value):
        raise SettingsError("'read' must be a list of readers, such as {reader: table, metrics: [A_step, A_inc]}.")
    for each in value:
        if each["reader"] not in READERS:
            raise unknown("reader", str(each["reader"]), READERS)
        _refuse_unknown(f"option of {each['reader']}", each, ("reader", *READERS[each["reader"]].options))
        _words(each.get("reconstructed", []), "reconstructed")
        for metric in _words(each.get("metrics", []), "metrics"):
            if metric not in METRICS:
                raise unknown("metric", metric, METRICS)
        if each.get("metrics") == []:
            raise SettingsError("'metrics' must name at least one metric.")
    return tuple(Reading(each["reader"], {k: v for k, v in each.items() if k != "reader"}) for each in value)


def _published(value: Any) -> dict[tuple[str, str, str, str], PaperValue]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise SettingsError("'published' must be a list of groups with dataset, scenario, run, metric, mean and std.")
    found = {}
    for each in value:
        _refuse_unknown("part of a published number", each, _PUBLISHED_KEYS)
        place = tuple(str(each.get(key, "")) for key in _PUBLISHED_KEYS[:4])
        if place in found:
            raise SettingsError(f"two numbers are published for {' '.join(place)}.")
        found[place] = PaperValue(_number(each.get("mean")), _std(each.get("std")), "")
    return found  # type: ignore[return-value]


def _std(value: Any) -> float | None:
    std = None if value is None else _number(value)
    if std is not None and std < 0:
        raise SettingsError("the std of a published number must not be negative.")
    return std


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SettingsError("mean and std of a published number must be numbers.")
    return float(value)


def _refuse_unknown(kind: str, given: Mapping[Any, Any], known: Sequence[str]) -> None:
    for key in given:
        if key not in known:
            raise unknown(kind, str(key), known)


def _refuse_others(kind: str, chosen: Sequence[str] | None, known: Sequence[str], study: str) -> None:
    for each in chosen or ():
        if each not in known:
            raise unknown(f"{kind} of the study {study}:", each, known)
