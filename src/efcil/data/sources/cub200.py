"""CUB-200-2011 (Caltech-UCSD Birds) in its original layout; images are decoded task by task."""

from __future__ import annotations

import re
from pathlib import Path

from efcil.data.images import Dataset
from efcil.data.sources import Known, Source, SourceOptions
from efcil.data.sources.listing import Files
from efcil.data.sources.photographs import inside, photographs, read_table, whole_number
from efcil.errors import DataError

FOLDER = "CUB_200_2011"
MOST_CLASSES = 100_000
_LISTS = ("images.txt", "image_class_labels.txt", "train_test_split.txt")


class Cub200(Source):
    """200 kinds of birds, 5,994 training and 5,794 test images of about 500 pixels; the split is the published one."""

    name = "cub200"
    title = "CUB-200-2011"
    description = "200 kinds of birds, 5,994 training and 5,794 test photographs, 224 x 224 pixels"
    expected = (
        f"Expected: the folder {FOLDER} (or the one that holds it) with images/, images.txt, image_class_labels.txt, "
        "train_test_split.txt and classes.txt; get CUB_200_2011.tgz from "
        "https://data.caltech.edu/records/65de6-vp158 and extract it."
    )
    needs_path = True
    uses = ("stored_side",)
    known = Known(200, 5_994, 5_794, (29, 30), (11, 30))

    def load(self, path: Path | None, options: SourceOptions) -> Dataset:
        """Return the birds below `path`, to be decoded when they are needed."""
        self.check(path, options)
        assert path is not None
        names, train, test = self.listed(path)
        return photographs(self.name, train, test, names, options)

    def listed(self, path: Path) -> tuple[list[str], Files, Files]:
        """Return the names of the classes, and the files of both splits."""
        root = next((each for each in (path, path / FOLDER) if (each / "images.txt").is_file()), None)
        if root is None:
            hint = " Folders train/ and test/ of classes are the dataset `folder`." if (path / "train").is_dir() else ""
            raise DataError(f"{path} holds no CUB-200-2011: there is no images.txt.{hint} {self.expected}")
        files, labels, splits = ({word: rest for word, rest in self._table(root / name)} for name in _LISTS)
        if files.keys() != labels.keys() or files.keys() != splits.keys():
            raise DataError(f"The lists {', '.join(_LISTS)} in {root} do not name the same images. {self.expected}")
        last = max((whole_number(each, 1, MOST_CLASSES, root / _LISTS[1]) for each in labels.values()), default=0)
        names = self._class_names(root, last)
        chosen: dict[str, list[tuple[Path, int]]] = {"0": [], "1": []}
        for number, name in files.items():
            if splits[number] not in chosen:
                raise DataError(f"{root / _LISTS[2]} has {splits[number][:40]!r}, which is neither 0 (test) nor 1.")
            chosen[splits[number]].append((inside(root / "images", name, root / _LISTS[0]), int(labels[number]) - 1))
        train, test = (
            Files(tuple(file for file, _ in chosen[split]), tuple(label for _, label in chosen[split]))
            for split in ("1", "0")
        )
        return names, train, test

    def _table(self, file: Path) -> list[list[str]]:
        return read_table(file, self.expected)

    def _class_names(self, root: Path, last: int) -> list[str]:
        """Return the names without their numbers: Black footed Albatross."""
        file = root / "classes.txt"
        listed = dict(self._table(file)) if file.is_file() else {}
        full = [listed.get(str(number), f"class {number}") for number in range(1, last + 1)]
        short = [re.sub(r"^\d+\.", "", name).replace("_", " ") for name in full]
        return short if len(set(short)) == len(short) else full
