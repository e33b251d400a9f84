"""Teaching through the server: the old model answers until the new one takes over, and nothing is ever lost."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving import Digits, ended, form, learning, until

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("python_multipart")
pytest.importorskip("httpx")

from efcil.model import Model
from efcil.model.images import Pictures
from efcil.model.teaching import teach
from efcil.serve import note
from efcil.serve.jobs import Job, Jobs
from efcil.serve.keeper import Keeper
from efcil.serve.metrics import Metrics
from efcil.serve.options import ServeOptions


def ask(client: Any, image: bytes) -> dict[str, Any]:
    answer = client.post("/api/predict", content=image)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def begin(client: Any, **classes: list[bytes]) -> dict[str, Any]:
    answer = client.post("/api/teach", files=form(**classes))
    assert answer.status_code == 202, answer.text
    found: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"/api/jobs/{found['id']}"
    return found


def same_tensors(one: Path, other: Path) -> bool:
    first, second = (Model.load(folder, "cpu").tensors() for folder in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_class_is_taught_while_the_old_model_answers(client: Any, folder: Path, hold: Path, digits: Digits) -> None:
    old = client.get("/api/model").json()["version"]
    picture, answers, stop = digits.test("two")[0], [], threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            answers.append(ask(client, picture))

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        job = begin(client, two=digits.train("two"))
        learning(client, job)
        before = len(answers)
        until(lambda: len(answers), lambda count: count > before + 1)
        hold.unlink()
        job = ended(client, job)
        until(lambda: answers[-1]["version"], lambda version: version == job["version"])
    finally:
        stop.set()
        asking.join()
    assert (job["state"], job["error"], job["progress"]) == ("done", None, 1.0)
    assert job["epochs"] == 60
    versions = [each["version"] for each in answers]
    assert versions[0] == old != job["version"]
    assert sorted(versions, key=[old, job["version"]].index) == versions, "once it has changed, it stays so"
    for each in answers:
        names = {entry["name"] for entry in each["predictions"][0]["classes"]}
        assert names == ({"zero", "one"} if each["version"] == old else {"zero", "one", "two"})
    listed = client.get("/api/classes").json()["classes"]
    assert [(each["name"], each["task"]) for each in listed][2:] == [("two", 2)]
    assert 0 < listed[2]["images"] <= 16, "some may be held out, to measure"
    assert client.get("/api/model").json()["unfinished"] is None
    assert note.read(folder) is None
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".safetensors"], "no picture is left behind"
    assert 'efcil_teachings_total{outcome="done"} 1' in client.get("/metrics").text
    refused = client.post("/api/teach", files=form(Two=digits.train("two")[:2]))
    assert refused.status_code == 409
    assert "'two'" in refused.json()["error"]


def test_more_pictures_of_a_known_class(client: Any, digits: Digits) -> None:
    def counts() -> dict[str, int]:
        return {each["name"]: each["images"] for each in client.get("/api/classes").json()["classes"]}

    before = counts()
    assert client.get("/api/model").json()["learns_more"] is True
    job = ended(client, begin(client, one=digits.train("one")))
    assert (job["state"], job["kind"]) == ("done", "more")
    assert counts() == before | {"one": before["one"] + 16}
    assert [each["kind"] for each in client.get("/api/model").json()["visits"]] == ["task", "more"]


def test_known_and_new_classes_together(client: Any, digits: Digits) -> None:
    before = {each["name"]: each["images"] for each in client.get("/api/classes").json()["classes"]}
    lonely = client.post("/api/teach", files=form(one=digits.train("one"), two=digits.train("two")[:1]))
    assert (lonely.status_code, "too few" in lonely.json()["error"]) == (400, True)
    job = ended(client, begin(client, one=digits.train("one"), two=digits.train("two")))
    assert (job["state"], job["kind"]) == ("done", "both")
    after = {each["name"]: each["images"] for each in client.get("/api/classes").json()["classes"]}
    assert after["one"] == before["one"] + 16
    assert 0 < after["two"] <= 16
    assert [each["kind"] for each in client.get("/api/model").json()["visits"]] == ["task", "task", "more"]


def test_stopped_then_resumed_is_as_if_it_had_never_stopped(
    serve: Callable[..., Any], folder: Path, hold: Path, tmp_path: Path, digits: Digits
) -> None:
    hold.unlink()
    whole = Path(shutil.copytree(folder, tmp_path / "whole"))
    uninterrupted = serve(whole)
    assert ended(uninterrupted, begin(uninterrupted, two=digits.train("two")))["state"] == "done"

    hold.touch()
    client = serve(folder)
    before = client.get("/api/model").json()["version"]
    job = begin(client, two=digits.train("two"))
    second = client.post("/api/teach", files=form(three=digits.train("three")))
    assert second.status_code == 409
    assert "learning two" in second.json()["error"]
    learning(client, job)
    assert client.delete(f"/api/jobs/{job['id']}").json()["state"] == "stopping"
    assert ended(client, job)["state"] == "stopped"
    described = client.get("/api/model").json()
    assert described["version"] == before
    assert described["unfinished"] == {"classes": ["two"], "saved": True, "problem": None}
    other = client.post("/api/teach", files=form(three=digits.train("three")))
    assert other.status_code == 409
    assert "unfinished" in other.json()["error"]

    events = client.get(f"/api/jobs/{job['id']}", headers={"Accept": "text/event-stream"})
    assert events.headers["content-type"].startswith("text/event-stream")
    assert '"state": "stopped"' in events.text
    hold.unlink()
    # In another order: the same pictures are the same task.
    assert ended(client, begin(client, two=digits.train("two")[::-1]))["state"] == "done"
    assert client.get("/api/model").json()["unfinished"] is None
    assert same_tensors(folder, whole)


@pytest.mark.usefixtures("hold")
def test_an_unfinished_task_can_be_discarded(client: Any, folder: Path, digits: Digits) -> None:
    job = begin(client, two=digits.train("two"))
    learning(client, job)
    assert client.delete("/api/unfinished").status_code == 409
    client.delete(f"/api/jobs/{job['id']}")
    ended(client, job)
    assert (folder / "partial").exists()
    assert client.delete("/api/unfinished").json()["unfinished"] is None
    assert not (folder / "partial").exists()
    assert note.read(folder) is None


@pytest.mark.usefixtures("hold")
def test_a_teaching_process_that_is_killed_leaves_the_old_model(client: Any, folder: Path, digits: Digits) -> None:
    job = begin(client, two=digits.train("two"))
    learning(client, job)
    client.app.state.service.jobs._process.kill()
    failed = ended(client, job)
    assert failed["state"] == "failed"
    assert "ended unexpectedly" in failed["error"]
    assert len(client.get("/api/classes").json()["classes"]) == 2
    # Nothing was saved, but what was begun is known.
    assert client.get("/api/model").json()["unfinished"] == {"classes": ["two"], "saved": False, "problem": None}


def test_a_first_teaching_creates_the_model(serve: Callable[..., Any], tmp_path: Path, digits: Digits) -> None:
    client = serve(tmp_path / "new")
    alone = client.post("/api/teach", files=form(zero=digits.train("zero")))
    assert alone.status_code == 409
    assert "at least two classes" in alone.json()["error"]
    quick = {"preset": "digits", "epochs": 1}
    service = client.app.state.service
    start = service.jobs.start
    service.jobs.start = lambda *given, **options: start(*given, **options, settings=quick)
    job = ended(client, begin(client, zero=digits.train("zero"), one=digits.train("one")))
    assert (job["state"], job["error"]) == ("done", None)
    assert client.get("/health").json()["ready"] is True
    assert client.get("/api/model").json()["image_size"] == 8
    assert len(ask(client, digits.test("one")[0])["predictions"][0]["classes"]) == 2


def test_what_is_learned_elsewhere_is_used(client: Any, folder: Path, digits: Digits) -> None:
    pixels = digits.pixels["two"][:16]
    teach(folder, Pictures(pixels), ["two"] * 16, lambda start: start, device="cpu")
    until(lambda: client.get("/api/model").json()["classes"], lambda count: count == 3)
    assert len(ask(client, digits.test("two")[0])["predictions"][0]["classes"]) == 3


@pytest.mark.parametrize("gone", [False, True])
def test_a_damaged_or_missing_model_leaves_the_old_one_in_use(
    gone: bool, client: Any, folder: Path, digits: Digits
) -> None:
    card = folder / "model.json"
    kept = Path(shutil.copy(card, folder.parent / "kept.json"))
    card.unlink() if gone else card.write_text("{}")
    problem = until(lambda: client.get("/api/model").json()["problem"], lambda found: found is not None)
    assert "cannot be used" in problem
    assert ("has no model.json" in problem) is gone
    refused = client.post("/api/teach", files=form(two=digits.train("two")))
    assert (refused.status_code, refused.json()["error"]) == (409, problem)
    assert len(ask(client, digits.test("one")[0])["predictions"][0]["classes"]) == 2
    kept.rename(card)
    until(lambda: client.get("/api/model").json()["problem"], lambda found: found is None)


def test_the_model_of_an_experiment_is_not_taught(
    serve: Callable[..., Any], trained: Path, tmp_path: Path, digits: Digits
) -> None:
    (tmp_path / "run").mkdir()
    for name in ("settings.yaml", "log.txt"):
        (tmp_path / "run" / name).write_text("")
    client = serve(Path(shutil.copytree(trained, tmp_path / "run" / "model")))
    answer = client.post("/api/teach", files=form(two=digits.train("two")))
    assert answer.status_code == 409
    assert "experiment" in answer.json()["error"]


@pytest.mark.usefixtures("hold")
def test_the_server_saves_what_is_being_learned_when_it_stops(
    serve: Callable[..., Any], folder: Path, digits: Digits
) -> None:
    client = serve(folder)
    job = begin(client, two=digits.train("two"))
    learning(client, job)
    client.app.state.service.close()
    again = serve(folder)
    assert again.get("/api/model").json()["unfinished"] == {"classes": ["two"], "saved": True, "problem": None}
    assert len(again.get("/api/classes").json()["classes"]) == 2


@pytest.mark.parametrize(
    ("outcome", "asked", "version", "expected"),
    [
        (None, True, "new", "done"),  # the model was in place, and had not been reported yet
        (None, False, "new", "done"),
        (None, True, "old", "stopped"),
        ("stopped", False, "old", "stopped"),  # somebody else has asked the process to stop
        (None, False, "old", "failed"),
        ("learned", True, "new", "done"),
    ],
)
def test_how_a_teaching_ended_whenever_the_request_to_stop_came(
    folder: Path, outcome: str | None, asked: bool, version: str, expected: str
) -> None:
    keeper: Any = SimpleNamespace(current=SimpleNamespace(version=version), problem=None, refresh=lambda: None)
    jobs = Jobs(ServeOptions(folder), keeper, Metrics())
    job = Job("1", {"two": 3}, "task", "now", state="stopping" if asked else "learning", before="old")
    jobs._conclude(job, outcome, -15)
    assert job.state == expected


def test_a_teaching_that_has_ended_leaves_the_next_one_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sees that a teaching has ended may begin another one before the thread of the first has ended."""
    jobs = Jobs(ServeOptions(folder), Keeper(folder, "cpu"), Metrics())
    another: Any = object()
    monkeypatch.setattr(jobs, "_follow", lambda job, process, *_: (process.kill(), setattr(jobs, "_process", another)))
    jobs._run(Job("1", {"two": 3}, "task", "now"), {}, [])
    assert jobs._process is another


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"classes": 3}', "x" * 10])
def test_a_note_that_cannot_be_read_is_no_note(folder: Path, content: str) -> None:
    note.write(folder, note.Begun({"two": 3}, False, "now", None))
    assert note.read(folder) == note.Begun({"two": 3}, False, "now", None)
    assert note.place(folder).stat().st_mode & 0o077 == 0
    note.place(folder).write_text(content)
    assert note.read(folder) is None


def test_classes_are_renamed_merged_and_forgotten(client: Any, folder: Path, digits: Digits) -> None:
    def change(path: str, **body: Any) -> Any:
        return client.post(f"/api/classes/{path}", json=body)

    renamed = change("rename", name="one", to="  uno ")
    assert [each["name"] for each in renamed.json()["classes"]] == ["uno", "zero"]
    assert {each["name"] for each in ask(client, digits.test("one")[0])["predictions"][0]["classes"]} == {"zero", "uno"}
    for path, body in (
        ("rename", {"name": "one", "to": "two"}),
        ("rename", {"name": "uno", "to": "Zero"}),
        ("forget", {"names": ["zero", "uno"]}),
        ("merge", {"names": ["zero"], "into": "zero"}),
    ):
        answer = change(path, **body)
        assert answer.status_code == 409, answer.text
        assert answer.json()["error"]
    for body in (
        {},
        {"name": "uno"},
        {"name": 3, "to": "x"},
        {"name": "uno", "to": "x", "more": 1},
        {"name": "uno", "to": "\n"},
    ):
        assert change("rename", **body).status_code == 400
    assert client.post("/api/classes/forget", content=b"[" * 100_000).status_code in (400, 413)
    forgotten = change("forget", names=["zero"])
    assert [each["name"] for each in forgotten.json()["classes"]] == ["uno"]
    assert Model.load(folder, "cpu").card.labels == ["uno"]
    assert forgotten.json()["version"] == client.get("/api/model").json()["version"] != renamed.json()["version"]
