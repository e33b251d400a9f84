"""What MkDocs needs to make a site of docs/: files outside of it that pages link to come along.

Pages are written for readers of the repository, so they link to `../benchmarks/results/cifar100.csv` and the like. On
the site such a file lies beside the pages, under the same path from the root.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

LINK = re.compile(r"(?<=\]\()(?P<target>\.\./[^)#\s]+)")


def _outside(page: str, target: str) -> str | None:
    """Return the path from the root of the repository of a link that leaves docs/, nothing for one that does not."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") else path


def on_files(files: Any, config: Any) -> Any:
    """Add what the pages link to outside of docs/."""
    root = Path(config.config_file_path).parent
    for page in list(files.documentation_pages()):
        for match in LINK.finditer(Path(page.abs_src_path).read_text(encoding="utf-8")):
            path = _outside(page.src_uri, match["target"])
            if path and (root / path).is_file() and files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave docs/ to where the site has these files."""

    def moved(match: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, match["target"])
        return posixpath.relpath(path, posixpath.dirname(page.file.src_uri) or ".") if path else match["target"]

    return LINK.sub(moved, markdown)
