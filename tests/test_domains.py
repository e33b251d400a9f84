"""Domain-incremental learning: the same answers come back in every task, in another form."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from efcil.cli import main
from efcil.core.perturbation import perturb as perturb_features
from efcil.data.augment import Normalisation
from efcil.data.domains import domains_of
from efcil.data.images import Dataset, ImageSet
from efcil.data.scenario import Scenario, domain_scenario, make_scenario
from efcil.data.sources import SourceOptions, load_dataset
from efcil.engine.evaluate import TestImages, evaluate
from efcil.engine.interrupt import Interrupted, StopRequest
from efcil.engine.trainer import Trainer
from efcil.errors import DataError, SettingsError
from efcil.experiment import perturb, run_one
from efcil.experiment.shared_tasks import FOLDER
from efcil.methods.base import Method
from efcil.network.backbones import make_backbone
from efcil.network.incremental import IncrementalNetwork
from efcil.report import render, table
from efcil.report.details import Details
from efcil.resolution import identity, label, load_config, to_yaml
from efcil.runfolder import RunFolder, locate
from efcil.settings import Settings

SHORT: dict[str, Any] = {"first_task_epochs": 6, "epochs": 2, "batch_size": 16, "device": "cpu"}
METHODS = ("efc", "fetril", "lda")


@pytest.fixture(scope="module")
def twice() -> Dataset:
    """Digits in two domains, as they are and inverted: 20 classes, 10 answers."""
    digits = load_dataset("digits")

    def both(part: ImageSet) -> ImageSet:
        images = np.concatenate([part.images, 255 - part.images])
        labels = np.concatenate([part.labels, 10 + part.labels])
        return ImageSet(images[::4], labels[::4])

    names = tuple(f"{domain}/{digit}" for domain in ("dark", "light") for digit in range(10))
    return dataclasses.replace(digits, train=both(digits.train), test=both(digits.test), class_names=names)


def settings(method: str, **changes: Any) -> Settings:
    return Settings(**{"method": method, "answers": "merged", "class_order": "natural", **SHORT, **changes})


@pytest.fixture(scope="module")
def output(twice: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of three methods, of each with merged and with separate answers."""
    place = tmp_path_factory.mktemp("runs")
    for method in METHODS:
        run_one(settings(method), place, twice, quiet=True)
        run_one(settings(method, answers="separate", scenario="domains"), place, twice, quiet=True)
    return place


# -- domains, answers and tasks ----------------------------------------------------------------------------------------


def test_names_say_domain_and_answer() -> None:
    found = domains_of(["photo/dog", "photo/cat", "sketch/cat", "sketch/dog", "sketch/cow"])
    assert found is not None
    assert (found.names, found.of_class) == (("photo", "sketch"), (0, 0, 1, 1, 1))
    assert (found.answer_names, found.answers) == (("dog", "cat", "cow"), (0, 1, 1, 0, 2))
    assert found.counted == "5 classes share 3 answers"
    assert found.incomplete() == ["cow"]
    assert found.classes(1) == [2, 3, 4]
    deep = domains_of(["2020/photo/dog", "2021/photo/dog"])
    assert deep is not None
    assert deep.names == ("2020/photo", "2021/photo")
    for names in ([], ["dog"], ["photo/dog", "cat"], ["/dog"], ["photo/"]):
        assert domains_of(names) is None


def test_domains_are_tasks_of_any_size_in_any_order(tmp_path: Path) -> None:
    names = ["b/x", "a/x", "b/y", "a/z", "a/y"]
    scenario = domain_scenario("natural", 0, names, "mine")
    assert (scenario.name, scenario.order, scenario.task_sizes) == ("domains", (0, 2, 1, 3, 4), (2, 3))
    file = tmp_path / "order.txt"
    file.write_text("a\nb\n")
    assert domain_scenario(str(file), 0, names, "mine").order == (1, 3, 4, 0, 2)
    orders = {domain_scenario("efc", seed, names, "mine").order for seed in range(10)}
    assert orders == {(0, 2, 1, 3, 4), (1, 3, 4, 0, 2)}, "a shuffle keeps domains together"
    file.write_text("a/x\nb/x\n")
    with pytest.raises(SettingsError, match=r"not a class: 'a/x'.*the class order is one of the domains"):
        domain_scenario(str(file), 0, names, "mine")
    with pytest.raises(SettingsError, match=r"dn4il is for the domains real, .* and 'b' is none of them"):
        domain_scenario("dn4il", 0, names, "mine")
    with pytest.raises(DataError, match="Scenario domains needs classes that are called domain/answer"):
        domain_scenario("natural", 0, ["x", "y"], "mine")
    with pytest.raises(SettingsError, match="domains of digits are not known"):
        make_scenario("domains", 10, order=range(10), dataset="digits")
    with pytest.raises(SettingsError, match="2 classes, and 3 answers"):
        Scenario("custom", (0, 1), ((0, 1),), (0, 1, 0))


def test_datasets_without_domains_have_no_answers_to_merge() -> None:
    with pytest.raises(DataError, match=r"--answers merged needs classes that are called domain/answer.*digits"):
        load_dataset("digits", None, SourceOptions(answers="merged"))


# -- names of runs -----------------------------------------------------------------------------------------------------


def test_names_and_identities_tell_the_two_readings_apart() -> None:
    merged, separate = Settings(dataset="domainnet"), Settings(dataset="domainnet", answers="separate")
    assert (label(merged), label(separate)) == ("efc", "efc+answers=separate")
    assert label(Settings(dataset="domainnet", answers="merged")) == "efc", "the preset says so"
    assert identity(merged)["answers"] == "merged"
    assert "answers" not in identity(separate)
    assert merged.scenario == separate.scenario == "domains"
    assert Settings(dataset="domainnet", scenario="cs5").scenario == "cs5"
    assert label(Settings(answers="merged")) == "efc+answers=merged"
    for plain in (Settings(), Settings(dataset="cifar100"), Settings(answers="separate")):
        assert label(plain) == "efc"
        assert "answers" not in identity(plain)
        assert plain.scenario == "cs5"


def test_a_folder_with_domains_is_another_run_than_one_without(tmp_path: Path) -> None:
    """Either of the answers says that images are in DIR/DOMAIN/CLASS/: the classes differ."""
    plain = Settings(dataset="folder", data=str(tmp_path), held_out=0.2, scenario="cs2")
    named = {}
    for answers in (None, "separate", "merged"):
        each = dataclasses.replace(plain, answers=answers)
        named[label(each)] = identity(each).get("answers")
    start = f"efc+data={tmp_path.name}+held_out=0.2"
    assert named == {start: None, f"{start}+answers=separate": "separate", f"{start}+answers=merged": "merged"}


def test_runs_of_folders_with_domains_from_before_can_be_read(tmp_path: Path) -> None:
    then = Settings(dataset="folder", data=str(tmp_path), held_out=0.2, scenario="cs2", answers="separate")
    stored = {name: value for name, value in identity(then).items() if name != "answers"}
    file = tmp_path / "settings.yaml"
    file.write_text(to_yaml(then, resolved=stored))
    assert load_config(file) == [then]


def test_runs_of_domainnet_from_before_are_what_they_were(tmp_path: Path) -> None:
    then = Settings(dataset="domainnet", answers="separate", class_order="natural", scenario="custom", tasks=6)
    text = to_yaml(dataclasses.replace(then, answers=None, class_order=None), resolved=identity(then))
    file = tmp_path / "settings.yaml"
    file.write_text("".join(line for line in text.splitlines(keepends=True) if not line.startswith("answers")))
    (read,) = load_config(file)
    assert (read.answers, read.class_order, identity(read)) == ("separate", "natural", identity(then))


# -- what counts as right ----------------------------------------------------------------------------------------------


class Written(Method):
    """Answers with the class that is written in the first pixel of an image, and second best in the second one."""

    def __init__(self, seen: int) -> None:
        super().__init__(IncrementalNetwork(make_backbone("slim", 0)))
        self.seen = seen

    def scores(self, images: Tensor) -> Tensor:
        found = torch.zeros(len(images), self.seen)
        for place, score in ((1, 1.0), (0, 2.0)):
            chosen = (255 * images[:, 0, 0, place]).round().long()
            found[torch.arange(len(images)), chosen] = score
        return found


def test_answers_by_hand() -> None:
    """Two tasks: dog and cat as photos (0, 1), then cat and dog as sketches (2, 3)."""
    scenario = dataclasses.replace(make_scenario("custom", 4, order=range(4), tasks=2), answers=(0, 1, 1, 0))
    # (true class, best, second best)
    cases = [
        (0, 0, 1),  # right
        (0, 3, 1),  # a dog of the other domain: right; among photos, cat: wrong
        (0, 2, 0),  # cat: wrong; among photos, dog: right
        (1, 2, 0),  # right; among photos, dog: wrong
        (2, 1, 3),  # right; among sketches, dog: wrong
        (3, 0, 3),  # right, both ways
        (3, 3, 0),  # right, both ways
        (3, 2, 3),  # wrong, both ways
    ]
    pixels = np.zeros((len(cases), 4, 4, 3), np.uint8)
    pixels[:, 0, 0, 0], pixels[:, 0, 1, 0] = ([case[place] for case in cases] for place in (1, 2))
    plain = Normalisation((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    labels = np.array([case[0] for case in cases])
    images = TestImages(pixels, labels, normalisation=plain, device=torch.device("cpu"))
    found = evaluate(Written(4), images, scenario, 1)
    assert found.agnostic == [75.0, 75.0]
    assert found.aware == [50.0, 50.0]
    assert found.right == [2, 1, 1, 2]
    assert found.images == [3, 1, 1, 3]
    pairs = [(0, 0), (0, 2), (0, 3), (1, 2), (2, 1), (3, 0), (3, 2), (3, 3)]
    assert found.confusion == [[true, answer, 1] for true, answer in pairs]
    separate = evaluate(Written(4), images, dataclasses.replace(scenario, answers=None), 1)
    assert separate.agnostic == [25.0, 25.0]
    assert separate.right == [1, 0, 0, 1]
    assert separate.confusion == found.confusion


def test_only_probability_that_moves_to_another_answer_is_a_change() -> None:
    """The first two classes share an answer; the last two directions of feature space tell only those apart."""
    heads = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 0.0]], dtype=torch.float64)
    features, labels = torch.tensor([[3.0, 0.1], [3.0, -0.1]], dtype=torch.float64), torch.tensor([0, 0])
    matrix = torch.diag(torch.tensor([0.0, 1.0], dtype=torch.float64))  # principal: the second direction
    found = {}
    for answers in (None, torch.tensor([0, 0, 1])):
        generator = torch.Generator().manual_seed(0)
        found[answers is None] = perturb_features(features, labels, heads, matrix, [1.0], generator, answers=answers)
    separate, merged = found[True][0], found[False][0]
    assert (separate.unperturbed, merged.unperturbed) == (50.0, 100.0)
    assert merged.accuracy == 100.0
    assert separate.change > 0.1
    assert merged.change < 0.01


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_merged_accuracy_is_that_of_the_answers_of_the_same_predictions(output: Path, method: str) -> None:
    merged, separate = (
        locate(output, each) for each in (settings(method), settings(method, answers="separate", scenario="domains"))
    )
    confusion, other = merged.confusion(), separate.confusion()
    assert confusion is not None
    assert other is not None
    np.testing.assert_array_equal(confusion, other)
    same_answer = np.equal.outer(np.arange(20) % 10, np.arange(20) % 10)
    counts = {run: [each for each in run.classes() or () if each.task == 2] for run in (merged, separate)}
    assert [each.right for each in counts[merged]] == (confusion * same_answer).sum(axis=1).tolist()
    assert [each.right for each in counts[separate]] == confusion.diagonal().tolist()
    matrices = merged.read_accuracy(), separate.read_accuracy()
    for ours, theirs in zip(matrices[0][:2], matrices[1][:2], strict=True):
        assert (ours >= theirs)[np.tril_indices(2)].all()
    rows = [
        100.0 * (confusion * same_answer)[part].sum() / confusion[part].sum() for part in (slice(10), slice(10, 20))
    ]
    np.testing.assert_allclose(matrices[0][0][1], rows)
    assert rows[1] > 40, "a network that has learned nothing would show nothing"
    summary = merged.verified_summary()
    assert summary["A_step"] == pytest.approx(np.mean(rows))
    assert summary["answers"] == [str(digit) for digit in range(10)] * 2
    assert (summary["scenario"], summary["task_sizes"]) == ("domains", [10, 10])
    assert "answers" not in separate.verified_summary()


def test_both_readings_share_what_is_trained(output: Path) -> None:
    assert len([path for path in (output / FOLDER).iterdir() if path.is_dir()]) == 1
    log = (locate(output, settings("efc")).path / "log.txt").read_text()
    assert "2 tasks on cpu, 20 classes share 10 answers" in log


def test_reports_say_what_is_counted(output: Path) -> None:
    found = table(RunFolder(path.parent) for path in sorted(output.rglob("summary.json")))
    assert not found.problems
    text = render(found, "text")
    assert "efc, answers=merged: 20 classes share 10 answers, each right in whichever domain" in text
    (group,) = found.groups
    assert group.settings == ("answers",)
    assert sorted(group.values(row) for row in group.rows) == [["merged"]] * 3 + [["separate"]] * 3
    assert "**" not in render(found, "markdown"), "what counts different things is not ranked"
    for form in ("markdown", "csv", "html"):
        assert "20 classes share 10 answers" in render(found, form)
    rows = {group.name(row): Details(row) for row in group.rows}
    merged, separate = rows["efc, answers=merged"], rows["efc, answers=separate"]
    assert merged.confusion is not None
    assert separate.confusion is not None
    pairs = [(true, answer) for true, answer, _ in merged.confusion[2]]
    assert not [pair for pair in pairs if pair[0].split("/")[1] == pair[1].split("/")[1]]
    assert set(pairs) <= {(true, answer) for true, answer, _ in separate.confusion[2]}


def test_noise_is_measured_on_answers(output: Path, twice: Dataset) -> None:
    (first, *_) = perturb(locate(output, settings("efc")), twice, sigmas=[0.5], device="cpu", write=False)
    separate = settings("efc", answers="separate", scenario="domains")
    (other, *_) = perturb(locate(output, separate), twice, sigmas=[0.5], device="cpu", write=False)
    assert first.change <= other.change, "what moves within an answer changes nothing"
    assert first.unperturbed > other.unperturbed
    confusion = locate(output, separate).confusion()
    assert confusion is not None
    assert other.unperturbed == pytest.approx(100.0 * confusion.trace() / confusion.sum())


@pytest.mark.parametrize(("task", "steps"), [(1, 3), (2, 150)])
def test_a_run_resumes_with_its_answers(
    output: Path, twice: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: int, steps: int
) -> None:
    stop, taken = StopRequest(), []
    compute = Trainer._compute

    def step(self: Trainer, place: int, length: int) -> None:
        compute(self, place, length)
        taken.append(place)
        stop.requested = len(taken) == steps

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_compute", step)
        with pytest.raises(Interrupted, match=f"in task {task}"):
            run_one(settings("efc"), tmp_path, twice, quiet=True, stop=stop)
    resumed = RunFolder(run_one(settings("efc"), tmp_path, twice, quiet=True))
    whole = locate(output, settings("efc"))
    for name in ("accuracy.csv", "classes.csv", "confusion.csv"):
        assert (resumed.path / name).read_bytes() == (whole.path / name).read_bytes()
    assert resumed.verified_summary()["answers"] == whole.verified_summary()["answers"]


# -- folders of one's own ----------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with the domains photo and sketch; sketch has a class more."""
    generator = np.random.default_rng(0)
    for domain, classes in (("photo", ("cat", "dog")), ("sketch", ("cat", "cow", "dog"))):
        for number, name in enumerate(classes):
            folder = tmp_path / "own" / domain / name
            folder.mkdir(parents=True)
            for image in range(10):
                pixels = generator.integers(0, 60, (8, 8, 3)) + 80 * number
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{image}.png")
    return tmp_path / "own"


def run_folder(own: Path, tmp_path: Path, *words: str) -> int:
    short = ["--method", "lda", "--network", "slim", "--epochs", "1", "--device", "cpu", "--quiet"]
    place = ["--data", str(own), "--held-out", "0.3", "--output", str(tmp_path / "runs")]
    return main(["run", "--dataset", "folder", *short, *place, *words])


def test_a_folder_of_domains(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_folder(own, tmp_path, "--answers", "merged", "--class-order", "natural") == 0
    assert "5 classes share 3 answers" in " ".join(capsys.readouterr().out.split())
    (summary,) = (tmp_path / "runs").rglob("summary.json")
    content = json.loads(summary.read_text())
    assert content["class_names"] == ["photo/cat", "photo/dog", "sketch/cat", "sketch/cow", "sketch/dog"]
    assert (content["scenario"], content["task_sizes"]) == ("domains", [2, 3])
    assert run_folder(own, tmp_path, "--answers", "separate", "--tasks", "2") == 0
    assert len(list((tmp_path / "runs").rglob("summary.json"))) == 2
    assert run_folder(own, tmp_path) != 0
    assert "If they are domains that have the same classes, add --answers merged." in capsys.readouterr().err


def test_splits_of_domains_must_fit(own: Path, tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    own.rename(given / "train")
    for name in ("photo/cat", "photo/dog", "sketch/cat", "sketch/cow"):
        (given / "test" / name).mkdir(parents=True)
        (given / "train" / name / "0.png").rename(given / "test" / name / "0.png")
    merged = SourceOptions(answers="merged", cache=tmp_path / "cache")
    with pytest.raises(DataError, match="test/sketch/dog is missing: class 'sketch/dog' has training images"):
        load_dataset("folder", given, merged)
    (given / "test" / "sketch" / "dog").mkdir()
    (given / "train" / "sketch" / "dog" / "0.png").rename(given / "test" / "sketch" / "dog" / "0.png")
    assert len(load_dataset("folder", given, merged).test) == 5
    (given / "test" / "photo" / "cow").mkdir()
    with pytest.raises(DataError, match="test/photo/cow is a class without training images"):
        load_dataset("folder", given, merged)
    (given / "train" / "lone").mkdir()
    with pytest.raises(DataError, match="lone is a domain without class folders"):
        load_dataset("folder", given, merged)


def test_efcil_data_says_which_answers_there_are(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["folder", "--data", str(own), "--held-out", "0.3", "--answers", "merged"]
    assert main(["data", *place]) == 0
    assert "domains   photo, sketch: 5 classes share 3 answers" in capsys.readouterr().out
    assert main(["data", "verify", *place]) == 0
    lines = capsys.readouterr().out
    assert "domains   photo, sketch: 5 classes share 3 answers" in lines
    assert "1 answer not in all domains: cow" in lines
    assert main(["data", "verify", "digits", "--answers", "merged"]) == 1
    assert "--answers merged needs classes that are called domain/answer" in " ".join(capsys.readouterr().out.split())
