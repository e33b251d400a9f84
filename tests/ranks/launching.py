"""A warm process that runs `efcil` in several processes at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from warm import Server

HERE = Path(__file__).parent
Launch = Callable[..., tuple[list[int], str]]

#: Whose values would be those of a run that these tests are part of.
_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def environment() -> dict[str, str]:
    """Return the environment of processes that are to have one thread each."""
    kept = {name: value for name, value in os.environ.items() if name not in _OURS}
    return kept | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def launcher(output: Path) -> Iterator[Launch]:
    """Yield a function that runs a command line, or a unit, in so many processes: exit codes, and what they printed."""
    server = Server(HERE / "forks.py", output, environment())

    def run(ranks: int, *arguments: object, unit: str | None = None) -> tuple[list[int], str]:
        return server.do(ranks=ranks, unit=unit, arguments=[str(each) for each in arguments])

    yield run
    server.close()
