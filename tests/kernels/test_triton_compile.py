"""Compile every launch of the Triton engine for sm_80, sm_90 and sm_100, without a GPU, and hold what it costs.

The ordinary launchers run on CPU tensors with recorders in the kernels' places, so what is compiled is what would run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lrbench.kernels import FAMILIES, get_operation, resolve
from lrbench.kernels.common.offline import Launch, record_launches
from lrbench.kernels.scalar_decay import chunk_h, chunk_o, engine, fused_chunk, gates, launch, normaliser, step
from lrbench.tests.kernels.compiling import CAPABILITIES, MAX_STACK_BYTES, check, kernels_of, require_compiler

pytestmark = pytest.mark.compile

HEAD_DIMS = ((128, 256), (64, 64), (24, 40), (256, 512))
TUNED_HEAD_DIMS = ((128, 256), (64, 64), (256, 512))
"""(K, V) whose launches were chosen with care; others may spill, but must compile and fit."""
CI_WALKS = {(op, dims) for op in ("mlstm_sig", "mlstm_exp") for dims in ((128, 256), (64, 64))}
CI_WALKS |= {("mlstm_exp", (24, 40)), ("mlstm_exp", (256, 512))}
"""What every run compiles: mLSTMexp takes the most registers; the rest is marked slow."""


def _slow_unless(cases: set[Any], case: Any) -> Any:
    return pytest.param(*case, marks=[] if case in cases else pytest.mark.slow)


ALL_WALKS = [(op, dims) for op in ("mlstm_sig", "mlstm_exp") for dims in HEAD_DIMS]
WALKS = [_slow_unless(CI_WALKS, case) for case in ALL_WALKS]
WALKS_WITH_STATE = [_slow_unless({("mlstm_exp", (128, 256))}, case) for case in ALL_WALKS]
ALL_SWEEPS = [(op, *scheme) for op in ("mlstm_sig", "mlstm_exp") for scheme in (("xl_chunk", 256), ("limit_chunk", 64))]
SWEEPS = [_slow_unless({("mlstm_exp", "xl_chunk", 256), ("mlstm_sig", "limit_chunk", 64)}, case) for case in ALL_SWEEPS]
SEQ_LEN = 1024
MODULES = (chunk_h, chunk_o, fused_chunk, gates, normaliser, step)


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    # What the launchers check is that a kernel could run here; it only has to be recorded.
    monkeypatch.setattr(engine, "check_kernel_support", lambda *_, **__: None)


def record(
    op: str,
    implementation: str,
    capability: int,
    head_dims: tuple[int, int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    chunk_size: int = 256,
    carry: bool = False,
    monkeypatch: pytest.MonkeyPatch,
) -> list[Launch]:
    """Return the launches of a forward and backward pass; ``carry`` takes an initial state and returns the last."""
    monkeypatch.setattr(launch, "capability", lambda device: divmod(capability, 10))
    operation = get_operation(op)
    sizes = {"batch": 1, "seq_len": SEQ_LEN, "num_heads": 2, "head_dim_qk": head_dims[0], "head_dim_v": head_dims[1]}
    inputs = resolve(operation.inputs)(sizes, dtype=dtype, device="cpu", seed=0)
    for tensor in inputs.values():
        tensor.requires_grad_(tensor.is_floating_point())
    run = operation.function(implementation)
    options: dict[str, Any] = {"chunk_size": chunk_size, "state_dtype": state_dtype}
    if carry:
        options |= {"initial_state": initial_state(op, head_dims), "return_last_state": True}
    with record_launches(launch) as launches:
        result = run(*inputs.values(), **options)
        outputs = list(flatten(result))
        torch.autograd.backward(
            [x for x in outputs if x.requires_grad], [torch.zeros_like(x) for x in outputs if x.requires_grad]
        )
    return launches


def initial_state(op: str, head_dims: tuple[int, int]) -> Any:
    k, v = head_dims
    c = torch.zeros(1, 2, k, v, requires_grad=True)
    return (c, torch.zeros(1, 2, k, requires_grad=True), torch.zeros(1, 2)) if op == "mlstm_exp" else c


def flatten(result: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested tuples."""
    if isinstance(result, torch.Tensor):
        yield result
    else:
        for part in result:
            yield from flatten(part)


@pytest.mark.parametrize(("op", "head_dims"), WALKS, ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_walk(capability: int, op: str, head_dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The default scheme at its default chunk length: the whole sequence."""
    launches = record(op, "fused_chunk", capability, head_dims, chunk_size=SEQ_LEN, monkeypatch=monkeypatch)
    check(launches, capability, max_stack_bytes=MAX_STACK_BYTES if head_dims in TUNED_HEAD_DIMS else None)


@pytest.mark.parametrize(("op", "head_dims"), WALKS_WITH_STATE, ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_walk_with_state(capability: int, op: str, head_dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, an initial state and a last one."""
    launches = record(op, "fused_chunk", capability, head_dims, carry=True, monkeypatch=monkeypatch)
    check(launches, capability, max_stack_bytes=MAX_STACK_BYTES if head_dims in TUNED_HEAD_DIMS else None)


@pytest.mark.parametrize(("op", "implementation", "chunk_size"), SWEEPS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_sweep(capability: int, op: str, implementation: str, chunk_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record(op, implementation, capability, (128, 256), chunk_size=chunk_size, monkeypatch=monkeypatch)
    check(launches, capability, max_stack_bytes=None)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_other_gates(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations differ in their gate kernels; the products are mLSTM's, without an input gate at most."""
    for op in FAMILIES["tfla"]:
        launches = record(op, "fused_chunk", capability, (64, 64), monkeypatch=monkeypatch)
        gate_launches = [launch for launch in launches if launch.kernel.__name__.startswith("gates_")]
        check(gate_launches, capability, max_stack_bytes=0)


@pytest.mark.parametrize("op", FAMILIES["tfla"])
def test_step(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = get_operation(op)
    sizes = {"batch": 1, "seq_len": 1, "num_heads": 2, "head_dim_qk": 128, "head_dim_v": 256}
    inputs = resolve(operation.inputs)(sizes, dtype=torch.bfloat16, device="cpu", seed=0)
    run = resolve(operation.implementation("fused_chunk").step_call)
    with record_launches(launch) as launches, torch.no_grad():
        run(*inputs.values())
        run(*inputs.values(), initial_state=initial_state(op, (128, 256)), return_last_state=True)
    assert {launch.kernel.__name__ for launch in launches} == {"step_kernel"}
    for capability in CAPABILITIES:
        check(launches, capability, max_stack_bytes=0)


def test_every_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder sees every kernel of the engine, so one that is added is compiled too."""
    kernels = kernels_of(*MODULES)
    recorded = {"step_kernel"}
    for implementation in ("fused_chunk", "xl_chunk"):
        launches = record("mlstm_exp", implementation, 90, (64, 64), carry=True, monkeypatch=monkeypatch)
        recorded |= {launch.kernel.__name__ for launch in launches}
    assert recorded == kernels


@pytest.mark.slow
@pytest.mark.parametrize("head_dims", [*HEAD_DIMS, (16, 16), (96, 192), (512, 1024), (1024, 72)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", ["fused_chunk", "xl_chunk", "limit_chunk"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_full_product(
    capability: int,
    implementation: str,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for op in FAMILIES["tfla"]:
        for state_dtype in (torch.float32, torch.bfloat16):
            launches = record(
                op, implementation, capability, head_dims, dtype=dtype, state_dtype=state_dtype,
                chunk_size=64 if implementation == "limit_chunk" else 256, carry=True, monkeypatch=monkeypatch,
            )  # fmt: skip
            check(launches, capability, max_stack_bytes=None)
