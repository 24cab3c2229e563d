"""What the gated MLP's Triton kernels run and move in 16-bit dtypes, padding included: what hardware counters see.

M are tokens, D ``d_model`` and F ``d_ff``. A projection makes y, or the gradients of both pre-activations, in tiles of
BLOCK_M tokens and BLOCK_F columns, for each of which it accumulates both projections from the same tiles of x and
BLOCK_F columns of each weight. So it

- multiplies 4 BLOCK_M BLOCK_F BLOCK_K for each of ceil(M / BLOCK_M) ceil(F / BLOCK_F) tiles and ceil(D / BLOCK_K) steps
- loads x ceil(F / BLOCK_F) times and both weights ceil(M / BLOCK_M) times, of which all but once is read again.

Elements loaded and stored, each tensor once a launch:

    forward     projection              all                  M D + 2 D F          M F, and 2 M F where they are saved
    backward    projection again        fused                M D + 2 D F + M F    2 M F
                activation gradient     fused_save           3 M F                2 M F
                input gradient: two     all                  2 M F + 2 D F + M D  2 M D
                  products, of which the second adds
                weight gradients        all                  2 M D + 2 M F        2 D F

The last two are products of cuBLAS. Their tiles are its own, so they are counted as they stand: without padding, and
without what its programs read again. A forward pass that needs no gradient saves nothing: it is that of ``fused``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .executed import Executed

GATED_MLP = ("fused", "fused_save")
"""Implementations whose launches are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionTile:
    """Tokens and columns of a tile of y, and the step along D."""

    block_m: int
    block_f: int
    block_k: int


FEW_TOKENS = 64
"""Up to so many tokens the weights' bandwidth counts, and tiles are narrow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projections:
    """A gated MLP as one of :data:`GATED_MLP` runs it. ``width`` are bytes of an element."""

    kernels: str
    tokens: int
    d_model: int
    d_ff: int
    width: int = 2

    @property
    def tile(self) -> ProjectionTile:
        """The tile of a projection on compute capability 9.0."""
        if self.tokens <= FEW_TOKENS:
            return ProjectionTile(block_m=64, block_f=64, block_k=64)
        return ProjectionTile(block_m=128, block_f=128, block_k=64)


def executed_mlp(run: Projections, direction: str) -> Executed:
    """Return what one pass runs and moves: ``direction`` is forward or backward."""
    total = Executed(Counter(), Counter(), Counter())
    inputs, weights, outputs = run.tokens * run.d_model, 2 * run.d_model * run.d_ff, run.tokens * run.d_ff
    saves = run.kernels == "fused_save"
    if direction == "forward":
        _projection(run, total, "projection", stored=(3 if saves else 1) * outputs)
        return total
    if saves:
        _move(run, total, "activation gradient", loaded=3 * outputs, stored=2 * outputs)
    else:
        _projection(run, total, "projection again", stored=2 * outputs, beside=outputs, recomputed=True)
    _library(run, total, "input gradient", loaded=2 * outputs + weights + inputs, stored=2 * inputs)
    _library(run, total, "weight gradients", loaded=2 * inputs + 2 * outputs, stored=weights)
    return total


def _projection(
    run: Projections, total: Executed, name: str, *, stored: int, beside: int = 0, recomputed: bool = False
) -> None:
    """Add a launch of the projection kernel, which loads ``beside`` elements besides x and the weights."""
    tile, inputs, weights = run.tile, run.tokens * run.d_model, 2 * run.d_model * run.d_ff
    rows, columns = -(-run.tokens // tile.block_m), -(-run.d_ff // tile.block_f)
    steps = -(-run.d_model // tile.block_k)
    needed = _product(run)
    total.flops[f"{name}: {'recomputed_' if recomputed else ''}products"] += needed
    padded = rows * columns * steps * 4 * tile.block_m * tile.block_f * tile.block_k
    if padded > needed:
        total.flops[f"{name}: padding"] += padded - needed
    _move(run, total, name, loaded=inputs + weights + beside, stored=stored)
    total.rereads[f"{name}: load"] += ((columns - 1) * inputs + (rows - 1) * weights) * run.width


def _library(run: Projections, total: Executed, name: str, *, loaded: int, stored: int) -> None:
    """Add a gradient that cuBLAS makes."""
    total.flops[f"{name}: products"] += _product(run)
    total.library[f"{name}: products"] += _product(run)
    _move(run, total, name, loaded=loaded, stored=stored)


def _product(run: Projections) -> int:
    """Return the FLOPs of both projections, as of both parts of a gradient."""
    return 4 * run.tokens * run.d_model * run.d_ff


def _move(run: Projections, total: Executed, name: str, *, loaded: int, stored: int) -> None:
    total.bytes[f"{name}: load"] += loaded * run.width
    total.bytes[f"{name}: store"] += stored * run.width
