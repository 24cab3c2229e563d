"""What stored results lack, measured: cases that claims of documents compare, and a complete set in a folder.

A complete set is of one state of the code on one device: what results/sweeps.toml lists, what the documents' claims
compare, and the bars. Cases that the folder has are not measured again, so every call goes on where the last one ended.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, get_type_hints

from ...analysis.reproduce import entries, verdicts
from ...analysis.reproduce.verdicts import Found
from ...kernels import FAMILIES
from ...kernels.baselines import baselines_for
from ...results.folder import merge
from ...results.schema import Environment
from ...results.select import grouped
from ...results.store import HERE, files_in, recovered_notes
from ...results.toml_tables import read_toml
from .. import note
from ..environment import is_of, rows_of
from ..plan import named_family
from ..request import COLUMNS, Request, SweepOptions
from . import bars, mlp_errors, session
from .run import separate, write_other
from .workers import probe_environment

FILE = HERE / "sweeps.toml"


def load_sweeps(path: Path = FILE) -> tuple[Request, ...]:
    """Read the sweeps of a complete set, whose keys are the fields of :class:`.request.Request`."""
    keys: dict[str, Any] = get_type_hints(Request)
    if found := read_toml(path, {"sweeps": tuple[keys, ...]}, "sweeps").get("sweeps"):  # type: ignore[valid-type]
        return tuple(Request(**each) for each in found)
    raise ValueError(f"{path} must have at least one table [[sweeps]]")


def sweeps_file(name: str) -> Path:
    """Return the file of sweeps that ``name`` is the path of, or that comes with the package by that name."""
    own = HERE / f"{name}.toml"
    path = own if "/" not in name and own.is_file() else Path(name)
    if not path.is_file():
        raise ValueError(f"--sweeps must be a TOML file of sweeps or the name of one in results/, got {name}")
    return path


def missing_requests(found: Sequence[Found]) -> list[Request]:
    """Return requests for the cases that the claims have no row of."""
    lacking = (
        _request(each.asked.document.kernel, each.asked.terms(side, point))
        for each in found
        for side, point, why in each.missing
        if why == verdicts.UNMEASURED and each.asked.claim.metric in entries.MEASURED
    )
    return list(dict.fromkeys(lacking))


def _request(kernel: str, terms: Mapping[str, Any]) -> Request:
    """Return the request of a side's cases: of the document's family if it has the operation or is compared with it."""
    beside = (baseline.op for baseline in baselines_for(kernel))
    if terms["op"] not in (*FAMILIES[kernel], *beside):
        kernel = named_family(terms["op"])[0]
    columns = COLUMNS | {"impls": "impl", "baselines": "provider"}
    fields: dict[str, Any] = {name: (terms[column],) for name, column in columns.items() if column in terms}
    fields |= {name: terms.get(name) for name in ("num_heads", "num_heads_qk", "layers")}
    if terms.get("provider") == "lrbench":
        # Ours are no baselines.
        fields["baselines"] = ("none",)
    if "d_model" in terms:
        # All its tokens are its seq_len.
        fields.pop("batches", None)
    return Request(kernel=kernel, **fields)


def missing_errors(found: Sequence[Found]) -> list[int]:
    """Return the sizes that claims of the table of errors have no row of."""
    of_errors = (each for each in found if each.asked.claim.metric in entries.ERRORS)
    return sorted({int(point["seq_len"]) for each in of_errors for _, point, _ in each.missing})


def run_missing(
    evaluated: Callable[[], tuple[Sequence[Found], verdicts.Store]], how: SweepOptions, more: Sequence[Request] = ()
) -> bool:
    """Sweep what claims have no row of, but for cases that the folder has from this code; errors take 10 draws.

    Then time in turn what they compare and has rows of several runs alone.

    Args:
        evaluated: returns the claims' verdicts on the rows that are there now, and these rows.
        more: what is swept as well.

    Returns:
        whether cases are left, out of time.

    Raises:
        ValueError: as run_sweep.
        KeyboardInterrupt: a sweep was interrupted.
    """
    began, (found, _) = time.monotonic(), evaluated()
    if requests := [*more, *missing_requests(found)]:
        outcome = session.run_sweep(requests, dataclasses.replace(how, resume=True, pairs=False))
        if outcome.interrupted:
            raise KeyboardInterrupt
        if outcome.remaining:
            return True
    for size in missing_errors(found):
        import torch

        if time.monotonic() - began > how.time_limit_s:
            note("out of time: the same command measures the rest")
            return True
        device = "cuda" if torch.cuda.is_available() else "cpu"
        write_other([mlp_errors.error_row(size, "fused", device)], "errors", how.output, "errors")
    if groups := verdicts.apart(*evaluated()):
        left_s = max(0.0, began + how.time_limit_s - time.monotonic())
        in_turn = session.run_in_turn(groups, dataclasses.replace(how, time_limit_s=left_s))
        if in_turn is not None and in_turn.interrupted:
            raise KeyboardInterrupt
        return in_turn is not None and in_turn.remaining > 0
    return False


def run_complete(folder: Path | None, *, timeout_s: float, time_limit_s: float = math.inf) -> tuple[Path, bool]:
    """Measure what a folder lacks of the complete set, and merge its runs.

    Args:
        folder: None: results/<accelerator> of the device that is here.
        time_limit_s: seconds after which nothing starts; the same call runs the rest.

    Returns:
        the folder, and whether something is left.

    Raises:
        ValueError: the device is no known accelerator and no folder is given, or as :func:`.session.run_sweep`.
        KeyboardInterrupt: it was interrupted; what was measured is merged.
    """
    ends = time.monotonic() + time_limit_s
    environment = probe_environment()
    device = environment.device_accelerator
    if device is None:
        raise ValueError(f"{environment.device_name} is no accelerator that lrbench knows: lrbench gpus")
    folder = folder or Path("results") / device
    session.check_folder(folder)
    here = (bar for bar in bars.load_bars() if bar.device_kind == environment.device_kind)
    own = [bar for bar in here if bar.asked.document.complete]
    note(*recovered_notes(folder))

    def evaluated() -> tuple[list[Found], verdicts.Store]:
        measured = [folder] if files_in(folder, verdicts.ROW_SETS) else []
        rows = verdicts.Store(measured, device, lambda row: is_of(row, environment.git_commit))
        return [verdicts.evaluate(each, rows) for each in entries.load()], rows

    how = SweepOptions(gpu=device, output=folder, timeout_s=timeout_s, retry=False, calibrate=False)
    how = dataclasses.replace(how, time_limit_s=ends - time.monotonic())
    try:
        left = run_missing(evaluated, how, load_sweeps())
        if not left and (missing := unfinished(own, folder, environment)):
            limit_s = ends - time.monotonic()
            for _, judged in bars.measure_bars(missing, rounds=None, output=folder, time_limit_s=limit_s):
                for verdict in judged:
                    note(" | ".join(f"{name} {value}" for name, value in verdict.items() if value is not None))
            left = bool(unfinished(own, folder, environment))
    finally:
        note(*merge(folder))
    note(f"{folder}: {'cases are left; run the same command again' if left else 'all cases of this machine are there'}")
    return folder, left


def unfinished(known: Sequence[bars.Bar], folder: Path, environment: Environment) -> list[bars.Bar]:
    """Return the bars of the problems of which no run in a folder has all cases, of the same code on the same device.

    Cases that cannot be tried here do not count: merging drops their rows, so they would always be missing.
    """
    # Rows of the bars have no accelerator, those of sweeps do.
    runs = [
        {row["case_id"] for row in rows}
        for rows in grouped(rows_of(folder, environment, accelerator=None), itemgetter("run_id")).values()
    ]
    left: list[bars.Bar] = []
    for problem in grouped(known, attrgetter("problem")).values():
        cases = {item.case.case_id for item in separate(bars.planned_cases(problem), environment)[0]}
        if not any(cases <= run for run in runs):
            left += problem
    return left
