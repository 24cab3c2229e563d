#!/usr/bin/env bash
# mlstm_kernels 2.0.6, torch 2.13.0, on a CPU, float64: kernels of the same name but for their end give the same outputs,
# bit for bit, and other gradients. native_autograd, the default of mLSTMBackendConfig, differentiates through the
# denominator of the output; native_custbw, as the kernels in Triton, takes it as a constant. Only the gradient of v
# agrees. Which kernel trains a model is thus no matter of speed alone; the package's README does not say so.
#
# Guessed first: kernels of one registry agree in gradients as in outputs.
#
# The output, ||difference|| / ||gradient||:
#
#     outputs 0e+00 apart, gradients {'q': '0.73', 'k': '0.74', 'v': '4e-15', 'i': '0.98', 'f': '0.64'}
#
# Exits with 0 if this is still so, with another status if not. Run with Python 3.11.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 mlstm_kernels==2.0.6

"$folder/venv/bin/python" - <<'PYTHON'
import torch
from mlstm_kernels.torch import get_mlstm_kernel
from mlstm_kernels.torch.backend_module import mLSTMBackendConfig

assert mLSTMBackendConfig().chunkwise_kernel == "chunkwise--native_autograd"
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 64, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
i, f = (torch.randn(1, 2, 64, dtype=torch.float64, requires_grad=True) for _ in range(2))
weight = torch.randn(1, 2, 64, 16, dtype=torch.float64)
results = []
for name in ("native_autograd", "native_custbw"):
    h = get_mlstm_kernel(f"chunkwise--{name}")(q, k, v, i, f, chunk_size=16)
    results.append((h.detach(), torch.autograd.grad((h * weight).sum(), (q, k, v, i, f))))
(h, through), (same, constant) = results
apart = {n: ((a - b).norm() / a.norm()).item() for n, a, b in zip("qkvif", through, constant, strict=True)}
distance = (h - same).abs().max().item()
print(f"outputs {distance:.0e} apart, gradients", {name: f"{x:.2g}" for name, x in apart.items()})
assert distance < 1e-12 and apart["v"] < 1e-12
assert min(apart[name] for name in "qkif") > 0.1
PYTHON
