"""JAX: WKV by jax.lax.associative_scan, compiled by XLA, between torch tensors that share memory with JAX's arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...results.schema import Case
from ..common.cache import cache_folder
from .spec import Baseline, Runnable

if TYPE_CHECKING:
    from torch import Tensor

BASELINES = (
    Baseline(
        name="jax.associative_scan",
        provider="jax",
        distribution="jax",
        tested="0.11.2",
        install="pip install 'jax[cuda13]' (on a CPU: pip install jax)",
        op="wkv4",
        formulation="scan",
        nvidia=True,
        kernels=("wkv",),
        build="kernels.baselines.jax_scan:build",
        torch_memory=False,
        dtypes=("fp32", "bf16", "fp16"),
        devices=("cpu", "cuda"),
        settings=(
            "jax.lax.associative_scan over (decay, num, den, max) in float32, jitted, gradients by jax.vjp; timed with "
            "its launch, since XLA runs on a queue of its own, and without its memory, which torch does not see"
        ),
        licence="Apache-2.0",
    ),
)


def build(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare the jitted scan and its vjp.

    Raises:
        RuntimeError: the inputs are on a GPU and this JAX has none.
    """
    # JAX would take most of the device's memory when it starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import torch

    from ..common.second_derivatives import gradients_once
    from ._tensors import on_leaves

    on_gpu = inputs["k"].is_cuda
    if on_gpu and jax.config.jax_compilation_cache_dir is None:
        # XLA compiles every length anew, for seconds: a cache on disk lets the processes that time find what others
        # have compiled ahead. Not on a CPU: code made for one may not run on another that shares the folder.
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "jax"))
    if on_gpu and jax.default_backend() != "gpu":
        raise RuntimeError("this jax has no GPU backend: pip install 'jax[cuda13]'")
    forward, with_vjp, apply_vjp = _compiled()

    def finished(tree: Any) -> Any:
        return jax.tree_util.tree_map(torch.from_dlpack, jax.block_until_ready(tree))

    def arrays(*tensors: Tensor) -> tuple[Any, ...]:
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return tuple(jax.dlpack.from_dlpack(tensor.detach().contiguous()) for tensor in tensors)

    class Scan(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            if not any(ctx.needs_input_grad):
                return finished(forward(*arrays(*tensors)))
            ctx.save_for_backward(*tensors)
            y, ctx.vjp = with_vjp(*arrays(*tensors))
            return finished(y)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
            def compute(dy: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
                return finished(apply_vjp(ctx.vjp, *arrays(dy)))

            return gradients_once("the vjp of jax has no derivative here", compute, dy, *ctx.saved_tensors)

    return on_leaves(lambda **leaves: Scan.apply(*leaves.values()), inputs, "k", "v", "w", "u")


def _compiled() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return the jitted forward pass, the same with its vjp, and the call of a vjp."""
    import jax
    import jax.numpy as jnp

    def add(earlier: Any, later: Any) -> Any:
        """The sum of two runs of tokens at the later one's end, on the larger exponent, a constant to gradients."""
        (decay1, num1, den1, top1), (decay2, num2, den2, top2) = earlier, later
        top1 = top1 - decay2
        top = jax.lax.stop_gradient(jnp.maximum(top1, top2))
        first, second = jnp.exp(top1 - top), jnp.exp(top2 - top)
        return decay1 + decay2, first * num1 + second * num2, first * den1 + second * den2, top

    def wkv(k: Any, v: Any, w: Any, u: Any) -> Any:
        keys, values = k.astype(jnp.float32), v.astype(jnp.float32)
        top = jax.lax.stop_gradient(keys)
        den = jnp.exp(keys - top)
        decay = jnp.broadcast_to(w, keys.shape)
        sums = jax.lax.associative_scan(add, (decay, den * values, den, top), axis=1)
        before = tuple(x[:, :-1] for x in sums)
        token = (jnp.zeros_like(w), values[:, 1:], jnp.ones_like(values[:, 1:]), u + keys[:, 1:])
        _, num, den, _ = add(before, token)
        return jnp.concatenate((values[:, :1], num / den), axis=1).astype(v.dtype)

    return jax.jit(wkv), jax.jit(lambda *inputs: jax.vjp(wkv, *inputs)), jax.jit(lambda vjp, dy: vjp(dy))
