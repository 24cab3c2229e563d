"""Launch configurations of the Lightning kernels and the sizes that they support. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..common.sizes import MIN_PROGRAMS, bad_head_dim, padded

MAX_HEAD_DIM = 256
"""The largest K and V: a program of lightning2 holds all rows of a state, a tile of lightning1 all columns of X, Y."""

BLOCKS = ("block_t", "block_z")
"""Block sizes that every launch has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """Launch of one of lightning2's loops: ``block_t`` positions a block, ``block_z`` output columns a program."""

    block_t: int
    block_z: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuadraticConfig(LoopConfig):
    """Launch of lightning1's kernel; a tile of the score matrix has ``block_t`` rows and ``block_s`` columns."""

    block_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningConfig:
    """The launches for the output and for the gradients of q, k and v; those of lightning1 are QuadraticConfigs."""

    output: LoopConfig
    dq: LoopConfig
    dk: LoopConfig
    dv: LoopConfig


def invalid_reason(config: LightningConfig, *, impl: str, capability: tuple[int, int], item_bytes: int) -> str | None:
    """Return why the launches of lightning1 or lightning2 cannot run, or None.

    Triton 3.6.0 miscompiles loops of lightning2 of one stage that use Hopper's warpgroup matrix instructions (wgmma):
    results were wrong, or memory outside of the tensors was accessed.
    """
    kind, blocks = (LoopConfig, BLOCKS) if impl == "lightning2" else (QuadraticConfig, (*BLOCKS, "block_s"))
    for name in ("output", "dq", "dk", "dv"):
        launch = getattr(config, name)
        if type(launch) is not kind:
            return f"{name} must be a {kind.__name__} for {impl}, got a {type(launch).__name__}"
        for field in (*blocks, "num_warps"):
            size, least = getattr(launch, field), 1 if field == "num_warps" else 16
            if not isinstance(size, int) or size < least or size & (size - 1):
                return f"{name}.{field} must be a power of two >= {least}, got {size}"
        if impl == "lightning2" and launch.num_stages < 2 and capability[0] == 9 and item_bytes < 4:
            return f"{name}.num_stages must be at least 2 on compute capability 9.0, got {launch.num_stages}"
    return None


def select_config(
    sizes: Mapping[str, int], dtype: str, capability: tuple[int, int], training: bool, *, impl: str
) -> LightningConfig:
    """Choose the launches.

    lightning2 takes the tiles that were the fastest for the engine's fused_chunk.py on an H200.

    Args:
        sizes: head_dim_qk and head_dim_v, and for lightning2 batch and num_heads. If there are few heads, programs get
            fewer columns, so that there are more of them.
        dtype: name of the inputs' dtype.
        capability: compute capability of the device, such as (9, 0).
        training: whether a backward pass follows; the launches do not depend on it.
        impl: "lightning1" or "lightning2".
    """
    dims = sizes["head_dim_qk"], sizes["head_dim_v"]
    full = dtype == "fp32"

    def fit_loop(dx: int, dz: int) -> LoopConfig:
        # A loop holds a state [dx, block_z] and M in registers; in float32 the operands of products are there as well.
        if full:
            block_t, block_z, num_warps = (32, 32, 8) if dx <= 64 else (16, 16, 8)
        elif capability >= (9, 0):
            block_t, block_z, num_warps = (64, 64 if dx <= 128 else 32, 4)
        else:
            block_t, block_z, num_warps = (32, 64 if dx <= 64 else 32, 4 if dx <= 128 else 8)
        few = sizes["batch"] * sizes["num_heads"] * -(-max(dims) // 64) < MIN_PROGRAMS
        block_z = min(block_z, 32 if few else 64, dz)
        return LoopConfig(block_t=block_t, block_z=block_z, num_warps=num_warps, num_stages=1 if full else 2)

    def fit_quadratic(dx: int, dz: int) -> QuadraticConfig:
        if full:
            config = QuadraticConfig(block_t=32, block_s=32, block_z=32, num_warps=4, num_stages=1)
        elif capability >= (9, 0):
            config = QuadraticConfig(block_t=128, block_s=64, block_z=128, num_warps=8, num_stages=2)
        else:
            block_z = 128 if dx <= 128 else 64
            config = QuadraticConfig(block_t=128, block_s=32, block_z=block_z, num_warps=8, num_stages=2)
        return replace(config, block_z=min(config.block_z, dz))

    fit: Callable[[int, int], LoopConfig] = fit_loop if impl == "lightning2" else fit_quadratic
    k_pad, v_pad = map(padded, dims)
    return LightningConfig(output=fit(k_pad, v_pad), dq=fit(v_pad, k_pad), dk=fit(v_pad, k_pad), dv=fit(k_pad, v_pad))


def why_not(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why the Lightning kernels cannot run these sizes, or None."""
    return bad_head_dim(sizes, MAX_HEAD_DIM)
