"""The page in headless Chromium: drop a picture, read the answer, teach a class, see it predicted."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from serving import NAMES, Digits, until
from webdriver_client import Browser, missing

from efcil.classifier import IncrementalClassifier

for needed in ("starlette", "python_multipart"):
    pytest.importorskip(needed, reason="the extra `serve` is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
if (reason := missing()) is not None:
    pytest.skip(reason, allow_module_level=True)

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def pictures(digits: Digits, tmp_path: Path) -> Path:
    """Files as people have them, in a folder per class."""
    for name in NAMES[:3]:
        for kind, files in (("train", digits.train(name)), ("test", digits.test(name))):
            place = tmp_path / "pictures" / kind / name
            place.mkdir(parents=True)
            for number, content in enumerate(files):
                (place / f"{number:02}.png").write_bytes(content)
    return tmp_path / "pictures"


@pytest.fixture
def good(digits: Digits, tmp_path: Path) -> Path:
    """A model that tells zero from one reliably, and learns the next class in a few epochs."""
    pixels = np.concatenate([digits.pixels[name][:16] for name in NAMES[:2]])
    classifier = IncrementalClassifier(preset="digits", first_task_epochs=30, epochs=15, batch_size=8, device="cpu")
    classifier.fit(pixels, ["zero"] * 16 + [HOSTILE] * 16).save(tmp_path / "things")
    return tmp_path / "things"


@pytest.fixture
def address(good: Path) -> Iterator[str]:
    from efcil.serve.app import create_app
    from efcil.serve.options import Limits, ServeOptions

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    app = create_app(ServeOptions(good, device="cpu", limits=Limits(rate=0)))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    until(lambda: server.started, bool)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    server.should_exit = True
    thread.join()


def test_ask_teach_ask_again(address: str, pictures: Path, good: Path) -> None:
    two = sorted((pictures / "test" / "two").iterdir())
    with Browser() as browser:
        browser.open(address)
        browser.wait("return document.querySelectorAll('.tile').length === 2")
        assert browser.text("#name") == "things"

        browser.drop("#ask-drop", sorted((pictures / "test" / "zero").iterdir())[0])
        browser.wait("return document.querySelector('.answers li')")
        assert browser.text(".verdict strong") == "zero"
        assert len(browser.run("return [...document.querySelectorAll('.answers li')]")) == 2
        # The name of a class is text, whatever it looks like.
        assert HOSTILE in browser.text("#classes")
        assert browser.run("return document.querySelectorAll('#classes img, .answers img').length") == 0

        browser.type("#cards .name", "two")
        browser.type("#cards .files", "\n".join(map(str, sorted((pictures / "train" / "two").iterdir()))))
        browser.wait("return document.querySelectorAll('.card .thumb').length === 16")
        assert "a new class" in browser.text(".card .kind")
        browser.click("#learn")
        browser.wait("return !document.getElementById('job').hidden")
        browser.wait("return !document.getElementById('teach-done').hidden")
        assert browser.text("#teach-done").startswith("Learned two from 16 pictures")
        browser.wait("return document.querySelectorAll('.tile').length === 3")

        browser.drop("#ask-drop", *two)
        browser.wait(
            "const found = [...document.querySelectorAll('#ask-thumbs span')];"
            "return found.length === 8 && found.every((each) => each.innerText !== '…')"
        )
        verdicts = browser.run(
            "return [...document.querySelectorAll('#ask-thumbs span')].map((each) => each.innerText)"
        )
        assert verdicts.count("two") > len(two) / 2, verdicts
        assert browser.complaints() == []
    assert sorted(path.suffix for path in good.iterdir()) == [".json", ".safetensors"]


def test_mistakes_camera_and_widths(address: str, pictures: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"no picture")
    with Browser() as browser:
        browser.open(address)
        browser.wait("return document.querySelector('.tile')")
        browser.drop("#ask-drop", broken)
        browser.wait("return !document.getElementById('ask-error').hidden")
        assert "broken.jpg" in browser.text("#ask-error")

        browser.click("#ask-camera")
        browser.wait("return document.querySelector('#ask-stage video')")
        browser.wait("return document.querySelector('.answers li')")
        browser.click("#ask-camera")
        browser.wait("return document.querySelector('#ask-stage img')")
        browser.wait("return !document.getElementById('correct').hidden")
        browser.type("#correct-name", "screen")
        browser.click("#correct button")
        browser.wait("return document.querySelectorAll('.card .thumb').length === 1")

        browser.click(".tile button")
        browser.wait("return document.getElementById('edit').open")
        browser.run("document.getElementById('edit-name').value = ''")
        browser.type("#edit-name", "null")
        browser.click("#edit-save")
        browser.wait("return document.getElementById('classes').innerText.includes('null')")
        browser.wait("return !document.getElementById('edit').open")

        for width in (390, 1400):
            for dark in (False, True):
                browser.screenshot(tmp_path / "page.png", width, dark)
                wide = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
                assert wide[0] <= wide[1], "nothing sticks out at the side"
        assert all("422" in each for each in browser.complaints()), "only the broken picture"


def test_the_keyboard_reaches_everything(address: str) -> None:
    with Browser() as browser:
        browser.open(address)
        browser.wait("return document.querySelector('.tile')")
        reached = set()
        for _ in range(30):
            browser.command("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
            browser.command("Input.dispatchKeyEvent", type="keyUp", key="Tab", code="Tab", windowsVirtualKeyCode=9)
            reached.add(browser.run("const at = document.activeElement; return at.id || at.className || at.tagName"))
        assert {"ask-choose", "ask-camera", "name", "choose", "camera", "another", "SUMMARY"} <= reached
        unnamed = browser.run(
            "return [...document.querySelectorAll('button, input:not([hidden])')]"
            ".filter((each) => !(each.innerText || each.getAttribute('aria-label') || each.labels.length)).length"
        )
        assert unnamed == 0
