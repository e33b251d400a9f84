"""Runs `efcil`, or one of `units.py`, in several forks of one warm process, joined as torchrun would have started them.

One job per line comes in as JSON, one answer per line goes out: the exit codes. Nothing is trained before a fork,
because autograd does not survive one.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from typing import Any

import torch
import torch.distributed
import units
from exact import use_float64

import efcil.experiment
from efcil import ranks
from efcil.cli import main
from efcil.data.sources import SourceOptions, load_dataset


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        number: int = found.getsockname()[1]
        return number


def be(rank: int, job: dict[str, Any], port: int) -> None:
    """Be one process of a run, and never come back."""
    code = 70
    try:
        output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        named = {"RANK": rank, "WORLD_SIZE": job["ranks"], "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": job["ranks"]}
        os.environ |= {name: str(value) for name, value in named.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        use_float64()
        if job["unit"] is not None:
            with ranks.joined():
                getattr(units, job["unit"])()
            code = 0
        else:
            sys.argv = ["efcil", *job["arguments"]]
            code = main(job["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """Fork for every job."""
    torch.set_num_threads(1)
    assert efcil.experiment.run_grid
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], fused=True)
    load_dataset("digits", None, SourceOptions())
    print("ready", flush=True)
    for line in sys.stdin:
        job, port, children = json.loads(line), free_port(), []
        for rank in range(job["ranks"]):
            child = os.fork()
            if child == 0:
                be(rank, job, port)
            children.append(child)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)


if __name__ == "__main__":
    serve()
