"""What each change of the fused step brings, all in one process and in turns, so that only ratios matter.

    python benchmarks/kernels.py --output benchmarks/results/kernels-h200.csv                 # 32 pixels
    python benchmarks/kernels.py --pixels 64 --output benchmarks/results/kernels-64-h200.csv
    python benchmarks/kernels.py --parts attack            # only one of steps, attack, kernels
    python benchmarks/kernels.py --tune --seconds 60       # other ways to split BatchNorm's sums
    python benchmarks/kernels.py --small                   # on a laptop: only that it runs

Steps are timed as they are, with every change taken back alone, and with all of them taken back (on a GPU). Kernels are
timed beside their earlier versions, changed images (network/fast/attack.py) beside plain autograd and beside the
training step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from efcil.core import elastic
from efcil.engine.hardware import choose_device, switches
from efcil.engine.optimiser import FlatOptimiser
from efcil.engine.trainer import Trainer
from efcil.network.fast.attack import FusedAttack
from efcil.network.fast.fused import FusedBackbone
from efcil.network.fast.graphs import capture
from efcil.network.incremental import IncrementalNetwork
from speed import BY_PIXELS, SMALL, Bench, Table, sweep

NOW, BEFORE = "as it is", "all as before"
ATTACK_STEPS = 4
REPEATS = 10
PARTS = ("steps", "attack", "kernels")
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


# -- changes, taken back ---------------------------------------------------------------------------------------------


def _stretches(fused: FusedBackbone) -> list[str]:
    return ["batch_statistics", "normalise_backward"]


def _turned_apart(fused: FusedBackbone) -> list[str]:
    return ["adam", "sgd"]


def _in_line(fused: FusedBackbone) -> list[str]:
    fused._branch = None
    return []


def _zeros(fused: FusedBackbone) -> list[str]:
    def layer(self: FusedBackbone, x: Tensor, convolution: Any, residual: Any) -> tuple[Tensor, None]:
        if convolution is self.backbone.conv1 or not self._cudnn:
            return FusedBackbone._frozen_layer(self, x, convolution, residual)
        residual = self._zeros(x, convolution) if residual is None else residual
        weight, bias = self.weight_of(convolution), self._half_biases[self.index_of(convolution)]
        shape: Any = (convolution.stride, convolution.padding, (1, 1), 1)
        return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *shape), None

    fused._frozen_layer = MethodType(layer, fused)  # type: ignore[method-assign]
    return []


def _nothing(fused: FusedBackbone) -> list[str]:
    return []


def _loss_in_parts(learner: Any) -> None:
    """Let EFC's loss be summed and scaled by PyTorch."""
    import earlier_kernels

    loss = learner.loss

    def earlier(batch: Any) -> Any:
        before, elastic._on = elastic._on, lambda _: earlier_kernels
        try:
            return loss(batch)
        finally:
            elastic._on = before

    learner.loss = earlier


LOSS_IN_PARTS = "loss in more kernels"
TENSOR_BY_TENSOR = "batches copied tensor by tensor"
#: What a change did, taken back: by the name of how it was.
CHANGES: dict[str, Callable[[FusedBackbone], list[str]]] = {
    TENSOR_BY_TENSOR: _nothing,
    LOSS_IN_PARTS: _nothing,
    "sums over stretches of rows": _stretches,
    "turned weights in kernels of their own": _turned_apart,
    "projections in line": _in_line,
    "zeros as residual": _zeros,
}


def take_back(trainer: Trainer, names: list[str]) -> None:
    """Let a trainer, and the old network of its method, compute as before these changes."""
    learner = trainer.learner
    trainer.feed.at_once = trainer.feed.at_once and TENSOR_BY_TENSOR not in names
    if LOSS_IN_PARTS in names:
        _loss_in_parts(learner)
    for network in (learner.network, getattr(learner, "teacher", None)):
        if network is None or network.fast is None:
            continue
        replaced = [name for change in names for name in CHANGES[change](network.fast)]
        if replaced:
            import earlier_kernels

            network.fast.operations = earlier_kernels.with_earlier(*replaced)
    if isinstance(trainer.optimiser, FlatOptimiser) and learner.network.fast is not None:
        trainer.optimiser.operations = learner.network.fast.operations


def variants(device: torch.device) -> dict[str, list[str]]:
    """Return which changes are taken back in every variant; on a CPU they make no difference."""
    if device.type == "cpu":
        return {NOW: []}
    return {NOW: [], BEFORE: list(CHANGES)} | {name: [name] for name in CHANGES}


# -- measurements ----------------------------------------------------------------------------------------------------


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


def measure_steps(bench: Bench, table: Table, steps: int) -> None:
    """Steps of both kinds of task in all variants, and whole epochs of later ones."""
    ours = bench.paths["ours"]
    for what, build in (("first-task step", bench.first), ("incremental step", lambda e: bench.efc(e, 50))):
        trainers = {}
        for name, names in variants(bench.device).items():
            if what == "first-task step" and name in ("zeros as residual", LOSS_IN_PARTS):
                continue  # its BatchNorm trains, and its loss is another
            if what == "incremental step" and name == "sums over stretches of rows":
                continue  # its BatchNorm is frozen
            trainers[name] = build(ours)
            take_back(trainers[name], names)
        sweeps = {name: sweep(trainer, steps) for name, trainer in trainers.items()}
        seconds = in_turns(bench, {name: run for name, (run, _) in sweeps.items()})
        compare(table, what, seconds, 1e3 / sweeps[NOW][1], "ms")
        if what == "incremental step":
            epochs = 2
            for trainer in trainers.values():
                trainer.recipe = replace(trainer.recipe, epochs=epochs)
            each = trainers[NOW].feed.steps_per_epoch
            runs = {name: trainers[name].run for name in (NOW, BEFORE) if name in trainers}
            compare(table, "whole epochs, per step", in_turns(bench, runs, 3), 1e3 / (epochs * each), "ms")


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

    def __init__(self, bench: Bench, stage: int, half: torch.dtype = torch.bfloat16) -> None:
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
    import earlier_kernels
    from efcil.network.fast import kernels

    modules = {NOW: kernels, BEFORE: earlier_kernels.with_earlier(*earlier_kernels.CHANGED)}
    for layer in (Layer(bench, stage) for stage in range(4)):
        cases: dict[str, Callable[[Any], None]] = {
            "statistics and normalisation": layer.forwards,
            "backward, after a sum": layer.after_a_sum,
            "backward, after a ReLU": layer.after_a_relu,
            "Adam and turned weight": layer.update,
        }
        for what, case in cases.items():
            runs = {name: repeated(bench, partial(case, module)) for name, module in modules.items()}
            compare(table, f"{what}, {layer.name}", in_turns(bench, runs), 1e6 / REPEATS, "us")


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
    ours, pixels = bench.paths["ours"], bench.sizes.pixels
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
            "fused": partial(attack.towards, *given, ATTACK_STEPS, 6.0),
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
        kernels._reduction = lambda _: cut
        try:
            layer.sums(kernels)
            layer.after_a_sum(kernels)
        finally:
            kernels._reduction = used

    used, begun = kernels._reduction, time.perf_counter()
    for layer in (Layer(bench, stage) for stage in range(4)):
        runs: dict[str, Callable[[], object]] = {}
        for cut in [used(layer.channels), *(kernels._Reduction(*numbers) for numbers in SPLITS)]:
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
    ours, table, cuda = bench.paths["ours"], Table(), bench.device.type == "cuda"
    with switches(ours, deterministic=False), ours.stream():
        if options.tune and not cuda:
            raise SystemExit("Kernels are compiled for a GPU only, and there is none here; leave --tune out.")
        if options.tune:
            tune(bench, table, options.seconds)
        else:
            if "steps" in options.parts:
                measure_steps(bench, table, 60 if bench.sizes.pixels <= 32 else 20)
            if "attack" in options.parts:
                measure_attack(bench, table)
            if "kernels" in options.parts and cuda:
                measure_kernels(bench, table)
                measure_pooling(bench, table)
    if options.output:
        table.write(options.output)


if __name__ == "__main__":
    main()
