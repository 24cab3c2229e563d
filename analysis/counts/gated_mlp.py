"""Derived counts of a gated MLP's first half, y = silu(x W_gate) * (x W_up), for M = ``batch`` x ``length`` tokens.

D is ``d_model`` and C is ``channels`` (d_ff); N = M C are the elements of y. Source: "Towards Fused Kernels for Gated
MLP" (two projections and their product), after Shazeer, GLU Variants Improve Transformer (2020). Nobody prints a total.

- fused: one kernel, which keeps both projections on the chip.
- fused_save: the same kernel, which stores the projections too, for the backward pass.
- cublas_activation: one GEMM with both weights side by side, then one kernel for the activation and the product.
- gemms_activation: a GEMM for each projection, then one kernel for the activation and the product.
- eager: a GEMM for each projection, then the activation and the product, each a kernel of its own.
- gemms: a GEMM for each projection and no more, which is not y: the operation ``projections``.
"""

from __future__ import annotations

from .model import Formula, Layer, Parts, Passed, Problem, Tally, value_of

_GEMMS = {"GEMMs load": "2*(M*D + D*C)*w", "GEMMs store": "2*N*w"}
_ONE_KERNEL = {"activation and product load": "2*N*w", "activation and product store": "N*w"}

FORWARD_BYTES: dict[str, Parts] = {
    "fused": {"load": "(M*D + 2*D*C)*w", "store": "N*w"},
    "fused_save": {"load": "(M*D + 2*D*C)*w", "store": "3*N*w"},
    "cublas_activation": {"GEMM load": "(M*D + 2*D*C)*w", "GEMM store": "2*N*w", **_ONE_KERNEL},
    "gemms_activation": {**_GEMMS, **_ONE_KERNEL},
    "gemms": _GEMMS,
    "eager": {
        **_GEMMS,
        "activation load": "N*w",
        "activation store": "N*w",
        "product load": "2*N*w",
        "product store": "N*w",
    },
}
"""Formulation -> what its kernels load and store."""

# silu(g) = g sigma(g), and the product with up
FORWARD_WORK = {
    "projections": ("4*M*D*C", ""),
    "activation if activates": ("", "N*(1 + sig)"),
    "product if activates": ("", "N"),
}

# From dy: up's gradient dy silu(g) and the gate's, dy up silu'(g), with silu' = sigma (1 + g (1 - sigma)): 4. GEMMs: dx
# and the weights' gradients; where each gradient has its own (apart), two parts of dx are added. Made again: sigma(g),
# and silu(g) but in eager, which kept it; fused both projections as well, for which it loads x and the weights.
# Loaded and stored: dy, up and g, both gradients (eager, a kernel each: dy and silu(g); dy and up; that and g); both
# gradients and weights for dx, x and both gradients for the weights (apart: x and dx twice, and the addition).
BACKWARD = Formula(
    work={
        "activation gradient if activates": ("", "7*N"),
        "input gradient": ("4*M*D*C", "apart*M*D"),
        "weight gradients": ("4*M*D*C", ""),
    },
    bytes={
        "activation gradient load if activates": "loaded*N*w",
        "activation gradient store if activates": "stored*N*w",
        "input gradient load": "(2*(N + D*C) + 2*apart*M*D)*w",
        "input gradient store": "(1 + 2*apart)*M*D*w",
        "weight gradients load": "((1 + apart)*M*D + 2*N)*w",
        "weight gradients store": "2*D*C*w",
    },
    recomputed={"activation if activates": ("", "N*(sig + again)"), "projections if fused": ("4*M*D*C", "")},
    reread={"projections load if fused": "(M*D + 2*D*C)*w"},
)

COMPULSORY = {"forward": "(M*D + 2*D*C + outputs*N)*w", "backward": "(2*M*D + 4*D*C + outputs*N)*w"}
"""x, both weights and y; backward: x, weights, dy and the gradients of x and the weights. Of projections alone, both of
them or both their gradients in place of y or dy."""


def _flags(formulation: str) -> dict[str, int]:
    """Return what the formulas say of a formulation, as numbers."""
    loaded, stored = {"eager": (6, 3), "fused": (1, 2)}.get(formulation, (3, 2))
    return {
        "activates": formulation != "gemms",
        "apart": formulation in ("eager", "gemms_activation", "gemms"),
        "again": formulation != "eager",
        "fused": formulation == "fused",
        "outputs": 2 if formulation == "gemms" else 1,
        "loaded": loaded,
        "stored": stored,
    }


def tally(layer: Layer, formulation: str, direction: str) -> Tally:
    """Return one pass, forward or backward."""
    forward = Formula(work=FORWARD_WORK, bytes=FORWARD_BYTES[formulation])
    return (BACKWARD if direction == "backward" else forward).of(layer.names | _flags(formulation))


def passed(problem: Problem, direction: str) -> Passed:
    """Return one pass of a problem and its compulsory bytes."""
    layer = problem.layer(direction)
    least = value_of(COMPULSORY[direction], layer.names | _flags(problem.formulation))
    return tally(layer, problem.formulation, direction), least
