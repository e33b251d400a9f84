from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from efcil.engine import checkpoint
from efcil.errors import EfcilError
from efcil.files import locked
from efcil.model import Model, ModelError
from efcil.model import folder as model_files
from efcil.model.card import FORMAT, LearnedClass, Visit, decode_label, encode_label, read_card

LABELS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)
_HINDERS_NOTHING = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
FEW = settings(max_examples=100, suppress_health_check=_HINDERS_NOTHING)


def description(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "model.json").read_text())


def forge(folder: Path, facts: Any = None, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Write a folder whose checksums are right, as somebody who means harm would."""
    old = load_file(next(folder.glob("*.safetensors")))
    checkpoint.write(
        folder, old if tensors is None else tensors, description(folder)["facts"] if facts is None else facts, "model"
    )


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.glob("*.safetensors")))


# -- round trips -----------------------------------------------------------------------------------------------------


def test_round_trip(trained: Path, tmp_path: Path, same: Callable[[Model, Model], bool]) -> None:
    model = Model.load(trained, "cpu")
    model.save(tmp_path / "copy")
    again = Model.load(tmp_path / "copy", "cpu")
    assert same(model, again)
    assert model.card == again.card
    assert description(trained) == description(tmp_path / "copy"), "the same model is the same file"
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), np.uint8)
    assert np.array_equal(model.scores(images), again.scores(images))


def test_the_folder_is_json_and_safetensors_and_says_what_it_is(trained: Path) -> None:
    assert sorted(path.suffix for path in trained.iterdir()) == [".json", ".safetensors"]
    facts = description(trained)["facts"]
    assert facts["format"] == FORMAT
    assert [c["label"] for c in facts["classes"]] == [0, 1, 2]
    assert [c["task"] for c in facts["classes"]] == [0, 0, 1]
    assert all(c["learned"].startswith("20") for c in facts["classes"])
    assert facts["image_size"] == 8
    assert facts["resolved"]["network"] == "slim"
    assert facts["settings"]["method"] == "efc"
    assert set(facts["normalisation"]) == {"mean", "std"}


@given(label=LABELS)
@settings(max_examples=200, deadline=None)
def test_labels_round_trip(label: Any) -> None:
    back = decode_label(json.loads(json.dumps(encode_label(label))))
    assert back == label
    assert repr(back) == repr(label), "types too: True is not 1"


@given(labels=st.lists(LABELS, min_size=1, max_size=8, unique=True), data=st.data())
@FEW
def test_cards_round_trip(labels: list[Any], data: st.DataObject, trained: Path) -> None:
    sizes = []
    while sum(sizes) < len(labels):
        sizes.append(data.draw(st.integers(1, len(labels) - sum(sizes))))
    date = data.draw(st.datetimes()).isoformat()
    task_of = [task for task, size in enumerate(sizes) for _ in range(size)]
    counts = st.integers(1, 1 << 40)
    card = dataclasses.replace(
        read_card(description(trained)["facts"]),
        classes=tuple(LearnedClass(n, t, data.draw(counts), date) for n, t in zip(labels, task_of, strict=True)),
        visits=tuple(Visit("task", size, data.draw(counts), date) for size in sizes),
    )
    assert read_card(json.loads(json.dumps(card.to_json()))) == card


def test_a_card_from_before_a_setting_existed_means_what_was_done_then(trained: Path) -> None:
    facts = json.loads(json.dumps(description(trained)["facts"]))
    facts["settings"]["method"] = "ldc"
    facts["resolved"]["method"] = {"map": "ridge"}
    card = read_card(facts)
    assert (card.resolved.method.map, card.resolved.method.views) == ("ridge", "augmented")
    assert card.to_json()["resolved"]["method"]["views"] == "augmented"


# -- damage ----------------------------------------------------------------------------------------------------------


@given(data=st.data())
@FEW
def test_a_flipped_bit_is_never_loaded(data: st.DataObject, trained: Path, tmp_path_factory: Any, same: Any) -> None:
    folder = Path(shutil.copytree(trained, tmp_path_factory.mktemp("flip") / "model"))
    file = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(bytes(content))
    check_never_wrong(folder, trained, same)


@given(data=st.data())
@FEW
def test_a_truncated_file_is_never_loaded(data: st.DataObject, trained: Path, tmp_path_factory: Any, same: Any) -> None:
    folder = Path(shutil.copytree(trained, tmp_path_factory.mktemp("cut") / "model"))
    file = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = file.read_bytes()
    file.write_bytes(content[: data.draw(st.integers(0, len(content) - 2))])
    with pytest.raises(ModelError, match="damaged"):
        Model.load(folder, "cpu")
    file.unlink()
    with pytest.raises(ModelError):
        Model.load(folder, "cpu")


def check_never_wrong(folder: Path, original: Path, same: Any) -> None:
    try:
        loaded = Model.load(folder, "cpu")
    except ModelError as error:
        assert str(folder) in str(error)  # noqa: PT017 - loading may succeed too
    else:  # white space in the JSON may change, what it says may not
        assert same(loaded, Model.load(original, "cpu"))
        assert loaded.card == Model.load(original, "cpu").card


# -- folders made by somebody else -----------------------------------------------------------------------------------


def test_a_later_format_says_so(model_folder: Path) -> None:
    facts = description(model_folder)["facts"]
    forge(model_folder, facts | {"format": FORMAT + 1, "efcil": "9.9"})
    with pytest.raises(ModelError, match=r"format is 4.*written by a later version \(9\.9\)"):
        Model.load(model_folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.update(kind="cake"), "does not describe a model"),
        (lambda f: f.update(format="1"), "does not name its format"),
        (lambda f: f.update(format=True), "does not name its format"),
        (lambda f: f.pop("classes"), "incomplete"),
        (lambda f: f.update(classes=7), "incomplete"),
        (lambda f: f.update(image_size=10**9), "incomplete"),
        (lambda f: f.update(image_size=True), "incomplete"),
        (lambda f: f["classes"].pop(), "do not fit together"),
        (lambda f: f["visits"][0].update(classes=999_999), "do not fit together"),
        (lambda f: f["visits"][0].update(kind="party"), "incomplete"),
        (lambda f: f["classes"][1].update(label=0), "names a class twice"),
        (lambda f: f["classes"][1].update(label=[0]), "is not a label"),
        (lambda f: f["classes"][1].update(learned="yesterday"), "incomplete"),
        (lambda f: f["normalisation"].update(std=[1, 0, 1]), "divides by zero"),
        (lambda f: f["normalisation"].update(mean=[1, 2]), "incomplete"),
        (lambda f: f["settings"].update(method="os.system"), "Unknown method"),
        (lambda f: f["settings"].update(method="lwf"), "cannot be used"),
        (lambda f: f["settings"].update(surprise=1), "surprise"),
        (lambda f: f["resolved"].update(network="../../etc"), "Unknown network"),
        (lambda f: f["resolved"].update(network="resnet18"), "missing|expected"),
        (lambda f: f["resolved"].update(network="hub:somebody/network"), "describes none"),
        (lambda f: f["settings"].update(input_size=1_000_000), "whole number"),
        (lambda f: f["resolved"]["method"].update(efm_weight="heavy"), "efm_weight"),
        (lambda f: f["resolved"]["first_task"].update(epochs=-1), "epochs"),
    ],
)
def test_cards_that_lie_are_refused(change: Callable[[Any], Any], message: str, model_folder: Path) -> None:
    facts = description(model_folder)["facts"]
    change(facts)
    forge(model_folder, facts)
    with pytest.raises(ModelError, match=message) as error:
        Model.load(model_folder)
    assert str(model_folder) in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(memory=torch.zeros(2, 3, 8, 8)), "has a tensor 'memory' that efc does not have"),
        (lambda t: t.pop("memory.means"), "'memory.means' is missing"),
        (lambda t: t.update({"memory.means": t["memory.means"].double()}), "'memory.means' is F64"),
        (lambda t: t.update({"memory.means": t["memory.means"][:, :5]}), r"'memory.means' is F32 of shape \(3, 5\)"),
        (lambda t: t.update({"network.heads.0": t["network.heads.0"][:1]}), "network.heads.0"),
        (lambda t: t.update({"network.heads.9": t["network.heads.0"]}), "network.heads.9"),
        (lambda t: t.update({"network.heads.x": t["network.heads.0"]}), "network.heads.x"),
        (
            lambda t: t.update({"memory.means": t["memory.means"] * torch.nan}),
            "'memory.means' holds values that are not finite",
        ),
        (lambda t: t.update({"memory.covariances": -t["memory.covariances"] - 1e6}), "do not fit its method"),
        (lambda t: t.update({"memory.means": t["memory.means"][:2]}), "knows 3 classes but keeps the means of 2"),
        (lambda t: t.clear(), "is missing"),
    ],
)
def test_tensors_that_do_not_belong_are_refused(change: Callable[[Any], Any], message: str, model_folder: Path) -> None:
    tensors = tensors_of(model_folder)
    change(tensors)
    forge(model_folder, tensors={name: value.contiguous() for name, value in tensors.items()})
    with pytest.raises(ModelError, match=message):
        Model.load(model_folder)


def rewrite(folder: Path, text: str) -> None:
    (folder / "model.json").write_text(text)


def test_descriptions_of_any_kind_are_refused(model_folder: Path) -> None:
    described = description(model_folder)
    for text in ("", "{", "[]", "7", "null", '{"format": 1}', "[" * 100_000, '"' + "x" * 1000, "{}\x00"):
        rewrite(model_folder, text)
        with pytest.raises(ModelError):
            Model.load(model_folder)
    for number in ("NaN", "1e999"):
        rewrite(model_folder, json.dumps(described).replace('"image_size": 8', f'"image_size": {number}'))
        with pytest.raises(ModelError, match="checksum differs"):
            Model.load(model_folder)
    for entry in (None, 7, {}, {"file": "model.json"}, {"file": "../../etc/passwd", "bytes": 1, "sha256": ""}):
        forged = {key: value for key, value in described.items() if key != "checksum"} | {"tensors": entry}
        rewrite(model_folder, json.dumps(forged | {"checksum": checkpoint._checksum(forged)}))
        with pytest.raises(ModelError):
            Model.load(model_folder)


def test_the_classifier_of_a_card(model_folder: Path) -> None:
    """Cards from before there was a choice say nothing; others may say anything."""
    described = description(model_folder)
    described.pop("checksum")
    for named, found in ((None, "own"), ("bayes", "bayes"), ("oracle", "unknown|Unknown"), (7, "classifier")):
        settings = described["facts"]["settings"]
        settings.pop("classifier", None)
        if named is not None:
            settings["classifier"] = named
        rewrite(model_folder, json.dumps(described | {"checksum": checkpoint._checksum(described)}))
        if named in (None, "bayes"):
            assert Model.load(model_folder, "cpu").card.settings.classifier == found
        else:
            with pytest.raises(ModelError, match=found):
                Model.load(model_folder, "cpu")


def test_things_that_are_no_files_are_not_read(model_folder: Path) -> None:
    """A pipe would never end, and a device would fill the memory."""
    tensors = next(model_folder.glob("*.safetensors"))
    for file in (tensors, model_folder / "model.json"):
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(ModelError, match=f"{file.name} is a named pipe, but efcil writes a file there"):
            Model.load(model_folder)


def test_tensor_files_with_right_checksums_and_wrong_content(model_folder: Path) -> None:
    import hashlib

    for content in (b"", b"\xff" * 8, (1 << 62).to_bytes(8, "little") + b"{}", b"\x02\0\0\0\0\0\0\0{}", b"x" * 64):
        digest = hashlib.sha256(content).hexdigest()
        described = description(model_folder)
        described["tensors"] = {"file": f"model-{digest[:16]}.safetensors", "bytes": len(content), "sha256": digest}
        described.pop("checksum")
        (model_folder / described["tensors"]["file"]).write_bytes(content)
        rewrite(model_folder, json.dumps(described | {"checksum": checkpoint._checksum(described)}))
        with pytest.raises(ModelError):
            Model.load(model_folder)


def test_what_is_no_model_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a model folder"):
        Model.load(tmp_path / "nowhere")
    checkpoint.write(tmp_path / model_files.PARTIAL, {"x": torch.zeros(1)}, {})
    with pytest.raises(ModelError, match="has not finished its first task"):
        Model.load(tmp_path)


# -- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("before", [True, False])
def test_a_crash_while_saving_leaves_one_of_the_two_models(
    call: int, before: bool, trained: Path, model_folder: Path, crash_at_rename: Any, same: Any
) -> None:
    old, new = Model.load(trained, "cpu"), Model.load(trained, "cpu")
    with torch.no_grad():
        new.ready.memory.means.add_(1.0)
    with crash_at_rename(call, before):
        new.save(model_folder)
    found = Model.load(model_folder, "cpu")
    assert same(found, new if call == 2 and not before else old)


@pytest.mark.parametrize("place", ["describe", "read_described"])
def test_a_model_that_is_replaced_while_it_is_read(
    place: str, trained: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, same: Any
) -> None:
    """The reader gets the new model instead of an error about tensors that are no longer there."""
    new = Model.load(trained, "cpu")
    with torch.no_grad():
        new.ready.memory.means.add_(1.0)
    read = getattr(checkpoint, place)

    def disturbed(*arguments: Any) -> Any:
        found = read(*arguments) if place == "describe" else None
        monkeypatch.setattr(checkpoint, place, read)
        new.save(model_folder)
        return found or read(*arguments)

    monkeypatch.setattr(checkpoint, place, disturbed)
    assert same(Model.load(model_folder, "cpu"), new)


def test_nobody_saves_into_a_folder_that_another_process_works_on(trained: Path, model_folder: Path) -> None:
    model = Model.load(trained, "cpu")
    with locked(model_folder / ".lock"), pytest.raises(EfcilError, match="in use by another process"):
        model.save(model_folder)
    model.save(model_folder)
    assert sorted(path.name for path in model_folder.iterdir()) == sorted(path.name for path in trained.iterdir())


def test_files_of_others_are_left_alone(trained: Path, tmp_path: Path) -> None:
    shard = tmp_path / "model-00001-of-00002.safetensors"
    shard.write_text("mine")
    Model.load(trained, "cpu").save(tmp_path)
    assert shard.read_text() == "mine"
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 2


def test_a_folder_that_cannot_be_written_says_so(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EfcilError, match="cannot be written"):
        Model.load(trained, "cpu").save(tmp_path / "file" / "model")


def test_files_that_must_not_be_read_are_not_called_damaged(model_folder: Path, monkeypatch: Any) -> None:
    """As for users other than the superuser, who may read everything."""

    def forbidden(path: Path, limit: int | None = None) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    message = r"cannot be read \(permission denied\). Change its permissions"
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "read_regular", forbidden)
        with pytest.raises(ModelError, match="model.json " + message):
            Model.load(model_folder)
    monkeypatch.setattr("efcil.engine.checkpoint.os.access", lambda file, mode: file.suffix != ".safetensors")
    with pytest.raises(ModelError, match="safetensors " + message):
        Model.load(model_folder)
