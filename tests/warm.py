"""A warm process that does jobs in forks of itself, so that what is slow to import is imported once.

A script calls `serve`; a test starts it as a `Server`. One job per line goes in as JSON, one answer per line comes out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).resolve().parent


def serve(answer: Callable[[dict[str, Any]], object]) -> None:
    """Answer jobs, once everything that needs time and has no consequences is done.

    Those are imports (PyTorch does some of its own when the first optimiser is made) and the data set. Nothing is
    trained: autograd does not survive a fork.
    """
    import efcil.cli
    import efcil.experiment
    from efcil.data.sources import SourceOptions, load_dataset

    torch.set_num_threads(1)
    assert efcil.experiment.run_grid
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], fused=True)
    load_dataset("digits", None, SourceOptions())
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def fork(work: Callable[[], int], output: str) -> int:
    """Do the work, which returns an exit code, in a fork that prints to a file; return the fork's number."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def efcil(arguments: list[str]) -> int:
    """Be `efcil`, and return its exit code."""
    from efcil.cli import main

    sys.argv = ["efcil", *arguments]
    return main(arguments)


def exit_code(child: int) -> int:
    """Wait for a fork; a negative code is the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Server:
    """A script that calls `serve`, and a file for what its forks print."""

    def __init__(self, script: Path, output: Path, environment: dict[str, str]) -> None:
        self.output = output
        path = f"{TESTS}{os.pathsep}{TESTS.parent / 'src'}"
        environment = environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, str(script)], env=environment, stdin=pipe, stdout=pipe, text=True
        )
        assert self._line() == "ready\n"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def do(self, **job: object) -> tuple[Any, str]:
        """Return the answer to a job, and what its forks printed."""
        self.output.unlink(missing_ok=True)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job | {"output": str(self.output)}) + "\n")
        self.process.stdin.flush()
        return json.loads(self._line()), self.output.read_text()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()
