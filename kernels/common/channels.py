"""Tile configurations of the kernels over channels [B, T, C], and the sizes they support.

Imports neither torch nor triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from .spec import MODES, portable_form, triton_form

CHANNEL_MULTIPLE = 8
"""Kernels take channels in multiples of 8: 16 bytes of half-precision elements, one memory access."""

kernel_form = partial(triton_form, why_not="kernels.common.channels:why_not_kernels", chunked=False, documents=True)
naive_form = partial(
    kernel_form, name="naive", summary="one program takes all of time in order for a block of channels"
)
torch_form = partial(
    portable_form, name="torch", modes=MODES, summary="portable chunkwise form, any chunk length", documents=True
)
associative_form = partial(
    portable_form,
    name="associative_scan",
    chunked=False,
    documents=True,
    summary="associative scan over whole tensors, log2 of the sequence length passes",
)
"""Declare implementations of an operation over channels: kernel_form any in Triton, the others those that all have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """Launch of a kernel over channels, which gets this object as the constexpr TILE.

    A tile is block_o rows of block_i steps each, for block_c channels. A thread holds the block_i steps of one row for
    block_o * block_c / (32 num_warps) neighbouring channels; it loads and stores these channels in one access.

    Attributes:
        maxnreg: registers that a thread is limited to; None for no limit.
    """

    block_i: int
    block_o: int
    block_c: int
    num_warps: int
    maxnreg: int | None = None

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return self.block_i * self.block_o

    @property
    def channels(self) -> int:
        """Channels of a thread."""
        return self.block_o * self.block_c // (32 * self.num_warps)

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of a launch: TILE, num_warps and, where limited, maxnreg."""
        options: dict[str, Any] = {"TILE": self, "num_warps": self.num_warps}
        return options if self.maxnreg is None else {**options, "maxnreg": self.maxnreg}

    def blocks(self, batch: int, channels: int) -> int:
        """Return the number of programs that cover the same steps of all sequences and channels."""
        return batch * -(-channels // self.block_c)

    def grid(self, batch: int, seq_len: int, channels: int, steps: int) -> tuple[int]:
        """Return the grid of programs that take ``steps`` steps each."""
        return (-(-seq_len // steps) * self.blocks(batch, channels),)

    def invalid_reason(self, name: str) -> str | None:
        """Return why tile ``name`` cannot be launched, or None."""
        for field in ("block_i", "block_o", "block_c", "num_warps"):
            value = getattr(self, field)
            if value < 1 or value & (value - 1):
                return f"{name}.{field} must be a power of two, got {value}"
        return None


def why_not_kernels(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why the Triton kernels cannot run these sizes, or None."""
    if sizes["channels"] % CHANNEL_MULTIPLE:
        return f"channels must be a multiple of {CHANNEL_MULTIPLE}, got {sizes['channels']}"
    return None
