"""Launch configurations of WKV's kernels and which of them are valid. Imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..common.channels import TileConfig

MAX_NARROW = 2048
"""Up to this many channels (batch * channels), passing sums from tile to tile takes longer than moving the data, so
tiles are longer and a program looks back over more of them."""

MIN_SERIAL = 4096
"""From this many channels (batch * channels) on, moving the data of one tile of time takes longer than passing a state
to the next tile (0.8 us): 3 MB, at 6 bytes per element and 128 steps or 12 bytes and 64 steps."""

AHEAD = 128
"""How many programs ahead the forward scan prefetches k and v into the L2 cache; an H200 runs 528 programs at once. At
batch 8 and 768 channels this saves 7 % of its time; 256 ahead, one tile of time at 2048 channels, costs 3 %."""

KEEPS = ("nothing", "tokens", "weights")
"""What the forward scan may keep in registers from summing a tile to its outputs: "nothing", so that k and v are read
again, from the cache; "tokens", k and v in their dtype, of which weights are computed twice; "weights", these and v."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WkvConfig:
    """Every launch of one forward and backward pass; the forward pass saves a state every backward.block_i steps.

    Attributes:
        keep: one of KEEPS.
        serial: the forward scan passes states from tile to tile, each tile waiting for the one before; otherwise every
            tile adds up the sums of the tiles before it (``look_back`` in exchange.py). Both are needed: passing states
            would make problems of few channels 30 % to 100 % slower, and adding sums takes 20 % longer at 768 channels,
            where it falls below 70 % of the copy rate.
        look: words that a program loads at once without ``serial``: sums of earlier tiles, and one of all before them.
        ahead: how many programs ahead the forward scan prefetches k and v, rounded down to whole tiles of time.
    """

    forward: TileConfig
    backward: TileConfig
    keep: str = "nothing"
    serial: bool = False
    look: int = 16
    ahead: int = 0


def invalid_reason(config: WkvConfig, *, walk: bool) -> str | None:
    """Return why the launches cannot run, or None; ``walk``: as launches of a walk, whose tiles have a single row."""
    if config.look < 2 or config.look & (config.look - 1):
        return f"look must be a power of two >= 2, got {config.look}"
    if config.keep not in KEEPS:
        return f"keep must be one of {', '.join(KEEPS)}, got {config.keep}"
    for name, tile in (("forward", config.forward), ("backward", config.backward)):
        if reason := tile.invalid_reason(name):
            return reason
        if walk and tile.block_o != 1:
            return f"{name}.block_o must be 1 for a walk, got {tile.block_o}"
        if not walk and tile.block_o < 2:
            return f"{name}.block_o must be at least 2 for a scan, got {tile.block_o}"
        # With fewer words, two threads would load the same one, possibly at different times with different values.
        if not walk and config.look * tile.block_c < 32 * tile.num_warps:
            threads = 32 * tile.num_warps
            return f"look * {name}.block_c must be at least the {threads} threads, got {config.look} * {tile.block_c}"
    if config.serial and config.forward.channels not in (1, 2, 4):
        return f"forward must have 1, 2 or 4 channels of a row for each thread, got {config.forward.channels}"
    return None


def select_config(
    sizes: Mapping[str, int], dtype: str, capability: tuple[int, int], training: bool, *, impl: str
) -> WkvConfig:
    """Choose the launches.

    Measured on an H200 at batch 8 and 4096 steps; of two percentages the first is for 768 channels, the second for
    2048. Compared with tokens kept and ``serial``, as chosen for 16-bit inputs, the forward scan takes longer
    - by 21 % and 30 % without ``serial`` (3 % and 4 % if states are saved for a backward pass; float32 inputs 8 % and
      19 %, and for those the weights may be held as well),
    - by 8 % and 17 % with k and v read again,
    - by 33 % and 29 % with 96 registers, which spill.
    Without ``serial``, look = 8 is 2 % to 3 % faster than 16, tiles of 8 warps are 14 % slower, and holding weights is
    slower with 16-bit inputs but 8 % faster with float32 inputs at 168 registers. With tokens kept and ``serial`` the
    forward scan of 16-bit inputs takes about 30 instructions per element; an H200 has time for 40 while it moves an
    element's 6 bytes. The backward scan takes about 105, for 10 bytes.

    Args:
        sizes: batch and channels among others.
        dtype: name of the inputs' dtype.
        capability: compute capability of the device, such as (9, 0).
        training: whether states are saved for a backward pass, which takes registers.
        impl: "scan" or "naive".
    """
    if impl == "naive":
        # Narrow blocks give more programs; a single warp needs no shared memory.
        tile = TileConfig(block_i=8, block_o=1, block_c=32, num_warps=1)
        return WkvConfig(forward=tile, backward=tile)
    backward = TileConfig(block_i=32, block_o=8, block_c=32, num_warps=8, maxnreg=128)
    # A multiprocessor runs four programs of 4 warps at 128 registers per thread, three at 168.
    width, is_wide = sizes["batch"] * sizes["channels"], dtype == "fp32"
    if width <= MAX_NARROW:
        if is_wide:
            forward = TileConfig(block_i=16, block_o=16, block_c=32, num_warps=8, maxnreg=128)
        else:
            forward = TileConfig(block_i=32, block_o=8, block_c=32, num_warps=4, maxnreg=168 if training else 128)
        return WkvConfig(forward=forward, backward=backward, look=32)
    serial = width >= MIN_SERIAL
    keep = "tokens" if serial else "weights" if is_wide else "nothing"
    if is_wide:
        forward = TileConfig(block_i=16, block_o=4, block_c=64, num_warps=4, maxnreg=168)
    else:
        forward = TileConfig(block_i=32, block_o=4, block_c=64, num_warps=4, maxnreg=168 if training else 128)
    return WkvConfig(forward=forward, backward=backward, keep=keep, serial=serial, look=8, ahead=AHEAD)


def why_not_torch_associative_scan(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why torch's associative scan cannot run here, or None; imports nothing."""
    torch_spec = importlib.util.find_spec("torch")
    folders = (torch_spec.submodule_search_locations if torch_spec else None) or ()
    if any(Path(folder, "_higher_order_ops", "associative_scan.py").is_file() for folder in folders):
        return None
    return "this torch has no torch._higher_order_ops.associative_scan"
