"""Counts of whole problems and rows: sums over chunks, heads and batch, formulations, what papers print, bad input."""

import pytest

from lrbench.analysis.counts import (
    FORMULATIONS,
    TILE,
    Factors,
    count,
    count_case,
    formulation_of,
    tile_rounded_causal_factor,
)
from lrbench.analysis.counts.formulations import DECODING

SIZES = {"seq_len": 8192, "head_dim_qk": 256, "head_dim_v": 512, "chunk_size": 128, "causal_factor": 0.5}


def test_factors_weigh_elementary_functions() -> None:
    base = count("mlstm_sig", **SIZES)
    heavy = count("mlstm_sig", **SIZES, factors=Factors.parse(["exp=4"]))
    chunks, square = 64, 128**2
    assert heavy.flops - base.flops == chunks * 3 * (128 + 1 + 0.5 * square)
    assert heavy.tensor_flops == base.tensor_flops
    assert Factors.parse(["exp=4", "log=2.5"]) == Factors(exp=4.0, log=2.5)


@pytest.mark.parametrize("setting", ["sin=2", "exp", "exp=fast", "exp=-1", "exp=nan"])
def test_bad_factors(setting: str) -> None:
    with pytest.raises(ValueError, match="factor"):
        Factors.parse([setting])


WITH_WEIGHTS = ("rglru", "rglru_layer", "wkv4", "gated_mlp", "projections")


@pytest.mark.parametrize("op", sorted(FORMULATIONS))
@pytest.mark.parametrize("mode", ["fw", "bw", "fwbw"])
def test_counts_scale_with_heads_and_batch_and_parts_add_up(op: str, mode: str) -> None:
    sizes = {"seq_len": 1000, "head_dim_qk": 64, "head_dim_v": 96, "channels": 96, "chunk_size": 128, "d_model": 80}
    sizes["d_ff"] = 160
    for formulation in FORMULATIONS[op]:
        if formulation == "recurrent" and op != "wkv4" and (mode != "fw" or op in DECODING):
            continue
        one = count(op, formulation=formulation, mode=mode, num_groups=1, **sizes)
        heads = 1 if op in WITH_WEIGHTS or op in ("linear_scan", "selective_scan") else 3
        many = count(op, formulation=formulation, mode=mode, batch=2, num_heads=heads, num_groups=heads, **sizes)
        # Per-channel functions of the RG-LRU's parameter are no work of a token.
        assert many.flops == pytest.approx(2 * heads * one.flops, rel=1e-3 if op.startswith("rglru") else 1e-9)
        assert many.tensor_flops == pytest.approx(2 * heads * one.tensor_flops)
        assert sum(many.parts.values()) == pytest.approx(many.flops)
        assert sum(many.byte_parts.values()) == pytest.approx(many.bytes)
        assert 0 <= many.tensor_flops <= many.flops
        assert many.bytes >= many.compulsory_bytes > 0
        if op in WITH_WEIGHTS:
            assert one.bytes < many.bytes < 2 * one.bytes, "weights and parameters are read once"
            continue
        if formulation == "whole_state" and mode != "fw":
            continue  # its backward pass chooses shorter chunks for fewer heads
        shared = ("per-head constants", "A load", "dA store")
        constants = sum(n for name, n in many.byte_parts.items() if name.endswith(shared))
        assert many.bytes - constants == pytest.approx(2 * heads * (one.bytes - constants / heads))


def test_whole_state_cuts_only_the_heads_that_do_not_fill_the_device() -> None:
    """Of 1024 heads, a program each, 7 times 132 fill an H200's multiprocessors; the other 100 are cut."""
    sizes = {"formulation": "whole_state", "seq_len": 1024, "head_dim_qk": 128, "head_dim_v": 256}
    all_heads = count("mlstm_sig", num_heads=1024, chunk_size=256, **sizes)
    cut, uncut = (count("mlstm_sig", num_heads=n, chunk_size=c, **sizes) for n, c in ((100, 256), (924, 1024)))
    assert all_heads.bytes == pytest.approx(cut.bytes + uncut.bytes)
    assert uncut.bytes == uncut.compulsory_bytes
    # Three of four chunks are read for their states, of 128 x 256 numbers.
    assert cut.byte_parts["recurrent load"] == 100 * 768 * ((128 + 256) * 2 + 2 * 2)
    assert cut.byte_parts["recurrent store"] == 100 * 3 * 128 * 256 * 4
    assert all_heads.bytes <= all_heads.executed_bytes


@pytest.mark.parametrize("op", sorted(FORMULATIONS))
def test_forward_plus_backward_is_fwbw(op: str) -> None:
    sizes = {"seq_len": 512, "num_heads": 2, "head_dim_qk": 64, "head_dim_v": 64, "channels": 64, "chunk_size": 64}
    sizes |= {"d_model": 64, "d_ff": 96}
    fw, bw, both = (count(op, mode=mode, **sizes) for mode in ("fw", "bw", "fwbw"))
    for field in ("flops", "tensor_flops", "bytes", "compulsory_bytes", "recomputed_flops", "recomputed_bytes"):
        assert getattr(both, field) == pytest.approx(getattr(fw, field) + getattr(bw, field))
    assert set(both.parts) == {f"forward: {n}" for n in fw.parts} | {f"backward: {n}" for n in bw.parts}


def test_ragged_sequences_count_the_last_chunk_as_it_is() -> None:
    dims = {"head_dim_qk": 64, "head_dim_v": 64, "causal_factor": 1.0}
    whole = count("simple_gla", seq_len=1024, chunk_size=256, **dims)
    rest = count("simple_gla", seq_len=100, chunk_size=100, **dims)
    ragged = count("simple_gla", seq_len=1124, chunk_size=256, **dims)
    assert ragged.flops == whole.flops + rest.flops
    assert ragged.bytes == whole.bytes + rest.bytes


def test_a_fused_pass_moves_only_inputs_and_outputs() -> None:
    fused, chunkwise = (count("simple_gla", formulation=f, **SIZES) for f in ("fused", "chunkwise"))
    assert fused.flops == chunkwise.flops
    assert fused.bytes == fused.compulsory_bytes == chunkwise.compulsory_bytes < chunkwise.bytes


@pytest.mark.parametrize("mode", ["fw", "bw", "fwbw"])
def test_walking_a_chunk_does_the_work_of_tiles_and_the_traffic_of_chunks(mode: str) -> None:
    sizes = {"seq_len": 4096, "head_dim_qk": 128, "head_dim_v": 256, "mode": mode, "causal_factor": 1.0}
    walk = count("mlstm_sig", formulation="walk", chunk_size=512, **sizes)
    assert walk.flops == count("mlstm_sig", chunk_size=TILE, **sizes).flops
    assert walk.bytes == count("mlstm_sig", chunk_size=512, **sizes).bytes
    assert walk == count("mlstm_sig", formulation="walk", chunk_size=512, **(sizes | {"causal_factor": None}))
    single = count("mlstm_sig", formulation="walk", chunk_size=4096, **sizes)
    assert single.bytes == single.compulsory_bytes
    assert single.flops == walk.flops
    # C (and, backward, dC too) is made once more for the chunks' edges: 2 T d_qk d_v each.
    passes = {"fw": 1, "bw": 2, "fwbw": 3}[mode]
    extra = walk.recomputed_tensor_flops - single.recomputed_tensor_flops
    assert extra == passes * 2 * 4096 * 128 * 256


def test_a_single_chunk_is_neither_reduced_nor_scanned() -> None:
    sizes = {"batch": 2, "seq_len": 1000, "channels": 64}
    one, single = count("rglru", **sizes), count("rglru", formulation="chunked", chunk_size=1000, **sizes)
    assert (single.bytes, single.recomputed_flops) == (one.bytes, one.recomputed_flops)
    ragged = count("rglru", formulation="chunked", chunk_size=256, **sizes)
    assert ragged.byte_parts["maps of chunks load"] == 2 * (4 * 2 * 64) * 4
    assert (ragged.flops, ragged.parts) == (one.flops, one.parts)
    with pytest.raises(ValueError, match="chunk_size must be a positive integer, got None"):
        count("rglru", formulation="chunked", **sizes)


def test_rows_without_a_chunk_length_take_the_shortest_that_is_chosen() -> None:
    from lrbench.kernels.rglru.config import preferred_chunk

    sizes = {"batch": 1, "seq_len": 4096, "channels": 64}
    chunk = preferred_chunk(sizes)
    row = count_case("rglru", "chunked", "fw", "bf16", None, sizes)
    assert row == count_case("rglru", "chunked", "fw", "bf16", None, {**sizes, "chunk_size": chunk})


def test_attention_to_all_keys_is_the_whole_square() -> None:
    sizes = {"seq_len": 1024, "head_dim_qk": 64, "head_dim_v": 64}
    everything, half = count("attention", causal=False, **sizes), count("attention", causal_factor=0.5, **sizes)
    assert everything.tensor_flops == 2 * half.tensor_flops == 4 * 1024**2 * 64
    assert (everything.causal_factor, everything.bytes) == (1, half.bytes)


def test_decoding_moves_the_state() -> None:
    sizes = {"batch": 2, "seq_len": 1, "channels": 64}
    assert count("rglru", mode="step", **sizes).byte_parts["state load"] == 2 * 64 * 4
    assert count("linear_scan", mode="step", **sizes).byte_parts["state store"] == 2 * 64 * 4
    assert count("wkv4", mode="step", **sizes).byte_parts["state load"] == 3 * 2 * 64 * 4
    assert count("wkv4", mode="step", **sizes).flops == count("wkv4", **sizes).flops


def test_rows_of_operations_without_heads() -> None:
    row = count_case("rglru", "fused", "fwbw", "bf16", "fp32", {"batch": 8, "seq_len": 4096, "channels": 1024})
    assert row == count("rglru", mode="fwbw", batch=8, seq_len=4096, channels=1024, gate_dtype="fp32")
    row = count_case("gated_mlp", "torch.eager", "fw", "bf16", None, {"seq_len": 512, "d_model": 64, "d_ff": 128})
    assert row == count("gated_mlp", formulation="eager", seq_len=512, d_model=64, d_ff=128, gate_dtype="fp32")
    assert count_case("wkv4", "recurrent", "bw", "fp32", None, {"batch": 1, "seq_len": 64, "channels": 32}).flops > 0


def test_shared_keys_are_read_once_per_group() -> None:
    """Mamba-2 with one group: B and C of 64 heads are one head's traffic."""
    sizes = {"seq_len": 2048, "num_heads": 64, "head_dim_qk": 128, "head_dim_v": 64, "chunk_size": 256}
    shared, own = count("mamba2_ssd", **sizes), count("mamba2_ssd", **sizes, num_groups=64)
    assert shared.flops == own.flops
    assert own.compulsory_bytes - shared.compulsory_bytes == 63 * 2048 * 2 * 128 * 2


def test_causal_factor_of_tiles() -> None:
    assert tile_rounded_causal_factor(16) == tile_rounded_causal_factor(TILE) == 1
    assert tile_rounded_causal_factor(128) == 0.75
    tiles = 1024 // TILE
    covered = sum(TILE**2 for i in range(tiles) for j in range(tiles) if j <= i)
    assert tile_rounded_causal_factor(1024) == covered / 1024**2


def test_rows_use_the_detailed_count_at_the_tile_rounded_causal_factor() -> None:
    sizes = {"batch": 8, "seq_len": 8192, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256, "chunk_size": 256}
    row = count_case("mlstm_sig", "mlstm_kernels.xl_chunk_siging", "fw", "bf16", "fp32", sizes)
    assert row == count("mlstm_sig", **sizes, gate_dtype="fp32", causal_factor=(4 + 1) / 8)
    walked = count_case("mlstm_sig", "fused_chunk", "fw", "bf16", "fp32", sizes)
    assert walked == count("mlstm_sig", formulation="walk", **sizes, gate_dtype="fp32", causal_factor=1)
    swept = count_case("mlstm_sig", "fused_chunk", "fw", "fp32", "fp32", sizes)
    assert (swept.formulation, swept.causal_factor) == ("sweep", (8 + 1) / 16), "tiles of 32"
    swept = count_case("mlstm_sig", "xl_chunk", "fw", "bf16", "fp32", sizes)
    assert (swept.formulation, swept.causal_factor) == ("sweep", (2 + 1) / 4), "tiles of 128"
    assert swept.flops == count("mlstm_sig", **sizes, causal_factor=0.75).flops
    assert count_case("mlstm_sig", "torch", "fw", "bf16", None, sizes).causal_factor == 1
    half = count_case("mlstm_sig", "fused_chunk", "fw", "bf16", "bf16", sizes)
    assert walked.bytes - half.bytes == 8 * 16 * 32 * 2 * 128 * 256 * 2


def test_rows_of_chunks_longer_than_the_sequence_are_one_ragged_chunk() -> None:
    sizes = {"batch": 1, "seq_len": 100, "num_heads": 1, "head_dim_qk": 64, "head_dim_v": 64}
    row = count_case("mlstm_exp", "fused_chunk", "fw", "bf16", "fp32", {**sizes, "chunk_size": 256})
    assert row.flops == count_case("mlstm_exp", "fused_chunk", "fw", "bf16", "fp32", {**sizes, "chunk_size": 100}).flops


def test_rows_of_implementations_without_a_chunk_axis_use_their_packages_chunk() -> None:
    sizes = {"batch": 1, "seq_len": 4096, "num_heads": 4, "head_dim_qk": 64, "head_dim_v": 64}
    fla = count_case("simple_gla", "fla.chunk", "fwbw", "bf16", None, sizes)
    assert fla.flops == count_case("simple_gla", "limit_chunk", "fwbw", "bf16", None, {**sizes, "chunk_size": 64}).flops


def test_fla_stores_the_states_of_forward_passes_in_the_inputs_dtype() -> None:
    """Written once and read once a chunk: two bytes less each, and nothing less in the backward pass."""
    sizes = {"batch": 2, "seq_len": 4096, "num_heads": 4, "head_dim_qk": 64, "head_dim_v": 64}
    states = 2 * 4 * (4096 // 64) * 64 * 64
    less = {
        mode: count_case("simple_gla", "limit_chunk", mode, "bf16", None, {**sizes, "chunk_size": 64}).bytes
        - count_case("simple_gla", "fla.chunk_simple_gla", mode, "bf16", None, sizes).bytes
        for mode in ("fw", "bw", "fwbw")
    }
    assert less == {"fw": 4 * states, "bw": 0, "fwbw": 4 * states}


def test_rows_without_a_count() -> None:
    sizes = {"seq_len": 1, "channels": 16, "d_model": 64, "d_ff": 128}
    for of in (("hyena", "x"), ("rglru_layer", "torch"), ("gated_mlp", "torch"), ("gated_mlp", "fused")):
        assert count_case(*of, "step", "bf16", None, sizes) is None, of


def test_a_step_of_attention_reads_its_context() -> None:
    sizes = {"batch": 16, "seq_len": 1, "num_heads": 32, "head_dim_qk": 128, "head_dim_v": 128}
    for context in (1024, 131072):
        step = count_case("attention", "torch.sdpa_flash", "step", "bf16", None, {**sizes, "context": context})
        rows = 16 * 32 * 2 * 128 * 2
        assert step.byte_parts == {"load": (context + 0.5) * rows, "store": rows / 2, "cache store": rows}
        assert step.flops == pytest.approx(16 * 32 * context * (4 * 128 + 5), rel=1e-3)
        assert step.compulsory_bytes == step.bytes
        assert step == count("attention", mode="step", gate_dtype="fp32", **{**sizes, "seq_len": context})


@pytest.mark.parametrize("op", ["gla", "selective_scan"])
def test_a_step_reads_and_writes_its_state_whatever_the_length(op: str) -> None:
    sizes = {"batch": 2, "num_heads": 1, "head_dim_qk": 16, "head_dim_v": 64, "channels": 64}
    one, long = (count(op, mode="step", seq_len=seq_len, **sizes) for seq_len in (1, 512))
    assert one == long
    assert 2 * 2 * 16 * 64 * 4 < one.bytes < 1.6 * 2 * 2 * 16 * 64 * 4
    assert one.flops == pytest.approx(2 * 16 * 64 * (5 if op == "gla" else 7), rel=0.05)


def test_formulations_of_implementations() -> None:
    expected = {
        ("mlstm_sig", "fused_chunk", "fw"): "walk",
        ("mlstm_sig", "fused_chunk", "step"): "recurrent",
        ("mlstm_exp", "parallel", "fw"): "parallel",
        ("gla", "fla.fused_chunk_gla", "fw"): "fused",
        ("gla", "fla.not_declared", "fw"): "chunkwise",
        ("wkv4", "not_declared", "bw"): "recurrent",
        ("rglru_layer", "fla.chunk_hgrn", "fw"): "unfused",
        ("gated_mlp", "fused_save", "fw"): "fused",
        ("gated_mlp", "fused_save", "bw"): "fused_save",
        ("gated_mlp", "xformers.swiglu", "fw"): "fused_save",
        ("attention", "torch.sdpa_flash", "fw"): "flash",
    }
    assert {of: formulation_of(*of) for of in expected} == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "mamba9"}, r"op must be one of \d+ names, got 'mamba9'; did you mean mamba2_ssd"),
        ({"seq_len": 0}, "seq_len must be a positive integer, got 0"),
        ({"head_dim_v": None}, "head_dim_v must be a positive integer, got None"),
        ({"chunk_size": None}, "chunk_size must be a positive integer, got None"),
        ({"chunk_size": 16384}, "chunk_size must be <= seq_len = 8192, got 16384"),
        ({"causal_factor": 0.4}, r"causal_factor must be in \[0.5, 1\], got 0.4"),
        ({"causal_factor": 1.1}, r"causal_factor must be in \[0.5, 1\], got 1.1"),
        ({"dtype": "fp8"}, "dtype must be one of fp64, fp32, fp16, bf16, got 'fp8'"),
        ({"mode": "train"}, "mode must be one of fw, bw, fwbw, step, got 'train'"),
        ({"formulation": "magic"}, "formulation of mlstm_sig must be one of chunkwise, .*, got 'magic'"),
        ({"formulation": "recurrent", "mode": "bw"}, "mode must be fw or step for the recurrent formulation"),
        ({"formulation": "parallel", "mode": "step"}, "formulation must be recurrent for mode step, got 'parallel'"),
        ({"counting": "published", "mode": "bw"}, "counting must be detailed for mlstm_sig, chunkwise, bw"),
        ({"counting": "published", "op": "gla"}, "counting must be detailed for gla, chunkwise, fw: no paper prints"),
        ({"counting": "published", "factors": Factors(exp=4)}, "factors must be 1 for the published counting"),
        ({"num_heads": 6, "num_groups": 4}, "num_groups must divide num_heads = 6, got 4"),
        ({"op": "rglru"}, "channels must be a positive integer, got None"),
        ({"op": "gated_mlp", "d_model": 64}, "d_ff must be a positive integer, got None"),
        ({"op": "gated_mlp", "mode": "step"}, "mode must be fw, bw or fwbw for gated_mlp, got 'step'"),
        ({"op": "rglru", "formulation": "recurrent", "mode": "bw"}, "mode must be fw or step for the recurrent"),
        ({"op": "rglru", "mode": "bw", "counting": "published"}, "counting must be detailed for rglru, fused, bw"),
        ({"causal": False}, "is for attention alone: mlstm_sig is causal"),
        ({"op": "attention", "causal": False}, "causal_factor must be 1 for attention that is not causal, got 0.5"),
    ],
)
def test_bad_input(change: dict, message: str) -> None:
    arguments = {"op": "mlstm_sig", **SIZES, **change}
    with pytest.raises(ValueError, match=message):
        count(arguments.pop("op"), **arguments)
