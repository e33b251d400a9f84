"""How long the kernels of a step and the gradients of images take, in one process and in turns.

    python benchmarks/kernels.py --output FILE             # 32 pixels
    python benchmarks/kernels.py --parts attack            # only one of attack, kernels
    python benchmarks/kernels.py --tune --seconds 60       # other ways to split BatchNorm's sums
    python benchmarks/kernels.py --small                   # on a laptop: only that it runs

Changed images (network/fast/attack.py) are timed beside plain autograd and beside the training step, max-pooling beside
PyTorch's. benchmarks/speed.py times the steps themselves.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from efcil.engine.hardware import choose_device, switches
from efcil.network.fast.attack import FusedAttack
from efcil.network.fast.graphs import capture
from efcil.network.incremental import IncrementalNetwork
from speed import BY_PIXELS, SMALL, Bench, Table, sweep

NOW = "as it is"
ATTACK_STEPS = 4
REPEATS = 10
PARTS = ("attack", "kernels")
#: Rows of a tile, most programs, warps and stages of a sum over rows.
SPLITS = (
    (128, 512, 4, 1),
    (64, 256, 8, 3),
    (32, 512, 4, 3),
    (64, 512, 4, 2),
    (64, 128, 8, 4),
    (128, 128, 8, 3),
    (32, 1024, 4, 1),
)
PIECES = (64, 128, 256, 512, 1280, 2560)


def in_turns(bench: Bench, actions: dict[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """Return the median seconds of every action, each called once in every round."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            bench.wait()
            start = time.perf_counter()
            action()
            bench.wait()
            if number:  # the first round compiles and captures
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def compare(table: Table, what: str, seconds: dict[str, float], scale: float, unit: str) -> None:
    """Add the times of all variants, and their ratios to the first."""
    first = next(iter(seconds.values()))
    for name, value in seconds.items():
        table.add(what, name, scale * value, unit)
    for name, value in list(seconds.items())[1:]:
        table.add(f"{what}, ratio", name, value / first, "x")


def repeated(bench: Bench, action: Callable[[], object]) -> Callable[[], object]:
    """Return a function that repeats an action; on CUDA as one graph, so that the host is not what is measured."""

    def run() -> None:
        for _ in range(REPEATS):
            action()

    if bench.device.type != "cuda":
        return run
    run()
    graph = capture(run)
    return graph.replay


class Layer:
    """Random tensors of one layer of a ResNet-18 in a first task's step, and what is done with them."""

    def __init__(self, bench: Bench, stage: int) -> None:
        half = torch.bfloat16
        self.channels, self.side = 64 << stage, bench.sizes.pixels >> stage
        self.name = f"{self.channels} x {self.side} x {self.side}"
        device, shape = bench.device, (4 * bench.sizes.batch, self.side, self.side, self.channels)
        self.x, self.gradient, self.activation, self.other = (
            torch.randn(shape, device=device, dtype=half).permute(0, 3, 1, 2) for _ in range(4)
        )
        self.vectors = [torch.rand(self.channels, device=device) for _ in range(6)]
        size = 9 * self.channels**2
        self.flat = [torch.rand(size, device=device) for _ in range(3)]
        self.small = [torch.rand(size, device=device).to(half) for _ in range(2)]
        self.turned = torch.zeros(self.channels, 3, 3, self.channels, device=device, dtype=half).permute(0, 3, 1, 2)
        self.rates = torch.tensor([1e-4, 1.0], device=device)
        self.statistics = torch.rand(4, self.channels, device=device)

    def sums(self, module: Any) -> Tensor:
        return module.batch_statistics(self.x, *self.vectors[:4], 0.1, 1e-5)

    def forwards(self, module: Any) -> None:
        module.normalise_relu(self.x, self.sums(module))

    def after_a_sum(self, module: Any) -> None:
        known = (self.statistics, *self.vectors[:3])
        module.normalise_backward(self.gradient, self.x, *known, self.activation, self.other)

    def after_a_relu(self, module: Any) -> None:
        module.normalise_backward(self.gradient, self.x, self.statistics, *self.vectors[:3], None, None, True)

    def update(self, module: Any) -> None:
        master, first, second = self.flat
        constants = ((0.9, 0.999), 1e-8, 0.0)
        module.adam(
            master, self.small[0], first, second, self.rates, *constants, self.vectors[0], self.small[1], self.turned
        )


def measure_kernels(bench: Bench, table: Table) -> None:
    """BatchNorm's sums and the optimiser, for the layers of a ResNet-18 in a first task's step."""
    from efcil.network.fast import kernels

    for layer in (Layer(bench, stage) for stage in range(4)):
        cases: dict[str, Callable[[Any], None]] = {
            "statistics and normalisation": layer.forwards,
            "backward, after a sum": layer.after_a_sum,
            "backward, after a ReLU": layer.after_a_relu,
            "Adam and turned weight": layer.update,
        }
        for what, case in cases.items():
            run = {NOW: repeated(bench, partial(case, kernels))}
            compare(table, f"{what}, {layer.name}", in_turns(bench, run), 1e6 / REPEATS, "us")


def plainly(network: IncrementalNetwork, half: bool, images: Tensor, targets: Tensor) -> Tensor:
    """Return images after steps down their gradient, computed layer by layer."""
    for _ in range(ATTACK_STEPS):
        leaf = images.detach().requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16) if half else nullcontext():
            found = network.backbone(leaf)
        (slope,) = torch.autograd.grad(found, leaf, (found - targets).detach())
        norm = slope.float().flatten(1).norm(dim=1).clamp(min=1e-30)[:, None, None, None]
        images = images - (6.0 * slope / norm).to(images.dtype)
    return images


def measure_pooling(bench: Bench, table: Table) -> None:
    """The max-pooling of images of 224 pixels and its backward pass, with the mask of the ReLU before it."""
    from efcil.network.fast import kernels, operations

    shape = (bench.sizes.batch, 112, 112, 64)
    x = torch.randn(shape, device=bench.device, dtype=torch.bfloat16).permute(0, 3, 1, 2).relu()
    other = torch.randn_like(kernels.max_pool(x)[0])

    def both(module: Any) -> None:
        pooled, places = module.max_pool(x)
        module.unpool(pooled.clone(), other, pooled, places, x)

    runs = {name: repeated(bench, partial(both, module)) for name, module in ((NOW, kernels), ("PyTorch", operations))}
    compare(table, "max-pooling both ways, 64 x 112 x 112", in_turns(bench, runs), 1e6 / REPEATS, "us")


def measure_attack(bench: Bench, table: Table) -> None:
    """Images changed by four gradients of the old network, and its features without gradients, by size of the piece."""
    ours, pixels = bench.fused, bench.sizes.pixels
    trainer = bench.efc(ours, 50)
    network = trainer.learner.teacher
    assert network is not None
    fused = network.fast
    assert fused is not None
    attack, size = FusedAttack(fused), network.feature_size
    run, steps = sweep(trainer, 20)
    step = in_turns(bench, {"step": run}, 3)["step"] / steps
    table.add("incremental step", "beside it", 1e3 * step, "ms")
    most = 256 if bench.sizes == SMALL else PIECES[-1]

    def draw(count: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(count, 3, pixels, pixels, device=bench.device, dtype=ours.dtype)
        return images.contiguous(memory_format=torch.channels_last), torch.rand(count, size, device=bench.device)

    batch = bench.sizes.batch
    for count in (batch, 4 * batch):
        given = draw(count)
        runs = {
            "fused": partial(attack.towards, *given, [6.0] * ATTACK_STEPS),
            "plain autograd": partial(plainly, network, ours.half, *given),
        }
        what = f"{ATTACK_STEPS} gradients of {count} images"
        seconds = in_turns(bench, runs)
        compare(table, what, seconds, 1e3, "ms")
        share = seconds["fused"] * batch / count / step
        table.add(what, f"for {batch} images, training steps", share, "x")
        table.add(what, f"one gradient of {batch} images, training steps", share / ATTACK_STEPS, "x")
    total, _ = draw(most)
    for piece in (p for p in PIECES if p <= most):

        def features(piece: int = piece) -> None:
            with torch.no_grad():
                for part in total.split(piece):
                    network.features(part)

        found = in_turns(bench, {"features": features}, 3)["features"]
        table.add(f"old features of {most} images", f"pieces of {piece}", 1e3 * found, "ms")


def tune(bench: Bench, table: Table, limit: float) -> None:
    """Other ways to split BatchNorm's sums, until the time is up; the first is the one in use."""
    from efcil.network.fast import kernels

    def both(layer: Layer, cut: Any) -> None:
        kernels._reduction = lambda *_: cut
        try:
            layer.sums(kernels)
            layer.after_a_sum(kernels)
        finally:
            kernels._reduction = used

    used, begun = kernels._reduction, time.perf_counter()
    for layer in (Layer(bench, stage) for stage in range(4)):
        runs: dict[str, Callable[[], object]] = {}
        for cut in [used(layer.channels, layer.x.dtype), *(kernels._Reduction(*numbers) for numbers in SPLITS)]:
            if time.perf_counter() - begun > limit:
                break
            name = f"rows {cut.rows}, most {cut.most}, warps {cut.warps}, stages {cut.stages}"
            runs[name] = repeated(bench, partial(both, layer, cut))
        if runs:
            compare(table, f"sums both ways, {layer.name}", in_turns(bench, runs), 1e6 / REPEATS, "us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--pixels", type=int, choices=sorted(BY_PIXELS), default=32, help="size of the images")
    parser.add_argument("--small", action="store_true", help="slim network, small images, few steps")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--tune", action="store_true", help="only try other ways to split BatchNorm's sums (GPU only)")
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no other way to split after this time")
    parser.add_argument("--output", type=Path, help="CSV file to write")
    options = parser.parse_args()
    bench = Bench(choose_device(options.device), SMALL if options.small else BY_PIXELS[options.pixels])
    ours, table, cuda = bench.fused, Table(), bench.device.type == "cuda"
    with switches(ours, deterministic=False), ours.stream():
        if options.tune and not cuda:
            raise SystemExit("Kernels are compiled for a GPU only, and there is none here; leave --tune out.")
        if options.tune:
            tune(bench, table, options.seconds)
        else:
            if "attack" in options.parts:
                measure_attack(bench, table)
            if "kernels" in options.parts and cuda:
                measure_kernels(bench, table)
                measure_pooling(bench, table)
    if options.output:
        table.write(options.output)


if __name__ == "__main__":
    main()
