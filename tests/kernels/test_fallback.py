"""A call that names no implementation says, once, that it takes a slower one for want of another Triton."""

from __future__ import annotations

import threading
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode

from lrbench.kernels import get_operation
from lrbench.kernels.common import arguments, device
from lrbench.kernels.lightning import lightning
from lrbench.kernels.mlstm_sig import mlstm_sig
from lrbench.kernels.scalar_decay import engine
from lrbench.kernels.scalar_decay.declare import WHOLE_STATE_FORM
from lrbench.tests.command_line import run_python

FORM = replace(WHOLE_STATE_FORM, triton_versions=">=3.6,<3.9")
HOPPER = ((9, 0), torch.bfloat16, 64)
Told = list[tuple[str, type]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What is warned of, which takes its time, where whole_state is written for Triton before 3.9."""
    told = []

    def tell(message: object, category: type, **_: Any) -> None:
        time.sleep(0.2)
        told.append((str(message), category))

    monkeypatch.setattr(engine, "WHOLE_STATE_FORM", FORM)
    monkeypatch.setattr(arguments, "_warn", cache(arguments._warn.__wrapped__))
    monkeypatch.setattr(warnings, "warn", tell)
    return told


def pretend(patch: pytest.MonkeyPatch, version: str, capability: tuple[int, int]) -> None:
    """Let calls find this Triton and GPU, and remember nothing of another."""
    patch.setattr(triton, "__version__", version)
    patch.setattr(device, "capability", lambda _: capability)
    patch.setattr(engine, "_why_not_whole_state", arguments.constant(engine._why_not_whole_state.__wrapped__))


class Chosen(Exception):
    """Raised in place of a launch."""


def choices(patch: pytest.MonkeyPatch, version: str, *cases: tuple[tuple[int, int], torch.dtype, int]) -> set[str]:
    """Return what calls in four threads choose with this Triton, for each (GPU, dtype, head dim)."""
    chosen = set()

    def choose(impl: str, *_: Any, **__: Any) -> None:
        chosen.add(impl)
        raise Chosen

    def call(operation: Any, q: Any, *gates: Any) -> None:
        for chunk_size in (None, 64, 128):
            with suppress(Chosen):
                operation(q, q, q, *gates, chunk_size=chunk_size)

    patch.setattr(engine, "check_kernel_support", choose)
    for capability, dtype, dim in cases:
        pretend(patch, version, capability)
        with FakeTensorMode():
            q = torch.empty(1, 128, 2, dim, device="cuda", dtype=dtype)
            gate, slope = torch.empty(1, 128, 2, device="cuda"), torch.empty(2, device="cuda")
        calls = [(mlstm_sig, q, gate, gate), (lightning, q, slope)] * 2
        threads = [threading.Thread(target=call, args=each) for each in calls]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    return chosen


def test_one_warning_for_several_operations_and_threads(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = (
        "impl=None takes fused_chunk in place of whole_state, which is faster: "
        "whole_state is written for triton >=3.6,<3.9, got 3.9.0: pip install 'triton>=3.6,<3.9'"
    )
    assert choices(monkeypatch, "3.9.0", HOPPER) == {"fused_chunk"}
    assert told == [(sentence, RuntimeWarning)]


def test_no_warning_where_the_version_is_not_the_reason(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    half = torch.bfloat16
    others = [((9, 0), half, 16), ((9, 0), torch.float32, 72), ((8, 0), half, 80), ((10, 0), half, 88)]
    assert choices(monkeypatch, "3.9.0", *others) == {"fused_chunk"}
    assert choices(monkeypatch, "3.8.0", HOPPER) == {"whole_state"}
    assert told == []


def test_a_traced_call_warns_and_stays_one_graph(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "3.9.0", (9, 0))

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        reason = engine._why_not_whole_state(torch.bfloat16, torch.device("cuda"), 64, 64, None, False)
        return x if reason is None else x + 1

    assert [compiled(torch.zeros(1)).item(), compiled(torch.zeros(2))[0].item()] == [1.0, 1.0]
    assert len(told) == 1


def test_a_declaration_says_what_to_install() -> None:
    assert FORM.why_not_with({"triton": "3.8.1"}) is FORM.why_slower_with({"triton": "3.8.1"}) is None
    assert FORM.why_not_with({}) == ("whole_state needs triton, which is not installed: pip install 'triton>=3.6,<3.9'")
    # A call raises then.
    assert FORM.why_slower_with({}) is None
    xl_chunk = get_operation("mlstm_sig").implementation("xl_chunk")
    assert xl_chunk.why_not_with({"triton": "2.0"}) is xl_chunk.why_slower_with({"triton": "2.0"}) is None
    assert xl_chunk.why_not_with({}) == "xl_chunk needs triton, which is not installed: pip install triton"


def test_an_operation_knows_where_its_faster_form_would_run() -> None:
    operation, old = get_operation("mlstm_exp"), {"triton": "3.5.0"}
    sizes = {"batch": 1, "seq_len": 64, "num_heads": 1, "head_dim_qk": 64, "head_dim_v": 64}
    assert operation.why_slower("fw", "bf16", sizes, "9.0", old) == WHOLE_STATE_FORM.why_slower_with(old)
    for mode, dtype, dim, capability in (
        ("step", "bf16", 64, "9.0"), ("fw", "fp32", 64, "9.0"), ("fw", "bf16", 16, "9.0"), ("fw", "bf16", 64, "8.0"),
        ("fw", "bf16", 64, None),
    ):  # fmt: skip
        small = {**sizes, "head_dim_qk": dim, "head_dim_v": dim}
        assert operation.why_slower(mode, dtype, small, capability, old) is None
    assert get_operation("wkv4").why_slower("fw", "bf16", {"channels": 64}, "9.0", old) is None


def test_a_call_without_triton_says_what_to_install() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
from lrbench.kernels.mlstm_sig import mlstm_sig
q, gate = torch.zeros(1, 16, 1, 16), torch.zeros(1, 16, 1)
try:
    mlstm_sig(q, q, q, gate, gate)
except ModuleNotFoundError as error:
    print(error.name, error)
"""
    expected = 'triton the kernels need triton, which is not installed: pip install triton, or take impl="torch"\n'
    assert run_python(code) == expected
