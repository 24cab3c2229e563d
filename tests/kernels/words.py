"""What tests of a single pass share: launches in the interpreter on words that earlier calls have written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lrbench.kernels.common import exchange


def give_words(launcher: ModuleType, call: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Let a module's launches have number ``call`` and words full of values under the number before, more than they
    need; return the list of the words [count, int32 values] of each launch and of those that it does not need."""
    given: list[tuple[Tensor, Tensor]] = []

    def exchange_words(x: Tensor, count: int, width: int = 1) -> tuple[Tensor, int]:
        words = torch.full((2 * count, 2 * width), 1, dtype=torch.int32)
        words[:, -1] = call - 1
        given.append((words[:count], words[count:]))
        return words.view(torch.int64), call

    monkeypatch.setattr(launcher, "exchange_words", exchange_words)
    return given


def check_shapes_share_words(
    launcher: ModuleType,
    evaluate: Callable[[dict[str, int]], Sequence[Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    launches: int,
) -> None:
    """Check that no pass takes what an earlier call, or its own forward pass, left in the words for one of its states.

    Args:
        evaluate: computes the same problem of these sizes each time, in so many ``launches`` that take words.
    """
    shapes = ((2, 27, 24), (1, 40, 16), (2, 19, 32))
    problems = [{"batch": batch, "seq_len": seq_len, "channels": channels} for batch, seq_len, channels in shapes]
    expected = [evaluate(sizes) for sizes in problems]
    calls: list[int] = []

    def exchange_words(x: Tensor, count: int, width: int = 1) -> tuple[Tensor, int]:
        """Share words between launches on the CPU, as those of one stream do."""
        words, call = exchange._next_call((x.device, 0, width), count * width)
        calls.append(call)
        return words, call

    monkeypatch.setattr(exchange, "_kept", {})
    monkeypatch.setattr(launcher, "exchange_words", exchange_words)
    for sizes, parts in zip(2 * problems, 2 * expected, strict=True):
        assert all(torch.equal(again, part) for again, part in zip(evaluate(sizes), parts, strict=True))
    assert calls == [*range(1, 1 + 2 * launches * len(problems))]
