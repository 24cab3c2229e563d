"""The analysis commands of the command line: count, chunk-size, predict, plot, roofline.

:func:`register` adds them to a Typer app. What they need of other folders (the operations of a kernel family, printing)
is handed in, because analysis imports neither kernels nor the command line; heavy modules are imported inside commands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..results.arguments import check_size, parse_names, parse_size

if TYPE_CHECKING:
    import pandas as pd

    from .accelerators.known import Accelerator

Show = Callable[[Sequence[Mapping[str, Any]], str], None]
"""Prints rows in a format: table, json or csv."""

ResolveOperation = Callable[[str, str | None], str]
"""(kernel family, operation or None) -> operation, the family's first by default; ValueError lists the known ones."""

ImplementationNames = Callable[[str], Sequence[str]]
WhyUnsupported = Callable[[str, str, str, str, Mapping[str, int]], "str | None"]
"""Operation -> its implementations, ours first; empty for one that is counted only."""

Format = Annotated[str, typer.Option("--format", help="table, json or csv.")]
Kernel = Annotated[str, typer.Argument(help="Kernel family (tfla), or an operation.")]
Op = Annotated[str | None, typer.Option(help="Operation [the family's first].")]
SeqLen = Annotated[str, typer.Option(help="Sequence length; 8k = 8192.")]
Batch = Annotated[int, typer.Option(help="Batch.")]
NumHeads = Annotated[int | None, typer.Option(help="Heads [4096 / head dim].")]
HeadDim = Annotated[int, typer.Option(help="Value head dim.")]
HeadDimQk = Annotated[int | None, typer.Option(help="Query-key head dim [half for mLSTM, else equal].")]
Dtype = Annotated[str, typer.Option(help="Dtype of the inputs: bf16, fp16, fp32, fp64.")]
StateDtype = Annotated[str, typer.Option(help="Dtype of the states between chunks: fp32, bf16.")]
CausalFactor = Annotated[
    float | None, typer.Option(help="Share of the causal square computed, 0.5 to 1 [whole tiles].")
]
Gpu = Annotated[str, typer.Option(help="Accelerator; see `lrbench gpus`.")]
RoofChoice = Annotated[
    str,
    typer.Option("--roofs", help="spec; measured: the newest stored calibration; or a calibration's file or folder."),
]
Mode = Annotated[str, typer.Option(help="fw, bw, fwbw or step.")]
Results = Annotated[list[Path], typer.Argument(help="Result files or folders.")]
SomeDtype = Annotated[str | None, typer.Option("--dtype", help="Dtype [the one with most rows; counts: bf16].")]
SomeStateDtype = Annotated[str | None, typer.Option("--state-dtype", help="Dtype of states [fp32].")]
Tokens = Annotated[str | None, typer.Option(help="Batch x sequence length [the one with most rows; counts: 64k].")]
SomeHeadDim = Annotated[
    int | None, typer.Option("--head-dim", help="Value head dim [the one with most rows; counts: 512].")
]
SomeChannels = Annotated[
    int | None,
    typer.Option("--channels", help="Channels; with heads, heads x value head dim [the number with most rows]."),
]
SomeDModel = Annotated[
    int | None, typer.Option("--d-model", help="Input columns of a gated MLP [the number with most rows].")
]
SomeDFf = Annotated[
    int | None, typer.Option("--d-ff", help="Output columns of a gated MLP [the number with most rows].")
]
OneSeqLen = Annotated[str | None, typer.Option("--seq-len", help="Sequence length, where one is shown [8k].")]
Modes = Annotated[str | None, typer.Option("--mode", help="Modes, comma-separated [all; counts: one, fw].")]
Ops = Annotated[str | None, typer.Option("--op", help="Operations, comma-separated [all; counts: one, mlstm_sig].")]
Family = Annotated[
    str | None, typer.Option("--kernel", help="Family of kernels [of those with --op's rows, all; else the largest].")
]
Impls = Annotated[str | None, typer.Option("--impl", help="Implementations, comma-separated [all].")]
Width = Annotated[float | None, typer.Option(help="Width in inches; 3.3 for a column of text [as wide as it needs].")]
Dpi = Annotated[int, typer.Option(help="Pixels per inch of a PNG; 300 for print.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Figure file: .png, .svg or .pdf.")]


def parse_list(text: str | None) -> tuple[str, ...] | None:
    """Return "a,b" as ("a", "b"), None as None."""
    return None if text is None else parse_names(text)


def family_shown(frame: pd.DataFrame, ops: tuple[str, ...] | None, impls: tuple[str, ...] | None) -> str | None:
    """Return the family that a figure shows where none is named: the one with most rows, and say so; None: all.

    All where operations are named, whose families they may be, and where there is one only.
    """
    from ..results.select import families

    found = families(frame if impls is None else frame[frame["impl"].isin(impls)])
    if ops is not None or len(found) < 2:
        return None
    print(f"--kernel {found[0]}: the results hold {', '.join(found[1:])} as well", file=sys.stderr)
    return found[0]


def register(
    app: typer.Typer,
    *,
    show: Show,
    resolve_operation: ResolveOperation,
    implementations: ImplementationNames,
    why_unsupported: WhyUnsupported,
) -> None:
    """Add the analysis commands to ``app``.

    Args:
        show: prints rows; called with the format that the user chose.
        resolve_operation: turns a kernel family and ``--op`` into an operation's name.
        implementations: names what ``--impl`` takes for an operation.
        why_unsupported: says why an implementation cannot run (op, impl, mode, dtype, sizes) anywhere, or None.
    """

    @app.command("count")
    def count_command(
        kernel: Annotated[
            str, typer.Argument(help="Kernel family (tfla, lightning, rglru, wkv, gated-mlp), or an operation.")
        ],
        op: Op = None,
        formulation: Annotated[
            str | None, typer.Option(help="chunkwise, walk, parallel, scan, fused, ... [the operation's first].")
        ] = None,
        mode: Mode = "fw",
        seq_len: SeqLen = "8k",
        batch: Batch = 1,
        num_heads: Annotated[int, typer.Option(help="Heads.")] = 1,
        head_dim: HeadDim = 256,
        head_dim_qk: HeadDimQk = None,
        channels: Annotated[int, typer.Option(help="Channels, of operations without heads.")] = 1024,
        d_model: Annotated[int, typer.Option(help="Input columns of a gated MLP.")] = 4096,
        d_ff: Annotated[int, typer.Option(help="Output columns of a gated MLP.")] = 14336,
        chunk_size: Annotated[str | None, typer.Option(help="Chunk length, of chunkwise formulations [128].")] = None,
        non_causal: Annotated[bool, typer.Option("--non-causal", help="Attention to later keys as well.")] = False,
        causal_factor: CausalFactor = None,
        dtype: Dtype = "bf16",
        gate_dtype: Annotated[str | None, typer.Option(help="Dtype of the gates [the inputs'].")] = None,
        state_dtype: StateDtype = "fp32",
        counting: Annotated[str, typer.Option(help="detailed, or published: what a paper prints.")] = "detailed",
        factor: Annotated[list[str] | None, typer.Option(help="Cost of a function: exp=4; repeatable.")] = None,
        tile: Annotated[
            list[str] | None,
            typer.Option(
                help="Tile size of executed counts (walk, sweep, lightning1, ...): block_t=32; repeatable [sm_90's]."
            ),
        ] = None,
        format: Format = "table",
    ) -> None:
        """Count the FLOPs and bytes of a problem, part by part.

        Families and operations: tfla (mlstm_sig, mlstm_exp, simple_gla, retention, gated_retention, mamba2_ssd),
        lightning, rglru (rglru, linear_scan), wkv (wkv4), gated-mlp (gated_mlp); and attention, gla, selective_scan.
        """
        from .counts import TILED, Factors, count, default_formulation, is_chunked
        from .counts.executed import parse_tiles

        operation = _counted_operation(kernel, op, resolve_operation)
        chosen = formulation or default_formulation(operation, mode)
        length = parse_size(seq_len, "seq_len")
        chunk = min(128, length) if chunk_size is None else parse_size(chunk_size, "chunk_size")
        if tile and chosen not in TILED:
            raise ValueError(f"tile must be left out for the formulation {chosen}, got {tile[0]!r}")
        result = count(
            operation,
            formulation=chosen,
            mode=mode,
            seq_len=length,
            batch=check_size(batch, "batch"),
            num_heads=check_size(num_heads, "num_heads"),
            head_dim_qk=_head_dim_qk(operation, head_dim_qk, head_dim),
            head_dim_v=head_dim,
            channels=check_size(channels, "channels"),
            d_model=check_size(d_model, "d_model"),
            d_ff=check_size(d_ff, "d_ff"),
            chunk_size=chunk if is_chunked(operation, chosen) else None,
            dtype=dtype,
            gate_dtype=None if gate_dtype is None else _dtype(gate_dtype, "gate_dtype"),
            state_dtype=state_dtype,
            causal=not non_causal,
            causal_factor=causal_factor,
            counting=counting,
            factors=Factors.parse(factor) if factor else None,
            tiles=parse_tiles(tile) if tile else None,
        )
        if format == "json":
            show_object(result.as_dict())
            return
        rows: list[dict[str, Any]] = [{"part": name, "flops": value} for name, value in result.parts.items()]
        rows += [{"part": name, "bytes": value} for name, value in result.byte_parts.items()]
        rows.append({"part": "total", "flops": result.flops, "bytes": result.bytes})
        rows.append({"part": "on tensor cores", "flops": result.tensor_flops})
        rows.append({"part": "compulsory", "bytes": result.compulsory_bytes})
        if result.executed_tensor_flops is not None:
            rows.append(
                {
                    "part": "executed on tensor cores",
                    "flops": result.executed_tensor_flops,
                    "bytes": result.executed_bytes,
                }
            )
        show(rows, format)
        if format == "table":
            factor_in_words = "" if result.causal_factor is None else f", causal factor {result.causal_factor}"
            print(f"intensity {result.intensity:.4g} FLOP per byte{factor_in_words}")

    @app.command("chunk-size")
    def chunk_size_command(
        kernel: Kernel,
        op: Op = None,
        gpu: Gpu = "h100",
        mode: Mode = "fw",
        seq_len: SeqLen = "8k",
        batch: Batch = 8,
        num_heads: NumHeads = None,
        head_dim: HeadDim = 256,
        head_dim_qk: HeadDimQk = None,
        dtype: Dtype = "bf16",
        state_dtype: StateDtype = "fp32",
        causal_factor: CausalFactor = None,
        impl: Annotated[
            str | None,
            typer.Option(
                help="Implementation whose measurements are looked up [the operation's first]. Named, the choice is "
                "that of its launches, where these are known and were measured, not that of the chunkwise formulation."
            ),
        ] = None,
        results: Annotated[
            list[Path] | None, typer.Option(help="Result files or folders [the committed ones of --gpu].")
        ] = None,
        roofs: RoofChoice = "spec",
        format: Format = "table",
    ) -> None:
        """Show which chunk length is best: in FLOPs, in the runtime model, and as measured."""
        from ..results.store import committed_results
        from .model.chunk_size import chunk_size_report
        from .model.launch_model import stored_launch_fit

        operation = _counted_operation(kernel, op, resolve_operation)
        accelerator = chosen_accelerator(gpu, roofs)
        chosen = _implementation(operation, impl, implementations(operation))
        folders = tuple(results or committed_results())
        fit = stored_launch_fit(folders, operation, chosen, mode, dtype, device=accelerator.key, roofs=roofs)
        report = chunk_size_report(
            operation,
            accelerator,
            head_dim_v=head_dim,
            head_dim_qk=_head_dim_qk(operation, head_dim_qk, head_dim),
            seq_len=parse_size(seq_len, "seq_len"),
            batch=check_size(batch, "batch"),
            num_heads=None if num_heads is None else check_size(num_heads, "num_heads"),
            dtype=dtype,
            state_dtype=state_dtype,
            causal_factor=causal_factor,
            mode=mode,
            impl=chosen,
            results=tuple(results or committed_results(accelerator.key)),
            fit=fit,
            by_launches=impl is not None,
        )
        if format == "json":
            show_object({**report, "accelerator_part": accelerator.part, "roofs": roofs_in_words(accelerator)})
            return
        show(report["candidates"], format)
        if format == "table":
            print(_chunk_size_in_words(report, accelerator))

    @app.command("predict")
    def predict_command(
        kernel: Kernel,
        op: Op = None,
        impl: Annotated[str | None, typer.Option(help="Implementation [the operation's first].")] = None,
        gpu: Gpu = "h100",
        mode: Mode = "fw",
        seq_len: SeqLen = "8k",
        batch: Batch = 8,
        num_heads: NumHeads = None,
        head_dim: HeadDim = 256,
        head_dim_qk: HeadDimQk = None,
        channels: Annotated[int, typer.Option(help="Channels, of operations without heads.")] = 1024,
        d_model: Annotated[int, typer.Option(help="Input columns of a gated MLP.")] = 4096,
        d_ff: Annotated[int, typer.Option(help="Output columns of a gated MLP.")] = 14336,
        chunk_size: Annotated[str | None, typer.Option(help="Chunk length [128; outside packages: theirs].")] = None,
        dtype: Dtype = "bf16",
        state_dtype: StateDtype = "fp32",
        results: Annotated[
            list[Path] | None, typer.Option(help="Results to fit efficiencies to [the committed ones].")
        ] = None,
        fit: Annotated[bool, typer.Option(help="Fit to results, or take the model's bounds.")] = True,
        roofs: RoofChoice = "spec",
        format: Format = "table",
    ) -> None:
        """Predict a time on an accelerator: an interval, never a bare number."""
        from ..results.store import committed_results
        from .counts import count_case, formulation_of, is_chunked
        from .counts.formulations import has_heads, sizes_of
        from .model.prediction import NO_FIT, predict_case

        operation = _counted_operation(kernel, op, resolve_operation)
        accelerator = chosen_accelerator(gpu, roofs)
        _dtype(state_dtype, "state_dtype")
        chosen = _implementation(operation, impl, implementations(operation))
        what = f"{operation} {chosen}".strip()
        length = parse_size(seq_len, "seq_len")
        known = {
            "head_dim_qk": _head_dim_qk(operation, head_dim_qk, head_dim),
            "num_heads": max(1, 4096 // head_dim) if num_heads is None else check_size(num_heads, "num_heads"),
            "head_dim_v": head_dim,
            "channels": check_size(channels, "channels"),
            "d_model": check_size(d_model, "d_model"),
            "d_ff": check_size(d_ff, "d_ff"),
        }
        names = (*(("num_heads",) if has_heads(operation) else ()), *sizes_of(operation))
        sizes = {"batch": check_size(batch, "batch"), "seq_len": length, **{name: known[name] for name in names}}
        if is_chunked(operation, formulation_of(operation, chosen, mode, dtype)):
            chunk = None if chunk_size is None else parse_size(chunk_size, "chunk_size")
            if chunk is not None and chunk > length:
                raise ValueError(f"chunk_size must be <= seq_len = {length}, got {chunk}")
            # An outside package's own chunk length is known to the counts.
            default = {} if "." in chosen else {"chunk_size": min(128, length)}
            sizes |= default if chunk is None else {"chunk_size": chunk}
        elif chunk_size is not None:
            raise ValueError(f"chunk_size must be left out for {what} {mode}, got {chunk_size!r}")
        if chosen and (reason := why_unsupported(operation, chosen, mode, dtype, sizes)):
            raise ValueError(f"{what} cannot run this: {reason}")
        counted = count_case(operation, chosen, mode, dtype, state_dtype, sizes)
        if counted is None:
            raise ValueError(f"mode must be one that is counted for {what}, got {mode!r}")
        folders = tuple(results or committed_results()) if fit else ()
        case = (operation, chosen, mode, dtype, state_dtype, sizes)
        prediction = predict_case(case, counted, accelerator, folders, roofs=roofs)
        if results and fit and prediction.fit is None:
            raise ValueError(f"results must hold enough measured rows of {what} {mode} {dtype}, got fewer")
        row = {
            "op": operation,
            "impl": chosen or None,
            "mode": mode,
            "accelerator": accelerator.key,
            "accelerator_part": accelerator.part,
            "roofs": roofs_in_words(accelerator),
            **sizes,
            "low_ms": prediction.low_ms,
            "high_ms": prediction.high_ms,
            "interval": prediction.interval,
            "time_ms": prediction.time_ms,
            "flops_ms": prediction.model.flops_ms,
            "bytes_ms": prediction.model.bytes_ms,
            "model_lower_ms": prediction.model.lower_ms,
            "model_upper_ms": prediction.model.upper_ms,
            "bound": prediction.model.bound,
            **(prediction.fit.in_figures() if prediction.fit else NO_FIT),
        }
        if format == "json":
            show_object(row)
        elif format == "csv":
            show([row], format)
        else:
            texts = ("interval", "roofs")
            show([{"": name, "value": value} for name, value in row.items() if name not in texts], format)
            print(f"low to high: {row['interval']}")
            print(f"roofs: {row['roofs']}")

    @app.command("plot")
    def plot_command(
        kind: Annotated[
            str,
            typer.Argument(
                help="From results: runtime, memory, runtime-memory, chunk-size, trade-off, head-dim, rate. "
                "From the counts: flops, flop-optimal, runtime-optimal, intensity-optimal, intensity; model takes both."
            ),
        ],
        results: Annotated[
            list[Path] | None, typer.Argument(help="Result files or folders, for the kinds that show some.")
        ] = None,
        output: Output = Path("figure.png"),
        width: Width = None,
        dpi: Dpi = 130,
        kernel: Family = None,
        device: Annotated[str | None, typer.Option(help="Measured device, where results hold several.")] = None,
        dtype: SomeDtype = None,
        state_dtype: SomeStateDtype = None,
        tokens: Tokens = None,
        head_dim: SomeHeadDim = None,
        channels: SomeChannels = None,
        d_model: SomeDModel = None,
        d_ff: SomeDFf = None,
        seq_len: OneSeqLen = None,
        mode: Modes = None,
        op: Ops = None,
        impl: Impls = None,
        gpu: Annotated[str | None, typer.Option(help="Counts: accelerators, comma-separated [a100,h100,b200].")] = None,
        head_dim_qk: Annotated[
            int | None, typer.Option(help="Counts: query-key head dim [half for mLSTM, else equal].")
        ] = None,
        causal_factor: Annotated[
            float | None, typer.Option(help="Counts: share of the causal square, 0.5 to 1 [0.5].")
        ] = None,
    ) -> None:
        """Draw a figure: PNG, SVG or PDF by the file's ending.

        Figures from the counts show one problem: mlstm_sig forward, T = 8k, 64k tokens, head dims 256 and 512, unless
        said otherwise.
        """
        from ..results.select import load_results
        from .figures.plots import MODEL, RESULT_KINDS, check_kind, modelled_operation, plot
        from .figures.selection import Selection
        from .figures.style import check_format, save_figure
        from .figures.theory import Theory

        check_format(output)
        check_kind(kind, results=bool(results))
        unused: dict[str, object] = {
            "kernel": kernel,
            "device": device,
            "impl": impl,
            "channels": channels,
            "d_model": d_model,
            "d_ff": d_ff,
        }
        if kind in RESULT_KINDS:
            unused = {"gpu": gpu, "head_dim_qk": head_dim_qk, "causal_factor": causal_factor}
        for name, value in unused.items():
            if value is not None:
                raise ValueError(f"{name} must be left out for the figure {kind}, got {value!r}")
        selection, theory, frame = Selection(), Theory(), None
        if kind in RESULT_KINDS:
            ops, impls = parse_list(op), parse_list(impl)
            frame = load_results(results or [])
            selection = Selection(
                kernel=kernel or family_shown(frame, ops, impls),
                device=device,
                dtype=dtype,
                state_dtype=state_dtype,
                tokens=parse_size(tokens) if tokens else None,
                head_dim=head_dim,
                channels=channels,
                d_model=d_model,
                d_ff=d_ff,
                seq_len=parse_size(seq_len) if seq_len else None,
                modes=parse_list(mode),
                ops=ops,
                impls=impls,
            )
        else:
            frame = load_results(results) if results else None
            if kind == MODEL and frame is not None:
                op = op or modelled_operation(frame)
            theory = Theory(
                op=op or theory.op,
                gpus=theory.gpus if gpu is None else parse_names(gpu),
                head_dim=theory.head_dim if head_dim is None else head_dim,
                head_dim_qk=head_dim_qk,
                seq_len=parse_size(seq_len) if seq_len else theory.seq_len,
                tokens=parse_size(tokens) if tokens else theory.tokens,
                mode=mode or theory.mode,
                dtype=dtype or theory.dtype,
                state_dtype=state_dtype or theory.state_dtype,
                causal_factor=theory.causal_factor if causal_factor is None else causal_factor,
            )
        print(save_figure(plot(kind, frame, selection, theory, width=width), output, dpi=dpi))

    @app.command("roofline")
    def roofline_command(
        results: Results,
        gpu: Annotated[str, typer.Option(help="Accelerators, comma-separated; see `lrbench gpus`.")] = "h200",
        output: Output = Path("roofline.png"),
        width: Width = None,
        dpi: Dpi = 130,
        kernel: Family = None,
        dtype: SomeDtype = None,
        state_dtype: SomeStateDtype = None,
        tokens: Tokens = None,
        head_dim: SomeHeadDim = None,
        channels: SomeChannels = None,
        d_model: SomeDModel = None,
        d_ff: SomeDFf = None,
        seq_len: OneSeqLen = None,
        mode: Modes = None,
        op: Ops = None,
        impl: Impls = None,
        roofs: RoofChoice = "spec",
    ) -> None:
        """Draw the rooflines of accelerators with the points measured on them, and the share of the roof reached."""
        from ..results.select import load_results
        from .figures.roofline import roofline
        from .figures.selection import Selection
        from .figures.style import check_format, save_figure

        check_format(output)
        # One calibration cannot stand for several parts: a further accelerator is drawn as specified.
        accelerators = [chosen_accelerator(name, "spec" if n else roofs) for n, name in enumerate(parse_names(gpu))]
        ops, impls = parse_list(op), parse_list(impl)
        frame = load_results(results)
        selection = Selection(
            kernel=kernel or family_shown(frame, ops, impls),
            dtype=dtype,
            state_dtype=state_dtype,
            tokens=parse_size(tokens) if tokens else None,
            head_dim=head_dim,
            channels=channels,
            d_model=d_model,
            d_ff=d_ff,
            seq_len=parse_size(seq_len) if seq_len else None,
            modes=parse_list(mode),
            ops=ops,
            impls=impls,
        )
        print(save_figure(roofline(frame, accelerators, selection, width), output, dpi=dpi))


def _chunk_size_in_words(report: Mapping[str, Any], accelerator: Accelerator) -> str:
    """Return what the table of candidates comes to: the optima, what choosing wrongly costs, and memory at each."""
    at = {each["chunk_size"]: each for each in report["candidates"]}
    chosen, launches = report["runtime_optimal_feasible"], report["launches"]
    formulation = min(report["candidates"], key=lambda each: each["model_upper_ms"])
    lines = [
        f"best for FLOPs: {report['flop_optimal']:.1f}, of the feasible ones {report['flop_optimal_feasible']}",
        f"for the modelled time on {accelerator.part}: {report['runtime_optimal']:.1f}, of the feasible ones "
        f"{formulation['chunk_size']} ({formulation['model_memory_bytes'] / 2**30:.3g} GiB modelled), by the chunkwise "
        "formulation",
    ]
    if launches is not None:
        lines.append(
            f"of the feasible ones {launches['optimal_feasible']}, by the launches of {report['impl']} (fitted to "
            f"{launches['fitted_rows']} rows on {launches['fitted_on']}; on rows left out off by "
            f"{100 * launches['median_error']:.2g} % in the median, {100 * launches['worst_error']:.2g} % at worst)"
        )
    if report["measured_best"] is None:
        lines.append(f"not measured for {report['impl']} on {accelerator.key}")
        return "\n".join(lines)
    best = at[report["measured_best"]]
    held = best["peak_memory_bytes"]
    memory = "" if held is None else f" ({held / 2**30:.3g} GiB measured)"
    lost = f"{chosen} was not measured"
    if report["model"] == "launches" and at[chosen]["outdated"]:
        lost += f" with today's launches (outdated: {at[chosen]['measured_ms']:.4g} ms)"
    if report["regret_ms"] is not None:
        whose = "choice by launches" if report["model"] == "launches" else "modelled choice"
        lost = f"the {whose} takes {report['regret_ms']:.4g} ms more"
    lines.append(f"measured best: {report['measured_best']}{memory}; {lost}")
    return "\n".join(lines)


def _counted_operation(kernel: str, op: str | None, resolve_operation: ResolveOperation) -> str:
    """Return the operation to count: one of the family's, or one that only outside packages compute."""
    from ..kernels import FAMILIES
    from ..kernels.baselines.operations import OPERATIONS
    from .counts.formulations import FORMULATIONS, one_of

    resolved = resolve_operation(kernel, op)
    one_of("op", resolved, tuple(FORMULATIONS))
    family = FAMILIES.get(kernel, (resolved,))
    if resolved not in (*family, *OPERATIONS):
        raise ValueError(f"op must be one of {', '.join(family)} for {kernel}, got {resolved!r}")
    return resolved


def chosen_accelerator(gpu: str, roofs: str) -> Accelerator:
    """Return the accelerator of ``--gpu`` with the roofs of ``--roofs``; say on stderr what a short name stands for."""
    from .accelerators.known import canonical_key, get_accelerator
    from .accelerators.roofs import with_roofs

    accelerator = with_roofs(get_accelerator(gpu), roofs)
    if canonical_key(gpu) != gpu.strip().lower().replace("-", "_"):
        print(f"--gpu {gpu} means {accelerator.key}: {accelerator.part}", file=sys.stderr)
    if roofs != "spec":
        print(f"--roofs {roofs}: {accelerator.source}", file=sys.stderr)
    return accelerator


def roofs_in_words(accelerator: Accelerator) -> str:
    """Return which rates an accelerator stands for: the specification, or which measurement."""
    return accelerator.source if accelerator.is_measured or accelerator.key == "cpu" else "specification"


def _implementation(op: str, impl: str | None, known: Sequence[str]) -> str:
    """Return the implementation asked for, else the first; "" where there is none but what the counts say."""
    if impl is None:
        return known[0] if known else ""
    if impl not in known:
        raise ValueError(f"impl must be {'one of ' + ', '.join(known) if known else 'left out'} for {op}, got {impl!r}")
    return impl


def _dtype(name: str, option: str) -> str:
    from .counts.formulations import one_of
    from .counts.model import DTYPE_BYTES

    one_of(option, name, tuple(DTYPE_BYTES))
    return name


def _head_dim_qk(op: str, head_dim_qk: int | None, head_dim: int) -> int:
    """Return the query-key head dim, the default where none is given; ValueError for a size that is none."""
    from ..kernels.baselines import get_operation

    check_size(head_dim, "head_dim")
    default = get_operation(op).default_head_dim_qk(head_dim)
    return default if head_dim_qk is None else check_size(head_dim_qk, "head_dim_qk")


def show_object(value: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    import json

    print(json.dumps(value, indent=2, allow_nan=False))
