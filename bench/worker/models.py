"""Models whose blocks mix tokens by an operation, and a step of their training: what mode train times.

| operation | model | a block adds to its input |
|---|---|---|
| attention | LLaMA | RMSNorm, rotated queries and keys; RMSNorm, SwiGLU |
| mlstm_sig, mlstm_exp | xLSTM | RMSNorm, heads with scalar gates, each normed, and an output gate; RMSNorm, SwiGLU |
| lightning | TransNormerLLM | SRMSNorm, gated linear attention; SRMSNorm, a GLU without activation |
| rglru | Hawk | RMSNorm, causal convolution and RG-LRU beside a GELU branch; RMSNorm, GeGLU |
| wkv4 | RWKV-4 | LayerNorm, time mixing with token shift; LayerNorm, channel mixing with token shift |

Simple GLA and both Retentions stand in xLSTM's blocks with the gates that they have.

Around the blocks are an embedding, a last norm, a head of its own weights and the cross entropy of the next token,
computed some tokens at a time; the last token of a packed document predicts the first of the next one. Weights,
gradients and AdamW's averages are float32 (float64 beside float64); in 16-bit cases matrix products run under autocast,
and the residual stream is kept in the case's dtype. Models over heads recompute their blocks in the backward pass
(activation checkpointing): what 92k tokens keep in 3 billion parameters' blocks fits on no GPU.

Sources: Touvron et al., LLaMA (2023), section 2.2; Beck et al., TFLA (2025), section 5 and appendix E.2, and xLSTM 7B
(2025), section 3; Qin et al., TransNormerLLM (2023), section 3, without LRPE, which its first layer alone has, and with
the same decays in every layer; De et al., Griffin (2024), section 2, with full matrices for the gates as on the page
about the IO-aware RG-LRU; Peng et al., RWKV (2023), section 3. The hidden widths of LLaMA and xLSTM, 8/3, and of
TransNormerLLM, 7/3 of the model's, give a layer of any about 12 width^2 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ...kernels.baselines import get_operation
from ...kernels.common.arguments import compute_dtype
from ...kernels.common.spec import LanguageModel
from ...results.documents import lengths_of
from ...results.schema import Case
from . import correctness

LOSS_TOKENS = 8192
"""Tokens whose logits are in memory at a time."""

ROTARY_BASE = 10000.0
CONVOLUTION = 4
"""Steps of Hawk's causal convolution."""

GATE_CAP = 15.0
GATE_BIASES = {"i": (-10.0, -10.0), "f": (3.0, 6.0), "g": (3.0, 6.0)}
"""Gate of an operation -> the biases with which it starts in the first head and the last, evenly spread between."""

LEARNING_RATE = 3e-4

Mix = Callable[..., Tensor]
"""The operation, by an implementation: a function of its arguments in order."""

linear = partial(nn.Linear, bias=False)
recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class RMSNorm(nn.RMSNorm):
    """In the dtype of its input, by one kernel: autocast would widen input and output."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weight = None if self.weight is None else self.weight.to(x.dtype)
            return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """The same with a mean and a bias."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


rms_norm = partial(RMSNorm, eps=1e-6)
simple_norm = partial(rms_norm, elementwise_affine=False)
"""SRMSNorm, without weights."""


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return x, kept between -cap and cap."""
    return cap * torch.tanh(x / cap)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: float, activation: nn.Module) -> None:
        super().__init__()
        hidden = 256 * -(-int(hidden) // 256)
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Heads(nn.Module):
    """Projections of x to queries, keys, values and (``gated``) gates of heads' outputs, and of these to x's width."""

    gated = False

    def __init__(self, mix: Mix, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.mix, self.heads = mix, sizes["num_heads"]
        keys, width = self.heads * sizes["head_dim_qk"], self.heads * sizes["head_dim_v"]
        self.qkv = nn.ModuleList([linear(width, each) for each in (keys, keys, width)])
        if self.gated:
            self.gate = linear(width, width)
        self.out = linear(width, width)

    def projected(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values [B, T, H, D]."""
        return [project(x).unflatten(-1, (self.heads, -1)) for project in self.qkv]


class Attention(Heads):
    """LLaMA's attention: queries and keys are rotated by an angle that grows with the position in a document."""

    cos: Tensor
    sin: Tensor

    def __init__(self, mix: Mix, case: Case) -> None:
        super().__init__(mix, case.sizes)
        rates = ROTARY_BASE ** -torch.linspace(0, 1, case.sizes["head_dim_qk"] // 2 + 1, dtype=torch.float64)[:-1]
        length = case.sizes["seq_len"]
        lengths = lengths_of(case.documents, length) if case.documents else (length,)
        positions = torch.cat([torch.arange(each, dtype=torch.float64) for each in lengths])
        angles = positions[:, None, None] * rates
        self.register_buffer("cos", angles.cos().to(correctness.DTYPES[case.dtype]))
        self.register_buffer("sin", angles.sin().to(correctness.DTYPES[case.dtype]))

    def rotated(self, x: Tensor) -> Tensor:
        """Rotate the halves of x [B, T, H, K] into each other."""
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        return self.out(self.mix(self.rotated(q), self.rotated(k), v).flatten(2))


class GatedLinearAttention(Heads):
    """TransNormerLLM's attention: queries and keys by SiLU, the normed output gated by a fourth projection."""

    gated = True

    def __init__(self, mix: Mix, sizes: Mapping[str, int]) -> None:
        super().__init__(mix, sizes)
        self.norm = simple_norm(self.out.in_features)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        return self.out(self.norm(self.mix(F.silu(q), F.silu(k), v).flatten(2)) * self.gate(x))


class MLSTM(Heads):
    """xLSTM's layer: out(sigmoid(o) * norm(mLSTM(q, k, v, i, f))), [B, T, width] to [B, T, width].

    Args:
        mix: the operation: a function of q, k, v and the gates in order.
        sizes: num_heads, head_dim_qk and head_dim_v.
        gates: i and f are pre-activations, g is a log decay; none: the operation has no gates of a token.
        input_gate_bias: where i starts; from 0, the gradient's norm has spikes.
    """

    gated = True

    def __init__(
        self,
        mix: Mix,
        sizes: Mapping[str, int],
        gates: Sequence[str] = ("i", "f"),
        *,
        input_gate_bias: float = GATE_BIASES["i"][0],
    ) -> None:
        super().__init__(mix, sizes)
        self.names = tuple(gates)
        # Its eps, 1e-6, gates too: what the input gate keeps well below 1e-3 stays small.
        self.norm = rms_norm(sizes["head_dim_v"])
        if gates:
            biases = GATE_BIASES | {"i": (input_gate_bias, input_gate_bias)}
            self.gates = nn.Linear(self.out.in_features, self.heads * len(gates))
            nn.init.zeros_(self.gates.weight)
            self.gates.bias.data = torch.cat([torch.linspace(*biases[name], self.heads) for name in gates])

    def gates_of(self, x: Tensor) -> list[Tensor]:
        """Return the gates [B, T, H]."""
        if not self.names:
            return []
        capped = soft_cap(self.gates(x).to(compute_dtype(x.dtype)), GATE_CAP).chunk(len(self.names), dim=-1)
        return [F.logsigmoid(each) if name == "g" else each for name, each in zip(self.names, capped, strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(*self.projected(x), *self.gates_of(x))
        return self.out(torch.sigmoid(self.gate(x)) * self.norm(mixed).flatten(2))


class RecurrentBlock(nn.Module):
    """Hawk's: a branch of convolution and RG-LRU, times a GELU branch; its channels are 4/3 of the model's width."""

    def __init__(self, mix: Mix, width: int, c: Tensor) -> None:
        super().__init__()
        self.mix, channels = mix, len(c)
        self.x, self.branch, self.out = linear(width, channels), linear(width, channels), linear(channels, width)
        self.convolution = nn.Conv1d(channels, channels, CONVOLUTION, padding=CONVOLUTION - 1, groups=channels)
        self.r, self.i = linear(channels, channels), linear(channels, channels)
        self.c = nn.Parameter(c.clone())

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(self.x(x).mT)[..., : x.shape[1]].mT.contiguous()
        return self.out(self.mix(y, self.r(y), self.i(y), self.c) * F.gelu(self.branch(x)))


class TokenShift(nn.Module):
    """Projections of learned mixtures of a token and the one before it."""

    def __init__(self, width: int, *outputs: int) -> None:
        super().__init__()
        self.shares = nn.Parameter(torch.rand(len(outputs), width))
        self.projections = nn.ModuleList([linear(width, output) for output in outputs])

    def forward(self, x: Tensor) -> list[Tensor]:
        before = F.pad(x, (0, 0, 1, -1))
        mixtures = (torch.lerp(before, x, share.to(x.dtype)) for share in self.shares)
        return [project(mixture) for project, mixture in zip(self.projections, mixtures, strict=True)]


class TimeMixing(nn.Module):
    """RWKV-4's: WKV of keys and values, gated by a receptance; the decay is kept as the logarithm of its rate."""

    def __init__(self, mix: Mix, w: Tensor, u: Tensor) -> None:
        super().__init__()
        self.mix = mix
        self.shift, self.out = TokenShift(len(w), *[len(w)] * 3), linear(len(w), len(w))
        self.log_rate, self.bonus = nn.Parameter(w.log()), nn.Parameter(u.clone())

    def forward(self, x: Tensor) -> Tensor:
        k, v, r = self.shift(x)
        return self.out(torch.sigmoid(r) * self.mix(k, v, self.log_rate.exp(), self.bonus))


class ChannelMixing(nn.Module):
    """RWKV-4's: keys by squared ReLU, four times as wide, gated by a receptance."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift, self.value = TokenShift(width, 4 * width, width), linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        k, r = self.shift(x)
        return torch.sigmoid(r) * self.value(F.relu(k).square())


class Design(NamedTuple):
    """The width of a model, its norm, and what mixes tokens and channels in its blocks."""

    width: int
    norm: Callable[[int], nn.Module]
    tokens: Callable[[], nn.Module]
    channels: Callable[[], nn.Module]


def design(case: Case, inputs: Mapping[str, Tensor], mix: Mix) -> Design:
    """Return the design of the model whose blocks mix tokens by the case's operation; see :class:`MixerModel`."""
    if case.op == "rglru":
        width = 3 * case.sizes["channels"] // 4
        block = partial(RecurrentBlock, mix, width, inputs["c"])
        return Design(width, rms_norm, block, partial(GatedMLP, width, 3 * width, nn.GELU()))
    if case.op == "wkv4":
        width = case.sizes["channels"]
        mixing = partial(TimeMixing, mix, inputs["w"], inputs["u"])
        return Design(width, LayerNorm, mixing, partial(ChannelMixing, width))
    width = case.sizes["num_heads"] * case.sizes["head_dim_v"]
    if case.op == "attention":
        mlp = partial(GatedMLP, width, 8 * width / 3, nn.SiLU())
        return Design(width, rms_norm, partial(Attention, mix, case), mlp)
    whole = (lambda *given: mix(*given, inputs["slope"])) if "slope" in inputs else mix
    if case.op == "lightning":
        mlp = partial(GatedMLP, width, 7 * width / 3, nn.Identity())
        return Design(width, simple_norm, partial(GatedLinearAttention, whole, case.sizes), mlp)
    gates = [name for name in inputs if name in GATE_BIASES]
    mlp = partial(GatedMLP, width, 8 * width / 3, nn.SiLU())
    return Design(width, rms_norm, partial(MLSTM, whole, case.sizes, gates), mlp)


class Block(nn.Module):
    """A pre-norm residual block: x + tokens(norm(x)), then the same with the mixing of channels."""

    def __init__(self, made: Design) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [nn.Sequential(made.norm(made.width), mixing()) for mixing in (made.tokens, made.channels)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x)
        return x


class MixerModel(nn.Module):
    """Embedding, blocks, norm and head; called with tokens and those that follow, it returns their cross entropy.

    Args:
        case: operation, dtype, sizes and layers.
        inputs: the operation's arguments for one token: initial values of its parameters, and its constants.
        mix: the operation; it is called without autocast.
        model: the vocabulary and the logits' soft cap; its blocks are the case's layers.
    """

    def __init__(self, case: Case, inputs: Mapping[str, Tensor], mix: Mix, model: LanguageModel) -> None:
        super().__init__()
        device = next(iter(inputs.values())).device
        made = design(case, inputs, torch.autocast(device.type, enabled=False)(mix))
        self.dtype, self.recompute = correctness.DTYPES[case.dtype], case.num_heads is not None
        self.logit_cap = model.logit_cap
        table = nn.Embedding(model.vocabulary, made.width)
        self.embedding = nn.Sequential(table, LayerNorm(made.width)) if case.op == "wkv4" else table
        self.blocks = nn.ModuleList([Block(made) for _ in range(case.sizes["layers"])])
        self.head = nn.Sequential(made.norm(made.width), linear(made.width, model.vocabulary))

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        x = self.embedding(tokens).to(self.dtype)
        for block in self.blocks:
            x = recomputed(block, x) if self.recompute else block(x)
        pieces = zip(x.flatten(0, 1).split(LOSS_TOKENS), following.flatten().split(LOSS_TOKENS), strict=True)
        return torch.stack([recomputed(self._loss, *piece) for piece in pieces]).sum() / following.numel()

    def _loss(self, x: Tensor, following: Tensor) -> Tensor:
        logits = self.head(x)
        if self.logit_cap is not None:
            logits = soft_cap(logits, self.logit_cap)
        return F.cross_entropy(logits, following, reduction="sum")


class TrainingStep:
    """A model, AdamW and a batch of random tokens; each call takes a step on that batch and returns the loss before it.

    Arguments as of :class:`MixerModel`, on the device of ``inputs``; the model is the published one of that width.
    """

    def __init__(self, case: Case, inputs: Mapping[str, Tensor], mix: Mix) -> None:
        device, dtype = next(iter(inputs.values())).device, correctness.DTYPES[case.dtype]
        model = get_operation(case.op).model(case.sizes)
        torch.manual_seed(correctness.SEED)
        with device:
            self.model = MixerModel(case, inputs, mix, model)
            self.tokens = torch.randint(model.vocabulary, (case.sizes["batch"], case.sizes["seq_len"] + 1))
        if dtype == torch.float64:
            self.model.double()
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=fused)
        self.autocast = torch.autocast(device.type, dtype, enabled=dtype.itemsize == 2)

    def __call__(self) -> Tensor:
        with self.autocast:
            loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def tensors(self) -> list[Tensor]:
        """Return what is in memory between steps: weights, buffers, the optimizer's state and the tokens."""
        state = [x for each in self.optimizer.state.values() for x in each.values() if isinstance(x, Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *state, self.tokens]
