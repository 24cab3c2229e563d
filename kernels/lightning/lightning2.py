"""Lightning Attention-2: a loop over blocks of the sequence, with the state KV kept on the chip.

    o_t = scale q_t sum_{s <= t} lambda^(t-s) k_s^T v_s        lambda = exp(-slope)

For a block of B positions, with M_ij = lambda^(i-j) for i >= j, else 0, and Lambda = diag(lambda, ..., lambda^B),
algorithm 1 of the authors is

    O = [(Q K^T) * M] V + Lambda Q KV        KV <- lambda^B KV + (lambda^B Lambda^-1 K)^T V

They give Lambda's exponents two ranges; with the one above KV is the state of the definition, which can be passed from
call to call. The first loop of algorithm 2, which computes dQ, is algorithm 1 with dO, V, K in place of Q, K, V and
with KV transposed. Its second loop computes dV by

    dV = [(K Q^T) * M^T] dO + lambda^B Lambda^-1 K dKV        dKV <- lambda^B dKV + (Lambda Q)^T dO

and dK by the same with V, dO, Q in place of K, Q, dO and with dKV transposed. Unlike the authors' kernels, ours split
the columns of the output and of the state over programs, so that head dims up to 256, and different ones for keys and
values, fit; the last block may be short; and in the update of the state the decay weights multiply V (or dO) instead of
K (or Q), so that the transposed operand needs no arithmetic. The engine's fused_chunk.py is the same loop with gates to
load, over chunks in parallel. Source: Qin et al., Lightning Attention-2 (2024), algorithms 1 and 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.differentiable import contiguous_like
from ..common.remember import remember_launches
from ..common.sizes import cdiv, padded
from .config import LoopConfig
from .request import LightningRequest, four_launches
from .tiles import head_rate, load_tile, power, store_tile, tiles_of


@triton.jit
def _state_offsets(pid_bh, offs_x, offs_z, DX: tl.constexpr, DZ: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return offsets and mask of a tile [DX, BLOCK_Z] of state ``pid_bh`` [DX, DZ] (TRANSPOSED: [DZ, DX])."""
    row, column = (1, DX) if TRANSPOSED else (DZ, 1)
    offs = offs_x[:, None] * row + offs_z[None, :] * column
    return pid_bh.to(tl.int64) * (DX * DZ) + offs, (offs_x[:, None] < DX) & (offs_z[None, :] < DZ)


@remember_launches
@triton.jit(do_not_specialize=["T", "scale"])
def loop_kernel(
    x_src, y_src, z_src, slope_ptr, start_ptr, out_dst, end_ptr, scale, T,
    H: tl.constexpr, DX: tl.constexpr, DZ: tl.constexpr, HEADROOM: tl.constexpr, FUTURE: tl.constexpr,
    TRANSPOSED: tl.constexpr, USE_TMA: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_X: tl.constexpr,
    BLOCK_Z: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Run algorithm 1 or a loop of algorithm 2 for BLOCK_Z columns of one head's output.

    Grid: (ceil(DZ / BLOCK_Z) * B * H,). X, Y, Z are Q, K, V for O, and dO, V, K for dQ; with FUTURE, which goes from
    the last block to the first, K, Q, dO for dV, and V, dO, Q for dK. Reads X, Y [B, T, H, DX], Z [B, T, H, DZ], the
    slopes [H] and the first state [B, H, DX, DZ] (TRANSPOSED: [B, H, DZ, DX]; None: zero); writes the output
    [B, T, H, DZ], times HEADROOM, and, unless None, the last state. The state stays in registers; BLOCK_X is DX padded
    to a power of 2.
    """
    NZ: tl.constexpr = (DZ + BLOCK_Z - 1) // BLOCK_Z
    pid = tl.program_id(0)
    col = (pid % NZ) * BLOCK_Z
    batch = pid // NZ // H
    head = pid // NZ % H
    rate = head_rate(slope_ptr, head)
    offs_t = tl.arange(0, BLOCK_T)
    if FUTURE:
        m = power(rate, offs_t[None, :] - offs_t[:, None]) * scale
    else:
        m = power(rate, offs_t[:, None] - offs_t[None, :]) * scale
    lam = power(rate, offs_t + 1) * scale

    # dKV, which contains the scale, is divided by the headroom in here.
    UNIT: tl.constexpr = HEADROOM if FUTURE else 1.0
    kv = tl.zeros((BLOCK_X, BLOCK_Z), dtype=tl.float32)
    kv_offs, kv_mask = _state_offsets(
        pid // NZ, tl.arange(0, BLOCK_X), col + tl.arange(0, BLOCK_Z), DX, DZ, TRANSPOSED
    )  # fmt: skip
    if start_ptr is not None:
        kv += tl.load(start_ptr + kv_offs, mask=kv_mask, other=0.0) / UNIT
    blocks = tl.cdiv(T, BLOCK_T)
    for i in range(0, blocks):
        t0 = (blocks - 1 - i if FUTURE else i) * BLOCK_T
        x = load_tile(x_src, batch, head, t0, 0, T, H, DX, BLOCK_T, BLOCK_X, USE_TMA)
        y = load_tile(y_src, batch, head, t0, 0, T, H, DX, BLOCK_T, BLOCK_X, USE_TMA)
        z = load_tile(z_src, batch, head, t0, col, T, H, DZ, BLOCK_T, BLOCK_Z, USE_TMA)
        length = tl.minimum(T - t0, BLOCK_T)
        to_end = power(rate, length - 1 - offs_t)
        # O = Lambda Q KV + [(Q K^T) * M] V, or dV = lambda^B Lambda^-1 K dKV + [(Q K^T) * M]^T dO
        out = tl.dot(x, kv.to(x.dtype), input_precision=PRECISION) * (to_end if FUTURE else lam)[:, None]
        scores = tl.dot(x, tl.trans(y), input_precision=PRECISION) * m
        out = tl.dot(scores.to(z.dtype), z, out, input_precision=PRECISION) * HEADROOM
        # KV = lambda^B KV + (lambda^B Lambda^-1 K)^T V, or dKV = lambda^B dKV + (Lambda Q)^T dO
        kv *= power(rate, length)
        weighted = (z * (lam if FUTURE else to_end)[:, None]).to(y.dtype)
        kv = tl.dot(tl.trans(y), weighted, kv, input_precision=PRECISION)
        store_tile(out_dst, out.to(z.dtype), batch, head, t0, col, T, H, DZ, USE_TMA)
    if end_ptr is not None:
        tl.store(end_ptr + kv_offs, kv * UNIT, mask=kv_mask)


def run_loop(
    config: LoopConfig,
    request: LightningRequest,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    slope: Tensor,
    state: Tensor | None,
    *,
    future: bool = False,
    transposed: bool = False,
    want_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Launch one of the loops; see loop_kernel.

    Args:
        x, y: [B, T, H, DX].
        z: [B, T, H, DZ].
        state: the initial state [B, H, DX, DZ] (transposed: [B, H, DZ, DX]), float32, or None.
        want_state: whether to return the last state too.

    Returns:
        The output [B, T, H, DZ] in z's dtype, and the last state or None.
    """
    B, T, H, DZ = z.shape
    DX = x.shape[3]
    out = contiguous_like(z)
    end = torch.empty(B, H, DX, DZ, device=z.device, dtype=torch.float32) if want_state else None
    widths = (padded(DX), padded(DX), config.block_z, config.block_z)
    (x_tiles, y_tiles, z_tiles, out_tiles), use_tma = tiles_of((x, y, z, out), [(config.block_t, n) for n in widths])
    loop_kernel[(cdiv(DZ, config.block_z) * B * H,)](
        x_tiles, y_tiles, z_tiles, slope, state, out_tiles, end, request.scale, T,
        H=H, DX=DX, DZ=DZ, HEADROOM=request.headroom, FUTURE=future, TRANSPOSED=transposed, USE_TMA=use_tma,
        BLOCK_T=config.block_t, BLOCK_X=padded(DX), BLOCK_Z=config.block_z,
        PRECISION="ieee" if z.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out, end


LIGHTNING2 = four_launches("lightning2", run_loop)
