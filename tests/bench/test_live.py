"""Measuring in turn, and measuring again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lrbench.analysis.check.compare import compare
from lrbench.bench import live, plan
from lrbench.bench.environment import DeviceState, current_environment
from lrbench.bench.plan import PlannedCase
from lrbench.kernels import get_operation
from lrbench.kernels.spec import Implementation

REQUEST = plan.Request(
    ops=("mlstm_sig",),
    impls=("torch",),
    modes=("fw", "fwbw"),
    seq_lens=(64,),
    head_dims=(32,),
    chunk_sizes=(16,),
    num_heads=1,
    batch=1,
    dtypes=("fp32",),
)

PLANNED = plan.plan(REQUEST, device_kind="cpu")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute on one thread, here and in workers: threads that wait for a busy machine's cores take seconds."""
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def renamed(item: PlannedCase, name: str, call: str | None = None) -> PlannedCase:
    """Return a case of the same code, or of other code, under another name."""
    assert isinstance(item.target, Implementation)
    same = f"{get_operation(item.case.op).call}:{item.target.name}"
    target = dataclasses.replace(item.target, name=name, call=call or item.target.call or same)
    return PlannedCase(case=dataclasses.replace(item.case, impl=name), target=target)


def on_cpu() -> Any:
    return dataclasses.replace(current_environment(), device_kind="cpu", device_accelerator="cpu")


def test_both_sides_are_checked_measured_and_compared() -> None:
    """The same code under two names: every case of both is right, has its samples and memory, and matches."""
    planned = [*PLANNED, *(renamed(item, "twin") for item in PLANNED)]
    records = list(live.side_by_side(planned, on_cpu(), rounds=12))
    assert {(r.impl, r.mode): r.status for r in records} == {
        (impl, mode): "ok" for impl in ("torch", "twin") for mode in ("fw", "fwbw")
    }
    assert all(len(r.time_samples_ms or ()) == 12 and r.peak_memory_bytes and r.checked for r in records)
    rows = [dataclasses.asdict(record) for record in records]
    found = compare([r for r in rows if r["impl"] == "torch"], [r for r in rows if r["impl"] == "twin"])
    assert len(found.pairs) == 2
    assert found.unmatched == ()
    assert {pair.a["peak_memory_bytes"] - pair.b["peak_memory_bytes"] for pair in found.pairs} == {0}


def test_a_side_that_is_wrong_is_a_row_and_the_other_is_measured() -> None:
    broken = renamed(PLANNED[0], "broken", call="kernels.mlstm_sig:missing")
    records = {r.impl: r for r in live.side_by_side([PLANNED[0], broken], on_cpu(), rounds=10)}
    assert records["torch"].status == "ok"
    assert records["broken"].status == "error"
    assert "missing" in (records["broken"].reason or "")


class ScriptedClock:
    """Hands out times instead of taking them, and keeps the order of the calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def sample(self, call: Callable[[Any], Any], prepare: Callable[[], Any], count: int) -> Any:
        name = call(prepare())
        self.calls.append(name)
        throttled = "power" if len(self.calls) == 9 else None
        return [float(len(self.calls))], DeviceState(throttled=throttled)

    def synchronize(self) -> None:
        pass


def contender(name: str) -> live.Contender:
    return live.Contender(item=PLANNED[0], call=lambda _: name, prepare=lambda: None, columns={})


def test_sides_take_turns_forwards_and_backwards() -> None:
    """Neither side always follows the other; throttling in any counted round marks the case."""
    timer = ScriptedClock()
    sides = [contender("a"), contender("b")]
    outcomes = list(live._time(timer, sides, rounds=4))
    rounds = ["".join(timer.calls[n : n + 2]) for n in range(0, len(timer.calls), 2)]
    assert len(rounds) == live.WARMUP_ROUNDS + 4
    assert set(rounds[live.WARMUP_ROUNDS :]) == {"ab", "ba"}
    assert all(first != second for first, second in itertools.pairwise(rounds))
    assert [len(side.samples_ms) for side in sides] == [4, 4]
    assert sorted(str(reply["columns"]["throttled"]) for _, reply in outcomes) == ["None", "power"]


def test_a_side_that_fails_while_timed_drops_out() -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    sides = [contender("a"), live.Contender(item=PLANNED[0], call=fail, prepare=lambda: None, columns={})]
    outcomes = {id(side): reply["status"] for side, reply in live._time(ScriptedClock(), sides, rounds=3)}
    assert outcomes == {id(sides[0]): "ok", id(sides[1]): "oom"}


def test_groups_differ_in_the_implementation_alone() -> None:
    other = renamed(PLANNED[0], "twin")
    without = PlannedCase(case=dataclasses.replace(other.case, state_dtype=None, chunk_size=32), target=other.target)
    assert [len(group) for group in live.groups([*PLANNED, other])] == [2, 1]
    assert [len(group) for group in live.groups([*PLANNED, without])] == [1, 1, 1]
    assert [len(group) for group in live.groups([*PLANNED, without], ("chunk_size",))] == [2, 1]


def test_cases_of_rows_are_planned_again() -> None:
    row = {field.name: getattr(PLANNED[0].case, field.name) for field in dataclasses.fields(PLANNED[0].case)}
    assert live.planned_case(row) == PLANNED[0]
    with pytest.raises(ValueError, match="impl must be one of"):
        live.planned_case({**row, "impl": "gone"})
    peer = {**row, "impl": "mlstm_kernels.native_custbw", "provider": "mlstm_kernels", "op": "mlstm_exp"}
    assert live.planned_case(peer).target.name == "mlstm_kernels.native_custbw"


def test_measures_again_only_where_it_is_the_same_device_and_code() -> None:
    here = dataclasses.replace(on_cpu(), git_commit="a" * 40)
    row = {"device_accelerator": "cpu", "device_name": "x", "git_commit": "aaaaaaa"}
    assert live.why_not_again([row], here) is None
    assert live.why_not_again([{**row, "git_commit": None}], here) is None
    assert live.why_not_again([{**row, "device_accelerator": "h200_sxm"}], here) == (
        "the run is of h200_sxm, this machine is cpu"
    )
    assert "the run is of commit bbb, this checkout is aaa" in str(
        live.why_not_again([{**row, "git_commit": "bbb"}], here)
    )


def test_measures_again_in_workers() -> None:
    row = {field.name: getattr(PLANNED[0].case, field.name) for field in dataclasses.fields(PLANNED[0].case)}
    again = live.measure_again([row], on_cpu(), timeout_s=120, budget_s=0.0)
    assert list(again) == [PLANNED[0].case.case_id]
    measured = again[PLANNED[0].case.case_id]
    assert (measured["status"], measured["mode"]) == ("ok", PLANNED[0].case.mode)
    assert len(measured["time_samples_ms"]) >= 10
