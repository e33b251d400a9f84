"""Hostile names, files and bodies: refused with a sentence, and nothing is left behind."""

from __future__ import annotations

import asyncio
import io
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from serving import Digits, form

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("python_multipart")
pytest.importorskip("httpx")

from efcil.serve import uploads
from efcil.serve.options import Limits
from efcil.serve.refusal import Refused
from efcil.serve.uploads import Budget


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def claiming(width: int, height: int) -> bytes:
    """Return a PNG whose header claims these sides, with no pixels to speak of."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def truncated_jpeg() -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((200, 200), 80).convert("RGB").save(buffer, "JPEG")
    return buffer.getvalue()[:2000]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (claiming(40_000, 40_000), "pixels"),
        (claiming(9_000, 9_000), "81 megapixels; the most is 50"),
        (truncated_jpeg(), "cannot be decoded"),
        (b"GIF89a", "cannot be"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none of JPEG"),
        (b"", "no image"),
    ],
    ids=["bomb", "large", "truncated", "header only", "svg", "postscript", "empty"],
)
def test_images_that_cannot_be_used(client: Any, digits: Digits, content: bytes, words: str) -> None:
    answer = client.post("/api/predict", content=content)
    assert answer.status_code in (400, 422)
    assert words in answer.json()["error"]
    teaching = client.post("/api/teach", files=form(two=[*digits.train("two")[:3], content]))
    assert teaching.status_code == 422
    assert "Nothing has been learned" in teaching.json()["error"]
    assert client.get("/api/model").json()["teaching"] is None


@pytest.mark.parametrize(
    "name",
    ["", "   ", "\n", "a\x00b", "a\x1b[31mb", "a\u202eb", "x" * 81, "a\r\nSet-Cookie: b"],
    ids=["empty", "spaces", "line end", "null", "escape", "right to left", "long", "header"],
)
def test_class_names_that_cannot_be_shown(client: Any, digits: Digits, name: str) -> None:
    # Written by hand: an HTTP library would encode the name of a field, and this is its value.
    parts = [
        b'--x\r\nContent-Disposition: form-data; name="class"\r\n\r\n' + name.encode() + b"\r\n",
        b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
        + digits.train("two")[0]
        + b"\r\n",
        b"--x--\r\n",
    ]
    answer = client.post(
        "/api/teach", content=b"".join(parts), headers={"Content-Type": "multipart/form-data; boundary=x"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"].isprintable()


def test_file_names_are_never_paths(client: Any, folder: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    for name in ("../../escape.png", "/etc/passwd", "..\\..\\escape.png", "a\x00b.png", "<script>.png", "x" * 5000):
        answer = client.post("/api/predict", files={"image": (name, b"no image")})
        assert answer.status_code in (400, 422)
        sentence = answer.json()["error"]
        assert sentence.isprintable()
        assert "/" not in sentence.partition(")")[0]
        assert len(sentence) < 400
    assert tree(tmp_path) == before


def test_limits_of_size_and_number(folder: Path, serve: Any, digits: Digits) -> None:
    client = serve(folder, Limits(rate=0, upload_bytes=2000, images=3, teaching_images=5))
    image = digits.train("two")[0]
    assert client.post("/api/predict", content=b"x" * 2001).status_code == 413
    assert client.post("/api/predict", files={"image": ("a.png", b"x" * 2001)}).status_code == 413
    assert client.post("/api/predict", files=[("image", ("a.png", image))] * 4).status_code == 413
    too_many = client.post("/api/teach", files=form(two=digits.train("two")[:6]))
    assert too_many.status_code == 413
    assert "more than 5 images" in too_many.json()["error"]
    # A length that lies, and one that is not announced at all.
    assert client.post("/api/predict", content=(b"x" * 500 for _ in range(5))).status_code == 413


def test_a_small_body_cannot_drip_for_ever() -> None:
    """Every byte arrives in time, and all of them together do not."""
    from starlette.requests import Request

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"x", "more_body": True}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(Refused) as refused:
        asyncio.run(uploads.small(request, 10_000, 0.1))
    assert refused.value.status == 408


def test_a_byte_that_comes_when_the_time_is_over_gains_no_more_of_it() -> None:
    from starlette.requests import Request

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        time.sleep(0.1)  # as on a busy machine: the byte and the end of the time are noticed together
        return {"type": "http.request", "body": b"x", "more_body": True}

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(Refused) as refused:
        asyncio.run(uploads.small(request, 3, 0.05))
    assert refused.value.status == 408


def test_one_picture_is_refused_before_a_teaching_begins(client: Any, digits: Digits) -> None:
    answer = client.post("/api/teach", files=form(two=digits.train("two")[:1]))
    assert answer.status_code == 400
    assert "at least two" in answer.json()["error"]


def test_what_all_requests_hold_together_is_limited() -> None:
    budget = Budget(100)
    with budget.lease() as first, budget.lease() as second:
        first(60)
        second(40)
        with pytest.raises(Refused) as refused:
            first(1)
        assert refused.value.status == 503
    assert budget.held == 0


def test_only_one_teaching_arrives_at_a_time(client: Any, digits: Digits) -> None:
    client.app.state.service._receiving = True
    answer = client.post("/api/teach", files=form(two=digits.train("two")))
    assert answer.status_code == 409
    client.app.state.service._receiving = False
    broken = client.post("/api/teach", files=form(two=[b"no image"]))
    assert broken.status_code == 422
    assert client.app.state.service._receiving is False


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=x", b"no boundary here"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\nabc',
        ),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n\r\nabc\r\n--x--\r\n"),
        ("multipart/form-data; boundary=" + "x" * 5000, b"abc"),
        ("multipart/form-data; boundary=x", b"--x--\r\n"),
        ("application/json", b"{}"),
    ],
)
def test_broken_forms(client: Any, kind: str, body: bytes) -> None:
    for path in ("/api/predict", "/api/teach"):
        answer = client.post(path, content=body, headers={"Content-Type": kind})
        assert answer.status_code in (400, 422)
        assert answer.json()["error"]


def test_pictures_before_a_name_and_unknown_fields(client: Any, digits: Digits) -> None:
    picture = ("image", ("a.png", digits.train("two")[0]))
    assert client.post("/api/teach", files=[picture, ("class", (None, "two"))]).status_code == 400
    assert client.post("/api/teach", files=[("clas", (None, "two")), picture]).status_code == 400
    assert client.post("/api/teach", files=[("class", (None, "two"))]).status_code == 400
