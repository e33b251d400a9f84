"""The checks that every method must pass; a new file in efcil/methods is covered by existing."""

from __future__ import annotations

from pathlib import Path

import pytest

from efcil.methods import available, bundled
from efcil.resolution.documentation import page_of, with_settings
from efcil.testing import METHOD_CHECKS, Check, LeftOut, Trial, on_trial


@pytest.mark.parametrize("check", METHOD_CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize("name", sorted(available()))  # all checks of one method together share its short run
def test_method(check: Check[Trial], name: str) -> None:
    try:
        check(on_trial(available()[name]))
    except LeftOut as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", sorted(bundled()))
def test_a_method_of_the_package_has_a_page(name: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "methods" / page_of(name)
    assert page.is_file(), f"Write {page}: idea, command, settings, deviations, results."
    text = page.read_text(encoding="utf-8")
    assert text == with_settings(text, name), "run: python -m efcil.resolution.documentation docs/settings.md"
