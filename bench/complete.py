"""One complete set of results in a folder, measured in as many calls as it takes.

A complete set is of one state of the code on one device: what results/sweeps.toml lists, what the documents' claims
compare, and the bars. Cases that the folder has are not measured again, so every call goes on where the last one ended.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..analysis.reproduce import entries, verdicts
from ..results.folder import merge
from ..results.schema import Environment
from ..results.select import grouped
from ..results.store import HERE, files_in, recovered_notes
from ..results.toml_tables import read_toml
from . import bars, note, session
from .environment import is_of, rows_of
from .plan import Request
from .reproduce import run_missing
from .run import separate
from .workers import probe_environment

FILE = HERE / "sweeps.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeps:
    """What the file holds: sweeps, whose keys are the fields of :class:`.plan.Request`."""

    sweeps: tuple[Request, ...]


def load_sweeps(path: Path = FILE) -> tuple[Request, ...]:
    """Read the sweeps of a complete set; ValueError where the file does not hold any."""
    found: Sweeps = read_toml(path, Sweeps, "sweeps")
    return found.sweeps


def run_complete(folder: Path | None, *, timeout_s: float, time_limit_s: float | None) -> tuple[Path, bool]:
    """Measure what a folder lacks of the complete set, and merge its runs.

    Args:
        folder: None: results/<accelerator> of the device that is here.
        time_limit_s: seconds after which nothing starts; the same call runs the rest. None: no limit.

    Returns:
        the folder, and whether something is left.

    Raises:
        ValueError: the device is no known accelerator and no folder is given, or as :func:`.session.run_sweep`.
        KeyboardInterrupt: it was interrupted; what was measured is merged.
    """
    ends = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    environment = probe_environment()
    device = environment.device_accelerator
    if device is None:
        raise ValueError(f"{environment.device_name} is no accelerator that lrbench knows: lrbench gpus")
    folder = folder or Path("results") / device
    session.check_folder(folder)
    known = bars.load_bars().items()
    families = {n: each for n, each in known if each.device == environment.device_kind and each.complete}
    note(*recovered_notes(folder))
    measured = [folder] if files_in(folder, verdicts.ROW_SETS) else []
    rows = verdicts.Store(measured, device, lambda row: is_of(row, environment.git_commit))
    found = [verdicts.evaluate(each, rows) for each in entries.load()]
    sweep: dict[str, Any] = {"gpu": device, "timeout_s": timeout_s, "retry": False, "calibrate": False}
    try:
        left = run_missing(found, more=load_sweeps(), output=folder, time_limit_s=ends - time.monotonic(), **sweep)
        if not left and (missing := unfinished(families, folder, environment)):
            limit_s = ends - time.monotonic()
            for _, judged in bars.measure_bars(missing, rounds=None, output=folder, time_limit_s=limit_s):
                for verdict in judged:
                    note(" | ".join(f"{name} {value}" for name, value in verdict.row().items() if value is not None))
            left = bool(unfinished(families, folder, environment))
    finally:
        note(*merge(folder))
    note(f"{folder}: {'some is left: the same command goes on' if left else 'all that can be measured here is there'}")
    return folder, left


def unfinished(families: bars.Families, folder: Path, environment: Environment) -> bars.Families:
    """Return the problems of which no run in a folder has all cases, of the same code on the same device.

    Cases that cannot be tried here do not count: merging drops their rows, so they would always be missing.
    """
    # Rows of the bars have no accelerator, those of sweeps do.
    runs = [
        {row["case_id"] for row in rows}
        for rows in grouped(rows_of(folder, environment, accelerator=None), itemgetter("run_id")).values()
    ]

    def left(kernel: str, problem: bars.Problem) -> bool:
        sides = (bars.planned_cases(kernel, problem, mode, problem.impls) for mode in problem.modes)
        tried, _ = separate([*itertools.chain.from_iterable(sides)], environment)
        cases = {item.case.case_id for item in tried}
        return not any(cases <= run for run in runs)

    found = {}
    for name, family in families.items():
        if problems := tuple(each for each in family.problems if left(family.kernel, each)):
            overall = family.overall if problems == family.problems else ()
            found[name] = replace(family, problems=problems, overall=overall)
    return found
