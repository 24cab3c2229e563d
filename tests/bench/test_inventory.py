"""What is here: each known failure is told apart from its baseline's others."""

from __future__ import annotations

import dataclasses

import pytest

from lrbench.analysis.accelerators import known as accelerators
from lrbench.bench.drive import workers
from lrbench.bench.show import inventory
from lrbench.kernels import baselines
from lrbench.kernels.baselines.spec import KnownBad
from lrbench.kernels.scalar_decay.declare import WHOLE_STATE_FORM
from lrbench.results.schema import Environment
from lrbench.tests.bench.runs import H200, PROCESSOR
from lrbench.tests.command_line import Run


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


OLD = "3.5.0"
"""A Triton that whole_state is not written for."""
SLOWER = WHOLE_STATE_FORM.why_slower_with({"triton": OLD})


def test_doctor_says_what_runs_in_place_of_a_faster_form(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    old = dataclasses.replace(H200, triton_version=OLD)
    monkeypatch.setattr(workers, "probe_environment", lambda: old)
    rows = [row for row in run.json("doctor") if row["section"] == "ours that do not run here"]
    assert {(row["impl"], row["reason"]) for row in rows} == {
        ("whole_state", reason) for reason in (SLOWER, str(SLOWER).replace("fused_chunk", "torch"))
    }
    assert {"mlstm_sig", "lightning"} < {row["op"] for row in rows}
    assert run("doctor").count(str(SLOWER)) == 1


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (dataclasses.replace(H200, triton_version=OLD, capability="10.0"), WHOLE_STATE_FORM.why_not_on("10.0")),
        (dataclasses.replace(PROCESSOR, triton_version=OLD), None),
    ],
)
def test_doctor_says_which_device_a_form_needs(environment: Environment, reason: str | None) -> None:
    rows = inventory.doctor_sections(environment)["ours that do not run here"]
    assert {row["reason"] for row in rows} == {reason} - {None}


def test_kernels_say_it_too(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(baselines, "installed_versions", lambda: {"triton": OLD})
    run("kernels mlstm_sig")
    assert run.err == f"{SLOWER}\n"
    found = {row["impl"]: row["not_here"] for row in run.json("kernels mlstm_sig")}
    assert (found["whole_state"], found["fused_chunk"]) == (SLOWER, None)
    monkeypatch.setattr(accelerators, "key_here", lambda: "a100_80_pcie")
    run("kernels mlstm_sig")
    assert run.err == f"{WHOLE_STATE_FORM.why_not_on('8.0')}\n"
