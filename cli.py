"""The command line: every command parses, calls one function and prints. Heavy modules are imported inside commands."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import io
import itertools
import math
import os
import re
import shlex
import signal
import sys
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .bench import note
from .bench.request import FOLDER, GPU, LOCAL, TIMEOUT, Axes, Option, Request, SweepOptions, TimeOptions
from .results.arguments import one_of, parse_names, parse_shard, parse_size

if TYPE_CHECKING:
    import pandas as pd

    from .analysis.accelerators.known import Accelerator
    from .analysis.figures.selection import Selection
    from .analysis.model.answers import Question

MEASURE, EXPLAIN, DRAW, COMPARE, LIST = "Measure", "Explain", "Draw and report", "Compare runs", "List what is here"
"""The groups of `lrbench --help`."""


def _write_sections(formatter: Any, order: Sequence[str], records: Iterable[tuple[str, tuple[str, str]]]) -> None:
    """Write (title, (name, help)) as sections of a help text: those of ``order`` first, in that order."""
    sections: dict[str, list[tuple[str, str]]] = {title: [] for title in order}
    for title, record in records:
        sections.setdefault(title, []).append(record)
    for title, lines in sections.items():
        if lines:
            with formatter.section(title):
                formatter.write_dl(lines)


class _Command(TyperCommand):
    """A command whose help has its options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options under the titles that they were declared with."""
        usual = {"argument": "Arguments", "option": "Options"}
        records = [(p, record) for p in self.get_params(ctx) if (record := p.get_help_record(ctx))]
        titled = [(getattr(p, "rich_help_panel", None) or usual[p.param_type_name], record) for p, record in records]
        _write_sections(formatter, list(usual.values()), titled)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the example as a line to copy, however narrow the terminal."""
        formatter.write(f"\nExample:\n  lrbench {self.epilog}\n")


class _Group(TyperGroup):
    """The command line itself: its help, which it prints without arguments, has the commands in groups."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take no arguments for --help, whose text goes to standard output with status 0."""
        return super().parse_args(ctx, args or ["--help"])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under the titles that they were declared with."""
        titled = [
            (getattr(found, "rich_help_panel", None) or "Commands", (name, found.get_short_help_str(200)))
            for name, found in self.commands.items()
        ]
        _write_sections(formatter, (MEASURE, EXPLAIN, DRAW, COMPARE, LIST), titled)


app = typer.Typer(
    name="lrbench",
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        print(f"lrbench {__version__}")
        raise typer.Exit


@app.callback()
def _every_command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Benchmark sequence-mixing kernels and explain the numbers."""


baseline_app = typer.Typer(help="Promote a run to the baseline that `lrbench check` compares with.", cls=_Group)
app.add_typer(baseline_app, name="baseline", rich_help_panel=COMPARE)


def option(help: str, *flags: str, **more: Any) -> Any:
    """Return an option as Typer takes it; its flag is the parameter's name where none is given."""
    return typer.Option(*flags, help=help, **more)


def files(which: str = "") -> Any:
    """Return an argument of result files or folders."""
    return typer.Argument(metavar="RESULTS", help=f"Result files or folders{which}.")


size = functools.partial(Option, parse=parse_size)
"""An option of one size, which may be written as 8k."""


def _as_typed(name: str, of: Any, said: Option) -> Any:
    """Return a field's or parameter's option as Typer takes it.

    A switch has no --no- form unless it may be left open.
    """

    def parsed(given: Any) -> Any:
        return given if given is None or said.parse is None else said.parse(given, said.flag or name)

    flag, kind = said.flag or f"--{name.removesuffix('_s').replace('_', '-')}", of if said.parse is None else str | None
    flags = (f"{flag}/--no-{flag[2:]}" if of == bool | None else flag, *said.also)
    more: dict[str, Any] = {"help": said.help, "rich_help_panel": said.panel, "min": said.least}
    more["show_default"] = said.says_default
    return Annotated[kind, typer.Option(*flags, callback=parsed, **more)]


def command(
    panel: str, example: str, *, of: typer.Typer = app, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a function to the command line, with the fields of its dataclass parameters as options of their own.

    Args:
        panel: the group of commands in the help.
        example: what follows `lrbench` in the example at the end of the command's help.
        defaults: of fields, in place of those that they were declared with.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        groups: dict[str, Any]
        groups = {p.name: p.annotation for p in signature.parameters.values() if dataclasses.is_dataclass(p.annotation)}
        options = {name: _options(group) for name, group in groups.items()}

        @functools.wraps(function)
        def run(**given: Any) -> None:
            for name, group in groups.items():
                given[name] = group(**{each: given.pop(each) for each in options[name]})
            if POSITION in given:
                first, other = given.pop(POSITION), given["kernel"]
                if first and other and first != other:
                    raise ValueError(f"kernel must be named once, got {first} and --kernel {other}")
                given["kernel"] = first or other
            if panel in (EXPLAIN, DRAW) and not given.get("run"):
                # Starting numpy's threads takes a tenth of a second, and fits of a few constants do not use them.
                os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
            try:
                try:
                    function(**given)
                finally:
                    sys.stdout.flush()
            except BrokenPipeError:
                # The reader closed the pipe, as head does: end as other programs do.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(128 + signal.SIGPIPE) from None

        parameters = []
        for each in signature.parameters.values():
            keyword = each.replace(kind=each.KEYWORD_ONLY)
            declared = getattr(each.annotation, "__metadata__", (None,))[0]
            if isinstance(declared, Option):
                keyword = keyword.replace(annotation=_as_typed(each.name, each.annotation.__origin__, declared))
            if each.annotation == Kernel:
                parameters += [keyword.replace(name=POSITION, annotation=Position), keyword]
            elif each.name not in groups:
                parameters.append(keyword)
            for name, (annotation, default) in options.get(each.name, {}).items():
                parameters.append(
                    keyword.replace(name=name, annotation=annotation, default=defaults.get(name, default))
                )
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        of.command(function.__name__.replace("_", "-"), cls=_Command, rich_help_panel=panel, epilog=example)(run)
        return function

    return add


POSITION = "kernel_or_op"
"""The positional parameter that means the same as --kernel."""

Position = Annotated[
    str | None,
    typer.Argument(
        metavar="KERNEL",
        help="Family (tfla, lightning, rglru, wkv, delta, gated-mlp) or operation [tfla; all where a command lists].",
    ),
]
Kernel = Annotated[str | None, typer.Option("--kernel", help="The same, as an option.")]
"""A family or an operation. A command with this option takes it as its first argument too."""


def _options(group: Any) -> dict[str, tuple[Any, Any]]:
    """Return name -> (what Typer takes, default) of the fields of a dataclass that are options."""
    found = {}
    hints = typing.get_type_hints(group, include_extras=True)
    for each in dataclasses.fields(group):
        said = getattr(hints[each.name], "__metadata__", (None,))[0]
        if isinstance(said, Option):
            default = None if each.default is dataclasses.MISSING else each.default
            found[each.name] = _as_typed(each.name, hints[each.name].__origin__, said), default
    return found


def _format(*more: str) -> Any:
    """Return the option ``--format``, which is checked before any work is done."""
    known = ("table", "json", "csv", *more)

    def check(given: str) -> str:
        if given == "parquet":
            raise ValueError(
                "format parquet is what --output's ending says: type lrbench results --rows TERMS --output rows.parquet"
            )
        one_of("format", given, known)
        return given

    return option(f"{', '.join(known[:-1])} or {known[-1]}.", callback=check)


Format = Annotated[str, _format()]
TableFormat = Annotated[str, _format("markdown")]
Every = Annotated[bool, option("Show everything; --format json and csv always do.", "--all")]
Preset = Annotated[str | None, option("quick, full, ...: `lrbench presets` [default or train on a GPU, else quick].")]
Gpu = Annotated[str | None, GPU]
ROOFS = "spec; measured: the newest stored calibration; or a calibration's file or folder"
RoofChoice = Annotated[str, option(f"{ROOFS}.")]
CausalFactor = Annotated[float | None, option("Share of the causal square computed, 0.5 to 1 [whole tiles].")]
Timeout = Annotated[float, TIMEOUT]
Folder = Annotated[Path, FOLDER]
Pool = Annotated[
    list[Path] | None,
    option("Result files or folders that KEY:VALUE terms select from [the committed ones; run: results/local too]."),
]
Fitted = Annotated[list[Path] | None, option("Result files or folders to answer from [the committed ones].")]
Figure = Annotated[Path, option("Figure file: .png, .svg or .pdf.", "--output", "-o")]
Width = Annotated[float | None, option("Width in inches; 3.3 for a column of text [as wide as it needs].")]
Dpi = Annotated[int, option("Pixels per inch of a PNG; 300 for print.")]


def _request(axes: Axes, kernel: str | None, impls: tuple[str, ...] | None, **more: Any) -> Request:
    """Return what the planner takes."""
    from .bench.plan import named_family

    kernel, ops = named_family(kernel, axes.ops)
    return Request(kernel=kernel, impls=impls, **dataclasses.asdict(axes) | {"ops": ops}, **more)


@dataclass(frozen=True, kw_only=True)
class OneProblem:
    """The problem that count, best, predict and chunk-size answer about."""

    op: Annotated[str | None, Option("Operation [the family's first].")]
    mode: Annotated[str, Option("fw, bw, fwbw or step.")] = "fw"
    like: Annotated[
        str | None, Option("Sizes of a published model: mamba2-2.7b, xlstm-7b, ... [the operation's authors'].")
    ]
    seq_len: Annotated[
        int | None,
        size("Sequence length [8k = 8192]; of mode step the context, of documents their sum.", also=("--context",)),
    ]
    batch: Annotated[int | None, size("Batch [8; of documents 1].")]
    documents: Annotated[
        str | None,
        Option("Packed documents: 64, of drawn lengths; 64x1024 or 300+700; or a file with a length a line."),
    ]
    embedding: Annotated[int | None, size("Heads x value head dim; channels; model dim [4096; RG-LRU 1024, WKV 2048].")]
    num_heads: Annotated[int | None, size("Heads [embedding / head dim].")]
    num_heads_qk: Annotated[int | None, Option("Heads of queries and keys [as many].", parse_size, "--qk-heads")]
    head_dim: Annotated[int | None, size("Value head dim [embedding / heads; without heads the authors'].")]
    head_dim_qk: Annotated[
        int | None, size("Query-key head dim, the state's size [the authors' share].", also=("--state-size",))
    ]
    channels: Annotated[int | None, size("Channels, of operations without heads [embedding].")]
    d_model: Annotated[int | None, size("Input columns of a gated MLP [embedding].")]
    d_ff: Annotated[int | None, size("Output columns of a gated MLP [3.5 d_model].")]
    dtype: Annotated[
        str | None,
        Option("Dtype of the inputs: bf16, fp16, fp32, fp64 [bf16; fp16 if the GPU has no bf16; fp32 on a CPU]."),
    ]
    state_dtype: Annotated[str, Option("Dtype of the states between chunks: fp32, bf16.")] = "fp32"

    def operation(self, kernel: str | None) -> str:
        """Return the operation meant."""
        from .bench.show.inventory import counted_operation
        from .kernels import FAMILIES
        from .kernels.baselines.published import model_operation

        if self.like is not None and self.op is None and (kernel is None or kernel in FAMILIES):
            kernel = model_operation(self.like, kernel) or kernel
        return counted_operation(kernel or self.op or "tfla", self.op)

    def operations(self, kernel: str | None) -> tuple[str, ...] | None:
        """Return the operations meant where several may be: a family's are all of its own, and none named are all."""
        from .kernels import FAMILIES

        if self.op is None and (kernel is None or kernel in FAMILIES):
            return FAMILIES.get(kernel or "")
        return (self.operation(kernel),)

    def given(self) -> dict[str, Any]:
        """Return what :func:`.kernels.baselines.published.problem_sizes` takes."""
        others = ("op", "dtype", "state_dtype", "head_dim")
        return {name: size for name, size in vars(self).items() if name not in others} | {"head_dim_v": self.head_dim}

    def ask(
        self, kernel: str | None, accelerator: Accelerator, results: Sequence[Path] | None, **more: Any
    ) -> Question:
        """Return the question of commands that answer from results."""
        from .analysis.model.answers import ask
        from .kernels.baselines.published import problem_sizes

        op = self.operation(kernel)
        more |= {"mode": self.mode, "dtype": self.dtype or accelerator.usual_dtype, "state_dtype": self.state_dtype}
        sizes = problem_sizes(op, **self.given())
        length = problem_sizes(op, **self.given() | {"mode": "fw"})["seq_len"]
        question = ask(op, sizes, accelerator=accelerator, results=results or (), length=length, **more)
        if question.stands_in:
            note(f"no rows of {self.mode} {question.dtype}: times are estimated from rows of {question.stands_in}")
        if vendor := question.without_vendor:
            note(f"no row of {vendor}'s GPUs stands behind times of {accelerator.key}: they may be far off")
        return question


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The rows that a figure shows. What they have several values of must be given."""

    kernel: Annotated[str | None, Option("Family of kernels, or an operation.")]
    dtype: Annotated[str | None, Option("Dtype [counts: bf16].")]
    state_dtype: Annotated[str | None, Option("Dtype of states [counts: fp32].")]
    tokens: Annotated[int | None, size("Batch x sequence length [counts: 64k].")]
    batch: Annotated[int | None, size("Batch, held in place of --tokens.")]
    head_dim: Annotated[
        int | None, size("Value head dim, of the operations that were measured there [counts: 512; others: their own].")
    ]
    head_dim_qk: Annotated[int | None, size("Query-key head dim, as --head-dim [counts: half for mLSTM, else equal].")]
    channels: Annotated[int | None, size("Channels; with heads, heads x value head dim.")]
    d_model: Annotated[int | None, size("Input columns of a gated MLP.")]
    d_ff: Annotated[int | None, size("Output columns of a gated MLP.")]
    seq_len: Annotated[int | None, size("Length, where one is shown [counts: 8k].")]
    mode: Annotated[str | None, Option("Modes, comma-separated [all calls; counts: one, fw].")]
    op: Annotated[str | None, Option("Operations, comma-separated [all; counts: one, mlstm_sig].")]
    impl: Annotated[str | None, Option("Implementations, comma-separated [the eight that say most].")]
    every: Annotated[bool, Option("Every implementation.", flag="--all")] = False

    def selection(self, results: Sequence[Path], device: str | None = None) -> tuple[pd.DataFrame, Selection]:
        """Return the results and which of their rows are meant; ValueError for an option that names nothing."""
        from .analysis.accelerators.known import canonical_key
        from .analysis.figures.selection import Selection
        from .bench.plan import named_family
        from .results.select import load_results

        modes, ops, impls = (_names(getattr(self, name), name) for name in ("mode", "op", "impl"))
        frame, kernel = load_results(results), self.kernel
        if kernel is not None and kernel in set(frame["op"]) - set(frame["kernel"]):
            # An operation's name stands for it in place of a family's.
            kernel, ops = None, named_family(kernel, ops)[1]
        device = device and canonical_key(device)
        axes = {name: value for name, value in vars(self).items() if name not in ("kernel", "mode", "op", "impl")}
        return frame, Selection(kernel=kernel, device=device, modes=modes, ops=ops, impls=impls, **axes)


@command(MEASURE, "sweep --kernel mlstm_sig --seq-len 1k,8k --head-dim 256 --mode fw,fwbw")
def sweep(
    context: typer.Context,
    axes: Axes,
    kernel: Kernel = None,
    preset: Preset = None,
    impl: Annotated[str | None, option("Implementations, comma-separated, in their order [all that run here].")] = None,
    baselines: Annotated[str | None, option("Baselines or packages, or none [all].")] = None,
    sweeps: Annotated[
        str | None,
        option(
            "Run a TOML of sweeps, not KERNEL and axes: a path, or triton, sustained, calibration, readme or documents."
        ),
    ] = None,
    triton: Annotated[
        list[str] | None,
        option("Measure each case with several Tritons in turn: here or VERSION=FOLDER; give it once for each."),
    ] = None,
    sustained: Annotated[bool, Option("Also load the GPU with each case for 5 to 7 s: time then, energy.")] = False,
    shard: Annotated[str, option("I/N: the I-th of N parts of the cases, for a machine of its own.")] = "1/1",
    *,
    how: SweepOptions,
    dry_run: Annotated[
        bool, Option("Print what would run and for how long (--all: every case); measure nothing.")
    ] = False,
    every: Every = False,
    strict: Annotated[bool, Option("Exit 1 on a crash, an error or a wrong result.")] = False,
    format: Format = "table",
) -> None:
    """Measure a kernel family and its baselines over sequence length, head dim and chunk length.

    Exit 1 if no case could be timed or cases are left.
    """
    from .bench.drive import session
    from .bench.environment import find_tritons
    from .bench.show import display

    how = dataclasses.replace(how, tritons=find_tritons(triton or ()))
    if sweeps is not None:
        from .bench.drive.complete import load_sweeps, sweeps_file

        own = ("kernel", POSITION, "preset", "impl", "baselines", "shard", *(f.name for f in dataclasses.fields(axes)))
        _refuse_given(context, *own, why="cannot be given with --sweeps, whose file says what is measured")
        requests = load_sweeps(sweeps_file(sweeps))
    else:
        names, others = _names(impl, "--impl"), _names(baselines, "--baselines")
        requests = (_request(axes, kernel, names, preset=preset, baselines=others, shard=parse_shard(shard)),)
    requests = tuple(dataclasses.replace(each, sustained=sustained or each.sustained) for each in requests)
    if dry_run:
        rows = session.planned_rows(requests, how)
        if format == "table" and not every:
            display.show_planned(rows)
        else:
            display.show(rows, format)
        return
    outcome = session.run_sweep(requests, how)
    records = outcome.resumed + outcome.records
    with display.reader_may_leave():
        if format == "table" and how.tritons:
            from .analysis.check.matrix import triton_sides
            from .bench.show.shown import show_matrix

            show_matrix(triton_sides(map(dataclasses.asdict, records)), "table")
        elif format == "table":
            display.print_summary(records)
        else:
            display.show(list(map(dataclasses.asdict, records)), format)
    raise typer.Exit(session.exit_code(outcome, strict=strict))


@command(MEASURE, "time my_module:function --arg 'x=bf16[8,8192,1024]'")
def time(
    function: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="A function of yours.")],
    arg: Annotated[
        list[str] | None,
        option("[NAME=]DTYPE[SIZES], a number or a text; repeatable [get_inputs() of the module, if it takes any]."),
    ] = None,
    *,
    how: TimeOptions,
    format: Format = "table",
) -> None:
    """Measure a function of yours: time, memory, error, FLOPs and bytes, as a row that compare and check take.

    Exit 1 if the row's status is not ok. In Python: from lrbench import measure.
    """
    from .bench.drive.own_case import time_function
    from .bench.show.display import show

    row, path = time_function(function, arg or (), how)
    note(f"row: {path}")
    if format == "table":
        print(row)
    else:
        show([dataclasses.asdict(row)], format)
    raise typer.Exit(int(row.status != "ok"))


@command(MEASURE, "verify --kernel rglru")
def verify(
    kernel: Kernel = None,
    op: Annotated[str | None, option("Operations, comma-separated [all].")] = None,
    timeout: Timeout = 120.0,
    format: Format = "table",
) -> None:
    """Check every implementation that runs here against its float64 reference; exit 1 if one is wrong."""
    from .bench.drive import progress, session
    from .bench.plan import named_family
    from .bench.show import display

    family, ops = named_family(kernel, _names(op, "--op"))
    rows = session.run_verify(family, ops, timeout_s=timeout)
    display.show(rows, format)
    raise typer.Exit(int(any(row["status"] in progress.FAILED for row in rows)))


@command(MEASURE, "calibrate --format json")
def calibrate(
    output: Annotated[
        Path | None,
        option("Folder of _other/roofs.parquet, or a parquet file to add to, and to that alone [results/local]."),
    ] = None,
    format: Format = "table",
) -> None:
    """Measure this device's roofs: copy, matrix products per dtype, vector rate; beside the specification.

    Without --output those of an idle CPU become the ones that answers about this machine use.
    """
    from .bench.drive import session
    from .bench.show import display

    shown = functools.partial(display.show, output_format=format)
    session.run_calibrate(output or LOCAL, shown, remember=output is None)


@command(MEASURE, "profile --kernel mlstm_sig --impl fused_chunk --seq-len 8k --dry-run", modes="fw", dtypes="bf16")
def profile(
    axes: Axes,
    kernel: Kernel = None,
    impl: Annotated[str | None, option("Implementations, comma-separated [the first].")] = None,
    ncu: Annotated[str | None, option("Nsight Compute's ncu [found on PATH or where it installs].")] = None,
    timeout: Annotated[float, option("Seconds until the whole run is ended.", min=0.001)] = 900.0,
    dry_run: Annotated[bool, Option("Print the ncu command and do not run it.")] = False,
    output: Folder = LOCAL,
    format: Format = "table",
) -> None:
    """Measure cases with Nsight Compute: tensor FLOPs and device-memory bytes, beside the counts.

    The preset is `one`: a problem of a usual size, of the family's first operation.
    """
    from .bench.drive import session
    from .bench.show.shown import show_profile

    planned = session.plan_profile(_request(axes, kernel, _names(impl, "--impl"), preset="one"))
    if dry_run:
        print(session.profile_command(planned, ncu))
        return
    rows, path = session.run_profile(planned, output=output, ncu_path=ncu, timeout_s=timeout)
    note(f"profile: {path}")
    show_profile(rows, format)
    raise typer.Exit(int(any(row.status != "ok" for row in rows)))


@command(MEASURE, "bars tfla --list")
def bars(
    name: Annotated[
        str | None,
        typer.Argument(help="A family of bars, an operation, an implementation, or a name that --list prints [all]."),
    ] = None,
    rounds: Annotated[int | None, option("Samples of every case [what the family says].", min=3)] = None,
    only: Annotated[str | None, option("Only problems whose label contains this text.")] = None,
    output: Annotated[Path, option("Folder for the rows.")] = LOCAL,
    list_only: Annotated[
        bool, option("Print the families, or a family's problems, and measure nothing; --all: every bar.", "--list")
    ] = False,
    every: Every = False,
    format: Format = "table",
) -> None:
    """Measure the speed bars, ours beside the peers that they name; exit 1 if one is missed, 2 if none was measured."""
    from .bench.drive import bars
    from .bench.drive.session import check_folder
    from .bench.show import display

    chosen = bars.select(bars.load_bars(), name, only)
    if list_only:
        rows = bars.brief_rows(chosen) if format == "table" and not every else bars.list_rows(chosen)
        display.show(rows, format)
        return
    check_folder(output)
    verdicts = []
    for entries, found in bars.measure_bars(chosen, rounds=rounds, output=output):
        verdicts += found
        if format == "table":
            display.show(bars.entry_rows(entries), format)
            display.show(found, format)
    if format != "table" or len(verdicts) > len(found):
        display.show(verdicts, format)
    if verdicts and all(verdict["ratio"] is None for verdict in verdicts):
        raise typer.Exit(2)
    raise typer.Exit(int(any(verdict["outcome"] != "held" for verdict in verdicts)))


@command(EXPLAIN, "count mlstm_sig --seq-len 8k --chunk-size 256")
def count(
    problem: OneProblem,
    kernel: Kernel = None,
    formulation: Annotated[
        str | None, option("chunkwise, walk, parallel, scan, fused, ... [the operation's first].")
    ] = None,
    chunk_size: Annotated[str | None, option("Chunk length, of chunkwise formulations [128].")] = None,
    non_causal: Annotated[bool, Option("Attention to later keys as well.")] = False,
    causal_factor: CausalFactor = None,
    gate_dtype: Annotated[str | None, option("Dtype of the gates [the inputs'].")] = None,
    counting: Annotated[str, option("detailed, or published: what a paper prints.")] = "detailed",
    factor: Annotated[list[str] | None, option("Cost of a function: exp=4; repeatable.")] = None,
    format: Format = "table",
) -> None:
    """Count the FLOPs and bytes of a problem, part by part.

    Families and operations: tfla (mlstm_sig, mlstm_exp, simple_gla, retention, gated_retention, mamba2_ssd),
    lightning, rglru (rglru, linear_scan), wkv (wkv4), delta (gated_delta_net, delta_net, kda), gated-mlp (gated_mlp);
    and attention, gla, selective_scan.
    """
    from .analysis import counts
    from .bench.show import display
    from .bench.show.shown import count_in_words, count_rows
    from .kernels.baselines.published import problem_sizes

    operation = problem.operation(kernel)
    chosen = formulation or counts.default_formulation(operation, problem.mode)
    chunked = counts.is_chunked(operation, chosen)
    if chunk_size is not None and not chunked:
        raise ValueError(f"chunk_size must be left out for {operation} {chosen} {problem.mode}, got {chunk_size!r}")
    sizes = problem_sizes(operation, **problem.given())
    chunk = min(128, sizes["seq_len"]) if chunk_size is None else parse_size(chunk_size, "chunk_size")
    sizes |= {"chunk_size": chunk if chunked else None}
    dtype = problem.dtype or "bf16"
    dtypes: dict[str, Any] = {"dtype": dtype, "state_dtype": problem.state_dtype}
    result = counts.count(
        operation, formulation=chosen, mode=problem.mode, **sizes, **dtypes, gate_dtype=gate_dtype, counting=counting,
        causal=not non_causal, causal_factor=causal_factor, factors=counts.Factors.parse(factor) if factor else None,
    )  # fmt: skip
    if format == "table":
        print(count_in_words(result, {**sizes, **dtypes}))
    display.show({**sizes, **dtypes, **result.as_dict()} if format == "json" else count_rows(result), format)


@command(EXPLAIN, "best --gpu h100 --seq-len 8k --embedding 4096 --mode fwbw")
def best(
    problem: OneProblem,
    kernel: Kernel = None,
    gpu: Gpu = None,
    results: Fitted = None,
    roofs: RoofChoice = "spec",
    other_math: Annotated[
        bool, Option("Also the fastest kernel of every other operation, at equal tokens and embedding dim.")
    ] = False,
    every: Annotated[bool, option("--other-math, and all kernels of these operations.", "--all")] = False,
    format: Format = "table",
) -> None:
    """Rank the kernels for a problem, each at its best chunk length, by measured time or upper bound."""
    from .bench.show import choice, display

    question = problem.ask(kernel, _accelerator(gpu, roofs), results, roofs=roofs)
    others = list(choice.beside(question, problem.head_dim_qk)) if other_math or every else []
    rows = choice.ranking(question, others, every=every)
    if format != "table":
        display.show(rows, format)
        return
    print(question.in_words)
    print(choice.ranking_answer(rows))
    if said := choice.versions_answer(next(row for row in rows if row["same_math"]), rows):
        print(said)
    display.show(choice.ranking_columns(rows), format)
    note(*choice.ranking_notes(question, rows, choice.not_there([question, *others])))


@command(EXPLAIN, "chunk-size mlstm_sig --gpu h200 --seq-len 64k")
def chunk_size(
    problem: OneProblem,
    kernel: Kernel = None,
    gpu: Gpu = None,
    causal_factor: CausalFactor = None,
    impl: Annotated[str | None, option("Implementation [ours that `lrbench best` ranks first].")] = None,
    results: Fitted = None,
    roofs: RoofChoice = "spec",
    every: Every = False,
    format: Format = "table",
) -> None:
    """Answer which chunk length to use: the fastest measured one, else the one that the model chooses."""
    from .analysis.model import answers
    from .analysis.model.chunk_size import check_chunkwise
    from .bench.show import choice, display

    accelerator = _accelerator(gpu, roofs)
    check_chunkwise(problem.operation(kernel), problem.mode)
    question = problem.ask(kernel, accelerator, results, roofs=roofs)
    check_chunkwise(question.op, question.mode, question.sizes["seq_len"])
    chosen = choice.implementation(question, impl, chunked=True)
    report = answers.chunk_size_report(question, chosen, causal_factor)
    if format == "json":
        roofs = answers.roofs_in_words(accelerator)
        display.show({**report, "accelerator_part": accelerator.part, "roofs": roofs}, format)
        return
    if format == "table":
        print(question.in_words)
        print(answers.chunk_size_answer(report, question.fit(chosen)[1]))
    brief = format == "table" and not every
    display.show(answers.chunk_size_columns(report) if brief else report["candidates"], format)
    if format == "table" and every:
        print(answers.chunk_size_in_words(report, accelerator))


@command(EXPLAIN, "predict mlstm_sig --gpu b200 --seq-len 8k")
def predict(
    problem: OneProblem,
    kernel: Kernel = None,
    impl: Annotated[str | None, option("Implementation [ours that `lrbench best` ranks first].")] = None,
    gpu: Gpu = None,
    chunk_size: Annotated[str | None, option("Chunk length [as chunk-size answers].")] = None,
    results: Fitted = None,
    fit: Annotated[bool, option("Fit to results, or take the model's bounds.")] = True,
    roofs: RoofChoice = "spec",
    validate: Annotated[
        bool, Option("Print how many rows lie in the interval of a fit without them, by implementation.")
    ] = False,
    every: Every = False,
    format: Format = "table",
) -> None:
    """Print how long a case takes on an accelerator: measured if it was, and predicted with an interval."""
    from .analysis.model import validation
    from .analysis.model.answers import prediction_in_words
    from .bench.show import choice, display
    from .bench.show.shown import show_coverage

    if validate:
        from .bench import plan
        from .bench.drive import complete

        requests = complete.load_sweeps(complete.sweeps_file("calibration"))
        planned = {each.case.case_id for request in requests for each in plan.plan(request, device_kind="cuda")}
        asked = problem.operations(kernel), impl
        found = list(validation.validate(results or _committed(), *asked, calibration=planned))
        if not found:
            raise ValueError("results must hold measured rows of what is validated, got none")
        show_coverage(found, every=every, output_format=format)
        return
    question = problem.ask(kernel, _accelerator(gpu, roofs), results, fitted=fit, roofs=roofs)
    row = choice.predicted(question, choice.implementation(question, impl), chunk_size)
    if results and row["stored_rows"] == 0 and row["measured_time_ms"] is None:
        case = f"{row['op']} {row['impl']} {problem.mode} {question.dtype}"
        raise ValueError(f"results must hold rows of {case} that were measured on an idle machine, got none")
    if format != "table":
        display.show(row if format == "json" else [row], format)
        return
    print(question.in_words)
    print(prediction_in_words(row))
    if said := choice.versions_answer(row):
        print(said)
    if every:
        texts = ("interval", "roofs")
        display.show([{"": name, "value": value} for name, value in row.items() if name not in texts], format)
        print(f"roofs: {row['roofs']}")


@command(EXPLAIN, "reproduce tfla-fig5 --gpu h200")
def reproduce(
    context: typer.Context,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Entries or documents: tfla-fig5, wkv.")] = None,
    list_only: Annotated[
        bool, option("Print a line a claim [where no ID is given]; --all: all of it.", "--list")
    ] = False,
    gpu: Annotated[str | None, option("Accelerator whose rows are taken [the one with most].")] = None,
    results: Fitted = None,
    run: Annotated[bool, Option("Measure first what has no row, or none of one run.")] = False,
    output: Annotated[Path, option("Folder for the rows of --run, which count beside --results.")] = LOCAL,
    timeout: Timeout = 120.0,
    time_limit: Annotated[
        float, option("Seconds after which --run starts no case; the same command runs the rest.", min=0.0)
    ] = math.inf,
    figure: Annotated[Path | None, option("Draw the entry's figure too: .png, .svg or .pdf.", "--figure", "-o")] = None,
    every: Every = False,
    format: TableFormat = "table",
) -> None:
    """Check the claims of the papers and pages behind lrbench: their numbers beside ours, and a verdict.

    The claims are data, the verdicts are computed from stored rows, or from the counts. markdown is the page
    docs/reproductions.md. Exit 1 if --run was out of time.
    """
    from .analysis.accelerators.known import get_accelerator
    from .analysis.reproduce import entries, published, verdicts, written
    from .bench.show import display
    from .bench.show.shown import show_reproduced
    from .results.store import files_in

    if not run:
        _refuse_given(context, "output", "timeout", "time_limit", why=_without("--run"))
    claims = entries.load()
    asked = entries.chosen(claims, ids) if ids else claims
    drawn = {each.id: each.entry.figure for each in asked if ids and each.entry.figure}
    if figure is not None:
        from .analysis.figures.style import check_format, save_figure

        check_format(figure)
        if len(drawn) != 1:
            known = dict.fromkeys(each.id for each in claims if each.entry.figure)
            raise ValueError(f"--figure needs one entry that has one: {', '.join(drawn or known)}; got {len(drawn)}")
    paths = results or _committed()
    store = verdicts.Store(paths, get_accelerator(gpu).key if gpu else None)
    device = store.device

    def pool() -> list[Path]:
        return [*paths, *([output] if run and files_in(output, verdicts.ROW_SETS) else [])]

    def evaluated() -> tuple[list[verdicts.Found], verdicts.Store]:
        rows = verdicts.Store(pool(), device) if run else store
        return [verdicts.evaluate(each, rows) for each in asked], rows

    left = False
    if run:
        from .bench.drive.complete import run_missing

        how = SweepOptions(output=output, time_limit_s=time_limit, gpu=device or None, timeout_s=timeout)
        left = run_missing(evaluated, how)
    found, _ = evaluated()
    if format == "markdown":
        print(written.page(found, device), end="")
    elif format != "table":
        display.show(written.list_rows(found, lines=format == "json"), format)
    elif list_only or not ids:
        short = ("id", "where", "claim", "verdict")
        rows = [{n: row[n] for n in (row if every else short)} for row in written.list_rows(found)]
        display.show(rows, format, fold=True)
    else:
        show_reproduced(found, device, every=every)
    if format == "table" and (coverage := published.in_words(found)):
        display.say(coverage)
    if figure is not None:
        from .analysis.figures.plots import OF_ENTRIES

        kind, *taken = shlex.split("".join(drawn.values()))
        with contextlib.redirect_stdout(sys.stderr):
            if kind in OF_ENTRIES:
                print(save_figure(OF_ENTRIES[kind](*taken).at(), figure))
            else:
                words = [[*map(str, pool())] if word == "RESULTS" else [word.replace("GPU", device)] for word in taken]
                arguments = [kind, *itertools.chain(*words), "-o", str(figure)]
                typer.main.get_command(app).main(arguments, standalone_mode=False)
    raise typer.Exit(int(left))


def _refuse_given(context: typer.Context, *names: str, why: str) -> None:
    """Raise ValueError, which says ``why``, for an option that was given."""
    for option in context.command.params:
        if option.name in names and getattr(context.get_parameter_source(option.name), "name", None) == "COMMANDLINE":
            raise ValueError(f"{option.metavar if option.name == POSITION else option.opts[0]} {why}")


def _without(needed: str) -> str:
    return f"must be given with {needed}: without it nothing is measured"


def _accelerator(gpu: str | None, roofs: str) -> Accelerator:
    """Return the accelerator of ``--gpu`` with the roofs of ``--roofs``; say on stderr which were measured."""
    from .analysis.accelerators.known import USUAL, get_accelerator, key_here
    from .analysis.accelerators.roofs import with_roofs

    accelerator = with_roofs(get_accelerator(gpu or key_here() or USUAL), roofs)
    if roofs != "spec":
        note(f"--roofs {roofs}: {accelerator.source}")
    return accelerator


@command(DRAW, "plot runtime results/h200_sxm --op mlstm_sig --tokens 64k --head-dim 256 -o runtime.svg")
def plot(
    shown: Shown,
    kind: Annotated[
        str,
        typer.Argument(
            help="From results: runtime, memory, runtime-memory, throughput, chunk-size, trade-off, head-dim, rate, "
            "context, sustained, energy. From the counts: flops, flop-optimal, runtime-optimal, intensity-optimal, "
            "intensity; model takes both."
        ),
    ],
    results: Annotated[list[Path] | None, files(", for the kinds that show some")] = None,
    output: Figure = Path("figure.png"),
    width: Width = None,
    dpi: Dpi = 130,
    device: Annotated[str | None, option("Measured device, where results hold several.")] = None,
    gpu: Annotated[str | None, option("Counts: accelerators, comma-separated [a100,h100,b200].")] = None,
    causal_factor: Annotated[float | None, option("Counts: share of the causal square, 0.5 to 1 [0.5].")] = None,
) -> None:
    """Draw a figure: PNG, SVG or PDF by the file's ending.

    Figures from the counts show one problem: mlstm_sig forward, T = 8k, 64k tokens, head dims 256 and 512, unless
    said otherwise.
    """
    from .analysis.figures.plots import OVER_LENGTH, RESULT_KINDS, check_kind, drawing
    from .analysis.figures.style import check_format, check_size, save_figure
    from .analysis.figures.theory import Theory
    from .results.select import load_results

    check_format(output)
    check_size(width, dpi)
    check_kind(kind, results=bool(results))
    given = {**vars(shown), "device": device, "gpu": gpu, "causal_factor": causal_factor}
    of_results = ("device", "kernel", "impl", "channels", "d_model", "d_ff", "batch")
    of_counts = ("gpu", "causal_factor", *(("seq_len",) if kind in OVER_LENGTH else ()))
    for name in of_counts if kind in RESULT_KINDS else of_results:
        if given[name] is not None:
            raise ValueError(f"{name} must be left out for the figure {kind}, got {given[name]!r}")
    if kind in RESULT_KINDS:
        drawn = drawing(kind, *shown.selection(results or [], device))
    else:
        given["gpus"] = _names(gpu, "gpu")
        named = {each.name: given[each.name] for each in dataclasses.fields(Theory) if given[each.name] is not None}
        drawn = drawing(kind, load_results(results) if results else None, theory=Theory(**named))
    print(save_figure(drawn.at(width), output, dpi=dpi))


@command(DRAW, "roofline results/h200_sxm --op mlstm_sig --tokens 64k --head-dim 256 --seq-len 8k -o roofline.svg")
def roofline(
    context: typer.Context,
    shown: Shown,
    results: Annotated[list[Path] | None, files()] = None,
    of: Annotated[str | None, option("Measure a function of yours, my_module:function, in place of RESULTS.")] = None,
    counters: Annotated[bool, Option("FLOPs and bytes of --of from Nsight Compute's counters.")] = False,
    gpu: Annotated[
        str | None, option("Accelerators, comma-separated; see `lrbench gpus` [the one that was measured].")
    ] = None,
    output: Figure = Path("roofline.png"),
    width: Width = None,
    dpi: Dpi = 130,
    roofs: Annotated[str | None, option(f"{ROOFS} [spec; of --of measured].")] = None,
) -> None:
    """Draw the rooflines of accelerators with the points measured on them, and the share of the roof reached.

    --of calls a function of yours, which takes no arguments or those that get_inputs() of its module returns, and says
    its FLOPs, bytes, intensity, time and share of the bound.
    """
    from .analysis.figures.roofline import roofline as drawing
    from .analysis.figures.style import check_format, check_size, save_figure

    check_format(output)
    check_size(width, dpi)
    if of is not None:
        from .bench.drive.own_function import roofline_of

        taken = {"of", "counters", "output", "width", "dpi", "roofs"}
        _refuse_given(context, *context.params.keys() - taken, why="cannot be given with --of")
        figure, line = roofline_of(of, lambda key: _accelerator(key, roofs or "measured"), counters=counters)
        print(line)
        if figure is not None:
            print(save_figure(figure.at(width), output, dpi=dpi))
        return
    if not results or counters:
        raise ValueError("roofline needs result files or folders, or --of my_module:function; only this has --counters")
    roofs = roofs or "spec"
    # One calibration cannot stand for several parts: a further accelerator is drawn as specified.
    named = _names(gpu, "gpu") or ()
    accelerators = [_accelerator(name, "spec" if n else roofs) for n, name in enumerate(named)]
    frame, selection = shown.selection(results)
    accelerators = accelerators or [_accelerator(_measured_on(results), roofs)]
    print(save_figure(drawing(frame, accelerators, selection).at(width), output, dpi=dpi))


@command(DRAW, "report results/h200_sxm -o report.html")
def report(
    context: typer.Context,
    results: Annotated[list[Path] | None, files(" [those committed of --gpu and results/local, else all]")] = None,
    gpu: Gpu = None,
    output: Annotated[Path, option("The page: .html.", "--output", "-o")] = Path("report.html"),
    pdf: Annotated[bool, option("Print a PDF beside the page too, by Chromium or Chrome.", "--pdf")] = False,
    site: Annotated[
        Path | None, option("Write a folder of pages instead: each operation's fastest kernels, history and rows.")
    ] = None,
) -> None:
    """Write a report: one HTML file with figures, tables, a summary and the rows; it opens without a network."""
    from .analysis.accelerators.known import USUAL, key_here
    from .analysis.report import export
    from .analysis.report.contents import Report
    from .results.arguments import check_file

    export.check_extra()
    if site is not None:
        from .analysis.report.site import write

        _refuse_given(context, "gpu", "output", "pdf", why="cannot be given with --site, which is of all devices")
        print(write(results or _committed(), site))
        return
    if output.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"output must end in .html, got {output.name!r}")
    check_file(output, "--output")
    browser = export.find_browser() if pdf else None
    if pdf and browser is None:
        raise ValueError(f"pdf needs one of {', '.join(export.BROWSERS)}: install one, or leave --pdf out")
    gpu = gpu or (_measured_on(results) if results else None) or key_here() or USUAL
    paths = results or _reported(gpu)
    print(page := export.build(Report.load(paths, gpu), output))
    if browser is not None:
        print(export.to_pdf(page, page.with_suffix(".pdf"), browser))


def _measured_on(results: list[Path]) -> str | None:
    """Return the accelerator that rows are of; None where it is not known, ValueError where there are several."""
    from .analysis.figures.selection import check_one
    from .results.store import read_results

    found = Counter(filter(None, read_results(results, ["device_accelerator"])["device_accelerator"].to_pylist()))
    check_one({("gpu", key): number for key, number in found.items()})
    return next(iter(found), None)


def _reported(gpu: str) -> list[Path]:
    """Return the results to report where none are named, and say which on stderr; ValueError where there are none."""
    from .analysis.accelerators.known import get_accelerator
    from .results.store import committed_results, files_in

    found = committed_results(get_accelerator(gpu).key)
    if files_in(LOCAL):
        found.append(LOCAL)
    here = Path.cwd()
    paths = [p.relative_to(here) if p.is_relative_to(here) else p for p in found or committed_results()]
    if not paths:
        raise ValueError("results must be named where none are committed and results/local holds none, got none")
    note(f"results: {', '.join(map(str, paths))}")
    return paths


@command(COMPARE, "compare run:ff7ac4fb run:c0d954a9")
def compare(
    context: typer.Context,
    axes: Axes,
    a: Annotated[str, typer.Argument(metavar="A", help="File, folder, or terms such as run:ff7ac4fb,op:mlstm_exp.")],
    b: Annotated[str, typer.Argument(metavar="B", help="As A: run:, commit:, impl:, triton:, op:, seq_len:, ...")],
    more: Annotated[list[str] | None, typer.Argument(metavar="C", help="Further sides: a column for each.")] = None,
    results: Pool = None,
    by: Annotated[str, option("Columns that group the geometric means.")] = "op,mode",
    ignore: Annotated[
        str | None, option("Columns in which matched cases may differ, such as chunk_size: the best counts.")
    ] = None,
    margin: Annotated[float, option("Relative difference that counts as equal.")] = 0.02,
    live: Annotated[bool, Option("Measure implementations A and B now, in turn.")] = False,
    kernel: Annotated[str | None, option("Live: kernel family, or one of its operations [tfla].")] = None,
    preset: Preset = None,
    rounds: Annotated[int, option("Live: samples of each case.", min=10, max=1000)] = 30,
    output: Annotated[Path | None, option("Live: folder to keep the rows in.")] = None,
    every: Every = False,
    format: Format = "table",
) -> None:
    """Compare two sets of results, or with --live two implementations: ratios, intervals and verdicts.

    --kernel, --preset and the axes say what --live measures.
    """
    if not live:
        measured = (each.name for each in dataclasses.fields(axes))
        _refuse_given(context, *measured, "kernel", "preset", "rounds", "output", why=_without("--live"))
    ignored = _names(ignore, "--ignore") or ()
    groups = parse_names(by, "--by")
    if live:
        from .bench.drive import session

        if more:
            raise ValueError(f"--live compares two implementations, got {2 + len(more)}")
        request = _request(axes, kernel, tuple(x.removeprefix("impl:").strip() for x in (a, b)), preset=preset)
        rows_a, rows_b = session.run_live(request, ignore=ignored, rounds=rounds, output=output)
    elif more:
        from .analysis.check.compare import of_one_run
        from .bench.show.shown import show_matrix

        names = (a, b, *more)
        sides = of_one_run(*(_selected(each, results) for each in names))
        show_matrix(dict(zip(names, sides, strict=True)), format, ignore=ignored, margin=margin)
        return
    else:
        rows_a, rows_b = _selected(a, results), _selected(b, results)
    from .analysis.check.compare import compare as compared
    from .bench.show.shown import show_comparison

    found = compared(rows_a, rows_b, by=groups, ignore=ignored, margin=margin)
    show_comparison(found, a, b, every=every, output_format=format)


@command(COMPARE, "check run:c0d954a9 --baseline run:ff7ac4fb")
def check(
    new: Annotated[str, typer.Argument(metavar="NEW", help="The run: a file, a folder, or terms: run:c0d954a9.")],
    baseline: Annotated[str, option("What it is compared with, given in the same way.")],
    thresholds: Annotated[Path | None, option("What is tolerated, in TOML [results/thresholds.toml].")] = None,
    results: Pool = None,
    allow_missing: Annotated[bool, Option("Do not fail on cases that the run lacks.")] = False,
    fail_unclear: Annotated[bool, Option("Fail on unclear cases.")] = False,
    min_compared: Annotated[
        float, option("Share of the run's cases that must be compared, 0 to 1; one at least.", min=0.0, max=1.0)
    ] = 0.5,
    rerun: Annotated[bool, Option("Measure unclear, noisy and slower cases again, if their device is here.")] = False,
    timeout: Annotated[float, option("Seconds until a case measured again is ended.", min=0.001)] = 120.0,
    budget: Annotated[float, option("Seconds of timing per case measured again.", min=0.0)] = 1.0,
    junit: Annotated[Path | None, option("Write JUnit XML to this file.")] = None,
    summary: Annotated[bool, Option("Append Markdown to the file that GITHUB_STEP_SUMMARY names.")] = False,
    every: Annotated[bool, option("Show every case, not only what changed; JSON and CSV always do.", "--all")] = False,
    format: Annotated[str, _format("markdown", "junit")] = "table",
) -> None:
    """Compare a run with a baseline; exit 1 if it is slower, needs more memory or is wrong.

    Exit 2 if fewer of the run's cases than --min-compared could be compared, or a report could not be written.
    """
    from .analysis.check import regression
    from .analysis.check.findings import junit_xml, markdown
    from .analysis.check.thresholds import load_thresholds
    from .bench.show.shown import show_check
    from .results.arguments import check_file, not_written
    from .results.contents import cases_left
    from .results.select import is_path
    from .results.store import HERE

    summary_file = os.environ.get("GITHUB_STEP_SUMMARY") if summary else None
    if summary and not summary_file:
        raise ValueError("--summary needs the variable GITHUB_STEP_SUMMARY to name a file, got nothing")
    reports = [("--junit", junit, "w", junit_xml)] if junit else []
    reports += [("--summary", Path(summary_file), "a", markdown)] if summary_file else []
    for flag, path, _, _ in reports:
        check_file(path, flag)
    left = cases_left(Path(new)) if is_path(new) else 0
    if left:
        note(f"warning: the run was stopped: at least {left} of its cases have no row")
    rows = _selected(new, results)
    before = _selected(baseline, results, newest=True, without={row["run_id"] for row in rows})
    judge = regression.check
    if rerun:
        from .bench.drive.session import measure_again

        again = functools.partial(measure_again, timeout_s=timeout, budget_s=budget)
        judge = functools.partial(regression.check_twice, measure=again)
    found = judge(
        rows, before, load_thresholds(thresholds or HERE / "thresholds.toml"), allow_missing=allow_missing,
        fail_unclear=fail_unclear, min_compared=min_compared, left=left,
    )  # fmt: skip
    unwritten = False
    for flag, path, mode, text in reports:
        try:
            with path.open(mode, encoding="utf-8") as file:
                print(text(found), file=file)
        except OSError as error:
            note(f"lrbench: {not_written(path, flag, error)}")
            unwritten = True
    show_check(found, every=every, output_format=format)
    raise typer.Exit(2 if unwritten or found.too_few else int(not found.passed))


@command(COMPARE, "baseline update results/local/sweep-tfla-20261121T135700Z-c0d954a9.parquet", of=baseline_app)
def update(
    new: Annotated[Path, typer.Argument(metavar="NEW", help="File of the run, or a folder with --run.")],
    run: Annotated[str | None, option("Which run, by how its id begins, where there are several.")] = None,
    into: Annotated[Path | None, option("Folder of the baseline [results/ACCELERATOR].")] = None,
    by: Annotated[str | None, option("Who promotes it [git's user.name].")] = None,
    allow_dirty: Annotated[bool, Option("Take a run that was measured with uncommitted changes.")] = False,
    format: Format = "table",
) -> None:
    """Promote a run to the baseline of its accelerator, with its provenance beside it."""
    import json

    from .analysis.check.baseline import PROVENANCE_SUFFIX, promote
    from .bench.show.display import show

    path, provenance = promote(new, run=run, into=into, by=by, allow_dirty=allow_dirty)
    texts = {name: json.dumps(v) if isinstance(v, (dict, list)) else str(v) for name, v in provenance.items()}
    show(provenance if format == "json" else [{"": name, "value": text} for name, text in texts.items()], format)
    note(f"baseline: {path}, provenance: {path.with_suffix('').name}{PROVENANCE_SUFFIX}")
    if noisy := provenance["noisy_cases"]:
        note(f"warning: times measured on a busy machine, of which every check will be unclear: {noisy}")


@command(COMPARE, "history op:mlstm_exp,mode:fw,seq_len:16k,chunk_size:4k -o history.png")
def history(
    case: Annotated[str, typer.Argument(metavar="CASE", help="Case id, or terms such as op:mlstm_exp,seq_len:8k.")],
    results: Pool = None,
    output: Annotated[Path | None, option("Draw the history too: .png, .svg or .pdf.", "--output", "-o")] = None,
    limit: Annotated[int, option("Cases to show at most.", min=1)] = 20,
    format: Format = "table",
) -> None:
    """Show a case over commits: time, memory and error of every run, and what changed between them."""
    from .analysis.check.history import case_history, history_rows
    from .bench.show.display import show
    from .results.select import describe

    if output is not None:
        from .analysis.figures.style import check_format, save_figure

        check_format(output)
    is_id = re.fullmatch("[0-9a-f]{1,16}", case) is not None
    histories = case_history(case if is_id else _terms(case), results or _pool(case))
    shown = dict(list(histories.items())[:limit])
    names = {key: {"case_id": key[0], "device": key[1], "case": describe(rows[0])} for key, rows in shown.items()}
    if format == "table":
        for key, rows in shown.items():
            show(history_rows(rows), "table", title=" | ".join(names[key].values()))
            print()
    else:
        show([{**names[key], **line} for key, rows in shown.items() for line in history_rows(rows)], format)
    if len(histories) > len(shown):
        note(f"and {len(histories) - len(shown)} more cases: select fewer, or raise --limit")
    if output is not None:
        from .analysis.figures.history import history_figure

        note(f"figure: {save_figure(history_figure(list(shown.values())), output)}")


def _committed() -> list[Path]:
    from .results.store import committed_results

    if folders := committed_results():
        return folders
    raise ValueError("there are no committed results here: name some with --results")


def _selected(text: str, results: Sequence[Path] | None, **more: Any) -> list[dict[str, Any]]:
    """Return the rows that a file, a folder or KEY:VALUE terms name."""
    from .results.select import is_path, select

    return select(text, (), **more) if is_path(text) else select(_terms(text), results or _pool(text), **more)


def _stored() -> list[Path]:
    """Return the folders whose runs `lrbench runs` lists: results/local, if it holds any, and the committed ones."""
    from .results import store
    from .results.schema import Record, TritonRow

    return [*([LOCAL] if store.files_in(LOCAL, (Record, TritonRow)) else []), *store.committed_results()]


def _pool(terms: str) -> list[Path]:
    """Return the folders that terms select from: of a run those of `lrbench runs`, else the committed results."""
    from .results.store import recovered_notes

    if "run:" not in terms:
        return _committed()
    note(*recovered_notes(LOCAL))
    return _stored() or _committed()


def _key_of(name: str) -> str:
    """Return the key of terms that a kernel's name is a value of."""
    from .kernels import FAMILIES

    known = {"kernel": FAMILIES, "op": [*itertools.chain.from_iterable(FAMILIES.values())]}
    return next((key for key, names in known.items() if name in names), "impl")


def _terms(text: str) -> str:
    """Return terms with the accelerator's key in place of a short name."""
    from .analysis.accelerators.known import canonical_key
    from .results.select import parse_terms

    if text and ":" not in text:
        key = "run" if re.fullmatch("[0-9a-f]{8,32}", text) else _key_of(text)
        raise ValueError(f"a selector must be a file, a folder or KEY:VALUE terms such as {key}:{text}, got {text!r}")
    terms = parse_terms(text)
    return ",".join(f"{key}:{canonical_key(value) if key == 'device' else value}" for key, value in terms.items())


@command(LIST, "kernels mlstm_sig")
def kernels(kernel: Kernel = None, every: Every = False, format: Format = "table") -> None:
    """List kernel families and their operations, or the implementations of one, ours and outside ones."""
    from .bench.show import display, inventory

    if format == "table" and not every:
        display.show(inventory.family_rows() if kernel is None else inventory.brief_kernel_rows(kernel), format)
        note(*inventory.kernel_notes(kernel))
        return
    display.show(inventory.kernel_rows(kernel), format)


@command(LIST, "results results/h200_sxm")
def results(
    context: typer.Context,
    paths: Annotated[list[Path] | None, files(" [the committed ones]")] = None,
    run: Annotated[
        bool,
        Option("Measure what the folder [results/ACCELERATOR] lacks of a complete set for this code, then merge."),
    ] = False,
    merge: Annotated[
        bool, Option("Put the folder's runs in a file for each family, superseded rows in history.parquet.")
    ] = False,
    triton: Annotated[bool, Option("Show sweeps over several Tritons instead: kernel x version.")] = False,
    derive: Annotated[
        bool, Option("Store FLOPs, bytes, rates, model times and what is suspect as they are counted today.")
    ] = False,
    rows: Annotated[
        str | None,
        option("Show the rows that KEY:VALUE terms select: the newest of each case, whole, as they are derived today."),
    ] = None,
    output: Annotated[Path | None, option("File for --rows: .parquet, .csv or .json.", "--output", "-o")] = None,
    timeout: Timeout = 300.0,
    time_limit: Annotated[
        float, option("Seconds after which --run starts nothing; run the same command again to go on.", min=0.0)
    ] = math.inf,
    every: Every = False,
    format: TableFormat = "table",
) -> None:
    """List stored results: files, and the cases of each operation; --all: implementations, commits, what is missing.

    A complete set is what results/sweeps.toml lists, what the documents' claims compare, and bars. Exit 1 if --run
    left something.
    """
    from .bench.show import display, inventory
    from .results import contents, folder, store

    if not run:
        _refuse_given(context, "timeout", "time_limit", why=_without("--run"))
    if rows is not None:
        _refuse_given(context, "run", "merge", "triton", "derive", why="cannot be given with --rows")
        _show_rows(rows, paths, output, format)
        return
    _refuse_given(context, "output", why="must be given with --rows")
    left, named = False, paths or store.committed_results()
    if (merge or (run and paths)) and (len(named) != 1 or named[0].is_file()):
        given = ", ".join(map(str, named)) or "none"
        raise ValueError(f"RESULTS must be one folder for --{'run' if run else 'merge'}, got {given}")
    if run:
        from .bench.drive.complete import run_complete

        path, left = run_complete(named[0] if paths else None, timeout_s=timeout, time_limit_s=time_limit)
        named = [path]
    elif merge:
        note(*folder.merge(named[0]))
    if derive:
        from .analysis.derive import derive_file

        for path in store.result_files(named):
            if changed := derive_file(path):
                note(f"{path}: derived columns of {changed} rows are as they are counted today")
    if triton:
        from .analysis.check import matrix
        from .bench.show.shown import show_matrix

        of_tritons = contents.triton_rows(named)
        if format == "markdown":
            print(matrix.as_page(of_tritons), end="")
        elif of_tritons:
            show_matrix(matrix.triton_sides(of_tritons), format)
        else:
            there = ", ".join(map(str, named))
            raise ValueError(f"{there} has no sweep over several Tritons; `lrbench sweep --triton` makes one")
        return
    implementations = contents.implementation_rows(named, inventory.kernel_rows())
    if format == "markdown":
        print(contents.as_markdown(contents.file_rows(named), implementations), end="")
        raise typer.Exit(int(left))
    brief = format == "table" and not every
    if format == "table":
        hidden = ("device", "driver") if brief else ()
        files = [{k: v for k, v in row.items() if k not in hidden} for row in contents.file_rows(named)]
        display.show(files, format)
        print()
    display.show(contents.operation_rows(implementations) if brief else implementations, format)
    raise typer.Exit(int(left))


def _show_rows(terms: str, pool: Sequence[Path] | None, output: Path | None, output_format: str) -> None:
    """Print or write the newest row of each case that terms select, as it is derived today."""
    from .analysis.derive import derived_rows
    from .bench.show import display
    from .results.arguments import check_file
    from .results.schema import CASE_COLUMNS
    from .results.store import write_parquet

    if output is not None:
        one_of("--output's ending", output.suffix, (".parquet", ".csv", ".json"))
        check_file(output, "--output")
    found = derived_rows(_selected(terms, pool))
    found.sort(key=lambda row: [(row[name] is not None, row[name]) for name in CASE_COLUMNS])
    if output is None:
        display.show(display.brief_rows(found) if output_format == "table" else found, output_format)
        return
    if output.suffix == ".parquet":
        write_parquet(found, output)
    else:
        with output.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
            display.show(found, output.suffix[1:])
    note(f"{len(found)} rows: {output}")


@command(LIST, "runs --limit 5")
def runs(
    paths: Annotated[list[Path] | None, files(" [results/local and the committed ones]")] = None,
    limit: Annotated[int | None, option("Runs to show at most [20; JSON and CSV: all].", min=1)] = None,
    format: Format = "table",
) -> None:
    """List stored runs, the newest first, by the id that run: terms of compare, check and history take."""
    from .bench.show import display
    from .results import contents

    found = contents.run_rows(paths or _stored())
    limit = limit or (20 if format == "table" else len(found))
    display.show(found[:limit], format)
    if format == "table" and len(found) > limit:
        note(f"and {len(found) - limit} older runs: --limit {len(found)}")


@command(LIST, "presets --kernel rglru")
def presets(kernel: Kernel = None, every: Every = False, format: Format = "table") -> None:
    """List the presets, or those of a kernel family with the axes that they stand for; --all: of every family."""
    from .bench.show import display, inventory

    rows = inventory.preset_rows(kernel)
    display.show(inventory.brief_preset_rows(rows) if format == "table" and not (every or kernel) else rows, format)


@command(LIST, "gpus --all")
def gpus(every: Every = False, format: Format = "table") -> None:
    """List the accelerators the analysis knows, with their rates; --all: also as measured, and where from."""
    from .bench.show import display, inventory

    rows = inventory.gpu_rows()
    if format != "table":
        display.show(rows, format)
        return
    tables = list(inventory.gpu_tables(rows).items())
    for title, table in tables if every else tables[:1]:
        display.show(table, format, title=title)
        print()


@command(LIST, "doctor --format json")
def doctor(every: Every = False, format: Format = "table") -> None:
    """Show this machine, the packages that are here or missing, and known failures that apply; --all: all known."""
    from .bench.drive.workers import probe_environment
    from .bench.show import display, inventory

    sections = inventory.doctor_sections(probe_environment())
    if format != "table":
        display.show([{"section": title, **row} for title, rows in sections.items() for row in rows], format)
        return
    for title, rows in (sections if every else inventory.brief_sections(sections)).items():
        display.show(rows, "table", title=title, fold=True)
        print()


def _names(text: str | None, what: str) -> tuple[str, ...] | None:
    return None if text is None else parse_names(text, what)


_UsageError: type[Any] = typing.cast(Any, typer.BadParameter.__base__)
"""Of click, which some versions of Typer bring along under a name of their own."""


def _has_option(command: Any, option: str) -> bool:
    return any(option in each.opts for each in command.params)


def _commands_for(name: str, commands: Mapping[str, Any]) -> list[str]:
    """Return the commands that may be meant by what is none: a kernel, an option or an entry of `reproduce`."""
    from .analysis.reproduce import entries
    from .kernels import FAMILIES

    if name in {*FAMILIES, *itertools.chain.from_iterable(FAMILIES.values())}:
        return [f"lrbench best {name}", f"lrbench sweep --kernel {name}"]
    found = [f"lrbench {each} --{name}" for each, of in commands.items() if _has_option(of, f"--{name}")]
    return found[:3] or [f"lrbench reproduce {each}" for each in entries.meant(name, entries.load())]


def _usage_in_words(error: Any) -> str:
    """Return in one line what is wrong with a command's options, and what to type instead."""
    said = " ".join(error.format_message().split()).rstrip(".")
    command = error.ctx.command_path if error.ctx else "lrbench"
    if no_command := re.fullmatch(r"No such command '(.*?)'", said):
        meant = " or ".join(_commands_for(no_command[1], error.ctx.command.commands))
        said += f"; did you mean {meant}?" if meant else ""
    elif hasattr(error, "possibilities"):
        name, parameters = error.option_name, error.ctx.command.params
        own = [each for each, of in getattr(error.ctx.command, "commands", {}).items() if _has_option(of, name)]
        if own:
            return f"{name} is an option of commands; type {command} {own[0]} {name} ... (`{command} --help`)"
        # A value given as if it were an option: --ray for --executor ray.
        value = name.lstrip("-")
        listed = re.compile(rf"(?:^|[:,] | or ){re.escape(value)}(?:,| or |\.| \[)")
        takes = [f"{each.opts[0]} {value}" for each in parameters if listed.search(getattr(each, "help", "") or "")]
        meant = " or ".join(takes or error.possibilities or ())
        said = f"{command} has no option {name}" + (f"; did you mean {meant}?" if meant else "")
    return f"{said} (`{command} --help`)"


def main() -> None:
    """Run the command line.

    Exit 0 when all is well, 1 when a check failed, a sweep timed nothing or a device does not work, 2 on bad usage or
    input and where something cannot be written, 130 on Ctrl-C.
    """
    # Commands make many objects and few cycles; collecting as often as by default takes a tenth of a second.
    gc.set_threshold(1_000_000)
    if sys.stdout is None:
        # The caller closed it (>&-). print takes None for it, csv and others do not.
        sys.stdout = io.StringIO()
    elif isinstance(sys.stdout, io.TextIOWrapper):
        # Characters that the locale's encoding lacks are written as escapes, as on standard error.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # Completion is installed for this name; started by python -m lrbench, Typer would take another.
        sys.exit(app(prog_name="lrbench", standalone_mode=False) or 0)
    except _UsageError as error:
        note(f"lrbench: {_usage_in_words(error)}")
        sys.exit(2)
    except (ValueError, OSError) as error:
        note(f"lrbench: {error}")
        sys.exit(2)
    except RuntimeError as error:
        note(f"lrbench: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
