"""Which chunk length a call takes if it names none: the fastest by a model of the time of its launches (plan.py).

A program walks one chunk, in order. The device runs a limited number of programs at once, a wave. It takes roughly the
time of walking a chunk or that of moving the bytes of all its programs, whichever is longer. With shorter chunks more
programs share the work. But several chunks need a pass over the chunks first, for the states between them: it reads
keys and values once more, and writes and reads a state for each chunk. Where it computes the chunks' contributions in
parallel (always in whole_state) it also merges them, one after the other. So a call takes one chunk if sequences and
heads fill the device, and else the chunk length that takes the least time in all:

    time = waves * chunk * (walk^p + memory^p)^(1/p) + [several chunks] (launch + the pass's walk + states + merges)

with p = overlap.

Heads rarely come to a whole number of waves: 140 programs on 132 multiprocessors would take as long as 264. whole_state
cuts only the heads that are left over, in this example 8 (:func:`.plan.whole_heads`).

:data:`COSTS` holds the terms, fitted by ``python -m lrbench.tests.tools.fit_choice`` to an H200 and an H100. Devices
differ only in their number of multiprocessors and their memory rate.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..common.sizes import MIN_PROGRAMS, REMEMBERED, cdiv, next_power_of_two
from .config import WHOLE_STATE_BLOCK_T, EngineConfig, WholeStateConfig
from .plan import MEMORY_RATE, Pass, ProductPasses, Sizes, StatesPass, backward, forward

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


def chunk_lengths(sizes: Sizes) -> list[int]:
    """Return the chunk lengths to choose from, powers of two, the longest first: it holds the whole sequence."""
    longest = max(WHOLE_STATE_BLOCK_T, next_power_of_two(sizes.seq_len))
    if sizes.seq_len <= ONE_CHUNK:
        return [longest]
    return [1 << n for n in reversed(range(WHOLE_STATE_BLOCK_T.bit_length() - 1, longest.bit_length()))]


def best_chunk(sizes: Sizes, scheme: str, costs: Costs = COSTS, *, kept: int | None = None) -> int:
    """Return the chunk length that takes the least time, or a longer one if that is nearly as fast (WORTH_CUTTING).

    Args:
        kept: None for a forward pass; for a backward pass see :func:`time_us`.
    """
    times = dict(_times(sizes, scheme, costs, kept and 0))
    if kept in times:  # kept states serve chunks of their own length alone
        times[kept] = sum(time_us(sizes, sizes.config(scheme, WHOLE_STATE_BLOCK_T), kept, costs, kept=kept))
    enough = min(times.values()) * (1 + WORTH_CUTTING if scheme == "whole_state" and kept is None else 1)
    return next(chunk for chunk, time in times.items() if time <= enough)


@functools.lru_cache(REMEMBERED)
def _times(sizes: Sizes, scheme: str, costs: Costs, kept: int | None) -> dict[int, float]:
    """Return the time of a pass by chunk length."""
    config = sizes.config(scheme, WHOLE_STATE_BLOCK_T)  # longer chunks have the same
    return {chunk: sum(time_us(sizes, config, chunk, costs, kept=kept)) for chunk in chunk_lengths(sizes)}


def time_us(sizes: Sizes, config: EngineConfig, chunk: int, costs: Costs = COSTS, *, kept: int | None = None) -> Times:
    """Return the time of a pass, but for the gates.

    Args:
        config: of Hopper, in half precision.
        kept: None for a forward pass; for a backward pass see :func:`.plan.backward`.
    """
    launched = forward(sizes, config, chunk) if kept is None else backward(sizes, config, chunk, kept=kept)
    walks = states = product = 0.0
    for name, launch in launched.launches.items():
        if isinstance(launch, ProductPasses):
            # dk takes as long as dq, the product before it.
            product = product if name == "dk" else _product_us(sizes, launched, launch, costs)
            walks += product
        elif isinstance(launch, StatesPass):
            states += _states_us(sizes, launched, launch, costs, with_n=sizes.normalised and kept is None)
    if sizes.normalised and kept is None:
        blocks = cdiv(sizes.head_dim_qk, 128)
        columns = 2 * sizes.head_dim_qk / blocks
        walks += _programs_us(sizes, launched.walks(blocks), RESIDENT, costs.normaliser, columns, costs)
    return Times(walks, states)


def _product_us(sizes: Sizes, launched: Pass, product: ProductPasses, costs: Costs) -> float:
    dim_x, dim_z, sums = product.dim_x, product.dim_z, product.role.transposed
    # For each launch: columns of X, blocks of output columns, programs per multiprocessor, time of a position.
    launches = [(dim_x, product.launches[0].blocks, RESIDENT, costs.walk * len(product.launches))]
    if launched.whole_state:
        launches = [(x.dim_x, x.blocks, x.tile.resident, costs.position_us(x.tile)) for x in product.launches]
    total = 0.0
    for n, (columns_x, blocks, resident, position) in enumerate(launches):
        # Z and the output, the partial result of the launch before and, for row sums, the pair (roles.py).
        tensors_z = 2 + (n > 0) + (sums and n == len(launches) - 1)
        columns = (2 * columns_x + tensors_z * dim_z) / blocks
        position *= costs.gradient if sums else 1.0
        total += _programs_us(sizes, launched.walks(blocks), resident, position, columns, costs)
    return total


def _states_us(sizes: Sizes, launched: Pass, states: StatesPass, costs: Costs, *, with_n: bool) -> float:
    whole_state, (blocks_k, blocks_v) = states.tile.whole_state, states.blocks
    programs, length, merge = states.heads * blocks_k * blocks_v, sizes.seq_len, 0.0
    # As select_config has it, but by the head dims themselves, where that pads them.
    if whole_state or programs < MIN_PROGRAMS:
        programs, length = programs * (states.chunks - 1), launched.chunk
        merge = costs.merge * states.chunks
    position = costs.states_and_n if with_n and not whole_state else costs.states
    columns = sizes.head_dim_qk / blocks_k + sizes.head_dim_v / blocks_v
    walk = _programs_us(sizes, [(programs, length)], 2 if whole_state else 3, position, columns, costs)
    stored = states.heads * states.chunks * sizes.head_dim_qk * sizes.head_dim_v * 4 / 2**20
    return costs.launch + walk + costs.store * stored + merge


def _programs_us(
    sizes: Sizes, walks: Sequence[tuple[int, int]], resident: int, position: float, columns: float, costs: Costs
) -> float:
    """Return the time of programs, wave after wave.

    Args:
        walks: number of programs, and positions of each, of those that run one after the other.
        resident: programs that a multiprocessor runs at once.
        position: time of a position, without that of memory.
        columns: 16-bit numbers that a program reads and writes at a position.
    """
    total, slots = 0.0, resident * sizes.multiprocessors
    mebibyte = costs.memory * MEMORY_RATE / sizes.memory_rate * columns * 2 / 2**20
    for programs, length in walks:
        full, rest = divmod(programs, slots)
        waves = full * costs.overlapped(position, mebibyte * slots) if full else 0.0
        waves += costs.overlapped(position, mebibyte * rest) if rest else 0.0
        total += min(length, sizes.seq_len) * waves
    return total


def sweep_chunk(head_dim_qk: int, head_dim_v: int) -> int:
    """Return the chunk length of scheme "sweep", the same for any sequence length."""
    return min(LONGEST_SQUARE, max(WHOLE_STATE_BLOCK_T, next_power_of_two(max(head_dim_qk, head_dim_v))))


@functools.lru_cache(REMEMBERED)
def forward_chunk(sizes: Sizes, scheme: str) -> int:
    """Return the chunk length of a call that names none."""
    if scheme == "sweep":
        return sweep_chunk(sizes.head_dim_qk, sizes.head_dim_v)
    return best_chunk(sizes, scheme)


@functools.lru_cache(REMEMBERED)
def backward_chunk(sizes: Sizes, scheme: str, kept: int) -> int:
    """Return the chunk length of a backward pass after a forward pass that named none; ``kept``: see :func:`backward`.

    That may be shorter than the forward pass's: dq and dk are as wide as q, often half as wide as the output, and so
    have fewer programs.
    """
    return best_chunk(sizes, scheme, kept=kept)


def backward_after(
    launched: Pass, sizes: Sizes, scheme: str, config: EngineConfig, *, kept: int, named: bool, ends: bool = False
) -> Pass:
    """Return the backward pass after the forward pass ``launched``.

    Args:
        kept, ends: see :func:`.plan.backward`.
        named: whether the call names the chunk length; the backward pass then takes no longer chunks.
    """
    chunk = launched.chunk
    if launched.in_order:
        chosen = backward_chunk(sizes, scheme, kept)
        chunk = min(chunk, chosen) if named else chosen
    return backward(sizes, config, chunk, kept=kept, ends=ends)


def preferred_chunk(sizes: Mapping[str, int], scheme: str, *, impl: str = "") -> int:
    """Return :func:`forward_chunk` for a case's sizes (batch, seq_len, num_heads, head_dim_qk, head_dim_v).

    Args:
        impl: "normalised" where there are denominators.
    """
    return forward_chunk(sizes_of_case(sizes, normalised=impl == "normalised"), scheme)


def sizes_of_case(sizes: Mapping[str, int], *, normalised: bool = False) -> Sizes:
    """Return what a case's sizes are to a choice, on an H200."""
    return Sizes(
        seq_len=sizes["seq_len"], batch_heads=sizes["batch"] * sizes["num_heads"],
        head_dim_qk=sizes["head_dim_qk"], head_dim_v=sizes["head_dim_v"], normalised=normalised,
    )  # fmt: skip
