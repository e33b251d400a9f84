"""TrivialAugment in batches against Pillow, image by image."""

import numpy as np
import pytest
import torch
from pictures import SIZE, as_batch, by_pillow, pictures, store
from PIL import Image

from efcil import seeds
from efcil.data import trivial
from efcil.data.augment import Normalisation, ShiftedCrop, Trivial, make_augmentation
from efcil.data.trivial import LEVELS, OPERATIONS, strength


def batched(images, operation, level, negative, everywhere):
    """The same with the batched functions."""
    count = len(images)
    drawn = (torch.full((count,), each) for each in (OPERATIONS.index(operation), level, negative))
    found = trivial.changed(as_batch(images), *drawn, everywhere)
    return found.permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_equals_pillow(operation, everywhere):
    """To the last bit, at every level and sign, for images of many kinds."""
    images = pictures(2)
    for level in range(LEVELS):
        for negative in (0, 1):
            value = strength(operation, level, bool(negative))
            ours = batched(images, operation, level, negative, everywhere)
            theirs = np.stack([by_pillow(Image.fromarray(image), operation, value) for image in images])
            np.testing.assert_array_equal(ours, theirs, err_msg=f"level {level}, {value}")


@pytest.mark.parametrize("size", [8, 32, 64])
@pytest.mark.parametrize("operation", ["rotate", "shear-x", "equalise", "contrast", "sharpness"])
def test_images_of_other_sizes_equal_pillow_too(operation, size):
    images = pictures(1, size, seed=1)
    for level in (1, 7, 10, 20, 23, 30):
        value = strength(operation, level, True)
        theirs = np.stack([by_pillow(Image.fromarray(image), operation, value) for image in images])
        np.testing.assert_array_equal(batched(images, operation, level, 1, False), theirs, err_msg=f"level {level}")


def test_the_ranges_are_those_of_the_wide_set():
    most = {name: strength(name, LEVELS - 1, False) for name in OPERATIONS}
    assert most["shear-x"] == most["shear-y"] == 0.99
    assert most["translate-x"] == most["translate-y"] == 32
    assert most["rotate"] == 135
    assert most["brightness"] == most["colour"] == most["contrast"] == most["sharpness"] == 1.99
    assert (most["posterise"], most["solarise"]) == (2, 0)
    assert strength("brightness", LEVELS - 1, True) == pytest.approx(0.01)
    assert strength("rotate", LEVELS - 1, True) == -135
    assert [strength(name, 0, True) for name in ("posterise", "solarise", "colour")] == [8, 255, 1]


def test_operations_levels_and_signs_are_uniform_and_repeat():
    draws = trivial.draw(60000, seeds.generator("cpu", 0))
    for name, kinds in (("operation", len(OPERATIONS)), ("level", LEVELS), ("negative", 2)):
        shares = torch.bincount(draws[name]) / 60000
        assert len(shares) == kinds
        assert (shares * kinds - 1).abs().max() < 0.1
        assert torch.equal(draws[name], trivial.draw(60000, seeds.generator("cpu", 0))[name])


def test_images_of_a_batch_do_not_see_each_other():
    """A batch of all operations at once is what each image gives alone, in both ways of computing."""
    images = as_batch(pictures(30, 12))
    draws = trivial.draw(len(images), seeds.generator("cpu", 1))
    assert len(draws["operation"].unique()) == len(OPERATIONS)
    whole = trivial.changed(images, **draws)
    assert torch.equal(whole, trivial.changed(images, **draws, everywhere=True))
    for row in range(len(images)):
        one = {name: value[row : row + 1] for name, value in draws.items()}
        assert torch.equal(whole[row : row + 1], trivial.changed(images[row : row + 1], **one))


def test_nothing_is_read_back_from_the_device():
    """The way of computing on a GPU works on tensors without values, so it can make no host wait."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    images = as_batch(pictures(2))
    draws = trivial.draw(len(images), seeds.generator("cpu", 2))
    trivial.changed(images, **draws, everywhere=True)  # constants are made on first use
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        given = [mode.from_tensor(value) for value in (images, *draws.values())]
        assert trivial.changed(*given, everywhere=True).shape == images.shape
        with pytest.raises(Exception, match=r"nonzero|data-dependent"):
            trivial.changed(*given, everywhere=False)


def test_it_follows_the_crop_and_the_flip():
    inner, both = ShiftedCrop(padding=4, flip=True), make_augmentation("crop-flip-trivial")
    images = torch.from_numpy(pictures(4)).permute(0, 3, 1, 2)
    draws = both.draw(len(images), SIZE, seeds.generator("cpu", 4))
    own = {name: draws[name] for name in ("operation", "level", "negative")}
    assert torch.equal(both.apply(images, draws), trivial.changed(inner.apply(images, draws), **own))
    normalise = Normalisation((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    order = torch.arange(len(images)).flip(0)
    rendered = both.render(images, order, draws, normalise, torch.float32)
    assert torch.equal(rendered, normalise(both.apply(images[order], draws), torch.float32))
    assert both.flip
    assert not both.cuts_whole


@pytest.mark.parametrize("name", ["crop-flip", "crop-flip-8", "padded-resized-crop", "resized-crop"])
def test_training_is_strong_and_statistics_are_weak(name):
    """All views but those of training are the ones that the inner augmentation gives, to the bit."""
    strong, weak = store(f"{name}-trivial", 30), store(name, 30)
    assert isinstance(strong.augmentation, Trivial)
    for purpose in ("prototypes", "drift", "feature-matrix"):
        for (ours, labels), (theirs, same) in zip(
            strong.augmented(purpose, 1), weak.augmented(purpose, 1), strict=True
        ):
            assert torch.equal(ours, theirs)
            assert torch.equal(labels, same)
    pairs = [each.render(each.view("epoch", 2, training=True), 0, 30) for each in (strong, weak)]
    assert torch.equal(pairs[0][1], pairs[1][1])
    different = (pairs[0][0] != pairs[1][0]).flatten(1).any(dim=1)
    assert 15 < different.sum() < 30  # some operations, and level 0, change nothing
    assert torch.equal(weak.render(weak.view("epoch", 2), 0, 30)[0], pairs[1][0])
