"""Who may ask, from where, how often; and what browsers are kept from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from serving import Digits

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("python_multipart")
pytest.importorskip("httpx")

from efcil.errors import SettingsError
from efcil.serve.guard import COOKIE, Rates
from efcil.serve.options import Limits, ServeOptions

TOKEN = "correct-horse-battery"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.org"])
def test_other_machines_only_with_a_token(host: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="token"):
        ServeOptions(tmp_path, host=host)
    assert ServeOptions(tmp_path, host=host, token=TOKEN).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_this_machine_needs_none(host: str, tmp_path: Path) -> None:
    assert ServeOptions(tmp_path, host=host).token is None


def test_a_token_that_could_be_guessed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="16"):
        ServeOptions(tmp_path, token="1234")


def test_everything_asks_for_the_token(folder: Path, serve: Any, digits: Digits) -> None:
    client = serve(folder, token=TOKEN)
    for method, path in (
        ("GET", "/api/model"),
        ("GET", "/api/classes"),
        ("POST", "/api/predict"),
        ("POST", "/api/teach"),
        ("DELETE", "/api/unfinished"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("GET", "/page/page.js"),
    ):
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": f"Basic {TOKEN}"},
            {"Cookie": f"{COOKIE}=x"},
        ):
            answer = client.request(method, path, headers=headers)
            assert answer.status_code == 401, path
            assert answer.json()["error"]
    assert client.get("/health").json() == {"live": True, "ready": True}
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert client.get("/api/model", headers=right).status_code == 200
    assert client.post("/api/predict", content=digits.test("one")[0], headers=right).status_code == 200


def test_login_sets_a_cookie_that_is_not_the_token(folder: Path, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve(folder, token=TOKEN)
    assert client.get("/", follow_redirects=False).headers["location"] == "/login"
    assert "token" in client.get("/login").text
    monkeypatch.setattr("efcil.serve.app.WRONG_SECONDS", 0.0)
    wrong = client.post("/login", data={"token": "wrong"}, follow_redirects=False)
    assert "set-cookie" not in wrong.headers
    right = client.post("/login", data={"token": TOKEN}, follow_redirects=False)
    cookie = right.headers["set-cookie"]
    assert TOKEN not in cookie
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert client.get("/api/model").status_code == 200
    assert client.get("/").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "localhost.evil.example:8000", "10.0.0.1"]
)
def test_other_names_are_not_answered(client: Any, host: str) -> None:
    assert client.get("/api/model", headers={"Host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"])
def test_own_names_are(client: Any, host: str) -> None:
    assert client.get("/api/model", headers={"Host": host}).status_code == 200


def test_names_of_a_proxy_and_addresses_of_an_open_server(folder: Path, serve: Any) -> None:
    client = serve(folder, host="0.0.0.0", token=TOKEN, allowed_hosts=("models.example",))
    for host, status in (("models.example", 200), ("192.168.1.7:8000", 200), ("evil.example", 421)):
        assert client.get("/health", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9000"},
        {"Origin": "http://127.0.0.1:8000.evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_changes_from_other_pages_are_refused(client: Any, digits: Digits, headers: dict[str, str]) -> None:
    for method, path in (
        ("POST", "/api/teach"),
        ("DELETE", "/api/unfinished"),
        ("POST", "/api/predict"),
        ("POST", "/login"),
    ):
        assert client.request(method, path, headers=headers).status_code == 403, path
    assert client.get("/api/model", headers=headers).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"Origin": "http://127.0.0.1:8000"}, {"Sec-Fetch-Site": "same-origin"}])
def test_changes_from_the_own_page_are_not(client: Any, digits: Digits, headers: dict[str, str]) -> None:
    assert client.post("/api/predict", content=digits.test("one")[0], headers=headers).status_code == 200


def test_too_many_requests(folder: Path, serve: Any) -> None:
    client = serve(folder, Limits(rate=0.001))
    answers = [client.get("/api/classes") for _ in range(2)]
    assert [each.status_code for each in answers] == [200, 429]
    assert int(answers[1].headers["retry-after"]) > 0
    assert "slowly" in answers[1].json()["error"]


def test_rates_fill_again_and_are_kept_per_client() -> None:
    now = 0.0
    rates = Rates(2.0, lambda: now)
    assert [rates.wait("one") for _ in range(4)] == [0.0] * 4
    assert rates.wait("one") == pytest.approx(0.5)
    assert rates.wait("two") == 0.0
    now = 0.5
    assert rates.wait("one") == 0.0
    assert rates.wait("one") > 0
    for number in range(20_000):
        rates.wait(str(number))
    assert len(rates._buckets) <= 10_000


def test_pages_and_answers_are_sealed(client: Any) -> None:
    for path in ("/", "/docs", "/login", "/api/model", "/page/page.js", "/nothing"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"


def test_pages_fetch_nothing_from_elsewhere(client: Any) -> None:
    for path in ("/", "/docs", "/login", "/page/page.js", "/page/docs.js", "/page/style.css"):
        text = client.get(path).text.replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, path
        assert "innerHTML" not in text
        assert "<style" not in text
        assert "onclick=" not in text


def test_only_files_of_the_page_are_served(client: Any) -> None:
    for name in ("../app.py", "..%2fapp.py", "%2e%2e/app.py", "app.py", "nothing.css", "__init__.py"):
        assert client.get(f"/page/{name}").status_code == 404


def test_unknown_paths_and_methods_are_sentences(client: Any) -> None:
    assert client.get("/api/nothing").json()["error"].startswith("There is nothing here")
    assert client.get("/api/predict").status_code == 405
    assert client.get("/api/predict").json()["error"]
    assert client.get("/api/jobs/nothing").status_code == 404
