"""`efcil check`: whether a method or a backbone of one's own does what the engine builds on."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from efcil import output
from efcil.commands.parser import Parser, positive
from efcil.errors import SettingsError, unknown

HELP = "check a method or a backbone of your own"
DESCRIPTION = """\
Run the checks that every method and every backbone of this package passes. WHAT is one of

  anchor.py            a file that defines methods: each of them is checked
  backbones.py:make    a function that returns a backbone, in a file or in a module that can be imported
  efc, slim            a method or a network by its name

It takes some seconds to a minute on a CPU, prints a line for each check, and exits with 1 if one fails.
docs/your-own-method.md says what is asserted.
"""


def add_arguments(parser: Parser) -> None:
    """Add the arguments and flags."""
    parser.add_argument("what", metavar="WHAT", help="file of methods, MODULE:FUNCTION of a backbone, or a name")
    parser.add_argument(
        "--image-size",
        type=positive("--image-size"),
        default=32,
        metavar="N",
        help="side of the images that a backbone is checked with (default: 32)",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Run the checks and print what each found."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # networks this small are faster so, above all where the machine has other work
    try:
        return _check(arguments)
    finally:
        torch.set_num_threads(before)


def _check(arguments: argparse.Namespace) -> int:
    from efcil import methods, testing
    from efcil.network.backbones import NETWORKS

    what, debug = arguments.what, getattr(arguments, "debug", False)
    place, colon, function = what.rpartition(":")
    if colon and function.isidentifier():
        return report(what, testing.check_backbone(_backbone(place, function), arguments.image_size), debug)
    if what.endswith(".py") or Path(what).exists():
        with own_methods(Path(what).expanduser()) as found:
            return max([report(name, testing.check_method(cls), debug) for name, cls in found.items()])
    if what in methods.available():
        return report(what, testing.check_method(methods.get(what)), debug)
    if what in NETWORKS:
        return report(what, testing.check_backbone(NETWORKS[what][1], arguments.image_size), debug)
    raise unknown("method, network or file", what, [*methods.available(), *NETWORKS])


def report(name: str, verdicts: Iterable[Any], debug: bool) -> int:
    """Print a line for each verdict and their sum; return the exit code."""
    print(name)
    counts: Counter[str] = Counter()
    for verdict in verdicts:
        counts[verdict.outcome] += 1
        reason = f" -> {verdict.reason}" if verdict.reason else ""
        print(
            output.lines(f"  {verdict.outcome:<8}  {verdict.check.asserts}{reason}").replace("\n", "\n    "), flush=True
        )
        if debug and verdict.trace:
            print(output.lines(verdict.trace), file=sys.stderr)
    print(f"  {counts['passed']} passed, {counts['failed']} failed, {counts['left out']} left out")
    return 1 if counts["failed"] else 0


@contextmanager
def own_methods(file: Path) -> Iterator[dict[str, type]]:
    """Have the methods of a file among those that exist, as if $EFCIL_METHODS named it, and yield them by name."""
    from efcil import methods

    def of_file() -> dict[str, type]:
        where = {
            name: getattr(sys.modules[cls.__module__], "__file__", None) for name, cls in methods.available().items()
        }
        here = [name for name, place in where.items() if place and Path(place).resolve() == file.resolve()]
        return {name: methods.get(name) for name in here}

    if not file.is_file():
        raise SettingsError(f"{file} is not a file. Name a Python file that defines a method.")
    already = of_file()
    if already:
        yield already
        return
    before = os.environ.get(methods.VARIABLE)
    os.environ[methods.VARIABLE] = os.pathsep.join(filter(None, [before, str(file.resolve())]))
    methods.available.cache_clear()
    try:
        yield of_file()
    finally:
        if before is None:
            del os.environ[methods.VARIABLE]
        else:
            os.environ[methods.VARIABLE] = before
        methods.available.cache_clear()


def _backbone(place: str, function: str) -> Callable[[], Any]:
    """Return the function that makes a backbone, from a file or from a module."""
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # whatever foreign code raises
        raise SettingsError(f"Loading {place} failed: {type(error).__name__}: {error}.") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise SettingsError(f"{place} has no function {function!r}.")
    make: Callable[[], Any] = found
    return make


def _from_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"efcil_backbones_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise SettingsError("it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
