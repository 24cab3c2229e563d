#!/usr/bin/env bash
# nvidia-cudnn-frontend 1.32.0, torch 2.11.0+cu130, on an H100 or H200: kimi_delta_attention names no bound of the decays
# in its docstring, and has one. On Hopper it divides keys by the product of the decays since a chunk of 16 tokens began:
# where their logarithms sum to less than -87.3 in one channel, that is 0 in float32, and outputs are NaN, without a
# word, with either of its engines there. Just before, at a sum of -86, a quarter of the output's norm is wrong.
#
# Guessed first: strong decays underflow to a state that forgets, and the engine kda_hopper is right where the other is
# not.
#
# Seen on an H200: an error against float64 of 2.5e-01 of the norm at log decays of -5.4 a token, NaN at -5.6, and NaN
# with plan_name="kda_hopper" too.
#
# Exits with 0 if this is still so, with another status if not. Run with Python 3.12 on x86-64 Linux with CUDA 13.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0 nvidia-cudnn-frontend==1.32.0

cat >check.py <<'PYTHON'
import torch
from cudnn.linear_attention import kimi_delta_attention

H, D = 8, 128
torch.manual_seed(0)


def inputs(T, decay):
    q, k = (torch.nn.functional.normalize(torch.randn(T, H, D, device="cuda"), dim=-1).bfloat16() for _ in range(2))
    v, beta = torch.randn(T, H, D, device="cuda").bfloat16(), torch.rand(T, H, device="cuda")
    bounds = torch.tensor([0, T], dtype=torch.int32, device="cuda")
    return q, k, v, torch.full((T, H, D), decay, device="cuda"), beta, bounds


def error(T, decay, **plan):
    """Return the error against the recurrence in float64, relative to its norm."""
    q, k, v, g, beta, bounds = inputs(T, decay)
    o, _ = kimi_delta_attention(q, k, v, g, beta, bounds, output_final_state=True, **plan)
    state, wanted = torch.zeros(H, D, D, dtype=torch.float64, device="cuda"), []
    for query, key, value, log_decay, rate in zip(*(x.double() for x in (q, k, v, g, beta)), strict=True):
        state = log_decay.exp()[:, :, None] * state
        write = rate[:, None] * (value - torch.einsum("hk,hkv->hv", key, state))
        state = state + key[:, :, None] * write[:, None]
        wanted.append(D**-0.5 * torch.einsum("hk,hkv->hv", query, state))
    wanted = torch.stack(wanted)
    return ((o.double() - wanted).norm() / wanted.norm()).item()


with torch.no_grad():
    mild, strong, other = error(64, -5.4), error(64, -5.6), error(64, -5.6, plan_name="kda_hopper")
    print(f"error at log decays of -5.4 a token: {mild:.1e}, of -5.6: {strong:.1e}, by kda_hopper: {other:.1e}")
    assert 0.1 < mild < 0.5 and strong != strong and other != other
PYTHON
XDG_CACHE_HOME="$folder/cache" "$folder/venv/bin/python" -W ignore check.py
