"""The report: what it says follows from the rows, what is missing is said, and the page is whole in itself."""

from __future__ import annotations

import base64
import csv
import dataclasses
import html
import io
import itertools
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lrbench.analysis.report import export, markup
from lrbench.analysis.report.contents import Report
from lrbench.analysis.report.speedups import TIMES, speedups
from lrbench.results.schema import CASE_COLUMNS, Case
from lrbench.results.select import latest_rows, load_results, ok_rows
from lrbench.tests.command_line import Lrbench, one_line

from .. import rows as made
from .page import COMMITTED, ROOT, committed_page

SECTIONS = (
    "title", "summary", "results", "runtime", "memory", "head_dim", "chunk_size", "optimal_chunks", "rooflines",
    "speedups", "failures", "environment", "data",
)  # fmt: skip
SAMPLES = [0.99, 0.995, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.005, 1.01]


def row(op: str, impl: str, time_ms: float | None = None, **columns: Any) -> dict[str, Any]:
    """Return a row; sizes, mode and dtypes go to its case, all else to the record."""
    fields = {name: columns.pop(name) for name in (*columns,) if name in CASE_COLUMNS}
    if time_ms is not None:
        columns |= {"time_ms": time_ms, "time_samples_ms": [time_ms * each for each in SAMPLES]}
    return made.row(made.case(op, impl, **fields), **columns)


def report(rows: Iterable[Mapping[str, Any]], folder: Path, gpu: str = "h200") -> Report:
    return Report.load([made.write(rows, folder / "rows.parquet")], gpu)


def words(piece: markup.Html) -> str:
    """Return what a reader sees of a piece, images in words."""
    text = re.sub(r'<img[^>]*?alt="([^"]*)"[^>]*>', r"\1", piece.text)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def summary(made_report: Report) -> dict[str, str]:
    told = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", made_report.summary().text, re.DOTALL)
    return {about: words(markup.Html(said)) for about, said in told}


@pytest.mark.parametrize("factor", [0.5, 2.0, 3.25])
def test_summary_computes_its_figures_from_the_rows(factor: float, tmp_path: Path) -> None:
    baseline = row("mlstm_sig", "mlstm_kernels.xl_chunk_siging", 1.25 * factor)
    told = summary(report([row("mlstm_sig", "fused_chunk", 1.25), baseline], tmp_path))
    assert told["Measured"].startswith("2 cases of 2 implementations and 1 operation were run on NVIDIA H200")
    ours, theirs = "mLSTMsig · lrbench fused_chunk", "mLSTMsig · mlstm_kernels xl_chunk_siging"
    fastest, time_ms = (ours, 1.25) if factor > 1 else (theirs, 1.25 * factor)
    assert f"the fastest is {fastest} at T = 8k." in told["Forward"]
    assert f"{fastest} takes {markup.number(time_ms)} ms" in told["Forward"]
    found = re.search(
        r"lrbench fused_chunk is ([\d.]+) times \(([\d.]+) to ([\d.]+)\) as fast as (.*?)\.$", told["Forward"]
    )
    assert found is not None
    ratio, low, high = (float(found[n]) for n in (1, 2, 3))
    assert ratio == pytest.approx(factor, abs=0.005)
    assert 0.98 * factor < low <= ratio <= high < 1.02 * factor
    assert found[4] == theirs


def mlp(tokens: int, impl: str, time_ms: float, run: str, **tested: Any) -> dict[str, Any]:
    """Return a row of a gated MLP, of a run, measured with lowered clocks."""
    provider = impl.split(".")[0] if "." in impl else "lrbench"
    sizes = {"batch": 1, "seq_len": tokens, "d_model": 128, "d_ff": 512}
    each = Case(kernel="gated-mlp", op="gated_mlp", impl=impl, provider=provider, mode="fw", dtype="bf16", **sizes)
    columns = {"time_ms": time_ms, "time_samples_ms": [time_ms] * 3, "run_id": run, "throttled": "power cap"}
    return made.row(each, **{**columns, **tested})


def test_families_are_told_one_after_the_other(tmp_path: Path) -> None:
    """Each section names them, none mixes them, and a family without a chunk size is left out where that is shown."""
    rows = [row("mlstm_sig", "fused_chunk", 1.0 / chunk, chunk_size=chunk) for chunk in (64, 128)]
    rows += [mlp(tokens, "fused", tokens / 1e3, "a", throttled=None) for tokens in (1024, 4096)]
    # Of an operation of another family's, for whichever it was measured.
    rows.append(row("lightning", "lightning_attn.v2", 3.0, chunk_size=None))
    found = report(rows, tmp_path)
    assert [part.subject.family for part in found.parts] == ["tfla", "gated-mlp"]
    for name in ("summary", "results", "runtime", "memory", "rooflines", "speedups"):
        told = getattr(found, name)().text
        assert re.findall("<h3>(.*?)</h3>", told) == ["tfla", "gated-mlp"], name
        first, second = told.split("<h3>gated-mlp</h3>")
        assert "gated MLP" not in first and "mLSTMsig" not in second, name
    assert re.findall("<h3>(.*?)</h3>", found.chunk_size().text) == ["tfla"]
    assert report(rows[:2], tmp_path).parts == ()


def test_sides_with_lowered_clocks_are_compared_within_a_run(tmp_path: Path) -> None:
    liger = "liger_kernel.silu_mul"
    old, new = "2026-11-21T10:00:00+00:00", "2026-11-21T11:00:00+00:00"
    rows = [
        mlp(1024, "fused", 1.0, "a", measured_at=old),
        mlp(1024, liger, 1.1, "a", measured_at=old),
        mlp(1024, "fused", 1.2, "b", measured_at=new),
    ]
    (each,) = report(rows, tmp_path).speedups_found
    assert (each.ratio, each.same_run, each.again) == (pytest.approx(1.1), True, True)
    (each,) = report([{**one, "throttled": None} for one in rows], tmp_path).speedups_found
    assert (each.ratio, each.same_run, each.again) == (pytest.approx(1.1 / 1.2), False, False)


def test_summary_says_where_which_is_fastest(tmp_path: Path) -> None:
    times = {1024: (30.0, 10.0), 2048: (30.0, 20.0), 8192: (30.0, 40.0)}
    rows = [
        row(op, impl, times[length][n], seq_len=length)
        for length in times
        for n, (op, impl) in enumerate((("mlstm_sig", "fused_chunk"), ("attention", "flash_attn.v4")))
    ]
    told = summary(report(rows, tmp_path))["Forward"]
    assert "the fastest is attention · flash_attn v4 at T = 1k, 2k; mLSTMsig · lrbench fused_chunk at T = 8k." in told
    assert (
        "Beside other mathematics, at equal tokens and embedding dim, mLSTMsig · lrbench fused_chunk is 1.33 times"
        in told
    )


def test_failures_are_told_with_their_reasons(tmp_path: Path) -> None:
    failed = [
        row("mlstm_sig", "limit_chunk", seq_len=length, status="oom", reason=f"{length} bytes too many")
        for length in (1024, 2048)
    ]
    failed.append(row("mlstm_exp", "fused_chunk", status="crash", reason="<aborted> & gone"))
    made_report = report([row("mlstm_sig", "fused_chunk", 1.0), *failed], tmp_path)
    assert "1 was timed, 3 were not (2 oom, 1 crash)" in summary(made_report)["Measured"]
    told = summary(made_report)["Failures"]
    assert "limit_chunk fw, 2 oom: 1024 bytes too many (and 1 more that differ in figures)" in told
    assert "mLSTMexp · lrbench fused_chunk fw, 1 crash: <aborted> & gone" in told
    shown = made_report.failures().text
    assert "&lt;aborted&gt; &amp; gone" in shown
    assert shown.count("<tr>") == 1 + 2


def test_suspect_rows_count_in_no_comparison(tmp_path: Path) -> None:
    rows = [
        row("mlstm_sig", "fused_chunk", 0.2, chunk_size=64),
        row("mlstm_sig", "fused_chunk", 2.0, chunk_size=128),
        row("mlstm_sig", "mlstm_kernels.xl_chunk_siging", 6.0),
    ]
    made_report = report(rows, tmp_path)
    assert [each.ratio for each in made_report.speedups_found] == pytest.approx([3.0])
    assert "1 row was suspect (945 TFLOP/s is above the measured roof" in summary(made_report)["With care"]


def test_comparisons_match_problem_by_problem() -> None:
    """Held to a plain loop over the committed rows: equal sizes, each side at its fastest chunk size.

    Where clocks were lowered, an older run that measured both sides counts.
    """
    subject = Report.load([COMMITTED], "h200").subject
    rows = ok_rows(latest_rows(load_results(COMMITTED)))
    rows = rows[rows["suspect"].isna() & (rows["op"] == "mlstm_sig")]
    sizes = ["mode", "dtype", "batch", "seq_len", "num_heads", "head_dim_qk", "head_dim_v"]
    ours = rows[rows["provider"] == "lrbench"].groupby(sizes)["time_ms"].min()
    theirs = rows[rows["provider"] == "mlstm_kernels"].groupby(sizes)["time_ms"].min()
    expected = (theirs / ours).dropna()
    found = [c for c in speedups(subject) if c.theirs.op == "mlstm_sig"]
    assert len(found) == len(expected) > 30
    newest = [c for c in found if not c.again]
    assert len(newest) > 25
    for c in newest:
        assert c.ratio == pytest.approx(expected[tuple(getattr(c.ours, name) for name in sizes)])
    assert all(c.ends[0] <= c.ratio <= c.ends[1] for c in found if c.ends is not None)


def test_regret_is_what_the_modelled_choice_takes_longer(tmp_path: Path) -> None:
    times = {64: 3.0, 128: 2.0, 256: 1.5, 512: 1.0, 1024: 4.0}
    made_report = report([row("mlstm_sig", "fused_chunk", times[chunk], chunk_size=chunk) for chunk in times], tmp_path)
    (choice,) = made_report.choices
    assert choice.row.chunk_size == 512
    assert choice.modelled in times
    assert choice.regret_ms == pytest.approx(times[choice.modelled] - 1.0)
    assert "Chunk size" in summary(made_report)


@pytest.fixture
def channels(tmp_path: Path) -> Report:
    """RG-LRU on a CPU at two widths and chunk lengths, three times as fast as attention of the same width."""
    rows = []
    settings = {"kernel": "rglru", "mode": "fw", "dtype": "fp32"}
    for width, seq_len in itertools.product((256, 4096), (1024, 8192)):
        sizes = {"batch": 65536 // seq_len, "seq_len": seq_len, **settings}
        for chunk, time_ms in ((64, 1.5 * width / 1024), (128, width / 1024)):
            case = Case(**sizes, op="rglru", impl="torch", provider="lrbench", channels=width, chunk_size=chunk)
            rows.append(made.row(dataclasses.replace(case, state_dtype="fp32"), accelerator="cpu", time_ms=time_ms))
        heads = {"num_heads": width // 128, "head_dim_qk": 128, "head_dim_v": 128}
        case = Case(**sizes, op="attention", impl="torch.sdpa_cpu", provider="torch", **heads)
        rows.append(made.row(case, accelerator="cpu", time_ms=3 * width / 1024))
    return report(rows, tmp_path, "cpu")


def test_time_on_the_host_is_shown_where_rows_have_it(tmp_path: Path) -> None:
    rows = [row("mlstm_sig", "fused_chunk", 1.0), row("mlstm_sig", "limit_chunk", 2.0)]
    assert "host (ms)" not in words(report(rows, tmp_path).results())
    shown = words(report([{**rows[0], "host_ms": 0.0625}, rows[1]], tmp_path).results())
    assert "host (ms)" in shown
    assert "0.0625" in shown


def test_one_number_of_channels_is_shown(channels: Report) -> None:
    told = summary(channels)
    assert "4,096 channels" in told["Measured"]
    assert "RG-LRU · lrbench torch takes 4.00 ms" in told["Forward"]
    assert "3.00 times as fast as attention" in told["Forward"]
    assert "T = 8,192, 65,536 tokens, 4,096 channels" in words(channels.results())
    assert {c.theirs.embedding_dim for c in channels.speedups_found} == {4096}
    numbers = words(channels.head_dim())
    assert "time per call (ms) over channels implementation 256 4k" in numbers
    assert "RG-LRU lrbench torch 0.250 L 128 4.00 L 128" in numbers


def test_the_best_chunk_length_needs_no_model(channels: Report) -> None:
    assert len(channels.choices) == 4
    for choice in channels.choices:
        assert (choice.row.chunk_size, choice.slowest.chunk_size) == (128, 64)
        assert choice.report is choice.modelled is choice.regret_ms is None
    said = words(channels.optimal_chunks())
    assert "No model chooses for RG-LRU" in said
    assert f"fw channels 4k fp32 8,192 {' '.join([markup.ABSENT] * 4)} 128 4.00" in said
    assert f"64 50 {markup.ABSENT} {markup.ABSENT}" in said


def test_speed_ups_name_the_problem_and_no_unknown_version(channels: Report, tmp_path: Path) -> None:
    said = words(channels.speedups())
    assert f"fw channels 4k fp32 3.00{TIMES} 3.00{TIMES} 3.00{TIMES}" in said
    assert "nan" not in said
    rows = [
        row("mlstm_sig", impl, time_ms, driver_version=driver, cuda_version=cuda)
        for impl, time_ms, driver, cuda in (
            ("fused_chunk", 1.0, "570", None),
            ("mlstm_kernels.xl_chunk_siging", 2.0, "580", "13.0"),
        )
    ]
    said = words(report(rows, tmp_path).speedups())
    assert "driver 570 beside 580" in said
    assert "cuda" not in said
    assert "H=16 dim 128/256 bf16" in said


def test_an_mlp_is_told_over_its_tokens(tmp_path: Path) -> None:
    rows = [
        mlp(tokens, impl, factor * tokens / 1024, "run")
        for tokens, (impl, factor) in itertools.product((1024, 8192), (("torch", 1.0), ("liger_kernel.silu_mul", 2.0)))
    ]
    made_report = report(rows, tmp_path)
    told = summary(made_report)["Forward"]
    assert "at every number of tokens, 1k, 8k tokens" in told
    assert "At 8,192 tokens gated MLP · lrbench torch takes 8.00 ms" in told
    said = words(made_report.speedups())
    assert "1k tokens 8k tokens" in said
    assert f"d_model 128 d_ff 512 bf16 2.00{TIMES} 2.00{TIMES} 2.00{TIMES}" in said
    assert "over tokens implementation 1k 8k" in words(made_report.runtime())


def test_nothing_is_claimed_of_limits_that_were_not_asked(tmp_path: Path) -> None:
    """A CPU's rates are no limits: that no row is suspect says nothing there."""
    limits = "o time is beyond what the device allows"
    assert limits in summary(report([row("mlstm_sig", "fused_chunk", 1.0)], tmp_path))["With care"]
    assert limits not in summary(report(cpu_only(), tmp_path)).get("With care", "")


def test_rows_beside_the_shown_setting_are_told(tmp_path: Path) -> None:
    rows = [row("mlstm_sig", "fused_chunk", 1.0, seq_len=n) for n in (1024, 8192)]
    rows.append(row("mlstm_sig", "fused_chunk", 0.5, batch=1))
    told = summary(report(rows, tmp_path))["Measured"]
    assert "show 65,536 tokens, embedding dim 4,096, bf16, value head dim 256: 2 of 3 timed cases." in told


def nothing_timed() -> list[dict[str, Any]]:
    return [row("mlstm_sig", "fused_chunk", status="unavailable", reason="pip install triton")]


def cpu_only() -> list[dict[str, Any]]:
    lengths = (256, 1024)
    fields = {"accelerator": "cpu", "roofline_fraction": None, "suspect": None, "model_time_ms": 0.5}
    rows = [row("mlstm_sig", "torch", 9.0, seq_len=n, batch=1, dtype="fp32", **fields) for n in lengths]
    return [{**each, "accelerator": "h200_sxm"} for each in rows]


def channels_only() -> list[dict[str, Any]]:
    return [
        row("rglru", impl, time_ms, channels=4096, num_heads=None, head_dim_qk=None, head_dim_v=None, chunk_size=None,
            state_dtype=None, batch=8)
        for impl, time_ms in (("fused", 1.0), ("torch", 4.0))
    ]  # fmt: skip


OPTIONAL = (
    "time_samples_ms", "time_ci_low_ms", "time_ci_high_ms", "peak_memory_bytes", "intensity", "tflops", "bytes",
    "flops", "roofline_fraction", "device_accelerator",
)  # fmt: skip
"""What rows of an older or another tool may lack."""

LACKING = {
    "nothing timed": (nothing_timed, {"runtime": "Nothing was timed", "results": "Nothing was timed"}),
    "CPU only": (
        cpu_only,
        {
            "summary": "Nothing was measured on NVIDIA H200 SXM (h200_sxm)",
            "rooflines": "so nothing stands on its roofline",
            "runtime": "What the runtime model gives for",
            "optimal_chunks": "No problem was timed at two chunk lengths",
        },
    ),
    "no baselines, one sequence length": (
        lambda: [row("mlstm_sig", "fused_chunk", 1.0)],
        {
            "summary": "hold no timed baseline",
            "head_dim": "results must hold more than one head dim",
            "speedups": "there is nothing to compare",
            "failures": "Every case was timed",
        },
    ),
    "states in bf16 only": (
        lambda: [row("mlstm_sig", "fused_chunk", 1.0, state_dtype="bf16")],
        {"results": "mLSTMsig", "summary": "1 was timed"},
    ),
    "few columns": (
        lambda: [{**row("mlstm_sig", "fused_chunk", 1.0), **dict.fromkeys(OPTIONAL)}],
        {"results": "mLSTMsig", "summary": "is not known"},
    ),
    "no heads and no chunks": (channels_only, {"chunk_size": "not drawn", "summary": "RG-LRU"}),
}


@pytest.mark.parametrize("name", LACKING)
def test_what_the_results_lack_is_said(name: str, tmp_path: Path) -> None:
    rows, expected = LACKING[name]
    made_report = report(rows(), tmp_path)
    pieces = {section: getattr(made_report, section)() for section in SECTIONS}
    assert all(words(piece) for piece in pieces.values())
    for section, said in expected.items():
        assert said in words(pieces[section])
    assert f"interval {markup.ABSENT}" not in words(pieces["summary"])
    if name == "CPU only":
        assert "<img" not in pieces["rooflines"].text


def test_rows_without_a_device_are_refused(tmp_path: Path) -> None:
    bare = {**row("mlstm_sig", "fused_chunk", 1.0), "device_name": None, "device_accelerator": None}
    with pytest.raises(ValueError, match="results must name the device that they were measured on"):
        report([bare], tmp_path)


def test_other_devices_stay_out(tmp_path: Path) -> None:
    rows = [row("mlstm_sig", "fused_chunk", 1.0), *cpu_only()]
    made_report = report(rows, tmp_path)
    assert set(made_report.subject.rows["device_accelerator"]) == {"h200_sxm"}
    assert "2 rows of other devices" in summary(made_report)["Measured"]


def test_tables_escape_and_sort_by_values() -> None:
    piece = markup.table("a < b", ["name", "time"], [["<x>", markup.numeric(1234.5)], ["y", markup.numeric(None)]])
    assert "&lt;x&gt;" in piece.text
    assert "<caption>a &lt; b</caption>" in piece.text
    assert 'class="number" data-value="1234.5">1,234<' in piece.text
    assert piece.text.count("data-value") == 1


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.8381, "0.838"),
        (4.0, "4.00"),
        (99.96, "100"),
        (614.2, "614"),
        (12345.0, "12,345"),
        (0.0, "0"),
        (-9.996, "-10.0"),
        (1e-5, "1.00e-05"),
        (None, markup.ABSENT),
    ],
)
def test_numbers_have_the_digits_asked_for(value: float | None, shown: str) -> None:
    assert markup.number(value) == shown


def test_a_cell_that_fails_is_named() -> None:
    import nbformat

    cells = [nbformat.v4.new_markdown_cell("x"), nbformat.v4.new_code_cell("raise KeyError('gone')")]
    with pytest.raises(RuntimeError, match="cell 2 of the notebook failed: KeyError: 'gone'"):
        export.execute(nbformat.v4.new_notebook(cells=cells))


def test_tour_runs_in_ten_cells() -> None:
    import nbformat

    path = ROOT / "notebooks" / "tour.ipynb"
    toured = export.execute(nbformat.read(path, as_version=4), folder=path.parent)
    cells = [cell for cell in toured.cells if cell.cell_type == "code"]
    assert len(cells) == 10
    assert all(cell.outputs for cell in cells)
    assert '<img alt="Roofline' in cells[-1].outputs[-1].data["text/html"]


@pytest.fixture(scope="module")
def page() -> str:
    return committed_page()[0].read_text(encoding="utf-8")


@pytest.mark.speed
def test_committed_results_take_less_than_a_minute() -> None:
    assert committed_page()[1] < 60


def test_page_needs_nothing_beside_it(page: str) -> None:
    """Whatever loads is in the page; links lead within it."""
    loads = re.findall(r"""(?:src|href|srcset|action|poster|data)\s*=\s*["']([^"']{0,40})""", page)
    assert len(loads) > 20
    assert not [each for each in loads if not each.startswith(("data:", "#"))]
    without_data = re.sub(r"data:[\w/+;=,-]*[A-Za-z0-9+/=]{100,}", "", page)
    for banned in ("http://", "https://", "url(", "@import", "require", "MathJax", "mermaid", "jupyter"):
        assert banned.lower() not in without_data.lower(), banned


def test_page_has_every_section_and_no_code(page: str) -> None:
    headings = re.findall(r'<h2 id="([^"]+)">', page)
    assert headings == [
        "summary", "at-one-sequence-length", "runtime-over-sequence-length", "memory-over-sequence-length", "head-dim",
        "chunk-size", "best-chunk-length-and-regret", "roofline", "speed-up-over-baselines", "failures", "environment",
        "methods", "data",
    ]  # fmt: skip
    assert headings == re.findall(r'<li><a href="#([^"]+)">', page)
    assert "load_results" not in page
    assert "Report.load" not in page
    assert page.count("<h1>") == 1


def test_every_image_has_words(page: str) -> None:
    images = re.findall(r"<img[^>]*>", page)
    assert len(images) > 20
    alts = [re.search(r'alt="([^"]*)"', image) for image in images]
    assert all(alts)
    assert page.count("<source ") >= 10, "narrow figures for narrow screens"
    figures = [found[1] for found in alts if found]
    assert all("NVIDIA H200" in alt and re.search(r"\d", alt) for alt in figures)
    assert len(set(figures)) == len(figures)


def test_data_holds_the_rows(page: str) -> None:
    found = re.search(r'href="data:text/csv;charset=utf-8;base64,([^"]+)"', page)
    assert found is not None
    rows = list(csv.DictReader(io.StringIO(base64.b64decode(found[1]).decode())))
    frame = latest_rows(load_results(COMMITTED))
    assert {each["case_id"] for each in rows} == set(frame["case_id"])
    assert len(rows) == len(frame)
    times = sorted(float(each["time_ms"]) for each in rows if each["time_ms"])
    assert times == pytest.approx(sorted(frame["time_ms"].dropna()))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a command."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_command_writes_a_page_and_says_where(lrbench: Lrbench, here: Path) -> None:
    made.write(
        [row("mlstm_sig", "fused_chunk", 1.0), row("mlstm_sig", "fused_chunk", 2.0, chunk_size=64)],
        here / "rows.parquet",
    )
    done = lrbench("report", "rows.parquet", "--gpu", "h200", "-o", "out/mine.html", "--no-pdf")
    assert done == (0, "out/mine.html\n", "")
    assert sorted(path.name for path in (here / "out").iterdir()) == ["mine.html"]
    assert "<h1>tfla on NVIDIA H200 SXM</h1>" in (here / "out/mine.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "results must be a parquet file or a folder with some, got nowhere (does not exist)"),
        (("cut.parquet",), "results must be parquet files, got cut.parquet"),
        ((".", "--gpu", "h1000"), "accelerator must be one of "),
        (("cut.parquet", "-o", "report.docx"), "output must end in .html, got 'report.docx'"),
        *(
            (("cut.parquet", "-o", name), f"--output must be a file that can be written, got {name}: ")
            for name in ("folder.html", "cut.parquet/page.html")
        ),
    ],
)
def test_bad_input_exits_2_with_one_line(
    arguments: tuple[str, ...], message: str, lrbench: Lrbench, here: Path
) -> None:
    (here / "cut.parquet").write_bytes(b"PAR1 and no more")
    (here / "folder.html").mkdir()
    code, out, err = lrbench("report", *arguments)
    assert (code, out) == (2, "")
    assert one_line(err).startswith(f"lrbench: {message}")
    assert not list(here.glob("report.*"))


def test_a_missing_extra_exits_2_with_the_command_that_brings_it(
    lrbench: Lrbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nbclient", None)
    assert lrbench("report", ".") == (2, "", "lrbench: a report needs nbclient: pip install 'lrbench[report]'\n")


def test_a_pdf_without_a_browser_is_refused(lrbench: Lrbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRBENCH_BROWSER", "no-such-browser")
    code, _, err = lrbench("report", ".", "--pdf")
    assert (code, err.startswith("lrbench: pdf needs one of chromium, ")) == (2, True)


def test_a_browser_that_fails_costs_the_pdf_alone(
    lrbench: Lrbench, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the PDF was asked for."""
    monkeypatch.setenv("LRBENCH_BROWSER", "/bin/false")
    made.write([row("mlstm_sig", "fused_chunk", 1.0)], here / "rows.parquet")
    for option, code in (((), 0), (("--pdf",), 1)):
        *done, err = lrbench("report", "rows.parquet", "--gpu", "h200", *option)
        assert done == [code, "report.html\n"]
        assert "/bin/false printed no PDF: no message" in err
        assert not (here / "report.pdf").exists()
