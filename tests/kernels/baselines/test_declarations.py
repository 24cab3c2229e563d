"""The declarations of the baselines: complete, light to import, planned at equal tokens, refused where known bad."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import re

import pytest

from lrbench.kernels import FAMILIES
from lrbench.kernels.baselines import (
    BASELINES,
    availability,
    baselines_for,
    get_baseline,
    get_operation,
    installed_versions,
    known_bad_here,
    plan_sizes,
)
from lrbench.kernels.baselines.operations import OPERATIONS
from lrbench.kernels.baselines.spec import Baseline
from lrbench.kernels.common.spec import DTYPES, MODES, resolve
from lrbench.results.schema import SIZE_COLUMNS, Case
from lrbench.tests.command_line import run_python
from lrbench.tests.kernels.baselines.test_numerics import case_of

FAMILY = {"batch": 8, "seq_len": 8192, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256}
NAMES = [baseline.name for baseline in BASELINES]
PROVIDERS = {
    "torch", "fla", "mamba_ssm", "mlstm_kernels", "flash_attn", "lightning_attn", "accelerated_scan", "liger_kernel",
    "xformers", "jax", "flash_qla", "flashinfer", "cudnn",
}  # fmt: skip
HEAVY = {"torch", "triton", "numpy", *PROVIDERS}


def find(name: str) -> Baseline:
    """Return the first baseline of this name, whatever its operation."""
    return next(baseline for baseline in BASELINES if baseline.name == name)


def planned_case(baseline: Baseline, mode: str | None = None, **sizes: int) -> Case:
    planned = {**plan_sizes(baseline, FAMILY)[0], **sizes}
    return case_of(baseline, planned, mode or baseline.modes[0], baseline.dtypes[0])


def refused(baseline: Baseline, case: Case) -> str | None:
    return baseline.why_unsupported(case.mode, case.dtype, case.state_dtype, case.sizes)


@pytest.mark.parametrize("baseline", BASELINES, ids=NAMES)
def test_declaration_is_complete(baseline: Baseline) -> None:
    assert baseline.provider in PROVIDERS
    assert baseline.name.partition(".")[0] == baseline.provider
    assert baseline.kernels
    assert baseline in baselines_for(baseline.kernels[0])
    assert get_baseline(baseline.op, baseline.name) is baseline
    assert set(baseline.modes) <= set(MODES) and set(baseline.dtypes) <= set(DTYPES)
    assert set(baseline.devices) <= {"cpu", "cuda"}
    assert baseline.settings and baseline.licence and baseline.tested
    operation = get_operation(baseline.op)
    for target in (baseline.build, baseline.why_not, operation.inputs, operation.recurrent):
        assert target is None or callable(resolve(target))
    for known in baseline.known_bad:
        assert known.reason and known.source and (known.versions or known.architectures)


def test_operations_of_baselines_alone_are_complete() -> None:
    for operation in OPERATIONS.values():
        assert set(operation.sizes) <= set(SIZE_COLUMNS)
        assert any(baseline.op == operation.name for baseline in BASELINES)


def test_adapters_import_no_package() -> None:
    """Declaring, planning and asking what is here import neither torch nor any outside package."""
    code = f"""
import sys
from lrbench.kernels import baselines as b
[b.plan_sizes(x, {FAMILY!r}, (64, 128)) for x in b.BASELINES]
[b.availability(x) for x in b.BASELINES]
b.installed_versions()
print(*(set(sys.modules) & {HEAVY!r}))
"""
    assert run_python(code).split() == []


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"impl must be one of .*fla\.chunk_gla.* for gla, got 'fla\.gla'"):
        get_baseline("gla", "fla.gla")
    with pytest.raises(ValueError, match=r"op must be one of \d+ names, got 'atention'; did you mean attention"):
        get_operation("atention")
    assert baselines_for("no such family") == ()


def test_missing_package_names_the_command_that_brings_it() -> None:
    missing = dataclasses.replace(find("fla.chunk_gla"), module="no_such_package.ops")
    assert availability(missing) == "no_such_package.ops is not installed: pip install fla-core==0.6.0"
    installable = dataclasses.replace(missing, install="pip install 'flash-attn-4[cu13]'")
    assert availability(installable) == "no_such_package.ops is not installed: pip install 'flash-attn-4[cu13]'"


def test_a_package_that_was_built_without_its_extension_is_not_there() -> None:
    """mamba_ssm imports its CUDA extension for all that it has, and pip installs it without, where nvcc is missing."""
    whole = dataclasses.replace(find("fla.chunk_gla"), module="packaging", extension="packaging.specifiers")
    assert availability(whole) is None
    assert availability(dataclasses.replace(whole, extension="no_such_extension")) == (
        "packaging does not import: it was built without no_such_extension: pip install fla-core==0.6.0"
    )
    assert {each.extension for each in BASELINES if each.provider == "mamba_ssm"} == {"selective_scan_cuda"}


def test_availability_looks_for_the_submodule_without_importing() -> None:
    baseline = find("fla.chunk_gla")
    assert availability(dataclasses.replace(baseline, module="packaging.specifiers")) is None
    assert availability(dataclasses.replace(baseline, module="xml.etree.ElementTree")) is None
    assert availability(dataclasses.replace(baseline, module="xml.etree")) is None
    assert availability(dataclasses.replace(baseline, module="packaging.no_such_module")) is not None
    assert availability(dataclasses.replace(baseline, module="packaging.specifiers.no_such_module")) is not None


def test_installed_versions_are_those_of_the_distributions() -> None:
    versions = installed_versions()
    assert versions["torch"] == importlib.metadata.version("torch")
    assert all(name == name.lower() and "_" not in name for name in versions)


H200, A100 = (9, 0), (8, 0)


@pytest.mark.parametrize(
    ("name", "mode", "sizes", "versions", "capability", "expected"),
    [
        ("fla.chunk_simple_gla", "fwbw", {}, {"triton": "3.6.0"}, H200, "gated backward on Hopper"),
        ("fla.chunk_simple_gla", "bw", {}, {"triton": "3.4.0"}, "9.0", "gated backward on Hopper"),
        ("fla.chunk_simple_gla", "fwbw", {}, {"triton": "3.7.0"}, H200, "gated backward on Hopper"),
        ("fla.chunk_simple_gla", "fwbw", {}, {"triton": "3.7.1"}, H200, None),
        ("fla.chunk_simple_gla", "fwbw", {}, {"triton": "3.3.1"}, H200, None),
        ("fla.chunk_simple_gla", "fw", {}, {"triton": "3.6.0"}, H200, None),
        ("fla.chunk_simple_gla", "fwbw", {}, {"triton": "3.6.0"}, A100, None),
        ("fla.chunk_simple_gla", "fwbw", {}, {"triton": "3.6.0"}, None, None),
        ("fla.chunk_simple_gla", "fwbw", {}, {}, H200, None),
        ("fla.chunk_retention", "fwbw", {}, {"triton": "3.6.0"}, H200, None),
        ("fla.fused_chunk_gla", "fw", {}, {"fla-core": "0.6.0"}, H200, "raises NotImplementedError"),
        ("fla.fused_chunk_gla", "fw", {}, {"fla-core": "0.4.0"}, H200, "wrong results"),
        ("mlstm_kernels.xl_chunk", "fw", {}, {"triton": "3.6.0"}, H200, "compiler aborts"),
        ("mlstm_kernels.xl_chunk", "fw", {}, {"triton": "3.6.0+git1a2b"}, H200, "compiler aborts"),
        ("mlstm_kernels.xl_chunk", "fw", {}, {"triton": "3.7.1", "mlstm-kernels": "2.0.6"}, H200, None),
        ("mlstm_kernels.xl_chunk_siging", "fw", {}, {"triton": "3.6.0", "mlstm-kernels": "2.0.6"}, H200, None),
        ("mlstm_kernels.xl_chunk_siging", "fw", {}, {"triton": "3.9.0", "mlstm-kernels": "2.0.6"}, A100, "block_ptr"),
        ("mlstm_kernels.limit_chunk", "fw", {}, {"triton": "3.9.0", "mlstm-kernels": "2.1.0"}, A100, None),
        ("mamba_ssm.chunk_scan", "fw", {"seq_len": 65536}, {"mamba-ssm": "2.3.2.post1"}, H200, None),
        ("flash_attn.v3", "fw", {}, {"flash-attn-3": "3.0.0b1"}, A100, "Hopper alone"),
        ("flash_attn.v3", "fw", {}, {"flash-attn-3": "3.0.0b1"}, H200, None),
        ("fla.chunk_gated_delta_rule", "fwbw", {}, {"triton": "3.6.0"}, H200, "gated backward on Hopper"),
        ("fla.chunk_kda", "fwbw", {}, {"triton": "3.6.0"}, H200, None),
        ("flash_qla.chunk_gated_delta_rule", "fw", {}, {}, A100, "not written for this GPU"),
        ("flashinfer.chunk_gated_delta_rule", "fw", {}, {}, A100, None),
        ("cudnn.gated_delta_net", "fw", {}, {}, H200, "need CUDA 13.3"),
        ("cudnn.kimi_delta_attention", "fwbw", {}, {}, H200, None),
    ],
)
def test_known_failures_are_refused_where_they_happen(
    name: str,
    mode: str,
    sizes: dict[str, int],
    versions: dict[str, str],
    capability: tuple[int, int] | str | None,
    expected: str | None,
) -> None:
    baseline = find(name)
    reason = known_bad_here(baseline, planned_case(baseline, mode, **sizes), versions, capability)
    if expected is None:
        assert reason is None
    else:
        assert reason is not None and expected in reason


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("mlstm_kernels.native_autograd", {"mode": "fwbw"}, "mode must be one of fw for .*, got fwbw"),
        ("fla.chunk_gla", {"dtype": "fp64"}, "dtype must be one of bf16, fp16 for fla.chunk_gla, got fp64"),
        ("fla.chunk_gla", {"chunk_size": 128}, "chunk_size must be one of 64 for fla.chunk_gla, got 128"),
        ("mlstm_kernels.xl_chunk", {"seq_len": 1000}, "seq_len must be a multiple of chunk_size 128, got 1000"),
        ("mlstm_kernels.xl_chunk", {"seq_len": 64, "chunk_size": 128}, "below seq_len 128 the chunk is the whole"),
        ("mlstm_kernels.parallel_siging", {"seq_len": 65536}, "at most 268435456, got 549755813888"),
        ("lightning_attn.v2", {"head_dim_v": 256}, "head_dim_v must be a power of two from 32 to 128, got 256"),
        ("lightning_attn.v2", {"head_dim_qk": 96}, "head_dim_qk must be a power of two from 32 to 128, got 96"),
        ("torch.sdpa_flash", {"head_dim_v": 64}, "head_dim_qk must equal head_dim_v, got 128 and 64"),
        ("torch.sdpa_flash", {"head_dim_qk": 512, "head_dim_v": 512}, "head_dim_v must be at most 256, got 512"),
        ("torch.sdpa_cudnn", {"head_dim_v": 256}, "head_dim_v must be a multiple of 8 up to 128, got 256"),
        ("flash_attn.v4", {"head_dim_qk": 512, "head_dim_v": 512}, "multiple of 8 up to 256, got 512"),
        ("mamba_ssm.selective_scan", {"head_dim_qk": 512}, "the state. must be at most 256, got 512"),
        ("flash_qla.chunk_gated_delta_rule", {"head_dim_v": 256}, "head_dim_v must be 128, got 256"),
        ("flashinfer.chunk_gated_delta_rule", {"mode": "fwbw"}, "mode must be one of fw for .*, got fwbw"),
        ("cudnn.kimi_delta_attention", {"dtype": "fp16"}, "dtype must be one of bf16 for .*, got fp16"),
        ("fla.chunk_delta_rule", {"num_heads_qk": 8}, "num_heads_qk must be None or num_heads, 16, got 8"),
        ("fla.chunk_kda", {"head_dim_qk": 512}, "head_dim_qk must be at most 256, got 512"),
    ],
)
def test_what_a_baseline_cannot_run_is_refused(name: str, changes: dict[str, object], expected: str) -> None:
    baseline = find(name)
    reason = refused(baseline, dataclasses.replace(planned_case(baseline), **changes))
    assert reason is not None and re.search(expected, reason)


@pytest.mark.parametrize("baseline", BASELINES, ids=NAMES)
def test_planned_sizes_keep_tokens_and_embedding_and_run(baseline: Baseline) -> None:
    for head_dim_v, seq_len in itertools.product((64, 128, 256, 512), (1024, 65536)):
        family = {
            "batch": 65536 // seq_len,
            "seq_len": seq_len,
            "num_heads": 4096 // head_dim_v,
            "head_dim_qk": head_dim_v // 2,
            "head_dim_v": head_dim_v,
        }
        planned = plan_sizes(baseline, family, (64, 128, 256))
        assert planned
        for sizes in planned:
            assert sizes["batch"] * sizes["seq_len"] == 65536
            width = sizes.get("channels") or sizes.get("d_model") or sizes["num_heads"] * sizes["head_dim_v"]
            assert width == 4096
            assert ("chunk_size" in sizes) == bool(baseline.chunk_sizes)
            # What keeps T x T matrices may refuse these lengths, the delta rule's kernels all head dims but one.
            if baseline.formulation != "parallel" and baseline.op not in FAMILIES["delta"]:
                assert refused(baseline, planned_case(baseline, **sizes)) is None, sizes


@pytest.mark.parametrize(
    ("name", "family", "chunks", "op", "expected"),
    [
        ("flash_attn.v2", FAMILY, (), None, {"num_heads": 32, "head_dim_qk": 128, "head_dim_v": 128}),
        # An embedding of 96 has smaller heads.
        ("flash_attn.v2", {**FAMILY, "num_heads": 3, "head_dim_v": 32}, (), None, {"num_heads": 3, "head_dim_v": 32}),
        ("mamba_ssm.chunk_scan", FAMILY, (), None, {"num_heads": 64, "head_dim_v": 64, "chunk_size": 256}),
        ("mamba_ssm.chunk_scan", FAMILY, (64,), None, {"num_heads": 64, "chunk_size": 64}),
        # Swept itself, it runs at the very same sizes.
        ("mamba_ssm.chunk_scan", FAMILY, (64,), "mamba2_ssd", {**FAMILY, "chunk_size": 64}),
        ("mamba_ssm.selective_scan", FAMILY, (), None, {"head_dim_qk": 16, "channels": 4096}),
    ],
)
def test_operations_have_their_own_heads(name, family, chunks, op, expected) -> None:
    """Beside channels too, each of which stands for one of the embedding dim's."""
    over_channels = {"batch": 8, "seq_len": 8192, "channels": family["num_heads"] * family["head_dim_v"]}
    (sizes,) = plan_sizes(find(name), family, chunks, op=op)
    assert op or [sizes] == plan_sizes(find(name), over_channels, chunks)
    assert expected.items() <= sizes.items() and (sizes["batch"], sizes["seq_len"]) == (8, 8192)
    assert ("num_heads" in sizes) == (name != "mamba_ssm.selective_scan")


def test_chunk_axis() -> None:
    expected = {(8192, ()): [128], (8192, (64, 256)): [64, 256], (8192, (48,)): [128]}
    expected |= {(256, (64, 128, 256, 512)): [128, 64, 256], (256, (512, 1024)): [256], (32, (64, 128)): [128]}
    found = {}
    for seq_len, asked in expected:
        planned = plan_sizes(find("mlstm_kernels.xl_chunk_siging"), {**FAMILY, "seq_len": seq_len}, asked)
        found[seq_len, asked] = [sizes["chunk_size"] for sizes in planned]
    assert found == expected
