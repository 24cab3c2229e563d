"""Launch configurations of the kernels of RG-LRU and the linear scan. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..common.channels import TileConfig, supports_kernels
from ..common.sizes import MIN_PROGRAMS, next_power_of_two

MIN_CHUNK = 256
"""Shortest chunk, in steps, that reduce-then-scan chooses when no chunk size is given."""

BYTES_PER_HOP = 2_500_000
"""Bytes, over all sequences and channels, that the tiles of one stretch of time should at least read and write. On an
H200 a state takes 0.8 microseconds to the next program (one hop), in which memory moves this much; with shorter tiles
the hops would determine the time."""

BYTES_PER_SHORT_HOP = 4_000_000
"""The same bound for choosing the shortest tiles and, in training, for prefetching."""

AHEAD = {"rglru": 128, "linear_scan": 256}
"""Operation -> how many programs ahead inputs are prefetched into the L2 cache; an H200 runs 528 programs at once. As
measured at batch 8 and 1024 channels: 128 saves 5 % of RG-LRU's forward pass, 256 saves less and 512 is worse. For the
linear scan's forward pass 256 is 7 % faster than 128 up to 8192 steps, and 1 % slower for longer sequences."""

MIN_BLOCK_C = 32
"""Fewest channels of a tile: with half-precision elements fewer would be less than a memory burst of 64 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanConfig:
    """Every launch of one forward and backward pass; the forward pass saves a state every backward.block_i steps.

    Attributes:
        ahead: how many programs ahead a program of the single pass prefetches inputs into the L2 cache; rounded down
            to whole tiles of time.
    """

    forward: TileConfig
    backward: TileConfig
    ahead: int = 0


def invalid_reason(config: ScanConfig, chunk: int | None = None) -> str | None:
    """Return why the launches cannot run chunks of ``chunk`` steps (None: one pass), or None."""
    tiles = (("forward", config.forward), ("backward", config.backward))
    for name, tile in tiles:
        if reason := tile.invalid_reason(name):
            return reason
    save = config.backward.block_i
    if config.forward.steps % save:
        return (
            f"forward tiles must hold whole rows of the backward pass ({save} steps), got {config.forward.steps} steps"
        )
    if chunk is not None and chunk % save:
        return f"chunks must hold whole rows of the backward pass ({save} steps), got {chunk} steps"
    for name, tile in tiles:
        if tile.channels < 1:
            rows = f"{tile.block_o} rows of {tile.block_c} channels"
            return f"{name} must have a channel of a row for each of its {32 * tile.num_warps} threads, got {rows}"
    return None


def select_config(
    *,
    op: str,
    strategy: str,
    capability: tuple[int, int],
    item_bytes: int,
    batch: int,
    channels: int,
    training: bool,
) -> ScanConfig:
    """Choose the launches.

    Measured on an H200 with 16-bit inputs, at batch 8 and 1024 channels and on one sequence of 65,536 steps and 2560
    channels: half as many elements per thread (the shortest forward tiles) are faster if a stretch of such tiles moves
    enough bytes (0.150 ms instead of 0.161 at 8192 steps). Tiles of 8 warps, with more rows or more channels, are
    slower by 10 % to 30 % forward and 5 % to 30 % backward; rows of 64 bytes are slower by 3 % to 7 %.

    Args:
        op: "rglru" or "linear_scan".
        strategy: "look_back", "chunked" or "walk" (one program per sequence and block of channels).
        capability: compute capability of the device, such as (9, 0).
        item_bytes: bytes of one input element: 2 (bf16, fp16) or 4 (fp32).
        batch: B.
        channels: C.
        training: whether a backward pass follows.
    """
    if strategy == "walk":
        # Narrow blocks give more programs; a single warp needs no shared memory.
        forward = TileConfig(block_i=16, block_o=1, block_c=32, num_warps=1)
        backward = TileConfig(block_i=8, block_o=1, block_c=32, num_warps=1)
    elif item_bytes == 4:
        forward = TileConfig(block_i=8, block_o=16, block_c=32, num_warps=4)
        backward = TileConfig(block_i=8, block_o=16, block_c=32, num_warps=4)
    elif strategy == "chunked":
        forward = backward = TileConfig(block_i=8, block_o=8, block_c=64, num_warps=4)
    else:
        # A multiprocessor runs four programs of 128 registers per thread, or three of 168, which both kernels just fit.
        forward = TileConfig(block_i=8, block_o=8, block_c=64, num_warps=4, maxnreg=128)
        if forward.steps * 4 * batch * channels * item_bytes < BYTES_PER_SHORT_HOP:
            forward = TileConfig(block_i=16, block_o=8, block_c=64, num_warps=4, maxnreg=168)
        backward = TileConfig(block_i=8, block_o=8, block_c=64, num_warps=4, maxnreg=168)
    if strategy != "look_back":
        return ScanConfig(forward=forward, backward=backward)
    row_bytes = batch * channels * item_bytes
    # Prefetching helps only if memory, not the hops, determines the time. Training needs more bytes per hop for that:
    # on one sequence of 2560 channels prefetching makes the forward pass alone faster, but both passes slower.
    enough = BYTES_PER_SHORT_HOP if training else BYTES_PER_HOP
    return ScanConfig(
        forward=_lengthen(forward, 4 * row_bytes),
        backward=_lengthen(backward, 7 * row_bytes),
        ahead=AHEAD[op] if forward.steps * 4 * row_bytes >= enough else 0,
    )


def rglru_config(sizes: Mapping[str, int], dtype: str, capability: tuple[int, int], training: bool) -> ScanConfig:
    """Return the launches of RG-LRU's single pass for a case's sizes."""
    return _config_of("rglru", "look_back", sizes, dtype, capability, training)


def linear_scan_config(sizes: Mapping[str, int], dtype: str, capability: tuple[int, int], training: bool) -> ScanConfig:
    """Return the launches of the linear scan's single pass for a case's sizes."""
    return _config_of("linear_scan", "look_back", sizes, dtype, capability, training)


def chunked_config(sizes: Mapping[str, int], dtype: str, capability: tuple[int, int], training: bool) -> ScanConfig:
    """Return the launches of reduce-then-scan for a case's sizes."""
    return _config_of("rglru", "chunked", sizes, dtype, capability, training)


def naive_config(sizes: Mapping[str, int], dtype: str, capability: tuple[int, int], training: bool) -> ScanConfig:
    """Return the launches of the naive scan for a case's sizes."""
    return _config_of("rglru", "walk", sizes, dtype, capability, training)


def _config_of(
    op: str, strategy: str, sizes: Mapping[str, int], dtype: str, capability: tuple[int, int], training: bool
) -> ScanConfig:
    return select_config(
        op=op, strategy=strategy, capability=capability, item_bytes=4 if dtype == "fp32" else 2,
        batch=sizes["batch"], channels=sizes["channels"], training=training,
    )  # fmt: skip


def _lengthen(tile: TileConfig, bytes_per_step: int) -> TileConfig:
    """Return a tile with more rows and fewer channels until the tiles of one stretch of time move enough bytes."""
    while tile.steps * bytes_per_step < BYTES_PER_HOP and tile.block_c > MIN_BLOCK_C:
        tile = replace(tile, block_o=2 * tile.block_o, block_c=tile.block_c // 2)
    return tile


def default_chunk_size(*, seq_len: int, batch: int, channels: int) -> int:
    """Return a chunk length, in steps, with which reduce-then-scan has about 4 * MIN_PROGRAMS programs.

    Args:
        seq_len: T.
        batch: B.
        channels: C; a program takes 64.
    """
    chunks = -(-4 * MIN_PROGRAMS // (batch * -(-channels // 64)))
    return max(MIN_CHUNK, next_power_of_two(seq_len) // next_power_of_two(chunks))


def preferred_chunk(sizes: Mapping[str, int]) -> int:
    """Return :func:`default_chunk_size` for a case's sizes (batch, seq_len, channels)."""
    return default_chunk_size(seq_len=sizes["seq_len"], batch=sizes["batch"], channels=sizes["channels"])


def supports_chunked(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why reduce-then-scan cannot run these sizes, or None."""
    chunk_size = sizes.get("chunk_size")
    if chunk_size is not None and (chunk_size < 16 or chunk_size & (chunk_size - 1)):
        return f"chunk_size must be a power of two >= 16, got {chunk_size}"
    return supports_kernels(sizes, dtype, state_dtype)
