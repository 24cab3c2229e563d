"""Axes -> cases: which problems a sweep runs. Imports no torch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from .. import kernels
from ..kernels import baselines
from ..kernels.baselines.spec import Baseline
from ..kernels.common.spec import DTYPES, MODES, Implementation, Operation
from ..results.arguments import MAX_SIZE, nearest, one_of, unknown
from ..results.documents import lengths_of, parse_documents, positions_of
from ..results.schema import CASE_COLUMNS, Case, Environment
from ..results.select import describe
from .presets import Preset, get_preset, presets_for
from .request import COLUMNS, FLAGS, Request, Triton

MODE_ORDER = ("fwbw", "bw", "fw", "step", "train")
"""Modes with gradients come first: the reference they need also serves the forward case that follows."""


WIDTHS = ("num_heads", "num_heads_qk", "head_dim_qk", "head_dim_v", "channels", "d_model", "d_ff")
"""Sizes that operations may have beside the batch and lengths."""


def named_family(kernel: str | None, ops: tuple[str, ...] | None = None) -> tuple[str, tuple[str, ...] | None]:
    """Return the family meant and the operations asked for; ``kernel`` may also be the name of one operation.

    Without a name it is the first family.

    Raises:
        ValueError: an unknown name, or further operations beside one that is named as ``kernel``.
    """
    kernel = kernel or next(iter(kernels.FAMILIES))
    if kernel in kernels.FAMILIES:
        return kernel, ops
    operations: list[str] = []
    for family, own in kernels.FAMILIES.items():
        operations += [*own, *(baseline.op for baseline in baselines.baselines_for(family))]
        if kernel in operations:
            if ops is not None and ops != (kernel,):
                raise ValueError(f"op must be {kernel} or left out for the operation {kernel}, got {', '.join(ops)!r}")
            return family, (kernel,)
    raise unknown("kernel", kernel, kernels.FAMILIES, ", or an operation", also=operations)


Identity = tuple[str, str | None]
"""A case's id and, where a sweep compares several, the version of Triton."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCase:
    """A case and the code it runs.

    Attributes:
        target: carried along rather than looked up again in the worker, so that an implementation can be measured which
            no declaration names: its ``call`` is any "module:function" relative to the package.
        config_of: a case that is too large to be called only to compile, and whose launches this one takes.
        options: further keywords of the operation's functions, the reference's too (normalizer_gradient, ...).
        triton: the Triton to measure with, where a sweep compares several; None is the installed one.
        sustained: as of :class:`Request`.
    """

    case: Case
    target: Implementation | Baseline
    config_of: Case | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    triton: Triton | None = None
    sustained: bool = False

    def __str__(self) -> str:
        """Return the case in a few words."""
        return describe(dataclasses.asdict(self.case)) + (f" triton {self.triton.version}" if self.triton else "")

    @property
    def identity(self) -> Identity:
        """What no other case of a sweep has."""
        return self.case.case_id, None if self.triton is None else self.triton.version

    @property
    def problem(self) -> Hashable:
        """What cases of an implementation that are checked against one reference have in common."""
        return self.case.op, self.case.impl, self.case.dtype, self.case.problem_sizes

    @property
    def autotunes(self) -> bool:
        """Whether it runs an autotuner, whose choices stay in the process."""
        return isinstance(self.target, Baseline) and self.target.autotunes

    @property
    def folder(self) -> str | None:
        """The folder of its Triton, None for the installed one."""
        return None if self.triton is None else self.triton.folder

    def within(self, environment: Environment) -> Environment:
        """Return the environment with the version of Triton that the case is measured with."""
        if self.triton is None:
            return environment
        # Its compiler's settings are its worker's own.
        version = self.triton.version
        return dataclasses.replace(environment, triton_version=version, ptxas_version=None, fp_fusion=None)


def preset_for(request: Request, device_kind: str) -> Preset:
    """Return the preset asked for, or default on a GPU, of training steps the family's train, and quick on a CPU."""
    usual = "train" if request.modes == ("train",) and "train" in presets_for(request.kernel) else "default"
    return get_preset(request.preset or (usual if device_kind == "cuda" else "quick"), request.kernel, device_kind)


def plan(request: Request, *, device_kind: str) -> list[PlannedCase]:
    """Return the cases of a sweep, one implementation after the other, without duplicates.

    Args:
        device_kind: "cuda" or "cpu", where it will be measured. Implementations that cannot run there are left out
            unless ``request.impls`` names them, in which case the sweep gives each of their cases a row saying so.

    Raises:
        ValueError: an unknown name or an impossible combination; the message lists what is known.
    """
    _check_request(request)
    preset = preset_for(request, device_kind)
    ops, baseline_list = _select(request, preset, device_kind)
    modes = request.modes or preset.modes
    _check_axes(request, ops, baseline_list, modes)
    dtypes = request.dtypes or preset.dtypes or (("bf16",) if device_kind == "cuda" else ("fp32",))
    kinds = list(itertools.product(sorted(dict.fromkeys(modes), key=MODE_ORDER.index), dtypes))

    targets: list[tuple[Operation, Implementation | Baseline]] = [
        (op, each) for op in ops for each in op.implementations if _wanted(each, request, preset, device_kind)
    ]
    targets += [(baselines.get_operation(each.op), each) for each in baseline_list]
    named = {name: n for n, name in enumerate(request.impls or ())}
    targets.sort(key=lambda target: named.get(target[1].name, len(named)))
    planned: list[PlannedCase] = []
    for (operation, target), (mode, dtype) in itertools.product(targets, kinds):
        # An implementation that is named has every case, if only to say why it cannot run, except training steps of
        # operations without a model.
        has_case = request.impls or (mode in operation.modes_of(target) and dtype in target.dtypes)
        if not has_case or (mode == "train" and not operation.models):
            continue
        if isinstance(target, Implementation):
            problems = _our_problems(request, preset, operation, target, mode, dtype)
        else:
            problems = _baseline_problems(request, preset, target, mode, ops)
        code: dict[str, Any] = {"op": operation.name, "impl": target.name, "provider": package_of(target)}
        for columns in problems:
            if mode == "train":
                columns["layers"] = request.layers or operation.model(columns)[0]
            case = Case(kernel=request.kernel, **code, mode=mode, dtype=dtype, **columns)
            planned.append(PlannedCase(case=case, target=target, sustained=request.sustained))
    here = {item.case.impl for item in planned}
    if missing := [name for name in request.impls or () if name not in here]:
        names = [i.name for op in kernels.FAMILIES[request.kernel] for i in kernels.get_operation(op).implementations]
        names += [baseline.name for baseline in baselines.baselines_for(request.kernel)]
        known = list(dict.fromkeys(names))
        meant = nearest(missing[0], known) or f"these have: {', '.join(known)}"
        raise ValueError(f"impl {', '.join(missing)} has no case in this sweep; {meant}")
    first, step = request.shard
    return in_run_order(planned)[first - 1 :: step]


def not_planned(request: Request, device_kind: str) -> list[str]:
    """Return the names of the family's implementations that a sweep leaves out because they need another device."""
    if request.impls:
        return []
    preset = preset_for(request, device_kind)
    ops, _ = _select(request, preset, device_kind)
    found: list[tuple[Operation, Implementation | Baseline]] = [(op, each) for op in ops for each in op.implementations]
    found += [(baselines.get_operation(each.op), each) for each in _family_baselines(request, ops)]
    modes = {*(request.modes or preset.modes)}
    names = (each.name for op, each in found if device_kind not in each.devices and modes & {*op.modes_of(each)})
    return list(dict.fromkeys(names))


def remarks(request: Request, planned: Sequence[PlannedCase]) -> list[str]:
    """Return where cases differ from a request: values that no case has, other numbers of tokens."""
    lines = []
    for name in ("op", "mode", "dtype", "state_dtype"):
        here = {getattr(item.case, name) for item in planned}
        if missing := [value for value in getattr(request, f"{name}s") or () if value not in here]:
            lines.append(f"no case has {name} {', '.join(missing)}: nothing that is measured here does")
    sequences = (item.case for item in planned if item.case.mode != "step")
    for seq_len, batch in sorted({(case.seq_len or 0, case.batch or 0) for case in sequences}):
        if request.tokens is not None and batch * seq_len != request.tokens:
            lines.append(f"{batch * seq_len} tokens at seq_len {seq_len} (batch {batch}), not {request.tokens}")
    if any(item.case.mode == "train" for item in planned):
        own = request.ops or kernels.FAMILIES[request.kernel]
        if lacking := [name for name in own if not baselines.get_operation(name).models]:
            lines.append(f"no training steps of {', '.join(lacking)}: no model here has them in its blocks")
    return lines


def _check_request(request: Request) -> None:
    if request.batches is not None and request.tokens is not None:
        raise ValueError("give batch or tokens, not both")
    for axis in dataclasses.fields(request):
        given = getattr(request, axis.name)
        if given == ():
            raise ValueError(f"{axis.name} must have at least one value, got none")
        for size in given if isinstance(given, tuple) else (given,):
            if type(size) is int and not 1 <= size <= MAX_SIZE:
                raise ValueError(f"{axis.name} must be from 1 to {MAX_SIZE}, got {size}")
    for what, known in (("mode", MODES), ("dtype", DTYPES), ("state_dtype", DTYPES)):
        for name in getattr(request, f"{what}s") or ():
            one_of(what, name, known)


def _check_axes(request: Request, ops: Sequence[Operation], chosen: Sequence[Baseline], modes: Sequence[str]) -> None:
    """Raise ValueError for an axis that nothing has which is measured: a size, chunk lengths, contexts, layers."""
    names = ", ".join(operation.name for operation in ops) or ", ".join(request.ops or ())
    sizes = list(dict.fromkeys(size for operation in ops for size in (*operation.sizes, *operation.optional_sizes)))
    for field, size in COLUMNS.items():
        if ops and getattr(request, field) is not None and size in WIDTHS and size not in sizes:
            raise ValueError(f"{FLAGS[field]} is no size of {names}, which has {', '.join(sizes)}")
    if ops and all("d_model" in operation.sizes for operation in ops):
        for option, given in (("--batch", request.batches), ("--tokens", request.tokens)):
            if given is not None:
                raise ValueError(f"{option} is no axis of {names}: its tokens are its --seq-len")
    chunked = any(implementation.chunked for operation in ops for implementation in operation.implementations)
    if request.chunk_sizes and not chunked and not any(baseline.chunk_sizes for baseline in chosen):
        raise ValueError(f"--chunk-size is no axis of {names}: nothing that computes it has chunks")
    cached = any(baselines.get_operation(each.op).cache for each in baselines.baselines_for(request.kernel))
    if request.contexts and not (cached and "step" in modes):
        where = f"mode {', '.join(modes)}" if cached else f"kernel {request.kernel}"
        raise ValueError(f"--context is no axis of {where}: a decoding step of attention (--mode step) has one")
    for option, given in (("--seq-len", request.seq_lens), ("--tokens", request.tokens)):
        if given and set(modes) == {"step"}:
            raise ValueError(f"{option} is no axis of mode step: its call is of one token, after --context of them")
    if request.layers and "train" not in modes:
        raise ValueError(f"--layers is no axis of mode {', '.join(modes)}: a training step (--mode train) has them")
    if request.documents:
        if "step" in modes:
            raise ValueError("--documents is no axis of mode step: give --mode fw, fwbw, bw or train")
        if mixed := [op.name for op in ops if "train" in modes and op.models and op.channelwise]:
            why = "its blocks also mix neighbours, by a convolution or token shift that knows no documents"
            raise ValueError(f"--documents is no axis of mode train of {', '.join(mixed)}: {why}")
        if ops and all("d_model" in operation.sizes for operation in ops):
            raise ValueError(f"--documents is no axis of {names}: it mixes no tokens")
        if request.batches not in (None, (1,)):
            raise ValueError("--batch must be left out beside --documents, which are packed into a batch of 1")


def _select(request: Request, preset: Preset, device_kind: str) -> tuple[list[Operation], list[Baseline]]:
    one_of("kernel", request.kernel, kernels.FAMILIES)
    family = kernels.FAMILIES[request.kernel]
    compared = {b.op for b in baselines.baselines_for(request.kernel)}
    for name in request.ops or ():
        one_of("op", name, (*family, *sorted(compared - set(family))), f" for kernel {request.kernel}")
    chosen = [name for name in family if name in request.ops] if request.ops else family[: preset.operations or None]
    ops = [kernels.get_operation(name) for name in chosen]
    family_baselines = _family_baselines(request, ops)
    if request.baselines:
        preset = dataclasses.replace(preset, impls=None)
    if preset.impls is not None:
        family_baselines = [b for b in family_baselines if b.op in chosen or b.op not in family]
    return ops, [b for b in family_baselines if _wanted(b, request, preset, device_kind)]


def _family_baselines(request: Request, ops: Sequence[Operation]) -> list[Baseline]:
    """The family's baselines; with operations chosen by name, those of these operations and of operations not ours."""
    if request.baselines == ("none",):
        return []
    found = list(baselines.baselines_for(request.kernel))
    if request.baselines is not None:
        known = {b.name for b in found} | {b.provider for b in found}
        for name in request.baselines:
            one_of("baseline", name, ("none", *sorted(known)))
        found = [b for b in found if b.name in request.baselines or b.provider in request.baselines]
    if not request.ops:
        return found
    ours = kernels.FAMILIES[request.kernel]
    named = {op for op in request.ops if op not in ours}
    wanted = {op.name for op in ops}
    return [b for b in found if b.op in wanted or (b.op in named if named else b.op not in ours)]


def _wanted(target: Implementation | Baseline, request: Request, preset: Preset, device_kind: str) -> bool:
    """Whether a sweep measures an implementation: if named; else if it runs here, portable code as the preset says."""
    if request.impls:
        return target.name in request.impls
    if preset.impls is not None and target.name not in preset.impls:
        return False
    portable = "cpu" in target.devices and "cuda" in target.devices
    return device_kind in target.devices and (preset.portable_on_gpu or device_kind == "cpu" or not portable)


def _problems(request: Request, preset: Preset, operation: Operation, mode: str) -> Iterable[dict[str, Any]]:
    """The sizes that describe an operation's problems, without a chunk length, in the order they are run."""
    seq_lens = (1,) if mode == "step" else request.seq_lens or preset.seq_lens
    for width in _widths(request, preset, operation):
        if request.documents:
            yield from ({**packed, **width} for packed in _packed(request, preset))
            continue
        for seq_len in seq_lens:
            for batch in _batches(request, preset, operation, mode, seq_len):
                sizes = {"batch": batch, "seq_len": seq_len, **width}
                yield {
                    name: size for name, size in sizes.items() if name in (*operation.sizes, *operation.optional_sizes)
                }


def _packed(request: Request, preset: Preset) -> Iterator[dict[str, Any]]:
    """The lengths of problems of packed documents."""
    for documents in map(parse_documents, request.documents or ()):
        usual = request.tokens or positions_of(documents) or preset.tokens
        for seq_len in request.seq_lens or (usual,):
            lengths_of(documents, seq_len)
            yield {"batch": 1, "seq_len": seq_len, "documents": documents}


def _batches(request: Request, preset: Preset, operation: Operation, mode: str, seq_len: int) -> tuple[int, ...]:
    if "d_model" in operation.sizes:
        # The tokens of an MLP are its seq_len: how they fall into sequences makes no difference.
        return (1,)
    if request.batches is not None:
        return request.batches
    if mode == "step":
        return preset.step_batches
    if request.tokens is None and preset.batch is not None:
        return (preset.batch,)
    return (max(1, (request.tokens or preset.tokens) // seq_len),)


def _widths(request: Request, preset: Preset, operation: Operation) -> Iterable[dict[str, int]]:
    """The sizes of an operation other than batch and sequence length."""
    if "d_model" in operation.sizes:
        known = dict(preset.matrices)
        for d_model in request.d_models or known:
            for d_ff in request.d_ffs or (known.get(d_model),):
                yield operation.sizes_at(d_model=d_model, d_ff=d_ff)
    elif "head_dim_v" in operation.sizes:
        for head_dim_v in request.head_dims or preset.head_dims:
            num_heads = request.num_heads or max(1, preset.embedding_dim // head_dim_v)
            given: dict[str, int | None] = {"num_heads": num_heads, "head_dim_v": head_dim_v}
            if "num_heads_qk" in operation.optional_sizes:
                given["num_heads_qk"] = request.num_heads_qk
            for head_dim_qk in request.head_dims_qk or (None,):
                yield operation.sizes_at(head_dim_qk=head_dim_qk, **given)
    else:
        for channels in request.channels or preset.channels:
            yield operation.sizes_at(channels=channels)


def drop_covered(chunk_sizes: Sequence[int], seq_len: int) -> list[int]:
    """Return the chunk lengths without those above ``seq_len`` that a smaller planned one already covers."""
    covering = [c for c in chunk_sizes if c >= seq_len]
    return [c for c in dict.fromkeys(chunk_sizes) if c < seq_len or c == min(covering)]


def _our_problems(
    request: Request, preset: Preset, operation: Operation, implementation: Implementation, mode: str, dtype: str
) -> Iterator[dict[str, Any]]:
    """The sizes of an implementation's cases, with chunk lengths and dtypes of states."""
    for sizes in _problems(request, preset, operation, mode):
        chunks: list[int | None] = [None]
        # In a model an implementation chooses its chunk length, unless one is asked for.
        if implementation.chunked and (mode in ("fw", "fwbw", "bw") or (mode == "train" and request.chunk_sizes)):
            axis = request.chunk_sizes or preset.chunk_sizes
            if not request.chunk_sizes and (chosen := implementation.chosen_chunk(sizes, dtype)):
                axis = (*axis, chosen)
            chunks = list(drop_covered(axis, sizes["seq_len"]))
        # A decoding step has one state, kept in fp32: no states between chunks.
        usual = ("fp32",) if mode == "step" else preset.state_dtypes
        own = [each for each in usual if each in implementation.state_dtypes]
        state_dtypes = request.state_dtypes or (own if implementation.state_dtypes else (None,))
        for state_dtype, chunk_size in itertools.product(state_dtypes, chunks):
            yield {**sizes, "state_dtype": state_dtype, "chunk_size": chunk_size}


def _baseline_problems(
    request: Request, preset: Preset, baseline: Baseline, mode: str, ops: Sequence[Operation]
) -> Iterator[dict[str, Any]]:
    """The sizes of a baseline's cases, with chunk lengths and contexts."""
    swept = baseline.op if _same_sizes(baseline, request) else None
    # A baseline of an operation that is swept takes that operation's sizes, one of another operation those of the
    # family's first operation, head dims of the state included.
    beside = baseline.op not in {operation.name for operation in ops}
    own = baselines.get_operation(swept or (kernels.FAMILIES[request.kernel][0] if beside else baseline.op))
    # With as many channels, a model of another operation is wider than Hawk, whose width is 3/4 of its channels.
    if mode == "train" and own.name != baseline.op and own.channelwise:
        return
    cached = mode == "step" and baselines.get_operation(baseline.op).cache
    contexts = (request.contexts or preset.contexts) if cached else (None,)
    chunk_sizes = request.chunk_sizes or preset.chunk_sizes
    for sizes, context in itertools.product(_problems(request, preset, own, mode), contexts):
        for adapted in baselines.plan_sizes(baseline, sizes, chunk_sizes, op=swept):
            yield {**adapted, "context": context}


def package_of(target: Implementation | Baseline) -> str:
    """Return the package that an implementation is part of, as a case names its provider."""
    return target.provider if isinstance(target, Baseline) else "lrbench"


def _same_sizes(baseline: Baseline, request: Request) -> bool:
    """Whether a baseline runs at the sizes that are swept, not at its authors': its operation is what is asked for.

    Without a name that is the family's first operation. Operations that are not ours have head dims of their own,
    unless the request names some.
    """
    if baseline.op not in (request.ops or kernels.FAMILIES[request.kernel][:1]):
        return False
    if baseline.op in kernels.FAMILIES[request.kernel]:
        return True
    return bool(request.head_dims) and "head_dim_v" in baselines.get_operation(baseline.op).sizes


def in_run_order(planned: Iterable[PlannedCase]) -> list[PlannedCase]:
    """Return cases in the order they are run, each once, also where several families have it.

    It is one implementation after the other; within it, cases that share inputs (and so a reference) side by side.
    """
    identity = attrgetter(*CASE_COLUMNS)
    unique: dict[tuple[Any, ...], PlannedCase] = {}
    for item in planned:
        if item.sustained or identity(item.case) not in unique:
            unique[identity(item.case)] = item
    cases = [item.case for item in unique.values()]
    impls = {key: n for n, key in enumerate(dict.fromkeys((case.provider, case.impl) for case in cases))}
    ops = {op: n for n, op in enumerate(dict.fromkeys(case.op for case in cases))}
    sizes = attrgetter(
        "head_dim_v", "head_dim_qk", "seq_len", "batch", "context", "num_heads", "num_heads_qk", "channels", "d_model",
        "d_ff", "layers", "chunk_size",
    )  # fmt: skip

    def place(item: PlannedCase) -> tuple[Any, ...]:
        case = item.case
        *problem, chunk_size = (size or 0 for size in sizes(case))
        code = impls[case.provider, case.impl], ops[case.op], case.dtype
        return (*code, *problem, case.documents or "", MODE_ORDER.index(case.mode), case.state_dtype or "", chunk_size)

    return sorted(unique.values(), key=place)
