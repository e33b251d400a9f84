"""Compressed images to uint8 RGB arrays, in parallel, with errors that name the image.

How an image becomes RGB: greyscale is repeated over the channels, palettes are looked up, CMYK and the other colour
spaces are converted, 16-bit values are scaled to 8 bits, and transparent pixels are composited onto white, because the
colour hidden under full transparency is arbitrary and such pictures are usually shown on white. Of an animation the
first frame is used. Floating-point images are refused: their range is unknown.

A photograph of twelve megapixels is mostly thrown away when it becomes an input of 224 pixels. With `Fit.reduce`,
images are first shrunk to a half, a quarter or an eighth, as long as 1.5 times the size that is asked for is left. A
JPEG file is decoded at that size, which skips most of the work; an image of another kind is averaged over blocks,
which gives nearly the same pixels. Benchmarks do not use it: their images must stay as they are.
"""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

from efcil.activity import doing, next_piece
from efcil.errors import DataError

# Only these decoders are tried. Pillow has many more, some of which start other programs; and trying all of them on
# every image takes longer than decoding a small one.
#: Whether AVIF images can be read: Pillow has a decoder since 11.3, but not in every build.
READS_AVIF = importlib.util.find_spec("PIL._avif") is not None
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", *["AVIF"] * READS_AVIF)
AVIF_ADVICE = 'to read AVIF images, pip install "pillow>=11.3"'
HEIF_SUFFIXES = (".heic", ".heif", ".hif")
#: Whether the photographs of telephones that are HEIF files can be read: the extra `heic` is installed.
READS_HEIF = importlib.util.find_spec("pillow_heif") is not None
HEIF_ADVICE = 'to read HEIC images, pip install "efcil[heic]"'
SUFFIXES = (
    *(".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"),
    *([".avif"] * READS_AVIF),
    *(HEIF_SUFFIXES if READS_HEIF else ()),
)

LARGEST_USUAL_SIDE = 224
#: How many images are read to find the usual side: more would hardly change the median.
SAMPLED_SIDES = 1000

#: How much larger than the size that is asked for an image must stay when it is shrunk first. Less changes the pixels
#: visibly, more costs time: docs/speed-study.md has both.
_KEPT = 1.5
_REDUCTIONS = (8, 4, 2)
#: What undoes an EXIF orientation.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

#: What the first bytes of an AVIF or a HEIF file say after its length and `ftyp`.
_AVIF_BRANDS = (b"avif", b"avis")
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")

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
    reduce: bool = False  # shrink a much larger image by whole factors first; only with `resize`
    short_side: int | None = None  # resize the shorter side to this, then cut the square out of the centre


@dataclass(frozen=True)
class Bound:
    """How a whole image of any shape is kept: a shorter side of more than `short_side` pixels is shrunk to that."""

    short_side: int
    enlarge: bool = False  # a shorter side of fewer pixels is enlarged to that


def decode_image(encoded: Encoded, fit: Fit | Bound) -> np.ndarray:
    """Decode one image to a uint8 array of height x width x 3; a DataError names the image when that is impossible."""
    try:
        with _open(encoded.content) as opened:
            # Checked before decoding, which may take long: nothing is resized here.
            if isinstance(fit, Fit) and not fit.resize and opened.size != (fit.size, fit.size):
                raise DataError(
                    f"is {opened.size[0]} x {opened.size[1]} pixels, but {fit.size} x {fit.size} is expected. "
                    "Replace it with the original image."
                )
            pixels = _decoded(opened, fit) if isinstance(fit, Fit) else _whole(opened, fit)
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
    if fit.resize and fit.reduce:
        return _shrunk(image, fit, image.size, _reduction(image.size, fit.size))
    if fit.orient:
        image = ImageOps.exif_transpose(image)
    image = _to_rgb(image)
    if fit.resize and fit.short_side is not None:
        return np.asarray(_cut_from_resized(image, fit.short_side, fit.size))
    return np.asarray(_resize_and_crop(image, fit.size) if fit.resize else image)


def resized_sides(size: tuple[int, int], short_side: int) -> tuple[int, int]:
    """Return width and height of an image whose shorter side becomes `short_side`; the longer one is rounded down."""
    width, height = size
    if width <= height:
        return short_side, int(short_side * height / width)
    return int(short_side * width / height), short_side


def _cut_from_resized(image: Image.Image, short_side: int, size: int) -> Image.Image:
    """Resize the shorter side, then cut the square out of the centre: the usual test view of ImageNet."""
    width, height = resized_sides(image.size, short_side)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))


def _whole(image: Image.Image, bound: Bound) -> np.ndarray:
    image.load()
    image = _to_rgb(image)
    if min(image.size) > bound.short_side or (bound.enlarge and min(image.size) < bound.short_side):
        image = image.resize(resized_sides(image.size, bound.short_side), Image.Resampling.BILINEAR)
    return np.asarray(image)


def _decoded(image: Image.Image, fit: Fit) -> np.ndarray:
    """Decode an opened file, a JPEG at about the size that is needed."""
    whole, factor = image.size, _reduction(image.size, fit.size) if fit.resize and fit.reduce else 1
    drafted = None
    # That of HEIF would take an embedded thumbnail, which may show anything. The mode stays: grey, RGB and CMYK are
    # converted later, as always.
    if factor > 1 and isinstance(image, JpegImageFile):
        drafted = image.draft(None, (whole[0] // factor, whole[1] // factor))
    image.load()
    if image.format == "HEIF" and image.size != whole:  # its header was believed when the pixels were counted
        raise DataError(f"is {image.size[0]} x {image.size[1]} pixels, but says {whole[0]} x {whole[1]}. Replace it.")
    return fit_image(image, fit) if drafted is None else _shrunk(image, fit, drafted[1][2:], 1)


def _reduction(size: tuple[int, int], target: int) -> int:
    """Return by which factor an image may be shrunk before it is resized to `target` pixels."""
    return next((factor for factor in _REDUCTIONS if min(size) >= factor * _KEPT * target), 1)


def _shrunk(image: Image.Image, fit: Fit, area: tuple[float, float], factor: int) -> np.ndarray:
    """Shrink an image by `factor`, then turn and resize it.

    `area` is what it shows, in its pixels: at an eighth, the last column may show a single column of the file.
    """
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1) if fit.orient else 1
    image = _to_rgb(image)
    if factor > 1:
        image = image.reduce(factor)
    width, height = area[0] / factor, area[1] / factor
    if orientation in _TURNS:
        image = image.transpose(_TURNS[orientation])
        width, height = (height, width) if orientation >= 5 else (width, height)
    # A last column that is not full may be the first one by now.
    left = image.size[0] - width if orientation in (2, 3, 6, 7) else 0.0
    top = image.size[1] - height if orientation in (3, 4, 7, 8) else 0.0
    return np.asarray(_resize_and_crop(image, fit.size, (left, top, width, height)))


class BrokenImages(DataError):
    """Images that cannot be used, among others that can."""


@dataclass(frozen=True)
class Broken:
    """An image that cannot be used: its place in the sequence, its name, and why."""

    index: int
    where: str
    error: DataError


def decode_into(
    target: np.ndarray | list[np.ndarray], encoded: Sequence[Encoded], fit: Fit | Bound, workers: int | None = None
) -> None:
    """Decode `encoded[i]` into `target[i]` for all i, on `workers` threads (default: one per processor core).

    All images are tried; the error says what is wrong with the first broken one and names the others.
    """
    broken = decode_intact(target, encoded, fit, workers)
    if len(broken) == 1:
        raise BrokenImages(str(broken[0].error)) from broken[0].error
    if broken:
        names = ", ".join(each.where for each in broken[:_NAMED_BROKEN])
        more = f" and {len(broken) - _NAMED_BROKEN} more" if len(broken) > _NAMED_BROKEN else ""
        raise BrokenImages(f"{broken[0].error} {len(broken)} images cannot be used: {names}{more}.") from broken[
            0
        ].error


def decode_intact(
    target: np.ndarray | list[np.ndarray], encoded: Sequence[Encoded], fit: Fit | Bound, workers: int | None = None
) -> list[Broken]:
    """Do as `decode_into` does, but return the broken images, in order; their places in `target` are undefined."""
    if len(target) != len(encoded):
        raise ValueError(f"{len(encoded)} images for {len(target)} places")
    # Pillow releases the interpreter's lock while it decompresses and resizes: threads are enough, and share `target`.
    # If there is little to decompress, many threads only wait for the lock.
    small = all(isinstance(each.content, bytes) and len(each.content) < _SMALL_BYTES for each in encoded[:16])
    most = min(_FEW_THREADS, os.cpu_count() or 1) if small else os.cpu_count() or 1
    threads = max(1, workers or most)
    size = max(1, min(_IMAGES_PER_PIECE, len(encoded) // (4 * threads)))  # a few large images: all threads work, too

    def decode_piece(start: int) -> list[Broken]:
        broken = []
        for index in range(start, min(start + size, len(encoded))):
            try:
                target[index] = decode_image(encoded[index], fit)
            except DataError as error:
                broken.append(Broken(index, encoded[index].where, error))
        return broken

    with ThreadPoolExecutor(threads) as pool, doing("decoding images", len(encoded)) as work:
        pieces = [pool.submit(decode_piece, start) for start in range(0, len(encoded), size)]
        found: list[Broken] = []
        try:
            for piece in pieces:
                next_piece()
                found += piece.result()
                work.done = min(work.done + size, len(encoded))
            return found
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def short_side(encoded: Encoded) -> int:
    """Return the shorter side of an image in pixels, reading no more than its header."""
    try:
        with _open(encoded.content) as image:
            return min(image.size)
    except DataError as error:
        raise DataError(f"{encoded.where} {error}") from None
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
    try:
        return Image.open(io.BytesIO(content) if isinstance(content, bytes) else content, formats=FORMATS)
    except Image.UnidentifiedImageError:
        start = _start(content)
        if not start:
            raise DataError("is empty. Replace it with an intact copy, or remove it.") from None
        brand = start[8:12] if start[4:8] == b"ftyp" else b""  # many have the suffix of another format
        if brand in _AVIF_BRANDS and not READS_AVIF:
            raise DataError(f"is an AVIF image. Convert it to JPEG or PNG; {AVIF_ADVICE}.") from None
        if brand not in _HEIF_BRANDS:
            raise
    if not READS_HEIF:
        raise DataError(f"is a HEIF image. Convert it to JPEG or PNG; {HEIF_ADVICE}.")
    _register_heif()
    return Image.open(io.BytesIO(content) if isinstance(content, bytes) else content, formats=("HEIF",))


def _start(content: bytes | Path) -> bytes:
    """Return the first bytes of a file: as many as tell an AVIF or a HEIF image."""
    if isinstance(content, bytes):
        return content[:12]
    with open(content, "rb") as stream:
        return stream.read(12)


def _register_heif() -> None:
    """Let Pillow decode HEIF; it is not asked to write it, and its other formats stay as they are."""
    from pillow_heif import HeifImageFile

    if "HEIF" not in Image.OPEN:
        Image.register_open("HEIF", HeifImageFile)


def _reason(error: Exception) -> str:
    # Pillow's message for unknown content prints the address of a buffer object, which does not help the user.
    if isinstance(error, Image.UnidentifiedImageError):
        return "its format is none of " + ", ".join((*FORMATS, *["HEIF"] * READS_HEIF))
    return " ".join(str(error).split()) or type(error).__name__


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


def _resize_and_crop(
    image: Image.Image, size: int, area: tuple[float, float, float, float] | None = None
) -> Image.Image:
    """Resize the centred square of an image, or of an `area` of it: its left and top, width and height."""
    left, top, width, height = area or (0.0, 0.0, *image.size)
    side = min(width, height)
    left, top = left + (width - side) / 2, top + (height - side) / 2
    # One resampling of the centred square gives the same as resizing the short side and cropping, without computing
    # the pixels outside the crop. Pillow's bilinear filter widens with the reduction, that is, it is antialiased.
    return image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
