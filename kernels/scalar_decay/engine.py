"""The engine of scalar-decay linear RNNs: one function behind the public function of every operation.

    C_t = exp(a_t) C_{t-1} + exp(u_t) k_t v_t^T        h_t = scale C_t^T q_t        (mLSTMexp: / its denominator)

Operations differ only in how their gates make the log decay a and the log input u. Each takes ``impl``: None, which is
whole_state where it runs and fused_chunk elsewhere, or one of

    fused_chunk  each chunk processed tile by tile with its state on chip (fused_chunk.py); float32 runs as xl_chunk
    whole_state  the same with the whole state of a head in one program (whole_state.py); only on Hopper, in float16 and
                 bfloat16, for head dims above 32, chunks of at least 64 and a positive scale
    xl_chunk     TFLA as published: the states at the chunks' edges, then all tiles of a chunk in parallel (chunk_o.py)
    limit_chunk  the same with one level of sequence parallelism: a chunk is a tile of 16, 32, 64 or 128
    torch        portable chunkwise form, any device and chunk length (chunkwise.py)
    parallel     one masked product, quadratic in T (reference.py)
    recurrent    the definition, one step at a time (reference.py)
    step         one decoding step (T = 1) on the GPU; not differentiable (step.py)

and these keywords:

    chunk_size         of the first five; need not divide T and may exceed it. None chooses the fastest (choice.py;
                       limit_chunk, torch: 64). The first four take powers of two from 16 on. The backward pass of
                       fused_chunk and whole_state may take shorter chunks, so that more of them run at once.
                       whole_state cuts only the heads that are left over when the others fill the device.
    state_dtype        of the states between chunks: torch.float32 (None) or, in the first four, torch.bfloat16.
    initial_state      C [B, H, K, V] before the first step, float32; mLSTMexp: (C, n [B, H, K], m [B, H]), C and n
                       divided by exp(m). None is the zero state.
    return_last_state  also return the state after the last step, in the same form.
    cu_seqlens         bounds of packed documents [N + 1], int32 or int64: document n is positions cu_seqlens[n] to
                       cu_seqlens[n + 1], rising from 0 to T, of a batch of 1. Results are those of each document alone,
                       and states are of the N documents. All but step take it. In the forms on the GPU documents are
                       one sequence whose state decays by exp(-150) or less where one begins, so lengths do not change
                       the time; an infinite state reaches the next document as nan. With initial or last states a
                       document is one chunk, however long, and whole_state and fused_chunk alone take that, in half
                       precision. They read cu_seqlens on the GPU: it may change in a CUDA graph, and its values are not
                       checked; what lies outside of [0, T] is cut off. torch, parallel and recurrent take one document
                       after the other, and read it on the host.
    scale              factor of q; None is K^-1/2, or the operation's own.
    options            round_operands of recurrent and gate_dtype of parallel, see reference.py.

q, k [B, T, H, K] and v [B, T, H, V] are of one dtype: float32, float16 or bfloat16, and float64 in torch, parallel and
recurrent. Gates [B, T, H] and constants a head [H] are float32; they, and states, are float64 beside float64 inputs. K
and V are multiples of 8 from 16 to 1024 in the forms on the GPU. These read q, k and v that are slices of one
projection, or transposed from [B, H, T, D], as they are: any whose last stride is 1 and whose others are multiples of
8. They copy what has other strides or does not begin at a multiple of 16 bytes, and gates and states that are not
contiguous. h [B, T, H, V] is contiguous and has v's dtype; it and the last state are differentiable in all tensors but
m: in torch, parallel and recurrent any number of times, in the forms on the GPU once: a second derivative raises
RuntimeError. Where B or T is 0 h is empty, and the last state is the initial one.

Products of float32 inputs are computed without tensor cores; where torch's setting allows TF32 for its own
(torch.set_float32_matmul_precision("high"), or torch.backends.cuda.matmul.fp32_precision), with three TF32 products,
whose error is about twice as large.

Beside float16 inputs the kernels round to float16 what they multiply, so not only results but these must stay below
65504, where 2^n is scale K^1/2 rounded to a power of two, at least 1 (score_headroom); below 2^-14 they lose bits:

    scores    scale 2^-n |q_t . k_s| exp(u_s) and, backward, scale 2^-n |v_s . dh_t| exp(u_s), for s <= t
    states    |C| and, backward, 2^-n |dC|, of every step
    weighted  exp(u_s) |v_s| and, backward, exp(u_s) |k_s|, scale 2^-n |q_t| and scale 2^-n |dh_t|

In mLSTMexp 2^n is 1, C and exp(u) are divided by exp(m), and dh, dC and scores by the denominators, but not the scores
of the output in whole_state, xl_chunk and limit_chunk. Where whole_state takes several launches, for more than 256
columns, the sums of the first ones must fit too; where heads share q and k, each head's gradient of them. torch,
parallel, recurrent and step have none of these bounds.

Source: "Tiled Flash Linear Attention" (TFLA), sections 2 and 3, appendices A to C.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import index
from typing import Any

import torch
from torch import Tensor

from ...results.arguments import one_of
from ..common.arguments import (
    check_chunk_size,
    check_on_gpu,
    check_state_dtype,
    constant,
    refuse_transforms,
    resolve_scale,
    without_autocast,
    without_tokens,
)
from ..common.device import why_not_here
from .chunkwise import chunkwise
from .config import WHOLE_STATE_BLOCK_T
from .declare import (
    CHUNKED,
    FUSED_CHUNK,
    IMPLEMENTATIONS,
    OPTIONS,
    SCHEMES,
    WHOLE_STATE,
    WHOLE_STATE_FORM,
    why_not_engine,
    why_not_limit_chunk,
)
from .documents import check_documents, each_document
from .reference import State, parallel, recurrent, zero_state
from .validate import check_initial_state

DEFAULT_CHUNK_SIZE = 64
"""The chunk length of limit_chunk and torch where a call names none."""


def scalar_decay(
    impl: str | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gates: Callable[[], tuple[Tensor, Tensor | None]],
    *,
    gate: str,
    decay: Tensor | None = None,
    input_gate: Tensor | None = None,
    head: Tensor | None = None,
    inv_tau: float = 1.0,
    scale: float | None,
    chunk_size: int | None,
    state_dtype: torch.dtype | None,
    initial_state: State | None,
    return_last_state: bool,
    cu_seqlens: Tensor | None = None,
    normalizer_gradient: bool = False,
    options: Mapping[str, Any],
) -> Tensor | tuple[Tensor, Any]:
    """Run an implementation on checked tensors, for an operation's public function.

    Args:
        impl, scale, chunk_size, state_dtype, initial_state, return_last_state, cu_seqlens, options: as in the module's
            docstring.
        q, k: [B, T, G, K] with G dividing H: H / G consecutive heads share one of q and k.
        v: [B, T, H, V].
        log_gates: returns the log decay a [B, T, H] and the log input u [B, T, H] (None: 0), for the torch forms.
        gate: how the kernels make a and u, see GATE in gates.py.
        decay, input_gate: gates [B, T, H] of which they make a and u; SSD's dt is a ``decay``.
        head: the constant of each head [H] of which they make a (slope, A).
        inv_tau: 1 / tau of Gated Retention.
        normalizer_gradient: whether mLSTMexp's torch forms differentiate through the denominators.

    Returns:
        h [B, T, H, V], or (h, last state).

    Raises:
        ValueError: on a head dim, dtype, chunk length, state or device that the implementation does not take.
        TypeError: on an option that it does not take.
    """
    scale = resolve_scale(scale, index(q.shape[3]))
    if chunk_size is not None and impl in (None, *SCHEMES):
        check_chunk_size(chunk_size, minimum=16, power_of_two=True)
        chunk_size = index(chunk_size)
    if impl is None:
        impl = FUSED_CHUNK if why_not_whole_state(q, v, chunk_size, scale, chosen=False) else WHOLE_STATE
    one_of("impl", impl, IMPLEMENTATIONS)
    states = initial_state is not None or return_last_state
    if cu_seqlens is not None:
        check_documents(cu_seqlens, v, impl, states=states)
    for name in options:
        if name != OPTIONS.get(impl):
            raise TypeError(f"{name} is no option of {impl}")
    if chunk_size is not None and impl not in CHUNKED:
        raise ValueError(f"chunk_size must be None for {impl}, got {chunk_size}")
    normalize = gate == "exp"
    state_dtype = torch.float32 if state_dtype is None else state_dtype
    state_dtypes = (torch.float32, torch.bfloat16) if impl in SCHEMES else (torch.float32,)
    check_state_dtype(state_dtype, state_dtypes)
    check_initial_state(initial_state, k, v, normalize=normalize, cu_seqlens=cu_seqlens)
    is_kernel = impl in SCHEMES or impl == "step"
    if is_kernel and normalizer_gradient:
        raise ValueError(f"normalizer_gradient must be False for {impl}, got True (use torch)")
    if is_kernel:
        check_kernel_support(impl, q, v, chunk_size, scale, values="x" if gate == "ssd" else "v")
        if cu_seqlens is not None and states:
            check_one_chunk(impl, v, chunk_size)
    if impl == "step" and v.shape[1] != 1:
        raise ValueError(f"a decoding step takes one token: seq_len must be 1, got {v.shape[1]}")
    if 0 in v.shape[:2]:
        of_states = v if cu_seqlens is None else v.expand(cu_seqlens.shape[0] - 1, -1, -1, -1)
        first = zero_state(k, of_states, normalize=normalize) if initial_state is None else initial_state
        h, last = without_tokens(v, (q, k, decay, input_gate, head), first)
        return (h, last) if return_last_state else h
    if not is_kernel:
        refuse_transforms("v")
        heads = v.shape[2]
        q, k = (x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
        keywords = {
            "scale": scale, "initial_state": initial_state, "return_last_state": return_last_state,
            "normalize": normalize, "normalizer_gradient": normalizer_gradient, **options,
        }  # fmt: skip
        form: Callable[..., Any] = parallel if impl == "parallel" else recurrent
        if impl == "torch":
            chunk_size = DEFAULT_CHUNK_SIZE if chunk_size is None else chunk_size
            check_chunk_size(chunk_size)
            form, keywords["chunk_size"] = chunkwise, chunk_size
        if cu_seqlens is not None:
            form = partial(each_document, form, cu_seqlens)
        # torch.compile would unroll loops, anew for every length. disable imports the compiler.
        if torch.compiler.is_compiling() and (impl == "torch" or cu_seqlens is not None):
            form = torch.compiler.disable(form)
        return without_autocast(form, v, q, k, v, *log_gates(), **keywords)

    if impl == "limit_chunk":
        chunk_size = chunk_size or DEFAULT_CHUNK_SIZE
    # These import Triton, which the forms above do without.
    from .launch import SCALAR_DECAY, EngineRequest
    from .step import STEP

    request = EngineRequest(gate, scale, inv_tau, SCHEMES.get(impl, ""), chunk_size, state_dtype, return_last_state)
    state = (None, None, None) if initial_state is None else initial_state if normalize else (initial_state, None, None)
    run = STEP if impl == "step" else SCALAR_DECAY
    h, *parts = run(request, q, k, v, decay, input_gate, head, *state, cu_seqlens)
    if not return_last_state:
        return h
    return h, tuple(parts) if normalize else parts[0]


def check_one_chunk(impl: str, v: Tensor, chunk_size: int | None) -> None:
    """Raise ValueError on what a kernel does not take with documents that have states: float32, and a chunk length."""
    given = f"for {impl} with cu_seqlens and states"
    if v.dtype == torch.float32:
        raise ValueError(f'dtype must be float16 or bfloat16 {given}, got float32: take impl="torch"')
    if chunk_size is not None:
        raise ValueError(f"chunk_size must be None {given}, got {chunk_size}: a document is a chunk")


def why_not_whole_state(
    q: Tensor, v: Tensor, chunk_size: int | None, scale: float, *, chosen: bool = True
) -> str | None:
    """Return why whole_state does not run here on these tensors, or None.

    Args:
        chosen: whether the caller asked for it; if not, a warning says that a slower form runs in its place where only
            the version of Triton is the reason.
    """
    if scale <= 0:
        return f"scale must be positive for whole_state, got {scale}"
    return _why_not_whole_state(v.dtype, v.device, index(q.shape[3]), index(v.shape[3]), chunk_size, chosen)


@constant
def _why_not_whole_state(
    dtype: torch.dtype, device: torch.device, head_dim_qk: int, head_dim_v: int, chunk_size: int | None, chosen: bool
) -> str | None:
    sizes = {"head_dim_qk": head_dim_qk, "head_dim_v": head_dim_v, "chunk_size": chunk_size or WHOLE_STATE_BLOCK_T}
    return why_not_here(WHOLE_STATE_FORM, dtype, device, sizes, chosen=chosen)


def check_kernel_support(impl: str, q: Tensor, v: Tensor, chunk_size: int | None, scale: float, *, values: str) -> None:
    """Raise ValueError on a dtype, device, head dim or chunk length that the kernels do not take."""
    check_on_gpu(values, v)
    if impl == WHOLE_STATE and (reason := why_not_whole_state(q, v, chunk_size, scale)):
        raise ValueError(reason)
    if reason := _why_unsupported(impl, index(q.shape[3]), index(v.shape[3]), chunk_size):
        raise ValueError(reason)


@constant
def _why_unsupported(impl: str, head_dim_qk: int, head_dim_v: int, chunk_size: int | None) -> str | None:
    """Return why an implementation's kernels do not take these sizes, or None."""
    sizes: Any = {"head_dim_qk": head_dim_qk, "head_dim_v": head_dim_v, "chunk_size": chunk_size}
    return (why_not_limit_chunk if impl == "limit_chunk" else why_not_engine)(sizes, "", None)
