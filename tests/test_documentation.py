"""README and docs: links lead somewhere, every page is reached from the index, words of the field are used."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"))]
PAGES += sorted(DOCS.rglob("*.md"))
#: Made from the code: its words are those of the settings' help.
GENERATED = DOCS / "settings.md"
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def prose(page: Path) -> str:
    """Return the text of a page without blocks of code and what stands between backticks."""
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "``", text)


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield file and anchor of every link of a page that leads into the repository."""
    for match in LINK.finditer(prose(page)):
        target, _, anchor = match["target"].partition("#")
        if not re.match(r"[a-z]+:", target):
            yield (page.parent / target).resolve() if target else page, anchor


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = [heading.replace("`", "").strip().lower() for heading in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        assert path.exists(), f"{page.name} links to {path}, which does not exist"
        assert path.is_relative_to(ROOT), f"{page.name} links to {path}, outside of the repository"
        if anchor:
            assert anchor in anchors(path), f"{page.name} links to #{anchor}, which {path.name} does not have"


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_programs_of_the_repository_that_a_page_names_exist(page: Path) -> None:
    for name in re.findall(r"\b(?:benchmarks|tests|tools)/[a-z_/]+\.py\b", page.read_text(encoding="utf-8")):
        assert (ROOT / name).is_file(), f"{page.name} names {name}, which does not exist"


def test_every_page_is_reached_from_the_index() -> None:
    reached, waiting = set(), [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            waiting += [path for path, _ in links(page) if path.suffix == ".md" and path.is_relative_to(DOCS)]
    assert set(DOCS.rglob("*.md")) - reached == set()


def test_every_page_is_in_the_site() -> None:
    def pages(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for below in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            yield from pages(below)

    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = sorted(pages(site["nav"]))
    assert listed == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
@pytest.mark.parametrize("words", ["goes on", "go on", "gone on", "way back", "told", "taken up", "not yet measured"])
def test_words_of_the_field(page: Path, words: str) -> None:
    """Resume, backward pass, unless set otherwise: readers know these, and tools find them."""
    if page == GENERATED and words != "not yet measured":
        return
    text = " ".join(prose(page).split())
    assert not re.search(rf"\b{words}\b", text), f"{page.name} says {words!r}"


@pytest.mark.parametrize("page", sorted((DOCS / "methods").glob("*.md")), ids=lambda page: page.stem)
def test_a_method_says_when_to_take_it_before_its_mathematics(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    for word in ("**Take it**", "**Do not take it**"):
        assert any(line.startswith(word) for line in lines[:12]), f"{page.name} does not begin with {word}"


def test_constraints_are_sorted_and_name_everything_once() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    packages = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines]
    assert packages == sorted(set(packages))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    bare = {re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", each)[0]).lower() for each in asked}  # type: ignore[index]
    assert bare - set(packages) == set(), "constraints.txt pins everything that pyproject.toml asks for"


def test_versions_agree() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == version
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_lowest_versions_come_from_the_declared_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "tools" / "lowest.py"))["main"](["--leave-out", "torch"])
    lines = capsys.readouterr().out.splitlines()
    assert "safetensors==0.4.4" in lines, "earlier versions cannot read an empty tensor"
    assert not [line for line in lines if line.startswith(("torch==", "types-PyYAML", "mkdocs"))]
    assert all(re.match(r"[\w.-]+==[\d.]+( ;.*)?$", line) for line in lines)
