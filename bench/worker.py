"""The worker process: runs cases one after the other, each checked, then measured.

It is started by :mod:`.process` as ``python -m lrbench.bench.worker REQUEST_FD REPLY_FD`` and speaks JSON lines over
these two descriptors, so nothing that a package prints can break the protocol. Whatever goes wrong inside a case
becomes a typed status; what kills the process is seen by the parent.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..kernels import baselines, resolve
from ..kernels.baselines.spec import Baseline, Runnable
from ..kernels.spec import Implementation, Operation
from ..results.schema import Case
from . import autotuning, check, clock, memory
from .process import STACK_FILE, STACK_SIGNAL
from .protocol import decode_request


class CaseFailure(Exception):
    """A case ends with this status and reason."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A case ready to be called: its inputs, how to call it and the gradient of its output."""

    runnable: Runnable
    inputs: list[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A case ready to be timed: what is timed, what runs before it, the tensors alive before it, and its first call."""

    call: Callable[[Any], Any]
    prepare: Callable[[], Any]
    inputs: list[Tensor]
    compile_s: float


class Worker:
    """Runs cases on one device, keeping what cases in a row share: the reference and the clock."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.inputs = check.Inputs(device)
        self.references = check.References()
        self._clock: clock.Clock | None = None
        if device == "cuda":
            autotuning.compile_in_parallel()

    @property
    def clock(self) -> clock.Clock:
        """The device's clock, made when the first case is timed."""
        if self._clock is None:
            self._clock = clock.CudaClock() if self.device == "cuda" else clock.CpuClock()
        return self._clock

    def run(self, case: Case, target: Implementation | Baseline, *, budget_s: float) -> dict[str, Any]:
        """Check and measure a case; return the columns it fills.

        Raises:
            CaseFailure: it is incorrect or cannot run; out of memory and errors arrive as the exceptions they are.
        """
        columns = self.verify(case, target)
        ready = self.make_ready(case, target)
        columns["compile_s"] = ready.compile_s
        use = memory.measure_memory(ready.call, prepare=ready.prepare, inputs=ready.inputs)
        columns |= dataclasses.asdict(use)
        timing = clock.measure(
            self.clock, ready.call, prepare=ready.prepare, budget_s=budget_s, ci_target=clock.CI_TARGET[self.device]
        )
        return columns | timing.columns()

    def compile(self, case: Case, target: Implementation | Baseline, config_of: Case | None = None) -> dict[str, Any]:
        """Call a case once, unchecked and untimed, to fill the compilers' caches on disk.

        Args:
            config_of: a case whose launches are compiled, where they are not the case's own.
        """
        config = None
        if config_of is not None and isinstance(target, Implementation) and target.default_config is not None:
            capability = torch.cuda.get_device_capability()
            config = resolve(target.default_config)(
                config_of.sizes, config_of.dtype, capability, config_of.mode != "fw"
            )
        with autotuning.untimed():
            return {"compile_s": self.make_ready(case, target, config).compile_s}

    def profile(self, case: Case, target: Implementation | Baseline) -> dict[str, Any]:
        """Call a case once between cudaProfilerStart and cudaProfilerStop, compiled, warm and unchecked.

        The range begins with a sleeping kernel, by which a profiler's output is told apart case by case.
        """
        ready = self.make_ready(case, target)
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

    def verify(self, case: Case, target: Implementation | Baseline) -> dict[str, Any]:
        """Return the columns checked and rel_error; raise CaseFailure when a result is wrong."""
        operation = baselines.get_operation(case.op)
        if case.mode == "step":
            return self._verify_step(operation, case, target)
        gradients = case.mode in ("fwbw", "bw")
        checked, inputs, expected = self._expect(operation, case, gradients=gradients)
        prepared = prepare(operation, checked, target, inputs, gradients=gradients)
        with _poisoned(target, expected):
            results = _call_once(prepared.runnable, expected.grad_out if gradients else None)
        factor = 1.0 if case.provider == "lrbench" else check.PEER_FACTOR
        verdict = check.compare(results, expected, case.state_dtype, factor=factor)
        if verdict.failure:
            raise CaseFailure("incorrect", verdict.failure)
        return {"checked": check.describe_check(case, checked), "rel_error": verdict.rel_error}

    def _expect(
        self, operation: Operation, case: Case, *, gradients: bool
    ) -> tuple[Case, dict[str, Tensor], check.Expected]:
        """Return the case at the shape it is checked at, its inputs and what it must give.

        A reference that does not fit in memory is no fault of the implementation: it is taken at a smaller shape.
        """
        for small in (False, True):
            checked, portable = check.checked_case(operation, case, self.device, small=small)
            try:
                inputs = self.inputs.get(operation, checked)
                expected = self.references.get(operation, checked, inputs, gradients=gradients, portable=portable)
            except torch.OutOfMemoryError:
                if small:
                    raise
            else:
                return checked, inputs, expected
            self.release(everything=True)
        raise AssertionError("the smaller shape either returns or raises")

    def _verify_step(self, operation: Operation, case: Case, target: Implementation | Baseline) -> dict[str, Any]:
        inputs = self.inputs.get(operation, case)
        expected = check.expect_step(operation, case, inputs, check.state_before_step(operation, case, self.device))
        prepared = prepare(operation, case, target, inputs, gradients=False)
        with _poisoned(target, expected):
            results = _call_once(prepared.runnable, None)
        factor = 1.0 if case.provider == "lrbench" else check.PEER_FACTOR
        verdict = check.compare(results, expected, case.state_dtype, factor=factor)
        if verdict.failure:
            raise CaseFailure("incorrect", verdict.failure)
        return {"checked": check.SAME_SHAPE, "rel_error": verdict.rel_error}

    def make_ready(self, case: Case, target: Implementation | Baseline, config: Any = None) -> Ready:
        """Return the case ready to be timed, called once: its compilation is behind it.

        Args:
            config: launches of an implementation of ours; None leaves the choice to it.
        """
        operation = baselines.get_operation(case.op)
        gradients = case.mode in ("fwbw", "bw")
        inputs = self.inputs.get(operation, case)
        prepared = prepare(operation, case, target, inputs, gradients=gradients, config=config)
        start = time.perf_counter()
        call, prepare_call = _timed_parts(prepared, case.mode)
        call(prepare_call())
        if self.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return Ready(call=call, prepare=prepare_call, inputs=prepared.inputs, compile_s=seconds)

    def release(self, *, everything: bool) -> None:
        """Give cached memory back between cases; ``everything`` includes inputs and references kept for later cases."""
        if everything:
            self.inputs.clear()
            self.references.clear()
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def prepare(
    operation: Operation,
    case: Case,
    target: Implementation | Baseline,
    inputs: Mapping[str, Tensor],
    *,
    gradients: bool,
    config: Any = None,
) -> Prepared:
    """Return the case ready to be called on ``inputs``, with leaves that require gradients where asked for."""
    if isinstance(target, Baseline):
        runnable = resolve(target.build)(case, inputs)
    else:
        if target.prepare is not None:
            inputs = resolve(target.prepare)(inputs)
        runnable = _runnable(operation, case, target, inputs, gradients=gradients, config=config)
    tensors = {id(x): x for x in runnable.leaves.values()}
    if isinstance(target, Implementation):
        tensors |= {id(x): x for x in inputs.values()}
    return Prepared(runnable=runnable, inputs=list(tensors.values()))


def _runnable(
    operation: Operation,
    case: Case,
    target: Implementation,
    inputs: Mapping[str, Tensor],
    *,
    gradients: bool,
    config: Any,
) -> Runnable:
    options: dict[str, Any] = {} if config is None else {"config": config}
    if case.mode == "step":
        if target.step_call is None:
            raise ValueError(f"{target.name} must name its step_call to be timed in mode step")
        function = resolve(target.step_call)
        options["initial_state"] = check.state_before_step(operation, case, next(iter(inputs.values())).device.type)
    else:
        function = operation.function(target)
    if target.chunked and case.chunk_size is not None:
        options["chunk_size"] = case.chunk_size
    if case.state_dtype not in (None, "fp32"):
        options["state_dtype"] = check.DTYPES[case.state_dtype]
    leaves = operation.leaves(inputs, gradients=gradients)
    tensors = list(inputs.values())
    return Runnable(forward=lambda: function(*tensors, **options), leaves=leaves)


def _poisoned(target: Implementation | Baseline, expected: check.Expected) -> AbstractContextManager[Any]:
    """Make an output element that nobody writes show as NaN in our code and, on a GPU, in outside packages.

    Outside packages may call torch.compile, which gives a function up for the life of the process when it first meets
    it under a dispatch mode: they get poisoned memory instead, which the caching allocator hands out again.
    """
    if isinstance(target, Implementation):
        return check.PoisonEmpty()
    if next(iter(expected.values.values())).device.type == "cuda":
        dtype = torch.bfloat16 if expected.grad_out is None else expected.grad_out.dtype
        blocks = [torch.full(v.shape, float("nan"), dtype=dtype, device=v.device) for v in expected.values.values()]
        del blocks
    return nullcontext()


def _call_once(runnable: Runnable, grad_out: Tensor | None) -> dict[str, Tensor]:
    """Return output and gradients in the operation's canonical layout."""
    if grad_out is None:
        with torch.no_grad():
            return {"out": runnable.to_canonical("out", runnable.forward())}
    out = runnable.forward()
    gradients = check.differentiate(out, runnable.leaves, _in_own_layout(runnable, out, grad_out))
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
    """Return (call, prepare): what is timed, and what runs before it outside the timed region."""
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


OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


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
    if isinstance(error, ImportError):
        return "unavailable", f"import failed: {first}"
    return "error", f"{type(error).__name__}: {first}"


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


def _die_with_parent() -> None:
    """Ask Linux to kill this process when the parent dies, so that a hung case does not outlive a killed sweep."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _tell_stack_when_asked() -> None:
    """Write the stack into a file on STACK_SIGNAL, so that a case that is given up can be told where it was."""
    stack = open(STACK_FILE, "w")  # noqa: SIM115, open for as long as the process runs
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=False)


def _answer(worker: Worker, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        wanted = request["device_kind"]
        if wanted not in (None, worker.device):
            raise CaseFailure("error", f"the worker runs on {worker.device}, the sweep is about {wanted}")
        item = decode_request(request)
        worker.references.folder = Path(request["shared"]) if request["shared"] else None
        if request["action"] == "compile":
            columns = worker.compile(item.case, item.target, item.config_of)
        elif request["action"] == "profile":
            columns = worker.profile(item.case, item.target)
        elif request["action"] == "verify":
            columns = worker.verify(item.case, item.target)
        else:
            columns = worker.run(item.case, item.target, budget_s=request["budget_s"])
        return {"status": "ok", "reason": None, "columns": columns}
    except Exception as error:  # noqa: BLE001, whatever an implementation raises becomes a row
        status, reason = classify(error)
        return {"status": status, "reason": reason, "columns": {}}


def serve(requests: IO[str], replies: IO[str]) -> None:
    """Answer requests until there are no more, or the device is lost."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    worker = Worker(device)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line_number, line in enumerate(requests):
        reply = _answer(worker, json.loads(line))
        if line_number == 0:
            # What the imports left behind stays: collections between cases need not walk it.
            gc.collect()
            gc.freeze()
        reply["usable"] = reply["status"] == "ok" or _device_is_usable(device)
        print(json.dumps(reply), file=replies, flush=True)
        if not reply["usable"]:
            os._exit(1)
        worker.release(everything=reply["status"] == "oom")


def main() -> None:
    """Serve the descriptors named on the command line; the working directory is the worker's own."""
    _die_with_parent()
    _tell_stack_when_asked()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request_fd, reply_fd = int(sys.argv[1]), int(sys.argv[2])
    with open(request_fd) as requests, open(reply_fd, "w") as replies:
        serve(requests, replies)


if __name__ == "__main__":
    main()
