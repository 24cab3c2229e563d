"""Derived counts of RWKV-4's WKV, for a whole problem of ``batch`` x ``length`` x C channels. All of it is vector work.

    y_t = (sum_{s<t} e^{k_s - (t-1-s) w} v_s + e^{u + k_t} v_t) / (the same with v = 1)

Source: "Faster LLMs: Improving RWKV with Parallel Cumulative Sums" and Peng et al., RWKV (2023), equation 16. Nobody
prints a total. Sums are kept divided by their largest exponential, as (num, den, max) step by step and as (value, log
weight) in the scan, so that nothing overflows.

- recurrent: one pass over time, the state on the chip.
- scan: the source's associative scan over (value, log weight), work-efficient, in one pass: tiles of time are scanned
  on the chip and carry on. The source adds t w to k_t and loses float32's digits at long T; counted is the form with
  relative exponents, where combining shifts the earlier element by the later one's length times w.
"""

from __future__ import annotations

from .model import Formula, Passed, Problem, decoding, value_of

STATE_TENSORS = 3
"""num, den and max."""


def combinations(length: int) -> int:
    """Return how often a work-efficient inclusive scan of ``length`` elements combines two of them.

    Neighbours are combined, the pairs are scanned, and the elements between follow from those before them:
    W(n) = floor(n/2) + W(floor(n/2)) + ceil(n/2) - 1, which is 2n - 2 - log2 n for powers of two.
    """
    total = 0
    while length > 1:
        total += length // 2 + (length + 1) // 2 - 1
        length //= 2
    return total


_STEPS = {
    # The larger of max and u + k, two exponentials relative to it, num and den with the new token, their quotient; the
    # same with max - w and k, without the quotient.
    "outputs": ("", "N*(9 + 2*exp + max)"),
    "state": ("", "N*(8 + 2*exp + max)"),
}
# Adding two elements of equal reference: log of the sum of exponentials, two weights, the weighted sum.
_ADD = "8 + max + abs + 3*exp + log"
_SCAN = {
    "scan": ("", f"B*C*pairs*(2 + {_ADD})"),
    # The T - 1 tokens after the first combine what came before, which needs no shift, with (v, u + k).
    "outputs": ("", f"B*C*(T - 1)*(1 + {_ADD})"),
}
_FORWARD_BYTES = {"load": "(2*N + 2*C)*w", "store": "N*w"}

FORMULAS = {
    ("recurrent", "forward"): Formula(work=_STEPS, bytes=_FORWARD_BYTES),
    # Two sweeps; P = dy / den and R = -P y are the gradients of an output's num and den. Forward in time: the
    # derivatives of num and den by w: 4; P: 1; dw: 5; du: 4. Backward in time, the gradients (S, D) of num and den
    # relative to a running largest exponential: two exponentials, their recurrences 6, R 1; dv: two weights, 3; dk: 7.
    # k, v, dy and the parameters loaded, P and the log of den's weight stored; k, v, y and those two loaded.
    ("recurrent", "backward"): Formula(
        work={
            "parameter gradients": ("", "14*N"),
            "state gradient": ("", "N*(10 + 2*exp + max)"),
            "input gradients": ("", "N*(13 + 2*exp)"),
        },
        bytes={
            "load": "(6*N + 2*C)*w",
            "store": "(2*N + 2*C)*w",
            "statistics load": "2*N*s",
            "statistics store": "2*N*s",
        },
        recomputed=_STEPS,
    ),
    ("scan", "forward"): Formula(work=_SCAN, bytes=_FORWARD_BYTES),
    # The same scan backward in time, over (dy, -dy y, -log den), elements whose values have signs: shift 2, the larger
    # log weight, two weights, two weighted sums 6. A token: -dy y 1; dv 6 + 2 F_exp; dk 7; du 1; dw 6 + F_exp. The
    # forward scan is made again, and its (value, log weight) and log den stored.
    ("scan", "backward"): Formula(
        work={
            "scan": ("", "B*C*pairs*(10 + max + 2*exp)"),
            "input gradients": ("", "N*(14 + 2*exp)"),
            "parameter gradients": ("", "N*(7 + exp)"),
        },
        bytes={"load": "(4*N + 2*C)*w", "store": "(2*N + 2*C)*w", "states load": "3*N*s"},
        recomputed=_SCAN,
        reread={"load": "(2*N + 2*C)*w", "states store": "3*N*s"},
    ),
}

COMPULSORY = {"forward": "(3*N + 2*C)*w", "backward": "(5*N + 4*C)*w"}
"""k, v, y and the parameters w and u; backward: k, v, dy, dk, dv, w, u, dw, du."""


def passed(problem: Problem, direction: str) -> Passed:
    """Return one pass of a problem."""
    layer = problem.layer(direction)
    names = layer.names | {"pairs": combinations(layer.length)}
    if direction == "step":
        one = decoding(FORMULAS["recurrent", "forward"].of(names), STATE_TENSORS * names["N"] * names["s"])
        return one, one.bytes
    return FORMULAS[problem.formulation, direction].of(names), value_of(COMPULSORY[direction], names)
