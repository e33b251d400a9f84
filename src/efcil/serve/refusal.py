"""Requests that are refused: an HTTP status, and a sentence for the person who asked."""

from __future__ import annotations

from collections.abc import Mapping

from efcil.errors import EfcilError


class Refused(EfcilError):
    """A request that is not answered. The status says what kind of mistake it was, the sentence what to do."""

    def __init__(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.headers = dict(headers or {})
