#!/usr/bin/env bash
# lightning-attn 0.0.5 and mlstm-kernels 2.0.6, torch 2.11.0, on one NVIDIA H200: with Triton 3.8.0 the forward pass of
# lightning_attn_func takes two thirds of what it takes with 3.7.1, that of mlstm_chunkwise__xl_chunk about 13 % less.
#
# Guessed first: kernels that nobody has changed for two years take as long with either.
#
# The output, the median of each, the lower of two turns (bfloat16, 65,536 tokens: batch 8, T = 8192):
#
#     lightning_attn_func, 32 heads of 128: 3.7.1 5.01 ms, 3.8.0 3.36 ms
#     mlstm_chunkwise__xl_chunk, 16 heads of 128/256: 3.7.1 3.43 ms, 3.8.0 2.99 ms
#
# So a comparison with a peer names the Triton of both sides. Exits with 0 if this is still so, with another status if
# not. Needs an H100 or H200 with 30 GB free, and Python 3.10 to 3.13; a torch that is there is used.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
install() { python3 -m pip install --quiet --no-deps --target "$folder/$1" "${@:2}"; }
python3 -c 'import torch' 2>/dev/null || python3 -m pip install --quiet --target "$folder/torch" torch==2.11.0
install peers lightning-attn==0.0.5 mlstm-kernels==2.0.6 einops==0.8.2
for version in 3.7.1 3.8.0; do
    install "$version" "triton==$version"
done

cat >"$folder/peers.py" <<'PYTHON'
import sys
from functools import partial

import torch
import triton
from lightning_attn.ops import lightning_attn_func
from mlstm_kernels.torch.chunkwise.triton_xl_chunk import mlstm_chunkwise__xl_chunk

if turns := [turn.split(",") for turn in sys.argv[1:]]:
    for name, heads, least in (
        ("lightning_attn_func", "32 heads of 128", 1.3),
        ("mlstm_chunkwise__xl_chunk", "16 heads of 128/256", 1.08),
    ):
        old, new = (min(float(ms) for *case, ms in turns if case == [name, x]) for x in ("3.7.1", "3.8.0"))
        print(f"{name}, {heads}: 3.7.1 {old:.2f} ms, 3.8.0 {new:.2f} ms")
        assert old / new > least
    sys.exit()


def tensor(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


slopes = torch.exp2(-torch.arange(1, 33, device="cuda") / 4).reshape(32, 1, 1)
lightning = [tensor(8, 32, 8192, 128) for _ in "qkv"]
mlstm = [tensor(8, 16, 8192, d) for d in (128, 128, 256)] + [tensor(8, 16, 8192) for _ in "if"]
for name, call in {
    "lightning_attn_func": partial(lightning_attn_func, *lightning, slopes),
    "mlstm_chunkwise__xl_chunk": partial(
        mlstm_chunkwise__xl_chunk, *mlstm, eps=0.0, autocast_kernel_dtype=torch.bfloat16
    ),
}.items():
    with torch.no_grad():
        ms = triton.testing.do_bench(call, warmup=200, rep=500, return_mode="median")
    print(f"{name},{triton.__version__},{ms}")
PYTHON

turns=()
for _ in 1 2; do
    for version in 3.7.1 3.8.0; do
        export PYTHONPATH="$folder/$version:$folder/peers:$folder/torch" TRITON_CACHE_DIR="$folder/cache"
        mapfile -t -O "${#turns[@]}" turns < <(python3 -W ignore "$folder/peers.py")
    done
done
python3 "$folder/peers.py" "${turns[@]}"
