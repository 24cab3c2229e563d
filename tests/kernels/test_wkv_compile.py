"""Compile every launch of WKV's kernels for sm_80, sm_90 and sm_100, without a GPU, and hold what it costs."""

from __future__ import annotations

import pytest
import torch

from lrbench.kernels import resolve
from lrbench.kernels.common.offline import Launch, compile_kernel, record_launches
from lrbench.kernels.wkv import OPERATION, backward, forward
from lrbench.kernels.wkv import launch as launcher
from lrbench.tests.kernels.compiling import CAPABILITIES, check, kernels_of, require_compiler

pytestmark = pytest.mark.compile

WIDE, NARROW = {"batch": 8, "seq_len": 512, "channels": 768}, {"batch": 1, "seq_len": 512, "channels": 32}
SLOW_CASES = [
    (name, sizes, dtype)
    for name in ("scan", "naive")
    for sizes in ((WIDE, NARROW) if name == "scan" else (WIDE,))
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    if (name, sizes, dtype) != ("scan", WIDE, torch.bfloat16)
]


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    # What the launchers check is that a kernel could run here; it only has to be recorded.
    monkeypatch.setattr(launcher, "check_kernel_support", lambda *_: None)


def record(
    name: str, capability: int, sizes: dict[str, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> list[Launch]:
    """Return the launches of a forward and backward pass with an initial state and a last one."""
    monkeypatch.setattr(launcher, "capability", lambda device: divmod(capability, 10))
    inputs = resolve(OPERATION.inputs)(sizes, dtype=dtype, device="cpu", seed=0)
    for tensor in inputs.values():
        tensor.requires_grad_()
    shape = (sizes["batch"], sizes["channels"])
    state = tuple(torch.zeros(shape, requires_grad=True) for _ in range(3))
    with record_launches(launcher) as launches:
        y, last = OPERATION.function(OPERATION.implementation(name))(
            *inputs.values(), initial_state=state, return_last_state=True
        )
        results = (y, *last[:2])
        torch.autograd.backward(results, [torch.zeros_like(x) for x in results])
    return launches


def test_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that the bars are about."""
    check(record("scan", 90, WIDE, torch.bfloat16, monkeypatch), 90)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_inference(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a backward pass states pass from tile to tile, by 128 bits at once."""
    monkeypatch.setattr(launcher, "capability", lambda device: divmod(capability, 10))
    inputs = resolve(OPERATION.inputs)(WIDE, dtype=torch.bfloat16, device="cpu", seed=0)
    with record_launches(launcher) as launches, torch.no_grad():
        OPERATION.function(OPERATION.implementation("scan"))(*inputs.values())
    (launch,) = launches
    assert launch.arguments["PASS"] and launch.arguments["KEEP"] == "tokens"
    check(launches, capability)
    ptx = compile_kernel(launch, capability).asm["ptx"]
    pack = launch.arguments["PASS"].pack
    assert ptx.count("ld.relaxed.gpu.global.b128") == ptx.count("st.relaxed.gpu.global.b128") == pack


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 100])
def test_scan_elsewhere(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(record("scan", capability, WIDE, torch.bfloat16, monkeypatch), capability)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes", "dtype"), SLOW_CASES, ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_full_product(
    capability: int, name: str, sizes: dict[str, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(record(name, capability, sizes, dtype, monkeypatch), capability)


def test_step() -> None:
    sizes = {"batch": 2, "seq_len": 1, "channels": 768}
    with record_launches(launcher) as launches, torch.no_grad():
        inputs = resolve(OPERATION.inputs)(sizes, dtype=torch.bfloat16, device="cpu", seed=0)
        run = resolve(OPERATION.implementation("scan").step_call or "")
        run(*inputs.values())
        run(*inputs.values(), initial_state=(torch.zeros(2, 768),) * 3, return_last_state=True)
    assert len(launches) == 2
    check(launches, 90)


def test_every_kernel_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder sees every kernel, so one that is added is compiled too."""
    kernels = kernels_of(backward, forward)
    recorded = {"step_kernel"}
    for name in ("scan", "naive"):
        launches = record(name, 90, WIDE, torch.bfloat16, monkeypatch)
        recorded |= {launch.kernel.__name__ for launch in launches}
    assert recorded == kernels
