"""What a sweep compiles ahead: the shortest and the longest case, and one for each choice of launches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from lrbench.bench import compile_ahead, run
from lrbench.bench.compile_ahead import compile_cases
from lrbench.bench.executors import Outcomes, Queue
from lrbench.bench.plan import PlannedCase, Request, plan
from lrbench.bench.workers import Limits
from lrbench.tests.bench.environments import PROCESSOR
from lrbench.tests.bench.test_run import Silent


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
    """Batches grow, and are cut where a case needs no more; what is compiled is what one pass would compile."""
    planned = plan(Request(preset="default"), device_kind="cuda")
    batches: list[list[PlannedCase]] = []
    told: list[int] = []
    monkeypatch.setattr(compile_ahead, "compile_ahead", lambda cases, *_: batches.append(list(cases)))
    compiler = compile_ahead.Compiler(planned, "9.0", 8, 120.0, told.append)
    for n, item in enumerate(planned):
        compiler.compile_for(item)
        if n == 0:
            assert [len(batch) for batch in batches] == [8]
        key = compile_ahead._key(item)
        done = [case for batch in batches for case in batch if compile_ahead._key(case) == key]
        assert key is None or done
    assert told == [len(batch) for batch in batches]
    assert len(batches) < 6
    assert sorted(map(str, itertools.chain(*batches))) == sorted(map(str, compile_cases(planned, "9.0")))
    # With several devices nothing is compiled while another times.
    batches.clear()
    compiler = compile_ahead.Compiler(planned, "9.0", 8, 120.0, told.append)
    compiler.compile_all()
    compiler.compile_for(planned[-1])
    assert len(batches) == 1


def test_a_sweep_compiles_between_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan(Request(ops=("mlstm_sig",), impls=("fused_chunk",), preset="quick"), device_kind="cuda")
    events: list[str] = []
    monkeypatch.setattr(compile_ahead, "compile_ahead", lambda cases, *_: events.append("compile"))
    monkeypatch.setattr(run, "refuse", lambda *_: None)

    class Executor:
        def run(self, cases: Queue, limits: Limits, started: Callable[[PlannedCase], None]) -> Outcomes:
            item = cases.take()
            while item is not None:
                started(item)
                events.append("measure")
                yield item, {"status": "ok", "reason": None, "columns": {}}
                item = cases.take(item)

    monkeypatch.setattr(run, "get_executor", lambda *_, **__: Executor())
    environment = dataclasses.replace(PROCESSOR, device_kind="cuda", device_count=1, capability="9.0")
    run.sweep(planned, environment, run.Settings(output=tmp_path, jobs=2), Silent())
    assert events[:2] == ["compile", "measure"]
    assert 2 <= events.count("compile") < len(planned) == events.count("measure")
