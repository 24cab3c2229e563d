"""Figures: what they show, what they say about what they do not show, and that they are the same every time."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from PIL import Image

from lrbench.analysis.figures.plots import RESULT_KINDS, drawing
from lrbench.analysis.figures.selection import Selection, Several
from lrbench.analysis.figures.style import FORMATS, save_figure, series_label
from lrbench.analysis.figures.theory import Theory
from lrbench.tests.command_line import Lrbench, Run, refused

from .. import rows as made
from .drawing import decoding, lines, plot, roofline, sweep, text, words


def test_runtime_shows_every_implementation_at_its_best_chunk() -> None:
    figure = plot("runtime", sweep(), Selection(head_dim=256, every=True))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Forward", "Forward + backward"]
    for panel, mode in enumerate(("fw", "fwbw")):
        drawn = lines(figure, panel)
        mine = sweep().query(f"mode == '{mode}' and impl == 'fused_chunk' and head_dim_v == 256")
        for op in ("mlstm_sig", "mlstm_exp"):
            expected = mine[mine["op"] == op].groupby("seq_len")["time_ms"].min()
            assert drawn[series_label(op, "fused_chunk")] == list(expected.items())
    # Baselines without the head dim are shown at their own.
    assert {series_label("attention", "flash_attn.v4"), series_label("mamba2_ssd", "mamba_ssm.chunk_scan")} <= set(
        drawn
    )
    for part in ("NVIDIA H200 SXM", "bf16", "65,536 tokens", "embedding dim 4,096", "head dim 128 (qk), 256 (v)"):
        assert part in text(figure)
    assert figure.axes[0].get_xscale() == figure.axes[0].get_yscale() == "log"
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()][:2] == ["1k", "2k"]


@pytest.mark.parametrize("kind", [kind for kind in RESULT_KINDS if kind not in ("context", "sustained", "energy")])
def test_failures_are_named(kind: str) -> None:
    selection = Selection(ops=("mlstm_exp", "mlstm_sig"), head_dim=256, seq_len=8192, every=True)
    said = words(drawing(kind, sweep(), selection))
    assert "mLSTMexp · mlstm_kernels xl_chunk fw, fwbw at T = " in said
    assert "crash (the compiler aborted the process)" in said


def test_decoding_has_a_line_over_contexts_and_a_state_is_the_same_at_each() -> None:
    figure = plot("context", decoding(), Selection(batch=16, head_dim=256, every=True))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Decoding step: runtime", "Decoding step: memory"]
    times, memory = lines(figure, 0), lines(figure, 1)
    contexts = [1024, 8192, 32768, 131072]
    labels = [series_label(*each) for each in (("mlstm_sig", "fused_chunk"), ("attention", "flash_attn.v2"))]
    for drawn in (times, memory):
        ours, cached = (drawn[label] for label in labels)
        assert [x for x, _ in ours] == [x for x, _ in cached] == contexts
        assert len({y for _, y in ours}) == 1
        assert cached[-1][1] > 50 * cached[0][1]
    # A token of batch 16 has a sixteenth of the step's time.
    row = next(r for r in made.decoding() if r["impl"] == "flash_attn.v2" and (r["batch"], r["context"]) == (16, 8192))
    assert dict(times[series_label("attention", "flash_attn.v2")])[8192] == pytest.approx(1e3 * row["time_ms"] / 16)
    said = text(figure)
    assert "times as fast as attention at every context" in said
    assert "batch 16" in said
    largest = plot("context", decoding(), Selection(batch=256, head_dim=256))
    assert "at context 32k, 128k: oom (CUDA out of memory)" in text(largest)


def test_decoding_steps_are_no_points_over_lengths_or_chunks() -> None:
    both = pd.concat([sweep(), decoding()], ignore_index=True)
    at = Selection(head_dim=256)
    assert words(drawing("runtime", both, at)) == words(drawing("runtime", sweep(), at))
    # Elsewhere attention is shown at the longest context that ran.
    assert "context 131,072" in words(drawing("runtime", decoding(), Selection(batch=16, head_dim=256)))
    without = dict.fromkeys(("context", "head_dim_v", "head_dim_qk"))
    wkv = decoding().assign(kernel="wkv", op="wkv4", impl="scan", provider="lrbench", **without)
    beside = pd.concat([decoding(), wkv], ignore_index=True)
    at = Selection(batch=16, head_dim=256)
    for frame, more in (
        (sweep(), {}),
        (decoding(), {"ops": ("mlstm_sig",)}),
        (beside, {"kernel": "wkv", "head_dim": None}),
    ):
        with pytest.raises(
            ValueError, match="results must hold decoding steps of attention, which have a context, got none"
        ):
            plot("context", frame, dataclasses.replace(at, **more))


def test_a_failed_chunk_size_is_no_gap_where_another_one_was_measured() -> None:
    failed = made.row("mlstm_sig", "fused_chunk", chunk_size=128, status="oom", reason="out of memory")
    frame = made.frame([made.row("mlstm_sig", "fused_chunk", chunk_size=64), failed])
    assert "Not shown" not in words(drawing("runtime", frame))
    assert "oom (out of memory)" in words(drawing("chunk-size", frame))


def test_a_figure_over_head_dims_leaves_out_fixed_ones_and_one_of_nothing_is_refused() -> None:
    drawn = lines(plot("head-dim", sweep(), Selection(seq_len=8192)), 0)
    assert [x for x, _ in drawn[series_label("mlstm_sig", "fused_chunk")]] == [64, 128, 256, 512]
    assert series_label("attention", "flash_attn.v4") not in drawn
    with pytest.raises(ValueError, match="got none that match the selection"):
        drawing("runtime", sweep()[sweep()["status"] != "ok"])


def test_chunk_size_figure_is_at_one_length() -> None:
    figure = plot("chunk-size", sweep(), Selection(head_dim=512, seq_len=8192))
    assert "T = 8,192" in text(figure)
    drawn = lines(figure, 0)
    assert [x for x, _ in drawn[series_label("mlstm_sig", "fused_chunk")]] == list(made.CHUNKS)
    assert [x for x, _ in drawn[series_label("mlstm_sig", "limit_chunk")]] == [64, 128]
    assert series_label("attention", "flash_attn.v4") not in drawn


def test_memory_is_in_gib() -> None:
    drawn = lines(plot("memory", sweep(), Selection(head_dim=256, every=True)), 1)
    points = dict(drawn[series_label("attention", "flash_attn.v4")])
    row = sweep().query("impl == 'flash_attn.v4' and mode == 'fwbw' and seq_len == 1024")
    assert points[1024] == pytest.approx(row["peak_memory_bytes"].item() / 2**30)


SEVERAL = {
    "kernel": ("lightning, tfla", {"op": "lightning", "impl": "fused_chunk", "kernel": "lightning"}),
    "device": ("h100_sxm, h200_sxm", {"accelerator": "h100"}),
    "dtype": ("bf16, fp16", {"dtype": "fp16"}),
    "state_dtype": ("bf16, fp32", {"state_dtype": "bf16"}),
    "seq_len": ("4096, 8192", {"seq_len": 4096}),
    "tokens": ("8192, 65536 or --batch: 1, 8", {"batch": 1}),
    "head_dim": ("128, 256", {"head_dim_v": 128, "num_heads": 32}),
    "head_dim_qk": ("128, 256", {"head_dim_qk": 256}),
    "channels": ("1024, 4096", {"num_heads": 4}),
}
"""What rows have two values of -> how it is asked for, and the columns of a row with the other value."""


@pytest.mark.parametrize("name", SEVERAL)
def test_what_rows_have_several_values_of_is_asked_for(name: str) -> None:
    """The error names the option, lists the values and says which most rows have; with that one there is a figure."""
    listed, other = SEVERAL[name]
    usual = {"op": "mlstm_sig", "impl": "fused_chunk"}
    rows = [made.row(**usual), made.row(**{**usual, "chunk_size": 64}), made.row(**{**usual, **other})]
    frame, option = made.frame(rows), f"--{name.replace('_', '-')}"
    with pytest.raises(Several, match=rf"of {name}.*: choose one with {option}: {listed}; most rows are of") as asked:
        drawing("rate", frame)
    most = re.search(rf"most rows are of {option} (\S+)", str(asked.value))[1]
    chosen = dataclasses.replace(Selection(), **{name: int(most) if most.isdigit() else most})
    shown = drawing("rate", frame, chosen).rows
    assert sorted(shown["chunk_size"]) == [64, 128]
    with pytest.raises(ValueError, match=rf"{name} must be one of .*, got '?7"):
        drawing("rate", frame, dataclasses.replace(Selection(), **{name: 7 if most.isdigit() else "7"}))


def test_tokens_or_batch_are_held_over_length() -> None:
    rows = [made.row("mlstm_sig", "fused_chunk", seq_len=n, batch=8) for n in (1024, 8192)]
    assert "batch 8" in drawing("runtime", made.frame(rows)).setting
    rows.append(made.row("mlstm_sig", "fused_chunk", seq_len=4096, batch=3))
    with pytest.raises(Several, match=r"tokens and batch: choose one with --tokens: .*12288.* or --batch: 3, 8; most"):
        drawing("runtime", made.frame(rows))
    assert sorted(drawing("runtime", made.frame(rows), Selection(batch=8)).rows["seq_len"]) == [1024, 8192]


@pytest.mark.parametrize("suffix", FORMATS)
def test_figures_are_reproducible_files(tmp_path: Path, suffix: str) -> None:
    files = [tmp_path / f"{name}{suffix}" for name in ("a", "b")]
    for file in files:
        save_figure(plot("chunk-size", sweep(), Selection(head_dim=256, seq_len=8192)), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].stat().st_size > 5000


def test_files_carry_the_alt_text(tmp_path: Path) -> None:
    figure = plot("runtime", sweep(), Selection(head_dim=256, ops=("mlstm_sig",)))
    said = figure.get_label()
    assert said.startswith("Runtime over sequence length (NVIDIA H200 SXM")
    assert "time per call (ms) over sequence length T (tokens), panels forward, forward + backward; 3 lines" in said
    assert "(mLSTMsig · lrbench fused_chunk) to" in said
    assert said.endswith(".")
    assert "\n" not in said
    png, svg = save_figure(figure, tmp_path / "a.png"), save_figure(figure, tmp_path / "a.svg")
    with Image.open(png) as image:
        assert image.text["Description"] == said
    root = ElementTree.parse(svg).getroot()
    assert root.findtext("{http://www.w3.org/2000/svg}desc") == said
    assert root.findtext("{http://www.w3.org/2000/svg}title") == said


def loaded() -> pd.DataFrame:
    """Return the made-up sweep with what --sustained measures: mLSTMsig was slowed, and energy is of 500 W."""
    frame = sweep()
    slowed = frame["op"].eq("mlstm_sig").map({True: 1.1, False: 1.0}) * frame["time_ms"]
    return frame.assign(sustained_ms=slowed, energy_j=0.5 * slowed, net_energy_j=0.4 * slowed)


def test_sustained_times_are_drawn_with_their_ratio_to_burst_times() -> None:
    at = Selection(head_dim=256, modes=("fw",), impls=("fused_chunk", "flash_attn.v4"))
    figure = plot("sustained", loaded(), at)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "Forward: sustained time",
        "Forward: over burst time",
    ]
    times, ratios = lines(figure, 0), lines(figure, 1)
    ours, others = series_label("mlstm_sig", "fused_chunk"), series_label("attention", "flash_attn.v4")
    assert [y for _, y in ratios[ours]] == pytest.approx([1.1] * len(times[ours]))
    assert [y for _, y in ratios[others]] == pytest.approx([1.0] * len(times[others]))
    burst = dict(lines(plot("runtime", sweep(), at), 0)[ours])
    assert dict(times[ours]) == pytest.approx({x: 1.1 * y for x, y in burst.items()})
    assert "after 5 to 7 s of calls without a pause" in text(figure)
    assert "times as fast as" in text(figure)


def test_energy_is_drawn_per_token() -> None:
    figure = plot("energy", loaded(), Selection(head_dim=256, modes=("fw",), impls=("fused_chunk", "flash_attn.v4")))
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["energy per token (\N{MICRO SIGN}J)", "without idle power (\N{MICRO SIGN}J)"]
    every, net = (lines(figure, n)[series_label("mlstm_sig", "fused_chunk")] for n in (0, 1))
    row = loaded().query("op == 'mlstm_sig' and impl == 'fused_chunk' and mode == 'fw' and seq_len == 8192")
    least = row[row["head_dim_v"] == 256]["energy_j"].min()
    assert dict(every)[8192] == pytest.approx(1e6 * least / 65536)
    assert [y for _, y in net] == pytest.approx([0.8 * y for _, y in every])
    assert "times the energy of attention at every sequence length" in text(figure)


@pytest.mark.parametrize("kind", ["sustained", "energy"])
def test_figures_of_load_take_rows_of_it_alone(kind: str) -> None:
    """A newer row without is no row of theirs; failed cases are named all the same."""
    newer = sweep().assign(measured_at="2026-02-01T00:00:00+00:00")
    at = Selection(head_dim=256, every=True)
    both = drawing(kind, pd.concat([loaded(), newer], ignore_index=True), at)
    assert both.rows["sustained_ms"].notna().all()
    assert "crash (the compiler aborted the process)" in words(both)
    with pytest.raises(ValueError, match=r"must hold rows of lrbench sweep --sustained.* got none"):
        drawing(kind, sweep(), at)


def test_trade_off_runs_from_much_memory_to_little_over_chunk_size() -> None:
    figure = plot("trade-off", sweep(), Selection(head_dim=256, seq_len=8192))
    points = lines(figure, 0)[series_label("mlstm_sig", "fused_chunk")]
    memory = [x for x, _ in points]
    assert memory == sorted(memory, reverse=True)
    # Of lines of two points the ends say nothing that the others do not.
    assert {text.get_text() for text in figure.axes[0].texts} == {"L = 64", "L = 1k"}
    assert series_label("attention", "flash_attn.v4") not in lines(figure, 0)


def test_rate_work_and_time_belong_together() -> None:
    """Figure 23: TFLOP/s x ms = GFLOP at every chunk size."""
    figure = plot("rate", sweep(), Selection(head_dim=256, seq_len=8192, ops=("mlstm_sig",), modes=("fw",)))
    rate, work, time = (dict(lines(figure, panel)[series_label("mlstm_sig", "fused_chunk")]) for panel in range(3))
    assert set(rate) == set(work) == set(time) == set(map(float, made.CHUNKS))
    for chunk in rate:
        assert rate[chunk] * time[chunk] * 1e-3 == pytest.approx(work[chunk])


def test_suspect_points_are_ringed_and_explained() -> None:
    impossible = made.frame([made.row("mlstm_sig", "fused_chunk", chunk_size=256, time_ms=0.2)])
    figure = plot("runtime", impossible)
    for each in (figure, roofline(impossible, "h200")):
        assert "Ringed, suspect: fused_chunk fw L = 256: " in text(each)
    rings = [line for line in figure.axes[0].lines if line.get_linestyle() == "None"]
    assert [(ring.get_xdata()[0], ring.get_ydata()[0]) for ring in rings] == [(8192, 0.2)]
    assert "Ringed" not in text(plot("runtime", sweep(), Selection(head_dim=256)))


def test_points_of_a_busy_machine_are_hollow() -> None:
    """A line under the figure says so, and no title rests on them."""
    rows = [
        made.row("mlstm_sig", impl, seq_len=seq_len, chunk_size=chunk)
        for impl in ("fused_chunk", "mlstm_kernels.xl_chunk_siging")
        for seq_len in (1024, 8192)
        for chunk in (128, 256)
    ]
    busy = made.frame([row | {"noise": "busy CPU: load 9" if row["seq_len"] == 1024 else None} for row in rows])
    at_length = {"ops": ("mlstm_sig",), "seq_len": 1024}
    theory = Theory(seq_len=1024, head_dim=256, gpus=("h200",))
    figures = {
        "runtime": plot("runtime", busy),
        "memory": plot("memory", busy),
        "chunk-size": plot("chunk-size", busy, Selection(**at_length)),
        "trade-off": plot("trade-off", busy, Selection(**at_length)),
        "roofline": roofline(busy, "h200", Selection(**at_length)),
        "model": plot("model", busy, theory=theory),
    }
    for kind, figure in figures.items():
        hollow = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "white"]
        points = 2 if kind in ("runtime", "memory") else 4
        assert sum(len(line.get_xdata()) for line in hollow) == points, kind
        assert f"Hollow: measured on a busy machine, {points} of 4 points." in text(figure), kind
    assert "at every sequence length" in text(plot("runtime", made.frame(rows)))
    assert "at every sequence length" not in text(figures["runtime"])
    assert "Hollow" not in text(plot("runtime", made.frame(rows)))


def test_one_family_is_drawn_unless_operations_are_named(run: Run, lrbench: Lrbench, tmp_path: Path) -> None:
    """Of several one must be named with --kernel."""
    rows = [made.row("mlstm_sig", "fused_chunk", seq_len=n) for n in (1024, 8192)]
    rows.append(made.row("lightning", "fused_chunk", kernel="lightning"))
    made.write(rows, tmp_path / "rows.parquet")

    def drawn(*options: str) -> tuple[str, str]:
        run("plot runtime", tmp_path, "-o", tmp_path / "f.svg", *options)
        return (tmp_path / "f.svg").read_text(encoding="utf-8"), run.err

    said = refused(lrbench, "plot runtime", tmp_path)
    assert "choose one with --kernel: lightning, tfla; most rows are of --kernel tfla" in said
    text, said = drawn("--kernel", "lightning")
    assert "mLSTMsig" not in text and "Lightning" in text and not said
    text, said = drawn("--kernel", "mlstm_sig", "--device", "H200")
    assert "mLSTMsig" in text and "Lightning" not in text and not said
    text, said = drawn("--op", "mlstm_sig,lightning")
    assert "mLSTMsig" in text and "Lightning" in text and not said
    said = refused(lrbench, "plot runtime", tmp_path, "--kernel", "wkv")
    assert "kernel must be one of tfla, lightning in these results, got 'wkv'" in said
