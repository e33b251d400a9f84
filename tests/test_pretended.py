"""The pretended GPU refuses what CUDA refuses, and what is not a method of its own stays on its device there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from efcil import IncrementalClassifier
from efcil.core import classifiers
from efcil.data.augment import AUGMENTATIONS, Normalisation, make_augmentation
from efcil.data.deferred import DeferredImages, FileSupply, Shapes
from efcil.data.scenario import make_scenario
from efcil.data.tiers import TIERS, Keeping
from efcil.data.whole import task_images
from efcil.engine import lifecycle
from efcil.engine.capture import CapturedStepRunner
from efcil.engine.evaluate import TestImages, evaluate, scorer
from efcil.engine.execution import Execution
from efcil.methods import get
from efcil.testing import METHOD_CHECKS, Trial, on_trial
from efcil.testing.pretended import missing, pretended
from efcil.testing.stream import SHORT, blueprint, short_stream

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

#: Settings that change what is computed; those of one line do not exclude each other.
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("cedar", {"transport_maps": "class", "transport_ridge": "whitened", "pseudo_old_targets": "gaussian"}),
    ("cedar", {"transport_maps": "shift", "efm_on": "gaussians", "pseudo_old_sources": "near"}),
    ("cedar", {"efm_on": "pseudo-old", "covariance": "low-rank", "pseudo_old_choice": "nearest"}),
    ("cedar", {"pseudo_old": False, "prototype_update": "efm", "covariance": "task"}),
    ("efc", {"prototype_update": "linear-residual", "covariance": "low-rank"}),
    ("efc", {"regulariser": "features", "prototype_update": "linear", "covariance": "diagonal"}),
    ("efc", {"loss": "symmetric", "covariance": "last-task"}),
    ("efc++", {"prototype_update": "linear", "covariance": "task"}),
]
EVERYTHING = replace(
    SHORT, epochs=1, rotations=True, mixing=1, contrast=0.3, ema=0.9, label_smoothing=0.1, gradient_clip=1.0
)


@pytest.fixture
def device() -> Iterator[torch.device]:
    with pretended() as found:
        yield found


@pytest.fixture
def there(device: torch.device) -> Tensor:
    return torch.randn(4, 3, device=device)


HERE, ROWS, NUMBER = torch.randn(4, 3), torch.tensor([0, 2]), torch.tensor(2.0)


def layer(like: Tensor) -> nn.Linear:
    return nn.Linear(3, 2).to(like.device)


@pytest.mark.parametrize(
    "refused",
    [
        lambda there: there + HERE,
        lambda there: HERE + there.sum(),
        lambda there: HERE.clone().add_(there),
        lambda there: NUMBER.clone().add_(there.sum()),
        lambda there: torch.cat([there, HERE]),
        lambda there: torch.stack([there.sum(), NUMBER]),
        lambda there: there @ HERE.T,
        lambda there: layer(there)(HERE),
        lambda there: functional.cross_entropy(there, torch.zeros(4, dtype=torch.int64)),
        lambda there: HERE[ROWS.to(there.device)],
        lambda there: there.index_select(0, ROWS),
        lambda there: there.__setitem__(ROWS, HERE[:2]),
        lambda there: torch.where(HERE > 0, there, there),
        lambda there: there + torch.arange(3),
        lambda there: torch.add(there, there, out=HERE.clone()),
        lambda there: torch.autograd.grad(there.requires_grad_().square().sum(), there)[0] + HERE,
        lambda there: setattr(layer(there).weight, "grad", torch.zeros(2, 3)),
        lambda there: there.numpy(),
        lambda there: torch.randn(3, generator=torch.Generator(there.device)),
        lambda there: torch.randn(3, generator=torch.Generator(), device=there.device),
        lambda there: there.uniform_(generator=torch.Generator()),
    ],
)
def test_devices_do_not_mix(there: Tensor, refused: Callable[[Tensor], object]) -> None:
    with pytest.raises((RuntimeError, TypeError), match=r"cuda:0|device type"):
        refused(there)


@pytest.mark.parametrize(
    "allowed",
    [
        lambda there: there * NUMBER,
        lambda there: NUMBER / there,
        lambda there: torch.where(there > 0, NUMBER, there),
        lambda there: there[ROWS],
        lambda there: there + HERE.to(there),
        lambda there: there + torch.as_tensor(HERE, device=there.device),
        lambda there: there.clone().copy_(HERE),
        lambda there: layer(there)(there),
        lambda there: torch.zeros_like(HERE, device=there.device) + there,
        lambda there: torch.randn(3, generator=torch.Generator(there.device), device=there.device) + there,
    ],
)
def test_what_cuda_allows_stays_on_the_device(there: Tensor, allowed: Callable[[Tensor], Tensor]) -> None:
    assert allowed(there).is_cuda
    assert not HERE.is_cuda
    assert torch.equal(there.cpu() + HERE, HERE + there.cpu())


def test_memory_is_counted_once_the_device_is_in_use(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="did you call init"):
        torch.cuda.reset_peak_memory_stats(device)
    HERE.to(device)
    torch.cuda.reset_peak_memory_stats(device)


def test_gradients_are_those_of_the_cpu(device: torch.device) -> None:
    module = nn.Linear(3, 2)
    module(HERE).square().sum().backward()
    expected = module.weight.grad
    module.zero_grad()
    module.to(device)(HERE.to(device)).square().sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.is_cuda
    assert torch.equal(module.weight.grad.cpu(), expected)


@pytest.mark.parametrize(
    "refused",
    [
        lambda there: there.sum().item(),
        lambda there: there.cpu(),
        lambda there: there[there > 0],
        lambda there: there[[0, 2]],
        lambda there: functional.one_hot((there > 0).long(), 2),
        lambda there: torch.linalg.cholesky_ex(there.T @ there),
        lambda there: there.copy_(HERE),
        lambda there: there + HERE.to(there.device),
        lambda there: torch.tensor([1.0], device=there.device),
        lambda there: there.normal_(generator=torch.Generator(there.device)),
    ],
)
def test_a_captured_step_waits_for_nothing(there: Tensor, refused: Callable[[Tensor], object]) -> None:
    runner = CapturedStepRunner(there.device, 1)
    for _ in range(3):
        runner.run(lambda place, length: refused(there), 0, 1)  # type: ignore[arg-type, return-value]
    with pytest.raises(RuntimeError, match="captured step"):
        runner.run(lambda place, length: refused(there), 0, 1)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("name", "settings"),
    SETTINGS,
    ids=lambda given: given if isinstance(given, str) else "-".join(map(str, given.values())),
)
def test_settings_stay_on_the_device(name: str, settings: dict[str, Any]) -> None:
    (check,) = (each for each in METHOD_CHECKS if each.name == "stays_on_the_device")
    trial = on_trial(get(name))
    check(Trial(trial.method, replace(trial.settings, **settings)))


@pytest.mark.parametrize(("head", "fused"), [("linear", True), ("cosine", False)])
def test_terms_of_a_recipe_and_classifiers_stay_on_the_device(device: torch.device, head: str, fused: bool) -> None:
    stream, execution = short_stream(), Execution(device, half=False, fused=fused, captured=True)
    plan = blueprint("cedar", on_trial(get("cedar")).settings, execution)
    recipe, method = replace(EVERYTHING, head=head), None
    with execution.stream():
        for index in (0, 1, 2):
            data = stream.images(index, execution)
            method = lifecycle.learn_task(plan, method, stream.tasks[index], data, recipe)
        assert method is not None
        images = stream.test_images[:8].to(device)
        for name in classifiers.possible(method.about.keeps):
            assert scorer(method, name)(images).is_cuda, name
        labels = stream.test_labels.numpy()
        tests = TestImages(
            np.zeros((len(labels), 8, 8, 3), np.uint8), labels, normalisation=stream.normalisation, device=device
        )
        found = evaluate(method, tests, make_scenario("cs5", 10, order=range(10)), 3, "both", views=2)
    assert sum(found.images) == tests.count(len(found.images))


@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
def test_images_are_rendered_on_the_device(device: torch.device, tmp_path: Path, augmentation: str) -> None:
    random, paths = np.random.default_rng(0), [tmp_path / f"{number}.png" for number in range(9)]
    for number, path in enumerate(paths):
        Image.fromarray(random.integers(0, 256, (9 + number, 12, 3), dtype=np.uint8)).save(path)
    photographs = DeferredImages.of(FileSupply(paths), Shapes(8, 60))
    for tier in TIERS:
        for images in (np.asarray(photographs), photographs):
            data = task_images(
                images, np.zeros(9), augmentation=make_augmentation(augmentation),
                normalisation=Normalisation((0.4,) * 3, (0.2,) * 3), device=device, seed=1, name="t",
                keeping=Keeping(tier, tmp_path),
            )  # fmt: skip
            view = data.view("epoch", training=True)
            data.fetch(view, 0, 5)
            pieces = [data.render(view, 0, 5), *data.plain(), *data.augmented("drift")]
            assert all(tensor.is_cuda for piece in pieces for tensor in piece)


@pytest.mark.parametrize("method", ["efc", "fecam"])  # by heads, and by a classifier that is built from the memory
def test_a_model_learns_and_changes_on_the_device(device: torch.device, tmp_path: Path, method: str) -> None:
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (120, 8, 8), dtype=np.uint8), np.repeat([0, 1, 2, 3], 30)
    model = IncrementalClassifier(method, preset="digits", epochs=1, device="cuda", held_out=0.3)
    model.fit(images[:60], labels[:60]).partial_fit(images[60:], labels[60:])
    model.save(tmp_path / "model")
    loaded = IncrementalClassifier.load(tmp_path / "model", device="cuda")
    assert np.array_equal(loaded.predict_proba(images), model.predict_proba(images))
    loaded.merge([1, 2], into=1).forget([0])
    assert set(loaded.predict(images, unknown=0.05, unknown_label=-1)) <= {1, 3, -1}
