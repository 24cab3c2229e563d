"""Launch configurations of the gated MLP's kernels: their fields, which values are valid, and which are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")

DIM_MULTIPLE = 8
"""D and F are multiples of 8: descriptors need rows of a multiple of 16 bytes, which is 8 half-precision elements."""

MIN_BLOCK = 16
"""Smallest side of a matrix product."""

FEW_TOKENS = 64
"""Up to this many tokens, reading the weights takes most of a call."""

VERY_LARGE = 2**43
"""From this many multiply-adds per projection on, an H200 runs at its power limit for most of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig:
    """One launch of the projection kernel.

    Attributes:
        block_m: rows (tokens) of a tile of y.
        block_f: columns of a tile of y; the two projections together have twice as many.
        block_k: step along D.
        group_m: rows of tiles that are processed column by column, so that the weights' columns stay in the L2 cache.
        subtiles: 1, or 2 to gate and store a tile's left half and then its right half, in half the shared memory.
        num_warps: a power of two; a multiple of 4 for matrix instructions of whole warpgroups.
        num_stages: pipeline stages: tiles of x and w that are being loaded or in use.
        use_tma: load and store by tensor descriptors, which need compute capability 9.0.
        persistent: launch as many programs as multiprocessors, each processing several tiles.
        flatten: loop over tiles and steps along D in one loop, so that the next tile's loads overlap the gating. Not
            for row-major weights: with an accumulator each for up and gate, ptxas serialises the products (C7515).
    """

    block_m: int
    block_f: int
    block_k: int
    group_m: int = 16
    subtiles: int = 2
    num_warps: int = 8
    num_stages: int = 3
    use_tma: bool = True
    persistent: bool = True
    flatten: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlpConfig:
    """The launches of a forward pass and of a backward pass that projects again ("fused")."""

    forward: GemmConfig
    gradient: GemmConfig


def invalid_reason(config: GatedMlpConfig) -> str | None:
    """Return why the launches cannot run, or None."""
    for name, tile in (("forward", config.forward), ("gradient", config.gradient)):
        if reason := _invalid_tile(tile):
            return f"{name}.{reason}"
    return None


def _invalid_tile(config: GemmConfig) -> str | None:
    for field in ("block_m", "block_f", "block_k", "num_warps"):
        value = getattr(config, field)
        if value < 1 or value & (value - 1):
            return f"{field} must be a power of two, got {value}"
    for field in ("block_m", "block_f", "block_k"):
        if getattr(config, field) < MIN_BLOCK:
            return f"{field} must be at least {MIN_BLOCK}, got {getattr(config, field)}"
    if config.subtiles not in (1, 2):
        return f"subtiles must be 1 or 2, got {config.subtiles}"
    for field in ("group_m", "num_stages"):
        if getattr(config, field) < 1:
            return f"{field} must be at least 1, got {getattr(config, field)}"
    if config.use_tma and 2 * config.block_f > 256:
        return f"block_f must be at most 128 with use_tma (boxes of 256 columns), got {config.block_f}"
    return None


def select_tile(
    *,
    end: str,
    k_major: bool,
    tokens: int,
    work: int,
    capability: tuple[int, int],
    item_bytes: int,
    described: bool = True,
) -> GemmConfig:
    """Choose a launch.

    The accumulators of tiles of 128 by 128 fill a multiprocessor's registers, and a step of 64 along D is one cache
    line. In groups of 16 rows of tiles, the 132 programs of an H200 read about as many rows of x as weights' columns.

    Args:
        end: what the kernel does last: "gate", "save", "products" or "gradient"; see project_kernel.
        k_major: whether the weights are K-major rather than row-major.
        tokens: M.
        work: multiply-adds of one projection, M D F.
        capability: compute capability of the device, such as (9, 0).
        item_bytes: bytes of one element: 2 (bf16, fp16) or 4 (fp32).
        described: whether a descriptor can describe the weights, see :func:`.fused.no_descriptor`.
    """
    if item_bytes == 4:
        # Products in full float32 run on the vector units.
        return GemmConfig(block_m=64, block_f=64, block_k=16, subtiles=1, num_stages=3, use_tma=False, persistent=False)
    # sm_120 (desktop GPUs) has descriptors, but no more shared memory than sm_89.
    use_tma = (9, 0) <= capability < (12, 0) and described
    if tokens <= FEW_TOKENS:
        # Reading the weights is the bottleneck: narrow tiles, two programs per multiprocessor.
        return GemmConfig(
            block_m=64, block_f=64, block_k=64, subtiles=1, num_warps=4, num_stages=4, use_tma=use_tma, persistent=False
        )
    if not use_tma:
        return GemmConfig(
            block_m=128, block_f=64, block_k=64, subtiles=1, num_stages=4, use_tma=False, persistent=False
        )
    full = GemmConfig(block_m=128, block_f=128, block_k=64, num_stages=4, flatten=k_major)
    if end in ("gate", "products"):
        # At the power limit 3 stages are faster.
        return replace(full, num_stages=3) if k_major and capability < (10, 0) and work >= VERY_LARGE else full
    # Storing pre_up and pre_gate takes the shared memory of one stage; on sm_100 full tiles spill registers.
    return replace(full, num_stages=3) if capability < (10, 0) else replace(full, block_f=64, subtiles=1)


def case_config(
    sizes: Mapping[str, int], dtype: str, capability: tuple[int, int], training: bool, *, impl: str
) -> GatedMlpConfig:
    """Return the launches of "fused" or "fused_save" for a case's sizes and dtype on K-major weights."""
    tokens = sizes["batch"] * sizes["seq_len"]
    tiles = (
        select_tile(
            end=end, k_major=True, tokens=tokens, work=tokens * sizes["d_model"] * sizes["d_ff"],
            capability=capability, item_bytes=4 if dtype == "fp32" else 2,
        )
        for end in ("save" if training and impl == "fused_save" else "gate", "gradient")
    )  # fmt: skip
    return GatedMlpConfig(forward=next(tiles), gradient=next(tiles))


def why_not_kernels(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why the Triton kernels cannot run these sizes, or None."""
    for name in ("d_model", "d_ff"):
        if sizes[name] % DIM_MULTIPLE:
            return f"{name} must be a multiple of {DIM_MULTIPLE}, got {sizes[name]}"
    return None
