"""The backbone as one differentiable operation, written out forwards and backwards.

A training step of a small ResNet is dominated not by its convolutions but by everything around them: BatchNorm as
separate kernels, casts, layout copies, unfused additions. Here the whole backbone is a single autograd node:

- weights are kept once more as one flat buffer in the working type (bfloat16 on CUDA), channels-last;
- where BatchNorm is frozen, its scale is folded into those weights and its shift added together with the residual and
  the ReLU in one pass; the optimiser unfolds the gradient (chain rule: d/dW = scale * d/d(scale * W));
- where BatchNorm trains, statistics, normalisation, residual and ReLU are two passes over the activations;
- weight gradients run on a second stream, since nothing waits for them before the optimiser.

The parameters stay those of the `ResNet` module: this class only reads them, and the flat optimiser
(engine/optimiser.py) writes both. The same code runs on the CPU with the plain operations, which is how it is tested.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from efcil.network import operations
from efcil.network.resnet import BasicBlock, ResNet


def _operations_for(device: torch.device) -> ModuleType:
    """Triton kernels on CUDA where Triton is installed, plain PyTorch elsewhere."""
    if device.type == "cuda":
        try:
            from efcil.network import kernels
        except ImportError:
            return operations
        return kernels
    return operations


def channels_last_view(flat: Tensor, shape: torch.Size) -> Tensor:
    """View a flat tensor as a convolution weight (outputs, inputs, h, w) stored channels-last."""
    outputs, inputs, height, width = shape
    return flat.view(outputs, height, width, inputs).permute(0, 3, 1, 2)


@dataclass
class _Saved:
    """What one forward pass keeps for the way back."""

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
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.fused.run_backward(ctx.saved, gradient)
        ctx.saved = None
        return None, None, None


class FusedBackbone:
    """Runs a `ResNet` forwards and backwards in few, large operations. See the module's text."""

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
        self.weights = [
            channels_last_view(p, c.weight.shape) for p, c in zip(pieces, self.convolutions, strict=True)
        ]
        wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        channels = [n.num_features for n in self.norms]
        self.bias = torch.zeros(sum(channels), device=device, dtype=wide)
        self.biases = list(self.bias.split(channels))
        self.norm_gradient = torch.zeros(2, sum(channels), device=device, dtype=wide)
        self._gamma_gradients = list(self.norm_gradient[0].split(channels))
        self._beta_gradients = list(self.norm_gradient[1].split(channels))
        self.folded: bool | None = None
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._backward_calls = 0

    # -- weights -----------------------------------------------------------------------------------------------

    def scale(self) -> Tensor:
        """Return, for every element of the flat weights, the factor of the frozen BatchNorm behind it."""
        pieces = []
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            factor = norm.weight.detach() * torch.rsqrt(self._variance(norm) + norm.eps)
            pieces.append(factor.repeat_interleave(convolution.weight[0].numel()))
        return torch.cat(pieces).to(self.bias.dtype)

    @staticmethod
    def _variance(norm: nn.BatchNorm2d) -> Tensor:
        assert norm.running_var is not None
        return norm.running_var

    @torch.no_grad()
    def refresh(self, folded: bool) -> None:
        """Write the working weights anew from the module's parameters, with BatchNorm folded in or not."""
        flat = torch.cat([c.weight.detach().permute(0, 2, 3, 1).reshape(-1) for c in self.convolutions])
        self.working.copy_(flat * self.scale() if folded else flat)
        if folded:
            for bias, norm in zip(self.biases, self.norms, strict=True):
                assert norm.running_mean is not None
                factor = norm.weight * torch.rsqrt(self._variance(norm) + norm.eps)
                bias.copy_(norm.bias - norm.running_mean * factor)
            # The two shifts that meet in a residual sum are added once, here, and not in every step.
            for block in self.backbone.blocks:
                assert isinstance(block, BasicBlock)
                if block.shortcut_conv is not None:
                    self._bias(block.conv2).add_(self._bias(block.shortcut_conv))
        self.folded = folded

    def invalidate(self) -> None:
        """Forget the working weights: something else changed the parameters."""
        self.folded = None

    def _weight(self, convolution: nn.Module) -> Tensor:
        return self.weights[self._index[id(convolution)]]

    def _bias(self, convolution: nn.Module) -> Tensor:
        return self.biases[self._index[id(convolution)]]

    # -- running -----------------------------------------------------------------------------------------------

    def __call__(self, images: Tensor) -> Tensor:
        """Return features (batch, n) of images (batch, 3, h, w); differentiable when gradients are on."""
        frozen = not self.backbone.training
        if self.folded is not frozen:
            self.refresh(folded=frozen)
        images = images.to(self.dtype).contiguous(memory_format=torch.channels_last)
        if torch.is_grad_enabled() and self.convolutions[0].weight.requires_grad:
            return _Backbone.apply(images, self.anchor, self)  # type: ignore[no-any-return]
        return self.run_forward(images)[0]

    def zero_grad(self) -> None:
        """Forget the gradients of the last step."""
        self._backward_calls = 0

    @torch.no_grad()
    def run_forward(self, images: Tensor) -> tuple[Tensor, _Saved]:
        """Return the features and what the way back needs."""
        saved = _Saved(images, frozen=not self.backbone.training)
        layer = self._frozen_layer if saved.frozen else self._trained_layer
        x, stem = layer(images, self.backbone.conv1, None)
        saved.activations.append((images, stem, x))
        if self.backbone.large_images:
            pooled, places = functional.max_pool2d(x, 3, stride=2, padding=1, return_indices=True)
            saved.activations[0] = (images, stem, x, places)
            x = pooled
        for block in self.backbone.blocks:
            assert isinstance(block, BasicBlock)
            hidden, first = layer(x, block.conv1, None)
            shortcut: Any = x if block.shortcut_conv is None else (x, block.shortcut_conv)
            y, second = layer(hidden, block.conv2, shortcut)
            saved.activations.append((x, first, hidden, second, y))
            x = y
        return self.operations.pool(x), saved

    def _convolve(self, x: Tensor, convolution: nn.Conv2d) -> Tensor:
        return functional.conv2d(
            x, self._weight(convolution), stride=convolution.stride, padding=convolution.padding  # type: ignore[arg-type]
        )

    def _frozen_layer(self, x: Tensor, convolution: nn.Conv2d, shortcut: Any) -> tuple[Tensor, None]:
        """relu(convolution with folded BatchNorm + shift (+ shortcut))."""
        residual = shortcut
        if isinstance(shortcut, tuple):
            residual = self._convolve(shortcut[0], shortcut[1])
        return self.operations.bias_relu(self._convolve(x, convolution), self._bias(convolution), residual), None

    def _trained_layer(self, x: Tensor, convolution: nn.Conv2d, shortcut: Any) -> tuple[Tensor, Any]:
        """relu(BatchNorm(convolution) (+ shortcut)), with statistics of this batch."""
        out = self._convolve(x, convolution)
        statistics = self._statistics(out, convolution)
        if not isinstance(shortcut, tuple):
            y = self.operations.normalise_relu(out, statistics, shortcut)
            return y, (out, statistics)
        projected = self._convolve(shortcut[0], shortcut[1])
        other = self._statistics(projected, shortcut[1])
        y = self.operations.normalise_relu(out, statistics, projected, other)
        return y, (out, statistics, projected, other)

    def _statistics(self, x: Tensor, convolution: nn.Conv2d) -> Tensor:
        norm = self.norms[self._index[id(convolution)]]
        assert norm.running_mean is not None
        assert norm.momentum is not None
        return self.operations.batch_statistics(
            x, norm.weight.detach(), norm.bias.detach(), norm.running_mean, self._variance(norm), norm.momentum, norm.eps
        )

    # -- backwards ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run_backward(self, saved: _Saved, gradient: Tensor) -> None:
        """Write the gradients of the flat weights (and of scale and shift, where BatchNorm trains)."""
        walk = _Backward(self, saved.frozen)
        operations_ = self.operations
        g = operations_.pool_mask(gradient, saved.activations[-1][-1])
        for block, (x, first, hidden, second, _) in zip(
            reversed(list(self.backbone.blocks)), reversed(saved.activations[1:]), strict=True
        ):
            assert isinstance(block, BasicBlock)
            through = walk.normalisation(g, second, block.conv2)
            down = operations_.mask(walk.convolution(through, hidden, block.conv2), hidden)
            down = walk.convolution(walk.normalisation(down, first, block.conv1), x, block.conv1)
            other = g
            if block.shortcut_conv is not None:
                projected = second[2:] if second is not None else None
                other = walk.convolution(
                    walk.normalisation(g, projected, block.shortcut_conv), x, block.shortcut_conv
                )
            g = operations_.mask(down, x, other)
        images, stem, out, *places = saved.activations[0]
        if places:
            g = torch.ops.aten.max_pool2d_with_indices_backward(
                g, out, [3, 3], [2, 2], [1, 1], [1, 1], False, places[0]
            )
        walk.convolution(walk.normalisation(g, stem, self.backbone.conv1), images, self.backbone.conv1, last=True)
        walk.finish()


class _Backward:
    """One walk back through the backbone: input gradients on the current stream, weight gradients beside it."""

    def __init__(self, fused: FusedBackbone, frozen: bool) -> None:
        self.fused = fused
        self.frozen = frozen
        self.weight_gradients: list[Tensor | None] = [None] * len(fused.convolutions)
        # Tensors used on the side stream must outlive it: the allocator would otherwise hand their memory out again.
        self.held: list[Tensor] = []

    def normalisation(self, gradient: Tensor, kept: Any, convolution: nn.Conv2d) -> Tensor:
        """Go back through the BatchNorm behind `convolution`; where it is folded there is nothing to do."""
        if self.frozen:
            return gradient
        fused, index = self.fused, self.fused._index[id(convolution)]
        repeated = fused._backward_calls > 0
        norm = fused.norms[index]
        into = (fused._gamma_gradients[index], fused._beta_gradients[index])
        if repeated:
            into = (torch.empty_like(into[0]), torch.empty_like(into[1]))
        out = fused.operations.normalise_backward(gradient, kept[0], kept[1], norm.weight.detach(), *into)
        if repeated:
            fused._gamma_gradients[index].add_(into[0])
            fused._beta_gradients[index].add_(into[1])
        return out  # type: ignore[no-any-return]

    def convolution(self, gradient: Tensor, x: Tensor, convolution: nn.Conv2d, last: bool = False) -> Tensor:
        """Return the gradient of the input (nothing useful if `last`) and put that of the weight aside."""
        fused = self.fused
        index = fused._index[id(convolution)]
        weight = fused.weights[index]

        def backward(need: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
            return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
                gradient, x, weight, None, convolution.stride, convolution.padding, (1, 1), False, (0, 0), 1, need
            )

        if fused._side is not None:
            self.held += [gradient, x]
            fused._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(fused._side):
                self.weight_gradients[index] = backward([False, True, False])[1]
        else:
            self.weight_gradients[index] = backward([False, True, False])[1]
        return gradient if last else backward([True, False, False])[0]

    def finish(self) -> None:
        """Wait for the weight gradients and write them into the flat buffer."""
        fused = self.fused
        if fused._side is not None:
            torch.cuda.current_stream().wait_stream(fused._side)
        flat = [g.permute(0, 2, 3, 1).reshape(-1) for g in self.weight_gradients if g is not None]
        if fused._backward_calls == 0:
            torch.cat(flat, out=fused.gradient)
        else:
            fused.gradient.add_(torch.cat(flat))
        fused._backward_calls += 1
        self.held.clear()
