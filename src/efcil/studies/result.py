"""The result of a study: its readers asked, sheets and figures written, and what is still missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from efcil.errors import EfcilError, SettingsError
from efcil.files import write_atomically
from efcil.report import write_figure
from efcil.report.cells import seeds_in_words
from efcil.resolution import load_images
from efcil.runfolder import locate
from efcil.studies import sheet
from efcil.studies.estimate import title
from efcil.studies.measures import CLASSIFIERS, IMAGES, Key, Measured, key_of
from efcil.studies.plan import measurable, runs_of
from efcil.studies.readers import READERS, Outcome, Question
from efcil.studies.study import Cell, Study

#: Below the output folder of runs.
FOLDER = "paper"
FAST = "-fast"


@dataclass(frozen=True)
class Result:
    """What became of a study: an outcome for every reader, named, and what is missing."""

    study: Study
    datasets: tuple[str, ...]
    fast: bool
    outcomes: tuple[tuple[str, Outcome], ...]
    missing: tuple[str, ...]
    problems: tuple[str, ...]
    keys: frozenset[Key]

    def text(self, width: int = 80) -> str:
        """Return everything for a terminal."""
        parts = [sheet.text(each, width) for _, outcome in self.outcomes for each in outcome.sheets]
        parts += [f"{note}\n" for note in self.study.notes]
        for heading, lines in (("Missing:", self.missing), ("Not counted:", self.problems)):
            if lines:
                parts.append("\n".join([heading, *(f"  {line}" for line in lines)]) + "\n")
        return "\n".join(parts)


def measures_of(study: Study) -> tuple[str, ...]:
    """Return everything that the readers of a study need of a run."""
    needed = [name for reading in study.read for name in READERS[reading.reader].measures(reading.options)]
    if "accuracy" in needed and any(variant.classifier is not None for variant in study.runs):
        needed.append(CLASSIFIERS)
    return tuple(dict.fromkeys(needed))


def read_runs(cells: Sequence[Cell], seeds: Sequence[int], output: Path, measured: Measured) -> None:
    """Add what the folders of finished runs say; they count more than results files."""
    own = Measured()
    for (cell, *_), settings in runs_of(cells, seeds):
        folder = locate(output, settings)
        if folder.summary_file.exists():
            own.read_run(folder, key_of(cell, settings.seed), (*measures_of(cell.study), IMAGES))
    measured.problems += own.problems
    for name, rows in own.rows.items():
        measured.rows[name] = {**measured.rows.get(name, {}), **rows}


def perturb_runs(
    cells: Sequence[Cell], seeds: Sequence[int], output: Path, measured: Measured, say: Callable[[str], object]
) -> EfcilError | None:
    """Perturb the features of finished runs of which that is not known; return the first error, None without one."""
    from efcil.data.images import Dataset
    from efcil.experiment.perturbation import perturb

    images: dict[str, Dataset] = {}
    failed: EfcilError | None = None
    for (cell, *_), settings in runs_of(cells, seeds):
        run, key = locate(output, settings), key_of(cell, settings.seed)
        if not run.summary_file.exists() or measured.get("perturbation", key):
            continue
        if not measurable(cell, ["perturbation"]):
            continue
        try:
            if cell.dataset not in images:
                images[cell.dataset] = load_images(settings)
            say(f"{run.path}: noise in its features")
            perturb(run, images[cell.dataset], device=settings.device)
        except EfcilError as error:
            failed = failed or error
            measured.problems.append(f"{run.path}: {error}")
            continue
        measured.read_run(run, key, ["perturbation"])
    return failed


def conclude(study: Study, cells: Sequence[Cell], seeds: Sequence[int], measured: Measured, fast: bool) -> Result:
    """Ask every reader of a study."""
    datasets = tuple(dict.fromkeys(cell.dataset for cell in cells))
    outcomes = []
    for reading in study.read:
        reader = READERS[reading.reader]
        # What is no accuracy is the same for all classifiers of a run.
        accuracies = "accuracy" in reader.measures(reading.options)
        rows = list(cells) if accuracies else _without_repeats(cells)
        question = Question(rows, seeds, measured, reading.options, titled(study, fast), fast)
        outcomes.append((reading.reader, reader.make(question)))
    lacking = tuple(missing(cells, seeds, measured))
    keys = frozenset(key_of(cell, seed) for cell in cells for seed in seeds)
    return Result(study, datasets, fast, tuple(outcomes), lacking, tuple(measured.problems), keys)


def _without_repeats(cells: Sequence[Cell]) -> list[Cell]:
    """Leave out rows of other classifiers whose run another row reads: the method's own, or else the first of them."""
    own = {key_of(cell, 0): cell for cell in reversed(cells)}
    own |= {key_of(cell, 0): cell for cell in cells if cell.variant.classifier is None}
    return [cell for cell in cells if cell.variant.classifier is None or own[key_of(cell, 0)] is cell]


def titled(study: Study, fast: bool) -> str:
    """Return the title of a study; a short schedule is named in it."""
    if not fast:
        return study.whole_title
    return f"FAST SCHEDULE ({study.fast_schedule}, not the paper's): {study.whole_title}"


def missing(cells: Sequence[Cell], seeds: Sequence[int], measured: Measured) -> Iterable[str]:
    """Yield a line for every dataset and scenario that lacks runs: which rows, and which seeds."""
    groups: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        needed = measurable(cell, measures_of(cell.study))
        lacking = [seed for seed in seeds if not measured.has(needed, cell, seed)]
        if lacking:
            words = "all seeds" if len(lacking) == len(seeds) else _seeds(lacking)
            groups.setdefault((cell.dataset, cell.scenario), []).append(f"{cell.variant.name} ({words})")
    for (dataset, scenario), rows in groups.items():
        yield f"{title(dataset)} {scenario}: {', '.join(rows)}"


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds_in_words(seeds)}"


def folder_of(study: Study, output: Path, fast: bool) -> Path:
    """Return where the result of a study is written."""
    return output / FOLDER / (study.name + (FAST if fast else ""))


def write(result: Result, output: Path, measured: Measured) -> tuple[list[Path], str]:
    """Write tables as text, Markdown, CSV and LaTeX, figures, and what was measured; return the files and a problem.

    The problem is a sentence where figures could not be drawn.
    """
    folder = folder_of(result.study, output, result.fast)
    written: list[Path] = []
    trouble = ""

    def put(name: str, content: str) -> None:
        write_atomically(folder / name, content)
        written.append(folder / name)

    for reader, outcome in result.outcomes:
        stem = _stem(result, reader)
        put(f"{stem}.txt", "\n".join(sheet.text(each, 120) for each in outcome.sheets))
        put(f"{stem}.md", "\n".join(map(sheet.markdown, outcome.sheets)))
        put(f"{stem}.csv", "\n".join(map(sheet.comma_separated, outcome.sheets)))
        put(f"{stem}.tex", outcome.latex or "\n".join(map(sheet.latex, outcome.sheets)))
        for name, figure in outcome.figures.items():
            try:
                written += write_figure(figure, folder / f"{result.study.name}-{reader}-{name}{FAST * result.fast}")
            except SettingsError as error:
                trouble = str(error)
    for name in measures_of(result.study):
        rows = {key: rows for key, rows in measured.rows.get(name, {}).items() if key in result.keys}
        if rows:
            chosen = Measured({name: rows})
            chosen.write(name, folder / f"measured-{name}.csv")
            written.append(folder / f"measured-{name}.csv")
    return written, trouble


def _stem(result: Result, reader: str) -> str:
    several = f"-{reader}" if len(result.outcomes) > 1 else ""
    return f"{result.study.name}{several}-{'-'.join(result.datasets)}{FAST * result.fast}"
