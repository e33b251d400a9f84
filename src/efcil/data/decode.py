"""Compressed images to uint8 RGB arrays, in parallel, with errors that name the image.

How an image becomes RGB: greyscale is repeated over the channels, palettes are looked up, CMYK and the other colour
spaces are converted, 16-bit values are scaled to 8 bits, and transparent pixels are composited onto white, because the
colour hidden under full transparency is arbitrary and such pictures are usually shown on white. Of an animation the
first frame is used. Floating-point images are refused: their range is unknown.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from efcil.errors import DataError

# Only these decoders are tried. Pillow has many more, some of which start other programs; and trying all of them on
# every image takes longer than decoding a small one.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")

LARGEST_USUAL_SIDE = 224
#: How many images are read to find the usual side: more would hardly change the median.
SAMPLED_SIDES = 1000

# Images given to a thread together: enough to make the overhead small, few enough that all threads end together.
_IMAGES_PER_PIECE = 128
_SMALL_BYTES = 16_384
_FEW_THREADS = 4
_NAMED_BROKEN = 20


@dataclass(frozen=True)
class Encoded:
    """One compressed image: its bytes or its file, and the words that name it in an error message."""

    content: bytes | Path
    where: str


@dataclass(frozen=True)
class Fit:
    """How an image gets its size: it must already have it, or it is resized and centre-cropped to it."""

    size: int
    resize: bool = False
    orient: bool = False  # turn the image as its EXIF orientation says


def decode_image(encoded: Encoded, fit: Fit) -> np.ndarray:
    """Decode one image to a uint8 array of size x size x 3; a DataError names the image when that is impossible."""
    try:
        with _open(encoded.content) as opened:
            # Checked before decoding, which may take long: nothing is resized here.
            if not fit.resize and opened.size != (fit.size, fit.size):
                raise DataError(
                    f"is {opened.size[0]} x {opened.size[1]} pixels, but {fit.size} x {fit.size} is expected. "
                    "Replace it with the original image."
                )
            opened.load()
            pixels = fit_image(opened, fit)
    except DataError as error:
        raise DataError(f"{encoded.where} {error}") from None
    except Image.DecompressionBombError as error:
        raise DataError(
            f"{encoded.where} is refused: {error} If the image is correct, make it smaller first."
        ) from error
    except FileNotFoundError:
        raise DataError(f"{encoded.where} does not exist. Check the path.") from None
    except Exception as error:  # for a broken file Pillow's decoders may raise almost anything, even SyntaxError
        if isinstance(encoded.content, Path) and encoded.content.is_dir():
            raise DataError(f"{encoded.where} is a folder, not an image. Give the images in it.") from None
        if isinstance(error, PermissionError):
            raise DataError(
                f"{encoded.where} cannot be read ({error.strerror or error}). Change its permissions, or remove it."
            ) from None
        raise DataError(
            f"{encoded.where} cannot be decoded as an image ({_reason(error)}). "
            "Replace it with an intact copy, or remove it."
        ) from error
    return pixels


def fit_image(image: Image.Image, fit: Fit) -> np.ndarray:
    """Return an opened image as a uint8 array of height x width x 3, turned and resized as `fit` says."""
    if fit.orient:
        image = ImageOps.exif_transpose(image)
    image = _to_rgb(image)
    return np.asarray(_resize_and_crop(image, fit.size) if fit.resize else image)


def decode_into(target: np.ndarray, encoded: Sequence[Encoded], fit: Fit, workers: int | None = None) -> None:
    """Decode `encoded[i]` into `target[i]` for all i, on `workers` threads (default: one per processor core).

    All images are tried; the error says what is wrong with the first broken one and names the others.
    """
    if len(target) != len(encoded):
        raise ValueError(f"{len(encoded)} images for {len(target)} places")

    def decode_piece(start: int) -> list[tuple[str, DataError]]:
        broken = []
        for index in range(start, min(start + _IMAGES_PER_PIECE, len(encoded))):
            try:
                target[index] = decode_image(encoded[index], fit)
            except DataError as error:
                broken.append((encoded[index].where, error))
        return broken

    # Pillow releases the interpreter's lock while it decompresses and resizes: threads are enough, and share `target`.
    # If there is little to decompress, many threads only wait for the lock.
    small = all(isinstance(each.content, bytes) and len(each.content) < _SMALL_BYTES for each in encoded[:16])
    most = min(_FEW_THREADS, os.cpu_count() or 1) if small else os.cpu_count() or 1
    with ThreadPoolExecutor(max(1, workers or most)) as pool:
        pieces = [pool.submit(decode_piece, start) for start in range(0, len(encoded), _IMAGES_PER_PIECE)]
        try:
            broken = [each for piece in pieces for each in piece.result()]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    if len(broken) == 1:
        raise broken[0][1]
    if broken:
        names = ", ".join(where for where, _ in broken[:_NAMED_BROKEN])
        more = f" and {len(broken) - _NAMED_BROKEN} more" if len(broken) > _NAMED_BROKEN else ""
        raise DataError(f"{broken[0][1]} {len(broken)} images cannot be used: {names}{more}.") from broken[0][1]


def short_side(encoded: Encoded) -> int:
    """Return the shorter side of an image in pixels, reading no more than its header."""
    try:
        with _open(encoded.content) as image:
            return min(image.size)
    except Exception as error:  # as in decode_image
        raise DataError(
            f"{encoded.where} cannot be read as an image ({_reason(error)}). "
            "Replace it with an intact copy, or remove it."
        ) from error


def usual_side(short_sides: Sequence[int]) -> int:
    """Return the side to resize images to if none is asked for: the median short side, a multiple of 8, at most 224.

    The median because at least half of the images should be shrunk, not enlarged; a multiple of 8 because
    networks halve the image several times, and odd sizes lose a border each time; at most 224 because that is what
    ImageNet networks see, and more costs memory before it gains accuracy.
    """
    return min(LARGEST_USUAL_SIDE, max(8, round(float(np.median(short_sides)) / 8) * 8))


def sides(encoded: Encoded) -> tuple[int, int]:
    """Return width and height of an image in pixels, reading no more than its header."""
    try:
        with _open(encoded.content) as image:
            return image.size
    except DataError as error:
        raise DataError(f"{encoded.where} {error}") from None
    except Image.DecompressionBombError as error:
        raise DataError(f"{encoded.where} is refused: {error}") from None
    except Exception as error:  # as in decode_image
        raise DataError(f"{encoded.where} cannot be read as an image ({_reason(error)}).") from None


def _open(content: bytes | Path) -> Image.Image:
    # A pipe or a device may never end. The caller reports a missing file or a folder.
    if isinstance(content, Path) and content.exists() and not (content.is_file() or content.is_dir()):
        raise DataError("is not a regular file. Give an image file.")
    return Image.open(io.BytesIO(content) if isinstance(content, bytes) else content, formats=FORMATS)


def _reason(error: Exception) -> str:
    # Pillow's message for unknown content prints the address of a buffer object, which does not help the user.
    if isinstance(error, Image.UnidentifiedImageError):
        return "its format is none of " + ", ".join(FORMATS)
    return str(error) or type(error).__name__


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F":
        raise DataError("has floating-point pixels, whose range is unknown. Save it with 8 bits per channel.")
    if image.mode.startswith("I"):
        # "I" is how some Pillow versions open 16-bit files. 257 maps 0 .. 65535 onto 0 .. 255 exactly.
        wide = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        return Image.fromarray(((wide + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        layers = image.convert("RGBA")
        white = Image.new("RGBA", layers.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layers).convert("RGB")
    return image.convert("RGB")


def _resize_and_crop(image: Image.Image, size: int) -> Image.Image:
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    # One resampling of the centred square gives the same as resizing the short side and cropping, without computing
    # the pixels outside the crop. Pillow's bilinear filter widens with the reduction, that is, it is antialiased.
    return image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
