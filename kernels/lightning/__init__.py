"""Lightning Attention: linear attention with one fixed decay per head and no scale.

    kv_t = exp(-slope) kv_{t-1} + k_t v_t^T        o_t = kv_t^T q_t

Source: Qin et al., Lightning Attention-2 (2024), equation 3 and the recursion below it, with lambda = exp(-slope).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..common.calls import remember_calls
from ..common.spec import LANGUAGE_MODELS, triton_form
from ..scalar_decay.declare import scalar_decay_operation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..common.inputs import Draw

KERNELS = {
    "lightning2": "Lightning Attention-2: blocks in order, the state on the chip",
    "lightning1": "Lightning Attention-1: the whole causal square in tiles, quadratic in the sequence length",
}
"""The authors' two algorithms, which this folder implements for comparison; scalar_decay/ computes every other impl."""

OPERATION = scalar_decay_operation(
    "lightning",
    kernel="lightning",
    label="Lightning",
    summary="linear attention with a fixed decay per head and no scale",
    arguments=("q", "k", "v", "slope"),
    differentiable=("q", "k", "v"),
    # Of TransNormerLLM, and the most that lightning-attn's tiles hold.
    head_dim=128,
    formulations=("lightning1", "lightning2"),
    models=LANGUAGE_MODELS,
    implementations=(
        *(
            triton_form(
                name=name,
                formulation=name,
                why_not="kernels.lightning.config:why_not",
                summary=summary,
                chunked=False,
                default_config=f"kernels.lightning.config:select_config:{name}",
            )
            for name, summary in KERNELS.items()
        ),
    ),
)


@remember_calls
def lightning(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slope: Tensor,
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
    """Compute Lightning Attention: kv_t = exp(-slope) kv_{t-1} + k_t v_t^T, o_t = scale kv_t^T q_t.

    Args:
        q, k: [B, T, H, K]; see kernels/scalar_decay/engine.py for the dtypes, strides and sizes of each ``impl``;
            lightning1 and lightning2 take K and V up to 256, and before Hopper copy what is not contiguous.
        v: [B, T, H, V], the same dtype.
        slope: decay rates [H], >= 0, float32 (float64 beside float64). Every token decays the past, so a token can be
            masked, by v = 0, only before all others.
        impl: None, fused_chunk, whole_state, xl_chunk, limit_chunk, torch, parallel, recurrent or step, see engine.py;
            or the authors' algorithms, lightning1 and lightning2.
        chunk_size, state_dtype, return_last_state: see engine.py.
        initial_state: kv [B, H, K, V], float32 (float64 beside float64).
        cu_seqlens: bounds of packed documents [N + 1], with states of the N documents; see engine.py.
        scale: factor of q; None is 1, as published.
        options: see kernels/scalar_decay/engine.py; lightning1 and lightning2 take ``config``, their launches.

    Returns:
        o [B, T, H, V] in v's dtype, or (o, kv [B, H, K, V]); differentiable in all tensors (lightning1 and lightning2:
        in all but slope).

    Raises:
        ValueError: on an argument that does not fit; the message names it, what was expected and what came.
        TypeError: on an option that the implementation does not have.

    Source: Qin et al., Lightning Attention-2 (2024), the recursion below equation 3.
    """
    from ..scalar_decay import validate
    from ..scalar_decay.engine import scalar_decay

    validate.check_qkv(q, k, v)
    validate.check_head_constant("slope", slope, v)
    scale = 1.0 if scale is None else scale
    if impl in KERNELS:
        from ..common.arguments import without_tokens
        from ..scalar_decay.documents import check_documents
        from ..scalar_decay.reference import zero_state
        from .request import make_request

        if chunk_size is not None:
            raise ValueError(f"chunk_size must be None for {impl}, got {chunk_size}")
        if cu_seqlens is not None:
            check_documents(cu_seqlens, v, impl)
        request = make_request(q, k, v, slope, impl, state_dtype, initial_state, return_last_state, scale, options)
        if 0 in v.shape[:2]:
            first = zero_state(k, v, normalize=False) if initial_state is None else initial_state
            o, last = without_tokens(v, (q, k), first)
            return (o, last) if return_last_state else o
        run: Callable[..., tuple[Any, ...]]
        if impl == "lightning1":
            from .lightning1 import lightning1 as run
        else:
            from .lightning2 import LIGHTNING2 as run
        o, last = run(request, q, k, v, slope, initial_state)
        return (o, last) if return_last_state else o
    return scalar_decay(
        impl, q, k, v, lambda: ((-slope).expand(v.shape[:3]), None), gate="slope", head=slope,
        scale=scale, chunk_size=chunk_size, state_dtype=state_dtype,
        initial_state=initial_state, return_last_state=return_last_state, cu_seqlens=cu_seqlens, options=options,
    )  # fmt: skip


def slopes(num_heads: int) -> Tensor:
    """Return the decay rates [H] of the authors' models, those of ALiBi: 2^(-8 (h + 1) / H) for head h, in float64."""
    import torch

    return torch.exp2(-8.0 * torch.arange(1, num_heads + 1, dtype=torch.float64) / num_heads)


def make_inputs(draw: Draw) -> dict[str, Tensor]:
    """Draw inputs: v ~ N(0, 1), q and k ~ N(0, K^-1/2), so that scores are of order one; ALiBi's slopes."""
    shrink = draw.sizes["head_dim_qk"] ** -0.25
    return {
        "q": (shrink * draw.noise(*draw.keys)).to(draw.dtype),
        "k": (shrink * draw.noise(*draw.keys)).to(draw.dtype),
        "v": draw.normal(*draw.values),
        "slope": slopes(draw.sizes["num_heads"]).to(draw.device, draw.gate_dtype),
    }
