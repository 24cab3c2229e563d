"""The choice of a chunk length balances programs against states, and the rows that are kept bear it out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lrbench.analysis.check.statistics import median
from lrbench.kernels import get_operation
from lrbench.kernels.scalar_decay import plan
from lrbench.kernels.scalar_decay.choice import (
    COSTS,
    backward_chunk,
    forward_chunk,
    time_us,
)
from lrbench.kernels.scalar_decay.launch import EngineRequest, choose
from lrbench.kernels.scalar_decay.plan import Sizes
from lrbench.tests.tools import fit_choice

SCHEMES = ("walk", "whole_state")


def shape(seq_len: int, rows: int, dims: tuple[int, int] = (128, 256), multiprocessors: int = 132) -> Sizes:
    return Sizes(
        seq_len=seq_len, batch_heads=rows, head_dim_qk=dims[0], head_dim_v=dims[1], multiprocessors=multiprocessors
    )  # fmt: skip


def whole_heads(made: Sizes, scheme: str, chunk: int, *, backward: bool = False) -> int:
    return plan.whole_heads(made, made.config(scheme, chunk), chunk, backward=backward)


def kept_chunk(made: Sizes, scheme: str, chunk: int) -> int:
    return plan.kept_chunk(made, made.config(scheme, chunk), chunk)


def default_backward_chunk(made: Sizes, scheme: str) -> int:
    return backward_chunk(made, scheme, kept_chunk(made, scheme, forward_chunk(made, scheme)))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dims", [(16, 16), (80, 160), (128, 256), (512, 512)])
def test_few_sequences_are_cut_and_many_are_not(scheme: str, dims: tuple[int, int]) -> None:
    """Several chunks where one row would leave the device idle, fewer of them for more rows, and of many rows at most
    those are cut that are left over."""
    for chosen_by in (forward_chunk, default_backward_chunk):
        chosen = [chosen_by(shape(32768, rows, dims), scheme) for rows in (1, 4, 16, 64)]
        assert chosen[0] < 8192
        assert chosen == sorted(chosen)
        many = shape(32768, 1024, dims)
        assert whole_heads(many, scheme, chosen_by(many, scheme)) > 900


def test_heads_are_cut_that_do_not_fill_the_device() -> None:
    """A device with 132 multiprocessors holds the states of 132 heads of 128/256, forward; dq and dk take no more."""
    whole = {rows: whole_heads(shape(8192, rows), "whole_state", 1024) for rows in (1, 131, 132, 200, 300)}
    assert whole == {1: 0, 131: 0, 132: 132, 200: 132, 300: 264}
    assert whole_heads(shape(8192, 200), "whole_state", 8192) == 200
    assert whole_heads(shape(8192, 200), "walk", 1024) == 0
    # Three programs a head forward, two of dq and dk; two programs on a multiprocessor for heads of 64.
    assert whole_heads(shape(8192, 100, (160, 320)), "whole_state", 64) == 88
    assert whole_heads(shape(8192, 100, (160, 320)), "whole_state", 64, backward=True) == 66
    assert whole_heads(shape(8192, 300, (64, 64)), "whole_state", 64) == 264
    # The kernel of the denominators needs every head's states.
    exp = replace(shape(8192, 100, (160, 320)), normalised=True)
    assert whole_heads(exp, "whole_state", 64) == 0


def test_slow_memory_makes_cuts_dear() -> None:
    """64 heads of 96/96 fill half of the device: reading keys and values once more may take longer than that loses."""
    fast = shape(8192, 64, (96, 96))
    slow = replace(fast, memory_rate=fast.memory_rate / 2)
    config = fast.config("whole_state", 2048)
    cut, whole = (sum(time_us(slow, config, n)) / sum(time_us(fast, config, n)) for n in (2048, 8192))
    assert cut > 1.5 > 1.2 > whole
    assert (forward_chunk(fast, "whole_state"), forward_chunk(slow, "whole_state")) == (2048, 8192)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_small_device_needs_no_cuts(scheme: str) -> None:
    lengths = [forward_chunk(shape(65536, 16, multiprocessors=number), scheme) for number in (264, 16)]
    assert lengths[0] < lengths[1] == 65536


def test_chunks_whose_tiles_are_all_computed_stay_short() -> None:
    """Where a chunk's tiles are all computed, work grows with its length, however many sequences there are."""
    found = [forward_chunk(shape(65536, 4096, dims), "sweep") for dims in ((16, 16), (64, 128), (512, 512))]
    assert found == [64, 128, 256]


def test_an_implementation_says_what_it_chooses() -> None:
    sizes = {"batch": 1, "seq_len": 65536, "num_heads": 16, "head_dim_qk": 128, "head_dim_v": 256}
    for op, made in (("mlstm_sig", shape(65536, 16)), ("mlstm_exp", replace(shape(65536, 16), normalised=True))):
        for impl, dtype, scheme in (
            ("fused_chunk", "bf16", "walk"), ("fused_chunk", "fp32", "sweep"), ("whole_state", "bf16", "whole_state"),
        ):  # fmt: skip
            assert get_operation(op).implementation(impl).chosen_chunk(sizes, dtype) == forward_chunk(made, scheme)


def test_a_backward_pass_chooses_for_itself() -> None:
    """Where few heads are cut forward into short chunks, the backward pass has too few programs for that; where a call
    names a chunk length, no chunk is longer."""
    q, v = (torch.empty(8, 2048, 6, dim, dtype=torch.bfloat16, device="meta") for dim in (192, 384))
    request = EngineRequest("sig", 1.0, 1.0, "whole_state", None, torch.float32, False)
    forward, backward = choose(request, q, v).launched, choose(request, q, v, backward=True).launched
    assert (forward.chunk, forward.whole, backward.chunk) == (256, 44, 2048)
    bound = choose(request._replace(chunk_size=forward.chunk), q, v, backward=True).launched
    assert (bound.chunk, bound.whole) == (256, 0)


def test_a_backward_pass_prefers_chunks_whose_states_are_kept() -> None:
    """One head of 16/16: chunks of 512 would be faster were their states there, but the forward pass keeps 1024's."""
    made = shape(131072, 1, (16, 16))
    assert default_backward_chunk(made, "walk") == forward_chunk(made, "walk") == 1024
    # It keeps none under torch.compile, and where they take much memory.
    assert backward_chunk(made, "walk", 512) == backward_chunk(made, "walk", 0) == 512
    large = shape(131072, 1, (128, 128))
    assert [kept_chunk(large, "whole_state", chunk) for chunk in (1024, 2048)] == [0, 2048]


@pytest.mark.parametrize("card", ["h200", "h100"])
def test_choices_lose_little(card: str) -> None:
    """Against the fastest chunk length of the same implementation, as `lrbench bars default-choice` measured them."""
    problems = list(fit_choice.read_times([Path(__file__).parent / f"default_choice_{card}.parquet"]).values())
    assert len(problems) >= 60
    for direction in (fit_choice.FORWARD, fit_choice.BACKWARD):
        lost = list(fit_choice.regrets(problems, COSTS, direction))
        assert len(lost) >= 90
        assert median(lost) <= 0.01
        assert max(lost) <= 0.1
