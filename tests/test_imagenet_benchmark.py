"""The benchmark of the ImageNet path runs on a CPU; what it measures is not asserted."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import imagenet
import photographs

TORCHVISION = """
import numpy as np
import torch

def Compose(steps):
    def apply(image):
        for step in steps:
            image = step(image)
        return image
    return apply

def RandomResizedCrop(size):
    return lambda image: image.resize((size, size))

def RandomHorizontalFlip():
    return lambda image: image

def PILToTensor():
    return lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1)
"""


@pytest.fixture
def torchvision(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let there be a torchvision that only workers import, unless the program itself does."""
    folder = tmp_path_factory.mktemp("packages") / "torchvision"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "transforms.py").write_text(TORCHVISION)

    def forget() -> dict[str, ModuleType]:
        for cached in (imagenet.usual_transform, imagenet.usual_library):
            cached.cache_clear()
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "torchvision"}

    monkeypatch.syspath_prepend(folder.parent)
    real = forget()
    yield
    forget()
    sys.modules.update(real)


@pytest.mark.usefixtures("torchvision")
def test_everything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "imagenet.csv"
    table = imagenet.measure(imagenet.SMALL, "cpu", 1, tmp_path, file)
    with open(file, encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == ["what", "variant", "value", "unit", "hardware", "torch", "commit", "command"]
    assert [row["value"] for row in rows] == [row["value"] for row in table.rows]
    found = {(row["what"], row["variant"]): float(row["value"]) for row in rows}
    assert found["training, epoch after epoch", "ours / DataLoader"] > 0
    assert found["training, epoch after epoch", "DataLoader (torchvision), 1 workers"] > 0
    assert found["decoding", "ours / DataLoader"] > 0
    assert ("waiting for the images of a task", "task 3, decoded while the task before trained") in found
    assert sum(what == "memory" for what, _ in found) == imagenet.SMALL.tasks
    assert [path.name for path in tmp_path.iterdir()] == ["imagenet.csv"]


def test_the_loader_gives_every_image_once_and_the_last_ones_again(tmp_path: Path) -> None:
    plan = imagenet.generated_plan(tmp_path, imagenet.SMALL, "cpu")
    bench = imagenet.Bench(plan, imagenet.SMALL, 0, imagenet.Table())
    data = imagenet.LoadedImages(bench.plan, bench.rows(0), 16, 0)
    for epoch in range(2):
        view = data.view("epoch", epoch, training=True)
        assert sorted(view.order.tolist()) == list(range(len(data)))
        images, labels = data.render(view, 0, 10)  # not a multiple of the batch
        again, _ = data.render(view, 4, 10)
        assert torch.equal(again, images[4:])
        rest, more = data.render(view, 10, len(data))
        assert len(images) + len(rest) == len(data)
        assert torch.equal(torch.cat([labels, more]), data.labels[view.order])


def test_the_device_is_busy_while_any_span_lasts() -> None:
    spans = [(0.0, 5.0), (10.0, 12.0), (11.0, 14.0), (13.0, 13.5), (18.0, 20.0)]
    assert imagenet.busy_share(spans, 10.0) == pytest.approx(0.6)
    assert imagenet.busy_share(spans, 20.0) == pytest.approx(11 / 20)
    assert imagenet.busy_share([(0.0, 20.0)], 10.0) == 1.0


def test_photographs_have_the_size_and_the_entropy_of_imagenet(tmp_path: Path) -> None:
    photographs._PICTURES[:] = [photographs.picture(0, photographs.SIDE)]
    sizes = [photographs.write(tmp_path / f"{number}.JPEG", number, 1) for number in range(20)]
    assert 80_000 < sum(sizes) / len(sizes) < 160_000
    shapes = {Image.open(path).size for path in tmp_path.iterdir()}
    assert (500, 375) in shapes
    assert len(shapes) > 2
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 20
