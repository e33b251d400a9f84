"""docs/reproduce.md: every table and figure of the paper from the results files, ours beside the paper's.

    python benchmarks/reproduce.py        # collect.py does it too

The page is written between its markers alone: what is missing at the top, a section for every study below. Figures are
drawn into docs/images/reproduce, which needs matplotlib. Each says of which numbers it was drawn: a test notices one
that is older than the results.
"""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import replace
from pathlib import Path

import step_times  # beside this script
from efcil import studies
from efcil.report import Figure, write_figure
from efcil.resolution.documentation import with_part
from efcil.studies import sheet
from efcil.studies.estimate import END, LATER, title
from efcil.studies.measures import Measured
from efcil.studies.plan import measurable
from efcil.studies.readers import FEWER, TOLERANCE, Outcome
from efcil.studies.result import conclude, measures_of
from efcil.studies.sheet import Sheet
from efcil.studies.study import Cell, Study

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "reproduce.md"
IMAGES = "images/reproduce"
MISSING, SECTIONS = "what has not been measured", "tables and figures"
NOBODY = "none"


def filled(page: str, results: Path = RESULTS) -> tuple[str, dict[str, Figure]]:
    """Return the page with what was measured, and the figures that it shows by file name."""
    measured = Measured()
    measured.read_results(results)
    sections, lacking, figures = [], [], {}
    for name in studies.names():
        study = studies.load(name)
        part, drawn = section(study, measured, results)
        sections += part
        figures |= drawn
        lacking += unmeasured(study, measured)
    for words, lines in ((MISSING, lacking), (SECTIONS, sections)):
        page = with_part(page, words, "\n".join(lines))
    return page, figures


def unmeasured(study: Study, measured: Measured) -> list[str]:
    """Return a line about the rows of a study of which there is no run at all; none if there are runs of all."""
    parts = []
    for dataset in study.datasets:
        cells = study.cells([dataset])
        absent = [cell for cell in cells if not _seeds(cell, measured)]
        if len(absent) == len(cells):
            parts.append(f"all of {title(dataset)}")
            continue
        by_name: dict[str, list[str]] = {}
        for cell in absent:
            by_name.setdefault(cell.variant.name, []).append(cell.scenario)
        by_scenarios: dict[str, list[str]] = {}
        for name, scenarios in by_name.items():
            by_scenarios.setdefault(" ".join(scenarios), []).append(name)
        parts += [f"{title(dataset)} {where} of {', '.join(names)}" for where, names in by_scenarios.items()]
    return [f"- {study.title}: {'; '.join(parts)}."] if parts else []


def _seeds(cell: Cell, measured: Measured) -> list[int]:
    needed = measurable(cell, measures_of(cell.study))
    return [seed for seed in cell.study.seeds if measured.has(needed, cell, seed)]


def section(study: Study, measured: Measured, results: Path = RESULTS) -> tuple[list[str], dict[str, Figure]]:
    """Return the lines of a study's section, and its figures by file name."""
    lines = [f"## {study.title}", "", f"{study.about[:1].upper()}{study.about[1:]}.", ""]
    dataset = study.datasets[0]
    options = f"--dataset {dataset} --data DATA --results benchmarks/results --jobs-per-gpu 5"
    lines += ["```console", f"efcil paper {study.name} {options}", "```", ""]
    figures: dict[str, Figure] = {}
    result = conclude(study, compared(study, measured), study.seeds, measured, fast=False)
    for _, outcome in result.outcomes:
        for each in outcome.sheets:
            lines += _tables(each)
        for name, figure in outcome.figures.items():
            file = f"{IMAGES}/{study.name}-{name}.svg"
            figures[file] = figure
            lines += [f"![{figure.title}: {study.title}]({file})", ""]
        lines += _notes(outcome)
    if study.name == "timing":
        lines += epochs_alone(results)
    lines += [f"{note}\n" for note in study.notes]
    return lines, figures


def compared(study: Study, measured: Measured) -> list[Cell]:
    """Return the rows of a study in those scenarios in which there is something to compare.

    One row is enough beside the numbers of a table of the paper. Two are needed, if the study has them, for figures and
    where the order of rows is all that a table says, as in ablations.
    """
    alone = bool(study.table) and not any(reading.options.get("order") for reading in study.read)
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in study.cells():
        groups.setdefault((cell.dataset, cell.scenario), []).append(cell)
    needed = {key: 1 if alone else min(2, len(cells)) for key, cells in groups.items()}
    known = {key: sum(bool(_seeds(cell, measured)) for cell in cells) for key, cells in groups.items()}
    return [cell for key, cells in groups.items() for cell in cells if known[key] >= needed[key]]


def epochs_alone(results: Path) -> list[str]:
    """Return a table of what epochs.py measured: the epoch of a later task, alone on the card."""
    rows = step_times.read("epochs-h200.csv", results)
    ends = {row["variant"]: float(row["value"]) for row in rows if row["what"] == END}
    lines = [
        "Seconds of every method alone on one NVIDIA H200, in a later task of ten classes with 5,000 images of noise",
        "in the shape of CIFAR-100's ([epochs-h200.csv](../benchmarks/results/epochs-h200.csv), made with",
        "`python benchmarks/epochs.py`):",
        "",
        "| method | epoch of a later task | end of a later task |",
        "| --- | ---: | ---: |",
    ]
    lines += [
        f"| {row['variant']} | {float(row['value']):.3f} | {ends[row['variant']]:.3f} |"
        for row in rows
        if row["what"] == LATER
    ]
    return [*lines, ""]


def _notes(outcome: Outcome) -> list[str]:
    """Return the notes below a table, if there is one; those that hold for all of them are at the top of the page."""
    said = [note for each in outcome.sheets for note in each.notes if note not in (TOLERANCE, FEWER)]
    return [f"{note}\n" for note in said] if any(_rows(each) for each in outcome.sheets) else []


def _rows(each: Sheet) -> list[tuple[str, ...]]:
    place = each.heading.index("seeds") if "seeds" in each.heading else None
    return [row for row in each.rows if place is None or row[place] != NOBODY]


def _tables(each: Sheet) -> list[str]:
    """Return a table for every dataset that was measured, under its name."""
    rows, lines = _rows(each), []
    for dataset in dict.fromkeys(row[0] for row in rows):
        here = tuple(row[1:] for row in rows if row[0] == dataset)
        lines += [f"**{title(dataset)}**", ""]
        lines += [*sheet.markdown_table(replace(each, heading=each.heading[1:], rows=here, names=each.names - 1)), ""]
    return lines


def digest(figure: Figure) -> str:
    """Return a short digest of what a figure shows."""
    return hashlib.sha256(repr(figure).encode()).hexdigest()[:16]


def drawn_from(file: Path) -> str:
    """Return the digest that a drawn figure carries."""
    last = file.read_text(encoding="utf-8").rstrip().splitlines()[-1]
    return last.removeprefix("<!-- drawn from ").removesuffix(" -->")


def draw(figures: dict[str, Figure], folder: Path) -> None:
    """Draw the figures that are not there yet, or that show other numbers by now; remove those of no study."""
    for name, figure in figures.items():
        file = folder / name
        if not file.exists() or drawn_from(file) != digest(figure):
            write_figure(figure, file.with_suffix(""), ("svg",))
            with open(file, "a", encoding="utf-8") as stream:
                stream.write(f"<!-- drawn from {digest(figure)} -->\n")
    for file in (folder / IMAGES).glob("*.svg"):
        if f"{IMAGES}/{file.name}" not in figures:
            file.unlink()


def fill(page: Path = PAGE, results: Path = RESULTS) -> None:
    """Write the page and its figures."""
    text, figures = filled(page.read_text(encoding="utf-8"), results)
    page.write_text(text, encoding="utf-8")
    draw(figures, page.parent)


def main() -> None:
    """Fill the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results files")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to fill")
    options = parser.parse_args()
    fill(options.page, options.results)


if __name__ == "__main__":
    main()
