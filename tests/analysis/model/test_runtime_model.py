"""The runtime model against the paper's equations, and its limits."""

import dataclasses

import pytest

from lrbench.analysis.accelerators.known import get_accelerator
from lrbench.analysis.counts import FORMULATIONS, count, is_chunked
from lrbench.analysis.counts.formulations import DECODING
from lrbench.analysis.model.runtime_model import (
    LAUNCH_MS,
    floor_ms,
    launches_ms,
    model_time_ms,
    roofline_fraction,
    runtime_model,
    suspect_reason,
)

H100, H200 = get_accelerator("h100"), get_accelerator("h200")
PAPER = {"batch": 8, "seq_len": 8192, "num_heads": 8, "head_dim_qk": 256, "head_dim_v": 512, "causal_factor": 0.5}
PAPER |= {"counting": "published"}
SIZES = {
    "batch": 2, "seq_len": 1024, "num_heads": 4, "head_dim_qk": 64, "head_dim_v": 128, "channels": 512, "d_model": 256,
    "d_ff": 512,
}  # fmt: skip


@pytest.mark.parametrize(("op", "formulation"), [(op, each) for op, known in FORMULATIONS.items() for each in known])
def test_equations_114_to_116_for_every_count(op: str, formulation: str) -> None:
    """tau = FLOPs / alpha and bytes / beta; their sum and their maximum, on specified and on measured rates."""
    mode = "step" if op in DECODING and formulation == "recurrent" else "fw"
    chunk = {"chunk_size": 128} if is_chunked(op, formulation) else {}
    result = count(op, formulation=formulation, mode=mode, **SIZES, **chunk)
    for accelerator in (H200, H200.with_measured_roofs(), get_accelerator("l40s")):
        rate = accelerator.peak_flops("bf16") if result.tensor_flops else accelerator.vector_flops
        flops_ms, bytes_ms = 1e3 * result.flops / rate, 1e3 * result.bytes / accelerator.bandwidth_bytes_s
        model = runtime_model(result, accelerator, "bf16")
        assert (model.flops_ms, model.bytes_ms) == pytest.approx((flops_ms, bytes_ms))
        assert model.upper_ms == pytest.approx(flops_ms + bytes_ms)
        assert model_time_ms(result, accelerator, "bf16") == max(model.upper_ms, launches_ms(result, accelerator))
        assert model.lower_ms == pytest.approx(max(flops_ms, bytes_ms))
        assert model.bound == ("compute" if flops_ms > bytes_ms else "memory")


def test_short_chunks_are_bound_by_memory_and_long_ones_by_compute() -> None:
    """Figures 21 and 22."""
    bounds = [runtime_model(count("mlstm_sig", chunk_size=2**n, **PAPER), H100, "bf16").bound for n in range(5, 14)]
    assert bounds[0] == "memory"
    assert bounds[-1] == "compute"
    assert bounds == sorted(bounds, reverse=True)


def test_a_dtype_without_a_rate_is_refused() -> None:
    result = count("mlstm_sig", chunk_size=128, **PAPER)
    with pytest.raises(ValueError, match="dtype must be one of fp16, fp32, fp64 on v100, got 'bf16'"):
        runtime_model(result, get_accelerator("v100"), "bf16")
    assert roofline_fraction(result, get_accelerator("v100"), "bf16", 1.0) is None


def test_times_that_the_hardware_does_not_allow_are_suspect() -> None:
    result = count("mlstm_sig", chunk_size=128, **PAPER)
    above_roof_ms = 1e3 * result.tensor_flops / 850e12
    assert "above the measured roof of 790 TFLOP/s" in suspect_reason(result, H200, "bf16", above_roof_ms)
    assert "compulsory 1.61 GB" in suspect_reason(result, H100, "bf16", above_roof_ms), "its specified roof is higher"
    scan = count("selective_scan", batch=8, seq_len=8192, head_dim_qk=16, channels=4096)
    least_ms = 1e3 * scan.compulsory_bytes / H200.bandwidth_bytes_s
    assert "compulsory" in suspect_reason(scan, H200, "bf16", 0.9 * least_ms)
    assert suspect_reason(scan, H200, "bf16", least_ms) is None


def test_a_cpu_far_above_its_roof_says_that_the_roof_is_wrong() -> None:
    result = count("mlstm_sig", seq_len=512, head_dim_qk=64, head_dim_v=64, chunk_size=64, dtype="fp32")
    here = dataclasses.replace(H200, key="cpu", measured=None, matrix_flops={"fp32": 4e11})
    at_roof_ms = 1e3 * result.tensor_flops / 4e11
    assert suspect_reason(result, here, "fp32", at_roof_ms / 1.5) is None, "another library may be faster"
    assert "25.0 times the roof of fp32" in suspect_reason(result, here, "fp32", at_roof_ms / 25)
    assert suspect_reason(result, here, "bf16", at_roof_ms / 25) is None, "no roof is known"


def test_problems_that_fit_the_cache_may_beat_the_memory() -> None:
    small = count("selective_scan", seq_len=64, head_dim_qk=16, channels=64)
    assert small.compulsory_bytes < H200.l2_bytes
    assert suspect_reason(small, H200, "bf16", 0.5e3 * small.compulsory_bytes / H200.bandwidth_bytes_s) is None


def test_no_kernel_is_faster_than_its_launches() -> None:
    tiny = {"batch": 1, "seq_len": 64, "num_heads": 1, "head_dim_qk": 16, "head_dim_v": 16}
    for mode, chunk, launches in (("fw", 64, 3), ("fwbw", 64, 7)):
        result = count("mlstm_sig", mode=mode, chunk_size=chunk, **tiny)
        times = [f(result, H200, "bf16") for f in (floor_ms, model_time_ms)]
        assert times == pytest.approx([launches * LAUNCH_MS] * 2)
        assert launches_ms(result, get_accelerator("cpu")) == 0
