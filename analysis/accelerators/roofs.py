"""Measured roofs: the rates a device reached in a calibration, stored as rows of their own, to stand beside its
specification or in its place.

``lrbench calibrate`` writes ``_other/roofs.parquet``, a sweep on a GPU ``_other/<run>.roofs.parquet``. One row is one
rate: a large copy, a square matrix product of one dtype, or chains of fused multiply-adds. A run of the bars writes the
copies that its problems are held to as rows of the same kind, ``_other/<run>.copies.parquet``; they are no calibration.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...results import store
from ...results.schema import RoofRow
from .accelerator import Accelerator, Roofs

FILE_NAME = "roofs.parquet"


def check_output(path: Path) -> list[dict[str, Any]]:
    """Return the rows in ``path``, if any; ValueError where it holds something else than calibrations."""
    return store.read_file(path, RoofRow).to_pylist() if path.exists() else []


def write_roofs(rows: Iterable[RoofRow], path: Path) -> None:
    """Add rows to the calibrations in ``path``, which is replaced as a whole: readers see the old file or the new.

    Errors as :func:`check_output`.
    """
    store.write_parquet([*check_output(path), *map(dataclasses.asdict, rows)], path, RoofRow)


def as_roofs(rows: Sequence[dict[str, Any]], *, where: str) -> Roofs:
    """Return the rates of one calibration's rows; ``where`` they are stored goes into the source."""
    rates, about = {(row["quantity"], row["dtype"]): row["rate"] for row in rows}, rows[0]
    versions = [f"{name} {version}" for name in ("driver", "torch") if (version := about[f"{name}_version"])]
    form = "short calibration" if about["short"] else "calibration"
    return Roofs(
        matrix_flops=MappingProxyType({dtype: rate for (what, dtype), rate in rates.items() if what == "matmul"}),
        bandwidth_bytes_s=rates["copy", None],
        vector_flops=rates.get(("fma", "fp32")),
        source=f"{form} of {about['measured_at']} on {about['device_name']} ({', '.join(versions)}), {where}",
    )


def stored_roofs(paths: Iterable[Path] | None = None) -> dict[str, Roofs]:
    """Return the newest stored calibration of every accelerator that has one, by key.

    Args:
        paths: files, or folders looked through for ``roofs.parquet`` and ``*.roofs.parquet``; None: the committed
            results, and those of the working directory (``results/``).

    Raises:
        ValueError: a file holds no calibration.
        FileNotFoundError: a path does not exist.
    """
    runs: dict[tuple[str, str], tuple[list[dict[str, Any]], Path]] = {}
    named = (FILE_NAME, f"*.{FILE_NAME}")
    for path in itertools.chain.from_iterable(
        sorted(file for name in named for file in path.rglob(name)) if path.is_dir() else [path]
        for path in (_default_folders() if paths is None else paths)
    ):
        for row in store.read_file(path, RoofRow).drop(["time_samples_ms"]).to_pylist():
            if row["device_accelerator"] is not None:
                runs.setdefault((row["device_accelerator"], row["run_id"]), ([], path))[0].append(row)
    newest: dict[str, Roofs] = {}
    for (key, _), (rows, path) in sorted(runs.items(), key=lambda item: item[1][0][-1]["measured_at"]):
        if {"copy", "matmul"} <= {row["quantity"] for row in rows}:
            newest[key] = as_roofs(rows, where=_shown(path))
    return newest


def with_stored_roofs(accelerator: Accelerator) -> Accelerator:
    """Return the accelerator with the newest stored calibration as its measured roofs, where there is one.

    Not the CPU: calibrations of other machines' CPUs may lie among the results.
    """
    stored = None if accelerator.key == "cpu" else stored_roofs().get(accelerator.key)
    return accelerator if stored is None else dataclasses.replace(accelerator, measured=stored)


def with_roofs(accelerator: Accelerator, choice: str) -> Accelerator:
    """Return the accelerator with the roofs that a user chose; its ``source`` says which they are.

    Args:
        choice: spec; measured (the newest stored calibration, else the measured roofs of the specification's entry);
            or the path of a calibration. The CPU is always as measured. ValueError where nothing was measured.
    """
    if choice == "spec" or (choice == "measured" and accelerator.key == "cpu"):
        return accelerator
    if choice == "measured":
        found = with_stored_roofs(accelerator)
        if found.measured is None:
            how = f"run `lrbench calibrate` on a {accelerator.key}, or take --roofs spec"
            raise ValueError(f"no calibration of a {accelerator.key} is stored: {how}")
        return found.with_measured_roofs()
    path = Path(choice)
    if not path.exists():
        raise ValueError(f"roofs must be spec, measured, or a file or folder with a calibration, got {choice!r}")
    roofs = stored_roofs([path]).get(accelerator.key)
    if roofs is None:
        raise ValueError(f"roofs must hold a calibration of {accelerator.key}, got {choice} with none")
    return dataclasses.replace(accelerator, measured=roofs).with_measured_roofs()


def _default_folders() -> list[Path]:
    folders = dict.fromkeys((store.HERE, Path("results").resolve()))
    return [folder for folder in folders if folder.is_dir()]


def _shown(path: Path) -> str:
    """Return the path from here, or from the root of the repository."""
    bases = (base for base in (Path.cwd(), store.HERE.parent) if path.resolve().is_relative_to(base))
    return str(next((path.resolve().relative_to(base) for base in bases), path))
