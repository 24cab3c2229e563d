"""How programs of a single pass hand a float32 state from tile to tile.

The state travels in a 64-bit word a channel, beside the number of the tile that waits for it: value and flag arrive in
one access, so no fence is needed. One row of a tile's threads waits for its channels' words, takes each on through the
tile and publishes it at once, thread by thread: nothing but the way to the L2 cache and back lies between two tiles.
Two words a channel take turns. Whoever overwrites one has read the other from a program that had read this one.

Source: Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back" (2016), for words that hold
their own flag.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def exchange_code(pack: int) -> tuple[str, str]:
    """Return the PTX that passes states on for ``pack`` channels of a thread at once, and its operand constraints.

    Operands, ``pack`` of each: the state (out; 0 where the channel is not this thread's to pass on), the addresses of
    the word to read and of the word to write, the number of the tile (0 waits for nobody, -1 takes no part), the first
    state, and the map a, b from a state before the tile to the one behind it.
    """
    each = range(pack)
    state, before, after, tile, first, a, b = ([f"${group * pack + n}" for n in each] for group in range(7))
    lines = [".reg .pred more, other;"]
    for n in each:
        lines += [
            f".reg .pred part{n}, wait{n}; .reg .b64 word{n}; .reg .b32 low{n}, high{n}; .reg .f32 next{n};",
            f"setp.ge.s32 part{n}, {tile[n]}, 0;",
            f"setp.gt.s32 wait{n}, {tile[n]}, 0;",
            f"selp.f32 {state[n]}, {first[n]}, 0f00000000, part{n};",
        ]
    lines += ["again:"]
    lines += [f"@wait{n} ld.relaxed.gpu.global.b64 word{n}, [{before[n]}];" for n in each]
    lines += ["setp.ne.s32 more, 0, 0;"]
    for n in each:
        lines += [
            f"@wait{n} mov.b64 {{low{n}, high{n}}}, word{n};",
            f"setp.ne.and.s32 other, high{n}, {tile[n]}, wait{n};",
            "or.pred more, more, other;",
        ]
    lines += ["@more bra again;"]
    for n in each:
        lines += [
            f"@wait{n} mov.b32 {state[n]}, low{n};",
            f"fma.rn.f32 next{n}, {a[n]}, {state[n]}, {b[n]};",
            f"mov.b32 low{n}, next{n};",
            f"add.s32 high{n}, {tile[n]}, 1;",
            f"mov.b64 word{n}, {{low{n}, high{n}}};",
            f"@part{n} st.relaxed.gpu.global.b64 [{after[n]}], word{n};",
        ]
    constraints = ["=&f"] * pack + ["l"] * (2 * pack) + ["r"] * pack + ["f"] * (3 * pack)
    return "{\n" + "\n".join(lines) + "\n}", ",".join(constraints)


_kept: dict[tuple[int, int], Tensor] = {}


def zero_words(x: Tensor, count: int) -> Tensor:
    """Return ``count`` 64-bit words on x's device that are zero and that the kernel given them leaves zero.

    Calls on one stream run one after the other and share them; a graph that is being captured gets its own.
    """
    if x.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, device=x.device, dtype=torch.int64)
    key = (x.device.index, torch.cuda.current_stream(x.device).cuda_stream)
    words = _kept.get(key)
    if words is None or words.numel() < count:
        words = _kept[key] = torch.zeros(count, device=x.device, dtype=torch.int64)
    return words[:count]
