"""What every stored tensor is for, and what could be learned from it about the training images.

A tensor whose name is not in this list fails the audit: whoever makes a method store something new says it here, or in
the method itself (`Method.purposes`).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Purpose:
    """A kind of tensor: the names it has, what it is for, and what could be recovered from it."""

    pattern: str
    title: str
    use: str
    recovery: str


_WEIGHTS = (
    "Sums of gradients over all images and epochs. No image is stored in them; like the weights of every network "
)
_STATISTICS = "An average over a class's images in feature space, which many different images share. "
_SPAN = (
    "With fewer images than features it spans exactly the features it was measured on, which can tell training images "
    "from others, above all where they were not augmented (see membership in `efcil audit`); pixels it does not hold."
)
_UNEXAMINED = (
    "Not examined: what it is for is what the method's author says. `efcil audit` compares rows that could be an image "
    "or a patch with the training images."
)

PURPOSES = (
    Purpose(
        r"network\.backbone\..+\.(weight|bias)",
        "backbone weights",
        "turn an image into features",
        _WEIGHTS + "they can betray whether an image was among the training images (membership inference).",
    ),
    Purpose(
        r"network\.backbone\..+\.running_(mean|var)",
        "BatchNorm statistics",
        "scale activations",
        "Averages of activations over all images. No image can be recovered from them.",
    ),
    Purpose(
        r"network\.backbone\..+\.num_batches_tracked",
        "BatchNorm counters",
        "count training steps",
        "How many steps were trained, and nothing else.",
    ),
    Purpose(
        r"network\.heads\.\d+",
        "class heads",
        "turn features into the scores of a task's classes",
        _WEIGHTS + "they show which features a class has.",
    ),
    Purpose(
        r"(base\.)?means",
        "class means",
        "stand for a class's features when it is rehearsed, compared with or followed through drift",
        _STATISTICS
        + "Inverting the network on a mean gives at best a picture of the average; the mean of a class with "
        "a single image is that image's feature vector.",
    ),
    Purpose(
        r"(base\.)?(covariances|compact)",
        "class covariances",
        "spread of a class's features, to draw features that resemble it",
        _STATISTICS + _SPAN,
    ),
    Purpose(
        r"moments",
        "class second moments",
        "sums of products of a class's features, to solve for a classifier",
        _STATISTICS + _SPAN,
    ),
    Purpose(
        r"(base\.)?covariance_of",
        "covariance table",
        "which covariance a class uses",
        "Nothing about images.",
    ),
    Purpose(
        r"(base\.)?feature_matrix",
        "empirical feature matrix",
        "which directions of feature space the classes depend on",
        "One average over the last task's images. No image can be recovered from it.",
    ),
    Purpose(
        r"fisher",
        "Fisher information",
        "how much old tasks depend on each weight",
        "Squared gradients averaged over all images. No image can be recovered from it.",
    ),
    Purpose(r"counts", "image counts", "how many images each class had", "How many images each class had."),
    Purpose(
        r"radius",
        "prototype radius",
        "how far features scatter around class means",
        "One number for all classes together.",
    ),
    Purpose(
        r"rotations\.\d+",
        "rotation heads",
        "scores of rotated classes, used in training",
        _WEIGHTS + "they show which features a rotated class has.",
    ),
    Purpose(
        r"bottleneck\.(weight|bias)",
        "feature bottleneck",
        "turns features into the fewer ones that class statistics are about",
        _WEIGHTS + "it shows which features vary most.",
    ),
    Purpose(
        r"classifier|intercepts",
        "solved classifier",
        "weights of a classifier solved from class statistics",
        "A function of the class statistics. No image can be recovered from it.",
    ),
)


def including(declared: Mapping[str, str]) -> tuple[Purpose, ...]:
    """Return the list with what a method declares in front: name (`*` stands for anything) -> what it is for.

    What could be recovered is said by the list all the same where it has the name too.
    """
    own = []
    for name, use in declared.items():
        known = purpose_of(name) or Purpose("", name, use, _UNEXAMINED)
        own.append(replace(known, pattern=fnmatch.translate(name), use=use))
    return (*own, *PURPOSES)


def purpose_of(name: str, known: Sequence[Purpose] = PURPOSES) -> Purpose | None:
    """Return the purpose of the tensor called `name`, None for a name that nobody has explained."""
    return next((purpose for purpose in known if re.fullmatch(purpose.pattern, name)), None)


def unaccounted(names: Iterable[str], known: Sequence[Purpose] = PURPOSES) -> list[str]:
    """Return the names that have no purpose."""
    return sorted(name for name in names if purpose_of(name, known) is None)
