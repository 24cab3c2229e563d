"""What is here: each known failure is told apart from its baseline's others."""

from __future__ import annotations

import dataclasses

import pytest

from lrbench.bench import inventory
from lrbench.kernels import FAMILIES, baselines
from lrbench.kernels.baselines.spec import KnownBad
from lrbench.tests.bench.test_run import ENVIRONMENT


def test_a_known_failure_applies_only_where_its_own_conditions_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    there = KnownBad(reason="fails", source="a note", versions={"torch": ">=2"})
    gone = KnownBad(reason="failed once", source="a note", versions={"torch": "<2"})
    baseline = dataclasses.replace(baselines.BASELINES[0], known_bad=(there, gone))
    monkeypatch.setattr(baselines, "BASELINES", (baseline,))
    monkeypatch.setattr(baselines, "installed_versions", lambda: {"torch": "2.13.0"})
    rows = inventory.known_bad_rows(ENVIRONMENT)
    assert [(row["when"], row["applies_here"]) for row in rows] == [("torch >=2", "yes"), ("torch <2", "no")]


def test_presets_show_the_axes_that_the_family_has() -> None:
    rows = {row["preset"]: row for row in inventory.preset_rows("tfla")}
    assert rows["default"]["size"] == "head_dim 64, 128, 256, 512"
    assert rows["default"]["seq_len"][-1] == "64k"
    assert rows["quick"]["batch"] == "1k tokens / seq_len"
    assert {row["kernel"] for row in inventory.preset_rows()} == set(FAMILIES)
    with pytest.raises(ValueError, match="kernel must be one of tfla"):
        inventory.preset_rows("tlfa")
