"""What the README.md of a dataset of the Hub declares: its configurations, and which files are of which split."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from efcil import safe_yaml
from efcil.data.sources.shards import split_name, split_of
from efcil.errors import DataError, shortened, some
from efcil.files import read_regular

_FILE = "README.md"
_DEFAULT = "default"
_MOST_BYTES = 4 << 20
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?)^---[ \t]*$", re.S | re.M)


def declared_splits(folder: Path, files: Sequence[Path], wanted: str | None) -> dict[str, list[Path]] | None:
    """Return which of the files are of which split of the configuration `wanted`, or of the default one.

    None where README.md declares no files: their names decide.
    """
    chosen = _configuration(folder, wanted)
    if chosen is None:
        return None
    root = folder / _inside(chosen.get("data_dir") or "", folder)
    below = [file for file in files if file.is_relative_to(root)]
    splits: dict[str, list[Path]] = {}
    if chosen.get("data_files") is None:
        for file in below:
            splits.setdefault(split_of(file)[0], []).append(file)
        return splits or _refuse_missing("the files", [f"{chosen['data_dir']}/**"], folder)
    for split, patterns in _patterns(chosen["data_files"], folder).items():
        splits[split] = _matching(below, root, patterns)
        if not splits[split]:
            _refuse_missing(f"the files of the split {split}", patterns, root)
    _refuse_shared(splits, folder)
    return splits


def _configuration(folder: Path, wanted: str | None) -> Mapping[str, Any] | None:
    """Return the declared configuration of that name, or the default one; None where none declares files."""
    configurations = [each for each in _configurations(folder) if each.keys() & {"data_files", "data_dir"}]
    if not configurations:
        return None
    by_name = {str(each.get("config_name", _DEFAULT)): each for each in configurations}
    if len(by_name) < len(configurations):
        raise DataError(f"{folder / _FILE} declares a configuration twice. Restore the file.")
    default = [name for name, each in by_name.items() if each.get("default") is True or len(by_name) == 1]
    name = wanted or next(iter([*default, _DEFAULT]))
    if name not in by_name:
        which = (
            f"no configuration {shortened(wanted)!r}" if wanted else "several configurations, none of them the default"
        )
        raise DataError(
            f"{folder / _FILE} declares {which}: {some(sorted(by_name))}. Name one of them: "
            "hub:OWNER/NAME/CONFIGURATION."
        )
    return by_name[name]


def _configurations(folder: Path) -> list[Mapping[str, Any]]:
    """Return the entries of `configs` in the YAML at the top of README.md."""
    file = folder / _FILE
    if not file.is_file():
        return []
    try:
        text = read_regular(file.resolve(), _MOST_BYTES).decode().replace("\r\n", "\n")  # downloads are links
        found = _FRONT_MATTER.match(text)
        if found is None or not re.search(r"^configs\s*:", found[1], re.M):
            return []
        entries = safe_yaml.parse(found[1])["configs"]
    except (OSError, UnicodeDecodeError, safe_yaml.YamlError) as error:
        raise DataError(f"The declaration of the dataset in {file} cannot be read ({error}). Restore it.") from error
    if not isinstance(entries, list) or not all(isinstance(each, Mapping) for each in entries):
        raise _unclear(folder)
    return entries


def _patterns(declared: Any, folder: Path) -> dict[str, list[str]]:
    """Return the patterns of every split: a pattern or a list of them is the training split."""
    if isinstance(declared, list) and declared and all(isinstance(each, Mapping) for each in declared):
        pairs = [(each.get("split"), each.get("path")) for each in declared]
    else:
        pairs = list(declared.items()) if isinstance(declared, Mapping) else [("train", declared)]
    found = {}
    for split, paths in pairs:
        several = [paths] if isinstance(paths, str) else paths
        if not isinstance(split, str) or not isinstance(several, list) or not several or split_name(split) in found:
            raise _unclear(folder)
        found[split_name(split)] = [_inside(each, folder) for each in several]
    return found


def _inside(path: Any, folder: Path) -> str:
    """Return a path or pattern of the declaration, which must be of files in the folder."""
    if not isinstance(path, str):
        raise _unclear(folder)
    if "://" in path or path.startswith("/") or ".." in path.split("/"):
        raise DataError(f"{folder / _FILE} names files that are not in the folder: {shortened(path)!r}.")
    return path.removeprefix("./")


def _matching(files: Sequence[Path], root: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files that match one of the patterns."""
    return [file for file in files if any(_matches(file.relative_to(root).parts, each) for each in patterns)]


def _matches(parts: Sequence[str], pattern: str) -> bool:
    """Say whether a path, in parts, matches a pattern: * is within a part, ** is any number of parts."""
    reached = {0}  # how many parts may have been matched so far
    for part in pattern.split("/"):
        if part == "**":
            reached = set(range(min(reached), len(parts) + 1)) if reached else reached
        else:
            reached = {place + 1 for place in reached if place < len(parts) and fnmatchcase(parts[place], part)}
    return len(parts) in reached


def _refuse_shared(splits: Mapping[str, list[Path]], folder: Path) -> None:
    seen: dict[Path, str] = {}
    for split, files in splits.items():
        for file in files:
            if file in seen:
                raise DataError(
                    f"{folder / _FILE} declares {file.relative_to(folder)} to be of two splits, {seen[file]} and "
                    f"{split}. Correct it: test images must not be trained on."
                )
            seen[file] = split


def _refuse_missing(what: str, patterns: Sequence[str], root: Path) -> NoReturn:
    raise DataError(
        f"{_FILE} says that {what} are {some(patterns)}, but {root} holds no such Parquet file. Download the whole "
        f"dataset; or remove {_FILE}, and the names of the files decide."
    )


def _unclear(folder: Path) -> DataError:
    return DataError(
        f"What {folder / _FILE} declares under configs is not understood. Expected: a list of configurations, each "
        "with config_name and data_files, a list of split and path."
    )
