"""Figures from the counts and the runtime model alone: how FLOPs, intensity and the best chunk length depend on sizes.

They are the TFLA paper's figures 18 to 21, 24 and 25, for any chunkwise operation. :func:`runtime_over_chunk_size`
takes measured rows to stand beside the model where there are some.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...kernels.baselines import get_operation
from ...results.select import best_rows, latest_rows, ok_rows
from ..accelerators.known import Accelerator, get_accelerator
from ..counts import FORMULATIONS, Count, count, count_case
from ..counts.formulations import is_counted, one_of
from ..counts.model import DTYPE_BYTES
from ..model.chunk_size import check_chunkwise, coefficients, feasible_chunks
from ..model.launch_model import fit_launches
from ..model.runtime_model import runtime_model
from ..model.schedule import launches_of
from .layout import Drawing, Line, Panel, same_limits, write
from .selection import MODE_TITLES
from .style import CURVES, MUTED, curve_style, operation_label, series_style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

HEAD_DIMS = (32, 64, 128, 256, 512, 1024)
CHUNK = "chunk size L (tokens)"
HEAD_DIM = "value head dim d_v (elements)"
OPTIMUM = "best chunk size L (tokens)"
THIN: dict[str, Any] = {"color": MUTED, "linewidth": 0.7, "linestyle": (0, (1, 2)), "zorder": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Theory:
    """The problem that a figure of the model is about; the paper's 7B model unless said otherwise.

    Attributes:
        gpus: accelerators, keys or aliases.
        head_dim, head_dim_qk: value and query-key head dim; ``head_dim_qk`` None: half of it for mLSTM, else equal.
        tokens: batch x sequence length; with heads of ``head_dim`` the embedding dim is 4096.
        causal_factor: share of the causal square that is computed, in [0.5, 1].
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

    def __post_init__(self) -> None:
        """Refuse what no chunkwise problem has.

        Raises:
            ValueError: with the name of the field, what it must be and what it is.
        """
        for name in ("head_dim", "head_dim_qk", "seq_len", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value}")
        if not self.gpus:
            raise ValueError("gpu must name at least one accelerator, got none")
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

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the whole problem, without the chunk length."""
        return {
            "batch": max(1, self.tokens // self.seq_len),
            "seq_len": self.seq_len,
            "num_heads": max(1, 4096 // self.head_dim),
            "head_dim_qk": _key_dim(self.head_dim, self.share),
            "head_dim_v": self.head_dim,
        }

    def accelerators(self) -> list[Accelerator]:
        """Return the accelerators named; ValueError for an unknown one."""
        return [get_accelerator(name) for name in dict.fromkeys(self.gpus)]

    def setting(self, *parts: str) -> str:
        """Return what holds for a whole figure."""
        name = operation_label(self.op)
        return " · ".join((f"{name} {MODE_TITLES[self.mode].lower()}", *parts))


def _key_dim(head_dim: int, share: float) -> int:
    return max(1, round(share * head_dim))


def _counted(
    theory: Theory, formulation: str, head_dim: int, chunk_size: int | None, *, heads: int = 1, batch: int = 1
) -> Count:
    return count(
        theory.op,
        formulation=formulation,
        mode=theory.mode,
        seq_len=theory.seq_len,
        batch=batch,
        num_heads=heads,
        head_dim_qk=_key_dim(head_dim, theory.share),
        head_dim_v=head_dim,
        chunk_size=chunk_size,
        dtype=theory.dtype,
        state_dtype=theory.state_dtype,
        causal_factor=None if formulation == "recurrent" else theory.causal_factor,
    )


def _closed(
    theory: Theory, head_dim: int, *, intensity: float | None = None, share: float | None = None, **changed: Any
) -> float:
    """Return L_opt,FLOP, or L_opt,Runtime at an accelerator's intensity; ``changed``: other than the theory's."""
    settings = {name: getattr(theory, name) for name in ("causal_factor", "dtype", "state_dtype", "mode")}
    key_dim = _key_dim(head_dim, theory.share if share is None else share)
    each = coefficients(theory.op, head_dim_qk=key_dim, head_dim_v=head_dim, **{**settings, **changed})
    return each.flop_optimal() if intensity is None else each.runtime_optimal(intensity)


def _dtype_on(accelerator: Accelerator, dtype: str) -> str:
    """Return the dtype whose rate an accelerator is drawn at: a part without bf16 (V100) at its fp16 rate, as in 25."""
    for name in (dtype, "fp16") if dtype == "bf16" else (dtype,):
        if accelerator.peak_flops(name) is not None:
            return name
    known = ", ".join(accelerator.matrix_flops)
    raise ValueError(f"dtype must be one of {known} on {accelerator.key}, got {dtype!r}")


def _intensity(accelerator: Accelerator, dtype: str) -> float:
    found = accelerator.intensity(_dtype_on(accelerator, dtype))
    assert found is not None
    return found


def _marked(theory: Theory) -> list[tuple[str, float]]:
    """Return the names and intensities of the accelerators, in ascending order."""
    found = ((_short(each), _intensity(each, theory.dtype)) for each in theory.accelerators())
    return sorted(found, key=lambda each: each[1])


def _short(accelerator: Accelerator) -> str:
    return accelerator.name.removeprefix("NVIDIA ").removeprefix("GeForce ").removeprefix("AMD Instinct ")


def _powers(low: int, high: int) -> list[int]:
    return [2**n for n in range(low.bit_length() - 1, high.bit_length()) if low <= 2**n <= high]


def flops_over_chunk_size(theory: Theory) -> Drawing:
    """FLOPs of the chunkwise form over chunk size, between the recurrent and the parallel form's (TFLA, figure 18)."""
    chunks = _powers(1, theory.seq_len)
    constant = [
        f for f in ("recurrent", "parallel") if f in FORMULATIONS[theory.op] and is_counted(theory.op, f, theory.mode)
    ]
    panels = []
    for dim in (theory.head_dim // 4, theory.head_dim // 2, theory.head_dim):
        chunkwise = [_counted(theory, "chunkwise", dim, chunk).flops / 1e9 for chunk in chunks]
        lines = [Line(x=chunks, y=chunkwise, style=curve_style(0, "chunkwise"))]
        for n, formulation in enumerate(constant, start=1):
            flops = _counted(theory, formulation, dim, None).flops / 1e9
            style = curve_style(n, formulation, dashed=True)
            lines.append(Line(x=[chunks[0], chunks[-1]], y=[flops, flops], style=style))
        title = f"head dim {_key_dim(dim, theory.share)} (qk), {dim} (v)"
        panels.append(Panel(title=title, lines=lines, x_label=CHUNK, y_label="GFLOP per head", sizes=chunks))
    return Drawing(
        grid=[same_limits(panels, 0.7, 1.4)],
        title="FLOPs between the recurrent and the parallel form",
        setting=theory.setting(f"T = {theory.seq_len:,}", f"causal factor {theory.causal_factor:g}"),
    )


def _optima(title: str, lines: Sequence[Line]) -> Panel:
    return Panel(title=title, lines=lines, x_label=HEAD_DIM, y_label=OPTIMUM, sizes=HEAD_DIMS)


def flop_optimal_over_head_dim(theory: Theory) -> Drawing:
    """The chunk size of least FLOPs over head dim, for two ratios d_qk / d_v and three causal factors (TFLA, 19)."""
    panels = []
    for share in (0.5, 1.0):
        lines = []
        for n, factor in enumerate((0.5, 0.75, 1.0)):
            optima = [_closed(theory, dim, share=share, causal_factor=factor) for dim in HEAD_DIMS]
            lines.append(Line(x=HEAD_DIMS, y=optima, style=curve_style(n, f"causal factor {factor:g}")))
        panels.append(_optima(f"d_qk = {share:g} d_v", lines))
    return Drawing(
        grid=[same_limits(panels)],
        title="FLOP-optimal chunk size over head dim",
        setting=theory.setting("closed form, grows as the square root"),
    )


def runtime_optimal_over_head_dim(theory: Theory) -> Drawing:
    """The chunk size of least modelled time over head dim, by accelerator and dtype of states (TFLA, figure 24)."""
    known = [(_short(each), _intensity(each, theory.dtype)) for each in theory.accelerators()]
    styles = [curve_style(n, name) for n, (name, _) in enumerate(known)]
    styles.append(dataclasses.replace(curve_style(6, "least FLOPs", dashed=True), width=1.2))
    panels = []
    for states in ("fp32", "bf16"):
        lines = []
        for style, intensity in zip(styles, [*(intensity for _, intensity in known), None], strict=True):
            optima = [_closed(theory, dim, intensity=intensity, state_dtype=states) for dim in HEAD_DIMS]
            lines.append(Line(x=HEAD_DIMS, y=optima, style=style))
        panels.append(_optima(f"{states} states", lines))
    parts = (f"d_qk = {theory.share:g} d_v", theory.dtype, f"causal factor {theory.causal_factor:g}", "closed form")
    title = "Runtime-optimal chunk size over head dim"
    return Drawing(grid=[same_limits(panels)], title=title, setting=theory.setting(*parts))


def runtime_optimal_over_intensity(theory: Theory) -> Drawing:
    """The chunk size of least modelled time over an accelerator's FLOP per byte, by head dim (TFLA, figure 25)."""
    marked = _marked(theory)
    low, high = 0.6 * min(50.0, *(i for _, i in marked)), 1.6 * max(500.0, *(i for _, i in marked))
    xs = [low * (high / low) ** (n / 60) for n in range(61)]
    lines = [
        Line(x=xs, y=[_closed(theory, dim, intensity=x) for x in xs], style=curve_style(n, f"d_v = {dim}"))
        for n, dim in enumerate(HEAD_DIMS[1:])
    ]
    panel = Panel(
        title="",
        lines=lines,
        x_label="accelerator intensity (FLOP per byte)",
        y_label=OPTIMUM,
        x_limits=(low, high),
        decorate=lambda axes: _mark_across(axes, marked),
    )
    parts = (f"d_qk = {theory.share:g} d_v", f"{theory.state_dtype} states", f"causal factor {theory.causal_factor:g}")
    return Drawing(
        grid=[[panel]],
        title="Runtime-optimal chunk size over accelerator intensity",
        setting=theory.setting(*parts, "closed form"),
        note=f"Dotted, in FLOP per byte: {', '.join(f'{name} {intensity:.0f}' for name, intensity in marked)}.",
        usual_width=6.6,
    )


def intensity_over_chunk_size(theory: Theory) -> Drawing:
    """Arithmetic intensity over chunk size by head dim, beside the accelerators' own (TFLA, figure 21)."""
    marked, chunks, panels = _marked(theory), list(feasible_chunks(theory.seq_len)), []
    for states in ("fp32", "bf16"):
        each = dataclasses.replace(theory, state_dtype=states)
        lines = []
        for n, dim in enumerate((64, 128, 256, 512)):
            intensities = [_counted(each, "chunkwise", dim, chunk).intensity for chunk in chunks]
            lines.append(Line(x=chunks, y=intensities, style=curve_style(n, f"d_v = {dim}")))
        panels.append(
            Panel(
                title=f"{states} states",
                lines=lines,
                x_label=CHUNK,
                y_label="FLOP per byte moved",
                sizes=chunks,
                decorate=lambda axes: _mark_along(axes, marked),
            )
        )
    parts = (f"T = {theory.seq_len:,}", f"d_qk = {theory.share:g} d_v", f"causal factor {theory.causal_factor:g}")
    return Drawing(
        grid=[same_limits(panels)],
        title="Arithmetic intensity over chunk size",
        setting=theory.setting(*parts),
        note="Grey: the intensity at which each accelerator's matrix rate and bandwidth balance.",
    )


def _mark_across(axes: Axes, marked: Sequence[tuple[str, float]]) -> None:
    """Draw accelerators' intensities as upright thin lines, their names above the panel."""
    for group in _neighbours(marked):
        for _, intensity in group:
            axes.axvline(intensity, **THIN)
        name, at = ", ".join(name for name, _ in group), (group[0][1], 1.0)
        turned = {"rotation": 45, "rotation_mode": "anchor", "xycoords": axes.get_xaxis_transform()}
        write(axes, name, at, (2, 2), color=MUTED, **turned)


def _mark_along(axes: Axes, marked: Sequence[tuple[str, float]]) -> None:
    """Draw accelerators' intensities as level thin lines with their names on them, at two ends in turn where close."""
    previous, right = 0.0, False
    for group in _neighbours(marked):
        for _, intensity in group:
            axes.axhline(intensity, **THIN)
        right = not right and group[0][1] < 1.4 * previous
        previous = group[0][1]
        names = ", ".join(f"{name} ({intensity:.0f})" for name, intensity in group)
        at, side = (0.99 if right else 0.02, previous), "right" if right else "left"
        write(axes, names, at, (0, 1), ha=side, color=MUTED, xycoords=axes.get_yaxis_transform())


def _neighbours(marked: Sequence[tuple[str, float]]) -> list[list[tuple[str, float]]]:
    """Return ascending intensities in groups, those within 5 % of one another together: their names share a place."""
    groups: list[list[tuple[str, float]]] = []
    for each in marked:
        if groups and each[1] < 1.05 * groups[-1][0][1]:
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def runtime_over_chunk_size(theory: Theory, frame: pd.DataFrame | None = None) -> Drawing:
    """Modelled time over chunk size on several accelerators, and what was measured of the same problem (TFLA, 20).

    Args:
        frame: result rows; their devices are drawn as well, in the colour of their model, and so is what fused_chunk's
            launches take, fitted to all of a device's rows, where there are enough. None: the model alone.

    Raises:
        ValueError: no row of ``frame`` is of this problem.
    """
    measured = None if frame is None else _same_problem(frame, theory)
    keys = [each.key for each in theory.accelerators()]
    keys += [] if measured is None else [key for key in measured["device_accelerator"].unique() if key not in keys]
    chunks, sizes = list(feasible_chunks(theory.seq_len)), theory.sizes
    heads, batch = sizes["num_heads"], sizes["batch"]
    counted = [_counted(theory, "chunkwise", theory.head_dim, chunk, heads=heads, batch=batch) for chunk in chunks]
    lines, launched = [], False
    for n, accelerator in enumerate(map(get_accelerator, keys)):
        dtype = _dtype_on(accelerator, theory.dtype)
        times = [runtime_model(each, accelerator, dtype).upper_ms for each in counted]
        lines.append(Line(x=chunks, y=times, style=curve_style(n, f"{_short(accelerator)}, model")))
        if frame is None or measured is None:
            continue
        here = measured[measured["device_accelerator"] == accelerator.key]
        lines += _measured_lines(here, theory.op, _short(accelerator), n)
        launches = _launch_times(frame, theory, accelerator, chunks) if (here["impl"] == "fused_chunk").any() else None
        if launches is not None:
            launched = True
            lines.append(
                Line(
                    x=chunks,
                    y=launches,
                    style=curve_style(n, f"{_short(accelerator)}, fused_chunk launches", dashed=True),
                )
            )
    note = (
        f"Model: FLOPs over the matrix rate plus bytes over the bandwidth, of the chunkwise form at causal factor "
        f"{theory.causal_factor:g}."
    )
    parts = (
        f"T = {theory.seq_len:,}",
        f"batch {batch}",
        f"{heads} heads",
        f"head dim {sizes['head_dim_qk']} (qk), {theory.head_dim} (v)",
        f"{theory.dtype}, {theory.state_dtype} states",
    )
    return Drawing(
        grid=[[Panel(title="", lines=lines, x_label=CHUNK, y_label="time per call (ms)", sizes=chunks)]],
        title="Modelled runtime over chunk size"
        if measured is None
        else "Runtime over chunk size, model and measurement",
        setting=theory.setting(*parts),
        note=note + " Launches: grids, serial steps and states of fused_chunk, fitted to its rows." * launched,
        usual_width=6.8,
    )


def _launch_times(
    frame: pd.DataFrame, theory: Theory, accelerator: Accelerator, chunks: Sequence[int]
) -> list[float] | None:
    """Return the times that fused_chunk's launches take at each chunk size, fitted to the accelerator's rows."""
    rows = ok_rows(frame)
    rows = rows[(rows["impl"] == "fused_chunk") & (rows["mode"] == theory.mode) & (rows["dtype"] == theory.dtype)]
    rows = rows[rows["device_accelerator"] == accelerator.key]
    fit = fit_launches(rows.to_dict("records"), theory.op, "fused_chunk", theory.mode, theory.dtype)
    if fit is None:
        return None
    times = []
    for chunk in chunks:
        sizes = {**theory.sizes, "chunk_size": chunk}
        case = (theory.op, "fused_chunk", theory.mode, theory.dtype, theory.state_dtype, sizes)
        launches, count = launches_of(*case), count_case(*case)
        assert launches is not None and count is not None
        times.append(fit.time_ms(launches, accelerator, count))
    return times


def _same_problem(frame: pd.DataFrame, theory: Theory) -> pd.DataFrame:
    """Return the fastest measured row per implementation, device and chunk size of the problem that is modelled."""
    names = ("op", "mode", "dtype", "state_dtype")
    wanted = {**{name: getattr(theory, name) for name in names}, **theory.sizes}
    rows = latest_rows(frame)
    for name, value in wanted.items():
        rows = rows[rows[name] == value]
    rows = rows[rows["chunk_size"].notna() & rows["device_accelerator"].notna()]
    rows = best_rows(rows, ("op", "impl", "device_accelerator", "chunk_size"))
    if rows.empty:
        listed = ", ".join(f"{name} {value}" for name, value in wanted.items())
        raise ValueError(f"results must hold measured rows of the problem that is modelled ({listed}), got none")
    return rows


def _measured_lines(rows: pd.DataFrame, op: str, device: str, index: int) -> list[Line]:
    """Return a line for each implementation, in the colour of its device."""
    lines = []
    for impl, line in rows.sort_values("chunk_size").groupby("impl", sort=True):
        style = dataclasses.replace(
            series_style(op, str(impl)),
            colour=CURVES[index % len(CURVES)],
            width=1.2,
            label=f"{device}, {impl} measured",
            op="",
        )
        ringed = line["suspect"].notna().to_numpy().nonzero()[0].tolist()
        lines.append(Line(x=line["chunk_size"].tolist(), y=line["time_ms"].tolist(), style=style, ringed=ringed))
    return lines
