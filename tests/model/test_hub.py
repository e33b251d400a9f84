"""Models on the Hub, against a server on this machine: what is uploaded, downloaded, and refused."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fake_hub import TOKEN, Hub

from efcil.classifier import IncrementalClassifier
from efcil.errors import SettingsError
from efcil.model import ModelError
from efcil.model.readme import is_readme

pytest.importorskip("huggingface_hub", reason="needs the hub extra")
NAME = "somebody/things"


def test_there_and_back(hub: Hub, trained: Path, digits: Any, same: Any, tmp_path: Path) -> None:
    classifier = IncrementalClassifier.load(trained, device="cpu")
    address = classifier.push_to_hub(NAME, private=True, token=TOKEN, commit_message="Three digits", license="mit")
    assert address.startswith(f"{hub.address}/{NAME}/commit/")
    assert hub.messages == ["Three digits"]
    repository = hub.repositories[NAME]
    assert repository.private is True
    files = repository.files("main")[1]
    first = {file.name for file in trained.iterdir()}
    assert set(files) == first | {"README.md"}
    front = yaml.safe_load(files["README.md"].decode().split("---\n")[1])
    assert front["license"] == "mit"
    assert front["library_name"] == "efcil"

    found = IncrementalClassifier.from_pretrained(NAME, device="cpu")
    assert same(found.model_, classifier.model_)
    assert found.get_params() == classifier.get_params()
    images, _ = digits.test(0, 1, 2)
    assert np.array_equal(found.predict(images), classifier.predict(images))
    assert not [asked for asked in hub.requests if "README.md" in asked and "resolve" in asked], (
        "only the model's files"
    )

    # A later state replaces the earlier one, whose tensors have another name.
    found.partial_fit(*digits.train(3)).push_to_hub(NAME, token=TOKEN)
    assert len(repository.files("main")[1]) == 3
    assert IncrementalClassifier.from_pretrained(NAME, device="cpu").classes_.tolist() == [0, 1, 2, 3]
    earlier = list(repository.commits)[1]
    assert IncrementalClassifier.from_pretrained(NAME, revision=earlier, device="cpu").classes_.tolist() == [0, 1, 2]
    hub.repositories.clear()
    kept = IncrementalClassifier.from_pretrained(NAME, revision=earlier, local_files_only=True, device="cpu")
    assert same(kept.model_, classifier.model_)


def test_a_branch_and_a_folder_for_the_cache(hub: Hub, trained: Path, tmp_path: Path) -> None:
    classifier = IncrementalClassifier.load(trained, device="cpu")
    classifier.push_to_hub(NAME, token=TOKEN, revision="next")
    assert hub.repositories[NAME].files("main")[1] == {}
    found = IncrementalClassifier.from_pretrained(NAME, revision="next", cache_dir=tmp_path / "here", device="cpu")
    assert found.classes_.tolist() == [0, 1, 2]
    assert any((tmp_path / "here").iterdir())


def test_a_download_is_checked_as_every_folder_is(hub: Hub, trained: Path) -> None:
    IncrementalClassifier.load(trained, device="cpu").push_to_hub(NAME, token=TOKEN)
    files = hub.repositories[NAME].files("main")[1]
    tensors = next(name for name in files if name.endswith(".safetensors"))
    whole, described = files[tensors], files["model.json"]
    for content, message in (
        (whole[:-8] + b"\0" * 8, rf"{NAME} \(Hub\) is damaged.*checksum differs"),
        (whole[:-8], rf"{NAME} \(Hub\) is damaged.*size differs"),
        (None, "could not be loaded from the Hub"),
    ):
        hub.repositories[NAME].commits = {
            "0" * 40: {**files, tensors: content} if content else {"model.json": described}
        }
        hub.repositories[NAME].branches = {"main": "0" * 40}
        _forget(hub)
        with pytest.raises(ModelError, match=message):
            IncrementalClassifier.from_pretrained(NAME, device="cpu")


def test_a_description_that_points_elsewhere_is_refused(hub: Hub, trained: Path, tmp_path: Path) -> None:
    from efcil.engine import checkpoint

    described = json.loads((trained / "model.json").read_text())
    described.pop("checksum")
    described["tensors"]["file"] = "../../../secret"
    described["checksum"] = checkpoint._checksum(described)
    IncrementalClassifier.load(trained, device="cpu").push_to_hub(NAME, token=TOKEN)
    hub.repositories[NAME].files("main")[1]["model.json"] = json.dumps(described).encode()
    with pytest.raises(ModelError, match="names a file that no checkpoint has"):
        IncrementalClassifier.from_pretrained(NAME, device="cpu")
    assert not [asked for asked in hub.requests if "secret" in asked]


def test_what_the_hub_refuses(hub: Hub, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # where no folder has one of these names
    classifier = IncrementalClassifier.load(trained, device="cpu")
    with pytest.raises(ModelError, match=r"could not be uploaded to the Hub.*hf auth login"):
        classifier.push_to_hub(NAME, token="hf_wrong")
    with pytest.raises(ModelError, match=r"model.json of nobody/nothing could not be loaded from the Hub"):
        IncrementalClassifier.from_pretrained("nobody/nothing")
    for name in ("things", "a/b/c", "https://somewhere/x", "../x", "no such folder"):
        with pytest.raises(ModelError, match="neither a folder nor the name of a repository"):
            IncrementalClassifier.from_pretrained(name)
    with pytest.raises(SettingsError, match="not a short name of a licence"):
        classifier.push_to_hub(NAME, token=TOKEN, license="mit\ntags: [x]")


def test_without_the_package(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return usual(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ModelError, match=r"pip install 'efcil\[hub\]'"):
        IncrementalClassifier.from_pretrained(NAME)
    with pytest.raises(ModelError, match=r"pip install 'efcil\[hub\]'"):
        IncrementalClassifier.load(trained, device="cpu").push_to_hub(NAME)
    assert IncrementalClassifier.from_pretrained(str(trained), device="cpu").classes_.tolist() == [0, 1, 2]


def test_a_folder_needs_no_hub(trained: Path, tmp_path: Path, digits: Any) -> None:
    classifier = IncrementalClassifier.from_pretrained(trained, device="cpu")
    classifier.save_pretrained(tmp_path / "model")
    assert is_readme(tmp_path / "model" / "README.md", classifier.model_.card)
    classifier.partial_fit(*digits.train(3)).save_pretrained(tmp_path / "model", license="cc-by-4.0")
    assert is_readme(tmp_path / "model" / "README.md", classifier.model_.card)
    (tmp_path / "model" / "README.md").write_text("my own words")
    with pytest.raises(ModelError, match=r"README\.md is not what efcil wrote.*overwrite=True"):
        classifier.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "README.md").read_text() == "my own words"
    classifier.save_pretrained(tmp_path / "model", overwrite=True)
    assert IncrementalClassifier.from_pretrained(tmp_path / "model", device="cpu").classes_.tolist() == [0, 1, 2, 3]
    with pytest.raises(ModelError, match="is not a model folder"):
        IncrementalClassifier.from_pretrained(tmp_path / "nowhere")


def _forget(hub: Hub) -> None:
    """Empty the cache, which would give what was downloaded before."""
    import shutil

    from huggingface_hub import constants

    shutil.rmtree(constants.HF_HUB_CACHE, ignore_errors=True)
