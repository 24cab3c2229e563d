"""Which chunk length a call takes if it names none, the fastest by a model, and which heads are cut into chunks.

A program walks one chunk, in order. The device runs a limited number of programs at once, a wave. It takes roughly the
time of walking a chunk or that of moving the bytes of all its programs, whichever is longer. With shorter chunks more
programs share the work. But several chunks need a pass over the chunks first, for the states between them: it reads
keys and values once more, and writes and reads a state for each chunk. Where it computes the chunks' contributions in
parallel (always in whole_state) it also merges them, one after the other. So a call takes one chunk if sequences and
heads fill the device, and else the chunk length that takes the least time in all:

    time = waves * chunk * (walk^p + memory^p)^(1/p) + [several chunks] (launch + the pass's walk + states + merges)

with p = overlap.

Heads rarely come to a whole number of waves: 140 programs on 132 multiprocessors would take as long as 264. whole_state
cuts only the heads that are left over, in this example 8.

:data:`COSTS` holds the terms, fitted by ``python -m lrbench.tests.tools.fit_choice`` to an H200 and an H100. Devices
differ only in their number of multiprocessors and their memory rate.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..common.sizes import MIN_PROGRAMS, REMEMBERED, next_power_of_two
from .config import KEPT_STATES, WHOLE_STATE_BLOCK_T, WholeStateConfig, fit_whole_state, why_no_whole_state

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MULTIPROCESSORS = 132
"""The H200's, for choices where no device is named."""

MEMORY_RATE = 4.917e12
"""The H200's specified memory bandwidth in bytes a second; :attr:`Costs.memory` is the cost at this rate."""

RESIDENT = 2
"""Programs of fused_chunk.py that a multiprocessor runs at once: a state takes nearly all registers of four warps."""

LONGEST_SQUARE = 256
"""The longest chunk of scheme "sweep", whose work grows with the square of the chunk length."""

ONE_CHUNK = 512
"""Up to this length a sequence is always one chunk: the few tiles take the device less time, however they are split,
than launching the pass over the chunks takes the host."""

WORTH_CUTTING = 0.03
"""Share of the forward time that shorter chunks must save by the model for whole_state to take them: with few programs
the pass over the chunks takes longer than the model says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The model's terms: times in microseconds, except ``fixed``, ``gradient`` and ``overlap``.

    Attributes:
        walk: time of a position that a program of fused_chunk.py walks, for each 128 rows of the state.
        whole_state: time of a position that a program of whole_state.py walks with 128 x 128 elements of the state.
        fixed: share of ``whole_state`` that does not depend on the state's size; the rest is in proportion to it.
        normaliser: time of a position in normaliser.py; what denominators add if the output's kernel makes them.
        gradient: how many times as long a position takes in dq and dk, which also sum rows for the gates' gradients.
        launch: time of launching the pass over the chunks.
        states, states_and_n: time of a position in this pass, without and with n; in whole_state always ``states``.
        memory: time of a mebibyte read or written (once, if a head's programs read the same), at MEMORY_RATE.
        store: time of a mebibyte of states, written and read.
        merge: time of a chunk in the merge, where the pass computes chunks in parallel.
        overlap: exponent; the larger it is, the less the walk and memory wait for each other.
    """

    walk: float = 0.051
    whole_state: float = 0.02827
    fixed: float = 0.4156
    normaliser: float = 0.02087
    gradient: float = 1.149
    launch: float = 1.814
    states: float = 0.01521
    states_and_n: float = 0.04168
    memory: float = 0.281
    store: float = 1.18
    merge: float = 0.2934
    overlap: float = 3.175

    def position_us(self, tile: WholeStateConfig) -> float:
        """Return the time in microseconds of a position in a program of whole_state.py, without that of memory."""
        return self.whole_state * (self.fixed + (1 - self.fixed) * tile.block_x * tile.block_z / 128**2)

    def overlapped(self, walk: float, memory: float) -> float:
        """Return the time of a position whose walk and whose bytes alone would take these times."""
        return (walk**self.overlap + memory**self.overlap) ** (1 / self.overlap)


COSTS = Costs()


class Times(NamedTuple):
    """The time of a pass in microseconds: of its walks and the normaliser's, and of the passes over the chunks."""

    walks: float
    states: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a choice depends on. batch_heads: B * H; normalised: with denominators; memory_rate: in bytes a second."""

    seq_len: int
    batch_heads: int
    head_dim_qk: int
    head_dim_v: int
    normalised: bool = False
    multiprocessors: int = MULTIPROCESSORS
    memory_rate: float = MEMORY_RATE

    def chunks(self) -> list[int]:
        """Return the chunk lengths to choose from, powers of two, the longest first: it holds the whole sequence."""
        longest = max(WHOLE_STATE_BLOCK_T, next_power_of_two(self.seq_len))
        if self.seq_len <= ONE_CHUNK:
            return [longest]
        return [1 << n for n in reversed(range(WHOLE_STATE_BLOCK_T.bit_length() - 1, longest.bit_length()))]

    def best_chunk(self, scheme: str, costs: Costs = COSTS, *, kept: int | None = None) -> int:
        """Return the chunk length that takes the least time, or a longer one if that is nearly as fast (WORTH_CUTTING).

        Args:
            kept: None for a forward pass; for a backward pass see :meth:`backward_us`.
        """
        time_us = self.forward_us if kept is None else functools.partial(self.backward_us, kept=kept)
        times = {chunk: sum(time_us(scheme, chunk, costs)) for chunk in self.chunks()}
        enough = min(times.values()) * (1 + WORTH_CUTTING if scheme == "whole_state" and kept is None else 1)
        return next(chunk for chunk, time in times.items() if time <= enough)

    def forward_us(self, scheme: str, chunk: int, costs: Costs = COSTS) -> Times:
        """Return the time of the forward pass."""
        whole = self.whole_heads(scheme, chunk)
        walks = self._walk_us(scheme, chunk, whole, self.head_dim_qk, self.head_dim_v, costs)
        if self.normalised:
            blocks = -(-self.head_dim_qk // 128)
            columns = 2 * self.head_dim_qk / blocks
            for heads, length in self._walks(whole, chunk):
                programs = heads * -(-self.seq_len // length) * blocks
                walks += self._programs_us(programs, RESIDENT, length, costs.normaliser, columns, costs)
        return Times(walks, self._states_us(scheme, chunk, self.batch_heads - whole, costs, with_n=self.normalised))

    def backward_us(self, scheme: str, chunk: int, costs: Costs = COSTS, *, kept: int) -> Times:
        """Return the time of dq, dk and dv, and of the states' gradients and, unless they were kept, the states.

        Args:
            kept: chunk length of the states that the forward pass has kept, 0 for none. The backward pass can use them
                if it cuts the same heads into chunks of this length.
        """
        whole = self.whole_heads(scheme, chunk, backward=True)
        dq = self._walk_us(scheme, chunk, whole, self.head_dim_v, self.head_dim_qk, costs, gates=True)
        dv = self._walk_us(scheme, chunk, whole, self.head_dim_qk, self.head_dim_v, costs)
        there = kept == chunk and self.whole_heads(scheme, chunk) == whole
        passes = 1 if there else 2
        return Times(2 * dq + dv, passes * self._states_us(scheme, chunk, self.batch_heads - whole, costs))

    def kept_chunk(self, scheme: str, chunk: int, *, qk_share: float = 1, state_bytes: int = 4) -> int:
        """Return ``chunk`` if a forward pass keeps its states, else 0; see :func:`.autograd.keep_states`.

        Args:
            qk_share: heads of q and k for each head of v; less than 1 if heads share them.
            state_bytes: bytes of an element of a state; inputs have 16 bits.
        """
        cut = self.batch_heads - self.whole_heads(scheme, chunk)
        stored = self.head_dim_qk * self.head_dim_v * state_bytes * -(-self.seq_len // chunk) * cut
        inputs = self.seq_len * (2 * qk_share * self.head_dim_qk + self.head_dim_v) * 2 * self.batch_heads
        return chunk if KEPT_STATES * stored <= inputs else 0

    def whole_heads(self, scheme: str, chunk: int, *, backward: bool = False) -> int:
        """Return how many heads are not cut into chunks.

        If chunks are shorter than the sequence, fused_chunk cuts all heads. whole_state leaves as many heads whole as
        fill the multiprocessors a whole number of times, since those would gain nothing from chunks, and cuts the rest.
        All products of a pass cut the same heads. If normaliser.py runs, all are cut: it needs every head's states.
        """
        if chunk >= self.seq_len:
            return self.batch_heads
        if scheme != "whole_state" or why_no_whole_state(self.head_dim_qk, self.head_dim_v, chunk):
            return 0
        whole = self.batch_heads
        dims = (self.head_dim_qk, self.head_dim_v)
        if self.normalised and not fit_whole_state(*dims).makes_denominators:
            return 0
        for tile, dim_z in (
            (fit_whole_state(*dims), dims[1]),
            *([(fit_whole_state(*dims[::-1], sums=True), dims[0])] if backward else ()),
        ):
            slots, blocks = tile.resident * self.multiprocessors, -(-dim_z // tile.block_z)
            whole = min(whole, self.batch_heads * blocks // slots * slots // blocks)
        return whole

    def _walks(self, whole: int, chunk: int) -> list[tuple[int, int]]:
        """Return (number of heads, chunk length) of the whole heads and of the cut ones, if there are any."""
        return [walk for walk in ((whole, max(chunk, self.seq_len)), (self.batch_heads - whole, chunk)) if walk[0]]

    def _walk_us(
        self, scheme: str, chunk: int, whole: int, dim_x: int, dim_z: int, costs: Costs, *, gates: bool = False
    ) -> float:
        """Return the time of a product with head dims DX and DZ; ``gates``: with row sums for the gates (dq, dk)."""
        # For each launch: columns of X, blocks of output columns, programs per multiprocessor, time of a position.
        launches = [(dim_x, -(-dim_z // 64), RESIDENT, costs.walk * -(-dim_x // 128))]
        if scheme == "whole_state" and why_no_whole_state(dim_x, dim_z, chunk) is None:
            launches = [
                (min(tile.block_x, dim_x - first), -(-dim_z // tile.block_z), tile.resident, costs.position_us(tile))
                for first, tile in fit_whole_state(dim_x, dim_z, sums=gates).launches(dim_x)
            ]
        total = 0.0
        for n, (columns_x, blocks, resident, position) in enumerate(launches):
            # Z and the output, the partial result of the launch before and, for row sums, the pair (roles.py).
            tensors_z = 2 + (n > 0) + (gates and n == len(launches) - 1)
            columns = (2 * columns_x + tensors_z * dim_z) / blocks
            position *= costs.gradient if gates else 1.0
            for heads, length in self._walks(whole, chunk):
                programs = heads * -(-self.seq_len // length) * blocks
                total += self._programs_us(programs, resident, length, position, columns, costs)
        return total

    def _states_us(self, scheme: str, chunk: int, heads: int, costs: Costs, *, with_n: bool = False) -> float:
        """Return the time of the pass over the chunks of ``heads`` heads, those that are cut."""
        num_chunks = -(-self.seq_len // chunk)
        if num_chunks == 1 or heads == 0:
            return 0.0
        whole_state = scheme == "whole_state"
        blocks_k, blocks_v = -(-self.head_dim_qk // 128), -(-self.head_dim_v // (128 if whole_state else 64))
        programs, length, merge = heads * blocks_k * blocks_v, self.seq_len, 0.0
        if whole_state or programs < MIN_PROGRAMS:
            # The pass's last chunk is not computed.
            programs, length, merge = programs * (num_chunks - 1), chunk, costs.merge * num_chunks
        position = costs.states_and_n if with_n and not whole_state else costs.states
        columns = self.head_dim_qk / blocks_k + self.head_dim_v / blocks_v
        walk = self._programs_us(programs, 2 if whole_state else 3, length, position, columns, costs)
        stored = heads * num_chunks * self.head_dim_qk * self.head_dim_v * 4 / 2**20
        return costs.launch + walk + costs.store * stored + merge

    def _programs_us(
        self, programs: int, resident: int, length: int, position: float, columns: float, costs: Costs
    ) -> float:
        """Return the time of programs that walk ``length`` positions each, wave after wave.

        Args:
            resident: programs that a multiprocessor runs at once.
            position: time of a position, without that of memory.
            columns: 16-bit numbers that a program reads and writes at a position.
        """
        full, rest = divmod(programs, resident * self.multiprocessors)
        mebibyte = costs.memory * MEMORY_RATE / self.memory_rate * columns * 2 / 2**20
        waves = full * costs.overlapped(position, mebibyte * resident * self.multiprocessors)
        return min(length, self.seq_len) * (waves + (costs.overlapped(position, mebibyte * rest) if rest else 0.0))


def sweep_chunk(head_dim_qk: int, head_dim_v: int) -> int:
    """Return the chunk length of scheme "sweep", the same for any sequence length."""
    return min(LONGEST_SQUARE, max(WHOLE_STATE_BLOCK_T, next_power_of_two(max(head_dim_qk, head_dim_v))))


@functools.lru_cache(REMEMBERED)
def forward_chunk(shape: Sizes, scheme: str) -> int:
    """Return the chunk length of a call that names none."""
    if scheme == "sweep":
        return sweep_chunk(shape.head_dim_qk, shape.head_dim_v)
    return shape.best_chunk(scheme)


@functools.lru_cache(REMEMBERED)
def backward_chunk(shape: Sizes, scheme: str, kept: int) -> int:
    """Return the chunk length that a backward pass takes; ``kept``: see :meth:`Sizes.backward_us`."""
    return shape.best_chunk(scheme, kept=kept)


def preferred_chunk(sizes: Mapping[str, int], scheme: str, *, impl: str = "") -> int:
    """Return :func:`forward_chunk` for a case's sizes (batch, seq_len, num_heads, head_dim_qk, head_dim_v).

    Args:
        impl: "normalised" where there are denominators.
    """
    return forward_chunk(shape_of(sizes, normalised=impl == "normalised"), scheme)


def shape_of_tensors(q: Tensor, v: Tensor, *, normalised: bool = False) -> Sizes:
    """Return the shape of a call's q [B, T, G, K] and v [B, T, H, V], on their device (a CPU counts as an H200)."""
    return _shape_of_sizes(q.shape, v.shape, v.device, normalised)


@functools.lru_cache(REMEMBERED)
def _shape_of_sizes(q: torch.Size, v: torch.Size, device: torch.device, normalised: bool) -> Sizes:
    batch, seq_len, heads, head_dim_v = v
    # Imported here because it imports torch, which declarations must do without.
    from ..common.device import memory_rate, multiprocessors

    return Sizes(
        seq_len=seq_len,
        batch_heads=batch * heads,
        head_dim_qk=q[3],
        head_dim_v=head_dim_v,
        normalised=normalised,
        multiprocessors=multiprocessors(device) if device.type == "cuda" else MULTIPROCESSORS,
        memory_rate=memory_rate(device) or MEMORY_RATE,
    )


def shape_of(sizes: Mapping[str, int], *, normalised: bool = False) -> Sizes:
    """Return the shape of a case's sizes."""
    return Sizes(
        seq_len=sizes["seq_len"],
        batch_heads=sizes["batch"] * sizes["num_heads"],
        head_dim_qk=sizes["head_dim_qk"],
        head_dim_v=sizes["head_dim_v"],
        normalised=normalised,
    )
