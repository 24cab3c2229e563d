"""lrbench profile, with an ncu that is a script: one run for all cases, and every case's kernels in its row."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
import torch

from lrbench.bench.drive import ncu, session
from lrbench.bench.drive.ncu import KernelCounts
from lrbench.bench.drive.profiling import ProfileRow, split_cases
from lrbench.bench.worker import worker
from lrbench.kernels.baselines.spec import Runnable
from lrbench.results import store
from lrbench.tests import ROOT
from lrbench.tests.bench import faults
from lrbench.tests.bench.runs import H200, PROCESSOR
from lrbench.tests.command_line import Lrbench, refused, script

FAKE_NCU = (ROOT / "tests/data/fake_ncu.txt").read_text()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put an ncu on PATH whose cases of some sequence lengths fail or kill the worker, or which only says something."""

    def install(*, said: str = "", fails: int = -1, dies: int = -1) -> Path:
        record = tmp_path / "record.json"
        text = FAKE_NCU.format(python=sys.executable, record=str(record), said=said, fails=fails, dies=dies)
        script(tmp_path / "bin" / "ncu", text)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        return record

    return install


@pytest.fixture
def profile(lrbench: Lrbench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Lrbench:
    """Run the command as on an H200: three lengths of the engine's kernel, unless options say otherwise."""
    monkeypatch.setattr(session, "probe_environment", lambda: H200)
    three = "--impl fused_chunk --seq-len 1k,2k,4k --head-dim 256 --chunk-size 256"

    def run(*options: object, cases: str = three) -> tuple[int, str, str]:
        return lrbench(f"profile {cases}", "--output", tmp_path / "out", *options)

    return run


def test_one_run_counts_every_case(fake, profile: Lrbench, tmp_path: Path) -> None:
    record = fake()
    code, out, _ = profile("--format", "json")
    assert code == 0
    (path,) = (tmp_path / "out" / store.OTHER).iterdir()
    assert path.name.endswith(".profile.parquet")
    rows = store.read_file(path, ProfileRow).to_pylist()
    assert rows == json.loads(out)
    assert [row["seq_len"] for row in rows] == [1024, 2048, 4096]
    for row in rows:
        assert (row["status"], row["launches"]) == ("ok", 2)
        assert row["kernel_names"] == ["states_kernel", "walk_kernel"]
        assert row["kernel_tensor_flops"] == [1e9, row["seq_len"] * 1e6]
        assert row["measured_tensor_flops"] == 1e9 + row["seq_len"] * 1e6
        assert row["dram_read_bytes"] == row["dram_write_bytes"] == row["measured_tensor_flops"]
        assert row["l2_bytes"] is None, "the fake device has no such counter"
        assert row["tensor_flops_ratio"] == pytest.approx(row["measured_tensor_flops"] / row["executed_tensor_flops"])
        assert row["bytes_ratio"] == pytest.approx(2 * row["dram_read_bytes"] / row["executed_bytes"])
        assert "tensor FLOPs are" in row["explanation"]
        assert row["last_cache_bytes"] == 62_914_560
        assert (row["ncu_version"], row["device_name"]) == ("2025.3.1.0", "NVIDIA H200")
    said = json.loads(record.read_text())
    assert said["locale"] == "C"
    asked = said["arguments"][said["arguments"].index("--metrics") + 1]
    assert asked == "sm__ops_path_tensor_src_bf16_dst_fp32.sum,dram__bytes_read.sum,dram__bytes_write.sum"


def test_a_case_that_fails_or_kills_the_worker_is_a_row(fake, profile: Lrbench) -> None:
    fake(fails=1024, dies=4096)
    code, out, _ = profile("--format", "json")
    rows = json.loads(out)
    assert (code, [row["status"] for row in rows]) == (1, ["error", "ok", "crash"])
    assert [row["measured_tensor_flops"] for row in rows] == [None, 1e9 + 2048e6, None]
    assert rows[0]["executed_tensor_flops"] > 0
    code, out, _ = profile()
    assert (code, out.count("states_kernel")) == (1, 1)
    assert "case 0: error: RuntimeError: out of registers" in out and "case 1: tensor FLOPs are" in out


def test_a_case_that_cannot_run_here_is_not_tried(fake, profile: Lrbench) -> None:
    fake()
    code, out, _ = profile(
        "--format", "json", cases="--impl limit_chunk --seq-len 1k --head-dim 256 --chunk-size 64,1k"
    )
    rows = [(row["chunk_size"], row["status"]) for row in json.loads(out)]
    assert (code, rows) == (1, [(64, "ok"), (1024, "unsupported")])


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission\nx", "ERR_NVGPUCTRPERM - no permission"),
        ("==ERROR== no permission\n==WARNING== No kernels were profiled.\nx", "No kernels were profiled."),
        ("==PROF== Connected\nSegmentation fault", "Segmentation fault"),
    ],
)
def test_what_ncu_says_is_passed_on(fake, profile: Lrbench, tmp_path: Path, said: str, message: str) -> None:
    fake(said=said)
    assert profile()[::2] == (1, f"profiling on NVIDIA H200: 3 cases\nlrbench: ncu failed: {message}\n")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_ncu_runs(fake, profile: Lrbench, tmp_path: Path) -> None:
    fake(said="ncu ran")
    (tmp_path / "out").write_text("a file")
    code, _, err = profile()
    assert (code, err.startswith("lrbench: --output must be a folder that can be written")) == (2, True)


def test_a_run_that_hangs_is_ended(profile: Lrbench, tmp_path: Path) -> None:
    ncu = script(tmp_path / "ncu", 'case "$*" in *--log-file*) sleep 300;; esac')
    code, _, err = profile("--ncu", ncu, "--timeout", 0.5)
    assert (code, "ncu was not done within 0.5 s; --timeout gives it more" in err) == (1, True)


def test_a_dry_run_prints_the_command_and_leaves_its_requests(
    profile: Lrbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    monkeypatch.setattr(session.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setattr(session, "probe_environment", lambda: pytest.fail("looked for a GPU"))
    code, out, _ = profile("--dry-run")
    words = shlex.split(out)
    assert (code, words[0], "PYTHONSAFEPATH=1" in words) == (0, "env", True)
    files = [str(tmp_path / f"{name}.jsonl") for name in ("requests", "replies")]
    assert words[-4:] == ["lrbench.bench.worker.serve", "files", *files]
    assert {"--clock-control", ",".join(ncu.METRICS)} < set(words[words.index("ncu") :])
    requests = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [request["items"][0]["case"]["seq_len"] for request in requests] == [1024, 2048, 4096]
    assert {request["limits"]["action"] for request in requests} == {"profile"}


def test_without_ncu_or_a_gpu_there_is_one_clear_line(fake, profile: Lrbench, monkeypatch: pytest.MonkeyPatch) -> None:
    fake()
    monkeypatch.setattr(session, "probe_environment", lambda: PROCESSOR)
    monkeypatch.setattr(ncu, "find_ncu", lambda: "/bin/sh")
    missing = "ncu (Nsight Compute) must be on PATH or named with --ncu, got "
    for options, message in (
        ((), "profile needs a GPU, got a processor"),
        (("--ncu", "/nowhere/ncu"), f"{missing}/nowhere/ncu"),
        (("--op", "mlstm"), "op must be one of"),
    ):
        assert message in refused(profile, *options)
    monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    assert refused(profile) == f"lrbench: {missing}none"


def test_the_worker_is_reached_through_ncu(profile: Lrbench, tmp_path: Path) -> None:
    """An ncu that only starts the program: the worker reads the requests and answers each; here it finds no GPU."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: the worker would find it")
    rest = 'while [ "$1" != --log-file ]; do shift; done; shift 2; exec "$@"'
    passing = script(tmp_path / "ncu", f'case "$*" in *--log-file*) ;; *) exit;; esac\n{rest}')
    cases = "--impl torch --dtype fp32 --seq-len 32,64 --head-dim 32 --chunk-size 32 --num-heads 1 --batch 1"
    code, out, _ = profile("--ncu", passing, "--format", "json", cases=cases)
    found = [(row["seq_len"], row["status"], "CUDA" in row["reason"]) for row in json.loads(out)]
    assert (code, found) == (1, [(32, "error", True), (64, "error", True)])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("fw", ["call", "call", "synchronize", "start", "marker", "call", "synchronize", "stop"]),
        # The forward pass is no part of a backward call.
        ("bw", [*["call"] * 4, "synchronize", "start", "marker", "synchronize", "stop"]),
    ],
)
def test_a_call_is_profiled_warm_and_behind_its_marker(
    mode: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    x = torch.ones(2, requires_grad=True)

    def forward() -> torch.Tensor:
        events.append("call")
        return x * 2

    prepared = worker.Prepared(runnable=Runnable(forward=forward, leaves={"x": x}), inputs=[x])
    monkeypatch.setattr(worker, "prepare", lambda *_, **__: prepared)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: events.append("marker"))
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: events.append(name))
    worker.Worker("cpu").profile(faults.planned("right", mode=mode))
    assert events == expected


def kernels(*names: str) -> list[KernelCounts]:
    return [KernelCounts(name=name, values={}) for name in names]


def test_cases_are_told_apart_by_their_markers() -> None:
    split = split_cases(kernels("spin_kernel", "a", "b", "spin_kernel", "spin_kernel", "a"), 3)
    assert [[kernel.name for kernel in case] for case in split] == [["a", "b"], [], ["a"]]
    part = split_cases(kernels("spin_kernel", "a", "spin_kernel", "b"), 1, died=True)
    assert [[kernel.name for kernel in case] for case in part] == [["a"]]
    for names, number in ((("a", "spin_kernel"), 1), (("spin_kernel", "a"), 2), (("spin_kernel", "spin_kernel"), 1)):
        with pytest.raises(RuntimeError, match=r"ncu must report|must follow a marker"):
            split_cases(kernels(*names), number)


@pytest.mark.gpu
def test_hardware_counters_agree_with_the_counts(tmp_path: Path, lrbench: Lrbench) -> None:
    """The project's bar: tensor FLOPs of our kernels within 1 % of the counter, bytes within 15 % or explained."""
    if ncu.find_ncu() is None:
        pytest.skip("ncu is not installed")
    cases = "--impl fused_chunk --mode fw,fwbw --seq-len 8k --head-dim 256 --chunk-size 1k --timeout 280"
    code, out, err = lrbench(f"profile {cases}", "--output", tmp_path, "--format", "json")
    if "ncu failed" in err:
        pytest.skip(f"the counters cannot be read here: {err}")
    assert code == 0
    for row in json.loads(out):
        assert abs(row["tensor_flops_ratio"] - 1) < 0.01, row
        assert abs(row["bytes_ratio"] - 1) < 0.15 or "bytes are" in row["explanation"], row
