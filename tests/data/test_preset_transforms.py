"""What the network sees under the preset of each dataset, from its files, beside the same by Pillow in plain words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from shards import png, write_shard

from efcil.data.augment import Normalisation, make_augmentation
from efcil.data.sources import SourceOptions, load_dataset
from efcil.data.sources.domainnet import DOMAINS
from efcil.data.whole import task_images
from efcil.presets import load_preset

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR100 = ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
#: Smaller and larger than 256, tall and wide.
SHAPES = ((300, 280), (180, 240), (290, 400), (260, 260))


def photograph(seed: int, width: int, height: int) -> Image.Image:
    """Return an image that is not the same anywhere, but smooth enough for JPEG."""
    noise = np.random.default_rng(seed).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def save(image: Image.Image, file: Path) -> Image.Image:
    file.parent.mkdir(parents=True, exist_ok=True)
    image.save(file, "JPEG")
    return Image.open(file).convert("RGB")


def cifar(folder: Path, label: str) -> list[Image.Image]:
    images = [photograph(seed, 32, 32) for seed in range(4)]
    for split in ("train", "test"):
        contents = [png(np.asarray(image)) for image in images]
        write_shard(folder / f"{split}.parquet", contents, [0, 1, 0, 1], image="img", label=label)
    return images


def class_folders(folder: Path, shapes: tuple[tuple[int, int], ...]) -> list[Image.Image]:
    images = []
    for place, shape in enumerate(shapes):
        for split in ("train", "val"):
            file = folder / split / f"n0000000{place // 2}" / f"{place}.JPEG"
            found = save(photograph(place, *shape), file)
        images.append(found)
    return images


def birds(folder: Path) -> list[Image.Image]:
    images = [save(photograph(place, *shape), folder / "images" / f"{place}.jpg") for place, shape in enumerate(SHAPES)]
    save(photograph(9, 300, 300), folder / "images" / "9.jpg")
    (folder / "images.txt").write_text("".join(f"{place} {place}.jpg\n" for place in (0, 1, 2, 3, 9)))
    (folder / "image_class_labels.txt").write_text("0 1\n1 1\n2 2\n3 2\n9 1\n")
    (folder / "train_test_split.txt").write_text("0 1\n1 1\n2 1\n3 1\n9 0\n")
    return images


def domains(folder: Path) -> list[Image.Image]:
    images = []
    for place, domain in enumerate(DOMAINS):
        file = folder / domain / "airplane" / "1.jpg"
        images.append(save(photograph(place, *SHAPES[place % len(SHAPES)]), file))
        for split in ("train", "test"):
            (folder / f"{domain}_{split}.txt").write_text(f"{domain}/airplane/1.jpg 0\n")
    return images


def resized(image: Image.Image, shorter: int) -> Image.Image:
    width, height = image.size
    factor = shorter / min(width, height)
    size = (shorter, int(height * factor)) if width <= height else (int(width * factor), shorter)
    return image.resize(size, Image.Resampling.BILINEAR)


def central(image: Image.Image, side: int) -> Image.Image:
    left, top = round((image.size[0] - side) / 2), round((image.size[1] - side) / 2)
    return image.crop((left, top, left + side, top + side))


def same(image: Image.Image) -> Image.Image:
    return image


def usual_test_view(image: Image.Image) -> Image.Image:
    return central(resized(image, 256), 224)


Change = Callable[[Image.Image], Image.Image]


def padded(pixels: int) -> Change:
    return lambda image: ImageOps.expand(image, pixels)


#: How the files are written, the normalisation, what precedes the random crop, and what a test image undergoes.
CASES: dict[str, tuple[Callable[[Path], list[Image.Image]], Any, Change, Change]] = {
    "cifar10": (lambda path: cifar(path, "label"), CIFAR10, padded(4), same),
    "cifar100": (lambda path: cifar(path, "fine_label"), CIFAR100, padded(4), same),
    "tiny-imagenet": (lambda path: class_folders(path, ((64, 64),) * 4), IMAGENET, padded(8), same),
    "imagenet-subset": (lambda path: class_folders(path, SHAPES), IMAGENET, same, usual_test_view),
    "imagenet-1k": (lambda path: class_folders(path, SHAPES), IMAGENET, same, usual_test_view),
    "cub200": (birds, IMAGENET, same, usual_test_view),
    "domainnet": (domains, IMAGENET, lambda image: resized(image, 256), usual_test_view),
}


@pytest.mark.parametrize("name", list(CASES))
def test_training_and_test_views_are_those_of_pillow(name: str, tmp_path: Path) -> None:
    write, (mean, deviation), before, after = CASES[name]
    pictures = write(tmp_path / "data")
    dataset = load_dataset(name, tmp_path / "data", SourceOptions(cache=tmp_path / "cache"))
    task = task_images(
        dataset.train.images,
        dataset.train.labels,
        augmentation=make_augmentation(load_preset(name).augmentation(dataset.image_size)),
        normalisation=Normalisation(dataset.mean, dataset.std),
        device=torch.device("cpu"),
        seed=3,
        name="task",
    )
    side = task.size

    def as_input(image: Image.Image) -> np.ndarray:
        return (np.asarray(image, np.float64) / 255 - mean) / deviation

    def apart(ours: torch.Tensor, theirs: np.ndarray) -> None:
        # Pillow rounds in fixed point, after each of two steps.
        levels = np.abs(ours.permute(1, 2, 0).double().numpy() - theirs) * np.array(deviation) * 255
        assert levels.max() < 2.01
        assert levels.mean() < 0.3

    for epoch in range(3):
        view = task.view("epoch", epoch, training=True)
        found, _ = task.render(view, 0, len(task))
        for place, row in enumerate(view.order.tolist()):
            if "box" in view.draws:
                top, left, height, width = (int(edge) for edge in view.draws["box"][place])
            else:
                (top, left), height, width = view.draws["corner"][place].tolist(), side, side
            picture = before(pictures[row]).crop((left, top, left + width, top + height))
            picture = picture.resize((side, side), Image.Resampling.BILINEAR)
            apart(found[place], as_input(ImageOps.mirror(picture) if view.draws["flip"][place] else picture))
    decoded = np.asarray(dataset.train.images)
    for row, test_view in enumerate(torch.cat([pixels for pixels, _ in task.plain()])):
        picture = after(pictures[row])
        assert np.array_equal(decoded[row], np.asarray(picture)), "as test images are decoded"
        apart(test_view, as_input(picture))
