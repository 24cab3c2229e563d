"""FLOPs of calls of our operators: what torch's FlopCounterMode counts for them.

A call has the ``flops`` of its case, see :func:`.problem.count_case`. A call that names no chunk length is counted at
the one that it would take on an H200. kernels/common/differentiable.py asks; nothing of torch is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...kernels.scalar_decay.declare import SCHEMES
from .formulations import declared
from .problem import count_case

OF_GATE = {
    "sig": "mlstm_sig", "exp": "mlstm_exp", "log": "simple_gla", "tau": "gated_retention", "slope": "retention",
    "ssd": "mamba2_ssd",
}  # fmt: skip
"""How the engine's kernels make the decay (``GATE`` in gates.py) -> the operation."""

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}

Call = tuple[str, str, dict[str, int]]
"""An operation, an implementation, and sizes."""


def flops(name: str, mode: str, request: Any, tensors: tuple[Any, ...]) -> int:
    """Return the FLOPs of a call; 0 for an operator that is not counted.

    Args:
        name: of the ``Differentiable``.
        mode: fw or bw, which is the whole backward pass, whichever gradients are asked for.
        request, tensors: that it is called with.
    """
    of, step = name.removesuffix("_step"), name.endswith("_step")
    if of not in _CALLS:
        return 0
    op, impl, sizes = _CALLS[of](request, *tensors)
    dtype = DTYPES[str(tensors[0].dtype).removeprefix("torch.")]
    chunk = None if step else getattr(request, "chunk_size", None) or declared(op, impl).chosen_chunk(sizes, dtype)
    count = count_case(
        op, impl, "step" if step else mode, dtype, None, {**sizes, **({"chunk_size": chunk} if chunk else {})},
        launches=False,
    )  # fmt: skip
    return 0 if count is None else round(count.flops)


def _heads(q: Any, v: Any) -> dict[str, int]:
    batch, seq_len, heads, head_dim_v = map(int, v.shape)
    names = ("batch", "seq_len", "num_heads", "head_dim_qk", "head_dim_v")
    return dict(zip(names, (batch, seq_len, heads, int(q.shape[3]), head_dim_v), strict=True))


def _channels(x: Any) -> dict[str, int]:
    return dict(zip(("batch", "seq_len", "channels"), map(int, x.shape), strict=True))


def _engine(request: Any, q: Any, k: Any, v: Any, *_: Any) -> Call:
    # Lightning is retention without a factor of q.
    op = "lightning" if request.gate == "slope" and request.scale == 1 else OF_GATE[request.gate]
    return op, next((impl for impl, scheme in SCHEMES.items() if scheme == request.scheme), "step"), _heads(q, v)


def _lightning(request: Any, q: Any, k: Any, v: Any, *_: Any) -> Call:
    return "lightning", request.impl, _heads(q, v)


def _gated_mlp(request: Any, x: Any, w_up: Any, w_gate: Any) -> Call:
    (tokens, d_model), d_ff = map(int, x.shape), int(w_up.shape[1])
    return "gated_mlp", "fused", {"batch": 1, "seq_len": tokens, "d_model": d_model, "d_ff": d_ff}


_CALLS: Mapping[str, Callable[..., Call]] = {
    "scalar_decay": _engine,
    "lightning1": _lightning,
    "lightning2": _lightning,
    "diagonal_recurrence": lambda request, x, *_: (request.op, request.impl, _channels(x)),
    "wkv4": lambda request, k, *_: ("wkv4", request.impl, _channels(k)),
    "gated_mlp": _gated_mlp,
}
"""Name of a ``Differentiable`` -> (request, its tensors) -> the call."""
