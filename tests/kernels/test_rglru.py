"""RG-LRU and the linear scan, beside the laws: definitions, closed gates, and how programs pass states on."""

from __future__ import annotations

import math
import re

import pytest
import torch

from lrbench.kernels import resolve
from lrbench.kernels.common.channels import TileConfig
from lrbench.kernels.common.spec import Operation
from lrbench.kernels.rglru import LINEAR_SCAN, RGLRU, launch
from lrbench.kernels.rglru.config import ScanConfig
from lrbench.tests.kernels import laws
from lrbench.tests.kernels.cases import (
    BF16,
    F16,
    F32,
    SCAN_ROWS_FORWARD,
    SIZES,
    channels,
    on_each,
    on_gpu,
    portable,
    tile,
    tiled,
)
from lrbench.tests.kernels.laws import Case
from lrbench.tests.kernels.words import check_shapes_share_words, give_words

each_one_pass = pytest.mark.parametrize(
    ("operation", "name"), [(RGLRU, "fused"), (LINEAR_SCAN, "scan")], ids=["rglru", "linear_scan"]
)


def test_rglru_is_griffins_recurrence() -> None:
    """Equations 1 to 4 of De et al. written out for numbers, with a = sigma(Lambda) and c = -Lambda."""
    x, r, i, lam = 0.7, -0.3, 1.1, 2.5
    h = 0.4
    for _ in range(3):
        gate_r, gate_i, base = (1 / (1 + math.exp(-z)) for z in (r, i, lam))
        a = base ** (8 * gate_r)
        h = a * h + math.sqrt(1 - a * a) * gate_i * x
    full = [torch.full((1, 3, 1), value, dtype=torch.float64) for value in (x, r, i)]
    c = torch.tensor([-lam], dtype=torch.float64)
    state = torch.full((1, 1), 0.4, dtype=torch.float64)
    out = resolve(RGLRU.recurrent)(*full, c, initial_state=state)
    assert out[0, -1, 0].item() == pytest.approx(h, rel=1e-12)


@on_each(
    portable("rglru", "torch", F32, sizes=channels(2, 9, 8)),
    *(tiled("rglru fused", dtype, sizes=channels(2, 9, 8)) for dtype in (F16, F32)),
    *(
        on_gpu("rglru", impl, dtype, sizes=channels(2, 9, 8), slow=impl != "fused")
        for impl in ("fused", "chunked", "naive")
        for dtype in (BF16, F16, F32)
    ),
)
def test_a_closed_gate_keeps_the_state(case: Case) -> None:
    """Pre-activations of minus infinity, a mask, leave state and gradients as they are."""
    problem = case.draw()
    problem.inputs["r"].fill_(-math.inf)
    *inputs, state = (x.requires_grad_() for x in (*problem.inputs.values(), *(problem.state or ())))
    h, last = case.function(*inputs, initial_state=state, return_last_state=True)
    assert torch.equal(last, state)
    assert torch.equal(h, state[:, None].expand_as(h).to(case.dtype))
    *gradients, of_state = torch.autograd.grad(last.sum(), [*inputs, state])
    assert all(not g.any() for g in gradients)
    assert torch.equal(of_state, torch.ones_like(state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("c", [-60.0, 100.0, 900.0, 5000.0])
def test_a_decay_rate_of_any_size_stays_right(c: float, dtype: torch.dtype) -> None:
    """softplus(c) is c for large c and exp(c) for c far below 0; a gate that is nearly shut keeps a inside (0, 1).

    There sqrt(1 - a^2) as it stands would be 0, and h with it.
    """
    x, r, i = (torch.full((1, 1, 2), value, dtype=dtype) for value in (1.0, -30.0, 0.0))
    rate = torch.full((2,), c, dtype=dtype, requires_grad=True)
    h = RGLRU.function("torch")(x, r, i, rate)
    exponent = 8.0 * (max(c, 0.0) + math.log1p(math.exp(-abs(c)))) * math.exp(-30.0) / (1.0 + math.exp(-30.0))
    expected = 0.5 * math.sqrt(-math.expm1(-2.0 * exponent))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(h, torch.full_like(h, expected), rtol=tolerance, atol=0.0)
    (gradient,) = torch.autograd.grad(h.sum(), rate)
    # d h / d c = h / 2 of d log(exponent) / d c, to the first order in the exponent, which is below 1e-8.
    slope = math.exp(min(c, 0.0)) / (1.0 + math.exp(-abs(c))) / (max(c, 0.0) + math.log1p(math.exp(-abs(c))))
    torch.testing.assert_close(gradient, torch.full_like(gradient, 0.5 * expected * slope), rtol=1e-4, atol=0.0)


@pytest.mark.interpret
@each_one_pass
@pytest.mark.parametrize("seq_len", [9, 16, 27])
def test_words_hold_the_states_behind_their_tiles(
    operation: Operation, name: str, seq_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward too, where tiles are taken from the end of time; what was left in the words is another call's."""
    fn, config = operation.function(name), SCAN_ROWS_FORWARD
    sizes = {"batch": 2, "seq_len": seq_len, "channels": 24}
    inputs = operation.make_inputs(sizes, dtype=torch.float32)
    dh = torch.randn(2, seq_len, 24, generator=torch.Generator().manual_seed(1))

    def run(start: int, stop: int, *, backward: bool = True) -> list[torch.Tensor]:
        """Return the last state of part of the sequence and, backward, the gradient of its initial state."""
        part = [x[:, start:stop].contiguous() if x.dim() == 3 else x for x in inputs.values()]
        state = torch.zeros(2, 24, requires_grad=True)
        h, last = fn(*part, initial_state=state, return_last_state=True, config=config)
        return [last.detach(), *(torch.autograd.grad((h * dh[:, start:stop]).sum(), state) if backward else ())]

    with monkeypatch.context() as patch:
        given = give_words(launch, 7, patch)
        results = run(0, seq_len)
    last, gradient = whole = run(0, seq_len)
    assert all(map(torch.equal, results, whole))
    steps = config.forward.steps
    assert steps == config.backward.steps
    cuts = range(steps, seq_len, steps)
    behind = [*(run(0, stop, backward=False)[0] for stop in cuts), last]
    before = [*(run(start, seq_len)[1] for start in reversed(cuts)), gradient]
    for (words, others), states in zip(given, (behind, before), strict=True):
        assert (words[:, 1] == 7).all() and (others[:, 1] == 6).all()
        assert torch.equal(words[:, 0].view(torch.float32).view(len(states), 2, 24), torch.stack(states))


@pytest.mark.interpret
def test_calls_of_different_shapes_share_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def results(sizes: dict[str, int]) -> list[torch.Tensor]:
        case = Case(op="rglru", impl="fused", dtype=F32, sizes=sizes, kwargs={"config": SCAN_ROWS_FORWARD})
        return [*laws.evaluate(case.draw(), case.function).values()]

    check_shapes_share_words(launch, results, monkeypatch, launches=2)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("forward", "backward", "why"),
    [
        (tile(4, 3, 16), tile(4, 2, 16), "forward.block_o must be a power of two, got 3"),
        (tile(4, 2, 16), tile(32, 1, 16), "forward tiles must hold whole rows of the backward pass (32 steps), got 8"),
        (tile(32, 1, 16), tile(32, 1, 16), "chunks must hold whole rows of the backward pass (32 steps), got 16 steps"),
    ],
)
def test_bad_launches(forward: TileConfig, backward: TileConfig, why: str) -> None:
    inputs = RGLRU.make_inputs(SIZES["interpret"][1], dtype=torch.float32)
    config = ScanConfig(forward=forward, backward=backward)
    with pytest.raises(ValueError, match=re.escape(f"config: {why}")):
        RGLRU.function("chunked")(*inputs.values(), chunk_size=16, config=config)


@pytest.mark.gpu
@each_one_pass
def test_more_programs_than_fit_at_once_on_gpu(operation: Operation, name: str) -> None:
    """A GPU runs only some of these programs at once, so a program may wait only for one that already runs."""
    sizes = {"batch": 1, "seq_len": 200_000, "channels": 1032}
    inputs = operation.make_inputs(sizes, dtype=torch.bfloat16, device="cuda")
    whole = operation.function(name)(*inputs.values())
    naive = operation.function("naive")(*inputs.values())
    torch.testing.assert_close(whole.float(), naive.float(), rtol=2**-6, atol=2**-6)
