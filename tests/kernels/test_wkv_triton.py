"""The laws for WKV's kernels: in the interpreter on small tiles, and on a GPU at real sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lrbench.kernels import resolve
from lrbench.kernels.common.channels import TileConfig
from lrbench.kernels.wkv import OPERATION, exchange, launch
from lrbench.kernels.wkv.config import WkvConfig, select_config
from lrbench.tests.kernels import channel_laws, laws
from lrbench.tests.kernels.channel_laws import EXTREMES
from lrbench.tests.kernels.words import check_shapes_share_words, give_words

interpret = pytest.mark.interpret
gpu = pytest.mark.gpu

SMALL = {"batch": 2, "seq_len": 19, "channels": 24}


def tile(block_i: int, block_o: int, block_c: int) -> TileConfig:
    return TileConfig(block_i=block_i, block_o=block_o, block_c=block_c, num_warps=1)


LONGER_ROWS_FORWARD = WkvConfig(forward=tile(4, 2, 16), backward=tile(2, 4, 32), look=2)
LONGER_ROWS_BACKWARD = WkvConfig(forward=tile(2, 2, 32), backward=tile(16, 2, 16), reload=False, look=4)
"""Tiles so small that 19 steps are several of them, the last one ragged; 24 channels leave a block half empty."""
SERIAL = WkvConfig(forward=tile(4, 2, 16), backward=tile(2, 4, 32), reload=False, hold=True, serial=True, look=2)
WALKED = WkvConfig(forward=tile(4, 1, 32), backward=tile(8, 1, 32))
IMPLEMENTATIONS = [
    ("scan", LONGER_ROWS_FORWARD), ("scan", LONGER_ROWS_BACKWARD), ("scan", SERIAL), ("naive", WALKED),
]  # fmt: skip
each_implementation = pytest.mark.parametrize(
    ("name", "config"), IMPLEMENTATIONS, ids=["rows-forward", "rows-backward", "serial", "walk"]
)


def function(name: str) -> Any:
    return OPERATION.function(OPERATION.implementation(name))


@interpret
@each_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_matches_reference(name: str, config: WkvConfig, dtype: torch.dtype) -> None:
    channel_laws.check_matches_reference(
        OPERATION, function(name), dtype=dtype, device="cpu", sizes=SMALL, config=config
    )


@interpret
@each_implementation
def test_lengths_without_a_state(name: str, config: WkvConfig) -> None:
    for seq_len in (1, 8):
        channel_laws.check_matches_reference(
        OPERATION,
            function(name), dtype=torch.float16, device="cpu", sizes={**SMALL, "seq_len": seq_len},
            initial_state=False, config=config,
        )  # fmt: skip


@interpret
@pytest.mark.parametrize("how", [{}, {"reload": False}, {"hold": True}], ids=str)
def test_rows_of_two_runs(how: dict[str, Any]) -> None:
    """Rows so long that they take two exponents."""
    config = replace(WkvConfig(forward=tile(32, 2, 16), backward=tile(8, 2, 16), look=2), **how)
    channel_laws.check_matches_reference(
        OPERATION,
        function("scan"), dtype=torch.float32, device="cpu", sizes={"batch": 1, "seq_len": 128, "channels": 16},
        config=config,
    )  # fmt: skip


@interpret
@pytest.mark.parametrize("extreme", EXTREMES["wkv4"])
def test_extremes(extreme: str) -> None:
    for name, config in (("scan", LONGER_ROWS_FORWARD), ("scan", SERIAL), ("naive", WALKED)):
        channel_laws.check_matches_reference(
        OPERATION,
            function(name), dtype=torch.float32, device="cpu", sizes={**SMALL, "batch": 1},
            ranges=EXTREMES["wkv4"][extreme], config=config,
        )  # fmt: skip


@interpret
@pytest.mark.parametrize(
    ("name", "config", "seq_len", "rates"),
    [
        ("scan", WkvConfig(forward=tile(2, 2, 16), backward=tile(2, 4, 16), look=2), 96, (1e-5, 1e-3)),
        ("scan", replace(SERIAL, forward=tile(2, 2, 16), backward=tile(2, 4, 16)), 96, (1e-5, 1e-3)),
        ("scan", replace(SERIAL, forward=tile(2, 4, 16), backward=tile(2, 4, 16)), 96, (1e-2, 2)),
        ("scan", replace(SERIAL, forward=tile(2, 2, 16), backward=tile(2, 4, 16)), 320, (0.3, 0.5)),
        ("scan", WkvConfig(forward=tile(32, 2, 32), backward=tile(32, 2, 32), look=2), 128, (1e-2, 2)),
        ("naive", WALKED, 192, (1e-5, 1e-3)),
        ("naive", WALKED, 320, (0.3, 0.5)),
    ],
    ids=[
        "chain",
        "serial-chain",
        "serial-rows",
        "serial for as long as a key weighs",
        "row",
        "walk",
        "walk for as long as a key weighs",
    ],
)
def test_heavy_past(name: str, config: WkvConfig, seq_len: int, rates: tuple[float, float]) -> None:
    """What lowers exponents time and again: a chain of groups of two tiles, a row's steps, a walk's rows."""
    channel_laws.check_heavy_past(
        function(name), device="cpu", sizes={"batch": 1, "seq_len": seq_len, "channels": 16}, rates=rates,
        config=config,
    )  # fmt: skip


@interpret
@pytest.mark.parametrize(
    ("name", "config"),
    [("scan", LONGER_ROWS_FORWARD), ("scan", SERIAL), ("naive", replace(WALKED, forward=tile(8, 1, 32)))],
    ids=["scan", "serial", "walk"],
)
def test_a_past_beyond_all_others(name: str, config: WkvConfig) -> None:
    """A key of 2000 still outweighs all others when it has decayed by e^-1200, at rates that leave nothing of a float
    in a few steps: every output is its value."""
    k = torch.empty(1, 100, 16).uniform_(-100, 100, generator=torch.Generator().manual_seed(0))
    k[:, 0] = 2000
    v = torch.randn(1, 100, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = function(name)(k, v, torch.full((16,), 12.0), torch.zeros(16), config=config)
    assert (y - v[:, :1]).abs().max() <= 1e-5
    # So all of y's gradient reaches the first value.
    (dv,) = torch.autograd.grad(y.sum(), v)
    assert (dv[:, 0] - 100).abs().max() <= 1e-3
    assert dv[:, 1:].abs().max() == 0


@interpret
@pytest.mark.parametrize("how", [{}, {"hold": True, "serial": True}], ids=str)
def test_a_past_that_decayed_within_its_row(how: dict[str, Any]) -> None:
    """Keys of a row that end far below its first, and decay on top, leave a den that is small under the exponent; a row
    of rising keys behind it must weigh that, not the exponent alone."""
    channel_laws.check_matches_reference(
        OPERATION,
        function("scan"), dtype=torch.float16, device="cpu", sizes={"batch": 1, "seq_len": 256, "channels": 32},
        ranges={"k": (-100, 100), "w": (1.0, 1.4)}, seed=1,
        config=replace(WkvConfig(forward=tile(32, 2, 32), backward=tile(8, 4, 32)), **how),
    )  # fmt: skip


@interpret
@pytest.mark.parametrize(
    ("name", "config", "seq_len", "rate"),
    [
        ("scan", WkvConfig(forward=tile(2, 2, 16), backward=tile(2, 2, 16), look=2), 288, 0.03),
        ("scan", replace(SERIAL, forward=tile(2, 2, 16), backward=tile(2, 2, 16)), 288, 0.03),
        ("scan", replace(SERIAL, forward=tile(2, 2, 16), backward=tile(2, 2, 16)), 288, 0.09),
        ("naive", WALKED, 512, 0.24),
    ],
    ids=["chain", "serial", "serial-fast", "walk"],
)
def test_stale_exponents_are_renewed(name: str, config: WkvConfig, seq_len: int, rate: float) -> None:
    """A slow rate decays a past that outweighs all that follows; at the last step a token weighs as much as it."""
    k, v = torch.full((1, seq_len, 16), -1e4), torch.ones(1, seq_len, 16)
    k[:, 0], v[:, 0] = 100.0, 3.0
    k[:, -1] = 100 - (seq_len - 2) * rate
    y = function(name)(k, v, torch.full((16,), rate), torch.zeros(16), config=config)
    assert (y[:, :-1] - 3.0).abs().max() < 1e-5
    assert (y[:, -1] - 2.0).abs().max() < 1e-3


@interpret
def test_sums_over_a_long_walk_do_not_drift() -> None:
    """The gradient of u, a sum of 1024 terms of one sign, is as exact as its terms are."""
    T, C = 1024, 16
    k, w, u = torch.zeros(1, T, C), torch.full((C,), 2.0), torch.zeros(C, requires_grad=True)
    # Values change their sign at every step, and so a token's is on one side of its past's.
    v = torch.rand(1, T, C, generator=torch.Generator().manual_seed(0)) + 1
    v[:, ::2] *= -1
    dy = v.sign()
    walked = function("naive")(k, v, w, u, config=WALKED)
    (du,) = torch.autograd.grad(walked, u, dy)
    double = [x.detach().double() for x in (k, v, w)]
    wide = u.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(function("torch")(*double, wide), wide, dy.double())
    assert (du - exact).abs().max() <= 2 * torch.finfo(torch.float32).eps * exact.abs().max()


@interpret
@pytest.mark.parametrize("config", [LONGER_ROWS_FORWARD, SERIAL], ids=["rows-forward", "serial"])
def test_split_equals_whole(config: WkvConfig) -> None:
    channel_laws.check_matches_reference(
        OPERATION, function("scan"), dtype=torch.float16, device="cpu", sizes=SMALL, splits=(1, 12), config=config
    )


@interpret
@pytest.mark.parametrize(("name", "config"), [("scan", LONGER_ROWS_FORWARD), ("scan", SERIAL), ("naive", WALKED)])
def test_what_holds_of_every_form(name: str, config: WkvConfig) -> None:
    fn, keywords = function(name), {"dtype": torch.float32, "device": "cpu", "config": config}
    channel_laws.check_first_output_is_first_value(fn, **keywords)
    channel_laws.check_left_out_tokens(fn, **keywords)
    channel_laws.check_state_scale_is_free(fn, **keywords)


@interpret
def test_batch_invariant() -> None:
    channel_laws.check_batch_invariant(
        OPERATION,
        function("scan"),
        dtype=torch.float32,
        device="cpu",
        sizes={**SMALL, "seq_len": 9},
        config=LONGER_ROWS_FORWARD,
    )


@interpret
def test_calls_leave_words_zero_for_the_next() -> None:
    """Equal calls in a row, which share buffers, give equal results."""
    problem = channel_laws.make_problem(OPERATION, SMALL, dtype=torch.float32, device="cpu", num_siblings=0)
    first, *others = (laws.evaluate(problem, function("scan"), config=LONGER_ROWS_FORWARD) for _ in range(4))
    assert all(torch.equal(first[name], x) for other in others for name, x in other.items())
    kept = [exchange._kept[key] for key in exchange._kept if key[-1] == SMALL["channels"]]
    assert kept and all(not words.any() for words, _ in kept)
    assert any(spare.any() for _, spare in kept)


@interpret
@pytest.mark.parametrize("seq_len", [3, 8, 16, 19, 27])
def test_words_hold_the_states_behind_their_tiles(seq_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile, two, three and more, the last one whole or ragged; what was left in the words is another call's."""
    problem = channel_laws.make_problem(
        OPERATION, {"batch": 2, "seq_len": seq_len, "channels": 24}, dtype=torch.float32, device="cpu", num_siblings=0
    )
    (k, v, w, u), fn = problem.inputs.values(), function("scan")
    keywords = {"initial_state": problem.state, "return_last_state": True, "config": SERIAL}
    expected, _ = fn(k, v, w, u, **keywords)
    with monkeypatch.context() as patch:
        given = give_words(launch, 7, patch)
        assert torch.equal(fn(k, v, w, u, **keywords)[0], expected)
    ((words, others),) = given
    assert (words[:, 3] == 7).all() and (others[:, 3] == 6).all()
    steps = SERIAL.forward.steps
    num, den, top = words[:, :3].contiguous().view(torch.float32).view(-1, 2, 24, 3).unbind(-1)
    # A ragged tile, behind which there is none, decays its state as a whole one does.
    for tile in range(seq_len // steps):
        whole = (tile + 1) * steps
        _, last = fn(k[:, :whole].contiguous(), v[:, :whole].contiguous(), w, u, **keywords)
        # The exponent is each form's own choice.
        scale = (top[tile] - last[2]).exp()
        torch.testing.assert_close(scale * num[tile], last[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(scale * den[tile], last[1], rtol=1e-5, atol=1e-5)


@interpret
def test_serial_calls_of_different_shapes_share_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def outputs(sizes: dict[str, int]) -> list[torch.Tensor]:
        problem = channel_laws.make_problem(OPERATION, sizes, dtype=torch.float32, device="cpu", num_siblings=0)
        return [function("scan")(*problem.inputs.values(), initial_state=problem.state, config=SERIAL)]

    check_shapes_share_words(launch, outputs, monkeypatch, launches=1)


@interpret
@pytest.mark.parametrize("den", [1e-30, 1e-37, 1e-40, 0.0])
@pytest.mark.parametrize(("name", "config"), [("scan", LONGER_ROWS_FORWARD), ("scan", SERIAL), ("naive", WALKED)])
def test_a_state_that_is_hardly_there(name: str, config: WkvConfig, den: float) -> None:
    """However small den is, nothing overflows; below float32's normal numbers there is no state."""
    k, v = torch.full((1, 24, 16), -5.0), torch.ones(1, 24, 16)
    v[:, 1:] = 3.0
    state = tuple(torch.full((1, 16), x) for x in (2 * den, den, 80.0))
    y = function(name)(k, v, torch.full((16,), 0.05), torch.zeros(16), initial_state=state, config=config)
    assert torch.isfinite(y).all()
    assert torch.equal(y[:, 0], v[:, 0]) == (den < 1e-37)


@interpret
def test_bad_input() -> None:
    for name in ("scan", "naive"):
        channel_laws.check_bad_input(OPERATION, function(name), dtype=torch.float32, device="cpu")
    fn, make_inputs = function("scan"), resolve(OPERATION.inputs)
    odd = make_inputs({**SMALL, "channels": 20}, dtype=torch.float32, device="cpu", seed=0)
    with pytest.raises(ValueError, match="channels must be a multiple of 8, got 20"):
        fn(*odd.values())
    double = make_inputs(SMALL, dtype=torch.float64, device="cpu", seed=0)
    with pytest.raises(ValueError, match="k must be one of float32, float16, bfloat16, got float64"):
        fn(*double.values())
    good = make_inputs(SMALL, dtype=torch.float32, device="cpu", seed=0)
    with pytest.raises(ValueError, match="a decoding step takes one token: seq_len must be 1, got 19"):
        resolve(OPERATION.implementation("scan").step_call)(*good.values())
    with pytest.raises(ValueError, match=r"config: forward\.block_o must be a power of two, got 3"):
        fn(*good.values(), config=WkvConfig(forward=tile(4, 3, 16), backward=tile(4, 2, 16)))
    with pytest.raises(
        ValueError, match=r"config: look \* forward\.block_c must be at least the 32 threads, got 2 \* 8"
    ):
        fn(*good.values(), config=WkvConfig(forward=tile(4, 2, 8), backward=tile(4, 2, 16), look=2))
    with pytest.raises(ValueError, match=r"config: look must be a power of two >= 2, got 24"):
        fn(*good.values(), config=replace(LONGER_ROWS_FORWARD, look=24))
    with pytest.raises(ValueError, match=r"config: backward\.block_o must be 1 for a walk, got 2"):
        function("naive")(*good.values(), config=WkvConfig(forward=tile(4, 1, 16), backward=tile(4, 2, 16)))
    with pytest.raises(ValueError, match=r"config: forward\.block_o must be at least 2 for a scan, got 1"):
        fn(*good.values(), config=WALKED)


@interpret
def test_steps_continue_a_sequence() -> None:
    step = resolve(OPERATION.implementation("scan").step_call)
    channel_laws.check_steps(OPERATION, step, dtype=torch.float32, device="cpu", sizes=SMALL, prefix=16)


@interpret
def test_gradients_of_some_arguments() -> None:
    """What needs no gradient gets none, second derivatives are refused, and no_grad keeps nothing."""
    problem = channel_laws.make_problem(
        OPERATION, {"batch": 1, "seq_len": 9, "channels": 16}, dtype=torch.float32, device="cpu", num_siblings=0
    )
    fn = function("scan")
    k, v, w, u = problem.inputs.values()
    y, last = fn(
        k, v, w.requires_grad_(), u, initial_state=problem.state, return_last_state=True, config=LONGER_ROWS_FORWARD
    )
    assert not last[2].requires_grad
    (dw,) = torch.autograd.grad(y.square().sum() + last[0].sum(), w, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dw.sum().backward()
    with torch.no_grad():
        assert not fn(k, v, w, u, config=LONGER_ROWS_FORWARD).requires_grad


# Every number of channels is compiled for on its own: the laws share a few.
GPU_SIZES = [
    {"batch": 8, "seq_len": 2048, "channels": 768},
    {"batch": 1, "seq_len": 4099, "channels": 256},
    {"batch": 3, "seq_len": 1000, "channels": 264},
    {"batch": 2, "seq_len": 129, "channels": 8},
]


@gpu
@pytest.mark.parametrize("name", ["scan", "naive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", GPU_SIZES, ids=lambda sizes: "x".join(map(str, sizes.values())))
def test_matches_reference_on_gpu(name: str, sizes: dict[str, int], dtype: torch.dtype) -> None:
    channel_laws.check_matches_reference(OPERATION, function(name), dtype=dtype, device="cuda", sizes=sizes)


@gpu
@pytest.mark.parametrize("name", ["scan", "naive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_laws_on_gpu(name: str, dtype: torch.dtype) -> None:
    fn, keywords = function(name), {"dtype": dtype, "device": "cuda"}
    sizes = {"batch": 2, "seq_len": 700, "channels": 264}
    channel_laws.check_matches_reference(OPERATION, fn, sizes=sizes, splits=(100, 101), **keywords)
    channel_laws.check_batch_invariant(OPERATION, fn, sizes=sizes, exact=False, **keywords)
    for ranges in EXTREMES["wkv4"].values():
        channel_laws.check_matches_reference(OPERATION, fn, sizes=sizes, ranges=ranges, **keywords)
    channel_laws.check_first_output_is_first_value(fn, **keywords)
    channel_laws.check_bad_input(OPERATION, fn, **keywords)
    for length in (1, 2, 31, 33, 127, 128):
        channel_laws.check_matches_reference(
            OPERATION, fn, sizes={**sizes, "seq_len": length}, initial_state=False, **keywords
        )


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_serial_launches_on_gpu(dtype: torch.dtype) -> None:
    """Launches whose states pass from tile to tile: laws, extremes and splits, with and without what training keeps."""
    items = 4 if dtype == torch.float32 else 2
    chosen = select_config(
        strategy="scan", capability=(9, 0), item_bytes=items, batch=8, channels=768, saving=True
    )  # fmt: skip
    config = replace(chosen, hold=True, serial=True)
    fn, sizes = function("scan"), {"batch": 2, "seq_len": 1100, "channels": 264}
    keywords = {"dtype": dtype, "device": "cuda", "sizes": sizes, "config": config}
    channel_laws.check_matches_reference(OPERATION, fn, splits=(100, 701), **keywords)
    for ranges in EXTREMES["wkv4"].values():
        channel_laws.check_matches_reference(OPERATION, fn, ranges=ranges, **keywords)
    problem = channel_laws.make_problem(OPERATION, sizes, dtype=dtype, device="cuda", num_siblings=0)
    with torch.no_grad():
        outputs = [fn(*problem.inputs.values(), config=config) for _ in range(20)]
        assert all(torch.equal(outputs[0], other) for other in outputs)
        y = fn(*problem.inputs.values())
    assert (y - outputs[0]).abs().max() <= 16 * torch.finfo(dtype).eps * y.abs().max()


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wild_keys_over_a_long_sequence_on_gpu(dtype: torch.dtype) -> None:
    """Keys from -100 to 100 over 65,536 steps: outputs, last state and gradients against the portable form in float64,
    by the bound that the portable form's own float32 error sets, and the exponents' size."""
    sizes = {"batch": 1, "seq_len": 65536, "channels": 64}
    problem = channel_laws.make_problem(
        OPERATION,
        sizes,
        dtype=dtype,
        device="cuda",
        ranges=EXTREMES["wkv4"]["wild keys"],
        initial_state=False,
        num_siblings=0,
    )
    portable = function("torch")
    expected = laws.evaluate(problem.double(), portable)
    low = laws.evaluate(problem, portable, stabilizer=expected["m"])
    results = laws.evaluate(problem, function("scan"), stabilizer=expected["m"])
    eps = torch.finfo(dtype).eps
    for name, exact in expected.items():
        if name != "m":
            relative = eps + 100 * torch.finfo(torch.float32).eps
            bound = 2 * (low[name] - exact).abs().max() + relative * exact.abs().max()
            assert (results[name] - exact).abs().max() <= bound, name


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_steps_on_gpu(dtype: torch.dtype) -> None:
    step = resolve(OPERATION.implementation("scan").step_call)
    channel_laws.check_steps(OPERATION, step, dtype=dtype, device="cuda", sizes={**SMALL, "seq_len": 40}, prefix=8)


@gpu
def test_equal_calls_give_equal_bits_on_gpu() -> None:
    """Programs wait for each other in an order of their own; the sums they make have one order all the same."""
    for sizes in ({"batch": 8, "seq_len": 5000, "channels": 256}, {"batch": 1, "seq_len": 65536, "channels": 256}):
        problem = channel_laws.make_problem(OPERATION, sizes, dtype=torch.bfloat16, device="cuda", num_siblings=0)
        first = laws.evaluate(problem, function("scan"))
        for _ in range(5):
            again = laws.evaluate(problem, function("scan"))
            assert all(torch.equal(first[key], again[key]) for key in first)
