"""The delta rule of fla, FlashQLA, FlashInfer and cuDNN's front end."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ...results.schema import Case
from .flash_linear_attention import CHUNK_SIZE, GATED_BACKWARD
from .spec import Baseline, KnownBad, Runnable

if TYPE_CHECKING:
    from torch import Tensor

HEAD_DIM = 128
"""The only head dim, of keys and values, of FlashQLA, FlashInfer and cuDNN."""

MAX_KEY_DIM = 256
"""Of fla: the state's kernel asserts it."""

FUNCTIONS: Mapping[str, str] = {"delta_net": "delta_rule", "gated_delta_net": "gated_delta_rule", "kda": "kda"}
"""Operation -> fla's name for it."""

GROUPED = "; grouped heads as they are"

_delta = partial(Baseline, kernels=("delta",), dtypes=("bf16", "fp16"))
_here = "kernels.baselines.delta_rule"

_fla = partial(
    _delta,
    provider="fla",
    distribution="fla-core",
    tested="0.6.0",
    build=f"{_here}:build_fla",
    licence="MIT",
)

_flashinfer = partial(
    _delta,
    provider="flashinfer",
    distribution="flashinfer-python",
    tested="0.7.4",
    nvidia=True,
    why_not=f"{_here}:why_not_128",
    install="pip install 'flashinfer-python[cu13]==0.7.4'",
    licence="Apache-2.0",
)

_cudnn = partial(
    _delta,
    provider="cudnn",
    distribution="nvidia-cudnn-frontend",
    tested="1.32.0",
    build=f"{_here}:build_cudnn",
    nvidia=True,
    why_not=f"{_here}:why_not_128",
    documents=True,
    formulation="fused",
    install="pip install nvidia-cudnn-frontend==1.32.0",
    licence="Apache-2.0 and MIT",
)


def _not_on(*architectures: str, source: str) -> tuple[KnownBad, ...]:
    return (KnownBad(reason="it is not written for this GPU", source=source, architectures=architectures),)


_OLDER = ("7.0", "8.0", "8.6", "8.9")
"""Compute capabilities before Hopper."""


BASELINES = (
    *(
        _fla(
            name=f"fla.chunk_{FUNCTIONS[op]}",
            op=op,
            chunk_sizes=(CHUNK_SIZE,),
            formulation="chunkwise",
            states_as_inputs=True,
            documents=True,
            why_not=f"{_here}:why_not_fla{'_ungrouped' if op == 'delta_net' else ''}",
            known_bad=(GATED_BACKWARD,) if op == "gated_delta_net" else (),
            settings=f"chunk_{FUNCTIONS[op]} in fla's own Triton, no other package in its place; chunk 64 (its default)"
            + (GROUPED if op != "delta_net" else ""),
        )
        for op in FUNCTIONS
    ),
    *(
        _fla(
            name="fla.fused_recurrent",
            op=op,
            modes=("step",),
            dtypes=("bf16", "fp16", "fp32"),
            why_not=f"{_here}:why_not_fla_ungrouped" if op == "delta_net" else None,
            settings=f"fused_recurrent_{FUNCTIONS[op]}, from the state in float32, the new state returned",
        )
        for op in FUNCTIONS
    ),
    _delta(
        name="flash_qla.chunk_gated_delta_rule",
        provider="flash_qla",
        distribution="flash-qla",
        tested="0.1.3",
        op="gated_delta_net",
        build=f"{_here}:build_flash_qla",
        nvidia=True,
        own_chunk=CHUNK_SIZE,
        formulation="fused",
        documents=True,
        why_not=f"{_here}:why_not_128",
        known_bad=_not_on(*_OLDER, source="flash-qla 0.1.3, ops/gated_delta_rule/chunk/__init__.py"),
        settings="chunk_gated_delta_rule; whether it cuts a sequence into pieces (auto_cp) is its own choice, as by "
        f"default; chunk 64 (fixed){GROUPED}",
        licence="MIT",
    ),
    _flashinfer(
        name="flashinfer.chunk_gated_delta_rule",
        op="gated_delta_net",
        build=f"{_here}:build_flashinfer",
        modes=("fw",),
        own_chunk=CHUNK_SIZE,
        formulation="fused",
        documents=True,
        known_bad=_not_on("7.0", source="flashinfer-python 0.7.4, gdn_prefill.py"),
        settings="chunk_gated_delta_rule on packed tokens with decays exp(g) taken beforehand, as it asks for; backend "
        f"and use_cp are its own choice, as by default, max_seqlen is given; no backward pass{GROUPED}",
    ),
    _flashinfer(
        name="flashinfer.gated_delta_rule_decode",
        op="gated_delta_net",
        build=f"{_here}:build_flashinfer_step",
        modes=("step",),
        known_bad=_not_on(*_OLDER, source="flashinfer-python 0.7.4, gdn_decode.py"),
        settings="gated_delta_rule_decode, state [K, V] in float32, overwritten; it takes the gates' pre-activations, "
        "which are computed beforehand and rounded to the activations' dtype",
    ),
    _flashinfer(
        name="flashinfer.recurrent_kda",
        op="kda",
        build=f"{_here}:build_flashinfer_step",
        modes=("step",),
        dtypes=("bf16",),
        known_bad=_not_on(*_OLDER, source="flashinfer-python 0.7.4, kda_decode.py"),
        settings="recurrent_kda, state [V, K], overwritten, decays and rates, all in bf16: it takes no other. "
        "Bytes are counted as of a state in float32",
    ),
    _cudnn(
        name="cudnn.gated_delta_net",
        op="gated_delta_net",
        own_chunk=64,
        known_bad=(
            KnownBad(
                reason="its kernels are Blackwell's; for other GPUs it has cuTile's, which need CUDA 13.3",
                source="nvidia-cudnn-frontend 1.32.0: no engine proposed a plan on an H200 with CUDA 13.0",
                architectures=(*_OLDER, "9.0"),
            ),
        ),
        settings="gated_delta_net on packed tokens, the engine that it chooses",
    ),
    _cudnn(
        name="cudnn.kimi_delta_attention",
        op="kda",
        dtypes=("bf16",),
        own_chunk=16,
        known_bad=_not_on(*_OLDER, source="nvidia-cudnn-frontend 1.32.0, linear_attention/hopper/cuda_engine.py"),
        settings="kimi_delta_attention on packed tokens, the engine that it chooses: on Hopper kda_hopper_cuda, "
        "in chunks of 16 (fixed). There its backward pass takes no grouped heads, and a chunk whose log decays sum to "
        "less than -87 in a channel is NaN",
    ),
)


def why_not_fla(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why fla's chunked kernels cannot run these sizes, or None."""
    if sizes["head_dim_qk"] > MAX_KEY_DIM:
        return f"head_dim_qk must be at most {MAX_KEY_DIM}, got {sizes['head_dim_qk']}"
    return None


def why_not_fla_ungrouped(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """The same of those without a decay, which take as many heads of queries and keys as of values."""
    if sizes.get("num_heads_qk"):
        return f"num_heads_qk must be None or num_heads, {sizes['num_heads']}, got {sizes['num_heads_qk']}"
    return why_not_fla(sizes, dtype, state_dtype)


def why_not_128(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why kernels of one head dim cannot run these sizes, or None."""
    for name in ("head_dim_qk", "head_dim_v"):
        if sizes[name] != HEAD_DIM:
            return f"{name} must be {HEAD_DIM}, got {sizes[name]}"
    return None


def build_fla(case: Case, inputs: Mapping[str, Tensor], state: Tensor | None = None) -> Runnable:
    """Prepare fla's chunked function, or of a step its recurrent one.

    fla hands calls to FlashQLA and TileLang where those are installed; its row is to be its own kernels everywhere.
    """
    from ._tensors import on_leaves, with_bounds

    os.environ.update(FLA_FLASH_QLA="0", FLA_TILELANG="0")
    module = importlib.import_module(f"fla.ops.{FUNCTIONS[case.op]}")
    if state is None:
        return on_leaves(with_bounds(getattr(module, case.impl.removeprefix("fla.")), case, inputs), inputs)
    step = getattr(module, f"fused_recurrent_{FUNCTIONS[case.op]}")
    return on_leaves(partial(step, initial_state=state, output_final_state=True), inputs)


def build_flash_qla(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare FlashQLA's function, whose arguments are fla's."""
    from flash_qla import chunk_gated_delta_rule

    from ._tensors import on_leaves, with_bounds

    return on_leaves(with_bounds(chunk_gated_delta_rule, case, inputs), inputs)


def build_flashinfer(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare FlashInfer's chunked function, which takes decays, not their logarithms."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    from ...results.documents import lengths_of

    seq_len = case.seq_len or 0
    longest = max(lengths_of(case.documents, seq_len)) if case.documents else seq_len
    return _on_packed(
        partial(chunk_gated_delta_rule, max_seqlen=longest), case, {**inputs, "g": inputs["g"].detach().exp()}
    )


def build_cudnn(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare the operation of cuDNN's front end that the baseline is named for."""
    package = importlib.import_module("cudnn.linear_attention")
    return _on_packed(getattr(package, case.impl.removeprefix("cudnn.")), case, inputs)


def _on_packed(call: Callable[..., Any], case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare a call that takes a batch as packed documents: tensors [B T, ...] and ``cu_seqlens`` in int32."""
    import torch

    from ..common.inputs import bounds_of
    from ._tensors import as_leaf

    shape, device = inputs["q"].shape[:2], inputs["q"].device
    if case.documents:
        bounds = bounds_of(case.documents, shape[1], device)
    else:
        bounds = torch.arange(0, shape.numel() + 1, shape[1], dtype=torch.int32, device=device)
    leaves = {name: as_leaf(tensor.flatten(0, 1)) for name, tensor in inputs.items()}

    def forward() -> Tensor:
        out = call(**leaves, cu_seqlens=bounds)
        return out[0] if isinstance(out, tuple) else out

    return Runnable(forward=forward, leaves=leaves, to_canonical=lambda name, tensor: tensor.unflatten(0, shape))


def build_flashinfer_step(case: Case, inputs: Mapping[str, Tensor], state: Tensor) -> Runnable:
    """Prepare FlashInfer's step of Gated DeltaNet or KDA.

    The first computes g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b): with A_log = dt_bias = 0, a is the
    inverse softplus of -g and b the logit of beta.
    """
    import torch

    q, k, v, g, beta = (tensor.detach() for tensor in inputs.values())
    if case.op == "kda":
        from flashinfer.kda import recurrent_kda

        gates, held = (g.to(q.dtype), beta.to(q.dtype)), state.mT.to(q.dtype).contiguous()
        call = partial(recurrent_kda, q, k, v, *gates, initial_state=held, use_qk_l2norm_in_kernel=False)
    else:
        from flashinfer.gdn_decode import gated_delta_rule_decode

        a, b = (x.to(q.dtype) for x in (torch.log(-torch.expm1(g)) - g, torch.logit(beta)))
        zeros = torch.zeros(v.shape[2], device=v.device)
        call = partial(gated_delta_rule_decode, q, k, v, state, zeros, a, zeros, b, use_qk_l2norm=False)
    return Runnable(forward=lambda: call()[0], leaves=dict(inputs))
