"""The numerical-error table of the fused gated MLP: errors of a low-precision result over many draws.

Square matrices x, W_up, W_gate [N, N] in one low precision, drawn as torch initialises a linear layer, U(-N^-1/2,
N^-1/2) (Kaiming with a = sqrt(5)). A draw's figures are the largest and the mean absolute difference and the relative
one, ||y - ref|| / ||ref||; a row has their mean and standard deviation over the draws. Held against

- ``eager``: torch's silu(x @ w_gate) * (x @ w_up) in the same dtype, as in the source's table: two results, each with
  errors of its own, the eager one's three roundings more;
- ``exact``: the definition in float64 on the same inputs, up to :data:`MAX_EXACT`.

Source: "Towards Fused Kernels for Gated MLP", section Impact on model capabilities and correctness; its numbers
stand in ``analysis/reproduce/gated_mlp.toml``.
"""

from __future__ import annotations

import dataclasses
import statistics
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kernels import get_operation, resolve
from ..results import store
from ..results.schema import CASE_COLUMNS, ErrorsRow, case_id
from .environment import current_environment
from .run import file_name

if TYPE_CHECKING:
    from torch import Tensor

DEFINITION = "definition"
"""Besides our implementations: the definition, in float32 inside and rounded once, as the fused kernel does it."""

Figures = tuple[float, float, float]
MAX_EXACT = 16384
"""Largest N whose float64 result is affordable: at 16384, 13 GB and a third of a second on an H200."""


def error_rows(
    *, sizes: Sequence[int], draws: int, impls: Sequence[str], against: Sequence[str], dtype: str, device: str
) -> Iterator[dict[str, Any]]:
    """Yield a row per size N, implementation (of ours and :data:`DEFINITION`) and reference.

    Raises:
        ValueError: an implementation does not run on the device or at a size.
    """
    for size in sizes:
        functions = {name: _function(name, size, dtype, device) for name in impls}
        wanted = [name for name in against if name != "exact" or size <= MAX_EXACT]
        found: dict[tuple[str, str], list[Figures]] = {(name, ref): [] for name in impls for ref in wanted}
        for seed in range(draws):
            _draw_once(size, seed, dtype, device, functions, found)
        for (name, ref), figures in found.items():
            row: dict[str, Any] = {"size": size, "impl": name, "against": ref, "dtype": dtype, "draws": draws}
            for what, values in zip(("max_abs", "mean_abs", "relative"), zip(*figures, strict=True), strict=True):
                row |= {f"{what}_mean": statistics.fmean(values), f"{what}_std": statistics.pstdev(values)}
            yield row


def _function(name: str, size: int, dtype: str, device: str) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Return what computes y of the inputs; ValueError where it cannot."""
    if name == DEFINITION:
        definition = resolve(get_operation("gated_mlp").recurrent)
        return lambda inputs: definition(*inputs.values())
    implementation = get_operation("gated_mlp").implementation(name)
    if device not in implementation.devices:
        raise ValueError(f"impl must run on a {device} device, got {name!r}")
    if implementation.why_not is not None:
        sizes = {"batch": 1, "seq_len": size, "d_model": size, "d_ff": size}
        if reason := resolve(implementation.why_not)(sizes, dtype, None):
            raise ValueError(f"size must suit {name}: {reason}")
    prepare = resolve(implementation.prepare) if implementation.prepare else lambda inputs: inputs
    call = get_operation("gated_mlp").function(implementation)
    return lambda inputs: call(*prepare(inputs).values())


def _draw_once(
    size: int,
    seed: int,
    dtype: str,
    device: str,
    functions: Mapping[str, Callable[[Mapping[str, Tensor]], Tensor]],
    found: Mapping[tuple[str, str], list[Figures]],
) -> None:
    import torch

    from ..kernels.baselines.pytorch import eager
    from .correctness import DTYPES as TORCH_DTYPES

    references: dict[str, Callable[..., Tensor]] = {
        "eager": eager,
        "exact": lambda *inputs: resolve(get_operation("gated_mlp").recurrent)(*[x.double() for x in inputs]),
    }
    generator, bound = torch.Generator(device).manual_seed(seed), size**-0.5
    with torch.no_grad():
        drawn = (torch.empty(size, size, device=device).uniform_(-bound, bound, generator=generator) for _ in range(3))
        inputs = {name: x.to(TORCH_DTYPES[dtype]) for name, x in zip(("x", "w_up", "w_gate"), drawn, strict=True)}
        results = {name: function(inputs) for name, function in functions.items()}
        for ref in dict.fromkeys(ref for _, ref in found):
            expected = references[ref](*inputs.values())
            for name, result in results.items():
                found[name, ref].append(difference(result, expected))


def difference(result: Tensor, expected: Tensor) -> Figures:
    """Return the largest and the mean absolute difference, and ||result - expected|| / ||expected||."""
    wide = expected.double() if expected.dtype.itemsize > 4 else expected.float()
    gap = (result.to(wide.dtype) - wide).abs_()
    scale = wide.norm(dtype=wide.dtype)
    return float(gap.max()), float(gap.mean()), float(gap.norm() / scale) if scale > 0 else float(gap.norm())


def write_rows(rows: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Write the rows as errors-<UTC date and time>-<run id>.errors.parquet and return the path."""
    run_id, stored = uuid.uuid4().hex, []
    shared = {**current_environment().columns(), "run_id": run_id, "kernel": "gated-mlp", "op": "gated_mlp"}
    measured_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    shared |= {"provider": "lrbench", "mode": "fw", "measured_at": measured_at}
    for row in rows:
        measured = {name: value for name, value in row.items() if name != "size"}
        sizes = {"batch": 1, **dict.fromkeys(("seq_len", "d_model", "d_ff"), row["size"])}
        columns: dict[str, Any] = {**dict.fromkeys(CASE_COLUMNS), **shared, **measured, **sizes}
        stored.append(ErrorsRow(**columns, case_id=case_id(columns)))
    path = folder / f"{file_name('errors', run_id)}.errors.parquet"
    store.write_parquet(map(dataclasses.asdict, stored), path, ErrorsRow)
    return path
