"""Classes renamed, forgotten and merged: every method, in memory and in folders."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from efcil import methods
from efcil.classifier import IncrementalClassifier, InputError
from efcil.cli import main
from efcil.core import prototypes
from efcil.engine import checkpoint
from efcil.errors import EfcilError, SettingsError
from efcil.files import locked
from efcil.methods.base import Method
from efcil.methods.kept import Keeping
from efcil.methods.memory import FORMS, ClassMemory
from efcil.model import Model, ModelError, classes
from efcil.model import folder as model_folder
from efcil.model.audit import audit
from efcil.model.card import read_card
from efcil.model.export import export
from efcil.model.learning import learn
from efcil.network.backbones import installed

QUICK: dict[str, Any] = {"preset": "digits", "epochs": 1, "device": "cpu"}
#: Every method, and settings that store other things.
VARIANTS = [
    *((name, {}) for name in methods.incremental()),
    ("efc", {"covariance": "task"}),
    ("efc", {"covariance": "last-task"}),
    ("efc", {"covariance": "low-rank"}),
    ("efc++", {"covariance": "diagonal"}),
    ("fecam", {"covariance": "common"}),
    ("fetril", {"first_step": "svm"}),
    ("fetril", {"linear": "softmax"}),
    ("pass", {"rotation_rows": "current"}),
    ("sdc", {"base": "efc"}),
]


def named(variant: tuple[str, dict[str, Any]]) -> str:
    return "-".join([variant[0], *map(str, variant[1].values())])


@pytest.fixture(scope="session")
def learned(digits: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """Return a model of a method that has learned 0 and 1, then 2, then 3 and 4; learned once, given as copies."""
    folders: dict[str, Path] = {}

    def get(method: str, settings: dict[str, Any] | None = None) -> Model:
        key = named((method, settings or {}))
        if key not in folders:
            classifier = IncrementalClassifier(method, settings=settings, held_out=0.0, **QUICK)
            classifier.fit(*digits.train(0, 1))
            classifier.partial_fit(*digits.train(2)).partial_fit(*digits.train(3, 4))
            folders[key] = tmp_path_factory.mktemp("learned") / "model"
            classifier.save(folders[key])
        return Model.load(folders[key], "cpu")

    return get


def pixels(images: np.ndarray) -> np.ndarray:
    return np.repeat(images[..., None], 3, axis=3)


def saved_and_loaded(model: Model, folder: Path) -> Model:
    model.save(folder)
    again = Model.load(folder, "cpu")
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), np.uint8)
    assert np.array_equal(again.scores(images), model.scores(images))
    assert again.scores(images).shape == (5, len(model.card.classes))
    return again


@pytest.mark.parametrize("variant", VARIANTS, ids=named)
def test_every_method_forgets_and_continues(
    variant: tuple[str, dict[str, Any]], learned: Any, digits: Any, folders: Path, tmp_path: Path
) -> None:
    """A whole task and a class of another one are forgotten; then it is saved, loaded, exported and taught."""
    model = learned(*variant)
    images = pixels(digits.test(0, 1, 2, 3, 4)[0])
    before, kept = model.tensors(), [1, 4]
    scores = model.scores(images)
    result = classes.forget(model, [0, 2, 3])
    assert result.images == 72
    assert result.removed["class heads"] == 3 * before["network.heads.0"].shape[1]
    assert model.card.labels == [1, 4]
    assert model.card.task_sizes == [1, 0, 1]
    assert [(each.task, each.images) for each in model.card.classes] == [(0, 24), (2, 24)]
    assert (model.card.visits[-1].kind, model.card.visits[-1].classes) == ("forget", 3)
    if variant[0] != "dpcr" and model.card.settings.classifier == "own":  # dpcr solves its classifier anew
        np.testing.assert_allclose(model.scores(images), scores[:, kept], rtol=1e-4, atol=1e-4)
    assert_rows(model.ready, 2)
    model = saved_and_loaded(model, tmp_path / "model")
    found = audit(tmp_path / "model", numbered(folders, tmp_path))
    assert not found.failed, found.verdict
    if named(variant) in ("efc", "fecam", "fetril"):
        export(model, "torch", tmp_path / "model.pt2")
    for digit in (5, 2):  # a new class, and a forgotten one
        learn(model, pixels(digits.train(digit)[0]), [digit] * 24)
    assert model.card.labels == [1, 4, 5, 2]
    assert_rows(model.ready, 4)
    if model.ready.about.learns_more and model.ready.memory.blends:
        learn(model, pixels(digits.train(4)[0]), [4] * 24, more=True)
    saved_and_loaded(model, tmp_path / "model")


def numbered(folders: Path, tmp_path: Path) -> Path:
    """Images of class 1, in a folder called after it."""
    shutil.copytree(folders / "first" / "digit-1", tmp_path / "data" / "1")
    return tmp_path / "data"


def assert_rows(method: Method, count: int) -> None:
    """Everything that has rows per class has exactly as many as there are classes."""
    assert sum(method.network.head_sizes) == count
    for module in method.modules():
        if isinstance(module, ClassMemory):
            assert len(module.means) == count
            assert module.unused() == 0
        elif isinstance(module, Keeping):
            for name, purpose in module._purposes.items():
                if purpose.per_class:
                    value = getattr(module, name)
                    rows = len(value) if isinstance(value, torch.Tensor) else sum(len(each) for each in value)
                    assert rows in (0, count * purpose.per_class), name


@pytest.mark.parametrize("variant", VARIANTS, ids=named)
def test_every_method_merges_and_continues(
    variant: tuple[str, dict[str, Any]], learned: Any, digits: Any, tmp_path: Path
) -> None:
    model = learned(*variant)
    result = classes.merge(model, [4, 0, 2], "even")
    assert result.images == 72
    assert model.card.labels == ["even", 1, 3]
    assert model.card.task_sizes == [2, 0, 1]
    assert [each.images for each in model.card.classes] == [72, 24, 24]
    assert_rows(model.ready, 3)
    assert result.refitted == (variant[0] in ("cedar", "efc", "efc++", "fd", "il2a"))
    assert result.averaged == (not result.refitted and variant[0] not in ("adagauss", "bicyc", "fecam", "lda"))
    model = saved_and_loaded(model, tmp_path / "model")
    learn(model, pixels(digits.train(5)[0]), [5] * 24)
    assert_rows(model.ready, 4)
    saved_and_loaded(model, tmp_path / "model")


# -- what is combined, and how exactly -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [None, *FORMS])
def test_a_merged_class_is_what_all_of_its_images_give(form: str | None) -> None:
    """Means, and covariances where each class has one of its own, are those of the images taken together."""
    draw = torch.Generator().manual_seed(0)
    counts = [7, 3, 1, 5]
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    features = torch.randn(len(labels), 3, generator=draw) + 3.0 * labels[:, None]
    memory = ClassMemory(3, why="tests", covariances=form, share=1.0, counts=True, table=form == "class")
    memory.add(features[labels < 2], labels[labels < 2], range(2))
    memory.add(features[labels >= 2], labels[labels >= 2], range(2, 4))
    memory.merge([1, 2, 3], counts)
    memory.keep_rows([0, 1], 4)
    assert memory.counts.tolist() == [7, 9]
    both = labels.clamp(max=1)
    measure = prototypes.second_moments if form == "moments" else prototypes.class_statistics
    means, spread = measure(features, both, range(2))
    torch.testing.assert_close(memory.means, means.float())
    if form == "moments":
        torch.testing.assert_close(memory.moments, spread.float())
    elif form in ("class", "low-rank", "diagonal"):
        expected = torch.diag_embed(spread.diagonal(dim1=1, dim2=2)) if form == "diagonal" else spread
        torch.testing.assert_close(memory.covariances, expected.float(), rtol=1e-4, atol=1e-4)
    elif form == "pooled":
        at_once = ClassMemory(3, why="tests", covariances=form, counts=True)
        at_once.add(features, both, range(2))
        torch.testing.assert_close(memory.covariances, at_once.covariances, rtol=1e-4, atol=1e-4)
        assert torch.equal(memory.freedom, at_once.freedom)
    elif form is not None:
        covariances, of = memory.statistics().spread()
        assert len(of) == 2
        assert bool((torch.linalg.eigvalsh(covariances) > -1e-4).all())
    assert memory.unused() == 0
    # The next task is added as ever.
    memory.add(features[labels == 0], labels[labels == 0] + 2, range(2, 3))
    assert len(memory.statistics().means) == 3
    if form is not None and form != "moments":
        assert len(memory.statistics().spread()[1]) == 3


def test_forgetting_removes_exactly_the_rows_of_the_class(learned: Any) -> None:
    model = learned("efc++")
    before = {name: value.clone() for name, value in model.tensors().items()}
    result = classes.forget(model, [1])
    after = model.tensors()
    kept = [0, 2, 3, 4]
    for name in ("memory.means", "memory.covariances", "memory.counts"):
        assert torch.equal(after[name], before[name][kept])
    assert after["memory.covariance_of"].tolist() == [0, 1, 2, 3]
    assert torch.equal(after["network.heads.0"], before["network.heads.0"][:1])
    others = [name for name in before if not name.startswith(("memory.", "network.heads.0"))]
    assert all(torch.equal(after[name], before[name]) for name in others)
    assert result.shared == ("network weights", "empirical feature matrix")
    assert result.removed == {
        "class heads": 64,
        "class means": 64,
        "class covariances": 64 * 64,
        "covariance table": 1,
        "image counts": 1,
    }


def test_a_solved_classifier_is_solved_without_the_forgotten_class(learned: Any) -> None:
    model = learned("dpcr")
    before = model.tensors()["classifier"].clone()
    classes.forget(model, [2])
    after = model.tensors()["classifier"]
    assert after.shape == (4, 64)
    assert not torch.allclose(after, before[[0, 1, 3, 4]], atol=1e-4)


def test_rotations_of_a_forgotten_class_go(learned: Any) -> None:
    model = learned("pass")
    before = torch.cat([value for name, value in model.tensors().items() if name.startswith("rotations.")])
    classes.forget(model, [0, 1, 2])
    rows = [value for name, value in model.tensors().items() if name.startswith("rotations.")]
    assert [len(each) for each in rows] == [6], "the list has no empty entries"
    assert torch.equal(rows[0], before[9:])


def test_merged_classes_are_recognised_as_one(learned: Any, digits: Any) -> None:
    for method in ("efc", "fecam"):
        model = learned(method)
        images, labels = digits.test(0, 1, 2, 3, 4)
        apart = model.scores(pixels(images)).argmax(axis=1) == labels
        classes.merge(model, [0, 1], "low")
        truth = np.maximum(labels - 1, 0)
        together = model.scores(pixels(images)).argmax(axis=1) == truth
        assert together.mean() > apart.mean() - 0.1


@pytest.mark.parametrize("method", ["lda", "efc++"])
def test_images_that_were_given_weight_keep_it(method: str, digits: Any) -> None:
    """A class whose images count three times has that share of a merged class, and beside more images."""
    images, labels = digits.train(0, 1)
    weights = np.where(labels == 0, 3, 1)
    model = IncrementalClassifier(method, held_out=0.0, augmentation="none", **QUICK).fit(images, labels, weights)
    others, _ = digits.test(0)
    model.merge([0, 1], into=1).partial_fit(others, [1] * len(others), more=True)
    assert [each.images for each in model.model_.card.classes] == [48 + len(others)], "real images, each once"
    every = np.concatenate([images.repeat(weights, axis=0), others])
    features, memory = torch.tensor(model.transform(every)), model.model_.ready.memory
    torch.testing.assert_close(memory.means[0], features.mean(dim=0), rtol=0.0, atol=1e-5)
    torch.testing.assert_close(memory.covariances[0], torch.cov(features.T), rtol=1e-4, atol=1e-5)
    assert memory.counts.tolist() == [3 * 24 + 24 + len(others)]


# -- cards and names -------------------------------------------------------------------------------------------------


def test_only_the_name_changes(learned: Any, digits: Any, tmp_path: Path) -> None:
    model = learned("efc")
    images = pixels(digits.test(0, 1)[0])
    before, scores = model.tensors(), model.scores(images)
    model.save(tmp_path / "model")
    classes.rename(model, 0, "zero")
    assert model.card.labels == ["zero", 1, 2, 3, 4]
    assert np.array_equal(model.scores(images), scores)
    assert all(torch.equal(value, before[name]) for name, value in model.tensors().items())
    assert model.card.last_made_with["device"] == "cpu", "that of the visit before"
    again = saved_and_loaded(model, tmp_path / "model")
    assert [visit.kind for visit in again.card.visits] == ["task", "task", "task", "rename"]
    assert again.card.continues == checkpoint.digest(before)


def test_the_last_class_stays(learned: Any) -> None:
    model = learned("efc")
    before = model.card
    with pytest.raises(ModelError, match="keeps at least one class; delete the folder instead"):
        classes.forget(model, [0, 1, 2, 3, 4])
    assert model.card is before
    classes.forget(model, [0, 1, 2, 3])
    assert model.card.labels == [4]
    assert model.card.task_sizes == [0, 0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: classes.forget(model, [7]), "Unknown class '7'"),
        (lambda model: classes.forget(model, [1, 1]), "named twice"),
        (lambda model: classes.forget(model, []), "No class is named"),
        (lambda model: classes.merge(model, [1], "one"), "at least two classes"),
        (lambda model: classes.merge(model, [1, 2], 3), "a class called '3' already"),
        (lambda model: classes.rename(model, 1, 2), "To make two classes one, use `efcil merge`"),
        (lambda model: classes.rename(model, 1, "2"), "a class called '2' already"),
        (lambda model: classes.rename(model, 1, 1), "has this name already"),
        (lambda model: classes.rename(model, 1, " "), "cannot be called ' '"),
        (lambda model: classes.rename(model, 1, "../x"), "without /"),
        (lambda model: classes.rename(model, 1, " 2"), "differs from '2'"),
        (lambda model: classes.rename(model, 1, "x" * 300), "1 to 255 characters"),
        (lambda model: classes.rename(model, 1, "caf\udce9"), r"not valid UTF-8 \(caf\\udce9\) cannot name a class"),
        (lambda model: classes.merge(model, [1, 2], "caf\udce9"), "not valid UTF-8"),
        (lambda model: classes.rename(model, 1, frozenset()), "cannot be saved"),
    ],
)
def test_what_is_refused_changes_nothing(change: Callable[[Model], Any], message: str, learned: Any) -> None:
    model = learned("efc")
    card, method = model.card, model.method
    with pytest.raises(EfcilError, match=message):
        change(model)
    assert model.card is card
    assert model.method is method


def test_names_on_the_command_line_mean_labels_of_any_type(learned: Any) -> None:
    model = learned("efc")
    assert classes.find(model, ["3", "0"]) == [3, 0]
    classes.rename(model, 0, "zero")
    assert classes.find(model, ["zero", "1"]) == ["zero", 1]
    with pytest.raises(ModelError, match="Unknown class 'kat'"):
        classes.find(model, ["kat"])


def test_a_card_that_contradicts_its_visits_is_refused(learned: Any) -> None:
    model = learned("efc")
    classes.forget(model, [0])
    facts = json.loads(json.dumps(model.card.to_json()))
    read_card(facts)
    for break_it in (
        lambda card: card["visits"].pop(),  # nothing was forgotten, and yet a class is missing
        lambda card: card["visits"][-1].update(classes=2),
        lambda card: card["visits"][-1].update(kind="dream"),
        lambda card: card["classes"][0].update(task=1),
        lambda card: card["classes"].clear(),
    ):
        broken = json.loads(json.dumps(facts))
        break_it(broken)
        with pytest.raises(ModelError):
            read_card(broken)


def test_a_method_must_say_which_rows_belong_to_a_class(learned: Any) -> None:
    """Nothing is guessed: what is not declared, or has another number of rows, is not forgotten silently."""
    method = learned("finetune").twin()
    method.register_buffer("centres", torch.zeros(5, 4))
    with pytest.raises(SettingsError, match="stores centres and does not say whether a class has rows there"):
        method.forget_classes([0])
    del method.centres
    method.keep("centres", torch.zeros(0, 4), why="tests")
    method.centres = torch.arange(12.0).reshape(3, 4)
    with pytest.raises(SettingsError, match="has 3 rows for 5 classes"):
        method.forget_classes([0])
    method.centres = torch.arange(20.0).reshape(5, 4)
    method.merge_classes([0, 4], [1, 1, 1, 1, 3])
    assert method.centres[:, 0].tolist() == [12.0, 4.0, 8.0, 12.0]
    method.keep("shared", torch.ones(4, 4), why="tests")
    assert method.belongs_to_all() == ["shared"]
    method.keep("list", torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(4, 2))]), why="tests")
    with pytest.raises(SettingsError, match=r"stores list\.0"):
        method.forget_classes([0])


# -- folders and commands --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def visited(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that knows digit-0, digit-1 and digit-2. Not to be changed."""
    model = tmp_path_factory.mktemp("visited") / "model"
    for visit in ("first", "second"):
        flags = ["--preset", "digits", "--image-size", "8", "--epochs", "1"] if visit == "first" else []
        assert main(["learn", str(model), "--data", str(folders / visit), "--device", "cpu", "--quiet", *flags]) == 0
    return model


@pytest.fixture
def model(visited: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(visited, tmp_path / "model"))


def run(capsys: Any, *arguments: Any, code: int = 0) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == code
    shown = capsys.readouterr()
    return str(shown.out if code == 0 else shown.out + shown.err)


def test_a_read_only_folder_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.chmod(0o555)
    try:
        assert main(["rename", str(model), "digit-0", "zero"]) == 2
    finally:
        model.chmod(0o755)
    assert "(it is read-only). Nothing has been changed; choose another folder" in capsys.readouterr().err
    assert Model.load(model, "cpu").card.labels[0] == "digit-0"


def test_the_commands(model: Path, folders: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(capsys, "rename", model, "digit-0", "zero") == f"{model}: digit-0 is called zero now.\n"
    text = run(capsys, "forget", model, "digit-1").splitlines()
    assert re.fullmatch(r"Forgetting digit-1 \(2\d images\): all that is stored about it alone is removed\.", text[0])
    assert text[1].startswith("Removed: class heads (64 numbers), class means (64 numbers), class covariances (4,096")
    assert text[2].startswith("Not removed, because all classes share it: network weights, empirical feature matrix.")
    assert text[3] == f"{model}: forgot digit-1; it knows 2 classes now."
    assert not list(model.glob(".lock"))
    assert len(list(model.glob("*.safetensors"))) == 1
    assert run(capsys, "predict", model, next(folders.rglob("*.png")), "--top", "9").count("0.") == 2
    inspected = run(capsys, "inspect", model)
    assert "digit-1" not in inspected
    assert re.search(r"\n  3  \S+ \S+  1 class renamed\n  4  \S+ \S+  1 class of 2\d images forgotten\n", inspected)
    shutil.copytree(folders / "second", tmp_path / "data")
    audited = run(capsys, "audit", model, "--data", tmp_path / "data")
    assert (
        "1 class forgotten or merged into others: no row of it is left; class heads, class means, class covariances, "
        "covariance table have rows for the 2 classes that the model knows, and no more\n" in audited
    )
    text = run(capsys, "merge", model, "zero", "digit-2", "--into", "digit").splitlines()
    assert text[0] == "Now as if measured on the images of all of them together: means, covariances."
    assert text[1] == "Heads: fitted to the means and covariances of all classes."
    assert re.search(r"merged zero, digit-2 into digit \(4\d images\); it knows 1 class now\.", text[2])
    assert re.search(r"2 classes of 4\d images merged into one\n", run(capsys, "inspect", model))
    assert main(["learn", str(model), "--data", str(folders / "first"), "--device", "cpu", "--quiet"]) == 0
    assert Model.load(model, "cpu").card.labels == ["digit", "digit-0", "digit-1"]


def test_the_readme_names_no_class_that_is_gone(model: Path, folders: Path, tmp_path: Path, capsys: Any) -> None:
    printed = run(capsys, "card", model, "--output", "-")
    run(capsys, "card", model, "--output", model / "README.md")
    assert (model / "README.md").read_text() == printed
    run(capsys, "forget", model, "digit-1")
    text = (model / "README.md").read_text()
    assert "digit-0" in text
    assert "digit-1" not in text
    assert "(forgotten)" in text
    shutil.copytree(folders / "second", tmp_path / "data")
    run(capsys, "audit", model, "--data", tmp_path / "data")
    (model / "README.md").write_text("my own words on digit-0")
    run(capsys, "forget", model, "digit-0")
    assert (model / "README.md").read_text() == "my own words on digit-0"


def test_merging_into_one_of_them(model: Path, capsys: Any) -> None:
    run(capsys, "merge", model, "digit-2", "digit-1", "--into", "digit-1")
    assert Model.load(model, "cpu").card.labels == ["digit-0", "digit-1"]


def test_what_the_commands_refuse(model: Path, tmp_path: Path, capsys: Any) -> None:
    before = (model / "model.json").read_bytes()
    for arguments, message in (
        (("forget", model, "digit-7"), "Unknown class 'digit-7'. Did you mean"),
        (("forget", model, "digit-0", "digit-1", "digit-2"), "A model keeps at least one class"),
        (("rename", model, "digit-0", "Digit-1"), "differs from 'digit-1'"),
        (("merge", model, "digit-0", "--into", "x"), "at least two classes"),
        (("merge", model, "digit-0", "digit-1"), "--into"),
        (("forget", tmp_path / "nowhere", "a"), "is not a model folder"),
    ):
        said = run(capsys, *arguments, code=2)
        assert message in said
        assert "Forgetting" not in said, "nothing is announced that does not happen"
    assert (model / "model.json").read_bytes() == before
    assert not (tmp_path / "nowhere").exists()


def test_an_unfinished_task_comes_first(model: Path, visited: Path, capsys: Any) -> None:
    card = Model.load(visited, "cpu").card
    begun = {"task": {"card": card.to_json(), "classes": ["cat"], "continues": None}, "made_with": []}
    checkpoint.write(model / "partial", {"learner.x": torch.zeros(1)}, begun)
    text = run(capsys, "forget", model, "digit-0", code=2)
    assert "has an unfinished task, which learns cat. Finish it first: repeat the `efcil learn` command" in text
    assert f"To discard it instead, remove {model / 'partial'}." in text
    shutil.rmtree(model / "partial")
    run(capsys, "forget", model, "digit-0")


def test_a_finished_task_whose_checkpoint_is_left_is_no_obstacle(model: Path, visited: Path, capsys: Any) -> None:
    card = Model.load(visited, "cpu").card
    earlier = dataclasses.replace(card, classes=card.classes[:2], visits=card.visits[:1])
    begun = {"task": {"card": earlier.to_json(), "classes": ["digit-2"], "continues": card.continues}}
    checkpoint.write(model / "partial", {"learner.x": torch.zeros(1)}, begun)
    run(capsys, "rename", model, "digit-0", "zero")
    assert not (model / "partial").exists()


def test_the_model_of_an_experiment_stays(model: Path, tmp_path: Path, capsys: Any) -> None:
    run_folder = tmp_path / "run"
    model.rename(tmp_path / "own")
    shutil.copytree(tmp_path / "own", run_folder / "model")
    for name in ("settings.yaml", "log.txt"):
        (run_folder / name).touch()
    assert "is the model of an experiment" in run(capsys, "forget", run_folder / "model", "digit-0", code=2)


def test_a_folder_in_use_is_left_alone(model: Path, capsys: Any) -> None:
    with locked(model / ".lock"):
        assert "in use by another process" in run(capsys, "rename", model, "digit-0", "x", code=2)


def test_the_old_model_stays_if_the_new_one_cannot_be_written(model: Path, monkeypatch: Any, capsys: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("efcil.engine.checkpoint.write_own", full)
        run(capsys, "forget", model, "digit-0", code=1)
    assert Model.load(model, "cpu").card.labels == ["digit-0", "digit-1", "digit-2"]


def test_learning_after_forgetting_says_that_traces_may_be_left(
    model: Path, folders: Path, tmp_path: Path, capsys: Any
) -> None:
    """The same images seem to be recognised better than they are, and nothing is kept that would tell."""
    shutil.copytree(folders / "second", tmp_path / "data")
    learn_it = ["learn", model, "--data", tmp_path / "data", "--device", "cpu", "--epochs", "1"]
    run(capsys, "forget", model, "digit-2")
    line = (
        "Classes were forgotten, and what all classes share (network weights, empirical feature matrix) may have traces"
    )
    assert line in run(capsys, *learn_it)
    assert "may have traces" not in run(capsys, *learn_it, "--more"), "no class is new"
    known = next((tmp_path / "data").iterdir())
    shutil.copytree(known, known.with_name("new"))
    assert "may have traces" not in run(capsys, *learn_it, code=2), "known classes are refused"


def test_an_interrupted_task_after_forgetting_resumes(
    model: Path, folders: Path, tmp_path: Path, same: Any, monkeypatch: Any, capsys: Any
) -> None:
    """Bit for bit, with a task that has no class left."""
    run(capsys, "forget", model, "digit-2", "digit-0")
    other = Path(shutil.copytree(model, tmp_path / "other"))
    data = Path(shutil.copytree(folders / "second", tmp_path / "data"))
    learn_it = ["--data", str(data), "--device", "cpu", "--quiet", "--epochs", "3"]

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        save = checkpoint.TaskKeeper.save
        patch.setattr(checkpoint.TaskKeeper, "save", lambda *a: (save(*a), stop()))
        assert main(["learn", str(model), *learn_it, "--checkpoint-steps", "1"]) == 130
    assert checkpoint.exists(model / "partial")
    assert main(["learn", str(model), *learn_it]) == 0
    assert main(["learn", str(other), *learn_it]) == 0
    assert Model.load(model, "cpu").card.labels == ["digit-1", "digit-2"]
    assert same(Model.load(model, "cpu"), Model.load(other, "cpu"))


def test_rows_that_are_left_fail_the_audit(model: Path, folders: Path, tmp_path: Path, capsys: Any) -> None:
    """A model that claims to have forgotten a class but still has its head row, or its mean."""
    run(capsys, "forget", model, "digit-2")
    shutil.copytree(folders / "first", tmp_path / "data")
    card, tensors = model_folder.read_raw(model)
    for name, rows in (("network.heads.1", 1), ("memory.means", 3), ("memory.covariances", 3)):
        planted = {**tensors, name: torch.ones(rows, *tensors[name].shape[1:])}
        model_folder.write(tmp_path / "planted", card, planted)
        found = audit(tmp_path / "planted", tmp_path / "data")
        assert found.failed, name
    assert not audit(model, tmp_path / "data").failed


def test_head_rows_that_do_not_decide_are_found_too(learned: Any, folders: Path, tmp_path: Path) -> None:
    """FeCAM decides by its memory: a row in the head of an empty task changes no score."""
    model = learned("fecam")
    classes.forget(model, [2])
    model_folder.write(tmp_path / "model", model.card, {**model.tensors(), "network.heads.1": torch.ones(1, 64)})
    found = audit(tmp_path / "model", numbered(folders, tmp_path))
    assert "class heads: there are 5 rows, but 4 classes need 4" in found.verdict
    assert main(["audit", str(tmp_path / "model"), "--data", str(tmp_path / "data")]) == 1


def test_a_network_that_was_not_trained_holds_no_traces(digits: Any, tmp_path: Path) -> None:
    if not installed("efficientnet-lite0"):
        pytest.skip("the extra `pretrained` is not installed")
    classifier = IncrementalClassifier("fecam", network="efficientnet-lite0", image_size=32, device="cpu")
    classifier.fit(*digits.train(0, 1))
    assert classes.forget(classifier.model_, [0]).shared == ()


def test_python_users_have_the_same(learned: Any, digits: Any, tmp_path: Path) -> None:
    learned("efc").save(tmp_path / "model")
    classifier = IncrementalClassifier.load(tmp_path / "model", device="cpu")
    classifier.rename(0, 10).forget([1]).merge([2, 3], into=5)
    assert classifier.classes_.tolist() == [10, 5, 4]
    assert set(classifier.predict(digits.test(0)[0])) <= {10, 5, 4}
    classifier.save(tmp_path / "model")
    assert IncrementalClassifier.load(tmp_path / "model", device="cpu").classes_.tolist() == [10, 5, 4]


def test_a_text_is_one_class_and_not_its_characters(digits: Any) -> None:
    images, labels = digits.train(0, 1)
    classifier = IncrementalClassifier(held_out=0.0, **QUICK).fit(images, np.where(labels == 0, "a", "b"))
    for wrong in ("a", "ab", 3):
        with pytest.raises(InputError, match=rf"a list of labels: \[{wrong!r}\]"):
            classifier.forget(wrong)
        with pytest.raises(InputError, match="a list of labels"):
            classifier.merge(wrong, into="c")
    assert classifier.classes_.tolist() == ["a", "b"]
    assert classifier.forget(np.array(["a"])).classes_.tolist() == ["b"]
