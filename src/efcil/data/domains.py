"""Domains: the same answers in another form, such as photographs and sketches of dogs.

A class that is called `sketch/dog` is the answer `dog` in the domain `sketch`. Methods learn it as a class of its own,
with its own prototype and rows of heads. The setting `answers` says whether `photo/dog` is right for a `sketch/dog`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from efcil.errors import DataError

SEPARATOR = "/"
#: What the setting is called in sentences.
MERGING = "--answers merged"


@dataclass(frozen=True)
class Domains:
    """Domain and answer of every class, as numbers in the order in which they first occur, and their names."""

    names: tuple[str, ...]
    of_class: tuple[int, ...]
    answer_names: tuple[str, ...]
    answers: tuple[int, ...]

    @property
    def counted(self) -> str:
        """How many answers there are, in words: `600 classes share 100 answers`."""
        return counted(self.answers)

    def classes(self, domain: int) -> list[int]:
        """Return the classes of a domain."""
        return [label for label, each in enumerate(self.of_class) if each == domain]

    def incomplete(self) -> list[str]:
        """Return the names of the answers that some domains do not have."""
        found = [self.answers.count(answer) for answer in range(len(self.answer_names))]
        return [name for name, count in zip(self.answer_names, found, strict=True) if count < len(self.names)]


def domains_of(class_names: Sequence[str]) -> Domains | None:
    """Return domains and answers of classes; None if one of them is not called domain/answer."""
    pairs = [name.rpartition(SEPARATOR)[::2] for name in class_names]
    if not pairs or not all(domain and answer for domain, answer in pairs):
        return None
    names, of_class = numbered([domain for domain, _ in pairs])
    answer_names, answers = numbered([answer for _, answer in pairs])
    return Domains(names, of_class, answer_names, answers)


def numbered(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the different words, and the number of each word among them."""
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    return tuple(numbers), tuple(numbers[word] for word in words)


def need_domains(class_names: Sequence[str], dataset: str, wanted: str) -> Domains:
    """Return domains and answers of classes; a DataError says that `wanted` needs them."""
    found = domains_of(class_names)
    if found is None:
        raise DataError(
            f"{wanted} needs classes that are called domain{SEPARATOR}answer, such as sketch{SEPARATOR}dog; those of "
            f"{dataset} are not. Leave it out."
        )
    return found


def counted(answers: Sequence[object]) -> str:
    """Return how many answers there are, in words; `answers` are those of all classes."""
    return f"{len(answers):,} classes share {len(set(answers)):,} answers"
