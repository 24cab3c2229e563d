"""Planning: axes become the cases that were meant, once each, in an order that shares work."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from lrbench.bench import plan
from lrbench.bench.drive.session import cases_to_verify
from lrbench.bench.plan import Request, in_run_order
from lrbench.bench.presets import get_preset, presets_for
from lrbench.bench.worker import correctness
from lrbench.kernels import FAMILIES
from lrbench.kernels.common.spec import MODES

from ..command_line import full_speed_seconds


def cases(device_kind: str = "cpu", **axes: object) -> list[plan.PlannedCase]:
    return plan.plan(Request(**axes), device_kind=device_kind)


def test_chunk_beyond_the_sequence_is_dropped_when_a_shorter_one_covers_it() -> None:
    three = (64, 128, 256)
    kept = {(three, 256): [64, 128, 256], (three, 128): [64, 128], (three, 100): [64, 128], (three, 50): [64]}
    kept |= {((256, 128), 100): [128], ((64, 64), 100): [64]}
    assert {asked: plan.drop_covered(*asked) for asked in kept} == kept


def test_default_preset_is_the_published_sweep() -> None:
    ours = [item.case for item in cases("cuda", preset="default") if item.case.impl == "fused_chunk"]
    assert {case.seq_len for case in ours} == {1024 * 2**n for n in range(7)}
    assert {case.batch * case.seq_len for case in ours} == {65536}
    assert {case.head_dim_v for case in ours} == {64, 128, 256, 512}
    assert {case.num_heads * case.head_dim_v for case in ours} == {4096}
    # The published chunk lengths, and the one that the implementation would choose for the problem.
    assert {case.chunk_size for case in ours} == {64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}
    published = [item.case for item in cases("cuda", preset="default") if item.case.impl == "xl_chunk"]
    assert {case.chunk_size for case in published} == {64, 128, 256, 512, 1024}
    assert {case.dtype for case in ours} == {"bf16"}


def test_fewer_heads_of_queries_and_keys_are_a_size_of_the_delta_rule() -> None:
    """Where they are as many it is left out, and the case that is checked in their place has the same share."""
    for given, size in ((2, 2), (4, None)):
        axes = {"num_heads": 4, "num_heads_qk": given, "head_dims": (64,), "impls": ("torch",)}
        planned = [item.case for item in cases(kernel="delta", **axes)]
        assert planned and {(case.num_heads, case.num_heads_qk) for case in planned} == {(4, size)}
    few = correctness._small(dataclasses.replace(planned[0], num_heads=32, num_heads_qk=16), "cpu")
    assert (few.num_heads, few.num_heads_qk) == (2, 1)
    with pytest.raises(ValueError, match="--qk-heads is no size of mlstm_sig, mlstm_exp, which has batch"):
        cases(kernel="tfla", num_heads_qk=2)


@pytest.mark.parametrize("kernel", FAMILIES)
def test_quick_on_a_gpu_is_a_choice_of_cases(kernel: str) -> None:
    """What a GPU answers within minutes: three lengths and two widths of what is listed, each of which has cases."""
    listed = get_preset("quick", kernel, "cuda").impls or ()
    planned = [item.case for item in cases("cuda", kernel=kernel, preset="quick")]
    assert 20 < len(planned) <= 110
    assert {case.impl for case in planned} <= set(listed)
    assert {case.seq_len for case in planned} == {1024, 4096, 16384}
    of_ops = [cases("cuda", kernel=kernel, preset="quick", ops=(op,)) for op in FAMILIES[kernel]]
    assert {item.case.impl for each in of_ops for item in each} == set(listed)


def test_quick_takes_a_baseline_that_is_asked_for_by_name() -> None:
    assert "flash_attn.v2" not in {item.case.impl for item in cases("cuda", preset="quick")}
    assert "flash_attn.v2" in {item.case.impl for item in cases("cuda", preset="quick", baselines=("flash_attn",))}


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
@pytest.mark.parametrize(("kernel", "preset"), [(kernel, name) for kernel in FAMILIES for name in presets_for(kernel)])
def test_no_case_twice_and_every_target_runs_here(kernel: str, preset: str, device_kind: str) -> None:
    planned = cases(device_kind, kernel=kernel, preset=preset)
    assert planned
    identifiers = [item.case.case_id for item in planned]
    assert len(set(identifiers)) == len(identifiers)
    assert all(device_kind in item.target.devices for item in planned)
    assert all(item.target.name == item.case.impl for item in planned)


def test_a_case_that_two_families_have_is_run_once() -> None:
    attention = {"impls": ("torch.sdpa_flash",), "seq_lens": (1024,), "modes": ("fw",)}
    each = [cases("cuda", kernel=kernel, preset="default", **attention) for kernel in ("tfla", "lightning")]
    (item,) = in_run_order([*each[0], *each[1]])
    assert item.case.kernel == "tfla"


LENGTHS = {1024 * 2**n for n in range(7)}


@pytest.mark.parametrize(
    ("device_kind", "axes", "impl", "size", "expected"),
    [
        # mLSTM's and Retention's queries have half the head dim of their values, simple GLA's the same.
        ("cpu", {"head_dims": (64,)}, "torch", "head_dim_qk", {32}),
        ("cpu", {"head_dims": (64,)}, "torch", "num_heads", {4}),
        ("cpu", {"head_dims": (64,), "head_dims_qk": (16, 64)}, "torch", "head_dim_qk", {16, 64}),
        ("cpu", {"head_dims": (64,), "num_heads": 3}, "torch", "num_heads", {3}),
        ("cpu", {"head_dims": (64,), "ops": ("retention",)}, "torch", "head_dim_qk", {32}),
        ("cpu", {"head_dims": (64,), "ops": ("simple_gla",)}, "torch", "head_dim_qk", {64}),
        ("cpu", {"seq_lens": (128, 256), "batches": (3, 5)}, "torch", "batch", {3, 5}),
        ("cpu", {"seq_lens": (128, 256), "tokens": 512}, "torch", "batch", {4, 2}),
        # A sequence longer than the tokens still runs, once.
        ("cpu", {"seq_lens": (1024,), "tokens": 512}, "torch", "batch", {1}),
        # An operation of outside packages has sizes of its own unless head dims are named, which are then equal.
        ("cuda", {"ops": ("selective_scan",), "head_dims": (64,)}, "mamba_ssm.selective_scan", "channels", {4096}),
        ("cuda", {"ops": ("attention",), "preset": "default"}, "torch.sdpa_flash", "head_dim_v", {128}),
        ("cuda", {"ops": ("attention",), "head_dims": (64, 256)}, "torch.sdpa_flash", "head_dim_v", {64, 256}),
        ("cuda", {"ops": ("gla",), "head_dims": (64,)}, "fla.chunk_gla", "head_dim_qk", {32}),
        # Beside the family it keeps the family's sizes.
        ("cuda", {"head_dims": (64,)}, "fla.chunk_gla", "head_dim_qk", {32}),
        ("cuda", {"head_dims": (256,)}, "fla.chunk_simple_gla", "head_dim_qk", {128}),
        ("cuda", {"preset": "default"}, "fla.chunk_retention", "head_dim_qk", {32, 64, 128, 256}),
        # Beside our own of that operation, ours.
        ("cuda", {"preset": "decode", "head_dims": (256,)}, "fla.fused_recurrent", "head_dim_qk", {256, 128}),
        ("cuda", {"preset": "default"}, "mamba_ssm.chunk_scan", "seq_len", LENGTHS),
        ("cuda", {"preset": "default"}, "lightning_attn.v2", "num_heads", {32}),
        # A family of one operation meets its peers at its own sizes, Lightning-1, although quadratic, at every length.
        ("cuda", {"kernel": "lightning", "preset": "default"}, "lightning_attn.v2", "num_heads", {64, 32, 16}),
        ("cuda", {"kernel": "lightning", "preset": "default"}, "lightning1", "seq_len", LENGTHS),
        ("cuda", {"kernel": "lightning", "preset": "default"}, "torch.sdpa_flash", "seq_len", LENGTHS),
    ],
)
def test_sizes(device_kind: str, axes: dict[str, object], impl: str, size: str, expected: set[int]) -> None:
    planned = [item.case for item in cases(device_kind, **axes) if item.case.impl == impl]
    assert {getattr(case, size) for case in planned} == expected


def sizes_of(**axes: object) -> set[tuple[int | None, ...]]:
    found = [item.case for item in cases(impls=("torch",), modes=("fw",), seq_lens=(512,), **axes)]
    return {(c.batch, c.num_heads, c.channels, c.d_model, c.d_ff) for c in found}


def test_operations_are_planned_over_the_sizes_they_have() -> None:
    channels, mlp = {"kernel": "rglru", "ops": ("rglru",)}, {"kernel": "gated-mlp"}
    assert sizes_of(**channels) == {(2, None, 64, None, None), (2, None, 256, None, None)}
    assert sizes_of(**channels, channels=(24,), batches=(3,)) == {(3, None, 24, None, None)}
    assert sizes_of(**mlp) == {(1, None, None, 128, 448), (1, None, None, 256, 896)}
    assert sizes_of(**mlp, d_models=(256, 64)) == {(1, None, None, 256, 896), (1, None, None, 64, 224)}
    assert sizes_of(**mlp, d_models=(64,), d_ffs=(8, 16)) == {(1, None, None, 64, 8), (1, None, None, 64, 16)}
    assert sizes_of(**mlp, d_ffs=(8,)) == {(1, None, None, 128, 8), (1, None, None, 256, 8)}
    # What has no state has no dtype of states.
    assert {item.case.state_dtype for item in cases(**mlp)} == {None}
    assert {item.case.state_dtype for item in cases(**channels, impls=("torch",))} == {"fp32"}


def test_shards_are_all_cases_each_once() -> None:
    whole = cases(kernel="rglru")
    shards = [cases(kernel="rglru", shard=(part, 3)) for part in (1, 2, 3)]
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert sorted(map(str, itertools.chain(*shards))) == sorted(map(str, whole))


@pytest.mark.speed
def test_100_000_cases_are_planned_within_seconds() -> None:
    axes = {"preset": "default", "seq_lens": tuple(range(128, 128 * 216, 128)), "head_dims": (64, 128, 256, 512)}
    planned: list[list[plan.PlannedCase]] = []
    assert any(full_speed_seconds(lambda: planned.append(cases("cuda", **axes))) < 3.0 for _ in range(3))
    assert len(planned[0]) >= 100_000


def test_one_implementation_after_the_other_and_shared_problems_side_by_side() -> None:
    planned = [item.case for item in cases(preset="quick")]
    groups = [case.impl for case in planned]
    assert sum(a != b for a, b in itertools.pairwise(groups)) == len(set(groups)) - 1
    ours = [case for case in planned if case.impl == "torch"]
    problems = [(c.op, c.seq_len, c.head_dim_v) for c in ours]
    assert sum(a != b for a, b in itertools.pairwise(problems)) == len(set(problems)) - 1
    # Gradients first: their reference also answers for the forward case of the same problem.
    first = {problem: case.mode for problem, case in reversed(list(zip(problems, ours, strict=True)))}
    assert set(first.values()) == {"fwbw"}


def test_implementations_that_are_named_are_run_in_that_order() -> None:
    named = ("fla.chunk_simple_gla", "torch.sdpa_flash", "whole_state")
    assert named == (*dict.fromkeys(item.case.impl for item in cases("cuda", preset="default", impls=named)),)


def test_implementations_of_another_device_are_named_not_planned() -> None:
    assert "fused_chunk" in plan.not_planned(Request(), "cpu")
    # What has no such mode needs no other device.
    assert "mlstm_kernels.step" not in plan.not_planned(Request(), "cpu")
    assert "fused_chunk" not in plan.not_planned(Request(ops=("mamba2_ssd",), modes=("train",)), "cpu")
    assert "fused_chunk" in plan.not_planned(Request(kernel="lightning", modes=("train",)), "cpu")
    assert "fused_chunk" not in plan.not_planned(Request(), "cuda")
    assert {item.case.impl for item in cases(impls=("fused_chunk",))} == {"fused_chunk"}


def test_what_is_asked_for_and_not_planned_is_said() -> None:
    request = Request(modes=("fw", "step"), dtypes=("fp32", "fp64"), seq_lens=(64, 48), tokens=96)
    planned = plan.plan(request, device_kind="cpu")
    assert plan.remarks(request, planned) == ["64 tokens at seq_len 64 (batch 1), not 96"]
    request = dataclasses.replace(request, kernel="gated-mlp", tokens=None)
    planned = plan.plan(request, device_kind="cpu")
    assert plan.remarks(request, planned) == ["no case has mode step: nothing that is measured here does"]
    assert plan.remarks(Request(), cases()) == []
    few = Request(impls=("torch",), seq_lens=(64,), tokens=10)
    assert plan.remarks(few, plan.plan(few, device_kind="cpu")) == ["64 tokens at seq_len 64 (batch 1), not 10"]


def test_baselines_are_chosen_by_name_by_package_or_left_out() -> None:
    for named, providers in (("none", set()), ("torch.sdpa_flash", {"torch"}), ("mlstm_kernels", {"mlstm_kernels"})):
        assert {item.case.provider for item in cases("cuda", baselines=(named,))} == {"lrbench", *providers}


def test_the_full_preset_is_hours_of_work_and_holds_its_states_where_there_are_some() -> None:
    planned = cases("cuda", preset="full")
    assert 10_000 < len(planned) < 30_000
    ours = [item.case for item in planned if item.case.impl == "fused_chunk"]
    assert {case.op for case in ours} == set(FAMILIES["tfla"])
    assert {case.mode for case in ours} == {*MODES} - {"train"}
    assert {case.dtype for case in ours} == {"bf16", "fp16", "fp32"}
    assert {case.state_dtype for case in ours if case.mode != "step"} == {"fp32", "bf16"}
    # A decoding step has one token, no chunk and a state in fp32.
    steps = {(case.seq_len, case.chunk_size, case.state_dtype) for case in ours if case.mode == "step"}
    assert steps == {(1, None, "fp32")}


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_every_implementation_is_verified_with_what_it_can_do(device_kind: str) -> None:
    modes: dict[tuple[str, str], set[str]] = {}
    verified = cases_to_verify(cases(device_kind, preset="verify"))
    for item in verified:
        modes.setdefault((item.case.op, item.case.impl), set()).add(item.case.mode)
    for item in verified:
        expected = {"fwbw" if "fwbw" in item.target.modes else "fw", "step"} & set(item.target.modes)
        assert modes[item.case.op, item.case.impl] == expected, item.case.impl
    assert modes["mlstm_exp", "mlstm_kernels.native_autograd"] == {"fw"}
    assert modes["mlstm_exp", "torch"] == {"fwbw", "step"}


def test_a_cache_has_a_context_and_a_state_none() -> None:
    axes = {"modes": ("step",), "batches": (1, 256), "contexts": (1024, 131072), "head_dims": (128,)}
    planned = [item.case for item in cases("cuda", **axes)]
    of_op = {op: [(c.batch, c.context) for c in planned if c.op == op] for op in {c.op for c in planned}}
    assert {case.seq_len for case in planned} == {1}
    cached = [(1, 1024), (1, 131072), (256, 1024), (256, 131072)]
    assert of_op.pop("attention") == cached * len({c.impl for c in planned if c.op == "attention"})
    assert set(of_op) >= {"mlstm_sig", "mlstm_exp", "gla", "retention", "mamba2_ssd", "selective_scan"}
    assert {pair for found in of_op.values() for pair in found} == {(1, None), (256, None)}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            {"kernel": "rglru", "head_dims": (64,)},
            "--head-dim is no size of rglru, linear_scan, which has batch, seq_len",
        ),
        ({"kernel": "rglru", "ops": ("rglru",), "d_ffs": (64,)}, "--d-ff is no size of rglru, which has batch"),
        ({"kernel": "gated-mlp", "num_heads": 2}, "--num-heads is no size of gated_mlp, projections, which has batch"),
        ({"kernel": "gated-mlp", "batches": (3,)}, "--batch is no axis of gated_mlp, projections: its tokens are its"),
        ({"kernel": "gated-mlp", "tokens": 512}, "--tokens is no axis of gated_mlp, projections: its tokens are its"),
        ({"kernel": "gated-mlp", "chunk_sizes": (64,)}, "--chunk-size is no axis of gated_mlp, projections: nothing"),
        ({"contexts": (64,)}, "--context is no axis of mode fw, fwbw: a decoding step of attention"),
        ({"kernel": "wkv", "modes": ("step",), "contexts": (64,)}, "--context is no axis of kernel wkv"),
        ({"modes": ("step",), "seq_lens": (64,)}, "--seq-len is no axis of mode step: its call is of one token"),
        ({"modes": ("step",), "tokens": 64}, "--tokens is no axis of mode step: its call is of one token"),
        ({"modes": ("step",), "contexts": (0,)}, "contexts must be from 1 to 2147483647, got 0"),
        ({"seq_lens": (64, 2**63)}, "seq_lens must be from 1 to 2147483647, got 9223372036854775808"),
        ({"ops": ()}, "ops must have at least one value, got none"),
    ],
)
def test_an_axis_that_nothing_has_and_values_that_no_size_is_are_refused(axes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cases(**axes)
