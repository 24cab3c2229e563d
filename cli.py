"""The command line: parses, calls one function per command, prints. Heavy modules are imported inside commands."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from .analysis.cli_commands import register
from .analysis.report.command import register as register_report
from .bench.gate_commands import register as register_gate
from .bench.mlp_commands import register as register_mlp

if TYPE_CHECKING:
    from .bench.plan import PlannedCase

app = typer.Typer(
    name="lrbench",
    help="Benchmark sequence-mixing kernels and explain the numbers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

T = TypeVar("T")

Format = Annotated[str, typer.Option("--format", help="table, json or csv.")]


@app.callback()
def _root() -> None:
    """Benchmark sequence-mixing kernels and explain the numbers."""


@app.command()
def sweep(
    kernel: Annotated[str, typer.Option(help="Kernel family; `lrbench kernels` lists them.")] = "tfla",
    gpu: Annotated[str | None, typer.Option(help="Accelerator the analysis is about; see `lrbench gpus`.")] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="quick, default, full, ...; `lrbench presets` lists them [default on a GPU, else quick]."),
    ] = None,
    op: Annotated[str | None, typer.Option(help="Operations, comma-separated.")] = None,
    impl: Annotated[str | None, typer.Option(help="Implementations, comma-separated.")] = None,
    baselines: Annotated[str | None, typer.Option(help="Baselines or packages, or none [all].")] = None,
    seq_len: Annotated[str | None, typer.Option(help="Sequence lengths: 1k,8k (1k = 1024).")] = None,
    head_dim: Annotated[str | None, typer.Option(help="Value head dims.")] = None,
    head_dim_qk: Annotated[
        str | None, typer.Option(help="Query-key head dims [half the value's for mLSTM, equal elsewhere].")
    ] = None,
    chunk_size: Annotated[str | None, typer.Option(help="Chunk lengths.")] = None,
    num_heads: Annotated[int | None, typer.Option(min=1, help="Heads [embedding dim / head dim].")] = None,
    channels: Annotated[str | None, typer.Option(help="Channels, of operations without heads.")] = None,
    d_model: Annotated[str | None, typer.Option(help="Model dims of an MLP.")] = None,
    d_ff: Annotated[str | None, typer.Option(help="Hidden dims of an MLP [as the preset, else 3.5 d_model].")] = None,
    tokens: Annotated[str | None, typer.Option(help="Batch times sequence length, held constant.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Batch, in place of --tokens.")] = None,
    mode: Annotated[str | None, typer.Option(help="fw, fwbw, bw, step.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32, fp64.")] = None,
    state_dtype: Annotated[str | None, typer.Option(help="Dtypes of the states between chunks: fp32, bf16.")] = None,
    budget: Annotated[float | None, typer.Option(min=0.0, help="Seconds of timing per case.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds until a case is ended.")] = 120.0,
    time_limit: Annotated[
        float | None,
        typer.Option(min=0.0, help="Seconds after which no case starts; --resume runs the rest."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out cases --output has from this commit.")] = False,
    jobs: Annotated[int | None, typer.Option(min=0, help="Processes that compile ahead on a GPU [cores / 2].")] = None,
    executor: Annotated[str, typer.Option(help="local or ray.")] = "local",
    devices: Annotated[int, typer.Option(min=1, help="GPUs to spread the implementations over.")] = 1,
    output: Annotated[Path, typer.Option(help="Folder of the parquet file.")] = Path("results/local"),
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 on a crash, an error or a wrong result.")] = False,
    calibrate: Annotated[
        bool | None, typer.Option(help="Measure the device's roofs first, beside the rows [on a GPU].")
    ] = None,
    format: Format = "table",
) -> None:
    """Measure a kernel family and its baselines over sequence length, head dim and chunk length."""
    from .bench import commands, plan

    request = plan.parse_request(
        kernel=kernel,
        preset=preset,
        op=op,
        impl=impl,
        baselines=baselines,
        mode=mode,
        dtype=dtype,
        state_dtype=state_dtype,
        seq_len=seq_len,
        head_dim=head_dim,
        head_dim_qk=head_dim_qk,
        chunk_size=chunk_size,
        num_heads=num_heads,
        channels=channels,
        d_model=d_model,
        d_ff=d_ff,
        tokens=tokens,
        batch=batch,
    )
    code = commands.sweep_command(
        request,
        accelerator=gpu,
        output=output,
        timeout_s=timeout,
        budget_s=budget,
        time_limit_s=time_limit,
        resume=resume,
        jobs=jobs,
        executor=executor,
        devices=devices,
        strict=strict,
        calibrate=calibrate,
        output_format=format,
    )
    raise typer.Exit(code)


@app.command()
def verify(
    kernel: Annotated[str, typer.Option(help="Kernel family.")] = "tfla",
    op: Annotated[str | None, typer.Option(help="Operations, comma-separated [all].")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds until a case is ended.")] = 120.0,
    format: Format = "table",
) -> None:
    """Check every implementation that runs here against its float64 reference; exit 1 when one is wrong."""
    from .bench import commands
    from .results import arguments

    ops = _given(arguments.parse_names, op, "--op")
    raise typer.Exit(commands.verify_command(kernel, ops, timeout_s=timeout, output_format=format))


@app.command()
def kernels(format: Format = "table") -> None:
    """List kernel families, operations and implementations, ours and outside ones."""
    from .bench import display, inventory

    display.show(inventory.kernel_rows(), format)


@app.command("results")
def results_command(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="RESULTS", help="Result files or folders [the committed ones].")
    ] = None,
    format: Annotated[str, typer.Option("--format", help="table, json, csv or markdown.")] = "table",
) -> None:
    """List stored results: files, implementations with their cases, commits and versions, and what is missing."""
    from .bench import display, inventory
    from .results import contents, store

    display.check_format(format, more=("markdown",))
    named = paths or store.committed_results()
    implementations = contents.implementation_rows(named, inventory.declared_implementations())
    if format == "markdown":
        print(contents.as_markdown(contents.file_rows(named), implementations), end="")
        return
    if format == "table":
        display.show(contents.file_rows(named), "table")
        print()
    display.show(implementations, format)


@app.command()
def presets(
    kernel: Annotated[str | None, typer.Option(help="Kernel family [all].")] = None, format: Format = "table"
) -> None:
    """List the presets of each kernel family and the axes they stand for."""
    from .bench import display, inventory

    display.show(inventory.preset_rows(kernel), format)


@app.command()
def gpus(format: Format = "table") -> None:
    """List the accelerators the analysis knows, with their rates and sources."""
    from .bench import commands

    commands.gpus_command(output_format=format)


@app.command()
def calibrate(
    output: Annotated[
        Path, typer.Option(help="Folder of roofs.parquet, or a parquet file; rows are added to it.")
    ] = Path("results/local"),
    format: Format = "table",
) -> None:
    """Measure this device's roofs: copy, matrix products per dtype, vector rate; beside the specification."""
    from .bench import commands

    commands.calibrate_command(output=output, output_format=format)


@app.command()
def profile(
    kernel: Annotated[str, typer.Option(help="Kernel family.")] = "tfla",
    op: Annotated[str | None, typer.Option(help="Operations, comma-separated [the family's first].")] = None,
    impl: Annotated[str | None, typer.Option(help="Implementations, comma-separated [the first].")] = None,
    seq_len: Annotated[str | None, typer.Option(help="Sequence lengths: 1k,8k (1k = 1024) [8k].")] = None,
    head_dim: Annotated[str | None, typer.Option(help="Value head dims [256].")] = None,
    head_dim_qk: Annotated[str | None, typer.Option(help="Query-key head dims [as in a sweep].")] = None,
    chunk_size: Annotated[str | None, typer.Option(help="Chunk lengths [256].")] = None,
    num_heads: Annotated[int | None, typer.Option(min=1, help="Heads [4096 / head dim].")] = None,
    channels: Annotated[str | None, typer.Option(help="Channels, of operations without heads [1024].")] = None,
    d_model: Annotated[str | None, typer.Option(help="Model dims of an MLP [4096].")] = None,
    d_ff: Annotated[str | None, typer.Option(help="Hidden dims of an MLP [3.5 d_model].")] = None,
    tokens: Annotated[str | None, typer.Option(help="Batch times sequence length [64k].")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Batch, in place of --tokens.")] = None,
    mode: Annotated[str, typer.Option(help="fw, fwbw, bw, step.")] = "fw",
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32, fp64.")] = "bf16",
    state_dtype: Annotated[str | None, typer.Option(help="Dtypes of the states between chunks: fp32, bf16.")] = None,
    ncu: Annotated[str | None, typer.Option(help="Nsight Compute's ncu [found on PATH or where it installs].")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds until the whole run is ended.")] = 900.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the ncu command and do not run it.")] = False,
    output: Annotated[Path, typer.Option(help="Folder of the parquet file.")] = Path("results/local"),
    format: Format = "table",
) -> None:
    """Count cases with Nsight Compute: tensor FLOPs and device-memory bytes beside the counted ones."""
    from .bench import commands, plan

    request = plan.parse_request(
        kernel=kernel,
        preset="one",
        op=op,
        impl=impl,
        mode=mode,
        dtype=dtype,
        state_dtype=state_dtype,
        seq_len=seq_len,
        head_dim=head_dim,
        head_dim_qk=head_dim_qk,
        chunk_size=chunk_size,
        num_heads=num_heads,
        channels=channels,
        d_model=d_model,
        d_ff=d_ff,
        tokens=tokens,
        batch=batch,
    )
    code = commands.profile_command(
        request, output=output, ncu_path=ncu, timeout_s=timeout, dry_run=dry_run, output_format=format
    )
    raise typer.Exit(code)


@app.command()
def doctor(format: Format = "table") -> None:
    """Show this machine, the packages that are here or missing, and known failures that apply."""
    from .bench import commands

    commands.doctor_command(output_format=format)


@app.command()
def bars(
    name: Annotated[str | None, typer.Argument(help="A family of bars, or a name that --list prints [all].")] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Samples of every case.")] = 20,
    only: Annotated[str | None, typer.Option(help="Only problems whose label contains this text.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the rows.")] = Path("results/local"),
    list_only: Annotated[bool, typer.Option("--list", help="Print the bars and measure nothing.")] = False,
    format: Format = "table",
) -> None:
    """Measure the project's speed bars beside whom they name: exit 1 where one is missed, 2 where none is measured."""
    from .bench import bars, display

    display.check_format(format)
    declared = bars.load_bars()
    problems = bars.select(declared, name, only)
    if list_only:
        display.show(bars.list_rows(problems), format)
        return

    def started(item: PlannedCase) -> None:
        display.note(f"{item.case.impl}, {item.case.mode}, {item.case.chunk_size or 'no'} chunk")

    verdicts = []
    for entries, found in bars.measure_bars(
        declared, problems, rounds=rounds, output=output, started=started, note=display.note
    ):
        verdicts += found
        if format == "table":
            display.show(bars.entry_rows(entries), format)
            display.show([verdict.row() for verdict in found], format)
    if format != "table":
        display.show([verdict.row() for verdict in verdicts], format)
    if verdicts and all(verdict.ratio is None for verdict in verdicts):
        raise typer.Exit(2)
    raise typer.Exit(0 if all(verdict.held for verdict in verdicts) else 1)


def _given(parse: Callable[[str, str], T], text: str | None, option: str) -> T | None:
    """What an option says, None where it is not given."""
    return None if text is None else parse(text, option)


def _show(rows: Sequence[Mapping[str, Any]], output_format: str) -> None:
    from .bench import display

    display.show(rows, output_format)


def _resolve_operation(kernel: str, op: str | None) -> str:
    from .bench import inventory

    return inventory.resolve_operation(kernel, op)


def _implementations(op: str) -> list[str]:
    from . import kernels
    from .kernels import baselines

    here = any(op in ops for ops in kernels.FAMILIES.values())
    ours = [impl.name for impl in kernels.get_operation(op).implementations] if here else []
    return ours + [baseline.name for baseline in baselines.BASELINES if baseline.op == op]


def _why_unsupported(op: str, impl: str, mode: str, dtype: str, sizes: Mapping[str, int]) -> str | None:
    from .bench import inventory

    return inventory.why_unsupported(op, impl, mode, dtype, sizes)


register(
    app,
    show=_show,
    resolve_operation=_resolve_operation,
    implementations=_implementations,
    why_unsupported=_why_unsupported,
)
register_gate(app)
register_mlp(app)
register_report(app)


def main() -> None:
    """Run the command line: exit 0 when all is well, 1 when a check failed, 2 on bad usage or input, 130 on Ctrl-C."""
    if sys.stdout is None:
        # Closed by the caller (>&-): what is printed is not wanted. print takes None, csv and others do not.
        sys.stdout = io.StringIO()
    try:
        app()
    except (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError) as error:
        print(f"lrbench: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # Whoever read the output has left, as head does: what a shell sees of any program then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except (OSError, RuntimeError) as error:
        print(f"lrbench: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
