"""Count rows of results anew: ``python -m lrbench.bench.recount results/h200_sxm``.

What a row says of FLOPs and bytes, and of rates and roofs by them, is as they were counted when it was measured. Where
they are counted otherwise now, these columns are filled in anew; what was measured stays as it was.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from ..analysis.accelerators.known import get_accelerator
from ..results import store
from ..results.frames import result_files
from ..results.schema import Case, Record
from .derived import derive

TOLERANCE = 1e-6
"""Relative difference up to which two counts are the same: sums of floats in another order."""

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)


def recount(record: Record) -> Record:
    """Return the row with what is counted of it now, or the row itself where that is what it says.

    Raises:
        ValueError: an accelerator that is not known here.
    """
    case = Case(**{name: getattr(record, name) for name in Case.__dataclass_fields__})
    keys = (record.accelerator, record.device_accelerator)
    accelerator, device = (None if key is None else get_accelerator(key) for key in keys)
    counted = derive(accelerator, device, case, record.time_ms)
    if all(_same(getattr(record, name), value) for name, value in counted.items()):
        return record
    return dataclasses.replace(record, **counted)


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, float) and isinstance(now, float):
        return math.isclose(before, now, rel_tol=TOLERANCE)
    return before == now


@app.command()
def main(
    paths: Annotated[list[Path], typer.Argument(help="Result files, or folders with some.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what is counted otherwise now; write nothing.")
    ] = False,
) -> None:
    """Fill in what is counted of rows anew."""
    try:
        for path in result_files(paths):
            rows = [Record(**row) for row in store.read_file(path).to_pylist()]
            counted = [recount(row) for row in rows]
            if changed := sum(new is not old for new, old in zip(counted, rows, strict=True)):
                typer.echo(f"{path}: {changed} of {len(rows)} rows")
                if not dry_run:
                    store.write_parquet(map(dataclasses.asdict, counted), path)
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    app()
