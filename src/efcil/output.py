"""Output of text that comes from data: to terminals, spreadsheets, web pages and programs that read JSON.

Names of classes, files and settings come from anywhere. Terminals obey the control characters in them, spreadsheets
run text that starts like a formula, and characters that reverse the writing direction make a name look like another.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from efcil.errors import printable

#: What spreadsheets read as the start of a formula, or skip in front of one; also as full-width characters.
_FORMULA = re.compile(r"[\s]*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]")
_PACKAGE = Path(__file__).parent
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def lines(text: str) -> str:
    """Return text of several lines, with control characters in each escaped."""
    return "\n".join(map(printable, text.split("\n")))


def duration(seconds: float) -> str:
    """Return a time in words: 59 s, 2 min 05 s, 3 h 07 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def counted(count: int, one: str, several: str | None = None) -> str:
    """Return how many of something there are, in words: 1 class, 2 classes, 1,200 images."""
    return f"{count:,} {one if count == 1 else several or one + ('es' if one.endswith('s') else 's')}"


def cell(value: object) -> object:
    """Return a cell of a CSV file: text that starts like a formula gets an apostrophe in front; numbers do not."""
    if not isinstance(value, str):
        return value if value is None or isinstance(value, int | float) else cell(str(value))
    return f"'{value}" if _FORMULA.match(value) and not _NUMBER.fullmatch(value) else value


def csv_line(values: Iterable[object]) -> str:
    """Return a line of a CSV file. Text with any kind of line end is quoted, so that no cell starts a line."""
    text = io.StringIO()
    csv.writer(text).writerow(map(cell, values))  # the writer quotes the characters of its own line end, CR LF
    return text.getvalue().removesuffix("\r\n") + "\n"


def escape(text: object) -> str:
    """Return text as HTML on one line, with control characters escaped."""
    return html.escape(printable(text))


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON in which every character that is not visible is escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    # Line ends here are between values: inside of text, JSON escapes them.
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


@contextmanager
def printable_warnings() -> Iterator[None]:
    """Show warnings of ours as sentences, and all with control characters spelled out: they name files and classes.

    Those of Pillow are about images that it reads nevertheless: very large ones, or odd metadata.
    """
    before = warnings.formatwarning

    def formatted(message: Any, category: Any, filename: str, *rest: Any, **keywords: Any) -> str:
        if category is UserWarning and Path(filename).is_relative_to(_PACKAGE):
            return f"efcil: {lines(str(message))}\n"  # a sentence for users, who need no line of our code
        return lines(before(message, category, filename, *rest, **keywords))

    warnings.formatwarning = formatted
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"PIL\.")
            yield
    finally:
        warnings.formatwarning = before
