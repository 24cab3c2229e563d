"""What the report's notebook calls: one method a section, each returns HTML that Jupyter shows."""

from __future__ import annotations

import base64
import functools
import gzip
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...results.select import is_ok, ok_rows
from ..derive import DERIVED, gradient_twice
from ..figures.selection import MODE_TITLES
from ..figures.style import new_figure, operation_label
from ..model.runtime_model import cached
from . import chunks, figures, speedups, summary
from .markup import ABSENT, Cell, Html, TableRow, join, number, numeric, paragraph, picture, render, size, table
from .subject import Subject, known, load_subjects, name_cell, other_subjects

if TYPE_CHECKING:
    import pandas as pd

MAX_EMBEDDED_BYTES = 24 * 2**20
"""More packed CSV than this is not put into the page: browsers refuse or crawl."""

FINDINGS = 5
"""Sentences that a report opens with."""

GIB = 2**30

SPANS = {"clock (MHz)": "sm_clock_mhz", "sustained power (W)": "sustained_power_w", "temperature (°C)": "temperature_c"}
HOST = "host (ms)"
"""Column of the table of results, where a row was measured with it."""


def per_family(needs: str | None = None) -> Callable[[Callable[[Report], Html]], Callable[[Report], Html]]:
    """Let a section of a report on several families show them one after the other, each under its name.

    Args:
        needs: a column; families without it are left out where another one has it.
    """

    def decorate(section: Callable[[Report], Html]) -> Callable[[Report], Html]:
        @functools.wraps(section)
        def of_each(report: Report) -> Html:
            if not report.parts:
                found = section(report)
                return found if found.text else paragraph("Nothing was timed, so there is nothing to draw.")
            having = [part for part in report.parts if needs is not None and part.has(needs)] or report.parts
            return join(*(render("family", part.subject.family, of_each(part)) for part in having))

        return of_each

    return decorate


@dataclass(frozen=True)
class Report:
    """A report on some results; a section is a method.

    Attributes:
        subject: all rows.
        parts: reports on one family of kernels each, where the rows are of several.
    """

    subject: Subject
    parts: tuple[Report, ...] = ()

    @classmethod
    def load(cls, results: Sequence[str | Path], gpu: str) -> Report:
        """Load results; ``gpu`` is the accelerator that the report is about. ValueError on bad input."""
        whole, *found = load_subjects(results, gpu)
        return cls(subject=whole, parts=tuple(cls(subject=each) for each in found))

    def has(self, column: str) -> bool:
        """Return whether a measured row has the column."""
        return bool(ok_rows(self.subject.rows)[column].notna().any())

    @functools.cached_property
    def speedups_found(self) -> list[speedups.Speedup]:
        """Our kernels beside every baseline."""
        if self.parts:
            return [each for part in self.parts for each in part.speedups_found]
        return speedups.speedups(self.subject)

    @functools.cached_property
    def families(self) -> tuple[Report, ...]:
        """Reports on one family each: the parts, or this one."""
        return self.parts or (self,)

    def begin(self, beside: Callable[[Callable[[], Any]], Callable[[], Any]]) -> Callable[[], None]:
        """Begin half of what takes longest beside what this process does next, and return what makes the rest.

        Args:
            beside: begins to make something, and returns what waits for it.
        """
        # What both halves would do otherwise: matplotlib is imported.
        picture(new_figure(1, 1))
        here, there = self.families[::2], self.families[1::2]
        wait = beside(lambda: (self.chunk_lengths, [each.drawn for each in there]))

        def finish() -> None:
            for each in here:
                _ = each.drawn
            vars(self)["chunk_lengths"], drawn = wait()
            for each, made in zip(there, drawn, strict=True):
                vars(each)["drawn"] = made

        return finish

    @functools.cached_property
    def drawn(self) -> figures.Drawn:
        """The figures of one family."""
        return figures.drawn(self.subject, chunked=self.has("chunk_size"))

    def title(self) -> Html:
        """Return the heading: which families, on which device, what was run and from which results."""
        made = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
        heading, facts = summary.heading(self.subject), summary.facts(self.subject, self.speedups_found)
        return render("title", heading, facts, self.subject.results, __version__, made)

    def opening(self) -> Html:
        """Return what the rows say in five sentences, and one figure."""
        drawn = [each.drawn for each in self.families]
        said = itertools.chain(*itertools.zip_longest(*(each.findings for each in drawn)))
        return render("opening", [*itertools.islice(filter(None, said), FINDINGS)], drawn[0].first)

    def peers(self) -> Html:
        """Return our kernels beside every peer, at one sequence length."""
        rows = [row for each in self.families for row in speedups.peer_rows(each.subject, each.speedups_found)]
        if not rows:
            return paragraph("No baseline was timed on a problem of ours, so there is nothing to compare.")
        subjects = (each.subject for each in self.families)
        named = ((f"{each.family}{each.family and ': '}", each) for each in subjects)
        at = "; ".join(f"{name}{s.at(s.seq_len)}, {s.setting()}" for name, s in named if s.seq_len is not None)
        return join(render("small", f"{at}."), table(f"Their time over ours, {self.subject.device_name}", rows))

    @per_family()
    def results(self) -> Html:
        """Return every implementation at its fastest chunk size, at the report's sequence length."""
        subject = self.subject
        length = subject.seq_len
        if length is None:
            return paragraph("Nothing was timed.")
        rows = []
        for mode in subject.modes:
            best = subject.best(mode)
            at = subject.beside_committed(best[best["seq_len"] == length].sort_values("time_ms"))
            rows += [_result(*each, mode) for each in zip(at.itertuples(index=False), gradient_twice(at), strict=True)]
        if not rows:
            return paragraph(f"Nothing was timed at {subject.at(length)}.")
        if not self.has("host_ms"):
            rows = [{name: cell for name, cell in row.items() if name != HOST} for row in rows]
        caption = f"{subject.at(length)}, {subject.setting()}, {subject.device_name}"
        return render("results", self.has("chunk_size"), table(caption, rows))

    @per_family()
    def figures(self) -> Html:
        """Return the figures, and the modelled time where the accelerator was not measured."""
        return join(self.drawn.every, self._modelled())

    def optimal_chunks(self) -> Html:
        """Return the best chunk lengths, modelled and measured, and what the modelled ones cost."""
        return self.chunk_lengths

    @functools.cached_property
    @per_family(needs="chunk_size")
    def chunk_lengths(self) -> Html:
        """The section of :meth:`optimal_chunks`."""
        subject, found = self.subject, chunks.choices(self.subject)
        if not found:
            return paragraph("No problem was timed at two chunk lengths, so there is no best one to tell.")
        at = [each for each in found if each.row.seq_len == subject.seq_len]
        return render(
            "chunks",
            modelled=any(each.model for each in found),
            unmodelled=sorted({operation_label(each.row.op) for each in found if not each.model}),
            elsewhere="" if subject.on_target else subject.accelerator.name,
            here=chunks.choice_table(subject, at) if at else "",
            all=chunks.choice_table(subject, found) if len(at) < len(found) else "",
            count=len(found),
        )

    @per_family()
    def speedups(self) -> Html:
        """Return how many times as fast as each baseline."""
        found = self.speedups_found
        if not found:
            return paragraph("No baseline was timed on a problem of ours, so there is nothing to compare.")
        chunked = any(known(side.chunk_size) is not None for each in found for side in (each.ours, each.theirs))
        return render("speedups", chunked, speedups.speedup_table(self.subject, found))

    def failures(self) -> Html:
        """Return the cases that failed, and why; those that an implementation does not take are in a fold."""
        failed, limits = summary.failed_of(self.subject)
        shown = summary.failure_table("Cases that failed", failed) if len(failed) else paragraph("No case failed.")
        if limits.empty:
            return shown
        caption = f"{len(limits):,} cases that were not tried"
        return join(shown, render("details", caption, summary.failure_table(caption, limits)))

    def elsewhere(self) -> Html:
        """Return what was measured on other devices."""
        found = [Report(subject=each) for each in other_subjects(self.subject)]
        if not found:
            return paragraph("Every row is of one device.")
        return join(*(render("family", each.subject.device_name, each.results()) for each in found))

    def environment(self) -> Html:
        """Return where each run was made, and with which versions."""
        rows, facts = self.subject.rows, summary.facts(self.subject, self.speedups_found)
        columns = ["provider", "provider_version"]
        packages = rows[columns].dropna().drop_duplicates().sort_values(columns).itertuples(index=False)
        versions = table("Packages", [{"package": str(name), "version": str(version)} for name, version in packages])
        tables = [each for each in (_runs(rows), versions) if each.text]
        return render("environment", facts, self.subject.accelerator, tables)

    def data(self) -> Html:
        """Return a link that holds the rows as CSV."""
        rows = self.subject.everything.drop(columns=["time_samples_ms", DERIVED])
        # The time of packing would make equal pages differ.
        packed = gzip.compress(rows.to_csv(index=False, float_format="%.9g").encode(), mtime=0)
        uri = f"data:application/gzip;base64,{base64.b64encode(packed).decode()}"
        return render("data", len(rows), len(packed), uri if len(packed) <= MAX_EMBEDDED_BYTES else "")

    def _modelled(self) -> Html:
        """Return the runtime model's time of the accelerator beside the times of the device that was measured."""
        subject = self.subject
        if subject.on_target:
            return Html("")
        best = [row for mode in subject.modes for row in subject.best(mode).itertuples(index=False)]
        rows: list[TableRow] = [
            {
                "implementation": name_cell(row),
                "mode": MODE_TITLES[row.mode],
                "T": size(row.seq_len),
                f"measured on {subject.device_name} (ms)": numeric(row.time_ms),
                f"modelled for {subject.accelerator.name} (ms)": numeric(row.model_time_ms),
            }
            for row in best
            if row.accelerator == subject.accelerator.key and known(row.model_time_ms) is not None
        ]
        return table(f"What the runtime model gives for {subject.accelerator.part}", rows)


def _result(row: Any, twice: bool, mode: str) -> dict[str, str | Cell]:
    interval = ""
    if known(row.time_ci_low_ms) is not None:
        interval = f"{number(row.time_ci_low_ms, 4)} to {number(row.time_ci_high_ms, 4)}"
    notes = {
        row.whose: bool(row.whose),
        "other mathematics": not (row.same_math or row.same_math is None),
        "clocks lowered": isinstance(row.throttled, str),
        "busy machine": isinstance(row.noise, str),
        "bytes from a cache": bool(cached(row.roofline_fraction)),
        "checked smaller": known(row.checked) not in (None, "same shape"),
    }
    return {
        "implementation": name_cell(row),
        "mode": mode,
        "time (ms)": numeric(row.time_ms, detail=interval),
        HOST: numeric(row.host_ms),
        "L": size(row.chunk_size),
        "peak memory (GiB)": numeric(None if twice else row.peak_memory_bytes / GIB),
        "TFLOP/s": numeric(row.tflops),
        "roof (%)": numeric(100 * row.roofline_fraction, 2),
        "relative error": numeric(row.rel_error, 2),
        "note": "; ".join(note for note, holds in notes.items() if holds),
    }


def _runs(rows: pd.DataFrame) -> Html:
    body: list[TableRow] = []
    versions = {"driver": "driver", "CUDA": "cuda", "torch": "torch", "Triton": "triton", "Python": "python",
                "lrbench": "lrbench"}  # fmt: skip
    for run, group in rows.groupby("run_id", sort=False):
        measured, commit = group[is_ok(group)], group["git_commit"].iloc[0]
        dirty = " with uncommitted changes" if group["git_dirty"].fillna(False).astype(bool).any() else ""
        body.append(
            {
                "run": str(run)[:8],
                "from (UTC)": str(group["measured_at"].min())[:16].replace("T", " "),
                "cases": size(len(group)),
                "device": _values(group, "device_name"),
                **{title: _values(group, f"{name}_version") for title, name in versions.items()},
                "commit": f"{commit[:7]}{dirty}" if isinstance(commit, str) else ABSENT,
                **{title: _span(measured[name]) for title, name in SPANS.items()},
                "lowered clocks": size(measured["throttled"].notna().sum()),
            }
        )
    return table("Runs", body)


def _values(rows: pd.DataFrame, column: str) -> str:
    return ", ".join(sorted({str(value) for value in rows[column].dropna()})) or ABSENT


def _span(values: pd.Series) -> str:
    low, high = values.min(), values.max()
    if low != low:
        return ABSENT
    return f"{low:.0f}" if round(low) == round(high) else f"{low:.0f} to {high:.0f}"
