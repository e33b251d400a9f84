"""Predict a folder of images on the CPU: images per second, and the most memory the process had.

    python benchmarks/predict_folder.py [--images 10000] [--side 256] [--size 64] [--network slim]

makes the folder, teaches a model two classes for one epoch, predicts the folder with `efcil predict` in a process of
its own, and prints one line. Seconds include the start of that process. The second figure of memory is that of the same
command with a single image: what the program needs anyway.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from efcil.classifier import IncrementalClassifier

PROGRAM = (
    "import resource, sys\n"
    "from efcil.cli import main\n"
    "code = main(sys.argv[1:])\n"
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)\n"
    "sys.exit(code)\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--side", type=int, default=256, help="side of the JPEG files")
    parser.add_argument("--size", type=int, default=64, help="side of the images that the network sees")
    parser.add_argument("--network", default="slim")
    arguments = parser.parse_args()
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place:
        folder, model = Path(place) / "photos", Path(place) / "model"
        make_folder(folder, arguments.images, arguments.side, draw)
        pixels = draw.integers(0, 256, (8, arguments.size, arguments.size, 3), np.uint8)
        classifier = IncrementalClassifier(network=arguments.network, epochs=1, batch_size=4, device="cpu")
        classifier.fit(pixels, ["left", "right"] * 4).save(model)
        _, floor = predict(model, next(folder.rglob("*.jpg")))
        seconds, peak = predict(model, folder)
    print(
        f"{arguments.images} JPEG files of {arguments.side} px, {arguments.network} at {arguments.size} px: "
        f"{arguments.images / seconds:.0f} images/s, peak {peak / 1024:.0f} MiB (one image: {floor / 1024:.0f} MiB), "
        f"{os.environ.get('OMP_NUM_THREADS', os.cpu_count())} threads, {os.cpu_count()} cores"
    )


def make_folder(folder: Path, count: int, side: int, draw: np.random.Generator) -> None:
    """Write `count` different JPEG files, as smooth as photographs, a thousand to a sub-folder."""
    for number in range(count):
        place = folder / f"{number // 1000:03}"
        place.mkdir(parents=True, exist_ok=True)
        small = draw.integers(0, 256, (16, 16, 3), np.uint8)
        image = Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)
        image.save(place / f"{number:06}.jpg", quality=85)


def predict(model: Path, images: Path) -> tuple[float, int]:
    """Return seconds and the most memory, in KiB, of `efcil predict`."""
    command = [sys.executable, "-c", PROGRAM, "predict", str(model), str(images), "--format", "csv", "--device", "cpu"]
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - start, int(done.stderr.split()[-1])


if __name__ == "__main__":
    main()
