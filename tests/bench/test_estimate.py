"""The estimate of a sweep's time: within a factor of two of what sweeps took, refused cases aside."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lrbench.bench.drive.estimate import CASE_S, COMPILE_S, STEP_S, WORKER_S, cases_s, compile_s
from lrbench.bench.drive.progress import describe_s
from lrbench.bench.plan import Request, plan
from lrbench.tests.bench import faults
from lrbench.tests.bench.runs import H200, PROCESSOR


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


LENGTHS = (1024, 4096, 8192, 16384, 32768, 65536)


@pytest.mark.parametrize(
    ("request_", "cases", "took_s"),
    [
        (Request(impls=("whole_state",), ops=("mlstm_sig", "mlstm_exp"), seq_lens=LENGTHS, head_dims=(128, 256, 512),
                 chunk_sizes=(256, 1024, 4096, 8192)), 252, 125),
        (Request(impls=("fused_chunk",), ops=("mlstm_exp",), seq_lens=LENGTHS[3:],
                 chunk_sizes=(4096, 16384, 32768, 65536)), 72, 55),
        (Request(impls=("whole_state",), ops=("mlstm_sig", "mlstm_exp"), seq_lens=(1024, 8192, 65536), head_dims=(256,),
                 chunk_sizes=(1024, 8192)), 20, 37),
        (Request(impls=("whole_state",), ops=("mamba2_ssd",), seq_lens=(8192,), head_dims=(64,), head_dims_qk=(128,),
                 num_heads=64, chunk_sizes=(8192,)), 2, 17),
    ],
)  # fmt: skip
def test_sweeps_of_an_h200_took_about_as_long(request_: Request, cases: int, took_s: float) -> None:
    planned = plan(request_, device_kind="cuda")
    assert len(planned) == cases
    assert took_s / 1.5 < sum(cases_s(planned, H200)) + compile_s(planned, H200, jobs=8) < took_s * 1.5


def test_large_problems_take_longer_and_refused_ones_nothing() -> None:
    large = plan(Request(impls=("torch",), modes=("fwbw",), tokens=2**20), device_kind="cuda")
    assert sum(cases_s(large, H200)) > 2 * CASE_S * len(large)
    item = faults.planned("right")
    refused = dataclasses.replace(item, target=dataclasses.replace(item.target, devices=("cuda",)))
    assert cases_s([refused, item, item], PROCESSOR) == [0, CASE_S + WORKER_S["cpu"], CASE_S]
    assert cases_s([], PROCESSOR) == []


def test_training_steps_take_as_long_as_their_models_are_large() -> None:
    """A step of 3B parameters and 92k tokens takes seconds on an H200, more where attention is quadratic."""
    axes = {"kernel": "lightning", "modes": ("train",), "batches": (1,), "seq_lens": (94208,), "head_dims": (128,)}
    small, large, quadratic = (
        sum(cases_s(plan(Request(impls=(impl,), num_heads=num_heads, **axes), device_kind="cuda"), H200))
        for impl, num_heads in (("fused_chunk", 8), ("fused_chunk", 20), ("lightning1", 20))
    )
    assert 2 * small < large < quadratic / 2
    assert 20 < large < 60


def test_a_worker_starts_and_a_problem_is_checked_once() -> None:
    sizes = {"seq_len": 64}
    items = [faults.planned(impl, mode=mode, **sizes) for impl in ("right", "slow") for mode in ("fwbw", "fw")]
    first = CASE_S + 64 * STEP_S
    assert cases_s(items, PROCESSOR) == pytest.approx([first + WORKER_S["cpu"], CASE_S, first, CASE_S])


def test_compilation_is_shared_by_processes_and_none_on_a_cpu() -> None:
    planned = plan(Request(impls=("fused_chunk",), ops=("mlstm_sig",), seq_lens=(8192,)), device_kind="cuda")
    alone = compile_s(planned, H200, jobs=0)
    assert alone >= COMPILE_S["lrbench"]
    assert compile_s(planned, H200, jobs=8) == pytest.approx(alone / 8)
    assert compile_s(planned, PROCESSOR, jobs=8) == 0


def test_a_time_is_said_in_the_unit_of_its_size() -> None:
    said = {0.0: "1 s", 119: "119 s", 300: "5 min", 3 * 3600: "3 h", 8 * 86400: "8 days"}
    assert {seconds: describe_s(seconds) for seconds in said} == {s: f"about {text}" for s, text in said.items()}
