"""Sweeps over several Tritons: who measures what with which, in which order, and what becomes of one that is broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from lrbench.bench.drive import compile_ahead, executors, run, session
from lrbench.bench.drive.complete import load_sweeps, sweeps_file
from lrbench.bench.drive.workers import ReplaceableWorker
from lrbench.bench.environment import find_tritons, finished_cases, version_of
from lrbench.bench.plan import PlannedCase, Request, Triton, plan
from lrbench.bench.worker.protocol import RunLimits
from lrbench.kernels import FAMILIES
from lrbench.results import folder, store
from lrbench.results.select import load_rows
from lrbench.tests.bench import faults, runs
from lrbench.tests.bench.runs import H200, PROCESSOR, Instant
from lrbench.tests.command_line import Lrbench, refused

pytestmark = pytest.mark.usefixtures("one_look_at_the_machine")

NEW, OLD = Triton(version="9.2.0"), Triton(version="9.1.0")

Overlay = Callable[..., Triton]


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    """Make a folder as pip does, of what says its version, and return the Triton in it."""

    def make(version: str, code: str | None = None) -> Triton:
        there = tmp_path / f"triton-{version}"
        info = there / f"triton-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: triton\nVersion: {version}\n", encoding="utf-8")
        if code is not None:
            (there / "triton").mkdir()
            (there / "triton" / "__init__.py").write_text(code, encoding="utf-8")
        (found,) = find_tritons([f"{version}={there}"])
        return found

    return make


def with_each(items: list[PlannedCase], *tritons: Triton) -> list[PlannedCase]:
    return [dataclasses.replace(item, triton=triton) for item in items for triton in tritons]


def test_each_case_runs_in_turn_in_a_process_of_each_triton(tmp_path: Path, overlay: Overlay) -> None:
    """One that does not import costs its own rows alone; the version is that of the worker."""
    broken = "raise ImportError('Python version mismatch: built for 3.99', name='triton')"
    tritons = [overlay("9.1.0"), overlay("9.2.0", broken)]
    items = with_each([faults.planned("right", seq_len=length) for length in (32, 33)], *tritons)
    out = tmp_path / "out"
    outcome = runs.run(out, items)
    assert [(row.seq_len, row.triton_version, row.status) for row in outcome.records] == [
        (32, "9.1.0", "ok"), (32, "9.2.0", "unavailable"), (33, "9.1.0", "ok"), (33, "9.2.0", "unavailable"),
    ]  # fmt: skip
    assert outcome.records[-1].reason == "import failed: Python version mismatch: built for 3.99"
    assert len({row.run_id for row in outcome.records}) == 1
    # What reads results of a folder does not see them.
    assert outcome.path is not None and outcome.path.name.endswith(".triton.parquet")
    assert not store.files_in(out)
    folder.merge(out)
    assert len(load_rows(out / store.OTHER / "triton.parquet")) == 4
    assert not store.files_in(out)


def test_workers_stay_while_others_are_asked(overlay: Overlay) -> None:
    tritons = [overlay("9.1.0"), overlay("9.2.0")]
    limits = RunLimits(timeout_s=120.0)
    with ReplaceableWorker() as worker:
        first = [worker.run([item], limits)[0] for item in with_each([faults.planned("right")], *tritons)]
        processes = dict(worker._workers)
        again = [worker.run([item], limits)[0] for item in with_each([faults.planned("right")], *tritons)]
        assert [reply["status"] for reply in (*first, *again)] == ["ok"] * 4
        assert worker._workers == processes and set(processes) == {triton.folder for triton in tritons}
        # A worker that has another Triton than its case says so.
        (reply,) = worker.run(with_each([faults.planned("right")], Triton(version="9.9"))[:1], limits)
        assert reply["status"] == "error"
        assert f"the worker has triton {version_of('triton')}, the case is about 9.9" in reply["reason"]


def test_resume_tells_versions_apart(tmp_path: Path) -> None:
    items = [faults.planned("right", seq_len=length) for length in (32, 33)]
    first = runs.run(tmp_path, with_each(items, OLD), executor=Instant())
    assert [row.status for row in first.records] == ["ok", "ok"]
    assert finished_cases(tmp_path, PROCESSOR) == {}
    done = finished_cases(tmp_path, PROCESSOR, tritons=True)
    assert {version for _, version in done} == {"9.1.0"}
    limits, planned = RunLimits(timeout_s=1.0), with_each(items, OLD, NEW)
    second = run.sweep(planned, PROCESSOR, limits, runs.Silent(), executor=Instant(), output=tmp_path, done=done)
    assert [(row.seq_len, row.triton_version) for row in second.records] == [(32, "9.2.0"), (33, "9.2.0")]
    assert len(second.resumed) == 2


def test_a_case_is_refused_by_its_own_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declared versions of ours, and known failures of packages; the one that is installed does not matter."""
    monkeypatch.setattr(run, "version_of", lambda _: None)
    monkeypatch.setattr(run.baselines, "availability", lambda _: None)
    monkeypatch.setattr(run, "installed_versions", lambda: {"mlstm-kernels": "2.0.6", "triton": "3.8.0"})
    axes = {"ops": ("mlstm_sig",), "seq_lens": (8192,), "head_dims": (256,), "modes": ("fw",), "preset": "triton"}
    for impl, reason in (
        ("whole_state", "whole_state is written for triton"),
        ("mlstm_kernels.xl_chunk_siging", "the kernels use tl.make_block_ptr"),
    ):
        (item,) = plan(Request(impls=(impl,), **axes), device_kind="cuda")
        here = dataclasses.replace(H200, triton_version="3.8.0")
        old, new = with_each([item], Triton(version="3.8.0", folder="/x"), Triton(version="4.0.0", folder="/x"))
        assert run.refuse(old, dataclasses.replace(H200, triton_version="4.0.0")) is None
        reply = run.refuse(new, here)
        assert reply is not None and (reply["status"], reply["reason"][: len(reason)]) == ("unsupported", reason)


def test_what_is_compiled_ahead_and_first_keeps_tritons_apart() -> None:
    planned = with_each(plan(Request(ops=("mlstm_sig",), preset="triton"), device_kind="cuda"), OLD, NEW)
    ours = [item for item in planned if item.case.impl == "whole_state"]
    assert {item.triton for item in compile_ahead.uncompiled(ours, H200)} == {OLD, NEW}
    marks = {compile_ahead._mark(item, H200) for item in with_each([ours[0]], OLD, NEW)}
    assert len(marks) == 2
    # Turns stay together in the order in which a GPU runs them, the first case's too.
    order = list(executors.as_taken(executors.alone(run.quickest_first(planned))))
    assert [item.triton for item in order] == [OLD, NEW] * (len(order) // 2)
    assert all(one.case == other.case for one, other in zip(order[::2], order[1::2], strict=True))


def test_the_listed_sweeps_have_every_family_once_and_a_control() -> None:
    cases = session._planned(load_sweeps(sweeps_file("triton")), H200)
    assert {item.case.kernel for item in cases} == {*FAMILIES}
    assert {(item.case.batch or 1) * (item.case.seq_len or 1) for item in cases} == {65536}
    assert {item.case.mode for item in cases} == {"fw", "fwbw"}
    assert "torch.sdpa_flash" in {item.case.impl for item in cases}
    # Four versions of each take about twelve minutes.
    assert len(cases) <= 54


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["3.9"], r"--triton must be here or VERSION=FOLDER, got '3\.9'"),
        (["3.9=EMPTY"], r"there is no triton in the folder .*; pip install --no-deps --target .* triton==3\.9"),
        (["9.1=FOLDER"], r"the folder has triton 9\.11\.0, not 9\.1"),
        (["9=FOLDER", "9.11.0=FOLDER"], r"--triton must name each version once, got 9\.11\.0 twice"),
    ],
)
def test_a_triton_that_is_not_there_is_named(texts: list[str], message: str, tmp_path: Path, overlay: Overlay) -> None:
    found = overlay("9.11.0")
    with pytest.raises(ValueError, match=message):
        find_tritons([x.replace("FOLDER", str(found.folder)).replace("EMPTY", str(tmp_path / "none")) for x in texts])


@pytest.mark.usefixtures("idle")
def test_sweep_and_results_show_the_matrix(lrbench: Lrbench, tmp_path: Path, overlay: Overlay) -> None:
    """From the command line: the installed Triton and another, then the stored rows, then two of them compared."""
    other, here, out = overlay("9.1.0"), version_of("triton"), tmp_path / "out"
    command = "sweep mlstm_sig --impl parallel --seq-len 64 --head-dim 32 --mode fw --budget 0.01 --calibrate"
    command = command.replace(" --calibrate", f" --output {out} --triton here --triton 9.1={other.folder}")
    code, dry, _ = lrbench(f"{command} --dry-run --all --format csv")
    assert (code, [line.split(",")[-3] for line in dry.splitlines()]) == (0, ["triton", str(here), "9.1.0"])
    code, shown, err = lrbench(command)
    assert code == 0 and f"each problem in turn with Triton {here}, 9.1.0" in err
    assert [name for name in shown.splitlines()[1].split() if name[0].isdigit()] == [here, "9.1.0"]
    assert lrbench("results --triton", out) == (0, shown, "")
    code, page, _ = lrbench("results --triton --format markdown", out)
    assert code == 0 and f"| op | impl | mode | case | {here} | 9.1.0 | use |" in page
    code, compared, err = lrbench(f"compare triton:{here} triton:9.1 --results", out)
    assert code == 0 and "of 1 case " in compared and "different runs" not in err
    code, _, err = lrbench(f"{command} --resume")
    assert "2 of 2 cases were already there" in err
    assert "run:" in refused(lrbench, f"compare run:zzz triton:9.1 --results {out}")


def test_what_does_not_go_with_it_is_refused(lrbench: Lrbench, tmp_path: Path) -> None:
    assert "compares versions on one GPU" in refused(lrbench, "sweep --triton here --devices 2 --output", tmp_path)
    assert "KERNEL cannot be given with --sweeps" in refused(lrbench, "sweep mlstm_sig --sweeps triton")
    assert "--mode cannot be given with --sweeps" in refused(lrbench, "sweep --sweeps triton --mode fw")
    assert "got nowhere" in refused(lrbench, "sweep --sweeps nowhere")
