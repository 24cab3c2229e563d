"""Compile every launch of Lightning's kernels for sm_80, sm_90 and sm_100, without a GPU, and hold what it costs."""

from __future__ import annotations

import pytest
import torch

from lrbench.kernels import resolve
from lrbench.kernels.common.offline import Launch, compile_kernel, record_launches
from lrbench.kernels.lightning import OPERATION, lightning1, lightning2, validate
from lrbench.tests.kernels.compiling import CAPABILITIES, MAX_STACK_BYTES, check, require_compiler

pytestmark = pytest.mark.compile

MODULES = {"lightning1": lightning1, "lightning2": lightning2}
FULL, FEW = 8, 1
"""Batches of 64 heads: enough of them to fill a device, and so few that lightning2's programs take fewer columns."""
SLOW_CASES = [
    (name, head_dims, dtype, batch)
    for name in MODULES
    for head_dims in ((64, 64), (128, 128), (128, 256), (256, 256), (256, 64), (24, 40), (16, 16), (200, 72))
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for batch in ((FULL, FEW) if name == "lightning2" else (FULL,))
]


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    # What the launchers check is that a kernel could run here; it only has to be recorded.
    monkeypatch.setattr(validate, "check_kernel_support", lambda q, v: None)


def record(
    name: str,
    capability: int,
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    batch: int,
    *,
    carry: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> list[Launch]:
    """Return the launches of a forward and backward pass; ``carry`` takes an initial state and returns the last."""
    monkeypatch.setattr(MODULES[name], "capability", lambda device: divmod(capability, 10))
    heads = 64
    sizes = {"batch": batch, "seq_len": 1, "num_heads": heads, "head_dim_qk": head_dims[0], "head_dim_v": head_dims[1]}
    inputs = resolve(OPERATION.inputs)(sizes, dtype=dtype, device="cpu", seed=0)
    for argument in OPERATION.differentiable:
        inputs[argument].requires_grad_()
    state = torch.zeros(batch, heads, *head_dims, requires_grad=True) if carry else None
    with record_launches(MODULES[name]) as launches:
        result = OPERATION.function(name)(*inputs.values(), initial_state=state, return_last_state=carry)
        outputs = result if carry else (result,)
        torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])
    return launches


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_lightning2(capability: int, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes that the bars are about, with the states that take more registers."""
    launches = record(
        "lightning2", capability, (head_dim, head_dim), torch.bfloat16, FULL, carry=True, monkeypatch=monkeypatch
    )
    check(launches, capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_lightning1(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record("lightning1", capability, (128, 128), torch.bfloat16, FULL, carry=False, monkeypatch=monkeypatch)
    check(launches, capability)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_need_no_memory_of_their_own(capability: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass allocates outputs and gradients alone, where tiles travel by descriptors (sm_90 on) and where not."""
    launches = record(name, capability, (64, 64), torch.bfloat16, FULL, carry=False, monkeypatch=monkeypatch)
    for launch in launches:
        compiled = compile_kernel(launch, capability)
        assert compiled.metadata.global_scratch_size == 0
        text = compiled.asm["ttgir"]
        assert ("async_tma_copy_global_to_local" in text) == (capability >= 90)
        assert ("async_tma_copy_local_to_global" in text) == (capability >= 90)
        assert ("warp_group_dot " in text) == (capability == 90)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "head_dims", "dtype", "batch"), SLOW_CASES, ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_full_product(
    capability: int,
    name: str,
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    batch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A float32 product holds its operands in registers, and so no state of 256 rows besides.
    limit = None if dtype == torch.float32 and max(head_dims) > 128 else MAX_STACK_BYTES
    for carry in (False, True):
        launches = record(name, capability, head_dims, dtype, batch, carry=carry, monkeypatch=monkeypatch)
        check(launches, capability, max_stack_bytes=limit)


def test_every_kernel_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder sees every kernel, so one that is added is compiled too."""
    for name, module in MODULES.items():
        launches = record(name, 90, (64, 64), torch.bfloat16, FULL, carry=True, monkeypatch=monkeypatch)
        kernels = {kernel for kernel in vars(module) if kernel.endswith("_kernel")}
        assert {launch.kernel.__name__ for launch in launches} == kernels
