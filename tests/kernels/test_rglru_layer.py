"""The RG-LRU layer is its two products and RG-LRU, in the portable and in the fused form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lrbench.kernels import resolve
from lrbench.kernels.common.channels import TileConfig
from lrbench.kernels.rglru import RGLRU_LAYER as OPERATION
from lrbench.kernels.rglru.config import ScanConfig
from lrbench.tests.kernels.laws import FLOAT64_BOUND

SIZES = {"batch": 2, "seq_len": 19, "channels": 24}
PORTABLE = OPERATION.function(OPERATION.implementation("torch"))
TILE = TileConfig(block_i=4, block_o=2, block_c=32, num_warps=1)


def results(fn: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> list[torch.Tensor]:
    """Return h, the last state and the gradients of every argument, in float64."""
    leaves = [x.clone().requires_grad_() for x in inputs.values()]
    h, last = fn(*leaves, return_last_state=True, **kwargs)
    weights = torch.linspace(-1, 1, h.numel(), dtype=torch.float64, device=h.device).view_as(h)
    gradients = torch.autograd.grad((h.double() * weights).sum() + last.double().sum(), leaves)
    return [x.double() for x in (h, last, *gradients)]


def check(name: str, low: Any, dtype: torch.dtype, device: str, sizes: dict[str, int], **kwargs: Any) -> None:
    """Hold an implementation to the float64 definition, by twice the error of the form ``low`` in the same dtype."""
    inputs = resolve(OPERATION.inputs)(sizes, dtype=dtype, device=device, seed=0)
    assert tuple(inputs) == OPERATION.arguments
    exact = results(resolve(OPERATION.recurrent), {name: x.double() for name, x in inputs.items()})
    form = results(low, inputs)
    got = results(OPERATION.function(OPERATION.implementation(name)), inputs, **kwargs)
    for mine, plain, theirs in zip(got, form, exact, strict=True):
        relative = FLOAT64_BOUND if dtype == torch.float64 else torch.finfo(dtype).eps
        allowed = 2 * (plain - theirs).abs().max() + relative * theirs.abs().max()
        assert (mine - theirs).abs().max() <= allowed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_portable_form(dtype: torch.dtype) -> None:
    check("torch", resolve(OPERATION.recurrent), dtype, "cpu", SIZES)


@pytest.mark.interpret
def test_fused_form() -> None:
    check("fused", PORTABLE, torch.float32, "cpu", SIZES, config=ScanConfig(forward=TILE, backward=TILE))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fused_form_on_gpu(dtype: torch.dtype) -> None:
    check("fused", PORTABLE, dtype, "cuda", {"batch": 2, "seq_len": 1000, "channels": 256})


def test_bad_weights_fail_clearly() -> None:
    x, w_a, w_x, c = resolve(OPERATION.inputs)(SIZES, dtype=torch.float32, device="cpu", seed=0).values()
    fn = PORTABLE
    with pytest.raises(ValueError, match=r"w_a must have shape \(24, 24\), got \(24, 23\)"):
        fn(x, w_a[:, :23].contiguous(), w_x, c)
    with pytest.raises(ValueError, match="w_x must be float32, got float16"):
        fn(x, w_a, w_x.half(), c)
