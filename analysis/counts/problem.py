"""Counts of whole problems: formulas added up over chunks, heads and the batch; beside them what our kernels run."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ...kernels.baselines import get_operation
from ...kernels.common.spec import resolve
from ...results.arguments import one_of
from ...results.documents import lengths_of
from ...results.schema import SIZE_COLUMNS
from . import baselines, delta_rule, lightning, mlstm, rglru, scalar_decay
from .executed import engine_pass, executed, executed_mlp, sweep_tile
from .formulations import (
    ATTENTION_TILE,
    FORMULATIONS,
    QUADRATIC,
    TILE,
    check_formulation,
    chunk_of,
    declared,
    default_formulation,
    formulation_of,
    has_heads,
    has_launches,
    is_chunked,
    is_counted,
    sizes_of,
    tile_rounded_causal_factor,
)
from .model import DTYPE_BYTES, Count, Factors, Problem, Tally, Widths, Work, one_pass

PASSES: Mapping[str, tuple[str, ...]] = {
    "fw": ("forward",), "step": ("step",), "bw": ("backward",), "fwbw": ("forward", "backward"),
}  # fmt: skip
"""Mode -> the passes it runs."""


BOUND_BYTES = 4
"""Of a bound of packed documents, int32."""


def count(
    op: str,
    *,
    formulation: str | None = None,
    mode: str = "fw",
    dtype: str = "bf16",
    gate_dtype: str | None = None,
    state_dtype: str = "fp32",
    causal: bool = True,
    causal_factor: float | None = None,
    counting: str = "detailed",
    factors: Factors | None = None,
    **sizes: Any,
) -> Count:
    """Count the FLOPs and bytes of one problem: all heads, the whole batch and every chunk.

    Args:
        op: an operation of :data:`FORMULATIONS`.
        formulation: one of the operation's; None means its first (recurrent for mode step).
        mode: fw, bw, fwbw, or step (one decoding step; attention over ``seq_len`` cached tokens).
        dtype: of q, k, v and the output; ``gate_dtype`` (None: the same) of gates; ``state_dtype`` of states.
        causal: False for attention of every query to every key.
        causal_factor: share of the causal square that is computed, in [0.5, 1]; None: rounded up to whole tiles.
        counting: detailed (every operation's own parts), or published (what a paper prints, its slips included, with
            all factors 1: the TFLA paper's mLSTM forward, the RG-LRU page's bytes).
        factors: cost of elementary functions; None means 1 each.
        sizes: seq_len (tokens of a gated MLP; of a step of attention, where there is no ``context``, that), batch and
            num_heads (1 where left out), and those of the operation: head_dim_qk and head_dim_v; channels where there
            are no heads; d_model and d_ff; of a selective scan channels and, as head_dim_qk, its state size. chunk_size
            for the formulations of :data:`CHUNKED` of operations with heads, and for ``chunked``; a shorter last chunk
            is counted as such. num_groups, that share q and k (Mamba-2's B and C): 1 for mamba2_ssd and one a head
            elsewhere, where left out; of the delta rule num_heads_qk. documents packed into a batch of 1
            (:mod:`..results.documents`): quadratic forms have a square each, all others cost what one sequence does,
            and their bounds are read in every pass.

    Returns:
        the count, part by part.

    Raises:
        ValueError: an unknown name, a size that is missing or not positive, ``chunk_size`` > ``seq_len``, a causal
            factor outside [0.5, 1], a formulation or mode that the operation does not have, or a published count where
            no paper prints one.
    """
    for name in sizes:
        one_of("size", name, (*SIZE_COLUMNS, "num_groups"))
    seq_len, chunk_size = sizes.get("seq_len"), sizes.get("chunk_size")
    if isinstance(chunk_size, int) and isinstance(seq_len, int) and chunk_size > seq_len >= 1:
        raise ValueError(f"chunk_size must be <= seq_len = {seq_len}, got {chunk_size}")
    formulation = formulation or default_formulation(op, mode)
    check_formulation(op, formulation, mode, counting)
    if counting == "published" and factors not in (None, Factors()):
        raise ValueError("factors must be 1 for the published counting, which prints simplified totals")
    dtypes = (dtype, dtype if gate_dtype is None else gate_dtype, state_dtype)
    problem = _problem(
        op, formulation, {"batch": 1, "num_heads": 1, **sizes}, dtypes, published=counting == "published",
        causal=causal, causal_factor=causal_factor, factors=factors,
    )  # fmt: skip
    return _with_launches(_count(problem, mode), problem) if has_launches(op, formulation) else _count(problem, mode)


def count_case(
    op: str,
    impl: str,
    mode: str,
    dtype: str,
    state_dtype: str | None,
    sizes: Mapping[str, int],
    *,
    launches: bool = True,
) -> Count | None:
    """Return the count that a row of the results stores, or None for an operation that is not counted.

    Detailed, every factor 1, at the tile-rounded causal factor (1 where the implementation computes whole squares and
    masks them). Gates are counted at 4 bytes (8 beside fp64), as the suite's inputs hold them. States without a dtype
    of the case are as wide, but in forward passes that are declared to store them in the inputs' dtype.

    Args:
        op, impl, mode, dtype, state_dtype: of the case.
        sizes: the case's size columns. ``chunk_size`` may exceed ``seq_len`` (one ragged chunk); where an
            implementation has no chunk axis its own chunk length is taken.
        launches: whether what the launches execute is counted as well; it takes as long as all the rest.

    Errors as :func:`count`.
    """
    return _count_case((op, impl, mode, dtype, state_dtype), tuple(sizes.items()), launches)


@functools.lru_cache(maxsize=2**14)
def _count_case(
    names: tuple[str, str, str, str, str | None], sizes: tuple[tuple[str, int], ...], launches: bool
) -> Count | None:
    """Return :func:`count_case`, which figures and models ask for again and again."""
    op, impl, mode, dtype, state_dtype = names
    if op not in FORMULATIONS:
        return None
    formulation, wide = formulation_of(op, impl, mode, dtype), "fp64" if dtype == "fp64" else "fp32"
    if not is_counted(op, formulation, mode):
        return None
    known: dict[str, Any] = {"batch": 1, "num_heads": 1, **dict(sizes)}
    known["chunk_size"] = chunk_of(op, impl, formulation, known.get("chunk_size"))
    full = 1.0 if declared(op, impl).full_square else None
    problem = _problem(op, formulation, known, (dtype, wide, state_dtype or wide), causal_factor=full)
    forward_state = dtype if state_dtype is None and declared(op, impl).states_as_inputs else None
    counted = _count(problem, mode, forward_state)
    return _with_launches(counted, problem) if launches and has_launches(op, problem.formulation, impl) else counted


def _problem(
    op: str,
    formulation: str,
    sizes: Mapping[str, Any],
    dtypes: tuple[str, str, str],
    *,
    causal_factor: float | None,
    causal: bool = True,
    published: bool = False,
    factors: Factors | None = None,
) -> Problem:
    """Check sizes and dtypes (of inputs, gates, states) and return the problem."""
    size = _checked_sizes(op, formulation, sizes)
    for name, named in zip(("dtype", "gate_dtype", "state_dtype"), dtypes, strict=True):
        one_of(name, named, tuple(DTYPE_BYTES))
    qkv, gate, state = (DTYPE_BYTES[name] for name in dtypes)
    share = _causal_factor(op, formulation, size, qkv, causal=causal, causal_factor=causal_factor)
    documents, alone = sizes.get("documents"), tuple[Problem, ...]()
    lengths = Counter(() if documents is None else lengths_of(documents, size["seq_len"]))
    if formulation in QUADRATIC and lengths:
        how: dict[str, Any] = {"causal_factor": causal_factor, "causal": causal, "factors": factors}
        each = ({**sizes, "documents": None, "seq_len": length, "batch": n} for length, n in lengths.items())
        alone = tuple(_problem(op, formulation, one, dtypes, **how) for one in each)
        share = sum(one.batch * one.causal * one.seq_len**2 for one in alone) / size["seq_len"] ** 2
    chunk_size, num_groups, qk_heads = (size.pop(name, 0) for name in ("chunk_size", "num_groups", "num_heads_qk"))
    groups = num_groups or qk_heads or (1 if op == "mamba2_ssd" else size["num_heads"])
    qk_share = 1 if groups == size["num_heads"] else groups / size["num_heads"]
    return Problem(
        op=op, formulation=formulation, published=published, dtype=dtypes[0], causal=share, f=factors or Factors(),
        **size, chunk_size=chunk_size or size["seq_len"], qk_share=qk_share,
        widths=Widths(qkv=qkv, gate=gate, state=state), documents=lengths.total(), alone=alone,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _count(problem: Problem, mode: str, forward_state: str | None = None) -> Count:
    """Count a problem, without what its launches execute.

    Args:
        forward_state: dtype of the states that the forward pass stores, where it is not that of the backward pass.
    """
    tally, compulsory = Tally(), 0
    for name in PASSES[mode]:
        of_pass = problem
        if name == "forward" and forward_state is not None:
            widths = dataclasses.replace(problem.widths, state=DTYPE_BYTES[forward_state])
            of_pass = dataclasses.replace(problem, widths=widths)
        one, least = _passed(of_pass, name)
        if problem.documents:
            bounds = BOUND_BYTES * (problem.documents + 1)
            one, least = one + Tally(traffic={"document bounds": bounds}), least + bounds
        tally += one.prefixed(f"{name}: ") if len(PASSES[mode]) > 1 else one
        compulsory += least
    return Count(
        op=problem.op,
        formulation=problem.formulation,
        mode=mode,
        counting="published" if problem.published else "detailed",
        flops=float(tally.flops),
        tensor_flops=float(tally.matrix_flops),
        bytes=float(tally.bytes),
        compulsory_bytes=float(compulsory),
        recomputed_flops=float(sum(w.flops for w in tally.recomputed_work.values())),
        recomputed_tensor_flops=float(sum(w.matrix for w in tally.recomputed_work.values())),
        recomputed_bytes=float(sum(tally.recomputed_traffic.values())),
        causal_factor=problem.causal,
        parts=MappingProxyType({name: float(work.flops) for name, work in tally.work.items()}),
        byte_parts=MappingProxyType({name: float(value) for name, value in tally.traffic.items()}),
    )


def _checked_sizes(op: str, formulation: str, sizes: Mapping[str, int | None]) -> dict[str, int]:
    """Return every size that applies; ValueError for one that is missing or not positive."""
    sizes = {**sizes, "seq_len": sizes.get("context") or sizes.get("seq_len")}
    needed = ["seq_len", "batch", "num_heads", *sizes_of(op)]
    needed += ["chunk_size"] if is_chunked(op, formulation) else []
    needed += [name for name in ("num_groups", "num_heads_qk") if sizes.get(name) is not None]
    for name in needed:
        value = sizes.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    checked = {name: int(sizes[name] or 0) for name in needed}
    num_heads = checked["num_heads"]
    for name in ("num_groups", "num_heads_qk"):
        if num_heads % checked.get(name, 1):
            raise ValueError(f"{name} must divide num_heads = {num_heads}, got {checked[name]}")
    return checked


def _causal_factor(
    op: str, formulation: str, size: Mapping[str, int], width: int, *, causal: bool, causal_factor: float | None
) -> float | None:
    """Return the share of the square that is computed, None where there is no square; ``width`` is of an input."""
    if causal_factor is not None and not 0.5 <= causal_factor <= 1:
        raise ValueError(f"causal_factor must be in [0.5, 1], got {causal_factor}")
    if not causal:
        if op != "attention":
            raise ValueError(f"causal=False (--non-causal) is for attention alone: {op} is causal")
        if causal_factor not in (None, 1):
            raise ValueError(f"causal_factor must be 1 for attention that is not causal, got {causal_factor}")
        causal_factor = 1.0
    quadratic = formulation in QUADRATIC
    if not has_heads(op) or not (quadratic or is_chunked(op, formulation)):
        return None
    tile = ATTENTION_TILE if formulation in ("flash", "lightning1") else TILE
    if formulation == "sweep":
        tile = sweep_tile(width)
    square = size["seq_len"] if quadratic else min(size["chunk_size"], size["seq_len"])
    # A walk computes squares of single tiles.
    return causal_factor or tile_rounded_causal_factor(tile if formulation in scalar_decay.WALKS else square, tile)


_CHANNELS: Mapping[str, tuple[int, int]] = {"rglru": (3, 1), "linear_scan": (2, 0), "wkv4": (2, 2)}
"""Operation over channels -> how many of its arguments are [B, T, C], and how many [C]."""


def compulsory(problem: Problem, *, backward: bool) -> Any:
    """Return the bytes of inputs and output, each once, of a whole problem, or of a head where there are heads.

    Backward: of inputs, their gradients and the output's gradient; attention's pass reads its output too. None of an
    operation that declares its own counts: it moves no more.
    """
    op, length, d_v, widths = problem.op, problem.seq_len, problem.head_dim_v, problem.widths
    gates, cells, channels, qk = 0, problem.cells, problem.channels, problem.head_dim_qk
    if model := scalar_decay.GATE_MODELS.get(op):
        gates, qk = model.gates, problem.d_qk_read
    elif op in delta_rule.OPERATIONS:
        gates, qk = delta_rule.gates(problem), problem.d_qk_read
    elif op == "gla":
        gates = qk
    if model or op in ("attention", "gla", *delta_rule.OPERATIONS):
        inputs, output = length * (2 * qk + d_v), length * d_v * (2 if backward and op == "attention" else 1)
    elif op in ("gated_mlp", "projections"):
        tokens, d_model, d_ff = problem.batch * length, problem.d_model, problem.d_ff
        inputs, output = tokens * d_model + 2 * d_model * d_ff, tokens * d_ff * (2 if op == "projections" else 1)
    elif problem.published or problem.formulation in rglru.WITH_GEMMS:
        inputs, output = cells + channels + 2 * channels * channels, cells
    elif op in _CHANNELS:
        tensors, parameters = _CHANNELS[op]
        inputs, output = tensors * cells + parameters * channels, cells
    else:
        return None
    return (inputs * (1 + backward) + output) * widths.qkv + length * gates * widths.gate * (1 + backward)


@functools.lru_cache(maxsize=4096)
def _passed(problem: Problem, direction: str) -> tuple[Tally, Any]:
    """Return one pass (forward, backward, step) of a whole problem and its compulsory bytes: of a step all of them."""
    op, step = problem.op, direction == "step"
    least = compulsory(problem, backward=direction == "backward")
    if declared := get_operation(op).counts:
        tally = resolve(declared)(dataclasses.replace(problem, seq_len=1) if step else problem, direction)
        if not isinstance(tally, Tally):
            work, elements = tally
            parts = {name: Work(matrix=matrix, vector=vector) for name, (matrix, vector) in work.items()}
            tally = Tally(work=parts, traffic=problem.moved(elements))
        return tally, tally.bytes if step or least is None else least
    if problem.formulation == "whole_state":
        tally = _whole_state(problem, direction, least)
    else:
        formula = functools.partial(_linear_rnn, direction=direction, least=least)
        head = baselines.ATTENTION[direction] if op == "attention" else formula
        tally = functools.reduce(operator.add, (head(one) * one.rows for one in problem.alone or (problem,)))
    least = tally.bytes if step else least * problem.rows
    model = scalar_decay.GATE_MODELS.get(op)
    if model is None or not model.head_constants:
        return tally, least
    # Read once per head and problem, in fp32: slopes and Mamba-2's A.
    constants = 4 * problem.num_heads * model.head_constants
    return tally + Tally(traffic={"per-head constants": constants}), least + constants


def _linear_rnn(problem: Problem, direction: str, least: Any) -> Tally:
    """Return one pass of a head of a linear RNN: mLSTM's forward formulas are the paper's.

    Args:
        least: its compulsory bytes.
    """
    backward, gla, paper = direction == "backward", problem.op == "gla", problem.op in mlstm.OPERATIONS
    if problem.formulation == "recurrent":
        module = delta_rule if problem.op in delta_rule.OPERATIONS else mlstm if paper else scalar_decay
        step = (baselines.gla_step if gla else module.step)(problem)
        return step if direction == "step" else step * problem.seq_len
    if problem.formulation.startswith("lightning"):
        return lightning.passed(problem, direction)
    if problem.formulation == "parallel":
        return (scalar_decay.parallel_backward if backward else scalar_decay.parallel_forward)(problem)
    chunk, size = chunk_formula(problem.op, direction), problem.chunk_size
    if problem.formulation == "walk":
        tiles = problem.over_chunks(chunk, min(TILE, size))
        return one_pass(tiles, least) if problem.seq_len <= size else _walked(tiles, problem.over_chunks(chunk, size))
    tally = problem.over_chunks(chunk, size)
    return one_pass(tally, least) if problem.formulation == "fused" else tally


def chunk_formula(op: str, direction: str) -> Callable[[Problem], Tally]:
    """Return the formula of one chunk of a pass: mLSTM's forward one is the paper's."""
    if op == "gla":
        return baselines.gla_chunk_backward if direction == "backward" else baselines.gla_chunk_forward
    if op in delta_rule.OPERATIONS:
        return delta_rule.chunk_backward if direction == "backward" else delta_rule.chunk_forward
    if direction == "backward":
        return scalar_decay.chunk_backward
    return mlstm.chunk if op in mlstm.OPERATIONS else scalar_decay.chunk_forward


def _walked(tiles: Tally, chunks: Tally) -> Tally:
    """Return a walk over several chunks: the work of ``tiles`` with the traffic of ``chunks``.

    The chunks' first states come from a pass of their own, which the walk then repeats tile by tile: recomputation, so
    it is kept apart.
    """
    made = {**tiles.recomputed_work, **tiles.work}
    repeated = {f"{name}, of chunks": work for name, work in made.items() if name in ("state", "state gradient")}
    states = Tally(recomputed_work=repeated)
    return dataclasses.replace(chunks, work=tiles.work, recomputed_work=tiles.recomputed_work) + states


def _whole_state(problem: Problem, direction: str, least: Any) -> Tally:
    """Return a walk of all heads, which cuts only those that do not fill the device.

    Its pass for the states leaves out the chunk whose state none needs: forward the last, backward the first.

    Args:
        least: compulsory bytes of a head.
    """
    chunk = chunk_formula(problem.op, direction)
    launched = engine_pass(problem, direction)
    length, whole = launched.chunk, launched.whole
    tiles = problem.over_chunks(chunk, min(TILE, length))
    uncut = one_pass(tiles, least)
    if not launched.several:
        return uncut * problem.rows
    chunks, last = problem.over_chunks(chunk, length), problem.seq_len % length or length
    unneeded = chunk(dataclasses.replace(problem, seq_len=last if direction == "forward" else length))

    def without(traffic: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
        return {name: each - part[name] if name.startswith("recurrent") else each for name, each in traffic.items()}

    again = without(chunks.recomputed_traffic, unneeded.recomputed_traffic)
    chunks = dataclasses.replace(chunks, traffic=without(chunks.traffic, unneeded.traffic), recomputed_traffic=again)
    cut_heads = _walked(tiles, chunks) * (problem.rows - whole)
    return uncut * whole + cut_heads if whole else cut_heads


def _with_launches(count: Count, problem: Problem) -> Count:
    """Return a count with its executed fields: of sizes that the kernels take, in a 16-bit dtype."""
    passes = PASSES[count.mode]
    if problem.dtype not in ("bf16", "fp16"):
        return count
    if problem.op == "gated_mlp":
        counted = [executed_mlp(problem, direction) for direction in passes]
    else:
        counted = [found for direction in passes if (found := executed(problem, direction))]
    if not counted:
        return count
    prefixes = [f"{direction}: " for direction in passes] if len(passes) > 1 else [""]
    each = list(zip(prefixes, counted, strict=True))
    flops = {prefix + name: value for prefix, one in each for name, value in one.flops.items()}
    moved = {prefix + name: value for prefix, one in each for name, value in one.bytes.items()}
    return dataclasses.replace(
        count,
        executed_tensor_flops=float(sum(flops.values())),
        executed_bytes=float(sum(moved.values())),
        reread_bytes=float(sum(one.rereads.total() for one in counted)),
        library_tensor_flops=float(sum(one.library.total() for one in counted)),
        executed_parts=MappingProxyType({name: float(value) for name, value in flops.items()}),
        executed_byte_parts=MappingProxyType({name: float(value) for name, value in moved.items()}),
    )
