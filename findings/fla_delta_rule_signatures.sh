#!/usr/bin/env bash
# fla-core 0.6.0, torch 2.13.0, Triton 3.9.0, on a CPU (Triton's interpreter): functions of one operation take their
# arguments in different orders, and ignore keywords that they do not have. The fifth argument of chunk_gated_delta_rule
# and fused_recurrent_kda is beta, that of fused_recurrent_gated_delta_rule is gk, decays of key channels: the call
# (q, k, v, g, beta), which its docstring shows under a name that does not exist, decays by exp(beta), writes with rates
# of 1 and, as gk would have K times as many elements, reads beyond the tensor (here K is 1, so that it does not).
# A misspelt keyword, such as use_qk_l2norm for use_qk_l2norm_in_kernel, is no error; q and k stay as they are.
# And the example in chunk_kda's docstring does not run: its K of 512 and its state in bfloat16 are refused.
#
# Guessed first: the recurrent function takes what the chunked one takes, a misspelt keyword is a TypeError, and the
# examples run.
#
# The output:
#
#     positional (q, k, v, g, beta) is that of gk=beta, beta=1: True, that of beta=beta: False
#     use_qk_l2norm=True changes nothing: True, use_qk_l2norm_in_kernel=True does: True
#     ignore any keyword: chunk_delta_rule, chunk_gated_delta_rule, chunk_kda, fused_recurrent_gated_delta_rule, fused_recurrent_kda
#     chunk_kda's example: initial_state must be in float32. | Currently we only support key headdim <=256 for KDA, got 512.
#
# Exits with 0 if this is still so, with another status if not. Run with Python 3.11 on x86-64 Linux.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 einops==0.8.2 packaging==26.4
"$folder/venv/bin/pip" install --quiet --no-deps triton==3.9.0 fla-core==0.6.0

cat >check.py <<'PYTHON'
import inspect

import torch

import fla.ops.gated_delta_rule
from fla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.kda import chunk_kda, fused_recurrent_kda


def fifth(function):
    """Return the name of a function's fifth parameter."""
    return list(inspect.signature(function).parameters)[4]


assert fifth(chunk_gated_delta_rule) == fifth(fused_recurrent_kda) == "beta"
assert fifth(fused_recurrent_gated_delta_rule) == "gk"
example = "fused_gated_recurrent_delta_rule(\n            q, k, v, g, beta,"
assert example in fused_recurrent_gated_delta_rule.__doc__
assert not hasattr(fla.ops.gated_delta_rule, "fused_gated_recurrent_delta_rule")

torch.manual_seed(0)
B, T, H, K, V = 1, 9, 2, 1, 4
q, k, v = (torch.randn(B, T, H, columns) for columns in (K, K, V))
g, beta = -torch.rand(B, T, H), torch.rand(B, T, H)
step = fused_recurrent_gated_delta_rule
given = step(q, k, v, g, beta)[0]
taken = torch.equal(given, step(q, k, v, g=g, gk=beta[..., None].contiguous(), beta=torch.ones_like(beta))[0])
meant = torch.allclose(given, step(q, k, v, g=g, beta=beta)[0])
print(f"positional (q, k, v, g, beta) is that of gk=beta, beta=1: {taken}, that of beta=beta: {meant}")
assert taken and not meant

q, k = torch.randn(B, T, H, 16), torch.randn(B, T, H, 16)
plain = step(q, k, v, g=g, beta=beta)[0]
ignored = torch.equal(plain, step(q, k, v, g=g, beta=beta, use_qk_l2norm=True)[0])
heeded = not torch.allclose(plain, step(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0])
print(f"use_qk_l2norm=True changes nothing: {ignored}, use_qk_l2norm_in_kernel=True does: {heeded}")
assert ignored and heeded

functions = (
    chunk_delta_rule, chunk_gated_delta_rule, chunk_kda, fused_recurrent_delta_rule, fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
)  # fmt: skip
anything = [
    each.__name__
    for each in functions
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(each).parameters.values())
]
print("ignore any keyword:", ", ".join(anything))
assert anything == [each.__name__ for each in functions if each is not fused_recurrent_delta_rule]

assert "K, V = 4, 2048, 4, 512, 512" in chunk_kda.__doc__
assert "h0 = torch.randn(B, H, K, V, dtype=torch.bfloat16" in chunk_kda.__doc__
refusals = []
for dtype in (torch.bfloat16, torch.float32):
    q, k, v, g = (torch.randn(1, 64, 1, 512, dtype=torch.bfloat16) for _ in range(4))
    beta, state = torch.rand(1, 64, 1, dtype=torch.bfloat16), torch.randn(1, 1, 512, 512, dtype=dtype)
    try:
        chunk_kda(q, k, v, g, beta, initial_state=state)
    except AssertionError as error:
        refusals.append(str(error))
print("chunk_kda's example:", " | ".join(refusals))
assert len(refusals) == 2 and "float32" in refusals[0] and "<=256" in refusals[1]
PYTHON
# Importing fla warns that Triton has no GPU here; the interpreter needs none.
TRITON_INTERPRET=1 TRITON_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" -W ignore check.py
