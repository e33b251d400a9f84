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
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from efcil import methods
from efcil.classifier import IncrementalClassifier, InputError, NotLearnedError
from efcil.core import classifiers
from efcil.engine.evaluate import scorer
from efcil.errors import EfcilError, SettingsError
from efcil.model import Model, ModelError
from efcil.model.images import gather, gather_labelled
from efcil.model.weights import repetitions
from efcil.settings import options

QUICK: dict[str, Any] = {"preset": "digits", "epochs": 1, "device": "cpu", "held_out": 0.0}


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
        IncrementalClassifier.load(tmp_path, device="cpu").set_params(held_out=0.0).partial_fit(*task).save(tmp_path)
    loaded = IncrementalClassifier.load(tmp_path, device="cpu").set_params(held_out=0.0)
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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_caller_without_gradients_gets_the_same_model(mode: Any, digits: Any, tmp_path: Path, same: Any) -> None:
    expected = quick().partial_fit(*digits.train(0, 1)).partial_fit(*digits.train(2), folder=tmp_path / "expected")
    with mode():
        given = quick().partial_fit(*digits.train(0, 1)).partial_fit(*digits.train(2), folder=tmp_path / "given")
        assert torch.is_grad_enabled() is False
    assert same(given.model_, expected.model_)
    assert same(given.partial_fit(*digits.train(3)).model_, expected.partial_fit(*digits.train(3)).model_)


@pytest.mark.parametrize("change", ["learn", "folder", "device", "more", "forget", "merge"])
def test_who_is_asking_gets_the_answers_of_one_model(
    change: str, digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may change, in another thread, between two pieces of the images that are asked about."""
    images, _ = digits.test(0, 1)
    classifier = quick().partial_fit(*digits.train(0, 1))
    expected, copied = classifier.predict(images), copy.copy(classifier)
    changes: dict[str, Any] = {
        "learn": lambda: classifier.partial_fit(*digits.train(2, 3)),
        "folder": lambda: classifier.partial_fit(*digits.train(2, 3), folder=tmp_path / "model"),
        "device": lambda: classifier.set_params(precision="fp32").partial_fit(*digits.train(2)),
        "more": lambda: classifier.partial_fit(*digits.train(0, 1), more=True),
        "forget": lambda: classifier.forget([0]),
        "merge": lambda: classifier.merge([0, 1], into=9),
    }
    waiting, scores = [changes[change]], Model.scores

    def asked(model: Model, pixels: np.ndarray) -> np.ndarray:
        found = scores(model, pixels)
        while waiting:
            waiting.pop()()
        return found

    monkeypatch.setattr(Model, "piece", 16)
    monkeypatch.setattr(Model, "scores", asked)
    assert np.array_equal(classifier.predict(images), expected)
    assert not waiting
    assert copied.classes_.tolist() == [0, 1]
    assert np.array_equal(copied.predict(images), expected)


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
        classifier.partial_fit(*digits.train(2), more=True)
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
        (["caf\udce9"] * 48, r"'caf\\udce9' is not valid UTF-8"),
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
        assert same(quick(image_size=8).fit(pair for pair in dataset).model_, expected.model_)
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


@pytest.mark.parametrize(
    ("method", "own"), [("efc", False), ("dpcr", True), ("lwf", True), ("fecam", True), ("lda", True)]
)
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


# -- loaders, streams and tables -------------------------------------------------------------------------------------


class Loader:
    """Something that can be iterated over, and is neither a dataset nor a loader of torch."""

    def __init__(self, images: Any, labels: Any) -> None:
        self.pairs = list(zip(images, labels, strict=True))

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Any:
        return iter(self.pairs)


def named(images: Any, labels: Any) -> dict[str, Any]:
    """Collate into a dictionary, as loaders of tables of the Hub do."""
    return {"image": images, "label": labels}


def sources(colour: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Return the same images and labels in every form that has labels of its own, each to be read once."""
    first, last = torch.from_numpy(colour).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(colour)
    grey, numbers = torch.from_numpy(colour[..., 0].copy()), torch.from_numpy(labels)
    pictures = [Image.fromarray(image) for image in colour]
    batches = [slice(start, start + 7) for start in range(0, len(labels), 7)]
    return {
        "loader": DataLoader(TensorDataset(first, numbers), batch_size=7),
        "loader, channels last": DataLoader(TensorDataset(last, numbers), batch_size=7),
        "loader, grey": DataLoader(TensorDataset(grey, numbers), batch_size=7),
        "loader of pictures": DataLoader(
            Pairs(pictures, labels.tolist()), batch_size=7, collate_fn=lambda pairs: tuple(zip(*pairs, strict=True))
        ),
        "loader without batches": DataLoader(Stream(first, labels), batch_size=None),
        "loader of a stream": DataLoader(Stream(first, labels), batch_size=5),
        "loader of dictionaries": DataLoader(
            Pairs(first, labels.tolist()),
            batch_size=7,
            collate_fn=lambda p: named(*torch.utils.data.default_collate(p)),
        ),
        "generator": (pair for pair in zip(colour, labels, strict=True)),
        "generator of pictures": zip(pictures, labels.tolist(), strict=True),
        "generator of batches": ((first[part], numbers[part]) for part in batches),
        "generator of dictionaries": (named(image, label) for image, label in zip(colour, labels, strict=True)),
        "loader of one's own": Loader(first, labels),
        "list of pairs": list(zip(last, labels.tolist(), strict=True)),
    }


def test_loaders_and_streams_give_what_arrays_give(digits: Any, same: Any) -> None:
    grey, labels = digits.train(0, 1)
    colour = np.repeat(grey[..., None], 3, axis=3)
    expected = quick().fit(colour, labels)
    right, scores = expected.score(colour, labels), expected.predict_proba(colour)
    for name in sources(colour, labels):
        pictures, plain = gather_labelled(sources(colour, labels)[name])
        assert np.array_equal(pictures.pixels(8), colour), name
        assert plain == labels.tolist(), name
        assert np.array_equal(expected.predict_proba(sources(colour, labels)[name]), scores), name
        assert expected.score(sources(colour, labels)[name]) == right, name
    assert same(quick().fit(sources(colour, labels)["loader"]).model_, expected.model_)
    learner = quick().partial_fit(sources(colour, labels)["generator"])
    assert same(learner.model_, expected.model_)
    named = dict(enumerate(colour))
    assert same(quick(image_size=8).fit(named.values(), labels).model_, expected.model_), "labels beside"
    assert same(quick(image_size=8).fit(iter(list(colour)), labels).model_, expected.model_)
    images = torch.from_numpy(colour).permute(0, 3, 1, 2)
    for unlabelled in (DataLoader(TensorDataset(images), batch_size=7), DataLoader(images, batch_size=7), iter(images)):  # type: ignore[arg-type]
        assert np.array_equal(expected.predict_proba(unlabelled), scores)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 3, 8, 9), (2, 8, 9, 3)),
        ((2, 8, 9, 3), (2, 8, 9, 3)),
        ((2, 1, 8, 9), (2, 8, 9, 1)),
        ((2, 8, 9, 4), (2, 8, 9, 4)),
        ((2, 3, 8, 4), (2, 8, 4, 3)),  # both may be channels: they come first in tensors
        ((2, 8, 9), (2, 8, 9)),
    ],
)
def test_where_the_channels_of_a_tensor_are(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert gather(torch.zeros(shape, dtype=torch.uint8)).items.shape == expected
    array = gather(np.zeros(shape, np.uint8)).items
    assert array.shape == (expected if shape != (2, 3, 8, 4) else shape), "in arrays they come last"


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (DataLoader(TensorDataset(torch.rand(4, 3, 8, 8), torch.arange(4))), "uint8.*float32"),
        (torch.rand(4, 3, 8, 8), "uint8.*float32"),
        (DataLoader(TensorDataset(torch.zeros(4, 3, 8, 8, dtype=torch.uint8))), "must give .image, label. pairs"),
        (iter([np.zeros((8, 8), np.uint8)]), "must give .image, label. pairs"),
        (iter([]), "No image was given"),
        (iter([(np.zeros((4, 8, 8, 3), np.uint8), [0, 1])]), "4 images but 2 labels"),
        ({"train": 1, "test": 2}, "Several datasets were given .train, test."),
        (torch.zeros(3, 20, 20, dtype=torch.uint8), "looks like a single image"),
        (torch.zeros(4, 8, 8, 2, dtype=torch.uint8), "N x C x H x W, N x H x W x C"),
        (torch.zeros(64, dtype=torch.uint8), "N x C x H x W, N x H x W x C"),
    ],
)
def test_bad_loaders_and_tensors(images: Any, message: str) -> None:
    labels = [0, 1, 0, 1] if isinstance(images, torch.Tensor) else None
    with pytest.raises(InputError, match=message):
        quick().fit(images, labels)


def test_a_loader_has_labels_of_its_own() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.arange(4)))
    with pytest.raises(InputError, match=r"the DataLoader has its own\. Leave them out"):
        quick().fit(loader, [0, 1, 2, 3])


class Image_:
    pass


class ClassLabel:
    def __init__(self, names: list[str]) -> None:
        self.names = names


Image_.__name__ = "Image"


class Table:
    """A Dataset of the package `datasets`, as far as it is used; it counts the images that it decodes."""

    def __init__(self, images: Any, labels: Any, **columns: Any) -> None:
        self.features: dict[str, Any] = columns or {"picture": Image_(), "kind": ClassLabel(["zero", "one"])}
        self.column_names = list(self.features)
        self._rows = [dict(zip(self.features, row, strict=True)) for row in zip(images, labels, strict=True)]
        self.decoded = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            assert key != self.column_names[0], "a whole column of images may not fit into memory"
            return [row[key] for row in self._rows]
        self.decoded += 1
        return self._rows[key]


class StreamedTable:
    def __init__(self, table: Table) -> None:
        self.features, self.column_names, self._table = table.features, table.column_names, table

    def __iter__(self) -> Any:
        return iter(self._table._rows)


def test_tables_of_the_hub(digits: Any, same: Any) -> None:
    grey, labels = digits.train(0, 1)
    pictures = [Image.fromarray(image) for image in grey]
    expected = quick(image_size=8).fit(pictures, [["zero", "one"][label] for label in labels])
    table = Table(pictures, labels.tolist())
    assert same(quick(image_size=8).fit(table).model_, expected.model_)
    assert table.decoded == len(labels), "each once: the labels are read without the images"
    assert same(quick(image_size=8).fit(StreamedTable(table)).model_, expected.model_)
    assert expected.score(table) == expected.score(StreamedTable(table))
    assert np.array_equal(expected.predict(table), expected.predict(pictures))
    loader: Any = DataLoader(table, batch_size=5, collate_fn=lambda rows: {k: [r[k] for r in rows] for k in rows[0]})  # type: ignore[arg-type]
    assert same(quick(image_size=8).fit(loader).model_, expected.model_)
    plain = Table(pictures, labels.tolist(), img=None, label=None)
    assert quick(image_size=8).fit(plain).classes_.tolist() == [0, 1]
    with pytest.raises(InputError, match=r"columns content, label is known to hold images.*rename_column"):
        quick().fit(Table(pictures, labels.tolist(), content=None, label=None))
    with pytest.raises(InputError, match=r"columns image, score is known to hold labels"):
        quick().fit(Table(pictures, labels.tolist(), image=None, score=None))


# -- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1, 1, 1], None),
        ([7, 7, 7], None),
        ([0.3, 0.3, 0.3], None),
        ([1, 2, 3], [1, 2, 3]),
        ([2, 4, 6], [1, 2, 3]),
        ([2, 3, 2], [2, 3, 2]),
        ([0.1, 0.2, 0.3], [1, 2, 3]),
        ([1, 1.5, 1.5], [1, 2, 1]),
        ([1, 1, 1e9], [1, 1, 27]),
        ([1e-300, 1, 1e300], [1, 1, 27]),
    ],
)
def test_weights_as_repetitions(weights: list[float], expected: list[int] | None) -> None:
    found = repetitions(np.array(weights, float), [0, 0, 0])
    assert (None if found is None else found.tolist()) == expected


def test_repetitions_are_right_for_every_class() -> None:
    generator = np.random.default_rng(0)
    weights, labels = generator.uniform(0.5, 3, 300), generator.integers(0, 4, 300).tolist()
    found = repetitions(weights, labels)
    assert found is not None
    for label in range(4):
        chosen = np.array(labels) == label
        assert abs(found[chosen].sum() - weights[chosen].sum() / weights.min()) <= 0.5
    skewed = repetitions(generator.pareto(0.2, 300) + 1e-9, labels)
    assert skewed is not None
    assert skewed.min() == 1
    assert skewed.sum() <= 3000


@pytest.mark.parametrize("method", ["efc", "lwf", "fecam"])
def test_whole_weights_are_repetitions_bit_for_bit(method: str, digits: Any) -> None:
    images, labels = digits.train(0, 1)
    weights = np.arange(len(labels)) % 4
    weighted = quick(method=method).fit(images, labels, weights)
    repeated = quick(method=method).fit(images.repeat(weights, axis=0), labels.repeat(weights))
    plain = quick(method=method).fit(images, labels)
    tensors = [each.model_.tensors() for each in (weighted, repeated, plain)]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    assert not all(torch.equal(tensors[0][name], tensors[2][name]) for name in tensors[0])
    counts = [int(((labels == label) & (weights > 0)).sum()) for label in (0, 1)]
    assert [each.images for each in weighted.model_.card.classes] == counts, "real images, each once"
    assert weighted.model_.card.visits[0].images == sum(counts)


def test_equal_weights_change_nothing(digits: Any, same: Any) -> None:
    images, labels = digits.train(0, 1)
    plain = quick().fit(images, labels)
    for weights in (np.full(48, 3.7), [2] * 48, 1.0, torch.ones(48)):
        assert same(quick().fit(images, labels, sample_weight=weights).model_, plain.model_)


def test_weights_of_later_tasks_of_more_images_and_in_a_folder(digits: Any, tmp_path: Path, same: Any) -> None:
    weights = 1 + np.arange(24) % 2
    classifier = quick().fit(*digits.train(0, 1)).partial_fit(*digits.train(2), sample_weight=weights)
    assert not same(classifier.model_, quick().fit(*digits.train(0, 1)).partial_fit(*digits.train(2)).model_)
    images, labels = digits.test(2)
    twin, other = copy.deepcopy(classifier), copy.deepcopy(classifier)
    classifier.partial_fit(images, labels, None, weights, more=True)
    twin.partial_fit(images.repeat(weights, axis=0), labels.repeat(weights), more=True)
    other.partial_fit(images, labels, more=True)
    means = [each.model_.ready.memory.means for each in (classifier, twin, other)]
    assert torch.equal(means[0], means[1])
    assert not torch.equal(means[0], means[2])
    assert classifier.model_.card.classes[2].images == 48
    kept = quick().partial_fit(*digits.train(0, 1), sample_weight=np.r_[weights, weights], folder=tmp_path)
    alone = quick().partial_fit(*digits.train(0, 1), sample_weight=np.r_[weights, weights])
    assert same(kept.model_, alone.model_)


def test_a_class_without_weight_is_not_learned(digits: Any) -> None:
    images, labels = digits.train(0, 1, 2)
    classifier = quick().fit(images, labels, labels != 1)
    assert classifier.classes_.tolist() == [0, 2]
    listed = quick().fit(list(images), labels, (labels != 1).tolist())
    assert listed.classes_.tolist() == [0, 2]
    assert np.array_equal(listed.predict_proba(images), classifier.predict_proba(images))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1] * 47, "48 images but 47 weights"),
        ([[1]] * 48, "1D array"),
        ([1] * 47 + [-1], "Negative values"),
        ([1] * 47 + [float("nan")], "contains NaN"),
        ([0] * 48, "at least one non-zero"),
        (["a"] * 48, "must hold numbers"),
    ],
)
def test_bad_weights(weights: Any, message: str, digits: Any) -> None:
    with pytest.raises(InputError, match=message):
        quick().fit(*digits.train(0, 1), weights)
    with pytest.raises(InputError, match=message):
        quick().fit(*digits.train(0, 1)).score(*digits.train(0, 1), weights)


def test_weights_need_an_order(digits: Any) -> None:
    images, labels = (torch.from_numpy(part) for part in digits.train(0, 1))
    pairs, weights = TensorDataset(images, labels), 1 + np.arange(48) % 2
    with pytest.raises(InputError, match=r"shuffles its images.*shuffle=False"):
        quick().fit(DataLoader(pairs, batch_size=9, shuffle=True), sample_weight=weights)
    quick().fit(DataLoader(pairs, batch_size=9), sample_weight=weights)


# -- embeddings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["efc", "adagauss", "fecam"])
def test_transform_gives_what_the_statistics_are_about(method: str, digits: Any) -> None:
    images, labels = digits.train(0, 1)
    classifier = quick(method=method).fit(images, labels)
    found = classifier.transform(images)
    assert found.dtype == np.float32
    with torch.no_grad():
        expected = classifier.model_.by_pieces(gather(images).pixels(8), classifier.model_.ready.embed)
    assert np.array_equal(found, expected)
    names = classifier.get_feature_names_out().tolist()
    assert names[:2] == ["incrementalclassifier0", "incrementalclassifier1"]
    assert len(names) == found.shape[1]
    with pytest.raises(NotLearnedError):
        quick().transform(images)


def test_in_a_pipeline(digits: Any, trained: Path) -> None:
    images, labels = digits.train(0, 1)
    pipeline = make_pipeline(quick(), LogisticRegression(max_iter=1000)).fit(images, labels)
    assert pipeline.score(images, labels) > 0.9
    model = IncrementalClassifier.load(trained, device="cpu")
    frozen = make_pipeline(FrozenEstimator(model), LogisticRegression(max_iter=1000)).fit(*digits.train(5, 6))
    assert frozen.score(*digits.test(5, 6)) > 0.8
    assert model.classes_.tolist() == [0, 1, 2], "it has not learned anything"
    assert np.array_equal(quick().fit_transform(images, labels), quick().fit(images, labels).transform(images))


def test_set_output(digits: Any) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    images, labels = digits.train(0, 1)
    frame = quick().set_output(transform="pandas").fit(images, labels).transform(images)
    assert isinstance(frame, pandas.DataFrame)
    assert frame.columns[0] == "incrementalclassifier0"


# -- answers ---------------------------------------------------------------------------------------------------------


def test_unknown_images_get_a_label_of_their_own(digits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = digits.train(0, 1)
    classifier = quick().fit(images, np.array(["nought", "one"])[labels])
    usual = classifier.predict(images)
    monkeypatch.setattr(Model, "refuse_without_typicality", lambda _: None)
    monkeypatch.setattr(Model, "typicality", lambda _, pixels: pixels.mean(axis=(1, 2, 3)) / 255)
    typical = images.mean(axis=(1, 2)) / 255
    share = float(np.median(typical))
    found = classifier.predict(images, unknown=share)
    assert found.dtype == object
    assert [label is None for label in found] == (typical < share).tolist()
    assert (found[typical >= share] == usual[typical >= share]).all()
    text = classifier.predict(images, unknown=share, unknown_label="none of these")
    assert text.dtype.kind == "U"
    assert (text == "none of these").tolist() == (typical < share).tolist()
    assert (classifier.predict(images, unknown=0.0) == usual).all()
    for wrong in (-0.1, 2, "5%", True):
        with pytest.raises(SettingsError, match="a share from 0 to 1"):
            classifier.predict(images, unknown=wrong)


def test_unknown_needs_statistics_and_images_held_out(digits: Any) -> None:
    images, labels = digits.train(0, 1)
    with pytest.raises(ModelError, match="keeps no class statistics"):
        quick(method="lwf").fit(images, labels).predict(images, unknown=0.05)
    with pytest.raises(ModelError, match="No images were held out"):
        quick().fit(images, labels).predict(images, unknown=0.05)
    classifier = quick(held_out=0.25).fit(images, labels)
    assert [each.images for each in classifier.model_.card.classes] == [18, 18]
    assert classifier.predict(images, unknown=0.5, unknown_label=-1).tolist().count(-1) > 0


def test_images_held_out_are_not_learned_from(digits: Any, tmp_path: Path, same: Any) -> None:
    images, labels = digits.train(0, 1)
    for share, learned in ((None, [22, 22]), (0.0, [24, 24]), (0.5, [12, 12])):
        classifier = quick(held_out=share).fit(images, labels)
        assert [each.images for each in classifier.model_.card.classes] == learned
        kept = quick(held_out=share).partial_fit(images, labels, folder=tmp_path / str(share))
        assert same(kept.model_, classifier.model_)
    with pytest.raises(SettingsError, match=r"between 0 and 0\.5"):
        quick(held_out=0.9).fit(images, labels)


@pytest.mark.parametrize("method", ["efc", "fecam"])
def test_weights_beside_images_held_out(method: str, digits: Any) -> None:
    """Weights belong to images, whichever of them are learned from."""
    images, labels = digits.train(0, 1)
    weights = 1 + np.arange(48) % 3
    classifier = quick(method=method, held_out=0.25).fit(images, labels, weights)
    plain = quick(method=method, held_out=0.25).fit(images, labels)
    assert classifier.model_.card.visits[0].images == plain.model_.card.visits[0].images == 36
    assert not torch.equal(classifier.model_.ready.memory.means, plain.model_.ready.memory.means)


def test_probabilities_are_those_of_the_model(digits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = digits.train(0, 1)
    classifier = quick().fit(images, labels)
    monkeypatch.setattr(Model, "probabilities", lambda _, pixels: np.tile([0.25, 0.75], (len(pixels), 1)))
    assert np.array_equal(classifier.predict_proba(images), np.tile([0.25, 0.75], (48, 1)))
