"""A user's own accelerators: found, taken everywhere, and refused in one line when something is wrong with the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from lrbench.analysis.accelerators.known import (
    VARIABLE,
    get_accelerator,
    known_accelerators,
    match_device,
    user_accelerators,
    user_file,
)
from lrbench.analysis.counts import count
from lrbench.analysis.model.runtime_model import runtime_model
from lrbench.tests import ROOT

H100_NVL = (ROOT / "tests/data/accelerators.toml").read_text()


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the variable names, with one good accelerator."""
    path = tmp_path / "mine.toml"
    path.write_text(H100_NVL)
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def test_it_is_an_accelerator_like_any_other(named: Path) -> None:
    mine = get_accelerator("H100-NVL")
    assert (mine.key, mine.part, mine.sms) == ("h100_nvl", "H100 94 GB HBM3 PCIe", 132)
    assert (mine.memory_bytes, mine.capability) == (94_000_000_000, "9.0")
    assert mine.peak_flops("bf16") == 835e12
    assert mine.peak_flops("fp64") is None
    assert "h100_nvl" in known_accelerators()
    assert match_device("NVIDIA H100 NVL") == "h100_nvl"
    assert match_device("NVIDIA H100 PCIe") == "h100_pcie"
    problem = count("mlstm_sig", seq_len=8192, batch=8, num_heads=8, head_dim_qk=256, head_dim_v=512, chunk_size=128)
    model = runtime_model(problem, mine, "bf16")
    assert model.upper_ms == pytest.approx(1e3 * (problem.flops / 835e12 + problem.bytes / 3.9e12))


def test_without_the_file_it_is_unknown() -> None:
    assert match_device("NVIDIA H100 NVL") is None
    with pytest.raises(ValueError, match="got 'h100_nvl'"):
        get_accelerator("h100_nvl")


def test_a_changed_file_is_read_again(named: Path) -> None:
    assert get_accelerator("h100_nvl").sms == 132
    named.write_text(H100_NVL.replace("sms = 132", "sms = 131"))
    assert get_accelerator("h100_nvl").sms == 131


def test_where_the_file_is_looked_up(named: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_file() == named
    monkeypatch.setenv(VARIABLE, "")
    assert (user_file(), dict(user_accelerators())) == (None, {})
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert user_file() is None
    own = tmp_path / "config" / "lrbench" / "accelerators.toml"
    own.parent.mkdir(parents=True)
    own.write_text(H100_NVL.replace("h100_nvl", "own"))
    assert list(user_accelerators()) == ["own"]
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config").rename(tmp_path / ".config")
    assert list(user_accelerators()) == ["own"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("sms = 132", "sms = -132"), "h100_nvl.sms must be an integer of at least 1, got -132"),
        (("sms = 132", "sms = true"), "h100_nvl.sms must be an integer of at least 1, got True"),
        (("sms = 132", "smms = 132"), "h100_nvl must be a table without other keys than name, .* got 'smms'"),
        (("sms = 132", ""), "h100_nvl.sms must be an integer of at least 1, got nothing"),
        (("smem_bytes = 232448", "smem_bytes = 227"), "h100_nvl.smem_bytes must be an integer .* 1024, got 227"),
        (("94_000_000_000", "94"), r"h100_nvl.memory_bytes must be an integer of at least 1e\+09, got 94"),
        (('"9.0"', '"sm_90"'), "h100_nvl.capability must be a compute capability such as \"9.0\", got 'sm_90'"),
        (("l2_bytes = 62914560", "l2_bytes = 6.2e7"), "h100_nvl.l2_bytes must be an integer of at least 1024"),
        (("= 3.9e12", "= 3900"), r"h100_nvl.bandwidth_bytes_s must be a number of bytes/s, at least 1e\+09, got 3900"),
        (("= 3.9e12", "= inf"), "h100_nvl.bandwidth_bytes_s must be a number of bytes/s, .* got inf"),
        (("= 3.9e12", "= nan"), "h100_nvl.bandwidth_bytes_s must be a number of bytes/s, .* got nan"),
        (("= 3.9e12", "= '3.9e12'"), "h100_nvl.bandwidth_bytes_s must be a number of bytes/s, .* got '3.9e12'"),
        (("bf16 = 835e12", "bf16 = -1.0"), "h100_nvl.matrix_flops.bf16 must be a number of FLOP/s, .* got -1.0"),
        (("bf16 = 835e12", "fp4 = 835e12"), "h100_nvl.matrix_flops.fp4 must be 'fp16' or 'bf16' .*, got 'fp4'"),
        (("{ bf16 = 835e12, fp16 = 835e12, fp32 = 60e12 }", "835e12"), "h100_nvl.matrix_flops must be a table of"),
        (("{ bf16 = 835e12, fp16 = 835e12, fp32 = 60e12 }", "{}"), "h100_nvl.matrix_flops must be a table of"),
        (('source = "NVIDIA H100 NVL product brief"', ""), "h100_nvl.source must be a text, got nothing"),
        (('part = "H100 94 GB HBM3 PCIe"', 'part = " "'), "h100_nvl.part must be a text, got ' '"),
        (('["NVIDIA H100 NVL"]', '"NVIDIA H100 NVL"'), "h100_nvl.device_names must be a list, each a text"),
        (("[h100_nvl]", "[h100_sxm]"), r"h100_sxm must be a name .* that lrbench does not have already"),
        (("[h100_nvl]", "[h100]"), r"h100 must be a name"),
        (("[h100_nvl]", "[cpu]"), r"cpu must be a name"),
        (("[h100_nvl]", "[H100_NVL]"), r"H100_NVL must be a name of lower-case letters"),
        (("[h100_nvl]", "h100_nvl = 3\n[other]"), r"h100_nvl must be a table, got 3"),
        (("[h100_nvl]", "[h100_nvl"), "must be a TOML file"),
    ],
)
def test_a_bad_file_is_one_clear_line(named: Path, change: tuple[str, str], message: str) -> None:
    """The line names the file, the key, what was expected and what was given.

    What is wrong here in general (no TOML, a key too many or missing, another type, no finite number) is found in every
    TOML file, since one reader reads them all; the tests of the others leave it out.
    """
    assert change[0] in H100_NVL
    named.write_text(H100_NVL.replace(*change))
    with pytest.raises(ValueError, match=message) as caught:
        get_accelerator("h100_nvl")
    assert str(named) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_no_text(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="must be a TOML file"):
        known_accelerators()
    monkeypatch.setenv(VARIABLE, str(named.with_name("none.toml")))
    with pytest.raises(ValueError, match=rf"{VARIABLE} must name a TOML file, got .*none.toml \(no such file\)"):
        known_accelerators()
