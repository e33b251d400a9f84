"""Parquet shards from the Hugging Face Hub, where there is a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from efcil.errors import DataError

#: README.md declares which files are of which split.
_WANTED = ["*.parquet", "README.md"]


def download(repository: str, title: str, expected: str, revision: str | None = None) -> Path:
    """Download the Parquet files of a dataset of the Hub, or find them in its cache; return their folder."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise DataError(
            f"{title} has no path, and downloading it needs the package huggingface_hub: install it, or give "
            f"a path. {expected}"
        ) from error
    more: dict[str, Any] = {} if revision is None else {"revision": revision}
    try:
        return Path(snapshot_download(repository, repo_type="dataset", allow_patterns=_WANTED, **more))
    except Exception as error:  # every network library below has its own family of errors
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        raise DataError(
            f"{title} has no path and could not be downloaded from the Hub ({reason}). Check the network, or "
            f"give a path. {expected}"
        ) from error
