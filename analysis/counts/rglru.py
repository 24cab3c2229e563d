"""Counts of the RG-LRU and of the linear scan inside it, for a whole problem of ``batch`` x ``length`` x R channels.

    a_t = exp(-8 sigma(r_t) softplus(c)),  h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigma(i_t) x_t

with r = x W_a and i = x W_x in the layer. Source: the IO-aware RG-LRU kernel of Hawk (its two listings and its byte
counts); the recurrence is De et al., Griffin (2024), equations 1 to 4. N = B L R are the elements of x; formulas
write C for R. Everything but the layer's GEMMs is vector work. A square root or a division counts 1, as any other
operation.

- fused: the operation alone in one kernel, on pre-activations r and i: 8N + 2R bytes in a 16-bit dtype.
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

from collections.abc import Mapping
from types import MappingProxyType

from .model import Formula, Layer, Parts, Passed, Problem, Scalar, Tally, decoding, value_of

WITH_GEMMS = ("layer", "unfused")
"""Formulations of the whole layer."""

PUBLISHED = ("unfused", "fused")
"""Formulations of the RG-LRU whose bytes the page prints."""

LINES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "gate GEMMs": (2, 2),
        "sigmoids": (2, 2),
        "log decay": (1, 1),
        "decay": (1, 1),
        "squared decay": (1, 1),
        "gated input": (2, 1),
        "normalised input": (2, 1),
        "recurrence": (2, 1),
    }
)
"""Line of the unfused listing -> tensors of N elements that its kernels load and store."""

BACKWARD_LINES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "recurrence": (3, 2),
        "normalised input": (3, 2),
        "gated input": (3, 2),
        "squared decay": (2, 1),
        "decay": (3, 1),
        "log decay": (2, 1),
        "sigmoids": (4, 2),
        "input gradient GEMMs": (4, 2),
        "weight gradient GEMMs": (4, 0),
    }
)
"""The same of the backward pass, activations kept: the recurrence loads dh, a, h and stores its two gradients, ...

The decay and the two GEMMs that make x's gradient add to what is there, so they load it too.
"""


def _line_bytes(lines: Mapping[str, tuple[int, int]], more: Mapping[str, str], *, gemms: bool) -> dict[str, str]:
    """Return the bytes that lines load and store, with ``more`` elements of some, and without those of GEMMs."""
    moved: dict[str, str] = {}
    for name, (loads, stores) in lines.items():
        if gemms or "GEMMs" not in name:
            moved |= {f"{name} load": f"{loads}*N", f"{name} store": f"{stores}*N"}
    return {name: f"({elements} + {more.get(name, 0)})*w" for name, elements in moved.items()}


_SOFTPLUS = "C*(1 + exp + log)"
_SIGMOIDS, _DECAY = ("", "2*N*sig"), ("", f"N*(2 + exp) + {_SOFTPLUS}")

FORWARD_WORK = {
    "gates": _SIGMOIDS,
    # -8 sigma(r) softplus(c) and its exponential
    "decay": _DECAY,
    # exp(2 log a), sigma(i) x, sqrt(1 - a^2) and their product
    "input": ("", "N*(5 + exp)"),
    "recurrence": ("", "2*N"),
    "gate GEMMs if gemms": ("4*N*C", ""),
}
_FUSED = {"load": "(3*N + C)*w", "store": "N*w"}

FORWARD_BYTES: Mapping[str, Parts] = MappingProxyType(
    {
        "fused": _FUSED,
        "layer": {**_FUSED, "gate GEMMs load": "(2*N + 2*C*C)*w", "gate GEMMs store": "2*N*w"},
        "lines": _line_bytes(LINES, {"log decay load": "C"}, gemms=False),
        "unfused": _line_bytes(LINES, {"log decay load": "C", "gate GEMMs load": "2*C*C"}, gemms=True),
        "fused as printed": {"load": "(2*N + 2*C*C + C)*w", "store": "N*w"},
        "unfused as printed": {"load": "(13*N + 2*C*C + C)*w", "store": "11*N*w"},
    }
)
"""Formulation -> bytes: x, r, i, c and h; with GEMMs x twice, both weights, r and i; else :data:`LINES`."""

# g is the gradient of h, s = sqrt(1 - a^2), y = sigma(i) x. h is read back.
BACKWARD_WORK = {
    # g_t = dh_t + a_{t+1} g_{t+1}
    "recurrence gradient": ("", "2*N"),
    # g h_{t-1}, g y, and d log a = (g h_{t-1}) a - (g y) a^2 / s; line by line, the kernels of s and a^2 each
    # differentiate by themselves and halve and double what passes between them
    "decay gradient": ("", "(6 + 2*by_line)*N"),
    # -8 d log a, times softplus(c), times sigma'(r): 5; d sigma(i) = (g s) x, times sigma'(i): 4
    "gate gradients": ("", "9*N"),
    # g s, times sigma(i)
    "input gradient": ("", "2*N"),
    # the sum of -8 d log a sigma(r); times sigma(c)
    "parameter gradient": ("", "2*N + C*(1 + sig)"),
    # dx += dr W_a^T + di W_x^T, and both weights' gradients
    "input gradient GEMMs if gemms": ("4*N*C", ""),
    "weight gradient GEMMs if gemms": ("4*N*C", ""),
}
# Line by line all is kept but softplus(c) and s.
BACKWARD_AGAIN = {
    False: {"gates": _SIGMOIDS, "decay": _DECAY, "input": ("", "N*(4 + exp)")},
    True: {"decay": ("", _SOFTPLUS), "input": ("", "2*N")},
}
_FUSED_BACKWARD = {"load": "(5*N + C)*w", "store": "(3*N + C)*w"}
_GRADIENTS = {"log decay load": "C", "log decay store": "C"}
_WEIGHTS = {"input gradient GEMMs load": "2*C*C", "weight gradient GEMMs store": "2*C*C"}
_UNFUSED_BACKWARD = _line_bytes(BACKWARD_LINES, _GRADIENTS | _WEIGHTS, gemms=True)

BACKWARD_BYTES: Mapping[str, Parts] = MappingProxyType(
    {
        "fused": _FUSED_BACKWARD,
        "layer": {**_FUSED_BACKWARD, **{name: each for name, each in _UNFUSED_BACKWARD.items() if "GEMMs" in name}},
        "lines": _line_bytes(BACKWARD_LINES, _GRADIENTS, gemms=False),
        "unfused": _UNFUSED_BACKWARD,
    }
)
"""The same of the backward pass: x, r, i, h, dh, c; dx, dr, di, dc; with the four GEMMs those of dx add to what is
there; else :data:`BACKWARD_LINES`."""

# Of a chunk's steps the reduction makes the elements a and b (backward: a alone, for w_t = a_t (dh_t + w_{t+1})), runs
# through them from a zero state (b 2N) and multiplies the decays (a N); then a h + b between the n chunks. All is on
# top of a fused pass, so it is not counted. It loads x, r, i and c (backward: r, dh and c; of the scan a and b, or a
# and dh), and both halves of the maps and the states between chunks are stored and loaded. Source: Martin and Cundy,
# "Parallelizing linear recurrent neural nets over sequence length" (2018), section 2.
REDUCTION = Formula(
    work={},
    bytes={
        "reduction load": "((2 + gated*(1 - backward))*N + gated*C)*w",
        "maps of chunks store": "2*n*B*C*s",
        "maps of chunks load": "2*n*B*C*s",
        "states between chunks store": "n*B*C*s",
        "states between chunks load": "n*B*C*s",
    },
    recomputed={
        "maps of chunks": ("", "3*N"),
        "states between chunks": ("", "2*n*B*C"),
        "gates, of chunks if gated": ("", "(2 - backward)*N*sig"),
        "decay, of chunks if gated": _DECAY,
        "input, of chunks if inputs": ("", "N*(5 + exp)"),
    },
)

# a and b, h; backward db_t = dh_t + a_{t+1} db_{t+1} and da_t = h_{t-1} db_t, from a, h, dh.
SCAN = {
    "forward": Formula(work={"recurrence": ("", "2*N")}, bytes={"load": "2*N*w", "store": "N*w"}),
    "backward": Formula(
        work={"recurrence gradient": ("", "2*N"), "decay gradient": ("", "N")},
        bytes={"load": "3*N*w", "store": "2*N*w"},
    ),
}
"""The linear scan h_t = a_t h_{t-1} + b_t in one pass."""


def compulsory(layer: Layer, formulation: str, *, backward: bool) -> Scalar:
    """Return the bytes of inputs and outputs, each once.

    fused, chunked, lines: x, r, i, c, h (backward: x, r, i, c, dh; dx, dr, di, dc). layer, unfused: x, c, h and both
    weights (backward: x, c, dh, weights; dx, dc and the weights' gradients).
    """
    if formulation in WITH_GEMMS:
        text = "(3*N + 2*(2*C*C + C))*w" if backward else "(2*N + 2*C*C + C)*w"
    else:
        text = "(7*N + 2*C)*w" if backward else "(4*N + C)*w"
    return value_of(text, layer.names)


def tally(layer: Layer, formulation: str, direction: str, *, published: bool = False) -> Tally:
    """Return one pass of the RG-LRU or its layer; ``published``: with the bytes that the page prints."""
    by_line = formulation in ("unfused", "lines")
    names = layer.names | {"by_line": by_line, "gemms": formulation in WITH_GEMMS or published}
    if direction == "backward":
        again = BACKWARD_AGAIN[by_line]
        return Formula(work=BACKWARD_WORK, bytes=BACKWARD_BYTES[formulation], recomputed=again).of(names)
    moved = FORWARD_BYTES[f"{formulation} as printed" if published else formulation]
    return Formula(work=FORWARD_WORK, bytes=moved).of(names)


def passed(problem: Problem, direction: str) -> Passed:
    """Return one pass of a problem of the RG-LRU or its layer."""
    layer = problem.layer(direction)
    if direction == "step":
        one = decoding(tally(layer, "fused", "forward"), value_of("N*s", layer.names))
        return one, one.bytes
    formulation = "fused" if problem.formulation in ("recurrent", "chunked") else problem.formulation
    covered = "layer" if problem.published else formulation
    one = _reduced(problem, tally(layer, formulation, direction, published=problem.published), layer, direction)
    return one, compulsory(layer, covered, backward=direction == "backward")


def scan_passed(problem: Problem, direction: str) -> Passed:
    """Return one pass of a problem of the linear scan."""
    layer = problem.layer(direction)
    one = SCAN["backward" if direction == "backward" else "forward"].of(layer.names)
    if direction == "step":
        one = decoding(one, value_of("N*s", layer.names))
    return _reduced(problem, one, layer, direction), one.bytes


def _reduced(problem: Problem, one: Tally, layer: Layer, direction: str) -> Tally:
    """Return a fused pass as it is, or for the formulation chunked and more chunks than one as reduce, then scan."""
    chunks = -(-problem.seq_len // problem.chunk_size)
    if problem.formulation != "chunked" or chunks == 1:
        return one
    gated, backward = problem.op != "linear_scan", direction == "backward"
    flags = {"n": chunks, "gated": gated, "backward": backward, "inputs": gated and not backward}
    return one + REDUCTION.of(layer.names | flags)
