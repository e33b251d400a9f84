"""`efcil data`: which datasets there are, and whether the files of one are complete and correct."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import Any

from efcil.commands.parser import Parser, add_option
from efcil.errors import SettingsError, printable
from efcil.settings import Settings, options
from efcil.settings.benchmark import MERGED, SAME_DATASET

HELP = "list the datasets, or check the files of one"
DESCRIPTION = (
    "List the datasets. With a name, read that dataset, which decodes and caches its images, and print what it "
    "holds. `efcil data verify DATASET` checks all of its files: images of every class, sizes, broken files, and "
    "images that are in both splits; its exit code is 1 if something is wrong."
)
VERIFY = "verify"
#: Settings of a run that choose among images.
_CHOSEN = ("held_out", "image_size", "class_list", "columns", "splits", "answers")


def add_arguments(parser: Parser) -> None:
    """Add the arguments and flags."""
    parser.add_argument(
        "name", nargs="*", metavar="DATASET", help="dataset to read and check; after `verify`, to check thoroughly"
    )
    known = options(Settings)
    for setting in ("data", *_CHOSEN):
        add_option(parser, known[setting])


def execute(arguments: argparse.Namespace) -> int:
    """Print the list, or the state of one dataset."""
    from efcil.data.cache import entry_of
    from efcil.data.sources import SourceOptions, find_source, load_dataset, sources
    from efcil.presets import load_preset

    words = list(arguments.name)
    thorough = words[:1] == [VERIFY]
    names = words[1:] if thorough else words
    data = getattr(arguments, "data", None)
    if len(names) > 1:
        raise SettingsError(f"One dataset at a time: {printable(names[0])} or {printable(names[1])}.")
    if not names:
        if thorough or data is not None:
            held = f"that {data} holds" if data is not None else "to verify"
            raise SettingsError(f"Name the dataset {held}: efcil data {'verify ' * thorough}DATASET --data FOLDER.")
        print("\n\n".join(_entry(name, source) for name, source in sources().items()))
        return 0
    (name,) = (SAME_DATASET.get(each, each) for each in names)
    find_source(name)  # what is not a dataset has no preset
    given: dict[str, Any] = {each: getattr(arguments, each, None) for each in _CHOSEN}
    wanted = SourceOptions(**{**given, "answers": given["answers"] or load_preset(name).answers})
    place = None if data is None else Path(data).expanduser()
    if thorough:
        return _verify(name, place, wanted)
    dataset = load_dataset(name, place, wanted)
    cache = entry_of(dataset.train.images)
    if cache is not None and not cache.exists():
        # Images decoded just now are mapped from the build folder; reading them again maps them from the cache.
        dataset = load_dataset(name, place, wanted)
    print(describe(dataset, merged=wanted.answers == MERGED))
    return 0


def _verify(name: str, place: Path | None, wanted: Any) -> int:
    """Print what is there and what is wrong; return 1 if something is."""
    from efcil.data.sources import find_source
    from efcil.data.verify import verify_dataset

    found = verify_dataset(find_source(name), place, wanted)
    print(f"{name}" + ("" if place is None else f" in {printable(place)}"))
    for line in found.lines:
        print(f"  {printable(line)}")
    for line in found.wrong:
        print(_filled(printable(line), "  wrong: "))
    count = len(found.wrong)
    print("Nothing is wrong." if not count else "1 thing is wrong." if count == 1 else f"{count} things are wrong.")
    return 1 if count else 0


def _filled(text: str, start: str) -> str:
    """Return text in lines of at most 100 characters; names of files stay whole."""
    wrapper = textwrap.TextWrapper(100, initial_indent=start, subsequent_indent=" " * len(start))
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.fill(text)


def describe(dataset: Any, merged: bool = False) -> str:
    """Return sizes, classes and cache folder of a loaded dataset, and its answers if classes share them (`merged`)."""
    from efcil.data.cache import entry_of

    classes = len(dataset.class_names)
    lines = [f"{dataset.name}: {classes} classes, {dataset.image_size} x {dataset.image_size} pixels"]
    for name, images in (("training", dataset.train), ("test", dataset.test)):
        counts = images.class_counts(classes)
        spread = f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
        lines.append(f"  {name:<9} {len(images):>8,} images, {spread} per class")
    names = ", ".join(map(printable, dataset.class_names))
    lines.append(textwrap.fill(f"classes   {names}", 100, initial_indent="  ", subsequent_indent=" " * 12))
    if merged:
        from efcil.data.domains import MERGING, need_domains

        domains = need_domains(dataset.class_names, dataset.name, MERGING)
        listed = ", ".join(map(printable, domains.names))
        text = f"domains   {listed}: {domains.counted}"
        lines.append(textwrap.fill(text, 100, initial_indent="  ", subsequent_indent=" " * 12))
    place = entry_of(dataset.train.images)
    kept = "none needed: the images are in memory" if place is None else printable(place)
    if hasattr(dataset.train.images, "supply"):
        kept = "none: the images of a task are decoded when it begins"
    lines.append(f"  cache     {kept}")
    return "\n".join(lines)


def _entry(name: str, source: Any) -> str:
    expected = textwrap.fill(source.expected, 80, initial_indent="  ", subsequent_indent="  ")
    return f"{name}: {source.description}\n{expected}"
