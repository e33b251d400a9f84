from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from efcil import methods
from efcil.classifier import IncrementalClassifier
from efcil.cli import main
from efcil.data.decode import Encoded, decode_image
from efcil.engine import progress
from efcil.errors import SettingsError
from efcil.model import Model, ModelError, standalone
from efcil.model import export as exporting
from efcil.model.export import export
from efcil.model.images import model_fit
from efcil.model.in_memory import probabilities
from efcil.settings import options


@pytest.fixture(scope="session")
def images() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (7, 8, 8, 3), np.uint8)


def test_onnx_agrees(trained: Path, tmp_path: Path, images: np.ndarray, capsys: Any) -> None:
    onnx = pytest.importorskip("onnx", reason="needs the onnx extra")
    runtime = pytest.importorskip("onnxruntime", reason="needs the onnx extra")
    pytest.importorskip("onnxscript", reason="needs the onnx extra")
    file, script = tmp_path / "digits.onnx", tmp_path / "ask.py"
    assert main(["export", str(trained), "--to", "onnx", "--output", str(file), "--script", str(script)]) == 0
    assert "3 classes, at most" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"digits.onnx", "ask.py"}, "nothing beside these"
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    model = Model.load(trained, "cpu")
    for batch in (images, images[:1]):
        scores, chances = session.run(["scores", "probabilities"], {"images": batch})
        np.testing.assert_allclose(scores, model.scores(batch), atol=1e-4)
        np.testing.assert_allclose(chances, model.probabilities(batch), atol=1e-4)
    Image.fromarray(images[0]).save(tmp_path / "image.png")
    asked = [sys.executable, "-I", str(script), str(file), str(tmp_path / "image.png")]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    answer, chance = said.removeprefix(f"{tmp_path / 'image.png'}  ").split()
    assert int(answer) == model.scores(images[:1]).argmax()
    assert float(chance) == pytest.approx(model.probabilities(images[:1]).max(), abs=1e-3)
    (tmp_path / "broken.png").write_text("no image")
    asked += [str(tmp_path / "broken.png"), str(tmp_path), str(tmp_path / "image.png")]
    third = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (third.returncode, third.stdout) == (1, 2 * said), "the others are answered"
    assert [line.split(" cannot be read")[0] for line in third.stderr.splitlines()] == asked[-3:-1]
    none = subprocess.run(asked[:4], capture_output=True, text=True, check=False)
    assert none.returncode == 1
    assert none.stderr.startswith("Give a model and at least one image: python")
    loaded = onnx.load(str(file))
    facts = json.loads({entry.key: entry.value for entry in loaded.metadata_props}["efcil"])
    assert facts["classes"] == [0, 1, 2]
    assert facts["image_size"] == 8
    assert facts["temperature"] == model.temperature
    numbers = sum(int(np.prod(tensor.dims)) for tensor in loaded.graph.initializer)
    network = sum(value.numel() for name, value in model.tensors().items() if name.startswith("network."))
    assert numbers <= network + 64, "class statistics, which scores do not need, are left out"


def test_the_script_reads_images_as_efcil_does(tmp_path: Path) -> None:
    draw, files = np.random.default_rng(0), []
    coarse = Image.fromarray(draw.integers(0, 256, (12, 9, 4), np.uint8), "RGBA")
    for size in ((9, 12), (131, 203), (333, 257)):
        photograph = coarse.resize(size, Image.Resampling.BICUBIC)
        for mode, kind in (("RGB", "jpg"), ("L", "jpg"), ("CMYK", "jpg"), ("RGBA", "png"), ("LA", "png"), ("P", "gif")):
            for orientation in range(1, 9) if mode in ("RGB", "RGBA") else [1]:
                exif = Image.Exif()
                exif[0x0112] = orientation
                files.append(tmp_path / f"{size[0]}-{mode}-{orientation}.{kind}")
                photograph.convert(mode).save(files[-1], exif=exif)
        files.append(tmp_path / f"{size[0]}.tif")
        Image.fromarray(np.asarray(photograph.convert("L")).astype(np.uint16) * 257).save(files[-1])
    for file in files:
        expected = decode_image(Encoded(file, file.name), model_fit(16))
        np.testing.assert_array_equal(standalone.read(str(file), 16), expected, file.name)


def test_the_script_is_for_onnx(trained: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["export", str(trained), "--to", "torch", "--script", str(tmp_path / "ask.py")]) == 2
    assert "for ONNX models" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_script_takes_no_file_of_the_model_and_not_the_export(trained: Path, tmp_path: Path, capsys: Any) -> None:
    before, exported = (trained / "model.json").read_bytes(), str(tmp_path / "model.onnx")
    for script, said in ((str(trained / "model.json"), "a file of the model itself"), (exported, "both the model and")):
        assert main(["export", str(trained), "--to", "onnx", "--output", exported, "--script", script]) == 2
        assert said in (error := capsys.readouterr().err)
        assert "Choose another --script." in error
    assert (trained / "model.json").read_bytes() == before
    assert not list(tmp_path.iterdir())


def test_a_hyphen_writes_to_standard_output(
    trained: Path, tmp_path: Path, images: np.ndarray, capsysbinary: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(trained), "--to", "torch", "--output", "-"]) == 0
    content, said = capsysbinary.readouterr()
    assert b"standard output: 3 classes, at most" in said
    scores, _ = torch.export.load(io.BytesIO(content)).module()(torch.from_numpy(images))
    np.testing.assert_allclose(scores.detach().numpy(), Model.load(trained, "cpu").scores(images), atol=1e-4)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["export", str(trained), "--to", "torch", "--output", "-"]) == 2
    content, said = capsysbinary.readouterr()
    assert not content
    assert b"Give a file with --output" in said


def test_a_hyphen_writes_the_script_to_standard_output(
    trained: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("efcil.model.export.exported", lambda model, kind: (b"a model", 0.0))
    assert main(["export", str(trained), "--to", "onnx", "--output", "model.onnx", "--script", "-"]) == 0
    printed, said = capsys.readouterr()
    assert printed == Path(standalone.__file__).read_text(encoding="utf-8")
    assert "model.onnx: 3 classes" in said
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert main(["export", str(trained), "--to", "onnx", "--output", "-", "--script", "-"]) == 2
    assert "The standard output would be both" in capsys.readouterr().err


def test_torch_agrees(trained: Path, tmp_path: Path, images: np.ndarray) -> None:
    file = tmp_path / "digits.pt2"
    assert main(["export", str(trained), "--to", "torch", "--output", str(file)]) == 0
    extra = {"efcil": ""}
    program = torch.export.load(str(file), extra_files=extra)
    assert json.loads(extra["efcil"])["classes"] == [0, 1, 2]
    model = Model.load(trained, "cpu")
    for batch in (images, images[:1]):
        scores, _ = program.module()(torch.from_numpy(batch))
        np.testing.assert_allclose(scores.detach().numpy(), model.scores(batch), atol=1e-4)
    kept = sum(value.numel() for value in program.state_dict.values())
    assert kept < sum(value.numel() for value in model.tensors().values())


@pytest.mark.parametrize("kind", ["torch", "onnx"])
@pytest.mark.parametrize("method", ["sdc", "fecam", "lda", "adagauss", "apr", "fetril", "dpcr"])
def test_methods_with_classifiers_of_their_own(digits: Any, tmp_path: Path, method: str, kind: str) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxscript", reason="needs the onnx extra")
    short: dict[str, Any] = {name: 2 for name in options(methods.get(method).Settings) if name.endswith("_epochs")}
    if "adapter_epochs" in short:
        short["adapter"] = "mlp"  # the one that is trained for so many
    quick = IncrementalClassifier(method, preset="digits", epochs=1, device="cpu", settings=short)
    learned = quick.fit(*digits.train(0, 1)).partial_fit(*digits.train(2))
    assert export(learned.model_, kind, tmp_path / "model") < 1e-4


@pytest.mark.parametrize("classifier", ["nearest-mean", "bayes", "both"])
def test_the_classifier_that_was_chosen_is_exported(digits: Any, tmp_path: Path, classifier: str) -> None:
    quick = IncrementalClassifier(preset="digits", epochs=1, device="cpu", classifier=classifier)
    assert export(quick.fit(*digits.train(0, 1)).model_, "torch", tmp_path / "model") < 1e-4


def test_what_torch_cannot_follow_says_so(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from efcil.methods.efc import ElasticFeatureConsolidation

    def embed(self: Any, images: torch.Tensor) -> torch.Tensor:
        features = self.network.features(images)
        return features if float(features.sum()) > 0 else features + 0

    model = Model.load(trained, "cpu")
    monkeypatch.setattr(ElasticFeatureConsolidation, "embed", embed)
    with pytest.raises(ModelError, match="efc cannot be exported"):
        export(model, "torch", tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [lambda s: s + 2e-3, lambda s: s[:, ::-1].copy()])
def test_an_export_that_differs_is_not_written(
    wrong: Any, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def maker(model: Model) -> Any:
        return b"wrong", lambda images: (wrong(model.scores(images)), probabilities(model.scores(images)))

    monkeypatch.setitem(exporting._MAKERS, "torch", maker)
    with pytest.raises(ModelError, match="differs from the original"):
        export(Model.load(trained, "cpu"), "torch", tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_named_with_the_command(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = exporting.importlib.import_module

    def without(name: str, *arguments: Any) -> Any:
        if name == "onnxscript":
            raise ImportError(name)
        return find(name, *arguments)

    monkeypatch.setattr(exporting.importlib, "import_module", without)
    with pytest.raises(SettingsError, match=r"needs on\w+, which is not installed.*pip install 'efcil\[onnx\]'"):
        export(Model.load(trained, "cpu"), "onnx", tmp_path / "model.onnx")


def test_mistakes(trained: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["export", str(trained), "--to", "onxx"]) == 2
    assert "Did you mean 'onnx'" in capsys.readouterr().err
    assert main(["export", str(trained)]) == 2
    (tmp_path / "file").write_text("")
    assert main(["export", str(trained), "--to", "torch", "--output", str(tmp_path / "file" / "x.pt2")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    trained: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    model = Model.load(trained, "cpu")
    monkeypatch.setattr("efcil.model.export.tempfile.TemporaryFile", fails)
    monkeypatch.setattr("efcil.model.export.exported", pytest.fail)
    with pytest.raises(ModelError, match=r"cannot be written \(Read-only file system\)"):
        export(model, "torch", tmp_path / "model.pt2")


@pytest.mark.parametrize(("work", "flags"), [("exporting", ["--to", "torch"]), ("auditing", ["--data", "."])])
def test_long_work_says_that_it_goes_on(
    work: str, flags: list[str], trained: Path, capsys: Any, monkeypatch: Any
) -> None:
    """Of a real network, both take ten seconds or more."""
    now, waiting = [0.0], []

    class Watched(progress.Waiting):
        def __init__(self, say: Any) -> None:
            super().__init__(say, lambda: now[0], tick=None)
            waiting.append(self)

    def slow(*_: Any) -> None:
        now[0] += 6.0
        waiting[0].beat()
        raise SettingsError("That is enough.")

    monkeypatch.setattr(progress, "Waiting", Watched)
    monkeypatch.setattr("efcil.model.export.export", slow)
    monkeypatch.setattr("efcil.model.audit.audit", slow)
    assert main([work.removesuffix("ing"), str(trained), *flags]) == 2
    assert capsys.readouterr().err.startswith(f"{work}  (6 s so far)")


@pytest.mark.parametrize("kind", ["torch", "onnx"])
def test_a_full_disk_leaves_the_export_before(kind: str, trained: Path, tmp_path: Path, monkeypatch: Any) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxscript", reason="needs the onnx extra")
    file = tmp_path / "model"
    file.write_text("the one before")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("efcil.files.os.fsync", full)
    with pytest.raises(ModelError, match=r"cannot be written \(No space left on device\)"):
        export(Model.load(trained, "cpu"), kind, file)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert file.read_text() == "the one before"


def test_files_of_the_model_itself_are_not_written_over(model_folder: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("efcil.model.export.export", pytest.fail)
    monkeypatch.chdir(model_folder)
    before = {path.name: path.read_bytes() for path in model_folder.iterdir()}
    for place in (model_folder, Path(), Path("..", model_folder.name)):
        for name in before:
            assert main(["export", str(model_folder), "--to", "torch", "--output", str(place / name)]) == 2
            assert "is a file of the model itself. Choose another --output." in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in model_folder.iterdir()} == before
