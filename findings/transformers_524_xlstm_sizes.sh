#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0, on a CPU, without the package xlstm: an xLSTM whose hidden_size * qk_dim_factor is
# no multiple of 64 trains, and fails with a RuntimeError about sizes as soon as it has a cache, as in generate(). The
# cache takes its sizes from the configuration, which rounds up to 64, the layer does not round. Nothing checks them.
#
# Guessed first: what can be trained can generate.
#
# The output:
#
#     hidden_size 128, use_cache=False: qk_dim of the configuration 64, of the layer 64: runs
#     hidden_size 128, use_cache=True: qk_dim of the configuration 64, of the layer 64: runs
#     hidden_size 64, use_cache=False: qk_dim of the configuration 64, of the layer 32: runs
#     hidden_size 64, use_cache=True: qk_dim of the configuration 64, of the layer 32: The expanded size of the tensor (16) ...
#     hidden_size 192, use_cache=False: qk_dim of the configuration 128, of the layer 96: runs
#     hidden_size 192, use_cache=True: qk_dim of the configuration 128, of the layer 96: The expanded size of the tensor (48) ...
#
# Exits with 0 if this is still so, with another status if not. Run with Python 3.11.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 transformers==5.24.0

HF_HUB_OFFLINE=1 HF_HOME="$folder/cache" "$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import xLSTMConfig, xLSTMForCausalLM

assert transformers.__version__ == "5.24.0", transformers.__version__
transformers.logging.set_verbosity_error()
torch.set_grad_enabled(False)
outcomes = []
for hidden_size in (128, 64, 192):
    for use_cache in (False, True):
        config = xLSTMConfig(vocab_size=64, num_hidden_layers=1, hidden_size=hidden_size, num_heads=2, chunk_size=16)
        model = xLSTMForCausalLM(config).eval()
        said = "runs"
        try:
            model(torch.arange(40)[None], use_cache=use_cache)
        except RuntimeError as error:
            said = f"{str(error)[:36]} ..."
        inside = model.backbone.blocks[0].mlstm_layer.q.out_features
        print(f"hidden_size {hidden_size}, use_cache={use_cache}: qk_dim of the configuration {config.qk_dim}, "
              f"of the layer {inside}: {said}")  # fmt: skip
        outcomes.append(said == "runs")
assert outcomes == [True, True, True, False, True, False], outcomes
PYTHON
