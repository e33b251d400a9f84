"""`python -m efcil` is the `efcil` command."""

from __future__ import annotations

import sys

from efcil.cli import main

if __name__ == "__main__":
    sys.exit(main())
