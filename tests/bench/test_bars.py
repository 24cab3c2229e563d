"""Speed bars: sides take turns, the best chunk length of each counts, and a missed bar is said."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from lrbench.bench import bars

BAR = bars.Bar(ours="default", theirs="native_custbw", mode="fw", ratio=1.5)


def entry(side: str, chunk_size: int, samples_ms: list[float], mode: str = "fw") -> bars.Entry:
    return bars.Entry(side=side, chunk_size=chunk_size, mode=mode, call=lambda: None, samples_ms=samples_ms)


@pytest.mark.parametrize(("theirs_ms", "held"), [(3.0, True), (2.9, False)])
def test_best_chunk_lengths_are_compared(theirs_ms: float, held: bool) -> None:
    entries = [
        entry("default", 32, [9.0] * 8),
        entry("default", 64, [2.0] * 8),
        entry("default", 64, [0.1] * 8, mode="fwbw"),
        entry("native_custbw", 64, [theirs_ms] * 8),
        entry("native_custbw", 128, [8.0] * 8),
    ]
    (verdict,) = bars.judge([BAR], entries)
    assert (verdict.ours.chunk_size, verdict.theirs.chunk_size) == (64, 64)
    assert verdict.ratio == pytest.approx(theirs_ms / 2)
    assert verdict.interval.low == pytest.approx(verdict.ratio)
    assert verdict.held is held


def test_sides_take_turns() -> None:
    calls: list[str] = []
    entries = [
        bars.Entry(side=side, chunk_size=16, mode="fw", call=lambda side=side: calls.append(side)) for side in "ab"
    ]
    assert list(bars.measure_interleaved(entries, rounds=2, warmup=1)) == [1, 2]
    assert "".join(calls) in ("abbaab", "baabba")
    assert [len(entry.samples_ms) for entry in entries] == [2, 2]


@pytest.mark.parametrize(("theirs_ms", "code"), [(4.0, 0), (1.0, 1)])
def test_exit_code_says_whether_the_bars_are_held(theirs_ms: float, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(entries: list[bars.Entry], **_: int) -> list[int]:
        for one in entries:
            one.samples_ms.extend([theirs_ms if one.side.startswith("native") else 2.0] * 6)
        return []

    sides = ("default", "normalizer_gradient", "native_autograd", "native_custbw")
    monkeypatch.setattr(
        bars, "cpu_entries", lambda: [entry(side, 64, [], mode) for side in sides for mode in ("fw", "fwbw")]
    )
    monkeypatch.setattr(bars, "measure_interleaved", measured)
    result = CliRunner().invoke(bars.app, ["cpu"])
    assert result.exit_code == code
    assert ("held" if code == 0 else "missed") in result.stdout


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> list[bars.Entry]:
        raise ImportError("No module named 'mlstm_kernels'")

    monkeypatch.setattr(bars, "cpu_entries", missing)
    result = CliRunner().invoke(bars.app, ["cpu"])
    assert result.exit_code == 2
    assert "mlstm_kernels==2.0.6" in result.output
