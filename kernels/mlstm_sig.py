"""mLSTM with sigmoid input gate: no normaliser and no max state, since both gates lie in (0, 1).

    C_t = sigma(f_t) C_{t-1} + sigma(i_t) k_t v_t^T        h_t = scale C_t^T q_t

Source: TFLA paper, section 4 (mLSTMsig).
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
    "mlstm_sig",
    label="mLSTMsig",
    summary="mLSTM with sigmoid input gate, no normaliser and no max state",
    arguments=("q", "k", "v", "i", "f"),
    differentiable=("q", "k", "v", "i", "f"),
    models=XLSTM_MODELS,
    qk_ratio=0.5,
)


def log_gates(i: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log decay and the log input gate [B, T, H] of gate pre-activations i, f [B, T, H]."""
    from torch.nn.functional import logsigmoid

    return logsigmoid(f), logsigmoid(i)


@remember_calls
def mlstm_sig(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    impl: str | None = None,
    chunk_size: int | None = None,
    state_dtype: torch.dtype | None = None,
    initial_state: Tensor | None = None,
    return_last_state: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute mLSTMsig: C_t = sigma(f_t) C_{t-1} + sigma(i_t) k_t v_t^T, h_t = scale C_t^T q_t.

    Args:
        q, k: [B, T, H, K]; dtypes, strides and sizes as kernels/scalar_decay/engine.py says for each ``impl``.
        v: [B, T, H, V], the same dtype.
        i, f: gate pre-activations [B, T, H], float32 (float64 beside float64). i = -inf with f = inf masks a token, and
            so does i alone before the first token: it leaves no trace in what follows.
        impl: None, fused_chunk, whole_state, xl_chunk, limit_chunk, torch, parallel, recurrent or step (engine.py).
        chunk_size, state_dtype, return_last_state, options: see kernels/scalar_decay/engine.py.
        initial_state: C [B, H, K, V], float32 (float64 beside float64).
        cu_seqlens: bounds of packed documents [N + 1], with states of the N documents; see engine.py.
        scale: factor of q; None is K^-1/2.

    Returns:
        h [B, T, H, V] in v's dtype, or (h, C); differentiable in all tensors.

    Raises:
        ValueError: on an argument that does not fit; the message names it, what was expected and what came.

    Source: TFLA paper, section 4.1, appendix B.
    """
    from .scalar_decay import validate
    from .scalar_decay.engine import scalar_decay

    validate.check_qkv(q, k, v)
    validate.check_gates({"i": i, "f": f}, v)
    return scalar_decay(
        impl, q, k, v, lambda: log_gates(i, f), gate="sig", decay=f, input_gate=i,
        scale=scale, chunk_size=chunk_size, state_dtype=state_dtype,
        initial_state=initial_state, return_last_state=return_last_state, cu_seqlens=cu_seqlens, options=options,
    )  # fmt: skip


def make_inputs(draw: Draw) -> dict[str, Tensor]:
    """Draw inputs: q, k, v ~ N(0, 1), forget gates biased towards 1 head by head, input gates ~ N(-2.5, 1)."""
    return {**draw.qkv(), "i": draw.gate(-2.5), "f": draw.forget_gate()}
