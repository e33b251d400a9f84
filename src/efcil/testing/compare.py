"""What checks compare: states to the bit, numbers within limits, and whatever tensors a method holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from efcil.methods.base import Method

State = dict[str, Tensor]


def require(holds: bool, sentence: str) -> None:
    """Raise AssertionError with the sentence unless something holds; unlike `assert`, also under `python -O`."""
    if not holds:
        raise AssertionError(sentence)


def require_close(found: Tensor, expected: Tensor, what: str, rtol: float, atol: float) -> None:
    """Require that two tensors have one shape and agree within limits."""
    same = found.shape == expected.shape
    require(same, f"{what} has the shape {tuple(found.shape)}, and {tuple(expected.shape)} was expected.")
    near = torch.allclose(found.double(), expected.double(), rtol=rtol, atol=atol)
    # Worked out for a failure only: the largest difference of empty tensors does not exist.
    require(near, "" if near else f"{what} differs by up to {float((found - expected).abs().max()):.3g}.")


def assert_equal(first: State, second: State) -> None:
    """Require that both states have the same tensors, bit for bit."""
    different = sorted(first.keys() ^ second.keys())
    require(not different, f"Only one of two states has {', '.join(different)}.")
    for name, value in first.items():
        require(torch.equal(value, second[name]), f"{name} differs.")


def clone(state: State) -> State:
    """Return a copy that later training does not change."""
    return {name: value.detach().clone() for name, value in state.items()}


def normalisation_state(method: Method) -> State:
    """Return scale, shift and statistics of every BatchNorm layer of the backbone, by name."""
    modules = method.network.backbone.named_modules()
    layers = [(name, layer) for name, layer in modules if isinstance(layer, _BatchNorm)]
    return clone({f"{name}.{key}": value for name, layer in layers for key, value in layer.state_dict().items()})


def kept_tensors(method: Method) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that a method holds: its saved state and whatever its modules have as plain attributes."""
    yield from method.state_dict().items()
    for name, module in method.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_") or isinstance(value, Tensor | list | dict):
                yield from _tensors(f"{name}.{key}", value)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(f"{name}[{index}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(f"{name}[{key}]", item)
    elif isinstance(value, nn.Module):  # a teacher that is kept out of the state
        for key, item in value.state_dict().items():
            yield f"{name}.{key}", item


def longest_run(values: Tensor, allowed: Tensor) -> int:
    """Return the length of the longest run of `values` that all occur in `allowed`, constant runs left out."""
    inside = torch.isin(values.flatten(), allowed)
    longest, start = 0, 0
    for end in [*torch.nonzero(~inside).flatten().tolist(), len(inside)]:
        if end - start > longest and len(values.flatten()[start:end].unique()) > 2:
            longest = end - start
        start = end + 1
    return longest
