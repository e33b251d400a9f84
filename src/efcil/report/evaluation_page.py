"""An evaluation as one self-contained HTML page: numbers, classes, heat map, reliability, and pictures of mistakes.

The page loads nothing, runs nothing, and says so to the browser. It holds small copies of images of mistakes.
"""

from __future__ import annotations

import base64
import datetime
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

import efcil
from efcil.data.decode import Encoded, Fit, decode_image
from efcil.errors import DataError
from efcil.evaluation.classification import Calibration
from efcil.evaluation.result import MOST_IN_FULL, ClassResult, Evaluation, Mistake
from efcil.output import counted, escape
from efcil.report.evaluation_words import file_name, percent, rejection, spelling
from efcil.report.style import STYLE

#: The picture of a mistake is so many pixels wide and high; so many of them are on the page.
THUMBNAIL, SHOWN_MISTAKES = 160, 24
#: A heat map of more classes is a picture without numbers, and of the classes the worst are shown first.
MOST_IN_TABLE = 40
SHOWN_CONFUSIONS, SHOWN_LISTED, SHOWN_WORST = 15, 50, 20
_RIGHT, _WRONG = (0, 114, 178), (213, 94, 0)

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
PAGE_STYLE = """
:root { --right: 0, 114, 178; --wrong: 213, 94, 0; }
@media (prefers-color-scheme: dark) { :root { --right: 64, 160, 220; --wrong: 240, 130, 50; } }
body { overflow-wrap: anywhere; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem; padding: 0;
  margin: 1rem 0; }
.numbers div { border: 1px solid var(--rule); border-radius: .4rem; padding: .5rem .7rem; }
.numbers dt { color: var(--soft); font-size: .85rem; } .numbers dd { margin: 0; }
.numbers dd.large { font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.numbers dd.soft { font-size: .85rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: 1.1rem .9rem; }
.pictures figure { margin: 0; font-size: .85rem; line-height: 1.35; }
.pictures img, .pictures .none { display: block; width: 100%; aspect-ratio: 1; object-fit: cover; border-radius: .3rem;
  background: var(--rule); margin-bottom: .3rem; }
.pictures .none { display: grid; place-items: center; color: var(--soft); }
.answer { color: rgb(var(--wrong)); font-weight: 600; } .truth { color: rgb(var(--right)); font-weight: 600; }
th.name, td.name { white-space: normal; overflow-wrap: anywhere; min-width: 6.5rem; max-width: 16rem; }
td.text { white-space: normal; min-width: 12rem; } td.text, th.text { text-align: left; }
th.bar, td.bar { min-width: 6.2rem; text-align: left; }
.bar i { display: inline-block; width: 2.4rem; height: .55rem; margin-right: .4rem; background: var(--rule); }
.bar b { display: block; height: 100%; background: rgb(var(--right)); }
table.matrix { border-collapse: separate; border-spacing: 1px; }
table.matrix td { text-align: center; min-width: 1.3rem; }
table.matrix th:first-child { position: sticky; left: 0; background: var(--paper); max-width: 9rem; overflow: hidden;
  text-overflow: ellipsis; font-weight: normal; }
table.matrix thead th { text-align: center; font-weight: normal; color: var(--soft); }
ul.columns { columns: 17rem; padding-left: 1.2rem; }
img.map { width: min(100%, 40rem); image-rendering: pixelated; border: 1px solid var(--rule); display: block; }
svg.square { max-width: 26rem; } svg .ideal { stroke: var(--soft); stroke-dasharray: 4 4; }
svg .share { fill: rgb(var(--right)); } svg .gap { fill: none; stroke: rgb(var(--wrong)); stroke-width: 2; }
svg .many { fill: var(--soft); }
@media (max-width: 30rem) { body { margin: 1rem auto; padding: 0 .7rem; } h1 { font-size: 1.3rem; }
  th, td { padding: .2rem .3rem; } table.matrix td, table.matrix th { padding: .1rem .15rem; font-size: .75rem; }
  table.matrix td { min-width: 1.15rem; } table.matrix th:first-child { max-width: 6.5rem; }
  .pictures { grid-template-columns: repeat(2, 1fr); } .numbers { grid-template-columns: repeat(2, 1fr); } }
"""


def page(found: Evaluation) -> str:
    """Return the page; the images of the mistakes that it shows are read again for it."""
    now = datetime.datetime.now().astimezone()
    pictures = {each.image: picture for each in found.mistakes[:SHOWN_MISTAKES] if (picture := thumbnail(each.image))}
    title = f"Evaluation of {Path(found.model).name}" if found.model else "Evaluation"
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{STYLE}{PAGE_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        f'<p class="soft">On the images in {escape(found.data or "memory")}. Written {now:%Y-%m-%d %H:%M %Z} by efcil '
        f"{escape(efcil.__version__)}. {_copies(len(pictures))}</p>",
        _numbers(found),
        _notes(found),
        _classes(found),
        _mistakes(found, pictures),
        _confusions(found),
        _reliability(found.calibration),
        _unknown(found),
        _unreadable(found),
    ]
    return "\n".join([*(part for part in parts if part), "</body></html>"]) + "\n"


def _copies(count: int) -> str:
    if not count:
        return "This page holds no copy of an image."
    copies = "a small copy of 1 image" if count == 1 else f"small copies of {count} images"
    return f"<strong>This page holds {copies}:</strong> share it only as you would share these."


def thumbnail(file: str) -> str | None:
    """Return a file's centred square as a small JPEG in a data URI, without metadata; None if it cannot be read."""
    try:
        pixels = decode_image(Encoded(Path(file), file), Fit(THUMBNAIL, resize=True, orient=True))
    except DataError:
        return None
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode()


# -- sections --------------------------------------------------------------------------------------------------------


def _numbers(found: Evaluation) -> str:
    if found.accuracy is None or found.interval is None or found.calibration is None:
        return "<p>There is no image of a class that the model knows.</p>"
    low, high = found.interval
    measured = len(found.classes) - len(found.without_images)
    boxes = [
        (
            "Accuracy",
            percent(found.accuracy),
            f"{found.correct:,} of {found.images:,}; 95% interval {100 * low:.1f} to {100 * high:.1f}",
        ),
        (
            "Balanced accuracy",
            percent(found.balanced_accuracy),
            f"mean recall of {measured} class{'es' if measured != 1 else ''}",
        ),
        *((f"Among the first {k}", percent(share), "the true class is one of these") for k, share in found.top),
        (
            "Calibration error",
            percent(found.calibration.expected_error),
            f"expected; mean confidence {percent(found.calibration.mean_confidence)}",
        ),
    ]
    if found.rejection is not None and found.rejection.unknown_images:
        recognised, images = found.rejection.unknown_recognised, found.rejection.unknown_images
        boxes.append(("Unknown recognised", percent(recognised / images), f"{recognised:,} of {images:,}"))
    items = "".join(
        f'<div><dt>{escape(name)}</dt><dd class="large">{value}</dd><dd class="soft">{escape(note)}</dd></div>'
        for name, value, note in boxes
    )
    return f'<dl class="numbers">{items}</dl>'


def _notes(found: Evaluation) -> str:
    notes = []
    if missing := found.without_images:
        named = ", ".join(escape(each.name) for each in missing[:SHOWN_LISTED])
        more = f" and {len(missing) - SHOWN_LISTED} others" if len(missing) > SHOWN_LISTED else ""
        notes.append(f"<li>{counted(len(missing), 'class')} of the model without images: {named}{more}</li>")
    if found.unknown_classes:
        images = sum(each.images for each in found.unknown_classes)
        notes.append(
            f"<li>{counted(len(found.unknown_classes), 'class')} that the model does not know "
            f"({counted(images, 'image')}): not counted above, <a href='#unknown'>reported apart</a></li>"
        )
    if found.unreadable:
        count = counted(len(found.unreadable), "image")
        notes.append(f"<li>{count} could not be read: <a href='#unreadable'>listed below</a></li>")
    return f"<ul>{''.join(notes)}</ul>" if notes else ""


def _mistakes(found: Evaluation, pictures: dict[str, str]) -> str:
    if not found.mistakes:
        return "<h2>Mistakes</h2><p>None.</p>" if found.images else ""
    figures = "".join(_mistake(found, each, pictures.get(each.image)) for each in found.mistakes[:SHOWN_MISTAKES])
    count = len(found.mistakes)
    which = f"The first {SHOWN_MISTAKES} of {count:,}" if count > SHOWN_MISTAKES else f"All {count}"
    return (
        f'<h2>Most confident mistakes</h2><p class="soft">{which}, cut to the square that the model sees. '
        "Some may be right answers to wrong labels.</p>"
        f'<div class="pictures">{figures}</div>'
    )


def _mistake(found: Evaluation, mistake: Mistake, picture: str | None) -> str:
    truth, answer = (escape(found.classes[place].name) for place in (mistake.truth, mistake.answer))
    shown = (
        '<span class="none">no picture</span>'
        if picture is None
        else f'<img src="{picture}" alt="{truth}, taken for {answer}" width="{THUMBNAIL}" height="{THUMBNAIL}">'
    )
    name = escape(file_name(found, mistake.image))
    return (
        f'<figure>{shown}<figcaption><span class="answer">{answer}</span> {mistake.probability:.2f}<br>is '
        f'<span class="truth">{truth}</span> {mistake.probability_of_truth:.2f}<br>{name}</figcaption></figure>'
    )


def _classes(found: Evaluation) -> str:
    shown = [(place, each) for place, each in enumerate(found.classes) if each.images]
    if not shown:
        return ""
    tasks = len(found.tasks) > 1
    head = (
        '<tr><th class="name">class</th>'
        + ("<th>task</th>" if tasks else "")
        + '<th>images</th><th class="bar">recall</th><th class="bar">precision</th><th>F1</th><th>recall, 95%</th>'
        '<th class="text">most often taken for</th></tr>'
    )

    def table(chosen: Sequence[tuple[int, ClassResult]]) -> str:
        rows = "".join(_class(found, place, each, tasks) for place, each in chosen)
        return f'<div class="wide"><table>{head}{rows}</table></div>'

    made = table(shown)
    if len(shown) > MOST_IN_TABLE:
        worst = sorted(shown, key=lambda pair: (pair[1].recall or 0.0, pair[0]))[:SHOWN_WORST]
        made = (
            f'<p class="soft">The {SHOWN_WORST} with the lowest recall.</p>{table(worst)}'
            f"<details><summary>All {len(shown)} classes</summary>{made}</details>"
        )
    return f"<h2>Classes</h2>{made}{_tasks(found)}"


def _class(found: Evaluation, place: int, each: ClassResult, tasks: bool) -> str:
    low, high = each.interval or (0.0, 1.0)
    wrong = "{} ({})".format(*map(escape, found.taken_for[place])) if place in found.taken_for else ""
    return (
        f'<tr><td class="name">{escape(each.name)}</td>'
        + (f"<td>{each.task}</td>" if tasks else "")
        + f"<td>{each.images:,}</td>{_bar(each.recall)}{_bar(each.precision)}<td>{percent(each.f1)}</td>"
        f'<td>{100 * low:.0f} to {100 * high:.0f}</td><td class="text">{wrong}</td></tr>'
    )


def _bar(share: float | None) -> str:
    if share is None:
        return '<td class="bar soft">no answer</td>'
    return f'<td class="bar"><i><b style="width: {100 * share:.0f}%"></b></i>{percent(share)}</td>'


def _tasks(found: Evaluation) -> str:
    if len(found.tasks) < 2:
        return ""
    rows = "".join(
        f"<tr><td>{each.task}</td><td>{each.classes}</td><td>{each.images:,}</td><td>{percent(each.accuracy)}</td></tr>"
        for each in found.tasks
    )
    head = "<tr><th>learned in task</th><th>classes</th><th>images</th><th>accuracy</th></tr>"
    return f'<h3>By task</h3><div class="wide"><table>{head}{rows}</table></div>'


# -- confusion -------------------------------------------------------------------------------------------------------


def _confusions(found: Evaluation) -> str:
    """The heat map (rows as shares of their class) and the most frequent confusions."""
    if not found.images:
        return ""
    places = [place for place, each in enumerate(found.classes) if each.images or each.answered]
    if len(places) <= MOST_IN_TABLE:
        drawn = _table(found, places)
    elif len(places) <= MOST_IN_FULL:
        drawn = _picture(found, places)
    else:
        drawn = f'<p class="soft">{len(places):,} classes are too many for a picture.</p>'
    confusions = found.confusions
    items = "".join(
        f"<li>{images:,}: {escape(found.classes[truth].name)} taken for {escape(found.classes[answer].name)}</li>"
        for truth, answer, images in confusions[:SHOWN_CONFUSIONS]
    )
    more = len(confusions) - SHOWN_CONFUSIONS
    rest = f'<p class="soft">and {counted(more, "other pair")} of classes</p>' if more > 0 else ""
    listed = f'<h3>Most frequent confusions</h3><ul class="columns">{items}</ul>{rest}' if items else ""
    return f"<h2>Confusion matrix</h2>{drawn}{listed}"


def _table(found: Evaluation, places: Sequence[int]) -> str:
    head = "".join(f'<th title="{escape(found.classes[p].name)}">{n}</th>' for n, p in enumerate(places, 1))
    lines = []
    for number, (place, row) in enumerate(zip(places, found.pairs.matrix(places).tolist(), strict=True), 1):
        name, total = escape(found.classes[place].name), max(1, found.classes[place].images)
        cells = "".join(
            _cell(
                images,
                total,
                place == other,
                f"{name} as {escape(found.classes[other].name)}",
            )
            for other, images in zip(places, row, strict=True)
        )
        lines.append(f'<tr><th title="{name}">{number} {name}</th>{cells}</tr>')
    return (
        '<p class="soft">A row per true class, a column per answer, with numbers of images. Blue are right answers, '
        "orange wrong ones; the stronger, the larger the share of the class.</p>"
        f'<div class="wide"><table class="matrix"><thead><tr><th></th>{head}</tr></thead>{"".join(lines)}</table></div>'
    )


def _cell(images: int, total: int, right: bool, title: str) -> str:
    if not images:
        return "<td></td>"
    colour, depth = "--right" if right else "--wrong", 0.12 + 0.58 * images / total
    return f'<td style="background: rgba(var({colour}), {depth:.2f})" title="{title}">{images}</td>'


def _picture(found: Evaluation, places: Sequence[int]) -> str:
    matrix = found.pairs.matrix(places).astype(np.float64)
    shares = matrix / np.maximum(1, matrix.sum(axis=1, keepdims=True))
    # Square roots: among hundreds of classes, a few percent of one class taken for another should be seen.
    depth = np.sqrt(shares)
    pixels = np.zeros((*shares.shape, 4), np.uint8)
    pixels[..., :3] = np.where(np.eye(len(places), dtype=bool)[..., None], _RIGHT, _WRONG)
    pixels[..., 3] = np.round(255 * depth)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG", optimize=True)
    source = "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
    return (
        f'<p class="soft">{len(places)} classes in the order in which they were learned: a row of pixels per true '
        "class, a column per answer. Blue are right answers, orange wrong ones; the stronger, the larger the share of "
        f'the class.</p><img class="map" src="{source}" alt="confusion matrix of {len(places)} classes">'
    )


# -- calibration -----------------------------------------------------------------------------------------------------


def _reliability(found: Calibration | None) -> str:
    if found is None:
        return ""
    rows = "".join(
        f"<tr><td>{each.low:.1f} to {each.high:.1f}</td><td>{each.images:,}</td><td>{percent(each.confidence)}</td>"
        f"<td>{percent(each.accuracy)}</td></tr>"
        for each in found.bins
        if each.images
    )
    return (
        f"<h2>Reliability</h2><figure>{reliability_chart(found)}<figcaption>Blue: the share of right answers among "
        "those of about this probability. Orange: their mean probability. On the dashed line both agree; blue below "
        "orange is too sure. Grey, below: how many answers.</figcaption></figure>"
        f"<details><summary>As a table</summary><table><tr><th>probability</th><th>answers</th><th>mean</th>"
        f"<th>right</th></tr>{rows}</table></details>"
    )


def reliability_chart(found: Calibration) -> str:
    """Return the reliability diagram as SVG: accuracy and mean confidence per bin, and the number of answers."""
    left, top, side, strip = 44, 8, 300, 46
    bottom, most = top + side, max(each.images for each in found.bins)
    height = bottom + strip + 44
    parts = [f'<svg class="square" viewBox="0 0 {left + side + 22} {height}" role="img" aria-label="reliability">']
    for tick in range(0, 101, 20):
        y, x = bottom - side * tick / 100, left + side * tick / 100
        parts.append(f'<line class="grid" x1="{left}" x2="{left + side}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick}%</text>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + strip + 20}" text-anchor="middle">{tick}%</text>')
    for each in found.bins:
        if each.accuracy is None or each.confidence is None:
            continue
        x, width = left + side * each.low + 2, side * (each.high - each.low) - 4
        tall, deep = side * each.accuracy, max(1.0, strip * 0.8 * each.images / most)
        mean = bottom - side * each.confidence
        said = f"{each.images} answers, mean {percent(each.confidence)}, right {percent(each.accuracy)}"
        parts.append(
            f'<g><title>{said}</title><rect class="share" x="{x:.1f}" y="{bottom - tall:.1f}" width="{width:.1f}" '
            f'height="{tall:.1f}" opacity="0.75"/><line class="gap" x1="{x:.1f}" x2="{x + width:.1f}" y1="{mean:.1f}" '
            f'y2="{mean:.1f}"/><rect class="many" x="{x:.1f}" y="{bottom + 4}" width="{width:.1f}" '
            f'height="{deep:.1f}" opacity="0.6"/></g>'
        )
    parts.append(f'<line class="ideal" x1="{left}" y1="{bottom}" x2="{left + side}" y2="{top}"/>')
    parts.append(f'<text x="{left + side / 2}" y="{height - 6}" text-anchor="middle">probability of the answer</text>')
    return "".join([*parts, "</svg>"])


# -- the rest --------------------------------------------------------------------------------------------------------


def _unknown(found: Evaluation) -> str:
    sentences = "".join(f"<li>{escape(line[:1].upper() + line[1:])}</li>" for line in rejection(found))
    listed = f"<ul>{sentences}</ul>" if sentences else ""
    if not found.unknown_classes:
        return f'<h2 id="unknown">Unknown</h2>{listed}' if listed else ""
    recognised = found.rejection is not None
    rows = []
    for each in found.unknown_classes:
        answers = ", ".join(f"{escape(found.classes[place].name)} ({count})" for place, count in each.answers[:5])
        answers += f" and {len(each.answers) - 5} others" if len(each.answers) > 5 else ""
        note = f'<br><span class="soft">{escape(spelling(each))}</span>' if each.resembles is not None else ""
        column = f"<td>{each.recognised}</td>" if recognised else ""
        rows.append(
            f'<tr><td class="name">{escape(each.name)}{note}</td><td>{each.images:,}</td>{column}'
            f'<td>{percent(each.mean_confidence)}</td><td class="text">{answers}</td></tr>'
        )
    head = (
        '<tr><th class="name">class</th><th>images</th>'
        + ("<th>as unknown</th>" if recognised else "")
        + '<th>mean confidence</th><th class="text">answered as</th></tr>'
    )
    return (
        f'<h2 id="unknown">Classes that the model does not know</h2><div class="wide"><table>{head}{"".join(rows)}'
        f"</table></div>{listed}"
    )


def _unreadable(found: Evaluation) -> str:
    if not found.unreadable:
        return ""
    items = "".join(f"<li>{escape(each.reason)}</li>" for each in found.unreadable[:SHOWN_LISTED])
    more = len(found.unreadable) - SHOWN_LISTED
    rest = f'<p class="soft">and {counted(more, "other", "others")}</p>' if more > 0 else ""
    return f'<h2 id="unreadable">Images that could not be read</h2><ul>{items}</ul>{rest}'
