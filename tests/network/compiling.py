"""Compile all our Triton kernels for a GPU that need not be there, as training and statistics launch them.

    python tests/network/compiling.py 90      # compute capability 9.0

Nothing is launched, so values are of no meaning. One line per kernel goes to standard output: its name, in how many
forms it was compiled, and the most shared memory that one of them takes, in bytes.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read by Triton when it is imported, and by every kernel when it is defined

import torch
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import efcil
import efcil.compiled

CLASSES, FEATURES, BATCH = 20, 512, 8


class Absent:
    """What Triton asks about a GPU, without one."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def only_compile(capability: int) -> dict[str, dict[str, int]]:
    """From now on, compile kernels instead of launching them; return where each form and its memory are noted."""
    driver.set_active(Absent(capability))
    forms: dict[str, dict[str, int]] = {}
    launch = JITFunction.run

    def compile_it(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found = launch(self, *arguments, grid=grid, warmup=True, **options)
        forms.setdefault(full_name(self), {})[found.hash] = found.metadata.shared

    JITFunction.run = compile_it
    return forms


def full_name(kernel: JITFunction) -> str:
    return f"{kernel.fn.__module__.removeprefix('efcil.')}.{kernel.fn.__name__}"


def kernels() -> Iterator[str]:
    """Yield the names of all kernels. What they call in turn has names without an underscore, or returns something."""
    for module in pkgutil.walk_packages(efcil.__path__, "efcil."):
        if module.name.rpartition(".")[2].endswith("kernel") or module.name.endswith("kernels"):
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, JITFunction) and "return " not in value.src:
                    yield full_name(value)


def a_step(large: bool, trained: bool, rule: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Compile what a training step launches, and for a frozen network the gradients of images."""
    from efcil.engine.optimiser import FlatOptimiser
    from efcil.network.fast.attack import FusedAttack
    from efcil.network.fast.fused import FusedBackbone
    from efcil.network.resnet import ResNet
    from efcil.settings import Recipe

    # The fewest and the most channels of a ResNet-18: blocks of kernels depend on them.
    network = ResNet((64, FEATURES), (2, 2), large_images=large).to(memory_format=torch.channels_last).train(trained)
    fused = FusedBackbone(network, dtype)
    fused.keep_turned()
    moved = list(network.parameters())
    if not trained:
        moved = [module.weight for module in network.modules() if isinstance(module, nn.Conv2d)]
    recipe = Recipe(optimiser=rule, learning_rate=0.01)
    optimiser = FlatOptimiser([{"params": moved, "learning_rate": 0.01}], recipe, fused, block_steps=1)
    optimiser.begin_block(0, 1, 1.0)
    optimiser.begin_step(None)
    images = torch.zeros(BATCH, 3, 32, 32)
    fused(images).sum().backward()
    optimiser.step()
    if not trained:
        fused.operations.bias_relu(torch.zeros(2, 64, 4, 4), torch.zeros(64))  # where cuDNN's own is not allowed
        FusedAttack(fused).towards(images, torch.zeros(BATCH, FEATURES), (1.0,))


def a_loss() -> None:
    """Compile what the loss of EFC launches."""
    from efcil.core.elastic import elastic_loss

    features, prototypes = torch.zeros(2 * BATCH, FEATURES, requires_grad=True), torch.zeros(BATCH, FEATURES)
    heads = torch.zeros(CLASSES, FEATURES, requires_grad=True)
    labels, weights = torch.zeros(3 * BATCH, dtype=torch.int64), torch.zeros(2 * BATCH)
    penalty = torch.zeros(FEATURES, FEATURES)
    sum(elastic_loss(features, heads, features[:BATCH].detach(), penalty, prototypes, labels, weights, 10)).backward()


def a_block() -> None:
    """Compile what makes images ready: crops of squares and of whole images, rotations, a step's part of a block."""
    from efcil.core.rotation import rotate_batch
    from efcil.data.augment import Normalisation, ResizedCrop
    from efcil.data.augment_kernel import windowed_crop
    from efcil.engine.gather_kernel import Gathering, Part

    normalisation, generator = Normalisation((0.5,) * 3, (0.5,) * 3), torch.Generator()
    pixels = torch.zeros(BATCH, 3, 32, 32, dtype=torch.uint8)
    crop = ResizedCrop(4)
    draws = crop.draw(BATCH, 32, generator)
    images = crop.render(pixels, torch.arange(BATCH), draws, normalisation, torch.bfloat16)
    constants = normalisation.constants(torch.device("cpu"))
    places, windows = torch.zeros(BATCH, 2, dtype=torch.int64), torch.zeros(BATCH, 8)
    for flip in (None, draws["flip"]):
        windowed_crop(pixels.flatten(), places, windows, flip, 224, *constants, torch.bfloat16)
    rotate_batch(images.contiguous(memory_format=torch.channels_last))
    Gathering([Part(torch.zeros(4 * BATCH, 3), torch.zeros(BATCH, 3), BATCH, 0)]).run(torch.zeros(1, dtype=torch.int64))


def main(capability: int) -> None:
    """Compile everything; leave with a message if a kernel was not among what was launched."""
    forms = only_compile(capability)
    efcil.compiled.compiled = lambda device: True  # before other modules import it
    works: list[Callable[[], None]] = [a_loss, a_block, lambda: a_step(False, True, "adam", torch.float32)]
    for large in (False, True):
        works += [lambda large=large, rule=rule: a_step(large, True, rule) for rule in ("adam", "sgd")]
        works.append(lambda large=large: a_step(large, False, "sgd"))
    for work in works:
        work()
    if missing := sorted(set(kernels()) - set(forms)):
        raise SystemExit(f"not compiled: {', '.join(missing)}")
    for name, shared in sorted(forms.items()):
        print(name, len(shared), max(shared.values()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
