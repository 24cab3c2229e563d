"""The report: what it says follows from the rows, what is missing is said, and the page is whole in itself."""

from __future__ import annotations

import html
import itertools
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lrbench import cli
from lrbench.analysis.report import chunks, export, markup
from lrbench.analysis.report.contents import Report
from lrbench.analysis.report.speedups import TIMES, speedups
from lrbench.results.select import latest_rows, load_results, load_rows, ok_rows
from lrbench.tests import ROOT
from lrbench.tests.command_line import Lrbench, refused

from .. import rows as made

COMMITTED = ROOT / "results" / "h200_sxm"
SECTIONS = (
    "title", "opening", "peers", "results", "figures", "optimal_chunks", "speedups", "failures", "elsewhere",
    "environment", "data",
)  # fmt: skip
SAMPLES = [0.99, 0.995, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.005, 1.01]


def row(op: str, impl: str, time_ms: float | None = None, **columns: Any) -> dict[str, Any]:
    """Return a row, with samples where a time is given."""
    if time_ms is not None:
        columns |= {"time_ms": time_ms, "time_samples_ms": [time_ms * each for each in SAMPLES]}
    return made.row(op, impl, **columns)


def report(rows: Iterable[Mapping[str, Any]], folder: Path, gpu: str = "h200") -> Report:
    return Report.load([made.write(rows, folder / "rows.parquet")], gpu)


def words(piece: markup.Html) -> str:
    """Return what a reader sees of a piece, images in words."""
    text = re.sub(r'<img[^>]*?alt="([^"]*)"[^>]*>', r"\1", piece.text)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def findings(made_report: Report) -> list[str]:
    return [words(markup.Html(said)) for said in re.findall(r"<li>(.*?)</li>", made_report.opening().text)]


def choices(made_report: Report) -> list[chunks.Choice]:
    return chunks.choices(made_report.subject)


@pytest.mark.parametrize(
    ("factor", "said"),
    [(0.5, "takes 2 times as long as"), (2.0, "is 2 times as fast as"), (3.25, "is 3.2 times as fast as")],
)
def test_findings_and_the_table_of_peers_follow_from_the_rows(factor: float, said: str, tmp_path: Path) -> None:
    baseline = row("mlstm_sig", "mlstm_kernels.xl_chunk_siging", 1.25 * factor)
    found = report([row("mlstm_sig", "fused_chunk", 1.25), baseline], tmp_path)
    assert "2 cases of 2 implementations and 1 operation were run on NVIDIA H200" in words(found.title())
    first, *more = findings(found)
    assert first == f"mLSTMsig: ours {said} mlstm_kernels."
    assert 0 < len(more) < 5
    shown = words(found.peers())
    beside = f"{1.25:.2f} ms beside {markup.number(1.25 * factor)}"
    assert f"mLSTMsig lrbench fused_chunk beside mlstm_kernels xl_chunk_siging {factor:.2f}{TIMES} {beside}" in shown
    (each,) = found.speedups_found
    assert 0.98 * factor < each.ends[0] <= factor <= each.ends[1] < 1.02 * factor


def mlp(tokens: int, impl: str, time_ms: float, run: str, **tested: Any) -> dict[str, Any]:
    """Return a row of a gated MLP, of a run, measured with lowered clocks."""
    columns = {"time_ms": time_ms, "time_samples_ms": [time_ms] * 3, "run_id": run, "throttled": "power cap"}
    return made.row("gated_mlp", impl, seq_len=tokens, d_model=128, d_ff=512, **{**columns, **tested})


def test_families_are_told_one_after_the_other(tmp_path: Path) -> None:
    """Each section names them, none mixes them, and a family without a chunk size is left out where that is shown."""
    rows = [row("mlstm_sig", "fused_chunk", 1.0 / chunk, chunk_size=chunk) for chunk in (64, 128)]
    rows += [mlp(tokens, "fused", tokens / 1e3, "a", throttled=None) for tokens in (1024, 4096)]
    # Of an operation of another family's, for whichever it was measured.
    rows.append(row("lightning", "lightning_attn.v2", 3.0, chunk_size=None))
    found = report(rows, tmp_path)
    assert [part.subject.family for part in found.parts] == ["tfla", "gated-mlp"]
    assert len(findings(found)) == 5
    for name in ("results", "speedups", "figures"):
        told = getattr(found, name)().text
        assert re.findall("<h3>(.*?)</h3>", told) == ["tfla", "gated-mlp"], name
        first, second = told.split("<h3>gated-mlp</h3>")
        assert "gated MLP" not in first and "mLSTMsig" not in second, name
    assert "Runtime over chunk size" not in second, "of the figures"
    assert re.findall("<h3>(.*?)</h3>", found.optimal_chunks().text) == ["tfla"]
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
    # A faster implementation of ours, which the older run lacks, is not held back by it.
    (each,) = report([*rows, mlp(1024, "fused_save", 0.5, "b", measured_at=new)], tmp_path).speedups_found
    assert (each.ours.impl, each.ratio, each.again) == ("fused_save", pytest.approx(2.2), False)


def test_memory_less_than_the_inputs_is_compared_with_nothing(tmp_path: Path) -> None:
    """A peak that something freed during the call has lowered says nothing of the call."""
    liger = "liger_kernel.silu_mul"
    sizes = {"peak_memory_bytes": 3000, "input_bytes": 1000}
    rows = [mlp(1024, "fused", 1.0, "a", **sizes), mlp(1024, liger, 1.1, "a", **{**sizes, "peak_memory_bytes": 9000})]
    (each,) = report(rows, tmp_path).speedups_found
    assert each.memory == pytest.approx(0.25)
    found = report([rows[0], mlp(1024, liger, 1.1, "a", **{**sizes, "peak_memory_bytes": 900})], tmp_path)
    assert found.speedups_found[0].memory is None
    assert "1.10" in words(found.speedups())


def test_failures_are_told_with_their_reasons(tmp_path: Path) -> None:
    failed = [
        row("mlstm_sig", "limit_chunk", seq_len=length, status="oom", reason=f"{length} bytes too many")
        for length in (1024, 2048)
    ]
    failed.append(row("mlstm_exp", "fused_chunk", status="crash", reason="<aborted> & gone"))
    failed.append(row("mlstm_exp", "limit_chunk", status="unsupported", reason="chunk_size must be one of 16 to 128"))
    made_report = report([row("mlstm_sig", "fused_chunk", 1.0), *failed], tmp_path)
    assert "1 was timed, 3 failed (2 oom, 1 crash), 1 was not tried." in words(made_report.title())
    shown, limits = made_report.failures().text.split("<details>")
    assert "1024 bytes too many (and 1 more that differ in figures)" in shown
    assert "&lt;aborted&gt; &amp; gone" in shown
    assert shown.count("<tr>") == 1 + 2
    assert "unsupported" not in shown and "chunk_size must be one of 16 to 128" in limits


def test_suspect_rows_count_in_no_comparison(tmp_path: Path) -> None:
    rows = [
        row("mlstm_sig", "fused_chunk", 0.2, chunk_size=64),
        row("mlstm_sig", "fused_chunk", 2.0, chunk_size=128),
        row("mlstm_sig", "mlstm_kernels.xl_chunk_siging", 6.0),
    ]
    made_report = report(rows, tmp_path)
    assert [each.ratio for each in made_report.speedups_found] == pytest.approx([3.0])
    assert "1 row was suspect (945 TFLOP/s is above the measured roof" in words(made_report.environment())


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


def test_own_rows_stand_beside_the_committed_ones(tmp_path: Path) -> None:
    committed = Report.load([COMMITTED], "h200").families[0]
    assert not {"yours", "committed"} & set(words(committed.results()).split())
    best = committed.subject.best("fw")
    taken = best[best["seq_len"] == committed.subject.seq_len].iloc[0]
    (measured,) = load_rows(COMMITTED, where={"case_id": taken["case_id"], "run_id": taken["run_id"]})
    own = {**measured, "run_id": "f" * 32, "measured_at": "2099-01-01T00:00:00+00:00", "time_ms": taken["time_ms"] / 2}
    made.write([own], tmp_path / "own.parquet")
    beside = Report.load([COMMITTED, tmp_path / "own.parquet"], "h200").families[0]
    table = beside.results().text
    lines = [words(markup.Html(line)) for line in re.findall(r"<tr.*?</tr>", table, re.DOTALL)]
    (yours,) = (line for line in lines if "yours" in line)
    (before,) = (line for line in lines if "committed" in line)
    assert f" {markup.number(taken['time_ms'] / 2)} " in yours
    assert f" {markup.number(taken['time_ms'])} " in before
    assert yours.split()[:3] == before.split()[:3]


def test_regret_is_what_the_modelled_choice_takes_longer(tmp_path: Path) -> None:
    times = {64: 3.0, 128: 2.0, 256: 1.5, 512: 1.0, 1024: 4.0}
    made_report = report([row("mlstm_sig", "fused_chunk", times[chunk], chunk_size=chunk) for chunk in times], tmp_path)
    (choice,) = choices(made_report)
    assert choice.row.chunk_size == 512
    assert choice.modelled in times
    assert choice.regret_ms == pytest.approx(times[choice.modelled] - 1.0)


@pytest.fixture
def channels(tmp_path: Path) -> Report:
    """RG-LRU on a CPU at two widths and chunk lengths, three times as fast as attention of the same width."""
    rows = []
    for width, seq_len in itertools.product((256, 4096), (1024, 8192)):
        here = {"kernel": "rglru", "dtype": "fp32", "seq_len": seq_len, "accelerator": "cpu"}
        for chunk, time_ms in ((64, 1.5 * width / 1024), (128, width / 1024)):
            tuned = {"channels": width, "chunk_size": chunk, "state_dtype": "fp32"}
            rows.append(made.row("rglru", "torch", time_ms=time_ms, **tuned, **here))
        rows.append(made.row("attention", "torch.sdpa_cpu", time_ms=3 * width / 1024, num_heads=width // 128, **here))
    return report(rows, tmp_path, "cpu")


def test_times_of_a_busy_machine_are_named(tmp_path: Path) -> None:
    """In the head, the tables and the remarks; they stay in the comparisons, and no finding rests on them."""
    rows = [row("mlstm_sig", "fused_chunk", 1.0), row("mlstm_sig", "mlstm_kernels.xl_chunk_siging", 2.0)]
    found = report([rows[0], {**rows[1], "noise": "busy GPU: 1 other process"}], tmp_path)
    assert "1 time was taken on a busy machine: other load may have lengthened it." in words(found.environment())
    assert "busy machine" in words(found.results())
    assert f"2.00{TIMES}" in words(found.peers()) and "busy machine in part" in words(found.peers())
    assert not any("as fast as" in said for said in findings(found))
    idle = report(rows, tmp_path)
    assert "busy machine" not in "".join(words(getattr(idle, name)()) for name in ("environment", "results", "peers"))


def test_the_best_chunk_length_needs_no_model(channels: Report) -> None:
    assert len(choices(channels)) == 4
    for choice in choices(channels):
        assert (choice.row.chunk_size, choice.slowest.chunk_size) == (128, 64)
        assert choice.model is choice.modelled is choice.regret_ms is None
    said = words(channels.optimal_chunks())
    assert "No model chooses for RG-LRU" in said
    assert f"fw channels 4k fp32 8,192 {' '.join([markup.ABSENT] * 4)} 128 4.00" in said
    assert f"64 50 {markup.ABSENT} {markup.ABSENT}" in said


def cpu_only() -> list[dict[str, Any]]:
    lengths = (256, 1024)
    fields = {"accelerator": "cpu", "roofline_fraction": None, "suspect": None, "model_time_ms": 0.5}
    rows = [row("mlstm_sig", "torch", 9.0, seq_len=n, batch=1, dtype="fp32", **fields) for n in lengths]
    return [{**each, "accelerator": "h200_sxm"} for each in rows]


OPTIONAL = (
    "time_samples_ms", "time_ci_low_ms", "time_ci_high_ms", "peak_memory_bytes", "intensity", "tflops", "bytes",
    "flops", "roofline_fraction", "device_accelerator",
)  # fmt: skip
"""What rows of an older or another tool may lack."""

LACKING = {
    "nothing timed": lambda: [row("mlstm_sig", "fused_chunk", status="unavailable", reason="pip install triton")],
    "CPU only": cpu_only,
    "no baselines, one sequence length": lambda: [row("mlstm_sig", "fused_chunk", 1.0)],
    "states in bf16 only": lambda: [row("mlstm_sig", "fused_chunk", 1.0, state_dtype="bf16")],
    "few columns": lambda: [{**row("mlstm_sig", "fused_chunk", 1.0), **dict.fromkeys(OPTIONAL)}],
    "no heads and no chunks": lambda: [row("rglru", impl, 1.0, kernel="tfla") for impl in ("fused", "torch")],
}


@pytest.mark.parametrize("name", LACKING)
def test_what_the_results_lack_is_said(name: str, tmp_path: Path) -> None:
    """Every section has words, and no figure is drawn of a device that was not measured."""
    made_report = report(LACKING[name](), tmp_path)
    assert all(words(getattr(made_report, section)()) for section in SECTIONS)
    assert name != "CPU only" or "Roofline" not in made_report.figures().text


def test_rows_without_a_device_are_refused(tmp_path: Path) -> None:
    bare = {**row("mlstm_sig", "fused_chunk", 1.0), "device_name": None, "device_accelerator": None}
    with pytest.raises(ValueError, match="results must name the device that they were measured on"):
        report([bare], tmp_path)


def test_other_devices_stay_out(tmp_path: Path) -> None:
    rows = [row("mlstm_sig", "fused_chunk", 1.0), *cpu_only()]
    made_report = report(rows, tmp_path)
    assert set(made_report.subject.rows["device_accelerator"]) == {"h200_sxm"}
    (cpu,) = set(made_report.subject.everything["device_name"]) - {"NVIDIA H200 SXM"}
    assert f"2 rows of other devices ({cpu}) are in a section of their own" in words(made_report.title())
    assert re.findall("<h3>(.*?)</h3>", made_report.elsewhere().text) == [cpu]
    assert "9.00" in words(made_report.elsewhere())


def test_tables_escape_and_sort_by_values() -> None:
    piece = markup.table(
        "a < b", [{"name": "<x>", "time": markup.numeric(1234.5)}, {"name": "y", "time": markup.numeric(None)}]
    )
    assert "&lt;x&gt;" in piece.text
    assert "<caption>a &lt; b</caption>" in piece.text
    assert '<td data-value="1234.5">1,234<' in piece.text
    assert piece.text.count("data-value") == 1


def test_numbers_have_the_digits_asked_for() -> None:
    shown = {0.8381: "0.838", 4.0: "4.00", 99.96: "100", 614.2: "614", 12345.0: "12,345", 0.0: "0", -9.996: "-10.0"}
    shown |= {1e-5: "1.00e-05", None: markup.ABSENT}
    assert {value: markup.number(value) for value in shown} == shown


def test_every_family_is_shown_at_the_length_of_the_readme() -> None:
    """Lightning's backward calls alone were measured at another one."""
    lengths = {each.subject.family: each.subject.seq_len for each in Report.load([COMMITTED], "h200").families}
    assert set(lengths.values()) == {8192} and "lightning" in lengths


def test_a_cell_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match="cell 2 of the notebook failed: KeyError: 'gone'"):
        export.run_cell(2, "raise KeyError('gone')", {})


def test_what_fails_beside_fails_here() -> None:
    with pytest.raises(ZeroDivisionError):
        export.beside(lambda: markup.Html(str(1 / 0)))()
    made = export.beside(lambda: markup.Html(str(os.getpid())))().text
    assert (made == str(os.getpid())) == (sys.platform != "linux")


def test_tour_runs_in_ten_cells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path, names, shown = ROOT / "notebooks" / "tour.ipynb", {}, []
    monkeypatch.chdir(path.parent)
    for number, (kind, source) in enumerate(export.cells_of(path)):
        if kind == "code":
            shown.append((export.run_cell(number, source, names), capsys.readouterr().out))
    assert len(shown) == 10
    assert all(value is not None or printed for value, printed in shown)
    assert '<img alt="Roofline' in shown[-1][0].text


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a command."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", ["report", "roofline"])
def test_one_of_several_accelerators_is_chosen(command: str, lrbench: Lrbench, here: Path) -> None:
    rows = [row("mlstm_sig", "fused_chunk", 1.0, accelerator=gpu) for gpu in ("h100", "h200", "h200")]
    made.write(rows, here / "rows.parquet")
    asked = "results hold several values of gpu: choose one with --gpu: h100_sxm, h200_sxm"
    assert refused(lrbench, f"{command} rows.parquet") == f"lrbench: {asked}"


def test_command_writes_a_page_and_says_where(lrbench: Lrbench, here: Path) -> None:
    rows = [row("mlstm_sig", "fused_chunk", 1.0), row("mlstm_sig", "fused_chunk", 2.0, chunk_size=64)]
    made.write(rows, here / "rows.parquet")
    done = lrbench("report rows.parquet --gpu h200 -o out/mine.html")
    assert done[:2] == (0, "out/mine.html\n")
    assert sorted(path.name for path in (here / "out").iterdir()) == ["mine.html"]
    assert "<h1>tfla on NVIDIA H200 SXM</h1>" in (here / "out/mine.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere", "results must be a parquet file or a folder with some, got nowhere (does not exist)"),
        ("cut.parquet", "results must be parquet files, got cut.parquet"),
        (". --gpu h1000", "accelerator must be"),
        ("cut.parquet -o report.docx", "output must end in .html, got 'report.docx'"),
        *((f"cut.parquet -o {name}", "--output must be") for name in ("folder.html", "cut.parquet/page.html")),
    ],
)
def test_bad_input_exits_2_with_one_line(arguments: str, message: str, lrbench: Lrbench, here: Path) -> None:
    (here / "cut.parquet").write_bytes(b"PAR1 and no more")
    (here / "folder.html").mkdir()
    assert refused(lrbench, f"report {arguments}").startswith(f"lrbench: {message}")
    assert not list(here.glob("report.*"))


def test_a_missing_extra_exits_2_with_the_command_that_brings_it(
    lrbench: Lrbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mistune", None)
    assert lrbench("report .") == (2, "", "lrbench: a report needs mistune: pip install 'lrbench[report]'\n")


def test_a_pdf_without_a_browser_is_refused(lrbench: Lrbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRBENCH_BROWSER", "no-such-browser")
    code, _, err = lrbench("report . --pdf")
    assert (code, err.startswith("lrbench: pdf needs one of chromium, ")) == (2, True)


def test_a_browser_that_fails_costs_the_pdf_alone(
    lrbench: Lrbench, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LRBENCH_BROWSER", "/bin/false")
    monkeypatch.setattr(export, "build", lambda _, output: output)
    made.write([row("mlstm_sig", "fused_chunk", 1.0)], here / "rows.parquet")
    code, out, err = lrbench("report rows.parquet --gpu h200 --pdf")
    assert (code, out) == (1, "report.html\n")
    assert "/bin/false printed no PDF: no message" in err
    assert not (here / "report.pdf").exists()


def test_the_model_chooses_among_the_chunk_lengths_that_are_taken(tmp_path: Path) -> None:
    """At head dim 512 the formulation alone would choose 256, which limit_chunk does not take."""
    heads = {"num_heads": 8, "head_dim_qk": 256, "head_dim_v": 512}
    rows = [
        row("mlstm_exp", impl, 1.0, chunk_size=chunk, **heads)
        for impl, chunks in (("limit_chunk", (64, 128)), ("xl_chunk", (64, 128, 256)))
        for chunk in chunks
    ]
    limited, free = choices(report(rows, tmp_path))
    assert limited.modelled == max(limited.model.time_ms) == 128 < max(free.model.time_ms)


def test_own_results_stand_beside_the_committed_ones(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "LOCAL", Path("results/local"))
    committed = [ROOT / "results" / "h200_sxm"]
    assert cli._reported("h200") == committed
    (here / "results" / "local").mkdir(parents=True)
    made.write([row("mlstm_sig", "fused_chunk", 1.0)], here / "results" / "local" / "rows.parquet")
    assert cli._reported("h200") == [*committed, Path("results/local")]
    assert "results/local" in capsys.readouterr().err
