"""Counters beside counts: ratios against what the kernels run, and a reason wherever they are off."""

from __future__ import annotations

import pytest

from lrbench.analysis.accelerators.known import get_accelerator
from lrbench.analysis.counts import Count, count_case
from lrbench.analysis.counts.hardware_counters import Comparison, Counters, compare

L2 = get_accelerator("h200").l2_bytes
SIZES = {"batch": 8, "seq_len": 8192, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256}


def counted(impl: str = "fused_chunk", mode: str = "fw", op: str = "mlstm_sig", **sizes: int) -> Count:
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
    (sentence,) = held(count, count.executed_tensor_flops, 2 * count.executed_bytes, l2_bytes=3e8).explanation
    assert "below 10" not in sentence, "it explains fewer bytes, not more"
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


def mlp(impl: str, mode: str) -> Count:
    sizes = {"batch": 1, "seq_len": 8192, "d_model": 4096, "d_ff": 14336}
    result = count_case("gated_mlp", impl, mode, "bf16", None, sizes)
    assert result is not None
    return result


def test_rereads_and_merged_requests_explain_a_gated_mlp() -> None:
    """As measured on an H200: 4.58 times the bytes, and an L2 that was asked for fewer than programs load."""
    count = mlp("fused_save", "fw")
    found = held(count, count.tensor_flops, 2.4602e9, l2_bytes=12.826e9)
    assert found.tensor_flops_ratio == 1
    (sentence,) = found.explanation
    assert sentence == (
        "bytes are 4.58 of the counted ones: programs read 22.25 GB again that others have read, and 9% of that missed "
        "the cache; the last cache was asked for 12.83 GB of the 22.78 GB that programs read and write: requests that "
        "meet on the way are merged, and 19% of the requests went on to the memory"
    )


def test_products_of_a_library_read_again_nobody_knows_how_much() -> None:
    count = mlp("fused_save", "fwbw")
    assert count.executed_tensor_flops and count.executed_bytes
    (sentence,) = held(count, count.executed_tensor_flops, 9.0764e9, l2_bytes=44.45e9).explanation
    assert "programs read 22.25 GB again that others have read, and a library's products (67% of the tensor" in sentence
    assert "read again too, in tiles that are not counted: 5.151 GB in all missed the cache" in sentence
    assert "merged" not in sentence
    backward = mlp("fused_save", "bw")
    assert backward.reread_bytes == 0
    (sentence,) = held(backward, backward.executed_tensor_flops, 2 * backward.executed_bytes).explanation
    assert "2.00 of the counted ones: a library's products (100% of the tensor FLOPs) read again too" in sentence
    (sentence,) = held(backward, 1.02 * backward.executed_tensor_flops, backward.executed_bytes).explanation
    assert "--tile" not in sentence
    assert "are counted without the padding of their tiles" in sentence


MEASURED = [
    ("lightning2", "fwbw", 962.1e9, 8.578e9),
    ("lightning2", "fw", 240.5e9, 2.145e9),
    ("lightning1", "fwbw", 17.87e12, 8.562e9),
    ("lightning1", "fw", 4467e9, 2.141e9),
]
"""Tensor FLOPs and bytes of the Lightning kernels on an H200, at batch 8, 8192 positions, 32 heads and 128/128."""


@pytest.mark.parametrize(("impl", "mode", "flops", "moved"), MEASURED)
def test_lightning_kernels_as_measured(impl: str, mode: str, flops: float, moved: float) -> None:
    sizes = {"batch": 8, "seq_len": 8192, "num_heads": 32, "head_dim_qk": 128, "head_dim_v": 128}
    count = count_case("lightning", impl, mode, "bf16", "fp32", sizes)
    assert count is not None
    found = held(count, flops, moved)
    assert found.tensor_flops_ratio == pytest.approx(1, abs=0.001)
    assert found.bytes_ratio == pytest.approx(1, abs=0.005)
    assert found.explanation == ()


def test_missing_counters_have_no_ratio() -> None:
    nothing = Counters(tensor_flops=None, dram_read_bytes=1.0, dram_write_bytes=None, l2_bytes=None, launches=1)
    found = compare(counted(), nothing, dtype="bf16", last_cache_bytes=None)
    assert (found.tensor_flops_ratio, found.bytes_ratio, found.explanation) == (None, None, ())
    scan = count_case("selective_scan", "x", "fw", "bf16", None, {"seq_len": 64, "head_dim_qk": 16, "channels": 64})
    assert held(scan, 5.0, scan.bytes).tensor_flops_ratio is None
