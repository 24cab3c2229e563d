"""The worker's own decisions, in this process: references that do not fit, devices that are lost."""

from __future__ import annotations

import dataclasses
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lrbench.bench.plan import PlannedCase
from lrbench.bench.worker import correctness, worker
from lrbench.bench.worker.clock import CpuClock
from lrbench.bench.worker.protocol import RunLimits, encode_request
from lrbench.kernels import get_operation
from lrbench.kernels.baselines import get_baseline
from lrbench.kernels.gated_mlp.validate import is_k_major
from lrbench.tests.analysis import rows as made
from lrbench.tests.bench import faults


@pytest.mark.parametrize(("seq_len", "limit", "checked"), [(32, 1, "batch=1"), (4100, 2, "batch=2")])
def test_a_reference_that_does_not_fit_is_taken_at_a_smaller_shape(
    monkeypatch: pytest.MonkeyPatch, seq_len: int, limit: int, checked: str
) -> None:
    evaluate = correctness.evaluate
    asked: list[int] = []

    def limited(operation: Any, function: Any, inputs: Any, grad_out: Any, **keywords: Any) -> dict[str, torch.Tensor]:
        asked.append(inputs["q"].shape[0])
        if inputs["q"].shape[0] > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return evaluate(operation, function, inputs, grad_out, **keywords)

    monkeypatch.setattr(correctness, "evaluate", limited)
    columns = worker.Worker("cpu").verify(faults.planned("right", batch=4, seq_len=seq_len))
    assert asked[0] == 4
    assert columns["checked"] == checked


@pytest.mark.parametrize("fails", [False, True])
def test_what_compiles_keeps_no_memory(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    one = worker.Worker("cpu")
    if fails:
        monkeypatch.setattr(worker, "_timed_parts", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        assert one.compile(faults.planned("right")).keys() == {"compile_s"}
    assert not one.inputs._problems


def test_a_layout_of_its_own_is_made_outside_the_timed_region() -> None:
    """Weights reach the implementation as it keeps them, and only so: no byte more than without a layout of its own."""
    operation = get_operation("gated_mlp")
    plain = operation.implementation("torch")
    implementation = dataclasses.replace(plain, prepare="kernels.gated_mlp.reference:k_major_inputs")
    sizes = {"batch": 1, "seq_len": 4, "d_model": 8, "d_ff": 16}
    for mode in ("fw", "fwbw"):
        case = made.case("gated_mlp", "torch", mode=mode, dtype="fp32", **sizes)
        inputs = correctness.Inputs("cpu").get(operation, case)
        items = [PlannedCase(case=case, target=target) for target in (implementation, plain)]
        leaves = worker.prepare(items[0], inputs).runnable.leaves
        for name in ("w_up", "w_gate"):
            assert is_k_major(leaves[name]) and not is_k_major(inputs[name])
            assert torch.equal(leaves[name], inputs[name])
        columns, direct = (reply["columns"] for reply in worker.Worker("cpu").run(items, RunLimits(timeout_s=1.0)))
        assert columns["checked"] == "same shape"
        # With gradients one more tensor is there before the call: that of the output.
        assert columns["input_bytes"] == 4 * (4 * 8 + 2 * 8 * 16 + (4 * 16 if mode == "fwbw" else 0))
        assert columns["input_bytes"] == direct["input_bytes"]


def test_memory_that_is_not_torch_s_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX has an allocator of its own: torch's would say that it needs nothing."""
    item = faults.planned("right")
    here = worker.Worker("cpu")
    monkeypatch.setattr(here, "verify", lambda item: {})
    monkeypatch.setattr(here, "make_ready", lambda _: worker.Ready(call=len, prepare=tuple, inputs=[], compile_s=0.1))
    (reply,) = here.run(
        [dataclasses.replace(item, target=get_baseline("wkv4", "jax.associative_scan"))], RunLimits(timeout_s=1.0)
    )
    assert reply["status"] == "ok"
    assert reply["columns"]["time_ms"] > 0
    assert "peak_memory_bytes" not in reply["columns"]


@pytest.mark.parametrize("mode", ["fw", "fwbw", "bw"])
def test_the_host_s_time_is_a_column_where_calls_are_enqueued(mode: str) -> None:
    """Pretended here: a clock that says so makes the worker measure it, in every mode."""
    here = worker.Worker("cpu")
    here._clock = CpuClock()
    here._clock.enqueues = True
    start = time.perf_counter()
    (reply,) = here.run([faults.planned("right", mode=mode)], RunLimits(timeout_s=1.0))
    assert reply["status"] == "ok"
    # A call is enqueued several times: the median of them is less than half of what all takes, whatever else runs.
    assert 0 < reply["columns"]["host_ms"] < 500 * (time.perf_counter() - start)


def test_a_lost_device_ends_the_worker_after_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal access every later CUDA call fails, so the worker must not run another case."""
    ended: list[int] = []

    def end(code: int) -> None:
        ended.append(code)
        raise SystemExit(code)

    monkeypatch.setattr(worker, "_device_is_usable", lambda _: False)
    monkeypatch.setattr(worker.os, "_exit", end)
    requests = [encode_request([faults.planned("raises")], RunLimits(timeout_s=1.0))] * 2
    answers: list[dict[str, Any]] = []
    with pytest.raises(SystemExit):
        worker.serve(requests, answers.append)
    assert ended == [1]
    assert answers[0] == {"ready": True}
    assert len(answers) == 2
    assert (answers[1]["outcomes"][0]["status"], answers[1]["usable"]) == ("error", False)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), "oom", "CUDA out of memory"),
        (RuntimeError("CUDA error: out of memory"), "oom", "CUDA error: out of memory"),
        (MemoryError(), "oom", "MemoryError"),
        (ImportError("cannot import x", name="lrbench.kernels"), "error", "ImportError: cannot import x"),
        (ModuleNotFoundError("No module named 'fla'"), "unavailable", "import failed: No module named 'fla'"),
        (ImportError("failed to map segment from shared object"), "oom", "failed to map segment from shared object"),
        (ValueError("chunk_size must be a power of two"), "error", "ValueError: chunk_size must be a power of two"),
        (RuntimeError(""), "error", "RuntimeError: RuntimeError"),
        (worker.CaseFailure("incorrect", "output is wrong"), "incorrect", "output is wrong"),
    ],
)
def test_an_exception_has_a_status_and_a_reason(error: Exception, status: str, reason: str) -> None:
    assert worker.classify(error) == (status, reason)


@pytest.mark.compile
def test_launched_kernels_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by what Triton compiled and by its cubin, which may be the same."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, CompiledKernel

    from lrbench.tests.bench.gpu_faults import store_kernel

    # What it does beyond noting needs a GPU.
    monkeypatch.setattr(CompiledKernel, "launch_metadata", lambda self, *_: self.name)
    source = ASTSource(fn=store_kernel, signature={"x_ptr": "*fp32", "offset": "i64"}, constexprs={})
    # The second differs in what a kernel without a loop makes no use of.
    options = ({"num_stages": 2}, {"num_stages": 3}, {"num_warps": 8})
    first, same, other = (triton.compile(source, target=GPUTarget("cuda", 90, 32), options=each) for each in options)
    kernels: dict[str, str] = {}
    with worker._noted(kernels):
        assert [each.launch_metadata((1,), 0) for each in (first, same, first)] == ["store_kernel"] * 3
    other.launch_metadata((1,), 0)
    assert [*kernels] == [first.hash, same.hash]
    assert kernels[first.hash] == kernels[same.hash]
