"""Packed documents from the command to the row: planning, counts, checks, and rows that are not those of batches."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lrbench.analysis.counts import FORMULATIONS, count, count_case
from lrbench.analysis.counts.formulations import DECODING
from lrbench.bench import plan
from lrbench.bench.drive.complete import load_sweeps, sweeps_file
from lrbench.bench.drive.run import problem
from lrbench.bench.plan import PlannedCase, Request
from lrbench.bench.worker import correctness
from lrbench.bench.worker.protocol import CaseFailure
from lrbench.bench.worker.worker import Worker
from lrbench.kernels import FAMILIES, get_operation
from lrbench.kernels.baselines import BASELINES, plan_sizes
from lrbench.kernels.baselines import get_operation as get_any_operation
from lrbench.kernels.baselines.spec import Baseline
from lrbench.kernels.common.inputs import bounds_of
from lrbench.kernels.scalar_decay.declare import PACKED
from lrbench.results import store
from lrbench.results.documents import lengths_of
from lrbench.results.schema import Case
from lrbench.results.select import describe
from lrbench.tests.analysis.rows import measured, write
from lrbench.tests.command_line import Run
from lrbench.tests.kernels.baselines.test_stand_ins import put_modules

pytestmark = pytest.mark.usefixtures("one_look_at_the_machine")

SIZES = {"batch": 1, "seq_len": 1000, "num_heads": 3, "head_dim_qk": 64, "head_dim_v": 96, "channels": 96}
LENGTHS = (300, 1, 129, 512, 58)
DOCUMENTS = "+".join(map(str, LENGTHS))


def planned(device_kind: str = "cuda", **axes: object) -> list[PlannedCase]:
    return plan.plan(Request(**axes), device_kind=device_kind)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"modes": ("fw", "step")}, "--documents is no axis of mode step: give --mode fw, fwbw, bw or train"),
        ({"modes": ("train",), "kernel": "rglru"}, "--documents is no axis of mode train of rglru: its blocks"),
        ({"kernel": "gated-mlp"}, "--documents is no axis of gated_mlp, projections: it mixes no tokens"),
        ({"batches": (8,)}, "--batch must be left out beside --documents"),
        ({"seq_lens": (32,)}, "documents must be at most as many as the positions, 32, got 64"),
        (
            {"documents": ("64x32",), "tokens": 1024},
            "seq_len must be the sum of the documents' lengths, 2048, got 1024",
        ),
        ({"documents": ("lengths",)}, "documents must be a number of documents .64., .* got 'lengths'"),
        ({"documents": ()}, "documents must have at least one value, got none"),
    ],
)
def test_what_is_no_problem_of_documents(axes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned(**{"documents": ("64",), "preset": "full", "modes": ("fw",), **axes})


def test_who_takes_no_documents_is_refused_with_the_reason() -> None:
    for item in planned(documents=("64",), head_dims=(128,), preset="full", modes=("fw",), dtypes=("bf16",)):
        reason = item.target.why_unsupported("fw", "bf16", None, item.case.sizes)
        assert item.target.documents or reason == f"{item.target.name} takes no packed documents", reason
        alone = {**item.case.sizes}
        del alone["documents"]
        assert "documents" not in (item.target.why_unsupported("fw", "bf16", None, alone) or "")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_declares_documents_takes_cu_seqlens(family: str) -> None:
    for operation in map(get_operation, FAMILIES[family]):
        for each in operation.implementations:
            if each.documents:
                function = operation.function(each)
                assert {"cu_seqlens", "keywords"} & {*inspect.signature(function).parameters}, (
                    operation.name,
                    each.name,
                )
    ours = [each for op in FAMILIES["tfla"] for each in get_operation(op).implementations]
    assert {each.name for each in ours if each.documents} == {*PACKED} & {each.name for each in ours}


def test_rows_with_documents_are_cases_of_their_own() -> None:
    case = Case(kernel="tfla", op="simple_gla", impl="torch", provider="lrbench", mode="fw", dtype="fp32", batch=1,
                seq_len=1000, num_heads=3, head_dim_qk=64, head_dim_v=96)  # fmt: skip
    packed = [dataclasses.replace(case, documents=each) for each in ("5", "5x200", DOCUMENTS)]
    assert len({each.case_id for each in (case, *packed)}) == 4
    # The id of a batch is what it was before there were documents.
    assert case.case_id == "f5675acac07e4f1b"
    items = [PlannedCase(case=each, target=get_operation("simple_gla").implementation("torch")) for each in packed]
    assert len(set(map(problem, items))) == len({item.problem for item in items}) == 3
    assert "T=1000 5 documents of 200 H=3" in describe(dataclasses.asdict(packed[1]))


@pytest.mark.parametrize("mode", ["fw", "bw", "fwbw"])
@pytest.mark.parametrize("op", sorted(set(FORMULATIONS) - {"gated_mlp", "projections"}))
def test_counts_of_documents(op: str, mode: str) -> None:
    """As of one sequence; of quadratic forms the sum over documents; and the bounds in every pass."""
    bounds = 4 * (len(LENGTHS) + 1) * (2 if mode == "fwbw" else 1)
    for formulation in FORMULATIONS[op]:
        if formulation == "recurrent" and op != "wkv4" and (mode != "fw" or op in DECODING):
            continue

        def counted(formulation: str = formulation, **sizes: Any) -> Any:
            return count(op, formulation=formulation, mode=mode, **{**SIZES, "chunk_size": 1, **sizes})

        chunk = {"chunk_size": 64}
        packed = counted(documents=DOCUMENTS, **chunk)
        assert packed.byte_parts.get("document bounds", 0) or mode == "fwbw"
        if formulation in ("flash", "parallel", "lightning1"):
            alone = [counted(seq_len=length, **{"chunk_size": 1}) for length in LENGTHS]
            constants = sum(part for name, part in packed.byte_parts.items() if "per-head constants" in name)
            assert packed.flops == pytest.approx(sum(each.flops for each in alone))
            assert packed.tensor_flops == pytest.approx(sum(each.tensor_flops for each in alone))
            moved = sum(each.bytes for each in alone) - (len(LENGTHS) - 1) * constants
            assert packed.bytes == pytest.approx(moved + bounds)
        else:
            one = counted(**chunk)
            assert packed.flops == one.flops
            assert packed.tensor_flops == one.tensor_flops
            assert packed.bytes == one.bytes + bounds
            assert packed.compulsory_bytes == one.compulsory_bytes + bounds


def test_counted_pairs_of_attention() -> None:
    """Whole tiles of 128: without rounding, the pairs of each document."""
    for documents in ("64", "64x1024"):
        lengths = lengths_of(documents, 65536)
        sizes = {"seq_len": 65536, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 128}
        exact = count("attention", documents=documents, causal_factor=0.5, **sizes)
        squares = 16 * sum(length**2 for length in lengths)
        assert exact.tensor_flops == pytest.approx(0.5 * squares * 2 * (128 + 128))
        tiles = 16 * sum((-(-n // 128)) * (-(-n // 128) + 1) / 2 * (n / -(-n // 128)) ** 2 for n in lengths)
        rounded = count("attention", documents=documents, **sizes)
        assert rounded.tensor_flops == pytest.approx(tiles * 2 * (128 + 128))


def test_rows_of_the_engine_are_counted_as_one_sequence() -> None:
    sizes = {"batch": 1, "seq_len": 65536, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 128, "chunk_size": 8192}
    for impl, mode in itertools.product(("whole_state", "fused_chunk"), ("fw", "fwbw")):
        one = count_case("simple_gla", impl, mode, "bf16", "fp32", sizes)
        packed = count_case("simple_gla", impl, mode, "bf16", "fp32", {**sizes, "documents": "64"})
        assert one and packed
        assert (packed.flops, packed.executed_tensor_flops) == (one.flops, one.executed_tensor_flops)


def case_at(op: str, impl: str, mode: str = "fwbw", dtype: str = "fp64", **sizes: Any) -> Case:
    known = {**SIZES, "seq_len": 60, "head_dim_qk": 16, "head_dim_v": 24, "channels": 12, **sizes}
    own = {name: known[name] for name in get_any_operation(op).sizes}
    names = {"kernel": "tfla", "op": op, "impl": impl, "provider": "lrbench", "mode": mode, "dtype": dtype}
    return Case(**names, **own, documents=known["documents"])


@pytest.mark.parametrize("documents", ["5", "3x20", "1x60", "7+4x1+2x20+9"])
@pytest.mark.parametrize("op", ["mlstm_exp", "mamba2_ssd", "attention", "gla", "selective_scan", "rglru", "wkv4"])
def test_the_reference_is_that_of_each_document_alone(op: str, documents: str) -> None:
    operation, case = get_any_operation(op), case_at(op, "torch", documents=documents)
    inputs = correctness.Inputs("cpu").get(operation, case)
    expected = correctness.References().get(operation, case, inputs, portable=False)
    assert expected.grad_out is not None
    ends = list(itertools.accumulate(lengths_of(documents, 60)))
    definition = correctness.resolve(operation.recurrent)
    for start, end in itertools.pairwise([0, *ends]):
        part = {name: x[:, start:end] if x.ndim > 2 else x for name, x in inputs.items()}
        leaves = {name: x.detach().requires_grad_() for name, x in part.items()}
        out = definition(*leaves.values())
        torch.testing.assert_close(expected.values["out"][:, start:end], out)
        wanted = {name: leaves[name] for name in operation.differentiable if part[name].ndim > 2}
        found = correctness.differentiate(out, wanted, expected.grad_out[:, start:end])
        for name, gradient in found.items():
            torch.testing.assert_close(expected.values[name][:, start:end], gradient)


@pytest.mark.parametrize("op", FAMILIES["tfla"])
@pytest.mark.parametrize("impl", ["torch", "parallel"])
def test_ours_is_checked_and_timed(op: str, impl: str) -> None:
    case = case_at(op, impl, dtype="fp32", documents="7")
    item = PlannedCase(case=case, target=get_operation(op).implementation(impl))
    worker = Worker("cpu")
    assert worker.verify(item)["checked"] == "same shape"
    ready = worker.make_ready(item)
    ready.call(ready.prepare())


def test_who_lets_documents_see_one_another_is_caught() -> None:
    item = PlannedCase(
        case=case_at("simple_gla", "torch", dtype="fp32", documents="7"),
        target=dataclasses.replace(
            get_operation("simple_gla").implementation("torch"), call=f"tests.bench.test_documents:{blind.__name__}"
        ),
    )
    with pytest.raises(CaseFailure, match="output has relative error"):
        Worker("cpu").verify(item)


def blind(*tensors: Tensor, cu_seqlens: Tensor, **keywords: Any) -> Any:
    """Simple GLA over all positions as one sequence."""
    assert cu_seqlens.dtype == torch.int32 and int(cu_seqlens[-1]) == tensors[0].shape[1]
    return get_operation("simple_gla").function("torch")(*tensors, **keywords)


def test_the_shape_of_the_check_has_documents() -> None:
    case = case_at("simple_gla", "fused_chunk", dtype="bf16", seq_len=65536, documents="2048x32")
    (whole, portable), (small, _) = correctness.checked_cases(get_operation("simple_gla"), case, "cuda")
    assert (whole, portable) == (case, True)
    assert correctness.describe_check(case, small) == "seq_len=512, num_heads=2, documents=8"
    attention = case_at("attention", "flash_attn.v2", seq_len=65536, documents="3")
    ((small, _),) = correctness.checked_cases(get_any_operation("attention"), attention, "cuda")
    assert (small.seq_len, small.documents) == (512, "3")


TAKING = [each for each in BASELINES if each.documents and each.op not in FAMILIES["delta"]]
"""Those of the delta rule are tested beside their stand-ins, in test_delta_rule.py."""


def test_who_takes_documents() -> None:
    assert {(each.op, each.name) for each in TAKING} == {
        ("simple_gla", "fla.chunk_simple_gla"), ("retention", "fla.chunk_retention"), ("gla", "fla.chunk_gla"),
        ("lightning", "fla.chunk_lightning_attn"), ("mamba2_ssd", "mamba_ssm.chunk_scan"),
        *((op, "fla.fused_recurrent_hgrn") for op in ("rglru", "rglru_layer", "linear_scan")),
        *(("attention", name) for name in ("flash_attn.v2", "flash_attn.v3", "flash_attn.v4", "torch.sdpa_flash")),
    }  # fmt: skip


def of_documents(op: str, bounds: Tensor, *tensors: Tensor, **keywords: Any) -> Tensor:
    """What an operation's definition makes of each document."""
    lengths = bounds.diff().tolist()
    assert bounds[0] == 0 and sum(lengths) == tensors[0].shape[1]
    definition = correctness.resolve(get_any_operation(op).recurrent)
    return correctness.each_document(definition, lengths, *tensors, **keywords)


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, *, chunk_size: int, cu_seqlens: Tensor, g: Tensor | None = None,
    g_gamma: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, None]:  # fmt: skip
    """fla's: bounds in int64."""
    assert cu_seqlens.dtype == torch.int64
    decay = g if g_gamma is None else g_gamma.expand(q.shape[:3])
    assert decay is not None
    return of_documents("simple_gla", cu_seqlens, q, k, v, decay, scale=scale), None


def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, cu_seqlens: Tensor) -> tuple[Tensor, None]:
    """fla's: bounds in int64."""
    assert cu_seqlens.dtype == torch.int64
    return of_documents("gla", cu_seqlens, q, k, v, g), None


def hgrn(x: Tensor, g: Tensor, *, cu_seqlens: Tensor) -> tuple[Tensor, None]:
    """fla's scan: g is the log decay."""
    return of_documents("linear_scan", cu_seqlens, x.double(), g.double().exp()).to(x.dtype), None


def chunk_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, seq_idx: Tensor
) -> Tensor:  # fmt: skip
    """mamba-ssm's: the number of each position's document."""
    assert (seq_idx.dtype, seq_idx.shape) == (torch.int32, x.shape[:2])
    counts = torch.bincount(seq_idx[0])
    assert bool((seq_idx.diff() >= 0).all())
    bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return of_documents("mamba2_ssd", bounds, x, dt, A, B, C)


def flash(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, causal: bool,
) -> tuple[Tensor, None]:  # fmt: skip
    """flash-attn's: [T, H, D], bounds in int32."""
    assert causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    return of_documents("attention", cu_seqlens_q, q[None], k[None], v[None])[0], None


def varlen_2_10(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    is_causal: bool = False,
) -> Tensor:  # fmt: skip
    """torch's first: whether it is causal."""
    return flash(query, key, value, cu_seqlens_q=cu_seq_q, cu_seqlens_k=cu_seq_k, max_seqlen_q=max_q,
                 max_seqlen_k=max_k, causal=is_causal)[0]  # fmt: skip


def varlen_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """torch's later: a window of any past and no future."""
    return varlen_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size == (-1, 0))


@pytest.mark.parametrize("varlen", [varlen_2_10, varlen_2_11])
@pytest.mark.parametrize("baseline", TAKING, ids=lambda baseline: f"{baseline.op}-{baseline.name}")
def test_adapters_take_documents(baseline: Baseline, varlen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put_modules(
        monkeypatch,
        {
            "fla.ops.simple_gla": {"chunk_simple_gla": chunk_simple_gla},
            "fla.ops.gla": {"chunk_gla": chunk_gla},
            "fla.ops.hgrn": {"fused_recurrent_hgrn": hgrn},
            "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": chunk_scan},
            **{str(each.module): {"flash_attn_varlen_func": flash} for each in TAKING if each.provider == "flash_attn"},
        },
    )
    module = types.ModuleType("varlen")
    vars(module)["varlen_attn"] = varlen
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    own = get_any_operation(baseline.op).sizes
    sizes = {name: case_at(baseline.op, "", documents="7").sizes[name] for name in (*own, "documents")}
    (sizes,) = plan_sizes(baseline, sizes, op=baseline.op)
    names = {"kernel": baseline.kernels[0], "op": baseline.op, "impl": baseline.name, "provider": baseline.provider}
    case = Case(**names, mode="fwbw", dtype="bf16", **sizes)
    worker = Worker("cpu")
    assert worker.verify(PlannedCase(case=case, target=baseline))["checked"] == "same shape"
    # As in a row: what is timed is the same call.
    ready = worker.make_ready(PlannedCase(case=case, target=baseline))
    ready.call(ready.prepare())


def test_installed_packages_take_documents_by_these_names() -> None:
    fla = pytest.importorskip("fla.ops", reason="fla is not installed: pip install fla-core")
    for module, name in (("simple_gla", "chunk_simple_gla"), ("gla", "chunk_gla"), ("hgrn", "fused_recurrent_hgrn")):
        function = getattr(pytest.importorskip(f"{fla.__name__}.{module}"), name)
        assert "cu_seqlens" in inspect.signature(function).parameters
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="torch before 2.10")
    taken = {*inspect.signature(varlen.varlen_attn).parameters}
    assert {"cu_seq_q", "cu_seq_k", "max_q", "max_k"} < taken and taken & {"is_causal", "window_size"}


def test_bounds() -> None:
    assert bounds_of("300+2x50", 400, "cpu").tolist() == [0, 300, 350, 400]
    assert bounds_of("300+2x50", 400, "cpu").dtype == torch.int32


SWEEP = (
    "sweep --kernel tfla --op simple_gla,attention --impl torch,torch.sdpa_cpu --chunk-size 16 --head-dim 16 "
    "--num-heads 2 --mode fwbw --budget 0 --no-calibrate --documents"
)


@pytest.mark.usefixtures("idle")
def test_a_sweep_of_documents(tmp_path: Path, run: Run) -> None:
    """Rows say which documents they are of; --dry-run, --resume and selectors know them."""
    file = tmp_path / "lengths.txt"
    file.write_text("30\n1\n29\n")
    asked = f"{SWEEP} 5,3x20,{file} --tokens 60"
    planned = run.json(f"{asked} --dry-run", "--output", tmp_path / "rows")
    assert {row["documents"] for row in planned} == {"5", "3x20", "30+1+29"}
    rows = run.json(asked, "--output", tmp_path / "rows")
    assert {(row["impl"], row["documents"], row["batch"], row["seq_len"], row["status"]) for row in rows} == {
        (impl, documents, 1, 60, status)
        for documents in ("5", "3x20", "30+1+29")
        for impl, status in (("torch", "ok"), ("torch.sdpa_cpu", "unsupported"))
    }
    reasons = {row["reason"] for row in rows if row["impl"] == "torch.sdpa_cpu"}
    assert reasons == {"torch.sdpa_cpu takes no packed documents"}
    assert all(row["checked"] == "same shape" and row["flops"] for row in rows if row["status"] == "ok")
    left = run.json(f"{SWEEP} 5,6 --tokens 60 --resume --dry-run", "--output", tmp_path / "rows")
    assert {row["documents"] for row in left if row["impl"] == "torch"} == {"6"}
    (row,) = run.json("results --rows documents:3x20,impl:torch", tmp_path / "rows")
    assert row["documents"] == "3x20"


def test_figures_and_reports_leave_documents_out(tmp_path: Path) -> None:
    from lrbench.results.select import load_results

    rows = [measured(batch=1, seq_len=1024), measured(batch=1, seq_len=1024, documents="4")]
    path = write(rows, tmp_path / "rows.parquet")
    assert len(store.read_results(path)) == 2
    assert load_results(path)["documents"].isna().all()
    assert len(load_results(path, own=True)) == 2


def test_answers_about_documents(tmp_path: Path, run: Run) -> None:
    """Measured where it was, else as of one sequence; never from a row of other documents."""
    sizes = {"op": "simple_gla", "impl": "whole_state", "batch": 1, "seq_len": 65536, "chunk_size": 8192}
    sizes |= {"num_heads": 16, "head_dim_qk": 128, "head_dim_v": 128}
    path = write([measured(**sizes, documents="64", times=[3.0] * 10)], tmp_path / "rows.parquet")
    asked = (
        "predict simple_gla --impl whole_state --gpu h200 --seq-len 64k --num-heads 16 --head-dim 128 --chunk-size 8192"
    )
    found = {
        documents: run.json(f"{asked} --documents {documents} --results", path, "--no-fit")
        for documents in ("64", "64x1024")
    }
    assert found["64"]["measured_time_ms"] == 3.0
    assert found["64x1024"]["measured_time_ms"] is None
    one = run.json(f"{asked} --batch 1 --no-fit")
    assert found["64"]["predicted_low_ms"] == pytest.approx(one["predicted_low_ms"], rel=1e-3)
    sizes = "--seq-len 64k --num-heads 16 --head-dim 128 --documents 64"
    ranked = run.json(f"best simple_gla --gpu h200 {sizes} --results", path)
    assert [row["time_ms"] for row in ranked if row["impl"] == "whole_state"] == [3.0]
    packed, one = (run.json(f"count simple_gla {size}") for size in ("--documents 300+700", "--seq-len 1000 --batch 1"))
    assert packed["flops"] == one["flops"]


def test_the_sweeps_that_come_with_the_package() -> None:
    cases = [each.case for request in load_sweeps(sweeps_file("documents")) for each in planned_of(request)]
    packed = {(case.op, case.documents) for case in cases}
    ops = ("simple_gla", "mlstm_sig", "mlstm_exp", "mamba2_ssd", "lightning", "attention")
    assert packed >= {(op, each) for op in ops for each in ("64", "64x1024", "2048x32")}
    assert {(case.batch or 0) * (case.seq_len or 0) for case in cases} == {65536}
    assert {(case.num_heads, case.head_dim_qk, case.head_dim_v) for case in cases if case.num_heads} == {(16, 128, 128)}


def planned_of(request: Request) -> list[PlannedCase]:
    return plan.plan(request, device_kind="cuda")
