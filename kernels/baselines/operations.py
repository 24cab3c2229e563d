"""Operations that baselines compute and lrbench has no kernels for: declarations, data only.

Each has a plain torch reference beside it (:mod:`.references`), so that these baselines are checked before they are
timed like any other. An operation that gets kernels of its own moves to ``kernels/``.
"""

from __future__ import annotations

from ..common.spec import LANGUAGE_MODELS, XLSTM_MODELS, Operation

ATTENTION = Operation(
    name="attention",
    kernel="attention",
    label="attention",
    summary="causal softmax attention: h_t = sum_{s <= t} softmax_s(K^-1/2 q_t.k_s) v_s",
    arguments=("q", "k", "v"),
    differentiable=("q", "k", "v"),
    inputs="kernels.baselines.references:make_attention_inputs",
    recurrent="kernels.baselines.references:attention_recurrent",
    parallel="kernels.baselines.references:attention",
    cache="kernels.baselines.references:make_attention_cache",
    # What FlashAttention is tuned for.
    head_dim=128,
    formulations=("flash", "recurrent"),
    models={**XLSTM_MODELS, **LANGUAGE_MODELS},
)

GLA = Operation(
    name="gla",
    kernel="gla",
    label="GLA",
    summary="gated linear attention: S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T, h_t = K^-1/2 S_t^T q_t",
    arguments=("q", "k", "v", "g"),
    differentiable=("q", "k", "v", "g"),
    inputs="kernels.baselines.references:make_gla_inputs",
    recurrent="kernels.baselines.references:gla_recurrent",
    # As its paper's model of 1.3B parameters has them.
    head_dim=512,
    qk_ratio=0.5,
    formulations=("chunkwise", "fused", "recurrent"),
)

SELECTIVE_SCAN = Operation(
    name="selective_scan",
    kernel="selective_scan",
    label="Mamba",
    summary="Mamba: x_t = exp(delta_t A) x_{t-1} + delta_t B_t u_t, y_t = C_t.x_t per channel",
    arguments=("u", "delta", "A", "B", "C"),
    differentiable=("u", "delta", "A", "B", "C"),
    inputs="kernels.baselines.references:make_selective_scan_inputs",
    recurrent="kernels.baselines.references:selective_scan_recurrent",
    sizes=("batch", "seq_len", "head_dim_qk", "channels"),
    # Mamba's state by default, of each channel.
    state_dim=16,
    formulations=("scan", "recurrent"),
    counts="analysis.counts.baselines:selective_scan",
)

OPERATIONS: dict[str, Operation] = {op.name: op for op in (ATTENTION, GLA, SELECTIVE_SCAN)}
