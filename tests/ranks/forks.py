"""Runs a function in several forks of this process that have joined each other, as torchrun would have started them."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from efcil import ranks


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        number: int = found.getsockname()[1]
        return number


def in_ranks(count: int, folder: Path, work: Callable[[], Any]) -> list[Any]:
    """Return what `work` returns in each of `count` processes that are one run; an error in one of them raises."""
    port, children = free_port(), []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            _be(rank, count, port, folder / f"{rank}.pt", work)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    errors = "\n".join(file.read_text() for file in sorted(folder.glob("*.error")))
    assert codes == [0] * count, f"{codes}\n{errors}"
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _be(rank: int, count: int, port: int, file: Path, work: Callable[[], Any]) -> None:
    code = 1
    try:
        named = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
        os.environ |= {name: str(value) for name, value in named.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with ranks.joined():
            torch.save(work(), file)
        code = 0
    except BaseException:
        file.with_suffix(".error").write_text(traceback.format_exc())
    finally:
        os._exit(code)
