"""Names that people type: classes, and files of uploads. They are shown, and never used as paths."""

from __future__ import annotations

import unicodedata
from collections.abc import Hashable, Iterable

from efcil.errors import printable, shortened
from efcil.serve.refusal import Refused

LONGEST_CLASS = 80
LONGEST_FILE = 60


def class_name(text: str) -> str:
    """Return the name of a class in its normal form; one that is empty, too long or not printable is refused."""
    name = unicodedata.normalize("NFC", text).strip()
    if not name:
        raise Refused(400, "A class has no name. Give every class a name.")
    if len(name) > LONGEST_CLASS:
        raise Refused(400, f"The name of a class has {len(name):,} characters; the most is {LONGEST_CLASS}.")
    if not name.isprintable():
        raise Refused(
            400, f"The name {shortened(printable(name))!r} has characters that cannot be shown. Leave them out."
        )
    return name


def refuse_twin(name: str, known: Iterable[Hashable]) -> None:
    """Refuse a name that differs from a known class only in upper and lower case, or is that of a number."""
    for label in known:
        if str(label).strip().casefold() != name.casefold() or label == name:
            continue
        if not isinstance(label, str):
            raise Refused(
                409, f"The model knows the number {label}, and names given here are text. Teach it from Python."
            )
        raise Refused(
            409,
            f"The model knows {label!r}, and {name!r} looks the same. Write it as {label!r} to teach more of it, or "
            "give the new class a clearly different name.",
        )


def shown_label(label: Hashable) -> str:
    """Return a label as text on one line."""
    return printable(label)


def shown_file(name: str | None, number: int) -> str:
    """Return words for an uploaded file: its number, and its name where it has one."""
    plain = shortened(printable(name or "").replace("\\", "/").rpartition("/")[2], LONGEST_FILE)
    return f"Picture {number}" + (f" ({plain})" if plain else "")
