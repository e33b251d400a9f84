"""What every stored tensor is for, and what could be learned from it about the training images.

Methods declare it for what they store (`keep`); this module declares it for the network. A tensor without a declared
purpose fails the audit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from efcil.methods.kept import Purpose

#: How the patterns of the network's tensors begin.
_BACKBONE = r"network\.backbone\."
_WEIGHTS = (
    "Sums of gradients over all images and epochs. No image is stored in them; like the weights of every network "
)

PURPOSES = (
    Purpose(
        _BACKBONE + r".+\.(weight|bias)",
        "backbone weights",
        "turn an image into features",
        _WEIGHTS + "they can reveal whether an image was among the training images (membership inference).",
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
        per_class=1,
    ),
    Purpose(
        r"network\.(fixed_)?head_scale",
        "head scale",
        "multiplies the cosines that are the scores of cosine heads",
        "One number for all classes together.",
    ),
)


#: What no visit has trained, by the beginning of its pattern, of a network that is as it was published.
_UNTRAINED = {
    _BACKBONE: "As published: no visit has changed them, so nothing about your images can be learned from them.",
    r"network\.heads\.": "Random numbers that no visit has trained, so nothing about your images can be learned from "
    "them.",
}


def recovery(purpose: Purpose, *, as_pretrained: bool) -> str:
    """Return what could be learned from these tensors; `as_pretrained` says that no visit has trained the network."""
    known = (words for start, words in _UNTRAINED.items() if as_pretrained and purpose.pattern.startswith(start))
    return next(known, purpose.recovery)


def including(declared: Mapping[str, Purpose], backbone: nn.Module | None = None) -> tuple[Purpose, ...]:
    """Return the list, followed by what a method declares (`Method.purposes`).

    In a `backbone` from elsewhere not all parameters are called weight or bias.
    """
    named = [] if backbone is None else [name for name, _ in backbone.named_parameters(remove_duplicate=False)]
    weights, *others = PURPOSES
    usual = weights.pattern.removeprefix(_BACKBONE)
    own = "|".join([usual, *(re.escape(name) for name in named if not re.fullmatch(usual, name))])
    return (replace(weights, pattern=f"{_BACKBONE}({own})"), *others, *declared.values())


def purpose_of(name: str, known: Sequence[Purpose] = PURPOSES) -> Purpose | None:
    """Return the purpose of the tensor called `name`, None if none is declared."""
    return next((purpose for purpose in known if re.fullmatch(purpose.pattern, name)), None)


def unaccounted(names: Iterable[str], known: Sequence[Purpose] = PURPOSES) -> list[str]:
    """Return the names that have no purpose."""
    return sorted(name for name in names if purpose_of(name, known) is None)
