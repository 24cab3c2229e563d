"""Every implementation obeys the laws of :mod:`.laws`: in plain torch, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from lrbench.kernels import Operation, get_operation
from lrbench.kernels.baselines.operations import OPERATIONS as BASELINE_OPERATIONS
from lrbench.kernels.gated_mlp.config import ACTIVATIONS
from lrbench.kernels.scalar_decay.declare import WHOLE_STATE
from lrbench.tests.kernels import laws
from lrbench.tests.kernels.cases import (
    BF16,
    CHANNELS,
    DTYPES,
    ENGINE,
    F16,
    F32,
    F64,
    HEADS,
    KERNELS,
    LIGHTNING,
    OPERATIONS,
    PORTABLE,
    SCALAR_DECAY,
    SCANS,
    SIZES,
    TIME_TILES,
    channels,
    each_mlp,
    float32_products,
    heads,
    interpreted,
    launches,
    mlp_sizes,
    on_each,
    on_gpu,
    portable,
    serial_config,
    tiled,
)
from lrbench.tests.kernels.laws import EXTREMES, HALF_RANGE, Case

Law = dict[str, Any]

MLSTM = ("mlstm_sig", "mlstm_exp")
SEPARATORS = (torch.finfo(F32).min, -math.inf)
ONE_PASS = {"rglru": "fused", "linear_scan": "scan", "wkv4": "scan"}
SCAN_IMPLS = [*ONE_PASS.items(), *((op, impl) for op in ("rglru", "linear_scan") for impl in ("chunked", "naive"))]
SCAN_IMPLS.append(("wkv4", "naive"))


def extremes(op: str) -> list[Law]:
    """Return the ranges of an operation's extreme inputs, as keywords."""
    return [{"ranges": ranges, "label": what} for what, ranges in EXTREMES[op].items()]


def half_ranges(op: str) -> list[Law]:
    """Return keywords of cases of which float16 holds inputs and results, but perhaps not what is between them."""
    # At K^-1/2 the scores fit. An initial state of order one, times such keys, would be most of the output.
    others: Law = {"initial_state": False}
    if op == "mlstm_sig":
        others["options"] = {"scale": 1.0}
    return [{"ranges": ranges, "label": what, **others} for what, ranges in HALF_RANGE[op].items()]


def scan_on_gpu(op: str, impl: str, dtype: torch.dtype, **keywords: Any) -> Any:
    """Return a case of a kernel over channels; those beside the single pass of RG-LRU are slow."""
    sizes = channels(2, 700, 264) if op == "wkv4" else SIZES["gpu"][1]
    return on_gpu(op, impl, dtype, slow=impl in ("chunked", "naive") and op != "wkv4", **{"sizes": sizes, **keywords})


def serial_on_gpu(dtype: torch.dtype, **keywords: Any) -> Any:
    """Return a case of WKV's launches whose states pass from tile to tile."""
    label = f"serial {keywords.pop('label', '')}".strip()
    sizes, kwargs = channels(2, 1100, 264), {"config": serial_config(dtype)}
    return on_gpu("wkv4", "scan", dtype, sizes=sizes, kwargs=kwargs, label=label, **keywords)


ENGINE_SPLITS = [(op, impl) for op in MLSTM for impl in ("fused_chunk", "xl_chunk")]
ENGINE_ON_GPU = [
    *((*each, dtype) for each in ENGINE_SPLITS for dtype in (BF16, F16, F32)),
    *((op, "whole_state", dtype) for op in MLSTM for dtype in (BF16, F16)),
]


@on_each(*(on_gpu(op, "fused_chunk", F32, sizes=heads(2, 300, 2, 64, 128)) for op in (*MLSTM, "mamba2_ssd")))
def test_three_tf32_products(case: Case) -> None:
    """They keep the digits of float32."""
    with float32_products("tf32"):
        laws.check_matches_reference(case)


def recurrences_on_gpu(law: Callable[[str], list[Law]]) -> list[Any]:
    """Return cases of every kernel that carries a state, on the keywords that ``law`` gives for an operation."""
    return [
        *(
            on_gpu(op, impl, dtype, chunk_size=128, **keywords)
            for op, impl, dtype in ENGINE_ON_GPU
            for keywords in law(op)
        ),
        *(
            on_gpu("lightning", impl, dtype, chunk_size=128, **keywords)
            for impl in (*LIGHTNING, "fused_chunk")
            for dtype in (F32, F16, BF16)
            for keywords in law("lightning")
        ),
        *(
            scan_on_gpu(op, impl, dtype, **keywords)
            for op, impl in SCAN_IMPLS
            for dtype in (BF16, F16, F32)
            for keywords in law(op)
        ),
    ]


PORTABLE_MLPS = [
    portable("gated_mlp", "torch", dtype, options={"activation": activation}, layout=layout)
    for activation in ACTIVATIONS
    for dtype, layout in (*((dtype, "rows") for dtype in DTYPES), (F32, "columns"), (F32, "swapped_columns"))
]
PORTABLE_HEADS = ((16, 1, 4, 16, 16), (20, 1, 3, 24, 40), (2, 33, 8, 40, 24), (32, 70, 2, 8, 5))
PORTABLE_SHAPES = {
    **dict.fromkeys(HEADS, tuple(heads(*sizes) for sizes in PORTABLE_HEADS)),
    # Gradients of A have as many values as there are heads, so larger batches would not make problems fewer.
    "mamba2_ssd": (*(heads(*sizes) for sizes in PORTABLE_HEADS[:2]), heads(1, 33, 3, 40, 24), heads(3, 70, 1, 8, 5)),
    **dict.fromkeys(CHANNELS, (channels(3, 1, 40), channels(3, 2, 50), channels(1, 150, 515))),
    "rglru_layer": (channels(2, 1, 24),),
    "gated_mlp": (mlp_sizes(1, 8, 8),),
}  # fmt: skip

ENGINE_SHAPES = (
    (2, 1000, 3, 128, 256), (1, 700, 2, 64, 64), (2, 513, 2, 24, 40), (1, 512, 2, 256, 512), (1, 400, 2, 16, 136),
    (1, 200, 1, 1024, 72),
)  # fmt: skip
WHOLE_STATE_SHAPES = (
    (2, 1000, 3, 128, 256), (1, 700, 2, 64, 64), (2, 513, 2, 80, 160), (1, 450, 2, 160, 320), (1, 300, 1, 192, 96),
    (1, 512, 2, 256, 512), (1, 400, 2, 128, 128), (1, 300, 1, 40, 328), (1, 200, 1, 512, 72),
)  # fmt: skip
LIGHTNING_SHAPES = (
    (2, 1000, 3, 128, 128), (1, 700, 2, 64, 64), (2, 513, 2, 24, 40), (1, 512, 2, 256, 256), (1, 400, 2, 16, 136),
    (1, 200, 1, 200, 72),
)  # fmt: skip
MLP_SHAPES = (
    (4096, 4096, 1792), (1024, 512, 3584), (300, 1032, 520), (65, 72, 136), (16, 2048, 1024), (1, 256, 264),
)  # fmt: skip
"""Sizes of the GPU's cases: batch, length, heads and head dims; of an MLP its tokens and dims."""


@on_each(
    *(portable(op, impl, dtype, chunk_size=16) for op, impl in PORTABLE for dtype in DTYPES),
    *(
        portable(op, "torch", dtype, chunk_size=chunk_size)
        for op in (*HEADS, *CHANNELS)
        for chunk_size in (1, 7, 64)
        for dtype in DTYPES
    ),
    *(portable(op, "torch", dtype) for op in CHANNELS for dtype in DTYPES),
    *(
        portable(op, impl, dtype, sizes=sizes, initial_state=state, chunk_size=32 if op in HEADS else None)
        for op, impl in PORTABLE
        for dtype in (F64, F32, BF16)
        for sizes in PORTABLE_SHAPES[op]
        for state in ((True, False) if op in CHANNELS else (True,))
        if impl != "parallel"
    ),
    *(portable(op, impl, F32, initial_state=False, chunk_size=16) for op, impl in PORTABLE if op in HEADS),
    *(
        portable(
            op, impl, F64, options={"scale": scale, **({"normalizer_gradient": True} if op == "mlstm_exp" else {})}
        )
        for op, impl in PORTABLE
        if op in HEADS
        for scale in (-0.3, 2.0)
    ),
    *(
        portable("mlstm_exp", "torch", dtype, ranges=ranges, options={"normalizer_gradient": gradient}, chunk_size=16)
        for dtype in (F64, F32, BF16)
        for gradient in (False, True)
        for ranges in ({}, {"i": (-6, 0)}, {"i": (3, 6)})
    ),
    *(portable("gated_retention", "torch", F64, options={"tau": tau}) for tau in (1.0, 64.0)),
    *(portable("mamba2_ssd", "torch", F64, sizes=heads(2, 37, 4, 16, 8, num_groups=groups)) for groups in (1, 2, 4)),
    *PORTABLE_MLPS,
    # Over many chunks too the float64 form that stands for the recurrence in longer checks is as exact as that.
    *(
        portable(op, "torch", F64, sizes=channels(1, 1030, 8), chunk_size=64, **extreme)
        for op in CHANNELS
        for extreme in ({}, *extremes(op))
        if extreme.get("label") not in ("open gates", "no memory", "large bonus", "small bonus")
    ),
    *(
        interpreted(op, impl, dtype, chunk_size=16)
        for op in SCALAR_DECAY
        if op != "lightning"
        for impl in ENGINE
        for dtype in (F32, F16)
    ),
    *(
        interpreted(op, "fused_chunk", F16, sizes=heads(batch, seq_len, 2, 24, 40), chunk_size=chunk_size)
        for op in (*MLSTM, "mamba2_ssd")
        for batch, seq_len, chunk_size in ((1, 64, 16), (10, 1, 16), (1, 33, 64))
    ),
    *(
        interpreted("mamba2_ssd", impl, F32, sizes=heads(1, 41, 4, 24, 40, num_groups=2), chunk_size=16)
        for impl in ENGINE
    ),
    *(
        interpreted("mlstm_exp", impl, F16, kwargs={"chunk_size": 16, "state_dtype": BF16}, label="bf16 states")
        for impl in ("fused_chunk", "xl_chunk")
    ),
    # One chunk forward, two backward: so few programs would idle a device.
    *(interpreted(op, "fused_chunk", F16, sizes=heads(1, 270, 1, 24, 40), chunk_size=512) for op in MLSTM),
    *(
        interpreted("lightning", impl, dtype, sizes=heads(1, 70, 2, 24, 40))
        for impl in LIGHTNING
        for dtype in (F32, F16)
    ),
    *(interpreted("lightning", impl, F16, sizes=heads(1, 70, 2, 24, 40), initial_state=False) for impl in LIGHTNING),
    *(
        interpreted("lightning", impl, F16, sizes=sizes, options={"scale": -0.3})
        for impl in LIGHTNING
        for sizes in (heads(30, 1, 2, 16, 16), heads(1, 64, 2, 128, 16), heads(1, 33, 2, 40, 200))
    ),
    *(tiled(form, dtype) for form in TIME_TILES for dtype in (F32, F16)),
    *(
        tiled(form, F16, sizes=channels(2, seq_len, 24), initial_state=False)
        for form in TIME_TILES
        for seq_len in (1, 8)
    ),
    interpreted("rglru_layer", "fused", F32, kwargs=SCANS["rglru fused"][2]),
    *(
        each
        for tile in ("descriptors", "pointers", "programs", "pointer programs")
        for each in each_mlp(interpreted, F32, F16, kwargs=launches(tile), label=tile)
    ),
    *(
        each
        for sizes in (mlp_sizes(1, 8, 8), mlp_sizes(1, 72, 136), mlp_sizes(17, 8, 56))
        for each in each_mlp(interpreted, F16, sizes=sizes, kwargs=launches("descriptors"))
    ),
    # Launches of its own choice.
    *each_mlp(interpreted, F32, F16, sizes=mlp_sizes(5, 16, 24)),
    *(
        on_gpu(op, impl, dtype, sizes=heads(*sizes), chunk_size=chunk_size)
        for op, impl, chunk_size in (
            *((op, "fused_chunk", chunk_size) for op in MLSTM for chunk_size in (64, 256, 1024)),
            *((op, *other) for op in MLSTM for other in (("xl_chunk", 256), ("limit_chunk", 64))),
            *((op, "fused_chunk", 256) for op in ("simple_gla", "retention", "gated_retention", "mamba2_ssd")),
        )
        for sizes in ENGINE_SHAPES
        for dtype in (F32, F16, BF16)
    ),
    *(
        on_gpu(op, "whole_state", dtype, sizes=heads(*sizes), chunk_size=chunk_size)
        for op, chunk_size in (
            *itertools.product(MLSTM, (64, 256, 1024)),
            *((op, 256) for op in ("simple_gla", "retention", "gated_retention", "mamba2_ssd", "lightning")),
        )
        for sizes in WHOLE_STATE_SHAPES
        for dtype in (F16, BF16)
    ),
    # More heads than multiprocessors: those that are left over are cut into chunks.
    *(
        on_gpu(op, "whole_state", BF16, sizes=heads(*sizes), chunk_size=64)
        for op in (*MLSTM, "retention")
        for sizes in ((5, 200, 30, 128, 256), (1, 200, 70, 160, 320), (1, 200, 70, 192, 384), (3, 200, 100, 64, 64))
    ),
    on_gpu("mamba2_ssd", "whole_state", BF16, sizes=heads(1, 300, 4, 128, 64, num_groups=2), chunk_size=128),
    # Several launches, each of which rounds the sum.
    *(
        on_gpu(op, "whole_state", dtype, sizes=heads(1, 200, 2, *dims), chunk_size=64)
        for op in MLSTM
        for dims in ((384, 768), (640, 96), (1024, 1024))
        for dtype in (F16, BF16)
    ),
    *(
        on_gpu("lightning", impl, dtype, sizes=heads(*sizes), chunk_size=256)
        for impl in (*LIGHTNING, "fused_chunk")
        for sizes in LIGHTNING_SHAPES
        for dtype in (F32, F16, BF16)
    ),
    *(
        on_gpu(op, impl, BF16, sizes=heads(30, seq_len, 2, 64, 128), chunk_size=64)
        for op in MLSTM
        for impl in ("fused_chunk", "whole_state", "xl_chunk")
        for seq_len in (1, 2, 63, 65)
    ),
    *(
        on_gpu("lightning", impl, BF16, sizes=heads(30, seq_len, 2, 64, 128), chunk_size=128)
        for impl in (*LIGHTNING, "fused_chunk")
        for seq_len in (1, 2, 63, 65, 129)
    ),
    *(
        on_gpu(op, impl, BF16, kwargs={"chunk_size": 128, "state_dtype": BF16}, label="bf16 states")
        for op in MLSTM
        for impl in ("fused_chunk", "whole_state", "xl_chunk")
    ),
    # The single pass in bf16 at every size, everything else at one; the rest of the product is slow.
    *(
        on_gpu(
            op,
            impl,
            dtype,
            sizes=channels(*sizes),
            slow=op != "wkv4" and (op, impl, dtype) != ("rglru", "fused", BF16) and sizes != (3, 1000, 264),
        )
        for op, impl in SCAN_IMPLS
        # Every number of channels is compiled for on its own: the laws share a few.
        for sizes in (
            ((8, 2048, 768), (1, 4099, 256), (3, 1000, 264), (2, 129, 8))
            if op == "wkv4"
            else ((8, 2048, 1024), (1, 4099, 2560), (3, 1000, 264), (2, 129, 8))
        )
        for dtype in (F32, F16, BF16)
    ),
    *(
        scan_on_gpu(op, impl, dtype, sizes=channels(2, seq_len, 264 if op == "wkv4" else 136), initial_state=False)
        for op, impl in SCAN_IMPLS
        for dtype in ((F32, F16, BF16) if op == "wkv4" else (BF16,))
        for seq_len in ((1, 2, 31, 33, 127, 128) if op == "wkv4" else (1, 2, 63, 65))
    ),
    *(on_gpu("rglru_layer", "fused", dtype, sizes=channels(2, 1000, 256)) for dtype in (F16, BF16)),
    *(each for sizes in MLP_SHAPES for each in each_mlp(on_gpu, F32, F16, BF16, sizes=mlp_sizes(*sizes))),
)
def test_matches_reference(case: Case) -> None:
    """Outputs, last states and every gradient are those of the definition; whole_state is among the GPU's cases."""
    laws.check_matches_reference(case, **case.law)


@on_each(
    *(
        portable(op, "torch", dtype, splits=splits, chunk_size=16)
        for op in HEADS
        for dtype in (F64, F32, BF16)
        for splits in ((20,), (1, 16, 44))
    ),
    *(portable(op, "torch", dtype, splits=(1, 20), chunk_size=8) for op in CHANNELS for dtype in (F64, F32, BF16)),
    *(interpreted(op, impl, F16, splits=(17,), chunk_size=16) for op, impl in ENGINE_SPLITS),
    *(interpreted("lightning", impl, F16, sizes=heads(2, 35, 2, 24, 40), splits=(17,)) for impl in LIGHTNING),
    *(tiled(form, F16, splits=(1, 12)) for form in ("rglru fused", "linear_scan", "wkv4 scan", "wkv4 serial")),
    *recurrences_on_gpu(lambda op: [{"splits": (100, 101)}]),
    *(serial_on_gpu(dtype, splits=(100, 701)) for dtype in (F32, F16, BF16)),
)
def test_split_equals_whole(case: Case) -> None:
    laws.check_matches_reference(case, **case.law)


@on_each(
    *(portable(op, "torch", dtype, chunk_size=16) for op in HEADS for dtype in (F32, BF16)),
    *(portable(op, impl, F32) for op, impl in PORTABLE if op in CHANNELS),
    portable("gated_mlp", "torch", F64),
    *(interpreted("lightning", impl, F16, sizes=heads(2, 35, 2, 24, 40)) for impl in LIGHTNING),
    tiled("rglru fused", F32, exact=True),
    tiled("wkv4 scan", F32, exact=True, sizes=channels(2, 9, 24)),
    *each_mlp(interpreted, F16, F32, sizes=mlp_sizes(21, 24, 40), kwargs=launches("descriptors")),
    *recurrences_on_gpu(lambda op: [{}]),
    *each_mlp(on_gpu, F32, BF16),
)
def test_batch_invariant(case: Case) -> None:
    laws.check_batch_invariant(case, **case.law)


@on_each(
    *(
        portable(op, "torch", dtype, sizes=heads(2, 90, 8, 16, 16), chunk_size=chunk_size, **extreme)
        for op in HEADS
        for extreme in extremes(op)
        for chunk_size in (5, 64)
        for dtype in DTYPES
    ),
    *(
        portable(op, impl, dtype, **extreme)
        for op, impl in PORTABLE
        if op in CHANNELS
        for extreme in extremes(op)
        for dtype in DTYPES
    ),
    *(portable("gated_mlp", "torch", dtype, **extreme) for extreme in extremes("gated_mlp") for dtype in (F64, F32)),
    *(
        interpreted(op, impl, dtype, sizes=heads(1, 64, 2, 24, 40), chunk_size=32, **extreme)
        for op, impl in ENGINE_SPLITS
        # float16 has few bits for gradients that contain the exponential of a low gate.
        for extreme, dtype in ((extremes(op)[0], F16), *((extreme, F32) for extreme in extremes(op)))
    ),
    *(
        interpreted("lightning", impl, dtype, sizes=heads(1, 70, 2, 24, 40), **extremes("lightning")[0])
        for impl in LIGHTNING
        for dtype in (F32, F16)
    ),
    *(tiled("rglru fused rows backward", dtype, **extreme) for extreme in extremes("rglru") for dtype in (F32, F16)),
    *(
        tiled(form, F32, sizes=channels(1, 19, 24), **extreme)
        for form in ("wkv4 scan", "wkv4 serial", "wkv4 naive")
        for extreme in extremes("wkv4")
    ),
    *(
        interpreted(
            "gated_mlp",
            impl,
            F32,
            layout=layout,
            sizes=mlp_sizes(19, 16, 40),
            options={"activation": activation},
            kwargs=launches("descriptors"),
            **extreme,
        )
        for impl, layout in (("fused", "columns"), ("fused_save", "rows"))
        for activation in ACTIVATIONS
        for extreme in ({}, *extremes("gated_mlp"))
    ),
    *recurrences_on_gpu(extremes),
    *(serial_on_gpu(dtype, **extreme) for extreme in extremes("wkv4") for dtype in (F32, F16, BF16)),
    *(
        each
        for activation in ACTIVATIONS
        for extreme in ({}, *extremes("gated_mlp"))
        for each in each_mlp(
            on_gpu, F32, BF16, sizes=mlp_sizes(130, 136, 264), options={"activation": activation}, **extreme
        )
    ),
)
def test_extremes(case: Case) -> None:
    """Results stay finite and right over the inputs' whole range, and an MLP's for every activation."""
    laws.check_matches_reference(case, **case.law)


@on_each(
    *(
        portable(op, impl, F16, sizes=heads(1 if op == "mamba2_ssd" else 7, 41, 2, 64, 64), chunk_size=16, **large)
        for op, impl in PORTABLE
        if op in HALF_RANGE
        for large in half_ranges(op)
    ),
    *(
        interpreted(op, impl, F16, sizes=heads(1, 41, 2, 64, 64), chunk_size=16, **large)
        for op, impl in KERNELS
        if op in HALF_RANGE and impl not in (WHOLE_STATE, "limit_chunk")
        for large in half_ranges(op)
    ),
    *(
        on_gpu(op, impl, F16, sizes=heads(2, 300, 2, 64, 64), chunk_size=64, **large)
        for op, impl in KERNELS
        if op in HALF_RANGE
        for large in half_ranges(op)
    ),
)
def test_half_range(case: Case) -> None:
    """Where inputs and results fit into float16, so does all that is rounded in between."""
    laws.check_matches_reference(case, **case.law)


@on_each(
    *(
        portable(op, "torch", dtype, sizes=heads(2, 50, 2, 16, 24), starts=(1, 16, 29), chunk_size=chunk_size)
        for op in laws.DECAY_GATES
        for chunk_size in (8, 64)
        for dtype in DTYPES
    ),
    *(
        portable(op, "torch", F32, sizes=heads(2, 50, 1, 16, 24), starts=(1, 29), separator=separator, chunk_size=16)
        for op in laws.DECAY_GATES
        for separator in SEPARATORS
    ),
    *(
        interpreted(
            op, impl, dtype, sizes=heads(1, 64, 2, 24, 40), starts=(1, 20, 40), separator=separator, chunk_size=32
        )
        for op in (*MLSTM, "simple_gla")
        for separator in SEPARATORS
        for impl, dtype in (("fused_chunk", F16), ("xl_chunk", F32))
    ),
    *(
        on_gpu(op, impl, BF16, starts=(1, 64, 200), separator=separator, chunk_size=128)
        for op, impl in (*ENGINE_SPLITS, *((op, "whole_state") for op in MLSTM))
        for separator in (-1e4, *SEPARATORS)
    ),
)
def test_packed_documents(case: Case) -> None:
    laws.check_packed_documents(case, **case.law)


def masked(make: Callable[..., Any], op: str, impl: str, dtype: torch.dtype, **keywords: Any) -> list[Any]:
    """Return cases with a third of the tokens masked: at the start, in the middle and at the end.

    Half-precision cases also cut the sequence around these tokens, so that a part is all masked.
    """
    seq_len = 400 if make is on_gpu else 50 if op in HEADS else 19
    dims = (2, 64, 128) if make is on_gpu else (1, 24, 40)
    sizes = heads(1, seq_len, *dims) if op in HEADS else channels(2, seq_len, 24)
    starts = {"start": 0, "middle": seq_len // 3, "end": seq_len - seq_len // 3}
    if op in laws.FIXED_DECAY:
        starts, keywords = {"start": 0}, {**keywords, "initial_state": False}
    spans = {where: (start, start + seq_len // 3) for where, start in starts.items()}
    return [
        make(
            op, impl, dtype, label=where, sizes=sizes, start=start, stop=stop,
            splits=tuple(t for t in (start, stop) if 0 < t < seq_len and dtype in (F16, BF16)), **keywords,
        )
        for where, (start, stop) in spans.items()
    ]  # fmt: skip


LOW_GATES = [{"i": low} for low in (-math.inf, -1e30, -1e4, torch.finfo(F32).min, -90.0, -1e10)]
"""Input gates of mLSTMexp with which tokens before all others leave no trace."""


@on_each(
    *(
        each
        for op, impl in PORTABLE
        if op in laws.MASKS
        for dtype in ((F64, F16) if impl == "torch" else (F64,))
        for each in masked(portable, op, impl, dtype, chunk_size=8)
    ),
    *(
        each
        for mask in LOW_GATES
        for impl, dtype in (("torch", F32), ("torch", F16), ("parallel", F32))
        for each in masked(portable, "mlstm_exp", impl, dtype, mask=mask, initial_state=False, chunk_size=8)[:1]
    ),
    *(
        each
        # Mamba-2's first seed draws a gradient of A that all but cancels.
        for op, seed in ((*((op, 0) for op in (*MLSTM, "simple_gla")), ("mamba2_ssd", 1)))
        for impl, dtype in (("fused_chunk", F16), ("xl_chunk", F32))
        for each in masked(interpreted, op, impl, dtype, chunk_size=16, seed=seed)
    ),
    *(
        each
        for mask in LOW_GATES[::2]
        for impl, dtype in (("fused_chunk", F16), ("limit_chunk", F32))
        for each in masked(interpreted, "mlstm_exp", impl, dtype, mask=mask, initial_state=False, chunk_size=16)[:1]
    ),
    *(each for impl in LIGHTNING for each in masked(interpreted, "lightning", impl, F16)),
    *(
        each
        for form in ("rglru fused", "linear_scan", "wkv4 scan", "wkv4 serial", "wkv4 naive")
        for op, impl, kwargs in [TIME_TILES[form]]
        for each in masked(interpreted, op, impl, F16, kwargs=kwargs)
    ),
    *(
        interpreted(
            op, "step", F32, sizes=heads(1, 4, 2, 24, 40) if op in HEADS else channels(2, 4, 24),
            initial_state=first > 0, start=first, stop=first + 2, splits=(1, 2, 3),
        )
        for op in laws.MASKS
        for first in ((0,) if op in laws.FIXED_DECAY else (0, 1))
    ),
    *(
        each
        for op in laws.MASKS
        if op in SCALAR_DECAY
        for impl, dtype in (("fused_chunk", BF16), ("xl_chunk", BF16), ("xl_chunk", F32), ("whole_state", BF16))
        for each in masked(on_gpu, op, impl, dtype, chunk_size=128)
    ),
    *(
        each
        for mask in LOW_GATES
        for impl, dtype in (("fused_chunk", BF16), ("xl_chunk", BF16), ("limit_chunk", F32), ("whole_state", F16))
        for each in masked(on_gpu, "mlstm_exp", impl, dtype, mask=mask, initial_state=False, chunk_size=64)[:1]
    ),
    *(each for impl in LIGHTNING for each in masked(on_gpu, "lightning", impl, BF16)),
    *(each for op, impl in ONE_PASS.items() for dtype in (F32, BF16) for each in masked(on_gpu, op, impl, dtype)),
)  # fmt: skip
def test_masked_tokens_leave_no_trace(case: Case) -> None:
    laws.check_masked_tokens(case, **case.law)


@on_each(
    *(portable(op, impl, F64, chunk_size=16) for op, impl in PORTABLE if op != "gated_mlp"),
    *(interpreted("lightning", impl, F32, sizes=heads(1, 70, 2, 24, 40)) for impl in LIGHTNING),
)
def test_gradients_of_the_last_state_alone(case: Case) -> None:
    laws.check_last_state_alone(case)


@on_each(
    *(portable("mlstm_exp", "torch", dtype, chunk_size=16) for dtype in (F64, F32)),
    *(portable(op, impl, F32, sizes=channels(2, 9, 32)) for op, impl in PORTABLE if op == "wkv4"),
    *(tiled(form, F32, sizes=channels(2, 9, 32)) for form in ("wkv4 scan", "wkv4 serial", "wkv4 naive")),
)
def test_state_scale_is_free(case: Case) -> None:
    laws.check_state_scale_is_free(case)


@on_each(
    *(interpreted(op, "step", F32, sizes=heads(1, 11, 2, 24, 40), prefix=8) for op in HEADS),
    *(interpreted(op, "step", F32, prefix=16) for op in ONE_PASS),
    *(
        on_gpu(op, "step", dtype, sizes=heads(1, 28, 2, 24, 40) if op in HEADS else channels(2, 40, 24), prefix=8)
        for op in (*HEADS, *ONE_PASS)
        for dtype in (F32, F16, BF16)
    ),
)
def test_steps_continue_a_sequence(case: Case) -> None:
    laws.check_steps(case, **case.law)


@on_each(
    *(portable(op, impl, F64, chunk_size=16) for op, impl in PORTABLE if op != "rglru_layer"),
    *(interpreted("lightning", impl, F32, sizes=heads(1, 35, 1, 16, 24)) for impl in LIGHTNING),
    *(tiled(form, F32, sizes=channels(1, 9, 8)) for form in ("rglru fused", "wkv4 scan")),
    *each_mlp(interpreted, F32, sizes=mlp_sizes(5, 16, 24), kwargs=launches("descriptors")),
    *each_mlp(on_gpu, BF16, sizes=mlp_sizes(5, 16, 24)),
)
def test_gradients_alone(case: Case) -> None:
    laws.check_gradients_alone(case)


ONE_OF_EACH = (
    ("mlstm_exp", "fused_chunk"), ("lightning", "lightning1"), ("lightning", "lightning2"), ("linear_scan", "naive"),
    ("wkv4", "naive"), ("gated_mlp", "fused"),
)  # fmt: skip
"""A kernel of each autograd function."""
FEW = {
    **dict.fromkeys(HEADS, heads(2, 20, 2, 16, 24)),
    **dict.fromkeys((*CHANNELS, "rglru_layer"), channels(2, 20, 16)),
    "gated_mlp": mlp_sizes(5, 16, 24),
}
MORE = {op: {"batch": 16} if op in HEADS else {"channels": 515} for op in (*HEADS, *CHANNELS) if op != "mamba2_ssd"}
"""What makes of these as many values as a bound needs, so that fewer problems are drawn."""


@on_each(
    *(
        portable(op, impl, dtype, sizes={**FEW[op], **MORE.get(op, {})}, initial_state=state, chunk_size=8)
        for op, impl in PORTABLE
        for dtype, state in ((F64, True), (F64, False), (BF16, True))
    ),
    *(
        portable("mlstm_exp", impl, F64, sizes=FEW["mlstm_exp"], options={"normalizer_gradient": True}, chunk_size=8)
        for impl in ("torch", "parallel")
    ),
    *(interpreted(op, impl, F32, sizes=FEW[op], initial_state=False) for op, impl in ONE_OF_EACH),
    *(
        on_gpu(op, impl, BF16, initial_state=state)
        for op, impl in KERNELS
        if "fwbw" in get_operation(op).implementation(impl).modes
        for state in (True, False)
    ),
    *(on_gpu(op, impl, dtype) for op, impl in PORTABLE for dtype in (F64, BF16)),
)
def test_second_derivatives(case: Case) -> None:
    laws.check_second_derivatives(case)


@on_each(*(portable(op, impl, F32, chunk_size=16) for op, impl in PORTABLE), *PORTABLE_MLPS)
def test_leaves_inputs_alone(case: Case) -> None:
    laws.check_leaves_inputs_alone(case)


INTERPRETED = [(op, impl) for op, impl in KERNELS if not get_operation(op).implementation(impl).architectures]
BAD = {
    op: heads(2, 20, 2, 16, 32) if op in HEADS else SIZES["interpret"][1 if op in CHANNELS else 2] for op in OPERATIONS
}
BAD["rglru_layer"] = BAD["rglru"]


@on_each(
    *(portable(op, impl, dtype, sizes=BAD[op]) for op, impl in PORTABLE for dtype in (F32, BF16)),
    *(interpreted(op, impl, F32, sizes=BAD[op]) for op, impl in INTERPRETED),
    *(
        on_gpu(op, impl, BF16, sizes=BAD[op], slow=impl in ("chunked", "naive") and op != "wkv4")
        for op, impl in KERNELS
        if op in (*MLSTM, "lightning", *ONE_PASS, "gated_mlp") and impl != "limit_chunk"
    ),
)
def test_bad_input_fails_clearly(case: Case) -> None:
    laws.check_bad_input(case)


SEVERAL = {
    **dict.fromkeys(HEADS, heads(2, 23, 2, 16, 24)), **dict.fromkeys((*CHANNELS, "rglru_layer"), channels(2, 19, 24)),
    "mamba2_ssd": heads(2, 23, 4, 16, 24, num_groups=2), "gated_mlp": mlp_sizes(41, 40, 72),
}  # fmt: skip
ONE_TOKEN = {op: {**SEVERAL[op], "seq_len": 1} for op in (*HEADS, *CHANNELS)}


@on_each(
    *(portable(op, impl, F32, sizes=SEVERAL[op], chunk_size=8) for op, impl in PORTABLE),
    *(
        interpreted(op, impl, F16, sizes=SEVERAL[op], chunk_size=16)
        for op, impl in INTERPRETED
        if op in ("mlstm_exp", "rglru_layer") or (op, impl) == ("mamba2_ssd", "fused_chunk") or impl in LIGHTNING
    ),
    *(tiled(form, F32, sizes=SEVERAL["rglru"]) for form in TIME_TILES),
    *(interpreted(op, "step", F16, sizes=ONE_TOKEN[op]) for op in ("mlstm_exp", "rglru", "wkv4")),
    *each_mlp(interpreted, F16),
    *(on_gpu(op, impl, BF16, chunk_size=64) for op, impl in KERNELS),
    *(on_gpu("mlstm_sig", WHOLE_STATE, BF16, sizes=heads(*sizes)) for sizes in WHOLE_STATE_SHAPES),
    *(on_gpu(op, "step", BF16, sizes=ONE_TOKEN[op]) for op in ("mlstm_exp", "rglru", "wkv4")),
    # The batch's stride is one unit of eight elements, which Triton takes for a constant.
    *(on_gpu(op, impl, BF16, sizes=channels(2, 300, 8)) for op, impl in SCAN_IMPLS),
    serial_on_gpu(BF16),
)
def test_slices_of_one_projection(case: Case) -> None:
    laws.check_strided(case)


@on_each(
    *(portable(op, impl, F32) for op, impl in PORTABLE),
    *(interpreted(op, impl, F32) for op, impl in INTERPRETED),
    *(interpreted(op, "step", F32, sizes=ONE_TOKEN[op]) for op in ("mlstm_exp", "rglru", "wkv4")),
    *(on_gpu(op, impl, BF16) for op, impl in KERNELS),
)
def test_no_tokens(case: Case) -> None:
    laws.check_no_tokens(case)


@on_each(
    *(make(op, impl, F16) for make in (interpreted, on_gpu) for op, impl in (*INTERPRETED, ("projections", "gemms")))
)
def test_tensors_without_values_are_refused(case: Case) -> None:
    with pytest.raises(ValueError, match=r'\w must hold values, got a tensor on meta: impl="torch" takes'):
        case.function(*(x.to("meta") for x in case.draw().inputs.values()))


@on_each(*(interpreted(op, impl, F32) for op, impl in (*INTERPRETED, ("projections", "gemms"))))
def test_what_is_declared_unsupported_is_refused(case: Case) -> None:
    laws.check_unsupported(case)


def off_by_two_percent(fn: laws.Function, name: str) -> laws.Function:
    """Return the function with h, C or n 2 % too large."""

    def wrong(*inputs: torch.Tensor, **keywords: Any) -> Any:
        results, structure = tree_flatten(fn(*inputs, **keywords))
        place = "hCn".index(name)
        return tree_unflatten([x * 1.02 if n == place else x for n, x in enumerate(results)], structure)

    return wrong


@on_each(
    *(
        # Without a decay the roundings of all steps add up: in bfloat16 to as much.
        portable(
            op, "torch", F16 if op == "delta_net" else BF16, wrap=partial(off_by_two_percent, name=name), name=name
        )
        for op in OPERATIONS
        for name in ("h", *(["n" if op in ("mlstm_exp", "wkv4") else "C"] if op in (*HEADS, *CHANNELS) else []))
    ),
)
def test_a_wrong_implementation_is_found(case: Case) -> None:
    with pytest.raises(AssertionError, match=rf"{case.op} against its definition: .*{case.law['name']}: error"):
        laws.check_matches_reference(case)


@on_each(*(portable(op, "torch", F32) for op in OPERATIONS))
def test_an_error_of_twice_the_bound_is_found(case: Case) -> None:
    """In any one value of any result, though the bound is taken over several draws: it stays some roundings wide."""
    problem = case.draw()
    expected, allowed = laws.expectations(case, problem)
    results = laws.evaluate(problem, case.function, stabilizer=expected.get("m"))
    laws.assert_close(results, expected, allowed, "before")
    for name in results.keys() - {"m"}:
        assert allowed[name] <= 64 * torch.finfo(F32).eps * float(expected[name].abs().max()), name
        planted = results[name].clone()
        planted.view(-1)[planted.numel() // 2] += 2 * allowed[name]
        with pytest.raises(AssertionError, match=f"^planted: {name}: error"):
            laws.assert_close({**results, name: planted}, expected, allowed, "planted")


@pytest.mark.parametrize(
    "operation", [*map(get_operation, OPERATIONS), *BASELINE_OPERATIONS.values()], ids=lambda op: op.name
)
def test_inputs_are_the_declared_arguments(operation: Operation) -> None:
    sizes = {**mlp_sizes(9, 24, 40), **channels(2, 45, 12), **heads(2, 45, 8, 16, 24)}
    first, again, other = (operation.make_inputs(sizes, dtype=BF16, seed=seed) for seed in (3, 3, 4))
    assert tuple(first) == operation.arguments
    assert set(operation.differentiable) <= set(first)
    values = next(iter(first.values()))
    assert not torch.equal(values, next(iter(other.values())))
    for name, x in first.items():
        assert torch.equal(x, again[name])
        # KDA's log decays have a column for each of the keys'.
        is_input = x.dim() == values.dim() and (operation.name, name) != ("kda", "g")
        assert x.dtype == (BF16 if is_input or name.startswith("w_") else F32), name
        assert x.is_contiguous() and x.isfinite().all()
