"""The command line from outside: output, exit codes and messages."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lrbench.analysis.accelerators import known
from lrbench.bench.drive import session
from lrbench.bench.drive.run import Outcome
from lrbench.bench.drive.session import conclusion, exit_code
from lrbench.bench.request import Request, SweepOptions
from lrbench.results import store
from lrbench.results.schema import RECORD_COLUMNS
from lrbench.tests import ROOT
from lrbench.tests.command_line import (
    CALL,
    ENVIRON,
    Lrbench,
    Run,
    reader_leaves,
    refused,
    refused_commands,
    run_python,
    without_styles,
)
from lrbench.tests.results.test_store import RECORD

pytestmark = pytest.mark.usefixtures("one_look_at_the_machine")

SMALL = "--impl torch --seq-len 64 --head-dim 32 --chunk-size 16,32,128 --num-heads 1 --batch 1 --mode fw --budget 0"
TINY = f"sweep --kernel tfla --op mlstm_sig {SMALL} --no-calibrate"


def call(command: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, as a sweep's workers want it."""
    words = (*CALL, *command.split(), *map(str, arguments))
    return subprocess.run(words, capture_output=True, text=True, env={**ENVIRON, **variables}, timeout=240)


Swept = tuple[subprocess.CompletedProcess[str], Path]
"""What a sweep's command ended with, and the folder of its rows."""


@pytest.fixture(scope="module")
def tiny_sweep(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    folder = tmp_path_factory.mktemp("sweep")
    return call(f"{TINY} --gpu h100", "--output", folder), folder


def test_sweep_prints_a_table_and_leaves_a_file(tiny_sweep: Swept) -> None:
    finished, folder = tiny_sweep
    assert finished.returncode == 0, finished.stderr
    (path,) = folder.iterdir()
    said = finished.stderr.splitlines()
    assert said[0].startswith("measuring on ")
    if "(cpu)" in said[0]:
        assert said[1].startswith("no GPU here: rows are CPU measurements of the portable implementations")
        assert "NVIDIA H100" in said[1]
    assert said[-1] == f"results: {path}"
    table = store.read_results(path).to_pylist()
    assert [(row["chunk_size"], row["status"]) for row in table] == [(16, "ok"), (32, "ok"), (128, "ok")]
    assert {row["accelerator"] for row in table} == {"h100_sxm"}
    best = min(table, key=lambda row: row["time_ms"])
    assert f"{best['time_ms']:.4g} @{best['chunk_size']}" in finished.stdout
    assert "cases: 3 ok" in finished.stdout


def test_an_operation_that_needs_another_device_is_said(tmp_path: Path, lrbench: Lrbench) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, _, errors = lrbench("sweep --op gla --no-calibrate", "--output", tmp_path)
    assert code == 2
    assert errors.startswith("lrbench: no case is left on ")
    assert "fla.chunk_gla, fla.fused_chunk_gla run on cuda" in errors


def test_a_full_disk_is_no_regression() -> None:
    """Exit code 1 means that a check found a regression, so no other failure may end with it."""
    with open("/dev/full", "w") as full:
        finished = subprocess.run([sys.executable, "-m", "lrbench", "gpus"], stdout=full, stderr=subprocess.PIPE)
    assert (finished.returncode, finished.stderr) == (2, b"lrbench: [Errno 28] No space left on device\n")


def test_characters_that_an_encoding_lacks_are_written_as_escapes() -> None:
    """In the C locale a table is not cut short where a claim has a sign of no ASCII."""
    shown = call("reproduce lightning-constant --gpu h200", PYTHONIOENCODING="ascii").stdout
    assert "\\u2264 1.1" in shown


def test_completion_as_a_module_is_of_the_command() -> None:
    shown = call("--show-completion bash").stdout
    assert "complete -o default -F _lrbench_completion lrbench" in shown and "python" not in shown


@pytest.mark.usefixtures("idle")
def test_a_sweep_ends_with_the_fastest_of_each_package_in_turn(tmp_path: Path, run: Run) -> None:
    """Once: --resume finds the pair there."""
    asked = f"sweep --kernel tfla --op simple_gla,attention {SMALL} --impl torch,torch.sdpa_cpu --no-calibrate --pairs"
    run(f"{asked} --dry-run")
    assert "of these about 7 s at the end, to time the fastest of each package in turn (--no-pairs)" in run.err
    shown = run.json(asked, "--output", tmp_path)
    assert "timing the fastest of each package at each problem in turn: 2 cases" in run.err
    pairs, swept = sorted(tmp_path.glob("*.parquet"))
    assert pairs.name.startswith("pairs-tfla-") and len(store.read_results(swept)) == 4
    in_turn = store.read_results(pairs).to_pylist()
    assert {row["op"] for row in in_turn} == {"simple_gla", "attention"}
    assert len({row["pair_id"] for row in in_turn} - {None}) == 1
    assert [row["time_ms"] for row in shown if row["pair_id"]] == [row["time_ms"] for row in in_turn]
    run(f"{asked} --resume", "--output", tmp_path)
    assert len(list(tmp_path.glob("*.parquet"))) == 2


@pytest.mark.usefixtures("idle")
def test_resume_has_nothing_left(tiny_sweep: Swept, run: Run) -> None:
    folder = tiny_sweep[1]
    before = set(folder.iterdir())
    output = run(f"{TINY} --resume", "--output", folder)
    assert run.err.splitlines()[-1].startswith("3 of 3 cases were already there, ")
    assert run.err.endswith(": nothing is left to measure\n")
    assert set(folder.iterdir()) == before
    assert "cases: 3 ok" in output
    rows = run.json(f"{TINY} --chunk-size 32,64 --resume", "--output", folder)
    assert [(row["chunk_size"], row["status"]) for row in rows] == [(32, "ok"), (64, "ok")]
    # Without --gpu: the GPU that is here, else h100.
    assert rows[1]["accelerator"] == (rows[1]["device_accelerator"] if rows[1]["device_kind"] == "cuda" else "h100_sxm")
    assert all(tuple(row) == RECORD_COLUMNS for row in rows)


@pytest.mark.usefixtures("idle")
def test_a_dry_run_prints_the_cases_that_are_left(tiny_sweep: Swept, run: Run, tmp_path: Path) -> None:
    planned = f"{TINY} --chunk-size 16,48 --dry-run"
    rows = run.json(planned, "--output", tmp_path / "new")
    assert [(row["chunk_size"], row["not run"]) for row in rows] == [(16, ""), (48, "")]
    # The first case starts a worker.
    assert rows[0]["seconds"] > rows[1]["seconds"] > 0
    assert "2 cases, about " in run.err
    (row,) = run(planned, "--output", tmp_path / "new").splitlines()[1:]
    assert re.fullmatch(r"mlstm_sig +torch +fw +2 +T 64; dim 16/32; chunk 16, 48; fp32 +\d+", row)
    assert not (tmp_path / "new").exists()
    assert [row["chunk_size"] for row in run.json(f"{planned} --resume", "--output", tiny_sweep[1])] == [48]
    assert "1 of 2 cases were already there" in run.err


@pytest.mark.usefixtures("idle")
def test_resume_takes_the_rows_of_a_run_that_died(tiny_sweep: Swept, run: Run, tmp_path: Path) -> None:
    rows = store.read_results(tiny_sweep[1]).to_pylist()
    (tmp_path / "sweep-dead.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    left = run.json(f"{TINY} --resume --dry-run", "--output", tmp_path)
    assert f"died: {tmp_path / 'sweep-dead.parquet'}" in run.err
    assert "2 of 3 cases were already there" in run.err
    assert [row["chunk_size"] for row in left] == [rows[2]["chunk_size"]]


def test_a_reader_that_leaves_early_takes_nothing_away(tmp_path: Path) -> None:
    code, errors = reader_leaves(*CALL, *TINY.split(), "--chunk-size", "32", "--output", str(tmp_path))
    assert code == 0, errors
    assert "results: " in errors and "Broken pipe" not in errors


def test_a_timeout_is_a_row_and_a_sweep_that_timed_nothing_fails(tmp_path: Path, lrbench: Lrbench) -> None:
    code, output, errors = lrbench(f"{TINY} --timeout 0.001 --chunk-size 32", "--output", tmp_path)
    assert code == 1, errors
    assert "no result within 0.001 s" in output
    said = errors.splitlines()
    assert said[-2].startswith("no case could be timed; the commonest reason (1 of 1 cases): timeout: no result within")
    assert said[-1].startswith("results: ")
    (row,) = store.read_results(tmp_path).to_pylist()
    assert row["status"] == "timeout"


@pytest.mark.parametrize(
    ("statuses", "remaining", "interrupted", "code", "strict_code"),
    [
        (("ok", "unsupported", "unavailable", "oom", "timeout"), 0, False, 0, 0),
        (("unsupported", "unavailable", "unavailable"), 0, False, 1, 1),
        (("ok", "crash"), 0, False, 0, 1),
        (("ok", "error"), 0, False, 0, 1),
        (("ok", "incorrect"), 0, False, 0, 1),
        (("ok",), 3, False, 1, 1),
        (("ok",), 3, True, 130, 130),
    ],
)
def test_exit_codes_of_a_sweep(
    statuses: tuple[str, ...], remaining: int, interrupted: bool, code: int, strict_code: int
) -> None:
    records = [dataclasses.replace(RECORD, status=status) for status in statuses]
    outcome = Outcome(path=None, records=records, resumed=[], remaining=remaining, interrupted=interrupted)
    assert exit_code(outcome, strict=False) == code
    assert exit_code(outcome, strict=True) == strict_code


@pytest.mark.parametrize(
    ("noises", "warning"),
    [
        ((None, None, None), []),
        (
            (None, "drift: the last samples take 1.80x the first; busy CPU: waited 1.31 s", "busy CPU: waited 0.20 s"),
            ["warning: 2 of 3 cases were measured on a busy machine, mostly busy CPU: waited 1.31 s. A check "
            "calls them unclear; the same command with --resume measures them again"],
        ),
    ],
)  # fmt: skip
def test_a_sweep_says_that_the_machine_was_busy(noises: tuple[str | None, ...], warning: list[str]) -> None:
    records = [dataclasses.replace(RECORD, noise=noise) for noise in noises]
    outcome = Outcome(path=None, records=records, resumed=[], remaining=0, interrupted=False)
    assert conclusion(outcome)[:-1] == warning
    # At another speed of the same CPU the yardstick takes longer.
    slow = [dataclasses.replace(RECORD, yardstick_ms=ms) for ms in (1.0, 1.15, 1.5)]
    (line, _) = conclusion(dataclasses.replace(outcome, records=slow))
    assert "1 of 3 cases were measured on a busy machine, mostly slow CPU: 1.50x slower" in line


def test_interrupt_exits_130_and_keeps_the_rows(tmp_path: Path) -> None:
    many = ",".join(str(n) for n in range(64, 264))
    command = (*CALL, *TINY.split(), "--seq-len", many, "--output", str(tmp_path))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRON)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not any(p.stat().st_size for p in tmp_path.glob("*.jsonl")):
        time.sleep(0.05)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted: " in errors
    assert "with --resume runs them" in errors
    (path,) = tmp_path.iterdir()
    assert set(store.read_results(path)["status"].to_pylist()) == {"ok"}


def test_options_become_a_request(monkeypatch: pytest.MonkeyPatch, lrbench: Lrbench) -> None:
    def stop(requests: tuple[Request], how: SweepOptions) -> None:
        assert how == SweepOptions(calibrate=False)
        assert requests == (
            Request(
                kernel="tfla", ops=("mlstm_sig",), impls=("a", "b"), baselines=("none",), seq_lens=(1024, 2048),
                head_dims_qk=(64,), channels=(8,), batches=(2, 4), contexts=(1024,), modes=("fw",),
            ),
        )  # fmt: skip
        raise ValueError("enough")

    monkeypatch.setattr(session, "run_sweep", stop)
    options = "--op mlstm_sig --impl a,b --baselines none --seq-len 1k,2k --head-dim-qk 64 --channels 8 --batch 2,4"
    options += " --context 1k --mode fw --no-calibrate"
    assert lrbench(f"sweep {options}")[2] == "lrbench: enough\n"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        *refused_commands("usage"),
        ("check a --baseline b --format xml", "format must be one of table, json, csv"),
        *((f"check a --baseline b --min-compared {s}", "--min-compared") for s in ("2", "-1", "nan", "half")),
    ],
)
def test_bad_usage_exits_2_with_one_message_and_no_output(
    command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lrbench: Lrbench
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(lrbench, command)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["gpus", "predict tfla --gpu h100", "doctor", TINY])
def test_a_bad_accelerator_file_exits_2_with_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lrbench: Lrbench
) -> None:
    bad = tmp_path / "mine.toml"
    bad.write_text("[mine]\nsms = -1\n")
    monkeypatch.setenv("LRBENCH_ACCELERATORS", str(bad))
    monkeypatch.chdir(tmp_path)
    if command.startswith("predict"):
        # What needs no accelerator of the user's does not read the file.
        assert lrbench(command)[0] == 0
    else:
        assert refused(lrbench, command).startswith(f"lrbench: {bad}: mine")


def test_a_users_accelerator_is_listed_and_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    from lrbench.tests.analysis.accelerators.test_user_file import H100_NVL

    mine = tmp_path / "mine.toml"
    mine.write_text(H100_NVL)
    monkeypatch.setenv("LRBENCH_ACCELERATORS", str(mine))

    (row,) = (row for row in run.json("gpus") if row["key"] == "h100_nvl")
    assert (row["defined_in"], row["source"]) == (str(mine), "NVIDIA H100 NVL product brief")
    report = run.json("chunk-size tfla --gpu h100_nvl")
    assert report["accelerator"] == "h100_nvl"
    assert report["accelerator_intensity"] == pytest.approx(835 / 3.9)
    assert run.json("predict tfla --gpu H100-NVL")["accelerator"] == "h100_nvl"


def test_a_closed_standard_output_is_no_traceback() -> None:
    command = shlex.join((*CALL, "gpus", "--format", "csv"))
    finished = subprocess.run(f"{command} >&-", shell=True, capture_output=True, text=True, env=ENVIRON, timeout=60)
    assert (finished.returncode, finished.stderr) == (0, "")


def test_a_reader_that_leaves_is_no_error() -> None:
    """As any program whose output goes to head, it says nothing and ends with the status of a closed pipe."""
    assert reader_leaves(*CALL, "kernels") == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("command", [TINY, "bars tfla-cpu"])
@pytest.mark.parametrize(("name", "why"), [("file", "File exists"), ("a" * 300, "File name too long")])
def test_an_output_that_is_no_folder_exits_2_before_the_machine_is_looked_at(
    name: str, why: str, command: str, tmp_path: Path, lrbench: Lrbench
) -> None:
    (tmp_path / "file").write_text("")
    message = f"lrbench: --output must be a folder that can be written, got {tmp_path / name}: {why}\n"
    assert lrbench(command, "--output", tmp_path / name) == (2, "", message)


@pytest.mark.parametrize(
    ("command", "known"),
    [
        ("kernels", [{"op": "attention", "impl": "torch.sdpa_flash"}]),
        ("kernels wkv4", [{"op": "wkv4", "impl": "scan"}, {"op": "wkv4", "impl": "jax.associative_scan"}]),
        ("presets", [{"kernel": "tfla", "preset": "default", "size": "head_dim 64, 128, 256, 512"}]),
        ("gpus", [{"key": "h100_sxm", "also": "h100", "defined_in": "lrbench"}, {"key": "cpu"}]),
        (
            "doctor",
            [
                {"section": "environment", "what": "device_count"},
                {"section": "packages", "package": "torch", "missing": None},
                {"section": "known failures", "impl": "flash_attn.v3"},
            ],
        ),
    ],
)
def test_listings_in_every_format(command: str, known: list[dict[str, object]], run: Run) -> None:
    rows = run.json(command)
    assert all(any(row.items() <= each.items() for each in rows) for row in known)
    assert len(run(f"{command} --all").splitlines()) > len(rows)
    assert len(list(csv.DictReader(io.StringIO(run(f"{command} --format csv"))))) == len(rows)


RUN = "run:df900796"
ANSWERS = (
    "best --gpu h200",
    "predict tfla --gpu h200",
    "chunk-size tfla --gpu h200",
    "kernels",
    "gpus",
    "bars --list",
    "bars tfla --list",
    "doctor",
    f"check {RUN} --baseline results/h200_sxm",
    f"compare {RUN},impl:whole_state {RUN},impl:mlstm_kernels.xl_chunk_siging --ignore chunk_size",
    "compare run:ff7ac4fb run:c0d954a9",
)
LISTINGS = (
    "kernels tfla", "kernels lightning", "gpus --all", "sweep --kernel tfla --dry-run", "presets", "presets tfla",
    "results", "runs",
)  # fmt: skip


@pytest.mark.parametrize(
    ("command", "width"),
    [*((each, 80) for each in (*ANSWERS, *LISTINGS)), *((each, 120) for each in ANSWERS[:2])],
)
def test_answers_fit_a_terminal(command: str, width: int, monkeypatch: pytest.MonkeyPatch, lrbench: Lrbench) -> None:
    """As tables, no row broken into names and values, about a screen long; sentences wrap as the terminal does."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = without_styles(lrbench(command)[1])
    assert (lines := out.splitlines())
    sentences = ("FAILED", "measured", "B takes", "A = ", "mlstm_sig", "low to", "use ", "pip install")
    assert max((len(line) for line in lines if not line.startswith(sentences)), default=0) <= width
    assert len(lines) <= (50 if command.startswith(("check", "compare", "doctor")) else 40) or command in LISTINGS
    assert not re.search(r"^\w+: \S+  \w+: ", out, re.MULTILINE)


@pytest.mark.parametrize("command", ["doctor", "reproduce", "reproduce tfla-fig5", "reproduce tfla-fig17"])
@pytest.mark.parametrize("width", [60, 160])
def test_sentences_fold_in_a_pipe_too(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch, lrbench: Lrbench
) -> None:
    """Commands to copy do not."""
    monkeypatch.setenv("COLUMNS", str(width))
    widths = [len(line) for line in lrbench(command)[1].splitlines() if not line.startswith("pip install")]
    assert 0.6 * width < max(widths) <= width


def test_help_has_every_command_in_a_group_and_a_whole_sentence_for_each(run: Run) -> None:
    out = run("")
    groups = [line for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert " ".join(groups) == "Options: Measure: Explain: Draw and report: Compare runs: List what is here:"
    assert not any(line.endswith("...") for line in out.splitlines()[1:])
    out = run("sweep --help")
    (axes,) = (line for line in out.splitlines() if line.startswith("Axes"))
    assert out.index("--output") < out.index(axes) < out.index("--seq-len")


def every_command() -> dict[str, Any]:
    """Return the commands by what is typed for them."""
    from typer.main import get_command

    from lrbench.cli import app

    group = get_command(app)
    named = {name: group.commands[name] for name in group.commands}  # type: ignore[attr-defined]
    nested = named.pop("baseline").commands  # type: ignore[attr-defined]
    return named | {f"baseline {name}": command for name, command in nested.items()}


@pytest.mark.parametrize(("name", "command"), every_command().items())
def test_every_command_has_an_example_that_it_takes(name: str, command: Any, run: Run) -> None:
    example = run(f"{name} -h").rpartition("\nExample:\n  lrbench ")[2].strip()
    assert example.startswith(f"{name} "), "an example with an argument or an option"
    command.make_context(name, shlex.split(example)[len(name.split()) :])


def test_version_module_and_completion() -> None:
    from lrbench import __version__

    module = (sys.executable, "-m", "lrbench", "--version")
    assert subprocess.run(module, capture_output=True, text=True, env=ENVIRON).stdout == f"lrbench {__version__}\n"
    completed = {"_LRBENCH_COMPLETE": "complete_bash", "COMP_WORDS": "lrbench pre", "COMP_CWORD": "1"}
    script = "import sys; sys.argv[0] = 'lrbench'; from lrbench.cli import main; main()"
    assert run_python(script, env={**ENVIRON, **completed}).split() == ["predict", "presets"]


@pytest.mark.parametrize(
    ("command", "same"),
    [
        ("presets --kernel mlstm_exp", "presets --kernel tfla"),
        ("best mlstm_exp --gpu h200 --state-size 64", "best --op mlstm_exp --gpu H200-SXM --head-dim-qk 64"),
        ("history op:mlstm_sig,device:h200,run:df900796", "history op:mlstm_sig,device:h200_sxm,run:df900796"),
        ("count mlstm_exp", "count --op mlstm_exp"),
        (f"sweep retention {SMALL} --dry-run", f"sweep --kernel tfla --op retention {SMALL} --dry-run"),
        ("presets rglru", "presets --kernel linear_scan"),
        ("kernels wkv", "kernels --kernel wkv4"),
        ("best rglru --gpu h200", "best --kernel rglru --gpu h200_sxm"),
        ("count gated-mlp --d-model 4k --batch 1k", "count gated-mlp --d-model 4096 --batch 1024"),
        ("count rglru --channels 2k", "count rglru --embedding 2048"),
        ("count attention --non-causal", "count attention --causal-factor 1"),
        ("best --gpu cpu", "best --gpu cpu --dtype fp32"),
        ("predict --gpu v100", "predict --gpu v100 --dtype fp16"),
        ("chunk-size --gpu v100", "chunk-size --gpu v100 --dtype fp16"),
    ],
)
def test_what_means_the_same_gives_the_same(command: str, same: str, run: Run) -> None:
    """Names, sizes written short, and an accelerator's usual dtype."""
    first, second = (run(f"{each} --format json") for each in (command, same))
    assert first == second != ""


def test_the_gpu_that_is_here_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    for model in ("NVIDIA B200", "NVIDIA H200", "Unheard Of"):
        (tmp_path / model / "0000:01:00.0").mkdir(parents=True)
        said = f"Model: \t\t {model}\nIRQ: 7\n"
        (tmp_path / model / "0000:01:00.0/information").write_text(said, encoding="utf-8")
    for model, visible, key in (
        ("NVIDIA H200", None, "h200_sxm"), ("Unheard Of", None, "h100_sxm"), ("NVIDIA B200", "", "h100_sxm"),
        ("NVIDIA B200", "-1", "h100_sxm"), ("NVIDIA B200", "GPU-5f0e", "b200"), ("NVIDIA B200", None, "b200"),
    ):  # fmt: skip
        monkeypatch.setattr(known, "DRIVER", tmp_path / model)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        assert known.get_accelerator(known.key_here() or known.USUAL).key == key
    for command in ("best", "predict", "chunk-size"):
        assert '"accelerator": "b200"' in run(f"{command} mlstm_sig --format json")


def test_verify_runs_triton_kernels_in_the_interpreter() -> None:
    interpreted = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    finished = call("verify --kernel gated_mlp --format json", **interpreted)
    assert finished.returncode == 0, finished.stderr + finished.stdout
    assert "in Triton's interpreter: " in finished.stderr
    rows = json.loads(finished.stdout)
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["impl"] for row in rows} == {"fused", "fused_save"}
    assert {row["dtype"] for row in rows} == {"fp32", "fp16"}


def test_verify_passes_for_one_operation(run: Run) -> None:
    rows = run.json("verify --op retention")
    checked = [row for row in rows if row["status"] == "ok"]
    assert {("torch", "fp32"), ("torch", "bf16"), ("parallel", "fp32")} <= {
        (row["impl"], row["dtype"]) for row in checked
    }
    assert all(row["rel_error"] < 0.05 for row in checked)
    if not any(row["impl"] == "fused_chunk" for row in rows):
        assert "not checked here, they need another device: fused_chunk, whole_state, xl_chunk, limit_chunk" in run.err
