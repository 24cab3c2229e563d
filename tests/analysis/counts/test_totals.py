"""Totals as the TFLA paper's tables and the RG-LRU's page print them, held against the formulas symbol by symbol.

A row says what one chunk, sequence or step of a head takes, or a whole problem without heads: FLOPs on matrix units,
all other FLOPs, bytes. L is the length, K and V are the head dims, c is the share of the causal square, exp, log, ...
are the costs of the functions, w, g and s the bytes of an input, a gate and a state. Without heads N = B T C are the
elements of an input.
"""

from __future__ import annotations

from typing import Any

import pytest
import sympy

from lrbench.analysis.counts import Factors, Head, Layer, Tally, Widths, rglru, wkv
from lrbench.analysis.counts.scalar_decay import tally

FUNCTIONS = ("exp", "log", "sig", "max", "mask", "abs")
SYMBOLS: dict[str, Any] = {name: sympy.Symbol(name, positive=True) for name in (*"LKVcwgsBTC", *FUNCTIONS)}
SYMBOLS["N"] = SYMBOLS["B"] * SYMBOLS["T"] * SYMBOLS["C"]
F = Factors(**{name: SYMBOLS[name] for name in FUNCTIONS})
WIDTHS = Widths(qkv=SYMBOLS["w"], gate=SYMBOLS["g"], state=SYMBOLS["s"])
HEAD = Head(length=SYMBOLS["L"], d_qk=SYMBOLS["K"], d_v=SYMBOLS["V"], causal=SYMBOLS["c"], f=F, widths=WIDTHS)
LAYER = Layer(batch=SYMBOLS["B"], length=SYMBOLS["T"], channels=SYMBOLS["C"], f=F, widths=WIDTHS)
PRINTED = Head(length=HEAD.length, d_qk=HEAD.d_qk, d_v=HEAD.d_v, causal=HEAD.causal)


def check(found: Tally, matrix: str, vector: str, moved: str) -> None:
    """Compare a tally with its row."""
    got = (found.matrix_flops, found.flops - found.matrix_flops, found.bytes)
    for name, value, written in zip(("matrix", "vector", "bytes"), got, (matrix, vector, moved), strict=True):
        expected = sympy.sympify(written, locals=SYMBOLS)
        assert sympy.expand(sympy.sympify(value) - expected) == 0, f"{name}: {sympy.expand(value)}"


CHUNK = "4*L*K*V + 2*c*L**2*(K + V)"
RGLRU = "2*N*sig + N*(9 + 2*exp) + C*(1 + exp + log)"
ROWS = {
    # TFLA paper, tables 8 and 9, 10 and 11, 12 and 13.
    "mLSTMexp chunk": (
        tally("mlstm_exp", "chunk_forward", HEAD), CHUNK,
        "2*L + L*(L + 1)/2 + L*(1 + exp + log + sig) + 3 + max + exp + 2*K*V + L*K + 2*K + 2*L*K + L*(L + 1)/2"
        " + L*(log + sig) + c*(L**2*(3 + exp + max) + L*(1 + max)) + 3*c*L**2 + 3*L*K + 2*L*V"
        " + L*(1 + max + abs + exp)",
        "L*(3*K + 3*V)*w + 4*L*g + 2*(K*V + K + 1)*s + 2*L*s",
    ),
    "mLSTMsig chunk": (
        tally("mlstm_sig", "chunk_forward", HEAD), CHUNK,
        "2*L + L*(L + 1)/2 + L*exp + exp + 2*L*(log + sig) + 2*K*V + L*K + L*(L + 1)/2 + 2*L*(log + sig)"
        " + c*L**2*(2 + exp) + 3*c*L**2 + L*K + L*V",
        "L*(3*K + 3*V)*w + 4*L*g + 2*K*V*s",
    ),
    "mLSTMexp parallel": (
        tally("mlstm_exp", "parallel_forward", HEAD), "2*c*L**2*(K + V)",
        "L*(L + 1)/2 + L*(log + sig) + L**2*(3 + exp + max + mask) + 2*c*L**2 + c*(L**2*(3 + abs) + L*(exp + max))",
        "L*(2*K + 2*V)*w + 2*L*g + 2*L*s",
    ),
    "mLSTMsig parallel": (
        tally("mlstm_sig", "parallel_forward", HEAD), "2*c*L**2*(K + V)",
        "L*(L + 1)/2 + 2*L*(log + sig) + L**2*(2 + exp + mask) + 2*c*L**2", "L*(2*K + 2*V)*w + 2*L*g",
    ),
    "mLSTMexp step": (
        tally("mlstm_exp", "step", HEAD), "0",
        "4 + 2*exp + log + sig + max + 4*K*V + 6*K + V + 1 + abs + max + 2*K*V + K",
        "(2*K + 2*V)*w + 2*g + 2*(K*V + K + 1)*s",
    ),
    "mLSTMsig step": (
        tally("mlstm_sig", "step", HEAD), "0", "2*sig + 4*K*V + 2*K*V + K", "(2*K + 2*V)*w + 2*g + 2*K*V*s",
    ),
    # Equation 118 prints mLSTMexp's gates in mLSTMsig's total, and table 10 its gate matrix.
    "mLSTMsig chunk as printed": (
        tally("mlstm_sig", "chunk_forward", PRINTED, published=True),
        CHUNK, "6*c*L**2 + L**2 + L*(2*K + V + 11) + 2*K*V + 5", "6*L*(K + V) + 8*L + 8*K*V",
    ),
    "mLSTMsig parallel as printed": (
        tally("mlstm_sig", "parallel_forward", HEAD, published=True), "2*c*L**2*(K + V)",
        "L*(L + 1)/2 + 2*L*(log + sig) + L**2*(3 + exp + max + mask) + 2*c*L**2", "L*(2*K + 2*V)*w + 2*L*g",
    ),
    "rglru as printed": (
        rglru.tally(LAYER, "fused", "forward", published=True), "4*N*C", RGLRU, "(3*N + 2*C*C + C)*w",
    ),
    # One store more than its listing has lines.
    "rglru layer as printed": (
        rglru.tally(LAYER, "unfused", "forward", published=True), "4*N*C", RGLRU, "(24*N + 2*C*C + C)*w",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_totals_are_those_of_the_papers(name: str) -> None:
    check(*ROWS[name])


def test_combinations_of_a_scan() -> None:
    assert [wkv.combinations(n) for n in (1, 2, 3, 4, 8, 16, 1024)] == [0, 1, 2, 4, 11, 26, 2046 - 10]
