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

from lrbench.analysis.counts import TILES, Count, count, count_case, formulation_of
from lrbench.analysis.counts.executed import FILLED_PROGRAMS
from lrbench.kernels import get_operation, resolve
from lrbench.kernels.scalar_decay.config import MIN_PROGRAMS, fit_chunk, select_config
from lrbench.kernels.scalar_decay.engine import backward_chunk

IMPLEMENTATIONS = ("tfla", "xl_chunk")
RAGGED = {"batch": 1, "seq_len": 200, "num_heads": 2, "head_dim_qk": 72, "head_dim_v": 136}
ALIGNED = {"batch": 1, "seq_len": 256, "num_heads": 1, "head_dim_qk": 128, "head_dim_v": 256}


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
        pages.append(np.stack([touched.ravel(), np.full(touched.size, size, np.uint64)]))

    def end_launch(self) -> None:
        """Count every address of the launch once."""
        for pages in (self._loaded, self._stored):
            if pages:
                self.once += int(np.unique(np.concatenate(pages, axis=1), axis=1)[1].sum())
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
    op: str, impl: str, sizes: dict[str, int], chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Recorder]:
    """Run forward and backward pass in the interpreter; return what each did."""
    operation = get_operation(op)
    tensors = resolve(operation.inputs)(sizes, dtype=torch.float16, device="cpu", seed=0)
    leaves = [tensors[name].requires_grad_(name in operation.differentiable) for name in operation.arguments]
    outputs: list[torch.Tensor] = []
    call = resolve(operation.implementation(impl).call)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    passes: dict[str, Callable[[], object]] = {
        "fw": lambda: outputs.append(call(*leaves, chunk_size=chunk_size)),
        "bw": lambda: torch.autograd.grad(outputs[0], wanted, torch.ones_like(outputs[0])),
    }
    recorders = {}
    for mode, run in passes.items():
        recorders[mode] = Recorder()
        with recorders[mode].recording(monkeypatch):
            run()
    return recorders


def counted(op: str, impl: str, mode: str, sizes: dict[str, int], chunk_size: int) -> Count:
    result = count_case(op, impl, mode, "fp16", "fp32", {**sizes, "chunk_size": chunk_size})
    assert result is not None and result.executed_tensor_flops is not None
    return result


@pytest.mark.interpret
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("op", "sizes", "chunk_size"),
    [
        ("mlstm_sig", RAGGED, 64),
        ("mlstm_exp", RAGGED, 32),
        ("mlstm_exp", RAGGED, 256),
        ("simple_gla", ALIGNED, 128),
        ("lightning", RAGGED, 64),
        ("mamba2_ssd", {**RAGGED, "num_groups": 1}, 128),
    ],
)
def test_executed_counts_are_what_the_kernels_do(
    op: str, impl: str, sizes: dict[str, int], chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode, recorder in measured(op, impl, sizes, chunk_size, monkeypatch).items():
        result = counted(op, impl, mode, sizes, chunk_size)
        assert result.executed_tensor_flops == recorder.flops
        # Adding up the gradients of heads that share keys is torch's, not a kernel's.
        in_torch = sum(n for name, n in result.executed_byte_parts.items() if name.endswith("sum over heads"))
        moved = result.executed_bytes - in_torch
        # Not counted: a few scalars a tile and the gates' sums of a chunk.
        assert moved == pytest.approx(recorder.once, rel=0.001)
        assert moved + result.reread_bytes == pytest.approx(recorder.issued, rel=0.02)


@pytest.mark.parametrize(("impl", "scheme"), [("tfla", "walk"), ("xl_chunk", "sweep")])
@pytest.mark.parametrize(("head_dim_qk", "head_dim_v", "chunk"), [(128, 256, 1024), (1024, 1024, 512), (40, 16, 16)])
def test_default_tiles_are_what_the_engine_selects(
    impl: str, scheme: str, head_dim_qk: int, head_dim_v: int, chunk: int
) -> None:
    """The tiles of a launch are the default ones, cut to the chunk and the padded head dims."""
    config = select_config(
        scheme=scheme,
        capability=(9, 0),
        item_bytes=2,
        head_dim_qk=head_dim_qk,
        head_dim_v=head_dim_v,
        chunk=chunk,
        rows=1,
    )
    tiles = TILES[scheme]
    padded_qk, padded_v = (max(16, 1 << (dim - 1).bit_length()) for dim in (head_dim_qk, head_dim_v))
    for launch, dx, dz in (
        (config.output, padded_qk, padded_v),
        (config.dq, padded_v, padded_qk),
        (config.dk, padded_v, padded_qk),
        (config.dv, padded_qk, padded_v),
    ):
        assert launch.block_t == min(tiles.block_t, chunk)
        assert launch.block_x == min(tiles.block_x, dx)
        assert launch.block_z == min(tiles.block_z, dz)
        if scheme == "sweep":
            assert launch.block_s == min(tiles.block_s, launch.block_t)
    for states in (config.states, config.d_states):
        assert states.block_t == min(tiles.states_t, chunk)
        assert states.block_k == min(tiles.states_k, padded_qk)
        assert states.block_v == min(tiles.states_v, padded_v)
        assert states.parallel == (scheme == "walk")
    assert config.normaliser.block_k == min(tiles.block_x, padded_qk)
    assert FILLED_PROGRAMS == MIN_PROGRAMS
    assert formulation_of("mlstm_exp", impl) == scheme


@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("seq_len", [100, 1000, 8192])
@pytest.mark.parametrize("chunk_size", [64, 8192])
def test_a_backward_walk_takes_the_engines_chunks(batch: int, seq_len: int, chunk_size: int) -> None:
    sizes = {"batch": batch, "seq_len": seq_len, "num_heads": 2, "head_dim_qk": 64, "head_dim_v": 128}
    q = torch.empty(batch, seq_len, 2, 64, device="meta")
    v = torch.empty(batch, seq_len, 2, 128, device="meta")
    chunk = backward_chunk(fit_chunk(chunk_size, seq_len), q, v)
    parts = counted("mlstm_sig", "tfla", "bw", sizes, chunk_size).executed_byte_parts
    states = sum(n for name, n in parts.items() if name == "state pass: store")
    expected = -(-seq_len // chunk) * batch * 2 * 64 * 128 * 4
    assert states == (expected if chunk < seq_len else 0)


@pytest.mark.parametrize("op", ["mlstm_sig", "mlstm_exp", "retention"])
@pytest.mark.parametrize("mode", ["fw", "bw", "fwbw"])
@pytest.mark.parametrize("chunk_size", [256, 1024])
def test_what_a_walk_does_not_recompute_is_the_counted_work(op: str, mode: str, chunk_size: int) -> None:
    sizes = {"batch": 1, "seq_len": 1000, "num_heads": 3, "head_dim_qk": 72, "head_dim_v": 200}
    result = counted(op, "tfla", mode, sizes, chunk_size)
    parts = result.executed_parts
    beyond = ("recomputed_", "padding")
    needed = sum(n for name, n in parts.items() if not name.rpartition(": ")[2].startswith(beyond))
    assert needed == result.tensor_flops
    assert sum(parts.values()) == result.executed_tensor_flops
    assert sum(result.executed_byte_parts.values()) == result.executed_bytes
    assert result.executed_tensor_flops > needed


@pytest.mark.parametrize("mode", ["fw", "bw", "fwbw"])
def test_what_a_sweep_of_several_chunks_does_not_recompute_is_the_counted_work(mode: str) -> None:
    sizes = {"batch": 2, "seq_len": 1024, "num_heads": 3, "head_dim_qk": 72, "head_dim_v": 200}
    result = counted("simple_gla", "xl_chunk", mode, sizes, 256)
    beyond = ("recomputed_", "padding")
    parts = {name: n for name, n in result.executed_parts.items() if not name.rpartition(": ")[2].startswith(beyond)}
    assert sum(parts.values()) == result.tensor_flops
    alone = counted("simple_gla", "xl_chunk", mode, sizes, 1024)
    assert not [name for name in alone.executed_parts if name.endswith(("inter", "state", "state_gradient"))]


def test_whole_tiles_and_one_column_block_leave_nothing_to_recompute_forward() -> None:
    sizes = {"seq_len": 512, "head_dim_qk": 128, "head_dim_v": 64, "chunk_size": 512}
    result = count("mlstm_sig", formulation="walk", **sizes)
    assert result.executed_tensor_flops == result.tensor_flops
    wider = count("mlstm_sig", formulation="walk", **sizes | {"head_dim_v": 256})
    assert wider.executed_parts["h: recomputed_scores"] == 3 * wider.executed_parts["h: scores"]
    deeper = count("mlstm_sig", formulation="walk", **sizes | {"head_dim_qk": 384})
    assert deeper.executed_parts["h: recomputed_intra"] == 2 * deeper.executed_parts["h: intra"]


def test_tiles_of_other_architectures() -> None:
    sizes = {"seq_len": 512, "head_dim_qk": 128, "head_dim_v": 64, "chunk_size": 512, "formulation": "walk"}
    older = TILES["walk"].replaced(["block_t=32", "block_x=64"])
    assert (older.block_t, older.block_x, older.block_z) == (32, 64, 64)
    assert count("mlstm_sig", tiles=older, **sizes).executed_parts["h: recomputed_intra"] > 0
    for setting, message in (("block_t=48", "power of two >= 16, got '48'"), ("block_q=32", "tile must be one of")):
        with pytest.raises(ValueError, match=message):
            older.replaced([setting])
    with pytest.raises(ValueError, match="tiles must be left out for the formulation chunkwise"):
        count("mlstm_sig", tiles=older, **sizes | {"formulation": "chunkwise"})


def test_only_what_the_engine_runs_on_tensor_cores_is_executed() -> None:
    sizes = {"seq_len": 512, "head_dim_qk": 64, "head_dim_v": 64, "formulation": "sweep"}
    assert count("mlstm_sig", chunk_size=128, **sizes).executed_tensor_flops is not None
    for change in ({"chunk_size": 100}, {"chunk_size": 128, "dtype": "fp32"}):
        assert count("mlstm_sig", **sizes, **change).executed_tensor_flops is None


@pytest.mark.compile
@pytest.mark.parametrize("op", ["mlstm_sig", "mlstm_exp"])
def test_a_tile_takes_the_tensor_core_instructions_it_is_counted_with(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels compiled for compute capability 9.0: one pass through every loop, in FLOPs of its instructions."""
    from lrbench.kernels.common.offline import record_launches
    from lrbench.kernels.scalar_decay import engine, front

    monkeypatch.setattr(front, "_check_support", lambda q, v, gate: None)
    monkeypatch.setattr(engine, "capability", lambda device: (9, 0))
    sizes = {"batch": 1, "seq_len": 128, "num_heads": 1, "head_dim_qk": 128, "head_dim_v": 64}
    operation = get_operation(op)
    tensors = resolve(operation.inputs)(sizes, dtype=torch.bfloat16, device="cpu", seed=0)
    with torch.no_grad(), record_launches(engine) as launches:
        resolve(operation.implementation("tfla").call)(*tensors.values(), chunk_size=64)
    # Two chunks of one tile each: half of everything.
    result = count_case(op, "tfla", "fw", "bf16", "fp32", {**sizes, "chunk_size": 64})
    assert result is not None and result.executed_tensor_flops is not None
    assert 2 * sum(map(instruction_flops, launches)) == result.executed_tensor_flops


def instruction_flops(launch: Any) -> int:
    """Return the FLOPs of the warpgroup products in a recorded launch's code for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lrbench.kernels.common.offline import _specialise

    signature, constexprs, attributes = _specialise(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options).asm["ptx"]
    assert "mma.sync" not in ptx
    shapes = re.findall(r"wgmma\.mma_async\S*?m(\d+)n(\d+)k(\d+)", ptx)
    warpgroups = launch.options.get("num_warps", 4) // 4
    return sum(2 * int(m) * int(n) * int(k) * warpgroups for m, n, k in shapes)
