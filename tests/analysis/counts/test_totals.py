"""Totals of every formula, written out once more in tests/data/totals.toml: the papers' tables, and the sums of the
derived formulas' docstrings.

A row says what one chunk, sequence or step of a head takes, or a whole problem without heads: FLOPs on matrix units,
all other FLOPs, FLOPs that a backward pass recomputes, bytes. L is the length, K and V are the head dims, c is the
share of the causal square, exp, log, ... are the costs of the functions, w, g and s the bytes of an input, a gate and a
state. Without heads N = B T C are the elements of an input; a gated MLP has M = B T tokens, D inputs and C outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import sympy

from lrbench.analysis.counts import (
    Factors,
    Problem,
    Tally,
    Widths,
    baselines,
    delta_rule,
    gated_mlp,
    lightning,
    mlstm,
    rglru,
    scalar_decay,
    wkv,
)
from lrbench.analysis.counts.problem import compulsory
from lrbench.results.toml_tables import read_toml
from lrbench.tests import ROOT

FUNCTIONS = ("exp", "log", "sig", "max", "mask", "abs")
SYMBOLS: dict[str, Any] = {name: sympy.Symbol(name, positive=True) for name in (*"LKVcwgsBTCDn", *FUNCTIONS)}
SYMBOLS["N"] = SYMBOLS["B"] * SYMBOLS["T"] * SYMBOLS["C"]
SYMBOLS["M"] = SYMBOLS["B"] * SYMBOLS["T"]
F = Factors(**{name: SYMBOLS[name] for name in FUNCTIONS})
WIDTHS = Widths(qkv=SYMBOLS["w"], gate=SYMBOLS["g"], state=SYMBOLS["s"])
HEAD = Problem(
    op="", formulation="", seq_len=SYMBOLS["L"], head_dim_qk=SYMBOLS["K"], head_dim_v=SYMBOLS["V"],
    channels=SYMBOLS["V"], causal=SYMBOLS["c"], f=F, widths=WIDTHS,
)  # fmt: skip
LAYER = Problem(
    op="", formulation="", batch=SYMBOLS["B"], seq_len=SYMBOLS["T"], channels=SYMBOLS["C"], d_model=SYMBOLS["D"],
    d_ff=SYMBOLS["C"], f=F, widths=WIDTHS,
)  # fmt: skip
TOKENS = Problem(op="", formulation="", seq_len=16, channels=SYMBOLS["C"], f=F, widths=WIDTHS)


ROWS = Mapping[str, tuple[str, ...]]
FORM = {
    "terms": Mapping[str, str],
    "heads": ROWS,
    "scalar_decay": ROWS,
    "delta_rule": ROWS,
    "layers": ROWS,
    "gated_mlp": ROWS,
}
WRITTEN = read_toml(ROOT / "tests/data/totals.toml", FORM, "totals")
for term, written in WRITTEN["terms"].items():
    SYMBOLS[term] = sympy.sympify(written, locals=SYMBOLS)


def head(op: str, **changes: Any) -> Problem:
    return dataclasses.replace(HEAD, op=op, **changes)


def layer(formulation: str, *, op: str = "", published: bool = False) -> Problem:
    return dataclasses.replace(LAYER, op=op, formulation=formulation, published=published)


def chunked(tally: Tally, **how: bool) -> Tally:
    return rglru.chunked(tally, LAYER, SYMBOLS["n"], **how)


def check(tally: Tally, matrix: str, vector: str, recomputed: str, moved: str, **known: Any) -> None:
    """Compare a tally with its row; ``known`` are further names in it."""
    again = sum(work.flops for work in tally.recomputed_work.values())
    got = (tally.matrix_flops, tally.flops - tally.matrix_flops, again, tally.bytes)
    for name, value, written in zip(
        ("matrix", "vector", "recomputed", "bytes"), got, (matrix, vector, recomputed, moved), strict=True
    ):
        expected = sympy.sympify(written, locals={**SYMBOLS, **known})
        assert sympy.expand(sympy.sympify(value) - expected) == 0, f"{name}: {sympy.expand(value)}"


HEADS = {
    "mLSTMexp chunk": mlstm.chunk(head("mlstm_exp")),
    "mLSTMsig chunk": mlstm.chunk(head("mlstm_sig")),
    "mLSTMexp parallel": scalar_decay.parallel_forward(head("mlstm_exp")),
    "mLSTMexp step": mlstm.step(head("mlstm_exp")),
    "mLSTMsig step": mlstm.step(head("mlstm_sig")),
    "mLSTMsig chunk as printed": mlstm.chunk(head("mlstm_sig", published=True, f=Factors(), widths=Widths())),
    "mLSTMsig parallel as printed": scalar_decay.parallel_forward(head("mlstm_sig", published=True)),
    "lightning2's decays": lightning.decays(HEAD),
    "lightning2 block": lightning.block_forward(head("lightning")),
    "lightning2 block, backward": lightning.block_backward(HEAD),
    "lightning1": lightning.quadratic(head("lightning"), backward=False),
    "lightning1, backward": lightning.quadratic(head("lightning"), backward=True),
    "attention": baselines.attention_forward(HEAD),
    "attention, backward": baselines.attention_backward(HEAD),
    "attention step": baselines.attention_step(HEAD),
    "gla step": baselines.gla_step(HEAD),
    "gla chunk": baselines.gla_chunk_forward(HEAD),
    "gla chunk, backward": baselines.gla_chunk_backward(HEAD),
    "selective scan": baselines.selective_scan(HEAD, "forward"),
    "selective scan, backward": baselines.selective_scan(HEAD, "backward"),
}


@pytest.mark.parametrize("name", HEADS)
def test_totals_of_a_head(name: str) -> None:
    check(HEADS[name], *WRITTEN["heads"][name])


GATES: dict[str, dict[str, Any]] = {
    "mlstm_exp": {"gates": 2, "a": "log + sig", "da": "sig + 1", "u": 1, "scale": 1, "sums": 1},
    "mlstm_sig": {"gates": 2, "a": "2*(log + sig)", "da": "2*(sig + 1)", "u": 1, "scale": 1, "sums": 1},
    "simple_gla": {"gates": 1, "a": "0", "da": "0", "u": 0, "scale": 1, "sums": 1},
    "gated_retention": {"gates": 1, "a": "log + sig + 1", "da": "sig + 2", "u": 0, "scale": 1, "sums": 1},
    "retention": {"gates": 0, "a": "0", "da": "0", "u": 0, "scale": 1, "sums": 0},
    "lightning": {"gates": 0, "a": "0", "da": "0", "u": 0, "scale": 0, "sums": 0},
    "mamba2_ssd": {"gates": 1, "a": "log + 1", "da": "5", "u": 1, "scale": 0, "sums": 1},
}
"""Gate tensors, the work of a token's gates and of their gradients, and 1 for: a log input, a scale, summed decays."""


@pytest.mark.parametrize(
    ("formula", "op"),
    # Its forward passes are the paper's, among HEADS.
    [(f, op) for f in WRITTEN["scalar_decay"] for op in GATES if f.endswith("backward") or op != "mlstm_exp"],
)
def test_totals_of_a_scalar_decay(formula: str, op: str) -> None:
    known = GATES[op] | {"tensors": min(GATES[op]["gates"], 1), "stable": int(op == "mlstm_exp")}
    known |= {name: sympy.sympify(known[name], locals=SYMBOLS) for name in ("a", "da")}
    check(getattr(scalar_decay, formula)(head(op)), *WRITTEN["scalar_decay"][formula], **known)


@pytest.mark.parametrize("op", delta_rule.OPERATIONS)
@pytest.mark.parametrize("formula", WRITTEN["delta_rule"])
def test_totals_of_the_delta_rule(op: str, formula: str) -> None:
    decays = {"delta_net": (0, 0, "0"), "gated_delta_net": (1, 1, "c*L**2"), "kda": (1, "K", "2*L*K")}[op]
    known = {name: sympy.sympify(x, locals=SYMBOLS) for name, x in zip(("d", "G", "W"), decays, strict=True)}
    check(getattr(delta_rule, formula)(head(op)), *WRITTEN["delta_rule"][formula], **known)


LAYERS = {
    "rglru": rglru.forward(layer("fused")),
    "rglru, backward": rglru.backward(layer("fused")),
    "rglru in chunks": chunked(rglru.forward(layer("fused")), gated=True, backward=False),
    "rglru in chunks, backward": chunked(rglru.backward(layer("fused")), gated=True, backward=True),
    "rglru with its GEMMs": rglru.forward(layer("layer")),
    "rglru with its GEMMs, backward": rglru.backward(layer("layer")),
    "rglru line by line": rglru.forward(layer("lines")),
    "rglru line by line, backward": rglru.backward(layer("lines")),
    "rglru layer line by line": rglru.forward(layer("unfused")),
    "rglru layer line by line, backward": rglru.backward(layer("unfused")),
    "rglru as printed": rglru.forward(layer("fused", published=True)),
    "rglru layer as printed": rglru.forward(layer("unfused", published=True)),
    "scan": rglru.scan_forward(LAYER),
    "scan, backward": rglru.scan_backward(LAYER),
    "scan in chunks": chunked(rglru.scan_forward(LAYER), gated=False, backward=False),
    "scan in chunks, backward": chunked(rglru.scan_backward(LAYER), gated=False, backward=True),
    "wkv": wkv.recurrent_forward(LAYER),
    "wkv, backward": wkv.recurrent_backward(LAYER),
    "wkv as a scan": wkv.scan_forward(TOKENS),
    "wkv as a scan, backward": wkv.scan_backward(TOKENS),
}


@pytest.mark.parametrize("name", LAYERS)
def test_totals_without_heads(name: str) -> None:
    check(LAYERS[name], *WRITTEN["layers"][name])


@pytest.mark.parametrize("formulation", WRITTEN["gated_mlp"])
def test_totals_of_a_gated_mlp(formulation: str) -> None:
    forward, vector, again, backward = WRITTEN["gated_mlp"][formulation]
    check(
        gated_mlp.forward(layer(formulation)), "4*M*D*C", "0" if formulation == "gemms" else "N*(2 + sig)", "0", forward
    )
    check(gated_mlp.backward(layer(formulation)), "8*M*D*C", vector, again, backward)


COMPULSORY = {
    "mlstm_sig": (head("mlstm_sig"), "L*((2*K + 2*V)*w + 2*g)", "L*((4*K + 3*V)*w + 4*g)"),
    "retention": (head("retention"), "L*(2*K + 2*V)*w", "L*(4*K + 3*V)*w"),
    "attention": (head("attention"), "L*(2*K + 2*V)*w", "L*(4*K + 4*V)*w"),
    "delta_net": (head("delta_net"), "L*((2*K + 2*V)*w + g)", "L*((4*K + 3*V)*w + 2*g)"),
    "kda": (head("kda"), "L*((2*K + 2*V)*w + (K + 1)*g)", "L*((4*K + 3*V)*w + 2*(K + 1)*g)"),
    "gla": (head("gla"), "L*((2*K + 2*V)*w + K*g)", "L*((4*K + 3*V)*w + 2*K*g)"),
    "rglru": (layer("lines", op="rglru"), "(4*N + C)*w", "(7*N + 2*C)*w"),
    "rglru layer": (layer("unfused", op="rglru"), "(2*N + 2*C*C + C)*w", "(3*N + 4*C*C + 2*C)*w"),
    "linear scan": (layer("chunked", op="linear_scan"), "3*N*w", "5*N*w"),
    "wkv": (layer("scan", op="wkv4"), "(3*N + 2*C)*w", "(5*N + 4*C)*w"),
    "gated mlp": (layer("eager", op="gated_mlp"), "(M*D + 2*D*C + N)*w", "(2*M*D + 4*D*C + N)*w"),
    "projections": (layer("gemms", op="projections"), "(M*D + 2*D*C + 2*N)*w", "(2*M*D + 4*D*C + 2*N)*w"),
}
"""Bytes of every input, output and gradient once."""


@pytest.mark.parametrize("name", COMPULSORY)
def test_compulsory_bytes(name: str) -> None:
    problem, *expected = COMPULSORY[name]
    for backward, written in enumerate(expected):
        value = compulsory(problem, backward=bool(backward))
        assert sympy.expand(value - sympy.sympify(written, locals=SYMBOLS)) == 0


@pytest.mark.parametrize(
    ("tally", "expected"),
    [
        (scalar_decay.chunk_backward(head("mlstm_exp")), "L*(K + V)*w + 2*L*g + (K*V + K + 1)*s"),
        (baselines.gla_chunk_backward(HEAD), "L*(K + V)*w + L*K*g + K*V*s"),
        (wkv.scan_backward(TOKENS), "34*C*w + 48*C*s"),
        (gated_mlp.backward(layer("fused")), "(M*D + 2*D*C)*w"),
    ],
)
def test_bytes_of_recomputation(tally: Tally, expected: str) -> None:
    got = sum(tally.recomputed_traffic.values())
    assert sympy.expand(got - sympy.sympify(expected, locals=SYMBOLS)) == 0


def test_combinations_of_a_scan() -> None:
    assert [wkv.combinations(n) for n in (1, 2, 3, 4, 8, 16, 1024)] == [0, 1, 2, 4, 11, 26, 2046 - 10]
