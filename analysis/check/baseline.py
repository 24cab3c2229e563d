"""Baselines: runs that others are compared with, each with its provenance in a JSON file beside it.

The baseline of an accelerator is a folder of results, ``results/<accelerator>``; of every case its newest row counts.
Promoting a run puts its file there, together with ``<file>.baseline.json``: who promoted it, when, from where, the
commit and the environment it was measured at, and which runs it replaces.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...results.select import COMPARED_COLUMNS, Row, device_of, load_rows, newest
from ...results.store import files_in, replacing, result_files

PROVENANCE_SUFFIX = ".baseline.json"


def promote(
    source: Path, *, run: str | None = None, into: Path | None = None, by: str | None = None, allow_dirty: bool = False
) -> tuple[Path, dict[str, Any]]:
    """Make a run the baseline of its accelerator.

    Args:
        source: its file, or a folder with runs.
        run: the run's id or how it begins, where there are several.
        into: folder of the baseline; results/<accelerator> where it is None.
        by: who promotes it; None asks git, the CI and the operating system, in that order.
        allow_dirty: whether a run measured with uncommitted changes will do.

    Returns:
        the baseline's file and the provenance that was written beside it.

    Raises:
        ValueError: no such run or several, a run that measured nothing, of several accelerators, with uncommitted
            changes, or older than what it would replace; a folder with another accelerator's rows.
        FileExistsError: the run is the baseline already.
    """
    path, rows = _one_run(source, run)
    devices = sorted({device_of(row) for row in rows})
    if len(devices) > 1:
        raise ValueError(f"a baseline must be of one accelerator, got {', '.join(devices)} in {path}")
    if not any(row["status"] == "ok" for row in rows):
        raise ValueError(f"a baseline must have measured cases, got none in {path}")
    if any(row["git_dirty"] for row in rows) and not allow_dirty:
        raise ValueError(f"a baseline must be of a commit, got uncommitted changes in {path}: --allow-dirty takes it")
    if into is None and rows[0]["device_accelerator"] is None:
        raise ValueError(f"{devices[0]} is no accelerator that lrbench knows: name a folder with --into")
    folder = into or Path("results") / devices[0]
    replaced = _replaced(rows, folder, devices[0])
    target = folder / path.name
    if target.exists():
        raise FileExistsError(f"{target} is there already: this run is part of the baseline")
    provenance = _provenance(path, rows, devices[0], by, replaced)
    beside = target.with_name(target.name.removesuffix(".parquet") + PROVENANCE_SUFFIX)
    for file, content in ((target, path.read_bytes()), (beside, (json.dumps(provenance, indent=2) + "\n").encode())):
        with replacing(file) as written:
            written.write(content)
    return target, provenance


def _one_run(source: Path, run: str | None) -> tuple[Path, list[dict[str, Any]]]:
    runs: dict[str, tuple[Path, list[dict[str, Any]]]] = {}
    for path in result_files(source):
        for row in load_rows(path):
            if run is None or row["run_id"].startswith(run):
                known, rows = runs.setdefault(row["run_id"], (path, []))
                if known != path:
                    raise ValueError(f"run {row['run_id']} must lie in one file, got {known} and {path}")
                rows.append(row)
    if len(runs) != 1:
        given = ", ".join(f"{run_id[:8]} ({path.name})" for run_id, (path, _) in list(runs.items())[:8]) or "none"
        raise ValueError(f"a baseline is made of one run, got {given}: name it with --run")
    path, rows = next(iter(runs.values()))
    if any(row["run_id"] != rows[0]["run_id"] for row in load_rows(path)):
        raise ValueError(f"the file of a baseline must hold one run, got several in {path}")
    return path, rows


def _replaced(rows: Sequence[Row], folder: Path, device: str) -> list[dict[str, Any]]:
    """Return the runs whose rows of the same cases the promoted ones replace, with how many."""
    if not files_in(folder):
        return []
    present = load_rows(folder)
    others = sorted({device_of(row) for row in present} - {device})
    if others:
        raise ValueError(f"{folder} must hold results of {device}, got {', '.join(others)}")
    known = newest(present)
    same = [(row, known[row["case_id"]]) for row in rows if row["case_id"] in known]
    for new, old in same:
        if old["run_id"] != new["run_id"] and old["measured_at"] > new["measured_at"]:
            raise ValueError(
                f"a baseline must be newer than what it replaces, got {new['measured_at']} for case {new['case_id']}, "
                f"where {folder} has {old['measured_at']}"
            )
    counted = Counter((old["run_id"], old["git_commit"]) for _, old in same)
    return [{"run_id": run_id, "git_commit": commit, "cases": n} for (run_id, commit), n in counted.items()]


def _provenance(
    path: Path, rows: Sequence[Row], device: str, by: str | None, replaced: list[dict[str, Any]]
) -> dict[str, Any]:
    first = rows[0]
    times = sorted(row["measured_at"] for row in rows)
    return {
        "promoted_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "promoted_by": by or _who(),
        "promoted_from": path.name,
        "run_id": first["run_id"],
        "measured_from": times[0],
        "measured_to": times[-1],
        "git_commit": first["git_commit"],
        "git_dirty": first["git_dirty"],
        "lrbench_version": first["lrbench_version"],
        "device_accelerator": device,
        "environment": {column: first[column] for column in COMPARED_COLUMNS},
        "cases": dict(Counter(row["status"] for row in rows)),
        "noisy_cases": sum(row["noise"] is not None for row in rows),
        "replaces": replaced,
    }


def _who() -> str:
    """Return the name that git signs with, else who runs the CI job, else the login name."""
    name = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git = subprocess.run(("git", "config", "user.name"), capture_output=True, text=True, timeout=10)
        name = git.stdout.strip()
    with contextlib.suppress(KeyError, OSError):
        return name or os.environ.get("GITHUB_ACTOR") or os.environ.get("GITLAB_USER_LOGIN") or getpass.getuser()
    return "unknown"
