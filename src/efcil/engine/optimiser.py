"""Optimisers behind one small interface: PyTorch's own, or one kernel over flat parameters for the fused backbone."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from efcil.methods.base import ParameterGroup
from efcil.network.fused import FusedBackbone, channels_last_view
from efcil.settings import Recipe

BETAS = (0.9, 0.999)
EPSILON = 1e-8


def rate_factor(recipe: Recipe, epoch: int) -> float:
    """Return the factor on the learning rate in `epoch` (from 0), as the recipe's schedule has it."""
    if recipe.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * epoch / recipe.epochs))
    if recipe.schedule == "steps":
        return recipe.decay ** sum(epoch >= milestone for milestone in recipe.milestones)
    return 1.0


class Optimiser:
    """What the loop needs: rates set ahead for a block of steps, a step, and a state of plain tensors."""

    def begin_block(self, first_step: int, steps: int, factor: float) -> None:
        """Prepare `steps` steps, the first of which is number `first_step` (from 0) of the task."""
        raise NotImplementedError

    def skip(self, steps: int) -> None:
        """Leave out the first steps of the block: they were taken before an interruption."""

    def begin_step(self, index: Tensor | None) -> None:
        """Forget the gradients. `index` is the step's place in the block where that lives on the device."""
        raise NotImplementedError

    def step(self) -> None:
        """Move the parameters."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to go on, as tensors by name."""
        raise NotImplementedError

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from a state that `state` returned."""
        raise NotImplementedError


class TorchOptimiser(Optimiser):
    """Adam or SGD of PyTorch. A gradient longer than `limit`, over all parameters together, is scaled down to it."""

    def __init__(
        self, groups: list[ParameterGroup], recipe: Recipe, capturable: bool, limit: float | None = None
    ) -> None:
        self.limit = limit
        rates = [group["learning_rate"] for group in groups]
        device = groups[0]["params"][0].device
        arguments: list[dict[str, Any]] = [
            {"params": g["params"], "lr": torch.tensor(float(r), device=device) if capturable else r}
            for g, r in zip(groups, rates, strict=True)
        ]
        self.base_rates = rates
        self.inner: torch.optim.Optimizer
        if recipe.optimiser == "adam":
            self.inner = torch.optim.Adam(
                arguments, betas=BETAS, eps=EPSILON, weight_decay=recipe.weight_decay, fused=True, capturable=capturable
            )
        else:
            self.inner = torch.optim.SGD(
                arguments, momentum=recipe.momentum, weight_decay=recipe.weight_decay, fused=True
            )

    def begin_block(self, first_step: int, steps: int, factor: float) -> None:
        """Set the learning rates."""
        for group, rate in zip(self.inner.param_groups, self.base_rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor

    def begin_step(self, index: Tensor | None) -> None:
        """Forget the gradients."""
        self.inner.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Move the parameters."""
        if self.limit is not None:
            nn.utils.clip_grad_norm_(self._parameters(), self.limit)
        self.inner.step()

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.inner.param_groups for p in group["params"]]

    def state(self) -> dict[str, Tensor]:
        """Return the state of every parameter under its number."""
        return {
            f"{number}.{name}": value
            for number, parameter in enumerate(self._parameters())
            for name, value in self.inner.state[parameter].items()
            if isinstance(value, Tensor)
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Put the state of every parameter back."""
        parameters = self._parameters()
        for key, value in state.items():
            number, name = key.split(".", 1)
            parameter = parameters[int(number)]
            # The fused kernels read the step counter too, so it lives on the parameter's device like the moments.
            value = value.to(parameter.device, copy=True)
            if value.dim() == 4:
                value = value.contiguous(memory_format=torch.channels_last)
            self.inner.state[parameter][name] = value


def _weak(method: Callable[[int, Tensor], None]) -> Callable[[int, Tensor], None]:
    """Return a function that calls `method` without keeping its object, and so the memory of a task, alive."""
    reference = weakref.WeakMethod(method)

    def call(index: int, gradient: Tensor) -> None:
        alive = reference()
        assert alive is not None
        alive(index, gradient)

    return call


@dataclass
class _Segment:
    """A run of parameters that live in one flat tensor and move with one kernel."""

    parameters: list[nn.Parameter]
    master: Tensor
    first: Tensor
    second: Tensor
    learning_rate: float
    gradient: Tensor
    scales: list[Tensor] | None = None
    working: Tensor | None = None
    gathered: bool = True
    wide: Tensor | None = None


class FlatOptimiser(Optimiser):
    """Adam or SGD over flat tensors: one kernel for the convolutions, one for BatchNorm, one for everything else.

    The parameters of the modules become views of the flat tensors. The fused backbone hands over the gradient of each
    convolution during the way back, in its working type; the kernel writes the next working weights while it is at it.
    Where the loss reads parameters of the backbone `direct`ly, autograd's gradients of that are added at the end of the
    way back, and nothing moves before; nor does it where a gradient longer than `limit` is scaled down.
    """

    def __init__(
        self,
        groups: list[ParameterGroup],
        recipe: Recipe,
        fused: FusedBackbone,
        block_steps: int,
        direct: bool = False,
        limit: float | None = None,
    ) -> None:
        self.recipe = recipe
        self.direct = direct
        self.limit = limit
        self.fused = fused
        self.operations = fused.operations
        folded = not fused.backbone.training
        if fused.folded is not folded:
            fused.refresh(folded)
        fused.update = None
        rates = {id(p): g["learning_rate"] for g in groups for p in g["params"]}
        trained = [p for g in groups for p in g["params"]]
        convolutions: list[nn.Parameter] = [c.weight for c in fused.convolutions]  # type: ignore[misc]
        norms = [n.weight for n in fused.norms] + [n.bias for n in fused.norms]
        inside = {id(p) for p in convolutions + norms}
        self.segments: list[_Segment] = []
        if all(id(p) in rates for p in convolutions):
            master = torch.cat([w.detach().permute(0, 2, 3, 1).reshape(-1) for w in convolutions])
            for weight, piece in zip(convolutions, master.split(fused.sizes), strict=True):
                weight.data = channels_last_view(piece, weight.shape)
            scales = fused.scales() if folded else None
            self._add(convolutions, master, rates, fused.gradient, scales, fused.working)
            self._ends = torch.tensor([0, *fused.sizes]).cumsum(0).tolist()
            fused.update = None if direct or limit is not None else _weak(self._update_convolution)
            fused.train_convolutions()
        elif any(id(p) in rates for p in convolutions):
            raise ValueError("the fused backbone trains all of its convolutions or none")
        if all(id(p) in rates for p in norms):
            if folded:
                raise ValueError("the fused backbone cannot train a BatchNorm that is folded into its weights")
            master = self._flatten(norms)
            self._add(norms, master, rates, fused.norm_gradient.view(-1), None, None)
        elif any(id(p) in rates for p in norms):
            raise ValueError("the fused backbone trains all of its BatchNorm layers or none")
        others: dict[float, list[nn.Parameter]] = {}
        for parameter in trained:
            if id(parameter) not in inside:
                others.setdefault(rates[id(parameter)], []).append(parameter)
        for parameters in others.values():
            master = self._flatten(parameters)
            self._add(parameters, master, rates, torch.zeros_like(master), None, None, gathered=False)
        device = fused.working.device
        self.hyper = torch.zeros(block_steps, len(self.segments), 2, device=device, dtype=fused.bias.dtype)
        self._rates = self.hyper[0]
        self._position = 0
        self._moved = False

    @staticmethod
    def _flatten(parameters: list[nn.Parameter]) -> Tensor:
        master = torch.cat([p.detach().reshape(-1) for p in parameters])
        for parameter, piece in zip(parameters, master.split([p.numel() for p in parameters]), strict=True):
            parameter.data = piece.view(parameter.shape)
        return master

    def _add(
        self,
        parameters: list[nn.Parameter],
        master: Tensor,
        rates: dict[int, float],
        gradient: Tensor,
        scales: list[Tensor] | None,
        working: Tensor | None,
        gathered: bool = True,
    ) -> None:
        first, second = torch.zeros_like(master), torch.zeros_like(master)
        rate = rates[id(parameters[0])]
        wide = torch.zeros_like(master) if self.direct and gathered else None
        segment = _Segment(parameters, master, first, second, rate, gradient, scales, working, gathered, wide)
        self.segments.append(segment)

    def begin_block(self, first_step: int, steps: int, factor: float) -> None:
        """Write the rates and Adam's bias corrections of the block's steps into the device table."""
        rows = []
        for step in range(first_step + 1, first_step + steps + 1):
            row = []
            for segment in self.segments:
                rate = segment.learning_rate * factor
                if self.recipe.optimiser == "adam":
                    row.append((rate / (1 - BETAS[0] ** step), (1 - BETAS[1] ** step) ** -0.5))
                else:
                    row.append((rate, 1.0))
            rows.append(row)
        # Page-locked, because copying anything else makes the host wait for the device.
        table = torch.tensor(rows, dtype=self.hyper.dtype, pin_memory=self.hyper.is_cuda)
        self.hyper[:steps].copy_(table, non_blocking=True)
        self._position = 0

    def skip(self, steps: int) -> None:
        """Move on in the table of rates."""
        self._position = steps

    def begin_step(self, index: Tensor | None) -> None:
        """Forget the gradients and look up the rates."""
        self.fused.zero_grad()
        for segment in self.segments:
            if self.direct or not segment.gathered:
                for parameter in segment.parameters:
                    parameter.grad = None
        if index is None:
            self._rates = self.hyper[self._position]
            self._position += 1
        else:
            self._rates = self.hyper.index_select(0, index)[0]
        self._moved = False

    def _update_convolution(self, index: int, gradient: Tensor) -> None:
        """Move one convolution; called by the fused backbone as soon as its gradient is final."""
        self._moved = True
        scales, part = self.segments[0].scales, slice(self._ends[index], self._ends[index + 1])
        self._move(0, part, gradient, None if scales is None else scales[index], self.fused.working[part])
        self.fused.turn(index)

    @torch.no_grad()
    def step(self) -> None:
        """Move whatever has not moved yet."""
        for segment in self.segments:
            if segment.wide is not None:
                self._add_direct(segment, segment.wide)
            elif not segment.gathered:
                torch.cat([_gradient(p).reshape(-1) for p in segment.parameters], out=segment.gradient)
        if self.limit is not None:
            self._shorten(self.limit)
        for number, segment in enumerate(self.segments):
            if segment.wide is not None:
                self._move_at_once(number, segment, segment.wide)
            elif segment.working is not None:
                if not self._moved:
                    for index, gradient in enumerate(segment.gradient.split(self.fused.sizes)):
                        self._update_convolution(index, gradient)
            else:
                self._move(number, slice(None), segment.gradient, None, None)

    def _shorten(self, limit: float) -> None:
        """Scale all gradients down together, so that theirs as one vector is no longer than `limit`."""
        squares = [_squared_length(segment, self.fused.sizes) for segment in self.segments]
        factor = (limit / (torch.stack(squares).sum().sqrt() + 1e-6)).clamp(max=1.0)  # as PyTorch's clip_grad_norm_
        for segment in self.segments:
            (segment.gradient if segment.wide is None else segment.wide).mul_(factor)

    def _add_direct(self, segment: _Segment, total: Tensor) -> None:
        """Write a part of the backbone's gradient through the features and that of the loss itself, added, to total."""
        torch.cat([_flat(_gradient(p)) for p in segment.parameters], out=total)
        if segment.scales is None:
            total.add_(segment.gradient)
            return
        pieces = zip(total.split(self.fused.sizes), segment.gradient.split(self.fused.sizes), strict=True)
        for (piece, through), scale in zip(pieces, segment.scales, strict=True):
            piece.view(len(scale), -1).addcmul_(through.view(len(scale), -1), scale[:, None])

    def _move_at_once(self, number: int, segment: _Segment, total: Tensor) -> None:
        """Move a whole part of the backbone by a gradient of its parameters, not of the folded weights."""
        if segment.scales is not None:
            self._move(number, slice(None), total, None, None)
            self.fused.refresh(folded=True)
            return
        self._move(number, slice(None), total, None, segment.working)
        for index in range(len(self.fused.convolutions) if segment.working is not None else 0):
            self.fused.turn(index)

    def _move(self, number: int, part: slice, gradient: Tensor, scale: Tensor | None, working: Tensor | None) -> None:
        segment, recipe = self.segments[number], self.recipe
        if recipe.optimiser == "adam":
            self.operations.adam(
                segment.master[part], gradient, segment.first[part], segment.second[part], self._rates[number],
                BETAS, EPSILON, recipe.weight_decay, scale, working,
            )  # fmt: skip
        else:
            self.operations.sgd(
                segment.master[part], gradient, segment.first[part], self._rates[number],
                recipe.momentum, recipe.weight_decay, scale, working,
            )  # fmt: skip

    def state(self) -> dict[str, Tensor]:
        """Return the moments of every segment."""
        state = {}
        for number, segment in enumerate(self.segments):
            state[f"{number}.first"] = segment.first
            state[f"{number}.second"] = segment.second
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Put the moments back; the parameters themselves are loaded with their modules."""
        for number, segment in enumerate(self.segments):
            segment.first.copy_(state[f"{number}.first"])
            segment.second.copy_(state[f"{number}.second"])
        self.fused.refresh(folded=not self.fused.backbone.training)


def _squared_length(segment: _Segment, sizes: list[int]) -> Tensor:
    """Return the square of the length of a segment's gradient; that of folded weights is unfolded (chain rule)."""
    if segment.wide is not None:
        return torch.linalg.vector_norm(segment.wide).square()
    if segment.scales is None:
        return torch.linalg.vector_norm(segment.gradient, dtype=segment.master.dtype).square()
    pieces = zip(segment.gradient.split(sizes), segment.scales, strict=True)
    rows = [torch.linalg.vector_norm(piece.view(len(s), -1), dim=1, dtype=s.dtype) * s for piece, s in pieces]
    return torch.cat(rows).square().sum()


def _flat(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor in the order in which the flat tensors hold them."""
    return (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).reshape(-1)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
