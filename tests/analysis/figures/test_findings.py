"""What a figure says: few lines, ours beside the others, the statement as its title, and axes that follow the rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd
import pytest

from lrbench.analysis.figures.findings import MAX_LINES
from lrbench.analysis.figures.plots import drawing
from lrbench.analysis.figures.roofline import roofline as rooflines
from lrbench.analysis.figures.selection import Selection, choose
from lrbench.analysis.figures.style import series_label, series_style
from lrbench.analysis.figures.theory import MAX_LINES as MAX_MODEL_LINES
from lrbench.analysis.figures.theory import Theory
from lrbench.bench.plan import Request, plan
from lrbench.results.select import short_size

from .. import rows as made
from .drawing import COMMITTED, committed, lines, of_committed, plot, roofline, text

LENGTHS = (1024, 2048, 8192)
OURS, THEIRS = "fused_chunk", "mlstm_kernels.xl_chunk_siging"
PEERS = (
    "whole_state", THEIRS, "flash_attn.v4", "fla.chunk_gla", "fla.chunk_simple_gla", "fla.chunk_retention",
    "mamba_ssm.chunk_scan", "mamba_ssm.selective_scan", "lightning_attn.v2",
)  # fmt: skip
OURS_LABEL = series_label("mlstm_sig", OURS)


def pair(factor: float = 3.0, **columns: Any) -> list[dict[str, Any]]:
    """Return rows of ours and of a peer that takes ``factor`` times as long, over sequence length."""
    return [
        made.row("mlstm_sig", impl, seq_len=length, time_ms=time_ms, **columns)
        for length in LENGTHS
        for impl, time_ms in ((OURS, 1.0), (THEIRS, factor))
    ]


@pytest.mark.parametrize("kind", ["runtime", "memory", "throughput", "chunk-size", "head-dim", "roofline"])
@pytest.mark.parametrize("kernel", ["tfla", "lightning", "rglru", "wkv", "gated-mlp"])
def test_a_figure_of_committed_rows_makes_one_statement(kind: str, kernel: str) -> None:
    """At most eight lines, no two alike, ours first to be seen, several sizes along the axis, a sentence on top."""
    try:
        shown = of_committed(kind, kernel, ("h200", "b200") if kind == "roofline" else ())
    except ValueError:
        assert (kind, kernel) in {("chunk-size", "wkv"), ("chunk-size", "gated-mlp"), ("head-dim", "rglru"),
                                  ("head-dim", "gated-mlp")}  # fmt: skip
        return
    drawn = [line for row in shown.grid for panel in row for line in panel.lines if " · " in line.style.label]
    styles = {line.style.label: line.style for line in drawn}
    assert 1 <= len(styles) <= MAX_LINES
    assert len({(style.colour, style.marker) for style in styles.values()}) == len(styles)
    assert 2 * len({style.colour for style in styles.values()}) >= len(styles)
    assert max(style.width for label, style in styles.items() if "lrbench" in label) > 1.5
    assert kind == "roofline" or max(len(line.x) for line in drawn) > 1
    verbs = ("times as", "times the memory", "as much memory", "fastest at", "reaches")
    assert any(verb in (shown.finding or shown.title) for verb in verbs)


def test_no_peer_of_an_operation_of_ours_is_shown_without_ours() -> None:
    few, every = (
        drawing("runtime", committed(), dataclasses.replace(COMMITTED["tfla"], every=on)) for on in (False, True)
    )
    ours = {op for op, provider in zip(every.rows["op"], every.rows["provider"], strict=True) if provider == "lrbench"}
    assert {op: set(of["provider"]) for op, of in few.rows.groupby("op")}["mamba2_ssd"] == {"lrbench", "mamba_ssm"}
    for op, of in few.rows.groupby("op"):
        assert "lrbench" in set(of["provider"]) or op not in ours, op


def test_all_shows_every_line() -> None:
    few, every = (
        lines(plot("runtime", committed(), dataclasses.replace(COMMITTED["tfla"], every=on)), 0) for on in (False, True)
    )
    assert len(few) == MAX_LINES < len(every)
    assert set(few) < set(every)
    named = dataclasses.replace(COMMITTED["tfla"], impls=("whole_state", OURS, "xl_chunk", "limit_chunk"))
    assert len(lines(plot("runtime", committed(), named), 0)) > MAX_LINES


@pytest.mark.parametrize(
    ("kind", "rows", "said"),
    [
        ("runtime", pair(3.0), "mLSTMsig: ours is 3 times as fast as mlstm_kernels at every sequence length"),
        ("runtime", pair(0.5), "mLSTMsig: ours takes 2 times as long as mlstm_kernels at every sequence length"),
        ("runtime", pair(1.001), "mLSTMsig: ours is as fast as mlstm_kernels at every sequence length"),
        ("runtime", pair()[:-1], "mLSTMsig: ours is 3 times as fast as mlstm_kernels"),
        ("runtime", pair()[::2], "Runtime over sequence length"),
        # A peer of which too little was measured for a line of its own is no rival in the title either.
        (
            "runtime",
            [
                *(made.row("mlstm_sig", OURS, seq_len=t, time_ms=1.0) for t in (*LENGTHS, 16384)),
                made.row("mlstm_sig", THEIRS, time_ms=3.0),
            ],
            "Runtime over sequence length",
        ),
        # The best peer is the one that is faster where both were measured; elsewhere ours is beside a slower one.
        (
            "runtime",
            [
                *(made.row("mlstm_sig", OURS, seq_len=2**n, time_ms=1.0) for n in range(10, 16)),
                *(made.row("mlstm_sig", THEIRS, seq_len=2**n, time_ms=20.0) for n in (14, 15)),
                *(
                    made.row("mlstm_sig", "fla.slow", provider="fla", seq_len=2**n, time_ms=5.0 if n < 14 else 41.0)
                    for n in range(10, 16)
                ),
            ],
            "mLSTMsig: ours is 20 times as fast as the best of the others",
        ),
        # One that runs forward alone does not decide where there are gradients.
        (
            "runtime",
            [
                *(
                    made.row("mlstm_sig", OURS, mode=m, seq_len=t, time_ms=40.0)
                    for m in ("fw", "fwbw")
                    for t in LENGTHS
                ),
                *(made.row("mlstm_sig", THEIRS, mode="fw", seq_len=t, time_ms=80.0) for t in LENGTHS),
                *(
                    made.row("mlstm_sig", "fla.other", provider="fla", mode=m, seq_len=t, time_ms=ms)
                    for m, ms in (("fw", 160.0), ("fwbw", 20.0))
                    for t in LENGTHS
                ),
            ],
            "mLSTMsig: ours is 0.5 to 2 times as fast as the best of the others at every sequence length",
        ),
        (
            "chunk-size",
            [made.row("mlstm_sig", OURS, chunk_size=L, time_ms=128 / L) for L in (64, 128)],
            "mLSTMsig fused_chunk is fastest at chunk size 128, 2 times as fast as at its worst",
        ),
        # Our fastest at its best, though another is faster at every chunk size that both have.
        (
            "chunk-size",
            [
                made.row("mlstm_sig", impl, chunk_size=L, time_ms=ms)
                for impl, ms_at in (("limit_chunk", (2.0, 2.2)), (OURS, (4.0, 3.0, 1.0)))
                for L, ms in zip((64, 128, 512), ms_at, strict=False)
            ],
            "mLSTMsig fused_chunk is fastest at chunk size 512, 4 times as fast as at its worst",
        ),
    ],
)
def test_the_title_is_what_the_rows_say(kind: str, rows: list[dict[str, Any]], said: str) -> None:
    shown = drawing(kind, made.frame(rows))
    assert said in (shown.finding or shown.title)
    if said.startswith(shown.finding or "-"):
        assert shown.finding == said


def test_operations_have_colours_and_their_implementations_markers_of_their_own() -> None:
    looks: dict[str, dict[str, str]] = {}
    for op, impl in committed()[["op", "impl"]].drop_duplicates().itertuples(index=False):
        looks.setdefault(op, {})[impl] = series_style(op, impl).marker
    looks["rglru"] |= {name: series_style("rglru", name).marker for name in ("torch", "associative_scan")}
    assert {"naive", "chunked", "torch.eager", "torch.compile"} < set(looks["rglru"])
    for op, markers in looks.items():
        assert len(set(markers.values())) == len(markers), (op, markers)
    colours = {op: {series_style(op, impl).colour for impl in markers} for op, markers in looks.items()}
    for op in ("lightning", "wkv4", "gated_mlp"):
        assert len(colours.pop(op)) == len(looks[op]) > 4, "of its family alone: a colour for every implementation"
    assert {len(each) for each in colours.values()} == {1} and len(set.union(*colours.values())) == len(colours)
    assert series_style("x", "unknown.kernel") == series_style("x", "unknown.kernel")
    at = dataclasses.replace(COMMITTED["tfla"], ops=("mlstm_sig",))
    for shown in (drawing("runtime", committed(), at), rooflines(committed(), "h200", at)):
        styles = {line.style.label: line.style.colour for line in shown.grid[0][0].lines}
        assert len(set(styles.values())) == len(styles) > 3


def test_a_length_with_one_chunk_size_is_left_out() -> None:
    """Unless a line has no two points at which several were measured."""
    sizes = {1024: (64, 128), 2048: (64,), 8192: (64, 128)}
    rows = [made.row("mlstm_sig", OURS, seq_len=t, chunk_size=chunk) for t, chunks in sizes.items() for chunk in chunks]
    figure = plot("runtime", made.frame(rows))
    assert [x for x, _ in lines(figure, 0)[OURS_LABEL]] == [1024, 8192]
    assert f"Left out, since one chunk size was measured: {OURS_LABEL} at 2k." in text(figure)
    alone = plot("runtime", made.frame(row for row in rows if row["chunk_size"] == 64))
    assert [x for x, _ in lines(alone, 0)[OURS_LABEL]] == list(LENGTHS)


def test_memory_with_a_gradient_counted_twice_is_not_shown() -> None:
    old, new = "2026-11-21T14:00:00+00:00", "2026-11-21T17:00:00+00:00"
    rows = [
        made.row("mlstm_sig", impl, mode=mode, seq_len=t, measured_at=at)
        for impl, at in ((OURS, new), (THEIRS, old))
        for mode in ("fw", "fwbw")
        for t in LENGTHS
    ]
    figure = plot("memory", made.frame(rows))
    peer = series_label("mlstm_sig", THEIRS)
    assert [peer in lines(figure, panel) for panel in (0, 1)] == [True, False]
    assert f"Memory not shown, since a gradient was counted twice: {peer}." in text(figure)
    assert peer in lines(plot("runtime", made.frame(rows)), 1)


def simple_gla_rows() -> list[dict[str, Any]]:
    """Return rows of ours at two query-key head dims, mostly at 128, and of a peer at 256 alone."""

    def at(impl: str, dim: int, t: int, ms: float, **sizes: int) -> dict[str, Any]:
        return made.row("simple_gla", impl, head_dim_qk=dim, seq_len=t, time_ms=ms, **sizes)

    rows = [at(OURS, 128, t, ms, chunk_size=chunk) for t in LENGTHS for chunk, ms in ((64, 0.2), (128, 0.1), (256, 1))]
    rows += [at(OURS, 256, t, ms, chunk_size=chunk) for t in LENGTHS for chunk, ms in ((64, 1.0), (128, 2.0))]
    rows += [at("whole_state", 128, t, 0.05, chunk_size=chunk) for t in LENGTHS for chunk in (64, 128)]
    return rows + [at("fla.chunk_simple_gla", 256, t, 3.0) for t in LENGTHS]


def test_lines_and_factors_are_between_equal_problems() -> None:
    """Of an operation one pair of head dims is shown."""
    frame, selection = made.frame(simple_gla_rows()), Selection(head_dim_qk=256, seq_len=8192)
    ours, peer = (series_label("simple_gla", impl) for impl in (OURS, "fla.chunk_simple_gla"))
    shown = drawing("runtime", frame, selection)
    assert shown.finding == "simple GLA: ours is 3 times as fast as fla at every sequence length"
    assert "head dim 256 (qk), 256 (v)" in shown.setting
    drawn = lines(plot("runtime", frame, selection), 0)
    assert set(drawn) == {ours, peer}
    assert {ms for _, ms in drawn[ours]} == {1.0}
    assert lines(plot("chunk-size", frame, selection), 0)[ours] == [(64, 1.0), (128, 2.0)]
    assert len(lines(roofline(frame, "h200", selection), 0)[ours]) == 2


def test_the_default_sweep_shows_the_peers_of_every_operation_beside_ours() -> None:
    """Rows of what the default sweep plans: attention, Mamba, GLA, and simple GLA, Retention and Mamba-2 over T."""
    planned = plan(Request(impls=PEERS, head_dims=(256,), chunk_sizes=(64, 128, 256)), device_kind="cuda")
    shown = drawing("runtime", made.frame(made.row_of(item.case) for item in planned), Selection(kernel="tfla"))
    forward = {line.style.label: len(line.x) for line in shown.grid[0][0].lines}
    assert set(forward) == {
        "mLSTMsig · lrbench whole_state", "mLSTMsig · mlstm_kernels xl_chunk_siging", "attention · flash_attn v4",
        "GLA · fla chunk_gla", "Mamba · mamba_ssm selective_scan", "simple GLA · fla chunk_simple_gla",
        "Retention · fla chunk_retention", "Mamba-2 · mamba_ssm chunk_scan",
    }  # fmt: skip
    assert set(forward.values()) == {7}
    assert "2 more lines with --all" in shown.note, "our mLSTMexp, and Lightning, which is of another family"


def test_a_width_has_one_query_key_head_dim() -> None:
    """Over head dim, too, a point of ours and of a peer is of one problem."""
    rows = [
        made.row("mlstm_sig", impl, num_heads=4096 // dim, head_dim_v=dim, head_dim_qk=key, time_ms=ms)
        for dim in (64, 128)
        for impl, key, ms in ((OURS, dim // 2, 1.0), (OURS, dim, 0.5), (THEIRS, dim // 2, 3.0))
    ]
    shown = drawing("head-dim", made.frame(rows))
    assert shown.finding == "mLSTMsig: ours is 3 times as fast as mlstm_kernels at every head dim"
    # Unless the other one is asked for.
    chosen = choose(made.frame(rows), Selection(head_dim=64, head_dim_qk=64)).rows
    assert {*zip(chosen["impl"], chosen["head_dim_qk"], chosen["head_dim_v"], strict=True)} == {(OURS, 64, 64)}
    with pytest.raises(ValueError, match="head_dim_qk must be one of 32, 64, 128 in these results, got 48"):
        choose(made.frame(rows), Selection(head_dim_qk=48))


def test_an_unknown_operation_is_drawn() -> None:
    rows = made.frame(pair())
    frame = pd.concat([rows, rows.head(1).assign(op="mine", impl="fast")])
    assert "mine · lrbench fast" in text(plot("runtime", frame, Selection(every=True)))


def test_the_model_stands_beside_the_fastest_committed() -> None:
    few, every = (drawing("model", committed(), theory=Theory(gpus=("h200",), every=on)) for on in (False, True))
    labels = {line.style.label for line in few.grid[0][0].lines}
    assert len(labels) <= MAX_MODEL_LINES < len(every.grid[0][0].lines) + 1
    assert {"H200 SXM, whole_state measured", "H200 SXM, fused_chunk measured"} < labels
    best = {}
    for line in every.grid[0][0].lines:
        best[line.style.label] = min(zip(line.y, line.x, strict=True))[1]
    measured, modelled = (short_size(best[f"H200 SXM, {name}"]) for name in ("whole_state measured", "model"))
    assert few.finding == f"On the H200 SXM whole_state is fastest at chunk size {measured}, the model at {modelled}"


def test_sizes_are_told_apart() -> None:
    assert [*map(short_size, (100, 1000, 1024, 65536, 3 * 2**20, 1_234_567, 1_234_568))] == [
        "100", "1000", "1k", "64k", "3M", "1234567", "1234568",
    ]  # fmt: skip


def test_a_mode_that_the_best_peer_lacks_has_no_comparison() -> None:
    """fla is the fastest peer of Lightning forward and with both passes, and has no row of the backward call alone."""
    for mode, said in (("bw", ""), ("fwbw", "Lightning: ours is")):
        selection = Selection(ops=("lightning",), modes=(mode,))
        shown = drawing("runtime", committed(), choose(committed(), selection, most=True))
        assert shown.finding.startswith(said) and bool(shown.finding) == bool(said)
    # Its best peer is drawn with --all alone.
    layer = drawing(
        "runtime", committed(), choose(committed(), Selection(ops=("rglru_layer",)), batches=(8,), most=True)
    )
    assert "RG-LRU layer: ours is 3." in layer.finding
    widths = drawing("head-dim", committed(), choose(committed(), Selection(ops=("lightning",)), "width", most=True))
    assert "lightning_attn" not in widths.finding
