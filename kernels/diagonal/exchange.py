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
import triton
import triton.language as tl
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


@triton.jit
def pass_state(
    word_ptr, B, C, batch, tile, tiles, first, after_a, after_b, offs_c, mask_c,
    CODE: tl.constexpr, CONSTRAINTS: tl.constexpr, PACK: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Wait for the state before a tile, publish the one behind it, and return the former [1, BLOCK_C].

    The tile's last row, whose map after_a, after_b leads behind the tile, does so for all. Words are zero before the
    first tile and behind the last.

    Args:
        word_ptr: words [2, B, C].
        tile, tiles: number of the tile in the order that states travel, and how many there are.
        first: state before the first tile [1, BLOCK_C].
        CODE, CONSTRAINTS, PACK: :func:`exchange_code` of as many channels as a thread holds; "" in the interpreter,
            where programs run one after the other.
    """
    last_row = (tl.arange(0, BLOCK_O) == BLOCK_O - 1)[:, None] & mask_c[None, :]
    size = B.to(tl.int64) * C
    before_ptr = word_ptr + (tile + 1) % 2 * size + batch * C
    after_ptr = word_ptr + tile % 2 * size + batch * C
    offs = tl.broadcast_to(offs_c[None, :], (BLOCK_O, BLOCK_C))
    if CODE == "":
        word = tl.load(before_ptr + offs, mask=last_row & (tile > 0), other=0)
        state = tl.where(tile > 0, word.to(tl.int32).to(tl.float32, bitcast=True), tl.where(last_row, first, 0.0))
        after = tl.fma(after_a, state, after_b)
        word = (after.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | ((tile + 1).to(tl.int64) << 32)
        tl.store(after_ptr + offs, word, mask=last_row)
    else:
        number = tl.where(last_row, tile, -1)
        state = tl.inline_asm_elementwise(
            CODE,
            CONSTRAINTS,
            [(before_ptr + offs).to(tl.int64), (after_ptr + offs).to(tl.int64), number, first, after_a, after_b],
            dtype=tl.float32,
            is_pure=False,
            pack=PACK,
        )
    if tile == tiles - 1:
        tl.debug_barrier()
        tl.store(before_ptr + offs, tl.zeros(offs.shape, dtype=tl.int64), mask=last_row)
        tl.store(after_ptr + offs, tl.zeros(offs.shape, dtype=tl.int64), mask=last_row)
    return tl.sum(state, axis=0)[None, :]


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
