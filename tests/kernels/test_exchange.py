"""The words through which programs of a single pass pass states on: which calls share them, and their numbers."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lrbench.kernels.common import exchange

CPU = torch.device("cpu")
KEY = (CPU, 0, 1)


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_kept", {})


def test_calls_share_words_and_have_numbers_of_their_own() -> None:
    words, first = exchange._next_call(KEY, 8)
    assert first == 1 and words.numel() == 8 and words.dtype == torch.int64 and not words.any()
    for call, count in enumerate((8, 3, 8), start=2):
        again, number = exchange._next_call(KEY, count)
        assert again is words and number == call


def test_words_grow() -> None:
    """A larger buffer is zero, so its numbers may start again."""
    small, _ = exchange._next_call(KEY, 8)
    exchange._next_call(KEY, 8)
    large, call = exchange._next_call(KEY, 9)
    assert large is not small and large.numel() == 9 and not large.any() and call == 1
    assert exchange._next_call(KEY, 8) == (large, 2)


def test_numbers_that_run_out_start_afresh() -> None:
    words, _ = exchange._next_call(KEY, 8)
    words.fill_(-1)
    exchange._kept[KEY] = words, exchange.MAX_CALL - 1
    assert exchange._next_call(KEY, 8) == (words, 2**31 - 1)
    fresh, call = exchange._next_call(KEY, 8)
    assert fresh is not words and not fresh.any() and call == 1


def test_streams_and_widths_have_words_of_their_own() -> None:
    """Where a word of 64 bits holds its number, one of 128 bits holds a value."""
    keys = [KEY, (CPU, 1, 1), (CPU, 0, 2)]
    assert len({exchange._next_call(key, 8)[0].data_ptr() for key in keys}) == len(keys)


def test_words_unused_for_longest_go_first() -> None:
    keys = [(CPU, stream, 1) for stream in range(exchange.MAX_KEPT + 1)]
    for key in keys[:-1]:
        exchange._next_call(key, 8)
    exchange._next_call(keys[0], 8)
    exchange._next_call(keys[-1], 8)
    assert set(exchange._kept) == {*keys} - {keys[1]}


def test_threads_get_different_numbers() -> None:
    """As the forward pass and a backward pass in autograd's thread do, on one stream."""
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda n: exchange._next_call(KEY, 8 + n // 500), range(2000)))
    assert len({(words.data_ptr(), call) for words, call in taken}) == len(taken)
    # A buffer for each length: threads that ask for it at the same time get the same one.
    assert len({words.data_ptr() for words, _ in taken}) <= 4


def test_words_on_a_cpu_are_zero() -> None:
    """There is no stream on which calls would follow one another."""
    for _ in range(2):
        words, call = exchange.exchange_words(torch.empty(1), 8, width=2)
        assert words.numel() == 16 and not words.any() and call == 1
        words.fill_(-1)


def test_compiled_calls_keep_nothing() -> None:
    """Their memory may be a CUDA graph's. Other calls keep some all the same, also after one of them has failed."""
    x = torch.empty(1)
    assert exchange.keeping_nothing(exchange.stream_of)(x) is None
    with pytest.raises(AttributeError):
        exchange.keeping_nothing(exchange.stream_of)(None)  # type: ignore[arg-type]
    assert exchange.stream_of(x) == (x.device, 0)


@pytest.mark.gpu
def test_streams_large_requests_and_graphs_have_words_of_their_own_on_gpu() -> None:
    """One stream's calls share words; another stream, many words and a captured graph get others."""
    x = torch.empty(1, device="cuda")
    words, call = exchange.exchange_words(x, 8)
    again, number = exchange.exchange_words(x, 8)
    assert again is words and (call, number) == (1, 2)
    with torch.cuda.stream(torch.cuda.Stream()):
        other, call = exchange.exchange_words(x, 8)
    assert other is not words and call == 1
    many = exchange.MAX_KEPT_BYTES // 8
    assert exchange.exchange_words(x, many)[0] is exchange.exchange_words(x, many)[0]
    first, second = exchange.exchange_words(x, many + 1), exchange.exchange_words(x, many + 1)
    assert first[0] is not second[0] and first[1] == second[1] == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, call = exchange.exchange_words(x, 8)
        captured += 1
    for _ in range(2):
        graph.replay()
    assert call == 1 and torch.equal(captured, torch.ones_like(captured))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "calls"), [("wkv4", 5000), ("rglru", 2000)])
def test_many_calls_end_and_agree_on_gpu(name: str, calls: int) -> None:
    """If a state is lost or late between two programs in one of thousands of launches, a program waits forever or the
    result differs. The calls run in a process of their own, which can be ended even then."""
    command = [sys.executable, "-m", "lrbench.tests.tools.many_calls", name, str(calls)]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"{name}: {calls} calls took more than {late.timeout:.0f} s")
    assert finished.returncode == 0, finished.stdout + finished.stderr
