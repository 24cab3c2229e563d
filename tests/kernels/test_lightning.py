"""Lightning Attention, beside the laws: the definition is Retention without its scale; decays, slopes and launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lrbench.kernels import get_operation, resolve
from lrbench.kernels.lightning import OPERATION
from lrbench.kernels.lightning.config import LightningConfig, LoopConfig, QuadraticConfig, select_config
from lrbench.tests.kernels import laws
from lrbench.tests.kernels.cases import F32, LIGHTNING, heads
from lrbench.tests.kernels.laws import Case

ODD = heads(2, 45, 4, 16, 24)
SMALL = heads(1, 70, 2, 24, 40)


def test_it_is_retention_without_its_scale() -> None:
    inputs = OPERATION.make_inputs(ODD, dtype=torch.float64)
    ours = resolve(OPERATION.recurrent)(*inputs.values())
    retention = resolve(get_operation("retention").recurrent)(*inputs.values())
    torch.testing.assert_close(ours, retention * ODD["head_dim_qk"] ** 0.5, rtol=1e-12, atol=0)


def test_inputs_keep_scores_of_order_one_and_slopes_are_those_of_alibi() -> None:
    sizes = {**ODD, "num_heads": 8, "seq_len": 512, "head_dim_qk": 128}
    inputs = OPERATION.make_inputs(sizes, dtype=torch.bfloat16)
    scores = torch.einsum("bthk,bthk->bth", inputs["q"].float(), inputs["k"].roll(1, 1).float())
    assert 0.9 < float(scores.std()) < 1.1
    assert inputs["slope"].tolist() == [2.0**-n for n in range(1, 9)]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
@pytest.mark.parametrize(("head_dim_qk", "head_dim_v"), [(16, 16), (24, 40), (64, 64), (128, 256), (256, 16)])
def test_launches_fit_the_head_dims(head_dim_qk: int, head_dim_v: int, capability: tuple[int, int], dtype: str) -> None:
    for impl, batch in (("lightning1", 1), ("lightning2", 1), ("lightning2", 10_000)):
        config = select_config(heads(batch, 1, 1, head_dim_qk, head_dim_v), dtype, capability, True, impl=impl)
        for name, dim in (("output", head_dim_v), ("dv", head_dim_v), ("dq", head_dim_qk), ("dk", head_dim_qk)):
            launch = getattr(config, name)
            assert 16 <= launch.block_z <= max(16, 2 * dim)
            assert launch.block_t % getattr(launch, "block_s", 16) == 0


def test_few_heads_get_narrower_programs() -> None:
    for batch, columns in ((8, 64), (1, 32)):
        sizes = heads(batch, 1, 32, 128, 128)
        assert select_config(sizes, "bf16", (9, 0), True, impl="lightning2").output.block_z == columns


@pytest.mark.interpret
@pytest.mark.parametrize("slope", [0.0, 1e30, float("inf")])
@pytest.mark.parametrize("implementation", LIGHTNING)
def test_no_decay_and_total_decay(implementation: str, slope: float) -> None:
    """Without decay the sum is cumulative; with total decay only the position itself is left."""
    ranges = {"slope": (slope, slope)}
    laws.check_matches_reference(Case(op="lightning", impl=implementation, dtype=F32, sizes=SMALL, ranges=ranges))


LOOP = LoopConfig(block_t=32, block_z=32, num_warps=4, num_stages=2)
LOOPS = LightningConfig(output=LOOP, dq=LOOP, dk=LOOP, dv=LOOP)
ODD_LOOPS = replace(LOOPS, dq=replace(LOOP, block_t=24))


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("implementation", "options", "message"),
    [
        ("lightning1", {"gate_dtype": torch.float64}, "gate_dtype is no option of lightning1"),
        ("lightning1", {"config": LOOPS}, "config: output must be a QuadraticConfig for lightning1, got a LoopConfig"),
        ("lightning2", {"config": ODD_LOOPS}, "config: dq.block_t must be a power of two >= 16, got 24"),
    ],
)
def test_bad_options(implementation: str, options: dict[str, Any], message: str) -> None:
    inputs = OPERATION.make_inputs(SMALL, dtype=torch.float32)
    with pytest.raises(ValueError if "config" in options else TypeError, match=message):
        OPERATION.function(implementation)(*inputs.values(), **options)


@pytest.mark.interpret
@pytest.mark.parametrize("implementation", LIGHTNING)
def test_slopes_get_no_gradient(implementation: str) -> None:
    fn = OPERATION.function(implementation)
    q, k, v, slope = (x.requires_grad_() for x in OPERATION.make_inputs(SMALL, dtype=torch.float32).values())
    with pytest.raises(ValueError, match=f"slope must not require a gradient for {implementation}"):
        fn(q, k, v, slope)
    with torch.no_grad():
        assert fn(q, k, v, slope).isfinite().all()


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("implementation", ["fused_chunk", "xl_chunk"])
def test_engine_gives_slopes_a_gradient_where_they_want_one(implementation: str, dtype: torch.dtype) -> None:
    """And the other gradients are the same with it as without."""
    inputs = OPERATION.make_inputs({**SMALL, "seq_len": 41}, dtype=dtype)
    exact = [x.double().requires_grad_() for x in inputs.values()]
    expected = torch.autograd.grad(resolve(OPERATION.recurrent)(*exact).square().sum(), exact)

    def gradients(names: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
        leaves = {name: x.clone().requires_grad_(name in names) for name, x in inputs.items()}
        o = OPERATION.function(implementation)(*leaves.values(), chunk_size=16)
        return torch.autograd.grad(o.float().square().sum(), [leaves[name] for name in names])

    results = gradients(OPERATION.arguments)
    for ours, without in zip(results, gradients(OPERATION.differentiable), strict=False):
        assert torch.equal(ours, without)
    error = (results[-1].double() - expected[-1]).abs().max()
    assert error <= 8 * torch.finfo(dtype).eps * expected[-1].abs().max()


TIMED_LOOPS = [
    LoopConfig(block_t=block_t, block_z=block_z, num_warps=num_warps, num_stages=num_stages)
    for block_t, block_z, num_warps, num_stages in (
        (32, 32, 4, 2), (64, 16, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3), (64, 32, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3),
        (64, 64, 8, 2), (128, 32, 8, 2), (128, 64, 8, 2),
    )
]  # fmt: skip
SWEEPS = [
    QuadraticConfig(block_t=block_t, block_s=block_s, block_z=block_z, num_warps=num_warps, num_stages=num_stages)
    for block_t, block_s, block_z, num_warps, num_stages in (
        (64, 64, 64, 4, 2), (64, 64, 128, 4, 2), (128, 32, 64, 8, 2), (128, 64, 64, 4, 2), (128, 64, 128, 8, 2),
        (128, 64, 128, 8, 3), (128, 128, 128, 8, 2),
    )
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("launch", [*TIMED_LOOPS, *SWEEPS], ids=str)
def test_every_launch_worth_timing_is_right_on_gpu(launch: LoopConfig | QuadraticConfig, head_dim: int) -> None:
    """Miscompilations depend on tile sizes and warps: neither the interpreter nor the selected launches show all."""
    name = "lightning1" if isinstance(launch, QuadraticConfig) else "lightning2"
    config = LightningConfig(output=launch, dq=launch, dk=launch, dv=launch)
    sizes = heads(2, 600, 2, head_dim, head_dim)
    laws.check_matches_reference(
        Case(op="lightning", impl=name, dtype=torch.bfloat16, sizes=sizes, device="cuda", kwargs={"config": config})
    )
