"""A gated MLP, beside the laws: its definition, its launches, and where its weights may lie."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lrbench.bench.worker.correctness import relative_error
from lrbench.kernels.gated_mlp import GATED_MLP, gated_mlp
from lrbench.kernels.gated_mlp import fused as module
from lrbench.kernels.gated_mlp.config import ACTIVATIONS, GatedMlpConfig, GemmConfig, invalid_reason, select_tile
from lrbench.kernels.gated_mlp.reference import activate, definition, k_major_inputs, portable, projections
from lrbench.kernels.gated_mlp.validate import check_kernel_support, is_k_major
from lrbench.tests.kernels import laws
from lrbench.tests.kernels.cases import MLP_ALTERNATIVES, MLP_FORMS, MLP_SMALL, launches, mlp_sizes
from lrbench.tests.kernels.laws import LAYOUTS, Case

each_form = pytest.mark.parametrize(("impl", "layout"), MLP_FORMS)
each_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("cuda", marks=pytest.mark.gpu)]
)


def draw(*sizes: int, dtype: torch.dtype, device: str = "cpu") -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs and an output gradient."""
    problem = Case(op="gated_mlp", impl="fused", dtype=dtype, sizes=mlp_sizes(*sizes), device=device).draw()
    return dict(problem.inputs), problem.cotangents["h"].to(dtype)


def results(inputs: Mapping[str, Tensor], dy: Tensor, **options: Any) -> list[Tensor]:
    """Return y and the gradients of x and the weights."""
    leaves = [x.detach().requires_grad_() for x in inputs.values()]
    y = gated_mlp(*leaves, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_definition_is_the_papers_written_out(activation: str) -> None:
    """Equations 5 and 6 of Shazeer for single numbers, GELU as x Phi(x) and in its tanh form."""
    act: dict[str, Callable[[float], float]] = {
        "silu": lambda g: g / (1 + math.exp(-g)),
        "sigmoid": lambda g: 1 / (1 + math.exp(-g)),
        "relu": lambda g: max(g, 0.0),
        "gelu": lambda g: g * (1 + math.erf(g / math.sqrt(2))) / 2,
        "gelu_tanh": lambda g: g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) / 2,
    }
    x, up, gate = [0.3, -1.2], [0.7, 0.5], [-0.4, 1.1]
    dot_up, dot_gate = (sum(a * b for a, b in zip(x, w, strict=True)) for w in (up, gate))
    rows, *columns = (torch.tensor(v, dtype=torch.float64) for v in (x, up, gate))
    y = definition(rows[None], columns[0][:, None], columns[1][:, None], activation=activation)
    assert y.item() == pytest.approx(act[activation](dot_gate) * dot_up, rel=1e-14)


def test_inputs_in_the_layout_of_a_linear_layer() -> None:
    inputs = GATED_MLP.make_inputs(mlp_sizes(10, 16, 24), dtype=torch.bfloat16, seed=3)
    assert [tuple(x.shape) for x in inputs.values()] == [(10, 16), (16, 24), (16, 24)]
    for name, x in k_major_inputs(inputs).items():
        assert torch.equal(x, inputs[name])
        assert is_k_major(x) == name.startswith("w_")


def test_declared_launches_are_those_chosen() -> None:
    sizes = {"batch": 1, "seq_len": 4096, "d_model": 4096, "d_ff": 14336}
    how = {"k_major": True, "tokens": 4096, "work": 4096 * 4096 * 14336, "capability": (9, 0)}
    modes = (("fused", "fwbw", "gate"), ("fused_save", "fwbw", "save"), ("fused_save", "fw", "gate"))
    for name, mode, forward in modes:
        for dtype, item_bytes in (("bf16", 2), ("fp32", 4)):
            config = GATED_MLP.implementation(name).launches(mode, dtype, sizes, (9, 0))
            for end, tile in ((forward, config.forward), ("gradient", config.gradient)):
                assert tile == select_tile(end=end, item_bytes=item_bytes, **how)


def test_the_portable_form_takes_no_launches() -> None:
    inputs = list(draw(5, 16, 24, dtype=torch.float32)[0].values())
    with pytest.raises(ValueError, match="config must be None for impl torch, got GatedMlpConfig"):
        tile = GemmConfig(block_m=16, block_f=16, block_k=16)
        gated_mlp(*inputs, impl="torch", config=GatedMlpConfig(forward=tile, gradient=tile))


def test_unknown_activation() -> None:
    with pytest.raises(ValueError, match=r"activation must be one of silu, .*, got 'tanh'"):
        activate(torch.zeros(1), "tanh")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_m": 48}, "forward.block_m must be a power of two, got 48"),
        ({"block_k": 8}, "forward.block_k must be at least 16, got 8"),
        ({"subtiles": 3}, "forward.subtiles must be 1 or 2, got 3"),
        ({"num_stages": 0}, "forward.num_stages must be at least 1, got 0"),
        ({"block_f": 256}, r"forward.block_f must be at most 128 with use_tma (boxes of 256 columns), got 256"),
    ],
)
def test_invalid_launches(change: dict[str, int], reason: str) -> None:
    good = {"block_m": 64, "block_f": 64, "block_k": 32}
    gradient = GemmConfig(**good)
    assert invalid_reason(GatedMlpConfig(forward=gradient, gradient=gradient)) is None
    assert invalid_reason(GatedMlpConfig(forward=GemmConfig(**{**good, **change}), gradient=gradient)) == reason


@pytest.mark.parametrize("end", ["gate", "save", "gradient"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_every_launch_chosen_is_valid(capability: tuple[int, int], end: str) -> None:
    for tokens in (1, 64, 65, 4096):
        for item_bytes in (2, 4):
            for k_major, per_token in itertools.product((True, False), (2**10, 2**40)):
                for described in (False, True):
                    tile = select_tile(
                        end=end, k_major=k_major, tokens=tokens, work=tokens * per_token, capability=capability,
                        item_bytes=item_bytes, described=described,
                    )  # fmt: skip
                    assert invalid_reason(GatedMlpConfig(forward=tile, gradient=tile)) is None
                    assert not tile.use_tma or ((9, 0) <= capability < (12, 0) and described and item_bytes == 2)


@pytest.mark.interpret
@each_form
@pytest.mark.parametrize("tile", ["descriptors", "pointers", None])
def test_saved_tensors_may_come_back_elsewhere(impl: str, layout: str, tile: str | None) -> None:
    """Hooks that offload what the backward pass needs give copies back, each in memory of its own; those that move
    tensors to pinned memory, as torch's save_on_cpu, give contiguous ones back, or some."""
    inputs, dy = draw(5, 16, 24, dtype=torch.float32)
    given, options = LAYOUTS[layout](inputs), {"impl": impl, **(launches(tile) if tile else {})}
    expected = results(given, dy, **options)
    for first in (0, 1, 2, None):
        seen: list[torch.Tensor] = []

        def back(kept: torch.Tensor, seen: list[torch.Tensor] = seen, first: int | None = first) -> torch.Tensor:
            seen.append(kept)
            if first is None:
                return kept.clone()
            return torch.empty(kept.size(), dtype=kept.dtype).copy_(kept) if len(seen) > first else kept

        with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, back):
            found = results(given, dy, **options)
        assert len(seen) >= 2
        for one, other in zip(found, expected, strict=True):
            # stride as well: gradients are laid out as the weights were given.
            torch.testing.assert_close(one, other, check_stride=True)


@pytest.mark.interpret
@each_form
def test_one_token_of_any_stride(impl: str, layout: str) -> None:
    """Torch calls a tensor of one row contiguous whatever its row stride."""
    inputs, dy = draw(1, 16, 24, dtype=torch.float16)
    expected = results(LAYOUTS[layout](inputs), dy, impl=impl)
    inputs["x"], dy = (torch.cat((t, t[:, :4]), 1)[:, : t.shape[1]] for t in (inputs["x"], dy))
    assert inputs["x"].stride() == (20, 1)
    assert inputs["x"].is_contiguous()
    for one, other in zip(results(LAYOUTS[layout](inputs), dy, impl=impl), expected, strict=True):
        assert torch.equal(one, other)


@each_device
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_alone(layout: str, device: str) -> None:
    """They are what the kernel gates; its tiles do not depend on what it writes."""
    inputs, _ = draw(70, 40, 72, dtype=torch.float16, device=device)
    both = module.products(*LAYOUTS[layout](inputs).values())
    assert relative_error(both, projections(*(x.double() for x in inputs.values()))) < 1e-3


@each_device
def test_weights_that_overlap(device: str) -> None:
    """Tied weights, and ones that share rows of one tensor, which no descriptor holds."""
    drawn = Case(op="gated_mlp", impl="fused", dtype=torch.float16, sizes=mlp_sizes(70, 32, 64), device=device).draw()
    inputs, dy = drawn.inputs, drawn.cotangents["h"].half()
    both = torch.cat((inputs["w_up"].T, inputs["w_gate"].T))
    for up, gate in ((0, 0), (0, 8), (8, 0), (64, 0)):
        columns = {"w_up": both[up : up + 64].T, "w_gate": both[gate : gate + 64].T}
        problem = replace(drawn, inputs={"x": inputs["x"], **columns})
        exact = laws.reference(problem)
        laws.assert_close(laws.evaluate(problem, gated_mlp), exact, laws.tolerances(problem, exact), "shared weights")
        found, expected = (
            results({"x": inputs["x"], **{n: lay(w) for n, w in columns.items()}}, dy)
            for lay in (lambda w: w, torch.Tensor.contiguous)
        )
        for one, other in zip(found, expected, strict=True):
            assert relative_error(one, other.double()) < 1e-3


@pytest.mark.interpret
@each_form
def test_weights_changed_before_the_backward_pass_are_refused(impl: str, layout: str) -> None:
    inputs, dy = draw(5, 16, 24, dtype=torch.float32)
    leaves = [x.detach().requires_grad_() for x in LAYOUTS[layout](inputs).values()]
    y = gated_mlp(*leaves, impl=impl)
    with torch.no_grad():
        leaves[-1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


@pytest.mark.interpret
def test_bad_shapes_and_launches() -> None:
    inputs, _ = draw(6, 16, 24, dtype=torch.float32)
    x, w_up, w_gate = inputs.values()
    for form in (portable, gated_mlp):
        with pytest.raises(ValueError, match=re.escape("w_up must have 16 rows, one a column of x, got shape (8, 24)")):
            form(x, w_up[:8], w_gate)
        with pytest.raises(ValueError, match="w_up must be contiguous, or both "):
            form(x, torch.cat((w_up, w_up))[::2], w_gate)
    with pytest.raises(ValueError, match=r"config: forward.subtiles must be 1 or 2, got 4"):
        tile = replace(MLP_SMALL, subtiles=4)
        gated_mlp(x, w_up, w_gate, config=GatedMlpConfig(forward=tile, gradient=tile))


@pytest.mark.interpret
def test_saving_keeps_nothing_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pre-activations are written only where a backward pass can come."""
    ends: list[object] = []
    project = module.project

    def spy(*args: Any, **kwargs: Any) -> None:
        ends.append(kwargs.get("pre"))
        project(*args, **kwargs)

    monkeypatch.setattr(module, "project", spy)
    fused_save = partial(gated_mlp, impl="fused_save")
    inputs, _ = draw(5, 16, 24, dtype=torch.float32)
    fused_save(*inputs.values(), **launches("descriptors"))
    with torch.no_grad():
        fused_save(*[x.requires_grad_() for x in inputs.values()], **launches("descriptors"))
    assert ends == [None, None]
    fused_save(*inputs.values(), **launches("descriptors"))
    assert ends[2] is not None


@pytest.mark.interpret
def test_weights_that_no_descriptor_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch of one's own with descriptors says so; elsewhere than on Hopper, weights lie whole rows apart."""
    inputs, _ = draw(5, 16, 24, dtype=torch.float16)
    both = torch.cat((inputs["w_up"].T.flatten(), torch.zeros(8), inputs["w_gate"].T.flatten())).half()

    def apart(by: int) -> dict[str, torch.Tensor]:
        weights = {"w_up": both[: 24 * 16], "w_gate": both[24 * 16 + by :][: 24 * 16]}
        return {"x": inputs["x"], **{name: w.view(24, 16).T for name, w in weights.items()}}

    with pytest.raises(
        ValueError, match=r"w_gate must begin from 384 to \d+ elements behind or before w_up, got 376; "
    ):
        gated_mlp(*apart(-8).values(), **launches("descriptors"))
    expected = gated_mlp(*apart(8).values(), **launches("descriptors"))
    monkeypatch.setattr(module, "capability", lambda device: (10, 0))
    with pytest.raises(
        ValueError, match="w_gate must begin a multiple of 16 elements behind or before w_up, got 392; "
    ):
        gated_mlp(*apart(8).values(), **launches("descriptors"))
    assert torch.equal(gated_mlp(*apart(8).values()), expected)
    gated_mlp(*apart(0).values(), **launches("descriptors"))


@pytest.mark.interpret
def test_the_interpreter_refuses_gpu_tensors() -> None:
    """It copies each tensor to the host, but from one weight the kernel reaches the other."""
    x: Any = SimpleNamespace(dtype=torch.float16, device=torch.device("cuda", 0))
    with pytest.raises(ValueError, match="x must be on the CPU under TRITON_INTERPRET=1, got a tensor on cuda:0"):
        check_kernel_support(x, 16, 24)


@pytest.mark.gpu
@each_form
@pytest.mark.parametrize("name", MLP_ALTERNATIVES)
def test_alternatives_on_gpu(impl: str, layout: str, name: str) -> None:
    """Every launch worth timing gives the same as the definition, and the same bits twice: no race."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip(f"these launches use descriptors: compute capability {torch.cuda.get_device_capability()} has none")
    capability = torch.cuda.get_device_capability()
    sizes = (2050, 1032, 1800)
    inputs, _ = draw(*sizes, dtype=torch.bfloat16, device="cuda")
    given = LAYOUTS[layout](inputs)
    tiles = {
        end: select_tile(end=end, k_major=layout != "rows", tokens=4096, work=0, capability=capability, item_bytes=2)
        for end in ("gate", "gradient")
    }
    config = GatedMlpConfig(forward=replace(tiles["gate"], **MLP_ALTERNATIVES[name]), gradient=tiles["gradient"])
    case = Case(op="gated_mlp", impl=impl, dtype=torch.bfloat16, sizes=mlp_sizes(*sizes), device="cuda", layout=layout)
    laws.check_matches_reference(replace(case, kwargs={"config": config}), gradients=impl == "fused")
    first = gated_mlp(*given.values(), impl=impl, config=config)
    for _ in range(5):
        assert torch.equal(gated_mlp(*given.values(), impl=impl, config=config), first)


@pytest.mark.gpu
@each_form
@pytest.mark.parametrize("sizes", [(2050, 1032, 1800), (128, 4096, 256), (3000, 64, 14336)], ids=str)
def test_whole_numbers_are_exact_on_gpu(impl: str, layout: str, sizes: tuple[int, int, int]) -> None:
    """Small whole numbers leave no rounding: any wrong element shows, however the tiles fall."""
    tokens, d_model, d_ff = sizes
    generator = torch.Generator("cuda").manual_seed(0)
    x, w_up, w_gate = (
        torch.randint(-1, 2, shape, generator=generator, device="cuda").to(torch.bfloat16)
        for shape in ((tokens, d_model), (d_model, d_ff), (d_model, d_ff))
    )
    given = LAYOUTS[layout]({"x": x, "w_up": w_up, "w_gate": w_gate})
    y = gated_mlp(*given.values(), impl=impl, activation="relu")
    exact = (x.double() @ w_gate.double()).relu() * (x.double() @ w_up.double())
    wrong = (y != exact.to(torch.bfloat16)).nonzero()
    assert not len(wrong), f"{len(wrong)} of {y.numel()} elements differ, from {wrong[0]} to {wrong[-1]}"


@pytest.mark.gpu
@pytest.mark.slow
def test_offsets_beyond_32_bits_on_gpu() -> None:
    """More than 2^31 elements in y; only some rows are compared."""
    inputs, _ = draw(64, 64, 64, dtype=torch.bfloat16, device="cuda")
    rows = 2**31 // 14336 + 200
    x = inputs["x"].repeat(rows // 64 + 1, 1)[:rows].contiguous()
    w_up, w_gate = (torch.randn(64, 14336, device="cuda", dtype=torch.bfloat16) / 8 for _ in range(2))
    inputs = {"x": x, "w_up": w_up, "w_gate": w_gate}
    for prepare in LAYOUTS.values():
        given = list(prepare(inputs).values())[1:]
        y = gated_mlp(x, *given)
        expected = gated_mlp(x[:64].contiguous(), *given)
        assert torch.equal(y[-(rows % 64) :], expected[: rows % 64])
        assert relative_error(y[:64], expected.double()) == 0
