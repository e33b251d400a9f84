"""Predict large photographs on the CPU: images per second, where the time goes, and one prediction from a cold start.

    python benchmarks/predict.py [--images 1000] [--different 24] [--size 4000x3000] [--photos FOLDER]

makes different JPEG photographs (from those of FOLDER, enlarged, with detail added at several scales, or from noise of
several scales), teaches a pre-trained network two classes, and measures in one process: decoding whole against decoding
at reduced size, the network layer by layer against what prediction runs, and both together the obvious way against
`predict_files`. Then `efcil predict` in processes of its own: all images, their names on standard input, and one image.
Seconds of the clock say what a user waits; seconds of the processor say what it would be on a machine with nothing else
to do, divided by its cores.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# As `efcil predict` sets it, before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from PIL import Image

from efcil.classifier import IncrementalClassifier
from efcil.data.decode import Encoded, Fit, decode_image
from efcil.model import Model
from efcil.model.images import model_fit
from efcil.model.prediction import predict_files
from efcil.network import efficientnet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000, help="images of the last measurement (default: 1000)")
    parser.add_argument("--different", type=int, default=24, help="different photographs (default: 24)")
    parser.add_argument("--size", default="4000x3000", help="pixels of a photograph (default: 4000x3000)")
    parser.add_argument("--photos", type=Path, help="folder of photographs to enlarge")
    parser.add_argument("--network", default="efficientnet-lite0")
    arguments = parser.parse_args()
    width, height = map(int, arguments.size.split("x"))
    with tempfile.TemporaryDirectory() as place:
        photos = make_photos(Path(place) / "photos", arguments.different, width, height, arguments.photos)
        folder = teach(Path(place) / "model", arguments.network)
        average = sum(file.stat().st_size for file in photos) / len(photos) / 1e6
        print(
            f"{len(photos)} JPEG photographs of {width} x {height} pixels, {average:.1f} MB on average; "
            f"{arguments.network}, {torch.get_num_threads()} threads, {os.cpu_count()} cores, {processor()}, torch "
            f"{torch.__version__}, load {os.getloadavg()[0]:.1f}"
        )
        model = Model.load(folder, "cpu")
        compare_decoding(model, photos)
        compare_networks(model)
        compare_together(model, photos)
        commands(folder, photos, arguments.images)


def make_photos(folder: Path, count: int, width: int, height: int, sources: Path | None) -> list[Path]:
    """Write photographs with about as much detail as those of a camera."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    given = sorted(sources.rglob("*.jpg")) if sources is not None else []
    for number in range(count):
        if given:
            base = Image.open(given[number * len(given) // count]).convert("RGB")
        else:
            base = Image.fromarray(draw.integers(0, 256, (24, 32, 3), np.uint8))
        scale = max(width / base.width, height / base.height)
        large = base.resize((round(base.width * scale), round(base.height * scale)), Image.Resampling.LANCZOS)
        pixels = np.asarray(large.crop((0, 0, width, height)), np.float32)
        for step, strength in ((1, 9), (2, 6), (4, 5), (8, 4)):
            grain = draw.normal(0, strength, (height // step, width // step)).astype(np.float32)
            pixels = (
                pixels + np.asarray(Image.fromarray(grain).resize((width, height), Image.Resampling.BICUBIC))[..., None]
            )
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(folder / f"{number:03}.jpg", quality=90)
    return sorted(folder.iterdir())


def teach(folder: Path, network: str) -> Path:
    """Make a model of two classes: what they are does not change how long a prediction takes."""
    pixels = np.random.default_rng(0).integers(0, 256, (16, 64, 64, 3), np.uint8)
    untrained = {"first_task.epochs": 0}
    classifier = IncrementalClassifier(network=network, method="lda", device="cpu", settings=untrained)
    classifier.fit(pixels, ["left", "right"] * 8).save(folder)
    return folder


@contextmanager
def measured(what: str, images: int) -> Iterator[None]:
    """Print how long a block took for an image: by the clock, and by the processor with its children."""
    clock, used = time.perf_counter(), _processor_seconds()
    yield
    seconds, busy = time.perf_counter() - clock, _processor_seconds() - used
    print(
        f"{what:46} {1e3 * seconds / images:7.1f} ms/image by the clock ({images / seconds:6.1f} images/s), "
        f"{1e3 * busy / images:7.1f} ms/image of processor time",
        flush=True,
    )


def _processor_seconds() -> float:
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def compare_decoding(model: Model, photos: list[Path]) -> None:
    size = model.card.image_size
    pixels = {}
    for name, fit in (("whole", Fit(size, resize=True, orient=True)), ("reduced", model_fit(size))):
        with measured(f"decode, {name}, one thread", len(photos)):
            pixels[name] = np.stack([decode_image(Encoded(file, str(file)), fit) for file in photos])
    difference = abs(pixels["whole"].astype(int) - pixels["reduced"])
    answers = [model.scores(each).argmax(axis=1) for each in pixels.values()]
    whole, reduced = (torch.from_numpy(model.by_pieces(each, features(model))) for each in pixels.values())
    centre = whole.mean(dim=0)
    alike = torch.nn.functional.cosine_similarity(whole - centre, reduced - centre)
    print(
        f"  pixels differ by {difference.mean():.2f} of 255 on average, by {np.percentile(difference, 99):.0f} at the "
        f"99th percentile, by {difference.max()} at most; cosine of centred features {alike.mean():.4f} on average, "
        f"{alike.min():.4f} at least; {np.mean(answers[0] == answers[1]):.0%} same answers"
    )


def features(model: Model) -> Callable[[torch.Tensor], torch.Tensor]:
    def of(images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model.ready.network.features(images)

    return of


def compare_networks(model: Model, batches: int = 8) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (32, model.card.image_size, model.card.image_size, 3), np.uint8)
    images = model.card.normalisation(torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.float32).contiguous()
    with obvious(), torch.no_grad():
        model.ready.network.features(images)
        with measured("network, layer by layer, batches of 32", 32 * batches // 4):
            for _ in range(batches // 4):
                model.ready.network.features(images)
    model.by_pieces(pixels, features(model))
    with measured(f"network, as predicted, batches of {model.piece}", 32 * batches // 4):
        for _ in range(batches // 4):
            model.by_pieces(pixels, features(model))


@contextmanager
def obvious() -> Iterator[None]:
    """Run EfficientNet-lite layer by layer."""
    before: Any = efficientnet.applies
    efficientnet.applies = lambda network, images: False
    try:
        yield
    finally:
        efficientnet.applies = before


def compare_together(model: Model, photos: list[Path]) -> None:
    fit = Fit(model.card.image_size, resize=True, orient=True)
    with obvious(), measured("decode whole, then score, one after the other", len(photos)):
        model.scores(np.stack([decode_image(Encoded(file, str(file)), fit) for file in photos]))
    with measured("predict_files", len(photos)):
        assert all(each.error is None for each in predict_files(model, map(str, photos), 1))


def commands(folder: Path, photos: list[Path], count: int) -> None:
    command = [sys.executable, "-m", "efcil", "predict", str(folder), "--device", "cpu", "--format", "csv"]
    names = "".join(f"{photos[number % len(photos)]}\n" for number in range(count))
    with measured(f"efcil predict, {count} images, with its start", count):
        subprocess.run([*command, "-"], input=names, stdout=subprocess.DEVNULL, text=True, check=True)
    for number in range(3):
        with measured("efcil predict, 1 image, from a cold start", 1):
            subprocess.run([*command, str(photos[number])], stdout=subprocess.DEVNULL, check=True)
    with measured("  of which import torch", 1):
        subprocess.run([sys.executable, "-c", "import torch"], check=True)


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
