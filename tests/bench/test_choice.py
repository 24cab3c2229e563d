"""One problem, one answer: whatever command a question is put to, the same number."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lrbench.analysis.accelerators.known import get_accelerator
from lrbench.analysis.counts import FORMULATIONS, count, count_case
from lrbench.analysis.model.answers import chunk_size_report
from lrbench.analysis.model.runtime_model import model_time_ms
from lrbench.bench.show import choice
from lrbench.cli import OneProblem
from lrbench.kernels.baselines import get_operation
from lrbench.kernels.baselines.published import MODELS, problem_sizes
from lrbench.kernels.common.spec import width_of
from lrbench.results.schema import Record
from lrbench.tests.analysis.rows import row, write
from lrbench.tests.command_line import Lrbench
from lrbench.tests.results.test_store import RECORD

COUNTED = [op for op in FORMULATIONS if op != "projections"]


@st.composite
def problems(draw: st.DrawFn) -> OneProblem:
    """Draw what is given of a problem: its operation, and none, some or all of its sizes."""
    op = draw(st.sampled_from(COUNTED))
    modes = [mode for mode in ("fw", "fwbw", "step") if mode != "step" or "recurrent" in FORMULATIONS[op]]
    given: dict[str, Any] = {"mode": draw(st.sampled_from(modes)), "like": None, "state_dtype": "fp32", "dtype": None}
    given |= {"seq_len": draw(st.sampled_from((1024, 8192, 5000))), "batch": draw(st.sampled_from((1, 8)))}
    packs = given["batch"] == 1 and given["mode"] != "step" and op != "gated_mlp"
    given["documents"] = draw(st.sampled_from((None, "17"))) if packs else None
    options = ("embedding", "num_heads", "num_heads_qk", "head_dim", "head_dim_qk", "channels", "d_model", "d_ff")
    given |= dict.fromkeys(options)
    models = [name for name, ops in MODELS.items() if op in ops]
    how = draw(st.sampled_from(("nothing", "nothing", "width", "heads", *(("like",) if models else ()))))
    if how == "like":
        given["like"] = draw(st.sampled_from(models))
    elif how == "width":
        given["embedding"] = draw(st.sampled_from((1024, 2048, 4096)))
    elif how == "heads" and "head_dim_v" in get_operation(op).sizes:
        given |= draw(st.sampled_from(({"num_heads": 32}, {"head_dim": 128}, {"num_heads": 16, "embedding": 2048})))
    return OneProblem(op=op, **given)


# What is drawn is small as it is: to shrink it takes minutes.
@settings(max_examples=25, deadline=None, derandomize=True, phases=(Phase.generate,))
@given(problem=problems(), gpu=st.sampled_from(("h200", "h100", "b200")))
def test_the_same_problem_has_the_same_number(problem: OneProblem, gpu: str) -> None:
    """In best, alone and beside another operation, predict, chunk-size, count and the table that ends a sweep."""
    accelerator = get_accelerator(gpu)
    question = problem.ask(None, accelerator, None)
    sizes = problem_sizes(question.op, **problem.given())
    assert sizes == question.sizes
    try:
        rows = choice.ranking(question)
    except ValueError as error:
        # No GPU's kernel holds such heads; nothing else answers either.
        assert "nothing runs" in str(error) and not choice.expected([record(question)])
        return
    impl = choice.implementation(question, None)
    (best,) = (row for row in rows if row["impl"] == impl)
    answer = question.answer(impl)
    predicted = choice.predicted(question, impl, None)
    time_ms = best["time_ms"] or best["low_ms"]
    assert (answer.time_ms or answer.interval_ms[0]) == time_ms
    measured = predicted["measured_time_ms"]
    assert (measured is not None) == (best["basis"] == "measured")
    assert time_ms in (measured, predicted["time_ms"], predicted["low_ms"])
    assert predicted.get("chunk_size") == best["chunk_size"] or measured is not None
    assert predicted["memory_bytes"] == best["memory_bytes"]
    # Of ours and of others first what `best` ranks first: where bounds alone are known, they do not tell.
    ours = [row for row in rows if ("." in row["impl"]) == ("." in impl)]
    assert best["basis"] == "bound" or ours[0] is best
    ((shown, mark),) = choice.expected([record(question)])
    assert (shown.time_ms, shown.chunk_size, mark) == (time_ms, best["chunk_size"], choice.MARKS[best["basis"]])
    # The model's time of a row is what predict says where it fits nothing.
    bare = choice.predicted(dataclasses.replace(question, rows=(), fits=None), impl, chunk(answer.case.sizes))
    counted = count_case(*answer.case)
    assert counted is not None and model_time_ms(counted, accelerator, question.dtype) == bare["high_ms"]
    if problem.mode != "step" and "chunk_size" in answer.case.sizes and "head_dim_v" in sizes:
        report = chunk_size_report(question, impl)
        (candidate,) = (each for each in report["candidates"] if each["chunk_size"] == best["chunk_size"])
        assert (report["answer"]["chunk_size"], report["answer"]["time_ms"]) == (best["chunk_size"], best["time_ms"])
        assert candidate["memory_bytes"] == best["memory_bytes"]
        own = {**sizes, "chunk_size": best["chunk_size"]}
        assert candidate["flops"] == count(question.op, formulation="chunkwise", mode=problem.mode, **own).flops
    beside_others(question)


# One question is a second of commands, so there are few, and others each time.
@settings(max_examples=4, deadline=None, phases=(Phase.generate,), suppress_health_check=[*HealthCheck])
@given(problem=problems(), gpu=st.sampled_from(("h200", "h100", "b200")))
def test_commands_give_the_same_number(problem: OneProblem, gpu: str, lrbench: Lrbench) -> None:
    """The JSON of best, predict, chunk-size and count, of a question as it is typed."""
    flags = {"num_heads_qk": "qk-heads"}
    typed = [(flags.get(name, name), value) for name, value in vars(problem).items() if value is not None]
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in typed)

    def answer(command: str) -> Any:
        code, out, err = lrbench(f"{command} {words} --format json")
        assert code in (0, 2), err
        return json.loads(out) if code == 0 else err

    ranked, predicted = answer(f"best --gpu {gpu}"), answer(f"predict --gpu {gpu}")
    if isinstance(ranked, str):
        assert "nothing runs" in ranked and isinstance(predicted, str)
        return
    (best,) = (row for row in ranked if row["impl"] == predicted["impl"])
    shared = [name for name in best if name in predicted and name != "chunk_size"]
    assert {"op", "mode", "dtype", "accelerator", "batch", "seq_len", "basis", "time_ms", "low_ms", "high_ms"} <= {
        *shared
    }
    assert {name: predicted[name] for name in shared} == {name: best[name] for name in shared}
    counted = answer("count")
    if not isinstance(counted, str):
        sizes = [name for name in best if name in counted and name != "chunk_size"]
        assert {"op", "mode", "dtype", "seq_len"} <= {*sizes}
        assert {name: counted[name] for name in sizes} == {name: best[name] for name in sizes}
    chunks = answer(f"chunk-size --gpu {gpu}")
    if not isinstance(chunks, str) and chunks["impl"] == best["impl"]:
        of = ("chunk_size", "basis", "time_ms", "low_ms", "high_ms", "does_not_fit")
        assert {name: chunks["answer"][name] for name in of} == {name: best[name] for name in of}


def test_what_a_busy_machine_measured_is_marked_in_the_ranking(tmp_path: Path, lrbench: Lrbench) -> None:
    sizes: dict[str, Any] = {"seq_len": 8192, "batch": 8, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256}
    rows = [
        row("mlstm_sig", impl, chunk_size=128, noise=noise, time_ms=time_ms, **sizes)
        for impl, noise, time_ms in (("fused_chunk", "busy CPU: load 9", 2.0), ("xl_chunk", None, 3.0))
    ]
    _, out, _ = lrbench("best mlstm_sig --gpu h200 --seq-len 8k --results", write(rows, tmp_path / "rows.parquet"))
    marked = {line.split()[0]: " (busy)" in line for line in out.splitlines() if line.startswith(("fused_", "xl_"))}
    assert marked == {"fused_chunk": True, "xl_chunk": False}


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("best wkv --batch 1 --seq-len 64k --channels 256 --dtype fp32", "jax.associative_scan"),
        (
            "best mlstm_exp --mode fwbw --batch 1 --seq-len 64k",
            "incorrect there: mlstm_kernels.xl_chunk (gradient of",
        ),
        ("predict delta_net --seq-len 2k --documents 16", "delta_net fla.chunk_delta_rule fw"),
    ],
)
def test_no_peer_is_left_out_in_silence(question: str, said: str, lrbench: Lrbench) -> None:
    code, out, err = lrbench(f"{question} --gpu h200")
    assert code == 0 and said in out + err


def beside_others(question: choice.Question) -> None:
    """Check that another operation is asked about as if it were the question: the same tokens, width and rows."""
    for other in choice.beside(question, None):
        of_all: dict[str, Any] = {"mode": question.mode, "batch": question.sizes["batch"], "seq_len": question.length}
        of_all["documents"] = question.sizes.get("documents")
        assert other.sizes == problem_sizes(other.op, **of_all, embedding=width_of(question.sizes))
        assert (other.rows, other.fits, other.length) == (question.rows, question.fits, question.length)


def record(question: choice.Question) -> Record:
    """Return a row of a CPU that a sweep for the question's accelerator measured."""
    own = dict.fromkeys(("num_heads", "head_dim_qk", "head_dim_v", "chunk_size", "channels", "d_model", "context"))
    own |= question.sizes | {"op": question.op, "mode": question.mode, "dtype": question.dtype}
    return dataclasses.replace(
        RECORD, **own, accelerator=question.accelerator.key, device_accelerator="cpu", model_time_ms=1.0
    )


def chunk(sizes: Any) -> str | None:
    """Return a chunk length as it is written on the command line."""
    return str(sizes["chunk_size"]) if "chunk_size" in sizes else None
