"""Methods, found by existing: every module of this package that defines a `Method` with a name is one."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from efcil.errors import unknown
from efcil.methods.base import Method


@cache
def available() -> dict[str, type[Method]]:
    """Return all methods by name."""
    found: dict[str, type[Method]] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Method) and value.__module__ == module.__name__:
                name = vars(value).get("name")
                if name:
                    found[name] = value
    return dict(sorted(found.items()))


def get(name: str) -> type[Method]:
    """Return the method called `name`, or say which names exist."""
    methods = available()
    if name not in methods:
        raise unknown("method", name, methods)
    return methods[name]
