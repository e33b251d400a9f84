"""Digits and a slim network that learns them in a fraction of a second."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_hub import Hub, running
from PIL import Image
from sklearn.datasets import load_digits

from efcil.classifier import IncrementalClassifier
from efcil.model import Model

QUICK: dict[str, Any] = {"preset": "digits", "epochs": 1, "device": "cpu", "held_out": 0.0}


class Digits:
    """Grey 8 x 8 images: the first 24 of every digit to learn from, the next 24 to test with."""

    def __init__(self) -> None:
        bunch = load_digits()
        self.images = (bunch.images * 15.9).astype(np.uint8)
        self.labels: np.ndarray = bunch.target
        self.rank = np.array([np.sum(self.labels[:i] == label) for i, label in enumerate(self.labels)])

    def train(self, *digits: int) -> tuple[np.ndarray, np.ndarray]:
        return self._some(digits, 0, 24)

    def test(self, *digits: int) -> tuple[np.ndarray, np.ndarray]:
        return self._some(digits, 24, 48)

    def _some(self, digits: tuple[int, ...], start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = np.isin(self.labels, digits or range(10)) & (self.rank >= start) & (self.rank < stop)
        return self.images[chosen], self.labels[chosen]


@pytest.fixture(scope="session")
def digits() -> Digits:
    return Digits()


@pytest.fixture(scope="session")
def folders(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders as people have them: first/ and second/ with two and one digits, both/ and held-out/ with all three."""
    root = tmp_path_factory.mktemp("photos")
    for name, wanted, choose in (
        ("first", (0, 1), digits.train),
        ("second", (2,), digits.train),
        ("both", (0, 1, 2), digits.train),
        ("held-out", (0, 1, 2), digits.test),
    ):
        for number, (image, label) in enumerate(zip(*choose(*wanted), strict=True)):
            place = root / name / f"digit-{label}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{name}-{number:03}.png")
    return root


@pytest.fixture(scope="session")
def trained(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that knows three digits, learned in two tasks. Not to be changed; see `model_folder`."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    classifier = IncrementalClassifier(**QUICK).fit(*digits.train(0, 1)).partial_fit(*digits.train(2))
    classifier.save(folder)
    return folder


@pytest.fixture
def model_folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained model folder, to do with as one likes."""
    return Path(shutil.copytree(trained, tmp_path / "model"))


@pytest.fixture(scope="session")
def same() -> Callable[[Model, Model], bool]:
    """Say whether two models are equal in every bit and in everything they know but dates."""

    def compare(left: Model, right: Model) -> bool:
        first, second = left.tensors(), right.tensors()
        facts = [[(c.label, c.task, c.images) for c in model.card.classes] for model in (left, right)]
        return (
            facts[0] == facts[1]
            and first.keys() == second.keys()
            and all(
                first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
            )
        )

    return compare


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub on this machine that huggingface_hub talks to instead of the real one."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs the hub extra")
    with running() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.address)
        files = found.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield found
