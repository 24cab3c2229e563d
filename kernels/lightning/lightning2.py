"""Lightning Attention-2: blocks of the sequence in order, the state KV on the chip.

    o_t = scale q_t sum_{s <= t} lambda^(t-s) k_s^T v_s        lambda = exp(-slope)

Source: Qin et al., Lightning Attention-2 (2024), algorithms 1 and 2, whose lines the kernels follow. With B positions a
block, M_ij = lambda^(i-j) for i >= j, else 0, and Lambda = diag(lambda, ..., lambda^B), a block of algorithm 1 is

    O = [(Q K^T) * M] V + Lambda Q KV        KV <- lambda^B KV + (lambda^B Lambda^-1 K)^T V

The source writes Lambda with two ranges of exponents; with this one KV is the state of the definition, and so may come
from another call and go to one. Algorithm 2's first loop (dQ) is algorithm 1 with dO, V, K in place of Q, K, V and KV
transposed; its second loop (dV) is

    dV = [(K Q^T) * M^T] dO + lambda^B Lambda^-1 K dKV        dKV <- lambda^B dKV + (Lambda Q)^T dO

and (dK) the same with V, dO, Q in place of K, Q, dO and dKV transposed.

What differs from the authors' kernels: the columns of the output, and with them of the state, are split over programs,
so head dims up to 256 and different ones for keys and values fit; the last block may be short; and the weights of a row
scale the block that lies beside the state's columns, not the one that is transposed, which stays a plain operand.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..common.device import on_device_of
from ..scalar_decay.engine import capability
from .config import Lightning2Config, LoopConfig, invalid_reason, padded, select_lightning2
from .decays import head_rate, power
from .tiles import load_tile, store_tile, takes_descriptors, tiles_of
from .validate import check_arguments


@triton.jit
def _state_offsets(pid_bh, offs_x, offs_z, DX: tl.constexpr, DZ: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return offsets and mask of a tile [DX, BLOCK_Z] of state ``pid_bh`` [DX, DZ] (TRANSPOSED: [DZ, DX])."""
    row, column = (1, DX) if TRANSPOSED else (DZ, 1)
    offs = offs_x[:, None] * row + offs_z[None, :] * column
    return pid_bh.to(tl.int64) * (DX * DZ) + offs, (offs_x[:, None] < DX) & (offs_z[None, :] < DZ)


@triton.jit(do_not_specialize=["T", "scale"])
def forward_kernel(
    q_src,
    k_src,
    v_src,
    slope_ptr,
    initial_ptr,
    o_dst,
    last_ptr,
    scale,
    T,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    USE_TMA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Run algorithm 1, or algorithm 2's first loop, for BLOCK_V columns of one head's output.

    Grid: (ceil(DV / BLOCK_V) * B * H,).
    Reads Q, K [B, T, H, DK], V [B, T, H, DV], the slopes [H] and, HAS_START, KV [B, H, DK, DV] (TRANSPOSED: [B, H,
    DV, DK]); writes O [B, T, H, DV] and, HAS_END, the last KV. BLOCK_K is DK's power of two.
    """
    NV: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    col = (pid % NV) * BLOCK_V
    batch = pid // NV // H
    head = pid // NV % H
    rate = head_rate(slope_ptr, head)
    offs_t = tl.arange(0, BLOCK_T)
    m = power(rate, offs_t[:, None] - offs_t[None, :]) * scale
    lam = power(rate, offs_t + 1) * scale

    kv = tl.zeros((BLOCK_K, BLOCK_V), dtype=tl.float32)
    kv_offs, kv_mask = _state_offsets(
        pid // NV, tl.arange(0, BLOCK_K), col + tl.arange(0, BLOCK_V), DK, DV, TRANSPOSED
    )  # fmt: skip
    if HAS_START:
        kv += tl.load(initial_ptr + kv_offs, mask=kv_mask, other=0.0)
    for i in tl.range(0, tl.cdiv(T, BLOCK_T), num_stages=STAGES):
        t0 = i * BLOCK_T
        q = load_tile(q_src, batch, head, t0, 0, T, H, DK, BLOCK_T, BLOCK_K, USE_TMA)
        k = load_tile(k_src, batch, head, t0, 0, T, H, DK, BLOCK_T, BLOCK_K, USE_TMA)
        v = load_tile(v_src, batch, head, t0, col, T, H, DV, BLOCK_T, BLOCK_V, USE_TMA)
        length = tl.minimum(T - t0, BLOCK_T)
        to_end = power(rate, length - 1 - offs_t)
        # O = Lambda Q KV + [(Q K^T) * M] V
        o = tl.dot(q, kv.to(q.dtype), input_precision=PRECISION) * lam[:, None]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * m
        o = tl.dot(scores.to(v.dtype), v, o, input_precision=PRECISION)
        # KV = lambda^B KV + (lambda^B Lambda^-1 K)^T V
        kv *= power(rate, length)
        kv = tl.dot(tl.trans(k), (v * to_end[:, None]).to(k.dtype), kv, input_precision=PRECISION)
        store_tile(o_dst, o.to(v.dtype), batch, head, t0, col, T, H, DV, USE_TMA)
    if HAS_END:
        tl.store(last_ptr + kv_offs, kv, mask=kv_mask)


@triton.jit(do_not_specialize=["T", "scale"])
def backward_kernel(
    k_src,
    q_src,
    do_src,
    slope_ptr,
    d_last_ptr,
    dv_dst,
    d_initial_ptr,
    scale,
    T,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_END: tl.constexpr,
    USE_TMA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Run algorithm 2's second loop, from the last block to the first, for BLOCK_V columns of one head's dV, or of dK.

    Grid: (ceil(DV / BLOCK_V) * B * H,).
    Reads K, Q [B, T, H, DK], dO [B, T, H, DV], the slopes [H] and, HAS_START, the last state's gradient [B, H, DK, DV]
    (TRANSPOSED: [B, H, DV, DK]); writes dV [B, T, H, DV] and, HAS_END, the first state's gradient. BLOCK_K is DK's
    power of two.
    """
    NV: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    col = (pid % NV) * BLOCK_V
    batch = pid // NV // H
    head = pid // NV % H
    rate = head_rate(slope_ptr, head)
    offs_t = tl.arange(0, BLOCK_T)
    m = power(rate, offs_t[None, :] - offs_t[:, None]) * scale
    lam = power(rate, offs_t + 1) * scale

    dkv = tl.zeros((BLOCK_K, BLOCK_V), dtype=tl.float32)
    dkv_offs, dkv_mask = _state_offsets(
        pid // NV, tl.arange(0, BLOCK_K), col + tl.arange(0, BLOCK_V), DK, DV, TRANSPOSED
    )  # fmt: skip
    if HAS_START:
        dkv += tl.load(d_last_ptr + dkv_offs, mask=dkv_mask, other=0.0)
    blocks = tl.cdiv(T, BLOCK_T)
    for i in tl.range(0, blocks, num_stages=STAGES):
        t0 = (blocks - 1 - i) * BLOCK_T
        k = load_tile(k_src, batch, head, t0, 0, T, H, DK, BLOCK_T, BLOCK_K, USE_TMA)
        q = load_tile(q_src, batch, head, t0, 0, T, H, DK, BLOCK_T, BLOCK_K, USE_TMA)
        do = load_tile(do_src, batch, head, t0, col, T, H, DV, BLOCK_T, BLOCK_V, USE_TMA)
        length = tl.minimum(T - t0, BLOCK_T)
        to_end = power(rate, length - 1 - offs_t)
        # dV = lambda^B Lambda^-1 K dKV + [(Q K^T) * M]^T dO
        dv = tl.dot(k, dkv.to(k.dtype), input_precision=PRECISION) * to_end[:, None]
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * m
        dv = tl.dot(scores.to(do.dtype), do, dv, input_precision=PRECISION)
        # dKV = lambda^B dKV + (Lambda Q)^T dO
        dkv *= power(rate, length)
        dkv = tl.dot(tl.trans(q), (do * lam[:, None]).to(q.dtype), dkv, input_precision=PRECISION)
        store_tile(dv_dst, dv.to(do.dtype), batch, head, t0, col, T, H, DV, USE_TMA)
    if HAS_END:
        tl.store(d_initial_ptr + dkv_offs, dkv, mask=dkv_mask)


@on_device_of("z")
def run_loop(
    kernel: Any,
    config: LoopConfig,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    slope: Tensor,
    state: Tensor | None,
    scale: float,
    *,
    transposed: bool,
    want_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """Launch one of the loops.

    Args:
        kernel: :func:`forward_kernel` or :func:`backward_kernel`.
        x, y, z: its matrices in order: [B, T, H, DX] twice, [B, T, H, DZ].
        state: the one it starts from [B, H, DX, DZ] (transposed: [B, H, DZ, DX]), float32, or None.
        want_state: whether to return the one it ends with too.

    Returns:
        the output [B, T, H, DZ] in z's dtype and the state.
    """
    B, T, H, DZ = z.shape
    DX = x.shape[3]
    out = torch.empty_like(z)
    end = torch.empty(B, H, DX, DZ, device=z.device, dtype=torch.float32) if want_state else None
    use_tma = takes_descriptors(capability(z.device), x, y, z)
    widths = (padded(DX), padded(DX), config.block_z, config.block_z)
    x_tiles, y_tiles, z_tiles, out_tiles = (
        tiles_of(tensor, config.block_t, width, use_tma=use_tma)
        for tensor, width in zip((x, y, z, out), widths, strict=True)
    )
    kernel[(triton.cdiv(DZ, config.block_z) * B * H,)](
        x_tiles, y_tiles, z_tiles, slope, state, out_tiles, end, scale, T,
        H=H, DK=DX, DV=DZ, TRANSPOSED=transposed, HAS_START=state is not None, HAS_END=want_state, USE_TMA=use_tma,
        BLOCK_T=config.block_t, BLOCK_K=padded(DX), BLOCK_V=config.block_z, STAGES=config.num_stages,
        PRECISION="ieee" if z.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out, end


class _Lightning2(torch.autograd.Function):
    """o and the last KV, with gradients of q, k, v and the initial KV; nothing but the inputs is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slope: Tensor,
        initial: Tensor | None,
        scale: float,
        want_last: bool,
        config: Lightning2Config,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(q, k, v, slope, initial)
        ctx.scale, ctx.config = scale, config
        ctx.set_materialize_grads(False)
        return run_loop(
            forward_kernel, config.output, q, k, v, slope, initial, scale, transposed=False, want_state=want_last
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, d_last: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, slope, initial = ctx.saved_tensors
        scale, config = ctx.scale, ctx.config
        do = torch.zeros_like(v) if do is None else do.contiguous()
        d_last = None if d_last is None else d_last.contiguous()
        dq, _ = run_loop(
            forward_kernel, config.dq, do, v, k, slope, initial, scale, transposed=True, want_state=False
        )  # fmt: skip
        dk, _ = run_loop(
            backward_kernel, config.dk, v, do, q, slope, d_last, scale, transposed=True, want_state=False
        )  # fmt: skip
        dv, d_initial = run_loop(
            backward_kernel, config.dv, k, q, do, slope, d_last, scale,
            transposed=False, want_state=ctx.needs_input_grad[4],
        )  # fmt: skip
        return dq, dk, dv, None, d_initial, None, None, None


def lightning2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slope: Tensor,
    *,
    state_dtype: torch.dtype = torch.float32,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    scale: float = 1.0,
    config: Lightning2Config | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute Lightning Attention by Lightning Attention-2: block after block, the state on the chip.

        kv_t = exp(-slope) kv_{t-1} + k_t v_t^T        o_t = scale kv_t^T q_t

    Args:
        q, k: [B, T, H, K], contiguous; float32, float16 or bfloat16. K and V are multiples of 8 from 16 to 256.
        v: [B, T, H, V], the same dtype.
        slope: decay rates [H], >= 0, float32.
        state_dtype: float32.
        initial_state: kv [B, H, K, V], float32.
        return_last_state: also return kv after the last token.
        scale: factor of q, 1 as published.
        config: launches; chosen for the device when None.

    Returns:
        o [B, T, H, V] in v's dtype, or (o, kv); differentiable in q, k, v and the initial state.

    Raises:
        ValueError: on an argument the kernels do not take; the message names it, what was expected and what came.

    Source: Qin et al., Lightning Attention-2 (2024), algorithms 1 and 2.
    """
    scale = check_arguments(
        q, k, v, slope, implementation="lightning2", state_dtype=state_dtype, initial_state=initial_state, scale=scale
    )
    if config is None:
        config = select_lightning2(
            capability=capability(v.device),
            item_bytes=v.element_size(),
            head_dim_qk=q.shape[3],
            head_dim_v=v.shape[3],
            rows=v.shape[0] * v.shape[2],
        )
    if reason := invalid_reason(config, capability=capability(v.device), item_bytes=v.element_size()):
        raise ValueError(f"config: {reason}")
    o, last = _Lightning2.apply(q, k, v, slope, initial_state, scale, return_last_state, config)
    return (o, last) if return_last_state else o
