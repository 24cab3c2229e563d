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

Of a gated MLP, M are tokens, D ``d_model`` and F ``d_ff``. A projection makes y, or the gradients of both
pre-activations, in tiles of BLOCK_M tokens and BLOCK_F columns, for each of which it accumulates both projections from
the same tiles of x and BLOCK_F columns of each weight. So it

- multiplies 4 BLOCK_M BLOCK_F BLOCK_K for each of ceil(M / BLOCK_M) ceil(F / BLOCK_F) tiles and ceil(D / BLOCK_K) steps
- loads x ceil(F / BLOCK_F) times and both weights ceil(M / BLOCK_M) times, of which all but once is read again.

Elements loaded and stored, each tensor once a launch:

    forward     projection              all                  M D + 2 D F          M F, and 2 M F where they are saved
    backward    projection again        fused                M D + 2 D F + M F    2 M F
                activation gradient     fused_save           3 M F                2 M F
                input gradient: two     all                  2 M F + 2 D F + M D  2 M D
                  products, of which the second adds
                weight gradients        all                  2 M D + 2 M F        2 D F

The last two are products of cuBLAS. Their tiles are its own, so they are counted as they stand: without padding, and
without what its programs read again. A forward pass that needs no gradient saves nothing: it is that of ``fused``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...kernels import get_operation
from ...kernels.lightning.config import MAX_HEAD_DIM
from ...kernels.scalar_decay import plan
from ...kernels.scalar_decay.choice import backward_after
from ...kernels.scalar_decay.config import ChunkOutputsConfig, EngineConfig, FusedChunkConfig, fit_chunk, padded
from .model import Problem
from .scalar_decay import GATE_MODELS

MIN_CHUNK = 16
"""Smallest tile of a product, and so the smallest chunk: kernels run powers of two from here."""

VECTOR_COLUMNS = 8
"""Columns of a product with a vector, the fewest that the tensor cores take."""

FP32_BYTES = 4
"""Bytes of a row sum, a stabiliser and a part of a denominator."""

CAPABILITY = (9, 0)
"""Compute capability whose launches are counted."""


GATED_MLP = ("fused", "fused_save")
"""Formulations of the gated MLP whose launches are counted, called as our implementations of them."""


def sweep_tile(width: int) -> int:
    """Return the rows and columns of the squares that a sweep computes on the diagonal, for inputs of so many bytes."""
    sizes = plan.Sizes(seq_len=1024, batch_heads=1, head_dim_qk=MAX_HEAD_DIM, head_dim_v=MAX_HEAD_DIM)
    return int(sizes.config("sweep", 1024, CAPABILITY, width).output.block_t)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun(Problem):
    """A problem as a pass of the engine or of a Lightning kernel runs it; ``chunk_size`` is the one in force."""

    launched: plan.Pass

    @property
    def vector_bytes(self) -> int:
        """Bytes of an element of b, u and w: float64 where differences over a whole chunk are taken; 0 of none."""
        if self.formulation.startswith("lightning"):
            return 0
        return 4 if self.launched.in_order else 8

    def makes_denominators(self, name: str) -> bool:
        """Whether a product's kernel makes the denominators: no other launch reads q and k for them."""
        return name == "h" and self.stabilised and "normaliser" not in self.launched.launches


def engine_pass(problem: Problem, direction: str) -> plan.Pass:
    """Return what a pass of the engine launches on an H200; a device whose memory is faster or slower, or which has
    more or fewer multiprocessors, may cut chunks otherwise."""
    scheme, chunk = problem.formulation, fit_chunk(problem.chunk_size, problem.seq_len)
    sizes = _engine_sizes(problem)
    config = sizes.config(scheme, chunk)
    made = plan.forward(sizes, config, chunk)
    if direction == "forward":
        return made
    kept = plan.kept_chunk(sizes, config, chunk, qk_share=problem.qk_share, state_bytes=problem.widths.state)
    return backward_after(made, sizes, scheme, config, kept=kept, named=True)


def _engine_sizes(problem: Problem) -> plan.Sizes:
    dims = {"head_dim_qk": problem.head_dim_qk, "head_dim_v": problem.head_dim_v}
    flags = {"normalised": problem.stabilised, "sums_decay": problem.op == "mamba2_ssd"}
    return plan.Sizes(seq_len=problem.seq_len, batch_heads=problem.rows, **dims, **flags)


def _lightning_pass(problem: Problem, direction: str) -> plan.Pass:
    """Return what a pass of a Lightning kernel launches: the engine's products, over one chunk and whole contractions,
    in tiles of its own."""
    sizes = {name: getattr(problem, name) for name in ("batch", "num_heads", "head_dim_qk", "head_dim_v")}
    implementation = get_operation("lightning").implementation(problem.formulation)
    own: Any = implementation.launches("fwbw", problem.dtype, sizes, CAPABILITY)
    kind = FusedChunkConfig if problem.formulation == "lightning2" else ChunkOutputsConfig
    tiles: dict[str, Any] = {"states": None, "normaliser": None}
    for name in ("output", "dq", "dk", "dv"):
        dim_x = padded(sizes["head_dim_v" if name in ("dq", "dk") else "head_dim_qk"])
        tiles[name] = kind(**dataclasses.asdict(getattr(own, name)), block_x=dim_x)
    chunk = max(padded(problem.seq_len), own.output.block_t)
    make = plan.backward if direction == "backward" else plan.forward
    return make(_engine_sizes(problem), EngineConfig(**tiles), chunk)


def run_of(problem: Problem, direction: str) -> EngineRun | None:
    """Return a pass as the engine or the Lightning kernels run it, None where they do not take the problem's sizes."""
    lightning = problem.formulation.startswith("lightning")
    if lightning and max(problem.head_dim_qk, problem.head_dim_v) > MAX_HEAD_DIM:
        return None
    if not lightning and (problem.chunk_size < MIN_CHUNK or problem.chunk_size & (problem.chunk_size - 1)):
        return None
    launched = (_lightning_pass if lightning else engine_pass)(problem, direction)
    same = {field.name: getattr(problem, field.name) for field in dataclasses.fields(Problem)}
    return EngineRun(**{**same, "chunk_size": launched.chunk}, launched=launched)


COUNTED = {
    "h": ("scores", "state"),
    "dq": ("score_gradient", "recomputed_state"),
    "dk": ("recomputed_score_gradient", "state_gradient"),
    "dv": ("recomputed_scores", "recomputed_state_gradient"),
}
"""What the products of h, dq, dk and dv are called: X Y^T, and that which makes the state."""


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
def executed(problem: Problem, direction: str) -> Executed | None:
    """Return what one pass runs and moves, all heads and sequences: ``direction`` is forward or backward.

    None where our kernels do not take the problem's sizes. Cached, since a problem's count and its launches ask for the
    same: do not change the result.
    """
    run = run_of(problem, direction)
    if run is None:
        return None
    total = Executed(Counter(), Counter(), Counter())
    if direction == "forward":
        _gates(run, total)
    for name, launch in run.launched.launches.items():
        if isinstance(launch, plan.StatesPass):
            _states(run, launch, name, total, forward=direction == "forward")
        elif isinstance(launch, plan.NormaliserPass):
            _normaliser(run, launch, total)
        else:
            (_walk if run.launched.in_order else _sweep)(run, name, launch, total)
            _role_traffic(run, name, launch, total)
    if direction == "backward" and GATE_MODELS[run.op].gates:
        _gates_backward(run, total)
    return total


def _again(name: str) -> str:
    return name if name.startswith("recomputed_") else f"recomputed_{name}"


def _walk(run: EngineRun, name: str, product: plan.ProductPasses, total: Executed) -> None:
    """Add a walk's products.

    Per tile, launch and column block, at padded sizes, 2 (2 BT BX BZ + BT^2 BX + BT^2 BZ), less what a program that
    holds whole states leaves out of its last columns, and for mLSTMexp's denominators two products with a vector, of
    eight columns each. Of a whole role, a tile of t rows needs 4 t DX DZ + 2 t^2 (DX + DZ).
    """
    dx, dz, block_t, parts = product.dim_x, product.dim_z, product.tile.block_t, product.launches
    tiles, squares = _walk_tiles(run, block_t)
    rank, outputs = 2 * run.seq_len * dx * dz, 2 * squares * dz
    again = sum((part.blocks - 1) * 2 * squares * part.dim_x for part in parts)
    needed = _role_products(name, rank, 2 * squares * dx, outputs, again)
    needed["recomputed_intra"] = (len(parts) - 1) * outputs
    needed[COUNTED[name][1]] += rank
    per_tile = 0
    for _, _, _, x, blocks, multiplied in parts:
        per_tile += 2 * block_t * (2 * x * multiplied + block_t * (blocks * x + multiplied))
        per_tile += blocks * 4 * VECTOR_COLUMNS * block_t * x * run.makes_denominators(name)
    needed["padding"] = tiles * per_tile - needed.total()
    add(total.flops, name, needed, run.rows)


def _role_products(name: str, inter: int, scores: int, intra: int, again: int) -> Counter[str]:
    """Return FLOPs of X S, X Y^T and (.) Z; every column block but one makes X Y^T again, in all ``again`` FLOPs."""
    made = COUNTED[name][0]
    return Counter({"inter": inter, made: scores, "intra": intra}) + Counter({_again(made): again})


def _walk_tiles(run: EngineRun, block_t: int) -> tuple[int, int]:
    """Return how many tiles a walk takes and the sum of the squares of their lengths."""
    tiles = squares = 0
    for length, times in run.pieces(run.chunk_size):
        whole, rest = divmod(length, block_t)
        tiles += times * (whole + bool(rest))
        squares += times * (whole * block_t**2 + rest**2)
    return tiles, squares


def _normaliser(run: EngineRun, launch: plan.NormaliserPass, total: Executed) -> None:
    """Add the walk over q and k that makes mLSTMexp's denominators: X Y^T once more, in blocks of the contraction.

    q, k, b, u, w, m and n loaded; a part of n^T q stored for each block; parts and m loaded, the denominators stored.
    """
    tile, blocks, block_t = launch
    tiles, squares = _walk_tiles(run, block_t)
    scores = 2 * squares * run.head_dim_qk
    padding = 2 * tiles * blocks * block_t**2 * tile.block_k - scores
    add(total.flops, "normaliser pass", {"recomputed_scores": scores, "padding": padding}, run.rows)
    vectors, parts = run.seq_len * 4 * FP32_BYTES, blocks * run.seq_len * FP32_BYTES
    moved = {
        "load": 2 * run.qk_share * run.seq_len * run.head_dim_qk * run.widths.qkv + vectors,
        "states": run.launched.chunks * run.head_dim_qk * FP32_BYTES * run.launched.several,
        "parts": 2 * parts,
        "denominators": 2 * run.seq_len * FP32_BYTES,
    }
    add(total.bytes, "normaliser pass", moved, run.rows)
    shared = 2 * (1 - run.qk_share) * run.seq_len * run.head_dim_qk * run.widths.qkv
    add(total.rereads, "normaliser pass", {"load": shared + (blocks - 1) * vectors}, run.rows)


def _sweep(run: EngineRun, name: str, product: plan.ProductPasses, total: Executed) -> None:
    """Add a sweep's products: per row tile and column block X S, where there are states; per column tile X Y^T, (.) Z.

    Past roles take the columns of earlier row tiles and of their own, future roles theirs and those of later ones, both
    in steps of BLOCK_S.
    """
    dx, dz, tile = product.dim_x, product.dim_z, product.tile
    ((_, _, _, block_x, blocks, multiplied),) = product.launches
    tiles = list(_row_tiles(run, product))
    entries = sum(rows * positions for _, rows, positions, _ in tiles)
    rank = 2 * run.seq_len * dx * dz * run.launched.several
    scores = 2 * entries * dx
    needed = _role_products(name, rank, scores, 2 * entries * dz, (blocks - 1) * scores)
    per_row_tile = 2 * tile.block_t * block_x * multiplied * run.launched.several
    per_column_tile = 2 * tile.block_t * tile.block_s * (blocks * block_x + multiplied)
    multiplied = sum(number * per_row_tile + met * per_column_tile for number, _, _, met in tiles)
    needed["padding"] = multiplied - needed.total()
    add(total.flops, name, needed, run.rows)


def _row_tiles(run: EngineRun, product: plan.ProductPasses) -> Iterator[tuple[int, int, int, int]]:
    """Yield of all full row tiles, and then of those at the chunks' ends that have fewer rows: how many there are, the
    rows of one, and how many positions and column tiles all of them meet. BLOCK_S divides BLOCK_T."""
    block_t, block_s = product.tile.block_t, product.tile.block_s
    for length, times in run.pieces(run.chunk_size):
        full, rest = divmod(length, block_t)
        columns, rest_columns = block_t // block_s, -(-rest // block_s)
        met = times * full * (full + 1) // 2
        # The last tile is met by full ones in future roles, and meets them in past ones.
        by_full, of_full = (times * full, 0) if product.role.future else (0, times * full)
        yield times * full, block_t, met * block_t + by_full * rest, met * columns + by_full * rest_columns
        if rest:
            yield times, rest, of_full * block_t + times * rest, of_full * columns + times * rest_columns


def _states(run: EngineRun, states: plan.StatesPass, name: str, total: Executed, *, forward: bool) -> None:
    """Add the pass that makes the states between the chunks of heads that are cut, or their gradients: Y^T Z by tiles.

    k and v (gradients: q and dh) are loaded and a state is stored per chunk. Chunks taken by themselves, of which the
    last one of the pass is left out, are merged in place. Sweeping, the gradients' pass also loads the states, for the
    gradient of the decay. Work is counted as recomputed that a walk repeats or a backward pass does again.
    """
    tile, (columns_k, columns_v), heads, chunks = states
    gradient, walks = name == "state_gradient", run.launched.in_order
    recomputed = walks or not (forward or gradient)
    left_out = (run.chunk_size if gradient else run.seq_len - (chunks - 1) * run.chunk_size) * tile.parallel
    length = run.seq_len - left_out
    needed = Counter({_again(name) if recomputed else name: 2 * length * run.head_dim_qk * run.head_dim_v})
    each = 2 * tile.block_t * tile.block_x * tile.block_z
    needed["padding"] = -(-length // tile.block_t) * columns_k * columns_v * each - needed.total()
    add(total.flops, f"{name} pass", needed, heads)

    kept = chunks * run.head_dim_qk * run.head_dim_v * run.widths.state
    weights = length * (_query_bytes(run, name) if gradient else run.vector_bytes)
    keys, values = length * run.head_dim_qk * run.widths.qkv, length * run.head_dim_v * run.widths.qkv
    state_bytes = run.head_dim_qk * (run.head_dim_v * run.widths.state + FP32_BYTES * (run.stabilised and forward))
    moved = {
        "load": run.qk_share * keys + values + weights,
        "store": (chunks - tile.parallel) * state_bytes,
        "merge": (2 * chunks - 1) * state_bytes * tile.parallel,
        "decay gradient": kept if gradient and not walks and GATE_MODELS[run.op].gates else 0,
    }
    add(total.bytes, f"{name} pass", moved, heads)
    issued = columns_v * keys + columns_k * values + columns_k * columns_v * weights
    add(total.rereads, f"{name} pass", {"load": issued - moved["load"]}, heads)


def _role_traffic(run: EngineRun, name: str, product: plan.ProductPasses, total: Executed) -> None:
    """Add what a role's launches load and store.

    X, Y and the output once in all; Z and the gate vectors once a launch; between launches a partial result, stored and
    loaded; states once a chunk. For the gates' gradients one more tensor like Z, row sums for each column block and,
    walking, states at anchors in between (stored by dq, loaded by dk). Every further load of the same data is a reread.
    """
    dx, dz, role, tile, launches = product.dim_x, product.dim_z, product.role, product.tile, len(product.launches)
    launched, qk_share = run.launched, run.qk_share
    share_x, share_z = (1.0, qk_share) if role.transposed else (qk_share, 1.0)
    x, z = run.seq_len * dx * run.widths.qkv, run.seq_len * dz * run.widths.qkv
    normalises = run.makes_denominators(name)
    partial = tile.partial_bytes(dx, bf16=run.dtype == "bf16") if launches > 1 else 0
    sums = role.transposed and bool(GATE_MODELS[run.op].gates)
    pair, anchors = z if sums else 0, 0
    if sums and launched.in_order:
        columns = tile.anchor_columns(dz) * sum(part.block_x for part in product.launches)
        anchors = -(-run.seq_len // launched.anchor_every) * columns
    moved = {
        "load": 2 * share_x * x + share_z * (launches * z + pair) + launches * run.seq_len * _gate_bytes(run, name),
        "store": z + (run.seq_len * run.vector_bytes if normalises else 0),
        "partial results": 2 * (launches - 1) * run.seq_len * dz * partial,
        "row sums": tile.row_sums(dz) * run.seq_len * FP32_BYTES if sums else 0,
        "anchors": anchors * run.widths.qkv,
        "sum over heads": (1 + qk_share) * z * (qk_share < 1 and role.transposed),
    }
    add(total.bytes, name, moved, run.rows)
    states = launched.chunks * dx * (dz * run.widths.state + FP32_BYTES * normalises)
    add(total.bytes, name, {"states": states}, launched.cut * launched.several)
    add(total.rereads, name, {"load": _issued(run, name, product) + pair - moved["load"]}, run.rows)


def _issued(run: EngineRun, name: str, product: plan.ProductPasses) -> float:
    """Return the bytes of X, Y, Z and gate vectors that the programs of a role load, whoever serves them.

    Walking, every column block loads X, Y and the gates of every launch. Sweeping, every row tile loads the columns of
    Y and Z that it meets, and a contraction of several blocks loads X anew for every product.
    """
    dx, dz, parts = product.dim_x, product.dim_z, product.launches
    width, x = run.widths.qkv, run.seq_len * dx
    columns = sum(part.blocks for part in parts)
    if run.launched.in_order:
        tensors = sum(2 * part.blocks * part.dim_x + dz for part in parts)
        return run.seq_len * (tensors * width + columns * _gate_bytes(run, name))
    tiles = list(_row_tiles(run, product))
    loads = sum(rows * met for _, rows, _, met in tiles)
    loaded = sum(positions for _, _, positions, _ in tiles)
    products = run.seq_len * product.tile.block_x + x * run.launched.several + loads * dx
    tensors = columns * (x if dx <= product.tile.block_x else products) + loaded * (columns * dx + dz)
    row, column = _query_bytes(run, name), _key_bytes(run)
    if product.role.future:
        row, column = column, row
    return tensors * width + columns * (run.seq_len * row + loaded * column)


def _query_bytes(run: EngineRun, name: str) -> int:
    """Bytes a position of b and, stabilised, of m and the log of the denominator where that is not made there."""
    if not run.stabilised:
        return run.vector_bytes
    return run.vector_bytes * (1 if run.makes_denominators(name) else 2) + FP32_BYTES


def _key_bytes(run: EngineRun) -> int:
    """Bytes a position of b and u."""
    return run.vector_bytes * (1 + GATE_MODELS[run.op].has_input)


def _gate_bytes(run: EngineRun, name: str) -> int:
    """Bytes a position of every gate vector that a role loads; only a walk needs w."""
    return _query_bytes(run, name) + _key_bytes(run) - run.vector_bytes * (not run.launched.in_order)


def _gates(run: EngineRun, total: Executed) -> None:
    """Add the gate kernels: gates loaded, b, w, u stored; stabilised, m stored and merged with what comes in."""
    gates = GATE_MODELS[run.op].gates * run.seq_len * run.widths.gate
    vectors = run.seq_len * (run.vector_bytes + _key_bytes(run))
    stabiliser = run.seq_len * (run.vector_bytes + 3 * FP32_BYTES) if run.stabilised else 0
    add(total.bytes, "gates", {"load": gates, "store": vectors, "stabiliser": stabiliser}, run.rows)


def _gates_backward(run: EngineRun, total: Executed) -> None:
    """Add the gates' gradients: row sums and gates loaded, but for an exponential input gate, and gradients stored."""
    gates = GATE_MODELS[run.op].gates
    rows = (run.launched.launches[name] for name in ("dq", "dk"))
    sums = sum(row.tile.row_sums(row.dim_z) for row in rows)
    loaded = sums * FP32_BYTES + (gates - run.stabilised) * run.widths.gate
    moved = {"load": run.seq_len * loaded, "store": run.seq_len * gates * run.widths.gate}
    add(total.bytes, "gate gradients", moved, run.rows)


def add(target: Counter[str], prefix: str, parts: Mapping[str, float], times: int = 1) -> None:
    """Add parts to a counter so many times, ``prefix`` before their names; those of 0 are left out."""
    for name, value in parts.items():
        if value and times:
            target[f"{prefix}: {name}"] += value * times  # type: ignore[assignment]


def executed_mlp(problem: Problem, direction: str) -> Executed:
    """Return what one pass of a formulation of :data:`GATED_MLP` runs and moves, forward or backward."""
    total = Executed(Counter(), Counter(), Counter())
    tokens = problem.batch * problem.seq_len
    inputs, weights, outputs = tokens * problem.d_model, 2 * problem.d_model * problem.d_ff, tokens * problem.d_ff
    saves = problem.formulation == "fused_save"
    sizes = {name: getattr(problem, name) for name in ("batch", "seq_len", "d_model", "d_ff")}
    declared = get_operation("gated_mlp").implementation(problem.formulation)
    launches = declared.launches("fwbw", problem.dtype, sizes, CAPABILITY)
    needed, width = 4 * tokens * problem.d_model * problem.d_ff, problem.widths.qkv

    def move(name: str, *, loaded: int, stored: int) -> None:
        add(total.bytes, name, {"load": loaded * width, "store": stored * width})

    def project(name: str, products: str, *, stored: int, beside: int = 0) -> None:
        """Add a launch of the projection kernel, which loads ``beside`` elements besides x and the weights."""
        tile = launches.forward if direction == "forward" else launches.gradient
        rows, columns = -(-tokens // tile.block_m), -(-problem.d_ff // tile.block_f)
        steps = -(-problem.d_model // tile.block_k)
        padded = rows * columns * steps * 4 * tile.block_m * tile.block_f * tile.block_k
        add(total.flops, name, {products: needed, "padding": padded - needed})
        move(name, loaded=inputs + weights + beside, stored=stored)
        total.rereads[f"{name}: load"] += ((columns - 1) * inputs + (rows - 1) * weights) * width

    def multiply(name: str, *, loaded: int, stored: int) -> None:
        """Add a gradient that cuBLAS makes."""
        total.flops[f"{name}: products"] += needed
        total.library[f"{name}: products"] += needed
        move(name, loaded=loaded, stored=stored)

    if direction == "forward":
        project("projection", "products", stored=(3 if saves else 1) * outputs)
        return total
    if saves:
        move("activation gradient", loaded=3 * outputs, stored=2 * outputs)
    else:
        project("projection again", "recomputed_products", stored=2 * outputs, beside=outputs)
    multiply("input gradient", loaded=2 * outputs + weights + inputs, stored=2 * inputs)
    multiply("weight gradients", loaded=2 * inputs + 2 * outputs, stored=weights)
    return total
