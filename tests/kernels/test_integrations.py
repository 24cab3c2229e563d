"""Our kernels inside other libraries: stand-ins with their names and arguments, and on a GPU their models."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lrbench.kernels import integrations
from lrbench.kernels.integrations import use_in_fla, use_in_mamba_ssm, use_in_mlstm_kernels, use_in_transformers
from lrbench.kernels.mamba2_ssd import mamba2_ssd
from lrbench.kernels.mlstm_exp import mlstm_exp
from lrbench.kernels.simple_gla import simple_gla
from lrbench.tests.kernels.baselines.test_stand_ins import put_modules

MLSTM = "q k v i f c_initial n_initial m_initial return_last_states eps"
NAMES = {
    "fla.ops.simple_gla.chunk_simple_gla": (
        "q k v g g_gamma scale initial_state output_final_state state_v_first cu_seqlens cu_seqlens_cpu kwargs"
    ),
    "fla.ops.simple_gla.fused_recurrent_simple_gla": (
        "q k v g g_gamma scale initial_state output_final_state reverse state_v_first cu_seqlens kwargs"
    ),
    "fla.ops.simple_gla.fused_chunk_simple_gla": ("q k v g g_gamma scale initial_state output_final_state cu_seqlens"),
    "fla.ops.simple_gla.parallel_simple_gla": "q k v g scale output_attentions cu_seqlens cu_seqlens_cpu",
    "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined": (
        "x dt A B C chunk_size D z dt_bias initial_states seq_idx cu_seqlens dt_softplus dt_limit return_final_states "
        "return_varlen_states"
    ),
    "mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined": (
        "zxbcdt conv1d_weight conv1d_bias dt_bias A D chunk_size initial_states seq_idx dt_limit return_final_states "
        "activation rmsnorm_weight rmsnorm_eps outproj_weight outproj_bias headdim ngroups norm_before_gate"
    ),
    "mlstm_kernels.torch.chunkwise.native_autograd": f"{MLSTM} chunk_size kwargs",
    "mlstm_kernels.torch.chunkwise.native_custbw": f"{MLSTM} chunk_size autocast_kernel_dtype",
    "mlstm_kernels.torch.recurrent.native_sequence__native": f"{MLSTM} dtype_state kwargs",
    "mlstm_kernels.torch.recurrent.native": "q k v i f c n m eps dtype_state kwargs",
    "transformers.models.xlstm.modeling_xlstm.mlstm_chunkwise_native_autograd": (
        "query key value igate fgate c_initial n_initial m_initial return_last_states eps chunk_size kwargs"
    ),
    "transformers.models.xlstm.modeling_xlstm.mlstm_recurrent_sequence_native": (
        "query key value igate fgate c_initial n_initial m_initial return_last_states eps dtype_state kwargs"
    ),
    "transformers.models.xlstm.modeling_xlstm.mlstm_recurrent_step_native": (
        "query key value igate fgate cstate nstate mstate eps dtype_state kwargs"
    ),
}
"""Function, or entry of a registry -> its arguments, of the versions that integrations.py names."""
REGISTRIES = {"chunkwise": "registry", "native_sequence__native": "registry_sequence", "native": "registry_step"}
KERNELS = integrations.FLA, integrations.MAMBA_SSM, integrations.MLSTM_KERNELS, integrations.TRANSFORMERS


def registry_of(path: str) -> str | None:
    module, _, name = path.rpartition(".")
    return REGISTRIES.get(name, REGISTRIES.get(module.rpartition(".")[2])) if "mlstm_kernels" in path else None


def look_up(path: str) -> Any:
    """Return a function or an entry of a registry, as a user of the library gets it."""
    module, _, name = path.rpartition(".")
    held = vars(importlib.import_module(module))
    return (held[registry] if (registry := registry_of(path)) else held)[name]


def stand_in(path: str) -> Callable[..., Any]:
    def original(*args: Any, **keywords: Any) -> str:
        return path

    kinds = inspect.Parameter
    original.__name__ = path.rpartition(".")[2]
    original.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [kinds(name, kinds.VAR_KEYWORD if name == "kwargs" else kinds.POSITIONAL_OR_KEYWORD)
         for name in NAMES[path].split()])  # fmt: skip
    return original


class BaseBackend:
    """fla's, of which a subclass says whether it is enabled."""

    implementation: Any = None


@pytest.fixture(autouse=True)
def libraries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put stand-ins in the place of the libraries; see that nothing stays in use."""
    if request.node.get_closest_marker("gpu") or "real" in request.node.name:
        yield
        return
    backends: dict[Any, Any] = {}

    def dispatch(function: Any) -> Any:
        def entry(*args: Any, **keywords: Any) -> Any:
            backend = backends.get(function)
            return (backend.implementation if backend and backend.is_enabled() else function)(*args, **keywords)

        vars(entry).update(__wrapped__=function, __name__=function.__name__)
        return entry

    def register(entry_point: Any, *, backend: type[BaseBackend]) -> Any:
        made = backends[inspect.unwrap(entry_point, stop=lambda each: each in backends)] = backend()
        return lambda implementation: setattr(made, "implementation", implementation)

    modules: dict[str, dict[str, Any]] = {"fla.backends": {"BaseBackend": BaseBackend, "register": register}}
    for path in NAMES:
        module, _, name = path.rpartition(".")
        held = modules.setdefault(module, {"causal_conv1d_fn": None, "rmsnorm_fn": gated_norm})
        held = held.setdefault(registry, {}) if (registry := registry_of(path)) else held
        function = stand_in(path)
        held[name] = function if "fla." not in path or name == "chunk_simple_gla" else dispatch(function)
    modules["fla.layers.simple_gla"] = {"chunk_simple_gla": modules["fla.ops.simple_gla"]["chunk_simple_gla"]}
    put_modules(monkeypatch, modules)
    yield
    assert not any(each.on for each in KERNELS)
    for each in KERNELS:
        each.warned.clear()


def gated_norm(
    x: Tensor, weight: Tensor, bias: None, *, z: Tensor, eps: float, group_size: int, norm_before_gate: bool
) -> Tensor:
    x = x if norm_before_gate else x * F.silu(z)
    x = F.rms_norm(x.unflatten(-1, (-1, group_size)), (group_size,), eps=eps).flatten(-2) * weight
    return x * F.silu(z) if norm_before_gate else x


def assert_near(ours: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(ours.double(), exact.double(), rtol=1e-4, atol=3e-5)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.slow
@pytest.mark.parametrize("path", NAMES)
def test_arguments_of_the_real_library(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers takes the root of this repository, if that is on the path, for the package kernels.
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", os.getcwd())])
    pytest.importorskip(path.partition(".")[0])
    try:
        found = inspect.signature(look_up(path)).parameters
    except ModuleNotFoundError as missing:
        pytest.skip(f"another package is needed: {missing}")
    assert " ".join(found) == NAMES[path]


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["chunk", "fused_recurrent", "fused_chunk", "parallel"])
def test_simple_gla_of_fla(name: str) -> None:
    q, k, v, g = draw(2, 21, 2, 16), draw(2, 21, 2, 16) / 2, draw(2, 21, 2, 24), -draw(2, 21, 2).abs()
    state = draw(2, 2, 16, 24)
    exact = [x.double() for x in (q, k, v, g)]
    with use_in_fla():
        function = look_up(f"fla.ops.simple_gla.{name}_simple_gla")
        assert_near(function(q, k, v, g, scale=0.3)[0], simple_gla(*exact, impl="recurrent", scale=0.3))
        bounds = torch.tensor([0, 8, 8, 21])
        packed = function(*(x[:1] for x in (q, k, v, g)), cu_seqlens=bounds)[0]
        assert_near(packed, simple_gla(*(x[:1] for x in exact), impl="recurrent", cu_seqlens=bounds))
        if name == "parallel":
            return
        h, none = function(q, k, v, g_gamma=g[0, 0])
        assert none is None
        assert_near(h, simple_gla(*exact[:3], exact[3][:1, :1].expand(2, 21, 2), impl="recurrent"))
        h, last = function(q, k, v, g, initial_state=state, output_final_state=True)
        expected, end = simple_gla(
            *exact, impl="recurrent", initial_state=state.double(), return_last_state=True
        )  # fmt: skip
        assert_near(h, expected)
        assert_near(last, end)
        if name == "fused_chunk":
            return
        steps, after = [], state.mT
        for t in range(2):
            with torch.no_grad():
                step = (x[:, t : t + 1] for x in (q, k, v, g))
                h, after = function(*step, initial_state=after, output_final_state=True, state_v_first=True)
            steps.append(h)
        assert_near(torch.cat(steps, 1), expected[:, :2])
        assert after.shape == (2, 2, 24, 16)


@pytest.mark.interpret
@pytest.mark.parametrize("seq_idx", [None, torch.tensor([[0] * 5 + [1] * 8, [3] * 2 + [0] * 11])])
def test_mamba_2(seq_idx: Tensor | None) -> None:
    x, dt, A, B, C = draw(2, 13, 4, 16), draw(2, 13, 4), -draw(4).abs(), draw(2, 13, 2, 16), draw(2, 13, 2, 16) / 4
    D, z, bias, state = draw(4), draw(2, 13, 4, 16), draw(4), draw(2, 4, 16, 16)
    step = F.softplus(dt + bias).clamp(0.2, 2.0)
    documents = [(0, 0, 13), (1, 0, 13)] if seq_idx is None else [(0, 0, 5), (0, 5, 13), (1, 0, 2), (1, 2, 13)]
    keywords = {} if seq_idx is not None else {"initial_states": state, "return_final_states": True}
    with use_in_mamba_ssm():
        result: Any = look_up("mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined")(
            x, dt, A, B, C, 64, D=D, z=z, dt_bias=bias, dt_softplus=True, dt_limit=(0.2, 2.0), seq_idx=seq_idx,
            **keywords,
        )  # fmt: skip
    y = result if seq_idx is not None else result[0]
    for n, start, end in documents:
        mine, size, b, c = (each[n : n + 1, start:end].double() for each in (x, step, B, C))
        expected, last = mamba2_ssd(
            mine, size, A.double(), b, c, impl="recurrent", return_last_state=True,
            initial_state=state[n : n + 1].mT.double().contiguous() if seq_idx is None else None,
        )  # fmt: skip
        assert_near(y[n : n + 1, start:end], (expected + mine * D[:, None]) * F.silu(z[n : n + 1, start:end].double()))
        if seq_idx is None:
            assert_near(result[1][n : n + 1], last.mT)


@pytest.mark.interpret
@pytest.mark.parametrize("norm", [False, True])
def test_a_layer_of_mamba_2(norm: bool) -> None:
    """Convolution, scan, gated norm and projection, which mamba_ssm computes in one function."""
    heads, width, groups, state, tokens = 4, 16, 2, 16, 11
    inner, channels = heads * width, heads * width + 2 * groups * state
    zxbcdt, weight, bias, dt_bias, A, D = (
        draw(2, tokens, inner + channels + heads), draw(channels, 4) / 2, draw(channels), draw(heads),
        -draw(heads).abs(), draw(heads, width),
    )  # fmt: skip
    scale, out = draw(inner), draw(24, inner) / 8
    keywords = {"rmsnorm_weight": scale, "outproj_weight": out, "norm_before_gate": False} if norm else {}
    with use_in_mamba_ssm():
        y = look_up("mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined")(
            zxbcdt, weight, bias, dt_bias, A, D, 64, ngroups=groups, **keywords
        )
    z, conv, dt = zxbcdt.double().split([inner, channels, heads], -1)
    conv = F.conv1d(conv.mT, weight[:, None].double(), bias.double(), padding=3, groups=channels)[..., :tokens].mT
    x, b, c = F.silu(conv).split([inner, groups * state, groups * state], -1)
    x, b, c = (each.unflatten(-1, (n, -1)) for each, n in ((x, heads), (b, groups), (c, groups)))
    expected: Any = mamba2_ssd(x, F.softplus(dt + dt_bias), A.double(), b, c, impl="recurrent") + x * D
    expected = expected.flatten(2)
    if norm:
        expected = gated_norm(
            expected, scale.double(), None, z=z, eps=1e-6, group_size=inner // groups, norm_before_gate=False
        ) @ out.double().T  # fmt: skip
    assert_near(y, expected if norm else expected * F.silu(z))


@pytest.mark.interpret
@pytest.mark.parametrize("use, chunkwise, step", [
    (use_in_mlstm_kernels, "mlstm_kernels.torch.chunkwise.native_custbw", "mlstm_kernels.torch.recurrent.native"),
    (use_in_transformers, *(f"transformers.models.xlstm.modeling_xlstm.mlstm_{name}"
                            for name in ("chunkwise_native_autograd", "recurrent_step_native"))),
])  # fmt: skip
def test_mlstm(use: Any, chunkwise: str, step: str) -> None:
    q, k, v = draw(2, 2, 20, 16), draw(2, 2, 20, 16) / 2, draw(2, 2, 20, 24)
    i, f = draw(2, 2, 20), draw(2, 2, 20) + 2
    expected, end = mlstm_exp(
        *(x.transpose(1, 2).double().contiguous() for x in (q, k, v, i, f)), impl="recurrent", return_last_state=True
    )
    with use(), torch.no_grad():
        h, states = look_up(chunkwise)(*(x[:, :, :-1] for x in (q, k, v, i, f)), return_last_states=True, eps=1e-6)
        gates = (x[:, :, -1:] for x in (i, f))
        one, states = look_up(step)(*(x[:, :, -1] for x in (q, k, v)), *gates, *states, eps=1e-6)
    assert_near(torch.cat([h, one[:, :, None]], 2), expected.transpose(1, 2))
    for ours, exact in zip(states, (*end[:2], end[2][..., None]), strict=True):
        assert_near(ours, exact)


@pytest.mark.interpret
@pytest.mark.parametrize("use, path, keywords, named", [
    (use_in_fla, "fla.ops.simple_gla.fused_recurrent_simple_gla", {"reverse": True}, "reverse"),
    (use_in_fla, "fla.ops.simple_gla.chunk_simple_gla", {"g_gamma": draw(2)}, "g_gamma"),
    (use_in_fla, "fla.ops.simple_gla.chunk_simple_gla", {"scale": "1"}, "scale"),
    (use_in_mlstm_kernels, "mlstm_kernels.torch.chunkwise.native_custbw", {"eps": 1e-3}, "eps"),
    (use_in_mlstm_kernels, "mlstm_kernels.torch.chunkwise.native_autograd", {}, "q, k, v, i and f"),
])  # fmt: skip
def test_what_ours_does_not_take_runs_the_original(use: Any, path: str, keywords: Any, named: str) -> None:
    q, k, v = (draw(1, 4, 2, 16).requires_grad_() for _ in range(3))
    gates = [-draw(1, 4, 2).abs()] * (2 if "mlstm" in path else 1)
    if "mlstm" in path:
        q, k, v, *gates = (x.transpose(1, 2) for x in (q, k, v, *gates))
    with use(), pytest.warns(RuntimeWarning, match=f"since for lrbench's {named} must") as said:
        function = look_up(path)
        assert [function(q, k, v, *gates, **keywords) for _ in range(2)] == [path] * 2
    assert len(said) == 1


@pytest.mark.parametrize("use", [use_in_fla, use_in_mamba_ssm, use_in_mlstm_kernels, use_in_transformers])
def test_in_use_until_it_is_undone(use: Any) -> None:
    paths = [path for path in NAMES if path.startswith(f"{use.__name__.removeprefix('use_in_')}.")]
    before = [look_up(path) for path in paths]
    undo = use()
    with use():
        inside = [look_up(path) for path in paths]
    assert [look_up(path) for path in paths] == inside
    assert any(a is not b for a, b in zip(before, inside, strict=True))
    undo.close()
    assert [look_up(path) for path in paths] == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [function() for function in inside] == paths  # what a model kept


def test_layers_that_imported_the_function() -> None:
    with use_in_fla():
        layer = look_up("fla.layers.simple_gla.chunk_simple_gla")
        assert layer is look_up("fla.ops.simple_gla.chunk_simple_gla")
        assert hasattr(layer, "__wrapped__")
        assert integrations.MAMBA_SSM.on


@pytest.mark.parametrize("library", ["fla", "mamba_ssm", "mlstm_kernels", "transformers"])
def test_a_missing_library(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{library}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"use_in_{library} needs .*==\d.*, the versions tried"):
        getattr(integrations, f"use_in_{library}")()
