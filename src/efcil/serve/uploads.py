"""Bodies of requests: images and fields, read piece by piece within limits, in memory only.

Starlette's own form parser writes files of more than 1 MB to the disk, and has no limit for their size. Here a part is
given out as soon as it has arrived, so that an image can be decoded, and its bytes dropped, while the next one arrives.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from efcil.data.decode import Encoded, decode_image, sides
from efcil.errors import DataError
from efcil.model.images import model_fit
from efcil.serve.names import shown_file
from efcil.serve.options import Limits
from efcil.serve.refusal import Refused

if TYPE_CHECKING:
    from starlette.requests import Request

#: Most bytes of a field that is not a file.
LONGEST_FIELD = 4096
#: Most fields that are not files.
MOST_FIELDS = 1000
#: For a model that does not exist yet, images are kept at up to this side until its size is known.
LARGEST_KEPT_SIDE = 448


@dataclass(frozen=True)
class Part:
    """A field or a file of a form; a file has the name that its sender gave it, which may be anything."""

    field: str
    content: bytes
    file: str | None = None
    is_file: bool = False

    @property
    def text(self) -> str:
        """The content as text."""
        try:
            return self.content.decode("utf-8")
        except UnicodeDecodeError:
            raise Refused(400, f"The field {self.field!r} is not UTF-8 text.") from None


class Budget:
    """Bytes that all requests together may hold in memory."""

    def __init__(self, most: int) -> None:
        self.held = 0
        self._most = most

    @contextmanager
    def lease(self) -> Iterator[Callable[[int], None]]:
        """Return a function that takes bytes from the budget; what was taken is given back at the end."""
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            if self.held + count > self._most:
                raise Refused(
                    503, "Too many images arrive at the same time. Ask again in a moment.", {"Retry-After": "1"}
                )
            self.held += count
            taken += count

        try:
            yield take
        finally:
            self.held -= taken


async def body(request: Request, most: int, seconds: float, take: Callable[[int], None]) -> AsyncIterator[bytes]:
    """Yield the body of a request as it arrives; one that is too long or too slow is refused."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:18]) > most:
        raise _too_large("The request", most)
    arrived = 0
    pieces = aiter(request.stream())
    while True:
        try:
            # Not `wait_for`: up to Python 3.11 it loses the end of the caller's time if a piece arrives just then.
            async with asyncio.timeout(seconds):
                piece = await anext(pieces)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise Refused(408, f"Nothing arrived for {seconds:g} seconds. Send it again.") from None
        arrived += len(piece)
        if arrived > most:
            raise _too_large("The request", most)
        take(len(piece))
        yield piece


async def small(request: Request, most: int, seconds: float) -> bytes:
    """Return a body of a few fields, all of which must arrive in time: one byte now and then keeps no connection."""
    try:
        async with asyncio.timeout(seconds):
            return b"".join([piece async for piece in body(request, most, seconds, free)])
    except TimeoutError:
        raise Refused(408, f"The request took more than {seconds:g} seconds to arrive. Send it again.") from None


async def raw(request: Request, limits: Limits, take: Callable[[int], None]) -> bytes:
    """Return the body of a request that is one image."""
    return b"".join([piece async for piece in body(request, limits.upload_bytes, limits.seconds, take)])


def is_form(request: Request) -> bool:
    """Return whether a request is a form with files."""
    return request.headers.get("content-type", "").lower().startswith("multipart/form-data")


def free(_: int) -> None:
    """Take bytes from no budget."""


async def parts(
    request: Request, limits: Limits, most_files: int, most: int, take: Callable[[int], None] = free
) -> AsyncIterator[Part]:
    """Yield the parts of a form of at most `most` bytes, each as soon as it is complete."""
    from python_multipart import multipart

    _, options = multipart.parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if not boundary:
        raise Refused(400, "The form names no boundary. Let your HTTP library set the Content-Type header.")
    reader = _Reader(limits, most_files)
    try:
        parser = multipart.MultipartParser(boundary, reader.callbacks())
        async for piece in body(request, most, limits.seconds, take):
            parser.write(piece)
            for part in reader.complete():
                yield part
        parser.finalize()
    except multipart.FormParserError:
        raise Refused(400, "The form is broken. Send it again.") from None
    if not reader.ended:
        raise Refused(400, "The form ends in its middle. Send it again.")


class _Reader:
    """Gathers the parts of a form from the parser's calls."""

    def __init__(self, limits: Limits, most_files: int) -> None:
        self.ended = False
        self._limits = limits
        self._most_files = most_files
        self._files = self._fields = 0
        self._header = [bytearray(), bytearray()]
        self._disposition = b""
        self._options: dict[bytes, bytes] = {}
        self._content = bytearray()
        self._complete: list[Part] = []

    def callbacks(self) -> Any:
        """Return what the parser calls."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, stop: self._header[0].extend(data[start:stop]),
            "on_header_value": lambda data, start, stop: self._header[1].extend(data[start:stop]),
            "on_header_end": self._header_ends,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._all,
        }

    def complete(self) -> list[Part]:
        """Return the parts that have been completed since the last call."""
        found, self._complete = self._complete, []
        return found

    def _begin(self) -> None:
        self._disposition, self._content = b"", bytearray()

    def _header_ends(self) -> None:
        if bytes(self._header[0]).lower() == b"content-disposition":
            self._disposition = bytes(self._header[1])
        self._header = [bytearray(), bytearray()]

    def _headers_end(self) -> None:
        from python_multipart.multipart import parse_options_header

        _, self._options = parse_options_header(self._disposition)
        if b"name" not in self._options:
            raise Refused(400, "A part of the form has no name.")
        if self._is_file:
            self._files += 1
        else:
            self._fields += 1
        if self._files > self._most_files:
            raise Refused(413, f"There are more than {self._most_files} images. Send fewer at a time.")
        if self._fields > MOST_FIELDS:
            raise Refused(413, f"The form has more than {MOST_FIELDS} fields.")

    @property
    def _is_file(self) -> bool:
        return b"filename" in self._options

    def _data(self, data: bytes, start: int, stop: int) -> None:
        most = self._limits.upload_bytes if self._is_file else LONGEST_FIELD
        if len(self._content) + stop - start > most:
            what = shown_file(self._file, self._files) if self._is_file else "A field"
            raise _too_large(what, most)
        self._content += data[start:stop]

    @property
    def _file(self) -> str | None:
        given = self._options.get(b"filename")
        return None if given is None else given.decode("utf-8", "replace")

    def _end(self) -> None:
        field = self._options[b"name"].decode("utf-8", "replace")
        self._complete.append(Part(field, bytes(self._content), self._file, self._is_file))
        self._content = bytearray()

    def _all(self) -> None:
        self.ended = True


def _too_large(what: str, most: int) -> Refused:
    size = f"{most / (1 << 20):.0f} MB" if most >= 1 << 20 else f"{most:,} bytes"
    return Refused(413, f"{what} has more than {size}. Make it smaller, or start the server with a higher limit.")


# -- images ----------------------------------------------------------------------------------------------------------


def decoded(content: bytes, where: str, size: int | None, limits: Limits) -> np.ndarray:
    """Return an image as uint8, side x side x 3; without a size at its own, at most LARGEST_KEPT_SIDE."""
    if not content:
        raise DataError(f"{where} is empty.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is lower, and final
        width, height = sides(Encoded(content, where))
    if width * height > limits.pixels:
        raise DataError(
            f"{where} has {width * height / 1e6:,.0f} megapixels; the most is {limits.pixels / 1e6:,.0f}. "
            "Make it smaller first."
        )
    if size is None:
        size = max(8, min(width, height, LARGEST_KEPT_SIDE))
    return decode_image(Encoded(content, where), model_fit(size))
