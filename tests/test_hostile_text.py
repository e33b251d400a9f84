"""Text made to hang, to fill the memory, or to be obeyed by terminals and spreadsheets."""

from __future__ import annotations

import csv
import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import efcil
from efcil import safe_json, safe_yaml
from efcil.cli import main
from efcil.commands.data import describe as describe_data
from efcil.commands.parser import positive
from efcil.data.decode import Encoded, Fit, decode_image
from efcil.data.images import Dataset, ImageSet
from efcil.engine.progress import Progress
from efcil.errors import RunFolderError, SettingsError
from efcil.model.prediction import Prediction
from efcil.output import cell, escape, lines, printable_warnings, to_json
from efcil.presets import parse_preset
from efcil.report import FORMATS, render, table
from efcil.resolution import load_config
from efcil.runfolder import RunFolder, find_runs

ESCAPES = "\x1b]0;owned\x07 \x9b31m \u202e a\nb\r"
ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 32))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 25))
DEEP = 100_000


def refuse_obeyed(text: str) -> None:
    """Fail on characters that a terminal obeys or that change how others are shown."""
    assert [c for c in text if not c.isprintable() and c != "\n"] == []


# -- YAML ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ALIASES + "seed: *a31", "aliases"),
        (MERGES, "aliases"),
        ("method: &a efc\nlabel: *a", "aliases"),
        ("seed: " + "[" * DEEP, "nested too deeply"),
        ("seed: " + "[" * 30 + "]" * 30, "nested too deeply"),
        ("seed: " + "9" * 5000, "too long"),
        ("seed: 0x" + "f" * 5000, "too long"),
        ("seed: !!int ''", "not valid YAML"),
        ("seed: !!timestamp x", "not valid YAML"),
        ("seed: 2001-99-99", "not valid YAML"),
        ("seed: !!bool x", "not valid YAML"),
        ("seed: 0\nseed: 1", "'seed' is given twice"),
        ("? [a, b]\n: 1", "not valid YAML"),
        ("x" * 300_000, "more than 262,144"),
    ],
)
def test_settings_files_that_are_too_large_or_make_no_sense(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=rf"settings\.yaml is not valid YAML: .*{message}|{message}") as raised:
        load_config(file)
    assert len(str(raised.value)) < 1000
    with pytest.raises(RunFolderError, match="is damaged"):
        RunFolder(tmp_path).read_identity()
    with pytest.raises(SettingsError, match="preset x"):
        parse_preset(text, "x", "x")


def test_yaml_is_read_as_before() -> None:
    text = "a: [1, 2.5, none, true, 0x1f, 1_000]\nb: {c: 2020-01-01, d: ~}\ne: |\n  text\n"
    import yaml

    assert safe_yaml.parse(text) == yaml.safe_load(text)


def test_a_device_in_the_place_of_a_settings_file_ends() -> None:
    with pytest.raises(SettingsError, match="more than 262,144 bytes"):
        load_config("/dev/zero")


# -- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digits", [30, 4000, 5000])
@pytest.mark.parametrize(
    "flags", ["--seed {}", "--set efm_weight={}", "--epochs {}", "--set first_task.epochs={}", "--checkpoint-steps {}"]
)
def test_long_numbers_on_the_command_line(
    flags: str, digits: int, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("efcil.experiment.run_grid", lambda *_, **__: pytest.fail("it was trained"))
    if "efm_weight" in flags and digits < 400:
        digits = 400  # fewer are a large number
    assert main(["run", "--output", str(tmp_path), *flags.format("9" * digits).split()]) == 2
    said = capsys.readouterr().err
    assert "must be a" in said
    assert len(said) < 500


@pytest.mark.parametrize("text", ["9" * 5000, "0", "-1", "1.5", "x", "\u00b2", ""])
def test_flags_that_count(text: str) -> None:
    with pytest.raises(SettingsError, match="--top must be a whole number"):
        positive("--top")(text)


# -- JSON ------------------------------------------------------------------------------------------------------------


BAD_JSON = [
    "[" * DEEP + "]" * DEEP,
    "[" * 100 + "]" * 100,
    '{"a":' * 100 + "1" + "}" * 100,
    "9" * 5000,
    "-" + "9" * 400,
]


@pytest.mark.parametrize("value", BAD_JSON, ids=range(len(BAD_JSON)))
def test_results_that_are_too_deep_or_too_long(tmp_path: Path, value: str) -> None:
    run = RunFolder(tmp_path)
    known = '{"method": "efc", "label": "efc", "dataset": "d", "scenario": "cs5", "A_step": 1, "A_inc": 1, '
    run.summary_file.write_text(known + f'"seed": 0, "extra": {value}}}')
    with pytest.raises(RunFolderError, match=r"summary\.json is damaged"):
        run.read_summary()
    run.metrics_file.write_text(f'{{"task": 1}}\n{{"task": {value}}}\n')
    with pytest.raises(RunFolderError, match="damaged in line 2"):
        run.read_metrics()


@pytest.mark.parametrize("text", ["1", "[]", "null", "{}", '{"task": "x"}'])
def test_lines_of_metrics_are_objects(tmp_path: Path, text: str) -> None:
    run = RunFolder(tmp_path)
    run.metrics_file.write_text(text + "\n")
    run.truncate_metrics(lambda line: line["task"] <= 1)
    assert run.metrics_file.read_text() == "", "what says nothing of a task is dropped, and its digest shows that"


def test_deep_but_not_too_deep_json_is_read() -> None:
    value: Any = [1, {"a": [2.5, None, True, "[[[["]}]
    for _ in range(50):
        value = [value, {"x": []}]
    assert safe_json.parse(json.dumps(value)) == value


def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        safe_json.read(Path("/dev/zero"), 1000)
    run = RunFolder(tmp_path)
    run.accuracy_file.write_text("x" * 200_000)
    with pytest.raises(RunFolderError, match=r"accuracy\.csv is damaged"):
        run.read_accuracy()


def test_names_of_runs_are_no_longer_than_those_of_folders(tmp_path: Path) -> None:
    summary = dict.fromkeys(("method", "label", "dataset"), "x") | {"seed": 0, "A_step": 1.0, "A_inc": 1.0}
    run = RunFolder(tmp_path / "\u00b2" / "run")
    run.write_summary(summary | {"scenario": "cs" + "9" * 5000})
    made = table(find_runs([tmp_path]))
    assert "is damaged" in made.problems[0].reason


# -- terminals -------------------------------------------------------------------------------------------------------


def test_text_that_is_printed() -> None:
    assert lines("a\tb\nc\x1b[31m") == "a\\tb\nc\\x1b[31m"
    assert lines("x\u202ey\u2066\u200f") == "x\\u202ey\\u2066\\u200f"
    assert escape("<b>\x1b\u202e&") == "&lt;b&gt;\\x1b\\u202e&amp;"
    value = {"a": [ESCAPES, "\U000e0041 caf\u00e9", 1.5], "\x7f": None, "bytes": "\udc80"}
    for indent in (None, 1):
        refuse_obeyed(to_json(value, indent))
        assert json.loads(to_json(value, indent)) == value
    assert "caf\u00e9" in to_json(value)


def test_progress_prints_and_logs_no_escapes(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Progress(1, tmp_path / "log.txt", stream=stream) as progress:
        progress.say(f"learned {ESCAPES}\nsecond line")
    for text in (stream.getvalue(), (tmp_path / "log.txt").read_text()):
        refuse_obeyed(text)
        assert text.endswith("\nsecond line\n")


def test_warnings_are_shown_without_escapes() -> None:
    def warned() -> str:
        return warnings.formatwarning(UserWarning(f"the file {ESCAPES}"), UserWarning, "file.py", 1, "")

    with printable_warnings():
        said = warned()
    refuse_obeyed(said)
    assert "\\x1b]0;owned" in said
    assert "\x1b" in warned()


def test_warnings_of_ours_are_sentences() -> None:
    with printable_warnings():
        ours = warnings.formatwarning(UserWarning("It was so."), UserWarning, efcil.__file__, 1, "code()")
        other = warnings.formatwarning(UserWarning("It was so."), UserWarning, "other.py", 1, "code()")
    assert ours == "efcil: It was so.\n"
    assert "other.py:1" in other


def test_warnings_of_pillow_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """A large photograph is read as any other; nobody can do anything about a warning."""
    Image.new("RGB", (6, 4)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    with printable_warnings():
        decode_image(Encoded(tmp_path / "large.png", "large"), Fit(4, resize=True))
    assert not recwarn.list
    with pytest.warns(Image.DecompressionBombWarning):
        decode_image(Encoded(tmp_path / "large.png", "large"), Fit(4, resize=True))


def test_errors_and_datasets_are_shown_without_escapes(tmp_path: Path, capsys: Any) -> None:
    assert main(["data", "folder", "--data", str(tmp_path / ESCAPES)]) == 2
    refuse_obeyed(capsys.readouterr().err)
    import numpy as np

    images = ImageSet(np.zeros((2, 8, 8, 3), np.uint8), np.arange(2))
    dataset = Dataset("folder", images, images, (ESCAPES, "b"), 8, (0.5,) * 3, (0.5,) * 3)
    refuse_obeyed(describe_data(dataset))


# -- reports ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hostile_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs whose names, classifiers and ways of computing are made to be obeyed."""
    # Their results are invented: no accuracy matrix stands behind them.
    monkeypatch.setattr(RunFolder, "verified_summary", RunFolder.read_summary)
    for seed, path in enumerate(("@fast", f"=1+1{ESCAPES}")):
        run = RunFolder(tmp_path / f"seed{seed}")
        run.write_summary(
            {
                "method": "efc", "label": "=cmd|'/c calc'!A1", "dataset": "+d", "scenario": "-s", "seed": seed,
                "A_step": 50.0, "A_inc": 60.0, "forgetting": -1.5, "data": f"{seed}{ESCAPES}",
                "classifiers": {f"@x{ESCAPES}": {"A_step": 1.0, "A_inc": 2.0}},
                "execution": {"precision": "fp32", "path": path, "deterministic": True},
                "command": f"efcil {ESCAPES}",
            }
        )  # fmt: skip
        run.append_metrics({"kind": "epoch", "task": 1, "losses": {f"loss{ESCAPES}": 1.0}})
    RunFolder(tmp_path / f"broken{ESCAPES}".replace("\n", "")).path.mkdir()
    (tmp_path / f"broken{ESCAPES}".replace("\n", "") / "settings.yaml").write_text("x")
    return tmp_path


@pytest.mark.parametrize("format", sorted(set(FORMATS) - {"csv"}))
def test_reports_hold_nothing_that_is_obeyed(hostile_runs: Path, format: str) -> None:
    text = render(table(find_runs([hostile_runs])), format)
    refuse_obeyed(text)
    assert "\\x1b" in text or "textbackslash{}x1b" in text
    assert "Not in the table" in text


def test_reports_in_csv_hold_no_formulas(hostile_runs: Path) -> None:
    rows = list(csv.reader(io.StringIO(render(table(find_runs([hostile_runs])), "csv"))))
    assert len(rows) == 3
    for row in rows:
        for text in row:
            assert not text.startswith(("=", "+", "@", "\t", "\r")), text
            assert not text.startswith("-") or float(text) < 0
    named = dict(zip(rows[0], rows[1], strict=True))
    assert named["method"] == "'=cmd|'/c calc'!A1"
    assert named["scenario"] == "'-s"
    assert named["forgetting_mean"] == "-1.5000"
    assert named["A_step_mean"] == "50.0000"


@pytest.mark.parametrize("text", ["=1", "+x", "-x", "@x", "\tx", "\rx", " =1", "\uff1d1", "-1+1", "--", "-", "\n=1"])
def test_cells_that_begin_like_formulas(text: str) -> None:
    assert cell(text) == f"'{text}"


@pytest.mark.parametrize("value", ["x", "1=1", "", "-1", "+1.5", "-.5e-3", -1, -1.5, None, True, "'x", "a-b"])
def test_cells_that_stay_as_they_are(value: object) -> None:
    assert cell(value) == value
    assert type(cell(value)) is type(value)


def test_predictions_in_csv_hold_no_formulas(capsys: Any) -> None:
    from efcil.commands import predict

    predict._csv(
        [Prediction("=x.png", ("=HYPERLINK(1)", -1), (0.75, 0.25)), Prediction("b\x1b\r=1.png", ("ok",), (1.0,))]
    )
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out, newline="")))
    assert rows[1:] == [
        ["'=x.png", "1", "'=HYPERLINK(1)", "0.750000"],
        ["'=x.png", "2", "-1", "0.250000"],
        ["b\x1b\r=1.png", "1", "ok", "1.000000"],
    ]
