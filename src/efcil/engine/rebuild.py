"""Whether what a method keeps could be taken up again: asked early, of methods that are not our own."""

from __future__ import annotations

import torch

from efcil.errors import TrainingError, some
from efcil.methods.base import Method
from efcil.network.incremental import fresh_network


def refuse_unloadable(method: Method, network: str, seed: int) -> None:
    """Make the method anew and load its state, before hours are trained into states that nobody can load."""
    state = {name: value.detach().cpu() for name, value in method.state_dict().items()}
    again = type(method)(fresh_network(network, seed, torch.device("cpu")), method.settings)
    try:
        again.load_tensors(state)
    except Exception as error:  # whatever foreign code raises
        missing = sorted(name for name in state if name not in again.state_dict())
        reason = f"it does not have {some(missing)} when it is made anew" if missing else f"{error}"
        raise TrainingError(
            f"What method {method.name!r} keeps could not be loaded again: {reason}. Register every parameter, buffer "
            "and submodule in __init__; a buffer that grows begins with no rows."
        ) from error
