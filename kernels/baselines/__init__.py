"""Outside packages' implementations, one adapter module per package. Data only: imports neither torch nor a package.

A new baseline is one :class:`~.spec.Baseline` in its package's module, with a build function beside it, which spec.py
describes; a new package is one module added to :data:`BASELINES`. operations.py and references.py have the operations
that baselines alone compute.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...results.arguments import one_of
from ...results.schema import Case
from .. import FAMILIES
from .. import get_operation as get_kernel_operation
from ..common.spec import Implementation, Operation, width_of
from . import (
    accelerated_scans,
    delta_rule,
    flash_attention,
    flash_linear_attention,
    jax_scan,
    liger,
    lightning_attention,
    mamba,
    nxai_mlstm,
    pytorch,
    xformers,
)
from .operations import OPERATIONS
from .spec import Baseline

BASELINES: tuple[Baseline, ...] = (
    *nxai_mlstm.BASELINES,
    *flash_linear_attention.BASELINES,
    *mamba.BASELINES,
    *delta_rule.BASELINES,
    *lightning_attention.BASELINES,
    *flash_attention.BASELINES,
    *pytorch.BASELINES,
    *accelerated_scans.BASELINES,
    *jax_scan.BASELINES,
    *liger.BASELINES,
    *xformers.BASELINES,
)


def baselines_for(kernel: str) -> tuple[Baseline, ...]:
    """Return the baselines a kernel family is compared with; an unknown family has none."""
    return tuple(baseline for baseline in BASELINES if kernel in baseline.kernels)


@functools.cache
def get_baseline(op: str, name: str) -> Baseline:
    """Return operation ``op``'s baseline ``name``; ValueError lists the known ones."""
    known = {baseline.name: baseline for baseline in BASELINES if baseline.op == op}
    one_of("impl", name, known, f" for {op}")
    return known[name]


@functools.cache
def get_operation(name: str) -> Operation:
    """Return an operation of lrbench's own or one that only baselines compute; ValueError lists the known ones."""
    if name in OPERATIONS:
        return OPERATIONS[name]
    one_of("op", name, [*(op for ops in FAMILIES.values() for op in ops), *OPERATIONS])
    return get_kernel_operation(name)


def get_implementation(op: str, name: str) -> Implementation | Baseline:
    """Return an operation's implementation, ours or outside; ValueError lists the known ones."""
    return get_baseline(op, name) if "." in name else get_operation(op).implementation(name)


def why_unsupported(op: str, impl: str, mode: str, dtype: str, sizes: Mapping[str, int]) -> str | None:
    """Return why an implementation, ours or outside, cannot run a problem on any machine, or None."""
    return get_implementation(op, impl).why_unsupported(mode, dtype, None, sizes)


def availability(baseline: Baseline) -> str | None:
    """Return None if the package is installed, else the reason with the command that installs it. Imports nothing."""
    module, command = baseline.module or baseline.provider, baseline.install
    command = command or f"pip install {baseline.distribution}=={baseline.tested}"
    if not _module_exists(module):
        return f"{module} is not installed: {command}"
    if baseline.extension and not _module_exists(baseline.extension):
        return f"{module} does not import: it was built without {baseline.extension}: {command}"
    return None


def installed_versions() -> dict[str, str]:
    """Return the versions of torch, triton and every installed package that a baseline or a known failure names.

    Keys are distribution names, lower case with hyphens.
    """
    names = {"torch", "triton", *(baseline.distribution for baseline in BASELINES)}
    names.update(name for baseline in BASELINES for known in baseline.known_bad for name in known.versions)
    found = {name: next(iter(importlib.metadata.distributions(name=name)), None) for name in sorted(names)}
    return {name: each.version for name, each in found.items() if each is not None}


def known_bad_here(
    baseline: Baseline, case: Case, versions: Mapping[str, str], capability: tuple[int, int] | str | None
) -> str | None:
    """Return why a case is known not to work with what is installed here, or None.

    Args:
        versions: as :func:`installed_versions` returns them.
        capability: the GPU's compute capability, (9, 0) or "9.0"; None on a CPU.

    Returns:
        The reason and its source in one sentence.
    """
    architecture = capability if isinstance(capability, str) or capability is None else ".".join(map(str, capability))
    for known in baseline.known_bad:
        affected = case.mode in (known.modes or (case.mode,)) and case.dtype in (known.dtypes or (case.dtype,))
        if affected and known.is_of(versions, architecture):
            return f"{known.reason} ({known.source})"
    return None


def plan_sizes(
    baseline: Baseline, sizes: Mapping[str, int], chunk_sizes: Sequence[int] = (), *, op: str | None = None
) -> list[dict[str, int]]:
    """Return the sizes at which a baseline runs beside a kernel family at these sizes, one mapping per case.

    A baseline of another mathematics runs at the same batch, tokens and embedding dim with its authors' heads and
    state; one that computes the operation that is swept runs at the same sizes.

    Args:
        sizes: the family's: batch, seq_len, num_heads, head_dim_qk, head_dim_v.
        chunk_sizes: the chunk lengths asked for. A baseline with a chunk axis runs at those it accepts, or at its
            recommended one where it accepts none of them; chunks longer than the sequence are left out if a shorter one
            remains.
        op: the operation swept, if known.

    Returns:
        Size mappings, ``chunk_size`` included where the baseline has a chunk axis. Different sizes of the family can
        give the same mapping (attention's do not depend on the head dim): the caller drops duplicates.
    """
    planned = {name: size for name, size in sizes.items() if name != "chunk_size"}
    if baseline.own_sizes and baseline.op != op:
        own = get_operation(baseline.op).sizes_at(width_of(sizes))
        lengths = ("batch", "seq_len", "documents")
        planned = {**{name: sizes[name] for name in lengths if name in sizes}, **own}
    if not baseline.chunk_sizes:
        return [planned]
    chosen = [size for size in baseline.chunk_sizes if size in chunk_sizes] or [baseline.chunk_sizes[0]]
    fitting = [size for size in chosen if size <= planned["seq_len"]]
    if not fitting:
        fitting = [max((size for size in baseline.chunk_sizes if size <= planned["seq_len"]), default=chosen[0])]
    return [{**planned, "chunk_size": size} for size in fitting]


def _module_exists(name: str) -> bool:
    """Look for a module without importing anything, parents included."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return False
    paths = [Path(location, *rest) for location in spec.submodule_search_locations or ()]
    return not rest or any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths)
