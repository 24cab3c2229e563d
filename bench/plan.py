"""Axes -> cases: which problems a sweep runs, and the presets that name common sets of them. Imports no torch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import kernels
from ..analysis.arguments import MAX_SIZE
from ..kernels.spec import DTYPES, MODES, Implementation, Operation
from . import baselines
from .baselines.spec import Baseline
from .case import Case

MODE_ORDER = ("fwbw", "bw", "fw", "step")
"""Modes with gradients come first: the reference they need also serves the forward case that follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named set of axes; a field that the user gives on the command line replaces the preset's.

    Attributes:
        tokens: batch * seq_len held constant over the sequence lengths.
        embedding_dim: num_heads * head_dim_v held constant over the head dims.
        operations: number of the family's operations to measure, in the order the family lists them; None is all.
        budget_s: seconds of timing per case after which sampling stops (never before ten samples).
        portable_on_gpu: whether code that also runs on a CPU is measured on a GPU without being named.
    """

    name: str
    summary: str
    seq_lens: tuple[int, ...]
    head_dims: tuple[int, ...]
    chunk_sizes: tuple[int, ...]
    modes: tuple[str, ...]
    tokens: int
    embedding_dim: int
    operations: int | None
    budget_s: float
    dtypes: tuple[str, ...] | None = None
    state_dtypes: tuple[str, ...] = ("fp32",)
    portable_on_gpu: bool = False


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="quick",
            summary="minutes on two CPU cores: three lengths, two head dims, three chunk lengths",
            seq_lens=(256, 512, 1024),
            head_dims=(64, 128),
            chunk_sizes=(32, 64, 128),
            modes=("fw", "fwbw"),
            tokens=1024,
            embedding_dim=256,
            operations=2,
            budget_s=0.1,
        ),
        Preset(
            name="default",
            summary="the published axes on one GPU: 65,536 tokens at embedding dim 4096",
            seq_lens=(1024, 2048, 4096, 8192, 16384, 32768, 65536),
            head_dims=(64, 128, 256, 512),
            chunk_sizes=(64, 128, 256, 512, 1024),
            modes=("fw", "fwbw"),
            tokens=65536,
            embedding_dim=4096,
            operations=2,
            budget_s=0.4,
        ),
        Preset(
            name="full",
            summary="every operation, mode, input and state dtype at three lengths; hours on one GPU",
            seq_lens=(1024, 8192, 65536),
            head_dims=(64, 128, 256, 512),
            chunk_sizes=(64, 128, 512),
            modes=("fw", "fwbw", "bw", "step"),
            tokens=65536,
            embedding_dim=4096,
            operations=None,
            budget_s=0.4,
            dtypes=("bf16", "fp16", "fp32"),
            state_dtypes=("fp32", "bf16"),
            portable_on_gpu=True,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for; None leaves an axis to the preset.

    Attributes:
        ops: operations of the family, or of its baselines (attention, gla, ...).
        impls: implementation names, ours or ``provider.variant``; None is all that run on the device.
        baselines: names of baselines, ("none",) for none, None for all of the family.
        head_dims: value head dims; ``head_dims_qk`` defaults to the operation's own ratio to them.
        num_heads: default embedding_dim // head_dim_v of the preset.
        tokens: batch * seq_len held constant; ``batch`` fixes the batch instead, and the two exclude each other.
    """

    kernel: str = "tfla"
    preset: str | None = None
    ops: tuple[str, ...] | None = None
    impls: tuple[str, ...] | None = None
    baselines: tuple[str, ...] | None = None
    modes: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    state_dtypes: tuple[str, ...] | None = None
    seq_lens: tuple[int, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    head_dims_qk: tuple[int, ...] | None = None
    chunk_sizes: tuple[int, ...] | None = None
    num_heads: int | None = None
    tokens: int | None = None
    batch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCase:
    """A case and the code it runs.

    ``target`` is carried along rather than looked up again in the worker, so a caller of the sweep can measure an
    implementation that no declaration names: its ``call`` is any "module:function" relative to the package.
    """

    case: Case
    target: Implementation | Baseline


def get_preset(name: str) -> Preset:
    """Return preset ``name``; ValueError lists the known ones."""
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]


def preset_for(request: Request, device_kind: str) -> Preset:
    """Return the preset asked for, or default on a GPU and quick on a CPU."""
    return get_preset(request.preset or ("default" if device_kind == "cuda" else "quick"))


def plan(request: Request, *, device_kind: str) -> list[PlannedCase]:
    """Return the cases of a sweep, one implementation after the other, without duplicates.

    Args:
        request: the axes; what it leaves open comes from the preset.
        device_kind: "cuda" or "cpu", where it will be measured. Implementations that cannot run there are left out
            unless ``request.impls`` names them, in which case the sweep gives each of their cases a row saying so.

    Raises:
        ValueError: an unknown name or an impossible combination; the message lists what is known.
    """
    preset = preset_for(request, device_kind)
    _check_request(request)
    ops, baseline_list = _select(request, preset, device_kind)
    modes = request.modes or preset.modes
    dtypes = request.dtypes or preset.dtypes or (("bf16",) if device_kind == "cuda" else ("fp32",))
    state_dtypes = request.state_dtypes or preset.state_dtypes

    planned: list[PlannedCase] = []
    for operation in ops:
        for implementation in operation.implementations:
            if not _wanted(implementation.name, implementation.devices, request.impls, device_kind, preset):
                continue
            planned.extend(_plan_ours(operation, implementation, request, preset, modes, dtypes, state_dtypes))
    for baseline in baseline_list:
        planned.extend(_plan_baseline(baseline, request, preset, modes, dtypes))
    if request.impls:
        missing = [name for name in request.impls if all(p.case.impl != name for p in planned)]
        if missing:
            raise ValueError(
                f"impl {', '.join(missing)} has no case in this sweep; these have: {', '.join(_known_impls(request))}"
            )
    return _deduplicate(planned)


def not_planned(request: Request, device_kind: str) -> list[str]:
    """Return the names of the family's implementations that a sweep leaves out because they need another device."""
    if request.impls:
        return []
    preset = preset_for(request, device_kind)
    ops, _ = _select(request, preset, device_kind)
    names = [i.name for op in ops for i in op.implementations if device_kind not in i.devices]
    names += [b.name for b in _family_baselines(request, ops) if device_kind not in b.devices]
    return list(dict.fromkeys(names))


def remarks(request: Request, planned: Sequence[PlannedCase]) -> list[str]:
    """Return what of a request its cases do not hold: values without a case, tokens that the lengths do not divide."""
    lines = []
    for name, given in (
        ("op", request.ops),
        ("mode", request.modes),
        ("dtype", request.dtypes),
        ("state_dtype", request.state_dtypes),
    ):
        here = {getattr(item.case, name) for item in planned}
        missing = [value for value in given or () if value not in here]
        if missing:
            lines.append(f"no case has {name} {', '.join(missing)}: nothing that is measured here does")
    sequences = [item.case for item in planned if item.case.mode != "step"]
    others = {(case.seq_len or 0, case.batch or 0) for case in sequences}
    for seq_len, batch in sorted(others):
        if request.tokens is not None and batch * seq_len != request.tokens:
            lines.append(f"{batch * seq_len} tokens at seq_len {seq_len} (batch {batch}), not {request.tokens}")
    return lines


def _check_request(request: Request) -> None:
    if request.batch is not None and request.tokens is not None:
        raise ValueError("give batch or tokens, not both")
    for axis in dataclasses.fields(request):
        given = getattr(request, axis.name)
        if given == ():
            raise ValueError(f"{axis.name} must have at least one value, got none")
        for size in given if isinstance(given, tuple) else (given,):
            if isinstance(size, int) and not 1 <= size <= MAX_SIZE:
                raise ValueError(f"{axis.name} must be from 1 to {MAX_SIZE}, got {size}")
    for what, names, known in (
        ("mode", request.modes, MODES),
        ("dtype", request.dtypes, DTYPES),
        ("state_dtype", request.state_dtypes, DTYPES),
    ):
        for name in names or ():
            if name not in known:
                raise ValueError(f"{what} must be one of {', '.join(known)}, got {name!r}")


def _family(kernel: str) -> tuple[str, ...]:
    if kernel not in kernels.FAMILIES:
        raise ValueError(f"kernel must be one of {', '.join(kernels.FAMILIES)}, got {kernel!r}")
    return kernels.FAMILIES[kernel]


def _select(request: Request, preset: Preset, device_kind: str) -> tuple[list[Operation], list[Baseline]]:
    family = _family(request.kernel)
    of_baselines = {b.op for b in baselines.baselines_for(request.kernel)}
    if request.ops:
        for name in request.ops:
            if name not in family and name not in of_baselines:
                known = ", ".join((*family, *sorted(of_baselines - set(family))))
                raise ValueError(f"op must be one of {known} for kernel {request.kernel}, got {name!r}")
        chosen = [name for name in family if name in request.ops]
    else:
        chosen = list(family[: preset.operations])
    ops = [kernels.get_operation(name) for name in chosen]
    family_baselines = _family_baselines(request, ops)
    selected = [b for b in family_baselines if _wanted(b.name, b.devices, request.impls, device_kind, preset)]
    return ops, selected


def _family_baselines(request: Request, ops: Sequence[Operation]) -> list[Baseline]:
    """The family's baselines; with operations chosen by name, those of these operations and of operations not ours."""
    everything = list(baselines.baselines_for(request.kernel))
    if request.baselines is not None and request.baselines != ("none",):
        known = {b.name for b in everything} | {b.provider for b in everything}
        for name in request.baselines:
            if name not in known:
                raise ValueError(f"baseline must be one of none, {', '.join(sorted(known))}, got {name!r}")
        everything = [b for b in everything if b.name in request.baselines or b.provider in request.baselines]
    elif request.baselines == ("none",):
        return []
    if not request.ops:
        return everything
    ours = _family(request.kernel)
    named = {op for op in request.ops if op not in ours}
    wanted = {op.name for op in ops}
    return [b for b in everything if b.op in wanted or (b.op in named if named else b.op not in ours)]


def _known_impls(request: Request) -> list[str]:
    names = [i.name for op in _family(request.kernel) for i in kernels.get_operation(op).implementations]
    names += [b.name for b in baselines.baselines_for(request.kernel)]
    return list(dict.fromkeys(names))


def _wanted(name: str, devices: Sequence[str], impls: Sequence[str] | None, device_kind: str, preset: Preset) -> bool:
    """Whether the sweep measures it: what is named; else what runs here, portable code on a GPU only in full."""
    if impls:
        return name in impls
    portable = "cpu" in devices and "cuda" in devices
    return device_kind in devices and (preset.portable_on_gpu or device_kind == "cpu" or not portable)


def _problems(request: Request, preset: Preset, operation: Operation, mode: str) -> Iterable[dict[str, int]]:
    """The sizes that describe an operation's problems, without a chunk length, in the order they are run."""
    seq_lens = (1,) if mode == "step" else request.seq_lens or preset.seq_lens
    for head_dim_v in request.head_dims or preset.head_dims:
        num_heads = request.num_heads or max(1, preset.embedding_dim // head_dim_v)
        for head_dim_qk in request.head_dims_qk or (max(1, int(head_dim_v * operation.qk_ratio)),):
            for seq_len in seq_lens:
                if mode == "step":
                    batch = request.batch or 16
                elif request.batch is not None:
                    batch = request.batch
                else:
                    batch = max(1, (request.tokens or preset.tokens) // seq_len)
                sizes = {
                    "batch": batch,
                    "seq_len": seq_len,
                    "num_heads": num_heads,
                    "head_dim_qk": head_dim_qk,
                    "head_dim_v": head_dim_v,
                }
                yield {name: size for name, size in sizes.items() if name in operation.sizes}


def drop_covered(chunk_sizes: Sequence[int], seq_len: int) -> list[int]:
    """Return the chunk lengths without those above ``seq_len`` that a smaller planned one already covers."""
    covering = [c for c in chunk_sizes if c >= seq_len]
    return [c for c in dict.fromkeys(chunk_sizes) if c < seq_len or c == min(covering)]


def _plan_ours(
    operation: Operation,
    implementation: Implementation,
    request: Request,
    preset: Preset,
    modes: Sequence[str],
    dtypes: Sequence[str],
    state_dtypes: Sequence[str],
) -> Iterable[PlannedCase]:
    explicit = bool(request.impls)
    for mode, dtype in itertools.product(_ordered(modes), dtypes):
        if not explicit and (mode not in implementation.modes or dtype not in implementation.dtypes):
            continue
        for sizes in _problems(request, preset, operation, mode):
            chunks: list[int | None] = [None]
            if implementation.chunked and mode != "step":
                axis = request.chunk_sizes or preset.chunk_sizes
                if implementation.preferred_chunk and not request.chunk_sizes:
                    axis = (*axis, kernels.resolve(implementation.preferred_chunk)(sizes))
                chunks = list(drop_covered(axis, sizes["seq_len"]))
            # A decoding step has one state, kept in fp32: no states between chunks.
            axis_of_states = ("fp32",) if mode == "step" and not request.state_dtypes else state_dtypes
            for state_dtype, chunk_size in itertools.product(axis_of_states, chunks):
                if not request.state_dtypes and state_dtype not in implementation.state_dtypes:
                    continue
                case = Case(
                    kernel=request.kernel,
                    op=operation.name,
                    impl=implementation.name,
                    provider="lrbench",
                    mode=mode,
                    dtype=dtype,
                    state_dtype=state_dtype,
                    chunk_size=chunk_size,
                    **sizes,
                )
                yield PlannedCase(case=case, target=implementation)


def _plan_baseline(
    baseline: Baseline, request: Request, preset: Preset, modes: Sequence[str], dtypes: Sequence[str]
) -> Iterable[PlannedCase]:
    explicit = bool(request.impls)
    swept = baseline.op if _same_sizes(baseline, request) else None
    # What runs beside the family takes the family's sizes; what is itself swept, or is ours, its own.
    own = swept or (baseline.op if baseline.op in _family(request.kernel) else _family(request.kernel)[0])
    for mode, dtype in itertools.product(_ordered(modes), dtypes):
        if not explicit and (mode not in baseline.modes or dtype not in baseline.dtypes):
            continue
        for sizes in _problems(request, preset, baselines.get_operation(own), mode):
            chunk_sizes = request.chunk_sizes or preset.chunk_sizes
            for adapted in baselines.plan_sizes(baseline, sizes, chunk_sizes, op=swept):
                columns: dict[str, Any] = dict(adapted)
                case = Case(
                    kernel=request.kernel,
                    op=baseline.op,
                    impl=baseline.name,
                    provider=baseline.provider,
                    mode=mode,
                    dtype=dtype,
                    **columns,
                )
                yield PlannedCase(case=case, target=baseline)


def _same_sizes(baseline: Baseline, request: Request) -> bool:
    """Whether a baseline runs at the sizes that are swept, not at its authors': its operation is what is asked for.

    Operations that are not ours have head dims of their own, unless the request names some.
    """
    if baseline.op not in (request.ops or ()):
        return False
    if baseline.op in _family(request.kernel):
        return True
    return bool(request.head_dims) and "head_dim_v" in baselines.get_operation(baseline.op).sizes


def _ordered(modes: Sequence[str]) -> list[str]:
    return sorted(dict.fromkeys(modes), key=MODE_ORDER.index)


def _deduplicate(planned: Iterable[PlannedCase]) -> list[PlannedCase]:
    unique: dict[str, PlannedCase] = {}
    for item in planned:
        unique.setdefault(item.case.case_id, item)
    return sorted(unique.values(), key=_run_order(list(unique.values())))


def _run_order(planned: Sequence[PlannedCase]) -> Callable[[PlannedCase], tuple[Any, ...]]:
    """One implementation after the other; within it, cases that share inputs (and so a reference) side by side."""
    groups = {key: n for n, key in enumerate(dict.fromkeys((p.case.provider, p.case.impl) for p in planned))}
    ops = {op: n for n, op in enumerate(dict.fromkeys(p.case.op for p in planned))}

    def key(item: PlannedCase) -> tuple[Any, ...]:
        case = dataclasses.asdict(item.case)
        problem = tuple(case[name] or 0 for name in ("head_dim_v", "head_dim_qk", "seq_len", "batch", "num_heads"))
        other = tuple(case[name] or 0 for name in ("channels", "d_model", "d_ff"))
        return (
            groups[item.case.provider, item.case.impl],
            ops[item.case.op],
            item.case.dtype,
            *problem,
            *other,
            MODE_ORDER.index(item.case.mode),
            item.case.state_dtype or "",
            item.case.chunk_size or 0,
        )

    return key
