"""Presets: named sets of axes, the ones every kernel family has and those of single families (presets.toml)."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..kernels.baselines.published import MODELS
from ..results.arguments import one_of
from ..results.toml_tables import read_toml

_MLPS = (ops["gated_mlp"] for ops in MODELS.values() if "gated_mlp" in ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named set of axes; a field that the user gives on the command line replaces the preset's.

    Fields that it does not set have the defaults below, which are those published for one GPU.

    An operation is planned over the axes that its sizes name: heads and head dims, channels, or the matrices of an MLP.

    Attributes:
        seq_lens: of an MLP, tokens; others of the same name as there: see :class:`.request.Axes`.
        chunk_sizes: chunk lengths besides the one that an implementation chooses.
        matrices: (d_model, d_ff) of MLPs.
        batch: the batch, in place of ``tokens``.
        step_batches: the batches of decoding steps.
        embedding_dim: num_heads * head_dim_v held constant over the head dims.
        operations: number of the family's operations to measure, in the order the family lists them; 0 is all.
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
    matrices: tuple[tuple[int, int], ...] = tuple((sizes["d_model"], sizes["d_ff"]) for sizes in _MLPS)
    modes: tuple[str, ...] = ("fw", "fwbw")
    tokens: int = 65536
    batch: int | None = None
    step_batches: tuple[int, ...] = (16,)
    contexts: tuple[int, ...] = (8192,)
    embedding_dim: int = 4096
    operations: int = 2
    budget_s: float = 0.4
    dtypes: tuple[str, ...] | None = None
    state_dtypes: tuple[str, ...] = ("fp32",)
    portable_on_gpu: bool = False
    impls: tuple[str, ...] | None = None


@functools.cache
def _stored() -> dict[str, dict[str, Preset]]:
    """Return the tables of presets.toml, which are named by their paths, as presets by name."""
    keys = {"like": str, **typing.get_type_hints(Preset)}
    of_name = Mapping[str, keys]  # type: ignore[valid-type]
    form = {"common": of_name, "templates": of_name, "families": Mapping[str, of_name], "on_gpu": of_name}
    file = read_toml(Path(__file__).with_suffix(".toml"), form, "presets")
    groups = {name: file[name] for name in ("common", "templates")} | file["families"] | {"on_gpu": file["on_gpu"]}
    known: dict[str, Preset] = {}
    found: dict[str, dict[str, Preset]] = {}
    for group, tables in groups.items():
        for name, axes in tables.items():
            base = known[axes.pop("like")] if "like" in axes else Preset(name=name, summary="")
            named = dataclasses.replace(base, name="quick" if group == "on_gpu" else name, **axes)
            found.setdefault(group, {})[name] = named
            known.setdefault(name, named)
    return found


def presets_for(kernel: str, device_kind: str = "cpu") -> dict[str, Preset]:
    """Return the presets of a kernel family by name."""
    stored = _stored()
    presets = stored["common"] | stored.get(kernel, {})
    if device_kind == "cuda":
        usual = dataclasses.replace(stored["templates"]["quick-on-gpu"], name="quick")
        presets["quick"] = stored["on_gpu"].get(kernel, usual)
    return presets


def get_preset(name: str, kernel: str, device_kind: str) -> Preset:
    """Return preset ``name`` of a kernel family on a device; ValueError lists the known ones."""
    known = presets_for(kernel, device_kind)
    one_of("preset", name, known, f" for kernel {kernel}")
    return known[name]
