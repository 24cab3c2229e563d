"""Launch configurations of the kernels of RG-LRU and the linear scan. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..common.channels import TileConfig, why_not_kernels
from ..common.sizes import MIN_PROGRAMS, bad_chunk_size, next_power_of_two

MIN_CHUNK = 256
"""Shortest chunk, in steps, that reduce-then-scan chooses when no chunk size is given."""

BYTES_PER_HOP = 2_500_000
"""Fewest bytes that all programs of the same steps (every sequence and channel) should read and write together. On an
H200, memory moves this much in the 0.8 us that a state takes to the next tile (a hop); with less, hops take longer."""

BYTES_PER_SHORT_HOP = 4_000_000
"""A stricter bound, below which the shortest tiles are not taken and, in training, nothing is prefetched."""

AHEAD = {"fused": 128, "scan": 256}
"""Implementation with a look-back scan -> how many programs ahead inputs are prefetched into the L2 cache; an H200 runs
528 programs at once. As measured at batch 8 and 1024 channels: 128 saves 5 % of RG-LRU's forward pass, 256 saves less
and 512 is worse. For the linear scan's forward pass 256 is 7 % faster than 128 up to 8192 steps, then 1 % slower."""

SAVED_EVERY = 8
"""Steps between the float32 states that the forward pass saves. The backward pass recomputes the others from them, so
this is the length of a row of every backward tile."""

MIN_BLOCK_C = 32
"""Fewest channels of a tile: fewer half-precision elements would be less than a memory burst of 64 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanConfig:
    """Every launch of one forward and backward pass; the forward pass saves a state every backward.block_i steps.

    Attributes:
        ahead: how many programs ahead a look-back scan prefetches inputs, rounded down to whole tiles of time.
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
    sizes: Mapping[str, int], dtype: str, capability: tuple[int, int], training: bool, *, impl: str
) -> ScanConfig:
    """Choose the launches.

    Measured on an H200 with 16-bit inputs, at batch 8 and 1024 channels and on one sequence of 65,536 steps and 2560
    channels: forward tiles of half the length are faster where they still move BYTES_PER_SHORT_HOP (0.150 ms instead of
    0.161 at 8192 steps). Tiles of 8 warps, with more rows or more channels, are slower by 10 % to 30 % forward and 5 %
    to 30 % backward; rows of 64 bytes are slower by 3 % to 7 %.

    Args:
        sizes: batch and channels among others.
        dtype: name of the inputs' dtype.
        capability: compute capability of the device, such as (9, 0).
        training: whether a backward pass follows.
        impl: "fused", "scan", "chunked" or "naive".
    """
    item_bytes = 4 if dtype == "fp32" else 2
    row_bytes = sizes["batch"] * sizes["channels"] * item_bytes
    if impl == "naive":
        # Narrow blocks give more programs; a single warp needs no shared memory.
        forward = TileConfig(block_i=16, block_o=1, block_c=32, num_warps=1)
        backward = TileConfig(block_i=SAVED_EVERY, block_o=1, block_c=32, num_warps=1)
    elif item_bytes == 4:
        forward = TileConfig(block_i=8, block_o=16, block_c=32, num_warps=4)
        backward = TileConfig(block_i=SAVED_EVERY, block_o=16, block_c=32, num_warps=4)
    elif impl == "chunked":
        forward = backward = TileConfig(block_i=SAVED_EVERY, block_o=8, block_c=64, num_warps=4)
    else:
        # A multiprocessor runs four programs at 128 registers per thread, three at 168; the kernels just fit in these.
        forward = TileConfig(block_i=8, block_o=8, block_c=64, num_warps=4, maxnreg=128)
        if forward.steps * 4 * row_bytes < BYTES_PER_SHORT_HOP:
            forward = TileConfig(block_i=16, block_o=8, block_c=64, num_warps=4, maxnreg=168)
        backward = TileConfig(block_i=SAVED_EVERY, block_o=8, block_c=64, num_warps=4, maxnreg=168)
    if impl not in AHEAD:
        return ScanConfig(forward=forward, backward=backward)
    # Prefetching helps only where memory, not the hops, is the bottleneck. Training needs more bytes per hop for that:
    # on one sequence of 2560 channels prefetching makes a forward pass alone faster, and a training step slower.
    enough = BYTES_PER_SHORT_HOP if training else BYTES_PER_HOP
    return ScanConfig(
        forward=_lengthen(forward, 4 * row_bytes),
        backward=_lengthen(backward, 7 * row_bytes),
        ahead=AHEAD[impl] if forward.steps * 4 * row_bytes >= enough else 0,
    )


def _lengthen(tile: TileConfig, bytes_per_step: int) -> TileConfig:
    """Return a tile with more rows and fewer channels, until tiles of the same steps move BYTES_PER_HOP bytes."""
    while tile.steps * bytes_per_step < BYTES_PER_HOP and tile.block_c > MIN_BLOCK_C:
        tile = replace(tile, block_o=2 * tile.block_o, block_c=tile.block_c // 2)
    return tile


def preferred_chunk(sizes: Mapping[str, int], formulation: str = "") -> int:
    """Return a chunk length, in steps, with which reduce-then-scan has about 4 * MIN_PROGRAMS programs.

    Args:
        sizes: batch, seq_len and channels; a program takes 64 channels.
        formulation: not used.
    """
    chunks = -(-4 * MIN_PROGRAMS // (sizes["batch"] * -(-sizes["channels"] // 64)))
    return max(MIN_CHUNK, next_power_of_two(sizes["seq_len"]) // next_power_of_two(chunks))


def why_not_chunked(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why reduce-then-scan cannot run these sizes, or None."""
    return bad_chunk_size(sizes) or why_not_kernels(sizes, dtype, state_dtype)
