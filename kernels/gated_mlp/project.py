"""Both projections and the gating in one kernel: y = act(x W_gate) * (x W_up), nothing but y written.

    up = x W_up        gate = x W_gate        y = act(gate) * up

A program accumulates up and gate of a tile of y in one product and gates them in registers. How it does follows from
where the weights' elements lie (LAYOUT):

- "interleaved": K-major, each column of W in one piece as torch.nn.Linear holds it, eight columns of W_up and eight of
  W_gate in turn. The transpose is accumulated, W^T x^T. Both operands of a matrix instruction then lie along D in
  shared memory, as it reads them best, and a matrix unit leaves rows that are eight apart in the registers of one
  thread, so that taking up and gate apart moves nothing.
- "columns": two K-major weights apart. One tensor of three dimensions describes both, whose first stride is the
  distance between them in memory; x [W_up | W_gate] is accumulated.
- "rows": two row-major weights apart. Each has an accumulator of its own.

The backward pass runs the same kernel with another end: from dy it makes the gradients of the pre-activations,

    d_up = dy act(gate)        d_gate = dy up act'(gate)

which never stand in memory themselves. Source: "Towards Fused Kernels for Gated MLP", after Shazeer, GLU Variants
Improve Transformer (2020), equations 5 and 6.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .config import DIM_MULTIPLE, INTERLEAVE_COLUMNS

SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
TANH_SCALE = tl.constexpr(0.7978845608028654)
TANH_CUBIC = tl.constexpr(0.044715)
TANH_SATURATED = tl.constexpr(20.0)

INTERLEAVE = tl.constexpr(INTERLEAVE_COLUMNS)
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
    return 1.0 / (1.0 + tl.exp(-2.0 * TANH_SCALE * g * (1.0 + TANH_CUBIC * g * g)))


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
        # Beyond it s is 0 or 1 and the second term vanishes; its polynomial must not overflow there.
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
    """Load a tile [2 * BLOCK_F, BLOCK_K] of two transposes [F, D], the gate's gap UNITs behind the other one.

    By descriptor [2, F, D] the one that lies first in memory comes first, by pointer w's.
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
    """Store a tile of a contiguous [rows, cols] tensor, as far as it lies in it, by descriptor or by pointer."""
    if USE_TMA:
        tensor.store([row, col], tile.to(DTYPE))
    else:
        offs_row = row + tl.arange(0, tile.shape[0])
        offs_col = col + tl.arange(0, tile.shape[1])
        mask = (offs_row < rows)[:, None] & (offs_col < cols)[None, :]
        tl.store(tensor + offs_row[:, None].to(tl.int64) * cols + offs_col[None, :], tile.to(DTYPE), mask=mask)


@triton.jit
def _store_both(
    tensor, tensor_gate, up, gate, row, col, M, F, LAYOUT: tl.constexpr, DTYPE: tl.constexpr, USE_TMA: tl.constexpr
):
    """Store a tile's up and gate [rows, columns of y] apart, or in turn in one tensor [M, 2F] as the weights are."""
    if LAYOUT == "interleaved":
        BM: tl.constexpr = up.shape[0]
        BF: tl.constexpr = up.shape[1]
        blocks: tl.constexpr = (BM, BF // INTERLEAVE, INTERLEAVE)
        both = tl.join(tl.reshape(up.to(DTYPE), blocks), tl.reshape(gate.to(DTYPE), blocks))
        both = tl.reshape(tl.permute(both, (0, 1, 3, 2)), (BM, 2 * BF))
        _store(tensor, both, row, 2 * col, M, 2 * F, DTYPE, USE_TMA)
    else:
        _store(tensor, up, row, col, M, F, DTYPE, USE_TMA)
        _store(tensor_gate, gate, row, col, M, F, DTYPE, USE_TMA)


@triton.jit
def _halves(tile, ROWS: tl.constexpr):
    """Return a tile's upper and lower half with ROWS, else its left and right one."""
    if ROWS:
        parts = tl.reshape(tile, (2, tile.shape[0] // 2, tile.shape[1]))
        return tl.split(tl.permute(parts, (1, 2, 0)))
    else:
        parts = tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2))
        return tl.split(tl.permute(parts, (0, 2, 1)))


@triton.jit
def _finish(
    up, gate, y, pre, pre_gate, dy, row, col, M, F,
    ACTIVATION: tl.constexpr, END: tl.constexpr, LAYOUT: tl.constexpr, DTYPE: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Gate a tile's up and gate [BLOCK_M, columns of y] and write what the pass is for; see project_kernel's END."""
    if END == "gradient":
        grad = _load(dy, row, col, M, F, up.shape[0], up.shape[1], USE_TMA).to(tl.float32)
        activated, slope = _activate_with_slope(gate, ACTIVATION)
        gate = grad * up * slope
        up = grad * activated
    else:
        _store(y, _activate(gate, ACTIVATION) * up, row, col, M, F, DTYPE, USE_TMA)
    if END != "gate":
        _store_both(pre, pre_gate, up, gate, row, col, M, F, LAYOUT, DTYPE, USE_TMA)


@triton.jit
def _tile(
    x, w, w_gate, y, pre, pre_gate, dy, tile, M, D, F, gap,
    UNIT: tl.constexpr, ACTIVATION: tl.constexpr, END: tl.constexpr, LAYOUT: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, USE_TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """Compute tile number ``tile`` of y; GROUP_M rows of tiles are walked column by column, for the L2's sake."""
    tiles_m, tiles_f = tl.cdiv(M, BLOCK_M), tl.cdiv(F, BLOCK_F)
    group = tile // (GROUP_M * tiles_f)
    group_size = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    row = (group * GROUP_M + tile % group_size) * BLOCK_M
    col = (tile % (GROUP_M * tiles_f)) // group_size * BLOCK_F

    if LAYOUT == "interleaved":
        both = tl.zeros((2 * BLOCK_F, BLOCK_M), tl.float32)
        for k in range(0, D, BLOCK_K):
            x_tile = _load(x, row, k, M, D, BLOCK_M, BLOCK_K, USE_TMA)
            w_tile = _load(w, 2 * col, k, 2 * F, D, 2 * BLOCK_F, BLOCK_K, USE_TMA)
            both = tl.dot(w_tile, x_tile.T, both, input_precision=PRECISION)
        both = tl.reshape(both, (BLOCK_F // INTERLEAVE, 2, INTERLEAVE, BLOCK_M))
        up, gate = tl.split(tl.permute(both, (0, 2, 3, 1)))
        up, gate = tl.reshape(up, (BLOCK_F, BLOCK_M)).T, tl.reshape(gate, (BLOCK_F, BLOCK_M)).T
    elif LAYOUT == "columns":
        both = tl.zeros((BLOCK_M, 2 * BLOCK_F), tl.float32)
        for k in range(0, D, BLOCK_K):
            x_tile = _load(x, row, k, M, D, BLOCK_M, BLOCK_K, USE_TMA)
            w_tile = _load_columns(w, gap, col, k, F, D, UNIT, BLOCK_F, BLOCK_K, USE_TMA)
            both = tl.dot(x_tile, w_tile.T, both, input_precision=PRECISION)
        up, gate = tl.split(tl.permute(tl.reshape(both, (BLOCK_M, 2, BLOCK_F)), (0, 2, 1)))
        if USE_TMA:
            up, gate = tl.where(gap < 0, gate, up), tl.where(gap < 0, up, gate)
    else:
        tl.static_assert(LAYOUT == "rows")
        up = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
        gate = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
        for k in range(0, D, BLOCK_K):
            x_tile = _load(x, row, k, M, D, BLOCK_M, BLOCK_K, USE_TMA)
            up_tile = _load(w, k, col, D, F, BLOCK_K, BLOCK_F, USE_TMA)
            gate_tile = _load(w_gate, k, col, D, F, BLOCK_K, BLOCK_F, USE_TMA)
            up = tl.dot(x_tile, up_tile, up, input_precision=PRECISION)
            gate = tl.dot(x_tile, gate_tile, gate, input_precision=PRECISION)

    if SUBTILES == 1:
        _finish(
            up, gate, y, pre, pre_gate, dy, row, col, M, F, ACTIVATION, END, LAYOUT, DTYPE, USE_TMA
        )  # fmt: skip
    else:
        tl.static_assert(SUBTILES == 2)
        # A thread of an accumulated transpose holds tokens side by side.
        LOWER: tl.constexpr = LAYOUT == "interleaved"
        up_first, up_second = _halves(up, LOWER)
        gate_first, gate_second = _halves(gate, LOWER)
        _finish(
            up_first, gate_first, y, pre, pre_gate, dy, row, col, M, F, ACTIVATION, END, LAYOUT, DTYPE, USE_TMA
        )  # fmt: skip
        _finish(
            up_second, gate_second, y, pre, pre_gate, dy,
            row + BLOCK_M // 2 if LOWER else row, col if LOWER else col + BLOCK_F // 2, M, F,
            ACTIVATION, END, LAYOUT, DTYPE, USE_TMA,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "gap"])
def project_kernel(
    x, w, w_gate, y, pre, pre_gate, dy, M, D_multiples, F_multiples, gap: tl.int64,
    UNIT: tl.constexpr, ACTIVATION: tl.constexpr, END: tl.constexpr, LAYOUT: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, USE_TMA: tl.constexpr, PERSISTENT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SUBTILES: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Project x by both weights and gate, tile of y by tile.

    Grid: (programs,), one a tile of y [M, F], or with PERSISTENT as many as run at a time, each of which walks tiles
    that far apart, in one loop with the steps along D or not (FLATTEN). Tensors are descriptors with USE_TMA, else
    pointers; those that a pass does not need are None.

    Reads x [M, D] and the weights, by LAYOUT
        "interleaved": w [2F, D], INTERLEAVE rows of W_up^T and as many of W_gate^T in turn;
        "columns": w, W_up^T [F, D], and W_gate^T gap * UNIT elements behind it; with USE_TMA both in one [2, F, D], in
            the order in which they lie in memory;
        "rows": w and w_gate [D, F].
    D_multiples and F_multiples are D and F in units of MULTIPLE, which tells the compiler that rows are aligned. By END
    it writes
        "gate": y [M, F];
        "save": y, and the pre-activations into pre and pre_gate [M, F], or interleaved as w is into pre [M, 2F];
        "gradient": from dy [M, F] the gradients of the pre-activations, in the same places.
    """
    D, F = D_multiples * MULTIPLE, F_multiples * MULTIPLE
    if PERSISTENT:
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(F, BLOCK_F)
        # Flattened with the loop over k, the next tile's loads are under way while this one is gated.
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
            _tile(
                x, w, w_gate, y, pre, pre_gate, dy, tile, M, D, F, gap, UNIT, ACTIVATION, END, LAYOUT, DTYPE, PRECISION,
                USE_TMA, BLOCK_M, BLOCK_F, BLOCK_K, GROUP_M, SUBTILES,
            )  # fmt: skip
    else:
        _tile(
            x, w, w_gate, y, pre, pre_gate, dy, tl.program_id(0), M, D, F, gap, UNIT, ACTIVATION, END, LAYOUT, DTYPE,
            PRECISION, USE_TMA, BLOCK_M, BLOCK_F, BLOCK_K, GROUP_M, SUBTILES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def gate_gradient_kernel(
    pre, pre_gate, dy, d_pre, d_pre_gate, M, F_multiples,
    ACTIVATION: tl.constexpr, PAIR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Make the gradients of saved pre-activations.

    Grid: (ceil(M / BLOCK_M), ceil(F / BLOCK_F)). Reads dy [M, F] and pre [M, 2F], INTERLEAVE columns of up and of gate
    in turn, or with PAIR pre and pre_gate [M, F]; writes d_pre and d_pre_gate like them.
    """
    F = F_multiples * MULTIPLE
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    blocks = tl.program_id(1) * (BLOCK_F // INTERLEAVE) + tl.arange(0, BLOCK_F // INTERLEAVE)
    mask = (rows < M)[:, None, None] & (blocks * INTERLEAVE < F)[None, :, None]
    line = rows.to(tl.int64)[:, None, None] * F
    within = tl.arange(0, INTERLEAVE)[None, None, :]
    offs = line + blocks[None, :, None] * INTERLEAVE + within
    if PAIR:
        offs_up, offs_gate = offs, offs
    else:
        offs_up = 2 * line + blocks[None, :, None] * (2 * INTERLEAVE) + within
        offs_gate = offs_up + INTERLEAVE
        pre_gate, d_pre_gate = pre, d_pre
    grad = tl.load(dy + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(pre + offs_up, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(pre_gate + offs_gate, mask=mask, other=0.0).to(tl.float32)
    activated, slope = _activate_with_slope(gate, ACTIVATION)
    dtype: tl.constexpr = d_pre.dtype.element_ty
    tl.store(d_pre + offs_up, (grad * activated).to(dtype), mask=mask)
    tl.store(d_pre_gate + offs_gate, (grad * up * slope).to(dtype), mask=mask)
