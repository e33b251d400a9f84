"""Images and labels in every supported form, as uint8 arrays of one size.

Images may be one uint8 array or tensor (N x H x W x C, N x C x H x W, or N x H x W for grey), a folder, a dataset, a
DataLoader, an iterator of (image, label) pairs, or a sequence of files, PIL images, arrays and tensors. pairs.py reads
datasets and iterators.
"""

from __future__ import annotations

import math
import os
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from efcil.data.decode import (
    LARGEST_USUAL_SIDE,
    SAMPLED_SIDES,
    Encoded,
    Fit,
    decode_image,
    decode_into,
    fit_image,
    short_side,
    usual_side,
)
from efcil.data.sources.listing import (
    files_below,
    images_below,
    images_of_classes,
    is_image,
    is_text,
    visible_folders,
    wrong_level,
)
from efcil.errors import DataError, some
from efcil.model import pairs

_HELD_OUT_NAMES = ("test", "val")
#: Files that file managers create, in lower case; hidden files are skipped anyway.
_LEFT_BEHIND = ("thumbs.db", "desktop.ini")
InputError = pairs.InputError
#: Images that a class should have at least.
FEWEST_IMAGES = 5
_NO_IMAGE = "not images"
#: What to do about files that are ignored, by their suffixes.
_BY_TYPE = (
    (".heic .heif .hif", "to read them: pip install 'efcil[heic]'"),
    (".avif", "to read them: pip install 'pillow>=11.3'"),
    (".raw .cr2 .cr3 .crw .nef .nrw .arw .dng .orf .rw2 .raf .srw .pef", "raw photographs: convert to JPEG"),
    (".svg .svgz .eps .ai .cdr", "drawings: export as PNG"),
    (".jxl .jp2 .psd .xcf .ico .tga .exr .hdr .dds", "convert to JPEG or PNG"),
    (".mp4 .mov .avi .mkv .webm .m4v .mpg .mpeg .wmv .3gp", "videos: save single frames as JPEG"),
    (
        ".pdf .txt .csv .tsv .json .jsonl .xml .yaml .yml .md .html .doc .docx .odt .xls .xlsx .ppt .pptx .py .ipynb "
        ".zip .tar .gz .7z .rar .mp3 .wav .npy .npz .pt .pth .safetensors .db .log .ini .aae .xmp",
        _NO_IMAGE,
    ),
)
_OTHERWISE = "if they are images, convert to JPEG or PNG"


def model_fit(size: int) -> Fit:
    """Return how files and PIL images become model input: turned upright, their centred square resized."""
    return Fit(size, resize=True, orient=True, reduce=True)


class Pictures:
    """Images of any kind, turned into pixels piece by piece."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def chosen(self, rows: Sequence[int]) -> Pictures:
        """Return those of the images that `rows` numbers, in that order."""
        return Pictures(self.items[rows] if isinstance(self.items, np.ndarray) else _Chosen(self.items, rows))

    def natural_size(self) -> int:
        """Return the side to resize the images to if none is asked for.

        Arrays that are already square keep their size, up to 224. Otherwise it is the usual side of the images.
        """
        step = max(1, len(self) // SAMPLED_SIDES)
        sides = [pair for index in range(0, len(self), step) if (pair := _sides(self.items[index])) is not None]
        if not sides:
            return LARGEST_USUAL_SIDE
        shortest = [min(pair) for pair in sides]
        if len(set(sides)) == 1 and sides[0][0] == sides[0][1] and isinstance(self.items, np.ndarray):
            return min(LARGEST_USUAL_SIDE, shortest[0])
        return usual_side(shortest)

    def pixels(self, size: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the images from `start` to `stop` as uint8 of shape n x size x size x 3."""
        stop = len(self) if stop is None else min(stop, len(self))
        if isinstance(self.items, np.ndarray) and self.items.shape[1:] == (size, size, 3):
            return self.items[start:stop]
        result = np.empty((stop - start, size, size, 3), np.uint8)
        items = [self.items[index] for index in range(start, stop)]
        if all(isinstance(item, Path) for item in items):
            decode_into(result, [Encoded(item, str(item)) for item in items], model_fit(size))
            return result
        for place, item in enumerate(items):
            result[place] = _pixels_of(item, size)
        return result


class _Chosen(Sequence[Any]):
    """Some items of a sequence, which may read each only when it is needed."""

    def __init__(self, items: Sequence[Any], rows: Sequence[int]) -> None:
        self._items, self._rows = items, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._items[int(self._rows[index])]


def gather(images: Any) -> Pictures:
    """Return images without their labels; a folder gives all images below it."""
    if isinstance(images, Pictures):
        return images
    if isinstance(images, str | os.PathLike):
        path = Path(images).expanduser()
        if not path.exists():
            raise InputError(f"{path} does not exist. Give a folder of images, or an image.")
        return Pictures(_some(images_below(path) if path.is_dir() else [path], f"{path} holds no image."))
    if pairs.are_pairs(images):
        return Pictures(_some(pairs.images_of(images)))
    return Pictures(_some(_array_or_list(images)))


def gather_labelled(images: Any, labels: Any = None) -> tuple[Pictures, list[Hashable]]:
    """Return images and their labels; folders (by their class folders), datasets and pairs have labels of their own."""
    if isinstance(images, str | os.PathLike):
        _refuse_labels(labels, "a folder's class folders name its labels")
        paths, names = class_folders(Path(images).expanduser())
        return Pictures(paths), list(names)
    if pairs.have_labels(images) or (labels is None and pairs.are_pairs(images)):
        _refuse_labels(labels, f"the {pairs.kind_of(images)} has its own")
        items, own = pairs.split(images)
        return Pictures(_some(items)), plain_labels(own)
    if labels is None:
        raise InputError("These images have no labels, and the classifier requires y to be passed: give labels.")
    found, plain = Pictures(_some(_array_or_list(images))), plain_labels(labels)
    if len(found) != len(plain):
        raise InputError(
            f"There are {len(found)} images but {len(plain)} labels (inconsistent numbers of samples). "
            "Give one label per image."
        )
    return found, plain


def class_folders(folder: Path, held_out: bool = False) -> tuple[list[Path], list[str]]:
    """Return the images of a folder with one sub-folder per class, and the class of each.

    The class folders are in train/ if it has folders and is next to a test/ or val/, or if it is the only folder and
    has no images directly in it. `held_out` returns those of test/ or val/ instead; there may be none.
    """
    root = _class_roots(folder)[held_out]
    if root is None:
        return [], []
    found = images_of_classes(visible_folders(root))
    if wrong := wrong_level(root, found):
        raise InputError(wrong)
    if not found:
        raise InputError(
            f"{root} has no sub-folder with images. Put the images of each class into a sub-folder that has the name "
            f"of the class: {root / 'cat' / '1.jpg'}, {root / 'dog' / '2.jpg'}."
        )
    labels = [folder_label(child.name) for child, images in found.items() for _ in images]
    return [image for images in found.values() for image in images], labels


def folder_label(name: str) -> str:
    """Return the label for a folder's name, normalised: some systems write an umlaut as two characters (NFC, NFD)."""
    return unicodedata.normalize("NFC", name)


def plain_name(label: Hashable) -> str:
    """Return what names have in common that differ only in upper and lower case or in outer spaces."""
    return folder_label(str(label)).strip().casefold()


def ignored_files(folder: Path) -> tuple[list[Path], int]:
    """Return what `class_folders` skips: files of unknown type, and the number of images outside class folders."""
    root, _ = _class_roots(folder)
    others = [file for child in visible_folders(root) for file in unknown_files(files_below(child))]
    return others, sum(len(_images_in(place)) for place in {folder, root})


def left_out_folders(folder: Path) -> tuple[Path, list[str]]:
    """Return the folder in which `class_folders` finds classes, and the names of the folders next to it, skipped."""
    root, _ = _class_roots(folder)
    return root, [child.name for child in visible_folders(folder) if folder != root != child]


def unknown_files(files: Iterable[Path]) -> list[Path]:
    """Return the files that are not images by their names, without those that file managers create."""
    return [file for file in files if not is_image(file) and file.name.lower() not in _LEFT_BEHIND]


def ignored_line(files: Sequence[Path]) -> str:
    """Return a sentence about ignored files: how many, of which types, and what to do; what cannot be an image last."""
    kinds = Counter(file.suffix.lower() for file in files)
    order = sorted(kinds, key=lambda kind: (_advice(kind) == _NO_IMAGE, -kinds[kind], kind))
    parts = [f"{kinds[kind]} {kind or 'without suffix'} ({_advice(kind)})" for kind in order]
    return f"{len(files)} file{'s' if len(files) > 1 else ''} ignored: {some(parts)}"


def _advice(suffix: str) -> str:
    return next((advice for suffixes, advice in _BY_TYPE if suffix in suffixes.split()), _OTHERWISE)


def advice(labels: Sequence[Hashable], first: bool) -> Iterator[str]:
    """Yield what to know before new classes are learned: from few images, by this name, or one as the `first` task."""
    counts = Counter(labels)
    single = [str(label) for label, count in counts.items() if count == 1]
    if single:
        has = "has only one image" if len(single) == 1 else "have only one image each"
        yield (
            f"{some(single)} {has}, from which its spread, how much images of a class differ, cannot be known. Give at "
            f"least {FEWEST_IMAGES} images of each class"
        )
    if any(plain_name(label) == "unknown" for label in counts):
        yield (
            "unknown becomes a class like any other, for images that look like these. Images that look like no class "
            "are found without it, by `predict --unknown`, and are called unknown too: give the class another name to "
            "tell them apart"
        )
    if first and len(counts) == 1:
        (name,) = counts
        yield (
            f"{name} is the only class so far: until the model learns a second one, it answers every image with {name}."
            " If the network is trained on your images, a first task of several classes is a better start"
        )


def _class_roots(folder: Path) -> tuple[Path, Path | None]:
    """Return the folder that has the class folders, and the one that has those of held-out images, if any."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder. Give one that has a sub-folder with images for every class.")
    names, train = [child.name for child in visible_folders(folder)], folder / "train"
    beside = next((folder / name for name in _HELD_OUT_NAMES if name in names), None)
    # A class may be called train, too: it has images directly in its folder.
    alone = names == ["train"] and not _images_in(train)
    split = alone or ("train" in names and beside is not None and bool(visible_folders(train)))
    return (train, beside) if split else (folder, None)


def _images_in(folder: Path) -> list[Path]:
    """Return the images directly in a folder."""
    return [child for child in folder.iterdir() if is_image(child) and child.is_file() and child.name[0] != "."]


def plain_labels(labels: Any) -> list[Hashable]:
    """Return labels as plain Python values: numpy and torch scalars become numbers, text or booleans."""
    if isinstance(labels, np.ndarray | torch.Tensor) and labels.ndim != 1:
        raise InputError(f"Give one label per image; the labels are an array of shape {tuple(labels.shape)}.")
    if isinstance(labels, str | bytes) or not isinstance(labels, Iterable):
        raise InputError(f"Labels must be a sequence with one label per image, not {labels!r}.")
    return [_plain_label(label) for label in labels]


def _plain_label(label: Any) -> Hashable:
    if isinstance(label, np.generic | np.ndarray | torch.Tensor) and getattr(label, "ndim", 0) == 0:
        label = label.item()
    if isinstance(label, float) and not math.isfinite(label):
        raise InputError(f"A label is {label} (labels must not contain NaN or infinity). Leave out images without one.")
    if isinstance(label, str) and not is_text(label):
        raise InputError(f"The label {label!r} is not valid UTF-8, so it cannot name a class. Give another one.")
    try:
        hash(label)
    except TypeError:
        raise InputError(
            f"The label {label!r} is not hashable, so it cannot name a class. Use text, numbers or tuples."
        ) from None
    return label


# -- kinds of images -------------------------------------------------------------------------------------------------


def _array_or_list(images: Any) -> Any:
    if isinstance(images, torch.Tensor):
        images = _tensor_of_images(images)
    if isinstance(images, np.ndarray) and images.dtype.kind == "U" and images.ndim == 1:
        images = images.tolist()  # names of files
    if isinstance(images, np.ndarray) and images.dtype != object:
        images = pairs.channels_last(images) if images.ndim == 4 else images
        if images.ndim == 3 and images.shape[2] in (3, 4) and images.shape[1] >= 16:
            raise InputError(
                f"An array of shape {images.shape} looks like a single image in colour, but several are expected. "
                "Give image[None]; for grey images of that width, give N x H x W x 1."
            )
        shaped = images.ndim in (3, 4) and (images.ndim == 3 or images.shape[3] in (1, 3, 4))
        if not shaped or 0 in images.shape[1:]:
            raise InputError(
                f"An array of images is N x H x W x C, N x C x H x W, or N x H x W for grey ones; this one has shape "
                f"{images.shape}. Reshape your data to images."
            )
        _refuse_other_types(images.dtype)
        return images
    if isinstance(images, Image.Image):
        raise InputError("A single image was given, but several are expected. Put it into a list: [image].")
    if not isinstance(images, Iterable):
        raise InputError(f"Images cannot be read from a {type(images).__name__}. Give an array, a list or a folder.")
    return [Path(item).expanduser() if isinstance(item, str | os.PathLike) else item for item in images]


def _tensor_of_images(images: torch.Tensor) -> np.ndarray:
    """Return a tensor of images as an array N x H x W x C, or N x H x W for grey ones."""
    shape = tuple(images.shape)
    if len(shape) == 3 and shape[0] in pairs.CHANNELS and min(shape[1:]) >= 16:
        raise InputError(
            f"A tensor of shape {shape} looks like a single image, but several are expected. Give image[None]; for "
            "grey images, give N x 1 x H x W."
        )
    array = images.detach().cpu().numpy()
    if len(shape) == 4 and (shape[1] in pairs.CHANNELS or shape[3] in pairs.CHANNELS):
        return pairs.channels_last(array, first=True)
    if len(shape) != 3:
        raise InputError(
            "A tensor of images is N x C x H x W, N x H x W x C, or N x H x W for grey ones; this one has shape "
            f"{shape}."
        )
    return array


def _some(items: Any, message: str = "No image was given.") -> Any:
    if len(items) == 0:
        raise InputError(f"{message} At least 1 image (a minimum of 1 sample) is required.")
    return items


def _refuse_labels(labels: Any, reason: str) -> None:
    if labels is not None:
        raise InputError(f"Labels were given, but {reason}. Leave them out.")


def _refuse_other_types(kind: np.dtype[Any]) -> None:
    if kind != np.uint8:
        raise InputError(
            f"Pixels must be whole numbers from 0 to 255 (uint8), but these are {kind}, and their range is unknown. "
            "Scale them to 0..255 and convert: images.astype(numpy.uint8)."
        )


def _sides(item: Any) -> tuple[int, int] | None:
    if isinstance(item, Path):
        try:
            side = short_side(Encoded(item, str(item)))
        except DataError:
            return None  # decoding will report it, together with all other broken files
        return side, side
    if isinstance(item, Image.Image):
        return item.size
    height, width = _array(item).shape[:2]
    return height, width


def _pixels_of(item: Any, size: int) -> np.ndarray:
    if isinstance(item, Path):
        return decode_image(Encoded(item, str(item)), model_fit(size))
    if isinstance(item, Image.Image):
        return fit_image(item, model_fit(size))
    array = _array(item)
    if array.shape == (size, size, 3):
        return array
    image = Image.fromarray(np.ascontiguousarray(array[:, :, 0] if array.shape[2:] == (1,) else array))
    return fit_image(image, Fit(size, resize=image.size != (size, size), reduce=True))


def _array(item: Any) -> np.ndarray:
    """Return one image as a uint8 array H x W or H x W x C."""
    array: Any = item
    first = isinstance(item, torch.Tensor)
    if first:
        array = item.detach().cpu().numpy()
    if isinstance(array, np.ndarray) and array.ndim == 3:
        array = pairs.channels_last(array, first)
    shaped = isinstance(array, np.ndarray) and array.ndim in (2, 3) and array.shape[2:] in ((), (1,), (3,), (4,))
    if not shaped or array.size == 0:
        shape = f" of shape {array.shape}" if isinstance(array, np.ndarray) else ""
        raise InputError(
            f"A {type(item).__name__}{shape} is not an image. Images are files, PIL images, arrays H x W x C or H x W, "
            "or tensors C x H x W or H x W x C."
        )
    _refuse_other_types(array.dtype)
    return array


def sorted_classes(labels: Sequence[Hashable]) -> list[Hashable]:
    """Return the distinct labels, sorted if possible, else in order of first occurrence."""
    distinct = list(dict.fromkeys(labels))
    try:
        return sorted(distinct)  # type: ignore[type-var]
    except TypeError:
        return distinct
