"""Derived counts of RWKV-4's WKV, of ``batch`` x ``seq_len`` x C channels. All of it is vector work.

    y_t = (sum_{s<t} e^{k_s - (t-1-s) w} v_s + e^{u + k_t} v_t) / (the same with v = 1)

Source: "Faster LLMs: Improving RWKV with Parallel Cumulative Sums" and Peng et al., RWKV (2023), equation 16. Nobody
prints a total. N = B T C is the number of elements of k. Sums are kept divided by their largest exponential, as
(num, den, max) step by step and as (value, log weight) in the scan, so that nothing overflows.

- recurrent: one pass over time, the state on the chip.
- scan: the source's associative scan over (value, log weight), work-efficient, in one pass: tiles of time are scanned
  on the chip and carry on. The source adds t w to k_t and loses float32's digits at long T; counted is the form with
  relative exponents, where combining shifts the earlier element by the later one's length times w.
"""

from __future__ import annotations

from .model import Factors, Problem, Scalar, Tally, Work, decoding


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


def recurrent_forward(problem: Problem) -> Tally:
    """Forward FLOPs and bytes, step by step.

    Output: the larger of max and u + k, two exponentials relative to it, num and den with the new token, their
    quotient. State: the same with max - w and k, without the quotient. k, v, w, u loaded, y stored.
    """
    cells, f = problem.cells, problem.f
    work = {
        "outputs": Work(vector=cells * (9 + 2 * f.exp + f.max)),
        "state": Work(vector=cells * (8 + 2 * f.exp + f.max)),
    }
    return Tally(work=work, traffic=problem.moved({"load": 2 * cells + 2 * problem.channels, "store": cells}))


def recurrent_backward(problem: Problem) -> Tally:
    """Backward FLOPs and bytes in two sweeps; P = dy / den and R = -P y are the gradients of an output's num and den.

    Forward in time: the derivatives of num and den by w: 4; P: 1; dw: 5; du: 4.
    Backward in time, the gradients (S, D) of num and den relative to a running largest exponential: two exponentials
    3 + 2 F_exp + F_max, their recurrences 6, R 1; dv: two weights 3 + 2 F_exp and 3; dk: 7.
    Recomputed and not counted: the forward pass.

    Bytes: k, v, dy and the parameters loaded, P and the log of den's weight stored; k, v, y and those two loaded, dk
    and dv stored, dw and du once a problem.
    """
    cells, channels, f = problem.cells, problem.channels, problem.f
    work = {
        "parameter gradients": Work(vector=14 * cells),
        "state gradient": Work(vector=cells * (10 + 2 * f.exp + f.max)),
        "input gradients": Work(vector=cells * (13 + 2 * f.exp)),
    }
    traffic = problem.moved({"load": 6 * cells + 2 * channels, "store": 2 * cells + 2 * channels})
    statistics = 2 * cells * problem.widths.state
    return Tally(
        work=work,
        traffic=traffic | {"statistics load": statistics, "statistics store": statistics},
        recomputed_work=recurrent_forward(problem).work,
    )


def scan_forward(problem: Problem) -> Tally:
    """Forward FLOPs and bytes of the scan.

    Combining: shift by the length times w: 2, and :func:`_log_add`. Outputs: the T - 1 tokens after the first combine
    what came before with (v, u + k), where an addition stands for the shift. k, v, w, u loaded, y stored.
    """
    rows, f = problem.batch * problem.channels, problem.f
    work = {
        "scan": Work(vector=rows * combinations(problem.seq_len) * (2 + _log_add(f))),
        "outputs": Work(vector=rows * (problem.seq_len - 1) * (1 + _log_add(f))),
    }
    traffic = {"load": 2 * problem.cells + 2 * problem.channels, "store": problem.cells}
    return Tally(work=work, traffic=problem.moved(traffic))


def scan_backward(problem: Problem) -> Tally:
    """Backward FLOPs and bytes of the scan: the same scan backward in time, over (dy, -dy y, -log den).

    Combining two such elements, whose values have signs: shift 2, the larger log weight F_max, two weights
    2 + 2 F_exp, two weighted sums 6. A token: -dy y 1; dv 6 + 2 F_exp; dk 7; du 1; dw 6 + F_exp.
    Recomputed and not counted: the forward scan, whose (value, log weight) and log den are stored, and its log den.
    Bytes: k, v, y, dy, those three and the parameters loaded; dk, dv, dw, du stored.
    """
    cells, rows, f = problem.cells, problem.batch * problem.channels, problem.f
    work = {
        "scan": Work(vector=rows * combinations(problem.seq_len) * (10 + f.max + 2 * f.exp)),
        "input gradients": Work(vector=cells * (14 + 2 * f.exp)),
        "parameter gradients": Work(vector=cells * (7 + f.exp)),
    }
    stored = 3 * cells * problem.widths.state
    traffic = problem.moved({"load": 4 * cells + 2 * problem.channels, "store": 2 * cells + 2 * problem.channels})
    return Tally(
        work=work,
        traffic=traffic | {"states load": stored},
        recomputed_work=scan_forward(problem).work,
        recomputed_traffic=problem.moved({"load": 2 * cells + 2 * problem.channels}) | {"states store": stored},
    )


def _log_add(f: Factors) -> Scalar:
    """Log of the sum of exponentials 3 + F_max + F_abs + F_exp + F_log, two weights 2 + 2 F_exp, weighted sum 3."""
    return 8 + f.max + f.abs + 3 * f.exp + f.log


def passed(problem: Problem, direction: str) -> Tally:
    """Return one pass of a problem."""
    if direction == "step":
        # The state is num, den and max.
        return decoding(recurrent_forward(problem), 3 * problem.cells * problem.widths.state)
    backward = direction == "backward"
    if problem.formulation == "scan":
        return (scan_backward if backward else scan_forward)(problem)
    return (recurrent_backward if backward else recurrent_forward)(problem)
