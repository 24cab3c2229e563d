"""The numerical check: what it lets pass, what it catches, and at which shape it looks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from lrbench.bench.worker import correctness
from lrbench.kernels import FAMILIES, get_operation
from lrbench.kernels.common.spec import Operation
from lrbench.results.schema import Case

CASE = Case(
    kernel="tfla", op="mlstm_exp", impl="fused_chunk", provider="lrbench", mode="fwbw", dtype="fp32",
    state_dtype="fp32", batch=2, seq_len=96, num_heads=2, head_dim_qk=16, head_dim_v=32, chunk_size=32,
)  # fmt: skip


def at(**changes: object) -> Case:
    return dataclasses.replace(CASE, **changes)


def expected_and_results(case: Case) -> tuple[correctness.Expected, dict[str, torch.Tensor]]:
    """What the case must give, and what the portable implementation gives."""
    operation = get_operation(case.op)
    inputs = correctness.Inputs("cpu").get(operation, case)
    expected = correctness.References().get(operation, case, inputs, portable=False)
    function = operation.function("torch")
    assert expected.grad_out is not None
    grad_out = expected.grad_out
    results = correctness.evaluate(operation, lambda *x: function(*x, chunk_size=32), inputs, lambda _: grad_out)
    return expected, results


@pytest.mark.parametrize("op", ["mlstm_sig", "mlstm_exp", "simple_gla", "retention", "gated_retention", "mamba2_ssd"])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
def test_a_right_result_passes(op: str, dtype: str) -> None:
    expected, results = expected_and_results(at(op=op, dtype=dtype))
    assert set(results) == {"out", *get_operation(op).differentiable}
    verdict = correctness.compare(results, expected, "fp32")
    assert verdict.failure is None
    assert verdict.rel_error is not None
    assert verdict.rel_error < {"fp64": 1e-12, "fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}[dtype]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["out", "q", "k", "v", "i", "f"])
def test_one_wrong_head_in_any_tensor_is_caught(dtype: str, name: str) -> None:
    expected, results = expected_and_results(at(dtype=dtype))
    results[name] = results[name].clone()
    results[name][:, :, 0] *= 1.5
    failure = correctness.compare(results, expected, "fp32").failure
    assert failure is not None
    what = "output" if name == "out" else f"gradient of {name}"
    assert failure.startswith(f"{what} has relative error")


def test_tf32_products_do_not_pass_for_fp32() -> None:
    """Rounding the inputs of the products to 10 mantissa bits is what TF32 does."""
    expected, results = expected_and_results(CASE)
    rounded = results["out"].view(torch.int32).bitwise_and(~0x1FFF).view(torch.float32)
    failure = correctness.compare({"out": rounded}, expected, "fp32").failure
    assert failure is not None
    assert failure.startswith("output has relative error")


def test_non_finite_and_misshapen_results_are_named() -> None:
    expected, results = expected_and_results(CASE)
    results["out"] = results["out"].clone()
    results["out"][0, 0, 0, 0] = float("inf")
    results["q"] = results["q"][:, :1]
    failure = correctness.compare(results, expected, "fp32").failure
    assert failure == (
        "output contains non-finite values; gradient of q has shape (2, 1, 2, 16), expected (2, 96, 2, 16)"
    )


def test_low_precision_states_get_a_stated_allowance() -> None:
    expected, results = expected_and_results(CASE)
    off = {"out": results["out"] * (1 + 1.5 * torch.finfo(torch.bfloat16).eps)}
    assert correctness.compare(off, expected, "fp32").failure is not None
    assert correctness.compare(off, expected, "bf16").failure is None


@pytest.mark.parametrize(
    ("case", "device", "checked", "portable"),
    [
        pytest.param(CASE, "cpu", "same shape", False, id="recurrence affordable"),
        pytest.param(at(impl="torch"), "cpu", "same shape", False, id="torch against the recurrence"),
        pytest.param(at(seq_len=65536), "cuda", "same shape", True, id="long: the portable form in float64"),
        pytest.param(
            at(seq_len=65536, impl="torch"), "cuda", "batch=1, seq_len=512", False, id="long, torch itself: smaller"
        ),
        pytest.param(
            at(seq_len=65536, impl="torch", chunk_size=512), "cuda", "batch=1, seq_len=1024", False, id="two chunks"
        ),
        pytest.param(
            at(op="gla", impl="fla.chunk_gla", seq_len=8192, num_heads=16, head_dim_qk=128, head_dim_v=256),
            "cuda",
            "batch=1, seq_len=512, num_heads=2",
            False,
            id="an operation without a portable form",
        ),
    ],
)
def test_the_shape_of_the_check(case: Case, device: str, checked: str, portable: bool) -> None:
    from lrbench.kernels import baselines

    shape, by_portable = correctness.checked_cases(baselines.get_operation(case.op), case, device)[0]
    assert (correctness.describe_check(case, shape), by_portable) == (checked, portable)


def test_a_reference_without_memory_gives_up_its_batch_before_heads_and_length() -> None:
    """With two heads, the error of a parameter of each head would be luck."""
    case = at(op="mamba2_ssd", batch=6, seq_len=8192, num_heads=64)
    shapes = correctness.checked_cases(get_operation("mamba2_ssd"), case, "cuda")
    assert [(correctness.describe_check(case, shape), portable) for shape, portable in shapes] == [
        ("same shape", True),
        ("batch=3", True),
        ("batch=1", True),
        ("batch=1, seq_len=512, num_heads=2", False),
    ]


def test_poison_shows_what_nobody_wrote() -> None:
    with correctness.PoisonEmpty():
        fresh = [torch.empty(3), torch.empty_like(torch.ones(3)), torch.ones(1).new_empty(3), torch.empty(3, dtype=int)]
    assert [bool(x.isnan().all()) for x in fresh] == [True, True, True, False]
    assert not torch.zeros(3).isnan().any()


def test_inputs_are_the_same_for_everyone_and_cannot_leak_gradients() -> None:
    operation = get_operation("mlstm_sig")
    source = correctness.Inputs("cpu")
    first, second = source.get(operation, at(op="mlstm_sig")), source.get(operation, at(op="mlstm_sig", chunk_size=16))
    assert all(first[name].data_ptr() == second[name].data_ptr() for name in first)
    first["q"].requires_grad_()
    assert not second["q"].requires_grad
    fresh = correctness.Inputs("cpu").get(operation, at(op="mlstm_sig"))
    assert all(torch.equal(first[name], fresh[name]) for name in first)


def test_references_are_shared_between_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = get_operation(CASE.op)
    inputs = correctness.Inputs("cpu").get(operation, CASE)
    first = correctness.References(tmp_path).get(operation, CASE, inputs, portable=False)
    monkeypatch.setattr(correctness, "evaluate", lambda *_: pytest.fail("computed again"))
    second = correctness.References(tmp_path).get(operation, CASE, inputs, portable=False)
    assert first.bounds == second.bounds
    assert all(torch.equal(first.values[name], second.values[name]) for name in first.values)
    assert first.grad_out is not None
    assert second.grad_out is not None
    assert torch.equal(first.grad_out, second.grad_out)


CHANNELS = Case(
    kernel="wkv", op="wkv4", impl="scan", provider="lrbench", mode="fwbw", dtype="fp32", state_dtype="fp32",
    batch=2, seq_len=80, channels=20,
)  # fmt: skip


@pytest.mark.parametrize("op", ["wkv4", "rglru", "linear_scan"])
def test_channels_that_do_not_mix_are_computed_some_at_a_time(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large problem's values and bounds are the whole problem's, and no slice exceeds the size."""
    operation, case = get_operation(op), dataclasses.replace(CHANNELS, op=op)
    inputs = correctness.Inputs("cpu").get(operation, case)

    def expect() -> correctness.Expected:
        return correctness.References().get(operation, case, inputs, portable=True)

    whole, widths, inner = expect(), [], correctness.evaluate
    monkeypatch.setattr(correctness, "_SLICE_ELEMENTS", 2 * 80 * 6)

    def note_width(operation: Operation, function: Any, given: Any, grad_out: Any, **keywords: Any) -> Any:
        widths.append({x.shape[-1] for x in given.values()})
        return inner(operation, function, given, grad_out, **keywords)

    monkeypatch.setattr(correctness, "evaluate", note_width)
    sliced = expect()
    # In float64, then in float32.
    assert widths == 2 * [{20}, {5}, {5}, {5}, {5}]
    assert set(sliced.values) == {"out", *operation.differentiable}
    for name, value in whole.values.items():
        assert sliced.values[name].dtype == torch.float64
        assert correctness.relative_error(sliced.values[name], value) <= 1e-14
        assert sliced.bounds[name] == pytest.approx(whole.bounds[name], rel=0.2)
    assert whole.grad_out is not None and sliced.grad_out is not None
    assert torch.equal(sliced.grad_out, whole.grad_out)


def test_operations_that_mix_channels_are_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = [get_operation(name) for names in FAMILIES.values() for name in names]
    assert {op.name for op in operations if op.channelwise} == {"wkv4", "rglru", "linear_scan"}
    monkeypatch.setattr(correctness, "_SLICE_ELEMENTS", 16)
    _, results = expected_and_results(CASE)
    assert results["out"].shape == (2, 96, 2, 32)


def test_outside_packages_run_under_no_dispatch_mode() -> None:
    # torch.compile gives a function up for good when it first meets it under one.
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    from lrbench.bench.worker.worker import _poisoned
    from lrbench.kernels.baselines import BASELINES

    expected = correctness.Expected(values={"out": torch.ones(2)}, bounds={"out": 0.0}, grad_out=None)
    with _poisoned(BASELINES[0], expected, torch.float32):
        assert _get_current_dispatch_mode() is None
    with _poisoned(get_operation("mlstm_sig").implementation("torch"), expected, torch.float32):
        assert bool(torch.empty(3).isnan().all())
