"""What the engine's Triton kernels run and move, recomputation and padding included: what hardware counters see.

The other modules count an operation. This one counts the launches of the schemes of the scalar-decay engine in 16-bit
dtypes (float32 products do not use tensor cores): ``walk`` and ``whole_state``, both called a walk here, take a chunk
tile by tile with the state in registers, and ``sweep`` every row tile against all tiles of its chunk on one side of the
diagonal. X, Y, Z and S are those of kernels/scalar_decay/roles.py and fused_chunk.py. For a tile of BLOCK_Z columns of
the output a program computes X S, X Y^T and (.) Z, and in a walk Y^T Z as well. Beyond the counted work,

- X Y^T is computed again for every further block of columns, and by every further role that needs it;
- a walk takes one launch for each block of the contraction: each multiplies its partial scores with Z and passes a
  partial result to the next; and every role computes its state anew;
- several chunks need a pass for their states first, and mLSTMexp, in a walk, one for its denominators.

Parts named ``recomputed_...`` hold these repeats; ``padding`` is what tiles compute beyond the head dims and the
sequence. The other parts add up to the counted matrix work, except that a sweep of a single chunk needs no states. Tile
sizes are those that the kernels' configurations select on compute capability 9.0. A block's warps may repeat products
of fewer than 64 rows or columns, in chunks or head dims below 64; that is not counted.

The Lightning kernels are the two schemes at their simplest, a launch for each of the four roles: ``lightning2`` walks
the whole sequence, ``lightning1`` sweeps it, both as one chunk and over whole contractions. A head's decays follow from
its slope on the chip, so there are no gate vectors, no states pass and no row sums: X, Y and Z are loaded and the
output is stored. With BT rows, BZ columns of the output and, sweeping, BS columns of a score tile,

    lightning2  2 (2 BT DX BZ + BT^2 (DX + BZ)) for each of ceil(T / BT) ceil(DZ / BZ) tiles; every column block but
                one reads X and Y again
    lightning1  2 BT BS (DX + BZ) for each of ceil(DZ / BZ) column blocks and every score tile on one side of the
                diagonal or on it; every row tile reads the rows of Y and Z that it meets

In :mod:`.executed_mlp` are the gated MLP's kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...kernels import get_operation
from ...kernels.lightning.config import MAX_HEAD_DIM
from ...kernels.scalar_decay.choice import Sizes, backward_chunk
from ...kernels.scalar_decay.config import anchor_every, fit_chunk, padded, select_config
from .model import Problem
from .scalar_decay import GATE_MODELS, WALKS

MIN_CHUNK = 16
"""Smallest tile of a product, and so the smallest chunk: kernels run powers of two from here."""

VECTOR_COLUMNS = 8
"""Columns of a product with a vector, the fewest that the tensor cores take."""

FP32_BYTES = 4
"""Bytes of a row sum, a stabiliser and a part of a denominator."""

CAPABILITY = (9, 0)
"""Compute capability whose launches are counted."""


def sweep_tile(width: int) -> int:
    """Return the rows and columns of the squares that a sweep computes on the diagonal, for inputs of so many bytes."""
    sizes = {"head_dim_qk": MAX_HEAD_DIM, "head_dim_v": MAX_HEAD_DIM, "chunk": 1024, "batch_heads": 1}
    return int(select_config(scheme="sweep", capability=CAPABILITY, item_bytes=width, **sizes).output.block_t)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun(Problem):
    """A problem as the engine or a Lightning kernel runs it.

    Attributes:
        chunk_size: chunk length in force; of a Lightning kernel the whole sequence, padded.
        whole: of several chunks, how many of the rows (batch x heads) are not cut into them; 0 where each is one chunk.
        config: the kernels' own launches.
    """

    whole: int
    config: Any

    @property
    def walks(self) -> bool:
        """Whether chunks are walked, not swept."""
        return self.formulation in (*WALKS, "lightning2")

    @property
    def several(self) -> bool:
        """Whether any head has more than one chunk, so that states leave the chip."""
        return self.chunk_size < self.seq_len and self.whole < self.rows

    @property
    def cut(self) -> float:
        """Share of the heads that are cut into chunks."""
        return 1 if self.whole == 0 else 1 - self.whole / self.rows

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.seq_len // self.chunk_size)

    @property
    def contributing_chunks(self) -> int:
        """Number of chunks that a states pass takes: taken by themselves, not the last one, which no state needs."""
        return self.chunks - self.config.states.parallel

    @property
    def keeps_states(self) -> bool:
        """Whether the backward pass has the forward pass's states: they fit its chunks and take little memory."""
        same_chunks = self.formulation in WALKS and self.of_pass("backward") is self
        return same_chunks and _kept_chunk(self, self.chunk_size) > 0

    @property
    def vector_bytes(self) -> int:
        """Bytes of an element of b, u and w: float64 where differences over a whole chunk are taken; 0 of none."""
        if self.op == "lightning" and self.formulation.startswith("lightning"):
            return 0
        return 4 if self.walks else 8

    @property
    def block_t(self) -> int:
        """Rows of a tile."""
        return int(self.config.output.block_t)

    @property
    def makes_denominators(self) -> bool:
        """Whether the kernel of the output makes the denominators itself: no other launch reads q and k for them."""
        return self.stabilised and (not self.walks or self.config.normaliser is None)

    @property
    def anchor_every(self) -> int:
        """Positions between the states that a walk keeps for the gradient of the decay."""
        return anchor_every(self.formulation, self.chunk_size, sums_decay=self.op == "mamba2_ssd")

    @property
    def states_tiles(self) -> tuple[int, int]:
        """Blocks of K and of V that the programs of a states pass take."""
        return -(-self.head_dim_qk // self.config.states.block_x), -(-self.head_dim_v // self.config.states.block_z)

    def of_pass(self, direction: str) -> EngineRun:
        """Return the problem as one pass takes it: a walk's backward pass may split chunks further."""
        if direction != "backward" or self.formulation not in WALKS:
            return self
        chunk_size, whole = as_cut(self, direction, self.chunk_size)
        same = (chunk_size, whole) == (self.chunk_size, self.whole)
        return self if same else dataclasses.replace(self, chunk_size=chunk_size, whole=whole)


def shape(problem: Problem) -> Sizes:
    """Return the sizes by which the engine chooses its chunks on an H200; a device whose memory is faster or slower, or
    which has more or fewer multiprocessors, may get others."""
    dims = {"head_dim_qk": problem.head_dim_qk, "head_dim_v": problem.head_dim_v}
    return Sizes(seq_len=problem.seq_len, batch_heads=problem.rows, **dims, normalised=problem.stabilised)


def as_cut(problem: Problem, direction: str, chunk: int) -> tuple[int, int]:
    """Return a pass's chunk length and, of several chunks, how many heads are not cut; 0 if one holds the sequence."""
    sizes, formulation, backward = shape(problem), problem.formulation, direction == "backward"
    if backward:
        chunk = min(chunk, backward_chunk(sizes, formulation, _kept_chunk(problem, chunk)))
    return chunk, sizes.whole_heads(formulation, chunk, backward=backward) if chunk < sizes.seq_len else 0


def _kept_chunk(problem: Problem, chunk: int) -> int:
    shared = {"qk_share": problem.qk_share, "state_bytes": problem.widths.state}
    return shape(problem).kept_chunk(problem.formulation, chunk, **shared)


def run_of(problem: Problem) -> EngineRun | None:
    """Return a problem as the engine or the Lightning kernels run it, None where they do not take its sizes."""
    dims = {"head_dim_qk": problem.head_dim_qk, "head_dim_v": problem.head_dim_v}
    config: Any
    if problem.formulation.startswith("lightning"):
        if max(dims.values()) > MAX_HEAD_DIM:
            return None
        sizes = {**dims, "batch": problem.batch, "num_heads": problem.num_heads}
        declared = get_operation("lightning").implementation(problem.formulation)
        config = declared.launches("fwbw", problem.dtype, sizes, CAPABILITY)
        chunk = max(padded(problem.seq_len), config.output.block_t)
    else:
        chunk = problem.chunk_size
        if chunk < MIN_CHUNK or chunk & (chunk - 1):
            return None
        chunk = fit_chunk(chunk, problem.seq_len)
        launched = {"scheme": problem.formulation, "chunk": chunk, "batch_heads": problem.rows}
        config = select_config(**launched, **dims, capability=CAPABILITY, item_bytes=2)
    whole = as_cut(problem, "forward", chunk)[1]
    same = {field.name: getattr(problem, field.name) for field in dataclasses.fields(Problem)}
    return EngineRun(**{**same, "chunk_size": chunk}, whole=whole, config=config)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedRole:
    """One use of the common form: which of its tensors are q or k, and what its products are called.

    Attributes:
        x_is_qk: whether X and Y are as wide as q and k (Z is then as wide as v), or the other way round.
        future: whether rows sum over later positions.
        scores, state: names of X Y^T and of the state the role carries.
    """

    name: str
    x_is_qk: bool
    future: bool
    scores: str
    state: str

    @property
    def gate_sums(self) -> bool:
        """Whether rows are summed, against one more tensor like Z, for gates that have gradients: of dq and dk."""
        return not self.x_is_qk


FORWARD_ROLES = (CountedRole(name="h", x_is_qk=True, future=False, scores="scores", state="state"),)
BACKWARD_ROLES = (
    CountedRole(name="dq", x_is_qk=False, future=False, scores="score_gradient", state="recomputed_state"),
    CountedRole(name="dk", x_is_qk=False, future=True, scores="recomputed_score_gradient", state="state_gradient"),
    CountedRole(name="dv", x_is_qk=True, future=True, scores="recomputed_scores", state="recomputed_state_gradient"),
)


@dataclass(frozen=True, slots=True)
class Executed:
    """FLOPs on tensor cores by product, bytes of device memory by use, and bytes read again by other programs.

    ``rereads`` are loads of what another program of the same launch loads as well; a cache is expected to serve them.
    ``library`` is the share of ``flops`` that a library's kernels do, whose tiles and rereads nobody here knows.
    """

    flops: Counter[str]
    bytes: Counter[str]
    rereads: Counter[str]
    library: Counter[str] = field(default_factory=Counter)


@functools.lru_cache(maxsize=4096)
def executed(run: EngineRun, direction: str) -> Executed:
    """Return what one pass runs and moves, all heads and sequences: ``direction`` is forward or backward.

    Cached, since a problem's count and its launches ask for the same: do not change the result.
    """
    total = Executed(Counter(), Counter(), Counter())
    backward = direction == "backward"
    has_states = backward and run.keeps_states
    run = run.of_pass(direction)
    if not backward:
        _gates(run, total)
    if run.several:
        if not has_states:
            _states(run, total, "state", recomputed=run.walks or backward, normaliser=run.stabilised and not backward)
        if backward:
            _states(run, total, "state_gradient", recomputed=run.walks)
    if run.stabilised and not backward and not run.makes_denominators:
        _normaliser(run, total)
    for role in BACKWARD_ROLES if backward else FORWARD_ROLES:
        blocks = blocks_of(run, role)
        (_walk if run.walks else _sweep)(run, role, blocks, total)
        _role_traffic(run, role, blocks, total)
    if backward and GATE_MODELS[run.op].gates:
        _gates_backward(run, total)
    parts = (total.flops, total.bytes, total.rereads)
    return Executed(*(Counter({name: run.rows * value for name, value in part.items()}) for part in parts))


def _launch_of(run: EngineRun, role: CountedRole) -> Any:
    return getattr(run.config, "output" if role.name == "h" else role.name)


class Blocks(NamedTuple):
    """How a role's launches divide its head dims: DX into ``launches`` blocks of X, DZ into ``columns`` of Z.

    Where a launch takes the whole contraction, ``launches`` are the steps that it takes it in.
    """

    dx: int
    dz: int
    block_x: int
    block_z: int
    launches: int
    columns: int


def _row_sums(run: EngineRun, role: CountedRole, blocks: Blocks) -> int:
    """Return how many sums a row has: in a sweep one a program."""
    return int(_launch_of(run, role).row_sums(blocks.dz)) if run.walks else blocks.columns


def blocks_of(run: EngineRun, role: CountedRole) -> Blocks:
    """Return the blocks of a role's launches."""
    dx, dz = (run.head_dim_qk, run.head_dim_v) if role.x_is_qk else (run.head_dim_v, run.head_dim_qk)
    launch = _launch_of(run, role)
    # A Lightning kernel takes the whole contraction at once.
    block_x = min(getattr(launch, "block_x", MAX_HEAD_DIM), padded(dx))
    block_z = min(launch.block_z, padded(dz))
    return Blocks(dx, dz, block_x, block_z, -(-dx // block_x), -(-dz // block_z))


def _again(name: str) -> str:
    return name if name.startswith("recomputed_") else f"recomputed_{name}"


class Launch(NamedTuple):
    """A launch of a walk.

    Attributes:
        dim_x: columns of X and Y that it takes.
        block_x: the same, padded to its tile.
        columns: blocks of the output's columns, each of which is a program.
        multiplied: columns of the output that these blocks compute, those beyond DZ included.
    """

    dim_x: int
    block_x: int
    columns: int
    multiplied: int


def _launches(run: EngineRun, role: CountedRole, blocks: Blocks) -> list[Launch]:
    dx, dz, block_x, block_z, _, columns = blocks
    if run.formulation not in WALKS:
        return [Launch(dx, block_x, columns, columns * block_z)]
    return [
        Launch(min(tile.block_x, dx - first), tile.block_x, -(-dz // tile.block_z), tile.multiplied_columns(dz))
        for first, tile in _launch_of(run, role).launches(dx)
    ]


def _anchor_size(run: EngineRun, role: CountedRole, blocks: Blocks) -> int:
    """Return the numbers of a state that is kept at an anchor, padded as its tiles are."""
    kept = int(_launch_of(run, role).anchor_columns(blocks.dz))
    return kept * sum(part.block_x for part in _launches(run, role, blocks))


def _walk(run: EngineRun, role: CountedRole, blocks: Blocks, total: Executed) -> None:
    """Add a walk's products.

    Per tile, launch and column block, at padded sizes, 2 (2 BT BX BZ + BT^2 BX + BT^2 BZ), less what a program that
    holds whole states leaves out of its last columns, and for mLSTMexp's denominators two products with a vector, of
    eight columns each. Of a whole role, a tile of t rows needs 4 t DX DZ + 2 t^2 (DX + DZ).
    """
    dx, dz, block_x, _, launches, columns = blocks
    block_t = run.block_t
    tiles, squares = _walk_tiles(run)
    rank, scores, outputs = 2 * run.seq_len * dx * dz, 2 * squares * dx, 2 * squares * dz
    parts = _launches(run, role, blocks)
    again = sum((part.columns - 1) * 2 * squares * part.dim_x for part in parts)
    needed = _role_products(role, rank, scores, outputs, again)
    needed["recomputed_intra"] = (launches - 1) * outputs
    needed[role.state] += rank
    per_tile = sum(2 * block_t * (2 * x * multiplied + block_t * (n * x + multiplied)) for _, x, n, multiplied in parts)
    if role.name == "h" and run.makes_denominators:
        per_tile += columns * 4 * VECTOR_COLUMNS * block_t * block_x
    needed["padding"] = tiles * per_tile - needed.total()
    add(total.flops, role.name, needed)


def _role_products(role: CountedRole, inter: int, scores: int, intra: int, again: int) -> Counter[str]:
    """Return FLOPs of X S, X Y^T and (.) Z; every column block but one makes X Y^T again, in all ``again`` FLOPs."""
    needed = Counter({"inter": inter, role.scores: scores})
    needed[_again(role.scores)] += again
    needed["intra"] = intra
    return needed


def _walk_tiles(run: EngineRun) -> tuple[int, int]:
    """Return how many tiles a walk takes and the sum of the squares of their lengths."""
    tiles = squares = 0
    for length, times in run.pieces(run.chunk_size):
        whole, rest = divmod(length, run.block_t)
        tiles += times * (whole + bool(rest))
        squares += times * (whole * run.block_t**2 + rest**2)
    return tiles, squares


def _normaliser(run: EngineRun, total: Executed) -> None:
    """Add the walk over q and k that makes mLSTMexp's denominators: X Y^T once more, in blocks of the contraction.

    q, k, b, u, w, m and n loaded; a part of n^T q stored for each block; parts and m loaded, the denominators stored.
    """
    block_k = run.config.normaliser.block_k
    blocks = -(-run.head_dim_qk // block_k)
    tiles, squares = _walk_tiles(run)
    scores = 2 * squares * run.head_dim_qk
    padding = 2 * tiles * blocks * run.block_t**2 * block_k - scores
    add(total.flops, "normaliser pass", {"recomputed_scores": scores, "padding": padding})
    vectors, parts = run.seq_len * 4 * FP32_BYTES, blocks * run.seq_len * FP32_BYTES
    moved = {
        "load": 2 * run.qk_share * run.seq_len * run.head_dim_qk * run.widths.qkv + vectors,
        "states": run.chunks * run.head_dim_qk * FP32_BYTES * run.several,
        "parts": 2 * parts,
        "denominators": 2 * run.seq_len * FP32_BYTES,
    }
    add(total.bytes, "normaliser pass", moved)
    shared = 2 * (1 - run.qk_share) * run.seq_len * run.head_dim_qk * run.widths.qkv
    add(total.rereads, "normaliser pass", {"load": shared + (blocks - 1) * vectors})


def _sweep(run: EngineRun, role: CountedRole, blocks: Blocks, total: Executed) -> None:
    """Add a sweep's products: per row tile and column block X S, where there are states; per column tile X Y^T, (.) Z.

    Past roles take the columns of earlier row tiles and of their own, future roles theirs and those of later ones, both
    in steps of BLOCK_S.
    """
    dx, dz, block_x, block_z, contractions, columns = blocks
    tiles = list(_row_tiles(run, role))
    entries = sum(rows * positions for _, rows, positions, _ in tiles)
    rank = 2 * run.seq_len * dx * dz if run.several else 0
    scores = 2 * entries * dx
    needed = _role_products(role, rank, scores, 2 * entries * dz, (columns - 1) * scores)
    per_row_tile = 2 * run.block_t * block_x * contractions * block_z if run.several else 0
    per_column_tile = 2 * run.block_t * run.config.output.block_s * (block_x * contractions + block_z)
    padded = columns * sum(number * per_row_tile + met * per_column_tile for number, _, _, met in tiles)
    needed["padding"] = padded - needed.total()
    add(total.flops, role.name, needed)


def _row_tiles(run: EngineRun, role: CountedRole) -> Iterator[tuple[int, int, int, int]]:
    """Yield of all full row tiles, and then of those at the chunks' ends that have fewer rows: how many there are, the
    rows of one, and how many positions and column tiles all of them meet. BLOCK_S divides BLOCK_T."""
    block_t, block_s = run.block_t, run.config.output.block_s
    for length, times in run.pieces(run.chunk_size):
        full, rest = divmod(length, block_t)
        columns, rest_columns = block_t // block_s, -(-rest // block_s)
        met = times * full * (full + 1) // 2
        # The last tile is met by full ones in future roles, and meets them in past ones.
        by_full, of_full = (times * full, 0) if role.future else (0, times * full)
        yield times * full, block_t, met * block_t + by_full * rest, met * columns + by_full * rest_columns
        if rest:
            yield times, rest, of_full * block_t + times * rest, of_full * columns + times * rest_columns


def _states(run: EngineRun, total: Executed, name: str, *, recomputed: bool, normaliser: bool = False) -> None:
    """Add the pass that makes the states between the chunks of heads that are cut, or their gradients: Y^T Z by tiles.

    k and v (gradients: q and dh) are loaded and a state is stored per chunk. Chunks taken by themselves, of which the
    last one of the pass is left out, are merged in place. Sweeping, the gradients' pass also loads the states, for the
    gradient of the decay.
    """
    states, gradient = run.config.states, name == "state_gradient"
    columns_k, columns_v = run.states_tiles
    left_out = 0
    if states.parallel:
        left_out = run.chunk_size if gradient else run.seq_len - (run.chunks - 1) * run.chunk_size
    length = run.seq_len - left_out
    needed = Counter({_again(name) if recomputed else name: 2 * length * run.head_dim_qk * run.head_dim_v})
    tile = 2 * states.block_t * states.block_x * states.block_z
    padded = -(-length // states.block_t) * columns_k * columns_v * tile
    needed["padding"] = padded - needed.total()
    add(total.flops, f"{name} pass", needed, run.cut)

    kept = run.chunks * run.head_dim_qk * run.head_dim_v * run.widths.state
    weights = length * (_query_bytes(run) if gradient else run.vector_bytes)
    keys, values = length * run.head_dim_qk * run.widths.qkv, length * run.head_dim_v * run.widths.qkv
    state_bytes = run.head_dim_qk * (run.head_dim_v * run.widths.state + FP32_BYTES * normaliser)
    moved = {
        "load": run.qk_share * keys + values + weights,
        "store": run.contributing_chunks * state_bytes,
        "merge": (run.contributing_chunks + run.chunks) * state_bytes * states.parallel,
        "decay gradient": kept if gradient and not run.walks and GATE_MODELS[run.op].gates else 0,
    }
    add(total.bytes, f"{name} pass", moved, run.cut)
    issued = columns_v * keys + columns_k * values + columns_k * columns_v * weights
    add(total.rereads, f"{name} pass", {"load": issued - moved["load"]}, run.cut)


def _role_traffic(run: EngineRun, role: CountedRole, blocks: Blocks, total: Executed) -> None:
    """Add what a role's launches load and store.

    X, Y and the output once in all; Z and the gate vectors once a launch; between launches a partial result, stored and
    loaded; states once a chunk. For the gates' gradients one more tensor like Z, row sums for each column block and,
    walking, states at anchors in between (stored by dq, loaded by dk). Every further load of the same data is a reread.
    """
    dx, dz = blocks.dx, blocks.dz
    launches = blocks.launches if run.walks else 1
    share_x, share_z = (run.qk_share, 1.0) if role.x_is_qk else (1.0, run.qk_share)
    x, z = run.seq_len * dx * run.widths.qkv, run.seq_len * dz * run.widths.qkv
    normalises = run.makes_denominators and role.name == "h"
    partial = _launch_of(run, role).partial_bytes(dx, bf16=run.dtype == "bf16") if launches > 1 else 0
    sums, anchors = role.gate_sums and bool(GATE_MODELS[run.op].gates), -(-run.seq_len // run.anchor_every)
    pair = z if sums else 0
    moved = {
        "load": 2 * share_x * x + share_z * (launches * z + pair) + launches * run.seq_len * _gate_bytes(run, role),
        "store": z + (run.seq_len * run.vector_bytes if normalises else 0),
        "partial results": 2 * (launches - 1) * run.seq_len * dz * partial,
        "states": run.chunks * dx * (dz * run.widths.state + (FP32_BYTES if normalises else 0)) * run.several * run.cut,
        "row sums": _row_sums(run, role, blocks) * run.seq_len * FP32_BYTES if sums else 0,
        "anchors": anchors * _anchor_size(run, role, blocks) * run.widths.qkv if run.walks and sums else 0,
        "sum over heads": (1 + run.qk_share) * z * (run.qk_share < 1 and role.gate_sums),
    }
    add(total.bytes, role.name, moved)
    add(total.rereads, role.name, {"load": _issued(run, role, blocks) + pair - moved["load"]})


def _issued(run: EngineRun, role: CountedRole, blocks: Blocks) -> float:
    """Return the bytes of X, Y, Z and gate vectors that the programs of a role load, whoever serves them.

    Walking, every column block loads X, Y and the gates of every launch. Sweeping, every row tile loads the columns of
    Y and Z that it meets, and a contraction of several blocks loads X anew for every product.
    """
    dx, dz, block_x, _, contractions, columns = blocks
    width, x = run.widths.qkv, run.seq_len * dx
    if run.walks:
        parts = _launches(run, role, blocks)
        tensors = sum(2 * part.columns * part.dim_x + dz for part in parts)
        return run.seq_len * (tensors * width + sum(part.columns for part in parts) * _gate_bytes(run, role))
    tiles = list(_row_tiles(run, role))
    loads = sum(rows * met for _, rows, _, met in tiles)
    loaded = sum(positions for _, _, positions, _ in tiles)
    products = run.seq_len * block_x + x * run.several + loads * dx
    tensors = columns * (x if contractions == 1 else products) + loaded * (columns * dx + dz)
    row, column = _query_bytes(run, role), _key_bytes(run)
    if role.future:
        row, column = column, row
    return tensors * width + columns * (run.seq_len * row + loaded * column)


def _query_bytes(run: EngineRun, role: CountedRole | None = None) -> int:
    """Bytes a position of b and, stabilised, of m and the log of the denominator where that is not made there."""
    if not run.stabilised:
        return run.vector_bytes
    makes = role is not None and role.name == "h" and run.makes_denominators
    return run.vector_bytes + FP32_BYTES + (0 if makes else run.vector_bytes)


def _key_bytes(run: EngineRun) -> int:
    """Bytes a position of b and u."""
    return run.vector_bytes * (1 + GATE_MODELS[run.op].has_input)


def _gate_bytes(run: EngineRun, role: CountedRole) -> int:
    """Bytes a position of every gate vector that a role loads; only a walk needs w."""
    return _query_bytes(run, role) + _key_bytes(run) - run.vector_bytes * (0 if run.walks else 1)


def _gates(run: EngineRun, total: Executed) -> None:
    """Add the gate kernels: gates loaded, b, w, u stored; stabilised, m stored and merged with what comes in."""
    gates = GATE_MODELS[run.op].gates * run.seq_len * run.widths.gate
    vectors = run.seq_len * (run.vector_bytes + _key_bytes(run))
    stabiliser = run.seq_len * (run.vector_bytes + 3 * FP32_BYTES) if run.stabilised else 0
    add(total.bytes, "gates", {"load": gates, "store": vectors, "stabiliser": stabiliser})


def _gates_backward(run: EngineRun, total: Executed) -> None:
    """Add the gates' gradients: row sums and gates loaded, but for an exponential input gate, and gradients stored."""
    gates = GATE_MODELS[run.op].gates
    sums = sum(_row_sums(run, role, blocks_of(run, role)) for role in BACKWARD_ROLES if role.gate_sums)
    loaded = sums * FP32_BYTES + (gates - run.stabilised) * run.widths.gate
    moved = {"load": run.seq_len * loaded, "store": run.seq_len * gates * run.widths.gate}
    add(total.bytes, "gate gradients", moved)


def add(target: Counter[str], prefix: str, parts: Mapping[str, float], share: float = 1) -> None:
    """Add a ``share`` of parts to a counter, ``prefix`` before their names; those of 0 are left out."""
    for name, value in parts.items():
        if value:
            target[f"{prefix}: {name}"] += value * share  # type: ignore[assignment]
