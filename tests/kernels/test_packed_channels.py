"""Packed documents of the operations over channels: what an operation makes of each is what it makes of that document
alone, whatever their lengths and wherever the edges of tiles, rows and words of marks lie between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from lrbench.kernels import get_operation
from lrbench.kernels.common import channel_tensors
from lrbench.kernels.common.marks import mark_documents
from lrbench.kernels.rglru.config import ScanConfig
from lrbench.tests.kernels.cases import (
    BF16,
    CHANNELS,
    F16,
    F32,
    F64,
    PORTABLE,
    SCAN_ROWS_FORWARD,
    TIME_TILES,
    channels,
    interpreted,
    on_each,
    on_gpu,
    portable,
    serial_config,
    tile,
    tiled,
)
from lrbench.tests.kernels.laws import Case, assert_close, check_matches_reference, evaluate
from lrbench.tests.kernels.test_packed import (
    LENGTHS,
    bounds_of,
    check_alone,
    check_as_padded,
    check_lengths_may_change,
    check_writes_nowhere_else,
    packed,
)

SHORT = (5, 0, 1, 3, 0, 10)
"""Three tiles of eight steps; documents begin within rows, and in the second tile, so that the third is not to look
back to the first; nor, backward, the first to the third."""
EDGES = (0, 8, 4, 4, 0, 3)
"""Empty first; documents begin where tiles and rows do."""
SAME = 2.0**-18, 2.0**-8
"""Errors that two forms may have in float32 and in half precision, of the largest value."""


def check_as_alone(case: Case, lengths: Sequence[int], dtype: torch.dtype = torch.int32) -> None:
    """Results are those of the plain form, which takes one document after the other."""
    problem = packed(case, lengths, dtype).draw()
    results = evaluate(problem, case.function)
    plain = evaluate(problem, case.operation.function("torch"), stabilizer=results.get("m"))
    bound = SAME[case.dtype != F32]
    allowed = {name: bound * max(float(x.abs().max()), 1.0) for name, x in plain.items()}
    assert results.keys() == plain.keys()
    assert_close(results, plain, allowed, f"{case.op}, documents of {lengths}")


@on_each(*(portable(op, impl, F64) for op, impl in PORTABLE if op in CHANNELS))
def test_documents_in_torch(case: Case) -> None:
    """Forms in plain torch."""
    for lengths, dtype in ((LENGTHS, torch.int32), ((4,), torch.int64), ((0, 0, 3), torch.int32)):
        check_alone(packed(case, lengths, dtype), sums=1e-12)
    check_matches_reference(packed(case, SHORT))


@on_each(portable("rglru_layer", "torch", F64))
def test_a_layer_packs_its_documents(case: Case) -> None:
    """Its products take every position by itself."""
    x, *others = case.draw().inputs.values()
    function, x = case.function, x[:1]
    h = function(x, *others, cu_seqlens=torch.tensor([0, 5, x.shape[1]]))
    apart = [function(part, *others) for part in (x[:, :5], x[:, 5:])]
    torch.testing.assert_close(h, torch.cat(apart, 1), rtol=1e-12, atol=1e-12)


@on_each(
    *(tiled(form, F32, sizes=channels(1, 1, 24)) for form in TIME_TILES),
    *(
        tiled(form, F16, sizes=channels(1, 1, 24))
        for form in ("rglru fused", "linear_scan", "wkv4 scan", "wkv4 serial")
    ),
)
def test_documents(case: Case) -> None:
    """Kernels: outputs, states and gradients are the definition's; one call without states, as in training."""
    check_matches_reference(packed(case, SHORT))
    check_as_alone(replace(case, law={"states": False}), EDGES)


@on_each(*(tiled(form, F32, sizes=channels(1, 1, 8)) for form in ("rglru fused", "wkv4 scan", "wkv4 serial")))
def test_documents_of_any_lengths(case: Case) -> None:
    """One document; all of one position; empty ones at both ends; some over many tiles and words."""
    for lengths in ((17,), (1,) * 9, (0, 0, 20, 0), LENGTHS):
        check_as_alone(case, lengths, torch.int64)


@on_each(tiled("wkv4 scan", F32, sizes=channels(1, 1, 8)), tiled("wkv4 serial", F32, sizes=channels(1, 1, 8)))
def test_documents_of_far_exponents(case: Case) -> None:
    """A document's keys, and its initial state, may be far from those of the one before in the same run of steps."""
    for first in (False, True):
        problem = packed(replace(case, initial_state=first), (3, 6, 2, 8)).draw()
        key = problem.inputs["k"]
        key[:, 3:9] += 200.0
        key[:, 11:] -= 150.0
        results = evaluate(problem, case.function)
        plain = evaluate(problem, case.operation.function("torch"), stabilizer=results.get("m"))
        allowed = {name: 2.0**-14 * max(float(x.abs().max()), 1.0) for name, x in plain.items()}
        assert_close(results, plain, allowed, "far exponents")


@on_each(*(interpreted(op, impl, F32, sizes=channels(1, 1, 8)) for op, impl in (("rglru", "fused"), ("wkv4", "scan"))))
def test_lengths_may_change(case: Case) -> None:
    """A later call of the same kinds makes an earlier one's request, with other lengths; so does a compiled one."""
    function = case.function
    compiled = torch.compile(lambda *x, **y: function(*x, **y), fullgraph=True, backend="aot_eager")
    for lengths in (SHORT, (0, 2, 9, 7, 1, 0)):
        problem = packed(case, lengths).draw()
        results, expected = (evaluate(problem, fn) for fn in (compiled, function))
        assert all(map(torch.equal, results.values(), expected.values())), lengths
        check_as_alone(case, lengths)


@on_each(*(tiled(form, F32, sizes=channels(1, 1, 8)) for form in ("rglru fused", "wkv4 scan", "wkv4 serial")))
def test_bad_bounds_write_nowhere_else(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of the engine, with initial states and without."""
    problem = packed(case, SHORT).draw()
    monkeypatch.setattr(channel_tensors, "check_documents", lambda *_: None)
    for state in (problem.state, None):
        with monkeypatch.context() as patch:
            check_writes_nowhere_else(replace(problem, state=state), case.function, patch)


def test_bad_bounds_are_refused() -> None:
    """What the host knows without reading from a GPU; the message names the argument."""
    rglru, wkv4 = (get_operation(op).function("torch") for op in ("rglru", "wkv4"))
    x, c = torch.randn(1, 7, 8), torch.ones(8)
    good = torch.tensor([0, 3, 7])
    for run in (lambda **y: rglru(x, x, x, c, **y), lambda **y: wkv4(x, x, c, c, **y)):
        with pytest.raises(ValueError, match=r"cu_seqlens must rise .* got 0, 5, 3, 7"):
            run(cu_seqlens=torch.tensor([0, 5, 3, 7]))
        with pytest.raises(ValueError, match=r"impl must be one of .*, naive, torch, .* with cu_seqlens, got step"):
            run(cu_seqlens=good, impl="step")
    with pytest.raises(ValueError, match=r"cu_seqlens takes documents .* a batch of 1, got a batch of 7"):
        rglru(*(x.transpose(0, 1),) * 3, c, cu_seqlens=good)
    with pytest.raises(ValueError, match=r"initial_state must have shape \(2, 8\), got \(1, 8\)"):
        rglru(x, x, x, c, cu_seqlens=good, initial_state=torch.zeros(1, 8))
    h, last = rglru(*(x[:, :0],) * 3, c, cu_seqlens=torch.tensor([0, 0, 0]), return_last_state=True)
    assert h.shape == (1, 0, 8) and torch.equal(last, torch.zeros(2, 8))


@pytest.mark.interpret
def test_long_rows_are_refused() -> None:
    """A row's marks are one word."""
    x, bounds = torch.zeros(1, 70, 8), torch.tensor([0, 70])
    config = ScanConfig(forward=tile(64, 1, 32), backward=tile(8, 4, 32))
    with pytest.raises(ValueError, match=r"config: forward\.block_i must be at most 32 with cu_seqlens, got 64"):
        get_operation("linear_scan").function("scan")(x, x, cu_seqlens=bounds, config=config)


@pytest.mark.interpret
def test_marks() -> None:
    """Bits of first and last positions, and each position's document, of documents over several words."""
    lengths = (0, 33, 31, 0, 0, 1, 300, 0)
    bounds, total = bounds_of(lengths), sum(lengths)
    first, last, start, end, number = mark_documents(bounds, SCAN_ROWS_FORWARD, total)
    expected = torch.repeat_interleave(torch.arange(8), torch.tensor(lengths))
    assert torch.equal(number, expected.int())
    assert torch.equal(start, bounds[expected]) and torch.equal(end, bounds[expected + 1])
    for words, at in ((first, start), (last, end - 1)):
        bits = (words[: -(-total // 32), None] >> torch.arange(32)) & 1
        assert torch.equal(bits.flatten()[:total], (at == torch.arange(total)).int())


REAL = channels(1, 1, 1024)


@on_each(
    *(
        on_gpu(op, impl, BF16, sizes=REAL)
        for op, impl in (("rglru", "fused"), ("rglru", "chunked"), ("rglru", "naive"))
    ),
    *(on_gpu("linear_scan", "scan", dtype, sizes=REAL) for dtype in (BF16, F32)),
    *(on_gpu("wkv4", impl, BF16, sizes=REAL) for impl in ("scan", "naive")),
    on_gpu("wkv4", "scan", F32, sizes=REAL),
    on_gpu("wkv4", "scan", BF16, label="serial", sizes=REAL, kwargs={"config": serial_config(BF16)}),
    on_gpu("wkv4", "scan", F32, label="serial", sizes=REAL, kwargs={"config": serial_config(F32)}),
)
def test_documents_on_gpu(case: Case) -> None:
    """As in the interpreter, with documents of many tiles."""
    check_matches_reference(packed(case, (17, 0, 1, 70, 0, 3, 700, 64, 129)))
    check_matches_reference(packed(replace(case, law={"states": False}), (600, 0, 500, 1), torch.int64))


@on_each(
    *(
        on_gpu(op, impl, BF16, label=label, sizes=channels(1, 1, width), drawn=drawn)
        for op, impl in (("rglru", "fused"), ("wkv4", "scan"))
        for label, width, drawn in (
            ("64 documents", 1024, (64, 65536, 100, 2000)),
            ("64 documents, serial", 4096, (64, 65536, 100, 2000)),
            ("10000 documents", 256, (10000, 65536, 0, 13)),
        )
    )
)
def test_many_documents_on_gpu(case: Case) -> None:
    """Padding decays the state, so states are not compared."""
    check_as_padded(case, {})


@on_each(
    on_gpu("rglru", "fused", BF16, sizes=REAL),
    on_gpu("wkv4", "scan", BF16, sizes=REAL),
    on_gpu("wkv4", "scan", BF16, label="serial", sizes=channels(1, 1, 4096)),
)
@pytest.mark.parametrize("how", ["graph", "compile"])
def test_lengths_may_change_on_gpu(case: Case, how: str) -> None:
    """A captured graph and a compiled call read cu_seqlens anew."""
    check_lengths_may_change(case, how, (17, 0, 1, 700, 0, 306), (0, 2, 640, 240, 142, 0))
