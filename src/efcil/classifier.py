"""IncrementalClassifier: learning classes task by task, with scikit-learn's interface."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import NotFittedError

from efcil.errors import EfcilError
from efcil.model import classes
from efcil.model.images import InputError, Pictures, gather, gather_labelled
from efcil.model.in_memory import Model, probabilities
from efcil.model.learning import learn
from efcil.model.teaching import teach
from efcil.settings import TrainingSettings


class NotLearnedError(EfcilError, NotFittedError):
    """The classifier was used before it had learned anything."""


#: Parameters that mean what the setting of the same name means.
_SAME = (
    "network",
    "augmentation",
    "image_size",
    "epochs",
    "first_task_epochs",
    "batch_size",
    "seed",
    "precision",
    "classifier",
)


class IncrementalClassifier(ClassifierMixin, BaseEstimator):
    """Classifies images, and learns further classes without images of the earlier ones.

    Every call of `partial_fit` is a task of new classes; `fit` starts over. Images may be one uint8 array
    (N x H x W x C, or N x H x W for grey ones), a list of files, PIL images or arrays, a folder with one sub-folder per
    class, or a torch dataset; labels may be anything hashable.

    Parameters
    ----------
    method : how to learn; `efcil methods` lists the names.
    network, augmentation : backbone and training augmentation; None takes the preset's.
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

    Attributes
    ----------
    classes_ : the labels learned so far, task after task, sorted within a task; columns of `predict_proba`.
    model_ : the `efcil.model.Model` behind it.
    """

    def __init__(
        self,
        method: str = "efc",
        *,
        network: str | None = None,
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
    ) -> None:
        self.method = method
        self.network = network
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

    # -- learning ------------------------------------------------------------------------------------------------

    def fit(self, images: Any, labels: Any = None) -> IncrementalClassifier:
        """Forget everything and learn these images as the first task."""
        pictures, plain = gather_labelled(images, labels)
        model = self._new_model(pictures)
        learn(model, pictures.pixels(model.card.image_size), plain)
        return self._take(model)

    def partial_fit(
        self,
        images: Any,
        labels: Any = None,
        classes: Any = None,
        *,
        more: bool = False,
        folder: str | Path | None = None,
    ) -> IncrementalClassifier:
        """Learn new classes as the next task or, with `more`, blend further images into known classes.

        With `folder`, the model is stored there, as with `efcil learn`: the folder is locked while it learns, a
        checkpoint is saved every five minutes and on Ctrl-C, the same call resumes it, and the model is saved at the
        end.

        `classes` exists for scikit-learn's callers and is not used; classes need not be announced.
        """
        pictures, plain = gather_labelled(images, labels)
        model: Model | None = getattr(self, "model_", None)
        if folder is not None:
            place = Path(folder).expanduser()
            wanted = lambda _: self._settings()  # noqa: E731 - the estimator's parameters are the settings
            return self._take(teach(place, pictures, plain, wanted, model=model, device=self.device, more=more))
        if model is None:
            model = self._new_model(pictures)
        else:
            model.change(self._settings())
        learn(model, pictures.pixels(model.card.image_size), plain, more=more)
        return self._take(model)

    def _new_model(self, pictures: Pictures) -> Model:
        wanted = self._settings()
        return Model.create(wanted, wanted.image_size or pictures.natural_size())

    def _settings(self) -> TrainingSettings:
        return TrainingSettings(
            method=self.method,
            preset=self.preset,
            overrides=dict(self.settings or {}),
            device=self.device,
            **{name: getattr(self, name) for name in _SAME},
        )

    def _take(self, model: Model) -> IncrementalClassifier:
        self.model_ = model
        self.classes_ = _label_array(model.card.labels)
        return self

    # -- use -----------------------------------------------------------------------------------------------------

    def _scores(self, images: Any) -> np.ndarray:
        """Return the scores of every class, one row per image."""
        model = self._learned()
        pictures = gather(images)
        pieces = range(0, len(pictures), model.piece)
        return np.concatenate(
            [model.scores(pictures.pixels(model.card.image_size, at, at + model.piece)) for at in pieces]
        )

    def decision_function(self, images: Any) -> np.ndarray:
        """Return the scores of every class, one row per image; for two classes, the second score minus the first."""
        scores = self._scores(images)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict_proba(self, images: Any) -> np.ndarray:
        """Return the softmax of the scores, one row per image, columns in the order of `classes_`."""
        return probabilities(self._scores(images))

    def predict(self, images: Any) -> np.ndarray:
        """Return the label of every image."""
        best = self._scores(images).argmax(axis=1)
        return self.classes_[best]

    def score(self, images: Any, labels: Any = None, sample_weight: Any = None) -> float:
        """Return the share of images whose label is right."""
        pictures, plain = gather_labelled(images, labels)
        known = {label: number for number, label in enumerate(self._learned().card.labels)}
        right = self._scores(pictures.items).argmax(axis=1) == [known.get(label, -1) for label in plain]
        return float(np.average(right, weights=sample_weight))

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
        return tags

    # -- classes that are known ------------------------------------------------------------------------------------

    def rename(self, old: Any, new: Any) -> IncrementalClassifier:
        """Give a class another label."""
        classes.rename(self._learned(), old, new)
        return self._take(self.model_)

    def forget(self, labels: Any) -> IncrementalClassifier:
        """Remove all that is stored about these classes alone; see docs/classes.md for what cannot be removed."""
        classes.forget(self._learned(), list(labels))
        return self._take(self.model_)

    def merge(self, labels: Any, into: Any) -> IncrementalClassifier:
        """Make several classes one, called `into`."""
        classes.merge(self._learned(), list(labels), into)
        return self._take(self.model_)

    # -- keeping -------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the model to a folder, which `load`, `efcil learn`, `efcil predict` and the other commands read.

        An earlier state of this model is replaced; another model, or an interrupted task, only with `overwrite`.
        """
        self._learned().save(folder, overwrite=overwrite)

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
