"""Asking the model: the same answers as everywhere else, whatever else is asked at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import NAMES, Digits, until

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("python_multipart")
pytest.importorskip("httpx")

from efcil.model import Model
from efcil.serve.answering import score
from efcil.serve.batching import Batcher, Outdated
from efcil.serve.keeper import Loaded
from efcil.serve.metrics import Metrics
from efcil.serve.options import Limits
from efcil.serve.refusal import Refused


def test_answers_are_those_of_the_model(client: Any, trained: Path, digits: Digits) -> None:
    images = digits.test("zero") + digits.test("one")
    body = client.post("/api/predict", files=[("image", ("a.png", each)) for each in images]).json()
    model = Model.load(trained, "cpu")
    pixels = np.concatenate([digits.pixels[name][16:] for name in NAMES[:2]])
    expected = score(model, np.repeat(pixels[..., None], 3, axis=3)).probabilities
    labels = [str(label) for label in model.card.labels]
    assert len(body["predictions"]) == len(images) == 16
    for row, answer in zip(expected, body["predictions"], strict=True):
        given = {each["name"]: each["probability"] for each in answer["classes"]}
        np.testing.assert_allclose([given[label] for label in labels], row, atol=1e-5)
        assert answer["classes"][0]["probability"] == max(given.values())
    assert body["version"] == client.get("/api/model").json()["version"]


def test_one_image_as_the_body(client: Any, digits: Digits) -> None:
    image = digits.test("one")[0]
    (single,) = client.post("/api/predict?top=1", content=image).json()["predictions"]
    (in_form,) = client.post("/api/predict", files={"image": image}).json()["predictions"]
    assert len(single["classes"]) == 1
    assert single["classes"][0] == in_form["classes"][0]
    assert client.post("/api/predict", content=b"").status_code == 400
    assert client.post("/api/predict?top=0", content=image).status_code == 400
    assert client.post("/api/predict?unknown=2", content=image).status_code == 400


def test_a_broken_image_among_good_ones_gets_a_sentence(client: Any, digits: Digits) -> None:
    files = [("image", ("good.png", digits.test("one")[0])), ("image", ("bad.png", b"no image"))]
    good, bad = client.post("/api/predict", files=files).json()["predictions"]
    assert good["classes"]
    assert bad["error"].startswith("Picture 2 (bad.png) cannot be read as an image")
    alone = client.post("/api/predict", files=files[1:])
    assert alone.status_code == 422
    assert "bad.png" in alone.json()["error"]


def test_unknown_is_decided_by_the_share(client: Any, digits: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "typicality", lambda self, pixels: np.full(len(pixels), 0.2), raising=False)
    image = digits.test("one")[0]
    answers = [
        client.post(f"/api/predict{query}", content=image).json()["predictions"][0]
        for query in ("", "?unknown=0.3", "?unknown=0.1")
    ]
    assert [each["unknown"] for each in answers] == [False, True, False]
    assert answers[0]["typicality"] == 0.2


def test_requests_at_the_same_time_get_their_own_answers(client: Any, digits: Digits) -> None:
    images = digits.test("zero") + digits.test("one") + digits.test("two")

    def ask(image: bytes) -> Any:
        return client.post("/api/predict", content=image).json()["predictions"][0]

    def numbers(answer: Any) -> dict[str, float]:
        return {each["name"]: each["probability"] for each in answer["classes"]}

    alone = [numbers(ask(image)) for image in images]
    with ThreadPoolExecutor(16) as pool:
        together = [numbers(answer) for answer in pool.map(ask, images * 8)]
    for one, other in zip(alone * 8, together, strict=True):
        assert one.keys() == other.keys()
        np.testing.assert_allclose([one[name] for name in one], [other[name] for name in one], atol=1e-5)


def test_an_empty_folder_is_served_and_says_so(serve: Any, tmp_path: Path, digits: Digits) -> None:
    client = serve(tmp_path / "new")
    answer = client.post("/api/predict", content=digits.test("one")[0])
    assert answer.status_code == 409
    assert "not learned any class yet" in answer.json()["error"]
    assert client.get("/health").status_code == 503
    assert client.get("/health").json() == {"live": True, "ready": False}
    described = client.get("/api/model").json()
    assert (described["ready"], described["classes"], described["version"]) == (False, 0, None)
    assert not (tmp_path / "new").exists()


# -- the worker ------------------------------------------------------------------------------------------------------


@pytest.fixture
def loaded(trained: Path) -> Loaded:
    return Loaded(Model.load(trained, "cpu"), "one", ())


def pixels_of(digits: Digits, name: str) -> np.ndarray:
    return np.repeat(digits.pixels[name][:, :, :, None], 3, axis=3)


def test_what_waits_is_scored_together(loaded: Loaded, digits: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, gate = [], threading.Event()

    def slow(model: Model, pixels: np.ndarray) -> Any:
        gate.wait(60)
        sizes.append(len(pixels))
        return score(model, pixels)

    monkeypatch.setattr("efcil.serve.batching.score", slow)
    batcher = Batcher(lambda: loaded, 512, Metrics())
    images = pixels_of(digits, "zero")
    waiting = [batcher.submit(images[number : number + 2]) for number in range(0, 20, 2)]
    gate.set()
    answers = [each.result(60) for each in waiting]
    batcher.close()
    assert sum(sizes) == 20
    assert len(sizes) <= 2, f"{sizes}: what comes while the first batch is scored is one batch"
    expected = score(loaded.model, images[:20]).probabilities
    np.testing.assert_allclose(np.concatenate([each.scored.probabilities for each in answers]), expected, atol=1e-5)


def test_a_batch_is_no_larger_than_a_piece(loaded: Loaded, digits: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, gate = [], threading.Event()

    def slow(model: Model, pixels: np.ndarray) -> Any:
        gate.wait(60)
        sizes.append(len(pixels))
        return score(model, pixels)

    monkeypatch.setattr("efcil.serve.batching.score", slow)
    monkeypatch.setattr(Model, "piece", 4)
    batcher = Batcher(lambda: loaded, 512, Metrics())
    waiting = [batcher.submit(pixels_of(digits, "one")[:3]) for _ in range(5)]
    gate.set()
    assert all(len(each.result(60).scored.probabilities) == 3 for each in waiting)
    batcher.close()
    assert sizes == [3] * 5


def test_too_much_waiting_is_refused(loaded: Loaded, digits: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr("efcil.serve.batching.score", lambda *given: gate.wait(60) and score(*given))
    batcher = Batcher(lambda: loaded, 8, Metrics())
    images = pixels_of(digits, "one")[:4]
    accepted = [batcher.submit(images)]
    until(lambda: batcher.waiting, lambda waiting: waiting == 0)

    def fill() -> None:
        for _ in range(3):  # one batch is being scored, two wait, the fourth is too much
            accepted.append(batcher.submit(images))

    with pytest.raises(Refused) as refused:
        fill()
    assert refused.value.status == 503
    assert refused.value.headers["Retry-After"]
    gate.set()
    assert len(accepted) == 3
    assert all(len(each.result(60).scored.probabilities) == 4 for each in accepted)
    batcher.close()


def test_a_failure_is_answered_and_the_next_batch_scored(
    loaded: Loaded, digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def failing(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("out of memory")
        return score(*given)

    monkeypatch.setattr("efcil.serve.batching.score", failing)
    batcher = Batcher(lambda: loaded, 8, Metrics())
    images = pixels_of(digits, "one")[:1]
    with pytest.raises(RuntimeError, match="out of memory"):
        batcher.submit(images).result(60)
    assert batcher.submit(images).result(60).loaded is loaded
    batcher.close()


def test_images_for_a_model_of_another_size_are_prepared_again(loaded: Loaded) -> None:
    batcher = Batcher(lambda: loaded, 8, Metrics())
    with pytest.raises(Outdated):
        batcher.submit(np.zeros((1, 16, 16, 3), np.uint8)).result(60)
    batcher.close()


def test_slow_answers_end(folder: Path, serve: Any, digits: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve(folder, Limits(rate=0, seconds=0.2))
    gate = threading.Event()
    monkeypatch.setattr("efcil.serve.batching.score", lambda *given: gate.wait(60) and score(*given))
    answer = client.post("/api/predict", content=digits.test("one")[0])
    gate.set()
    assert answer.status_code == 504
    assert "too long" in answer.json()["error"]
