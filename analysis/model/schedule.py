"""The launches of an implementation in the order they run, as data: grid, serial steps, work and traffic of each.

``fused_chunk`` in a 16-bit dtype walks its chunks (:mod:`.counts.executed`); it is the only implementation whose
launches are written down here. FLOPs and bytes are the executed counts, so a launch adds to them only what decides how
they are spread over the device: how many programs there are, and how many steps each takes one after the other. A pass
is

    forward:  gates - states of the chunks (- their merge) (- mLSTMexp's denominators) - walk for h
    backward: states unless kept (- merge) - walk for dq - state gradients (- merge) - walks for dk and dv - gate
              gradients

where one chunk has no states, few programs split the states pass into chunks that are merged, and a walk over a long
contraction is one launch for each block of it. Tiles are those of compute capability 9.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...kernels.scalar_decay.config import MERGE_BLOCK_E, SCAN_BLOCK_N
from ..counts import formulation_of
from ..counts.executed import BACKWARD_ROLES, FORWARD_ROLES, Executed, Role, Run, blocks_of, executed, run_of
from ..counts.problem import PASSES, case_problem

RESIDENT: Mapping[str, int] = {
    "gates": 32, "walk": 2, "normaliser": 2, "states": 3, "merge": 10, "scan": 10, "stabiliser": 12,
    "denominators": 12, "gate gradients": 8,
}  # fmt: skip
"""Kind of launch -> programs that a multiprocessor holds at once: what registers and shared memory leave room for at
compute capability 9.0, head dims 128 and 256. At other head dims and for mLSTMexp a states pass has two to four."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel launch.

    Attributes:
        kind: what is launched, a key of :data:`RESIDENT`.
        programs: the grid.
        steps: what each program does one after the other: tiles, or chunks to merge.
        flops: on tensor cores, all programs.
        state_bytes: states between chunks stored or loaded.
        merge_bytes: states stored and loaded to merge them.
    """

    kind: str
    programs: int
    steps: int = 1
    flops: float = 0.0
    state_bytes: float = 0.0
    merge_bytes: float = 0.0


def launches_of(
    op: str, impl: str, mode: str, dtype: str, state_dtype: str | None, sizes: Mapping[str, int]
) -> tuple[Launch, ...] | None:
    """Return the launches of a case, or None for an implementation, mode or dtype whose launches are not known here.

    Args:
        sizes: the case's size columns, as :func:`.counts.count_case` takes them.
    """
    if sizes.get("chunk_size") is None or formulation_of(op, impl, mode, dtype) != "walk":
        return None
    run = run_of(case_problem(op, impl, mode, dtype, state_dtype, sizes))
    return None if run is None else tuple(launch for direction in PASSES[mode] for launch in _pass(run, direction))


def _pass(run: Run, direction: str) -> Iterator[Launch]:
    counted = executed(run, direction)
    has_states = run.keeps_states
    run = run.of_pass(direction)
    tile = run.block_t
    if direction == "forward":
        tiles = -(-run.seq_len // tile)
        yield Launch(kind="gates", programs=tiles * run.rows)
        if run.stabilised:
            yield Launch(kind="scan", programs=run.rows, steps=-(-tiles // SCAN_BLOCK_N))
            yield Launch(kind="stabiliser", programs=-(-run.seq_len // SCAN_BLOCK_N) * run.rows)
        yield from _states(run, counted, "state pass")
        if run.stabilised:
            yield from _normaliser(run, counted)
        for role in FORWARD_ROLES:
            yield from _walk(run, counted, role)
        return
    if not has_states:
        yield from _states(run, counted, "state pass")
    for role in BACKWARD_ROLES:
        # The first role that takes the states' gradients.
        if role.name == "dk":
            yield from _states(run, counted, "state_gradient pass")
        yield from _walk(run, counted, role)
    yield Launch(kind="gate gradients", programs=-(-run.seq_len // run.anchor_every) * run.rows)


def _states(run: Run, counted: Executed, name: str) -> Iterator[Launch]:
    if not run.several:
        return
    states = run.config.states
    yield Launch(
        kind="states",
        programs=run.rows * math.prod(run.states_tiles) * (run.contributing_chunks if states.parallel else 1),
        steps=-(-(run.chunk_size if states.parallel else run.seq_len) // states.block_t),
        flops=_flops(counted, name),
        state_bytes=counted.bytes[f"{name}: store"],
    )
    if states.parallel:
        yield Launch(
            kind="merge",
            programs=-(-run.head_dim_qk * run.head_dim_v // MERGE_BLOCK_E) * run.rows,
            steps=run.chunks,
            merge_bytes=counted.bytes[f"{name}: merge"],
        )


def _normaliser(run: Run, counted: Executed) -> Iterator[Launch]:
    blocks = -(-run.head_dim_qk // run.config.normaliser.block_k)
    yield Launch(
        kind="normaliser",
        programs=blocks * run.chunks * run.rows,
        steps=_tiles_of_a_chunk(run),
        flops=_flops(counted, "normaliser pass"),
    )
    yield Launch(kind="denominators", programs=-(-run.rows * run.seq_len // SCAN_BLOCK_N))


def _walk(run: Run, counted: Executed, role: Role) -> Iterator[Launch]:
    *_, blocks, columns = blocks_of(run, role)
    for _ in range(blocks):
        yield Launch(
            kind="walk",
            programs=columns * run.chunks * run.rows,
            steps=_tiles_of_a_chunk(run),
            flops=_flops(counted, role.name) / blocks,
            state_bytes=counted.bytes[f"{role.name}: states"] / blocks,
        )


def _tiles_of_a_chunk(run: Run) -> int:
    return -(-min(run.chunk_size, run.seq_len) // run.block_t)


def _flops(counted: Executed, name: str) -> float:
    """Return the FLOPs of all products of a role or a pass."""
    return sum(value for part, value in counted.flops.items() if part.startswith(f"{name}: "))
