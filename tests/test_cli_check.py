"""compare, check, baseline update and history from outside: output, exit codes and messages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow.parquet as pq
import pytest

from lrbench.bench.drive import executors, run
from lrbench.bench.drive.derived import Run, build_record
from lrbench.bench.plan import PlannedCase
from lrbench.bench.worker.protocol import not_measured
from lrbench.results import store
from lrbench.results.schema import Record
from lrbench.tests import ROOT
from lrbench.tests.command_line import CALL, Lrbench, reader_leaves, refused, script

from .analysis.rows import failed, measured, run_of, write

pytestmark = pytest.mark.usefixtures("one_look_at_the_machine")


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, Path]:
    """Result files: a baseline, the same again, one slower."""
    return {
        "old": write(run_of(4, seed=1), tmp_path / "old.parquet"),
        "same": write(run_of(4, seed=2), tmp_path / "same.parquet"),
        "slow": write(run_of(4, seed=3, slower=1.1, triton_version="3.7.1"), tmp_path / "slow.parquet"),
    }


def test_check_passes_and_fails(lrbench: Lrbench, runs: dict[str, Path], tmp_path: Path) -> None:
    passed = "passed on h200_sxm: 4 ok; compared 4 of 4 cases\n"
    assert lrbench("check", runs["same"], "--baseline", runs["old"]) == (0, passed, "")
    code, out, err = lrbench("check", runs["slow"], "--baseline", runs["old"])
    assert code == 1
    first, *lines = out.splitlines()
    assert first == "FAILED on h200_sxm: 4 regression; compared 4 of 4 cases"
    assert sum(line.startswith("regression ") for line in lines) == 4
    assert "warning: the environments differ (baseline | run): triton_version: 3.6.0 | 3.7.1" in err
    (tmp_path / "loose.toml").write_text("[defaults]\ntime = 0.2\n", encoding="utf-8")
    assert lrbench("check", runs["slow"], "--baseline", runs["old"], "--thresholds", tmp_path / "loose.toml")[0] == 0
    short = write(run_of(3, seed=4), tmp_path / "short.parquet")
    assert lrbench("check", short, "--baseline", runs["old"])[0] == 1


def test_check_and_compare_say_what_changed_and_group_the_rest(lrbench: Lrbench, tmp_path: Path) -> None:
    """Thirty cases of the baseline that the run lacks are a line; with --all every case has one."""
    old = write(run_of(40, seed=1), tmp_path / "old.parquet")
    rows = [*run_of(9, seed=2), *run_of(10, seed=3, slower=1.1)[9:]]
    new = write(rows, tmp_path / "new.parquet")
    code, out, _ = lrbench("check", new, "--baseline", old)
    first, _, *lines = out.splitlines()
    assert (code, first) == (1, "FAILED on h200_sxm: 30 missing, 1 regression, 9 ok; compared 10 of 10 cases")
    assert [line.split()[0] for line in lines] == ["missing", "regression"]
    assert "30 cases such as mlstm_sig " in lines[0]
    assert len(lrbench("check", new, "--baseline", old, "--all")[1].splitlines()) == 42
    code, out, _ = lrbench("compare", old, new)
    assert re.match(
        r"B takes 1\.0\d+ \(1\.0\d+ to 1\.0\d+\) times as long as A, of 10 cases 1 slower, 9 same; 30 not ", out
    )
    changed, _, rest = out.partition("\nnot compared\n")
    assert changed.count("chunk") == 1
    assert re.search(r"^A +30 +B has it with another chunk_size ", rest, re.MULTILINE)
    assert lrbench("compare", old, new, "--all")[1].count("chunk") > 10


@pytest.mark.parametrize(
    ("measured", "options", "code"),
    [
        (0, "", 2), (0, "--min-compared 0", 2), (1, "", 2), (1, "--min-compared 0.25", 0), (2, "", 0),
        (2, "--min-compared 0.6", 2),
    ],
)  # fmt: skip
def test_a_check_that_compared_too_little_does_not_pass(
    lrbench: Lrbench, runs: dict[str, Path], tmp_path: Path, measured: int, options: str, code: int
) -> None:
    """As where the GPU's driver is broken: what the run could not measure counts as planned, allowed or not."""
    lost = [failed("unavailable", "no driver", chunk_size=16 * n, run_id="run8") for n in range(measured + 1, 5)]
    new = write([*run_of(measured, seed=8), *lost], tmp_path / "broken.parquet")
    arguments = (f"check --allow-missing {options}", new, "--baseline", runs["old"])
    found, out, err = lrbench(*arguments, "--format", "json")
    data = json.loads(out)
    assert (found, data["passed"], data["compared"], data["planned"]) == (code, code == 0, measured, 4)
    assert f"; compared {measured} of 4 cases" in err
    assert ("too few" in err and "was ok, is unavailable: no driver" in err) == (code == 2)
    errors = ElementTree.fromstring(lrbench(*arguments, "--format", "junit")[1]).findall("testsuite/testcase/error")
    assert len(errors) == (code == 2)


@pytest.mark.parametrize("flag", ["--junit", "--summary"])
def test_a_report_that_cannot_be_written(
    lrbench: Lrbench, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    """A bad name is refused before anything is compared; on a full disk the verdict is printed."""

    def report(path: Path) -> tuple[object, ...]:
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
        return ("check", runs["slow"], "--baseline", runs["old"], flag, *([path] if flag == "--junit" else []))

    message = f"lrbench: {flag} must be a file that can be written, got {tmp_path}: Is a directory"
    assert refused(lrbench, *report(tmp_path)) == message
    code, out, err = lrbench(*report(Path("/dev/full")))
    assert (code, out.count("regression")) == (2, 5)
    assert f"{flag} must be a file that can be written, got /dev/full: No space left on device" in err
    assert "FAILED on h200_sxm: 4 regression" in out


def test_a_reader_that_leaves_does_not_change_the_verdict(runs: dict[str, Path]) -> None:
    command = (*CALL, "check", str(runs["slow"]), "--baseline", str(runs["old"]), "--format", "json")
    code, errors = reader_leaves(*command)
    assert code == 1 and "compared 4 of 4 cases" in errors


def test_rerun_settles_cases_or_says_where_it_cannot(
    lrbench: Lrbench, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured again takes the place of what was slow; the outcome says so."""
    command = ("check", runs["slow"], "--baseline", runs["old"], "--rerun", "--format", "json")
    code, _, err = lrbench(*command)
    assert code == 1 and "not measured again: the run is of " in err
    fast = {row["case_id"]: row for row in run_of(4, seed=9)}
    monkeypatch.setattr(run, "why_not_again", lambda rows, environment: None)

    def measure(planned: Sequence[PlannedCase], *_: object, **__: object) -> Iterator[run.Measured]:
        for item in planned:
            yield run.Measured(item, Record(**fast[item.case.case_id]), {})

    monkeypatch.setattr(run, "measure", measure)
    code, out, err = lrbench(*command)
    assert code == 0
    assert "measuring 4 cases again" in err
    assert all(case["measured_again"] and case["verdict"] == "ok" for case in json.loads(out)["cases"])


def test_nothing_is_measured_on_a_gpu_that_another_lrbench_uses(
    lrbench: Lrbench, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(executors, "gpu_uuids", lambda names: {name: f"GPU-{name}" for name in names})
    monkeypatch.setattr(run, "why_not_again", lambda rows, environment: None)
    used = f"GPU 0 is in use by another lrbench: process {os.getpid()} "
    with executors.hold_gpus():
        code, _, err = lrbench("check", runs["slow"], "--baseline", runs["old"], "--rerun")
        assert code == 1
        assert f"not measured again: {used}" in err
        code, _, err = lrbench("calibrate", "--output", tmp_path / "out")
        assert code == 2
        assert used in err


def test_a_check_reports_in_every_format(
    lrbench: Lrbench, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary, junit = tmp_path / "summary.md", tmp_path / "junit.xml"
    summary.write_text("before\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    arguments = ("check", runs["slow"], "--baseline", runs["old"])
    code, out, _ = lrbench(*arguments, "--summary", "--junit", junit, "--format", "json")
    assert code == 1
    assert json.loads(out)["counts"] == {"regression": 4}
    assert summary.read_text(encoding="utf-8").startswith(
        "before\n### lrbench check FAILED on h200_sxm: 4 regression; compared 4 of 4 cases\n"
    )
    assert ElementTree.parse(junit).getroot().get("failures") == "4"
    assert ElementTree.fromstring(lrbench(*arguments, "--format", "junit")[1]).get("failures") == "4"
    assert lrbench(*arguments, "--format", "markdown")[1].startswith("### lrbench check FAILED")
    assert lrbench(*arguments, "--format", "csv")[1].startswith(
        "verdict,op,impl,mode,case,old_ms,new_ms,ratio,low,high"
    )
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    assert lrbench(*arguments, "--summary")[0] == 2


def test_a_folder_that_holds_the_run_is_a_baseline_without_it(lrbench: Lrbench, tmp_path: Path) -> None:
    new = write(run_of(2, seed=2, slower=1.2, measured_at="2026-02-01T00:00:00+00:00"), tmp_path / "new.parquet")
    assert lrbench("check", new, "--baseline", tmp_path)[0] == 0
    write(run_of(2, seed=1), tmp_path / "old.parquet")
    assert lrbench("check", new, "--baseline", tmp_path)[0] == 1


def test_runs_lists_ids_that_other_commands_take(
    lrbench: Lrbench, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured here lies in results/local, beside the committed runs; one died and left its journal."""
    monkeypatch.chdir(tmp_path)
    local = Path("results/local")
    local.mkdir(parents=True)
    runs["old"].rename(local / "old.parquet")
    lines = (json.dumps(row) + "\n" for row in store.read_results(runs["slow"]).to_pylist())
    (local / "sweep-slow.jsonl").write_text("".join(lines), encoding="utf-8")
    listed = json.loads(lrbench("runs --format json")[1])
    here = {f"run:{row['run']}": row["measured"] for row in listed if row["run"].startswith("run")}
    assert len(here) == 2 and len(listed) > 100
    old, slow = sorted(here)
    code, _, err = lrbench("compare", old, slow)
    assert code == 0 and f"died: {local / 'sweep-slow.parquet'}" in err
    code, out, _ = lrbench("check", slow, "--baseline", old)
    assert (code, out.splitlines()[0]) == (1, "FAILED on h200_sxm: 4 regression; compared 4 of 4 cases")
    assert lrbench("history", slow)[0] == 0


@pytest.mark.parametrize("command", ["check", "compare"])
def test_bad_input_is_one_line_and_exit_2(
    lrbench: Lrbench, runs: dict[str, Path], tmp_path: Path, command: str
) -> None:
    truncated = tmp_path / "truncated.parquet"
    truncated.write_bytes(runs["old"].read_bytes()[:2000])
    nothing = write([measured(op="retention")], tmp_path / "nothing.parquet")
    for first, message in (
        (truncated, "results must be parquet files, got"),
        (nothing, "a case in common" if command == "check" else "no case of A matches one of B"),
        (tmp_path / "missing.parquet", "does not exist"),
        ("nonsense", "a selector must be a file, a folder or KEY:VALUE terms"),
        ("", "a selector must be a file, a folder or KEY:VALUE terms"),
        ("run:zzz", "run:zzz selects no row"),
    ):
        second = ("--baseline", runs["old"]) if command == "check" else (runs["old"],)
        assert message in refused(lrbench, command, first, *second)


def test_compare_prints_pairs_and_groups(lrbench: Lrbench, runs: dict[str, Path]) -> None:
    code, out, err = lrbench("compare", runs["old"], runs["slow"], "--by", "mode")
    assert code == 0
    assert out.count(" slower") >= 4
    assert "warning: the environments differ (A | B): triton_version: 3.6.0 | 3.7.1" in err
    code, out, _ = lrbench("compare run:run1 run:run2", "--results", runs["old"].parent, "--format", "json")
    data = json.loads(out)
    assert (code, data["A"], len(data["cases"])) == (0, "run:run1", 4)
    assert {case["verdict"] for case in data["cases"]} == {"same"}
    assert lrbench("compare", runs["old"], runs["slow"], "--by", "colour")[0] == 2


def test_compare_live(lrbench: Lrbench, tmp_path: Path) -> None:
    live = "compare torch mlstm_kernels.native_custbw --live --op mlstm_exp --mode fw --seq-len 128 --head-dim 64"
    live += " --chunk-size 32 --num-heads 1 --batch 1 --dtype fp32 --rounds 10 --format json"
    code, out, err = lrbench(live, "--output", tmp_path)
    if "is not installed" in err:
        pytest.skip("mlstm_kernels is not installed")
    assert code == 0, err
    (case,) = json.loads(out)["cases"]
    assert (case["a"]["impl"], case["b"]["impl"]) == ("torch", "mlstm_kernels.native_custbw")
    (path,) = tmp_path.glob("live-tfla-*.parquet")
    assert len(pq.read_table(path)) == 2


def test_compare_live_keeps_what_was_measured_before_it_died(
    lrbench: Lrbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is on disk when it is measured, and a file when the run ends, however it ends."""

    def dies(planned: Sequence[PlannedCase], of_run: Run, *_: Any, **__: Any) -> Iterator[run.Measured]:
        reply = not_measured("oom", "no memory")
        yield run.Measured(planned[0], build_record(of_run, planned[0], reply), reply)
        (journal,) = tmp_path.glob("live-tfla-*.jsonl")
        assert journal.read_bytes().count(b"\n") == 2, "what is planned, and the row"
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(run, "measure", dies)
    live = "compare torch parallel --live --op mlstm_sig --mode fw --dtype fp32 --ignore chunk_size"
    code, _, err = lrbench(live, "--output", tmp_path)
    assert code != 0
    assert "the device is gone" in err
    (path,) = tmp_path.iterdir()
    (row,) = pq.read_table(path).to_pylist()
    assert path.name.startswith("live-tfla-") and path.stem.endswith(f"-{row['run_id'][:8]}")
    assert row["reason"] == "no memory"


@pytest.mark.parametrize(
    ("said", "planned"),
    [({"complete": False, "planned": 5}, 5), ({"complete": False}, 3), ({"complete": True}, 2), ({}, 2)],
)
def test_a_check_counts_what_a_stopped_run_planned(
    lrbench: Lrbench, runs: dict[str, Path], tmp_path: Path, said: dict[str, Any], planned: int
) -> None:
    new = tmp_path / "stopped.parquet"
    store.write_parquet(run_of(2, seed=8), new, **said)
    code, out, err = lrbench("check", new, "--baseline", runs["old"], "--allow-missing", "--format", "json")
    assert (code, json.loads(out)["compared"], json.loads(out)["planned"]) == (2 if planned == 5 else 0, 2, planned)
    assert (f"the run was stopped: at least {planned - 2} of its cases have no row" in err) == (planned > 2)


def test_baseline_update_and_history(lrbench: Lrbench, runs: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "base" / "h200_sxm"
    folder.mkdir(parents=True)
    (folder / "roofs.parquet").write_bytes((ROOT / "results" / "h200_sxm" / "_other" / "roofs.parquet").read_bytes())
    code, out, err = lrbench("baseline update", runs["old"], "--into", folder, "--by", "me", "--format", "json")
    assert (code, json.loads(out)["promoted_by"]) == (0, "me")
    assert err == f"baseline: {folder / 'old.parquet'}, provenance: old.baseline.json\n"
    assert lrbench("baseline update", runs["old"], "--into", folder)[0] == 2
    noisy = write([measured(noise="busy CPU: load 9"), measured(chunk_size=32)], tmp_path / "noisy.parquet")
    code, _, err = lrbench("baseline update", noisy, "--into", tmp_path / "noisy")
    assert (code, err.splitlines()[1]) == (
        0, "warning: times measured on a busy machine, of which every check will be unclear: 1"
    )  # fmt: skip
    write([failed("oom", "full", measured_at="2026-03-01T00:00:00+00:00", chunk_size=16)], folder / "x.parquet")
    figure = tmp_path / "history.png"
    code, out, err = lrbench("history chunk_size:16", "--results", folder, "--output", figure)
    assert code == 0
    assert "oom" in out and "aaaaaaaaaa" in out
    assert figure.stat().st_size > 1000
    rows = json.loads(lrbench("history op:mlstm_sig", "--results", folder, "--limit", "2", "--format", "json")[1])
    assert len({row["case_id"] for row in rows}) == 2
    assert lrbench("history chunk_size:16", "--results", folder, "--output", tmp_path / "h.gif")[0] == 2


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        ({}, ()),
        ({"ALLOW_MISSING": "false", "FAIL_UNCLEAR": "false", "RERUN": "false"}, ()),
        ({"ALLOW_MISSING": "true", "MIN_COMPARED": "0.25"}, ("--min-compared", "0.25", "--allow-missing")),
        ({"THRESHOLDS": "a b.toml", "FAIL_UNCLEAR": "true"}, ("--thresholds", "a b.toml", "--fail-unclear")),
        ({"RERUN": "true"}, ("--rerun",)),
    ],
)
def test_composite_action(tmp_path: Path, inputs: dict[str, str], options: tuple[str, ...]) -> None:
    """The action's script asks for what its inputs say, with paths that hold blanks, and ends as the command does."""
    text = (ROOT / ".github/actions/check/action.yml").read_text(encoding="utf-8")
    step = textwrap.dedent(text.partition("run: |\n")[2])
    named = set(re.findall(r"^ +([A-Z_]+): \$\{\{ inputs\.[a-z-]+ \}\}$", text, re.MULTILINE))
    assert named == set(re.findall(r"\$([A-Z_]+)", step))
    script(tmp_path / "lrbench", 'printf "%s\\n" "$@"\nexit 3')
    paths = {"RUN": "new 1.parquet", "BASELINE": "old 1.parquet", "JUNIT": "check 1.xml"}
    environ = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **dict.fromkeys(named, "")}
    # GitHub's own way to run a bash step.
    bash = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step)
    finished = subprocess.run(bash, env=environ | paths | inputs, capture_output=True, text=True)
    assert finished.returncode == 3, finished.stderr
    asked = ("check", paths["RUN"], "--baseline", paths["BASELINE"], "--summary", "--junit", paths["JUNIT"], *options)
    assert tuple(finished.stdout.splitlines()) == asked
