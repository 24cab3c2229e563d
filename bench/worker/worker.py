"""The worker process: runs cases one after the other, each checked, then measured.

:mod:`.workers` starts it, in :mod:`.serve`. An exception inside a case becomes a typed status; the parent process
notices if this one dies.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...kernels import baselines, resolve
from ...kernels.baselines.spec import Baseline, Runnable
from ...kernels.common.inputs import bounds_of
from ...kernels.common.spec import Implementation, Operation
from ...results.schema import IMPORT_FAILED, Case
from ..environment import version_of
from ..plan import PlannedCase
from . import autotuning, clock, correctness, memory, models, sustained
from .protocol import CaseFailure, Reply, RunLimits, decode_request, not_measured

CHECKS = "first calls and checks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A case ready to be called: how, and the tensors that are there before the call."""

    runnable: Runnable
    inputs: list[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(clock.Call):
    """A case ready to be timed: its call, the tensors alive before it, and how long its first call took."""

    inputs: list[Tensor]
    compile_s: float


class Worker:
    """Runs cases on one device, and keeps what consecutive cases share: inputs, references and the clock."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.inputs = correctness.Inputs(device)
        self.references = correctness.References()
        self._clock: clock.Clock | None = None
        self._seconds: dict[str, float] = {}
        self._tunings: dict[str, autotuning.Tuning] = {}
        self._lapped = 0.0
        if device == "cuda":
            autotuning.compile_in_parallel()

    @property
    def clock(self) -> clock.Clock:
        """The device's clock, made when the first case is timed."""
        if self._clock is None:
            self._clock = clock.CudaClock() if self.device == "cuda" else clock.CpuClock()
        return self._clock

    def _lap(self, what: str | None = None) -> None:
        """Add the time since the last call to the seconds spent on ``what``; None: the time is not counted."""
        now = time.perf_counter()
        if what is not None:
            self._seconds[what] = self._seconds.get(what, 0.0) + now - self._lapped
        self._lapped = now

    def run(self, items: Sequence[PlannedCase], limits: RunLimits) -> list[Reply]:
        """Check cases, measure their memory, time them as ``limits`` says, and return their outcomes in order."""
        replies: list[Reply] = []
        ready: dict[int, Ready] = {}
        kernels: dict[str, str] = {}
        self._seconds.clear()
        self._lap()
        for n, item in enumerate(items):
            reply: Reply = {"status": "ok", "reason": None, "columns": {}}
            try:
                try:
                    with _noted(kernels) if limits.note_kernels else nullcontext():
                        reply["columns"] |= self.verify(item)
                except CaseFailure as failure:
                    spared = limits.time_incorrect_peers and item.case.provider != "lrbench"
                    if not spared or failure.status != "incorrect":
                        raise
                    reply |= {"status": failure.status, "reason": failure.reason}
                one = self.make_ready(item)
                reply["columns"]["compile_s"] = one.compile_s
                self._lap(CHECKS)
                if self.device == "cuda" and item.autotunes and (settled := autotuning.settle(one, self.clock)):
                    self._tunings[item.case.case_id], reply["columns"]["tuning"] = settled
                    one = self._tunings[item.case.case_id].before(one)
                    if reply["status"] == "ok":  # under this choice as well
                        reply["columns"] |= self.verify(item)
                    self._lap("peers' further tunings")
                if not isinstance(item.target, Baseline) or item.target.torch_memory:
                    use = memory.measure_memory(one.call, prepare=one.prepare, inputs=one.inputs)
                    reply["columns"] |= dataclasses.asdict(use)
                    self._lap("memory pass")
                ready[n] = one
            except Exception as error:  # noqa: BLE001, whatever an implementation raises becomes a row
                reply = failed(error)
            replies.append(reply)
        brief = all(item.case.mode == "train" for item in items)
        sampling = clock.Sampling(
            in_turn=len(ready) > 1,
            rounds=limits.rounds,
            budget_s=max(limits.budget_s, clock.BRIEF_BUDGET_S) if brief else limits.budget_s,
            ci_target=clock.CI_TARGET[self.device],
            settle=limits.settle,
            brief=brief,
        )
        if ready:
            for n, timing in zip(ready, clock.measure(self.clock, list(ready.values()), sampling), strict=True):
                if timing.failure is not None:
                    replies[n] = failed(timing.failure)
                else:
                    replies[n]["columns"] |= timing.columns() | {
                        name: getattr(timing, name) for name in ("host_ms", "noise", "yardstick_ms")
                    }
                    replies[n] |= {"page_faults": timing.page_faults, "in_turn": len(ready) > 1}
            self._lap("warm-up, timed kernels")
        replies[0] |= {"seconds": dict(self._seconds), "kernels": kernels}
        return replies

    def compile(self, item: PlannedCase) -> dict[str, Any]:
        """Call a case once, unchecked and untimed, so that compilers cache their results on disk."""
        other, config = item.config_of, None
        if other is not None and isinstance(item.target, Implementation):
            capability = torch.cuda.get_device_capability()
            config = item.target.launches(other.mode, other.dtype, other.sizes, capability)
        try:
            with autotuning.untimed():
                return {"compile_s": self.make_ready(item, config).compile_s}
        finally:
            # Other processes compile on this device too, and need its memory.
            self.release(everything=True)

    def sustain(self, item: PlannedCase) -> dict[str, Any]:
        """Return the columns of :class:`Sustained` of a case that was timed.

        Of a backward pass alone none on energy: the forward passes between take some too.
        """
        if lacking := sustained.why_not_here(self)["reason"]:
            raise RuntimeError(f"it needs {lacking}")
        ready = self.make_ready(item)
        if choice := self._tunings.get(item.case.case_id):
            ready = choice.before(ready)
        found = dataclasses.asdict(sustained.sustain(cast(clock.CudaClock, self.clock), ready))
        return found | (dict.fromkeys(("energy_j", "net_energy_j")) if item.case.mode == "bw" else {})

    def profile(self, item: PlannedCase) -> dict[str, Any]:
        """Call a case once between cudaProfilerStart and cudaProfilerStop, compiled, warm and unchecked.

        The range begins with a sleeping kernel, which separates the cases in a profiler's output.
        """
        ready = self.make_ready(item)
        ready.call(ready.prepare())
        argument = ready.prepare()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        try:
            torch.cuda._sleep(1)
            result = ready.call(argument)
            torch.cuda.synchronize()
        finally:
            torch.cuda.profiler.stop()
        del result
        return {}

    def verify(self, item: PlannedCase) -> dict[str, Any]:
        """Return the columns checked and rel_error; raise CaseFailure when a result is wrong.

        For a training step, the operation in its blocks is checked, at a small shape.
        """
        small, item = item.case.mode == "train", dataclasses.replace(item, case=item.case.of_operation)
        case, operation = item.case, baselines.get_operation(item.case.op)
        checked, state = case, ()
        if case.mode == "step":
            inputs = self.inputs.get(operation, case)
            state = correctness.state_before_step(operation, case, self.device)
            expected = correctness.expect_step(operation, case, inputs, state)
        else:
            checked, inputs, expected = self._expect(operation, item, small=small)
        prepared = prepare(dataclasses.replace(item, case=checked), inputs, state)
        with _poisoned(item.target, expected, correctness.DTYPES[checked.dtype]):
            results = _call_once(prepared.runnable, expected.grad_out if case.gradients else None)
        verdict = correctness.compare(results, expected, case.state_dtype, provider=case.provider)
        if verdict.failure:
            raise CaseFailure("incorrect", verdict.failure)
        return {"checked": correctness.describe_check(case, checked), "rel_error": verdict.rel_error}

    def _expect(
        self, operation: Operation, item: PlannedCase, *, small: bool = False
    ) -> tuple[Case, dict[str, Tensor], correctness.Expected]:
        """Return the case at the shape it is checked at, its inputs and the expected results.

        A reference that does not fit in memory is no fault of the implementation: the check then takes a smaller shape.
        """
        shapes = correctness.checked_cases(operation, item.case, self.device)
        if small:
            shapes = shapes[-1:]
        while True:
            checked, portable = shapes.pop(0)
            try:
                inputs = self.inputs.get(operation, checked)
                self._lap(CHECKS)
                expected = self.references.get(operation, checked, inputs, portable=portable, options=item.options)
                self._lap("references")
            except torch.OutOfMemoryError:
                if not shapes:
                    raise
            else:
                return checked, inputs, expected
            self.release(everything=True)

    def make_ready(self, item: PlannedCase, config: Any = None) -> Ready:
        """Return the case ready to be timed. It has been called once, so it is compiled.

        Args:
            config: launches of an implementation of ours; None leaves the choice to it.
        """
        case, operation = item.case, baselines.get_operation(item.case.op)
        if case.mode == "train":
            return self._make_step(item, operation)
        inputs = self.inputs.get(operation, case)
        state = correctness.state_before_step(operation, case, self.device) if case.mode == "step" else ()
        prepared = prepare(item, inputs, state, config)
        start = time.perf_counter()
        call, prepare_call = _timed_parts(prepared, case.mode)
        call(prepare_call())
        if self.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return Ready(call=call, prepare=prepare_call, inputs=prepared.inputs, compile_s=seconds)

    def _make_step(self, item: PlannedCase, operation: Operation) -> Ready:
        """Return a training step ready to be timed. It has been taken once, so the optimizer's state exists."""
        self.release(everything=True)
        one = {**item.case.sizes, "seq_len": 1}
        inputs = operation.make_inputs(one, dtype=correctness.DTYPES[item.case.dtype], device=self.device)
        step = models.TrainingStep(item.case, inputs, mixing(item, inputs))
        start = time.perf_counter()
        loss = float(step())
        if not math.isfinite(loss):
            raise CaseFailure("incorrect", f"the loss of a training step is {loss}")
        return Ready(call=lambda _: step(), inputs=step.tensors(), compile_s=time.perf_counter() - start)

    def release(self, *, everything: bool) -> None:
        """Free cached memory between cases; ``everything``: inputs and references kept for later cases too."""
        if everything:
            self.inputs.clear()
            self.references.clear()
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def prepare(item: PlannedCase, inputs: Mapping[str, Tensor], state: Any = (), config: Any = None) -> Prepared:
    """Return the case ready to be called on ``inputs``, with leaves that require gradients if its mode takes gradients.

    Args:
        state: that a decoding step starts from; empty in the other modes.
        config: launches of an implementation of ours; None leaves the choice to it.
    """
    case, target, operation = item.case, item.target, baselines.get_operation(item.case.op)
    if isinstance(target, Baseline):
        runnable = resolve(target.build)(case, inputs, *([state] if case.mode == "step" else []))
    else:
        if target.prepare is not None:
            inputs = resolve(target.prepare)(inputs)
        given = _keywords(item, inputs)
        if config is not None:
            given["config"] = config
        # A portable form has no step of its own: it is called on a sequence of one token.
        function = operation.step if case.mode == "step" and target.requires else operation.function(target)
        if case.mode == "step":
            given |= {"initial_state": state, "return_last_state": True}
        arguments = list(inputs.values())
        leaves = operation.leaves(inputs, gradients=case.gradients)

        def forward() -> Tensor:
            out = function(*arguments, **given)
            return out[0] if case.mode == "step" else out

        runnable = Runnable(forward=forward, leaves=leaves)
    tensors = {id(x): x for x in (*runnable.leaves.values(), *tree_leaves(state))}
    if isinstance(target, Implementation):
        tensors |= {id(x): x for x in inputs.values()}
    return Prepared(runnable=runnable, inputs=list(tensors.values()))


def _keywords(item: PlannedCase, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the keywords with which a case calls an implementation of ours, on the device of ``inputs``."""
    case, given = item.case, dict(item.options)
    if item.target.chunked and case.chunk_size is not None:
        given["chunk_size"] = case.chunk_size
    if case.state_dtype not in (None, "fp32"):
        given["state_dtype"] = correctness.DTYPES[case.state_dtype]
    if case.documents is not None:
        given["cu_seqlens"] = bounds_of(case.documents, case.seq_len or 0, next(iter(inputs.values())).device)
    return given


def mixing(item: PlannedCase, inputs: Mapping[str, Tensor]) -> Callable[..., Tensor]:
    """Return a function of the operation's arguments in order, as a layer of a model calls it.

    Args:
        inputs: of one token; an adapter keeps those that get no gradient.

    Raises:
        NotImplementedError: an adapter cannot be called on other tensors.
    """
    operation = baselines.get_operation(item.case.op)
    if isinstance(item.target, Implementation):
        return functools.partial(operation.function(item.target), **_keywords(item, inputs))
    on = resolve(item.target.build)(item.case, inputs).on
    if on is None:
        raise NotImplementedError(f"the adapter of {item.target.name} takes no tensors of a model")
    return lambda *tensors: on(dict(zip(operation.arguments, tensors, strict=True)))


@contextmanager
def _noted(kernels: dict[str, str]) -> Iterator[None]:
    """Add the Triton kernels that are launched in the block: hash of what Triton compiles -> hash of the cubin."""
    try:
        from triton.compiler import CompiledKernel
    except ImportError:
        yield
        return
    # Patched because Triton calls it before every launch, also one that repeats an earlier one (kernels' remember.py).
    describe = CompiledKernel.launch_metadata

    def note_and_describe(self: Any, *args: Any) -> Any:
        if self.hash not in kernels:
            kernels[self.hash] = hashlib.sha256(self.kernel).hexdigest()
        return describe(self, *args)

    with mock.patch.object(CompiledKernel, "launch_metadata", note_and_describe):
        yield


def _poisoned(
    target: Implementation | Baseline, expected: correctness.Expected, dtype: torch.dtype
) -> AbstractContextManager[Any]:
    """Make an output element that is never written show as NaN, in our code and, on a GPU, in outside packages.

    For our code a dispatch mode fills uninitialised tensors. Outside packages may call torch.compile, which never
    compiles a function in this process that it has met under a dispatch mode: they get poisoned memory instead, which
    the caching allocator hands out again.
    """
    if isinstance(target, Implementation):
        return correctness.PoisonEmpty()
    if next(iter(expected.values.values())).device.type == "cuda":
        blocks = [torch.full(v.shape, float("nan"), dtype=dtype, device=v.device) for v in expected.values.values()]
        del blocks
    return nullcontext()


def _call_once(runnable: Runnable, grad_out: Tensor | None) -> dict[str, Tensor]:
    """Return output and gradients in the operation's canonical layout."""
    if grad_out is None:
        with torch.no_grad():
            return {"out": runnable.to_canonical("out", runnable.forward())}
    out = runnable.forward()
    gradients = correctness.differentiate(out, runnable.leaves, _in_own_layout(runnable, out, grad_out))
    results = {"out": runnable.to_canonical("out", out.detach())}
    return results | {name: runnable.to_canonical(name, gradient) for name, gradient in gradients.items()}


def _in_own_layout(runnable: Runnable, out: Tensor, grad_out: Tensor) -> Tensor:
    """Bring an output gradient from the canonical layout to the implementation's own.

    ``to_canonical`` only permutes and reshapes, so its vector-Jacobian product is its inverse.
    """
    leaf = out.detach().requires_grad_()
    canonical = runnable.to_canonical("out", leaf)
    (own,) = torch.autograd.grad(canonical, leaf, grad_out.to(canonical.dtype).reshape(canonical.shape))
    return own.contiguous()


def _timed_parts(prepared: Prepared, mode: str) -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    """Return (call, prepare): what is timed, and what runs before it untimed."""
    forward, leaves = prepared.runnable.forward, list(prepared.runnable.leaves.values())
    if mode in ("fw", "step"):

        def call_forward(_: Any) -> Any:
            with torch.no_grad():
                return forward()

        return call_forward, lambda: None
    grad_out = torch.randn_like(forward().detach())
    prepared.inputs.append(grad_out)
    if mode == "bw":
        return lambda out: torch.autograd.grad(out, leaves, grad_out), forward

    def call_both(_: Any) -> Any:
        out = forward()
        return out, torch.autograd.grad(out, leaves, grad_out)

    return call_both, lambda: None


OUT_OF_MEMORY = (
    "out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory",
    "failed to map segment from shared object",
)  # fmt: skip
"""What packages, the driver and the system's loader say when no memory is left, in lower case."""


def classify(error: BaseException) -> tuple[str, str]:
    """Return the status and the one-sentence reason of an exception that ended a case."""
    if isinstance(error, CaseFailure):
        return error.status, error.reason
    text = " ".join(str(error).split())
    sentences = text.split(". ")
    first = sentences[0][:300] or type(error).__name__
    exhausted = [sentence for sentence in sentences if any(words in sentence.lower() for words in OUT_OF_MEMORY)]
    if exhausted or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "oom", exhausted[0][:300] if exhausted else first
    own = __package__.partition(".")[0]
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] != own:
        return "unavailable", f"{IMPORT_FAILED}: {first}"
    return "error", f"{type(error).__name__}: {first}"


def failed(error: BaseException) -> Reply:
    """Return the outcome of a case that ended with an exception."""
    return not_measured(*classify(error))


def _device_is_usable(device: str) -> bool:
    """Whether the device still works: after an illegal access or an assertion every later CUDA call fails."""
    if device != "cuda":
        return True
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1).item()
    except RuntimeError:
        return False
    return True


def _answer(worker: Worker, request: Mapping[str, Any]) -> list[Reply]:
    try:
        if "function" in request:
            columns: Any = resolve(request["function"])(worker, **request["arguments"])
            return [{"status": "ok", "reason": None, "columns": columns}]
        items, limits = decode_request(request)
        if limits.device_kind not in (None, worker.device):
            reason = f"the worker runs on {worker.device}, the sweep is about {limits.device_kind}"
            return [not_measured("error", reason) for _ in items]
        for item in items:
            if item.triton is not None and (here := version_of("triton")) != item.triton.version:
                raise RuntimeError(f"the worker has triton {here}, the case is about {item.triton.version}")
        worker.references.folder = Path(limits.shared) if limits.shared else None
        if limits.action == "run":
            return worker.run(items, limits)
        act = getattr(worker, limits.action)
        return [{"status": "ok", "reason": None, "columns": act(item)} for item in items]
    except Exception as error:  # noqa: BLE001, whatever an implementation raises becomes a row
        return [failed(error) for _ in request.get("items", [None])]


def serve(requests: Iterable[Mapping[str, Any]], reply: Callable[[dict[str, Any]], None]) -> None:
    """Answer requests until there are no more, or the device has failed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    worker = Worker(device)
    reply({"ready": True})
    frozen = False
    for request in requests:
        outcomes = _answer(worker, request)
        if not frozen and "items" in request:
            # What the imports have made lives on, so garbage collections between cases need not visit it.
            gc.collect()
            gc.freeze()
            frozen = True
        usable = all(outcome["status"] == "ok" for outcome in outcomes) or _device_is_usable(device)
        reply({"outcomes": outcomes, "usable": usable})
        if not usable:
            os._exit(1)
        items = request.get("items", ())
        # Workers of other Tritons have their turn on this device before this one is asked again.
        shared = len(items) > 1 or any(item["triton"] is not None for item in items)
        worker.release(everything=shared or any(outcome["status"] == "oom" for outcome in outcomes))
