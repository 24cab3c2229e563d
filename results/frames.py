"""Results as pandas frames: loading with a schema check, and the selections that figures and reports share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .schema import RECORD_COLUMNS, SIZE_COLUMNS

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

PROBLEM_COLUMNS = ("op", "impl", "mode", "dtype", "state_dtype", *(n for n in SIZE_COLUMNS if n != "chunk_size"))
"""What identifies a problem and who computes it; the chunk size is a setting to choose."""

BULKY_COLUMNS = ("time_samples_ms",)


def load_results(
    paths: str | Path | Iterable[str | Path], columns: Sequence[str] | None = None, *, samples: bool = False
) -> pd.DataFrame:
    """Load result files, and every parquet file under result folders, into one frame.

    Columns are cast where that loses nothing; a column that a file lacks is null, and a column that no record has is
    left out.

    Args:
        paths: parquet files or folders.
        columns: the columns wanted; None means every column but ``time_samples_ms``.
        samples: whether ``time_samples_ms`` is loaded where ``columns`` is None.

    Returns:
        a frame in the record's column order, with two columns more where their parts are loaded: ``tokens``
        (batch x seq_len) and ``embedding_dim`` (num_heads x head_dim_v, or channels).

    Raises:
        ValueError: no such path, no parquet file in it, a file that is no lrbench result or has another schema version,
            or a column that does not cast without loss.
    """
    table = read_table(paths, columns, samples=samples)
    return with_derived(table.to_pandas(split_blocks=True, self_destruct=True))


def read_table(
    paths: str | Path | Iterable[str | Path], columns: Sequence[str] | None = None, *, samples: bool = False
) -> pa.Table:
    """Load results as :func:`load_results` does, but as an arrow table: without pandas and without derived columns."""
    import pyarrow as pa

    from .store import read_file

    if columns is None:
        columns = [name for name in RECORD_COLUMNS if samples or name not in BULKY_COLUMNS]
    unknown = sorted(set(columns) - set(RECORD_COLUMNS))
    if unknown:
        raise ValueError(f"columns must be columns of a record, got {', '.join(unknown)}")
    return pa.concat_tables([read_file(path, columns=columns) for path in result_files(paths)])


def result_files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """Return the result files that ``paths`` name or hold, sorted within a folder; ValueError where there are none.

    Calibrations and profiles in a folder are passed over.
    """
    from .store import holds_results

    files: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        path = Path(path)
        found = [path]
        if path.is_dir():
            found = sorted(p for p in path.rglob("*.parquet") if not p.name.startswith(".") and holds_results(p))
        if not found:
            raise ValueError(
                f"results must be a parquet file or a folder with some, got {path} (no parquet file in it)"
            )
        if not found[0].is_file():
            raise ValueError(f"results must be a parquet file or a folder with some, got {path} (does not exist)")
        files += found
    if not files:
        raise ValueError("results must name at least one parquet file or folder, got none")
    return files


def with_derived(frame: pd.DataFrame) -> pd.DataFrame:
    """Add ``tokens`` and ``embedding_dim`` where the size columns they come from are there."""
    if {"batch", "seq_len"} <= set(frame.columns):
        frame["tokens"] = frame["batch"] * frame["seq_len"]
    if {"num_heads", "head_dim_v", "channels"} <= set(frame.columns):
        frame["embedding_dim"] = (frame["num_heads"] * frame["head_dim_v"]).fillna(frame["channels"])
    return frame


def families(frame: pd.DataFrame) -> list[str]:
    """Return the kernel families that rows are of, the one with most measured rows first."""
    counts = ok_rows(frame)["kernel"].value_counts()
    return sorted(set(frame["kernel"].dropna()), key=lambda name: (-counts.get(name, 0), name))


def of_family(frame: pd.DataFrame, kernel: str) -> pd.DataFrame:
    """Keep the rows of a kernel family: those measured for it, and those of its operations, whatever they were for.

    Outside packages' rows of other operations (attention beside Lightning) are those measured beside it.

    Raises:
        ValueError: no row is of that family; the message lists those that are there.
    """
    here = frame["kernel"] == kernel
    if not here.any():
        raise ValueError(f"kernel must be one of {', '.join(families(frame))} in these results, got {kernel!r}")
    own = set(frame["op"][here & (frame["provider"] == "lrbench")])
    rows = frame[here | frame["op"].isin(own)]
    # What was other mathematics beside another family computes this one's operation.
    return rows.assign(same_math=rows["same_math"].where(~rows["op"].isin(own), True))


def latest_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Keep the newest row of every case on every device, by ``measured_at``; the order of rows is kept."""
    # Only the keys are put in order, not the whole frame.
    keys = frame[["case_id", "device_name", "measured_at"]].reset_index(drop=True)
    newest = keys.sort_values("measured_at", kind="stable").drop_duplicates(["case_id", "device_name"], keep="last")
    return frame.take(sorted(newest.index))


def ok_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Keep the rows that were measured."""
    return frame[is_ok(frame)]


def is_ok(frame: pd.DataFrame) -> pd.Series:
    """Return which rows were measured."""
    return (frame["status"] == "ok") & frame["time_ms"].notna()


def failed_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Keep the rows that were not measured, whatever the status says why."""
    return frame[frame["status"] != "ok"]


def best_rows(frame: pd.DataFrame, by: Sequence[str] = PROBLEM_COLUMNS, *, minimise: str = "time_ms") -> pd.DataFrame:
    """Keep one measured row per value of ``by``: the one of least ``minimise``.

    With the default ``by`` that is every implementation at its best chunk size for every problem. Null is a value.
    """
    measured = is_ok(frame) & frame[minimise].notna()
    positions = measured.to_numpy().nonzero()[0]
    # Only the keys are put in order, not the whole frame: a million rows are loaded and reduced in seconds.
    order = positions[frame[minimise].to_numpy()[positions].argsort(kind="stable")]
    repeated = frame[[name for name in by if name in frame.columns]].take(order).duplicated(keep="first")
    return frame.take(sorted(order[~repeated.to_numpy()]))


def single(frame: pd.DataFrame, column: str, wanted: object = None, *, option: str | None = None) -> pd.DataFrame:
    """Keep the rows whose ``column`` is ``wanted``; where nothing is wanted there must be one value only.

    Raises:
        ValueError: no row has the wanted value, or there are several values and none is wanted; the message lists them.
    """
    values = [value for value in frame[column].unique() if value == value and value is not None]
    listed = ", ".join(str(value) for value in sorted(values, key=str)) or "none"
    option = option or column
    if wanted is not None:
        if wanted not in values:
            raise ValueError(f"{option} must be one of {listed} in these results, got {wanted!r}")
        return frame[frame[column] == wanted]
    if len(values) > 1:
        raise ValueError(f"{option} must be chosen where results hold several: {listed}")
    return frame
