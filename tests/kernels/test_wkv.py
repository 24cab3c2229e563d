"""WKV, beside the laws: its definition, heavy and left-out tokens, and how programs pass states on."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from lrbench.kernels import resolve
from lrbench.kernels.wkv import OPERATION, exchange, launch
from lrbench.kernels.wkv.config import WkvConfig
from lrbench.tests.kernels import laws
from lrbench.tests.kernels.cases import (
    BF16,
    F16,
    F32,
    PORTABLE,
    SIZES,
    WKV_NAIVE,
    WKV_ROWS_FORWARD,
    WKV_SERIAL,
    WKVS,
    channels,
    on_each,
    on_gpu,
    portable,
    serial_config,
    tile,
    tiled,
)
from lrbench.tests.kernels.laws import Case
from lrbench.tests.kernels.words import check_shapes_share_words, give_words

SMALL = SIZES["interpret"][1]


def test_wkv_is_equation_16() -> None:
    """Peng et al., equation 16, written out for numbers; a token's own weight does not decay before its successor."""
    k, v, w, u = [0.3, -1.2, 0.8, 0.1], [1.0, -2.0, 0.5, 3.0], 0.7, 0.4
    expected = []
    for t in range(4):
        weights = [math.exp(-(t - 1 - i) * w + k[i]) for i in range(t)] + [math.exp(u + k[t])]
        expected.append(sum(a * b for a, b in zip(weights, v[: t + 1], strict=True)) / sum(weights))
    full = [torch.tensor(x, dtype=torch.float64).view(1, 4, 1) for x in (k, v)]
    y = resolve(OPERATION.recurrent)(*full, *(torch.tensor([x], dtype=torch.float64) for x in (w, u)))
    assert y.flatten().tolist() == pytest.approx(expected, rel=1e-12)


def test_late_tokens_keep_their_weights() -> None:
    """In float32; adding t w to k, as the source of the associative form does, rounds their differences away."""
    inputs = OPERATION.make_inputs(channels(1, 4096, 8), dtype=torch.float32)
    inputs["w"] = torch.full((8,), 10.0)
    exact = OPERATION.function("torch")(*(x.double() for x in inputs.values()))
    assert (OPERATION.function("torch")(*inputs.values()) - exact).abs().max() < 2e-6


FORMS = [*(portable(op, impl, F32) for op, impl in PORTABLE if op == "wkv4"), *(tiled(form, F32) for form in WKVS)]


@on_each(*FORMS, *(on_gpu("wkv4", impl, dtype) for impl in ("scan", "naive") for dtype in (F32, F16, BF16)))
def test_first_output_is_first_value(case: Case) -> None:
    """Nothing lies before the first token, so its output is its value, however small its weight is."""
    for ranges in (None, *laws.EXTREMES["wkv4"].values()):
        inputs = replace(case, ranges=ranges, sizes=channels(2, 3, 16)).draw().inputs
        v, y = inputs["v"], case.function(*inputs.values())
        assert (y[:, 0] - v[:, 0]).abs().max() <= 4 * torch.finfo(case.dtype).eps * v.abs().max()


@on_each(*FORMS)
def test_keys_of_minus_infinity_leave_tokens_out(case: Case) -> None:
    """Later tokens see what they would with a weight too small to count; the first tokens are left out by a law."""
    problem = replace(case, sizes=channels(2, 21, 16)).draw()
    small, none = ({**problem.inputs, "k": problem.inputs["k"].clone()} for _ in range(2))
    small["k"][:, 3:14], none["k"][:, 3:14] = -1e4, -torch.inf
    expected = laws.reference(replace(problem, inputs=small))
    results = laws.evaluate(replace(problem, inputs=none), case.function, stabilizer=expected["m"])
    bound = {name: 64 * torch.finfo(case.dtype).eps * float(x.abs().max()) for name, x in expected.items()}
    laws.assert_close(results, expected, bound, "wkv4 with tokens left out")


@pytest.mark.interpret
@pytest.mark.parametrize("how", [{}, {"keep": "weights"}, {"keep": "tokens"}], ids=str)
def test_rows_that_take_two_exponents(how: dict[str, Any]) -> None:
    """Rows so long that they take two exponents."""
    config = replace(WkvConfig(forward=tile(32, 2, 16), backward=tile(8, 2, 16), look=2), **how)
    laws.check_matches_reference(
        Case(op="wkv4", impl="scan", dtype=F32, sizes=channels(1, 128, 16), kwargs={"config": config})
    )


SHORT_CHAIN = WkvConfig(forward=tile(2, 2, 16), backward=tile(2, 4, 16), look=2)
SHORT_SERIAL = replace(WKV_SERIAL, forward=tile(2, 2, 16), backward=tile(2, 4, 16))
HEAVY = {
    "chain": ("scan", SHORT_CHAIN, 96, (1e-5, 1e-3)),
    "serial-chain": ("scan", SHORT_SERIAL, 96, (1e-5, 1e-3)),
    "serial-rows": ("scan", replace(SHORT_SERIAL, forward=tile(2, 4, 16)), 96, (1e-2, 2)),
    "serial for as long as a key weighs": ("scan", SHORT_SERIAL, 320, (0.3, 0.5)),
    "row": ("scan", WkvConfig(forward=tile(32, 2, 32), backward=tile(32, 2, 32), look=2), 128, (1e-2, 2)),
    "walk": ("naive", WKV_NAIVE, 192, (1e-5, 1e-3)),
    "walk for as long as a key weighs": ("naive", WKV_NAIVE, 320, (0.3, 0.5)),
}
"""What lowers exponents time and again -> implementation, launches, length and the range of the rates."""


@pytest.mark.interpret
@pytest.mark.parametrize(("name", "config", "seq_len", "rates"), HEAVY.values(), ids=HEAVY)
def test_a_heavy_first_key_keeps_its_weight(
    name: str, config: WkvConfig, seq_len: int, rates: tuple[float, float]
) -> None:
    """A first key of 100, above all others, keeps its weight: exponents are not rounded again and again on the way.

    What lowers them time and again is a chain of groups of two tiles, a row's steps, or one program's rows. Outputs,
    last state and, where memory is long, gradients lie within twice what a key's own rounding may do.
    """
    case = Case(op="wkv4", impl=name, dtype=F32, sizes=channels(1, seq_len, 16), kwargs={"config": config})
    problem = replace(case, ranges={"k": (-100, 99), "w": rates}, initial_state=False).draw()
    problem.inputs["k"][:, 0] = 100
    expected = laws.evaluate(problem.double(), OPERATION.function("torch"))
    results = laws.evaluate(problem, case.function, stabilizer=expected["m"])
    bound = {x: 200 * torch.finfo(F32).eps * float(expected[x].abs().max()) for x in expected}
    names = ["h", "C", "n"] if rates[1] > 1 else list(bound)
    laws.assert_close({x: results[x] for x in names}, expected, bound, "wkv4 behind a heavy key")


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("name", "config"),
    [("scan", WKV_ROWS_FORWARD), ("scan", WKV_SERIAL), ("naive", replace(WKV_NAIVE, forward=tile(8, 1, 32)))],
    ids=["scan", "serial", "walk"],
)
def test_a_key_of_2000_outweighs_all_others(name: str, config: WkvConfig) -> None:
    """A key of 2000 still outweighs all others when it has decayed by e^-1200, at rates that leave nothing of a float
    in a few steps: every output is its value."""
    k = torch.empty(1, 100, 16).uniform_(-100, 100, generator=torch.Generator().manual_seed(0))
    k[:, 0] = 2000
    v = torch.randn(1, 100, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = OPERATION.function(name)(k, v, torch.full((16,), 12.0), torch.zeros(16), config=config)
    assert (y - v[:, :1]).abs().max() <= 1e-5
    # So all of y's gradient reaches the first value. In float32 a key of 2000 is known to 2000 / 2^24.
    (dv,) = torch.autograd.grad(y.sum(), v)
    assert (dv[:, 0] - 100).abs().max() <= 100 * 2000 / 2**24
    assert dv[:, 1:].abs().max() == 0


@pytest.mark.interpret
@pytest.mark.parametrize("how", [{}, {"keep": "tokens", "serial": True}], ids=str)
def test_a_past_that_decayed_within_its_row(how: dict[str, Any]) -> None:
    """Keys of a row that end far below its first, and decay on top, leave a den that is small under the exponent; a row
    of rising keys behind it must weigh that, not the exponent alone."""
    config = replace(WkvConfig(forward=tile(32, 2, 32), backward=tile(8, 4, 32)), **how)
    case = Case(op="wkv4", impl="scan", dtype=F16, sizes=channels(1, 256, 32), kwargs={"config": config}, seed=1)
    laws.check_matches_reference(replace(case, ranges={"k": (-100, 100), "w": (1.0, 1.4)}))


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("name", "config", "seq_len", "rate"),
    [
        pytest.param("scan", SHORT_CHAIN, 288, 0.03, id="chain"),
        pytest.param("scan", SHORT_SERIAL, 288, 0.03, id="serial"),
        pytest.param("scan", SHORT_SERIAL, 288, 0.09, id="serial-fast"),
        pytest.param("naive", WKV_NAIVE, 512, 0.24, id="walk"),
    ],
)
def test_stale_exponents_are_renewed(name: str, config: WkvConfig, seq_len: int, rate: float) -> None:
    """A slow rate decays a past that outweighs all that follows; at the last step a token weighs as much as it."""
    k, v = torch.full((1, seq_len, 16), -1e4), torch.ones(1, seq_len, 16)
    k[:, 0], v[:, 0] = 100.0, 3.0
    k[:, -1] = 100 - (seq_len - 2) * rate
    y = OPERATION.function(name)(k, v, torch.full((16,), rate), torch.zeros(16), config=config)
    assert (y[:, :-1] - 3.0).abs().max() < 1e-5
    assert (y[:, -1] - 2.0).abs().max() < 1e-3


@pytest.mark.interpret
def test_sums_over_a_long_walk_do_not_drift() -> None:
    """The gradient of u, a sum of 1024 terms of one sign, is as exact as its terms are."""
    k, w, u = torch.zeros(1, 1024, 16), torch.full((16,), 2.0), torch.zeros(16, requires_grad=True)
    # Values change their sign at every step, and so a token's is on one side of its past's.
    v = torch.rand(1, 1024, 16, generator=torch.Generator().manual_seed(0)) + 1
    v[:, ::2] *= -1
    dy = v.sign()
    walked = OPERATION.function("naive")(k, v, w, u, config=WKV_NAIVE)
    (du,) = torch.autograd.grad(walked, u, dy)
    double = [x.detach().double() for x in (k, v, w)]
    wide = u.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(OPERATION.function("torch")(*double, wide), wide, dy.double())
    assert (du - exact).abs().max() <= 2 * torch.finfo(torch.float32).eps * exact.abs().max()


@pytest.mark.interpret
def test_calls_leave_words_zero_for_the_next() -> None:
    """Equal calls in a row, which share buffers, give equal results."""
    case = Case(op="wkv4", impl="scan", dtype=F32, sizes=SMALL, kwargs={"config": WKV_ROWS_FORWARD})
    first, *others = (laws.evaluate(case.draw(), case.function) for _ in range(4))
    assert all(torch.equal(first[name], x) for other in others for name, x in other.items())
    kept = [exchange._kept[key] for key in exchange._kept if key[-1] == SMALL["channels"]]
    assert kept and all(not words.any() for words, _ in kept)
    assert any(spare.any() for _, spare in kept)


@pytest.mark.interpret
@pytest.mark.parametrize("seq_len", [3, 8, 16, 19, 27])
def test_words_hold_the_states_behind_their_tiles(seq_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile, two, three and more, the last one whole or ragged; what was left in the words is another call's."""
    problem = Case(op="wkv4", impl="scan", dtype=F32, sizes=channels(2, seq_len, 24)).draw()
    (k, v, w, u), fn = problem.inputs.values(), OPERATION.function("scan")
    keywords = {"initial_state": problem.state, "return_last_state": True, "config": WKV_SERIAL}
    expected, _ = fn(k, v, w, u, **keywords)
    with monkeypatch.context() as patch:
        given = give_words(launch, 7, patch)
        assert torch.equal(fn(k, v, w, u, **keywords)[0], expected)
    ((words, others),) = given
    assert (words[:, 3] == 7).all() and (others[:, 3] == 6).all()
    steps = WKV_SERIAL.forward.steps
    num, den, top = words[:, :3].contiguous().view(torch.float32).view(-1, 2, 24, 3).unbind(-1)
    # A ragged tile, behind which there is none, decays its state as a whole one does.
    for index in range(seq_len // steps):
        whole = (index + 1) * steps
        _, last = fn(k[:, :whole].contiguous(), v[:, :whole].contiguous(), w, u, **keywords)
        # The exponent is each form's own choice.
        scale = (top[index] - last[2]).exp()
        torch.testing.assert_close(scale * num[index], last[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(scale * den[index], last[1], rtol=1e-5, atol=1e-5)


@pytest.mark.interpret
def test_serial_calls_of_different_shapes_share_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def outputs(sizes: dict[str, int]) -> list[torch.Tensor]:
        problem = Case(op="wkv4", impl="scan", dtype=F32, sizes=sizes).draw()
        return [OPERATION.function("scan")(*problem.inputs.values(), initial_state=problem.state, config=WKV_SERIAL)]

    check_shapes_share_words(launch, outputs, monkeypatch, launches=1)


@pytest.mark.interpret
@pytest.mark.parametrize("den", [1e-30, 1e-37, 1e-40, 0.0])
@pytest.mark.parametrize(("name", "config"), [("scan", WKV_ROWS_FORWARD), ("scan", WKV_SERIAL), ("naive", WKV_NAIVE)])
def test_a_state_of_tiny_weight_does_not_overflow(name: str, config: WkvConfig, den: float) -> None:
    """However small den is, nothing overflows; below float32's normal numbers there is no state."""
    k, v = torch.full((1, 24, 16), -5.0), torch.ones(1, 24, 16)
    v[:, 1:] = 3.0
    state = tuple(torch.full((1, 16), x) for x in (2 * den, den, 80.0))
    y = OPERATION.function(name)(k, v, torch.full((16,), 0.05), torch.zeros(16), initial_state=state, config=config)
    assert torch.isfinite(y).all()
    assert torch.equal(y[:, 0], v[:, 0]) == (den < 1e-37)


WARPLESS = replace(tile(4, 2, 16), num_warps=0)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("scan", {"forward": tile(4, 3, 16)}, "forward.block_o must be"),
        ("scan", {"forward": tile(4, 2, 8)}, "look * forward.block_c must be at least the 32 threads, got 2 * 8"),
        ("scan", {"keep": "all"}, "keep must be one of nothing, tokens, weights, got all"),
        ("scan", {"look": 24}, "look must be a power of two >= 2, got 24"),
        ("scan", {"forward": WARPLESS, "serial": True}, "forward.num_warps must be a power of two, got 0"),
        ("naive", {"forward": tile(4, 1, 16)}, "backward.block_o must be 1 for a walk, got 2"),
        ("scan", {"forward": tile(4, 1, 16)}, "forward.block_o must be at least 2 for a scan, got 1"),
    ],
)
def test_bad_launches(name: str, change: dict[str, Any], why: str) -> None:
    inputs = Case(op="wkv4", impl=name, dtype=F32, sizes=SMALL).draw().inputs
    config = replace(WkvConfig(forward=tile(4, 2, 16), backward=tile(4, 2, 16), look=2), **change)
    with pytest.raises(ValueError, match=re.escape(f"config: {why}")):
        OPERATION.function(name)(*inputs.values(), config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_serial_launches_of_inference_on_gpu(dtype: torch.dtype) -> None:
    """Launches whose states pass from tile to tile, without what training keeps: equal bits, and what others give."""
    config, fn = serial_config(dtype), OPERATION.function("scan")
    problem = Case(op="wkv4", impl="scan", dtype=dtype, sizes=channels(2, 1100, 264), device="cuda").draw()
    with torch.no_grad():
        outputs = [fn(*problem.inputs.values(), config=config) for _ in range(20)]
        assert all(torch.equal(outputs[0], other) for other in outputs)
        y = fn(*problem.inputs.values())
    assert (y - outputs[0]).abs().max() <= 16 * torch.finfo(dtype).eps * y.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wild_keys_over_a_long_sequence_on_gpu(dtype: torch.dtype) -> None:
    """Keys from -100 to 100 over 65,536 steps: outputs, last state and gradients against the portable form in float64,
    by the bound that the portable form's own float32 error sets, and the exponents' size."""
    ranges, sizes = laws.EXTREMES["wkv4"]["wild keys"], channels(1, 65536, 64)
    case = Case(op="wkv4", impl="scan", dtype=dtype, sizes=sizes, ranges=ranges, initial_state=False, device="cuda")
    problem = case.draw()
    portable = OPERATION.function("torch")
    expected = laws.evaluate(problem.double(), portable)
    low = laws.evaluate(problem, portable, stabilizer=expected["m"])
    results = laws.evaluate(problem, OPERATION.function("scan"), stabilizer=expected["m"])
    eps = torch.finfo(dtype).eps
    for name, exact in expected.items():
        if name != "m":
            relative = eps + 100 * torch.finfo(torch.float32).eps
            bound = 2 * (low[name] - exact).abs().max() + relative * exact.abs().max()
            assert (results[name] - exact).abs().max() <= bound, name
