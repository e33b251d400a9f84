import numpy as np
import pytest
import torch
from PIL import Image

from efcil import seeds
from efcil.data.augment import AUGMENTATIONS, Normalisation, ResizedCrop, ShiftedCrop, make_augmentation
from efcil.data.store import TaskImages
from efcil.errors import SettingsError


def images(count, size, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (count, 3, size, size), dtype=np.uint8))


def test_resized_crop_equals_pillow():
    """Pad, crop, resize and flip as Pillow does it, to within one rounding of a pixel value."""
    batch = images(60, 32)
    augmentation = ResizedCrop(padding=4)
    draws = augmentation.draw(60, 32, seeds.generator("cpu", 3))
    ours = augmentation.apply(batch, draws)
    for index in range(60):
        picture = Image.new("RGB", (40, 40))
        picture.paste(Image.fromarray(batch[index].permute(1, 2, 0).numpy()), (4, 4))
        top, left, height, width = (int(v) for v in draws["box"][index])
        picture = picture.crop((left, top, left + width, top + height)).resize((32, 32), Image.Resampling.BILINEAR)
        theirs = np.asarray(picture).astype(np.float32)
        if draws["flip"][index]:
            theirs = theirs[:, ::-1]
        difference = ours[index].permute(1, 2, 0).numpy() - theirs
        # Pillow works in fixed point and, in some versions, resizes vertically first: a value may round either way.
        assert np.abs(difference).max() <= 1
        assert np.abs(difference).mean() < 0.3
        assert abs(difference.mean()) < 0.05


def naive_boxes(count, whole):
    """Heights and widths drawn one by one: ten tries for an area and a shape that fit, else the whole image."""
    random, boxes = np.random.default_rng(0), []
    for _ in range(count):
        for _ in range(10):
            area = random.uniform(0.08, 1) * whole * whole
            ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
            width, height = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
            if 0 < width <= whole and 0 < height <= whole:
                break
        else:
            width = height = whole
        boxes.append((height, width))
    return np.array(boxes)


def test_resized_crop_boxes_follow_the_stated_distribution():
    draws = ResizedCrop(padding=4).draw(20000, 32, seeds.generator("cpu", 0))
    top, left, height, width = draws["box"].T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 40).all()
    assert (left + width <= 40).all()
    naive = naive_boxes(20000, 40)
    for ours, theirs in [(height * width, naive[:, 0] * naive[:, 1]), (width / height, naive[:, 1] / naive[:, 0])]:
        for share in (0.05, 0.25, 0.5, 0.75, 0.95):
            assert abs(np.quantile(ours, share) - np.quantile(theirs, share)) < 0.03 * np.quantile(theirs, share)
    assert abs(draws["flip"].float().mean().item() - 0.5) < 0.02


def test_resized_crop_boxes_lie_anywhere():
    """Every integer place that a box has is taken equally often, the last one included."""
    top, left, height, width = ResizedCrop(area=(0.3, 1.0)).draw(40000, 8, seeds.generator("cpu", 0))["box"].T
    for place, size in ((top, height), (left, width)):
        places = place[size == 6].long()
        shares = torch.bincount(places, minlength=3) / len(places)
        assert len(shares) == 3
        assert (shares - 1 / 3).abs().max() < 0.03


def test_where_no_box_fits_the_whole_image_is_taken():
    draws = ResizedCrop(area=(1.0, 1.0)).draw(500, 64, seeds.generator("cpu", 0))
    assert draws["box"].unique(dim=0).tolist() == [[0, 0, 64, 64]]


def test_shifted_crop_corners_and_flips_are_uniform():
    draws = ShiftedCrop(padding=2, flip=True).draw(20000, 8, seeds.generator("cpu", 0))
    for corners in draws["corner"].T:
        shares = torch.bincount(corners) / 20000
        assert len(shares) == 5
        assert (shares - 0.2).abs().max() < 0.02
    assert abs(draws["flip"].float().mean().item() - 0.5) < 0.02


def test_augmentations_are_what_their_names_say():
    assert {name: make_augmentation(name).description for name in AUGMENTATIONS} == {
        "none": "no augmentation",
        "shift": "zero-pad 1, random crop",
        "crop-flip": "zero-pad 4, random crop, flip",
        "crop-flip-8": "zero-pad 8, random crop, flip",
        "padded-resized-crop": "zero-pad 4, random resized crop (0.08 to 1 of the area), flip",
        "resized-crop": "random resized crop (0.08 to 1 of the area), flip",
        "crop-flip-trivial": "zero-pad 4, random crop, flip, TrivialAugment (statistics without it)",
        "crop-flip-8-trivial": "zero-pad 8, random crop, flip, TrivialAugment (statistics without it)",
        "padded-resized-crop-trivial": (
            "zero-pad 4, random resized crop (0.08 to 1 of the area), flip, TrivialAugment (statistics without it)"
        ),
        "resized-crop-trivial": (
            "random resized crop (0.08 to 1 of the area), flip, TrivialAugment (statistics without it)"
        ),
        "crop-flip-auto": "zero-pad 4, random crop, flip, AutoAugment for CIFAR-10 (statistics without it)",
        "crop-flip-jitter-auto": (
            "zero-pad 4, random crop, flip, brightness up to 25% off, AutoAugment for CIFAR-10 (statistics without it)"
        ),
        "crop-flip-8-auto": "zero-pad 8, random crop, flip, AutoAugment for ImageNet (statistics without it)",
        "padded-resized-crop-auto": (
            "zero-pad 4, random resized crop (0.08 to 1 of the area), flip, AutoAugment for CIFAR-10 (statistics "
            "without it)"
        ),
        "resized-crop-auto": (
            "random resized crop (0.08 to 1 of the area), flip, AutoAugment for ImageNet (statistics without it)"
        ),
    }


def test_shifted_crop_equals_slicing_the_padded_image():
    batch = images(20, 8)
    augmentation = ShiftedCrop(padding=2, flip=True)
    draws = augmentation.draw(20, 8, seeds.generator("cpu", 1))
    out = augmentation.apply(batch, draws)
    padded = torch.nn.functional.pad(batch, [2] * 4)
    for index in range(20):
        top, left = draws["corner"][index].tolist()
        expected = padded[index, :, top : top + 8, left : left + 8]
        expected = expected.flip(-1) if draws["flip"][index] else expected
        assert torch.equal(out[index], expected.float())
    assert len(draws["corner"].unique(dim=0)) > 5


def test_normalisation_values_and_layout():
    normalise = Normalisation((0.5, 0.25, 0.0), (0.5, 0.25, 1.0))
    out = normalise(torch.full((2, 3, 4, 4), 255, dtype=torch.uint8), torch.float32)
    torch.testing.assert_close(out[0, :, 0, 0], torch.tensor([1.0, 3.0, 1.0]))
    assert out.is_contiguous(memory_format=torch.channels_last)
    for batch in (images(3, 5), images(3, 5).contiguous(memory_format=torch.channels_last), images(3, 5).float()):
        before = batch.clone()
        scale, shift = (each[:, None, None] for each in normalise.constants(batch.device))
        assert torch.equal(normalise(batch, torch.float32), before.float() * scale + shift)
        assert torch.equal(batch, before)


@pytest.mark.parametrize("name", sorted(AUGMENTATIONS))
def test_cutting_an_epoch_into_pieces_changes_nothing(name):
    store = TaskImages(
        images(30, 16).permute(0, 2, 3, 1).numpy(), np.arange(30),
        augmentation=make_augmentation(name), normalisation=Normalisation((0.5,) * 3, (0.2,) * 3),
        device=torch.device("cpu"), seed=5, name="task0",
    )  # fmt: skip
    view = store.view("epoch", 3, training=True)
    whole = store.render(view, 0, 30)
    again = store.view("epoch", 3, training=True)
    pieces = [store.render(again, start, start + 10) for start in (0, 10, 20)]
    assert torch.equal(whole[1], torch.cat([p[1] for p in pieces]))
    torch.testing.assert_close(whole[0], torch.cat([p[0] for p in pieces]), atol=1e-6, rtol=0)
    assert not torch.equal(whole[1], store.render(store.view("epoch", 4, training=True), 0, 30)[1])


def test_unknown_augmentation_names_the_closest():
    with pytest.raises(SettingsError, match="crop-flip"):
        make_augmentation("crop-flop")


@pytest.mark.parametrize("padding", [0, 4])
def test_crop_kernel_agrees_with_the_plain_version(padding):
    pytest.importorskip("triton", reason="Triton is not installed here; the plain version is used instead")
    from efcil.data.augment_kernel import resized_crop

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch, order = images(6, 12).to(device), torch.tensor([4, 0, 5, 5, 2], device=device)
    augmentation, normalise = ResizedCrop(padding=padding), Normalisation((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    draws = {n: v.to(device) for n, v in augmentation.draw(5, 12, seeds.generator("cpu", 2)).items()}
    plain = normalise(augmentation.apply(batch[order], draws), torch.float32)
    scale, shift = normalise.constants(device)
    fast = resized_crop(batch, order, draws["box"], draws["flip"], padding, scale, shift, torch.float32)
    assert fast.is_contiguous(memory_format=torch.channels_last)
    levels = ((fast - plain) / scale[None, :, None, None]).abs()
    assert levels.max() < 1.01  # a pixel value may round the other way
    assert levels.mean() < 0.05
