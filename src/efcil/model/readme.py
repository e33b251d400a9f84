"""The README.md of a model folder: a model card in the Hub's form, made from the model's card and nothing else.

The same model always gives the same text, so an audit can tell it from a file in which something is hidden. Names of
classes come from anywhere: they are shown as text, whatever Markdown or HTML they contain.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from efcil.errors import EfcilError, RunFolderError, SettingsError, printable, shortened
from efcil.files import read_regular, write_own
from efcil.methods.base import Method
from efcil.model import folder as model_folder
from efcil.model import purposes
from efcil.model.card import Card, ModelError, Visit
from efcil.output import counted

NAME = "README.md"
#: Classes and visits in the tables; the others are counted.
MOST_ROWS = 200
LONGEST_LABEL = 100
#: A larger file is not one of ours.
LARGEST = 1 << 20
LICENCE = re.compile(r"[a-z0-9][a-z0-9.\-]{0,49}")
#: OWNER/NAME, as the Hub allows it.
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}/[A-Za-z0-9][\w.\-]{0,95}", re.ASCII)
FOLDER = "path/to/this/folder"
_USED_FROM = re.compile(r'from_pretrained\("([^"\n]*)"\)')
_LICENSED = re.compile(r"^license: (\S+)$", re.M)
#: What Markdown or HTML may read as markup, and the dot that makes a link of www.
_MARKUP = re.compile(r"([\\`*_{}\[\]()<>#!|&~:@$]|(?<=www)\.)", re.I)


#: What the visits are called that are not tasks.
_KINDS = {"more": "more images", "rename": "renamed", "forget": "forgotten", "merge": "merged into one"}


def check_licence(licence: str | None) -> None:
    """Refuse what cannot be the Hub's short name of a licence."""
    if licence is not None and not (isinstance(licence, str) and LICENCE.fullmatch(licence)):
        raise SettingsError(
            f"{shortened(repr(licence))} is not a short name of a licence. Give one that the Hub knows, such as mit, "
            "apache-2.0, cc-by-4.0 or other."
        )


def write_readme(folder: Path, card: Card, licence: str | None = None, name: str | None = None) -> None:
    """Write the README.md of a model folder; one that lies there is replaced."""
    write_own(folder / NAME, readme(card, licence, name))


def refuse_changed(folder: Path) -> None:
    """Refuse to replace a README.md that somebody wrote or changed: only that of the model in the folder is ours."""
    file = folder / NAME
    if not os.path.lexists(file):
        return
    try:
        ours = is_readme(file, model_folder.read_raw(folder)[0])
    except EfcilError:
        ours = False
    if not ours:
        raise ModelError(
            f"{file} is not what efcil wrote for the model there; somebody may have changed it. Move it elsewhere, "
            "choose another folder, or save with overwrite=True."
        )


def is_readme(file: Path, card: Card) -> bool:
    """Return whether a file is, byte for byte, the README.md of this model."""
    try:
        text = read_regular(file, LARGEST).decode("utf-8")
    except (OSError, ValueError, RunFolderError):
        return False
    licensed, used = _LICENSED.search(text.partition("\n---\n")[0]), _USED_FROM.search(text)
    licence, name = licensed[1] if licensed else None, used[1] if used else FOLDER
    if licence is not None and not LICENCE.fullmatch(licence):
        return False
    return (name == FOLDER or REPOSITORY.fullmatch(name) is not None) and text == readme(card, licence, name)


def renew(folder: Path, before: Card | None, now: Card) -> None:
    """Write the README.md of a folder again if it is that of its earlier model, if any: its classes have changed."""
    file = folder / NAME
    if before is not None and is_readme(file, before):
        text = read_regular(file, LARGEST).decode("utf-8")
        licensed, used = _LICENSED.search(text.partition("\n---\n")[0]), _USED_FROM.search(text)
        write_readme(folder, now, licensed[1] if licensed else None, used[1] if used else None)


def readme(card: Card, licence: str | None = None, name: str | None = None) -> str:
    """Return the README.md of a model, with the licence that its owner gives it and its name on the Hub."""
    check_licence(licence)
    parts = (
        _front_matter(licence),
        _introduction(card),
        _use(name or FOLDER),
        _classes(card),
        _visits(card),
        _network(card),
        _stored(card),
        _limits(),
    )
    return "\n".join(line for part in parts for line in part) + "\n"


def _front_matter(licence: str | None) -> Iterator[str]:
    """Yield the YAML that the Hub reads. Nothing in it comes from a name that somebody chose."""
    yield from ("---", "library_name: efcil", "pipeline_tag: image-classification")
    if licence is None:
        yield "# license: the owner of the model has not named one yet"
    else:
        yield f"license: {licence}"
    yield from ("tags:", "- efcil", "- class-incremental-learning", "- exemplar-free", "- image-classification")
    yield from ("---", "")


def _introduction(card: Card) -> Iterator[str]:
    count, visits = len(card.classes), len(card.visits)
    yield f"# Image classifier with {counted(count, 'class')}"
    yield ""
    yield (
        f"Learned with the method {escaped(card.settings.method)} of [efcil](https://pypi.org/project/efcil/) in "
        f"{counted(visits, 'visit')}. Every visit saw its own images only, and none of them was kept. The "
        "model can learn further classes without the images of these."
    )
    yield ""


def _use(name: str) -> Iterator[str]:
    package = "efcil" if name == FOLDER else "'efcil[hub]'"
    yield from (
        "## Use",
        "",
        "```python",
        "from efcil import IncrementalClassifier",
        f'classifier = IncrementalClassifier.from_pretrained("{name}")',
        'print(classifier.predict(["photograph.jpg"]))',
        "```",
        "",
        f"`pip install {package}` installs what that needs. `classifier.partial_fit(images, labels)` teaches it more.",
        "",
    )


def _classes(card: Card) -> Iterator[str]:
    yield from ("## Classes", "", "| class | images | learned | visit |", "|---|---:|---|---:|")
    visits = [number for number, visit in enumerate(card.visits, start=1) if visit.kind == "task"]
    for each in card.classes[:MOST_ROWS]:
        images = f"{each.images:,}" if each.images else ""
        yield f"| {escaped(each.label)} | {images} | {escaped(each.learned[:10])} | {visits[each.task]} |"
    yield from _left_out(len(card.classes), "classes")
    yield ""


def _visits(card: Card) -> Iterator[str]:
    """Yield every visit, with the accuracy that was measured at its end where it is known."""
    measured = [_accuracy(visit) for visit in card.visits]
    title = " accuracy on images not learned from |" if any(measured) else ""
    yield from ("## Visits", "", f"| visit | date | classes | images |{title}")
    yield "|---:|---|---:|---:|" + "---:|" * bool(title)
    for number, visit in enumerate(card.visits[:MOST_ROWS], start=1):
        kind = "" if visit.kind == "task" else f" ({_KINDS[visit.kind]})"
        row = f"| {number} | {escaped(visit.date[:10])} | {visit.classes:,}{kind} | {visit.images:,} |"
        yield row + (f" {measured[number - 1]} |" if title else "")
    yield from _left_out(len(card.visits), "visits")
    yield ""


def _accuracy(visit: Visit) -> str:
    """Return the accuracy that a visit was measured to have, nothing where that is not known."""
    found = visit.measured
    return "" if found is None else f"{100 * found.right / found.images:.1f} % ({found.right:,} of {found.images:,})"


def _network(card: Card) -> Iterator[str]:
    size = card.image_size
    yield from ("## Network", "")
    yield f"- {escaped(card.resolved.network)}, on images of {size} x {size} pixels"
    if card.pretrained is not None:
        pretrained: dict[str, str] = dataclasses.asdict(card.pretrained)
        yield "- It began with weights that were trained elsewhere:"
        yield from (f"  - {name.replace('_', ' ')}: {escaped(value)}" for name, value in pretrained.items())
    else:
        yield "- It was trained from scratch, on the images of these classes only."
    if card.settings.classifier != "own":
        yield f"- classified by: {escaped(card.classified_by)}"
    yield ""


def _stored(card: Card) -> Iterator[str]:
    yield from ("## What is stored", "")
    yield "No image, and no name or path of one, is in the folder. What is in it, and what it could reveal:"
    yield ""
    for purpose in _purposes(model_folder.skeleton(card)):
        recovery = purposes.recovery(purpose, as_pretrained=card.as_pretrained)
        yield f"- {purpose.title} ({purpose.use}). {recovery}"
    yield from ("- the card, `model.json`: names of the classes, counts and dates as above, and the settings", "")
    yield "`efcil audit` compares the folder with training images and fails if it finds one, or anything unexplained."
    yield ""


def _purposes(method: Method) -> list[Any]:
    """Return the purposes of the tensors that the method has, each once."""
    known = purposes.including(method.purposes(), method.network.backbone)
    found = (purposes.purpose_of(name, known) for name in method.state_dict())
    return list(dict.fromkeys(purpose for purpose in found if purpose is not None))


def _limits() -> Iterator[str]:
    yield from (
        "## Limits",
        "",
        "It answers with one of the classes above, also for images of none of them, unless it is asked to say",
        "unknown: `classifier.predict(images, unknown=0.05)`. On images of another kind than those it learned from,",
        "expect more mistakes.",
    )


def _left_out(count: int, things: str) -> Iterator[str]:
    if count > MOST_ROWS:
        yield from ("", f"... and {count - MOST_ROWS:,} more {things}.")


def escaped(text: object) -> str:
    """Return text as Markdown that shows it as it is, on one line: no markup, no HTML, no control characters."""
    return _MARKUP.sub(r"\\\1", shortened(printable(text), LONGEST_LABEL))
