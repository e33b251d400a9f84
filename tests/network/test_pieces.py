"""On a CPU, networks that do not train read few images at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from efcil.network import incremental
from efcil.network.backbones import make_backbone
from efcil.network.incremental import IncrementalNetwork, cpu_piece


@pytest.fixture
def network() -> IncrementalNetwork:
    return IncrementalNetwork(make_backbone("slim", 0)).eval()


@pytest.fixture
def lengths(network: IncrementalNetwork) -> list[int]:
    """How many images the backbone was given at a time."""
    found: list[int] = []

    def note(_: object, given: tuple[Tensor]) -> None:
        found.append(len(given[0]))

    network.backbone.register_forward_pre_hook(note)
    return found


def test_how_many() -> None:
    assert [cpu_piece(size) for size in (8, 32, 64, 224, 448)] == [1365, 85, 21, 6, 6]


def test_pieces_have_the_features_of_all(
    network: IncrementalNetwork, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = torch.randn(20, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = network.features(images)
        monkeypatch.setattr(incremental, "CPU_READ_BYTES", 8 * 12 * 64)
        pieces = network.features(images)
        network.input_size = 16  # images are enlarged, so that fewer are read at a time
        network.features(images[:7])
    assert lengths == [20, 8, 8, 4, 6, 1]
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-6)


def test_what_trains_sees_whole_batches(
    network: IncrementalNetwork, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incremental, "CPU_READ_BYTES", 0)
    images = torch.zeros(20, 3, 8, 8)
    network.features(images)
    network.backbone.train()  # BatchNorm takes its statistics from the batch
    with torch.no_grad():
        network.features(images)
    assert lengths == [20, 20]
