"""Files inside tensors: complete JPEG, PNG, WebP, GIF and TIFF images, and zip archives, among the stored bytes.

Both the bytes of the file are searched, and tensors of any type that hold a byte in every number.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF")
#: Bytes of a file within which an image that begins there must end.
LARGEST = 1 << 25
_SIGNATURES = re.compile(
    rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP|II\*\x00|MM\x00\*|PK\x03\x04", re.DOTALL
)
_END_OF_ARCHIVE, _END_BYTES = b"PK\x05\x06", 22


def encoded_files(file: Path, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return images and archives that lie in a tensor file or in one of its tensors, in words."""
    found = [f"{file.name}: {words} at byte {place:,}" for place, words in _files(file.read_bytes())]
    for name, tensor in tensors.items():
        if tensor.element_size() > 1:
            found += [f"{name}: {words} from number {place:,} on" for place, words in _files(_as_bytes(tensor))]
    return found


def _as_bytes(tensor: Tensor) -> bytes:
    """Return a tensor's numbers as bytes; those that are none become 0."""
    values = tensor.flatten()
    fits = (values >= 0) & (values <= 255) & (values == values.to(torch.int64))
    return torch.where(fits, values, 0).to(torch.uint8).numpy().tobytes()


def _files(content: bytes) -> Iterator[tuple[int, str]]:
    """Yield where a complete image or archive begins, and what it is."""
    for hit in _SIGNATURES.finditer(content):
        start = hit.start()
        words = _archive(content, start) if hit.group().startswith(b"PK") else _image(content, start)
        if words is not None:
            yield start, words


def _image(content: bytes, start: int) -> str | None:
    """Say what image begins there; a signature alone comes about by chance, an image that can be decoded does not."""
    stop = start + LARGEST
    if content.startswith(b"RIFF", start):
        stop = start + 8 + int.from_bytes(content[start + 4 : start + 8], "little")
    try:
        with Image.open(io.BytesIO(content[start:stop]), formats=FORMATS) as image:
            image.load()
            return f"a {image.format} image of {image.width} x {image.height} pixels"
    except Exception:  # what is no image makes Pillow's decoders raise almost anything
        return None


def _archive(content: bytes, start: int) -> str | None:
    end = content.find(_END_OF_ARCHIVE, start)
    if end < 0:
        return None
    try:
        with zipfile.ZipFile(io.BytesIO(content[start : end + _END_BYTES])) as archive:
            return f"a zip archive of {len(archive.namelist())} files"
    except Exception:  # as above
        return None
