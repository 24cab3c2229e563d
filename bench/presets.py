"""Presets: named sets of axes, the ones every kernel family has and those of single families. Data only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..kernels.common.sizes import INTERPRETED_DTYPES
from ..results.arguments import one_of

LLAMA = ((4096, 14336), (8192, 28672), (16384, 53248))
"""(d_model, d_ff) of Llama 3 8B, 70B and 405B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named set of axes; a field that the user gives on the command line replaces the preset's.

    Fields that it does not set have the defaults below, which are those published for one GPU.

    An operation is planned over the axes that its sizes name: heads and head dims, channels, or the matrices of an MLP.

    Attributes:
        seq_lens: sequence lengths; of an MLP, tokens.
        head_dims: value head dims.
        channels: of operations that mix each channel on its own.
        chunk_sizes: chunk lengths besides the one that an implementation chooses.
        matrices: (d_model, d_ff) of MLPs.
        tokens: batch * seq_len held constant over the sequence lengths.
        batch: the batch, in place of ``tokens``.
        step_batches, contexts: of decoding steps: batches, and tokens in the cache of what has one.
        embedding_dim: num_heads * head_dim_v held constant over the head dims.
        operations: number of the family's operations to measure, in the order the family lists them; None is all.
        budget_s: seconds of timing per case after which sampling stops (never before ten samples).
        portable_on_gpu: whether code that also runs on a CPU is measured on a GPU without being named.
        impls: implementations to measure; None is all. A baseline of these is measured if its operation is, or if its
            operation is none of the family's.
    """

    name: str
    summary: str
    seq_lens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    head_dims: tuple[int, ...] = (64, 128, 256, 512)
    chunk_sizes: tuple[int, ...] = (64, 128, 256, 512, 1024)
    channels: tuple[int, ...] = (1024, 4096)
    matrices: tuple[tuple[int, int], ...] = LLAMA
    modes: tuple[str, ...] = ("fw", "fwbw")
    tokens: int = 65536
    batch: int | None = None
    step_batches: tuple[int, ...] = (16,)
    contexts: tuple[int, ...] = (8192,)
    embedding_dim: int = 4096
    operations: int | None = 2
    budget_s: float = 0.4
    dtypes: tuple[str, ...] | None = None
    state_dtypes: tuple[str, ...] = ("fp32",)
    portable_on_gpu: bool = False
    impls: tuple[str, ...] | None = None


QUICK = Preset(
    name="quick",
    summary="a minute or two on two CPU cores: three lengths, two widths",
    seq_lens=(256, 512, 1024),
    head_dims=(64, 128),
    chunk_sizes=(32, 64, 128),
    channels=(64, 256),
    matrices=((128, 448), (256, 896)),
    tokens=1024,
    contexts=(1024,),
    embedding_dim=256,
    budget_s=0.1,
)
DEFAULT = Preset(name="default", summary="the published axes on one GPU: 65,536 tokens at embedding dim 4096")
FULL = Preset(
    name="full",
    summary="every operation, mode, input and state dtype at three lengths; hours on one GPU",
    seq_lens=(1024, 8192, 65536),
    chunk_sizes=(64, 128, 512),
    matrices=LLAMA[:2],
    modes=("fw", "fwbw", "bw", "step"),
    operations=None,
    dtypes=("bf16", "fp16", "fp32"),
    state_dtypes=("fp32", "bf16"),
    portable_on_gpu=True,
)
ONE = Preset(
    name="one",
    summary="one problem of a usual size",
    seq_lens=(8192,),
    head_dims=(256,),
    chunk_sizes=(256,),
    channels=(1024,),
    matrices=LLAMA[:1],
    operations=1,
)
DECODE = Preset(
    name="decode",
    summary="decoding at three batches; attention at contexts of 1k to 128k",
    seq_lens=(1,),
    head_dims=(128, 256),
    modes=("step",),
    step_batches=(1, 16, 256),
    contexts=(1024, 8192, 32768, 131072),
    operations=None,
)
TRAIN = Preset(
    name="train",
    summary="training steps of a published model with the operation in its blocks",
    seq_lens=(1024, 4096, 16384, 94208),
    head_dims=(128,),
    channels=(1024,),
    modes=("train",),
    tokens=16384,
    embedding_dim=1024,
)
VERIFY = Preset(
    name="verify",
    summary="a small ragged problem, every operation, mode and dtype: what `lrbench verify` checks",
    seq_lens=(320,),
    head_dims=(64,),
    chunk_sizes=(64,),
    channels=(72,),
    matrices=((64, 224),),
    modes=("fwbw", "fw", "step"),
    tokens=640,
    contexts=(96,),
    embedding_dim=128,
    operations=None,
    budget_s=0.0,
    dtypes=("fp32", "fp16", "bf16"),
    state_dtypes=("fp32", "bf16"),
    portable_on_gpu=True,
)

INTERPRET = dataclasses.replace(
    VERIFY,
    name="interpret",
    summary="as verify and smaller yet: what `TRITON_INTERPRET=1 lrbench verify` checks of the Triton kernels",
    seq_lens=(72,),
    head_dims=(32,),
    chunk_sizes=(32,),
    channels=(40,),
    matrices=((64, 112),),
    tokens=72,
    embedding_dim=64,
    dtypes=INTERPRETED_DTYPES,
)

TRITON = Preset(
    name="triton",
    summary="one problem of 65,536 tokens at each implementation's own chunk length: what to compare Tritons by",
    seq_lens=(8192,),
    head_dims=(256,),
    chunk_sizes=(),
    channels=(1024,),
    matrices=LLAMA[:1],
    operations=None,
    budget_s=0.2,
)

COMMON = (QUICK, DEFAULT, FULL, ONE, VERIFY, INTERPRET, TRITON)
"""What every family has, unless it replaces it by one of the same name."""

OF_FAMILY: dict[str, tuple[Preset, ...]] = {
    "tfla": (DECODE,),
    "lightning": (
        DECODE,
        Preset(
            name="default",
            summary="65,536 tokens at embedding dim 4096, the head dims that Lightning's kernels hold",
            head_dims=(64, 128, 256),
        ),
        dataclasses.replace(
            TRAIN,
            impls=(
                "lightning1",
                "lightning2",
                "fused_chunk",
                "whole_state",
                "lightning_attn.v2",
                "flash_attn.v2",
                "torch",
                "torch.sdpa_cpu",
            ),
        ),
        Preset(
            name="figure-3",
            summary="runtime and memory of one sequence over its length, beside FlashAttention-2 and Lightning-1",
            head_dims=(128,),
            chunk_sizes=(256,),
            modes=("fw", "bw"),
            batch=1,
        ),
    ),
    "rglru": (
        DECODE,
        Preset(
            name="default",
            summary="the published axes: batch 8, 1024 channels over the sequence length",
            seq_lens=(1024, 2048, 4096, 8192, 16384, 32768),
            channels=(1024,),
            batch=8,
            operations=None,
        ),
        dataclasses.replace(
            TRAIN,
            seq_lens=(1024, 8192),
            batch=8,
            impls=("fused", "chunked", "naive", "fla.fused_recurrent_hgrn", "torch.compile", "torch"),
        ),
        Preset(
            name="long",
            summary="one sequence of 65,536 steps and 2560 channels, fewer than fill a GPU",
            seq_lens=(65536,),
            channels=(2560,),
            batch=1,
            operations=1,
        ),
    ),
    "gated-mlp": (
        Preset(name="default", summary="Llama 8B, 70B and 405B over the tokens", seq_lens=(1024, 4096, 16384, 65536)),
    ),
    "wkv": (
        DECODE,
        Preset(
            name="default",
            summary="batch 8 over the sequence length, 768 and 2048 channels",
            seq_lens=(128, 512, 1024, 4096, 16384, 65536),
            channels=(768, 2048),
            batch=8,
        ),
        dataclasses.replace(TRAIN, seq_lens=(1024,), channels=(768,), batch=2, portable_on_gpu=True),
        *(
            Preset(
                name=f"micro{channels}",
                summary=f"the source's micro-benchmark: one sequence of {channels} channels over its length",
                seq_lens=(128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
                channels=(channels,),
                batch=1,
                portable_on_gpu=True,
            )
            for channels in (32, 256)
        ),
    ),
}
"""Family -> presets of its own."""


_QUICK_ON_GPU = dataclasses.replace(
    QUICK,
    summary="minutes on one GPU: our fastest implementations and the fastest beside them, three lengths, two widths",
    seq_lens=(1024, 4096, 16384),
    head_dims=(128, 256),
    chunk_sizes=(128, 2048, 4096),
    tokens=65536,
    embedding_dim=4096,
    operations=1,
)
QUICK_ON_GPU = {
    # Peers whose autotuners take minutes are left out where their operation is not asked for by name.
    "tfla": dataclasses.replace(
        _QUICK_ON_GPU,
        impls=(
            "whole_state", "fused_chunk", "mlstm_kernels.xl_chunk_siging", "mlstm_kernels.limit_chunk",
            "fla.chunk_simple_gla", "fla.chunk_retention", "mamba_ssm.chunk_scan", "torch.sdpa_cudnn",
        ),
    ),
    "lightning": dataclasses.replace(
        _QUICK_ON_GPU,
        head_dims=(64, 128),
        impls=("lightning2", "whole_state", "fused_chunk", "lightning_attn.v2", "torch.sdpa_cudnn"),
    ),
    "rglru": dataclasses.replace(
        _QUICK_ON_GPU,
        channels=(1024, 2560),
        chunk_sizes=(256, 512, 1024),
        batch=8,
        impls=("fused", "chunked", "scan", "fla.fused_recurrent_hgrn", "accelerated_scan.triton"),
    ),
    "wkv": dataclasses.replace(
        _QUICK_ON_GPU, channels=(768, 2048), batch=8, impls=("scan", "fla.fused_recurrent_rwkv4")
    ),
    "gated-mlp": dataclasses.replace(
        _QUICK_ON_GPU,
        matrices=LLAMA[:2],
        impls=("fused", "fused_save", "torch.eager", "liger_kernel.silu_mul"),
    ),
}  # fmt: skip
"""Family -> what quick is on a GPU."""


def presets_for(kernel: str, device_kind: str = "cpu") -> dict[str, Preset]:
    """Return the presets of a kernel family by name."""
    quick = (QUICK_ON_GPU.get(kernel, _QUICK_ON_GPU),) if device_kind == "cuda" else ()
    return {preset.name: preset for preset in (*COMMON, *OF_FAMILY.get(kernel, ()), *quick)}


def get_preset(name: str, kernel: str, device_kind: str) -> Preset:
    """Return preset ``name`` of a kernel family on a device; ValueError lists the known ones."""
    known = presets_for(kernel, device_kind)
    one_of("preset", name, known, f" for kernel {kernel}")
    return known[name]
