"""What a count is made of. Formulas are plain arithmetic, so they take numbers and sympy symbols alike."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...results.arguments import one_of

Scalar = Any
"""A size or a count: int, float or a sympy expression."""

DTYPE_BYTES: Mapping[str, int] = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Cost in FLOPs of one evaluation of an elementary function (TFLA paper, table 7): F_exp, F_log, ...

    The simplified tables and every stored count use 1.
    """

    exp: Scalar = 1
    log: Scalar = 1
    sig: Scalar = 1
    max: Scalar = 1
    mask: Scalar = 1
    abs: Scalar = 1

    @classmethod
    def parse(cls, settings: Iterable[str]) -> Factors:
        """Read settings such as "exp=4"; ValueError for an unknown name or a value that is not a number >= 0."""
        names = [f.name for f in dataclasses.fields(cls)]
        values: dict[str, float] = {}
        for setting in settings:
            name, _, text = setting.partition("=")
            one_of("factor", name, names, " as name=value")
            try:
                values[name] = float(text)
            except ValueError:
                raise ValueError(f"factor {name} must be a number >= 0, got {text!r}") from None
            if not 0 <= values[name] < float("inf"):
                raise ValueError(f"factor {name} must be a number >= 0, got {text!r}")
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """FLOPs of one part: on matrix units (tensor cores) and on vector units. A multiply-accumulate is 2."""

    matrix: Scalar = 0
    vector: Scalar = 0

    @property
    def flops(self) -> Scalar:
        """All FLOPs of the part."""
        return self.matrix + self.vector

    def __add__(self, other: Work) -> Work:
        """Add two parts."""
        return Work(matrix=self.matrix + other.matrix, vector=self.vector + other.vector)

    def __mul__(self, times: Scalar) -> Work:
        """Repeat the part."""
        return Work(matrix=self.matrix * times, vector=self.vector * times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Bytes of one element: of q, k, v, h and their gradients; of gate tensors; of states (C, n, m)."""

    qkv: Scalar = 2
    gate: Scalar = 2
    state: Scalar = 4


@dataclass(frozen=True, slots=True)
class Tally:
    """FLOPs and bytes of a piece of work, part by part.

    ``recomputed_*`` is work that a memory-saving backward pass repeats from the forward pass; it is kept apart because
    the published counts, and therefore ours, leave recomputation out.
    """

    work: Mapping[str, Work] = field(default_factory=dict)
    traffic: Mapping[str, Scalar] = field(default_factory=dict)
    recomputed_work: Mapping[str, Work] = field(default_factory=dict)
    recomputed_traffic: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def flops(self) -> Scalar:
        """All FLOPs."""
        return sum((work.flops for work in self.work.values()), start=0)

    @property
    def matrix_flops(self) -> Scalar:
        """FLOPs on matrix units."""
        return sum(work.matrix for work in self.work.values())

    @property
    def bytes(self) -> Scalar:
        """All bytes loaded and stored."""
        return sum(self.traffic.values())

    def __mul__(self, times: Scalar) -> Tally:
        """Repeat every part ``times`` times."""
        if times == 1:
            return self
        return Tally(*({name: part * times for name, part in parts.items()} for parts in self._each()))

    def __add__(self, other: Tally) -> Tally:
        """Add part by part; parts of the same name are merged."""

        def merged(a: Mapping[str, Any], b: Mapping[str, Any]) -> Mapping[str, Any]:
            return {**a, **{name: a[name] + part if name in a else part for name, part in b.items()}} if b else a

        return Tally(*map(merged, self._each(), other._each()))

    def prefixed(self, prefix: str) -> Tally:
        """Return the same tally with ``prefix`` before every part's name."""
        return Tally(*({prefix + name: part for name, part in parts.items()} for parts in self._each()))

    def _each(self) -> tuple[Mapping[str, Any], ...]:
        return self.work, self.traffic, self.recomputed_work, self.recomputed_traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem: all heads and sequences, every size checked, 0 for one that does not apply.

    Formulas of one head take it as well, those of one chunk with the chunk's length as ``seq_len``.

    Attributes:
        published: whether what a paper prints is counted, its slips included.
        batch, seq_len: sequences and tokens in each; of a gated MLP their product counts.
        head_dim_qk, head_dim_v: d_qk and d_v; ``head_dim_qk`` of a selective scan is its state size.
        channels: C, all recurrent dims (R in the RG-LRU's source).
        chunk_size: L; the whole sequence where a formulation has no chunks.
        qk_share: share of q and k that a head reads by itself: 1, or groups / heads where heads share them (Mamba-2).
        causal: F_causal, the share of the causal square that is computed; None where there is no square.
        f: costs of elementary functions.
        widths: bytes of elements; without heads inputs, outputs, weights and parameters are ``widths.qkv`` wide.
        dtype: of the inputs.
        documents: how many are packed into the batch of 1; 0: the batch is of sequences.
        alone: of documents whose squares are computed, the problems of those of a length, as a batch, for each length.
    """

    op: str
    formulation: str
    published: bool = False
    batch: Scalar = 1
    seq_len: Scalar
    num_heads: int = 1
    head_dim_qk: Scalar = 0
    head_dim_v: Scalar = 0
    channels: Scalar = 0
    d_model: Scalar = 0
    d_ff: Scalar = 0
    chunk_size: int = 0
    qk_share: float = 1
    causal: Scalar = None
    f: Factors = field(default_factory=Factors)
    widths: Widths = field(default_factory=Widths)
    dtype: str = "bf16"
    documents: int = 0
    alone: tuple[Problem, ...] = ()

    @property
    def rows(self) -> int:
        """Batch x heads."""
        return self.batch * self.num_heads

    @property
    def cells(self) -> Scalar:
        """Elements of one [B, T, C] tensor."""
        return self.batch * self.seq_len * self.channels

    def moved(self, elements: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Return the bytes of so many elements of inputs, outputs, weights and parameters."""
        return {name: number * self.widths.qkv for name, number in elements.items()}

    @property
    def per_head(self) -> tuple[Scalar, Scalar, Scalar, Scalar, Factors, Widths]:
        """What the formulas of one head are of: T (of a chunk L), d_qk, d_v, F_causal, F and the widths."""
        return self.seq_len, self.head_dim_qk, self.head_dim_v, self.causal, self.f, self.widths

    @property
    def stabilised(self) -> bool:
        """Whether a stabiliser, and with it a denominator, goes with the gates."""
        return self.op == "mlstm_exp"

    @property
    def state_bytes(self) -> Scalar:
        """Bytes of a head's state: C, and stabilised n and m."""
        normaliser = self.head_dim_qk + 1 if self.stabilised else 0
        return (self.head_dim_qk * self.head_dim_v + normaliser) * self.widths.state

    @property
    def statistics(self) -> Scalar:
        """Bytes of mLSTMexp's denominators and maxima."""
        return 2 * self.seq_len * self.widths.state if self.stabilised else 0

    @property
    def d_qk_read(self) -> Scalar:
        """Elements of q (or k) per token that are a head's own traffic."""
        return self.qk_share * self.head_dim_qk

    def over_chunks(self, chunk: Callable[[Problem], Tally], size: int) -> Tally:
        """Add up chunks of ``size`` and a ragged last one; the published counting has T / L chunks, whole or not."""
        pieces = [(size, self.seq_len / size)] if self.published else self.pieces(size)
        each = (chunk(dataclasses.replace(self, seq_len=length)) * times for length, times in pieces)
        return functools.reduce(operator.add, each)

    def pieces(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield (length, how many) of whole chunks of ``size`` and a ragged last one."""
        whole, rest = divmod(self.seq_len, size)
        if whole:
            yield size, whole
        if rest:
            yield rest, 1


def chunk_traffic(problem: Problem, qk: Scalar, gates: Scalar) -> dict[str, Scalar]:
    """Return the bytes of one chunk of a linear RNN whose states are stored once and loaded once (TFLA paper, table 9).

    Args:
        qk: elements of q (or k) per token.
        gates: bytes of the gates.
    """
    length, d_v, width, state = problem.seq_len, problem.head_dim_v, problem.widths.qkv, problem.state_bytes
    return {
        "recurrent load": length * (qk + d_v) * width + gates,
        "recurrent store": state,
        "parallel load": length * (2 * qk + d_v) * width + gates + state,
        "parallel store": length * d_v * width + problem.statistics,
    }


def chunk_traffic_backward(problem: Problem, qk: Scalar, gates: Scalar) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
    """Return the bytes of one chunk's backward pass, and those of making its state again; arguments as above.

    Loads of q, dH and gates, then of q, k, v, dH, gates, C and dC (and statistics, both times); stores of dC, then of
    dq, dk, dv and the gates' gradients. Again: loads of k, v and gates; store of C.
    """
    length, d_v, width, state = problem.seq_len, problem.head_dim_v, problem.widths.qkv, problem.state_bytes
    inputs, gradient = length * (qk + d_v) * width, problem.head_dim_qk * d_v * problem.widths.state
    traffic = {
        "recurrent load": inputs + gates + problem.statistics,
        "recurrent store": gradient,
        "parallel load": 2 * inputs + gates + problem.statistics + state + gradient,
        "parallel store": length * (2 * qk + d_v) * width + gates,
    }
    return traffic, {"recurrent load": inputs + gates, "recurrent store": state}


def one_pass(tally: Tally, least: Scalar) -> Tally:
    """Return the tally with the traffic of a kernel that keeps states on the chip: inputs and outputs once."""
    return dataclasses.replace(tally, traffic={"inputs and outputs": least}, recomputed_traffic={})


def decoding(one: Tally, state_bytes: Scalar) -> Tally:
    """Return one step of a pass as in decoding: its state is loaded before it and stored after it."""
    return Tally(work=one.work, traffic={**one.traffic, "state load": state_bytes, "state store": state_bytes})


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """FLOPs and bytes of a whole problem: all heads, the batch and every chunk.

    Attributes:
        op, formulation, mode, counting: what was counted and how (counting: detailed or published).
        flops: all FLOPs of the mode, recomputation left out.
        tensor_flops: the share of ``flops`` in matrix products, which tensor cores can do.
        bytes: bytes that the formulation loads and stores, recomputation left out.
        compulsory_bytes: every input read once and every output and gradient written once.
        recomputed_flops, recomputed_tensor_flops, recomputed_bytes: what a backward pass that stores no activations
            and no states does on top.
        causal_factor: share of the causal square that is computed, or None where there is no square.
        parts: name -> FLOPs; adds up to ``flops``.
        byte_parts: name -> bytes; adds up to ``bytes``.
        executed_tensor_flops, executed_bytes, reread_bytes, executed_parts, executed_byte_parts: what our Triton
            kernels of the formulations walk, whole_state, sweep, lightning1 and lightning2, and of a gated MLP, run and
            move in 16-bit dtypes, recomputation and padding included (see :mod:`.executed`);
            None and empty elsewhere. ``reread_bytes`` are loads of what other programs of the same launch load as well.
        library_tensor_flops: the share of ``executed_tensor_flops`` in products of a library, whose padding and rereads
            are not known.
    """

    op: str
    formulation: str
    mode: str
    counting: str
    flops: float
    tensor_flops: float
    bytes: float
    compulsory_bytes: float
    recomputed_flops: float = 0.0
    recomputed_tensor_flops: float = 0.0
    recomputed_bytes: float = 0.0
    causal_factor: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    byte_parts: Mapping[str, float] = field(default_factory=dict)
    executed_tensor_flops: float | None = None
    executed_bytes: float | None = None
    reread_bytes: float | None = None
    library_tensor_flops: float | None = None
    executed_parts: Mapping[str, float] = field(default_factory=dict)
    executed_byte_parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def vector_flops(self) -> float:
        """FLOPs outside matrix products."""
        return self.flops - self.tensor_flops

    @property
    def intensity(self) -> float:
        """FLOP per byte that the formulation moves (TFLA paper, eq. 119)."""
        return self.flops / self.bytes

    def as_dict(self) -> dict[str, Any]:
        """Return every field, ``vector_flops`` and ``intensity`` as plain Python values for JSON."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
        return {**plain, "vector_flops": self.vector_flops, "intensity": self.intensity}
