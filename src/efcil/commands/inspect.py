"""`efcil inspect`: what a model knows, and what it stores."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from pathlib import Path
from typing import Any

from efcil.commands.parser import Parser, add_format
from efcil.errors import printable
from efcil.output import counted, to_json

HELP = "show what a model knows and stores"
DESCRIPTION = (
    "Print a model's classes with dates and tasks, its method, everything it stores by name and purpose, and what "
    "could and could not be recovered from that."
)
FORMATS = ("text", "json")
SHOWN_EXTRAS = 20


def add_arguments(parser: Parser) -> None:
    """Add the arguments and flags."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the model")
    add_format(parser, FORMATS)


def execute(arguments: argparse.Namespace) -> int:
    """Print the model's card and inventory."""
    from efcil.model.contents import extras, inventory
    from efcil.model.folder import read_raw

    folder = arguments.model.expanduser()
    card, tensors = read_raw(folder)
    stored = inventory(card, tensors)
    others = extras(folder, card)
    if arguments.format == "json":
        by_name = {name: {"shape": list(t.shape), "type": str(t.dtype)} for name, t in sorted(tensors.items())}
        facts = {"card": card.to_json(), "stored": [dataclasses.asdict(each) for each in stored], "tensors": by_name}
        beside = {"unfinished_task": others.unfinished, "other_files": others.files, "other_parts": others.parts}
        print(to_json(facts | beside, indent=1))
        return 0
    print(describe(card, stored, others))
    return 0


def _day(date: str) -> str:
    """Return day and time as they are shown; any character may separate the two."""
    return f"{date[:10]} {date[11:16]}".rstrip()


def _ways(card: Any) -> list[str]:
    """Return how every visit was computed, where they were not all computed in one way."""
    visits: dict[str, list[str]] = {}
    for number, visit in enumerate(card.visits, start=1):
        for way in visit.made_with:
            words = ", ".join(f"{name} {value}" for name, value in way.items() if value is not False)
            visits.setdefault(printable(words), []).append(str(number))
    if len(visits) < 2:
        return []
    return ["", "computed in more than one way", *(f"  visit {' '.join(n)}: {words}" for words, n in visits.items())]


def _visits(card: Any) -> list[str]:
    """Return every visit by its number, with what images that were not learned from have shown."""
    from efcil.model import measured
    from efcil.model.measuring import rate

    how = {measured.HELD_OUT: "held out", measured.FOLDS: "each left out once", measured.BEFORE: "before learning"}
    known = any(visit.measured for visit in card.visits)
    lines = ["", "visits" + ", with the accuracy on images that were not learned from by then" * known]
    tasks, width = 0, len(str(len(card.visits)))
    for number, visit in enumerate(card.visits, start=1):
        tasks += visit.kind == "task"
        line = f"  {number:>{width}}  {_day(visit.date)}  {_done(visit, tasks)}"
        if (found := visit.measured) is not None:
            right = rate(found.right, found.images)
            line += f": {right} among {counted(found.among, 'class')}, {how[found.way]}"
        lines.append(line)
    return lines if card.visits else []


def _done(visit: Any, task: int) -> str:
    """Return what a visit has done; `task` is the number of the last one by then."""
    classes, images = counted(visit.classes, "class"), counted(visit.images, "image")
    words = {
        "task": f"task {task}, {classes} of {images}",
        "more": f"more of {classes}, {images}",
        "rename": f"{classes} renamed",
        "forget": f"{classes} of {images} forgotten",
        "merge": f"{classes} of {images} merged into one",
    }
    return words[visit.kind]


def _predictions(card: Any) -> list[str]:
    """Return what follows for predictions from what every visit has measured."""
    from efcil.core.typicality import FEWEST
    from efcil.model import measured

    parts = [visit.measured for visit in card.visits]
    if not any(parts):
        return []
    temperature = measured.temperature(parts, card.settings.classifier, len(card.classes))
    lines = [f"temperature of the probabilities: {temperature:.4g}"]
    spread = measured.closeness(visit.measured for visit in card.since_trained)
    if spread is not None:
        few = f", of {FEWEST} that it needs" if spread.images < FEWEST else ""
        lines.append(f"held-out images that `predict --unknown` compares with: {spread.images}{few}")
    return ["", *lines]


def describe(card: Any, stored: list[Any], others: Any) -> str:
    """Return card and inventory as text."""
    size = card.image_size
    lines = [
        f"{card.settings.method} on {card.resolved.network}, images of {size} x {size} pixels, "
        f"{counted(len(card.classes), 'class')} in {counted(len(card.task_sizes), 'task')}",
        f"classified by: {card.classified_by}",
        "",
        "classes",
    ]
    labels = [printable(label) for label in card.labels]
    width = max(map(len, labels), default=0)
    for each, label in zip(card.classes, labels, strict=True):
        learned = _day(each.learned)
        images = f"  {each.images:>6,} image{'s' * (each.images != 1)}" if each.images else ""
        images += f"  {each.right} of {each.measured} right" if each.measured else ""
        lines.append(f"  {label:<{width}}  task {each.task + 1:<3} learned {learned}{images}")
    lines += [*_visits(card), *_predictions(card), *_ways(card)]
    lines += ["", "stored"]
    for row in stored:
        lines.append(f"  {row.title:<26} {row.numbers:>12,} numbers {row.bytes:>12,} bytes  {row.use}")
    total = sum(row.bytes for row in stored)
    lines.append(f"  {'together':<26} {sum(row.numbers for row in stored):>12,} numbers {total:>12,} bytes")
    lines += ["", "what could be recovered from it"]
    for row in stored:
        lines.append(textwrap.fill(f"{row.title}: {row.recovery}", 100, initial_indent="  ", subsequent_indent="    "))
    strangers = [*others.files, *others.parts]
    if strangers:
        lines += ["", "in the folder, but not part of the model"]
        lines += [f"  {printable(name)}" for name in strangers[:SHOWN_EXTRAS]]
        if len(strangers) > SHOWN_EXTRAS:
            lines.append(f"  and {len(strangers) - SHOWN_EXTRAS:,} more; --format json lists all")
    if others.unfinished:
        lines += ["", "A task is unfinished. To resume it, repeat the `efcil learn` command that started it."]
    return "\n".join(lines)
