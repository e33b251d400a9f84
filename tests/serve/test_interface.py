"""The OpenAPI document says what is there, and what is answered is as it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serving import Digits

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("python_multipart")
pytest.importorskip("httpx")

from efcil.cli import main
from efcil.serve.routes import OPERATIONS, document

KINDS = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def misfit(value: Any, schema: dict[str, Any], place: str = "answer") -> str | None:
    """Return where a value does not fit its schema, None where it does: the part of JSON Schema that is used."""
    if "$ref" in schema:
        schema = document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        found = [misfit(value, each, place) for each in schema["anyOf"]]
        return None if None in found else " or ".join(map(str, found))
    kinds = schema.get("type", list(KINDS))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not any(isinstance(value, KINDS[kind]) and (kind == "boolean") >= isinstance(value, bool) for kind in kinds):
        return f"{place} is {value!r}, not {kinds}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{place} is {value!r}"
    if isinstance(value, list):
        inner = (misfit(each, schema["items"], f"{place}[]") for each in value)
        return next((each for each in inner if each), None)
    if isinstance(value, dict) and "properties" in schema:
        if value.keys() != schema["properties"].keys():
            return f"{place} has {sorted(value)}, not {sorted(schema['properties'])}"
        inner = (misfit(value[name], each, f"{place}.{name}") for name, each in schema["properties"].items())
        return next((each for each in inner if each), None)
    return None


def fits(answer: Any, operation: Any) -> None:
    response = operation.to_openapi()["responses"][str(answer.status_code)]
    assert misfit(answer.json(), response["content"]["application/json"]["schema"]) is None


def operation(name: str) -> Any:
    return next(each for each in OPERATIONS if each.endpoint.__name__ == name)


def test_the_check_itself_can_fail() -> None:
    assert misfit({"live": True}, {"$ref": "#/components/schemas/Health"})
    assert misfit({"live": 1, "ready": True}, {"$ref": "#/components/schemas/Health"})
    assert misfit({"live": True, "ready": True}, {"$ref": "#/components/schemas/Health"}) is None


def test_answers_are_as_the_document_says(client: Any, digits: Digits) -> None:
    for name, path in (("model", "/api/model"), ("classes", "/api/classes"), ("health", "/health")):
        fits(client.get(path), operation(name))
    files = [("image", ("a.png", digits.test("one")[0])), ("image", ("b.png", b"nothing"))]
    fits(client.post("/api/predict", files=files), operation("predict"))
    fits(client.post("/api/predict", content=b""), operation("predict"))
    fits(client.post("/api/teach", content=b""), operation("teach"))
    fits(client.get("/api/jobs/none"), operation("job"))
    fits(client.delete("/api/unfinished"), operation("discard"))


def test_a_job_is_as_the_document_says() -> None:
    from efcil.serve.jobs import Job

    job = Job("1", {"two": 3}, "task", "2026-01-01")
    schema = {"$ref": "#/components/schemas/Job"}
    assert misfit(job.to_json(), schema) is None
    job.change(state="learning", epoch=1, epochs=4, seconds_left=3.0, messages=["a line"])
    assert misfit(job.to_json(), schema) is None
    assert 0 < job.to_json()["progress"] < 0.95


def test_every_route_is_in_the_document(client: Any) -> None:
    served = client.get("/openapi.json").json()
    assert served["openapi"].startswith("3.1")
    for each in OPERATIONS:
        entry = served["paths"][each.path][each.method.lower()]
        assert entry["summary"]
        # As served: not 404 or 405 for what the document lists.
        answer = client.request(each.method, each.path.replace("{id}", "none"))
        assert answer.status_code != 405
        assert answer.status_code != 404 or "{id}" in each.path
    names = set(served["components"]["schemas"])
    used = {part.split('"')[0] for part in json.dumps(served).split("#/components/schemas/")[1:]}
    assert used == names


def test_metrics_are_prometheus_text(client: Any, digits: Digits) -> None:
    client.post("/api/predict", content=digits.test("one")[0])
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    assert 'efcil_requests_total{method="POST",route="/api/predict",status="200"} 1' in lines
    assert "efcil_images_total 1" in lines
    assert "efcil_batch_images_count 1" in lines
    assert 'efcil_batch_images_bucket{le="+Inf"} 1' in lines
    assert "efcil_queue_images 0" in lines
    assert "efcil_teaching 0" in lines
    for line in lines:
        assert line.startswith("# ") or len(line.rsplit(" ", 1)) == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "0.0.0.0"], "Give a token"),
        (["--token", "short"], "at least 16"),
        (["--port", "99999"], "65535"),
        (["--unknown", "2"], "share"),
        (["--rate", "-1"], "at least 0"),
        (["--max-upload", "0"], "at least 1"),
    ],
)
def test_mistakes_are_sentences(flags: list[str], words: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["serve", str(tmp_path / "model"), *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_folder_that_cannot_be_used_is_a_sentence(folder: Path, capsys: Any) -> None:
    (folder / "model.json").write_text("{}")
    assert main(["serve", str(folder), "--port", "0"]) == 2
    assert "damaged" in capsys.readouterr().err


def test_the_page_says_nothing_of_a_model_that_it_has_not_asked_for(client: Any) -> None:
    page = client.get("/").text
    assert '<p id="stored-sum"></p>' in page
    assert "Nothing yet" not in page
