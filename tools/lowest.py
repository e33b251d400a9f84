"""Write a constraints file with the lowest version of everything that pyproject.toml declares.

    python tools/lowest.py > lowest.txt
    pip install -c lowest.txt -e '.[dev,hub,onnx]'

`--leave-out NAME` writes nothing about a package: old builds of torch are not to be had everywhere.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
#: The site is no part of the program, and has no tests of its own.
WITHOUT_TESTS = ("docs",)
BOUNDED = re.compile(r"(?P<name>[\w.-]+)\s*>=\s*(?P<version>[\w.]+)\s*(?P<marker>;.*)?")
BARE = re.compile(r"[\w.-]+\s*(;.*)?")


def requirements(project: dict[str, Any]) -> list[str]:
    """Return what the package and its extras ask for."""
    found = list(project["dependencies"])
    for name, extra in project.get("optional-dependencies", {}).items():
        found += [] if name in WITHOUT_TESTS else extra
    return found


def lowest(requirement: str) -> str | None:
    """Return the requirement held to its lowest version, nothing where it has none."""
    if match := BOUNDED.fullmatch(requirement.strip()):
        return f"{match['name']}=={match['version']}" + (f" {match['marker']}" if match["marker"] else "")
    if BARE.fullmatch(requirement.strip()):
        return None
    raise SystemExit(
        f"{requirement!r} in pyproject.toml is neither NAME nor NAME>=VERSION; teach tools/lowest.py to read it"
    )


def main(arguments: list[str] | None = None) -> None:
    """Print one line for every requirement that has a lower bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leave-out", nargs="*", default=[], metavar="NAME", help="packages to write nothing about")
    left_out = parser.parse_args(arguments).leave_out
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    for line in sorted(filter(None, map(lowest, requirements(project))), key=str.lower):
        if line.partition("==")[0] not in left_out:
            print(line)


if __name__ == "__main__":
    main()
