"""The pickled batches of the original CIFAR archive, read without letting the pickle run anything.

A pickle is a small program that can call any function it names. Here the only names it may use are the four that an
array needs, and each of them leads to an inert stand-in below; no code outside this file runs, not even NumPy's.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from efcil.errors import DataError


class _PickledType:
    """Stands in for numpy.dtype: remembers its code, for example u1."""

    def __init__(self, code: object, *_: object) -> None:
        self.code = code.decode("latin1") if isinstance(code, bytes) else str(code)

    def __setstate__(self, state: object) -> None:
        """Ignore the byte order: bytes have none, and nothing but bytes is read."""


class _PickledArray:
    """Stands in for numpy.ndarray: remembers shape, type and raw content until `to_numpy` checks them."""

    def __init__(self, *_: object) -> None:
        self.content: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, column_major, raw = state
        self.content = (raw, kind, shape, "F" if column_major else "C")

    def to_numpy(self) -> np.ndarray:
        """Return the array, which must be one of unsigned bytes."""
        raw, kind, shape, order = self.content
        if not isinstance(kind, _PickledType) or kind.code != "u1":
            raise ValueError("the array is not one of unsigned bytes")
        return np.frombuffer(raw, np.uint8).reshape(shape, order=order)


def _array_from_buffer(raw: object, kind: object, shape: object, order: object) -> _PickledArray:
    array = _PickledArray()
    array.content = (raw, kind, shape, order)
    return array


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":  # the only one that is ever used, for byte strings in old pickle protocols
        raise pickle.UnpicklingError(f"encoding {encoding!r} is not allowed")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _PickledArray,
    ("numpy", "dtype"): _PickledType,
    ("_codecs", "encode"): _encode,
}
for _package in ("numpy.core", "numpy._core"):
    _ALLOWED[_package + ".multiarray", "_reconstruct"] = _PickledArray
    _ALLOWED[_package + ".numeric", "_frombuffer"] = _array_from_buffer


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which has no place in image data")
        return _ALLOWED[module, name]


def read_pickle(content: bytes, where: str) -> dict[str, Any]:
    """Return the dictionary pickled in `content`, keys as text, arrays as NumPy arrays; `where` names it in errors."""
    try:
        loaded = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(loaded, dict):
            raise ValueError("it holds no dictionary")
        return {
            key.decode("latin1") if isinstance(key, bytes) else str(key): (
                value.to_numpy() if isinstance(value, _PickledArray) else value
            )
            for key, value in loaded.items()
        }
    except Exception as error:  # damaged pickles raise almost anything
        raise DataError(
            f"{where} is refused: it is not a pickled CIFAR-100 file ({error}). "
            "Download the original archive, cifar-100-python.tar.gz, again."
        ) from error
