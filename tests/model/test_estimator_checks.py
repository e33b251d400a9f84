"""scikit-learn's own checks of estimators.

They feed tables of numbers, and images are none; scikit-learn itself skips estimators whose input is not a table. So
the checks run on an adapter that draws every row of a table as a small grey image, a pixel per number, and leaves
everything else to IncrementalClassifier: parameters, labels, learning, predicting, copying.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data

from efcil.classifier import IncrementalClassifier


class Table(IncrementalClassifier):
    """IncrementalClassifier for tables of numbers."""

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Table:
        X, y = self._checked(X, y, reset=True)
        super().fit(self._drawn(X), y, sample_weight)
        return self

    def partial_fit(
        self, X: Any, y: Any = None, classes: Any = None, sample_weight: Any = None, *, more: bool = False
    ) -> Table:
        X, y = self._checked(X, y, reset=not hasattr(self, "model_"))
        super().partial_fit(self._drawn(X), y, classes, sample_weight, more=more)
        return self

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        return float(np.average(self.predict(X) == np.asarray(y), weights=sample_weight))

    def _gathered(self, X: Any) -> Any:
        return super()._gathered(self._drawn(validate_data(self, X, reset=False)))

    def _checked(self, X: Any, y: Any, reset: bool) -> tuple[np.ndarray, np.ndarray]:
        X, y = validate_data(self, X, y, reset=reset)
        check_classification_targets(y)
        return X, column_or_1d(y)

    def _drawn(self, X: np.ndarray) -> np.ndarray:
        side = max(4, int(np.ceil(np.sqrt(X.shape[1]))))
        grey = (127.5 + 127.5 * np.tanh(X.astype(float) / 2)).astype(np.uint8)
        places = np.arange(side * side) % X.shape[1]  # round and round, until the image is full
        return grey[:, places].reshape(-1, side, side)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.three_d_array, tags.input_tags.string = True, False, False
        return tags


#: Checks that cannot hold, and why.
EXPECTED = {
    "check_fit_score_takes_y": "it calls fit and then partial_fit with the same classes, which would be a second task "
    "of known classes; that must be asked for (more=True), lest a wrong folder spoil a model",
    "check_sample_weight_equivalence_on_dense_data": "it compares shuffled images that have weights with repeated ones "
    "in order, to 1e-7: in another order, sums in float32 differ in the last digits (by 6e-7 here), and training in "
    "batches differs by more; test_classifier.py compares the same order, where every bit must agree",
}
#: A pixel means something here only where it is.
PLAIN = {"first_task.rotations": False}


@parametrize_with_checks(
    [Table(preset="digits", epochs=4, augmentation="none", settings=PLAIN, device="cpu")],
    expected_failed_checks=lambda estimator: EXPECTED,
)
def test_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)
