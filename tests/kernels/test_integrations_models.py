"""Models of other libraries, trained and decoding with their kernels and with ours: the same losses and scores.

pytest -s -m gpu FILE prints the losses.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrbench.kernels.integrations import use_in_fla, use_in_mamba_ssm, use_in_mlstm_kernels, use_in_transformers

pytestmark = pytest.mark.gpu
VOCABULARY, STEPS, TOKENS = 64, 200, 256


@pytest.fixture(autouse=True)
def _not_our_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers looks for a package called kernels, which the root of this repository is not."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])


@pytest.fixture(autouse=True)
def _few_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the others' kernels choose among three configurations: compiling takes minutes."""
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs
    monkeypatch.setattr(Autotuner, "prune_configs", lambda self, kwargs: list(prune(self, kwargs))[:3])


class MatrixLSTM(nn.Module):
    """An mLSTM layer on mLSTMBackend, with gates that begin as the authors' do."""

    def __init__(self, dim: int, heads: int) -> None:
        import triton
        from mlstm_kernels.torch.backend_module import mLSTMBackend, mLSTMBackendConfig

        super().__init__()
        self.heads = heads
        self.project, self.gates = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * heads)
        nn.init.constant_(self.gates.bias[:heads], -3.0)
        nn.init.constant_(self.gates.bias[heads:], 4.0)
        self.out = nn.Linear(dim, dim)
        # Triton 3.6 aborts on xl_chunk, 3.9 has no block pointers.
        kernel = "triton_limit_chunk" if int(triton.__version__.split(".")[1]) < 9 else "native_custbw"
        config = mLSTMBackendConfig(chunkwise_kernel=f"chunkwise--{kernel}", return_last_states=False)
        self.mlstm = mLSTMBackend(config)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).split([x.shape[2] // 2, x.shape[2] // 2, x.shape[2]], -1)
        i, f = self.gates(x).unflatten(-1, (2, -1)).unbind(2)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2).contiguous() for each in (q, k, v))
        h = self.mlstm(q, k, v, i.mT.contiguous(), f.mT.contiguous())
        return self.out(F.rms_norm(h.transpose(1, 2), h.shape[-1:]).flatten(2))


def fla_layer(module: str, name: str, **options: Any) -> Callable[[int, int], nn.Module]:
    return lambda dim, heads: getattr(pytest.importorskip(f"fla.layers.{module}"), name)(
        hidden_size=dim, layer_idx=0, **({"num_heads": heads} if name != "Mamba2" else {}), **options
    )


def mamba_layer(dim: int, heads: int) -> nn.Module:
    return pytest.importorskip("mamba_ssm.modules.mamba2").Mamba2(dim, use_mem_eff_path=False)


def mlstm_layer(dim: int, heads: int) -> nn.Module:
    pytest.importorskip("mlstm_kernels")
    return MatrixLSTM(dim, heads)


LAYERS: dict[str, tuple[Any, Callable[[int, int], nn.Module]]] = {
    "fla, simple GLA": (use_in_fla, fla_layer("simple_gla", "SimpleGatedLinearAttention")),
    "fla, retention": (use_in_fla, fla_layer("multiscale_retention", "MultiScaleRetention")),
    # Without causal_conv1d fla's Mamba-2 trains only as what it does not call training: .eval() below.
    "fla, Mamba-2": (use_in_fla, fla_layer("mamba2", "Mamba2", backend="triton")),
    "mamba_ssm, Mamba-2": (use_in_mamba_ssm, mamba_layer),
    "mlstm_kernels, mLSTM": (use_in_mlstm_kernels, mlstm_layer),
}


class Language(nn.Module):
    """Two layers with norms and residuals, between an embedding and a head."""

    def __init__(self, layer: Callable[[int, int], nn.Module], dim: int, heads: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, dim), nn.Linear(dim, VOCABULARY)
        self.layers = nn.ModuleList(layer(dim, heads) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            y = layer(F.rms_norm(x, x.shape[-1:]))
            x = x + (y[0] if isinstance(y, tuple) else y)
        return self.head(F.rms_norm(x, x.shape[-1:]))


def progressions(seed: int, batch: int, tokens: int) -> Tensor:
    """Draw sequences whose tokens rise by 1 or by 4 each, which the tokens before show."""
    generator = torch.Generator().manual_seed(seed)
    start, stride = torch.randint(VOCABULARY, (2, batch, 1), generator=generator)
    return ((start + (1 + 3 * (stride % 2)) * torch.arange(tokens + 1)) % VOCABULARY).cuda()


def train(layer: Callable[[int, int], nn.Module], *, noise: float = 0.0, training: bool = False) -> Tensor:
    """Return the loss of each step [STEPS] of a model with two heads of 64."""
    torch.manual_seed(0)
    model = Language(layer, 128, 2).cuda().train(training)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + noise * torch.randn_like(weight))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        ids = progressions(step, 8, TOKENS)
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


@pytest.mark.parametrize("name", LAYERS)
def test_losses_of_two_hundred_steps(name: str) -> None:
    """A hundredth apart, or as near as those of the same model whose weights begin a rounding to bfloat16 away."""
    use, layer = LAYERS[name]
    with use():
        ours = train(layer)
        if name == "fla, Mamba-2":
            assert (train(layer, training=True) - ours).abs().max() < 0.1
    try:
        theirs = train(layer)
    except RuntimeError as error:
        pytest.skip(f"the original does not train here, ours does, to {ours[-1]:.3f}: {error}")
    allowed = 3 * (train(layer, noise=2**-9) - theirs).abs() + 1e-2
    apart = (ours - theirs).abs()
    print(
        f"\n{name}: losses {theirs[0]:.4f} to {theirs[-1]:.4f}, ours {ours[0]:.4f} to {ours[-1]:.4f}, at most "
        f"{apart.max():.4f} apart, allowed {allowed.max():.4f}"
    )
    assert apart[0] < 2e-3
    assert apart.max() < allowed.max()
    assert ours[-1] < 0.5 * ours[0]


def causal_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "hidden_size": 128, "initializer_range": 0.1}
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None}
    if name == "xLSTM":
        library = pytest.importorskip("transformers")
        sizes.pop("initializer_range")
        config = library.xLSTMConfig(**sizes, num_heads=2, **tokens)
        return library.xLSTMForCausalLM(config).cuda().float().eval()
    library = pytest.importorskip("fla.models")
    options = {"head_dim": 64, "state_size": 64} if name == "Mamba2" else {"num_heads": 2}
    config = getattr(library, f"{name}Config")(**sizes, **options, **tokens, fuse_cross_entropy=False)
    return getattr(library, f"{name}ForCausalLM")(config).cuda().float().eval()


@torch.no_grad()
def decode(model: nn.Module, ids: Tensor, prompt: int) -> Tensor:
    """Return the scores after a prompt and after each token that follows it."""
    arguments = inspect.signature(model.forward).parameters
    name = next(each for each in ("past_key_values", "cache_params", "cache") if each in arguments)
    cache, scores = {}, []
    for piece in (ids[:, :prompt], *ids[:, prompt:].split(1, 1)):
        result = model(piece, use_cache=True, **cache)
        cache = {name: result[name]}
        scores.append(result.logits[:, -1])
    return torch.stack(scores)


@pytest.mark.parametrize("name, use", [("RetNet", use_in_fla), ("Mamba2", use_in_fla), ("xLSTM", use_in_transformers)])
def test_generation(name: str, use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 100 tokens in one call, then token by token, in float32."""
    monkeypatch.setenv("FLA_CONV_BACKEND", "triton")
    ids = progressions(0, 2, 139)
    with use():
        ours = decode(causal_model(name), ids, 100)
    theirs = decode(causal_model(name), ids, 100)
    assert (ours - theirs).abs().max() < 2e-2 * theirs.std()
