"""What a sweep compiles ahead: the shortest and the longest case, and one for each choice of launches."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lrbench.bench.drive import compile_ahead, run
from lrbench.bench.drive.compile_ahead import compile_cases
from lrbench.bench.drive.executors import Outcomes, Queue, alone, as_taken
from lrbench.bench.plan import PlannedCase, Request, plan
from lrbench.bench.worker.protocol import RunLimits
from lrbench.tests.bench import runs
from lrbench.tests.bench.runs import H200, Instant, Silent


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def test_compile_ahead_takes_two_lengths_of_ours_and_every_shape_of_theirs() -> None:
    planned = plan(Request(preset="default"), device_kind="cuda")
    chosen = compile_cases(planned)
    ours = [item.case for item in chosen if item.case.impl == "fused_chunk"]
    # 2 operations x 2 modes x 4 head dims x (5 chunk lengths + 4 of its own choice), at the shortest sequence length of
    # each and, behind all of those, at the longest.
    first, further = ours[: 2 * 2 * 4 * (5 + 4)], ours[2 * 2 * 4 * (5 + 4) :]
    assert len({dataclasses.replace(case, batch=0, seq_len=0) for case in first}) == len(first)
    given = [case for case in further if case.chunk_size in (64, 128, 256, 512, 1024)]
    assert {case.seq_len for case in given} == {65536}
    assert len({dataclasses.replace(case, batch=0, seq_len=0) for case in given}) == len(given) == 2 * 2 * 4 * 5
    theirs = [item.case for item in chosen if item.case.impl == "mlstm_kernels.xl_chunk"]
    assert len({case.seq_len for case in theirs}) == 7
    assert all("triton" not in item.case.impl for item in chosen)
    assert not any(item.case.impl == "torch" for item in chosen)


def test_compile_ahead_takes_no_case_that_fills_the_memory() -> None:
    """Where the batch is the same at every length, the longest are not what many processes call side by side."""
    planned = plan(Request(kernel="wkv", preset="default", impls=("scan",)), device_kind="cuda")
    chosen = [(item.case.mode, item.case.channels, item.case.seq_len) for item in compile_cases(planned)]
    assert sorted(chosen) == [(m, c, t) for m in ("fw", "fwbw") for c in (768, 2048) for t in (128, 4096)]


def test_compile_ahead_takes_a_case_for_each_choice_of_launches() -> None:
    """Choices of products too large to be called come with the shortest case, once each."""
    axes = Request(kernel="gated-mlp", preset="default", modes=("fw",), impls=("fused",))
    planned = plan(axes, device_kind="cuda")
    without, chosen = compile_cases(planned), compile_cases(planned, "9.0")
    assert chosen[: len(without)] == without
    further = [(i.case.impl, i.case.d_ff, i.case.seq_len, i.config_of) for i in chosen[len(without) :]]
    assert [(*what, large and large.seq_len) for *what, large in further] == [
        ("fused", 28672, 1024, 65536),
        ("fused", 53248, 1024, 16384),
    ]


def test_compile_ahead_takes_no_backward_pass_that_another_case_compiles() -> None:
    axes = Request(kernel="wkv", preset="default", modes=("fwbw", "bw"), seq_lens=(128, 512), channels=(768,))
    chosen = [(i.case.impl, i.case.mode, i.case.seq_len) for i in compile_cases(plan(axes, device_kind="cuda"))]
    assert len(set(chosen)) == len(chosen)
    assert {mode for _, mode, _ in chosen} == {"fwbw"}


def test_little_is_compiled_before_the_first_case_and_all_before_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first case compiles itself; then batches come, and what is compiled is what one pass would compile."""
    planned = plan(Request(preset="default"), device_kind="cuda")
    batches: list[list[PlannedCase]] = []
    compiled: set[object] = {None}
    told: list[tuple[int, int]] = []

    def compile_batch(cases: list[PlannedCase], *_: object) -> None:
        batches.append(list(cases))
        compiled.update(map(compile_ahead._key, cases))

    monkeypatch.setattr(compile_ahead, "compile_ahead", compile_batch)
    compiler = compile_ahead.Compiler(alone(planned), H200, 8, 1, 120.0, lambda *counts: told.append(counts))
    for n, item in enumerate(as_taken(alone(planned))):
        compiler.compile_for(item)
        if n == 0:
            assert not batches
            continue
        if n == 1:
            assert [len(batch) for batch in batches] == [64]
        assert compile_ahead._key(item) in compiled
    ends = itertools.accumulate(map(len, batches))
    assert told == [(len(batch), sum(map(len, batches)) - end) for batch, end in zip(batches, ends, strict=True)]
    tuned_in = [{(item.case.op, item.case.impl) for item in batch if item.autotunes} for batch in batches]
    assert 1 < len(batches) <= 1 + sum(map(len, batches)) // 64 + len(set().union(*tuned_in))
    for batch, tuned in zip(batches, tuned_in, strict=True):
        assert len(tuned) <= 1
        assert len(batch) <= 64 or tuned
    assert sorted(map(str, itertools.chain(*batches))) == sorted(map(str, compile_cases(planned, "9.0")))
    # With several devices nothing is compiled while another times.
    batches.clear()
    compiler = compile_ahead.Compiler(alone(planned), H200, 8, 1, 120.0, lambda *counts: told.append(counts))
    compiler.compile_all()
    compiler.compile_for(planned[-1])
    assert len(batches) == 1


def test_processes_compile_different_kernels_side_by_side_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk lengths and sequence lengths of one kind of case come one after the other."""
    request = Request(preset="quick", impls=("fused_chunk", "whole_state"))
    taken: list[tuple[Any, ...]] = []

    def run(queued: Queue, *_: object) -> Outcomes:
        while group := queued.take():
            (item,) = group
            taken.append((item.case.impl, item.case.mode, item.case.head_dim_v))
            yield group, [{"status": "error" if item is cases_that_fail[0] else "ok"}]

    planned = plan(request, device_kind="cuda")
    cases = compile_cases(planned, "9.0")
    cases_that_fail = cases[3:4]
    compile_ahead.compile_ahead(cases, SimpleNamespace(run=run), H200, 1.0)  # type: ignore[arg-type]
    assert len(taken) == len(cases) == 64
    assert len(set(taken[:8])) == len(set(taken)) == 8
    # What was compiled is not compiled again, until something of it changes.
    assert compile_ahead.uncompiled(planned, H200) == cases_that_fail
    assert len(compile_ahead.uncompiled(planned, dataclasses.replace(H200, triton_version="0"))) == 64
    monkeypatch.setattr(compile_ahead, "_source_digest", lambda: "another")
    assert len(compile_ahead.uncompiled(planned, H200)) == 64


def test_what_finds_too_little_memory_is_called_again_after_the_others() -> None:
    """Until nothing more fits: of five calls on a device for two at a time, one is too large for it alone."""
    rounds: list[list[PlannedCase]] = []

    def run(queued: Queue, limits: RunLimits) -> Outcomes:
        rounds.append([item for (item,) in iter(queued.take, None)])
        room = 2
        for item in rounds[-1]:
            fits = item is not planned[0] and room > 0
            room -= fits
            yield (item,), [{"status": "ok" if fits else "oom", "reason": None, "columns": {}}]

    planned = plan(Request(preset="default", impls=("mlstm_kernels.xl_chunk",)), device_kind="cuda")[:5]
    compile_ahead.compile_ahead(planned, SimpleNamespace(run=run), H200, 1.0)  # type: ignore[arg-type]
    assert [len(each) for each in rounds] == [5, 3, 1]
    left = compile_ahead.uncompiled(planned, H200)
    assert left == planned[:1]


def test_a_sweep_compiles_between_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan(Request(ops=("mlstm_sig",), impls=("fused_chunk",), preset="quick"), device_kind="cuda")
    events: list[str] = []
    started: list[PlannedCase] = []
    monkeypatch.setattr(compile_ahead, "compile_ahead", lambda cases, *_: events.append("compile"))
    monkeypatch.setattr(run, "refuse", lambda *_: None)

    def begin(item: PlannedCase) -> None:
        started.append(item)
        events.append("measure")

    progress = Silent()
    monkeypatch.setattr(progress, "started", begin)
    runs.run(tmp_path, planned, progress, executor=Instant(), environment=H200, jobs=2)
    assert events[:2] == ["measure", "compile"]
    assert 2 <= events.count("compile") < len(planned) == events.count("measure")
    assert [item.case.mode for item in started[:2]] == ["fw", "fwbw"]
    assert sorted(map(str, started)) == sorted(map(str, planned))
