"""The numerical-error table of the fused gated MLP: errors of a low-precision result over many draws.

Square matrices x, W_up, W_gate [N, N] in one low precision, drawn as torch initialises a linear layer, U(-N^-1/2,
N^-1/2) (Kaiming with a = sqrt(5)). A draw's figures are the largest and the mean absolute difference and the relative
one, ||y - ref|| / ||ref||; a row has their mean and standard deviation over the draws. Held against torch's
silu(x @ w_gate) * (x @ w_up) in the same dtype, as in the source's table: two results, each with errors of its own, the
eager one's three roundings more.

Source: "Towards Fused Kernels for Gated MLP", section Impact on model capabilities and correctness; its numbers
stand in ``analysis/reproduce/gated_mlp.toml``.
"""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ...kernels import get_operation, resolve
from ...results.schema import CASE_COLUMNS, ErrorsRow, case_id
from ..environment import current_environment

if TYPE_CHECKING:
    from torch import Tensor

Figures = tuple[float, float, float]
DRAWS, DTYPE = 10, "bf16"


def error_row(size: int, impl: str, device: str) -> ErrorsRow:
    """Return the row of an implementation of ours at a size N; ValueError where it does not run there."""
    from ...kernels.baselines.pytorch import eager

    function = _function(impl, size, device)
    figures = [figures_of(function, eager, size, seed, device) for seed in range(DRAWS)]
    row: dict[str, Any] = {**dict.fromkeys(CASE_COLUMNS), **current_environment().columns()}
    row |= {"kernel": "gated-mlp", "op": "gated_mlp", "impl": impl, "provider": "lrbench", "mode": "fw", "dtype": DTYPE}
    row |= {"against": "eager", "draws": DRAWS, "batch": 1, "seq_len": size, "d_model": size, "d_ff": size}
    for what, values in zip(("max_abs", "mean_abs", "relative"), zip(*figures, strict=True), strict=True):
        row |= {f"{what}_mean": statistics.fmean(values), f"{what}_std": statistics.pstdev(values)}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return ErrorsRow(**row, run_id=uuid.uuid4().hex, case_id=case_id(row), measured_at=now)


def _function(name: str, size: int, device: str) -> Callable[..., Tensor]:
    """Return what computes y of x, w_up and w_gate; ValueError where it cannot."""
    implementation = get_operation("gated_mlp").implementation(name)
    if device not in implementation.devices:
        raise ValueError(f"impl must run on a {device} device, got {name!r}")
    sizes = {"batch": 1, "seq_len": size, "d_model": size, "d_ff": size}
    if reason := implementation.why_unsupported("fw", DTYPE, None, sizes):
        raise ValueError(f"size must suit {name}: {reason}")
    prepare = resolve(implementation.prepare) if implementation.prepare else lambda inputs: inputs
    call = get_operation("gated_mlp").function(implementation)
    return lambda x, w_up, w_gate: call(*prepare({"x": x, "w_up": w_up, "w_gate": w_gate}).values())


def figures_of(
    function: Callable[..., Tensor], reference: Callable[..., Tensor], size: int, seed: int, device: str
) -> Figures:
    """Return the figures of a function of x, w_up and w_gate on one draw."""
    import torch

    from ..worker.correctness import DTYPES

    generator, bound = torch.Generator(device).manual_seed(seed), size**-0.5
    with torch.no_grad():
        drawn = (torch.empty(size, size, device=device).uniform_(-bound, bound, generator=generator) for _ in range(3))
        inputs = [x.to(DTYPES[DTYPE]) for x in drawn]
        return difference(function(*inputs), reference(*inputs))


def difference(result: Tensor, expected: Tensor) -> Figures:
    """Return the largest and the mean absolute difference, and ||result - expected|| / ||expected||."""
    wide = expected.double() if expected.dtype.itemsize > 4 else expected.float()
    gap = (result.to(wide.dtype) - wide).abs_()
    scale = wide.norm(dtype=wide.dtype)
    return float(gap.max()), float(gap.mean()), float(gap.norm() / scale) if scale > 0 else float(gap.norm())
