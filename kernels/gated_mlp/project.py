"""Both projections and the gating in one kernel: y = act(x W_gate) * (x W_up), nothing but y written.

    up = x W_up        gate = x W_gate        y = act(gate) * up

A program accumulates up and gate of a tile of y in float32 and gates them in registers. How it does follows from where
the weights' elements lie:

- K-major, each column of W in one piece, as torch.nn.Linear holds it: the transposes are accumulated, W_up^T x^T and
  W_gate^T x^T. Both operands of a matrix instruction then lie along D in shared memory, as it reads them best, and a
  thread holds the same elements of up and of gate. Descriptors see to whether the weights lie apart or interleaved.
- Row-major: with interleaved weights (columns 0, 2, 4, ... of W are W_up's, 1, 3, 5, ... W_gate's) one product gives
  both, and a matrix unit leaves neighbouring columns in the registers of one thread, so that taking them apart moves
  nothing. With the two weights apart each has an accumulator of its own.

The backward pass runs the same kernel with another end: from dy it makes the gradients of the pre-activations,

    d_up = dy act(gate)        d_gate = dy up act'(gate)

which never stand in memory themselves. Source: "Towards Fused Kernels for Gated MLP", after Shazeer, GLU Variants
Improve Transformer (2020), equations 5 and 6.
"""

from __future__ import annotations

import triton
import triton.language as tl

SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
TANH_SCALE = tl.constexpr(0.7978845608028654)
TANH_CUBIC = tl.constexpr(0.044715)
TANH_SATURATED = tl.constexpr(20.0)


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
def _load(
    tensor, row, col, rows, cols, stride, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, USE_TMA: tl.constexpr
):
    """Load a tile of a [rows, cols] tensor whose rows lie ``stride`` apart, zeros beyond its ends.

    By descriptor, which has the stride itself, or by pointer.
    """
    if USE_TMA:
        return tensor.load([row, col])
    else:
        offs_row = row + tl.arange(0, BLOCK_ROWS)
        offs_col = col + tl.arange(0, BLOCK_COLS)
        mask = (offs_row < rows)[:, None] & (offs_col < cols)[None, :]
        return tl.load(tensor + offs_row[:, None].to(tl.int64) * stride + offs_col[None, :], mask=mask, other=0.0)


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
    tensor, tensor_gate, up, gate, row, col, M, F, PAIR: tl.constexpr, DTYPE: tl.constexpr, USE_TMA: tl.constexpr
):
    """Store a tile's up and gate [rows, columns of y] apart, or interleaved in one tensor [M, 2F]."""
    if PAIR:
        _store(tensor, up, row, col, M, F, DTYPE, USE_TMA)
        _store(tensor_gate, gate, row, col, M, F, DTYPE, USE_TMA)
    else:
        _store(tensor, tl.interleave(up.to(DTYPE), gate.to(DTYPE)), row, 2 * col, M, 2 * F, DTYPE, USE_TMA)


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
    ACTIVATION: tl.constexpr, END: tl.constexpr, PAIR: tl.constexpr, DTYPE: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Gate a tile's up and gate [BLOCK_M, columns of y] and write what the pass is for; see project_kernel's END."""
    if END == "gradient":
        grad = _load(dy, row, col, M, F, F, up.shape[0], up.shape[1], USE_TMA).to(tl.float32)
        activated, slope = _activate_with_slope(gate, ACTIVATION)
        gate = grad * up * slope
        up = grad * activated
    else:
        _store(y, _activate(gate, ACTIVATION) * up, row, col, M, F, DTYPE, USE_TMA)
    if END != "gate":
        _store_both(pre, pre_gate, up, gate, row, col, M, F, PAIR, DTYPE, USE_TMA)


@triton.jit
def _tile(
    x, w, w_gate, y, pre, pre_gate, dy, tile, M, D, F, w_stride,
    ACTIVATION: tl.constexpr, END: tl.constexpr, PAIR: tl.constexpr, K_MAJOR: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, USE_TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SUBTILES: tl.constexpr,
):  # fmt: skip
    """Compute tile number ``tile`` of y; GROUP_M rows of tiles are walked column by column, for the L2's sake."""
    tiles_m, tiles_f = tl.cdiv(M, BLOCK_M), tl.cdiv(F, BLOCK_F)
    group = tile // (GROUP_M * tiles_f)
    group_size = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    row = (group * GROUP_M + tile % group_size) * BLOCK_M
    col = (tile % (GROUP_M * tiles_f)) // group_size * BLOCK_F

    if K_MAJOR:
        up = tl.zeros((BLOCK_F, BLOCK_M), tl.float32)
        gate = tl.zeros((BLOCK_F, BLOCK_M), tl.float32)
        for k in range(0, D, BLOCK_K):
            x_tile = _load(x, row, k, M, D, D, BLOCK_M, BLOCK_K, USE_TMA)
            up_tile = _load(w, col, k, F, D, w_stride, BLOCK_F, BLOCK_K, USE_TMA)
            gate_tile = _load(w_gate, col, k, F, D, w_stride, BLOCK_F, BLOCK_K, USE_TMA)
            up = tl.dot(up_tile, x_tile.T, up, input_precision=PRECISION)
            gate = tl.dot(gate_tile, x_tile.T, gate, input_precision=PRECISION)
        up, gate = up.T, gate.T
    elif PAIR:
        up = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
        gate = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
        for k in range(0, D, BLOCK_K):
            x_tile = _load(x, row, k, M, D, D, BLOCK_M, BLOCK_K, USE_TMA)
            up_tile = _load(w, k, col, D, F, w_stride, BLOCK_K, BLOCK_F, USE_TMA)
            gate_tile = _load(w_gate, k, col, D, F, w_stride, BLOCK_K, BLOCK_F, USE_TMA)
            up = tl.dot(x_tile, up_tile, up, input_precision=PRECISION)
            gate = tl.dot(x_tile, gate_tile, gate, input_precision=PRECISION)
    else:
        both = tl.zeros((BLOCK_M, 2 * BLOCK_F), tl.float32)
        for k in range(0, D, BLOCK_K):
            x_tile = _load(x, row, k, M, D, D, BLOCK_M, BLOCK_K, USE_TMA)
            w_tile = _load(w, k, 2 * col, D, 2 * F, w_stride, BLOCK_K, 2 * BLOCK_F, USE_TMA)
            both = tl.dot(x_tile, w_tile, both, input_precision=PRECISION)
        up, gate = tl.split(tl.reshape(both, (BLOCK_M, BLOCK_F, 2)))

    if SUBTILES == 1:
        _finish(
            up, gate, y, pre, pre_gate, dy, row, col, M, F, ACTIVATION, END, PAIR, DTYPE, USE_TMA
        )  # fmt: skip
    else:
        tl.static_assert(SUBTILES == 2)
        # A thread of an accumulated transpose holds tokens side by side.
        up_first, up_second = _halves(up, K_MAJOR)
        gate_first, gate_second = _halves(gate, K_MAJOR)
        _finish(
            up_first, gate_first, y, pre, pre_gate, dy, row, col, M, F, ACTIVATION, END, PAIR, DTYPE, USE_TMA
        )  # fmt: skip
        _finish(
            up_second, gate_second, y, pre, pre_gate, dy,
            row + BLOCK_M // 2 if K_MAJOR else row, col if K_MAJOR else col + BLOCK_F // 2, M, F,
            ACTIVATION, END, PAIR, DTYPE, USE_TMA,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def project_kernel(
    x, w, w_gate, y, pre, pre_gate, dy, M, D8, F8, w_stride8,
    ACTIVATION: tl.constexpr, END: tl.constexpr, PAIR: tl.constexpr, K_MAJOR: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, USE_TMA: tl.constexpr, PERSISTENT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SUBTILES: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Project x by both weights and gate, tile of y by tile.

    Grid: (programs,), one a tile of y [M, F], or with PERSISTENT as many as run at a time, each of which walks tiles
    that far apart, in one loop with the steps along D or not (FLATTEN). Tensors are descriptors with USE_TMA, else
    pointers; those that a pass does not need are None.

    Reads x [M, D] and w [D, 2F], even columns up, odd gate; with PAIR w [D, F] and w_gate [D, F]; with K_MAJOR w and
    w_gate as transposes [F, D]. Rows of w, and of w_gate, lie 8 w_stride8 elements apart; that and D8 and F8, D / 8 and
    F / 8, tell the compiler that rows are aligned. By END it writes
        "gate": y [M, F];
        "save": y, and the pre-activations into pre [M, 2F], interleaved; with PAIR into pre and pre_gate [M, F];
        "gradient": from dy [M, F] the gradients of the pre-activations, in the same places.
    """
    D, F, w_stride = D8 * 8, F8 * 8, w_stride8 * 8
    if PERSISTENT:
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(F, BLOCK_F)
        # Flattened with the loop over k, the next tile's loads are under way while this one is gated.
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
            _tile(
                x, w, w_gate, y, pre, pre_gate, dy, tile, M, D, F, w_stride, ACTIVATION, END, PAIR, K_MAJOR, DTYPE,
                PRECISION, USE_TMA, BLOCK_M, BLOCK_F, BLOCK_K, GROUP_M, SUBTILES,
            )  # fmt: skip
    else:
        _tile(
            x, w, w_gate, y, pre, pre_gate, dy, tl.program_id(0), M, D, F, w_stride, ACTIVATION, END, PAIR, K_MAJOR,
            DTYPE, PRECISION, USE_TMA, BLOCK_M, BLOCK_F, BLOCK_K, GROUP_M, SUBTILES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def gate_gradient_kernel(
    pre, pre_gate, dy, d_pre, d_pre_gate, M, F8,
    ACTIVATION: tl.constexpr, PAIR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Make the gradients of saved pre-activations.

    Grid: (ceil(M / BLOCK_M), ceil(F / BLOCK_F)). Reads dy [M, F] and pre [M, 2F], interleaved, or with PAIR pre and
    pre_gate [M, F]; writes d_pre and d_pre_gate like them.
    """
    F = F8 * 8
    row, col = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_F
    grad = _load(dy, row, col, M, F, F, BLOCK_M, BLOCK_F, False).to(tl.float32)
    if PAIR:
        up = _load(pre, row, col, M, F, F, BLOCK_M, BLOCK_F, False)
        gate = _load(pre_gate, row, col, M, F, F, BLOCK_M, BLOCK_F, False)
    else:
        both = _load(pre, row, 2 * col, M, 2 * F, 2 * F, BLOCK_M, 2 * BLOCK_F, False)
        up, gate = tl.split(tl.reshape(both, (BLOCK_M, BLOCK_F, 2)))
    dtype: tl.constexpr = up.dtype
    activated, slope = _activate_with_slope(gate.to(tl.float32), ACTIVATION)
    d_up = grad * activated
    d_gate = grad * up.to(tl.float32) * slope
    _store_both(d_pre, d_pre_gate, d_up, d_gate, row, col, M, F, PAIR, dtype, False)
