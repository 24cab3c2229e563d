"""Both projections and the gating in one kernel: y = act(x W_gate) * (x W_up), without writing the projections.

    up = x W_up        gate = x W_gate        y = act(gate) * up

A program accumulates up and gate of a tile of y over D and gates them in registers. The weights are either

- K-major: each column is contiguous, as torch.nn.Linear stores it. One descriptor of three dimensions describes both
  weights, with their distance in memory as its first stride, and x [W_up | W_gate] is one product with one accumulator;
- or row-major: each row is contiguous. The two products have an accumulator each.

The backward pass runs the same kernel with another last step (END), which computes the gradients of the pre-activations
up and gate from dy, so that up and gate are not written to memory:

    d_up = dy act(gate)        d_gate = dy up act'(gate)

Source: "Towards Fused Kernels for Gated MLP"; Shazeer, GLU Variants Improve Transformer (2020), equations 5 and 6.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.remember import remember_launches
from .config import DIM_MULTIPLE

SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
TANH_SCALE = tl.constexpr(0.7978845608028654)
TANH_CUBIC = tl.constexpr(0.044715)
TANH_SATURATED = tl.constexpr(20.0)

MULTIPLE = tl.constexpr(DIM_MULTIPLE)


@triton.jit
def _activate(g, ACTIVATION: tl.constexpr):
    """Return act(g), float32."""
    if ACTIVATION == "silu":
        return g / (1.0 + tl.exp(-g))
    elif ACTIVATION == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-g))
    elif ACTIVATION == "relu":
        return tl.maximum(g, 0.0)
    elif ACTIVATION == "gelu":
        return 0.5 * g * (1.0 + tl.erf(g * SQRT_HALF))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        return g * _tanh_gate(g)


@triton.jit
def _tanh_gate(g):
    """Return (1 + tanh(s (g + c g^3))) / 2 as a sigmoid, where s is sqrt(2 / pi) and c is TANH_CUBIC."""
    return 1.0 / (1.0 + tl.exp(g * (-2.0 * TANH_SCALE) * (1.0 + TANH_CUBIC * g * g)))


@triton.jit
def _activate_with_slope(g, ACTIVATION: tl.constexpr):
    """Return act(g) and act'(g), float32."""
    if ACTIVATION == "silu":
        s = 1.0 / (1.0 + tl.exp(-g))
        return g * s, s * (1.0 + g * (1.0 - s))
    elif ACTIVATION == "sigmoid":
        s = 1.0 / (1.0 + tl.exp(-g))
        return s, s * (1.0 - s)
    elif ACTIVATION == "relu":
        return tl.maximum(g, 0.0), tl.where(g > 0.0, 1.0, 0.0)
    elif ACTIVATION == "gelu":
        s = 0.5 * (1.0 + tl.erf(g * SQRT_HALF))
        return g * s, s + g * INV_SQRT_2PI * tl.exp(-0.5 * g * g)
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        s = _tanh_gate(g)
        # g is clamped so that g^2 does not overflow; beyond TANH_SATURATED s is 0 or 1, so the second term is 0.
        c = tl.minimum(tl.maximum(g, -TANH_SATURATED), TANH_SATURATED)
        return g * s, s + 2.0 * TANH_SCALE * c * s * (1.0 - s) * (1.0 + 3.0 * TANH_CUBIC * c * c)


@triton.jit
def _load(tensor, row, col, rows, cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, USE_TMA: tl.constexpr):
    """Load a tile of a contiguous [rows, cols] tensor, zeros beyond its ends, by descriptor or by pointer."""
    if USE_TMA:
        return tensor.load([row, col])
    else:
        offs_row = row + tl.arange(0, BLOCK_ROWS)
        offs_col = col + tl.arange(0, BLOCK_COLS)
        mask = (offs_row < rows)[:, None] & (offs_col < cols)[None, :]
        return tl.load(tensor + offs_row[:, None].to(tl.int64) * cols + offs_col[None, :], mask=mask, other=0.0)


@triton.jit
def _load_columns(
    w, gap, col, k, F, D, UNIT: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, USE_TMA: tl.constexpr
):
    """Load a tile [2 * BLOCK_F, BLOCK_K] of both weights' transposes [F, D], W_gate's from gap * UNIT elements on.

    The first half of the rows is W_up's if ``w`` is a pointer. If it is a descriptor [2, F, D], it is that of the
    weight that is first in memory; the caller swaps the products if that is W_gate.
    """
    if USE_TMA:
        return tl.reshape(w.load([0, col, k]), (2 * BLOCK_F, BLOCK_K))
    else:
        rows = tl.arange(0, 2 * BLOCK_F)
        offs_f = col + rows % BLOCK_F
        offs_k = k + tl.arange(0, BLOCK_K)
        starts = offs_f.to(tl.int64) * D + tl.where(rows < BLOCK_F, 0, gap) * UNIT
        mask = (offs_f < F)[:, None] & (offs_k < D)[None, :]
        return tl.load(w + starts[:, None] + offs_k[None, :], mask=mask, other=0.0)


@triton.jit
def _store(tensor, tile, row, col, rows, cols, DTYPE: tl.constexpr, USE_TMA: tl.constexpr):
    """Store the part of a tile that lies inside a contiguous [rows, cols] tensor, by descriptor or by pointer."""
    if USE_TMA:
        tensor.store([row, col], tile.to(DTYPE))
    else:
        offs_row = row + tl.arange(0, tile.shape[0])
        offs_col = col + tl.arange(0, tile.shape[1])
        mask = (offs_row < rows)[:, None] & (offs_col < cols)[None, :]
        tl.store(tensor + offs_row[:, None].to(tl.int64) * cols + offs_col[None, :], tile.to(DTYPE), mask=mask)


@triton.jit
def _halves(tile):
    """Return a tile's left and right half."""
    parts = tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2))
    return tl.split(tl.permute(parts, (0, 2, 1)))


@triton.jit
def _finish(
    up, gate, y, pre_up, pre_gate, dy, row, col, M, F,
    ACTIVATION: tl.constexpr, END: tl.constexpr, DTYPE: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Gate a tile's up and gate [BLOCK_M, columns of y] and write the outputs that END selects, see project_kernel."""
    if END == "gradient":
        grad = _load(dy, row, col, M, F, up.shape[0], up.shape[1], USE_TMA).to(tl.float32)
        activated, slope = _activate_with_slope(gate, ACTIVATION)
        gate = grad * up * slope
        up = grad * activated
    elif END != "products":
        _store(y, _activate(gate, ACTIVATION) * up, row, col, M, F, DTYPE, USE_TMA)
    if END != "gate":
        _store(pre_up, up, row, col, M, F, DTYPE, USE_TMA)
        _store(pre_gate, gate, row, col, M, F, DTYPE, USE_TMA)


@triton.jit
def _compute_tile(
    x, w, w_gate, y, pre_up, pre_gate, dy, tile, M, D, F, gap,
    UNIT: tl.constexpr, ACTIVATION: tl.constexpr, END: tl.constexpr, K_MAJOR: tl.constexpr, DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Compute tile number ``tile`` of y; tiles are numbered in groups of ``group_m`` rows, column by column."""
    USE_TMA: tl.constexpr = TILE.use_tma
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_F: tl.constexpr = TILE.block_f
    BLOCK_K: tl.constexpr = TILE.block_k
    PRECISION: tl.constexpr = "ieee" if tl.float32 == DTYPE else "tf32"
    tiles_m, tiles_f = tl.cdiv(M, BLOCK_M), tl.cdiv(F, BLOCK_F)
    group = tile // (TILE.group_m * tiles_f)
    group_size = tl.minimum(tiles_m - group * TILE.group_m, TILE.group_m)
    row = (group * TILE.group_m + tile % group_size) * BLOCK_M
    col = (tile % (TILE.group_m * tiles_f)) // group_size * BLOCK_F

    if K_MAJOR:
        both = tl.zeros((BLOCK_M, 2 * BLOCK_F), tl.float32)
        for k in range(0, D, BLOCK_K):
            x_tile = _load(x, row, k, M, D, BLOCK_M, BLOCK_K, USE_TMA)
            w_tile = _load_columns(w, gap, col, k, F, D, UNIT, BLOCK_F, BLOCK_K, USE_TMA)
            both = tl.dot(x_tile, w_tile.T, both, input_precision=PRECISION)
        up, gate = tl.split(tl.permute(tl.reshape(both, (BLOCK_M, 2, BLOCK_F)), (0, 2, 1)))
        if USE_TMA:
            up, gate = tl.where(gap < 0, gate, up), tl.where(gap < 0, up, gate)
    else:
        up = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
        gate = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
        for k in range(0, D, BLOCK_K):
            x_tile = _load(x, row, k, M, D, BLOCK_M, BLOCK_K, USE_TMA)
            up_tile = _load(w, k, col, D, F, BLOCK_K, BLOCK_F, USE_TMA)
            gate_tile = _load(w_gate, k, col, D, F, BLOCK_K, BLOCK_F, USE_TMA)
            up = tl.dot(x_tile, up_tile, up, input_precision=PRECISION)
            gate = tl.dot(x_tile, gate_tile, gate, input_precision=PRECISION)

    if TILE.subtiles == 1:
        _finish(up, gate, y, pre_up, pre_gate, dy, row, col, M, F, ACTIVATION, END, DTYPE, USE_TMA)
    else:
        tl.static_assert(TILE.subtiles == 2)
        up_left, up_right = _halves(up)
        gate_left, gate_right = _halves(gate)
        _finish(up_left, gate_left, y, pre_up, pre_gate, dy, row, col, M, F, ACTIVATION, END, DTYPE, USE_TMA)
        col += BLOCK_F // 2
        _finish(up_right, gate_right, y, pre_up, pre_gate, dy, row, col, M, F, ACTIVATION, END, DTYPE, USE_TMA)


@remember_launches
@triton.jit(do_not_specialize=["M", "gap"])
def project_kernel(
    x, w, w_gate, y, pre_up, pre_gate, dy, M, D_multiples, F_multiples, gap: tl.int64,
    UNIT: tl.constexpr, ACTIVATION: tl.constexpr, END: tl.constexpr, K_MAJOR: tl.constexpr, DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Project x by both weights and gate, tile of y by tile.

    Grid: (programs,), one per tile of y [M, F]; if TILE, a GemmConfig, is persistent, as many as run at a time, and
    each takes every programs-th tile. Tensors are descriptors with TILE.use_tma, else pointers; those that a pass does
    not need are None.

    Reads x [M, D] and the weights: w is W_up and w_gate is W_gate, both [D, F]; with K_MAJOR w is W_up^T [F, D], and
    W_gate^T starts gap * UNIT elements after it; with K_MAJOR and use_tma w is one descriptor [2, F, D] of both, in
    their order in memory. D_multiples and F_multiples are D and F in units of MULTIPLE, which tells the compiler that
    rows are aligned. Depending on END it writes
        "gate": y [M, F];
        "save": y, and the pre-activations into pre_up and pre_gate [M, F];
        "products": the pre-activations alone;
        "gradient": the gradients of the pre-activations, computed from dy [M, F], into pre_up and pre_gate.
    """
    D, F = D_multiples * MULTIPLE, F_multiples * MULTIPLE
    if TILE.persistent:
        tiles = tl.cdiv(M, TILE.block_m) * tl.cdiv(F, TILE.block_f)
        # Flattened with the loop over D, the next tile's loads are in flight while this one is gated.
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=TILE.flatten):
            _compute_tile(
                x, w, w_gate, y, pre_up, pre_gate, dy, tile, M, D, F, gap, UNIT, ACTIVATION, END, K_MAJOR, DTYPE, TILE
            )
    else:
        _compute_tile(
            x, w, w_gate, y, pre_up, pre_gate, dy, tl.program_id(0), M, D, F, gap, UNIT, ACTIVATION, END, K_MAJOR,
            DTYPE, TILE,
        )  # fmt: skip


@remember_launches
@triton.jit(do_not_specialize=["multiples"])
def gate_gradient_kernel(
    pre_up, pre_gate, dy, d_up, d_gate, multiples, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute the gradients of saved pre-activations, element by element.

    Grid: (ceil(elements / BLOCK),), where elements = multiples * MULTIPLE. Reads dy, pre_up and pre_gate [M, F]; writes
    d_up and d_gate [M, F].
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offs = start + tl.arange(0, BLOCK)
    mask = offs < multiples.to(tl.int64) * MULTIPLE
    grad = tl.load(dy + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(pre_up + offs, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(pre_gate + offs, mask=mask, other=0.0).to(tl.float32)
    activated, slope = _activate_with_slope(gate, ACTIVATION)
    dtype: tl.constexpr = d_up.dtype.element_ty
    tl.store(d_up + offs, (grad * activated).to(dtype), mask=mask)
    tl.store(d_gate + offs, (grad * up * slope).to(dtype), mask=mask)
