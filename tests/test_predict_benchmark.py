"""The script that measures prediction: its parts run, on photographs that are small."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from PIL import Image

from efcil.model import Model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import predict


def test_its_parts_run_and_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = predict.make_photos(tmp_path / "photos", 3, 400, 300, None)
    assert [Image.open(file).size for file in photos] == [(400, 300)] * 3
    model = Model.load(predict.teach(tmp_path / "model", "slim"), "cpu")
    predict.compare_decoding(model, photos)
    predict.compare_together(model, photos)
    printed = capsys.readouterr().out
    for line in ("decode, whole", "decode, reduced", "pixels differ by", "one after the other", "predict_files"):
        assert line in printed
