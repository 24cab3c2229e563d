"""Executed counts against the Triton kernels themselves, run in the interpreter, which sees every product and load.

Products are compared exactly. Bytes are compared launch by launch: what a launch loads or stores, each address once, is
what the count has as traffic of the device's memory; what its programs load beyond that is read again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from lrbench.analysis.counts import Count, count, count_case
from lrbench.analysis.counts.executed import GATED_MLP
from lrbench.kernels import get_operation, resolve
from lrbench.kernels.scalar_decay.declare import SCHEMES
from lrbench.kernels.scalar_decay.launch import EngineRequest, choose
from lrbench.tests.kernels.laws import Case

RAGGED = {"batch": 1, "seq_len": 136, "num_heads": 1, "head_dim_qk": 72, "head_dim_v": 136}
ALIGNED = {"batch": 1, "seq_len": 256, "num_heads": 1, "head_dim_qk": 128, "head_dim_v": 256}
SHORT = {**RAGGED, "seq_len": 40, "num_heads": 2, "head_dim_v": 24}
ENGINE = (
    ("mlstm_sig", RAGGED, 64),
    ("mlstm_exp", {**RAGGED, "seq_len": 72}, 32),
    ("mlstm_exp", RAGGED, 256),
    ("simple_gla", ALIGNED, 128),
    ("lightning", RAGGED, 64),
    ("mamba2_ssd", {**RAGGED, "num_heads": 2, "num_groups": 1}, 128),
)


class Recorder:
    """What kernels did: FLOPs of products, bytes loaded and stored by programs and, each address once, by launches."""

    def __init__(self) -> None:
        self.flops = 0
        self.issued = 0
        self.once = 0
        self._loaded: list[np.ndarray] = []
        self._stored: list[np.ndarray] = []

    def access(self, addresses: np.ndarray, mask: np.ndarray, size: int, pages: list[np.ndarray]) -> None:
        """Note an access to elements of ``size`` bytes."""
        touched = np.asarray(addresses)[np.asarray(mask).astype(bool)]
        self.issued += touched.size * size
        # An address and the size in one number, which sorts many times as fast as two.
        pages.append(np.unique(touched.ravel().astype(np.uint64) << 4 | size))

    def end_launch(self) -> None:
        """Count every address of the launch once."""
        for pages in (self._loaded, self._stored):
            if pages:
                self.once += int((np.unique(np.concatenate(pages)) & 15).sum())
            pages.clear()

    @contextmanager
    def recording(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Record every kernel that runs in the interpreter within."""
        from triton.runtime import interpreter

        builder = interpreter.interpreter_builder
        dot, load, store = builder.create_dot, builder.create_masked_load, builder.create_masked_store
        run = interpreter.GridExecutor.__call__

        def create_dot(a: Any, b: Any, d: Any, *rest: Any) -> Any:
            self.flops += 2 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
            return dot(a, b, d, *rest)

        def create_masked_load(ptrs: Any, mask: Any, *rest: Any, **others: Any) -> Any:
            self.access(ptrs.data, mask.data, ptrs.get_element_ty().primitive_bitwidth // 8, self._loaded)
            return load(ptrs, mask, *rest, **others)

        def create_masked_store(ptrs: Any, value: Any, mask: Any, *rest: Any, **others: Any) -> Any:
            self.access(ptrs.data, mask.data, ptrs.get_element_ty().primitive_bitwidth // 8, self._stored)
            return store(ptrs, value, mask, *rest, **others)

        def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
            result = run(executor, *args, **kwargs)
            self.end_launch()
            return result

        with monkeypatch.context() as patch:
            patch.setattr(builder, "create_dot", create_dot)
            patch.setattr(builder, "create_masked_load", create_masked_load)
            patch.setattr(builder, "create_masked_store", create_masked_store)
            patch.setattr(interpreter.GridExecutor, "__call__", call)
            yield


def measured(
    op: str, impl: str, sizes: dict[str, int], chunk_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Recorder]:
    """Run forward and backward pass in the interpreter; return what each did."""
    operation = get_operation(op)
    keywords = {} if chunk_size is None else {"chunk_size": chunk_size}
    tensors = operation.make_inputs(sizes, dtype=torch.float16)
    implementation = operation.implementation(impl)
    if implementation.prepare is not None:
        tensors = resolve(implementation.prepare)(tensors)
    wanted = list(operation.leaves(tensors).values())
    outputs: list[torch.Tensor] = []
    call = operation.function(implementation)
    passes: dict[str, Callable[[], object]] = {
        "fw": lambda: outputs.append(call(*tensors.values(), **keywords)),
        "bw": lambda: torch.autograd.grad(outputs[0], wanted, torch.ones_like(outputs[0])),
    }
    recorders = {}
    for mode, run in passes.items():
        recorders[mode] = Recorder()
        with recorders[mode].recording(monkeypatch):
            run()
    return recorders


def counted(op: str, impl: str, mode: str, sizes: dict[str, int], chunk_size: int | None) -> Count:
    chunked = {} if chunk_size is None else {"chunk_size": chunk_size}
    result = count_case(op, impl, mode, "fp16", "fp32", {**sizes, **chunked})
    assert result is not None and result.executed_tensor_flops is not None
    return result


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("op", "impl", "sizes", "chunk_size"),
    [
        *((*case[:1], impl, *case[1:]) for case in ENGINE for impl in ("fused_chunk", "xl_chunk")),
        *(
            ("lightning", impl, sizes, None)
            for impl in ("lightning1", "lightning2")
            for sizes in (RAGGED, ALIGNED, SHORT)
        ),
    ],
)
def test_executed_counts_are_what_the_kernels_do(
    op: str, impl: str, sizes: dict[str, int], chunk_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode, recorder in measured(op, impl, sizes, chunk_size, monkeypatch).items():
        result = counted(op, impl, mode, sizes, chunk_size)
        assert result.executed_tensor_flops == recorder.flops
        assert result.library_tensor_flops == 0
        # Not counted: slopes; of the engine, a few scalars a tile and the gates' sums of a chunk.
        assert result.executed_bytes == pytest.approx(recorder.once, rel=0.001)
        issued = result.executed_bytes + result.reread_bytes
        assert issued == pytest.approx(recorder.issued, rel=0.001 if chunk_size is None else 0.02)


@pytest.mark.interpret
@pytest.mark.parametrize("impl", GATED_MLP)
@pytest.mark.parametrize("tokens", [40, 136])
def test_gated_mlp_kernels_do_what_is_counted(impl: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of torch are no kernels of ours: the recorder does not see them, nor the counts what they read again."""
    sizes = {"batch": 1, "seq_len": tokens, "d_model": 72, "d_ff": 200}

    def numbers(mode: str) -> np.ndarray:
        result = counted("gated_mlp", impl, mode, sizes, None)
        return np.array([result.executed_tensor_flops, result.executed_bytes, result.reread_bytes])

    backward = counted("gated_mlp", impl, "bw", sizes, None)
    in_torch = sum(n for name, n in backward.executed_byte_parts.items() if name.startswith(("input", "weight")))
    # A forward pass alone would not save what fused_save is named for.
    expected = {"fw": numbers("fwbw") - numbers("bw"), "bw": numbers("bw")}
    expected["bw"] -= backward.library_tensor_flops, in_torch, 0
    for mode, recorder in measured("gated_mlp", impl, sizes, None, monkeypatch).items():
        assert list(expected[mode]) == [recorder.flops, recorder.once, recorder.issued - recorder.once]


@pytest.mark.interpret
@pytest.mark.parametrize("op", ["rglru", "linear_scan"])
def test_reduce_then_scan_moves_what_is_counted(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the counts: dc's parts. The states that the forward pass stores are counted with the backward pass; the
    linear scan is counted as if it kept h, which it computes from b and a state every 8 steps."""
    sizes = {"batch": 2, "seq_len": 104, "channels": 72}
    chunks, saved = 4, 2 * 13 * 72 * 4
    for mode, recorder in measured(op, "chunked", sizes, 32, monkeypatch).items():
        expected = count_case(op, "chunked", mode, "fp16", "fp32", {**sizes, "chunk_size": 32}).bytes
        if mode == "fw":
            expected += saved
        elif op == "rglru":
            # dc leaves as a part a chunk and sequence, which another launch adds up into float32.
            expected += 2 * chunks * 2 * 72 * 4 + 72 * 4 + 72 * 2 - saved
        else:
            expected += saved
        assert recorder.once == pytest.approx(expected, rel=0.002)


def test_only_our_kernels_in_their_sizes_and_16_bit_dtypes_are_executed() -> None:
    sizes = {"batch": 1, "seq_len": 512, "num_heads": 2, "head_dim_qk": 64, "head_dim_v": 64}
    for impl, ours in (("lightning2", True), ("lightning1", True), ("lightning_attn.v2", False)):
        result = count_case("lightning", impl, "fwbw", "bf16", None, sizes)
        assert (result.executed_tensor_flops is not None) == ours
    layer = {"seq_len": 512, "d_model": 64, "d_ff": 128}
    for impl in (*GATED_MLP, "xformers.swiglu", "torch", "liger_kernel.silu_mul", "x.fused"):
        result = count_case("gated_mlp", impl, "fwbw", "bf16", None, layer)
        assert (result.executed_tensor_flops is not None) == (impl in GATED_MLP)
    for change in ({"head_dim_v": 264}, {"dtype": "fp32"}):
        settings = {**sizes, "chunk_size": 64, **change}
        assert count("lightning", formulation="lightning2", **settings).executed_tensor_flops is None
    assert count("gated_mlp", formulation="fused", dtype="fp32", **layer).executed_tensor_flops is None
    for change in ({"chunk_size": 100}, {"chunk_size": 128, "dtype": "fp32"}):
        assert count("mlstm_sig", formulation="sweep", **sizes, **change).executed_tensor_flops is None


@pytest.mark.parametrize("kernels", GATED_MLP)
def test_torch_multiplies_twice_for_the_gradients_of_a_gated_mlp(kernels: str) -> None:
    sizes = {"seq_len": 300, "d_model": 200, "d_ff": 264}
    forward, both = (counted("gated_mlp", kernels, mode, sizes, None) for mode in ("fw", "fwbw"))
    assert forward.executed_bytes == forward.bytes == forward.compulsory_bytes
    assert both.library_tensor_flops == 2 * forward.tensor_flops
    # Both weights have products of their own: x is read twice, and the second part of dx is added to the first.
    assert both.executed_bytes == both.bytes + both.recomputed_bytes + 2 * 300 * 200 * 3


@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("seq_len", [100, 1000, 8192])
@pytest.mark.parametrize("chunk_size", [64, 8192])
@pytest.mark.parametrize("impl", ["fused_chunk", "whole_state"])
def test_a_backward_walk_takes_the_engines_chunks(impl: str, batch: int, seq_len: int, chunk_size: int) -> None:
    sizes = {"batch": batch, "seq_len": seq_len, "num_heads": 2, "head_dim_qk": 64, "head_dim_v": 128}
    q, v = (torch.empty(batch, seq_len, 2, dim, dtype=torch.bfloat16, device="meta") for dim in (64, 128))
    request = EngineRequest("sig", 1.0, 1.0, SCHEMES[impl], chunk_size, torch.float32, False)
    made = choose(request, q, v, backward=True, kept=choose(request, q, v).keeps_states).launched
    parts = counted("mlstm_sig", impl, "bw", sizes, chunk_size).executed_byte_parts
    states = sum(n for name, n in parts.items() if name == "dq: states")
    assert states == made.several * made.chunks * made.cut * 64 * 128 * 4


@pytest.mark.parametrize("mode", ["fw", "bw", "fwbw"])
@pytest.mark.parametrize(
    ("op", "impl", "seq_len", "chunk_size"),
    [
        *((op, "fused_chunk", 1000, chunk) for op in ("mlstm_sig", "mlstm_exp", "retention") for chunk in (256, 1024)),
        ("simple_gla", "xl_chunk", 1024, 256),
        ("lightning", "lightning2", 1000, None),
    ],
)
def test_what_is_not_recomputed_is_the_counted_work(
    op: str, impl: str, seq_len: int, chunk_size: int | None, mode: str
) -> None:
    sizes = {"batch": 2, "seq_len": seq_len, "num_heads": 3, "head_dim_qk": 72, "head_dim_v": 200}
    result = counted(op, impl, mode, sizes, chunk_size)
    beyond = ("recomputed_", "padding")
    parts = result.executed_parts
    needed = sum(n for name, n in parts.items() if not name.rpartition(": ")[2].startswith(beyond))
    assert needed == result.tensor_flops < result.executed_tensor_flops
    assert sum(parts.values()) == result.executed_tensor_flops
    assert sum(result.executed_byte_parts.values()) == result.executed_bytes


def test_sweeping_a_single_chunk_needs_no_states() -> None:
    parts = counted("simple_gla", "xl_chunk", "fwbw", ALIGNED, 256).executed_parts
    assert not [name for name in parts if name.endswith(("inter", "state", "state_gradient"))]


def test_whole_tiles_and_one_column_block_leave_nothing_to_recompute_forward() -> None:
    sizes = {"seq_len": 512, "head_dim_qk": 128, "head_dim_v": 64, "chunk_size": 512}
    result = count("mlstm_sig", formulation="walk", **sizes)
    assert result.executed_tensor_flops == result.tensor_flops
    wider = count("mlstm_sig", formulation="walk", **sizes | {"head_dim_v": 256})
    assert wider.executed_parts["h: recomputed_scores"] == 3 * wider.executed_parts["h: scores"]
    deeper = count("mlstm_sig", formulation="walk", **sizes | {"head_dim_qk": 384})
    assert deeper.executed_parts["h: recomputed_intra"] == 2 * deeper.executed_parts["h: intra"]


@pytest.mark.compile
@pytest.mark.parametrize("op", ["mlstm_sig", "mlstm_exp"])
def test_a_tile_takes_the_tensor_core_instructions_it_is_counted_with(op: str) -> None:
    """The kernels compiled for compute capability 9.0: one pass through every loop, in FLOPs of its instructions."""
    from lrbench.tests.kernels.compiling import record

    sizes = {"batch": 1, "seq_len": 128, "num_heads": 1, "head_dim_qk": 64, "head_dim_v": 64}
    case = Case(op=op, impl="fused_chunk", dtype=torch.bfloat16, sizes=sizes, kwargs={"chunk_size": 64})
    launches = record(case, training=False, carry=False)
    # Two chunks of one tile each: half of everything but the pass for the states, which only the second chunk needs.
    result = count_case(op, "fused_chunk", "fw", "bf16", "fp32", {**sizes, "chunk_size": 64})
    states = result.executed_parts["state pass: recomputed_state"]
    assert 2 * sum(map(instruction_flops, launches)) == result.executed_tensor_flops + states


def instruction_flops(launch: Any) -> int:
    """Return the FLOPs of the warpgroup products in a recorded launch's code for compute capability 9.0."""
    from lrbench.tests.kernels.offline import compile_kernel

    ptx = compile_kernel(launch, 90).asm["ptx"]
    assert "mma.sync" not in ptx
    shapes = re.findall(r"wgmma\.mma_async\S*?m(\d+)n(\d+)k(\d+)", ptx)
    warpgroups = launch.options.get("num_warps", 4) // 4
    return sum(2 * int(m) * int(n) * int(k) * warpgroups for m, n, k in shapes)
