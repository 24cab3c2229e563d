"""mamba-ssm: Mamba's selective scan (CUDA) and Mamba-2's chunked scan (Triton).

Both run on AMD's GPUs as well: state-spaces/mamba, README, section Additional Prerequisites for AMD cards.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ...results.documents import lengths_of
from ...results.schema import Case
from .spec import Baseline, Runnable

if TYPE_CHECKING:
    from torch import Tensor

MAX_STATE = 256

_mamba = partial(
    Baseline,
    provider="mamba_ssm",
    distribution="mamba-ssm",
    tested="2.3.2.post1",
    kernels=("tfla",),
    # mamba_ssm/__init__.py imports it, also for what is written in Triton.
    extension="selective_scan_cuda",
    install="pip install mamba-ssm==2.3.2.post1 --no-build-isolation",
    licence="Apache-2.0",
)

BASELINES = (
    _mamba(
        name="mamba_ssm.selective_scan",
        op="selective_scan",
        formulation="scan",
        build="kernels.baselines.mamba:build_selective_scan",
        own_sizes=True,
        why_not="kernels.baselines.mamba:why_not_selective_scan",
        dtypes=("bf16", "fp16", "fp32"),
        settings=(
            "selective_scan_fn without D, z and bias, delta already positive; A [D, 16] in float32; [B, D, T] and "
            "[B, N, T] layouts; 4096 channels at embedding 4096"
        ),
    ),
    _mamba(
        name="mamba_ssm.chunk_scan",
        op="mamba2_ssd",
        formulation="chunkwise",
        build="kernels.baselines.mamba:build_chunk_scan",
        module="mamba_ssm.ops.triton.ssd_combined",
        own_sizes=True,
        dtypes=("bf16", "fp16"),
        chunk_sizes=(256, 128, 64),
        documents=True,
        settings=(
            "mamba_chunk_scan_combined without D, z and bias, dt already positive and in float32; heads of 64, state "
            "128, one group of B and C and chunk 256 are the defaults of the Mamba2 layer; documents by seq_idx, made "
            "beforehand"
        ),
    ),
    *(
        _mamba(
            name="mamba_ssm.state_update",
            op=op,
            build="kernels.baselines.mamba:build_step",
            module="mamba_ssm.ops.triton.selective_state_update",
            own_sizes=True,
            why_not="kernels.baselines.mamba:why_not_selective_scan",
            modes=("step",),
            dtypes=("bf16", "fp16", "fp32"),
            settings=(
                "selective_state_update, state in float32, overwritten; step sizes already positive; D and the bias, "
                f"which it asks for, are zero{shared}"
            ),
        )
        for op, shared in (
            ("selective_scan", ""),
            ("mamba2_ssd", "; A, dt, D and bias expanded over the heads' columns, as in the Mamba2 layer"),
        )
    ),
)


def why_not_selective_scan(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why the selective scan cannot run these sizes, or None."""
    if sizes["head_dim_qk"] > MAX_STATE:
        return f"head_dim_qk (the state) must be at most {MAX_STATE}, got {sizes['head_dim_qk']}"
    return None


def build_selective_scan(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare selective_scan_fn on channel-first tensors."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    from ._tensors import as_heads_first, as_leaf, to_time_first

    leaves = {name: as_heads_first(inputs[name]) for name in ("u", "delta", "B", "C")}
    rates = as_leaf(inputs["A"])

    def forward() -> Tensor:
        return selective_scan_fn(leaves["u"], leaves["delta"], rates, leaves["B"], leaves["C"])

    def to_canonical(name: str, tensor: Tensor) -> Tensor:
        return tensor if name == "A" else to_time_first(name, tensor)

    return Runnable(forward=forward, leaves={**leaves, "A": rates}, to_canonical=to_canonical)


def build_chunk_scan(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare mamba_chunk_scan_combined; its layout is the operation's own, and documents are numbered by position."""
    import torch
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    from ._tensors import on_leaves

    given: dict[str, Any] = {"chunk_size": case.chunk_size or 256}
    if case.documents is not None:
        lengths = torch.tensor(lengths_of(case.documents, case.seq_len or 0))
        numbers = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)
        given["seq_idx"] = numbers[None].to(inputs["x"].device)
    return on_leaves(partial(mamba_chunk_scan_combined, **given), inputs)


def build_step(case: Case, inputs: Mapping[str, Tensor], state: Tensor) -> Runnable:
    """Prepare selective_state_update of Mamba on channels, or of Mamba-2 on heads with a state [B, H, P, N]."""
    import torch
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    x, dt, rates, b, c = (tensor.detach() for tensor in inputs.values())
    x, dt, b, c = (tensor[:, 0] for tensor in (x, dt, b, c))
    zeros = torch.zeros_like(rates[..., 0] if case.op == "selective_scan" else rates)
    if case.op == "mamba2_ssd":
        state, columns = state.mT.contiguous(), x.shape[-1]
        dt, zeros = dt[..., None].expand_as(x), zeros[:, None].expand(-1, columns)
        rates = rates[:, None, None].expand(-1, columns, b.shape[-1])

    def forward() -> Tensor:
        return selective_state_update(state, x, dt, rates, b, c, D=zeros, dt_bias=zeros)[:, None]

    return Runnable(forward=forward, leaves=dict(inputs))
