"""The parent's side of a worker process: what it says of a worker that does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from lrbench.bench import process
from lrbench.bench.protocol import encode_request
from lrbench.tests.bench import faults


def test_a_worker_that_does_not_answer_says_where_it_was() -> None:
    """The function that waits, and the one of this package that called it."""
    worker = process.WorkerProcess()
    request = encode_request(faults.planned("waits_in_another_module"), action="run", budget_s=0.0, shared=None)
    with pytest.raises(process.WorkerTimeoutError) as caught:
        worker.ask(request, 10.0)
    assert "no result within 10 s; it was in wait (" in str(caught.value)
    assert "called by waits_in_another_module (bench/faults.py:" in str(caught.value)


def test_a_worker_that_writes_no_stack_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = process.WorkerProcess()
    folder = Path(worker._folder.name)
    monkeypatch.setattr(process, "STACK_FILE", "another")
    with pytest.raises(process.WorkerTimeoutError, match=r"^no result within 0\.001 s$"):
        worker.ask(encode_request(faults.planned("hangs"), action="run", budget_s=0.0, shared=None), 0.001)
    assert not folder.exists()
