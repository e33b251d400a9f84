"""`efcil data`: which datasets there are, and whether the files of one are complete and correct."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import Any

from efcil.commands.parser import add_debug, add_option
from efcil.errors import SettingsError, printable, unknown
from efcil.settings import Settings, options


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "data",
        help="list the datasets, or check the files of one",
        description="List the datasets. With a name, read that dataset, which decodes and caches its images, and "
        "print what it holds.",
    )
    parser.add_argument("name", nargs="?", metavar="DATASET", help="dataset to read and check")
    known = options(Settings)
    for setting in ("data", "held_out", "image_size"):
        add_option(parser, known[setting])
    add_debug(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Print the list, or the state of one dataset."""
    from efcil.data.sources import SourceOptions, load_dataset, sources

    available = sources()
    data = getattr(arguments, "data", None)
    if arguments.name is None:
        if data is not None:
            raise SettingsError(f"Name the dataset that {data} holds: efcil data DATASET --data {data}.")
        print("\n\n".join(_entry(name, source) for name, source in available.items()))
        return 0
    if arguments.name not in available:
        raise unknown("dataset", arguments.name, available)
    wanted = SourceOptions(
        held_out=getattr(arguments, "held_out", None), image_size=getattr(arguments, "image_size", None)
    )
    place = None if data is None else Path(data)
    dataset = load_dataset(arguments.name, place, wanted)
    cache = cache_place(dataset.train.images)
    if cache is not None and not cache.exists():
        # Images decoded just now are mapped from the build folder; reading them again maps them from the cache.
        dataset = load_dataset(arguments.name, place, wanted)
    print(describe(dataset))
    return 0


def describe(dataset: Any) -> str:
    """Return sizes, classes and cache folder of a loaded dataset."""
    classes = len(dataset.class_names)
    lines = [f"{dataset.name}: {classes} classes, {dataset.image_size} x {dataset.image_size} pixels"]
    for name, images in (("training", dataset.train), ("test", dataset.test)):
        counts = images.class_counts(classes)
        spread = f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
        lines.append(f"  {name:<9} {len(images):>8,} images, {spread} per class")
    names = ", ".join(map(printable, dataset.class_names))
    lines.append(textwrap.fill(f"classes   {names}", 100, initial_indent="  ", subsequent_indent=" " * 12))
    place = cache_place(dataset.train.images)
    lines.append(f"  cache     {'none needed: the images are in memory' if place is None else printable(place)}")
    return "\n".join(lines)


def cache_place(images: Any) -> Path | None:
    """Return the cache entry that an array is mapped from, None for one in memory."""
    while images is not None:
        if getattr(images, "filename", None):
            # <entry>/<split>/images.npy
            return Path(images.filename).parent.parent
        images = getattr(images, "base", None)
    return None


def _entry(name: str, source: Any) -> str:
    expected = textwrap.fill(source.expected, 80, initial_indent="  ", subsequent_indent="  ")
    return f"{name}: {source.description}\n{expected}"
