"""DomainNet with the lists of DN4IL: the same 100 classes in each of six domains, one domain a task.

Methods learn 600 classes, `sketch/airplane` besides `clipart/airplane`; an answer is right in whichever domain. Domains
are numbered by their names, as EFC++ has them. The preset orders them as the authors of DN4IL do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from efcil.data.images import Dataset
from efcil.data.sources import Known, Source, SourceOptions
from efcil.data.sources.listing import Files
from efcil.data.sources.photographs import inside, photographs, read_table, whole_number
from efcil.errors import DataError

DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
MOST_CLASSES = 10_000
#: Classes of the whole DomainNet, whose own lists have the same names as those of DN4IL.
WHOLE_CLASSES = 345
_LISTS = "https://github.com/NeurAI-Lab/DN4IL-dataset"
#: EFC++ resizes images to this shorter side before it cuts crops from them.
_STORED_SIDE = 256


class Domainnet(Source):
    """Six domains of 100 classes each, which methods learn as 600: clipart/airplane besides sketch/airplane."""

    name = "domainnet"
    title = "DomainNet"
    description = "DN4IL: the same 100 classes in 6 domains, one domain a task (domain-incremental)"
    expected = (
        "Expected: a folder with the images of DomainNet (clipart/, infograph/, painting/, quickdraw/, real/ and "
        "sketch/, from https://ai.bu.edu/M3SDA) and the lists clipart_train.txt, clipart_test.txt and so on of DN4IL "
        f"({_LISTS}); a line has the path of an image and the number of its class."
    )
    needs_path = True
    uses = ("stored_side",)
    known = Known(600)

    def load(self, path: Path | None, options: SourceOptions) -> Dataset:
        """Return the domains below `path`, to be decoded when they are needed."""
        self.check(path, options)
        assert path is not None
        names, train, test = self.listed(path)
        if options.stored_side is None:
            return photographs(self.name, train, test, names, replace(options, stored_side=_STORED_SIDE), enlarge=True)
        return photographs(self.name, train, test, names, options)

    def listed(self, path: Path) -> tuple[list[str], Files, Files]:
        """Return the names of the classes, domain after domain, and the files of both splits."""
        lines = {
            (domain, split): self._lines(path, path / f"{domain}_{split}.txt")
            for domain in DOMAINS
            for split in ("train", "test")
        }
        classes = 1 + max(label for each in lines.values() for _, label in each)
        if classes == WHOLE_CLASSES:
            raise DataError(
                f"The lists in {path} have {classes} classes: they are those of the whole DomainNet, which have the "
                f"same names. Replace them by the lists of DN4IL with 100 classes, from {_LISTS}."
            )
        names = self._class_names(path, lines, classes)
        splits = []
        for split in ("train", "test"):
            chosen = [
                (file, place * classes + label)
                for place, domain in enumerate(DOMAINS)
                for file, label in lines[domain, split]
            ]
            splits.append(Files(tuple(file for file, _ in chosen), tuple(label for _, label in chosen)))
        return [f"{domain}/{name}" for domain in DOMAINS for name in names], splits[0], splits[1]

    def _class_names(
        self, path: Path, lines: Mapping[tuple[str, str], list[tuple[Path, int]]], classes: int
    ) -> list[str]:
        """Return the names of the folders of the classes; a class must have the same one in all lists."""
        names: dict[int, str] = {}
        for (domain, split), each in lines.items():
            for file, label in each:
                if names.setdefault(label, file.parent.name) != file.parent.name:
                    raise DataError(
                        f"Class {label} is {names[label]!r}, but {file.parent.name!r} in {domain}_{split}.txt: the "
                        f"lists in {path} do not belong together. {self.expected}"
                    )
        if len(set(names.values())) < len(names):
            raise DataError(f"The lists in {path} give two classes one name. {self.expected}")
        return [names.get(label, f"class {label}") for label in range(classes)]

    def _lines(self, path: Path, file: Path) -> list[tuple[Path, int]]:
        if not file.is_file():
            raise DataError(f"{file} is missing. {self.expected}")
        found = [
            (inside(path, name, file), whole_number(label, 0, MOST_CLASSES, file))
            for name, label in read_table(file, self.expected)
        ]
        if not found:
            raise DataError(f"{file} names no image. {self.expected}")
        return found
