"""Models for other programs: ONNX, or a torch.export archive, with preprocessing and class names inside.

An exported model takes uint8 images N x size x size x 3 (RGB) for any N and returns `scores` and `probabilities`, both
N x classes; probabilities are calibrated: the softmax of scores / temperature. Its metadata, a JSON text called
`efcil`, names the classes in the order of the scores.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import efcil
from efcil.engine.evaluate import scorer
from efcil.errors import SettingsError
from efcil.files import make_folder, write_atomically
from efcil.model import standalone
from efcil.model.card import ModelError, encode_label
from efcil.model.in_memory import Model, probabilities

TOLERANCE = 1e-4
CHECKED_IMAGES = 16
METADATA = "efcil"
SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}

Runner = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class Exported(nn.Module):
    """The exported module: pixels in, scores and probabilities out."""

    scale: Tensor
    shift: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.method = model.twin()
        self._answer = scorer(self.method, model.card.settings.classifier)
        scale, shift = model.card.normalisation.constants(torch.device("cpu"))
        self.register_buffer("scale", scale[None, :, None, None])
        self.register_buffer("shift", shift[None, :, None, None])
        self.temperature = model.temperature

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Score uint8 images N x size x size x 3."""
        pixels = images.permute(0, 3, 1, 2).to(torch.float32)
        scores = self._answer(pixels * self.scale + self.shift)
        return scores, torch.softmax(scores / self.temperature, dim=1)


def export(model: Model, kind: str, file: Path) -> float:
    """Write the model to a file and compare its scores with the original's; return the largest difference."""
    try:
        make_folder(file.parent)
        with tempfile.TemporaryFile(dir=file.parent):
            pass  # better known now than after the work
        # In memory first: if a disk is full or read-only, torch ends the process or raises an unclear error.
        content, difference = exported(model, kind)
        write_atomically(file, content)
    except OSError as error:
        raise ModelError(f"{file} cannot be written ({error.strerror or error}). Choose another --output.") from None
    return difference


def script_text() -> str:
    """Return a program that uses an ONNX model without efcil: `standalone.py`, as it is."""
    return Path(standalone.__file__).read_text(encoding="utf-8")


def write_script(file: Path) -> None:
    """Write the program of `script_text`."""
    try:
        write_atomically(file, script_text().encode())
    except OSError as error:
        raise ModelError(f"{file} cannot be written ({error.strerror or error}). Choose another --script.") from None


def exported(model: Model, kind: str) -> tuple[bytes, float]:
    """Return the content of the file, and the largest difference of its scores from the original's."""
    if model.execution.device.type != "cpu" or model.execution.half:
        raise SettingsError("Models are exported on the CPU in single precision. Load the model with device='cpu'.")
    content, run = _MAKERS[kind](model)
    return content, _compare(model, run, kind)


def describe(model: Model) -> str:
    """Return the metadata of an exported model as JSON."""
    return json.dumps(
        {
            "format": 1,
            "efcil": efcil.__version__,
            "method": model.card.settings.method,
            "classes": [encode_label(label) for label in model.card.labels],
            "image_size": model.card.image_size,
            "temperature": model.temperature,
            "input": "uint8, N x height x width x 3, RGB; resize the shorter side and crop the centre",
        }
    )


def _compare(model: Model, run: Runner, kind: str) -> float:
    """Score the same images with both: noise, and smooth images, which activate other parts of a network."""
    size, draw = model.card.image_size, np.random.default_rng(0)
    noise = draw.integers(0, 256, (CHECKED_IMAGES, size, size, 3), np.uint8)
    corners = draw.integers(0, 256, (CHECKED_IMAGES, 2, 2, 3)).astype(np.float64)
    steps = np.linspace(0.0, 1.0, size)
    mix = np.stack([1 - steps, steps], axis=1)
    smooth = np.einsum("ya,xb,nabc->nyxc", mix, mix, corners).astype(np.uint8)
    largest = 0.0
    # Three images at the end, because other batch sizes than the example's must work too.
    for images in (noise, smooth, noise[:3]):
        expected, (scores, chances) = model.scores(images), run(images)
        largest = max(largest, float(np.abs(scores - expected).max() / max(1.0, np.abs(expected).max())))
        largest = max(largest, float(np.abs(chances - probabilities(expected, model.temperature)).max()))
        if largest > TOLERANCE or not np.array_equal(scores.argmax(axis=1), expected.argmax(axis=1)):
            raise ModelError(
                f"The exported {kind} model differs from the original (scores by {largest:.1e}, at most "
                f"{TOLERANCE:g} is allowed, or the class). Nothing has been written; please report this."
            )
    return largest


# -- formats ---------------------------------------------------------------------------------------------------------


def _program(model: Model) -> torch.export.ExportedProgram:
    """Trace the model twice: what the first trace does not use, such as class statistics, is left out."""
    size = model.card.image_size
    example = torch.zeros(4, size, size, 3, dtype=torch.uint8)
    shapes = {"images": {0: torch.export.Dim("batch", min=1)}}
    module = Exported(model).eval()
    with torch.no_grad():
        module(example)  # some methods build their classifier at the first call
        try:
            first = torch.export.export(module, (example,), dynamic_shapes=shapes)
        except Exception as error:  # torch raises many kinds of errors if it cannot trace a function
            raise ModelError(
                f"Method {model.card.settings.method} cannot be exported: its scores do not come from one fixed "
                f"computation ({type(error).__name__}). Use the model folder itself."
            ) from error
        used = {node.name for node in first.graph.nodes if node.op == "placeholder" and node.users}
        for placeholder, name in first.graph_signature.inputs_to_buffers.items():
            if placeholder not in used:
                owner, _, leaf = name.rpartition(".")
                module.get_submodule(owner)._buffers[leaf] = torch.zeros(0)
        return torch.export.export(module, (example,), dynamic_shapes=shapes)


def _make_torch(model: Model) -> tuple[bytes, Runner]:
    archive = io.BytesIO()
    with _quiet():
        torch.export.save(_program(model), archive, extra_files={METADATA: describe(model)})
        archive.seek(0)
        module: Any = torch.export.load(archive).module()

    def run(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            scores, chances = module(torch.from_numpy(images))
        return scores.numpy(), chances.numpy()

    return archive.getvalue(), run


def _make_onnx(model: Model) -> tuple[bytes, Runner]:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        try:
            importlib.import_module(package)
        except ImportError:
            raise SettingsError(
                f"Exporting to ONNX needs {package}, which is not installed. Install it: pip install 'efcil[onnx]'"
            ) from None
    import onnx
    import onnxruntime

    with _quiet():
        program = torch.onnx.export(
            _program(model), input_names=["images"], output_names=["scores", "probabilities"], dynamo=True
        )
    assert program is not None
    proto = program.model_proto
    onnx.helper.set_model_props(proto, {METADATA: describe(model)})
    content = proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scores, chances = session.run(["scores", "probabilities"], {"images": images})
        return scores, chances

    return content, run


_MAKERS: dict[str, Callable[[Model], tuple[bytes, Runner]]] = {"onnx": _make_onnx, "torch": _make_torch}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporters' progress and advice, which is meant for developers."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
