"""Which images a run is trained on, and in what order: settings, with what the preset says filled in."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from efcil import presets
from efcil.settings.benchmark import Settings

if TYPE_CHECKING:
    from efcil.data.images import Dataset
    from efcil.data.sources import SourceOptions

#: Settings that choose among the images of a dataset; those left open mean what they meant before they existed.
CHOICES = ("class_list", "stored_side", "columns", "splits")


def chosen_class_order(settings: Settings) -> str:
    """Return the class order: the one asked for, or the preset's."""
    return settings.class_order or presets.load_preset(settings.preset).class_order


def chosen_images_per_class(settings: Settings) -> str:
    """Return how many training images a class may have: as asked for, or as the preset says."""
    return settings.images_per_class or presets.load_preset(settings.preset).images_per_class


def chosen_answers(settings: Settings) -> str | None:
    """Return what counts as right, merged or separate: as asked for, or as the preset says; None if neither does."""
    return settings.answers or presets.load_preset(settings.preset).answers


def content_identity(named: str) -> str:
    """Return what identifies a list of classes: the digest of the content of its file, or its name."""
    path = Path(named).expanduser()
    # The content of the file counts, not its path.
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else named


def source_options(settings: Settings) -> SourceOptions:
    """Return what a source must know of the settings, besides the place of its files."""
    from efcil.data.sources import SourceOptions

    return SourceOptions(
        held_out=settings.held_out,
        image_size=settings.image_size,
        images_per_class=chosen_images_per_class(settings),
        class_list=settings.class_list,
        stored_side=settings.stored_side,
        columns=settings.columns,
        splits=settings.splits,
        answers=chosen_answers(settings),
    )


def load_images(settings: Settings) -> Dataset:
    """Return the dataset that a run is trained on and tested with."""
    from efcil.data.sources import load_dataset

    place = None if settings.data is None else Path(settings.data)
    return load_dataset(settings.dataset, place, source_options(settings))
