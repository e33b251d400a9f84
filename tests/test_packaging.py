"""The wheel that `pip install efcil` brings: built, installed elsewhere, and used from there."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
NEEDED = 77  # of setuptools, as pyproject.toml says


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    """Run a command away from the repository, and return what it prints."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EFCIL"))}
    full = {**clean, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=full, capture_output=True, text=True, timeout=300, encoding="utf-8"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what it is made of, without a network."""
    try:
        version = int(metadata.version("setuptools").split(".")[0])
    except metadata.PackageNotFoundError:
        pytest.skip("building a wheel needs setuptools")
    if version < NEEDED:
        pytest.skip(f"building a wheel needs setuptools {NEEDED}, and this is {version}")
    place = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place / name)
    shutil.copytree(ROOT / "src", place / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    target = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-c", BUILD, target, folder=place)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package installed into it, alone."""
    target = tmp_path_factory.mktemp("installed")
    if importlib.util.find_spec("pip") is None:
        zipfile.ZipFile(wheel).extractall(target)  # all that installing a wheel without scripts is
        return target
    options = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "--quiet"]
    run(sys.executable, "-m", "pip", "install", *options, "--target", target, wheel, folder=target)
    return target


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    source = ROOT / "src"
    files = {
        file.relative_to(source).as_posix()
        for file in (source / "efcil").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert files - inside == set()
    others = {name for name in inside - files if ".dist-info/" not in name}
    assert others == set(), "tests and tools stay out"
    assert f"efcil-{PROJECT['project']['version']}-py3-none-any.whl" == wheel.name


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    text = archive.read(name).decode()
    for extra in PROJECT["project"]["optional-dependencies"]:
        assert f"Provides-Extra: {extra}\n" in text
    assert "Requires-Dist: torch" in text
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    (points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "efcil = efcil.cli:command" in archive.read(points).decode()


def test_it_learns_and_predicts_where_it_is_installed(installed: Path, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for name, colour in (("dark", 40), ("light", 210)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(6):
            pixels = np.clip(draw.normal(colour, 20, (8, 8, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{number}.png")

    def efcil(*arguments: str | Path) -> str:
        return run(sys.executable, "-m", "efcil", *arguments, folder=tmp_path, PYTHONPATH=str(installed))

    assert "learn" in efcil("--help")
    where = run(sys.executable, "-c", "import efcil; print(efcil.__file__)", folder=tmp_path, PYTHONPATH=str(installed))
    assert Path(where.strip()).is_relative_to(installed)
    # The preset is package data. Both commands in one process, which loads torch once.
    learn = ["learn", "model", "--data", "data", "--preset", "digits", "--epochs", "1", "--device", "cpu", "--quiet"]
    predict = ["predict", "model", "data", "--device", "cpu", "--format", "json"]
    both = f"import sys; from efcil.cli import main; sys.exit(main({learn}) or main({predict}))"
    answers = json.loads(run(sys.executable, "-c", both, folder=tmp_path, PYTHONPATH=str(installed)))
    assert len(answers) == 12
    assert {each["predictions"][0]["class"] for each in answers} <= {"dark", "light"}


def test_the_dockerfile_installs_extras_that_exist_and_is_careful() -> None:
    text = (ROOT / "examples" / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#")]
    known = "FROM ARG ENV RUN COPY USER WORKDIR VOLUME EXPOSE HEALTHCHECK ENTRYPOINT CMD"
    assert {word for word, _ in steps} <= set(known.split())
    by_word: dict[str, list[str]] = {}
    for word, rest in steps:
        by_word.setdefault(word, []).append(rest)
    assert steps[0][0] in ("FROM", "ARG")
    copied = {source for each in by_word["COPY"] for source in each.split()[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    assert {"pyproject.toml", "src", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]} <= copied
    named = re.findall(r"/source\[([\w,-]+)\]", text)
    assert named
    extras = PROJECT["project"]["optional-dependencies"]
    assert {extra for each in named for extra in each.split(",")} <= set(extras)
    # The last user is not root, the model is a volume, and somebody looks whether it still answers.
    assert by_word["USER"][-1] not in ("root", "0")
    assert by_word["VOLUME"] == ['["/model"]']
    (check,) = by_word["HEALTHCHECK"]
    compile(json.loads(check.partition("CMD ")[2])[2], "check", "exec")
    assert f":{by_word['EXPOSE'][0]}/health" in check
    for word in ("ENTRYPOINT", "CMD", "VOLUME"):  # no shell between the process and its signals
        assert all(isinstance(json.loads(each), list) for each in by_word[word])
    assert json.loads(by_word["ENTRYPOINT"][0])[0] == "efcil"
