"""The state that a walker of whole_state.py holds: S^T in registers, part by part.

A part here is a tensor [64, width]: one slice of the output's columns by at most 128 columns of X and Y. A walker has
the parts of its first slice, then those of its second, if any. Functions return "asynchronous" products before they are
complete; wait_for waits for them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .whole_state_tiles import BZ, DECAY, WARPS, WEIGHT, elements


@gluon.constexpr_function
def state_layout(width):
    """Return the layout of a part of the state, [BZ, width]."""
    return gl.NVMMADistributedLayout([3, 0], [WARPS.value, 1], [16, width, 16])


@gluon.jit
def columns_of(buffer, stage, WIDTH: gl.constexpr):
    """Return a part's tile [BT, WIDTH] of X or Y in a stage; in shared memory it has at least 64 columns."""
    return buffer.index(stage).slice(0, WIDTH, dim=1)


@gluon.jit
def elements_of(start, index: gl.constexpr, x_col, z_col, SHAPE: gl.constexpr, ROLE: gl.constexpr, TILE: gl.constexpr):
    """Return pointers to a part of the state in memory and a mask of the elements that exist.

    Args:
        start: the whole state of the head; the walker's begins at columns ``x_col`` and ``z_col``.
        index: number of the part among those of the walker.
    """
    NX: gl.constexpr = len(TILE.widths)
    layout: gl.constexpr = state_layout(TILE.widths[index % NX])
    offs_z = z_col + index // NX * BZ + gl.arange(0, BZ, gl.SliceLayout(1, layout))
    offs_x = x_col + index % NX * 128 + gl.arange(0, TILE.widths[index % NX], gl.SliceLayout(0, layout))
    mask = (offs_z < SHAPE.dim_z)[:, None] & (offs_x < SHAPE.dim_x)[None, :]
    return elements(start, offs_z, offs_x, SHAPE.dim_x, SHAPE.dim_z, ROLE.transposed), mask


@gluon.jit
def _load(
    states, number, index: gl.constexpr, x_col, z_col, SHAPE: gl.constexpr, ROLE: gl.constexpr, TILE: gl.constexpr
):
    """Return a part of state number ``number`` of ``states``, in float32."""
    ptrs, mask = elements_of(states + number * (SHAPE.dim_x * SHAPE.dim_z), index, x_col, z_col, SHAPE, ROLE, TILE)
    return gl.load(ptrs, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def load_part(pointers, chunk, index: gl.constexpr, z_col, SHAPE: gl.constexpr, ROLE: gl.constexpr, TILE: gl.constexpr):
    """Return a part of the state with which a chunk starts; that of a whole head is the initial state."""
    width: gl.constexpr = TILE.widths[index % len(TILE.widths)]
    part = gl.zeros([BZ, width], gl.float32, state_layout(width))
    if pointers.states is not None:
        if chunk.is_whole == 0:
            part = _load(pointers.states, chunk.number, index, chunk.x_col, z_col, SHAPE, ROLE, TILE)
    if pointers.initial is not None:
        if chunk.is_whole:
            part = _load(pointers.initial, chunk.pid_bh, index, chunk.x_col, z_col, SHAPE, ROLE, TILE)
    return part


@gluon.jit
def flat_elements(anchor, part: gl.constexpr, TILE: gl.constexpr):
    """Return pointers to a part's elements in the state at an anchor, in the order of :func:`flatten`."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    return anchor + part * BZ * 128 + gl.arange(0, BZ * TILE.widths[part], layout=layout)


@gluon.jit
def flatten(state):
    """Return a part's elements in an order in which each thread's are runs of 16 bytes, for fast loads and stores."""
    # A thread of the layout has rows lane / 4 and lane / 4 + 8 of its warp's sixteen, and of every eight columns the
    # pair lane % 4: rows are (warp, half, lane / 4), columns (which 32, which 8 of them, lane % 4, which of the pair).
    BX: gl.constexpr = state.shape[1]
    parts = state.reshape([WARPS, 2, 8, BX // 32, 4, 4, 2])
    flat = parts.permute((1, 3, 0, 2, 5, 4, 6)).reshape([BZ * BX])
    return gl.convert_layout(flat, gl.BlockedLayout([8], [32], [WARPS], [0]))


@gluon.jit
def _multiply_part(state, x, out, FIRST: gl.constexpr, layout: gl.constexpr):
    """Return ``out + state @ x`` [BZ, BT], asynchronous, for a part of S^T [BZ, width] and of X^T [width, BT].

    The state is rounded and multiplied half by half, so that only half of the rounded state is in registers at a time.
    """
    HALF: gl.constexpr = state.shape[1] // 2
    halves = state.reshape([BZ, 2, HALF]).permute((0, 2, 1)).split()
    for half in gl.static_range(2):
        if not (FIRST and half == 0):
            out = warpgroup_mma_wait(0, deps=[out])
        operand = gl.convert_layout(halves[half].to(x.dtype), gl.DotOperandLayout(0, layout, 2))
        columns = x.slice(half * HALF, HALF)
        out = warpgroup_mma(operand, columns, out, is_async=True, use_acc=not FIRST or half == 1)
    return out


@gluon.jit
def multiply(state, x, stage, layout: gl.constexpr):
    """Return S^T X^T [BZ, BT], asynchronous: the sum over the parts of S^T and X."""
    BT: gl.constexpr = x[0].shape[1]
    out = gl.zeros([BZ, BT], gl.float32, layout)
    for part in gl.static_range(len(state)):
        columns = columns_of(x[part], stage, state[part].shape[1])
        out = _multiply_part(state[part], columns.permute((1, 0)), out, part == 0, layout)
    return out


@gluon.jit
def _enter_part(weighted, y, state, gates, BT: gl.constexpr):
    """Return ``decay state + weighted @ y``, asynchronous, for a part of S^T and of Y."""
    layout: gl.constexpr = state_layout(state.shape[1])
    decay = gates.slice(DECAY * BT, BT).load(gl.SliceLayout(1, layout))[:, None]
    operand = gl.convert_layout(weighted, gl.DotOperandLayout(0, layout, 2))
    return warpgroup_mma(operand, y, state * decay, is_async=True)


@gluon.jit
def enter(z_t, y, stage, state, gates, BT: gl.constexpr):
    """Return the parts of S^T after the tile, asynchronous."""
    layout: gl.constexpr = gl.DotOperandLayout(0, state_layout(state[0].shape[1]), 2)
    weight = gates.slice(WEIGHT * BT, BT).load(gl.SliceLayout(0, layout))[None, :]
    weighted = (z_t.load(layout).to(gl.float32) * weight).to(z_t.dtype)
    new_state = ()
    for part in gl.static_range(len(state)):
        columns = columns_of(y[part], stage, state[part].shape[1])
        new_state += (_enter_part(weighted, columns, state[part], gates, BT),)
    return new_state


@gluon.jit
def wait_for(tiles):
    """Wait for asynchronous products and return them."""
    if len(tiles) == 1:
        return (warpgroup_mma_wait(0, deps=tiles),)
    else:
        return warpgroup_mma_wait(0, deps=tiles)
