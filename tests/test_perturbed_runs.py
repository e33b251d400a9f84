"""Noise in the feature space of a finished run on the digits."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from efcil.data.images import Dataset, ImageSet
from efcil.data.sources import load_dataset
from efcil.errors import DataError, RunFolderError, SettingsError
from efcil.experiment import perturb, run_one
from efcil.runfolder import RunFolder
from efcil.settings import Settings

SHORT: dict[str, Any] = {
    "scenario": "custom", "tasks": 2, "first_task_epochs": 2, "epochs": 2, "batch_size": 64, "device": "cpu"
}  # fmt: skip


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset("digits")


@pytest.fixture(scope="module")
def trained(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return RunFolder(run_one(Settings(method="efc", **SHORT), tmp_path_factory.mktemp("runs"), digits, quiet=True))


@pytest.fixture
def run(trained: RunFolder, tmp_path: Path) -> RunFolder:
    shutil.copytree(trained.path, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def test_noise_in_non_principal_directions_changes_no_prediction(run: RunFolder, digits: Dataset) -> None:
    assert run.perturbation() is None
    found = perturb(run, digits, sigmas=(0.5, 2.0), device="cpu")
    confusion = run.confusion()
    assert confusion is not None
    right = 100.0 * confusion.trace() / confusion.sum()
    assert right > 50, "a network that has learned nothing would show nothing"
    assert [(each.task, each.directions, each.sigma) for each in found] == [
        (2, name, sigma) for name in ("principal", "non-principal") for sigma in (0.5, 2.0)
    ]
    assert all(each.unperturbed == pytest.approx(right) for each in found)
    principal, others = found[:2], found[2:]
    assert 0.02 < principal[0].change < principal[1].change <= 1.0
    assert principal[1].accuracy < right - 10
    assert all(each.accuracy == each.unperturbed for each in others)
    assert all(each.change < 1e-5 for each in others)
    assert run.perturbation() == found
    header = (run.path / "perturbation.csv").read_text().splitlines()[0]
    assert header == "task,sigma,directions,change,accuracy,unperturbed"
    assert "perturbation.csv" not in run.verified_summary()["files"], "it is made afterwards"


def test_results_repeat_and_the_dataset_is_found(run: RunFolder, digits: Dataset) -> None:
    first = perturb(run.path, sigmas=[1.0], device="cpu", write=False)
    assert run.perturbation() is None
    assert first == perturb(run, digits, sigmas=[0.1, 1.0], device="cpu", write=False)[1::2]


def test_a_larger_cut_off_leaves_important_directions_to_the_rest(run: RunFolder, digits: Dataset) -> None:
    spectrum = run.spectrum()
    assert spectrum is not None
    share = float(spectrum[2][1] / spectrum[2][0])
    (_, exact), (_, coarse) = (
        perturb(run, digits, sigmas=[1.0], cut_off=cut_off, device="cpu", write=False) for cut_off in (1e-6, share)
    )
    assert exact.change < 1e-5 < 1e-2 < coarse.change


def test_other_images_are_refused(run: RunFolder, digits: Dataset) -> None:
    other = dataclasses.replace(digits, test=ImageSet(digits.test.images[1:], digits.test.labels[1:]))
    with pytest.raises(DataError, match="other images"):
        perturb(run, other, device="cpu")


@pytest.mark.parametrize("sigmas", [(), (-1.0,), (np.nan,)])
def test_noise_must_have_a_size(run: RunFolder, digits: Dataset, sigmas: tuple[float, ...]) -> None:
    with pytest.raises(SettingsError, match="at least 0"):
        perturb(run, digits, sigmas=sigmas, device="cpu")


def test_a_method_without_a_feature_matrix_is_refused(digits: Dataset, tmp_path: Path) -> None:
    short = SHORT | {"first_task_epochs": 1, "epochs": 1}
    finetuned = run_one(Settings(method="finetune", **short), tmp_path, digits, quiet=True)
    with pytest.raises(RunFolderError, match=r"\(finetune\) keeps no feature matrix"):
        perturb(finetuned, digits, device="cpu")


def test_a_run_that_has_not_finished_is_refused(run: RunFolder, digits: Dataset) -> None:
    run.summary_file.unlink()
    with pytest.raises(RunFolderError, match="has not finished"):
        perturb(run, digits, device="cpu")


def test_a_damaged_file_is_named(run: RunFolder) -> None:
    (run.path / "perturbation.csv").write_text("task,sigma\n1,0.5\n")
    with pytest.raises(RunFolderError, match=r"perturbation\.csv is damaged"):
        run.perturbation()
