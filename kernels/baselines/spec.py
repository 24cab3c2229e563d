"""Declarations of outside packages' implementations. Data only; adapters import their package inside functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..common.spec import Counted, matches_version, resolve

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBad:
    """A combination known not to work: the sweep reports ``unsupported`` with the reason, `lrbench doctor` lists it.

    Attributes:
        reason: one sentence; what happens.
        source: where it is documented (an issue, a release note, our own measurement).
        versions: {"triton": ">=3.4,<3.7.1", "mlstm-kernels": "==2.0.6", ...} as PEP 440 specifiers; all must match.
        architectures: compute capabilities such as "9.0"; empty means any.
        modes: the modes affected; empty means all.
        dtypes: the dtypes affected; empty means all.
    """

    reason: str
    source: str
    versions: Mapping[str, str] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()

    def is_of(self, versions: Mapping[str, str], architecture: str | None) -> bool:
        """Return whether versions and a compute capability (None on a CPU) are affected; an absent package is not."""
        if self.architectures and architecture not in self.architectures:
            return False
        return all(matches_version(versions.get(name), wanted) for name, wanted in self.versions.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline(Counted):
    """An outside package's implementation of an operation.

    Attributes:
        name: ``provider.variant``, unique within the operation.
        provider: import name of the package.
        distribution: what pip installs ("fla-core"), lower case with hyphens, with the tested version in ``tested``.
        op: the operation it computes (mlstm_sig, attention, gla, selective_scan, ...).
        kernels: the families it is compared with.
        build: "module:function" relative to lrbench; ``build(case, inputs) -> Runnable`` with inputs in the operation's
            canonical arguments and layout. Nothing it does is timed. For mode step it takes a third argument, what the
            definition takes as ``initial_state``.
        module: what ``build`` imports, where that is more than ``provider``; looked for without importing it.
        extension: a compiled module without which it does not import, though pip may install the package without it.
        install: the command that installs it, where that is not ``pip install distribution==tested``.
        own_sizes: whether it runs at its authors' sizes (:meth:`..common.spec.Operation.sizes_at`) beside a family of
            another operation, at equal tokens and embedding dim; else at the family's.
        chunk_sizes: chunk lengths it accepts, the authors' recommended first; empty means no chunk axis (``own_chunk``
            is then the package's own).
        why_not: "module:function", as for ``kernels.common.spec.Implementation``: None or the reason it cannot run.
        nvidia: whether it is CUDA code, for NVIDIA's GPUs alone; Triton and PyTorch run on others as well.
        known_bad: combinations known not to work.
        autotunes: whether its first call in a process autotunes or compiles for all later cases, which therefore stay
            in that process.
        torch_memory: whether torch allocates its memory, so that it can be measured.
        settings: the settings used and why they are the authors' own.
        licence: of the package.
    """

    name: str
    provider: str
    distribution: str
    tested: str
    op: str
    kernels: tuple[str, ...]
    build: str
    module: str | None = None
    extension: str | None = None
    install: str | None = None
    own_sizes: bool = False
    dtypes: tuple[str, ...] = ("bf16",)
    devices: tuple[str, ...] = ("cuda",)
    chunk_sizes: tuple[int, ...] = ()
    why_not: str | None = None
    nvidia: bool = False
    known_bad: tuple[KnownBad, ...] = ()
    autotunes: bool = True
    torch_memory: bool = True
    settings: str = ""
    licence: str = ""

    @property
    def chunked(self) -> bool:
        """Whether it has a chunk-size axis."""
        return bool(self.chunk_sizes)

    def why_unsupported(self, mode: str, dtype: str, state_dtype: str | None, sizes: Mapping[str, int]) -> str | None:
        """Return why it cannot run a problem on any machine (mode, dtype, chunk or sizes), or None."""
        for what, value, accepted in (("mode", mode, self.modes), ("dtype", dtype, self.dtypes)):
            if value not in accepted:
                return f"{what} must be one of {', '.join(accepted)} for {self.name}, got {value}"
        if self.chunk_sizes and sizes.get("chunk_size") not in self.chunk_sizes:
            accepted_sizes = ", ".join(map(str, sorted(self.chunk_sizes)))
            return f"chunk_size must be one of {accepted_sizes} for {self.name}, got {sizes.get('chunk_size')}"
        if sizes.get("documents") and not self.documents:
            return f"{self.name} takes no packed documents"
        return None if self.why_not is None else resolve(self.why_not)(sizes, dtype, state_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runnable:
    """A prepared call, of our code or a package's.

    Attributes:
        forward: runs the forward pass on tensors built beforehand and returns the output in its own layout.
        leaves: argument name -> leaf tensor (own layout) whose gradient the backward pass returns. Gradients are taken
            with torch.autograd.grad, so nothing accumulates.
        to_canonical: maps ("out" or an argument name, tensor in own layout) to the operation's canonical layout for the
            numerical check.
        on: the same call on other tensors by argument name, canonical in and out, as a layer of a model makes it;
            arguments that the adapter does not name stay as they were prepared. None: there is no such call.
    """

    forward: Callable[[], Tensor]
    leaves: Mapping[str, Tensor]
    to_canonical: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    on: Callable[[Mapping[str, Tensor]], Tensor] | None = None
