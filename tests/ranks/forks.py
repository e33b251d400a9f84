"""Runs `efcil`, or one of `units.py`, in several forks, joined as torchrun would have started them; see warm.py.

The answer to a job is the exit codes.
"""

from __future__ import annotations

import os
import socket
from functools import partial
from typing import Any

import image_units
import units
from exact import use_float64

import warm
from efcil import ranks


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        number: int = found.getsockname()[1]
        return number


def be(rank: int, job: dict[str, Any], port: int) -> int:
    """Be one process of a run, and return its exit code."""
    each = job["ranks"] // job["machines"]
    named = {"RANK": rank, "WORLD_SIZE": job["ranks"], "LOCAL_RANK": rank % each, "LOCAL_WORLD_SIZE": each}
    os.environ |= {name: str(value) for name, value in named.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if job["unit"] in vars(image_units):  # no network, and crops are float32
        with ranks.joined():
            getattr(image_units, job["unit"])(*job["arguments"])
        return 0
    use_float64()
    if job["unit"] is None:
        return warm.efcil(job["arguments"])
    with ranks.joined():
        getattr(units, job["unit"])()
    return 0


def answer(job: dict[str, Any]) -> list[int]:
    """Fork for every process of a job."""
    port = free_port()
    children = [warm.fork(partial(be, rank, job, port), job["output"]) for rank in range(job["ranks"])]
    return [warm.exit_code(child) for child in children]


if __name__ == "__main__":
    warm.serve(answer)
