"""`efcil evaluate`: a model against labelled images, and what is printed of it."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn import metrics

from efcil.classifier import IncrementalClassifier
from efcil.cli import main
from efcil.evaluation.classification import Confusion
from efcil.model import Model
from efcil.model.evaluation import Evaluation, better_than_expected, evaluate, evaluate_folder
from efcil.model.images import InputError, Pictures
from efcil.model.in_memory import probabilities
from efcil.report.evaluation import render

QUICK = ["--preset", "digits", "--image-size", "8", "--device", "cpu", "--quiet", "--epochs", "1"]


@pytest.fixture(scope="session")
def named(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows digit-0, digit-1 and digit-2, learned in two tasks."""
    model = tmp_path_factory.mktemp("named") / "model"
    assert main(["learn", str(model), "--data", str(folders / "first"), *QUICK]) == 0
    assert main(["learn", str(model), "--data", str(folders / "second"), *QUICK[4:]]) == 0
    return model


@pytest.fixture
def pictures(folders: Path, tmp_path: Path) -> Path:
    """A folder to evaluate on, to do with as one likes: 24 images of each of the three digits."""
    return Path(shutil.copytree(folders / "held-out", tmp_path / "pictures"))


class Guessing(Model):
    """A model whose answers are given: the red and green values of pixel 0, 0 name the class and its probability."""

    def scores(self, pixels: np.ndarray) -> np.ndarray:
        chance = pixels[:, 0, 0, 1].astype(np.float64) / 255
        rest = np.log(np.maximum(1e-12, (1 - chance) / (len(self.card.classes) - 1)))
        scores = np.repeat(rest[:, None], len(self.card.classes), axis=1)
        scores[np.arange(len(pixels)), pixels[:, 0, 0, 0]] = np.log(chance)
        return scores

    def probabilities(self, pixels: np.ndarray) -> np.ndarray:
        """Return the softmax of the scores, as they are."""
        return probabilities(self.scores(pixels))

    def refuse_without_typicality(self) -> None:
        """Refuse nothing."""

    def typicality(self, pixels: np.ndarray) -> np.ndarray:
        """Return what the blue values say."""
        return pixels[:, 0, 0, 2].astype(np.float64) / 255


@pytest.fixture
def guessing(trained: Path) -> Guessing:
    return Guessing.load(trained, "cpu")


def asked(*wanted: tuple[int, float, float]) -> np.ndarray:
    """Return images to which `Guessing` answers as wanted: (class, probability, typicality)."""
    images = np.zeros((len(wanted), 8, 8, 3), np.uint8)
    for image, (answer, chance, typical) in zip(images, wanted, strict=True):
        image[:] = (answer, round(255 * chance), round(255 * typical))
    return images


def output(capsys: Any, *arguments: Any, code: int = 0) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == code
    return str(capsys.readouterr().out)


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_of_very_many_classes_pairs_are_listed_and_no_matrix(
    named: Path, folders: Path, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("evaluate", named, "--data", folders / "held-out", "--format", "json")
    before = json.loads(output(capsys, *given))
    for limit in (
        "evaluation.result.MOST_IN_FULL",
        "report.evaluation.MOST_IN_MATRIX",
        "report.evaluation_page.MOST_IN_FULL",
    ):
        monkeypatch.setattr(f"efcil.{limit}", 1)
    monkeypatch.setattr("efcil.report.evaluation_page.MOST_IN_TABLE", 1)
    monkeypatch.delattr(Confusion, "matrix")  # of 10,000 classes it would take 800 MB
    found = json.loads(output(capsys, *given))
    assert found["confusion_matrix"]["images"] is None
    assert found["confusions"] == before["confusions"]
    (first, *_) = found["confusions"]
    assert f"{first['class']} taken for {first['answer']}" in output(capsys, *given[:4])
    output(capsys, *given[:4], "--format", "html", "--output", tmp_path / "page.html")
    assert "3 classes are too many for a picture" in (tmp_path / "page.html").read_text()
    table = output(capsys, *given[:4], "--format", "csv")
    assert f",{first['answer']},{first['images']}" in table


def test_numbers_agree_with_scikit_learn(named: Path, folders: Path, capsys: Any) -> None:
    held_out = folders / "held-out"
    found = json.loads(output(capsys, "evaluate", named, "--data", held_out, "--format", "json"))
    same = output(capsys, "evaluate", named, "--data", held_out, "--format", "json", "--output", "-")
    assert json.loads(same)["images"] == found["images"]
    classifier = IncrementalClassifier.load(named, device="cpu")
    truth = [path.parent.name for path in sorted(held_out.rglob("*.png"))]
    answers, chances = classifier.predict(held_out).tolist(), classifier.predict_proba(held_out)
    assert found["images"] == 72
    assert found["accuracy"] == metrics.accuracy_score(truth, answers)
    assert found["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(truth, answers))
    assert found["confusion_matrix"]["images"] == metrics.confusion_matrix(truth, answers).tolist()
    assert found["calibration"]["mean_confidence"] == pytest.approx(chances.max(axis=1).mean())
    wanted = metrics.precision_recall_fscore_support(truth, answers, zero_division=np.nan)
    for column, values in zip(("precision", "recall", "f1", "images"), wanted, strict=True):
        given = [np.nan if each[column] is None else each[column] for each in found["classes"]]
        assert given == pytest.approx(values.tolist(), nan_ok=True)
    wrong = [chance for chance, own, answer in zip(chances.max(axis=1), truth, answers, strict=True) if own != answer]
    assert [each["probability"] for each in found["mistakes"]] == pytest.approx(sorted(wrong, reverse=True))
    assert [each["task"] for each in found["classes"]] == [1, 1, 2]
    assert sum(each["images"] for each in found["tasks"]) == 72


def test_pieces_do_not_matter(named: Path, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model.load(named, "cpu")
    whole = evaluate_folder(model, folders / "held-out")
    counted: list[int] = []
    monkeypatch.setattr(Model, "piece", 7)
    found = evaluate_folder(model, folders / "held-out", progress=counted.append)
    assert found.confusion.tolist() == whole.confusion.tolist()
    chances = [[each.probability for each in one.mistakes] for one in (found, whole)]
    assert chances[0] == pytest.approx(chances[1], rel=1e-4)
    assert whole.mistakes, "else nothing is compared"
    assert counted == [7] * 10 + [2]


def test_answers_by_hand(guessing: Guessing) -> None:
    images = asked((0, 0.9, 1), (1, 0.8, 1), (1, 0.6, 1), (1, 0.7, 1), (0, 0.5, 1))
    found = evaluate(guessing, images, [0, 0, 1, 1, 1])
    assert isinstance(found, Evaluation)
    assert found.confusion.tolist() == [[1, 1, 0], [1, 2, 0], [0, 0, 0]]
    assert (found.accuracy, found.correct) == (0.6, 3)
    assert found.balanced_accuracy == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert [(each.image, each.truth, each.answer) for each in found.mistakes] == [("image 1", 0, 1), ("image 4", 1, 0)]
    assert found.mistakes[0].probability == pytest.approx(0.8, abs=0.01)
    assert found.mistakes[0].probability_of_truth == pytest.approx(0.1, abs=0.01)
    assert [each.name for each in found.without_images] == ["2"]
    assert found.classes[2].recall is None
    assert found.classes[2].precision is None
    assert found.top == (), "three classes have no more than three first answers"
    assert found.rejection is None
    json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("measured", "right", "correct", "said"),
    [(40, 20, 40, True), (40, 20, 25, False), (40, 38, 40, False), (0, 0, 40, False)],
)
def test_images_that_may_have_been_learned_from_are_told(
    guessing: Guessing, measured: int, right: int, correct: int, said: bool
) -> None:
    first, *others = guessing.card.classes
    card = replace(guessing.card, classes=(replace(first, measured=measured, right=right), *others))
    found = evaluate(guessing, asked(*[(int(place >= correct), 0.9, 0.5) for place in range(40)]), [0] * 40)
    assert found.correct == correct
    remark = better_than_expected(card, found)
    assert (remark is not None) is said
    assert remark is None or "(50%). If the model has learned from these images" in remark


def test_the_command_warns_of_images_that_may_have_been_learned_from(
    named: Path, pictures: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("efcil.model.evaluation.better_than_expected", lambda card, found: f"{found.images} images!")
    assert main(["evaluate", str(named), "--data", str(pictures), "--format", "csv"]) == 0
    assert capsys.readouterr().err == "efcil: 72 images!\n"


def test_names_and_pictures_may_be_given(guessing: Guessing) -> None:
    found = evaluate(guessing, Pictures(asked((1, 0.9, 1))), [0], names=["upload.png"], model_name="m", data="d")
    assert found.mistakes[0].image == "upload.png"
    assert (found.model, found.data) == ("m", "d")
    with pytest.raises(InputError, match=r"There are 1 images. Give one label for each"):
        evaluate(guessing, Pictures(asked((1, 0.9, 1))), [])


def test_calibrated_probabilities_are_taken_where_the_model_has_them(
    guessing: Guessing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guessing, "probabilities", lambda self, pixels: np.tile([0.2, 0.7, 0.1], (len(pixels), 1)))
    found = evaluate(guessing, asked((0, 0.9, 1)), [0])
    assert (found.mistakes[0].answer, found.mistakes[0].probability) == (1, 0.7)


def typical(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    """Let all models have this typicality."""
    monkeypatch.setattr(Model, "typicality", function, raising=False)
    monkeypatch.setattr(Model, "refuse_without_typicality", lambda self: None, raising=False)


# -- unknown classes -------------------------------------------------------------------------------------------------


def test_unknown_classes_are_reported_apart(guessing: Guessing) -> None:
    images = asked((0, 0.9, 0.5), (1, 0.8, 0.02), (0, 0.6, 0.01), (0, 0.7, 0.5), (2, 0.5, 0.0))
    labels = [0, 1, "cat", "cat", "cat"]
    plain = evaluate(guessing, images, labels)
    assert plain.images == 2
    assert plain.accuracy == 1.0
    (cat,) = plain.unknown_classes
    assert (cat.name, cat.images, cat.answers, cat.recognised) == ("cat", 3, ((0, 2), (2, 1)), None)
    assert plain.confidence_auroc == 1.0
    found = evaluate(guessing, images, labels, unknown=0.05)
    assert found.unknown_classes[0].recognised == 2
    assert found.unknown_classes[0].answers == ((0, 1),), "what is recognised is not answered"
    assert "cat: 3 images; 2 recognised as unknown, others answered as 0 (1)" in render(found, "text")
    rejection = found.rejection
    assert rejection is not None
    assert (rejection.known_rejected, rejection.known_images) == (1, 2)
    assert (rejection.unknown_recognised, rejection.unknown_images) == (2, 3)
    assert rejection.accepted_accuracy == 1.0
    # Of the 6 pairs, 0.5 is above two and ties with one, 0.02 is above two.
    assert rejection.auroc == pytest.approx(4.5 / 6)
    json.dumps(found.to_json(), allow_nan=False)


def test_unknown_classes_alone(guessing: Guessing, tmp_path: Path) -> None:
    images = asked((0, 0.9, 0.01), (1, 0.8, 0.5))
    with pytest.raises(InputError, match=r"knows none of these classes: cat, dog. It knows 0, 1, 2"):
        evaluate(guessing, images, ["cat", "dog"])
    found = evaluate(guessing, images, ["cat", "dog"], unknown=0.05)
    assert found.accuracy is None
    assert found.calibration is None
    for form in ("text", "csv", "html", "json"):
        assert "cat" in render(found, form)
    assert "recognised as unknown: 1 of 2 images of unknown classes (50.0%)" in render(found, "text")
    assert "  cat: 1 image; 1 recognised as unknown\n" in render(found, "text")
    assert "  dog: 1 image; 0 recognised as unknown, answered as 1 (1)\n" in render(found, "text")


def test_a_name_that_differs_in_capitals_is_said(named: Path, pictures: Path, capsys: Any) -> None:
    (pictures / "digit-0").rename(pictures / "Digit-0")
    assert "The model's class is called digit-0: rename" in output(capsys, "evaluate", named, "--data", pictures)


def test_folders_name_labels_that_are_numbers(trained: Path, pictures: Path) -> None:
    for digit in (0, 1, 2):
        (pictures / f"digit-{digit}").rename(pictures / str(digit))
    found = evaluate_folder(Model.load(trained, "cpu"), pictures)
    assert (found.images, found.unknown_classes) == (72, ())
    assert [each.label for each in found.classes] == [0, 1, 2]


def test_a_model_that_cannot_tell_says_so(
    named: Path, pictures: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "held_out_closeness", None)
    assert main(["evaluate", str(named), "--data", str(pictures), "--unknown"]) == 2
    assert "it cannot answer unknown" in capsys.readouterr().err


@pytest.mark.parametrize("share", ["0", "1", "-1", "nan", "x", "inf"])
def test_shares_that_are_none(named: Path, share: str, capsys: Any) -> None:
    assert main(["evaluate", str(named), "--data", ".", f"--unknown={share}"]) == 2
    assert "--unknown takes a share of images between 0 and 1" in capsys.readouterr().err


def test_the_usual_share(named: Path, pictures: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    typical(monkeypatch, lambda self, pixels: np.full(len(pixels), 0.05))
    said = output(capsys, "evaluate", named, "--data", pictures, "--unknown")
    assert "wrongly answered as unknown: 0 of 72 images of known classes (0.0%; expected: 5.0%)" in said
    said = output(capsys, "evaluate", named, "--data", pictures, "--unknown", "0.1")
    assert "wrongly answered as unknown: 72 of 72 images" in said


# -- folders ---------------------------------------------------------------------------------------------------------


def test_test_images_beside_training_images_are_taken(named: Path, folders: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(folders / "both", tmp_path / "all" / "train")
    shutil.copytree(folders / "held-out", tmp_path / "all" / "test")
    split = json.loads(output(capsys, "evaluate", named, "--data", tmp_path / "all", "--format", "json"))
    plain = json.loads(output(capsys, "evaluate", named, "--data", folders / "held-out", "--format", "json"))
    assert split["data"] == str(tmp_path / "all" / "test")
    assert split["confusion_matrix"] == plain["confusion_matrix"]


def test_broken_images_are_reported_and_skipped(named: Path, pictures: Path, capsys: Any) -> None:
    (pictures / "digit-0" / "broken.png").write_text("no image")
    (pictures / "digit-0" / "notes.txt").write_text("no image")
    command = ["evaluate", str(named), "--data", str(pictures), "--format", "json"]
    assert main(command) == 1
    said = capsys.readouterr()
    assert re.search(r"broken\.png cannot be decoded .* Skipped\.", said.err)
    assert "1 image could not be read." in said.err
    assert "1 file ignored: 1 .txt" in said.err
    found = json.loads(said.out)
    assert found["images"] == 72
    assert found["unreadable"][0]["image"].endswith("broken.png")
    assert main([*command, "--skip-broken"]) == 0
    assert "1 image could not be read, and is not counted" in output(
        capsys, "evaluate", named, "--data", pictures, "--skip-broken"
    )


def test_nothing_that_can_be_read(named: Path, tmp_path: Path, capsys: Any) -> None:
    place = tmp_path / "pictures" / "digit-0"
    place.mkdir(parents=True)
    (place / "broken.png").write_text("no image")
    assert main(["evaluate", str(named), "--data", str(tmp_path / "pictures")]) == 2
    assert "None of the 1 images could be read. The first: " in capsys.readouterr().err
    assert main(["evaluate", str(named), "--data", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err


def test_one_image(named: Path, pictures: Path, tmp_path: Path, capsys: Any) -> None:
    file = next((pictures / "digit-1").iterdir())
    place = tmp_path / "single" / "digit-1"
    place.mkdir(parents=True)
    shutil.copy(file, place)
    for form in ("text", "json", "csv"):
        assert output(capsys, "evaluate", named, "--data", tmp_path / "single", "--format", form)
    said = output(capsys, "evaluate", named, "--data", tmp_path / "single")
    assert "2 classes of the model without images here: digit-0, digit-2" in said
    assert "mean recall of 1 class\n" in said


# -- formats ---------------------------------------------------------------------------------------------------------


def test_text(guessing: Guessing) -> None:
    images = asked(*[(0, 0.9, 1)] * 3, (1, 0.8, 1), (1, 0.75, 1))
    said = render(evaluate(guessing, images, [0, 0, 1, 1, 1]), "text")
    assert "accuracy            80.0%  4 of 5 images; 95% interval 37.6 to 96.4\n" in said
    assert "balanced accuracy   83.3%  mean recall of 2 classes\n" in said
    assert re.search(r"^0 +2 +66\.7% +100\.0% +80\.0%$", said, re.M)
    assert re.search(r"^1 +3 +100\.0% +66\.7% +80\.0%  0 \(1\)$", said, re.M)
    assert " 1  0  2  .\n 2  1  1  2\n" in said
    assert "  0.902  image 2: 1 taken for 0\n" in said
    assert "1 class of the model without images here: 2\n" in said


def test_csv_has_a_line_per_class(named: Path, pictures: Path, capsys: Any) -> None:
    (pictures / "digit-2").rename(pictures / '=cat, "x"')
    said = output(capsys, "evaluate", named, "--data", pictures, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(said)))
    assert [row["class"] for row in rows] == ["digit-0", "digit-1", "digit-2", '\'=cat, "x"']
    assert [row["known"] for row in rows] == ["yes", "yes", "yes", "no"]
    assert [row["images"] for row in rows] == ["24", "24", "0", "24"]
    assert rows[2]["recall"] == ""
    assert all(len(row) == 14 and None not in row.values() for row in rows)


def test_the_file_decides_the_format(named: Path, pictures: Path, tmp_path: Path, capsys: Any) -> None:
    for name, start in (("a.json", "{"), ("a.csv", "class,"), ("a.html", "<!doctype"), ("a.HTM", "<!doc"), ("a", "im")):
        said = output(capsys, "evaluate", named, "--data", pictures, "--output", tmp_path / name)
        assert said.startswith("accuracy ")
        assert said.endswith(f"written to {tmp_path / name}\n")
        assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)


def test_a_page_is_only_written_where_it_is_asked_for(named: Path, pictures: Path, capsys: Any) -> None:
    assert main(["evaluate", str(named), "--data", str(pictures), "--format", "html"]) == 2
    assert "small copies of images" in capsys.readouterr().err
    assert main(["evaluate", str(named), "--data", str(pictures), "--output", "/proc/none/a.json"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["evaluate", str(named), "--data", str(pictures), "--format", "xml"]) == 2
    assert "Unknown format 'xml'" in capsys.readouterr().err


class Page(HTMLParser):
    """Raises where a tag is closed that is not open; collects tags, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def files(tmp_path: Path, wanted: list[tuple[str, int]]) -> tuple[Pictures, list[str]]:
    """Write images of (class, answer), and return them with their labels."""
    paths, labels = [], []
    for number, (label, answer) in enumerate(wanted):
        paths.append(tmp_path / f"{number:03}.png")
        Image.fromarray(asked((answer, 0.9, 1.0))[0]).save(paths[-1])
        labels.append(label)
    return Pictures(paths), labels


def test_the_page_shows_the_pictures_of_mistakes(guessing: Guessing, tmp_path: Path) -> None:
    pictures, labels = files(tmp_path, [("0", 1), ("1", 1), ("2", 0), ("cat", 2)])
    found = evaluate(guessing, pictures, labels, unknown=0.05, data=str(tmp_path), model_name="models/things")
    page = Page(render(found, "html"))
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert [each["alt"] for each in images] == ["0, taken for 1", "2, taken for 0"]
    import base64

    content = base64.b64decode((images[0]["src"] or "").removeprefix("data:image/jpeg;base64,"))
    with Image.open(io.BytesIO(content)) as picture:
        assert (picture.size, picture.format) == ((160, 160), "JPEG")
    for words in (
        "Evaluation of things",
        "This page holds small copies of 2 images:",
        "33.3%",
        "000.png",
        "Classes that the model does not know",
        "1 class that the model does not know (1 image)",
        "AUROC of known against unknown classes by typicality",
    ):
        assert words in page.text
    (tmp_path / "000.png").unlink()
    page = Page(render(found, "html"))
    assert "no picture" in page.text
    assert "a small copy of 1 image" in page.text


def test_the_page_needs_nothing_from_elsewhere(guessing: Guessing, tmp_path: Path) -> None:
    pictures, labels = files(tmp_path, [("0", 1), ("1", 1)])
    text = render(evaluate(guessing, pictures, labels), "html")
    for outside in ("http:", "https:", "url(", "@import", "<script", "javascript:"):
        assert outside not in text
    page = Page(text)
    assert {attributes["src"][:5] for _, attributes in page.tags if attributes.get("src")} == {"data:"}
    assert all((attributes.get("href") or "#").startswith("#") for _, attributes in page.tags)
    policy = [attributes["content"] for tag, attributes in page.tags if "http-equiv" in attributes]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_a_picture_has_no_metadata(tmp_path: Path) -> None:
    import base64

    from efcil.report.evaluation_page import thumbnail

    exif = Image.Exif()
    exif[0x010E] = "where it was taken"
    Image.new("RGB", (40, 20), "red").save(tmp_path / "a.jpg", exif=exif)
    content = base64.b64decode((thumbnail(str(tmp_path / "a.jpg")) or "").partition(",")[2])
    assert b"taken" not in content
    with Image.open(io.BytesIO(content)) as picture:
        assert dict(picture.getexif()) == {}
    assert thumbnail(str(tmp_path / "none.jpg")) is None


# -- hostile text ----------------------------------------------------------------------------------------------------

HOSTILE = "<script>alert(1)</script>\"'&\x1b]0;owned\x07\u202e"


@pytest.mark.parametrize("form", ["text", "json", "html"])
@pytest.mark.parametrize("known", [True, False])
def test_names_are_text(guessing: Guessing, tmp_path: Path, form: str, known: bool) -> None:
    from dataclasses import replace

    if known:
        classes = [replace(each, label=f"{HOSTILE}{number}") for number, each in enumerate(guessing.card.classes)]
        guessing.card = replace(guessing.card, classes=tuple(classes))
    folder = tmp_path / HOSTILE.replace("/", "")
    folder.mkdir()
    pictures, _ = files(folder, [("", 1), ("", 1), ("", 2), ("", 0)])
    own = guessing.card.labels
    broken = folder / "broken\x1b.png"
    broken.write_text("x")
    labels = [own[0], own[1], own[1], HOSTILE, own[0]]
    found = evaluate(guessing, Pictures([*pictures.items, broken]), labels, unknown=0.05, model_name=HOSTILE)
    said = render(found, form)
    assert [c for c in said if not c.isprintable() and c != "\n"] == []
    assert "x1b" in said or "u001b" in said
    if form == "html":
        page = Page(said)
        assert "script" not in {tag for tag, _ in page.tags}
        assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
        assert "<script>alert(1)</script>" in page.text
    if form == "json":
        assert json.loads(said)["unknown_classes"][0]["class"] == HOSTILE


@pytest.mark.parametrize("name", ["=1+1", "+x", "-x", "@x", "\tx", "=a\r\nb"])
def test_names_in_csv_are_no_formulas(guessing: Guessing, name: str) -> None:
    from dataclasses import replace

    classes = (replace(guessing.card.classes[0], label=name), *guessing.card.classes[1:])
    guessing.card = replace(guessing.card, classes=classes)
    found = evaluate(guessing, asked((0, 0.9, 1), (0, 0.9, 1)), [1, f"{name}?"])
    rows = list(csv.reader(io.StringIO(render(found, "csv"), newline="")))
    assert [row[0] for row in rows] == ["class", f"'{name}", "1", "2", f"'{name}?"]
    assert (rows[2][-2:], rows[4][-2:]) == ([f"'{name}", "1"], [f"'{name}", "1"])
    assert {len(row) for row in rows} == {14}


def test_many_classes(guessing: Guessing, tmp_path: Path) -> None:
    from dataclasses import replace

    first = guessing.card.classes[0]
    guessing.card = replace(guessing.card, classes=tuple(replace(first, label=f"class {n}") for n in range(60)))
    pictures, labels = files(tmp_path, [(f"class {n}", n // 2) for n in range(60)])
    found = evaluate(guessing, pictures, labels)
    said = render(found, "text")
    assert "confusion matrix" not in said
    assert "most frequent confusions" in said
    assert "the 20 of 60 classes with the lowest recall (all: --format csv)\n" in said
    assert len(re.findall(r"^class \d+ +1 +", said, re.M)) == 20
    assert "  and 49 other pairs of classes\n" in said
    assert [k for k, _ in found.top] == [3, 5]
    page = Page(render(found, "html"))
    (picture,) = [attributes for tag, attributes in page.tags if attributes.get("class") == "map"]
    import base64

    with Image.open(io.BytesIO(base64.b64decode((picture["src"] or "").partition(",")[2]))) as opened:
        pixels = np.asarray(opened)
    assert pixels.shape == (60, 60, 4)
    assert tuple(pixels[0, 0]) == (0, 114, 178, 255), "all images of the first class are answered rightly"
    assert tuple(pixels[5, 2]) == (213, 94, 0, 255)
    assert pixels[..., 3].sum() == 60 * 255
