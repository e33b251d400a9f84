"""BiCyc: maps in both directions while the network trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import SHORT, short_stream
from torch.nn import functional

from efcil.methods.bicyc import BidirectionalCycle, geometry
from efcil.resolution import resolve
from efcil.settings import Settings

SMALL: dict[str, Any] = {"bottleneck": 6, "width": 32, "adapter_epochs": 3, "adapter_samples": 300}


def begun() -> BidirectionalCycle:
    stream = short_stream()
    method = stream.start("bicyc", **SMALL)
    assert isinstance(method, BidirectionalCycle)
    method.begin_task(stream.tasks[1])
    return method


def test_the_loss_is_what_the_paper_says() -> None:
    method = begun()
    batch = short_stream().batch(method, 1)
    terms = method.loss(batch)
    distiller, onward = method.distiller, method.forward_map
    assert distiller is not None
    assert onward is not None
    new, old = method.embed(batch.images), batch.frozen["features"]
    mse = functional.mse_loss
    torch.testing.assert_close(terms["distillation"], 5 * (mse(distiller(new), old) + mse(onward(old), new)))
    cycles = mse(onward(distiller(new)), new) + mse(distiller(onward(old)), old)
    torch.testing.assert_close(terms["cycle"], 2 * cycles)
    cosines = geometry(new, onward(old)) + geometry(old, distiller(new))
    torch.testing.assert_close(terms["geometry"], 0.05 * cosines)


def test_only_the_distiller_trains_the_network() -> None:
    """The cycles reach no weight of the network; the alignment does, by what the distiller makes of new features."""
    method = begun()
    batch = short_stream().batch(method, 1)
    weights = list(method.network.backbone.parameters())
    terms = method.loss(batch)
    reached = torch.autograd.grad(terms["cycle"], weights, allow_unused=True, retain_graph=True)
    assert all(gradient is None for gradient in reached)
    reached = torch.autograd.grad(terms["distillation"], weights, allow_unused=True)
    assert any(gradient is not None and bool((gradient != 0).any()) for gradient in reached)


def test_geometry_compares_cosines() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 4, generator=generator)
    assert float(geometry(rows, 3.0 * rows)) == pytest.approx(0.0, abs=1e-10)
    turned, _ = torch.linalg.qr(torch.randn(4, 4, generator=generator))
    assert float(geometry(rows, rows @ turned)) == pytest.approx(0.0, abs=1e-10)
    other = rows.clone()
    other[150:] = -other[150:]  # only the first 128 are compared
    assert float(geometry(rows, other)) == 0.0
    other[0] = -other[0]
    assert float(geometry(rows, other)) > 0.0


def test_the_adapter_begins_as_the_map_that_was_trained() -> None:
    stream, method = short_stream(), begun()
    assert method.forward_map is not None
    adapter = method._new_adapter(stream.tasks[1])
    assert adapter is not method.forward_map
    for one, other in zip(adapter.parameters(), method.forward_map.parameters(), strict=True):
        assert torch.equal(one, other)


def test_nothing_of_the_maps_stays() -> None:
    stream = short_stream()
    method = stream.learn(stream.start("bicyc", **SMALL), 1, SHORT)
    assert not [name for name in method.state_dict() if "map" in name or "distiller" in name]


def test_the_published_recipe_is_its_own() -> None:
    found = resolve(Settings(method="bicyc", dataset="cifar100", scenario="cs10"))
    assert found.augmentation == "crop-flip-trivial"
    assert (found.first_task.epochs, found.first_task.learning_rate, found.first_task.rotations) == (200, 0.1, True)
    assert (found.later.epochs, found.later.batch_size, found.later.learning_rate) == (200, 256, 0.01)
    assert found.later.gradient_clip == 1.0


def test_tiny_imagenet_is_cropped_and_mirrored_alone() -> None:
    found = resolve(Settings(method="bicyc", dataset="tiny-imagenet", scenario="cs10"))
    assert found.augmentation == "crop-flip-8"
