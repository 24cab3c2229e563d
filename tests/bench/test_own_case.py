"""A case of a user's own: `lrbench time` in a worker and measure() in this process, beside the suite's cases."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lrbench import measure
from lrbench.analysis.counts import count_case
from lrbench.analysis.derive import derive_file
from lrbench.bench.drive.calibrate import FORMS, measure_roofs
from lrbench.bench.drive.own_case import draw, look
from lrbench.bench.environment import current_environment
from lrbench.bench.plan import PlannedCase
from lrbench.bench.worker.protocol import RunLimits
from lrbench.bench.worker.worker import Worker
from lrbench.kernels.simple_gla import OPERATION, simple_gla
from lrbench.results.schema import Case
from lrbench.results.select import load_results, load_rows
from lrbench.tests.command_line import Lrbench, Run, refused, run_python

MINE = """
import os
import time

import torch

def product(x, w, bias=0):
    return torch.relu(x @ w + bias)

def raises(x):
    return x @ torch.ones(3)

def hangs(x):
    time.sleep(600)

def dies(x):
    os._exit(7)

def too_large(x):
    return torch.empty(2**60)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_to_time.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def exact(x: torch.Tensor, w: torch.Tensor, bias: float = 0) -> torch.Tensor:
    return torch.relu(x.double() @ w.double() + bias).to(x.dtype)


def test_the_command_and_the_function_measure_the_same_case(run: Run, tmp_path: Path) -> None:
    given = "--arg w=bf16[32,16] --arg bf16[64,32] --arg bias=0.5 --reference mine_to_time:product --mode fwbw"
    (row,) = run.json(*f"time mine_to_time:product {given} --rounds 3 --name ours --output kept".split())
    import mine_to_time

    x, w = torch.randn(64, 32).bfloat16(), torch.randn(32, 16).bfloat16()
    here = measure(mine_to_time.product, x, w, 0.5, reference=exact, mode="fwbw", name="ours", rounds=3)
    same = ("op", "impl", "kernel", "mode", "dtype", "case_id", "flops", "bytes", "peak_memory_bytes", "input_bytes")
    assert {n: row[n] for n in same} == {n: getattr(here, n) for n in same}
    assert (row["op"], row["status"], row["checked"]) == ("own(bf16[64,32], bf16[32,16], 0.5)", "ok", "same shape")
    assert row["flops"] == row["tensor_flops"] == 3 * 2 * 64 * 32 * 16
    # Read: x and w. Written: the output and both gradients.
    assert row["bytes"] == 2 * (2 * (64 * 32 + 32 * 16) + 64 * 16)
    assert len(row["time_samples_ms"]) == 3
    assert 0 < here.rel_error < 0.01 and here.device_kind == "cpu"
    assert [each["case_id"] for each in load_rows("kept")] == [row["case_id"]]
    assert str(here).startswith("ours own(bf16[64,32], bf16[32,16], 0.5) fwbw on ") and "GFLOP" in str(here)


def test_a_kernel_has_the_numbers_of_its_row_in_a_sweep() -> None:
    sizes = {"batch": 1, "seq_len": 512, "num_heads": 2, "head_dim_qk": 32, "head_dim_v": 64, "chunk_size": 64}
    target = OPERATION.implementation("torch")
    names = {"kernel": "tfla", "op": "simple_gla", "impl": "torch", "provider": "lrbench", "mode": "fw"}
    case = Case(**names, dtype="fp32", state_dtype="fp32", **sizes)
    inputs = OPERATION.make_inputs(sizes, dtype=torch.float32)
    swept, own = [], []
    for _ in range(2):  # in turn: a machine's other load only lengthens a time
        limits = RunLimits(timeout_s=60, budget_s=0.3)
        (reply,) = Worker("cpu").run([PlannedCase(case=case, target=target)], limits)
        swept.append(reply["columns"])
        own.append(measure(simple_gla, *inputs.values(), impl="torch", chunk_size=64, budget_s=0.3))
    count = count_case("simple_gla", "torch", "fw", "fp32", "fp32", sizes)
    assert (own[0].flops, own[0].bytes) == (count.tensor_flops, count.compulsory_bytes)
    assert own[0].peak_memory_bytes == swept[0]["peak_memory_bytes"]
    assert own[0].roofline_fraction > 0
    shortest = [min(min(each["time_samples_ms"]) for each in rows) for rows in (map(vars, own), swept)]
    assert shortest[0] == pytest.approx(shortest[1], rel=0.3)


def test_rows_are_compared_and_checked(run: Run, lrbench: Lrbench) -> None:
    x = torch.ones(8, 8)
    row = measure(torch.mm, x, x, rounds=12)
    steady = [1 + n / 1000 for n in range(12)]

    def save(run_id: str, factor: float, **changed: Any) -> str:
        samples = [factor * ms for ms in steady]
        times = {"time_samples_ms": samples, "time_ms": samples[6], "host_ms": None}
        return str(dataclasses.replace(row, run_id=run_id, **times, **changed).save("kept"))

    before, same, slow = save("a" * 32, 1.0), save("b" * 32, 1.0), save("c" * 32, 1.5)
    other = save("d" * 32, 2.0, impl="mine")
    assert [lrbench("check", new, "--baseline", before)[0] for new in (same, slow)] == [0, 1]
    assert "1 regression" in lrbench("check", slow, "--baseline", before)[1]
    (line,) = run.json("compare", before, other, "--ignore", "impl")["cases"]
    assert line["ratio"] == pytest.approx(2.0)
    assert [each["run"] for each in run.json("history", "impl:torch:mm", "--results", "kept")] == [
        "a" * 8,
        "b" * 8,
        "c" * 8,
    ]
    assert {each["kernel"] for each in run.json("runs", "kept")} == {"own"}


def test_figures_and_reports_leave_them_out(tmp_path: Path, lrbench: Lrbench) -> None:
    path = measure(torch.relu, torch.ones(8), rounds=3).save("kept")
    assert len(load_results("kept", own=True)) == 1
    assert derive_file(path) == 0
    for command in ("plot runtime kept", "report kept"):
        assert "must hold rows of operations here, got functions of yours" in refused(lrbench, *command.split())


@pytest.mark.parametrize(
    ("command", "status", "reason"),
    [
        ("raises --arg fp32[4,4]", "error", "raises raised in mine_to_time.py, line 11: RuntimeError: size mismatch"),
        ("hangs --arg 1 --timeout 5", "timeout", "no result within 5 s; it was in hangs"),
        ("dies --arg 1", "crash", "the process ended with exit code 7"),
        ("too_large --arg 1", "oom", "line 20"),
    ],
)
def test_failures_are_rows(command: str, status: str, reason: str, lrbench: Lrbench) -> None:
    code, out, err = lrbench(f"time mine_to_time:{command} --output kept --format json")
    (row,) = json.loads(out)
    assert (code, row["status"], row["time_ms"]) == (1, status, None), err
    assert reason in row["reason"]
    assert [each["status"] for each in load_rows("kept")] == [status]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"reference": "nowhere_at_all:f"}, "module nowhere_at_all cannot be imported"),
        ({"arguments": ("fp32[8]",)}, "mine_to_time:product takes (x, w, bias=0): missing a required argument: 'w'"),
        ({"arguments": ("bf17[8]", "1")}, "dtype of --arg must be one of bf16, "),
        ({"arguments": ("fp32[8,x]", "1")}, "--arg fp32[8,x]: a size must be a positive integer such as 512 or 8k"),
        ({"arguments": ("fp32[8", "1")}, "such as x=bf16[8,8192,1024], a number or a text, got 'fp32[8'"),
        ({"arguments": ("x=", "1")}, "--arg must be [NAME=]DTYPE[SIZES]"),
        ({"arguments": ("1", "2"), "mode": "fwbw"}, "mode fwbw needs floating-point tensors among the arguments"),
    ],
)
def test_bad_input_is_named(asked: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {"target": "mine_to_time:product", "arguments": ("fp32[8,8]", "fp32[8,8]"), "mode": "fw"}
    usual |= {"reference": None, "seed": 0}
    with pytest.raises(ValueError, match=r"^(?!.*Traceback)") as error:
        look(None, **{**usual, **asked}, folder=os.getcwd())
    assert message in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(lrbench: Lrbench) -> None:
    command = "time mine_to_time:product --arg fp32[8,8] --arg fp32[8,8] --device cuda"
    assert "device must be cpu or left out here, where torch finds no GPU, got cuda" in refused(lrbench, command)


def test_arguments_are_drawn() -> None:
    def drawn(text: str) -> Any:
        return draw(text, torch.Generator().manual_seed(3))

    name, x = drawn("x=fp16[2k,3]")
    assert (name, x.shape, x.dtype) == ("x", (2048, 3), torch.float16)
    assert abs(float(x.float().std()) - 1) < 0.1 and torch.equal(x, drawn("fp16[2048,3]")[1])
    assert drawn("int64[2,3]")[1].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert drawn("uint8[300]")[1].tolist()[-44:] == list(range(44)) and drawn("bool[3]")[1].tolist() == [
        False,
        True,
        False,
    ]
    texts = ("x=true", "3", "-2.5", "scale=None", "impl=torch", "(1, 2)")
    assert [drawn(text) for text in texts] == [
        ("x", True), (None, 3), (None, -2.5), ("scale", None), ("impl", "torch"), (None, (1, 2)),
    ]  # fmt: skip


def test_in_this_process_errors_are_the_functions_own() -> None:
    def fails(x: torch.Tensor) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure(fails, torch.ones(3))
    with pytest.raises(ValueError, match="missing a required argument"):
        measure(fails)


def test_modules_compiled_functions_and_changed_arguments(tmp_path: Path) -> None:
    layer, x = torch.nn.Linear(32, 16), torch.randn(64, 32)
    row = measure(layer, x, mode="fwbw", rounds=3)
    assert row.flops == 3 * 2 * 64 * 32 * 16 and row.input_bytes == 4 * (64 * 32 + 33 * 16)
    assert layer.weight.grad is None

    graphs = []

    def backend(module: Any, _: Any) -> Any:
        return lambda *given: graphs.append(1) or module(*given)

    measure(torch.compile(lambda x: x @ x, backend=backend), torch.ones(8, 8), rounds=4)
    assert len(graphs) > 4
    wrong = measure(lambda x: (x.add_(1), 7), torch.zeros(8), reference=lambda x: (x + 2, 7), rounds=3)
    right = measure(lambda x: (x.add_(1), 7), torch.zeros(8), reference=lambda x: (x + 1, 7), rounds=3)
    assert (wrong.status, wrong.time_ms, right.status) == ("incorrect", None, "ok")
    several = measure(lambda x: (x, -x), torch.ones(8), reference=lambda x: (x, x), rounds=3)
    assert several.reason.startswith("output 2 has relative error")
    half = measure(lambda x: x.detach() * x, torch.ones(8), reference=lambda x: x * x, mode="fwbw", rounds=3)
    assert half.reason.startswith("gradient of input 1 has relative error 5.00e-01")
    assert measure(lambda x: x > 0, torch.ones(8), mode="fwbw", rounds=3).reason.endswith(
        "returns none: type --mode fw"
    )


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, lrbench; print(sorted(x for x in sys.modules if x.startswith(('lrbench.', 'torch'))))"
    assert run_python(code) == "[]\n"


@pytest.mark.gpu
def test_a_large_product_has_the_calibrated_rate() -> None:
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    row = measure(torch.mm, x, y)
    rows, _ = measure_roofs(current_environment(), FORMS["cuda", True], short=True)
    (roof,) = (each.rate for each in rows if (each.quantity, each.dtype, each.size) == ("matmul", "bf16", 8192))
    assert row.tflops * 1e12 == pytest.approx(roof, rel=0.04)
    assert row.bytes == 3 * 2 * 8192**2 and row.peak_memory_bytes >= row.bytes
    assert row.suspect is None and 0.3 < row.roofline_fraction < 1.02


@pytest.mark.gpu
def test_a_gpus_failures_and_processor_are_told_apart(run: Run) -> None:
    given = ("time", "mine_to_time:product", "--arg", "fp32[64,64]", "--arg", "fp32[64,64]", "--rounds", 3)
    kinds = [run.json(*given, *device, "--output", "kept")[0]["device_kind"] for device in ((), ("--device", "cpu"))]
    assert kinds == ["cuda", "cpu"]
