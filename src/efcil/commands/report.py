"""`efcil report`: a table of runs, with the paper's values beside ours."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from efcil.commands.parser import add_debug
from efcil.errors import SettingsError, unknown


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "report",
        help="table of runs as text, Markdown, LaTeX or CSV, or a page with figures",
        description="Mean and standard deviation over seeds of every run below the given folders, with the value of "
        "the EFC paper if there is one. Accuracies are in percent. In CSV, text that a spreadsheet would read as a "
        "formula starts with an apostrophe.",
    )
    parser.add_argument("runs", nargs="*", type=Path, default=[Path("runs")], help="folders of runs (default: runs)")
    parser.add_argument(
        "--format",
        default="text",
        metavar="FORMAT",
        help="text, markdown, latex, csv, or html: one page with figures (default: text)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write to a file instead of the screen")
    parser.add_argument("--metric", nargs="+", action="extend", metavar="NAME", help="columns to show, by name")
    add_debug(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Print or write the table."""
    from efcil.report import FORMATS, METRICS, render, table
    from efcil.runfolder import find_runs, write_atomically

    # Names are checked first: searching the folders may take long.
    if arguments.format not in FORMATS:
        raise unknown("format", arguments.format, FORMATS)
    for metric in arguments.metric or ():
        if metric not in METRICS:
            raise unknown("metric", metric, METRICS)
    width = 80 if arguments.output is not None else shutil.get_terminal_size((80, 24)).columns
    text = render(table(find_runs(arguments.runs)), arguments.format, arguments.metric, width)
    if arguments.output is None:
        print(text, end="")
    else:
        try:
            write_atomically(arguments.output, text)
        except OSError as error:
            reason = error.strerror or error
            raise SettingsError(f"{arguments.output} cannot be written ({reason}). Choose another --output.") from None
    return 0
