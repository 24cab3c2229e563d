"""Counters beside counts: ratios against what the kernels run, and a reason wherever they are off."""

from __future__ import annotations

import pytest

from lrbench.analysis.accelerators.known import get_accelerator
from lrbench.analysis.counts import Count, count_case
from lrbench.analysis.counts.hardware_counters import compare

L2 = get_accelerator("h200").l2_bytes
SIZES = {"batch": 8, "seq_len": 8192, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256}


def counted(impl: str = "fused_chunk", mode: str = "fw", op: str = "mlstm_sig", **sizes: int) -> Count:
    return count_case(op, impl, mode, "bf16", "fp32", {**SIZES, "chunk_size": 256, **sizes})


Compared = tuple[float | None, float | None, list[str]]


def held(count: Count, flops: float | None, moved: float, **more: float | None) -> Compared:
    """Return the ratios, and a sentence on each that is off."""
    of_memory = {"dram_read_bytes": 0.7 * moved, "dram_write_bytes": 0.3 * moved, "l2_bytes": None}
    measured = {"dtype": "bf16", "launches": 3, "last_cache_bytes": L2, "measured_tensor_flops": flops, **of_memory}
    return compare(count, measured | more)


PEER = "mlstm_kernels.xl_chunk_siging"
SMALL = {"batch": 1, "seq_len": 2048}


def mlp(mode: str) -> Count:
    sizes = {"batch": 1, "seq_len": 8192, "d_model": 4096, "d_ff": 14336}
    return count_case("gated_mlp", "fused_save", mode, "bf16", None, sizes)


def test_our_kernels_are_held_against_what_they_run_and_others_against_the_formulation() -> None:
    ours, other = counted(), counted(PEER)
    assert ours.executed_tensor_flops > ours.tensor_flops and other.executed_tensor_flops is None
    found = held(ours, 1.004 * ours.executed_tensor_flops, 0.9 * ours.executed_bytes)
    assert found == (pytest.approx(1.004), pytest.approx(0.9), [])
    *ratios, explanation = held(other, other.tensor_flops, other.bytes)
    assert ratios == pytest.approx([1, 1], rel=1e-12)
    assert explanation == []


@pytest.mark.parametrize(("flops", "moved"), [(1.02, 1.0), (0.98, 1.0), (1.0, 1.16), (1.0, 0.84)])
def test_whatever_is_outside_a_tolerance_is_explained(flops: float, moved: float) -> None:
    for count in (counted(), counted(PEER, "fwbw")):
        expected = (count.executed_tensor_flops or count.tensor_flops, count.executed_bytes or count.bytes)
        *_, (sentence,) = held(count, flops * expected[0], moved * expected[1], l2_bytes=1e10)
        assert sentence.startswith("tensor FLOPs are" if flops != 1 else "bytes are")


@pytest.mark.parametrize(
    ("count", "flops", "moved", "l2_bytes", "words", "not_said"),
    [
        (counted(), 1.5, 1, None, ("1.500 of the counted", "other tiles or passes"), ""),
        (counted(), 0, 1, None, ("no bf16 product ran on the matrix units",), ""),
        (
            counted(**SMALL), 1, 0.5, 3e8,
            ("times the last cache, below 10", "unwritten in the cache at its end", "asked for 300 MB"), "",
        ),
        # A working set that fits explains fewer bytes, not more.
        (counted(**SMALL), 1, 2, 3e8, ("missed the cache",), "below 10"),
        (counted(), 1, 0.5, None, ("unwritten in the cache",), "below 10"),
        (mlp("bw"), 1, 2, None, ("2.00 of the counted ones: a library's products (100% of the tensor FLOPs)",), ""),
        (mlp("bw"), 1.02, 1, None, ("are counted without the padding of their tiles",), ""),
    ],
)  # fmt: skip
def test_a_difference_is_explained_by_its_cause(
    count: Count, flops: float, moved: float, l2_bytes: float | None, words: tuple[str, ...], not_said: str
) -> None:
    found = held(count, flops * count.executed_tensor_flops, moved * count.executed_bytes, l2_bytes=l2_bytes)
    *_, (sentence,) = found
    assert all(each in sentence for each in words)
    assert not not_said or not_said not in sentence


def test_recomputation_and_rereads_explain_more() -> None:
    other = counted(PEER, "fwbw")
    *_, (sentence,) = held(other, other.tensor_flops + other.recomputed_tensor_flops, other.bytes)
    assert "recomputes" in sentence and "the ratio is 1.000" in sentence
    other = counted(PEER, "bw")
    *_, (sentence,) = held(other, other.tensor_flops, other.bytes + other.recomputed_bytes)
    assert "to recompute, with which the ratio is 1.00" in sentence
    ours = counted()
    moved = ours.executed_bytes + 0.5 * ours.reread_bytes
    *_, (sentence,) = held(ours, ours.executed_tensor_flops, moved, l2_bytes=2 * moved)
    assert "50% of that missed the cache" in sentence and "50% of the requests went on to the memory" in sentence


def test_missing_counters_have_no_ratio() -> None:
    missing = dict.fromkeys(("dram_write_bytes", "last_cache_bytes"))
    assert held(counted(), None, 1.0, **missing) == (None, None, [])
    scan = count_case("selective_scan", "x", "fw", "bf16", None, {"seq_len": 64, "head_dim_qk": 16, "channels": 64})
    assert held(scan, 5.0, scan.bytes)[0] is None
