"""Lightning Attention-1: the causal half of the score matrix, tiled as in FlashAttention.

    o_t = scale sum_{s <= t} lambda^(t-s) (q_t . k_s) v_s        lambda = exp(-slope)

The output and its gradients have one form, with different tensors for x, y and z:

    out_t = scale sum_s lambda^|t-s| (x_t . y_s) z_s        o: q k v     dq: do v k     dk: v do q     dv: k q do

The sum is over s <= t for o and dq, over s >= t for dk and dv. A program makes a tile of out: it holds x of its rows
and goes through y and z in tiles, computing their scores and decays on the way, O(T^2 (K + V)) in all. Without a
softmax the backward pass needs nothing but the inputs.

The published kernels take and return no state, so torch computes the initial state's contribution and the last state.
Source: Qin et al., Lightning Attention-2 (2024), sections 2.2 and 3.1, which describe the authors' earlier kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.arguments import without_autocast
from ..common.differentiable import contiguous_like
from ..common.remember import remember_launches
from ..common.sizes import cdiv, padded
from .config import QuadraticConfig
from .request import LightningRequest, four_launches
from .tiles import MAX_SLOPE, head_rate, load_tile, power, store_tile, tiles_of


@remember_launches
@triton.jit(do_not_specialize=["T", "scale"])
def quadratic_kernel(
    x_src, y_src, z_src, slope_ptr, out_dst, scale, T,
    H: tl.constexpr, DX: tl.constexpr, DZ: tl.constexpr, HEADROOM: tl.constexpr, FUTURE: tl.constexpr,
    USE_TMA: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_Z: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_T rows and BLOCK_Z columns of out for one head; FUTURE sums over s >= t.

    Grid: (ceil(DZ / BLOCK_Z) * ceil(T / BLOCK_T) * B * H,).
    Reads X, Y [B, T, H, DX], Z [B, T, H, DZ] and the slopes [H]; writes out [B, T, H, DZ] times HEADROOM. BLOCK_X is
    DX padded to a power of two, and BLOCK_S divides BLOCK_T.
    """
    NZ: tl.constexpr = (DZ + BLOCK_Z - 1) // BLOCK_Z
    tiles = tl.cdiv(T, BLOCK_T)
    pid = tl.program_id(0)
    col = (pid % NZ) * BLOCK_Z
    # The tiles that sum over the most positions start first, so that no long program is left at the end.
    tile = (pid // NZ) % tiles
    t0 = (tile if FUTURE else tiles - 1 - tile) * BLOCK_T
    batch = pid // (NZ * tiles) // H
    head = pid // (NZ * tiles) % H
    rate = head_rate(slope_ptr, head)

    offs_t = t0 + tl.arange(0, BLOCK_T)
    x = load_tile(x_src, batch, head, t0, 0, T, H, DX, BLOCK_T, BLOCK_X, USE_TMA)
    out = tl.zeros((BLOCK_T, BLOCK_Z), dtype=tl.float32)
    first = t0 if FUTURE else 0
    last = T if FUTURE else tl.minimum(t0 + BLOCK_T, T)
    for s0 in range(first, last, BLOCK_S):
        y = load_tile(y_src, batch, head, s0, 0, T, H, DX, BLOCK_S, BLOCK_X, USE_TMA)
        z = load_tile(z_src, batch, head, s0, col, T, H, DZ, BLOCK_S, BLOCK_Z, USE_TMA)
        offs_s = s0 + tl.arange(0, BLOCK_S)
        distance = offs_t[:, None] - offs_s[None, :]
        if FUTURE:
            distance = -distance
        scores = tl.dot(x, tl.trans(y), input_precision=PRECISION) * (power(rate, distance) * scale)
        out = tl.dot(scores.to(z.dtype), z, out, input_precision=PRECISION)
    out *= HEADROOM
    store_tile(out_dst, out.to(x.dtype), batch, head, t0, col, T, H, DZ, USE_TMA)


def run_quadratic(
    config: QuadraticConfig, request: LightningRequest, x: Tensor, y: Tensor, z: Tensor, slope: Tensor, state: None, *,
    future: bool = False, **_: bool,
) -> tuple[Tensor, None]:  # fmt: skip
    """Launch the kernel on x, y [B, T, H, DX] and z [B, T, H, DZ]; return out like z, and no state, of which it knows
    nothing: other arguments are those of :func:`.lightning2.run_loop`."""
    B, T, H, DZ = z.shape
    DX = x.shape[3]
    out = contiguous_like(z)
    boxes = (
        (config.block_t, padded(DX)),
        (config.block_s, padded(DX)),
        (config.block_s, config.block_z),
        (config.block_t, config.block_z),
    )
    (x_tiles, y_tiles, z_tiles, out_tiles), use_tma = tiles_of((x, y, z, out), boxes)
    quadratic_kernel[(cdiv(DZ, config.block_z) * cdiv(T, config.block_t) * B * H,)](
        x_tiles, y_tiles, z_tiles, slope, out_tiles, request.scale, T,
        H=H, DX=DX, DZ=DZ, HEADROOM=request.headroom, FUTURE=future, USE_TMA=use_tma, BLOCK_T=config.block_t,
        BLOCK_S=config.block_s, BLOCK_X=padded(DX), BLOCK_Z=config.block_z,
        PRECISION="ieee" if z.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out, None


LIGHTNING1 = four_launches("lightning1", run_quadratic)


def lightning1(
    request: LightningRequest, q: Tensor, k: Tensor, v: Tensor, slope: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Compute Lightning Attention by Lightning Attention-1; arguments and result as in :func:`.lightning`.

    States are computed by torch in float32, which takes memory for float32 copies of q, k, v and o.
    """
    o, _ = LIGHTNING1(request._replace(want_last=False), q, k, v, slope, None)
    if initial_state is not None:
        o = without_autocast(_add_initial, o, o, q, slope, initial_state, request.scale * request.headroom)
    return o, without_autocast(_last_state, k, k, v, slope, initial_state) if request.want_last else None


def _add_initial(o: Tensor, q: Tensor, slope: Tensor, initial_state: Tensor, scale: float) -> Tensor:
    """Return o_t + scale lambda^t kv_0^T q_t."""
    decay = scale * _powers(slope, torch.arange(1, q.shape[1] + 1, device=q.device))
    carried = torch.einsum("bthk,bhkv->bthv", q.float(), initial_state) * decay[..., None]
    return (o.float() + carried).to(o.dtype)


def _last_state(k: Tensor, v: Tensor, slope: Tensor, initial_state: Tensor | None) -> Tensor:
    """Return lambda^T kv_0 + sum_t lambda^(T-t) k_t v_t^T."""
    seq_len = k.shape[1]
    weights = _powers(slope, torch.arange(seq_len - 1, -1, -1, device=k.device))
    last = torch.einsum("bthk,bthv->bhkv", k.float(), v.float() * weights[..., None])
    if initial_state is None:
        return last
    through = _powers(slope, torch.tensor([seq_len], device=k.device))
    return last + initial_state * through.view(-1, 1, 1)


def _powers(slope: Tensor, n: Tensor) -> Tensor:
    """Return lambda^n [N, H] for n [N]; the kernel's bound on slopes makes lambda^0 = 1 even for an infinite one."""
    return torch.exp(-slope.clamp(max=MAX_SLOPE) * n[:, None])
