"""Images changed until a frozen network gives wanted features, on the fused backbone.

The network never trains here, so its BatchNorm is folded into the weights and a backward pass has nothing to do but to
hand the gradient down to the images: convolutions with weights that were turned once, and masks of ReLUs, which are the
activations themselves. No weight gradient is computed. On CUDA all steps of a piece of images are one graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from efcil.errors import TrainingError
from efcil.network.fast.fused import FusedBackbone, Saved
from efcil.network.fast.graphs import capture
from efcil.network.incremental import IncrementalNetwork
from efcil.network.resnet import BasicBlock

#: Pixels of the images of one graph: 256 images of 32 pixels. More do not fill a large card better, and the activations
#: of each of its images stay in memory as long as the graph does (about 1.2 MB with a ResNet-18).
LARGEST_PIECE = 256 * 32 * 32
SMALLEST_GRAPH = 16


@dataclass
class _Graph:
    """One piece of images on its way: where the graph reads it, and where it leaves it."""

    images: Tensor  # in float32, so that steps add up exactly
    working: Tensor  # the same in the type of the network
    targets: Tensor
    replayed: torch.cuda.CUDAGraph | None = None


class FusedAttack:
    """Gradients of images, and steps down these gradients, for a fused backbone in eval mode, which owns this."""

    def __init__(self, fused: FusedBackbone) -> None:
        # Not a reference that counts: the backbone has one to this, and its memory must be freed at once when it goes.
        self.fused = cast(FusedBackbone, weakref.proxy(fused))
        self._graphs: dict[tuple[Any, ...], _Graph] = {}
        self._pool: Any = None
        self._used: torch.cuda.Event | None = None

    @torch.no_grad()
    def features_and_input_gradient(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return features (K, n), and the gradient of ||f(x) - target||^2 / 2 with respect to images (K, 3, h, w).

        Both are in float32 (float64 if the network is), the gradient is channels-last.
        """
        self._prepare()
        working = images.to(self.fused.dtype).contiguous(memory_format=torch.channels_last)
        return self._compute(working, targets)

    def input_gradient(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return that gradient alone."""
        return self.features_and_input_gradient(images, targets)[1]

    @torch.no_grad()
    def towards(self, images: Tensor, targets: Tensor, lengths: Sequence[float]) -> Tensor:
        """Return images after steps of these `lengths` (per image, as a vector) down the gradient.

        An image whose gradient is zero stays. Values are not clamped.
        """
        if len(lengths) == 0 or len(images) == 0:
            return images.clone()
        self._prepare()
        most = max(1, LARGEST_PIECE // (images.shape[2] * images.shape[3]))
        pieces = zip(images.split(most), targets.split(most), strict=True)
        moved = [self._move(piece, wanted, tuple(lengths), most) for piece, wanted in pieces]
        return torch.cat(moved) if len(moved) > 1 else moved[0]

    def _prepare(self) -> None:
        """Bring the working weights up to date, and those that the backward pass reads."""
        fused = self.fused
        if fused.backbone.training:
            raise TrainingError("Images are changed by a frozen network only; call eval() on it first.")
        fused.keep_turned()
        fused.renew()

    # -- several steps -----------------------------------------------------------------------------------------

    def _move(self, images: Tensor, targets: Tensor, lengths: tuple[float, ...], most: int) -> Tensor:
        """Return a piece of at most `most` images after its steps."""
        if not self._captures(images):
            piece = self._static(images, targets, len(images))
            self._fill(piece, images, targets)
            self._steps(piece, lengths)
            return piece.images.to(images.dtype)
        # Pieces of few sizes, so that there are few graphs; the rows that are left over are computed in vain.
        size = min(most, max(SMALLEST_GRAPH, 1 << (len(images) - 1).bit_length()))
        key = (size, *images.shape[1:], lengths)
        piece = self._graphs.get(key) or self._static(images, targets, size)
        if self._used is not None:
            torch.cuda.current_stream().wait_event(self._used)  # another stream may have used the same memory
        self._fill(piece, images, targets)
        if piece.replayed is None:
            self._graphs[key] = piece
            self._steps(piece, lengths)  # compiles, and allocates what is kept
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            piece.replayed = capture(lambda: self._steps(piece, lengths), self._pool)
            self._fill(piece, images, targets)
        piece.replayed.replay()
        moved = piece.images[: len(images)].to(images.dtype, copy=True)
        self._used = torch.cuda.Event()
        self._used.record()
        return moved

    @staticmethod
    def _captures(images: Tensor) -> bool:
        """Return whether a graph can be used: not on the default stream, nor while another graph is captured."""
        if not images.is_cuda or torch.cuda.is_current_stream_capturing():
            return False
        return torch.cuda.current_stream() != torch.cuda.default_stream()

    def _static(self, images: Tensor, targets: Tensor, size: int) -> _Graph:
        shape = (size, *images.shape[1:])
        wide, narrow = (
            torch.zeros(shape, device=images.device, dtype=dtype).contiguous(memory_format=torch.channels_last)
            for dtype in (self.fused.bias.dtype, self.fused.dtype)
        )
        return _Graph(wide, narrow, torch.zeros(size, targets.shape[1], device=images.device, dtype=wide.dtype))

    @staticmethod
    def _fill(piece: _Graph, images: Tensor, targets: Tensor) -> None:
        piece.images[: len(images)].copy_(images)
        piece.working[: len(images)].copy_(images)
        piece.targets[: len(images)].copy_(targets)

    def _steps(self, piece: _Graph, lengths: Sequence[float]) -> None:
        for length in lengths:
            _, gradient = self._compute(piece.working, piece.targets)
            self.fused.operations.descend(piece.images, gradient, piece.working, length)

    # -- one step ----------------------------------------------------------------------------------------------

    def _compute(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        features, saved = self.fused.run_forward(images, branch=False)
        return features, self._gradient(saved, features - targets)

    def _gradient(self, saved: Saved, gradient: Tensor) -> Tensor:
        """Return the gradient of the images from that of the features."""
        fused, operations = self.fused, self.fused.operations
        down, other = operations.pool_mask(gradient, saved.activations[-1][-1]), None
        last = True
        for block, (x, _, hidden, _, y) in zip(
            reversed(list(fused.backbone.blocks)), reversed(saved.activations[1:]), strict=True
        ):
            assert isinstance(block, BasicBlock)
            summed = down if last else operations.mask(down, y, other)
            last = False
            down = operations.mask(fused.input_gradient(summed, hidden, block.conv2), hidden)
            down = fused.input_gradient(down, x, block.conv1)
            other = summed
            if block.shortcut_conv is not None:
                other = operations.project_input(summed, fused.weight_of(block.shortcut_conv))
        images, _, out, *places = saved.activations[0]
        if places:
            pooled = saved.activations[1][0]
            down, other = operations.unpool(down, other, pooled, places[0], out), None
        first = fused.backbone.conv1
        return operations.stem_input(
            down, out, other, fused.weights[0], images.shape[2:], first.stride[0], int(first.padding[0])
        )


def attack_on(network: IncrementalNetwork, images: Tensor) -> FusedAttack | None:
    """Return what changes images by this network's gradient, if its fused backbone computes the features of these."""
    fused = network.fast
    enlarged = network.input_size is not None and images.shape[-1] != network.input_size
    if fused is None or enlarged or fused.backbone.training:
        return None
    with torch.no_grad():
        if not fused.applies(images):
            return None
    if fused.attack is None:
        fused.attack = FusedAttack(fused)
    return fused.attack
