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

from ...kernels import get_operation
from .executed import CAPABILITY, Executed, add
from .model import Problem

GATED_MLP = ("fused", "fused_save")
"""Formulations whose launches are counted, called as our implementations of them."""


def executed_mlp(problem: Problem, direction: str) -> Executed:
    """Return what one pass of a formulation of :data:`GATED_MLP` runs and moves, forward or backward."""
    total = Executed(Counter(), Counter(), Counter())
    tokens = problem.batch * problem.seq_len
    inputs, weights, outputs = tokens * problem.d_model, 2 * problem.d_model * problem.d_ff, tokens * problem.d_ff
    saves = problem.formulation == "fused_save"
    sizes = {name: getattr(problem, name) for name in ("batch", "seq_len", "d_model", "d_ff")}
    declared = get_operation("gated_mlp").implementation(problem.formulation)
    launches = declared.launches("fwbw", problem.dtype, sizes, CAPABILITY)
    needed, width = 4 * tokens * problem.d_model * problem.d_ff, problem.widths.qkv

    def move(name: str, *, loaded: int, stored: int) -> None:
        add(total.bytes, name, {"load": loaded * width, "store": stored * width})

    def project(name: str, products: str, *, stored: int, beside: int = 0) -> None:
        """Add a launch of the projection kernel, which loads ``beside`` elements besides x and the weights."""
        tile = launches.forward if direction == "forward" else launches.gradient
        rows, columns = -(-tokens // tile.block_m), -(-problem.d_ff // tile.block_f)
        steps = -(-problem.d_model // tile.block_k)
        padded = rows * columns * steps * 4 * tile.block_m * tile.block_f * tile.block_k
        add(total.flops, name, {products: needed, "padding": padded - needed})
        move(name, loaded=inputs + weights + beside, stored=stored)
        total.rereads[f"{name}: load"] += ((columns - 1) * inputs + (rows - 1) * weights) * width

    def multiply(name: str, *, loaded: int, stored: int) -> None:
        """Add a gradient that cuBLAS makes."""
        total.flops[f"{name}: products"] += needed
        total.library[f"{name}: products"] += needed
        move(name, loaded=loaded, stored=stored)

    if direction == "forward":
        project("projection", "products", stored=(3 if saves else 1) * outputs)
        return total
    if saves:
        move("activation gradient", loaded=3 * outputs, stored=2 * outputs)
    else:
        project("projection again", "recomputed_products", stored=2 * outputs, beside=outputs)
    multiply("input gradient", loaded=2 * outputs + weights + inputs, stored=2 * inputs)
    multiply("weight gradients", loaded=2 * inputs + 2 * outputs, stored=weights)
    return total
