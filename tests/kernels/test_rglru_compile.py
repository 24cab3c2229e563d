"""Compile every launch of the diagonal engine for sm_80, sm_90 and sm_100, without a GPU, and hold what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lrbench.kernels import resolve
from lrbench.kernels.common.offline import Launch, compile_kernel, read_instructions, record_launches
from lrbench.kernels.rglru import LINEAR_SCAN, RGLRU, backward, forward, reduce
from lrbench.kernels.rglru import launch as launcher
from lrbench.kernels.spec import Operation
from lrbench.tests.kernels.compiling import CAPABILITIES, check, kernels_of, require_compiler

pytestmark = pytest.mark.compile

FULL, FEW = {"batch": 8, "seq_len": 1024, "channels": 1024}, {"batch": 1, "seq_len": 1024, "channels": 2560}
"""Enough channels that states keep ahead of short tiles, and so few that the launcher takes longer ones."""
SLOW_CASES = [
    (operation, name, sizes, dtype)
    for operation, one_pass in ((RGLRU, "fused"), (LINEAR_SCAN, "scan"))
    for name in (one_pass, "chunked", "naive")
    for sizes in ((FULL, FEW) if name == one_pass else (FULL,))
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    if (operation.name, name, sizes, dtype) != ("rglru", "fused", FULL, torch.bfloat16)
]


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    # What the launchers check is that a kernel could run here; it only has to be recorded.
    monkeypatch.setattr(launcher, "check_kernel_support", lambda *_: None)


def record(
    operation: Operation,
    name: str,
    capability: int,
    sizes: dict[str, int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    *,
    training: bool = True,
) -> list[Launch]:
    """Return the launches of a forward and, training, backward pass with initial and last states and several chunks."""
    monkeypatch.setattr(launcher, "capability", lambda device: divmod(capability, 10))
    inputs = resolve(operation.inputs)(sizes, dtype=dtype, device="cpu", seed=0)
    for tensor in inputs.values():
        tensor.requires_grad_(training)
    state = torch.zeros(sizes["batch"], sizes["channels"], requires_grad=training)
    options: dict[str, Any] = {"chunk_size": 256} if name == "chunked" else {}
    with record_launches(launcher) as launches:
        results = operation.function(operation.implementation(name))(
            *inputs.values(), initial_state=state, return_last_state=True, **options
        )
        if training:
            torch.autograd.backward(results, [torch.zeros_like(x) for x in results])
    return launches


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_fused(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that the bars are about; 168 registers cost them a few words of stack."""
    check(record(RGLRU, "fused", capability, FULL, torch.bfloat16, monkeypatch), capability, max_stack_bytes=128)


@pytest.mark.parametrize(
    ("operation", "name", "ahead"), [(RGLRU, "fused", 3), (LINEAR_SCAN, "scan", 6)], ids=["rglru", "scan"]
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_one_long_sequence_forward(
    capability: int, operation: Operation, name: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a backward pass no states are kept: another kernel. It fetches inputs so many tiles of time ahead."""
    launches = record(operation, name, capability, FEW, torch.bfloat16, monkeypatch, training=False)
    assert [launch.arguments["ahead"] for launch in launches] == [ahead]
    check(launches, capability, max_stack_bytes=128)


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "name", "sizes", "dtype"), SLOW_CASES, ids=lambda v: getattr(v, "name", str(v)))
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_full_product(
    capability: int,
    operation: Operation,
    name: str,
    sizes: dict[str, int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(record(operation, name, capability, sizes, dtype, monkeypatch), capability, max_stack_bytes=128)


def test_step() -> None:
    sizes = {"batch": 2, "seq_len": 1, "channels": 1024}
    with record_launches(launcher) as launches, torch.no_grad():
        for operation, name in ((RGLRU, "fused"), (LINEAR_SCAN, "scan")):
            inputs = resolve(operation.inputs)(sizes, dtype=torch.bfloat16, device="cpu", seed=0)
            run = resolve(operation.implementation(name).step_call or "")
            run(*inputs.values())
            run(*inputs.values(), initial_state=torch.zeros(2, 1024), return_last_state=True)
    assert len(launches) == 4
    check(launches, 90)


def test_every_kernel_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder sees every kernel of the engine, so one that is added is compiled too."""
    kernels = kernels_of(backward, forward, reduce)
    recorded = {"step_kernel"}
    for name in ("fused", "chunked", "naive"):
        launches = record(RGLRU, name, 90, FULL, torch.bfloat16, monkeypatch)
        recorded |= {launch.kernel.__name__ for launch in launches}
    assert recorded == kernels


def test_elements_are_read_and_written_in_wide_accesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's access is four neighbouring channels or more, and x, r, i and h are each touched once."""
    launch = record(RGLRU, "fused", 90, FULL, torch.bfloat16, monkeypatch)[0]
    tile = launch.arguments["TILE"]
    per_thread = tile.channels
    assert per_thread >= 4
    ptx = compile_kernel(launch, 90).asm["ptx"]
    rows = tile.block_i
    assert ptx.count(f"ld.global.v{per_thread // 2}.b32") == 3 * rows
    assert ptx.count(f"st.global.v{per_thread // 2}.b32") == rows


@pytest.mark.parametrize("sizes", [FULL, FEW], ids=["full", "few"])
def test_one_pass_kernels_on_hopper(sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bars rest on, read from the machine code.

    All of a tile's loads are in flight before anything waits for one, a gate is evaluated once, and states are passed
    on two an access that goes by the L1, read in one place and written in one.
    """
    launches = record(RGLRU, "fused", 90, sizes, torch.bfloat16, monkeypatch)[:2]
    for launch, specials in zip(launches, (5, 7), strict=True):
        code = read_instructions(compile_kernel(launch, 90).asm["cubin"])
        name = launch.kernel.__name__
        loads = [n for n, line in enumerate(code) if "LDG.E.64 " in line]
        tensors = 4 if "gradient" in name else 3
        assert len(loads) == tensors * launch.arguments["TILE"].block_i, name
        between = code[loads[0] : loads[-1]]
        assert not [line for line in between if "MUFU.EX2" in line or "MUFU.RSQ" in line], name
        elements = launch.arguments["TILE"].block_i * launch.arguments["TILE"].channels
        assert sum("MUFU" in line for line in code) <= (specials + 0.6) * elements, name
        # Two words of 64 bits an access.
        for access in ("LDG.E.128.STRONG.GPU", "STG.E.128.STRONG.GPU"):
            assert sum(access in line for line in code) == launch.arguments["PASS"].pack // 2 > 0, name
        assert sum("STRONG" in line for line in code) == launch.arguments["PASS"].pack, name
