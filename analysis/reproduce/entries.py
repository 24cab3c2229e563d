"""Entries: what a document shows or claims, and what has to be compared to check it. Data only.

A document is a TOML file beside this module, or a table of results/bars.toml, whose claims are ours. It names sides
(what is measured or counted) and has entries (a figure, a table, a section), each with claims. A claim compares sides
at its points, the product of the lists of ``over``, in one of six ways (:data:`KINDS`), and says within which bounds
the document sees the outcome. A key of ``over`` that names several, ``"batch, seq_len"``, has a list for each point.

A measured side says everything of its cases, itself or by ``rows`` and ``over``: op, mode (fw), dtype (bf16),
state_dtype (fp32, or none in the row) and every size, or what a size follows from (:data:`DERIVED`); in mode train the
layers of a published model follow from its width. Left open may be chunk_size, impl and provider: then the fastest row
counts, for memory too. A counted side names a formulation as `lrbench count` takes it, for the model also a device; a
saving of key-value cache its model and baseline, a gain its gates (:mod:`..transfer`), a fixed number itself. ``like``
copies another side, ``metric`` replaces the claim's. :data:`PLANNED_KEYS` say what is measured of a side of a bar.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from ...kernels.baselines import get_implementation, get_operation
from ...kernels.common.spec import MODES
from ...results.arguments import one_of, unknown
from ...results.schema import SIZE_COLUMNS
from ...results.toml_tables import AMOUNT, Must, Refused, read_toml

FOLDER = Path(__file__).parent
MOST_MEANT = 3
"""Ids that an error names of those with a word in common."""

KINDS = ("value", "ratio", "span", "slope", "crossover", "best")
NO_KINDS = ("not_testable", "unmeasured", "beside")
GROUPED = ("span", "slope", "crossover", "best")
"""The kinds that follow a metric along an axis."""

MEASURED = (
    "time", "memory", "workspace", "allocated", "tokens_per_s", "tflops", "over_model", "roof_share", "rel_error",
)  # fmt: skip
ERRORS = ("max_abs", "mean_abs", "relative")
TRAINED = ("spikes", "gradient_spread", "curve_distance")
COUNTED = (
    "flops", "tensor_flops", "bytes", "intensity", "model_ms", "flop_optimal", "runtime_optimal", "balance",
    "saved_share", "extra_tokens", "gain_before", "gain_after", "number",
)  # fmt: skip
METRICS = MEASURED + ERRORS + TRAINED + COUNTED
"""Metrics of stored rows, of errors and of models that examples/train_block.py trained (:mod:`.training`), and of sides
that are counted."""

ROW_KEYS = ("op", "impl", "provider", "mode", "dtype", "state_dtype", *SIZE_COLUMNS)
TRAINED_KEYS = ("input_gate_bias", "seed")
COUNT_KEYS = (
    "formulation", "counting", "causal_factor", "gate_dtype", "device", "model", "baseline", "metric", "number",
    "normaliser", "epsilon", "input_gate", "forget_gate",
)  # fmt: skip
DERIVED = (
    ("tokens", "seq_len", "batch"),
    ("embedding", "head_dim_v", "num_heads"),
    ("qk_ratio", "head_dim_v", "head_dim_qk"),
)
"""Key, and the size by which another one follows: tokens // seq_len, embedding // head_dim_v, qk_ratio * head_dim_v."""

PLANNED_KEYS = ("chunk_sizes", "options")
"""Chunk lengths to measure where ``chunk_size`` is left open, and further keywords of the operation's functions."""

DEFAULT, COPY = "default", "copy"
"""No implementations: the operation called as users do, without one or a chunk length, and the device's copy of the
compulsory bytes of the side that it is compared with."""

DEFAULTS = {"mode": "fw", "dtype": "bf16"}
BOUNDS = ("states", "at_least", "at_most")

Value = int | float | str
Terms = Mapping[str, Value]
Side = Mapping[str, Value | tuple[int | str, ...]]
Over = Mapping[str, Annotated[tuple[Value | tuple[Value, ...], ...], Must("a list of at least one value", bool)]]
Bound = float | str | tuple[float | str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of a document.

    Attributes:
        text: the claim in a sentence, with what is wrong with it where it is a slip; a bar needs none.
        says: the document's number as printed; None: what the bounds say.
        value, ratio, span, slope, crossover, best: the sides, by the kind of comparison; see :mod:`.verdicts`.
        not_testable: why it cannot be tested here, in place of a kind.
        unmeasured: what would have to be measured, in place of a kind: there is no case for it yet.
        beside: sides that are measured beside those of bars, in place of a kind: nothing is claimed of them.
        rows, over: as the entry's, in addition to ``rows`` and in place of ``over``.
        along: the axis that span, slope, crossover and best follow; may be left out where there is one.
        at_least, at_most, states: bounds of what is compared, or what it equals ``within`` a relative difference; a
            list has a value for each line of the table.
        overall: of a bar, the least mean of its ratio over all points of all entries.
    """

    text: str = ""
    says: str | None = None
    value: str | None = None
    ratio: tuple[str, ...] | None = None
    span: str | None = None
    slope: str | None = None
    crossover: tuple[str, ...] | None = None
    best: str | None = None
    not_testable: str | None = None
    unmeasured: str | None = None
    beside: tuple[str, ...] | None = None
    metric: Literal[METRICS] = "time"  # type: ignore[valid-type]
    rows: Terms = field(default_factory=dict)
    over: Over | None = None
    along: str | None = None
    at_least: Bound = None
    at_most: Bound = None
    states: Bound = None
    within: AMOUNT = 0.1
    overall: float | None = None

    @property
    def kind(self) -> str:
        """Which of :data:`KINDS` it is, or of :data:`NO_KINDS`."""
        return next(name for name in (*KINDS, *NO_KINDS) if getattr(self, name) is not None)

    @property
    def sides(self) -> tuple[str, ...]:
        """The names of its sides."""
        named = getattr(self, self.kind) if self.kind in (*KINDS, "beside") else ()
        return (named,) if isinstance(named, str) else named

    def bounds(self, line: int) -> dict[str, Any]:
        """Return the bounds of a line of the table, by :data:`BOUNDS`."""
        given = {name: getattr(self, name) for name in BOUNDS}
        return {name: bound[line] if isinstance(bound, tuple) else bound for name, bound in given.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A figure, a table or a section of a document.

    Attributes:
        where: its place in the document; of bars it may name sizes in braces.
        claims: what it claims.
        rows: keys of every side, but for a side's own.
        over: key -> the values that it takes; the points are their product.
        figure: the command that draws it, with RESULTS and GPU to be filled in; or one of :data:`.plots.OF_ENTRIES`,
            and what that takes.
    """

    where: str
    claims: tuple[Claim, ...]
    rows: Terms = field(default_factory=dict)
    over: Over = field(default_factory=dict)
    figure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document: its title, the family of kernels that it is about, what it was measured on, sides and entries.

    Attributes:
        rounds: of bars, samples of every case.
        complete: of bars, whether their rows are part of a complete set of results.
    """

    title: str
    kernel: str
    device: str
    sides: Mapping[str, Side]
    entries: Mapping[str, Entry]
    rounds: int = 20
    complete: bool = True


class Asked(NamedTuple):
    """A claim with what it belongs to; ``id`` is of the entry, which may have several claims."""

    id: str
    document: Document
    entry: Entry
    claim: Claim

    @property
    def over(self) -> Over:
        """The axes."""
        return self.entry.over if self.claim.over is None else self.claim.over

    @property
    def ours(self) -> bool:
        """Whether all that it measures are kernels of lrbench, so that nothing is said of the document's own."""
        sides = [self.terms(side, point) for side in self.claim.sides for point in self.points()[:1]]
        measured = [terms for terms in sides if terms.get("metric", self.claim.metric) in MEASURED]
        return bool(measured) and all(map(_is_ours, measured))

    @property
    def along(self) -> str:
        """The axis that is followed."""
        return self.claim.along or next(iter(self.over), "")

    def points(self) -> list[dict[str, Any]]:
        """Return the points, the last axis fastest; ValueError where a list is not as long as its key."""
        axes = [[_values(axis, value) for value in values] for axis, values in self.over.items()]
        return [dict(itertools.chain(*each)) for each in itertools.product(*axes)]

    def apart(self) -> Iterator[Asked]:
        """Yield the claim at each of its points alone, with the bounds that it has there."""
        for line, point in enumerate(self.points()):
            over = {name: (value,) for name, value in point.items()}
            claim = dataclasses.replace(self.claim, over=over, **self.claim.bounds(line))
            yield self._replace(claim=claim)

    def shared(self, point: Terms) -> dict[str, Any]:
        """Return what all sides have at a point, but for their own."""
        return {**DEFAULTS, **self.entry.rows, **self.claim.rows, **point}

    def terms(self, side: str, point: Terms) -> dict[str, Any]:
        """Return what selects a side's rows at a point, or what is counted there."""
        found = {**self.shared(point), **self.document.sides[side]}
        # In this order: what another size follows from.
        for name, size, follows in DERIVED:
            value = found.pop(name, None)
            if value is not None and size in found:
                other = found[size]
                found.setdefault(follows, round(value * other) if name == "qk_ratio" else max(1, int(value) // other))
        if "op" not in found:
            return found
        operation = get_operation(found["op"])
        if found["mode"] == "train":
            found.setdefault("layers", operation.model(found)[0])
        # Sizes of the entry that an operation does not have: heads of a selective scan.
        own = (*operation.sizes, "chunk_size", "layers", "documents")
        return {name: value for name, value in found.items() if name in own or name not in SIZE_COLUMNS}


def load(folder: Path | None = None) -> list[Asked]:
    """Return the claims of every document of a folder, by default lrbench's own, in the order of the files.

    ValueError names a file that does not say what it should, the entry and the key.
    """
    found = []
    for path in sorted((folder or FOLDER).glob("*.toml")):
        document = read_toml(path, Document, "a document")
        try:
            for key, asked in claims_of(document):
                if asked.claim.beside:
                    raise Refused(asked.id, "a claim", "beside")
                if not asked.claim.text:
                    raise Refused(f"{asked.id}.text", "a text", None)
                found.append(asked._replace(id=f"{path.stem.replace('_', '-')}-{key}"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return found


def claims_of(document: Document) -> Iterator[tuple[str, Asked]]:
    """Yield the claims of a document, each with its entry's key, and its place in the file as its id.

    ValueError names one that cannot be evaluated.
    """
    sides = {name: _inherited(document.sides, name) for name in document.sides}
    document = dataclasses.replace(document, sides=sides)
    for key, entry in document.entries.items():
        for n, claim in enumerate(entry.claims, start=1):
            asked = Asked(f"entries.{key}.claims {n}", document, entry, claim)
            _check(asked, asked.id)
            yield key, asked


def chosen(claims: Sequence[Asked], ids: Sequence[str]) -> list[Asked]:
    """Return the claims of entries, all of a document where its name is given; ValueError names what is near."""
    for name in ids:
        if not any(f"{asked.id}-".startswith(f"{name}-") for asked in claims):
            near = f"; did you mean {' or '.join(found)}?" if (found := meant(name, claims)) else ""
            error = unknown("id", name, dict.fromkeys(asked.id for asked in claims))
            raise ValueError(f"id must be one that `lrbench reproduce` lists, got {name!r}{near}") if near else error
    return [each for each in claims if f"{each.id}-".startswith(tuple(f"{name}-" for name in ids))]


def meant(name: str, claims: Iterable[Asked]) -> list[str]:
    """Return the ids of entries that share a word with a name that no document begins with, as gated-mlp-kv-cache does
    with kv-savings."""
    words = name.split("-")
    ids = dict.fromkeys(asked.id for asked in claims)
    if any(id.startswith(f"{words[0]}-") for id in ids):
        return []
    return [id for id in ids if {*words} & {*id.split("-")}][:MOST_MEANT]


def _is_ours(terms: Terms) -> bool:
    """Return whether terms select an implementation of lrbench."""
    ours = [each.name for each in get_operation(str(terms["op"])).implementations]
    impl = str(terms.get("impl", "")).partition("+")[0]
    return impl in ours if impl else bool(ours) and terms.get("provider", "lrbench") == "lrbench"


def _inherited(sides: Mapping[str, Side], name: str) -> Side:
    """Return a side with the keys of those that it is like."""
    found, seen = dict(sides[name]), [name]
    while (like := found.pop("like", None)) is not None:
        if like not in sides or like in seen:
            raise Refused(f"sides.{name}.like", f"another one of {', '.join(sides)}", like)
        seen.append(str(like))
        found = {**sides[str(like)], **found}
    for key, value in found.items():
        if isinstance(value, tuple) and key != "chunk_sizes":
            raise Refused(f"sides.{name}.{key}", "one value", list(value))
    return found


def _check(asked: Asked, where: str) -> None:
    """Raise Refused for a claim that cannot be evaluated."""
    claim, kinds = asked.claim, (*KINDS, *NO_KINDS)
    given = [name for name in kinds if getattr(claim, name) is not None]
    if len(given) != 1:
        raise Refused(where, f"a table with one of {', '.join(kinds)}", ", ".join(given) or None)
    sides = {"ratio": (2, 4), "crossover": (2,)}.get(claim.kind, (1,))
    if claim.kind in KINDS and len(claim.sides) not in sides:
        raise Refused(f"{where}.{claim.kind}", f"{' or '.join(map(str, sides))} sides", list(claim.sides))
    for side in claim.sides:
        if side not in asked.document.sides:
            raise unknown(f"{where}.{claim.kind}", side, asked.document.sides)
    if claim.kind in GROUPED and (asked.along not in asked.over or (len(asked.over) > 1 and not claim.along)):
        raise Refused(f"{where}.along", f"an axis of over ({', '.join(asked.over)})", claim.along)
    stated = [getattr(claim, name) is not None for name in BOUNDS]
    if claim.kind in KINDS and (not any(stated) or (stated[0] and any(stated[1:]))):
        raise Refused(where, "a table with states, or with at_least or at_most", "both" if any(stated) else None)
    followed = asked.along if claim.kind in GROUPED else None
    lines = math.prod(len(values) for axis, values in asked.over.items() if axis != followed)
    for name in BOUNDS:
        bound = getattr(claim, name)
        if isinstance(bound, tuple) and (claim.kind == "slope" or len(bound) != lines):
            raise Refused(f"{where}.{name}", "a number" if claim.kind == "slope" else f"a list of {lines}", list(bound))
        if isinstance(bound, str) and claim.kind != "best":
            raise Refused(f"{where}.{name}", "a number", bound)
    try:
        points = asked.points()
    except Refused as error:
        raise ValueError(f"{where}.{error}") from None
    for side, point in itertools.product(claim.sides, points):
        try:
            _check_terms(asked.terms(side, point), claim.metric)
        except ValueError as error:
            raise ValueError(f"{where}, side {side}: {error}") from None


def _values(axis: str, value: Any) -> list[tuple[str, Value]]:
    """Return the value of an axis, or each of several that vary together, with its name."""
    names, values = axis.split(", "), value if isinstance(value, tuple) else (value,)
    if len(names) != len(values):
        raise Refused(f"over.{axis}", f"lists, each of {len(names)}", value)
    return list(zip(names, values, strict=True))


def _check_terms(terms: Mapping[str, Any], metric: str) -> None:
    """Raise ValueError for unknown keys or names, or where a measured side leaves a size of its operation open."""
    metric = terms.get("metric", metric)
    one_of("metric", metric, METRICS)
    others = {MEASURED: PLANNED_KEYS, ERRORS: ("against",), TRAINED: TRAINED_KEYS, COUNTED: COUNT_KEYS}
    own = next(keys for metrics, keys in others.items() if metric in metrics)
    for key in terms:
        one_of("a key", key, (*ROW_KEYS, *own, "metric"))
    if metric not in MEASURED:
        return
    one_of("mode", terms["mode"], MODES)
    operation = get_operation(str(terms.get("op", "")))
    if terms.get("impl", DEFAULT) not in (DEFAULT, COPY):
        # Of ours, an option of the operation may follow.
        get_implementation(operation.name, str(terms["impl"]).partition("+")[0])
    lengths = terms.get("chunk_sizes", ("own",))
    if lengths != "every" and not (isinstance(lengths, tuple) and all(n == "own" or type(n) is int for n in lengths)):
        raise Refused("chunk_sizes", "'every' or a list, each an integer or 'own'", lengths)
    if not isinstance(terms.get("options", ""), str):
        raise Refused("options", "a text", terms["options"])
    for size in operation.sizes:
        if size not in terms:
            raise Refused(size, "said, by the side, rows or over", None)
