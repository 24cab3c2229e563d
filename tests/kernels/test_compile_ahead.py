"""What a sweep compiles ahead is all that its cases launch: nothing is left to compile while cases are measured."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lrbench.bench.check import DTYPES
from lrbench.bench.plan import PlannedCase, Request, plan
from lrbench.bench.sweep import compile_cases, refuse_ours
from lrbench.kernels import get_operation, resolve
from lrbench.kernels.common.offline import record_launches
from lrbench.kernels.diagonal import engine as diagonal
from lrbench.kernels.lightning import lightning1, lightning2, tiles, validate
from lrbench.kernels.scalar_decay import engine, front
from lrbench.kernels.spec import Implementation
from lrbench.kernels.wkv4 import scan as wkv
from lrbench.tests.kernels.compiling import require_compiler

pytestmark = pytest.mark.compile

LAUNCHERS = (wkv, diagonal, engine, lightning1, lightning2)


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    for module in LAUNCHERS:
        monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    monkeypatch.setattr(tiles, "DESCRIPTOR_ALIGNMENT", 1)
    # What the launchers check is that a kernel could run here; it only has to be recorded.
    monkeypatch.setattr(front, "_check_support", lambda *_, **__: None)
    for module in (wkv, diagonal, validate):
        monkeypatch.setattr(module, "check_kernel_support", lambda *_: None)


def compile_keys(item: PlannedCase) -> set[tuple[Any, ...]]:
    """Return what compiling the launches of a case depends on; its tensors have shapes but no memory."""
    case, target = item.case, item.target
    assert isinstance(target, Implementation)
    operation = get_operation(case.op)
    assert case.batch is not None and case.seq_len is not None
    # Inputs that differ in nothing but batch and length, whose places a shape with distinct ones shows.
    given = resolve(operation.inputs)(
        {**case.sizes, "batch": 3, "seq_len": 5}, dtype=DTYPES[case.dtype], device="cpu", seed=0
    )
    options: dict[str, Any] = {"state_dtype": DTYPES[case.state_dtype or "fp32"]}
    if target.chunked and case.chunk_size is not None:
        options["chunk_size"] = case.chunk_size
    with FakeTensorMode(), contextlib.ExitStack() as stack:
        inputs = {}
        for name, x in given.items():
            shape = (case.batch, case.seq_len, *x.shape[2:]) if x.shape[:2] == (3, 5) else x.shape
            inputs[name] = torch.empty(shape, dtype=x.dtype, requires_grad=name in operation.differentiable)
        recorded = [stack.enter_context(record_launches(module)) for module in LAUNCHERS]
        with torch.set_grad_enabled(case.mode != "fw"):
            y = resolve(target.call)(*inputs.values(), **options)
        if case.mode != "fw":
            torch.autograd.grad(y, [inputs[name] for name in operation.differentiable], torch.empty_like(y))
    return {launch.compile_key() for launches in recorded for launch in launches}


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(Request(kernel="wkv", preset="default"), id="wkv"),
        pytest.param(Request(kernel="wkv", impls=("scan",), seq_lens=(128, 65536)), id="wkv-ends"),
        pytest.param(Request(kernel="wkv", preset="micro256", impls=("scan", "recurrent")), id="wkv-micro256"),
        pytest.param(Request(kernel="rglru", preset="default", ops=("rglru", "linear_scan")), id="rglru"),
        pytest.param(Request(kernel="lightning", preset="default", head_dims=(128,)), id="lightning"),
        pytest.param(Request(kernel="tfla", preset="default", head_dims=(128,)), id="tfla"),
        pytest.param(
            Request(kernel="tfla", preset="default", head_dims=(256,), impls=("tfla", "limit_chunk")),
            id="tfla-wide",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_everything_is_compiled_ahead(request_: Request) -> None:
    planned = [
        item
        for item in plan(request_, device_kind="cuda")
        if isinstance(item.target, Implementation)
        and "triton" in item.target.requires
        and refuse_ours(item.target, item.case.mode, item.case.dtype, item.case.state_dtype, item.case.sizes) is None
    ]
    keys = {item.case: compile_keys(item) for item in planned}
    ahead = set().union(*(keys.get(item.case) or compile_keys(item) for item in compile_cases(planned)))
    late = {
        f"{key[0]} of {case.impl}, {case.mode}, T = {case.seq_len}, batch {case.batch}, chunk {case.chunk_size}"
        for case, wanted in keys.items()
        for key in wanted - ahead
    }
    assert ahead
    assert not late, "\n".join(sorted(late))
