"""Base of methods that answer by a classifier built from their memory, and not by their heads."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from efcil.core.classifiers import Classifier
from efcil.methods.base import Method


class BuiltClassifier(Method):
    """Answers by what `build` makes of the memory."""

    _classifier: Classifier | None = None

    @abstractmethod
    def build(self) -> Classifier:
        """Return the classifier of what `embed` gives, from the memory."""

    def restored(self) -> None:
        """Discard the classifier; it is built again when it is needed."""
        self._classifier = None

    @torch.no_grad()
    def scores(self, images: Tensor) -> Tensor:
        """What the classifier says; it is built when it is first needed."""
        if self._classifier is None:
            self._classifier = self.build()
        return self._classifier(self.embed(images))
