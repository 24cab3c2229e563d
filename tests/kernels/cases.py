"""The cases that laws are held on: every form of every operation, on small inputs in plain torch and in Triton's
interpreter, and at real sizes on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch

from lrbench.kernels import FAMILIES, get_operation
from lrbench.kernels.common.arguments import CASE_DTYPES
from lrbench.kernels.common.channels import TileConfig
from lrbench.kernels.gated_mlp import config as mlp
from lrbench.kernels.rglru.config import ScanConfig
from lrbench.kernels.scalar_decay.declare import SCHEMES, WHOLE_STATE
from lrbench.kernels.wkv.config import WkvConfig, select_config
from lrbench.tests.kernels.laws import EXTREMES, LAYOUTS, Case

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
DTYPES = (F64, F32, F16, BF16)

OPERATIONS = [name for names in FAMILIES.values() for name in names if name in EXTREMES]
"""Those held to the laws."""
ENGINE = tuple(impl for impl in SCHEMES if impl != WHOLE_STATE)
"""The engine's implementations in Triton; whole_state, in Gluon, has no interpreter."""
LIGHTNING = ("lightning1", "lightning2")
"""The implementations of Lightning's authors' algorithms."""
HEADS = [op for op in OPERATIONS if "num_heads" in get_operation(op).sizes]
SCALAR_DECAY = [op for op in HEADS if op not in FAMILIES["delta"]]
"""Those of the engine."""
CHANNELS = [op for op in OPERATIONS if get_operation(op).channelwise]


def heads(batch: int, seq_len: int, num_heads: int, head_dim_qk: int, head_dim_v: int, **others: int) -> dict[str, int]:
    """Return sizes of an operation of the engine."""
    names = ("batch", "seq_len", "num_heads", "head_dim_qk", "head_dim_v")
    return {**dict(zip(names, (batch, seq_len, num_heads, head_dim_qk, head_dim_v), strict=True)), **others}


def channels(batch: int, seq_len: int, channels: int) -> dict[str, int]:
    """Return sizes of an operation over channels."""
    return {"batch": batch, "seq_len": seq_len, "channels": channels}


def mlp_sizes(tokens: int, d_model: int, d_ff: int) -> dict[str, int]:
    """Return sizes of a gated MLP."""
    return {"batch": 1, "seq_len": tokens, "d_model": d_model, "d_ff": d_ff}


SIZES = {
    "portable": (heads(2, 45, 8, 16, 24), channels(2, 45, 12), mlp_sizes(9, 24, 40)),
    "interpret": (heads(1, 35, 2, 24, 40), channels(2, 19, 24), mlp_sizes(41, 40, 72)),
    "gpu": (heads(2, 300, 2, 64, 128), channels(2, 400, 136), mlp_sizes(300, 264, 520)),
}
"""Where a case is held -> its sizes where it names none: of heads, of channels and of an MLP."""
WIDE = {"mamba2_ssd": heads(2, 45, 512, 6, 2), **dict.fromkeys(CHANNELS, channels(2, 45, 513))}
"""The same of a portable case whose bound is derived: gradients have a value a head or channel, and one problem of
:data:`.laws.DRAWN_VALUES` takes less time than several of few. float64 has no such bound."""

DEVICES = {"portable": "cpu", "interpret": "cpu", "gpu": "cuda"}


def chunks(op: str, impl: str, chunk_size: int) -> dict[str, Any]:
    """Return the keyword of a chunk length, for an implementation that takes one."""
    return {"chunk_size": chunk_size} if get_operation(op).implementation(impl).chunked else {}


def case(
    place: str,
    op: str,
    impl: str,
    dtype: torch.dtype,
    *,
    chunk_size: int | None = None,
    label: str = "",
    slow: bool = False,
    **keywords: Any,
) -> Any:
    """Return a test's parameter: a :class:`Case`, with its name and marks.

    Args:
        place: portable (the main process), interpret or gpu.
        op, impl, dtype: of the case.
        chunk_size: of an implementation that takes one; others leave it out.
        label: what to call it in the test's name besides.
        slow: whether to mark it so.
        keywords: other fields of the case, or the law's.
    """
    if chunk_size and (kwargs := chunks(op, impl, chunk_size)):
        keywords["kwargs"] = kwargs
    names = {each.name for each in fields(Case)}
    given = {name: value for name, value in keywords.items() if name in names}
    law = {name: value for name, value in keywords.items() if name not in names}
    kind = get_operation(op).sizes
    default = SIZES[place][0 if "num_heads" in kind else 1 if "channels" in kind else 2]
    if place == "portable" and dtype != F64:
        default = WIDE.get(op, default)
    marks = [getattr(pytest.mark, place)] if place != "portable" else []
    values = [_short(value) for name, value in keywords.items() if name != "ranges"]
    parts = (place, op, impl, str(dtype).removeprefix("torch."), label, *values)
    return pytest.param(
        Case(op=op, impl=impl, dtype=dtype, device=DEVICES[place], law=law, **{"sizes": default, **given}),
        id="-".join(filter(None, parts)),
        marks=[*marks, pytest.mark.slow] if slow else marks,
    )


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "x".join(filter(None, map(_short, value.values())))
    return str(value) if isinstance(value, str | int | float | tuple) else ""


portable, interpreted, on_gpu = (partial(case, place) for place in SIZES)


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Set what torch does with float32 operands of products: "tf32" or "ieee"."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


def on_each(*cases: Any) -> Any:
    """Parametrise a test by cases."""
    return pytest.mark.parametrize("case", cases)


KERNELS = [
    (op, implementation.name)
    for op in OPERATIONS
    for implementation in get_operation(op).implementations
    if "triton" in implementation.requires and "fw" in implementation.modes
]
"""Every form in Triton of a whole sequence."""
PORTABLE = [
    (op, implementation.name)
    for op in OPERATIONS
    for implementation in get_operation(op).implementations
    if "cpu" in implementation.devices
]
"""Every form in plain torch."""


def tile(block_i: int, block_o: int, block_c: int) -> TileConfig:
    """Return a tile of time for one warp."""
    return TileConfig(block_i=block_i, block_o=block_o, block_c=block_c, num_warps=1)


# Tiles so small that 19 steps are several of them, the last one ragged; 24 channels leave a block half empty.
SCAN_ROWS_FORWARD = ScanConfig(forward=tile(4, 2, 16), backward=tile(2, 4, 32))
SCAN_ROWS_BACKWARD = ScanConfig(forward=tile(2, 4, 32), backward=tile(4, 2, 16))
SCAN_NAIVE = ScanConfig(forward=tile(4, 1, 32), backward=tile(4, 1, 32))
SCANS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "rglru fused": ("rglru", "fused", {"config": SCAN_ROWS_FORWARD}),
    "rglru fused rows backward": ("rglru", "fused", {"config": SCAN_ROWS_BACKWARD}),
    "rglru chunked": ("rglru", "chunked", {"config": SCAN_ROWS_FORWARD, "chunk_size": 16}),
    "rglru naive": ("rglru", "naive", {"config": SCAN_NAIVE}),
    "linear_scan": ("linear_scan", "scan", {"config": SCAN_ROWS_FORWARD}),
    "linear_scan chunked": ("linear_scan", "chunked", {"config": SCAN_ROWS_BACKWARD, "chunk_size": 16}),
    "linear_scan naive": ("linear_scan", "naive", {"config": SCAN_NAIVE}),
}

WKV_ROWS_FORWARD = WkvConfig(forward=tile(4, 2, 16), backward=tile(2, 4, 32), look=2)
WKV_ROWS_BACKWARD = WkvConfig(forward=tile(2, 2, 32), backward=tile(16, 2, 16), keep="weights", look=4)
WKV_SERIAL = WkvConfig(forward=tile(4, 2, 16), backward=tile(2, 4, 32), keep="tokens", serial=True, look=2)
WKV_NAIVE = WkvConfig(forward=tile(4, 1, 32), backward=tile(8, 1, 32))
WKVS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "wkv4 scan": ("wkv4", "scan", {"config": WKV_ROWS_FORWARD}),
    "wkv4 scan, long rows backward": ("wkv4", "scan", {"config": WKV_ROWS_BACKWARD}),
    "wkv4 serial": ("wkv4", "scan", {"config": WKV_SERIAL}),
    "wkv4 naive": ("wkv4", "naive", {"config": WKV_NAIVE}),
}


def serial_config(dtype: torch.dtype) -> WkvConfig:
    """Return WKV's launches on Hopper with states that pass from tile to tile."""
    chosen = select_config({"batch": 8, "channels": 768}, CASE_DTYPES[dtype], (9, 0), True, impl="scan")
    return replace(chosen, keep="tokens", serial=True)


TIME_TILES = {**SCANS, **WKVS}
"""Every kernel over channels: name -> operation, implementation, keywords."""


def tiled(form: str, dtype: torch.dtype, **keywords: Any) -> Any:
    """Return a case of a kernel over channels, one of :data:`TIME_TILES`, in the interpreter."""
    op, impl, kwargs = TIME_TILES[form]
    return interpreted(op, impl, dtype, **{"label": form, **keywords, "kwargs": kwargs})


MLP_SMALL = mlp.GemmConfig(block_m=16, block_f=32, block_k=16, subtiles=2, group_m=2, use_tma=True, persistent=True)
MLP_TILES = {
    "descriptors": MLP_SMALL,
    "pointers": replace(MLP_SMALL, use_tma=False, subtiles=1),
    "programs": replace(MLP_SMALL, subtiles=1, block_f=16, persistent=False),
    "pointer programs": replace(MLP_SMALL, use_tma=False, persistent=False, group_m=8),
}
"""Tiles so small that 41 tokens and 72 columns are several, the last ones ragged, and a program takes several."""
MLP_ALTERNATIVES = {
    "sub1": {"subtiles": 1, "num_stages": 3},
    "sub2": {"subtiles": 2, "num_stages": 3},
    "group8": {"group_m": 8},
    "k128": {"block_k": 128, "num_stages": 2},
    "tall": {"block_m": 256, "block_f": 64, "num_stages": 3},
    "not flattened": {"flatten": False},
    "programs": {"persistent": False},
    "narrow": {"block_f": 64},
}
"""Forward launches worth timing on Hopper; all must be right first."""
MLP_FORMS = [(impl, layout) for layout in LAYOUTS for impl in ("fused", "fused_save")]
"""The first projects again in the backward pass, the second saves the pre-activations; weights in every layout."""


def each_mlp(make: Callable[..., Any], *dtypes: torch.dtype, **keywords: Any) -> list[Any]:
    """Return what makes a case (:data:`interpreted`, :data:`on_gpu`) makes of each form of the gated MLP."""
    forms = itertools.product(MLP_FORMS, dtypes)
    return [make("gated_mlp", impl, dtype, layout=layout, **keywords) for (impl, layout), dtype in forms]


def launches(name: str) -> dict[str, Any]:
    """Return the keywords of an MLP's launches with small tiles."""
    return {"config": mlp.GatedMlpConfig(forward=MLP_TILES[name], gradient=MLP_TILES[name])}
