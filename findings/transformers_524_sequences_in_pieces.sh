#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0, on a CPU, without the optional kernels, float32, small random models: in three
# recurrent models the logits of a sequence depend on how it is cut, without a warning that says so.
#
# - Mamba-2 heeds time_step_limit where it takes many tokens, not where it takes one, so decoding computes another model
#   than training did. Without a limit the two agree.
# - Mamba ignores the recurrent state of a cache if more than one token follows, and begins with zeros; it does go on
#   with the state of the convolution. (A comment says that its kernels cannot do otherwise; Mamba-2 goes on with both.)
#   Here the state in the cache is replaced by 1000: two tokens give the same logits, bit for bit, one token does not.
# - xLSTM cuts sequences longer than max_inference_chunksize itself. With use_cache=False it then keeps the state
#   between the parts in bfloat16, the default of xLSTMCache; with use_cache=True, or a cache of float32, in float32.
#
# Guessed first: any two ways to cut a sequence agree to 1e-5.
#
# The output, the largest difference between logits whose standard deviation is about 0.6:
#
#     Mamba-2, time_step_limit (0.0, inf): two pieces 4.8e-07, token by token 1.2e-06
#     Mamba-2, time_step_limit (1.0, inf): two pieces 3.9e-07, token by token 3.6e-01
#     Mamba: two pieces 3.4e-03, token by token 9.5e-07
#     Mamba, a state of 1000: one token 1.9e+00, two tokens 0.0e+00
#     xLSTM, in parts of 32: use_cache=True 0.0e+00, False 5.6e-03, and a float32 cache 0e+00
#
# Exits with 0 if this is still so, with another status if not. Run with Python 3.11.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 transformers==5.24.0

HF_HUB_OFFLINE=1 HF_HOME="$folder/cache" "$folder/venv/bin/python" - <<'PYTHON'
import math

import torch
import transformers
from transformers import (
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    xLSTMConfig,
    xLSTMForCausalLM,
)
from transformers.models.xlstm.modeling_xlstm import xLSTMCache

assert transformers.__version__ == "5.24.0", transformers.__version__
transformers.logging.set_verbosity_error()
torch.set_grad_enabled(False)
IDS = torch.randint(0, 64, (1, 64), generator=torch.Generator().manual_seed(1))
SIZES = {"vocab_size": 64, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}


def random_model(kind, config):
    torch.manual_seed(0)
    return kind(config).float().eval()


def in_pieces(model, *lengths):
    """Return the logits of the sequence, given in pieces of these lengths with a cache."""
    cache, logits = None, []
    for piece in IDS.split(lengths, dim=1):
        output = model(piece, cache=cache, use_cache=True)
        cache = output.cache
        logits.append(output.logits)
    return torch.cat(logits, 1)


def distance(a, b):
    return (a - b).abs().max().item()


mamba2 = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16}
for limit in ((0.0, math.inf), (1.0, math.inf)):
    model = random_model(Mamba2ForCausalLM, Mamba2Config(**SIZES, **mamba2, time_step_limit=limit))
    whole = model(IDS).logits
    halves, decoded = distance(in_pieces(model, 32, 32), whole), distance(in_pieces(model, 32, *[1] * 32), whole)
    print(f"Mamba-2, time_step_limit {limit}: two pieces {halves:.1e}, token by token {decoded:.1e}")
    assert halves < 1e-5 and (decoded < 1e-5) == (limit[0] == 0)
assert decoded > 0.05

model = random_model(MambaForCausalLM, MambaConfig(**SIZES, hidden_size=32, state_size=16))
whole = model(IDS).logits
halves, decoded = distance(in_pieces(model, 32, 32), whole), distance(in_pieces(model, 32, *[1] * 32), whole)
print(f"Mamba: two pieces {halves:.1e}, token by token {decoded:.1e}")
assert halves > 5e-4 and decoded < 1e-5


def after_state(value, count):
    """Return the logits of the next tokens after 32, with this value in the cached recurrent state if it is one."""
    cache = model(IDS[:, :32], use_cache=True).cache
    if value is not None:
        for layer in range(SIZES["num_hidden_layers"]):
            cache.get_recurrent_state(layer, state_idx=0).fill_(value)
    return model(IDS[:, 32 : 32 + count], cache=cache, use_cache=True).logits


one, two = (distance(after_state(1000.0, count), after_state(None, count)) for count in (1, 2))
print(f"Mamba, a state of 1000: one token {one:.1e}, two tokens {two:.1e}")
assert one > 0.05 and two == 0

logits = {}
for length in (32, 64):
    config = xLSTMConfig(**SIZES, hidden_size=128, num_heads=2, chunk_size=16, max_inference_chunksize=length)
    model = random_model(xLSTMForCausalLM, config)
    for use_cache in (True, False):
        logits[length, use_cache] = model(IDS, use_cache=use_cache).logits
    if length == 32:
        given = model(IDS, use_cache=False, cache=xLSTMCache(config, 1, dtype=torch.float32)).logits
cached, uncached = (distance(logits[32, use_cache], logits[64, use_cache]) for use_cache in (True, False))
given = distance(given, logits[64, False])
print(f"xLSTM, in parts of 32: use_cache=True {cached:.1e}, False {uncached:.1e}, and a float32 cache {given:.0e}")
assert max(cached, given) < 1e-5 and uncached > 5e-4
assert xLSTMCache(config, 1).rnn_state[0][0].dtype == torch.bfloat16
PYTHON
