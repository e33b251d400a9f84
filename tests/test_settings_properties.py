"""Settings of any kind mean the same written as YAML, as flags, or with what the preset says spelled out."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st

from efcil import methods
from efcil.cli import build_parser
from efcil.commands.run import plan
from efcil.data.augment import AUGMENTATIONS
from efcil.data.scenario import SCENARIOS
from efcil.errors import SettingsError
from efcil.network.backbones import NETWORKS
from efcil.resolution import identity, label, load_config, read_config, resolve, to_yaml, validate
from efcil.resolution.data import CHOICES
from efcil.resolution.unused import unused_overrides, without_unused
from efcil.runfolder import RunFolder, RunFolderError, locate
from efcil.settings import NAMED_CLASS_ORDERS, Option, Recipe, Settings, options
from efcil.settings.benchmark import TASK_SETTINGS
from efcil.settings.options import show

_HINDERS_NOTHING = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
MANY = settings(max_examples=40, suppress_health_check=_HINDERS_NOTHING)
NAMES: dict[str, Any] = {
    "method": methods.available(),
    "dataset": ("digits", "cifar100"),
    "scenario": [name for name in SCENARIOS if name != "custom"],
    "class_order": NAMED_CLASS_ORDERS,
    "network": NETWORKS,
    "augmentation": AUGMENTATIONS,
    "device": ("auto", "cpu", "cuda", "cuda:1"),
    "classifier": ("own",),
}
#: These belong to other sources, or need each other; they are drawn apart or left out.
LEFT_OUT = ("data", *TASK_SETTINGS, "held_out", "image_size", "overrides", *CHOICES, "images_per_class")


def values(option: Option) -> st.SearchStrategy[Any]:
    """Return the values that an option may have, made from its own definition."""
    choices = NAMES.get(option.name, option.choices)
    if choices is not None:
        return st.sampled_from(list(choices))
    kinds = [option.annotation]
    if isinstance(option.annotation, types.UnionType):
        kinds = [kind for kind in typing.get_args(option.annotation) if kind is not type(None)]
    least, most = option.minimum, option.maximum
    found: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(int(least or 0), 10**9 if most is None else int(most)),
        float: st.floats(least or 0, most, allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
    }
    numbers = st.sets(st.integers(1, 500), max_size=3).map(lambda steps: tuple(sorted(steps)))
    return found.get(kinds[0], numbers)


@st.composite
def any_settings(draw: st.DrawFn) -> Settings:
    """Return settings that can be resolved, few of them not left to the preset."""
    known = options(Settings)
    names = draw(st.sets(st.sampled_from([name for name in known if name not in LEFT_OUT]), max_size=5))
    chosen = {name: draw(values(known[name])) for name in sorted(names)}
    own = options(methods.get(chosen.get("method", "efc")).Settings)
    more = own | {f"{stage}.{name}": o for stage in ("first_task", "later") for name, o in options(Recipe).items()}
    overridden = draw(st.sets(st.sampled_from(sorted(more)), max_size=3))
    overrides = {name: draw(values(more[name])) for name in sorted(overridden)}
    if "scenario" not in chosen and draw(st.booleans()):
        chosen |= {"scenario": "custom", "tasks": draw(st.integers(1, 99))}
    try:
        return validate(Settings(**chosen, overrides=overrides))
    except SettingsError:  # some methods' settings exclude each other
        reject()


def as_flags(wanted: Settings) -> list[str]:
    given: list[str] = []
    for name, option in options(Settings).items():
        value = getattr(wanted, name)
        if name == "overrides":
            given += [word for item in value.items() for word in ("--set", f"{item[0]}={show(item[1])}")]
        elif option.annotation is bool:
            given.append(option.flags if value else option.flags.replace("--", "--no-", 1))
        elif value is not None and not (name == "scenario" and wanted.tasks is not None):
            given += [option.flags, show(value)]
    return given


@given(wanted=any_settings(), data=st.none() | st.text(st.characters(), min_size=1))
@example(wanted=Settings(), data="a line break\x85that YAML folds")
@example(wanted=Settings(), data="caf\udce9")
@MANY
def test_yaml_round_trips(wanted: Settings, data: str | None, tmp_path: Path) -> None:
    wanted = dataclasses.replace(wanted, data=data)
    file = tmp_path / "settings.yaml"
    file.write_bytes(to_yaml(wanted).encode())
    assert load_config(file) == [wanted]
    file.write_bytes(to_yaml(wanted, resolved=identity(wanted)).encode())
    assert load_config(file) == [wanted], "and the record of a run"


@given(wanted=any_settings())
@MANY
def test_flags_round_trip(wanted: Settings) -> None:
    while unused_overrides(wanted):  # would be refused; without it, something else may have no use any more
        wanted = without_unused(wanted)
    if wanted.class_order != "efc":  # so would a seed of it
        wanted = dataclasses.replace(wanted, class_seed=None)
    parser, _ = build_parser()
    assert plan(parser.parse_args(["run", *as_flags(wanted)])) == [wanted]


@given(wanted=any_settings())
@MANY
def test_what_the_preset_says_can_be_spelled_out(wanted: Settings) -> None:
    """The same run has one identity and one place, however much of it is said."""
    resolved = resolve(wanted)
    recipes = {
        f"{stage}.{name}": getattr(getattr(resolved, stage), name)
        for stage in ("first_task", "later")
        for name in options(Recipe)
    }
    own = {name: getattr(resolved.method, name) for name in options(type(resolved.method))}
    explicit = dataclasses.replace(
        wanted,
        network=resolved.network,
        augmentation=resolved.augmentation,
        epochs=None,
        first_task_epochs=None,
        batch_size=None,
        overrides=recipes | own,
        device="cpu",
    )
    assert identity(explicit) == identity(wanted)


@given(wanted=any_settings())
@MANY
def test_labels_are_names_of_folders(wanted: Settings) -> None:
    name = label(wanted)
    assert re.fullmatch(r"[\w.=,+-]{1,80}", name, re.ASCII)
    assert name.startswith(wanted.method)
    assert label(dataclasses.replace(wanted, device="cpu", seed=wanted.seed + 1)) == name
    text = {name: show(value) for name, value in wanted.overrides.items()}
    assert label(dataclasses.replace(wanted, overrides=text)) == name, "as it was typed"


@given(one=any_settings(), other=any_settings(), share=st.booleans())
@MANY
def test_one_place_never_holds_two_runs(one: Settings, other: Settings, share: bool, tmp_path_factory: Any) -> None:
    if share:  # otherwise they hardly ever meet
        other = dataclasses.replace(one, epochs=other.epochs, network=other.network, class_order=other.class_order)
    if identity(one) == identity(other):
        return
    assert locate("runs", one).path != locate("runs", other).path
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    folder.write_settings(one)
    with pytest.raises(RunFolderError, match="other settings"):
        folder.write_settings(other)


@given(content=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
@MANY
def test_files_of_any_content_are_read_or_refused_in_words(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_bytes(content)
    try:
        read_config(file)
    except SettingsError as error:
        assert str(file) in str(error)  # noqa: PT017 - reading may succeed too
