"""Predicting files: any number of them, in little memory, with broken ones named and left out."""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from efcil.data.decode import Encoded, Fit, decode_image
from efcil.data.sources.listing import images_below
from efcil.errors import DataError
from efcil.model.images import InputError
from efcil.model.model import Model, probabilities


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one file, best first; or, for a broken one, why there are none."""

    path: str
    labels: tuple[Hashable, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str | None = None


def image_files(names: Iterable[str], stdin: IO[str]) -> Iterator[str]:
    """Yield the files that names stand for: images, folders of images, patterns, and `-` for a list on `stdin`."""
    for name in names:
        if name == "-":
            yield from (line.rstrip("\r\n") for line in stdin if line.strip())
        elif os.path.isdir(name):
            found = images_below(Path(name))
            if not found:
                raise InputError(f"The folder {name} holds no image.")
            yield from map(str, found)
        elif not os.path.exists(name) and glob.has_magic(name):
            matching = sorted(glob.glob(name, recursive=True))
            if not matching:
                raise InputError(f"No file matches {name}.")
            yield from (match for match in matching if not os.path.isdir(match))
        else:
            yield name


def predict_files(model: Model, paths: Iterable[str], top: int) -> Iterator[Prediction]:
    """Yield a prediction for every file, in order; at no time are more than two pieces of them in memory.

    While one piece is scored, the next one is decoded in threads.
    """
    labels, remaining = model.card.labels, iter(paths)
    fit = Fit(model.card.image_size, resize=True, orient=True)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:

        def next_piece() -> list[tuple[str, Future[np.ndarray]]]:
            chosen = itertools.islice(remaining, model.piece)
            return [(path, pool.submit(decode_image, Encoded(Path(path), path), fit)) for path in chosen]

        piece = next_piece()
        while piece:
            decoded = [(path, _result(future)) for path, future in piece]
            piece = next_piece()
            intact = [pixels for _, pixels in decoded if isinstance(pixels, np.ndarray)]
            rows = iter(_best(model, np.stack(intact), labels, top) if intact else ())
            for path, pixels in decoded:
                if isinstance(pixels, str):
                    yield Prediction(path, error=pixels)
                else:
                    yield Prediction(path, *next(rows))


def _result(future: Future[np.ndarray]) -> np.ndarray | str:
    try:
        return future.result()
    except DataError as error:
        return str(error)


def _best(
    model: Model, pixels: np.ndarray, labels: Sequence[Hashable], top: int
) -> Iterator[tuple[tuple[Hashable, ...], tuple[float, ...]]]:
    chances = probabilities(model.scores(pixels))
    for row in chances:
        order = np.argsort(-row, kind="stable")[:top]
        yield tuple(labels[place] for place in order), tuple(float(row[place]) for place in order)
