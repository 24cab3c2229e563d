"""What the commands show: texts as they are, and a progress bar that an ordinary terminal holds."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from lrbench.bench import display
from lrbench.tests.bench import faults
from lrbench.tests.bench.test_store import FAILED, RECORD


@pytest.mark.parametrize(
    "text",
    [
        "OSError: cannot open [/usr/lib/libcuda.so]",
        "pip install 'flash-attn-4[cu13]==4.0.0b36'",
        "[enforce fail at alloc.cpp:117] [red]err == 0[/red] :warning:",
        "unbalanced [/] and \\[",
    ],
)
def test_texts_in_brackets_are_printed_as_they_are(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    display.print_summary([RECORD, dataclasses.replace(FAILED, reason=text)])
    display.show([{"missing": text}], "table")
    assert capsys.readouterr().out.count(text) == 2


def test_the_progress_bar_fits_eighty_columns() -> None:
    progress = display.SweepProgress()
    progress._console = Console(file=io.StringIO(), width=80, force_terminal=True)
    item = faults.planned("exhausts_memory", seq_len=65536, chunk_size=1024, mode="fwbw")
    progress.begin(2826, "measuring")
    try:
        for status in ("oom", "error"):
            progress.started(item)
            progress.finished(item, status)
        assert progress._bar is not None
        screen = Console(file=io.StringIO(), width=80)
        with screen.capture() as capture:
            screen.print(progress._bar.get_renderable())
    finally:
        progress.end()
    first, second = capture.get().splitlines()
    what, done, elapsed, left, remaining = first.translate({ord(c): " " for c in "━╸╺"}).split()
    assert (what, done, left) == ("measuring", "2/2826", "left")
    assert all(time.replace(":", "").replace("-", "0").isdigit() for time in (elapsed, remaining))
    assert second.rstrip() == f"1 oom, 1 error; {display.describe(item)}"


def test_a_sweep_elsewhere_shows_the_modelled_time_of_the_gpu_that_was_named() -> None:
    times = {(64, 512): (5.0, 0.5), (128, 512): (7.0, 0.25), (64, 1024): (9.0, 0.75)}
    rows = [
        dataclasses.replace(
            RECORD,
            chunk_size=chunk,
            seq_len=seq_len,
            time_ms=time_ms,
            model_time_ms=model_ms,
            accelerator="h100_sxm",
            device_accelerator="cpu",
        )
        for (chunk, seq_len), (time_ms, model_ms) in times.items()
    ]
    other = [dataclasses.replace(row, op="simple_gla", model_time_ms=None) for row in rows]
    ((_, table),) = display.best_tables([*rows, *other])
    shown = [(row["operation"], row["implementation"], row["512"], row["1k"]) for row in table]
    assert shown == [
        (RECORD.op, RECORD.impl, "5 @64", "9 @64"),
        (RECORD.op, "(model of h100_sxm)", "0.25 @128", "0.75 @64"),
        ("simple_gla", RECORD.impl, "5 @64", "9 @64"),
    ]
    there = [dataclasses.replace(row, device_accelerator="h100_sxm") for row in rows]
    assert [len(table) for _, table in display.best_tables(there)] == [1]
