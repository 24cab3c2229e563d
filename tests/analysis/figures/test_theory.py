"""Figures of the counts and the model: what is drawn are the counts, the closed forms and the model themselves."""

from __future__ import annotations

import math
import re

import pytest

from lrbench.analysis.accelerators.known import get_accelerator
from lrbench.analysis.counts import count
from lrbench.analysis.figures.plots import OF_ENTRIES, THEORY_KINDS, drawing
from lrbench.analysis.figures.style import OPERATION_LABELS
from lrbench.analysis.figures.theory import HEAD_DIMS, MAX_LINES, Theory
from lrbench.analysis.model.chunk_size import coefficients
from lrbench.analysis.model.runtime_model import model_time_ms

from .. import rows as made
from .drawing import committed, lines, plot, text, words


def test_chunkwise_flops_run_from_the_recurrent_to_the_parallel_forms() -> None:
    """Figure 18: three head dims; least in between.

    One chunk of the whole sequence also makes and reads a state, which the parallel form has none of: 4 T d_qk d_v.
    """
    figure = plot("flops")
    titles = [f"head dim {dim // 2} (qk), {dim} (v)" for dim in (128, 256, 512)]
    assert [axes.get_title(loc="left") for axes in figure.axes] == titles
    for panel in range(3):
        drawn = lines(figure, panel)
        chunkwise = dict(drawn["chunkwise"])
        recurrent, parallel = drawn["recurrent"][0][1], drawn["parallel"][0][1]
        assert min(chunkwise) == 1
        assert max(chunkwise) == 8192
        assert chunkwise[1] == pytest.approx(recurrent, rel=0.06)
        states = 4 * 8192 * (64 << panel) * (128 << panel) / 1e9
        assert chunkwise[8192] - states == pytest.approx(parallel, rel=0.01)
        assert min(chunkwise.values()) < 0.8 * recurrent < parallel
    sizes = {"seq_len": 8192, "head_dim_qk": 256, "head_dim_v": 512, "causal_factor": 0.5}
    assert chunkwise[256] == count("mlstm_sig", chunk_size=256, **sizes).flops / 1e9


def test_flop_optimal_chunks_are_the_closed_form() -> None:
    """Figure 19."""
    figure = plot("flop-optimal")
    for panel, share in enumerate((0.5, 1.0)):
        for factor in (0.5, 0.75, 1.0):
            points = lines(figure, panel)[f"causal factor {factor:g}"]
            expected = [
                math.sqrt((2 * d * d * share + 5) / (2 * factor * (d * (1 + share) + 3) + 1)) for d in HEAD_DIMS
            ]
            assert points == [(d, pytest.approx(best)) for d, best in zip(HEAD_DIMS, expected, strict=True)]


def test_runtime_optimal_chunks_grow_with_intensity_state_width_and_head_dim() -> None:
    """Figures 24 and 25 show one and the same closed form."""
    over_dims = plot("runtime-optimal", theory=Theory(gpus=("v100", "h200")))
    wide, narrow = (lines(over_dims, panel) for panel in (0, 1))
    for gpu in ("V100", "H200 SXM"):
        assert all(a[1] > b[1] for a, b in zip(wide[gpu], narrow[gpu], strict=True))
        values = [y for _, y in wide[gpu]]
        assert values == sorted(values)
    assert all(b[1] > a[1] for a, b in zip(wide["V100"], wide["H200 SXM"], strict=True))
    h200 = get_accelerator("h200")
    closed = coefficients("mlstm_sig", head_dim_qk=128, head_dim_v=256, causal_factor=0.5)
    assert dict(wide["H200 SXM"])[256] == pytest.approx(closed.runtime_optimal(h200.intensity("bf16")))

    # Of lines that lie on one another each shows in the others' gaps.
    usual = drawing("runtime-optimal").grid[0][0].lines
    h100, b200 = (next(line for line in usual if line.style.label == name) for name in ("H100 SXM", "B200"))
    assert h100.y == pytest.approx(b200.y, rel=0.03)
    assert (h100.style.dashes, b200.style.dashes) == ((4, (4, 4)), (0, (4, 4)))
    assert [line.style.dashes for line in usual if line.style.label == "A100 80 GB PCIe"] == ["solid"]

    over_intensity = plot("intensity-optimal", theory=Theory(gpus=("h200",)))
    for x, y in lines(over_intensity, 0)["d_v = 256"]:
        assert y == pytest.approx(closed.runtime_optimal(x))
    assert [each.get_text() for each in over_intensity.axes[0].texts] == ["H200 SXM"]
    assert "Dotted, in FLOP per byte: H200 SXM 206." in text(over_intensity)


def test_intensity_grows_with_the_chunk_and_meets_the_accelerators() -> None:
    """Figure 21: bf16 states are fewer bytes; what is drawn is the count's."""
    figure = plot("intensity")
    wide, narrow = (lines(figure, panel)["d_v = 512"] for panel in (0, 1))
    assert all(a[1] < b[1] for a, b in zip(wide, narrow, strict=True))
    values = [y for _, y in wide]
    assert values == sorted(values)
    one = count("mlstm_sig", seq_len=8192, chunk_size=128, head_dim_qk=256, head_dim_v=512, causal_factor=0.5)
    assert dict(wide)[128] == one.intensity
    assert {each.get_text() for each in figure.axes[0].texts} == {"A100 80 GB PCIe (161)", "B200 (292), H100 SXM (295)"}


def test_modelled_runtime_is_the_models() -> None:
    """Figure 20, the paper's problem: head dims 256 and 512, 8 heads, batch 8, T = 8192."""
    drawn = lines(plot("model"), 0)
    sizes = {"seq_len": 8192, "batch": 8, "num_heads": 8, "head_dim_qk": 256, "head_dim_v": 512, "causal_factor": 0.5}
    assert len(drawn) == 3
    for gpu, label in (("a100", "A100 80 GB PCIe"), ("h100", "H100 SXM"), ("b200", "B200")):
        for chunk, time_ms in drawn[f"{label}, model"]:
            counted = count("mlstm_sig", chunk_size=int(chunk), **sizes)
            assert time_ms == pytest.approx(model_time_ms(counted, get_accelerator(gpu), "bf16"))


def test_measured_rows_stand_beside_their_accelerators_model() -> None:
    frame = committed()
    figure = plot("model", frame, theory=Theory(gpus=("b200",), head_dim=256))
    drawn = lines(figure, 0)
    assert {"B200, model", "H200 SXM, model", "H200 SXM, fused_chunk measured"} <= set(drawn)
    same = frame.query("op == 'mlstm_sig' and impl == 'fused_chunk' and mode == 'fw' and batch == 8")
    # A chunk length of the kernel's own choice has no place on the axis.
    same = same.query("head_dim_v == 256 and seq_len == 8192").dropna(subset="chunk_size")
    newest = same.sort_values("measured_at").drop_duplicates("chunk_size", keep="last")
    assert dict(drawn["H200 SXM, fused_chunk measured"]) == dict(
        zip(newest["chunk_size"], newest["time_ms"], strict=True)
    )
    launched = dict(drawn["H200 SXM, fused_chunk walks"])
    assert all(
        launched[chunk] == pytest.approx(time_ms, rel=0.2) for chunk, time_ms in drawn["H200 SXM, fused_chunk measured"]
    )
    assert set(launched) == set(dict(drawn["H200 SXM, model"]))
    colours = {line.get_label(): line.get_color() for line in figure.axes[0].lines}
    assert colours["H200 SXM, fused_chunk walks"] == colours["H200 SXM, model"]
    assert colours["H200 SXM, fused_chunk measured"] == colours["H200 SXM, model"] != colours["B200, model"]


def test_rows_of_other_problems_are_refused() -> None:
    frame = made.frame([made.row("mlstm_exp", "fused_chunk")])
    with pytest.raises(ValueError, match=r"op must be one of mlstm_exp in these results, .* got mlstm_sig"):
        plot("model", frame)
    with pytest.raises(ValueError, match=r"head_dim must be one of 256 in these results, .* got 64"):
        plot("model", frame, theory=Theory(op="mlstm_exp", head_dim=64))


def test_transfer_shows_both_mlstm_over_their_gates() -> None:
    """Figures 4, 9 and 10: solid one, dashed the other, the same after the norm at the usual epsilon."""
    shown = OF_ENTRIES["transfer"]("mlstm_exp")
    assert shown.note == "Solid: mLSTMexp, dashed: mLSTMsig."
    after = shown.grid[0][2]
    assert after.title == "epsilon 1e-06"
    for own, other in zip(after.lines[:3], after.lines[3:], strict=True):
        assert own.y == pytest.approx(other.y, rel=0.01)
        assert own.y[0] < 0.1 and own.y[-1] == pytest.approx(1, rel=0.02)


def test_savings_as_tokens_of_cache() -> None:
    """The last figure of the gated MLP's source: saved bytes over those of a token's keys and values."""
    shown = OF_ENTRIES["kv-savings"]()
    plain, in_place = shown.grid[0]
    at_512 = plain.lines[0].x.index(512)
    assert [line.y[at_512] for line in plain.lines] == [224, 179, 211, 200]
    assert [line.y[at_512] for line in in_place.lines] == [112, 89, 105, 100]
    assert shown.finding == "Llama 3.1 8B gains most: 0.44 tokens for each of the prompt"


@pytest.mark.parametrize(
    ("op", "mode"), [(None, "fw"), ("mlstm_exp", "fwbw"), ("gla", "fw"), ("lightning", "fwbw"), ("mamba2_ssd", "fw")]
)
@pytest.mark.parametrize("kind", [*THEORY_KINDS, "model"])
def test_every_chunkwise_operation_can_be_drawn_and_makes_one_statement(kind: str, op: str | None, mode: str) -> None:
    shown = drawing(kind, theory=Theory() if op is None else Theory(op=op, mode=mode))
    drawn = [panel.lines for row in shown.grid for panel in row]
    assert all(len(panel) <= MAX_LINES for panel in drawn) and re.search(r"\d", shown.finding)
    assert all(math.isfinite(y) and (y > 0 or op is None) for panel in drawn for line in panel for y in line.y)
    assert op is None or OPERATION_LABELS[op] in words(shown)
