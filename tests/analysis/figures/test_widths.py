"""Figures of operations without heads: one width is held, or stands along the axis, and what is shown says which."""

from __future__ import annotations

import itertools
from typing import Any

import pandas as pd
import pytest

from lrbench.analysis.figures.plots import drawing
from lrbench.analysis.figures.selection import Selection
from lrbench.analysis.figures.style import series_label

from .. import rows as made
from .drawing import lines, plot, text

WIDTHS = (64, 256, 4096)


def row(op: str, impl: str, seq_len: int, **fields: Any) -> dict[str, Any]:
    """Return a row of the CPU, in fp32."""
    return made.row(op, impl, **{"dtype": "fp32", "seq_len": seq_len, "accelerator": "cpu", **fields})


def channel_rows() -> list[dict[str, Any]]:
    """Return rows of RG-LRU and of attention beside it at three widths and sequence lengths."""
    rows = []
    for width, seq_len in itertools.product(WIDTHS, (1024, 4096, 8192)):
        beside = {"kernel": "rglru", "batch": 8192 // seq_len}
        for impl, chunk in (("torch", 64), ("torch", 128), ("torch", 256), ("associative_scan", None)):
            rows.append(row("rglru", impl, seq_len, **beside, channels=width, chunk_size=chunk, state_dtype="fp32"))
        dim = min(width, 128)
        heads = {"num_heads": width // dim, "head_dim_qk": dim, "head_dim_v": dim}
        rows.append(row("attention", "torch.sdpa_cpu", seq_len, **beside, **heads))
    return rows


@pytest.fixture(scope="module")
def channels() -> pd.DataFrame:
    return made.frame(channel_rows())


@pytest.fixture(scope="module")
def mlp() -> pd.DataFrame:
    sizes = [{"d_model": d, "d_ff": 4 * d} for d in (128, 256)]
    return made.frame(row("gated_mlp", "torch", tokens, **each) for tokens in (256, 512, 1024) for each in sizes)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_line_has_one_number_of_channels(channels: pd.DataFrame, width: int) -> None:
    drawn = lines(plot("runtime", channels, Selection(channels=width)), 0)
    here = channels[channels["embedding_dim"] == width]
    for op, impl in (("rglru", "torch"), ("rglru", "associative_scan"), ("attention", "torch.sdpa_cpu")):
        line = here[(here["op"] == op) & (here["impl"] == impl)]
        assert drawn[series_label(op, impl)] == list(line.groupby("seq_len")["time_ms"].min().items())


def test_channels_stand_along_the_axis_of_the_figure_over_width(channels: pd.DataFrame) -> None:
    figure = plot("head-dim", channels, Selection(seq_len=4096))
    drawn = lines(figure, 0)
    at = channels[channels["seq_len"] == 4096]
    for op, impl in (("rglru", "torch"), ("attention", "torch.sdpa_cpu")):
        line = at[(at["op"] == op) & (at["impl"] == impl)]
        assert drawn[series_label(op, impl)] == list(line.groupby("embedding_dim")["time_ms"].min().items())
    assert figure.get_label().startswith("Runtime over channels")
    assert figure.axes[0].get_xlabel() == "channels"


def test_tokens_of_an_mlp_are_its_axis(mlp: pd.DataFrame, d_model: int = 256) -> None:
    figure = plot("runtime", mlp, Selection(d_model=d_model))
    here = mlp[mlp["d_model"] == d_model]
    drawn = lines(figure, 0)[series_label("gated_mlp", "torch")]
    per_token = 1e6 * here["time_ms"] / here["seq_len"]
    assert drawn == list(zip(here["seq_len"], per_token, strict=True))
    assert len(drawn) == 3
    assert figure.axes[0].get_ylabel() == "time per token (ns)"
    assert figure.axes[0].get_xlabel() == "tokens"
    said = text(figure)
    assert f"d_model {d_model}" in said
    assert f"d_ff {4 * d_model}".replace("1024", "1,024") in said
    assert "chunk size" not in said
    assert "1,024 tokens" not in said


def test_small_quantities_have_units_of_their_size(channels: pd.DataFrame) -> None:
    selection = Selection(channels=64, seq_len=1024)
    rate, work, _ = plot("rate", channels, selection).axes
    here = channels[(channels["channels"] == 64) & (channels["seq_len"] == 1024) & channels["chunk_size"].notna()]
    for axes, flops, prefix, factor in (
        (rate, here["tflops"] * 1e12, rate.get_ylabel()[0], {"G": 1e9, "M": 1e6}[rate.get_ylabel()[0]]),
        (work, here["flops"], "M", 1e6),
    ):
        assert axes.get_ylabel().startswith(f"{prefix}FLOP")
        assert max(axes.lines[0].get_ydata()) == pytest.approx(flops.max() / factor)
        assert 0.1 <= flops.max() / factor < 1000
    memory = plot("memory", channels, selection).axes[0]
    assert memory.get_ylabel() == "peak memory (MiB)"


def test_what_no_row_has_is_refused(channels: pd.DataFrame, mlp: pd.DataFrame) -> None:
    one, two = channels[channels["embedding_dim"] == 64], "more than one head dim, or number of channels, .*, got none"
    for kind, frame, chosen, said in (
        ("runtime", channels, {"d_ff": 128}, "d_ff must be left out for these results, which have none, got 128"),
        ("runtime", channels, {"head_dim": 37}, "head_dim must be one of 64, 128 in these results, got 37"),
        ("runtime", mlp, {"d_model": 512}, "d_model must be one of 128, 256 in these results, got 512"),
        ("head-dim", one, {"seq_len": 1024}, two),
        ("head-dim", mlp, {"seq_len": 1024, "d_model": 128}, two),
    ):
        with pytest.raises(ValueError, match=said):
            drawing(kind, frame, Selection(**chosen))
