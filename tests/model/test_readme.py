"""The README.md of a model: what it says, that names cannot break it, and that an audit knows it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from efcil.classifier import IncrementalClassifier
from efcil.cli import main
from efcil.model import Card
from efcil.model.card import Pretrained
from efcil.model.contents import extras
from efcil.model.folder import read_raw
from efcil.model.measured import Measured
from efcil.model.readme import MOST_ROWS, escaped, is_readme, readme, write_readme

HOSTILE = [
    "a|b\n| c | d |",
    "<script>alert(1)</script>",
    "[click](http://example.org)",
    "![x](http://example.org/x.png)",
    "`code` **bold** _thin_ ~~gone~~",
    "---\nlicense: mit",
    "```\n# heading",
    "&lt;b&gt;",
    "www.example.org",
    "\u202egnp.exe",
    "x" * 5000,
    "\\",
]


@pytest.fixture
def card(trained: Path) -> Card:
    return read_raw(trained)[0]


def renamed(card: Card, *labels: Any) -> Card:
    """Return the card of a model of one task with these classes."""
    classes = tuple(dataclasses.replace(card.classes[0], label=label, task=0) for label in labels)
    return dataclasses.replace(card, classes=classes, visits=card.visits[:1])


def rows(text: str) -> list[str]:
    table = text.partition("## Classes\n")[2].partition("\n## ")[0]
    return [line for line in table.splitlines() if line.startswith("|")][2:]


def test_what_it_says(card: Card) -> None:
    text = readme(card, "cc-by-4.0", "somebody/things")
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "efcil",
        "pipeline_tag": "image-classification",
        "license": "cc-by-4.0",
        "tags": ["efcil", "class-incremental-learning", "exemplar-free", "image-classification"],
    }
    day = card.classes[0].learned[:10]
    assert rows(text) == [f"| {label} | 24 | {day} | {visit} |" for label, visit in ((0, 1), (1, 1), (2, 2))]
    for words in (
        'IncrementalClassifier.from_pretrained("somebody/things")',
        "the method efc",
        "slim, on images of 8 x 8 pixels",
        "trained from scratch",
        "No image, and no name or path of one, is in the folder",
        "class covariances",
        "pip install 'efcil[hub]'",
    ):
        assert words in body, words
    assert "license" not in yaml.safe_load(readme(card).split("---\n")[1])


def test_facts_that_a_card_may_have(card: Card) -> None:
    """Where the weights come from, and what was measured at the end of a visit."""
    facts = Pretrained("slim", "<b>x</b>", "apache-2.0", "ab" * 32, "ImageNet")
    card = dataclasses.replace(card, pretrained=facts)
    measured = Measured("held out", right=7, images=8, among=3, classifier="auto")
    visits = (card.visits[0], dataclasses.replace(card.visits[1], measured=measured))
    card = dataclasses.replace(card, visits=visits)
    text = readme(card)
    assert "trained from scratch" not in text
    assert "  - licence: apache-2.0\n" in text
    assert "  - trained on: ImageNet\n" in text
    assert r"  - source: \<b\>x\</b\>" in text
    assert f"| 2 | {card.visits[1].date[:10]} | 1 | 24 | 87.5 % (7 of 8) |" in text


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_is_more_than_text(name: str, card: Card) -> None:
    text = readme(renamed(card, name, "plain"))
    usual = readme(renamed(card, "name", "plain"))
    assert len(text.splitlines()) == len(usual.splitlines())
    assert text.split("---\n")[1] == usual.split("---\n")[1]
    assert len(rows(text)) == 2
    cell = rows(text)[0].removeprefix("| ").rpartition(" | 24 |")[0]
    assert len(cell) < 250
    assert all(character.isprintable() for character in cell)
    for place, character in enumerate(cell):
        if character in "`*_{}[]()<>#!|&~:@$":
            before = cell[:place]
            assert (len(before) - len(before.rstrip("\\"))) % 2 == 1, "a backslash makes it text"
    assert not cell.startswith("www.")


def test_many_classes_are_counted(card: Card) -> None:
    text = readme(renamed(card, *range(MOST_ROWS + 7)))
    assert len(rows(text)) == MOST_ROWS
    assert "... and 7 more classes." in text


def test_plain_names_stay_as_they_are() -> None:
    assert escaped("labrador-retriever, 2.5 years (old)") == r"labrador-retriever, 2.5 years \(old\)"


# -- the audit -------------------------------------------------------------------------------------------------------


def test_an_audit_knows_it(model_folder: Path, digits: Any) -> None:
    card = read_raw(model_folder)[0]
    file = model_folder / "README.md"
    for licence, name in ((None, None), ("mit", None), (None, "somebody/things"), ("other", "a/b")):
        write_readme(model_folder, card, licence, name)
        assert extras(model_folder, card).files == []
    text = file.read_text()
    for changed in (
        text + "\n",
        text.replace("24", "25"),
        text.replace("license: other", "license: " + "x" * 60),
        text.replace("license: other", "license: other\nlicense: other"),
        text.replace('"a/b"', '"a/' + "b" * 200 + '"'),
        text.replace('"a/b"', '"a b"'),
        "",
    ):
        assert changed != text
        file.write_text(changed)
        assert extras(model_folder, card).files == ["README.md"]
    file.write_bytes(b"\xff" * 100)
    assert not is_readme(file, card)
    file.unlink()
    (model_folder.parent / "elsewhere.md").write_text(text)
    file.symlink_to(model_folder.parent / "elsewhere.md")
    assert extras(model_folder, card).files == ["README.md"], "a link is not ours"
    file.unlink()
    IncrementalClassifier.load(model_folder, device="cpu").partial_fit(*digits.train(3)).save(model_folder)
    write_readme(model_folder, card)
    assert extras(model_folder, read_raw(model_folder)[0]).files == ["README.md"], "it describes an earlier state"


def test_it_is_renewed_by_every_visit(model_folder: Path, digits: Any) -> None:
    file = model_folder / "README.md"
    write_readme(model_folder, read_raw(model_folder)[0], "mit", "somebody/things")
    classifier = IncrementalClassifier.load(model_folder, device="cpu").partial_fit(*digits.train(3))
    classifier.save(model_folder)
    assert file.read_text() == readme(classifier.model_.card, "mit", "somebody/things")
    classifier.set_params(classifier="nearest-mean").partial_fit(*digits.train(4), folder=model_folder)
    assert file.read_text() == readme(classifier.model_.card, "mit", "somebody/things")
    file.write_text("changed by hand\n")
    classifier.partial_fit(*digits.train(5), folder=model_folder)
    assert file.read_text() == "changed by hand\n"


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = read_raw(model_folder)[0]
    assert main(["card", str(model_folder)]) == 0
    assert capsys.readouterr().out == readme(card)
    file = model_folder / "README.md"
    assert main(["card", str(model_folder), "--output", str(file), "--license", "mit"]) == 0
    assert capsys.readouterr().out == f"{file}: a model card in Markdown.\n"
    assert file.read_text() == readme(card, "mit")
    assert main(["card", str(model_folder), "--license", "my own"]) == 2
    assert "not a short name of a licence" in capsys.readouterr().err
    assert main(["card", str(model_folder), "--output", str(model_folder / "model.json")]) == 2
    assert "is a file of the model itself" in capsys.readouterr().err
    assert main(["card", str(tmp_path / "nowhere")]) == 2
    assert "is not a model folder" in capsys.readouterr().err
