"""The pickled batches of the original CIFAR archive, read without executing code of the pickle.

A pickle is a small program that can call any function it names. Here the only names it may use are the four that an
array needs, and each of them gives a harmless stand-in below; no code outside this file runs, not even NumPy's.

Time and memory are bounded: the number of steps is limited, keys of dictionaries must be text (a few bytes can make a
tuple whose hash takes years), and it is read by Python's own reader, whose memory grows with the steps.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from efcil.errors import DataError, shortened

#: The largest original file needs a quarter of a million: a step for every label and two for every name of a file.
MOST_STEPS = 5_000_000


class _PickledType:
    """Stands in for numpy.dtype: remembers its code, for example u1."""

    def __init__(self, code: object, *_: object) -> None:
        self.code = code.decode("latin1") if isinstance(code, bytes) else code

    def __setstate__(self, state: object) -> None:
        """Ignore the byte order: only bytes are read, and they have none."""


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


def _encode(text: object, encoding: object) -> bytes:
    # Latin-1 is the only one that is ever used, for byte strings in old pickle protocols.
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("it encodes text in a way that is not allowed")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _PickledArray,
    ("numpy", "dtype"): _PickledType,
    ("_codecs", "encode"): _encode,
}
for _package in ("numpy.core", "numpy._core"):
    _ALLOWED[_package + ".multiarray", "_reconstruct"] = _PickledArray
    _ALLOWED[_package + ".numeric", "_frombuffer"] = _array_from_buffer


#: The steps that a pickle of images may use. Sets, other objects and shared buffers are not allowed.
_STEPS = """
    PROTO FRAME STOP MARK POP POP_MARK DUP PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET NONE NEWTRUE NEWFALSE
    INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING BINBYTES
    SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2
    TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS GLOBAL STACK_GLOBAL REDUCE BUILD
"""  # as text because 55 quoted words, one per line, would hide the rest of the file


class _Unpickler(pickle._Unpickler):
    """Python's own reader of pickles, which is slower than the usual one and lets every step be checked."""

    stack: list[Any]

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.steps = 0

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            where = shortened(f"{module}.{name}")
            raise pickle.UnpicklingError(f"it asks for {where}, which image data does not need")
        return _ALLOWED[module, name]

    def check_keys(self, keys: list[Any]) -> None:
        """Refuse keys of a dictionary that are not text, before they are hashed."""
        if not all(isinstance(key, str | bytes) for key in keys):
            raise pickle.UnpicklingError("it has a key that is not text")

    def check(self, step: str) -> None:
        """Refuse forbidden steps: too many, keys that are not text, changes of anything but stand-ins."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise pickle.UnpicklingError(f"it takes more than {MOST_STEPS:,} steps")
        if step == "SETITEM":
            self.check_keys(self.stack[-2:-1])
        elif step in ("SETITEMS", "DICT"):
            self.check_keys(self.stack[::2])
        elif step == "BUILD" and not isinstance(self.stack[-2], _PickledType | _PickledArray):
            raise pickle.UnpicklingError("it changes something that is not an array")


def _checked(name: str) -> Callable[[Any], None]:
    # A bytearray is read like bytes: Python's own step would allocate its size before checking that the data is there.
    usual = "BINBYTES8" if name == "BYTEARRAY8" else name
    step = pickle._Unpickler.dispatch[getattr(pickle, usual)[0]]

    def checked(unpickler: Any) -> None:
        unpickler.check(name)
        step(unpickler)

    return checked


def _refuse(_: Any) -> None:
    raise pickle.UnpicklingError("it takes a step that image data does not need")


_Unpickler.dispatch = dict.fromkeys(range(256), _refuse)
_Unpickler.dispatch |= {getattr(pickle, name)[0]: _checked(name) for name in _STEPS.split()}


def read_pickle(content: bytes, where: str, title: str = "CIFAR-100") -> dict[str, Any]:
    """Return the dictionary pickled in `content`, keys as text, arrays as NumPy arrays.

    Errors name `where` it is from and the `title` of its dataset.
    """
    try:
        loaded = _Unpickler(content).load()
        if not isinstance(loaded, dict):
            raise ValueError("it is not a dictionary")
        return {
            key.decode("latin1") if isinstance(key, bytes) else key: (
                value.to_numpy() if isinstance(value, _PickledArray) else value
            )
            for key, value in loaded.items()
        }
    except Exception as error:  # damaged pickles may raise almost anything
        # The reader has no words for a pickle that ends too early.
        reason = "it is truncated" if isinstance(error, EOFError) else shortened(str(error), 200)
        raise DataError(
            f"{where} is refused: it is not a pickled {title} file ({reason}). Download the original archive again."
        ) from error
