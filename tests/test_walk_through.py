"""docs/walk-through.md, run from top to bottom: its commands in this process, its Python as it stands.

Only `efcil serve` runs in a process of its own, at a free port. A line `^C` stands for Ctrl-C after the epoch above it.
"""

from __future__ import annotations

import csv
import io
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from efcil.cli import main
from efcil.engine.progress import Progress
from efcil.engine.trainer import EpochReport
from efcil.model import Model
from efcil.model.defaults import FROM_SCRATCH, NETWORK
from efcil.network.backbones import installed

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "walk-through.md"
IMAGES = ROOT.parent / "shared" / "data" / "tiny-imagenet-slice" / "tiny-imagenet-200"
ADDRESS = "http://127.0.0.1:8000"
CTRL_C = "^C"
INTERRUPTED = 130
PATIENCE = 600.0


@dataclass
class Step:
    """A block of Python or a command, and the output that the page shows under it."""

    kind: str
    text: str
    shown: list[str] = field(default_factory=list)

    @property
    def command(self) -> str:
        return self.text.partition("#")[0].strip()

    @property
    def expected(self) -> int:
        """The exit code, which the page gives as a comment where it is not 0."""
        if CTRL_C in self.shown:
            return INTERRUPTED
        comment = self.text.partition("#")[2]
        return int(comment.removeprefix(" exit code ")) if comment else 0

    @property
    def epoch(self) -> int:
        """The epoch that is shown last before Ctrl-C is pressed, 0 where it is not."""
        if CTRL_C not in self.shown:
            return 0
        found = re.search(r"epoch (\d+)/", self.shown[self.shown.index(CTRL_C) - 1])
        assert found, "Ctrl-C is pressed after the line of an epoch"
        return int(found[1])


def steps() -> list[Step]:
    """Return the page's blocks of Python, and its commands one by one, in order."""
    found: list[Step] = []
    blocks = re.findall(r"^```(python|console|text)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    for kind, text in blocks:
        if kind == "python":
            found.append(Step(kind, text))
        elif kind == "text":
            assert found[-1].kind == "python", "a text block shows what the Python above it prints"
            found[-1].shown += text.splitlines()
        else:
            assert text.startswith("$ "), "a console block begins with a command"
            for line in text.splitlines():
                if line.startswith("$ "):
                    found.append(Step(line.split()[1], line.removeprefix("$ ")))
                else:
                    found[-1].shown.append(line)
    return found


def without_digits(line: str) -> str:
    """Return a line in which all numbers, digests and times are alike: they depend on the machine and the clock."""
    line = re.sub(r"\b[0-9a-f]{16}\b", "0", line)
    line = re.sub(r"(a few seconds|about [\d.]+ (s|minutes|hours))$", "a few seconds", line)
    line = re.sub(r"(\d+ h )?(\d+ min )?(\d+ s )?left$", "0 s left", line)
    return re.sub(r"\s+", " ", re.sub(r"[\d.,]*\d", "0", line)).strip()


def appears(shown: list[str], printed: list[str]) -> bool:
    """Say whether what the page shows was printed, but for digits; a line of three dots stands for any lines."""
    if not shown:
        return not printed
    if shown[0].strip() == "...":
        return any(appears(shown[1:], printed[start:]) for start in range(len(printed) + 1))
    same = bool(printed) and without_digits(shown[0]) == without_digits(printed[0])
    return same and appears(shown[1:], printed[1:])


def test_shown_output_is_compared_but_for_digits() -> None:
    printed = ["task 1 of 5", "epoch 3", "epoch 6", "A_step 83.96 %"]
    assert appears(["task 2 of 5", "...", "A_step 7.1 %"], printed)
    assert appears(["...", "epoch 9", "..."], printed)
    assert not appears(["task 2 of 5", "A_step 7.1 %"], printed)
    assert not appears(["...", "A_inc 83.96 %"], printed)
    assert not appears(["task 1 of 5"], printed)
    assert not appears(["...", "epoch 3", "...", "epoch 6", "...", "epoch 6", "..."], printed)


def test_times_and_digests_are_alike() -> None:
    assert appears(["40 images, each is read once: a few seconds"], ["40 images, each is read once: about 2 minutes"])
    assert appears(['{"version":"f35f8219bb4df801"}'], ['{"version":"0123456789abcdef"}'])
    assert not appears(["a few seconds are enough"], ["about 5 s are enough"])


@contextmanager
def stopped_after(epoch: int) -> Iterator[None]:
    """Press Ctrl-C when that epoch has been reported; with 0, never."""
    report = Progress.epoch

    def reported(self: Progress, found: EpochReport) -> None:
        report(self, found)
        if found.epoch + 1 == epoch:
            signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "epoch", reported)
        yield


class Walk:
    """Someone who types what the page says, and keeps what is printed."""

    def __init__(self, capture: Any) -> None:
        self.capture = capture
        self.printed: dict[str, str] = {}
        self.server: subprocess.Popen[str] | None = None
        self.address = ""

    def take(self, step: Step) -> None:
        """Run a step, and compare its output with the page."""
        run = {"python": self._python, "efcil": self._efcil, "curl": self._curl}[step.kind]
        if step.command.startswith("efcil serve "):
            run = self._serve
        if step.command.startswith("python "):
            run = self._program
        seen = run(step).replace(f"{Path.cwd()}/", "").splitlines()
        shown = [line for line in step.shown if line != CTRL_C]
        # A slow machine says more often what it is doing.
        quickly = [line for line in seen if not re.search(r" so far\)|  step \d+/\d+  ", line)]
        assert appears(shown, seen) or appears(shown, quickly), "\n".join(
            ["The page shows another output of", step.text, *seen]
        )

    def stop(self) -> None:
        """Stop the server, if one was started, as Ctrl-C does."""
        if self.server is not None:
            self.server.send_signal(signal.SIGINT)
            try:
                self.server.wait(PATIENCE)
            finally:
                self.server.kill()

    def _python(self, step: Step) -> str:
        exec(compile(step.text, str(PAGE), "exec"), {})
        self.printed["python"] = printed = self.capture.readouterr().out
        return printed

    def _program(self, step: Step) -> str:
        words = [sys.executable, *shlex.split(step.command)[1:]]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def _efcil(self, step: Step) -> str:
        with stopped_after(step.epoch):
            code = main(shlex.split(step.command)[1:])
        output = self.capture.readouterr()
        assert code == step.expected, f"{step.command}\n{output.err}"
        self.printed[step.command] = output.out
        return output.out + output.err.removeprefix("\n")

    def _serve(self, step: Step) -> str:
        command = [sys.executable, "-m", *shlex.split(step.command), "--port", "0", "--device", "cpu"]
        with Path("serve.log").open("w") as log:  # what it says must not be taken for the output of other commands
            self.server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.server.stdout is not None
        line = self.server.stdout.readline()
        found = re.search(r"http://[\d.:]+", line)
        assert found, line + Path("serve.log").read_text()
        self.address = found[0]
        deadline = time.monotonic() + PATIENCE
        while not _ready(f"{self.address}/health"):
            assert time.monotonic() < deadline, "the server does not get ready"
            time.sleep(0.05)
        return line

    def _curl(self, step: Step) -> str:
        assert ADDRESS in step.command
        words = shlex.split(step.command.replace(ADDRESS, self.address))
        return subprocess.run([words[0], "--silent", *words[1:]], capture_output=True, text=True, check=True).stdout


def _ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=PATIENCE) as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError:
        return False


@pytest.mark.skipif(not IMAGES.is_dir(), reason="the slice of Tiny-ImageNet is not here")
def test_walk_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    for needed in ("starlette", "uvicorn", "python_multipart", "onnxscript"):
        pytest.importorskip(needed, reason="needs the extras serve and onnx")
    if not installed(NETWORK):
        pytest.skip("needs the extra pretrained")
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # the page shows what a CPU prints
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-imagenet-200").symlink_to(IMAGES)
    walk = Walk(capfd)
    try:
        for step in steps():
            walk.take(step)
    finally:
        walk.stop()
    _check_the_model(walk.printed)


def _check_the_model(printed: dict[str, str]) -> None:
    """Compare what the commands printed with each other, and with the model that is left."""
    card = Model.load("things", "cpu").card
    assert [each.label for each in card.classes] == [
        *("salamander", "goldfish", "bullfrog", "tailed-frog", "American-alligator", "boa-constrictor"),
        *("scorpion", "spider"),
    ]
    assert [each.images for each in card.classes] == [20] * 7 + [40]
    rows = list(csv.DictReader(io.StringIO(printed["efcil predict things 'new-pictures/*frog/*.JPEG' --format csv"])))
    assert len(rows) == 20
    right = re.search(r"(\d+) of 100 images", printed["efcil evaluate things --data new-pictures"])
    assert right, "new pictures are evaluated"
    assert int(right[1]) >= 60, "guessing gives 10 on average"
    strangers = printed["efcil predict things new-pictures/black-widow new-pictures/tarantula --unknown"]
    assert strangers.count("unknown") >= 3, "about one is expected among known classes"
    audited = printed["efcil audit things --data visits/all --held-out new-pictures"]
    assert "compared with images of 9 of 9 classes, 180 of 180 images; not of this model: trilobite" in audited
    assert "1 class forgotten or merged into others: no row of it is left" in audited
    assert "Passed: no image is stored." in audited
    assert Path("things.onnx").is_file()
    assert not list(Path("things").glob("**/*.JPEG"))
    assert Model.load("small", "cpu").card.task_sizes == [2]


def test_the_page_says_what_is_printed_without_the_extra() -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert FROM_SCRATCH in page
