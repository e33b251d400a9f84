"""What the tests of the server share: pictures of digits, forms, waiting."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

NAMES = ("zero", "one", "two", "three", "four")
PATIENCE = 120.0


def png(pixels: np.ndarray) -> bytes:
    """Return pixels as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


class Digits:
    """PNG files of digits by name: the first 16 of every class to learn from, the next 8 to ask about."""

    def __init__(self) -> None:
        bunch = load_digits()
        self.pixels = {
            name: (bunch.images[bunch.target == digit][:24] * 15.9).astype(np.uint8) for digit, name in enumerate(NAMES)
        }

    def train(self, name: str) -> list[bytes]:
        return [png(each) for each in self.pixels[name][:16]]

    def test(self, name: str) -> list[bytes]:
        return [png(each) for each in self.pixels[name][16:]]


def form(**classes: list[bytes]) -> list[tuple[str, Any]]:
    """Return a teaching form as httpx takes it: classes as fields without file name, each before its images."""
    parts: list[tuple[str, Any]] = []
    for name, images in classes.items():
        parts.append(("class", (None, name)))
        parts += [("image", (f"{number}.png", image, "image/png")) for number, image in enumerate(images)]
    return parts


def ended(client: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Wait until a teaching has ended and return it."""
    return until(lambda: client.get(f"/api/jobs/{job['id']}").json(), lambda found: found["ended"] is not None)


def learning(client: Any, job: dict[str, Any]) -> None:
    """Wait until a teaching has trained an epoch."""
    until(lambda: client.get(f"/api/jobs/{job['id']}").json()["epoch"], lambda epoch: epoch > 0)


def until(ask: Callable[[], Any], enough: Callable[[Any], bool]) -> Any:
    """Ask until the answer is good enough."""
    deadline = time.monotonic() + PATIENCE
    while not enough(found := ask()):
        assert time.monotonic() < deadline, f"still {found}"
        time.sleep(0.02)
    return found
