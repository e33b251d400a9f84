"""How fast a training step is, beside the obvious ways of writing it, in one process and one table.

    python benchmarks/speed.py --output benchmarks/results/speed-h200.csv
    python benchmarks/speed.py --run runs/cifar100/cs10/efc/seed0      # adds the split of a whole run
    python benchmarks/speed.py --pixels 64 --output benchmarks/results/speed-64-h200.csv    # Tiny-ImageNet's size
    python benchmarks/speed.py --pixels 64 --profile                   # which kernels the time goes to
    python benchmarks/speed.py --small                                 # a slim network, for a look on a laptop

Images are random: the time of a step does not depend on what they show. Times are medians of several repeats.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from efcil.data.augment import Normalisation, make_augmentation
from efcil.data.scenario import make_scenario
from efcil.data.store import TaskImages
from efcil.engine.evaluate import TestImages, evaluate
from efcil.engine.execution import Execution
from efcil.engine.hardware import choose_device, switches
from efcil.engine.lifecycle import Blueprint, begin_first, begin_later, end
from efcil.engine.trainer import Trainer
from efcil.environment import command, environment
from efcil.experiment.workers import mps
from efcil.methods import get
from efcil.methods.base import Task
from efcil.network.backbones import NETWORKS
from efcil.network.resnet import ResNet
from efcil.settings import Recipe

NORMALISATION = Normalisation((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


@dataclass(frozen=True)
class Sizes:
    """What is measured: the network, the images and the number of steps."""

    network: str = "resnet18-small"
    pixels: int = 32
    images: int = 5000
    batch: int = 64
    steps: int = 300
    test_images: int = 10_000
    augmentation: str = "padded-resized-crop"
    new: int = 10


#: A task of the paper's cold start in ten steps, by the size of the images: CIFAR-100, Tiny-ImageNet.
BY_PIXELS = {32: Sizes(), 64: Sizes(pixels=64, images=10_000, augmentation="crop-flip-8", new=20)}
SMALL = Sizes("slim", 8, 320, 32, 20, 500)
RESNET18 = (64, 128, 256, 512)


class Bench:
    """Builds trainers of real methods on random images and times their steps."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device = device
        self.sizes = sizes
        cuda = device.type == "cuda"
        self.paths = {
            "ours": Execution(device, half=cuda, fused=True, captured=cuda),
            "plain captured bf16": Execution(device, half=True, fused=False, captured=True),
            "eager bf16": Execution(device, half=True, fused=False, captured=False),
            "eager tf32": Execution(device, half=False, fused=False, captured=False, tf32=True),
            "eager fp32": Execution(device, half=False, fused=False, captured=False),
        }
        if not cuda:
            self.paths = {name: self.paths[name] for name in ("ours", "eager fp32")}

    def images(self, count: int, first: int, classes: int, dtype: torch.dtype) -> TaskImages:
        generator = np.random.default_rng(0)
        shape = (count, self.sizes.pixels, self.sizes.pixels, 3)
        return TaskImages(
            generator.integers(0, 256, shape, dtype=np.uint8),
            first + np.arange(count) % classes,
            augmentation=make_augmentation(self.sizes.augmentation),
            normalisation=NORMALISATION,
            device=self.device,
            seed=0,
            name="speed",
            dtype=dtype,
        )

    def blueprint(self, execution: Execution, features: int | None = None) -> Blueprint:
        """What EFC is built from, with another number of features where that is given."""
        name = self.sizes.network
        if features is not None:
            name = f"{name}, {features} features"
            NETWORKS[name] = ("", lambda: ResNet((*RESNET18[:-1], features)))
        return Blueprint(get("efc"), get("efc").Settings(), name, 0, execution)

    def efc(self, execution: Execution, old: int, features: int | None = None) -> Trainer:
        """A trainer in the middle of a stream: `old` classes are stored as Gaussians."""
        blueprint = self.blueprint(execution, features)
        network = blueprint.empty_network()
        network.add_head(old)
        method = blueprint.around(network.state_dict())
        size = network.feature_size
        generator = torch.Generator(self.device).manual_seed(0)
        memory = method.memory
        memory.means = torch.rand(old, size, device=self.device, generator=generator)
        memory.covariances = 0.1 * torch.eye(size, device=self.device).repeat(old, 1, 1)
        memory.covariance_of = torch.arange(old, device=self.device)
        factor = 0.05 * torch.randn(size, min(old, size), device=self.device, generator=generator)
        method.feature_matrix = factor @ factor.T
        recipe = Recipe(learning_rate=1e-4, epochs=100, batch_size=self.sizes.batch, normalisation="frozen")
        data = self.images(self.sizes.images, old, self.sizes.new, execution.dtype)
        return begin_later(method, Task(1, old, self.sizes.new, 0, self.sizes.batch), data, recipe, execution)

    def first(self, execution: Execution) -> Trainer:
        """A trainer of the first task, with rotations."""
        recipe = Recipe(learning_rate=1e-3, epochs=100, batch_size=self.sizes.batch, rotations=True)
        classes = self.sizes.new
        data = self.images(self.sizes.images, 0, classes, execution.dtype)
        return begin_first(self.blueprint(execution), Task(0, 0, classes, 0, self.sizes.batch), data, recipe)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, action: Callable[[], object], repeats: int = 3) -> float:
        """Median seconds of `action`, after one call that does not count."""
        action()
        self.wait()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            action()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def step_ms(self, trainer: Trainer, steps: int | None = None) -> float:
        """Milliseconds of one step of full size, data being ready."""
        feed = trainer.feed
        count = min(steps or self.sizes.steps, feed.block_steps - 1)
        feed.load(0, 0)
        trainer.optimiser.begin_block(0, feed.block_steps, 1.0)

        def sweep() -> None:
            trainer.steps.start_at(0)
            trainer.optimiser.skip(0)
            for index in range(count):
                trainer.step(index, trainer.recipe.batch_size)

        repeats = max(3, (steps or self.sizes.steps) // count)
        return 1e3 * self.seconds(sweep, repeats) / count

    def epoch_ms(self, trainer: Trainer) -> float:
        """Milliseconds per step of whole epochs, with augmentation, the old network and everything else."""
        epochs = 4
        trainer.recipe = Recipe(learning_rate=1e-4, epochs=epochs, batch_size=trainer.recipe.batch_size)
        return 1e3 * self.seconds(trainer.run, 2) / (epochs * trainer.feed.steps_per_epoch)

    def flops(self, images: int) -> float:
        """Floating-point operations of the convolutions for `images` images forwards and backwards."""
        total = 0.0
        backbone = self.blueprint(self.paths["ours"]).empty_network().backbone

        def count(module: torch.nn.Module, _: object, output: torch.Tensor) -> None:
            assert isinstance(module, torch.nn.Conv2d)
            nonlocal total
            total += 2.0 * output.numel() * module.in_channels * module.kernel_size[0] * module.kernel_size[1]

        hooks = [m.register_forward_hook(count) for m in backbone.modules() if isinstance(m, torch.nn.Conv2d)]
        with torch.no_grad():
            backbone.eval()(torch.zeros(1, 3, self.sizes.pixels, self.sizes.pixels, device=self.device))
        for hook in hooks:
            hook.remove()
        return 3 * total * images

    def matmul_rate(self) -> float:
        """Measured operations per second of a large matrix product in the type that we train in."""
        cuda = self.device.type == "cuda"
        size, dtype = (8192, torch.bfloat16) if cuda else (1024, torch.float32)
        a = torch.randn(size, size, device=self.device).to(dtype)
        return 2 * size**3 / self.seconds(lambda: a @ a, 5)


class Table:
    """Rows of (what, variant, value, unit), printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, str]] = []

    def add(self, what: str, variant: str, value: float, unit: str) -> None:
        self.rows.append({"what": what, "variant": variant, "value": f"{value:.4g}", "unit": unit})
        print(f"{what:42s} {variant:30s} {value:10.4g} {unit}", flush=True)

    def write(self, path: Path) -> None:
        facts = environment()
        where = facts["hardware"]["gpus"] or [facts["hardware"]["cpu"]]
        extra = {
            "hardware": where[0],
            "torch": facts["versions"]["torch"],
            "commit": facts["commit"] or "",
            "command": command(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, [*self.rows[0], *extra], lineterminator="\n")
            writer.writeheader()
            writer.writerows(row | extra for row in self.rows)


def measure_steps(bench: Bench, table: Table) -> None:
    """Step times of our path and of the obvious ones, first and incremental task."""
    batch = bench.sizes.batch
    rate = bench.matmul_rate()
    table.add("matrix products", "measured", rate / 1e12, "TFLOP/s")
    tasks = {"first-task step": (lambda e: bench.first(e), 4), "incremental step": (lambda e: bench.efc(e, 50), 1)}
    for what, (build, copies) in tasks.items():
        for name, execution in bench.paths.items():
            with switches(execution, deterministic=False), execution.stream():
                trainer = build(execution)
                ms = bench.step_ms(trainer, None if name == "ours" else 40)
                table.add(what, name, ms, "ms")
                if name == "ours":
                    images = copies * batch
                    table.add(what, "images", 1e3 * images / ms, "images/s")
                    share = bench.flops(images) / (ms / 1e3) / rate
                    table.add(what, "share of matrix product rate", 100 * share, "%")
                    epoch = bench.epoch_ms(trainer)
                    table.add(what, "whole epochs, per step", epoch, "ms")
                    table.add(what, "an epoch", epoch * trainer.feed.steps_per_epoch / 1e3, "s")
                    if bench.device.type == "cuda":
                        table.add(what, "memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
            del trainer


def profile(bench: Bench, rows: int = 25) -> None:
    """Print which kernels the steps of both kinds of task spend their time in."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    ours = bench.paths["ours"]
    activities = [ProfilerActivity.CUDA if bench.device.type == "cuda" else ProfilerActivity.CPU]
    for what, build in (("first-task step", bench.first), ("incremental step", lambda e: bench.efc(e, 50))):
        with ours.stream():
            trainer = build(ours)
            bench.step_ms(trainer)
            trainer.steps.start_at(0)
            trainer.optimiser.skip(0)
            with recorded(activities=activities) as record:
                for index in range(min(10, trainer.feed.block_steps)):
                    trainer.step(index, trainer.recipe.batch_size)
                bench.wait()
            print(f"{what}: ten steps")
            for row in sorted(record.key_averages(), key=lambda row: -_spent(row))[:rows]:
                print(f"{_spent(row) / 1e4:9.4f} ms a step {row.count:6d} x {row.key[:110]}")


def _spent(row: object) -> float:
    """Microseconds of a kernel on the device, or of an operation on the processor."""
    return float(getattr(row, "self_device_time_total", 0) or getattr(row, "self_cpu_time_total", 0))


def measure_growth(bench: Bench, table: Table) -> None:
    """How the incremental step grows with classes and features."""
    ours, small = bench.paths["ours"], bench.sizes == SMALL
    cases: list[tuple[int, int | None]] = [(old, None) for old in ((10, 90) if small else (10, 90, 100, 1000))]
    cases += [] if small else [(100, 1024), (100, 2048)]
    for old, features in cases:
        with ours.stream():
            trainer = bench.efc(ours, old, features=features)
            variant = f"{old} old classes, {trainer.learner.network.feature_size} features"
            table.add("incremental step by size", variant, bench.step_ms(trainer), "ms")
        del trainer


def measure_processor(bench: Bench, table: Table) -> None:
    """How the layer-by-layer step on a CPU depends on threads and on the layout of images and weights."""
    plain, before = bench.paths["eager fp32"], torch.get_num_threads()
    for threads in sorted({1, before}):
        torch.set_num_threads(threads)
        for name, layout in (("channels-last", torch.channels_last), ("channels-first", torch.contiguous_format)):
            trainer = bench.efc(plain, 50)
            trainer.learner.network.backbone.to(memory_format=layout)  # type: ignore[call-overload]
            trainer.feed.images = trainer.feed.images.contiguous(memory_format=layout)
            table.add("incremental step on a CPU", f"{threads} threads, {name}", bench.step_ms(trainer), "ms")
    torch.set_num_threads(before)


def measure_end_of_task(bench: Bench, table: Table) -> None:
    """Statistics after the last of ten tasks, and the evaluation of all test images."""
    ours = bench.paths["ours"]
    with ours.stream():
        trainer = bench.efc(ours, 90)
        method = trainer.learner.eval()
        memory = method.memory
        means, covariances, of = memory.means, memory.covariances, memory.covariance_of
        teacher, matrix = method.teacher, method.feature_matrix

        def again() -> None:
            memory.means, memory.covariances, memory.covariance_of = means, covariances, of
            object.__setattr__(method, "teacher", teacher)
            method.feature_matrix = matrix
            end(method, trainer.task, trainer.data)

        table.add("end-of-task statistics", "100 classes", bench.seconds(again), "s")
        count = bench.sizes.test_images
        shape = (count, bench.sizes.pixels, bench.sizes.pixels, 3)
        pixels = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
        test = TestImages(
            pixels, np.arange(count) % 100, normalisation=NORMALISATION, device=bench.device, dtype=ours.dtype
        )
        scenario = make_scenario("custom", 100, order=list(range(100)), tasks=10)
        table.add("evaluation", f"{count} images", bench.seconds(lambda: evaluate(method, test, scenario, 9)), "s")


def measure_packing(bench: Bench, table: Table, sizes: list[int]) -> None:
    """Milliseconds per step and run, with several runs at a time in processes under MPS."""
    for kind in ("incremental step", "first-task step"):
        for count in sizes if kind == "incremental step" else sizes[:1]:
            worker = [sys.executable, __file__, "--pixels", str(bench.sizes.pixels), "--worker", kind]
            with mps(print, count) as surroundings:
                answers = fleet(worker, count, surroundings)
            for part, variant in (("step", "per step and run"), ("epoch", "whole epochs, per step and run")):
                mean = sum(answer[part] for answer in answers) / count
                table.add(f"{kind}, several runs", f"{count} runs, {variant}", mean / count, "ms")


def fleet(arguments: list[str], count: int, surroundings: dict[str, str]) -> list[dict[str, float]]:
    """Start workers, let them begin together once all are ready, and return what they measured."""
    pipe = subprocess.PIPE
    workers = [subprocess.Popen(arguments, env=surroundings, stdin=pipe, stdout=pipe, text=True) for _ in range(count)]
    answers: list[dict[str, float]] = []
    for worker in workers:
        assert worker.stdout is not None
        if worker.stdout.readline() != "ready\n":
            raise SystemExit("A worker could not start; its message is above.")
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    for worker in workers:
        answers.append(json.loads(worker.communicate()[0].splitlines()[-1]))
    return answers


def work(bench: Bench, kind: str, seconds: float = 3.0) -> None:
    """One of several runs: steps alone, then whole epochs, from a common moment on; prints milliseconds per step."""
    ours = bench.paths["ours"]
    with ours.stream():
        trainer = bench.efc(ours, 50) if kind == "incremental step" else bench.first(ours)
        trainer.recipe = Recipe(learning_rate=1e-4, epochs=4, batch_size=bench.sizes.batch)
        steps = trainer.feed.block_steps - 1
        trainer.run()

        def sweep() -> None:
            trainer.steps.start_at(0)
            trainer.optimiser.skip(0)
            for index in range(steps):
                trainer.step(index, trainer.recipe.batch_size)

        def pace(action: Callable[[], None], count: int) -> float:
            begin, done = time.perf_counter(), 0
            while time.perf_counter() - begin < seconds:
                action()
                bench.wait()
                done += count
            return 1e3 * (time.perf_counter() - begin) / done

        sweep()
        bench.wait()
        print("ready", flush=True)
        sys.stdin.readline()
        result = {"step": pace(sweep, steps), "epoch": pace(trainer.run, 4 * trainer.feed.steps_per_epoch)}
        print(json.dumps(result))


def report_run(folder: Path, table: Table) -> None:
    """The split of a whole run, from its summary."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    for phase, seconds in summary["seconds"].items():
        table.add(f"whole run, {summary['dataset']} {summary['scenario']}", phase.replace("_", "-"), seconds, "s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--pixels", type=int, choices=sorted(BY_PIXELS), default=32, help="size of the images")
    parser.add_argument("--profile", action="store_true", help="print the time of every kernel, and nothing else")
    parser.add_argument("--small", action="store_true", help="slim network, small images, few steps")
    parser.add_argument("--several", type=int, nargs="*", default=[3, 5], help="how many runs at a time (GPU only)")
    parser.add_argument("--run", type=Path, help="folder of a finished run, whose split of time is added")
    parser.add_argument("--output", type=Path, help="CSV file to write")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    bench = Bench(choose_device(options.device), SMALL if options.small else BY_PIXELS[options.pixels])
    with switches(bench.paths["ours"], deterministic=False):
        if options.worker:
            work(bench, options.worker)
            return
        if options.profile:
            profile(bench)
            return
        table = Table()
        measure_steps(bench, table)
        measure_growth(bench, table)
        if bench.device.type == "cpu":
            measure_processor(bench, table)
        measure_end_of_task(bench, table)
        if bench.device.type == "cuda" and options.several:
            torch.cuda.empty_cache()
            measure_packing(bench, table, options.several)
    if options.run:
        report_run(options.run, table)
    if options.output:
        table.write(options.output)


if __name__ == "__main__":
    main()
