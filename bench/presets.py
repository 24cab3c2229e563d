"""Presets: named sets of axes of results/presets.toml, those that every family of kernels has and those of one."""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..results.arguments import one_of
from ..results.store import HERE
from ..results.toml_tables import read_toml

LLAMA = ((4096, 14336), (8192, 28672), (16384, 53248))
"""(d_model, d_ff) of Llama 3 8B, 70B and 405B."""

QUICK_ON_GPU = "quick-on-gpu"
"""The table of what quick is on a GPU."""


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
        operations: number of the family's operations to measure, in the order the family lists them, or all.
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
    operations: int | Literal["all"] = 2
    budget_s: float = 0.4
    dtypes: tuple[str, ...] | None = None
    state_dtypes: tuple[str, ...] = ("fp32",)
    portable_on_gpu: bool = False
    impls: tuple[str, ...] | None = None


@functools.cache
def _tables() -> dict[str, dict[str, Preset]]:
    """Return the presets by the names of their tables; ValueError where the file is not as it says."""
    form = {"like": str, **typing.get_type_hints(Preset)}
    tables = read_toml(HERE / "presets.toml", Mapping[str, Mapping[str, form]], "presets")  # type: ignore[valid-type]

    def fields(family: str, name: str) -> dict[str, Any]:
        own = dict(tables[family][name])
        like = own.pop("like", None)
        return {**(fields(*like.split(".")) if like else {}), **own}

    return {
        family: {name: Preset(**{"name": name, **fields(family, name)}) for name in own}
        for family, own in tables.items()
    }


def presets_for(kernel: str, device_kind: str = "cpu") -> dict[str, Preset]:
    """Return the presets of a kernel family by name."""
    found = {**_tables()["every"], **_tables().get(kernel, {})}
    on_gpu = found.pop(QUICK_ON_GPU)
    return {**found, "quick": on_gpu} if device_kind == "cuda" else found


def get_preset(name: str, kernel: str, device_kind: str) -> Preset:
    """Return preset ``name`` of a kernel family on a device; ValueError lists the known ones."""
    known = presets_for(kernel, device_kind)
    one_of("preset", name, known, f" for kernel {kernel}")
    return known[name]
