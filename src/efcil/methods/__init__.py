"""Methods, found automatically: every module of this package that defines a `Method` with a name is one.

So is every file named in $EFCIL_METHODS (files or folders of them, separated as in $PATH), and every module that an
installed package announces as an entry point of the group `efcil.methods`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

from efcil.errors import SettingsError, unknown
from efcil.methods.base import Method

VARIABLE = "EFCIL_METHODS"
ENTRY_POINTS = "efcil.methods"
#: How the names of the modules begin that are made of users' files.
_OWN = "efcil_methods."


@cache
def available() -> dict[str, type[Method]]:
    """Return all methods by name."""
    found: dict[str, type[Method]] = {}
    for module in _modules():
        for value in _methods_of(module):
            name = value.name
            if found.setdefault(name, value) is not value:
                places = [_place_of(found[name]), _place_of(value)]
                where = f"both in {places[0]}" if places[0] == places[1] else f"one in {places[0]}, one in {places[1]}"
                raise SettingsError(f"Two methods are called {name!r}: {where}. Give yours another name.")
    return dict(sorted(found.items()))


def _place_of(method: type[Method]) -> str:
    """Return where a method is defined: its module, or the file of a user's own."""
    name = method.__module__
    return str(sys.modules[name].__file__) if name.startswith(_OWN) else name


def _methods_of(module: ModuleType) -> list[type[Method]]:
    """Return the methods with a name that a module defines."""
    kinds = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Method))
    own = (kind for kind in kinds if kind.__module__ == module.__name__)  # imported ones belong to other modules
    return [kind for kind in own if vars(kind).get("name")]


def bundled() -> dict[str, type[Method]]:
    """Return the methods of this package itself: those with documentation and recorded accuracies."""
    return {name: cls for name, cls in available().items() if cls.__module__.startswith(f"{__name__}.")}


def incremental() -> dict[str, type[Method]]:
    """Return the methods whose training sees only the current task's images: all but joint training."""
    return {name: cls for name, cls in available().items() if cls.traits(cls.Settings()).images == "task"}


def get(name: str) -> type[Method]:
    """Return the method called `name`, or say which names exist."""
    methods = available()
    if name not in methods:
        own = "" if os.environ.get(VARIABLE) else f" To use your own method, set ${VARIABLE} to its file."
        raise SettingsError(f"{unknown('method', name, methods)}{own}")
    return methods[name]


def _modules() -> Iterator[ModuleType]:
    for module_info in pkgutil.iter_modules(__path__):
        yield importlib.import_module(f"{__name__}.{module_info.name}")
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        with _loading(f"the installed method {entry.name!r} ({entry.value})"):
            module = importlib.import_module(entry.module)
        yield module
    read: set[Path] = set()  # a file may be named twice, or be in a folder that is named too
    for text in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        place = Path(text).expanduser()
        if not place.exists():
            raise SettingsError(f"${VARIABLE} names {place}, which does not exist.")
        for file in sorted(place.glob("*.py")) if place.is_dir() else [place]:
            if file.resolve() in read:
                continue
            read.add(file.resolve())
            module = _from_file(file)
            if file == place and not _methods_of(module):
                raise SettingsError(
                    f"${VARIABLE} names {file}, which defines no method: a subclass of Method with a name of its own "
                    '(name = "mine").'
                )
            yield module


def _from_file(file: Path) -> ModuleType:
    # Two files may have the same name, but module names are unique.
    name = f"{_OWN}{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise SettingsError(f"${VARIABLE} names {file}, which is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    with _loading(str(file)):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _loading(what: str) -> Iterator[None]:
    """Turn any error while the user's code is loaded into a sentence that names the code."""
    try:
        yield
    except Exception as error:
        raise SettingsError(f"Loading {what} failed: {type(error).__name__}: {str(error).rstrip('.')}.") from error
