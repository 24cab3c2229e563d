"""What a sweep compiles ahead is all that its cases launch: nothing is left to compile while cases are measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lrbench.bench.drive.compile_ahead import compile_cases
from lrbench.bench.plan import PlannedCase, Request, plan
from lrbench.bench.worker.correctness import DTYPES
from lrbench.bench.worker.worker import prepare
from lrbench.kernels import get_operation
from lrbench.kernels.common.spec import Implementation
from lrbench.kernels.gated_mlp import fused as gated_mlp
from lrbench.tests.kernels.compiling import MODULES, pretend
from lrbench.tests.kernels.offline import record_launches

pytestmark = pytest.mark.compile

CAPABILITY = (9, 0)


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    monkeypatch.setattr(gated_mlp, "no_descriptor", lambda _: None)


def compile_keys(item: PlannedCase) -> set[tuple[Any, ...]]:
    """Return what compiling the launches of a case depends on; its tensors have shapes but no memory."""
    case, target = item.case, item.target
    assert isinstance(target, Implementation)
    operation = get_operation(case.op)
    other = item.config_of
    config = other and target.launches(other.mode, other.dtype, other.sizes, CAPABILITY)
    gradients = case.mode != "fw"
    with FakeTensorMode():
        given = operation.make_inputs(case.sizes, dtype=DTYPES[case.dtype])
        runnable = prepare(item, given, config=config).runnable
        with record_launches(*MODULES) as launches:
            with torch.set_grad_enabled(gradients):
                y = runnable.forward()
            if gradients:
                torch.autograd.grad(y, list(runnable.leaves.values()), torch.empty_like(y))
    return {launch.compile_key() for launch in launches}


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(Request(kernel="wkv", preset="default"), id="wkv"),
        pytest.param(Request(kernel="wkv", impls=("scan",), seq_lens=(128, 65536)), id="wkv-ends"),
        pytest.param(Request(kernel="wkv", preset="micro256", impls=("scan", "naive")), id="wkv-micro256"),
        pytest.param(Request(kernel="rglru", preset="default", ops=("rglru", "linear_scan")), id="rglru"),
        pytest.param(Request(kernel="lightning", preset="default", head_dims=(128,)), id="lightning"),
        pytest.param(Request(kernel="tfla", preset="default", head_dims=(128,)), id="fused_chunk"),
        pytest.param(Request(kernel="gated-mlp", preset="default"), id="gated-mlp"),
        pytest.param(
            Request(kernel="gated-mlp", preset="default", modes=("fw",), impls=("fused_save",)), id="gated-mlp-save"
        ),
        pytest.param(Request(kernel="gated-mlp", seq_lens=(16, 4096, 65536), d_models=(8192,)), id="gated-mlp-ends"),
        pytest.param(
            Request(kernel="tfla", preset="default", head_dims=(256,), impls=("fused_chunk", "limit_chunk")),
            id="tfla-wide",
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
        and item.target.why_unsupported(item.case.mode, item.case.dtype, item.case.state_dtype, item.case.sizes) is None
    ]
    keys = {item.case: compile_keys(item) for item in planned}
    ahead: set[tuple[Any, ...]] = set()
    for item in compile_cases(planned, "9.0"):
        known = None if item.config_of else keys.get(item.case)
        ahead |= known or compile_keys(item)
    late = {
        f"{key[0]} of {case.impl}, {case.mode}, T = {case.seq_len}, batch {case.batch}, chunk {case.chunk_size}"
        for case, wanted in keys.items()
        for key in wanted - ahead
    }
    assert ahead
    assert not late, "\n".join(sorted(late))
