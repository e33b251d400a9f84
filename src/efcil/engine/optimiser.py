"""Optimisers behind one small interface: PyTorch's own, or one kernel over flat parameters for the fused backbone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from efcil import ranks
from efcil.errors import TrainingError
from efcil.methods.base import ParameterGroup
from efcil.network.fast.fused import FusedBackbone, channels_last_view
from efcil.settings import Recipe

BETAS = (0.9, 0.999)
EPSILON = 1e-8

_TOO_LATE = (
    "The loss depends on weights of the backbone in a way that shows only during the backward pass, when the fused "
    "network has already moved some of them. Train this method with --path plain."
)


def rate_factor(recipe: Recipe, epoch: int) -> float:
    """Return the factor on the learning rate in `epoch` (from 0), by the recipe's schedule."""
    if recipe.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * epoch / recipe.epochs))
    if recipe.schedule == "steps":
        return recipe.decay ** sum(epoch >= milestone for milestone in recipe.milestones)
    return 1.0


class Optimiser:
    """What the training loop needs: rates set ahead for a block of steps, a step, and a state of plain tensors."""

    def begin_block(self, first_step: int, steps: int, factor: float) -> None:
        """Prepare `steps` steps, the first of which is number `first_step` (from 0) of the task."""
        raise NotImplementedError

    def skip(self, steps: int) -> None:
        """Skip the first steps of the block: they were taken before an interruption."""

    def begin_step(self, index: Tensor | None) -> None:
        """Clear the gradients. `index` is the step's index in the block, if that is on the device."""
        raise NotImplementedError

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the loss."""
        loss.backward()

    def step(self) -> None:
        """Update the parameters."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to resume, as tensors by name."""
        raise NotImplementedError

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Resume from a state that `state` returned."""
        raise NotImplementedError


class TorchOptimiser(Optimiser):
    """Adam or SGD of PyTorch. Gradients are clipped to the norm `limit` over all parameters together."""

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
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Update the parameters."""
        ranks.average([p.grad for p in self._parameters() if p.grad is not None])
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
        """Restore the state of every parameter."""
        parameters = self._parameters()
        for key, value in state.items():
            number, name = key.split(".", 1)
            parameter = parameters[int(number)]
            # The fused kernels read the step counter too, so it is on the parameter's device like the moments.
            value = value.to(parameter.device, copy=True)
            if value.dim() == 4:
                value = value.contiguous(memory_format=torch.channels_last)
            self.inner.state[parameter][name] = value


@dataclass
class _Segment:
    """A group of parameters in one flat tensor, updated by one kernel."""

    parameters: list[nn.Parameter]
    master: Tensor
    first: Tensor
    second: Tensor
    learning_rate: float
    gradient: Tensor
    scales: list[Tensor] | None = None
    working: Tensor | None = None
    gathered: bool = True
    #: Buffer for the sum of autograd's gradient and the fused backbone's; created by the first step that needs it.
    wide: Tensor | None = None
    #: That sum, in a step that has it.
    total: Tensor | None = None


class FlatOptimiser(Optimiser):
    """Adam or SGD over flat tensors: one kernel for the convolutions, one for BatchNorm, one for everything else.

    The parameters of the modules become views of the flat tensors. The fused backbone passes on the gradient of each
    convolution during the backward pass, in its working type; the kernel also writes the next working weights.

    A loss may also read parameters of the backbone itself (a penalty on weights, a call of the module). Autograd's
    graph shows that before the backward pass; autograd's gradients are then added to the others at its end, and no
    parameter is updated before. The same holds with gradient clipping (`limit`), and in a run of several processes,
    whose gradients are averaged first.
    """

    def __init__(
        self,
        groups: list[ParameterGroup],
        recipe: Recipe,
        fused: FusedBackbone,
        block_steps: int,
        limit: float | None = None,
    ) -> None:
        self.recipe = recipe
        self.limit = limit
        self.fused = fused
        self.operations = fused.operations
        folded = not fused.backbone.training
        fused.renew()
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
            fused.written()  # the same numbers at another address
            fused.keep_turned()
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
        self._inside = [p for segment in self.segments if segment.gathered for p in segment.parameters]
        self._position = 0
        self._direct = False
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
        segment = _Segment(parameters, master, first, second, rate, gradient, scales, working, gathered)
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
        # In pinned memory: any other copy makes the host wait for the device.
        table = torch.tensor(rows, dtype=self.hyper.dtype, pin_memory=self.hyper.is_cuda)
        self.hyper[:steps].copy_(table, non_blocking=True)
        self._position = 0

    def skip(self, steps: int) -> None:
        """Advance in the table of rates."""
        self._position = steps

    def begin_step(self, index: Tensor | None) -> None:
        """Clear the gradients and look up the rates."""
        self.fused.zero_grad()
        self.fused.learning = True
        for segment in self.segments:
            for parameter in segment.parameters:
                parameter.grad = None
        if index is None:
            self._rates = self.hyper[self._position]
            self._position += 1
        else:
            self._rates = self.hyper.index_select(0, index)[0]
        self._direct = self._moved = False

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients; convolutions are updated meanwhile if nothing else in the loss reads the backbone."""
        self._direct = _has_gradient(self._inside) or _reaches(loss, self._inside)
        trained = any(segment.working is not None for segment in self.segments)
        early = trained and not self._direct and self.limit is None and not ranks.several()
        self.fused.update = self._update_convolution if early else None
        try:
            loss.backward()
        except RuntimeError as error:
            # PyTorch's error for a weight that is still needed but has changed since the forward pass.
            if self._moved and "inplace operation" in str(error):
                raise TrainingError(_TOO_LATE) from error
            raise
        finally:
            self.fused.update = None

    def _update_convolution(self, index: int, gradient: Tensor) -> None:
        """Update one convolution; called by the fused backbone as soon as its gradient is final."""
        self._moved = True
        increment_version(self.segments[0].parameters[index])
        scales, part = self.segments[0].scales, slice(self._ends[index], self._ends[index + 1])
        scale = None if scales is None else scales[index]
        self._move(0, part, gradient, scale, self.fused.working[part], self.fused.turned(index))

    @torch.no_grad()
    def step(self) -> None:
        """Update what has not been updated yet. A backbone without any gradient is not updated, as in PyTorch."""
        if not self._direct and _has_gradient(self._inside):
            if self._moved:
                raise TrainingError(_TOO_LATE)
            self._direct = True
        reached = self._direct or self.fused.has_gradient
        moving = [(n, s) for n, s in enumerate(self.segments) if reached or not s.gathered]
        for _, segment in moving:
            segment.total = None
            if not segment.gathered:
                torch.cat([_gradient(p).reshape(-1) for p in segment.parameters], out=segment.gradient)
            elif self._direct:
                segment.total = self._add_direct(segment)
        ranks.average([s.gradient if s.total is None else s.total for _, s in moving])
        if self.limit is not None:
            self._shorten([segment for _, segment in moving], self.limit)
        for number, segment in moving:
            if segment.total is not None:
                self._move_at_once(number, segment, segment.total)
            elif segment.working is None:
                self._move(number, slice(None), segment.gradient, None, None)
            elif not self._moved:
                for index, gradient in enumerate(segment.gradient.split(self.fused.sizes)):
                    self._update_convolution(index, gradient)
        if self._moved:
            self.fused.written()
        self.fused.learning = False

    def _shorten(self, segments: list[_Segment], limit: float) -> None:
        """Clip all gradients together to the norm `limit`."""
        squares = [_squared_length(segment, self.fused.sizes) for segment in segments]
        factor = (limit / (torch.stack(squares).sum().sqrt() + 1e-6)).clamp(max=1.0)  # as PyTorch's clip_grad_norm_
        for segment in segments:
            (segment.gradient if segment.total is None else segment.total).mul_(factor)

    def _add_direct(self, segment: _Segment) -> Tensor:
        """Return the sum of a segment's gradient through the features and its gradient from the loss itself."""
        if segment.wide is None:
            segment.wide = torch.zeros_like(segment.master)
        total = segment.wide
        torch.cat([_flat(_gradient(p)) for p in segment.parameters], out=total)
        if self.fused.has_gradient:
            self._add_fused(segment, total)
        return total

    def _add_fused(self, segment: _Segment, total: Tensor) -> None:
        """Add the gradient through the features to that of the parameters themselves."""
        if segment.scales is None:
            total.add_(segment.gradient)
            return
        pieces = zip(total.split(self.fused.sizes), segment.gradient.split(self.fused.sizes), strict=True)
        for (piece, through), scale in zip(pieces, segment.scales, strict=True):
            piece.view(len(scale), -1).addcmul_(through.view(len(scale), -1), scale[:, None])

    def _move_at_once(self, number: int, segment: _Segment, total: Tensor) -> None:
        """Update a whole segment of the backbone by a gradient of its parameters, not of the folded weights."""
        if segment.scales is not None:
            self._move(number, slice(None), total, None, None)
            self.fused.refresh(folded=True)
            return
        self._move(number, slice(None), total, None, segment.working)
        for index in range(len(self.fused.convolutions) if segment.working is not None else 0):
            self.fused.turn(index)

    def _move(
        self,
        number: int,
        part: slice,
        gradient: Tensor,
        scale: Tensor | None,
        working: Tensor | None,
        turned: Tensor | None = None,
    ) -> None:
        segment, recipe = self.segments[number], self.recipe
        if recipe.optimiser == "adam":
            self.operations.adam(
                segment.master[part], gradient, segment.first[part], segment.second[part], self._rates[number],
                BETAS, EPSILON, recipe.weight_decay, scale, working, turned,
            )  # fmt: skip
        else:
            self.operations.sgd(
                segment.master[part], gradient, segment.first[part], self._rates[number],
                recipe.momentum, recipe.weight_decay, scale, working, turned,
            )  # fmt: skip

    def state(self) -> dict[str, Tensor]:
        """Return the moments of every segment."""
        state = {}
        for number, segment in enumerate(self.segments):
            state[f"{number}.first"] = segment.first
            state[f"{number}.second"] = segment.second
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore the moments; the parameters themselves are loaded with their modules."""
        for number, segment in enumerate(self.segments):
            segment.first.copy_(state[f"{number}.first"])
            segment.second.copy_(state[f"{number}.second"])
        self.fused.refresh(folded=not self.fused.backbone.training)


def _squared_length(segment: _Segment, sizes: list[int]) -> Tensor:
    """Return the squared norm of a segment's gradient; that of folded weights is unfolded (chain rule)."""
    if segment.total is not None:
        return torch.linalg.vector_norm(segment.total).square()
    if segment.scales is None:
        return torch.linalg.vector_norm(segment.gradient, dtype=segment.master.dtype).square()
    pieces = zip(segment.gradient.split(sizes), segment.scales, strict=True)
    rows = [torch.linalg.vector_norm(piece.view(len(s), -1), dim=1, dtype=s.dtype) * s for piece, s in pieces]
    return torch.cat(rows).square().sum()


def _flat(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor in the order of the flat tensors."""
    return (tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor).reshape(-1)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _has_gradient(parameters: list[nn.Parameter]) -> bool:
    return any(parameter.grad is not None for parameter in parameters)


def _reaches(loss: Tensor, parameters: list[nn.Parameter]) -> bool:
    """Return whether a backward pass from `loss` would reach one of the parameters.

    Autograd's graph ends in nodes that know their parameter. The fused backbone is one node without edges to its
    parameters, so the graph of a step is small. Walking it takes the host some microseconds and the device no time.
    """
    wanted = {id(parameter) for parameter in parameters}
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in wanted:
            return True
        nodes += [following for following, _ in node.next_functions]
    return False
