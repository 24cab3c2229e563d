#!/usr/bin/env bash
# fla-core 0.6.0, torch 2.13.0, Triton 3.9.0, on a CPU: fla.backends.register takes some public functions and refuses
# others of the same family with a bare KeyError, among them those that layers train with: of simple GLA all but
# chunk_simple_gla, of chunked operations chunk_kda but not chunk_gla, chunk_retention and chunk_gated_delta_rule (whose
# parts have a registry). And with FLA_DISABLE_BACKEND_DISPATCH=1 it takes everything and does nothing, silently.
#
# Guessed first: every public function of fla.ops can have another backend, or says that it cannot.
#
# The output:
#
#     taken: fused_chunk_simple_gla, fused_recurrent_simple_gla, parallel_simple_gla, chunk_kda
#     KeyError: chunk_simple_gla, chunk_gla, chunk_retention, chunk_gated_delta_rule
#     with FLA_DISABLE_BACKEND_DISPATCH=1 register takes chunk_gla, and chunk_kda does not call what was registered
#
# Exits with 0 if this is still so, with another status if not. Run with Python 3.11 on x86-64 Linux.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 einops==0.8.2 packaging==26.4
"$folder/venv/bin/pip" install --quiet --no-deps triton==3.9.0 fla-core==0.6.0

# Importing fla warns that Triton has no GPU here; registering needs none.
for disabled in 0 1; do
FLA_DISABLE_BACKEND_DISPATCH=$disabled TRITON_CACHE_DIR="$folder/cache" \
    "$folder/venv/bin/python" -W ignore - "$disabled" <<'PYTHON'
import sys

from fla.backends import register
from fla.ops import simple_gla
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gla import chunk_gla
from fla.ops.kda import chunk_kda
from fla.ops.retention import chunk_retention

taken, refused = [], []
others = (chunk_gla, chunk_retention, chunk_gated_delta_rule, chunk_kda)
for function in (*(getattr(simple_gla, name) for name in simple_gla.__all__), *others):
    try:
        register(function)(lambda *args, **kwargs: "of the other backend")
        taken.append(function)
    except KeyError:
        refused.append(function)
if sys.argv[1] == "0":
    print("taken:", ", ".join(each.__name__ for each in taken))
    print("KeyError:", ", ".join(each.__name__ for each in refused))
    assert all(each() == "of the other backend" for each in taken)
    assert {simple_gla.chunk_simple_gla, chunk_gla, chunk_retention, chunk_gated_delta_rule} == set(refused)
else:
    assert not refused
    try:
        chunk_kda()
    except TypeError:  # the original misses its arguments
        print("with FLA_DISABLE_BACKEND_DISPATCH=1 register takes chunk_gla, and chunk_kda does not call what was "
              "registered")  # fmt: skip
    else:
        raise AssertionError("chunk_kda called the registered function")
PYTHON
done
