from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.base import clone
from torch.utils.data import Dataset, IterableDataset

from efcil import methods
from efcil.classifier import IncrementalClassifier, InputError, NotLearnedError
from efcil.core import classifiers
from efcil.engine.evaluate import scorer
from efcil.errors import EfcilError, SettingsError
from efcil.model import ModelError
from efcil.model.images import gather
from efcil.settings import options

QUICK: dict[str, Any] = {"preset": "digits", "epochs": 1, "device": "cpu"}


def quick(**parameters: Any) -> IncrementalClassifier:
    return IncrementalClassifier(**{**QUICK, **parameters})


# -- learning --------------------------------------------------------------------------------------------------------


def test_learns_digits_task_after_task(digits: Any) -> None:
    classifier = quick(epochs=20, first_task_epochs=25, settings={"later.learning_rate": 1e-3})
    classifier.partial_fit(*digits.train(0, 1)).partial_fit(*digits.train(2, 3))
    assert classifier.classes_.tolist() == [0, 1, 2, 3]
    assert classifier.score(*digits.test(0, 1, 2, 3)) > 0.6
    images, _ = digits.test(0, 1, 2, 3)
    chances = classifier.predict_proba(images)
    np.testing.assert_allclose(chances.sum(axis=1), 1.0)
    assert np.array_equal(classifier.predict(images), classifier.classes_[chances.argmax(axis=1)])


@pytest.mark.parametrize("method", list(methods.incremental()))
def test_from_a_saved_model_as_in_one_go(method: str, digits: Any, tmp_path: Path, same: Any) -> None:
    """Classes added months later give, bit for bit, what one uninterrupted program gives."""
    tasks = [digits.train(0, 1), digits.train(2), digits.train(3, 4)]
    short = {"epochs": 2, "samples": 50, "width": 16}
    own: dict[str, Any] = {
        name: value
        for name in options(methods.get(method).Settings)
        for end, value in short.items()
        if name.endswith(end)
    }
    if "adapter_epochs" in own:
        own["adapter"] = "mlp"  # the one that has such settings
    at_once = quick(method=method, settings=own or None)
    for task in tasks:
        at_once.partial_fit(*task)
    quick(method=method, settings=own or None).partial_fit(*tasks[0]).save(tmp_path)
    for task in tasks[1:]:
        IncrementalClassifier.load(tmp_path, device="cpu").partial_fit(*task).save(tmp_path)
    loaded = IncrementalClassifier.load(tmp_path, device="cpu")
    assert same(loaded.model_, at_once.model_)
    assert loaded.get_params() == at_once.get_params()
    images, _ = digits.test()
    assert np.array_equal(loaded.predict_proba(images), at_once.predict_proba(images))


def test_another_model_is_not_overwritten(digits: Any, model_folder: Path, same: Any) -> None:
    kept = IncrementalClassifier.load(model_folder, device="cpu")
    other = quick(seed=1).fit(*digits.train(0, 1))
    with pytest.raises(ModelError, match="holds another model, not an earlier state of this one"):
        other.save(model_folder)
    assert same(IncrementalClassifier.load(model_folder, device="cpu").model_, kept.model_)
    kept.save(model_folder)  # itself
    kept.partial_fit(*digits.train(5)).save(model_folder)
    other.save(model_folder, overwrite=True)
    assert same(IncrementalClassifier.load(model_folder, device="cpu").model_, other.model_)
    next(model_folder.glob("*.safetensors")).write_bytes(b"")
    with pytest.raises(ModelError, match="overwrite=True"):
        other.save(model_folder)


def test_fit_starts_afresh(digits: Any, same: Any) -> None:
    twice = quick().fit(*digits.train(5, 6)).fit(*digits.train(0, 1))
    assert twice.classes_.tolist() == [0, 1]
    assert same(twice.model_, quick().fit(*digits.train(0, 1)).model_)


def test_the_seed_decides(digits: Any, same: Any) -> None:
    first = quick(seed=3).fit(*digits.train(0, 1)).model_
    assert same(first, quick(seed=3).fit(*digits.train(0, 1)).model_)
    assert not same(first, quick(seed=4).fit(*digits.train(0, 1)).model_)


def test_a_failed_task_leaves_the_model_as_it_was(digits: Any, same: Any) -> None:
    classifier = quick().fit(*digits.train(0, 1))
    before = copy.deepcopy(classifier.model_)
    classifier.set_params(settings={"later.learning_rate": 1e30})
    with pytest.raises(EfcilError, match="not finite"):
        classifier.partial_fit(*digits.train(2, 3))
    assert classifier.classes_.tolist() == [0, 1]
    assert same(classifier.model_, before)


# -- more images of known classes ------------------------------------------------------------------------------------


def test_more_images_of_known_classes(digits: Any) -> None:
    images, labels = digits.train(0, 1, 2, 3)
    classifier = quick(epochs=8, first_task_epochs=10, settings={"later.learning_rate": 1e-3})
    few = digits.rank[np.isin(digits.labels, range(4)) & (digits.rank < 24)] < 5
    for task in ([0, 1], [2, 3]):
        chosen = few & np.isin(labels, task)
        classifier.partial_fit(images[chosen], labels[chosen])
    before = classifier.score(*digits.test(0, 1, 2, 3))
    network = {n: v.clone() for n, v in classifier.model_.tensors().items() if n.startswith("network.backbone.")}
    classifier.partial_fit(images[~few], labels[~few], more=True)
    assert classifier.score(*digits.test(0, 1, 2, 3)) > before
    after = classifier.model_.tensors()
    assert all(torch.equal(value, after[name]) for name, value in network.items()), "the backbone stays"
    assert [each.images for each in classifier.model_.card.classes] == [24] * 4
    assert [visit.kind for visit in classifier.model_.card.visits] == ["task", "task", "more"]
    classifier.partial_fit(*digits.train(4))
    assert [each.task for each in classifier.model_.card.classes] == [0, 0, 1, 1, 2]


def test_blending_is_what_all_images_together_give() -> None:
    from efcil.core.gaussians import blend

    samples = torch.randn(30, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = [(part.mean(dim=0), torch.cov(part.T), len(part)) for part in samples.split([12, 18])]
    mean, covariance = blend(*parts)
    torch.testing.assert_close(mean, samples.mean(dim=0))
    torch.testing.assert_close(covariance, torch.cov(samples.T))
    single = (samples[0], torch.zeros(5, 5, dtype=torch.float64), 1)
    mean, covariance = blend(single, (samples[1], single[1], 1))
    torch.testing.assert_close(covariance, torch.cov(samples[:2].T))


def test_more_has_limits(digits: Any) -> None:
    classifier = quick().fit(*digits.train(0, 1))
    with pytest.raises(ModelError, match=r"knows 1 already.*more=True"):
        classifier.partial_fit(*digits.train(1, 2))
    with pytest.raises(ModelError, match="does not know 2"):
        classifier.partial_fit(*digits.train(1, 2), more=True)
    with pytest.raises(ModelError, match=r"lwf.*does not keep a mean and a covariance per class"):
        quick(method="lwf").fit(*digits.train(0, 1)).partial_fit(*digits.test(0), more=True)
    shared = quick(settings={"covariance": "task"}).fit(*digits.train(0, 1))
    with pytest.raises(ModelError, match="does not keep a mean and a covariance per class"):
        shared.partial_fit(*digits.test(0), more=True)


# -- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("cat", "dog"),
        (True, False),
        (2.5, -1.0),
        (("a", 1), ("a", 2)),
        (b"\x00", b"\xff"),
        (None, "none"),
        (10**30, -1),
        ("", "ünï \N{CAT FACE}"),
        (1, "1"),
        ("a", "a\0"),
    ],
)
def test_labels_of_any_kind(first: Any, second: Any, digits: Any, tmp_path: Path) -> None:
    images, numbers = digits.train(0, 1)
    labels = [second if number else first for number in numbers]
    classifier = quick().fit(images, labels)
    assert set(classifier.classes_) == {first, second}
    assert set(classifier.predict(images)) <= {first, second}
    share = classifier.score(images, labels)
    assert share == np.mean([p == label for p, label in zip(classifier.predict(images), labels, strict=True)])
    classifier.save(tmp_path)
    loaded = IncrementalClassifier.load(tmp_path, device="cpu")
    assert list(loaded.classes_) == list(classifier.classes_)
    assert [type(label) for label in loaded.model_.card.labels] == [
        type(label) for label in classifier.model_.card.labels
    ]


def test_numpy_and_torch_labels_become_plain(digits: Any) -> None:
    images, labels = digits.train(0, 1)
    for kind in (labels.astype(np.int32), torch.from_numpy(labels), [np.int8(label) for label in labels]):
        assert quick().fit(images, kind).model_.card.labels == [0, 1]
    named = quick().fit(images, np.array(["zero", "one"])[labels])
    assert named.model_.card.labels == ["one", "zero"], "sorted"


def test_labels_that_cannot_be_saved_still_work_in_memory(digits: Any, tmp_path: Path) -> None:
    images, numbers = digits.train(0, 1)
    with pytest.warns(UserWarning, match="cannot store a frozenset.*works in memory, but cannot be saved"):
        classifier = quick().fit(images, [frozenset([int(n)]) for n in numbers])
    assert classifier.predict(images)[0] in {frozenset([0]), frozenset([1])}
    with pytest.raises(ModelError, match="cannot store a frozenset"):
        classifier.save(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[0]] * 48, "not hashable"),
        ([float("nan")] * 48, "must not contain NaN"),
        (np.zeros((48, 2)), "one label per image"),
        ("cat", "sequence with one label per image"),
        ([0] * 47, "48 images but 47 labels"),
        (None, "have no labels"),
    ],
)
def test_bad_labels(labels: Any, message: str, digits: Any) -> None:
    with pytest.raises(InputError, match=message):
        quick().fit(digits.train(0, 1)[0], labels)


# -- images ----------------------------------------------------------------------------------------------------------


class Pairs(Dataset):  # type: ignore[type-arg]
    def __init__(self, images: Any, labels: Any) -> None:
        self.pairs = list(zip(images, labels, strict=True))

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        return self.pairs[index]


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, images: Any, labels: Any) -> None:
        self.pairs = list(zip(images, labels, strict=True))

    def __iter__(self) -> Any:
        return iter(self.pairs)


def test_the_same_images_of_every_kind_give_the_same_model(digits: Any, tmp_path: Path, same: Any) -> None:
    grey, labels = digits.train(0, 1)
    order = np.argsort(labels, kind="stable")  # a folder's images come class by class
    grey, labels = grey[order], labels[order]
    colour = np.repeat(grey[..., None], 3, axis=3)
    for number, (image, label) in enumerate(zip(grey, labels, strict=True)):
        (tmp_path / str(label)).mkdir(exist_ok=True)
        Image.fromarray(image).save(tmp_path / str(label) / f"{number:03}.png")
    files = [str(tmp_path / str(label) / f"{n:03}.png") for n, label in enumerate(labels)]
    pictures = [Image.fromarray(image) for image in colour]
    tensors = torch.from_numpy(colour).permute(0, 3, 1, 2)
    expected = quick(image_size=8).fit(colour, labels)
    for images in (grey, grey[..., None], list(grey), list(colour), files, pictures, tensors, list(tensors)):
        found = quick(image_size=8).fit(images, labels)
        assert same(found.model_, expected.model_)
        assert np.array_equal(found.predict_proba(images), expected.predict_proba(colour))
    for dataset in (Pairs(pictures, labels.tolist()), Pairs(tensors, labels.tolist()), Stream(grey, labels)):
        assert same(quick(image_size=8).fit(dataset).model_, expected.model_)
    named = quick(image_size=8).fit(tmp_path)
    assert named.classes_.tolist() == ["0", "1"]
    assert np.array_equal(named.predict_proba(tmp_path), expected.predict_proba(colour))
    assert named.score(tmp_path) == expected.score(colour, labels)
    assert named.predict(files[0]).tolist() == named.predict(files[:1]).tolist()


def test_sizes(digits: Any, tmp_path: Path) -> None:
    images, labels = digits.train(0, 1)
    assert quick().fit(images, labels).model_.card.image_size == 8, "square arrays keep their size"
    wide = np.concatenate([images, images, images], axis=2)
    classifier = quick().fit(wide, labels)
    assert classifier.model_.card.image_size == 8, "the short side"
    assert quick(image_size=12).fit(images, labels).model_.card.image_size == 12
    large = np.kron(images, np.ones((1, 3, 3), np.uint8))
    assert classifier.predict(large).shape == labels.shape, "any size can be predicted"


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((4, 8, 8)), "uint8.*float64"),
        (np.zeros((4, 64), np.uint8), "N x H x W x C"),
        (np.zeros((4, 8, 8, 2), np.uint8), "N x H x W x C"),
        (np.zeros((0, 8, 8), np.uint8), "No image was given"),
        ([], "No image was given"),
        ([1, 2, 3, 4], "A int is not an image"),
        (Image.new("RGB", (8, 8)), "Put it into a list"),
        (7, "cannot be read from a int"),
        ([np.zeros((8, 8), np.float32)] * 4, "uint8.*float32"),
        (np.zeros((4, 0, 8, 3), np.uint8), "N x H x W x C"),
        ([np.zeros((8, 0, 3), np.uint8)] * 4, "is not an image"),
    ],
)
def test_bad_images(images: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        quick().fit(images, [0, 1, 0, 1])


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        quick().fit(tmp_path / "nowhere")
    with pytest.raises(InputError, match="no sub-folder with images"):
        quick().fit(tmp_path)
    with pytest.raises(InputError, match="Leave them out"):
        quick().fit(tmp_path, [1])


def test_a_broken_file_is_named(folders: Path, tmp_path: Path) -> None:
    broken = tmp_path / "a" / "broken.png"
    broken.parent.mkdir()
    broken.write_bytes(b"no image")
    with pytest.raises(EfcilError, match=r"broken\.png"):
        quick(image_size=8).fit(tmp_path)


# -- scikit-learn's manners ------------------------------------------------------------------------------------------


def test_parameters_clone_and_pickle(digits: Any, same: Any) -> None:
    classifier = quick(settings={"efm_weight": 5.0}, seed=7)
    twin = clone(classifier)
    assert twin.get_params() == classifier.get_params()
    assert not hasattr(twin, "model_")
    classifier.fit(*digits.train(0, 1))
    assert not hasattr(clone(classifier), "model_")
    for other in (pickle.loads(pickle.dumps(classifier)), copy.deepcopy(classifier)):
        assert same(other.model_, classifier.model_)
        assert other.model_.card == classifier.model_.card
    assert classifier.set_params(method="lwf").method == "lwf"


def test_asked_before_it_has_learned() -> None:
    for ask in ("predict", "predict_proba", "decision_function"):
        with pytest.raises(NotLearnedError, match="has not learned any class"):
            getattr(quick(), ask)(np.zeros((1, 8, 8), np.uint8))
    with pytest.raises(NotLearnedError):
        quick().save("anywhere")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"method": "efk"}, "Did you mean 'efc'"),
        ({"method": "joint"}, "cannot learn task by task"),
        ({"network": "slimm"}, "Did you mean 'slim'"),
        ({"augmentation": "crop"}, "augmentation 'crop'"),
        ({"preset": "cifar"}, "cifar100"),
        ({"epochs": 0}, "epochs"),
        ({"settings": {"efm_wait": 1}}, "efm_weight"),
        ({"settings": {"later.epoch": 1}}, "epochs"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"image_size": 5000}, "too large"),
        ({"classifier": "all"}, "A model has one classifier"),
    ],
)
def test_bad_parameters(parameters: dict[str, Any], message: str, digits: Any) -> None:
    with pytest.raises(SettingsError, match=message):
        quick(**parameters).fit(*digits.train(0, 1))


def test_what_may_change_between_visits(digits: Any) -> None:
    classifier = quick().fit(*digits.train(0, 1))
    for parameters, message in (
        ({"method": "lwf"}, "created with method = efc"),
        ({"seed": 1}, "created with seed = 0"),
        ({"image_size": 16}, "created with image_size = 8"),
        ({"network": "resnet18"}, "created with network = slim"),
        ({"settings": {"efm_weight": 1}}, "settings of the method"),
    ):
        with pytest.raises(ModelError, match=message):
            clone(classifier).set_params(**parameters)._take(classifier.model_).partial_fit(*digits.train(2))
    # Saying what is so anyway is no change; recipes may change.
    classifier.set_params(image_size=8, network="slim", batch_size=16, settings={"later.weight_decay": 0.0})
    classifier.partial_fit(*digits.train(2))
    assert classifier.model_.card.resolved.later.batch_size == 16
    assert classifier.model_.card.resolved.later.weight_decay == 0.0
    assert classifier.model_.card.resolved.first_task.batch_size == 32


def test_an_old_model_keeps_its_recipe_when_the_preset_changes(
    digits: Any, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not asked to change stays as it was when the model was begun."""
    import dataclasses

    from efcil import presets

    current = presets.load_preset("digits")
    changed = dataclasses.replace(
        current,
        families={
            name: dataclasses.replace(recipe, learning_rate=0.5, epochs=50) for name, recipe in current.families.items()
        },
    )
    monkeypatch.setattr(presets, "load_preset", lambda name: changed)
    before = IncrementalClassifier.load(model_folder).model_.card.resolved.later
    classifier = IncrementalClassifier.load(model_folder, device="cpu").set_params(batch_size=16)
    classifier.partial_fit(*digits.train(3))
    assert classifier.model_.card.resolved.later == dataclasses.replace(before, batch_size=16)


def test_the_classifier_that_was_chosen_is_used_and_kept(digits: Any, tmp_path: Path) -> None:
    images, _ = digits.test(0, 1, 2)
    own = IncrementalClassifier(**QUICK, classifier="own").fit(*digits.train(0, 1))
    other = IncrementalClassifier(**QUICK, classifier="nearest-mean").fit(*digits.train(0, 1))
    means = own.model_.ready.memory.means
    assert torch.equal(other.model_.ready.memory.means, means), "learning does not depend on it"
    pixels = gather(images).pixels(8)
    with torch.no_grad():
        features = torch.from_numpy(own.model_.by_pieces(pixels, own.model_.ready.embed))
    expected = -torch.cdist(features, means).square().numpy()
    np.testing.assert_allclose(other.model_.scores(pixels), expected, rtol=1e-3, atol=1e-3)
    assert not np.allclose(own.model_.scores(pixels), expected, atol=0.1)
    other.save(tmp_path / "model")
    loaded = IncrementalClassifier.load(tmp_path / "model", device="cpu")
    assert loaded.get_params()["classifier"] == "nearest-mean"
    assert np.array_equal(loaded.model_.scores(pixels), other.model_.scores(pixels))
    loaded.set_params(classifier="own").partial_fit(*digits.train(2))
    own.partial_fit(*digits.train(2))
    assert np.array_equal(loaded.model_.scores(pixels), own.model_.scores(pixels))


def test_a_classifier_that_the_method_has_no_statistics_for_is_refused(digits: Any) -> None:
    with pytest.raises(SettingsError, match="needs class covariances, which method 'finetune' does not keep"):
        IncrementalClassifier("finetune", **QUICK, classifier="bayes").fit(*digits.train(0, 1))


def test_classes_that_come_one_by_one_are_told_apart(digits: Any) -> None:
    """A head of one class learns nothing from its cross-entropy; the Gaussians of the classes make up for that."""
    classifier = quick(epochs=8, first_task_epochs=10, settings={"later.learning_rate": 1e-3})
    for label in (0, 1, 2):
        classifier.partial_fit(*digits.train(label))
    automatic = classifier.score(*digits.test(0, 1, 2))
    classifier.model_.card = dataclasses.replace(
        classifier.model_.card, settings=dataclasses.replace(classifier.model_.card.settings, classifier="own")
    )
    classifier.model_._answer = None
    assert automatic > 0.7
    assert automatic > classifier.score(*digits.test(0, 1, 2)) + 0.1


@pytest.mark.parametrize(("method", "own"), [("efc", False), ("dpcr", True), ("lwf", True), ("fecam", True), ("lda", True)])
def test_what_auto_stands_for(method: str, own: bool, digits: Any) -> None:
    """Re-balanced heads for methods that decide by their heads and keep what it needs; DPCR has a way of its own."""
    learned = quick(method=method, epochs=1).fit(*digits.train(0, 1)).model_.ready
    assert (scorer(learned, "auto") == learned.scores) == own
    classifiers.check("auto", method, learned.about.keeps)


def test_names_of_files_may_come_as_an_array(digits: Any, tmp_path: Path) -> None:
    images, labels = digits.train(0, 1)
    files = []
    for number, image in enumerate(images):
        files.append(str(tmp_path / f"{number}.png"))
        Image.fromarray(np.asarray(image, np.uint8)).save(files[-1])
    classifier = quick(epochs=1).fit(np.array(files), np.array(labels))
    assert list(classifier.predict(np.array(files[:3]))) == list(classifier.predict(files[:3]))


def test_a_single_image_in_colour_is_not_a_pile_of_grey_ones(digits: Any) -> None:
    classifier = quick(epochs=1).fit(*digits.train(0, 1))
    with pytest.raises(InputError, match="looks like a single image in colour"):
        classifier.predict(np.zeros((20, 20, 3), np.uint8))
