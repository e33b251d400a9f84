"""The path of ImageNet on generated photographs: decoding, training epoch after epoch, the GPU's idle time, memory.

    python benchmarks/imagenet.py --output benchmarks/results/imagenet-h200.csv       # about two minutes on an H200
    python benchmarks/imagenet.py --tiny DATA --output FILE                           # also Tiny-ImageNet's own images
    python benchmarks/imagenet.py --small                                             # a look on a laptop

A folder in the layout of ImageNet is generated (photographs.py), and EFC learns its classes in four tasks with the
recipes of imagenet-subset, through the same functions as `efcil run`: the images of a task are decoded once and kept,
crops are cut on the device, and the images of the next task are decoded meanwhile. Beside it, in the same process,
stands the usual way: a DataLoader whose workers open, decode, crop, resize and flip every image in every epoch with
Pillow (and torchvision, where it is installed), as many workers as there are cores. Its images go through the same
training step, and they are normalised on the device, so what differs is where the images come from.

How busy the GPU is comes from PyTorch's profiler, for one epoch of every task. So that the images of the next task are
being decoded in that epoch, decoding them begins one epoch before it, and not with the task.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from efcil import seeds
from efcil.data.ahead import Ahead
from efcil.data.deferred import DeferredImages, FileSupply
from efcil.data.sources import load_dataset
from efcil.data.store import TaskImages, View
from efcil.data.tiers import Keeping, Kept
from efcil.data.whole import bring
from efcil.engine import hardware
from efcil.engine.lifecycle import Watch, begin_later, learn_task
from efcil.engine.trainer import EpochReport
from efcil.experiment.plan import Plan
from efcil.methods.base import Method
from efcil.resolution.data import source_options
from efcil.settings import Settings
from speed import Table  # beside this script

HERE = Path(__file__).resolve().parent
#: Epochs that are not counted: kernels are compiled and graphs captured in them.
LEFT_OUT = 2
#: The epochs from whose reports to whose reports the profiler records.
RECORDED = (3, 5)
SHARED_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    images: int = 20_000
    classes: int = 40
    tasks: int = 4
    first_epochs: int = 6
    epochs: int = 16
    loader_epochs: int = 3
    pixels: int = 224
    network: str = "resnet18"
    shrink: int = 1
    pictures: int = 200


SMALL = Sizes(120, 6, 3, 1, 2, 1, 16, "slim", 8, 4)


def generate(folder: Path, sizes: Sizes) -> None:
    """Write the photographs, in a program of its own: this one has threads already."""
    numbers = {"images": sizes.images, "classes": sizes.classes, "pictures": sizes.pictures, "shrink": sizes.shrink}
    words = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    subprocess.run([sys.executable, str(HERE / "photographs.py"), str(folder), *words], check=True)


# -- the usual way ---------------------------------------------------------------------------------------------------


@cache
def usual_library() -> str:
    """Return what crops images in the usual way: torchvision where it is installed. Workers do not import it again."""
    with suppress(ImportError, RuntimeError):
        import torchvision.transforms  # noqa: F401

        return "torchvision"
    return "Pillow"


@cache
def usual_transform(size: int) -> Callable[[Image.Image], np.ndarray]:
    """Return the usual random crop and flip to uint8 (3, size, size): torchvision's, or the same with Pillow alone."""
    if usual_library() == "torchvision":
        from torchvision.transforms import Compose, PILToTensor, RandomHorizontalFlip, RandomResizedCrop

        steps = Compose([RandomResizedCrop(size), RandomHorizontalFlip(), PILToTensor()])
        return lambda image: steps(image).numpy()

    def crop(image: Image.Image) -> np.ndarray:
        box = usual_box(*image.size)
        image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
        if torch.rand(()) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(image).transpose(2, 0, 1)

    return crop


def usual_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Return a box of 8 to 100 % of an image with a ratio of 3/4 to 4/3, the first of ten that fits, else the whole."""
    for _ in range(10):
        area = width * height * float(torch.empty(()).uniform_(0.08, 1))
        ratio = math.exp(float(torch.empty(()).uniform_(math.log(3 / 4), math.log(4 / 3))))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, top = int(torch.randint(width - across + 1, ())), int(torch.randint(height - down + 1, ()))
            return left, top, left + across, top + down
    return 0, 0, width, height


class Files(Dataset[np.ndarray]):
    """Files that are decoded and cropped whenever they are asked for."""

    def __init__(self, paths: list[Path], size: int) -> None:
        self.paths = paths
        self.size = size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> np.ndarray:
        with Image.open(self.paths[row]) as image:
            return usual_transform(self.size)(image.convert("RGB"))


class Order(Sampler[int]):
    """The order of an epoch, which may change from one to the next."""

    def __init__(self, count: int) -> None:
        self.rows: list[int] = list(range(count))

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def loader(files: Files, batch: int, workers: int, device: torch.device) -> tuple[DataLoader[Any], Order]:
    """Return the DataLoader; batches are sent in shared memory, or through pipes where there is little of that."""
    room = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    order = Order(len(files))
    usual_library()  # before workers start
    found: DataLoader[Any] = DataLoader(
        files,
        batch,
        sampler=order,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
        collate_fn=_as_tensor if room >= SHARED_MEMORY_BYTES else np.stack,
    )
    return found, order


def _as_tensor(images: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(images))


class LoadedImages(TaskImages):
    """The images of a task as a DataLoader gives them: decoded and cropped again in every epoch, nothing kept."""

    def __init__(self, plan: Plan, rows: np.ndarray, batch: int, workers: int) -> None:
        images = plan.dataset.train.images
        assert isinstance(images, DeferredImages)
        super().__init__(
            images, plan.labels, augmentation=plan.augmentation, normalisation=plan.normalisation,
            device=plan.execution.device, seed=0, name="loaded", dtype=plan.execution.dtype, rows=rows,
        )  # fmt: skip
        self.loader, self.order = loader(files_of(images[rows]), batch, workers, self.device)
        self._view: View | None = None
        self._batches: Iterator[Any] = iter(())
        #: The images of the view that were given last, from number `_first` on.
        self._first, self._images = 0, torch.empty(0)

    def _bring(self, images: Any, rows: np.ndarray, device: torch.device, keeping: Keeping) -> tuple[Any, Kept]:
        nothing = torch.zeros(1, device=device, dtype=torch.uint8).expand(len(rows), *images.shape[1:])
        kept = keeping.choose(len(rows), 0, device, keeping.measure(device))
        return nothing.permute(0, 3, 1, 2), kept

    def view(self, purpose: str, index: int = 0, *, training: bool = False) -> View:
        """Return the order of an epoch; crops are the workers' own."""
        generator = seeds.generator("cpu", 0, "loaded", purpose, index)
        return View(torch.randperm(len(self), generator=generator).to(self.device), {}, self.augmentation)

    def render(self, view: View, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return network input and labels: the next images of the loader, and some of the last ones again."""
        if self._view is not view:
            assert start == 0
            self.order.rows = view.order.tolist()
            self._view, self._first, self._images, self._batches = view, 0, torch.empty(0), iter(self.loader)
        pieces, reached = [self._images], self._first + len(self._images)
        while reached < stop:
            piece = torch.as_tensor(next(self._batches))
            pieces.append(self.normalisation(piece.to(self.device, non_blocking=True), self.dtype))
            reached += len(piece)
        images = torch.cat([piece for piece in pieces if len(piece)])
        first, keep = self._first, max(self._first, start - int(self.loader.batch_size or 0))
        self._first, self._images = keep, images[keep - first :]
        return images[start - first : stop - first], self.labels[view.order[start:stop]]


def files_of(images: DeferredImages) -> Files:
    """Return the files of some images."""
    assert isinstance(images.supply, FileSupply)
    return Files([images.supply.paths[row] for row in images.rows], images.shapes.size)


# -- what the device does --------------------------------------------------------------------------------------------


def busy_share(spans: Iterable[tuple[float, float]], length: float) -> float:
    """Return the share of the last `length` before the end in which at least one of the spans lasts."""
    ordered = sorted(spans)
    end = max(stop for _, stop in ordered)
    begin, busy = end - length, 0.0
    reached = begin
    for start, stop in ordered:
        start, stop = max(start, reached), max(stop, reached)
        busy += stop - start
        reached = stop
    return busy / length


@dataclass
class Recorder:
    """Records what a GPU does in an epoch, from the reports of epochs."""

    device: torch.device
    ahead: Ahead | None
    times: list[float] = field(default_factory=list)
    share: float | None = None
    beside: str = "nothing beside it"
    _profile: Any = None

    def epoch(self, report: EpochReport) -> None:
        """Count an epoch; begin or end recording. Reports come while a later epoch runs."""
        self.times.append(report.seconds)
        if self.ahead is not None and report.epoch == min(LEFT_OUT, report.epochs - 1):
            self.ahead.start()
        if self.device.type != "cuda":
            return
        if report.epoch == RECORDED[0] and report.epochs > RECORDED[1]:
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.start()
        elif report.epoch == RECORDED[1] and self._profile is not None:
            torch.cuda.synchronize()
            if self.ahead is not None:
                under_way = self.ahead.working
                self.beside = "the next task being decoded" if under_way else "the next task decoded in part of it"
            self._profile.stop()
            self.share = self._read()

    def _read(self) -> float | None:
        """Return the share of an epoch in which a kernel ran; copies alone do not count.

        The beginning of a recording waits for the profiler; the last epoch of it is like any other.
        """
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in self._profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
            and not getattr(event, "is_user_annotation", False)
            and not event.name.startswith(("Memcpy", "Memset"))
        ]
        self._profile = None
        return busy_share(spans, 1e6 * self.times[RECORDED[0]]) if spans else None

    @property
    def usual(self) -> float:
        """Median seconds of an epoch; those in which kernels are compiled or recorded do not count."""
        counted = [
            seconds
            for number, seconds in enumerate(self.times)
            if number >= LEFT_OUT and not RECORDED[0] < number <= RECORDED[1] + 1
        ]
        return statistics.median(counted or self.times)


def resident_bytes() -> int:
    """Return the host memory of this process now; 0 where the system does not say."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) * 1024
    return 0


# -- measuring -------------------------------------------------------------------------------------------------------


def generated_plan(folder: Path, sizes: Sizes, device: str) -> Plan:
    """Return the plan of a run on generated photographs, which are made first."""
    generate(folder / "photographs", sizes)
    small: dict[str, Any] = {} if sizes.pixels == 224 else {"image_size": sizes.pixels, "batch_size": 16}
    settings = Settings(
        method="efc",
        dataset="imagenet-subset",
        data=str(folder / "photographs"),
        scenario="custom",
        tasks=sizes.tasks,
        network=sizes.network,
        first_task_epochs=sizes.first_epochs,
        epochs=sizes.epochs,
        overrides={"first_task.learning_rate": 0.01},
        device=device,
        **small,
    )
    return _plan(settings, folder)


def tiny_plan(folder: Path, sizes: Sizes, device: str, data: Path) -> Plan:
    """Return the plan of a run on Tiny-ImageNet in ten tasks."""
    small: dict[str, Any] = {} if sizes.pixels == 224 else {"network": sizes.network}
    settings = Settings(
        method="efc",
        dataset="tiny-imagenet",
        data=str(data),
        scenario="cs10",
        first_task_epochs=sizes.first_epochs,
        epochs=sizes.epochs,
        device=device,
        **small,
    )
    return _plan(settings, folder)


def _plan(settings: Settings, folder: Path) -> Plan:
    assert settings.data is not None
    dataset = load_dataset(settings.dataset, Path(settings.data), source_options(settings))
    return Plan.make(settings, folder / "runs", dataset, "measured")


class Bench:
    """The plan of a run, and the table that results go to."""

    def __init__(self, plan: Plan, sizes: Sizes, workers: int, table: Table, title: str = "") -> None:
        self.plan, self.sizes, self.workers, self.table, self.title = plan, sizes, workers, table, title
        self.device = plan.execution.device
        #: Images per second of epochs of the last task, and the state of the method before it.
        self.ours = 0.0
        self.before_last: dict[str, Tensor] = {}

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rows(self, index: int) -> np.ndarray:
        """Return the rows of a task."""
        return self.plan.rows(self.plan.task(index))

    # -- decoding ------------------------------------------------------------------------------------------------

    def measure_decoding(self) -> None:
        """Images per second from files to where a step can use them."""
        images = self.plan.dataset.train.images
        assert isinstance(images, DeferredImages)
        chosen = images[self.rows(0)]
        start = time.perf_counter()
        whole, _ = bring(chosen, self.device)
        self.wait()
        ours = len(chosen) / (time.perf_counter() - start)
        self.table.add("decoding", f"ours, whole images, {os.cpu_count()} threads", ours, "images/s")
        del whole
        loaded, order = loader(files_of(chosen), 64, self.workers, self.device)
        every, order.rows = order.rows, order.rows[: 64 * self.workers]
        for _ in loaded:  # workers start
            pass
        order.rows = every
        start = time.perf_counter()
        for batch in loaded:
            torch.as_tensor(batch).to(self.device)
        self.wait()
        usual = len(chosen) / (time.perf_counter() - start)
        self.table.add("decoding", f"DataLoader, one crop each, {self.workers} workers", usual, "images/s")
        self.table.add("decoding", "ours / DataLoader", ours / usual, "times")

    def measure_gpu_decoder(self, batch: int = 256) -> None:
        """The same files by the JPEG decoder of the GPU, and how far its pixels are from Pillow's."""
        images = self.plan.dataset.train.images
        assert isinstance(images, DeferredImages)
        paths = files_of(images[self.rows(0)]).paths
        try:
            from torchvision.io import ImageReadMode, decode_jpeg

            if self.device.type != "cuda":
                raise RuntimeError("there is no GPU")

            def decode(some: list[Path]) -> list[Tensor]:
                content = [torch.from_numpy(np.fromfile(path, np.uint8)) for path in some]
                found: list[Tensor] = decode_jpeg(content, mode=ImageReadMode.RGB, device=str(self.device))
                return found

            decoded = decode(paths[:batch])
            pairs = zip(decoded, paths, strict=False)
            differences = [
                np.abs(image.permute(1, 2, 0).cpu().numpy().astype(int) - np.asarray(Image.open(path).convert("RGB")))
                for image, path in pairs
            ]
            self.wait()
            start = time.perf_counter()
            for first in range(0, len(paths), batch):
                decode(paths[first : first + batch])
            self.wait()
            rate = len(paths) / (time.perf_counter() - start)
        except Exception as error:  # a part that may be missing in many ways, and the last one
            print(f"The GPU's JPEG decoder was not measured: {' '.join(str(error).split())[:200]}")
            return
        self.table.add("decoding", "GPU's JPEG decoder, one thread that reads", rate, "images/s")
        mean = float(np.mean([each.mean() for each in differences]))
        self.table.add("decoding", "GPU's JPEG decoder, mean difference from Pillow", mean, "of 255")
        most = max(int(each.max()) for each in differences)
        self.table.add("decoding", "GPU's JPEG decoder, largest difference", most, "of 255")

    # -- training ------------------------------------------------------------------------------------------------

    def measure_tasks(self, tasks: int | None = None) -> None:
        """Learn tasks as a run does, all or the first ones; images per second, idle time and memory of each."""
        method: Method | None = None
        ahead: Ahead | None = None
        for index in range(tasks or self.plan.tasks):
            if index == self.plan.tasks - 1:
                assert method is not None
                self.before_last = {name: value.detach().cpu() for name, value in method.state_dict().items()}
            method, ahead = self._learn(index, method, ahead)

    def _learn(self, index: int, method: Method | None, ahead: Ahead | None) -> tuple[Method, Ahead | None]:
        plan, name = self.plan, f"{self.title}task {index + 1}"
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        task, start = plan.task(index), time.perf_counter()
        data = plan.images(task, ahead)
        self.wait()
        now = "decoded now" if isinstance(plan.dataset.train.images, DeferredImages) else "copied"
        decoded = now if ahead is None else "decoded while the task before trained"
        waited = time.perf_counter() - start
        self.table.add("waiting for the images of a task", f"{name}, {decoded}", waited, "s")
        ahead = plan.ahead(index, data.kept)
        recorder = Recorder(self.device, ahead)
        from_scratch = plan.from_scratch(index)
        method = learn_task(
            plan.blueprint, None if from_scratch else method, task, data, plan.recipe(index),
            watch=Watch(epoch=recorder.epoch),
        )  # fmt: skip
        self.wait()
        self.ours = len(data) / recorder.usual
        self.table.add("training, epoch after epoch", f"ours, {name}", self.ours, "images/s")
        epochs = plan.recipe(index).epochs
        whole = epochs * len(data) / (waited + epochs * recorder.usual)
        self.table.add("training, with decoding", f"ours, {name}, {epochs} epochs", whole, "images/s")
        if recorder.share is not None:
            self.table.add("GPU busy", f"an epoch of {name}, {recorder.beside}", 100 * recorder.share, "%")
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            self.table.add("memory", f"{name}, peak on the device", peak / 2**30, "GiB")
        self.table.add("memory", f"{name}, host, images of the next task included", resident_bytes() / 2**30, "GiB")
        return method, ahead

    def measure_loader(self) -> None:
        """Train the last task again, from the same state, with images that a DataLoader decodes in every epoch."""
        plan, index = self.plan, self.plan.tasks - 1
        recipe, task = plan.recipe(index), plan.task(index)
        data = LoadedImages(plan, self.rows(index), recipe.batch_size, self.workers)
        times: list[float] = []
        method = plan.blueprint.load(self.before_last)
        recipe = replace(recipe, epochs=self.sizes.loader_epochs + 1)
        trainer = begin_later(method, task, data, recipe, plan.execution)
        trainer.run(on_epoch=lambda report: times.append(report.seconds))
        self.wait()
        usual = len(data) / statistics.median(times[1:])
        name = f"DataLoader ({usual_library()}), {self.workers} workers"
        self.table.add("training, epoch after epoch", name, usual, "images/s")
        self.table.add("training, epoch after epoch", "ours / DataLoader", self.ours / usual, "times")


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--images", type=int, help="training images to generate")
    parser.add_argument("--epochs", type=int, help="epochs of later tasks")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="workers of the DataLoader")
    parser.add_argument(
        "--tiny", type=Path, metavar="DATA", help="folder of Tiny-ImageNet, of which two tasks are added"
    )
    parser.add_argument("--small", action="store_true", help="slim network, small images, few of them")
    parser.add_argument("--folder", type=Path, help="folder in which the photographs are made and removed again")
    parser.add_argument("--output", type=Path, help="CSV file to write")
    options = parser.parse_args()
    asked = {name: value for name in ("images", "epochs") if (value := getattr(options, name)) is not None}
    sizes = Sizes(**{**vars(SMALL if options.small else Sizes()), **asked})
    # Else recording a second time, with graphs captured between, may fail.
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    measure(sizes, options.device, options.workers, options.folder, options.output, options.tiny)


def measure(
    sizes: Sizes, device: str, workers: int, folder: Path | None, output: Path | None, tiny: Path | None = None
) -> Table:
    """Generate the photographs, measure everything, and return the table; what was measured is written in any case."""
    table = Table()
    with tempfile.TemporaryDirectory(prefix="efcil-", dir=folder) as place:
        start = time.perf_counter()
        bench = Bench(generated_plan(Path(place), sizes, device), sizes, workers, table)
        execution = bench.plan.execution
        try:
            with hardware.switches(execution, False), execution.stream():
                bench.measure_decoding()
                bench.measure_tasks()
                bench.measure_loader()
                if tiny is not None:
                    plan = tiny_plan(Path(place), sizes, device, tiny)
                    Bench(plan, sizes, workers, table, "Tiny-ImageNet, ").measure_tasks(2)
                bench.measure_gpu_decoder()
        finally:
            if output is not None and table.rows:
                table.write(output)
        print(f"{time.perf_counter() - start:.0f} s in all")
    return table


if __name__ == "__main__":
    main()
