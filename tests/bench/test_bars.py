"""Speed bars: read from a file, measured side by side, the best chunk length of each counts, and a miss is said."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import Mock

import pytest

from lrbench.analysis.accelerators.roofs import RoofRow, stored_roofs
from lrbench.analysis.counts import count_case
from lrbench.analysis.reproduce.entries import DEFAULT
from lrbench.bench.drive import bars, calibrate, compile_ahead, run
from lrbench.bench.drive.bars import COPY, Bar, Entry, judge, judge_overall
from lrbench.bench.drive.complete import unfinished
from lrbench.bench.drive.executors import LocalExecutor, Queue
from lrbench.bench.environment import current_environment
from lrbench.bench.plan import PlannedCase
from lrbench.bench.worker import clock
from lrbench.bench.worker.protocol import RunLimits, decode_request, encode_request
from lrbench.bench.worker.worker import Worker
from lrbench.kernels import mlstm_sig
from lrbench.results import store
from lrbench.results.schema import case_id
from lrbench.results.select import grouped
from lrbench.tests import ROOT
from lrbench.tests.bench.runs import H200, PROCESSOR
from lrbench.tests.command_line import Lrbench, refused
from lrbench.tests.results.test_store import RECORD

TRIAL = (ROOT / "tests/data/bars.toml").read_text()


def entry(impl: str, chunk_size: int, samples_ms: list[float], mode: str = "fw", **columns: Any) -> Entry:
    """Return a measured row of a side; its remark is the row's status and reason."""
    if samples_ms:
        columns |= {"time_samples_ms": samples_ms, "time_ms": median(samples_ms)}
    sizes = {"batch": 1, "seq_len": 64, "num_heads": 2, "head_dim_qk": 16, "head_dim_v": 32, "chunk_size": chunk_size}
    columns = {"time_samples_ms": None, "time_ms": None, "input_bytes": 0, **sizes, **columns}
    record = dataclasses.replace(RECORD, impl=impl, mode=mode, dtype="fp32", **columns)
    record = dataclasses.replace(record, case_id=case_id(dataclasses.asdict(record)))
    return record, "" if record.status == "ok" else f"{record.status}: {record.reason}"


def bar(folder: Path, claim: str, ratio: float) -> Bar:
    """Return a bar of the trial's problem, ``claim`` and that ratio asked for."""
    head, _ = TRIAL.split("claims = [")
    (found,) = trial(folder, f"{head}claims = [{{ {claim}, at_least = {ratio} }}]")
    return found


AHEAD = 'ratio = ["parallel", "torch"]'


@pytest.mark.parametrize(("theirs_ms", "outcome"), [(3.0, "held"), (2.9, "missed")])
def test_best_chunk_lengths_are_compared(theirs_ms: float, outcome: str, tmp_path: Path) -> None:
    measured = [
        entry("torch", 32, [9.0] * 8),
        entry("torch", 128, [2.0] * 8),
        entry("torch", 64, [0.1] * 8, mode="fwbw"),
        entry("parallel", 64, [theirs_ms] * 8),
        entry("parallel", 128, [8.0] * 8),
    ]
    row = judge(bar(tmp_path, AHEAD, 1.5), measured)
    assert (row["ours"], row["theirs"]) == ("torch (128) 2 ms", f"parallel (64) {theirs_ms:.3g} ms")
    assert row["ratio"] == row["ci_low"] == row["ci_high"] == pytest.approx(theirs_ms / 2)
    assert row["outcome"] == outcome


def test_memory_is_that_of_our_fastest_and_of_the_chunk_named(tmp_path: Path) -> None:
    measured = [
        entry("torch", 32, [9.0] * 8, peak_memory_bytes=1),
        entry("torch", 64, [2.0] * 8, peak_memory_bytes=200),
        entry("parallel", 64, [8.0] * 8, peak_memory_bytes=300),
        entry("parallel", 128, [1.0] * 8, peak_memory_bytes=900),
    ]
    verdict = judge(bar(tmp_path, 'ratio = ["parallel-64", "torch"], metric = "allocated"', 1.0), measured)
    assert (verdict["ratio"], verdict["outcome"], verdict["ci_low"]) == (pytest.approx(1.5), "held", None)


def test_a_share_of_the_copy_is_that_of_the_compulsory_bytes(tmp_path: Path) -> None:
    ours = entry("torch", 64, [1.25] * 8)
    count = count_case("mlstm_sig", "torch", "fw", "fp32", None, ours[0].sizes)
    assert count is not None
    a_millisecond = bars.COPIED_BYTES / count.compulsory_bytes
    verdict = judge(bar(tmp_path, 'ratio = ["copy", "torch"]', 0.8), [ours], copies_ms=[a_millisecond] * 8)
    assert verdict["ratio"] == pytest.approx(0.8)
    assert verdict["theirs"] == "copy 1 ms"


def test_a_peer_whose_numbers_are_off_is_compared(tmp_path: Path) -> None:
    off = entry("parallel", 64, [2.0] * 8, status="incorrect", reason="off")
    assert judge(bar(tmp_path, AHEAD, 1.5), [entry("torch", 64, [1.0] * 8), off])["ratio"] == 2.0


def test_the_geometric_mean_is_over_all_problems(tmp_path: Path) -> None:
    problems = [[entry("torch", 64, [1.0] * 8), entry("parallel", 64, [ms] * 8)] for ms in (1.0, 4.0)]
    for asked, outcome in ((2.0, "held"), (2.1, "missed")):
        own = bar(tmp_path, f"{AHEAD}, overall = {asked}", 1.5)
        mean = judge_overall(own, [judge(own, measured) for measured in problems])
        assert (mean["ratio"], mean["ci_low"], mean["outcome"]) == (pytest.approx(2.0), pytest.approx(2.0), outcome)
    mean = judge_overall(own, [judge(own, measured) for measured in (*problems, problems[0][:1])])
    assert (mean["outcome"], mean["ours"]) == ("not measured", "1 of 3 problems could not be compared")


def test_the_regret_of_a_default_is_against_the_fastest_of_all_sides(tmp_path: Path) -> None:
    own = bar(tmp_path, 'ratio = ["best", "default"], overall = 0.9', 0.9)
    others = [
        entry("torch", 64, [3.0] * 8), entry("parallel", 32, [2.0] * 8), entry("parallel", 32, [0.1] * 8, mode="fwbw"),
    ]  # fmt: skip
    verdicts = [judge(own, [entry(DEFAULT, 0, [ms] * 8), *others]) for ms in (1.0, 2.5, 2.2)]
    assert [verdict["regret"] for verdict in verdicts] == pytest.approx([0.0, 0.25, 0.1])
    assert [verdict["outcome"] for verdict in verdicts] == ["held", "missed", "held"]
    assert (verdicts[1]["theirs"], judge(own, others)["outcome"]) == ("parallel (32) 2 ms", "not measured")
    overall = judge_overall(own, verdicts)
    assert (overall["ratio"], overall["outcome"]) == (pytest.approx(2 / 2.2), "held")
    assert overall["ours"] == "median of 3 problems; worst 0.8 at T=64, fp32"


def test_a_default_side_is_what_a_user_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """No implementation and no chunk length is given; beside it stands every chunk length that is feasible."""
    default, *others = bars.planned_cases(bars.select(bars.load_bars(), "default-choice", "T=300, B=1,"), "fw")
    chunks = grouped(others, lambda each: each.case.impl)
    assert {*chunks} == {"whole_state", "fused_chunk"}
    assert all([each.case.chunk_size for each in group] == [64, 128, 256, 512] for group in chunks.values())
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(mlstm_sig, "mlstm_sig", lambda *tensors, **keywords: given.append(keywords))
    ((received,), _) = decode_request(encode_request([default], RunLimits(timeout_s=1.0)))
    Worker("cpu").make_ready(received)
    assert given == [{}]


def test_too_few_samples_leave_no_interval(tmp_path: Path) -> None:
    own = bar(tmp_path, f"{AHEAD}, overall = 1.5", 1.5)
    measured = [entry("torch", 64, [1.0, 1.1, 1.2]), entry("parallel", 64, [2.0, 2.1, 2.2])]
    verdicts = [judge(own, measured)] * 2
    for row in (verdicts[0], judge_overall(own, verdicts)):
        assert (row["ratio"], row["ci_low"], row["ci_high"]) == (pytest.approx(2.1 / 1.1), None, None)


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[object, list[PlannedCase]]]:
    """Make the bars those of the trial, timed in pretence; return what was timed together, each with its worker."""
    timed: list[tuple[object, list[PlannedCase]]] = []

    def in_turn(executor: object, queued: Queue, *_: object) -> Any:
        (planned,) = iter(queued.take, None)
        timed.append((executor, [*planned]))
        columns = {"time_ms": 1.0, "time_samples_ms": [1.0] * 6}
        reply = {"status": "ok", "reason": None, "columns": columns, "page_faults": [0, 28_000, 0]}
        yield planned, [reply for _ in planned]

    declared = trial(tmp_path)
    monkeypatch.setattr(bars, "load_bars", lambda: declared)
    monkeypatch.setattr(LocalExecutor, "run", in_turn)
    monkeypatch.setattr(LocalExecutor, "environment", lambda _: PROCESSOR)
    monkeypatch.setattr(LocalExecutor, "call", lambda *_, **__: clock.Timing(samples_ms=[1.0]).columns())
    monkeypatch.setattr(bars, "_thread_gain", lambda: 2.0)
    return timed


@pytest.mark.parametrize(
    ("gains", "busy"),
    [((1.9, 1.8, 1.7, 1.8), 0), ((1.9, 1.5, 1.9, 1.9), 1), ((1.9, 1.9, 1.9, 1.5), 1), ((1.5,) * 4, 2)],
)
def test_bars_on_a_cpu_are_measured_between_two_looks_at_its_threads(
    gains: tuple[float, ...], busy: int, race: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process of its own for each bar, with that bar's sides alone. What is held is held all the same: the copy's."""
    left = iter(gains)
    monkeypatch.setattr(bars, "_thread_gain", lambda: next(left))
    own, copy, grad = bars.load_bars()
    claim = dataclasses.replace(own.asked.claim, at_least=1e9)
    own = own._replace(asked=own.asked._replace(claim=claim))
    ((entries, verdicts),) = bars.measure_bars([own, copy, grad], rounds=6, output=tmp_path / "out")
    outcomes = [verdict["outcome"] for verdict in verdicts]
    assert outcomes.count("missed, not decidable here") == busy
    assert len({id(session) for session, _ in race}) == 3
    sides = [{item.case.impl for item in planned} for _, planned in race]
    assert sides == [{"torch", "parallel"}, {"torch"}, {"torch", "parallel"}]
    assert {remark for _, remark in entries} == {"0 to 28,000 page faults a call, 0 in the median"}


@pytest.mark.parametrize(("fails_in", "code", "outcomes"), [("fwbw", 1, "hhn"), ("fw", 1, "nnm"), ("", 2, "nnn")])
@pytest.mark.usefixtures("race")
def test_a_side_that_dies_is_named_and_the_other_bars_are_judged(
    fails_in: str, code: int, outcomes: str, lrbench: Lrbench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit code 2 where nothing could be measured, 1 where a bar was missed or has no ratio."""
    died = {"status": "crash", "reason": "the process was ended by SIGKILL", "columns": {}}
    in_turn = LocalExecutor.run

    def dies(*arguments: Any) -> Any:
        for group, replies in in_turn(*arguments):
            dead = fails_in in ("", group[0].case.mode)
            yield group, [died if dead else reply for reply in replies]

    monkeypatch.setattr(LocalExecutor, "run", dies)
    found, out, err = lrbench("bars trial --format csv", "--output", tmp_path / "out")
    assert found == code, err
    assert "".join(line.rpartition(",")[2][0] for line in out.splitlines()[1:]) == outcomes
    assert "torch: crash: the process was ended by SIGKILL" in out


def test_two_threads_are_measured_in_a_process_of_its_own() -> None:
    gain = bars._thread_gain()
    assert math.isfinite(gain) and gain > 0


def trial(folder: Path, text: str = TRIAL) -> list[Bar]:
    folder.mkdir(exist_ok=True)
    (folder / "bars.toml").write_text(text)
    return bars.load_bars(folder / "bars.toml")


def test_without_a_gpu_bars_that_need_one_are_refused_before_any_is_measured(
    tmp_path: Path, lrbench: Lrbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "without_gpu", lambda: PROCESSOR)
    families = "tfla, default-choice, lightning, rglru, gated-mlp, wkv, delta"
    assert f"the bars {families} need an NVIDIA GPU, and none" in refused(lrbench, "bars", "--output", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_problem_is_checked_measured_kept_and_judged(
    tmp_path: Path, lrbench: Lrbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command on the CPU: every side, mode and chunk length is a row in the file, and a missed bar fails it."""
    monkeypatch.setattr(bars, "COPIED_BYTES", 2**20)
    declared = trial(tmp_path / "in")
    longer = trial(tmp_path / "in", TRIAL.replace("seq_len = [64]", "seq_len = [64, 128]"))
    monkeypatch.setattr(bars, "load_bars", lambda: declared)
    monkeypatch.setattr(bars, "_thread_gain", lambda: 2.0)
    code, out, err = lrbench("bars trial --rounds 6 --format csv", "--output", tmp_path)
    assert code == 1, err
    assert [line.rpartition(",")[2] for line in out.splitlines()[1:]] == ["held", "held", "missed"]
    (file,) = store.files_in(tmp_path)
    # Beside them, and never taken for results: the copies from which the share of the copy rate follows.
    of_copies = tmp_path / store.OTHER / f"{file.stem}.copies.parquet"
    copies = store.read_file(of_copies, RoofRow).to_pylist()
    found = [(row["quantity"], row["beside"], len(row["time_samples_ms"])) for row in copies]
    assert found == [("copy", "T=64, fp32", calibrate.COPY_SAMPLES)] * 2
    assert not stored_roofs([of_copies]), "copies alone are no calibration"
    assert all(row["rate"] == pytest.approx(1e3 * 2**20 / row["time_ms"]) for row in copies)
    assert {row["run_id"] for row in copies} == set(store.read_results([file])["run_id"].to_pylist())
    rows = store.read_results([file]).to_pylist()
    found = sorted((row["impl"], row["mode"], row["chunk_size"] or 0) for row in rows)
    assert found == sorted(
        [
            *(("parallel", mode, 0) for mode in ("fw", "fwbw")),
            *(("torch", mode, chunk_size) for mode in ("fw", "fw", "fwbw") for chunk_size in (16, 32)),
        ]
    )
    assert all(row["status"] == "ok" and len(row["time_samples_ms"]) == 6 for row in rows)
    # What a run has in full is finished, at its commit; what another one plans is not, and waits where time is out.
    here = current_environment()
    assert unfinished(declared, tmp_path, here) == []
    assert unfinished(declared, tmp_path, dataclasses.replace(here, git_commit="c" * 40)) == declared
    assert {each.label for each in unfinished(longer, tmp_path, here)} == {"T=128, fp32"}
    assert list(bars.measure_bars(longer, rounds=6, output=tmp_path / "late", time_limit_s=0)) == []


def test_a_family_a_problem_or_a_bar_is_chosen() -> None:
    declared = bars.load_bars()
    assert bars.select(declared, None) == declared
    wkv = bars.select(declared, "wkv")
    assert wkv == [each for each in declared if each.family == "wkv"]
    assert len({each.problem for each in bars.select(declared, "gated-mlp", "65536")}) == 3
    whole = bars.select(declared, "tfla/16 heads x 128/256, T=8192, B=8, bf16")
    name = "tfla/16 heads x 128/256, T=8192, B=8, bf16/fwbw/fused_chunk/mlstm_kernels.xl_chunk_siging/memory"
    (single,) = bars.select(declared, name)
    assert (len(whole), {each.mode for each in whole}) == (8, {"fw", "fwbw"})
    assert (single, single.mode) == (whole[-1], "fwbw")
    for name, families in (("rglru_layer", {"rglru"}), ("mlstm_exp", {"tfla-cpu", "tfla", "default-choice"})):
        chosen = bars.select(declared, name)
        assert ({each.family for each in chosen}, {each.shared["op"] for each in chosen}) == (families, {name})
    peer = bars.select(declared, "mlstm_kernels.limit_chunk")
    assert [(each.family, each.mode) for each in peer] == [("tfla", "fw"), ("tfla", "fwbw")]
    cases = bars.planned_cases(peer)
    assert {"whole_state", "mlstm_kernels.limit_chunk"} == {each.case.impl for each in cases}
    # The best of all sides needs the others.
    best = bars.planned_cases(bars.select(declared, "default-choice/4 heads x 64/64, T=100, B=1, bf16/fw/default/best"))
    assert {(each.case.impl, each.case.mode) for each in best} == {
        (impl, "fw") for impl in (DEFAULT, "whole_state", "fused_chunk")
    }
    with pytest.raises(ValueError, match=r"NAME must be tfla-cpu, .*, an operation, an implementation, or .*, got 'x'"):
        bars.select(declared, "x")
    with pytest.raises(ValueError, match="got 'tfla' with 'T=7,' in a label"):
        bars.select(declared, "tfla", "T=7,")
    assert [row["name"] for row in bars.brief_rows(declared)] == [*dict.fromkeys(each.family for each in declared)]
    assert {row["name"] for row in bars.brief_rows(wkv)} == {each.problem for each in wkv}
    listed = [row["name"] for row in bars.list_rows(declared)]
    assert len(set(listed)) == len(listed) == 307
    assert all([row["name"] for row in bars.list_rows(bars.select(declared, name))] == [name] for name in listed[::7])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('op = "mlstm_sig", ', "", r"trial.entries.short.claims 1, side parallel: op must be one of"),
        ("[16, 32]", '[16, "best"]', r"side torch: chunk_sizes must be 'every' or a list, each an integer or 'own'"),
        ("{seq_len}", "{tokens}", r"short.where must name sizes of the problem in braces, got 'tokens'"),
        ('device = "cpu"', 'device = "h2000"', "trial.accelerator must be one of"),
        ('{ impl = "parallel" }', '{ impl = "parallel", options = 1 }', r"parallel: options must be a text, got 1"),
        ('{ impl = "parallel" }', '{ impl = ["parallel"] }', r"sides.parallel.impl must be one value"),
        ("at_least = 1e6", "at_most = 1e6", r"claims 3 must be a ratio of two sides with at_least, or beside"),
    ],
)
def test_what_does_not_fit_a_file_of_bars_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in TRIAL
    with pytest.raises(ValueError, match=message):
        trial(tmp_path, TRIAL.replace(old, new))


@pytest.mark.parametrize(
    ("name", "only", "providers"),
    [
        ("tfla", "16 heads x 128/256, T=8192, B=8", {"lrbench", "mlstm_kernels", "fla"}),
        ("default-choice", "4 heads x 64/64", {"lrbench"}),
    ],
)
def test_problems_are_compiled_before_any_is_timed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
    only: str,
    providers: set[str],
) -> None:
    """Ours and the outside packages', whose kernels may be made for each length."""
    found: list[PlannedCase] = []
    here = dataclasses.replace(H200, device_name="NVIDIA H100", device_accelerator="h100_sxm", triton_version="3.8.0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(run, "version_of", lambda distribution: "3.8.0")
    monkeypatch.setattr(run, "installed_versions", lambda: {"triton": "3.8.0"})
    monkeypatch.setattr(bars, "without_gpu", lambda: None)
    monkeypatch.setattr(bars, "probe_environment", lambda: here)
    monkeypatch.setattr(bars, "hold_gpus", nullcontext)
    monkeypatch.setattr(compile_ahead, "compile_ahead", lambda cases, *_: found.extend(cases))
    monkeypatch.setattr(bars, "_executor", Mock(side_effect=RuntimeError("timed")))
    chosen = bars.select(bars.load_bars(), name, only)
    with pytest.raises(RuntimeError, match="timed"):
        list(bars.measure_bars(chosen, rounds=None, output=tmp_path / "out"))
    assert "these bars were set on h200_sxm: on NVIDIA H100 " in capsys.readouterr().err
    assert {item.case.provider for item in found} == providers
    compiled = {(i.case.op, i.case.impl, i.case.chunk_size, i.case.dtype, i.case.num_heads) for i in found}
    for item in run.separate(bars.planned_cases(chosen, "fwbw"), here)[0]:
        case = item.case
        assert (case.op, case.impl, case.chunk_size, case.dtype, case.num_heads) in compiled


@pytest.mark.parametrize("problem", grouped(bars.load_bars(), lambda each: each.problem).values(), ids=str)
def test_every_side_is_declared_and_every_share_counted(problem: list[Bar]) -> None:
    for each in problem:
        planned = bars.planned_cases([each])
        for item in planned:
            assert each.device_kind in item.target.devices
            case = item.case
            sizes = {**case.sizes, "chunk_size": case.chunk_size}
            assert item.target.why_unsupported(case.mode, case.dtype, case.state_dtype, sizes) is None
        if COPY in each.impls:
            (ours,) = (item.case for item in planned)
            count = count_case(ours.op, ours.impl, ours.mode, ours.dtype, ours.state_dtype, ours.sizes)
            assert count is not None and count.compulsory_bytes > 0
