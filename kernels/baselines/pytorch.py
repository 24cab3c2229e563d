"""PyTorch's own: attention with its fused backends, recurrences over channels and gated MLPs, eager and compiled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ...results.schema import Case
from .spec import Baseline, Runnable

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEAD_DIM_FLASH = 256
MAX_HEAD_DIM_CUDNN = 128

LEAVES: Mapping[str, tuple[str, ...]] = {
    "rglru": ("x", "r", "i", "c"),
    "rglru_layer": ("x", "w_a", "w_x", "c"),
    "linear_scan": ("x", "a"),
}
"""Operation -> its arguments, all of which get a gradient."""

LINE_BY_LINE: Mapping[str, str] = {"rglru": "lines", "rglru_layer": "unfused", "linear_scan": "scan"}
"""Operation -> the formulation (kernels.common.spec.Counted) of its eager form, in which every line is a kernel."""

_torch = partial(Baseline, provider="torch", distribution="torch", tested="2.11.0", licence="BSD-3-Clause")
_attention = partial(
    _torch,
    build="kernels.baselines.pytorch:build_attention",
    op="attention",
    formulation="flash",
    kernels=("tfla", "lightning", "rglru", "delta"),
    own_sizes=True,
    modes=("fw", "fwbw", "bw", "step"),
    autotunes=False,
)
_LAYOUT = (
    "is_causal, heads of 128; [B, H, T, D] views of [B, T, H, D] memory, the layout a model's projections leave behind"
    "; a step copies its key and value into a cache of that layout, then attends to all of it"
)
_channels = partial(_torch, kernels=("rglru",), dtypes=("bf16", "fp16", "fp32"))
_mlp = partial(_torch, kernels=("gated-mlp",), dtypes=("bf16", "fp16", "fp32"))

BASELINES = (
    _attention(
        name="torch.sdpa_flash",
        why_not="kernels.baselines.pytorch:why_not_flash",
        dtypes=("bf16", "fp16"),
        documents=True,
        settings=f"SDPBackend.FLASH_ATTENTION (FlashAttention-2), {_LAYOUT}; of documents torch.nn.attention.varlen's "
        "varlen_attn, which runs the same kernel on [T, H, D]",
    ),
    _attention(
        name="torch.sdpa_cudnn",
        why_not="kernels.baselines.pytorch:why_not_cudnn",
        nvidia=True,
        dtypes=("bf16", "fp16"),
        settings=f"SDPBackend.CUDNN_ATTENTION, {_LAYOUT}",
    ),
    _attention(
        name="torch.sdpa_cpu",
        why_not="kernels.baselines.pytorch:why_not_cpu",
        dtypes=("fp32", "bf16"),
        devices=("cpu",),
        settings=f"SDPBackend.FLASH_ATTENTION (torch's blocked CPU kernel), {_LAYOUT}",
    ),
    *(
        _channels(
            name="torch.eager",
            op=op,
            formulation=formulation,
            build="kernels.baselines.pytorch:build_channels",
            settings=(
                "the listing of the layer in eager torch, a loop over time for the recurrence; decays and states in "
                "float32, all else in the activations' dtype, as in RecurrentGemma's torch code"
            ),
        )
        for op, formulation in LINE_BY_LINE.items()
    ),
    *(
        _channels(
            name="torch.compile",
            op=op,
            build="kernels.baselines.pytorch:build_channels",
            settings="torch.compile, static shapes, one graph, of the gates and the associative scan in log2(T) passes",
        )
        for op in LEAVES
    ),
    _mlp(
        name="torch.eager",
        op="gated_mlp",
        formulation="eager",
        build="kernels.baselines.pytorch:build_mlp",
        settings="silu(x @ w_gate) * (x @ w_up): cuBLAS, and a kernel each for the activation and the product",
    ),
    _mlp(
        name="torch.compile",
        op="gated_mlp",
        formulation="gemms_activation",
        build="kernels.baselines.pytorch:build_mlp",
        settings="torch.compile (static shapes) of the eager form: cuBLAS twice and one kernel for the gating",
    ),
    _mlp(
        name="torch.inplace",
        op="gated_mlp",
        formulation="gemms_activation",
        build="kernels.baselines.pytorch:build_in_place",
        modes=("fw",),
        settings="cuBLAS twice, then one compiled kernel writes silu(gate) * up over up: two tensors [M, F], as in the "
        "cuBLAS + Unsloth form of the page on fused gated MLPs",
    ),
    _mlp(
        name="torch.gemms",
        op="projections",
        formulation="gemms",
        build="kernels.baselines.pytorch:build_products",
        modes=("fw",),
        settings="cuBLAS alone: the two products without activation and gating, which is not the same result",
    ),
)


def why_not_cpu(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why torch's blocked CPU kernel cannot run these sizes, or None."""
    if sizes["head_dim_qk"] != sizes["head_dim_v"]:
        return f"head_dim_qk must equal head_dim_v, got {sizes['head_dim_qk']} and {sizes['head_dim_v']}"
    return None


def why_not_flash(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why FlashAttention-2 cannot run these sizes, or None."""
    if sizes["head_dim_v"] > MAX_HEAD_DIM_FLASH:
        return f"head_dim_v must be at most {MAX_HEAD_DIM_FLASH}, got {sizes['head_dim_v']}"
    return why_not_cpu(sizes, dtype, state_dtype)


def why_not_cudnn(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why cuDNN's attention cannot run these sizes, or None."""
    for name in ("head_dim_qk", "head_dim_v"):
        if sizes[name] % 8 or sizes[name] > MAX_HEAD_DIM_CUDNN:
            return f"{name} must be a multiple of 8 up to {MAX_HEAD_DIM_CUDNN}, got {sizes[name]}"
    return None


def build_attention(case: Case, inputs: Mapping[str, Tensor], cache: tuple[Tensor, ...] = ()) -> Runnable:
    """Prepare causal SDPA restricted to one backend; a step's query attends to all of the cache, its token last."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from ._tensors import on_documents, on_leaves

    if case.documents is not None:
        # Since torch 2.10.
        from torch.nn.attention.varlen import varlen_attn

        # Releases that know windows have no is_causal.
        windows = "window_size" in inspect.signature(varlen_attn).parameters
        causal: Any = {"window_size": (-1, 0)} if windows else {"is_causal": True}
        names = ("cu_seq_q", "cu_seq_k", "max_q", "max_k")
        return on_leaves(on_documents(partial(varlen_attn, **causal), case, inputs, names), inputs)
    only = SDPBackend.CUDNN_ATTENTION if case.impl == "torch.sdpa_cudnn" else SDPBackend.FLASH_ATTENTION

    def attention(**leaves: Tensor) -> Tensor:
        q, *pair = leaves.values()
        for kept, new in zip(cache, pair, strict=bool(cache)):
            kept[:, -1:] = new
        q, k, v = (x.transpose(1, 2) for x in (q, *(cache or pair)))
        with sdpa_kernel(only):
            return scaled_dot_product_attention(q, k, v, is_causal=not cache).transpose(1, 2)

    return on_leaves(attention, inputs)


def elements(op: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return log a in float32 (of the linear scan: a) and b [B, T, C] in x's dtype; each line of the layer's listing is
    a kernel. 1 - a^2 is taken by expm1, since autograd divides by its root."""
    import torch
    from torch.nn.functional import softplus

    if op == "linear_scan":
        return tensors["a"].float(), tensors["x"]
    x = tensors["x"]
    r, i = (x @ tensors["w_a"], x @ tensors["w_x"]) if op == "rglru_layer" else (tensors["r"], tensors["i"])
    log_a = -8.0 * torch.sigmoid(r) * softplus(tensors["c"])
    root = torch.sqrt(-torch.expm1(2.0 * log_a))
    return log_a, (x * torch.sigmoid(i)) * root.to(x.dtype)


def build_channels(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare gates and recurrence: eager with a loop over time, or compiled with the associative scan."""

    from ..rglru.reference import associative, recurrent
    from ._tensors import on_leaves

    compiled = case.impl == "torch.compile"
    scan = associative if compiled else recurrent

    def run(**tensors: Tensor) -> Tensor:
        decay, b = elements(case.op, tensors)
        a = decay if case.op == "linear_scan" else decay.exp()
        return scan(a, b.float(), None)[0].to(b.dtype)

    return on_leaves(_compiled(run, fullgraph=True) if compiled else run, inputs, *LEAVES[case.op])


def _compiled(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    """Return the function compiled for static shapes, which happens when it is first called.

    The reset is needed because what an earlier case compiled counts towards the limit of recompilations, beyond which
    torch would run this case eagerly.
    """
    import torch

    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, **options)


def eager(x: Tensor, w_up: Tensor, w_gate: Tensor) -> Tensor:
    """Return silu(x W_gate) * (x W_up), one kernel a line."""
    from torch.nn.functional import silu

    return silu(x @ w_gate) * (x @ w_up)


def build_mlp(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare the eager form, or what torch.compile makes of it when it is first called."""
    from ._tensors import on_leaves

    return on_leaves(_compiled(eager) if case.impl == "torch.compile" else eager, inputs)


def gate_in_place(up: Tensor, gate: Tensor) -> Tensor:
    """Write silu(gate) * up over up and return it."""
    from torch.nn.functional import silu

    return up.mul_(silu(gate))


def build_in_place(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare the two products and the gating, compiled when it is first called."""
    leaves = {name: tensor.detach() for name, tensor in inputs.items()}
    x, gating = leaves["x"], _compiled(gate_in_place)
    return Runnable(forward=lambda: gating(x @ leaves["w_up"], x @ leaves["w_gate"]), leaves=leaves)


def build_products(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare the two products, into the halves of one tensor [2, M, F]."""
    import torch

    x, w_up, w_gate = (tensor.detach() for tensor in inputs.values())

    def forward() -> Tensor:
        both = x.new_empty(2, x.shape[0], w_up.shape[1])
        torch.mm(x, w_up, out=both[0])
        torch.mm(x, w_gate, out=both[1])
        return both

    return Runnable(forward=forward, leaves={"x": x, "w_up": w_up, "w_gate": w_gate})
