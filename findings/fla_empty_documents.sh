#!/usr/bin/env bash
# fla-core 0.6.0, torch 2.13.0, Triton 3.9.0, on a CPU: two helpers of fla.ops.utils number packed documents differently
# if one is empty. With cu_seqlens = [0, 3, 3, 8], prepare_chunk_indices calls the last document 2, which is its place
# in cu_seqlens; prepare_sequence_ids, and so prepare_token_indices, calls it 1, which is the empty one: looked up as
# the kernels of fla.ops.nsa do, the document begins at 3 and ends at 3. Also, the helpers remember results by the
# identity of cu_seqlens, so after a change in place they return those of the old values, without a word; prepare_lens
# and prepare_chunk_offsets do so too. Of a copy the result is right.
#
# Guessed first: a document's number is its place in cu_seqlens, in each helper, and a change in place is seen.
#
# The output:
#
#     [0, 3, 8]: documents of the tokens [0, 0, 0, 1, 1, 1, 1, 1], of the chunks [0, 0, 1, 1, 1]
#     [0, 3, 3, 8]: documents of the tokens [0, 0, 0, 1, 1, 1, 1, 1], of the chunks [0, 0, 2, 2, 2]
#     the last token's document, looked up: from 3 to 3
#     changed to [0, 6, 8]: lengths [3, 5], of a copy [6, 2]
#     documents of the tokens [0, 0, 0, 1, 1, 1, 1, 1], of a copy [0, 0, 0, 0, 0, 0, 1, 1]
#
# Exits with 0 if this is still so, with another status if not. Run with Python 3.11 on x86-64 Linux.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 einops==0.8.2 packaging==26.4
"$folder/venv/bin/pip" install --quiet --no-deps triton==3.9.0 fla-core==0.6.0

# Importing fla warns that Triton has no GPU here; these helpers need none.
TRITON_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from fla.ops.utils import (
    prepare_chunk_indices,
    prepare_chunk_offsets,
    prepare_lens,
    prepare_sequence_ids,
    prepare_token_indices,
)

CHUNK_SIZE = 2


def numbers(cu_seqlens):
    """Return the number of each token's document, and that of each chunk's."""
    ids = prepare_sequence_ids(cu_seqlens)
    assert torch.equal(ids, prepare_token_indices(cu_seqlens)[:, 0])
    return ids.tolist(), prepare_chunk_indices(cu_seqlens, CHUNK_SIZE)[:, 0].tolist()


full, empty = torch.tensor([0, 3, 8]), torch.tensor([0, 3, 3, 8])
for cu_seqlens in (full, empty):
    ids, chunks = numbers(cu_seqlens)
    print(f"{cu_seqlens.tolist()}: documents of the tokens {ids}, of the chunks {chunks}")
    last = 2 if cu_seqlens is empty else 1
    assert ids == [0] * 3 + [1] * 5 and chunks == [0] * 2 + [last] * 3
bounds = empty[ids[-1]].item(), empty[ids[-1] + 1].item()
print(f"the last token's document, looked up: from {bounds[0]} to {bounds[1]}")
assert bounds == (3, 3)

helpers = (prepare_lens, prepare_sequence_ids, lambda x: prepare_chunk_indices(x, CHUNK_SIZE),
           lambda x: prepare_chunk_offsets(x, CHUNK_SIZE))  # fmt: skip
cu_seqlens = torch.tensor([0, 3, 8])
before = [helper(cu_seqlens).clone() for helper in helpers]
cu_seqlens[1] = 6
stale = [helper(cu_seqlens) for helper in helpers]
fresh = [helper(cu_seqlens.clone()) for helper in helpers]
print(f"changed to {cu_seqlens.tolist()}: lengths {stale[0].tolist()}, of a copy {fresh[0].tolist()}")
print(f"documents of the tokens {stale[1].tolist()}, of a copy {fresh[1].tolist()}")
for old, found, right in zip(before, stale, fresh, strict=True):
    assert torch.equal(found, old) and not torch.equal(found, right)
PYTHON
