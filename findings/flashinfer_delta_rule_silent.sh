#!/usr/bin/env bash
# flashinfer-python 0.7.4, torch 2.11.0+cu130, on an H100 or H200: its delta rules return wrong results without a word.
# The decoding steps of Gated DeltaNet take head dims of 128 and more by their docstrings and checks, but read the first
# 128 key channels alone. recurrent_kda is for prefill and decoding; where it has no prefill kernel, as on Hopper,
# packed tokens go to the decoding kernel, which does not take more than one a sequence: the rest of the output is
# not written. And chunk_gated_delta_rule, for training and inference by its docstring, returns an output without a
# gradient: beside a residual connection its inputs are not trained, and nothing says so.
#
# Guessed first: what a check lets through is computed, prefill without a kernel is an error, and so is a gradient.
#
# Seen on an H200, with nvidia-cutlass-dsl 4.8.1: gated_delta_rule_decode is off by 1.7e-03 of the norm at head dims of
# 128 and by 7.4e-01 at 256, gated_delta_rule_decode_pretranspose by 1.6e-03 and 8.9e-01. Of 64 tokens recurrent_kda
# writes the first alone, and its state is off by 1.1. The output of chunk_gated_delta_rule requires no gradient.
#
# Exits with 0 if this is still so, with another status if not. Run with Python 3.12 on x86-64 Linux with CUDA 13.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.11.0 'flashinfer-python[cu13]==0.7.4'

cat >check.py <<'PYTHON'
import torch
from flashinfer import chunk_gated_delta_rule, recurrent_kda
from flashinfer.gdn_decode import gated_delta_rule_decode, gated_delta_rule_decode_pretranspose

torch.manual_seed(0)


def recurrence(q, k, v, decay, rate, state):
    """Return outputs [T, H, V] and the last state in float64 of one sequence; decay [T, H, 1] or [T, H, K]."""
    outputs = []
    for query, key, value, keep, write in zip(*(x.double() for x in (q, k, v, decay, rate)), strict=True):
        state = keep[:, :, None] * state
        new = write[:, None] * (value - torch.einsum("hk,hkv->hv", key, state))
        state = state + key[:, :, None] * new[:, None]
        outputs.append(q.shape[-1] ** -0.5 * torch.einsum("hk,hkv->hv", query, state))
    return torch.stack(outputs), state


def error(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def inputs(T, H, D):
    q, k = (torch.nn.functional.normalize(torch.randn(T, H, D, device="cuda"), dim=-1).bfloat16() for _ in range(2))
    return q, k, torch.randn(T, H, D, device="cuda").bfloat16()


def step(D, function, transposed):
    H = 4
    q, k, v = inputs(1, H, D)
    a, b = (torch.randn(1, H, device="cuda").bfloat16() for _ in range(2))
    state = torch.randn(H, D, D, device="cuda")
    zeros = torch.zeros(H, device="cuda")
    decay = torch.exp(-torch.nn.functional.softplus(a.double()))[..., None]
    wanted, _ = recurrence(q, k, v, decay, b.double().sigmoid(), state.double())
    held = (state.mT if transposed else state).contiguous()[None]
    out, _ = function(q[None], k[None], v[None], held, zeros, a[None], zeros, b[None], use_qk_l2norm=False)
    return error(out[0], wanted)


for function, transposed in ((gated_delta_rule_decode, False), (gated_delta_rule_decode_pretranspose, True)):
    small, large = step(128, function, transposed), step(256, function, transposed)
    print(f"{function.__name__}: error at 128 {small:.1e}, at 256 {large:.1e}")
    assert small < 0.01 < 0.3 < large

T, H, D = 64, 4, 128
q, k, v = inputs(T, H, D)
g, beta = -torch.rand(T, H, D, device="cuda").bfloat16(), torch.rand(T, H, device="cuda").bfloat16()
state, untouched = torch.zeros(1, H, D, D, device="cuda", dtype=torch.bfloat16), 7.0
output = torch.full((1, T, H, D), untouched, device="cuda", dtype=torch.bfloat16)
bounds = torch.tensor([0, T], dtype=torch.int32, device="cuda")
wanted, last = recurrence(q, k, v, g.double().exp(), beta, torch.zeros(H, D, D, dtype=torch.float64, device="cuda"))
out, final = recurrent_kda(
    q[None], k[None], v[None], g[None], beta[None], initial_state=state, output_final_state=True, cu_seqlens=bounds,
    output=output, use_qk_l2norm_in_kernel=False,
)  # fmt: skip
written = [t for t in range(T) if not bool((out[0, t] == untouched).all())]
print(
    f"recurrent_kda of {T} tokens: written are {written[:3]}{'...' if len(written) > 3 else ''}, error of the first "
    f"{error(out[0, 0], wanted[0]):.1e}, of all {error(out[0], wanted):.1e}, of the state {error(final[0].mT, last):.1e}"
)
assert error(out[0], wanted) > 0.5 and error(final[0].mT, last) > 0.3

q, k, v = (x.requires_grad_() for x in inputs(T, H, D))
gates = (torch.rand(T, H, device="cuda").requires_grad_() for _ in range(2))
out = chunk_gated_delta_rule(q, k, v, *gates, cu_seqlens=bounds)
training = "training and inference" in " ".join(chunk_gated_delta_rule.__doc__.split())
print(f"chunk_gated_delta_rule is for training by its docstring: {training}; its output requires grad: {out.requires_grad}")
assert training and not out.requires_grad
PYTHON
FLASHINFER_WORKSPACE_BASE="$folder/cache" "$folder/venv/bin/python" -W ignore check.py
