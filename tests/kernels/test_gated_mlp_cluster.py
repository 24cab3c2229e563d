"""The gated MLP's specialised kernel: compiled for sm_90 without a GPU, and on one held to what it replaces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from lrbench.kernels.common.offline import Launch, compile_kernel, read_instructions, record_launches
from lrbench.kernels.gated_mlp import cluster
from lrbench.kernels.gated_mlp import fused as module
from lrbench.kernels.gated_mlp.config import ACTIVATIONS, GatedMlpConfig, TileConfig, invalid_reason, select_tile
from lrbench.kernels.gated_mlp.fused import fused
from lrbench.kernels.gated_mlp.reference import interleave_inputs, make_inputs
from lrbench.tests.kernels import mlp_laws as laws
from lrbench.tests.kernels.compiling import check, require_compiler

needs_clusters = pytest.mark.skipif(
    cluster.triton_version() < cluster.CLUSTERS_SINCE, reason="clusters need Triton 3.8"
)
each_cluster = pytest.mark.parametrize("num_ctas", [1, pytest.param(2, marks=needs_clusters)])

TILE = replace(select_tile(end="gate", pair=False, tokens=4096, capability=(9, 0), item_bytes=2), specialised=True)
ALTERNATIVES = {
    "chosen": {},
    "group16": {"group_m": 16},
    "k128": {"block_k": 128, "num_stages": 2},
    "narrow": {"block_f": 64},
    "stages3": {"num_stages": 3},
}
"""Specialised launches worth timing; all must be right first."""


def launches(tile: TileConfig) -> GatedMlpConfig:
    return GatedMlpConfig(forward=tile, gradient=replace(tile, specialised=False, num_ctas=1))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Record specialised launches as a Hopper GPU would get them."""
    require_compiler()
    monkeypatch.setattr(module, "check_kernel_support", lambda *_: None)
    monkeypatch.setattr(module, "capability", lambda _: (9, 0))
    with record_launches(cluster, "project_specialised_kernel") as found:
        yield found


def run(tile: TileConfig, *, dtype: torch.dtype = torch.bfloat16, activation: str = "silu") -> None:
    sizes = {"batch": 1, "seq_len": 512, "d_model": 256, "d_ff": 512}
    inputs = interleave_inputs(make_inputs(sizes, dtype=dtype, device="cpu", seed=0))
    fused(*inputs.values(), activation=activation, config=launches(tile))


@pytest.mark.compile
@each_cluster
@pytest.mark.parametrize("name", ALTERNATIVES)
def test_launches(recorded: list[Launch], name: str, num_ctas: int) -> None:
    run(replace(TILE, num_ctas=num_ctas, **ALTERNATIVES[name]))
    check(recorded, 90, max_stack_bytes=0)


@pytest.mark.compile
@pytest.mark.slow
@each_cluster
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(recorded: list[Launch], activation: str, dtype: torch.dtype, num_ctas: int) -> None:
    run(replace(TILE, num_ctas=num_ctas), dtype=dtype, activation=activation)
    check(recorded, 90, max_stack_bytes=0)


@pytest.mark.compile
@each_cluster
def test_a_step_is_products_and_barriers(recorded: list[Launch], num_ctas: int) -> None:
    """Both consumers have a loop of asynchronous products with hardly an instruction of every thread's own."""
    run(replace(TILE, num_ctas=num_ctas))
    compiled = compile_kernel(recorded[0], 90)
    loops = re.split(r"BRA\b[^\n]*", "\n".join(read_instructions(compiled.asm["cubin"])))
    products = [loop.splitlines() for loop in loops if "HGMMA" in loop]
    assert [sum("HGMMA.64x256x16" in line for line in loop) for loop in products] == [4, 4]
    for loop in products:
        assert any("DEPBAR.LE gsb0, 0x1" in line for line in loop)
        assert len(loop) < 70
    assert ("multicast::cluster" in compiled.asm["ptx"]) == (num_ctas > 1)


@pytest.mark.compile
def test_what_it_cannot_do_is_refused(recorded: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="specialised launches take float16 or bfloat16, got float32"):
        run(TILE, dtype=torch.float32)
    monkeypatch.setattr(module, "capability", lambda _: (10, 0))
    with pytest.raises(ValueError, match=r"need compute capability 9.0, got \(10, 0\)"):
        run(TILE)
    monkeypatch.setattr(module, "capability", lambda _: (9, 0))
    monkeypatch.setattr(cluster.triton, "__version__", "3.7.1")
    with pytest.raises(ValueError, match=r"num_ctas above 1 needs triton 3.8, got 3.7"):
        run(replace(TILE, num_ctas=2))
    assert not recorded


def test_invalid_launches() -> None:
    for change, reason in (
        ({"num_ctas": 3}, "num_ctas must be 1 or 2, got 3"),
        ({"specialised": False, "num_ctas": 2}, "num_ctas must be 1 unless specialised, got 2"),
        ({"block_m": 256}, "block_m must be 128 where specialised, got 256"),
        ({"block_k": 32}, "block_k must be at least 64 where specialised, got 32"),
        ({"persistent": False}, "specialised needs use_tma and persistent"),
    ):
        assert invalid_reason(launches(replace(TILE, **change))) == f"forward.{reason}"
    assert invalid_reason(launches(TILE)) is None


def need_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip(f"specialised launches need compute capability 9.0, got {torch.cuda.get_device_capability()}")


@pytest.mark.gpu
@each_cluster
@pytest.mark.parametrize("name", ALTERNATIVES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(2050, 1032, 1800), (8192, 512, 3584), (65, 72, 136)], ids=str)
def test_matches_reference_on_gpu(sizes: tuple[int, int, int], dtype: torch.dtype, name: str, num_ctas: int) -> None:
    """As defined, and the same bits again: no race."""
    need_hopper()
    config = launches(replace(TILE, num_ctas=num_ctas, **ALTERNATIVES[name]))
    laws.check_matches_reference(
        fused, *sizes, dtype=dtype, device="cuda", interleaved=True, gradients=False, config=config
    )
    inputs, _ = laws.draw(*sizes, dtype=dtype, device="cuda")
    given = interleave_inputs(inputs)
    first = fused(*given.values(), config=config)
    for _ in range(20):
        assert torch.equal(fused(*given.values(), config=config), first)


@pytest.mark.gpu
@each_cluster
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_on_gpu(activation: str, num_ctas: int) -> None:
    need_hopper()
    for scale in (1.0, 200.0):
        laws.check_matches_reference(
            fused, 130, 136, 264, dtype=torch.bfloat16, device="cuda", activation=activation, interleaved=True,
            gate_scale=scale, gradients=False, config=launches(replace(TILE, num_ctas=num_ctas)),
        )  # fmt: skip


@pytest.mark.gpu
@each_cluster
@pytest.mark.parametrize("sizes", [(2050, 1032, 1800), (128, 4096, 256), (3000, 64, 14336), (9000, 8, 2048)], ids=str)
def test_whole_numbers_are_exact_on_gpu(sizes: tuple[int, int, int], num_ctas: int) -> None:
    """Small whole numbers leave no rounding: any wrong element shows, however the tiles fall."""
    need_hopper()
    tokens, d_model, d_ff = sizes
    generator = torch.Generator("cuda").manual_seed(0)
    x, w_up, w_gate = (
        torch.randint(-1, 2, shape, generator=generator, device="cuda").to(torch.bfloat16)
        for shape in ((tokens, d_model), (d_model, d_ff), (d_model, d_ff))
    )
    given = interleave_inputs({"x": x, "w_up": w_up, "w_gate": w_gate})
    y = fused(*given.values(), activation="relu", config=launches(replace(TILE, num_ctas=num_ctas)))
    exact = (x.double() @ w_gate.double()).relu() * (x.double() @ w_up.double())
    wrong = (y != exact.to(torch.bfloat16)).nonzero()
    assert not len(wrong), f"{len(wrong)} of {y.numel()} elements differ, from {wrong[0]} to {wrong[-1]}"
