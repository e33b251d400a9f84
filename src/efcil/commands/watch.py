"""`efcil watch`: the runs below a folder, in the terminal, while they train."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from efcil.commands.parser import Parser
from efcil.errors import RunFolderError, SettingsError, some

if TYPE_CHECKING:
    from rich.console import Console

    from efcil.watching import Seen, Watcher

HELP = "show runs in the terminal while they train"
DESCRIPTION = """\
Show the runs below a folder while they train: how far each is, its loss, A_step so far, and the time left. The files of
the runs are read and nothing is written, so this works for runs of other terminals and, in a shared folder, of other
computers. It ends when no run is running or waiting.
"""
#: Seconds between two looks, and between two tables in a file; how wide these are.
EVERY_SECONDS, PRINT_SECONDS, FILE_WIDTH = 1.0, 30.0, 160


def add_arguments(parser: Parser) -> None:
    """Add the arguments and flags."""
    parser.add_argument("runs", nargs="*", type=Path, default=[Path("runs")], help="folders of runs (default: runs)")
    parser.add_argument("--once", action="store_true", help="print the table once, as text")
    parser.add_argument("--keep", action="store_true", help="do not end when all runs have ended; Ctrl-C ends it")
    parser.add_argument(
        "--every",
        type=_seconds,
        default=EVERY_SECONDS,
        metavar="SECONDS",
        help="seconds between two looks (default: 1)",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Print the table once, or until every run has ended."""
    from rich.console import Console

    from efcil.watching import Watcher

    watcher = Watcher(arguments.runs)
    seen = watcher.look()
    if not seen and not arguments.keep:
        raise RunFolderError(
            f"There is no run below {some(arguments.runs)}. Give the folder that `efcil run --output` writes to, or "
            "--keep to wait for runs."
        )
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else FILE_WIDTH
    console = Console(file=sys.stdout, width=width, highlight=False, markup=False)
    try:
        if arguments.once:
            _print(console, watcher, seen)
        elif not terminal:
            _print_on(console, watcher, arguments.every, arguments.keep)
        else:
            _follow(console, watcher, arguments.every, arguments.keep)
    except KeyboardInterrupt:
        pass  # that is how one leaves
    return 0


def _follow(console: Console, watcher: Watcher, every: float, keep: bool) -> None:
    """Refresh the table in place until every run has ended, and leave the last one on the screen."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from efcil.watching import showing

    def table(seen: list[Seen]) -> Group:
        rows = showing.as_table(watcher, seen, blocks=_has_blocks())
        return Group(rows, Text(showing.summary(seen), "bold"))

    seen = watcher.look()
    with Live(table(seen), console=console, auto_refresh=False, vertical_overflow="visible") as live:
        while _lasts(seen, keep):
            time.sleep(every)
            seen = watcher.look()
            live.update(table(seen), refresh=True)


def _print_on(console: Console, watcher: Watcher, every: float, keep: bool) -> None:
    """Print the table again and again until every run has ended: the output is a file."""
    seen, due = watcher.look(), time.monotonic()
    while _lasts(seen, keep):
        if time.monotonic() >= due:
            _print(console, watcher, seen)
            due = time.monotonic() + PRINT_SECONDS
        time.sleep(every)
        seen = watcher.look()
    _print(console, watcher, seen)


def _lasts(seen: list[Seen], keep: bool) -> bool:
    from efcil.watching import RUNNING, WAITING

    return keep or any(each.state in (RUNNING, WAITING) for each in seen)


def _print(console: Console, watcher: Watcher, seen: list[Seen]) -> None:
    from efcil.watching import showing

    console.print(showing.as_table(watcher, seen, blocks=_has_blocks()))
    console.print(showing.summary(seen))


def _has_blocks() -> bool:
    """Return whether the output can show the characters of sparklines."""
    try:
        "▁█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise SettingsError(f"--every must be a number of seconds from 0.1 to 3600, but it is {text[:80]!r}.")
    return value
