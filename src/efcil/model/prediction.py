"""Predicting files: any number of them, in little memory; broken ones are reported and skipped."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from efcil.data.decode import SUFFIXES, Encoded, decode_image
from efcil.data.sources.listing import files_below, is_image
from efcil.errors import DataError
from efcil.model.images import InputError, model_fit, unknown_files
from efcil.model.in_memory import Model
from efcil.network.memo import remembered_features

#: How many batches are decoded ahead.
_BATCHES_AHEAD = 2


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one file, best first; or, for a broken one, why there are none."""

    path: str
    labels: tuple[Hashable, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str | None = None
    #: About which share of images of known classes look as untypical as this one; None where that was not asked for.
    typicality: float | None = None
    #: Whether it is too untypical of all classes to be one of them.
    unknown: bool = False


def image_files(names: Iterable[str], stdin: IO[str], ignored: set[Path] | None = None) -> Iterator[str]:
    """Return the files for a list of names: images, folders of images, patterns, and `-` for a list on `stdin`.

    All names are checked first, so that a wrong one is reported before anything is predicted. The list on `stdin` is
    read line by line, and may name folders too. Files in folders that are not images are added to `ignored`.
    """
    passed_over = set() if ignored is None else ignored
    parts: list[Iterable[str]] = []
    for name in names:
        if name == "-":
            parts.append(_listed(stdin, passed_over))
        elif os.path.isdir(name):
            parts.append(_inside(name, passed_over))
            if not parts[-1]:
                raise InputError(f"The folder {name} holds no image (recognised: {', '.join(SUFFIXES)}).")
        elif not os.path.exists(name) and glob.has_magic(name):
            parts.append(_matching(name, passed_over))
        else:
            parts.append([name])
    return itertools.chain.from_iterable(parts)


def _inside(folder: str, ignored: set[Path]) -> list[str]:
    files = files_below(Path(folder))
    ignored.update(file.absolute() for file in unknown_files(files))
    return [str(file) for file in files if is_image(file)]


def _listed(stdin: IO[str], ignored: set[Path]) -> Iterator[str]:
    for line in stdin:
        name = line.rstrip("\r\n")
        if name.strip():
            yield from (_inside(name, ignored) if os.path.isdir(name) else ()) or [name]


def _matching(pattern: str, ignored: set[Path]) -> list[str]:
    matches = sorted(glob.glob(pattern, recursive=True))
    if not matches:
        raise InputError(f"No file matches {pattern}.")
    files = [file for match in matches for file in (_inside(match, ignored) if os.path.isdir(match) else [match])]
    if not files:
        raise InputError(f"{pattern} matches only folders that hold no image.")
    # A pattern may match a folder and also its files.
    return list({os.path.normpath(file): file for file in files}.values())


def predict_files(model: Model, paths: Iterable[str], top: int, unknown: float | None = None) -> Iterator[Prediction]:
    """Yield a prediction for every file, in order; at most three batches are in memory at a time.

    While one batch is scored, the next two are decoded in threads: with large photographs decoding is most of the work,
    and no thread may wait for the scores. With `unknown`, images whose typicality is below that share are marked as
    unknown.
    """
    if unknown is not None:
        model.refuse_without_typicality()
    labels, remaining = model.card.labels, iter(paths)
    fit = model_fit(model.card.image_size)
    waiting: deque[tuple[str, Future[np.ndarray]]] = deque()
    pool = ThreadPoolExecutor(os.cpu_count() or 1)

    def submit(count: int) -> None:
        for path in itertools.islice(remaining, count):
            waiting.append((path, pool.submit(decode_image, Encoded(Path(path), path), fit)))

    try:
        submit(_BATCHES_AHEAD * model.piece)
        while waiting:
            decoded: list[tuple[str, np.ndarray | str]] = []
            while waiting and len(decoded) < model.piece:
                path, future = waiting.popleft()
                decoded.append((path, _result(future)))
                submit(1)
            intact = [pixels for _, pixels in decoded if isinstance(pixels, np.ndarray)]
            rows = iter(_best(model, np.stack(intact), labels, top, unknown) if intact else ())
            for path, pixels in decoded:
                if isinstance(pixels, str):
                    yield Prediction(path, error=pixels)
                else:
                    yield next(rows)(path)
    finally:
        pool.shutdown(cancel_futures=True)


def _result(future: Future[np.ndarray]) -> np.ndarray | str:
    try:
        return future.result()
    except DataError as error:
        return str(error)


def _best(
    model: Model, pixels: np.ndarray, labels: Sequence[Hashable], top: int, unknown: float | None
) -> Iterator[Callable[[str], Prediction]]:
    """Yield for every image the function from its path to its prediction."""
    with contextlib.nullcontext() if unknown is None else remembered_features(model.ready.network):
        chances = model.probabilities(pixels)
        typical = None if unknown is None else model.typicality(pixels)
    for number, row in enumerate(chances):
        order = np.argsort(-row, kind="stable")[:top]
        answer = partial(
            Prediction,
            labels=tuple(labels[place] for place in order),
            probabilities=tuple(float(row[place]) for place in order),
        )
        if typical is not None and unknown is not None:
            share = float(typical[number])
            answer = partial(answer, typicality=share, unknown=share < unknown)
        yield answer
