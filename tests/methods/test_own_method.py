"""Methods that are not part of the package: the documented example, and what can go wrong with a file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits

from efcil import IncrementalClassifier, methods
from efcil.cli import main
from efcil.errors import SettingsError, TrainingError
from efcil.resolution.documentation import documentation
from efcil.testing import BACKBONE_CHECKS, METHOD_CHECKS

PAGE = Path(__file__).parents[2] / "docs" / "your-own-method.md"
TETHER = Path(__file__).with_name("tether.py")
NAMED = """
from efcil.methods.base import Method
class Mine(Method):
    name = "{name}"
    summary = "a method"
"""
TWINS = NAMED.format(name="twin") + NAMED.replace("Mine", "Other").format(name="twin")
ATTRACTED = """
import torch
from efcil.core.losses import cross_entropy
from efcil.methods.base import Method
class Attracted(Method):
    name = "attracted"
    summary = "images pulled towards the centre of all earlier ones, kept the natural way"
    def __init__(self, network, settings=None):
        super().__init__(network, settings)
        self.register_buffer("centres", torch.zeros(0, network.feature_size))
    def loss(self, batch):
        features = self.network.features(batch.images)
        away = (features[:, None] - self.centres).square().mean()
        return {"current": cross_entropy(self.network.logits(features), batch.labels), "away": away}
    def end_task(self, task, data):
        features = torch.cat([self.network.features(images) for images, _ in data.plain()])
        self.centres = torch.cat([self.centres, features.mean(dim=0, keepdim=True)])
"""
REHEARSING = """
from efcil.core.gaussians import collect
from efcil.methods.finetune import FineTune
from efcil.methods.memory import ClassMemory
class Rehearsing(FineTune):
    name = "rehearsing"
    summary = "fine-tuning that remembers its classes"
    @classmethod
    def remembers(cls, settings, size):
        return ClassMemory(size, why="tests", covariances="class")
    def end_task(self, task, data):
        self.memory.add(*collect(self.network.features, data.plain()), range(task.first_class, task.seen))
"""
SHORT = ("--tasks", "3", "--epochs", "1", "--device", "cpu", "--quiet")


def found() -> dict[str, type[methods.Method]]:
    """All methods, looked for anew."""
    return methods.available.__wrapped__()


def write(file: Path, name: str) -> Path:
    file.write_text(NAMED.format(name=name))
    return file


def learned(method: str, *tasks: set[int]) -> IncrementalClassifier:
    """A model that has learned these digits, one task after the other."""
    classifier = IncrementalClassifier(method=method, preset="digits", epochs=1, device="cpu")
    images, labels = load_digits(return_X_y=True)
    for task in tasks:
        chosen = np.isin(labels, list(task))
        classifier.partial_fit(images[chosen].reshape(-1, 8, 8).astype(np.uint8), labels[chosen])
    return classifier


def example() -> str:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return what makes a text a method of one's own until the test ends."""

    def write_and_forget(text: str) -> None:
        (tmp_path / "own.py").write_text(text)
        monkeypatch.setenv(methods.VARIABLE, str(tmp_path / "own.py"))
        methods.available.cache_clear()

    yield write_and_forget
    methods.available.cache_clear()


def test_the_documented_example_is_a_good_one(install: Callable[[str], None], tmp_path: Path) -> None:
    """Fine-tuning and the example, by the preset but for fewer epochs: 26.6 and 75.0 of a hundred."""
    assert len(example().splitlines()) <= 50
    install(example())
    run = ["run", "--method", "finetune", "anchor", "--scenario", "cs5", "--epochs", "5", "--device", "cpu", "--quiet"]
    assert main([*run, "--output", str(tmp_path / "runs")]) == 0
    summaries = {file.parent: json.loads(file.read_text()) for file in (tmp_path / "runs").rglob("summary.json")}
    reached = {summary["method"]: summary["A_step"] for summary in summaries.values()}
    assert reached["anchor"] > 60 > 35 > reached["finetune"]
    (folder,) = (folder for folder, summary in summaries.items() if summary["method"] == "anchor")
    assert '"drift"' in (folder / "metrics.jsonl").read_text()
    tensors = load_file(next(folder.rglob("*.safetensors")))
    assert len(tensors["memory.means"]) == 10
    assert all(bool((row != 0).any()) for row in tensors["memory.means"])


def test_the_page_shows_what_the_check_of_its_example_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "anchor.py").write_text(example())
    assert main(["check", str(tmp_path / "anchor.py")]) == 0
    for line in capsys.readouterr().out.splitlines():
        if "GPU" not in line and "left out" not in line.split(",")[-1]:  # what depends on the machine
            assert line in PAGE.read_text(), "Show on the page what `efcil check` prints now."
    for check in (*METHOD_CHECKS, *BACKBONE_CHECKS):
        assert check.asserts in PAGE.read_text()


def test_another_method_written_from_the_page_alone_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """It penalises weights directly, which the fused path must not lose."""
    assert len(TETHER.read_text().splitlines()) <= 50
    assert main(["check", str(TETHER)]) == 0
    passed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  passed")]
    assert len(passed) >= len(METHOD_CHECKS) - 3  # heads without a temperature, and two that need a GPU


def test_what_the_documented_example_stores_is_shown_in_its_words(
    install: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(example())
    learned("anchor", {0, 1}).save(tmp_path / "model")
    assert main(["inspect", str(tmp_path / "model")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "the nearest mean decides which class an image shows" in text
    assert "a single image is that image's feature vector" in text, "what we know of means stays said"


def test_what_end_task_keeps_has_no_gradient(install: Callable[[str], None], tmp_path: Path) -> None:
    """Otherwise the next task's loss would go back through the statistics of the last one, whose graph is gone."""
    install(ATTRACTED)
    assert main(["run", "--method", "attracted", *SHORT, "--output", str(tmp_path / "runs")]) == 0
    kept = learned("attracted", {0, 1}, {2}).model_.ready.get_buffer("centres")
    assert len(kept) == 2
    assert not kept.requires_grad


def test_a_method_of_ones_own_learns_more_of_what_it_knows(install: Callable[[str], None]) -> None:
    install(REHEARSING)
    model = learned("rehearsing", {0, 1}, {2})
    images, labels = load_digits(return_X_y=True)
    before = model.model_.ready.memory.means.clone()
    heads = model.model_.ready.network.head_weight().detach().clone()
    model.partial_fit(images[labels == 2][:9].reshape(-1, 8, 8).astype(np.uint8), labels[labels == 2][:9], more=True)
    after = model.model_.ready.memory.means
    assert torch.equal(after[:2], before[:2])
    assert not torch.equal(after[2], before[2])
    assert not torch.equal(model.model_.ready.network.head_weight(), heads)


LATE = """
import torch
from efcil.core.losses import cross_entropy
from efcil.methods.base import Method
class Late(Method):
    name = "late"
    summary = "keeps what it has not announced"
    def loss(self, batch):
        return {"current": cross_entropy(self.network.logits(self.network.features(batch.images)), batch.labels)}
    def end_task(self, task, data):
        self.register_buffer("surprise", torch.zeros(3))
"""


def test_state_that_could_not_be_loaded_is_found_out_early(
    install: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(LATE)
    assert main(["run", "--method", "late", *SHORT, "--output", str(tmp_path / "runs")]) == 1
    assert "a new one does not have surprise" in capsys.readouterr().err
    with pytest.raises(TrainingError, match="Register every parameter, buffer and submodule in __init__"):
        learned("late", {0, 1})


def test_an_old_network_that_was_not_kept(
    install: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = example().replace("        self.keep_teacher()\n", "")
    assert text != example()
    install(text)
    assert main(["run", "--method", "anchor", *SHORT, "--output", str(tmp_path / "runs")]) == 2
    assert "call self.keep_teacher() in begin_task" in capsys.readouterr().err


TERMS = 'return {"current": current, "drift": self.settings.weight * drift}'
GROUPS = """
    def parameter_groups(self, recipe):
        return [{group} for group in super().parameter_groups(recipe)]

    def frozen("""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            TERMS,
            'return {"current": current, "drift": 0.5}',
            "The term 'drift' that `loss` of 'anchor' returned is a float",
        ),
        (TERMS, 'return {"current": current[None]}', "is a tensor of shape (1,)"),
        (TERMS, "pass", "`loss` of 'anchor' returned nothing. Return terms by name"),
        (TERMS, "return current", "`loss` of 'anchor' returned a tensor. Return terms by name"),
        (TERMS, "return {str(n): current for n in range(9)}", "A loss has 8 terms at most, not 9: 0, 1,"),
        ("        super().begin_task(task)\n", "", "heads for 4 classes, not for the 7 that are seen with this task"),
        (
            "        super().begin_task(task)\n",
            "        super().begin_task(task)\n        self.layer = torch.nn.Linear(1, 1)\n",
            "a new one does not have layer.bias, layer.weight",
        ),
        (
            "\n    def frozen(",
            GROUPS.replace("{group}", '{**group, "weight_decay": 0}'),
            "keys params, learning_rate, weight_decay. All else",
        ),
        ("\n    def frozen(", GROUPS.replace("{group}", '{"params": group["params"], "lr": 1}'), "keys params, lr."),
        ("\n    def frozen(", GROUPS.replace("{group}", 'group["params"]'), "a list. All else"),
    ],
)
def test_what_the_engine_cannot_use_is_said_in_a_sentence(
    old: str, new: str, message: str, install: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layer of begin_task trains as usual, but an interrupted run could not go on, and no command use the model."""
    assert old in example()
    install(example().replace(old, new))
    assert main(["run", "--method", "anchor", *SHORT, "--output", str(tmp_path / "runs")]) == 1
    assert message in capsys.readouterr().err


def test_a_method_that_is_not_found_may_be_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(methods.VARIABLE, raising=False)
    with pytest.raises(SettingsError, match=r"Unknown method 'anchor'.*set \$EFCIL_METHODS to its file"):
        methods.get("anchor")


def test_documentation_is_about_the_methods_of_the_package(install: Callable[[str], None]) -> None:
    before = documentation()
    install(example())
    assert "anchor" in methods.available()
    assert "anchor" not in methods.bundled()
    assert documentation() == before


def test_files_and_folders_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    places = [write(tmp_path / "one.py", "one"), write(tmp_path / "folder" / "two.py", "two").parent]
    before = set(found())
    monkeypatch.setenv(methods.VARIABLE, os.pathsep.join(map(str, places)))
    assert set(found()) - before == {"one", "two"}


def test_installed_packages_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "efcil_test_package.py", "packed")
    monkeypatch.syspath_prepend(tmp_path)
    entry = importlib.metadata.EntryPoint("packed", "efcil_test_package", methods.ENTRY_POINTS)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    assert "packed" in found()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("raise RuntimeError('boom')", r"mine\.py failed: RuntimeError: boom"),
        (NAMED.format(name="efc"), "Two methods are called 'efc'"),
        (TWINS, r"called 'twin': both in .*mine\.py\. Give yours another name"),
        (NAMED.format(name=""), "defines no method: a subclass of Method with a name"),
        ("", "defines no method"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    text: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv(methods.VARIABLE, str(file))
    with pytest.raises(SettingsError, match=message):
        found()


@pytest.mark.parametrize(
    "head", ["class Settings:", "@dataclass\n    class Settings:", "class Settings(Method.Settings):"]
)
def test_settings_that_are_no_frozen_dataclass_are_refused(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the decorator, the fields of a class that inherits are no settings at all."""
    settings = f"    {head}\n        weight: float = 1.0\n"
    (tmp_path / "mine.py").write_text("from dataclasses import dataclass\n" + NAMED.format(name="mine") + settings)
    monkeypatch.setenv(methods.VARIABLE, str(tmp_path / "mine.py"))
    with pytest.raises(SettingsError, match="Settings of method mine are not a frozen dataclass"):
        found()


def test_settings_called_as_those_of_every_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mine+epochs=2` would be two runs, and their rows of a table one."""
    settings = "    @dataclass(frozen=True)\n    class Settings:\n        seed: int = 3\n        epochs: int = 1\n"
    (tmp_path / "mine.py").write_text("from dataclasses import dataclass\n" + NAMED.format(name="mine") + settings)
    monkeypatch.setenv(methods.VARIABLE, str(tmp_path / "mine.py"))
    with pytest.raises(SettingsError, match=r"called as those of every run: epochs, seed\. Give them other names\.$"):
        found()


def test_a_file_may_be_named_twice_and_another_file_is_another_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = write(tmp_path / "one.py", "twin"), write(tmp_path / "two.py", "twin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(methods.VARIABLE, os.pathsep.join(["one.py", str(one)]))
    assert "twin" in found()
    monkeypatch.setenv(methods.VARIABLE, str(tmp_path))
    with pytest.raises(SettingsError, match=re.escape(f"called 'twin': one in {one}, one in {two}.")):
        found()


def test_files_of_one_name_are_two_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "mine.py", f"mine-{name}")
    monkeypatch.setenv(methods.VARIABLE, os.pathsep.join(str(tmp_path / name) for name in ("one", "two")))
    classes = found()
    for name in ("one", "two"):
        module = sys.modules[classes[f"mine-{name}"].__module__]
        assert Path(module.__file__ or "") == tmp_path / name / "mine.py"
