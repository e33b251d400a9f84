"""Classes renamed, forgotten and merged: every method, in memory and in folders."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from efcil import methods
from efcil.classifier import IncrementalClassifier
from efcil.cli import main
from efcil.core import prototypes
from efcil.engine import checkpoint
from efcil.errors import EfcilError, SettingsError
from efcil.methods.base import Method
from efcil.methods.kept import Keeping
from efcil.methods.memory import FORMS, ClassMemory
from efcil.model import Model, ModelError, classes
from efcil.model import folder as model_folder
from efcil.model.audit import audit
from efcil.model.export import export
from efcil.model.learning import learn

QUICK: dict[str, Any] = {"preset": "digits", "epochs": 1, "device": "cpu"}
#: Every method, and settings that store other things.
VARIANTS = [
    *((name, {}) for name in methods.incremental()),
    ("efc", {"covariance": "task"}),
    ("efc", {"covariance": "last-task"}),
    ("efc", {"covariance": "low-rank"}),
    ("efc++", {"covariance": "diagonal"}),
    ("fecam", {"covariance": "common"}),
    ("fetril", {"first_step": "svm"}),
    ("fetril", {"linear": "softmax"}),
    ("pass", {"rotation_rows": "current"}),
    ("sdc", {"base": "efc"}),
]


def named(variant: tuple[str, dict[str, Any]]) -> str:
    return "-".join([variant[0], *map(str, variant[1].values())])


@pytest.fixture(scope="session")
def learned(digits: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """Return a model of a method that has learned 0 and 1, then 2, then 3 and 4; learned once, given as copies."""
    folders: dict[str, Path] = {}

    def get(method: str, settings: dict[str, Any] | None = None) -> Model:
        key = named((method, settings or {}))
        if key not in folders:
            classifier = IncrementalClassifier(method, settings=settings, **QUICK).fit(*digits.train(0, 1))
            classifier.partial_fit(*digits.train(2)).partial_fit(*digits.train(3, 4))
            folders[key] = tmp_path_factory.mktemp("learned") / "model"
            classifier.save(folders[key])
        return Model.load(folders[key], "cpu")

    return get


def pixels(images: np.ndarray) -> np.ndarray:
    return np.repeat(images[..., None], 3, axis=3)


def saved_and_loaded(model: Model, folder: Path) -> Model:
    model.save(folder)
    again = Model.load(folder, "cpu")
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), np.uint8)
    assert np.array_equal(again.scores(images), model.scores(images))
    assert again.scores(images).shape == (5, len(model.card.classes))
    return again


@pytest.mark.parametrize("variant", VARIANTS, ids=named)
def test_every_method_forgets_and_continues(
    variant: tuple[str, dict[str, Any]], learned: Any, digits: Any, folders: Path, tmp_path: Path
) -> None:
    """A whole task and a class of another one are forgotten; then it is saved, loaded, exported and taught."""
    model = learned(*variant)
    images = pixels(digits.test(0, 1, 2, 3, 4)[0])
    before, kept = model.tensors(), [1, 4]
    scores = model.scores(images)
    result = classes.forget(model, [0, 2, 3])
    assert result.images == 72
    assert result.removed["class heads"] == 3 * before["network.heads.0"].shape[1]
    assert model.card.labels == [1, 4]
    assert model.card.task_sizes == [1, 0, 1]
    assert [(each.task, each.images) for each in model.card.classes] == [(0, 24), (2, 24)]
    assert (model.card.visits[-1].kind, model.card.visits[-1].classes) == ("forget", 3)
    if variant[0] != "dpcr" and model.card.settings.classifier == "own":  # dpcr solves its classifier anew
        np.testing.assert_allclose(model.scores(images), scores[:, kept], rtol=1e-4, atol=1e-4)
    assert_rows(model.ready, 2)
    model = saved_and_loaded(model, tmp_path / "model")
    found = audit(tmp_path / "model", numbered(folders, tmp_path))
    assert not found.failed, found.verdict
    if named(variant) in ("efc", "fecam", "fetril"):
        export(model, "torch", tmp_path / "model.pt2")
    for digit in (5, 2):  # a new class, and a forgotten one
        learn(model, pixels(digits.train(digit)[0]), [digit] * 24)
    assert model.card.labels == [1, 4, 5, 2]
    assert_rows(model.ready, 4)
    if model.ready.about.learns_more and model.ready.memory.blends:
        learn(model, pixels(digits.train(4)[0]), [4] * 24, more=True)
    saved_and_loaded(model, tmp_path / "model")


def numbered(folders: Path, tmp_path: Path) -> Path:
    """Images of class 1, in a folder called after it."""
    shutil.copytree(folders / "first" / "digit-1", tmp_path / "data" / "1")
    return tmp_path / "data"


def assert_rows(method: Method, count: int) -> None:
    """Everything that has rows per class has exactly as many as there are classes."""
    assert sum(method.network.head_sizes) == count
    for module in method.modules():
        if isinstance(module, ClassMemory):
            assert len(module.means) == count
            assert module.unused() == 0
        elif isinstance(module, Keeping):
            for name, purpose in module._purposes.items():
                if purpose.per_class:
                    value = getattr(module, name)
                    rows = len(value) if isinstance(value, torch.Tensor) else sum(len(each) for each in value)
                    assert rows in (0, count * purpose.per_class), name


@pytest.mark.parametrize("variant", VARIANTS, ids=named)
def test_every_method_merges_and_continues(
    variant: tuple[str, dict[str, Any]], learned: Any, digits: Any, tmp_path: Path
) -> None:
    model = learned(*variant)
    result = classes.merge(model, [4, 0, 2], "even")
    assert result.images == 72
    assert model.card.labels == ["even", 1, 3]
    assert model.card.task_sizes == [2, 0, 1]
    assert [each.images for each in model.card.classes] == [72, 24, 24]
    assert_rows(model.ready, 3)
    assert result.refitted == (variant[0] in ("efc", "efc++", "fd", "il2a"))
    model = saved_and_loaded(model, tmp_path / "model")
    learn(model, pixels(digits.train(5)[0]), [5] * 24)
    assert_rows(model.ready, 4)
    saved_and_loaded(model, tmp_path / "model")
