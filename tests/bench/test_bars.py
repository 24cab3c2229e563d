"""Speed bars: sides take turns, the best chunk length of each counts, and a missed bar is said."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lrbench.analysis.accelerators.roofs import RoofRow, stored_roofs
from lrbench.analysis.counts import count_case
from lrbench.bench.bars import command, gpu, mlstm_cpu
from lrbench.bench.bars.model import COPY, Bar, Setting, Side, Subject
from lrbench.bench.bars.verdicts import Measured, judge, overall
from lrbench.bench.environment import current_environment
from lrbench.results import store

BAR = Bar(ours="default", theirs="native_custbw", mode="fw", ratio=1.5)
SIZES = {"batch": 1, "seq_len": 64, "num_heads": 2, "head_dim_qk": 16, "head_dim_v": 32}
SETTING = Setting(
    label="T=64",
    op="mlstm_sig",
    sizes=SIZES,
    dtype="fp32",
    sides=(Side(impl="torch", chunk_sizes=(16, 32)), Side(impl="parallel", modes=("fw",))),
    bars=(
        Bar(ours="torch", theirs="parallel", mode="fw", ratio=1e-6),
        Bar(ours="torch", theirs="torch", mode="fwbw", ratio=1e6),
        Bar(ours="torch", theirs=COPY, mode="fw", ratio=1e-9),
    ),
)
SUBJECT = Subject(name="trial", kernel="tfla", summary="A trial.", settings=(SETTING,))


def entry(side: str, chunk_size: int, samples_ms: list[float], mode: str = "fw", **options: Any) -> Measured:
    return Measured(side=side, chunk_size=chunk_size, mode=mode, samples_ms=samples_ms, **options)


@pytest.mark.parametrize(("theirs_ms", "held"), [(3.0, True), (2.9, False)])
def test_best_chunk_lengths_are_compared(theirs_ms: float, held: bool) -> None:
    measured = [
        entry("default", 32, [9.0] * 8),
        entry("default", 64, [2.0] * 8),
        entry("default", 64, [0.1] * 8, mode="fwbw"),
        entry("native_custbw", 64, [theirs_ms] * 8),
        entry("native_custbw", 128, [8.0] * 8),
    ]
    (verdict,) = judge([BAR], measured)
    assert verdict.ours == "default (64) 2 ms"
    assert verdict.theirs == f"native_custbw (64) {theirs_ms:.3g} ms"
    assert verdict.ratio == pytest.approx(theirs_ms / 2)
    assert verdict.interval is not None
    assert verdict.interval.low == pytest.approx(verdict.ratio)
    assert verdict.held is held


def test_memory_is_that_of_our_fastest_and_of_the_chunk_named() -> None:
    bar = dataclasses.replace(BAR, quantity="memory", their_chunk_size=128, ratio=1.0)
    measured = [
        entry("default", 32, [9.0] * 8, memory_bytes=1),
        entry("default", 64, [2.0] * 8, memory_bytes=200),
        entry("native_custbw", 64, [1.0] * 8, memory_bytes=900),
        entry("native_custbw", 128, [8.0] * 8, memory_bytes=300),
    ]
    (verdict,) = judge([bar], measured)
    assert verdict.ratio == pytest.approx(1.5)
    assert verdict.held


def test_a_share_of_the_copy_is_that_of_the_compulsory_bytes() -> None:
    bar = Bar(ours="default", theirs=COPY, mode="fw", ratio=0.8)
    copy = Measured(side=COPY, mode="", samples_ms=[4.0] * 8, moved_bytes=2000)
    (verdict,) = judge([bar], [entry("default", 64, [1.25] * 8, moved_bytes=500), copy])
    assert verdict.ratio == pytest.approx(0.8)
    assert verdict.theirs == "copy 1 ms"
    with pytest.raises(ValueError, match="compulsory bytes of default, fw, must be counted"):
        judge([bar], [entry("default", 64, [1.25] * 8), copy])


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ([], "native_custbw: was not measured"),
        ([entry("native_custbw", 64, [], remark="oom: too large")], "native_custbw: oom: too large"),
    ],
)
def test_a_bar_without_its_peer_is_not_held(theirs: list[Measured], words: str) -> None:
    (verdict,) = judge([BAR], [entry("default", 64, [1.0] * 8), *theirs])
    assert (verdict.held, verdict.ratio, verdict.theirs) == (False, None, words)


def test_the_geometric_mean_is_over_all_settings() -> None:
    settings = [[entry("default", 64, [1.0] * 8), entry("native_custbw", 64, [ms] * 8)] for ms in (1.0, 4.0)]
    verdicts = [verdict for measured in settings for verdict in judge([BAR], measured)]
    (mean,) = overall([dataclasses.replace(BAR, ratio=2.0)], verdicts)
    assert mean.ratio == pytest.approx(2.0)
    assert mean.held
    missing = judge([BAR], settings[0][:1])
    (mean,) = overall([BAR], [*verdicts, *missing])
    assert (mean.held, mean.ours) == (False, "1 of 3 settings could not be compared")


def test_sides_take_turns() -> None:
    calls: list[str] = []
    entries = [
        mlstm_cpu.Entry(side=side, chunk_size=16, mode="fw", call=lambda side=side: calls.append(side)) for side in "ab"
    ]
    assert list(mlstm_cpu.measure_interleaved(entries, rounds=2, warmup=1)) == [1, 2]
    # A round of warming up, then each twice in its turn.
    assert "".join(calls) in ("abbbaaaabb", "baaabbbbaa")
    assert [len(entry.samples_ms) for entry in entries] == [2, 2]


def test_a_bar_is_measured_with_its_own_sides_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(bar: Bar) -> list[mlstm_cpu.Entry]:
        return [
            mlstm_cpu.Entry(side=side, chunk_size=16, mode=bar.mode, call=lambda: None)
            for side in (bar.ours, bar.theirs)
        ]

    monkeypatch.setattr(mlstm_cpu, "build_entries", build)
    measured = mlstm_cpu.measure(BAR, rounds=3, warmup=1)
    assert [(m.side, m.mode, len(m.samples_ms)) for m in measured] == [("default", "fw", 3), ("native_custbw", "fw", 3)]
    assert "fw, default beside native_custbw: round 3 of 3" in capsys.readouterr().err


def test_page_faults_stand_beside_times() -> None:
    one = mlstm_cpu.Entry(side="default", chunk_size=16, mode="fw", call=lambda: None, samples_ms=[1.0] * 3)
    one.page_faults.extend([0, 0, 0])
    assert one.measured().remark is None
    one.page_faults[2] = 28_000
    assert one.measured().remark == "0 to 28,000 page faults a call, 0 in the median"


def test_a_bar_is_measured_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put in place of a function here is not there in the other process."""
    monkeypatch.setattr(mlstm_cpu, "build_entries", lambda _: [])
    with pytest.raises(ValueError, match="sides must be those of the bars, got parallel"):
        mlstm_cpu.measure_apart(dataclasses.replace(BAR, theirs="parallel"), rounds=3, warmup=1)


@pytest.mark.parametrize(
    ("gains", "busy"),
    [((1.9, 1.8, 1.7, 1.8, 1.9), 0), ((1.9, 1.5, 1.9, 1.9, 1.9), 2), ((1.9, 1.9, 1.9, 1.9, 1.5), 1), ((1.5,) * 5, 4)],
)
@pytest.mark.parametrize(("theirs_ms", "code"), [(4.0, 0), (1.0, 1)])
def test_exit_code_says_whether_the_bars_are_held(
    theirs_ms: float, code: int, gains: tuple[float, ...], busy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... whatever the machine; where it has no two free cores, a missed bar is marked, with its ratio all the same."""

    def measured(bar: Bar, **_: int) -> list[Measured]:
        times_ms = {bar.ours: 2.0, bar.theirs: theirs_ms}
        return [entry(side, 64, [ms] * 6, mode=bar.mode) for side, ms in times_ms.items()]

    monkeypatch.setattr(mlstm_cpu, "measure_apart", measured)
    left = iter(gains)
    monkeypatch.setattr(mlstm_cpu, "thread_gain", lambda: next(left))
    result = CliRunner().invoke(command.app, ["cpu"])
    assert result.exit_code == code
    assert ("held" if code == 0 else "missed") in result.stdout
    assert f"2 threads reached {', '.join(map(str, gains))} times one, before and after each bar" in result.stdout
    assert ("did not have 2 free cores" in result.stdout) is (busy > 0)
    assert result.stdout.count("missed, not decidable here") == code * busy
    missed = [line for line in result.stdout.splitlines() if "missed" in line and "│" in line]
    assert len(missed) == 4 * code and all(" 0.5 " in line for line in missed)


def test_a_bar_that_dies_is_named_and_those_before_it_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(bar: Bar, **_: int) -> list[Measured]:
        if bar.mode == "fwbw":
            raise BrokenProcessPool
        return [entry(side, 64, [2.0] * 6, mode=bar.mode) for side in (bar.ours, bar.theirs)]

    monkeypatch.setattr(mlstm_cpu, "measure_apart", measured)
    monkeypatch.setattr(mlstm_cpu, "thread_gain", lambda: 2.0)
    result = CliRunner().invoke(command.app, ["cpu"])
    assert result.exit_code == 2
    assert "measured fwbw, normalizer_gradient beside native_autograd died" in result.output
    assert sum("missed" in line for line in result.output.splitlines()) == 1


@pytest.mark.parametrize(("of_two_ms", "gain"), [(5.0, 2.0), (8.0, 1.25)])
def test_two_threads_are_held_against_one(of_two_ms: float, gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are timed with either number of threads, in turn; what torch computed on before is set again."""
    import torch

    counts: list[int] = []

    class Clock:
        def sample(self, call: Callable[[Any], Any], _: object, count: int) -> tuple[list[float], None]:
            call(None)
            counts.append(torch.get_num_threads())
            return [10.0 if counts[-1] == 1 else of_two_ms] * count, None

    before = torch.get_num_threads()
    monkeypatch.setattr(mlstm_cpu, "CpuClock", Clock)
    monkeypatch.setattr(mlstm_cpu, "SPIN_S", 0)
    assert mlstm_cpu.measure_thread_gain(side=16) == pytest.approx(gain)
    assert counts == [1, 2] * mlstm_cpu.GAIN_ROUNDS
    assert torch.get_num_threads() == before


def test_two_threads_are_measured_in_a_process_of_its_own() -> None:
    gain = mlstm_cpu.thread_gain()
    assert math.isfinite(gain) and gain > 0


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> list[Measured]:
        raise ImportError("No module named 'mlstm_kernels'")

    monkeypatch.setattr(mlstm_cpu, "thread_gain", lambda: 2.0)
    monkeypatch.setattr(mlstm_cpu, "measure_apart", missing)
    result = CliRunner().invoke(command.app, ["cpu"])
    assert result.exit_code == 2
    assert "mlstm_kernels==2.0.6" in result.output


def test_a_setting_is_checked_measured_kept_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subject on the CPU: every side, mode and chunk length is a row in the file, and a missed bar fails the run."""
    monkeypatch.setattr(gpu, "COPIED_BYTES", 2**20)
    on_cpu = dataclasses.replace(current_environment(), device_kind="cpu", device_accelerator="cpu")
    monkeypatch.setattr(gpu, "current_environment", lambda: on_cpu)
    measure = gpu.measure
    monkeypatch.setattr(gpu, "measure", lambda *args, **options: measure(*args, device="cpu", **options))
    monkeypatch.setattr(command, "_device_name", lambda: "a processor")
    assert not command.measure_subject(SUBJECT, [SETTING], 6, tmp_path)
    assert command.measure_subject(SUBJECT, [dataclasses.replace(SETTING, bars=SETTING.bars[::2])], 6, tmp_path)
    first, second = sorted(filter(store.holds_results, tmp_path.glob("bars-trial-*.parquet")))
    for file in (first, second):
        # Beside them, and never taken for results: the copies from which the share of the copy rate follows.
        copies = store.read_file(file.with_suffix(".copies.parquet"), RoofRow).to_pylist()
        found = [(row["quantity"], row["beside"], len(row["time_samples_ms"])) for row in copies]
        assert found == [("copy", SETTING.label, gpu.COPY_SAMPLES)] * 2
        assert not stored_roofs([file.with_suffix(".copies.parquet")]), "copies alone are no calibration"
        assert all(row["rate"] == pytest.approx(1e3 * 2**20 / row["time_ms"]) for row in copies)
        assert {row["run_id"] for row in copies} == set(store.read_results([file])["run_id"].to_pylist())
        rows = store.read_results([file]).to_pylist()
        found = sorted((row["impl"], row["mode"], row["chunk_size"] or 0) for row in rows)
        assert found == [
            ("parallel", "fw", 0),
            *(("torch", mode, chunk_size) for mode in ("fw", "fwbw") for chunk_size in (16, 32)),
        ]
        assert all(row["status"] == "ok" and len(row["time_samples_ms"]) == 6 for row in rows)


def test_what_cannot_be_measured_here_is_one_line() -> None:
    result = CliRunner().invoke(command.app, ["gpu", "--only", "T=7"])
    assert result.exit_code == 2
    assert "only must be part of one of these labels: T=8192, B=8; T=65536, B=1; got 'T=7'" in " ".join(
        result.output.split()
    )


@pytest.mark.parametrize("name", command.SUBJECTS)
def test_every_declared_side_exists_and_every_bar_has_its_sides(name: str) -> None:
    subject = command.load_subject(name)
    for setting in subject.settings:
        for mode in setting.modes:
            sides = {item.case.impl for item in gpu.planned_cases(subject, setting, mode)} | {COPY}
            for bar in setting.bars:
                assert bar.mode != mode or {bar.ours, bar.theirs} <= sides
        assert {bar.mode for bar in setting.bars} <= set(setting.modes)
        for bar in setting.bars:
            if bar.theirs == COPY:
                planned = gpu.planned_cases(subject, setting, bar.mode)
                (ours,) = (item.case for item in planned if item.case.impl == bar.ours)
                count = count_case(ours.op, ours.impl, ours.mode, ours.dtype, ours.state_dtype, ours.sizes)
                assert count is not None and count.compulsory_bytes > 0
    shared = {(bar.ours, bar.theirs, bar.mode) for setting in subject.settings for bar in setting.bars}
    assert {(bar.ours, bar.theirs, bar.mode) for bar in subject.overall} <= shared
