"""`efcil predict` and `efcil inspect`."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from efcil.classifier import IncrementalClassifier
from efcil.cli import main
from efcil.model import Model
from efcil.model.prediction import image_files, predict_files

QUICK = ["--preset", "digits", "--image-size", "8", "--device", "cpu", "--quiet", "--epochs", "1"]


@pytest.fixture(scope="session")
def named(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows digit-0, digit-1 and digit-2."""
    model = tmp_path_factory.mktemp("named") / "model"
    for visit in ("first", "second"):
        assert (
            main(["learn", str(model), "--data", str(folders / visit), *(QUICK if visit == "first" else QUICK[4:])])
            == 0
        )
    return model


def output(capsys: Any, *arguments: Any) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    return str(capsys.readouterr().out)


def test_predictions_agree_with_the_classifier(named: Path, folders: Path, capsys: Any) -> None:
    held_out = folders / "held-out"
    classifier = IncrementalClassifier.load(named, device="cpu")
    chances = classifier.predict_proba(held_out)
    rows = list(
        csv.DictReader(io.StringIO(output(capsys, "predict", named, held_out, "--format", "csv", "--top", "3")))
    )
    assert len(rows) == 3 * len(chances) == 3 * 72
    assert [row["rank"] for row in rows[:3]] == ["1", "2", "3"]
    best = [row["class"] for row in rows if row["rank"] == "1"]
    assert best == classifier.predict(held_out).tolist()
    printed = np.array([float(row["probability"]) for row in rows]).reshape(-1, 3)
    np.testing.assert_allclose(printed, np.sort(chances, axis=1)[:, ::-1], atol=1e-6)
    assert [row["image"] for row in rows[::3]] == sorted(str(path) for path in held_out.rglob("*.png"))


def test_formats(named: Path, folders: Path, capsys: Any) -> None:
    image = next((folders / "held-out").rglob("*.png"))
    text = output(capsys, "predict", named, image, "--top", "2")
    assert text.startswith(f"{image}  digit-")
    assert len(text.split()) == 5
    (answer,) = json.loads(output(capsys, "predict", named, image, "--format", "json"))
    assert answer["image"] == str(image)
    assert answer["predictions"][0]["class"] == text.split()[1]
    assert len(json.loads(output(capsys, "predict", named, image, image, "--format", "json", "--top", "9"))) == 2
    assert main(["predict", str(named), str(image), "--format", "xml"]) == 2
    assert main(["predict", str(named), str(image), "--top", "0"]) == 2


def test_folders_patterns_and_lists(named: Path, folders: Path, capsys: Any, monkeypatch: Any) -> None:
    files = sorted(str(path) for path in (folders / "second").rglob("*.png"))

    def names(*arguments: str) -> list[str]:
        return [line.split("  ")[0] for line in output(capsys, "predict", named, *arguments).splitlines()]

    assert names(str(folders / "second")) == files
    assert names(f"{folders}/second/*/*.png") == files
    assert names(f"{folders}/sec*/**/*.png") == files
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(files[:3]) + "\n\n"))
    assert names(files[5], "-") == [files[5], *files[:3]]
    for wrong, message in ((f"{folders}/*.jpg", "No file matches"), (str(named), "holds no image")):
        assert main(["predict", str(named), wrong]) == 2
        assert message in capsys.readouterr().err


def test_patterns_and_lists_may_name_folders(
    named: Path, folders: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    files = sorted(str(path) for path in (folders / "first").rglob("*.png"))

    def names(*arguments: str) -> list[str]:
        return list(image_files(arguments, io.StringIO(f"{folders}/first\n{files[0]}\n")))

    assert names(f"{folders}/first/*") == files
    monkeypatch.chdir(folders)
    assert [os.path.abspath(name) for name in names("./first/**")] == files, "each once"
    assert names("-") == [*files, files[0]]
    (tmp_path / "empty").mkdir()
    assert main(["predict", str(named), f"{tmp_path}/emp*"]) == 2
    assert "matches only folders that hold no image" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{tmp_path}/empty\n"))
    assert main(["predict", str(named), "-"]) == 1
    assert "empty is a folder, not an image" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["nothing-*.png", "empty"])
def test_a_wrong_name_is_told_before_anything_is_predicted(
    wrong: str, named: Path, folders: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(Model, "piece", 4)
    assert main(["predict", str(named), str(folders / "first"), wrong]) == 2
    shown = capsys.readouterr()
    assert wrong in shown.err
    assert shown.out == ""


def test_lists_name_files_of_any_bytes(
    named: Path, folders: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    name = os.fsencode(tmp_path) + b"/caf\xe9.png"
    shutil.copy(next((folders / "second").rglob("*.png")), os.fsdecode(name))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(name + b"\n"), encoding="utf-8"))
    assert r"/caf\udce9.png  digit-" in output(capsys, "predict", named, "-")


@pytest.mark.parametrize("form", ["json", "csv"])
def test_formats_for_programs_are_utf_8_whatever_the_terminal_has(
    form: str, named: Path, folders: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    names = [str(tmp_path / "\u732b \u0142.png"), os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png")]
    for name in names:
        shutil.copy(next((folders / "second").rglob("*.png")), name)
    printed = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding="cp1252"))
    assert main(["predict", str(named), *names, "--format", form]) == 0
    content = printed.getvalue()
    if form == "json":
        assert [row["image"] for row in json.loads(content.decode("utf-8"))] == names
    else:
        rows = csv.DictReader(io.StringIO(os.fsdecode(content)))
        assert [row["image"] for row in rows] == names


def test_names_do_not_reach_the_terminal_as_commands(digits: Any, folders: Path, tmp_path: Path, capsys: Any) -> None:
    images, numbers = digits.train(0, 1)
    nasty = "a\x1b[2J\nb"
    IncrementalClassifier(preset="digits", epochs=1, device="cpu").fit(images, [nasty] * len(numbers)).save(tmp_path)
    image = next((folders / "second").rglob("*.png"))
    for text in (output(capsys, "predict", tmp_path, image), output(capsys, "inspect", tmp_path)):
        assert r"a\x1b[2J\nb" in text
        assert "\x1b" not in text
    (answer,) = json.loads(output(capsys, "predict", tmp_path, image, "--format", "json"))
    assert answer["predictions"][0]["class"] == nasty
    assert main(["predict", str(tmp_path), "--format", "\x1b[2J"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_broken_images_are_named_and_skipped(named: Path, folders: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(folders / "second" / "digit-2", tmp_path / "mixed")
    intact = len(list((tmp_path / "mixed").iterdir()))
    (tmp_path / "mixed" / "aaa.png").write_bytes(b"no image")
    cut = tmp_path / "mixed" / "zzz.png"
    cut.write_bytes(next((folders / "second").rglob("*.png")).read_bytes()[:40])
    capsys.readouterr()
    assert main(["predict", str(named), str(tmp_path / "mixed"), str(tmp_path / "gone.png"), "--format", "json"]) == 1
    shown = capsys.readouterr()
    assert len(json.loads(shown.out)) == intact
    for name in ("aaa.png", "zzz.png", "gone.png"):
        assert name in shown.err
    assert "3 images could not be read" in shown.err


def test_an_interruption_leaves_valid_json(named: Path, folders: Path, capsys: Any, monkeypatch: Any) -> None:
    for before in (0, 2):

        def interrupted(*arguments: Any, before: int = before) -> Iterator[Any]:
            yield from itertools.islice(predict_files(*arguments), before)
            raise KeyboardInterrupt

        monkeypatch.setattr("efcil.model.prediction.predict_files", interrupted)
        capsys.readouterr()
        assert main(["predict", str(named), str(folders / "second"), "--format", "json"]) == 130
        assert len(json.loads(capsys.readouterr().out)) == before


def test_files_that_are_no_images_are_counted(
    named: Path, folders: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    shutil.copytree(folders / "second" / "digit-2", tmp_path / "mixed" / "deeper")
    for name in ("a.NEF", "deeper/b.nef", "photo", ".hidden", "Thumbs.db"):
        (tmp_path / "mixed" / name).touch()
    line = (
        "efcil: 3 files ignored: 2 .nef (raw photographs: convert to JPEG), "
        "1 without suffix (if they are images, convert to JPEG or PNG)\n"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{tmp_path}/mixed\n"))
    for given in (f"{tmp_path}/mixed", f"{tmp_path}/mix*", "-"):
        capsys.readouterr()
        assert main(["predict", str(named), given]) == 0
        assert capsys.readouterr().err == line
    assert main(["predict", str(named), str(folders / "second")]) == 0
    assert capsys.readouterr().err == ""


def test_a_link_to_itself_does_not_hide_the_images_beside_it(
    named: Path, folders: Path, tmp_path: Path, capsys: Any
) -> None:
    picture = sorted((folders / "first" / "digit-0").glob("*"))[0]
    (tmp_path / picture.name).write_bytes(picture.read_bytes())
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "loop").symlink_to("loop")
    assert main(["predict", str(named), str(tmp_path)]) == 1
    found = capsys.readouterr()
    assert len(found.out.splitlines()) == 1
    assert found.err.count("Skipped.") == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no such pipes")
def test_pipes_called_like_images_are_refused(named: Path, folders: Path, tmp_path: Path, capsys: Any) -> None:
    place = Path(shutil.copytree(folders / "second" / "digit-2", tmp_path / "data" / "digit-3"))
    os.mkfifo(place / "pipe.png")
    assert main(["predict", str(named), str(place)]) == 1
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 24
    assert "pipe.png is not a regular file." in shown.err
    assert main(["learn", str(tmp_path / "model"), "--data", str(tmp_path / "data"), *QUICK[:2], *QUICK[4:]]) == 2
    assert "pipe.png is not a regular file." in capsys.readouterr().err


def test_images_that_must_not_be_read_are_not_called_broken(
    named: Path, folders: Path, capsys: Any, monkeypatch: Any
) -> None:
    def forbidden(content: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(content))

    image = next(folders.rglob("*.png"))
    monkeypatch.setattr("efcil.data.decode._open", forbidden)
    assert main(["predict", str(named), str(image)]) == 1
    assert f"{image} cannot be read (Permission denied). Change its permissions, or" in capsys.readouterr().err


def test_any_number_of_images_in_bounded_memory(named: Path, folders: Path, monkeypatch: Any) -> None:
    """Files are asked for piece by piece: never more than three pieces ahead of what is given out."""
    model = Model.load(named, "cpu")
    monkeypatch.setattr(Model, "piece", 4)
    image = str(next(folders.rglob("*.png")))
    asked = 0

    def endless() -> Any:
        nonlocal asked
        while True:
            asked += 1
            yield image

    for given, prediction in enumerate(predict_files(model, endless(), 1)):
        assert prediction.error is None
        assert asked <= given + 12
        if given == 41:
            break


def test_pieces_change_no_prediction(named: Path, folders: Path, monkeypatch: Any) -> None:
    model = Model.load(named, "cpu")
    files = list(image_files([str(folders / "held-out")], io.StringIO()))
    whole = list(predict_files(model, files, 3))
    monkeypatch.setattr(Model, "piece", 7)
    for left, right in zip(whole, predict_files(model, files, 3), strict=True):
        assert (left.path, left.labels) == (right.path, right.labels)
        np.testing.assert_allclose(left.probabilities, right.probabilities, atol=1e-6)


def test_photographs_are_turned_as_their_camera_says(named: Path, folders: Path, tmp_path: Path, capsys: Any) -> None:
    upright = Image.open(next((folders / "held-out" / "digit-1").iterdir())).convert("RGB").resize((64, 64))
    turned = upright.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    upright.save(tmp_path / "upright.png")
    turned.save(tmp_path / "turned.png", exif=exif)
    lines = output(capsys, "predict", named, tmp_path, "--top", "3").splitlines()
    assert lines[0].split("  ")[1:] == lines[1].split("  ")[1:]


def test_the_model_of_an_experiment(tmp_path: Path, folders: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["--epochs", "1", "--device", "cpu", "--output", "runs", "--quiet"]
    assert main(["run", "--method", "efc", "--tasks", "2", "--classifier", "ridge", *quick]) == 0
    (model,) = (path.parent for path in Path("runs").rglob("model.json"))
    card = Model.load(model, "cpu").card
    assert sorted(card.labels) == [str(digit) for digit in range(10)]
    assert card.task_sizes == [5, 5]
    assert card.settings.classifier == "ridge"
    image = next(folders.rglob("*.png"))
    assert output(capsys, "predict", model, image).split()[1] in card.labels
    assert "10 classes in 2 tasks\nclassified by: ridge" in output(capsys, "inspect", model)
    for name in ("0", "1"):
        shutil.copytree(folders / "first" / f"digit-{name}", tmp_path / "some" / name)
    text = output(capsys, "audit", model, "--data", tmp_path / "some")
    assert "compared with images of 2 of 10 classes, " in text
    assert "Passed for these images" in text
    before = sorted((path, path.read_bytes()) for path in model.iterdir())
    assert main(["learn", str(model), "--data", str(folders / "first")]) == 2
    assert "is the model of an experiment" in capsys.readouterr().err
    assert sorted((path, path.read_bytes()) for path in model.iterdir()) == before
    shutil.copytree(model, tmp_path / "copy")
    assert main(["learn", "copy", "--data", str(folders / "first"), "--epochs", "1", "--device", "cpu", "--quiet"]) == 0
    taught = Model.load("copy", "cpu").card
    assert taught.labels[:10] == card.labels
    assert (taught.experiment, taught.task_sizes) == (None, [5, 5, 2])


def test_inspect(named: Path, capsys: Any) -> None:
    text = output(capsys, "inspect", named)
    assert text.startswith("efc on slim, images of 8 x 8 pixels, 3 classes in 2 tasks")
    card = Model.load(named, "cpu").card
    for each in card.classes:
        line = next(line for line in text.splitlines() if line.strip().startswith(str(each.label)))
        assert f"task {each.task + 1}" in line
        assert each.learned[:10] in line
        assert re.search(r"22 images  [012] of 2 right", line)
    for word in ("class means", "class covariances", "empirical feature matrix", "membership", "recovered"):
        assert word in text
    facts = json.loads(output(capsys, "inspect", named, "--format", "json"))
    assert facts["card"] == json.loads((named / "model.json").read_text())["facts"]
    numbers = sum(int(np.prod(tensor["shape"])) for tensor in facts["tensors"].values())
    assert sum(row["numbers"] for row in facts["stored"]) == numbers
    assert not facts["unfinished_task"]
    assert main(["inspect", str(named), "--format", "xml"]) == 2
    assert main(["inspect", str(named.parent)]) == 2


def test_class_names_with_escapes_are_shown_without_them(folders: Path, tmp_path: Path, capsys: Any) -> None:
    escapes = "\x1b]0;owned\x07\x9b31m\u202e\nb\r"
    for number, name in enumerate((escapes, f"=1+1{escapes}")):
        shutil.copytree(folders / "first" / f"digit-{number}", tmp_path / "photos" / name)
    loud = [each for each in QUICK if each != "--quiet"]
    shown = [output(capsys, "learn", tmp_path / "model", "--data", tmp_path / "photos", *loud)]
    assert " from 44 images; it knows 2 classes now.\naccuracy on held-out images" in shown[0]
    assert "learned \\x1b]0;owned\\x07\\x9b31m\\u202e\\nb\\r, =1+1" in shown[0]
    for format in ("text", "json"):
        shown.append(output(capsys, "inspect", tmp_path / "model", "--format", format))
        shown.append(output(capsys, "predict", tmp_path / "model", tmp_path / "photos", "--format", format))
    for text in shown:
        assert [c for c in text if not c.isprintable() and c != "\n"] == []
    found = output(capsys, "predict", tmp_path / "model", tmp_path / "photos", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(found, newline="")))
    assert len(rows) == 48
    assert {row["class"] for row in rows} <= {escapes, f"'=1+1{escapes}"}


@pytest.mark.parametrize(
    "arguments",
    ["learn m --data m", "predict m m", "evaluate m --data m", "audit m --data m", "serve m --host 0.0.0.0"],
)
def test_threads_sleep_while_they_wait(arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # what it was comes back afterwards
    del os.environ["OMP_WAIT_POLICY"]
    assert main(arguments.split()) == 2
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_a_model_without_a_name_is_refused(folders: Path, capsys: Any) -> None:
    """An empty shell variable would name the current folder."""
    assert main(["learn", "", "--data", str(folders)]) == 2
    assert "The name of the model's folder is empty." in capsys.readouterr().err


def test_a_folder_of_photographs_does_not_hide_what_the_model_knows(
    named: Path, folders: Path, tmp_path: Path, capsys: Any
) -> None:
    """As where the model was put among the photographs themselves: the first files are named, and the rest counted."""
    model = Path(shutil.copytree(named, tmp_path / "model"))
    shutil.copytree(folders / "first", model / "first")
    count = len(list((model / "first").rglob("*.png")))
    shown = output(capsys, "inspect", model).partition("in the folder, but not part of the model\n")[2].splitlines()
    assert shown[0].strip() == "first/digit-0/first-000.png"
    assert shown[20:] == [f"  and {count - 20} more; --format json lists all"]
    assert len(json.loads(output(capsys, "inspect", model, "--format", "json"))["other_files"]) == count
