"""What methods store: the formulas of docs/storage.md against methods that have learned, and the account of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checks import QUICK, SHORT, Stream, short_stream

from efcil import methods
from efcil.evaluation.storage import StoredBytes, stored_bytes
from efcil.methods.base import Method
from efcil.methods.storage import account
from efcil.resolution.storage import FORMULAS, Formula, evaluate, with_table

ROOT = Path(__file__).parents[2]
# Other than the number of features, so that a formula with the wrong one of them fails.
BOTTLENECK = 16


def learned(stream: Stream, name: str, **settings: Any) -> Method:
    """A method after three tasks, each trained for one epoch: what is stored does not depend on it."""
    method = stream.start(name, **QUICK.get(name, {}) | settings)
    return method if name == "joint" else stream.learn(method, 2, replace(SHORT, epochs=1))


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.name)
def test_formulas_count_what_is_stored(formula: Formula) -> None:
    stream = short_stream()
    settings = {"bottleneck": BOTTLENECK} if formula.method in ("adagauss", "bicyc") else {}
    method = learned(stream, formula.method, **formula.settings, **settings)
    values = {
        "C": stream.tasks[2].seen,
        "n": method.network.feature_size,
        "T": 3,
        "b": BOTTLENECK,
        "r": method.memory.compact.shape[2] if formula.settings.get("covariance") == "low-rank" else 0,
        "P": sum(parameter.numel() for parameter in method.network.backbone.parameters()),
    }
    found = account(method)
    assert found["numbers"] == formula.numbers(values)
    assert found["bytes"] == formula.bytes(values)


def test_every_method_has_a_formula_and_the_page_is_current() -> None:
    assert {formula.method for formula in FORMULAS} == set(methods.bundled())
    page = (ROOT / "docs" / "storage.md").read_text(encoding="utf-8")
    assert page == with_table(page), "run: python -m efcil.resolution.storage docs/storage.md"


def test_formulas_are_sums_of_products() -> None:
    assert evaluate("2 C n + n² + 1", {"C": 3, "n": 5}) == 30 + 25 + 1


@pytest.mark.parametrize(
    ("form", "matrices"), [("class", 8), ("task", 3), ("last-task", 1), ("low-rank", 8), ("diagonal", 8)]
)
def test_the_account_of_covariances(form: str, matrices: int) -> None:
    method = learned(short_stream(), "efc", covariance=form)
    found = account(method)
    kept = found["by_name"]["memory.compact" if form in ("low-rank", "diagonal") else "memory.covariances"]
    assert found["covariance"] == {"form": form, "matrices": matrices, **kept}
    assert found["statistics"] == {"numbers": found["numbers"], "bytes": found["bytes"]}
    for unit in ("numbers", "bytes"):
        assert found["total"][unit] == found["network"][unit] + found["statistics"][unit]
    weights = sum(tensor.numel() for tensor in method.network.state_dict().values())
    assert found["network"]["numbers"] == weights
    assert ("components" in found) == (form == "low-rank")


def test_components_are_those_that_the_share_of_variance_needs() -> None:
    method = learned(short_stream(), "efc", covariance="low-rank", covariance_share=0.9)
    ranks = []
    for covariance in method.memory.statistics().spread()[0]:
        values = np.linalg.eigvalsh(covariance.double().numpy())
        ranks.append(int((values > 1e-6 * values[-1]).sum()))
    found = account(method)["components"]
    assert found["mean"] == pytest.approx(np.mean(ranks))
    assert found["std"] == pytest.approx(np.std(ranks))
    assert (found["least"], found["most"]) == (min(ranks), max(ranks))
    assert len(set(ranks)) > 1, "classes that need equally many would not show the padding"
    assert found["numbers"] == 64 * sum(ranks)
    assert found["numbers"] < account(method)["covariance"]["numbers"]


def test_summaries_of_all_versions_say_what_is_stored() -> None:
    common = {"label": "efc", "seed": 0, "A_inc": 60.0, "A_step": None, "parameters": 10}
    now = {**common, "stored": {"bytes": 7, "network": {"numbers": 11, "bytes": 44}}}
    earlier = {**common, "stored": {"bytes": 7}}
    assert stored_bytes(now) == StoredBytes(44, 7)
    assert stored_bytes(earlier) == StoredBytes(40, 7)
    assert stored_bytes(common) is None
    assert stored_bytes({**earlier, "parameters": "many"}) is None
    assert StoredBytes(44, 7).total == 51


@pytest.mark.parametrize("wrong", [-1, True, 7.0, None])
def test_only_numbers_of_bytes_count_as_stored(wrong: object) -> None:
    assert stored_bytes({"stored": {"bytes": wrong, "network": {"bytes": 44}}}) is None
    assert stored_bytes({"stored": {"bytes": 7, "network": {"bytes": wrong}}}) is None
    assert stored_bytes({"stored": {"bytes": 7}, "parameters": wrong}) is None
    assert stored_bytes({"stored": {"bytes": 0, "network": {"bytes": 0}}}) == StoredBytes(0, 0)
