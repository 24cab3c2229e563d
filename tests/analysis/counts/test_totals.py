"""Totals that papers print: what one chunk, sequence or step of a head takes, and a layer of RG-LRU.

A row holds FLOPs on matrix units, all other FLOPs, bytes and, if there are any, recomputed FLOPs. L is the length, K
and V are the head dims, c is the share of the causal square, exp, log, ... are the costs of the functions, w, g and s
the bytes of an input, a gate and a state; N = B T C are the elements of a layer's input. What else is counted is held
against running code by test_counts_against_code.py and, where rows were measured, to the committed ones
(test_derive.py).
"""

from __future__ import annotations

import dataclasses

import pytest

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

COSTS = {"exp": 101, "log": 1009, "sig": 10007, "max": 100003, "mask": 1000003, "abs": 10000019}
NUMBERS = {**COSTS, "L": 35, "K": 17, "V": 29, "c": 0.75, "w": 2, "g": 5, "s": 11, "B": 3, "T": 64, "D": 13, "C": 7}
NUMBERS["N"] = 3 * 64 * 7
"""Numbers of which no product is another's, so that equal totals mean equal terms."""
F, WIDTHS = Factors(**COSTS), Widths(qkv=2, gate=5, state=11)
HEAD = Problem(
    op="", formulation="", seq_len=35, head_dim_qk=17, head_dim_v=29, channels=29, causal=0.75, f=F, widths=WIDTHS
)
OWN = Problem(op="", formulation="fused", batch=3, seq_len=64, channels=7, d_model=13, d_ff=7, f=F, widths=WIDTHS)
LAYER = dataclasses.replace(OWN, published=True)


def head(op: str, **changes: object) -> Problem:
    return dataclasses.replace(HEAD, op=op, **changes)  # type: ignore[arg-type]


def layer(formulation: str) -> Problem:
    return dataclasses.replace(LAYER, formulation=formulation)


CHUNK = "4*L*K*V + 2*c*L**2*(K + V)"
RGLRU = "2*N*sig + N*(9 + 2*exp) + C*(1 + exp + log)"
TOTALS = {
    # TFLA paper, tables 8 and 9, 10 and 11, 12 and 13.
    "mLSTMexp chunk": (
        mlstm.chunk(head("mlstm_exp")), CHUNK,
        "2*L + L*(L + 1)/2 + L*(1 + exp + log + sig) + 3 + max + exp + 2*K*V + L*K + 2*K + 2*L*K + L*(L + 1)/2"
        " + L*(log + sig) + c*(L**2*(3 + exp + max) + L*(1 + max)) + 3*c*L**2 + 3*L*K + 2*L*V"
        " + L*(1 + max + abs + exp)", "L*(3*K + 3*V)*w + 4*L*g + 2*(K*V + K + 1)*s + 2*L*s",
    ),
    "mLSTMsig chunk": (
        mlstm.chunk(head("mlstm_sig")), CHUNK,
        "2*L + L*(L + 1)/2 + L*exp + exp + 2*L*(log + sig) + 2*K*V + L*K + L*(L + 1)/2 + 2*L*(log + sig)"
        " + c*L**2*(2 + exp) + 3*c*L**2 + L*K + L*V", "L*(3*K + 3*V)*w + 4*L*g + 2*K*V*s",
    ),
    "mLSTMexp parallel": (
        mlstm.parallel(head("mlstm_exp")), "2*c*L**2*(K + V)",
        "L*(L + 1)/2 + L*(log + sig) + L**2*(3 + exp + max + mask) + 2*c*L**2 + c*(L**2*(3 + abs) + L*(exp + max))",
        "L*(2*K + 2*V)*w + 2*L*g + 2*L*s",
    ),
    "mLSTMsig parallel": (
        mlstm.parallel(head("mlstm_sig")), "2*c*L**2*(K + V)",
        "L*(L + 1)/2 + 2*L*(log + sig) + L**2*(2 + exp + mask) + 2*c*L**2", "L*(2*K + 2*V)*w + 2*L*g",
    ),
    "mLSTMexp step": (
        mlstm.step(head("mlstm_exp")), "0",
        "4 + 2*exp + log + sig + max + 4*K*V + 6*K + V + 1 + abs + max + 2*K*V + K",
        "(2*K + 2*V)*w + 2*g + 2*(K*V + K + 1)*s",
    ),
    "mLSTMsig step": (
        mlstm.step(head("mlstm_sig")), "0", "2*sig + 4*K*V + 2*K*V + K", "(2*K + 2*V)*w + 2*g + 2*K*V*s",
    ),
    # Equation 118 prints mLSTMexp's gates in mLSTMsig's total, and table 10 its gate matrix.
    "mLSTMsig chunk as printed": (
        mlstm.chunk(head("mlstm_sig", published=True, f=Factors(), widths=Widths())),
        CHUNK, "6*c*L**2 + L**2 + L*(2*K + V + 11) + 2*K*V + 5", "6*L*(K + V) + 8*L + 8*K*V",
    ),
    "mLSTMsig parallel as printed": (
        mlstm.parallel(head("mlstm_sig", published=True)), "2*c*L**2*(K + V)",
        "L*(L + 1)/2 + 2*L*(log + sig) + L**2*(3 + exp + max + mask) + 2*c*L**2", "L*(2*K + 2*V)*w + 2*L*g",
    ),
    # No paper's: with every term, and with none that an operation may lack.
    "mLSTMexp parallel, backward": (
        scalar_decay.parallel_backward(head("mlstm_exp")), "4*c*L**2*(K + V)",
        "c*L**2 + 6*L*K + L*(L + 1)/2 + L + L*(sig + 1) + L*V", "L*(4*K + 3*V)*w + 4*L*g + 2*L*s",
        "2*c*L**2*(K + 1) + L**2*(3 + exp + mask + max)",
    ),
    "lightning parallel, backward": (
        scalar_decay.parallel_backward(head("lightning")), "4*c*L**2*(K + V)", "c*L**2", "L*(4*K + 3*V)*w",
        "c*L**2*(2*K + 1) + L**2*(1 + exp + mask)",
    ),
    # The page: unfused one store more than its listing has lines; fused without the GEMMs' activations.
    "rglru as printed": (rglru.forward(layer("fused")), "4*N*C", RGLRU, "(3*N + 2*C*C + C)*w"),
    "rglru layer as printed": (rglru.forward(layer("unfused")), "4*N*C", RGLRU, "(24*N + 2*C*C + C)*w"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOTALS)
def test_totals_are_those_that_a_paper_prints(name: str) -> None:
    tally, *written = TOTALS[name]
    again = sum(work.flops for work in tally.recomputed_work.values())
    found = [tally.matrix_flops, tally.flops - tally.matrix_flops, tally.bytes, *([again] if again else [])]
    assert found == pytest.approx([eval(each, dict(NUMBERS)) for each in written], rel=1e-12)


SOFTPLUS = "C*(1 + exp + log)"
NO_ROW_HAS = {
    "mLSTMexp chunk": (
        scalar_decay.chunk_backward(head("mlstm_exp")),
        "2*L*K*V + 2*K*V + L*K + c*L**2*(2*K + 2) + c*L**2*(3 + exp + max)",
    ),
    "lightning2 block": (lightning.block_backward(HEAD), "2*L*K*V + 2*K*V + L*K + 2*c*L**2*(K + V + 1)"),
    "lightning1": (lightning.quadratic_backward(HEAD), "c*L**2*(2*K + 3 + exp + mask)"),
    "attention": (baselines.attention_backward(HEAD), "c*L**2*(2*K + 2 + exp)"),
    "gla": (
        baselines.gla_chunk_backward(HEAD), "L*K*(6 + 3*exp) + 2*L*K*V + 2*K*V + c*L**2*(2*K + mask)",
    ),
    "selective scan": (baselines.selective_scan(HEAD, "backward"), "L*K*V*(4 + exp) + L*V"),
    "rglru in chunks": (
        rglru.chunked(rglru.forward(OWN), OWN, 8, gated=True, backward=False),
        f"5*N + 16*B*C + 2*N*sig + N*(7 + 2*exp) + {SOFTPLUS} - 2*N",
    ),
    "rglru in chunks, backward": (
        rglru.chunked(rglru.backward(OWN), OWN, 8, gated=True, backward=True),
        f"{RGLRU} + 3*N + 16*B*C + N*sig + N*(2 + exp) + {SOFTPLUS}",
    ),
    "rglru line by line": (rglru.backward(dataclasses.replace(OWN, formulation="lines")), f"{SOFTPLUS} + 2*N"),
    "wkv": (wkv.recurrent_backward(OWN), "N*(17 + 4*exp + 2*max)"),
    "gated mlp": (gated_mlp.backward(dataclasses.replace(OWN, formulation="fused")), "4*B*T*D*C + N*(sig + 1)"),
    # Compulsory bytes, of backward passes.
    "bytes of mLSTMsig": (scalar_decay.compulsory(head("mlstm_sig"), backward=True), "L*((4*K + 3*V)*w + 4*g)"),
    "bytes of attention": (baselines.compulsory(head("attention"), backward=True), "L*(4*K + 4*V)*w"),
    "bytes of gla": (baselines.compulsory(head("gla"), backward=True), "L*((4*K + 3*V)*w + 2*K*g)"),
    "bytes of rglru": (rglru.compulsory(OWN, backward=True), "(7*N + 2*C)*w"),
    "bytes of a layer": (
        rglru.compulsory(dataclasses.replace(OWN, formulation="layer"), backward=True), "(3*N + 4*C*C + 2*C)*w",
    ),
    "bytes of wkv": (wkv.compulsory(OWN, backward=True), "(5*N + 4*C)*w"),
    "bytes of a gated mlp": (gated_mlp.compulsory(OWN, backward=True), "(2*B*T*D + 4*D*C + N)*w"),
}  # fmt: skip
"""Recomputed FLOPs, and bytes, of backward passes: no column of a row holds them."""


@pytest.mark.parametrize("name", NO_ROW_HAS)
def test_totals_that_no_row_has(name: str) -> None:
    value, written = NO_ROW_HAS[name]
    found = sum(work.flops for work in value.recomputed_work.values()) if isinstance(value, Tally) else value
    assert found == pytest.approx(eval(written, dict(NUMBERS)), rel=1e-12)


def test_combinations_of_a_scan() -> None:
    assert [wkv.combinations(n) for n in (1, 2, 3, 4, 8, 16, 1024)] == [0, 1, 2, 4, 11, 26, 2046 - 10]
