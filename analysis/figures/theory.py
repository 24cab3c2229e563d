"""Figures from the counts and the runtime model alone: how FLOPs, intensity and the best chunk length depend on sizes.

They are the TFLA paper's figures 18 to 21, 24 and 25, for any chunkwise operation; 4, 9 and 10, for mLSTM alone.
:func:`runtime_over_chunk_size` takes measured rows to stand beside the model where there are some.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ...kernels.baselines import get_operation
from ...kernels.scalar_decay.declare import FUSED_CHUNK
from ...results.arguments import one_of, unknown
from ...results.select import MODE_NAMES, best_rows, grouped, latest_rows, ok_rows, records, short_size
from ..accelerators.known import Accelerator, get_accelerator
from ..counts import Count, count, kv_savings
from ..counts.formulations import is_counted
from ..counts.model import DTYPE_BYTES
from ..model.chunk_size import Coefficients, check_chunkwise, coefficients, feasible_chunks
from ..model.fit import ROW_COLUMNS, Fits
from ..model.runtime_model import runtime_model
from ..model.terms import Query
from ..transfer import HEAD_DIM, NORMALISERS, SEQ_LEN, gains
from .layout import Drawing, Line, Panel, measured_line, same_limits, write
from .selection import busy_note
from .style import MUTED, SeriesStyle, curve_style, operation_label, series_style, sizes_in_words

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

HEAD_DIMS = (32, 64, 128, 256, 512, 1024)
MAX_LINES = 6
"""The most lines of a figure, unless all are asked for."""

CHUNK = "chunk size L (tokens)"
OPTIMUM = "best chunk size L (tokens)"
LEAST_FLOPS = "least FLOPs"
THIN: dict[str, Any] = {"color": MUTED, "linewidth": 0.7, "linestyle": (0, (1, 2)), "zorder": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Theory:
    """The problem that a figure of the model is about; the paper's 7B model unless said otherwise.

    Attributes:
        gpus: accelerators, keys or aliases.
        head_dim, head_dim_qk: value and query-key head dim; ``head_dim_qk`` None: half of it for mLSTM, else equal.
        tokens: batch x sequence length; with heads of ``head_dim`` the embedding dim is 4096.
        causal_factor: share of the causal square that is computed, in [0.5, 1].
        every: whether all measured implementations are shown beside the model, rather than the two fastest.
    """

    op: str = "mlstm_sig"
    gpus: tuple[str, ...] = ("a100", "h100", "b200")
    head_dim: int = 512
    head_dim_qk: int | None = None
    seq_len: int = 8192
    tokens: int = 65536
    mode: str = "fw"
    dtype: str = "bf16"
    state_dtype: str = "fp32"
    causal_factor: float = 0.5
    every: bool = False

    def __post_init__(self) -> None:
        """Refuse what no chunkwise problem has: ValueError says which field, what it must be and what it is."""
        for name in ("head_dim", "head_dim_qk", "seq_len", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value}")
        if not self.gpus:
            raise ValueError("gpu must name at least one accelerator, got none")
        self.accelerators()
        if not 0.5 <= self.causal_factor <= 1:
            raise ValueError(f"causal_factor must be in [0.5, 1], got {self.causal_factor}")
        one_of("dtype", self.dtype, tuple(DTYPE_BYTES))
        one_of("state_dtype", self.state_dtype, tuple(DTYPE_BYTES))
        check_chunkwise(self.op, self.mode)

    @property
    def share(self) -> float:
        """p_qk = d_qk / d_hv."""
        if self.head_dim_qk is not None:
            return self.head_dim_qk / self.head_dim
        return get_operation(self.op).qk_ratio

    def dims(self, head_dim: int, share: float | None = None) -> dict[str, Any]:
        """Return the head dims at a value head dim; ``share``: p_qk, if another."""
        share = self.share if share is None else share
        return {"head_dim_qk": max(1, round(share * head_dim)), "head_dim_v": head_dim}

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the whole problem, without the chunk length."""
        batch, num_heads = max(1, self.tokens // self.seq_len), max(1, 4096 // self.head_dim)
        return {"batch": batch, "seq_len": self.seq_len, "num_heads": num_heads, **self.dims(self.head_dim)}

    @property
    def how(self) -> dict[str, Any]:
        """The mode and the dtypes."""
        return {"mode": self.mode, "dtype": self.dtype, "state_dtype": self.state_dtype}

    def chunks(self) -> tuple[int, ...]:
        """Return the chunk lengths that kernels run; ValueError for a sequence shorter than the least."""
        check_chunkwise(self.op, self.mode, self.seq_len)
        return feasible_chunks(self.seq_len)

    def accelerators(self) -> list[Accelerator]:
        """Return the accelerators named."""
        return [get_accelerator(name) for name in dict.fromkeys(self.gpus)]

    def setting(self, *parts: str) -> str:
        """Return what holds for a whole figure; ``parts`` are words, or length, share or factor for the problem's."""
        known = {
            "length": f"T = {self.seq_len:,}",
            "share": f"d_qk = {self.share:g} d_v",
            "factor": f"causal factor {self.causal_factor:g}",
        }
        name = f"{operation_label(self.op)} {MODE_NAMES[self.mode]}"
        return " · ".join((name, *(known.get(part, part) for part in parts)))


def _counted(theory: Theory, head_dim: int, chunk_size: int | None, formulation: str = "chunkwise", **of: Any) -> Count:
    """Return the count of one head and sequence, or ``of`` a batch and num_heads."""
    of |= {"formulation": formulation, "seq_len": theory.seq_len, "chunk_size": chunk_size, **theory.how}
    share = None if formulation == "recurrent" else theory.causal_factor
    return count(theory.op, causal_factor=share, **theory.dims(head_dim), **of)


def _optima(theory: Theory, style: SeriesStyle, *, intensity: float | None = None, share: float | None = None) -> Line:
    """Return L_opt,FLOP over head dim, or L_opt,Runtime at an accelerator's intensity; ``share``: p_qk, if another."""
    closed = [_closed(theory, dim, share) for dim in HEAD_DIMS]
    y = [each.flop_optimal() if intensity is None else each.runtime_optimal(intensity) for each in closed]
    return Line(x=HEAD_DIMS, y=y, style=style)


def _closed(theory: Theory, head_dim: int, share: float | None = None) -> Coefficients:
    return coefficients(theory.op, causal_factor=theory.causal_factor, **theory.dims(head_dim, share), **theory.how)


def _dtype_on(accelerator: Accelerator, dtype: str) -> str:
    """Return the dtype whose rate an accelerator is drawn at: a part without bf16 (V100) at its fp16 rate, as in 25."""
    for name in (dtype, "fp16") if dtype == "bf16" else (dtype,):
        if accelerator.peak_flops(name) is not None:
            return name
    raise unknown("dtype", dtype, accelerator.matrix_flops, f" on {accelerator.key}")


def _intensities(theory: Theory) -> dict[str, float]:
    """Return the accelerators' names and FLOP per byte, in the order in which they were named."""
    found = {_short(each): each.intensity(_dtype_on(each, theory.dtype)) for each in theory.accelerators()}
    return {name: intensity for name, intensity in found.items() if intensity is not None}


def _short(accelerator: Accelerator) -> str:
    return accelerator.name.removeprefix("NVIDIA ").removeprefix("GeForce ").removeprefix("AMD Instinct ")


def flops_over_chunk_size(theory: Theory) -> Drawing:
    """FLOPs of the chunkwise form over chunk size, between the recurrent and the parallel form's (TFLA, figure 18)."""
    chunks = [2**n for n in range(theory.seq_len.bit_length())]
    others = [each for each in ("recurrent", "parallel") if is_counted(theory.op, each, theory.mode)]
    panels = []
    for dim in dict.fromkeys(max(1, theory.head_dim // part) for part in (4, 2, 1)):
        chunkwise = [_counted(theory, dim, chunk).flops / 1e9 for chunk in chunks]
        lines = [Line(x=chunks, y=chunkwise, style=curve_style(0, "chunkwise"))]
        for n, formulation in enumerate(others, start=1):
            flops = _counted(theory, dim, None, formulation).flops / 1e9
            style = curve_style(n, formulation, dashed=True)
            lines.append(Line(x=[chunks[0], chunks[-1]], y=[flops, flops], style=style))
        title = f"head dim {theory.dims(dim)['head_dim_qk']} (qk), {dim} (v)"
        panels.append(Panel(title=title, lines=lines, x_label=CHUNK, y_label="GFLOP per head", sizes=chunks))
    return Drawing(
        grid=[same_limits(panels, 0.7, 1.4)],
        title="FLOPs between the recurrent and the parallel form",
        finding=f"Least FLOPs at chunk sizes of {sizes_in_words(_least(panel.lines[0]) for panel in panels)}",
        setting=theory.setting("length", "factor"),
    )


def _least(line: Line) -> float:
    """Return the chunk size at which a line is lowest."""
    return min(zip(line.y, line.x, strict=True))[1]


def _over_head_dim(panels: Mapping[str, Sequence[Line]], title: str, setting: str) -> Drawing:
    """Return a figure of best chunk sizes over head dim, from the lines of its panels by their titles."""
    axes: dict[str, Any] = {"x_label": "value head dim d_v (elements)", "y_label": OPTIMUM, "sizes": HEAD_DIMS}
    grid = same_limits([Panel(title=each, lines=lines, **axes) for each, lines in panels.items()])
    return Drawing(grid=[grid], title=title, setting=setting, finding=f"Best chunk size {_growth(grid)} with head dim")


def _growth(panels: Sequence[Panel]) -> str:
    """Return from which to which value the lines rise, without that of least FLOPs, which only compares."""
    lines = (line for panel in panels for line in panel.lines if line.style.label != LEAST_FLOPS)
    values = [value for line in lines for value in line.y]
    return f"grows from {min(values):.0f} to {max(values):.0f}"


def flop_optimal_over_head_dim(theory: Theory) -> Drawing:
    """The chunk size of least FLOPs over head dim, for two ratios d_qk / d_v and three causal factors (TFLA, 19)."""
    styles = {factor: curve_style(n, f"causal factor {factor:g}") for n, factor in enumerate((0.5, 0.75, 1.0))}
    panels = {
        f"d_qk = {share:g} d_v": [
            _optima(dataclasses.replace(theory, causal_factor=factor), style, share=share)
            for factor, style in styles.items()
        ]
        for share in (0.5, 1.0)
    }
    setting = theory.setting("closed form, grows as the square root")
    return _over_head_dim(panels, "FLOP-optimal chunk size over head dim", setting)


def runtime_optimal_over_head_dim(theory: Theory) -> Drawing:
    """The chunk size of least modelled time over head dim, by accelerator and dtype of states (TFLA, figure 24)."""
    known = _intensities(theory)
    styles = {name: curve_style(n, name) for n, name in enumerate(known)}
    for group in _neighbours(known):
        # Their lines lie on one another: dashes of each show in the gaps of the others.
        for n, (name, _) in enumerate(group if len(group) > 1 else ()):
            dashes = (4 * n, (4, 4 * (len(group) - 1)))
            styles[name] = dataclasses.replace(styles[name], dashes=dashes)
    least_flops = dataclasses.replace(curve_style(6, LEAST_FLOPS, dashed=True), width=1.2)
    panels = {}
    for states in ("fp32", "bf16"):
        each = dataclasses.replace(theory, state_dtype=states)
        lines = [_optima(each, style, intensity=known[name]) for name, style in styles.items()]
        panels[f"{states} states"] = [*lines, _optima(each, least_flops)]
    setting = theory.setting("share", theory.dtype, "factor", "closed form")
    return _over_head_dim(panels, "Runtime-optimal chunk size over head dim", setting)


def runtime_optimal_over_intensity(theory: Theory) -> Drawing:
    """The chunk size of least modelled time over an accelerator's FLOP per byte, by head dim (TFLA, figure 25)."""
    known = _intensities(theory)
    low, high = 0.6 * min(50.0, *known.values()), 1.6 * max(500.0, *known.values())
    xs = [low * (high / low) ** (n / 60) for n in range(61)]
    lines = []
    for n, dim in enumerate(HEAD_DIMS[1:]):
        closed = _closed(theory, dim)
        lines.append(Line(x=xs, y=[closed.runtime_optimal(x) for x in xs], style=curve_style(n, f"d_v = {dim}")))
    panel = Panel(
        title="", lines=lines, x_label="accelerator intensity (FLOP per byte)", y_label=OPTIMUM, x_limits=(low, high),
        decorate=lambda axes: _mark_across(axes, known),
    )  # fmt: skip
    named = ", ".join(f"{name} {intensity:.0f}" for group in _neighbours(known) for name, intensity in group)
    return Drawing(
        grid=[[panel]],
        title="Runtime-optimal chunk size over accelerator intensity",
        finding=f"Best chunk size {_growth([panel])} with intensity and head dim",
        setting=theory.setting("share", f"{theory.state_dtype} states", "factor", "closed form"),
        note=f"Dotted, in FLOP per byte: {named}.",
        usual_width=6.6,
    )


def intensity_over_chunk_size(theory: Theory) -> Drawing:
    """Arithmetic intensity over chunk size by head dim, beside the accelerators' own (TFLA, figure 21)."""
    known, chunks, panels = _intensities(theory), theory.chunks(), []
    for states in ("fp32", "bf16"):
        each, lines = dataclasses.replace(theory, state_dtype=states), []
        for n, dim in enumerate((64, 128, 256, 512)):
            intensities = [_counted(each, dim, chunk).intensity for chunk in chunks]
            lines.append(Line(x=chunks, y=intensities, style=curve_style(n, f"d_v = {dim}")))
        axes: dict[str, Any] = {"x_label": CHUNK, "y_label": "FLOP per byte moved", "sizes": chunks}
        axes["decorate"] = lambda axes: _mark_along(axes, known)
        panels.append(Panel(title=f"{states} states", lines=lines, **axes))
    return Drawing(
        grid=[same_limits(panels)],
        title="Arithmetic intensity over chunk size",
        finding=f"Arithmetic intensity {_growth(panels)} FLOP per byte with chunk size and head dim",
        setting=theory.setting("length", "share", "factor"),
        note="Grey: the intensity at which each accelerator's matrix rate and bandwidth balance.",
    )


def gain_over_input_gate(main: str = "mlstm_sig") -> Drawing:
    """Gain of mLSTM over its input gate, before and after the norm, by epsilon and normaliser (TFLA, 4, 9 and 10)."""
    (other,) = set(NORMALISERS) - {main}
    inputs = [n / 4 for n in range(-48, 33)]

    def mark_gates(axes: Axes) -> None:
        """Label the axis, which is of exp(gate), with gates."""
        axes.set_xticks([math.exp(gate) for gate in inputs[::16]], [f"{gate:g}" for gate in inputs[::16]])

    def panel(title: str, *, after: bool = True, **settings: Any) -> Panel:
        lines = []
        for op in (main, other):
            for n, forget in enumerate((-5, 3, 12)):
                gain = [gains(op, input_gate=gate, forget_gate=forget, **settings)[after] for gate in inputs]
                style = curve_style(n, "" if op == other else f"forget gate {forget}", dashed=op == other)
                lines.append(Line(x=[math.exp(gate) for gate in inputs], y=gain, style=style))
        return Panel(
            title=title, lines=lines, x_label="input gate (before exp or sigmoid)", y_label="gain (max|h| / max|v|)",
            y_limits=(0.0, 1.1) if after else None, y_log=not after, decorate=mark_gates,
        )  # fmt: skip

    own = [
        panel("before the norm", after=False),
        *(panel(f"epsilon {e:g}", epsilon=e) for e in (1e-2, 1e-6, 1e-8)),
    ]
    words = {"none": "1", "one": "max(|nq|, 1)", "stabilised": "max(|nq|, exp(m))", "unbounded": "|nq|"}
    return Drawing(
        grid=[own, [panel(f"denominator {title}", normaliser=name) for name, title in words.items()]],
        title="Gain over the input gate",
        finding="After the norm mLSTMexp and mLSTMsig let through the same, from an input gate of about -8 on",
        setting=(
            f"after the norm, but for one panel · T = {SEQ_LEN}, head dim {HEAD_DIM}, q, k, v ~ N(0, 1) · "
            "above: own denominator, below: epsilon 1e-06"
        ),
        note=f"Solid: {operation_label(main)}, dashed: {operation_label(other)}.",
    )


def tokens_of_cache() -> Drawing:
    """Tokens of key-value cache in the memory that a fused gated MLP saves (its source's last figure)."""
    tokens = [2**n for n in range(7, 18)]
    found = [each for m in kv_savings.MODELS for s in tokens for each in kv_savings.savings(m, s)]
    most = max(found, key=lambda each: each.extra_tokens)

    def panel(baseline: str) -> Panel:
        lines = []
        for n, (name, of) in enumerate(grouped(found, lambda each: each.model).items()):
            extra = [each.extra_tokens for each in of if each.baseline == baseline]
            lines.append(Line(x=tokens, y=extra, style=curve_style(n, name)))
        return Panel(
            title=f"activations {baseline}", lines=lines, x_label="prompt, or a chunk of it (tokens)",
            y_label="key-value cache gained (tokens)", y_log=True, sizes=tokens,
        )  # fmt: skip

    return Drawing(
        grid=[same_limits([panel(baseline) for baseline in kv_savings.BASELINES])],
        title="Key-value cache in the memory that the fused MLP saves",
        finding=f"{most.model} gains most: {most.extra_tokens / most.tokens:.2f} tokens for each of the prompt",
        setting="bf16, activations of one layer",
    )


def _mark_across(axes: Axes, known: Mapping[str, float]) -> None:
    """Draw accelerators' intensities as upright thin lines, their names above the panel."""
    for group in _neighbours(known):
        for _, intensity in group:
            axes.axvline(intensity, **THIN)
        turned = {"rotation": 45, "rotation_mode": "anchor", "xycoords": axes.get_xaxis_transform()}
        write(axes, ", ".join(name for name, _ in group), (group[0][1], 1.0), (2, 2), color=MUTED, **turned)


def _mark_along(axes: Axes, known: Mapping[str, float]) -> None:
    """Draw accelerators' intensities as level thin lines with their names on them, at two ends in turn where close."""
    previous, right = 0.0, False
    for group in _neighbours(known):
        for _, intensity in group:
            axes.axhline(intensity, **THIN)
        right = not right and group[0][1] < 1.4 * previous
        previous = group[0][1]
        names = ", ".join(f"{name} ({intensity:.0f})" for name, intensity in group)
        at, side = (0.99 if right else 0.02, previous), "right" if right else "left"
        write(axes, names, at, (0, 1), ha=side, color=MUTED, xycoords=axes.get_yaxis_transform())


def _neighbours(known: Mapping[str, float]) -> list[list[tuple[str, float]]]:
    """Return ascending intensities in groups, those within 5 % of one another together: their names share a place."""
    groups: list[list[tuple[str, float]]] = []
    for each in sorted(known.items(), key=itemgetter(1)):
        if not groups or each[1] >= 1.05 * groups[-1][0][1]:
            groups.append([])
        groups[-1].append(each)
    return groups


def runtime_over_chunk_size(theory: Theory, frame: pd.DataFrame | None) -> Drawing:
    """Modelled time over chunk size on several accelerators, and what was measured of the same problem (TFLA, 20).

    Args:
        frame: result rows; their devices are drawn as well, in the colour of their model, and so is, where there is
            room, what fused_chunk takes, fitted to all of a device's rows. None: the model alone. ValueError names what
            no row has of this problem.
    """
    measured = None if frame is None else _same_problem(frame, theory)
    devices = [] if measured is None else [get_accelerator(key) for key in measured["device_accelerator"].unique()]
    accelerators = {each.key: each for each in (*theory.accelerators(), *devices)}
    chunks, sizes = theory.chunks(), theory.sizes
    whole: dict[str, Any] = {name: sizes[name] for name in ("batch", "num_heads")}
    counted = [_counted(theory, theory.head_dim, chunk, **whole) for chunk in chunks]
    lines, walked, best, busy = [], False, {}, []
    for n, (key, accelerator) in enumerate(accelerators.items()):
        name, dtype = _short(accelerator), _dtype_on(accelerator, theory.dtype)
        times = [runtime_model(each, accelerator, dtype).upper_ms for each in counted]
        lines.append(Line(x=chunks, y=times, style=curve_style(n, f"{name}, model")))
        best[key] = short_size(_least(lines[-1]))
        if frame is None or measured is None:
            continue
        here = measured[measured["device_accelerator"] == key]
        fastest = here.groupby("impl")["time_ms"].min().sort_values().index[: None if theory.every else 2]
        here = here[here["impl"].isin(fastest)]
        busy.append(busy_note(here))
        for impl, rows in here.sort_values("chunk_size").groupby("impl", sort=True):
            label = f"{name}, {impl} measured"
            style = series_style(theory.op, str(impl))
            style = dataclasses.replace(style, colour=curve_style(n, "").colour, width=1.2, label=label)
            lines.append(measured_line(rows, "chunk_size", rows["time_ms"], style))
        room = FUSED_CHUNK in fastest and (theory.every or len(accelerators) + len(fastest) < MAX_LINES)
        walks = _walk_times(frame, theory, accelerator, chunks) if room else None
        if walks is not None:
            walked = True
            style = curve_style(n, f"{name}, {FUSED_CHUNK} walks", dashed=True)
            lines.append(Line(x=chunks, y=walks, style=style))
    title = "Modelled runtime over chunk size"
    chosen = ", ".join(f"{at} on {_short(accelerators[key])}" for key, at in best.items())
    finding = f"Modelled best chunk size: {chosen}"
    if measured is not None:
        title = "Runtime over chunk size, model and measurement"
        row = measured.loc[measured["time_ms"].idxmin()]
        key, at = str(row["device_accelerator"]), short_size(row["chunk_size"])
        where = f"On the {_short(accelerators[key])} {row['impl']}"
        finding = f"{where} is fastest at chunk size {at}, the model at {best[key]}"
    note = (
        f"Model: FLOPs over the matrix rate plus bytes over the bandwidth, of the chunkwise form at causal factor "
        f"{theory.causal_factor:g}."
    )
    if walked:
        note += f" Walks: the tiles and states of {FUSED_CHUNK}, in waves of its programs, fitted to its rows."
    dims = f"head dim {sizes['head_dim_qk']} (qk), {theory.head_dim} (v)"
    parts = (f"batch {sizes['batch']}", f"{sizes['num_heads']} heads", dims)
    return Drawing(
        grid=[[Panel(title="", lines=lines, x_label=CHUNK, y_label="time per call (ms)", sizes=chunks)]],
        title=title,
        setting=theory.setting("length", *parts, f"{theory.dtype}, {theory.state_dtype} states"),
        finding=finding,
        note=" ".join(filter(None, [note, *busy])),
        usual_width=6.8,
    )


def _walk_times(
    frame: pd.DataFrame, theory: Theory, accelerator: Accelerator, chunks: Sequence[int]
) -> list[float] | None:
    """Return the times that fused_chunk takes at each chunk size, fitted to the accelerator's rows."""
    rows = ok_rows(frame)
    rows = rows[(rows["impl"] == FUSED_CHUNK) & (rows["mode"] == theory.mode) & (rows["dtype"] == theory.dtype)]
    rows = rows[rows["device_accelerator"] == accelerator.key]
    fit = Fits(records(rows, ROW_COLUMNS), theory.mode, theory.dtype, accelerator).of(theory.op, FUSED_CHUNK)
    if fit is None:
        return None
    how = (theory.op, FUSED_CHUNK, theory.mode, theory.dtype, theory.state_dtype)
    return [fit.time_ms(Query(*how, {**theory.sizes, "chunk_size": chunk})) for chunk in chunks]


def _same_problem(frame: pd.DataFrame, theory: Theory) -> pd.DataFrame:
    """Return the fastest measured row per implementation, device and chunk size of the problem that is modelled."""
    rows = ok_rows(latest_rows(frame))
    rows = rows[rows["chunk_size"].notna() & rows["device_accelerator"].notna()]
    names = ("op", "mode", "dtype", "state_dtype", "seq_len", "head_dim", "tokens")
    wanted = {name: getattr(theory, name) for name in names} | theory.sizes
    for name, value in wanted.items():
        column = rows["head_dim_v" if name == "head_dim" else name]
        known = sorted({each if isinstance(each, str) else int(each) for each in column.dropna()})
        if value not in known:
            listed = ", ".join(map(str, known)) or "none"
            raise ValueError(f"{name} must be one of {listed} in these results, of the problem modelled, got {value}")
        rows = rows[column == value]
    return best_rows(rows, ("op", "impl", "device_accelerator", "chunk_size"))
