"""The commands that compare results: compare, check, baseline update, history. Each parses, calls and prints."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from ..analysis.check.compare import Comparison
    from ..analysis.check.regression import CheckResult
    from ..analysis.check.thresholds import Thresholds
    from .environment import Environment
    from .plan import PlannedCase

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")

CHECK_FORMATS = ("table", "json", "csv", "markdown", "junit")

Format = Annotated[str, typer.Option("--format", help="table, json or csv.")]
Pool = Annotated[
    list[Path] | None, typer.Option("--results", help="Results that KEY:VALUE terms select from [the committed ones].")
]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""

    @app.command("compare")
    def compare_command(
        a: Annotated[
            str, typer.Argument(metavar="A", help="File, folder, or terms such as run:ff7ac4fb,op:mlstm_exp.")
        ],
        b: Annotated[
            str, typer.Argument(metavar="B", help="As A: run:, commit:, impl:, provider:, op:, seq_len:, ...")
        ],
        results: Pool = None,
        by: Annotated[str, typer.Option(help="Columns that group the geometric means.")] = "op,mode",
        ignore: Annotated[
            str | None,
            typer.Option(help="Columns in which matched cases may differ, such as chunk_size: the best counts."),
        ] = None,
        margin: Annotated[float, typer.Option(help="Relative difference that counts as equal.")] = 0.02,
        live: Annotated[bool, typer.Option("--live", help="Measure implementations A and B now, in turn.")] = False,
        kernel: Annotated[str, typer.Option(help="Live: kernel family.")] = "tfla",
        op: Annotated[str | None, typer.Option(help="Live: operations, comma-separated.")] = None,
        preset: Annotated[str | None, typer.Option(help="Live: preset of the sizes left open [as sweep].")] = None,
        seq_len: Annotated[str | None, typer.Option(help="Live: sequence lengths: 1k,8k.")] = None,
        head_dim: Annotated[str | None, typer.Option(help="Live: value head dims.")] = None,
        head_dim_qk: Annotated[str | None, typer.Option(help="Live: query-key head dims.")] = None,
        chunk_size: Annotated[str | None, typer.Option(help="Live: chunk lengths.")] = None,
        num_heads: Annotated[int | None, typer.Option(min=1, help="Live: heads.")] = None,
        channels: Annotated[str | None, typer.Option(help="Live: channels.")] = None,
        d_model: Annotated[str | None, typer.Option(help="Live: model dims of an MLP.")] = None,
        d_ff: Annotated[str | None, typer.Option(help="Live: hidden dims of an MLP.")] = None,
        tokens: Annotated[str | None, typer.Option(help="Live: batch times sequence length.")] = None,
        batch: Annotated[int | None, typer.Option(min=1, help="Live: batch, in place of --tokens.")] = None,
        mode: Annotated[str | None, typer.Option(help="Live: fw, fwbw, bw, step.")] = None,
        dtype: Annotated[str | None, typer.Option(help="Live: bf16, fp16, fp32, fp64.")] = None,
        state_dtype: Annotated[str | None, typer.Option(help="Live: dtypes of the states.")] = None,
        rounds: Annotated[int, typer.Option(min=10, max=1000, help="Live: samples of each case.")] = 30,
        output: Annotated[Path | None, typer.Option(help="Live: folder to keep the rows in.")] = None,
        format: Format = "table",
    ) -> None:
        """Compare two sets of results, or with --live two implementations: ratios, intervals and verdicts."""
        from ..analysis.check.compare import compare
        from ..results import arguments
        from . import display, plan

        display.check_format(format)
        ignored = _given(arguments.parse_names, ignore) or ()
        if live:
            request = plan.parse_request(
                kernel=kernel,
                preset=preset,
                op=op,
                impl=f"{a.removeprefix('impl:')},{b.removeprefix('impl:')}",
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
            sides = _measure_live(request, ignored, rounds, output)
        else:
            sides = _selected(a, results), _selected(b, results)
        show_comparison(compare(*sides, by=arguments.parse_names(by), ignore=ignored, margin=margin), a, b, format)

    @app.command("check")
    def check_command(
        new: Annotated[
            str, typer.Argument(metavar="NEW", help="The run: a file, a folder, or terms such as run:c0d954a9.")
        ],
        baseline: Annotated[str, typer.Option(help="What it is compared with, given in the same way.")],
        thresholds: Annotated[
            Path | None, typer.Option(help="What is tolerated, in TOML [results/thresholds.toml].")
        ] = None,
        results: Pool = None,
        allow_missing: Annotated[
            bool, typer.Option("--allow-missing", help="Do not fail on cases that the run lacks.")
        ] = False,
        fail_unclear: Annotated[bool, typer.Option("--fail-unclear", help="Fail on unclear cases.")] = False,
        rerun: Annotated[
            bool, typer.Option("--rerun", help="Measure unclear and slower cases again, if their device is here.")
        ] = False,
        timeout: Annotated[
            float, typer.Option(min=0.001, help="Seconds until a case measured again is ended.")
        ] = 120.0,
        budget: Annotated[float, typer.Option(min=0.0, help="Seconds of timing per case measured again.")] = 1.0,
        junit: Annotated[Path | None, typer.Option(help="Write JUnit XML to this file.")] = None,
        summary: Annotated[
            bool, typer.Option("--summary", help="Append Markdown to the file that GITHUB_STEP_SUMMARY names.")
        ] = False,
        format: Annotated[str, typer.Option("--format", help="table, json, csv, markdown or junit.")] = "table",
    ) -> None:
        """Compare a run with a baseline; exit 1 if it is slower, needs more memory or is wrong."""
        from ..analysis.check.regression import check

        if format not in CHECK_FORMATS:
            raise ValueError(f"format must be one of {', '.join(CHECK_FORMATS)}, got {format!r}")
        summary_file = os.environ.get("GITHUB_STEP_SUMMARY") if summary else None
        if summary and not summary_file:
            raise ValueError("--summary needs the variable GITHUB_STEP_SUMMARY to name a file, got nothing")
        tolerated = _thresholds(thresholds)
        rows, old = _selected(new, results), _selected(baseline, results)
        own = {row["run_id"] for row in rows}
        # A folder may hold the run that is checked: it is compared with the others.
        old = [row for row in old if row["run_id"] not in own] or old
        judge = functools.partial(check, allow_missing=allow_missing, fail_unclear=fail_unclear)
        found = judge(rows, old, tolerated)
        if rerun:
            again = _measure_again(found, timeout_s=timeout, budget_s=budget)
            if again:
                from ..analysis.check.regression import replace_rows

                found = judge(replace_rows(rows, again), old, tolerated, measured_again=again)
        # Files first: whoever reads standard output may close it early.
        if junit is not None:
            from ..analysis.check.findings import junit_xml

            junit.write_text(junit_xml(found), encoding="utf-8")
        if summary_file:
            from ..analysis.check.findings import append_text, markdown

            append_text(Path(summary_file), markdown(found))
        show_check(found, format)
        raise typer.Exit(0 if found.passed else 1)

    baseline_app = typer.Typer(help="Baselines that `lrbench check` compares runs with.", no_args_is_help=True)
    app.add_typer(baseline_app, name="baseline")

    @baseline_app.callback()
    def _baseline() -> None:
        """Baselines that `lrbench check` compares runs with."""

    @baseline_app.command("update")
    def update_command(
        new: Annotated[Path, typer.Argument(metavar="NEW", help="File of the run, or a folder with --run.")],
        run: Annotated[
            str | None, typer.Option(help="Which run, by how its id begins, where there are several.")
        ] = None,
        into: Annotated[Path | None, typer.Option(help="Folder of the baseline [results/ACCELERATOR].")] = None,
        by: Annotated[str | None, typer.Option(help="Who promotes it [git's user.name].")] = None,
        allow_dirty: Annotated[
            bool, typer.Option("--allow-dirty", help="Take a run that was measured with uncommitted changes.")
        ] = False,
        format: Format = "table",
    ) -> None:
        """Promote a run to the baseline of its accelerator, with its provenance beside it."""
        from ..analysis.check.baseline import PROVENANCE_SUFFIX, promote
        from . import display

        display.check_format(format)
        path, provenance = promote(new, run=run, into=into, by=by, allow_dirty=allow_dirty)
        if format == "json":
            print(json.dumps(provenance, indent=2))
        else:
            rows = [{"": name, "value": _flat(value)} for name, value in provenance.items()]
            display.show(rows, format)
        display.note(f"baseline: {path}, provenance: {path.with_suffix('').name}{PROVENANCE_SUFFIX}")

    @app.command("history")
    def history_command(
        case: Annotated[str, typer.Argument(metavar="CASE", help="Case id, or terms such as op:mlstm_exp,seq_len:8k.")],
        results: Pool = None,
        output: Annotated[
            Path | None, typer.Option("--output", "-o", help="Draw the history too: .png, .svg or .pdf.")
        ] = None,
        limit: Annotated[int, typer.Option(min=1, help="Cases to show at most.")] = 20,
        format: Format = "table",
    ) -> None:
        """Show a case over commits: time, memory and error of every run, and what changed between them."""
        from ..analysis.check.history import case_history, history_rows
        from ..results.select import describe
        from . import display

        display.check_format(format)
        if output is not None:
            from ..analysis.figures.style import check_format

            check_format(output)
        histories = case_history(case, results or _committed())
        shown = dict(list(histories.items())[:limit])
        names = {key: {"case_id": key[0], "device": key[1], "case": describe(rows[0])} for key, rows in shown.items()}
        if format == "table":
            for key, rows in shown.items():
                display.show(history_rows(rows), "table", title=" | ".join(names[key].values()))
                print()
        else:
            display.show([{**names[key], **line} for key, rows in shown.items() for line in history_rows(rows)], format)
        if len(histories) > len(shown):
            display.note(f"and {len(histories) - len(shown)} more cases: select fewer, or raise --limit")
        if output is not None:
            from ..analysis.figures.history import history_figure
            from ..analysis.figures.style import save_figure

            display.note(f"figure: {save_figure(history_figure(list(shown.values())), output)}")


def _given(parse: Callable[[str], T], text: str | None) -> T | None:
    """Parse an option that was given; an empty list of names is no list."""
    if text is None:
        return None
    parsed = parse(text)
    if parsed == ():
        raise ValueError(f"a list must name something, got {text!r}")
    return parsed


def _committed() -> list[Path]:
    from ..results.store import committed_results

    folders = committed_results()
    if not folders:
        raise ValueError("there are no committed results here: name some with --results")
    return folders


def _selected(text: str, results: Sequence[Path] | None) -> list[dict[str, Any]]:
    from ..results.select import is_path, parse_terms, select

    if is_path(text):
        return select(text, ())
    parse_terms(text)
    return select(text, results or _committed())


def _thresholds(path: Path | None) -> Thresholds:
    from ..analysis.check.thresholds import Thresholds, load_thresholds

    committed = ROOT / "results" / "thresholds.toml"
    if path is None and not committed.is_file():
        return Thresholds()
    return load_thresholds(path or committed)


def _flat(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def _measure_live(
    request: Any, ignore: Sequence[str], rounds: int, output: Path | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure two implementations in turn and return the rows of each."""
    from ..results import store
    from . import display, plan
    from .commands import check_folder
    from .environment import probe_environment
    from .run import file_name, groups, side_by_side

    first, second = request.impls
    if first == second:
        raise ValueError(f"--live compares two implementations, got {first} twice")
    # Names are checked before the machine is looked at: a typing mistake answers at once.
    plan.plan(request, device_kind="cuda")
    if output is not None:
        check_folder(output)
    environment = probe_environment()
    planned = plan.plan(request, device_kind=environment.device_kind)
    display.note(f"measuring on {environment.device_name} ({environment.device_kind}): {len(planned)} cases in turn")
    if all(len({item.case.impl for item in group}) < 2 for group in groups(planned, ignore)):
        raise ValueError(f"no case of {first} matches one of {second}: {_why_unmatched(planned, ignore, environment)}")
    progress = display.SweepProgress()
    records = []
    with contextlib.ExitStack() as stack:
        writer = None
        if output is not None:
            name = file_name(f"{store.LIVE_PREFIX}{request.kernel}", uuid.uuid4().hex)
            writer = stack.enter_context(store.RunWriter(output, name))
        progress.begin(len(planned), "measuring in turn")
        stack.callback(progress.end)
        for record in side_by_side(planned, environment, ignore=ignore, rounds=rounds, started=progress.started):
            if writer is not None:
                writer.append(record)
            records.append(record)
            progress.finished(next(i for i in planned if i.case.case_id == record.case_id), record.status)
    if writer is not None:
        display.note(f"results: {writer.path}")
    rows = [dataclasses.asdict(record) for record in records]
    return [row for row in rows if row["impl"] == first], [row for row in rows if row["impl"] == second]


def _why_unmatched(planned: Sequence[PlannedCase], ignore: Sequence[str], environment: Environment) -> str:
    """Say what keeps two implementations' cases apart: the device that one needs, or columns that differ."""
    from ..results.schema import CASE_COLUMNS
    from .run import groups

    here = environment.device_kind
    for item in planned:
        if here not in item.target.devices:
            return f"{item.case.impl} runs on {' or '.join(item.target.devices)}, this device is {here}"
    for column in CASE_COLUMNS:
        if any(len({item.case.impl for item in group}) > 1 for group in groups(planned, (*ignore, column))):
            return f"they differ in {column}; --ignore {column} leaves it out"
    return "--ignore COLUMN leaves a column out"


def _measure_again(found: CheckResult, *, timeout_s: float, budget_s: float) -> dict[str, dict[str, Any]]:
    """Measure again what a second measurement may settle; say why where that cannot be."""
    from ..analysis.check.regression import worth_measuring_again
    from . import display
    from .environment import probe_environment
    from .run import measure_again, why_not_again

    rows = worth_measuring_again(found)
    if not rows:
        return {}
    environment = probe_environment()
    reason = why_not_again(rows, environment)
    if reason is not None:
        display.note(f"not measured again: {reason}")
        return {}
    display.note(f"measuring {len(rows)} cases again on {environment.device_name}")
    return dict(measure_again(rows, environment, timeout_s=timeout_s, budget_s=budget_s))


def show_comparison(found: Comparison, a: str, b: str, output_format: str) -> None:
    """Print a comparison; what differs between the environments goes to standard error as well."""
    from ..analysis.check.compare import as_dict, case_rows, group_rows, unmatched_rows
    from . import display

    for line in found.environment:
        display.note(f"warning: the environments differ (A | B): {line}")
    if output_format == "json":
        print(json.dumps({"A": a, "B": b, **as_dict(found)}, indent=2, allow_nan=False))
    elif output_format == "csv":
        display.show(case_rows(found), "csv")
    else:
        display.show(case_rows(found), "table", title=f"A = {a}, B = {b}; ratio = time of B / time of A")
        print()
        interval = f"{100 * found.confidence:g} % interval"
        display.show(group_rows(found), "table", title=f"geometric means, {interval}, equal within {found.margin:g}")
        if found.unmatched:
            print()
            display.show(unmatched_rows(found), "table", title="not compared")


def show_check(found: CheckResult, output_format: str) -> None:
    """Print what the check found; its outcome in one line goes to standard error."""
    from ..analysis.check.findings import as_dict, junit_xml, markdown, noteworthy, table_rows
    from ..analysis.check.regression import summary
    from . import display

    for line in found.environment:
        display.note(f"warning: the environments differ (baseline | run): {line}")
    if output_format == "json":
        print(json.dumps(as_dict(found), indent=2, allow_nan=False))
    elif output_format == "csv":
        display.show(table_rows(found.cases), "csv")
    elif output_format == "markdown":
        print(markdown(found))
    elif output_format == "junit":
        sys.stdout.write(junit_xml(found))
    elif noteworthy(found):
        display.show(table_rows(noteworthy(found)), "table")
    display.note(summary(found))
