"""A sample of what `make crash-test` does: commands that die or fail at an I/O call, and are given again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CASES = ("run", "cedar", "domains", "learn", "learn more")

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux, to know which file is meant")


def harness(*arguments: str) -> tuple[int, str]:
    environment = os.environ | {
        "PYTHONPATH": str(HERE.parents[1] / "src"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(HERE / "harness.py"), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


def test_a_sample_of_all_calls() -> None:
    code, said = harness("--every", "139", "--jobs", "1")
    assert code == 0, said
    found = re.search(r"(\d+) points in \d+ s, 0 went wrong", said)
    assert found is not None, said
    assert int(found[1]) > 10
    assert set(re.findall(r"^([a-z ]+), [a-z]+: \d+ points$", said, re.M)) == {*CASES}


@pytest.mark.parametrize(
    ("case", "calls", "least"),
    [
        ("learn more", r"unlink model-|unlink partial/state\.json|rmdir partial", 3),
        ("run", r"unlink .*/model/model-", 2),
        ("run", r"(replace|unlink) \.grid-", 2),
    ],
)
def test_what_is_left_is_removed(case: str, calls: str, least: int) -> None:
    """Killed after the model is in place, or around its note for `efcil watch`: the same command tidies up."""
    code, said = harness("--case", case, "--fault", "kill", "--call", calls, "--jobs", "1")
    assert code == 0, said
    assert int(re.search(r"(\d+) points in", said)[1]) >= least, said


def test_the_harness_notices_what_it_is_for(tmp_path: Path) -> None:
    """With a rename that is not the last step any more, a kill leaves half a file, and that is seen."""
    (tmp_path / "broken.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "import harness\n"
        "from efcil import files\n"
        "from efcil.engine import checkpoint\n"
        "def careless(path, content):\n"
        "    path.parent.mkdir(parents=True, exist_ok=True)\n"
        "    parts = [content.encode()] if isinstance(content, str) else content\n"
        "    path.write_bytes(parts if isinstance(parts, bytes) else b''.join(parts))\n"
        "files.write_own = checkpoint.write_own = careless\n"
        "sys.argv = ['harness', '--case', 'learn', '--call', 'model.json', '--fault', 'half', '--jobs', '1']\n"
        "raise SystemExit(harness.main())\n"
    )
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, tmp_path / "broken.py"], env=environment, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "1 points in" in ended.stdout
    assert "1 went wrong" in ended.stdout
