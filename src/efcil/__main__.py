"""`python -m efcil` is the `efcil` command."""

from __future__ import annotations

from efcil.cli import command

if __name__ == "__main__":
    command()
