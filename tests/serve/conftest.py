"""A model of three classes that is learned in a fraction of a second, and a client that asks its server."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from held_teacher import HOLD
from serving import NAMES, PATIENCE, Digits

from efcil.classifier import IncrementalClassifier

ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="session")
def digits() -> Digits:
    return Digits()


@pytest.fixture(scope="session")
def trained(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows zero and one. Later tasks have many short epochs."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    pixels = np.concatenate([digits.pixels[name][:16] for name in NAMES[:2]])
    settings: dict[str, Any] = {
        "preset": "digits",
        "first_task_epochs": 1,
        "epochs": 60,
        "device": "cpu",
        "batch_size": 8,
    }
    IncrementalClassifier(**settings).fit(pixels, ["zero"] * 16 + ["one"] * 16).save(folder)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of that model, to do with as one likes."""
    return Path(shutil.copytree(trained, tmp_path / "things"))


@pytest.fixture(autouse=True)
def quiet_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes about teachings go to a folder of the test's own, and teaching processes use one thread."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("EFCIL_TOKEN", raising=False)


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file: while it exists, teachings wait after their first epoch, unless they are asked to stop."""
    from efcil.serve import jobs

    monkeypatch.setattr(jobs, "COMMAND", (sys.executable, str(Path(__file__).with_name("held_teacher.py"))))
    monkeypatch.setenv(HOLD, str(tmp_path / "hold"))
    (tmp_path / "hold").touch()
    return tmp_path / "hold"


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """Return a function that serves a model folder and returns a client; all are closed at the end."""
    from starlette.testclient import TestClient

    from efcil.serve.app import create_app
    from efcil.serve.options import Limits, ServeOptions

    clients = []

    def begin(folder: Path, limits: Limits | None = None, **options: Any) -> TestClient:
        chosen = ServeOptions(folder, device="cpu", limits=limits or Limits(rate=0, seconds=PATIENCE), **options)
        client = TestClient(create_app(chosen), base_url=ADDRESS)
        client.__enter__()
        clients.append(client)
        return client

    yield begin
    for client in clients:
        client.__exit__(None, None, None)


@pytest.fixture
def client(folder: Path, serve: Callable[..., Any]) -> Any:
    return serve(folder)
