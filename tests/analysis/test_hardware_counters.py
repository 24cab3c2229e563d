"""Counters beside counts: ratios against what the kernels run, and a reason wherever they are off."""

from __future__ import annotations

import pytest

from lrbench.analysis.accelerators import get_accelerator
from lrbench.analysis.counts import Count, count_case
from lrbench.analysis.hardware_counters import Comparison, Counters, compare

L2 = get_accelerator("h200").l2_bytes
SIZES = {"batch": 8, "seq_len": 8192, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256}


def counted(impl: str = "tfla", mode: str = "fw", op: str = "mlstm_sig", **sizes: int) -> Count:
    result = count_case(op, impl, mode, "bf16", "fp32", {**SIZES, "chunk_size": 256, **sizes})
    assert result is not None
    return result


def held(count: Count, flops: float, moved: float, *, l2_bytes: float | None = None) -> Comparison:
    counters = Counters(
        tensor_flops=flops, dram_read_bytes=0.7 * moved, dram_write_bytes=0.3 * moved, l2_bytes=l2_bytes, launches=3
    )
    return compare(count, counters, dtype="bf16", last_cache_bytes=L2)


def test_our_kernels_are_held_against_what_they_run() -> None:
    count = counted()
    assert count.executed_tensor_flops is not None
    assert count.executed_bytes is not None
    assert count.executed_tensor_flops > count.tensor_flops
    found = held(count, 1.004 * count.executed_tensor_flops, 0.9 * count.executed_bytes)
    assert found.tensor_flops_ratio == pytest.approx(1.004)
    assert found.bytes_ratio == pytest.approx(0.9)
    assert found.explanation == ()


def test_others_are_held_against_the_formulation() -> None:
    count = counted("mlstm_kernels.xl_chunk_siging")
    assert count.executed_tensor_flops is None
    found = held(count, count.tensor_flops, count.bytes)
    assert (found.expected_tensor_flops, found.expected_bytes) == (count.tensor_flops, count.bytes)
    assert found.explanation == ()


@pytest.mark.parametrize(("flops", "moved"), [(1.02, 1.0), (0.98, 1.0), (1.0, 1.16), (1.0, 0.84)])
def test_whatever_is_outside_a_tolerance_is_explained(flops: float, moved: float) -> None:
    for count in (counted(), counted("mlstm_kernels.xl_chunk_siging", "fwbw")):
        probe = held(count, 1.0, 1.0)
        found = held(count, flops * probe.expected_tensor_flops, moved * probe.expected_bytes, l2_bytes=1e10)
        (sentence,) = found.explanation
        assert sentence.startswith("tensor FLOPs are" if flops != 1 else "bytes are")
        assert "\n" not in sentence


def test_recomputation_explains_flops_where_kernels_are_not_counted() -> None:
    count = counted("mlstm_kernels.xl_chunk_siging", "fwbw")
    whole = count.tensor_flops + count.recomputed_tensor_flops
    (sentence,) = held(count, whole, count.bytes).explanation
    assert "recomputes" in sentence
    assert "the ratio is 1.000" in sentence


def test_other_tiles_explain_flops_where_kernels_are_counted() -> None:
    count = counted()
    (sentence,) = held(count, 1.5 * count.executed_tensor_flops, count.executed_bytes).explanation
    assert "1.500 of the counted ones" in sentence
    assert "--formulation walk --tile" in sentence


def test_products_off_the_matrix_units() -> None:
    count = counted()
    (sentence,) = held(count, 0.0, count.executed_bytes).explanation
    assert "no bf16 product ran on the matrix units" in sentence


def test_a_small_working_set_explains_bytes() -> None:
    count = counted(batch=1, seq_len=2048)
    assert count.compulsory_bytes < 10 * L2
    (sentence,) = held(count, count.executed_tensor_flops, 0.5 * count.executed_bytes, l2_bytes=3e8).explanation
    assert "times the last cache, below 10" in sentence
    assert "unwritten in the cache at its end" in sentence
    assert "asked for 300 MB" in sentence
    large = counted()
    assert large.compulsory_bytes > 10 * L2
    (sentence,) = held(large, large.executed_tensor_flops, 0.5 * large.executed_bytes).explanation
    assert "below 10" not in sentence


def test_rereads_explain_more_bytes() -> None:
    count = counted()
    assert count.reread_bytes
    moved = count.executed_bytes + 0.5 * count.reread_bytes
    (sentence,) = held(count, count.executed_tensor_flops, moved, l2_bytes=2 * moved).explanation
    assert "50% of that missed the cache" in sentence
    assert "50% of the requests went on to the memory" in sentence
    other = counted("mlstm_kernels.xl_chunk_siging", "bw")
    (sentence,) = held(other, other.tensor_flops, other.bytes + other.recomputed_bytes).explanation
    assert "to recompute, with which the ratio is 1.00" in sentence


def test_missing_counters_have_no_ratio() -> None:
    nothing = Counters(tensor_flops=None, dram_read_bytes=1.0, dram_write_bytes=None, l2_bytes=None, launches=1)
    found = compare(counted(), nothing, dtype="bf16", last_cache_bytes=None)
    assert (found.tensor_flops_ratio, found.bytes_ratio, found.explanation) == (None, None, ())
    scan = count_case("selective_scan", "x", "fw", "bf16", None, {"seq_len": 64, "head_dim_qk": 16, "channels": 64})
    assert held(scan, 5.0, scan.bytes).tensor_flops_ratio is None
