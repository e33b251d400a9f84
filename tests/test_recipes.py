"""The two recipes of a preset: that of the papers, and the modern one, which is the same for all methods."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from efcil.data.augment import make_augmentation
from efcil.errors import SettingsError
from efcil.methods import incremental
from efcil.presets import load_preset, parse_preset, presets
from efcil.resolution import identity, label, load_config, resolve, to_yaml
from efcil.settings import Settings

WITH_MODERN = [name for name in presets() if load_preset(name).modern is not None]
TABLE = ("lwf", "efc", "efc++", "ldc", "adagauss", "dpcr", "apr", "cedar")


def cifar(method: str, recipe: str | None = None) -> Settings:
    return Settings(method=method, dataset="cifar100", scenario="cs10", recipe=recipe)


def test_which_presets_have_it() -> None:
    assert WITH_MODERN == ["cifar10", "cifar100", "tiny-imagenet"]


@pytest.mark.parametrize("method", TABLE)
def test_all_methods_of_the_table_are_trained_alike(method: str) -> None:
    found, ours = resolve(cifar(method, "modern")), resolve(cifar("cedar"))
    assert (found.augmentation, found.first_task) == ("crop-flip-trivial", ours.first_task)
    own = {"batch_size": 256, "gradient_clip": 1.0} if method == "adagauss" else {}
    assert found.later == replace(ours.later, **own)


def test_values_are_those_of_the_leads() -> None:
    first, later = resolve(cifar("cedar")).first_task, resolve(cifar("cedar")).later
    for recipe in (first, later):
        assert (recipe.optimiser, recipe.momentum, recipe.schedule) == ("sgd", 0.9, "cosine")
        assert (recipe.gradient_clip, recipe.normalisation, recipe.epochs) == (5.0, "trained", 100)
        assert recipe.milestones == ()
    assert (first.learning_rate, first.weight_decay, first.rotations) == (0.1, 5e-4, True)
    assert (later.learning_rate, later.weight_decay, later.rotations) == (0.01, 2e-4, False)


@pytest.mark.parametrize("dataset", WITH_MODERN)
def test_augmentation_is_strong_in_training_and_weak_in_statistics(dataset: str) -> None:
    modern = load_preset(dataset).modern
    assert modern is not None
    known = make_augmentation(modern.augmentation)
    assert known.weak != known


@pytest.mark.parametrize("method", sorted(incremental()))
def test_runs_without_it_keep_name_and_identity(method: str) -> None:
    usual = "modern" if method == "cedar" else "paper"
    assert label(cifar(method)) == label(cifar(method, usual)) == method
    assert identity(cifar(method)) == identity(cifar(method, usual))
    assert "recipe" not in identity(cifar(method))


def test_names_and_identities_tell_them_apart() -> None:
    assert label(cifar("lwf", "modern")) == "lwf+recipe=modern"
    assert label(cifar("cedar", "paper")) == "cedar+recipe=paper"
    assert identity(cifar("lwf", "modern")) != identity(cifar("lwf"))
    paper, plus = resolve(cifar("cedar", "paper")), resolve(cifar("efc++"))
    assert (paper.augmentation, paper.first_task, paper.later) == (plus.augmentation, plus.first_task, plus.later)


def test_flags_and_settings_override_it() -> None:
    settings = replace(cifar("efc", "modern"), epochs=7, augmentation="crop-flip", overrides={"later.momentum": 0.5})
    found = resolve(settings)
    assert (found.augmentation, found.first_task.epochs, found.later.epochs) == ("crop-flip", 7, 7)
    assert (found.later.momentum, found.first_task.momentum) == (0.5, 0.9)


def test_it_survives_yaml(tmp_path: Path) -> None:
    settings = cifar("efc", "modern")
    file = tmp_path / "settings.yaml"
    file.write_text(to_yaml(settings, identity(settings)), encoding="utf-8")
    (again,) = load_config(file)
    assert again == settings


def test_a_dataset_without_it_says_which_have_one() -> None:
    with pytest.raises(SettingsError, match="digits has no recipe 'modern'; cifar10, cifar100, tiny-imagenet have one"):
        resolve(Settings(method="lwf", recipe="modern"))
    assert resolve(Settings(method="cedar")).later == resolve(Settings(method="efc++")).later, "there is no other"
    with pytest.raises(SettingsError, match="modern"):
        Settings(recipe="modem")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("modern: 3", "names an augmentation"),
        ("modern: {augmentation: none, firts_task: {}}", "firts_task"),
        ("modern: {augmentation: none, first_task: {epoch: 3}, later: {}}", "modern: first_task"),
        ("modern: {augmentation: none, first_task: {}, later: 5}", "modern: later"),
    ],
)
def test_mistakes_in_a_preset_are_named(text: str, says: str) -> None:
    rest = "network: slim\naugmentation: none\nfirst_task: {}\nlater: {}\n"
    with pytest.raises(SettingsError, match=says):
        parse_preset(rest + text, "mine", "presets/mine.yaml")
