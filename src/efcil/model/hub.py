"""Models on the Hugging Face Hub: uploaded with a README.md, downloaded file by file and checked like any folder.

huggingface_hub has a base class for such models (ModelHubMixin). It is not used: it must be imported to define a class,
and huggingface_hub is an extra; it writes a config.json of constructor arguments, which a model folder has no place
for; and what it finds in a downloaded config.json becomes constructor arguments. Parameters have its names.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efcil.engine import checkpoint
from efcil.errors import EfcilError, shortened
from efcil.model import folder as model_folder
from efcil.model.card import ModelError
from efcil.model.in_memory import Model
from efcil.model.readme import NAME, REPOSITORY, check_licence, write_readme

_DESCRIPTION = f"{model_folder.STEM}.json"
_TENSORS = f"{model_folder.STEM}-*.safetensors"


@dataclass(frozen=True)
class Download:
    """Which state of a repository to download, and how."""

    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False


@dataclass(frozen=True)
class Upload:
    """How to upload a model."""

    private: bool | None = None
    token: str | bool | None = None
    commit_message: str = "Upload a model of efcil"
    revision: str | None = None
    create_pr: bool = False
    licence: str | None = None


@contextmanager
def fetched(name_or_folder: str | Path, wanted: Download) -> Iterator[Path]:
    """Yield a folder with the model of that name: the folder itself, or one with what was downloaded.

    The Hub's cache consists of links, and a model folder must not: the two files are copied to a folder that exists
    as long as the context.
    """
    local, name = Path(name_or_folder).expanduser(), str(name_or_folder)
    if local.exists() or isinstance(name_or_folder, Path):
        yield local
        return
    _refuse_other_names(name)
    with tempfile.TemporaryDirectory(prefix="efcil-") as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        try:
            _download(name, wanted, folder)
            yield folder
        except EfcilError as error:
            raise ModelError(str(error).replace(str(folder), f"{name} (Hub)")) from None


def push(model: Model, repository: str, wanted: Upload) -> str:
    """Upload a model and its README.md, replacing the model that is there; return the address of the commit."""
    check_licence(wanted.licence)
    _refuse_other_names(repository)
    card, tensors = model.card, model.tensors()
    library = _library()
    with tempfile.TemporaryDirectory(prefix="efcil-") as temporary:
        folder = Path(temporary) / "model"
        model_folder.write(folder, card, tensors)
        write_readme(folder, card, wanted.licence, repository)
        try:
            api = library.HfApi(token=wanted.token, library_name="efcil")
            api.create_repo(repository, private=wanted.private, exist_ok=True)
            if wanted.revision is not None and not wanted.revision.startswith("refs/"):
                api.create_branch(repository, branch=wanted.revision, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message=wanted.commit_message,
                revision=wanted.revision,
                create_pr=wanted.create_pr,
                allow_patterns=[_DESCRIPTION, _TENSORS, NAME],
                delete_patterns=[_TENSORS],  # of earlier states: their names differ
            )
        except Exception as error:  # every network library below has its own family of errors
            raise ModelError(
                f"{repository} could not be uploaded to the Hub ({_reason(error)}). Check the name, the token "
                "(`hf auth login`) and the network."
            ) from error
    return str(getattr(commit, "pr_url", None) or commit.commit_url)


def _download(name: str, wanted: Download, folder: Path) -> None:
    """Put description and tensors of a model into a folder; both are of one commit."""
    described = _file(name, _DESCRIPTION, wanted.revision, wanted)
    shutil.copyfile(described, folder / _DESCRIPTION)
    tensors = checkpoint.described_file(folder, model_folder.STEM)  # checked: it cannot point elsewhere
    shutil.copyfile(_file(name, tensors.name, described.parent.name, wanted), tensors)


def _file(name: str, file: str, revision: str | None, wanted: Download) -> Path:
    """Return a file of a repository in the Hub's cache, downloaded if it is not there."""
    library = _library()
    try:
        found = library.hf_hub_download(
            name,
            file,
            revision=revision,
            token=wanted.token,
            cache_dir=wanted.cache_dir,
            local_files_only=wanted.local_files_only,
            library_name="efcil",
        )
    except Exception as error:  # every network library below has its own family of errors
        raise ModelError(
            f"{file} of {name} could not be loaded from the Hub ({_reason(error)}). Check the name, the revision, the "
            "token (`hf auth login`) and the network; or give a folder."
        ) from error
    return Path(found)


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise ModelError(
            "The Hugging Face Hub needs the package huggingface_hub: pip install 'efcil[hub]'. Folders work without."
        ) from None
    return huggingface_hub


def _refuse_other_names(name: str) -> None:
    if not REPOSITORY.fullmatch(name):
        raise ModelError(
            f"{shortened(name)!r} is neither a folder nor the name of a repository on the Hub, which is OWNER/NAME."
        )


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")
