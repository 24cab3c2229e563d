"""Entries of documents: every verdict from made-up rows, what the files may not say, and the committed ones."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from lrbench.analysis.figures import style
from lrbench.analysis.figures.layout import Drawing
from lrbench.analysis.figures.plots import OF_ENTRIES
from lrbench.analysis.reproduce import entries, published, verdicts, written
from lrbench.analysis.reproduce.entries import Asked
from lrbench.bench import plan
from lrbench.bench.drive import complete, mlp_errors, session
from lrbench.bench.drive.run import Outcome, write_other
from lrbench.bench.request import SweepOptions
from lrbench.results import store
from lrbench.results.schema import TrainingRow
from lrbench.results.store import committed_results
from lrbench.tests import ROOT

from ...command_line import Lrbench, refused
from ..rows import row, stored, write

HEAD = (ROOT / "tests/data/document.toml").read_text()


def in_turn(pair_id: str, rows: Iterable[dict[str, Any]], spread: float = 0.0) -> Iterable[dict[str, Any]]:
    """Yield rows as of ten rounds, in which times vary by so large a share, each row's by itself."""
    for n, each in enumerate(rows):
        samples = [each["time_ms"] * (1 + spread * math.sin(7 * n + i)) for i in range(10)]
        yield {**each, "pair_id": pair_id, "time_samples_ms": samples}


def rows() -> Iterable[dict[str, Any]]:
    """Ours takes 1 ms, and 2 with chunks of 256; theirs 2 at 1k and 4 at 8k; attention 0.5 and 4."""
    for seq_len, theirs, attention in ((1024, 2.0, 0.5), (8192, 4.0, 4.0)):
        memory = {"peak_memory_bytes": seq_len * 10**6, "input_bytes": 24 * 10**6}
        impl = "mlstm_kernels.xl_chunk_siging"
        pair = [
            row("mlstm_sig", "fused_chunk", seq_len=seq_len, time_ms=1.0, **memory),
            row("mlstm_sig", "fused_chunk", seq_len=seq_len, chunk_size=256, time_ms=2.0, peak_memory_bytes=5),
            row("mlstm_sig", impl, seq_len=seq_len, state_dtype=None, time_ms=theirs),
            row("attention", "flash_attn.v4", seq_len=seq_len, time_ms=attention),
            row("attention", "torch.sdpa_cudnn", seq_len=seq_len, time_ms=2 * attention),
        ]
        yield from in_turn(f"run-{seq_len}", pair)
    # Older and newer rows of cases that have one already.
    late = {"measured_at": "2026-02-01T00:00:00+00:00"}
    yield row("mlstm_sig", "fused_chunk", time_ms=9.0, measured_at="2025-01-01T00:00:00+00:00")
    yield row("mlstm_sig", "fused_chunk", time_ms=9.0, noise="busy", **late)
    yield row("mlstm_sig", "fused_chunk", mode="fwbw", seq_len=1024, status="oom", reason="out of memory")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(rows(), tmp_path_factory.mktemp("results") / "rows.parquet")


def claims(folder: Path, text: str, head: str = HEAD) -> list[Asked]:
    (folder / "a_doc.toml").write_text(head + text, encoding="utf-8")
    return entries.load(folder)


@pytest.mark.parametrize(
    ("text", "verdict", "reason"),
    [
        ('ratio = ["theirs", "ours"]\nat_least = 2', "holds", "2 to 4 at seq_len 1k/8k"),
        ('ratio = ["theirs", "ours"]\nat_least = 3', "holds in part", "holds at seq_len 8k (4); not at seq_len 1k (2)"),
        ('ratio = ["theirs", "ours"]\nat_least = [2, 4]\nover = { "seq_len, batch" = [[1024, 64], [8192, 8]] }',
         "holds", "2 to 4 at seq_len 1k, batch 64 and seq_len 8k, batch 8"),
        ('ratio = ["theirs", "ours"]\nat_least = 5', "does not hold here", "2 to 4"),
        ('ratio = ["theirs", "ours"]\nstates = [2, 4]\nwithin = 0.01', "holds", "2 to 4"),
        ('ratio = ["theirs", "ours", "attention", "ours"]\nstates = [4, 1]\nwithin = 0.01', "holds", "1 to 4"),
        ('ratio = ["theirs", "ours"]\nat_most = 9\nover = { seq_len = [1024, 2048] }',
         "holds in part", "2 at seq_len 1k; mlstm_kernels.xl_chunk_siging not measured at seq_len 2k"),
        ('ratio = ["theirs", "ours"]\nat_most = 9\nrows = { mode = "fwbw" }\nover = { seq_len = [1024] }',
         "not measured", "fused_chunk oom at seq_len 1k"),
        ('value = "ours"\nmetric = "memory"\nstates = [1.024e9, 8.192e9]\nwithin = 0', "holds", "1.02 GB to 8.19 GB"),
        ('value = "ours"\nmetric = "allocated"\nstates = [1e9, 8.168e9]\nwithin = 0', "holds", "1 GB to 8.17 GB"),
        ('value = "ours"\nmetric = "tokens_per_s"\nstates = 65536000\nwithin = 0', "holds", "65,536,000"),
        ('span = "theirs"\nat_most = 1.5', "does not hold here", "2"),
        ('span = "ours"\nat_most = 1.5', "holds", "1"),
        ('slope = "attention"\nstates = 1\nwithin = 0.01', "holds", "1 at seq_len 1k to 8k"),
        ('crossover = ["ours", "attention"]\nat_most = 8192', "holds", "8k"),
        ('crossover = ["ours", "attention"]\nat_most = 4096', "holds in part", "8k"),
        ('crossover = ["theirs", "ours"]\nat_most = 4096', "does not hold here", "nowhere"),
        ('best = "ours"\nover = { seq_len = [8192], chunk_size = [128, 256] }\nalong = "chunk_size"\nstates = 128',
         "holds", "128"),
        ('best = "attention"\nrows = { seq_len = 8192 }\nover = { impl = ["flash_attn.v4", "torch.sdpa_cudnn"] }\n'
         'states = "flash_attn.v4"', "holds", "flash_attn.v4"),
        ('value = "counted"\nmetric = "flop_optimal"\nover = {}\nstates = 13\nwithin = 0.01', "holds", "13"),
        ('value = "counted"\nmetric = "intensity"\nrows = { chunk_size = 64 }\nat_least = 500',
         "does not hold here", "at seq_len 1k/8k"),
        ('value = "device"\nmetric = "balance"\nover = { device = ["h100_sxm"] }\nstates = 295.2', "holds", "295"),
        ('value = "kv"\nmetric = "saved_share"\nover = {}\nstates = 0.45', "holds", "0.45"),
        ('not_testable = "needs trained weights"', "not testable here", "needs trained weights"),
        ('unmeasured = "a model\'s training step"', "not measured", "a model's training step"),
    ],
)  # fmt: skip
def test_verdicts(text: str, verdict: str, reason: str, results: Path, tmp_path: Path) -> None:
    (asked,) = claims(tmp_path, text)
    found = verdicts.evaluate(asked, verdicts.Store([results], "h200_sxm"))
    assert (asked.id, found.verdict) == ("a-doc-fig1", verdict)
    assert reason in found.reason


RATIO = 'ratio = ["theirs", "ours"]\n'


@pytest.mark.parametrize(
    ("bound", "spread", "verdict", "reason"),
    [
        ("at_least = 1.5", 0.05, "holds", "2 at seq_len 8k"),
        ("at_least = 2.01", 0.05, "not decided", "2 at seq_len 8k"),
        ("at_least = 2.5", 0.05, "does not hold here", "2 at seq_len 8k"),
        ("at_least = 2.5", 0.9, "not decided", "2 at seq_len 8k"),
        ("states = 2.1\nwithin = 0.1", 0.001, "holds", "2 at seq_len 8k"),
    ],
)
def test_a_ratio_is_decided_by_its_interval(
    bound: str, spread: float, verdict: str, reason: str, tmp_path: Path
) -> None:
    impl = "mlstm_kernels.xl_chunk_siging"
    sides = [row("mlstm_sig", "fused_chunk", time_ms=1.0), row("mlstm_sig", impl, state_dtype=None, time_ms=2.0)]
    (asked,) = claims(tmp_path, f"{RATIO}{bound}\nover = {{ seq_len = [8192] }}")
    path = write(in_turn("run-0", sides, spread), tmp_path / "rows.parquet")
    found = verdicts.evaluate(asked, verdicts.Store([path], "h200_sxm"))
    assert found.verdict == verdict
    assert reason.partition(" ")[2] in found.reason
    (line,) = found.lines
    assert line.ends is not None and line.ends[0] <= line.ours <= line.ends[1]


def test_a_ratio_s_sides_must_have_been_timed_together(tmp_path: Path) -> None:
    """Rows of two runs are no pair; what must be timed is the fastest of each side, and what may be as fast."""
    impl, (asked,) = "mlstm_kernels.xl_chunk_siging", claims(tmp_path, f"{RATIO}at_least = 1")
    found = []
    for seq_len, chunk_size, time_ms in ((1024, 128, 1.0), (8192, 64, 1.05), (8192, 128, 1.0), (8192, 256, 1.5)):
        found.append(row("mlstm_sig", "fused_chunk", seq_len=seq_len, chunk_size=chunk_size, time_ms=time_ms))
    theirs = [row("mlstm_sig", impl, seq_len=n, state_dtype=None, time_ms=2.0) for n in (1024, 8192)]
    parts = [*in_turn("run-0", found[:1]), *in_turn("run-1", found[1:]), *in_turn("run-0", theirs[:1]), theirs[1]]
    store = verdicts.Store([write(parts, tmp_path / "rows.parquet")], "h200_sxm")
    said = verdicts.evaluate(asked, store)
    assert (said.verdict, said.missing[0][2]) == ("holds in part", "not measured together")
    (group,) = verdicts.apart([said], store)
    assert sorted((each["impl"], each["chunk_size"]) for each in group) == [
        ("fused_chunk", 64), ("fused_chunk", 128), (impl, 128),
    ]  # fmt: skip


def test_a_side_is_its_fastest_case_not_the_fastest_in_turn(tmp_path: Path) -> None:
    """A newer pair of a slower implementation does not stand for the side, nor does it alone."""
    (asked,) = claims(tmp_path, f"{RATIO}at_least = 1\nover = {{ seq_len = [8192] }}")
    impl = "mlstm_kernels.xl_chunk_siging"
    late = {"measured_at": "2026-02-01T00:00:00+00:00"}
    fast, slow = (row("mlstm_sig", each, time_ms=ms) for each, ms in (("fused_chunk", 1.0), ("xl_chunk", 4.0)))
    theirs = row("mlstm_sig", impl, state_dtype=None, time_ms=2.0)
    newer = [*in_turn("run-1", [{**slow, **late}, {**theirs, **late}])]
    for parts, verdict, ours in (
        ([*in_turn("run-0", [fast, theirs]), *newer], "holds", 2.0),
        ([fast, *newer], "not measured", None),
    ):
        found = verdicts.evaluate(asked, verdicts.Store([write(parts, tmp_path / f"{verdict}.parquet")], "h200_sxm"))
        assert found.verdict == verdict
        assert [line.ours for line in found.lines] == [ours]


def test_a_number_is_not_rounded_onto_a_bound_that_it_misses() -> None:
    claim = entries.Claim(text="a claim", ratio=("a", "b"), at_least=(1.2, 3.0))
    shown = {1.1981: "1.198", 1.2: "1.2", 1.2345: "1.23", 2.9999: "2.9999"}
    assert {value: verdicts.shown(claim, value) for value in shown} == shown


def test_errors_are_those_that_were_kept(tmp_path: Path) -> None:
    """They lie beside the rows of sweeps, which are not looked at for them; what is missing is no case of a sweep."""
    row = dataclasses.replace(mlp_errors.error_row(64, "torch", "cpu"), impl="fused", relative_mean=0.5)
    for each in (row, dataclasses.replace(row, against="exact", relative_mean=9.0, run_id="other")):
        write_other([each], "errors", tmp_path / "rows", "errors")
    side = '[sides.errors]\nop = "gated_mlp"\nimpl = "fused"\nagainst = "eager"\n'
    kind = 'value = "errors"\nmetric = "relative"\nover = {{ seq_len = [{}] }}\nrows = {{}}\nstates = 0.5\n'
    for sizes, verdict, missing in (("64", "holds", []), ("64, 128", "holds in part", [128])):
        (asked,) = claims(tmp_path, kind.format(sizes) + side, HEAD.replace("rows = { tokens = 65536 }\n", ""))
        found = verdicts.evaluate(asked, verdicts.Store([tmp_path / "rows"], "cpu"))
        assert (found.verdict, complete.missing_errors([found])) == (verdict, missing)
        assert verdicts.Store([tmp_path / "rows"]).device == "cpu"
        assert not list(complete.missing_requests([found]))


def test_trainings_are_those_that_were_kept(tmp_path: Path) -> None:
    """Spikes are counted, and so is a norm that is no number; a curve is held against the reference of its seed."""
    values = dict.fromkeys(field.name for field in dataclasses.fields(TrainingRow))
    values |= {
        "layers": 4,
        "op": "mlstm_sig",
        "mode": "train",
        "dtype": "bf16",
        "device_accelerator": "cpu",
        "training_version": 1,
    }
    kept = [
        {**values, "impl": impl, "seed": seed, "losses": [loss] * 4, "gradient_norms": norms, "measured_at": day}
        for day, impl, seed, loss, norms in (
            ("1", "parallel", 0, 1.0, [1.0] * 60),
            ("1", "parallel", 1, 4.0, [1.0] * 50 + [1.9, 2.1, math.nan]),
            ("1", "xl_chunk", 0, 9.0, [1.0] * 60),
            ("2", "xl_chunk", 0, 2.0, [1.0] * 50 + [1.5, 0.5]),
        )
    ]
    store.write_parquet(kept, tmp_path / "a.training.parquet", TrainingRow)
    sides = '[sides.trained]\nop = "mlstm_sig"\nmode = "train"\nlayers = 4\n'
    kind = 'value = "trained"\nmetric = "{}"\nover = {{ impl = ["{}"], seed = {} }}\nstates = {}\nwithin = 1e-6\n'
    for metric, impl, seeds, states, verdict in (
        ("spikes", "parallel", [0, 1], [0, 2], "holds"),
        ("gradient_spread", "xl_chunk", [0], 0.5, "holds"),
        ("curve_distance", "xl_chunk", [0], 0.5, "holds"),
        ("curve_distance", "xl_chunk", [0, 2], [0.5, 0.5], "holds in part"),
    ):
        text = kind.format(metric, impl, seeds, states) + sides
        (asked,) = claims(tmp_path, text, HEAD.replace("rows = { tokens = 65536 }\n", ""))
        found = verdicts.evaluate(asked, verdicts.Store([tmp_path], "cpu"))
        assert found.verdict == verdict, found.reason
        assert not list(complete.missing_requests([found]))


def test_times_of_another_device_are_translated(tmp_path: Path) -> None:
    """By the model, whose interval must hold the document's number."""
    store = verdicts.Store(committed_results("h200_sxm"), "h200_sxm")
    text = 'value = "ours"\nover = {{ seq_len = [8192] }}\nstates = {}\nrows = {{ chunk_size = 1024 }}'
    sizes = {"batch": 8, "seq_len": 8192, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256, "chunk_size": 1024}
    here = f"{stored('mlstm_sig', 'fused_chunk', **sizes)['time_ms']:.3g} ms"
    for stated, verdict in ((1.5, "holds"), (90, "does not hold here")):
        (asked,) = claims(tmp_path, text.format(stated))
        found = verdicts.evaluate(asked, store)
        assert found.verdict == verdict
        (line,) = found.lines
        assert line.interval is not None and line.interval[0] < 1.5 < line.interval[1] < 90
        (shown,) = written.line_rows(found)
        assert shown["here"] == here and shown["h100_sxm"].endswith(f"{line.interval[1]:.3g})")
        assert found.ours.startswith(f"{here} here, ") and " on h100_sxm, each within a factor of " in found.ours
        assert not found.missing
        # Where the document's device was measured, its rows are taken.
        assert verdicts.evaluate(asked, verdicts.Store([], "h100_sxm")).verdict == "not measured"
    # Rows of that device count before the model, with the same allowance for other software.
    store = verdicts.Store(committed_results(), "h200_sxm")
    (asked,) = claims(tmp_path, text.replace("ours", "theirs").replace("1024", "128").format(1))
    time_ms = store.row(asked.terms("theirs", {"seq_len": 8192}), "h100_sxm")["time_ms"]
    for factor, holds in ((0.89, False), (0.91, True), (1.49, True), (1.51, False)):
        claim = dataclasses.replace(asked.claim, states=factor * time_ms)
        found = verdicts.evaluate(asked._replace(claim=claim), store)
        (line,) = found.lines
        assert (found.verdict, line.there) == ("holds" if holds else "does not hold here", time_ms)
        assert found.ours.endswith(" on h100_sxm, 1 of 1 measured")
        assert line.interval is not None and line.interval[0] < 1.51 * time_ms < line.interval[1]
        itself = verdicts.evaluate(asked._replace(claim=claim), verdicts.Store(committed_results(), "h100_sxm"))
        assert itself.verdict == found.verdict and not itself.lines[0].interval
    (asked,) = claims(tmp_path, 'value = "attention"\nover = { seq_len = [8192] }\nstates = 1')
    with pytest.raises(ValueError, match="a-doc-fig1, side attention: impl must be said"):
        verdicts.evaluate(asked, store)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "entries.fig1.claims 1 must be a table with one of value, ratio"),
        ('ratio = ["ours"]\nat_least = 1', "entries.fig1.claims 1.ratio must be 2 or 4 sides, got ['ours']"),
        ('ratio = ["our", "theirs"]\nat_least = 1', "got 'our'; did you mean ours"),
        ('ratio = ["ours", "theirs"]', "must be a table with states, or with at_least or at_most"),
        ('value = "ours"\nstates = [1]', "entries.fig1.claims 1.states must be a list of 2, got [1.0]"),
        ('value = "ours"\nstates = 1\nmetric = "speed"', "entries.fig1.claims 1.metric must be 'time' or"),
        ('value = "ours"\nstates = 1\nwithn = 2', "without other keys than text"),
        ('span = "ours"\nat_most = 1\nalong = "mode"', "entries.fig1.claims 1.along must be an axis of over (seq_len)"),
        ('value = "ours"\nstates = 1\nrows = { heads = 3 }', "side ours: a key must be one of"),
        ('value = "device"\nstates = 1', "side device: op must be one of"),
        ('value = "ours"\nstates = 1\nover = { seq_len = [] }', "over.seq_len must be a list of at least one value"),
        ('value = "ours"\nstates = "many"', "entries.fig1.claims 1.states must be a number, got 'many'"),
        ('value = "typo"\nstates = 1\n[sides.typo]\nlike = "ours"\nimpl = "fusd"', "side typo: impl must be one of"),
        ('value = "odd"\nstates = 1\n[sides.odd]\nmetric = "speed"', "side odd: metric must be one of"),
        ('value = "open"\nstates = 1\n[sides.open]\nop = "mlstm_sig"', "side open: num_heads must be said"),
        ('value = "ours"\nstates = 1\nrows = { mode = "fww" }', "side ours: mode must be one of fw, fwbw"),
        ('value = "ours"\nstates = 1\nover = { "seq_len, batch" = [[1024]] }',
         "entries.fig1.claims 1.over.seq_len, batch must be lists, each of 2, got (1024,)"),
        ('beside = ["ours"]', "entries.fig1.claims 1 must be a claim, got 'beside'"),
        ('value = "loop"\nstates = 1\n[sides.loop]\nlike = "loop"', "sides.loop.like must be another one of"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_its_name_and_the_key(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        claims(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path / 'a_doc.toml'}: ")
    assert message in str(error.value)


@functools.cache
def evaluated() -> list[verdicts.Found]:
    """Return what the committed rows say of every committed entry."""
    store = verdicts.Store(committed_results("h200_sxm"), "h200_sxm")
    return [verdicts.evaluate(asked, store) for asked in entries.load()]


def test_every_committed_entry_is_evaluated() -> None:
    assert {each.verdict for each in evaluated()} == {*verdicts.VERDICTS}
    assert all(each.reason for each in evaluated())
    assert all(len({*each.reason.split("; ")}) == 1 + each.reason.count("; ") for each in evaluated())
    # What has no row can be planned.
    assert all(plan.plan(request, device_kind="cuda") for request in complete.missing_requests(evaluated()))


@pytest.mark.parametrize(
    ("entry", "layers"), [("lightning-table1", {24, 16, 32}), ("rglru-model", {12}), ("wkv-train", {12})]
)
def test_training_steps_that_lack_are_what_is_planned(entry: str, layers: set[int]) -> None:
    """Of published models: the layers follow from the width, in what a claim looks for and in what a sweep measures."""
    asked = [each.asked for each in evaluated() if each.asked.id == entry and each.asked.claim.kind != "not_testable"]
    found = [verdicts.evaluate(each, verdicts.Store([], "h200_sxm")) for each in asked]
    wanted = [each.asked.terms(side, point) for each in found for side, point, _ in each.missing]
    assert {terms["layers"] for terms in wanted} == layers
    requests = complete.missing_requests(found)
    cases = [dataclasses.asdict(item.case) for each in requests for item in plan.plan(each, device_kind="cuda")]
    assert all(any(terms.items() <= each.items() for each in cases) for terms in wanted)
    assert len(cases) == len({frozenset(terms.items()) for terms in wanted})


def test_published_times_lie_in_the_intervals_if_other_software_is_allowed_for() -> None:
    """Nothing is fitted to them. An H100 takes two thirds of what papers state of one for the same cases."""
    times = published.published_times(evaluated())
    excess = published.excess(times)
    assert len(times) > 90 and len(excess) > 5
    assert math.ceil(10 * published.software_factor([*excess.values()])) == 10 * verdicts.OTHER_SOFTWARE
    held = sum(each.is_held(verdicts.OTHER_SOFTWARE) for each in times)
    assert held >= published.held_left_out(times) >= 0.8 * len(times)
    assert sum(each.is_held(1.0) for each in times) < 0.4 * len(times)
    assert f"{held} of {len(times)} lie in the 90 %" in (ROOT / "docs" / "accelerators.md").read_text(encoding="utf-8")
    assert 1.0 < median(each.ratio for each in times) < 1.2


FIGURES = {each.id: each.entry.figure for each in entries.load() if each.entry.figure}


@pytest.mark.parametrize("entry", FIGURES)
def test_commands_of_committed_figures_draw_something(
    entry: str, lrbench: Lrbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where nothing was measured yet. How a figure is composed is tested where figures are, which takes longer."""
    monkeypatch.setattr(Drawing, "at", lambda drawing, width=None: drawing)
    monkeypatch.setattr(style, "save_figure", lambda drawing, output, dpi=0: output.write_text(drawing.described))
    words = FIGURES[entry].replace("GPU", "h200_sxm").split("RESULTS")
    if FIGURES[entry].split()[0] in OF_ENTRIES:
        words = [f"reproduce {entry}"]
    results = map(str, committed_results("h200_sxm"))
    code, _, err = lrbench(" ".join(results).join(words), "-o", tmp_path / "figure.svg")
    lacking = all(each.verdict == "not measured" or each.missing for each in evaluated() if each.asked.id == entry)
    assert lacking or (code, (tmp_path / "figure.svg").exists()) == (0, True), err


def test_the_committed_page_is_what_the_command_writes(lrbench: Lrbench) -> None:
    page = (ROOT / "docs" / "reproductions.md").read_text(encoding="utf-8")
    written = lrbench("reproduce --format markdown")[1]
    assert written == page, "write it anew: lrbench reproduce --format markdown > docs/reproductions.md"


def test_command(lrbench: Lrbench, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several = refused(lrbench, "reproduce tfla -o x.svg")
    assert "--figure needs one entry that has one: tfla-fig4, tfla-fig9, " in several
    claims(tmp_path, 'ratio = ["theirs", "ours"]\nat_least = 3\n')
    monkeypatch.setattr(entries, "FOLDER", tmp_path)
    shown = lrbench("reproduce a-doc-fig1", "--results", results, "-o", tmp_path / "figure.svg")[1]
    assert (tmp_path / "figure.svg").stat().st_size > 5000
    assert "8192  ≥ 3       4 (4 to 4)  4 ms    1 ms  holds" in shown
    assert "holds in part: holds at seq_len 8k (4); not at seq_len 1k (2)" in shown
    assert "a-doc-fig1  figure 1  a claim  holds in part" in lrbench("reproduce", "--results", results)[1]
    (claim,) = json.loads(lrbench("reproduce a-doc", "--results", results, "--format", "json")[1])
    first = {
        "seq_len": 1024,
        "document": "≥ 3",
        "here": 2.0,
        "theirs": [2.0],
        "ours": [1.0],
        "here_low": 2.0,
        "here_high": 2.0,
    }
    assert claim["lines"][0] == first | {"verdict": "does not hold here"}
    assert lrbench("reproduce", "--results", results, "--format", "csv")[1].startswith("id,document,where,claim,says")
    assert "Measured on `h200_sxm`. 1 claims" in lrbench("reproduce", "--results", results, "--format", "markdown")[1]
    for arguments, message in (
        (("a-doc-fig2",), "id must be one of a-doc-fig1, got 'a-doc-fig2'; did you mean a-doc-fig1?"),
        (("-o", "x.svg"), "--figure needs one entry that has one: a-doc-fig1; got 0"),
        (("a-doc", "--gpu", "h2000"), "h2000"),
        (("a-doc", "--output", tmp_path), "--output must be given with --run: without it nothing is measured"),
        (("a-doc", "--time-limit", "9"), "--time-limit must be given with --run"),
        (("a-doc", "--results", tmp_path / "nothing"), "nothing (does not exist)"),
    ):
        assert message in refused(lrbench, "reproduce", *arguments, "--results", results)


def test_run_sweeps_what_has_no_row(
    lrbench: Lrbench, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sweep does; what it measured counts then."""
    claims(tmp_path, 'ratio = ["theirs", "ours"]\nat_least = 1\nover = { seq_len = [1024, 2048, 4096] }')
    monkeypatch.setattr(entries, "FOLDER", tmp_path)
    asked = []

    def sweep(requests: Sequence[plan.Request], how: SweepOptions) -> Outcome:
        asked.append(requests)
        if how.time_limit_s == math.inf:
            cases = [
                (impl, seq_len) for each in requests for impl in each.impls or () for seq_len in each.seq_lens or ()
            ]
            measured = [row("mlstm_sig", impl, seq_len=seq_len) for impl, seq_len in cases]
            write(measured, how.output / "a.parquet")
        return Outcome(path=None, records=[], resumed=[], remaining=how.time_limit_s == 0, interrupted=len(asked) > 2)

    def run_in_turn(groups: Any, how: SweepOptions) -> None:
        for n, group in enumerate(groups):
            sizes = [{name: each[name] for name in ("impl", "seq_len", "state_dtype", "time_ms")} for each in group]
            write(in_turn(f"run-{n}", [row("mlstm_sig", **each) for each in sizes]), how.output / f"{n}.parquet")

    monkeypatch.setattr(session, "run_sweep", sweep)
    monkeypatch.setattr(session, "run_in_turn", run_in_turn)
    shown = lrbench("reproduce a-doc", "--results", results, "--run", "--output", tmp_path / "rows")[1]
    assert "holds: " in shown
    assert [(each.impls, each.seq_lens, each.batches) for requests in asked for each in requests] == [
        ((impl,), (seq_len,), (65536 // seq_len,))
        for seq_len in (2048, 4096)
        for impl in ("mlstm_kernels.xl_chunk_siging", "fused_chunk")
    ]
    arguments = ("reproduce", "a-doc", "--results", results, "--run", "--output", tmp_path / "others")
    code = lrbench(*arguments, "--time-limit", "0")[0]
    assert (code, len(asked)) == (1, 2)
    assert lrbench(*arguments)[0] == 130 and len(asked) == 3


def test_every_claim_can_be_measured(results: Path) -> None:
    """Where no row is of a commit, all that the claims compare is asked for, each from a family that has it."""
    store = verdicts.Store([results], "h200_sxm", lambda row: row["git_commit"] == "c" * 40)
    found = [verdicts.evaluate(each, store) for each in entries.load()]
    asked = list(complete.missing_requests(found))
    assert len(asked) > 50 and all(plan.plan(each, device_kind="cuda") for each in asked)
    assert complete.missing_errors(found) == [1024 * 2**n for n in range(7)]
