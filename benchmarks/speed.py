"""How fast a training step is, beside the obvious ways of writing it, in one process and one table.

    python benchmarks/speed.py --output benchmarks/results/speed-h200.csv
    python benchmarks/speed.py --run runs/cifar100/cs10/efc/seed0      # adds the split of a whole run
    python benchmarks/speed.py --pixels 64 --output benchmarks/results/speed-64-h200.csv    # Tiny-ImageNet's size
    python benchmarks/speed.py --pixels 224 --several --output FILE    # ImageNet's size, the usual ResNet-18
    python benchmarks/speed.py --pixels 64 --profile                   # which kernels the time goes to
    python benchmarks/speed.py --pixels 64 --compile 240               # also the same network under torch.compile
    python benchmarks/speed.py --small                                 # a slim network, for a look on a laptop
    python benchmarks/speed.py --device cpu --steps 4 --only-steps     # the whole network, on a CPU

Images are random: the time of a step does not depend on what they show. Times are medians of several repeats. Batch and
optimisers are those of the dataset's preset.

`--compile SECONDS` times the same network and step under `torch.compile` with max-autotune, in bf16 and channels-last,
in the same process: once with the CUDA graphs that PyTorch makes of it, and once inside the graph that we make of the
whole step. Compiling may take minutes; after so many seconds it is given up, and a row says so.
"""

from __future__ import annotations

import argparse
import csv
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
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
from efcil.resolution import resolve
from efcil.settings import Recipe, Settings

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
    preset: str = "cifar100"
    epochs: int = 4


#: A task of the paper's cold start in ten steps, by the size of the images: CIFAR-100, Tiny-ImageNet, ImageNet-Subset.
BY_PIXELS = {
    32: Sizes(),
    64: Sizes(pixels=64, images=10_000, augmentation="crop-flip-8", new=20, preset="tiny-imagenet"),
    224: Sizes("resnet18", 224, 12_930, 64, 90, 5_000, augmentation="resized-crop", preset="imagenet-subset", epochs=2),
}
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
        if not cuda:  # what runs there unless something is asked for is the plain path
            self.paths = {
                "ours": self.paths["eager fp32"],
                "plain bf16": self.paths["eager bf16"],
                "fused fp32": Execution(device, half=False, fused=True, captured=False),
            }

    @property
    def fused(self) -> Execution:
        """Our path on a GPU, and our kernels' obvious versions on a CPU."""
        return self.paths["ours" if self.device.type == "cuda" else "fused fp32"]

    def images(self, count: int, first: int, classes: int, dtype: torch.dtype) -> TaskImages:
        return TaskImages(
            noise(count, self.sizes.pixels),
            first + np.arange(count) % classes,
            augmentation=make_augmentation(self.sizes.augmentation),
            normalisation=NORMALISATION,
            device=self.device,
            seed=0,
            name="speed",
            dtype=dtype,
        )

    @property
    def settings(self) -> Settings:
        """EFC on the dataset whose sizes these are, for its recipes."""
        return Settings(method="efc", dataset=self.sizes.preset)

    def blueprint(self, execution: Execution, features: int | None = None) -> Blueprint:
        """What EFC is built from, with another number of features where that is given."""
        name = self.sizes.network
        if features is not None:
            name = f"{name}, {features} features"
            large = self.sizes.network == "resnet18"
            NETWORKS[name] = ("", lambda: ResNet((*RESNET18[:-1], features), large_images=large))
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
        recipe = replace(resolve(self.settings).later, learning_rate=1e-4, batch_size=self.sizes.batch)
        data = self.images(self.sizes.images, old, self.sizes.new, execution.dtype)
        return begin_later(method, Task(1, old, self.sizes.new, 0, self.sizes.batch), data, recipe, execution)

    def first(self, execution: Execution) -> Trainer:
        """A trainer of the first task, with rotations."""
        recipe = replace(resolve(self.settings).first_task, learning_rate=1e-3, batch_size=self.sizes.batch)
        classes = self.sizes.new
        data = self.images(self.sizes.images, 0, classes, execution.dtype)
        return begin_first(self.blueprint(execution), Task(0, 0, classes, 0, self.sizes.batch), data, recipe)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def forget_peak(self) -> None:
        """Free what nobody uses, and begin to count the peak of memory."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

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
        wanted = steps or self.sizes.steps
        run, count = sweep(trainer, wanted)
        return 1e3 * self.seconds(run, max(3, wanted // count)) / count

    def epoch_ms(self, trainer: Trainer) -> float:
        """Milliseconds per step of whole epochs, with augmentation, the old network and everything else."""
        epochs = self.sizes.epochs
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


def sweep(trainer: Trainer, steps: int) -> tuple[Callable[[], None], int]:
    """Return a function that takes steps of full size whose data are ready, and how many: `steps`, or a block's."""
    feed = trainer.feed
    count = min(steps, feed.block_steps - 1)
    feed.load(0, 0)
    trainer.optimiser.begin_block(0, feed.block_steps, 1.0)

    def run() -> None:
        trainer.steps.start_at(0)
        trainer.optimiser.skip(0)
        for index in range(count):
            trainer.step(index, trainer.recipe.batch_size)

    return run, count


@cache
def noise(count: int, pixels: int) -> np.ndarray:
    """Return random images, the same ones every time."""
    return np.random.default_rng(0).integers(0, 256, (count, pixels, pixels, 3), dtype=np.uint8)


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


#: The two kinds of task: their names, how a trainer is built, and how many copies of every image a step sees.
KINDS: dict[str, tuple[Callable[[Bench, Execution], Trainer], int]] = {
    "first-task step": (lambda bench, execution: bench.first(execution), 4),
    "incremental step": (lambda bench, execution: bench.efc(execution, 50), 1),
}


def measure_steps(bench: Bench, table: Table) -> tuple[float, dict[str, float]]:
    """Step times of our path and of the obvious ones, first and incremental task.

    Returns the operations per second of matrix products, and the milliseconds of our steps.
    """
    rate = bench.matmul_rate()
    table.add("matrix products", "measured", rate / 1e12, "TFLOP/s")
    ours = {}
    for what, (build, copies) in KINDS.items():
        for name, execution in bench.paths.items():
            with switches(execution, deterministic=False), execution.stream():
                bench.forget_peak()
                trainer = build(bench, execution)
                ms = bench.step_ms(trainer, None if name == "ours" else min(40, bench.sizes.steps))
                table.add(what, name, ms, "ms")
                if name == "ours":
                    ours[what] = ms
                    print(f"{what}: the network runs on the {trainer.learner.network.path} path")
                    table.add(what, "images", 1e3 * copies * bench.sizes.batch / ms, "images/s")
                    add_share(bench, table, what, "share of matrix product rate", copies, ms, rate)
                    add_memory(bench, table, what, "memory")
                    epoch = bench.epoch_ms(trainer)
                    table.add(what, "whole epochs, per step", epoch, "ms")
                    table.add(what, "an epoch", epoch * trainer.feed.steps_per_epoch / 1e3, "s")
                elif name == "plain bf16":
                    table.add(what, "whole epochs, per step, plain bf16", bench.epoch_ms(trainer), "ms")
            del trainer
    return rate, ours


def add_share(bench: Bench, table: Table, what: str, variant: str, copies: int, ms: float, rate: float) -> None:
    """Add which share of the card's rate for matrix products the convolutions of a step reach.

    On a CPU that rate is no limit: convolutions of a large network were faster.
    """
    if bench.device.type == "cuda":
        table.add(what, variant, 100 * bench.flops(copies * bench.sizes.batch) / (ms / 1e3) / rate, "%")


def add_memory(bench: Bench, table: Table, what: str, variant: str) -> None:
    """Add the most memory that was allocated on a GPU since it was last asked for."""
    if bench.device.type == "cuda":
        table.add(what, variant, torch.cuda.max_memory_allocated() / 2**30, "GiB")


# -- beside torch.compile --------------------------------------------------------------------------------------------

#: How the network is compiled, and whether our graph of the whole step is made around it.
COMPILED = {
    "torch.compile": ("max-autotune", False),
    "torch.compile in our graph": ("max-autotune-no-cudagraphs", True),
}


class TooLong(BaseException):
    """Raised in the middle of compiling; no `except Exception` of a compiler catches it."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TooLong in the main thread once `seconds` have passed."""

    def stop(*_: object) -> None:
        raise TooLong(f"not compiled after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 20.0)  # again, if some code has caught it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure_compiled(
    bench: Bench, table: Table, limit: float, rate: float, ours: dict[str, float], backend: str = "inductor"
) -> None:
    """Step times of the same network under torch.compile; a row says why where one cannot be had."""
    for what, (build, copies) in KINDS.items():
        for name, (mode, captured) in COMPILED.items():
            cuda = bench.device.type == "cuda"
            if captured and not cuda:
                continue
            half = replace(bench.paths["ours"], fused=False, captured=captured, half=cuda)
            variant = f"{name}, max-autotune, channels-last, {'bf16' if cuda else 'fp32'}"
            torch.compiler.reset()
            with switches(half, deterministic=False), half.stream():
                bench.forget_peak()
                trainer = build(bench, half)
                try:
                    ms, seconds = compiled_ms(bench, trainer, limit, mode=mode, backend=backend)
                except (Exception, TooLong) as error:
                    reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
                    table.add(what, f"{variant}: not measured ({reason})", float("nan"), "ms")
                    continue
                finally:
                    del trainer
            table.add(what, variant, ms, "ms")
            table.add(what, f"{name} / ours", ms / ours[what], "times")
            add_share(bench, table, what, f"{name}, share of matrix product rate", copies, ms, rate)
            add_memory(bench, table, what, f"{name}, memory")
            table.add(what, f"{name}, time to compile", seconds, "s")
    torch.compiler.reset()


def compiled_ms(bench: Bench, trainer: Trainer, limit: float, *, mode: str, backend: str) -> tuple[float, float]:
    """Return the milliseconds of a step with a compiled backbone, and the seconds until it was compiled."""
    backbone = trainer.learner.network.backbone
    chosen = {"mode": mode} if backend == "inductor" else {}
    backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    backbone.compile(backend=backend, dynamic=False, **chosen)
    start = time.perf_counter()
    with at_most(limit):
        bench.step_ms(trainer, 1)
    seconds = time.perf_counter() - start
    return bench.step_ms(trainer, 40), seconds


def profile(bench: Bench, rows: int = 25) -> None:
    """Print which kernels the steps of both kinds of task spend their time in."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    ours = bench.paths["ours"]
    activities = [ProfilerActivity.CUDA if bench.device.type == "cuda" else ProfilerActivity.CPU]
    for what, (build, _) in KINDS.items():
        with ours.stream():
            trainer = build(bench, ours)
            bench.step_ms(trainer)
            run, _ = sweep(trainer, 10)
            with recorded(activities=activities) as record:
                run()
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
    plain, before = bench.paths["ours"], torch.get_num_threads()
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
        trainer.run()
        run, steps = sweep(trainer, trainer.feed.block_steps)

        def pace(action: Callable[[], None], count: int) -> float:
            begin, done = time.perf_counter(), 0
            while time.perf_counter() - begin < seconds:
                action()
                bench.wait()
                done += count
            return 1e3 * (time.perf_counter() - begin) / done

        run()
        bench.wait()
        print("ready", flush=True)
        sys.stdin.readline()
        result = {"step": pace(run, steps), "epoch": pace(trainer.run, 4 * trainer.feed.steps_per_epoch)}
        print(json.dumps(result))


def report_run(folder: Path, table: Table) -> None:
    """The split of a whole run, from its summary."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    for phase, seconds in summary["seconds"].items():
        table.add(f"whole run, {summary['dataset']} {summary['scenario']}", phase.replace("_", "-"), seconds, "s")


def measure_rest(bench: Bench, table: Table, several: list[int]) -> None:
    """Everything but the steps themselves."""
    measure_growth(bench, table)
    if bench.device.type == "cpu":
        measure_processor(bench, table)
    measure_end_of_task(bench, table)
    if bench.device.type == "cuda" and several:
        torch.cuda.empty_cache()
        measure_packing(bench, table, several)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--pixels", type=int, choices=sorted(BY_PIXELS), default=32, help="size of the images")
    parser.add_argument("--profile", action="store_true", help="print the time of every kernel, and nothing else")
    parser.add_argument("--only-steps", action="store_true", help="leave out growth, ends of tasks and several runs")
    parser.add_argument(
        "--compile",
        type=float,
        metavar="SECONDS",
        help="also torch.compile, each compilation limited to so many seconds",
    )
    parser.add_argument("--small", action="store_true", help="slim network, small images, few steps")
    parser.add_argument("--steps", type=int, help="training steps that are timed at a time")
    parser.add_argument("--several", type=int, nargs="*", default=[3, 5], help="how many runs at a time (GPU only)")
    parser.add_argument("--run", type=Path, help="folder of a finished run, whose split of time is added")
    parser.add_argument("--output", type=Path, help="CSV file to write")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = SMALL if options.small else BY_PIXELS[options.pixels]
    if options.steps is not None:
        images = min(sizes.images, options.steps * sizes.batch)
        sizes = replace(sizes, steps=options.steps, images=images, epochs=1)
    bench = Bench(choose_device(options.device), sizes)
    with switches(bench.paths["ours"], deterministic=False):
        if options.worker:
            work(bench, options.worker)
            return
        if options.profile:
            profile(bench)
            return
        table = Table()
        rate, ours = measure_steps(bench, table)
        if not options.only_steps:
            measure_rest(bench, table, options.several)
    if options.run:
        report_run(options.run, table)
    if options.output:
        table.write(options.output)
    if options.compile:  # last, and once the rest is written: compilers fail in many ways
        measure_compiled(bench, table, options.compile, rate, ours)
    else:
        print("Not compared with torch.compile: --compile SECONDS does that.")
    if options.output:
        table.write(options.output)


if __name__ == "__main__":
    main()
