"""A model in memory: its card, its method, and the device it runs on."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from efcil import methods
from efcil.activity import doing_in_pieces, next_piece
from efcil.core import calibration, classifiers, typicality
from efcil.core.typicality import Spread
from efcil.data.augment import Normalisation, make_augmentation
from efcil.data.store import CPU_PIECE_BYTES, ImagesInPlace, TaskImages
from efcil.engine import checkpoint
from efcil.engine.evaluate import scorer
from efcil.engine.hardware import choose_execution
from efcil.engine.lifecycle import Blueprint
from efcil.errors import EfcilError, SettingsError
from efcil.files import locked
from efcil.methods.base import Method
from efcil.model import folder as model_folder
from efcil.model import measured, readme
from efcil.model.card import KEPT_SETTINGS, LARGEST_IMAGE, Card, ModelError, Pretrained, training_settings, versions
from efcil.network.backbones import Backbone, locate
from efcil.network.weights import View, digest
from efcil.resolution import resolve, split_overrides, validate_training
from efcil.resolution.unused import refuse_unused
from efcil.settings import TrainingSettings

PIECE_BYTES = 1 << 24
LARGEST_PIECE = 128
#: Settings that are fixed by the first task.
_FIXED = ("method", "preset", "seed", "network", "weights", "input_size", "augmentation", "image_size")


class Model:
    """A classifier of images that can learn more classes. `learn` in learning.py teaches it."""

    def __init__(self, card: Card, method: Method | None = None, device: str = "auto") -> None:
        self.card = card
        #: Where a model that has learned nothing yet finds its pre-trained weights.
        self.backbone: Backbone | None = None
        self.execution = choose_execution(replace(card.settings, device=device))
        self._device = device
        self._answer: Callable[[Tensor], Tensor] | None = None
        self.method = method
        if method is not None:
            self.adopt(method)

    @classmethod
    def create(cls, settings: TrainingSettings, image_size: int) -> Model:
        """Return a model that knows no class yet, for images whose natural size is `image_size`.

        A pre-trained network sees them at the size it knows, unless the settings name another one.
        """
        settings = checked(settings)
        backbone = _located(settings, image_size)
        if settings.image_size is not None:
            image_size = settings.image_size
        elif backbone.weights is not None:
            image_size = backbone.weights.view.size
        if methods.get(settings.method).traits(resolve(settings).method).images == "all":
            raise SettingsError(
                f"Method {settings.method} learns all classes together and keeps their images, so it cannot learn task "
                "by task. Choose another one; see `efcil methods`."
            )
        if image_size > LARGEST_IMAGE:
            raise SettingsError(f"Images of {image_size} pixels are too large; the limit is {LARGEST_IMAGE}.")
        backbone.refuse_images(settings.input_size or image_size)
        refuse_unused([settings], settings.overrides)
        card = Card(
            settings=training_settings(settings),
            resolved=resolve(settings, image_size),
            image_size=image_size,
            normalisation=normalisation(backbone),
            pretrained=pretrained_facts(backbone),
        )
        model = cls(card, device=settings.device)
        model.backbone = backbone
        return model

    @classmethod
    def load(cls, folder: Path | str, device: str = "auto") -> Model:
        """Return the model of a folder."""
        place = Path(folder).expanduser()
        card, method = model_folder.read(place)
        if changed := _other_versions(card):
            warnings.warn(f"{place} was last trained with {changed}.", stacklevel=2)
        return cls(card, method, device)

    def save(self, folder: Path | str, *, overwrite: bool = False) -> None:
        """Write the model to a folder in place of an earlier state of it, or, with `overwrite`, of another model."""
        place = Path(folder).expanduser()
        model_folder.refuse_run(place)
        try:
            # Two processes that save at the same time would remove each other's tensors.
            with locked(place / ".lock"):
                before = None if overwrite else self._earlier(place)
                model_folder.write(place, self.card, self.tensors())
                checkpoint.remove(place / model_folder.PARTIAL)
                readme.renew(place, before, self.card)
        except OSError as error:
            raise ModelError(f"{place} cannot be written ({error.strerror or error}). Choose another folder.") from None

    def _earlier(self, folder: Path) -> Card | None:
        """Return the card of an earlier state of this model in a folder; refuse another model, or an interrupted task.

        None where there is no model.
        """
        if checkpoint.exists(folder / model_folder.PARTIAL):
            raise ModelError(
                f"{folder} has an interrupted task, which saving would lose. Finish it with the `efcil learn` "
                "command that started it, choose another folder, or save with overwrite=True."
            )
        if not model_folder.exists(folder):
            return None
        try:
            there, _ = model_folder.read_raw(folder)
        except EfcilError as error:
            raise ModelError(f"{error} Choose another folder, or save with overwrite=True.") from None
        mine = self.card
        begun = [[getattr(card.settings, name) for name in _FIXED] for card in (there, mine)]
        same = there.visits == mine.visits[: len(there.visits)]
        if not any(visit.kind in ("rename", "forget", "merge") for visit in mine.visits[len(there.visits) :]):
            same = same and there.labels == mine.labels[: len(there.labels)]
        if not same or begun[0] != begun[1]:
            raise ModelError(
                f"{folder} holds another model, not an earlier state of this one. Choose another folder, or save with "
                "overwrite=True."
            )
        return there

    def adopt(self, method: Method) -> None:
        """Let the model use `method`, on the model's device."""
        self.method = self.blueprint.place(method)
        self._answer = None

    @property
    def blueprint(self) -> Blueprint:
        """The blueprint of the model's method."""
        found = model_folder.blueprint(self.card, self.execution)
        if self.method is not None or self.card.pretrained is None:
            return found  # a model that has learned holds its weights itself
        if self.backbone is None:
            self.backbone = _located(self.card.settings, self.card.image_size)
        return replace(found, network=self.backbone)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything the model stores."""
        return self.ready.state_dict()

    @property
    def ready(self) -> Method:
        """The method; raises an error before the first task."""
        if self.method is None:
            raise ModelError("The model has not learned any class yet. Teach it some first.")
        return self.method

    def change(self, settings: TrainingSettings) -> None:
        """Use other settings from the next task on; those fixed by the first task cannot change."""
        present = self.card.settings
        methods.get(settings.method)
        for name in _FIXED:
            before, wanted = getattr(present, name), getattr(settings, name)
            settled = {
                "weights": wanted if self._same_weights(settings.weights) else before,
                "image_size": self.card.image_size,
                "network": self.card.resolved.network,
                "augmentation": self.card.resolved.augmentation,
            }.get(name, before)
            if wanted not in (before, settled):
                raise ModelError(
                    f"This model was created with {name} = {settled}, which cannot change to {wanted}. Leave it as "
                    "it is, or start a new model."
                )
        settings = checked(settings)
        refuse_unused([settings], [name for name, _ in settings.overrides.items() - present.overrides.items()])
        if split_overrides(settings)[0] != split_overrides(present)[0]:
            raise ModelError(
                f"The settings of the method ({present.method}) are fixed by the first task and cannot change. "
                "Leave them as they are, or start a new model."
            )
        # Only what differs is changed: a preset whose recipe has changed since must not change an old model.
        before, after = (resolve(each, self.card.image_size).later for each in (present, settings))
        changed = {
            field.name: getattr(after, field.name)
            for field in dataclasses.fields(after)
            if getattr(after, field.name) != getattr(before, field.name)
        }
        later = replace(self.card.resolved.later, **changed)
        fixed = {name: getattr(present, name) for name in _FIXED}
        kept = {name: getattr(settings, name) for name in KEPT_SETTINGS} | fixed
        self.card = replace(
            self.card, settings=TrainingSettings(**kept), resolved=replace(self.card.resolved, later=later)
        )
        self._answer = None
        if settings.device != self._device or settings.precision != present.precision:
            self._device = settings.device
            self.execution = choose_execution(replace(self.card.settings, device=settings.device))
            if self.method is not None:
                self.adopt(self.twin())

    def _same_weights(self, weights: str | None) -> bool:
        """Say whether a file holds the weights that the model started with, wherever it lies now."""
        file = None if weights is None else Path(weights).expanduser()
        known = self.card.pretrained
        return known is not None and file is not None and file.is_file() and digest(file) == known.sha256

    # -- for learning ---------------------------------------------------------------------------------------------

    def task_images(
        self,
        pixels: np.ndarray,
        numbers: np.ndarray,
        name: str,
        rows: np.ndarray | None = None,
        repeats: np.ndarray | None = None,
    ) -> TaskImages:
        """Return images to learn from, all or some `rows`, on the model's device; `numbers` are their classes.

        `repeats` (N) says how many times each image is there; the default is once.
        """
        if repeats is not None:
            rows = np.arange(len(numbers)) if rows is None else rows
            rows = np.repeat(rows, repeats[rows])
        assert self.card.resolved.augmentation is not None
        kind = ImagesInPlace if self.execution.device.type == "cpu" else TaskImages
        return kind(
            pixels,
            numbers,
            augmentation=make_augmentation(self.card.resolved.augmentation),
            normalisation=self.card.normalisation,
            device=self.execution.device,
            seed=self.card.settings.seed,
            name=name,
            dtype=self.execution.dtype,
            rows=rows,
        )

    def settle(self) -> None:
        """Wait for the device: learning has its own CUDA stream, which must not overlap unfinished work."""
        if self.execution.device.type == "cuda":
            torch.cuda.synchronize(self.execution.device)

    def twin(self, blueprint: Blueprint | None = None) -> Method:
        """Return the method as if loaded from the model's folder, so that continuing from memory gives the same."""
        return (blueprint or self.blueprint).load(
            {name: value.detach().clone() for name, value in self.tensors().items()}
        )

    # -- use -----------------------------------------------------------------------------------------------------

    @property
    def piece(self) -> int:
        """How many images are scored per batch; it depends only on their size and the device: scores do not vary."""
        most = CPU_PIECE_BYTES if self.execution.device.type == "cpu" else PIECE_BYTES
        return max(1, min(LARGEST_PIECE, most // (12 * self.card.image_size**2)))

    @torch.no_grad()
    def scores(self, pixels: np.ndarray) -> np.ndarray:
        """Return the scores (N, classes) of uint8 images N x size x size x 3."""
        if self._answer is None:
            self._answer = scorer(self.ready, self.card.settings.classifier)
        return self.by_pieces(pixels, self._answer)

    @property
    def temperature(self) -> float:
        """What scores are divided by before they become probabilities; 1 where no image was held out."""
        visits = (visit.measured for visit in self.card.visits)
        return measured.temperature(visits, self.card.settings.classifier, len(self.card.classes))

    def probabilities(self, pixels: np.ndarray) -> np.ndarray:
        """Return calibrated probabilities (N, classes) of uint8 images, in float64; rows sum to 1."""
        return probabilities(self.scores(pixels), self.temperature)

    @torch.no_grad()
    def typicality(self, pixels: np.ndarray) -> np.ndarray | None:
        """Return about which share of images of known classes look as untypical as each of these, or more so (N).

        None where the method keeps no class means, or where too few images were held out: see
        `refuse_without_typicality`.
        """
        statistics, fresh = self.ready.statistics(), self.held_out_closeness
        if statistics is None or fresh is None or fresh.images < typicality.FEWEST:
            return None
        close, method = typicality.closeness(statistics.means), self.ready
        values = self.by_pieces(pixels, lambda x: close(method.embed(x)))
        every = measured.closeness(visit.measured for visit in self.card.visits)
        assert every is not None
        # Classes from before the network was last trained have moved, by how much is not known: images must be
        # untypical of the new classes, and of all classes as far as they were measured.
        return np.maximum(*(typicality.share_as_untypical(values, known) for known in (fresh, every)))

    def refuse_without_typicality(self) -> None:
        """Raise an error that says why it cannot be known how typical an image is of the classes, if it cannot."""
        if self.ready.statistics() is None:
            able = [name for name, cls in methods.available().items() if "means" in cls.traits(cls.Settings()).keeps]
            raise ModelError(
                f"{self.card.settings.method} keeps no class statistics that an image could be compared with, so it "
                f"cannot answer unknown. Methods that can: {', '.join(able)}."
            )
        fresh = self.held_out_closeness
        if fresh is None or fresh.images < typicality.FEWEST:
            few = "No images were" if fresh is None else "Too few images were"
            count = "" if fresh is None else f" ({fresh.images})"
            earlier = len(self.card.since_trained) < len(self.card.visits)
            # Where every image measures, a share that is held out would be fewer.
            every = any(each.measured and each.measured.way == measured.FOLDS for each in self.card.since_trained)
            share = (
                "" if every else ", or hold out a larger share of them, such as --held-out 0.3 (held_out=0.3 in Python)"
            )
            raise ModelError(
                f"{few} held out{count} when this model {'last trained its network' if earlier else 'learned'}, so it "
                "is not known how far images of its classes differ from them, and it cannot answer unknown: that needs "
                f"{typicality.FEWEST}. Learn from more images{share}."
            )

    @property
    def held_out_closeness(self) -> Spread | None:
        """How close held-out images are to the class means in the features of the network as it is."""
        return measured.closeness(visit.measured for visit in self.card.since_trained)

    def by_pieces(
        self, pixels: np.ndarray, function: Callable[[Tensor], Tensor], rows: np.ndarray | None = None
    ) -> np.ndarray:
        """Apply a function of network input to uint8 images, all or some `rows`, batch by batch."""
        results, count = [], len(pixels if rows is None else rows)
        with doing_in_pieces("images", count, self.piece) as work:
            for start in range(0, count, self.piece):
                next_piece()
                work.done = start
                chosen = slice(start, start + self.piece)
                part = torch.from_numpy(np.ascontiguousarray(pixels[chosen if rows is None else rows[chosen]]))
                images = part.to(self.execution.device).permute(0, 3, 1, 2)
                results.append(function(self.card.normalisation(images, self.execution.dtype)).float().cpu().numpy())
        return np.concatenate(results)

    # -- copies --------------------------------------------------------------------------------------------------

    def __copy__(self) -> Model:
        """Return a model that shares the method: whatever changes one of them gives it a method of its own."""
        other = Model.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle needs: the contents of a model folder."""
        tensors = None if self.method is None else {name: value.cpu() for name, value in self.tensors().items()}
        return {"card": self.card, "tensors": tensors, "device": self._device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        card, method = state["card"], None
        if state["tensors"] is not None:
            method = model_folder.skeleton(card)
            model_folder.restore(card, method, state["tensors"])
        self.__init__(card, method, state["device"])  # type: ignore[misc]


def _other_versions(card: Card) -> str:
    """Name the versions that a model was last trained with, if they differ from those of this process."""
    before, now = card.last_made_with, versions()
    changed = [
        f"{name} {before[name]} (this is {now[name]})" for name in now if before.get(name, now[name]) != now[name]
    ]
    return " and ".join(changed)


def _located(settings: TrainingSettings, image_size: int) -> Backbone:
    """Return the backbone that a new model gets."""
    network = resolve(settings, settings.image_size or image_size).network
    assert network is not None
    return locate(network, settings.weights, settings.input_size)


def normalisation(backbone: Backbone) -> Normalisation:
    """Return the normalisation of photographs for a backbone: that of its weights, or ImageNet's."""
    view = View() if backbone.weights is None else backbone.weights.view
    return Normalisation(view.mean, view.std)


def pretrained_facts(backbone: Backbone) -> Pretrained | None:
    """Return what a card says about the weights that a backbone starts with."""
    return None if backbone.weights is None else Pretrained(backbone.architecture, **backbone.weights.facts())


def checked(settings: TrainingSettings) -> TrainingSettings:
    """Check every name in the settings; return them with the overrides converted to their types."""
    if settings.classifier == classifiers.ALL:
        raise SettingsError(
            "A model has one classifier; only experiments (`efcil run`) compare all of them. Choose one "
            "classifier, or auto."
        )
    return validate_training(settings)


def probabilities(scores: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the softmax of scores / temperature (N, classes) in float64."""
    return calibration.softmax(scores, temperature)
