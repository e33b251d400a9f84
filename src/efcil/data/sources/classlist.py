"""Files that list the classes to use: one per line, by its identifier, its name or its number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from efcil.errors import SettingsError, closest, shortened, some
from efcil.safe_json import read_text


def listed_classes(file: Path, names: Sequence[str], other_names: Sequence[str] = ()) -> list[int]:
    """Return the numbers of the classes that a file lists, sorted. Lines that begin with # are comments."""
    try:
        lines = read_text(file.expanduser()).splitlines()
    except (OSError, ValueError) as error:
        raise SettingsError(f"The list of classes {file} cannot be read as text ({error}).") from error
    number_of = {name: number for each in (other_names, names) for number, name in enumerate(each)}
    found: dict[int, int] = {}
    for line_number, line in enumerate(lines, start=1):
        word = line.strip()
        if not word or word.startswith("#"):
            continue
        number = number_of.get(word)
        if number is None and word.isdecimal() and len(word) < 9 and int(word) < len(names):
            number = int(word)
        if number is None:
            hint = closest(word, names) if len(names) <= 100 else f" Classes are {some(names)}."
            raise SettingsError(f"Line {line_number} of {file} is not a class: {shortened(word)!r}.{hint}")
        if number in found:
            raise SettingsError(f"Line {line_number} of {file} repeats line {found[number]}. List every class once.")
        found[number] = line_number
    if len(found) < 2:
        raise SettingsError(f"{file} lists {len(found)} classes; at least two are needed.")
    return sorted(found)
