"""Run every baseline once: right at a small size, then timed at a large one.

    python -m lrbench.tests.tools.trial --json trial.json

A first look at an environment before a sweep spends hours in it: which packages import, compile and agree with their
reference, and how long they take. Workers, limits, checks and timing are the sweep's; every baseline runs with its
recommended settings only, and its outcome is printed as it comes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...bench.environment import Environment, probe_environment
from ...bench.plan import PlannedCase, group_by_implementation
from ...bench.run import refuse
from ...bench.workers import Limits, LocalExecutor
from ...kernels.baselines import BASELINES, Baseline, installed_versions, plan_sizes
from ...results.schema import Case

STAGES = ("check", "time")
CHECK_SIZES = {"batch": 1, "seq_len": 1024, "num_heads": 4, "head_dim_qk": 128, "head_dim_v": 256}
TIME_SIZES = {"batch": 8, "seq_len": 8192, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256}
COLUMNS = ("time_ms", "peak_memory_bytes", "rel_error", "checked", "compile_s")


def plan_trial(chosen: Sequence[Baseline], stage: str) -> list[PlannedCase]:
    """Return each baseline's cases of a stage: one with gradients to check; forward and both passes to time."""
    planned = []
    for baseline in chosen:
        both = "fwbw" if "fwbw" in baseline.modes else "fw"
        sizes: dict[str, Any] = plan_sizes(baseline, CHECK_SIZES if stage == "check" else TIME_SIZES)[0]
        for mode in dict.fromkeys([both] if stage == "check" else ["fw", both]):
            case = Case(
                kernel=baseline.kernels[0],
                op=baseline.op,
                impl=baseline.name,
                provider=baseline.provider,
                mode=mode,
                dtype=baseline.dtypes[0],
                **sizes,
            )
            planned.append(PlannedCase(case=case, target=baseline))
    return planned


def run_trial(
    planned: Sequence[PlannedCase],
    environment: Environment,
    *,
    stage: str,
    timeout_s: float,
    jobs: int,
    include_known_bad: bool,
) -> Iterable[dict[str, Any]]:
    """Yield one row per case as it ends: op, impl, mode, stage, status, reason, seconds and :data:`COLUMNS`."""
    versions = installed_versions()
    runnable = []
    for item in planned:
        tried = dataclasses.replace(item, target=_forget_known_bad(item.target)) if include_known_bad else item
        if refusal := refuse(tried, environment, versions):
            yield _row(item.case, stage, refusal)
        else:
            runnable.append(item)
    executor = LocalExecutor(workers_per_device=jobs if stage == "check" else 1)
    limits = Limits(timeout_s=timeout_s, budget_s=0.2, action="verify" if stage == "check" else "run")
    outcomes = executor.run(group_by_implementation(runnable), limits, lambda item: None)
    with contextlib.closing(outcomes):
        began = time.monotonic()
        for item, reply in outcomes:
            yield _row(item.case, stage, reply) | {"seconds": round(time.monotonic() - began, 1)}
            began = time.monotonic()


def _forget_known_bad(target: Any) -> Any:
    return dataclasses.replace(target, known_bad=())


def _row(case: Case, stage: str, reply: Mapping[str, Any]) -> dict[str, Any]:
    columns = reply.get("columns", {})
    row = {"op": case.op, "impl": case.impl, "mode": case.mode, "stage": stage, "dtype": case.dtype} | case.sizes
    row |= {"status": reply["status"], "reason": reply["reason"]}
    return row | {name: columns[name] for name in COLUMNS if name in columns}


def format_row(row: Mapping[str, Any]) -> str:
    """Return a row as one line: baseline, stage, mode, status, time, peak memory, error, reason."""
    peak = row.get("peak_memory_bytes")
    numbers = (
        _number(row.get("time_ms"), "9.3f"),
        _number(peak / 2**30 if peak is not None else None, "6.2f"),
        _number(row.get("rel_error"), "9.1e"),
    )
    return (
        f"{row['impl']:32} {row['stage']:5} {row['mode']:4} {row['status']:11} {' '.join(numbers)}  "
        f"{row['reason'] or row.get('checked') or ''}"
    )


HEADER = f"{'baseline':32} {'stage':5} {'mode':4} {'status':11} {'ms':>9} {'GiB':>6} {'error':>9}  reason or checked at"


def _number(value: float | None, form: str) -> str:
    return format(value, form) if value is not None else " " * int(form.split(".")[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trial; exit status 0 when everything that could run here did so and was right."""
    parser = argparse.ArgumentParser(prog="python -m lrbench.tests.tools.trial", description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows and versions here, row by row")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="baselines or packages; all by default")
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one case")
    parser.add_argument("--jobs", type=int, default=4, help="baselines checked at a time; timings always run alone")
    parser.add_argument("--include-known-bad", action="store_true", help="try what is declared to fail here, too")
    options = parser.parse_args(argv)
    known = {baseline.name for baseline in BASELINES} | {baseline.provider for baseline in BASELINES}
    if unknown := set(options.only or ()) - known:
        parser.error(f"--only must be among {', '.join(sorted(known))}, got {', '.join(sorted(unknown))}")
    chosen = [b for b in BASELINES if not options.only or {b.name, b.provider} & set(options.only)]

    environment = probe_environment()
    rows: list[dict[str, Any]] = []
    print(HEADER)
    for stage in options.stages:
        for row in run_trial(
            plan_trial(chosen, stage),
            environment,
            stage=stage,
            timeout_s=options.timeout,
            jobs=options.jobs,
            include_known_bad=options.include_known_bad,
        ):
            rows.append(row)
            print(format_row(row), flush=True)
            if options.json:
                result = {"environment": dataclasses.asdict(environment), "versions": installed_versions()}
                options.json.write_text(json.dumps({**result, "rows": rows}, indent=1))
    return int(any(row["status"] not in ("ok", "unsupported", "unavailable") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
