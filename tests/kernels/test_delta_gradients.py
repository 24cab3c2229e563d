"""What whole_state of the delta rule computes chunk by chunk, beside its walks, against float64: the inverses, and the
gradients, which equal those that autograd finds of the chunkwise form."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lrbench.kernels import get_operation, resolve
from lrbench.kernels.delta_rule.chunkwise import _of_columns, _of_heads, chunkwise
from lrbench.kernels.delta_rule.gradients import gradients
from lrbench.kernels.delta_rule.launch import ChannelChunks, channel_gradients, invert
from lrbench.tests.kernels.cases import heads

L = 64


def _chunks(x: Tensor) -> Tensor:
    """Return [B * H, N, L, D] of x [B, T, H, D], with zeros beyond T."""
    padded = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % L))
    return padded.unflatten(1, (-1, L)).permute(0, 3, 1, 2, 4).flatten(0, 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "dtype", "heads_qk", "decay", "head_dim_v", "bound"),
    [
        ("gated_delta_net", torch.float16, 2, 0.1, 32, 1e-3),
        ("gated_delta_net", torch.float16, 1, 20.0, 24, 1e-3),
        ("delta_net", torch.float16, 2, None, 200, 1e-3),
        ("gated_delta_net", torch.bfloat16, 1, 0.1, 136, 8e-3),
        # Weights of the whole chunk, of its halves, and of ever smaller squares.
        ("kda", torch.float16, 2, 0.05, 200, 1e-3),
        ("kda", torch.float16, 1, 0.2, 136, 1e-3),
        ("kda", torch.float16, 2, 20.0, 64, 1e-3),
        ("kda", torch.bfloat16, 1, 0.1, 136, 8e-3),
        ("kda", torch.bfloat16, 2, 3.0, 32, 8e-3),
    ],
)
def test_gradients_are_autograds(
    op: str, dtype: torch.dtype, heads_qk: int, decay: float | None, head_dim_v: int, bound: float
) -> None:
    """Of grouped heads, chunks of which the last is short, decays that forget all, and beta = 0 and 1."""
    draw = torch.Generator().manual_seed(0)
    B, T, H, K, V = 1, 150, 2, 24, head_dim_v

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q, k = (F.normalize(noise(B, T, heads_qk, K), dim=-1) for _ in range(2))
    v, do, dlast = noise(B, T, H, V), noise(B, T, H, V), noise(B, H, K, V)
    q, k, v, do = (x.to(dtype).double() for x in (q, k, v, do))
    beta = noise(B, T, H).sigmoid().float().double()
    beta[:, 3:6], beta[:, 90:95] = 0, 1
    # In base 2 a multiple of 2^-10: sums of them have no rounding errors in float32.
    g = -((decay or 0) * noise(B, T, H, K if op == "kda" else 1).exp() * 1024).round() / 1024 * math.log(2)
    g[:, 70] *= 1e5
    scale = 0.3
    leaves = [x.requires_grad_() for x in (q, k, v, g, beta)]
    state, states, outputs = noise(B, H, K, V).requires_grad_(), [], []
    wide = [x.repeat_interleave(H // heads_qk, 2) for x in (q, k)]
    for q_n, k_n, v_n, g_n, beta_n in zip(*(x.split(L, 1) for x in (*wide, v, g, beta)), strict=True):
        states.append(state)
        o, state = chunkwise(q_n, k_n, v_n, g_n, beta_n, state, chunk_size=L, scale=scale)
        outputs.append(o)
    tensors = [*leaves, *states[1:]]
    loss = (torch.cat(outputs, 1) * do).sum() + (state * dlast).sum()
    *expected, dstate_1, dstate_2 = torch.autograd.grad(loss, tensors)

    with torch.no_grad():
        S, dS = (torch.stack(x, 2).flatten(0, 1) for x in (states, (dstate_1, dstate_2, dlast)))
        query, key, do_n, b, rate = (_chunks(x) for x in (*wide, do, g, beta[..., None]))
        b = b.clamp(min=-150 * math.log(2)).cumsum(2)
        decayed = partial(_of_columns if op == "kda" else _of_heads, b=b, product=torch.matmul)
        T_n = torch.linalg.inv(torch.eye(L) + rate * decayed(key, key).tril(-1))
        du = scale * decayed(query, key).mT @ do_n + ((b[:, :, -1:] - b).exp() * key) @ dS
        dy = (T_n.mT @ du).unflatten(0, (B, H)).permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :T]
        S, dS = (F.pad(x.mT, (0, 0, 0, -V % 64)) for x in (S, dS))
        q_, k_, v_, inverse, S, do, dy, dS = (x.to(dtype).contiguous().cuda() for x in (q, k, v, T_n, S, do, dy, dS))
        g_, beta_, b_ = (x.float().contiguous().cuda() for x in (g, beta, b[..., 0] / math.log(2)))
        if op == "kda":
            # Of what the kernels read; the rest is NaN.
            decayed, squares = (inverse.new_full((B * H * 3, n, L, 64), torch.nan) for n in (3, 2))
            decayed[:, 1] = F.pad(b.exp() * key, (0, 64 - K)).flatten(0, 1)
            squares[:, 0] = inverse.flatten(0, 1)
            chunks = ChannelChunks(decayed, squares, beta_)
            got = channel_gradients(q_, k_, v_, g_, beta_, chunks, S, do, dy, dS, scale)
        else:
            g_ = None if decay is None else g_[..., 0]
            got = gradients(q_, k_, v_, g_, beta_, b_, inverse, S, do, dy, dS, scale)
    for name, x, y in zip(("q", "k", "v", "g", "beta"), got, expected, strict=True):
        if x is not None:
            # dg is what is left of q.dq - k.dk, so its error is a share of them.
            size = max(y.norm(), (k * expected[1]).sum(-1).norm()) if name == "g" else y.norm()
            error = (x.cpu().reshape(y.shape) - y).norm() / size
            assert error <= bound, (name, error)
    if decay is not None:
        assert not got[3][:, 70].any()


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["gated_delta_net", "kda"])
def test_gradients_are_the_same_each_time(op: str) -> None:
    """Of enough chunks to find programs that overtake their copies."""
    sizes = heads(4, 4096, 16, 128, 128)
    inputs = get_operation(op).make_inputs(sizes, dtype=torch.bfloat16)
    leaves = [x.cuda().requires_grad_() for x in inputs.values()]
    do = torch.randn_like(leaves[2])
    call = resolve(get_operation(op).call)
    first, *others = (torch.autograd.grad(call(*leaves, impl="whole_state"), leaves, do) for _ in range(3))
    for other in others:
        for name, x, y in zip(inputs, first, other, strict=True):
            assert torch.equal(x, y), name


@pytest.mark.interpret
@pytest.mark.parametrize("spread", [1.0, 0.1, 0.0])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.float16, 2e-3)])
def test_inverses_of_chunks(dtype: torch.dtype, bound: float, spread: float) -> None:
    """Of keys that differ, that are nearly and that are exactly alike; the last chunk is short, a head has two of v."""
    draw = torch.Generator().manual_seed(0)
    B, T, H, K = 2, 70, 2, 40
    common, apart = (torch.randn(B, length, 1, K, generator=draw) for length in (1, T))
    k = F.normalize(common + spread * apart if spread < 1 else apart, dim=-1).to(dtype)
    beta, g = torch.rand(B, T, H, generator=draw), -0.01 * torch.rand(B, T, H, generator=draw)
    g[:, 5] = -torch.inf
    chunks = invert(k, g, beta, 1.0)
    key, log, rate = (_chunks(x.double()) for x in (k.expand(-1, -1, H, -1), g[..., None], beta[..., None]))
    b = (log / torch.tensor(2.0).double().log()).clamp(min=-150).cumsum(2)
    a = (rate * (b - b.mT).tril().exp2() * (key @ key.mT)).tril(-1)
    torch.testing.assert_close(chunks.b.double(), b[..., 0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(chunks.inverse.double(), torch.linalg.inv(torch.eye(L) + a), rtol=0, atol=bound)
