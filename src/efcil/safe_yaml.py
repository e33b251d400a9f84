"""YAML from untrusted files, read in bounded time and memory.

Aliases are refused: a few lines of them can stand for billions of values. So are deep nesting, files far larger than
settings can be, and names that are given twice, because one of the values would be lost.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from efcil.safe_json import read_text, whole_number

MOST_BYTES = 256 * 2**10
MOST_LEVELS = 20


class YamlError(yaml.YAMLError):
    """YAML that is refused: it is damaged, too large, or uses features that settings do not need."""


def parse(text: str) -> Any:
    """Return the value of YAML text; anything wrong with it raises a YamlError with a message of one line."""
    if len(text) > MOST_BYTES:
        raise YamlError(f"it holds more than {MOST_BYTES:,} characters")
    try:
        return yaml.load(text, _Loader)  # a safe loader too
    except Exception as error:  # for values that contradict their tags, PyYAML may raise almost anything
        raise YamlError(" ".join(str(error).split())[:300] or type(error).__name__) from None


def read(file: Path) -> Any:
    """Return the value of a YAML file; anything wrong with its content raises a YamlError."""
    try:
        return parse(read_text(file, MOST_BYTES))
    except ValueError as error:
        raise YamlError(str(error)) from None


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, without aliases, doubled names, deep nesting and numbers of thousands of digits."""

    levels = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node; an alias or too deep a node raises."""
        if self.check_event(yaml.AliasEvent):
            raise self._refused("aliases (*name) are not allowed; repeat the value", self.peek_event().start_mark)
        self.levels += 1
        if self.levels > MOST_LEVELS:
            raise self._refused("it is nested too deeply", self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.levels -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return the mapping, after checking that no name is given twice."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise self._refused(f"{key.value[:80]!r} is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        """Return a whole number of any notation that is not too long."""
        whole_number("9" * len(node.value))
        return super().construct_yaml_int(node)

    def _refused(self, reason: str, mark: Any) -> yaml.YAMLError:
        return yaml.constructor.ConstructorError(None, None, reason, mark)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
