"""JSON and text from untrusted files, read in bounded time and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 64 * 2**20
_PIECE_BYTES = 2**18
#: Far more than any of our files has, and far less than what overflows Python's stack.
MOST_LEVELS = 64
#: No file needs numbers beyond 64-bit integers; much longer ones cannot even be converted to floats.
MOST_DIGITS = 40


def parse(text: str) -> Any:
    """Return the value of JSON text. Text that is not JSON, too deep, or has too long a number raises a ValueError."""
    try:
        value = json.loads(text, parse_int=whole_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # A text with few brackets cannot be deep, so most lines need no check.
    if text.count("[") + text.count("{") > MOST_LEVELS:
        _refuse_deep(value)
    return value


def read(file: Path, most: int = MOST_BYTES) -> Any:
    """Return the value of a JSON file; wrong content raises a ValueError."""
    return parse(read_text(file, most))


def read_text(file: Path, most: int = MOST_BYTES) -> str:
    """Return a UTF-8 file of at most `most` bytes; a larger one, or one that is not text, raises a ValueError."""
    content = bytearray()
    with open(file, "rb") as stream:
        while piece := stream.read(_PIECE_BYTES):
            content += piece
            if len(content) > most:
                raise ValueError(f"it holds more than {most:,} bytes")
    return content.decode("utf-8")


def whole_number(text: str) -> int:
    """Return a whole number from text; one that is too long, or is not a number, raises a ValueError."""
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number of {len(text):,} digits is too long")
    return int(text)


def _refuse_deep(value: Any) -> None:
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
        level = [part for part in level if isinstance(part, dict | list)]
        if not level:
            return
    raise ValueError("it is nested too deeply")
