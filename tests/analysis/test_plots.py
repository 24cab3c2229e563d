"""Figures: what they show, what they say about what they do not show, and that they are the same every time."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from lrbench.analysis.figure_style import FORMATS, OPERATION_LABELS, save_figure, series_label, series_style
from lrbench.analysis.plots import KINDS, Selection, failure_note, plot
from lrbench.analysis.roofline import roofline

from . import rows as made


@pytest.fixture(scope="module")
def sweep() -> pd.DataFrame:
    return made.frame(made.default_sweep())


def lines(figure: Figure, panel: int) -> dict[str, list[tuple[float, float]]]:
    """Return label -> points of a panel's labelled lines."""
    return {
        str(line.get_label()): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in figure.axes[panel].lines
        if not str(line.get_label()).startswith("_")
    }


def text(figure: Figure) -> str:
    return " ".join(" ".join(t.get_text().split()) for t in figure.texts)


def test_runtime_shows_every_implementation_at_its_best_chunk(sweep: pd.DataFrame) -> None:
    figure = plot("runtime", sweep, Selection(head_dim=256))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Forward", "Forward + backward"]
    for panel, mode in enumerate(("fw", "fwbw")):
        drawn = lines(figure, panel)
        mine = sweep[(sweep["mode"] == mode) & (sweep["impl"] == "tfla") & (sweep["head_dim_v"] == 256)]
        for op in ("mlstm_sig", "mlstm_exp"):
            expected = mine[mine["op"] == op].groupby("seq_len")["time_ms"].min()
            assert drawn[series_label(op, "tfla")] == list(expected.items())
    assert figure.axes[0].get_xscale() == figure.axes[0].get_yscale() == "log"
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()][:2] == ["1k", "2k"]


def test_baselines_without_the_head_dim_are_shown_at_their_own(sweep: pd.DataFrame) -> None:
    drawn = lines(plot("runtime", sweep, Selection(head_dim=256)), 0)
    assert series_label("attention", "flash_attn.v4") in drawn
    assert series_label("mamba2_ssd", "mamba_ssm.chunk_scan") in drawn
    assert len(drawn[series_label("mlstm_sig", "tfla")]) == 7


def test_the_setting_is_said(sweep: pd.DataFrame) -> None:
    said = text(plot("runtime", sweep, Selection(head_dim=256)))
    for part in ("NVIDIA H200 SXM", "bf16", "65,536 tokens", "embedding dim 4,096", "head dim 128 (qk), 256 (v)"):
        assert part in said
    assert figure_label(plot("runtime", sweep)) == "time per call (ms)"


def figure_label(figure: Figure) -> str:
    return figure.axes[0].get_ylabel()


@pytest.mark.parametrize("kind", KINDS)
def test_failures_are_named(sweep: pd.DataFrame, kind: str) -> None:
    said = text(plot(kind, sweep, Selection(ops=("mlstm_exp", "mlstm_sig"))))
    assert "mLSTMexp · mlstm_kernels xl_chunk fw, fwbw at T = " in said
    assert "crash (the compiler aborted the process)" in said


def test_a_failed_chunk_size_is_no_gap_where_another_one_was_measured() -> None:
    cases = [made.case("mlstm_sig", "tfla", chunk_size=chunk) for chunk in (64, 128)]
    frame = made.frame([made.row(cases[0]), made.row(cases[1], status="oom", reason="out of memory")])
    assert "Not shown" not in text(plot("runtime", frame))
    assert "oom (out of memory)" in text(plot("chunk-size", frame))


def test_missing_packages_are_one_short_list() -> None:
    cases = [made.case("gla", "fla.chunk_gla"), made.case("attention", "flash_attn.v4")]
    frame = made.frame([made.row(case, status="unavailable", reason="pip install ...") for case in cases])
    assert failure_note(frame) == "Not shown. Not installed: fla.chunk_gla, flash_attn.v4."


def test_chunk_size_figure_is_at_one_length(sweep: pd.DataFrame) -> None:
    figure = plot("chunk-size", sweep, Selection(head_dim=512))
    assert "T = 8,192" in text(figure)
    drawn = lines(figure, 0)
    assert [x for x, _ in drawn[series_label("mlstm_sig", "tfla")]] == list(made.CHUNKS)
    assert [x for x, _ in drawn[series_label("mlstm_sig", "limit_chunk")]] == [64, 128]
    assert series_label("attention", "flash_attn.v4") not in drawn


def test_head_dim_figure_leaves_out_fixed_head_dims(sweep: pd.DataFrame) -> None:
    drawn = lines(plot("head-dim", sweep), 0)
    assert [x for x, _ in drawn[series_label("mlstm_sig", "tfla")]] == [64, 128, 256, 512]
    assert series_label("attention", "flash_attn.v4") not in drawn


def test_memory_is_in_gib(sweep: pd.DataFrame) -> None:
    drawn = lines(plot("memory", sweep, Selection(head_dim=256)), 1)
    points = dict(drawn[series_label("attention", "flash_attn.v4")])
    row = sweep[(sweep["impl"] == "flash_attn.v4") & (sweep["mode"] == "fwbw") & (sweep["seq_len"] == 1024)]
    assert points[1024] == pytest.approx(row["peak_memory_bytes"].item() / 2**30)


def test_several_devices_need_a_choice(sweep: pd.DataFrame) -> None:
    other = made.frame([made.row(made.case("mlstm_sig", "tfla"), accelerator="h100")])
    both = pd.concat([sweep, other], ignore_index=True)
    with pytest.raises(
        ValueError, match="device must be chosen where results hold several: NVIDIA H100 SXM, NVIDIA H2"
    ):
        plot("runtime", both)
    assert "NVIDIA H100 SXM" in text(plot("runtime", both, Selection(device="h100_sxm")))
    with pytest.raises(ValueError, match=r"device must be one of .*, got 'b200'"):
        plot("runtime", both, Selection(device="b200"))


def test_empty_selections_are_refused(sweep: pd.DataFrame) -> None:
    with pytest.raises(ValueError, match="got none that match the selection"):
        plot("runtime", sweep, Selection(ops=("rglru",)))
    with pytest.raises(ValueError, match=r"kind must be one of runtime, .*, got 'pie'"):
        plot("pie", sweep)
    with pytest.raises(ValueError, match="more than one head dim"):
        plot("head-dim", sweep[sweep["head_dim_v"] == 256])


def test_roofline_points_are_the_rows(sweep: pd.DataFrame) -> None:
    figure = roofline(sweep, "h200", Selection(head_dim=256))
    drawn = lines(figure, 0)
    tfla = sweep[
        (sweep["op"] == "mlstm_sig")
        & (sweep["impl"] == "tfla")
        & (sweep["mode"] == "fw")
        & (sweep["seq_len"] == 8192)
        & (sweep["head_dim_v"] == 256)
    ].sort_values("chunk_size")
    assert drawn[series_label("mlstm_sig", "tfla")] == list(zip(tfla["intensity"], tfla["tflops"], strict=True))
    assert max(max(line.get_ydata()) for line in figure.axes[0].lines) == pytest.approx(989)
    assert "Dashed: measured, 790 TFLOP/s and 4.29 TB/s" in text(figure)


def test_a_cpu_row_never_stands_on_a_gpus_roofline(sweep: pd.DataFrame) -> None:
    cpu_case = made.case("mlstm_sig", "torch", dtype="fp32")
    cpu = made.frame([made.row(cpu_case, accelerator="cpu", time_ms=50.0)])
    with pytest.raises(ValueError, match="rows measured on h200_sxm for its roofline, got rows of: cpu"):
        roofline(cpu, "h200")
    figure = roofline(pd.concat([sweep, cpu], ignore_index=True), "h200", Selection(head_dim=256))
    assert series_label("mlstm_sig", "torch") not in lines(figure, 0)
    assert "1 row measured on another device" in text(figure)


def test_suspect_rows_are_ringed(sweep: pd.DataFrame) -> None:
    suspect = made.frame([made.row(made.case("mlstm_sig", "tfla", chunk_size=256), time_ms=0.2)])
    assert suspect["suspect"].notna().all()
    figure = roofline(suspect, "h200")
    assert "Ringed, suspect: tfla fw: " in text(figure)


def test_styles_are_the_same_everywhere_and_tell_implementations_apart() -> None:
    known = [
        *((op, impl) for op in ("mlstm_sig", "mlstm_exp") for impl in ("tfla", "limit_chunk", "torch", "parallel")),
        ("mlstm_sig", "mlstm_kernels.xl_chunk_siging"),
        ("mlstm_exp", "mlstm_kernels.xl_chunk"),
        ("mlstm_exp", "mlstm_kernels.limit_chunk"),
        ("gla", "fla.chunk_gla"),
        ("gla", "fla.fused_chunk_gla"),
        ("attention", "torch.sdpa_flash"),
        ("attention", "torch.sdpa_cudnn"),
        ("attention", "flash_attn.v2"),
        ("attention", "flash_attn.v4"),
    ]
    looks = {(s.colour, s.marker, str(s.dashes)) for s in (series_style(op, impl) for op, impl in known)}
    assert len(looks) == len(known)
    assert series_style("x", "unknown.kernel") == series_style("x", "unknown.kernel")
    assert len(set(OPERATION_LABELS.values())) == len(OPERATION_LABELS)


@pytest.mark.parametrize("suffix", FORMATS)
def test_figures_are_reproducible_files(sweep: pd.DataFrame, tmp_path: Path, suffix: str) -> None:
    files = [tmp_path / f"{name}{suffix}" for name in ("a", "b")]
    for file in files:
        save_figure(plot("chunk-size", sweep), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].stat().st_size > 5000


def test_other_endings_are_refused(sweep: pd.DataFrame, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"output must end in one of .png, .svg, .pdf, got 'a.gif'"):
        save_figure(plot("chunk-size", sweep), tmp_path / "a.gif")


def test_trade_off_runs_from_much_memory_to_little_over_chunk_size(sweep: pd.DataFrame) -> None:
    figure = plot("trade-off", sweep, Selection(head_dim=256))
    points = lines(figure, 0)[series_label("mlstm_sig", "tfla")]
    memory = [x for x, _ in points]
    assert memory == sorted(memory, reverse=True)
    labels = {text.get_text() for text in figure.axes[0].texts}
    assert {"L = 64", "L = 128", "L = 1k"} <= labels
    assert series_label("attention", "flash_attn.v4") not in lines(figure, 0)


def test_long_reasons_are_shortened() -> None:
    frame = made.frame([made.row(made.case("gla", "fla.chunk_gla"), status="error", reason="word " * 100)])
    note = failure_note(frame)
    assert len(note) < 220
    assert "word ...)" in note
