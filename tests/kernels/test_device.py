"""Kernels run on the device of their inputs, whichever is current, and inputs of two devices are refused.

Without GPUs, launches are recorded and devices pretended; with two of them results are held to the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from lrbench.bench.plan import PlannedCase
from lrbench.bench.worker import correctness
from lrbench.bench.worker.worker import prepare
from lrbench.kernels import Implementation, Operation, get_operation
from lrbench.kernels.common.device import memory_rate
from lrbench.kernels.common.differentiable import on_device_of
from lrbench.kernels.common.remember import RememberedKernel
from lrbench.kernels.common.spec import resolve
from lrbench.results.schema import Case
from lrbench.tests.kernels import laws
from lrbench.tests.kernels.compiling import IMPLEMENTATIONS, MODULES, pretend, record
from lrbench.tests.kernels.offline import Recorder, record_launches

KERNELS = {value.kernel for module in MODULES for value in vars(module).values() if isinstance(value, RememberedKernel)}
each_implementation = pytest.mark.parametrize(
    ("operation", "implementation"), IMPLEMENTATIONS, ids=lambda value: value.name
)
SIZES = {
    "batch": 2, "seq_len": 300, "num_heads": 2, "head_dim_qk": 64, "head_dim_v": 64, "channels": 64, "d_model": 64,
    "d_ff": 128,
}  # fmt: skip
CHUNK_SIZE = 64


def cases_of(operation: Operation, implementation: Implementation) -> list[laws.Case]:
    """Return a case of several chunks, and one of a decoding step where there is one; of WKV's scan a wide one too, and
    of operations over channels one of packed documents, which take a kernel of their own."""
    sizes = {name: SIZES[name] for name in operation.sizes}
    kwargs = {"chunk_size": CHUNK_SIZE} if implementation.chunked else {}
    layout = "columns" if implementation.prepare else None
    names = {"op": operation.name, "impl": implementation.name}
    case = laws.Case(**names, dtype=torch.bfloat16, sizes=sizes, layout=layout, kwargs=kwargs)
    step = replace(case, impl="step", sizes={**sizes, "seq_len": 1}, kwargs={})
    wide = [replace(case, sizes={**sizes, "channels": 2048})] if case.op == "wkv4" and case.impl == "scan" else []
    cases = [case, *wide] if "fw" in implementation.modes else []
    if operation.channelwise:
        bounds = torch.tensor([0, SIZES["seq_len"]])
        cases.append(replace(case, sizes={**sizes, "batch": 1}, options={"cu_seqlens": bounds}))
    return [*cases, step] if "step" in implementation.modes else cases


class Launches(list[tuple[Any, int]]):
    """Kernels in the order of their launches, each with the device that was current."""

    current = 0

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        """Stand in for torch.cuda.device."""
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Pretend that every tensor lies on the second of two GPUs while the first is current, and record launches."""
    pretend(monkeypatch)
    seen = Launches()
    monkeypatch.setattr(torch.cuda, "device", seen.device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: seen.current)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(Tensor, "get_device", lambda self: 1)
    monkeypatch.setattr(Recorder, "__call__", lambda self, *_, **__: seen.append((self.kernel, seen.current)))
    with record_launches(*MODULES):
        yield seen
    assert seen.current == 0


def run(operation: Operation, implementation: Implementation) -> None:
    """Run forward and, where there is one, backward, and a decoding step, with and without a state."""
    for case in cases_of(operation, implementation):
        for carry in (False, True):
            record(case, training="fwbw" in implementation.modes, carry=carry)


@pytest.mark.compile
@each_implementation
def test_kernels_run_where_their_inputs_are(
    operation: Operation, implementation: Implementation, launches: Launches
) -> None:
    run(operation, implementation)
    assert launches
    assert [kernel.__name__ for kernel, device in launches if device != 1] == []


@pytest.mark.compile
def test_every_kernel_is_launched_by_an_implementation(launches: Launches) -> None:
    """The test above launches every kernel there is; one that is added needs an implementation that launches it."""
    for operation, implementation in IMPLEMENTATIONS:
        run(operation, implementation)
    missed = {kernel for kernel in KERNELS if kernel not in [launched for launched, _ in launches]}
    assert KERNELS
    assert [kernel.__name__ for kernel in missed] == []


@pytest.mark.compile
def test_a_pass_that_fails_leaves_the_current_device(launches: Launches) -> None:
    """One on the CPU runs on the current device as it is."""

    def fail() -> None:
        raise RuntimeError(f"failed on {launches.current}")

    with pytest.raises(RuntimeError, match="failed on 1"):
        on_device_of(torch.zeros(1), fail)
    assert launches.current == 0
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="failed on 0"):
        patch.setattr(Tensor, "is_cuda", False)
        on_device_of(torch.zeros(1), fail)


@pytest.mark.compile
def test_the_current_device_is_not_set_again(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", None)
    with launches.device(1):
        assert on_device_of(torch.zeros(1), lambda: launches.current) == 1


def test_memory_transfers_twice_a_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100's driver says 2.619 GHz and 5,120 bits."""
    properties = {"mem_clock_rate": 2_619_000, "mem_bus_width": 5120}
    utils = SimpleNamespace(get_device_properties=lambda index: properties if index == 1 else {})
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    assert memory_rate.__wrapped__(torch.device("cuda:1")) == pytest.approx(3.352e12, rel=1e-3)
    assert memory_rate(torch.device("cpu")) == 0


@pytest.mark.compile
@each_implementation
def test_inputs_of_two_devices_are_refused(
    operation: Operation, implementation: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One input after the other is put on another device. The error names it, but if it is the first, another one: the
    others are compared with the first."""
    pretend(monkeypatch)
    for case in cases_of(operation, implementation):
        problem, function = case.draw(), case.function
        inputs, state = problem.inputs, problem.state or ()
        first, *others = inputs
        for name in others:
            with pytest.raises(ValueError, match=f"^{name} must be .*on cpu, got .*meta"):
                function(*{**inputs, name: inputs[name].to("meta")}.values())
        with pytest.raises(ValueError, match=r"^\w+ must be .*on meta, got .*cpu"):
            function(*{**inputs, first: inputs[first].to("meta")}.values())
        for index in range(len(state)):
            moved = [part.to("meta") if n == index else part for n, part in enumerate(state)]
            with pytest.raises(ValueError, match=r"^initial_state ?\w* must be on cpu, got meta"):
                function(*inputs.values(), initial_state=laws.public_state(moved))


def check_against_reference(operation: Operation, implementation: Implementation, case: Case, device: str) -> None:
    """Hold the output and every gradient, and a decoding step's output, to the definition in float64."""
    inputs = correctness.Inputs(device).get(operation, case)
    expected = correctness.References().get(operation, case, inputs, portable=False)
    runnable = prepare(PlannedCase(case=case, target=implementation), inputs).runnable
    out = runnable.forward()
    gradients = correctness.differentiate(out, runnable.leaves, expected.grad_out) if case.mode == "fwbw" else {}
    verdict = correctness.compare({"out": out.detach(), **gradients}, expected, case.state_dtype)
    assert verdict.failure is None
    if "step" in implementation.modes:
        case = replace(case, mode="step", seq_len=1, chunk_size=None)
        inputs = correctness.Inputs(device).get(operation, case)
        state = correctness.state_before_step(operation, case, device)
        expected = correctness.expect_step(operation, case, inputs, state)
        out = prepare(PlannedCase(case=case, target=implementation), inputs, state).runnable.forward()
        assert correctness.compare({"out": out}, expected, case.state_dtype).failure is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("operation", "implementation"),
    [each for each in IMPLEMENTATIONS if "fw" in each[1].modes],
    ids=lambda value: value.name,
)
def test_matches_reference_beside_the_current_device_on_gpu(
    operation: Operation, implementation: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where devices reach each other's memory a launch on the wrong one may go well, so devices are held too."""
    if (count := torch.cuda.device_count()) < 2:
        pytest.skip(f"needs two CUDA devices: torch {torch.__version__} sees {count}")
    driver, used = triton.runtime.driver.active, []
    current_device = driver.get_current_device
    monkeypatch.setattr(driver, "get_current_device", lambda: used.append(current_device()) or used[-1])
    sizes = {name: SIZES[name] for name in operation.sizes}
    names = {"kernel": operation.kernel, "op": operation.name, "impl": implementation.name, "provider": "lrbench"}
    chunk_size = CHUNK_SIZE if implementation.chunked else None
    mode = "fwbw" if "fwbw" in implementation.modes else "fw"
    case = Case(**names, mode=mode, dtype="bf16", chunk_size=chunk_size, **sizes)
    with torch.cuda.device(0):
        check_against_reference(operation, implementation, case, "cuda:1")
        assert torch.cuda.current_device() == 0
    assert set(used) == {1}


@pytest.mark.parametrize("op", ["mlstm_sig", "lightning", "rglru", "wkv4"])
def test_a_transform_is_named_before_the_device(op: str) -> None:
    """Its tensors would be refused on any device: to name the CPU would send its user to a GPU in vain."""
    operation = get_operation(op)
    inputs = operation.make_inputs({name: SIZES[name] for name in operation.sizes}, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="use a batch dimension instead of vmap"):
        torch.vmap(resolve(operation.call))(*(x[None] for x in inputs.values()))
