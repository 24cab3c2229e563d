"""Accelerator specifications: complete, consistent, and found by key, alias and driver name."""

import pytest

from lrbench.analysis.accelerators.known import ACCELERATORS, ALIASES, get_accelerator, known_accelerators, match_device


@pytest.mark.parametrize("key", ACCELERATORS)
def test_specification_is_complete_and_plausible(key: str) -> None:
    accelerator = ACCELERATORS[key]
    assert accelerator.key == key == key.lower()
    assert accelerator.part
    assert len(accelerator.source) > 10
    assert {"fp16", "fp32", "fp64"} <= accelerator.matrix_flops.keys()
    assert accelerator.matrix_flops["fp16"] >= accelerator.matrix_flops["fp32"] >= accelerator.matrix_flops["fp64"]
    assert accelerator.vector_flops <= accelerator.matrix_flops["fp32"]
    # 50 to 700 FLOP per byte separates a GPU from a slip of units (GB/s for TB/s).
    assert 50 < accelerator.intensity("fp16") < 700
    assert accelerator.l2_bytes >= 2**20 > accelerator.smem_bytes >= 32 * 1024
    assert accelerator.sms >= 80
    assert f"{accelerator.memory_bytes / 1e9:g} GB" in accelerator.part


def test_aliases_mean_the_sxm_part_and_the_papers_a100() -> None:
    assert get_accelerator("h100").key == "h100_sxm"
    assert get_accelerator("H200").key == "h200_sxm"
    assert get_accelerator("a100").key == "a100_80_pcie"
    assert get_accelerator("rtx-4090").key == "rtx_4090"
    assert set(ALIASES.values()) <= set(ACCELERATORS)


def test_unknown_accelerator_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"accelerator must be one of v100, .*h100_sxm.*cpu.*h100.*, got 'zzz'"):
        get_accelerator("zzz")
    with pytest.raises(ValueError, match=r"one of \d+ names .*, got 'h900'; did you mean h200 or h100"):
        get_accelerator("h900")
    assert "cpu" in known_accelerators()


def test_driver_names() -> None:
    keys = {
        "NVIDIA H200": "h200_sxm", "NVIDIA H100 80GB HBM3": "h100_sxm", "NVIDIA H100 PCIe": "h100_pcie",
        "NVIDIA A100-SXM4-80GB": "a100_80_sxm", "NVIDIA A100 80GB PCIe": "a100_80_pcie",
        "NVIDIA A100-SXM4-40GB": "a100_40", "NVIDIA A100-PCIE-40GB": "a100_40", "Tesla V100-SXM2-32GB": "v100",
        "NVIDIA B200": "b200", "NVIDIA L40S": "l40s", "NVIDIA GeForce RTX 4090": "rtx_4090",
        "NVIDIA GeForce RTX 5090": "rtx_5090", "AMD Instinct MI300X": "mi300x",
    }  # fmt: skip
    others = (
        "NVIDIA H200 NVL", "NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Tesla V100-PCIE-32GB",
        "NVIDIA GB200", "NVIDIA L40", "NVIDIA GeForce RTX 4090 Laptop GPU", "AMD EPYC 9654",
    )  # fmt: skip
    keys |= dict.fromkeys(others)
    assert {name: match_device(name) for name in keys} == keys


def test_fp32_is_bounded_by_tf32_where_there_is_one() -> None:
    assert get_accelerator("h100").peak_flops("fp32") == ACCELERATORS["h100_sxm"].matrix_flops["tf32"]
    assert get_accelerator("v100").peak_flops("fp32") == ACCELERATORS["v100"].matrix_flops["fp32"]
    assert get_accelerator("v100").peak_flops("bf16") is None
    assert get_accelerator("v100").intensity("bf16") is None


def test_measured_roofs_replace_the_specification_and_stay_below_it() -> None:
    spec = get_accelerator("h200")
    measured = spec.with_measured_roofs()
    assert measured.peak_flops("bf16") < spec.peak_flops("bf16")
    assert measured.bandwidth_bytes_s < spec.bandwidth_bytes_s
    assert measured.peak_flops("fp16") == spec.peak_flops("fp16")
    with pytest.raises(ValueError, match="measured roofs, got v100"):
        get_accelerator("v100").with_measured_roofs()


@pytest.mark.gpu
def test_the_driver_agrees_with_the_specification() -> None:
    import torch

    from lrbench.kernels.common.device import memory_rate

    properties = torch.cuda.get_device_properties(0)
    key = match_device(properties.name)
    if key is None:
        pytest.skip(f"{properties.name} is not specified")
    accelerator = get_accelerator(key)
    assert accelerator.sms == properties.multi_processor_count
    assert accelerator.smem_bytes == properties.shared_memory_per_block_optin
    assert accelerator.l2_bytes == pytest.approx(properties.L2_cache_size, rel=0.01)
    assert accelerator.bandwidth_bytes_s == pytest.approx(memory_rate(torch.device("cuda:0")), rel=0.03)
