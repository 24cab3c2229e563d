"""Derived counts of a gated MLP's first half, y = silu(x W_gate) * (x W_up), for M = ``batch`` x ``seq_len`` tokens.

D is ``d_model`` and F is ``d_ff``. Source: "Towards Fused Kernels for Gated MLP" (two projections and their
product), after Shazeer, GLU Variants Improve Transformer (2020). Nobody prints a total.

- fused: one kernel, which keeps both projections on the chip: M D + 2 D F loaded, M F stored.
- fused_save: the same kernel, which stores the projections too, for the backward pass.
- cublas_activation: one GEMM with both weights side by side, then one kernel for the activation and the product.
- gemms_activation: a GEMM for each projection, then one kernel for the activation and the product.
- eager: a GEMM for each projection, then the activation and the product, each a kernel of its own.
- gemms: a GEMM for each projection and no more, which is not y: the operation ``projections``.
"""

from __future__ import annotations

from .model import Problem, Scalar, Tally, Work


def forward(problem: Problem) -> Tally:
    """Forward FLOPs and bytes of both products, silu(g) = g sigma(g) and its product with up."""
    inputs, weights, outputs = _sizes(problem)
    work = {"projections": Work(matrix=4 * inputs * problem.d_ff)}
    if problem.formulation != "gemms":
        work["activation"] = Work(vector=outputs * (1 + problem.f.sig))
        work["product"] = Work(vector=outputs)
    gemms = {"GEMMs load": 2 * (inputs + weights), "GEMMs store": 2 * outputs}
    one_kernel = {"activation and product load": 2 * outputs, "activation and product store": outputs}
    elements = {
        "fused": {"load": inputs + 2 * weights, "store": outputs},
        "fused_save": {"load": inputs + 2 * weights, "store": 3 * outputs},
        "cublas_activation": {"GEMM load": inputs + 2 * weights, "GEMM store": 2 * outputs, **one_kernel},
        "gemms_activation": {**gemms, **one_kernel},
        "gemms": gemms,
        "eager": {
            **gemms, "activation load": outputs, "activation store": outputs,
            "product load": 2 * outputs, "product store": outputs,
        },
    }[problem.formulation]  # fmt: skip
    return Tally(work=work, traffic=problem.moved(elements))


def backward(problem: Problem) -> Tally:
    """Backward FLOPs and bytes, from dy: up's gradient dy silu(g) and the gate's, dy up silu'(g).

    silu' = sigma (1 + g (1 - sigma)): 4; the gradients: 1 and 2. Where each gradient has its own GEMM, two parts of dx
    are added. Recomputed and not counted: sigma(g), and silu(g) = g sigma(g) but in eager, which kept it; fused both
    projections as well, which it did not store.

    Elements loaded and stored: activation dy, up and g, both gradients stored (eager, a kernel each: dy and silu(g);
    dy and up; that and g); GEMMs both gradients and weights for dx, x and both gradients for the weights (eager and
    gemms_activation: x and dx twice, and the addition). Fused loads x and the weights to make the projections again;
    fused_save is cublas_activation's. Projections alone have the GEMMs of gemms_activation.
    """
    inputs, weights, outputs = _sizes(problem)
    gemm, formulation = 4 * inputs * problem.d_ff, problem.formulation
    apart = formulation in ("eager", "gemms_activation", "gemms")
    work = {
        "activation gradient": Work(vector=7 * outputs),
        "input gradient": Work(matrix=gemm, vector=inputs if apart else 0),
        "weight gradients": Work(matrix=gemm),
    }
    recomputed = {"activation": Work(vector=outputs * (problem.f.sig + int(formulation != "eager")))}
    again: dict[str, Scalar] = {}
    loaded, stored = {"eager": (6, 3), "fused": (1, 2)}.get(formulation, (3, 2))
    elements: dict[str, Scalar] = {
        "activation gradient load": loaded * outputs,
        "activation gradient store": stored * outputs,
        "input gradient load": 2 * (outputs + weights) + (2 * inputs if apart else 0),
        "input gradient store": (3 if apart else 1) * inputs,
        "weight gradients load": (2 if apart else 1) * inputs + 2 * outputs,
        "weight gradients store": 2 * weights,
    }
    if formulation == "gemms":
        work = {name: part for name, part in work.items() if "activation" not in name}
        elements = {name: part for name, part in elements.items() if "activation" not in name}
        recomputed = {}
    if formulation == "fused":
        recomputed["projections"] = Work(matrix=gemm)
        again = {"projections load": inputs + 2 * weights}
    return Tally(
        work=work, traffic=problem.moved(elements), recomputed_work=recomputed, recomputed_traffic=problem.moved(again)
    )


def _sizes(problem: Problem) -> tuple[Scalar, Scalar, Scalar]:
    """Elements of x, of one weight and of y."""
    tokens = problem.batch * problem.seq_len
    return tokens * problem.d_model, problem.d_model * problem.d_ff, tokens * problem.d_ff


def passed(problem: Problem, direction: str) -> Tally:
    """Return one pass of a problem."""
    return (backward if direction == "backward" else forward)(problem)
