"""Settings that are of use only beside others: what is declared of them is what training does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from checks import QUICK, State, run, short_stream

from efcil.methods import bundled
from efcil.settings import Option, options

#: Each setting once, with the first method that has it; others inherit it.
CONDITIONAL = list(
    {
        (name, known.needs, known.help): (method, name)
        for method, cls in reversed(bundled().items())
        for name, known in options(cls.Settings).items()
        if known.needs is not None and known.needs[0] in options(cls.Settings)
    }.values()
)
#: Values far enough from the default for a difference within a few steps.
FAR: dict[str, Any] = {
    "adapter_batch_size": 8,
    "collapse_limit": 0.5,
    "covariance_limit": 0.0,
    "covariance_share": 0.5,
    "drift_batch": 2,
    "map_batch_size": 4,
    "pseudo_old_fade": 1.0,
    "rebalance_batch_size": 8,
    "projection_threshold": 0.3,
    "threshold": 0.999,
    "tolerance": 0.5,
}


def changed(known: Option) -> Any:
    """A value of an option that is not its default."""
    if known.name in FAR:
        return FAR[known.name]
    if known.choices is not None:
        return next(choice for choice in known.choices if choice != known.default)
    if isinstance(known.default, bool):
        return not known.default
    return max(2, known.default // 3) if isinstance(known.default, int) else known.default * 3


def unmet(method: str, known: Option) -> dict[str, Any]:
    """A setting that makes `known` idle."""
    assert known.needs is not None
    other = options(bundled()[method].Settings)[known.needs[0]]
    if other.choices is None:
        return {other.name: not known.needs[1][0]}
    return {other.name: next(choice for choice in other.choices if choice not in known.needs[1])}


@cache
def learned(method: str, settings: tuple[tuple[str, Any], ...]) -> State:
    """What a method stores after a short stream, learned with these settings."""
    stream = short_stream()
    torch.manual_seed(0)
    made = stream.make(method, **{**QUICK.get(method, {}), **dict(settings)})
    return run(stream, made, 0)[1][-1].state


def same(method: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    first, second = learned(method, tuple(one.items())), learned(method, tuple(other.items()))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("method", "name"), CONDITIONAL)
def test_a_setting_does_something_exactly_where_it_is_said_to(method: str, name: str) -> None:
    known = options(bundled()[method].Settings)[name]
    assert known.needs is not None
    met, other = {known.needs[0]: known.needs[1][0]}, {name: changed(known)}
    assert same(method, unmet(method, known), unmet(method, known) | other)
    assert not same(method, met, met | other)


#: Settings with a value of another one beside which they are of no consequence.
EXCLUDED = [
    (method, name)
    for method, cls in bundled().items()
    for name, known in options(cls.Settings).items()
    if known.unless is not None
]


@pytest.mark.parametrize(("method", "name"), EXCLUDED)
def test_a_setting_does_nothing_exactly_where_it_is_said_not_to(method: str, name: str) -> None:
    known = options(bundled()[method].Settings)[name]
    assert known.unless is not None
    beside, other = {known.unless[0]: known.unless[1]}, {name: changed(known)}
    assert same(method, beside, beside | other)
    assert not same(method, {}, other)


def test_conditions_name_settings_and_their_values() -> None:
    assert len(CONDITIONAL) > 15
    assert EXCLUDED
    for cls in bundled().values():
        known = options(cls.Settings)
        for option in known.values():
            if option.needs is not None and option.needs[0] in known:
                for value in option.needs[1]:
                    assert known[option.needs[0]].check(value) == value
            if option.unless is not None:
                assert known[option.unless[0]].check(option.unless[1]) == option.unless[1]
