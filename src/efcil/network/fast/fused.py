"""The backbone as one differentiable operation, with its forward and backward pass written out.

A training step of a small ResNet is dominated not by its convolutions but by everything around them: BatchNorm as
separate kernels, casts, layout copies, unfused additions. Here the whole backbone is a single autograd node:

- weights have a second copy in one flat buffer in the working type (bfloat16 on CUDA), channels-last;
- if BatchNorm is frozen, its scale is folded into those weights and its shift added together with the residual and
  the ReLU in one pass; the optimiser unfolds the gradient (chain rule: d/dW = scale * d/d(scale * W));
- if BatchNorm trains, statistics, normalisation, residual and ReLU are two passes over the activations;
- weight gradients run on side streams, since only the optimiser waits for them, and the optimiser updates a weight as
  soon as its gradient is ready.

The parameters stay those of the `ResNet` module: this class only reads them, and the flat optimiser
(engine/optimiser.py) writes both. Any other write is noticed by their version counters, and the working weights are
then written again. The same code runs on the CPU with the plain operations, which is how it is tested.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from efcil import ranks
from efcil.compiled import compiled
from efcil.errors import TrainingError
from efcil.network import split
from efcil.network.fast import operations
from efcil.network.resnet import BasicBlock, BatchNorm, ResNet

if TYPE_CHECKING:
    from efcil.network.fast.attack import FusedAttack

SIDE_STREAMS = 3
LARGEST_TENSOR = 2**31 - 2**16  # offsets in kernels have 32 bits, and full tiles may extend beyond the end

#: Priorities of CUDA streams: work that the rest of a step waits for, work that only the optimiser waits for. The
#: preparation of later steps has the default, 0, and uses what these two leave idle.
FIRST, SECOND = -2, -1


def _operations_for(device: torch.device) -> ModuleType:
    """Triton kernels if they can be compiled, else plain PyTorch."""
    if not compiled(device):
        return operations
    from efcil.network.fast import kernels

    return kernels


def fits(backbone: nn.Module) -> bool:
    """Return whether this file computes what the backbone computes: a `ResNet` of its own layers, nothing added."""
    modules = list(backbone.modules())
    return (
        type(backbone) is ResNet
        and {type(module) for module in modules} <= {ResNet, nn.ModuleList, BasicBlock, nn.Conv2d, BatchNorm}
        and all(module.bias is None for module in modules if isinstance(module, nn.Conv2d))
        and not any(_hooked(module) or "forward" in vars(module) for module in modules)
    )


def _hooked(module: nn.Module) -> bool:
    """Return whether the layer has hooks, which are called whenever it runs."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class _Versions:
    """The versions of some tensors at one moment. PyTorch counts a tensor's changes on the host, without waiting."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors  # kept, so that no new tensor can be mistaken for one of them
        self.numbers = [self._number(tensor) for tensor in tensors]

    @staticmethod
    def _number(tensor: Tensor) -> tuple[int, int]:
        return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version

    def hold(self, tensors: list[Tensor]) -> bool:
        """Return whether these are the same tensors, unchanged."""
        return len(tensors) == len(self.tensors) and all(
            mine is theirs and number == self._number(theirs)
            for mine, theirs, number in zip(self.tensors, tensors, self.numbers, strict=True)
        )


def channels_last_view(flat: Tensor, shape: torch.Size) -> Tensor:
    """View a flat tensor as a convolution weight (outputs, inputs, h, w) stored channels-last."""
    outputs, inputs, height, width = shape
    if height == width == 1:
        return flat.view(shape)  # the same memory, with the strides that PyTorch gives such a weight
    return flat.view(outputs, height, width, inputs).permute(0, 3, 1, 2)


@dataclass
class Saved:
    """What one forward pass keeps for the backward pass."""

    images: Tensor
    frozen: bool
    activations: list[Any] = field(default_factory=list)


class _Backbone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, anchor: Tensor, fused: FusedBackbone) -> Tensor:
        ctx.fused = fused
        features, ctx.saved = fused.run_forward(images)
        return features

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.fused.run_backward(ctx.saved, gradient)
        ctx.saved = None
        return None, None, None


class FusedBackbone:
    """Runs forward and backward passes of a `ResNet` in few, large operations. See the module's docstring."""

    def __init__(self, backbone: ResNet, dtype: torch.dtype) -> None:
        self.backbone = backbone
        self.dtype = dtype
        self.convolutions = [m for m in backbone.modules() if isinstance(m, nn.Conv2d)]
        # ModuleList order puts conv1, norm1, conv2, norm2, shortcut in the same order for both kinds.
        self.norms = [m for m in backbone.modules() if isinstance(m, nn.BatchNorm2d)]
        device = self.convolutions[0].weight.device
        self.operations = _operations_for(device)
        self._index = {id(m): i for i, m in enumerate(self.convolutions)}
        self.sizes = [c.weight.numel() for c in self.convolutions]
        total = sum(self.sizes)
        self.working = torch.zeros(total, device=device, dtype=dtype)
        self.gradient = torch.zeros(total, device=device, dtype=dtype)
        pieces = self.working.split(self.sizes)
        self.weights = [channels_last_view(p, c.weight.shape) for p, c in zip(pieces, self.convolutions, strict=True)]
        wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        channels = [n.num_features for n in self.norms]
        self.bias = torch.zeros(sum(channels), device=device, dtype=wide)
        self.biases = list(self.bias.split(channels))
        self.norm_gradient = torch.zeros(2, sum(channels), device=device, dtype=wide)
        self._gamma_gradients = list(self.norm_gradient[0].split(channels))
        self._beta_gradients = list(self.norm_gradient[1].split(channels))
        self.folded: bool | None = None
        self._children = [(module, tuple(module._modules.values())) for module in backbone.modules()]
        self._parameters = [(m, name, p) for m, _ in self._children for name, p in m._parameters.items()]
        self._weight_versions, self._norm_versions = _Versions([]), _Versions([])
        #: Whether a training step is running whose optimiser takes the gradients that are computed here.
        self.learning = False
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        #: Called with (number, gradient) as soon as a weight gradient is final; an optimiser that can use it sets it
        #: during a backward pass.
        self.update: Callable[[int, Tensor], None] | None = None
        cuda = device.type == "cuda"
        self._sides = [torch.cuda.Stream(device, priority=SECOND) for _ in range(SIDE_STREAMS if cuda else 0)]
        #: Projections run here, beside the convolutions of their block, in steps that train.
        self._branch = torch.cuda.Stream(device, priority=FIRST) if cuda else None
        self._forward_calls = 0
        self._backward_calls = 0
        # cuDNN adds shift, residual and ReLU to a convolution for free; it needs the shift in the working type.
        self._cudnn = cuda and dtype in (torch.bfloat16, torch.float16)
        self._half_bias = self.bias.to(dtype)
        self._half_biases = list(self._half_bias.split(channels))
        #: The weights of convolutions of stride 1 as the backward pass needs them, once somebody asks for them.
        self._turned: dict[int, Tensor] = {}
        self._nothing: dict[tuple[int, ...], Tensor] = {}
        #: Changes images by their gradient; made by the first that asks for it (attack.py).
        self.attack: FusedAttack | None = None

    # -- weights -----------------------------------------------------------------------------------------------

    def scales(self) -> list[Tensor]:
        """Return, for every convolution, the factors (outputs,) of the frozen BatchNorm after it."""
        return [
            (norm.weight.detach() * torch.rsqrt(self._variance(norm) + norm.eps)).to(self.bias.dtype)
            for norm in self.norms
        ]

    @staticmethod
    def _variance(norm: nn.BatchNorm2d) -> Tensor:
        assert norm.running_var is not None
        return norm.running_var

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedBackbone:
        """Return one for the copy of the backbone; nothing else needs to be copied."""
        return FusedBackbone(copy.deepcopy(self.backbone, memo), self.dtype)

    def renew(self) -> None:
        """Write the working weights again if they differ from the module's parameters in its present mode."""
        frozen = not self.backbone.training
        if (
            self.folded is not frozen
            or not self._weight_versions.hold(self._weight_sources())
            or (frozen and not self._norm_versions.hold(self._norm_sources()))
        ):
            self.refresh(folded=frozen)

    def written(self) -> None:
        """Record that an optimiser has updated the convolutions and their working weights."""
        self._weight_versions = _Versions(self._weight_sources())

    def forget(self) -> None:
        """Have the working weights written again before their next use."""
        self.folded = None

    def _weight_sources(self) -> list[Tensor]:
        return [convolution._parameters["weight"] for convolution in self.convolutions]  # type: ignore[misc]

    def _norm_sources(self) -> list[Tensor]:
        # A BatchNorm's updates of its running statistics do not raise their version counters, but that of its counter.
        both = (values for norm in self.norms for values in (norm._parameters.values(), norm._buffers.values()))
        return [tensor for values in both for tensor in values if tensor is not None]

    @torch.no_grad()
    def refresh(self, folded: bool) -> None:
        """Write the working weights again from the module's parameters, with BatchNorm folded in or not."""
        self.written()
        self._norm_versions = _Versions(self._norm_sources())
        scales = self.scales()
        for weight, convolution, scale in zip(self.weights, self.convolutions, scales, strict=True):
            plain = convolution.weight.detach()
            weight.copy_(plain * scale[:, None, None, None] if folded else plain)
        if folded:
            for bias, norm, scale in zip(self.biases, self.norms, scales, strict=True):
                assert norm.running_mean is not None
                bias.copy_(norm.bias - norm.running_mean * scale)
            # The two shifts that meet in a residual sum are added once, here, and not in every step.
            for block in self.backbone.blocks:
                assert isinstance(block, BasicBlock)
                if block.shortcut_conv is not None:
                    self._bias(block.conv2).add_(self._bias(block.shortcut_conv))
            self._half_bias.copy_(self.bias)
        self.folded = folded
        for index in self._turned:
            self.turn(index)

    def keep_turned(self) -> None:
        """Keep, from now on, the copies of weights that input gradients need.

        cuDNN is faster at convolutions than at the gradients of their inputs. If the stride is 1, these gradients are
        convolutions too: with the weights rotated by 180 degrees, inputs and outputs exchanged.
        """
        if self._turned:
            return
        for index, convolution in enumerate(self.convolutions):
            if index == 0 or convolution.stride != (1, 1) or convolution.kernel_size == (1, 1):
                continue
            outputs, inputs, height, width = convolution.weight.shape
            flat = torch.zeros(convolution.weight.numel(), device=self.working.device, dtype=self.dtype)
            self._turned[index] = channels_last_view(flat, torch.Size((inputs, outputs, height, width)))
            self.turn(index)

    def turned(self, index: int) -> Tensor | None:
        """Return the rotated weight of a convolution, if it has one: an optimiser writes it with the weight."""
        return self._turned.get(index)

    def turn(self, index: int) -> None:
        """Renew the rotated weight of a convolution that was updated; does nothing for those that have none."""
        if index in self._turned:
            self.operations.turn(self.weights[index], self._turned[index])

    def index_of(self, convolution: nn.Module) -> int:
        """Return which of `convolutions` this one is."""
        return self._index[id(convolution)]

    def weight_of(self, convolution: nn.Module) -> Tensor:
        """Return the working weight of a convolution."""
        return self.weights[self.index_of(convolution)]

    def _bias(self, convolution: nn.Module) -> Tensor:
        return self.biases[self.index_of(convolution)]

    # -- running -----------------------------------------------------------------------------------------------

    def applies(self, images: Tensor) -> bool:
        """Return whether calling this is the same as calling the backbone, as it is now, layer by layer.

        It is not if layers, weights (as with `torch.func.functional_call`), modes or hooks are no longer those of the
        backbone that this was made for, or if gradients would be lost: those of the images, and those outside of a
        training step.
        """
        if torch.is_grad_enabled() and (images.requires_grad or (self._trains() and not self.learning)):
            return False
        training = self.backbone.training
        return (
            all(norm.training is training for norm in self.norms)
            and all(module._parameters.get(name) is own for module, name, own in self._parameters)
            and all(tuple(module._modules.values()) == children for module, children in self._children)
            and not any(_hooked(module) for module, _ in self._children)
        )

    def _trains(self) -> bool:
        return any(parameter is not None and parameter.requires_grad for _, _, parameter in self._parameters)

    def __call__(self, images: Tensor) -> Tensor:
        """Return features (batch, n) of images (batch, 3, h, w); differentiable when gradients are on."""
        self.renew()
        images = images.to(self.dtype).contiguous(memory_format=torch.channels_last)
        most = self._largest_batch(*images.shape[2:])
        if torch.is_grad_enabled() and self._trains():
            if len(images) > most:
                raise TrainingError(
                    f"A step of {len(images):,} images of {images.shape[-1]} pixels is too large for the fused "
                    f"network, which takes {most:,}. Use a smaller --batch-size, or --path plain."
                )
            self._forward_calls += 1
            return _Backbone.apply(images, self.anchor, self)
        return torch.cat([self.run_forward(piece, keep=False)[0] for piece in images.split(most)])

    def _largest_batch(self, height: int, width: int) -> int:
        """Return how many images keep the largest activation, the first, within the range of the kernels' offsets."""
        first = self.backbone.conv1
        area = -(-height // first.stride[0]) * -(-width // first.stride[1])
        return max(1, LARGEST_TENSOR // (first.out_channels * area))

    @property
    def has_gradient(self) -> bool:
        """Whether there was a backward pass through here since `zero_grad`."""
        return self._backward_calls > 0

    def zero_grad(self) -> None:
        """Clear the gradients of the last step."""
        self._forward_calls = 0
        self._backward_calls = 0

    @torch.no_grad()
    def run_forward(self, images: Tensor, keep: bool = True, branch: bool = True) -> tuple[Tensor, Saved]:
        """Return the features and, unless `keep` is off, what the backward pass needs: most of the memory used.

        Without `branch` everything runs on the current stream, and at its priority.
        """
        saved = Saved(images, frozen=not self.backbone.training)
        layer = self._frozen_layer if saved.frozen else self._trained_layer
        x, stem = layer(images, self.backbone.conv1, None)
        entered: tuple[Any, ...] = (images, stem, x)
        if self.backbone.large_images:
            x, places = self.operations.max_pool(x)
            entered += (places,)
        if keep:
            saved.activations.append(entered)
        del entered  # it holds the largest activation of all
        for block in self.backbone.blocks:
            assert isinstance(block, BasicBlock)
            shortcut: Any = x
            # Without gradients batches are large and fill the device anyway.
            beside = keep and branch and block.shortcut_conv is not None
            if block.shortcut_conv is not None:
                with self._on_branch(beside):
                    shortcut = self._shortcut(x, block.shortcut_conv, saved.frozen)
            hidden, first = layer(x, block.conv1, None)
            if beside:
                self._join_branch()
            y, second = layer(hidden, block.conv2, shortcut)
            if keep:
                saved.activations.append((x, first, hidden, second, y))
            x = y
        return self.operations.pool(x), saved

    def _stem(self, images: Tensor, bias: Tensor | None) -> Tensor:
        """Return the first convolution; its three colours are too few for cuDNN's kernels on tensor cores."""
        first = self.backbone.conv1
        stride, padding = first.stride[0], int(first.padding[0])
        return self.operations.stem(images, self.weights[0], stride, padding, bias)

    def _convolve(self, x: Tensor, convolution: nn.Conv2d) -> Tensor:
        if convolution is self.backbone.conv1:
            return self._stem(x, None)
        weight = self.weight_of(convolution)
        if convolution.kernel_size == (1, 1):
            # A projection is a matrix product of every other pixel; cuDNN's choice for it can be ten times slower.
            return self.operations.project(x, weight, convolution.stride[0])
        return functional.conv2d(x, weight, stride=convolution.stride, padding=convolution.padding)

    @contextmanager
    def _on_branch(self, wanted: bool = True) -> Iterator[None]:
        """Run what is inside beside the work that the current stream gets until `_join_branch`, if `wanted`.

        What is allocated inside is freed and allocated again only there, after the current stream has used it, because
        the branch waits for the current stream whenever it begins.
        """
        stream = self._second_stream() if wanted else None
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def _join_branch(self) -> None:
        stream = self._second_stream()
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)

    def _second_stream(self) -> torch.cuda.Stream | None:
        """Return the stream of the branch; several processes have none, as they exchange statistics on one stream.

        A capture must not wait for it there either: nothing that is captured runs on it.
        """
        return None if ranks.several() else self._branch

    def _shortcut(self, x: Tensor, convolution: nn.Conv2d, frozen: bool) -> Any:
        """Return the projection of `x` and, where BatchNorm trains, its statistics."""
        projected = self._convolve(x, convolution)
        return projected if frozen else (projected, self._statistics(projected, convolution))

    def _frozen_layer(self, x: Tensor, convolution: nn.Conv2d, residual: Any) -> tuple[Tensor, None]:
        """relu(convolution with folded BatchNorm + shift (+ residual))."""
        if convolution is self.backbone.conv1:
            return self._stem(x, self.biases[0]), None
        # PyTorch's operation ignores the setting for deterministic algorithms.
        if self._cudnn and not torch.backends.cudnn.deterministic:
            weight, bias = self.weight_of(convolution), self._half_biases[self.index_of(convolution)]
            shape: Any = (convolution.stride, convolution.padding, (1, 1), 1)
            share = 1.0
            if residual is None and convolution.stride == (1, 1) and x.shape[1] == convolution.out_channels:
                residual, share = x, 0.0  # finite, of the right shape, and in the cache, since the convolution reads it
            elif residual is None:
                residual = self._zeros(x, convolution)
            return torch.cudnn_convolution_add_relu(x, weight, residual, share, bias, *shape), None
        return self.operations.bias_relu(self._convolve(x, convolution), self._bias(convolution), residual), None

    def _zeros(self, x: Tensor, convolution: nn.Conv2d) -> Tensor:
        """Return the residual of a layer without one whose input has another shape, the same memory for all of them.

        Without a residual, PyTorch's operation passes its own uninitialised result to cuDNN as a residual of weight
        zero, and zero times a NaN is a NaN.
        """
        height, width = (
            (size + 2 * (kernel // 2) - kernel) // stride + 1
            for size, kernel, stride in zip(x.shape[2:], convolution.kernel_size, convolution.stride, strict=True)
        )
        shape = (x.shape[0], height, width, convolution.out_channels)
        if shape not in self._nothing:
            size = math.prod(shape)
            flat = next((t for t in self._nothing.values() if t.numel() >= size), None)
            flat = torch.zeros(size, device=x.device, dtype=self.dtype) if flat is None else flat.flatten()[:size]
            self._nothing[shape] = flat.view(shape)
        return self._nothing[shape].permute(0, 3, 1, 2)

    def _trained_layer(self, x: Tensor, convolution: nn.Conv2d, shortcut: Any) -> tuple[Tensor, Any]:
        """relu(BatchNorm(convolution) (+ shortcut, with its own BatchNorm)), with statistics of this batch."""
        out = self._convolve(x, convolution)
        statistics = self._statistics(out, convolution)
        if not isinstance(shortcut, tuple):
            y = self.operations.normalise_relu(out, statistics, shortcut)
            return y, (out, statistics)
        projected, other = shortcut
        y = self.operations.normalise_relu(out, statistics, projected, other)
        return y, (out, statistics, projected, other)

    def _statistics(self, x: Tensor, convolution: nn.Conv2d) -> Tensor:
        norm = self.norms[self.index_of(convolution)]
        assert norm.running_mean is not None
        assert norm.momentum is not None
        compute = operations.shared_statistics if split.splitting() else self.operations.batch_statistics
        return compute(
            x,
            norm.weight.detach(),
            norm.bias.detach(),
            norm.running_mean,
            self._variance(norm),
            norm.momentum,
            norm.eps,
        )

    # -- backward pass -----------------------------------------------------------------------------------------

    def input_gradient(self, gradient: Tensor, x: Tensor, convolution: nn.Conv2d) -> Tensor:
        """Return the gradient of the input `x` of a convolution, from that of its output."""
        turned = self.turned(self.index_of(convolution))
        if turned is not None:
            return functional.conv2d(gradient, turned, padding=turned.shape[2] - 1 - int(convolution.padding[0]))
        only_input = [True, False, False]
        return _convolution_backward(gradient, x, self.weight_of(convolution), convolution, only_input)[0]

    @torch.no_grad()
    def run_backward(self, saved: Saved, gradient: Tensor) -> None:
        """Compute the gradients of the flat weights (and of scale and shift, if BatchNorm trains)."""
        walk = _Backward(self, saved.frozen)
        down, other = self.operations.pool_mask(gradient, saved.activations[-1][-1]), None
        last = True
        for block, (x, first, hidden, second, y) in zip(
            reversed(list(self.backbone.blocks)), reversed(saved.activations[1:]), strict=True
        ):
            assert isinstance(block, BasicBlock)
            through, summed = walk.enter(down, second, block.conv2, None if last else y, other)
            last, other = False, summed
            if block.shortcut_conv is not None:
                other = walk.shortcut(summed, second[2:] if second is not None else None, x, block.shortcut_conv)
            down = walk.convolution(through, hidden, block.conv2)
            through, _ = walk.enter(down, first, block.conv1, hidden, plain_relu=True)
            down = walk.convolution(through, x, block.conv1)
            walk.join()
        images, stem, out, *places = saved.activations[0]
        if places:
            pooled = saved.activations[1][0]
            down, other = self.operations.unpool(down, other, pooled, places[0], out), None
            out = None  # the ReLU is done
        through, _ = walk.enter(down, stem, self.backbone.conv1, out, other, plain_relu=other is None)
        walk.stem(through, images, self.backbone.conv1)
        walk.finish()


def _convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, convolution: nn.Conv2d, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias, those that are `wanted`."""
    return torch.ops.aten.convolution_backward(
        gradient, x, weight, None, convolution.stride, convolution.padding, (1, 1), False, (0, 0), 1, wanted
    )


class _Backward:
    """One backward pass through the backbone: input gradients on the current stream, weight gradients on others."""

    def __init__(self, fused: FusedBackbone, frozen: bool) -> None:
        self.fused = fused
        self.frozen = frozen
        # If this is the only pass of the step through the backbone, weights are updated as soon as gradients are ready.
        self.update = fused.update if fused._forward_calls == 1 and not fused.has_gradient else None
        self.weight_gradients: list[Tensor | None] = [None] * len(fused.convolutions)
        self.waiting: list[int | None] = [None] * max(len(fused._sides), 1)
        self.turn = 0
        self.branched: int | None = None
        # Tensors used on a side stream must outlive that use: otherwise the allocator would reuse their memory.
        self.held: list[Tensor] = []

    def enter(
        self,
        gradient: Tensor,
        kept: Any,
        convolution: nn.Conv2d,
        activation: Tensor | None,
        other: Tensor | None = None,
        plain_relu: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Backward pass of the ReLU (if `activation` is given) and the BatchNorm after `convolution`.

        Returns the gradient of the convolution's output, and the one between ReLU and BatchNorm. If BatchNorm is
        folded into the weights, the two are the same.
        """
        fused = self.fused
        if self.frozen:
            if activation is not None:
                gradient = fused.operations.mask(gradient, activation, other)
            return gradient, gradient
        index = fused.index_of(convolution)
        norm = fused.norms[index]
        into = (fused._gamma_gradients[index], fused._beta_gradients[index])
        repeated = fused._backward_calls > 0
        if repeated:
            into = (torch.empty_like(into[0]), torch.empty_like(into[1]))
        own = operations if operations.is_shared(kept[1]) else fused.operations
        through, summed = own.normalise_backward(
            gradient, kept[0], kept[1], norm.weight.detach(), *into, activation, other, plain_relu
        )
        if repeated:
            fused._gamma_gradients[index].add_(into[0])
            fused._beta_gradients[index].add_(into[1])
        return through, summed

    def convolution(self, gradient: Tensor, x: Tensor, convolution: nn.Conv2d) -> Tensor:
        """Return the gradient of the input; that of the weight is computed on a side stream."""
        weight = self.fused.weight_of(convolution)
        only_weight = [False, True, False]
        self._aside(
            convolution, lambda: _convolution_backward(gradient, x, weight, convolution, only_weight)[1], gradient, x
        )
        return self.fused.input_gradient(gradient, x, convolution)

    def stem(self, gradient: Tensor, images: Tensor, convolution: nn.Conv2d) -> None:
        """As `convolution`, for the first one, whose input needs no gradient."""
        side, stride, padding = convolution.kernel_size[0], convolution.stride[0], int(convolution.padding[0])
        compute = self.fused.operations.stem_weight
        self._aside(convolution, lambda: compute(gradient, images, side, stride, padding), gradient, images)

    def shortcut(self, gradient: Tensor, kept: Any, x: Tensor, convolution: nn.Conv2d) -> Tensor:
        """Return the gradient of a projection's input, from that of its BatchNorm; it is there after `join`."""
        self.held.append(gradient)
        with self.fused._on_branch():
            through, _ = self.enter(gradient, kept, convolution, None)
            other = self.projection(through, x, convolution)
        self.branched = self.fused.index_of(convolution)
        return other

    def join(self) -> None:
        """Wait for the last `shortcut`, if there was one since the last call."""
        if self.branched is not None:
            self.fused._join_branch()
        self.branched = None

    def projection(self, gradient: Tensor, x: Tensor, convolution: nn.Conv2d) -> Tensor:
        """As `convolution`, for one of kernel size 1; the gradient of the input holds only the pixels it reads."""
        operations, weight = self.fused.operations, self.fused.weight_of(convolution)
        self._aside(convolution, lambda: operations.project_weight(gradient, x, convolution.stride[0]), gradient, x)
        return operations.project_input(gradient, weight)

    def _aside(self, convolution: nn.Conv2d, compute: Callable[[], Tensor], *used: Tensor) -> None:
        """Compute a weight gradient on the next side stream."""
        fused = self.fused
        index = fused.index_of(convolution)

        def weight_gradient() -> None:
            self._move_on(self.turn)
            self.weight_gradients[index] = compute()
            self.waiting[self.turn] = index

        if not fused._sides:
            weight_gradient()
            return
        self.held += used
        side = fused._sides[self.turn]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            weight_gradient()
        self.turn = (self.turn + 1) % len(fused._sides)

    def _move_on(self, turn: int) -> None:
        """Pass the last weight gradient of a side stream to the optimiser.

        Not earlier, because the input gradient of that layer, on the main stream, still reads the weight; by now this
        side stream has waited for it.
        """
        index = self.waiting[turn]
        if index is not None and index == self.branched:
            self.fused._join_branch()  # its input gradient is computed there, and nothing has waited for that yet
        if index is not None and self.update is not None:
            gradient = self.weight_gradients[index]
            assert gradient is not None
            self.update(index, gradient.permute(0, 2, 3, 1).reshape(-1))
        self.waiting[turn] = None

    def finish(self) -> None:
        """Wait for the weight gradients; write them into the flat buffer unless the optimiser already has them."""
        fused = self.fused
        current = torch.cuda.current_stream() if fused._sides else None
        for turn, side in enumerate(fused._sides):
            assert current is not None
            side.wait_stream(current)
            with torch.cuda.stream(side):
                self._move_on(turn)
        for side in fused._sides:
            assert current is not None
            current.wait_stream(side)
        if not fused._sides:
            self._move_on(0)
        if self.update is None:
            flat = [g.permute(0, 2, 3, 1).reshape(-1) for g in self.weight_gradients if g is not None]
            if fused._backward_calls == 0:
                torch.cat(flat, out=fused.gradient)
            else:
                fused.gradient.add_(torch.cat(flat))
        fused._backward_calls += 1
        self.held.clear()
