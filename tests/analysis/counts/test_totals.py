"""Totals of every formula, written out once more: the papers' tables, and the sums of the derived formulas' docstrings.

A row says what one chunk, sequence or step of a head takes, or a whole problem without heads: FLOPs on matrix units,
all other FLOPs, FLOPs that a backward pass recomputes, bytes. L is the length, K and V are the head dims, c is the
share of the causal square, exp, log, ... are the costs of the functions, w, g and s the bytes of an input, a gate and a
state. Without heads N = B T C are the elements of an input; a gated MLP has M = B T tokens, D inputs and C outputs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import sympy

from lrbench.analysis.counts import (
    Factors,
    Problem,
    Tally,
    Widths,
    baselines,
    gated_mlp,
    lightning,
    mlstm,
    rglru,
    scalar_decay,
    wkv,
)

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


def head(op: str, **changes: Any) -> Problem:
    return dataclasses.replace(HEAD, op=op, **changes)


def layer(formulation: str, *, published: bool = False) -> Problem:
    return dataclasses.replace(LAYER, formulation=formulation, published=published)


def check(tally: Tally, matrix: str, vector: str, recomputed: str, moved: str, **known: Any) -> None:
    """Compare a tally with its row; ``known`` are further names in it."""
    again = sum(work.flops for work in tally.recomputed_work.values())
    got = (tally.matrix_flops, tally.flops - tally.matrix_flops, again, tally.bytes)
    for name, value, written in zip(
        ("matrix", "vector", "recomputed", "bytes"), got, (matrix, vector, recomputed, moved), strict=True
    ):
        expected = sympy.sympify(written, locals={**SYMBOLS, **known})
        assert sympy.expand(sympy.sympify(value) - expected) == 0, f"{name}: {sympy.expand(value)}"


CHUNK = "4*L*K*V + 2*c*L**2*(K + V)"
HEADS = {
    # TFLA paper, tables 8 and 9, 10 and 11, 12 and 13.
    "mLSTMexp chunk": (
        mlstm.chunk(head("mlstm_exp")), CHUNK,
        "2*L + L*(L + 1)/2 + L*(1 + exp + log + sig) + 3 + max + exp + 2*K*V + L*K + 2*K + 2*L*K + L*(L + 1)/2"
        " + L*(log + sig) + c*(L**2*(3 + exp + max) + L*(1 + max)) + 3*c*L**2 + 3*L*K + 2*L*V"
        " + L*(1 + max + abs + exp)",
        "0", "L*(3*K + 3*V)*w + 4*L*g + 2*(K*V + K + 1)*s + 2*L*s",
    ),
    "mLSTMsig chunk": (
        mlstm.chunk(head("mlstm_sig")), CHUNK,
        "2*L + L*(L + 1)/2 + L*exp + exp + 2*L*(log + sig) + 2*K*V + L*K + L*(L + 1)/2 + 2*L*(log + sig)"
        " + c*L**2*(2 + exp) + 3*c*L**2 + L*K + L*V",
        "0", "L*(3*K + 3*V)*w + 4*L*g + 2*K*V*s",
    ),
    "mLSTMexp parallel": (
        mlstm.parallel(head("mlstm_exp")), "2*c*L**2*(K + V)",
        "L*(L + 1)/2 + L*(log + sig) + L**2*(3 + exp + max + mask) + 2*c*L**2 + c*(L**2*(3 + abs) + L*(exp + max))",
        "0", "L*(2*K + 2*V)*w + 2*L*g + 2*L*s",
    ),
    "mLSTMsig parallel": (
        mlstm.parallel(head("mlstm_sig")), "2*c*L**2*(K + V)",
        "L*(L + 1)/2 + 2*L*(log + sig) + L**2*(2 + exp + mask) + 2*c*L**2", "0", "L*(2*K + 2*V)*w + 2*L*g",
    ),
    "mLSTMexp step": (
        mlstm.step(head("mlstm_exp")), "0",
        "4 + 2*exp + log + sig + max + 4*K*V + 6*K + V + 1 + abs + max + 2*K*V + K",
        "0", "(2*K + 2*V)*w + 2*g + 2*(K*V + K + 1)*s",
    ),
    "mLSTMsig step": (
        mlstm.step(head("mlstm_sig")), "0", "2*sig + 4*K*V + 2*K*V + K", "0", "(2*K + 2*V)*w + 2*g + 2*K*V*s",
    ),
    # Equation 118 prints mLSTMexp's gates in mLSTMsig's total, and table 10 its gate matrix.
    "mLSTMsig chunk as printed": (
        mlstm.chunk(head("mlstm_sig", published=True, f=Factors(), widths=Widths())),
        CHUNK, "6*c*L**2 + L**2 + L*(2*K + V + 11) + 2*K*V + 5", "0", "6*L*(K + V) + 8*L + 8*K*V",
    ),
    "mLSTMsig parallel as printed": (
        mlstm.parallel(head("mlstm_sig", published=True)), "2*c*L**2*(K + V)",
        "L*(L + 1)/2 + 2*L*(log + sig) + L**2*(3 + exp + max + mask) + 2*c*L**2", "0", "L*(2*K + 2*V)*w + 2*L*g",
    ),
    "lightning2's decays": (
        lightning.decays(HEAD), "0", "L**2*(2 + exp + mask) + L*(3 + 2*exp) + 1 + exp", "0", "0",
    ),
    "lightning2 block": (
        lightning.block_forward(HEAD), CHUNK, "c*L**2 + L*K + L*V + 2*K*V + L*K", "0", "L*(2*K + 2*V)*w",
    ),
    "lightning2 block, backward": (
        lightning.block_backward(HEAD), f"2*({CHUNK})", "c*L**2 + 3*L*(K + V) + 2*K*V + L*K",
        "2*L*K*V + 2*K*V + L*K + 2*c*L**2*(K + V) + 2*c*L**2", "L*(4*K + 3*V)*w + L*(K + 2*V)*w",
    ),
    "lightning1": (
        lightning.quadratic_forward(HEAD), "2*c*L**2*(K + V)", "c*L**2*(3 + exp + mask)", "0", "L*(2*K + 2*V)*w",
    ),
    "lightning1, backward": (
        lightning.quadratic_backward(HEAD), "4*c*L**2*(K + V)", "c*L**2", "c*L**2*(2*K + 3 + exp + mask)",
        "L*(4*K + 3*V)*w",
    ),
    "attention": (
        baselines.attention_forward(HEAD), "2*c*L**2*(K + V)", "c*L**2*(3 + max + exp) + L*(1 + log) + L*V", "0",
        "L*(2*K + 2*V)*w + 4*L",
    ),
    "attention, backward": (
        baselines.attention_backward(HEAD), "4*c*L**2*(K + V)", "2*L*V + 2*c*L**2 + 2*L*K",
        "c*L**2*(2*K + 2 + exp)", "L*(4*K + 4*V)*w + 12*L",
    ),
    "attention step": (
        baselines.attention_step(HEAD), "0", "2*L*(K + V) + L*(3 + max + exp) + V", "0", "(L*(K + V) + 2*K + 2*V)*w",
    ),
    "gla step": (
        baselines.gla_step(HEAD), "0", "K*exp + 5*K*V + K", "0", "(2*K + 2*V)*w + K*g + 2*K*V*s",
    ),
    "gla chunk": (
        baselines.gla_chunk_forward(HEAD), CHUNK,
        "L*K*(2 + 3*exp) + K*exp + 4*L*K + 2*K*V + c*L**2*mask + L*V", "0",
        "L*(3*K + 3*V)*w + 2*L*K*g + 2*K*V*s",
    ),
    "gla chunk, backward": (
        baselines.gla_chunk_backward(HEAD), f"2*({CHUNK})",
        "2*K*V + L*V + c*L**2*mask + 6*L*K + 7*L*K + 2*K*V + 2*K",
        "L*K*(6 + 3*exp) + 2*L*K*V + 2*K*V + c*L**2*(2*K + mask)",
        "L*(5*K + 4*V)*w + 3*L*K*g + 3*K*V*s",
    ),
    "selective scan": (
        baselines.selective_scan(HEAD, "forward"), "0", "L*K*V*(6 + exp) + L*V", "0", "L*(3*V + 2*K)*w + 4*K*V",
    ),
    "selective scan, backward": (
        baselines.selective_scan(HEAD, "backward"), "0", "15*L*K*V + 3*L*V", "L*K*V*(4 + exp) + L*V",
        "L*(5*V + 4*K)*w + 8*K*V",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_totals_of_a_head(name: str) -> None:
    check(*HEADS[name])


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

SCALAR_DECAY = {
    "chunk_forward": (
        CHUNK,
        "L*a + L*(1 + sums*(L - 1)/2) + L*(1 + u) + (2*L + 1)*exp + 2*K*V + L*K + c*L**2*(2 + u + exp + scale)"
        " + L*K*(1 + scale) + L*V",
        "0",
        "L*(3*K + 3*V)*w + 2*gates*L*g + 2*K*V*s",
    ),
    "chunk_backward": (
        f"2*({CHUNK})",
        "2*K*V + L*V + c*L**2 + 2*L*K*(2 + scale) + tensors*(6*L*K + 2*K*V + 2 + L*(L + 1) + 3*L + L*da) + stable*L*V",
        "2*L*K*V + 2*K*V + L*K + c*L**2*(2*K + 1 + scale) + c*L**2*(1 + u + exp + stable*(1 + max))",
        "L*(5*K + 4*V)*w + 3*gates*L*g + (3*K*V + stable*(4*L + K + 1))*s",
    ),
    "parallel_forward": (
        "2*c*L**2*(K + V)",
        "L*a + L*(1 + sums*(L + 1)/2 - sums) + L**2*(1 + u + exp + mask) + c*L**2*(1 + scale)",
        "0",
        "L*(2*K + 2*V)*w + gates*L*g",
    ),
    "parallel_backward": (
        "4*c*L**2*(K + V)",
        "c*L**2 + 2*L*K*scale + tensors*(4*L*K + L*(L + 1)/2 + L + L*da) + stable*L*V",
        "c*L**2*(2*K + 1 + scale) + L**2*(1 + u + exp + mask + stable*(1 + max))",
        "L*(4*K + 3*V)*w + 2*gates*L*g + stable*2*L*s",
    ),
    "step": (
        "0", "a + exp*(1 + u) + 3*K*V + K*u + 2*K*V + K*scale", "0", "(2*K + 2*V)*w + gates*g + 2*K*V*s",
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", scalar_decay.GATE_MODELS)
@pytest.mark.parametrize("formula", SCALAR_DECAY)
def test_totals_of_a_scalar_decay(op: str, formula: str) -> None:
    known = GATES[op] | {"tensors": min(GATES[op]["gates"], 1), "stable": int(op == "mlstm_exp")}
    known |= {name: sympy.sympify(known[name], locals=SYMBOLS) for name in ("a", "da")}
    check(getattr(scalar_decay, formula)(head(op)), *SCALAR_DECAY[formula], **known)


SOFTPLUS = "C*(1 + exp + log)"
RGLRU = f"2*N*sig + N*(9 + 2*exp) + {SOFTPLUS}"
STATES = "-2*B*C*s*floor(-T/8)"
SUMS = "8 + max + abs + 3*exp + log"

LAYERS = {
    "rglru": (rglru.forward(layer("fused")), "0", RGLRU, "0", "(4*N + C)*w"),
    "rglru, backward": (
        rglru.backward(layer("fused")), "0", "21*N + C*(1 + sig)", RGLRU, f"(7*N + 2*C)*w + {STATES}",
    ),
    "rglru in chunks": (
        rglru.chunked(rglru.forward(layer("fused")), LAYER, SYMBOLS["n"], gated=True, backward=False),
        "0", RGLRU, f"5*N + 2*n*B*C + 2*N*sig + N*(7 + 2*exp) + {SOFTPLUS} - 2*N", "(7*N + 2*C)*w + 6*n*B*C*s",
    ),
    "rglru in chunks, backward": (
        rglru.chunked(rglru.backward(layer("fused")), LAYER, SYMBOLS["n"], gated=True, backward=True),
        "0", "21*N + C*(1 + sig)", f"{RGLRU} + 3*N + 2*n*B*C + N*sig + N*(2 + exp) + {SOFTPLUS}",
        f"(9*N + 3*C)*w + 6*n*B*C*s + {STATES}",
    ),
    "rglru with its GEMMs": (rglru.forward(layer("layer")), "4*N*C", RGLRU, "0", "(8*N + 2*C*C + C)*w"),
    "rglru with its GEMMs, backward": (
        rglru.backward(layer("layer")), "8*N*C", "21*N + C*(1 + sig)", RGLRU,
        f"(17*N + 4*C*C + 2*C)*w + {STATES}",
    ),
    "rglru line by line": (rglru.forward(layer("lines")), "0", RGLRU, "0", "(19*N + C)*w"),
    "rglru line by line, backward": (
        rglru.backward(layer("lines")), "0", "23*N + C*(1 + sig)", f"{SOFTPLUS} + 2*N", "(31*N + 2*C)*w",
    ),
    "rglru layer line by line": (rglru.forward(layer("unfused")), "4*N*C", RGLRU, "0", "(23*N + 2*C*C + C)*w"),
    "rglru layer line by line, backward": (
        rglru.backward(layer("unfused")), "8*N*C", "23*N + C*(1 + sig)", f"{SOFTPLUS} + 2*N",
        "(41*N + 4*C*C + 2*C)*w",
    ),
    # The page: unfused one store more than its listing has lines; fused without the GEMMs' activations.
    "rglru as printed": (rglru.forward(layer("fused", published=True)), "4*N*C", RGLRU, "0", "(3*N + 2*C*C + C)*w"),
    "rglru layer as printed": (
        rglru.forward(layer("unfused", published=True)), "4*N*C", RGLRU, "0", "(24*N + 2*C*C + C)*w",
    ),
    "scan": (rglru.scan_forward(LAYER), "0", "2*N", "0", "3*N*w"),
    "scan, backward": (rglru.scan_backward(LAYER), "0", "3*N", "0", "5*N*w"),
    "scan in chunks": (
        rglru.chunked(rglru.scan_forward(LAYER), LAYER, SYMBOLS["n"], gated=False, backward=False),
        "0", "2*N", "3*N + 2*n*B*C", "5*N*w + 6*n*B*C*s",
    ),
    "scan in chunks, backward": (
        rglru.chunked(rglru.scan_backward(LAYER), LAYER, SYMBOLS["n"], gated=False, backward=True),
        "0", "3*N", "3*N + 2*n*B*C", "7*N*w + 6*n*B*C*s",
    ),
    "wkv": (wkv.recurrent_forward(LAYER), "0", "N*(17 + 4*exp + 2*max)", "0", "(3*N + 2*C)*w"),
    "wkv, backward": (
        wkv.recurrent_backward(LAYER), "0", "N*(37 + 4*exp + max)", "N*(17 + 4*exp + 2*max)",
        "(8*N + 4*C)*w + 4*N*s",
    ),
    # 16 tokens: a scan combines 26 pairs, and 15 outputs take what came before them.
    "wkv as a scan": (wkv.scan_forward(TOKENS), "0", f"C*(26*(2 + {SUMS}) + 15*(1 + {SUMS}))", "0", "50*C*w"),
    "wkv as a scan, backward": (
        wkv.scan_backward(TOKENS), "0", "C*(26*(10 + max + 2*exp) + 16*(14 + 2*exp) + 16*(7 + exp))",
        f"C*(26*(2 + {SUMS}) + 15*(1 + {SUMS}))", "100*C*w + 48*C*s",
    ),
}  # fmt: skip

X, W, Y = "M*D*w", "D*C*w", "M*C*w"
GATED_MLP = {
    "fused": (f"{X} + 2*{W} + {Y}", "7*N", "4*M*D*C + N*(sig + 1)", f"2*{X} + 4*{W} + 7*{Y}"),
    "fused_save": (f"{X} + 2*{W} + 3*{Y}", "7*N", "N*(sig + 1)", f"2*{X} + 4*{W} + 9*{Y}"),
    "cublas_activation": (f"{X} + 2*{W} + 5*{Y}", "7*N", "N*(sig + 1)", f"2*{X} + 4*{W} + 9*{Y}"),
    "gemms_activation": (f"2*{X} + 2*{W} + 5*{Y}", "7*N + M*D", "N*(sig + 1)", f"7*{X} + 4*{W} + 9*{Y}"),
    "eager": (f"2*{X} + 2*{W} + 7*{Y}", "7*N + M*D", "N*sig", f"7*{X} + 4*{W} + 13*{Y}"),
    "gemms": (f"2*{X} + 2*{W} + 2*{Y}", "M*D", "0", f"7*{X} + 4*{W} + 4*{Y}"),
}
"""Formulation -> bytes forward; FLOPs outside the products, recomputation and bytes backward."""


@pytest.mark.parametrize("name", LAYERS)
def test_totals_without_heads(name: str) -> None:
    check(*LAYERS[name])


@pytest.mark.parametrize("formulation", GATED_MLP)
def test_totals_of_a_gated_mlp(formulation: str) -> None:
    forward, vector, again, backward = GATED_MLP[formulation]
    check(
        gated_mlp.forward(layer(formulation)), "4*M*D*C", "0" if formulation == "gemms" else "N*(2 + sig)", "0", forward
    )
    check(gated_mlp.backward(layer(formulation)), "8*M*D*C", vector, again, backward)


COMPULSORY = {
    "mlstm_sig": (scalar_decay.compulsory(head("mlstm_sig"), backward=False), "L*((2*K + 2*V)*w + 2*g)"),
    "mlstm_sig, backward": (scalar_decay.compulsory(head("mlstm_sig"), backward=True), "L*((4*K + 3*V)*w + 4*g)"),
    "retention": (scalar_decay.compulsory(head("retention"), backward=False), "L*(2*K + 2*V)*w"),
    "attention": (baselines.compulsory(head("attention"), backward=False), "L*(2*K + 2*V)*w"),
    "attention, backward": (baselines.compulsory(head("attention"), backward=True), "L*(4*K + 4*V)*w"),
    "gla": (baselines.compulsory(head("gla"), backward=False), "L*((2*K + 2*V)*w + K*g)"),
    "gla, backward": (baselines.compulsory(head("gla"), backward=True), "L*((4*K + 3*V)*w + 2*K*g)"),
    "rglru": (rglru.compulsory(layer("lines"), backward=False), "(4*N + C)*w"),
    "rglru, backward": (rglru.compulsory(layer("fused"), backward=True), "(7*N + 2*C)*w"),
    "rglru layer": (rglru.compulsory(layer("layer"), backward=False), "(2*N + 2*C*C + C)*w"),
    "rglru layer, backward": (rglru.compulsory(layer("unfused"), backward=True), "(3*N + 4*C*C + 2*C)*w"),
    "wkv": (wkv.compulsory(LAYER, backward=False), "(3*N + 2*C)*w"),
    "wkv, backward": (wkv.compulsory(LAYER, backward=True), "(5*N + 4*C)*w"),
    "gated mlp": (gated_mlp.compulsory(layer("eager"), backward=False), "(M*D + 2*D*C + N)*w"),
    "gated mlp, backward": (gated_mlp.compulsory(layer("fused"), backward=True), "(2*M*D + 4*D*C + N)*w"),
    "projections": (gated_mlp.compulsory(layer("gemms"), backward=False), "(M*D + 2*D*C + 2*N)*w"),
}
"""Bytes of every input, output and gradient once."""


@pytest.mark.parametrize("name", COMPULSORY)
def test_compulsory_bytes(name: str) -> None:
    value, expected = COMPULSORY[name]
    assert sympy.expand(value - sympy.sympify(expected, locals=SYMBOLS)) == 0


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
