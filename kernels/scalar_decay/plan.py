"""What a pass of the engine launches, as plain data: which kernels, in which order, on which heads, chunks and columns.

    forward     gates   [state]   [normaliser]   h
    backward    [state]   dq   [state_gradient]   dk   dv   gates

h, dq, dk and dv are the products of roles.py. ``state`` and ``state_gradient`` are the pass over the chunks, forward
and backward in time: they run if a head is cut into chunks, and a backward pass leaves out the first if it is given the
states that the forward pass kept. ``normaliser`` makes mLSTMexp's denominators if the kernel of h does not.

launch.py runs these launches, choice.py models their time in order to choose a chunk length, and
analysis/counts/executed.py adds up what they multiply and move. Imports neither torch nor triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ..common.sizes import REMEMBERED, cdiv
from .config import KEPT_STATES, EngineConfig, NormaliserConfig, StatesConfig, select_config
from .roles import DK, DQ, DV, OUTPUT, Role

MULTIPROCESSORS = 132
"""The H200's, for choices where no device is named."""

MEMORY_RATE = 4.917e12
"""The H200's specified memory bandwidth in bytes a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What launches and chunk lengths depend on.

    Attributes:
        batch_heads: B * H.
        normalised: whether outputs are divided by denominators (mLSTMexp).
        sums_decay: whether the decay's gradient, rounding errors included, is summed over all tokens (SSD's A).
        memory_rate: of the device, in bytes a second.
    """

    seq_len: int
    batch_heads: int
    head_dim_qk: int
    head_dim_v: int
    normalised: bool = False
    sums_decay: bool = False
    multiprocessors: int = MULTIPROCESSORS
    memory_rate: float = MEMORY_RATE

    def config(
        self,
        scheme: str,
        chunk: int,
        capability: tuple[int, int] = (9, 0),
        item_bytes: int = 2,
        precision: str = "ieee",
    ) -> EngineConfig:
        """Return the tiles of :func:`.select_config`; for Hopper and in half precision, if nothing else is named."""
        return select_config(
            scheme=scheme, capability=capability, item_bytes=item_bytes, head_dim_qk=self.head_dim_qk,
            head_dim_v=self.head_dim_v, chunk=chunk, batch_heads=self.batch_heads, precision=precision,
        )  # fmt: skip


class ProductLaunch(NamedTuple):
    """A launch of a product, for some columns of X and Y.

    Attributes:
        tile: its configuration.
        first, dim_x: its first column of X and Y, and how many it takes; ``block_x``: the same, padded to its tile.
        blocks: blocks of the output's columns, with a program each in every chunk.
        multiplied: columns of the output that these programs compute; the last ones may lie beyond DZ.
    """

    tile: Any
    first: int
    dim_x: int
    block_x: int
    blocks: int
    multiplied: int


class ProductPasses(NamedTuple):
    """The launches of h, dq, dk or dv, each of which adds its columns of X and Y to the partial result of the last.

    Attributes:
        tile: the configuration of all but perhaps the first launch.
        dim_x, dim_z: DX and DZ (roles.py).
    """

    role: Role
    tile: Any
    dim_x: int
    dim_z: int
    launches: tuple[ProductLaunch, ...]


class StatesPass(NamedTuple):
    """The pass over the chunks, for the state of ``heads`` heads before each of their ``chunks`` chunks.

    ``blocks``: of K and of V, with a program each. A ``parallel`` pass (config.py) has these programs for every chunk,
    and then merges the chunks; its last chunk is not computed, unless the last state is wanted: no chunk follows it.
    """

    tile: StatesConfig
    blocks: tuple[int, int]
    heads: int
    chunks: int

    def programs(self, *, want_last: bool) -> int:
        """Return the number of programs, those of the merge left out."""
        chunks = self.chunks - (not want_last) if self.tile.parallel else 1
        return self.blocks[0] * self.blocks[1] * self.heads * chunks


class NormaliserPass(NamedTuple):
    """The launch for mLSTMexp's denominators, with a program for each of ``blocks`` blocks of k in every chunk, in
    tiles of ``block_t`` positions."""

    tile: NormaliserConfig
    blocks: int
    block_t: int


class Pass(NamedTuple):
    """A forward or backward pass.

    Attributes:
        in_order: whether a chunk's tiles are taken in order, not in parallel; ``whole_state``: by whole_state.py.
        heads: B * H.
        whole: how many of them, the first ones, are not cut into chunks; 0 where tiles are taken in parallel.
        chunk: chunk length; ``chunks``: how many of these hold the sequence, N.
        stretch: positions over which gate vectors accumulate.
        anchor_every: distance of the decay gradient's anchors, in positions.
        launches: name -> StatesPass, NormaliserPass or ProductPasses, in the order in which they run.
    """

    in_order: bool
    whole_state: bool
    heads: int
    whole: int
    chunk: int
    chunks: int
    stretch: int
    anchor_every: int
    launches: dict[str, Any]

    @property
    def cut(self) -> int:
        """Heads that are cut into chunks."""
        return self.heads - self.whole

    @property
    def head_chunks(self) -> int:
        """Chunks of all heads; a whole head is one."""
        return self.whole + self.chunks * self.cut

    def walks(self, blocks: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return number and most positions of the programs of whole heads, and of cut ones: ``blocks`` a chunk."""
        return (blocks * self.whole, self.chunk * self.chunks), (blocks * self.cut * self.chunks, self.chunk)

    @property
    def several(self) -> bool:
        """Whether any head has several chunks, so that the states between them are needed."""
        return self.chunks > 1 and self.cut > 0


def forward(sizes: Sizes, config: EngineConfig, chunk: int, *, ends: bool = False) -> Pass:
    """Return what a forward pass launches; ``ends``: whether the last state is wanted."""
    made = _pass(sizes, config, chunk, whole_heads(sizes, config, chunk))
    launches = made.launches
    if made.several or (ends and not made.in_order):
        launches["state"] = _states(sizes, config, made)
    if made.in_order and sizes.normalised and (tile := config.normaliser) is not None:
        launches["normaliser"] = NormaliserPass(tile, cdiv(sizes.head_dim_qk, tile.block_k), made.stretch)
    launches["h"] = _product(OUTPUT, config.output, sizes.head_dim_qk, sizes.head_dim_v)
    return made


def backward(sizes: Sizes, config: EngineConfig, chunk: int, *, kept: int = 0, ends: bool = False) -> Pass:
    """Return what a backward pass launches.

    Args:
        kept: chunk length of the states that the forward pass has kept, 0 for none. They serve the backward pass if it
            cuts the same heads into chunks of this length.
        ends: whether the initial state or the gradient of the last one is given.
    """
    made = _pass(sizes, config, chunk, whole_heads(sizes, config, chunk, backward=True))
    launches = made.launches
    over_chunks = made.several or (ends and not made.in_order)
    if over_chunks and not (kept == chunk and made.whole == whole_heads(sizes, config, chunk)):
        launches["state"] = _states(sizes, config, made)
    launches["dq"] = _product(DQ, config.dq, sizes.head_dim_qk, sizes.head_dim_v)
    if over_chunks:
        launches["state_gradient"] = _states(sizes, config, made)
    launches["dk"] = _product(DK, config.dk, sizes.head_dim_qk, sizes.head_dim_v)
    launches["dv"] = _product(DV, config.dv, sizes.head_dim_qk, sizes.head_dim_v)
    return made


def _pass(sizes: Sizes, config: EngineConfig, chunk: int, whole: int) -> Pass:
    # Rounding errors of the decay's gradient accumulate from anchor to anchor, and never across a chunk's edge.
    # whole_state has fewer anchors, because they take a larger share of its time.
    every = 64 if sizes.sums_decay else 512 if config.whole_state else 256
    in_order = config.takes_tiles_in_order
    return Pass(
        in_order, config.whole_state, heads=sizes.batch_heads, whole=whole, chunk=chunk,
        chunks=cdiv(sizes.seq_len, chunk), stretch=config.gate_stretch(chunk),
        anchor_every=min(chunk, every) if in_order else chunk, launches={},
    )  # fmt: skip


def _states(sizes: Sizes, config: EngineConfig, made: Pass) -> StatesPass:
    tile = config.states
    blocks = cdiv(sizes.head_dim_qk, tile.block_x), cdiv(sizes.head_dim_v, tile.block_z)
    return StatesPass(tile, blocks, made.cut, made.chunks)


@lru_cache(REMEMBERED)
def _product(role: Role, tile: Any, head_dim_qk: int, head_dim_v: int) -> ProductPasses:
    dim_x, dim_z = (head_dim_v, head_dim_qk) if role.transposed else (head_dim_qk, head_dim_v)
    tiles = tile.launches(dim_x)
    launches = []
    for (first, part), end in zip(tiles, [*(first for first, _ in tiles[1:]), dim_x], strict=True):
        columns = cdiv(end - first, part.block_x) * part.block_x
        blocks, multiplied = cdiv(dim_z, part.block_z), part.multiplied_columns(dim_z)
        launches.append(ProductLaunch(part, first, end - first, columns, blocks, multiplied))
    return ProductPasses(role, tile, dim_x, dim_z, tuple(launches))


def whole_heads(sizes: Sizes, config: EngineConfig, chunk: int, *, backward: bool = False) -> int:
    """Return how many heads are not cut into chunks; 0 where a chunk's tiles are taken in parallel.

    If chunks are shorter than the sequence, fused_chunk cuts all heads. whole_state leaves as many heads whole as fill
    the multiprocessors a whole number of times, since those would gain nothing from chunks, and cuts the rest. All
    products of a pass cut the same heads. If normaliser.py runs, all are cut: it needs every head's states.
    """
    whole = sizes.batch_heads
    if config.takes_tiles_in_order and chunk >= sizes.seq_len:
        return whole
    if not config.whole_state or (sizes.normalised and config.normaliser is not None):
        return 0
    tiles = [(config.output, sizes.head_dim_v), (config.dq, sizes.head_dim_qk)]
    for tile, dim_z in tiles if backward else tiles[:1]:
        slots, blocks = tile.resident * sizes.multiprocessors, cdiv(dim_z, tile.block_z)
        whole = min(whole, sizes.batch_heads * blocks // slots * slots // blocks)
    return whole


def kept_chunk(sizes: Sizes, config: EngineConfig, chunk: int, *, qk_share: float = 1, state_bytes: int = 4) -> int:
    """Return ``chunk`` if a forward pass may keep its states for the backward pass, which take little memory, else 0.

    Where a chunk's tiles are taken in parallel, it keeps none.

    Args:
        qk_share: heads of q and k for each head of v; less than 1 if heads share them.
        state_bytes: bytes of an element of a state; inputs have 16 bits.
    """
    cut = sizes.batch_heads - whole_heads(sizes, config, chunk)
    stored = sizes.head_dim_qk * sizes.head_dim_v * state_bytes * cdiv(sizes.seq_len, chunk) * cut
    inputs = sizes.seq_len * (2 * qk_share * sizes.head_dim_qk + sizes.head_dim_v) * 2 * sizes.batch_heads
    return chunk if config.takes_tiles_in_order and KEPT_STATES * stored <= inputs else 0
