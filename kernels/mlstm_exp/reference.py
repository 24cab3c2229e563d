"""mLSTM with exponential input gate: definition, fully parallel form and inputs.

    C_t = sigma(f_t) C_{t-1} + exp(i_t) k_t v_t^T
    n_t = sigma(f_t) n_{t-1} + exp(i_t) k_t
    h_t = scale C_t^T q_t / max(|scale n_t^T q_t|, 1)

computed with C and n divided by exp(m_t), m_t = max(log sigma(f_t) + m_{t-1}, i_t), where the 1 becomes exp(-m_t).
The denominator is a constant to the backward pass (detached), as in the paper and its kernels;
``normalizer_gradient=True`` differentiates through it. Source: TFLA paper, sections 2 and 3, appendix A.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..scalar_decay import reference as engine
from ..scalar_decay.inputs import InputGenerator
from ..scalar_decay.validate import resolve_scale


def log_gates(i: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log decay and the log input gate [B, T, H] of gate pre-activations i, f [B, T, H]."""
    return logsigmoid(f), i


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor, Tensor] | None = None,
    return_last_state: bool = False,
    state_dtype: torch.dtype = torch.float32,
    round_operands: bool = False,
    normalizer_gradient: bool = False,
) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Run mLSTMexp one step at a time.

    Args:
        q, k: [B, T, H, K]; float64 is computed in float64, all else in float32.
        v: [B, T, H, V].
        i, f: gate pre-activations [B, T, H].
        scale: factor on q; None is K^-1/2.
        initial_state: (C [B, H, K, V], n [B, H, K], m [B, H]); m carries no gradient.
        return_last_state: also return (C, n, m) after the last step.
        state_dtype: taken for the common signature; states have the dtype of the computation.
        round_operands: round the operands of products to v's dtype, as kernels do.
        normalizer_gradient: differentiate through the denominator.

    Returns:
        h [B, T, H, V] in v's dtype, or (h, (C, n, m)).
    """
    return engine.recurrent(
        q, k, v, *log_gates(i, f), scale=resolve_scale(scale, q.shape[-1]),
        initial_state=initial_state, return_last_state=return_last_state,
        round_operands=round_operands,
        normalize=True, normalizer_gradient=normalizer_gradient,
    )  # fmt: skip


def parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor, Tensor] | None = None,
    return_last_state: bool = False,
    state_dtype: torch.dtype = torch.float32,
    normalizer_gradient: bool = False,
    gate_dtype: torch.dtype = torch.float64,
) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Compute mLSTMexp as one masked product, quadratic in T; arguments as :func:`recurrent`.

    gate_dtype is the dtype of the cumulative sums of the gates.
    """
    return engine.parallel(
        q, k, v, *log_gates(i, f), scale=resolve_scale(scale, q.shape[-1]),
        initial_state=initial_state, return_last_state=return_last_state,
        normalize=True, normalizer_gradient=normalizer_gradient, gate_dtype=gate_dtype,
    )  # fmt: skip


def make_inputs(
    sizes: Mapping[str, int], *, dtype: torch.dtype, device: torch.device | str, seed: int
) -> dict[str, Tensor]:
    """Draw inputs: q, k, v ~ N(0, 1), forget gates biased towards 1 head by head, input gates ~ N(-2.5, 1).

    The paper starts training with input gates at -10, where the denominator is always 1; at -2.5 both of its branches
    occur. Gates are float32 (float64 beside float64 inputs).
    """
    draw = InputGenerator(sizes, dtype=dtype, device=device, seed=seed)
    return {**draw.qkv(), "i": draw.gate(-2.5), "f": draw.forget_gate()}
