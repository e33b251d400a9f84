"""IncrementalClassifier: learning classes task by task, with scikit-learn's interface."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.exceptions import NotFittedError

from efcil.errors import EfcilError, SettingsError
from efcil.model import classes, hub
from efcil.model.defaults import completed
from efcil.model.images import InputError, Pictures, gather, gather_labelled
from efcil.model.in_memory import Model
from efcil.model.learning import learn
from efcil.model.pairs import refuse_unordered
from efcil.model.readme import check_licence, refuse_changed, write_readme
from efcil.model.teaching import teach
from efcil.model.weights import check_weights, weighted
from efcil.settings import TrainingSettings


class NotLearnedError(EfcilError, NotFittedError):
    """The classifier was used before it had learned anything."""


#: Parameters that mean what the setting of the same name means.
_SAME = (
    "network",
    "weights",
    "input_size",
    "augmentation",
    "image_size",
    "epochs",
    "first_task_epochs",
    "batch_size",
    "seed",
    "precision",
    "classifier",
)


#: Parameters that a new model chooses for itself where they are not given.
_CHOSEN = ("method", "network", "weights", "input_size")


class IncrementalClassifier(ClassNamePrefixFeaturesOutMixin, ClassifierMixin, TransformerMixin, BaseEstimator):
    """Classifies images, and learns further classes without images of the earlier ones.

    Every call of `partial_fit` is a task of new classes; `fit` starts over. Images may be one uint8 array or tensor
    (N x H x W x C, N x C x H x W, or N x H x W for grey ones), a list of files, PIL images or arrays, a folder with one
    sub-folder per class, a torch dataset or DataLoader, an iterator of (image, label) pairs, or a Dataset of the
    package `datasets`; labels may be anything hashable. docs/python.md has an example of each.

    As a scikit-learn transformer it gives embeddings (`transform`).

    Parameters
    ----------
    method : how to learn; `efcil methods` lists the names. None chooses as `efcil learn` does: with the extra
        `pretrained`, and unless a preset or weights="none" asks for training from scratch, a method for pre-trained
        networks; else efc.
    network : backbone; None takes a pre-trained one under the same conditions, else the preset's.
    weights, input_size : file of pre-trained weights, and the side to which images are enlarged on the device; see
        docs/settings.md.
    augmentation : training augmentation; None takes the preset's.
    image_size : side in pixels that images are resized to; None chooses it from the first images.
    epochs, first_task_epochs, batch_size : None takes the preset's.
    settings : settings of the method or the recipes, such as {"efm_weight": 5, "later.learning_rate": 1e-4}.
    preset : the dataset whose recipes are used; see docs/settings.md.
    seed : of everything random.
    device : auto, cpu, cuda, cuda:1.
    precision : auto, fp32, tf32, bf16.
    classifier : how images are classified: own (the method's way), heads, or one built from the class statistics that
        the method keeps; see docs/classifiers.md. auto is rebalanced if the method classifies with its heads and keeps
        what that needs, else own. Learning does not depend on it.
    held_out : share of the images of every class that are not learned from, but measure the result: the card keeps the
        accuracy, probabilities are calibrated with it, and answering unknown needs it. 0 learns from all images. None
        chooses: 0.1 where a task trains the network; where it trains nothing, every image measures and is learned from.

    Attributes
    ----------
    classes_ : the labels learned so far, task after task, sorted within a task; columns of `predict_proba`.
    model_ : the `efcil.model.Model` behind it.
    """

    def __init__(
        self,
        method: str | None = None,
        *,
        network: str | None = None,
        weights: str | None = None,
        input_size: int | None = None,
        augmentation: str | None = None,
        image_size: int | None = None,
        epochs: int | None = None,
        first_task_epochs: int | None = None,
        batch_size: int | None = None,
        settings: Mapping[str, Any] | None = None,
        preset: str = "folder",
        seed: int = 0,
        device: str = "auto",
        precision: str = "auto",
        classifier: str = "auto",
        held_out: float | None = None,
    ) -> None:
        self.method = method
        self.network = network
        self.weights = weights
        self.input_size = input_size
        self.augmentation = augmentation
        self.image_size = image_size
        self.epochs = epochs
        self.first_task_epochs = first_task_epochs
        self.batch_size = batch_size
        self.settings = settings
        self.preset = preset
        self.seed = seed
        self.device = device
        self.precision = precision
        self.classifier = classifier
        self.held_out = held_out

    # -- learning ------------------------------------------------------------------------------------------------

    def fit(self, images: Any, labels: Any = None, sample_weight: Any = None) -> IncrementalClassifier:
        """Forget everything and learn these images as the first task.

        `sample_weight` is how many times each image counts, relative to the others; 0 leaves it out.
        """
        pictures, plain, repeats = _to_learn(images, labels, sample_weight)
        model = self._new_model(pictures)
        learn(model, pictures.pixels(model.card.image_size), plain, held_out=self.held_out, repeats=repeats)
        return self._take(model)

    def partial_fit(
        self,
        images: Any,
        labels: Any = None,
        classes: Any = None,
        sample_weight: Any = None,
        *,
        more: bool = False,
        folder: str | Path | None = None,
    ) -> IncrementalClassifier:
        """Learn new classes as the next task and, with `more`, blend further images into known classes.

        With `folder`, the model is stored there, as with `efcil learn`: the folder is locked while it learns, a
        checkpoint is saved every five minutes and on Ctrl-C, the same call resumes it, and the model is saved at the
        end.

        `sample_weight` is how many times each image counts, relative to the others; 0 leaves it out. `classes` exists
        for scikit-learn's callers and is not used; classes need not be announced.
        """
        pictures, plain, repeats = _to_learn(images, labels, sample_weight)
        # Another thread may be asking the present model.
        model: Model | None = copy.copy(getattr(self, "model_", None))
        if folder is not None:
            place = Path(folder).expanduser()
            options: dict[str, Any] = {"model": model, "device": self.device, "held_out": self.held_out}
            options |= {"more": more, "repeats": repeats}
            return self._take(teach(place, pictures, plain, self._settings, self._completed, **options))
        if model is None:
            model = self._new_model(pictures)
        else:
            model.change(self._settings(model.card.settings))
        pixels = pictures.pixels(model.card.image_size)
        learn(model, pixels, plain, more=more, held_out=self.held_out, repeats=repeats)
        return self._take(model)

    def _new_model(self, pictures: Pictures) -> Model:
        wanted = self._completed(self._settings(TrainingSettings()))
        return Model.create(wanted, wanted.image_size or pictures.natural_size())

    def _settings(self, start: TrainingSettings) -> TrainingSettings:
        """Return the parameters as settings; what was left to choose stays as it was chosen, in `start`."""
        given: dict[str, Any] = {name: getattr(self, name) for name in ("method", *_SAME)}
        given |= {name: getattr(start, name) for name in _CHOSEN if given[name] is None}
        return TrainingSettings(
            preset=self.preset,
            overrides=dict(self.settings or {}),
            device=self.device,
            **given,
        )

    def _completed(self, settings: TrainingSettings) -> TrainingSettings:
        """Return the settings of a new model, network and method chosen where none is named."""
        return completed(settings, method_named=self.method is not None)

    def _take(self, model: Model) -> IncrementalClassifier:
        self.model_ = model
        self.classes_ = _label_array(model.card.labels)
        return self

    # -- use -----------------------------------------------------------------------------------------------------

    def _each(self, model: Model, images: Any, function: Callable[[np.ndarray], Any]) -> tuple[np.ndarray, ...]:
        """Apply a function of a model's uint8 input to all images, piece by piece; it may return several arrays."""
        pictures = self._gathered(images)
        size, results = model.card.image_size, []
        for start in range(0, len(pictures), model.piece):
            found = function(pictures.pixels(size, start, start + model.piece))
            results.append(found if isinstance(found, tuple) else (found,))
        return tuple(np.concatenate(parts) for parts in zip(*results, strict=True))

    def _gathered(self, images: Any) -> Pictures:
        return gather(images)

    def decision_function(self, images: Any) -> np.ndarray:
        """Return the scores of every class, one row per image; for two classes, the second score minus the first."""
        model = self._learned()
        (scores,) = self._each(model, images, model.scores)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict_proba(self, images: Any) -> np.ndarray:
        """Return calibrated probabilities, one row per image, columns in the order of `classes_`."""
        model = self._learned()
        return self._each(model, images, model.probabilities)[0]

    def predict(self, images: Any, unknown: float | None = None, unknown_label: Any = None) -> np.ndarray:
        """Return the label of every image.

        With `unknown`, a share such as 0.05, images that are less typical of all known classes than that share of the
        images of known classes get `unknown_label` instead.
        """
        model = self._learned()
        if unknown is None:
            (scores,) = self._each(model, images, model.scores)
            return _label_array(model.card.labels)[scores.argmax(axis=1)]
        _refuse_unknown(model, unknown)
        scores, typical = self._each(model, images, lambda pixels: (model.scores(pixels), model.typicality(pixels)))
        labels = _label_array([*model.card.labels, unknown_label])
        return labels[np.where(typical < unknown, len(labels) - 1, scores.argmax(axis=1))]

    def transform(self, images: Any) -> np.ndarray:
        """Return the embedding of every image, float32: the features that the method's class statistics are about."""
        model = self._learned()
        return self._each(model, images, lambda pixels: _embedded(model, pixels))[0]

    @property
    def _n_features_out(self) -> int:
        """The length of an embedding, for scikit-learn's names of columns."""
        model = self._learned()
        return int(_embedded(model, np.zeros((1, model.card.image_size, model.card.image_size, 3), np.uint8)).shape[1])

    def score(self, images: Any, labels: Any = None, sample_weight: Any = None) -> float:
        """Return the share of images whose label is right."""
        (pictures, plain), model = gather_labelled(images, labels), self._learned()
        known = {label: number for number, label in enumerate(model.card.labels)}
        (scores,) = self._each(model, pictures, model.scores)
        right = scores.argmax(axis=1) == [known.get(label, -1) for label in plain]
        weights = None if sample_weight is None else check_weights(sample_weight, len(plain))
        return float(np.average(right, weights=weights))

    def _learned(self) -> Model:
        if not hasattr(self, "model_"):
            raise NotLearnedError(
                f"This {type(self).__name__} is not fitted yet: it has not learned any class. Call fit or partial_fit "
                "first, or load a model."
            )
        return self.model_

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "model_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        tags.input_tags.string = True
        tags.transformer_tags.preserves_dtype = []  # embeddings are float32, whatever the images are
        return tags

    # -- classes that are known ------------------------------------------------------------------------------------

    def rename(self, old: Any, new: Any) -> IncrementalClassifier:
        """Give a class another label."""
        model = copy.copy(self._learned())
        classes.rename(model, old, new)
        return self._take(model)

    def forget(self, labels: Any) -> IncrementalClassifier:
        """Remove all that is stored about these classes alone; see docs/classes.md for what cannot be removed."""
        model = copy.copy(self._learned())
        classes.forget(model, _listed(labels))
        return self._take(model)

    def merge(self, labels: Any, into: Any) -> IncrementalClassifier:
        """Make several classes one, called `into`."""
        model = copy.copy(self._learned())
        classes.merge(model, _listed(labels), into)
        return self._take(model)

    # -- keeping -------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the model to a folder, which `load`, `efcil learn`, `efcil predict` and the other commands read.

        An earlier state of this model is replaced; another model, or an interrupted task, only with `overwrite`.
        """
        self._learned().save(folder, overwrite=overwrite)

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False, license: str | None = None) -> None:
        """Write the model to a folder as `save` does, with a README.md that describes it: what the Hub shows.

        `license` is the Hub's short name of the licence that you give the model, such as "cc-by-4.0".
        """
        model, place = self._learned(), Path(folder).expanduser()
        check_licence(license)
        if not overwrite:
            refuse_changed(place)
        model.save(place, overwrite=overwrite)
        write_readme(place, model.card, license)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str = "Upload a model of efcil",
        revision: str | None = None,
        create_pr: bool = False,
        license: str | None = None,
    ) -> str:
        """Upload the model with its README.md to the Hugging Face Hub; return the address of the commit.

        The repository OWNER/NAME is created if it does not exist; an earlier state of a model in it is replaced. Needs
        the extra `hub`.
        """
        options = hub.Upload(private, token, commit_message, revision, create_pr, license)
        return hub.push(self._learned(), repo_id, options)

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        device: str = "auto",
    ) -> IncrementalClassifier:
        """Return the classifier of a model folder, or of a repository OWNER/NAME of the Hugging Face Hub.

        Only the two files of a model are downloaded, and they are checked as every model folder is. Needs the extra
        `hub` unless it is a folder.
        """
        wanted = hub.Download(revision, token, cache_dir, local_files_only)
        with hub.fetched(name_or_folder, wanted) as folder:
            return cls.load(folder, device=device)

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "auto") -> IncrementalClassifier:
        """Return the classifier of a model folder, with the parameters it was created with."""
        model = Model.load(folder, device)
        kept = model.card.settings
        return cls(
            kept.method,
            preset=kept.preset,
            settings=dict(kept.overrides) or None,
            device=device,
            **{name: getattr(kept, name) for name in _SAME},
        )._take(model)


def _to_learn(images: Any, labels: Any, weights: Any) -> tuple[Pictures, list[Any], np.ndarray | None]:
    """Return the images to learn, their labels, and how many times each counts (None: once)."""
    if weights is not None:
        refuse_unordered(images)
    return weighted(*gather_labelled(images, labels), weights)


def _embedded(model: Model, pixels: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model.by_pieces(pixels, model.ready.embed)


def _refuse_unknown(model: Model, share: Any) -> None:
    """Refuse a share that is none, or a model that cannot say how typical images are of known classes."""
    if isinstance(share, bool) or not isinstance(share, int | float | np.number) or not 0 <= share <= 1:
        raise SettingsError(f"unknown is a share from 0 to 1, such as 0.05, not {share!r}.")
    model.refuse_without_typicality()


def _listed(labels: Any) -> list[Any]:
    """Return the labels of classes; a text is one label, which must not be taken for its characters."""
    if isinstance(labels, str | bytes) or not isinstance(labels, Iterable):
        raise InputError(f"Classes are given as a list of labels: [{labels!r}].")
    return list(labels)


def _label_array(labels: list[Any]) -> np.ndarray:
    """Return labels as an array of their own type if they share a plain one, else as an array of objects."""
    kinds = {type(label) for label in labels}
    if len(kinds) == 1 and kinds <= {str, int, bool, float} and not any(map(_altered, labels)):
        return np.array(labels)
    array = np.empty(len(labels), dtype=object)
    array[:] = labels
    return array


def _altered(label: Any) -> bool:
    """Return whether an array of a plain type would change the label: large numbers, zero characters at the end."""
    too_large = isinstance(label, int) and not -(1 << 63) <= label < 1 << 63
    return too_large or (isinstance(label, str) and label.endswith("\0"))


__all__ = ["IncrementalClassifier", "InputError", "NotLearnedError"]
