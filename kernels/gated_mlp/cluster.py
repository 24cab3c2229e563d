"""The projection kernel of project.py for Hopper, with a warp that loads and weights that a cluster shares.

    up = x W_up        gate = x W_gate        y = act(gate) * up

One warp loads. Two warpgroups, the consumers, multiply 64 rows of x each by the same tile of interleaved weights; what
is left to a warp of theirs in a step along D is 58 instructions, three of them on vectors, and two waits for its own
warpgroup, where one of project_kernel's has 120, 53 on vectors, and four waits for the whole program. Each gates its
rows while the other one still multiplies. At sizes where the chip runs at its power limit, instructions cost time even
where the matrix units hide them.

So do bytes that travel from L2: two programs may form a cluster, one above the other, and what the first one loads of
the weights is multicast to both, 32 KiB for each step of 64 along D instead of 48.

Written in Gluon, Triton's language of layouts and barriers. Clusters need Triton 3.8, before which an arrival at a
barrier does not leave its program. Source of the equations: see project.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .config import CONSUMER_ROWS, CONSUMERS, TileConfig
from .project import _activate, _place

ROWS = gl.constexpr(CONSUMER_ROWS)
# Triton 3.8 renamed both.
_load_async = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store_async = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
CLUSTERS_SINCE = (3, 8)
MAX_REGISTERS, CONSUMER_REGISTERS, LOADER_REGISTERS = 168, 240, 24
"""Registers a thread: of three warpgroups alike at first, then of consumers and of the loading warp's warpgroup."""


@gluon.jit
def _load_tiles(
    x, w, x_tiles, w_tiles, ready, free, both_free, M, D, F,
    CTAS: gl.constexpr, BLOCK_F: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the tiles of x and w for every step of every tile of y, at most STAGES steps ahead of the products."""
    BLOCK_M: gl.constexpr = 2 * CTAS * ROWS
    STEP_BYTES: gl.constexpr = BLOCK_K * (2 * ROWS + 2 * BLOCK_F) * x.dtype.primitive_bitwidth // 8
    tiles_m, tiles_f = gl.cdiv(M, BLOCK_M), gl.cdiv(F, BLOCK_F)
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_f, gl.num_programs(0)):
        row, col = _place(tile, tiles_m, tiles_f, GROUP_M)
        for k in range(0, D, BLOCK_K):
            stage = step % STAGES
            # A barrier's phase before its first one counts as over: the first STAGES steps wait for nothing.
            phase = (step // STAGES & 1) ^ 1
            mbarrier.wait(free.index(stage), phase)
            arrival = ready.index(stage)
            mbarrier.expect(arrival, STEP_BYTES)
            _load_async(x, [row * BLOCK_M, k], arrival, x_tiles.index(2 * stage))
            _load_async(x, [row * BLOCK_M + CTAS * ROWS, k], arrival, x_tiles.index(2 * stage + 1))
            if CTAS == 1:
                _load_async(w, [k, 2 * BLOCK_F * col], arrival, w_tiles.index(stage))
            else:
                # Only the first program waits here, and only it loads: into its own tile and its neighbour's.
                mbarrier.wait(both_free.index(stage), phase)
                _load_async(w, [k, 2 * BLOCK_F * col], arrival, w_tiles.index(stage), multicast=True)
            step += 1
    if CTAS > 1:
        # The neighbour's arrivals at the first program's barriers must find it alive.
        for _ in gl.static_range(STAGES):
            mbarrier.wait(both_free.index(step % STAGES), (step // STAGES & 1) ^ 1)
            step += 1


@gluon.jit
def _release(free, both_free, stage, pred, CTAS: gl.constexpr):
    """Give back a stage: to this program's loads, and to those that write into both programs of a cluster."""
    mbarrier.arrive(free.index(stage), count=1, pred=pred)
    if CTAS > 1:
        mbarrier.arrive(both_free.index(stage), count=1, pred=pred)


@gluon.jit
def _consume(
    y, x_tiles, w_tiles, y_tiles, ready, free, both_free, M, D, F,
    ACTIVATION: gl.constexpr, CONSUMER: gl.constexpr, CTAS: gl.constexpr, BLOCK_F: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply, gate and store one consumer's rows of every tile of y."""
    BLOCK_M: gl.constexpr = 2 * CTAS * ROWS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * BLOCK_F, 16], cga_layout=[[1, 0]] * (CTAS - 1)
    )
    tiles_m, tiles_f = gl.cdiv(M, BLOCK_M), gl.cdiv(F, BLOCK_F)
    y_tile = y_tiles.index(CONSUMER)
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_f, gl.num_programs(0)):
        row, col = _place(tile, tiles_m, tiles_f, GROUP_M)
        both = gl.zeros([CTAS * ROWS, 2 * BLOCK_F], gl.float32, layout=layout)
        for k in range(0, D, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), step // STAGES & 1)
            both = warpgroup_mma(x_tiles.index(2 * stage + CONSUMER), w_tiles.index(stage), both, is_async=True)
            # This step's product runs on while the one before it is waited for.
            both = warpgroup_mma_wait(num_outstanding=1, deps=(both,))
            _release(free, both_free, (step + STAGES - 1) % STAGES, k > 0, CTAS)
            step += 1
        both = warpgroup_mma_wait(num_outstanding=0, deps=(both,))
        _release(free, both_free, (step + STAGES - 1) % STAGES, True, CTAS)
        up, gate = gl.split(gl.reshape(both, [CTAS * ROWS, BLOCK_F, 2]))
        gated = (_activate(gate, ACTIVATION) * up).to(y.dtype)
        tma.store_wait(0)
        y_tile.store(gated)
        fence_async_shared()
        _store_async(y, [row * BLOCK_M + CONSUMER * CTAS * ROWS, col * BLOCK_F], y_tile)
    tma.store_wait(0)


@gluon.jit
def project_specialised_kernel(
    x, w, y, M, D8, F8,
    ACTIVATION: gl.constexpr, BLOCK_F: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr, CONSUMER_REGS: gl.constexpr, LOADER_REGS: gl.constexpr,
):  # fmt: skip
    """Project x by interleaved weights and gate, tile of y by tile, 128 rows a program.

    Grid: (clusters,), as many as run at a time, each of which walks tiles that far apart; num_ctas programs a cluster,
    each 4 warps and what the others are specialised for. Tensors are descriptors, of tiles of all programs of a
    cluster and one consumer. Reads x [M, D] and w [D, 2F], even columns up, odd gate; D8 and F8 are D / 8 and F / 8.
    Writes y [M, F].
    """
    D, F = D8 * 8, F8 * 8
    CTAS: gl.constexpr = gl.num_ctas()
    x_tiles = gl.allocate_shared_memory(x.dtype, [2 * STAGES, CTAS * ROWS, BLOCK_K], x.layout)
    w_tiles = gl.allocate_shared_memory(w.dtype, [STAGES, BLOCK_K, 2 * BLOCK_F], w.layout)
    y_tiles = gl.allocate_shared_memory(y.dtype, [2, CTAS * ROWS, BLOCK_F], y.layout)
    own: gl.constexpr = mbarrier.MBarrierLayout(cga_layout=[[1]] * (CTAS - 1))
    common: gl.constexpr = mbarrier.MBarrierLayout(cga_layout=[[0]] * (CTAS - 1))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, CTAS], own)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, CTAS], own)
    both_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], common)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
        # Two consumers of every program: Triton counts the programs itself.
        mbarrier.init(both_free.index(stage), count=2)
    gl.warp_specialize(
        [
            (_consume, (
                y, x_tiles, w_tiles, y_tiles, ready, free, both_free, M, D, F,
                ACTIVATION, 0, CTAS, BLOCK_F, BLOCK_K, GROUP_M, STAGES,
            )),
            (_consume, (
                y, x_tiles, w_tiles, y_tiles, ready, free, both_free, M, D, F,
                ACTIVATION, 1, CTAS, BLOCK_F, BLOCK_K, GROUP_M, STAGES,
            )),
            (_load_tiles, (
                x, w, x_tiles, w_tiles, ready, free, both_free, M, D, F, CTAS, BLOCK_F, BLOCK_K, GROUP_M, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGS, LOADER_REGS],
    )  # fmt: skip


def project_specialised(
    x: Tensor, w: Tensor, y: Tensor, *, activation: str, config: TileConfig, multiprocessors: int
) -> None:
    """Launch project_specialised_kernel: write y [M, F] from x [M, D] and interleaved weights w [D, 2F]."""
    ctas, block_f, block_k = config.num_ctas, config.block_f, config.block_k
    if ctas > 1 and (version := triton_version()) < CLUSTERS_SINCE:
        needed, found = (".".join(map(str, each)) for each in (CLUSTERS_SINCE, version))
        raise ValueError(f"config: num_ctas above 1 needs triton {needed}, got {found}")
    rows = ctas * CONSUMER_ROWS
    split, copied = [[1, 0]] * (ctas - 1), [[0, 0]] * (ctas - 1)

    def tile(tensor: Tensor, shape: list[int], programs: list[list[int]]) -> Any:
        layout = gl.NVMMASharedLayout.get_default_for(shape, DTYPES[tensor.dtype], cga_layout=programs or None)
        return TensorDescriptor.from_tensor(tensor.detach(), shape, layout)

    tiles = triton.cdiv(x.shape[0], rows * CONSUMERS) * triton.cdiv(y.shape[1], block_f)
    project_specialised_kernel[(min(tiles, multiprocessors // ctas),)](
        tile(x, [rows, block_k], split),
        tile(w, [block_k, 2 * block_f], copied),
        tile(y, [rows, block_f], split),
        x.shape[0],
        x.shape[1] // 8,
        y.shape[1] // 8,
        ACTIVATION=activation,
        BLOCK_F=block_f,
        BLOCK_K=block_k,
        GROUP_M=max(config.group_m // ctas, 1),
        STAGES=config.num_stages,
        CONSUMER_REGS=CONSUMER_REGISTERS,
        LOADER_REGS=LOADER_REGISTERS,
        num_warps=4,
        num_ctas=ctas,
        maxnreg=MAX_REGISTERS,
    )


def triton_version() -> tuple[int, ...]:
    """Return Triton's major and minor version."""
    return tuple(int(part) for part in triton.__version__.split(".")[:2])
