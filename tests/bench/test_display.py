"""What the commands show: texts as they are, and a progress bar that an ordinary terminal holds."""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Callable

import pytest
from rich.cells import cell_len
from rich.console import Console

from lrbench.analysis.accelerators.known import get_accelerator
from lrbench.analysis.model.answers import ask
from lrbench.bench.drive.progress import SweepProgress
from lrbench.bench.show import choice, display
from lrbench.tests.bench import faults
from lrbench.tests.command_line import without_styles
from lrbench.tests.results.test_store import FAILED, RECORD


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


def test_lists_in_csv_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    display.show([{"lengths": ["1k", "4k"], "name": "a"}], "csv")
    assert capsys.readouterr().out == 'lengths,name\n"[""1k"", ""4k""]",a\n'


def test_wide_characters_count_twice(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    letters = ("\N{CJK UNIFIED IDEOGRAPH-6E2C}", "a")
    display.show([{f"column {n}": f"{x * 12}{n}" for n in range(6)} for x in letters], "table", fold=True)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= 40
    assert [line.split(": ")[0].strip() for line in lines[:7]] == [*(f"column {n}" for n in range(6)), "column 0"]


def test_the_progress_bar_fits_eighty_columns() -> None:
    progress = SweepProgress()
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
    assert all(shown.replace(":", "").replace("-", "0").isdigit() for shown in (elapsed, remaining))
    assert second.startswith("1 oom, 1 error; mlstm_sig exhausts_memory fwbw B=1 T=64k")


def test_the_time_left_is_what_is_expected_corrected_by_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    items = [faults.planned("right", seq_len=seq_len) for seq_len in (64, 128, 256)]
    screen = io.StringIO()
    progress = SweepProgress({item.identity: s for item, s in zip(items, (10, 20, 90), strict=True)})
    progress._console = Console(file=screen, width=200)
    progress.begin(3, "measuring")
    for item, at in zip(items, (130.0, 160.0, 170.0), strict=True):
        now = at
        progress.finished(item, "ok")
    # 30 s went where 10 were expected, and ten more count as seen as expected: (30 + 10) / (10 + 10) times 110 s.
    first, second = screen.getvalue().splitlines()
    assert "1 of 3 cases, about 4 min left" in first
    assert "2 of 3 cases, about 3 min left" in second
    progress._expected_s = {}
    progress.begin(2, "measuring in turn")
    now = 190.0
    progress.finished(items[0], "ok")
    assert "1 of 2 cases, about 20 s left" in screen.getvalue()
    # Compiling is no part of what cases take: 40 s for 4 cases, so 20 s for the 2 that are left.
    progress.begin(2, "measuring")
    progress.compiling(4, 2)
    now = 230.0
    progress.started(items[0])
    now = 260.0
    progress.finished(items[0], "ok")
    assert "1 of 2 cases, about 50 s left" in screen.getvalue()


Shown = Callable[..., list[str]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """Return the lines that a terminal of so many columns shows of rows, without styles."""
    monkeypatch.setenv("FORCE_COLOR", "1")

    def show(rows: list[dict[str, object]], width: int, **options: str) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        display.show(rows, "table", **options)
        return without_styles(capsys.readouterr().out).splitlines()

    return show


def test_a_table_that_is_too_wide_says_once_what_its_rows_share(shown: Shown) -> None:
    rows = [{"device": "h200_sxm", "impl": f"package.function_{n}", "empty": None, "time_ms": n} for n in (1, 2)]
    assert shown(rows, 30)[:2] == ["device h200_sxm", "impl                time_ms"]
    assert shown(rows, 22)[:3] == ["device h200_sxm", "impl:", "    package.function_1"]


def test_a_sweep_elsewhere_shows_what_predict_answers_for_the_gpu_that_was_named() -> None:
    heads = {"batch": 8, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256}
    here = dataclasses.replace(RECORD, accelerator="h200_sxm", device_accelerator="cpu", **heads)
    rows = [
        dataclasses.replace(here, chunk_size=chunk, seq_len=seq_len, time_ms=time_ms, model_time_ms=0.0001)
        for chunk, seq_len, time_ms in ((64, 512, 5.0), (128, 512, 7.0), (64, 1024, 9.0))
    ]
    # Without a modelled time it is not counted; nothing computes attention in fp32 on a GPU.
    other = [dataclasses.replace(row, op="simple_gla", model_time_ms=None) for row in rows]
    other += [dataclasses.replace(row, op="attention", dtype="fp32") for row in rows]
    tables = [table for _, table in display.best_tables([*rows, *other])]
    shown = [(row["operation"], row["implementation"], row["512"], row["1k"]) for table in tables for row in table]
    named = {name: getattr(RECORD, name) for name in ("mode", "dtype")}
    answers = []
    for seq_len in (512, 1024):
        question = ask(RECORD.op, heads | {"seq_len": seq_len}, accelerator=get_accelerator("h200"), **named)
        answers.append(question.answer(choice.implementation(question, None)))
    assert {(answer.case.impl, answer.basis) for answer in answers} == {("whole_state", "fitted")}
    assert shown == [
        (RECORD.op, RECORD.impl, "5 @64", "9 @64"),
        (RECORD.op, "(whole_state on h200_sxm)", *(f"~{each.time_ms:.4g} @{each.chunk_size}" for each in answers)),
        ("simple_gla", RECORD.impl, "5 @64", "9 @64"),
        ("attention", RECORD.impl, "5 @64", "9 @64"),
    ]
    there = [dataclasses.replace(row, device_accelerator="h200_sxm") for row in rows]
    assert [len(table) for _, table in display.best_tables(there)] == [1]


ROWS = [
    {
        "package": "flash-attn-4",
        "version": None,
        "modes": "fw/fwbw/bw/step",
        "rate": 989.0,
        "missing": "flash_attn.cute is not installed: pip install 'flash-attn-4[cu13]==4.0.0b36' --no-build-isolation",
    },
    {"package": "fla-core", "version": "0.6.0", "modes": "fw", "rate": 66.9, "missing": "a text of several words " * 6},
]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 160])
def test_no_word_is_broken(width: int, shown: Shown) -> None:
    lines = shown(ROWS, width, title="packages that are here or missing")
    assert lines[0].strip() == "packages that are here or missing"
    assert [line for line in lines if len(line.rstrip()) > width] == []
    words = {"flash-attn-4", "fla-core", "0.6.0", "989", "66.9", "flash_attn.cute", "several", "--no-build-isolation"}
    assert words <= set(" ".join(lines).split())


def test_a_command_in_a_column_of_its_own_is_not_broken(shown: Shown) -> None:
    command = "pip install 'flash-attn-4[cu13]==4.0.0b36' --no-build-isolation"
    assert shown([{"install": command}, {"install": "pip install jax"}], 40) == ["install", command, "pip install jax"]


def test_rows_are_a_table_where_they_fit_and_one_after_the_other_where_not(shown: Shown) -> None:
    assert shown(ROWS, 120)[0].split() == list(ROWS[0])
    assert shown(ROWS, 60)[0] == "package: flash-attn-4  modes: fw/fwbw/bw/step  rate: 989"


def test_off_a_terminal_a_row_and_a_title_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    title = "a title that is longer than the table below it, which is narrow"
    display.show([{"a": 1, "b": None}, {"a": 2.5, "b": "x" * 500}], "table", title=title)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [title.split(), ["a", "b"], ["1"], ["2.5", "x" * 500]]
