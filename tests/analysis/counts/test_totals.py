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

from lrbench.analysis.counts import Factors, Problem, Widths, mlstm, rglru, scalar_decay, wkv

COSTS = {"exp": 101, "log": 1009, "sig": 10007, "max": 100003, "mask": 1000003, "abs": 10000019}
NUMBERS = {**COSTS, "L": 35, "K": 17, "V": 29, "c": 0.75, "w": 2, "g": 5, "s": 11, "C": 7, "N": 3 * 64 * 7}
"""Numbers of which no product is another's, so that equal totals mean equal terms."""
F, WIDTHS = Factors(**COSTS), Widths(qkv=2, gate=5, state=11)
HEAD = Problem(op="", formulation="", seq_len=35, head_dim_qk=17, head_dim_v=29, causal=0.75, f=F, widths=WIDTHS)
LAYER = Problem(op="", formulation="", batch=3, seq_len=64, channels=7, published=True, f=F, widths=WIDTHS)


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


def test_combinations_of_a_scan() -> None:
    assert [wkv.combinations(n) for n in (1, 2, 3, 4, 8, 16, 1024)] == [0, 1, 2, 4, 11, 26, 2046 - 10]
