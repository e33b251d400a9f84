"""The folder of a run, written so that a killed run leaves no half-written file.

<output>/<dataset>/<scenario>/<label>/seed<k>/
  settings.yaml   exactly what ran; `efcil run --config settings.yaml` runs it again
  metrics.jsonl   one line per epoch and per task
  accuracy.csv    accuracy on every task after every task, task-agnostic and task-aware
  classes.csv     test images and right answers of every class after every task
  confusion.csv   which classes were answered for which, after the last task
  spectrum.csv    eigenvalues of the method's feature matrix after every task, if it keeps one
  summary.json    the results, and the code and environment that gave them; if it exists, the run has finished
  model/          a model folder: weights, state of the method, and how far the run is
  partial/        the checkpoint within the current task
  log.txt
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from efcil import safe_json, safe_yaml
from efcil.engine import checkpoint
from efcil.environment import environment
from efcil.errors import EfcilError, RunFolderError
from efcil.evaluation import probes
from efcil.evaluation.classification import Confusion
from efcil.evaluation.metrics import results
from efcil.evaluation.probes import ClassCount, Perturbation, Probes
from efcil.files import (
    is_regular,
    make_folder,
    open_regular,
    read_regular,
    refuse_foreign_file,
    refuse_foreign_folder,
    write_atomically,
    write_own,
)
from efcil.resolution import identity, label, load_config, scenario_name, to_yaml
from efcil.resolution.config import RESOLVED_KEY
from efcil.resolution.identity import differences
from efcil.resolution.unused import without_unused
from efcil.settings import Settings
from efcil.settings.options import show

#: Names of the files of a model folder.
MODEL = "model"
AGNOSTIC, AWARE, SIZES = "task-agnostic", "task-aware", "classes"
__all__ = ["RunFolder", "RunFolderError", "environment", "find_runs", "locate", "write_atomically"]

#: Most characters of a folder's name, and so of a run's.
LONGEST_NAME = 255
#: Most bytes of a table that are read: a confusion of several thousand classes.
MOST_BYTES = 64 * 2**20
Read = TypeVar("Read")
REQUIRED = ("method", "label", "dataset", "scenario", "seed", "A_step", "A_inc")


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.settings_file = self.path / "settings.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.accuracy_file = self.path / "accuracy.csv"
        self.probe_files = {name: self.path / name for name in probes.COLUMNS}
        self.summary_file = self.path / "summary.json"
        self.model = self.path / "model"
        self.partial = self.path / "partial"
        self.log_file = self.path / "log.txt"

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunFolder) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def is_finished(self, settings: Settings | None = None) -> bool:
        """Return whether the run has ended with a summary; a summary that cannot be read raises.

        With `settings`, a folder that holds another run raises too, so that no run is skipped by mistake.
        """
        if settings is not None:
            self._refuse_other(identity(settings))
        if not self.summary_file.exists():
            return False
        summary = self.read_summary()
        if settings is not None:
            self._refuse_other_results(summary, identity(settings))
        return True

    def write_settings(self, settings: Settings) -> None:
        """Record the settings; refuse a folder that holds another run, and say what differs."""
        wanted = identity(settings)
        self.refuse_foreign()
        self._refuse_other(wanted)
        write_own(self.settings_file, to_yaml(settings, resolved=wanted))

    def refuse_foreign(self) -> None:
        """Refuse links, pipes and devices in the place of our files and folders, before training."""
        own = (self.settings_file, self.metrics_file, self.accuracy_file, self.summary_file, self.log_file)
        for file in (*own, *self.probe_files.values()):
            refuse_foreign_file(file)
        for folder in (self.model, self.path / "partial"):
            refuse_foreign_folder(folder)

    def _refuse_other(self, wanted: Mapping[str, Any]) -> None:
        stored = self.read_identity()
        changed = {} if stored is None else differences(stored, wanted)
        if changed:
            pairs = changed.items()
            listed = "; ".join(f"{name} is {show(old)} there and {show(new)} now" for name, (old, new) in pairs)
            raise RunFolderError(
                f"{self.path} holds a run with other settings: {listed}. "
                "Choose another --output, or remove that folder to start over."
            )

    def _refuse_other_results(self, summary: Mapping[str, Any], wanted: Mapping[str, Any] | None) -> None:
        """Refuse a summary that was copied in from another run; earlier versions do not say which run it is of."""
        stored = summary.get("identity")
        if wanted is None or not isinstance(stored, dict):
            return
        changed = differences(stored, wanted).items()
        if listed := "; ".join(f"{name} is {show(old)} there and {show(new)} here" for name, (old, new) in changed):
            raise RunFolderError(
                f"{self.summary_file} is of another run: {listed}. Put the right one back, or remove it to finish "
                "this run."
            )

    def read_identity(self) -> dict[str, Any] | None:
        """Return the identity of the run that this folder was created for, None if there is none yet."""
        if not self.settings_file.exists():
            return None
        try:
            content = safe_yaml.parse(read_regular(self.settings_file, safe_yaml.MOST_BYTES).decode())
            stored = content[RESOLVED_KEY]
        except (OSError, ValueError, safe_yaml.YamlError, KeyError, TypeError):
            raise _damaged(self.settings_file) from None
        if not isinstance(stored, dict):
            raise _damaged(self.settings_file)
        return stored

    def read_settings(self) -> Settings:
        """Return the settings that describe this run today, even if presets and defaults have changed since.

        Recorded values that had no effect on the run are left out.
        """
        refuse_foreign_file(self.settings_file)
        (settings,) = load_config(self.settings_file)
        return without_unused(settings)

    def remove_leftovers(self) -> None:
        """Remove the temporary files of a killed process; no other process may be writing."""
        for leftover in self.path.glob(".*.tmp"):
            if is_regular(leftover):
                leftover.unlink(missing_ok=True)

    def append_metrics(self, values: Mapping[str, Any]) -> None:
        """Add one line to metrics.jsonl, after removing an incomplete last line that a crash may have left."""
        make_folder(self.path)
        line = (json.dumps(_plain(values), allow_nan=False) + "\n").encode()
        with open_regular(self.metrics_file, "ab+") as file:
            _drop_torn_line(file)
            file.write(line)  # one write of a whole line: a killed process leaves all of it or nothing
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl; an incomplete last line is ignored, a damaged one elsewhere raises."""
        return [json.loads(line) for line in self._metric_lines()]

    def truncate_metrics(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Keep only the lines for which `keep` is true, so that a resumed run repeats none of them.

        Damaged lines are removed too: `metrics_digest` shows whether what is left is what was written.
        """
        if not self.metrics_file.exists():
            return
        kept = []
        for line in self._lines():
            # Not JSON, or it says nothing of its task.
            with suppress(ValueError, KeyError, TypeError):
                if keep(safe_json.parse(line)):
                    kept.append(line)
        write_own(self.metrics_file, "".join(line + "\n" for line in kept))

    def metrics_digest(self) -> str:
        """Return the SHA-256 of metrics.jsonl as it is now."""
        return _file_digest(self.metrics_file)

    def model_digest(self) -> str | None:
        """Return the SHA-256 of the tensors in model/, None if no task has ended."""
        return checkpoint.describe(self.model, MODEL).sha256 if checkpoint.exists(self.model, MODEL) else None

    def write_accuracy(self, agnostic: ArrayLike, aware: ArrayLike, task_sizes: Sequence[int]) -> None:
        """Write both accuracy matrices (K x K, percent, NaN where not measured) and the classes per task (K)."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["accuracy", "after_task", *(f"task_{i + 1}" for i in range(len(task_sizes)))])
        writer.writerow([SIZES, "", *task_sizes])
        for kind, matrix in ((AGNOSTIC, agnostic), (AWARE, aware)):
            for k, row in enumerate(np.asarray(matrix, dtype=float)):
                writer.writerow([kind, k + 1, *("" if math.isnan(value) else repr(float(value)) for value in row)])
        write_own(self.accuracy_file, text.getvalue())

    def read_accuracy(self) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Return both accuracy matrices and the classes per task, as given to `write_accuracy`."""
        try:
            with open_regular(self.accuracy_file, "r", newline="", encoding="utf-8") as file:
                _, *rows = csv.reader(file)
            sizes = [int(value) for kind, _, *values in rows if kind == SIZES for value in values]
            agnostic, aware = (
                np.array([[float(v) if v else math.nan for v in values] for kind, _, *values in rows if kind == wanted])
                for wanted in (AGNOSTIC, AWARE)
            )
        except FileNotFoundError:
            raise RunFolderError(f"{self.accuracy_file} does not exist; the run has not finished a task yet.") from None
        except (OSError, ValueError, csv.Error):
            raise _damaged(self.accuracy_file) from None
        if agnostic.shape != (len(sizes), len(sizes)) or aware.shape != agnostic.shape:
            raise _damaged(self.accuracy_file)
        return agnostic, aware, sizes

    def write_probes(self, measured: Probes, names: Sequence[str]) -> None:
        """Write what was measured of classes and directions; a file of which nothing was measured is removed."""
        files = measured.files(names)
        for name, file in self.probe_files.items():
            if name in files:
                write_own(file, files[name])
            elif is_regular(file):
                file.unlink()

    def classes(self) -> list[ClassCount] | None:
        """Return the test images and right answers of every class after every task, None if they were not recorded."""
        return self._read_probe(probes.CLASSES, probes.read_classes)

    def confusion(self) -> np.ndarray | None:
        """Return how often each class (row) was answered with each (column) after the last task (C, C), or None."""
        found = self.confusion_pairs()
        return None if found is None else found.matrix()

    def confusion_pairs(self) -> Confusion | None:
        """Return the same without the pairs of classes that did not occur, for very many classes."""
        return self._read_probe(
            probes.CONFUSION, lambda text: probes.read_confusion(text, sum(self.read_accuracy()[2]))
        )

    def spectrum(self) -> dict[int, np.ndarray] | None:
        """Return the eigenvalues of the method's feature matrix, largest first, by task from 1; None if it has none."""
        return self._read_probe(probes.SPECTRUM, probes.read_spectrum)

    def write_perturbation(self, rows: Iterable[Perturbation]) -> None:
        """Write perturbation.csv, which is made from a finished run and is not covered by its summary."""
        write_own(self.path / probes.PERTURBATION, probes.perturbation_csv(rows))

    def perturbation(self) -> list[Perturbation] | None:
        """Return what noise in feature space did, None if that was not measured."""
        return self._read_probe(probes.PERTURBATION, probes.read_perturbation)

    def _read_probe(self, name: str, read: Callable[[str], Read]) -> Read | None:
        file = self.path / name
        try:
            return read(read_regular(file, MOST_BYTES).decode())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise _damaged(file, str(error)) from None

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, which marks the run as finished; numbers that are not finite become null.

        It contains a checksum of itself and of the files that it summarises.
        """
        missing = [name for name in REQUIRED if name not in summary]
        if missing:
            raise RunFolderError(f"The summary of {self.path} lacks {', '.join(missing)}.")
        written = [file for file in self.probe_files.values() if file.exists()]
        files = {file.name: _file_digest(file) for file in (self.accuracy_file, self.metrics_file, *written)}
        content = _plain({**summary, "files": files})
        content["checksum"] = _checksum(content)
        write_own(self.summary_file, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """Return summary.json; a file that is missing, damaged or edited is named in the error."""
        try:
            summary = safe_json.parse(read_regular(self.summary_file, safe_json.MOST_BYTES).decode())
        except FileNotFoundError:
            raise RunFolderError(f"{self.summary_file} does not exist; the run has not finished.") from None
        except (OSError, ValueError):
            raise _damaged(self.summary_file) from None
        if not isinstance(summary, dict) or not all(_fits(name, summary.get(name, ...)) for name in REQUIRED):
            raise _damaged(self.summary_file)
        checksum = summary.pop("checksum", None)
        earlier = checksum is None and "files" not in summary  # written by a version without checksums
        if not earlier and checksum != _checksum(summary):
            raise _damaged(self.summary_file, "it was changed after it was written")
        return summary

    def verified_summary(self) -> dict[str, Any]:
        """Return summary.json after checking that the accuracy matrices give its results and no file was changed."""
        summary = self.read_summary()
        if not self.accuracy_file.exists():
            raise _damaged(self.accuracy_file, "it is missing")
        try:
            made_for = self.read_identity()
        except RunFolderError:  # results do not depend on it
            made_for = None
        self._refuse_other_results(summary, made_for)
        agnostic, aware, sizes = self.read_accuracy()
        try:
            found = _plain(results(agnostic, sizes, aware))
        except EfcilError:
            raise _damaged(self.accuracy_file, "it holds no accuracies") from None
        for name, value in found.items():
            if name in summary and not _same(summary[name], value):
                raise _damaged(self.summary_file, f"its {name} is not what {self.accuracy_file.name} gives")
        self._refuse_changed(summary.get("files"))
        return summary

    def _refuse_changed(self, digests: Any) -> None:
        """Raise an error if a file is not what it was when the run ended; earlier versions list fewer files."""
        if not isinstance(digests, dict):
            return
        for file in (self.accuracy_file, self.metrics_file, *self.probe_files.values()):
            optional = file.name in self.probe_files and file.name not in digests
            if optional and file.exists():
                raise _damaged(file, "it was added after the run ended")
            if not optional and digests.get(file.name) != _file_digest(file):
                raise _damaged(file, f"it was {'changed' if file.exists() else 'removed'} after the run ended")

    def _metric_lines(self) -> list[str]:
        if not self.metrics_file.exists():
            return []
        lines = self._lines()
        for number, line in enumerate(lines, start=1):
            try:
                if not isinstance(safe_json.parse(line), dict):
                    raise ValueError
            except ValueError:
                raise RunFolderError(
                    f"{self.metrics_file} is damaged in line {number}. Remove the line, or the folder to run again."
                ) from None
        return lines

    def _lines(self) -> list[str]:
        """Return the whole lines of metrics.jsonl, whatever they say."""
        *lines, _ = read_regular(self.metrics_file).decode(errors="replace").split("\n")
        return lines


def locate(output: Path | str, settings: Settings) -> RunFolder:
    """Return the folder of a run below `output`; nothing is created."""
    place = (
        Path(output)
        / dataset_folder(settings.dataset)
        / scenario_name(settings)
        / label(settings)
        / f"seed{settings.seed}"
    )
    return RunFolder(place)


def dataset_folder(dataset: str) -> str:
    """Return the folder's name of a dataset: hub:OWNER/NAME holds characters that folders cannot have."""
    return re.sub(r"[^\w.-]+", "-", dataset)


def find_runs(paths: Iterable[Path | str]) -> list[RunFolder]:
    """Return the run folders at or below `paths`, each once, in natural order (seed2 before seed10)."""
    found: set[Path] = set()
    for path in map(Path, paths):
        if not path.exists():
            raise RunFolderError(f"{path} does not exist. Give a folder that `efcil run --output` wrote to.")
        if path.is_file():
            given, path = path, path.parent
            if not any((path / name).exists() for name in ("settings.yaml", "summary.json")):
                raise RunFolderError(
                    f"{given} is not a file of a run. Give a folder that `efcil run --output` wrote to."
                )
        for name in ("settings.yaml", "summary.json"):
            found.update(file.parent for file in path.rglob(name) if not _hidden(file.relative_to(path)))
    return [RunFolder(folder) for folder in sorted(found, key=lambda folder: _natural(folder.parts))]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _natural(parts: Sequence[str]) -> list[list[tuple[int, str]]]:
    return [[(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", p)] for p in parts]


def _fits(name: str, value: Any) -> bool:
    """Return whether a required value of a summary has the right kind: a number, null if not measured, or a name."""
    if name == "seed":
        return isinstance(value, int)
    if name in ("A_step", "A_inc"):
        return value is None or isinstance(value, int | float)
    return isinstance(value, str) and value.isprintable() and len(value) <= LONGEST_NAME


def _same(first: Any, second: Any) -> bool:
    """Return whether two results are equal up to rounding; lists are compared value by value."""
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_same, first, second))
    numbers = [isinstance(value, int | float) and not isinstance(value, bool) for value in (first, second)]
    return math.isclose(first, second, abs_tol=1e-6) if all(numbers) else first is None and second is None


def _file_digest(file: Path) -> str:
    return hashlib.sha256(read_regular(file) if file.exists() else b"").hexdigest()


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _damaged(file: Path, reason: str = "") -> RunFolderError:
    why = f" ({reason})" if reason else ""
    return RunFolderError(f"{file} is damaged{why}. Remove the folder {file.parent} to run it again.")


def _plain(value: Any) -> Any:
    """Convert arrays, scalars, tuples and paths to JSON values; NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


def _drop_torn_line(file: Any) -> None:
    end = file.seek(0, os.SEEK_END)
    for position in range(end - 1, -1, -1):
        file.seek(position)
        if file.read(1) == b"\n":
            if position + 1 < end:
                file.truncate(position + 1)
            return
    file.truncate(0)
