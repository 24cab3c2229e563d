"""A gated MLP is defined as in its papers, its portable forms obey the laws, and its launches are valid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from lrbench.kernels import resolve
from lrbench.kernels.gated_mlp import OPERATION, gated_mlp
from lrbench.kernels.gated_mlp.config import ACTIVATIONS, GatedMlpConfig, TileConfig, invalid_reason, select_tile
from lrbench.kernels.gated_mlp.reference import activate, definition, joint, k_major_inputs, make_inputs, portable
from lrbench.kernels.gated_mlp.validate import is_k_major
from lrbench.tests.kernels import mlp_laws as laws

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SIZES = {"batch": 2, "seq_len": 5, "d_model": 16, "d_ff": 24}

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


@each_activation
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


@each_dtype
@each_activation
@pytest.mark.parametrize("form", [portable, joint])
def test_portable_forms_match_the_definition(form: laws.Function, activation: str, dtype: torch.dtype) -> None:
    for tokens, d_model, d_ff in ((1, 8, 8), (9, 24, 40)):
        for gradients in (True, False):
            laws.check_matches_reference(
                form, tokens, d_model, d_ff, dtype=dtype, device="cpu", activation=activation, gradients=gradients
            )


@pytest.mark.parametrize("layout", laws.LAYOUTS)
def test_portable_form_takes_every_layout(layout: str) -> None:
    for gradients in (True, False):
        laws.check_matches_reference(
            portable, 9, 24, 40, dtype=torch.float32, device="cpu", prepare=laws.LAYOUTS[layout], gradients=gradients
        )


def test_portable_form_leaves_its_inputs_alone() -> None:
    inputs, _ = laws.draw(5, 16, 24, dtype=torch.float32, device="cpu")
    kept = {name: x.clone() for name, x in inputs.items()}
    for activation in ACTIVATIONS:
        portable(*inputs.values(), activation=activation)
    assert all(torch.equal(x, kept[name]) for name, x in inputs.items())


def test_laws_of_the_portable_form() -> None:
    laws.check_rows_alone(portable, 7, 24, 40, (0, 6), dtype=torch.float64, device="cpu", exact=False)
    laws.check_gradients_of_some(portable, dtype=torch.float32, device="cpu")
    laws.check_bad_input(portable, dtype=torch.float32, device="cpu")


def test_laws_reject_a_wrong_implementation() -> None:
    def swapped(x: torch.Tensor, w_up: torch.Tensor, w_gate: torch.Tensor, *, activation: str) -> torch.Tensor:
        return portable(x, w_gate, w_up, activation=activation)

    with pytest.raises(AssertionError, match="y: error"):
        laws.check_matches_reference(swapped, 9, 24, 40, dtype=torch.bfloat16, device="cpu")


def test_inputs_are_the_declared_arguments() -> None:
    first, again, other = (make_inputs(SIZES, dtype=torch.bfloat16, device="cpu", seed=seed) for seed in (3, 3, 4))
    assert tuple(first) == OPERATION.arguments
    assert [tuple(x.shape) for x in first.values()] == [(10, 16), (16, 24), (16, 24)]
    for name, x in first.items():
        assert torch.equal(x, again[name])
        assert not torch.equal(x, other[name])
    for name, x in k_major_inputs(first).items():
        assert torch.equal(x, first[name])
        assert is_k_major(x) == name.startswith("w_")


def test_declared_code_exists() -> None:
    for implementation in OPERATION.implementations:
        assert callable(OPERATION.function(implementation)), implementation.name
        if implementation.supports:
            supports = resolve(implementation.supports)
            assert supports(SIZES, "bf16", None) is None
            assert supports({**SIZES, "d_ff": 20}, "bf16", None) == "d_ff must be a multiple of 8, got 20"
            assert supports({**SIZES, "d_model": 4}, "bf16", None) == "d_model must be a multiple of 8, got 4"


def test_declared_launches_are_those_chosen() -> None:
    sizes = {"batch": 1, "seq_len": 4096, "d_model": 4096, "d_ff": 14336}
    for name, forward, training in (
        ("fused", "gate", True),
        ("fused_save", "save", True),
        ("fused_save", "gate", False),
    ):
        target = OPERATION.implementation(name).default_config
        assert target is not None
        for dtype, item_bytes in (("bf16", 2), ("fp32", 4)):
            config = resolve(target)(sizes, dtype, (9, 0), training)
            work = 4096 * 4096 * 14336
            for end, tile in ((forward, config.forward), ("gradient", config.gradient)):
                chosen = select_tile(
                    end=end, k_major=True, tokens=4096, work=work, capability=(9, 0), item_bytes=item_bytes
                )
                assert tile == chosen


def test_public_function_takes_the_implementations_name() -> None:
    inputs = list(laws.draw(5, 16, 24, dtype=torch.float32, device="cpu")[0].values())
    assert torch.equal(gated_mlp(*inputs, impl="torch", activation="gelu"), portable(*inputs, activation="gelu"))
    with pytest.raises(ValueError, match="impl must be one of fused, fused_save, torch for gated_mlp, got 'x'"):
        gated_mlp(*inputs, impl="x")
    with pytest.raises(ValueError, match="config must be None for impl torch, got GatedMlpConfig"):
        tile = TileConfig(block_m=16, block_f=16, block_k=16)
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
    gradient = TileConfig(**good)
    assert invalid_reason(GatedMlpConfig(forward=gradient, gradient=gradient)) is None
    assert invalid_reason(GatedMlpConfig(forward=TileConfig(**{**good, **change}), gradient=gradient)) == reason


@pytest.mark.parametrize("end", ["gate", "save", "gradient"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_every_launch_chosen_is_valid(capability: tuple[int, int], end: str) -> None:
    for tokens in (1, 64, 65, 4096):
        for item_bytes in (2, 4):
            for k_major, per_token in itertools.product((True, False), (2**10, 2**40)):
                for aligned in (False, True):
                    tile = select_tile(
                        end=end, k_major=k_major, tokens=tokens, work=tokens * per_token, capability=capability,
                        item_bytes=item_bytes, aligned=aligned,
                    )  # fmt: skip
                    assert invalid_reason(GatedMlpConfig(forward=tile, gradient=tile)) is None
                    assert not tile.use_tma or ((9, 0) <= capability < (12, 0) and aligned and item_bytes == 2)
