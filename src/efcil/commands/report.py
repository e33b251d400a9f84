"""`efcil report`: runs as a table, as a page with charts, and as figure files, with the paper's values beside ours."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from efcil.commands.parser import STANDARD_OUTPUT, Parser
from efcil.errors import RunFolderError, SettingsError, printable, some, unknown

if TYPE_CHECKING:
    from efcil.report import Table

HELP = "runs as a page with charts, a table (text, Markdown, LaTeX, CSV), or figures (SVG, PDF, PNG)"
DESCRIPTION = (
    "Mean and standard deviation over seeds of every run below the given folders, with the value of the EFC paper if "
    "there is one. Accuracies are in percent. Without options, the table is printed and a page with charts is written "
    "to report.html in the first of the folders: one file that needs no network. docs/report.md shows it."
)
#: What --output is written as when --format does not say.
_BY_SUFFIX = {".html": "html", ".htm": "html", ".md": "markdown", ".tex": "latex", ".csv": "csv"}
PAGE = "report.html"


def add_arguments(parser: Parser) -> None:
    """Add the arguments and flags."""
    parser.add_argument("runs", nargs="*", type=Path, default=[Path("runs")], help="folders of runs (default: runs)")
    parser.add_argument(
        "--format",
        dest="formats",
        nargs="+",
        action="extend",
        metavar="FORMAT",
        help="text, markdown, latex, csv or html (default: by the name of --output, else text); with --figures, svg, "
        "pdf or png, or several of them (default: all). In CSV, text that a spreadsheet would read as a formula starts "
        "with an apostrophe",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table or page to a file; - prints it")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="write every chart to a file of its own")
    parser.add_argument("--metric", nargs="+", action="extend", metavar="NAME", help="columns to show, by name")
    parser.add_argument(
        "--against",
        metavar="ROW",
        help="also show every row less this one, seed by seed: a method, or the name or label of a row",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Print or write the table, the page and the figures."""
    from efcil.report import METRICS, against, render, table
    from efcil.runfolder import find_runs

    # Names are checked first: searching the folders may take long.
    form, figure_formats = _formats(arguments)
    for metric in arguments.metric or ():
        if metric not in METRICS:
            raise unknown("metric", metric, METRICS)
    runs = find_runs(arguments.runs)
    if not runs:
        where = some([str(path) for path in arguments.runs])
        raise RunFolderError(f"There are no runs in {where}. Give a folder that `efcil run --output` wrote to.")
    found = table(runs) if arguments.against is None else against(table(runs), arguments.against)
    if arguments.figures is not None:
        _write_figures(found, arguments.figures, figure_formats, arguments.metric)
    if form is None:
        return 0
    printed = arguments.output in (None, STANDARD_OUTPUT)
    width = shutil.get_terminal_size((80, 24)).columns if printed else 80
    text = render(found, form, arguments.metric, width)
    if printed:
        print(text, end="")
    else:
        _write(arguments.output, text)
    if arguments.output is None and not arguments.formats:
        _write_page(found, arguments.runs[0], arguments.metric)
    return 0


def _formats(arguments: argparse.Namespace) -> tuple[str | None, Sequence[str]]:
    """Return the format of the table, None if only figures are asked for, and those of the figures."""
    from efcil.report import FIGURE_FORMATS, FORMATS

    given = arguments.formats or []
    of_figures = [name for name in given if name in FIGURE_FORMATS]
    of_table = [name for name in given if name not in FIGURE_FORMATS]
    for name in of_table:
        if name not in FORMATS:
            raise unknown("format", name, [*FORMATS, *FIGURE_FORMATS])
    if of_figures and arguments.figures is None:
        raise SettingsError(f"{of_figures[0]} is a format of figures. Add --figures DIR, which says where they go.")
    if len(set(of_table)) > 1:
        raise SettingsError(f"A table has one format, but there are {' and '.join(of_table)}. Give the command twice.")
    if arguments.output is not None and not of_table and arguments.output.suffix.lower()[1:] in FIGURE_FORMATS:
        raise SettingsError(f"{arguments.output} is the name of a figure. Figures are written by --figures DIR.")
    if of_table:
        return of_table[0], of_figures or FIGURE_FORMATS
    if arguments.output is not None:
        return _BY_SUFFIX.get(arguments.output.suffix.lower(), "text"), of_figures or FIGURE_FORMATS
    return (None if arguments.figures is not None else "text"), of_figures or FIGURE_FORMATS


def _write(file: Path, text: str) -> None:
    from efcil.runfolder import write_atomically

    try:
        write_atomically(file, text)
    except OSError as error:
        reason = error.strerror or error
        raise SettingsError(f"{file} cannot be written ({reason}). Choose another --output.") from None


def _write_figures(found: Table, folder: Path, formats: Sequence[str], metrics: Sequence[str] | None) -> None:
    from efcil.report.export import write_figures

    files = write_figures(found, folder, formats, metrics)
    count = f"{len(files)} file{'s' if len(files) != 1 else ''}" if files else "No figure"
    print(printable(f"{count} written to {folder}."), file=sys.stderr)


def _write_page(found: Table, place: Path, metrics: Sequence[str] | None) -> None:
    """Write the page beside the runs. Nobody asked for it by name, so a file of somebody else's stays as it is."""
    from efcil.report import render
    from efcil.runfolder import write_atomically

    file = (place if place.is_dir() else place.parent) / PAGE
    try:
        if file.exists() and b'name="generator" content="efcil' not in file.read_bytes()[:4096]:
            said = (
                f"{file} is not a report of efcil and stays as it is. Give --output FILE.html for the page with charts."
            )
        else:
            write_atomically(file, render(found, "html", metrics))
            said = f"The page with charts: {file}"
    except OSError as error:
        said = f"No page was written: {error.strerror or error}. Give --output FILE.html for the page with charts."
    print(printable(said), file=sys.stderr)
