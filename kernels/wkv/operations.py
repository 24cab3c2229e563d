"""RWKV-4's WKV: the public function."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.arguments import check_three, refuse_transforms, without_tokens
from ..common.calls import remember_calls
from ..common.channel_tensors import check_channels, portable_chunk_size, runs_kernels
from . import OPERATION, portable
from .config import WkvConfig
from .reference import State, associative, first_state, run_documents


@remember_calls
def wkv4(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    impl: str = "scan",
    chunk_size: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    initial_state: State | None = None,
    return_last_state: bool = False,
    cu_seqlens: Tensor | None = None,
    config: WkvConfig | None = None,
) -> Tensor | tuple[Tensor, State]:
    """Compute WKV, the mean of the values so far, weighted by exp(key) that decays over time.

        y_t = (num_{t-1} + e^(u + k_t) v_t) / (den_{t-1} + e^(u + k_t))
        num_t = e^-w num_{t-1} + e^k_t v_t        den_t = e^-w den_{t-1} + e^k_t

    Args:
        k, v: [B, T, C]; float32, float16 or bfloat16, for the forms in torch float64 too. C is a multiple of 8 for the
            kernels, which read slices of one projection as they are: whose last stride is 1, and others multiples of
            8. They copy others. A key of minus infinity leaves its token out, but the past decays all the same, so
            only before all others is the token masked.
        w: [C], positive, float32 (float64 beside float64 inputs); a step decays the past by e^-w.
        u: [C], bonus of the current token, in w's dtype.
        impl: ``scan``, one pass over memory, time split over programs; ``naive``, where one program walks all of
            time for a block of channels; ``torch``, plain torch, chunk by chunk; ``associative_scan`` and
            ``torch_associative_scan``, scans over whole tensors, the second by torch's prototype operator; ``step``, a
            decoding step (T = 1), which is not differentiable.
        chunk_size: steps, for ``torch``; at least 1, need not divide T; None chooses one.
        state_dtype: must be float32; beside float64 inputs states are float64 all the same.
        initial_state: (num, den, max) [B, C] in w's dtype, which stand for num e^max and den e^max; None is the state
            before the first token. max carries no gradient.
        return_last_state: also return (num, den, max) after the last token.
        cu_seqlens: bounds of N packed documents [N + 1], int32 or int64: document n is positions cu_seqlens[n] to
            cu_seqlens[n + 1], rising from 0 to T, of a batch of 1. Results are those of each document alone, and states
            [N, C]. The kernels read it on the GPU: it may change in a CUDA graph, and its values are not checked; an
            infinite state reaches the next document as nan, and initial states cost ``scan`` time where a document
            begins. The forms in torch take one document after the other; ``step`` takes none.
        config: launches of the kernels; chosen for the device when None.

    Returns:
        y [B, T, C] in v's dtype, or (y, (num, den, max)), each [B, C]; differentiable in all tensors but max: kernels
        once, other forms any number of times.

    Raises:
        ValueError: on an argument that ``impl`` does not take; the message names it, what was expected and what came.

    Source: Peng et al., RWKV (2023), equations 16 and 22 to 26.
    """
    if initial_state is not None:
        check_three(initial_state, "num, den, max")
    names = ("initial_state num", "initial_state den", "initial_state max")
    states = dict(zip(names, initial_state or (None,) * 3, strict=True))
    check_channels({"k": k, "v": v}, {"w": w, "u": u}, states, state_dtype, cu_seqlens, OPERATION, impl)
    is_kernel = runs_kernels(OPERATION, impl, "k", k, chunk_size=chunk_size, config=config)
    if 0 in k.shape[:2]:
        y, last = without_tokens(v, (k, w, u), first_state(k, initial_state, cu_seqlens))
        return (y, last) if return_last_state else y
    if is_kernel:
        # launch imports Triton, which the forms below do without.
        from .launch import STEP, WKV, WkvRequest

        num, den, top = initial_state or (None, None, None)
        # max is left out: it has no gradient, even if it requires one.
        save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (k, v, w, u, num, den))
        run, request = STEP if impl == "step" else WKV, WkvRequest(impl, return_last_state, save, config)
        y, num, den, top = run(request, k, v, w, u, num, den, top, cu_seqlens)
        return (y, (num, den, top)) if return_last_state else y
    k, v = k.contiguous(), v.contiguous()
    if impl == "torch":
        refuse_transforms("k")

    def form(k: Tensor, v: Tensor, first: State | None) -> tuple[Tensor, State]:
        if impl == "torch":
            return portable.chunkwise(k, v, w, u, first, portable_chunk_size(k, chunk_size))
        return associative(k, v, w, u, first, torchs_own=impl == "torch_associative_scan")

    y, last = run_documents(form, k, v, initial_state, cu_seqlens)
    return (y, last) if return_last_state else y
