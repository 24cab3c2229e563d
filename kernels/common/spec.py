"""Declarations: what an operation is, and which code of ours computes it.

Data only. This module and those that declare operations (``kernels/<op>.py``, ``kernels/<family>/__init__.py``) import
neither torch nor triton, so the command line can list operations in milliseconds; code is named by "module:function"
strings relative to the package and resolved by :func:`resolve` when a case runs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ...results.arguments import one_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MODES = ("fw", "fwbw", "bw", "step", "train")
DTYPES = ("fp64", "fp32", "fp16", "bf16")


class LanguageModel(NamedTuple):
    """Its blocks, its vocabulary, and the soft cap of its logits, if they have one."""

    layers: int
    vocabulary: int
    logit_cap: float | None = None


LANGUAGE_MODELS = {1024: LanguageModel(24, 64000), 2048: LanguageModel(16, 64000), 2560: LanguageModel(32, 64000)}
"""Width -> LLaMA and TransNormerLLM of 0.4B, 1B and 3B parameters.

The paper on Lightning Attention-2 gives the parameters alone: these are usual shapes that come to 0.44, 1.08 and 2.87
billion, with the 64,000 words of Baichuan's tokenizer, which TransNormerLLM uses, for both.
"""

XLSTM_MODELS = {
    width: LanguageModel(layers, 50304, logit_cap=30.0)
    for width, layers in ((768, 12), (1024, 24), (2048, 24), (4096, 32))
}
"""Width -> xLSTM of 160M, 400M, 1.4B and 7B parameters: Beck et al., TFLA, appendix E.2, and xLSTM 7B (2025).

Layers are those of configs/model in NX-AI/xlstm-jax, which has the same of LLaMA beside them; of 400M, which it lacks,
as many as of 1.4B. The vocabulary is GPT-NeoX's 50,257, rounded up there.
"""

FF_RATIO = 3.5
"""Hidden over input columns of an MLP where none are given: as in Llama 3 8B and 70B."""

SMALL_MODEL = LanguageModel(2, 1024)
"""A model of any other width: enough to try it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """How an implementation, ours or a package's, is timed, and how its FLOPs and bytes are counted.

    Attributes:
        modes: modes it can be timed in.
        formulation: the formulation of its operation that it follows (chunkwise, fused, ...); empty for the operation's
            default one.
        formulation_in: mode or dtype -> formulation, where it follows another one there.
        own_chunk: chunk length that it takes where a case names none.
        states_as_inputs: whether its forward pass stores the states between chunks in the inputs' dtype.
        full_square: whether it computes whole squares of scores and masks them.
        documents: whether it takes packed documents: ours by the keyword ``cu_seqlens``, a baseline's ``build`` by
            those of the case.
    """

    modes: tuple[str, ...] = ("fw", "fwbw", "bw")
    formulation: str = ""
    formulation_in: Mapping[str, str] = field(default_factory=dict)
    own_chunk: int | None = None
    states_as_inputs: bool = False
    full_square: bool = False
    documents: bool = False

    def formulation_of(self, mode: str, dtype: str) -> str:
        """Return the formulation that it follows in a mode and dtype; empty for its operation's default one."""
        return self.formulation_in.get(mode) or self.formulation_in.get(dtype) or self.formulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation(Counted):
    """Code of ours that computes an operation.

    Attributes:
        name: unique within the operation: fused_chunk, limit_chunk, torch, parallel.
        call: "module:function" relative to the package; empty where the operation's own function takes the name as
            ``impl``. The function takes the operation's arguments in order, then keywords ``chunk_size`` (where
            ``chunked``), ``state_dtype``, ``initial_state``, ``return_last_state``.
        devices: device kinds it runs on.
        dtypes: input dtypes it takes.
        state_dtypes: dtypes in which it can hold its states; empty where it has none.
        chunked: whether it has a chunk-size axis.
        why_not: "module:function"; the function takes the sizes as a mapping (batch, seq_len, num_heads, head_dim_qk,
            head_dim_v, chunk_size, ...), ``dtype`` and ``state_dtype`` names, and returns None or the reason it
            cannot run, without importing torch.
        preferred_chunk: "module:function"; the function takes the sizes and the formulation, and returns the chunk
            length that the implementation would choose itself, which a sweep adds to its chunk axis. Imports no torch.
        default_config: "module:function"; the function takes the sizes, the dtype's name, the compute capability and
            whether a backward pass follows, and returns the launches that ``call`` would choose: a frozen dataclass,
            which ``call`` also takes as ``config``. Imports no torch.
        requires: distributions that must be importable (triton).
        triton_versions: versions of Triton that it is written for, such as "==3.6.*"; empty for any.
        architectures: compute capabilities that it is written for, such as "9.0"; empty for any.
        fallback: the slower implementation that a call that names none takes where this one does not run; empty where
            such a call takes this one nowhere.
        prepare: "module:function"; the function takes the inputs (argument -> tensor) and returns them in the layout
            that the implementation is timed on, as a model keeps its weights. It is not timed.
    """

    name: str
    call: str = ""
    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")
    state_dtypes: tuple[str, ...] = ("fp32",)
    chunked: bool = True
    why_not: str | None = None
    preferred_chunk: str | None = None
    default_config: str | None = None
    requires: tuple[str, ...] = ()
    triton_versions: str = ""
    architectures: tuple[str, ...] = ()
    fallback: str = ""
    prepare: str | None = None
    summary: str = ""

    def why_unsupported(self, mode: str, dtype: str, state_dtype: str | None, sizes: Mapping[str, int]) -> str | None:
        """Return why it cannot run a problem on any machine, or None."""
        for what, value, known in (
            ("mode", mode, self.modes),
            ("dtype", dtype, self.dtypes),
            ("state_dtype", state_dtype, self.state_dtypes),
        ):
            if value is not None and value not in known:
                allowed = f"one of {', '.join(known)}" if known else "left out"
                return f"{what} must be {allowed} for {self.name}, got {value}"
        if mode == "step" and state_dtype not in (None, "fp32"):
            return f"state_dtype must be fp32 in mode step, got {state_dtype}"
        if sizes.get("documents") and not self.documents:
            return f"{self.name} takes no packed documents"
        return None if self.why_not is None else resolve(self.why_not)(sizes, dtype, state_dtype)

    def why_not_on(self, capability: str | None) -> str | None:
        """Return why it does not run on a GPU of a compute capability, such as "9.0", or None."""
        if self.architectures and capability not in self.architectures:
            return f"{self.name} is written for compute capability {' or '.join(self.architectures)}, got {capability}"
        return None

    def why_not_with(self, versions: Mapping[str, str | None]) -> str | None:
        """Return why it does not run with the installed versions of packages, and the command that helps, or None."""
        for name in dict.fromkeys((*self.requires, *(("triton",) if self.triton_versions else ()))):
            here, wanted = versions.get(name), self.triton_versions if name == "triton" else ""
            if here is None or (wanted and not matches_version(here, wanted)):
                install = f"pip install '{name}{wanted}'" if wanted else f"pip install {name}"
                lacks = (
                    f"is written for {name} {wanted}, got {here}" if here else f"needs {name}, which is not installed"
                )
                return f"{self.name} {lacks}: {install}"
        return None

    def why_slower_with(self, versions: Mapping[str, str | None]) -> str | None:
        """Return what a call that names no implementation takes in place of this one because of versions, or None.

        None too where a package is missing altogether: such a call then raises.
        """
        there = self.fallback and None not in map(versions.get, self.requires)
        reason = self.why_not_with(versions) if there else None
        return f"impl=None takes {self.fallback} in place of {self.name}, which is faster: {reason}" if reason else None

    def chosen_chunk(self, sizes: Mapping[str, int], dtype: str) -> int | None:
        """Return the chunk length that it chooses itself (``preferred_chunk``), None where it does not say."""
        if self.preferred_chunk is None:
            return None
        return int(resolve(self.preferred_chunk)(sizes, self.formulation_of("fw", dtype)))

    def launches(self, mode: str, dtype: str, sizes: Mapping[str, int], capability: tuple[int, int]) -> Any:
        """Return the launches that it chooses for a problem (``default_config``), None where it does not say."""
        if self.default_config is None or mode == "step":
            return None
        return resolve(self.default_config)(sizes, dtype, capability, mode != "fw")


triton_form = functools.partial(Implementation, requires=("triton",))
portable_form = functools.partial(Implementation, devices=("cpu", "cuda"), dtypes=DTYPES)
"""Declare an implementation in Triton, and one in plain torch, which runs anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A mathematical function with a reference.

    Attributes:
        name: the ``op`` of a case: mlstm_sig, mlstm_exp, simple_gla, ...
        kernel: the family as users name it (tfla, ...).
        label: its name in figures and texts; empty for ``name``.
        arguments: tensor arguments in order.
        differentiable: the arguments that get a gradient.
        sizes: the size columns that describe a problem.
        optional_sizes: those that a problem may leave out.
        width: heads x value head dim, channels or input columns of a problem that names none.
        head_dim: its authors' value head dim.
        qk_ratio: default head_dim_qk / head_dim_v.
        state_dim: default head_dim_qk where that is a state's size, whatever head_dim_v is.
        inputs: "module:function"; ``make_inputs(draw) -> dict[str, Tensor]`` in argument order, with realistic gates,
            from a :class:`.inputs.Draw`.
        recurrent: "module:function" of the definition, one step at a time; runs in float64.
        parallel: "module:function" of the fully parallel (quadratic) form, or None.
        call: "module:function" of the public function, which takes the arguments in order and the keywords of an
            implementation's ``call``, and ``impl``, the implementation's name, or "step" for the decoding step, where
            one has that mode. Empty where each has its own.
        cache: "module:function" of operations whose decoding step reads a cache of past tokens in place of a state: the
            function takes a :class:`.inputs.Draw` with as many tokens and returns the tensors, which
            ``recurrent`` takes as ``initial_state`` and in which a step overwrites the last token. Empty for others.
        channelwise: whether a channel of the output depends on that channel of the arguments alone. Channels are then
            the last axis of all arguments, and the output has the first argument's shape.
        formulations: ways to compute it that differ in FLOPs or bytes, the first being the default (docs/counts.md);
            empty where it is not counted.
        counts: "module:function" of what a pass computes and moves; the function takes a
            :class:`..analysis.counts.model.Problem` and forward, backward or step, and returns two mappings: part ->
            (FLOPs in matrix products, other FLOPs), and part -> elements of the inputs' dtype that are loaded or
            stored; or a ``Tally``. Empty where the formulas of :mod:`..analysis.counts.problem` count it.
        models: width -> published model whose blocks mix tokens by this operation; mode train trains it
            (:mod:`..bench.worker.models`). Empty: none. The width is heads x value head dim, or channels.
        implementations: ours.
    """

    name: str
    kernel: str
    summary: str
    arguments: tuple[str, ...]
    differentiable: tuple[str, ...]
    inputs: str
    recurrent: str
    parallel: str | None = None
    label: str = ""
    sizes: tuple[str, ...] = ("batch", "seq_len", "num_heads", "head_dim_qk", "head_dim_v")
    optional_sizes: tuple[str, ...] = ()
    width: int = 4096
    head_dim: int = 256
    qk_ratio: float = 1.0
    state_dim: int | None = None
    call: str = ""
    cache: str = ""
    channelwise: bool = False
    formulations: tuple[str, ...] = ()
    counts: str = ""
    models: Mapping[int, LanguageModel] = field(default_factory=dict)
    implementations: tuple[Implementation, ...] = ()

    def implementation(self, name: str) -> Implementation:
        """Return the implementation called ``name``; ValueError lists the known ones."""
        known = {implementation.name: implementation for implementation in self.implementations}
        one_of("impl", name, known, f" for {self.name}")
        return known[name]

    def function(self, implementation: Implementation | str) -> Callable[..., Any]:
        """Import and return what runs an implementation, given or named: its own function, or the operation's."""
        if isinstance(implementation, str):
            implementation = self.implementation(implementation)
        if implementation.call:
            return resolve(implementation.call)
        return functools.partial(resolve(self.call), impl=implementation.name)

    def why_slower(
        self,
        mode: str,
        dtype: str,
        sizes: Mapping[str, int],
        capability: str | None,
        versions: Mapping[str, str | None],
    ) -> str | None:
        """Return :meth:`Implementation.why_slower_with` of the faster form that runs this problem on this GPU, or None.

        Args:
            capability: the GPU's compute capability, such as "9.0"; None on a CPU.
            versions: installed versions by package.
        """
        able = (
            each for each in self.implementations
            if not (each.why_unsupported(mode, dtype, None, sizes) or each.why_not_on(capability))
        )  # fmt: skip
        return next((reason for each in able if (reason := each.why_slower_with(versions))), None)

    @property
    def step(self) -> Callable[..., Any]:
        """What runs a decoding step."""
        return functools.partial(resolve(self.call), impl="step")

    def make_inputs(
        self, sizes: Mapping[str, int], *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> dict[str, Tensor]:
        """Draw the arguments of a problem of these sizes, in order; see :class:`.inputs.Draw`."""
        from .inputs import Draw

        return resolve(self.inputs)(Draw(sizes, dtype=dtype, device=device, seed=seed))

    def sizes_at(self, embedding: int | None = None, **given: int | None) -> dict[str, int]:
        """Return the sizes beside batch and length: those given, and what follows from them, else the authors'.

        Args:
            embedding: heads x value head dim, channels or input columns; None is what ``given`` comes to, else
                ``width``. Heads then have a share of it each, or there are as many as fit in. If neither is given, the
                head dim is the authors', halved until it divides the embedding dim.
            given: sizes by column, None for those that are not given.

        Raises:
            ValueError: sizes that contradict one another, or that the operation does not have.
        """
        known = {name: size for name, size in given.items() if size is not None}
        for name in known:
            if name not in (*self.sizes, *self.optional_sizes):
                option = "head_dim" if name == "head_dim_v" else name
                raise ValueError(f"{option} must be left out for {self.name}, whose sizes are {', '.join(self.sizes)}")
        if "head_dim_v" in self.sizes:
            return self._heads_at(embedding, known)
        column = next(name for name in ("channels", "d_model") if name in self.sizes)
        width = known.get(column) or embedding or self.width
        if embedding not in (None, width):
            raise ValueError(f"embedding must be left out beside {column} {width}, got {embedding}")
        usual = {column: width, "head_dim_qk": self.state_dim or 1, "d_ff": int(FF_RATIO * width)}
        return {name: known.get(name) or size for name, size in usual.items() if name in self.sizes}

    def _heads_at(self, embedding: int | None, known: Mapping[str, int]) -> dict[str, int]:
        width, num_heads, head_dim = embedding or self.width, known.get("num_heads"), known.get("head_dim_v")
        if head_dim is None and num_heads is None:
            head_dim = self.head_dim
            while width % head_dim:
                head_dim //= 2
        if num_heads is None or head_dim is None:
            share = num_heads or head_dim or 1
            if width % share and (embedding or num_heads):
                what = "num_heads" if num_heads else "head_dim"
                raise ValueError(f"{what} must divide the embedding dim {width} (--embedding), got {share}")
            num_heads, head_dim = num_heads or max(1, width // share), head_dim or width // share
        if embedding not in (None, num_heads * head_dim):
            raise ValueError(f"embedding must be heads x value head dim, {num_heads} x {head_dim}, got {embedding}")
        head_dim_qk = known.get("head_dim_qk") or self.state_dim or max(1, int(head_dim * self.qk_ratio))
        fewer = known.get("num_heads_qk", num_heads)
        if num_heads % fewer:
            raise ValueError(f"num_heads_qk must divide the {num_heads} heads, got {fewer}")
        shared = {"num_heads_qk": fewer} if fewer < num_heads else {}
        return {"num_heads": num_heads, **shared, "head_dim_qk": head_dim_qk, "head_dim_v": head_dim}

    def modes_of(self, target: Counted) -> tuple[str, ...]:
        """Return the modes in which an implementation is timed: train where it has gradients and a model."""
        return (*target.modes, *(("train",) if self.models and "fwbw" in target.modes else ()))

    def model(self, sizes: Mapping[str, int]) -> LanguageModel:
        """Return the model of a width: the published one, else :data:`SMALL_MODEL`."""
        return self.models.get(width_of(sizes), SMALL_MODEL)

    def leaves(self, inputs: Mapping[str, Tensor], *, gradients: bool = True) -> dict[str, Tensor]:
        """Return those of the inputs that get gradients.

        Args:
            gradients: whether they, and no other input, require gradients from now on; if not, none does.
        """
        for name, tensor in inputs.items():
            tensor.requires_grad_(gradients and name in self.differentiable)
        return {name: tensor for name, tensor in inputs.items() if name in self.differentiable}


def width_of(sizes: Mapping[str, int]) -> int:
    """Return the width of a problem: heads x value head dim, channels or input columns."""
    return sizes.get("channels") or sizes.get("d_model") or sizes.get("num_heads", 0) * sizes.get("head_dim_v", 0)


def matches_version(version: str | None, specifier: str) -> bool:
    """Return whether a version, None where nothing is installed, is in a specifier such as "==3.6.*"."""
    from packaging.specifiers import SpecifierSet

    return version is not None and SpecifierSet(specifier).contains(version, prereleases=True)


def resolve(target: str) -> Callable[..., Any]:
    """Import "module:function", relative to the package, and return the function.

    "module:function:name" is the function with ``impl="name"``.
    """
    module, name, *impl = target.split(":")
    function = getattr(importlib.import_module(f"...{module}", __package__), name)
    return functools.partial(function, impl=impl[0]) if impl else function
