"""What a method keeps between tasks, counted: numbers and bytes of its network and of everything besides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from efcil.methods.base import Method
from efcil.methods.memory import ClassMemory


def account(method: Method) -> dict[str, Any]:
    """Return how many numbers and bytes a method stores, as summary.json has it.

    `numbers` and `bytes` are those besides the network, also as `statistics`; `by_name` has each kept buffer,
    `network` the backbone with its heads, `total` everything. Methods that keep covariances have `covariance`, and
    those that keep them in low rank `components`.
    """
    besides = method.stored()
    everything = method.state_dict()
    statistics = _amount(besides.values())
    return {
        **statistics,
        "by_name": {name: _amount([tensor]) for name, tensor in besides.items()},
        "network": _amount(tensor for name, tensor in everything.items() if name not in besides),
        "statistics": statistics,
        "total": _amount(everything.values()),
        **_of_covariances(method),
    }


def _of_covariances(method: Method) -> dict[str, Any]:
    """Return the form of the covariances, how many there are and what they take; for low rank, the components."""
    memories = [each for each in method.modules() if isinstance(each, ClassMemory) and each.form is not None]
    if not memories:
        return {}
    memory = memories[0]
    kept = memory.spread()
    found: dict[str, Any] = {"covariance": {"form": memory.form, "matrices": len(kept), **_amount([kept])}}
    if memory.form == "class" and memory.factored:
        # They would have taken more than the limit.
        found["covariance"] |= {"form": "low-rank", "instead_of": "class", "limit_bytes": int(memory.limit)}
    ranks = memory.components()
    if ranks is not None and len(ranks):
        needed = sum(ranks) * kept.shape[1]
        found["components"] = {
            "mean": float(np.mean(ranks)),
            "std": float(np.std(ranks)),
            "least": min(ranks),
            "most": max(ranks),
            # Without the zero columns that pad all classes to the largest number of components.
            "numbers": needed,
            "bytes": needed * kept.element_size(),
        }
    return found


def _amount(tensors: Iterable[Tensor]) -> dict[str, int]:
    sizes = [(tensor.numel(), tensor.numel() * tensor.element_size()) for tensor in tensors]
    return {"numbers": sum(numbers for numbers, _ in sizes), "bytes": sum(size for _, size in sizes)}
