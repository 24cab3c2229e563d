#!/usr/bin/env bash
# fla-core 0.6.0, torch 2.13.0, Triton 3.9.0, on a CPU: chunk_simple_gla copies q, k and v if they are slices of one
# projection, as a layer with fused projections makes them, although its kernels would find every element by strides: a
# decorator around each operation makes all tensors contiguous before the first kernel. With heads of 128/256 in bf16
# that reads and writes 2 KiB for each head and token, which nothing warns of and no argument turns off.
#
# Guessed first: slices whose last dimension is contiguous are taken as they are, as flash-attn takes them.
#
# The output (there is no GPU, so the call ends where the first kernel would be launched):
#
#     slices: copied [(1, 64, 2, 16), (1, 64, 2, 16), (1, 64, 2, 32)]
#     contiguous: copied []
#
# Exits with 0 if this is still so, with another status if not. Run with Python 3.11 on x86-64 Linux.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 einops==0.8.2 packaging==26.4
"$folder/venv/bin/pip" install --quiet --no-deps triton==3.9.0 fla-core==0.6.0

# Importing fla warns that Triton has no GPU here.
TRITON_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import contextlib

import torch
from fla.ops.simple_gla import chunk_simple_gla
from torch.utils._python_dispatch import TorchDispatchMode


class Copies(TorchDispatchMode):
    """Notes the shapes of what is copied."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if operator is torch.ops.aten.clone.default:
            self.shapes.append(tuple(result.shape))
        return result


heads, dim_qk, dim_v = 2, 16, 32
widths = [heads * dim_qk, heads * dim_qk, heads * dim_v]
projected = torch.randn(1, 64, sum(widths))
slices = [x.unflatten(-1, (heads, -1)) for x in projected.split(widths, -1)]
assert all(x.stride(-1) == 1 and not x.is_contiguous() for x in slices)
found = {}
for name, tensors in {"slices": slices, "contiguous": [x.contiguous() for x in slices]}.items():
    with Copies() as copies, contextlib.suppress(RuntimeError):
        chunk_simple_gla(*tensors, g=-torch.rand(1, 64, heads))
    found[name] = copies.shapes
    print(f"{name}: copied {found[name]}")
assert found == {"slices": [tuple(x.shape) for x in slices], "contiguous": []}
PYTHON
