"""From measured to row: rates follow from the count, and the roofline is that of the measured device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lrbench import __version__
from lrbench.analysis import counts
from lrbench.analysis.accelerators.known import get_accelerator
from lrbench.analysis.model import runtime_model
from lrbench.bench.drive.bars import load_bars, planned_cases, select
from lrbench.bench.drive.derived import Run, build_record
from lrbench.bench.environment import Environment
from lrbench.bench.plan import PlannedCase
from lrbench.kernels import baselines, get_operation
from lrbench.kernels.scalar_decay.declare import WHOLE_STATE_FORM
from lrbench.results.schema import Record
from lrbench.tests.analysis.rows import case
from lrbench.tests.bench.runs import H200, PROCESSOR

CASE = case("mlstm_sig", "fused_chunk")
PLANNED = PlannedCase(case=CASE, target=get_operation("mlstm_sig").implementation("fused_chunk"))


def record(time_ms: float | None, *, environment: Environment = H200, accelerator: str | None = "h100") -> Record:
    run = Run.start(environment, accelerator)
    columns = {} if time_ms is None else {"time_ms": time_ms}
    status, reason = ("oom", "no memory") if time_ms is None else ("ok", None)
    return build_record(run, PLANNED, {"status": status, "reason": reason, "columns": columns})


def test_rates_and_roofline() -> None:
    count = counts.count_case("mlstm_sig", "fused_chunk", "fw", "bf16", "fp32", CASE.sizes)
    assert count is not None
    row = record(2.0)
    assert row.flops == count.flops
    assert row.bytes == count.bytes
    assert row.intensity == pytest.approx(count.flops / count.bytes)
    assert row.tflops == pytest.approx(count.flops / 2e-3 / 1e12)
    assert row.gbps == pytest.approx(count.bytes / 2e-3 / 1e9)
    assert row.causal_factor == count.causal_factor
    # --gpu h100 fills the model's time; the roofline stays that of the device that was measured.
    assert (row.accelerator, row.device_accelerator) == ("h100_sxm", "h200_sxm")
    assert row.model_time_ms == runtime_model.model_time_ms(count, get_accelerator("h100"), "bf16")
    h200 = get_accelerator("h200")
    assert row.roofline_fraction == pytest.approx(
        max(count.flops / h200.matrix_flops["bf16"], count.bytes / h200.bandwidth_bytes_s) / 2e-3
    )
    assert row.suspect is None
    assert "above the" in str(record(0.01).suspect), "an impossible time is flagged, not dropped"


def test_a_failed_case_keeps_its_count_and_has_no_rate() -> None:
    row = record(None)
    assert row.flops
    assert row.model_time_ms
    assert (row.time_ms, row.tflops, row.gbps, row.roofline_fraction, row.suspect) == (None,) * 5


def test_a_cpu_row_never_stands_on_a_gpus_roofline() -> None:
    row = record(2.0, environment=PROCESSOR)
    assert row.roofline_fraction is None
    assert row.suspect is None
    assert row.model_time_ms


def test_provider_version_and_same_math() -> None:
    ours = record(2.0, accelerator=None)
    assert (ours.accelerator, ours.model_time_ms) == (None, None)
    assert (ours.provider_version, ours.same_math) == (__version__, True)
    baseline = baselines.get_baseline("attention", "torch.sdpa_flash")
    attention = dataclasses.replace(CASE, op="attention", impl=baseline.name, provider="torch", chunk_size=None)
    run = Run.start(H200)
    reply = {"status": "ok", "reason": None, "columns": {"time_ms": 10.0}}
    row = build_record(run, PlannedCase(case=attention, target=baseline), reply)
    assert row.same_math is False
    # Of its own family it is the subject.
    lightning = baselines.get_baseline("lightning", "lightning_attn.v2")
    for kernel, same in (("fused_chunk", False), ("lightning", True)):
        beside = dataclasses.replace(CASE, kernel=kernel, op="lightning", impl=lightning.name, chunk_size=None)
        assert build_record(run, PlannedCase(case=beside, target=lightning), reply).same_math is same
    assert torch.__version__.startswith(str(row.provider_version).partition("+")[0])


def test_numbers_that_are_none_become_null() -> None:
    run = Run.start(H200)
    reply = {"status": "ok", "reason": None, "columns": {"time_ms": 2.0, "energy_j": float("nan")}}
    assert build_record(run, PLANNED, reply).energy_j is None


def test_a_row_that_names_no_implementation_says_that_a_slower_one_ran() -> None:
    (item,) = planned_cases(select(load_bars(), "default-choice", "16 heads x 128/256, T=8192, B=8, bf16")[:1])
    old = dataclasses.replace(H200, triton_version="3.5.0")
    ran = {"status": "ok", "reason": None, "columns": {"time_ms": 1.0}}

    def reason(environment: Environment, planned: PlannedCase = item) -> str | None:
        return build_record(Run.start(environment), planned, ran).reason

    assert reason(old) == WHOLE_STATE_FORM.why_slower_with({"triton": "3.5.0"})
    assert reason(H200) is reason(old, PLANNED) is reason(dataclasses.replace(old, capability="10.0")) is None
    crashed = build_record(Run.start(old), item, {"status": "crash", "reason": "it died", "columns": {}})
    assert crashed.reason == "it died"
