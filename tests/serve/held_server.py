"""The `efcil` command, whose teachings are those of held_teacher.py."""

from __future__ import annotations

import sys
from pathlib import Path

from efcil.cli import command
from efcil.serve import jobs

if __name__ == "__main__":
    jobs.COMMAND = (sys.executable, str(Path(__file__).with_name("held_teacher.py")))
    command()
