"""Just enough of the WebDriver protocol to drive Chromium: it is JSON over HTTP, so nothing has to be installed."""

from __future__ import annotations

import base64
import http.client
import json
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WAIT_SECONDS = 120.0


def missing() -> str | None:
    """Return what has to be installed before a browser can be driven here, None where nothing is missing."""
    if not any(map(shutil.which, BROWSERS)):
        return "Chromium is not installed"
    return None if shutil.which("chromedriver") else "chromedriver is not installed"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Browser:
    """A headless Chromium with one tab. As a context it is closed at the end."""

    def __init__(self, width: int = 1400, height: int = 900) -> None:
        self._port = free_port()
        self._driver = subprocess.Popen(
            [str(shutil.which("chromedriver")), f"--port={self._port}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._session = ""
        arguments = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            f"--window-size={width},{height}", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream",
        ]  # fmt: skip
        binary = next(found for name in BROWSERS if (found := shutil.which(name)))
        chrome = {"args": arguments, "binary": binary}
        wanted = {
            "capabilities": {"alwaysMatch": {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}}
        }
        try:
            self._until_ready()
            self._session = "/session/" + self._ask("POST", "/session", wanted)["sessionId"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            if self._session:
                self._ask("DELETE", self._session)
        finally:
            self._driver.terminate()
            self._driver.wait()

    def open(self, address: str) -> None:
        self._ask("POST", f"{self._session}/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page and return what it returns."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, *arguments: Any) -> Any:
        """Wait until JavaScript returns something that is true, and return that."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := self.run(script, *arguments)):
            if time.monotonic() > deadline:
                raise AssertionError(f"{script} stays {found!r}; the page says: {self.text('body')[:2000]}")
            time.sleep(0.1)
        return found

    def text(self, selector: str) -> str:
        """Return the visible text of an element."""
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def element(self, selector: str) -> str:
        found = self._ask("POST", f"{self._session}/element", {"using": "css selector", "value": selector})
        return str(found[ELEMENT])

    def click(self, selector: str) -> None:
        self._ask("POST", f"{self._session}/element/{self.element(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Type into a field, as a keyboard does; into a file input, the paths of files."""
        self._ask("POST", f"{self._session}/element/{self.element(selector)}/value", {"text": text})

    def drop(self, selector: str, *files: Path) -> None:
        """Drop files onto an element, as a file manager does."""
        given = [[file.name, base64.b64encode(file.read_bytes()).decode()] for file in files]
        self.run(
            "const transfer = new DataTransfer();"
            "for (const [name, content] of arguments[1]) {"
            "  const bytes = Uint8Array.from(atob(content), (c) => c.charCodeAt(0));"
            "  transfer.items.add(new File([bytes], name, {type: 'image/jpeg'}));"
            "}"
            "const target = document.querySelector(arguments[0]);"
            "for (const name of ['dragenter', 'dragover', 'drop'])"
            "  target.dispatchEvent(new DragEvent(name, {dataTransfer: transfer, bubbles: true, cancelable: true}));",
            selector,
            given,
        )

    def command(self, name: str, **parameters: Any) -> Any:
        """Run a command of the DevTools protocol."""
        return self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def screenshot(self, file: Path, width: int, dark: bool = False) -> None:
        """Photograph the whole page at a width, light or dark."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.command("Emulation.setEmulatedMedia", features=scheme)
        metrics = {"width": width, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", height=900, **metrics)
        height = max(900, int(self.run("return document.documentElement.scrollHeight")))
        self.command("Emulation.setDeviceMetricsOverride", height=height, **metrics)
        file.write_bytes(base64.b64decode(self._ask("GET", f"{self._session}/screenshot")))

    def complaints(self) -> list[str]:
        """Return what the browser logged as errors, such as what the content security policy refused."""
        entries = self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def _until_ready(self) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                if self._ask("GET", "/status")["ready"]:
                    return
            except OSError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=WAIT_SECONDS)
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        value = answer["value"]
        if isinstance(value, dict) and "error" in value:
            raise AssertionError(f"{path}: {value['error']}: {value['message'].splitlines()[0]}")
        return value
