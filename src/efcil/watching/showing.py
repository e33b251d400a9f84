"""Runs as a table, for a terminal that is refreshed and for plain text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from efcil.errors import printable
from efcil.output import duration
from efcil.watching.reading import FAILED, FINISHED, INTERRUPTED, RUNNING, WAITING, Seen, Watcher

_STYLES = {RUNNING: "bold cyan", FINISHED: "green", WAITING: "dim", FAILED: "bold red", INTERRUPTED: "yellow"}
_BLOCKS = "▁▂▃▄▅▆▇█"
MOST_NOTE = 60


def as_table(watcher: Watcher, seen: Sequence[Seen], *, blocks: bool = True) -> Table:
    """Return the table of all runs. `blocks` draws A_step after every task; not all terminals have the characters."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("run", overflow="fold", min_width=16)
    for name in ("state", "task", "epoch", "loss", "A_step"):
        table.add_column(name, no_wrap=True, justify="left" if name == "state" else "right")
    if blocks:
        table.add_column("per task", no_wrap=True)
    table.add_column("s/epoch", no_wrap=True, justify="right")
    table.add_column("time", no_wrap=True, justify="right")
    for each in seen:
        cells = [Text(printable(watcher.name(each.path))), Text(each.state, _STYLES[each.state]), *_numbers(each)]
        if blocks:
            cells.append(Text(sparkline(each.steps)))
        cells += [Text(_rounded(each.seconds_per_epoch, 2)), Text(_time(each))]
        table.add_row(*cells)
        if each.note:
            note = printable(each.note)
            table.add_row(Text("  " + (note if len(note) <= MOST_NOTE else note[:MOST_NOTE] + "..."), "dim"))
    return table


def summary(seen: Sequence[Seen]) -> str:
    """Return how many runs are in which state, and how long the longest of them will take."""
    counts = Counter(each.state for each in seen)
    order = (RUNNING, WAITING, FINISHED, FAILED, INTERRUPTED)
    text = f"{len(seen)} run{'' if len(seen) == 1 else 's'}: " + ", ".join(
        f"{counts[state]} {state}" for state in order if counts[state]
    )
    left = [each.seconds_left for each in seen if each.seconds_left is not None]
    return text + (f"; {duration(max(left))} left of those that run" if left else "")


def sparkline(values: Sequence[float]) -> str:
    """Return percentages as a row of blocks, from 0 to 100."""
    last = len(_BLOCKS) - 1
    return "".join(" " if math.isnan(each) else _BLOCKS[min(int(each * last / 100 + 0.5), last)] for each in values)


def _numbers(each: Seen) -> list[Text]:
    at = each.task
    if each.state == RUNNING and (each.tasks is None or at < each.tasks):
        at += 1  # the task under way
    task = "" if each.tasks is None and not each.task else f"{at}/{'?' if each.tasks is None else each.tasks}"
    epoch = f"{each.epoch}/{each.epochs}" if each.epochs and each.state == RUNNING else ""
    return [
        Text(task),
        Text(epoch),
        Text(_rounded(each.loss, 4)),
        Text(_rounded(each.steps[-1] if each.steps else None, 2)),
    ]


def _time(each: Seen) -> str:
    if each.seconds_left is not None:
        return f"{duration(each.seconds_left)} left"
    return "" if each.seconds is None else duration(each.seconds)


def _rounded(value: float | None, digits: int) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.{digits}f}"
