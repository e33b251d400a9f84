"""Which classifier a run is evaluated with: a choice that training does not depend on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from efcil.core import classifiers
from efcil.errors import SettingsError
from efcil.experiment import run_grid
from efcil.methods import available
from efcil.network.backbones import make_backbone
from efcil.network.incremental import IncrementalNetwork
from efcil.report import render, table
from efcil.resolution import identity, label, validate
from efcil.runfolder import RunFolder, locate
from efcil.settings import Settings

SHORT = {"method": "efc", "scenario": "custom", "tasks": 2, "epochs": 2, "device": "cpu"}


def states(folder: RunFolder) -> bytes:
    (file,) = folder.model.glob("*.safetensors")
    return file.read_bytes()


def test_a_run_is_evaluated_as_asked_and_trained_the_same(tmp_path: Path) -> None:
    names = ["own", "heads", "mahalanobis", "all"]
    runs = {name: Settings(**SHORT, classifier=name) for name in names}
    run_grid([validate(settings) for settings in runs.values()], tmp_path, quiet=True)
    folders = {name: locate(tmp_path, settings) for name, settings in runs.items()}
    assert len({folder.path for folder in folders.values()}) == len(names)
    assert len({states(folder) for folder in folders.values()}) == 1
    results = {name: json.loads(folder.summary_file.read_text()) for name, folder in folders.items()}
    assert results["heads"]["A_step"] == results["own"]["A_step"] == results["all"]["A_step"]
    assert results["mahalanobis"]["A_step"] != results["own"]["A_step"]
    assert "classifiers" not in results["own"]
    beside = results["all"]["classifiers"]
    assert set(beside) == {"heads", *classifiers.CLASSIFIERS}
    for name in ("heads", "mahalanobis"):
        assert beside[name]["A_step"] == pytest.approx(results[name]["A_step"])
        assert beside[name]["A_inc"] == pytest.approx(results[name]["A_inc"])
    shown = table([folders["all"]])
    assert list(shown.rows[0].classifiers) == ["own", *beside]
    for name, values in beside.items():
        assert re.search(rf"^{name} +{values['A_step']:.2f} +{values['A_inc']:.2f}$", render(shown), re.M)


def test_the_label_and_the_identity_say_which_classifier_it_was() -> None:
    assert label(Settings(method="efc")) == "efc"
    assert label(Settings(method="efc", classifier="bayes")) == "efc+classifier=bayes"
    assert identity(Settings(classifier="bayes")) != identity(Settings())
    # Not the plain run: a plain one that has finished lacks the numbers that are asked for.
    assert label(Settings(method="efc", classifier="all")) == "efc+classifier=all"


def test_views_at_test_change_results_and_names_but_not_training(tmp_path: Path) -> None:
    runs = [Settings(**SHORT, test_views=views, classifier="all") for views in (1, 2)]
    assert [label(run) for run in runs] == ["efc+classifier=all+epochs=2", "efc+classifier=all+test_views=2+epochs=2"]
    assert "test_views" not in identity(runs[0])
    assert identity(runs[1])["test_views"] == 2
    run_grid([validate(run) for run in runs], tmp_path, quiet=True)
    folders = [locate(tmp_path, run) for run in runs]
    assert len({states(folder) for folder in folders}) == 1
    one, two = (folder.read_summary() for folder in folders)
    assert "test_views" not in one
    assert two["test_views"] == 2
    assert one["A_step"] != two["A_step"]
    assert one["classifiers"]["bayes"] != two["classifiers"]["bayes"]
    with pytest.raises(SettingsError, match="test_views"):
        Settings(test_views=3)


def test_classifiers_beside_the_method_are_as_incomplete_as_its_own(tmp_path: Path) -> None:
    """Where joint training comes after the last task alone, there is no accuracy to average over tasks."""
    settings = Settings(**SHORT | {"method": "joint", "epochs": 1}, classifier="all", overrides={"when": "last"})
    run_grid([validate(settings)], tmp_path, quiet=True)
    summary = locate(tmp_path, settings).read_summary()
    assert summary["A_inc"] is None
    assert summary["classifiers"]["heads"] == {"A_step": pytest.approx(summary["A_step"]), "A_inc": None}


def test_an_impossible_classifier_is_refused_before_training() -> None:
    with pytest.raises(SettingsError, match="'ewc' does not keep"):
        validate(Settings(method="ewc", classifier="nearest-mean"))
    with pytest.raises(SettingsError, match="Unknown classifier 'bayess'"):
        validate(Settings(method="efc", classifier="bayess"))


@pytest.mark.parametrize("name", available())
def test_what_a_method_says_it_keeps_it_has(name: str) -> None:
    """Class statistics are about what `embed` gives: their sizes agree."""
    method = available()[name](IncrementalNetwork(make_backbone("slim", 0)))
    statistics = method.statistics()
    assert set(method.about.keeps) <= {"heads", "means", "covariances"}
    assert (statistics is not None) == ("means" in method.about.keeps)
    if statistics is not None:
        assert (statistics.covariances is not None) == ("covariances" in method.about.keeps)
        with torch.no_grad():
            size = method.eval().embed(torch.zeros(2, 3, 8, 8)).shape[1]
        assert statistics.means.shape[1] == size
        assert statistics.covariances is None or statistics.covariances.shape[1:] == (size, size)
