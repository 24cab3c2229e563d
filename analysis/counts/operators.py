"""FLOPs of calls of our operators, for torch's FlopCounterMode (kernels/common/differentiable.py asks; no torch here).

A call has the ``flops`` of its case, see :func:`.problem.count_case`. If it names no chunk length, it is counted at the
one that it would take on an H200. Packed documents are counted as one sequence of their total length: their bounds are
not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...kernels.baselines import get_operation
from ...kernels.scalar_decay.declare import SCHEMES
from .problem import count_case

OF_GATE = {
    "sig": "mlstm_sig", "exp": "mlstm_exp", "log": "simple_gla", "tau": "gated_retention", "slope": "retention",
    "ssd": "mamba2_ssd",
}  # fmt: skip
"""How the engine's kernels make the decay (``GATE`` in gates.py) -> the operation."""

DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32", "torch.float64": "fp64"}

OF_VALUES = ("batch", "seq_len", "num_heads", "head_dim_v")
"""Sizes of v [B, T, H, V]."""

WITHOUT_PRODUCTS = ("diagonal_recurrence", "wkv4")
"""Operators over channels, which multiply no matrices."""


def flops(name: str, mode: str, request: Any, tensors: Sequence[Any]) -> int:
    """Return the FLOPs of a call; 0 for an operator that is not counted.

    Args:
        name: of the ``Differentiable``, or of its decoding step.
        mode: fw or bw, which is the whole backward pass, whichever gradients are asked for.
        request, tensors: that it is called with.
    """
    of, dtype = name.removesuffix("_step"), DTYPES[str(tensors[0].dtype)]
    op, impl, of_first = of, getattr(request, "impl", "fused"), tuple(map(int, tensors[0].shape))
    if of in WITHOUT_PRODUCTS:
        op = getattr(request, "op", of)
        sizes = dict(zip(("batch", "seq_len", "channels"), of_first, strict=True))
    elif of == "gated_mlp":
        sizes = {"batch": 1, "seq_len": of_first[0], "d_model": of_first[1], "d_ff": int(tensors[1].shape[1])}
    elif of in ("delta_rule", "delta_rule_by_channel"):
        sizes = dict(zip(OF_VALUES, map(int, tensors[2].shape), strict=True))
        sizes |= {"num_heads_qk": of_first[2], "head_dim_qk": of_first[3]}
        dims = {None: "delta_net", 3: "gated_delta_net", 4: "kda"}
        op, impl = dims[None if tensors[3] is None else tensors[3].dim()], "whole_state" if name == of else "step"
    elif of in ("scalar_decay", "lightning1", "lightning2"):
        sizes = dict(zip(OF_VALUES, map(int, tensors[2].shape), strict=True)) | {"head_dim_qk": of_first[3]}
        # Lightning is retention without a factor of q.
        gate = getattr(request, "gate", "slope")
        op = "lightning" if gate == "slope" and (request.scale == 1 or of != "scalar_decay") else OF_GATE[gate]
        if of == "scalar_decay":
            impl = next((impl for impl, scheme in SCHEMES.items() if scheme == request.scheme), "step")
    else:
        return 0
    if name == of:
        own = get_operation(op).implementation(impl).chosen_chunk(sizes, dtype)
        if chosen := getattr(request, "chunk_size", None) or own:
            sizes["chunk_size"] = chosen
    count = count_case(op, impl, mode if name == of else "step", dtype, None, sizes, launches=False)
    return 0 if count is None else round(count.flops)
