"""Options: dataclass fields with a help text, and values that are checked against their annotation."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar, Union

from efcil.errors import SettingsError, shortened, unknown
from efcil.safe_json import whole_number

Instance = TypeVar("Instance")

_KEY = "efcil"
_PLACE = "efcil after"
_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


@dataclass(frozen=True)
class Option:
    """What a flag, a YAML key and a line of documentation need to know about one field."""

    name: str
    annotation: Any
    default: Any
    help: str
    choices: tuple[Any, ...] | None = None
    flag: str | None = None
    nargs: str | None = None
    group: str = "general"
    minimum: float | None = None
    maximum: float | None = None
    before: Any = None
    needs: tuple[str, tuple[Any, ...]] | None = None
    unless: tuple[str, Any] | None = None

    @property
    def flags(self) -> str:
        """The command-line spelling, such as `--first-task-epochs`."""
        return self.flag or "--" + self.name.replace("_", "-")

    @cached_property
    def expected(self) -> str:
        """What a value must be, in words."""
        if self.choices is not None:
            return "one of " + ", ".join(show(choice) for choice in self.choices)
        text = describe(self.annotation)
        limits = ""
        if self.minimum is not None and self.maximum is not None:
            limits = f" from {self.minimum:g} to {self.maximum:g}"
        elif self.minimum is not None:
            limits = f" of at least {self.minimum:g}"
        elif self.maximum is not None:
            limits = f" of at most {self.maximum:g}"
        bare = text.removesuffix(" or none")
        return bare + limits + text[len(bare) :]

    def check(self, value: Any) -> Any:
        """Return `value` as the annotated type, or raise a SettingsError that says what was expected."""
        converted = coerce(value, self.annotation, self.name, self.choices, self.expected)
        for number in converted if isinstance(converted, tuple) else (converted,):
            if isinstance(number, int | float) and not isinstance(number, bool):
                too_small = self.minimum is not None and number < self.minimum
                if too_small or (self.maximum is not None and number > self.maximum):
                    raise _wrong(self.name, value, self.expected)
        return converted


# Type hints take long to read, and every instance of a settings class needs them.
_read: dict[type, Mapping[str, Option]] = {}


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[Any] | None = None,
    flag: str | None = None,
    nargs: str | None = None,
    group: str = "general",
    minimum: float | None = None,
    maximum: float | None = None,
    before: Any = None,
    needs: tuple[str, Any] | None = None,
    unless: tuple[str, Any] | None = None,
    after: str | None = None,
) -> Any:
    """Return a dataclass field with its documentation. Mutable defaults are copied for every instance.

    `before` is the value in records from before this setting existed, if that is not the default. `needs` names another
    setting, and the value (or tuple of values) without which this one has no effect; `unless` names one, and the value
    with which this one has no effect. `after` names the inherited setting after which this one and those defined below
    it are listed; without it they come after all inherited ones.
    """
    if needs is not None and not isinstance(needs[1], tuple):
        needs = (needs[0], (needs[1],))
    metadata = {
        _KEY: {
            "help": help,
            "choices": None if choices is None else tuple(choices),
            "flag": flag,
            "nargs": nargs,
            "group": group,
            "minimum": minimum,
            "maximum": maximum,
            "before": before,
            "needs": needs,
            "unless": unless,
        },
        _PLACE: after,
    }
    if isinstance(default, dict | list):
        copy = type(default)
        return dataclasses.field(default_factory=lambda: copy(default), metadata=metadata, hash=False)
    return dataclasses.field(default=default, metadata=metadata)


def options(cls: type) -> Mapping[str, Option]:
    """Return the options of a dataclass by name, in the order in which they are listed everywhere."""
    if cls not in _read:
        _read[cls] = types.MappingProxyType({each.name: each for each in _read_options(cls)})
    return _read[cls]


def _read_options(cls: type) -> list[Option]:
    hints = typing.get_type_hints(cls)
    found: list[Option] = []
    place = 0
    for field in dataclasses.fields(cls):
        if not field.init:  # derived from others
            continue
        default = field.default
        if default is dataclasses.MISSING:
            default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        known = dict(field.metadata.get(_KEY, {"help": ""}))
        if known.get("choices") is None:
            known["choices"] = _literal_choices(hints[field.name])
        if (after := field.metadata.get(_PLACE)) is not None:
            place = [each.name for each in found].index(after) + 1
        found.insert(place, Option(name=field.name, annotation=hints[field.name], default=default, **known))
        place += 1
    return found


def settle(instance: Any) -> None:
    """Check and convert every field of a frozen dataclass in place; meant for `__post_init__`."""
    for name, known in options(type(instance)).items():
        object.__setattr__(instance, name, known.check(getattr(instance, name)))


def build(cls: type[Instance], values: Mapping[str, Any], kind: str = "setting") -> Instance:
    """Make an instance of the dataclass `cls` from `values`; unknown names and wrong types raise a SettingsError."""
    known = options(cls)
    for name in values:
        if name not in known:
            raise unknown(kind, str(name), known)
    return cls(**{name: known[name].check(value) for name, value in values.items()})


def completed(cls: type, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded values of a dataclass, with the effective values of settings that did not exist then.

    Its class attribute `removed` names settings that no longer exist, with the value that is still in effect (None: no
    value had an effect); those are left out.
    """
    definition = getattr(cls, "Settings", cls)
    known, removed = options(definition), getattr(definition, "removed", {})
    recorded = {name: v for name, v in recorded.items() if name not in removed or removed[name] not in (v, None)}
    absent = {name: o.default if o.before is None else o.before for name, o in known.items() if name not in recorded}
    return {**recorded, **{name: list(v) if isinstance(v, tuple) else v for name, v in absent.items()}}


def method_settings(cls: type, overrides: Mapping[str, Any]) -> Any:
    """Make the `Settings` of a method class (or of a Settings dataclass itself) from `overrides`.

    Values may be text ("0.1", "true", "none", "1,2"); they are converted to the annotated type.
    """
    definition = cls if dataclasses.is_dataclass(cls) else getattr(cls, "Settings", None)
    if definition is None:
        raise SettingsError(f"{cls.__name__} has no Settings dataclass; a method declares its settings in one.")
    owner = getattr(cls, "name", None)
    return build(definition, overrides, f"setting of {owner}" if isinstance(owner, str) else "setting")


def coerce(
    value: Any, annotation: Any, name: str, choices: Sequence[Any] | None = None, expected: str | None = None
) -> Any:
    """Return `value` as `annotation` (int, float, bool, str, tuple[x, ...], x | None, Literal, Mapping, Any)."""
    expected = expected or describe(annotation)
    if choices is not None:
        # A choice may be spelled "none" and still be text, so choices are looked up before anything is converted.
        for choice in choices:
            if value == choice and isinstance(value, bool) == isinstance(choice, bool):
                return choice
            if isinstance(value, str) and value.lower() == show(choice):
                return choice
        if value is None and _optional(annotation):
            return None
        if isinstance(value, str) and all(isinstance(choice, str) for choice in choices):
            raise unknown(f"value for setting {name!r}:", value, [str(choice) for choice in choices])
        raise _wrong(name, value, expected)
    try:
        return _convert(value, annotation)
    except (TypeError, ValueError, OverflowError):
        raise _wrong(name, value, expected) from None


def describe(annotation: Any) -> str:
    """Describe in words what a value of this annotation looks like."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(show(argument) for argument in arguments)
    if origin in (Union, types.UnionType):
        none = " or none" if type(None) in arguments and str not in arguments else ""
        return " or ".join(describe(a) for a in arguments if a is not type(None)) + none
    if origin is tuple:
        inner = {int: "whole numbers", float: "numbers", str: "names"}.get(arguments[0], "values")
        return f"{inner} separated by commas"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(annotation, "name=value pairs" if origin is not None else "a value")


def _convert(value: Any, annotation: Any) -> Any:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return tuple(value) if isinstance(value, list) else value
    if origin in (Union, types.UnionType):
        return _convert_union(value, arguments)
    if origin is Literal:
        return coerce(value, str, "", arguments)
    if origin is tuple:
        return _convert_tuple(value, arguments[0])
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise TypeError
        return {str(key): _convert(item, arguments[1]) for key, item in value.items()}
    if annotation is bool:
        return _convert_bool(value)
    if annotation is int:
        return _convert_int(value)
    if annotation is float:
        return _convert_float(value)
    if annotation is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)  # in YAML, 20 and the name of a folder such as 2024 are numbers
    if not isinstance(value, annotation):
        raise TypeError
    return value


def _convert_union(value: Any, arguments: tuple[Any, ...]) -> Any:
    # If text is allowed, the word "none" is text: there is an augmentation of that name.
    none_in_words = str not in arguments and isinstance(value, str) and value.lower() in {"none", "null"}
    if type(None) in arguments and (value is None or none_in_words):
        return None
    for argument in arguments:
        if argument is not type(None):
            try:
                return _convert(value, argument)
            except (TypeError, ValueError):
                continue
    raise ValueError


def _convert_tuple(value: Any, inner: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    elif isinstance(value, int | float):
        value = [value]
    return tuple(_convert(part, inner) for part in value)


def _convert_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = value.lower() if isinstance(value, str) else None
    if word not in _TRUE | _FALSE:
        raise ValueError
    return word in _TRUE


def _convert_int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    number = whole_number(value) if isinstance(value, str) else value
    if int(number) != number or abs(number) >= 2**63:  # random generators and files have 64 bits
        raise ValueError
    return int(number)


def _convert_float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _literal_choices(annotation: Any) -> tuple[Any, ...] | None:
    return typing.get_args(annotation) if typing.get_origin(annotation) is Literal else None


def _optional(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (Union, types.UnionType) and type(None) in typing.get_args(annotation)


def show(value: Any) -> str:
    """Write a value the way `--set` and the documentation spell it; `coerce` reads it back."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if isinstance(value, tuple | list):
        return ",".join(show(part) for part in value)
    return str(value)


def _wrong(name: str, value: Any, expected: str) -> SettingsError:
    return SettingsError(f"Setting {name!r} must be {expected}, but it is {shortened(show(value))!r}.")
