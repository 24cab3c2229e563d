"""What the report's notebook calls: one function a section, each returns HTML that Jupyter shows."""

from __future__ import annotations

import base64
import functools
import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from ... import __version__
from ...results.select import is_ok, ok_rows
from ..figures.style import OPERATION_LABELS
from . import chunks, failures, figures, speedups, summary
from .markup import ABSENT, Cell, Html, details, join, number, numeric, paragraph, size, table, terms
from .subject import MODE_TITLES, Subject, load_subjects, name_cell

if TYPE_CHECKING:
    import pandas as pd

MAX_EMBEDDED_BYTES = 24 * 2**20
"""More CSV than this is not put into the page: browsers refuse or crawl."""

GIB = 2**30


@dataclass(frozen=True)
class Report:
    """A report on some results; a section is a method.

    Attributes:
        subject: all rows.
        parts: reports on one family of kernels each, where the rows are of several: sections say one after the other.
    """

    subject: Subject
    parts: tuple[Report, ...] = ()

    @classmethod
    def load(cls, results: Sequence[str | Path], gpu: str) -> Report:
        """Load results; ``gpu`` is the accelerator that the report is about. ValueError on bad input."""
        whole, *found = load_subjects(results, gpu)
        return cls(subject=whole, parts=tuple(cls(subject=each) for each in found))

    def _each(self, section: Callable[[Report], Html], needs: str | None = None) -> Html:
        """Return a section, of several families each one's under its name.

        Args:
            needs: a column without which a family has nothing to say here, where another family has it.
        """
        parts = self.parts
        if needs is not None and self._has(needs):
            parts = tuple(part for part in parts if part._has(needs))
        if not parts:
            return section(self)
        return join(*(join(Html(f"<h3>{html.escape(part.subject.family)}</h3>"), section(part)) for part in parts))

    def _has(self, column: str) -> bool:
        return bool(self.subject.rows[column][is_ok(self.subject.rows)].notna().any())

    @functools.cached_property
    def comparisons(self) -> list[speedups.Comparison]:
        """Our kernels beside every baseline."""
        if self.parts:
            return [each for part in self.parts for each in part.comparisons]
        return speedups.comparisons(self.subject)

    @functools.cached_property
    def choices(self) -> list[chunks.Choice]:
        """The chunk lengths of every problem."""
        if self.parts:
            return [each for part in self.parts for each in part.choices]
        return chunks.choices(self.subject)

    def title(self) -> Html:
        """Return the heading: which operations, on which device, from which results."""
        subject = self.subject
        made = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
        return Html(
            f"<h1>{html.escape(summary.heading(subject))}</h1>"
            f'<p class="made">{html.escape(summary.operations(subject.rows))}. From '
            f"{html.escape(', '.join(subject.results))}; lrbench {__version__}, {made}.</p>"
        )

    def summary(self) -> Html:
        """Return what the rows say, in sentences."""
        if not self.parts:
            return terms(summary.sentences(self.subject, self.comparisons, self.choices))
        return join(
            terms(summary.of_all(self.subject, self.comparisons)),
            self._each(lambda part: terms(summary.of_family(part.subject, part.comparisons, part.choices))),
        )

    def results(self) -> Html:
        """Return every implementation at its fastest chunk size, at the report's sequence length."""
        return self._each(Report._results)

    def _results(self) -> Html:
        subject = self.subject
        length = subject.seq_len
        if length is None:
            return paragraph("Nothing was timed.")
        rows: list[list[str | Cell]] = []
        for mode in subject.modes:
            best = subject.best(mode)
            at = best[best["seq_len"] == length].sort_values("time_ms")
            rows += [_result(row, mode) for row in at.itertuples(index=False)]
        if not rows:
            return paragraph(f"Nothing was timed at {subject.at(length)}.")
        header = [
            "implementation",
            "mode",
            "time (ms)",
            "L",
            "peak memory (GiB)",
            "TFLOP/s",
            "roof (%)",
            "relative error",
            "note",
        ]
        caption = f"{subject.at(length)}, {subject.setting()}, {subject.device_name}"
        chunked = ok_rows(subject.rows)["chunk_size"].notna().any()
        said = f"Each implementation{' at its fastest chunk size L' if chunked else ''}; times are medians with their "
        said += "95 % interval."
        return join(paragraph(said), table(caption, header, rows))

    def runtime(self) -> Html:
        """Return time over sequence length, and the modelled time where the accelerator was not measured."""
        return self._each(Report._runtime)

    def _runtime(self) -> Html:
        drawn = figures.over(
            self.subject, "runtime", "seq_len", "time_ms", x_name=self.subject.axis, y_name="time per call (ms)"
        )
        return self._or_nothing(join(drawn, self._modelled()))

    def memory(self) -> Html:
        """Return peak memory over sequence length."""
        return self._each(Report._memory)

    def _memory(self) -> Html:
        drawn = figures.over(
            self.subject,
            "memory",
            "seq_len",
            "peak_memory_bytes",
            x_name=self.subject.axis,
            y_name="peak memory (GiB)",
            scale=GIB,
        )
        return self._or_nothing(drawn)

    def head_dim(self) -> Html:
        """Return time over head dim, or over channels."""
        return self._each(Report._head_dim, needs="embedding_dim")

    def _head_dim(self) -> Html:
        return self._or_nothing(figures.over_width(self.subject))

    def chunk_size(self) -> Html:
        """Return time over chunk size, and against memory."""
        return self._each(Report._chunk_size, needs="chunk_size")

    def _chunk_size(self) -> Html:
        drawn = figures.over(
            self.subject, "chunk-size", "chunk_size", "time_ms", x_name="chunk size", y_name="time per call (ms)"
        )
        has_chunks = ok_rows(self.subject.rows)["chunk_size"].notna().any()
        return self._or_nothing(join(drawn, figures.trade_off(self.subject) if has_chunks else Html("")))

    def rooflines(self) -> Html:
        """Return the rooflines."""
        return self._each(Report._rooflines)

    def _rooflines(self) -> Html:
        return self._or_nothing(figures.rooflines(self.subject))

    def optimal_chunks(self) -> Html:
        """Return the best chunk lengths, modelled and measured, and what the modelled ones cost."""
        return self._each(Report._optimal_chunks, needs="chunk_size")

    def _optimal_chunks(self) -> Html:
        subject = self.subject
        if not self.choices:
            return paragraph("No problem was timed at two chunk lengths, so there is no best one to tell.")
        length = subject.seq_len
        at = [each for each in self.choices if each.row.seq_len == length]
        parts = []
        if any(each.report is not None for each in self.choices):
            parts.append(paragraph(self._models()))
        if any(each.report is None for each in self.choices):
            names = sorted({OPERATION_LABELS.get(each.row.op, each.row.op) for each in self.choices if not each.report})
            parts.append(paragraph(f"No model chooses for {', '.join(names)}: what stands there is measured."))
        if at:
            parts.append(chunks.choice_table(subject, at))
        if len(at) < len(self.choices):
            parts.append(details(f"All {len(self.choices):,} problems", chunks.choice_table(subject, self.choices)))
        return join(*parts)

    def _models(self) -> str:
        """Return which models choose chunk lengths, in words."""
        subject = self.subject
        said = (
            "Two models choose. Formulation: FLOPs and bytes of the chunkwise form at full rate. Launches, for tfla "
            "where enough rows are there: its grids, serial steps and states, with constants fitted to these rows; "
            "tfla walks a chunk tile by tile and does no more work in a long one. Rows from before they changed are "
            "left aside here."
        )
        if not subject.on_target:
            said += f" The model is that of {subject.accelerator.name}; its choice has no regret on another device."
        return said

    def speedups(self) -> Html:
        """Return how many times as fast as each baseline."""
        return self._each(Report._speedups)

    def _speedups(self) -> Html:
        found = self.comparisons
        if not found:
            return paragraph("No baseline was timed on a problem of ours, so there is nothing to compare.")
        chunked = any(side.chunk_size == side.chunk_size for each in found for side in (each.ours, each.theirs))
        said = (
            f"{'Each side at its fastest chunk size. ' if chunked else ''}Above 1 ours is faster. The interval is the "
            "95 % bootstrap interval of the ratio of medians, from the stored samples of both; it covers the scatter "
            "within a run."
        )
        return join(paragraph(said), speedups.speedup_table(self.subject, found))

    def failures(self) -> Html:
        """Return the cases without a time, and why."""
        groups = failures.failure_groups(self.subject)
        if not groups:
            return paragraph("Every case was timed.")
        return failures.failure_table(groups)

    def environment(self) -> Html:
        """Return where each run was made, and with which versions."""
        subject = self.subject
        differ = summary.differing(subject.rows)
        said = (
            "All rows have the same versions."
            if not differ
            else (f"Versions that differ between rows: {', '.join(name.removesuffix('_version') for name in differ)}.")
        )
        roofs = subject.accelerator.measured
        calibration = "" if roofs is None else f"Measured roofs of {subject.accelerator.name}: {roofs.source}."
        return join(
            paragraph(said),
            paragraph(f"Specified rates of {subject.accelerator.part}: {subject.accelerator.source}."),
            paragraph(calibration),
            _runs(subject.rows),
            _providers(subject.rows),
        )

    def data(self) -> Html:
        """Return a link that holds the rows as CSV."""
        rows = self.subject.everything.drop(columns="time_samples_ms")
        text = rows.to_csv(index=False).encode()
        size = f"{len(rows):,} rows, {len(text) / 2**20:.1f} MiB"
        if len(text) > MAX_EMBEDDED_BYTES:
            return paragraph(f"The rows ({size}) are too many to lie in this page; they are in the results it names.")
        uri = f"data:text/csv;charset=utf-8;base64,{base64.b64encode(text).decode()}"
        return Html(
            f'<p><a class="download" download="lrbench-rows.csv" href="{uri}">Download the rows as CSV</a> ({size}): '
            f"the newest row of every case, every column but the single samples.</p>"
        )

    def _or_nothing(self, drawn: Html) -> Html:
        return drawn if drawn.text.strip() else paragraph("Nothing was timed, so there is nothing to draw.")

    def _modelled(self) -> Html:
        """Return the runtime model's time of the accelerator beside the times of the device that was measured."""
        subject = self.subject
        if subject.on_target:
            return Html("")
        rows: list[list[str | Cell]] = []
        for mode in subject.modes:
            best = subject.best(mode)
            best = best[(best["accelerator"] == subject.accelerator.key) & best["model_time_ms"].notna()]
            rows += [
                [
                    name_cell(row),
                    MODE_TITLES[mode],
                    size(row.seq_len),
                    numeric(row.time_ms),
                    numeric(row.model_time_ms),
                ]
                for row in best.itertuples(index=False)
            ]
        if not rows:
            return Html("")
        header = [
            "implementation",
            "mode",
            "T",
            f"measured on {subject.device_name} (ms)",
            f"modelled for {subject.accelerator.name} (ms)",
        ]
        return table(f"What the runtime model gives for {subject.accelerator.part}", header, rows)


def _result(row, mode: str) -> list[str | Cell]:  # type: ignore[no-untyped-def]
    interval = ""
    if row.time_ci_low_ms == row.time_ci_low_ms:
        interval = f"{number(row.time_ci_low_ms, 4)} to {number(row.time_ci_high_ms, 4)}"
    notes = [] if row.same_math or row.same_math is None else ["other mathematics"]
    notes += ["clocks lowered"] if isinstance(row.throttled, str) else []
    notes += [] if row.checked in (None, "same shape", "exempt") or row.checked != row.checked else ["checked smaller"]
    return [
        name_cell(row),
        mode,
        numeric(row.time_ms, detail=interval),
        size(row.chunk_size),
        numeric(row.peak_memory_bytes / GIB),
        numeric(row.tflops),
        numeric(100 * row.roofline_fraction, 2),
        numeric(row.rel_error, 2),
        "; ".join(notes),
    ]


def _runs(rows: pd.DataFrame) -> Html:
    body: list[list[str | Cell]] = []
    for run, group in rows.groupby("run_id", sort=False):
        measured = ok_rows(group)
        first = group.iloc[0]
        dirty = " with uncommitted changes" if group["git_dirty"].fillna(False).astype(bool).any() else ""
        body.append(
            [
                str(run)[:8],
                str(group["measured_at"].min())[:16].replace("T", " "),
                size(len(group)),
                _values(group, "device_name"),
                *(
                    _values(group, f"{name}_version")
                    for name in ("driver", "cuda", "torch", "triton", "python", "lrbench")
                ),
                f"{str(first['git_commit'])[:7]}{dirty}" if isinstance(first["git_commit"], str) else ABSENT,
                _span(measured["sm_clock_mhz"]),
                _span(measured["power_w"]),
                _span(measured["temperature_c"]),
                size(measured["throttled"].notna().sum()),
            ]
        )
    header = [
        "run", "from (UTC)", "cases", "device", "driver", "CUDA", "torch", "Triton", "Python", "lrbench", "commit",
        "clock (MHz)", "power (W)", "temperature (°C)", "lowered clocks",
    ]  # fmt: skip
    return table("Runs", header, body)


def _providers(rows: pd.DataFrame) -> Html:
    known = (
        rows[["provider", "provider_version"]].dropna().drop_duplicates().sort_values(["provider", "provider_version"])
    )
    if known.empty:
        return Html("")
    return table("Packages", ["package", "version"], [[str(p), str(v)] for p, v in known.itertuples(index=False)])


def _values(rows: pd.DataFrame, column: str) -> str:
    return ", ".join(sorted({str(value) for value in rows[column].dropna()})) or ABSENT


def _span(values: pd.Series) -> str:
    low, high = values.min(), values.max()
    if low != low:
        return ABSENT
    return f"{low:.0f}" if round(low) == round(high) else f"{low:.0f} to {high:.0f}"
