"""count, chunk-size, predict, plot and roofline from outside: what they print, and what they say to bad input."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lrbench.analysis.counts import FORMULATIONS
from lrbench.analysis.model.runtime_model import LAUNCH_MS
from lrbench.kernels import baselines
from lrbench.kernels.scalar_decay.declare import WHOLE_STATE_FORM
from lrbench.results import store
from lrbench.results.select import load_rows
from lrbench.tests import ROOT
from lrbench.tests.command_line import Lrbench, Run, full_speed_seconds, refused, refused_commands

from .analysis import rows as made

PUBLISHED = (
    "count tfla --op mlstm_sig --formulation chunkwise --seq-len 8192 --batch 1 --num-heads 1 --head-dim-qk 256 "
    "--head-dim 512 --chunk-size 128 --causal-factor 0.5 --dtype bf16 --state-dtype fp32 --mode fw"
)
CHUNK_SIZE = (
    "chunk-size tfla --op mlstm_sig --impl fused_chunk --gpu h100 --head-dim 512 --head-dim-qk 256 "
    "--state-dtype fp32 --causal-factor 0.5"
)


MLSTM = {"batch": 8, "seq_len": 8192, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256}


@pytest.mark.parametrize("counting", ["published", "detailed"])
def test_count_prints_every_part_of_the_papers_table(counting: str, run: Run) -> None:
    printed = run.json(f"{PUBLISHED} --counting {counting}")
    assert "intra-chunk forget gates" in printed["parts"]
    assert sum(printed["parts"].values()) == printed["flops"]
    assert printed["flops"] == 5129724224 + 64 * (128 - 4) * (counting == "detailed")
    assert printed["intensity"] == printed["flops"] / printed["bytes"]
    if counting == "detailed":
        heavier = run.json(f"{PUBLISHED} --factor exp=4 --factor log=2")
        assert heavier["flops"] > printed["flops"]


def test_count_says_what_the_kernels_run(run: Run) -> None:
    walk = "count tfla --formulation walk --chunk-size 1024"
    printed = run.json(walk)
    assert printed["executed_tensor_flops"] == sum(printed["executed_parts"].values()) > printed["tensor_flops"]
    assert "h: recomputed_scores" in printed["executed_parts"]
    assert sum(printed["executed_byte_parts"].values()) == printed["executed_bytes"]
    assert "executed on tensor cores" in run(walk)


def test_the_page_names_every_operation_and_formulation() -> None:
    page = (ROOT / "docs" / "counts.md").read_text(encoding="utf-8")
    missing = {name for op, known in FORMULATIONS.items() for name in (op, *known) if f"`{name}`" not in page}
    assert not missing


def test_chunk_size(run: Run) -> None:
    report = run.json(CHUNK_SIZE)
    keys = ("flop_optimal", "runtime_optimal", "runtime_optimal_feasible", "measured_best", "regret_ms", "candidates")
    assert set(keys) <= set(report)
    assert report["flop_optimal"] == pytest.approx(18.427, abs=1e-3)
    table = run(f"{CHUNK_SIZE} --all")
    assert "best for FLOPs: 18.4, of the feasible ones 16" in table
    assert re.search(
        r"for the modelled time on H100 80 GB HBM3 SXM5: 633.5, of the feasible ones 512 \(.* GiB\)", table
    )
    answer = report["answer"]
    assert table.startswith(
        "mlstm_sig fw B=8 T=8k H=8 dim 256/512 bf16\n"
        f"use {answer['chunk_size']} with fused_chunk: {answer['time_ms']:.4g} ms "
        f"({answer['low_ms']:.4g} to {answer['high_ms']:.4g}) predicted for h100_sxm\n"
    )
    short = run(CHUNK_SIZE).splitlines()
    assert short[:2] == table.splitlines()[:2]
    assert short[2].split() == ["chunk_size", "modelled_ms", "gib"]
    assert max(map(len, short)) <= 80


@pytest.mark.parametrize(
    ("problem", "chunks"),
    [
        ("tfla --impl limit_chunk", [16, 32, 64, 128]),
        ("gla", [64]),
        ("tfla --op mamba2_ssd --impl mamba_ssm.chunk_scan --head-dim 64", [64, 128, 256]),
        ("tfla --impl mlstm_kernels.xl_chunk_siging", [32, 64, 128, 256, 512, 1024]),
    ],
)
def test_chunk_lengths_are_those_that_an_implementation_takes(problem: str, chunks: list[int], run: Run) -> None:
    """Rows of outside packages, which have no dtype of states, count as measured."""
    report = run.json(f"chunk-size {problem} --gpu h200")
    assert {each["chunk_size"] for each in report["candidates"]} <= set(chunks)
    assert report["runtime_optimal_feasible"] in chunks
    measured = {each["measured_ms"]: each["chunk_size"] for each in report["candidates"] if each["measured_ms"]}
    assert (report["answer"]["chunk_size"], report["answer"]["basis"]) == (measured[min(measured)], "measured")
    assert report["answer"]["low_ms"] <= report["answer"]["time_ms"] <= report["answer"]["high_ms"]


def test_the_modelled_chunk_size_of_a_walk(run: Run) -> None:
    command = "chunk-size tfla --gpu h200 --impl fused_chunk"
    report = run.json(command)
    assert (report["model"], report["runtime_optimal_feasible"], report["regret_ms"]) == ("walks", 8192, 0)
    assert 0 < report["fitted"]["median_error"] < 0.1
    printed = run(f"{command} --all")
    whole, short = (
        f"{made.stored('mlstm_sig', 'fused_chunk', chunk_size=chunk, **MLSTM)['time_ms']:.4g}" for chunk in (8192, 512)
    )
    assert printed.splitlines()[1].startswith(
        f"use 8192 with fused_chunk: {whole} ms measured on h200_sxm (512, which the paper's model chooses: {short})"
    )
    assert "of the feasible ones 8192, by the walks of fused_chunk (fitted to " in printed
    assert "was not measured, the model says 0." in run("chunk-size tfla --gpu h200 --head-dim 320").splitlines()[1]
    assert "the model's choice, 8192, takes 0 ms more" in printed
    # Walks see idle multiprocessors as well: they may choose a length that was fastest nowhere yet.
    report = run.json("chunk-size tfla --gpu h200 --impl whole_state --seq-len 64k")
    assert (report["model"], report["answer"]["chunk_size"]) == ("walks", 65536)
    unnamed = run.json("chunk-size tfla --gpu b200")
    assert (unnamed["impl"], unnamed["model"], unnamed["answer"]["basis"]) == ("fused_chunk", "walks", "fitted")
    assert unnamed["answer"]["chunk_size"] == unnamed["runtime_optimal_feasible"] == 8192
    assert run.json("chunk-size gla --gpu h200")["fitted"]["model"] == "formulation"


def test_best_ranks_what_was_measured(run: Run) -> None:
    """The committed rows of an H200: whole_state is the fastest of ours, attention computes something else."""
    lines = run("best --gpu h200 --other-math").splitlines()
    fastest = made.stored("mlstm_sig", "whole_state", chunk_size=8192, **MLSTM)["time_ms"]
    assert lines[0] == "mlstm_sig fw B=8 T=8k H=16 dim 128/256 bf16"
    assert lines[1] == f"use whole_state, chunks of 8192: {fastest:.4g} ms measured on h200_sxm"
    assert lines[3].split() == ["kernel", "same", "heads", "chunk", "ms", "up", "to", "GiB", "roof"]
    assert max(map(len, lines[3:])) <= 80
    lightning = next(line for line in lines if line.startswith("lightning "))
    assert lightning.split()[2:4] == ["no", "32x128"], "heads are said where they are other ones"
    assert "x" not in next(line for line in lines if line.startswith("fused_chunk "))
    rows = run.json("best --gpu h200 --other-math")
    assert len(rows) == len(lines) - 4 < 25
    same = [row for row in rows if row["same_math"]]
    assert run.json("best --gpu h200") == same
    assert {row["op"] for row in same} == {"mlstm_sig"}
    by_name = {row["impl"]: row for row in same}
    measured = [row["time_ms"] for row in rows if row["basis"] == "measured"]
    assert measured == sorted(measured) and by_name["whole_state"]["time_ms"] == fastest
    assert by_name["whole_state"]["basis"] == "measured"
    assert 0.4 < by_name["whole_state"]["roof_fraction"] < 1
    assert by_name["mlstm_kernels.xl_chunk_siging"]["installed"] in (True, False)
    assert "attention" in {row["op"] for row in rows}
    assert len({row["op"] for row in rows if not row["same_math"]}) == sum(not row["same_math"] for row in rows)
    assert len(run.json("best --gpu h200 --all")) > len(rows)


def test_what_does_not_fit_in_memory_is_not_recommended(run: Run) -> None:
    """8 sequences of 1M tokens take 193 GiB of inputs and outputs alone; of 512k only the kernels that store little."""
    too_long = "--gpu h100 --seq-len 1M"
    assert run(f"best {too_long}") == (
        "mlstm_sig fw B=8 T=1M H=16 dim 128/256 bf16\n"
        "nothing to use on h100_sxm: whole_state, which needs least memory, does not fit in 80 GB "
        "(needs 209 at least)\n"
    )
    assert " whole_state 209, " in run.err and " fused_chunk 209, " in run.err
    assert " does not fit in 80 GB (needs 209 at least) on h100_sxm; " in run(f"predict {too_long}").splitlines()[1]
    assert run(f"chunk-size {too_long}").splitlines()[1] == (
        "whole_state does not fit in 80 GB (needs 209 at least) with any chunk length; 1048576 needs least"
    )
    rows = run.json("best --gpu h100 --seq-len 1M --batch 2 --other-math")
    fits = [row["does_not_fit"] is None for row in rows]
    assert fits == sorted(fits, reverse=True) and len({*fits}) == 2
    assert all((row["memory_bytes"] <= 80e9) == fit for row, fit in zip(rows, fits, strict=True))
    shown = run("best --gpu h100 --seq-len 1M --batch 2 --other-math")
    assert len(shown.splitlines()) == 4 + sum(fits)
    report = run.json("chunk-size tfla --impl xl_chunk --gpu a100_40 --seq-len 1M --batch 1")
    assert report["answer"]["does_not_fit"] is None
    assert any(each["memory_bytes"] > 40e9 for each in report["candidates"])


def test_memory_that_was_measured_of_other_sizes_is_what_is_modelled(run: Run) -> None:
    """Line by line a gated MLP keeps more than its inputs and outputs, as its rows say."""
    rows = {row["impl"]: row for row in run.json("best gated-mlp --gpu rtx_4090 --seq-len 64k")}
    assert rows["torch.eager"]["does_not_fit"] and not rows["fused"]["does_not_fit"]
    assert rows["torch.eager"]["memory_bytes"] > 2 * rows["fused"]["memory_bytes"]


def test_times_of_a_busy_machine_are_told_and_not_fitted(run: Run, tmp_path: Path) -> None:
    problem = ("--gpu", "h200", "--seq-len", "8k", "--results", tmp_path)
    rows = load_rows(store.HERE / "h200_sxm" / "tfla.parquet")
    changes = {"noise": "busy CPU: load 9", "time_ci_low_ms": None, "time_ci_high_ms": None}
    busy = [row | changes | {"time_ms": 50 * row["time_ms"]} for row in rows if row["time_ms"]]
    store.write_parquet(busy, tmp_path / "busy.parquet")
    for command in ("best", "predict", "chunk-size"):
        assert " on h200_sxm while it was busy" in run(command, *problem).splitlines()[1]
    # A quiet row, though older, comes first.
    store.write_parquet(rows, tmp_path / "quiet.parquet")
    for command in ("best", "predict", "chunk-size"):
        assert "busy" not in run(command, *problem).splitlines()[1]


@pytest.mark.parametrize(("gpu", "length"), [("h100", "4k"), ("h100", "64k"), ("h200", "16k"), ("b200", "256k")])
def test_the_formulation_chooses_among_chunk_lengths_that_were_fastest_somewhere(
    gpu: str, length: str, run: Run
) -> None:
    """It does not see that few chunks fill no device, so it would take the whole sequence as one."""
    rows = {(row["op"], row["impl"]): row for row in run.json(f"best rglru --gpu {gpu} --seq-len {length} --all")}
    assert {rows[op, "chunked"]["chunk_size"] for op in ("rglru", "linear_scan")} <= {256, 512}
    predicted = run.json(f"predict rglru --impl chunked --gpu {gpu} --seq-len {length}")
    assert predicted["chunk_size"] == rows["rglru", "chunked"]["chunk_size"]
    given = run.json(f"predict rglru --impl chunked --gpu {gpu} --seq-len {length} --chunk-size 4k")
    assert given["chunk_size"] == 4096


def test_a_measured_row_is_found_whose_chunk_length_does_not_count(run: Run, tmp_path: Path) -> None:
    """Of RG-LRU in torch, whose counts are those of a scan, the fastest chunk length that was measured."""
    rows = load_rows(store.HERE / "h200_sxm" / "rglru.parquet", where={"op": "rglru", "impl": "naive", "mode": "fw"})
    (row,) = (row for row in rows if row["seq_len"] == 2048)
    times = {64: 3.0, 128: 2.0, 256: 4.0}
    row |= {"impl": "torch", "device_accelerator": "cpu", "dtype": "fp32"}
    made = [row | {"chunk_size": n, "time_ms": ms, "case_id": str(n)} for n, ms in times.items()]
    store.write_parquet(made, tmp_path / "torch.parquet")
    sizes = [f"--{name.replace('_', '-')}={row[name]}" for name in ("seq_len", "batch", "channels")]
    problem = ("rglru", "--gpu", "cpu", "--results", tmp_path, *sizes)
    assert run.json("predict", *problem, "--impl", "torch")["measured_time_ms"] == 2.0
    (best,) = (each for each in run.json("best", *problem) if (each["op"], each["impl"]) == ("rglru", "torch"))
    assert (best["basis"], best["time_ms"], best["chunk_size"]) == ("measured", 2.0, 128)


@pytest.mark.parametrize(
    ("gpu", "gone"),
    [("mi300x", ("whole_state", "flash_attn.v3", "flash_attn.v4")), ("a100", ("whole_state", "flash_attn.v4"))],
)
def test_what_does_not_run_on_an_accelerator_is_left_out_and_said(gpu: str, gone: tuple[str, ...], run: Run) -> None:
    rows = run.json(f"best --gpu {gpu} --all")
    there = {row["impl"] for row in rows}
    # FlashAttention-2 and Mamba document builds for ROCm.
    assert not there & {*gone} and {"fused_chunk", "flash_attn.v2", "mamba_ssm.selective_scan"} <= there
    run(f"best --gpu {gpu} --all")
    number, names = re.search(r"^not known to run on \w+: (\d+) kernels \((.*)\)$", run.err, re.MULTILINE).groups()
    assert {*gone} <= {*names.split(", ")} and len(names.split(", ")) == int(number)


def test_modes_and_dtypes_without_rows_are_told_from_others(run: Run) -> None:
    """A backward call is a forward and backward one less a forward one; fp16 is bf16."""
    both, forward = (run.json(f"predict --gpu h200 --mode {mode}")["measured_time_ms"] for mode in ("fwbw", "fw"))
    backward, half = (run.json(f"predict --gpu h200 {option}") for option in ("--mode bw", "--dtype fp16"))
    assert backward["time_ms"] == pytest.approx(both - forward) and half["time_ms"] == pytest.approx(forward)
    assert backward["measured_time_ms"] is half["measured_time_ms"] is None
    assert "on h200_sxm (fwbw minus fw)" in backward["interval"] and "on h200_sxm (bf16)" in half["interval"]
    for option in ("--state-dtype bf16", "--batch 3"):
        assert run.json(f"predict --gpu h200 {option}")["measured_time_ms"] is None
    other = run.json("predict --gpu h200 --mode bw --batch 3")
    assert other["low_ms"] < other["time_ms"] < other["high_ms"] and "(fwbw minus fw)" in other["interval"]


@pytest.mark.parametrize("problem", ["selective_scan", "attention --head-dim 128 --impl flash_attn.v4", "gla"])
def test_other_numbers_of_tokens_are_predicted_at_the_same_efficiency(problem: str, run: Run) -> None:
    """All rows are of 65,536 tokens: that a part of their time is the same for any number of tokens is not known."""
    few, many = (run.json(f"predict {problem} --gpu h200 --seq-len 8k --batch {batch}") for batch in ("8", "512"))
    assert many["time_ms"] == pytest.approx(64 * (few["measured_time_ms"] or few["time_ms"]), rel=0.2)
    assert many["high_ms"] / many["low_ms"] > 1.3 * few["high_ms"] / few["low_ms"]
    heads = "" if problem == "selective_scan" else "--num-heads 1"
    tiny = run.json(f"predict {problem} --gpu h200 --seq-len 64 --batch 1 {heads}")
    assert LAUNCH_MS <= tiny["low_ms"] <= tiny["high_ms"] and tiny["low_ms"] <= (tiny["time_ms"] or tiny["high_ms"])


def test_best_says_which_rows_are_of_other_sizes(run: Run) -> None:
    """lightning-attn holds heads of 32 to 128 alone, where it was measured."""
    run("best lightning --gpu h200 --head-dim 256")
    elsewhere, left = re.findall(r"^(?:measured .* at other sizes only|left out): (.*)$", run.err, re.MULTILINE)
    assert elsewhere.endswith("lightning_attn.v2 at B=8 T=8k H=32 dim 128/128") and "fused_chunk" not in elsewhere
    assert left == "lightning_attn.v2 cannot run this: head_dim_qk must be a power of two from 32 to 128, got 256"
    run("best lightning --gpu h200")
    assert "other sizes" not in run.err and "left out" not in run.err


def test_best_marks_what_was_not_measured(run: Run) -> None:
    """A kernel without a row is not preferred to one that was measured, however fast it might be."""
    printed = run("best gated-mlp --gpu h200").splitlines()
    sizes = {"batch": 1, "seq_len": 65536, "d_model": 4096, "d_ff": 14336}
    impls = ("fused", "torch.inplace", "torch.compile", "torch.eager")
    fastest = min((made.stored("gated_mlp", impl, **sizes) for impl in impls), key=lambda row: row["time_ms"])
    assert printed[1] == f"use {fastest['impl']}: {fastest['time_ms']:.4g} ms measured on h200_sxm"
    predicted = next(line for line in printed if line.startswith("fused_save "))
    assert re.search(r" ~\d+(\.\d)? +\d+", predicted)
    assert any(" >" in line for line in printed), "bounds of what has no rows"
    narrow = "best --gpu h100 --embedding 2048 --state-size 64 --seq-len 4k"
    said = r".*\nuse \w+, chunks of \d+: 0\.\d+ ms \(0\.\d+ to \d\.\d+\) predicted for h100_sxm\n"
    assert re.match(said, run(narrow))
    rows = run.json(narrow)
    assert {(row["num_heads"], row["head_dim_qk"]) for row in rows if row["same_math"]} == {(8, 64)}
    assert {row["channels"] for row in run.json("best rglru --embedding 2048") if row["same_math"]} == {2048}
    unknown = run("best rglru --like recurrentgemma-9b --gpu h200").splitlines()[1]
    assert "predicted for h200_sxm; perhaps faster, too few rows tell: fused (~0." in unknown


def test_what_was_wrong_there_is_not_recommended(tmp_path: Path, run: Run) -> None:
    """fla's HGRN has been measured for this very case, with an output error above the bound."""
    told = run("predict rglru --impl fla.chunk_hgrn --gpu h200")
    wrong = {"op": "rglru", "impl": "fla.chunk_hgrn", "mode": "fw", "dtype": "bf16", "status": "incorrect"}
    rows = load_rows(store.HERE / "h200_sxm" / "rglru.parquet", where=wrong)
    assert any(f"; incorrect there: {row['reason']}\n" in told for row in rows)
    assert "fla.chunk_hgrn" not in {row["impl"] for row in run.json("best --op rglru --gpu h200")}
    assert "fla.chunk_hgrn" in {row["impl"] for row in run.json("best --op rglru --gpu a100")}
    # An MLP's tokens are stored as one sequence.
    wrong = made.row("gated_mlp", "fused", seq_len=65536, status="incorrect", reason="is off")
    made.write([wrong], tmp_path / "r.parquet")
    told = run("predict gated-mlp --impl fused --gpu h200", "--results", tmp_path, "--no-fit")
    assert "; incorrect there: is off\n" in told


def test_best_does_not_choose_where_nothing_is_known(run: Run) -> None:
    of_others = ("best", "--mode", "step", "--gpu", "h200", "--results", store.HERE / "h200_sxm" / "gated-mlp.parquet")
    assert re.match(r".*\nno rows to choose by: fused_chunk takes at least 0\.0\d+ ms on h200_sxm\n", run(*of_others))
    assert {row["time_ms"] for row in run.json(*of_others)} == {None}


def test_decoding_is_answered_from_its_rows(tmp_path: Path, run: Run) -> None:
    rows = made.decoding()
    path = made.write(rows, tmp_path / "r.parquet")
    problem = ("--mode", "step", "--context", "32k", "--batch", 16, "--gpu", "h200", "--results", path)
    found = {(row["op"], row["impl"]): row for row in run.json("best tfla", *problem, "--all")}
    wanted = {
        "flash_attn.v2": ("attention", 32768),
        "fused_chunk": ("mlstm_sig", None),
        "mamba_ssm.state_update": ("mamba2_ssd", None),
    }
    for impl, (op, context) in wanted.items():
        (row,) = (
            row for row in rows
            if (row["op"], row["impl"], row["batch"], row["context"]) == (op, impl, 16, context)
            and row["head_dim_v"] == {"mlstm_sig": 256, "attention": 128, "mamba2_ssd": 64}[op]
        )  # fmt: skip
        assert found[op, impl]["basis"] == "measured"
        assert found[op, impl]["time_ms"] == row["time_ms"]
    assert found["attention", "flash_attn.v2"]["context"] == 32768
    # Between measured contexts the fit answers, which knows that the cache is what is read.
    predicted = run.json("predict attention", *problem[:3], "64k", *problem[4:], "--impl", "flash_attn.v2")
    assert predicted["time_ms"] == pytest.approx(2 * found["attention", "flash_attn.v2"]["time_ms"], rel=0.2)
    table = run("compare context:8k,impl:flash_attn.v2 context:8k,impl:torch.sdpa_cudnn", "--results", path)
    assert "B=16 T=1 context 8k" in table


def chunks_and_lengths(chunks: tuple[int, ...], lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return a row of our mLSTMsig for every chunk length and sequence length."""
    return [made.row("mlstm_sig", "fused_chunk", chunk_size=c, seq_len=t) for c in chunks for t in lengths]


def test_predict_gives_an_interval(tmp_path: Path, run: Run) -> None:
    row = run.json("predict tfla --gpu b200 --no-fit")
    assert 0 < row["low_ms"] < row["high_ms"]
    assert row["time_ms"] is None
    assert row["low_ms"] == max(row["flops_ms"], row["bytes_ms"])
    assert row["high_ms"] == pytest.approx(row["flops_ms"] + row["bytes_ms"])
    made.write(chunks_and_lengths((64, 128, 256, 512), (1024, 8192, 65536)), tmp_path / "r.parquet")
    fitted = run.json("predict tfla --gpu b200", "--results", tmp_path)
    assert fitted["low_ms"] <= fitted["time_ms"] <= fitted["high_ms"]
    assert (fitted["fitted_on"], fitted["fitted_rows"]) == ("h200_sxm", 12)
    assert fitted["median_error"] < 0.02
    assert fitted["low_ms"] < fitted["high_ms"]
    assert ",time_ms," in run("predict tfla --format csv")
    bound = run("predict tfla --gpu b200 --no-fit")
    assert " ms, no fit; not measured there\nat least: " in bound and "full overlap to no overlap" in bound


def test_predict_validates_itself(run: Run) -> None:
    printed = run("predict gated-mlp --validate").splitlines()
    ways = ["h100_sxm", "h100_sxm to h200_sxm", "h100_sxm to h200_sxm, calibrated", "h200_sxm", "h200_sxm to h100_sxm"]
    for way, line in zip(ways, printed, strict=False):
        said = (
            rf"{way}: (.*)% of \d+ rows left out lie in their 90 % intervals; median error .*%, intervals 1.* each way"
        )
        share = re.fullmatch(said, line)
        assert share is not None and 85 <= float(share[1]) <= 100
    assert re.fullmatch(
        r"of \d+ implementations \d+ hold as many as 85 to 95 % come to by chance, . fewer, . more", printed[6]
    )
    (head,) = (n for n, line in enumerate(printed) if line.startswith("op "))
    assert printed[head].split() == ["op", "impl", "fit", "rows", "held", "chance", "error", "width"]
    assert {line.split()[0] for line in printed[head + 1 : head + 11]} == {"gated_mlp", "projections"}
    rows = run.json("predict wkv4 --validate --impl scan")
    assert {(row["impl"], row["mode"], row["dtype"]) for row in rows} == {
        *(("scan", mode, dtype) for mode in ("fw", "fwbw") for dtype in ("bf16", "fp32")),
        ("scan", "step", "bf16"),
    }


MAMBA = "predict tfla --op mamba2_ssd --impl mamba_ssm.chunk_scan --head-dim 64 --chunk-size 128"


def test_predict_prints_what_was_measured_first(run: Run) -> None:
    lines = run(f"{MAMBA} --gpu h200").splitlines()
    assert len(lines) == 4
    sizes = {"batch": 8, "seq_len": 8192, "num_heads": 64, "head_dim_qk": 128, "head_dim_v": 64, "chunk_size": 128}
    measured = made.stored("mamba2_ssd", "mamba_ssm.chunk_scan", **sizes)
    row = run.json(f"{MAMBA} --gpu h200")
    commit = measured["git_commit"]
    said = (
        f"measured {measured['time_ms']:.4g} ms on h200_sxm, commit {commit[:10]}",
        f"the model says {row['predicted_ms']:.4g}",
    )
    assert all(part in lines[1] for part in said)
    assert (row["measured_time_ms"], row["measured_git_commit"]) == (measured["time_ms"], commit)
    assert "; not measured there\nlow to high: 90 %, from 29 rows of its own on h200" in run(f"{MAMBA} --gpu h100")
    fitted = run("predict tfla --gpu h200").splitlines()
    # Its own chunk length: the whole sequence.
    assert ", chunks of 8192: measured " in fitted[1]
    assert "fitted_rows" not in "".join(fitted)
    assert "\nfitted_rows " in run("predict tfla --gpu h200 --all")


def test_answers_say_the_versions_of_their_rows_and_those_that_are_here(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a missing Triton keeps from running is not recommended for here, and no Triton here changes no answer."""
    fast, slow = (made.stored("mlstm_sig", impl, chunk_size=8192, **MLSTM) for impl in ("whole_state", "fused_chunk"))
    there = {name: fast[f"{name}_version"] for name in ("torch", "triton")}
    measured, old = "measured with torch {torch}, triton {triton}".format(**there), {**there, "triton": "3.5.0"}
    reason = WHOLE_STATE_FORM.why_not_with(old)
    here = f", with which fused_chunk takes {slow['time_ms']:.4g} ms"
    answers = []
    for versions, said in (
        ({}, ""),
        (there, ""),
        ({"torch": "2.0.0"}, "; here is torch 2.0.0"),
        ({**there, "torch": there["torch"].partition("+")[0]}, ""),
        (old, f"; here is triton 3.5.0{here}: {reason}"),
    ):
        monkeypatch.setattr(baselines, "installed_versions", versions.copy)
        best, predicted = run("best --gpu h200").splitlines(), run("predict --gpu h200").splitlines()
        assert (best[2], predicted[-1]) == (measured + said, measured + said.replace(here, ""))
        answers.append(best[1])
    assert len(set(answers)) == 1 and answers[0].startswith("use whole_state, ")
    # The last pretended versions, in JSON.
    (ranked,) = (row for row in run.json("best --gpu h200") if row["same_math"] and row["impl"] == "whole_state")
    for row in (ranked, run.json("predict --gpu h200")):
        told = row["torch_version"], row["triton_version"], row["missing"]
        assert told == (there["torch"], there["triton"], reason)
    # What was not measured there says all versions of the rows that its time is predicted from, a bound none.
    rows = load_rows(store.HERE, ("torch_version", "triton_version"), {"op": "mlstm_sig", "impl": "xl_chunk"})
    (told,) = (each for each in run("predict --gpu b200 --impl xl_chunk").splitlines() if each.startswith("predicted"))
    assert {row["triton_version"] for row in rows} >= {
        *re.findall(r"[\d.]+", told.partition("triton")[2].split(";")[0])
    }
    assert len(run("predict --gpu b200 --impl xl_chunk --no-fit").splitlines()) == 3


def test_best_says_which_packages_fail_with_the_versions_here(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "availability", lambda _: None)
    monkeypatch.setattr(baselines, "installed_versions", lambda: {"triton": "3.9.0", "mlstm-kernels": "2.0.6"})
    (row,) = (row for row in run.json("best --gpu h200") if row["impl"] == "mlstm_kernels.xl_chunk_siging")
    assert not row["installed"] and "make_block_ptr" in row["missing"]


@pytest.mark.parametrize("command", ["best tfla", "predict tfla", "chunk-size tfla"])
def test_times_on_amd_say_that_no_row_of_theirs_stands_behind_them(command: str, run: Run) -> None:
    run(f"{command} --gpu mi300x")
    assert "no row of AMD's GPUs stands behind times of mi300x: they may be far off" in run.err
    run(f"{command} --gpu b200")
    assert "no row of" not in run.err


@pytest.mark.parametrize(
    ("operation", "impl", "sizes"),
    [
        ("rglru", "fused", {"channels": 1024}),
        ("wkv4", "scan", {"channels": 2048}),
        ("gated_mlp", "fused", {"d_model": 4096, "d_ff": 14336}),
        ("attention", "flash_attn.v2", {"num_heads": 32, "head_dim_qk": 128, "head_dim_v": 128}),
        ("mamba2_ssd --like mamba2-2.7b", "fused_chunk", {"num_heads": 80, "head_dim_qk": 128, "head_dim_v": 64}),
        ("--like xlstm-7b", "fused_chunk", {"num_heads": 8, "head_dim_qk": 256, "head_dim_v": 512}),
        ("tfla --num-heads 8", "fused_chunk", {"num_heads": 8, "head_dim_qk": 256, "head_dim_v": 512}),
        ("gla --embedding 2k --num-heads 4", "fla.chunk_gla", {"num_heads": 4, "head_dim_qk": 256, "head_dim_v": 512}),
        ("tfla --head-dim 320", "fused_chunk", {"num_heads": 12, "head_dim_qk": 160, "head_dim_v": 320}),
        ("retention --embedding 1536", "fused_chunk", {"num_heads": 3, "head_dim_qk": 256, "head_dim_v": 512}),
        ("selective_scan", "mamba_ssm.selective_scan", {"head_dim_qk": 16, "channels": 4096}),
        ("lightning", "lightning2", {"num_heads": 32, "head_dim_qk": 128, "head_dim_v": 128}),
        (
            "tfla --seq-len 64",
            "fused_chunk",
            {"num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256, "chunk_size": 64},
        ),
    ],
)
def test_predict_knows_every_counted_operation(operation: str, impl: str, sizes: dict[str, int], run: Run) -> None:
    row = run.json(f"predict {operation} --gpu l40s --no-fit")
    size_names = ("num_heads", "head_dim_qk", "head_dim_v", "chunk_size", "channels", "d_model", "d_ff")
    assert {name: row[name] for name in size_names if name in row and (name != "chunk_size" or name in sizes)} == sizes
    assert row["impl"] == impl
    assert 0 < row["low_ms"] < row["high_ms"]


def test_measured_roofs_are_explained(run: Run) -> None:
    spec = run.json("chunk-size tfla --gpu h200")
    assert run.err == ""
    measured = run.json("chunk-size tfla --gpu h200_sxm --roofs measured")
    assert run.err == f"--roofs measured: {measured['roofs']}\n"
    assert spec["roofs"] == "specification"
    assert spec["accelerator_part"] == "H200 141 GB HBM3e SXM5"
    assert "H200" in measured["roofs"]
    assert measured["accelerator_intensity"] != spec["accelerator_intensity"]
    # Those of a CPU always are.
    assert "measured" in run.json("predict tfla --gpu cpu --dtype fp32 --no-fit")["roofs"]


def test_figures_are_written(tmp_path: Path, run: Run) -> None:
    results = made.write(chunks_and_lengths((64, 128), (1024, 8192)), tmp_path / "r.parquet")
    for arguments in (
        ("plot", "runtime", results, "-o", tmp_path / "a.png"),
        ("plot", "chunk-size", results, "-o", tmp_path / "b.svg", "--seq-len", "1k", "--mode", "fw"),
        ("roofline", results, "--gpu", "h200,b200,a100", "--seq-len", "8k", "-o", tmp_path / "c.pdf"),
        ("plot", "flops", "-o", tmp_path / "e.svg", "--width", "3.3"),
        ("plot", "model", "-o", tmp_path / "f.png", "--gpu", "b200", "--dpi", "60"),
        ("plot", "model", results, "-o", tmp_path / "g.png", "--head-dim", "256"),
        ("plot", "intensity-optimal", "-o", tmp_path / "h.pdf", "--op", "simple_gla", "--causal-factor", "1"),
        ("roofline", results, "--seq-len", "8k", "-o", tmp_path / "d.png", "--roofs", "measured"),
    ):
        assert Path(run(*arguments).strip()).stat().st_size > 5000


@pytest.mark.parametrize(("command", "message"), refused_commands("input"))
def test_bad_input_is_one_clear_line_and_exit_2(command: str, message: str, lrbench: Lrbench) -> None:
    assert message in refused(lrbench, command)


HEAVY = {"torch", "triton", "matplotlib", "pandas"}
NUMERICS = HEAVY | {"numpy", "pyarrow", "sympy"}


@pytest.mark.speed
@pytest.mark.parametrize(
    ("arguments", "heavy", "limit_s"),
    [
        ("gpus", HEAVY, 1.0),
        ("chunk-size tfla --gpu h200 --seq-len 64k --mode fwbw", HEAVY, 1.0),
        ("chunk-size tfla --gpu h200 --roofs measured", HEAVY, 1.0),
        ("count rglru --channels 1024", NUMERICS, 1.0),
        ("count tfla --formulation walk --seq-len 64k --chunk-size 64k", NUMERICS, 1.0),
        ("best --gpu h100 --seq-len 8k --mode fwbw", HEAVY, 2.0),
    ],
)
def test_answers_come_within_a_second_or_two(
    arguments: str, heavy: set[str], limit_s: float, tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Python keeps what it compiled of a module, as it does for a user, even if the tests' environment forbids it."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path_factory.getbasetemp() / "compiled"))
    code = (
        "import sys; from lrbench.cli import app;"
        f"app({[*arguments.split(), '--format', 'json']!r}, standalone_mode=False);"
        f"heavy = {heavy!r} & set(sys.modules); assert not heavy, heavy"
    )
    run = functools.partial(subprocess.run, [sys.executable, "-c", code], check=True, capture_output=True)
    assert any(full_speed_seconds(run) < limit_s for _ in range(5))
