"""Compile the launches of every implementation for sm_80, sm_90 and sm_100, without a GPU, and hold what they cost.

CI compiles for Hopper alone, where the kernels' limits are tightest; the other two are marked slow (make test-slow).
The ordinary launchers run on CPU tensors with recorders in the kernels' places, so what is compiled is what would run.
Cases marked ``older`` are compiled with an older Triton too (make test-compile).
"""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.compiler.errors import CompilationError

from lrbench.kernels import FAMILIES, Operation
from lrbench.kernels.common.versions import NEW_ASSEMBLER
from lrbench.kernels.gated_mlp import project
from lrbench.kernels.gated_mlp.config import ACTIVATIONS, GatedMlpConfig, case_config, select_tile
from lrbench.kernels.scalar_decay.declare import SCHEMES
from lrbench.tests.kernels.cases import BF16, F16, F32, LIGHTNING, MLP_ALTERNATIVES, channels, chunks, heads, mlp_sizes
from lrbench.tests.kernels.compiling import CAPABILITIES, IMPLEMENTATIONS, MAX_STACK_BYTES, check, record
from lrbench.tests.kernels.laws import LAYOUTS, Case
from lrbench.tests.kernels.offline import compile_kernel, read_instructions

pytestmark = pytest.mark.compile

MLSTM = ("mlstm_sig", "mlstm_exp")
SEQ_LEN = 1024
HEAD_DIMS = ((128, 256), (64, 64), (24, 40), (256, 512))
TUNED_HEAD_DIMS = ((128, 256), (64, 64), (256, 512))
"""(K, V) whose launches were chosen with care; others may spill, but must compile and fit."""
TIGHT = ("mlstm_exp", (128, 256))
IN_CI = ("mlstm_sig", (128, 256)), *itertools.product(MLSTM[1:], HEAD_DIMS)
"""Where CI compiles fused_chunk as one chunk: mLSTMexp takes the most registers."""
HOPPER_IN_CI = [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(100, marks=pytest.mark.slow)]

SCAN_FULL, SCAN_FEW = channels(8, 1024, 1024), channels(1, 1024, 2560)
"""Enough channels that states keep ahead of short tiles, and so few that the launcher takes longer ones."""
WKV_WIDE, WKV_NARROW = channels(8, 512, 768), channels(1, 512, 32)
SCAN_STACK_BYTES = 128
"""168 registers cost RG-LRU's kernels a few words of stack."""
SEEN_STACK_BYTES = (104, 0, 112, 120, 0, 136) if NEW_ASSEMBLER else (64, 0, 64, 88, 0, 120)
STACK_BYTES = dict(zip(itertools.product(MLSTM, TUNED_HEAD_DIMS), SEEN_STACK_BYTES, strict=True))
"""What fused_chunk may keep on the stack. Triton 3.9 assembles for Hopper with ptxas 13, which keeps more there at any
level of --regAllocOptLevel; before, only Blackwell was assembled with it."""

WHOLE_STATE_DIMS = ((128, 256), (64, 64), (80, 160), (160, 320), (192, 384), (256, 512))
WHOLE_STATE_STACK_BYTES = 112
"""A state takes half of a program's registers, and what the loop over tiles hardly uses goes to the stack."""
PACKED_STACK_BYTES = 128
"""The same with packed documents, where a program also keeps where its document begins."""
WHOLE_STATE_TILES = tuple(dims for dims in WHOLE_STATE_DIMS if dims not in ((80, 160), (160, 320)))
"""Without head dims whose tiles are those of wider ones, but for a last one that takes fewer registers."""


def lightning(impl: str, head_dims: tuple[int, int], dtype: Any = BF16, batch: int = 8) -> Case:
    """Return a case of 64 heads: batch 8 fills a device, and batch 1 is so few that lightning2 takes fewer columns."""
    return Case(op="lightning", impl=impl, dtype=dtype, sizes=heads(batch, 1, 64, *head_dims))


def engine(op: str, impl: str, head_dims: tuple[int, int], chunk_size: int, dtype: Any = BF16, **kwargs: Any) -> Case:
    """Return a case of the engine."""
    sizes = heads(1, SEQ_LEN, 2, *head_dims)
    return Case(op=op, impl=impl, dtype=dtype, sizes=sizes, kwargs={"chunk_size": chunk_size, **kwargs})


def packed(op: str, head_dims: tuple[int, int]) -> Case:
    """Return a case of whole_state with two packed documents."""
    options = {"cu_seqlens": torch.tensor([0, 1, SEQ_LEN], dtype=torch.int32)}
    return Case(op=op, impl="whole_state", dtype=BF16, sizes=heads(1, SEQ_LEN, 2, *head_dims), options=options)


def over_channels(op: str, impl: str, sizes: dict[str, int], dtype: Any = BF16, *, documents: bool = False) -> Case:
    """Return a case of an operation over channels, with packed documents (one, as the batch is 1) or without."""
    options = {"cu_seqlens": torch.tensor([0, sizes["seq_len"]], dtype=torch.int32)} if documents else {}
    return Case(op=op, impl=impl, dtype=dtype, sizes=sizes, kwargs=chunks(op, impl, 256), options=options)


def delta(op: str, head_dims: tuple[int, int], *, seq_len: int = 256, num_heads: int = 2) -> Case:
    """Return a case of the delta rule with one head of q and k."""
    return Case(op=op, impl="whole_state", dtype=BF16, sizes=heads(1, seq_len, num_heads, *head_dims, num_heads_qk=1))


def mlp(
    impl: str, layout: str, tokens: int = 256, dtype: Any = BF16, config: Any = None, activation: str = "silu"
) -> Case:
    """Return a case of the gated MLP."""
    op, options = ("projections", {}) if impl == "gemms" else ("gated_mlp", {"activation": activation})
    shape = {"sizes": mlp_sizes(tokens, 128, 256), "layout": layout}
    return Case(op=op, impl=impl, dtype=dtype, **shape, options=options, kwargs={"config": config})


def compiled(
    cases: Iterable[Case],
    *,
    stack: int | None = MAX_STACK_BYTES,
    capabilities: Iterable[int] = CAPABILITIES,
    ci: bool = True,
    older: bool = False,
    **how: bool | str,
) -> list[Any]:
    """Return a test's parameters: case, capability, stack limit and how to record (training, carry, kind).

    Args:
        ci: whether CI compiles them for Hopper; all else only ``make test-slow`` does.
        older: whether CI compiles them for Hopper with an older Triton too.
    """
    on = [value if isinstance(value, str) else name for name, value in how.items() if value]

    def named(case: Case, capability: int) -> str:
        values = [v for v in (*case.kwargs.values(), *case.options.values(), case.layout) if isinstance(v, int | str)]
        parts = (case.op, case.impl, case.dtype, "x".join(map(str, case.sizes.values())), *values, *on)
        return "-".join(str(part).removeprefix("torch.") for part in (*parts, f"sm_{capability}"))

    marks = {
        n: [pytest.mark.older] * (older and n == 90) + [pytest.mark.slow] * (not ci or n != 90) for n in capabilities
    }
    return [
        pytest.param(case, capability, stack, how, id=named(case, capability), marks=marks[capability])
        for case in cases
        for capability in capabilities
    ]


ENGINE = [
    *itertools.chain.from_iterable(
        # The whole sequence is one chunk, the default; then several chunks, an initial state and a last one.
        compiled(
            [engine(at[0], "fused_chunk", at[1], chunk)],
            stack=STACK_BYTES.get(at),
            ci=at in ci,
            older=at == TIGHT,
            carry=carry,
        )
        for chunk, carry, ci in ((SEQ_LEN, False, IN_CI), (256, True, (TIGHT,)))
        for at in itertools.product(MLSTM, HEAD_DIMS)
    ),
    *itertools.chain.from_iterable(
        compiled([engine(op, "whole_state", dims, 256)], stack=WHOLE_STATE_STACK_BYTES, capabilities=(90,), **run)
        for dims in WHOLE_STATE_DIMS
        for op, run in (
            ("mlstm_exp", {"ci": dims == TIGHT[1], "older": dims == TIGHT[1]}),
            ("mlstm_sig", {"ci": False}),
        )
    ),
    *itertools.chain.from_iterable(
        compiled([packed(op, dims)], stack=stack, capabilities=(90,), **run)
        for op, dims, stack, run in (
            ("simple_gla", (64, 64), MAX_STACK_BYTES, {"older": True}),
            ("mlstm_exp", (64, 64), MAX_STACK_BYTES, {"carry": False}),
            ("simple_gla", (128, 128), MAX_STACK_BYTES, {"ci": False}),
            ("mlstm_exp", (128, 256), PACKED_STACK_BYTES, {"ci": False}),
        )
    ),
    # Both launch the same kernels, limit_chunk on other tiles.
    *compiled([engine("mlstm_exp", "xl_chunk", (128, 256), 256)], stack=None, older=True, carry=False),
    *compiled([engine("mlstm_sig", "limit_chunk", (128, 256), 64)], stack=None, carry=False),
    *compiled([engine("mlstm_sig", "xl_chunk", (128, 256), 256)], stack=None, ci=False, carry=False),
    *compiled([engine("mlstm_exp", "limit_chunk", (128, 256), 64)], stack=None, ci=False, carry=False),
    *compiled([engine("mlstm_sig", "whole_state", (64, 64), 256)], capabilities=(90,), training=False, kind="head"),
    *compiled([engine("mlstm_sig", "whole_state", (64, 64), 256)], capabilities=(90,), ci=False, kind="projection"),
    *compiled([engine("mlstm_exp", "fused_chunk", (64, 64), 256)], training=False, kind="head"),
    *compiled([engine("mlstm_exp", "xl_chunk", (64, 64), 256)], stack=None, ci=False, kind="transposed"),
]
LIGHTNINGS = [
    # The shapes that the bars are about, with the states that take more registers.
    *compiled([lightning("lightning2", (64, 64))], older=True),
    *compiled([lightning("lightning2", (128, 128))], older=True),
    *compiled([lightning("lightning1", (128, 128))], carry=False),
    *itertools.chain.from_iterable(
        # A float32 product holds its operands in registers, and so no state of 256 rows besides.
        compiled([case], stack=None if dtype == F32 and max(dims) > 128 else MAX_STACK_BYTES, ci=False, carry=carry)
        for dims in ((64, 64), (128, 128), (128, 256), (256, 256), (256, 64), (24, 40), (16, 16), (200, 72))
        for dtype in (BF16, F16, F32)
        for case in (*(lightning(impl, dims, dtype) for impl in LIGHTNING), lightning("lightning2", dims, dtype, 1))
        for carry in (False, True)
    ),
]
SCANS = [
    *compiled([over_channels("rglru", "fused", SCAN_FULL)], stack=SCAN_STACK_BYTES, older=True),
    *compiled(
        [
            over_channels(op, impl, sizes, dtype)
            for op, one_pass in (("rglru", "fused"), ("linear_scan", "scan"))
            for impl in (one_pass, "chunked", "naive")
            for sizes in ((SCAN_FULL, SCAN_FEW) if impl == one_pass else (SCAN_FULL,))
            for dtype in (BF16, F16, F32)
            if (op, impl, sizes, dtype) != ("rglru", "fused", SCAN_FULL, BF16)
        ],
        stack=SCAN_STACK_BYTES,
        ci=False,
    ),
    *compiled(
        [
            over_channels(op, impl, channels(1, 512, width), documents=True)
            for op, impl, width in (("rglru", "fused", 2560), ("wkv4", "scan", 1024), ("wkv4", "scan", 4096))
        ],
        stack=SCAN_STACK_BYTES,
        carry=False,
    ),
    *compiled([over_channels("rglru_layer", "fused", SCAN_FULL)], stack=SCAN_STACK_BYTES, ci=False),
    *compiled([over_channels("wkv4", "scan", WKV_WIDE)], older=True),
    *compiled([over_channels("wkv4", "scan", WKV_WIDE)], ci=False, kind="projection"),
    *compiled(
        [
            over_channels("wkv4", impl, sizes, dtype)
            for impl, sizes in (("scan", WKV_WIDE), ("scan", WKV_NARROW), ("naive", WKV_WIDE))
            for dtype in (BF16, F16, F32)
            if (impl, sizes, dtype) != ("scan", WKV_WIDE, BF16)
        ],
        ci=False,
    ),
]
DELTA_STACK_BYTES = 672
"""Of the gradients within chunks, which spill before and after their loop, and of KDA's chunks with strong decays."""
DELTAS = [
    *itertools.chain.from_iterable(
        compiled([case], stack=DELTA_STACK_BYTES, capabilities=(90,), **how)
        for case, how in (
            # One head is cut into segments, of which there are no more than multiprocessors.
            (delta("gated_delta_net", (128, 128), seq_len=4096, num_heads=1), {"older": True}),
            (delta("delta_net", (96, 64)), {"carry": False}),
            (delta("gated_delta_net", (64, 192)), {"ci": False}),
            (delta("kda", (128, 128), seq_len=4096, num_heads=1), {"older": True}),
            (delta("kda", (96, 64)), {"ci": False}),
        )
    ),
]
WAYS = ("columns", "rows")
MLPS = [
    # Inference with fused is its forward pass, and swapped columns are columns, to the compiler.
    *compiled([mlp(impl, layout) for layout in WAYS for impl in ("fused", "fused_save")], older=True),
    *compiled([mlp("gemms", layout) for layout in WAYS], older=True, training=False),
    *itertools.chain.from_iterable(
        compiled([mlp(impl, layout, tokens, dtype, activation=activation)], ci=False)
        for activation in ACTIVATIONS
        for dtype in (BF16, F16, F32)
        for tokens in (1, 256)
        for layout in WAYS
        for impl in ("fused", "fused_save")
    ),
]


@pytest.mark.parametrize(("case", "capability", "stack", "how"), [*ENGINE, *LIGHTNINGS, *SCANS, *DELTAS, *MLPS])
def test_launches(case: Case, capability: int, stack: int | None, how: dict[str, Any]) -> None:
    check(record(case, capability, **how), capability, max_stack_bytes=stack)


def tiles_of(dims: tuple[int, int]) -> dict[str, Any]:
    """Return what whole_state launches, once for each role and tile, whatever the sizes."""
    launches = record(engine(TIGHT[0], "whole_state", dims, 256))
    sizes = {"SHAPE", *("T", "L", "N", "BH", "H", "K", "DX", "DZ")}
    flags = [{name: x for name, x in each.arguments.items() if name.isupper()} for each in launches]
    keys = [repr({name: x for name, x in each.items() if name not in sizes}) for each in flags]
    return {f"{each.kernel.__name__} {key}": each for each, key in zip(launches, keys, strict=True)}


@pytest.mark.parametrize("dims", WHOLE_STATE_TILES[1:], ids=str)
def test_tiles_of_whole_state(dims: tuple[int, int]) -> None:
    """In CI a tile is compiled in a role once, at the first head dims that have it: those above have theirs."""
    before = set().union(*map(tiles_of, WHOLE_STATE_TILES[: WHOLE_STATE_TILES.index(dims)]))
    check([each for key, each in tiles_of(dims).items() if key not in before], max_stack_bytes=WHOLE_STATE_STACK_BYTES)


WITH_STEPS = [operation for operation, implementation in IMPLEMENTATIONS if "step" in implementation.modes]


@pytest.mark.parametrize("operation", WITH_STEPS, ids=lambda operation: operation.name)
@pytest.mark.parametrize("capability", HOPPER_IN_CI)
def test_steps(capability: int, operation: Operation) -> None:
    sizes = heads(1, 1, 2, 128, 256) if "num_heads" in operation.sizes else channels(2, 1, 1024)
    case = Case(op=operation.name, impl="step", dtype=BF16, sizes=sizes)
    for carry in (False, True):
        launches = record(case, capability, training=False, carry=carry)
        assert [launch.kernel.__name__ for launch in launches] == ["step_kernel"]
        check(launches, capability, max_stack_bytes=0)


@pytest.mark.slow
@pytest.mark.parametrize("head_dims", [*HEAD_DIMS, (16, 16), (96, 192), (512, 1024), (1024, 72)], ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("impl", ["fused_chunk", "xl_chunk", "limit_chunk"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_whole_engine(capability: int, impl: str, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
    for op in FAMILIES["tfla"]:
        for state_dtype in (F32, BF16):
            case = engine(op, impl, head_dims, 64 if impl == "limit_chunk" else 256, dtype, state_dtype=state_dtype)
            check(record(case, capability), capability, max_stack_bytes=None)


@pytest.mark.parametrize("op", FAMILIES["tfla"])
@pytest.mark.parametrize("capability", HOPPER_IN_CI)
def test_gates(capability: int, op: str) -> None:
    """Operations differ in their gate kernels; the products are mLSTM's, without an input gate at most."""
    launches = record(engine(op, "fused_chunk", (64, 64), 256), capability, carry=False)
    gates = [launch for launch in launches if launch.kernel.__name__.startswith("gates_")]
    check(gates, capability, max_stack_bytes=0)


@pytest.mark.parametrize(("impl", "kernels"), [("fused_chunk", 2), ("step", 1)])
def test_an_unknown_gate_is_refused(impl: str, kernels: int) -> None:
    sizes = heads(1, 1 if impl == "step" else 64, 2, 64, 64)
    case = Case(op="mlstm_sig", impl=impl, dtype=BF16, sizes=sizes)
    launches = [launch for launch in record(case, training=impl != "step") if "GATE" in launch.arguments]
    assert len(launches) == kernels
    for launch in launches:
        with pytest.raises(CompilationError) as error:
            compile_kernel(replace(launch, arguments={**launch.arguments, "GATE": "sigma"}), 90)
        # The assertion is in a function that the kernel calls: the error at the call has it as a cause.
        assert "GATE must be sig, exp" in "".join(traceback.format_exception(error.value))


def test_every_implementation_is_compiled() -> None:
    """Together they launch every kernel, as test_device shows."""
    parameters = (*ENGINE, *LIGHTNINGS, *SCANS, *DELTAS, *MLPS)
    compiled_here = {(param.values[0].op, param.values[0].impl) for param in parameters}
    compiled_here |= {(op, impl) for op in FAMILIES["tfla"] for impl in SCHEMES}
    compiled_here |= {(op, "step") for op in FAMILIES["delta"]}
    declared = {(operation.name, implementation.name) for operation, implementation in IMPLEMENTATIONS}
    # On Lightning's tensors the engine's kernels are those of Retention.
    assert declared - compiled_here == {("lightning", impl) for impl in SCHEMES}


@pytest.mark.parametrize(("name", "carry"), [("lightning1", False), ("lightning2", True)])
@pytest.mark.parametrize("capability", HOPPER_IN_CI)
def test_lightning_needs_no_memory_of_its_own(capability: int, name: str, carry: bool) -> None:
    """A pass allocates outputs and gradients alone, where tiles travel by descriptors (sm_90 on) and where not."""
    # These launches are among test_launches', so Triton's cache has them for whichever comes later.
    for launch in record(lightning(name, (128, 128)), capability, carry=carry):
        compiled = compile_kernel(launch, capability)
        assert compiled.metadata.global_scratch_size == 0
        text = compiled.asm["ttgir"]
        assert ("async_tma_copy_global_to_local" in text) == (capability >= 90)
        assert ("async_tma_copy_local_to_global" in text) == (capability >= 90)
        assert ("warp_group_dot " in text) == (capability == 90)


@pytest.mark.parametrize(("op", "impl", "ahead"), [("rglru", "fused", 3), ("linear_scan", "scan", 6)])
@pytest.mark.parametrize("capability", HOPPER_IN_CI)
def test_one_long_sequence_forward(capability: int, op: str, impl: str, ahead: int) -> None:
    """Without a backward pass no states are kept: another kernel. It fetches inputs so many tiles of time ahead.

    With one, or with fewer channels, it fetches none: states, not memory, are what a tile waits for.
    """
    launches = record(over_channels(op, impl, SCAN_FEW), capability, training=False)
    assert [launch.arguments["ahead"] for launch in launches] == [ahead]
    for sizes, training, fetches in (
        (SCAN_FULL, True, True), (SCAN_FEW, True, False), (channels(1, 1024, 1024), False, False),
    ):  # fmt: skip
        first, *_ = record(over_channels(op, impl, sizes), capability, training=training)
        assert (first.arguments["ahead"] > 0) == fetches
    check(launches, capability, max_stack_bytes=SCAN_STACK_BYTES)


def scans(sizes: dict[str, int], kind: str | None = None) -> list[Any]:
    """Return RG-LRU's launches, forward and backward, but for the one that adds up what the backward one leaves."""
    launches = record(over_channels("rglru", "fused", sizes), kind=kind)
    return [launch for launch in launches if "TILE" in launch.arguments]


@pytest.mark.parametrize("kind", [None, "projection"])
def test_rglru_elements_are_read_and_written_in_wide_accesses(kind: str | None) -> None:
    """A thread's access is four neighbouring channels or more, and x, r, i and h are each touched once."""
    launch, *_ = scans(SCAN_FULL, kind)
    tile = launch.arguments["TILE"]
    assert tile.channels >= 4
    ptx = compile_kernel(launch, 90).asm["ptx"]
    assert ptx.count(f"ld.global.v{tile.channels // 2}.b32") == 3 * tile.block_i
    assert ptx.count(f"st.global.v{tile.channels // 2}.b32") == tile.block_i


@pytest.mark.parametrize("sizes", [SCAN_FULL, SCAN_FEW], ids=["full", "few"])
def test_rglru_on_hopper(sizes: dict[str, int]) -> None:
    """What the bars rest on, read from the machine code.

    All of a tile's loads are in flight before anything waits for one, a gate is evaluated once, and states are passed
    on two an access that goes by the L1, read in one place and written in one.
    """
    for launch, specials in zip(scans(sizes), (5, 7), strict=True):
        code = read_instructions(compile_kernel(launch, 90).asm["cubin"])
        name, tile, pack = launch.kernel.__name__, launch.arguments["TILE"], launch.arguments["PASS"].pack
        loads = [n for n, line in enumerate(code) if "LDG.E.64 " in line]
        assert len(loads) == (4 if "gradient" in name else 3) * tile.block_i, name
        between = code[loads[0] : loads[-1]]
        elements = tile.block_i * tile.channels
        assert not [line for line in between if "MUFU.EX2" in line or "MUFU.RSQ" in line], name
        assert sum("MUFU" in line for line in code) <= specials * elements + max(0.6 * elements, 20), name
        # Two words of 64 bits an access.
        for access in ("LDG.E.128.STRONG.GPU", "STG.E.128.STRONG.GPU"):
            assert sum(access in line for line in code) == pack // 2 > 0, name
        assert sum("STRONG" in line for line in code) == pack, name


@pytest.mark.parametrize("capability", HOPPER_IN_CI)
def test_wkv_forward(capability: int) -> None:
    """Without a backward pass states pass from tile to tile, by 128 bits at once."""
    (launch,) = launches = record(over_channels("wkv4", "scan", WKV_WIDE), capability, training=False, carry=False)
    assert launch.arguments["PASS"] and launch.arguments["KEEP"] == "tokens"
    check(launches, capability)
    ptx = compile_kernel(launch, capability).asm["ptx"]
    pack = launch.arguments["PASS"].pack
    assert ptx.count("ld.relaxed.gpu.global.b128") == ptx.count("st.relaxed.gpu.global.b128") == pack


def test_mlp_projects_again_or_saves() -> None:
    for impl, training, ends in (
        ("fused", False, ["gate"]),
        ("fused", True, ["gate", "gradient"]),
        ("fused_save", True, ["save"]),
    ):
        launches = record(mlp(impl, "columns"), training=training)
        assert [x.arguments["END"] for x in launches if x.kernel is project.project_kernel.kernel] == ends


def test_mlp_launches_of_large_products() -> None:
    sizes = {"batch": 1, "seq_len": 16384, "d_model": 16384, "d_ff": 53248}
    config = case_config(sizes, "bf16", (9, 0), training=True, impl="fused")
    assert config.forward.num_stages == 3
    check(record(mlp("fused", "columns", config=config), training=False))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MLP_ALTERNATIVES)
def test_mlp_alternatives(name: str, layout: str) -> None:
    """The inference launches that are worth timing on Hopper compile as cleanly as the one chosen."""
    chosen = select_tile(end="gate", k_major=layout != "rows", tokens=4096, work=0, capability=(9, 0), item_bytes=2)
    forward = replace(chosen, **MLP_ALTERNATIVES[name])
    check(record(mlp("fused", layout, config=GatedMlpConfig(forward=forward, gradient=forward)), training=False))


def mlp_text(stage: str, capability: int = 90) -> str:
    """Return what an MLP's inference is compiled to."""
    return compile_kernel(record(mlp("fused", "columns"), capability, training=False)[0], capability).asm[stage]


def test_mlp_loads_a_tile_while_it_multiplies_another_on_hopper() -> None:
    """The loops over tiles and along D are one, loads are descriptors', products are asynchronous."""
    text = mlp_text("ttgir")
    main = text[text.index("warp_group_dot ") :]
    assert text.count("ttng.warp_group_dot ") == text.count("isAsync = true") == 1
    # Within the loop that multiplies: the loads of a later step, of a later tile's first ones too, then the store.
    assert main.index("async_tma_copy_global_to_local") < main.index("async_tma_copy_local_to_global")


def test_products_that_wait_for_each_other_are_found() -> None:
    """Accumulators of two products in a flattened loop: the assembler serialises them, and the compile tests say so."""
    chosen = select_tile(end="gate", k_major=False, tokens=4096, work=0, capability=(9, 0), item_bytes=2)
    flat = GatedMlpConfig(forward=replace(chosen, flatten=True), gradient=chosen)
    with pytest.raises(AssertionError, match="serialised=True"):
        check(record(mlp("fused", "rows", config=flat), training=False))


def test_mlp_tokens_compile_nothing_anew() -> None:
    """Triton else compiles for one token, for multiples of 16 and for other numbers."""
    for kernel, name in ((project.project_kernel.kernel, "M"), (project.gate_gradient_kernel.kernel, "multiples")):
        (tokens,) = (parameter for parameter in kernel.params if parameter.name == name)
        assert tokens.do_not_specialize


def test_mlp_reads_k_major_operands_as_they_lie() -> None:
    """On Hopper neither operand is transposed on its way, and a step's products run on while its next loads start."""
    ptx = mlp_text("ptx")
    # The last two immediates of a product say whether A and B are transposed.
    assert set(re.findall(r"wgmma\.mma_async[^;]*, (\d), (\d);", ptx)) == {("0", "0")}
    assert "wgmma.wait_group.sync.aligned 1;" in ptx


def test_mlp_pointer_loads_are_whole_sectors() -> None:
    """On sm_80 tiles travel by asynchronous copies of 16 bytes."""
    copies = re.findall(r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+)", mlp_text("ptx", 80))
    assert set(copies) == {"0x10"}
