"""Packed documents: what an operation makes of each is what it makes of that document alone, in every form that takes
cu_seqlens; bad bounds are refused, or cut off where the host does not read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from lrbench.kernels import resolve
from lrbench.kernels.lightning import lightning
from lrbench.kernels.scalar_decay import engine
from lrbench.kernels.scalar_decay.declare import FUSED_CHUNK, WHOLE_STATE
from lrbench.tests.kernels.cases import (
    BF16,
    F16,
    F32,
    F64,
    HEADS,
    LIGHTNING,
    PORTABLE,
    SCALAR_DECAY,
    heads,
    interpreted,
    on_each,
    on_gpu,
    portable,
)
from lrbench.tests.kernels.laws import Case, Problem, check_matches_reference, evaluate, parts_of, public_state

LENGTHS = (17, 0, 1, 70, 0, 3)
OTHER_LENGTHS = (0, 2, 64, 24, 1, 0)
"""As many documents with as many positions in all."""
LONG = (0, 64, 1, 0, 290, 2)
"""Two anchors of the decay's gradient in a document."""
GUARD = 4096
"""Elements before and after a tensor."""


class Packed(Case):
    """A case of one packed batch; cu_seqlens is among the options. States are those of its documents, or, where
    ``law["states"]`` is False, none."""

    def draw(self) -> Problem:
        """Draw the problem."""
        packed, sizes = Case.draw(self), {**self.sizes, "batch": len(self.options["cu_seqlens"]) - 1, "seq_len": 1}
        if not self.law.get("states", True):
            return replace(packed, state=None, cotangents={"h": packed.cotangents["h"]}, states=False)
        states = Case.draw(replace(self, sizes=sizes))
        return replace(packed, state=states.state, cotangents={**states.cotangents, "h": packed.cotangents["h"]})


def bounds_of(lengths: Sequence[int], device: str = "cpu", dtype: torch.dtype = torch.int32) -> Tensor:
    """Return cu_seqlens of documents of these lengths."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)


def packed(case: Case, lengths: Sequence[int], dtype: torch.dtype = torch.int32) -> Packed:
    """Return a case with documents of these lengths instead of a batch."""
    sizes = {**case.sizes, "batch": 1, "seq_len": sum(lengths)}
    options = {**case.options, "cu_seqlens": bounds_of(lengths, case.device, dtype)}
    names = ("op", "impl", "dtype", "device", "kwargs", "initial_state", "law")
    return Packed(sizes=sizes, options=options, **{name: getattr(case, name) for name in names})


def one_by_one(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes packed documents and calls ``call`` with each that has any positions."""

    def run(*tensors: Tensor, initial_state: Any, return_last_state: bool, cu_seqlens: Tensor, **options: Any) -> Any:
        bounds, outputs, last = cu_seqlens.tolist(), [], []
        for n, (start, end) in enumerate(pairwise(bounds)):
            first = None
            if initial_state is not None:
                first = public_state(tuple(x[n : n + 1] for x in parts_of(initial_state)))
            parts = [x if x.dim() == 1 else x[:, start:end] for x in tensors]
            h, after = call(*parts, initial_state=first, return_last_state=return_last_state, **options)
            outputs.append(h)
            last.append(parts_of(after))
        return torch.cat(outputs, 1), public_state(tuple(map(torch.cat, zip(*last, strict=True))))

    return run


def check_alone(case: Packed, *, sums: float, function: Callable[..., Any] | None = None) -> None:
    """Results are those of each document alone to the last bit, gradients of gates and constants to ``sums``."""
    problem, function = case.draw(), function or case.function
    results, expected = (evaluate(problem, fn) for fn in (function, one_by_one(function)))
    assert results.keys() == expected.keys()
    exact = {"h", "C", "n", "dq", "dk", "dv", "dx", "dB", "dC", "dC_initial"}
    for name, x in expected.items():
        finite = x.isfinite()
        assert torch.equal(results[name].isfinite(), finite), name
        error, largest = (results[name] - x)[finite].abs().amax(), x[finite].abs().amax()
        assert error <= (0 if name in exact else sums * largest), f"{name}: {error} of {largest}"


@on_each(*(portable(op, impl, F64) for op, impl in PORTABLE if op in HEADS))
def test_documents_in_torch(case: Case) -> None:
    """Forms in plain torch, and the definition."""
    for lengths, dtype in ((LENGTHS, torch.int32), ((4,), torch.int64), ((0, 0, 3), torch.int32)):
        for function in (case.function, resolve(case.operation.recurrent)):
            check_alone(packed(case, lengths, dtype), sums=1e-12, function=function)


@on_each(*(interpreted(op, FUSED_CHUNK, F16) for op in SCALAR_DECAY))
def test_documents(case: Case) -> None:
    """Documents of no position, of one, of several tiles: outputs, states and gradients are the definition's."""
    check_matches_reference(packed(case, LENGTHS))


@on_each(
    *(interpreted(op, FUSED_CHUNK, F16, states=False) for op in SCALAR_DECAY),
    interpreted("mlstm_sig", FUSED_CHUNK, F32, states=False, kwargs={"chunk_size": 16}),
    interpreted("mamba2_ssd", "limit_chunk", F16, states=False),
)
def test_documents_without_states(case: Case) -> None:
    """Documents are then one sequence with resets, in every form and dtype, and tiles have several of them."""
    check_matches_reference(packed(case, LENGTHS))
    check_unseen(packed(case, LENGTHS).draw(), case.function)


def check_unseen(problem: Problem, function: Callable[..., Any]) -> None:
    """What the others' values are leaves no trace in a document's outputs and gradients, to the last bit."""
    bounds = problem.options["cu_seqlens"].tolist()
    start, end = max(pairwise(bounds), key=lambda at: at[1] - at[0])
    expected = evaluate(problem, function)
    inputs = {n: x.clone() if n in list(problem.inputs)[:3] else x for n, x in problem.inputs.items()}
    for x in inputs.values():
        if x.dim() == 4:
            x[:, start:end] *= -3
    results = evaluate(replace(problem, inputs=inputs), function)
    kept = torch.ones(bounds[-1], dtype=torch.bool, device=problem.options["cu_seqlens"].device)
    kept[start:end] = False
    for name, x in expected.items():
        if x.dim() == 4:
            assert torch.equal(results[name][:, kept], x[:, kept]), name
            assert not torch.equal(results[name], x), name


@on_each(
    interpreted("mlstm_exp", FUSED_CHUNK, F16, label="long", lengths=LONG),
    interpreted("simple_gla", FUSED_CHUNK, F16, label="one", lengths=(35,), initial_state=False),
    interpreted("mamba2_ssd", FUSED_CHUNK, F16, label="many", lengths=(1,) * 12, initial_state=False),
)
def test_documents_are_as_alone(case: Case) -> None:
    """A document takes the same tiles, so its results are the same to the last bit."""
    check_alone(packed(case, case.law["lengths"]), sums=1e-6)


@on_each(interpreted("mlstm_sig", FUSED_CHUNK, F16))
def test_lengths_may_change(case: Case) -> None:
    """A later call of the same kinds makes an earlier one's request, with other lengths; so does a compiled one."""
    function = case.function
    compiled = torch.compile(lambda *x, **y: function(*x, **y), fullgraph=True, backend="aot_eager")
    for lengths in (LENGTHS, OTHER_LENGTHS):
        check_alone(packed(case, lengths), sums=1e-6)
        problem = packed(case, lengths).draw()
        results, expected = (evaluate(problem, fn) for fn in (compiled, function))
        assert all(map(torch.equal, results.values(), expected.values())), lengths


@on_each(
    interpreted("mlstm_exp", FUSED_CHUNK, F16),
    interpreted("mamba2_ssd", FUSED_CHUNK, F16),
    interpreted("simple_gla", FUSED_CHUNK, F16, states=False),
)
def test_bad_bounds_write_nowhere_else(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU nobody reads cu_seqlens before the kernels: whatever it holds, they write only their tensors."""
    monkeypatch.setattr(engine, "check_documents", lambda *_, **__: None)
    check_writes_nowhere_else(packed(case, LENGTHS).draw(), case.function, monkeypatch)


def check_writes_nowhere_else(problem: Problem, function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the bounds of six documents are, nothing is written around the tensors that the kernels are given."""
    buffers = []

    def guarded(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, **keywords: Any) -> Tensor:
            like = allocate(*args, **keywords)
            filled = torch.full((like.numel() + 2 * GUARD,), math.nan, dtype=torch.float64)
            buffers.append(filled.to(like.dtype) if like.is_floating_point() else filled.fill_(-77).to(like.dtype))
            return buffers[-1][GUARD : GUARD + like.numel()].view(like.shape)

        return run

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, guarded(getattr(owner, name)))
    total = len(problem.cotangents["h"][0])
    falling = [total - 1 - n * total // 9 for n in range(7)]
    for bounds in ([-9, 2 * total // 5, 7, 9000, -(2**31), total, 2**31 - 1], [total] * 7, [0] * 7, falling):
        evaluate(replace(problem, options={"cu_seqlens": torch.tensor(bounds)}), function)
    assert len(buffers) > 20
    for buffer in buffers:
        edges = torch.cat((buffer[:GUARD], buffer[-GUARD:]))
        assert (edges.isnan() if edges.is_floating_point() else edges == -77).all()


@on_each(portable("simple_gla", "torch", F32))
def test_bad_bounds_are_refused(case: Case) -> None:
    """What the host knows without reading from a GPU; the message names cu_seqlens."""
    problem = packed(case, (3, 4)).draw()
    good: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 3, 7])}
    bad: tuple[tuple[str, dict[str, Any]], ...] = (
        ("cu_seqlens must be int32 or int64, got float32", {"cu_seqlens": torch.tensor([0.0, 3.0, 7.0])}),
        (
            r"cu_seqlens must have 1 dimensions \[N \+ 1\]",
            {"cu_seqlens": torch.tensor([[0, 3, 7]])},
        ),
        ("cu_seqlens must have the bounds of at least one document, got 1", {"cu_seqlens": torch.tensor([0])}),
        ("cu_seqlens must be on cpu, got meta", {"cu_seqlens": torch.tensor([0, 3, 7], device="meta")}),
        *(
            ("cu_seqlens must rise from 0 to 7, the number of positions, got", {"cu_seqlens": torch.tensor(values)})
            for values in ([0, 5, 3, 7], [0, 3, 6], [1, 3, 7], [0, 3, 9], [*range(9), 5])
        ),
        (r"initial_state must have shape \(2, 8, 16, 24\)", {"initial_state": torch.zeros(1, 8, 16, 24)}),
        ("impl must be one of .* with cu_seqlens, got step", {"impl": "step"}),
        *(
            (
                f"impl must be one of .* with cu_seqlens and states, got {impl}",
                {"impl": impl, "return_last_state": True},
            )
            for impl in ("xl_chunk", "limit_chunk")
        ),
    )
    for match, keywords in bad:
        with pytest.raises(ValueError, match=match):
            case.operation.function("torch")(*problem.inputs.values(), **{**good, **keywords})
    with pytest.raises(TypeError, match="cu_seqlens must be a tensor, got list"):
        case.function(*problem.inputs.values(), cu_seqlens=[0, 3, 7])
    for impl in LIGHTNING:
        with pytest.raises(ValueError, match=f"impl must be one of .* with cu_seqlens, got {impl}"):
            lightning(*list(problem.inputs.values())[:3], torch.ones(8), impl=impl, **good)
    batch = {name: torch.cat((x, x)) for name, x in problem.inputs.items()}
    with pytest.raises(ValueError, match=r"cu_seqlens takes documents .* a batch of 1, got a batch of 2"):
        case.function(*batch.values(), **good)
    empty = {name: x[:, :0] for name, x in problem.inputs.items()}
    h, last = case.function(
        *empty.values(), cu_seqlens=torch.tensor([0, 0, 0]), initial_state=problem.state[0], return_last_state=True
    )
    assert h.shape == (1, 0, 8, 24) and torch.equal(last, problem.state[0])


@on_each(interpreted("simple_gla", FUSED_CHUNK, F32), interpreted("simple_gla", FUSED_CHUNK, F16))
def test_kernels_refuse(case: Case) -> None:
    """Documents with states: there is no form in float32, and a document is one chunk."""
    problem = packed(case, LENGTHS).draw()
    match, keywords = "chunk_size must be None for fused_chunk with cu_seqlens and states, got 64", {"chunk_size": 64}
    if case.dtype == F32:
        match, keywords = "dtype must be float16 or bfloat16 for fused_chunk with cu_seqlens and states", {}
    with pytest.raises(ValueError, match=match):
        case.function(*problem.inputs.values(), return_last_state=True, **problem.options, **keywords)


def in_rows(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions of documents [N, longest], padded at their ends, and which of them are the documents' own."""
    at = bounds[:-1, None] + torch.arange(int(bounds.diff().max()), device=bounds.device)
    return at.clamp(max=int(bounds[-1]) - 1), at < bounds[1:, None]


def some_lengths(count: int, total: int, low: int, high: int) -> list[int]:
    """Draw lengths between the bounds that add up to the total."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    missing = total - sum(lengths)
    for n in range(count):
        change = max(low, min(high, lengths[n] + missing)) - lengths[n]
        lengths[n] += change
        missing -= change
    return lengths


REAL = heads(1, 1, 2, 64, 128)


@on_each(*(on_gpu(op, impl, BF16, sizes=REAL) for op, impl in product(SCALAR_DECAY, (WHOLE_STATE, FUSED_CHUNK))))
def test_documents_on_gpu(case: Case) -> None:
    """As in the interpreter, with documents of many tiles and several anchors."""
    check_matches_reference(packed(case, (17, 0, 1, 70, 0, 3, 700, 64, 129)))
    check_matches_reference(packed(replace(case, initial_state=False), (600,), torch.int64))
    without = replace(case, law={"states": False}, kwargs={**case.kwargs, "chunk_size": 128})
    # Chunks with many documents, with one that began long before, and with a first position at either edge.
    for lengths in ((17, 0, 1, 70, 0, 3, 700, 64, 129, 41, 384), (128, 127, 1, 129, 127)):
        check_matches_reference(packed(without, lengths))
        check_unseen(packed(without, lengths, torch.int64).draw(), without.function)


@on_each(
    *(
        on_gpu(op, impl, BF16, label=label, sizes=heads(1, 1, heads_of, 64, 64), drawn=drawn)
        for op in ("simple_gla", "mlstm_exp")
        for impl in (WHOLE_STATE, FUSED_CHUNK)
        for label, heads_of, drawn in (
            ("64 documents", 2, (64, 65536, 100, 2000)),
            ("10000 documents", 1, (10000, 65536, 0, 13)),
        )
    ),
    *(
        on_gpu("mlstm_exp", WHOLE_STATE, BF16, sizes=heads(1, 1, 2, 64, 64), drawn=drawn, states=False)
        for drawn in ((64, 65536, 100, 2000), (10000, 65536, 0, 13))
    ),
)
def test_many_documents_on_gpu(case: Case) -> None:
    """A masked position leaves the state as it is: no decay, no input."""
    check_as_padded(case, {"simple_gla": {2: 0.0, 3: 0.0}, "mlstm_exp": {3: -math.inf, 4: math.inf}}[case.op])


def check_as_padded(case: Case, mask: Mapping[int, float]) -> None:
    """Outputs, gradients and, if padding is masked, states are those of sequences in a batch, padded at their ends.

    Args:
        mask: the numbers of arguments, and the values that mask a position; empty where padding decays the state.
    """
    problem = packed(case, some_lengths(*case.law["drawn"])).draw()
    if not mask:
        problem = replace(problem, cotangents={"h": problem.cotangents["h"]})
    at, real = in_rows(problem.options["cu_seqlens"].long())

    def in_a_batch(*tensors: Tensor, cu_seqlens: Tensor, **keywords: Any) -> Any:
        rows = [x if x.dim() == 1 else x[0][at] for x in tensors]
        for n, value in mask.items():
            rows[n] = torch.where(real.view(*real.shape, *([1] * (rows[n].dim() - 2))), rows[n], value)
        result = case.function(*rows, **keywords)
        return (result[0][real][None], result[1]) if keywords else result[real][None]

    expected, results = (evaluate(problem, fn) for fn in (in_a_batch, case.function))
    for name in expected.keys() - set("" if mask else "Cnm"):
        x = expected[name]
        finite = x.isfinite() & results[name].isfinite()
        assert mask or finite.all(), name
        error = (results[name] - x)[finite].abs().amax() / x[finite].abs().amax()
        assert error <= 2**-6, f"{name}: {error}"


@on_each(
    *(
        on_gpu(op, impl, BF16, sizes=REAL)
        for op, impl in product(("simple_gla", "mlstm_exp"), (WHOLE_STATE, FUSED_CHUNK))
    )
)
@pytest.mark.parametrize("how", ["graph", "compile"])
def test_lengths_may_change_on_gpu(case: Case, how: str) -> None:
    """A captured graph and a compiled call read cu_seqlens anew."""
    check_lengths_may_change(case, how, LENGTHS, OTHER_LENGTHS)


def check_lengths_may_change(case: Case, how: str, *lengths_of: Sequence[int]) -> None:
    """Replays of a graph ("graph"), or calls of a compiled function, are right with other lengths of the same total."""
    problem = packed(replace(case, initial_state=False), lengths_of[0]).draw()
    bounds = problem.options["cu_seqlens"]
    leaves = [x.requires_grad_() for x in problem.inputs.values()]
    grad, function = problem.cotangents["h"].to(case.dtype), case.function

    def step(function: Callable[..., Any] = function) -> list[Tensor]:
        h = function(*leaves, cu_seqlens=bounds)
        return [h.detach(), *torch.autograd.grad(h, leaves, grad)]

    expected = []
    for lengths in lengths_of:
        bounds.copy_(bounds_of(lengths))
        expected.append([x.clone() for x in step()])
    if how == "compile":
        compiled = torch.compile(lambda *x, **y: function(*x, **y), fullgraph=True)
        run = lambda: step(compiled)  # noqa: E731
    else:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()

        def run() -> list[Tensor]:
            graph.replay()
            return captured

    for lengths, wanted in zip(lengths_of * 2, expected * 2, strict=True):
        bounds.copy_(bounds_of(lengths))
        assert all(map(torch.equal, run(), wanted)), lengths
