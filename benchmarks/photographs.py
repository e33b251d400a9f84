"""A folder in the layout of ImageNet, of pictures with the sizes and the entropy of photographs, made in seconds.

    python benchmarks/photographs.py FOLDER --images 20000

A few hundred pictures are drawn: noise with the 1/f spectrum of natural images, correlated colours, and shapes with
hard edges on top. Every file is another part of one of them, in another brightness: most of 500 x 375 pixels as in
ImageNet, some upright, smaller or larger, with JPEG qualities from 85 to 95. That gives files of about 110 kB. Only
NumPy and Pillow are used, so that many processes start at once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

#: Width, height and how often they occur, of a hundred.
SHAPES = (((500, 375), 60), ((375, 500), 18), ((500, 333), 12), ((320, 240), 5), ((800, 600), 3), ((960, 720), 2))
SIDE = 1024
QUALITIES = (85, 95)
_PICTURES: list[np.ndarray] = []


def picture(seed: int, side: int) -> np.ndarray:
    """Return one large picture (side, side, 3)."""
    random = np.random.default_rng(seed)
    across = np.hypot(*np.meshgrid(np.fft.fftfreq(side), np.fft.rfftfreq(side), indexing="ij"))
    across[0, 0] = 1.0

    def noise(steepness: float) -> np.ndarray:
        phases = random.standard_normal((2, *across.shape))
        found = np.fft.irfft2((phases[0] + 1j * phases[1]) / across**steepness, (side, side))
        return np.asarray(found / found.std(), np.float32)

    light, red, blue = 50 * noise(1.0), 18 * noise(1.3), 18 * noise(1.3)
    mean = random.uniform(90, 150)
    values = np.stack([light + red, light, light + blue], axis=-1) + mean
    image = Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image, "RGBA")
    for _ in range(24):
        left, top = random.integers(0, side, 2).tolist()
        width, height = random.integers(side // 40, side // 6, 2).tolist()
        colour = (*random.integers(0, 256, 3).tolist(), int(random.integers(60, 200)))
        shape = draw.ellipse if random.random() < 0.5 else draw.rectangle
        shape((left, top, left + width, top + height), fill=colour)
    return np.asarray(image)


def write(file: Path, seed: int, shrink: int) -> int:
    """Write one file and return its bytes."""
    random = np.random.default_rng(seed)
    sizes, often = zip(*SHAPES, strict=True)
    width, height = (side // shrink for side in sizes[random.choice(len(sizes), p=np.array(often) / sum(often))])
    source = _PICTURES[int(random.integers(len(_PICTURES)))]
    top, left = (int(random.integers(len(source) - side + 1)) for side in (height, width))
    part = source[top : top + height, left : left + width]
    levels = np.clip(np.arange(256) * random.uniform(0.8, 1.2), 0, 255).astype(np.uint8)
    Image.fromarray(levels[part]).save(file, "JPEG", quality=int(random.integers(QUALITIES[0], QUALITIES[1] + 1)))
    return file.stat().st_size


def _write_class(job: tuple[Path, int, int, int]) -> int:
    folder, first, count, shrink = job
    return sum(write(folder / f"{first + number}.JPEG", first + number, shrink) for number in range(count))


def make(folder: Path, images: int, classes: int, *, test: int = 10, pictures: int = 200, shrink: int = 1) -> float:
    """Write train/ and val/ with so many images; return the mean bytes of a file. `shrink` divides all sides."""
    # This program has no threads, so that its processes can be copies of it.
    context, cores = multiprocessing.get_context("fork"), os.cpu_count() or 1
    with context.Pool(cores) as pool:
        _PICTURES[:] = pool.starmap(picture, [(seed, SIDE // shrink) for seed in range(pictures)], chunksize=1)
    jobs, first = [], 0
    for split, count in (("train", images), ("val", test * classes)):
        for label in range(classes):
            place = folder / split / f"n{label:08d}"
            place.mkdir(parents=True, exist_ok=True)
            share = count // classes + (label < count % classes)
            jobs.append((place, first, share, shrink))
            first += share
    with context.Pool(cores) as pool:
        written = sum(pool.imap_unordered(_write_class, jobs))
    return written / first


def main() -> None:
    """Write the folder and print what it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=20_000, help="training images")
    parser.add_argument("--classes", type=int, default=40)
    parser.add_argument("--test", type=int, default=10, help="test images of a class")
    parser.add_argument("--pictures", type=int, default=200, help="different pictures that files are parts of")
    parser.add_argument("--shrink", type=int, default=1, help="divide all sides by this")
    options = parser.parse_args()
    start = time.perf_counter()
    each = make(
        options.folder, options.images, options.classes, test=options.test, pictures=options.pictures,
        shrink=options.shrink,
    )  # fmt: skip
    print(
        f"{options.images} images in {options.classes} classes, {each / 1000:.1f} kB each on average, "
        f"in {time.perf_counter() - start:.1f} s"
    )


if __name__ == "__main__":
    main()
