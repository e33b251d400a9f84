"""The real server: started as a command, killed at the worst moment, started again."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from held_teacher import HOLD
from serving import PATIENCE, Digits, ended, form, learning, until

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("python_multipart")
httpx = pytest.importorskip("httpx")


HELD = str(Path(__file__).with_name("held_server.py"))


@contextmanager
def running(folder: Path, hold: Path | None = None) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """Start a server; with `hold`, its teachings wait after their first epoch as long as that file exists."""
    start = ["-m", "efcil"] if hold is None else [HELD]
    command = [sys.executable, *start, "serve", str(folder), "--port", "0", "--device", "cpu", "--rate", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {HOLD: str(hold)})
    try:
        assert process.stdout is not None
        address = re.search(r"http://[\d.:]+", process.stdout.readline())
        assert address is not None
        with httpx.Client(base_url=address[0], timeout=PATIENCE) as client:
            until(lambda: _status(client), lambda status: status in (200, 503))
            yield process, client
    finally:
        process.kill()
        process.wait()


def _status(client: Any) -> int:
    try:
        return client.get("/health").status_code
    except httpx.TransportError:
        return 0


def _child_of(process: subprocess.Popen[str]) -> int:
    """Return the number of the teaching process."""
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            for number in (task / "children").read_text().split():
                return int(number)
    raise AssertionError("there is no teaching process")


def _gone(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def begun(folder: Path, digits: Digits, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """Return a server in the middle of a teaching, and its client."""
    (tmp_path / "hold").touch()
    with running(folder, tmp_path / "hold") as (server, client):
        learning(client, client.post("/api/teach", files=form(two=digits.train("two"))).raise_for_status().json())
        yield server, client


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are found through /proc")
@pytest.mark.parametrize("both", [False, True], ids=["the server", "both processes"])
def test_killed_during_teaching_and_started_again(
    folder: Path, digits: Digits, begun: tuple[subprocess.Popen[str], Any], both: bool
) -> None:
    server, client = begun
    old = client.get("/api/model").json()["version"]
    child = _child_of(server)
    if both:
        os.kill(child, signal.SIGKILL)
    server.kill()
    server.wait()
    # Without its server, the teaching saves its state and ends.
    until(lambda: _gone(child), bool)
    with running(folder) as (_, client):
        described = client.get("/api/model").json()
        assert described["version"] == old
        assert described["unfinished"] == {"classes": ["two"], "saved": not both, "problem": None}
        assert client.post("/api/predict", content=digits.test("one")[0]).status_code == 200
        job = client.post("/api/teach", files=form(two=digits.train("two"))).raise_for_status().json()
        assert ended(client, job)["state"] == "done"
        described = client.get("/api/model").json()
        assert (described["classes"], described["unfinished"]) == (3, None)


def test_ctrl_c_saves_what_is_being_learned(folder: Path, begun: tuple[subprocess.Popen[str], Any]) -> None:
    server, _ = begun
    server.send_signal(signal.SIGINT)
    assert server.wait(PATIENCE) in (0, 130, -signal.SIGINT)
    assert (folder / "partial" / "state.json").exists()


def test_a_second_ctrl_c_still_saves_what_is_being_learned(
    folder: Path, begun: tuple[subprocess.Popen[str], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    server, client = begun
    with socket.create_connection((client.base_url.host, client.base_url.port)) as unfinished:
        # The server waits for this request when it ends, so that the second Ctrl-C finds it there.
        unfinished.sendall(b"POST /api/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n")
        server.send_signal(signal.SIGINT)
        until(lambda: _status(client), lambda status: status == 0)
        server.send_signal(signal.SIGINT)
    assert server.wait(PATIENCE) in (0, 130, -signal.SIGINT)
    assert (folder / "partial" / "state.json").exists()
    assert "Traceback" not in capfd.readouterr().err


def test_a_port_that_is_taken_is_a_sentence(folder: Path) -> None:
    with running(folder) as (_, client):
        command = [sys.executable, "-m", "efcil", "serve", str(folder), "--port", str(client.base_url.port)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert second.returncode == 2
        assert "Choose another --port" in second.stderr
