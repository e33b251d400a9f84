"""Cosine heads, from the first task to exported models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from efcil import methods
from efcil.cli import main
from efcil.engine import lifecycle
from efcil.engine.evaluate import scorer
from efcil.errors import SettingsError
from efcil.experiment.shared_tasks import describe
from efcil.methods.base import Method
from efcil.methods.finetune import FineTune
from efcil.model import Model
from efcil.network.incremental import IncrementalNetwork
from efcil.network.resnet import ResNet
from efcil.resolution import resolve
from efcil.resolution.unused import unused_overrides
from efcil.settings import Recipe, Settings
from efcil.testing.compare import clone
from efcil.testing.stream import FIRST, FUSED, PLAIN, SHORT, Stream, blueprint, fitting, make_stream

COSINE = replace(FIRST, epochs=3, optimiser="sgd", learning_rate=0.1, momentum=0.9, head="cosine")


def stream_with(**recipe: Any) -> Stream:
    return make_stream((4, 1, 3), per_class=21, batch_size=SHORT.batch_size, first=replace(COSINE, **recipe))


@pytest.fixture(scope="module")
def cosine() -> Stream:
    return stream_with()


def expected_scores(method: Method, images: torch.Tensor) -> torch.Tensor:
    network = method.network
    assert network.cosine_scale is not None
    weight = functional.normalize(network.head_weight(), dim=1)
    return network.cosine_scale * functional.normalize(network.features(images), dim=1) @ weight.T


def test_heads_are_linear_unless_asked() -> None:
    network = IncrementalNetwork(ResNet((4, 8), (1, 1)))
    network.add_head(3)
    features = torch.randn(5, 8)
    assert network.cosine_scale is None
    assert torch.equal(network.logits(features), functional.linear(features, network.head_weight()))
    assert not [name for name in network.state_dict() if "scale" in name]
    assert [parameter.shape for parameter in network.head_parameters()] == [(3, 8)]


@pytest.mark.parametrize("rotations", [True, False])
def test_a_learned_scale_is_learned_and_a_fixed_one_is_not(rotations: bool) -> None:
    learned = stream_with(rotations=rotations).network_state
    fixed = stream_with(rotations=rotations, head_scale=4.0).network_state
    assert float(learned["head_scale"]) > 1.05
    assert "fixed_head_scale" not in learned
    assert float(fixed["fixed_head_scale"]) == 4.0
    assert "head_scale" not in fixed
    assert not torch.equal(learned["heads.0"], fixed["heads.0"])


@pytest.mark.parametrize("name", [name for name, each in methods.bundled().items() if each.cosine_heads])
def test_methods_learn_with_them(cosine: Stream, name: str) -> None:
    """Three tasks are learned, also from saved states, and the heads' scores are scaled cosines."""
    if methods.get(name).traits(methods.get(name).Settings()).images == "all":
        pytest.skip("the engine trains it as one first task")
    quick = {"efc++": {"rebalance_epochs": 3}, "cedar": {"rebalance_epochs": 3}, "ldc": {"map_epochs": 2}}
    method = cosine.start(name, **quick.get(name, {}))
    before = None if method.network.head_scale is None else method.network.head_scale.item()
    cosine.learn(method, 1, SHORT)
    again = blueprint(name, method.settings).load(clone(method.state_dict()))
    for each in (method, again):
        task, data = cosine.tasks[2], cosine.images(2)
        lifecycle.learn_task(blueprint(name, each.settings), each, task, data, fitting(each, SHORT))
    for key, value in method.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    images = cosine.test_images[:9]
    if method.about.decides_by_heads:
        torch.testing.assert_close(method.scores(images), expected_scores(method, images).detach())
        if method.about.trains_later:
            assert method.network.head_scale.item() != before


class Scaled(FineTune):
    """A method with a scale of its own, which has nothing to do with the heads."""

    def __init__(self, network: IncrementalNetwork, settings: Any = None) -> None:
        super().__init__(network, settings)
        self.keep("head_scale", torch.full((1,), 3.0), why="a test")


def test_a_methods_own_buffer_of_that_name_leaves_the_heads_linear() -> None:
    plan = replace(blueprint("finetune", FineTune.Settings()), method=Scaled)
    method = plan.bare([2, 1])
    again = plan.load(clone(method.state_dict()))
    assert again.network.head_sizes == [2, 1]
    assert again.network.cosine_scale is None
    assert float(again.head_scale) == 3.0  # type: ignore[arg-type]


def test_plain_and_fused_paths_agree(cosine: Stream) -> None:
    found = []
    for execution in (PLAIN, FUSED):
        method = cosine.start("lwf")
        recipe = replace(SHORT, optimiser="sgd", learning_rate=1e-3, epochs=1)
        cosine.train(method, 1, recipe, execution)
        found.append(clone(method.state_dict()))
    for key in ("network.head_scale", "network.heads.1", "network.heads.0"):
        torch.testing.assert_close(found[1][key], found[0][key], rtol=1e-3, atol=1e-5)


def test_a_fixed_scale_stays_for_all_tasks() -> None:
    stream = stream_with(head_scale=4.0)
    method = stream.learn(stream.start("efc++", rebalance_epochs=2), 1, SHORT)
    assert float(method.network.cosine_scale) == 4.0  # type: ignore[arg-type]
    assert "network.fixed_head_scale" in method.state_dict()


def test_rebalancing_helps_cosine_heads(cosine: Stream) -> None:
    """Old classes are answered at all after heads were re-balanced, by the method itself and by the classifier."""
    plain, balanced = (cosine.start("efc++", rebalance_epochs=epochs) for epochs in (0, 30))
    for method in (plain, balanced):
        cosine.learn(method, 1, replace(SHORT, epochs=4))
    old = cosine.test_images[cosine.test_labels < 4]
    heads = [(method.scores(old).argmax(dim=1) < 4).float().mean() for method in (plain, balanced)]
    assert heads[1] >= heads[0]
    rebalanced = scorer(plain, "rebalanced")(old)
    assert rebalanced.shape == plain.scores(old).shape
    assert rebalanced.abs().max() <= plain.network.cosine_scale.item() * 1.001  # type: ignore[union-attr]


def test_methods_that_cannot_say_so() -> None:
    with pytest.raises(SettingsError, match=r"'pass' is written for linear heads.*takes both: .*lwf"):
        resolve(Settings(method="pass", overrides={"first_task.head": "cosine"}))
    assert resolve(Settings(method="lwf", overrides={"first_task.head": "cosine"})).first_task.head == "cosine"


def test_settings_without_effect_are_reported() -> None:
    run = Settings(method="lwf", overrides={"later.head": "cosine"})
    assert "first task" in unused_overrides(run)["later.head"]
    run = Settings(method="lwf", overrides={"first_task.head_scale": 3.0})
    assert "Set first_task.head=cosine too" in unused_overrides(run)["first_task.head_scale"]


def test_first_tasks_with_linear_heads_keep_their_keys() -> None:
    def recipe_of(**values: Any) -> dict[str, Any]:
        facts = describe("data", [0], "slim", "none", Recipe(**values), 0, {})
        return facts["recipe"]

    assert not {"head", "head_scale", "ema", "label_smoothing"} & set(recipe_of())
    assert recipe_of(head="cosine", head_scale=3.0)["head_scale"] == 3.0


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs")
    arguments = ["--method", "lwf", "--tasks", "3", "--epochs", "1", "--device", "cpu", "--output", str(output)]
    assert main(["run", *arguments, "--set", "first_task.head=cosine"]) == 0
    (model,) = output.rglob("model.json")
    return model.parent


def test_the_model_of_a_run_is_read_and_audited_as_any_other(run_folder: Path, capsys: Any) -> None:
    model = Model.load(run_folder, "cpu")
    assert model.ready.network.head_scale is not None
    assert main(["inspect", str(run_folder)]) == 0
    assert "head scale" in capsys.readouterr().out


def test_onnx_agrees(run_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="needs the onnx extra")
    runtime = pytest.importorskip("onnxruntime", reason="needs the onnx extra")
    pytest.importorskip("onnxscript", reason="needs the onnx extra")
    file = tmp_path / "digits.onnx"
    assert main(["export", str(run_folder), "--to", "onnx", "--output", str(file)]) == 0
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    images = np.random.default_rng(1).integers(0, 256, (5, 8, 8, 3), np.uint8)
    (scores,) = session.run(["scores"], {"images": images})
    np.testing.assert_allclose(scores, Model.load(run_folder, "cpu").scores(images), atol=1e-4)
