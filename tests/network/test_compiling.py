"""Our Triton kernels compile for GPUs that are not there: the interpreter accepts more than the compiler does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia.compiler", reason="Triton is not installed here")

SCRIPT = Path(__file__).with_name("compiling.py")
#: Shared memory that one block of threads may have, in bytes, by compute capability: an RTX 3090, an H100.
SHARED_MEMORY = {86: 101_376, 90: 232_448}


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_kernel_compiles_and_fits(tmp_path: Path, capability: int) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), str(capability)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) > 20
    assert {name: int(shared) for name, _, shared in rows if int(shared) > SHARED_MEMORY[capability]} == {}
