"""mlstm_kernels: the TFLA authors' own mLSTM kernels and their torch forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

_GATES = ("q", "k", "v", "i", "f")

_mlstm = partial(
    Baseline,
    provider="mlstm_kernels",
    distribution="mlstm-kernels",
    tested="2.0.6",
    kernels=("tfla",),
    formulation="chunkwise",
    licence="NXAI Community License",
)
_triton = partial(
    _mlstm,
    module="mlstm_kernels.torch.chunkwise",
    dtypes=("bf16", "fp16"),
)

BASELINES = (
    _triton(
        name="mlstm_kernels.xl_chunk_siging",
        op="mlstm_sig",
        build="kernels.baselines.nxai_mlstm:build_xl_chunk_siging",
        supports="kernels.baselines.nxai_mlstm:supports_xl_chunk",
        chunk_sizes=(128, 64, 256, 512, 1024),
        known_bad=(BLOCK_POINTERS,),
        settings="normalize=False, eps=0 (the operation's own mathematics), states recomputed; default chunk 128",
    ),
    _triton(
        name="mlstm_kernels.xl_chunk",
        op="mlstm_exp",
        build="kernels.baselines.nxai_mlstm:build_xl_chunk",
        supports="kernels.baselines.nxai_mlstm:supports_xl_chunk",
        chunk_sizes=(128, 64, 256, 512, 1024),
        known_bad=(XL_EXP_COMPILER_ABORT, BLOCK_POINTERS),
        settings="eps=0 (the operation's own mathematics), states recomputed backward; default chunk 128",
    ),
    _triton(
        name="mlstm_kernels.limit_chunk",
        op="mlstm_exp",
        build="kernels.baselines.nxai_mlstm:build_limit_chunk",
        supports="kernels.baselines.nxai_mlstm:supports_chunk",
        chunk_sizes=(64, 32, 128),
        known_bad=(BLOCK_POINTERS,),
        settings="eps=0 (the operation's own mathematics), states recomputed backward; default chunk 64",
    ),
    _mlstm(
        name="mlstm_kernels.native_custbw",
        op="mlstm_exp",
        build="kernels.baselines.nxai_mlstm:build_native_custbw",
        module="mlstm_kernels.torch.chunkwise",
        supports="kernels.baselines.nxai_mlstm:supports_chunk",
        dtypes=("fp32", "fp64"),
        devices=("cpu", "cuda"),
        chunk_sizes=(64, 32, 128, 256, 512, 1024),
        settings="torch with a backward of its own, the denominator taken as a constant; eps=0; default chunk 64",
    ),
    _mlstm(
        name="mlstm_kernels.native_autograd",
        op="mlstm_exp",
        build="kernels.baselines.nxai_mlstm:build_native_autograd",
        module="mlstm_kernels.torch.chunkwise",
        supports="kernels.baselines.nxai_mlstm:supports_chunk",
        dtypes=("fp32", "fp64"),
        devices=("cpu", "cuda"),
        chunk_sizes=(64, 32, 128, 256, 512, 1024),
        # Its gradients are those of normalizer_gradient=True, which the default reference does not give.
        modes=("fw",),
        settings="torch under autograd; eps=0; default chunk 64; forward only: its gradients pass the denominator",
    ),
    _mlstm(
        name="mlstm_kernels.parallel_siging",
        op="mlstm_sig",
        formulation="parallel",
        build="kernels.baselines.nxai_mlstm:build_parallel_siging",
        module="mlstm_kernels.torch.parallel",
        supports="kernels.baselines.nxai_mlstm:supports_parallel",
        dtypes=("fp32", "fp64"),
        devices=("cpu", "cuda"),
        settings="torch under autograd, quadratic; normalize=False; the stable sum of forget gates (its default)",
    ),
)


def supports_chunk(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why a chunkwise kernel of one level cannot run these sizes, or None."""
    chunk_size = sizes["chunk_size"]
    if chunk_size & (chunk_size - 1):
        return f"chunk_size must be a power of two, got {chunk_size}"
    if sizes["seq_len"] % chunk_size:
        return f"seq_len must be a multiple of chunk_size {chunk_size}, got {sizes['seq_len']}"
    return None


def supports_xl_chunk(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why xl_chunk cannot run these sizes, or None."""
    if sizes["seq_len"] < XL_MIN_SEQ_LEN and sizes["chunk_size"] != sizes["seq_len"]:
        return f"below seq_len {XL_MIN_SEQ_LEN} the chunk is the whole sequence, got chunk_size {sizes['chunk_size']}"
    return supports_chunk(sizes, dtype, state_dtype)


def supports_parallel(sizes: Mapping[str, int], dtype: str, state_dtype: str | None) -> str | None:
    """Return why the quadratic form is refused, or None: it holds several full matrices."""
    elements = sizes["batch"] * sizes["num_heads"] * sizes["seq_len"] ** 2
    if elements > MAX_PARALLEL_ELEMENTS:
        return f"batch * num_heads * seq_len^2 must be at most {MAX_PARALLEL_ELEMENTS}, got {elements}"
    return None


def build_xl_chunk_siging(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare the sigmoid-gate kernel with two-level sequence parallelism, not normalised."""
    from mlstm_kernels.torch.chunkwise.triton_xl_chunk_siging import mlstm_siging_chunkwise__xl_chunk as kernel

    return _build(inputs, partial(kernel, normalize=False, eps=0.0, **_chunk(case, inputs)))


def build_xl_chunk(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare the exponential-gate kernel with two-level sequence parallelism."""
    from mlstm_kernels.torch.chunkwise.triton_xl_chunk import mlstm_chunkwise__xl_chunk as kernel

    return _build(inputs, partial(kernel, eps=0.0, **_chunk(case, inputs)))


def build_limit_chunk(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare the exponential-gate kernel with one-level sequence parallelism."""
    from mlstm_kernels.torch.chunkwise.triton_limit_chunk import mlstm_chunkwise__limit_chunk as kernel

    return _build(inputs, partial(kernel, eps=0.0, **_chunk(case, inputs)))


def build_native_custbw(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare the torch form with its own backward pass."""
    from mlstm_kernels.torch.chunkwise.native import mlstm_chunkwise__native_custbw as kernel

    return _build(inputs, partial(kernel, eps=0.0, chunk_size=case.chunk_size or 64))


def build_native_autograd(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare the torch form under autograd; its gradients pass through the denominator."""
    from mlstm_kernels.torch.chunkwise.native import mlstm_chunkwise__native_autograd as kernel

    return _build(inputs, partial(kernel, eps=0.0, chunk_size=case.chunk_size or 64))


def build_parallel_siging(case: Case, inputs: Mapping[str, Tensor]) -> Runnable:
    """Prepare the quadratic torch form with sigmoid gates, not normalised."""
    from mlstm_kernels.torch.parallel import mlstm_siging_parallel__native_autograd as kernel

    return _build(inputs, partial(kernel, normalize=False, eps=0.0))


def _chunk(case: Case, inputs: Mapping[str, Tensor]) -> dict[str, object]:
    """Return the chunk length and the dtype the kernel casts to under autocast: that of the inputs."""
    dtype = inputs["q"].dtype
    return {"autocast_kernel_dtype": dtype} | ({} if case.chunk_size is None else {"chunk_size": case.chunk_size})


def _build(inputs: Mapping[str, Tensor], kernel: Callable[..., Tensor]) -> Runnable:
    from ._tensors import as_heads_first, to_time_first

    # All inputs in one dtype; the gates' values are ones that it holds, so the problem is the same.
    leaves = {name: as_heads_first(inputs[name].to(inputs["q"].dtype)) for name in _GATES}

    def forward() -> Tensor:
        return kernel(**leaves)

    return Runnable(forward=forward, leaves=leaves, to_canonical=to_time_first)
