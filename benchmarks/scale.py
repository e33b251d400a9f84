"""Time and memory against the numbers of classes and features: what EFC keeps, and what its parts take.

    python benchmarks/scale.py --output benchmarks/results/scale-cpu.csv
    python benchmarks/scale.py --device cuda --output benchmarks/results/scale-h200.csv

The network is a single layer, so that what is measured is everything else: the prototypes and heads of a step, the
statistics at the end of a task, evaluation, and checkpoints. Classes are random; where whole covariances would take
more than covariance_limit, they are low-rank factors with `--share-of-columns` of as many columns as features. Sizes
that need more than `--memory` gigabytes are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from efcil.data.augment import make_augmentation
from efcil.data.scenario import make_scenario
from efcil.data.store import TaskImages
from efcil.engine import checkpoint
from efcil.engine.evaluate import TestImages, evaluate
from efcil.engine.execution import Execution
from efcil.engine.hardware import choose_device, switches
from efcil.engine.lifecycle import Blueprint, begin_later, end
from efcil.engine.trainer import Trainer
from efcil.methods import get
from efcil.methods.base import Method, Task
from efcil.network.backbones import NETWORKS
from efcil.settings import Recipe
from speed import NORMALISATION, Table

PIXELS, BATCH, NEW, IMAGES, TEST_IMAGES = 8, 64, 10, 1000, 10_000
CLASSES, FEATURES = (10, 100, 1000, 10_000), (512, 1024, 2048)


class OneLayer(nn.Module):
    """Maps images (batch, 3, h, w) to `feature_size` features by one layer."""

    def __init__(self, feature_size: int) -> None:
        super().__init__()
        self.feature_size = feature_size
        self.layer = nn.Linear(3 * PIXELS**2, feature_size)

    def forward(self, images: Tensor) -> Tensor:
        """Return features that are not negative."""
        return torch.relu(self.layer(images.flatten(1).float()))


class Sizes:
    """One number of classes and features: the method that has learned them, and its images."""

    def __init__(self, classes: int, features: int, device: torch.device, columns: float) -> None:
        self.classes, self.features, self.device = classes, features, device
        name = f"one layer, {features} features"
        NETWORKS[name] = ("", lambda: OneLayer(features))
        execution = Execution(device, half=False, fused=False, captured=False)
        self.blueprint = Blueprint(get("efc"), get("efc").Settings(), name, 0, execution)
        self.old = classes - min(NEW, classes // 2)
        self.columns = max(1, int(columns * features))

    @property
    def factored(self) -> bool:
        """Whether factors are kept."""
        return self.blueprint.method.remembers(self.blueprint.settings, self.features).too_large(self.classes)

    @property
    def kept_bytes(self) -> int:
        """What the covariances of all classes take."""
        return 4 * self.classes * self.features * (self.columns if self.factored else self.features)

    def method(self) -> Method:
        """EFC with all classes but those of the last task."""
        network = self.blueprint.empty_network()
        network.add_head(self.old)
        method = self.blueprint.around(network.state_dict())
        generator = torch.Generator(self.device).manual_seed(0)
        memory, size = method.memory, self.features
        shape = (self.old, size, self.columns) if self.factored else (self.old, size, size)
        memory.means = torch.rand(self.old, size, device=self.device, generator=generator)
        if self.factored:
            memory.covariances = torch.randn(shape, device=self.device, generator=generator).mul_(0.1)
        else:
            memory.covariances = torch.zeros(shape, device=self.device)
            memory.covariances.diagonal(dim1=1, dim2=2).fill_(0.1)
        memory.covariance_of = torch.arange(self.old, device=self.device)
        return method

    def images(self) -> TaskImages:
        """The images of the last task."""
        pixels = np.random.default_rng(0).integers(0, 256, (IMAGES, PIXELS, PIXELS, 3), dtype=np.uint8)
        return TaskImages(
            pixels,
            self.old + np.arange(IMAGES) % (self.classes - self.old),
            augmentation=make_augmentation("none"),
            normalisation=NORMALISATION,
            device=self.device,
            seed=0,
            name="scale",
            dtype=torch.float32,
        )

    def test_images(self) -> TestImages:
        """Test images of all classes."""
        pixels = np.random.default_rng(1).integers(0, 256, (TEST_IMAGES, PIXELS, PIXELS, 3), dtype=np.uint8)
        labels = np.arange(TEST_IMAGES) % self.classes
        return TestImages(pixels, labels, normalisation=NORMALISATION, device=self.device)


def seconds(action: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Median seconds of `action`; on a CPU those of the processor, of all threads, whatever else the machine does."""
    times, clock = [], time.process_time if device.type == "cpu" else time.perf_counter
    for _ in range(repeats):
        start = clock()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock() - start)
    return statistics.median(times)


def measure(sizes: Sizes, table: Table) -> None:
    """Add the rows of one number of classes and features."""
    device, variant = sizes.device, f"{sizes.classes} classes, {sizes.features} features"
    if device.type == "cuda":
        torch.cuda.init()  # before that there are no numbers to reset, which is an error
        torch.cuda.reset_peak_memory_stats(device)
    with tempfile.TemporaryDirectory() as folder:
        _measure_method(sizes, table, variant, Path(folder))
        table.add("checkpoint, read", variant, seconds(lambda: checkpoint.read(Path(folder)), device), "s")
    peak = torch.cuda.max_memory_allocated(device) / 1e6 if device.type == "cuda" else _peak()
    table.add("peak memory", variant, peak, "MB")


def _measure_method(sizes: Sizes, table: Table, variant: str, folder: Path) -> None:
    """Add the rows of a task and of what follows it, and write a checkpoint into the folder."""
    device, method, data, test = sizes.device, sizes.method(), sizes.images(), sizes.test_images()
    old, new = sizes.old, sizes.classes - sizes.old
    task = Task(1, old, new, 0, BATCH)
    recipe = Recipe(learning_rate=1e-4, epochs=1, batch_size=BATCH, normalisation="frozen")
    trainers: list[Trainer] = []

    def begin() -> None:
        trainers.append(begin_later(method, task, data, recipe, sizes.blueprint.execution))

    table.add("begin a task", variant, seconds(begin, device), "s")
    trainers[0].run()
    step = seconds(trainers[0].run, device, 3) / trainers[0].feed.steps_per_epoch
    table.add("incremental step without the network", variant, 1e3 * step, "ms")
    trainers.clear()
    table.add("end-of-task statistics", variant, seconds(lambda: end(method, task, data), device), "s")
    kept = sum(each.numel() * each.element_size() for each in method.stored().values())
    table.add("kept besides the network", variant, kept / 1e6, "MB")
    scenario = make_scenario("custom", sizes.classes, order=range(sizes.classes), tasks=2, first_task_classes=old)
    table.add("evaluation of 10000 images", variant, seconds(lambda: evaluate(method, test, scenario, 1), device), "s")
    written = seconds(lambda: checkpoint.write(folder, method.state_dict(), {}), device)
    table.add("checkpoint, written", variant, written, "s")


def _peak() -> float:
    """The most memory that this process had, in MB; it only grows, so sizes are measured from small to large."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, nargs="+", default=CLASSES)
    parser.add_argument("--features", type=int, nargs="+", default=FEATURES)
    parser.add_argument("--share-of-columns", type=float, default=0.3, help="columns of a factor, as a share of rows")
    parser.add_argument("--memory", type=float, default=4.0, help="gigabytes that covariances may take")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device, table = choose_device(arguments.device), Table()
    sizes = [Sizes(c, f, device, arguments.share_of_columns) for c in arguments.classes for f in arguments.features]
    with contextlib.redirect_stdout(io.StringIO()):  # what is loaded on first use is not measured
        measure(Sizes(4, 16, device, arguments.share_of_columns), Table())
    for each in sorted(sizes, key=lambda each: each.kept_bytes):
        if each.kept_bytes > 1e9 * arguments.memory:
            print(f"{each.classes} classes, {each.features} features: {each.kept_bytes / 1e9:.1f} GB, left out")
            continue
        with switches(each.blueprint.execution, deterministic=False):
            measure(each, table)
    if arguments.output is not None:
        table.write(arguments.output)


if __name__ == "__main__":
    main()
