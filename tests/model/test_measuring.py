"""The number at the end of a visit, probabilities and unknown images: from images that were not learned from."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from efcil.classifier import IncrementalClassifier
from efcil.cli import main
from efcil.core import calibration
from efcil.core.typicality import Spread
from efcil.data import tiers
from efcil.engine.progress import Progress
from efcil.errors import SettingsError
from efcil.model import Model, ModelError, measuring
from efcil.model.card import Card, read_card
from efcil.model.estimate import estimate, memory_needed
from efcil.model.learning import learn
from efcil.model.measured import BEFORE, FOLDS, HELD_OUT
from efcil.network.memo import FeatureMemo, remembered_features
from efcil.settings import TrainingSettings

QUICK = TrainingSettings(preset="digits", epochs=1, device="cpu", classifier="auto")
PLAIN = ["--preset", "digits", "--image-size", "8", "--device", "cpu", "--epochs", "1"]


def coloured(images: np.ndarray) -> np.ndarray:
    return np.repeat(images[..., None], 3, axis=-1)


def taught(digits: Any, method: str, *tasks: tuple[int, ...], held_out: float | None = None, **others: Any) -> Model:
    model = Model.create(dataclasses.replace(QUICK, method=method, **others), 8)
    for task in tasks:
        images, labels = digits.train(*task)
        learn(model, coloured(images), labels.tolist(), held_out=held_out)
    return model


@pytest.fixture(scope="module")
def frozen(digits: Any) -> Model:
    """The first task trains the network, the second one nothing."""
    return taught(digits, "fecam", (0, 1, 2), (3, 4))


# -- which images are measured ---------------------------------------------------------------------------------------


def test_where_the_network_trains_a_share_of_every_class_is_held_out(digits: Any) -> None:
    model = taught(digits, "efc", (0, 1), (2,))
    for visit, classes, images in zip(model.card.visits, (2, 3), (4, 2), strict=True):
        assert visit.measured is not None
        assert (visit.measured.way, visit.measured.images, visit.measured.among) == (HELD_OUT, images, classes)
    assert [each.images for each in model.card.classes] == [22, 22, 22]
    assert [each.measured for each in model.card.classes] == [2, 2, 2]


def test_where_nothing_trains_every_image_is_measured_and_learned(frozen: Model, digits: Any) -> None:
    first, second = (visit.measured for visit in frozen.card.visits)
    assert first is not None
    assert second is not None
    assert (first.way, second.way, second.images, second.among) == (HELD_OUT, FOLDS, 48, 5)
    assert [each.images for each in frozen.card.classes] == [22, 22, 22, 24, 24]
    assert sum(each.right for each in frozen.card.classes[3:]) == second.right
    # What is stored is the same as without a measurement.
    again = taught(digits, "fecam", (0, 1, 2))
    images, labels = digits.train(3, 4)
    learn(again, coloured(images), labels.tolist(), held_out=0.0)
    assert again.card.visits[-1].measured is None
    stored = frozen.tensors()
    assert all(torch.equal(value, stored[name]) for name, value in again.tensors().items())


def card(model: Model, *, trains: bool) -> Card:
    """A card whose next task trains the network, or does not."""
    first = dataclasses.replace(model.card.resolved.first_task, epochs=int(trains))
    resolved = dataclasses.replace(model.card.resolved, first_task=first)
    return dataclasses.replace(model.card, resolved=resolved, classes=(), visits=())


def test_a_plan_depends_on_seed_and_names_alone(frozen: Model) -> None:
    places = np.repeat([0, 1, 2], [40, 5, 4])
    once, again = (measuring.plan(card(frozen, trains=True), ["a", "b", "c"], places, None) for _ in range(2))
    assert [rows.tolist() for rows in once.parts] == [rows.tolist() for rows in again.parts]
    assert np.bincount(places[once.parts[0]], minlength=3).tolist() == [4, 1, 0]
    assert sorted([*once.learned, *once.parts[0]]) == list(range(49))
    other = measuring.plan(card(frozen, trains=True), ["z", "b", "c"], places, None)
    assert other.parts[0].tolist() != once.parts[0].tolist()


def test_every_image_is_in_one_part_except_those_of_classes_with_one(frozen: Model) -> None:
    places = np.repeat([0, 1, 2, 3], [12, 2, 1, 5])
    plan = measuring.plan(card(frozen, trains=False), list("abcd"), places, None)
    assert sorted(np.concatenate(plan.parts)) == [row for row in range(20) if places[row] != 2]
    assert len(plan.learned) == 20
    for part in plan.parts:
        left = np.bincount(np.delete(places, part), minlength=4)
        assert left.min() >= 1


def test_a_share_that_is_asked_for_is_held_out_of_any_method(frozen: Model) -> None:
    places = np.repeat([0, 1], 20)
    plan = measuring.plan(card(frozen, trains=False), ["a", "b"], places, 0.25)
    assert (plan.way, len(plan.parts[0]), len(plan.learned)) == (HELD_OUT, 10, 30)
    assert measuring.plan(card(frozen, trains=True), ["a", "b"], places[::7], None).way is None
    with pytest.raises(SettingsError, match=r"between 0 and 0\.5, but it is 0\.9"):
        measuring.plan(card(frozen, trains=True), ["a", "b"], places, 0.9)


def test_images_are_left_out_of_what_measures_them(frozen: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nearest neighbour among the images themselves would be right always; a part must not see its own images."""
    seen: list[tuple[int, int]] = []
    original = measuring.end

    def end(method: Any, task: Any, data: Any) -> None:
        original(method, task, data)
        seen.append((len(data), len(method.memory.means)))

    monkeypatch.setattr(measuring, "end", end)
    model = Model(frozen.card, frozen.twin(), "cpu")
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), np.uint8)
    learn(model, images, ["a"] * 10 + ["b"] * 10)
    assert seen == [(16, 7)] * 5


class Heard(Progress):
    """Keeps what is said, but for what a slow machine says by the clock."""

    def __init__(self) -> None:
        super().__init__(1, quiet=True, tick=None)
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def test_a_class_that_is_taken_for_another_is_named(digits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (zeros, _), (ones, _) = taught(digits, "lda", (0, 1)), digits.train(0), digits.train(1)
    with Heard() as progress:
        learn(model, coloured(zeros[:8]), [1] * 8, more=True, progress=progress)
        learn(model, coloured(ones[8:]), [1] * 16, more=True, progress=progress)
        monkeypatch.setattr(measuring, "_answers", lambda model, method, _, rows: (np.eye(3)[[0] * len(rows)], None))
        learn(model, coloured(ones[:8]), ["one"] * 8, progress=progress)
    begins = [line.partition(" by a model")[0] for line in progress.said]
    assert begins == ["8 of 8 images of 1 were taken for 0", "8 of 8 images of one were taken for 0"]


def test_few_images_and_a_half_are_not_enough_to_name_another_class() -> None:
    with Heard() as progress:
        true, given = np.array([0, 0, 1, 1, 1, 1, 1, 1]), np.array([1, 1, 0, 0, 0, 1, 1, 2])
        measuring.say_in_doubt(progress, "abc", measuring.Answered(np.arange(8), true, given, np.full(8, 0.1)), str)
    assert progress.said == []


def test_images_that_look_like_another_class_are_named_most_doubtful_first() -> None:
    true, given = np.array([0] * 4 + [1] * 4 + [2] * 4), np.array([0, 1, 0, 2, 0, 0, 0, 2, 2, 2, 2, 2])
    own = np.array([0.9, 0.009, 0.9, 0.02, 0.001, 0.001, 0.001, 0.002, 0.9, 0.9, 0.9, 0.005])
    answered = measuring.Answered(np.arange(12)[::-1], true, given, own)
    with Heard() as progress:
        measuring.say_in_doubt(progress, "abc", answered, "file {}".format)
    taken, doubtful = progress.said
    assert taken.startswith("3 of 4 images of b were taken for a"), "these three are not named one by one as well"
    assert doubtful == (
        "2 images look like another class to a model that had not learned from them: file 4 (c), file 10 (b). "
        "Are they in the right folder?"
    )
    measuring.say_in_doubt(None, "abc", answered, str)


def test_files_in_the_wrong_folder_are_named(
    folders: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among new classes and more images of known ones, which are learned apart, files keep their names."""
    model, data = tmp_path / "model", tmp_path / "data"
    assert main(["learn", str(model), "--data", str(folders / "first"), *PLAIN, "--quiet"]) == 0
    shutil.copytree(folders / "second", data)
    shutil.copytree(folders / "first" / "digit-1", data / "digit-1")
    doubtful: list[str] = []

    def answered(card: Card, found: Any, rows: np.ndarray, true: np.ndarray, scores: np.ndarray) -> measuring.Answered:
        doubtful.append(str(sorted((data / f"digit-{true[0]}").iterdir())[rows[0]]))
        first = np.arange(len(rows)) == 0
        return measuring.Answered(rows, true, np.where(first, 0, true), np.where(first, 0.0, 1.0))

    monkeypatch.setattr(measuring, "_answered", answered)
    capsys.readouterr()
    assert main(["learn", str(model), "--data", str(data), "--more"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "like another class" in line]
    begins = "1 image looks like another class to a model that had not learned from it"
    assert said == [f"{begins}: {file} (digit-0). Is it in the right folder?" for file in doubtful]
    assert [Path(file).parent.name for file in doubtful] == ["digit-2", "digit-1"]


def test_a_single_image_in_the_wrong_class_is_found(frozen: Model, digits: Any) -> None:
    model = Model(frozen.card, frozen.twin(), "cpu")
    images, labels = digits.train(5, 6)
    wrong = labels.copy()
    wrong[0] = 11 - wrong[0]
    seen: list[measuring.Answered] = []
    original = measuring.Measuring.outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            measuring.Measuring,
            "outcome",
            lambda *given: seen.append((found := original(*given)).answered) or found,
        )
        learn(model, coloured(images), wrong.tolist())
    (answered,) = seen
    assert answered.rows[answered.own.argmin()] == 0


def test_more_images_are_measured_before_they_are_learned(digits: Any) -> None:
    model = taught(digits, "efc", (0, 1))
    images, labels = digits.test(0, 1)
    before = (model.scores(coloured(images)).argmax(axis=1) == labels).sum()
    learn(model, coloured(images), labels.tolist(), more=True)
    measured = model.card.visits[-1].measured
    assert measured is not None
    assert (measured.way, measured.right, measured.images) == (BEFORE, before, 48)


# -- what follows from it --------------------------------------------------------------------------------------------


def test_probabilities_are_calibrated(frozen: Model, digits: Any) -> None:
    images, _ = digits.test(0, 1, 2, 3, 4)
    pixels = coloured(images)
    chances = frozen.probabilities(pixels)
    assert frozen.temperature != 1.0
    np.testing.assert_allclose(chances, calibration.softmax(frozen.scores(pixels), frozen.temperature))
    np.testing.assert_allclose(chances.sum(axis=1), 1.0)
    classifier = IncrementalClassifier()._take(frozen)
    np.testing.assert_allclose(classifier.predict_proba(pixels), chances)


def test_typicality_is_a_share_and_lower_for_what_is_no_digit(frozen: Model, digits: Any) -> None:
    known = frozen.typicality(coloured(digits.train(3, 4)[0]))
    noise = frozen.typicality(np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8))
    assert known is not None
    assert noise is not None
    assert known.shape == (48,)
    assert ((known >= 0) & (known <= 1)).all()
    assert np.median(noise) < 0.2 * np.median(known)


def test_without_statistics_or_held_out_images_nothing_is_unknown(digits: Any) -> None:
    pixels = coloured(digits.train(0)[0])
    heads_only = taught(digits, "finetune", (0, 1))
    assert heads_only.typicality(pixels) is None
    with pytest.raises(ModelError, match="keeps no class statistics"):
        heads_only.refuse_without_typicality()
    all_learned = taught(digits, "efc", (0, 1), held_out=0.0)
    assert all_learned.typicality(pixels) is None
    assert all_learned.temperature == 1.0
    with pytest.raises(ModelError, match="No images were held out"):
        all_learned.refuse_without_typicality()


def test_too_few_held_out_images_call_nothing_unknown(digits: Any) -> None:
    """Four images that happen to be close would reject most others."""
    model = taught(digits, "efc", (0, 1))
    assert model.held_out_closeness is not None
    assert model.held_out_closeness.images == 4
    assert model.typicality(coloured(digits.train(0)[0])) is None
    with pytest.raises(
        ModelError, match=r"held out \(4\) when this model learned.* needs 10.*or hold out a larger share"
    ):
        model.refuse_without_typicality()


def test_closeness_is_stale_once_the_network_is_trained_again(digits: Any) -> None:
    """A new class of a network that has moved must not be compared with what was close before."""
    model = taught(digits, "efc", (0, 1), held_out=0.5)
    assert model.typicality(coloured(digits.train(0)[0])) is not None
    images, labels = digits.train(2)
    learn(model, coloured(images), labels.tolist())
    assert model.held_out_closeness is not None
    assert model.held_out_closeness.images == 2, "those of the first task are about another network"
    assert model.typicality(coloured(images)) is None
    with pytest.raises(ModelError, match="when this model last trained its network"):
        model.refuse_without_typicality()


def test_a_new_class_is_known_although_the_network_has_moved(digits: Any) -> None:
    model = taught(digits, "efc", (0, 1), held_out=0.5)
    first = model.card.visits[0].measured
    assert first is not None
    assert first.closeness is not None
    images, labels = digits.train(2)
    learn(model, coloured(images), labels.tolist(), held_out=0.5)
    stale = replace(model.card.visits[0], measured=replace(first, closeness=Spread(24, 0.999, 1e-8)))
    model.card = replace(model.card, visits=(stale, model.card.visits[1]))
    typical = model.typicality(coloured(digits.test(2)[0]))
    assert typical is not None
    assert (typical < 0.05).mean() < 0.5, "compared with the first task alone, all are unknown"


def test_with_one_class_accuracy_says_nothing(digits: Any) -> None:
    model = taught(digits, "lda", (0,), held_out=0.5)
    said = measuring.in_words(model.card, model.card.visits[0])
    assert said == ["accuracy was not measured: with one class, every answer is right"]


def test_classes_that_differ_much_are_named_worst_first(frozen: Model) -> None:
    visit = frozen.card.visits[0]
    assert visit.measured is not None
    found = dataclasses.replace(visit.measured, right=19, images=30, among=3)

    def said(*counts: tuple[int, int]) -> list[str]:
        classes = zip(frozen.card.classes[:3], counts, strict=True)
        last = len(frozen.card.task_sizes) - 1
        known = tuple(dataclasses.replace(each, right=right, measured=of, task=last) for each, (right, of) in classes)
        card = dataclasses.replace(frozen.card, classes=known)
        return measuring.in_words(card, dataclasses.replace(visit, measured=found, images=90))

    first, second, *others = said((9, 10), (13, 20), (65, 100))
    assert first == "accuracy on held-out images of these classes, among all 3 classes the model knows: 63% (19 of 30)"
    assert second == "  by class: 1 65% (13 of 20), 2 65% (65 of 100), 0 90% (9 of 10)"
    assert others == ["  25% of the images were held out and are not learned from; --held-out changes the share."]
    assert not any("by class" in line for line in said((9, 10), (5, 7), (11, 13))), "they hardly differ"
    nothing = said((9, 10), (10, 20), (0, 0))
    assert nothing[1] == "  by class: 1 50% (10 of 20), 0 90% (9 of 10)"
    assert nothing[-1] == "  Not measured, because they have fewer than 5 images each: 2."


def test_a_frozen_network_keeps_what_every_visit_measured(frozen: Model) -> None:
    assert frozen.card.since_trained == frozen.card.visits
    assert frozen.held_out_closeness is not None
    assert frozen.held_out_closeness.images == sum(
        visit.measured.closeness.images for visit in frozen.card.visits if visit.measured and visit.measured.closeness
    )


def test_another_classifier_does_not_inherit_the_temperature(frozen: Model) -> None:
    model = Model(frozen.card, frozen.twin(), "cpu")
    model.change(dataclasses.replace(model.card.settings, classifier="nearest-mean", device="cpu"))
    assert model.temperature == 1.0


# -- the card --------------------------------------------------------------------------------------------------------


def test_a_measurement_survives_the_card_and_old_cards_have_none(frozen: Model) -> None:
    written = json.loads(json.dumps(frozen.card.to_json()))
    assert read_card(written).visits == frozen.card.visits
    assert read_card(written).classes == frozen.card.classes
    for part in (*written["visits"], *written["classes"]):
        part.pop("measured")
        part.pop("right", None)
    old = read_card(written)
    assert [visit.measured for visit in old.visits] == [None, None]
    assert {each.measured for each in old.classes} == {0}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("way",), "guessed"),
        (("images",), 0),
        (("right",), 10**9),
        (("among",), -1),
        (("classifier",), 5),
        (("classifier",), "x" * 1000),
        (("likelihood", "curve"), [0.0] * 3),
        (("likelihood", "curve"), [float("nan")] * len(calibration.GRID)),
        (("likelihood", "curve"), ["0"] * len(calibration.GRID)),
        (("likelihood",), 7),
        (("closeness", "mean"), 3.0),
        (("closeness", "variance"), -1.0),
        (("closeness", "images"), True),
    ],
)
def test_impossible_measurements_are_refused(frozen: Model, place: tuple[str, ...], value: Any) -> None:
    written = json.loads(json.dumps(frozen.card.to_json()))
    part = written["visits"][1]["measured"]
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    with pytest.raises(ModelError):
        read_card(written)


def test_more_right_than_measured_is_refused(frozen: Model) -> None:
    written = json.loads(json.dumps(frozen.card.to_json()))
    written["classes"][0]["right"] = written["classes"][0]["measured"] + 1
    with pytest.raises(ModelError):
        read_card(written)


# -- commands --------------------------------------------------------------------------------------------------------


def test_learn_ends_with_a_number_and_inspect_shows_it(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tmp_path / "model")
    assert main(["learn", model, "--data", str(folders / "first"), *PLAIN, "--method", "fecam"]) == 0
    said = capsys.readouterr().out
    assert "accuracy on held-out images of these classes, among all 2 classes the model knows: " in said
    assert "8% of the images were held out and are not learned from" in said
    assert "earlier classes" not in said
    assert main(["learn", model, "--data", str(folders / "second"), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "of 24)" in said
    assert "Each image was left out once, to be measured; in the end all are learned from." in said
    assert "Images of earlier classes are gone" in said
    assert main(["inspect", model]) == 0
    shown = capsys.readouterr().out
    assert "of 24 right" in shown
    assert re.search(r"\n  2  .*  task 2, 1 class of 24 images: .*among 3 classes, each left out once\n", shown)
    assert "temperature of the probabilities" in shown


def test_nothing_is_held_out_on_request(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    assert main(["learn", str(model), "--data", str(folders / "first"), *PLAIN, "--held-out", "0"]) == 0
    assert "accuracy was not measured: no image was held out" in capsys.readouterr().out
    assert [each.images for each in Model.load(model).card.classes] == [24, 24]
    assert main(["predict", str(model), str(folders / "second"), "--unknown"]) == 2
    assert "No images were held out" in capsys.readouterr().err


def test_predict_answers_unknown_in_every_format(
    frozen: Model, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    frozen.save(tmp_path / "model")
    strange = tmp_path / "strange.png"
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (8, 8, 3), np.uint8)).save(strange)
    command = ["predict", str(tmp_path / "model"), str(strange), "--device", "cpu", "--unknown", "0.9"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert said.out == f"{strange}  unknown\n"
    assert said.err.count("about 90% of images of known classes are answered unknown as well") == 1
    assert main([*command, "--format", "json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["unknown"] is True
    assert 0 <= answer["typicality"] < 0.9
    assert len(answer["predictions"]) == 1
    assert main([*command, "--format", "csv"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header == "image,rank,class,probability,typicality"
    assert row.split(",")[1:4] == ["1", "unknown", ""]
    digit = str(next((folders / "second").glob("*/*.png")))
    assert main([*command[:2], digit, *command[3:-1], "0.000001"]) == 0
    assert not capsys.readouterr().out.endswith("unknown\n")
    assert main([*command[:-1], "several.png"]) == 2
    assert "--unknown takes a share of images between 0 and 1" in capsys.readouterr().err


def test_memory_is_stated_where_it_is_much_or_more_than_is_free(frozen: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    card = dataclasses.replace(frozen.card, image_size=224)
    monkeypatch.setattr(tiers, "_free_host", lambda: 10**10)
    assert list(memory_needed(card, 8_000)) == []
    assert list(memory_needed(card, 10_000)) == ["10,000 images take about 2.2 GB of memory while they are learned"]
    joined = replace(card, resolved=replace(card.resolved, network="efficientnet-lite0+efficientnet-lite1"))
    assert list(memory_needed(joined, 10_000)) == [
        "10,000 images take about 2.6 GB of memory while they are learned"
    ], "covariances of many features are large"
    large = replace(card, resolved=replace(card.resolved, network="resnet50"))
    (line,) = memory_needed(large, 10_000)
    assert "about 2.8 GB" in line, "and so are large networks"
    (line,) = memory_needed(card, 60_000)
    assert line.endswith(
        "about 11.2 GB of memory while they are learned, and 10.0 GB are free: learn fewer classes in a visit"
    )
    trained = dataclasses.replace(card, visits=())  # the first task trains, and what that takes is not known
    assert list(memory_needed(trained, 60_000)) == []


# -- features that are computed once ---------------------------------------------------------------------------------


def test_estimating_the_time_copies_a_few_images_alone(frozen: Model) -> None:
    pixels = np.zeros((20_000, 8, 8, 3), np.uint8)
    estimate(frozen, pixels[:1], 1)
    tracemalloc.start()
    try:
        estimate(frozen, pixels, len(pixels))
        assert tracemalloc.get_traced_memory()[1] < pixels.nbytes / 4
    finally:
        tracemalloc.stop()


def test_a_memo_computes_features_once_and_only_of_unchanged_weights(frozen: Model) -> None:
    network = frozen.twin().network
    images = torch.randn(6, 3, 8, 8)
    with torch.no_grad():
        plain = network.features(images)
        calls: list[int] = []
        original = network.features
        object.__setattr__(network, "features", lambda x: (calls.append(len(x)), original(x))[1])
        FeatureMemo().attach(network)
        torch.testing.assert_close(network.features(images[:4]), plain[:4])
        torch.testing.assert_close(network.features(images.flip(0)), plain.flip(0))
        network.features(images.contiguous(memory_format=torch.channels_last))  # the same images, however they lie
        assert calls == [4, 2]
        next(iter(network.backbone.parameters())).mul_(1.5)
        assert not torch.allclose(network.features(images), plain)
    assert calls == [4, 2, 6]


def test_a_memo_keeps_images_apart_whose_batch_has_a_copy(frozen: Model) -> None:
    network = frozen.twin().network
    images = torch.randn(9, 3, 8, 8)
    images[2] = images[0]
    with torch.no_grad():
        plain = network.features(images)
        FeatureMemo().attach(network)
        for start in (0, 3, 6):
            network.features(images[start : start + 3])
        torch.testing.assert_close(network.features(images), plain)


def test_a_memo_leaves_nothing_behind(frozen: Model) -> None:
    network = frozen.ready.network
    with remembered_features(network):
        assert "features" in vars(network)
    assert "features" not in vars(network)


def test_classes_that_change_keep_what_still_holds(frozen: Model) -> None:
    from efcil.model import classes

    model = Model(frozen.card, frozen.twin(), "cpu")
    before = model.temperature
    classes.rename(model, 3, "three")
    assert model.card.classes[3].measured == 24
    assert model.temperature == before
    classes.merge(model, [0, 1], "round or long")
    assert [each.measured for each in model.card.classes] == [0, 2, 24, 24]
    assert model.typicality(np.zeros((2, 8, 8, 3), np.uint8)) is not None
    assert read_card(json.loads(json.dumps(model.card.to_json()))).visits == model.card.visits
