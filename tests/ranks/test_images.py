"""Images that the processes of one machine decode together and keep once: the same bits, and nothing left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from launching import Launch, assert_same, launcher, torchrun
from PIL import Image

from efcil.runfolder import RunFolder

pytestmark = pytest.mark.skipif(
    not (hasattr(os, "memfd_create") and torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="needs Linux and gloo: elsewhere every process has its own images",
)
COUNT = 13


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Return a function that runs a unit in so many processes."""
    yield from launcher(tmp_path_factory.mktemp("ranks") / "output")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images of different shapes, the later ones larger."""
    random = np.random.default_rng(0)
    for number in range(COUNT):
        noise = random.integers(0, 256, (9 + number % 5, 10 + 2 * number, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{number}.png")
    return tmp_path


@pytest.mark.parametrize(("processes", "machines"), [(2, 1), (3, 1), (4, 2)])
def test_all_have_the_images_of_one_process_from_one_place(
    processes: int, machines: int, launch: Launch, folder: Path
) -> None:
    codes, said = launch(processes, folder, unit="brought_together", machines=machines)
    assert codes == [0] * processes, said


UNITS = (
    "decoded_ahead", "moved_to_the_file", "nowhere_to_put_them", "broken_images", "stopped_together",
    "without_shared_files", "threads_are_divided",
)  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_units(launch: Launch, folder: Path, unit: str) -> None:
    codes, said = launch(3, folder, unit=unit)
    assert codes == [0, 0, 0], said


@pytest.mark.parametrize("choice", ["host", "disk"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_process_ends_all_and_leaves_nothing(launch: Launch, folder: Path, rank: int, choice: str) -> None:
    codes, said = launch(3, folder, rank, choice, unit="killed")
    assert codes == [-signal.SIGKILL if each == rank else 0 for each in range(3)], said
    assert not list(folder.glob("cache/*"))
    assert not list(folder.glob("cache/.*"))


# -- runs --------------------------------------------------------------------------------------------------------------

CLASSES = 4


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the layout of ImageNet, of small photographs whose brightness tells the class."""
    folder, random = tmp_path_factory.mktemp("imagenet"), np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 8)):
        for label in range(CLASSES):
            place = folder / split / f"n{label:08d}"
            place.mkdir(parents=True)
            for number in range(count):
                shape = (18 + number % 3, 20 + number % 5, 3)
                noise = random.integers(60 * label, 60 * label + 70, shape, dtype=np.uint8)
                Image.fromarray(noise).save(place / f"{number}.JPEG", "PNG")
    return folder


def arguments(imagenet: Path, output: Path, *others: object) -> list[object]:
    small = (
        "--tasks",
        2,
        "--epochs",
        2,
        "--image-size",
        16,
        "--network",
        "slim",
        "--batch-size",
        12,
        "--device",
        "cpu",
    )
    # Crops of whole images are float32, whatever else is computed in.
    squares = ("--augmentation", "crop-flip", "--method", "efc", "--dataset", "imagenet-1k", "--data", imagenet)
    return ["run", *squares, *small, "--output", output, *others]


def run_of(output: Path) -> RunFolder:
    (found,) = output.glob("imagenet-1k/*/*/seed0/settings.yaml")
    return RunFolder(found.parent)


@pytest.fixture(scope="module")
def single(launch: Launch, imagenet: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where a single process has learned the photographs."""
    output = tmp_path_factory.mktemp("single")
    codes, said = launch(1, *arguments(imagenet, output))
    assert codes == [0], said
    return output


@pytest.mark.parametrize("processes", [2, 3])
def test_photographs_are_learned_as_by_one_process(
    processes: int, launch: Launch, imagenet: Path, single: Path, tmp_path: Path
) -> None:
    codes, said = launch(processes, *arguments(imagenet, tmp_path))
    assert codes == [0] * processes, said
    assert f"are kept in memory, once for {processes} processes (" in said
    assert_same(run_of(single), run_of(tmp_path))


def test_a_killed_run_of_photographs_resumes_with_another_number(
    launch: Launch, imagenet: Path, single: Path, tmp_path: Path
) -> None:
    given = arguments(imagenet, tmp_path, "--checkpoint-steps", 2, "--keep-images", "disk")
    ended = torchrun(2, [str(each) for each in given], SIGNAL_AT=f"1 6 {int(signal.SIGKILL)}")
    assert ended.returncode != 0
    assert "Another process of this run has ended" in ended.stderr
    codes, said = launch(3, *given)
    assert codes == [0, 0, 0], said
    assert "resuming task 1" in run_of(tmp_path).log_file.read_text()
    assert_same(run_of(single), run_of(tmp_path))
