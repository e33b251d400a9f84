"""A backbone with one bias-free head per task, linear or cosine."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from efcil import ranks, seeds
from efcil.core.heads import cosine_logits, new_rows
from efcil.network import split
from efcil.network.backbones import Backbone, check_name

if TYPE_CHECKING:
    from efcil.network.fast.fused import FusedBackbone


#: Bytes of images that a CPU reads at a time: the kernel has to give the memory of larger activations for every layer.
CPU_READ_BYTES = 1 << 20
CPU_LEAST_READ = 6


def cpu_piece(size: int) -> int:
    """Return how many images of `size` pixels a CPU reads at a time: 85 of 32 pixels, six of 224."""
    return max(CPU_LEAST_READ, CPU_READ_BYTES // (12 * size * size))


class IncrementalNetwork(nn.Module):
    """Backbone plus heads. Logits of all heads, concatenated in task order, are the scores of all seen classes.

    `half_precision` and `fast` are execution choices, not state: `half_precision` runs the backbone in bfloat16,
    `fast` is what network/fast installs to run it as one operation that reads the same parameters. Images smaller than
    `input_size` are enlarged to it, if it is given: pre-trained networks know objects at the size they have seen.

    Heads are linear unless there is a scale of cosine heads, learned or fixed; so a saved state says which they are.
    """

    head_scale: nn.Parameter | None
    fixed_head_scale: Tensor | None

    def __init__(self, backbone: nn.Module, input_size: int | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        self.input_size = input_size
        self.heads = nn.ParameterList()
        self.register_parameter("head_scale", None)
        self.register_buffer("fixed_head_scale", None)
        self.half_precision = False
        self.fast: FusedBackbone | None = None

    @property
    def feature_size(self) -> int:
        """Number of features per image."""
        return self.backbone.feature_size  # type: ignore[return-value]

    @property
    def path(self) -> str:
        """How features are computed: `fused`, or `plain` for layer by layer."""
        return "plain" if self.fast is None else "fused"

    @property
    def head_sizes(self) -> list[int]:
        """Number of classes of every head, in task order."""
        return [head.shape[0] for head in self.heads]

    @property
    def cosine_scale(self) -> Tensor | None:
        """The scale (1) of cosine heads; None if heads are linear."""
        return self.fixed_head_scale if self.head_scale is None else self.head_scale

    def use_cosine_heads(self, scale: float | None = None) -> None:
        """Make all heads cosine heads: of a fixed scale, or of one that is learned and begins with 1."""
        device = next(self.backbone.parameters()).device
        self.head_scale = nn.Parameter(torch.ones(1, device=device)) if scale is None else None
        self.fixed_head_scale = None if scale is None else torch.full((1,), float(scale), device=device)

    def match_heads(self, tensors: Mapping[str, Tensor]) -> None:
        """Make heads as they are in a saved state of a network, before it is loaded: how many, and of which kind."""
        numbers = sorted(int(name.removeprefix("heads.")) for name in tensors if name.startswith("heads."))
        self.grow_to([tensors[f"heads.{number}"].shape[0] for number in numbers])
        if "head_scale" in tensors or "fixed_head_scale" in tensors:
            self.use_cosine_heads(None if "head_scale" in tensors else 1.0)
        else:
            self.head_scale = self.fixed_head_scale = None

    def add_head(self, classes: int, generator: torch.Generator | None = None) -> None:
        """Append a head for `classes` new classes, initialised uniformly in +-1/sqrt(features)."""
        rows = new_rows(classes, self.feature_size, generator)
        self.heads.append(nn.Parameter(rows.to(next(self.backbone.parameters()).device)))

    def grow_to(self, head_sizes: list[int]) -> None:
        """Append zero-initialised heads until the sizes match; used before a saved state is loaded."""
        for size in head_sizes[len(self.heads) :]:
            weight = torch.zeros(size, self.feature_size, device=next(self.backbone.parameters()).device)
            self.heads.append(nn.Parameter(weight))

    def features(self, images: Tensor) -> Tensor:
        """Return float32 features (batch, n) of normalised images (batch, 3, h, w).

        In a run of several processes each computes a part of them; all must call this with the same images.
        """
        return (
            split.features(self.own_features, self.backbone, images) if ranks.several() else self.own_features(images)
        )

    def own_features(self, images: Tensor) -> Tensor:
        """As `features`, all of them computed by this process; a CPU that only reads does so in small pieces."""
        if images.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            pieces = images.split(cpu_piece(self.input_size or images.shape[-1]))
            if len(pieces) > 1 and not any(module.training for module in self.backbone.modules()):
                return torch.cat([self._computed(piece) for piece in pieces])
        return self._computed(images)

    def _computed(self, images: Tensor) -> Tensor:
        if self.input_size is not None and images.shape[-1] != self.input_size:
            images = functional.interpolate(images, self.input_size, mode="bilinear", antialias=False)
        if self.fast is not None and self.fast.applies(images):
            return self.fast(images)
        context: AbstractContextManager[object] = (
            torch.autocast(images.device.type, dtype=torch.bfloat16) if self.half_precision else nullcontext()
        )
        with context:
            return self.backbone(images)

    def head_weight(self) -> Tensor:
        """Return the weights of all heads as one matrix (seen classes, n)."""
        return torch.cat(list(self.heads))

    def logits(self, features: Tensor) -> Tensor:
        """Return the scores (batch, seen classes) of features (batch, n)."""
        return self.logits_of(features, self.head_weight())

    def newest_logits(self, features: Tensor) -> Tensor:
        """Return the scores (batch, classes of the newest head) of features (batch, n)."""
        return self.logits_of(features, self.heads[-1])

    def logits_of(self, features: Tensor, weight: Tensor) -> Tensor:
        """Return the scores (batch, m) of features (batch, n) by rows (m, n), linear or cosine as the heads are."""
        scale = self.cosine_scale
        return functional.linear(features, weight) if scale is None else cosine_logits(features, weight, scale)

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the weights of all heads, and the scale of cosine heads if it is learned."""
        yield from self.heads
        if self.head_scale is not None:
            yield self.head_scale

    def norm_parameters(self) -> Iterator[nn.Parameter]:
        """Yield scale and shift of every BatchNorm layer that has them."""
        for module in self.backbone.modules():
            if isinstance(module, _BatchNorm):
                yield from module.parameters()

    def frozen_copy(self) -> IncrementalNetwork:
        """Return a copy in eval mode that never trains: the teacher of the next task."""
        return copy.deepcopy(self).eval().requires_grad_(False)


def fresh_network(
    backbone: Backbone | str, seed: int, device: torch.device, *, load: bool = True
) -> IncrementalNetwork:
    """Return a network without heads: its pre-trained weights loaded, or untrained. A name is one of our own."""
    if isinstance(backbone, str):
        check_name(backbone)
        backbone = Backbone(backbone, backbone)
    made = backbone.build(seeds.derive(seed, "backbone"), load=load)
    return IncrementalNetwork(made, backbone.input_size).to(device)


def trained_network(
    backbone: Backbone | str, seed: int, device: torch.device, tensors: Mapping[str, Tensor]
) -> IncrementalNetwork:
    """Return the network of a first task, trained now or loaded."""
    network = fresh_network(backbone, seed, device, load=False)
    network.match_heads(tensors)
    network.load_state_dict(dict(tensors))
    return network.eval()
