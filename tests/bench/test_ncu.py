"""Nsight Compute's output: kernels, units and numbers as it prints them, and what it says when it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from lrbench.bench.drive import ncu
from lrbench.bench.drive.ncu import KernelCounts, add_up, parse_raw_csv, total
from lrbench.tests import ROOT
from lrbench.tests.command_line import script

RAW_PAGE = (ROOT / "tests/data/ncu_raw_page.csv").read_text()


def test_kernels_numbers_and_units() -> None:
    marker, states, walk, fill = parse_raw_csv(RAW_PAGE)
    assert marker.name == "spin_kernel(long)"
    assert states.values["dram__bytes_read.sum"] == 805_306_368
    assert states.values["dram__bytes_write.sum"] == 134_217_728
    assert states.values["lts__t_bytes.sum"] == pytest.approx(1_073_740_000)
    assert total([walk], *ncu.TENSOR_METRICS) == 103_079_215_104 + 1000
    assert fill.name.startswith("void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>, 1>(int")
    assert "dram__bytes_read.sum" not in fill.values
    assert total([fill], *ncu.TENSOR_METRICS) == 0


def test_a_counter_that_the_device_lacks_is_none_and_not_zero() -> None:
    found = add_up([KernelCounts(name="a", values={"dram__bytes_read.sum": 1.0}), KernelCounts(name="b", values={})])
    assert found["dram_read_bytes"] == 1
    assert [found[name] for name in ("measured_tensor_flops", "dram_write_bytes", "l2_bytes")] == [None] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==WARNING== No kernels were profiled.\n", "ncu's output must hold the raw page as CSV, got none"),
        ("", "ncu's output must hold the raw page as CSV, got none"),
        ('"ID","Kernel Name"\n', "ncu's output must hold a row of units, got none"),
        (RAW_PAGE.replace('"Kbyte"', '"byte/s"'), r"the unit of dram__bytes_write.sum must be a word .*, got 'byte/s'"),
        (RAW_PAGE.replace('"1,342,177,280"', '"many"'), "dram__bytes_read.sum must be a number, got 'many'"),
    ],
)
def test_output_that_is_none_of_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_raw_csv(text)


def test_only_metrics_that_the_device_has_are_asked_for(tmp_path: Path) -> None:
    listing = "Device NVIDIA V100\ndram__bytes_read   Counter  byte\nsm__ops_path_tensor_src_fp64 Counter inst\n"
    some = script(tmp_path / "some", f"cat <<'END'\n{listing}END")
    assert ncu.available_metrics(str(some)) == ("sm__ops_path_tensor_src_fp64.sum", "dram__bytes_read.sum")
    none = script(tmp_path / "none", "echo 'no device' >&2; exit 1")
    assert ncu.available_metrics(str(none)) == ncu.METRICS
    version = script(tmp_path / "version", "echo 'Version 2025.3.1.0 (build 36398880) (public-release)'")
    assert ncu.ncu_version(str(version)) == "2025.3.1.0"
    assert ncu.ncu_version(str(none)) is None


def test_ncu_is_found_on_the_path_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = script(tmp_path / "installed", "true")
    monkeypatch.setattr(ncu, "PLACES", (str(installed), str(tmp_path / "missing*")))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert ncu.find_ncu() == str(installed)
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "ncu", "true")
    assert ncu.find_ncu() == str(tmp_path / "bin" / "ncu")
    (tmp_path / "bin" / "ncu").unlink()
    monkeypatch.setattr(ncu, "PLACES", ())
    assert ncu.find_ncu() is None
