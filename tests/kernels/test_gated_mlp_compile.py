"""Compile every launch of the gated MLP for sm_80, sm_90 and sm_100, without a GPU, and hold what it costs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from lrbench.kernels.common.offline import Launch, compile_kernel, record_launches
from lrbench.kernels.gated_mlp import fused as module
from lrbench.kernels.gated_mlp import project
from lrbench.kernels.gated_mlp.config import ACTIVATIONS, GatedMlpConfig, fused_config, select_tile
from lrbench.kernels.gated_mlp.reference import make_inputs
from lrbench.tests.kernels.compiling import CAPABILITIES, check, kernels_of, require_compiler
from lrbench.tests.kernels.mlp_laws import LAYOUTS
from lrbench.tests.kernels.test_gated_mlp_triton import ALTERNATIVES, FUNCTIONS

pytestmark = pytest.mark.compile


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    # What the launcher checks is that a kernel could run here; it only has to be recorded.
    monkeypatch.setattr(module, "check_kernel_support", lambda *_: None)


def record(
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    tokens: int = 256,
    layout: str = "columns",
    dtype: torch.dtype = torch.bfloat16,
    activation: str = "silu",
    config: GatedMlpConfig | None = None,
) -> list[Launch]:
    """Return the launches of inference and of both ways of training."""
    monkeypatch.setattr(module, "capability", lambda device: divmod(capability, 10))
    sizes = {"batch": 1, "seq_len": tokens, "d_model": 128, "d_ff": 256}
    inputs = LAYOUTS[layout](make_inputs(sizes, dtype=dtype, device="cpu", seed=0))
    with record_launches(module) as launches:
        FUNCTIONS["fused"](*inputs.values(), activation=activation, config=config)
        leaves = [x.requires_grad_() for x in inputs.values()]
        for fn in FUNCTIONS.values():
            y = fn(*leaves, activation=activation, config=config)
            torch.autograd.grad(y, leaves, torch.zeros_like(y))
    return launches


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_launches(capability: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record(capability, monkeypatch, layout=layout)
    ends = [launch.arguments["END"] for launch in launches if launch.kernel is project.project_kernel]
    assert ends == ["gate", "gate", "gradient", "save"]
    check(launches, capability)


def test_launches_of_large_products(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"batch": 1, "seq_len": 16384, "d_model": 16384, "d_ff": 53248}
    config = fused_config(sizes, "bf16", (9, 0), training=True)
    assert config.forward.num_stages == 3
    check(record(90, monkeypatch, config=config)[:1], 90)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_full_product(
    capability: int,
    activation: str,
    dtype: torch.dtype,
    tokens: int,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = record(capability, monkeypatch, tokens=tokens, layout=layout, dtype=dtype, activation=activation)
    check(launches, capability)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ALTERNATIVES)
def test_alternatives(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inference launches that are worth timing on Hopper compile as cleanly as the one chosen."""
    chosen = select_tile(end="gate", k_major=layout != "rows", tokens=4096, work=0, capability=(9, 0), item_bytes=2)
    forward = replace(chosen, **ALTERNATIVES[name])
    launches = record(90, monkeypatch, layout=layout, config=GatedMlpConfig(forward=forward, gradient=forward))
    check(launches[:1], 90)


def compiled_text(launch: Launch, capability: int, stage: str) -> str:
    return compile_kernel(launch, capability).asm[stage]


def test_hopper_walks_tiles_with_their_loads_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops over tiles and along D are one, loads are descriptors', products are asynchronous."""
    text = compiled_text(record(90, monkeypatch)[0], 90, "ttgir")
    main = text[text.index("warp_group_dot ") :]
    assert text.count("ttng.warp_group_dot ") == text.count("isAsync = true") == 1
    # Within the loop that multiplies: the loads of a later step, of a later tile's first ones too, then the store.
    assert main.index("async_tma_copy_global_to_local") < main.index("async_tma_copy_local_to_global")


def test_products_that_wait_for_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulators of two products in a flattened loop: the assembler serialises them, and the compile tests say so."""
    chosen = select_tile(end="gate", k_major=False, tokens=4096, work=0, capability=(9, 0), item_bytes=2)
    flat = replace(chosen, flatten=True)
    launches = record(90, monkeypatch, layout="rows", config=GatedMlpConfig(forward=flat, gradient=chosen))
    with pytest.raises(AssertionError, match="serialised=True"):
        check(launches[:1], 90)


def test_tokens_compile_nothing_anew() -> None:
    """Triton else compiles for one token, for multiples of 16 and for other numbers."""
    for kernel, name in ((project.project_kernel, "M"), (project.gate_gradient_kernel, "multiples")):
        (tokens,) = (parameter for parameter in kernel.params if parameter.name == name)
        assert tokens.do_not_specialize


def test_k_major_products_read_shared_memory_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper neither operand is transposed on its way, and a step's products run on while its next loads start."""
    ptx = compiled_text(record(90, monkeypatch)[0], 90, "ptx")
    # The last two immediates of a product say whether A and B are transposed.
    assert set(re.findall(r"wgmma\.mma_async[^;]*, (\d), (\d);", ptx)) == {("0", "0")}
    assert "wgmma.wait_group.sync.aligned 1;" in ptx


def test_pointer_loads_are_whole_sectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """On sm_80 tiles travel by asynchronous copies of 16 bytes."""
    ptx = compiled_text(record(80, monkeypatch)[0], 80, "ptx")
    sizes = set(re.findall(r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+)", ptx))
    assert sizes == {"0x10"}


def test_every_kernel_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder sees every kernel, so one that is added is compiled too."""
    kernels = kernels_of(project)
    recorded: set[Any] = {launch.kernel.__name__ for launch in record(90, monkeypatch)}
    assert recorded == kernels
