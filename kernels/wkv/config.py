"""Launches of WKV's kernels: one frozen value a call, and one predicate that says what is valid. Imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..common.channels import TileConfig

MAX_NARROW = 2048
"""Channels of all sequences up to which a sum takes longer from tile to tile than their data do, unless tiles are long
and sums are looked for far behind."""

MIN_SERIAL = 4096
"""Channels of all sequences from which the data of a tile of time take longer than the hop of a state past it: at 6
bytes an element of 128 steps, or 12 of 64, 3 MB, 0.8 us."""

AHEAD = 128
"""Programs ahead of which the forward scan brings k and v into the L2 cache, of the 528 that an H200 runs at once: at
batch 8 and 768 channels 7 % of its time, while 256 ahead, a tile of 2048 channels, costs 3 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WkvConfig:
    """Every launch of one forward and backward pass; the forward pass saves a state every backward.block_i steps.

    Attributes:
        reload: whether the forward scan reads k and v again, from the cache, instead of holding them in registers.
        hold: whether it holds k and v as they came and makes weights again, which neither loads nor holds weights;
            ``reload`` does not matter then.
        serial: whether its states pass from tile to tile, each waiting for the one before, instead of being added up
            from the tiles' sums, and the sums of a tile's rows are shown to all its threads instead of being scanned.
            Both ways stay: passing states alone would make problems of few channels 30 % to 100 % slower, and adding up
            sums alone takes 20 % longer at 768 channels, where it falls below 70 % of the copy rate.
        look: sums that a scan's program loads at once: of up to that many earlier tiles, one of them of all further.
        ahead: how many programs ahead at most the forward scan brings k and v into the L2 cache, in whole tiles of
            time.
    """

    forward: TileConfig
    backward: TileConfig
    reload: bool = True
    hold: bool = False
    serial: bool = False
    look: int = 16
    ahead: int = 0


def invalid_reason(config: WkvConfig, *, walk: bool) -> str | None:
    """Return why the launches cannot run, or None; a walk has rows of a single warp's threads, one a tile."""
    if config.serial and config.forward.channels not in (1, 2, 4):
        return f"forward must have 1, 2 or 4 channels of a row for each thread, got {config.forward.channels}"
    if config.look < 2 or config.look & (config.look - 1):
        return f"look must be a power of two >= 2, got {config.look}"
    for name, tile in (("forward", config.forward), ("backward", config.backward)):
        if reason := tile.invalid_reason(name):
            return reason
        if walk and tile.block_o != 1:
            return f"{name}.block_o must be 1 for a walk, got {tile.block_o}"
        if not walk and tile.block_o < 2:
            return f"{name}.block_o must be at least 2 for a scan, got {tile.block_o}"
        # Otherwise two threads would hold the same word and might read it at different times.
        if not walk and config.look * tile.block_c < 32 * tile.num_warps:
            threads = 32 * tile.num_warps
            return f"look * {name}.block_c must be at least the {threads} threads, got {config.look} * {tile.block_c}"
    return None


def select_config(
    *, strategy: str, capability: tuple[int, int], item_bytes: int, batch: int, channels: int, saving: bool
) -> WkvConfig:
    """Choose the launches.

    As measured on an H200, batch 8 and 4096 steps, 768 and 2048 channels: where 16-bit inputs are held as they came and
    states passed from tile to tile, adding states up from sums takes 21 % and 30 % longer, reading k and v again 8 %
    and 17 %, 96 registers, which spill, 33 % and 29 %; with a backward pass, adding up takes 3 % and 4 % longer, of
    float32 inputs forward 8 % and 19 %, which may be held as weights too. Adding up, loading 8 sums at once is ahead of
    16 by 2 % to 3 %, tiles of 8 warps are behind by 14 %, rows held as weights are behind with 16-bit inputs, with
    float32 inputs ahead by 8 % at 168 registers. Held and passed, the forward scan of 16-bit inputs takes about 30
    instructions an element, where an H200 that moves 6 bytes an element at full speed has time for 40; the backward
    scan about 105, for 10 bytes.

    Args:
        strategy: "scan" or "walk" (one program a sequence and block of channels).
        capability: compute capability of the device, such as (9, 0).
        item_bytes: bytes of one input element: 2 (bf16, fp16) or 4 (fp32).
        batch: B.
        channels: C.
        saving: whether a backward pass follows: what it needs takes registers.
    """
    if strategy == "walk":
        # Narrow blocks, for programs are few; a warp alone needs no shared memory.
        tile = TileConfig(block_i=8, block_o=1, block_c=32, num_warps=1)
        return WkvConfig(forward=tile, backward=tile)
    backward = TileConfig(block_i=32, block_o=8, block_c=32, num_warps=8, maxnreg=128)
    # Four blocks of 4 warps a multiprocessor at 128 registers a thread, three at 168.
    if batch * channels <= MAX_NARROW:
        if item_bytes == 4:
            forward = TileConfig(block_i=16, block_o=16, block_c=32, num_warps=8, maxnreg=128)
        else:
            forward = TileConfig(block_i=32, block_o=8, block_c=32, num_warps=4, maxnreg=168 if saving else 128)
        return WkvConfig(forward=forward, backward=backward, look=32)
    held = batch * channels >= MIN_SERIAL
    if item_bytes == 4:
        forward = TileConfig(block_i=16, block_o=4, block_c=64, num_warps=4, maxnreg=168)
    else:
        forward = TileConfig(block_i=32, block_o=4, block_c=64, num_warps=4, maxnreg=168 if saving else 128)
    return WkvConfig(
        forward=forward, backward=backward, reload=item_bytes != 4, hold=held, serial=held, look=8, ahead=AHEAD
    )


def scan_config(sizes: Mapping[str, int], dtype: str, capability: tuple[int, int], training: bool) -> WkvConfig:
    """Return the launches of the scan for a case's sizes."""
    return _config_of("scan", sizes, dtype, capability, training)


def walk_config(sizes: Mapping[str, int], dtype: str, capability: tuple[int, int], training: bool) -> WkvConfig:
    """Return the launches of the walk for a case's sizes."""
    return _config_of("walk", sizes, dtype, capability, training)


def _config_of(
    strategy: str, sizes: Mapping[str, int], dtype: str, capability: tuple[int, int], training: bool
) -> WkvConfig:
    return select_config(
        strategy=strategy, capability=capability, item_bytes=4 if dtype == "fp32" else 2, batch=sizes["batch"],
        channels=sizes["channels"], saving=training,
    )  # fmt: skip


def supports_torch_associative_scan(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why torch's associative scan cannot run here, or None; imports nothing."""
    torch_spec = importlib.util.find_spec("torch")
    folders = (torch_spec.submodule_search_locations if torch_spec else None) or ()
    if any(Path(folder, "_higher_order_ops", "associative_scan.py").is_file() for folder in folders):
        return None
    return "this torch has no torch._higher_order_ops.associative_scan"
