"""Crops from whole images: the pixels of Pillow, the boxes of the usual algorithm, and the test view."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from efcil import seeds
from efcil.data import trivial
from efcil.data.augment import Normalisation, ResizedCrop, make_augmentation
from efcil.data.decode import Encoded, Fit, decode_image
from efcil.data.deferred import DeferredImages, FileSupply, Shapes
from efcil.data.store import TaskImages
from efcil.data.whole import (
    WholeTaskImages,
    bring,
    crop_windows,
    plain_resampled,
    task_images,
)
from efcil.errors import DataError

CPU = torch.device("cpu")
PLAIN = Normalisation((0.0,) * 3, (1.0,) * 3)
#: Wide, tall, square, a panorama, smaller than the input, larger than the bound.
SIZES = [(50, 37), (37, 50), (40, 40), (90, 20), (9, 12), (120, 95)]


@pytest.fixture
def photographs(tmp_path: Path) -> list[Path]:
    random, paths = np.random.default_rng(0), []
    for number, (width, height) in enumerate(SIZES):
        noise = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(noise).save(paths[-1])
    return paths


def deferred(paths: list[Path], size: int = 14, stored: int = 60) -> DeferredImages:
    return DeferredImages.of(FileSupply(paths), Shapes(size, stored))


def opened(path: Path, stored: int = 60) -> Image.Image:
    """The image as it is kept: a larger one is shrunk."""
    image = Image.open(path).convert("RGB")
    width, height = image.size
    if min(image.size) > stored:
        factor = stored / min(image.size)
        image = image.resize((int(width * factor), int(height * factor)), Image.Resampling.BILINEAR)
    return image


def usual_test_view(image: Image.Image, size: int, short_side: int) -> np.ndarray:
    """Resize the shorter side, crop the centre: written out as libraries have it."""
    width, height = image.size
    if width <= height:
        width, height = short_side, int(short_side * height / width)
    else:
        width, height = int(short_side * width / height), short_side
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    top, left = round((height - size) / 2.0), round((width - size) / 2.0)
    return np.asarray(image.crop((left, top, left + size, top + size)))


def levels_apart(ours: torch.Tensor, theirs: np.ndarray) -> None:
    difference = ours.permute(1, 2, 0).numpy() - theirs.astype(np.float32)
    # Pillow works in fixed point: a value may round either way.
    assert np.abs(difference).max() <= 1
    assert np.abs(difference).mean() < 0.3


def test_crops_equal_those_of_pillow(photographs: list[Path]) -> None:
    images, _ = bring(deferred(photographs), CPU)
    order = torch.arange(len(SIZES)).repeat(20)
    draws = ResizedCrop().draw_whole(images.heights[order], images.widths[order], seeds.generator("cpu", 0))
    found = plain_resampled(images, order, crop_windows(draws["box"], 14), draws["flip"])
    for place, row in enumerate(order.tolist()):
        top, left, height, width = (int(edge) for edge in draws["box"][place])
        picture = opened(photographs[row]).crop((left, top, left + width, top + height))
        theirs = np.asarray(picture.resize((14, 14), Image.Resampling.BILINEAR))
        levels_apart(found[place], theirs[:, ::-1] if draws["flip"][place] else theirs)
    wide = draws["box"][order == 0]
    assert (wide[:, 1] + wide[:, 3]).max() > 44, "also from the right edge, beyond the centred square"
    assert wide[:, 1].min() < 6


def test_the_test_view_is_resized_and_cropped_exactly(photographs: list[Path]) -> None:
    found = np.asarray(deferred(photographs))
    assert found.shape == (len(SIZES), 14, 14, 3)
    for path, view in zip(photographs, found, strict=True):
        assert np.array_equal(view, usual_test_view(Image.open(path).convert("RGB"), 14, 16))
    picture = Encoded(photographs[0], "it")
    large = decode_image(picture, Fit(224, resize=True, short_side=256))
    assert np.array_equal(large, usual_test_view(Image.open(photographs[0]).convert("RGB"), 224, 256))


def test_plain_images_of_a_task_are_its_test_views(photographs: list[Path]) -> None:
    images = deferred(photographs)
    task = make_task(images, np.arange(len(SIZES)))
    [(pixels, labels)] = task.plain()
    assert labels.tolist() == list(range(len(SIZES)))
    for place, path in enumerate(photographs):
        levels_apart((pixels[place] * 255).round(), usual_test_view(opened(path), 14, 16))


def make_task(
    images: DeferredImages, labels: np.ndarray, augmentation: str = "resized-crop", **more: object
) -> TaskImages:
    chosen = make_augmentation(augmentation)
    return task_images(images, labels, augmentation=chosen, normalisation=PLAIN, device=CPU, seed=3, name="t", **more)


def test_a_task_has_the_rows_it_is_given_in_their_order(photographs: list[Path]) -> None:
    rows = np.array([4, 1, 2])
    task = make_task(deferred(photographs), np.arange(10, 16), rows=rows)
    assert isinstance(task, WholeTaskImages)
    assert (len(task), task.size, task.labels.tolist()) == (3, 14, [14, 11, 12])
    for place, row in enumerate(rows):
        assert np.array_equal(
            task.images.picture(place).permute(1, 2, 0).numpy(), np.asarray(Image.open(photographs[row]))
        )
    assert torch.stack([task.images.widths, task.images.heights], 1).tolist() == [list(SIZES[row]) for row in rows]


def test_larger_images_are_shrunk_to_the_bound(photographs: list[Path]) -> None:
    kept, _ = bring(deferred(photographs, stored=30), CPU)
    assert [min(h, w) for h, w in zip(kept.heights.tolist(), kept.widths.tolist(), strict=True)] == [
        30,
        30,
        30,
        20,
        9,
        30,
    ]
    assert (int(kept.widths[3]), int(kept.heights[3])) == (90, 20)


def test_strong_views_are_for_training_only(photographs: list[Path]) -> None:
    labels = np.arange(len(SIZES))
    strong = make_task(deferred(photographs), labels, "resized-crop-trivial")
    weak = make_task(deferred(photographs), labels)
    assert isinstance(strong, WholeTaskImages)
    for ours, theirs in zip(strong.augmented("prototypes"), weak.augmented("prototypes"), strict=True):
        assert torch.equal(ours[0], theirs[0])
    view = strong.view("epoch", 1, training=True)
    rendered, _ = strong.render(view, 0, 6)
    crops, _ = weak.render(weak.view("epoch", 1), 0, 6)
    own = {name: view.draws[name] for name in ("operation", "level", "negative")}
    pixels = trivial.changed((crops * 255).round(), **own)  # PLAIN maps pixel values to 0..1
    torch.testing.assert_close(rendered, pixels / 255)
    assert not torch.equal(rendered, crops)
    assert rendered.is_contiguous(memory_format=torch.channels_last)


def test_an_epoch_in_pieces_is_the_same_epoch(photographs: list[Path]) -> None:
    task = make_task(deferred(photographs), np.arange(len(SIZES)))
    view = task.view("epoch", 1)
    whole, labels = task.render(view, 0, 6)
    pieces = [task.render(task.view("epoch", 1), start, start + 2) for start in (0, 2, 4)]
    assert torch.equal(whole, torch.cat([each for each, _ in pieces]))
    assert torch.equal(labels, torch.cat([each for _, each in pieces]))
    assert not torch.equal(whole, task.render(task.view("epoch", 2), 0, 6)[0])
    assert whole.is_contiguous(memory_format=torch.channels_last)


def test_augmentations_that_need_squares_get_the_test_views(photographs: list[Path]) -> None:
    images = deferred(photographs)
    task = make_task(images, np.arange(len(SIZES)), "crop-flip")
    assert type(task) is TaskImages
    assert np.array_equal(task.images.permute(0, 2, 3, 1).numpy(), np.asarray(images))


def test_squares_stay_squares() -> None:
    pixels = np.zeros((3, 8, 8, 3), np.uint8)
    assert type(make_task(pixels, np.arange(3))) is TaskImages  # type: ignore[arg-type]


def usual_boxes(count: int, height: int, width: int) -> np.ndarray:
    """Boxes drawn one by one, written out as libraries have it."""
    random, boxes = np.random.default_rng(0), []
    for _ in range(count):
        for _ in range(10):
            area = random.uniform(0.08, 1) * height * width
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                boxes.append((random.integers(0, height - h + 1), random.integers(0, width - w + 1), h, w))
                break
        else:
            w, h = width, height
            if width / height < 3 / 4:
                h = round(width / (3 / 4))
            elif width / height > 4 / 3:
                w = round(height * (4 / 3))
            boxes.append(((height - h) // 2, (width - w) // 2, h, w))
    return np.array(boxes)


@pytest.mark.parametrize(("height", "width"), [(375, 500), (90, 400), (400, 100)])
def test_boxes_follow_the_usual_distribution(height: int, width: int) -> None:
    count = 20000
    shapes = (torch.full((count,), height), torch.full((count,), width))
    ours = ResizedCrop().draw_whole(*shapes, seeds.generator("cpu", 0))["box"].numpy()
    theirs = usual_boxes(count, height, width)
    assert (ours[:, 0] + ours[:, 2]).max() <= height
    assert (ours[:, 1] + ours[:, 3]).max() <= width
    for edge in range(4):
        for share in (0.05, 0.25, 0.5, 0.75, 0.95):
            allowed = 0.03 * (height, width)[edge % 2]
            assert abs(np.quantile(ours[:, edge], share) - np.quantile(theirs[:, edge], share)) < allowed


@pytest.mark.parametrize(("height", "width", "box"), [(90, 400, [0, 140, 90, 120]), (400, 100, [133, 0, 133, 100])])
def test_where_no_box_fits_the_centre_is_taken(height: int, width: int, box: list[int]) -> None:
    shapes = (torch.full((50,), height), torch.full((50,), width))
    draws = ResizedCrop(area=(1.0, 1.0)).draw_whole(*shapes, seeds.generator("cpu", 0))
    assert draws["box"].unique(dim=0).tolist() == [box]


def test_the_kernel_agrees_with_the_plain_version(photographs: list[Path]) -> None:
    pytest.importorskip("triton", reason="Triton is not installed here; the plain version is used instead")
    from efcil.data.augment_kernel import windowed_crop

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, _ = bring(deferred(photographs, size=10), device)
    order = torch.tensor([3, 0, 5, 5, 2, 4], device=device)
    draws = ResizedCrop().draw_whole(images.heights[order].cpu(), images.widths[order].cpu(), seeds.generator("cpu", 2))
    normalise = Normalisation((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    scale, shift = normalise.constants(device)
    flips: list[torch.Tensor | None] = [draws["flip"].to(device), None]
    for windows, flip in zip(
        (crop_windows(draws["box"].to(device), 10), images.test_windows(order)), flips, strict=True
    ):
        plain = normalise(plain_resampled(images, order, windows, flip), torch.float32)
        places = torch.stack([images.starts[order], images.widths[order]], dim=1)
        fast = windowed_crop(images.pixels, places, windows, flip, 10, scale, shift, torch.float32)
        assert fast.is_contiguous(memory_format=torch.channels_last)
        levels = ((fast - plain) / scale[None, :, None, None]).abs()
        assert levels.max() < 1.01  # a pixel value may round the other way
        assert levels.mean() < 0.05


def test_deferred_images_look_like_an_array(photographs: list[Path]) -> None:
    images = deferred(photographs)
    assert (images.shape, images.dtype, images.ndim, len(images)) == ((6, 14, 14, 3), np.uint8, 4, 6)
    all_of_them = np.asarray(images)
    assert np.array_equal(images[2], all_of_them[2])
    assert np.array_equal(images[np.array([5, 0])], all_of_them[[5, 0]])
    assert np.array_equal(images[[1, 3]][1], all_of_them[3])
    assert np.array_equal(images[np.arange(6) > 3], all_of_them[4:])


def test_a_broken_image_is_named(photographs: list[Path]) -> None:
    photographs[1].write_bytes(b"no image")
    with pytest.raises(DataError, match=r"1\.png cannot be decoded"):
        bring(deferred(photographs), CPU)
