"""AutoAugment in batches against Pillow, image by image."""

import hashlib
import random

import numpy as np
import pytest
import torch
from pictures import SIZE, as_batch, by_pillow, pictures, store
from PIL import Image, ImageEnhance

from efcil import seeds
from efcil.data import auto
from efcil.data.augment import Auto, ShiftedCrop, make_augmentation
from efcil.data.auto import LEVELS, POLICIES, strength
from efcil.data.operations import OPERATIONS

GREY = 128


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_equals_pillow(operation, everywhere):
    """To the last bit, at every level and sign, for images of several kinds and sizes."""
    for size in (SIZE, 32):
        images = pictures(1, size)
        count, number = len(images), OPERATIONS.index(operation)
        for level in range(LEVELS):
            for negative in (0, 1):
                value = strength(operation, level, bool(negative), size)
                drawn = (torch.full((count,), each) for each in (number, level, negative))
                ours = auto.SCALE.changed(as_batch(images), *drawn, everywhere).permute(0, 2, 3, 1).numpy()
                theirs = np.stack([by_pillow(Image.fromarray(image), operation, value, GREY) for image in images])
                np.testing.assert_array_equal(ours, theirs, err_msg=f"size {size}, level {level}, {value}")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_equals_the_policy_image_by_image(policy):
    """Brightness, then the two operations of an image, one after the other."""
    images = pictures(12, 16, seed=1)
    draws = auto.draw(policy, len(images), seeds.generator("cpu", 4), jitter=63 / 255)
    assert len(draws["operation"].unique()) > 6
    found = auto.changed(as_batch(images), **draws)
    assert torch.equal(found, auto.changed(as_batch(images), **draws, everywhere=True))
    for row, image in enumerate(images):
        picture = ImageEnhance.Brightness(Image.fromarray(image)).enhance(float(draws["jitter"][row]))
        for place in range(2):
            name = OPERATIONS[draws["operation"][row, place]]
            level, negative = int(draws["level"][row, place]), bool(draws["negative"][row, place])
            picture = by_pillow(picture, name, strength(name, level, negative, 16), GREY)
        np.testing.assert_array_equal(found[row].permute(1, 2, 0).numpy(), np.asarray(picture), err_msg=str(row))


def test_auto_contrast_equals_pillow_for_every_range():
    ends = [(low, high) for low in range(0, 256, 15) for high in range(low + 1, 256)]
    images = np.array(ends, np.uint8)[:, :, None, None].repeat(3, axis=3)
    drawn = (torch.full((len(ends),), each) for each in (OPERATIONS.index("auto-contrast"), 0, 0))
    ours = auto.SCALE.changed(as_batch(images.repeat(2, axis=2)), *drawn).permute(0, 2, 3, 1).numpy()
    theirs = [by_pillow(Image.fromarray(image.repeat(2, axis=1)), "auto-contrast", 0) for image in images]
    np.testing.assert_array_equal(ours, np.stack(theirs))


@pytest.mark.parametrize("policy", POLICIES)
def test_operations_are_as_frequent_as_the_policy_says(policy):
    """Against the policy played by hand, step by step."""
    count, hand = 40000, random.Random(0)
    draws = auto.draw(policy, count, seeds.generator("cpu", 2))
    expected = np.zeros((2, len(OPERATIONS)))
    for _ in range(count):
        for place, (name, tenths, _) in enumerate(hand.choice(POLICIES[policy])):
            expected[place, OPERATIONS.index(name if hand.random() < tenths / 10 else "identity")] += 1
    for place in range(2):
        found = torch.bincount(draws["operation"][:, place], minlength=len(OPERATIONS)).numpy()
        np.testing.assert_allclose(found / count, expected[place] / count, atol=0.012)
    assert 0.49 < draws["negative"].float().mean() < 0.51
    assert "jitter" not in draws


def test_tables_are_whole():
    for policy in POLICIES.values():
        assert len(policy) == 25
        for name, tenths, level in (step for pair in policy for step in pair):
            assert name in OPERATIONS
            assert 0 <= tenths <= 10
            assert 0 <= level < LEVELS
    assert strength("translate-x", LEVELS - 1, False, 331) == pytest.approx(150)
    assert strength("rotate", LEVELS - 1, True, 32) == -30
    assert [strength("posterise", level, False, 32) for level in range(LEVELS)] == [8, 8, 7, 7, 6, 6, 5, 5, 4, 4]


@pytest.mark.parametrize(("policy", "digest"), [("cifar", "3b6a365f5ecbf9ff"), ("imagenet", "996e160855be4c05")])
def test_the_tables_are_those_of_torchvision(policy, digest):
    """By the digest of its own tables; of an operation without a strength, the level is left out."""
    weak = ("invert", "equalise", "auto-contrast")
    steps = [[(name, tenths, "-" if name in weak else level) for name, tenths, level in p] for p in POLICIES[policy]]
    lines = [" ".join(str(each) for step in pair for each in step) for pair in steps]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == digest


def test_the_strongest_are_those_of_the_paper_and_the_weakest_change_nothing():
    levels = {name: [strength(name, level, False, 331) for level in range(LEVELS)] for name in OPERATIONS}
    most = {"shear-x": 0.3, "shear-y": 0.3, "translate-x": 150, "translate-y": 150, "rotate": 30, "solarise": 0}
    most |= dict.fromkeys(("brightness", "colour", "contrast", "sharpness"), 1.9) | {"posterise": 4}
    for name, strongest in most.items():
        nothing = {"solarise": 256, "posterise": 8}.get(name, 0 if strongest != 1.9 else 1)
        expected = np.linspace(nothing, strongest, 10)
        assert levels[name] == pytest.approx(np.round(expected) if name == "posterise" else expected), name
        mirrored = strength(name, LEVELS - 1, True, 331)
        assert mirrored == pytest.approx(strongest if name in ("solarise", "posterise") else 2 * nothing - strongest)


def test_the_factor_of_brightness_is_within_its_limits():
    jitter = auto.draw("cifar", 5000, seeds.generator("cpu", 3), jitter=0.25)["jitter"]
    assert 0.75 <= jitter.min() < 0.76
    assert 1.24 < jitter.max() <= 1.25


def test_nothing_is_read_back_from_the_device():
    """The way of computing on a GPU works on tensors without values, so it can make no host wait."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    images = as_batch(pictures(2))
    draws = auto.draw("cifar", len(images), seeds.generator("cpu", 2), jitter=0.1)
    auto.changed(images, **draws, everywhere=True)  # constants are made on first use
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        given = {name: mode.from_tensor(value) for name, value in draws.items()}
        assert auto.changed(mode.from_tensor(images), **given, everywhere=True).shape == images.shape


def test_it_follows_the_crop_and_the_flip():
    inner, both = ShiftedCrop(padding=4, flip=True), make_augmentation("crop-flip-jitter-auto")
    images = torch.from_numpy(pictures(4)).permute(0, 3, 1, 2)
    draws = both.draw(len(images), SIZE, seeds.generator("cpu", 4))
    own = {name: draws[name] for name in ("operation", "level", "negative", "jitter")}
    assert torch.equal(both.apply(images, draws), auto.changed(inner.apply(images, draws), **own))


@pytest.mark.parametrize(
    ("strong", "weak", "policy"),
    [
        ("crop-flip-auto", "crop-flip", "cifar"),
        ("crop-flip-jitter-auto", "crop-flip", "cifar"),
        ("crop-flip-8-auto", "crop-flip-8", "imagenet"),
        ("padded-resized-crop-auto", "padded-resized-crop", "cifar"),
        ("resized-crop-auto", "resized-crop", "imagenet"),
    ],
)
def test_training_is_strong_and_statistics_are_weak(strong, weak, policy):
    """All views but those of training are the ones that the inner augmentation gives, to the bit."""
    ours, theirs = store(strong), store(weak)
    assert isinstance(ours.augmentation, Auto)
    assert ours.augmentation.policy == policy
    for (images, labels), (same, equal) in zip(ours.augmented("drift", 1), theirs.augmented("drift", 1), strict=True):
        assert torch.equal(images, same)
        assert torch.equal(labels, equal)
    pairs = [each.render(each.view("epoch", 2, training=True), 0, 40)[0] for each in (ours, theirs)]
    different = (pairs[0] != pairs[1]).flatten(1).any(dim=1)
    assert 15 < different.sum() <= 40
