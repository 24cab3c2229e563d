"""The kernel that measures the vector rate computes its chains, and nothing but multiply-adds is in its loop."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.interpret
def test_chains_are_computed() -> None:
    from lrbench.bench.worker import vector_rate

    out = torch.empty(2 * vector_rate.BLOCK)
    assert vector_rate.run_chains(out, iterations=3) == 2 * out.numel() * 3 * vector_rate.UNROLL
    expected = torch.arange(out.numel(), dtype=torch.float64)
    for _ in range(3 * vector_rate.UNROLL):
        expected = expected * 0.999 + 0.001
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_bad_input() -> None:
    from lrbench.bench.worker import vector_rate

    for out in (torch.empty(vector_rate.BLOCK, dtype=torch.float64), torch.empty(vector_rate.BLOCK + 1)):
        with pytest.raises(ValueError, match=f"out must be float32 with a multiple of {vector_rate.BLOCK} elements"):
            vector_rate.run_chains(out)


@pytest.mark.compile
@pytest.mark.parametrize("capability", [80, 90])
def test_the_loop_is_made_of_multiply_adds(capability: int) -> None:
    """One fma per value, thread and unrolled step; no load, and no multiplication or addition apart."""
    from lrbench.bench.worker import vector_rate as v
    from lrbench.tests.kernels.offline import compile_kernel, record_launches

    with record_launches(v) as launches:
        v.run_chains(torch.empty(v.BLOCK))
    ptx = compile_kernel(launches[0], capability).asm["ptx"]
    assert ptx.count("fma.rn.f32") == v.UNROLL * v.BLOCK // (32 * v.WARPS)
    assert not any(name in ptx for name in ("ld.global", "mul.f32", "mul.rn.f32", "add.f32", "add.rn.f32"))
