"""Which chunk length, and which of whole_state and fused_chunk, a call takes that names none: the fastest by a model.

A program walks a chunk and takes as long as the chunk is; as many programs as the device holds walk at once. Short
chunks make more programs. But where there are several chunks, a pass before the walk computes the state at every
chunk's start: it reads keys and values once more, writes and reads a state a chunk, and merges the chunks' states one
after the other where it computes them in parallel. So a call takes one chunk where sequences and heads fill the device,
and otherwise shortens it until the pass costs more than the walk gains:

    time = ceil(programs / room) * chunk * walk + [several chunks] (launch + walk of the pass + states + merges)

:data:`COSTS` holds what these cost, fitted to measured times by ``python -m lrbench.tests.tools.fit_choice``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..common.sizes import MIN_PROGRAMS, REMEMBERED, next_power_of_two
from .config import KEPT_STATES, WHOLE_STATE_BLOCK_T, fit_whole_state, whole_state_reason

if TYPE_CHECKING:
    from torch import Tensor

MULTIPROCESSORS = 132
"""Of an H200: of the device to choose for where none is named."""

RESIDENT_WARPS = 8
"""Of a walk on a multiprocessor: a state takes nearly all registers of a program's threads."""

LONGEST_SQUARE = 256
"""The longest chunk of scheme "sweep", which computes all tiles of a chunk's square."""


ONE_CHUNK = 512
"""Longest sequence that is always one chunk, so that no pass over the chunks is launched: launching that takes the host
longer than the device takes for the few tiles, however they are split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the model adds up, in microseconds.

    Attributes:
        walk, whole_state: of a position that a program walks, by :mod:`.fused_chunk` for each 128 rows of the state,
            and by :mod:`.whole_state` for each tile of 128 x 128 (one at least).
        normaliser: of a position that a program of the denominators' kernel (:mod:`.normaliser`) walks.
        gradient: times as long that dq and dk take, which also make the gates' gradients.
        launch: of the pass before the walk, whatever it computes.
        states, states_and_n: of a position that a program of this pass walks, without and with denominators' states.
        store: of a mebibyte of states, written and read.
        merge: of a chunk whose state is merged with the one before it, as where the pass takes chunks in parallel.
    """

    walk: float = 0.047
    whole_state: float = 0.026
    normaliser: float = 0.03
    gradient: float = 1.6
    launch: float = 10.0
    states: float = 0.016
    states_and_n: float = 0.045
    store: float = 1.5
    merge: float = 4.0


COSTS = Costs()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a choice depends on: T, batch * heads, K, V, whether there are denominators, and the multiprocessors."""

    seq_len: int
    rows: int
    head_dim_qk: int
    head_dim_v: int
    normalised: bool = False
    multiprocessors: int = MULTIPROCESSORS

    def chunks(self) -> list[int]:
        """Return the chunk lengths to choose from: powers of two up to the one that holds the sequence."""
        longest = max(WHOLE_STATE_BLOCK_T, next_power_of_two(self.seq_len))
        if self.seq_len <= ONE_CHUNK:
            return [longest]
        return [1 << n for n in range(WHOLE_STATE_BLOCK_T.bit_length() - 1, longest.bit_length())]

    def forward_us(self, scheme: str, chunk: int, costs: Costs = COSTS) -> float:
        """Return the time of the forward pass's walks, and of the pass before them."""
        total = self._walk_us(scheme, chunk, self.head_dim_qk, self.head_dim_v, costs)
        total += self._states_us(chunk, costs, with_n=self.normalised)
        if self.normalised:
            programs = self.rows * -(-self.seq_len // chunk) * -(-self.head_dim_qk // 128)
            total += self._waves(programs, 4) * min(chunk, self.seq_len) * costs.normaliser
        return total

    def backward_us(self, scheme: str, chunk: int, costs: Costs = COSTS) -> float:
        """Return the time of the backward pass: dq and dk, dv, the states' gradients, and states that are not kept."""
        dq = self._walk_us(scheme, chunk, self.head_dim_v, self.head_dim_qk, costs)
        dv = self._walk_us(scheme, chunk, self.head_dim_qk, self.head_dim_v, costs)
        stored = self.head_dim_qk * self.head_dim_v * 4 * -(-self.seq_len // chunk)
        kept = KEPT_STATES * stored <= self.seq_len * (2 * self.head_dim_qk + self.head_dim_v) * 2
        return 2 * costs.gradient * dq + dv + (1 if kept else 2) * self._states_us(chunk, costs)

    def _walk_us(self, scheme: str, chunk: int, dim_x: int, dim_z: int, costs: Costs) -> float:
        """Return the time of a product with head dims DX and DZ (roles.py)."""
        programs = self.rows * -(-self.seq_len // chunk)
        if scheme == "whole_state" and whole_state_reason(dim_x, dim_z, chunk) is None:
            tile = fit_whole_state(dim_x, dim_z)
            waves = self._waves(programs * -(-dim_z // tile.block_z), 4 * tile.groups)
            position = costs.whole_state * max(1.0, tile.block_x * tile.block_z / 128**2) * -(-dim_x // tile.block_x)
        else:
            waves = self._waves(programs * -(-dim_z // 64), 4)
            position = costs.walk * -(-dim_x // 128)
        return waves * min(chunk, self.seq_len) * position

    def _waves(self, programs: int, num_warps: int) -> int:
        """Return how many times programs that walk fill the device."""
        return -(-programs // (self.multiprocessors * RESIDENT_WARPS // num_warps))

    def _states_us(self, chunk: int, costs: Costs, *, with_n: bool = False) -> float:
        """Return the time of the pass that computes the chunks' states, where there are several."""
        num_chunks = -(-self.seq_len // chunk)
        if num_chunks == 1:
            return 0.0
        programs, length, merge = self.rows * -(-self.head_dim_qk // 128) * -(-self.head_dim_v // 64), self.seq_len, 0.0
        if programs < MIN_PROGRAMS:
            # The last chunk of the pass contributes to nothing.
            programs, length, merge = programs * (num_chunks - 1), min(chunk, length), costs.merge * num_chunks
        position = costs.states_and_n if with_n else costs.states
        walk = -(-programs // (3 * self.multiprocessors)) * length * position
        stored = self.rows * num_chunks * self.head_dim_qk * self.head_dim_v * 4 / 2**20
        return costs.launch + walk + costs.store * stored + merge


def sweep_chunk(head_dim_qk: int, head_dim_v: int) -> int:
    """Return the chunk length of scheme "sweep", whatever the sequence's length."""
    return min(LONGEST_SQUARE, max(WHOLE_STATE_BLOCK_T, next_power_of_two(max(head_dim_qk, head_dim_v))))


@functools.lru_cache(REMEMBERED)
def forward_chunk(shape: Shape, scheme: str) -> int:
    """Return the chunk length that a call takes; ``scheme`` as of :func:`.config.select_config`."""
    if scheme == "sweep":
        return sweep_chunk(shape.head_dim_qk, shape.head_dim_v)
    return min(shape.chunks(), key=lambda chunk: shape.forward_us(scheme, chunk))


@functools.lru_cache(REMEMBERED)
def backward_chunk(shape: Shape, scheme: str) -> int:
    """Return the chunk length that a backward pass takes, where that of the forward pass is no shorter."""
    return min(shape.chunks(), key=lambda chunk: shape.backward_us(scheme, chunk))


@functools.lru_cache(REMEMBERED)
def faster_scheme(shape: Shape, *, training: bool) -> str:
    """Return the scheme, "whole_state" or "walk", that is faster where either runs.

    Args:
        training: forward and backward, else forward alone.
    """

    def total_us(scheme: str) -> float:
        chunk = forward_chunk(shape, scheme)
        forward = shape.forward_us(scheme, chunk)
        if not training:
            return forward
        return forward + shape.backward_us(scheme, min(chunk, backward_chunk(shape, scheme)))

    return min(("whole_state", "walk"), key=total_us)


def preferred_chunk(sizes: Mapping[str, int], *, impl: str) -> int:
    """Return :func:`forward_chunk` for a case's sizes (batch, seq_len, num_heads, head_dim_qk, head_dim_v).

    Args:
        impl: the scheme, behind "normalised " where there are denominators.
    """
    scheme = impl.removeprefix("normalised ")
    return forward_chunk(shape_of(sizes, normalised=scheme != impl), scheme)


def shape_of_tensors(q: Tensor, v: Tensor, *, normalised: bool = False) -> Shape:
    """Return the shape of a call's q [B, T, G, K] and v [B, T, H, V], on their device (a CPU counts as an H200)."""
    batch, seq_len, heads, head_dim_v = v.shape
    # Only a call has torch.
    from ..common.device import multiprocessors

    return Shape(
        seq_len=seq_len, rows=batch * heads, head_dim_qk=q.shape[3], head_dim_v=head_dim_v, normalised=normalised,
        multiprocessors=multiprocessors(v.device) if v.is_cuda else MULTIPROCESSORS,
    )  # fmt: skip


def shape_of(sizes: Mapping[str, int], *, normalised: bool = False) -> Shape:
    """Return the shape of a case's sizes."""
    return Shape(
        seq_len=sizes["seq_len"],
        rows=sizes["batch"] * sizes["num_heads"],
        head_dim_qk=sizes["head_dim_qk"],
        head_dim_v=sizes["head_dim_v"],
        normalised=normalised,
    )
