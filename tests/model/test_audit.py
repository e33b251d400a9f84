from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from safetensors.torch import save as serialise

from efcil import methods
from efcil.classifier import IncrementalClassifier
from efcil.cli import main
from efcil.data.augment import Normalisation
from efcil.engine import checkpoint
from efcil.methods.finetune import FineTune
from efcil.model import Model, matching, purposes
from efcil.model import audit as auditing
from efcil.model import folder as model_folder
from efcil.model.audit import audit
from efcil.model.membership import interval, membership

QUICK: dict[str, Any] = {"preset": "digits", "epochs": 1, "device": "cpu"}
SIZE = 16


def photographs(count: int, seed: int) -> np.ndarray:
    """Smooth random images, which is what makes telling them apart hard."""
    draw = np.random.default_rng(seed)
    small = draw.integers(0, 256, (count, 6, 6, 3), np.uint8)
    return np.stack(
        [np.asarray(Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BICUBIC)) for image in small]
    )


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train/ and test/ with two classes of random photographs."""
    root = tmp_path_factory.mktemp("photos")
    for split, seed in (("train", 1), ("test", 2)):
        for number, image in enumerate(photographs(40, seed)):
            place = root / split / ("left" if number % 2 else "right")
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{number:02}.png")
    return root


@pytest.fixture(scope="session")
def honest(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("honest") / "model"
    IncrementalClassifier(**QUICK).fit(photos / "train").save(folder)
    return folder


def plant(honest: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = load_file(next(honest.glob("*.safetensors")))
    change(tensors)
    facts = json.loads((honest / "model.json").read_text())["facts"]
    checkpoint.write(folder, tensors, facts, "model")
    return folder


def test_an_honest_model_passes(honest: Path, photos: Path, capsys: Any) -> None:
    assert main(["audit", str(honest), "--data", str(photos)]) == 0
    text = capsys.readouterr().out
    assert "Passed: no image is stored." in text
    assert "images upside down: no image" in text
    assert "class means                   1 tensors          128 numbers (64 per class)" in text
    assert "an image as the model sees it has 768 numbers" in text
    assert "by class statistics" in text
    assert main(["audit", str(honest), "--data", str(photos / "train"), "--format", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["passed"]
    assert facts["unaccounted"] == []
    assert facts["matches"]
    assert not any(match["found"] for match in facts["matches"])
    assert "give some with --held-out" in facts["no_membership"]


def test_what_was_not_looked_at_is_said(honest: Path, photos: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(photos / "train" / "left", tmp_path / "some" / "left")
    shutil.copytree(photos / "test" / "left", tmp_path / "strangers" / "nobody")
    assert main(["audit", str(honest), "--data", str(photos)]) == 0
    assert "compared with images of 2 of 2 classes, 40 of 40 images\n" in capsys.readouterr().out

    assert main(["audit", str(honest), "--data", str(tmp_path / "some")]) == 0
    text = capsys.readouterr().out
    assert "compared with images of 1 of 2 classes, 20 of 40 images; not checked: right\n" in text
    assert "Passed for these images: none of them is stored." in text
    shutil.copytree(tmp_path / "strangers" / "nobody", tmp_path / "some" / "nobody")
    shutil.copytree(photos / "train" / "right", tmp_path / "some" / "right")
    next((tmp_path / "some" / "right").iterdir()).unlink()
    assert main(["audit", str(honest), "--data", str(tmp_path / "some"), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["coverage"] == {
        "classes": 2, "of_classes": 2, "images": 39, "of_images": 40, "not_checked": [], "partly_checked": ["right"],
        "not_known": ["nobody"],
    }  # fmt: skip

    assert main(["audit", str(honest), "--data", str(tmp_path / "strangers")]) == 2
    shown = capsys.readouterr()
    assert "has images of nobody, which the model does not know; it knows left, right." in shown.err
    assert "Passed" not in shown.out


def test_a_stored_image_is_caught(honest: Path, photos: Path, tmp_path: Path, capsys: Any) -> None:
    """A method that keeps exemplars on purpose."""
    file = sorted((photos / "train" / "left").iterdir())[3]
    image = torch.from_numpy(np.array(Image.open(file)))
    kept = torch.stack([torch.zeros(3, SIZE, SIZE), image.permute(2, 0, 1).float() / 255.0])
    model = plant(honest, tmp_path / "model", lambda t: t.update(memory=kept))
    assert main(["audit", str(model), "--data", str(photos), "--format", "json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["unaccounted"] == ["memory"]
    best = facts["matches"][0]
    assert (best["tensor"], best["row"], best["side"], best["found"]) == ("memory", 1, SIZE, True)
    assert best["correlation"] > 0.999
    assert best["file"] == str(file)
    assert main(["audit", str(model), "--data", str(photos)]) == 1
    text = capsys.readouterr().out
    assert "UNEXPLAINED: memory" in text
    assert f"IS IMAGE {file}\n" in text
    assert f"FAILED: the model stores what matches an image: {file}. And memory" in text


def grey(image: np.ndarray, side: int) -> torch.Tensor:
    """An image in grey, of another size, as numbers that pixels do not have."""
    small = Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(small)).float().mean(dim=2).flatten() / 97.0 - 0.3


@pytest.mark.parametrize(
    ("name", "side", "place"),
    [
        ("memory.means", 8, lambda t: t["memory.means"][1]),
        ("feature_matrix", 64, lambda t: t["feature_matrix"].view(-1)),
    ],
)
def test_an_image_under_a_known_name_is_caught(
    name: str, side: int, place: Callable[[Any], torch.Tensor], honest: Path, photos: Path, tmp_path: Path
) -> None:
    """In place of a class mean or a matrix, smaller or larger than the model sees it: type and shape are right."""
    file = sorted((photos / "train" / "right").iterdir())[5]
    kept = grey(np.array(Image.open(file)), side)
    found = audit(plant(honest, tmp_path / "model", lambda t: place(t).copy_(kept)), photos)
    assert (found.unaccounted, found.misfits) == ([], [])
    assert found.failed
    best = found.matches[0]
    assert (best.tensor, best.side, best.file, best.found) == (name, side, str(file), True)


@pytest.mark.parametrize(
    "disguise",
    [
        lambda image: image.permute(2, 0, 1).float(),
        lambda image: image.float(),
        lambda image: Normalisation((0.5, 0.6, 0.15), (0.2, 0.3, 0.1))(
            image.permute(2, 0, 1)[None].float(), torch.float32
        ),
        lambda image: -image.permute(2, 0, 1).float() * 1e-3 + 7,
        lambda image: image.permute(2, 0, 1).float() + 12 * torch.randn(3, SIZE, SIZE, generator=torch.manual_seed(0)),
        lambda image: image.float().mean(dim=2),
        lambda image: torch.nn.functional.avg_pool2d(image.permute(2, 0, 1).float(), 2),
        lambda image: image.permute(2, 0, 1),
        lambda image: image.permute(2, 0, 1).flip(2).float(),
        lambda image: torch.from_numpy(np.array(Image.fromarray(image.numpy()).convert("L"))),
        lambda image: torch.cat([image.permute(2, 0, 1).float().flatten(), torch.zeros(17)]),
        lambda image: torch.from_numpy(np.array(Image.fromarray(image.numpy()).resize((50, 50)))).float(),
    ],
    ids=[
        "planes", "pixels", "normalised", "inverted", "noisy", "grey", "half-size", "bytes", "mirrored", "luma",
        "followed by zeros", "larger",
    ],
)  # fmt: skip
def test_near_copies(disguise: Callable[[torch.Tensor], torch.Tensor]) -> None:
    colours, files = photographs(40, 1), [Path(str(number)) for number in range(40)]
    training = (0.3 * colours + 0.7 * colours.mean(axis=3, keepdims=True)).astype(np.uint8)  # alike, as in photographs
    kept = disguise(torch.from_numpy(training[17]))
    (best,) = matching.match({"kept": kept.reshape(1, -1).contiguous()}, training, files)
    assert best.found
    assert best.file == "17"


@pytest.mark.parametrize(
    "bundle", [torch.flatten, lambda kept: kept.reshape(5, 2, -1), lambda kept: kept.reshape(-1, 64)]
)
def test_many_images_in_one_tensor(bundle: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """One after another, also across the rows of a matrix that are shorter than an image."""
    training, files = photographs(40, 1), [Path(str(number)) for number in range(40)]
    kept = bundle(torch.from_numpy(training[10:20]).permute(0, 3, 1, 2).float())
    (best,) = matching.match({"kept": kept}, training, files)
    assert best.found
    assert int(best.file) == best.row + 10


def test_an_image_that_is_the_same_upside_down() -> None:
    training, files = photographs(40, 1), [Path(str(number)) for number in range(40)]
    training[17] = np.maximum(training[17], training[17][::-1])
    kept = torch.from_numpy(training[17]).float()
    (best,) = matching.match({"kept": kept}, training, files)
    assert best.found
    assert best.upside_down > 0.999


def test_other_images_and_noise_are_not_taken_for_training_images() -> None:
    training, files = photographs(60, 1), [Path(str(number)) for number in range(60)]
    across = np.broadcast_to(np.linspace(0, 255, SIZE)[None, :, None], (SIZE, SIZE, 3))
    training[7] = 0.9 * across + 0.1 * training[7]
    stranger = torch.from_numpy(photographs(30, 3)).permute(0, 3, 1, 2).float()
    noise = torch.randn(200, 64, generator=torch.manual_seed(0))
    smooth = torch.nn.functional.avg_pool1d(noise, 7, 1, 3)
    ramp = torch.linspace(0, 1, 8).repeat(8, 1)
    stored = {"stranger": stranger, "noise": noise, "smooth": smooth, "average": stranger.mean(dim=0), "ramp": ramp}
    stored |= {"constant": torch.ones(100), "nan": torch.full((64,), torch.nan)}
    found = matching.match(stored, training, files)
    assert {one.tensor for one in found} == set(stored)
    best = {one.tensor: one.correlation for one in found}
    assert best["ramp"] > matching.MATCH, "a simple pattern resembles some image"
    assert not any(one.found for one in found)


# -- numbers that no model has ---------------------------------------------------------------------------------------


def pixels_in(tensors: dict[str, torch.Tensor], scale: float) -> None:
    """A corner of an image in place of a class mean, where the comparison with whole images does not see it."""
    tensors["memory.means"][1] = (
        torch.from_numpy(photographs(1, 9)[0, :4, :5].flatten()[:60]).float().repeat(2)[:64] / scale
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: pixels_in(t, 1.0), "row 1 of the tensor 'memory.means' has"),
        (lambda t: pixels_in(t, 255.0), "row 1 of the tensor 'memory.means' has"),
        (lambda t: t["memory.covariances"][1].copy_(torch.rand(64, 64)), "class covariance 1 is invalid"),
        (
            lambda t: t["memory.covariances"][0].copy_(2 * torch.eye(64).flip(0)),
            "class covariance 0 is invalid",
        ),
        (
            lambda t: t.update({"memory.covariances": t["memory.covariances"].repeat(3, 1, 1)}),
            "the tensor 'memory.covariances' has shape (6, 64, 64), but 2 classes need at most (2, 64, 64)",
        ),
        (
            lambda t: t.update({"memory.covariance_of": torch.arange(100)}),
            "the tensor 'memory.covariance_of' has shape (100,), but 2 classes need at most (2,)",
        ),
    ],
    ids=["bytes", "255ths", "not symmetric", "negative variances", "more matrices", "more numbers"],
)
def test_numbers_that_no_model_has(
    change: Callable[[Any], Any], words: str, honest: Path, photos: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    found = audit(plant(honest, tmp_path / "model", change), photos)
    assert found.failed
    assert any(words in misfit for misfit in found.misfits), found.misfits
    assert found.no_membership is not None
    assert not any(match.found for match in found.matches)


def test_lists_of_a_method_are_bounded(photos: Path, tmp_path: Path) -> None:
    """PASS keeps heads of rotated classes in a list that grows with its tasks: type, rows, dimensions and entries."""
    IncrementalClassifier("pass", **QUICK).fit(photos / "train").save(tmp_path / "pass")
    assert not audit(tmp_path / "pass", photos).failed
    for name, kept in (
        ("rotations.0", torch.zeros(6, 64, dtype=torch.uint8)),
        ("rotations.0", torch.zeros(65, 64)),
        ("rotations.0", torch.zeros(2, 8, 8)),
        ("rotations.1", torch.zeros(6, 64)),
    ):
        model = plant(tmp_path / "pass", tmp_path / "model", lambda t, name=name, kept=kept: t.update({name: kept}))
        (misfit,) = audit(model, photos).misfits
        assert f"the tensor {name!r} has shape {tuple(kept.shape)}" in misfit


@pytest.mark.parametrize("method", sorted(methods.incremental()))
def test_models_of_every_method_pass(method: str, digits: Any, photos: Path, tmp_path: Path) -> None:
    """Two tasks, with what a method carries over from the first to the second."""
    for number, label in enumerate((0, 1, 2)):
        for place, pixels in enumerate(digits.train(label)[0]):
            (tmp_path / f"{number // 2}" / str(label)).mkdir(parents=True, exist_ok=True)
            (tmp_path / "all" / str(label)).mkdir(parents=True, exist_ok=True)
            for root in (f"{number // 2}", "all"):
                Image.fromarray(pixels).save(tmp_path / root / str(label) / f"{place}.png")
    classifier = IncrementalClassifier(method, **QUICK).fit(tmp_path / "0").partial_fit(tmp_path / "1")
    classifier.save(tmp_path / "model")
    found = audit(tmp_path / "model", tmp_path / "all")
    assert found.verdict == "Passed: no image is stored."


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", list(methods.incremental()))
def test_every_tensor_of_every_method_has_a_purpose(method: str) -> None:
    """A method that stores something new has to say what it is, where it stores it."""
    from efcil.network.backbones import make_backbone
    from efcil.network.incremental import IncrementalNetwork

    network = IncrementalNetwork(make_backbone("slim", 0))
    network.grow_to([2, 1])
    made = methods.get(method)(network)
    names, known = list(made.state_dict()), purposes.including(made.purposes())
    assert purposes.unaccounted(names, known) == []
    assert purposes.unaccounted([*names, "exemplars", "network.backbone.memory", "memory.means.old"], known) == [
        "exemplars",
        "memory.means.old",
        "network.backbone.memory",
    ]


class Own(FineTune):
    """A method of somebody's own, with a buffer and a layer that only it knows."""

    name = "own"

    def __init__(self, network: Any, settings: Any = None) -> None:
        super().__init__(network, settings)
        self.register_buffer("centres", torch.zeros(2, 3))
        self.adapter = torch.nn.Linear(3, 3)


class Declared(Own):
    """The same, and says what it stores."""

    name = "declared"

    def __init__(self, network: Any, settings: Any = None) -> None:
        FineTune.__init__(self, network, settings)
        self.keep("centres", torch.zeros(2, 3), why="where classes lie")
        self.keep("adapter", torch.nn.Linear(3, 3), why="turns old features into new ones")


def test_a_method_explains_what_it_stores(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {**methods.available(), "own": Own, "declared": Declared}
    monkeypatch.setattr(methods, "available", lambda: known)
    for name in ("own", "declared"):
        IncrementalClassifier(name, **QUICK).fit(photos / "train").save(tmp_path / name)

    assert main(["audit", str(tmp_path / "own"), "--data", str(photos)]) == 1
    text = capsys.readouterr().out
    assert "UNEXPLAINED: centres" in text
    assert "adapter.bias, adapter.weight, centres has no known purpose" in text

    assert main(["audit", str(tmp_path / "declared"), "--data", str(photos)]) == 0
    assert "where classes lie" in capsys.readouterr().out
    model = plant(tmp_path / "declared", tmp_path / "more", lambda t: t.update(memory=torch.zeros(2)))
    assert audit(model, photos).unaccounted == ["memory"]
    assert main(["inspect", str(tmp_path / "declared")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "turns old features into new ones" in text
    assert "centres: Not examined" in text


# -- membership ------------------------------------------------------------------------------------------------------


def test_intervals_cover() -> None:
    """Of 400 pairs of samples whose true AUC is known, at least 95 % of the intervals hold it."""
    from statistics import NormalDist

    draw = np.random.default_rng(0)
    for shift in (0.0, 1.0, 2.5):
        truth = NormalDist().cdf(shift / np.sqrt(2))
        hits = 0
        for _ in range(400):
            members, others = draw.standard_normal(40) + shift, draw.standard_normal(25)
            auc = float((members[:, None] > others).mean())
            low, high = interval(auc, 25)
            hits += low <= truth <= high
        assert hits >= 380
    low, high = interval(1.0, 30)
    assert low < 0.9
    assert high == 1.0


def test_memorised_images_are_told_from_others(photos: Path) -> None:
    """With fewer images than features, a class's covariance gives its images away; the same images twice it cannot."""
    from efcil.model.images import Pictures, class_folders

    classifier = IncrementalClassifier(**QUICK, augmentation="none").fit(photos / "train")
    sides = []
    for held_out in (False, True):
        paths, labels = class_folders(photos, held_out)
        sides.append((Pictures(paths).pixels(SIZE), labels))
    statistics, scores = membership(classifier.model_, *sides)
    assert statistics.attack == "class statistics"
    assert statistics.auc > 0.9, "a tenth of them was held out"
    assert statistics.low <= statistics.auc <= statistics.high
    assert (statistics.members, statistics.others) == (40, 40)
    assert scores.attack == "scores"
    for one in membership(classifier.model_, sides[1], sides[1]):
        assert one.auc == pytest.approx(0.5)
    strangers = (sides[1][0], ["nobody"] * len(sides[1][1]))
    assert membership(classifier.model_, sides[0], strangers) == []


def test_methods_without_statistics_are_attacked_by_their_scores(digits: Any) -> None:
    classifier = IncrementalClassifier("lwf", **QUICK).fit(*digits.train(0, 1))
    model: Model = classifier.model_
    sides = [(np.repeat(x[..., None], 3, axis=3), y.tolist()) for x, y in (digits.train(0, 1), digits.test(0, 1))]
    assert [one.attack for one in membership(model, *sides)] == ["scores"]


def test_mistakes(honest: Path, photos: Path, capsys: Any) -> None:
    assert main(["audit", str(honest), "--data", str(photos / "train"), "--held-out", str(photos / "train")]) == 2
    assert "both a training and a held-out image" in capsys.readouterr().err
    assert main(["audit", str(honest)]) == 2
    assert main(["audit", str(honest), "--data", "nowhere"]) == 2
    assert main(["audit", str(honest), "--data", str(photos), "--format", "xml"]) == 2


# -- the folder ------------------------------------------------------------------------------------------------------

PICTURE = base64.b64encode(bytes(range(256))).decode()


def verdict(capsys: pytest.CaptureFixture[str], model: Path, data: Path) -> dict[str, Any]:
    """Audit a model that must not pass; text and JSON say so."""
    assert main(["audit", str(model), "--data", str(data)]) == 1
    text = capsys.readouterr().out
    assert "\nFAILED: " in text
    assert "IS IMAGE" not in text
    assert main(["audit", str(model), "--data", str(data), "--format", "json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert not facts["passed"]
    assert text.endswith(facts["verdict"] + "\n")
    return facts | {"text": text}


def test_files_that_are_no_part_of_a_model(honest: Path, photos: Path, tmp_path: Path, capsys: Any) -> None:
    model = Path(shutil.copytree(honest, tmp_path / "model"))
    (model / ".lock").write_text("1234\n")
    assert main(["audit", str(model), "--data", str(photos)]) == 0
    assert main(["inspect", str(model)]) == 0
    assert "not part of the model" not in capsys.readouterr().out
    shutil.copytree(photos / "train" / "left", model / "memory" / "deep")
    shutil.copy(next((photos / "train" / "left").iterdir()), model / "kept.png")
    shutil.copy(next(model.glob("*.safetensors")), model / "model-0123456789abcdef.safetensors")
    (model / ".lock").write_text(PICTURE)
    (model / "link").symlink_to(photos)
    facts = verdict(capsys, model, photos)
    files = facts["extras"]["files"]
    assert len(files) == 24
    assert {".lock", "kept.png", "link", "model-0123456789abcdef.safetensors"} < set(files)
    assert "NOT PART OF THE MODEL: kept.png\n" in facts["text"]
    assert "NOT PART OF THE MODEL: 4 more files or fields\n" in facts["text"]
    assert "Move them elsewhere." in facts["verdict"]
    assert main(["inspect", str(model)]) == 0
    assert "\n  kept.png\n" in capsys.readouterr().out
    assert main(["inspect", str(model), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["other_files"] == files
    (model / "README.md").write_text("of another version")
    advice = "`efcil card MODEL --output MODEL/README.md` writes that file anew."
    assert advice in verdict(capsys, model, photos)["verdict"]


@pytest.mark.parametrize("version", [1, 2])
def test_a_card_of_an_earlier_format_is_checked_field_by_field(
    version: int, honest: Path, photos: Path, tmp_path: Path, capsys: Any
) -> None:
    saved = checkpoint.read(honest, "model")
    facts = {name: value for name, value in saved.facts.items() if name != "pretrained"} | {"format": version}
    facts["settings"] = {name: value for name, value in facts["settings"].items() if name not in ("weights", "preset")}
    facts["settings"]["dataset" if version == 1 else "preset"] = saved.facts["settings"]["preset"]
    for each in facts["visits"]:
        del each["measured"], each["made_with"]
    checkpoint.write(tmp_path / "model", saved.tensors, facts, "model")
    assert main(["audit", str(tmp_path / "model"), "--data", str(photos)]) == 0
    assert "Passed: no image is stored." in capsys.readouterr().out
    checkpoint.write(tmp_path / "model", saved.tensors, facts | {"note": PICTURE}, "model")
    assert "model.json: facts.note" in verdict(capsys, tmp_path / "model", photos)["verdict"]


def test_names_of_files_do_not_reach_the_terminal_as_they_are(
    honest: Path, photos: Path, tmp_path: Path, capsys: Any
) -> None:
    model = Path(shutil.copytree(honest, tmp_path / "model"))
    (model / "kept\x1b[2J.png").write_bytes(b"")
    assert main(["audit", str(model), "--data", str(photos)]) == 1
    text = capsys.readouterr().out
    assert text.count("kept\\x1b[2J.png") == 2
    assert "\x1b" not in text


def test_a_model_among_its_images(honest: Path, photos: Path, tmp_path: Path, capsys: Any) -> None:
    folder = Path(shutil.copytree(photos / "train", tmp_path / "both"))
    for file in honest.iterdir():
        shutil.copy(file, folder)
    assert len(verdict(capsys, folder, folder)["extras"]["files"]) == 40


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("facts.memory", lambda described: described["facts"].update(memory=PICTURE)),
        ("facts.classes[1].picture", lambda described: described["facts"]["classes"][1].update(picture=PICTURE)),
        ("facts.efcil", lambda described: described["facts"].update(efcil=PICTURE)),
        ("facts.visits[0].note", lambda described: described["facts"]["visits"][0].update(note=[1, 2])),
        ("facts.settings.device", lambda described: described["facts"]["settings"].update(device="kept")),
        ("facts.settings.overrides.x", lambda described: described["facts"]["settings"]["overrides"].update(x="y")),
        ("facts.classes[0].label", lambda described: described["facts"]["classes"][0].update(label=PICTURE)),
        (
            "facts.classes[0].label",
            lambda described: described["facts"]["classes"][0].update(label={"tuple": [*range(256)]}),
        ),
        ("memory", lambda described: described.update(memory=PICTURE)),
        ("tensors.memory", lambda described: described["tensors"].update(memory=PICTURE)),
    ],
)
def test_fields_that_no_card_has(
    place: str, change: Callable[[Any], Any], honest: Path, photos: Path, tmp_path: Path, capsys: Any
) -> None:
    model = Path(shutil.copytree(honest, tmp_path / "model"))
    described = json.loads((model / "model.json").read_text())
    del described["checksum"]
    change(described)
    described["checksum"] = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    (model / "model.json").write_text(json.dumps(described, indent=1) + "\n")
    facts = verdict(capsys, model, photos)
    assert any(part.startswith(f"model.json: {place}") for part in facts["extras"]["parts"])
    assert main(["inspect", str(model)]) == 0
    assert place in capsys.readouterr().out


def test_text_that_no_reader_sees(honest: Path, photos: Path, tmp_path: Path, capsys: Any) -> None:
    """A field twice, of which the last one counts, and spaces that could mean something."""
    model = Path(shutil.copytree(honest, tmp_path / "model"))
    text = (model / "model.json").read_text()
    for changed in (text.replace("{", f'{{"facts": "{PICTURE}",', 1), text.replace("\n", "\n\t ")):
        (model / "model.json").write_text(changed)
        assert verdict(capsys, model, photos)["extras"]["parts"] == ["model.json: more text than its fields need"]


def test_text_beside_the_tensors(honest: Path, photos: Path, tmp_path: Path, capsys: Any) -> None:
    tensors = load_file(next(honest.glob("*.safetensors")))
    facts = json.loads((honest / "model.json").read_text())["facts"]
    plain = serialise(tensors)
    length = int.from_bytes(plain[:8], "little")
    spaced = (length + 8).to_bytes(8, "little") + plain[8 : 8 + length] + b"\t \t\t  \t " + plain[8 + length :]
    for number, (content, words) in enumerate(
        ((serialise(tensors, {"memory": PICTURE}), "metadata 'memory'"), (spaced, "more text in its header"))
    ):
        model = tmp_path / str(number)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "tensor_file", lambda _, content=content: [content])
            checkpoint.write(model, tensors, facts, "model")
        (part,) = verdict(capsys, model, photos)["extras"]["parts"]
        assert words in part


def test_bytes_behind_the_tensors(honest: Path, photos: Path, tmp_path: Path, capsys: Any) -> None:
    """No tensor would have them, so that the file is none."""
    tensors = load_file(next(honest.glob("*.safetensors")))
    facts = json.loads((honest / "model.json").read_text())["facts"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "tensor_file", lambda kept: [serialise(kept) + PICTURE.encode()])
        checkpoint.write(tmp_path / "model", tensors, facts, "model")
    assert main(["audit", str(tmp_path / "model"), "--data", str(photos)]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_a_model_that_is_replaced_meanwhile(honest: Path, photos: Path, tmp_path: Path) -> None:
    """One model is audited, the one that was there at first; no half of another."""
    model = Path(shutil.copytree(honest, tmp_path / "model"))
    card, tensors = model_folder.read_raw(model)
    other = dataclasses.replace(card, image_size=8)
    read = auditing.class_folders

    def replace_it(folder: Path, held_out: bool = False) -> Any:
        model_folder.write(model, other, tensors | {"memory": tensors["memory.means"]})
        return read(folder, held_out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auditing, "class_folders", replace_it)
        found = audit(model, photos)
    assert not found.failed
    assert audit(model, photos).failed


def test_an_unfinished_task_does_not_pass(honest: Path, photos: Path, tmp_path: Path, capsys: Any) -> None:
    model = Path(shutil.copytree(honest, tmp_path / "model"))
    checkpoint.write(model / "partial", {"learner.memory": torch.zeros(3)}, {})
    facts = verdict(capsys, model, photos)
    assert facts["extras"] == {"files": [], "parts": [], "unfinished": True}
    assert "Finish it with the `efcil learn` command that started it, or delete partial/" in facts["verdict"]
    (model / "partial" / "kept.png").write_bytes(b"")
    assert verdict(capsys, model, photos)["extras"]["files"] == ["partial/kept.png"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update({"network.heads.7": torch.zeros(30)}), "'network.heads.7' that efc does not have"),
        (lambda t: t.update(feature_matrix=torch.zeros(8, 8)), "is F32 of shape (8, 8), but F32 of shape (64, 64)"),
        (lambda t: t.update({"memory.means": t["memory.means"].to(torch.uint8)}), "'memory.means' is torch.uint8"),
        (lambda t: t.pop("memory.means"), "the tensor 'memory.means' is missing"),
        (
            lambda t: t.update({"memory.means": t["memory.means"].repeat(2, 1)}),
            "has shape (4, 64), but 2 classes need at most (2, 64)",
        ),
    ],
    ids=["name", "shape", "type", "missing", "rows"],
)
def test_tensors_that_the_method_does_not_have(
    change: Callable[[Any], Any], words: str, honest: Path, photos: Path, tmp_path: Path, capsys: Any
) -> None:
    """Names with a purpose are not enough: what no model of this method can hold is unexplained."""
    facts = verdict(capsys, plant(honest, tmp_path / "model", change), photos)
    assert facts["unaccounted"] == []
    (misfit,) = facts["misfits"]
    assert words in misfit
    assert f"UNEXPLAINED: {misfit}" in facts["text"]
    assert "the model cannot be used" in facts["no_membership"]


def test_copies_of_training_images_are_not_held_out(honest: Path, photos: Path, tmp_path: Path, capsys: Any) -> None:
    """Nobody could tell them from themselves; under which name they lie does not matter."""
    shutil.copytree(photos / "test", tmp_path / "others")
    original = sorted((photos / "train" / "left").iterdir())[3]
    copy = tmp_path / "others" / "right" / "another.bmp"
    Image.open(original).save(copy)
    assert main(["audit", str(honest), "--data", str(photos), "--held-out", str(tmp_path / "others")]) == 2
    shown = capsys.readouterr()
    assert f"{copy} is both a training and a held-out image: it shows the same as {original}." in shown.err
    assert "Passed" not in shown.out
