"""The laws for the gated MLP's kernels: in the interpreter on small tiles, and on a GPU at real sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lrbench.kernels.gated_mlp import fused as module
from lrbench.kernels.gated_mlp import gated_mlp
from lrbench.kernels.gated_mlp.config import ACTIVATIONS, GatedMlpConfig, TileConfig, select_tile
from lrbench.kernels.gated_mlp.validate import check_kernel_support
from lrbench.tests.kernels import mlp_laws as laws

interpret = pytest.mark.interpret
gpu = pytest.mark.gpu

SMALL = TileConfig(block_m=16, block_f=32, block_k=16, subtiles=2, group_m=2, use_tma=True, persistent=True)
TILES = {
    "descriptors": SMALL,
    "pointers": replace(SMALL, use_tma=False, subtiles=1),
    "programs": replace(SMALL, subtiles=1, block_f=16, persistent=False),
    "pointer programs": replace(SMALL, use_tma=False, persistent=False, group_m=8),
}
"""Tiles so small that 41 tokens and 72 columns are several, the last ones ragged, and each program walks several."""

FUNCTIONS = {impl: partial(gated_mlp, impl=impl) for impl in ("fused", "fused_save")}
"""Implementation -> function; the first projects again in the backward pass, the second saves the pre-activations."""

FORMS = {
    f"{impl}-{layout}": (fn, prepare) for layout, prepare in laws.LAYOUTS.items() for impl, fn in FUNCTIONS.items()
}
"""Name -> function, and what lays its weights out."""

each_form = pytest.mark.parametrize("form", FORMS)


def launches(tile: TileConfig) -> GatedMlpConfig:
    return GatedMlpConfig(forward=tile, gradient=tile)


@interpret
@each_form
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_matches_reference(form: str, tile: str, dtype: torch.dtype) -> None:
    fn, prepare = FORMS[form]
    laws.check_matches_reference(
        fn, 41, 40, 72, dtype=dtype, device="cpu", prepare=prepare, config=launches(TILES[tile])
    )


@interpret
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_over_their_range(activation: str) -> None:
    """Gates of some hundreds, where exponentials overflow, as well as ordinary ones."""
    for scale in (1.0, 200.0):
        for fn, prepare in (FORMS["fused-columns"], FORMS["fused_save-rows"]):
            laws.check_matches_reference(
                fn, 19, 16, 40, dtype=torch.float32, device="cpu", activation=activation, prepare=prepare,
                gate_scale=scale, config=launches(SMALL),
            )  # fmt: skip


@interpret
@pytest.mark.parametrize(("tokens", "d_model", "d_ff"), [(1, 8, 8), (1, 72, 136), (17, 8, 56)])
def test_any_shape(tokens: int, d_model: int, d_ff: int) -> None:
    for fn, prepare in FORMS.values():
        laws.check_matches_reference(
            fn, tokens, d_model, d_ff, dtype=torch.float16, device="cpu", prepare=prepare,
            config=launches(SMALL),
        )  # fmt: skip


@interpret
def test_launches_of_its_own_choice() -> None:
    for dtype in (torch.float16, torch.float32):
        for fn, prepare in FORMS.values():
            laws.check_matches_reference(fn, 5, 16, 24, dtype=dtype, device="cpu", prepare=prepare)


@interpret
def test_rows_alone() -> None:
    for fn, prepare in FORMS.values():
        for dtype in (torch.float16, torch.float32):
            laws.check_rows_alone(
                fn, 21, 24, 40, (0, 20), dtype=dtype, device="cpu", prepare=prepare, exact=False,
                config=launches(SMALL),
            )  # fmt: skip


@interpret
def test_laws_of_gradients() -> None:
    for fn, prepare in FORMS.values():
        laws.check_gradients_of_some(fn, dtype=torch.float32, device="cpu", prepare=prepare, config=launches(SMALL))
        check_second_derivatives_are_refused(fn, prepare, "cpu", config=launches(SMALL))


def check_second_derivatives_are_refused(fn: laws.Function, prepare: laws.Prepare, device: str, **kwargs: Any) -> None:
    """The kernels differentiate once, and say so."""
    inputs, dy = laws.draw(5, 16, 24, dtype=torch.float32, device=device)
    leaves = [x.requires_grad_() for x in prepare(inputs).values()]
    (dx,) = torch.autograd.grad(fn(*leaves, **kwargs), leaves[:1], dy.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


@interpret
@each_form
def test_saved_tensors_may_come_back_elsewhere(form: str) -> None:
    """Hooks that offload what the backward pass needs give back copies, each in memory of its own."""
    fn, prepare = FORMS[form]
    inputs, dy = laws.draw(5, 16, 24, dtype=torch.float32, device="cpu")
    given = prepare(inputs)
    expected = laws.evaluate(fn, given, dy)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
        found = laws.evaluate(fn, given, dy)
    for one, other in zip(found, expected, strict=True):
        # stride as well: gradients are laid out as the weights were given.
        torch.testing.assert_close(one, other, check_stride=True)


@interpret
@each_form
@pytest.mark.parametrize("tile", ["descriptors", "pointers"])
def test_saved_tensors_may_come_back_in_another_layout(form: str, tile: str) -> None:
    """Hooks that move tensors to pinned memory, as torch's save_on_cpu, give contiguous ones back; others some."""
    fn, prepare = FORMS[form]
    inputs, dy = laws.draw(5, 16, 24, dtype=torch.float32, device="cpu")
    given = prepare(inputs)
    config = launches(TILES[tile])
    expected = laws.evaluate(fn, given, dy, config=config)
    for which in range(1, 3):
        seen: list[torch.Tensor] = []

        def back(kept: torch.Tensor, seen: list[torch.Tensor] = seen, which: int = which) -> torch.Tensor:
            seen.append(kept)
            return torch.empty(kept.size(), dtype=kept.dtype).copy_(kept) if len(seen) > which else kept

        with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, back):
            found = laws.evaluate(fn, given, dy, config=config)
        assert len(seen) >= 2
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, check_stride=True)


@interpret
@each_form
def test_one_token_of_any_stride(form: str) -> None:
    """Torch calls a tensor of one row contiguous whatever its row stride."""
    fn, prepare = FORMS[form]
    inputs, dy = laws.draw(1, 16, 24, dtype=torch.float16, device="cpu")
    expected = laws.evaluate(fn, prepare(inputs), dy)
    inputs["x"], dy = (torch.cat((t, t[:, :4]), 1)[:, : t.shape[1]] for t in (inputs["x"], dy))
    assert inputs["x"].stride() == (20, 1)
    assert inputs["x"].is_contiguous()
    for one, other in zip(laws.evaluate(fn, prepare(inputs), dy), expected, strict=True):
        assert torch.equal(one, other)


@interpret
def test_weights_that_overlap() -> None:
    check_weights_that_overlap("cpu")


def check_weights_that_overlap(device: str) -> None:
    """Tied weights, and ones that share rows of one tensor, which no descriptor holds."""
    inputs, dy = laws.draw(70, 32, 64, dtype=torch.float16, device=device)
    both = torch.cat((inputs["w_up"].T, inputs["w_gate"].T))
    for up, gate in ((0, 0), (0, 8), (8, 0), (64, 0)):
        columns = {"w_up": both[up : up + 64].T, "w_gate": both[gate : gate + 64].T}
        laws.check_matches_reference_on(gated_mlp, {"x": inputs["x"], **columns}, dy)
        found, expected = (
            laws.evaluate(gated_mlp, {"x": inputs["x"], **{n: layout(w) for n, w in columns.items()}}, dy)
            for layout in (lambda w: w, torch.Tensor.contiguous)
        )
        for one, other in zip(found, expected, strict=True):
            assert laws.relative_error(one, other.double()) < 1e-3


@interpret
@each_form
def test_weights_changed_before_the_backward_pass_are_refused(form: str) -> None:
    fn, prepare = FORMS[form]
    inputs, dy = laws.draw(5, 16, 24, dtype=torch.float32, device="cpu")
    leaves = [x.detach().requires_grad_() for x in prepare(inputs).values()]
    y = fn(*leaves)
    with torch.no_grad():
        leaves[-1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


@interpret
def test_bad_input() -> None:
    for fn in FUNCTIONS.values():
        laws.check_bad_input(fn, dtype=torch.float32, device="cpu")
        for d_model, d_ff, match in (
            (12, 24, "D must be a multiple of 8, got 12"),
            (16, 20, "F must be a multiple of 8, got 20"),
        ):
            inputs, _ = laws.draw(3, d_model, d_ff, dtype=torch.float32, device="cpu")
            with pytest.raises(ValueError, match=match):
                fn(*inputs.values())
        double, _ = laws.draw(3, 16, 24, dtype=torch.float64, device="cpu")
        with pytest.raises(ValueError, match="x must be one of float32, float16, bfloat16, got float64"):
            fn(*double.values())
        single, _ = laws.draw(3, 16, 24, dtype=torch.float32, device="cpu")
        with pytest.raises(ValueError, match=r"config: forward.subtiles must be 1 or 2, got 4"):
            fn(*single.values(), config=launches(replace(SMALL, subtiles=4)))


@interpret
def test_saving_keeps_nothing_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pre-activations are written only where a backward pass can come."""
    ends: list[object] = []
    project = module.project

    def spy(*args: Any, **kwargs: Any) -> None:
        ends.append(kwargs.get("pre"))
        project(*args, **kwargs)

    monkeypatch.setattr(module, "project", spy)
    inputs, _ = laws.draw(5, 16, 24, dtype=torch.float32, device="cpu")
    FUNCTIONS["fused_save"](*inputs.values(), config=launches(SMALL))
    with torch.no_grad():
        FUNCTIONS["fused_save"](*[x.requires_grad_() for x in inputs.values()], config=launches(SMALL))
    assert ends == [None, None]
    FUNCTIONS["fused_save"](*inputs.values(), config=launches(SMALL))
    assert ends[2] is not None


@interpret
def test_tensors_that_descriptors_cannot_take() -> None:
    """Tensors that begin off a multiple of 16 bytes are read by pointers."""
    inputs, _ = laws.draw(5, 16, 24, dtype=torch.float16, device="cpu")
    shifted = {}
    for by, (name, x) in enumerate(inputs.items(), 1):
        # Weights that lie apart by no multiple of 16 bytes either.
        shifted[name] = torch.zeros(x.numel() + by, dtype=x.dtype)[by:].view(x.shape).copy_(x)
        assert shifted[name].data_ptr() % 16
    assert torch.equal(gated_mlp(*shifted.values()), gated_mlp(*inputs.values()))
    columns = {name: inputs[name].T.contiguous().T for name in ("w_up", "w_gate")}
    expected = gated_mlp(inputs["x"], **columns)
    for by, (name, w) in enumerate(columns.items(), 1):
        columns[name] = torch.zeros(w.numel() + by, dtype=w.dtype)[by:].view(w.T.shape).copy_(w.T).T
    assert torch.equal(gated_mlp(inputs["x"], **columns), expected)
    for given, name, past in (
        (shifted, "x", 2),
        ({"x": inputs["x"], **columns}, "w_up", 2),
    ):
        match = f"^{name} must begin at a multiple of 16 bytes, got {past} bytes past one; config.forward has use_tma$"
        with pytest.raises(ValueError, match=match):
            gated_mlp(*given.values(), config=launches(SMALL))
        gated_mlp(*given.values(), config=launches(TILES["pointers"]))


@interpret
def test_weights_that_no_descriptor_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch of one's own with descriptors says so; elsewhere than on Hopper, weights lie whole rows apart."""
    inputs, _ = laws.draw(5, 16, 24, dtype=torch.float16, device="cpu")
    both = torch.cat((inputs["w_up"].T.flatten(), torch.zeros(8), inputs["w_gate"].T.flatten())).half()

    def apart(by: int) -> dict[str, torch.Tensor]:
        weights = {"w_up": both[: 24 * 16], "w_gate": both[24 * 16 + by :][: 24 * 16]}
        return {"x": inputs["x"], **{name: w.view(24, 16).T for name, w in weights.items()}}

    with pytest.raises(
        ValueError, match=r"w_gate must begin from 384 to \d+ elements behind or before w_up, got 376; "
    ):
        gated_mlp(*apart(-8).values(), config=launches(SMALL))
    expected = gated_mlp(*apart(8).values(), config=launches(SMALL))
    monkeypatch.setattr(module, "capability", lambda device: (10, 0))
    with pytest.raises(
        ValueError, match="w_gate must begin a multiple of 16 elements behind or before w_up, got 392; "
    ):
        gated_mlp(*apart(8).values(), config=launches(SMALL))
    assert torch.equal(gated_mlp(*apart(8).values()), expected)
    gated_mlp(*apart(0).values(), config=launches(SMALL))


@interpret
def test_the_interpreter_refuses_gpu_tensors() -> None:
    """It copies each tensor to the host, but from one weight the kernel reaches the other."""
    x: Any = SimpleNamespace(dtype=torch.float16, device=torch.device("cuda", 0))
    with pytest.raises(ValueError, match="x must be on the CPU under TRITON_INTERPRET=1, got a tensor on cuda:0"):
        check_kernel_support(x, 16, 24)


GPU_SIZES = [(4096, 4096, 1792), (1024, 512, 3584), (300, 1032, 520), (65, 72, 136), (16, 2048, 1024), (1, 256, 264)]
ALTERNATIVES = {
    "sub1": {"subtiles": 1, "num_stages": 3},
    "sub2": {"subtiles": 2, "num_stages": 3},
    "group8": {"group_m": 8},
    "k128": {"block_k": 128, "num_stages": 2},
    "tall": {"block_m": 256, "block_f": 64, "num_stages": 3},
    "not flattened": {"flatten": False},
    "programs": {"persistent": False},
    "narrow": {"block_f": 64},
}
"""Forward launches worth timing on Hopper; all must be right first."""


@gpu
@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", GPU_SIZES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_matches_reference_on_gpu(form: str, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    fn, prepare = FORMS[form]
    laws.check_matches_reference(fn, *sizes, dtype=dtype, device="cuda", prepare=prepare)


@gpu
@each_form
@pytest.mark.parametrize("name", ALTERNATIVES)
def test_alternatives_on_gpu(form: str, name: str) -> None:
    """Every launch worth timing gives the same as the definition, and the same bits twice: no race."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip(f"these launches use descriptors: compute capability {torch.cuda.get_device_capability()} has none")
    fn, prepare = FORMS[form]
    capability = torch.cuda.get_device_capability()
    sizes = (2050, 1032, 1800)
    inputs, _ = laws.draw(*sizes, dtype=torch.bfloat16, device="cuda")
    given = prepare(inputs)
    tiles = {
        end: select_tile(end=end, k_major="rows" not in form, tokens=4096, work=0, capability=capability, item_bytes=2)
        for end in ("gate", "gradient")
    }
    config = GatedMlpConfig(forward=replace(tiles["gate"], **ALTERNATIVES[name]), gradient=tiles["gradient"])
    laws.check_matches_reference(
        fn, *sizes, dtype=torch.bfloat16, device="cuda", prepare=prepare, gradients="save" not in form, config=config
    )
    first = fn(*given.values(), config=config)
    for _ in range(5):
        assert torch.equal(fn(*given.values(), config=config), first)


@gpu
@each_form
@pytest.mark.parametrize("sizes", [(2050, 1032, 1800), (128, 4096, 256), (3000, 64, 14336)], ids=str)
def test_whole_numbers_are_exact_on_gpu(form: str, sizes: tuple[int, int, int]) -> None:
    """Small whole numbers leave no rounding: any wrong element shows, however the tiles fall."""
    fn, prepare = FORMS[form]
    tokens, d_model, d_ff = sizes
    generator = torch.Generator("cuda").manual_seed(0)
    x, w_up, w_gate = (
        torch.randint(-1, 2, shape, generator=generator, device="cuda").to(torch.bfloat16)
        for shape in ((tokens, d_model), (d_model, d_ff), (d_model, d_ff))
    )
    inputs = {"x": x, "w_up": w_up, "w_gate": w_gate}
    given = prepare(inputs)
    y = fn(*given.values(), activation="relu")
    exact = (x.double() @ w_gate.double()).relu() * (x.double() @ w_up.double())
    wrong = (y != exact.to(torch.bfloat16)).nonzero()
    assert not len(wrong), f"{len(wrong)} of {y.numel()} elements differ, from {wrong[0]} to {wrong[-1]}"


@gpu
@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_alone_on_gpu(form: str, dtype: torch.dtype) -> None:
    fn, prepare = FORMS[form]
    laws.check_rows_alone(fn, 300, 264, 520, (0, 299), dtype=dtype, device="cuda", prepare=prepare, exact=False)


@gpu
@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_over_their_range_on_gpu(form: str, dtype: torch.dtype, activation: str) -> None:
    fn, prepare = FORMS[form]
    for scale in (1.0, 200.0):
        laws.check_matches_reference(
            fn, 130, 136, 264, dtype=dtype, device="cuda", activation=activation, prepare=prepare,
            gate_scale=scale,
        )  # fmt: skip


@gpu
@each_form
def test_laws_on_gpu(form: str) -> None:
    fn, prepare = FORMS[form]
    laws.check_gradients_of_some(fn, dtype=torch.bfloat16, device="cuda", prepare=prepare)
    check_second_derivatives_are_refused(fn, prepare, "cuda")
    laws.check_bad_input(fn, dtype=torch.bfloat16, device="cuda")


@gpu
def test_weights_that_overlap_on_gpu() -> None:
    check_weights_that_overlap("cuda")


@gpu
@pytest.mark.slow
def test_offsets_beyond_32_bits_on_gpu() -> None:
    """More than 2^31 elements in y; only some rows are compared."""
    inputs, _ = laws.draw(64, 64, 64, dtype=torch.bfloat16, device="cuda")
    rows = 2**31 // 14336 + 200
    x = inputs["x"].repeat(rows // 64 + 1, 1)[:rows].contiguous()
    w_up, w_gate = (torch.randn(64, 14336, device="cuda", dtype=torch.bfloat16) / 8 for _ in range(2))
    inputs = {"x": x, "w_up": w_up, "w_gate": w_gate}
    for prepare in laws.LAYOUTS.values():
        given = list(prepare(inputs).values())[1:]
        y = gated_mlp(x, *given)
        expected = gated_mlp(x[:64].contiguous(), *given)
        assert torch.equal(y[-(rows % 64) :], expected[: rows % 64])
        assert laws.relative_error(y[:64], expected.double()) == 0
