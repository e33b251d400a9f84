"""What a study reads of a run, as rows of text: from its folder, or from results files that were kept of it.

Every row starts with dataset, scenario, method (the run's whole label) and seed. A results file holds the rows of one
measure; its columns say of which.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efcil.errors import EfcilError, SettingsError
from efcil.files import write_atomically
from efcil.resolution import scenario_name
from efcil.runfolder import RunFolder

if TYPE_CHECKING:
    from efcil.studies.study import Cell

KEY = ("dataset", "scenario", "method", "seed")
#: dataset, scenario, method's label, seed
Key = tuple[str, str, str, int]
Rows = list[dict[str, str]]
#: The accuracies of classifiers other than the method's own, a row for each.
CLASSIFIERS = "classifiers"
#: The digest of a run's images, which tells whether rows may be compared seed by seed. No reader needs it.
IMAGES = "images"
#: What a table can show, and the measure that it is read from.
METRICS = {
    "A_step": "accuracy",
    "A_inc": "accuracy",
    "task_mean": "tasks",
    "forgetting": "tasks",
    "task_aware_A_step": "tasks",
    "components": "components",
}
#: The first epochs of a task also prepare kernels.
WARM_UP = 1


@dataclass(frozen=True)
class Measure:
    """Something that is measured of a run: its columns, and how a finished run's folder gives its rows."""

    name: str
    columns: tuple[str, ...]
    of: Callable[[RunFolder, Mapping[str, Any]], Rows]


def _accuracy(run: RunFolder, summary: Mapping[str, Any]) -> Rows:
    steps = summary.get("A_step_per_task")
    return [
        {
            **{name: number(summary.get(name)) for name in ("A_step", "A_inc")},
            "A_step_per_task": " ".join(number(value) for value in steps) if isinstance(steps, list) else "",
        }
    ]


def _tasks(run: RunFolder, summary: Mapping[str, Any]) -> Rows:
    return [{name: number(summary.get(name)) for name in ("task_mean", "forgetting", "task_aware_A_step")}]


def _classifiers(run: RunFolder, summary: Mapping[str, Any]) -> Rows:
    found = summary.get("classifiers")
    if not isinstance(found, dict):
        return []
    lines = [line for line in run.read_metrics() if line.get("kind") == "task"]
    rows = []
    for name, values in found.items():
        # Without A_inc, lines of some tasks were lost.
        steps = [line["classifiers"][name] for line in lines] if values.get("A_inc") is not None else []
        rows.append(
            {
                "classifier": str(name),
                **{metric: number(values.get(metric)) for metric in ("A_step", "A_inc")},
                "A_step_per_task": " ".join(map(number, steps)),
                "commit": commit(summary),
            }
        )
    return rows


def _images(run: RunFolder, summary: Mapping[str, Any]) -> Rows:
    return [{"images": summary["data"]}] if isinstance(summary.get("data"), str) else []


def _components(run: RunFolder, summary: Mapping[str, Any]) -> Rows:
    stored = summary.get("stored")
    found = stored.get("components") if isinstance(stored, dict) else None
    if not isinstance(found, dict) or not isinstance(found.get("mean"), int | float):
        return []
    return [
        {"components": number(found["mean"]), "components_std": number(found.get("std")), "commit": commit(summary)}
    ]


def _spectrum(run: RunFolder, summary: Mapping[str, Any]) -> Rows:
    sizes = summary.get("task_sizes") or []
    rows = []
    for task, values in (run.spectrum() or {}).items():
        listed = " ".join(f"{float(value):.5g}" for value in values)
        rows.append({"task": str(task), "classes": str(sum(sizes[:task])), "values": listed, "commit": commit(summary)})
    return rows


def _timing(run: RunFolder, summary: Mapping[str, Any]) -> Rows:
    lines = run.read_metrics()
    epochs: dict[bool, list[float]] = {True: [], False: []}
    for line in lines:
        if line.get("kind") == "epoch" and line["epoch"] > WARM_UP:
            epochs[line["task"] == 1].append(float(line["seconds"]))
    ends = [line["seconds"]["statistics"] for line in lines if line.get("kind") == "task" and line["task"] > 1]
    first, later = (number(statistics.median(epochs[which])) if epochs[which] else "" for which in (True, False))
    return [
        {
            "first_epoch": first,
            "later_epoch": later,
            "end_of_task": number(statistics.median(ends)) if ends else "",
            "at_a_time": str(at_a_time(str(summary.get("command", "")))),
            "hardware": where(summary),
            "commit": commit(summary),
        }
    ]


def _perturbation(run: RunFolder, summary: Mapping[str, Any]) -> Rows:
    return [
        {
            "directions": each.directions,
            "sigma": f"{each.sigma:g}",
            "change": number(each.change, 6),
            "accuracy": number(each.accuracy),
            "unperturbed": number(each.unperturbed),
            "commit": commit(summary),
        }
        for each in run.perturbation() or ()
    ]


MEASURES = {
    measure.name: measure
    for measure in (
        Measure("accuracy", ("A_step", "A_inc", "A_step_per_task"), _accuracy),
        Measure("tasks", ("task_mean", "forgetting", "task_aware_A_step"), _tasks),
        Measure(CLASSIFIERS, ("classifier", "A_step", "A_inc", "A_step_per_task", "commit"), _classifiers),
        Measure(IMAGES, ("images",), _images),
        Measure("components", ("components", "components_std", "commit"), _components),
        Measure("spectrum", ("task", "classes", "values", "commit"), _spectrum),
        Measure("timing", ("first_epoch", "later_epoch", "end_of_task", "at_a_time", "hardware", "commit"), _timing),
        Measure("perturbation", ("directions", "sigma", "change", "accuracy", "unperturbed", "commit"), _perturbation),
    )
}


@dataclass
class Measured:
    """Rows by measure and run, those that were added first being kept; `problems` are runs that could not be read."""

    rows: dict[str, dict[Key, Rows]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, measure: str, key: Key, rows: Rows) -> None:
        """Add what was measured of a run, unless that is known already."""
        if rows:
            self.rows.setdefault(measure, {}).setdefault(key, rows)

    def get(self, measure: str, key: Key) -> Rows:
        """Return the rows of a run, none if they are not known."""
        return self.rows.get(measure, {}).get(key, [])

    def of(self, measure: str, cell: Cell, seed: int) -> Rows:
        """Return the rows of a run as a row of a study reads them: accuracies are those of its classifier."""
        key, classifier = key_of(cell, seed), cell.variant.classifier
        if classifier is None or measure != "accuracy":
            return self.get(measure, key)
        return [row for row in self.get(CLASSIFIERS, key) if row["classifier"] == classifier]

    def has(self, measures: Iterable[str], cell: Cell, seed: int) -> bool:
        """Return whether all of these measures are known for a row of a study."""
        return all(self.of(measure, cell, seed) for measure in measures)

    def read_run(self, run: RunFolder, key: Key, measures: Iterable[str]) -> None:
        """Add what the folder of a finished run says; one that cannot be read becomes a problem."""
        try:
            summary = run.verified_summary()
            for name in measures:
                self.add(name, key, MEASURES[name].of(run, summary))
        except EfcilError as error:
            self.problems.append(f"{run.path}: {error}")

    def read_results(self, folder: Path) -> None:
        """Add the rows of all results files in a folder; CSV files of another kind are left alone."""
        if not folder.is_dir():
            raise SettingsError(f"{folder} is not a folder. Give the one that holds the results files (CSV).")
        for file in sorted(folder.glob("*.csv")):
            self._read_file(file)

    def _read_file(self, file: Path) -> None:
        try:
            with open(file, newline="", encoding="utf-8") as stream:
                reader = csv.DictReader(stream)
                header = reader.fieldnames or ()
                fitting = [each for each in MEASURES.values() if {*KEY, *each.columns} <= set(header)]
                # A file of classifiers has all columns of one of accuracies.
                kinds = [one for one in fitting if not any(set(one.columns) < set(two.columns) for two in fitting)]
                found: dict[str, dict[Key, Rows]] = {}
                for row in reader if kinds else ():
                    key = (row["dataset"], row["scenario"], row["method"], int(row["seed"]))
                    for kind in kinds:
                        values = {column: row[column] or "" for column in kind.columns}
                        found.setdefault(kind.name, {}).setdefault(key, []).append(values)
        except (OSError, ValueError, csv.Error) as error:
            raise SettingsError(f"The results file {file} cannot be read ({error}).") from None
        for name, rows in found.items():
            for key, values_of in rows.items():
                self.add(name, key, values_of)

    def write(self, measure: str, file: Path) -> None:
        """Write all rows of a measure to a results file, sorted."""
        merge_into(file, measure, self.rows.get(measure, {}), old={})


def merge_into(
    file: Path, measure: str, new: Mapping[Key, Rows], old: Mapping[Key, Rows] | None = None, replace: bool = False
) -> list[Key]:
    """Add runs to the results file of a measure; return the new ones. Those that it has stay, unless `replace`."""
    if old is None:
        known = Measured()
        if file.exists():
            known._read_file(file)
        old = known.rows.get(measure, {})
    old = {key: rows for key, rows in old.items() if not replace or key not in new}
    added = [key for key in new if key not in old]
    columns = MEASURES[measure].columns
    lines = [",".join((*KEY, *columns))]
    for key, rows in sorted({**new, **old}.items()):
        lines += [_line([*map(str, key), *(row[column] for column in columns)]) for row in rows]
    if added or not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, "\n".join(lines) + "\n")
    return added


def _line(values: Sequence[str]) -> str:
    return ",".join(f'"{value}"' if "," in value else value for value in (v.replace('"', "'") for v in values))


def key_of(cell: Cell, seed: int) -> Key:
    """Return what a run is called in results."""
    return cell.dataset, scenario_name(cell.settings), cell.label, seed


def number(value: Any, digits: int = 4) -> str:
    """Return a number as text; what was not measured is empty."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return ""
    return f"{value:.{digits}f}".rstrip("0").rstrip(".")


def where(summary: Mapping[str, Any]) -> str:
    """Return the name of the processor or graphics card that a run was trained on; empty if it is not known."""
    hardware, execution = summary.get("hardware"), summary.get("execution")
    if not isinstance(hardware, dict) or not isinstance(execution, dict):
        return ""
    gpus = hardware.get("gpus")
    if execution.get("device") == "cuda" and isinstance(gpus, list) and gpus:
        return str(gpus[0])
    return str(hardware.get("cpu", ""))


def commit(summary: Mapping[str, Any]) -> str:
    """Return the first digits of the commit that finished a run; empty if it is not known."""
    return str(summary.get("commit") or "")[:8]


def at_a_time(command: str) -> int:
    """Return how many runs shared a GPU, as the command says."""
    found = re.search(r"--jobs-per-gpu[ =](\d{1,3})\b", command)
    return int(found[1]) if found else 1
