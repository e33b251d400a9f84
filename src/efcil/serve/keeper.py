"""The model in use: loaded beside the old one, and put in its place in one step.

The folder is looked at every second, so that what `efcil learn` in a terminal has learned is used as well.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from efcil.errors import EfcilError
from efcil.files import read_regular
from efcil.model import folder as model_folder
from efcil.model.contents import Stored, inventory
from efcil.model.in_memory import Model
from efcil.serve.answering import score

LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to answer, what it stores, and the digest that names this state of it."""

    model: Model
    version: str
    stored: tuple[Stored, ...]


def version_of(folder: Path) -> str:
    """Return the digest that names the present state of a model folder."""
    return hashlib.sha256(read_regular(folder / f"{model_folder.STEM}.json")).hexdigest()[:16]


class Keeper:
    """Holds the model in use, None where the folder has none yet, and replaces it when its folder changes."""

    def __init__(self, folder: Path, device: str, swapped: Callable[[], None] = lambda: None) -> None:
        self.folder = folder
        self.current: Loaded | None = None
        #: Why the folder's present model is not the one in use; nothing where it is.
        self.problem: str | None = None
        self._device = device
        self._swapped = swapped
        self._seen: tuple[int, ...] = ()
        self._loading = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Load the model, or raise; then look at the folder from time to time."""
        if model_folder.exists(self.folder):
            self._seen = self._stamp()
            self.current = self._load()
        self._thread = threading.Thread(target=self._watch, name="efcil-folder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def refresh(self) -> None:
        """Use the folder's present model. One that cannot be read leaves the old one in use, and says why."""
        with self._loading:
            stamp = self._stamp()
            if stamp == self._seen:
                return
            try:
                if not stamp:
                    model_folder.read(self.folder)  # says what there is instead of a model
                loaded = self._load()
            except (EfcilError, OSError) as error:
                self.problem = f"The folder has changed, and its model cannot be used: {error}"
            else:
                self.current, self.problem = loaded, None
                self._swapped()
            self._seen = stamp

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            self.refresh()

    def _load(self) -> Loaded:
        """Return the folder's model after a first image, which is the slowest."""
        while True:
            before = version_of(self.folder)
            model = Model.load(self.folder, self._device)
            if version_of(self.folder) == before:
                break
        size = model.card.image_size
        score(model, np.zeros((1, size, size, 3), np.uint8))
        return Loaded(model, before, tuple(inventory(model.card, model.tensors())))

    def _stamp(self) -> tuple[int, ...]:
        try:
            status = (self.folder / f"{model_folder.STEM}.json").stat()
        except OSError:
            return ()
        return status.st_ino, status.st_mtime_ns, status.st_size
