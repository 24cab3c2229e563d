"""The request of a call of lightning1 or lightning2 (common/remember.py), made of checked arguments; its launches for
the output and the gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.arguments import CASE_DTYPES, check_on_gpu, check_state_dtype, resolve_scale, score_headroom
from ..common.device import capability
from ..common.differentiable import Differentiable, Tensors, contiguous_like
from ..scalar_decay.validate import check_initial_state
from .config import LightningConfig, invalid_reason, select_config, why_not


class LightningRequest(NamedTuple):
    """What a call asks for, see :func:`.lightning`; ``scale``: its own divided by ``headroom`` (score_headroom)."""

    impl: str
    scale: float
    headroom: float
    want_last: bool
    config: LightningConfig | None


def make_request(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slope: Tensor,
    impl: str,
    state_dtype: torch.dtype | None,
    initial_state: Tensor | None,
    want_last: bool,
    scale: float,
    options: Mapping[str, Any],
) -> LightningRequest:
    """Return the request of a call; raise ValueError or TypeError on arguments that only these two ``impl`` refuse."""
    for name in options:
        if name != "config":
            raise TypeError(f"{name} is no option of {impl}")
    config = options.get("config")
    if not isinstance(config, LightningConfig | None):
        raise ValueError(f"config must be a LightningConfig, got a {type(config).__name__}")
    check_state_dtype(torch.float32 if state_dtype is None else state_dtype)
    check_initial_state(initial_state, k, v, normalize=False)
    check_kernel_support(q, v)
    if torch.is_grad_enabled() and slope.requires_grad:
        raise ValueError(f"slope must not require a gradient for {impl}: only q, k, v and the state get one")
    scale = resolve_scale(scale, q.shape[3])
    headroom = score_headroom(scale, q.shape[3], q.dtype)
    return LightningRequest(impl, scale / headroom, headroom, want_last, config)


def check_kernel_support(q: Tensor, v: Tensor) -> None:
    """Raise ValueError on a device or head dim that the kernels do not take."""
    check_on_gpu("v", v)
    if reason := why_not({"head_dim_qk": q.shape[3], "head_dim_v": v.shape[3]}, "", None):
        raise ValueError(reason)


def launches(request: LightningRequest, q: Tensor, v: Tensor) -> LightningConfig:
    """Return the launches for a request; raise ValueError unless they are valid."""
    config, device = request.config, capability(v.device)
    if config is None:
        names = ("batch", "num_heads", "head_dim_qk", "head_dim_v")
        sizes = dict(zip(names, (v.shape[0], v.shape[2], q.shape[3], v.shape[3]), strict=True))
        config = select_config(sizes, CASE_DTYPES[v.dtype], device, True, impl=request.impl)
    if reason := invalid_reason(config, impl=request.impl, capability=device, item_bytes=v.element_size()):
        raise ValueError(f"config: {reason}")
    return config


def four_launches(name: str, run: Callable[..., tuple[Tensor, Tensor | None]]) -> Differentiable:
    """Return o and the last KV of ``name``, with gradients of q, k, v and the initial KV; only the inputs are saved.

    Args:
        run: (config, request, x, y, z, slope, state, future, transposed, want_state) -> the output like z, and the last
            state or None: see :func:`.lightning2.run_loop`.
    """

    def forward(request: LightningRequest, *tensors: Any) -> tuple[Tensors, Tensors]:
        config = launches(request, tensors[0], tensors[2])
        return run(config.output, request, *tensors, want_state=request.want_last), ()

    def shapes(request: LightningRequest, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensors, Tensors]:
        last = v.new_empty(v.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)
        return (contiguous_like(v), last if request.want_last else None), ()

    def backward(
        request: LightningRequest, needs: tuple[bool, ...], tensors: Tensors, saved: Tensors, gradients: Tensors
    ) -> Tensors:
        q, k, v, slope, initial = tensors
        do, d_last = gradients
        config = launches(request, q, v)
        do = v.new_zeros(v.shape) if do is None else do
        dq, _ = run(config.dq, request, do, v, k, slope, initial, transposed=True)
        dk, _ = run(config.dk, request, v, do, q, slope, d_last, future=True, transposed=True)
        dv, d_initial = run(config.dv, request, k, q, do, slope, d_last, future=True, want_state=needs[4])
        return dq, dk, dv, None, d_initial

    return Differentiable(
        name, request=LightningRequest, tensors=("q", "k", "v", "slope", "initial_state?"), outputs=("o", "kv"),
        strided=3, forward=forward, backward=backward, shapes=shapes,
    )  # fmt: skip
