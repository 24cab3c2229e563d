"""Time launches of one implementation side by side.

    python -m lrbench.tests.tools.tune rglru fused --size batch=8,seq_len=8192,channels=1024 \
        --set "forward=(8,8,64,4,128),(16,8,32,2,168)" --mode fw

Tried are the launches that the implementation chooses itself (its ``default_config``, a frozen dataclass) and what
``--set PATH=VALUES`` makes of them: a field and the values to put in its place; several options multiply. A field that
is a dataclass itself takes tuples of its fields in order. Launches that do not compile, do not fit or give other
numbers than the default's stay in the table with the reason. All are timed in turn, with the clock of the sweep.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from ...analysis import counts
from ...analysis.check.statistics import median, median_interval
from ...bench import clock, display, note
from ...bench.plan import PlannedCase
from ...kernels import FAMILIES, get_operation
from ...kernels.spec import Implementation, Operation
from ...results.arguments import parse_size
from ...results.schema import Case

TOLERANCE = 4
"""Relative difference from the default's results that passes, in epsilons of the inputs' dtype."""

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)


@dataclass(slots=True, kw_only=True)
class Candidate:
    """Launches to try: what differs from the default, in words, and what came of them."""

    label: str
    config: Any
    samples_ms: list[float] = field(default_factory=list)
    remark: str | None = None


def parse_alternatives(text: str, config: Any) -> tuple[str, list[Any]]:
    """Return the path and the values of ``PATH=VALUES``.

    Raises:
        ValueError: no such field of ``config``, or values that are no Python literals.
    """
    path, _, values = (part.strip() for part in text.partition("="))
    here = _get(config, path)
    parsed: Any
    try:
        parsed = ast.literal_eval(values)
    except (ValueError, SyntaxError):
        raise ValueError(f"set must be PATH=VALUES with values as in Python, got {text!r}") from None
    if not dataclasses.is_dataclass(here):
        return path, list(parsed) if isinstance(parsed, (tuple, list)) else [parsed]
    tuples = [parsed] if parsed and not isinstance(parsed[0], (tuple, list)) else list(parsed)
    names = [each.name for each in dataclasses.fields(here)]
    make: Callable[..., Any] = dataclasses.replace
    for each in tuples:
        if len(each) > len(names):
            raise ValueError(f"set must give {path} at most {len(names)} values ({', '.join(names)}), got {each!r}")
    return path, [make(here, **dict(zip(names, each, strict=False))) for each in tuples]


def candidates(config: Any, alternatives: Sequence[tuple[str, list[Any]]]) -> list[Candidate]:
    """Return the default and every combination of the alternatives."""
    found = [Candidate(label="default", config=config)]
    paths = [path for path, _ in alternatives]
    for values in itertools.product(*(each for _, each in alternatives)) if alternatives else ():
        changed = config
        for path, value in zip(paths, values, strict=True):
            changed = _put(changed, path, value)
        label = " ".join(f"{path}={_words(value)}" for path, value in zip(paths, values, strict=True))
        found.append(Candidate(label=label, config=changed))
    return found


def measure(
    tried: Sequence[Candidate], make: Callable[[Any], clock.Call], timer: clock.Clock, *, rounds: int, eps: float
) -> None:
    """Check every candidate against the first one, then time them in turn; what fails gets a remark and no samples.

    Args:
        make: makes the call of a candidate's launches.
    """
    from torch.utils._pytree import tree_leaves

    expected: list[Any] = []
    racing = []
    for candidate in tried:
        try:
            call = make(candidate.config)
            results = [tensor.detach() for tensor in tree_leaves(call.call(call.prepare()))]
            timer.synchronize()
        except Exception as error:
            candidate.remark = _first_line(error)
            if not expected:
                raise
            continue
        expected = expected or results
        candidate.remark = _difference(results, expected, TOLERANCE * eps)
        if candidate.remark is None:
            racing.append((candidate, call))
    timings = clock.measure(timer, [call for _, call in racing], clock.Sampling(rounds=rounds))
    for (candidate, _), timing in zip(racing, timings, strict=True):
        candidate.samples_ms = timing.samples_ms
        if timing.failure is not None:
            candidate.remark, candidate.samples_ms = _first_line(timing.failure), []


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {[*str(error).splitlines(), ''][0][:120]}"


def rows(tried: Iterable[Candidate], gigabytes: float | None) -> list[dict[str, Any]]:
    """Return a row for each candidate, fastest first, with the rate at which the compulsory bytes move."""
    shown = []
    for one in sorted(tried, key=lambda one: median(one.samples_ms) if one.samples_ms else float("inf")):
        row: dict[str, Any] = {"launches": one.label}
        if one.samples_ms:
            time_ms, interval = median(one.samples_ms), median_interval(one.samples_ms)
            row |= {"median_ms": time_ms, "ci_low_ms": interval.low, "ci_high_ms": interval.high}
            row |= {"fastest_ms": min(one.samples_ms), "gb_s": gigabytes and 1e3 * gigabytes / time_ms}
        shown.append(row | {"remark": one.remark})
    return shown


@app.command(help=__doc__)
def tune(
    op: Annotated[str, typer.Argument(help="The operation.")],
    impl: Annotated[str, typer.Argument(help="The implementation, one of ours.")],
    size: Annotated[str, typer.Option(help="Sizes as NAME=SIZE, joined by commas; chunk_size where it has one.")],
    alternatives: Annotated[
        list[str], typer.Option("--set", help="PATH=VALUES of the config; may be given several times.")
    ] = [],  # noqa: B006, typer copies it
    mode: Annotated[str, typer.Option(help="fw, bw or fwbw.")] = "fw",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    rounds: Annotated[int, typer.Option(min=3, help="Samples of every candidate.")] = 20,
) -> None:
    """Time launches of one implementation side by side."""
    import torch

    from ...bench.check import DTYPES
    from ...bench.worker import Worker

    try:
        operation = get_operation(op)
        implementation = operation.implementation(impl)
        sizes = parse_sizes(size, operation, implementation)
        if mode not in ("fw", "bw", "fwbw") or dtype not in implementation.dtypes:
            known = ", ".join(implementation.dtypes)
            raise ValueError(f"mode must be fw, bw or fwbw and dtype one of {known}, got {mode} and {dtype}")
        if not torch.cuda.is_available():
            raise ValueError("launches are timed on an NVIDIA GPU, and none is here")
        config = implementation.launches(mode, dtype, sizes, torch.cuda.get_device_capability())
        if config is None:
            raise ValueError(f"impl must be one that declares its default_config, got {impl!r}")
        tried = candidates(config, [parse_alternatives(text, config) for text in alternatives])
    except ValueError as error:
        note(str(error))
        raise typer.Exit(2) from None
    columns: dict[str, Any] = sizes
    (kernel,) = (family for family, ops in FAMILIES.items() if op in ops)
    case = Case(kernel=kernel, op=op, impl=impl, provider="lrbench", mode=mode, dtype=dtype, **columns)
    worker = Worker("cuda")

    def make(config: Any) -> clock.Call:
        # Every candidate draws the same gradient of the output.
        torch.manual_seed(0)
        return worker.make_ready(PlannedCase(case=case, target=implementation), config)

    measure(tried, make, worker.clock, rounds=rounds, eps=torch.finfo(DTYPES[dtype]).eps)
    count = counts.count_case(op, impl, mode, dtype, "fp32", sizes)
    title = f"{op} {impl}, {mode}, {dtype}, {size}, {torch.cuda.get_device_name()}; default: {config}"
    display.show(rows(tried, None if count is None else count.compulsory_bytes / 1e9), "table", title=title)


def parse_sizes(text: str, operation: Operation, implementation: Implementation) -> dict[str, int]:
    """Return the sizes of ``NAME=SIZE,...``; ValueError unless they are those of the operation."""
    sizes = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        sizes[name] = parse_size(value)
    wanted = set(operation.sizes)
    optional = {"chunk_size"} if implementation.chunked else set()
    if not wanted <= set(sizes) <= wanted | optional:
        raise ValueError(f"size must name {', '.join(sorted(wanted | optional))}, got {text!r}")
    return sizes


def _get(config: Any, path: str) -> Any:
    for name in path.split("."):
        fields = [each.name for each in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else []
        if name not in fields:
            raise ValueError(f"set must name a field ({', '.join(fields) or 'there is none'}), got {path!r}")
        config = getattr(config, name)
    return config


def _put(config: Any, path: str, value: Any) -> Any:
    name, dot, rest = path.partition(".")
    return dataclasses.replace(config, **{name: _put(getattr(config, name), rest, value) if dot else value})


def _words(value: Any) -> str:
    if not dataclasses.is_dataclass(value):
        return str(value)
    return ",".join(str(getattr(value, each.name)) for each in dataclasses.fields(value))


def _difference(results: Sequence[Any], expected: Sequence[Any], tolerance: float) -> str | None:
    for index, (mine, theirs) in enumerate(zip(results, expected, strict=True)):
        error = float((mine.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-300))
        if not error <= tolerance:
            return f"result {index} differs from the default's by {error:.2g}, relative"
    return None


if __name__ == "__main__":
    app()
