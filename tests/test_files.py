"""Files of our own only: links, pipes and devices in their places; locks; folders that survive a power cut."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from efcil import files
from efcil.data.images import Dataset
from efcil.data.sources import SourceOptions, load_dataset
from efcil.engine import checkpoint
from efcil.engine.checkpoint import TaskKeeper
from efcil.engine.interrupt import StopRequest
from efcil.engine.progress import Progress
from efcil.errors import EfcilError, RunFolderError
from efcil.experiment import run_one
from efcil.experiment.shared_tasks import SharedTask, SharedTaskStore
from efcil.files import (
    ForeignFile,
    is_lock,
    locked,
    make_folder,
    open_regular,
    read_regular,
    write_atomically,
    write_own,
)
from efcil.runfolder import RunFolder, locate
from efcil.settings import Settings

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no such pipes")
SECRET = "somebody else's\n"


def link(path: Path) -> None:
    target = path.parent.parent / f"target of {path.name}"
    target.write_text(SECRET)
    path.symlink_to(target)


def dangling(path: Path) -> None:
    path.symlink_to(path.parent.parent / f"target of {path.name}")


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


#: What may stand in the place of a file, and how it is made.
STRANGERS: dict[str, Callable[[Path], None]] = {
    "a symbolic link": link,
    "a symbolic link ": dangling,
    "a symbolic link  ": device,
    "a named pipe": os.mkfifo,
    "a folder": Path.mkdir,
}


@pytest.fixture(params=STRANGERS)
def stranger(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], None]]:
    """Return what puts something foreign at a path; at the end it must be there as it was."""
    made: list[Path] = []

    def put(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        STRANGERS[request.param](path)
        made.append(path)

    yield put
    for path in made:
        target = path.parent.parent / f"target of {path.name}"
        assert path.is_symlink() == request.param.startswith("a symbolic link")
        if request.param == "a symbolic link":
            assert target.read_text() == SECRET
        else:
            assert not target.exists()


# -- single files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda path: open_regular(path, "ab").close(),
        lambda path: open_regular(path, "ab+").close(),
        lambda path: open_regular(path, "rb").close(),
        lambda path: read_regular(path, 100),
        lambda path: write_own(path, "new"),
        lambda path: locked(path).__enter__(),
    ],
    ids=["append", "append and read", "read", "read all", "write", "lock"],
)
def test_only_regular_files_are_opened(
    stranger: Callable[[Path], None], use: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "folder" / "file"
    stranger(path)
    with pytest.raises(ForeignFile, match=r"file is a \S+( \S+)?, but efcil writes a file there"):
        use(path)
    assert [each.name for each in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("mode", ["ab", "rb"])
def test_what_is_put_in_place_after_looking_is_not_opened(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "refuse_foreign_file", lambda path: None)
    (tmp_path / "target").write_text(SECRET)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises((OSError, ForeignFile)):
            open_regular(tmp_path / name, mode)


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file", 5) == read_regular(tmp_path / "file") == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_regular(tmp_path / "file", 4)


def test_a_log_that_is_no_file_is_not_written_to(
    stranger: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run" / "log.txt"
    stranger(log)
    progress = Progress(1, log, quiet=True)
    progress.log("a line")
    progress.log("another line")
    assert capsys.readouterr().err.count("log.txt is a ") == 1


# -- checkpoints -----------------------------------------------------------------------------------------------------

TENSORS = {"weight": torch.arange(3.0)}


@pytest.mark.parametrize("stem", ["state", "model"])
def test_checkpoints_in_which_a_file_is_another_thing(
    stem: str, stranger: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    checkpoint.write(folder, TENSORS, {"n": 1}, stem)
    for file in (next(folder.glob("*.safetensors")), folder / f"{stem}.json"):
        file.unlink()
        stranger(file)
        with pytest.raises(ForeignFile):
            checkpoint.read(folder, stem)
        with pytest.raises(ForeignFile):
            checkpoint.write(folder, TENSORS, {"n": 1}, stem)
    assert checkpoint.exists(folder, stem)


@pytest.mark.parametrize(
    "use",
    [
        lambda folder: checkpoint.write(folder, {"weight": torch.zeros(1)}, {}),
        checkpoint.remove,
        checkpoint.read,
        checkpoint.read_and_tidy,
        lambda folder: TaskKeeper(folder, lambda position: {}, StopRequest(), lambda position: KeyboardInterrupt()),
    ],
    ids=["write", "remove", "read", "read and tidy", "keep"],
)
def test_a_folder_of_our_own_that_is_a_link(use: Callable[[Path], object], tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "other", TENSORS, {"n": 1})
    before = sorted(path.name for path in (tmp_path / "other").iterdir())
    (tmp_path / "partial").symlink_to(tmp_path / "other")
    with pytest.raises(ForeignFile, match="partial is a symbolic link, but efcil writes a folder"):
        use(tmp_path / "partial")
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == before
    assert checkpoint.read(tmp_path / "other").facts == {"n": 1}


def test_a_model_folder_that_the_user_names_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "disk")
    for n in (1, 2):
        checkpoint.write(tmp_path / "model", {"weight": torch.full((2,), float(n))}, {"n": n}, "model")
    assert checkpoint.read(tmp_path / "disk", "model").facts == {"n": 2}
    assert len(list((tmp_path / "disk").iterdir())) == 2


def test_leftovers_that_are_no_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    checkpoint.write(folder, TENSORS, {})
    for name in ("state-0123456789abcdef.safetensors", ".state.json.x.tmp"):
        (folder / name).mkdir()
    checkpoint.read_and_tidy(folder)
    RunFolder(folder).remove_leftovers()
    assert len(list(folder.iterdir())) == 4


def test_first_tasks_behind_a_link_are_neither_read_nor_written(tmp_path: Path) -> None:
    store = SharedTaskStore(tmp_path)
    record = SharedTask(dict(TENSORS), [], 1.0, [])
    store.save("other", record, {})
    store.place("key").symlink_to(store.place("other"))
    with pytest.raises(ForeignFile, match="key is a symbolic link"):
        store.load("key", {})
    with pytest.raises(ForeignFile, match="key is a symbolic link"):
        store.save("key", record, {})


# -- runs and models -------------------------------------------------------------------------------------------------

SHORT: dict[str, Any] = {
    "method": "finetune", "scenario": "custom", "tasks": 2, "first_task_epochs": 1, "epochs": 1, "device": "cpu",
}  # fmt: skip
IN_A_RUN = (".lock", "settings.yaml", "metrics.jsonl", "accuracy.csv", "summary.json", "log.txt")


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset("digits", None, SourceOptions())


@pytest.mark.parametrize("name", IN_A_RUN)
def test_a_run_refuses_what_is_no_file_before_it_trains(
    name: str, stranger: Callable[[Path], None], digits: Dataset, tmp_path: Path
) -> None:
    settings = Settings(**SHORT)
    run = locate(tmp_path, settings)
    stranger(run.path / name)
    with pytest.raises(ForeignFile, match=rf"{name} is a "):
        run_one(settings, tmp_path, digits, quiet=True)
    assert [path.name for path in run.path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["model", "partial"])
def test_a_run_refuses_folders_that_are_links(name: str, digits: Dataset, tmp_path: Path) -> None:
    settings = Settings(**SHORT)
    run = locate(tmp_path, settings)
    checkpoint.write(tmp_path / "other", TENSORS, {})
    run.path.mkdir(parents=True)
    (run.path / name).symlink_to(tmp_path / "other")
    with pytest.raises(ForeignFile, match=rf"{name} is a symbolic link"):
        run_one(settings, tmp_path, digits, quiet=True)
    assert len(list((tmp_path / "other").iterdir())) == 2


@pytest.mark.parametrize("name", ["settings.yaml", "metrics.jsonl", "accuracy.csv", "summary.json"])
def test_a_run_is_not_read_through_links_and_pipes(name: str, stranger: Callable[[Path], None], tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    stranger(run.path / name)
    use: Callable[[], object] = {
        "settings.yaml": run.read_settings,
        "metrics.jsonl": lambda: run.append_metrics({"task": 1}),
        "accuracy.csv": run.read_accuracy,
        "summary.json": run.read_summary,
    }[name]
    with pytest.raises(ForeignFile, match=rf"{name} is a "):
        use()


def test_an_output_that_is_a_link_is_the_users_choice(digits: Dataset, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    folder = run_one(Settings(**SHORT), tmp_path / "runs", digits, quiet=True)
    assert RunFolder(folder).is_finished()
    assert len(list((tmp_path / "disk").rglob("summary.json"))) == 1


# -- locks -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["ENOLCK", "EOPNOTSUPP", "no fcntl"])
def without_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file system, or a whole system, without locks."""

    class Refusing:
        LOCK_EX, LOCK_NB = 2, 4

        @staticmethod
        def flock(stream: object, operation: int) -> None:
            number = getattr(errno, request.param)
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "fcntl", None if request.param == "no fcntl" else Refusing)
    monkeypatch.setattr(files, "POLL_SECONDS", 0.01)
    files._warn_of_no_locks.cache_clear()
    yield
    files._warn_of_no_locks.cache_clear()


@pytest.mark.usefixtures("without_locks")
class TestWithoutLocks:
    def test_it_is_said_once_and_a_second_writer_is_refused(self, tmp_path: Path) -> None:
        lock = tmp_path / "model" / ".lock"
        first, second = locked(lock), locked(lock)
        with pytest.warns(UserWarning, match="Files cannot be locked here"):
            first.__enter__()
        assert is_lock(lock)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RunFolderError, match=f"another process .number {os.getpid()}."):
                second.__enter__()
        assert lock.exists(), "the one who was refused leaves the lock alone"
        first.__exit__(None, None, None)
        assert not lock.exists()
        with locked(lock):
            assert lock.exists()

    @pytest.mark.filterwarnings("ignore:Files cannot be locked")
    def test_a_running_process_of_this_computer_is_waited_for(self, tmp_path: Path) -> None:
        other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        (tmp_path / ".lock").write_text(f"{other.pid} {files._host()}\n")
        asked: list[str] = []

        def waiting(owner: str) -> None:
            if not asked:
                other.communicate(b"\n")
            asked.append(owner)

        with pytest.raises(RunFolderError, match=f"number {other.pid}"):
            locked(tmp_path / ".lock").__enter__()
        with locked(tmp_path / ".lock", waiting):
            assert (tmp_path / ".lock").read_text().startswith(f"{os.getpid()} ")
        assert asked == [f"number {other.pid}"]

    @pytest.mark.filterwarnings("ignore:Files cannot be locked")
    @pytest.mark.parametrize("content", ["", "{", "gone", "mine", "1" * 30])
    def test_what_is_left_of_a_process_that_has_ended_is_replaced(self, content: str, tmp_path: Path) -> None:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        # A container starts its processes with the same numbers every time.
        known = {"gone": f"{ended.pid} {files._host()}\n", "mine": f"{os.getpid()} {files._host()}\n"}
        (tmp_path / ".lock").write_text(known.get(content, content))
        with locked(tmp_path / ".lock"):
            assert (tmp_path / ".lock").read_text() == f"{os.getpid()} {files._host()}\n"
        assert not (tmp_path / ".lock").exists()

    @pytest.mark.filterwarnings("ignore:Files cannot be locked")
    def test_a_process_of_another_computer_counts_as_running(self, tmp_path: Path) -> None:
        (tmp_path / ".lock").write_text("1 elsewhere\n")
        with pytest.raises(RunFolderError, match=r"number 1 on elsewhere.*if it has ended, remove .*\.lock"):
            locked(tmp_path / ".lock").__enter__()


def test_a_full_disk_at_the_lock_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "_open_lock", full)
    with pytest.raises(RunFolderError, match="cannot be written"):
        locked(tmp_path / ".lock").__enter__()


@pytest.mark.parametrize(("number", "remedy"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "make this one")])
def test_what_to_do_about_a_folder_depends_on_the_error(
    number: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("efcil.files.os.fsync", fails)
    with pytest.raises(RunFolderError, match=f"Nothing can be written.*choose another folder, or {remedy}"):
        files.refuse_unwritable(tmp_path, 0)


# -- folders ---------------------------------------------------------------------------------------------------------


def test_the_parents_of_new_folders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    if not Path("/proc/self/fd").exists():
        pytest.skip("nothing says which folder is synced")
    monkeypatch.setattr(os, "fsync", watched)
    for use in (
        lambda place: make_folder(place),
        lambda place: checkpoint.write(place, TENSORS, {}),
        lambda place: files.refuse_unwritable(place, 0),
        lambda place: RunFolder(place).append_metrics({"task": 1}),
        lambda place: locked(place / ".lock").__enter__(),
    ):
        synced.clear()
        use(tmp_path / "a" / "b" / "c")
        assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= set(synced)
        synced.clear()
        make_folder(tmp_path / "a" / "b" / "c")
        assert synced == []
        shutil.rmtree(tmp_path / "a")


@pytest.mark.parametrize("call", ["tempfile.mkstemp", "os.fsync", "os.replace"])
def test_a_file_that_cannot_be_written_is_named_as_the_user_knows_it(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **keywords: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", ".x.tmp", None, "x")

    monkeypatch.setattr(f"efcil.files.{call}", full)
    with pytest.raises(OSError, match="No space left") as failed:
        write_atomically(tmp_path / "x", "text")
    assert (failed.value.filename, failed.value.filename2) == (str(tmp_path / "x"), None)
    assert not list(tmp_path.iterdir())


def test_foreign_files_are_errors_of_the_user() -> None:
    assert issubclass(ForeignFile, EfcilError)
