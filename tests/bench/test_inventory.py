"""What is here: each known failure is told apart from its baseline's others."""

from __future__ import annotations

import dataclasses

import pytest

from lrbench.bench import inventory
from lrbench.kernels import baselines
from lrbench.kernels.baselines.spec import KnownBad
from lrbench.tests.bench.runs import PROCESSOR


def test_a_known_failure_applies_only_where_its_own_conditions_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    there = KnownBad(reason="fails", source="a note", versions={"torch": ">=2"})
    gone = KnownBad(reason="failed once", source="a note", versions={"torch": "<2"})
    baseline = dataclasses.replace(baselines.BASELINES[0], known_bad=(there, gone))
    monkeypatch.setattr(baselines, "BASELINES", (baseline,))
    monkeypatch.setattr(baselines, "installed_versions", lambda: {"torch": "2.13.0"})
    rows = inventory.known_bad_rows(PROCESSOR)
    assert [(row["when"], row["applies_here"]) for row in rows] == [("torch >=2", "yes"), ("torch <2", "no")]


def test_a_mode_is_listed_once() -> None:
    for row in inventory.kernel_rows(None):
        modes = row["modes"].split("/")
        assert len(modes) == len(set(modes)), row
