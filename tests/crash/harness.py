"""Kills short commands `efcil run` and `efcil learn` at every I/O call, and lets every I/O call fail.

After each fault the same command is given again, undisturbed. What it leaves must be equal, bit for bit, to what a
command leaves that nothing ever happened to: every file below the folder, but for the log, and but for times and dates.

    python tests/crash/harness.py              all points: `make crash-test`
    python tests/crash/harness.py --every 29   a sample

Everything is imported once; each point is a fork of that process. The exit code is 1 if anything differed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from faults import ERROR, FULL, HALF, KILL, NEED_ROOM, Faults, install

FAULTS = (KILL, HALF, ERROR, FULL)
#: Fields that differ between two runs that are the same: when, how long, and checksums over these.
MASKED = {
    "seconds", "finished", "command", "commit", "commits", "earlier_commits", "uncommitted_changes", "checksum",
    "learned", "date", "created", "metrics", "files",
}  # fmt: skip
#: Files that tell of attempts, of which there may be two.
IGNORED = {"log.txt"}
#: What `learn` says of classes that it has learned: the fault came after the model was in place.
ALREADY = "already. New classes must have new names"
RUN = ("run", "--dataset", "folder", "--image-size", "8", "--network", "slim", "--batch-size", "16", "--device", "cpu",
       "--quiet")  # fmt: skip
EFC = (
    *RUN, "--method", "efc", "--tasks", "3", "--first-task-epochs", "2", "--epochs", "3", "--checkpoint-steps", "1",
    "--set", "first_task.rotations=false",
)  # fmt: skip
#: The modern recipe, whose presets are for larger images. Pseudo-old images serve two epochs, and the checkpoint of the
#: second task lies between these.
CEDAR = (
    *RUN, "--method", "cedar", "--tasks", "2", "--first-task-epochs", "1", "--epochs", "2", "--checkpoint-steps", "4",
    "--augmentation", "crop-flip-trivial", "--set", "first_task.rotations=false", "pseudo_old_every=2",
    "attack_steps=1", "transport_views=1", "rebalance_epochs=1", "later.ema=0.9",
    *(f"{stage}.{value}" for stage in ("first_task", "later") for value in
      ("optimiser=sgd", "momentum=0.9", "schedule=cosine", "milestones=", "gradient_clip=5.0")),
    "later.normalisation=trained",
)  # fmt: skip
#: Every domain is a task, and the second one trains nothing.
DOMAINS = (
    *RUN, "--method", "lda", "--answers", "merged", "--first-task-epochs", "1", "--checkpoint-steps", "2",
    "--set", "first_task.rotations=false",
)  # fmt: skip
LEARN = ("--preset", "digits", "--epochs", "6", "--device", "cpu", "--checkpoint-steps", "1", "--quiet")


@dataclass(frozen=True)
class Case:
    """A command to be disturbed: its name, its arguments with FOLDER for the folder that it changes."""

    name: str
    arguments: tuple[str, ...]
    #: What the folder holds before: the outcome of another case, or nothing.
    after: str | None = None


@dataclass(frozen=True)
class Point:
    """A call of a case, and what happens at it."""

    case: str
    call: str
    fault: str


@dataclass(frozen=True)
class Result:
    """What became of a point: nothing to complain of, or what was wrong."""

    point: Point
    code: int
    complaint: str


def cases(photos: Path) -> list[Case]:
    """Return the commands: three runs, a model's first task, and its second."""
    return [
        Case("run", (*EFC, "--data", str(photos / "split"), "--output", "FOLDER")),
        Case("cedar", (*CEDAR, "--data", str(photos / "split"), "--output", "FOLDER")),
        Case("domains", (*DOMAINS, "--data", str(photos / "domains"), "--output", "FOLDER")),
        Case("learn", ("learn", "FOLDER", "--data", str(photos / "first"), *LEARN)),
        Case("learn more", ("learn", "FOLDER", "--data", str(photos / "second"), *LEARN), after="learn"),
    ]


def make_photos(root: Path) -> None:
    """Write digits as image files: for the run, for a model to begin with, and for it to learn later."""
    from PIL import Image
    from sklearn.datasets import load_digits

    bunch = load_digits()
    for name, wanted, first, count in (
        ("first", (0, 1), 0, 16),
        ("second", (2, 3), 0, 16),
        ("split/train", range(6), 0, 16),
        ("split/test", range(6), 16, 4),
        ("domains/train/early", range(3), 0, 12),
        ("domains/train/late", range(3), 12, 12),
        ("domains/test/early", range(3), 24, 4),
        ("domains/test/late", range(3), 28, 4),
    ):
        for digit in wanted:
            place = root / name / f"digit-{digit}"
            place.mkdir(parents=True)
            for number, image in enumerate(bunch.images[bunch.target == digit][first : first + count]):
                Image.fromarray((image * 15.9).astype("uint8")).save(place / f"{number:02}.png")


# -- one command -----------------------------------------------------------------------------------------------------


def give(case: Case, folder: Path, point: Point | None, said: Path) -> tuple[int, list[str], bool]:
    """Give a command in a fork; return its exit code, its I/O calls if it ended by itself, and whether it was hit."""
    child = os.fork()
    if child == 0:
        _be_the_command(case, folder, point, said)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    try:
        calls, hit, modules = json.loads(said.with_suffix(".calls").read_text())
    except OSError:
        calls, hit, modules = [], code < 0, []
    for module in modules:  # what this command needed, the next one need not import again
        with suppress(ImportError):
            importlib.import_module(module)
    said.with_suffix(".calls").unlink(missing_ok=True)
    return code, calls, hit


def _be_the_command(case: Case, folder: Path, point: Point | None, said: Path) -> None:
    code = 70
    try:
        from efcil.cli import main

        output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        arguments = [str(folder) if argument == "FOLDER" else argument for argument in case.arguments]
        sys.argv = ["efcil", *arguments]
        faults = Faults(folder, point.call if point else None, point.fault if point else None)
        install(faults)
        code = main(arguments)
        sys.stdout.flush()
        faults.point, faults.full = None, False
        modules = [] if point else sorted(sys.modules)
        said.with_suffix(".calls").write_text(json.dumps([faults.calls, faults.hit, modules]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


# -- comparing -------------------------------------------------------------------------------------------------------


def outcome(folder: Path) -> dict[str, Any]:
    """Return what a command has left: file -> content, without what may differ."""
    found: dict[str, Any] = {}
    for place in sorted(folder.rglob("*")):
        name = place.relative_to(folder).as_posix()
        if place.name.endswith(".lock"):
            continue  # left by a process that has ended, it locks nothing
        if place.is_dir():
            found[name + "/"] = None
        elif place.name in IGNORED:
            found[name] = "..."
        elif place.suffix == ".json":
            found[name] = _masked(json.loads(place.read_text()))
        elif place.suffix == ".jsonl":
            found[name] = [_masked(json.loads(line)) for line in place.read_text().splitlines()]
        else:
            found[name] = place.read_bytes()
    return found


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: "..." if name in MASKED else _masked(item) for name, item in value.items()}
    return [_masked(item) for item in value] if isinstance(value, list) else value


def difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """Say in which files two outcomes differ, and where in the first of them; nothing where they are equal."""
    missing, surplus = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    other = [name for name in expected if name in found and found[name] != expected[name]]
    parts = [f"{word}: {', '.join(names)}" for word, names in
             (("missing", missing), ("surplus", surplus), ("different", other)) if names]  # fmt: skip
    if other and not isinstance(expected[other[0]], bytes):
        parts.append(_where(expected[other[0]], found[other[0]]))
    return "; ".join(parts)


def _where(expected: Any, found: Any, path: str = "") -> str:
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in {**expected, **found}:
            if expected.get(name) != found.get(name):
                return _where(expected.get(name), found.get(name), f"{path}.{name}")
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for place, (left, right) in enumerate(zip(expected, found, strict=True)):
            if left != right:
                return _where(left, right, f"{path}[{place}]")
    return f"{path} is {str(found)[:200]} instead of {str(expected)[:200]}"


# -- all points ------------------------------------------------------------------------------------------------------


class Harness:
    """The commands, what they leave when nothing happens, and the points at which something does."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        make_photos(scratch / "photos")
        os.environ["EFCIL_CACHE"] = str(scratch / "cache")
        self.cases = {case.name: case for case in cases(scratch / "photos")}
        self.expected: dict[str, dict[str, Any]] = {}
        self.calls: dict[str, list[str]] = {}
        self.seconds: dict[str, float] = {}
        (scratch / "expected").mkdir()
        for case in self.cases.values():
            folder = self.start(case, scratch / "expected" / case.name.replace(" ", "-"))
            start = time.perf_counter()
            code, self.calls[case.name], _ = give(case, folder, None, scratch / "said.txt")
            self.seconds[case.name] = time.perf_counter() - start
            if code != 0:
                raise SystemExit((scratch / "said.txt").read_text())
            self.expected[case.name] = outcome(folder)

    def start(self, case: Case, folder: Path) -> Path:
        """Make the folder as it is before the command."""
        if case.after is not None:
            shutil.copytree(self.scratch / "expected" / case.after, folder)
        return folder

    def points(self, every: int = 1, faults: tuple[str, ...] = FAULTS) -> list[Point]:
        """Return all points, or a sample of them."""
        found = [
            Point(name, call, fault)
            for name, calls in self.calls.items()
            for fault in faults
            for call in calls
            if call.split()[0] in {HALF: ("write",), FULL: NEED_ROOM}.get(fault, (call.split()[0],))
        ]
        return found[::every]

    def attempt(self, point: Point, place: Path) -> Result:
        """Let a point happen, give the command again, and compare."""
        case, folder, said = self.cases[point.case], place / "folder", place / "said.txt"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        self.start(case, folder)
        code, _, hit = give(case, folder, point, said)
        printed = said.read_text()
        complaint = _complaint(point, code, hit, printed)
        if not complaint:
            again, _, _ = give(case, folder, None, said)
            if again != 0 and not (again == 2 and ALREADY in said.read_text()):
                complaint = f"the second attempt ended with {again}: {said.read_text().strip()[-300:]}"
        if not complaint:
            try:
                complaint = difference(self.expected[case.name], outcome(folder))
            except ValueError as error:
                complaint = f"a file cannot be read ({error})"
        return Result(point, code, complaint[:1000])


def _complaint(point: Point, code: int, hit: bool, printed: str) -> str:
    if not hit:
        return f"the call was not made (exit code {code}): {printed.strip()[-300:]}"
    if point.fault in (KILL, HALF):
        return "" if code == -9 else f"it ended with {code} instead of being killed"
    if code not in (0, 1, 2) or "Unexpected" in printed or "Traceback" in printed:
        return f"it ended with {code}, and not with a sentence: {printed.strip()[-300:]}"
    return ""


def run_points(harness: Harness, points: list[Point], jobs: int) -> Iterator[Result]:
    """Yield what became of the points, worked off by so many processes."""
    reader, writer = os.pipe()
    for number in range(jobs):
        if os.fork() == 0:
            os.close(reader)
            for point in points[number::jobs]:
                result = harness.attempt(point, harness.scratch / f"worker{number}")
                # One write of less than a page: the lines of several processes do not mix.
                os.write(writer, (json.dumps(asdict(result)) + "\n").encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as lines:
        for line in lines:
            values = json.loads(line)
            yield Result(Point(**values["point"]), values["code"], values["complaint"])
    for _ in range(jobs):
        os.wait()


def warm_up() -> None:
    """Do once what is slow and without consequences. Nothing is trained: autograd does not survive a fork."""
    import efcil.experiment
    import efcil.model.learning
    from efcil.data.sources import SourceOptions, load_dataset
    from efcil.engine import progress

    progress.FIRST_SECONDS = progress.EVERY_SECONDS = 1e9  # a slow machine must not make other calls than a fast one
    torch.set_num_threads(1)
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], fused=True)
    assert efcil.experiment
    load_dataset("digits", None, SourceOptions())


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a folder in memory where there is one: no test of disks, and disks are slow to sync."""
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="efcil-crash-", dir=base) as name:
        yield Path(name).resolve()


def main() -> int:
    """Run all points or a sample, and say what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="only every so many points")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--case", help="only this command")
    parser.add_argument("--call", help="only calls in which this regular expression is found")
    parser.add_argument("--fault", choices=FAULTS, help="only this fault")
    parser.add_argument("--list", action="store_true", help="list the calls, and do nothing")
    arguments = parser.parse_args()
    warm_up()
    start = time.perf_counter()
    with scratch_folder() as scratch:
        harness = Harness(scratch)
        for name, calls in harness.calls.items():
            print(f"{name}: {len(calls)} calls, {harness.seconds[name]:.2f} s undisturbed", flush=True)
            if arguments.list:
                print("\n".join(f"  {call}" for call in calls))
        if arguments.list:
            return 0
        points = harness.points(arguments.every, (arguments.fault,) if arguments.fault else FAULTS)
        points = [point for point in points if arguments.case in (None, point.case)]
        points = [point for point in points if re.search(arguments.call or "", point.call)]
        complaints, counts = 0, Counter[str]()
        for result in run_points(harness, points, arguments.jobs):
            counts[f"{result.point.case}, {result.point.fault}"] += 1
            if result.complaint:
                complaints += 1
                point = result.point
                print(f"{point.case}, {point.fault} at {point.call!r}: {result.complaint}", flush=True)
    for name, count in counts.items():
        print(f"{name}: {count} points")
    print(f"{sum(counts.values())} points in {time.perf_counter() - start:.0f} s, {complaints} went wrong")
    if sum(counts.values()) != len(points):
        print(f"{len(points) - sum(counts.values())} points were lost")
        return 1
    return 1 if complaints else 0


if __name__ == "__main__":
    raise SystemExit(main())
