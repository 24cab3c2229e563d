"""Tuning: the launches asked for are tried beside the default's, and what fails says why."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from typer.testing import CliRunner

from lrbench.bench.clock import Call, CpuClock
from lrbench.kernels import FAMILIES, get_operation
from lrbench.tests.tools import tune


@dataclass(frozen=True, kw_only=True)
class Tile:
    rows: int
    warps: int
    registers: int | None = None


@dataclass(frozen=True, kw_only=True)
class Config:
    forward: Tile
    stages: int = 2


CONFIG = Config(forward=Tile(rows=16, warps=4))


def test_alternatives_multiply_and_leave_the_default_first() -> None:
    alternatives = [tune.parse_alternatives(text, CONFIG) for text in ("forward.rows=8,32", "stages=3")]
    tried = tune.candidates(CONFIG, alternatives)
    assert [one.label for one in tried] == ["default", "forward.rows=8 stages=3", "forward.rows=32 stages=3"]
    assert tried[2].config == Config(forward=Tile(rows=32, warps=4), stages=3)
    whole = tune.parse_alternatives("forward=(8,2),(32,8,168)", CONFIG)
    assert whole == ("forward", [Tile(rows=8, warps=2), Tile(rows=32, warps=8, registers=168)])
    assert [one.label for one in tune.candidates(CONFIG, [])] == ["default"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("forward.row=8", r"set must name a field \(rows, warps, registers\), got 'forward.row'"),
        ("stages.x=8", r"set must name a field \(there is none\), got 'stages.x'"),
        ("stages", "set must be PATH=VALUES with values as in Python, got 'stages'"),
        ("stages=two", "set must be PATH=VALUES with values as in Python, got 'stages=two'"),
        ("forward=(1,2,3,4)", r"at most 3 values \(rows, warps, registers\), got \(1, 2, 3, 4\)"),
    ],
)
def test_bad_alternatives_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune.parse_alternatives(text, CONFIG)


def test_wrong_and_failing_launches_are_not_timed() -> None:
    def make(config: int) -> Call:
        if config == 3:
            raise RuntimeError("out of resource: shared memory")
        return Call(call=lambda _: (torch.full((4,), 1.0 + 0.1 * (config == 2)),))

    tried = [tune.Candidate(label=str(n), config=n) for n in range(4)]
    tune.measure(tried, make, CpuClock(), rounds=4, eps=1e-6)
    assert [len(one.samples_ms) for one in tried] == [4, 4, 0, 0]
    assert tried[2].remark == "result 0 differs from the default's by 0.1, relative"
    assert tried[3].remark == "RuntimeError: out of resource: shared memory"
    assert ["median_ms" in row for row in tune.rows(tried, 1.0)] == [True, True, False, False]


def test_launches_of_every_implementation_can_be_varied() -> None:
    sizes = {"batch": 8, "seq_len": 2048, "channels": 1024, "num_heads": 8, "head_dim_qk": 128, "head_dim_v": 128}
    implementations = [impl for op in FAMILIES["rglru"] for impl in get_operation(op).implementations]
    configs = [config for impl in implementations if (config := impl.launches("fw", "bf16", sizes, (9, 0)))]
    assert len(configs) == 7
    for config in configs:
        assert tune.candidates(config, [tune.parse_alternatives("forward=(4,8,64,4,128)", config)])[1].config != config


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rglru", "fused", "--size", "batch=8,seq_len=8k,channels=1k"], "an NVIDIA GPU, and none is here"),
        (["rglru", "fused", "--size", "batch=8,seq_len=8k"], "size must name batch, channels, seq_len, got"),
        (["rglru", "quick", "--size", "batch=8"], "impl must be one of fused"),
        (["rglruu", "fused", "--size", "batch=8"], "op must be one of"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(tune.app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.stderr
