"""An evaluation as text for terminals, as JSON, as CSV with a line per class, and as a page with pictures."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from efcil import output
from efcil.errors import printable
from efcil.evaluation.result import ClassResult, Evaluation
from efcil.output import counted
from efcil.report.evaluation_page import page
from efcil.report.evaluation_words import file_name, leaning, percent, rejection, short, spelling

#: Of more classes, the confusion matrix would not fit into a terminal.
MOST_IN_MATRIX = 12
#: Of more classes, the worst are shown.
MOST_IN_TABLE = 40
#: With fewer images, chance alone makes the bins of the calibration differ much.
FEW = 200
SHOWN_CONFUSIONS, SHOWN_MISTAKES, SHOWN_CLASSES = 10, 10, 20

COLUMNS = (
    "class", "known", "task", "images", "answered", "correct", "precision", "recall", "recall_low", "recall_high", "f1",
    "recognised_as_unknown", "most_frequent_wrong_answer", "wrong_answers_of_that_class",
)  # fmt: skip


def render(found: Evaluation, form: str) -> str:
    """Return the evaluation in one of the formats; the page reads the images of mistakes again, for small copies."""
    if form == "json":
        return output.to_json(found.to_json(), indent=1) + "\n"
    return {"text": text, "csv": csv, "html": page}[form](found)


def headline(found: Evaluation) -> str:
    """Return the accuracy and its uncertainty as one line."""
    if found.accuracy is None or found.interval is None:
        return "no image of a class that the model knows"
    low, high = found.interval
    return (
        f"accuracy {percent(found.accuracy)} ({found.correct:,} of {found.images:,} images; 95% interval "
        f"{100 * low:.1f} to {100 * high:.1f})"
    )


# -- text ------------------------------------------------------------------------------------------------------------


def text(found: Evaluation) -> str:
    """Return the evaluation for a terminal."""
    parts = [
        _summary(found),
        _tasks(found),
        _per_class(found),
        _matrix(found),
        _confusions(found),
        _mistakes(found),
        _unknown(found),
        _left_out(found),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _summary(found: Evaluation) -> list[str]:
    where = [f"images in {printable(found.data)}", ""] if found.data else []
    if found.accuracy is None or found.interval is None:
        return [*where, headline(found)]
    low, high = found.interval
    lines = [
        *where,
        f"accuracy           {percent(found.accuracy):>6}  {found.correct:,} of {found.images:,} images; "
        f"95% interval {100 * low:.1f} to {100 * high:.1f}",
        f"balanced accuracy  {percent(found.balanced_accuracy):>6}  mean recall of "
        f"{counted(len(found.classes) - len(found.without_images), 'class')}",
    ]
    lines += [f"among the first {k}  {percent(share):>6}" for k, share in found.top]
    if found.calibration is not None:
        sure, error = found.calibration.mean_confidence, found.calibration.expected_error
        lines.append(f"mean confidence    {percent(sure):>6}  {leaning(sure, found.interval)}".rstrip())
        few = "; so few images make it larger" if found.images < FEW else ""
        lines.append(f"calibration error  {percent(error):>6}  expected, over {len(found.calibration.bins)} bins{few}")
    return lines


def _tasks(found: Evaluation) -> list[str]:
    if len(found.tasks) < 2 or not found.images:
        return []
    rows = [(str(each.task), str(each.classes), str(each.images), percent(each.accuracy, "-")) for each in found.tasks]
    return _table(("learned in task", "classes", "images", "accuracy"), rows)


def _per_class(found: Evaluation) -> list[str]:
    shown = [(place, each) for place, each in enumerate(found.classes) if each.images]
    if not shown:
        return []
    worst = sorted(shown, key=lambda pair: (pair[1].recall or 0.0, pair[0]))[:SHOWN_CLASSES]
    many = len(shown) > MOST_IN_TABLE
    rows = [
        (
            short(each.name),
            str(each.images),
            percent(each.precision, "-"),
            percent(each.recall, "-"),
            percent(each.f1, "-"),
            " ".join(wrong_answer(found, place)),
        )
        for place, each in (worst if many else shown)
    ]
    said = [f"the {SHOWN_CLASSES} of {len(shown)} classes with the lowest recall (all: --format csv)"] if many else []
    return said + _table(("class", "images", "precision", "recall", "F1", "most often taken for"), rows)


def wrong_answer(found: Evaluation, place: int) -> list[str]:
    """Return the class that images of the class at `place` are most often taken for, and how many; or nothing."""
    if place not in found.taken_for:
        return []
    name, images = found.taken_for[place]
    return [short(name), f"({images})"]


def _in_matrix(found: Evaluation) -> list[int]:
    return [place for place, each in enumerate(found.classes) if each.images or each.answered]


def _matrix(found: Evaluation) -> list[str]:
    """The confusion matrix; classes without images and answers are left out."""
    places = _in_matrix(found)
    if not 2 <= len(places) <= MOST_IN_MATRIX:
        return []
    matrix = found.pairs.matrix(places)
    width = max(3, len(str(matrix.max())) + 1)
    name = max(_width(short(found.classes[place].name)) for place in places)
    lines = ["confusion matrix: a row per true class, a column per answer"]
    lines.append(" " * (name + 4) + "".join(f"{number:>{width}}" for number in range(1, len(places) + 1)))
    for number, (place, row) in enumerate(zip(places, matrix.tolist(), strict=True), 1):
        cells = "".join(f"{images or '.':>{width}}" for images in row)
        lines.append(f"{number:>2}  {_padded(short(found.classes[place].name), name)}{cells}")
    return lines


def _confusions(found: Evaluation) -> list[str]:
    """The most frequent confusions, where a matrix would not fit."""
    confusions = found.confusions
    if not confusions or len(_in_matrix(found)) <= MOST_IN_MATRIX:
        return []
    lines = ["most frequent confusions"]
    for truth, answer, images in confusions[:SHOWN_CONFUSIONS]:
        pair = f"{short(found.classes[truth].name)} taken for {short(found.classes[answer].name)}"
        lines.append(f"  {images:>5}  {pair}")
    return lines + _more(len(confusions) - SHOWN_CONFUSIONS, "pair of classes", "pairs of classes")


def _mistakes(found: Evaluation) -> list[str]:
    if not found.mistakes:
        return []
    lines = ["most confident mistakes"]
    for each in found.mistakes[:SHOWN_MISTAKES]:
        truth, answer = (short(found.classes[place].name) for place in (each.truth, each.answer))
        lines.append(f"  {each.probability:.3f}  {file_name(found, each.image)}: {truth} taken for {answer}")
    return lines + _more(len(found.mistakes) - SHOWN_MISTAKES, "mistake", "mistakes")


def _unknown(found: Evaluation) -> list[str]:
    lines = []
    for each in found.unknown_classes[:SHOWN_CLASSES]:
        answers = ", ".join(f"{short(found.classes[place].name)} ({count})" for place, count in each.answers[:5])
        answers += f" and {len(each.answers) - 5} other classes" if len(each.answers) > 5 else ""
        parts = [] if each.recognised is None else [f"{each.recognised} recognised as unknown"]
        parts += [f"{'others ' if each.recognised else ''}answered as {answers}"] if answers else []
        lines.append(f"  {short(each.name)}: {counted(each.images, 'image')}; {', '.join(parts)}")
        lines += [f"    {spelling(each)}"] if each.resembles is not None else []
    lines += _more(len(found.unknown_classes) - SHOWN_CLASSES, "class", "classes")
    if lines:
        lines.insert(0, "classes that the model does not know (not counted above)")
    return lines + list(rejection(found))


def _left_out(found: Evaluation) -> list[str]:
    lines = []
    if missing := found.without_images:
        lines.append(f"{counted(len(missing), 'class')} of the model without images here: {_named(missing)}")
    if found.unreadable:
        # The command names them as it does for predictions, and JSON and the page list them.
        verb = "is" if len(found.unreadable) == 1 else "are"
        lines.append(f"{counted(len(found.unreadable), 'image')} could not be read, and {verb} not counted")
    return lines


# -- CSV -------------------------------------------------------------------------------------------------------------


def csv(found: Evaluation) -> str:
    """Return a line per class, first those of the model; text that starts like a formula gets an apostrophe."""
    lines = [output.csv_line(COLUMNS)]
    for place, each in enumerate(found.classes):
        low, high = each.interval or (None, None)
        shares = [_digits(value) for value in (each.precision, each.recall, low, high, each.f1)]
        counts = (each.task, each.images, each.answered, each.correct)
        lines.append(output.csv_line((each.name, "yes", *counts, *shares, "", *found.taken_for.get(place, ("", "")))))
    for unknown in found.unknown_classes:
        answer = [(found.classes[place].name, str(count)) for place, count in unknown.answers[:1]] or [("", "")]
        recognised = "" if unknown.recognised is None else unknown.recognised
        lines.append(output.csv_line((unknown.name, "no", "", unknown.images, *[""] * 7, recognised, *answer[0])))
    return "".join(lines)


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


# -- words -----------------------------------------------------------------------------------------------------------


def _named(classes: Sequence[ClassResult]) -> str:
    shown = ", ".join(short(each.name) for each in classes[:SHOWN_CLASSES])
    return shown if len(classes) <= SHOWN_CLASSES else f"{shown} and {len(classes) - SHOWN_CLASSES} others"


def _more(count: int, one: str, several: str) -> list[str]:
    return [f"  and {counted(count, f'other {one}', f'other {several}')}"] if count > 0 else []


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with the columns below each other; the first and the last column are text."""
    widths = [max(_width(row[column]) for row in (head, *rows)) for column in range(len(head))]
    made = []
    for row in (head, *rows):
        cells = [
            _padded(cell, width, column in (0, 5)) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        made.append("  ".join(cells).rstrip())
    return made


def _padded(text: str, width: int, left: bool = True) -> str:
    space = " " * (width - _width(text))
    return text + space if left else space + text


def _width(text: str) -> int:
    """Return how many columns of a terminal text takes: East Asian characters take two, accents none."""
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text
    )
