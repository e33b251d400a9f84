"""Gather finished runs into results files that only grow: one row per run, with what it was made with.

    python benchmarks/collect.py runs

There is a file for every dataset, and one for variants: runs with settings that differ from the preset's, the ablations
of the paper among them. A run that a file has already is left as it is, unless --replace says that these are newer.
Beside each file, a Markdown table of means over seeds is written, with the paper's values beside ours. What else the
paper's studies read of a run has files of its own: components.csv, spectrum.csv, timing.csv and perturbation.csv. So
have the classifiers beside the method's own that a run has recorded (`--classifier all`): classifiers.csv.

The tables of docs/methods and of docs/results.md get what was measured, the README a few rows of the latter, and
docs/reproduce.md all of it (`python benchmarks/collect.py` without a folder fills the pages alone).
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import reproduce  # beside this script
import step_times
from efcil import studies
from efcil.environment import code_name
from efcil.errors import EfcilError
from efcil.report import PaperValue, paper_value
from efcil.report.paper import agrees, published
from efcil.resolution import label, scenario_name
from efcil.runfolder import RunFolder, find_runs
from efcil.settings import Settings, options
from efcil.settings.options import show
from efcil.studies.measures import CLASSIFIERS, Key, Measured, key_of, merge_into
from efcil.studies.result import FOLDER, measures_of

COLUMNS = [
    "dataset", "scenario", "method", "seed", "A_step", "A_inc", "task_mean", "forgetting", "task_aware_A_step",
    "A_step_per_task", "seconds", "stored_bytes", "precision", "path", "deterministic", "hardware", "torch", "commit",
    "command",
]  # fmt: skip
TITLES = {"CIFAR-100": "cifar100", "Tiny-ImageNet": "tiny-imagenet", "ImageNet-Subset": "imagenet-subset"}
RESULTS = Path(__file__).parent / "results"
VARIANTS = "variants"
PAGES = Path(__file__).parent.parent / "docs" / "methods"
TABLE = Path(__file__).parent.parent / "docs" / "results.md"
README = Path(__file__).parent.parent / "README.md"
HEAD = "| scenario | method | seeds | A_step | paper | A_inc | paper |"
#: What the README shows of the table: the best method, the paper's, and what happens without one.
IN_README = {"cs10": ("efc++", "efc", "finetune"), "ws10": ("fecam", "efc", "finetune")}
KEY = ("dataset", "scenario", "method", "seed")
#: In the names of runs that were tested on held-out training images.
HELD_OUT = "held_out="
#: As people write them; the others as our commands do.
NAMES = {
    "adagauss": "AdaGauss", "fecam": "FeCAM", "fetril": "FeTrIL", "finetune": "fine-tuning",
    "fusion": "Fusion (reconstructed)", "joint": "joint training", "lwf": "LwF",
}  # fmt: skip
#: Written without knowing all of the original: whether they agree with it says nothing.
RECONSTRUCTED = ("fusion",)
#: What the EFC paper does not have: A_step and A_inc of EFC++ from its own, as quoted by others.
OF_OTHER_PAPERS = {("cs10", "efc++"): ("47.52 ± 0.68", "61.57")}


def row_of(run: RunFolder) -> dict[str, str]:
    """Return the row of a finished run, under the name that the same command would have today.

    A run whose files do not agree with each other is an error.
    """
    summary = run.verified_summary()
    settings = run.read_settings()
    execution, hardware = summary["execution"], summary["hardware"]
    last = code_name(summary["commit"], summary.get("uncommitted_changes"))
    where = hardware["gpus"][0] if execution["device"] == "cuda" else hardware["cpu"]
    return {
        "dataset": summary["dataset"],
        "scenario": summary["scenario"],
        "method": label(settings, whole=True),
        "seed": str(summary["seed"]),
        **{name: number(summary[name]) for name in ("A_step", "A_inc", "task_mean", "forgetting", "task_aware_A_step")},
        "A_step_per_task": " ".join(number(value) for value in summary["A_step_per_task"]),
        "seconds": number(summary["seconds"]["total"]),
        "stored_bytes": str(summary["stored"]["bytes"]),
        **{name: str(execution[name]).lower() for name in ("precision", "path", "deterministic")},
        "hardware": where,
        "torch": summary["versions"]["torch"],
        "commit": " ".join([*summary.get("earlier_commits", []), last or ""]),
        "command": command_of(summary["command"], settings),
    }


def command_of(given: str, settings: Settings) -> str:
    """Return the command as it can be given elsewhere; of a run that a script made, the command for that run alone."""
    words = given.split()
    if words[:2] != ["efcil", "run"]:
        return " ".join(["efcil run", *_flags(replace(settings, data="DATA"))])
    for name, value in (("--data", "DATA"), ("--output", "runs")):
        if name in words:
            words[words.index(name) + 1] = value
    return " ".join(word for word in words if word != "--quiet")


def _flags(settings: Settings) -> Iterator[str]:
    for option in options(Settings).values():
        value = getattr(settings, option.name)
        if option.name == "overrides":
            if value:
                yield " ".join([option.flags, *(f"{name}={show(each)}" for name, each in value.items())])
        elif option.name in ("method", "dataset", "scenario", "seed") or value != option.default:
            yield option.flags if value is True else f"{option.flags} {show(value)}"


def number(value: float | None) -> str:
    """Return a number with two digits; what was not measured stays empty."""
    return "" if value is None or value != value else f"{value:.2f}"


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a results file, none where there is no file."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write the results file, sorted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: [*(row[name] for name in KEY[:3]), int(row["seed"])]))


def by_cell(rows: list[dict[str, str]]) -> dict[tuple[str, str, str], list[dict[str, str]]]:
    """Return the rows of every dataset, scenario and method, by seed."""
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in sorted(rows, key=lambda row: int(row["seed"])):
        groups.setdefault((row["dataset"], row["scenario"], row["method"]), []).append(row)
    return groups


def seeds_of(rows: list[dict[str, str]]) -> str:
    """Return the seeds of rows, in their order."""
    return " ".join(row["seed"] for row in rows)


def values_of(rows: list[dict[str, str]], metric: str) -> list[float]:
    """Return what was measured of a metric."""
    return [float(row[metric]) for row in rows if row[metric]]


def markdown(rows: list[dict[str, str]]) -> str:
    """Return a table of means over seeds, with the paper's values where there are any, and one of held-out results."""
    lines = table([row for row in rows if HELD_OUT not in row["method"]])
    if held_out := [row for row in rows if HELD_OUT in row["method"]]:
        lines += ["", "On held-out training images, to choose settings by; not comparable with results on test images:"]
        lines += ["", *table(held_out)]
    lines += [
        "",
        "A row agrees where both means are within one of the paper's standard deviations, or one point, of its means.",
        "Networks efficientnet-lite0, 1 and 2 are pre-trained on ImageNet-1K, whose photographs Tiny-ImageNet shrinks.",
        "Commands, commits and hardware are in the CSV file. Seconds are those of the clock on the wall: a run that",
        "shared its GPU with others (`--jobs-per-gpu`) takes longer than one alone.",
    ]
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, str]]) -> list[str]:
    """Return the lines of one of these tables."""
    lines = [
        "| dataset | scenario | method | seeds | A_step | paper | A_inc | paper | agrees | seconds a run |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (dataset, scenario, method), members in sorted(by_cell(rows).items()):
        cells = [dataset, scenario, method, seeds_of(members)]
        verdicts = []
        for metric in ("A_step", "A_inc"):
            number_there = compared_with(dataset, scenario, method, metric)
            values = values_of(members, metric)
            cells += [mean(values), "" if number_there is None else paper_text(number_there)]
            if number_there is not None and values and plain_name(method) not in RECONSTRUCTED:
                verdicts.append(agrees(statistics.mean(values), number_there))
        cells.append(("yes" if all(verdicts) else "no") if verdicts else "")
        cells.append(f"{statistics.mean(values_of(members, 'seconds')):.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def compared_with(dataset: str, scenario: str, method: str, metric: str) -> PaperValue | None:
    """Return the paper's number for a row: its own; of another reading or path, that of the plain method.

    The paper's ablations have numbers of their own. It has neither other networks nor held-out training images.
    """
    if method in ablations() or any(part in method for part in ("network=", HELD_OUT)):
        return paper_value(dataset, scenario, method, metric)
    return paper_value(dataset, scenario, plain_name(method), metric)


@cache
def ablations() -> frozenset[str]:
    """Return the labels of the paper's ablations: all runs of its studies that are not plain methods."""
    cells = [cell for name in studies.names() for cell in studies.load(name).cells()]
    labels = {cell.plain for cell in cells} | {label for _, _, label, _ in published()}
    return frozenset(label for label in labels if plain_name(label) != label)


def plain_name(label: str) -> str:
    """Return the method of a label, without the settings that differ from the preset's."""
    return re.split(r"\+(?=[\w.]+=)", label)[0]


def paper_text(value: PaperValue) -> str:
    """Return the paper's mean and standard deviation."""
    return f"{value.mean:.2f}" + ("" if value.std is None else f" ± {value.std:.2f}")


def fill_pages(folder: Path, rows: list[dict[str, str]]) -> None:
    """Write what was measured into the columns called `ours` of the methods' pages: A_step first, then A_inc.

    A scenario that a page's table lacks becomes a new row of it.
    """
    for page in sorted(folder.glob("*.md")):
        method = page.stem.replace("-plus-plus", "++")
        measured = {key[:2]: members for key, members in by_cell(rows).items() if key[2] == method}
        lines: list[str] = []
        head: list[str] = []
        missing = dict(measured)
        for line in [*page.read_text(encoding="utf-8").splitlines(), ""]:
            cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
            if cells[0] == "dataset" and "ours" in cells:
                head = cells
            elif head and not line.startswith("|"):
                lines += [_page_row(head, method, key, members) for key, members in sorted(missing.items())]
                head = []
            elif len(cells) == len(head) and cells[0] in TITLES:
                key = TITLES[cells[0]], cells[1]
                missing.pop(key, None)
                line = _table_row(_with_ours(head, cells, measured.get(key, [])))
            lines.append(line)
        page.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")


def _table_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _with_ours(head: list[str], cells: list[str], members: list[dict[str, str]]) -> list[str]:
    """Return the cells of a row with what was measured in the columns for it."""
    cells = list(cells)
    places = [place for place, title in enumerate(head) if title == "ours"]
    for metric, place in zip(("A_step", "A_inc"), places, strict=True):
        if values := values_of(members, metric):
            cells[place] = f"{mean(values)} ({len(values)} seed{'s' if len(values) > 1 else ''})"
    return cells


def _page_row(head: list[str], method: str, key: tuple[str, str], members: list[dict[str, str]]) -> str:
    """Return a new row of a page's table, with the value of the EFC paper if it has one."""
    dataset, scenario = key
    title = next(title for title, name in TITLES.items() if name == dataset)
    cells = {"dataset": title, "scenario": scenario, "source": "none", "ours": "none"}
    for metric in ("A_step", "A_inc"):
        published = paper_value(dataset, scenario, method, metric)
        cells[f"published {metric}"] = "none" if published is None else paper_text(published)
    return _table_row(_with_ours(head, [cells[name] for name in head], members))


def fill_table(path: Path, rows: list[dict[str, str]]) -> None:
    """Write what was reached into the table of a page, the best of a scenario first."""
    lines = []
    cells_of = by_cell(rows)
    reached = {key: statistics.mean(values_of(members, "A_step")) for key, members in cells_of.items()}
    for key in sorted(cells_of, key=lambda key: (key[1], -reached[key])):
        (dataset, scenario, method), members = key, cells_of[key]
        others = OF_OTHER_PAPERS.get((scenario, method), ("", ""))
        cells = [scenario, NAMES.get(method, method.upper()), seeds_of(members)]
        for metric, other in zip(("A_step", "A_inc"), others, strict=True):
            published = paper_value(dataset, scenario, method, metric)
            cells += [mean(values_of(members, metric)), other if published is None else paper_text(published)]
        lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")
    text = path.read_text(encoding="utf-8").splitlines()
    start = text.index(HEAD) + 2
    end = next(place for place in range(start, len(text)) if not text[place].startswith("|"))
    path.write_text("\n".join([*text[:start], *lines, *text[end:]]) + "\n", encoding="utf-8")


def in_readme(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the rows that the README shows."""
    return [row for row in rows if row["method"] in IN_README.get(row["scenario"], ())]


def mean(values: list[float]) -> str:
    """Return mean and standard deviation as text."""
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


def file_of(row: dict[str, str]) -> str:
    """Return the name of the results file that a row belongs to: that of its dataset, or the one of other readings."""
    return row["dataset"] if plain_name(row["method"]) == row["method"] else VARIANTS


def add(name: str, new: list[dict[str, str]], folder: Path, replace_old: bool) -> list[dict[str, str]]:
    """Put new rows into a results file; return all of its rows."""
    rows = {tuple(row[column] for column in KEY): row for row in read(folder / f"{name}.csv")}
    for row in new:
        key = tuple(row[column] for column in KEY)
        if replace_old or key not in rows:
            rows[key] = row
            print(f"added to {name}.csv: {row['scenario']} {row['method']} seed {row['seed']}")
    write(folder / f"{name}.csv", list(rows.values()))
    (folder / f"{name}.md").write_text(markdown(list(rows.values())), encoding="utf-8")
    return list(rows.values())


def wanted_measures() -> dict[str, set[Key]]:
    """Return what the paper's studies read besides accuracies, and of which runs."""
    found: dict[str, set[Key]] = {}
    for name in studies.names():
        study = studies.load(name)
        for measure in measures_of(study):
            keys = {key_of(cell, seed) for cell in study.cells() for seed in study.seeds}
            found.setdefault(measure, set()).update(keys)
    return {measure: keys for measure, keys in found.items() if measure != "accuracy"}


def add_measures(runs: Iterable[RunFolder], places: Sequence[Path], results: Path, replace_old: bool = False) -> None:
    """Add what the paper's studies read of finished runs, and other classifiers, to the results files of those."""
    wanted, measured = {**wanted_measures(), CLASSIFIERS: set()}, Measured()
    for run in runs:
        settings = run.read_settings()
        key = (settings.dataset, scenario_name(settings), label(settings, whole=True), settings.seed)
        if settings.classifier == "all":
            wanted[CLASSIFIERS].add(key)
        if names := [name for name, keys in wanted.items() if key in keys]:
            measured.read_run(run, key, names)
    for folder in sorted({file.parent for place in places for file in place.glob(f"**/{FOLDER}/*/measured-*.csv")}):
        measured.read_results(folder)  # what `efcil paper` has computed
    for problem in measured.problems:
        print(f"left out: {problem}")
    for name, keys in wanted.items():
        new = {key: rows for key, rows in measured.rows.get(name, {}).items() if key in keys}
        added = merge_into(results / f"{name}.csv", name, new, replace=replace_old) if new else []
        print("".join(f"added to {name}.csv: {' '.join(map(str, key[1:]))}\n" for key in added), end="")


def fill_all(new: Mapping[str, Sequence[dict[str, str]]], options: argparse.Namespace) -> None:
    """Add new rows to the results files, and write what all of them say into the pages."""
    for name, rows in sorted(new.items()):
        present = add(name, list(rows), options.results, options.replace)
        print(markdown(present), end="")
        if name != VARIANTS:
            fill_pages(options.pages, present)
        if name == "cifar100":
            fill_table(options.table, present)
            fill_table(options.readme, in_readme(present))


def main() -> None:
    """Add the runs below the given folders to the results files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", help="folders that hold finished runs; none: fill the pages")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results files")
    parser.add_argument("--pages", type=Path, default=PAGES, help="folder of the methods' pages")
    parser.add_argument("--table", type=Path, default=TABLE, help="the page with the whole table")
    parser.add_argument("--readme", type=Path, default=README, help="the README")
    parser.add_argument("--reproduce", type=Path, default=reproduce.PAGE, help="the page with the paper's studies")
    parser.add_argument("--replace", action="store_true", help="let these runs take the place of those in the files")
    options = parser.parse_args()
    if absent := [str(path) for path in options.runs if not path.exists()]:
        parser.error(f"{', '.join(absent)} does not exist")
    new: dict[str, list[dict[str, str]]] = {}
    finished = []
    for run in find_runs(options.runs):
        if not run.summary_file.exists():
            continue
        try:
            row = row_of(run)
        except EfcilError as error:
            print(f"left out: {run.path}: {error}")
            continue
        finished.append(run)
        new.setdefault(file_of(row), []).append(row)
    if not options.runs:
        new = {name: [] for name in (*TITLES.values(), VARIANTS) if (options.results / f"{name}.csv").exists()}
    fill_all(new, options)
    add_measures(finished, options.runs, options.results, options.replace)
    if options.reproduce.exists():
        reproduce.fill(options.reproduce, options.results)
    if options.results == RESULTS:
        step_times.TARGET.write_text(step_times.text(), encoding="utf-8")


if __name__ == "__main__":
    main()
