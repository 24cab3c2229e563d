"""mLSTM with exponential input gate, normaliser and max state.

    C_t = sigma(f_t) C_{t-1} + exp(i_t) k_t v_t^T        n_t = sigma(f_t) n_{t-1} + exp(i_t) k_t
    h_t = scale C_t^T q_t / max(|scale n_t^T q_t|, 1)

computed with C and n divided by exp(m_t), m_t = max(log sigma(f_t) + m_{t-1}, i_t), where the 1 becomes exp(-m_t).
The denominator is a constant to the backward pass (detached), as in the paper and its kernels;
``normalizer_gradient=True`` differentiates through it. Source: TFLA paper, sections 2 and 3, appendix A.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .common.calls import remember_calls
from .common.spec import XLSTM_MODELS
from .scalar_decay.declare import scalar_decay_operation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .common.inputs import Draw

OPERATION = scalar_decay_operation(
    "mlstm_exp",
    normalised=True,
    label="mLSTMexp",
    summary="mLSTM with exponential input gate, normaliser and max state; the denominator carries no gradient",
    arguments=("q", "k", "v", "i", "f"),
    differentiable=("q", "k", "v", "i", "f"),
    models=XLSTM_MODELS,
    qk_ratio=0.5,
)


def log_gates(i: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log decay and the log input gate [B, T, H] of gate pre-activations i, f [B, T, H]."""
    from torch.nn.functional import logsigmoid

    return logsigmoid(f), i


@remember_calls
def mlstm_exp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    impl: str | None = None,
    chunk_size: int | None = None,
    state_dtype: torch.dtype | None = None,
    initial_state: tuple[Tensor, Tensor, Tensor] | None = None,
    return_last_state: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    normalizer_gradient: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Compute mLSTMexp: exponential input gate, stabilised state, normalised output.

        C_t = sigma(f_t) C_{t-1} + exp(i_t) k_t v_t^T        n_t = sigma(f_t) n_{t-1} + exp(i_t) k_t
        h_t = scale C_t^T q_t / max(|scale n_t^T q_t|, 1)

    Args:
        q, k: [B, T, H, K]; dtypes, strides and sizes as kernels/scalar_decay/engine.py says for each ``impl``.
        v: [B, T, H, V], the same dtype.
        i, f: gate pre-activations [B, T, H], float32 (float64 beside float64). i = -inf, or any far below -1024, with
            f = inf masks a token, and so does i alone before the first token: it leaves no trace in what follows.
        impl: None, fused_chunk, whole_state, xl_chunk, limit_chunk, torch, parallel, recurrent or step (engine.py).
        chunk_size, state_dtype, return_last_state, options: see kernels/scalar_decay/engine.py.
        initial_state: (C [B, H, K, V], n [B, H, K], m [B, H]) with C and n divided by exp(m), float32 (float64 beside
            float64); m carries no gradient.
        cu_seqlens: bounds of packed documents [N + 1], with states of the N documents; see engine.py.
        scale: factor of q; None is K^-1/2.
        normalizer_gradient: differentiate through the denominator instead of taking it as a constant; torch, parallel
            and recurrent only.

    Returns:
        h [B, T, H, V] in v's dtype, or (h, (C, n, m)); differentiable in all tensors but m.

    Raises:
        ValueError: on an argument that does not fit; the message names it, what was expected and what came.

    Source: TFLA paper, sections 2 and 3, appendices A and B.
    """
    from .scalar_decay import validate
    from .scalar_decay.engine import scalar_decay

    validate.check_qkv(q, k, v)
    validate.check_gates({"i": i, "f": f}, v)
    return scalar_decay(
        impl, q, k, v, lambda: log_gates(i, f), gate="exp", decay=f, input_gate=i,
        scale=scale, chunk_size=chunk_size, state_dtype=state_dtype,
        initial_state=initial_state, return_last_state=return_last_state, cu_seqlens=cu_seqlens,
        normalizer_gradient=normalizer_gradient, options=options,
    )  # fmt: skip


def make_inputs(draw: Draw) -> dict[str, Tensor]:
    """Draw inputs: q, k, v ~ N(0, 1), forget gates biased towards 1 head by head, input gates ~ N(-2.5, 1).

    The paper starts training with input gates at -10, where the denominator is always 1; at -2.5 both of its branches
    occur.
    """
    return {**draw.qkv(), "i": draw.gate(-2.5), "f": draw.forget_gate()}
