"""mlstm_kernels: the TFLA authors' own mLSTM kernels and their torch forms."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from ...results.schema import Case
from .spec import Baseline, KnownBad, Runnable

if TYPE_CHECKING:
    from torch import Tensor

MAX_PARALLEL_ELEMENTS = 2**28
XL_MIN_SEQ_LEN = 128

BLOCK_POINTERS = KnownBad(
    reason="the kernels use tl.make_block_ptr, which this Triton no longer has",
    source="mlstm_kernels 2.0.6, mlstm_kernels/triton/chunkwise; triton-lang/triton removed block pointers for 3.9",
    versions={"mlstm-kernels": "<=2.0.6", "triton": ">=3.9"},
)

XL_EXP_COMPILER_ABORT = KnownBad(
    reason="Triton's compiler aborts the process while compiling xl_chunk's exponential-gate kernels",
    source="measured on an H200: aborts with triton 3.6.0, runs with 3.7.1",
    versions={"triton": "==3.6.*"},
    architectures=("9.0",),
)

NATIVE_CHUNK_SIZE = 64

_KERNELS = {
    "xl_chunk_siging": ("chunkwise.triton_xl_chunk_siging", "mlstm_siging_chunkwise__xl_chunk"),
    "xl_chunk": ("chunkwise.triton_xl_chunk", "mlstm_chunkwise__xl_chunk"),
    "limit_chunk": ("chunkwise.triton_limit_chunk", "mlstm_chunkwise__limit_chunk"),
    "native_custbw": ("chunkwise.native", "mlstm_chunkwise__native_custbw"),
    "native_autograd": ("chunkwise.native", "mlstm_chunkwise__native_autograd"),
    "parallel_siging": ("parallel", "mlstm_siging_parallel__native_autograd"),
}
"""Variant -> module and function, for kernels with two levels (xl) or one of sequence parallelism and torch forms."""

_mlstm = partial(
    Baseline,
    provider="mlstm_kernels",
    distribution="mlstm-kernels",
    tested="2.0.6",
    kernels=("tfla",),
    formulation="chunkwise",
    build="kernels.baselines.nxai_mlstm:build",
    licence="NXAI Community License",
)
_chunkwise = partial(_mlstm, module="mlstm_kernels.torch.chunkwise", autotunes=False)
_triton = partial(_chunkwise, dtypes=("bf16", "fp16"))
_native = partial(
    _chunkwise,
    op="mlstm_exp",
    why_not="kernels.baselines.nxai_mlstm:why_not_chunk",
    dtypes=("fp32", "fp64"),
    devices=("cpu", "cuda"),
    chunk_sizes=(NATIVE_CHUNK_SIZE, 32, 128, 256, 512, 1024),
)

BASELINES = (
    _triton(
        name="mlstm_kernels.xl_chunk_siging",
        op="mlstm_sig",
        why_not="kernels.baselines.nxai_mlstm:why_not_xl_chunk",
        chunk_sizes=(128, 64, 256, 512, 1024),
        known_bad=(BLOCK_POINTERS,),
        settings="normalize=False, eps=0 (the operation's own mathematics), states recomputed; default chunk 128",
    ),
    _triton(
        name="mlstm_kernels.xl_chunk",
        op="mlstm_exp",
        why_not="kernels.baselines.nxai_mlstm:why_not_xl_chunk",
        chunk_sizes=(128, 64, 256, 512, 1024),
        known_bad=(XL_EXP_COMPILER_ABORT, BLOCK_POINTERS),
        settings="eps=0 (the operation's own mathematics), states recomputed backward; default chunk 128",
    ),
    _triton(
        name="mlstm_kernels.limit_chunk",
        op="mlstm_exp",
        why_not="kernels.baselines.nxai_mlstm:why_not_chunk",
        chunk_sizes=(64, 32, 128),
        known_bad=(BLOCK_POINTERS,),
        settings="eps=0 (the operation's own mathematics), states recomputed backward; default chunk 64",
    ),
    _native(
        name="mlstm_kernels.native_custbw",
        settings="torch with a backward of its own, the denominator taken as a constant; eps=0; default chunk 64",
    ),
    _native(
        name="mlstm_kernels.native_autograd",
        # Its gradients are those of normalizer_gradient=True, which the default reference does not give.
        modes=("fw",),
        settings="torch under autograd; eps=0; default chunk 64; forward only: its gradients pass the denominator",
    ),
    _mlstm(
        name="mlstm_kernels.parallel_siging",
        op="mlstm_sig",
        formulation="parallel",
        module="mlstm_kernels.torch.parallel",
        why_not="kernels.baselines.nxai_mlstm:why_not_parallel",
        dtypes=("fp32", "fp64"),
        devices=("cpu", "cuda"),
        settings="torch under autograd, quadratic; normalize=False; the stable sum of forget gates (its default)",
    ),
    _mlstm(
        name="mlstm_kernels.step",
        op="mlstm_exp",
        build="kernels.baselines.nxai_mlstm:build_step",
        module="mlstm_kernels.torch.recurrent",
        modes=("step",),
        dtypes=("bf16", "fp16"),
        autotunes=False,
        known_bad=(BLOCK_POINTERS,),
        settings="mlstm_recurrent_step__triton, eps=0 (the operation's own mathematics), state in float32",
    ),
)


def why_not_chunk(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why a chunkwise kernel of one level cannot run these sizes, or None."""
    chunk_size = sizes["chunk_size"]
    if chunk_size & (chunk_size - 1):
        return f"chunk_size must be a power of two, got {chunk_size}"
    if sizes["seq_len"] % chunk_size:
        return f"seq_len must be a multiple of chunk_size {chunk_size}, got {sizes['seq_len']}"
    return None


def why_not_xl_chunk(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why xl_chunk cannot run these sizes, or None."""
    if sizes["seq_len"] < XL_MIN_SEQ_LEN and sizes["chunk_size"] != sizes["seq_len"]:
        return f"below seq_len {XL_MIN_SEQ_LEN} the chunk is the whole sequence, got chunk_size {sizes['chunk_size']}"
    return why_not_chunk(sizes, dtype, state_dtype)


def why_not_parallel(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why the quadratic form is refused, or None: it holds several full matrices."""
    elements = sizes["batch"] * sizes["num_heads"] * sizes["seq_len"] ** 2
    if elements > MAX_PARALLEL_ELEMENTS:
        return f"batch * num_heads * seq_len^2 must be at most {MAX_PARALLEL_ELEMENTS}, got {elements}"
    return None


def build(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare the kernel that the baseline is named for; mLSTMsig's output is not normalised."""
    from ._tensors import on_leaves

    module, name = _KERNELS[case.impl.removeprefix("mlstm_kernels.")]
    options: dict[str, object] = {"eps": 0.0}
    if case.op == "mlstm_sig":
        options["normalize"] = False
    if case.chunk_size is not None:
        options["chunk_size"] = case.chunk_size
    elif "native" in module:
        options["chunk_size"] = NATIVE_CHUNK_SIZE
    dtype = inputs["q"].dtype
    if "triton" in module:
        # The kernel casts to this dtype under autocast.
        options["autocast_kernel_dtype"] = dtype
    kernel = getattr(importlib.import_module(f"mlstm_kernels.torch.{module}"), name)

    def call(**tensors: Tensor) -> Tensor:
        return kernel(**{name: x.to(dtype) for name, x in tensors.items()}, **options)

    # Gates too get q's dtype, which holds their values exactly (common/inputs.py), so the problem is the same. A
    # model's are rounded to it, as the kernel does under autocast.
    return on_leaves(call, {name: x.to(dtype) for name, x in inputs.items()}, heads_first=True)


def build_step(case: Case, inputs: Mapping[str, Tensor], state: tuple[Tensor, Tensor, Tensor]) -> Runnable:
    """Prepare the step kernel, which takes tensors without a time axis, and gates and m with one column."""
    from mlstm_kernels.torch.recurrent.triton_step import mlstm_recurrent_step__triton

    q, k, v, i, f = (x.detach()[:, 0].to(inputs["q"].dtype) for x in inputs.values())
    c, n, m = state
    columns = {"i": i[..., None], "f": f[..., None], "c": c, "n": n, "m": m[..., None]}

    def forward() -> Tensor:
        return mlstm_recurrent_step__triton(q, k, v, **columns, eps=0.0)[0][:, None]

    return Runnable(forward=forward, leaves=dict(inputs))
