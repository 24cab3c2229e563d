"""Rooflines: every point on the roof of the device that measured it and its share of that roof."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from lrbench.analysis.accelerators.known import get_accelerator
from lrbench.analysis.accelerators.roofs import with_stored_roofs
from lrbench.analysis.figures import roofline as rooflines
from lrbench.analysis.figures.selection import Selection
from lrbench.analysis.figures.style import series_label
from lrbench.kernels import FAMILIES

from .. import rows as made
from .drawing import committed, lines, roofline, sweep, text


def ours() -> pd.DataFrame:
    """Return the rows of fused_chunk's line, in the order of chunk size."""
    rows = sweep().query("op == 'mlstm_sig' and impl == 'fused_chunk' and mode == 'fw'")
    return rows.query("seq_len == 8192 and head_dim_v == 256").sort_values("chunk_size")


def test_roofline_points_are_the_rows() -> None:
    figure = roofline(sweep(), ["h200"], Selection(head_dim=256, seq_len=8192))
    drawn = lines(figure, 0)
    points = [(row.intensity, pytest.approx(row.tflops)) for row in ours().itertuples()]
    assert drawn[series_label("mlstm_sig", "fused_chunk")] == points
    assert max(max(line.get_ydata()) for line in figure.axes[0].lines) == pytest.approx(989)
    measured = with_stored_roofs(get_accelerator("h200")).measured
    reached = f"{measured.matrix_flops['bf16'] / 1e12:.0f} TFLOP/s and {measured.bandwidth_bytes_s / 1e12:.3g} TB/s"
    assert f"Dashed: measured, {reached}" in text(figure)


def test_a_cpu_row_never_stands_on_a_gpus_roofline() -> None:
    cpu = made.frame([made.row("mlstm_sig", "torch", dtype="fp32", accelerator="cpu", time_ms=50.0)])
    with pytest.raises(ValueError, match="rows measured on h200_sxm for its roofline, got rows of: cpu"):
        roofline(cpu, ["h200"])
    both = pd.concat([sweep(), cpu], ignore_index=True)
    figure = roofline(both, ["h200"], Selection(head_dim=256, seq_len=8192))
    assert series_label("mlstm_sig", "torch") not in lines(figure, 0)
    with pytest.raises(ValueError, match="gpu must not name the CPU beside others, got h200_sxm, cpu"):
        roofline(both, ["h200", "cpu"])


def test_the_share_is_of_the_roof_that_is_drawn() -> None:
    drawn = lines(roofline(sweep(), ["h200"], Selection(head_dim=256, seq_len=8192, modes=("fw",))), 1)
    expected = {row.chunk_size: 100 * row.roofline_fraction for row in ours().itertuples()}
    assert dict(drawn[series_label("mlstm_sig", "fused_chunk")]) == pytest.approx(expected)
    # Work without matrix products is held to the vector rate; without a chunk axis it stands beyond the chunks.
    ((x, share),) = drawn[series_label("selective_scan", "mamba_ssm.selective_scan")]
    (row,) = sweep().query("op == 'selective_scan' and mode == 'fw' and seq_len == 8192").itertuples()
    assert (x, share) == (2048, pytest.approx(100 * row.roofline_fraction))


def test_several_accelerators_in_one_figure() -> None:
    """Each one's points on its own roof; one without rows shows its roof alone, wherever it stands in the list."""
    other = made.frame([made.row("mlstm_sig", "fused_chunk", chunk_size=c, accelerator="h100") for c in (64, 128)])
    both = pd.concat([sweep(), other], ignore_index=True)
    figure = roofline(both, ["b200", "h200", "h100"], Selection(head_dim=256, seq_len=8192, modes=("fw",)))
    assert "Roof only, nothing measured: NVIDIA B200." in text(figure)
    drawn = lines(figure, 0)
    ours = series_label("mlstm_sig", "fused_chunk")
    assert drawn[f"{ours}, h100_sxm"] == list(zip(other["intensity"], other["tflops"], strict=True))
    assert len(drawn[ours]) == len(made.CHUNKS)
    shares = [y for _, y in lines(figure, 1)[f"{ours}, h100_sxm"]]
    assert shares == pytest.approx([100 * value for value in other["roofline_fraction"]])
    peaks = {max(line.get_ydata()) for line in figure.axes[0].lines}
    assert peaks >= {989.0, 2250.0}


def test_where_nothing_was_measured_on_the_accelerators_that_are_named_the_measured_ones_roof_is_drawn_too() -> None:
    selection = Selection(head_dim=256, seq_len=8192, modes=("fw",))
    figure = roofline(sweep(), ["a100", "h100", "b200"], selection)
    assert "Roof only, nothing measured: NVIDIA A100 80 GB PCIe, NVIDIA H100 SXM, NVIDIA B200." in text(figure)
    assert lines(figure, 0) == lines(roofline(sweep(), "h200", selection), 0)
    roofs = {each.get_text() for each in figure.axes[0].texts}
    assert {"A100 80 GB PCIe 312", "H200 SXM, H100 SXM 989", "B200 2,250"} < roofs


def test_an_accelerator_named_twice_is_drawn_once() -> None:
    selection = Selection(head_dim=256, seq_len=8192, modes=("fw",))
    once, twice = (roofline(sweep(), gpus, selection) for gpus in ("h200", ["h200", "h200_sxm"]))
    assert lines(once, 0) == lines(twice, 0)


def test_without_a_selection_every_family_has_a_line_of_ours_and_its_fastest_rival() -> None:
    shown = rooflines.roofline(committed(), ["a100", "h100", "b200"])
    drawn = [line.style for line in shown.grid[0][0].lines]
    ours = {style.label.partition(" ·")[0]: style.colour for style in drawn if style.bold}
    assert ours.keys() == {"mLSTMsig", "Lightning", "RG-LRU", "WKV-4", "Gated DeltaNet", "gated MLP"}
    assert len(drawn) == 2 * len(ours) and len({*ours.values()}) == len(ours)
    for kernel in FAMILIES:
        assert f" · {kernel}: " in shown.setting
    assert re.fullmatch(r"Of the roof forward: mLSTMsig \d+ %(, [\w -]+ \d+ %){5}", shown.finding)
    # What only one family has leaves that.
    assert rooflines.roofline(committed(), "h200", Selection(channels=1024)).finding.startswith("RG-LRU fused reaches")
    with pytest.raises(ValueError, match="seq_len must be one of 512"):
        rooflines.roofline(committed(), "h200", Selection(seq_len=7))
