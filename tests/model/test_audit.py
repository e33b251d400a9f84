from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from safetensors.torch import save as serialise
from sklearn.metrics import roc_auc_score

from efcil import methods
from efcil.classifier import IncrementalClassifier
from efcil.cli import main
from efcil.commands import audit as command
from efcil.data.augment import Normalisation
from efcil.engine import checkpoint
from efcil.methods.finetune import FineTune
from efcil.model import Model, format, matching, purposes
from efcil.model.audit import audit
from efcil.model.encoded import encoded_files
from efcil.model.matching import Images
from efcil.model.membership import interval, membership, roc_auc

QUICK: dict[str, Any] = {"preset": "digits", "epochs": 1, "device": "cpu"}
SIZE = 16
CONSTANTS = ([1 / 255.0 / 0.2, 1 / 255.0 / 0.3, 1 / 255.0 / 0.1], [-1.0, -2.0, -1.5])


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
    assert "held-out images: no image" in text
    assert "by class statistics" in text
    assert main(["audit", str(honest), "--data", str(photos / "train"), "--format", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["passed"]
    assert facts["unaccounted"] == []
    assert facts["matches"]
    assert not any(match["found"] for match in facts["matches"])
    assert facts["unrelated"] == "the training images with random phases"
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
        "not_known": ["nobody"], "complete": False,
    }  # fmt: skip

    assert main(["audit", str(honest), "--data", str(tmp_path / "strangers")]) == 2
    shown = capsys.readouterr()
    assert "has images of nobody, which the model does not know; it knows left, right." in shown.err
    assert "Passed" not in shown.out


@pytest.mark.parametrize("held_out", [True, False])
def test_a_stored_image_is_caught(held_out: bool, honest: Path, photos: Path, tmp_path: Path, capsys: Any) -> None:
    """A method that keeps exemplars on purpose."""
    file = sorted((photos / "train" / "left").iterdir())[3]
    image = torch.from_numpy(np.array(Image.open(file)))
    kept = torch.stack([torch.zeros(3, SIZE, SIZE), image.permute(2, 0, 1).float() / 255.0])
    model = plant(honest, tmp_path / "model", lambda t: t.update(memory=kept))
    data = photos if held_out else photos / "train"
    assert main(["audit", str(model), "--data", str(data), "--format", "json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["unaccounted"] == ["memory"]
    best = facts["matches"][0]
    assert (best["tensor"], best["row"], best["image"], best["found"]) == ("memory", 1, 3, True)
    assert best["correlation"] > 0.999
    assert best["file"] == str(file)
    assert main(["audit", str(model), "--data", str(data)]) == 1
    text = capsys.readouterr().out
    assert "UNEXPLAINED: memory" in text
    assert f"IS IMAGE {file}\n" in text
    assert text.endswith("FAILED: the model stores what must be taken for an image.\n")


def test_an_image_under_a_known_name_is_caught(honest: Path, photos: Path, tmp_path: Path) -> None:
    """A patch of a training image in place of a class mean: the name is known, the content gives it away."""
    image = np.array(Image.open(sorted((photos / "train" / "right").iterdir())[5]))
    patch = torch.from_numpy(image[4:12, 8:16].mean(axis=2).flatten()).float() / 255.0

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["memory.means"][1] = patch

    found = audit(plant(honest, tmp_path / "model", change), photos)
    assert found.unaccounted == []
    assert found.failed
    best = found.matches[0]
    assert (best.tensor, best.row, best.found, best.compared_with) == ("memory.means", 1, True, "a patch of 8 x 8")


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
        lambda image: image[2:12, 4:14].permute(2, 0, 1).float(),
        lambda image: image[1:13, 2:14].permute(2, 0, 1).float(),
        lambda image: image[:, :, 1].float(),
        lambda image: image[3:11, 5:13, 0].float(),
        lambda image: image.permute(2, 0, 1),
        lambda image: image.permute(2, 1, 0).float(),
        lambda image: image.permute(2, 0, 1).flip(2).float(),
        lambda image: image.rot90(3).float(),
        lambda image: torch.from_numpy(np.array(Image.fromarray(image.numpy()).convert("L"))),
    ],
    ids=[
        "planes", "pixels", "normalised", "inverted", "noisy", "grey", "half-size", "patch",
        "patch off the grid", "one colour", "patch of one colour off the grid", "bytes", "transposed",
        "mirrored", "turned", "luma",
    ],
)  # fmt: skip
def test_disguises(disguise: Callable[[torch.Tensor], torch.Tensor]) -> None:
    training, others = photographs(40, 1), photographs(40, 2)
    kept = disguise(torch.from_numpy(training[17]))
    (best,) = matching.match({"kept": kept.reshape(1, -1).contiguous()}, Images(training), Images(others), CONSTANTS)
    assert best.found
    assert best.image == 17


@pytest.mark.parametrize("held_out", [True, False])
def test_an_image_larger_than_the_model_sees_is_caught(
    held_out: bool, honest: Path, photos: Path, tmp_path: Path
) -> None:
    """Its detail is lost at the model's size: the images are read again at the size of the tensor."""
    draw = np.random.default_rng(0)
    for number, image in enumerate(draw.integers(0, 256, (12, 96, 96, 3), np.uint8)):
        place = tmp_path / "large" / ("train" if number % 2 else "test") / "left"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{number}.png")
    file = tmp_path / "large" / "train" / "left" / "3.png"
    grey = Image.open(file).convert("L").resize((64, 64), Image.Resampling.BICUBIC)
    kept = torch.from_numpy(np.array(grey)).float() / 255.0
    model = plant(honest, tmp_path / "model", lambda t: t.update(feature_matrix=kept))
    found = audit(model, tmp_path / "large" if held_out else file.parent.parent)
    assert found.holds_images
    best = found.matches[0]
    assert (best.tensor, best.file) == ("feature_matrix", str(file))
    assert best.compared_with == "an image resized to 64 x 64"


def test_among_many_patches_the_nearest_are_looked_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "MANY_PATCHES", 160)
    monkeypatch.setattr(matching, "GRID", 4)  # two by two patches of every image
    training, others = photographs(40, 1), photographs(40, 2)
    kept = torch.from_numpy(training[17])[1:13, 2:14].reshape(1, -1).contiguous()
    (best,) = matching.match({"kept": kept}, Images(training), Images(others), CONSTANTS)
    assert best.found
    assert best.image == 17
    monkeypatch.setattr(matching, "NEAR", 2.0)
    (missed,) = matching.match({"kept": kept}, Images(training), Images(others), CONSTANTS)
    assert not missed.found


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("channels", [1, 3])
def test_patches_one_by_one(channels: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of all patches, cut out and correlated in double precision; parts of an image may be flat."""
    monkeypatch.setattr(matching, "_grid", lambda size, images, side: (step, (size - side) // step + 1))
    monkeypatch.setattr(matching, "NEAR", 2.0)  # the grid alone
    monkeypatch.setattr(matching, "PIECE_NUMBERS", 5000)  # several batches of images and of rows
    images = photographs(7, 1)
    images[2, :9] = 77
    draw = torch.Generator().manual_seed(0)
    # A scale of BatchNorm as training leaves it, nearly constant; and noise.
    rows = torch.randn(30, 64 * channels, generator=draw)
    rows[0] = 1 + 1e-3 * rows[0]
    standard = matching._standardise(rows.double()).float()
    best, where = matching._best_patches(standard, images, 8, channels, CONSTANTS, 100, lambda work: None)

    factor, summand = (np.array(values) for values in CONSTANTS)
    expected = np.zeros((len(rows), len(images)))
    for number, image in enumerate(images):
        kinds = [image @ np.full(3, 1 / 3), image @ np.array(matching.LUMA), *np.moveaxis(image, 2, 0)]
        if channels == 3:
            views = (image, image * factor + summand)
            kinds = [turned for view in views for turned in (view, np.moveaxis(view, 2, 0))]
        for kind in kinds:
            lines = 1 if channels == 3 and kind.shape[0] == 3 else 0
            for top in range(0, 9, step):
                for left in range(0, 9, step):
                    places = [slice(None)] * lines + [slice(top, top + 8), slice(left, left + 8)]
                    patch = kind[tuple(places)].astype(float).ravel()
                    patch -= patch.mean()
                    if np.abs(patch).max() > 1e-6:
                        kernel = rows.double().numpy() - rows.double().numpy().mean(axis=1, keepdims=True)
                        value = np.abs(kernel @ patch) / np.linalg.norm(patch) / np.linalg.norm(kernel, axis=1)
                        expected[:, number] = np.maximum(expected[:, number], value)
    np.testing.assert_allclose(best, expected.max(axis=1), atol=2e-4)
    np.testing.assert_array_equal(where, expected.argmax(axis=1))


@pytest.mark.parametrize(
    "bundle",
    [lambda kept: kept.flatten(), lambda kept: kept.flatten(1).T, lambda kept: kept.reshape(5, 2, -1)],
    ids=["one row", "columns", "pairs"],
)
def test_many_images_in_one_tensor(bundle: Callable[[torch.Tensor], torch.Tensor]) -> None:
    training, others = photographs(40, 1), photographs(40, 2)
    kept = bundle(torch.from_numpy(training[10:20]).permute(0, 3, 1, 2).float())
    (best,) = matching.match({"kept": kept}, Images(training), Images(others), CONSTANTS)
    assert best.found
    assert best.image == best.row + 10


def test_other_images_and_noise_are_not_taken_for_training_images() -> None:
    training, others = photographs(60, 1), photographs(60, 2)
    stranger = torch.from_numpy(photographs(30, 3)).permute(0, 3, 1, 2).float()
    noise = torch.randn(200, 64, generator=torch.manual_seed(0))
    smooth = torch.nn.functional.avg_pool1d(noise, 7, 1, 3)
    ramp = torch.linspace(0, 1, 7).repeat(7, 1)
    stored = {"stranger": stranger, "noise": noise, "smooth": smooth, "average": stranger.mean(dim=0), "ramp": ramp}
    found = matching.match(stored, Images(training), Images(others), CONSTANTS)
    assert {one.tensor for one in found} == set(stored)
    best = {one.tensor: one.correlation for one in found}
    assert best["ramp"] > matching.MATCH, "a simple pattern resembles a patch of any image"
    assert not any(one.found for one in found)


def test_scrambled_images_are_smooth_and_unrelated() -> None:
    images = photographs(20, 1)
    scrambled = matching.scrambled(images)
    assert scrambled.shape == images.shape
    assert scrambled.dtype == np.uint8

    def roughness(pixels: np.ndarray) -> float:
        return float(np.abs(np.diff(pixels.astype(float), axis=1)).mean())

    assert roughness(scrambled) == pytest.approx(roughness(images), rel=0.3)
    both = np.corrcoef(images.reshape(20, -1).astype(float), scrambled.reshape(20, -1).astype(float))[:20, 20:]
    assert np.abs(np.diag(both)).mean() < 0.5


def as_file(image: np.ndarray, kind: str) -> bytes:
    """An image as the bytes of a file, or of an archive that holds it."""
    content = io.BytesIO()
    if kind == "ZIP":
        with zipfile.ZipFile(content, "w") as archive:
            archive.writestr("kept", image.tobytes())
    else:
        Image.fromarray(image).save(content, kind)
    return content.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "ZIP"])
def test_files_within_tensors(kind: str, tmp_path: Path) -> None:
    """Among other bytes, or as one number per byte among others."""
    content = torch.tensor(list(as_file(photographs(1, 1)[0], kind)), dtype=torch.uint8)
    noise = torch.randn(4000, generator=torch.manual_seed(0))
    raw = noise.clone()
    raw.view(torch.uint8)[1000 : 1000 + len(content)] = content
    numbers = noise.clone()
    numbers[100 : 100 + len(content)] = content.float()
    words = "a zip archive of 1 files" if kind == "ZIP" else f"a {kind} image of 16 x 16 pixels"
    for tensor, expected in ((noise, []), (raw, [f"t.safetensors: {words} at byte"]), (numbers, [f"t: {words} from"])):
        save_file({"t": tensor}, tmp_path / "t.safetensors")
        found = encoded_files(tmp_path / "t.safetensors", {"t": tensor})
        assert len(found) == len(expected)
        assert all(one.startswith(start) for one, start in zip(found, expected, strict=True))
    raw.view(torch.uint8)[1020:] = 7  # a signature, and nothing that follows from it
    save_file({"t": raw}, tmp_path / "t.safetensors")
    assert encoded_files(tmp_path / "t.safetensors", {"t": raw}) == []


def test_a_file_within_a_known_tensor_fails_the_audit(honest: Path, photos: Path, tmp_path: Path, capsys: Any) -> None:
    content = torch.tensor(list(as_file(photographs(1, 1)[0], "PNG")), dtype=torch.uint8)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["feature_matrix"].view(-1).view(torch.uint8)[: len(content)] = content

    model = plant(honest, tmp_path / "model", change)
    assert main(["audit", str(model), "--data", str(photos)]) == 1
    text = capsys.readouterr().out
    assert "IS AN IMAGE OR ARCHIVE: model-" in text
    assert text.endswith("FAILED: the model stores what must be taken for an image.\n")


def test_how_far_it_has_come(honest: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    told: list[float] = []
    assert not audit(honest, photos, progress=told.append).failed
    assert told == sorted(told)
    assert told[0] < 0.5
    assert told[-1] == 1.0
    monkeypatch.setattr(command, "TELL_SECONDS", 0.0)
    assert main(["audit", str(honest), "--data", str(photos), "--format", "json"]) == 0
    shown = capsys.readouterr()
    assert shown.err.endswith("100% of the comparisons with images done\n")
    assert json.loads(shown.out)["passed"]


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", list(methods.incremental()))
def test_every_tensor_of_every_method_has_a_purpose(method: str) -> None:
    """A method that stores something new has to say what it is, where it stores it."""
    from efcil.network.incremental import IncrementalNetwork
    from efcil.network.resnet import make_backbone

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
    assert "nobody has said what adapter.bias, adapter.weight, centres is for" in text
    assert "no image was found" in text

    assert main(["audit", str(tmp_path / "declared"), "--data", str(photos)]) == 0
    assert "where classes lie" in capsys.readouterr().out
    model = plant(tmp_path / "declared", tmp_path / "more", lambda t: t.update(memory=torch.zeros(2)))
    assert audit(model, photos).unaccounted == ["memory"]
    assert main(["inspect", str(tmp_path / "declared")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "turns old features into new ones" in text
    assert "centres: Not examined" in text


# -- membership ------------------------------------------------------------------------------------------------------


def test_roc_auc_is_that_of_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    members, others = draw.integers(0, 9, 50).astype(float), draw.integers(0, 8, 30).astype(float)
    expected = roc_auc_score([1] * 50 + [0] * 30, np.concatenate([members, others]))
    assert roc_auc(members, others) == pytest.approx(expected)


def test_intervals_cover() -> None:
    """Of 400 pairs of samples whose true AUC is known, at least 95 % of the intervals hold it."""
    from statistics import NormalDist

    draw = np.random.default_rng(0)
    for shift in (0.0, 1.0, 2.5):
        truth = NormalDist().cdf(shift / np.sqrt(2))
        hits = 0
        for _ in range(400):
            auc = roc_auc(draw.standard_normal(40) + shift, draw.standard_normal(25))
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
    assert statistics.auc > 0.95
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
    assert "both among the training and the held-out images" in capsys.readouterr().err
    assert main(["audit", str(honest)]) == 2
    assert main(["audit", str(honest), "--data", "nowhere"]) == 2
    assert main(["audit", str(honest), "--data", str(photos), "--format", "xml"]) == 2


# -- the folder ------------------------------------------------------------------------------------------------------

PICTURE = base64.b64encode(bytes(range(256))).decode()


def verdict(capsys: pytest.CaptureFixture[str], model: Path, data: Path) -> dict[str, Any]:
    """Audit a model that must not pass; text and JSON say so."""
    assert main(["audit", str(model), "--data", str(data)]) == 1
    text = capsys.readouterr().out
    assert "\nFAILED: no image was found, but " in text
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
    assert "no part of the model" not in capsys.readouterr().out
    shutil.copytree(photos / "train" / "left", model / "memory" / "deep")
    shutil.copy(next((photos / "train" / "left").iterdir()), model / "kept.png")
    shutil.copy(next(model.glob("*.safetensors")), model / "model-0123456789abcdef.safetensors")
    (model / ".lock").write_text(PICTURE)
    (model / "link").symlink_to(photos)
    facts = verdict(capsys, model, photos)
    files = facts["extras"]["files"]
    assert len(files) == 24
    assert {".lock", "kept.png", "link", "model-0123456789abcdef.safetensors"} < set(files)
    assert "NO PART OF THE MODEL: kept.png\n" in facts["text"]
    assert "NO PART OF THE MODEL: 4 more files or fields\n" in facts["text"]
    assert "Put them elsewhere." in facts["verdict"]
    assert main(["inspect", str(model)]) == 0
    assert "\n  kept.png\n" in capsys.readouterr().out
    assert main(["inspect", str(model), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["other_files"] == files


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
        ("facts.settings.data", lambda described: described["facts"]["settings"].update(data="kept")),
        ("facts.settings.overrides.x", lambda described: described["facts"]["settings"]["overrides"].update(x="y")),
        ("facts.classes[0].label", lambda described: described["facts"]["classes"][0].update(label=PICTURE)),
        (
            "facts.classes[0].label, longer than a name",
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
        assert verdict(capsys, model, photos)["extras"]["parts"] == ["model.json: more text than its fields make"]


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
            patch.setattr(checkpoint, "serialise_tensors", lambda _, content=content: content)
            checkpoint.write(model, tensors, facts, "model")
        (part,) = verdict(capsys, model, photos)["extras"]["parts"]
        assert words in part


def test_a_model_that_is_replaced_meanwhile(honest: Path, photos: Path, tmp_path: Path) -> None:
    """One model is audited, the one that was there at first; no half of another."""
    model = Path(shutil.copytree(honest, tmp_path / "model"))
    card, tensors = format.read_raw(model)
    other = dataclasses.replace(card, image_size=8)
    found = audit(
        model, photos, progress=lambda share: format.write(model, other, tensors | {"memory": tensors["memory.means"]})
    )
    assert not found.failed
    assert audit(model, photos).failed


def test_an_unfinished_task_does_not_pass(honest: Path, photos: Path, tmp_path: Path, capsys: Any) -> None:
    model = Path(shutil.copytree(honest, tmp_path / "model"))
    checkpoint.write(model / "partial", {"learner.memory": torch.zeros(3)}, {})
    facts = verdict(capsys, model, photos)
    assert facts["extras"] == {"files": [], "parts": [], "unfinished": True}
    assert "Finish it with the `efcil learn` command that began it, or delete partial/" in facts["verdict"]
    (model / "partial" / "kept.png").write_bytes(b"")
    assert verdict(capsys, model, photos)["extras"]["files"] == ["partial/kept.png"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update({"network.heads.7": torch.zeros(30)}), "'network.heads.7' that efc does not have"),
        (lambda t: t.update(feature_matrix=torch.zeros(8, 8)), "is F32 of shape (8, 8) where F32 of shape (64, 64)"),
        (lambda t: t.update({"memory.means": t["memory.means"].to(torch.uint8)}), "'memory.means' is torch.uint8"),
        (lambda t: t.pop("memory.means"), "the tensor 'memory.means' is missing"),
        (
            lambda t: t.update({"memory.means": t["memory.means"].repeat(2, 1)}),
            "knows 2 classes but keeps the means of 4",
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


@pytest.mark.parametrize(
    "turned", [lambda image: image, lambda image: np.rot90(image)[:, ::-1]], ids=["copy", "turned"]
)
def test_copies_of_training_images_are_not_held_out(
    turned: Callable[[np.ndarray], np.ndarray], honest: Path, photos: Path, tmp_path: Path, capsys: Any
) -> None:
    """They would hide a stored image, which resembles them as much; under which name they lie does not matter."""
    shutil.copytree(photos / "test", tmp_path / "others")
    original = sorted((photos / "train" / "left").iterdir())[3]
    copy = tmp_path / "others" / "right" / "another.bmp"
    Image.fromarray(np.ascontiguousarray(turned(np.array(Image.open(original))))).save(copy)
    assert main(["audit", str(honest), "--data", str(photos), "--held-out", str(tmp_path / "others")]) == 2
    shown = capsys.readouterr()
    assert f"{copy} is both among the training and the held-out images: it shows the same as {original}." in shown.err
    assert "Passed" not in shown.out


@pytest.mark.parametrize("all_of_them", [True, False])
def test_near_copies_of_training_images_hide_nothing(
    all_of_them: bool, honest: Path, photos: Path, tmp_path: Path, capsys: Any
) -> None:
    """Saved as JPEG, a copy has other pixels; what is stored of the image resembles it all the same."""
    training = sorted((photos / "train" / "left").iterdir())
    if all_of_them:
        (tmp_path / "others" / "left").mkdir(parents=True)
    else:
        shutil.copytree(photos / "test", tmp_path / "others")
    for number, file in enumerate(training):
        Image.open(file).save(tmp_path / "others" / "left" / f"copy{number}.jpg", quality=90, subsampling=0)
    image = torch.from_numpy(np.array(Image.open(training[3]))).float().mean(dim=2)[4:12, 4:12] / 255.0

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["memory.means"][1] = image.flatten() + 0.02 * torch.randn(64, generator=torch.manual_seed(0))

    model = plant(honest, tmp_path / "model", change)
    assert main(["audit", str(model), "--data", str(photos), "--held-out", str(tmp_path / "others")]) == 1
    text = capsys.readouterr().out
    assert "20 held-out images left out here: they look like training images\n" in text
    assert f"IS IMAGE {training[3]}\n" in text
    assert ("with random phases" in text) == all_of_them
