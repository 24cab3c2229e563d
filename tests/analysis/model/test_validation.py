"""How often the intervals of predictions hold: on the committed rows, on another accelerator, and where they cannot."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from lrbench.analysis.accelerators.known import get_accelerator
from lrbench.analysis.model.runtime_model import runtime_model
from lrbench.analysis.model.validation import by_chance, by_implementation, in_words, summary, validate
from lrbench.bench import plan
from lrbench.bench.drive import complete
from lrbench.results.select import grouped
from lrbench.results.store import committed_results

from .. import rows as made

FAMILIES = (("mlstm_sig", "mlstm_exp"), ("lightning",), ("rglru", "linear_scan"), ("wkv4",), ("attention", "gated_mlp"))


def test_nine_of_ten_committed_rows_lie_in_the_intervals_of_predictions_without_them() -> None:
    """Of each family by its device's rows; by those of another device alone; and by these and a calibration's."""
    requests = complete.load_sweeps(complete.sweeps_file("calibration"))
    calibration = {each.case.case_id for request in requests for each in plan.plan(request, device_kind="cuda")}
    assert 150 <= len(calibration) <= 250, "ten minutes"
    everything = [*validate(committed_results(), calibration=calibration)]
    ways = grouped(everything, lambda each: (each.fitted_on, each.held_out_on, each.calibrated))
    h100, h200 = "h100_sxm", "h200_sxm"
    for here, error in ((h100, 0.02), (h200, 0.03)):
        own = ways[here, here, False]
        for ops in FAMILIES:
            found = summary([each for each in own if each.op in ops])
            assert found["held"] >= 0.85 * found["rows"], (here, ops)
        assert summary(own)["error"] < error and summary(own)["width"] < 1.12
    for there, here in ((h200, h100), (h100, h200)):
        carried, calibrated = (summary(ways[there, here, each]) for each in (False, True))
        assert carried["error"] < 0.06 and carried["width"] < 1.2, "by the specification alone: 20 % was the aim"
        assert calibrated["error"] < 0.06 and calibrated["width"] < 1.25
        assert calibrated["rows"] > 1000 and carried["rows"] > 1000
        assert all(each["held"] >= 0.9 * each["rows"] for each in (carried, calibrated))
    assert int(re.search(r", (\d+) fewer", in_words(everything))[1]) <= 6


def test_what_so_few_rows_can_tell() -> None:
    """Of 6 rows 3 would be too few: at 85 % that has a chance of 4.7 %, and 4 one of 22 %."""
    assert [by_chance(rows) for rows in (1, 6, 58, 59, 300)] == [(0, 1), (4, 6), (45, 58), (45, 58), (245, 291)]


def rows_of(impl: str, accelerator: str, factor: float, noise: float) -> list[dict[str, object]]:
    """Return rows at a share of the roofs of an accelerator."""
    generator, part, rows = random.Random(accelerator), get_accelerator(accelerator), []
    for seq_len in (1024, 2048, 4096, 8192, 16384, 32768):
        for chunk in (64, 256):
            case = made.case("mlstm_sig", impl, seq_len=seq_len, chunk_size=chunk)
            model = runtime_model(made.count_of(case), part, "bf16")
            time_ms = factor * (2 * model.flops_ms + 1.5 * model.bytes_ms) * (1 + generator.uniform(-noise, noise))
            rows.append(made.row_of(case, time_ms=time_ms, accelerator=accelerator))
    return rows


@pytest.mark.parametrize(("factor", "share"), [(1.0, 1.0), (9.0, 0.0)])
def test_a_fit_is_held_against_rows_of_another_accelerator(tmp_path: Path, factor: float, share: float) -> None:
    rows = [*rows_of("xl_chunk", "h200_sxm", 1.0, 0.05), *rows_of("xl_chunk", "a100_80_sxm", factor, 0.05)]
    path = made.write(rows, tmp_path / "r.parquet")
    found = list(validate([path], calibration={row["case_id"] for row in rows[::6]}))
    ways = grouped(found, lambda each: (each.fitted_on, each.held_out_on, each.calibrated))
    assert len(ways) == 6
    for (fitted_on, here, calibrated), group in ways.items():
        assert len(group) == (10 if calibrated else 12)
        held = sum(each.held for each in group) / len(group)
        assert held >= 0.7 if fitted_on == here else calibrated or held == share, (fitted_on, here, calibrated)
    fits = {row["fit"] for row in by_implementation(found)}
    assert fits >= {"h200_sxm", "a100_80_sxm", "h200_sxm to a100_80_sxm", "a100_80_sxm to h200_sxm"}


def test_rows_without_a_fit_are_said(tmp_path: Path) -> None:
    path = made.write(rows_of("xl_chunk", "h200_sxm", 1.0, 0.0)[:1], tmp_path / "r.parquet")
    assert by_implementation([*validate([path])]) == [] and in_words([*validate([path])]) == "no fit for 1 row"
