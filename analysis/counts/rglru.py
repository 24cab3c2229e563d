"""Counts of the RG-LRU and of the linear scan inside it, for a whole problem of ``batch`` x ``seq_len`` x R channels.

    a_t = exp(-8 sigma(r_t) softplus(c)),  h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigma(i_t) x_t

with r = x W_a and i = x W_x in the layer. Source: the IO-aware RG-LRU kernel of Hawk (its two listings and its byte
counts); the recurrence is De et al., Griffin (2024), equations 1 to 4. N = B L R is the number of elements of x.
Everything but the layer's GEMMs is vector work. A square root or a division counts 1, as any other operation.

- fused: the operation alone in one kernel, on pre-activations r and i: 8N + 2R bytes in a 16-bit dtype. For the
  backward pass our kernels keep no h but a float32 state every 8 steps: 15N + 4R bytes, that store included.
- chunked: reduce, then scan, over n = T / L chunks: a kernel that makes the map h -> a h + b that each chunk is to a
  state, one that runs through the maps, and the fused kernel on all chunks at once. 14N + 4R bytes and six float32
  passes over n B R states. (The linear scan has it too.)
- layer: two GEMMs and the fused kernel: 16N + 4RR + 2R bytes.
- unfused: the layer with one kernel a line of the listing, its sigmoids apart from the GEMMs.
- lines: the same without the GEMMs, the operation alone on r and i.

The page prints bytes alone, and its ``published`` counts stand beside the layer's FLOPs, since both cover the weights:
unfused it reads 26N + 4RR + 2R and writes 22N (its own listing gives 20N); fused it reads 4N + 4RR + 2R and writes 2N,
which takes the weights of the GEMMs in, leaves their activations out, and reads two of the kernel's three inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ...kernels.rglru.config import SAVED_EVERY
from .model import Factors, Problem, Scalar, Tally, Work, decoding

WITH_GEMMS = ("layer", "unfused")
"""Formulations of the whole layer."""

PUBLISHED = (("unfused", "fw"), ("fused", "fw"))
"""Formulations and modes of the RG-LRU whose bytes the page prints."""

LINES: Mapping[str, tuple[int, int]] = {
    "gate GEMMs": (2, 2), "sigmoids": (2, 2), "log decay": (1, 1), "decay": (1, 1), "squared decay": (1, 1),
    "gated input": (2, 1), "normalised input": (2, 1), "recurrence": (2, 1),
}  # fmt: skip
"""Line of the unfused listing -> tensors of N elements that its kernels load and store."""

BACKWARD_LINES: Mapping[str, tuple[int, int]] = {
    "recurrence": (3, 2), "normalised input": (3, 2), "gated input": (3, 2), "squared decay": (2, 1), "decay": (3, 1),
    "log decay": (2, 1), "sigmoids": (4, 2), "input gradient GEMMs": (4, 2), "weight gradient GEMMs": (4, 0),
}  # fmt: skip
"""The same of the backward pass, activations kept: the recurrence loads dh, a, h and stores its two gradients, ...

The decay and the two GEMMs that make x's gradient add to what is there, so they load it too.
"""


def forward(problem: Problem) -> Tally:
    """Forward FLOPs and bytes.

    The gates are two sigmoids; the decay is -8 sigma(r) softplus(c) and its exponential; the input takes exp(2 log a),
    sigma(i) x, sqrt(1 - a^2) and their product. Bytes: fused x, r, i, c and h; layer besides the GEMMs' x twice, both
    weights, r and i; unfused and lines :data:`LINES`.
    """
    cells, channels, f = problem.cells, problem.channels, problem.f
    work = {
        "gates": Work(vector=2 * cells * f.sig),
        "decay": Work(vector=cells * (2 + f.exp) + channels * _softplus(f)),
        "input": Work(vector=cells * (5 + f.exp)),
        "recurrence": Work(vector=2 * cells),
    }
    formulation = problem.formulation
    if formulation in WITH_GEMMS or problem.published:
        work["gate GEMMs"] = Work(matrix=4 * cells * channels)
    if problem.published:
        loads, stores = (13, 11) if formulation == "unfused" else (2, 1)
        elements = {"load": loads * cells + 2 * channels * channels + channels, "store": stores * cells}
    elif formulation in ("unfused", "lines"):
        elements = _line_traffic(_without_gemms(LINES) if formulation == "lines" else LINES, cells)
        elements["log decay load"] += channels
        if formulation == "unfused":
            elements["gate GEMMs load"] += 2 * channels * channels
    else:
        elements = {"load": 3 * cells + channels, "store": cells}
        if formulation == "layer":
            elements |= {"gate GEMMs load": 2 * cells + 2 * channels * channels, "gate GEMMs store": 2 * cells}
    return Tally(work=work, traffic=problem.moved(elements))


def backward(problem: Problem) -> Tally:
    """Backward FLOPs and bytes; derived. g is the gradient of h, s = sqrt(1 - a^2), y = sigma(i) x.

    - recurrence gradient: g_t = dh_t + a_{t+1} g_{t+1}
    - decay gradient: g h_{t-1}, g y, and d log a = (g h_{t-1}) a - (g y) a^2 / s; line by line, the kernels of s and
      a^2 each differentiate by themselves and halve and double what passes between them: 2N more
    - gate gradients: -8 d log a, times softplus(c), times sigma'(r): 5N; d sigma(i) = (g s) x, times sigma'(i): 4N;
      sigma' = sigma (1 - sigma)
    - input gradient: g s, times sigma(i); parameter gradient: sum of -8 d log a sigma(r), times sigma(c)
    - GEMMs (layer, unfused): dx += dr W_a^T + di W_x^T and both weights' gradients

    Recomputed and not counted: the forward pass (unfused: softplus(c) and s, all else is kept).
    Bytes: fused x, r, i, dh, c; dx, dr, di, dc; a float32 state every :data:`SAVED_EVERY` steps, which the forward pass
    stores for this one alone; layer besides the four GEMMs, those of dx adding to what is there; unfused
    :data:`BACKWARD_LINES`. dc's parts, one a tile, are left out (under 1 %).
    """
    cells, channels, f = problem.cells, problem.channels, problem.f
    weights = 2 * channels * channels
    by_line = problem.formulation in ("unfused", "lines")
    work = {
        "recurrence gradient": Work(vector=2 * cells),
        "decay gradient": Work(vector=(8 if by_line else 6) * cells),
        "gate gradients": Work(vector=9 * cells),
        "input gradient": Work(vector=2 * cells),
        "parameter gradient": Work(vector=2 * cells + channels * (1 + f.sig)),
    }
    recomputed = forward(dataclasses.replace(problem, formulation="fused")).work
    elements = {"load": 4 * cells + channels, "store": 3 * cells + channels}
    saved = -(-problem.seq_len // SAVED_EVERY) * problem.batch * channels * problem.widths.state
    states = {"states store": saved, "states load": saved}
    if by_line:
        states = {}
        elements = _line_traffic(_without_gemms(BACKWARD_LINES), cells)
        elements["log decay load"] += channels
        elements["log decay store"] += channels
        recomputed = {"decay": Work(vector=channels * _softplus(f)), "input": Work(vector=2 * cells)}
    if problem.formulation in WITH_GEMMS:
        work |= dict.fromkeys(("input gradient GEMMs", "weight gradient GEMMs"), Work(matrix=4 * cells * channels))
        elements |= _line_traffic({name: moved for name, moved in BACKWARD_LINES.items() if "GEMMs" in name}, cells)
        elements["input gradient GEMMs load"] += weights
        elements["weight gradient GEMMs store"] += weights
    return Tally(work=work, traffic=problem.moved(elements) | states, recomputed_work=recomputed)


def chunked(one: Tally, problem: Problem, chunks: Scalar, *, gated: bool, backward: bool) -> Tally:
    """Return ``one``, a fused pass of the RG-LRU (``gated``) or the linear scan, run as reduce, then scan.

    Of a chunk's L steps the reduction makes the elements a and b (backward: a alone, for w_t = a_t (dh_t + w_{t+1})),
    runs through them from a zero state and multiplies the decays. n is ``chunks``; a single one is ``one`` itself.

    Gates, decay and input are made once more (backward: sigma(r) and the decay). All of it is recomputed or comes on
    top, so it is not counted. Bytes on top: the reduction loads x, r, i and c (backward: r, dh and c; of the scan a and
    b, or a and dh); both halves of the maps and the states between chunks are stored and loaded.

    Source: Martin and Cundy, "Parallelizing linear recurrent neural nets over sequence length" (2018), section 2.
    """
    if chunks == 1:
        return one
    cells, channels, f = problem.cells, problem.channels, problem.f
    states = chunks * problem.batch * channels
    again = {"maps of chunks": Work(vector=3 * cells), "states between chunks": Work(vector=2 * states)}
    if gated:
        again["gates, of chunks"] = Work(vector=(1 if backward else 2) * cells * f.sig)
        again["decay, of chunks"] = Work(vector=cells * (2 + f.exp) + channels * _softplus(f))
        if not backward:
            again["input, of chunks"] = Work(vector=cells * (5 + f.exp))
    tensors = 3 if gated and not backward else 2
    traffic = problem.moved({"reduction load": tensors * cells + (channels if gated else 0)})
    for name, halves in (("maps of chunks", 2), ("states between chunks", 1)):
        traffic |= dict.fromkeys((f"{name} store", f"{name} load"), halves * states * problem.widths.state)
    return one + Tally(traffic=traffic, recomputed_work=again)


def scan_forward(problem: Problem) -> Tally:
    """The linear scan h_t = a_t h_{t-1} + b_t in one pass; a and b loaded, h stored."""
    elements = {"load": 2 * problem.cells, "store": problem.cells}
    return Tally(work={"recurrence": Work(vector=2 * problem.cells)}, traffic=problem.moved(elements))


def scan_backward(problem: Problem) -> Tally:
    """Backward of the linear scan: db_t = dh_t + a_{t+1} db_{t+1}; da_t = h_{t-1} db_t. a, h, dh; da, db."""
    work = {"recurrence gradient": Work(vector=2 * problem.cells), "decay gradient": Work(vector=problem.cells)}
    return Tally(work=work, traffic=problem.moved({"load": 3 * problem.cells, "store": 2 * problem.cells}))


def _softplus(f: Factors) -> Scalar:
    return 1 + f.exp + f.log


def _without_gemms(lines: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    return {name: moved for name, moved in lines.items() if "GEMMs" not in name}


def _line_traffic(lines: Mapping[str, tuple[int, int]], cells: Scalar) -> dict[str, Scalar]:
    traffic: dict[str, Scalar] = {}
    for name, (loads, stores) in lines.items():
        traffic |= {f"{name} load": loads * cells, f"{name} store": stores * cells}
    return traffic


def passed(problem: Problem, direction: str) -> Tally:
    """Return one pass of the RG-LRU, its layer or the linear scan."""
    is_scan, is_backward = problem.op == "linear_scan", direction == "backward"
    formulas = (scan_forward, scan_backward) if is_scan else (forward, backward)
    tally = formulas[is_backward](problem)
    if direction == "step":
        return decoding(tally, problem.cells * problem.widths.state)
    if problem.formulation != "chunked":
        return tally
    chunks = -(-problem.seq_len // problem.chunk_size)
    return chunked(tally, problem, chunks, gated=not is_scan, backward=is_backward)
