#!/usr/bin/env bash
# fla-core and flash-linear-attention 0.6.0 with mamba-ssm 2.3.2.post1, torch 2.13.0, without causal_conv1d: fla's
# Mamba2 warns that it falls back to its convolution in Triton, and in training it calls mamba_ssm's
# mamba_split_conv1d_scan_combined all the same, which calls causal_conv1d: TypeError, 'NoneType' object is not
# callable. Only inference takes the fallback. Shown on a CPU by the method that forward takes on a GPU; the call fails
# before any kernel.
#
# Guessed first: a layer that says it falls back trains.
#
# The output:
#
#     the layer's backend: triton
#     training: TypeError, 'NoneType' object is not callable, in mamba_ssm/ops/triton/ssd_combined.py
#
# Exits with 0 if this is still so, with another status if not. Run with Python 3.11 on x86-64 Linux.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 einops==0.8.2 packaging==26.4 transformers==5.24.0
"$folder/venv/bin/pip" install --quiet --no-deps triton==3.9.0 fla-core==0.6.0 flash-linear-attention==0.6.0
"$folder/venv/bin/pip" install --quiet setuptools==80.9.0 wheel==0.45.1
# Without its extension in CUDA, which mamba_ssm/__init__.py imports, and which Mamba-2 does not use.
MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE "$folder/venv/bin/pip" install --quiet --no-deps --no-build-isolation \
    mamba-ssm==2.3.2.post1
: > "$(echo "$folder"/venv/lib/python3*/site-packages/mamba_ssm)/__init__.py"

HF_HUB_OFFLINE=1 TRITON_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import traceback

import torch
from fla.layers import mamba2

assert mamba2.is_fast_path_available and mamba2.causal_conv1d_fn is None
layer = mamba2.Mamba2(hidden_size=64, head_dim=32, state_size=16, layer_idx=0)
print("the layer's backend:", layer.backend)
assert layer.backend == "triton"
try:
    layer.train().cuda_kernels_forward(torch.randn(1, 8, 64))
except TypeError as error:
    file = traceback.extract_tb(error.__traceback__)[-1].filename.rpartition("mamba_ssm/")[2]
    print(f"training: {type(error).__name__}, {error}, in mamba_ssm/{file}")
    assert "NoneType" in str(error) and file == "ops/triton/ssd_combined.py"
else:
    raise AssertionError("it trains")
PYTHON
